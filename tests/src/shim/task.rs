//! The calls of the Task API.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
    DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, Mount, PauseRequest, PidsRequest,
    PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest, StartResponse, StateRequest,
    StateResponse, StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::ttrpc::{self, Code};

use super::bundle::process;
use super::{NAMESPACE, Shim, Stdio};

/// What a shim answers.
pub type Answer<T> = ttrpc::Result<T>;

/// How long a call may take.
const LIMIT: Duration = Duration::from_secs(180);

/// The code of a refusal; an error without a code is `ABORTED`, which no shim uses.
pub fn code<T>(answer: &Answer<T>) -> Result<(), Code> {
    match answer {
        Ok(_) => Ok(()),
        Err(ttrpc::Error::RpcStatus(status)) => Err(status.code()),
        Err(_) => Err(Code::ABORTED),
    }
}

fn json(type_url: &str, value: &serde_json::Value) -> Any {
    Any {
        type_url: type_url.to_owned(),
        value: value.to_string().into_bytes(),
        ..Default::default()
    }
}

/// A connection to a shim.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) client: ttrpc::Client,
    pub(super) service: String,
}

impl Caller {
    fn call<A: Message>(&self, method: &str, request: &impl Message) -> Answer<A> {
        let other = |error: containerd_shim_protos::protobuf::Error| ttrpc::Error::Others(error.to_string());
        let mut context = ttrpc::context::with_duration(LIMIT);
        context.add("containerd-namespace-ttrpc".into(), NAMESPACE.into());
        let request = ttrpc::Request {
            service: self.service.clone(),
            method: method.to_owned(),
            timeout_nano: context.timeout_nano,
            metadata: ttrpc::context::to_pb(context.metadata),
            payload: request.write_to_bytes().map_err(other)?,
            ..Default::default()
        };
        A::parse_from_bytes(&self.client.request(request)?.payload).map_err(other)
    }
}

/// A call in a thread of its own.
pub struct Waiter(JoinHandle<Answer<WaitResponse>>);

impl Waiter {
    /// Its answer.
    pub fn answer(self) -> Result<WaitResponse> {
        let answer = self.0.join().map_err(|_| anyhow!("waiting panicked"))?;
        answer.context("waiting for a process")
    }
}

impl Shim {
    /// Any call.
    pub fn call<A: Message>(&self, method: &str, request: &impl Message) -> Answer<A> {
        self.caller.call(method, request)
    }

    fn id(&self) -> String {
        self.bundle.id().to_owned()
    }

    /// Creates the container; its root filesystem is bound.
    pub fn create(&self, stdio: &Stdio) -> Answer<CreateTaskResponse> {
        let root = Mount {
            type_: "bind".into(),
            source: Stdio::text(&self.bundle.root()),
            options: vec!["rbind".into(), "rw".into()],
            ..Default::default()
        };
        self.create_on(root, stdio)
    }

    /// Creates the container on any root filesystem.
    pub fn create_on(&self, root: Mount, stdio: &Stdio) -> Answer<CreateTaskResponse> {
        let request = CreateTaskRequest {
            id: self.id(),
            bundle: Stdio::text(&self.bundle.path()),
            rootfs: vec![root],
            stdin: Stdio::text(&stdio.stdin),
            stdout: Stdio::text(&stdio.stdout),
            stderr: Stdio::text(&stdio.stderr),
            terminal: stdio.terminal,
            ..Default::default()
        };
        self.call("Create", &request)
    }

