//! `ramet checkpoint`: a running container becomes an image.
//!
//! ```text
//! look up container, task, parent image; is the name free?     nothing is changed until here
//! lease ─> Prepare a snapshot on the container's parent chain
//!       ─> Tasks.Checkpoint into that snapshot's directory     the shim saves the VM; the container runs on
//!       ─> layer, config and manifest into the content store
//!       ─> Commit the snapshot under the chain ID of the new image
//!       ─> create the image; only now is anything visible
//! drop the lease
//! ```
//!
//! Whatever goes wrong, the snapshot is removed and the lease dropped, and with it everything that was stored. If this process is killed, the
//! lease expires.

mod source;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::{Context, bail, ensure};
use checkpoint::manifest::{self, CheckpointId, CheckpointManifest};
use checkpoint::pack::{self, PackedCheckpoint};
use checkpoint::rootfs;
use clap::ArgAction;
use containerd_client::services::v1::snapshots::{
    CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest,
};
use containerd_client::services::v1::{CheckpointTaskRequest, CreateImageRequest, CreateRequest, DeleteRequest, Image};
use containerd_client::types::{Descriptor, Mount};
use prost::Message;
use prost_types::{Any, Timestamp};
use serde::Serialize;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

use self::source::Source;
use crate::Connection;
use crate::build;
use crate::client::{Answer, Client};
use crate::content::{self, Blob};
use crate::image;
use crate::output::{self, Progress};

/// Name of our runtime.
pub(crate) const RUNTIME: &str = "io.containerd.ramet.v2";
/// How long a lease holds what a killed `ramet checkpoint` left, in seconds.
const LEASE_SECONDS: i64 = 6 * 3600;

/// Arguments of `ramet checkpoint`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Whether the container runs on afterwards
    #[arg(long, action = ArgAction::Set, default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true)]
    pub(crate) leave_running: bool,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
    /// Id of the container
    container: String,
    /// Name of the new image
    image: String,
}

/// `containerd.runc.v1.CheckpointOptions`: containerd 2 passes no other type on. These two fields are all that we use.
#[derive(Clone, PartialEq, Message)]
struct CheckpointOptions {
    #[prost(bool, tag = "1")]
    exit: bool,
    #[prost(string, tag = "8")]
    image_path: String,
}

/// What was made, for people and programs.
#[derive(Debug, Serialize)]
struct Summary {
    image: String,
    /// Of the image manifest.
    digest: String,
    checkpoint: CheckpointId,
    base: Option<CheckpointId>,
    incremental: bool,
    /// How long the VM stood still.
    pause_ms: f64,
    /// How long the container's processes stood still.
    frozen_ms: f64,
    /// Guest memory that was saved.
    memory_bytes: u64,
    /// The layer in the content store.
    layer_bytes: u64,
    /// Until the checkpoint was complete on this node.
    checkpoint_ms: u64,
    /// Packing it.
    pack_ms: u64,
    /// Storing the layer in containerd.
    store_ms: u64,
    total_ms: u64,
}

/// Makes a checkpoint image.
pub(crate) async fn run(connection: &Connection, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let progress = Progress::new(arguments.json);
    progress.step(&format!("Looking up container {}", arguments.container));
    let client = Client::connect(connection).await?;
    let source = Source::look_up(&client, &arguments.container).await?;
    check_name(&client, &arguments.image).await?;

    let key = format!("ramet-checkpoint-{}", CheckpointId::random()?);
    create_lease(&client, &key).await?;
    let leased = client.with_lease(&key)?;
    let builder = Builder {
        client: leased,
        source,
        key,
        arguments,
        progress,
    };
    let result = tokio::select! {
        result = builder.build() => result,
        signal = interrupted() => Err(signal),
    };
    builder.end(&client, result.is_err()).await;
    let mut summary = result?;
    summary.total_ms = milliseconds(started);
    let Builder {
        arguments, progress, ..
    } = builder;
    drop(progress);
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        print!("{}", describe(&summary, &arguments.container));
    }
    Ok(ExitCode::SUCCESS)
}

