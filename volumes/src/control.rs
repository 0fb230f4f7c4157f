//! What the process is asked to do, and the client that starts it.
//!
//! One control socket (`SOCK_SEQPACKET`), the process's standard input: first a [`Config`], then one [`Attach`] for each stream, with the
//! stream as descriptor; each is answered with an [`Answer`]. When the socket is closed, the process ends.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, setsockopt, shutdown, socketpair, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Largest packet, in bytes.
pub const MAX_PACKET: usize = 128 * 1024;
/// How long the process may take for an answer.
const LIMIT: Duration = Duration::from_secs(20);

/// A tree to share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Volume {
    /// File or directory of this host.
    pub source: PathBuf,
    /// What is mounted below it is shared, too.
    pub recursive: bool,
    /// Nothing in it can be changed, whatever the guest does.
    pub read_only: bool,
    /// What is mounted below it later appears, too.
    pub follows_host: bool,
}

/// All that a process serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// By number.
    pub volumes: Vec<Volume>,
}

/// Serve a tree on the descriptor that comes with this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// Place in [`Config::volumes`].
    pub volume: usize,
}

/// `None`: done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Why not.
    pub error: Option<String>,
}

/// Why host files are not served.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The process cannot be run.
    #[error("start the server of volumes")]
    Spawn(#[source] io::Error),
    /// It is gone, or does not answer.
    #[error("speak with the server of volumes")]
    Io(#[source] io::Error),
    /// It speaks nonsense, or was to be asked too much.
    #[error("speak with the server of volumes")]
    Json(#[from] serde_json::Error),
    /// It says no.
    #[error("{0}")]
    Refused(String),
}

impl VolumeError {
    /// The system calls this "resource temporarily unavailable".
    fn or_late(self) -> Self {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let text = format!("no answer within {} s", LIMIT.as_secs());
                Self::Io(io::Error::new(io::ErrorKind::TimedOut, text))
            }
            other => other,
        }
    }
}

/// A running process. It ends when this is dropped.
#[derive(Debug)]
pub struct Client {
    /// Locked from a question to its answer.
    control: Mutex<OwnedFd>,
    child: Option<Child>,
}

impl Client {
    /// Runs `program` with `arguments`, which calls [`crate::server::run`], and has it serve `config`. Blocks.
    ///
    /// # Errors
    /// The process cannot be run, or a source cannot be shared.
    pub fn start(program: &Path, arguments: &[&str], config: &Config) -> Result<Self, VolumeError> {
        let spawn = |error: nix::Error| VolumeError::Spawn(error.into());
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(spawn)?;
        let limit = TimeVal::seconds(LIMIT.as_secs().cast_signed());
        setsockopt(&ours, sockopt::ReceiveTimeout, &limit).map_err(spawn)?;
        setsockopt(&ours, sockopt::SendTimeout, &limit).map_err(spawn)?;
        let child = Command::new(program)
            .args(arguments)
            .env_clear()
            .current_dir("/")
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(VolumeError::Spawn)?;
        let client = Self {
            control: Mutex::new(ours),
            child: Some(child),
        };
        client.ask(config, &[])?;
        Ok(client)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Whether it still runs, as far as can be seen.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        let mut end = [PollFd::new(control.as_fd(), PollFlags::empty())];
        // What is always reported is that the other end is closed.
        matches!(poll(&mut end, PollTimeout::ZERO), Ok(0))
    }

    /// Serves a tree over a connected stream. Blocks.
    ///
    /// # Errors
    /// There is no such tree, or the process is gone.
    pub fn attach(&self, volume: usize, stream: OwnedFd) -> Result<(), VolumeError> {
        self.ask(&Attach { volume }, &[stream])
    }

    fn ask(&self, question: &impl Serialize, fds: &[OwnedFd]) -> Result<(), VolumeError> {
        let bytes = serde_json::to_vec(question)?;
        if bytes.len() > MAX_PACKET {
            return Err(VolumeError::Refused("too many volumes".into()));
        }
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = crate::sys::send(&control, &bytes, fds)
            .map_err(VolumeError::Io)
            .and_then(|()| receive(&control))
            .and_then(|answer| answer.ok_or_else(|| VolumeError::Io(io::ErrorKind::UnexpectedEof.into())));
        let (answer, _): (Answer, _) = answered.map_err(|error| {
            // An answer that comes too late must not be taken for that to the next question.
            let _ = shutdown(control.as_raw_fd(), Shutdown::Both);
            error.or_late()
        })?;
        answer.error.map_or(Ok(()), |error| Err(VolumeError::Refused(error)))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let _ = child.kill();
        // It may hang in a call on a filesystem of the host that does not answer.
        std::thread::spawn(move || child.wait());
    }
}

/// The next packet; `None`: the other end is closed.
pub(crate) fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> Result<Option<(T, Vec<OwnedFd>)>, VolumeError> {
    let mut buffer = vec![0; MAX_PACKET];
    let (count, fds) = crate::sys::receive(socket, &mut buffer).map_err(VolumeError::Io)?;
    if count == 0 {
        return Ok(None);
    }
    let value = serde_json::from_slice(buffer.get(..count).unwrap_or_default())?;
    Ok(Some((value, fds)))
}
