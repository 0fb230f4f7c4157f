//! System calls without a safe wrapper.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Changing users changes no capabilities from now on.
pub(crate) fn keep_capabilities_of_users() -> io::Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    // SAFETY: prctl with integers.
    let done = unsafe { libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) };
    Errno::result(done)?;
    Ok(())
}

/// Closes every descriptor but the standard streams and this one. The process must have none that is in use.
pub(crate) fn close_all_but(kept: &OwnedFd) -> io::Result<()> {
    let kept = kept.as_raw_fd().cast_unsigned();
    for (first, last) in [(3, kept.saturating_sub(1)), (kept.saturating_add(1), libc::c_uint::MAX)] {
        if first <= last {
            // SAFETY: plain numbers; nobody owns these descriptors, says the caller.
            let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
            Errno::result(done)?;
        }
    }
    Ok(())
}

/// Sends one packet.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let raw: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    let slices = [IoSlice::new(bytes)];
    sendmsg::<()>(socket.as_raw_fd(), &slices, control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives one packet; an empty one is the end.
pub(crate) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = cmsg_space!([i32; 4]);
    let mut slices = [IoSliceMut::new(buffer)];
    let message = loop {
        match recvmsg::<()>(
            socket.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just made these descriptors for us, and nobody else knows them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet was cut short"));
    }
    Ok((message.bytes, fds))
}
