//! The seam to the VMM: few methods, so that tests need neither KVM nor a process.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use async_trait::async_trait;
use tokio::net::UnixStream;
use vmm::control::{Reply, Request};

/// Why the machine did not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum VmError {
    /// The VMM program could not be started.
    #[error("start {program}: {reason}")]
    Spawn {
        /// The program.
        program: String,
        /// Why not.
        reason: String,
    },
    /// The VMM is gone.
    #[error("the VMM is gone: {0}")]
    Gone(String),
    /// The VMM said no.
    #[error("{0}")]
    Refused(String),
    /// The VMM broke the rules of the control socket.
    #[error("control socket of the VMM: {0}")]
    Protocol(String),
    /// The guest did not come up.
    #[error("the guest did not answer within {seconds} s; the end of its console: {console}")]
    BootTimeout {
        /// How long it was given.
        seconds: u64,
        /// The last lines of the console.
        console: String,
    },
}

/// One virtual machine.
#[async_trait]
pub trait Vm: Send + Sync {
    /// Host pid of the VMM; what containerd sees as the task's pid.
    fn pid(&self) -> u32;

    /// Path of the network namespace that it lives in; `None` when it has none of its own.
    fn network_namespace(&self) -> Option<PathBuf>;

    /// Sends a request and waits for its answer. `Refused` becomes an error.
    async fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Result<Reply, VmError>;

    /// Opens a vsock connection to a guest port.
    async fn connect(&self, port: u32) -> Result<UnixStream, VmError>;

    /// Waits until the agent has said that it is up, or the machine has ended.
    async fn ready(&self) -> Result<(), VmError>;

    /// Waits for the end of the machine and says why.
    async fn ended(&self) -> String;

    /// Ends it now. Returns when the process is gone.
    async fn kill(&self);
}
