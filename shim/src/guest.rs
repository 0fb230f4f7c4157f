//! The agent, as a client: containerd's Task API and the Guest service over one vsock connection.

use std::future::Future;
use std::time::Duration;

use protocol::containerd::api::{
    CloseIORequest, CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest, PauseRequest, PidsRequest,
    ResizePtyRequest, ResumeRequest, StartRequest, StateRequest, StateResponse, StatsRequest, Status,
    UpdateTaskRequest, WaitRequest, WaitResponse,
};
use protocol::containerd::protobuf::Enum;
use protocol::containerd::protobuf::well_known_types::any::Any;
use protocol::containerd::shim_async::{Client, TaskClient};
use protocol::containerd::ttrpc;
use protocol::guest::{
    DetachVolumesRequest, InfoRequest, InfoResponse, NetworkConfig, PrepareContainerRequest, QuiesceRequest,
    ReleaseContainerRequest, RenewRequest, ThawRequest, WaitOomRequest,
};
use protocol::guest_ttrpc::GuestClient;
use tokio::net::UnixStream;
use tracing::debug;
use ttrpc::Code;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::{Context, with_duration};

/// How long the agent may take for a call that does work.
const WORK: Duration = Duration::from_secs(60);
/// How long it may take for a call that only looks.
const LOOK: Duration = Duration::from_secs(10);

/// How long the end of the machine may come after that of a connection to it.
pub const END_FOLLOWS: Duration = Duration::from_secs(3);

/// Why the agent did not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GuestError {
    /// The agent said no.
    #[error("{message}")]
    Refused {
        /// Its code.
        code: Code,
        /// Its words.
        message: String,
    },
    /// The connection is gone or broken.
    #[error("connection to the agent: {0}")]
    Lost(String),
    /// The machine has ended, and how.
    #[error("the virtual machine has ended: {0}")]
    Ended(String),
    /// The agent speaks another generation of the protocol.
    #[error("the agent of the guest image speaks generation {theirs} of the protocol, this shim {ours}")]
    Generation {
        /// The agent's.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
}

impl From<ttrpc::Error> for GuestError {
    fn from(error: ttrpc::Error) -> Self {
        match error {
            ttrpc::Error::RpcStatus(status) => Self::Refused {
                code: status.code(),
                message: status.message().to_owned(),
            },
            other => Self::Lost(other.to_string()),
        }
    }
}

impl GuestError {
    /// Whether the agent said that there is no such thing.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                code: Code::NOT_FOUND,
                ..
            }
        )
    }
}

type Result<T> = std::result::Result<T, GuestError>;

/// A process in the guest, by the guest's own names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestProcess {
    /// The guest's id of the container.
    pub container: String,
    /// Empty: init.
    pub exec: String,
}

/// A connected agent.
#[derive(Clone)]
pub struct Guest {
    task: TaskClient,
    guest: GuestClient,
}

