//! virtio-net over a tap: receive queue, transmit queue, checksum and segmentation offloads passed through.
//!
//! A device works without a tap, like a card without a cable: what the guest sends is lost, nothing arrives. Every machine has the
//! same devices that way, whether its network is known when it starts or not; the tap comes with [`Net::attach`].
//!
//! A fork gets a new tap. Frames that the parent's guest had queued but not yet sent are completed in the fork without being
//! sent: they carry the parent's addresses, and the parent sends them itself.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
};
use vmm_sys_util::epoll::EventSet;

use super::model::{Context, Model, Poller, copy_config, set_nonblocking};
use super::queue::Segments;
use super::{DeviceError, Net as NetParts, sys};

const QUEUES: &[u16] = &[256, 256];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const TAP: u32 = 0;
/// `struct virtio_net_hdr_v1`, in front of every frame.
const HEADER: usize = 12;
/// Where its `num_buffers` is.
const NUM_BUFFERS: usize = 10;
/// Largest frame with header: 64 KiB of segmentation offload and the Ethernet header.
const FRAME_MAX: usize = HEADER + 65536 + 18;

/// `TUN_F_*`: what the guest understands in frames that it receives.
const TUN_F_CSUM: u32 = 1;
const TUN_F_TSO4: u32 = 2;
const TUN_F_TSO6: u32 = 4;

/// A network device.
#[derive(Debug)]
pub(super) struct Net {
    tap: Option<OwnedFd>,
    /// Offloads of the tap are not set yet.
    fresh: bool,
    mac: [u8; 6],
    mtu: u16,
    /// A frame that was read and waits for receive buffers.
    waiting: Vec<u8>,
    buffer: Vec<u8>,
    /// Whether the I/O thread watches the tap.
    watching: bool,
}

impl Net {
    /// Takes a tap and sets its header size.
    pub(super) fn new(parts: NetParts) -> Result<Self, DeviceError> {
        if let Some(tap) = &parts.tap {
            set_header_size(tap)?;
        }
        Self::over(parts)
    }

    /// Plugs in a tap; it replaces the one that was there. The I/O thread must be woken to use it.
    pub(super) fn attach(&mut self, tap: OwnedFd, poller: &Poller) -> Result<(), DeviceError> {
        set_header_size(&tap)?;
        self.plug(tap, poller)
    }

    /// The same for any descriptor that [`Self::over`] takes.
    fn plug(&mut self, tap: OwnedFd, poller: &Poller) -> Result<(), DeviceError> {
        set_nonblocking(tap.as_fd()).map_err(DeviceError::Tap)?;
        self.watch(poller, false);
        self.tap = Some(tap);
        self.fresh = true;
        Ok(())
    }

    /// Takes any descriptor that reads and writes one frame with its header at a time.
    fn over(parts: NetParts) -> Result<Self, DeviceError> {
        if let Some(tap) = &parts.tap {
            set_nonblocking(tap.as_fd()).map_err(DeviceError::Tap)?;
        }
        Ok(Self {
            fresh: parts.tap.is_some(),
            tap: parts.tap,
            mac: parts.mac,
            mtu: parts.mtu,
            waiting: Vec::new(),
            buffer: vec![0; FRAME_MAX],
            watching: false,
        })
    }

    /// Completes what the driver has queued without sending it: the parent of this fork queued it. Before the vCPUs run.
    pub(super) fn drop_queued(&self, context: &mut Context<'_>) {
        let Some(queue) = context.queues.get_mut(TRANSMIT) else {
            return;
        };
        while let Some(chain) = queue.pop(context.mem) {
            queue.complete(context.mem, chain.head, 0);
        }
        queue.signal(context.mem, context.interrupt);
    }

    fn watch(&mut self, poller: &Poller, wanted: bool) {
        let Some(fd) = self.tap.as_ref().map(AsRawFd::as_raw_fd) else {
            return;
        };
        if wanted == self.watching {
            return;
        }
        if !wanted {
            poller.remove(fd);
        } else if let Err(error) = poller.add(fd, TAP, EventSet::IN) {
            tracing::error!(%error, "watch tap");
            return;
        }
        self.watching = wanted;
    }

    /// Tells a new tap which offloads the guest understands.
    fn set_up_tap(&mut self, context: &Context<'_>) {
        let Some(tap) = self.tap.as_ref().filter(|_| self.fresh) else {
            return;
        };
        let mut offload = 0;
        for (feature, flag) in [
            (VIRTIO_NET_F_GUEST_CSUM, TUN_F_CSUM),
            (VIRTIO_NET_F_GUEST_TSO4, TUN_F_TSO4),
            (VIRTIO_NET_F_GUEST_TSO6, TUN_F_TSO6),
        ] {
            if context.has(feature) {
                offload |= flag;
            }
        }
        if let Err(error) = sys::set_offload(tap.as_fd(), offload) {
            tracing::warn!(%error, "set offloads of tap");
        }
        self.fresh = false;
        self.watch(context.poller, true);
    }

