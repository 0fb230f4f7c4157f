//! All virtio devices of one VM and the thread that serves their queues.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};
use vm_memory::MmapRegion;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::balloon::Balloon;
use super::block::{Block, BlockState};
use super::device::Device;
use super::interrupt::{Lines, Page, REASON_QUEUE};
use super::io_thread::{Gate, WAKE, Worker};
use super::mmio::{INTERRUPT_ACK, TransportState};
use super::model::Poller;
use super::net::Net as NetModel;
use super::rng::Rng;
use super::vsock::{Vsock, VsockState};
use super::{
    DeviceError, Disk, EventSender, FIRST_IRQ, MMIO_BASE, MMIO_SIZE, Memory, Net, OverlayLayer, QUEUE_NOTIFY, Slot,
};

/// Most devices of one VM: the interrupt lines from [`FIRST_IRQ`] to 23.
const DEVICES_MAX: usize = 18;
/// Bytes of registers of one device, see [`MMIO_SIZE`].
const REGISTERS: usize = 4096;

/// Saved state of all devices, in slot order. Holds nothing of the host: no file, interface or connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSetState {
    devices: Vec<DeviceState>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeviceState {
    pub(super) transport: TransportState,
    pub(super) model: ModelState,
}

/// Saved state of what is behind the registers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ModelState {
    Block(BlockState),
    Net,
    Vsock(VsockState),
    Rng,
    Balloon,
}

/// What is behind the registers.
#[derive(Debug)]
pub(super) enum AnyModel {
    Block(Block),
    Net(NetModel),
    Vsock(Box<Vsock>),
    Rng(Rng),
    Balloon(Balloon),
}

/// What the vCPU threads, the main thread and the I/O thread share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) mem: Memory,
    pub(super) devices: Vec<Device>,
    pub(super) epoll: Arc<Epoll>,
    pub(super) gate: Gate,
    /// The registers of all devices as they read, in order.
    registers: Arc<MmapRegion<()>>,
    /// See [`Slot::ignored`].
    ignored: Arc<EventFd>,
}

/// All virtio devices of one VM.
#[derive(Debug)]
pub struct DeviceSet {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> DeviceError {
    move |source| DeviceError::System { what, source }
}

impl DeviceSet {
    /// Makes the devices of a new machine, in this order: disks, networks, then vsock, entropy and balloon if `linux_devices`. Nothing
    /// is served before [`Self::start`].
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
        let mut models = Vec::new();
        for disk in disks {
            models.push(AnyModel::Block(Block::new(disk)?));
        }
        for net in nets {
            models.push(AnyModel::Net(NetModel::new(net)?));
        }
        if linux_devices {
            models.push(AnyModel::Vsock(Box::new(Vsock::new(events))));
            models.push(AnyModel::Rng(Rng));
            models.push(AnyModel::Balloon(Balloon::default()));
        }
        Self::assemble(mem, models)
    }

