//! Answers FUSE messages about one shared tree: fuse-backend-rs's passthrough, and around it what a hostile peer makes necessary.
//!
//! INIT is answered here: what is agreed on decides how much of what follows reaches us. Nothing is cached in the guest without asking, so
//! changes on either side are seen at once; locks are the guest's own.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{FsOptions, KERNEL_MINOR_VERSION, KERNEL_VERSION, Opcode};
use fuse_backend_rs::api::filesystem::FileSystem;
use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::passthrough::{CachePolicy, Config, PassthroughFs};
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader};

use crate::check::check;
use crate::control::Volume;
use crate::frame::{MAX_DATA, REPLY_HEADER, REQUEST_HEADER, RequestHeader, bare_reply};
use crate::listing;

/// Requests in the background that the guest may have open before it holds writers back.
const MAX_BACKGROUND: u16 = 64;
/// The library can tell so many mounts apart by inode numbers of the host; a few less, as it never forgets one.
const MOUNTS_MAX: usize = 200;
/// How often a listing is tried again when an entry disappears meanwhile.
const LISTING_ATTEMPTS: usize = 16;
/// Takes what is written and keeps nothing; tests run outside of the jail.
const NOWHERE: &str = if cfg!(test) { "/dev/null" } else { "/null" };
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

/// A tree that can be served: a directory or file in the jail.
#[derive(Clone, Debug)]
pub struct Share {
    root: String,
    read_only: bool,
    follows_host: bool,
}

impl Share {
    /// The volume with this number.
    pub(crate) fn new(number: usize, volume: &Volume) -> Self {
        Self {
            root: format!("/{number}"),
            read_only: volume.read_only,
            follows_host: volume.follows_host,
        }
    }

    /// Any directory, outside of a jail.
    #[cfg(test)]
    pub(crate) fn at(root: &std::path::Path, read_only: bool) -> Self {
        Self {
            root: root.to_str().unwrap().to_owned(),
            read_only,
            follows_host: false,
        }
    }

    /// Its path in the jail.
    pub(crate) fn root(&self) -> &str {
        &self.root
    }

    /// Something that answers for it, and knows nothing of the files that another one has given out.
    ///
    /// # Errors
    /// It is not there, or descriptors are short.
    pub fn open(&self) -> io::Result<Handler> {
        let mounts = fs::read("/proc/self/mountinfo")?;
        let few_mounts = !self.follows_host && mounts.iter().filter(|&&b| b == b'\n').count() < MOUNTS_MAX;
        let config = Config {
            root_dir: self.root.clone(),
            attr_timeout: Duration::ZERO,
            entry_timeout: Duration::ZERO,
            cache_policy: CachePolicy::Auto,
            writeback: false,
            xattr: true,
            killpriv_v2: true,
            // Without it the names of created files would not be checked.
            do_import: true,
            // Else it remembers every file that there ever was, some 60 bytes each.
            use_host_ino: few_mounts,
            ..Config::default()
        };
        let tree = PassthroughFs::new(config)?;
        tree.init(FsOptions::HANDLE_KILLPRIV_V2)?;
        Ok(Handler {
            server: Server::new(tree),
            nowhere: File::options().write(true).open(NOWHERE)?,
            read_only: self.read_only,
        })
    }
}

/// Answers messages; any number of threads at once. What it holds for the guest is given up with it.
pub struct Handler {
    server: Server<PassthroughFs>,
    /// Where the library writes replies that are taken from its buffer instead.
    nowhere: File,
    read_only: bool,
}

impl Handler {
    /// Answers `message`, whose header is `header`, into `reply`; returns the reply's length, 0 if there is none.
    pub fn answer(&self, header: RequestHeader, message: &mut [u8], reply: &mut [u8]) -> usize {
        let bare = |reply: &mut [u8], error| {
            let bytes = bare_reply(header.unique, error);
            reply.get_mut(..REPLY_HEADER).map_or(0, |place| {
                place.copy_from_slice(&bytes);
                REPLY_HEADER
            })
        };
        let opcode = Opcode::from(header.opcode);
        match opcode {
            Opcode::Init => return init(header, message, reply).unwrap_or_else(|| bare(reply, libc::EPROTO)),
            // What it held is given up when the stream ends.
            Opcode::Destroy => return bare(reply, 0),
            Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt | Opcode::NotifyReply => {
                self.pass(message, reply);
                return 0;
            }
            _ => {}
        }
        if let Err(error) = check(opcode, message, self.read_only) {
            return bare(reply, error);
        }
        let (listing, plus) = (matches!(opcode, Opcode::Readdir), matches!(opcode, Opcode::Readdirplus));
        let entries = if listing || plus {
            listing::take(message, plus)
        } else {
            Vec::new()
        };
        // An entry that is gone before its attributes were read makes the library give up; next time it is not listed.
        let attempts = if listing || plus { LISTING_ATTEMPTS } else { 1 };
        for _ in 0..attempts {
            if !self.pass(message, reply) {
                return bare(reply, libc::EIO);
            }
            if reply.get(4..8) != Some(&(-libc::ENOENT).to_ne_bytes()) {
                break;
            }
        }
        let written = reply
            .get(..4)
            .and_then(|bytes| usize::try_from(u32::from_ne_bytes(bytes.try_into().ok()?)).ok())
            .unwrap_or(0);
        if !(REPLY_HEADER..=reply.len()).contains(&written) {
            return bare(reply, libc::EINVAL);
        }
        if listing {
            listing::show_inodes(reply.get_mut(..written).unwrap_or_default());
        }
        listing::put(&entries, reply, written)
    }