    /// Starts init or an exec.
    pub fn start_process(&self, exec_id: &str) -> Answer<StartResponse> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "Start",
            &StartRequest {
                id,
                exec_id,
                ..Default::default()
            },
        )
    }

    /// The state of a process.
    pub fn state(&self, exec_id: &str) -> Answer<StateResponse> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "State",
            &StateRequest {
                id,
                exec_id,
                ..Default::default()
            },
        )
    }

    /// Waits for the end of a process.
    pub fn wait(&self, exec_id: &str) -> Answer<WaitResponse> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "Wait",
            &WaitRequest {
                id,
                exec_id,
                ..Default::default()
            },
        )
    }

    /// Begins to wait for the end of a process.
    #[must_use]
    pub fn waiter(&self, exec_id: &str) -> Waiter {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        let (caller, request) = (
            self.caller.clone(),
            WaitRequest {
                id,
                exec_id,
                ..Default::default()
            },
        );
        Waiter(thread::spawn(move || caller.call("Wait", &request)))
    }

    /// Sends a signal.
    pub fn kill(&self, exec_id: &str, signal: u32, all: bool) -> Answer<Empty> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "Kill",
            &KillRequest {
                id,
                exec_id,
                signal,
                all,
                ..Default::default()
            },
        )
    }

    /// Removes the record of a process.
    pub fn delete(&self, exec_id: &str) -> Answer<DeleteResponse> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "Delete",
            &DeleteRequest {
                id,
                exec_id,
                ..Default::default()
            },
        )
    }

    /// Registers a further process.
    pub fn exec(&self, exec_id: &str, command: &[&str], stdio: &Stdio) -> Answer<Empty> {
        let spec = process(command, stdio.terminal);
        let request = ExecProcessRequest {
            id: self.id(),
            exec_id: exec_id.to_owned(),
            terminal: stdio.terminal,
            stdin: Stdio::text(&stdio.stdin),
            stdout: Stdio::text(&stdio.stdout),
            stderr: Stdio::text(&stdio.stderr),
            spec: Some(json("types.containerd.io/opencontainers/runtime-spec/1/Process", &spec)).into(),
            ..Default::default()
        };
        self.call("Exec", &request)
    }

    /// Says that no more input will come, if `stdin`.
    pub fn close_io(&self, exec_id: &str, stdin: bool) -> Answer<Empty> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "CloseIO",
            &CloseIORequest {
                id,
                exec_id,
                stdin,
                ..Default::default()
            },
        )
    }

    /// Sets the size of a terminal.
    pub fn resize(&self, exec_id: &str, (width, height): (u32, u32)) -> Answer<Empty> {
        let (id, exec_id) = (self.id(), exec_id.to_owned());
        self.call(
            "ResizePty",
            &ResizePtyRequest {
                id,
                exec_id,
                width,
                height,
                ..Default::default()
            },
        )
    }

    /// Freezes the container.
    pub fn pause(&self) -> Answer<Empty> {
        let id = self.id();
        self.call(
            "Pause",
            &PauseRequest {
                id,
                ..Default::default()
            },
        )
    }

    /// Lets it go on.
    pub fn resume(&self) -> Answer<Empty> {
        let id = self.id();
        self.call(
            "Resume",
            &ResumeRequest {
                id,
                ..Default::default()
            },
        )
    }

    /// Processes of the container.
    pub fn pids(&self) -> Answer<PidsResponse> {
        let id = self.id();
        self.call(
            "Pids",
            &PidsRequest {
                id,
                ..Default::default()
            },
        )
    }

    /// Statistics.
    pub fn stats(&self) -> Answer<StatsResponse> {
        let id = self.id();
        self.call(
            "Stats",
            &StatsRequest {
                id,
                ..Default::default()
            },
        )
    }

    /// New limits, as the OCI specification writes them.
    pub fn update(&self, resources: &serde_json::Value) -> Answer<Empty> {
        let resources = json(
            "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources",
            resources,
        );
        let (id, resources) = (self.id(), Some(resources).into());
        self.call(
            "Update",
            &UpdateTaskRequest {
                id,
                resources,
                ..Default::default()
            },
        )
    }

    /// A checkpoint into a directory.
    pub fn checkpoint(&self) -> Answer<Empty> {
        let (id, path) = (self.id(), Stdio::text(&self.bundle.path().join("checkpoint")));
        self.call(
            "Checkpoint",
            &CheckpointTaskRequest {
                id,
                path,
                ..Default::default()
            },
        )
    }

    /// Process ids of shim and task.
    pub fn connect(&self) -> Answer<ConnectResponse> {
        let id = self.id();
        self.call(
            "Connect",
            &ConnectRequest {
                id,
                ..Default::default()
            },
        )
    }

    /// Asks the shim to end if it has no container.
    pub fn shut_down(&self) -> Answer<Empty> {
        let id = self.id();
        self.call(
            "Shutdown",
            &ShutdownRequest {
                id,
                ..Default::default()
            },
        )
    }
}
