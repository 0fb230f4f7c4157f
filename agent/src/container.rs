//! A container and what can be asked of it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oci_spec::runtime::LinuxResources;
use protocol::StreamKind;
use tokio::sync::watch;

use crate::cgroup::Cgroup;
use crate::error::{AgentError, Result};
use crate::process::{Process, Wanted, pipes};
use crate::processes::{Processes, refused};
use crate::reaper::{Exit, Reaper};
use crate::runtime::{self, Make};
use crate::state::{Operation, Status, next};
use crate::stdio::Port;

/// How long Delete waits for attached streams to be delivered.
const DRAIN_DEADLINE: Duration = Duration::from_secs(10);

/// How long processes may take to die.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// How long a control group may take to freeze or thaw.
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);

/// A container with its processes.
#[derive(Debug)]
pub struct Container {
    id: String,
    bundle: PathBuf,
    group: Cgroup,
    processes: Mutex<Processes>,
    /// Held while a process is being made, started or removed.
    changing: tokio::sync::Mutex<()>,
    held: watch::Receiver<bool>,
}

/// What Task.State says of a process.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Its pid in the guest.
    pub pid: u32,
    /// Its state.
    pub status: Status,
    /// How it ended.
    pub exit: Option<Exit>,
    /// It has a terminal.
    pub terminal: bool,
}

