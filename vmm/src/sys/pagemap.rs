//! Which pages of a private mapping are this process's own (anonymous), and not those of the file behind it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;

const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO_PAGE: u64 = 1 << 5;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
#[derive(Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

nix::ioctl_readwrite!(pagemap_scan, b'f', 16, ScanArguments);

/// Page ranges (relative to `start`, in pages) of `[start, start + bytes)` that are anonymous, sorted and merged. `start` and `bytes` are
/// page-aligned addresses of this process.
///
/// # Errors
/// When the pagemap cannot be read.
pub(crate) fn anonymous_pages(pagemap: &File, start: u64, bytes: u64) -> io::Result<Vec<std::ops::Range<u64>>> {
    match scan(pagemap, start, bytes) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => read(pagemap, start, bytes),
        other => other,
    }
}

/// `PAGEMAP_SCAN`, Linux 6.7 and later.
fn scan(pagemap: &File, start: u64, bytes: u64) -> io::Result<Vec<std::ops::Range<u64>>> {
    let mut found = Vec::new();
    let mut regions = vec![PageRegion::default(); 4096];
    let end = start + bytes;
    let mut at = start;
    while at < end {
        let mut arguments = ScanArguments {
            size: size_of::<ScanArguments>() as u64,
            start: at,
            end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: IS_FILE | IS_ZERO_PAGE,
            category_mask: IS_FILE | IS_ZERO_PAGE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            return_mask: IS_PRESENT,
            ..ScanArguments::default()
        };
        // SAFETY: the kernel reads `arguments` and writes at most `vec_len` regions to `vec`, which holds that many.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &raw mut arguments) }.map_err(io::Error::from)?;
        for region in regions.iter().take(usize::try_from(count).unwrap_or(0)) {
            push(&mut found, (region.start - start) / PAGE..(region.end - start) / PAGE);
        }
        if arguments.walk_end <= at {
            return Err(io::Error::other("pagemap scan made no progress"));
        }
        at = arguments.walk_end;
    }
    Ok(found)
}

/// Plain pagemap entries, any Linux.
fn read(pagemap: &File, start: u64, bytes: u64) -> io::Result<Vec<std::ops::Range<u64>>> {
    const BATCH: u64 = 8192;
    let mut found = Vec::new();
    let pages = bytes / PAGE;
    let mut buffer = vec![0_u8; 8 * 8192];
    let mut page = 0;
    while page < pages {
        let count = BATCH.min(pages - page);
        let length = usize::try_from(count * 8).map_err(io::Error::other)?;
        let entries = buffer.get_mut(..length).unwrap_or_default();
        pagemap.read_exact_at(entries, (start / PAGE + page) * 8)?;
        for (index, entry) in (page..).zip(entries.chunks_exact(8)) {
            let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
            let (present, swapped, file) = (entry >> 63 & 1 == 1, entry >> 62 & 1 == 1, entry >> 61 & 1 == 1);
            if swapped || (present && !file) {
                push(&mut found, index..index + 1);
            }
        }
        page += count;
    }
    Ok(found)
}

fn push(found: &mut Vec<std::ops::Range<u64>>, range: std::ops::Range<u64>) {
    match found.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => found.push(range),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use vm_memory::MmapRegion;

    use super::*;
    use crate::sys::mapping::map_private;

    #[test]
    fn only_written_pages_of_a_private_file_mapping_are_anonymous() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 64 * 4096], 0).unwrap();
        let region = MmapRegion::<()>::new(64 * 4096).unwrap();
        map_private(&region, 0, 64 * 4096, file.as_fd(), 0).unwrap();
        let memory = vm_memory::VolatileMemory::get_slice(&region, 0, 64 * 4096).unwrap();
        let mut byte = [0_u8];
        memory.subslice(5 * 4096, 1).unwrap().copy_to(&mut byte[..]);
        assert_eq!(byte, [7]);
        for page in [3, 4, 60] {
            memory.subslice(page * 4096, 1).unwrap().copy_from(&[1_u8][..]);
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let expected = vec![3..5, 60..61];
        let start = region.as_ptr() as u64;
        assert_eq!(read(&pagemap, start, 64 * 4096).unwrap(), expected);
        assert_eq!(anonymous_pages(&pagemap, start, 64 * 4096).unwrap(), expected);
    }
}
