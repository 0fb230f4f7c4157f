//! containerd's Task API: unpacks requests, calls the agent, packs answers. No logic.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{EnumOrUnknown, Message, MessageField};
use protocol::containerd::api;
use protocol::containerd::shim_async::Task;
use protocol::containerd::types::task::{ProcessInfo, Status as TaskStatus};
use ttrpc::asynchronous::TtrpcContext;

use crate::agent::Agent;
use crate::error::{AgentError, Result};
use crate::process::Wanted;
use crate::server::detached;
use crate::state::Status;

/// Largest exec spec accepted, in bytes.
const MAX_EXEC_SPEC: usize = 1 << 20;

/// The Task service.
pub struct TaskService(Arc<Agent>);

impl TaskService {
    /// Serves this agent.
    pub fn new(agent: Arc<Agent>) -> Self {
        Self(agent)
    }
}

type Empty = api::Empty;

#[async_trait]
impl Task for TaskService {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: api::CreateTaskRequest,
    ) -> ttrpc::Result<api::CreateTaskResponse> {
        let agent = self.0.clone();
        let pid = detached(async move {
            let wanted = wanted(request.terminal, &request.stdin, &request.stdout, &request.stderr);
            let container = agent.create(&request.id, request.bundle.into(), wanted).await?;
            Ok(container.init_pid())
        });
        Ok(api::CreateTaskResponse {
            pid: pid.await?,
            ..Default::default()
        })
    }

    async fn start(&self, _: &TtrpcContext, request: api::StartRequest) -> ttrpc::Result<api::StartResponse> {
        let agent = self.0.clone();
        let pid = detached(async move { agent.start(&request.id, &request.exec_id).await });
        Ok(api::StartResponse {
            pid: pid.await?,
            ..Default::default()
        })
    }

    async fn state(&self, _: &TtrpcContext, request: api::StateRequest) -> ttrpc::Result<api::StateResponse> {
        let container = self.0.container(&request.id)?;
        let state = container.state(&request.exec_id)?;
        let mut response = api::StateResponse {
            id: request.id,
            exec_id: request.exec_id,
            bundle: container.bundle().to_string_lossy().into_owned(),
            pid: state.pid,
            status: EnumOrUnknown::new(task_status(state.status)),
            terminal: state.terminal,
            ..Default::default()
        };
        if let Some(exit) = state.exit {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(timestamp(exit.at));
        }
        Ok(response)
    }

    async fn wait(&self, _: &TtrpcContext, request: api::WaitRequest) -> ttrpc::Result<api::WaitResponse> {
        let exit = self.0.container(&request.id)?.wait(&request.exec_id).await?;
        Ok(api::WaitResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..Default::default()
        })
    }

    async fn kill(&self, _: &TtrpcContext, request: api::KillRequest) -> ttrpc::Result<Empty> {
        self.0
            .container(&request.id)?
            .kill(&request.exec_id, request.signal, request.all)?;
        Ok(Empty::new())
    }

    async fn exec(&self, _: &TtrpcContext, request: api::ExecProcessRequest) -> ttrpc::Result<Empty> {
        crate::rootfs::check_id(&request.exec_id)?;
        let spec = exec_spec(&request.spec)?;
        let wanted = wanted(request.terminal, &request.stdin, &request.stdout, &request.stderr);
        self.0.container(&request.id)?.exec(&request.exec_id, wanted, spec)?;
        Ok(Empty::new())
    }

    async fn delete(&self, _: &TtrpcContext, request: api::DeleteRequest) -> ttrpc::Result<api::DeleteResponse> {
        let agent = self.0.clone();
        let (pid, exit) = detached(async move {
            let deleted = agent.container(&request.id)?.delete(&request.exec_id).await?;
            if request.exec_id.is_empty() {
                agent.forget(&request.id);
            }
            Ok(deleted)
        })
        .await?;
        let mut response = api::DeleteResponse {
            pid,
            ..Default::default()
        };
        if let Some(exit) = exit {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(timestamp(exit.at));
        }
        Ok(response)
    }

    async fn close_io(&self, _: &TtrpcContext, request: api::CloseIORequest) -> ttrpc::Result<Empty> {
        let container = self.0.container(&request.id)?;
        if request.stdin {
            container.close_input(&request.exec_id)?;
        }
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: api::ResizePtyRequest) -> ttrpc::Result<Empty> {
        self.0
            .container(&request.id)?
            .resize(&request.exec_id, request.width, request.height)?;
        Ok(Empty::new())
    }

    async fn pids(&self, _: &TtrpcContext, request: api::PidsRequest) -> ttrpc::Result<api::PidsResponse> {
        let pids = self.0.container(&request.id)?.pids()?;
        let processes = pids.into_iter().map(|(pid, _)| ProcessInfo {
            pid,
            ..Default::default()
        });
        Ok(api::PidsResponse {
            processes: processes.collect(),
            ..Default::default()
        })
    }

    async fn pause(&self, _: &TtrpcContext, request: api::PauseRequest) -> ttrpc::Result<Empty> {
        let agent = self.0.clone();
        detached(async move { agent.container(&request.id)?.pause().await }).await?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: api::ResumeRequest) -> ttrpc::Result<Empty> {
        let agent = self.0.clone();
        detached(async move { agent.container(&request.id)?.resume().await }).await?;
        Ok(Empty::new())
    }

    async fn stats(&self, _: &TtrpcContext, request: api::StatsRequest) -> ttrpc::Result<api::StatsResponse> {
        let container = self.0.container(&request.id)?;
        let metrics = crate::stats::metrics(container.group());
        let value = metrics
            .write_to_bytes()
            .map_err(|error| AgentError::Runtime(format!("pack the stats: {error}")))?;
        let any = Any {
            type_url: crate::stats::TYPE_URL.into(),
            value,
            ..Default::default()
        };
        Ok(api::StatsResponse {
            stats: MessageField::some(any),
            ..Default::default()
        })
    }

    async fn update(&self, _: &TtrpcContext, request: api::UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let container = self.0.container(&request.id)?;
        let resources = request
            .resources
            .as_ref()
            .map(|any| any.value.as_slice())
            .unwrap_or_default();
        let resources =
            serde_json::from_slice(resources).map_err(|error| AgentError::Invalid(format!("resources: {error}")))?;
        container.update(&resources)?;
        Ok(Empty::new())
    }

    async fn connect(&self, _: &TtrpcContext, request: api::ConnectRequest) -> ttrpc::Result<api::ConnectResponse> {
        let task_pid = self
            .0
            .container(&request.id)
            .map_or(0, |container| container.init_pid());
        Ok(api::ConnectResponse {
            shim_pid: std::process::id(),
            task_pid,
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: api::ShutdownRequest) -> ttrpc::Result<Empty> {
        detached(async { crate::init::shut_down().await }).await?;
        Ok(Empty::new())
    }

    async fn checkpoint(&self, _: &TtrpcContext, _: api::CheckpointTaskRequest) -> ttrpc::Result<Empty> {
        // The shim's part: a checkpoint is of the whole VM.
        Err(AgentError::Unimplemented("Checkpoint").into())
    }
}

/// A stream is wanted when it has a name; the names are the host's.
fn wanted(terminal: bool, stdin: &str, stdout: &str, stderr: &str) -> Wanted {
    Wanted {
        terminal,
        stdin: !stdin.is_empty(),
        stdout: !stdout.is_empty(),
        stderr: !stderr.is_empty(),
    }
}

/// The OCI process of an exec, as JSON that was seen to be one.
fn exec_spec(spec: &MessageField<Any>) -> Result<String> {
    let invalid = |error: &dyn std::fmt::Display| AgentError::Invalid(format!("exec spec: {error}"));
    let json = spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
    if json.len() > MAX_EXEC_SPEC {
        return Err(invalid(&"too large"));
    }
    let process: oci_spec::runtime::Process = serde_json::from_slice(json).map_err(|error| invalid(&error))?;
    if process.args().as_deref().unwrap_or_default().is_empty() {
        return Err(invalid(&"no args"));
    }
    String::from_utf8(json.to_vec()).map_err(|error| invalid(&error))
}

/// The word of containerd for it.
pub fn task_status(status: Status) -> TaskStatus {
    match status {
        Status::Created => TaskStatus::CREATED,
        Status::Running => TaskStatus::RUNNING,
        Status::Paused => TaskStatus::PAUSED,
        Status::Stopped => TaskStatus::STOPPED,
    }
}

fn timestamp(at: SystemTime) -> Timestamp {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or(0),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any(json: &str) -> MessageField<Any> {
        MessageField::some(Any {
            value: json.as_bytes().to_vec(),
            ..Default::default()
        })
    }

    #[test]
    fn only_a_process_with_args_is_an_exec_spec() {
        let good = r#"{"args":["sh"],"cwd":"/","user":{"uid":0,"gid":0}}"#;
        assert_eq!(exec_spec(&any(good)).expect("a process"), good);
        for bad in ["", "{}", "[1]", r#"{"args":[],"cwd":"/","user":{"uid":0,"gid":0}}"#] {
            assert!(matches!(exec_spec(&any(bad)), Err(AgentError::Invalid(_))), "{bad}");
        }
        assert!(exec_spec(&MessageField::none()).is_err());
    }

    proptest! {
        #[test]
        fn no_exec_spec_can_hurt(json in ".{0,200}") {
            let _ = exec_spec(&any(&json));
        }
    }

    #[test]
    fn a_stream_with_a_name_is_wanted() {
        let streams = wanted(false, "", "/run/fifo/out", "/run/fifo/err");
        assert_eq!(
            streams,
            Wanted {
                terminal: false,
                stdin: false,
                stdout: true,
                stderr: true
            }
        );
    }
}
