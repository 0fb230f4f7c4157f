//! `/run/ramet`: what is on disk while a sandbox lives.
//!
//! ```text
//! /run/ramet/s/<hash>            the shim's socket
//! /run/ramet/<ns>/<id>/shim.pid  pid and start time of the shim
//!                      vmm.pid   pid and start time of the VMM
//!                      vmm.log   what the VMM wrote on standard error
//!                      console   the guest's serial console
//! ```
//!
//! A pid alone may be somebody else's by the time it is read; with the start time of the process (field 22 of
//! `/proc/<pid>/stat`) it is a name.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The root; `RAMET_RUN_DIR` overrides it for tests.
#[must_use]
pub fn root() -> PathBuf {
    std::env::var_os("RAMET_RUN_DIR").map_or_else(|| PathBuf::from("/run/ramet"), PathBuf::from)
}

/// Path of the socket of the sandbox `group`.
#[must_use]
pub fn socket_path(address: &str, namespace: &str, group: &str) -> PathBuf {
    let digest = Sha256::digest(format!("{address}/{namespace}/{group}"));
    let name: String = digest.iter().take(16).map(|b| format!("{b:02x}")).collect();
    root().join("s").join(name)
}

/// The directory of one sandbox.
#[derive(Clone, Debug)]
pub struct StateDir(PathBuf);

impl StateDir {
    /// Its path; nothing is made.
    #[must_use]
    pub fn new(namespace: &str, id: &str) -> Self {
        Self(root().join(namespace).join(id))
    }

    /// Makes it, readable by root only.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn create(&self) -> std::io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let make = || fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        // The last sandbox of the namespace may be removing the directory above at this moment.
        (0..8)
            .find_map(|_| match make() {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                made => Some(made),
            })
            .unwrap_or_else(make)
    }

    /// A path in it.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The console's path.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.join("console")
    }

    /// Notes a process.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_process(&self, name: &str, pid: u32) -> std::io::Result<()> {
        let mark = ProcessMark {
            pid,
            start_time: start_time(pid).unwrap_or(0),
        };
        let text = serde_json::to_vec(&mark)?;
        let temporary = self.join(&format!(".{name}"));
        fs::write(&temporary, text)?;
        fs::rename(temporary, self.join(name))
    }

    /// The process that was noted, if it still lives.
    #[must_use]
    pub fn live_process(&self, name: &str) -> Option<ProcessMark> {
        let mut text = String::new();
        fs::File::open(self.join(name))
            .ok()?
            .take(256)
            .read_to_string(&mut text)
            .ok()?;
        let mark: ProcessMark = serde_json::from_str(&text).ok()?;
        mark.lives().then_some(mark)
    }

    /// Removes it and, if that was the last sandbox of its namespace, the directory above.
    pub fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
        if let Some(namespace) = self.0.parent() {
            let _ = fs::remove_dir(namespace);
        }
    }
}

/// A process that cannot be mistaken for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMark {
    /// Pid.
    pub pid: u32,
    /// In clock ticks after boot.
    pub start_time: u64,
}

impl ProcessMark {
    /// Whether it is still there and not a zombie.
    #[must_use]
    pub fn lives(&self) -> bool {
        self.pid > 1 && start_time(self.pid) == Some(self.start_time)
    }

    /// Waits for its end.
    #[must_use]
    pub fn wait_gone(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.lives() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    /// SIGKILL, and waits a little.
    pub fn kill(&self) {
        if self.lives() {
            let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL);
            let _ = self.wait_gone(Duration::from_secs(2));
        }
    }
}

/// Start time of a process that is not a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_start_time(&stat)
}

fn parse_start_time(stat: &str) -> Option<u64> {
    // The name in parentheses may hold anything, so count from the last one.
    let rest = stat.get(stat.rfind(')')? + 1..)?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The last `bytes` of a text file, in one line, control characters replaced.
#[must_use]
pub fn tail(path: &Path, bytes: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut data = Vec::new();
        file.take(bytes).read_to_end(&mut data)?;
        Ok(data)
    };
    let data = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&data);
    let lines: Vec<String> = text
        .lines()
        .map(|line| {
            line.chars()
                .filter(|c| !c.is_control())
                .collect::<String>()
                .trim()
                .to_owned()
        })
        .filter(|line| !line.is_empty())
        .collect();
    lines.join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn knows_itself() {
        let me = std::process::id();
        let mark = ProcessMark {
            pid: me,
            start_time: start_time(me).unwrap(),
        };
        assert!(mark.lives());
        assert!(
            !ProcessMark {
                pid: me,
                start_time: mark.start_time + 1
            }
            .lives()
        );
    }

    #[test]
    fn stat_with_a_hostile_name() {
        let stat = "42 (a) R 1) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 1 1";
        assert_eq!(parse_start_time(stat), Some(777));
        let zombie = stat.replace(") S", ") Z");
        assert_eq!(parse_start_time(&zombie), None);
    }

    #[test]
    fn socket_paths_are_short_and_distinct() {
        let a = socket_path("/run/containerd/containerd.sock", "default", "a");
        assert!(a.as_os_str().len() < 90);
        assert_ne!(a, socket_path("/run/containerd/containerd.sock", "default", "b"));
    }

    proptest! {
        #[test]
        fn stat_parser_never_panics(text in ".{0,80}") { let _ = parse_start_time(&text); }
    }
}
