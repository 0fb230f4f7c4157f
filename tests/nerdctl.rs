//! What nerdctl's users do, without networks and volumes. `cargo xtask lab test nerdctl::` builds nerdctl and takes it along.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::container::fresh_id;
use e2e::images::BUSYBOX;
use e2e::{Invocation, Node, Runtime, Session};

use crate::support::ANSWER;

/// `nerdctl` with the snapshotter of a runtime.
fn nerdctl(runtime: Runtime, arguments: &[&str]) -> Invocation {
    Invocation::new("nerdctl")
        .args(["--namespace", "default", "--snapshotter", runtime.snapshotter()])
        .args(arguments.iter().copied())
}

/// A container of nerdctl's, removed when this is dropped.
struct Container {
    runtime: Runtime,
    name: String,
}

impl Container {
    fn new(runtime: Runtime) -> Self {
        Node::shared();
        Self {
            runtime,
            name: fresh_id("n"),
        }
    }

    /// `nerdctl run FLAGS IMAGE COMMAND`, without a network.
    fn run(&self, flags: &[&str], command: &[&str]) -> Invocation {
        let fixed = [
            "run",
            "--net=none",
            "--runtime",
            self.runtime.name(),
            "--name",
            &self.name,
        ];
        nerdctl(self.runtime, &fixed)
            .args(flags.iter().copied())
            .arg(BUSYBOX)
            .args(command.iter().copied())
    }

    /// `nerdctl VERB NAME …`.
    fn call(&self, verb: &[&str], after: &[&str]) -> Invocation {
        nerdctl(self.runtime, verb).arg(&self.name).args(after.iter().copied())
    }

    /// `nerdctl exec NAME COMMAND`.
    fn exec(&self, command: &[&str]) -> Invocation {
        self.call(&["exec"], command)
    }

    /// What `nerdctl inspect` says of its state: status and exit code.
    fn state(&self) -> Result<(String, i64)> {
        let done = self.call(&["container", "inspect"], &[]).succeed()?;
        let all: serde_json::Value = serde_json::from_slice(&done.stdout)?;
        let state = all.pointer("/0/State").with_context(|| format!("no state in {all}"))?;
        let status = state["Status"].as_str().unwrap_or_default().to_owned();
        Ok((status, state["ExitCode"].as_i64().unwrap_or(-1)))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.call(&["rm", "--force"], &[]).finish();
    }
}

