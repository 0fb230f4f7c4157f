//! The OCI images that tests, demo and benchmarks run, as `ctr images import`-able tars under `target/images/`.
//!
//! | file | images in it |
//! |---|---|
//! | `busybox.tar` | `localhost/busybox:1` (one layer), `localhost/layers:1` (two more layers: a file replaced, one removed, a directory made opaque) |
//! | `python.tar` | `localhost/python:1`: Debian trixie, Python 3, numpy, and packages left unpacked in `/srv/packages`; three layers |
//!
//! They are made from Debian packages only, cached by a hash of this recipe and of what goes in. Layers are not
//! compressed: the lab emulates its CPU, and reading them there is dearer than keeping them here.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::mirror;
use crate::workspace::{Workspace, execute, make_dir, say};

/// Debian suite of the Python image.
const SUITE: &str = "trixie";
/// What `localhost/python:1` is installed from; their dependencies come along.
const PYTHON_PACKAGES: &str = "base-files,dash,coreutils,dpkg,tar,grep,sed,python3,python3-numpy";
/// What lies in `/srv/packages` for a worker to unpack.
const LEFT_PACKED: &str = "python3-urllib3 python3-idna python3-chardet python3-jinja2 \
     python3-markupsafe python3-yaml python3-dateutil python3-attr python3-packaging python3-six";
/// Where the host's static busybox is (package `busybox-static`).
const BUSYBOX: &str = "/bin/busybox";

/// Makes the images that are missing or out of date, and returns their tars.
pub(crate) fn build(ws: &Workspace) -> Result<Vec<PathBuf>> {
    let directory = ws.target.join("images");
    make_dir(&directory)?;
    let recipe = Sha256::new_with_prefix(include_str!("images.rs")).chain_update(
        fs::read(BUSYBOX).with_context(|| format!("reading {BUSYBOX}; is the package busybox-static installed?"))?,
    );
    let recipe = hex(&recipe.finalize());
    let ensure = |name: &str, make: fn(&mut OciTar) -> Result<()>| -> Result<PathBuf> {
        let tar = directory.join(format!("{name}.tar"));
        let stamp = directory.join(format!("{name}.recipe"));
        if tar.exists() && fs::read_to_string(&stamp).is_ok_and(|made| made == recipe) {
            return Ok(tar);
        }
        say(format!("building test image {name}"));
        let partial = directory.join(format!("{name}.tar.partial"));
        let mut oci = OciTar::create(&partial)?;
        make(&mut oci).with_context(|| format!("building image {name}"))?;
        oci.finish()?;
        fs::rename(&partial, &tar)?;
        fs::write(&stamp, &recipe)?;
        Ok(tar)
    };
    Ok(vec![ensure("busybox", busybox)?, ensure("python", python)?])
}

fn busybox(oci: &mut OciTar) -> Result<()> {
    let base = oci.add_blob(LAYER, &busybox_layer()?)?;
    let mut lower = Layer::new();
    lower.directory("layered", 0o755)?;
    lower.file("layered/replaced", b"lower\n", 0o644)?;
    lower.file("layered/removed", b"lower\n", 0o644)?;
    lower.file("layered/kept", b"lower\n", 0o640)?;
    lower.directory("layered/opaque", 0o755)?;
    lower.file("layered/opaque/hidden", b"lower\n", 0o644)?;
    let lower = oci.add_blob(LAYER, &lower.finish()?)?;
    let mut upper = Layer::new();
    upper.directory("layered", 0o755)?;
    upper.file("layered/replaced", b"upper\n", 0o644)?;
    upper.file("layered/.wh.removed", b"", 0o644)?;
    upper.directory("layered/opaque", 0o755)?;
    upper.file("layered/opaque/.wh..wh..opq", b"", 0o644)?;
    upper.file("layered/opaque/seen", b"upper\n", 0o644)?;
    let upper = oci.add_blob(LAYER, &upper.finish()?)?;
    oci.add_image("localhost/busybox:1", std::slice::from_ref(&base), &["/bin/sh"])?;
    oci.add_image("localhost/layers:1", &[base, lower, upper], &["/bin/sh"])
}

