//! Answers FUSE messages about one shared tree: fuse-backend-rs's passthrough, and around it what a hostile peer makes necessary.
//!
//! INIT is answered here: what is agreed on decides how much of what follows reaches us. Nothing is cached in the guest without asking, so
//! changes on either side are seen at once; locks are the guest's own.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{FsOptions, KERNEL_MINOR_VERSION, KERNEL_VERSION, Opcode};
use fuse_backend_rs::api::filesystem::FileSystem;
use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::passthrough::{CachePolicy, Config, PassthroughFs};
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader};

use crate::frame::{MAX_DATA, REPLY_HEADER, REQUEST_HEADER, RequestHeader, bare_reply};

/// Requests in the background that the guest may have open before it holds writers back.
const MAX_BACKGROUND: u16 = 64;
/// Length of `fuse_init_out`, in bytes.
const INIT_OUT: usize = 64;

/// What is agreed on with the guest's kernel, as far as it can.
fn wanted() -> FsOptions {
    FsOptions::ASYNC_READ
        | FsOptions::ATOMIC_O_TRUNC
        | FsOptions::BIG_WRITES
        | FsOptions::AUTO_INVAL_DATA
        | FsOptions::DO_READDIRPLUS
        | FsOptions::READDIRPLUS_AUTO
        | FsOptions::ASYNC_DIO
        | FsOptions::PARALLEL_DIROPS
        | FsOptions::MAX_PAGES
        | FsOptions::HANDLE_KILLPRIV_V2
}

/// A tree that is not served yet: made where `/proc` is still what it is.
pub struct Tree(PassthroughFs);

impl Tree {
    /// The tree that will be at `root`.
    ///
    /// # Errors
    /// `/proc/self` cannot be opened.
    pub fn new(root: &str) -> io::Result<Self> {
        let config = Config {
            root_dir: root.to_owned(),
            attr_timeout: Duration::ZERO,
            entry_timeout: Duration::ZERO,
            cache_policy: CachePolicy::Auto,
            writeback: false,
            xattr: true,
            killpriv_v2: true,
            // Without it the names of created files would not be checked.
            do_import: true,
            // Two mounts of one file are two files, as they are to the kernel.
            enable_mntid: true,
            ..Config::default()
        };
        PassthroughFs::new(config).map(Self)
    }

    /// Opens the root.
    ///
    /// # Errors
    /// There is nothing at its place.
    pub fn open(self) -> io::Result<Handler> {
        self.0.init(FsOptions::HANDLE_KILLPRIV_V2)?;
        Ok(Handler {
            server: Server::new(self.0),
            nowhere: File::options().write(true).open("/null")?,
        })
    }
}

/// Answers messages; any number of threads at once.
pub struct Handler {
    server: Server<PassthroughFs>,
    /// Where the library writes replies that are taken from its buffer instead.
    nowhere: File,
}

impl Handler {
    /// A handler for tests, outside of a jail.
    #[cfg(test)]
    pub(crate) fn for_test(root: &std::path::Path) -> Self {
        let tree = Tree::new(root.to_str().unwrap()).unwrap();
        tree.0.init(FsOptions::HANDLE_KILLPRIV_V2).unwrap();
        Self {
            server: Server::new(tree.0),
            nowhere: File::options().write(true).open("/dev/null").unwrap(),
        }
    }

    /// Answers `message`, whose header is `header`, into `reply`; returns the reply's length, 0 if there is none.
    pub fn answer(&self, header: RequestHeader, message: &mut [u8], reply: &mut [u8]) -> usize {
        let bare = |reply: &mut [u8], error| {
            let bytes = bare_reply(header.unique, error);
            reply.get_mut(..REPLY_HEADER).map_or(0, |place| {
                place.copy_from_slice(&bytes);
                REPLY_HEADER
            })
        };
        match Opcode::from(header.opcode) {
            Opcode::Init => return init(header, message, reply).unwrap_or_else(|| bare(reply, libc::EPROTO)),
            // What it held is given up when the stream ends.
            Opcode::Destroy => return bare(reply, 0),
            Opcode::Lookup if is_dots(message) => return bare(reply, libc::EINVAL),
            _ => {}
        }
        let entries = match Opcode::from(header.opcode) {
            Opcode::Readdir => crate::dots::take(message, false),
            Opcode::Readdirplus => crate::dots::take(message, true),
            _ => Vec::new(),
        };
        let silent = matches!(
            Opcode::from(header.opcode),
            Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt | Opcode::NotifyReply
        );
        if let Some(length) = reply.get_mut(..4) {
            length.fill(0);
        }
        // Nothing that a guest sends may end the process: another volume of the same guest would end with it.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.pass(message, reply)));
        if silent {
            return 0;
        }
        if outcome.is_err() {
            return bare(reply, libc::EIO);
        }
        let written = reply
            .get(..4)
            .and_then(|bytes| usize::try_from(u32::from_ne_bytes(bytes.try_into().ok()?)).ok())
            .unwrap_or(0);
        if (REPLY_HEADER..=reply.len()).contains(&written) {
            crate::dots::put(&entries, reply, written)
        } else {
            bare(reply, libc::EINVAL)
        }
    }

