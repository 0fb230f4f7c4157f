//! One sandbox: its machine, its container, and what containerd asks of them.
//!
//! State is behind one mutex that is never held across an await; operations that must not overlap take the container's operation
//! lock. What the guest or the VMM says by itself (exits, OOM kills, the machine's end) is awaited by tasks of their own.

mod end;
mod files;
mod save;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use protocol::containerd::api::CreateTaskRequest;
use protocol::containerd::events::task::{TaskCreate, TaskExecAdded, TaskIO, TaskOOM, TaskPaused, TaskResumed};
use protocol::containerd::protobuf::well_known_types::any::Any;
use protocol::containerd::topics;
use protocol::containerd::ttrpc;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::boot::Shape;
use crate::checkpoint::Machine;
use crate::error::{Error, Result};
use crate::events::Publisher;
use crate::guest::{Guest, GuestError, GuestProcess, while_alive};
use crate::hooks::Hooks;
use crate::launch::{self, Launched, Surroundings};
use crate::lifecycle::{Exit, LOST, ProcessId, Refusal};
use crate::limits;
use crate::logger::Owner;
use crate::net;
use crate::restore::{self, ForkMode};
use crate::rootfs;
use crate::state_dir;
use crate::stdio::StdioPaths;
use crate::task::{Container, NewContainer, Process};
use crate::vm::{Vm, VmError};
use crate::volumes::Volumes;

/// How long execs may take to be reported after the end of init.
const EXEC_GRACE: Duration = Duration::from_secs(10);

/// A process as State shows it.
#[derive(Debug)]
pub struct ProcessState {
    /// Bundle of the container.
    pub bundle: PathBuf,
    /// Host pid that stands for it.
    pub pid: u32,
    /// Where it is.
    pub status: Status,
    /// Its streams.
    pub stdio: StdioPaths,
    /// How it ended.
    pub exit: Option<Exit>,
}

pub use protocol::containerd::api::Status;

/// A container and its machine, once created.
struct Live {
    container: Arc<Container>,
    guest: Guest,
    /// Size of its machine.
    shape: Shape,
    /// Used by one checkpoint at a time, under the container's operation lock.
    machine: Arc<tokio::sync::Mutex<Machine>>,
    /// Where `ctr task checkpoint` puts checkpoints.
    store: PathBuf,
    /// Hooks that run when it starts.
    hooks: Option<Hooks>,
    /// What the container sees of this host.
    volumes: Volumes,
    /// What this host sees of the container's files.
    files: Mutex<Option<crate::files::Server>>,
}

#[derive(Default)]
enum Slot {
    #[default]
    Empty,
    Creating,
    Live(Arc<Live>),
    /// The machine was used; it cannot be had again.
    Over,
}

/// The sandbox.
pub struct Sandbox {
    vm: Result<Arc<dyn Vm>, VmError>,
    publisher: Publisher,
    around: Surroundings,
    slot: Mutex<Slot>,
    /// Notified when the shim is to end.
    pub shutdown: Notify,
}

impl Sandbox {
    /// A sandbox over a VMM that waits for its first request, or over the reason why there is none.
    #[must_use]
    pub fn new(vm: Result<Arc<dyn Vm>, VmError>, publisher: Publisher, around: Surroundings) -> Arc<Self> {
        let sandbox = Arc::new(Self {
            vm,
            publisher,
            around,
            slot: Mutex::default(),
            shutdown: Notify::new(),
        });
        if let Ok(vm) = sandbox.vm.clone() {
            let watched = sandbox.clone();
            tokio::spawn(async move { watched.watch_machine(vm).await });
        }
        sandbox
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn vm(&self) -> Result<&Arc<dyn Vm>> {
        self.vm.as_ref().map_err(|e| e.clone().into())
    }

    /// Host pid that stands for every process of the sandbox.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.vm.as_ref().map_or(0, |vm| vm.pid())
    }

