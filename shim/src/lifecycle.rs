//! Who may do what when: the states of one container's processes, without any I/O.
//!
//! Guarantees, whatever order the guest's answers come in: no exit before its start; each process exits once;
//! the exit of init is the last one of its container.

use std::collections::BTreeMap;
use std::time::SystemTime;

/// A process of a container: `None` is init, else the exec id.
pub type ProcessId = Option<String>;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit status as a shell shows it: 128 + signal for a killed one.
    pub status: u32,
    /// When.
    pub at: SystemTime,
}

/// Exit status of processes whose machine is gone.
pub const LOST: u32 = 137;

/// Where a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Made, not started.
    Created,
    /// Start was sent; an exit that arrives meanwhile is kept.
    Starting {
        /// An exit that overtook the answer to Start.
        early: Option<Exit>,
    },
    /// Runs (or is frozen, see [`Lifecycle::is_paused`]).
    Running,
    /// Init has ended, but execs have not been reported yet.
    Ending(Exit),
    /// Ended and reported.
    Stopped(Exit),
}

/// What containerd is told, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The process runs.
    Started(ProcessId),
    /// The process ended.
    Exited(ProcessId, Exit),
}

/// Why the lifecycle does not allow something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Signal to, or wait for, something that is over.
    #[error("process already finished")]
    Finished,
    /// Signal to something that was not made yet.
    #[error("process not created")]
    NotCreated,
    /// An exec in a container whose init does not run.
    #[error("init process of {0} is not running")]
    InitNotRunning(String),
    /// The exec id is taken.
    #[error("exec {0}: already exists")]
    ExecExists(String),
    /// No such exec.
    #[error("exec {0} not found")]
    NoProcess(String),
    /// An exec in a container that stands still.
    #[error("cannot exec in a paused state")]
    Paused,
    /// Anything else.
    #[error("cannot {action} a {state} process")]
    WrongState {
        /// The verb.
        action: &'static str,
        /// The adjective.
        state: &'static str,
    },
}

/// The processes of one container.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    id: String,
    init: Phase,
    execs: BTreeMap<String, Phase>,
    paused: bool,
}

