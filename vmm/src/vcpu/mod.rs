//! vCPUs: one thread each, which runs the guest until it is told to pause or the machine ends.

pub(crate) mod cpuid;
pub mod state;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use kvm_bindings::{CpuId, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::control::ExitReason;
use crate::platform::Platform;
use crate::seccomp::Filter;
use crate::sys::vcpu::ImmediateExit;
use state::{VcpuState, VcpuStateError};

/// A vCPU thread cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// The thread or its shared page could not be made.
    #[error("start vCPU thread")]
    Start(#[source] io::Error),
    /// Its state could not be taken.
    #[error("save vCPU {id}")]
    Save {
        /// Which one.
        id: u8,
        /// Why not.
        #[source]
        source: VcpuStateError,
    },
    /// The thread is gone.
    #[error("vCPU thread has ended")]
    Gone,
}

/// VM exits by kind, of all vCPUs.
#[derive(Debug, Default)]
pub struct ExitCounts {
    port_in: AtomicU64,
    port_out: AtomicU64,
    mmio_read: AtomicU64,
    mmio_write: AtomicU64,
    interrupted: AtomicU64,
    other: AtomicU64,
}

impl ExitCounts {
    /// Name and count of each kind.
    #[must_use]
    pub fn by_kind(&self) -> std::collections::BTreeMap<String, u64> {
        [
            ("port_in", &self.port_in),
            ("port_out", &self.port_out),
            ("mmio_read", &self.mmio_read),
            ("mmio_write", &self.mmio_write),
            ("interrupted", &self.interrupted),
            ("other", &self.other),
        ]
        .into_iter()
        .map(|(name, count)| (name.to_owned(), count.load(Ordering::Relaxed)))
        .collect()
    }
}

/// What all vCPU threads of a machine use.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Ports, addresses, and the end of the machine.
    pub platform: Arc<Platform>,
    /// VM exits.
    pub counts: Arc<ExitCounts>,
    /// The model-specific registers that a save covers.
    pub registers: Arc<Vec<u32>>,
    /// Installed by each thread before it does anything.
    pub filter: Option<Arc<Filter>>,
}

enum Command {
    Run,
    Save(Sender<Result<VcpuState, VcpuStateError>>),
}

