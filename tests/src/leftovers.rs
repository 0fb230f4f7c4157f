//! What a run left behind: everything that was not there before, by kind.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::node::Node;
use crate::wait_until;

/// A list of what is on a node, one line each: `kind: name`.
#[derive(Clone, Debug, Default)]
pub struct Leftovers(BTreeSet<String>);

impl Leftovers {
    /// What is there now.
    #[must_use]
    pub fn take(node: &Node) -> Self {
        let mut found = Self::on_the_host();
        found.in_containerd(node);
        found
    }

    /// What is there beyond the baseline, after waiting a while for things to go away by themselves.
    #[must_use]
    pub fn settle(node: &Node, baseline: &Self) -> Vec<String> {
        let mut rest = Vec::new();
        // The cheap part first: containerd is asked only when processes and files are gone.
        wait_until(Duration::from_secs(30), || {
            Self::on_the_host().beyond(baseline).is_empty()
        });
        wait_until(Duration::from_secs(20), || {
            rest = Self::take(node).beyond(baseline);
            rest.is_empty()
        });
        rest
    }

    /// The lines that the other list does not have.
    #[must_use]
    pub fn beyond(&self, baseline: &Self) -> Vec<String> {
        self.0.difference(&baseline.0).cloned().collect()
    }

    fn on_the_host() -> Self {
        let mut found = Self::default();
        found.processes();
        found.mounts();
        found.network();
        for directory in ["/run/ramet", "/run/containerd/s", "/run/netns"] {
            for file in files_below(Path::new(directory)) {
                found.note("file", file.display());
            }
            // The directory of sockets stays, like containerd's own beside it: removing it would race with the next start.
            found.0.remove("file: /run/ramet/s");
        }
        for directory in ["/tmp", "/var/tmp"] {
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                found.note("temporary file", entry.path().display());
            }
        }
        found
    }

    fn note(&mut self, kind: &str, name: impl std::fmt::Display) {
        self.0.insert(format!("{kind}: {name}"));
    }

    fn processes(&mut self) {
        for process in processes() {
            let ours = ["ramet-vmm", "containerd-shim", "runc"]
                .iter()
                .any(|name| process.command.starts_with(name));
            if ours && process.state != 'Z' {
                self.note("process", format_args!("{} {}", process.pid, process.command));
            }
        }
    }

    fn mounts(&mut self) {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for line in table.lines() {
            if let Some(point) = line.split(' ').nth(4) {
                self.note("mount", point);
            }
        }
    }

    fn network(&mut self) {
        for entry in fs::read_dir("/sys/class/net").into_iter().flatten().flatten() {
            self.note("network interface", entry.file_name().to_string_lossy());
        }
    }

    fn in_containerd(&mut self, node: &Node) {
        for (kind, arguments) in [
            ("container", &["containers", "ls"][..]),
            ("image", &["images", "ls"]),
            ("content", &["content", "ls"]),
            ("lease", &["leases", "ls"]),
            ("snapshot of ramet", &["snapshots", "--snapshotter", "ramet", "ls"]),
            (
                "snapshot of overlayfs",
                &["snapshots", "--snapshotter", "overlayfs", "ls"],
            ),
        ] {
            match node.column(arguments) {
                Ok(names) => names.iter().for_each(|name| self.note(kind, name)),
                Err(error) => self.note(kind, format_args!("cannot be listed: {error}")),
            }
        }
        for entry in fs::read_dir(node.snapshotter_root().join("snapshots"))
            .into_iter()
            .flatten()
            .flatten()
        {
            self.note("snapshot directory", entry.path().display());
        }
    }
}

/// A process, as /proc tells it.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its name, at most 15 bytes.
    pub command: String,
    /// `R`, `S`, `Z`, …
    pub state: char,
}

/// All processes.
#[must_use]
pub fn processes() -> Vec<Process> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some((command, rest)) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')) {
            let state = rest.trim_start().chars().next().unwrap_or('?');
            found.push(Process {
                pid,
                command: command.to_owned(),
                state,
            });
        }
    }
    found
}

/// The VMMs that run now.
#[must_use]
pub fn vmms() -> Vec<u32> {
    let is_vmm = |process: &Process| process.command == crate::node::VMM && process.state != 'Z';
    processes()
        .into_iter()
        .filter(is_vmm)
        .map(|process| process.pid)
        .collect()
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files_below(&path));
        }
        found.push(path);
    }
    found
}
