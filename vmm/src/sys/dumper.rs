//! A child process that writes a frozen copy of guest memory while the guest runs on.
//!
//! `fork` gives the child a copy-on-write image of this process at that instant. The child runs nothing but the few system calls below:
//! other threads held locks when it was made, so it must not allocate, log or unwind.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use nix::unistd::Pid;

/// A range of guest memory and its place in the file. All values are multiples of the page size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Host address.
    pub(crate) address: u64,
    /// Length.
    pub(crate) bytes: u64,
    /// Offset in the file.
    pub(crate) offset: u64,
}

const PAGE: usize = 4096;
/// Most bytes of one write.
const CHUNK: usize = 1 << 20;

/// Starts a child that writes the pieces to the file, leaving holes for zero pages, and exits with 0 or with the error number of the failure.
///
/// # Errors
/// When the process cannot fork.
pub(crate) fn start(file: BorrowedFd<'_>, pieces: &[Piece]) -> io::Result<Pid> {
    let file = file.as_raw_fd();
    let parent = std::process::id();
    // SAFETY: the child only makes system calls and reads guest memory, see the module's description.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = dump(file, pieces, parent);
            // SAFETY: ends the child at once, without running any exit handler of the parent.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(Pid::from_raw(pid)),
    }
}

/// The child's work; returns its exit code.
fn dump(file: RawFd, pieces: &[Piece], parent: u32) -> i32 {
    // SAFETY: prctl with integers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: getppid has no arguments.
    if unsafe { libc::getppid() }.cast_unsigned() != parent {
        return libc::ESRCH;
    }
    close_all_but(file);
    for piece in pieces {
        if let Err(code) = write_piece(file, piece) {
            return code;
        }
    }
    0
}

/// The control socket above all must not stay open here: its end tells the peer that the VMM is gone.
fn close_all_but(file: RawFd) {
    let file = file.cast_unsigned();
    if file > 0 {
        // SAFETY: closes descriptors of the child only.
        unsafe { libc::syscall(libc::SYS_close_range, 0, file - 1, 0) };
    }
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_close_range, file + 1, u32::MAX, 0) };
}

/// Writes the runs of pages that are not zero.
fn write_piece(file: RawFd, piece: &Piece) -> Result<(), i32> {
    let total = usize::try_from(piece.bytes).map_err(|_| libc::EINVAL)?;
    let mut at = 0;
    while at < total {
        if is_zero(page(piece.address, at)) {
            at += PAGE;
            continue;
        }
        let start = at;
        at += PAGE;
        while at < total && at - start < CHUNK && !is_zero(page(piece.address, at)) {
            at += PAGE;
        }
        write_all(
            file,
            piece.address + start as u64,
            at - start,
            piece.offset + start as u64,
        )?;
    }
    Ok(())
}

fn page(address: u64, at: usize) -> *const u64 {
    std::ptr::with_exposed_provenance(usize::try_from(address).unwrap_or(0) + at)
}

fn is_zero(page: *const u64) -> bool {
    // SAFETY: the page lies in guest memory, which is mapped and, in this process, written by nobody.
    let words = unsafe { std::slice::from_raw_parts(page, PAGE / 8) };
    words.iter().all(|word| *word == 0)
}

fn write_all(file: RawFd, mut address: u64, mut bytes: usize, mut offset: u64) -> Result<(), i32> {
    while bytes > 0 {
        let place = libc::off_t::try_from(offset).map_err(|_| libc::EFBIG)?;
        // SAFETY: the range lies in guest memory, which is mapped.
        let written = unsafe { libc::pwrite(file, page(address, 0).cast(), bytes, place) };
        match usize::try_from(written) {
            Ok(0) => return Err(libc::EIO),
            Ok(count) => {
                address += count as u64;
                offset += count as u64;
                bytes -= count;
            }
            Err(_) => {
                let code = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
                if code != libc::EINTR {
                    return Err(code);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use nix::sys::wait::{WaitStatus, waitpid};
    use vm_memory::{MmapRegion, VolatileMemory};

    use super::*;

    fn region() -> MmapRegion<()> {
        let region = MmapRegion::<()>::new(64 * PAGE).unwrap();
        for page in [1, 2, 50] {
            region.get_slice(page * PAGE, 1).unwrap().copy_from(&[9_u8][..]);
        }
        region
    }

    fn whole(region: &MmapRegion<()>) -> Piece {
        Piece {
            address: region.as_ptr().expose_provenance() as u64,
            bytes: 64 * PAGE as u64,
            offset: PAGE as u64,
        }
    }

    #[test]
    fn writes_the_frozen_contents_with_holes_for_zero_pages() {
        let region = region();
        let file = tempfile::tempfile().unwrap();
        file.set_len(65 * PAGE as u64).unwrap();
        let child = start(file.as_fd(), &[whole(&region)]).unwrap();
        region.get_slice(PAGE, 1).unwrap().copy_from(&[1_u8][..]);
        assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        let byte = |page: usize| {
            let mut byte = [0_u8];
            file.read_exact_at(&mut byte, ((page + 1) * PAGE) as u64).unwrap();
            byte[0]
        };
        assert_eq!(
            [byte(0), byte(1), byte(2), byte(3), byte(50), byte(63)],
            [0, 9, 9, 0, 9, 0]
        );
        assert!(file.metadata().unwrap().blocks() * 512 < 16 * PAGE as u64);
    }

    #[test]
    fn a_failed_write_is_the_exit_code() {
        let region = region();
        let read_only = File::open("/proc/self/exe").unwrap();
        let child = start(read_only.as_fd(), &[whole(&region)]).unwrap();
        assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, libc::EBADF));
    }
}
