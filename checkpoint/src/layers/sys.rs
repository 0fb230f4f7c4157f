//! The one call that std has no safe form of.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the program when the thread that starts it ends, so that nothing outlives a killed caller.
pub(super) fn die_with_parent(command: &mut Command) {
    let parent = nix::unistd::getpid();
    let set_signal = move || {
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        // The parent may have died before the call above.
        if nix::unistd::getppid() != parent {
            return Err(nix::errno::Errno::ESRCH.into());
        }
        Ok(())
    };
    // SAFETY: the closure runs in the child between fork and exec; it makes two system calls and touches no lock and no heap
    // (errors are plain errno values).
    unsafe { command.pre_exec(set_signal) };
}
