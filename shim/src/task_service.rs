//! containerd's Task API: unpacks a call, asks the sandbox, packs the answer.
//!
//! Each call runs as a task of its own, so a client that gives up leaves nothing half done.

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use protocol::containerd::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
    DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest, PidsRequest, PidsResponse,
    ProcessInfo, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest, StartResponse, StateRequest,
    StateResponse, StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use protocol::containerd::protobuf::well_known_types::any::Any;
use protocol::containerd::protobuf::well_known_types::timestamp::Timestamp;
use protocol::containerd::protobuf::{Message, MessageField};
use protocol::containerd::shim::oci::{CheckpointOptions, ProcessDetails};
use protocol::containerd::shim_async::{Task, create_task};
use protocol::containerd::ttrpc;
use tracing::{debug, info};
use ttrpc::r#async::{Service, TtrpcContext};

use crate::error::{Error, Result};
use crate::events::timestamp;
use crate::lifecycle::{Exit, ProcessId};
use crate::sandbox::Sandbox;
use crate::stdio::StdioPaths;

/// The handler.
#[derive(Clone)]
pub struct TaskService {
    sandbox: Arc<Sandbox>,
}

/// The handler under both of its names: the messages of v2 and v3 are the same bytes.
#[must_use]
pub fn services(sandbox: &Arc<Sandbox>) -> HashMap<String, Service> {
    let handler = Arc::new(TaskService {
        sandbox: sandbox.clone(),
    });
    let mut services = create_task(handler.clone());
    let again = create_task(handler).into_values().next();
    if let Some(service) = again {
        services.insert("containerd.task.v2.Task".to_owned(), service);
    }
    services
}

fn process_id(exec_id: &str) -> ProcessId {
    (!exec_id.is_empty()).then(|| exec_id.to_owned())
}

async fn apart<T: Send + 'static>(
    name: &'static str,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> ttrpc::Result<T> {
    let done = tokio::spawn(work)
        .await
        .unwrap_or_else(|e| Err(Error::Internal(e.to_string())));
    debug!(call = name, "done");
    done.map_err(|error| {
        info!(call = name, error = error.text(), "refused");
        error.into()
    })
}

fn checkpoint_options(options: MessageField<Any>) -> Result<CheckpointOptions> {
    let Some(any) = options.into_option().filter(|any| !any.type_url.is_empty()) else {
        return Ok(CheckpointOptions::new());
    };
    if !any.type_url.ends_with("containerd.runc.v1.CheckpointOptions") {
        return Err(Error::InvalidArgument(format!(
            "checkpoint options of type {:?}",
            any.type_url
        )));
    }
    CheckpointOptions::parse_from_bytes(&any.value)
        .map_err(|e| Error::InvalidArgument(format!("checkpoint options: {e}")))
}

fn exited(exit: Exit) -> MessageField<Timestamp> {
    Some(timestamp(exit.at)).into()
}

