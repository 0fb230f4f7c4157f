//! Every error a Task call can end in, and the gRPC code containerd gets for it.

use std::path::PathBuf;

use protocol::containerd::ttrpc;
use ttrpc::Code;

use crate::guest::GuestError;
use crate::lifecycle::Refusal;
use crate::net::NetError;
use crate::rootfs::RootfsError;
use crate::spec::SpecError;
use crate::stdio::StdioError;
use crate::vm::VmError;

/// Why a Task call was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No container with that id.
    #[error("container not created")]
    NoContainer,
    /// No such process in the container.
    #[error("exec {0} not found: not found")]
    NoProcess(String),
    /// The container's id is taken.
    #[error("container {0}: already exists")]
    ContainerExists(String),
    /// The lifecycle of the process does not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The request itself cannot be right.
    #[error("{0}")]
    InvalidArgument(String),
    /// We do not do that.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// The container's spec.
    #[error("OCI runtime create failed")]
    Spec(#[from] SpecError),
    /// The container's root filesystem.
    #[error("root filesystem")]
    Rootfs(#[from] RootfsError),
    /// The writable disk.
    #[error("writable disk")]
    Disk(#[from] checkpoint::disk::DiskError),
    /// The VMM.
    #[error("virtual machine")]
    Vm(#[from] VmError),
    /// The agent.
    #[error("guest")]
    Guest(#[from] GuestError),
    /// The agent could not create or start the process; says it as runc's shim does.
    #[error("OCI runtime {action} failed: {message}")]
    Runtime {
        /// `create`, `start` or `exec`.
        action: &'static str,
        /// The agent's words.
        message: String,
    },
    /// The network.
    #[error("network")]
    Net(#[from] NetError),
    /// Standard streams.
    #[error("standard streams")]
    Stdio(#[from] StdioError),
    /// The checkpoint cannot be used here.
    #[error("checkpoint {path}: {reason}")]
    CheckpointUnusable {
        /// Its directory.
        path: PathBuf,
        /// What differs, or what is wrong.
        reason: String,
    },
    /// The checkpoint was not made.
    #[error("checkpoint was not made: {0}")]
    CheckpointNotMade(String),
    /// A file or directory of ours.
    #[error("{action} {path}")]
    File {
        /// What was tried, as in "open".
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// A task of ours ended without an answer.
    #[error("internal: {0}")]
    Internal(String),
}

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// [`Error::File`] from an I/O error.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// The gRPC code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::NoContainer | Self::NoProcess(_) => Code::NOT_FOUND,
            Self::ContainerExists(_) => Code::ALREADY_EXISTS,
            Self::Refused(refusal) => match refusal {
                Refusal::Finished => Code::NOT_FOUND,
                Refusal::ExecExists(_) => Code::ALREADY_EXISTS,
                Refusal::NotCreated | Refusal::InitNotRunning(_) => Code::FAILED_PRECONDITION,
                Refusal::NoProcess(_) => Code::NOT_FOUND,
                Refusal::Paused | Refusal::WrongState { .. } => Code::UNKNOWN,
            },
            Self::Spec(SpecError::NoSource { .. }) => Code::UNKNOWN,
            Self::InvalidArgument(_) | Self::Spec(_) => Code::INVALID_ARGUMENT,
            Self::Unsupported(_) => Code::UNIMPLEMENTED,
            Self::CheckpointUnusable { .. } => Code::FAILED_PRECONDITION,
            Self::Guest(GuestError::Refused { code, .. }) => *code,
            Self::Runtime { .. }
            | Self::Rootfs(_)
            | Self::Disk(_)
            | Self::Vm(_)
            | Self::Guest(_)
            | Self::Net(_)
            | Self::Stdio(_)
            | Self::CheckpointNotMade(_)
            | Self::File { .. }
            | Self::Internal(_) => Code::UNKNOWN,
        }
    }

    /// The message with all its causes.
    #[must_use]
    pub fn text(&self) -> String {
        chain(self)
    }
}

/// An error and its causes in one line, without saying the same thing twice.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

impl From<Error> for ttrpc::Error {
    fn from(error: Error) -> Self {
        let code = error.code();
        // containerd's client appends the name of the code itself.
        let text = error.text();
        let message = if code == Code::NOT_FOUND {
            text.trim_end_matches(": not found").to_owned()
        } else {
            text
        };
        Self::RpcStatus(ttrpc::get_status(code, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_runc_shim() {
        let cases = [
            (Error::NoContainer, Code::NOT_FOUND),
            (Error::NoProcess("e".into()), Code::NOT_FOUND),
            (Error::ContainerExists("c".into()), Code::ALREADY_EXISTS),
            (Refusal::Finished.into(), Code::NOT_FOUND),
            (Refusal::NotCreated.into(), Code::FAILED_PRECONDITION),
            (Refusal::InitNotRunning("c".into()).into(), Code::FAILED_PRECONDITION),
            (Refusal::ExecExists("e".into()).into(), Code::ALREADY_EXISTS),
            (
                Refusal::WrongState {
                    action: "delete",
                    state: "running",
                }
                .into(),
                Code::UNKNOWN,
            ),
            (Error::Unsupported("x".into()), Code::UNIMPLEMENTED),
            (
                Error::Runtime {
                    action: "create",
                    message: "m".into(),
                },
                Code::UNKNOWN,
            ),
            (
                Error::CheckpointUnusable {
                    path: "/c".into(),
                    reason: "cpu".into(),
                },
                Code::FAILED_PRECONDITION,
            ),
        ];
        for (error, code) in cases {
            assert_eq!(error.code(), code, "{error}");
        }
    }

    #[test]
    fn text_names_the_causes_once() {
        let io = std::io::Error::from_raw_os_error(libc::ENOENT);
        let text = Error::file("open", "/x")(io).text();
        assert_eq!(text, "open /x: No such file or directory (os error 2)");
    }
}
