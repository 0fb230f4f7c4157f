//! Guest memory: made empty, or mapped privately from the memory files of a checkpoint.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsFd;

use checkpoint::memory::{Extent, MemoryIndex, PAGE_SIZE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::layout::{HOLE_END, HOLE_START};
use crate::sys::{mapping, pagemap};

/// Guest memory cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is not one a machine can have.
    #[error("{0} bytes of guest memory: not a multiple of 2 MiB within bounds")]
    Size(u64),
    /// No address space.
    #[error("map {bytes} bytes of guest memory")]
    Map {
        /// How much.
        bytes: u64,
        /// Why not.
        #[source]
        source: vm_memory::mmap::FromRangesError,
    },
    /// The index does not fit the machine or the files.
    #[error("memory index: {0}")]
    Index(String),
    /// A file of the guest image could not be copied.
    #[error("read file into guest memory")]
    Load(#[source] vm_memory::GuestMemoryError),
    /// A piece of a file could not be mapped or examined.
    #[error("{operation}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// All RAM of one machine. Pages are numbered from 0, leaving out the hole below 4 GiB.
#[derive(Clone, Debug)]
pub struct GuestMemory {
    map: GuestMemoryMmap<()>,
    bytes: u64,
}

/// A piece of guest memory within one region.
pub(crate) struct Piece<'a> {
    pub(crate) region: &'a GuestRegionMmap<()>,
    /// Pages from the start of the region.
    pub(crate) offset: u64,
    pub(crate) pages: u64,
}

impl Piece<'_> {
    /// Where the guest sees it.
    pub(crate) fn guest_address(&self) -> u64 {
        self.region.start_addr().0 + self.offset * PAGE_SIZE
    }
}

