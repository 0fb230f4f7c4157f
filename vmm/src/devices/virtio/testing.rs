//! A driver for tests: does to a [`DeviceSet`] what a guest's kernel does, through registers and guest memory only.

#![expect(clippy::cast_possible_truncation, reason = "numbers of a test")]

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsRawFd;
use vm_memory::{Bytes, GuestAddress, VolatileMemory};
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceSet, EventReceiver, MMIO_BASE, MMIO_SIZE, Memory};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// How long a test waits for a device before it fails.
const PATIENCE_MS: u16 = 10_000;

/// Guest memory of 16 MiB.
pub(super) fn memory() -> Memory {
    Memory::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap()
}

/// A copy of guest memory, as a fork has it.
pub(super) fn copy(mem: &Memory) -> Memory {
    let mut bytes = vec![0; 16 << 20];
    mem.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    let copy = memory();
    copy.write_slice(&bytes, GuestAddress(0)).unwrap();
    copy
}

/// Registers of one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers<'a> {
    pub(super) set: &'a DeviceSet,
    pub(super) device: usize,
}

impl Registers<'_> {
    fn address(&self, offset: u64) -> u64 {
        MMIO_BASE + self.device as u64 * MMIO_SIZE + offset
    }

    /// As the VMM answers, which is also what is in the page that the guest reads.
    pub(super) fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.set.mmio_read(self.address(offset), &mut data);
        let place = usize::try_from(self.address(offset) - MMIO_BASE).unwrap();
        let page = self.set.registers();
        let in_page: u32 = page.as_volatile_slice().load(place, Ordering::SeqCst).unwrap();
        assert_eq!(in_page.to_le_bytes(), data, "register {offset:#x}");
        u32::from_le_bytes(data)
    }

    pub(super) fn write(&self, offset: u64, value: u32) {
        self.set.mmio_write(self.address(offset), &value.to_le_bytes());
    }

    pub(super) fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.set.mmio_read(self.address(0x100 + offset), &mut data);
        for word in 0..N as u64 / 4 {
            self.read(0x100 + offset + word * 4);
        }
        data
    }

    pub(super) fn offered(&self) -> u64 {
        self.write(0x14, 0);
        let low = self.read(0x10);
        self.write(0x14, 1);
        u64::from(self.read(0x10)) << 32 | u64::from(low)
    }

    /// Up to FEATURES_OK with these features; whether the device agreed.
    pub(super) fn negotiate(&self, features: u64) -> bool {
        self.write(0x70, 0);
        self.write(0x70, 1);
        self.write(0x70, 3);
        self.write(0x24, 0);
        self.write(0x20, (features & 0xffff_ffff) as u32);
        self.write(0x24, 1);
        self.write(0x20, (features >> 32) as u32);
        self.write(0x70, 11);
        self.read(0x70) & 8 != 0
    }

    /// How many queues there are.
    fn queues(&self) -> usize {
        (0..)
            .take_while(|queue| {
                self.write(0x30, *queue);
                self.read(0x34) > 0
            })
            .count()
    }

    pub(super) fn set_up_queue(&self, queue: u32, size: u16, base: u64) {
        self.write(0x30, queue);
        self.write(0x38, size.into());
        let parts = [(0x80, base), (0x90, base + 0x2000), (0xa0, base + 0x3000)];
        for (register, address) in parts {
            self.write(register, (address & 0xffff_ffff) as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(0x44, 1);
    }
}

/// A driver's side of one device.
#[derive(Clone, Debug)]
pub(super) struct Driver {
    mem: Memory,
    device: usize,
    interrupt: Arc<EventFd>,
    queues: Vec<Ring>,
}

#[derive(Clone, Debug)]
struct Ring {
    base: u64,
    size: u16,
    next_descriptor: u16,
    added: u16,
    seen: u16,
    /// Where buffers are allocated, cyclically.
    buffers: u64,
    used_buffers: u64,
    writable: HashMap<u16, Vec<(u64, usize)>>,
}

impl Ring {
    /// Lets the device see a chain.
    fn publish(&mut self, mem: &Memory, head: u16) {
        let place = self.base + 0x2000 + 4 + u64::from(self.added % self.size) * 2;
        mem.write_obj(head, GuestAddress(place)).unwrap();
        self.added = self.added.wrapping_add(1);
        mem.store(self.added, GuestAddress(self.base + 0x2000 + 2), Ordering::Release)
            .unwrap();
    }
}

/// Address of the rings of a queue of a device.
fn ring_base(device: usize, queue: usize) -> u64 {
    0x10_0000 + (device as u64 * 4 + queue as u64) * 0x10_0000
}

impl Driver {
    /// Brings a device up with all that it offers.
    pub(super) fn start(set: &DeviceSet, mem: &Memory, device: usize) -> Self {
        Self::start_with(set, mem, device, 16)
    }

    /// The same with rings of this size, at most 256.
    pub(super) fn start_with(set: &DeviceSet, mem: &Memory, device: usize, size: u16) -> Self {
        let registers = Registers { set, device };
        let offered = registers.offered();
        assert!(registers.negotiate(offered));
        let mut queues = Vec::new();
        let slot = set.slots().remove(device);
        for queue in 0..registers.queues() {
            let base = ring_base(device, queue);
            registers.set_up_queue(queue as u32, size, base);
            assert_eq!(registers.read(0x44), 1);
            for part in [0x2000, 0x3000] {
                mem.write_slice(&[0; 0x1000], GuestAddress(base + part)).unwrap();
            }
            queues.push(Ring {
                base,
                size,
                next_descriptor: 0,
                added: 0,
                seen: 0,
                buffers: base + 0x4000,
                used_buffers: 0,
                writable: HashMap::new(),
            });
        }
        registers.write(0x70, 15);
        Self {
            mem: mem.clone(),
            device,
            interrupt: slot.interrupt,
            queues,
        }
    }

    /// The same driver in a fork of the machine.
    pub(super) fn forked(&self, set: &DeviceSet, mem: &Memory) -> Self {
        let interrupt = set.slots().remove(self.device).interrupt;
        Self {
            mem: mem.clone(),
            device: self.device,
            interrupt,
            queues: self.queues.clone(),
        }
    }

    /// Adds a chain; `writable` are sizes of buffers for the device.
    pub(super) fn add(&mut self, set: &DeviceSet, queue: usize, readable: &[&[u8]], writable: &[usize]) -> u16 {
        let head = self.add_quietly(queue, readable, writable);
        self.notify(set, queue);
        head
    }

    /// Adds a chain of these ranges of memory, for the device to write to.
    pub(super) fn add_ranges(&mut self, set: &DeviceSet, queue: usize, ranges: &[(u64, u32)]) {
        let ring = &mut self.queues[queue];
        let head = ring.next_descriptor;
        for (number, (address, len)) in ranges.iter().enumerate() {
            let index = ring.next_descriptor;
            ring.next_descriptor = (index + 1) % ring.size;
            let flags = if number + 1 < ranges.len() { NEXT | WRITE } else { WRITE };
            let descriptor = (*address, *len, flags, ring.next_descriptor);
            write_descriptor(&self.mem, ring.base, index, descriptor);
        }
        ring.writable.insert(head, Vec::new());
        ring.publish(&self.mem, head);
        self.notify(set, queue);
    }

    /// As [`Self::add`], but like Linux's driver it notifies the device only if that asked to hear of this chain (`avail_event`).
    pub(super) fn add_as_asked(&mut self, set: &DeviceSet, queue: usize, readable: &[&[u8]], writable: &[usize]) {
        let before = self.queues[queue].added;
        self.add_quietly(queue, readable, writable);
        let ring = &self.queues[queue];
        let asked = GuestAddress(ring.base + 0x3000 + 4 + u64::from(ring.size) * 8);
        if self.mem.load::<u16>(asked, Ordering::SeqCst).unwrap() == before {
            self.notify(set, queue);
        }
    }

    pub(super) fn notify(&self, set: &DeviceSet, queue: usize) {
        Registers {
            set,
            device: self.device,
        }
        .write(0x50, queue as u32);
    }

    pub(super) fn add_quietly(&mut self, queue: usize, readable: &[&[u8]], writable: &[usize]) -> u16 {
        let mem = &self.mem;
        let ring = &mut self.queues[queue];
        let head = ring.next_descriptor;
        let total = readable.len() + writable.len();
        let sizes = readable.iter().map(|bytes| bytes.len()).chain(writable.iter().copied());
        let mut kept = Vec::new();
        for (number, size) in sizes.enumerate() {
            if ring.used_buffers + size as u64 > 0xf_0000 - 0x4000 {
                ring.used_buffers = 0;
            }
            let address = ring.buffers + ring.used_buffers;
            ring.used_buffers += size as u64;
            let index = ring.next_descriptor;
            ring.next_descriptor = (index + 1) % ring.size;
            let mut flags = 0;
            if number + 1 < total {
                flags |= NEXT;
            }
            if let Some(bytes) = readable.get(number) {
                mem.write_slice(bytes, GuestAddress(address)).unwrap();
            } else {
                flags |= WRITE;
                kept.push((address, size));
            }
            let descriptor = (address, size as u32, flags, ring.next_descriptor);
            write_descriptor(mem, ring.base, index, descriptor);
        }
        ring.writable.insert(head, kept);
        ring.publish(mem, head);
        head
    }

    /// The next chain the device handed back, if there is one: its head and what was written.
    pub(super) fn used(&mut self, queue: usize) -> Option<(u16, Vec<u8>)> {
        let ring = &mut self.queues[queue];
        let index: u16 = self
            .mem
            .load(GuestAddress(ring.base + 0x3000 + 2), Ordering::Acquire)
            .unwrap();
        if index == ring.seen {
            return None;
        }
        let place = ring.base + 0x3000 + 4 + u64::from(ring.seen % ring.size) * 8;
        let [head, len]: [u32; 2] = self.mem.read_obj(GuestAddress(place)).unwrap();
        ring.seen = ring.seen.wrapping_add(1);
        let head = u16::try_from(head).unwrap();
        let mut bytes = Vec::new();
        for (address, size) in ring.writable.remove(&head).unwrap() {
            let mut part = vec![0; size];
            self.mem.read_slice(&mut part, GuestAddress(address)).unwrap();
            bytes.extend(part);
        }
        bytes.truncate(len as usize);
        Some((head, bytes))
    }

    /// Waits for the device to interrupt with a chain handed back.
    pub(super) fn wait(&mut self, queue: usize) -> (u16, Vec<u8>) {
        loop {
            let ring = &self.queues[queue];
            let used_event = ring.base + 0x2000 + 4 + u64::from(ring.size) * 2;
            self.mem
                .store(ring.seen, GuestAddress(used_event), Ordering::SeqCst)
                .unwrap();
            if let Some(used) = self.used(queue) {
                return used;
            }
            self.wait_interrupt();
        }
    }

    fn wait_interrupt(&self) {
        wait_event(&self.interrupt);
    }
}

/// Waits for an event and clears it.
pub(super) fn wait_event(event: &EventFd) {
    wait_readable(&EventHandle(event));
    event.read().unwrap();
}

struct EventHandle<'a>(&'a EventFd);

impl AsFd for EventHandle<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        super::sys::borrow(self.0)
    }
}

impl AsFd for EventReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        super::sys::borrow(self)
    }
}

/// Waits until a descriptor is readable.
pub(super) fn wait_readable(fd: &impl AsFd) {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, PollTimeout::from(PATIENCE_MS)).unwrap();
    assert_eq!(ready, 1, "waited in vain on descriptor {}", fd.as_fd().as_raw_fd());
}

/// Writes one descriptor of a table.
pub(super) fn write_descriptor(mem: &Memory, table: u64, index: u16, descriptor: (u64, u32, u16, u16)) {
    let (address, len, flags, next) = descriptor;
    let at = table + u64::from(index) * 16;
    mem.write_obj(address, GuestAddress(at)).unwrap();
    mem.write_obj(len, GuestAddress(at + 8)).unwrap();
    mem.write_obj(flags, GuestAddress(at + 12)).unwrap();
    mem.write_obj(next, GuestAddress(at + 14)).unwrap();
}
