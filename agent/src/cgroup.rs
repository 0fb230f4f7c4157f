//! The control groups of the containers: `/ramet/<id>` in the guest's cgroup2 hierarchy.

use std::fs;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{AgentError, Result};

/// Where cgroup2 is mounted.
pub const MOUNT: &str = "/sys/fs/cgroup";

/// Parent of every container's group, under [`MOUNT`].
pub const PARENT: &str = "ramet";

/// Deepest nesting of groups: a container's own and those that it makes itself. The kernel refuses more.
const MAX_DEPTH: usize = 16;

/// One control group.
#[derive(Clone, Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// The group above all containers.
    pub fn all() -> Self {
        Self(Path::new(MOUNT).join(PARENT))
    }

    /// The group of a container; the id is valid already.
    pub fn of_container(id: &str) -> Self {
        Self(Path::new(MOUNT).join(PARENT).join(id))
    }

    /// What goes into a spec's `cgroupsPath`.
    pub fn spec_path(id: &str) -> String {
        format!("/{PARENT}/{id}")
    }

    /// Bounds what containers make below this group, so that it can be removed.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn limit_depth(&self) -> io::Result<()> {
        fs::write(self.0.join("cgroup.max.depth"), MAX_DEPTH.to_string())
    }

    /// Leaves the agent room to make processes, whatever the containers do. `threads` and `pids` are what the kernel takes.
    ///
    /// # Errors
    /// When the kernel refuses. A kernel that cannot count processes is no error.
    pub fn limit_pids(&self, threads: u64, pids: u64) -> io::Result<()> {
        match fs::write(self.0.join("pids.max"), most_pids(threads, pids).to_string()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Every process in the group and below it.
    ///
    /// # Errors
    /// When the group does not exist.
    pub fn pids(&self) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        collect_pids(&self.0, 0, &mut pids).map_err(|error| self.failed("list the processes of", error))?;
        Ok(pids)
    }

    /// Kills every process in the group and below it, frozen or not. A group that is gone has none.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(&self) -> Result<()> {
        match fs::write(self.0.join("cgroup.kill"), "1") {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.failed("kill", error)),
            _ => Ok(()),
        }
    }

    /// Freezes or thaws the group and everything below it, and waits until that has happened.
    ///
    /// # Errors
    /// When the kernel refuses, or after `deadline`; then the group is as it was asked to become, later.
    pub async fn set_frozen(&self, frozen: bool, deadline: Duration) -> Result<()> {
        fs::write(self.0.join("cgroup.freeze"), if frozen { "1" } else { "0" })
            .map_err(|error| self.failed("freeze", error))?;
        let wanted = u64::from(frozen);
        self.wait("cgroup.events", deadline, |text| {
            (value(text, "frozen")? == wanted).then_some(())
        })
        .await
    }

    /// Waits until no process is left.
    ///
    /// # Errors
    /// After `deadline`.
    pub async fn wait_empty(&self, deadline: Duration) -> Result<()> {
        if !self.0.exists() {
            return Ok(());
        }
        self.wait("cgroup.events", deadline, |text| {
            (value(text, "populated")? == 0).then_some(())
        })
        .await
    }

    /// Removes the group and those below it. A group that is gone is no error.
    ///
    /// # Errors
    /// While processes are left.
    pub fn remove(&self) -> Result<()> {
        match remove(&self.0, 0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.failed("remove", error)),
            _ => Ok(()),
        }
    }

    /// How many processes the OOM killer has taken.
    pub fn oom_kills(&self) -> u64 {
        fs::read_to_string(self.0.join("memory.events"))
            .ok()
            .and_then(|text| value(&text, "oom_kill"))
            .unwrap_or(0)
    }

    /// Returns when the OOM killer has taken more than `seen` processes.
    ///
    /// # Errors
    /// When the group goes away.
    pub async fn wait_oom(&self, seen: u64) -> Result<u64> {
        self.wait("memory.events", Duration::MAX, |text| {
            value(text, "oom_kill").filter(|&count| count > seen)
        })
        .await
    }

    /// Reads a file of the group; empty when it does not exist.
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap_or_default()
    }

    async fn wait<T>(&self, name: &str, deadline: Duration, check: impl Fn(&str) -> Option<T>) -> Result<T> {
        let path = self.0.join(name);
        match tokio::time::timeout(deadline, wait_for(&path, check)).await {
            Ok(result) => result.map_err(|error| self.failed("watch", error)),
            Err(_) => Err(AgentError::Timeout(format!("wait for {}", path.display()))),
        }
    }

    fn failed(&self, what: &str, error: io::Error) -> AgentError {
        AgentError::io(format!("{what} control group {}", self.0.display()), error)
    }
}

