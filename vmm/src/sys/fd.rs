//! Ownership of descriptors that the kernel just made for this process.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Takes ownership of a descriptor that was received in a message or is known to have been handed to this process at its start.
/// The caller must be its only owner.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the caller has just received this descriptor from the kernel and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A descriptor for a child process that polls readable when it has ended.
pub(crate) fn open_pidfd(pid: nix::unistd::Pid) -> std::io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    RawFd::try_from(fd).map(own).map_err(std::io::Error::other)
}

/// Borrows the descriptor of something that only offers the raw number.
pub(crate) fn borrow<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: the owner keeps its descriptor open for as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}