impl GuestMemory {
    /// Zeroed memory.
    ///
    /// # Errors
    /// When the size is out of bounds or there is no address space.
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        if !crate::control::limits::MEMORY.contains(&bytes) || !bytes.is_multiple_of(2 << 20) {
            return Err(MemoryError::Size(bytes));
        }
        let mut ranges = Vec::new();
        for range in ram_ranges(bytes) {
            let length = usize::try_from(range.end - range.start).map_err(|_| MemoryError::Size(bytes))?;
            ranges.push((GuestAddress(range.start), length));
        }
        let map = GuestMemoryMmap::from_ranges(&ranges).map_err(|source| MemoryError::Map { bytes, source })?;
        Ok(Self { map, bytes })
    }

    /// Memory with the contents of a checkpoint: one private mapping for each extent, nothing is read.
    ///
    /// # Errors
    /// When an extent lies outside of guest memory or its file.
    pub fn restore(index: &MemoryIndex, files: &[File]) -> Result<Self, MemoryError> {
        let bytes = index
            .pages
            .checked_mul(PAGE_SIZE)
            .ok_or_else(|| MemoryError::Index("too many pages".into()))?;
        let memory = Self::new(bytes)?;
        if files.len() != index.sources.len() {
            let message = format!(
                "{} sources, but {} memory files were given",
                index.sources.len(),
                files.len()
            );
            return Err(MemoryError::Index(message));
        }
        let mut lengths = Vec::new();
        for (number, (file, source)) in files.iter().zip(&index.sources).enumerate() {
            let metadata = file.metadata().map_err(|source| MemoryError::Io {
                operation: "examine memory file",
                source,
            })?;
            if !metadata.is_file() || metadata.len() < source.bytes {
                let message = format!(
                    "memory file {number} has {} bytes, the index needs {}",
                    metadata.len(),
                    source.bytes
                );
                return Err(MemoryError::Index(message));
            }
            lengths.push(source.bytes);
        }
        for extent in &index.extents {
            memory.map_extent(extent, files, &lengths)?;
        }
        Ok(memory)
    }

    fn map_extent(&self, extent: &Extent, files: &[File], lengths: &[u64]) -> Result<(), MemoryError> {
        let outside = || {
            MemoryError::Index(format!(
                "extent at page {} lies outside of its source or of memory",
                extent.start
            ))
        };
        let source = usize::try_from(extent.source).map_err(|_| outside())?;
        let (file, length) = files.get(source).zip(lengths.get(source)).ok_or_else(outside)?;
        let end = extent
            .source_page
            .checked_add(extent.pages)
            .and_then(|page| page.checked_mul(PAGE_SIZE))
            .ok_or_else(outside)?;
        let last = extent.start.checked_add(extent.pages).ok_or_else(outside)?;
        if end > *length || last > self.pages() {
            return Err(outside());
        }
        self.map_file(extent.start..last, file, extent.source_page * PAGE_SIZE)
    }

    /// Maps part of a file over a range of pages. The file is at least that long.
    fn map_file(&self, pages: Range<u64>, file: &File, mut offset: u64) -> Result<(), MemoryError> {
        let failed = |source| MemoryError::Io {
            operation: "map file into guest memory",
            source,
        };
        for piece in self.pieces(pages) {
            let bytes = piece.pages * PAGE_SIZE;
            let size = |value: u64| usize::try_from(value).map_err(|e| failed(io::Error::other(e)));
            mapping::map_private(
                &piece.region.get_mmap(),
                size(piece.offset * PAGE_SIZE)?,
                size(bytes)?,
                file.as_fd(),
                offset,
            )
            .map_err(failed)?;
            offset += bytes;
        }
        Ok(())
    }

    /// Copies part of a file to an address in low memory. The caller has checked that the range lies in memory and in the file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn load_file(&self, address: u64, mut file: &File, offset: u64, bytes: u64) -> Result<(), MemoryError> {
        file.seek(SeekFrom::Start(offset)).map_err(|source| MemoryError::Io {
            operation: "seek in the file of the guest image",
            source,
        })?;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.map
            .read_exact_volatile_from(GuestAddress(address), &mut file, length)
            .map_err(MemoryError::Load)
    }

    /// Asks for huge pages for what lies between two addresses in low memory, without its incomplete ones at both ends. A hint: a host
    /// without them goes on without.
    pub(crate) fn prefer_huge_pages(&self, addresses: Range<u64>) {
        const HUGE: u64 = 2 << 20;
        let limit = self.bytes.min(HOLE_START);
        let first = addresses.start.min(limit).next_multiple_of(HUGE) / PAGE_SIZE;
        let end = addresses.end.min(limit) / HUGE * HUGE / PAGE_SIZE;
        for piece in self.pieces(first..end) {
            let (offset, bytes) = (piece.offset * PAGE_SIZE, piece.pages * PAGE_SIZE);
            if let Err(error) = mapping::prefer_huge_pages(&piece.region.get_mmap(), offset, bytes) {
                tracing::debug!(%error, "no huge pages");
            }
        }
    }

    /// The pieces of a range of pages, in order.
    pub(crate) fn pieces(&self, pages: Range<u64>) -> Vec<Piece<'_>> {
        let mut first = 0;
        let mut pieces = Vec::new();
        for region in self.map.iter() {
            let length = region.len() / PAGE_SIZE;
            let (start, end) = (pages.start.max(first), pages.end.min(first + length));
            if start < end {
                pieces.push(Piece {
                    region,
                    offset: start - first,
                    pages: end - start,
                });
            }
            first += length;
        }
        pieces
    }

    /// Host addresses of a range of pages, in order.
    pub(crate) fn host_ranges(&self, pages: Range<u64>) -> Vec<(u64, u64)> {
        let address = |piece: &Piece<'_>| piece.region.get_mmap().as_ptr() as u64 + piece.offset * PAGE_SIZE;
        self.pieces(pages)
            .iter()
            .map(|piece| (address(piece), piece.pages * PAGE_SIZE))
            .collect()
    }

    /// Pages that this process does not share with a file: everything that was written since the start or the restore.
    ///
    /// # Errors
    /// When the pagemap cannot be read.
    pub fn private_pages(&self, map: &File) -> Result<Vec<Range<u64>>, MemoryError> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut first = 0;
        for region in self.map.iter() {
            let start = region.get_mmap().as_ptr() as u64;
            let ranges = pagemap::anonymous_pages(map, start, region.len()).map_err(|source| MemoryError::Io {
                operation: "read pagemap",
                source,
            })?;
            for range in ranges {
                let range = range.start + first..range.end + first;
                match found.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => found.push(range),
                }
            }
            first += region.len() / PAGE_SIZE;
        }
        Ok(found)
    }

    /// As the devices see it.
    #[must_use]
    pub fn map(&self) -> &GuestMemoryMmap<()> {
        &self.map
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size in pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.bytes / PAGE_SIZE
    }
}