with_each_runtime! {
    fn run_prints_and_takes_the_usual_flags(runtime) {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("env");
        fs::write(&file, "COLOUR=green\nSHAPE=round\n")?;
        let env_file = format!("--env-file={}", file.display());
        let script = "echo $COLOUR $SHAPE $SIZE; id -u; id -G; ulimit -n; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; \
            df -k /dev/shm | tail -n 1 | awk '{print $2}'; touch /x 2>/dev/null || echo read-only; touch /data/x && echo written; \
            grep Seccomp: /proc/self/status | cut -f2; pwd; exit 6";
        let container = Container::new(runtime);
        let flags = [
            "--rm", &env_file, "--env=SIZE=big", "--user=worker", "--group-add=50", "--ulimit=nofile=300:400",
            "--sysctl=net.ipv4.ip_unprivileged_port_start=81", "--shm-size=32m", "--read-only", "--tmpfs=/data:mode=1777",
            "--memory=128m", "--cpus=0.5", "--workdir=/tmp",
        ];
        let done = container.run(&flags, &["sh", "-c", script]).finish()?.expect_code(6)?;
        let lines = done.lines();
        let mut groups: Vec<&str> = lines.get(2).map(|line| line.split(' ').collect()).unwrap_or_default();
        groups.sort_unstable();
        ensure!(groups == ["1000", "29", "50"], "{groups:?}");
        let rest: Vec<&str> = lines.iter().enumerate().filter(|(n, _)| *n != 2).map(|(_, line)| line.as_str()).collect();
        ensure!(rest == ["green round big", "1000", "300", "81", "32768", "read-only", "written", "2", "/tmp"], "{lines:?}");
        Ok(())
    }

    fn a_background_container_is_followed_entered_paused_and_stopped(runtime) {
        let container = Container::new(runtime);
        let script = "trap 'echo bye; exit 5' TERM; echo started; echo problem >&2; while :; do sleep 0.2; done";
        container.run(&["-d", "--memory=64m"], &["sh", "-c", script]).succeed()?;
        let logs = || container.call(&["logs"], &[]).succeed();
        ensure!(e2e::wait_until(ANSWER, || logs().is_ok_and(|done| done.out() == "started\n" && done.err().contains("problem"))), "{:?}", logs());
        let mut follower = Session::start(&container.call(&["logs", "-f"], &[]))?;
        ensure!(follower.line(ANSWER)? == "started");
        let done = container.exec(&["sh", "-c", "echo entered; exit 3"]).finish()?;
        // nerdctl itself ends with 1.
        ensure!(done.out() == "entered\n" && done.err().contains("exit code 3"), "{done:?}");
        let stats = container.call(&["stats", "--no-stream"], &[]).succeed()?;
        ensure!(stats.out().contains("64MiB"), "{}", stats.out());
        let top = container.call(&["top"], &[]).succeed()?;
        ensure!(top.lines().len() >= 2, "{}", top.out());
        container.call(&["pause"], &[]).succeed()?;
        ensure!(container.state()?.0 == "paused", "{:?}", container.state());
        ensure!(container.exec(&["true"]).finish()?.code != 0);
        container.call(&["unpause"], &[]).succeed()?;
        ensure!(container.state()?.0 == "running", "{:?}", container.state());
        container.call(&["stop"], &[]).succeed()?;
        ensure!(follower.line(ANSWER)? == "bye");
        ensure!(container.state()? == ("exited".to_owned(), 5), "{:?}", container.state());
        container.call(&["start"], &[]).succeed()?;
        container.call(&["kill"], &[]).succeed()?;
        let over = || container.state().is_ok_and(|state| state == ("exited".to_owned(), 137));
        ensure!(e2e::wait_until(ANSWER, over), "{:?}", container.state());
        Ok(())
    }

    fn a_terminal_is_one(runtime) {
        let container = Container::new(runtime);
        let run = container.run(&["-it", "--rm"], &["sh", "-c", "test -t 0 && until stty size 2>/dev/null; do sleep 0.1; done; read x; echo got $x; exit 4"]);
        let line = format!("stty rows 33 cols 77; exec {}", quoted(&run));
        let mut session = Session::start(&Invocation::new("script").args(["-qec", &line, "/dev/null"]))?;
        let first = session.line(ANSWER)?;
        ensure!(first.trim() == "33 77", "{first:?}");
        session.send("word")?;
        // The terminal echoes what is typed.
        ensure!(session.line(ANSWER)?.trim() == "word");
        let line = session.line(ANSWER)?;
        ensure!(line.trim() == "got word", "{line:?}");
        ensure!(session.wait(ANSWER)? == 4);
        Ok(())
    }
}

/// The command line for a shell.
fn quoted(command: &Invocation) -> String {
    let quote = |word: String| format!("'{}'", word.replace('\'', r"'\''"));
    command.words().into_iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// runc raises it up to the host's memory.
#[test]
fn limits_are_updated_within_the_machine_and_refused_beyond() -> Result<()> {
    let container = Container::new(Runtime::Ramet);
    container.run(&["-d", "--memory=128m"], &["sleep", "1000"]).succeed()?;
    container.call(&["update", "--memory=64m"], &[]).succeed()?;
    let limit = || {
        container
            .call(&["stats", "--no-stream"], &[])
            .succeed()
            .map(|done| done.out())
            .unwrap_or_default()
    };
    ensure!(e2e::wait_until(ANSWER, || limit().contains("64MiB")), "{}", limit());
    let refused = container.call(&["update", "--memory=4g"], &[]).finish()?;
    ensure!(
        refused.code != 0 && refused.err().contains("has room for 128 MiB"),
        "{} {}",
        refused.code,
        refused.err()
    );
    container.exec(&["true"]).succeed()?;
    Ok(())
}

/// Files of a running container are in its guest: nerdctl looks for them in the task's root on the host.
#[test]
fn copying_from_and_to_a_running_container_fails() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("file");
    fs::write(&file, "text")?;
    let container = Container::new(Runtime::Ramet);
    container.run(&["-d"], &["sleep", "1000"]).succeed()?;
    let inside = format!("{}:/etc/passwd", container.name);
    let target = directory.path().join("copy");
    let (target, file) = (target.display().to_string(), file.display().to_string());
    let out = nerdctl(Runtime::Ramet, &["cp", &inside, &target]).finish()?;
    ensure!(out.code != 0 && !std::path::Path::new(&target).exists(), "{out:?}");
    let into = nerdctl(Runtime::Ramet, &["cp", &file, &format!("{}:/tmp/file", container.name)]).finish()?;
    ensure!(into.code != 0, "{into:?}");
    Ok(())
}
