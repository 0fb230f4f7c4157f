//! What has no safe form: taking ownership of received descriptors, placing one at a fixed number in a child, polling one.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use tokio::io::unix::AsyncFd;
use vmm::control::MAX_FDS;

/// Descriptors placed in a child have numbers below this.
const PLACED: i32 = 16;

/// Makes `fd` the descriptor `number` of the child that `command` starts.
pub(crate) fn place_descriptor(command: &mut Command, fd: OwnedFd, number: i32) {
    let hook = move || {
        let raw = fd.as_raw_fd();
        if raw == number {
            return nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()))
                .map(drop)
                .map_err(Into::into);
        }
        // SAFETY: dup2 is async-signal-safe and takes plain numbers; the child owns its descriptor table.
        let done = unsafe { libc::dup2(raw, number) };
        if done < 0 {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(())
        }
    };
    // SAFETY: the hook makes only async-signal-safe system calls and does not allocate.
    unsafe { command.pre_exec(hook) };
}

/// Makes each descriptor the one of that number in the child that `command` starts. The numbers are below [`PLACED`].
pub(crate) fn place_descriptors(command: &mut Command, places: Vec<(OwnedFd, i32)>) -> std::io::Result<()> {
    for (fd, number) in places {
        // Out of the way first: else placing one could overwrite another that waits for its turn.
        let moved = nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(PLACED))?;
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        let moved = unsafe { OwnedFd::from_raw_fd(moved) };
        place_descriptor(command, moved, number);
    }
    Ok(())
}

/// Registers a descriptor with the event loop.
pub(crate) fn poll(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` stands for the same open descriptor until it is dropped, and nothing here replaces it.
    unsafe { AsyncFd::register(fd) }.map_err(std::io::Error::from)
}

/// Sends one packet with descriptors.
pub(crate) fn send_packet(socket: &OwnedFd, bytes: &[u8], fds: &[OwnedFd]) -> std::io::Result<()> {
    let raw: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(bytes)],
        control,
        MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
        None,
    )?;
    Ok(())
}

/// Receives one packet into `buffer`; an empty packet is the end.
pub(crate) fn receive_packet(socket: &OwnedFd, buffer: &mut [u8]) -> std::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = cmsg_space!([i32; MAX_FDS]);
    let mut slices = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just made these descriptors for us, and nobody else knows them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            "packet was cut short",
        ));
    }
    Ok((message.bytes, fds))
}
