//! The system calls that need `unsafe`: vectored I/O straight into and out of guest memory, the mapping behind a bitmap,
//! random bytes, and the two ioctls of a tap.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use vm_memory::VolatileSlice;

/// A piece of guest memory.
pub(super) type Slice<'m> = VolatileSlice<'m, ()>;

/// Most pieces in one system call.
const IOV_MAX: usize = 1024;

fn iovecs(slices: &[Slice<'_>]) -> (Vec<libc::iovec>, libc::c_int) {
    let vectors: Vec<libc::iovec> = slices
        .iter()
        .take(IOV_MAX)
        .map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        })
        .collect();
    let count = libc::c_int::try_from(vectors.len()).unwrap_or(0);
    (vectors, count)
}

fn offset_arg(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn count_or_error(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Reads from `file` at `offset` into guest memory; like `preadv(2)` it may read less.
pub(super) fn preadv(file: &File, slices: &[Slice<'_>], offset: u64) -> io::Result<usize> {
    let (vectors, count) = iovecs(slices);
    let offset = offset_arg(offset)?;
    // SAFETY: every iovec is a `VolatileSlice`: mapped memory that outlives the call (borrowed by `slices`), that Rust holds no
    // reference to, so the kernel may write to it. `count` is the length of `vectors`.
    count_or_error(unsafe { libc::preadv(file.as_raw_fd(), vectors.as_ptr(), count, offset) })
}

/// Writes guest memory to `file` at `offset`; like `pwritev(2)` it may write less.
pub(super) fn pwritev(file: &File, slices: &[Slice<'_>], offset: u64) -> io::Result<usize> {
    let (vectors, count) = iovecs(slices);
    let offset = offset_arg(offset)?;
    // SAFETY: as in `preadv`; the kernel only reads the memory.
    count_or_error(unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), count, offset) })
}

/// Writes guest memory to a descriptor in one call: one packet on a tap.
pub(super) fn writev(fd: BorrowedFd<'_>, slices: &[Slice<'_>]) -> io::Result<usize> {
    let (vectors, count) = iovecs(slices);
    // SAFETY: as in `preadv`; the kernel only reads the memory.
    count_or_error(unsafe { libc::writev(fd.as_raw_fd(), vectors.as_ptr(), count) })
}

/// Fills `buffer` from the host's random number generator.
pub(super) fn getrandom(buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = &mut buffer[filled..];
        // SAFETY: pointer and length are those of a mutable slice that lives through the call.
        match count_or_error(unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) }) {
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// `TUNSETVNETHDRSZ`, `_IOW('T', 216, int)`.
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
/// `TUNSETOFFLOAD`, `_IOW('T', 208, unsigned int)`; the argument is passed by value.
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;

/// Sets how many bytes of virtio-net header come before each packet of a tap.
pub(super) fn set_vnet_header_size(tap: BorrowedFd<'_>, bytes: libc::c_int) -> io::Result<()> {
    // SAFETY: this ioctl reads one int behind the pointer.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETVNETHDRSZ, &raw const bytes) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Sets which offloads the reader of a tap understands (`TUN_F_*`).
pub(super) fn set_offload(tap: BorrowedFd<'_>, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: this ioctl takes its argument by value and touches no memory of ours.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// A private, copy-on-write mapping of a whole file: opening it costs the same whatever its size, writes stay in memory.
/// The file must not be truncated while this lives.
#[derive(Debug)]
pub(super) struct PrivateMap {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that this value alone owns; `&self` methods only read it, `&mut self` ones write.
unsafe impl Send for PrivateMap {}

impl PrivateMap {
    /// Maps the first `len` bytes of `file`, which must be at least that long and readable.
    pub(super) fn new(file: &File, len: usize) -> io::Result<Self> {
        if len == 0 || file.metadata()?.len() < len as u64 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_PRIVATE | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::Other))?;
        Ok(Self { start, len })
    }

    /// The bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `start` and `len` are those of the mapping, which is readable, initialised by its file and lives as long as `self`;
        // nothing writes to it while `&self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to change in memory only.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, the mapping is writable, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for PrivateMap {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length and no reference to it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Borrows the descriptor of something that owns one, and does not offer this itself.
#[cfg(test)]
pub(super) fn borrow<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as `owner`, which the result borrows.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}
