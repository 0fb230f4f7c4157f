//! A container and its processes, as the sandbox keeps them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use checkpoint::manifest::ContainerInfo;
use protocol::StreamKind;
use protocol::containerd::events::task::{TaskExecStarted, TaskExit, TaskStart};
use protocol::containerd::topics;
use tokio::sync::watch;
use tracing::warn;

use crate::error::{Error, Result};
use crate::events::{Publisher, timestamp};
use crate::guest::GuestProcess;
use crate::lifecycle::{Exit, Lifecycle, Notice, ProcessId};
use crate::logger::Owner;
use crate::restore::ForkMode;
use crate::stdio::{Copies, Sink, Sinks, Source, StdioError, StdioPaths};
use crate::streams;
use crate::vm::Vm;

/// A process: init or an exec.
pub struct Process {
    /// Its name towards containerd.
    pub id: ProcessId,
    /// Its name in the guest.
    pub guest: GuestProcess,
    /// Its streams towards containerd.
    pub stdio: StdioPaths,
    /// The copies between the two.
    pub copies: Copies,
    exit: watch::Sender<Option<Exit>>,
}

impl Process {
    /// A process that was just made.
    #[must_use]
    pub fn new(id: ProcessId, guest: GuestProcess, stdio: StdioPaths) -> Self {
        Self {
            id,
            guest,
            stdio,
            copies: Copies::default(),
            exit: watch::Sender::new(None),
        }
    }

    /// Its exit, now or later.
    #[must_use]
    pub fn exit(&self) -> watch::Receiver<Option<Exit>> {
        self.exit.subscribe()
    }

    /// Opens containerd's side of the streams (`owner` is told to a logger), attaches the guest's, and starts copying. With `lenient`, streams that the guest's
    /// process does not have are left out: a restored process has those of the day of its checkpoint.
    ///
    /// # Errors
    /// A stream cannot be opened or attached.
    pub async fn attach(&self, vm: &dyn Vm, owner: Owner<'_>, lenient: bool) -> Result<(), StdioError> {
        let paths = &self.stdio;
        let Sinks { stdout, stderr, logger } = Sinks::open(paths, owner).await?;
        if let Some(logger) = logger {
            self.copies.set_logger(logger);
        }
        let stdout = self.attach_output(vm, (StreamKind::Stdout, "stdout", &paths.stdout), stdout, lenient);
        let stderr = async {
            match paths.terminal {
                true => Ok(()),
                false => {
                    self.attach_output(vm, (StreamKind::Stderr, "stderr", &paths.stderr), stderr, lenient)
                        .await
                }
            }
        };
        // Each is a round trip to the guest.
        let attached = tokio::join!(stdout, stderr, self.attach_input(vm, lenient));
        attached.0.and(attached.1).and(attached.2)
    }

