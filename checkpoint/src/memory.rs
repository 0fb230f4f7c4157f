//! Guest memory of a checkpoint: page files and the index that says where each page comes from.
//!
//! Guest memory is numbered in 4 KiB pages from 0, leaving out the hole below 4 GiB. A `memory` file holds pages at offsets of
//! its own choosing; `memory.index` lists extents over one or more such files: the checkpoint's own (source 0) and those of its
//! bases. Pages that no extent covers are zero. The index of a checkpoint is complete: restoring needs no other index,
//! so the depth of the chain costs nothing.
//!
//! Binary layout, little endian: magic `RAMETMEM`, u32 version, u32 source count, u64 page count, u64 extent count; then for each
//! source a u64 byte length of that file and a 32-byte checkpoint id padded with zeros (zeros alone: the checkpoint itself); then for each extent
//! u64 start page, u64 pages, u32 source, u32 zero, u64 page in the source file. Extents are sorted and do not overlap.

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;
/// Most extents in an index: bounded because each becomes one mapping, and the kernel allows 65,530 for a process.
pub const MAX_EXTENTS: usize = 16 * 1024;
/// Most sources in an index.
pub const MAX_SOURCES: usize = 128;

/// One page file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The checkpoint whose `memory` file it is; `None` for the checkpoint that the index belongs to.
    pub checkpoint: Option<crate::manifest::CheckpointId>,
    /// Length of the file in bytes, a multiple of [`PAGE_SIZE`].
    pub bytes: u64,
}

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First guest page.
    pub start: u64,
    /// How many.
    pub pages: u64,
    /// Which source.
    pub source: u32,
    /// First page in the source file.
    pub source_page: u64,
}

/// Where every page of guest memory comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryIndex {
    /// Guest memory in pages.
    pub pages: u64,
    /// The files.
    pub sources: Vec<Source>,
    /// Sorted, not overlapping.
    pub extents: Vec<Extent>,
}
