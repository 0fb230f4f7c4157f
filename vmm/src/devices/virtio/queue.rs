//! Virtqueues: descriptor chains of the guest, checked and turned into pieces of memory that can be used.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::Memory;
use super::interrupt::Interrupt;
use super::sys::Slice;

/// Most descriptors of one chain that we follow; longer ones are malformed.
const MAX_SEGMENTS: usize = 1024;

/// Pieces of guest memory of one direction, consumed from the front.
#[derive(Clone, Debug, Default)]
pub(super) struct Segments<'m> {
    slices: Vec<Slice<'m>>,
    first: usize,
}

impl<'m> Segments<'m> {
    fn push(&mut self, slice: Slice<'m>) {
        self.slices.push(slice);
    }

    /// Bytes left.
    pub(super) fn len(&self) -> u64 {
        self.slices().iter().map(|slice| slice.len() as u64).sum()
    }

    /// What is left.
    pub(super) fn slices(&self) -> &[Slice<'m>] {
        &self.slices[self.first..]
    }

    /// Takes the first `bytes` bytes (or all, when there are fewer).
    pub(super) fn take(&mut self, bytes: u64) -> Segments<'m> {
        let mut left = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut taken = Segments::default();
        while left > 0 && self.first < self.slices.len() {
            let slice = self.slices[self.first];
            if slice.len() <= left {
                taken.push(slice);
                self.first += 1;
                left -= slice.len();
            } else if let Ok((head, tail)) = slice.split_at(left) {
                taken.push(head);
                self.slices[self.first] = tail;
                left = 0;
            } else {
                break;
            }
        }
        taken
    }

    /// Copies from guest memory; returns how much there was.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in self.take(buffer.len() as u64).slices() {
            let part = &mut buffer[done..done + slice.len()];
            done += slice.copy_to(part);
        }
        done
    }

    /// Copies exactly `N` bytes from guest memory, or none.
    pub(super) fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        if self.len() < N as u64 {
            return None;
        }
        let mut array = [0; N];
        (self.read(&mut array) == N).then_some(array)
    }

    /// Copies to guest memory; returns how much fitted.
    pub(super) fn write(&mut self, buffer: &[u8]) -> usize {
        let mut done = 0;
        for slice in self.take(buffer.len() as u64).slices() {
            slice.copy_from(&buffer[done..done + slice.len()]);
            done += slice.len();
        }
        done
    }

    /// Writes zeros over all that is left.
    pub(super) fn zero(&mut self) {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.write(&ZEROS) == ZEROS.len() {}
    }
}

/// A descriptor chain: what the device may read, then what it may write.
#[derive(Debug)]
pub(super) struct Chain<'m> {
    /// Names the chain when it is handed back.
    pub(super) head: u16,
    /// From the driver.
    pub(super) readable: Segments<'m>,
    /// For the driver.
    pub(super) writable: Segments<'m>,
}

/// Saved state of a queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VirtQueueState {
    size: u16,
    ready: bool,
    next_avail: u16,
    next_used: u16,
    event_idx: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

/// A queue of a device.
#[derive(Debug)]
pub(super) struct VirtQueue {
    /// The rings; set up by the transport.
    pub(super) ring: Queue,
    broken: bool,
}

impl VirtQueue {
    /// A queue of at most `max_size` (a power of two) entries.
    pub(super) fn new(max_size: u16) -> Result<Self, virtio_queue::Error> {
        Ok(Self {
            ring: Queue::new(max_size)?,
            broken: false,
        })
    }

    /// Back to the state at power-on.
    pub(super) fn reset(&mut self) {
        self.ring.reset();
        self.broken = false;
    }

