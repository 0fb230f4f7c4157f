//! All virtio devices of one VM and the thread that serves their queues.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use super::{DeviceError, Disk, EventSender, Memory, Net, OverlayLayer, Slot};

/// Saved state of all devices, in slot order. Holds nothing of the host: no file, interface or connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSetState {}

/// All virtio devices of one VM.
#[derive(Debug)]
pub struct DeviceSet {}

impl DeviceSet {
    /// Makes the devices of a new machine, in this order: disks, networks, then vsock and entropy if `linux_devices`. Nothing is
    /// served before [`Self::start`].
    ///
    /// # Errors
    /// When a file, tap or size cannot be used.
    pub fn create(
        mem: Memory,
        disks: Vec<Disk>,
        nets: Vec<Net>,
        linux_devices: bool,
        events: EventSender,
    ) -> Result<Self, DeviceError> {
        let _ = (mem, disks, nets, linux_devices, events);
        Err(DeviceError::State("not built yet".into()))
    }

    /// Makes the devices of a saved machine; disks are matched by id, networks by order. Guest memory must already hold the saved contents:
    /// this writes to it (the vsock reset event, frames that were waiting to be sent).
    ///
    /// # Errors
    /// When the state makes no sense, or what is given does not fit it.
    pub fn restore(
        mem: Memory,
        state: DeviceSetState,
        disks: Vec<Disk>,
        nets: Vec<Net>,
        events: EventSender,
    ) -> Result<Self, DeviceError> {
        let _ = (mem, state, disks, nets, events);
        Err(DeviceError::State("not built yet".into()))
    }

    /// Where the devices are, in order.
    pub fn slots(&self) -> Vec<Slot> {
        Vec::new()
    }

    /// A guest read of a device register, on a vCPU thread.
    pub fn mmio_read(&self, addr: u64, data: &mut [u8]) {
        let _ = (self, addr, data);
    }

    /// A guest write to a device register, on a vCPU thread.
    pub fn mmio_write(&self, addr: u64, data: &[u8]) {
        let _ = (self, addr, data);
    }

    /// Starts the I/O thread's work. Call once.
    pub fn start(&self) {}

    /// Returns when nothing is in flight. The vCPUs must already stand still.
    pub fn pause(&self) {}

    /// Goes on after [`Self::pause`], with a look at every queue.
    pub fn resume(&self) {}

    /// The state to bring the devices back; only while paused.
    pub fn save(&self) -> DeviceSetState {
        DeviceSetState {}
    }

    /// Makes the active layer of a disk its top sealed one (its bitmap is complete in its file afterwards) and `next` the active one.
    /// Only while paused.
    ///
    /// # Errors
    /// When there is no such writable disk, or a file cannot be used; the disk goes on with the old layer.
    pub fn seal_disk(&self, id: &str, next: OverlayLayer) -> Result<(), DeviceError> {
        let _ = (id, next);
        Ok(())
    }

    /// Opens a vsock connection from the host to a guest port; `stream` is a connected `SOCK_STREAM` socket. It is closed when the guest refuses.
    pub fn connect_vsock(&self, port: u32, stream: OwnedFd) {
        let _ = (port, stream);
    }
}
