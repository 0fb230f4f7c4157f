//! What can go wrong in the agent, and the one place that says which status code each kind becomes.

use ttrpc::Code;

/// Result of the agent's operations.
pub type Result<T> = std::result::Result<T, AgentError>;

/// Why a request was not done.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No container, process or stream of that name.
    #[error("{what} {id:?}: not found")]
    NotFound {
        /// Kind of thing.
        what: &'static str,
        /// Its id.
        id: String,
    },
    /// The name is taken.
    #[error("{what} {id:?}: already exists")]
    AlreadyExists {
        /// Kind of thing.
        what: &'static str,
        /// Its id.
        id: String,
    },
    /// The process has ended.
    #[error("process already finished")]
    Finished,
    /// The state does not allow it.
    #[error("{0}")]
    Precondition(String),
    /// The request makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// A part of the API that is not served here.
    #[error("{0} is not served by the agent")]
    Unimplemented(&'static str),
    /// It took too long.
    #[error("{0}: timed out")]
    Timeout(String),
    /// The container's runtime refused; the text is what runc's users know.
    #[error("{0}")]
    Runtime(String),
    /// A system call or file operation.
    #[error("{what}")]
    Io {
        /// What was tried on what.
        what: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

impl AgentError {
    /// A failed system call or file operation: what was tried on what, and why not.
    pub fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }

    /// An unknown id.
    pub fn not_found(what: &'static str, id: impl Into<String>) -> Self {
        Self::NotFound { what, id: id.into() }
    }

    /// The status code that containerd's clients expect for this.
    pub fn code(&self) -> Code {
        match self {
            Self::NotFound { .. } | Self::Finished => Code::NOT_FOUND,
            Self::AlreadyExists { .. } => Code::ALREADY_EXISTS,
            Self::Precondition(_) => Code::FAILED_PRECONDITION,
            Self::Invalid(_) => Code::INVALID_ARGUMENT,
            Self::Unimplemented(_) => Code::UNIMPLEMENTED,
            Self::Timeout(_) => Code::DEADLINE_EXCEEDED,
            Self::Runtime(_) | Self::Io { .. } => Code::UNKNOWN,
        }
    }

    /// The message with its causes.
    pub fn text(&self) -> String {
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

impl From<AgentError> for ttrpc::Error {
    fn from(error: AgentError) -> Self {
        Self::RpcStatus(ttrpc::get_status(error.code(), error.text()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_code_that_containerd_expects() {
        let io = || std::io::Error::other("no such thing");
        let cases = [
            (AgentError::not_found("container", "a"), Code::NOT_FOUND),
            (AgentError::Finished, Code::NOT_FOUND),
            (
                AgentError::AlreadyExists {
                    what: "container",
                    id: "a".into(),
                },
                Code::ALREADY_EXISTS,
            ),
            (AgentError::Precondition("x".into()), Code::FAILED_PRECONDITION),
            (AgentError::Invalid("x".into()), Code::INVALID_ARGUMENT),
            (AgentError::Unimplemented("Checkpoint"), Code::UNIMPLEMENTED),
            (AgentError::Timeout("x".into()), Code::DEADLINE_EXCEEDED),
            (AgentError::Runtime("x".into()), Code::UNKNOWN),
            (AgentError::io("open /x", io()), Code::UNKNOWN),
        ];
        for (error, code) in cases {
            assert_eq!(error.code(), code, "{error}");
        }
    }

    #[test]
    fn the_text_names_the_causes() {
        let error = AgentError::io("open /x", std::io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(error.text(), "open /x: No such file or directory (os error 2)");
        assert_eq!(AgentError::Finished.text(), "process already finished");
    }
}
