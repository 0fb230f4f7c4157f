//! Signals to processes and process groups.

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// Sends SIGKILL to a whole process group; a group that is gone is fine.
pub(crate) fn kill_group(leader: u32) {
    if let Ok(leader) = i32::try_from(leader) {
        let _ = killpg(Pid::from_raw(leader), Signal::SIGKILL);
    }
}

/// Sends a signal to one process; answers whether there was one.
pub(crate) fn signal(pid: u32, signal: Signal) -> bool {
    i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), signal).is_ok())
}