impl Lifecycle {
    /// A container whose init was created.
    #[must_use]
    pub fn created(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            init: Phase::Created,
            execs: BTreeMap::new(),
            paused: false,
        }
    }

    /// Where the process is.
    ///
    /// # Errors
    /// [`Refusal::NoProcess`].
    pub fn phase(&self, process: &ProcessId) -> Result<Phase, Refusal> {
        match process {
            None => Ok(self.init),
            Some(exec) => self
                .execs
                .get(exec)
                .copied()
                .ok_or_else(|| Refusal::NoProcess(exec.clone())),
        }
    }

    fn slot(&mut self, process: &ProcessId) -> Result<&mut Phase, Refusal> {
        match process {
            None => Ok(&mut self.init),
            Some(exec) => self.execs.get_mut(exec).ok_or_else(|| Refusal::NoProcess(exec.clone())),
        }
    }

    /// Whether the container is frozen by the Task API.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether init has been started and has not ended.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.init, Phase::Running | Phase::Starting { .. })
    }

    /// Ids of execs, in order.
    pub fn execs(&self) -> impl Iterator<Item = &String> {
        self.execs.keys()
    }

    /// Start is about to be sent.
    ///
    /// # Errors
    /// Started before, or an exec whose init does not run or stands still.
    pub fn begin_start(&mut self, process: &ProcessId) -> Result<(), Refusal> {
        if process.is_some() {
            self.may_exec()?;
        }
        let slot = self.slot(process)?;
        match slot {
            Phase::Created => {
                *slot = Phase::Starting { early: None };
                Ok(())
            }
            other => Err(Refusal::WrongState {
                action: "start",
                state: word(*other),
            }),
        }
    }

    /// Start was answered.
    pub fn started(&mut self, process: &ProcessId) -> Vec<Notice> {
        let Ok(slot) = self.slot(process) else {
            return Vec::new();
        };
        let Phase::Starting { early } = *slot else {
            return Vec::new();
        };
        *slot = Phase::Running;
        let mut notices = vec![Notice::Started(process.clone())];
        if let Some(exit) = early {
            notices.extend(self.exited(process, exit));
        }
        notices
    }

    /// Start failed: the process is over, even if it ran a little, and only Delete makes sense; nothing is told to containerd.
    pub fn start_failed(&mut self, process: &ProcessId, exit: Exit) -> Vec<Notice> {
        if let Ok(slot) = self.slot(process)
            && matches!(slot, Phase::Starting { .. })
        {
            *slot = Phase::Stopped(exit);
        }
        self.release_init()
    }

    /// The guest says that the process ended.
    pub fn exited(&mut self, process: &ProcessId, exit: Exit) -> Vec<Notice> {
        let Ok(slot) = self.slot(process) else {
            return Vec::new();
        };
        match slot {
            Phase::Starting { early } => {
                early.get_or_insert(exit);
                return Vec::new();
            }
            // Nothing waited for it, so init's exit may have been told already.
            Phase::Created if process.is_some() => {
                *slot = Phase::Stopped(exit);
                return Vec::new();
            }
            Phase::Ending(_) | Phase::Stopped(_) => return Vec::new(),
            Phase::Created | Phase::Running => {}
        }
        let mut notices = Vec::new();
        if process.is_none() {
            *slot = Phase::Ending(exit);
            self.paused = false;
        } else {
            *slot = Phase::Stopped(exit);
            notices.push(Notice::Exited(process.clone(), exit));
        }
        notices.extend(self.release_init());
        notices
    }

    /// The machine is gone: everything that was not over is. For what is being started, that counts when its Start is answered.
    pub fn lost(&mut self, at: SystemTime) -> Vec<Notice> {
        let exit = Exit { status: LOST, at };
        let execs: Vec<ProcessId> = self.execs.keys().cloned().map(Some).collect();
        let all = execs.into_iter().chain([None]);
        all.flat_map(|process| self.exited(&process, exit)).collect()
    }

    /// Init ended, but execs were not reported within the time allowed: they are given up.
    pub fn give_up_execs(&mut self) -> Vec<Notice> {
        let Phase::Ending(exit) = self.init else {
            return Vec::new();
        };
        let execs: Vec<ProcessId> = self.execs.keys().cloned().map(Some).collect();
        let lost = Exit {
            status: LOST,
            at: exit.at,
        };
        execs.iter().flat_map(|p| self.exited(p, lost)).collect()
    }

    fn release_init(&mut self) -> Vec<Notice> {
        let Phase::Ending(exit) = self.init else {
            return Vec::new();
        };
        if self
            .execs
            .values()
            .any(|p| matches!(p, Phase::Running | Phase::Starting { .. }))
        {
            return Vec::new();
        }
        self.init = Phase::Stopped(exit);
        vec![Notice::Exited(None, exit)]
    }

    /// A new exec.
    ///
    /// # Errors
    /// The id is taken, or init does not run.
    pub fn add_exec(&mut self, exec: &str) -> Result<(), Refusal> {
        if self.execs.contains_key(exec) {
            return Err(Refusal::ExecExists(exec.to_owned()));
        }
        self.may_exec()?;
        self.execs.insert(exec.to_owned(), Phase::Created);
        Ok(())
    }

    fn may_exec(&self) -> Result<(), Refusal> {
        if !matches!(self.init, Phase::Running) {
            return Err(Refusal::InitNotRunning(self.id.clone()));
        }
        if self.paused {
            return Err(Refusal::Paused);
        }
        Ok(())
    }

    /// Whether the process may be deleted, and how it ended if it did.
    ///
    /// # Errors
    /// It runs.
    pub fn may_delete(&self, process: &ProcessId) -> Result<Option<Exit>, Refusal> {
        match self.phase(process)? {
            Phase::Created => Ok(None),
            Phase::Stopped(exit) => Ok(Some(exit)),
            other => Err(Refusal::WrongState {
                action: "delete",
                state: word(other),
            }),
        }
    }

    /// Forgets an exec.
    pub fn remove_exec(&mut self, exec: &str) -> Vec<Notice> {
        self.execs.remove(exec);
        self.release_init()
    }

    /// Whether a signal can be sent.
    ///
    /// # Errors
    /// It is over.
    pub fn may_kill(&self, process: &ProcessId) -> Result<(), Refusal> {
        match self.phase(process)? {
            Phase::Stopped(_) | Phase::Ending(_) => Err(Refusal::Finished),
            Phase::Created if process.is_some() => Err(Refusal::NotCreated),
            Phase::Created | Phase::Starting { .. } | Phase::Running => Ok(()),
        }
    }

    /// Whether the container may be paused.
    ///
    /// # Errors
    /// It does not run, or is paused already.
    pub fn may_pause(&self) -> Result<(), Refusal> {
        match self.init {
            Phase::Running if !self.paused => Ok(()),
            other => Err(Refusal::WrongState {
                action: "pause",
                state: if self.paused { "paused" } else { word(other) },
            }),
        }
    }

    /// Whether the container may be resumed.
    ///
    /// # Errors
    /// It is not paused.
    pub fn may_resume(&self) -> Result<(), Refusal> {
        if self.paused {
            Ok(())
        } else {
            Err(Refusal::WrongState {
                action: "resume",
                state: word(self.init),
            })
        }
    }

    /// Pause or Resume was answered.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused && matches!(self.init, Phase::Running);
    }

    /// Whether a checkpoint can be made.
    ///
    /// # Errors
    /// Init does not run.
    pub fn may_checkpoint(&self) -> Result<(), Refusal> {
        match self.init {
            Phase::Running => Ok(()),
            other => Err(Refusal::WrongState {
                action: "checkpoint",
                state: word(other),
            }),
        }
    }
}

