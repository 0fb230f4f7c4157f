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

use std::collections::HashSet;
use std::io::Read;

use thiserror::Error;

use crate::manifest::CheckpointId;

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;
/// Most pages of guest memory: 16 GiB.
pub const MAX_PAGES: u64 = 1 << 22;
/// Most extents in an index: bounded because each becomes one mapping, and the kernel allows 65,530 for a process.
pub const MAX_EXTENTS: usize = 16 * 1024;
/// Most sources in an index.
pub const MAX_SOURCES: usize = 128;
/// Largest encoded index in bytes.
pub const MAX_INDEX_BYTES: usize = HEADER_BYTES + MAX_SOURCES * SOURCE_BYTES + MAX_EXTENTS * EXTENT_BYTES;

const MAGIC: &[u8; 8] = b"RAMETMEM";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const SOURCE_BYTES: usize = 40;
const EXTENT_BYTES: usize = 32;
const ID_BYTES: usize = 32;

/// Why a memory index is not one.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// Reading it.
    #[error("cannot read the memory index")]
    Read(#[source] std::io::Error),
    /// It does not start with the magic bytes.
    #[error("not a memory index (it does not start with RAMETMEM)")]
    Magic,
    /// Made by another version.
    #[error("memory index has version {0}, this build reads version {VERSION}")]
    Version(u32),
    /// Its length disagrees with its counts.
    #[error("memory index has {found} bytes, its header asks for {expected}")]
    Length {
        /// By its header, or the limit.
        expected: usize,
        /// Bytes that there are.
        found: usize,
    },
    /// A count is out of bounds.
    #[error("memory index has {found} {what}, allowed are {min} to {max}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many.
        found: u64,
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// A source is wrong.
    #[error("source {number} of the memory index {problem}")]
    Source {
        /// Its place.
        number: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// An extent is wrong.
    #[error("extent {number} of the memory index {problem}")]
    Extent {
        /// Its place.
        number: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A memory file has another length than the index says.
    #[error("memory file of source {number} has {found} bytes, the index says {expected}")]
    FileLength {
        /// Which source.
        number: usize,
        /// By the index.
        expected: u64,
        /// By the file.
        found: u64,
    },
    /// Other number of files than sources.
    #[error("{found} memory files were given for {expected} sources")]
    FileCount {
        /// Sources.
        expected: usize,
        /// Files.
        found: usize,
    },
}

/// One page file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The checkpoint whose `memory` file it is; `None` for the checkpoint that the index belongs to.
    pub checkpoint: Option<CheckpointId>,
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

impl Extent {
    /// One past the last guest page. Only for extents of a valid index.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.pages
    }

    /// The part of it within the guest pages `from..to`, which it must cover.
    fn part(&self, from: u64, to: u64) -> Self {
        Self {
            start: from,
            pages: to - from,
            source: self.source,
            source_page: self.source_page + (from - self.start),
        }
    }

    fn continues(&self, before: &Self) -> bool {
        self.source == before.source
            && self.start == before.end()
            && self.source_page == before.source_page + before.pages
    }
}

/// Where every page of guest memory comes from. A valid index has the checkpoint's own file as source 0, and each
/// base at most once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryIndex {
    /// Guest memory in pages.
    pub pages: u64,
    /// The files.
    pub sources: Vec<Source>,
    /// Sorted, not overlapping.
    pub extents: Vec<Extent>,
}

impl MemoryIndex {
    /// The index of a full checkpoint: one file of `bytes` bytes, all `extents` of source 0.
    ///
    /// # Errors
    /// If the result would not be valid, for instance has too many extents (see [`bridge_gaps`]).
    pub fn full(pages: u64, bytes: u64, extents: Vec<Extent>) -> Result<Self, MemoryError> {
        let index = Self {
            pages,
            sources: vec![Source {
                checkpoint: None,
                bytes,
            }],
            extents: merged(extents),
        };
        index.validate()?;
        Ok(index)
    }