    /// Whether the guest made the rings unusable.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    fn usable(&self) -> bool {
        self.ring.ready() && !self.broken
    }

    /// The next chain. Malformed ones are handed back empty and skipped.
    pub(super) fn pop<'m>(&mut self, mem: &'m Memory) -> Option<Chain<'m>> {
        while self.usable() {
            let descriptors = match self.ring.iter(mem) {
                Ok(mut heads) => heads.next()?,
                Err(_) => {
                    self.broken = true;
                    return None;
                }
            };
            let head = descriptors.head_index();
            if let Some(chain) = walk(mem, head, descriptors) {
                return Some(chain);
            }
            self.complete(mem, head, 0);
        }
        None
    }

    /// Undoes the last `chains` calls of [`Self::pop`] that gave a chain; none of those may have been handed back.
    pub(super) fn push_back(&mut self, chains: usize) {
        for _ in 0..chains {
            self.ring.go_to_previous_position();
        }
    }

    /// Hands a chain back; `written` bytes of its writable part hold something.
    pub(super) fn complete(&mut self, mem: &Memory, head: u16, written: u64) {
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        if self.ring.add_used(mem, head, written).is_err() {
            self.broken = true;
        }
    }

    /// Interrupts the guest if it wants to know of the chains completed since the last call.
    pub(super) fn signal(&mut self, mem: &Memory, interrupt: &Interrupt) {
        if !self.usable() {
            return;
        }
        match self.ring.needs_notification(mem) {
            Ok(true) => interrupt.queue_used(),
            Ok(false) => {}
            Err(_) => self.broken = true,
        }
    }

    /// Whether chains may have been handed back that the guest has not looked at: it asks for an interrupt at the first that it has not seen.
    pub(super) fn has_unseen(&self, mem: &Memory) -> bool {
        if !self.usable() {
            return false;
        }
        // `used_event` lies behind the entries of the available ring.
        let asked = self.ring.avail_ring().checked_add(4 + 2 * u64::from(self.ring.size()));
        let asked: Option<u16> = asked.and_then(|place| mem.load(GuestAddress(place), Ordering::Acquire).ok());
        !self.ring.state().event_idx_enabled || asked != Some(self.ring.next_used())
    }

    /// Asks the guest to notify us of the next chain; `true` when one is there already.
    pub(super) fn enable_notification(&mut self, mem: &Memory) -> bool {
        if !self.usable() {
            return false;
        }
        match self.ring.enable_notification(mem) {
            Ok(more) => more,
            Err(_) => {
                self.broken = true;
                false
            }
        }
    }

    /// Asks the guest to notify us of the next chain that it adds, although those that are there stay; `true` when it has added one by
    /// now. With event indexes [`Self::enable_notification`] names the first chain that was not taken, which is long there.
    pub(super) fn notify_of_more(&mut self, mem: &Memory) -> bool {
        let Some(index) = self.available_index(mem) else {
            return false;
        };
        let taken = self.ring.next_avail();
        self.ring.set_next_avail(index);
        let more = self.enable_notification(mem);
        self.ring.set_next_avail(taken);
        more
    }

    /// Tells the guest that it need not notify us for now.
    pub(super) fn disable_notification(&mut self, mem: &Memory) {
        if self.usable() && self.ring.disable_notification(mem).is_err() {
            self.broken = true;
        }
    }

    /// How far the guest got in adding chains, as a free-running counter.
    pub(super) fn available_index(&self, mem: &Memory) -> Option<u16> {
        if !self.usable() {
            return None;
        }
        self.ring.avail_idx(mem, Ordering::Acquire).ok().map(|index| index.0)
    }

    /// Saved state.
    pub(super) fn save(&self) -> VirtQueueState {
        let state = self.ring.state();
        VirtQueueState {
            size: state.size,
            ready: state.ready,
            next_avail: state.next_avail,
            next_used: state.next_used,
            event_idx: state.event_idx_enabled,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
        }
    }

    /// The opposite of [`Self::save`]; `None` when the state makes no sense for this queue in this memory.
    pub(super) fn restore(max_size: u16, mem: &Memory, state: &VirtQueueState) -> Option<Self> {
        let ring = Queue::try_from(QueueState {
            max_size,
            next_avail: state.next_avail,
            next_used: state.next_used,
            event_idx_enabled: state.event_idx,
            size: state.size,
            ready: state.ready,
            desc_table: state.descriptors,
            avail_ring: state.available,
            used_ring: state.used,
        })
        .ok()?;
        (!state.ready || ring.is_valid(mem)).then_some(Self { ring, broken: false })
    }
}

/// Collects a chain. `None` when it is empty, loops, is too long, leaves guest memory, or has readable parts after writable ones.
fn walk<'m>(mem: &'m Memory, head: u16, descriptors: virtio_queue::DescriptorChain<&'m Memory>) -> Option<Chain<'m>> {
    let mut chain = Chain {
        head,
        readable: Segments::default(),
        writable: Segments::default(),
    };
    let mut complete = false;
    for (position, descriptor) in descriptors.enumerate() {
        if position >= MAX_SEGMENTS {
            return None;
        }
        complete = !descriptor.has_next();
        let writable = descriptor.is_write_only();
        if !writable && !chain.writable.slices.is_empty() {
            return None;
        }
        let side = if writable {
            &mut chain.writable
        } else {
            &mut chain.readable
        };
        for slice in GuestMemoryBackend::get_slices(mem, GuestAddress(descriptor.addr().0), descriptor.len() as usize) {
            side.push(slice.ok()?);
        }
    }
    complete.then_some(chain)
}