fn milliseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn describe(summary: &Summary, container: &str) -> String {
    let kind = if summary.incremental { "incremental" } else { "full" };
    format!(
        "{}\n  checkpoint  {} ({kind})\n  container   {container} was frozen for {:.1} ms, its VM paused for {:.1} ms\n  memory      {} saved\n  layer       {}\n  time        {:.1} s, of which {:.1} s to the checkpoint, {:.1} s to pack it, {:.1} s to store it\n",
        summary.image,
        summary.checkpoint,
        summary.frozen_ms,
        summary.pause_ms,
        output::bytes(summary.memory_bytes),
        output::bytes(summary.layer_bytes),
        seconds(summary.total_ms),
        seconds(summary.checkpoint_ms),
        seconds(summary.pack_ms),
        seconds(summary.store_ms),
    )
}

#[expect(clippy::cast_precision_loss, reason = "durations for people")]
fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

/// The error for the signal that arrives first.
async fn interrupted() -> anyhow::Error {
    let streams = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    let (Ok(mut interrupt), Ok(mut terminate)) = streams else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => anyhow::anyhow!("interrupted; no image was made"),
        _ = terminate.recv() => anyhow::anyhow!("terminated; no image was made"),
    }
}

async fn check_name(client: &Client, name: &str) -> anyhow::Result<()> {
    let bad = name.is_empty() || name.len() > 255 || name.chars().any(|c| c.is_whitespace() || c.is_control());
    ensure!(!bad, "{name:?} cannot be the name of an image");
    if image::find(client, name).await?.is_some() {
        bail!("{}", name_taken(name));
    }
    Ok(())
}

fn name_taken(name: &str) -> String {
    format!("image {name} exists already; choose another name, or remove it first: ramet rm {name}")
}

async fn create_lease(client: &Client, id: &str) -> anyhow::Result<()> {
    let mut expires = Timestamp::from(SystemTime::now());
    expires.seconds += LEASE_SECONDS;
    let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expires.to_string())]);
    let request = client.request(CreateRequest {
        id: id.to_owned(),
        labels,
    });
    client
        .leases()
        .create(request)
        .await
        .to(|| "create a lease".to_owned())?;
    Ok(())
}

/// Makes the image, under its lease.
struct Builder {
    client: Client,
    source: Source,
    /// Of the lease, of the snapshot while it is active, and prefix of the names of writes.
    key: String,
    arguments: Arguments,
    progress: Progress,
}

impl Builder {
    async fn build(&self) -> anyhow::Result<Summary> {
        let started = Instant::now();
        let snapshot = self.prepare().await?;
        let directory = snapshot.join(rootfs::CHECKPOINT_DIR);
        self.progress
            .step(&format!("Saving the VM of container {}", self.source.container.id));
        self.checkpoint_task(&directory).await?;
        let checkpoint = CheckpointManifest::read(&directory).context("the shim left no usable checkpoint")?;
        let checkpoint_ms = milliseconds(started);

        let packing = Instant::now();
        let packed = self.pack(&directory).await?;
        let pack_ms = milliseconds(packing);
        let storing = Instant::now();
        let layer = self.store_layer(packed).await?;
        let store_ms = milliseconds(storing);
        self.progress
            .step(&format!("Registering image {}", self.arguments.image));
        let digest = self.register(&checkpoint, &layer).await?;
        Ok(Summary {
            image: self.arguments.image.clone(),
            digest,
            incremental: checkpoint.save.incremental,
            pause_ms: seconds(checkpoint.save.pause_us),
            frozen_ms: seconds(checkpoint.save.frozen_us),
            memory_bytes: checkpoint.save.memory_bytes,
            layer_bytes: layer.bytes,
            checkpoint: checkpoint.id,
            base: checkpoint.base,
            checkpoint_ms,
            pack_ms,
            store_ms,
            total_ms: 0,
        })
    }

    fn snapshotter(&self) -> String {
        self.source.container.snapshotter.clone()
    }

