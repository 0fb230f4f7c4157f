//! The processes of one container, and the order in which their exits are told.

use std::collections::HashMap;

use crate::error::{AgentError, Result};
use crate::process::Process;
use crate::reaper::Exit;
use crate::state::{Operation, Refusal, Status, next};

/// All processes of a container that the Task API knows.
#[derive(Debug)]
pub struct Processes {
    /// By exec id; init's is empty.
    pub by_id: HashMap<String, Process>,
    /// How init ended; reported when all execs have been.
    pub init_exit: Option<Exit>,
}

impl Processes {
    /// Init alone.
    pub fn new(init: Process) -> Self {
        Self {
            by_id: HashMap::from([(String::new(), init)]),
            init_exit: None,
        }
    }

    /// The process of that exec id; init's is empty.
    ///
    /// # Errors
    /// When it is unknown.
    pub fn get(&mut self, exec_id: &str) -> Result<&mut Process> {
        self.by_id.get_mut(exec_id).ok_or_else(|| match exec_id {
            "" => AgentError::Precondition("container not created".into()),
            exec_id => AgentError::not_found("exec", exec_id),
        })
    }

    /// Init's exit is the last that is heard of a container.
    pub fn report_init(&mut self) {
        let Some(exit) = self.init_exit else { return };
        let execs_run = self
            .by_id
            .iter()
            .any(|(id, process)| !id.is_empty() && process.pid != 0 && process.status != Status::Stopped);
        if !execs_run && let Some(init) = self.by_id.get_mut("") {
            init.finish(exit);
        }
    }
}

impl Process {
    /// Notes how it ended; the first time counts.
    pub fn finish(&mut self, exit: Exit) {
        if let Ok(after) = next(self.status, Operation::Exit) {
            self.status = after;
        }
        self.exit.send_if_modified(|was| was.replace(exit).is_none());
    }
}

/// The state after the operation, or the refusal as an error.
///
/// # Errors
/// The refusal.
pub fn refused(status: Status, operation: Operation, id: &str) -> Result<Status> {
    next(status, operation).map_err(|refusal| match refusal {
        Refusal::Finished => AgentError::Finished,
        Refusal::Precondition => {
            AgentError::Precondition(format!("{operation:?} of {id:?}: the process is {status:?}").to_lowercase())
        }
        Refusal::Plain => {
            AgentError::Runtime(format!("{operation:?} of {id:?}: the process is {status:?}").to_lowercase())
        }
    })
}
