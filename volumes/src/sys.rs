//! System calls without a safe wrapper.

use std::ffi::CString;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

const AT_RECURSIVE: libc::c_uint = 0x8000;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;
const MOUNT_ATTR_NODEV: u64 = 4;
const MOUNT_ATTR_NOEXEC: u64 = 8;

/// `struct mount_attr`.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns: u64,
}

/// A detached copy of what is mounted at `path`, links followed, with what is mounted below if `recursive`.
pub(crate) fn open_tree(path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= AT_RECURSIVE;
    }
    // SAFETY: the path is a C string.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    let fd = i32::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets what may be done through a detached tree: never devices, nor programs; no changes if `read_only`. A `private` one sees no later mounts.
pub(crate) fn set_attributes(tree: &OwnedFd, recursive: bool, read_only: bool, private: bool) -> io::Result<()> {
    let attr = MountAttr {
        set: MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC | if read_only { MOUNT_ATTR_RDONLY } else { 0 },
        clear: 0,
        propagation: if private { libc::MS_PRIVATE } else { 0 },
        userns: 0,
    };
    let mut flags = libc::AT_EMPTY_PATH.cast_unsigned();
    if recursive {
        flags |= AT_RECURSIVE;
    }
    // SAFETY: an empty C string, and a structure of the length that is given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    Errno::result(done)?;
    Ok(())
}

/// Mounts a detached tree.
pub(crate) fn move_tree(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    let target = c_path(target)?;
    // SAFETY: both paths are C strings.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    Errno::result(done)?;
    Ok(())
}

/// Changing users changes no capabilities from now on.
pub(crate) fn keep_capabilities_of_users() -> io::Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    // SAFETY: prctl with integers.
    let done = unsafe { libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) };
    Errno::result(done)?;
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

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(io::Error::other)
}
