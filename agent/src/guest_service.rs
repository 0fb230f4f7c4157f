//! The Guest service: unpacks requests, calls the agent, packs answers. No logic.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use protocol::containerd::protobuf::Enum;
use protocol::guest;
use protocol::guest_ttrpc::Guest;
use ttrpc::asynchronous::TtrpcContext;

use crate::agent::Agent;
use crate::error::AgentError;
use crate::renew::Steps;
use crate::server::detached;
use crate::state::ConnectionId;
use crate::task_service::task_status;

/// The Guest service as seen by one connection.
pub struct GuestService {
    agent: Arc<Agent>,
    connection: ConnectionId,
}

impl GuestService {
    /// Serves this agent on the connection of that number.
    pub fn new(agent: Arc<Agent>, connection: ConnectionId) -> Self {
        Self { agent, connection }
    }
}

/// Steps as messages.
fn told(steps: &Steps) -> Vec<guest::Step> {
    let message = |(name, elapsed): (&str, Duration)| guest::Step {
        name: name.to_owned(),
        elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
        ..Default::default()
    };
    steps.iter().map(message).collect()
}

#[async_trait]
impl Guest for GuestService {
    async fn info(&self, _: &TtrpcContext, _: guest::InfoRequest) -> ttrpc::Result<guest::InfoResponse> {
        let name = nix::sys::utsname::uname().map_err(|error| AgentError::io("ask the kernel's release", error))?;
        Ok(guest::InfoResponse {
            generation: protocol::GENERATION,
            kernel_release: name.release().to_string_lossy().into_owned(),
            renew_required: self.agent.hold().is_held(),
            boot: crate::init::CAME_UP.get().map(told).unwrap_or_default(),
            ..Default::default()
        })
    }

    async fn prepare_container(
        &self,
        _: &TtrpcContext,
        request: guest::PrepareContainerRequest,
    ) -> ttrpc::Result<guest::PrepareContainerResponse> {
        let agent = self.agent.clone();
        let bundle = detached(async move { agent.prepare(request).await }).await?;
        Ok(guest::PrepareContainerResponse {
            bundle: bundle.to_string_lossy().into_owned(),
            ..Default::default()
        })
    }

    async fn release_container(
        &self,
        _: &TtrpcContext,
        request: guest::ReleaseContainerRequest,
    ) -> ttrpc::Result<guest::Empty> {
        let agent = self.agent.clone();
        detached(async move {
            agent.volumes.release(&request.container_id).await;
            agent.release(&request.container_id)
        })
        .await?;
        Ok(guest::Empty::new())
    }

    async fn quiesce(&self, _: &TtrpcContext, _: guest::QuiesceRequest) -> ttrpc::Result<guest::QuiesceResponse> {
        let (agent, connection) = (self.agent.clone(), self.connection);
        detached(async move { agent.quiesce(connection).await }).await?;
        let mut response = guest::QuiesceResponse::new();
        for container in self.agent.containers() {
            response.containers.push(guest::QuiescedContainer {
                id: container.id().to_owned(),
                // The guest is held now: nothing that is only told may make it an error.
                pids: container
                    .pids()
                    .unwrap_or_default()
                    .into_iter()
                    .map(|(pid, _)| pid)
                    .collect(),
                ..Default::default()
            });
        }
        Ok(response)
    }

    async fn thaw(&self, _: &TtrpcContext, request: guest::ThawRequest) -> ttrpc::Result<guest::Empty> {
        let (agent, connection) = (self.agent.clone(), self.connection);
        detached(async move { agent.thaw(connection, &request.kill_containers).await }).await?;
        Ok(guest::Empty::new())
    }

    async fn renew(&self, _: &TtrpcContext, request: guest::RenewRequest) -> ttrpc::Result<guest::RenewResponse> {
        let agent = self.agent.clone();
        let (closed_connections, steps, status) = detached(async move {
            let mut steps = Steps::default();
            let closed = agent.renew(&request, &mut steps).await?;
            let status = agent.container(&request.container_id)?.state("")?.status;
            Ok((closed, steps, task_status(status)))
        })
        .await?;
        Ok(guest::RenewResponse {
            closed_connections,
            steps: told(&steps),
            container_status: u32::try_from(status.value()).unwrap_or_default(),
            ..Default::default()
        })
    }

    async fn configure_network(&self, _: &TtrpcContext, request: guest::NetworkConfig) -> ttrpc::Result<guest::Empty> {
        self.agent.configure_network(&request)?;
        Ok(guest::Empty::new())
    }

    async fn detach_volumes(
        &self,
        _: &TtrpcContext,
        request: guest::DetachVolumesRequest,
    ) -> ttrpc::Result<guest::Empty> {
        let agent = self.agent.clone();
        detached(async move { agent.detach_volumes(&request.container_id).await }).await?;
        Ok(guest::Empty::new())
    }

    async fn wait_oom(
        &self,
        _: &TtrpcContext,
        request: guest::WaitOomRequest,
    ) -> ttrpc::Result<guest::WaitOomResponse> {
        let container = self.agent.container(&request.container_id)?;
        let count = container.group().wait_oom(request.seen).await?;
        Ok(guest::WaitOomResponse {
            count,
            ..Default::default()
        })
    }
}