    /// Makes the devices of a saved machine; disks are matched by id, networks by order; a network that
    /// is not given has no tap yet. Guest memory must already hold the saved contents:
    /// this writes to it (the vsock reset event).
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
        let mut disks: Vec<Option<Disk>> = disks.into_iter().map(Some).collect();
        let mut nets = nets.into_iter();
        let mut models = Vec::new();
        for device in &state.devices {
            models.push(match &device.model {
                ModelState::Block(saved) => AnyModel::Block(restore_block(saved, &mut disks)?),
                ModelState::Net => AnyModel::Net(NetModel::new(nets.next().unwrap_or_else(Net::unplugged))?),
                ModelState::Vsock(saved) => AnyModel::Vsock(Box::new(Vsock::restore(saved, events.clone()))),
                ModelState::Rng => AnyModel::Rng(Rng),
                ModelState::Balloon => AnyModel::Balloon(Balloon::default()),
            });
        }
        let left: Vec<String> = disks.into_iter().flatten().map(|disk| disk.id).collect();
        if !left.is_empty() || nets.next().is_some() {
            return Err(DeviceError::State(format!(
                "given but not in the saved machine: {left:?} or a network"
            )));
        }
        let set = Self::assemble(mem, models)?;
        set.restore_transports(&state)?;
        Ok(set)
    }

    /// Gives each device its saved registers and queues.
    pub(super) fn restore_transports(&self, state: &DeviceSetState) -> Result<(), DeviceError> {
        let mut devices = self.shared.devices.iter().zip(&state.devices);
        devices.try_for_each(|(device, saved)| device.restore(&self.shared.mem, &saved.transport))
    }

    /// A set of these devices, in this order.
    pub(super) fn assemble(mem: Memory, models: Vec<AnyModel>) -> Result<Self, DeviceError> {
        if models.len() > DEVICES_MAX {
            return Err(DeviceError::State(format!(
                "{} devices; at most {DEVICES_MAX} have a place",
                models.len()
            )));
        }
        let epoll = Arc::new(Epoll::new().map_err(system("create an epoll instance"))?);
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(system("create an event"))?;
        let event = EpollEvent::new(EventSet::IN, WAKE);
        epoll
            .ctl(ControlOperation::Add, wake.as_raw_fd(), event)
            .map_err(system("watch an event"))?;
        let wake = Arc::new(wake);
        let ignored = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(system("create an event"))?;
        let bytes = models.len().max(1).saturating_mul(REGISTERS);
        let registers = MmapRegion::new(bytes).map_err(|error| DeviceError::System {
            what: "map memory for registers",
            source: std::io::Error::other(error),
        })?;
        let registers = Arc::new(registers);
        let mut devices = Vec::with_capacity(models.len());
        for (number, model) in (0u32..).zip(models) {
            let poller = Poller::new(Arc::clone(&epoll), number, Arc::clone(&wake));
            let page = Page::new(Arc::clone(&registers), number);
            devices.push(Device::new(model, poller, FIRST_IRQ + number, page)?);
        }
        let shared = Shared {
            mem,
            devices,
            epoll,
            gate: Gate::new(wake),
            registers,
            ignored: Arc::new(ignored),
        };
        Ok(Self {
            shared: Arc::new(shared),
            thread: Mutex::new(None),
        })
    }

    /// Where the devices are, in order.
    pub fn slots(&self) -> Vec<Slot> {
        (0u32..)
            .zip(&self.shared.devices)
            .map(|(number, device)| Slot {
                base: MMIO_BASE + u64::from(number) * MMIO_SIZE,
                size: MMIO_SIZE,
                irq: FIRST_IRQ + number,
                notify: doorbells(device),
                ignored: is_busy(device).then(|| (INTERRUPT_ACK, REASON_QUEUE, Arc::clone(&self.shared.ignored))),
                interrupt: device.interrupt(),
            })
            .collect()
    }

    /// The registers of all devices as they read, from [`MMIO_BASE`] on: the guest may have this memory, read-only, instead of
    /// asking [`Self::mmio_read`].
    pub fn registers(&self) -> Arc<MmapRegion<()>> {
        Arc::clone(&self.shared.registers)
    }

    /// Connects the interrupt lines of all devices, once.
    pub fn connect(&self, lines: &Arc<dyn Lines>) {
        self.shared
            .devices
            .iter()
            .for_each(|device| device.connect(Arc::clone(lines)));
    }

    fn locate(&self, addr: u64) -> Option<(&Device, u64)> {
        let offset = addr.checked_sub(MMIO_BASE)?;
        let device = self.shared.devices.get(usize::try_from(offset / MMIO_SIZE).ok()?)?;
        Some((device, offset % MMIO_SIZE))
    }

    /// A guest read of a device register, on a vCPU thread. What is not a register reads as ones.
    pub fn mmio_read(&self, addr: u64, data: &mut [u8]) {
        match self.locate(addr) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// A guest write to a device register, on a vCPU thread. Queue notifications arrive here when they have no ioeventfd.
    pub fn mmio_write(&self, addr: u64, data: &[u8]) {
        match self.locate(addr) {
            Some((device, QUEUE_NOTIFY)) => device.notify_queue(data),
            Some((device, offset)) => device.write(&self.shared.mem, offset, data),
            None => {}
        }
    }

    /// Starts serving, with a look at every queue. After [`Self::restore`], only when the interrupt controller has its state.
    pub fn start(&self) {
        self.start_with(|| {});
    }

    /// Like [`Self::start`]; `first` runs on the I/O thread before it serves anything (a system call filter, say).
    pub fn start_with(&self, first: impl FnOnce() + Send + 'static) {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let worker = Worker::new(Arc::clone(&self.shared));
            let spawned = std::thread::Builder::new().name("ramet-io".into()).spawn(move || {
                first();
                worker.run();
            });
            match spawned {
                Ok(handle) => *thread = Some(handle),
                Err(error) => tracing::error!(%error, "start I/O thread"),
            }
        }
        drop(thread);
        self.shared.gate.open();
    }

    /// Returns when nothing is in flight. The vCPUs must already stand still.
    pub fn pause(&self) {
        self.shared.gate.close();
    }

    /// Goes on after [`Self::pause`], with a look at every queue.
    pub fn resume(&self) {
        self.start();
    }

    /// The state to bring the devices back; only while paused.
    pub fn save(&self) -> DeviceSetState {
        DeviceSetState {
            devices: self.shared.devices.iter().map(Device::save).collect(),
        }
    }

    /// Makes the active layer of each named disk its top sealed one (its bitmap is complete in its file afterwards, nothing is flushed)
    /// and the layer given the active one: all of them or none. Only while paused.
    ///
    /// # Errors
    /// When there is no such writable disk, or a file cannot be used; every disk goes on with its old layer.
    pub fn seal_disks(&self, disks: Vec<(String, OverlayLayer)>) -> Result<(), DeviceError> {
        let mut prepared = Vec::with_capacity(disks.len());
        for (id, next) in disks {
            let device = self.shared.devices.iter().find(|device| {
                device.with_model(|model, _| matches!(model, AnyModel::Block(block) if block.id() == id))
            });
            let next = device.and_then(|device| {
                device.with_model(|model, _| match model {
                    AnyModel::Block(block) => Some((device, block.prepare_seal(next))),
                    _ => None,
                })
            });
            let reason = "no such disk".into();
            let (device, next) = next.ok_or(DeviceError::Disk { id, reason })?;
            prepared.push((device, next?));
        }
        for (device, next) in prepared {
            device.with_model(|model, _| {
                if let AnyModel::Block(block) = model {
                    block.seal(next);
                }
            });
        }
        Ok(())
    }

    /// Plugs a tap (see [`Net::tap`]) into the network device with this number among the network devices.
    ///
    /// # Errors
    /// When there is no such device, or the descriptor is no tap.
    pub fn attach_tap(&self, net: usize, tap: OwnedFd) -> Result<(), DeviceError> {
        self.with_net(net, |model, poller| model.attach(tap, poller))
            .unwrap_or_else(|| Err(DeviceError::State("the machine has no such network device".into())))
    }

    /// Works on a network device, then wakes the I/O thread.
    pub(super) fn with_net<T>(&self, net: usize, work: impl FnOnce(&mut NetModel, &Poller) -> T) -> Option<T> {
        let is_net = |device: &&Device| device.with_model(|model, _| matches!(model, AnyModel::Net(_)));
        let device = self.shared.devices.iter().filter(is_net).nth(net)?;
        let done = device.with_model(|model, poller| match model {
            AnyModel::Net(model) => Some(work(model, poller)),
            _ => None,
        });
        self.shared.gate.wake();
        done
    }

    /// Opens a vsock connection from the host to a guest port; `stream` is a connected `SOCK_STREAM` socket. It is closed when the
    /// guest refuses, when there is no vsock device, or when its driver is not up.
    pub fn connect_vsock(&self, port: u32, stream: OwnedFd) {
        let mut stream = Some(stream);
        for device in &self.shared.devices {
            device.with_model(|model, poller| {
                if let AnyModel::Vsock(vsock) = model
                    && let Some(stream) = stream.take()
                {
                    vsock.connect(port, stream, poller);
                }
            });
        }
        self.shared.gate.wake();
    }
}

