//! The states of a process and what each request means in them; and who may wake a quiesced guest. Pure.

/// State of a container's init process or of an exec, in containerd's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// It exists and has not been started.
    Created,
    /// It runs.
    Running,
    /// Its control group is frozen.
    Paused,
    /// It has ended.
    Stopped,
}

/// A request that depends on the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Task.Start.
    Start,
    /// Task.Pause.
    Pause,
    /// Task.Resume.
    Resume,
    /// Task.Kill.
    Kill,
    /// Task.Exec, or Start of an exec: looks at the container's init.
    Exec,
    /// Task.Delete.
    Delete,
    /// Not a request: the process ended.
    Exit,
}

/// Why a request is refused; each is another status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Wrong state: FailedPrecondition.
    Precondition,
    /// Wrong state where runc answers with a plain error.
    Plain,
    /// The process has ended: NotFound.
    Finished,
}

/// The state after `operation`, or why it is refused.
///
/// # Errors
/// The refusal.
pub fn next(status: Status, operation: Operation) -> Result<Status, Refusal> {
    use Operation::{Delete, Exec, Exit, Kill, Pause, Resume, Start};
    use Status::{Created, Paused, Running, Stopped};
    match (status, operation) {
        (Created, Start) => Ok(Running),
        (_, Start) => Err(Refusal::Precondition),
        (Running, Pause) => Ok(Paused),
        (Paused, Resume) => Ok(Running),
        (_, Pause | Resume) => Err(Refusal::Plain),
        (Stopped, Kill) => Err(Refusal::Finished),
        (_, Kill) => Ok(status),
        (Running, Exec) => Ok(status),
        (_, Exec) => Err(Refusal::Precondition),
        (Created | Stopped, Delete) => Ok(Stopped),
        (_, Delete) => Err(Refusal::Plain),
        (_, Exit) => Ok(Stopped),
    }
}

/// Number of a connection to the agent; grows, also through restores.
pub type ConnectionId = u64;

/// Whether the guest is held still for a checkpoint, and what it takes to let it go on.
///
/// A fork wakes up in the middle of its parent's `Held`, but on other connections: only the one that asked to quiesce may
/// simply thaw. All others have to renew the guest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hold {
    /// Containers run.
    #[default]
    Free,
    /// Quiesced by this connection.
    Held(ConnectionId),
    /// Quiesced, restored, and renewed.
    Renewed,
}

impl Hold {
    /// Whether containers are frozen.
    pub fn is_held(self) -> bool {
        self != Self::Free
    }

    /// Whether `connection` may thaw.
    pub fn may_thaw(self, connection: ConnectionId) -> bool {
        match self {
            Self::Free | Self::Renewed => true,
            Self::Held(by) => by == connection,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STATUSES: [Status; 4] = [Status::Created, Status::Running, Status::Paused, Status::Stopped];
    const OPERATIONS: [Operation; 7] = [
        Operation::Start,
        Operation::Pause,
        Operation::Resume,
        Operation::Kill,
        Operation::Exec,
        Operation::Delete,
        Operation::Exit,
    ];

    proptest! {
        #[test]
        fn stopped_is_for_ever_and_created_comes_first(operations in prop::collection::vec(prop::sample::select(&OPERATIONS[..]), 0..40)) {
            let mut status = Status::Created;
            for operation in operations {
                if let Ok(after) = next(status, operation) {
                    prop_assert!(status != Status::Stopped || after == Status::Stopped);
                    prop_assert!(after != Status::Created || status == Status::Created);
                    prop_assert!(after != Status::Paused || matches!(status, Status::Running | Status::Paused));
                    status = after;
                }
            }
        }

        #[test]
        fn only_the_connection_that_quiesced_thaws_without_renewal(by in any::<u64>(), other in any::<u64>()) {
            prop_assert!(Hold::Held(by).may_thaw(by));
            prop_assert_eq!(Hold::Held(by).may_thaw(other), by == other);
            prop_assert!(Hold::Renewed.may_thaw(other));
        }
    }

    #[test]
    fn an_exit_is_never_refused_and_a_running_process_is_never_deleted() {
        for status in STATUSES {
            assert_eq!(next(status, Operation::Exit), Ok(Status::Stopped));
        }
        assert_eq!(next(Status::Running, Operation::Delete), Err(Refusal::Plain));
        assert_eq!(next(Status::Paused, Operation::Delete), Err(Refusal::Plain));
    }

    #[test]
    fn a_finished_process_cannot_be_killed_or_entered() {
        assert_eq!(next(Status::Stopped, Operation::Kill), Err(Refusal::Finished));
        assert_eq!(next(Status::Stopped, Operation::Exec), Err(Refusal::Precondition));
        assert_eq!(next(Status::Created, Operation::Kill), Ok(Status::Created));
    }
}
