//! The pages that every fork of a checkpoint writes on its way to its first instruction of its own: noted by one fork, and brought in
//! at once by those after it. Each would else be a fault of its own, at the price of leaving the guest twice.
//!
//! What is noted is a hint. It is bounded, and wrong pages cost nothing but memory: their contents are the checkpoint's either way.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;

use checkpoint::memory::PAGE_SIZE;
use kvm_ioctls::VcpuFd;

use crate::memory::GuestMemory;
use crate::sys::{kvm, mapping};

/// Most pages that are noted or brought in: 16 MiB.
const MOST_PAGES: u64 = 4096;
/// Most runs of pages.
const MOST_RUNS: usize = 4096;
/// A run as bytes: first page and number of pages, little endian.
const RUN_BYTES: usize = 8;

/// Runs of pages, in guest memory of at most 16 TiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched(Vec<Range<u64>>);

impl Touched {
    /// As many of these as fit.
    pub(crate) fn of(pages: Vec<Range<u64>>) -> Self {
        let mut room = MOST_PAGES;
        let mut runs = Vec::new();
        for run in pages.into_iter().take(MOST_RUNS) {
            let count = run.end.saturating_sub(run.start).min(room);
            if count == 0 || u32::try_from(run.start + count).is_err() {
                break;
            }
            room -= count;
            runs.push(run.start..run.start + count);
        }
        Self(runs)
    }

    /// Writes them.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_to(&self, mut file: &File) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(self.0.len() * RUN_BYTES);
        for run in &self.0 {
            for number in [run.start, run.end - run.start] {
                bytes.extend_from_slice(&u32::try_from(number).map_err(io::Error::other)?.to_le_bytes());
            }
        }
        file.write_all(&bytes)
    }

    /// Reads them; whatever does not fit is left out.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn read_from(file: File) -> io::Result<Self> {
        let mut bytes = Vec::new();
        file.take((MOST_RUNS * RUN_BYTES) as u64).read_to_end(&mut bytes)?;
        Ok(Self::decode(&bytes))
    }

    fn decode(bytes: &[u8]) -> Self {
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
        let runs = bytes.chunks_exact(RUN_BYTES).map(|run| {
            let (start, count) = run.split_at(RUN_BYTES / 2);
            let start = u64::from(number(start));
            start..start + u64::from(number(count))
        });
        Self::of(runs.collect())
    }

    /// Makes them the process's own and maps them for the guest. A kernel that cannot leaves that to the guest's faults.
    pub(crate) fn bring_in(&self, memory: &GuestMemory, vcpu: &VcpuFd) {
        for run in &self.0 {
            for piece in memory.pieces(run.clone()) {
                let populated = mapping::populate(
                    &piece.region.get_mmap(),
                    piece.offset * PAGE_SIZE,
                    piece.pages * PAGE_SIZE,
                );
                if let Err(error) = populated {
                    return tracing::debug!(%error, "pages are not brought in");
                }
                if let Err(error) = kvm::pre_fault(vcpu, piece.guest_address(), piece.pages * PAGE_SIZE) {
                    // Before Linux 6.11. What was populated saves the larger half.
                    tracing::trace!(%error, "pages are not mapped ahead");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_survive_the_trip() {
        let touched = Touched::of(vec![3..5, 9..10, 1000..1200]);
        let mut file = tempfile::tempfile().unwrap();
        touched.write_to(&file).unwrap();
        file.rewind().unwrap();
        assert_eq!(Touched::read_from(file).unwrap(), touched);
    }

    proptest! {
        #[test]
        fn no_file_makes_it_take_more_than_its_bound(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let touched = Touched::decode(&bytes);
            let pages: u64 = touched.0.iter().map(|run| run.end - run.start).sum();
            prop_assert!(pages <= MOST_PAGES);
            let memory = GuestMemory::new(64 << 20).unwrap();
            for run in &touched.0 {
                for piece in memory.pieces(run.clone()) {
                    prop_assert!((piece.offset + piece.pages) * PAGE_SIZE <= 64 << 20);
                }
            }
        }
    }
}