/// A piece of guest memory as if a chain had brought it.
#[cfg(test)]
pub(super) fn segments_of(mem: &Memory, address: u64, len: u64) -> Segments<'_> {
    let mut segments = Segments::default();
    if len > 0 {
        // Two pieces, so that every test crosses a border.
        let middle = len / 3;
        for (start, len) in [(address, middle), (address + middle, len - middle)] {
            let len = usize::try_from(len).unwrap();
            if len > 0 {
                segments.push(GuestMemoryBackend::get_slice(mem, GuestAddress(start), len).unwrap());
            }
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_truncation, reason = "numbers of a test")]

    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    use super::super::testing::{memory, write_descriptor};
    use super::*;

    const TABLE: u64 = 0x1000;
    const AVAILABLE: u64 = 0x2000;
    const USED: u64 = 0x3000;

    fn queue(mem: &Memory, heads: &[u16]) -> VirtQueue {
        let mut queue = VirtQueue::new(16).unwrap();
        queue.ring.set_desc_table_address(Some(TABLE as u32), None);
        queue.ring.set_avail_ring_address(Some(AVAILABLE as u32), None);
        queue.ring.set_used_ring_address(Some(USED as u32), None);
        queue.ring.set_ready(true);
        for (place, head) in heads.iter().enumerate() {
            mem.write_obj(*head, GuestAddress(AVAILABLE + 4 + place as u64 * 2))
                .unwrap();
        }
        mem.write_obj(heads.len() as u16, GuestAddress(AVAILABLE + 2)).unwrap();
        queue
    }

    #[test]
    fn malformed_chains_are_handed_back_empty() {
        let mem = memory();
        // A loop, a readable part after a writable one, a buffer outside memory, and a good one.
        write_descriptor(&mem, TABLE, 0, (0x8000, 4, 1, 0));
        write_descriptor(&mem, TABLE, 1, (0x8000, 4, 3, 2));
        write_descriptor(&mem, TABLE, 2, (0x8000, 4, 0, 0));
        write_descriptor(&mem, TABLE, 3, (0xffff_ffff_ffff_fff0, 64, 0, 0));
        write_descriptor(&mem, TABLE, 4, (0x8000, 4, 1, 5));
        write_descriptor(&mem, TABLE, 5, (0x9000, 6, 2, 0));
        let mut queue = queue(&mem, &[0, 1, 3, 4]);
        let chain = queue.pop(&mem).unwrap();
        assert_eq!((chain.head, chain.readable.len(), chain.writable.len()), (4, 4, 6));
        assert!(queue.pop(&mem).is_none());
        assert!(!queue.is_broken());
        let used: u16 = mem.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!(used, 3);
    }

    proptest! {
        #[test]
        fn any_descriptor_table_is_survived(
            table in prop::collection::vec((prop_oneof![0u64..0x20000, any::<u64>()], prop_oneof![0u32..300, any::<u32>()], 0u16..8, 0u16..20), 16),
            heads in prop::collection::vec(0u16..20, 0..16),
            index in prop_oneof![0u16..16, any::<u16>()],
        ) {
            let mem = memory();
            for (number, descriptor) in table.iter().enumerate() {
                write_descriptor(&mem, TABLE, number as u16, *descriptor);
            }
            let mut queue = queue(&mem, &heads);
            mem.write_obj(index, GuestAddress(AVAILABLE + 2)).unwrap();
            let mut chains = 0;
            while let Some(mut chain) = queue.pop(&mem) {
                let (readable, writable) = (chain.readable.len(), chain.writable.len());
                let mut buffer = [0; 64];
                prop_assert_eq!(chain.readable.read(&mut buffer) as u64, readable.min(64));
                prop_assert_eq!(chain.writable.take(10).len(), writable.min(10));
                queue.complete(&mem, chain.head, writable);
                chains += 1;
                prop_assert!(chains <= 17);
            }
        }

        #[test]
        fn segments_are_one_stream_of_bytes(sizes in prop::collection::vec(0usize..50, 0..10), cuts in prop::collection::vec(0u64..60, 0..10)) {
            let mem = memory();
            let mut segments = Segments::default();
            let mut expected = Vec::new();
            for (number, size) in sizes.iter().enumerate() {
                let address = GuestAddress(0x8000 + number as u64 * 64);
                let bytes: Vec<u8> = (0..*size).map(|byte| (number * 50 + byte) as u8).collect();
                mem.write_slice(&bytes, address).unwrap();
                if *size > 0 {
                    segments.push(GuestMemoryBackend::get_slice(&mem, address, *size).unwrap());
                }
                expected.extend(bytes);
            }
            let mut seen = Vec::new();
            for cut in cuts {
                let mut part = segments.take(cut);
                let mut bytes = vec![0; usize::try_from(part.len()).unwrap()];
                prop_assert_eq!(part.read(&mut bytes), bytes.len());
                seen.extend(bytes);
            }
            let mut rest = vec![0; usize::try_from(segments.len()).unwrap()];
            segments.read(&mut rest);
            seen.extend(rest);
            prop_assert_eq!(seen, expected);
        }
    }
}
