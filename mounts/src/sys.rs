//! The system calls.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// `AT_RECURSIVE`, as the flags of these calls have it.
const RECURSIVE: libc::c_uint = libc::AT_RECURSIVE.cast_unsigned();
/// What is moved is the tree itself, and at the target links are followed.
const MOVE_FLAGS: libc::c_uint = libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_SYMLINKS;

/// `struct mount_attr`.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns: u64,
}

pub(crate) fn open_tree(path: &CStr, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= RECURSIVE;
    }
    // SAFETY: the path is a C string.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    let fd = i32::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn set_attributes(tree: &OwnedFd, recursive: bool, set: u64, propagation: u64) -> io::Result<()> {
    // The times that are kept are one of several ways: to choose one, all are cleared first.
    let times = set & libc::MOUNT_ATTR__ATIME != 0;
    let attr = MountAttr {
        set,
        clear: if times { libc::MOUNT_ATTR__ATIME } else { 0 },
        propagation,
        userns: 0,
    };
    let mut flags = libc::AT_EMPTY_PATH.cast_unsigned();
    if recursive {
        flags |= RECURSIVE;
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

pub(crate) fn move_mount(tree: &OwnedFd, target: &CStr) -> io::Result<()> {
    // SAFETY: both paths are C strings.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            MOVE_FLAGS,
        )
    };
    Errno::result(done)?;
    Ok(())
}