    /// Has the library answer into `reply`. Its writer is split first, for then it keeps what it writes in the buffer.
    fn pass(&self, message: &mut [u8], reply: &mut [u8]) {
        let Ok(mut whole) = FuseDevWriter::<()>::new(self.nowhere.as_raw_fd(), reply) else {
            return;
        };
        let (Ok(writer), Ok(reader)) = (whole.split_at(0), Reader::<()>::from_fuse_buffer(FuseBuf::new(message)))
        else {
            return;
        };
        // An error here is one of the message, and whoever sent it gets one.
        let _ = self.server.handle_message(reader, writer.into(), None, None);
    }
}

/// Whether a LOOKUP asks for a directory's own name or its parent. No kernel of ours does, for files are not exported.
fn is_dots(message: &[u8]) -> bool {
    let name = message.get(REQUEST_HEADER..).unwrap_or_default();
    let name = name.split(|&b| b == 0).next().unwrap_or_default();
    name == b"." || name == b".."
}

/// Agrees on a protocol version and its features.
fn init(header: RequestHeader, message: &[u8], reply: &mut [u8]) -> Option<usize> {
    let number = |at: usize| -> Option<u32> {
        let at = REQUEST_HEADER + at;
        Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?))
    };
    let (major, minor, flags) = (number(0)?, number(4)?, number(12)?);
    if major != KERNEL_VERSION || minor < KERNEL_MINOR_VERSION {
        return None;
    }
    let mut offered = u64::from(flags);
    if offered & FsOptions::INIT_EXT.bits() != 0 {
        offered |= u64::from(number(16)?) << 32;
    }
    let agreed = (FsOptions::from_bits_truncate(offered) & wanted()).bits();
    let low = u32::try_from(agreed & u64::from(u32::MAX)).ok()?;
    let max_data = u32::try_from(MAX_DATA).ok()?;
    let mut out = Vec::with_capacity(REPLY_HEADER + INIT_OUT);
    out.extend_from_slice(&bare_reply(header.unique, 0));
    // As much as is allowed may be read ahead; what is wise, the guest knows.
    for field in [KERNEL_VERSION, KERNEL_MINOR_VERSION, max_data, low] {
        out.extend_from_slice(&field.to_ne_bytes());
    }
    for field in [MAX_BACKGROUND, MAX_BACKGROUND / 4 * 3] {
        out.extend_from_slice(&field.to_ne_bytes());
    }
    // max_write, and the granularity of times in nanoseconds.
    for field in [max_data, 1] {
        out.extend_from_slice(&field.to_ne_bytes());
    }
    let pages = u16::try_from(MAX_DATA / 4096).ok()?;
    out.extend_from_slice(&pages.to_ne_bytes());
    out.resize(REPLY_HEADER + INIT_OUT, 0);
    let length = u32::try_from(out.len()).ok()?;
    out.get_mut(..4)?.copy_from_slice(&length.to_ne_bytes());
    reply.get_mut(..out.len())?.copy_from_slice(&out);
    Some(out.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{MAX_MESSAGE, parse};
    use proptest::prelude::*;

    struct Peer {
        handler: Handler,
        reply: Vec<u8>,
        _directory: tempfile::TempDir,
        root: std::path::PathBuf,
    }

    impl Peer {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let root = directory.path().join("shared");
            std::fs::create_dir(&root).unwrap();
            Self {
                handler: Handler::for_test(&root),
                reply: vec![0; MAX_MESSAGE],
                _directory: directory,
                root,
            }
        }

        /// Sends a message about `node`; returns error and body of the reply.
        fn ask(&mut self, opcode: Opcode, node: u64, body: &[u8]) -> (i32, Vec<u8>) {
            let mut message = vec![0; REQUEST_HEADER];
            let length = u32::try_from(REQUEST_HEADER + body.len()).unwrap();
            message[0..4].copy_from_slice(&length.to_ne_bytes());
            message[4..8].copy_from_slice(&(opcode as u32).to_ne_bytes());
            message[8..16].copy_from_slice(&9u64.to_ne_bytes());
            message[16..24].copy_from_slice(&node.to_ne_bytes());
            message.extend_from_slice(body);
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

        fn lookup(&mut self, node: u64, name: &str) -> (i32, u64) {
            let (error, body) = self.ask(Opcode::Lookup, node, format!("{name}\0").as_bytes());
            let found = body.get(..8).map_or(0, |b| u64::from_ne_bytes(b.try_into().unwrap()));
            (error, found)
        }

        fn list(&mut self, size: u32) -> Vec<String> {
            let (error, opened) = self.ask(Opcode::Opendir, 1, &[0; 8]);
            assert_eq!(error, 0);
            let mut names = Vec::new();
            let mut offset = 0u64;
            loop {
                let mut body = opened[..8].to_vec();
                body.extend(offset.to_ne_bytes());
                body.extend(size.to_ne_bytes());
                body.resize(40, 0);
                let (error, listed) = self.ask(Opcode::Readdir, 1, &body);
                assert_eq!(error, 0);
                assert!(listed.len() <= size as usize);
                if listed.is_empty() {
                    return names;
                }
                let mut rest = listed.as_slice();
                while !rest.is_empty() {
                    offset = u64::from_ne_bytes(rest[8..16].try_into().unwrap());
                    let length = u32::from_ne_bytes(rest[16..20].try_into().unwrap()) as usize;
                    names.push(String::from_utf8(rest[24..24 + length].to_vec()).unwrap());
                    rest = &rest[(24 + length).next_multiple_of(8)..];
                }
            }
        }
    }

    #[test]
    fn init_agrees_on_large_messages_and_no_caches() {
        let mut peer = Peer::new();
        let mut body = Vec::new();
        for field in [7u32, 41, 1 << 17, u32::MAX] {
            body.extend(field.to_ne_bytes());
        }
        body.resize(64, 0);
        let (error, out) = peer.ask(Opcode::Init, 0, &body);
        assert_eq!((error, out.len()), (0, INIT_OUT));
        let flags = FsOptions::from_bits_truncate(u64::from(u32::from_ne_bytes(out[12..16].try_into().unwrap())));
        assert!(flags.contains(FsOptions::MAX_PAGES | FsOptions::AUTO_INVAL_DATA));
        assert!(!flags.intersects(FsOptions::WRITEBACK_CACHE | FsOptions::POSIX_LOCKS | FsOptions::EXPORT_SUPPORT));
        assert_eq!(u32::from_ne_bytes(out[20..24].try_into().unwrap()) as usize, MAX_DATA);
        let (error, _) = peer.ask(Opcode::Init, 0, &[0; 4]);
        assert_eq!(error, libc::EPROTO);
    }

    #[test]
    fn nothing_outside_can_be_reached() {
        let mut peer = Peer::new();
        std::fs::write(peer.root.join("../secret"), "x").unwrap();
        std::os::unix::fs::symlink("../secret", peer.root.join("link")).unwrap();
        std::fs::create_dir(peer.root.join("inside")).unwrap();
        let (error, inside) = peer.lookup(1, "inside");
        assert_eq!(error, 0);
        for name in ["..", ".", "../secret", "inside/../../secret", "/etc", "inside/.."] {
            for node in [1, inside] {
                let (error, _) = peer.lookup(node, name);
                assert_ne!(error, 0, "{name}");
            }
        }
        let (error, link) = peer.lookup(1, "link");
        assert_eq!(error, 0);
        assert_ne!(peer.ask(Opcode::Open, link, &[0; 8]).0, 0, "a link was followed");
        let (_, target) = peer.ask(Opcode::Readlink, link, b"");
        assert_eq!(target, b"../secret");
    }

    #[test]
    fn a_silent_refusal_still_gets_an_answer() {
        let mut peer = Peer::new();
        for opcode in [
            Opcode::Lookup,
            Opcode::Write,
            Opcode::Setattr,
            Opcode::Rename2,
            Opcode::Getxattr,
        ] {
            assert_ne!(peer.ask(opcode, 1, b"").0, 0, "{opcode:?}");
        }
    }

    #[test]
    fn listings_are_whole_at_any_size() {
        let mut peer = Peer::new();
        for number in 0..40 {
            std::fs::write(peer.root.join(format!("file-{number}")), "").unwrap();
        }
        for size in [64, 72, 100, 4096, 65536] {
            let mut names = peer.list(size);
            assert_eq!(names[..2], [".", ".."]);
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), 42, "size {size}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn no_message_can_hurt(opcode in 1u32..60, node in 0u64..4, body in prop::collection::vec(any::<u8>(), 0..128)) {
            let mut peer = Peer::new();
            std::fs::write(peer.root.join("a"), "content").unwrap();
            let outside = peer.root.join("../outside");
            std::fs::write(&outside, "untouched").unwrap();
            let _ = peer.lookup(1, "a");
            let _ = peer.ask(Opcode::from(opcode), node, &body);
            prop_assert_eq!(std::fs::read(&outside).unwrap(), b"untouched");
            let (error, _) = peer.lookup(1, "nothing");
            prop_assert_eq!(error, libc::ENOENT);
        }
    }
}
