//! Makes OCI images with any content, however odd, as an archive that `ctr images import` reads.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{EntryType, Header};

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The lab's own static busybox.
const BUSYBOX: &str = "/usr/bin/busybox";
/// Its names in [`Layer::busybox`].
const APPLETS: &[&str] = &[
    "sh", "ls", "cat", "stat", "find", "readlink", "test", "id", "pwd", "echo", "wc", "head", "grep", "sleep", "env",
    "od",
];

/// How a layer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// As it is.
    None,
    /// `application/vnd.oci.image.layer.v1.tar+gzip`
    Gzip,
    /// `application/vnd.oci.image.layer.v1.tar+zstd`
    Zstd,
}

/// One layer, in the order of the calls.
pub struct Layer {
    tar: tar::Builder<Vec<u8>>,
}

impl Default for Layer {
    fn default() -> Self {
        Self::new()
    }
}

impl Layer {
    /// A layer without entries.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tar: tar::Builder::new(Vec::new()),
        }
    }

    /// A layer with a static busybox in /bin, and the usual directories.
    pub fn busybox() -> Result<Self> {
        let mut layer = Self::new();
        for path in ["bin", "dev", "etc", "proc", "sys"] {
            layer.entry(path, EntryType::Directory, 0o755, b"")?;
        }
        let busybox = std::fs::read(BUSYBOX).with_context(|| format!("reading {BUSYBOX}"))?;
        layer.file("bin/busybox", &busybox, 0o755)?;
        for name in APPLETS {
            layer.link(EntryType::Symlink, &format!("bin/{name}"), "busybox")?;
        }
        Ok(layer)
    }

    fn header(kind: EntryType, mode: u32, size: usize) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size as u64);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header
    }

    /// Any entry without a link target.
    pub fn entry(&mut self, path: &str, kind: EntryType, mode: u32, content: &[u8]) -> Result<&mut Self> {
        let header = Self::header(kind, mode, content.len());
        self.with_header(header, path, content)
    }

    fn with_header(&mut self, mut header: Header, path: &str, content: &[u8]) -> Result<&mut Self> {
        self.tar.append_data(&mut header, path, content)?;
        Ok(self)
    }

    /// A regular file.
    pub fn file(&mut self, path: &str, content: &[u8], mode: u32) -> Result<&mut Self> {
        self.entry(path, EntryType::Regular, mode, content)
    }

    /// A directory.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<&mut Self> {
        self.entry(path, EntryType::Directory, mode, b"")
    }

    /// A file of an owner.
    pub fn owned(&mut self, path: &str, uid: u64, gid: u64) -> Result<&mut Self> {
        let mut header = Self::header(EntryType::Regular, 0o640, 0);
        header.set_uid(uid);
        header.set_gid(gid);
        self.with_header(header, path, b"")
    }

    /// A character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) -> Result<&mut Self> {
        let mut header = Self::header(EntryType::Char, 0o666, 0);
        header.set_device_major(major)?;
        header.set_device_minor(minor)?;
        self.with_header(header, path, b"")
    }

    /// A hard or symbolic link.
    pub fn link(&mut self, kind: EntryType, path: &str, target: &str) -> Result<&mut Self> {
        self.tar.append_link(&mut Self::header(kind, 0o777, 0), path, target)?;
        Ok(self)
    }

    /// A regular file with an extended attribute.
    pub fn file_with_xattr(&mut self, path: &str, content: &[u8], name: &str, value: &[u8]) -> Result<&mut Self> {
        let key = format!("SCHILY.xattr.{name}");
        self.tar.append_pax_extensions([(key.as_str(), value)])?;
        self.file(path, content, 0o755)
    }

    /// Removes a path of the layers below.
    pub fn whiteout(&mut self, path: &str) -> Result<&mut Self> {
        let (directory, name) = path.rsplit_once('/').unwrap_or((".", path));
        self.file(&format!("{directory}/.wh.{name}"), b"", 0o644)
    }

    /// Hides what the layers below have in a directory.
    pub fn opaque(&mut self, directory: &str) -> Result<&mut Self> {
        self.file(&format!("{directory}/.wh..wh..opq"), b"", 0o644)
    }

    fn finish(self) -> Result<Vec<u8>> {
        Ok(self.tar.into_inner()?)
    }
}