/// The guest-physical ranges of this much RAM.
#[must_use]
pub fn ram_ranges(bytes: u64) -> Vec<Range<u64>> {
    let low = bytes.min(HOLE_START);
    let high = HOLE_END..HOLE_END + (bytes - low);
    [0..low, high].into_iter().filter(|range| !range.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use checkpoint::memory::Source;

    use super::*;

    fn index(extents: Vec<Extent>, source_pages: u64) -> MemoryIndex {
        let sources = vec![Source {
            checkpoint: None,
            bytes: source_pages * PAGE_SIZE,
        }];
        MemoryIndex {
            pages: (64 << 20) / PAGE_SIZE,
            sources,
            extents,
        }
    }

    #[test]
    fn ranges_leave_out_the_hole() {
        assert_eq!(ram_ranges(1 << 30), vec![0..1 << 30]);
        assert_eq!(ram_ranges(4 << 30), vec![0..HOLE_START, HOLE_END..HOLE_END + (1 << 30)]);
    }

    #[test]
    fn extents_across_the_hole_are_split() {
        let memory = GuestMemory::new(4 << 30).unwrap();
        let boundary = HOLE_START / PAGE_SIZE;
        let ranges = memory.host_ranges(boundary - 2..boundary + 3);
        assert_eq!(
            ranges.iter().map(|range| range.1).collect::<Vec<_>>(),
            vec![2 * PAGE_SIZE, 3 * PAGE_SIZE]
        );
    }

    #[test]
    fn restore_maps_extents_and_leaves_the_file_alone() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        file.write_all_at(&[2; 4096], 4096).unwrap();
        let extents = vec![
            Extent {
                start: 3,
                pages: 1,
                source: 0,
                source_page: 1,
            },
            Extent {
                start: 9,
                pages: 1,
                source: 0,
                source_page: 0,
            },
        ];
        let memory = GuestMemory::restore(&index(extents, 2), &[file.try_clone().unwrap()]).unwrap();
        let read = |page: u64| memory.map().read_obj::<u8>(GuestAddress(page * 4096)).unwrap();
        assert_eq!([read(3), read(9), read(0)], [2, 1, 0]);
        memory.map().write_obj(9_u8, GuestAddress(3 * 4096)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 4096).unwrap();
        assert_eq!(byte, [2]);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        assert_eq!(memory.private_pages(&pagemap).unwrap(), vec![3..4]);
    }

    #[test]
    fn extents_outside_of_file_or_memory_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE_SIZE).unwrap();
        let attempt = |start, pages, source, source_page, source_pages| {
            let extent = Extent {
                start,
                pages,
                source,
                source_page,
            };
            GuestMemory::restore(&index(vec![extent], source_pages), &[file.try_clone().unwrap()])
        };
        assert!(attempt(0, 3, 0, 0, 2).is_err());
        assert!(attempt(0, 3, 0, 0, 3).is_err());
        assert!(attempt(0, 1, 1, 0, 2).is_err());
        assert!(attempt((64 << 20) / PAGE_SIZE, 1, 0, 0, 2).is_err());
        assert!(attempt(0, u64::MAX, 0, 1, 2).is_err());
        assert!(attempt(0, 1, 0, 1, 2).is_ok());
    }
}
