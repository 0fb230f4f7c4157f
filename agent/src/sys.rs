//! The system calls that have no safe wrapper in our libraries. Everything unsafe of the agent is here.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tokio::io::unix::AsyncFd;

/// Registers a non-blocking descriptor with the runtime.
///
/// # Errors
/// When the descriptor cannot be polled (a regular file).
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is neither replaced nor closed while the AsyncFd owns it.
    let registered = unsafe { AsyncFd::register(fd) };
    registered.map_err(io::Error::from)
}

/// As [`register`], for out-of-band readiness: control group files that report changes with `POLLPRI`.
///
/// # Errors
/// When the descriptor cannot be polled.
pub fn register_priority(file: std::fs::File) -> io::Result<AsyncFd<std::fs::File>> {
    // SAFETY: a File is neither replaced nor closed while the AsyncFd owns it.
    let registered = unsafe { AsyncFd::register_with_interest(file, tokio::io::Interest::PRIORITY) };
    registered.map_err(io::Error::from)
}

/// Loads a kernel module from a file, with these parameters.
///
/// # Errors
/// What the kernel says; `EEXIST` when it is loaded already.
pub fn load_module(file: &std::fs::File, parameters: &std::ffi::CStr) -> nix::Result<()> {
    // SAFETY: the descriptor is open and the parameters are a C string.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), parameters.as_ptr(), 0) };
    Errno::result(result).map(drop)
}

/// Adds bytes to the kernel's entropy pool, credits them in full, and reseeds the generator at once.
///
/// # Errors
/// What the kernel says.
pub fn add_entropy(random: &std::fs::File, bytes: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
    let length = i32::try_from(bytes.len()).map_err(io::Error::other)?;
    let bits = length
        .checked_mul(8)
        .ok_or_else(|| io::Error::other("too much entropy at once"))?;
    // struct rand_pool_info: entropy_count in bits, buf_size in bytes, the bytes.
    let mut info = Vec::with_capacity(8 + bytes.len());
    info.extend_from_slice(&bits.to_ne_bytes());
    info.extend_from_slice(&length.to_ne_bytes());
    info.extend_from_slice(bytes);
    // SAFETY: `info` is laid out as rand_pool_info with exactly buf_size bytes behind it.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, info.as_ptr()) };
    Errno::result(added)?;
    // SAFETY: the request takes no argument.
    let reseeded = unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) };
    Errno::result(reseeded)?;
    Ok(())
}

/// Sets the size of a terminal.
///
/// # Errors
/// When the descriptor is no terminal.
pub fn set_window_size(terminal: &impl AsFd, rows: u16, columns: u16) -> nix::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize, which lives until the call returns.
    let result = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    Errno::result(result).map(drop)
}

/// Receives one descriptor that was sent with `SCM_RIGHTS`.
///
/// # Errors
/// When the message brings none.
pub fn receive_fd(socket: &impl AsFd) -> io::Result<OwnedFd> {
    let mut space = cmsg_space!([libc::c_int; 1]);
    let mut data = [0u8; 64];
    let mut iov = [io::IoSliceMut::new(&mut data)];
    let message = recvmsg::<()>(
        socket.as_fd().as_raw_fd(),
        &mut iov,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control
            && let Some(&fd) = fds.first()
        {
            // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
    Err(io::Error::other("the message carried no descriptor"))
}

/// Undoes what the Rust runtime set up for itself, so that a container's process starts with default signals.
pub fn default_signals() {
    // SAFETY: SIG_DFL installs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let _ = nix::sys::signal::SigSet::empty().thread_set_mask();
}

/// Number of the device that holds what `path` leads to, links followed. Asks no server of a filesystem.
///
/// # Errors
/// As statx(2).
pub fn device_of(path: &Path) -> io::Result<(u32, u32)> {
    let path = c_path(path)?;
    // SAFETY: it is plain numbers.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    // SAFETY: the path is a C string, and the kernel writes one statx.
    let result = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, 0, &raw mut found) };
    Errno::result(result)?;
    Ok((found.stx_dev_major, found.stx_dev_minor))
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(io::Error::other)
}

/// Takes over a descriptor that a system call has just returned.
pub(crate) fn own(fd: std::os::fd::RawFd) -> OwnedFd {
    // SAFETY: the callers pass the result of accept4, which nobody else knows.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Sends a signal by its number, real-time signals included.
///
/// # Errors
/// As kill(2).
pub fn kill(pid: u32, signal: i32) -> nix::Result<()> {
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 1).ok_or(Errno::ESRCH)?;
    // SAFETY: kill takes no pointers.
    Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}