    /// The index of an incremental checkpoint: `changed` (source 0, a new file of `bytes` bytes) over `base`, whose own file
    /// becomes that of checkpoint `base_id`. Sources no extent needs any more are left out.
    ///
    /// # Errors
    /// If the result would not be valid. With too many extents or sources, a full save is the way out, or [`bridge_gaps`].
    pub fn overlay(base: &Self, base_id: &CheckpointId, bytes: u64, changed: &[Extent]) -> Result<Self, MemoryError> {
        base.validate()?;
        let over = Self::full(base.pages, bytes, changed.to_vec())?;
        let kept = uncovered(&base.extents, &over.extents);

        let mut sources = over.sources;
        let mut places: Vec<Option<u32>> = vec![None; base.sources.len()];
        let mut extents = over.extents;
        for extent in kept {
            let old = extent.source as usize;
            let place = match places[old] {
                Some(place) => place,
                None => {
                    let place = u32::try_from(sources.len()).unwrap_or(u32::MAX);
                    let source = &base.sources[old];
                    let checkpoint = Some(source.checkpoint.clone().unwrap_or_else(|| base_id.clone()));
                    sources.push(Source {
                        checkpoint,
                        bytes: source.bytes,
                    });
                    places[old] = Some(place);
                    place
                }
            };
            extents.push(Extent {
                source: place,
                ..extent
            });
        }
        extents.sort_unstable_by_key(|extent| extent.start);
        let index = Self {
            pages: base.pages,
            sources,
            extents: merged(extents),
        };
        index.validate()?;
        Ok(index)
    }

    /// Bytes of guest pages that come from a file, as opposed to zero pages.
    #[must_use]
    pub fn covered_bytes(&self) -> u64 {
        self.extents
            .iter()
            .map(|extent| extent.pages.saturating_mul(PAGE_SIZE))
            .fold(0, u64::saturating_add)
    }

    /// Checks everything that can be checked without the files.
    ///
    /// # Errors
    /// Names the first thing that is wrong.
    pub fn validate(&self) -> Result<(), MemoryError> {
        check_count("pages", self.pages, 1, MAX_PAGES)?;
        check_count("sources", self.sources.len() as u64, 1, MAX_SOURCES as u64)?;
        check_count("extents", self.extents.len() as u64, 0, MAX_EXTENTS as u64)?;
        self.validate_sources()?;
        let mut end = 0;
        for (number, extent) in self.extents.iter().enumerate() {
            end = self
                .validate_extent(extent, end)
                .map_err(|problem| MemoryError::Extent { number, problem })?;
        }
        Ok(())
    }

    fn validate_sources(&self) -> Result<(), MemoryError> {
        let mut seen = HashSet::new();
        for (number, source) in self.sources.iter().enumerate() {
            let problem = if !source.bytes.is_multiple_of(PAGE_SIZE) {
                Some(format!(
                    "has {} bytes, which is not a multiple of {PAGE_SIZE}",
                    source.bytes
                ))
            } else if source.bytes > MAX_PAGES * PAGE_SIZE {
                Some(format!("has {} bytes, more than guest memory can have", source.bytes))
            } else if source.checkpoint.is_none() != (number == 0) {
                Some("breaks the rule that the checkpoint's own file comes first and once".to_owned())
            } else {
                source
                    .checkpoint
                    .as_ref()
                    .filter(|id| !seen.insert(*id))
                    .map(|id| format!("is checkpoint {id} again"))
            };
            if let Some(problem) = problem {
                return Err(MemoryError::Source { number, problem });
            }
        }
        Ok(())
    }

