//! Locks the process in before a guest speaks to it: its root directory holds the shared trees and nothing else of the host, and it
//! keeps only the privileges that give files their owners.

use std::fs;
use std::io;
use std::path::Path;

use caps::{CapSet, Capability, CapsHashSet};
use mounts::{Restrictions, Tree};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use nix::unistd::{chdir, pivot_root};

use crate::control::{Config, Volume};
use crate::handler::Share;
use crate::sys;

/// What a call needs that makes files for any user, and changes those of any user. Not `MKNOD`: no guest makes devices of the host.
/// `DAC_READ_SEARCH` is for hard links to a file of which only a descriptor is known; what else it is good for, the filter forbids.
const KEPT: [Capability; 8] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_SETFCAP,
    Capability::CAP_SETGID,
    Capability::CAP_SETUID,
];

/// Most descriptors: one for each file that the guest's kernel knows, and one for each that it has open.
const MOST_FILES: rlim_t = 1 << 20;

/// Why the process is not locked in.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// A source.
    #[error("share {path}: {source}")]
    Source {
        /// Of the host.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// Something else.
    #[error("lock in the server of volumes: {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> JailError {
    move |error| JailError::System {
        what,
        source: error.into(),
    }
}

/// Locks this process in; call it before it has threads. Returns what is to be served, by number.
///
/// # Errors
/// When a source cannot be shared or a step fails; the process must not go on then.
pub fn enter(config: &Config) -> Result<Vec<Share>, JailError> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(system("limit core size"))?;
    raise_file_limit().map_err(system("raise limit of files"))?;
    // The shim's parent protects it; what a guest makes us hold is no reason to end anything else.
    fs::write("/proc/self/oom_score_adj", "0").map_err(system("give up protection when memory is short"))?;
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    unshare(flags).map_err(system("make namespaces"))?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(system("leave the host's mounts"))?;
    let shares: Vec<Share> = (0..).zip(&config.volumes).map(|(n, v)| Share::new(n, v)).collect();
    new_root(config, &shares)?;
    // What cannot be served is to be known now, not when the guest asks.
    for share in &shares {
        share.open().map_err(system("open a volume"))?;
    }
    drop_privileges()?;
    Ok(shares)
}

/// As many as are allowed, and as many as may be needed where that is up to us.
fn raise_file_limit() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let most = fs::read_to_string("/proc/sys/fs/nr_open").ok();
    let most = most.and_then(|text| text.trim().parse().ok()).unwrap_or(hard);
    let wanted = MOST_FILES.min(most);
    setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).or_else(|_| {
        let allowed = hard.min(wanted);
        setrlimit(Resource::RLIMIT_NOFILE, allowed, allowed)
    })?;
    Ok(())
}

/// Moves into a read-only directory with the sources, each under its name, a place to throw things away, our own descriptors and mounts.
fn new_root(config: &Config, shares: &[Share]) -> Result<(), JailError> {
    let failed = |volume: &Volume| {
        let path = volume.source.display().to_string();
        move |source: io::Error| JailError::Source { path, source }
    };
    let mut sources = Vec::new();
    for volume in &config.volumes {
        let is_dir = fs::metadata(&volume.source).map_err(failed(volume))?.is_dir();
        sources.push((is_dir, open_source(volume).map_err(failed(volume))?));
    }
    let copy = |path: &str| Tree::copy(Path::new(path), false);
    let descriptors = copy("/proc/self/fd").map_err(system("open /proc/self/fd"))?;
    let mounts = copy("/proc/self/mountinfo").map_err(system("open /proc/self/mountinfo"))?;
    let null = copy("/dev/null").map_err(system("open /dev/null"))?;
    // Any directory will do as the place of the new root; this one is there on every Linux.
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("ramet-volumes"), "/proc", Some("tmpfs"), flags, Some("mode=755")).map_err(system("mount a root"))?;
    chdir("/proc").map_err(system("enter the root"))?;
    let place = |tree: &Tree, name: &str, is_dir: bool| {
        let path = Path::new(name.trim_start_matches('/'));
        if is_dir {
            fs::create_dir_all(path)?;
        } else {
            fs::File::create(path)?;
        }
        tree.mount(path)
    };
    for ((is_dir, tree), (share, volume)) in sources.iter().zip(shares.iter().zip(&config.volumes)) {
        place(tree, share.root(), *is_dir).map_err(failed(volume))?;
    }
    place(&descriptors, "proc/self/fd", true).map_err(system("mount /proc/self/fd"))?;
    place(&mounts, "proc/self/mountinfo", false).map_err(system("mount /proc/self/mountinfo"))?;
    place(&null, "null", false).map_err(system("mount /dev/null"))?;
    // Both paths the same: the old root ends up on top of the new one and is taken off.
    pivot_root(".", ".").map_err(system("change root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(system("leave the old root"))?;
    chdir("/").map_err(system("enter the root"))?;
    let none: Option<&str> = None;
    let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, "/", none, flags, none).map_err(system("protect the root"))
}