    /// Prepares the snapshot that becomes the checkpoint layer, and returns its directory.
    async fn prepare(&self) -> anyhow::Result<PathBuf> {
        let request = self.client.request(PrepareSnapshotRequest {
            snapshotter: self.snapshotter(),
            key: self.key.clone(),
            parent: self.source.parent_chain.clone(),
            labels: HashMap::new(),
        });
        let answer = self
            .client
            .snapshots()
            .prepare(request)
            .await
            .to(|| "prepare a snapshot".to_owned())?;
        let Some(directory) = snapshot_directory(&answer.mounts) else {
            bail!(
                "container {} is on snapshotter {}, which keeps no checkpoints; start it with --snapshotter ramet",
                self.source.container.id,
                self.source.container.snapshotter
            );
        };
        Ok(directory)
    }

    async fn checkpoint_task(&self, directory: &Path) -> anyhow::Result<()> {
        let id = &self.source.container.id;
        let image_path = directory
            .to_str()
            .context("the snapshot directory is not UTF-8")?
            .to_owned();
        let options = CheckpointOptions {
            exit: !self.arguments.leave_running,
            image_path,
        };
        let options = Any {
            type_url: "containerd.runc.v1.CheckpointOptions".to_owned(),
            value: options.encode_to_vec(),
        };
        let request = self.client.request(CheckpointTaskRequest {
            container_id: id.clone(),
            parent_checkpoint: String::new(),
            options: Some(options),
        });
        match self.client.tasks().checkpoint(request).await {
            // containerd keeps the container's spec and a temporary directory as content of its own, and refuses that with
            // this code when it has the same bytes already; by then the shim has done its part, which the manifest shows.
            Err(status)
                if status.code() == tonic::Code::AlreadyExists && directory.join(manifest::FILE_NAME).exists() =>
            {
                Ok(())
            }
            answer => {
                answer.to(|| format!("checkpoint container {id}"))?;
                Ok(())
            }
        }
    }

    async fn pack(&self, directory: &Path) -> anyhow::Result<PackedCheckpoint> {
        self.progress.step("Packing the checkpoint");
        let directory = directory.to_owned();
        let (sender, mut receiver) = tokio::sync::watch::channel((0, 0));
        let packing = tokio::task::spawn_blocking(move || {
            pack::pack(&directory, &mut |done, total| {
                sender.send_replace((done, total));
            })
        });
        while receiver.changed().await.is_ok() {
            let (done, total) = *receiver.borrow_and_update();
            self.progress.bytes(done, total);
        }
        Ok(packing.await.context("the packing thread ended early")??)
    }

    async fn store_layer(&self, mut packed: PackedCheckpoint) -> anyhow::Result<Blob> {
        self.progress
            .step(&format!("Storing the layer ({})", output::bytes(packed.tar_bytes())));
        let reference = format!("{}-layer", self.key);
        content::write_stream(&self.client, &reference, HashMap::new(), move |out| {
            Ok(packed.write_tar(out)?)
        })
        .await
    }

    /// Writes config and manifest, commits the snapshot, creates the image; returns the manifest's digest.
    async fn register(&self, checkpoint: &CheckpointManifest, layer: &Blob) -> anyhow::Result<String> {
        let parent = &self.source.image;
        let chain = build::next_chain_id(&self.source.parent_chain, &layer.digest);
        let config = build::config(parent, checkpoint, &layer.digest, &self.source.process)?;
        let labels = build::config_labels(&self.source.container.snapshotter, &chain);
        let config = self.write_json("config", &config, labels).await?;
        let manifest = build::manifest(parent, checkpoint, &config, layer)?;
        let labels = build::manifest_labels(&manifest);
        let manifest = self.write_json("manifest", &manifest, labels).await?;

        let request = self.client.request(CommitSnapshotRequest {
            snapshotter: self.snapshotter(),
            name: chain.clone(),
            key: self.key.clone(),
            labels: build::layer_labels(checkpoint),
        });
        self.client
            .snapshots()
            .commit(request)
            .await
            .to(|| format!("commit snapshot {chain}"))?;

        let name = &self.arguments.image;
        let target = Descriptor {
            media_type: build::MANIFEST_TYPE.to_owned(),
            digest: manifest.digest.clone(),
            size: i64::try_from(manifest.bytes)?,
            ..Descriptor::default()
        };
        let image = Image {
            name: name.clone(),
            target: Some(target),
            ..Image::default()
        };
        let request = self.client.request(CreateImageRequest {
            image: Some(image),
            source_date_epoch: None,
        });
        match self
            .client
            .images()
            .create(request)
            .await
            .to(|| format!("create image {name}"))
        {
            Err(error) if error.code == tonic::Code::AlreadyExists => bail!("{}", name_taken(name)),
            other => other?,
        };
        Ok(manifest.digest)
    }