/// The notifications of a device that come without leaving the kernel. Each costs time at every restore, so a balloon, which is
/// notified now and then, has none.
fn doorbells(device: &Device) -> Vec<(u32, Arc<EventFd>)> {
    if device.with_model(|model, _| matches!(model, AnyModel::Balloon(_))) {
        return Vec::new();
    }
    let events = device.notify().iter().map(Arc::clone);
    (0..).zip(events).collect()
}

/// Whether a device interrupts so often that its acknowledgements shall stay in the kernel, which costs time at every restore.
fn is_busy(device: &Device) -> bool {
    device.with_model(|model, _| matches!(model, AnyModel::Block(_) | AnyModel::Net(_) | AnyModel::Vsock(_)))
}

fn restore_block(saved: &BlockState, disks: &mut [Option<Disk>]) -> Result<Block, DeviceError> {
    let found = disks
        .iter_mut()
        .find(|disk| disk.as_ref().is_some_and(|disk| disk.id == saved.id));
    let disk = found.and_then(Option::take);
    let missing = || DeviceError::Disk {
        id: saved.id.clone(),
        reason: "the saved machine has it, but it was not given".into(),
    };
    Block::restore(saved, disk.ok_or_else(missing)?)
}

impl Drop for DeviceSet {
    fn drop(&mut self) {
        self.shared.gate.stop();
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the thread was printed already.
            let _panicked = thread.join();
        }
    }
}