    /// Returns the end of the extent.
    fn validate_extent(&self, extent: &Extent, previous_end: u64) -> Result<u64, &'static str> {
        if extent.pages == 0 {
            return Err("is empty");
        }
        if extent.start < previous_end {
            return Err("overlaps the one before it or is out of order");
        }
        let end = extent.start.checked_add(extent.pages).filter(|end| *end <= self.pages);
        let end = end.ok_or("lies beyond the end of guest memory")?;
        let source = self
            .sources
            .get(extent.source as usize)
            .ok_or("names a source that there is not")?;
        let source_end = extent.source_page.checked_add(extent.pages);
        if source_end.is_none_or(|source_end| source_end > source.bytes / PAGE_SIZE) {
            return Err("lies beyond the end of its memory file");
        }
        Ok(end)
    }

    /// Checks the index against the lengths of the files that will be mapped, one for each source in order: a mapping beyond the end of a
    /// file kills the process that touches it.
    ///
    /// # Errors
    /// Names the source whose file has another length.
    pub fn validate_against(&self, file_lengths: &[u64]) -> Result<(), MemoryError> {
        self.validate()?;
        if file_lengths.len() != self.sources.len() {
            return Err(MemoryError::FileCount {
                expected: self.sources.len(),
                found: file_lengths.len(),
            });
        }
        for (number, (source, found)) in self.sources.iter().zip(file_lengths).enumerate() {
            if source.bytes != *found {
                return Err(MemoryError::FileLength {
                    number,
                    expected: source.bytes,
                    found: *found,
                });
            }
        }
        Ok(())
    }

    /// The bytes of `memory.index`.
    ///
    /// # Errors
    /// If the index is not valid.
    pub fn encode(&self) -> Result<Vec<u8>, MemoryError> {
        self.validate()?;
        let size = HEADER_BYTES + self.sources.len() * SOURCE_BYTES + self.extents.len() * EXTENT_BYTES;
        let mut out = Vec::with_capacity(size);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let sources = u32::try_from(self.sources.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&sources.to_le_bytes());
        out.extend_from_slice(&self.pages.to_le_bytes());
        out.extend_from_slice(&(self.extents.len() as u64).to_le_bytes());
        for source in &self.sources {
            out.extend_from_slice(&source.bytes.to_le_bytes());
            let mut id = [0; ID_BYTES];
            if let Some(checkpoint) = &source.checkpoint {
                id.copy_from_slice(checkpoint.as_str().as_bytes());
            }
            out.extend_from_slice(&id);
        }
        for extent in &self.extents {
            out.extend_from_slice(&extent.start.to_le_bytes());
            out.extend_from_slice(&extent.pages.to_le_bytes());
            out.extend_from_slice(&extent.source.to_le_bytes());
            out.extend_from_slice(&[0; 4]);
            out.extend_from_slice(&extent.source_page.to_le_bytes());
        }
        Ok(out)
    }

    /// Reads `memory.index`; the result is valid.
    ///
    /// # Errors
    /// If it is not a valid index of this version, whatever the bytes are.
    pub fn decode(bytes: &[u8]) -> Result<Self, MemoryError> {
        if bytes.len() > MAX_INDEX_BYTES {
            return Err(MemoryError::Length {
                expected: MAX_INDEX_BYTES,
                found: bytes.len(),
            });
        }
        let mut fields = Fields {
            rest: bytes,
            found: bytes.len(),
        };
        if bytes.get(..MAGIC.len()) != Some(MAGIC) {
            return Err(MemoryError::Magic);
        }
        fields.take::<8>()?;
        let version = fields.u32()?;
        if version != VERSION {
            return Err(MemoryError::Version(version));
        }
        let source_count = fields.u32()?;
        let pages = fields.u64()?;
        let extent_count = fields.u64()?;
        let source_count = check_count("sources", u64::from(source_count), 1, MAX_SOURCES as u64)?;
        let extent_count = check_count("extents", extent_count, 0, MAX_EXTENTS as u64)?;
        let expected = HEADER_BYTES + source_count * SOURCE_BYTES + extent_count * EXTENT_BYTES;
        if bytes.len() != expected {
            return Err(MemoryError::Length {
                expected,
                found: bytes.len(),
            });
        }
        let sources = (0..source_count)
            .map(|number| fields.source(number))
            .collect::<Result<_, _>>()?;
        let extents = (0..extent_count)
            .map(|number| fields.extent(number))
            .collect::<Result<_, _>>()?;
        let index = Self {
            pages,
            sources,
            extents,
        };
        index.validate()?;
        Ok(index)
    }

    /// Reads `memory.index` from a file, never more than [`MAX_INDEX_BYTES`] of it.
    ///
    /// # Errors
    /// As [`Self::decode`], and if reading does not work.
    pub fn read_from(input: impl Read) -> Result<Self, MemoryError> {
        let mut bytes = Vec::new();
        input
            .take(MAX_INDEX_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(MemoryError::Read)?;
        Self::decode(&bytes)
    }
}

