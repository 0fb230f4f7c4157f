//! The one call without a safe wrapper.

/// Makes the calling thread, and the programs it starts, the last to get a CPU. Failing changes nothing but speed.
pub(crate) fn lower_priority() {
    // SAFETY: takes three integers; on Linux who = 0 with PRIO_PROCESS is the calling thread.
    unsafe { nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, 15) };
}