fn busybox_layer() -> Result<Vec<u8>> {
    let mut layer = Layer::new();
    for (path, mode) in [
        ("bin", 0o755),
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("proc", 0o555),
        ("root", 0o700),
        ("run", 0o755),
        ("sys", 0o555),
        ("tmp", 0o1777),
        ("var", 0o755),
        ("var/tmp", 0o1777),
    ] {
        layer.directory(path, mode)?;
    }
    layer.file("etc/passwd", PASSWD.as_bytes(), 0o644)?;
    layer.file("etc/group", GROUP.as_bytes(), 0o644)?;
    layer.file("bin/busybox", &fs::read(BUSYBOX)?, 0o755)?;
    let applets = Command::new(BUSYBOX)
        .arg("--list")
        .output()
        .context("listing busybox's applets")?;
    for applet in String::from_utf8(applets.stdout)?
        .lines()
        .filter(|name| *name != "busybox")
    {
        layer.link(&format!("bin/{applet}"), "busybox")?;
    }
    layer.finish()
}

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000:worker:/home:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n";
const GROUP: &str = "root:x:0:\naudio:x:29:worker\nworker:x:1000:\nnogroup:x:65534:\n";

fn python(oci: &mut OciTar) -> Result<()> {
    let scratch = Scratch::create()?;
    let root = scratch.0.join("root");
    let download = format!(
        "mkdir -p \"$1/srv/packages\" && cd \"$1/srv/packages\" && \
         APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -q -o APT::Sandbox::User=root download {LEFT_PACKED}"
    );
    let mirror = mirror::find()?;
    let mut command = mirror.mmdebstrap("extract", PYTHON_PACKAGES);
    command.arg(format!("--extract-hook={download}"));
    execute(command.arg(SUITE).arg(&root).arg(&mirror.uri))?;
    trim(&root)?;
    fs::write(root.join("etc/passwd"), PASSWD)?;
    fs::write(root.join("etc/group"), GROUP)?;
    // What the maintainer scripts would have done: alternatives for BLAS and LAPACK, byte code.
    for library in ["blas/libblas.so.3", "lapack/liblapack.so.3"] {
        let name = library.rsplit('/').next().unwrap_or_default();
        std::os::unix::fs::symlink(library, root.join("usr/lib/x86_64-linux-gnu").join(name))?;
    }
    execute(Command::new("chroot").arg(&root).args([
        "/usr/bin/python3",
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode=unchecked-hash",
        "/usr/lib/python3.13",
        "/usr/lib/python3/dist-packages",
    ]))?;
    let is_python = |path: &str| {
        path.starts_with("usr/lib/python3")
            || (path.starts_with("usr/bin/") && path.contains("python"))
            || path == "usr/bin/f2py"
    };
    let is_packages = |path: &str| path.starts_with("srv");
    let mut layers = Vec::new();
    for keep in [
        &(|path: &str| !is_python(path) && !is_packages(path)) as &dyn Fn(&str) -> bool,
        &is_python,
        &is_packages,
    ] {
        let mut layer = Layer::new();
        layer.tree(&root, keep)?;
        layers.push(oci.add_blob(LAYER, &layer.finish()?)?);
    }
    oci.add_image("localhost/python:1", &layers, &["/usr/bin/python3"])
}

