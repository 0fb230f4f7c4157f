//! Image manifest and config of a checkpoint image, from those of the parent. Pure; nothing is read or written.

use std::collections::HashMap;

use anyhow::{Context, ensure};
use checkpoint::manifest::CheckpointManifest;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::content::Blob;
use crate::image::{BASE_LABEL, CHECKPOINT_LABEL, MEMORY_ANNOTATION, ResolvedImage};

/// Media type of the checkpoint layer: an ordinary, uncompressed tar layer, so its digest is its diff ID.
pub(crate) const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
/// Media type of the image manifest.
pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";

/// The process that goes on in a fork, as the container's spec describes it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Process {
    #[serde(default)]
    pub(crate) args: Vec<String>,
    #[serde(default)]
    pub(crate) env: Vec<String>,
    #[serde(default)]
    pub(crate) cwd: String,
    #[serde(default)]
    pub(crate) user: User,
}

/// Who it runs as.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct User {
    #[serde(default)]
    pub(crate) uid: u32,
    #[serde(default)]
    pub(crate) gid: u32,
}

impl Process {
    /// From the bytes of an OCI runtime spec.
    pub(crate) fn from_spec(spec: &[u8]) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Spec {
            process: Process,
        }
        let spec: Spec = serde_json::from_slice(spec).context("the container's spec cannot be read")?;
        Ok(spec.process)
    }
}

/// Name of the snapshot that holds all of these layers.
pub(crate) fn chain_id(diff_ids: &[String]) -> Option<String> {
    let (first, rest) = diff_ids.split_first()?;
    Some(
        rest.iter()
            .fold(first.clone(), |chain, diff_id| next_chain_id(&chain, diff_id)),
    )
}

/// Name of the snapshot with one more layer.
pub(crate) fn next_chain_id(chain: &str, diff_id: &str) -> String {
    format!(
        "sha256:{}",
        checkpoint::manifest::hex(&Sha256::digest(format!("{chain} {diff_id}")))
    )
}

/// Labels of a checkpoint layer and its snapshot.
pub(crate) fn layer_labels(checkpoint: &CheckpointManifest) -> HashMap<String, String> {
    let mut labels = HashMap::from([(CHECKPOINT_LABEL.to_owned(), checkpoint.id.to_string())]);
    if let Some(base) = &checkpoint.base {
        labels.insert(BASE_LABEL.to_owned(), base.to_string());
    }
    labels
}

/// The config: the parent's with one more layer, and the process of the checkpoint as what it runs. The args become `Cmd`, so a fork without
/// args of its own has equal args and resumes, and one with its own replaces them in every tool.
pub(crate) fn config(
    parent: &ResolvedImage,
    checkpoint: &CheckpointManifest,
    diff_id: &str,
    process: &Process,
) -> anyhow::Result<Value> {
    let mut config = parent.config.clone();
    let damaged = || format!("the config of image {} is not an object", parent.name);
    let top = config.as_object_mut().with_context(damaged)?;
    top.insert("created".to_owned(), json!(checkpoint.created));
    let rootfs = top
        .entry("rootfs")
        .or_insert_with(|| json!({"type": "layers", "diff_ids": []}));
    let diff_ids = rootfs
        .get_mut("diff_ids")
        .and_then(Value::as_array_mut)
        .with_context(damaged)?;
    diff_ids.push(json!(diff_id));
    let history = top.entry("history").or_insert_with(|| json!([]));
    history.as_array_mut().with_context(damaged)?.push(json!({
        "created": checkpoint.created,
        "created_by": format!("ramet checkpoint {}", checkpoint.id),
    }));
    let run = top.entry("config").or_insert_with(|| json!({}));
    if run.is_null() {
        *run = json!({});
    }
    let run = run.as_object_mut().with_context(damaged)?;
    run.remove("Entrypoint");
    // Says that the args are one shell line, which ours are not.
    run.remove("ArgsEscaped");
    run.insert("Cmd".to_owned(), json!(process.args));
    run.insert("Env".to_owned(), json!(process.env));
    run.insert("WorkingDir".to_owned(), json!(process.cwd));
    run.insert(
        "User".to_owned(),
        json!(format!("{}:{}", process.user.uid, process.user.gid)),
    );
    Ok(config)
}

