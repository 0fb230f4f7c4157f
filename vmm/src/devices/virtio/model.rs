//! What every device is to the transport and to the I/O thread.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::Memory;
use super::interrupt::Interrupt;
use super::queue::VirtQueue;

/// Tokens below this one are queue numbers; a device's own descriptors come after.
const FIRST_OWN_TOKEN: u32 = 0x100;

/// Where an epoll event belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A queue was notified.
    Queue(usize),
    /// A descriptor that the device registered under this token.
    Own(u32),
}

/// Registers descriptors of one device with the I/O thread.
#[derive(Clone, Debug)]
pub(super) struct Poller {
    epoll: Arc<Epoll>,
    device: u32,
    wake: Arc<EventFd>,
}

impl Poller {
    /// For the device with this number.
    pub(super) fn new(epoll: Arc<Epoll>, device: u32, wake: Arc<EventFd>) -> Self {
        Self { epoll, device, wake }
    }

    /// Makes the I/O thread come round again.
    pub(super) fn wake(&self) {
        // Fails only when the counter is at its maximum, and then the thread wakes anyway.
        let _counter_full = self.wake.write(1);
    }

    fn data(&self, token: u32) -> u64 {
        u64::from(self.device) << 32 | u64::from(token)
    }

    /// Which device and source an event's data names.
    pub(super) fn decode(data: u64) -> (usize, Source) {
        let device = usize::try_from(data >> 32).unwrap_or(usize::MAX);
        let token = u32::try_from(data & 0xffff_ffff).unwrap_or(u32::MAX);
        match token.checked_sub(FIRST_OWN_TOKEN) {
            Some(own) => (device, Source::Own(own)),
            None => (device, Source::Queue(token as usize)),
        }
    }

    /// Watches a queue's notifications.
    pub(super) fn add_queue(&self, fd: RawFd, queue: u32) -> io::Result<()> {
        self.epoll.ctl(
            ControlOperation::Add,
            fd,
            EpollEvent::new(EventSet::IN, self.data(queue)),
        )
    }

    /// Watches a descriptor of the device. Tokens must stay below `u32::MAX - 0x100`.
    pub(super) fn add(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        let event = EpollEvent::new(events, self.data(FIRST_OWN_TOKEN.saturating_add(token)));
        self.epoll.ctl(ControlOperation::Add, fd, event)
    }

    /// Changes what is watched.
    pub(super) fn modify(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        let event = EpollEvent::new(events, self.data(FIRST_OWN_TOKEN.saturating_add(token)));
        self.epoll.ctl(ControlOperation::Modify, fd, event)
    }

    /// Stops watching.
    pub(super) fn remove(&self, fd: RawFd) {
        // Only fails for a descriptor that is not watched.
        let _not_watched = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }
}

/// What a device works with while it handles something, always on the I/O thread.
#[derive(Debug)]
pub(super) struct Context<'a> {
    /// Guest memory.
    pub(super) mem: &'a Memory,
    /// The device's queues.
    pub(super) queues: &'a mut [VirtQueue],
    /// The device's interrupt.
    pub(super) interrupt: &'a Interrupt,
    /// Features the driver accepted.
    pub(super) features: u64,
    /// The device's part of the I/O thread.
    pub(super) poller: &'a Poller,
}

impl Context<'_> {
    /// Whether the driver accepted a feature bit.
    pub(super) fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }
}

/// A kind of device.
pub(super) trait Model {
    /// Virtio device number.
    fn device_type(&self) -> u32;
    /// Feature bits of the device itself.
    fn features(&self) -> u64;
    /// Largest size of each queue.
    fn queue_sizes(&self) -> &'static [u16];
    /// Reads configuration space; what lies outside reads as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// The driver is ready (after start, reset or restore).
    fn activate(&mut self, context: &mut Context<'_>);
    /// The driver reset the device: forget everything that belongs to it.
    fn reset(&mut self, poller: &Poller);
    /// A queue may have new chains.
    fn queue_event(&mut self, context: &mut Context<'_>, queue: usize);
    /// Called after every round of events; another thread may have left work.
    fn settle(&mut self, context: &mut Context<'_>) {
        let _ = context;
    }
    /// A registered descriptor is ready.
    fn own_event(&mut self, context: &mut Context<'_>, token: u32, events: EventSet) {
        let _ = (context, token, events);
    }
}

/// Log lines that a guest can cause over and over: the first few are written, so that no guest fills the host's log.
#[derive(Debug, Default)]
pub(super) struct LogQuota(u32);

impl LogQuota {
    const LINES: u32 = 16;

    /// Whether one more line may be written.
    pub(super) fn take(&mut self) -> bool {
        let left = self.0 < Self::LINES;
        self.0 += u32::from(left);
        left
    }
}

/// Makes reads and writes return instead of waiting.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Copies the part of a configuration space that a read asks for.
pub(super) fn copy_config(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    if let Some(rest) = config.get(start..) {
        let count = rest.len().min(data.len());
        data[..count].copy_from_slice(&rest[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::LogQuota;

    #[test]
    fn a_guest_causes_a_few_log_lines_only() {
        let mut quota = LogQuota::default();
        assert_eq!((0..1000).filter(|_| quota.take()).count(), 16);
    }
}
