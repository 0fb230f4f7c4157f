//! Locks the process in before it touches anything a guest or a checkpoint controls: no capabilities, no way to gain any, a user of its own,
//! an empty root directory, bounded resources, and system call filters.

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Gid, Uid, chdir, geteuid, getpid, pivot_root, setgroups, setresgid, setresuid};

use crate::seccomp::{Filter, SeccompError};
use crate::sys::capability;

/// Descriptors a machine may use: disks, queues, timers, and up to some hundred vsock connections.
const MAX_FILES: u64 = 4096;

/// The process cannot be locked in.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// A system call.
    #[error("jail: {0}")]
    System(&'static str, #[source] Errno),
    /// Capabilities.
    #[error("jail: drop capabilities")]
    Capabilities(#[source] std::io::Error),
    /// Filters.
    #[error("jail")]
    Seccomp(#[from] SeccompError),
}

/// Locks this process in; call it before it has threads. Returns the filter for vCPU threads. A process without root privileges keeps its view
/// of the file system, but its filter lets it open nothing either.
///
/// # Errors
/// When a step fails; the process must not go on then.
pub fn enter() -> Result<Filter, JailError> {
    use JailError::System;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(|e| System("limit core size", e))?;
    let files = nix::sys::resource::getrlimit(Resource::RLIMIT_NOFILE).map_err(|e| System("get limit of files", e))?;
    let files = MAX_FILES.min(files.1);
    setrlimit(Resource::RLIMIT_NOFILE, files, files).map_err(|e| System("limit files", e))?;
    prctl::set_no_new_privs().map_err(|e| System("give up new privileges", e))?;
    if geteuid().is_root() {
        empty_root()?;
        capability::drop_bounding();
        change_user()?;
    }
    capability::drop_all().map_err(JailError::Capabilities)?;
    prctl::set_dumpable(false).map_err(|e| System("forbid tracing", e))?;
    let vcpu = Filter::vcpu()?;
    Filter::service()?.install()?;
    Ok(vcpu)
}

/// Users of VMMs start here: a range that neither people, nor services, nor user namespaces get users from
/// (<https://systemd.io/UIDS-GIDS/>). It is larger than the largest process id.
const FIRST_USER: u32 = 0x7000_0000;

/// Becomes a user that no other process has: root without capabilities could still signal every process of root.
fn change_user() -> Result<(), JailError> {
    use JailError::System;
    let number = FIRST_USER + getpid().as_raw().cast_unsigned();
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    match setresgid(group, group, group) {
        // A user namespace without such users: its root is not the host's.
        Err(Errno::EINVAL) => return Ok(()),
        other => other.map_err(|e| System("change group", e))?,
    }
    setgroups(&[]).map_err(|e| System("leave groups", e))?;
    setresuid(user, user, user).map_err(|e| System("change user", e))
}

/// Moves into a mount namespace with nothing but an empty, read-only directory.
fn empty_root() -> Result<(), JailError> {
    use JailError::System;
    let none: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS).map_err(|e| System("make mount namespace", e))?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .map_err(|e| System("make mounts private", e))?;
    // Any directory will do as the place of the new root; this one is there on every Linux.
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY;
    mount(
        Some("ramet-vmm"),
        "/proc",
        Some("tmpfs"),
        flags,
        Some("size=4k,nr_inodes=2,mode=500"),
    )
    .map_err(|e| System("mount empty root", e))?;
    chdir("/proc").map_err(|e| System("enter empty root", e))?;
    // Both paths the same: the old root ends up on top of the new one and is taken off.
    pivot_root(".", ".").map_err(|e| System("change root", e))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(|e| System("leave old root", e))?;
    chdir("/").map_err(|e| System("enter empty root", e))
}
