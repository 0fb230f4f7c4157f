//! What has no safe form: taking ownership of received descriptors, placing one at a fixed number in a child, polling one, choosing a
//! child's network namespace or its end, making a tap.

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

/// Network namespace of a child.
#[derive(Debug)]
pub(crate) enum ChildNetwork {
    /// A new one.
    New,
    /// This one.
    Join(OwnedFd),
}

/// Makes the child that `command` starts live in a network namespace.
pub(crate) fn place_in_network(command: &mut Command, network: ChildNetwork) {
    let hook = move || {
        let done = match &network {
            ChildNetwork::New => nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET),
            ChildNetwork::Join(fd) => nix::sched::setns(fd, nix::sched::CloneFlags::CLONE_NEWNET),
        };
        done.map_err(Into::into)
    };
    // SAFETY: the hook makes one system call and does not allocate.
    unsafe { command.pre_exec(hook) };
}

/// Has the child that `command` starts killed when the calling thread ends, so that it does not outlive this process.
pub(crate) fn die_with_parent(command: &mut Command) {
    let hook = || nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).map_err(Into::into);
    // SAFETY: the hook makes one system call and does not allocate.
    unsafe { command.pre_exec(hook) };
}

/// `_IOW('T', 202, int)`.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;

/// Makes a tap of this name in the network namespace of the calling thread; it goes when its last descriptor is closed.
pub(crate) fn open_tap(name: &str) -> std::io::Result<OwnedFd> {
    let tun = std::fs::File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: an `ifreq` is plain data, for which zeros are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(std::io::Error::other)?;
    // SAFETY: this ioctl reads and writes one `ifreq` behind the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &raw mut request) };
    if result < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(tun.into())
    }
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