    async fn write_json(&self, what: &str, value: &Value, labels: HashMap<String, String>) -> anyhow::Result<Blob> {
        let bytes = serde_json::to_vec(value)?;
        content::write(&self.client, &format!("{}-{what}", self.key), bytes, labels).await
    }

    /// Drops the lease; after a failure the snapshot first, and then waits until everything is collected.
    async fn end(&self, client: &Client, failed: bool) {
        if failed {
            self.progress.step("Removing what was made");
            let request = RemoveSnapshotRequest {
                snapshotter: self.snapshotter(),
                key: self.key.clone(),
            };
            // It may not have been made yet, or be committed; the lease held it, so it goes with it.
            let _ = client.snapshots().remove(client.request(request)).await;
        }
        let request = DeleteRequest {
            id: self.key.clone(),
            sync: failed,
        };
        if let Err(status) = client.leases().delete(client.request(request)).await {
            eprintln!(
                "ramet: cannot remove lease {} (it expires by itself): {}",
                self.key,
                status.message()
            );
        }
    }
}

/// The directory of one of our snapshots: the source of its overlay mount, if it has our description of it.
fn snapshot_directory(mounts: &[Mount]) -> Option<PathBuf> {
    let [mount] = mounts else { return None };
    let directory = PathBuf::from(&mount.source);
    let ours = mount.r#type == "overlay" && directory.is_absolute() && directory.join(rootfs::FILE_NAME).is_file();
    ours.then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_encoded_as_containerd_decodes_them() {
        let options = CheckpointOptions {
            exit: true,
            image_path: "/a".to_owned(),
        };
        // Field 1 varint 1, field 8 length 2.
        assert_eq!(options.encode_to_vec(), [0x08, 1, 0x42, 2, b'/', b'a']);
    }

    #[test]
    fn a_snapshot_directory_is_known_by_its_description() {
        let temporary = tempfile::tempdir().unwrap();
        let source = temporary.path().to_str().unwrap().to_owned();
        let overlay = Mount {
            r#type: "overlay".to_owned(),
            source,
            ..Mount::default()
        };
        assert_eq!(snapshot_directory(std::slice::from_ref(&overlay)), None);
        std::fs::write(temporary.path().join("rootfs.json"), "{}").unwrap();
        assert_eq!(
            snapshot_directory(std::slice::from_ref(&overlay)),
            Some(temporary.path().to_owned())
        );
        assert_eq!(snapshot_directory(&[overlay.clone(), overlay.clone()]), None);
        assert_eq!(
            snapshot_directory(&[Mount {
                r#type: "bind".to_owned(),
                ..overlay
            }]),
            None
        );
    }

    #[test]
    fn the_summary_says_what_a_user_asks_first() {
        let summary = Summary {
            image: "warm:1".to_owned(),
            digest: "sha256:1".to_owned(),
            checkpoint: CheckpointId::try_from("a".repeat(32)).unwrap(),
            base: None,
            incremental: false,
            pause_ms: 12.34,
            frozen_ms: 40.0,
            memory_bytes: 3 << 20,
            layer_bytes: 1 << 20,
            checkpoint_ms: 1500,
            pack_ms: 2000,
            store_ms: 500,
            total_ms: 4100,
        };
        let text = describe(&summary, "c1");
        assert!(
            text.contains("c1 was frozen for 40.0 ms, its VM paused for 12.3 ms"),
            "{text}"
        );
        assert!(text.contains("3.00 MiB saved"), "{text}");
        assert!(
            text.contains("4.1 s, of which 1.5 s to the checkpoint, 2.0 s to pack it, 0.5 s to store it"),
            "{text}"
        );
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["pause_ms"], 12.34);
        assert_eq!(json["layer_bytes"], 1 << 20);
    }
}
