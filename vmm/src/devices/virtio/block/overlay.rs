//! A copy-on-write disk: sealed layers under one active layer, in blocks of 4 KiB (format: `checkpoint::disk`).
//!
//! Opening and sealing cost the same whatever the size of the disk. The active bitmap is changed in memory only and written to its file at a
//! flush or a seal, after the data it speaks of: after a crash a flushed block is there, and an unflushed one is old or new, never half.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use checkpoint::disk::{BLOCK_SIZE, Bitmap, MAX_BYTES};
use nix::fcntl::{FallocateFlags, fallocate};

use super::super::OverlayLayer;
use super::super::queue::Segments;
use super::super::sys::PrivateMap;
use super::io::{read_full, write_full};

const BLOCK: usize = 4096;
/// Bytes of bitmap that are written to the file as one.
const BITMAP_PAGE: usize = 4096;
/// Most sealed layers; more cannot be looked up in reasonable time.
const MAX_SEALED: usize = 64;

/// Length of the bitmap file of a disk of this size.
fn bitmap_bytes(size: u64) -> u64 {
    Bitmap::bytes_for(size / BLOCK_SIZE)
}

/// One layer, opened.
#[derive(Debug)]
struct Layer {
    data: File,
    bitmap_file: File,
    bitmap: PrivateMap,
    /// Pages of the bitmap that the file does not have yet.
    unwritten: BTreeSet<usize>,
    /// Data was written since the last flush.
    dirty: bool,
}

impl Layer {
    fn open(files: OverlayLayer, size: u64) -> io::Result<Self> {
        let expect = |file: &File, wanted: u64, what: &str| {
            let found = file.metadata()?.len();
            if found == wanted {
                return Ok(());
            }
            Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{what} has {found} bytes instead of {wanted}"),
            ))
        };
        expect(&files.data, size, "data file of a layer")?;
        expect(&files.bitmap, bitmap_bytes(size), "bitmap file of a layer")?;
        let len = usize::try_from(bitmap_bytes(size)).map_err(io::Error::other)?;
        let bitmap = PrivateMap::new(&files.bitmap, len)?;
        Ok(Self {
            data: files.data,
            bitmap_file: files.bitmap,
            bitmap,
            unwritten: BTreeSet::new(),
            dirty: false,
        })
    }

    /// Like `open`, and two empty files are an empty layer.
    fn open_active(files: OverlayLayer, size: u64) -> io::Result<Self> {
        if files.data.metadata()?.len() == 0 && files.bitmap.metadata()?.len() == 0 {
            files.data.set_len(size)?;
            files.bitmap.set_len(bitmap_bytes(size))?;
        }
        Self::open(files, size)
    }

    fn holds(&self, block: u64) -> bool {
        let byte = usize::try_from(block / 8)
            .ok()
            .and_then(|index| self.bitmap.bytes().get(index));
        byte.is_some_and(|byte| byte >> (block % 8) & 1 == 1)
    }

    fn mark(&mut self, block: u64, held: bool) {
        let Ok(index) = usize::try_from(block / 8) else { return };
        let bit = 1u8 << (block % 8);
        let Some(byte) = self.bitmap.bytes_mut().get_mut(index) else {
            return;
        };
        let new = if held { *byte | bit } else { *byte & !bit };
        if *byte != new {
            *byte = new;
            self.unwritten.insert(index / BITMAP_PAGE);
        }
    }

    /// Makes everything written so far durable: data first, then the bitmap that promises it.
    fn flush(&mut self) -> io::Result<()> {
        if !self.dirty && self.unwritten.is_empty() {
            return Ok(());
        }
        self.data.sync_data()?;
        self.write_bitmap()?;
        self.bitmap_file.sync_data()?;
        self.dirty = false;
        Ok(())
    }

    fn write_bitmap(&mut self) -> io::Result<()> {
        while let Some(page) = self.unwritten.first().copied() {
            let start = page * BITMAP_PAGE;
            let bytes = self.bitmap.bytes();
            let end = (start + BITMAP_PAGE).min(bytes.len());
            self.bitmap_file.write_all_at(&bytes[start..end], start as u64)?;
            self.unwritten.remove(&page);
        }
        Ok(())
    }

    fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) else {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&self.data, flags, offset, len)?)
    }
}

/// An opened layer that waits to become the active one.
#[derive(Debug)]
pub(in super::super) struct NextLayer(Layer);

/// The disk.
#[derive(Debug)]
pub(super) struct Overlay {
    size: u64,
    /// Bottom to top.
    sealed: Vec<Layer>,
    active: Layer,
}

