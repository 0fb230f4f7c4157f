//! A containerd and a snapshotter of one's own: empty stores, killable daemons, no trace of them afterwards.

use std::ffi::OsString;
use std::fs::{self, File};
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::command::{tail, wait_within};
use crate::node::Node;
use crate::{signals, wait_until};

/// A node whose daemons belong to this process and whose files lie in one directory; both are gone when it is dropped.
pub struct PrivateNode {
    node: Node,
    directory: PathBuf,
    environment: Vec<(String, OsString)>,
    containerd: Option<Child>,
    snapshotter: Option<Child>,
}

impl Deref for PrivateNode {
    type Target = Node;
    fn deref(&self) -> &Node {
        &self.node
    }
}

impl PrivateNode {
    /// Starts both daemons under `directory`, which is made, and must be short enough for socket paths.
    pub fn start(directory: &Path) -> Result<Self> {
        Self::start_with(directory, &[])
    }

    /// The same with more in the environment of both daemons, which shims and VMMs inherit. With any of it, the logs of VMMs and
    /// the consoles of guests are kept in [`Self::log_directory`].
    pub fn start_with(directory: &Path, environment: &[(&str, &str)]) -> Result<Self> {
        if directory.as_os_str().len() > 60 {
            bail!(
                "{} is too long a path for the sockets in it: at most 60 bytes",
                directory.display()
            );
        }
        fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        fs::write(directory.join("containerd.toml"), containerd_config(directory))?;
        let node = Node::new(directory.join("c.sock"), "default", directory.join("snapshotter"));
        let log_directory = directory.join("logs");
        let mut environment: Vec<(String, OsString)> = environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.into()))
            .collect();
        if !environment.is_empty() {
            fs::create_dir_all(&log_directory).with_context(|| format!("creating {}", log_directory.display()))?;
            environment.push(("RAMET_LOG_DIR".into(), log_directory.into()));
        }
        let mut private = Self {
            node,
            directory: directory.into(),
            environment,
            containerd: None,
            snapshotter: None,
        };
        private.start_snapshotter()?;
        private.start_containerd()?;
        Ok(private)
    }

    /// Starts containerd (again).
    pub fn start_containerd(&mut self) -> Result<()> {
        let mut command = Command::new("containerd");
        command.arg("--config").arg(self.directory.join("containerd.toml"));
        self.containerd = Some(self.daemon(command, "containerd.log")?);
        let ready = wait_until(crate::DEADLINE, || {
            self.node
                .ctr(["version"])
                .deadline(Duration::from_secs(20))
                .finish()
                .is_ok_and(|done| done.code == 0)
        });
        self.check(ready, "containerd")
    }

    /// Starts the snapshotter (again).
    pub fn start_snapshotter(&mut self) -> Result<()> {
        let mut command = Command::new("ramet-snapshotter");
        command.arg("--root").arg(self.directory.join("snapshotter"));
        command.arg("--address").arg(self.directory.join("s.sock"));
        self.snapshotter = Some(self.daemon(command, "snapshotter.log")?);
        let socket = self.directory.join("s.sock");
        let ready = wait_until(Duration::from_secs(30), || UnixStream::connect(&socket).is_ok());
        self.check(ready, "snapshotter")
    }

    /// Ends containerd with this signal and waits for its end.
    pub fn stop_containerd(&mut self, signal: Signal) -> Result<()> {
        stop(self.containerd.take(), signal)
    }

    /// Ends the snapshotter with this signal and waits for its end.
    pub fn stop_snapshotter(&mut self, signal: Signal) -> Result<()> {
        stop(self.snapshotter.take(), signal)
    }

    /// The last lines of a daemon's log: `containerd` or `snapshotter`.
    #[must_use]
    pub fn log(&self, daemon: &str) -> String {
        tail(&fs::read_to_string(self.directory.join(format!("{daemon}.log"))).unwrap_or_default())
    }

    /// A daemon's whole log.
    pub fn whole_log(&self, daemon: &str) -> Result<String> {
        let path = self.directory.join(format!("{daemon}.log"));
        let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Where shims leave what their VMMs and guests wrote.
    #[must_use]
    pub fn log_directory(&self) -> PathBuf {
        self.directory.join("logs")
    }

    fn daemon(&self, mut command: Command, log: &str) -> Result<Child> {
        let path = self.directory.join(log);
        let file = File::options().create(true).append(true).open(&path)?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .envs(self.environment.iter().cloned())
            .process_group(0);
        command
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))
    }

    fn check(&self, ready: bool, daemon: &str) -> Result<()> {
        if !ready {
            bail!(
                "{daemon} under {} does not answer; its log:\n{}",
                self.directory.display(),
                self.log(daemon)
            );
        }
        Ok(())
    }

    fn remove_containers(&self) {
        for id in self.node.column(&["containers", "ls"]).unwrap_or_default() {
            let _ = self.node.ctr(["tasks", "rm", "--force", &id]).finish();
            let _ = self.node.ctr(["containers", "rm", &id]).finish();
        }
    }
}

impl Drop for PrivateNode {
    fn drop(&mut self) {
        if self.containerd.is_some() && self.snapshotter.is_some() {
            self.remove_containers();
        }
        let _ = self.stop_containerd(Signal::SIGTERM);
        let _ = self.stop_snapshotter(Signal::SIGTERM);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let below = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        for point in below
            .filter(|point| Path::new(point).starts_with(&self.directory))
            .collect::<Vec<_>>()
            .iter()
            .rev()
        {
            let _ = nix::mount::umount2(*point, nix::mount::MntFlags::MNT_DETACH);
        }
        if std::env::var_os("RAMET_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

fn stop(child: Option<Child>, signal: Signal) -> Result<()> {
    let Some(mut child) = child else { return Ok(()) };
    signals::signal(child.id(), signal);
    if wait_within(&mut child, Duration::from_secs(30))?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(())
}

/// The lab's configuration, with everything in one directory.
fn containerd_config(directory: &Path) -> String {
    let shared = include_str!("../lab/containerd.toml");
    let socket = directory.join("s.sock").display().to_string();
    let shared = shared.replace("/run/ramet-snapshotter/snapshotter.sock", &socket);
    let directory = directory.display();
    // Keys come before tables.
    format!(
        "root = \"{directory}/root\"\nstate = \"{directory}/state\"\n{shared}\n\
         [grpc]\n  address = \"{directory}/c.sock\"\n[ttrpc]\n  address = \"{directory}/t.sock\"\n"
    )
}
