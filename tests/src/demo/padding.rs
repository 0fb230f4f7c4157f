//! Images with a root filesystem as large as wanted, without moving the bytes through a layer tar: the snapshot is made by hand under the chain ID that
//! the image has, so containerd finds it unpacked.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use e2e::Node;
use e2e::images::BUSYBOX;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Makes `localhost/padded-MIB:1`: busybox and a file of that many MiB.
pub(crate) fn image(node: &Node, scratch: &Path, mib: usize) -> Result<String> {
    let name = format!("localhost/padded-{mib}:1");
    // Never unpacked: the snapshot below stands for it.
    let layer = format!("stands for {mib} MiB");
    let (base, config, parent) = with_layer(node, layer.as_bytes())?;
    let diff = digest(layer.as_bytes());

    let key = format!("padding-{mib}");
    let snapshots = |arguments: &[&str]| {
        node.ctr(["snapshots", "--snapshotter", "ramet"])
            .args(arguments.iter().copied())
            .succeed()
    };
    snapshots(&["prepare", &key, &parent])?;
    fill(
        &upper_directory(&snapshots(&["mounts", "/nowhere", &key])?.out())?.join("padding"),
        mib,
    )?;
    snapshots(&["commit", &digest(format!("{parent} {diff}").as_bytes()), &key])?;

    let archive = scratch.join(format!("padded-{mib}.tar"));
    write_archive(&archive, &name, &base, &config, layer.as_bytes(), node)?;
    import(node, &archive)?;
    Ok(name)
}

/// Makes an image of busybox and one more layer, given as a tar archive.
pub(crate) fn image_with(node: &Node, name: &str, layer: &[u8]) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let (base, config, _) = with_layer(node, layer)?;
    let archive = scratch.path().join("image.tar");
    write_archive(&archive, name, &base, &config, layer, node)?;
    import(node, &archive)
}

fn import(node: &Node, archive: &Path) -> Result<()> {
    let import = node.ctr(["images", "import", "--snapshotter", "ramet"]);
    import.arg(archive).succeed().map(drop)
}

/// Busybox's manifest, its config with one more layer, and the diff id of the one that it has.
fn with_layer(node: &Node, layer: &[u8]) -> Result<(Value, Value, String)> {
    let base = node.manifest(BUSYBOX)?;
    let config = blob(node, base["config"]["digest"].as_str().context("config digest")?)?;
    let mut config: Value = serde_json::from_str(&config)?;
    let diffs = config["rootfs"]["diff_ids"].as_array_mut().context("diff_ids")?;
    let [parent] = diffs.as_slice() else {
        bail!("{BUSYBOX} has {} layers instead of one", diffs.len())
    };
    let parent = parent.as_str().context("diff id")?.to_owned();
    diffs.push(json!(digest(layer)));
    Ok((base, config, parent))
}

fn blob(node: &Node, digest: &str) -> Result<String> {
    Ok(node.ctr(["content", "get", digest]).succeed()?.out())
}

fn digest(content: &[u8]) -> String {
    let hex: String = Sha256::digest(content)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

/// Where the snapshot's own files lie: a bind mount's source, or the upper directory of an overlay.
fn upper_directory(mount: &str) -> Result<PathBuf> {
    let option = mount.split([' ', ',']).find_map(|word| word.strip_prefix("upperdir="));
    option
        .map(PathBuf::from)
        .with_context(|| format!("no upper directory in {mount:?}"))
}

/// Bytes that neither compress nor repeat within a page.
fn fill(path: &Path, mib: usize) -> Result<()> {
    let mut file = fs::File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = Vec::with_capacity(1 << 20);
    for _ in 0..(1 << 20) / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        block.extend_from_slice(&state.to_le_bytes());
    }
    for _ in 0..mib {
        file.write_all(&block)?;
    }
    Ok(())
}

fn write_archive(to: &Path, name: &str, base: &Value, config: &Value, layer: &[u8], node: &Node) -> Result<()> {
    let mut tar = tar::Builder::new(fs::File::create(to)?);
    let mut add = |path: &str, content: &[u8]| -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        Ok(tar.append_data(&mut header, path, content)?)
    };
    let mut put = |content: &[u8], media_type: &str| -> Result<Value> {
        let digest = digest(content);
        add(&format!("blobs/{}", digest.replace(':', "/")), content)?;
        Ok(json!({ "mediaType": media_type, "digest": digest, "size": content.len() }))
    };
    let mut layers = base["layers"].as_array().cloned().unwrap_or_default();
    for layer in &layers {
        let content = node
            .ctr(["content", "get", layer["digest"].as_str().unwrap_or_default()])
            .succeed()?
            .stdout;
        put(&content, layer["mediaType"].as_str().unwrap_or_default())?;
    }
    layers.push(put(layer, "application/vnd.oci.image.layer.v1.tar")?);
    let config = put(
        config.to_string().as_bytes(),
        "application/vnd.oci.image.config.v1+json",
    )?;
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
    let mut manifest = put(manifest.to_string().as_bytes(), MANIFEST)?;
    manifest["annotations"] = json!({ "io.containerd.image.name": name });
    manifest["platform"] = json!({ "architecture": "amd64", "os": "linux" });
    add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    add("index.json", index.to_string().as_bytes())?;
    tar.into_inner()?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upper_directory_is_found_in_what_ctr_prints() {
        let mount = "mount -t overlay /x/snapshots/3 /nowhere -o index=off,workdir=/x/3/work,upperdir=/x/3/fs,lowerdir=/x/1/fs\n";
        assert_eq!(upper_directory(mount).unwrap(), PathBuf::from("/x/3/fs"));
        assert!(upper_directory("mount -t bind /x /y -o rw").is_err());
    }
}