fn open_source(volume: &Volume) -> io::Result<Tree> {
    let tree = Tree::copy(&volume.source, volume.recursive)?;
    if !volume.follows_host {
        tree.make_private()?;
    }
    let mut restrictions = Restrictions::NO_SUID
        .with(Restrictions::NO_DEVICES)
        .with(Restrictions::NO_EXEC);
    if volume.read_only {
        restrictions = restrictions.with(Restrictions::READ_ONLY);
    }
    tree.restrict(restrictions)?;
    Ok(tree)
}

fn drop_privileges() -> Result<(), JailError> {
    keep_only_what_files_need()?;
    let filter = |error: seccompiler::Error| io::Error::other(error.to_string());
    crate::seccomp::install()
        .map_err(filter)
        .map_err(system("filter system calls"))
}

/// Of this thread, and those that it will start.
pub(crate) fn keep_only_what_files_need() -> Result<(), JailError> {
    prctl::set_no_new_privs().map_err(system("give up new privileges"))?;
    // A call on behalf of a user keeps what the guest's kernel has granted already.
    sys::keep_capabilities_of_users().map_err(system("keep capabilities"))?;
    let capability = |error: caps::errors::CapsError| io::Error::other(error.to_string());
    for one in caps::all() {
        if !KEPT.contains(&one) {
            // One that this kernel does not know cannot be dropped.
            let _ = caps::drop(None, CapSet::Bounding, one);
        }
    }
    let kept: CapsHashSet = KEPT.into_iter().collect();
    let none = CapsHashSet::new();
    let sets = [
        (CapSet::Ambient, &none),
        (CapSet::Effective, &kept),
        (CapSet::Permitted, &kept),
        (CapSet::Inheritable, &none),
    ];
    for (set, wanted) in sets {
        caps::set(None, set, wanted)
            .map_err(capability)
            .map_err(system("drop capabilities"))?;
    }
    prctl::set_dumpable(false).map_err(system("forbid tracing"))
}

#[cfg(test)]
mod tests {
    use fuse_backend_rs::abi::fuse_abi::Opcode;

    use super::*;
    use crate::testing::{Body, Peer, first};