/// A vCPU and its thread.
#[derive(Debug)]
pub struct Vcpu {
    id: u8,
    commands: Option<Sender<Command>>,
    stopped: Receiver<()>,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// What the machine and the thread share.
#[derive(Debug)]
struct Control {
    pause: AtomicBool,
    exit: ImmediateExit,
}

struct Runner {
    fd: VcpuFd,
    shared: Shared,
    control: Arc<Control>,
    cpuid: CpuId,
}

extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Vcpu {
    /// Starts the thread of a vCPU whose state is set, with this CPUID; it waits for [`Self::run`].
    ///
    /// # Errors
    /// When the process is out of threads or memory.
    pub fn start(id: u8, (fd, cpuid): (VcpuFd, CpuId), shared: Shared) -> Result<Self, VcpuError> {
        register_signal_handler(SIGRTMIN(), ignore_signal).map_err(|e| VcpuError::Start(e.into()))?;
        let exit = ImmediateExit::new(&fd).map_err(VcpuError::Start)?;
        let control = Arc::new(Control {
            pause: AtomicBool::new(false),
            exit,
        });
        let (commands, incoming) = channel();
        let (stopping, stopped) = channel();
        let runner = Runner {
            fd,
            shared,
            control: Arc::clone(&control),
            cpuid,
        };
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{id}"))
            .stack_size(256 << 10)
            .spawn(move || runner.serve(&incoming, &stopping))
            .map_err(VcpuError::Start)?;
        Ok(Self {
            id,
            commands: Some(commands),
            stopped,
            control,
            thread: Some(thread),
        })
    }

    /// Lets it run.
    ///
    /// # Errors
    /// When its thread is gone.
    pub fn run(&self) -> Result<(), VcpuError> {
        self.control.pause.store(false, Ordering::SeqCst);
        self.control.exit.set(false);
        self.send(Command::Run)
    }

    /// Asks it to stand still; [`Self::wait_stopped`] waits for that.
    pub fn kick(&self) {
        self.control.pause.store(true, Ordering::SeqCst);
        self.control.exit.set(true);
        if let Some(thread) = &self.thread {
            // The flag alone stops it at its next entry; a thread that has just ended is fine, too.
            let _ended = thread.kill(SIGRTMIN());
        }
    }

    /// Returns when it stands still, after [`Self::run`] and [`Self::kick`].
    ///
    /// # Errors
    /// When its thread is gone.
    pub fn wait_stopped(&self) -> Result<(), VcpuError> {
        self.stopped.recv().map_err(|_| VcpuError::Gone)
    }

    /// Its state, while it stands still.
    ///
    /// # Errors
    /// When KVM does not give it.
    pub fn save(&self) -> Result<VcpuState, VcpuError> {
        let (reply, answer) = channel();
        self.send(Command::Save(reply))?;
        answer
            .recv()
            .map_err(|_| VcpuError::Gone)?
            .map_err(|source| VcpuError::Save { id: self.id, source })
    }

    fn send(&self, command: Command) -> Result<(), VcpuError> {
        self.commands
            .as_ref()
            .and_then(|commands| commands.send(command).ok())
            .ok_or(VcpuError::Gone)
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.commands = None;
        self.kick();
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

impl Runner {
    fn serve(mut self, commands: &Receiver<Command>, stopping: &Sender<()>) {
        if let Some(Err(error)) = self.shared.filter.as_ref().map(|filter| filter.install()) {
            return self.shared.platform.end(ExitReason::Fault(error.to_string()));
        }
        while let Ok(command) = commands.recv() {
            match command {
                Command::Run => {
                    if let Some(reason) = self.run_guest() {
                        self.shared.platform.end(reason);
                    }
                    let _nobody_waits = stopping.send(());
                }
                Command::Save(reply) => {
                    let _nobody_waits = reply.send(VcpuState::save(&self.fd, &self.cpuid, &self.shared.registers));
                }
            }
        }
    }

    /// Runs until told to pause (`None`) or the machine ends. It leaves for a pause only when `KVM_RUN` was interrupted: then the last
    /// port or MMIO access is complete in the vCPU's state.
    fn run_guest(&mut self) -> Option<ExitReason> {
        if let Err(error) = self.fd.kvmclock_ctrl() {
            // The guest has not enabled its clock: nothing to tell it.
            tracing::debug!(%error, "no paused-clock notification");
        }
        loop {
            match self.fd.run() {
                Ok(VcpuExit::IoIn(port, data)) => {
                    count(&self.shared.counts.port_in);
                    self.shared.platform.port_read(port, data);
                }
                Ok(VcpuExit::IoOut(port, data)) => {
                    count(&self.shared.counts.port_out);
                    if let Some(reason) = self.shared.platform.port_write(port, data) {
                        return Some(reason);
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => {
                    count(&self.shared.counts.mmio_read);
                    self.shared.platform.mmio_read(address, data);
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    count(&self.shared.counts.mmio_write);
                    self.shared.platform.mmio_write(address, data);
                }
                Ok(VcpuExit::Shutdown) => return Some(ExitReason::TripleFault),
                Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => return Some(ExitReason::PowerOff),
                Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::Hlt) => count(&self.shared.counts.other),
                Ok(exit) => {
                    let exit = format!("{exit:?}");
                    return Some(ExitReason::Fault(format!(
                        "unexpected VM exit {exit} at {}",
                        self.position()
                    )));
                }
                Err(error) => match error.errno() {
                    libc::EINTR => {
                        count(&self.shared.counts.interrupted);
                        if self.control.pause.load(Ordering::SeqCst) {
                            return None;
                        }
                    }
                    libc::EAGAIN => count(&self.shared.counts.other),
                    _ => return Some(ExitReason::Fault(format!("KVM_RUN: {error} at {}", self.position()))),
                },
            }
        }
    }

    fn position(&self) -> String {
        self.fd
            .get_regs()
            .map_or_else(|_| "unknown rip".into(), |regs| format!("rip {:#x}", regs.rip))
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
