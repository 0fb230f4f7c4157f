//! The service over its socket, as containerd calls it.
#![expect(clippy::unwrap_used, reason = "a test ends at the first thing that fails")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use snapshotter::proto::containerd::services::snapshots::v1 as api;
use snapshotter::service::serve;
use snapshotter::store::Store;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use api::snapshots_client::SnapshotsClient;

struct Server {
    client: SnapshotsClient<Channel>,
    stop: oneshot::Sender<()>,
    served: JoinHandle<std::io::Result<()>>,
}

async fn start(dir: &Path) -> Server {
    let socket = dir.join("run/s.sock");
    let deadline = Instant::now() + Duration::from_secs(10);
    let store = loop {
        match Store::open(&dir.join("root"), 64 << 20) {
            Ok(store) => break Arc::new(store),
            // A background thread of the server before this one is at its last snapshot.
            Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(e) => panic!("{e:?}"),
        }
    };
    let (stop, stopped) = oneshot::channel();
    let address = socket.clone();
    let served = tokio::spawn(async move {
        serve(store, &address, async {
            let _ = stopped.await;
        })
        .await
    });
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    let channel = loop {
        match endpoint.connect().await {
            Ok(channel) => break channel,
            Err(e) if Instant::now() > deadline => panic!("{e:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    Server {
        client: SnapshotsClient::new(channel),
        stop,
        served,
    }
}

impl Server {
    async fn prepare(&mut self, key: &str, parent: &str) -> Result<Vec<String>, Code> {
        let request = api::PrepareSnapshotRequest {
            key: key.into(),
            parent: parent.into(),
            ..Default::default()
        };
        let answer = self.client.prepare(request).await.map_err(|e| e.code())?;
        Ok(answer
            .into_inner()
            .mounts
            .into_iter()
            .map(|m| format!("{} {}", m.r#type, m.source))
            .collect())
    }

    async fn commit(&mut self, name: &str, key: &str) -> Result<(), Code> {
        let request = api::CommitSnapshotRequest {
            name: name.into(),
            key: key.into(),
            ..Default::default()
        };
        self.client.commit(request).await.map(drop).map_err(|e| e.code())
    }

    async fn remove(&mut self, key: &str) -> Result<(), tonic::Status> {
        self.client
            .remove(api::RemoveSnapshotRequest {
                key: key.into(),
                ..Default::default()
            })
            .await
            .map(drop)
    }

    async fn list(&mut self, filter: &str) -> Result<Vec<String>, Code> {
        let filters = if filter.is_empty() {
            vec![]
        } else {
            vec![filter.to_owned()]
        };
        let request = api::ListSnapshotsRequest {
            filters,
            ..Default::default()
        };
        let mut stream = self.client.list(request).await.map_err(|e| e.code())?.into_inner();
        let mut names = Vec::new();
        while let Some(batch) = stream.message().await.map_err(|e| e.code())? {
            for info in batch.info {
                // The stream is open: a call in the middle of it must be answered.
                let stat = api::StatSnapshotRequest {
                    key: info.name.clone(),
                    ..Default::default()
                };
                self.client.stat(stat).await.map_err(|e| e.code())?;
                names.push(info.name);
            }
        }
        Ok(names)
    }

    async fn stop(self) {
        drop(self.client);
        drop(self.stop);
        self.served.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_have_containerds_codes() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path()).await;
    let mounts = server.prepare("k1/with spaces", "").await.unwrap();
    assert!(
        mounts[0].starts_with("bind /") && mounts[0].ends_with("/fs"),
        "{mounts:?}"
    );
    assert_eq!(server.prepare("k1/with spaces", "").await, Err(Code::AlreadyExists));
    assert_eq!(server.prepare("k2", "absent").await, Err(Code::NotFound));
    assert_eq!(server.prepare("k2", "k1/with spaces").await, Err(Code::InvalidArgument));
    server.commit("one", "k1/with spaces").await.unwrap();
    assert_eq!(server.commit("two", "k1/with spaces").await, Err(Code::NotFound));
    assert!(server.prepare("c", "one").await.unwrap()[0].starts_with("overlay /"));
    assert_eq!(server.commit("one", "c").await, Err(Code::AlreadyExists));
    let refused = server.remove("one").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("remove"));
    assert_eq!(server.remove("absent").await.unwrap_err().code(), Code::NotFound);
    let mounts = api::MountsRequest {
        key: "one".into(),
        ..Default::default()
    };
    assert_eq!(
        server.client.mounts(mounts).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let usage = api::UsageRequest {
        key: "c".into(),
        ..Default::default()
    };
    assert_eq!(server.client.usage(usage).await.unwrap().into_inner().inodes, 1);
    server.stop().await;
    assert!(!dir.path().join("run/s.sock").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path()).await;
    server.prepare("k", "").await.unwrap();
    server.commit("one", "k").await.unwrap();
    for i in 0..250 {
        server.prepare(&format!("c{i:03}"), "one").await.unwrap();
    }
    let before = server.list("").await.unwrap();
    assert_eq!(before.len(), 251);
    server.stop().await;
    let mut server = start(dir.path()).await;
    assert_eq!(server.list("").await.unwrap(), before);
    assert_eq!(server.list("kind==committed").await.unwrap(), ["one"]);
    assert_eq!(server.list("parent==one,name==c007").await.unwrap(), ["c007"]);
    assert_eq!(server.list("kind=").await, Err(Code::InvalidArgument));
    server.remove("c007").await.unwrap();
    server.client.cleanup(api::CleanupRequest::default()).await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("root/trash")).unwrap().count(), 0);
    server.stop().await;
}
