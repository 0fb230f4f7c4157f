//! A guest's kernel for tests: sends messages and takes replies apart.

use std::path::{Path, PathBuf};

use fuse_backend_rs::abi::fuse_abi::Opcode;

use crate::frame::{MAX_MESSAGE, REPLY_HEADER, REQUEST_HEADER, parse};
use crate::handler::{Handler, Share};

/// Length of a `fuse_entry_out`.
const ENTRY: usize = 128;

/// Bytes of a message, field by field.
#[derive(Default)]
pub(crate) struct Body(Vec<u8>);

impl Body {
    pub(crate) fn u32s(mut self, fields: &[u32]) -> Self {
        self.0.extend(fields.iter().flat_map(|field| field.to_ne_bytes()));
        self
    }

    pub(crate) fn u64s(mut self, fields: &[u64]) -> Self {
        self.0.extend(fields.iter().flat_map(|field| field.to_ne_bytes()));
        self
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// With the byte that ends it.
    pub(crate) fn name(self, name: &str) -> Self {
        self.bytes(name.as_bytes()).bytes(&[0])
    }
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) inode: u64,
}

/// A kernel that speaks about one directory.
pub(crate) struct Peer {
    handler: Handler,
    reply: Vec<u8>,
    /// User and group that ask.
    pub(crate) user: (u32, u32),
    pub(crate) root: PathBuf,
    _directory: tempfile::TempDir,
}

/// A message with its header.
pub(crate) fn message(opcode: Opcode, node: u64, (uid, gid): (u32, u32), body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(REQUEST_HEADER + body.len()).unwrap();
    Body::default()
        .u32s(&[length, opcode as u32])
        .u64s(&[9, node])
        .u32s(&[uid, gid, 0, 0])
        .bytes(body)
        .0
}

impl Peer {
    pub(crate) fn new() -> Self {
        Self::with(false)
    }

    pub(crate) fn with(read_only: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("shared");
        std::fs::create_dir(&root).unwrap();
        Self {
            handler: Share::at(&root, read_only).open().unwrap(),
            reply: vec![0; MAX_MESSAGE],
            user: (0, 0),
            root,
            _directory: directory,
        }
    }

    /// Sends a message about `node`; returns error and body of the reply.
    pub(crate) fn ask(&mut self, opcode: Opcode, node: u64, body: &[u8]) -> (i32, Vec<u8>) {
        let mut message = message(opcode, node, self.user, body);
        let header = parse(&message).unwrap();
        let length = self.handler.answer(header, &mut message, &mut self.reply);
        if length == 0 {
            return (0, Vec::new());
        }
        let reply = &self.reply[..length];
        assert_eq!(parse(reply).unwrap().length, length);
        assert_eq!(parse(reply).unwrap().unique, 9);
        let error = i32::from_ne_bytes(reply[4..8].try_into().unwrap());
        (-error, reply[REPLY_HEADER..].to_vec())
    }

    /// Sends a message that must succeed; returns the body of the reply.
    pub(crate) fn must(&mut self, opcode: Opcode, node: u64, body: Body) -> Vec<u8> {
        let (error, reply) = self.ask(opcode, node, &body.0);
        assert_eq!(error, 0, "{opcode:?}");
        reply
    }

    pub(crate) fn lookup(&mut self, node: u64, name: &str) -> (i32, u64) {
        let (error, body) = self.ask(Opcode::Lookup, node, format!("{name}\0").as_bytes());
        (error, if error == 0 { first(&body) } else { 0 })
    }

    /// Makes a file in the root and opens it; returns node and handle.
    pub(crate) fn create(&mut self, name: &str, flags: i32, mode: u32) -> (u64, u64) {
        let body = Body::default().u32s(&[flags.cast_unsigned(), mode, 0, 0]).name(name);
        let made = self.must(Opcode::Create, 1, body);
        (first(&made), first(&made[ENTRY..]))
    }

    pub(crate) fn write(&mut self, node: u64, handle: u64, flags: (u32, i32), bytes: &[u8]) -> u32 {
        let body = Body::default()
            .u64s(&[handle, 0])
            .u32s(&[u32::try_from(bytes.len()).unwrap(), flags.0])
            .u64s(&[0])
            .u32s(&[flags.1.cast_unsigned(), 0])
            .bytes(bytes);
        u32::from_ne_bytes(self.must(Opcode::Write, node, body)[..4].try_into().unwrap())
    }

    pub(crate) fn read(&mut self, node: u64, handle: u64, flags: i32, size: u32) -> Vec<u8> {
        let body = Body::default()
            .u64s(&[handle, 0])
            .u32s(&[size, 0])
            .u64s(&[0])
            .u32s(&[flags.cast_unsigned(), 0]);
        self.must(Opcode::Read, node, body)
    }

    /// Lists the root with messages of this size.
    pub(crate) fn list(&mut self, size: u32, plus: bool) -> Vec<Entry> {
        let handle = first(&self.must(Opcode::Opendir, 1, Body::default().u32s(&[0, 0])));
        let (opcode, before) = if plus {
            (Opcode::Readdirplus, ENTRY)
        } else {
            (Opcode::Readdir, 0)
        };
        let mut entries = Vec::new();
        let mut offset = 0u64;
        loop {
            let body = Body::default().u64s(&[handle, offset]).u32s(&[size, 0, 0, 0, 0, 0]);
            let listed = self.must(opcode, 1, body);
            assert!(listed.len() <= size as usize);
            if listed.is_empty() {
                self.must(Opcode::Releasedir, 1, Body::default().u64s(&[handle, 0, 0]));
                return entries;
            }
            let mut rest = listed.as_slice();
            while !rest.is_empty() {
                let entry = &rest[before..];
                offset = first(&entry[8..]);
                let length = u32::from_ne_bytes(entry[16..20].try_into().unwrap()) as usize;
                entries.push(Entry {
                    name: String::from_utf8(entry[24..24 + length].to_vec()).unwrap(),
                    inode: first(entry),
                });
                rest = &rest[before + (24 + length).next_multiple_of(8)..];
            }
        }
    }
}

/// The number at the beginning.
pub(crate) fn first(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes[..8].try_into().unwrap())
}

/// Whether a descriptor of this process leads to the file.
pub(crate) fn is_held(path: &Path) -> bool {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links
        .filter_map(|link| std::fs::read_link(link.path()).ok())
        .any(|target| target == path)
}
