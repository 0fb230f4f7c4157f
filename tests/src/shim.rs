//! A shim driven the way containerd drives it, but without containerd: its `start` and `delete`, the Task API over ttrpc, and
//! the events that it sends.

mod bundle;
mod events;
mod stdio;
mod task;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::{api, ttrpc};

pub use bundle::Bundle;
pub use events::{Event, Events};
pub use stdio::{Lines, Stdio};
use task::Caller;
pub use task::{Answer, Waiter, code};

use crate::command::{Finished, Invocation};
use crate::leftovers::processes;
use crate::node::Runtime;
use crate::{signals, wait_until};

/// containerd's namespace in all of it.
pub const NAMESPACE: &str = "contract";
/// How long a shim may take to end when it was told to.
const END: Duration = Duration::from_secs(30);

/// A shim that was started for one container. When this is dropped, everything of it is removed.
pub struct Shim {
    bundle: Bundle,
    caller: Caller,
    events: Events,
    socket: PathBuf,
    pid: u32,
}

impl Shim {
    /// Makes a bundle whose init is `sh -c SCRIPT` and starts a shim for it. The container is not created yet.
    pub fn start(runtime: Runtime, script: &str) -> Result<Self> {
        let bundle = Bundle::new(runtime, &["sh", "-c", script])?;
        Self::start_by(bundle, Bundle::start)
    }

    /// Starts a shim by a command of its bundle's.
    pub fn start_by(bundle: Bundle, start: impl FnOnce(&Bundle) -> Invocation) -> Result<Self> {
        let events = Events::serve(&bundle.events_socket())?;
        let started = start(&bundle).finish()?;
        let socket = address(&started)?;
        let client = ttrpc::Client::connect(&format!("unix://{}", socket.display()))
            .with_context(|| format!("connecting to {}", socket.display()))?;
        let mut shim = Self {
            bundle,
            caller: Caller {
                client,
                // The one that all versions of runc's shim have.
                service: "containerd.task.v2.Task".to_owned(),
            },
            events,
            socket,
            pid: 0,
        };
        shim.pid = shim.connect()?.shim_pid;
        Ok(shim)
    }

    /// Calls go to the service of this name from now on.
    pub fn speak(&mut self, service: &str) {
        service.clone_into(&mut self.caller.service);
    }

    /// Its bundle.
    #[must_use]
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// The events that it has sent.
    #[must_use]
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The socket that it serves.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether its process is there.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        is_alive(self.pid)
    }

    /// Waits for its end after Shutdown.
    pub fn expect_end(&self) -> Result<()> {
        ensure!(wait_until(END, || !self.is_alive()), "shim {} does not end", self.pid);
        Ok(())
    }

    /// `kill -9`.
    pub fn kill_process(&self) -> Result<()> {
        signals::signal(self.pid, nix::sys::signal::Signal::SIGKILL);
        self.expect_end()
    }

    /// containerd's clean-up: runs the program with `delete`; what it answers.
    pub fn delete_command(&self) -> Result<api::DeleteResponse> {
        let done = self.bundle.delete().succeed()?;
        api::DeleteResponse::parse_from_bytes(&done.stdout).context("reading what `delete` prints")
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        if self.is_alive() {
            if self.kill("", 9, true).is_ok() {
                let _ = self.wait("");
            }
            let _ = self.delete("");
            let _ = self.shut_down();
            wait_until(END, || !self.is_alive());
        }
        let _ = self.bundle.delete().finish();
        // A shim of runc's that was killed leaves it to whoever comes next under its name.
        if !self.bundle.runtime().is_vm() {
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

/// Whether a process runs; one that only waits to be collected does not.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    processes()
        .iter()
        .any(|process| process.pid == pid && process.state != 'Z')
}

/// The socket that `start` answered with. containerd reads both streams together, so nothing else may be on either.
pub fn address(started: &Finished) -> Result<PathBuf> {
    ensure!(
        started.code == 0 && started.stderr.is_empty(),
        "start ended with {}; stdout {:?}, stderr {:?}",
        started.code,
        started.out(),
        started.err()
    );
    let out = started.out();
    let address = match serde_json::from_str::<serde_json::Value>(out.trim()) {
        Ok(answer) => answer["address"].as_str().unwrap_or_default().to_owned(),
        Err(_) => out.trim().to_owned(),
    };
    match address.strip_prefix("unix://") {
        Some(path) if path.starts_with('/') => Ok(PathBuf::from(path)),
        _ => bail!("start answered {out:?}"),
    }
}
