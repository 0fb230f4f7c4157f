//! One device: registers, queues and model behind one lock, and what is reached without it.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::interrupt::{Interrupt, Lines, Page};
use super::mmio::{INTERRUPT_ACK, INTERRUPT_STATUS, Pending, Transport, TransportState};
use super::model::{Context, LogQuota, Model, Poller, Source};
use super::queue::VirtQueue;
use super::set::{AnyModel, DeviceState, ModelState};
use super::{DeviceError, Memory};

/// A device.
#[derive(Debug)]
pub(super) struct Device {
    interrupt: Arc<Interrupt>,
    notify: Vec<Arc<EventFd>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    transport: Transport,
    model: AnyModel,
    poller: Poller,
    warnings: LogQuota,
}

impl AnyModel {
    fn as_dyn(&self) -> &dyn Model {
        match self {
            Self::Block(model) => model,
            Self::Net(model) => model,
            Self::Vsock(model) => model.as_ref(),
            Self::Rng(model) => model,
            Self::Balloon(model) => model,
        }
    }

    fn as_dyn_mut(&mut self) -> &mut dyn Model {
        match self {
            Self::Block(model) => model,
            Self::Net(model) => model,
            Self::Vsock(model) => model.as_mut(),
            Self::Rng(model) => model,
            Self::Balloon(model) => model,
        }
    }

    fn save(&self) -> ModelState {
        match self {
            Self::Block(block) => ModelState::Block(block.save()),
            Self::Net(_) => ModelState::Net,
            Self::Vsock(vsock) => ModelState::Vsock(vsock.save()),
            Self::Rng(_) => ModelState::Rng,
            Self::Balloon(_) => ModelState::Balloon,
        }
    }
}

fn event() -> Result<Arc<EventFd>, DeviceError> {
    let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
    event.map(Arc::new).map_err(|source| DeviceError::System {
        what: "create an event",
        source,
    })
}

