//! One process of a container that the Task API knows: init or an exec, with its streams.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::fcntl::OFlag;
use protocol::StreamKind;
use tokio::sync::{oneshot, watch};

use crate::error::{AgentError, Result};
use crate::fd::Fd;
use crate::reaper::Exit;
use crate::runtime::ChildStreams;
use crate::state::Status;
use crate::stdio::{Direction, Port};

/// Which streams a process has. Without stdin it reads /dev/null; other output is thrown away, but a fork may want it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// It has a terminal; then stderr is not used.
    pub terminal: bool,
    /// stdin is attached to.
    pub stdin: bool,
    /// stdout is attached to.
    pub stdout: bool,
    /// stderr is attached to.
    pub stderr: bool,
}

/// A process.
#[derive(Debug)]
pub struct Process {
    /// Its state.
    pub status: Status,
    /// 0 until it exists.
    pub pid: u32,
    /// How it ended.
    pub exit: watch::Sender<Option<Exit>>,
    /// What an exec will run: OCI `Process` as JSON.
    pub spec: Option<String>,
    /// Which streams it has.
    pub wanted: Wanted,
    /// The streams.
    pub streams: Streams,
    /// Columns and rows that were asked for before there was a terminal.
    size: Option<(u16, u16)>,
}

/// The agent's ends of a process's streams.
#[derive(Debug, Default)]
pub struct Streams {
    stdin: Option<Arc<Port>>,
    stdout: Option<Arc<Port>>,
    stderr: Option<Arc<Port>>,
    terminal: Option<OwnedFd>,
    ends: Ends,
}

/// Where the pumps wait for their end of the process.
#[derive(Debug, Default)]
struct Ends {
    stdin: Option<oneshot::Sender<Fd>>,
    stdout: Option<oneshot::Sender<Fd>>,
    stderr: Option<oneshot::Sender<Fd>>,
}

/// The agent's ends of the pipes of a process that is being made.
#[derive(Debug, Default)]
pub struct Pipes {
    stdin: Option<Fd>,
    stdout: Option<Fd>,
    stderr: Option<Fd>,
}

impl Process {
    /// A process that does not exist yet. Its streams can be attached to.
    pub fn new(wanted: Wanted, spec: Option<String>, held: &watch::Receiver<bool>) -> Self {
        Self {
            status: Status::Created,
            pid: 0,
            exit: watch::Sender::new(None),
            spec,
            wanted,
            streams: Streams::new(wanted, held),
            size: None,
        }
    }

    /// Gives the pumps their ends once the process exists.
    ///
    /// # Errors
    /// When a descriptor cannot be polled.
    pub fn connect(&mut self, pipes: Pipes, terminal: Option<OwnedFd>) -> Result<()> {
        let failed = |error: std::io::Error| AgentError::io("connect the process's streams", error);
        let mut pipes = pipes;
        if let Some(terminal) = terminal {
            pipes.stdin = Some(Fd::new(terminal.try_clone().map_err(failed)?).map_err(failed)?);
            pipes.stdout = Some(Fd::new(terminal.try_clone().map_err(failed)?).map_err(failed)?);
            self.streams.terminal = Some(terminal);
            if let Some((columns, rows)) = self.size {
                self.resize(columns, rows)?;
            }
        }
        let ends = std::mem::take(&mut self.streams.ends);
        for (end, pipe) in [
            (ends.stdin, pipes.stdin),
            (ends.stdout, pipes.stdout),
            (ends.stderr, pipes.stderr),
        ] {
            if let (Some(end), Some(pipe)) = (end, pipe) {
                // A pump that has ended needs no end.
                let _ = end.send(pipe);
            }
        }
        Ok(())
    }

    /// Ends the streams of a process that could not be made.
    pub fn disconnect(&mut self) {
        self.streams.ends = Ends::default();
    }

    /// Sets the size of the terminal, now or when there is one. Without a terminal nothing happens, as with runc.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        self.size = Some((columns, rows));
        match &self.streams.terminal {
            Some(terminal) => crate::sys::set_window_size(&terminal.as_fd(), rows, columns)
                .map_err(|error| AgentError::io("resize the terminal", error)),
            None => Ok(()),
        }
    }
}

impl Streams {
    fn new(wanted: Wanted, held: &watch::Receiver<bool>) -> Self {
        let make = |wanted: bool, direction| {
            let (port, end) = wanted.then(|| Port::new(direction, held.clone())).unzip();
            (port.map(Arc::new), end)
        };
        let (stdin, stdin_end) = make(
            wanted.stdin,
            Direction::Input {
                terminal: wanted.terminal,
            },
        );
        let output = |wanted: bool| Direction::Output { discard: !wanted };
        let (stdout, stdout_end) = make(true, output(wanted.stdout));
        let (stderr, stderr_end) = make(!wanted.terminal, output(wanted.stderr));
        let ends = Ends {
            stdin: stdin_end,
            stdout: stdout_end,
            stderr: stderr_end,
        };
        Self {
            stdin,
            stdout,
            stderr,
            terminal: None,
            ends,
        }
    }

    /// The stream of that kind, if the process has it.
    pub fn port(&self, kind: StreamKind) -> Option<&Arc<Port>> {
        match kind {
            StreamKind::Stdin => self.stdin.as_ref(),
            StreamKind::Stdout => self.stdout.as_ref(),
            StreamKind::Stderr => self.stderr.as_ref(),
            StreamKind::Files => None,
        }
    }

    /// stdout and stderr.
    pub fn outputs(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.stdout.iter().chain(self.stderr.iter())
    }

    /// All of them.
    pub fn ports(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.stdin.iter().chain(self.outputs())
    }
}

/// Makes the pipes of a process without a terminal: the process's ends and ours.
///
/// # Errors
/// When there are no descriptors left.
pub fn pipes(wanted: Wanted) -> Result<(ChildStreams, Pipes)> {
    let mut child = ChildStreams::default();
    let mut ours = Pipes::default();
    if wanted.terminal {
        return Ok((child, ours));
    }
    let failed = |error: std::io::Error| AgentError::io("make a pipe", error);
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| failed(error.into()));
    if wanted.stdin {
        let (reader, writer) = pipe()?;
        child.stdin = Some(reader);
        ours.stdin = Some(Fd::new(writer).map_err(failed)?);
    }
    for (theirs, ours) in [
        (&mut child.stdout, &mut ours.stdout),
        (&mut child.stderr, &mut ours.stderr),
    ] {
        let (reader, writer) = pipe()?;
        *theirs = Some(writer);
        *ours = Some(Fd::new(reader).map_err(failed)?);
    }
    Ok((child, ours))
}
