//! Programs of other packages that we run.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output, Stdio};

/// A program and where to get it.
pub(crate) struct Tool {
    /// Name of the executable.
    pub(crate) name: &'static str,
    /// Debian package that has it.
    pub(crate) package: &'static str,
}

/// Why a program did not do its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// It is not installed.
    #[error("{name} not found: install the package {package}")]
    Missing {
        /// The program.
        name: &'static str,
        /// Its package.
        package: &'static str,
    },
    /// It could not be started.
    #[error("start {name}")]
    Start {
        /// The program.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{name} ended with {status}: {stderr}")]
    Failed {
        /// The program.
        name: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// The end of what it wrote to stderr, or to stdout when that is empty.
        stderr: String,
    },
}

impl ToolError {
    pub(crate) fn start(tool: &Tool, source: io::Error) -> Self {
        Self::Start {
            name: tool.name,
            source,
        }
    }
}

impl Tool {
    /// A command that dies with this thread. The program is looked up in `PATH` and in the system's own directories: a
    /// service's `PATH` often lacks `sbin`.
    pub(crate) fn command(&self) -> Result<Command, ToolError> {
        let mut command = Command::new(self.find().ok_or(ToolError::Missing {
            name: self.name,
            package: self.package,
        })?);
        command.stdin(Stdio::null());
        super::sys::die_with_parent(&mut command);
        Ok(command)
    }

    fn find(&self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let system = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
        std::env::split_paths(&path)
            .filter(|dir| dir.is_absolute())
            .chain(system)
            .map(|dir| dir.join(self.name))
            .find(|file| fs::metadata(file).is_ok_and(|meta| meta.is_file()))
    }
}

/// Runs to the end; output is kept for the error only.
pub(crate) fn run(mut command: Command, tool: &Tool) -> Result<Output, ToolError> {
    let output = command.output().map_err(|source| ToolError::start(tool, source))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = if output.stderr.trim_ascii().is_empty() {
        &output.stdout
    } else {
        &output.stderr
    };
    Err(ToolError::Failed {
        name: tool.name,
        status: output.status,
        stderr: last_words(said),
    })
}

/// The last 2000 bytes, on one line.
fn last_words(bytes: &[u8]) -> String {
    let tail = &bytes[bytes.len().saturating_sub(2000)..];
    String::from_utf8_lossy(tail)
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
}