    async fn attach_output(
        &self,
        vm: &dyn Vm,
        (kind, what, uri): (StreamKind, &'static str, &str),
        sink: Sink,
        lenient: bool,
    ) -> Result<(), StdioError> {
        // A stream that goes nowhere is read, too, lest the process wait for room in its pipe.
        if uri.is_empty() && !lenient {
            return Ok(());
        }
        if let Some(stream) = self.attach_one(vm, kind, what, lenient).await? {
            self.copies.add_output(kind, stream, sink);
        }
        Ok(())
    }

    async fn attach_input(&self, vm: &dyn Vm, lenient: bool) -> Result<(), StdioError> {
        if let Some(source) = Source::open(&self.stdio.stdin)?
            && let Some(stream) = self.attach_one(vm, StreamKind::Stdin, "stdin", lenient).await?
        {
            self.copies.set_input(source, stream);
        }
        Ok(())
    }

    async fn attach_one(
        &self,
        vm: &dyn Vm,
        kind: StreamKind,
        what: &'static str,
        lenient: bool,
    ) -> Result<Option<tokio::net::UnixStream>, StdioError> {
        match streams::attach(vm, &self.guest, kind).await {
            Ok(stream) => Ok(Some(stream)),
            Err(streams::StreamError::Refused(reason)) if lenient => {
                warn!(what, reason, "the restored process has no such stream");
                Ok(None)
            }
            Err(source) => Err(StdioError::Attach { what, source }),
        }
    }
}

struct Inner {
    life: Lifecycle,
    processes: BTreeMap<ProcessId, Arc<Process>>,
}

/// A container.
pub struct Container {
    /// Its id towards containerd.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// What a manifest says of it.
    pub info: ContainerInfo,
    /// How it goes on, if it is a fork.
    pub fork: Option<ForkMode>,
    /// Guest container that must be resumed after the thaw, because it was checkpointed while paused.
    pub resume_after_thaw: bool,
    /// Put before exec ids in the guest, so that those of a fork do not meet those of its parent.
    pub exec_prefix: String,
    /// Held by operations that must not overlap: start of init, delete, pause, checkpoint.
    pub operation: tokio::sync::Mutex<()>,
    /// Held while the agent starts an exec: it starts one at a time, and the time that a call may take counts from its turn.
    pub turn: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

/// What makes a [`Container`].
pub struct NewContainer {
    /// See [`Container::id`].
    pub id: String,
    /// See [`Container::bundle`].
    pub bundle: PathBuf,
    /// See [`Container::info`].
    pub info: ContainerInfo,
    /// See [`Container::fork`].
    pub fork: Option<ForkMode>,
    /// See [`Container::resume_after_thaw`].
    pub resume_after_thaw: bool,
    /// See [`Container::exec_prefix`].
    pub exec_prefix: String,
    /// The init process.
    pub init: Process,
}

impl Container {
    /// A container whose init was created.
    #[must_use]
    pub fn new(new: NewContainer) -> Self {
        let life = Lifecycle::created(&new.id);
        let processes = BTreeMap::from([(None, Arc::new(new.init))]);
        Self {
            id: new.id,
            bundle: new.bundle,
            info: new.info,
            fork: new.fork,
            resume_after_thaw: new.resume_after_thaw,
            exec_prefix: new.exec_prefix,
            operation: tokio::sync::Mutex::new(()),
            turn: tokio::sync::Mutex::new(()),
            inner: Mutex::new(Inner { life, processes }),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at or changes the lifecycle, where that tells containerd nothing.
    pub fn life<T>(&self, look: impl FnOnce(&mut Lifecycle) -> T) -> T {
        look(&mut self.inner().life)
    }

    /// A process.
    ///
    /// # Errors
    /// [`Error::NoProcess`].
    pub fn process(&self, id: &ProcessId) -> Result<Arc<Process>> {
        self.inner()
            .processes
            .get(id)
            .cloned()
            .ok_or_else(|| Error::NoProcess(id.clone().unwrap_or_default()))
    }

    /// All processes that are not over, init first.
    #[must_use]
    pub fn live_processes(&self) -> Vec<ProcessId> {
        use crate::lifecycle::Phase;
        let inner = self.inner();
        let live = |id: &&ProcessId| !matches!(inner.life.phase(id), Ok(Phase::Stopped(_)) | Err(_));
        inner.processes.keys().filter(live).cloned().collect()
    }

    /// Registers an exec.
    ///
    /// # Errors
    /// The lifecycle refuses it.
    pub fn add_exec(&self, process: Process) -> Result<()> {
        let mut inner = self.inner();
        inner.life.add_exec(process.id.as_deref().unwrap_or_default())?;
        inner.processes.insert(process.id.clone(), Arc::new(process));
        Ok(())
    }

    /// Changes the lifecycle and tells containerd, in order: the lock is held while events are queued.
    pub fn change(&self, publisher: &Publisher, pid: u32, change: impl FnOnce(&mut Lifecycle) -> Vec<Notice>) {
        let mut inner = self.inner();
        for notice in change(&mut inner.life) {
            match notice {
                Notice::Started(None) => {
                    let event = TaskStart {
                        container_id: self.id.clone(),
                        pid,
                        ..Default::default()
                    };
                    publisher.publish(topics::TASK_START_EVENT_TOPIC, &event);
                }
                Notice::Started(Some(exec_id)) => {
                    let event = TaskExecStarted {
                        container_id: self.id.clone(),
                        exec_id,
                        pid,
                        ..Default::default()
                    };
                    publisher.publish(topics::TASK_EXEC_STARTED_EVENT_TOPIC, &event);
                }
                Notice::Exited(process, exit) => {
                    let event = TaskExit {
                        container_id: self.id.clone(),
                        id: process.clone().unwrap_or_else(|| self.id.clone()),
                        pid,
                        exit_status: exit.status,
                        exited_at: Some(timestamp(exit.at)).into(),
                        ..Default::default()
                    };
                    publisher.publish(topics::TASK_EXIT_EVENT_TOPIC, &event);
                    if let Some(process) = inner.processes.get(&process) {
                        process.exit.send_replace(Some(exit));
                    }
                }
            }
        }
    }

    /// Notes the end of a process that never started, so that those who wait for it go on.
    pub fn settle(&self, id: &ProcessId, exit: Exit) {
        if let Some(process) = self.inner().processes.get(id) {
            process.exit.send_if_modified(|old| {
                let change = old.is_none();
                old.get_or_insert(exit);
                change
            });
        }
    }

    /// Forgets an exec.
    pub fn remove_exec(&self, publisher: &Publisher, pid: u32, exec: &str) {
        self.change(publisher, pid, |life| life.remove_exec(exec));
        self.inner().processes.remove(&Some(exec.to_owned()));
    }
}