/// The image manifest: the parent's layers and the checkpoint's.
pub(crate) fn manifest(
    parent: &ResolvedImage,
    checkpoint: &CheckpointManifest,
    config: &Blob,
    layer: &Blob,
) -> anyhow::Result<Value> {
    let layers = parent.layers().len();
    let diff_ids = parent.diff_ids().len();
    ensure!(
        layers == diff_ids,
        "image {} has {layers} layers but {diff_ids} diff IDs; it cannot be extended",
        parent.name
    );
    let mut all: Vec<Value> = parent.layers().iter().cloned().map(as_oci_layer).collect();
    let labels: Map<String, Value> = layer_labels(checkpoint)
        .into_iter()
        .map(|(name, value)| (name, json!(value)))
        .collect();
    all.push(json!({"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.bytes, "annotations": labels}));
    Ok(json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": config.digest, "size": config.bytes},
        "layers": all,
        "annotations": {
            MEMORY_ANNOTATION: checkpoint.vm.memory_bytes.to_string(),
            "org.opencontainers.image.created": checkpoint.created,
        },
    }))
}

/// A registry may refuse Docker's media types in an OCI manifest.
fn as_oci_layer(mut layer: Value) -> Value {
    let oci = match layer.get("mediaType").and_then(Value::as_str) {
        Some("application/vnd.docker.image.rootfs.diff.tar.gzip") => "application/vnd.oci.image.layer.v1.tar+gzip",
        Some("application/vnd.docker.image.rootfs.diff.tar.zstd") => "application/vnd.oci.image.layer.v1.tar+zstd",
        Some("application/vnd.docker.image.rootfs.diff.tar") => LAYER_TYPE,
        _ => return layer,
    };
    layer["mediaType"] = json!(oci);
    layer
}

/// Labels of the manifest blob that keep config and layers from the garbage collector.
pub(crate) fn manifest_labels(manifest: &Value) -> HashMap<String, String> {
    let digest = |value: &Value| value.get("digest").and_then(Value::as_str).map(str::to_owned);
    let config = manifest.get("config").and_then(digest);
    let layers = manifest
        .get("layers")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(digest);
    let layers = layers
        .enumerate()
        .map(|(number, layer)| (format!("containerd.io/gc.ref.content.l.{number}"), layer));
    config
        .map(|config| ("containerd.io/gc.ref.content.config".to_owned(), config))
        .into_iter()
        .chain(layers)
        .collect()
}

/// Labels of the config blob that keep the snapshot from the garbage collector.
pub(crate) fn config_labels(snapshotter: &str, chain: &str) -> HashMap<String, String> {
    HashMap::from([(format!("containerd.io/gc.ref.snapshot.{snapshotter}"), chain.to_owned())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent() -> ResolvedImage {
        ResolvedImage {
            name: "base:1".to_owned(),
            digest: "sha256:p".to_owned(),
            manifest: json!({"layers": [
                {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "digest": "sha256:l0", "size": 9},
            ]}),
            config: json!({
                "architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["sha256:d0"]},
                "config": {"Entrypoint": ["/init"], "Cmd": ["x"], "Labels": {"keep": "me"}},
            }),
        }
    }

    fn checkpoint(base: Option<&str>) -> CheckpointManifest {
        let json = json!({
            "format": 1, "id": "a".repeat(32), "base": base, "created": "2026-11-30T14:00:00Z",
            "host": {"arch": "x86_64", "cpu_vendor": "v", "cpu_family": 1, "cpu_model": 1, "host_kernel": "6"},
            "vm": {"vcpus": 1, "memory_bytes": 64 << 20, "guest_kernel": "6", "agent_generation": 1, "nets": 0},
            "read_only_disks": [{"id": "ro0", "files_sha256": ["0".repeat(64)]}], "writable_disks": [],
            "containers": [{"guest_id": "c", "container_id": "c", "args": ["sh"], "terminal": false,
                "read_only_disk": "ro0", "writable_disk": ""}],
            "save": {"pause_us": 1, "frozen_us": 1, "memory_bytes": 1, "memory_write_us": 1, "incremental": false},
        });
        CheckpointManifest::from_json(json.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn chain_ids_follow_the_oci_rule() {
        assert_eq!(chain_id(&[]), None);
        let [first, second] = ["sha256:a", "sha256:b"].map(str::to_owned);
        assert_eq!(chain_id(std::slice::from_ref(&first)).as_deref(), Some("sha256:a"));
        let both = format!(
            "sha256:{}",
            checkpoint::manifest::hex(&Sha256::digest("sha256:a sha256:b"))
        );
        assert_eq!(chain_id(&[first, second]), Some(both));
    }

    #[test]
    fn the_config_runs_what_was_checkpointed() {
        let spec = br#"{"process": {"args": ["python3", "-i"], "env": ["A=1"], "cwd": "/w", "user": {"uid": 7, "gid": 8}, "terminal": false}}"#;
        let process = Process::from_spec(spec).unwrap();
        let config = config(&parent(), &checkpoint(None), "sha256:d1", &process).unwrap();
        assert_eq!(config["config"]["Cmd"], json!(["python3", "-i"]));
        assert_eq!(config["config"].get("Entrypoint"), None);
        assert_eq!(config["config"]["Env"], json!(["A=1"]));
        assert_eq!(config["config"]["WorkingDir"], "/w");
        assert_eq!(config["config"]["User"], "7:8");
        assert_eq!(config["config"]["Labels"], json!({"keep": "me"}));
        assert_eq!(config["rootfs"]["diff_ids"], json!(["sha256:d0", "sha256:d1"]));
        assert_eq!(config["architecture"], "amd64");
    }

    #[test]
    fn a_config_without_a_config_object_gets_one() {
        let mut parent = parent();
        parent.config["config"] = Value::Null;
        let config = config(&parent, &checkpoint(None), "sha256:d1", &Process::default()).unwrap();
        assert_eq!(config["config"]["User"], "0:0");
    }

    #[test]
    fn the_manifest_has_the_layers_of_the_parent_and_labels_for_all_blobs() {
        let base = "b".repeat(32);
        let blob = |digest: &str| Blob {
            digest: digest.to_owned(),
            bytes: 3,
        };
        let manifest = manifest(
            &parent(),
            &checkpoint(Some(&base)),
            &blob("sha256:c"),
            &blob("sha256:l1"),
        )
        .unwrap();
        assert_eq!(
            manifest["layers"][0]["mediaType"],
            "application/vnd.oci.image.layer.v1.tar+gzip"
        );
        assert_eq!(
            manifest["layers"][1]["annotations"][CHECKPOINT_LABEL],
            json!("a".repeat(32))
        );
        assert_eq!(manifest["layers"][1]["annotations"][BASE_LABEL], json!(base));
        let labels = manifest_labels(&manifest);
        assert_eq!(labels["containerd.io/gc.ref.content.config"], "sha256:c");
        assert_eq!(labels["containerd.io/gc.ref.content.l.0"], "sha256:l0");
        assert_eq!(labels["containerd.io/gc.ref.content.l.1"], "sha256:l1");
        assert_eq!(labels.len(), 3);
    }

    #[test]
    fn a_parent_whose_layers_and_diff_ids_disagree_is_refused() {
        let mut parent = parent();
        parent.config["rootfs"]["diff_ids"] = json!([]);
        let blob = Blob {
            digest: "sha256:c".to_owned(),
            bytes: 3,
        };
        let error = manifest(&parent, &checkpoint(None), &blob, &blob)
            .unwrap_err()
            .to_string();
        assert!(error.contains("1 layers but 0 diff IDs"), "{error}");
    }
}