impl Overlay {
    /// Opens the stack; `sealed` is bottom to top. Lengths of all files are checked: the layers may come from a hostile checkpoint.
    pub(super) fn open(size: u64, sealed: Vec<OverlayLayer>, active: OverlayLayer) -> io::Result<Self> {
        if size == 0 || size > MAX_BYTES || !size.is_multiple_of(BLOCK_SIZE) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("size of {size} bytes"),
            ));
        }
        if sealed.len() > MAX_SEALED {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} sealed layers", sealed.len()),
            ));
        }
        let sealed = sealed
            .into_iter()
            .map(|files| Layer::open(files, size))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            size,
            sealed,
            active: Layer::open_active(active, size)?,
        })
    }

    /// Size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// The layer that a block is read from; `None` reads as zero.
    fn holder(&self, block: u64) -> Option<&Layer> {
        if self.active.holds(block) {
            return Some(&self.active);
        }
        self.sealed.iter().rev().find(|layer| layer.holds(block))
    }

    /// Reads into guest memory. The range must lie within the disk.
    pub(super) fn read(&self, offset: u64, mut into: Segments<'_>) -> io::Result<()> {
        let mut position = offset;
        let end = offset + into.len();
        while position < end {
            let layer = self.holder(position / BLOCK_SIZE);
            let mut run_end = (position / BLOCK_SIZE + 1) * BLOCK_SIZE;
            while run_end < end && same_layer(layer, self.holder(run_end / BLOCK_SIZE)) {
                run_end += BLOCK_SIZE;
            }
            let mut part = into.take(run_end.min(end) - position);
            let bytes = part.len();
            match layer {
                Some(layer) => read_full(&layer.data, position, part)?,
                None => part.zero(),
            }
            position += bytes;
        }
        Ok(())
    }

    /// Writes from guest memory. The range must lie within the disk.
    pub(super) fn write(&mut self, offset: u64, mut from: Segments<'_>) -> io::Result<()> {
        let mut position = offset;
        let end = offset + from.len();
        self.active.dirty = true;
        while position < end {
            let block = position / BLOCK_SIZE;
            let within = position % BLOCK_SIZE;
            let whole = (end - position) / BLOCK_SIZE;
            if within == 0 && whole > 0 {
                let bytes = whole * BLOCK_SIZE;
                write_full(&self.active.data, position, from.take(bytes))?;
                (block..block + whole).for_each(|block| self.active.mark(block, true));
                position += bytes;
            } else {
                let bytes = (BLOCK_SIZE - within).min(end - position);
                self.write_part(position, from.take(bytes))?;
                position += bytes;
            }
        }
        Ok(())
    }

    /// Writes less than a block, all of it in one block.
    fn write_part(&mut self, position: u64, mut from: Segments<'_>) -> io::Result<()> {
        let block = position / BLOCK_SIZE;
        if self.active.holds(block) {
            return write_full(&self.active.data, position, from);
        }
        let mut buffer = [0u8; BLOCK];
        if let Some(layer) = self.holder(block) {
            layer.data.read_exact_at(&mut buffer, block * BLOCK_SIZE)?;
        }
        let start = usize::try_from(position % BLOCK_SIZE).map_err(io::Error::other)?;
        from.read(&mut buffer[start..]);
        self.active.data.write_all_at(&buffer, block * BLOCK_SIZE)?;
        self.active.mark(block, true);
        Ok(())
    }

    /// Makes a range read as zeros; the range must lie within the disk. Whole blocks become holes. Partial blocks at the ends are written, or, when `whole_only`, left as they are.
    pub(super) fn zero(&mut self, offset: u64, len: u64, whole_only: bool) -> io::Result<()> {
        let end = offset + len;
        let first = offset.next_multiple_of(BLOCK_SIZE).min(end);
        let last = (end / BLOCK_SIZE * BLOCK_SIZE).max(first);
        self.active.dirty = true;
        if !whole_only {
            self.zero_part(offset, first)?;
            self.zero_part(last, end)?;
        }
        if last > first {
            self.active.punch_hole(first, last - first)?;
            for block in first / BLOCK_SIZE..last / BLOCK_SIZE {
                let below = self.sealed.iter().any(|layer| layer.holds(block));
                self.active.mark(block, below);
            }
        }
        Ok(())
    }

    fn zero_part(&mut self, from: u64, to: u64) -> io::Result<()> {
        let zeros = [0u8; BLOCK];
        let mut position = from;
        while position < to {
            let block = position / BLOCK_SIZE;
            let start = usize::try_from(position % BLOCK_SIZE).map_err(io::Error::other)?;
            let bytes = (BLOCK - start).min(usize::try_from(to - position).map_err(io::Error::other)?);
            let mut buffer = [0u8; BLOCK];
            if let Some(layer) = self.holder(block) {
                layer.data.read_exact_at(&mut buffer, block * BLOCK_SIZE)?;
            }
            buffer[start..start + bytes].copy_from_slice(&zeros[..bytes]);
            self.active.data.write_all_at(&buffer, block * BLOCK_SIZE)?;
            self.active.mark(block, true);
            position += bytes as u64;
        }
        Ok(())
    }

    /// Makes everything written so far durable, also what a seal has put into a sealed layer since the last flush.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.sealed.iter_mut().try_for_each(Layer::flush)?;
        self.active.flush()
    }

    /// Does all of sealing that can fail: opens the next layer and completes the bitmap of the active one.
    pub(super) fn prepare_seal(&mut self, next: OverlayLayer) -> io::Result<NextLayer> {
        if self.sealed.len() >= MAX_SEALED {
            return Err(io::Error::other(format!("{MAX_SEALED} layers are sealed already")));
        }
        let next = Layer::open_active(next, self.size)?;
        self.active.write_bitmap()?;
        Ok(NextLayer(next))
    }

    /// Seals the active layer and goes on with the next one, with nothing written in between. The sealed files are complete but not
    /// flushed: that is done by whoever keeps them, and by the guest's next flush, not in the pause.
    pub(super) fn seal(&mut self, NextLayer(next): NextLayer) {
        self.sealed.push(std::mem::replace(&mut self.active, next));
    }
}