    /// Moves frames from the tap to the guest until one of them has no more.
    fn receive(&mut self, context: &mut Context<'_>) {
        let mergeable = context.has(VIRTIO_NET_F_MRG_RXBUF);
        // Enough for one go; with more the tap wakes us again, after other devices had their turn.
        for _ in 0..QUEUES[RECEIVE] {
            if self.waiting.is_empty() {
                match self.read_frame() {
                    Ok(true) => {}
                    Ok(false) => {
                        self.watch(context.poller, true);
                        break;
                    }
                    Err(error) => {
                        // Somebody removed the interface. Watched further, it would be ready for ever.
                        tracing::warn!(%error, "the tap is lost");
                        self.watch(context.poller, false);
                        self.tap = None;
                        break;
                    }
                }
            }
            let Some(queue) = context.queues.get_mut(RECEIVE) else {
                break;
            };
            match deliver(queue, context.mem, &mut self.waiting, mergeable) {
                Delivery::Done => self.waiting.clear(),
                Delivery::Retry => {}
                Delivery::NoBuffers => {
                    self.watch(context.poller, false);
                    break;
                }
            }
        }
        if let Some(queue) = context.queues.get_mut(RECEIVE) {
            queue.signal(context.mem, context.interrupt);
        }
    }

    /// Whether there was one.
    fn read_frame(&mut self) -> nix::Result<bool> {
        let Some(tap) = &self.tap else { return Ok(false) };
        loop {
            match nix::unistd::read(tap, &mut self.buffer) {
                Ok(bytes) if bytes > HEADER => {
                    self.waiting.clear();
                    self.waiting.extend_from_slice(&self.buffer[..bytes]);
                    return Ok(true);
                }
                Ok(0) | Err(nix::errno::Errno::EAGAIN) => return Ok(false),
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn transmit(&mut self, context: &mut Context<'_>) {
        let Some(queue) = context.queues.get_mut(TRANSMIT) else {
            return;
        };
        loop {
            queue.disable_notification(context.mem);
            while let Some(chain) = queue.pop(context.mem) {
                self.send(&chain.readable);
                queue.complete(context.mem, chain.head, 0);
            }
            queue.signal(context.mem, context.interrupt);
            if !queue.enable_notification(context.mem) {
                break;
            }
        }
    }

    /// A frame that the tap does not take is lost, as on a wire.
    fn send(&self, frame: &Segments<'_>) {
        let bytes = frame.len();
        if bytes <= HEADER as u64 || bytes > FRAME_MAX as u64 {
            return;
        }
        let Some(tap) = &self.tap else { return };
        if let Err(error) = sys::writev(tap.as_fd(), frame.slices()) {
            tracing::trace!(%error, "frame not sent");
        }
    }
}

fn set_header_size(tap: &OwnedFd) -> Result<(), DeviceError> {
    let header = libc::c_int::try_from(HEADER).unwrap_or(0);
    sys::set_vnet_header_size(tap.as_fd(), header).map_err(DeviceError::Tap)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    Done,
    /// More buffers came meanwhile.
    Retry,
    /// The guest notifies us of the next buffer.
    NoBuffers,
}

/// Puts a frame into receive buffers; a frame that cannot fit is dropped.
fn deliver(queue: &mut super::queue::VirtQueue, mem: &super::Memory, frame: &mut [u8], mergeable: bool) -> Delivery {
    let mut chains = Vec::new();
    let mut room = 0;
    while room < frame.len() as u64 {
        let Some(chain) = queue.pop(mem) else { break };
        room += chain.writable.len();
        chains.push(chain);
        if !mergeable {
            break;
        }
    }
    if chains.is_empty() || room < frame.len() as u64 && mergeable {
        // Asked for before the chains are put back: one more than there are now is news.
        let more = queue.enable_notification(mem);
        queue.push_back(chains.len());
        return if more { Delivery::Retry } else { Delivery::NoBuffers };
    }
    let fits = room >= frame.len() as u64;
    let count = u16::try_from(chains.len()).unwrap_or(u16::MAX);
    frame[NUM_BUFFERS..HEADER].copy_from_slice(&count.to_le_bytes());
    let mut rest: &[u8] = if fits { frame } else { &[] };
    for mut chain in chains {
        let written = chain.writable.write(rest);
        rest = &rest[written..];
        queue.complete(mem, chain.head, written as u64);
    }
    Delivery::Done
}

impl Model for Net {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_MRG_RXBUF,
        ]
        .iter()
        .fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    /// `struct virtio_net_config`: MAC, status, number of queue pairs, MTU.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0u8; 12];
        config[..6].copy_from_slice(&self.mac);
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        copy_config(&config, offset, data);
    }

    fn activate(&mut self, context: &mut Context<'_>) {
        self.fresh = true;
        self.set_up_tap(context);
    }

    fn settle(&mut self, context: &mut Context<'_>) {
        self.set_up_tap(context);
    }

    fn reset(&mut self, poller: &Poller) {
        self.watch(poller, false);
        self.waiting.clear();
    }

    fn queue_event(&mut self, context: &mut Context<'_>, queue: usize) {
        match queue {
            RECEIVE => self.receive(context),
            _ => self.transmit(context),
        }
    }

    fn own_event(&mut self, context: &mut Context<'_>, _token: u32, _events: EventSet) {
        self.receive(context);
    }
}

#[cfg(test)]
mod tests;
