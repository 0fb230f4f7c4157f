//! Images in containerd: from a reference to image manifest and config, and what in them says that it is a checkpoint image.

use anyhow::{Context, bail};
use checkpoint::manifest::{CheckpointId, CheckpointManifest};
use containerd_client::services::v1::{GetImageRequest, Image, ListImagesRequest};
use serde::Serialize;
use serde_json::Value;

use crate::client::{Answer, Client, if_found};
use crate::content;

/// Annotation of a checkpoint layer; containerd passes it to the snapshotter as a label.
pub(crate) const CHECKPOINT_LABEL: &str = "containerd.io/snapshot/ramet.checkpoint";
/// Annotation of a checkpoint layer: the checkpoint below it, if any.
pub(crate) const BASE_LABEL: &str = "containerd.io/snapshot/ramet.base";
/// Annotation of the image manifest: guest memory in bytes.
pub(crate) const MEMORY_ANNOTATION: &str = "io.ramet.memory-bytes";

/// An image manifest for Linux on x86-64, and its config.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedImage {
    /// Reference.
    pub(crate) name: String,
    /// Digest of the image manifest.
    pub(crate) digest: String,
    pub(crate) manifest: Value,
    pub(crate) config: Value,
}

/// What `ramet ls` shows of a checkpoint image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CheckpointImage {
    pub(crate) reference: String,
    /// Digest of the image manifest.
    pub(crate) digest: String,
    pub(crate) checkpoint: CheckpointId,
    pub(crate) base: Option<CheckpointId>,
    /// Checkpoints below this one.
    pub(crate) depth: usize,
    /// RFC 3339.
    pub(crate) created: String,
    pub(crate) memory_bytes: u64,
    /// Bytes of the checkpoint's own layer.
    pub(crate) layer_bytes: u64,
    pub(crate) args: Vec<String>,
}

/// The image record, or `None`.
pub(crate) async fn find(client: &Client, name: &str) -> anyhow::Result<Option<Image>> {
    let request = client.request(GetImageRequest { name: name.to_owned() });
    let answer = client
        .images()
        .get(request)
        .await
        .to(|| format!("look up image {name}"));
    Ok(if_found(answer)?.and_then(|response| response.image))
}

/// The image record; an error with a remedy if there is none.
pub(crate) async fn get(client: &Client, name: &str) -> anyhow::Result<Image> {
    match find(client, name).await? {
        Some(image) => Ok(image),
        None => bail!("there is no image {name} in this namespace (see: ramet ls, ctr images ls, and --namespace)"),
    }
}

/// All image records.
pub(crate) async fn list(client: &Client) -> anyhow::Result<Vec<Image>> {
    let request = client.request(ListImagesRequest::default());
    Ok(client
        .images()
        .list(request)
        .await
        .to(|| "list images".to_owned())?
        .images)
}

/// Reads image manifest and config.
pub(crate) async fn resolve(client: &Client, image: &Image) -> anyhow::Result<ResolvedImage> {
    let incomplete = || format!("image {} is not complete here", image.name);
    let target = image
        .target
        .as_ref()
        .with_context(|| format!("image {} has no target", image.name))?;
    let mut digest = target.digest.clone();
    let mut manifest = content::read_json(client, &digest).await.with_context(incomplete)?;
    if manifest.get("manifests").is_some() {
        let Some(found) = choose_platform(&manifest) else {
            bail!("image {} has no manifest for linux/amd64", image.name);
        };
        digest = found;
        manifest = content::read_json(client, &digest).await.with_context(incomplete)?;
    }
    let Some(config_digest) = manifest.pointer("/config/digest").and_then(Value::as_str) else {
        bail!(
            "image {} is not an image that can be run: its manifest {digest} has no config",
            image.name
        );
    };
    let config = content::read_json(client, config_digest)
        .await
        .with_context(incomplete)?;
    Ok(ResolvedImage {
        name: image.name.clone(),
        digest,
        manifest,
        config,
    })
}