fn same_layer(left: Option<&Layer>, right: Option<&Layer>) -> bool {
    match (left, right) {
        (Some(left), Some(right)) => std::ptr::eq(left, right),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_truncation, reason = "numbers of a test")]

    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    use super::super::super::Memory;
    use super::super::super::queue::segments_of;
    use super::super::super::testing::memory;
    use super::*;

    const SIZE: u64 = 64 * BLOCK_SIZE;

    fn files() -> OverlayLayer {
        OverlayLayer {
            data: tempfile::tempfile().unwrap(),
            bitmap: tempfile::tempfile().unwrap(),
        }
    }

    fn clone(layer: &OverlayLayer) -> OverlayLayer {
        OverlayLayer {
            data: layer.data.try_clone().unwrap(),
            bitmap: layer.bitmap.try_clone().unwrap(),
        }
    }

    fn read(mem: &Memory, disk: &Overlay, offset: u64, len: u64) -> Vec<u8> {
        mem.write_slice(&vec![0xee; len as usize], GuestAddress(0x1000))
            .unwrap();
        disk.read(offset, segments_of(mem, 0x1000, len)).unwrap();
        let mut bytes = vec![0; len as usize];
        mem.read_slice(&mut bytes, GuestAddress(0x1000)).unwrap();
        bytes
    }

    fn write(mem: &Memory, disk: &mut Overlay, offset: u64, bytes: &[u8]) {
        mem.write_slice(bytes, GuestAddress(0x1000)).unwrap();
        disk.write(offset, segments_of(mem, 0x1000, bytes.len() as u64))
            .unwrap();
    }

    fn seal(disk: &mut Overlay, next: OverlayLayer) {
        let next = disk.prepare_seal(next).unwrap();
        disk.seal(next);
    }

    #[test]
    fn a_flush_after_a_seal_covers_what_was_written_before_it() {
        let mem = memory();
        let mut disk = Overlay::open(SIZE, Vec::new(), files()).unwrap();
        write(&mem, &mut disk, 0, &[1; 4096]);
        seal(&mut disk, files());
        assert!(disk.sealed[0].dirty);
        disk.flush().unwrap();
        assert!(!disk.sealed[0].dirty);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write {
            sector: u64,
            sectors: u64,
            byte: u8,
        },
        Zero {
            sector: u64,
            sectors: u64,
            whole_only: bool,
        },
        Flush,
        Seal,
        Reopen,
    }

    fn range() -> impl Strategy<Value = (u64, u64)> {
        (0..SIZE / 512).prop_flat_map(|sector| (Just(sector), 0..=(SIZE / 512 - sector).min(40)))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (range(), 1u8..).prop_map(|((sector, sectors), byte)| Step::Write { sector, sectors, byte }),
            3 => (range(), any::<bool>())
                .prop_map(|((sector, sectors), whole_only)| Step::Zero { sector, sectors, whole_only }),
            1 => Just(Step::Flush),
            1 => Just(Step::Seal),
            1 => Just(Step::Reopen),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        #[test]
        fn behaves_like_one_array(steps in prop::collection::vec(step(), 1..40)) {
            let mem = memory();
            let mut model = vec![0u8; SIZE as usize];
            let mut layers = vec![files()];
            let mut disk = Overlay::open(SIZE, Vec::new(), clone(&layers[0])).unwrap();
            for step in steps {
                match step {
                    Step::Write { sector, sectors, byte } => {
                        let bytes: Vec<u8> = (0..sectors * 512).map(|at| byte.wrapping_add((at / 512) as u8)).collect();
                        write(&mem, &mut disk, sector * 512, &bytes);
                        model[sector as usize * 512..][..bytes.len()].copy_from_slice(&bytes);
                    }
                    Step::Zero { sector, sectors, whole_only } => {
                        disk.zero(sector * 512, sectors * 512, whole_only).unwrap();
                        let (mut start, mut end) = (sector * 512, (sector + sectors) * 512);
                        if whole_only {
                            start = start.next_multiple_of(BLOCK_SIZE);
                            end = end / BLOCK_SIZE * BLOCK_SIZE;
                        }
                        if start < end {
                            model[start as usize..end as usize].fill(0);
                        }
                    }
                    Step::Flush => disk.flush().unwrap(),
                    Step::Seal => {
                        layers.push(files());
                        seal(&mut disk, clone(layers.last().unwrap()));
                    }
                    Step::Reopen => {
                        disk.flush().unwrap();
                        let (active, sealed) = layers.split_last().unwrap();
                        disk = Overlay::open(SIZE, sealed.iter().map(clone).collect(), clone(active)).unwrap();
                    }
                }
                prop_assert_eq!(&read(&mem, &disk, 0, SIZE), &model);
            }
            prop_assert_eq!(read(&mem, &disk, 512, 5 * 512), &model[512..6 * 512]);
        }
    }

    #[test]
    fn a_fork_and_its_parent_do_not_see_each_other() {
        let mem = memory();
        let (first, second, fork) = (files(), files(), files());
        let mut parent = Overlay::open(SIZE, Vec::new(), clone(&first)).unwrap();
        write(&mem, &mut parent, 0, &[1; 8192]);
        seal(&mut parent, second);
        let mut child = Overlay::open(SIZE, vec![first], fork).unwrap();
        write(&mem, &mut parent, 4096, &[2; 4096]);
        write(&mem, &mut child, 0, &[3; 512]);
        assert_eq!(read(&mem, &parent, 0, 8192), [[1; 4096], [2; 4096]].concat());
        assert_eq!(read(&mem, &child, 0, 8192), [vec![3; 512], vec![1; 7680]].concat());
    }

    #[test]
    fn an_empty_layer_costs_nothing_however_large_the_disk() {
        use std::os::unix::fs::MetadataExt;
        let layer = files();
        let mut disk = Overlay::open(MAX_BYTES, Vec::new(), clone(&layer)).unwrap();
        let mem = memory();
        write(&mem, &mut disk, MAX_BYTES - 4096, &[7; 4096]);
        disk.flush().unwrap();
        let blocks = layer.data.metadata().unwrap().blocks() + layer.bitmap.metadata().unwrap().blocks();
        assert!(blocks * 512 <= 64 * 1024, "{blocks} sectors");
        let disk = Overlay::open(MAX_BYTES, vec![layer], files()).unwrap();
        assert_eq!(
            read(&mem, &disk, MAX_BYTES - 8192, 8192),
            [[0; 4096], [7; 4096]].concat()
        );
    }

    #[test]
    fn refuses_layers_of_the_wrong_length() {
        let sealed = |data: u64, bitmap: u64| {
            let layer = files();
            layer.data.set_len(data).unwrap();
            layer.bitmap.set_len(bitmap).unwrap();
            Overlay::open(SIZE, vec![layer], files())
                .err()
                .map(|error| error.to_string())
        };
        assert_eq!(sealed(SIZE, 8), None);
        assert_eq!(
            sealed(SIZE, 7).unwrap(),
            "bitmap file of a layer has 7 bytes instead of 8"
        );
        assert_eq!(
            sealed(SIZE - 1, 8).unwrap(),
            "data file of a layer has 262143 bytes instead of 262144"
        );
        assert!(sealed(0, 0).is_some());
        assert!(Overlay::open(SIZE + 512, Vec::new(), files()).is_err());
        assert!(Overlay::open(MAX_BYTES * 2, Vec::new(), files()).is_err());
        assert!(Overlay::open(0, Vec::new(), files()).is_err());
    }
}