#[async_trait]
impl Task for TaskService {
    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        let state = self
            .sandbox
            .state(&request.id, &process_id(&request.exec_id))
            .map_err(ttrpc::Error::from)?;
        let mut response = StateResponse::new();
        response.id = request.id;
        response.exec_id = request.exec_id;
        response.bundle = state.bundle.display().to_string();
        response.pid = state.pid;
        response.status = state.status.into();
        response.stdin = state.stdio.stdin;
        response.stdout = state.stdio.stdout;
        response.stderr = state.stdio.stderr;
        response.terminal = state.stdio.terminal;
        if let Some(exit) = state.exit {
            response.exit_status = exit.status;
            response.exited_at = exited(exit);
        }
        Ok(response)
    }

    async fn create(&self, _: &TtrpcContext, request: CreateTaskRequest) -> ttrpc::Result<CreateTaskResponse> {
        info!(id = request.id, bundle = request.bundle, "create");
        let sandbox = self.sandbox.clone();
        let pid = apart("create", async move { sandbox.create(request).await }).await?;
        Ok(CreateTaskResponse {
            pid,
            ..Default::default()
        })
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        info!(id = request.id, exec_id = request.exec_id, "start");
        let sandbox = self.sandbox.clone();
        let pid = apart("start", async move {
            sandbox.start(&request.id, process_id(&request.exec_id)).await
        })
        .await?;
        Ok(StartResponse {
            pid,
            ..Default::default()
        })
    }

    async fn delete(&self, _: &TtrpcContext, request: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        info!(id = request.id, exec_id = request.exec_id, "delete");
        let sandbox = self.sandbox.clone();
        let deleted = apart("delete", async move {
            sandbox.delete(&request.id, process_id(&request.exec_id)).await
        })
        .await;
        let (pid, exit) = deleted?;
        Ok(DeleteResponse {
            pid,
            exit_status: exit.status,
            exited_at: exited(exit),
            ..Default::default()
        })
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let mut response = PidsResponse::new();
        for (pid, process) in self.sandbox.pids(&request.id).map_err(ttrpc::Error::from)? {
            let mut info = ProcessInfo::new();
            info.pid = pid;
            if let Some(exec_id) = process {
                let details = ProcessDetails {
                    exec_id,
                    ..Default::default()
                };
                let mut any = Any::new();
                any.type_url = "containerd.runc.v1.ProcessDetails".to_owned();
                any.value = details.write_to_bytes().unwrap_or_default();
                info.info = Some(any).into();
            }
            response.processes.push(info);
        }
        Ok(response)
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        apart("pause", async move { sandbox.set_paused(&request.id, true).await }).await?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        apart("resume", async move { sandbox.set_paused(&request.id, false).await }).await?;
        Ok(Empty::new())
    }

    async fn checkpoint(&self, _: &TtrpcContext, request: CheckpointTaskRequest) -> ttrpc::Result<Empty> {
        info!(id = request.id, path = request.path, "checkpoint");
        let sandbox = self.sandbox.clone();
        apart("checkpoint", async move {
            let options = checkpoint_options(request.options)?;
            let image_path = (!options.image_path.is_empty()).then(|| PathBuf::from(&options.image_path));
            sandbox
                .checkpoint(
                    &request.id,
                    PathBuf::from(&request.path).as_path(),
                    image_path.as_deref(),
                    options.exit,
                )
                .await
        })
        .await?;
        Ok(Empty::new())
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        info!(
            id = request.id,
            exec_id = request.exec_id,
            signal = request.signal,
            "kill"
        );
        let sandbox = self.sandbox.clone();
        apart("kill", async move {
            sandbox
                .kill(&request.id, &process_id(&request.exec_id), request.signal, request.all)
                .await
        })
        .await?;
        Ok(Empty::new())
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        info!(id = request.id, exec_id = request.exec_id, "exec");
        let sandbox = self.sandbox.clone();
        apart("exec", async move {
            let stdio = StdioPaths {
                stdin: request.stdin,
                stdout: request.stdout,
                stderr: request.stderr,
                terminal: request.terminal,
            };
            sandbox
                .exec(&request.id, &request.exec_id, request.spec.into_option(), stdio)
                .await
        })
        .await?;
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        apart("resize", async move {
            sandbox
                .resize(
                    &request.id,
                    &process_id(&request.exec_id),
                    request.width,
                    request.height,
                )
                .await
        })
        .await?;
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        info!(
            id = request.id,
            exec_id = request.exec_id,
            stdin = request.stdin,
            "close io"
        );
        if request.stdin {
            let process = process_id(&request.exec_id);
            self.sandbox
                .close_stdin(&request.id, &process)
                .await
                .map_err(ttrpc::Error::from)?;
        }
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let sandbox = self.sandbox.clone();
        apart("update", async move {
            sandbox.update(&request.id, request.resources.into_option()).await
        })
        .await?;
        Ok(Empty::new())
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let exit = self
            .sandbox
            .wait(&request.id, &process_id(&request.exec_id))
            .await
            .map_err(ttrpc::Error::from)?;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: exited(exit),
            ..Default::default()
        })
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let sandbox = self.sandbox.clone();
        let stats = apart("stats", async move { sandbox.stats(&request.id).await }).await?;
        Ok(StatsResponse {
            stats: stats.into(),
            ..Default::default()
        })
    }

    async fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> ttrpc::Result<ConnectResponse> {
        // Asked about an unknown container, too, and never refused.
        let task_pid = if self.sandbox.state(&request.id, &None).is_ok() {
            self.sandbox.pid()
        } else {
            0
        };
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid,
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> ttrpc::Result<Empty> {
        debug!(id = request.id, now = request.now, "shutdown");
        self.sandbox.shut_down(request.now);
        Ok(Empty::new())
    }
}
