//! Running containers by `ctr run`, and removing them whatever happens.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command::{Finished, Invocation};
use crate::node::{Node, Runtime};
use crate::session::Session;
use crate::wait_until;

/// A fresh container id that says which test it belongs to.
#[must_use]
pub fn fresh_id(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!(
        "{prefix}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// A `ctr run` being put together.
#[derive(Clone, Debug)]
pub struct Run {
    node: Node,
    runtime: Runtime,
    image: String,
    id: String,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    command: Vec<String>,
    stdin: Vec<u8>,
    deadline: Duration,
}

impl Node {
    /// A container of this image with this command; an empty command means the image's own.
    #[must_use]
    pub fn run(&self, runtime: Runtime, image: &str, command: &[&str]) -> Run {
        Run {
            node: self.clone(),
            runtime,
            image: image.into(),
            id: fresh_id("t"),
            flags: Vec::new(),
            environment: Vec::new(),
            command: command.iter().map(|part| (*part).to_owned()).collect(),
            stdin: Vec::new(),
            deadline: crate::DEADLINE,
        }
    }

    /// A guard for a container that is made by other means.
    #[must_use]
    pub fn container(&self, id: &str) -> Container {
        Container {
            node: self.clone(),
            id: id.into(),
            removed: false,
        }
    }

    /// `sh -c SCRIPT` in busybox.
    #[must_use]
    pub fn sh(&self, runtime: Runtime, script: &str) -> Run {
        self.run(runtime, crate::images::BUSYBOX, &["sh", "-c", script])
    }
}

impl Run {
    /// Its id.
    #[must_use]
    pub fn id(mut self, id: &str) -> Self {
        self.id = id.into();
        self
    }

    /// Adds a flag of `ctr run`.
    #[must_use]
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Sets an environment variable of ctr itself.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// What its stdin holds.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// How long it may take.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    fn invocation(&self, extra: &str) -> Invocation {
        let mut invocation = self
            .node
            .ctr([
                "run",
                extra,
                "--runtime",
                self.runtime.name(),
                "--snapshotter",
                self.runtime.snapshotter(),
            ])
            .args(&self.flags)
            .args([&self.image, &self.id])
            .args(&self.command)
            .stdin(self.stdin.clone())
            .deadline(self.deadline);
        for (name, value) in &self.environment {
            invocation = invocation.env(name, value);
        }
        invocation
    }

    fn guard(&self) -> Container {
        self.node.container(&self.id)
    }

    /// Runs it in the foreground and removes it (`--rm`), whatever its exit code.
    pub fn finish(self) -> Result<Finished> {
        let guard = self.guard();
        let done = self.invocation("--rm").finish()?;
        if done.code == 0 {
            guard.is_gone();
        }
        Ok(done)
    }

    /// Like [`Self::finish`]; exit code 0 is expected.
    pub fn succeed(self) -> Result<Finished> {
        self.finish()?.expect_code(0)
    }

    /// Runs it in the background (`-d`).
    pub fn detach(self) -> Result<Container> {
        let guard = self.guard();
        self.invocation("-d").succeed()?;
        Ok(guard)
    }

    /// Runs it in the foreground with stdin and stdout to talk to, `--rm`.
    pub fn session(self) -> Result<(Session, Container)> {
        let guard = self.guard();
        Ok((Session::start(&self.invocation("--rm"))?, guard))
    }
}

/// A container that is killed and removed, snapshot and all, when this is dropped.
#[derive(Debug)]
pub struct Container {
    node: Node,
    id: String,
    removed: bool,
}

impl Container {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Nothing is left to remove.
    pub fn is_gone(mut self) {
        self.removed = true;
    }

    /// Runs a command in it.
    #[must_use]
    pub fn exec(&self, command: &[&str]) -> Invocation {
        self.node
            .ctr(["tasks", "exec", "--exec-id", &fresh_id("x"), &self.id])
            .args(command.iter().copied())
    }

    /// Sends a signal to its init process.
    pub fn kill(&self, signal: &str) -> Result<Finished> {
        self.node.ctr(["tasks", "kill", "--signal", signal, &self.id]).succeed()
    }

    /// Waits until its task is in this state.
    pub fn wait_for(&self, status: &str) -> Result<()> {
        let mut last = String::new();
        if wait_until(crate::DEADLINE, || {
            last = format!("{:?}", self.node.task_status(&self.id));
            last.contains(status)
        }) {
            return Ok(());
        }
        bail!("task {} is {last} instead of {status}", self.id)
    }

    /// Deletes its stopped task and returns the exit code that it had.
    pub fn delete_task(&self) -> Result<i32> {
        let done = self.node.ctr(["tasks", "rm", &self.id]).succeed()?;
        // ctr says it in a warning, and only if it is not 0.
        let said = done.err();
        let code: Option<String> = said
            .split_once("exit code ")
            .map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect());
        code.map_or(Ok(0), |code| {
            code.parse().with_context(|| format!("no exit code in {said:?}"))
        })
    }

    /// Kills and removes it; an error if that does not work.
    pub fn remove(mut self) -> Result<()> {
        self.removed = true;
        let _ = self.node.ctr(["tasks", "rm", "--force", &self.id]).finish()?;
        self.node.ctr(["containers", "rm", &self.id]).succeed().map(drop)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if !self.removed {
            let _ = self.node.ctr(["tasks", "rm", "--force", &self.id]).finish();
            let _ = self.node.ctr(["containers", "rm", &self.id]).finish();
        }
    }
}
