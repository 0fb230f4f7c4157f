//! A machine with containerd and our snapshotter, and the commands one gives it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

use crate::command::{Finished, Invocation};
use crate::images::{self, Archive};
use crate::leftovers::Leftovers;

/// Which shim a container runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// runc's own shim on overlayfs: what right behaviour is.
    Runc,
    /// Ours, on our snapshotter.
    Ramet,
    /// Ours, on overlayfs: the slower way to a root filesystem.
    RametOnOverlayfs,
    /// runc's shim on our snapshotter, which is a complete snapshotter for it too.
    RuncOnRamet,
}

impl Runtime {
    /// Its name for `ctr run --runtime`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Runc | Self::RuncOnRamet => "io.containerd.runc.v2",
            Self::Ramet | Self::RametOnOverlayfs => "io.containerd.ramet.v2",
        }
    }

    /// The snapshotter it is used with.
    #[must_use]
    pub fn snapshotter(self) -> &'static str {
        match self {
            Self::Runc | Self::RametOnOverlayfs => "overlayfs",
            Self::Ramet | Self::RuncOnRamet => "ramet",
        }
    }

    /// Whether containers get their own kernel.
    #[must_use]
    pub fn is_vm(self) -> bool {
        self.name().contains("ramet")
    }
}

/// Names of our programs.
pub const VMM: &str = "ramet-vmm";
/// The shim.
pub const SHIM: &str = "containerd-shim-ramet-v2";

/// A containerd with our snapshotter, by its socket.
#[derive(Clone, Debug)]
pub struct Node {
    address: PathBuf,
    namespace: String,
    snapshotter_root: PathBuf,
}

impl Node {
    /// A node by its parts.
    pub fn new(address: impl Into<PathBuf>, namespace: &str, snapshotter_root: impl Into<PathBuf>) -> Self {
        Self {
            address: address.into(),
            namespace: namespace.into(),
            snapshotter_root: snapshotter_root.into(),
        }
    }

    /// The containerd that the lab has running, with the small images imported. The first call also notes what is there, for
    /// [`Self::leftovers`].
    pub fn shared() -> &'static Self {
        static NODE: OnceLock<Node> = OnceLock::new();
        NODE.get_or_init(|| {
            let node = Self::new(
                "/run/containerd/containerd.sock",
                "default",
                "/var/lib/ramet-snapshotter",
            );
            node.import(&Archive::Busybox)
                .unwrap_or_else(|error| panic!("preparing the shared node: {error:#}"));
            let _ = BASELINE.set(Leftovers::take(&node));
            node
        })
    }

    /// What is on the shared node that was not there at the start.
    pub fn leftovers(&self) -> Vec<String> {
        BASELINE
            .get()
            .map(|baseline| Leftovers::settle(self, baseline))
            .unwrap_or_default()
    }

    /// containerd's socket.
    #[must_use]
    pub fn address(&self) -> &Path {
        &self.address
    }

    /// Where the snapshotter keeps its snapshots.
    #[must_use]
    pub fn snapshotter_root(&self) -> &Path {
        &self.snapshotter_root
    }

    /// The same node in another containerd namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            namespace: namespace.into(),
            ..self.clone()
        }
    }

    /// A `ctr` command.
    pub fn ctr<I: IntoIterator<Item = S>, S: Into<std::ffi::OsString>>(&self, arguments: I) -> Invocation {
        Invocation::new("ctr")
            .arg("--address")
            .arg(&self.address)
            .args(["--namespace", &self.namespace])
            .args(arguments)
    }

    /// A `ramet` command.
    pub fn ramet<I: IntoIterator<Item = S>, S: Into<std::ffi::OsString>>(&self, arguments: I) -> Invocation {
        Invocation::new("ramet")
            .env("CONTAINERD_ADDRESS", &self.address)
            .env("CONTAINERD_NAMESPACE", &self.namespace)
            .args(arguments)
    }

    /// Checkpoints a running container into an image.
    pub fn checkpoint(&self, container: &str, image: &str) -> Result<Finished> {
        self.ramet(["checkpoint", container, image]).succeed()
    }

    /// Imports a test archive for our snapshotter unless its images are there.
    pub fn import(&self, archive: &Archive) -> Result<()> {
        let present = self.ctr(["images", "ls", "-q"]).succeed()?.out();
        if archive
            .names()
            .iter()
            .all(|name| present.lines().any(|line| line == *name))
        {
            return Ok(());
        }
        let file = images::find(archive)?;
        self.ctr(["images", "import", "--snapshotter", "ramet"])
            .arg(file)
            .succeed()
            .map(drop)
    }

    /// Removes an image and waits until what it alone held is collected.
    pub fn remove_image(&self, image: &str) -> Result<()> {
        self.ctr(["images", "rm", "--sync", image]).succeed().map(drop)
    }

    /// Ids in a table printed by ctr: the first column without its header.
    pub fn column(&self, arguments: &[&str]) -> Result<Vec<String>> {
        let table = self.ctr(arguments.iter().copied()).succeed()?;
        let first = |line: &String| line.split_whitespace().next().map(str::to_owned);
        Ok(table.lines().iter().skip(1).filter_map(first).collect())
    }

    /// State of a task (`RUNNING`, `STOPPED`, …); `None` when there is no such task.
    pub fn task_status(&self, id: &str) -> Result<Option<String>> {
        let table = self.ctr(["tasks", "ls"]).succeed()?;
        let row = table
            .lines()
            .into_iter()
            .find(|line| line.split_whitespace().next() == Some(id));
        Ok(row.and_then(|line| line.split_whitespace().nth(2).map(str::to_owned)))
    }

    /// Process id that containerd knows a task by.
    pub fn task_pid(&self, id: &str) -> Result<u32> {
        let table = self.ctr(["tasks", "ls"]).succeed()?;
        for line in table.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let [name, pid, ..] = fields[..]
                && name == id
            {
                return pid.parse().with_context(|| format!("{pid:?} is not a process id"));
            }
        }
        bail!("there is no task {id}; tasks:\n{}", table.out())
    }

    /// Size of an image's blobs on this node, in bytes, from its manifest.
    pub fn manifest(&self, image: &str) -> Result<serde_json::Value> {
        let table = self.ctr(["images", "ls"]).succeed()?;
        let row = table
            .lines()
            .into_iter()
            .find(|line| line.split_whitespace().next() == Some(image));
        let row = row.with_context(|| format!("there is no image {image}"))?;
        let digest = row.split_whitespace().find(|word| word.starts_with("sha256:"));
        let digest = digest.with_context(|| format!("no digest in {row:?}"))?;
        let content = self.ctr(["content", "get", digest]).succeed()?;
        serde_json::from_slice(&content.stdout).with_context(|| format!("manifest of {image}"))
    }
}

static BASELINE: OnceLock<Leftovers> = OnceLock::new();