    /// Has the library answer into `reply`, which begins with a length of 0 if it does not. `false`: it gave up with a panic.
    fn pass(&self, message: &mut [u8], reply: &mut [u8]) -> bool {
        if let Some(length) = reply.get_mut(..4) {
            length.fill(0);
        }
        // Nothing that a guest sends may end the process: another volume of the same guest would end with it.
        std::panic::catch_unwind(AssertUnwindSafe(|| self.ask(message, reply))).is_ok()
    }

    /// Has the library answer. Its writer is split first, for then it keeps what it writes in the buffer.
    fn ask(&self, message: &mut [u8], reply: &mut [u8]) {
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
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Body, Entry, Peer};

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
        fs::write(peer.root.join("../secret"), "x").unwrap();
        std::os::unix::fs::symlink("../secret", peer.root.join("link")).unwrap();
        fs::create_dir(peer.root.join("inside")).unwrap();
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
    fn listings_are_whole_at_any_size_and_show_the_inodes_of_the_host() {
        let mut peer = Peer::new();
        let mut expected = Vec::new();
        for number in 0..40 {
            let name = format!("file-{number}");
            fs::write(peer.root.join(&name), "").unwrap();
            let inode = fs::metadata(peer.root.join(&name)).unwrap().ino();
            expected.push(Entry { name, inode });
        }
        expected.sort();
        for (size, plus) in [
            (64, false),
            (72, false),
            (100, false),
            (65536, false),
            (600, true),
            (65536, true),
        ] {
            let mut entries = peer.list(size, plus);
            assert_eq!((entries[0].name.as_str(), entries[1].name.as_str()), (".", ".."));
            let mut entries = entries.split_off(2);
            entries.sort();
            assert_eq!(entries, expected, "size {size}");
        }
    }

    #[test]
    fn a_listing_goes_on_when_files_disappear() {
        let mut peer = Peer::new();
        let root = peer.root.clone();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0.. {
                    if stop.load(std::sync::atomic::Ordering::Relaxed) {
                        break;
                    }
                    let path = root.join(format!("comes and goes {}", number % 50));
                    fs::write(&path, "").unwrap();
                    fs::remove_file(&path).unwrap();
                }
            });
            for round in 0..3000 {
                peer.list(4096, round % 2 == 0);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn direct_io_needs_no_alignment() {
        let mut peer = Peer::new();
        let direct = libc::O_RDWR | libc::O_DIRECT;
        let (node, handle) = peer.create("file", direct, 0o600);
        assert_eq!(peer.write(node, handle, (0, direct), b"five."), 5);
        assert_eq!(peer.read(node, handle, direct, 100), b"five.");
    }

    #[test]
    fn what_is_read_only_cannot_be_changed_by_any_message() {
        let mut peer = Peer::with(true);
        fs::write(peer.root.join("file"), "kept").unwrap();
        let (_, file) = peer.lookup(1, "file");
        let refused =
            |peer: &mut Peer, opcode, node, body: &[u8]| assert_eq!(peer.ask(opcode, node, body).0, libc::EROFS);
        refused(&mut peer, Opcode::Unlink, 1, b"file\0");
        refused(&mut peer, Opcode::Open, file, &libc::O_TRUNC.to_ne_bytes());
        refused(&mut peer, Opcode::Setattr, file, &[0; 88]);
        let opened = peer.must(Opcode::Open, file, Body::default().u32s(&[0, 0]));
        assert_eq!(peer.read(file, crate::testing::first(&opened), 0, 100), b"kept");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn no_message_can_hurt(opcode in 1u32..60, node in 0u64..4, body in prop::collection::vec(any::<u8>(), 0..128)) {
            let mut peer = Peer::new();
            fs::write(peer.root.join("a"), "content").unwrap();
            let outside = peer.root.join("../outside");
            fs::write(&outside, "untouched").unwrap();
            let _ = peer.lookup(1, "a");
            let _ = peer.ask(Opcode::from(opcode), node, &body);
            prop_assert_eq!(fs::read(&outside).unwrap(), b"untouched");
            let (error, _) = peer.lookup(1, "nothing");
            prop_assert_eq!(error, libc::ENOENT);
        }
    }
}