/// Joins runs `(start, pages)`, sorted and not overlapping, across the smallest gaps between them until at most `most` are left. A save calls it
/// when memory is more scattered than an index can say; the pages in the gaps are then written too.
pub fn bridge_gaps(runs: &mut Vec<(u64, u64)>, most: usize) {
    let most = most.max(1);
    if runs.len() <= most {
        return;
    }
    let gap = |pair: &[(u64, u64)]| pair[1].0 - (pair[0].0 + pair[0].1);
    let mut gaps: Vec<(u64, usize)> = runs
        .windows(2)
        .enumerate()
        .map(|(place, pair)| (gap(pair), place))
        .collect();
    gaps.sort_unstable();
    let mut bridged = vec![false; runs.len()];
    for (_, place) in &gaps[..runs.len() - most] {
        bridged[*place] = true;
    }
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(most);
    for (place, (start, pages)) in runs.iter().enumerate() {
        match joined.last_mut() {
            Some(last) if bridged[place - 1] => last.1 = start + pages - last.0,
            _ => joined.push((*start, *pages)),
        }
    }
    *runs = joined;
}

/// Joins extents that follow each other both in guest memory and in their file.
fn merged(extents: Vec<Extent>) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match out.last_mut() {
            // Checked sums only: this also sees extents that were not validated yet.
            Some(last)
                if last.start.checked_add(last.pages).is_some()
                    && last.source_page.checked_add(last.pages).is_some()
                    && last.pages.checked_add(extent.pages).is_some()
                    && extent.pages > 0
                    && extent.continues(last) =>
            {
                last.pages += extent.pages;
            }
            _ => out.push(extent),
        }
    }
    out
}

/// The parts of `below` that `above` leaves visible. Both sorted, not overlapping.
fn uncovered(below: &[Extent], above: &[Extent]) -> Vec<Extent> {
    let mut out = Vec::with_capacity(below.len());
    let mut first = 0;
    for extent in below {
        while above.get(first).is_some_and(|over| over.end() <= extent.start) {
            first += 1;
        }
        let mut from = extent.start;
        for over in above[first..].iter().take_while(|over| over.start < extent.end()) {
            if over.start > from {
                out.push(extent.part(from, over.start));
            }
            from = over.end().min(extent.end());
        }
        if from < extent.end() {
            out.push(extent.part(from, extent.end()));
        }
    }
    out
}

fn check_count(what: &'static str, found: u64, min: u64, max: u64) -> Result<usize, MemoryError> {
    let error = MemoryError::Count { what, found, min, max };
    if found < min || found > max {
        Err(error)
    } else {
        usize::try_from(found).map_err(|_| error)
    }
}

/// Little-endian fields, taken from the front.
struct Fields<'a> {
    rest: &'a [u8],
    found: usize,
}

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], MemoryError> {
        let found = self.found;
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(MemoryError::Length {
            expected: found - self.rest.len() + N,
            found,
        })?;
        self.rest = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, MemoryError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, MemoryError> {
        self.take().map(u64::from_le_bytes)
    }

    fn source(&mut self, number: usize) -> Result<Source, MemoryError> {
        let bytes = self.u64()?;
        let id = self.take::<ID_BYTES>()?;
        if id == [0; ID_BYTES] {
            return Ok(Source {
                checkpoint: None,
                bytes,
            });
        }
        let id = CheckpointId::try_from(String::from_utf8_lossy(&id).into_owned());
        let id = id.map_err(|problem| MemoryError::Source {
            number,
            problem: format!("names no checkpoint: {problem}"),
        })?;
        Ok(Source {
            checkpoint: Some(id),
            bytes,
        })
    }

    fn extent(&mut self, number: usize) -> Result<Extent, MemoryError> {
        let (start, pages, source, zero) = (self.u64()?, self.u64()?, self.u32()?, self.u32()?);
        if zero != 0 {
            return Err(MemoryError::Extent {
                number,
                problem: "has bits set that mean nothing",
            });
        }
        Ok(Extent {
            start,
            pages,
            source,
            source_page: self.u64()?,
        })
    }
}

#[cfg(test)]
mod tests;
