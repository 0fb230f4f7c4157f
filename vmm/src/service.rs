//! The control loop of `ramet-vmm`: one machine, driven over the control socket.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use checkpoint::memory::MemoryIndex;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::channel::{Channel, ChannelError, Received, ReceivedFds};
use crate::control::{
    BootRequest, CONTROL_FD, DiskBacking, DiskConfig, Event, ExitReason, Message, NetConfig, OverlayFiles, Reply,
    Request, RestoreRequest, SaveRequest,
};
use crate::devices::virtio::{
    Backing, DeviceEvent, Disk, EventReceiver, EventSender, Net, OverlayLayer, event_channel,
};
use crate::save::{PendingSave, SaveError, SaveTargets};
use crate::state::MachineState;
use crate::touched::Touched;
use crate::vm::{BootConfig, Host, Machine, RestoreConfig, VmError, Wiring};

/// The control loop cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Control socket.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// Waiting for something to do.
    #[error("poll")]
    Poll(#[source] Errno),
    /// Events.
    #[error("make event")]
    Event(#[source] std::io::Error),
    /// The process cannot be locked in.
    #[error(transparent)]
    Jail(#[from] crate::jail::JailError),
    /// The host has no usable KVM.
    #[error(transparent)]
    Host(VmError),
}

/// A request that was not done.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Index(#[from] checkpoint::memory::MemoryError),
    #[error("{0}")]
    State(&'static str),
}

impl RequestError {
    /// With all causes, one after the other.
    fn describe(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

/// Serves the control socket this process was started with until the machine ends or the peer closes.
///
/// # Errors
/// When there is no KVM or no control socket.
pub fn run() -> Result<(), ServiceError> {
    let start = Instant::now();
    let channel = Channel::from(crate::sys::fd::own(CONTROL_FD));
    let mut host = Host::open().map_err(ServiceError::Host)?;
    tracing::debug!(elapsed = ?start.elapsed(), "KVM opened");
    host.vcpu_filter = Some(Arc::new(crate::jail::enter()?));
    tracing::debug!(elapsed = ?start.elapsed(), "locked in");
    host.prepare().map_err(ServiceError::Host)?;
    tracing::debug!(elapsed = ?start.elapsed(), "VM prepared");
    let mut service = Service::new(channel, host)?;
    let result = service.serve();
    // The process ends now, and so do its threads. Dropping the machine would wait for them, and one request of a hostile guest can
    // take as long as its disk is large.
    std::mem::forget(service.machine.take());
    result
}

struct Service {
    channel: Channel,
    host: Host,
    machine: Option<Machine>,
    saving: Option<PendingSave>,
    /// A save that ended before anybody asked.
    saved: Option<Result<Reply, RequestError>>,
    finish_asked: bool,
    events: EventReceiver,
    event_sender: EventSender,
    ended: Arc<EventFd>,
}

/// What the loop does next.
enum Next {
    Continue,
    Exit,
}

/// What there is to do.
struct Ready {
    control: bool,
    hang_up: bool,
    events: bool,
    ended: bool,
    saved: bool,
}

impl Service {
    fn new(channel: Channel, host: Host) -> Result<Self, ServiceError> {
        let (event_sender, events) = event_channel().map_err(ServiceError::Event)?;
        let ended = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(ServiceError::Event)?);
        Ok(Self {
            channel,
            host,
            machine: None,
            saving: None,
            saved: None,
            finish_asked: false,
            events,
            event_sender,
            ended,
        })
    }

    fn serve(&mut self) -> Result<(), ServiceError> {
        loop {
            let ready = self.wait()?;
            if ready.saved {
                self.take_save();
            }
            if self.finish_asked
                && let Some(result) = self.saved.take()
            {
                self.finish_asked = false;
                self.reply(result)?;
            }
            if ready.events {
                self.pass_events()?;
            }
            if ready.ended
                && let Some(reason) = self
                    .machine
                    .as_ref()
                    .and_then(|machine| machine.platform().end_reason())
            {
                return self.exit(reason);
            }
            if ready.control {
                let Some(received) = self.channel.receive::<Request>()? else {
                    return Ok(());
                };
                if let Next::Exit = self.handle(received)? {
                    return Ok(());
                }
            } else if ready.hang_up {
                return Ok(());
            }
        }
    }

    /// Requests are answered in order, so none is taken while one waits for the end of a save.
    fn wait(&self) -> Result<Ready, ServiceError> {
        let wanted = if self.finish_asked {
            PollFlags::empty()
        } else {
            PollFlags::POLLIN
        };
        let events = crate::sys::fd::borrow(&self.events);
        let ended = crate::sys::fd::borrow(&*self.ended);
        let mut fds = vec![
            PollFd::new(self.channel.as_fd(), wanted),
            PollFd::new(events, PollFlags::POLLIN),
            PollFd::new(ended, PollFlags::POLLIN),
        ];
        if let Some(saving) = &self.saving {
            fds.push(PollFd::new(saving.as_fd(), PollFlags::POLLIN));
        }
        loop {
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) => break,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(ServiceError::Poll(error)),
            }
        }
        let got = |place: usize, flags| {
            fds.get(place)
                .and_then(PollFd::revents)
                .is_some_and(|events| events.intersects(flags))
        };
        Ok(Ready {
            control: got(0, PollFlags::POLLIN),
            hang_up: got(0, PollFlags::POLLHUP | PollFlags::POLLERR),
            events: got(1, PollFlags::POLLIN),
            ended: got(2, PollFlags::POLLIN),
            saved: got(3, PollFlags::POLLIN),
        })
    }

    fn take_save(&mut self) {
        if let Some(saving) = self.saving.take() {
            self.saved = Some(saving.finish().map(Reply::Saved).map_err(RequestError::from));
        }
    }

    fn pass_events(&self) -> Result<(), ServiceError> {
        while let Some(DeviceEvent::Connected { port, stream }) = self.events.take() {
            self.channel
                .send(&Message::Event(Event::Connected { port }), &[stream.as_fd()])?;
        }
        Ok(())
    }

    fn reply(&self, result: Result<Reply, RequestError>) -> Result<(), ServiceError> {
        let reply = result.unwrap_or_else(|error| {
            let message = error.describe();
            tracing::warn!(message, "request refused");
            Reply::Refused {
                message,
                fatal: self.machine.is_none(),
            }
        });
        Ok(self.channel.send(&Message::Reply(reply), &[])?)
    }

    fn exit(&self, reason: ExitReason) -> Result<(), ServiceError> {
        tracing::info!(?reason, "machine ended");
        Ok(self.channel.send(&Message::Event(Event::Exited(reason)), &[])?)
    }

    fn handle(&mut self, received: Received<Request>) -> Result<Next, ServiceError> {
        let Received { message, fds } = received;
        match message {
            Request::Stop => {
                if let Some(machine) = &self.machine {
                    machine.platform().end(ExitReason::Stopped);
                }
                self.reply(Ok(Reply::Done))?;
                self.exit(ExitReason::Stopped)?;
                return Ok(Next::Exit);
            }
            Request::FinishSave if self.saving.is_some() || self.saved.is_some() => self.finish_asked = true,
            other => {
                let result = self.perform(other, fds);
                self.reply(result)?;
            }
        }
        if self.finish_asked
            && let Some(result) = self.saved.take()
        {
            self.finish_asked = false;
            self.reply(result)?;
        }
        Ok(Next::Continue)
    }

    fn perform(&mut self, request: Request, mut fds: ReceivedFds) -> Result<Reply, RequestError> {
        match request {
            Request::Boot(request) => self.boot(request, fds)?,
            Request::Restore(request) => self.restore(&request, fds)?,
            Request::Resume => self.machine()?.resume()?,
            Request::Pause => self.machine()?.pause()?,
            Request::Save(request) => return self.save(&request, fds),
            Request::FinishSave => return Err(RequestError::State("there is no save to finish")),
            Request::Connect { port, stream } => {
                let stream = fds.take(stream)?;
                let devices = self
                    .machine()?
                    .platform()
                    .devices()
                    .ok_or(RequestError::State("the machine has no vsock"))?;
                devices.connect_vsock(port, stream);
            }
            Request::AttachTap { net, tap } => {
                let tap = fds.take(tap)?;
                let devices = self
                    .machine()?
                    .platform()
                    .devices()
                    .ok_or(RequestError::State("the machine has no network device"))?;
                devices.attach_tap(net, tap).map_err(VmError::from)?;
            }
            Request::Stats => {
                let machine = self.machine.as_ref().ok_or(RequestError::State(NO_MACHINE))?;
                return Ok(Reply::Stats(machine.stats(&self.host)?));
            }
            Request::Touched { file } => {
                let file = File::from(fds.take(file)?);
                let machine = self.machine.as_ref().ok_or(RequestError::State(NO_MACHINE))?;
                let touched = machine.touched(&self.host)?;
                let written = touched.write_to(&file);
                written.map_err(|e| VmError::Io("write down the changed pages", e))?;
            }
            Request::Stop => {}
        }
        Ok(Reply::Done)
    }

    fn machine(&mut self) -> Result<&mut Machine, RequestError> {
        self.machine.as_mut().ok_or(RequestError::State(NO_MACHINE))
    }

    fn wiring(&self, console: OwnedFd) -> Wiring {
        Wiring {
            console: console.into(),
            events: self.event_sender.clone(),
            ended: Arc::clone(&self.ended),
        }
    }

    fn boot(&mut self, request: BootRequest, mut fds: ReceivedFds) -> Result<(), RequestError> {
        self.check_unused()?;
        let config = BootConfig {
            vcpus: request.vcpus,
            memory_bytes: request.memory_bytes,
            kernel: fds.take(request.kernel)?.into(),
            initramfs: request
                .initramfs
                .map(|index| fds.take(index))
                .transpose()?
                .map(File::from),
            command_line: request.command_line,
            disks: disks(request.disks, &mut fds)?,
            nets: nets(&request.nets, &mut fds)?,
            linux_devices: request.linux_devices,
        };
        let wiring = self.wiring(fds.take(request.console)?);
        let mut machine = Machine::boot(&self.host, config, wiring)?;
        machine.resume()?;
        self.machine = Some(machine);
        Ok(())
    }

    fn restore(&mut self, request: &RestoreRequest, mut fds: ReceivedFds) -> Result<(), RequestError> {
        let start = Instant::now();
        self.check_unused()?;
        let memory_files = request
            .memory_files
            .iter()
            .map(|index| fds.take(*index).map(File::from))
            .collect::<Result<_, _>>()?;
        let mut disk_list = Vec::new();
        for config in &request.disks {
            disk_list.push(disk(config, &mut fds)?);
        }
        let config = RestoreConfig {
            checkpoint: request.checkpoint.clone(),
            state: MachineState::read_from(File::from(fds.take(request.state)?)).map_err(VmError::from)?,
            index: MemoryIndex::read_from(File::from(fds.take(request.memory_index)?))?,
            memory_files,
            disks: disk_list,
            nets: nets(&request.nets, &mut fds)?,
            touched: match request.touched {
                Some(index) => Touched::read_from(fds.take(index)?.into())
                    .map_err(|e| VmError::Io("read the pages to bring in", e))?,
                None => Touched::default(),
            },
        };
        let wiring = self.wiring(fds.take(request.console)?);
        tracing::debug!(elapsed = ?start.elapsed(), "state and memory index read");
        self.machine = Some(Machine::restore(&self.host, config, wiring)?);
        Ok(())
    }

    fn save(&mut self, request: &SaveRequest, mut fds: ReceivedFds) -> Result<Reply, RequestError> {
        if self.saving.is_some() {
            return Err(RequestError::State("a save is under way"));
        }
        self.saved = None;
        let mut seal = Vec::new();
        for disk in &request.seal {
            seal.push((disk.id.clone(), layer(&disk.next, &mut fds)?));
        }
        let targets = SaveTargets {
            state: fds.take(request.state)?.into(),
            memory: fds.take(request.memory)?.into(),
            index: fds.take(request.memory_index)?.into(),
            seal,
            resume: request.resume,
        };
        let machine = self.machine.as_mut().ok_or(RequestError::State(NO_MACHINE))?;
        let pending = machine.save(&self.host, targets)?;
        let pause_us = pending.pause_us();
        self.saving = Some(pending);
        Ok(Reply::Saving { pause_us })
    }

    fn check_unused(&self) -> Result<(), RequestError> {
        if self.machine.is_some() {
            Err(RequestError::State("there is a machine already"))
        } else {
            Ok(())
        }
    }
}

const NO_MACHINE: &str = "there is no machine yet";

fn disks(configs: Vec<DiskConfig>, fds: &mut ReceivedFds) -> Result<Vec<Disk>, RequestError> {
    configs.iter().map(|config| disk(config, fds)).collect()
}

fn disk(config: &DiskConfig, fds: &mut ReceivedFds) -> Result<Disk, RequestError> {
    let backing = match &config.backing {
        DiskBacking::Empty { read_only } => Backing::Empty { read_only: *read_only },
        DiskBacking::ReadOnly { files } => {
            let files = files
                .iter()
                .map(|index| fds.take(*index).map(File::from))
                .collect::<Result<_, _>>()?;
            Backing::ReadOnly { files }
        }
        DiskBacking::Writable {
            size_bytes,
            sealed,
            active,
        } => Backing::Writable {
            size_bytes: *size_bytes,
            sealed: sealed.iter().map(|files| layer(files, fds)).collect::<Result<_, _>>()?,
            active: layer(active, fds)?,
        },
    };
    Ok(Disk {
        id: config.id.clone(),
        backing,
    })
}

fn layer(files: &OverlayFiles, fds: &mut ReceivedFds) -> Result<OverlayLayer, RequestError> {
    Ok(OverlayLayer {
        data: fds.take(files.data)?.into(),
        bitmap: fds.take(files.bitmap)?.into(),
    })
}

fn nets(configs: &[NetConfig], fds: &mut ReceivedFds) -> Result<Vec<Net>, RequestError> {
    configs
        .iter()
        .map(|config| {
            Ok(Net {
                tap: config.tap.map(|index| fds.take(index)).transpose()?,
                mac: config.mac,
                mtu: config.mtu,
            })
        })
        .collect()
}
