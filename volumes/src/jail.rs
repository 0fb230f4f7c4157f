//! Locks the process in before a guest speaks to it: its root directory holds the shared trees and nothing else of the host, and it
//! keeps only the privileges that give files their owners.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use caps::{CapSet, Capability, CapsHashSet};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{chdir, pivot_root};

use crate::control::{Config, Volume};
use crate::handler::{Handler, Tree};
use crate::sys;

/// What a call needs that makes files for any user, and changes those of any user. Not `MKNOD`: no guest makes devices of the host.
const KEPT: [Capability; 7] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_SETFCAP,
    Capability::CAP_SETGID,
    Capability::CAP_SETUID,
];

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

/// Locks this process in; call it before it has threads. Returns what answers for each volume.
///
/// # Errors
/// When a source cannot be shared or a step fails; the process must not go on then.
pub fn enter(config: &Config) -> Result<Vec<Handler>, JailError> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(system("limit core size"))?;
    // Each file that the guest's kernel knows takes a descriptor.
    let (_, files) = getrlimit(Resource::RLIMIT_NOFILE).map_err(system("get limit of files"))?;
    setrlimit(Resource::RLIMIT_NOFILE, files, files).map_err(system("raise limit of files"))?;
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    unshare(flags).map_err(system("make namespaces"))?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(system("leave the host's mounts"))?;
    let names: Vec<String> = (0..config.volumes.len()).map(|number| format!("/{number}")).collect();
    let trees = names
        .iter()
        .map(|name| Tree::new(name))
        .collect::<io::Result<Vec<_>>>()
        .map_err(system("open /proc/self"))?;
    new_root(config, &names)?;
    let handlers = trees
        .into_iter()
        .map(Tree::open)
        .collect::<io::Result<Vec<_>>>()
        .map_err(system("open a volume"))?;
    drop_privileges()?;
    Ok(handlers)
}

/// Moves into a read-only directory with the sources, each under its name, a place to throw things away, and our own descriptors.
fn new_root(config: &Config, names: &[String]) -> Result<(), JailError> {
    let failed = |volume: &Volume| {
        let path = volume.source.display().to_string();
        move |source: io::Error| JailError::Source { path, source }
    };
    let mut sources = Vec::new();
    for volume in &config.volumes {
        let is_dir = std::fs::metadata(&volume.source).map_err(failed(volume))?.is_dir();
        sources.push((is_dir, open_source(volume).map_err(failed(volume))?));
    }
    let descriptors = sys::open_tree(Path::new("/proc/self/fd"), false).map_err(system("open /proc/self/fd"))?;
    let null = sys::open_tree(Path::new("/dev/null"), false).map_err(system("open /dev/null"))?;
    // Any directory will do as the place of the new root; this one is there on every Linux.
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("ramet-volumes"), "/proc", Some("tmpfs"), flags, Some("mode=755")).map_err(system("mount a root"))?;
    chdir("/proc").map_err(system("enter the root"))?;
    let place = |tree: &OwnedFd, name: &str, is_dir: bool| {
        let path = Path::new(name.trim_start_matches('/'));
        if is_dir {
            std::fs::create_dir_all(path)?;
        } else {
            std::fs::File::create(path)?;
        }
        sys::move_tree(tree, path)
    };
    for ((is_dir, tree), (name, volume)) in sources.iter().zip(names.iter().zip(&config.volumes)) {
        place(tree, name, *is_dir).map_err(failed(volume))?;
    }
    place(&descriptors, "proc/self/fd", true).map_err(system("mount /proc/self/fd"))?;
    place(&null, "null", false).map_err(system("mount /dev/null"))?;
    // Both paths the same: the old root ends up on top of the new one and is taken off.
    pivot_root(".", ".").map_err(system("change root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(system("leave the old root"))?;
    chdir("/").map_err(system("enter the root"))?;
    let none: Option<&str> = None;
    let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, "/", none, flags, none).map_err(system("protect the root"))
}

fn open_source(volume: &Volume) -> io::Result<OwnedFd> {
    let tree = sys::open_tree(&volume.source, volume.recursive)?;
    sys::set_attributes(&tree, volume.recursive, volume.read_only, !volume.follows_host)?;
    Ok(tree)
}

fn drop_privileges() -> Result<(), JailError> {
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
    prctl::set_dumpable(false).map_err(system("forbid tracing"))?;
    let filter = |error: seccompiler::Error| io::Error::other(error.to_string());
    crate::seccomp::install()
        .map_err(filter)
        .map_err(system("filter system calls"))
}