/// Digest of the linux/amd64 manifest of an index: the one without a CPU variant if there are several, for that one runs everywhere.
pub(crate) fn choose_platform(index: &Value) -> Option<String> {
    let manifests = index.get("manifests")?.as_array()?;
    let text = |manifest: &Value, pointer: &str| {
        manifest
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let fits = |manifest: &&Value| {
        manifest.get("platform").is_none()
            || text(manifest, "/platform/os") == "linux" && text(manifest, "/platform/architecture") == "amd64"
    };
    let best = manifests.iter().filter(fits).min_by_key(|manifest| {
        let unknown = manifest.get("platform").is_none();
        (unknown, text(manifest, "/platform/variant"))
    })?;
    Some(text(best, "/digest")).filter(|digest| !digest.is_empty())
}

impl ResolvedImage {
    /// Layer descriptors, bottom to top.
    pub(crate) fn layers(&self) -> &[Value] {
        self.manifest
            .get("layers")
            .and_then(Value::as_array)
            .map_or(&[], Vec::as_slice)
    }

    /// Digests of the unpacked layers, bottom to top.
    pub(crate) fn diff_ids(&self) -> Vec<String> {
        let ids = self.config.pointer("/rootfs/diff_ids").and_then(Value::as_array);
        ids.into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect()
    }

    /// What it says about its checkpoint, if it is a checkpoint image: one whose topmost layer is a checkpoint.
    pub(crate) fn checkpoint(&self) -> Option<CheckpointImage> {
        let top = self.layers().last()?;
        let id = |label| layer_annotation(top, label).and_then(|id| CheckpointId::try_from(id).ok());
        let checkpoints = self
            .layers()
            .iter()
            .filter(|layer| layer_annotation(layer, CHECKPOINT_LABEL).is_some());
        let text = |value: &Value, pointer: &str| value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let memory = self
            .manifest
            .get("annotations")
            .and_then(|all| all.get(MEMORY_ANNOTATION));
        Some(CheckpointImage {
            reference: self.name.clone(),
            digest: self.digest.clone(),
            checkpoint: id(CHECKPOINT_LABEL)?,
            base: id(BASE_LABEL),
            depth: checkpoints.count() - 1,
            // Images are not to write to the terminal.
            created: text(&self.config, "/created")
                .unwrap_or_default()
                .replace(char::is_control, ""),
            memory_bytes: memory
                .and_then(Value::as_str)
                .and_then(|bytes| bytes.parse().ok())
                .unwrap_or(0),
            layer_bytes: top.get("size").and_then(Value::as_u64).unwrap_or(0),
            args: ["/config/Entrypoint", "/config/Cmd"]
                .iter()
                .filter_map(|pointer| self.config.pointer(pointer)?.as_array())
                .flatten()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect(),
        })
    }
}

fn layer_annotation(layer: &Value, name: &str) -> Option<String> {
    layer.get("annotations")?.get(name)?.as_str().map(str::to_owned)
}

/// The checkpoint's manifest, from the beginning of its layer.
pub(crate) async fn read_checkpoint_manifest(
    client: &Client,
    image: &ResolvedImage,
) -> anyhow::Result<CheckpointManifest> {
    let layer = image
        .layers()
        .last()
        .and_then(|layer| layer.get("digest"))
        .and_then(Value::as_str);
    let layer = layer.context("the image has no layers")?;
    let most = i64::try_from(checkpoint::manifest::MAX_BYTES)? + 4096;
    let bytes = content::size(client, layer).await?;
    let bytes = bytes.with_context(|| format!("layer {layer} is not in containerd's content store"))?;
    let start = content::read(client, layer, 0, most.min(i64::try_from(bytes)?)).await?;
    let bytes =
        checkpoint::pack::manifest_in_tar(&start).with_context(|| format!("layer {layer} is not a checkpoint"))?;
    Ok(CheckpointManifest::from_json(bytes)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_index_is_resolved_to_the_plain_amd64_manifest() {
        let index = json!({"manifests": [
            {"digest": "sha256:0", "platform": {"os": "unknown", "architecture": "unknown"}},
            {"digest": "sha256:1", "platform": {"os": "linux", "architecture": "arm64"}},
            {"digest": "sha256:2", "platform": {"os": "linux", "architecture": "amd64", "variant": "v3"}},
            {"digest": "sha256:3", "platform": {"os": "linux", "architecture": "amd64"}},
        ]});
        assert_eq!(choose_platform(&index).as_deref(), Some("sha256:3"));
        assert_eq!(choose_platform(&json!({"manifests": [index["manifests"][1]]})), None);
        assert_eq!(
            choose_platform(&json!({"manifests": [{"digest": "sha256:4"}]})).as_deref(),
            Some("sha256:4")
        );
    }

    #[test]
    fn an_image_whose_top_layer_is_ordinary_is_no_checkpoint_image() {
        let id = "a".repeat(32);
        let checkpoint = json!({"size": 5, "annotations": {CHECKPOINT_LABEL: id}});
        let resolved = |layers: Value| ResolvedImage {
            name: "x".to_owned(),
            digest: "sha256:1".to_owned(),
            manifest: json!({"layers": layers, "annotations": {MEMORY_ANNOTATION: "1024"}}),
            config: json!({"created": "2026-11-30T14:00:00Z", "config": {"Cmd": ["a", "b"]}}),
        };
        assert_eq!(resolved(json!([checkpoint, {"size": 1}])).checkpoint(), None);
        assert_eq!(resolved(json!([])).checkpoint(), None);
        let found = resolved(json!([{"size": 1}, checkpoint, checkpoint]))
            .checkpoint()
            .unwrap();
        assert_eq!((found.depth, found.memory_bytes, found.layer_bytes), (1, 1024, 5));
        assert_eq!(found.args, ["a", "b"]);
    }
}
