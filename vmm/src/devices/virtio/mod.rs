//! The virtio devices of one VM: block, network, vsock, entropy and balloon, behind virtio-mmio (version 2) registers.
//!
//! [`DeviceSet`] is the whole interface. Registers are served on the vCPU threads; every queue is served by one I/O thread, so
//! "paused" means that this one thread stands still and nothing is in flight.
//!
//! Everything in guest memory is hostile: chains are walked with bounds, sizes are capped before use, and a queue that makes no
//! sense stops its device (`DEVICE_NEEDS_RESET`) and nothing else.

mod balloon;
mod block;
mod device;
mod events;
mod interrupt;
mod io_thread;
mod mmio;
mod model;
mod net;
mod queue;
mod rng;
mod set;
#[expect(unsafe_code, reason = "vectored I/O on guest memory, a private mapping, tap ioctls")]
mod sys;
#[cfg(test)]
mod testing;
mod vsock;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

pub use events::{DeviceEvent, EventReceiver, EventSender, event_channel};
pub use interrupt::Lines;
pub use set::{DeviceSet, DeviceSetState};

/// Guest memory, as all devices see it.
pub type Memory = vm_memory::GuestMemoryMmap<()>;

/// Guest-physical address of the registers of the first device.
pub const MMIO_BASE: u64 = 0xd000_0000;
/// Bytes of registers of one device; device `i` is at `MMIO_BASE + i * MMIO_SIZE`.
pub const MMIO_SIZE: u64 = 0x1000;
/// Interrupt line of the first device; device `i` has `FIRST_IRQ + i`.
pub const FIRST_IRQ: u32 = 6;
/// Offset of the `QueueNotify` register, where the ioeventfds go.
pub const QUEUE_NOTIFY: u64 = 0x50;
/// The guest's address on vsock. There is no vhost, so every VM may have the same.
pub const GUEST_CID: u64 = 3;

/// A block device and what is behind it.
#[derive(Debug)]
pub struct Disk {
    /// Serial number, 1 to 20 bytes; also what a saved disk is matched by.
    pub id: String,
    /// What is behind it.
    pub backing: Backing,
}

/// What is behind a block device.
#[derive(Debug)]
pub enum Backing {
    /// A placeholder of size 0.
    Empty {
        /// Whether the guest sees a read-only device.
        read_only: bool,
    },
    /// Files one after the other, each a multiple of 4096 bytes.
    ReadOnly {
        /// The files, in order.
        files: Vec<File>,
    },
    /// A stack of overlay layers, see `checkpoint::disk`.
    Writable {
        /// Size the guest sees, a multiple of 4096.
        size_bytes: u64,
        /// Bottom to top.
        sealed: Vec<OverlayLayer>,
        /// The layer that is written.
        active: OverlayLayer,
    },
}

/// The two files of an overlay layer. Two empty files are an empty layer.
#[derive(Debug)]
pub struct OverlayLayer {
    /// Blocks of 4 KiB at their own offsets, sparse.
    pub data: File,
    /// One bit for each block, least significant first; 1 = this layer holds the block.
    pub bitmap: File,
}

/// A network interface.
#[derive(Debug)]
pub struct Net {
    /// An attached tap, `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`. Header size and offloads are set here, from what the guest negotiated.
    /// `None`: it comes later, with [`DeviceSet::attach_tap`].
    pub tap: Option<OwnedFd>,
    /// MAC address the guest reads.
    pub mac: [u8; 6],
    /// MTU the guest reads.
    pub mtu: u16,
}

impl Net {
    /// An interface whose tap comes later. Its addresses and MTU are the agent's affair: what the guest reads is the same in every machine.
    #[must_use]
    pub fn unplugged() -> Self {
        Self {
            tap: None,
            mac: [0x02, b'r', b'a', b'm', b'e', b't'],
            mtu: u16::MAX,
        }
    }
}

/// Where a device sits, for ACPI and ioeventfds.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Guest-physical address of the registers.
    pub base: u64,
    /// Bytes of registers.
    pub size: u64,
    /// Interrupt line (edge-triggered).
    pub irq: u32,
    /// For each queue that is notified often, the value written to [`QUEUE_NOTIFY`] and the event that it means.
    pub notify: Vec<(u32, Arc<EventFd>)>,
    /// An offset, a value, and an event that nobody waits for: such a write means nothing, and need not leave the kernel.
    pub ignored: Option<(u64, u32, Arc<EventFd>)>,
    /// Written for an interrupt before [`DeviceSet::connect`].
    pub interrupt: Arc<EventFd>,
}

/// Why devices cannot be made, restored or changed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The configuration is wrong.
    #[error("disk {id}: {reason}")]
    Disk {
        /// The disk.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of a disk could not be used.
    #[error("disk {id}: {what}")]
    DiskFile {
        /// The disk.
        id: String,
        /// What was tried.
        what: &'static str,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The tap could not be set up.
    #[error("set up tap")]
    Tap(#[source] std::io::Error),
    /// The saved state is not one of ours, or not of this machine.
    #[error("saved device state: {0}")]
    State(String),
    /// Operating system resources.
    #[error("{what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}