/// An image: layers and a configuration.
#[derive(Default)]
pub struct Image {
    layers: Vec<(Vec<u8>, Compression)>,
    config: serde_json::Map<String, Value>,
}

impl Image {
    /// An image whose first layer is [`Layer::busybox`].
    pub fn with_busybox() -> Result<Self> {
        Self::default().layer(Layer::busybox()?)
    }

    /// Adds a layer on top.
    pub fn layer(self, layer: Layer) -> Result<Self> {
        self.compressed(layer, Compression::None)
    }

    /// Adds a layer that travels compressed.
    pub fn compressed(mut self, layer: Layer, compression: Compression) -> Result<Self> {
        self.layers.push((layer.finish()?, compression));
        Ok(self)
    }

    /// Sets a field of the image's `config`.
    #[must_use]
    pub fn config(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.config.insert(field.into(), value.into());
        self
    }

    /// Writes it as an archive in which it has this name.
    pub fn write(mut self, path: &Path, name: &str) -> Result<()> {
        let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
        let mut archive = Archive(tar::Builder::new(file));
        archive.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let (mut layers, mut diff_ids, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for (tar, compression) in &self.layers {
            let (media_type, blob) = compress(tar, *compression)?;
            let descriptor = descriptor(media_type, &blob);
            // The same blob is in an archive once, however often it is a layer.
            if !seen.contains(&descriptor) {
                archive.blob(&blob)?;
                seen.push(descriptor.clone());
            }
            layers.push(descriptor);
            diff_ids.push(digest(tar));
        }
        self.config
            .entry("Env")
            .or_insert_with(|| json!(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]));
        let config = json!({
            "architecture": "amd64", "os": "linux", "config": self.config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let config = config.to_string().into_bytes();
        archive.blob(&config)?;
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config), "layers": layers,
        });
        let manifest = manifest.to_string().into_bytes();
        archive.blob(&manifest)?;
        let mut descriptor = descriptor(MANIFEST, &manifest);
        descriptor["platform"] = json!({ "architecture": "amd64", "os": "linux" });
        descriptor["annotations"] = json!({ "io.containerd.image.name": name });
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [descriptor] });
        archive.file("index.json", index.to_string().as_bytes())?;
        archive.0.into_inner()?.flush().context("writing an archive")
    }
}

struct Archive(tar::Builder<File>);

impl Archive {
    fn file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let mut header = Layer::header(EntryType::Regular, 0o644, content.len());
        Ok(self.0.append_data(&mut header, path, content)?)
    }

    fn blob(&mut self, content: &[u8]) -> Result<()> {
        self.file(&format!("blobs/{}", digest(content).replace(':', "/")), content)
    }
}

fn digest(content: &[u8]) -> String {
    let hex: String = Sha256::digest(content)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(content), "size": content.len() })
}

fn compress(tar: &[u8], compression: Compression) -> Result<(&'static str, Vec<u8>)> {
    Ok(match compression {
        Compression::None => ("application/vnd.oci.image.layer.v1.tar", tar.to_vec()),
        Compression::Gzip => ("application/vnd.oci.image.layer.v1.tar+gzip", gzip(tar)?),
        Compression::Zstd => ("application/vnd.oci.image.layer.v1.tar+zstd", zstd::encode_all(tar, 1)?),
    })
}

fn gzip(content: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new("gzip")
        .args(["-1", "-n"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting gzip")?;
    let mut stdin = child.stdin.take().context("gzip has no stdin")?;
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(content));
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("gzip ended with {}", output.status);
    }
    Ok(output.stdout)
}
