//! What is checkpointed: the container, its task, the image it was made from. Nothing is changed here.

use anyhow::{Context, bail, ensure};
use containerd_client::services::v1::container::Runtime;
use containerd_client::services::v1::snapshots::StatSnapshotRequest;
use containerd_client::services::v1::{Container, GetContainerRequest, GetRequest};
use containerd_client::types::v1::Status;
use serde_json::Value;

use super::RUNTIME;
use crate::build::{self, Process};
use crate::client::{Answer, Client, if_found};
use crate::content;
use crate::image::{self, ResolvedImage};

/// The container, and the image it was made from.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) container: Container,
    /// Name of the snapshot below the container's.
    pub(super) parent_chain: String,
    pub(super) image: ResolvedImage,
    pub(super) process: Process,
}

impl Source {
    pub(super) async fn look_up(client: &Client, id: &str) -> anyhow::Result<Self> {
        let request = client.request(GetContainerRequest { id: id.to_owned() });
        let answer = client
            .containers()
            .get(request)
            .await
            .to(|| format!("look up container {id}"));
        let Some(container) = if_found(answer)?.and_then(|response| response.container) else {
            bail!("there is no container {id} in this namespace (see: ctr containers ls, and --namespace)");
        };
        check_runtime(id, container.runtime.as_ref())?;
        check_running(client, id).await?;
        let spec = container
            .spec
            .as_ref()
            .with_context(|| format!("container {id} has no spec"))?;
        let process = Process::from_spec(&spec.value)?;
        let parent_chain = parent_chain(client, &container).await?;
        let image = find_parent_image(client, &container, &parent_chain).await?;
        check_layers(client, &image).await?;
        Ok(Self {
            container,
            parent_chain,
            image,
            process,
        })
    }
}

fn check_runtime(id: &str, runtime: Option<&Runtime>) -> anyhow::Result<()> {
    let name = runtime.map(|runtime| runtime.name.as_str()).unwrap_or_default();
    ensure!(
        name == RUNTIME,
        "container {id} runs with {name}; only containers that were started with --runtime {RUNTIME} can be checkpointed"
    );
    Ok(())
}

async fn check_running(client: &Client, id: &str) -> anyhow::Result<()> {
    let request = client.request(GetRequest {
        container_id: id.to_owned(),
        exec_id: String::new(),
    });
    let answer = client
        .tasks()
        .get(request)
        .await
        .to(|| format!("look up the task of container {id}"));
    let Some(process) = if_found(answer)?.and_then(|response| response.process) else {
        bail!("container {id} is not running; start it first: ctr task start {id}");
    };
    match process.status() {
        Status::Running => Ok(()),
        Status::Paused | Status::Pausing => {
            bail!("container {id} is paused; resume it first: ctr task resume {id}")
        }
        Status::Unknown | Status::Created | Status::Stopped => {
            bail!(
                "container {id} is not running: its task is {}",
                process.status().as_str_name().to_lowercase()
            )
        }
    }
}

async fn parent_chain(client: &Client, container: &Container) -> anyhow::Result<String> {
    let id = &container.id;
    ensure!(
        !container.snapshot_key.is_empty(),
        "container {id} has no snapshot; only containers made from an image can be checkpointed"
    );
    let request = client.request(StatSnapshotRequest {
        snapshotter: container.snapshotter.clone(),
        key: container.snapshot_key.clone(),
    });
    let answer = client
        .snapshots()
        .stat(request)
        .await
        .to(|| format!("look up the snapshot of container {id}"))?;
    let parent = answer.info.map(|info| info.parent).unwrap_or_default();
    ensure!(
        !parent.is_empty(),
        "container {id} was not made from an image: its snapshot has no parent"
    );
    Ok(parent)
}

/// The image whose layers are the container's. It usually is the one the container names; that name may have been moved since.
async fn find_parent_image(client: &Client, container: &Container, chain: &str) -> anyhow::Result<ResolvedImage> {
    let fits = |image: &ResolvedImage| build::chain_id(&image.diff_ids()).as_deref() == Some(chain);
    let mut named = Ok(());
    if let Some(image) = image::find(client, &container.image).await? {
        match image::resolve(client, &image).await {
            Ok(image) if fits(&image) => return Ok(image),
            Ok(_) => {}
            Err(error) => named = Err(error),
        }
    }
    for image in image::list(client).await? {
        if let Ok(image) = image::resolve(client, &image).await
            && fits(&image)
        {
            return Ok(image);
        }
    }
    named.with_context(|| format!("cannot extend the image of container {}", container.id))?;
    bail!(
        "no image here has the layers of container {} (it was made from {}); pull that image again",
        container.id,
        container.image
    )
}

/// An image with missing blobs could not be pushed or exported.
async fn check_layers(client: &Client, image: &ResolvedImage) -> anyhow::Result<()> {
    for layer in image.layers() {
        let digest = layer.get("digest").and_then(Value::as_str).unwrap_or_default();
        ensure!(
            content::size(client, digest).await?.is_some(),
            "layer {digest} of image {} is not in containerd's content store; fetch it first: ctr content fetch {}",
            image.name,
            image.name
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_runtime_is_accepted() {
        let runtime = |name: &str| Runtime {
            name: name.to_owned(),
            options: None,
        };
        check_runtime("c1", Some(&runtime(RUNTIME))).unwrap();
        let error = check_runtime("c1", Some(&runtime("io.containerd.runc.v2")))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("container c1 runs with io.containerd.runc.v2"),
            "{error}"
        );
    }
}
