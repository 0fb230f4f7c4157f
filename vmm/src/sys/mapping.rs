//! Puts pieces of files into a mapping that `vm-memory` owns.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::MmapRegion;

/// Replaces `bytes` at `offset` of the region by a private mapping of the file from `file_offset`. All are multiples of the page size.
///
/// # Errors
/// When the range does not lie in the region or the kernel refuses.
pub(crate) fn map_private(
    region: &MmapRegion<()>,
    offset: usize,
    bytes: usize,
    file: BorrowedFd<'_>,
    file_offset: u64,
) -> io::Result<()> {
    let end = offset.checked_add(bytes).ok_or(io::ErrorKind::InvalidInput)?;
    if end > region.size() || bytes == 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file_offset = libc::off_t::try_from(file_offset).map_err(io::Error::other)?;
    let at = region.as_ptr().wrapping_add(offset);
    // SAFETY: the range lies within a mapping that this process owns and that holds guest memory only, which no Rust reference
    // points into; MAP_FIXED replaces exactly this range, and the region's own munmap covers it later.
    let mapped = unsafe {
        libc::mmap(
            at.cast(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            file_offset,
        )
    };
    if mapped == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Brings in `bytes` at `offset` of the region as if each page had been written. Both are multiples of the page size.
///
/// # Errors
/// When the range does not lie in the region, the kernel is older than 5.14, or memory is short.
pub(crate) fn populate(region: &MmapRegion<()>, offset: u64, bytes: u64) -> io::Result<()> {
    advise(region, offset, bytes, libc::MADV_POPULATE_WRITE)
}

/// Asks for huge pages where they are not the host's default. Offset and length are multiples of the page size.
///
/// # Errors
/// When the range does not lie in the region or the kernel has no transparent huge pages.
pub(crate) fn prefer_huge_pages(region: &MmapRegion<()>, offset: u64, bytes: u64) -> io::Result<()> {
    advise(region, offset, bytes, libc::MADV_HUGEPAGE)
}

/// Gives the memory of `bytes` at `offset` of the region back to the host. What was written there is lost: a page reads as the file that is
/// mapped there, or as zero. Both are multiples of the page size.
///
/// # Errors
/// When the range does not lie in the region, or it is locked.
pub(crate) fn discard(region: &MmapRegion<()>, offset: u64, bytes: u64) -> io::Result<()> {
    advise(region, offset, bytes, libc::MADV_DONTNEED)
}

fn advise(region: &MmapRegion<()>, offset: u64, bytes: u64, advice: libc::c_int) -> io::Result<()> {
    let size = |value: u64| usize::try_from(value).map_err(io::Error::other);
    let (offset, bytes) = (size(offset)?, size(bytes)?);
    let end = offset.checked_add(bytes).ok_or(io::ErrorKind::InvalidInput)?;
    if end > region.size() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let at = region.as_ptr().wrapping_add(offset);
    // SAFETY: the range lies within a mapping that this process owns and that holds guest memory only: no Rust reference points into it,
    // and its contents may change at any time anyway.
    let result = unsafe { libc::madvise(at.cast(), bytes, advice) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use vm_memory::VolatileMemory;

    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn discarded_pages_are_what_they_were_before_they_were_written() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; PAGE], 0).unwrap();
        let region = MmapRegion::<()>::new(3 * PAGE).unwrap();
        map_private(&region, 0, PAGE, file.as_fd(), 0).unwrap();
        let byte = |page: usize| region.get_slice(page * PAGE, 1).unwrap();
        (0..3).for_each(|page| byte(page).copy_from(&[9_u8][..]));
        discard(&region, 0, 2 * PAGE as u64).unwrap();
        let read = [0, 1, 2].map(|page| {
            let mut value = [0_u8];
            byte(page).copy_to(&mut value[..]);
            value[0]
        });
        assert_eq!(read, [7, 0, 9]);
        assert!(discard(&region, 2 * PAGE as u64, 2 * PAGE as u64).is_err());
        assert!(discard(&region, u64::MAX, 4096).is_err());
    }
}
