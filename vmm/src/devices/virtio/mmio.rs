//! The virtio-mmio register block, version 2: feature negotiation, status, queue setup, interrupts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::QueueT;

use super::interrupt::Interrupt;
use super::model::Model;
use super::queue::{VirtQueue, VirtQueueState};
use super::{DeviceError, Memory};

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"rmet");
/// Where configuration space starts.
const CONFIG: u64 = 0x100;
/// Most bytes of configuration space that any device has.
const CONFIG_MAX: u64 = 64;
/// Offset of the register with the interrupt reasons.
pub(super) const INTERRUPT_STATUS: u64 = 0x60;
/// Offset of the register that acknowledges them.
pub(super) const INTERRUPT_ACK: u64 = 0x64;

const STATUS_BEFORE_FEATURES: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;
const STATUS_READY: u32 = STATUS_BEFORE_FEATURES | VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;

/// Feature bits of the transport and the rings, offered by every device.
const RING_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Saved state of the registers and queues of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TransportState {
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    interrupt_status: u32,
    config_generation: u32,
    queues: Vec<VirtQueueState>,
}

/// What a register write asks the I/O thread to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pending {
    /// The model must forget its driver.
    pub(super) reset: bool,
    /// Then, the model has a driver.
    pub(super) activate: bool,
}

/// Registers and queues of one device.
#[derive(Debug)]
pub(super) struct Transport {
    /// The queues.
    pub(super) queues: Vec<VirtQueue>,
    /// The interrupt line; also reached without the device's lock.
    pub(super) interrupt: Arc<Interrupt>,
    /// Left for the I/O thread.
    pub(super) pending: Pending,
    device_type: u32,
    offered: u64,
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    config_generation: u32,
}

impl Transport {
    /// The registers of a device at power-on.
    pub(super) fn new(model: &dyn Model, interrupt: Arc<Interrupt>) -> Result<Self, DeviceError> {
        let queues = model
            .queue_sizes()
            .iter()
            .map(|size| VirtQueue::new(*size))
            .collect::<Result<_, _>>();
        let transport = Self {
            queues: queues.map_err(|error| DeviceError::State(error.to_string()))?,
            interrupt,
            pending: Pending::default(),
            device_type: model.device_type(),
            offered: model.features() | RING_FEATURES,
            status: 0,
            driver_features: 0,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            config_generation: 0,
        };
        transport.publish_all();
        for offset in (0..CONFIG_MAX).step_by(4) {
            let mut word = [0; 4];
            model.read_config(offset, &mut word);
            transport
                .interrupt
                .page()
                .set(CONFIG + offset, u32::from_le_bytes(word));
        }
        Ok(transport)
    }

    /// Makes a register read as it is.
    fn publish(&self, offset: u64) {
        if offset != INTERRUPT_STATUS {
            self.interrupt.page().set(offset, self.read_register(offset));
        }
    }

    /// The same for all of them.
    fn publish_all(&self) {
        (0..CONFIG).step_by(4).for_each(|offset| self.publish(offset));
    }

    /// The same for those that change while the device is used.
    fn publish_changes(&self) {
        [0x10, 0x34, 0x44, 0x70]
            .into_iter()
            .for_each(|offset| self.publish(offset));
    }

    /// Saved state.
    pub(super) fn save(&self) -> TransportState {
        TransportState {
            status: self.status,
            driver_features: self.driver_features,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            interrupt_status: self.interrupt.reasons(),
            config_generation: self.config_generation,
            queues: self.queues.iter().map(VirtQueue::save).collect(),
        }
    }