    fn live(&self, id: &str) -> Result<Arc<Live>> {
        match &*self.slot() {
            Slot::Live(live) if live.container.id == id => Ok(live.clone()),
            _ => Err(Error::NoContainer),
        }
    }

    async fn watch_machine(&self, vm: Arc<dyn Vm>) {
        let reason = vm.ended().await;
        info!(reason, "the machine has ended");
        let live = match &*self.slot() {
            Slot::Live(live) => Some(live.clone()),
            _ => None,
        };
        if let Some(live) = live {
            live.volumes.end();
            live.container
                .change(&self.publisher, self.pid(), |life| life.lost(SystemTime::now()));
        }
    }

    /// Makes the container and its machine; returns the pid.
    ///
    /// # Errors
    /// Nothing of it is left, and the sandbox is of no more use.
    pub async fn create(self: &Arc<Self>, request: CreateTaskRequest) -> Result<u32> {
        crate::args::check_identifier("id", &request.id).map_err(|e| Error::InvalidArgument(e.to_string()))?;
        let vm = self.vm()?.clone();
        {
            let mut slot = self.slot();
            match &*slot {
                Slot::Empty => *slot = Slot::Creating,
                Slot::Live(live) if live.container.id == request.id => {
                    return Err(Error::ContainerExists(request.id.clone()));
                }
                Slot::Live(_) | Slot::Creating => {
                    return Err(Error::InvalidArgument("this sandbox already has its container".into()));
                }
                Slot::Over => return Err(Error::InvalidArgument("this sandbox has ended".into())),
            }
        }
        match launch::launch(vm.as_ref(), &self.around, &request).await {
            Ok(launched) => Ok(self.created(&request, launched)),
            Err(error) => {
                let console = state_dir::tail(&self.around.console, 2000);
                warn!(error = error.text(), console, "create failed");
                vm.kill().await;
                rootfs::unmount_leftovers(Path::new(&request.bundle));
                self.run_poststop(Path::new(&request.bundle)).await;
                // Only now the shim may end.
                *self.slot() = Slot::Over;
                Err(error)
            }
        }
    }

