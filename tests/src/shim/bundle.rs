//! What containerd prepares for a shim: the bundle directory, and the command lines.

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::stat::Mode;
use serde_json::{Value, json};

use super::NAMESPACE;
use crate::command::Invocation;
use crate::container::fresh_id;
use crate::node::{Runtime, SHIM};

/// The lab's own static busybox.
const BUSYBOX: &str = "/usr/bin/busybox";
/// Its names in the container.
const APPLETS: &[&str] = &["sh", "cat", "echo", "grep", "seq", "sleep", "stty", "true"];

/// A directory with everything of one container, removed when this is dropped.
pub struct Bundle {
    runtime: Runtime,
    id: String,
    directory: tempfile::TempDir,
    annotations: Value,
}

impl Bundle {
    /// A container with busybox in it that runs this command.
    pub fn new(runtime: Runtime, command: &[&str]) -> Result<Self> {
        // Not in /tmp, which is memory.
        let directory = tempfile::tempdir_in("/var/lib")?;
        let bundle = Self {
            runtime,
            id: fresh_id("shim"),
            directory,
            annotations: json!({}),
        };
        let root = bundle.root();
        for path in ["bin", "dev", "proc", "tmp"] {
            fs::create_dir_all(root.join(path))?;
        }
        fs::copy(BUSYBOX, root.join("bin/busybox")).with_context(|| format!("copying {BUSYBOX}"))?;
        for applet in APPLETS {
            symlink("busybox", root.join("bin").join(applet))?;
        }
        fs::create_dir_all(bundle.path().join("rootfs"))?;
        bundle.write_config(command)?;
        let log = bundle.path().join("log");
        nix::unistd::mkfifo(&log, Mode::S_IRUSR | Mode::S_IWUSR)?;
        // containerd reads it; a shim may wait for that.
        thread::spawn(move || {
            let mut text = Vec::new();
            fs::File::open(log).and_then(|mut log| log.read_to_end(&mut text))
        });
        Ok(bundle)
    }

    /// A container of somebody else's sandbox, as CRI marks it.
    pub fn in_sandbox(mut self, sandbox: &str) -> Result<Self> {
        self.annotations = json!({ "io.kubernetes.cri.sandbox-id": sandbox });
        self.write_config(&["true"])?;
        Ok(self)
    }

    fn write_config(&self, command: &[&str]) -> Result<()> {
        let mount = |destination: &str, kind: &str, options: &[&str]| json!({ "destination": destination, "type": kind, "source": kind, "options": options });
        let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({ "type": kind }));
        let config = json!({
            "ociVersion": "1.0.2",
            "process": process(command, false),
            "root": { "path": "rootfs" },
            "annotations": self.annotations,
            "mounts": [
                mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
                mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
                mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
            ],
            "linux": {
                "cgroupsPath": format!("/{NAMESPACE}/{}", self.id),
                "namespaces": namespaces,
            },
        });
        let path = self.path().join("config.json");
        fs::write(&path, config.to_string()).with_context(|| format!("writing {}", path.display()))
    }

    /// Its runtime.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        self.runtime
    }

    /// The container's id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The bundle directory, which has the container's name.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join(&self.id)
    }

    /// The root filesystem that is to be bound.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    /// Where containerd's events service is.
    #[must_use]
    pub fn events_socket(&self) -> PathBuf {
        self.directory.path().join("events")
    }

    /// A new FIFO for a standard stream.
    pub fn fifo(&self) -> Result<PathBuf> {
        let path = self.directory.path().join(fresh_id("fifo"));
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
        Ok(path)
    }

    /// The program's `start`, as containerd 1.7 calls it.
    #[must_use]
    pub fn start(&self) -> Invocation {
        self.bare_start()
            .env("TTRPC_ADDRESS", self.events_socket())
            .env("GRPC_ADDRESS", self.grpc_socket())
            .env("NAMESPACE", NAMESPACE)
            .env("MAX_SHIM_VERSION", "2")
    }

    /// `start` by the containerd of another bundle.
    #[must_use]
    pub fn start_at(&self, other: &Self) -> Invocation {
        self.call(&self.path(), &other.grpc_socket(), &[]).arg("start")
    }

    /// `start` without the environment of containerd.
    #[must_use]
    pub fn bare_start(&self) -> Invocation {
        self.start_at(self)
    }

    /// `delete`, called in the bundle.
    #[must_use]
    pub fn delete(&self) -> Invocation {
        self.delete_from(&self.path())
    }

    /// `delete`, called in another directory, for the bundle may be gone.
    #[must_use]
    pub fn delete_from(&self, here: &Path) -> Invocation {
        self.delete_with(here, self)
    }

    /// `delete` by the containerd of another bundle.
    #[must_use]
    pub fn delete_at(&self, other: &Self) -> Invocation {
        self.delete_with(&self.path(), other)
    }

    fn delete_with(&self, here: &Path, other: &Self) -> Invocation {
        let bundle = self.path().display().to_string();
        self.call(here, &other.grpc_socket(), &["-bundle", &bundle])
            .arg("delete")
    }

    fn grpc_socket(&self) -> PathBuf {
        self.directory.path().join("containerd.sock")
    }

    fn call(&self, here: &Path, containerd: &Path, flags: &[&str]) -> Invocation {
        let mut invocation = Invocation::new("sh")
            .args(["-c", "cd \"$0\" && exec \"$@\""])
            .arg(here)
            .arg(program(self.runtime))
            .args(["-namespace", NAMESPACE, "-address"])
            .arg(containerd)
            .args(["-publish-binary", "/bin/true", "-id", &self.id])
            .args(flags.iter().copied());
        if std::env::var_os("RAMET_LAB").is_some() {
            invocation = invocation
                .env("RAMET_BOOT_TIMEOUT", "180")
                .env("RAMET_LOG_DIR", "/var/log/ramet");
        }
        invocation
    }
}

/// The program of a runtime.
pub(super) fn program(runtime: Runtime) -> &'static str {
    if runtime.is_vm() {
        SHIM
    } else {
        "containerd-shim-runc-v2"
    }
}

/// A process in the words of the OCI specification.
pub(super) fn process(command: &[&str], terminal: bool) -> Value {
    json!({
        "terminal": terminal, "user": { "uid": 0, "gid": 0 }, "cwd": "/", "env": ["PATH=/bin"], "args": command,
    })
}