    /// A filter that forbids something needed would end this process. Whoever asks is another user each time, whose threads and
    /// files get credentials of their own.
    fn use_all_there_is(peer: &mut Peer) {
        peer.user = (1000, 1000);
        let read_write = libc::O_RDWR;
        let (file, handle) = peer.create("file", read_write, 0o4755);
        peer.user = (2000, 2000);
        assert_eq!(peer.write(file, handle, (4, read_write), b"content"), 7);
        assert_eq!(peer.read(file, handle, read_write, 100), b"content");
        peer.must(Opcode::Link, 1, Body::default().u64s(&[file]).name("hard"));
        let directory = first(&peer.must(Opcode::Mkdir, 1, Body::default().u32s(&[0o755, 0]).name("dir")));
        let link = first(&peer.must(Opcode::Symlink, 1, Body::default().name("link").name("hard")));
        assert_eq!(peer.must(Opcode::Readlink, link, Body::default()), b"hard");
        let fifo = libc::S_IFIFO | 0o600;
        peer.must(Opcode::Mknod, 1, Body::default().u32s(&[fifo, 0, 0, 0]).name("fifo"));
        let device = Body::default().u32s(&[libc::S_IFCHR | 0o600, 0x105, 0, 0]).name("zero");
        assert_eq!(peer.ask(Opcode::Mknod, 1, &device.into_bytes()).0, libc::EPERM);
        let both = Body::default().name("hard").name("moved");
        let rename = Body::default()
            .u64s(&[directory])
            .u32s(&[1, 0])
            .bytes(&both.into_bytes());
        peer.must(Opcode::Rename2, 1, rename);
        // Mode, owner, group, size and times.
        let change = |valid| {
            Body::default()
                .u32s(&[valid, 0])
                .u64s(&[handle, 3, 0, 1, 2, 3])
                .u32s(&[0; 3])
        };
        let mine = [0o640, 0, 7, 8, 0];
        for valid in [1 | 2 | 4 | 8 | 16 | 32, 1 | 2 | 4 | 8 | 16 | 32 | 64] {
            peer.must(Opcode::Setattr, file, change(valid).u32s(&mine));
        }
        peer.must(
            Opcode::Setxattr,
            file,
            Body::default().u32s(&[1, 0]).name("user.x").bytes(b"y"),
        );
        assert_eq!(
            peer.must(Opcode::Getxattr, file, Body::default().u32s(&[9, 0]).name("user.x")),
            b"y"
        );
        assert_eq!(
            peer.must(Opcode::Listxattr, file, Body::default().u32s(&[99, 0])),
            b"user.x\0"
        );
        peer.must(Opcode::Removexattr, file, Body::default().name("user.x"));
        peer.must(
            Opcode::Fallocate,
            file,
            Body::default().u64s(&[handle, 0, 4096]).u32s(&[0, 0]),
        );
        peer.must(Opcode::Lseek, file, Body::default().u64s(&[handle, 0]).u32s(&[0, 0]));
        for opcode in [Opcode::Fsync, Opcode::Flush] {
            peer.must(opcode, file, Body::default().u64s(&[handle, 0, 0]));
        }
        peer.must(Opcode::Getattr, file, Body::default().u64s(&[0, 0]));
        peer.must(Opcode::Statfs, file, Body::default());
        assert!(peer.list(4096, false).len() >= 6 && peer.list(4096, true).len() >= 6);
        peer.must(Opcode::Release, file, Body::default().u64s(&[handle, 0, 0]));
        peer.must(Opcode::Unlink, directory, Body::default().name("moved"));
        peer.must(Opcode::Rmdir, 1, Body::default().name("dir"));
        peer.ask(Opcode::Forget, file, &1u64.to_ne_bytes());
    }

    #[test]
    fn threads_that_are_locked_in_can_do_all_that_a_guest_may_ask() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: it needs root");
            return;
        }
        let peer = Peer::new();
        let locked_in = std::thread::spawn(move || {
            drop_privileges().unwrap();
            let mut peers = vec![peer];
            // Descriptors of one thread's credentials are used by another.
            for _ in 0..2 {
                let mut peer = peers.pop().unwrap();
                let inner = std::thread::Builder::new().name("inner".into()).spawn(move || {
                    use_all_there_is(&mut peer);
                    let (_, file) = peer.lookup(1, "file");
                    (peer, file)
                });
                let (mut peer, file) = inner.unwrap().join().unwrap();
                peer.must(Opcode::Link, 1, Body::default().u64s(&[file]).name("again"));
                for name in ["again", "file", "link", "fifo"] {
                    peer.must(Opcode::Unlink, 1, Body::default().name(name));
                }
                peers.push(peer);
            }
            peers
        });
        drop(locked_in.join().unwrap());
    }
}