    /// Takes over a saved state, checked as if the guest had written it just now.
    pub(super) fn restore(&mut self, mem: &Memory, state: &TransportState) -> Result<(), DeviceError> {
        let wrong = |what: &str| DeviceError::State(format!("virtio device type {}: {what}", self.device_type));
        if state.driver_features & !self.offered != 0 {
            return Err(wrong("accepted features that this version does not offer"));
        }
        if state.queues.len() != self.queues.len() {
            return Err(wrong("number of queues"));
        }
        let event_idx = state.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let mut queues = Vec::with_capacity(self.queues.len());
        for (queue, saved) in self.queues.iter().zip(&state.queues) {
            let mut queue = VirtQueue::restore(queue.ring.max_size(), mem, saved).ok_or_else(|| wrong("queue"))?;
            queue.ring.set_event_idx(event_idx && queue.ring.ready());
            queues.push(queue);
        }
        self.queues = queues;
        self.status = state.status & 0xff;
        self.driver_features = state.driver_features;
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.queue_select = state.queue_select;
        self.config_generation = state.config_generation;
        self.interrupt.set_reasons(state.interrupt_status);
        self.publish_all();
        self.pending.activate = self.is_active();
        Ok(())
    }

    /// Whether there is a driver whose queues may be served.
    pub(super) fn is_active(&self) -> bool {
        self.status & STATUS_READY == STATUS_READY && self.status & VIRTIO_CONFIG_S_NEEDS_RESET == 0
    }

    /// Features the driver accepted.
    pub(super) fn features(&self) -> u64 {
        self.driver_features
    }

    /// Stops the device until the driver resets it.
    pub(super) fn require_reset(&mut self) {
        self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
        self.publish_changes();
        self.interrupt.config_changed();
    }

    fn selected(&self) -> Option<&VirtQueue> {
        self.queues.get(self.queue_select as usize)
    }

