//! containerd's gRPC services, in one namespace and, while something is built, under one lease.

use std::io;

use anyhow::{Context, bail};
use containerd_client::services::v1::containers_client::ContainersClient;
use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::introspection_client::IntrospectionClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::version_client::VersionClient;
use thiserror::Error;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::Connection;

/// Largest message that is received; a page of a long listing may be larger than tonic's default.
const MAX_MESSAGE: usize = 64 << 20;

/// An answer of containerd that is not success.
#[derive(Debug, Error)]
#[error("cannot {what}: {message}")]
pub(crate) struct RpcError {
    what: String,
    /// gRPC's code for it.
    pub(crate) code: Code,
    message: String,
}

/// The connection.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    channel: Channel,
    namespace: MetadataValue<Ascii>,
    lease: Option<MetadataValue<Ascii>>,
}

impl Client {
    /// Connects.
    pub(crate) async fn connect(connection: &Connection) -> anyhow::Result<Self> {
        let address = connection.address.display();
        // tonic's own error for a missing socket names neither the path nor the reason.
        if let Err(error) = tokio::net::UnixStream::connect(&connection.address).await {
            let remedy = match error.kind() {
                io::ErrorKind::PermissionDenied => "run ramet as root",
                _ => "is containerd running? Its socket can be given with --address",
            };
            return Err(error).with_context(|| format!("cannot connect to containerd at {address} ({remedy})"));
        }
        let channel = containerd_client::connect(&connection.address).await;
        let channel = channel.with_context(|| format!("cannot connect to containerd at {address}"))?;
        let Ok(namespace) = connection.namespace.parse() else {
            bail!("{:?} cannot be the name of a namespace", connection.namespace);
        };
        Ok(Self {
            channel,
            namespace,
            lease: None,
        })
    }

    /// The same connection with every resource that is made held by a lease.
    pub(crate) fn with_lease(&self, id: &str) -> anyhow::Result<Self> {
        Ok(Self {
            lease: Some(id.parse().context("the lease id is not ASCII")?),
            ..self.clone()
        })
    }

    /// Wraps a message so that containerd knows namespace and lease.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request
            .metadata_mut()
            .insert("containerd-namespace", self.namespace.clone());
        if let Some(lease) = &self.lease {
            request.metadata_mut().insert("containerd-lease", lease.clone());
        }
        request
    }

    pub(crate) fn containers(&self) -> ContainersClient<Channel> {
        ContainersClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    pub(crate) fn content(&self) -> ContentClient<Channel> {
        ContentClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    pub(crate) fn images(&self) -> ImagesClient<Channel> {
        ImagesClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    pub(crate) fn introspection(&self) -> IntrospectionClient<Channel> {
        IntrospectionClient::new(self.channel.clone())
    }

    pub(crate) fn leases(&self) -> LeasesClient<Channel> {
        LeasesClient::new(self.channel.clone())
    }

    pub(crate) fn snapshots(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.channel.clone())
    }

    pub(crate) fn tasks(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel.clone())
    }

    pub(crate) fn version(&self) -> VersionClient<Channel> {
        VersionClient::new(self.channel.clone())
    }
}

/// Turns an answer into its message, or into an error that says what was tried.
pub(crate) trait Answer<T> {
    fn to(self, what: impl FnOnce() -> String) -> Result<T, RpcError>;
}

impl<T> Answer<T> for Result<Response<T>, Status> {
    fn to(self, what: impl FnOnce() -> String) -> Result<T, RpcError> {
        self.map(Response::into_inner).map_err(|status| {
            let message = match status.message() {
                "" => status.code().description().to_owned(),
                message => message.to_owned(),
            };
            RpcError {
                what: what(),
                code: status.code(),
                message,
            }
        })
    }
}

/// `None` instead of the error that says that something does not exist.
pub(crate) fn if_found<T>(result: Result<T, RpcError>) -> Result<Option<T>, RpcError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.code == Code::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