    fn created(self: &Arc<Self>, request: &CreateTaskRequest, launched: Launched) -> u32 {
        let stdio = StdioPaths {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let guest_init = launched.init.clone();
        let files = self.serve_files(request, &launched);
        let container = Arc::new(Container::new(NewContainer {
            id: request.id.clone(),
            bundle: PathBuf::from(&request.bundle),
            info: launched.info,
            fork: launched.fork,
            resume_after_thaw: launched.resume_after_thaw,
            exec_prefix: launched.exec_prefix,
            init: Process::new(None, launched.init, stdio),
        }));
        let live = Arc::new(Live {
            container,
            guest: launched.guest,
            shape: launched.machine.shape,
            machine: Arc::new(tokio::sync::Mutex::new(launched.machine)),
            store: save::checkpoint_store(&request.rootfs, Path::new(&request.bundle)),
            hooks: launched.hooks,
            volumes: launched.volumes,
            files: Mutex::new(files),
        });
        *self.slot() = Slot::Live(live.clone());
        self.publisher
            .publish(topics::TASK_CREATE_EVENT_TOPIC, &create_event(request, self.pid()));
        self.spawn_waiter(&live, None, guest_init);
        self.pid()
    }

    /// Waits for the end of a guest process and tells it.
    fn spawn_waiter(self: &Arc<Self>, live: &Arc<Live>, process: ProcessId, guest_process: GuestProcess) {
        let (sandbox, live) = (self.clone(), live.clone());
        tokio::spawn(async move {
            let status = match live.guest.wait(&guest_process).await {
                Ok(answer) => answer.exit_status,
                Err(error) => {
                    sandbox.lost_agent(&error).await;
                    LOST
                }
            };
            // The guest's clock is its own affair; containerd compares times of this host.
            let exit = Exit {
                status,
                at: SystemTime::now(),
            };
            info!(?process, status, "process exited");
            live.container
                .change(&sandbox.publisher, sandbox.pid(), |life| life.exited(&process, exit));
            if process.is_none() {
                tokio::time::sleep(EXEC_GRACE).await;
                live.container
                    .change(&sandbox.publisher, sandbox.pid(), |life| life.give_up_execs());
            }
        });
    }

    /// A guest whose agent cannot be waited on is of no use.
    async fn lost_agent(&self, error: &GuestError) {
        let Ok(vm) = self.vm() else { return };
        if let GuestError::Refused { message, .. } = error {
            warn!(message, "the agent cannot wait for a process");
            return;
        }
        warn!(%error, "lost the agent");
        let ended = tokio::time::timeout(Duration::from_secs(1), vm.ended()).await;
        if ended.is_err() {
            vm.kill().await;
        }
    }

    fn spawn_oom_watch(self: &Arc<Self>, live: &Arc<Live>, guest_container: String) {
        let (sandbox, live) = (self.clone(), live.clone());
        tokio::spawn(async move {
            let mut seen = 0;
            while let Ok(count) = live.guest.wait_oom(&guest_container, seen).await {
                if count <= seen {
                    break;
                }
                seen = count;
                let event = TaskOOM {
                    container_id: live.container.id.clone(),
                    ..Default::default()
                };
                sandbox.publisher.publish(topics::TASK_OOM_EVENT_TOPIC, &event);
            }
        });
    }

    /// Starts init or an exec; returns the pid.
    ///
    /// # Errors
    /// The process is then over.
    pub async fn start(self: &Arc<Self>, id: &str, process: ProcessId) -> Result<u32> {
        let live = self.live(id)?;
        let _alone = if process.is_none() {
            Some(live.container.operation.lock().await)
        } else {
            None
        };
        let record = live.container.process(&process)?;
        live.container.life(|life| life.begin_start(&process))?;
        match self.start_guest(&live, &record).await {
            Ok(()) => {
                live.container
                    .change(&self.publisher, self.pid(), |life| life.started(&process));
                Ok(self.pid())
            }
            Err(error) => {
                record.copies.abort();
                let exit = Exit {
                    status: 255,
                    at: SystemTime::now(),
                };
                live.container
                    .change(&self.publisher, self.pid(), |life| life.start_failed(&process, exit));
                live.container.settle(&process, exit);
                Err(error)
            }
        }
    }

    async fn start_guest(self: &Arc<Self>, live: &Arc<Live>, record: &Process) -> Result<()> {
        let vm = self.vm()?.as_ref();
        let is_init = record.id.is_none();
        let resumed = is_init && live.container.fork == Some(ForkMode::Resume);
        let owner = Owner {
            namespace: &self.around.namespace,
            id: record.id.as_ref().unwrap_or(&live.container.id),
        };
        record.attach(vm, owner, resumed).await?;
        let guest = &live.guest;
        if is_init {
            let nets = live.machine.lock().await.nets;
            net::connect(vm, guest, nets).await?;
        }
        if is_init && matches!(live.container.fork, Some(ForkMode::Resume | ForkMode::Exec)) {
            while_alive(vm, guest.thaw(&[])).await?;
            if live.container.resume_after_thaw {
                while_alive(vm, guest.set_paused(&record.guest.container, false)).await?;
            }
        }
        if !resumed {
            let action = if is_init { "start" } else { "exec" };
            let _turn = if is_init {
                None
            } else {
                Some(live.container.turn.lock().await)
            };
            while_alive(vm, guest.start(&record.guest))
                .await
                .map_err(|e| launch::runtime(action, e))?;
        }
        if !is_init {
            self.spawn_waiter(live, record.id.clone(), record.guest.clone());
            return Ok(());
        }
        self.spawn_oom_watch(live, record.guest.container.clone());
        self.spawn_note(live);
        if let Some(hooks) = live.hooks.clone()
            && let Err(error) = launch::blocking(move || hooks.started()).await
        {
            let kill = guest.kill(&record.guest, libc::SIGKILL.cast_unsigned(), true);
            if let Err(error) = while_alive(vm, kill).await {
                warn!(%error, "a container whose poststart hook failed cannot be stopped");
            }
            return Err(error);
        }
        Ok(())
    }

    /// Notes for later forks of the same checkpoint what this one changed on its way.
    fn spawn_note(self: &Arc<Self>, live: &Arc<Live>) {
        let (sandbox, live) = (self.clone(), live.clone());
        if live.container.fork.is_none() {
            return;
        }
        tokio::spawn(async move {
            let directory = live.machine.lock().await.base_directories.last().cloned();
            if let (Some(directory), Ok(vm)) = (directory, sandbox.vm()) {
                restore::note_touched(vm.as_ref(), &directory).await;
            }
        });
    }

    /// Registers an exec.
    ///
    /// # Errors
    /// The container does not run, or the id is taken.
    pub async fn exec(&self, id: &str, exec_id: &str, spec: Option<Any>, stdio: StdioPaths) -> Result<()> {
        crate::args::check_identifier("exec id", exec_id).map_err(|e| Error::InvalidArgument(e.to_string()))?;
        let live = self.live(id)?;
        let container = &live.container;
        let guest_process = GuestProcess {
            container: container.process(&None)?.guest.container.clone(),
            exec: format!("{}{exec_id}", container.exec_prefix),
        };
        let request = launch::exec_request(&guest_process, spec, &stdio)?;
        container.add_exec(Process::new(Some(exec_id.to_owned()), guest_process, stdio))?;
        if let Err(error) = while_alive(self.vm()?.as_ref(), live.guest.exec(&request)).await {
            container.remove_exec(&self.publisher, self.pid(), exec_id);
            return Err(launch::runtime("exec", error));
        }
        let event = TaskExecAdded {
            container_id: id.to_owned(),
            exec_id: exec_id.to_owned(),
            ..Default::default()
        };
        self.publisher.publish(topics::TASK_EXEC_ADDED_EVENT_TOPIC, &event);
        Ok(())
    }

    /// What State answers.
    ///
    /// # Errors
    /// No such process.
    pub fn state(&self, id: &str, process: &ProcessId) -> Result<ProcessState> {
        use crate::lifecycle::Phase;
        let live = self.live(id)?;
        let record = live.container.process(process)?;
        let (phase, paused) = live.container.life(|life| (life.phase(process), life.is_paused()));
        let phase = phase?;
        let status = match phase {
            Phase::Created => Status::CREATED,
            Phase::Starting { .. } | Phase::Running | Phase::Ending(_) if paused => Status::PAUSED,
            Phase::Starting { .. } | Phase::Running | Phase::Ending(_) => Status::RUNNING,
            Phase::Stopped(_) => Status::STOPPED,
        };
        let exit = if let Phase::Stopped(exit) = phase {
            Some(exit)
        } else {
            None
        };
        let bundle = live.container.bundle.clone();
        Ok(ProcessState {
            bundle,
            pid: self.pid(),
            status,
            stdio: record.stdio.clone(),
            exit,
        })
    }

    /// Waits for the end of a process; after it, answers at once.
    ///
    /// # Errors
    /// No such process, or it was removed without having ended.
    pub async fn wait(&self, id: &str, process: &ProcessId) -> Result<Exit> {
        let mut exit = self.live(id)?.container.process(process)?.exit();
        let seen = exit.wait_for(Option::is_some).await.map_err(|_| Error::NoContainer)?;
        seen.ok_or(Error::NoContainer)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// No such process, or it is over.
    pub async fn kill(&self, id: &str, process: &ProcessId, signal: u32, all: bool) -> Result<()> {
        let live = self.live(id)?;
        let record = live.container.process(process)?;
        live.container.life(|life| life.may_kill(process))?;
        let vm = self.vm()?;
        match while_alive(vm.as_ref(), live.guest.kill(&record.guest, signal, all)).await {
            Ok(()) => Ok(()),
            Err(error) if error.is_not_found() => Err(Refusal::Finished.into()),
            Err(
                error @ GuestError::Refused {
                    code: ttrpc::Code::FAILED_PRECONDITION,
                    ..
                },
            ) => Err(error.into()),
            Err(error) if process.is_none() && signal == libc::SIGKILL.cast_unsigned() => {
                warn!(%error, "the guest does not take SIGKILL; its machine is ended");
                vm.kill().await;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Ids of live processes, each with the host pid that stands for it.
    ///
    /// # Errors
    /// No such container.
    pub fn pids(&self, id: &str) -> Result<Vec<(u32, ProcessId)>> {
        let live = self.live(id)?;
        Ok(live
            .container
            .live_processes()
            .into_iter()
            .map(|process| (self.pid(), process))
            .collect())
    }

    /// Pauses or resumes the container (not the machine).
    ///
    /// # Errors
    /// It is not in a state for that.
    pub async fn set_paused(&self, id: &str, paused: bool) -> Result<()> {
        let live = self.live(id)?;
        let _alone = live.container.operation.lock().await;
        live.container
            .life(|life| if paused { life.may_pause() } else { life.may_resume() })?;
        let guest_id = live.container.process(&None)?.guest.container.clone();
        while_alive(self.vm()?.as_ref(), live.guest.set_paused(&guest_id, paused)).await?;
        live.container.life(|life| life.set_paused(paused));
        if paused {
            let event = TaskPaused {
                container_id: id.to_owned(),
                ..Default::default()
            };
            self.publisher.publish(topics::TASK_PAUSED_EVENT_TOPIC, &event);
        } else {
            let event = TaskResumed {
                container_id: id.to_owned(),
                ..Default::default()
            };
            self.publisher.publish(topics::TASK_RESUMED_EVENT_TOPIC, &event);
        }
        Ok(())
    }

    /// Sets the size of a terminal; nothing to do without one.
    ///
    /// # Errors
    /// No such process.
    pub async fn resize(&self, id: &str, process: &ProcessId, width: u32, height: u32) -> Result<()> {
        let live = self.live(id)?;
        let record = live.container.process(process)?;
        if record.stdio.terminal {
            while_alive(self.vm()?.as_ref(), live.guest.resize(&record.guest, width, height)).await?;
        }
        Ok(())
    }

    /// The client will write no more.
    ///
    /// # Errors
    /// No such process.
    pub async fn close_stdin(&self, id: &str, process: &ProcessId) -> Result<()> {
        let live = self.live(id)?;
        live.container.process(process)?.copies.close_stdin();
        Ok(())
    }

    /// cgroup metrics of the container.
    ///
    /// # Errors
    /// No such container, or its guest has none.
    pub async fn stats(&self, id: &str) -> Result<Option<Any>> {
        let live = self.live(id)?;
        let guest_id = live.container.process(&None)?.guest.container.clone();
        Ok(while_alive(self.vm()?.as_ref(), live.guest.stats(&guest_id)).await?)
    }

    /// New resource limits.
    ///
    /// # Errors
    /// No such container, its machine is too small for them, or its guest refuses.
    pub async fn update(&self, id: &str, resources: Option<Any>) -> Result<()> {
        let live = self.live(id)?;
        let resources = Some(limits::update(live.shape, resources)?);
        let guest_id = live.container.process(&None)?.guest.container.clone();
        Ok(while_alive(self.vm()?.as_ref(), live.guest.update(&guest_id, resources)).await?)
    }
}

fn create_event(request: &CreateTaskRequest, pid: u32) -> TaskCreate {
    let io = TaskIO {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: request.terminal,
        ..Default::default()
    };
    TaskCreate {
        container_id: request.id.clone(),
        bundle: request.bundle.clone(),
        // The events' Mount is the same message, generated once more.
        rootfs: Vec::new(),
        io: Some(io).into(),
        checkpoint: request.checkpoint.clone(),
        pid,
        ..Default::default()
    }
}