impl Device {
    /// A device at power-on.
    pub(super) fn new(model: AnyModel, poller: Poller, irq: u32, page: Page) -> Result<Self, DeviceError> {
        let interrupt = Arc::new(Interrupt::new(irq, event()?, page));
        let transport = Transport::new(model.as_dyn(), Arc::clone(&interrupt))?;
        let mut notify = Vec::with_capacity(transport.queues.len());
        for (number, _) in (0u32..).zip(&transport.queues) {
            let event = event()?;
            poller
                .add_queue(event.as_raw_fd(), number)
                .map_err(|source| DeviceError::System {
                    what: "watch an event",
                    source,
                })?;
            notify.push(event);
        }
        Ok(Self {
            interrupt,
            notify,
            inner: Mutex::new(Inner {
                transport,
                model,
                poller,
                warnings: LogQuota::default(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events that notify each queue.
    pub(super) fn notify(&self) -> &[Arc<EventFd>] {
        &self.notify
    }

    /// The event that is written for an interrupt before [`Self::connect`].
    pub(super) fn interrupt(&self) -> Arc<EventFd> {
        self.interrupt.event()
    }

    /// Connects the interrupt line.
    pub(super) fn connect(&self, lines: Arc<dyn Lines>) {
        self.interrupt.connect(lines);
    }

    /// A register read. Interrupt reasons are read without the lock, so that a guest in its interrupt handler never waits for I/O.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        if let (INTERRUPT_STATUS, Ok(data)) = (offset, <&mut [u8; 4]>::try_from(&mut *data)) {
            *data = self.interrupt.reasons().to_le_bytes();
            return;
        }
        let inner = self.lock();
        inner.transport.read(inner.model.as_dyn(), offset, data);
    }

    /// A register write.
    pub(super) fn write(&self, mem: &Memory, offset: u64, data: &[u8]) {
        if let (INTERRUPT_ACK, Ok(data)) = (offset, <[u8; 4]>::try_from(data)) {
            self.interrupt.acknowledge(u32::from_le_bytes(data));
            return;
        }
        let mut inner = self.lock();
        inner.transport.write(mem, offset, data);
        if inner.transport.pending != Pending::default() {
            inner.poller.wake();
        }
    }

    /// A queue notification that came as a register write.
    pub(super) fn notify_queue(&self, data: &[u8]) {
        let queue = <[u8; 4]>::try_from(data).map(u32::from_le_bytes).ok();
        if let Some(event) = queue.and_then(|queue| self.notify.get(usize::try_from(queue).ok()?)) {
            let _counter_full = event.write(1);
        }
    }

    /// Takes over a saved state, and does what must be done in guest memory before the vCPUs run.
    pub(super) fn restore(&self, mem: &Memory, state: &TransportState) -> Result<(), DeviceError> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.transport.restore(mem, state)?;
        if inner.transport.is_active() {
            let mut context = context(&mut inner.transport, &inner.poller, mem);
            match &mut inner.model {
                AnyModel::Vsock(vsock) => vsock.activate_restored(&mut context),
                AnyModel::Net(net) => net.drop_queued(&mut context),
                AnyModel::Block(_) | AnyModel::Rng(_) | AnyModel::Balloon(_) => {}
            }
        }
        Ok(())
    }

    /// Saved state.
    pub(super) fn save(&self) -> DeviceState {
        let inner = self.lock();
        DeviceState {
            transport: inner.transport.save(),
            model: inner.model.save(),
        }
    }

    /// Works on the model from another thread than the I/O thread.
    pub(super) fn with_model<T>(&self, work: impl FnOnce(&mut AnyModel, &Poller) -> T) -> T {
        let mut inner = self.lock();
        let inner = &mut *inner;
        work(&mut inner.model, &inner.poller)
    }

    /// An epoll event, on the I/O thread.
    pub(super) fn event(&self, mem: &Memory, source: Source, events: EventSet) {
        if let Source::Queue(queue) = source
            && let Some(event) = self.notify.get(queue)
        {
            // Nothing to read when the notification was seen by a kick already.
            let _cleared = event.read();
        }
        self.lock().run(mem, |model, context| match source {
            Source::Queue(queue) => model.queue_event(context, queue),
            Source::Own(token) => model.own_event(context, token, events),
        });
    }

    /// Looks at every queue, on the I/O thread: after a pause, notifications and interrupts that were on their way may be lost.
    pub(super) fn kick(&self, mem: &Memory) {
        let mut inner = self.lock();
        inner.run(mem, |model, context| {
            for queue in 0..context.queues.len() {
                model.queue_event(context, queue);
            }
        });
        let queues = &inner.transport.queues;
        let unseen = inner.transport.is_active() && queues.iter().any(|queue| queue.has_unseen(mem));
        self.interrupt.raise_again(unseen);
    }

    /// Does what register writes and other threads left to do, on the I/O thread.
    pub(super) fn settle(&self, mem: &Memory) {
        self.lock().run(mem, |model, context| model.settle(context));
    }
}

impl Inner {
    /// Runs `work` if there is a driver, after a pending reset or activation.
    fn run(&mut self, mem: &Memory, work: impl FnOnce(&mut dyn Model, &mut Context<'_>)) {
        let pending = std::mem::take(&mut self.transport.pending);
        let model = self.model.as_dyn_mut();
        if pending.reset {
            model.reset(&self.poller);
        }
        if !self.transport.is_active() {
            return;
        }
        let mut context = context(&mut self.transport, &self.poller, mem);
        if pending.activate {
            model.activate(&mut context);
            for queue in 0..context.queues.len() {
                model.queue_event(&mut context, queue);
            }
        }
        work(model, &mut context);
        if self.transport.queues.iter().any(VirtQueue::is_broken) {
            if self.warnings.take() {
                tracing::warn!(device = self.model.as_dyn().device_type(), "the guest broke a queue");
            }
            self.transport.require_reset();
        }
    }
}

fn context<'a>(transport: &'a mut Transport, poller: &'a Poller, mem: &'a Memory) -> Context<'a> {
    let features = transport.features();
    Context {
        mem,
        queues: &mut transport.queues,
        interrupt: &transport.interrupt,
        features,
        poller,
    }
}