impl Guest {
    /// Speaks over a connected stream.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        let client = Client::new(Socket::new(stream));
        Self {
            task: TaskClient::new(client.clone()),
            guest: GuestClient::new(client),
        }
    }

    /// Who is there.
    ///
    /// # Errors
    /// No connection, or another generation.
    pub async fn info(&self) -> Result<InfoResponse> {
        let info = self.guest.info(with_duration(LOOK), &InfoRequest::new()).await?;
        if info.generation == 0 || info.generation > protocol::GENERATION {
            return Err(GuestError::Generation {
                theirs: info.generation,
                ours: protocol::GENERATION,
            });
        }
        for step in &info.boot {
            debug!(us = step.elapsed_us, "guest step {:?}", step.name);
        }
        Ok(info)
    }

    /// Mounts the root filesystem and writes the bundle; returns its path in the guest.
    ///
    /// # Errors
    /// See [`GuestError`]; so for all that follow.
    pub async fn prepare_container(&self, request: &PrepareContainerRequest) -> Result<String> {
        Ok(self.guest.prepare_container(with_duration(WORK), request).await?.bundle)
    }

    /// Unmounts what was mounted.
    pub async fn release_container(&self, container: &str, limit: Duration) -> Result<()> {
        let mut request = ReleaseContainerRequest::new();
        request.container_id = container.to_owned();
        self.guest.release_container(with_duration(limit), &request).await?;
        Ok(())
    }

    /// Takes the volumes of a container away; the guest must be quiesced.
    pub async fn detach_volumes(&self, container: &str) -> Result<()> {
        let mut request = DetachVolumesRequest::new();
        request.container_id = container.to_owned();
        self.guest.detach_volumes(with_duration(WORK), &request).await?;
        Ok(())
    }

    /// Freezes everything.
    pub async fn quiesce(&self) -> Result<()> {
        self.guest.quiesce(with_duration(WORK), &QuiesceRequest::new()).await?;
        Ok(())
    }

    /// Lets everything run but `kill`, whose processes are killed.
    pub async fn thaw(&self, kill: &[String]) -> Result<()> {
        let mut request = ThawRequest::new();
        request.kill_containers = kill.to_vec();
        self.guest.thaw(with_duration(WORK), &request).await?;
        Ok(())
    }

    /// Gives a restored guest its identity. Answers the status of the container's init.
    pub async fn renew(&self, request: &RenewRequest) -> Result<Status> {
        let response = self.guest.renew(with_duration(WORK), request).await?;
        for step in &response.steps {
            debug!(us = step.elapsed_us, "renew: {:?}", step.name);
        }
        let told = i32::try_from(response.container_status).ok().and_then(Status::from_i32);
        if let Some(status) = told.filter(|status| *status != Status::UNKNOWN) {
            return Ok(status);
        }
        // An older agent does not tell.
        let init = GuestProcess {
            container: request.container_id.clone(),
            exec: String::new(),
        };
        let state = self.state(&init).await?;
        Ok(state.status.enum_value_or_default())
    }

    /// Sets up the guest's network interface.
    pub async fn configure_network(&self, config: &NetworkConfig) -> Result<()> {
        self.guest.configure_network(with_duration(LOOK), config).await?;
        Ok(())
    }

    /// Waits until the container was hit by the OOM killer more often than `seen`.
    pub async fn wait_oom(&self, container: &str, seen: u64) -> Result<u64> {
        let mut request = WaitOomRequest::new();
        request.container_id = container.to_owned();
        request.seen = seen;
        Ok(self.guest.wait_oom(Context::default(), &request).await?.count)
    }

    /// Creates the container's init from a prepared bundle.
    pub async fn create(&self, request: &CreateTaskRequest) -> Result<()> {
        self.task.create(with_duration(WORK), request).await?;
        Ok(())
    }

    /// Starts a process.
    pub async fn start(&self, process: &GuestProcess) -> Result<()> {
        let mut request = StartRequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        self.task.start(with_duration(WORK), &request).await?;
        Ok(())
    }

    /// Registers an exec.
    pub async fn exec(&self, request: &ExecProcessRequest) -> Result<()> {
        self.task.exec(with_duration(WORK), request).await?;
        Ok(())
    }

    /// Waits for the end of a process.
    pub async fn wait(&self, process: &GuestProcess) -> Result<WaitResponse> {
        let mut request = WaitRequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        Ok(self.task.wait(Context::default(), &request).await?)
    }

    /// The agent's view of a process.
    pub async fn state(&self, process: &GuestProcess) -> Result<StateResponse> {
        let mut request = StateRequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        Ok(self.task.state(with_duration(LOOK), &request).await?)
    }

    /// Removes the record of a process.
    pub async fn delete(&self, process: &GuestProcess) -> Result<()> {
        let mut request = DeleteRequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        self.task.delete(with_duration(LOOK), &request).await?;
        Ok(())
    }

    /// Sends a signal.
    pub async fn kill(&self, process: &GuestProcess, signal: u32, all: bool) -> Result<()> {
        let mut request = KillRequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        request.signal = signal;
        request.all = all;
        self.task.kill(with_duration(LOOK), &request).await?;
        Ok(())
    }

    /// Freezes or thaws one container.
    pub async fn set_paused(&self, container: &str, paused: bool) -> Result<()> {
        if paused {
            let mut request = PauseRequest::new();
            request.id = container.to_owned();
            self.task.pause(with_duration(LOOK), &request).await?;
        } else {
            let mut request = ResumeRequest::new();
            request.id = container.to_owned();
            self.task.resume(with_duration(LOOK), &request).await?;
        }
        Ok(())
    }

    /// Sets the size of a terminal.
    pub async fn resize(&self, process: &GuestProcess, width: u32, height: u32) -> Result<()> {
        let mut request = ResizePtyRequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        request.width = width;
        request.height = height;
        self.task.resize_pty(with_duration(LOOK), &request).await?;
        Ok(())
    }

    /// Closes the stdin of a process that has no stream attached.
    pub async fn close_stdin(&self, process: &GuestProcess) -> Result<()> {
        let mut request = CloseIORequest::new();
        request.id = process.container.clone();
        request.exec_id = process.exec.clone();
        request.stdin = true;
        self.task.close_io(with_duration(LOOK), &request).await?;
        Ok(())
    }

    /// How many processes the container has.
    pub async fn process_count(&self, container: &str) -> Result<usize> {
        let mut request = PidsRequest::new();
        request.id = container.to_owned();
        Ok(self.task.pids(with_duration(LOOK), &request).await?.processes.len())
    }

    /// cgroup metrics.
    pub async fn stats(&self, container: &str) -> Result<Option<Any>> {
        let mut request = StatsRequest::new();
        request.id = container.to_owned();
        Ok(self
            .task
            .stats(with_duration(LOOK), &request)
            .await?
            .stats
            .into_option())
    }

    /// New resource limits.
    pub async fn update(&self, container: &str, resources: Option<Any>) -> Result<()> {
        let mut request = UpdateTaskRequest::new();
        request.id = container.to_owned();
        request.resources = resources.into();
        self.task.update(with_duration(LOOK), &request).await?;
        Ok(())
    }
}

/// Waits for `work`, but no longer than the machine lives.
///
/// # Errors
/// Those of `work`, or [`GuestError::Ended`]. A connection that breaks is most often the first sign of the machine's end, which is
/// then waited for.
pub async fn while_alive<T>(vm: &dyn crate::vm::Vm, work: impl Future<Output = Result<T>>) -> Result<T> {
    let done = tokio::select! {
        biased;
        done = work => done,
        reason = vm.ended() => Err(GuestError::Ended(reason)),
    };
    match done {
        Err(GuestError::Lost(what)) => match tokio::time::timeout(END_FOLLOWS, vm.ended()).await {
            Ok(reason) => Err(GuestError::Ended(reason)),
            Err(_) => Err(GuestError::Lost(what)),
        },
        done => done,
    }
}
