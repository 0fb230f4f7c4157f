//! Which blocks a layer holds.

use std::ops::Range;

/// One bit for each block of a disk, least significant first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    bytes: Vec<u8>,
    blocks: u64,
}

/// `usize` holds every index into a bitmap that fits in memory; this one never truncates on the 64-bit hosts that we run on.
fn byte_of(block: u64) -> usize {
    usize::try_from(block / 8).unwrap_or(usize::MAX)
}

impl Bitmap {
    /// Bytes that the bits of so many blocks take.
    #[must_use]
    pub fn bytes_for(blocks: u64) -> u64 {
        blocks.div_ceil(8)
    }

    /// No block.
    #[must_use]
    pub fn empty(blocks: u64) -> Self {
        Self {
            bytes: vec![0; byte_of(blocks + 7)],
            blocks,
        }
    }

    /// From a file's bytes, which may be fewer than needed (the rest is 0) or more; `None` if a bit beyond the last block is set.
    #[must_use]
    pub fn from_bytes(mut bytes: Vec<u8>, blocks: u64) -> Option<Self> {
        let needed = byte_of(blocks + 7);
        if bytes.iter().skip(needed).any(|byte| *byte != 0) {
            return None;
        }
        bytes.resize(needed, 0);
        let this = Self { bytes, blocks };
        let past_end = this.last().is_some_and(|last| last >= blocks);
        (!past_end).then_some(this)
    }

    /// As they are in the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether the layer holds the block; it does not hold blocks beyond the end.
    #[must_use]
    pub fn holds(&self, block: u64) -> bool {
        self.bytes
            .get(byte_of(block))
            .is_some_and(|byte| byte >> (block % 8) & 1 == 1)
    }

    /// Adds a block; one beyond the end is left out.
    pub fn set(&mut self, block: u64) {
        if block < self.blocks
            && let Some(byte) = self.bytes.get_mut(byte_of(block))
        {
            *byte |= 1 << (block % 8);
        }
    }

    /// How many blocks the layer holds.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bytes.iter().map(|byte| u64::from(byte.count_ones())).sum()
    }

    /// The last block it holds.
    #[must_use]
    pub fn last(&self) -> Option<u64> {
        let byte = self.bytes.iter().rposition(|byte| *byte != 0)?;
        Some(byte as u64 * 8 + u64::from(7 - self.bytes[byte].leading_zeros()))
    }

    /// The blocks that are not in `other`, a bitmap of the same disk.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let bytes = self
            .bytes
            .iter()
            .zip(&other.bytes)
            .map(|(mine, theirs)| mine & !theirs)
            .collect();
        Self {
            bytes,
            blocks: self.blocks,
        }
    }

    /// Adds the blocks of `other`, a bitmap of the same disk.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.bytes.iter_mut().zip(&other.bytes) {
            *mine |= theirs;
        }
    }

    /// Neighbouring blocks as ranges, in order.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = self.find(next, true)?;
            let end = self.find(start, false).unwrap_or(self.blocks);
            next = end;
            Some(start..end)
        })
    }

    /// The first block from `from` on that is held or not held.
    fn find(&self, from: u64, held: bool) -> Option<u64> {
        let skip = if held { 0 } else { u8::MAX };
        let mut block = from;
        while block < self.blocks {
            if block.is_multiple_of(8) && self.bytes.get(byte_of(block)) == Some(&skip) {
                block += 8;
            } else if self.holds(block) == held {
                return Some(block);
            } else {
                block += 1;
            }
        }
        None
    }
}