    /// A read at `offset` of the register block.
    pub(super) fn read(&self, model: &dyn Model, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            model.read_config(offset, data);
            return;
        }
        data.fill(0);
        if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = self.read_register(offset).to_le_bytes();
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        let half = |value: u64, select: u32| match select {
            0 => u32::try_from(value & 0xffff_ffff).unwrap_or(0),
            1 => u32::try_from(value >> 32).unwrap_or(0),
            _ => 0,
        };
        match offset {
            0x00 => MAGIC,
            0x04 => VERSION,
            0x08 => self.device_type,
            0x0c => VENDOR,
            0x10 => half(self.offered, self.device_features_select),
            0x34 => self.selected().map_or(0, |queue| queue.ring.max_size().into()),
            0x44 => self.selected().map_or(0, |queue| queue.ring.ready().into()),
            INTERRUPT_STATUS => self.interrupt.reasons(),
            0x70 => self.status,
            // Shared memory regions: none has this length.
            0xb0..=0xbc => u32::MAX,
            0xfc => self.config_generation,
            _ => 0,
        }
    }

    /// A write at `offset` of the register block. Configuration space has nothing to write.
    pub(super) fn write(&mut self, mem: &Memory, offset: u64, data: &[u8]) {
        let Ok(value) = <[u8; 4]>::try_from(data).map(u32::from_le_bytes) else {
            return;
        };
        match offset {
            0x14 => self.device_features_select = value,
            0x20 => self.accept_features(value),
            0x24 => self.driver_features_select = value,
            0x30 => self.queue_select = value,
            INTERRUPT_ACK => self.interrupt.acknowledge(value),
            0x70 => self.write_status(value),
            0x38..=0xa4 => self.configure_queue(mem, offset, value),
            _ => {}
        }
        self.publish_changes();
    }

    fn accept_features(&mut self, value: u32) {
        let state = self.status & (VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK);
        if state != VIRTIO_CONFIG_S_DRIVER {
            return;
        }
        let value = u64::from(value);
        match self.driver_features_select {
            0 => self.driver_features = self.driver_features & !0xffff_ffff | value,
            1 => self.driver_features = self.driver_features & 0xffff_ffff | value << 32,
            _ => {}
        }
    }

    fn configure_queue(&mut self, mem: &Memory, offset: u64, value: u32) {
        let negotiated = self.status & VIRTIO_CONFIG_S_FEATURES_OK != 0;
        let running = self.status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        let event_idx = self.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return;
        };
        let ring = &mut queue.ring;
        if offset == 0x44 && value == 0 {
            ring.set_ready(false);
            return;
        }
        if !negotiated || running || ring.ready() {
            return;
        }
        match offset {
            // 0 makes the ring refuse it.
            0x38 => ring.set_size(u16::try_from(value).unwrap_or(0)),
            0x44 if value == 1 => {
                ring.set_event_idx(event_idx);
                ring.set_ready(true);
                let valid = ring.is_valid(mem);
                ring.set_ready(valid);
            }
            0x80 => ring.set_desc_table_address(Some(value), None),
            0x84 => ring.set_desc_table_address(None, Some(value)),
            0x90 => ring.set_avail_ring_address(Some(value), None),
            0x94 => ring.set_avail_ring_address(None, Some(value)),
            0xa0 => ring.set_used_ring_address(Some(value), None),
            0xa4 => ring.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn write_status(&mut self, value: u32) {
        if value == 0 {
            self.reset();
            return;
        }
        let known = self.status & !VIRTIO_CONFIG_S_NEEDS_RESET;
        // A driver only ever adds bits.
        if value & known != known {
            return;
        }
        let mut added = value & 0xff & !self.status & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0 && !self.features_acceptable(value) {
            added &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        let ready = (self.status | added) & STATUS_READY == STATUS_READY;
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 && !ready {
            added &= !VIRTIO_CONFIG_S_DRIVER_OK;
        }
        self.status |= added;
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.pending.activate = true;
        }
    }

    fn features_acceptable(&self, status: u32) -> bool {
        status & STATUS_BEFORE_FEATURES == STATUS_BEFORE_FEATURES
            && self.driver_features & !self.offered == 0
            && self.driver_features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn reset(&mut self) {
        self.status = 0;
        self.driver_features = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.queue_select = 0;
        self.interrupt.set_reasons(0);
        self.queues.iter_mut().for_each(VirtQueue::reset);
        self.pending = Pending {
            reset: true,
            activate: false,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Driver, Registers, memory};
    use super::super::{DeviceSet, event_channel};

    const VERSION_1: u64 = 1 << 32;

    fn set() -> DeviceSet {
        let (sender, _) = event_channel().unwrap();
        DeviceSet::create(memory(), Vec::new(), Vec::new(), true, sender).unwrap()
    }

    #[test]
    fn identifies_itself() {
        let set = set();
        let registers = Registers { set: &set, device: 0 };
        let identity = [0x00, 0x04, 0x08].map(|offset| registers.read(offset));
        assert_eq!(identity, [0x7472_6976, 2, 19]);
        assert_eq!(registers.config::<8>(0), 3u64.to_le_bytes());
        assert_eq!(registers.config::<8>(4), [0; 8]);
        assert_eq!(registers.config::<4>(4000), [0; 4]);
        assert_eq!(registers.read(0xb0), u32::MAX);
        let mut outside = [0; 4];
        set.mmio_read(0xd000_0000 + 3 * 0x1000, &mut outside);
        assert_eq!(outside, [0xff; 4]);
    }

    #[test]
    fn refuses_wrong_features() {
        let set = set();
        let registers = Registers { set: &set, device: 0 };
        assert!(!registers.negotiate(0), "without VERSION_1");
        assert!(!registers.negotiate(VERSION_1 | 1 << 60), "not offered");
        assert!(registers.negotiate(VERSION_1));
        registers.write(0x24, 0);
        registers.write(0x20, 1 << 29);
        registers.write(0x70, 15);
        assert_eq!(registers.read(0x70), 15);
    }

    #[test]
    fn status_cannot_jump_or_lose_bits() {
        let set = set();
        let registers = Registers { set: &set, device: 0 };
        registers.write(0x70, 4);
        assert_eq!(registers.read(0x70) & 4, 0, "DRIVER_OK before everything");
        assert!(registers.negotiate(VERSION_1));
        registers.write(0x70, 1);
        assert_eq!(registers.read(0x70), 11);
        registers.write(0x70, 0);
        assert_eq!(registers.read(0x70), 0);
    }

    #[test]
    fn checks_queues_when_they_are_enabled() {
        let set = set();
        let registers = Registers { set: &set, device: 0 };
        registers.set_up_queue(0, 16, 0x1000);
        assert_eq!(registers.read(0x44), 0, "before FEATURES_OK");
        assert!(registers.negotiate(VERSION_1));
        registers.set_up_queue(0, 16, 0xffff_ffff_0000);
        assert_eq!(registers.read(0x44), 0, "outside memory");
        registers.set_up_queue(0, 16, (16 << 20) - 0x3000);
        assert_eq!(registers.read(0x44), 0, "used ring just outside memory");
        registers.set_up_queue(0, 3, 0x1000);
        registers.set_up_queue(9, 16, 0x1000);
        assert_eq!(registers.read(0x44), 0, "no such queue");
        assert_eq!(registers.read(0x34), 0, "no such queue");
        registers.set_up_queue(0, 16, 0x1000);
        assert_eq!(registers.read(0x44), 1);
        registers.write(0x80, 0xdead_0000);
        registers.write(0x38, 8);
        registers.write(0x44, 0);
        registers.write(0x44, 1);
        assert_eq!(registers.read(0x44), 1, "an enabled queue is not changed");
    }

    #[test]
    fn a_restored_device_reads_as_it_did() {
        let mem = memory();
        let saved = |set: &DeviceSet| {
            let registers = Registers { set, device: 1 };
            (0..0x140)
                .step_by(4)
                .map(|offset| registers.read(offset))
                .collect::<Vec<_>>()
        };
        let (sender, _) = event_channel().unwrap();
        let set = DeviceSet::create(mem.clone(), Vec::new(), Vec::new(), true, sender.clone()).unwrap();
        let new = saved(&set);
        Driver::start(&set, &mem, 1);
        let started = saved(&set);
        assert_ne!(new, started);
        let fork = DeviceSet::restore(mem.clone(), set.save(), Vec::new(), Vec::new(), sender.clone()).unwrap();
        assert_eq!(saved(&fork), started);
        let mut state = serde_json::to_value(set.save()).unwrap();
        state["devices"][1]["transport"]["config_generation"] = 7.into();
        let state = serde_json::from_value(state).unwrap();
        let fork = DeviceSet::restore(mem, state, Vec::new(), Vec::new(), sender).unwrap();
        assert_eq!(saved(&fork)[0xfc / 4], 7);
        Registers { set: &set, device: 1 }.write(0x70, 0);
        assert_eq!(saved(&set)[0x70 / 4], 0);
    }

    #[test]
    fn survives_any_register_access() {
        let set = set();
        for offset in 0..0x200 {
            for len in 0..=9 {
                let mut data = vec![0; len];
                set.mmio_read(0xd000_0000 + offset, &mut data);
                set.mmio_write(0xd000_0000 + offset, &vec![0xff; len]);
            }
        }
        set.mmio_write(u64::MAX, &[0; 4]);
    }

    #[test]
    fn a_broken_queue_stops_the_device_until_reset() {
        use vm_memory::{Bytes, GuestAddress};
        let mem = memory();
        let (sender, _) = event_channel().unwrap();
        let set = DeviceSet::create(mem.clone(), Vec::new(), Vec::new(), true, sender).unwrap();
        set.start();
        let mut driver = Driver::start(&set, &mem, 1);
        driver.add(&set, 0, &[], &[8]);
        driver.wait(0);
        // More chains than the ring has places.
        mem.write_obj(0x4000u16, GuestAddress(0x50_0000 + 0x2000 + 2)).unwrap();
        driver.notify(&set, 0);
        let registers = Registers { set: &set, device: 1 };
        let slot = set.slots().remove(1);
        super::super::testing::wait_event(&slot.interrupt);
        assert_eq!(registers.read(0x70) & 64, 64);
        assert_eq!(registers.read(0x60) & 2, 2);
        let mut driver = Driver::start(&set, &mem, 1);
        driver.add(&set, 0, &[], &[8]);
        assert_eq!(driver.wait(0).1.len(), 8);
    }
}