/// The state as containerd's messages spell it.
#[must_use]
pub fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Created => "created",
        Phase::Starting { .. } | Phase::Running | Phase::Ending(_) => "running",
        Phase::Stopped(_) => "stopped",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn exit(status: u32) -> Exit {
        Exit {
            status,
            at: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn an_exit_that_overtakes_its_start_is_told_after_it() {
        let mut life = Lifecycle::created("c");
        life.begin_start(&None).unwrap();
        assert_eq!(life.exited(&None, exit(3)), vec![]);
        assert_eq!(
            life.started(&None),
            vec![Notice::Started(None), Notice::Exited(None, exit(3))]
        );
        assert_eq!(life.may_kill(&None), Err(Refusal::Finished));
        assert_eq!(life.may_delete(&None), Ok(Some(exit(3))));
    }

    /// A container that runs, with an exec that was added.
    fn running() -> (Lifecycle, ProcessId) {
        let mut life = Lifecycle::created("c");
        life.begin_start(&None).unwrap();
        life.started(&None);
        life.add_exec("e").unwrap();
        (life, Some("e".to_owned()))
    }

    #[test]
    fn init_exits_last() {
        let (mut life, e) = running();
        life.begin_start(&e).unwrap();
        life.started(&e);
        assert_eq!(life.exited(&None, exit(0)), vec![]);
        assert!(life.may_delete(&None).is_err());
        assert_eq!(
            life.exited(&e, exit(137)),
            vec![Notice::Exited(e.clone(), exit(137)), Notice::Exited(None, exit(0))]
        );
    }

    #[test]
    fn a_lost_machine_ends_all() {
        let (mut life, e) = running();
        life.begin_start(&e).unwrap();
        life.started(&e);
        let notices = life.lost(SystemTime::UNIX_EPOCH);
        assert_eq!(
            notices,
            vec![Notice::Exited(e, exit(LOST)), Notice::Exited(None, exit(LOST))]
        );
        assert_eq!(life.lost(SystemTime::UNIX_EPOCH), vec![]);
    }

    #[test]
    fn a_machine_that_is_lost_during_a_start_is_told_after_it() {
        let (mut life, e) = running();
        life.begin_start(&e).unwrap();
        assert_eq!(life.lost(SystemTime::UNIX_EPOCH), vec![]);
        assert_eq!(
            life.started(&e),
            vec![
                Notice::Started(e.clone()),
                Notice::Exited(e, exit(LOST)),
                Notice::Exited(None, exit(LOST))
            ]
        );
        let mut life = Lifecycle::created("c");
        life.begin_start(&None).unwrap();
        life.lost(SystemTime::UNIX_EPOCH);
        assert_eq!(life.start_failed(&None, exit(255)), vec![]);
        assert_eq!(life.may_delete(&None), Ok(Some(exit(255))));
    }

    #[test]
    fn an_exec_is_not_started_while_the_container_is_paused() {
        let (mut life, e) = running();
        life.set_paused(true);
        assert_eq!(life.begin_start(&e), Err(Refusal::Paused));
        life.set_paused(false);
        assert_eq!(life.begin_start(&e), Ok(()));
    }

    #[test]
    fn refuses_what_runc_refuses() {
        let mut life = Lifecycle::created("c");
        assert_eq!(life.add_exec("e"), Err(Refusal::InitNotRunning("c".into())));
        life.begin_start(&None).unwrap();
        assert!(life.begin_start(&None).is_err());
        life.started(&None);
        assert!(life.may_delete(&None).is_err());
        assert!(life.may_resume().is_err());
        life.set_paused(true);
        assert!(life.may_pause().is_err());
        assert!(life.may_resume().is_ok());
    }

    #[test]
    fn nothing_is_told_of_an_exec_that_was_never_started() {
        let (mut life, e) = running();
        assert_eq!(life.exited(&None, exit(0)), vec![Notice::Exited(None, exit(0))]);
        assert_eq!(life.exited(&e, exit(1)), vec![]);
        assert_eq!(life.may_delete(&e), Ok(Some(exit(1))));
    }

    #[derive(Clone, Debug)]
    enum Step {
        BeginStart(u8),
        Started(u8),
        Failed(u8),
        Exited(u8),
        Add(u8),
        Remove(u8),
        GiveUp,
        Lost,
    }

    fn process(n: u8) -> ProcessId {
        (n > 0).then(|| format!("e{n}"))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u8..3).prop_map(Step::BeginStart),
            (0u8..3).prop_map(Step::Started),
            (0u8..3).prop_map(Step::Failed),
            (0u8..3).prop_map(Step::Exited),
            (1u8..3).prop_map(Step::Add),
            (1u8..3).prop_map(Step::Remove),
            Just(Step::GiveUp),
            Just(Step::Lost),
        ]
    }

    proptest! {
        #[test]
        fn order_holds_for_any_sequence(steps in proptest::collection::vec(step(), 0..60)) {
            let mut life = Lifecycle::created("c");
            let mut started = BTreeSet::new();
            let mut init_over = false;
            for step in steps {
                let mut removed = None;
                let notices = match &step {
                    Step::BeginStart(n) => { let _ = life.begin_start(&process(*n)); vec![] }
                    Step::Started(n) => life.started(&process(*n)),
                    Step::Failed(n) => life.start_failed(&process(*n), exit(1)),
                    Step::Exited(n) => life.exited(&process(*n), exit(u32::from(*n))),
                    Step::Add(n) => { let _ = life.add_exec(&process(*n).unwrap()); vec![] }
                    Step::Remove(n) if life.may_delete(&process(*n)).is_ok() => {
                        removed = process(*n);
                        life.remove_exec(&process(*n).unwrap())
                    }
                    Step::Remove(_) => vec![],
                    Step::GiveUp => life.give_up_execs(),
                    Step::Lost => life.lost(SystemTime::UNIX_EPOCH),
                };
                for notice in notices {
                    prop_assert!(!init_over, "a notice after the exit of init");
                    match notice {
                        Notice::Started(p) => prop_assert!(started.insert(p)),
                        Notice::Exited(None, _) => init_over = true,
                        Notice::Exited(p, _) => {
                            // A created exec that never started may be reported lost; a started one exactly once.
                            started.remove(&p);
                        }
                    }
                }
                if let Some(p) = removed { started.remove(&Some(p)); }
            }
            life.lost(SystemTime::UNIX_EPOCH);
            for n in 0..3 {
                life.start_failed(&process(n), exit(255));
            }
            let over = matches!(life.phase(&None), Ok(Phase::Stopped(_)));
            prop_assert!(over);
        }
    }
}