impl Container {
    /// Makes a container and its init process, stopped before its program.
    ///
    /// # Errors
    /// What the container's runtime says; nothing is left then.
    pub async fn create(
        id: String,
        bundle: PathBuf,
        wanted: Wanted,
        reaper: &Reaper,
        held: watch::Receiver<bool>,
    ) -> Result<Arc<Self>> {
        let mut init = Process::new(wanted, None, &held);
        let (child, ours) = pipes(wanted)?;
        let group = Cgroup::of_container(&id);
        let made = runtime::make(reaper, &id, Make::Init { bundle: &bundle }, child, wanted.terminal).await;
        let made = match made {
            Ok(made) => made,
            Err(error) => {
                clean_up(&id, &group).await;
                return Err(error);
            }
        };
        init.pid = u32::try_from(made.pid).unwrap_or(0);
        let connected = init.connect(ours, made.terminal);
        let processes = Processes::new(init);
        let container = Arc::new(Self {
            group,
            id,
            bundle,
            processes: Mutex::new(processes),
            changing: tokio::sync::Mutex::new(()),
            held,
        });
        container.watch(String::new(), made.exit);
        if let Err(error) = connected {
            container.delete("").await?;
            return Err(error);
        }
        Ok(container)
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Directory with its `config.json`.
    pub fn bundle(&self) -> &PathBuf {
        &self.bundle
    }

    /// Its control group.
    pub fn group(&self) -> &Cgroup {
        &self.group
    }

    /// Pid of init in the guest.
    pub fn init_pid(&self) -> u32 {
        self.processes().by_id.get("").map_or(0, |init| init.pid)
    }

    /// Pid of init, unless it has ended: then the number may be another process's.
    pub fn live_pid(&self) -> Option<u32> {
        let processes = self.processes();
        let init = processes.by_id.get("")?;
        (init.status != Status::Stopped && processes.init_exit.is_none()).then_some(init.pid)
    }

    /// Registers an exec; it is made by [`Self::start`].
    ///
    /// # Errors
    /// When the name is taken or init does not run.
    pub fn exec(&self, exec_id: &str, wanted: Wanted, spec: String) -> Result<()> {
        let mut processes = self.processes();
        if processes.by_id.contains_key(exec_id) {
            return Err(AgentError::AlreadyExists {
                what: "exec",
                id: exec_id.to_owned(),
            });
        }
        let init = processes.get("")?;
        refused(init.status, Operation::Exec, &self.id)?;
        let process = Process::new(wanted, Some(spec), &self.held);
        processes.by_id.insert(exec_id.to_owned(), process);
        Ok(())
    }

    /// Starts init's program, or makes an exec. Returns the pid.
    ///
    /// # Errors
    /// When the state does not allow it, or what the container's runtime says.
    pub async fn start(self: &Arc<Self>, exec_id: &str, reaper: &Reaper) -> Result<u32> {
        let _alone = self.changing.lock().await;
        if exec_id.is_empty() {
            let mut processes = self.processes();
            let init = processes.get("")?;
            let after = refused(init.status, Operation::Start, &self.id)?;
            runtime::start(&self.id)?;
            init.status = after;
            return Ok(init.pid);
        }
        let (wanted, spec, after) = {
            let mut processes = self.processes();
            let init = processes.get("")?.status;
            let process = processes.get(exec_id)?;
            let after = refused(process.status, Operation::Start, exec_id)?;
            refused(init, Operation::Exec, &self.id)?;
            (process.wanted, process.spec.clone().unwrap_or_default(), after)
        };
        let (child, ours) = pipes(wanted)?;
        let made = runtime::make(reaper, &self.id, Make::Exec { process: &spec }, child, wanted.terminal).await;
        let mut processes = self.processes();
        let process = processes.get(exec_id)?;
        let made = made.inspect_err(|_| process.disconnect())?;
        process.status = after;
        process.pid = u32::try_from(made.pid).unwrap_or(0);
        let pid = process.pid;
        self.watch(exec_id.to_owned(), made.exit);
        if let Err(error) = process.connect(ours, made.terminal) {
            // Nobody could talk to it. Its exit is watched.
            let _ = crate::sys::kill(pid, libc::SIGKILL);
            return Err(error);
        }
        Ok(pid)
    }

    /// What there is to say of a process.
    ///
    /// # Errors
    /// When it is unknown.
    pub fn state(&self, exec_id: &str) -> Result<Snapshot> {
        let mut processes = self.processes();
        let process = processes.get(exec_id)?;
        let exit = *process.exit.borrow();
        Ok(Snapshot {
            pid: process.pid,
            status: process.status,
            exit,
            terminal: process.wanted.terminal,
        })
    }

    /// Waits until a process has ended.
    ///
    /// # Errors
    /// When it is unknown.
    pub async fn wait(&self, exec_id: &str) -> Result<Exit> {
        let mut exit = self.processes().get(exec_id)?.exit.subscribe();
        let ended = exit.wait_for(Option::is_some).await.map(|exit| *exit);
        ended
            .ok()
            .flatten()
            .ok_or_else(|| AgentError::not_found("process", exec_id))
    }

    /// Sends a signal to a process, or to all of the container.
    ///
    /// # Errors
    /// When it has ended or does not exist yet.
    pub fn kill(&self, exec_id: &str, signal: u32, all: bool) -> Result<()> {
        let signal = i32::try_from(signal).ok().filter(|signal| (1..=64).contains(signal));
        let signal = signal.ok_or_else(|| AgentError::Invalid("not a signal".into()))?;
        let pid = {
            let mut processes = self.processes();
            let process = processes.get(exec_id)?;
            let pid = process.pid;
            if !(all && exec_id.is_empty()) {
                refused(process.status, Operation::Kill, exec_id)?;
                // It was collected already and only waits for its execs to be told: the pid may be another process's.
                if exec_id.is_empty() && processes.init_exit.is_some() {
                    return Err(AgentError::Finished);
                }
            }
            pid
        };
        if pid == 0 {
            return Err(AgentError::Precondition("process not created".into()));
        }
        if all && exec_id.is_empty() {
            if signal == libc::SIGKILL {
                return self.group.kill();
            }
            for pid in self.group.pids()? {
                // One that has just ended needs no signal.
                let _ = crate::sys::kill(pid, signal);
            }
            return Ok(());
        }
        match crate::sys::kill(pid, signal) {
            Err(nix::Error::ESRCH) => Err(AgentError::Finished),
            result => result.map_err(|error| AgentError::io(format!("signal process {pid}"), error)),
        }
    }

    /// Removes an exec, or the container with all that is left of it.
    ///
    /// # Errors
    /// While it runs.
    pub async fn delete(&self, exec_id: &str) -> Result<(u32, Option<Exit>)> {
        let look = || -> Result<(Status, u32)> {
            let mut processes = self.processes();
            let process = processes.get(exec_id)?;
            refused(process.status, Operation::Delete, exec_id)?;
            Ok((process.status, process.pid))
        };
        // An exec that has ended need not wait for those that are being made; one that was never started may be among them.
        let waits = exec_id.is_empty() || look()?.0 == Status::Created;
        let _alone = if waits { Some(self.changing.lock().await) } else { None };
        let (status, pid) = look()?;
        if exec_id.is_empty() {
            self.group.kill()?;
            if status == Status::Created {
                // Its exit was never asked for, but it must be gone.
                let _ = tokio::time::timeout(KILL_DEADLINE, self.wait("")).await;
            }
        }
        self.drain(exec_id).await;
        let exit = self
            .processes()
            .get(exec_id)
            .ok()
            .and_then(|process| *process.exit.borrow());
        if exec_id.is_empty() {
            self.group.wait_empty(KILL_DEADLINE).await?;
            self.group.remove()?;
            runtime::forget(&self.id);
        }
        self.processes().by_id.remove(exec_id);
        Ok((pid, exit))
    }

    /// Lets what a process printed reach whoever is attached.
    async fn drain(&self, exec_id: &str) {
        let outputs: Vec<Arc<Port>> = match self.processes().get(exec_id) {
            Ok(process) => process.streams.outputs().cloned().collect(),
            Err(_) => return,
        };
        let all = async {
            for port in outputs {
                port.drained().await;
            }
        };
        let _ = tokio::time::timeout(DRAIN_DEADLINE, all).await;
    }

    /// The stream of a process.
    ///
    /// # Errors
    /// When the process is unknown or has no such stream.
    pub fn port(&self, exec_id: &str, kind: StreamKind) -> Result<Arc<Port>> {
        let mut processes = self.processes();
        let process = processes.get(exec_id)?;
        process
            .streams
            .port(kind)
            .cloned()
            .ok_or_else(|| AgentError::not_found("stream", format!("{kind:?}")))
    }

    /// Every stream of every process.
    pub fn ports(&self, outputs_only: bool) -> Vec<Arc<Port>> {
        let processes = self.processes();
        let all = processes.by_id.values();
        if outputs_only {
            all.flat_map(|process| process.streams.outputs().cloned()).collect()
        } else {
            all.flat_map(|process| process.streams.ports().cloned()).collect()
        }
    }

    /// Closes a process's stdin after what has arrived.
    ///
    /// # Errors
    /// When the process is unknown.
    pub fn close_input(&self, exec_id: &str) -> Result<()> {
        if let Some(port) = self.processes().get(exec_id)?.streams.port(StreamKind::Stdin) {
            port.close_input();
        }
        Ok(())
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// When the process is unknown.
    pub fn resize(&self, exec_id: &str, columns: u32, rows: u32) -> Result<()> {
        let fit = |size: u32| u16::try_from(size).unwrap_or(u16::MAX);
        self.processes().get(exec_id)?.resize(fit(columns), fit(rows))
    }

    /// Freezes the container.
    ///
    /// # Errors
    /// When it does not run, or does not stand still in time.
    pub async fn pause(&self) -> Result<()> {
        self.freeze(Operation::Pause, true).await
    }

    /// Lets a paused container go on.
    ///
    /// # Errors
    /// When it is not paused.
    pub async fn resume(&self) -> Result<()> {
        self.freeze(Operation::Resume, false).await
    }

    async fn freeze(&self, operation: Operation, frozen: bool) -> Result<()> {
        let _alone = self.changing.lock().await;
        let status = self.processes().get("")?.status;
        refused(status, operation, &self.id)?;
        if let Err(error) = self.group.set_frozen(frozen, FREEZE_DEADLINE).await {
            if frozen {
                // Best effort: the error that is reported is the first.
                let _ = std::fs::write(self.group.path().join("cgroup.freeze"), "0");
            }
            return Err(error);
        }
        let mut processes = self.processes();
        let init = processes.get("")?;
        if let Ok(after) = next(init.status, operation) {
            init.status = after;
        }
        Ok(())
    }

    /// Every process in the container, with its exec id if it is one.
    ///
    /// # Errors
    /// When the control group is gone.
    pub fn pids(&self) -> Result<Vec<(u32, Option<String>)>> {
        let pids = self.group.pids()?;
        let processes = self.processes();
        let exec_id = |pid: u32| {
            let mut execs = processes.by_id.iter().filter(|(id, _)| !id.is_empty());
            execs.find(|(_, process)| process.pid == pid).map(|(id, _)| id.clone())
        };
        Ok(pids.into_iter().map(|pid| (pid, exec_id(pid))).collect())
    }

    /// Sets the container's limits.
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub fn update(&self, resources: &LinuxResources) -> Result<()> {
        use libcgroups::common::{CgroupManager, ControllerOpt};
        let failed =
            |error: &dyn std::error::Error| AgentError::Runtime(format!("update container {}: {error}", self.id));
        let manager =
            libcgroups::v2::manager::Manager::new(crate::cgroup::MOUNT.into(), Cgroup::spec_path(&self.id).into())
                .map_err(|error| failed(&error))?;
        let options = ControllerOpt {
            resources,
            freezer_state: None,
            oom_score_adj: None,
            disable_oom_killer: false,
        };
        manager.apply(&options).map_err(|error| failed(&error))
    }

    fn watch(self: &Arc<Self>, exec_id: String, exit: tokio::sync::oneshot::Receiver<Exit>) {
        let container = self.clone();
        tokio::spawn(async move {
            if let Ok(exit) = exit.await {
                container.ended(&exec_id, exit);
            }
        });
    }

    fn ended(&self, exec_id: &str, exit: Exit) {
        if exec_id.is_empty() {
            // Whatever it left behind goes with it; with a pid namespace the kernel has done so already.
            if let Err(error) = self.group.kill() {
                tracing::warn!("container {}: {}", self.id, error.text());
            }
        }
        let mut processes = self.processes();
        if exec_id.is_empty() {
            processes.init_exit = Some(exit);
        } else if let Ok(process) = processes.get(exec_id) {
            process.finish(exit);
        }
        processes.report_init();
    }

    fn processes(&self) -> MutexGuard<'_, Processes> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes away what a container command left that was killed half-way; one that fails does so itself.
async fn clean_up(id: &str, group: &Cgroup) {
    let emptied = async {
        group.kill()?;
        group.wait_empty(KILL_DEADLINE).await?;
        group.remove()
    };
    if let Err(error) = emptied.await {
        tracing::warn!("container {id}: {}", error.text());
    }
    runtime::forget(id);
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn container() -> (Arc<Container>, watch::Sender<bool>) {
        let (hold, held) = watch::channel(false);
        let mut init = Process::new(Wanted::default(), None, &held);
        init.status = Status::Running;
        init.pid = 10;
        let processes = Processes::new(init);
        let container = Container {
            id: "no-such-container".into(),
            bundle: "/b".into(),
            group: Cgroup::of_container("no-such-container"),
            processes: Mutex::new(processes),
            changing: tokio::sync::Mutex::new(()),
            held,
        };
        (Arc::new(container), hold)
    }

    fn exit(status: u32) -> Exit {
        Exit {
            status,
            at: SystemTime::UNIX_EPOCH,
        }
    }

    #[tokio::test]
    async fn inits_exit_comes_after_the_execs() {
        let (container, _hold) = container();
        container.exec("e", Wanted::default(), "{}".into()).expect("init runs");
        {
            let mut processes = container.processes();
            let exec = processes.get("e").expect("registered");
            (exec.status, exec.pid) = (Status::Running, 11);
        }
        assert_eq!(container.live_pid(), Some(10));
        container.ended("", exit(1));
        assert_eq!(container.state("").expect("known").status, Status::Running);
        // Pid 10 was collected and may be another process by now.
        assert_eq!(container.live_pid(), None);
        assert!(matches!(container.kill("", 15, false), Err(AgentError::Finished)));
        container.ended("e", exit(137));
        assert_eq!(container.wait("e").await.expect("known").status, 137);
        assert_eq!(container.wait("").await.expect("known").status, 1);
        assert_eq!(container.state("").expect("known").status, Status::Stopped);
    }

    #[tokio::test]
    async fn an_exec_that_was_never_started_delays_nothing() {
        let (container, _hold) = container();
        container.exec("e", Wanted::default(), "{}".into()).expect("init runs");
        container.ended("", exit(0));
        assert_eq!(container.wait("").await.expect("known").status, 0);
    }

    #[tokio::test]
    async fn refusals_have_the_codes_of_runc() {
        let (container, _hold) = container();
        container.exec("e", Wanted::default(), "{}".into()).expect("init runs");
        let again = container.exec("e", Wanted::default(), "{}".into());
        assert!(matches!(again, Err(AgentError::AlreadyExists { .. })));
        assert!(matches!(
            container.kill("e", 9, false),
            Err(AgentError::Precondition(_))
        ));
        assert!(matches!(
            container.kill("x", 9, false),
            Err(AgentError::NotFound { .. })
        ));
        assert!(matches!(container.kill("", 99, false), Err(AgentError::Invalid(_))));
        assert!(matches!(container.delete("").await, Err(AgentError::Runtime(_))));
        assert!(matches!(container.resume().await, Err(AgentError::Runtime(_))));
        container.ended("", exit(0));
        assert!(matches!(container.kill("", 9, false), Err(AgentError::Finished)));
        assert!(matches!(
            container.exec("f", Wanted::default(), "{}".into()),
            Err(AgentError::Precondition(_))
        ));
    }
}