/// Waits for a file that the kernel signals with `POLLPRI` to say what `check` wants.
async fn wait_for<T>(path: &Path, check: impl Fn(&str) -> Option<T>) -> io::Result<T> {
    let file = crate::sys::register_priority(fs::File::open(path)?)?;
    loop {
        let mut text = String::new();
        let mut handle = file.get_ref();
        handle.rewind()?;
        handle.read_to_string(&mut text)?;
        if let Some(found) = check(&text) {
            return Ok(found);
        }
        file.ready(tokio::io::Interest::PRIORITY).await?.clear_ready();
    }
}

/// The number behind `key` in a file of `key value` lines.
pub fn value(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// A quarter is kept for the kernel's threads and the agent, within reason.
fn most_pids(threads: u64, pids: u64) -> u64 {
    let all = threads.min(pids);
    all.saturating_sub((all / 4).clamp(128, 1024)).max(1)
}

fn collect_pids(directory: &Path, depth: usize, pids: &mut Vec<u32>) -> io::Result<()> {
    let procs = fs::read_to_string(directory.join("cgroup.procs"))?;
    pids.extend(procs.lines().filter_map(|line| line.trim().parse::<u32>().ok()));
    if depth < MAX_DEPTH {
        for child in child_groups(directory)? {
            match collect_pids(&child, depth + 1, pids) {
                Err(error) if !is_passed_over(&error) => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// A group that is gone; or a threaded one, whose processes its parent lists.
fn is_passed_over(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENODEV))
}

fn remove(directory: &Path, depth: usize) -> io::Result<()> {
    if depth < MAX_DEPTH {
        for child in child_groups(directory)? {
            remove(&child, depth + 1)?;
        }
    }
    fs::remove_dir(directory)
}

fn child_groups(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut children = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            children.push(entry.path());
        }
    }
    Ok(children)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_their_whole_key() {
        let text = "oom 4\noom_kill 7\noom_group_kill 1\n";
        assert_eq!(value(text, "oom"), Some(4));
        assert_eq!(value(text, "oom_kill"), Some(7));
        assert_eq!(value(text, "kill"), None);
        assert_eq!(value("oom x\n", "oom"), None);
    }

    #[test]
    fn the_agent_keeps_room_for_processes() {
        assert_eq!(most_pids(512, 32768), 384);
        assert_eq!(most_pids(1_000_000, 32768), 31744);
        assert_eq!(most_pids(100, 32768), 1);
        let root = tempfile::tempdir().expect("a directory");
        let group = Cgroup(root.path().into());
        group.limit_pids(4096, 32768).expect("a file");
        assert_eq!(group.read("pids.max"), "3072");
        group.limit_depth().expect("a file");
        assert_eq!(group.read("cgroup.max.depth"), "16");
        assert!(Cgroup(root.path().join("gone")).limit_pids(4096, 4096).is_ok());
    }

    #[test]
    fn threaded_groups_of_a_container_hide_nothing() {
        assert!(is_passed_over(&io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
        assert!(is_passed_over(&io::Error::from_raw_os_error(libc::ENOENT)));
        assert!(!is_passed_over(&io::Error::from_raw_os_error(libc::EACCES)));
    }

    #[test]
    fn pids_of_nested_groups_are_collected_and_groups_removed() {
        let root = tempfile::tempdir().expect("a directory");
        let group = Cgroup(root.path().join("c"));
        let inner = group.path().join("inner");
        fs::create_dir_all(&inner).expect("a directory");
        fs::write(group.path().join("cgroup.procs"), "3\n4\n").expect("a file");
        fs::write(inner.join("cgroup.procs"), "5\n").expect("a file");
        assert_eq!(group.pids().expect("three"), [3, 4, 5]);
        // Here the files keep the directories; in cgroup2 they do not count.
        fs::remove_file(group.path().join("cgroup.procs")).expect("it is there");
        fs::remove_file(inner.join("cgroup.procs")).expect("it is there");
        group.remove().expect("empty");
        group.remove().expect("gone is fine");
    }
}
