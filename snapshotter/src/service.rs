//! The gRPC face of [`Store`].

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use crate::background::{Background, chain_text};
use crate::filter::Filters;
use crate::metadata::{self, Time};
use crate::mounts;
use crate::proto::containerd::services::snapshots::v1 as api;
use crate::proto::containerd::types;
use crate::socket::Socket;
use crate::store::{Store, StoreError};
use api::snapshots_server::{Snapshots, SnapshotsServer};

/// Snapshots in one message of a list.
const BATCH: usize = 100;

/// How long calls may take to end after the request to stop.
const GRACE: Duration = Duration::from_secs(3);

/// Serves a store.
pub struct Service {
    store: Arc<Store>,
    background: Background,
}

/// Serves `store` on a Unix socket until `stop` ends.
///
/// # Errors
/// The socket cannot be bound, or the server fails.
pub async fn serve(store: Arc<Store>, address: &Path, stop: impl Future<Output = ()>) -> std::io::Result<()> {
    let background = Background::start(&store)?;
    let (listener, _guard) = Socket::bind(address)?.into_parts();
    let incoming = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener)?);
    tracing::info!(address = %address.display(), "serving");
    let (stopped, stopping) = tokio::sync::oneshot::channel::<()>();
    let service = SnapshotsServer::new(Service { store, background });
    let server = tonic::transport::Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, async {
            stop.await;
            drop(stopped);
        });
    let deadline = async {
        let _ = stopping.await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        result = server => result.map_err(std::io::Error::other),
        // containerd keeps its connection open; calls that hang must not keep us.
        () = deadline => Ok(()),
    }
}

impl Service {
    /// Runs a call of the store where it may block.
    async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, Status> {
        let store = Arc::clone(&self.store);
        match tokio::task::spawn_blocking(move || call(&store)).await {
            Ok(result) => result.map_err(|e| status_of(&e)),
            Err(e) => Err(Status::internal(format!("the call ended early: {e}"))),
        }
    }
}

fn status_of(error: &StoreError) -> Status {
    let text = chain_text(error);
    match error {
        StoreError::NotFound { .. } => Status::not_found(text),
        StoreError::Exists { .. } => Status::already_exists(text),
        StoreError::ParentNotCommitted { .. } | StoreError::Invalid { .. } => Status::invalid_argument(text),
        StoreError::NotActive { .. }
        | StoreError::NotMountable { .. }
        | StoreError::HasChildren { .. }
        | StoreError::Running { .. } => Status::failed_precondition(text),
        StoreError::Io { .. } | StoreError::Describe(_) | StoreError::Metadata(_) => {
            tracing::error!(error = text, "call failed");
            Status::internal(text)
        }
    }
}

fn mounts_message(mounts: Vec<mounts::Mount>) -> Vec<types::Mount> {
    mounts
        .into_iter()
        .map(|mount| types::Mount {
            r#type: mount.kind.to_owned(),
            source: mount.source,
            target: String::new(),
            options: mount.options,
        })
        .collect()
}

fn info_message(info: metadata::Info) -> api::Info {
    let kind = match info.kind {
        metadata::Kind::Active => api::Kind::Active,
        metadata::Kind::View => api::Kind::View,
        metadata::Kind::Committed => api::Kind::Committed,
    };
    api::Info {
        name: info.name,
        parent: info.parent.unwrap_or_default(),
        kind: kind.into(),
        created_at: Some(time_message(info.created)),
        updated_at: Some(time_message(info.updated)),
        labels: info.labels,
    }
}

fn time_message(time: Time) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: time.seconds,
        nanos: time.nanos,
    }
}

type ListStream = tokio_stream::Iter<std::vec::IntoIter<Result<api::ListSnapshotsResponse, Status>>>;

