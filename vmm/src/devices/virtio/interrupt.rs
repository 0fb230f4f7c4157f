//! The interrupt of a device, and the page of registers that the guest reads without leaving the VM.
//!
//! Lines are edge-triggered, so nothing but the edge says that there are used buffers. `InterruptStatus` therefore always names that reason,
//! and acknowledging it changes nothing: a driver that looks at its queues once too often finds them empty. So neither needs the VMM:
//! the register is read from memory, and the acknowledgement is an event that nobody waits for. A change of the configuration is a reason
//! until it is acknowledged.

use std::fmt::Debug;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use vm_memory::{Bytes, MmapRegion, VolatileMemory};
use vmm_sys_util::eventfd::EventFd;

use super::MMIO_SIZE;
use super::mmio::INTERRUPT_STATUS;

/// Interrupt reason: a queue has used buffers.
pub(super) const REASON_QUEUE: u32 = 1;
/// Interrupt reason: the configuration (or the status) changed.
pub(super) const REASON_CONFIG: u32 = 2;

/// Raises interrupt lines of a machine by number.
pub trait Lines: Debug + Send + Sync {
    /// One edge on this line.
    fn pulse(&self, irq: u32);
}

/// The registers of one device as they read, in memory that the guest has read-only.
#[derive(Clone, Debug)]
pub(super) struct Page {
    all: Arc<MmapRegion<()>>,
    start: usize,
}

impl Page {
    /// The page with this number.
    pub(super) fn new(all: Arc<MmapRegion<()>>, number: u32) -> Self {
        let start = usize::try_from(u64::from(number) * MMIO_SIZE).unwrap_or(usize::MAX);
        Self { all, start }
    }

    /// A page of its own.
    #[cfg(test)]
    pub(super) fn alone() -> Self {
        Self::new(Arc::new(MmapRegion::new(4096).unwrap()), 0)
    }

    /// Makes the register at `offset`, a multiple of four, read as `value`. What lies outside the page is left out.
    pub(super) fn set(&self, offset: u64, value: u32) {
        let place = usize::try_from(offset).ok().filter(|offset| *offset < 4096);
        if let Some(place) = place.and_then(|offset| self.start.checked_add(offset)) {
            // Fails only for a place outside the region or between registers.
            let _outside = self
                .all
                .as_volatile_slice()
                .store(value.to_le(), place, Ordering::SeqCst);
        }
    }
}

/// The interrupt line of a device and the reasons the guest has not acknowledged.
#[derive(Debug)]
pub(super) struct Interrupt {
    irq: u32,
    /// The configuration changed and the guest has not acknowledged it.
    config: Mutex<bool>,
    /// Tells of the interrupt while there is no machine.
    event: Arc<EventFd>,
    lines: OnceLock<Arc<dyn Lines>>,
    page: Page,
}

impl Interrupt {
    /// Without a reason; `event` is written as long as there are no lines.
    pub(super) fn new(irq: u32, event: Arc<EventFd>, page: Page) -> Self {
        let interrupt = Self {
            irq,
            config: Mutex::new(false),
            event,
            lines: OnceLock::new(),
            page,
        };
        interrupt.set_reasons(0);
        interrupt
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the line is from now on.
    pub(super) fn connect(&self, lines: Arc<dyn Lines>) {
        let _already = self.lines.set(lines);
    }

    /// The event that is written without lines.
    pub(super) fn event(&self) -> Arc<EventFd> {
        Arc::clone(&self.event)
    }

    /// The page of registers.
    pub(super) fn page(&self) -> &Page {
        &self.page
    }

    /// There are used buffers.
    pub(super) fn queue_used(&self) {
        self.raise();
    }

    /// The configuration changed.
    pub(super) fn config_changed(&self) {
        self.set_reasons(REASON_CONFIG);
        self.raise();
    }

    /// The reasons as the guest reads them.
    pub(super) fn reasons(&self) -> u32 {
        reasons(*self.lock())
    }

    /// Takes over saved reasons, without an interrupt; 0 at a reset.
    pub(super) fn set_reasons(&self, value: u32) {
        let mut config = self.lock();
        *config = value & REASON_CONFIG != 0;
        self.page.set(INTERRUPT_STATUS, reasons(*config));
    }

    /// The guest has seen these reasons.
    pub(super) fn acknowledge(&self, value: u32) {
        if value & REASON_CONFIG != 0 {
            self.set_reasons(0);
        }
    }

    /// Raises the line again: an edge that was on its way when the machine was saved is not in the saved state. `unseen`: whether the
    /// guest may have used buffers that it does not know of.
    pub(super) fn raise_again(&self, unseen: bool) {
        if unseen || self.reasons() & REASON_CONFIG != 0 {
            self.raise();
        }
    }

    fn raise(&self) {
        match self.lines.get() {
            Some(lines) => lines.pulse(self.irq),
            // Can only fail when the counter is at its maximum, and then the event is there anyway.
            None => drop(self.event.write(1)),
        }
    }
}

fn reasons(config: bool) -> u32 {
    if config {
        REASON_QUEUE | REASON_CONFIG
    } else {
        REASON_QUEUE
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[derive(Debug, Default)]
    struct Pulses(Mutex<Vec<u32>>);

    impl Lines for Pulses {
        fn pulse(&self, irq: u32) {
            self.0.lock().unwrap().push(irq);
        }
    }

    fn interrupt() -> Interrupt {
        let event = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        Interrupt::new(9, event, Page::alone())
    }

    fn register(interrupt: &Interrupt) -> u32 {
        interrupt
            .page
            .all
            .as_volatile_slice()
            .load(0x60, Ordering::SeqCst)
            .unwrap()
    }

    #[test]
    fn a_change_of_configuration_is_a_reason_until_it_is_acknowledged() {
        let interrupt = interrupt();
        assert_eq!((interrupt.reasons(), register(&interrupt)), (1, 1));
        interrupt.config_changed();
        interrupt.acknowledge(1);
        assert_eq!((interrupt.reasons(), register(&interrupt)), (3, 3));
        interrupt.acknowledge(2);
        interrupt.acknowledge(u32::MAX);
        assert_eq!((interrupt.reasons(), register(&interrupt)), (1, 1));
        assert_eq!(interrupt.event.read().unwrap(), 1);
    }

    #[test]
    fn used_buffers_are_always_a_reason() {
        let interrupt = interrupt();
        interrupt.queue_used();
        interrupt.acknowledge(3);
        interrupt.set_reasons(0);
        assert_eq!((interrupt.reasons(), register(&interrupt)), (1, 1));
    }

    #[test]
    fn a_line_takes_the_place_of_the_event() {
        let interrupt = interrupt();
        let pulses = Arc::new(Pulses::default());
        interrupt.connect(Arc::clone(&pulses) as Arc<dyn Lines>);
        interrupt.queue_used();
        interrupt.raise_again(false);
        interrupt.raise_again(true);
        interrupt.config_changed();
        interrupt.raise_again(false);
        assert_eq!(*pulses.0.lock().unwrap(), [9, 9, 9, 9]);
        assert!(interrupt.event.read().is_err());
    }

    #[test]
    fn nothing_is_written_beside_the_page() {
        let all = Arc::new(MmapRegion::<()>::new(8192).unwrap());
        let first = Page::new(Arc::clone(&all), 0);
        for offset in [4096, 4094, u64::MAX, u64::MAX - 3] {
            first.set(offset, u32::MAX);
        }
        Page::new(Arc::clone(&all), 2).set(0, u32::MAX);
        let mut bytes = vec![0; 8192];
        all.as_volatile_slice().copy_to(&mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}