/// Takes away what no container reads.
fn trim(root: &Path) -> Result<()> {
    for path in [
        "usr/share/doc",
        "usr/share/info",
        "usr/share/locale",
        "usr/share/man",
        "usr/share/perl5",
        "usr/share/zoneinfo",
        "usr/lib/x86_64-linux-gnu/gconv",
        "usr/lib/python3.13/ensurepip",
        "usr/lib/python3.13/pydoc_data",
        "var/cache",
        "etc/apt",
        "var/lib/apt",
    ] {
        match fs::remove_dir_all(root.join(path)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => bail!("removing {path}: {error}"),
            _ => {}
        }
    }
    execute(
        Command::new("find")
            .arg(root.join("usr/lib/python3/dist-packages/numpy"))
            .args(["-depth", "-type", "d", "-name", "tests", "-exec", "rm", "-r", "{}", ";"]),
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A directory that is gone when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("ramet-image-{}", std::process::id()));
        make_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// One layer tar being built. Owned by root, dated 1970, in the order of the calls.
struct Layer(tar::Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header
    }

    fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Directory, mode, 0);
        Ok(self.0.append_data(&mut header, format!("{path}/"), std::io::empty())?)
    }

    fn file(&mut self, path: &str, content: &[u8], mode: u32) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Regular, mode, content.len() as u64);
        Ok(self.0.append_data(&mut header, path, content)?)
    }

    fn link(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Symlink, 0o777, 0);
        Ok(self.0.append_link(&mut header, path, target)?)
    }

    /// Everything below `root` that `keep` says yes to, with the directories that lead there. Hard links become copies.
    fn tree(&mut self, root: &Path, keep: &dyn Fn(&str) -> bool) -> Result<()> {
        let mut kept = Vec::new();
        collect(root, "", keep, &mut kept)?;
        for path in kept {
            let on_disk = root.join(&path);
            let metadata = fs::symlink_metadata(&on_disk)?;
            let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o7777;
            if metadata.is_dir() {
                self.directory(&path, mode)?;
            } else if metadata.is_symlink() {
                let target = fs::read_link(&on_disk)?;
                self.link(&path, target.to_str().context("a link target is not UTF-8")?)?;
            } else if metadata.is_file() {
                self.file(&path, &fs::read(&on_disk)?, mode)?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<u8>> {
        Ok(self.0.into_inner()?)
    }
}

/// Lists what `keep` wants below `prefix`, parents first, sorted; answers whether there was anything.
fn collect(root: &Path, prefix: &str, keep: &dyn Fn(&str) -> bool, into: &mut Vec<String>) -> Result<bool> {
    let mut names: Vec<String> = fs::read_dir(root.join(prefix))?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<_>>()?;
    names.sort();
    let mut any = false;
    for name in names {
        let path = if prefix.is_empty() {
            name
        } else {
            format!("{prefix}/{name}")
        };
        let is_directory = fs::symlink_metadata(root.join(&path))?.is_dir();
        let place = into.len();
        into.push(path.clone());
        let inside = is_directory && collect(root, &path, keep, into)?;
        if inside || keep(&path) {
            any = true;
        } else {
            into.truncate(place);
        }
    }
    Ok(any)
}

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

#[derive(Clone)]
struct Blob {
    media_type: &'static str,
    digest: String,
    size: usize,
}

impl Blob {
    fn descriptor(&self) -> serde_json::Value {
        json!({ "mediaType": self.media_type, "digest": self.digest, "size": self.size })
    }
}

/// An OCI image layout in a tar.
struct OciTar {
    tar: tar::Builder<fs::File>,
    manifests: Vec<serde_json::Value>,
}

impl OciTar {
    fn create(path: &Path) -> Result<Self> {
        let file = fs::File::create(path).with_context(|| format!("creating {}", path.display()))?;
        let mut oci = Self {
            tar: tar::Builder::new(file),
            manifests: Vec::new(),
        };
        oci.add_file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(oci)
    }

    fn add_file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        let mut header = Layer::header(tar::EntryType::Regular, 0o644, content.len() as u64);
        Ok(self.tar.append_data(&mut header, path, content)?)
    }

    fn add_blob(&mut self, media_type: &'static str, content: &[u8]) -> Result<Blob> {
        let digest = hex(&Sha256::digest(content));
        self.add_file(&format!("blobs/sha256/{digest}"), content)?;
        Ok(Blob {
            media_type,
            digest: format!("sha256:{digest}"),
            size: content.len(),
        })
    }

    fn add_image(&mut self, name: &str, layers: &[Blob], command: &[&str]) -> Result<()> {
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "Cmd": command,
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": layers.iter().map(|layer| &layer.digest).collect::<Vec<_>>() },
        });
        let config = self.add_blob(CONFIG, config.to_string().as_bytes())?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.descriptor(),
            "layers": layers.iter().map(Blob::descriptor).collect::<Vec<_>>(),
        });
        let manifest = self.add_blob(MANIFEST, manifest.to_string().as_bytes())?;
        let mut descriptor = manifest.descriptor();
        descriptor["platform"] = json!({ "architecture": "amd64", "os": "linux" });
        descriptor["annotations"] = json!({
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rsplit(':').next().unwrap_or(name),
        });
        self.manifests.push(descriptor);
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": self.manifests });
        self.add_file("index.json", index.to_string().as_bytes())?;
        let mut file = self.tar.into_inner()?;
        Ok(file.flush()?)
    }
}