#[tonic::async_trait]
impl Snapshots for Service {
    async fn prepare(
        &self,
        request: Request<api::PrepareSnapshotRequest>,
    ) -> Result<Response<api::PrepareSnapshotResponse>, Status> {
        let ask = request.into_inner();
        let mounts = self
            .run(move |store| store.prepare(metadata::Kind::Active, &ask.key, &ask.parent, ask.labels))
            .await?;
        Ok(Response::new(api::PrepareSnapshotResponse {
            mounts: mounts_message(mounts),
        }))
    }

    async fn view(
        &self,
        request: Request<api::ViewSnapshotRequest>,
    ) -> Result<Response<api::ViewSnapshotResponse>, Status> {
        let ask = request.into_inner();
        let mounts = self
            .run(move |store| store.prepare(metadata::Kind::View, &ask.key, &ask.parent, ask.labels))
            .await?;
        Ok(Response::new(api::ViewSnapshotResponse {
            mounts: mounts_message(mounts),
        }))
    }

    async fn mounts(&self, request: Request<api::MountsRequest>) -> Result<Response<api::MountsResponse>, Status> {
        let key = request.into_inner().key;
        let mounts = self.run(move |store| store.mounts(&key)).await?;
        Ok(Response::new(api::MountsResponse {
            mounts: mounts_message(mounts),
        }))
    }

    async fn commit(&self, request: Request<api::CommitSnapshotRequest>) -> Result<Response<()>, Status> {
        let ask = request.into_inner();
        let committed = self
            .run(move |store| store.commit(&ask.name, &ask.key, ask.labels))
            .await?;
        self.background.committed(committed);
        Ok(Response::new(()))
    }

    async fn remove(&self, request: Request<api::RemoveSnapshotRequest>) -> Result<Response<()>, Status> {
        let key = request.into_inner().key;
        self.run(move |store| store.remove(&key)).await?;
        self.background.removed();
        Ok(Response::new(()))
    }

    async fn stat(
        &self,
        request: Request<api::StatSnapshotRequest>,
    ) -> Result<Response<api::StatSnapshotResponse>, Status> {
        let key = request.into_inner().key;
        let info = self.run(move |store| store.stat(&key)).await?;
        Ok(Response::new(api::StatSnapshotResponse {
            info: Some(info_message(info)),
        }))
    }

    async fn update(
        &self,
        request: Request<api::UpdateSnapshotRequest>,
    ) -> Result<Response<api::UpdateSnapshotResponse>, Status> {
        let ask = request.into_inner();
        let info = ask
            .info
            .ok_or_else(|| Status::invalid_argument("an update needs the snapshot's info"))?;
        let paths = ask.update_mask.map(|mask| mask.paths).unwrap_or_default();
        let info = self
            .run(move |store| store.update(&info.name, info.labels, &paths))
            .await?;
        Ok(Response::new(api::UpdateSnapshotResponse {
            info: Some(info_message(info)),
        }))
    }

    type ListStream = ListStream;

    async fn list(&self, request: Request<api::ListSnapshotsRequest>) -> Result<Response<ListStream>, Status> {
        let filters = Filters::parse(&request.into_inner().filters)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let mut infos = self.run(Store::list).await?;
        infos.retain(|info| filters.match_info(info));
        // Collected before the first message: the receiver may call us while it reads.
        let messages: Vec<_> = infos
            .chunks(BATCH)
            .map(|batch| {
                Ok(api::ListSnapshotsResponse {
                    info: batch.iter().cloned().map(info_message).collect(),
                })
            })
            .collect();
        Ok(Response::new(tokio_stream::iter(messages)))
    }

    async fn usage(&self, request: Request<api::UsageRequest>) -> Result<Response<api::UsageResponse>, Status> {
        let key = request.into_inner().key;
        let usage = self.run(move |store| store.usage(&key)).await?;
        let clamp = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        Ok(Response::new(api::UsageResponse {
            size: clamp(usage.bytes),
            inodes: clamp(usage.inodes),
        }))
    }

    async fn cleanup(&self, _: Request<api::CleanupRequest>) -> Result<Response<()>, Status> {
        self.run(|store| {
            store.empty_trash();
            Ok(())
        })
        .await?;
        Ok(Response::new(()))
    }
}
