//! What nerdctl's users do. `cargo xtask lab test nerdctl::` builds nerdctl and takes it along.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::container::fresh_id;
use e2e::images::BUSYBOX;
use e2e::{Invocation, Node, Runtime, Session};

use crate::support::ANSWER;

/// Address of this machine on nerdctl's own bridge.
const NERDCTL_GATEWAY: &str = "10.4.0.1";

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
    network: &'static str,
}

impl Container {
    fn new(runtime: Runtime) -> Self {
        Node::shared();
        Self {
            runtime,
            name: fresh_id("n"),
            network: "none",
        }
    }

    /// On nerdctl's own bridge.
    fn on_bridge(runtime: Runtime) -> Self {
        let mut container = Self::new(runtime);
        container.network = "bridge";
        container
    }

    /// `nerdctl run FLAGS IMAGE COMMAND`.
    fn run(&self, flags: &[&str], command: &[&str]) -> Invocation {
        let fixed = [
            "run",
            "--net",
            self.network,
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
            grep Seccomp: /proc/self/status | cut -f2; pwd; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max; exit 6";
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
        ensure!(rest == ["green round big", "1000", "300", "81", "32768", "read-only", "written", "2", "/tmp", "134217728", "50000 100000"], "{lines:?}");
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

    fn a_server_has_a_published_port_and_volumes_both_ways(runtime) {
        let directory = tempfile::tempdir()?;
        let at = |name: &str| directory.path().join(name);
        fs::write(at("in"), "from the host\n")?;
        // Rules of a published port may outlive its container by a moment.
        let port = if runtime.is_vm() { "8070" } else { "8071" };
        let container = Container::on_bridge(runtime);
        let script = "echo inside > /data/out; mkdir /www; cp /data/in /www/page; echo kept > /named/file; exec httpd -f -h /www";
        let (publish, bind) = (format!("-p={port}:80"), format!("-v={}:/data", directory.path().display()));
        let volume = format!("{}-volume", container.name);
        container.run(&["-d", &publish, &bind, &format!("-v={volume}:/named")], &["sh", "-c", script]).succeed()?;
        let inspect = |format: &str| container.call(&["inspect", "-f", format], &[]).succeed().map(|done| done.out().trim().to_owned());
        let address = inspect("{{.NetworkSettings.IPAddress}}")?;
        let inside = container.exec(&["ip", "-4", "-o", "addr", "show", "dev", "eth0"]).succeed()?.out();
        ensure!(!address.is_empty() && inside.contains(&format!("inet {address}/")), "{address:?} {inside:?}");
        for place in [format!("{address}:80"), format!("{NERDCTL_GATEWAY}:{port}")] {
            let get = format!("for i in 1 2 3 4 5 6 7 8 9; do wget -T 20 -qO- http://{place}/page && break; sleep 1; done");
            let got = Invocation::new("busybox").args(["sh", "-c", &get]).succeed()?.out();
            ensure!(got == "from the host\n", "{place}: {got:?}");
        }
        let ports = container.call(&["port"], &[]).succeed()?.out();
        ensure!(ports == format!("80/tcp -> 0.0.0.0:{port}\n"), "{ports:?}");
        ensure!(fs::read_to_string(at("out"))? == "inside\n");
        fs::write(at("in"), "changed\n")?;
        ensure!(container.exec(&["cat", "/data/in", "/named/file", "/etc/hostname"]).succeed()?.out().starts_with("changed\nkept\n"));
        drop(container);
        nerdctl(runtime, &["volume", "rm", &volume]).succeed()?;
        Ok(())
    }

    fn a_commit_has_what_the_container_wrote_and_a_paused_one_is_copied_from(runtime) {
        let container = Container::new(runtime);
        let script = "echo new > /file; rm /bin/ls; mkdir -p /dir/a; ln /file /dir/a/link; ln -s ../file /dir/sym; mkfifo /dir/fifo; \
            chown 1000:29 /dir; chmod 2750 /dir; rm -rf /home; mkdir /home; touch -d '2001-09-09 01:46:40' /dir/a; echo ready; exec sleep 1000";
        container.run(&["-d"], &["sh", "-c", script]).succeed()?;
        let ready = || container.call(&["logs"], &[]).succeed().is_ok_and(|done| done.out().contains("ready"));
        ensure!(e2e::wait_until(ANSWER, ready));
        let image = format!("localhost/{}:committed", container.name);
        container.call(&["commit"], &[&image]).succeed()?;
        ensure!(container.state()?.0 == "running", "{:?}", container.state());
        let look = "cat /file /dir/a/link /dir/sym; test -e /bin/ls || echo removed; stat -c '%a %u %g' /dir; stat -c '%a %h' /file; \
            test -p /dir/fifo && stat -c %Y /dir/a; busybox ls -A /home | wc -l";
        let fixed = ["run", "--rm", "--net=none", "--runtime", runtime.name(), &image, "sh", "-c", look];
        let found = nerdctl(runtime, &fixed).succeed();
        nerdctl(runtime, &["rmi", "-f", &image]).succeed()?;
        let found = found?.lines();
        ensure!(found == ["new", "new", "new", "removed", "2750 1000 29", "644 2", "1000000000", "0"], "{found:?}");
        container.call(&["pause"], &[]).succeed()?;
        let directory = tempfile::tempdir()?;
        let copy = directory.path().join("copy").display().to_string();
        nerdctl(runtime, &["cp", &format!("{}:/file", container.name), &copy]).succeed()?;
        ensure!(fs::read_to_string(&copy)? == "new\n");
        let into = nerdctl(runtime, &["cp", &copy, &format!("{}:/more", container.name)]).finish()?;
        ensure!((into.code != 0) == runtime.is_vm() && into.err().contains("Read-only file system") == runtime.is_vm(), "{into:?}");
        container.call(&["unpause"], &[]).succeed()?;
        Ok(())
    }

    fn two_services_of_compose_talk_by_name(runtime) {
        Node::shared();
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("compose.yaml");
        fs::write(&file, compose(runtime))?;
        let file = file.display().to_string();
        let project = fresh_id("p");
        let compose = |words: &[&str]| nerdctl(runtime, &["compose", "-f", &file, "-p", &project]).args(words.iter().copied());
        let done = talk(&compose);
        let down = compose(&["down", "--volumes"]).succeed();
        done?;
        down?;
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

/// Two services; the second asks the first.
fn compose(runtime: Runtime) -> String {
    let service = format!("    image: {BUSYBOX}\n    runtime: {}\n", runtime.name());
    format!(
        "services:\n  web:\n{service}    command: sh -c 'mkdir /www; echo served > /www/page; exec httpd -f -h /www'\n  \
         client:\n{service}    depends_on: [web]\n    command: sleep 1000\n"
    )
}

/// Starts the services and lets one ask the other.
fn talk(compose: &dyn Fn(&[&str]) -> Invocation) -> Result<()> {
    compose(&["up", "-d"]).succeed()?;
    let listed = compose(&["ps", "-q"]).succeed()?.lines();
    ensure!(listed.len() == 2, "{listed:?}");
    // With nc, because a static busybox crashes when wget looks up the port of "http".
    let get = "for i in 1 2 3 4 5 6 7 8 9; do printf 'GET /page HTTP/1.0\r\n\r\n' | nc -w 20 web 80 > /got; test -s /got && break; sleep 1; done; tail -n 1 /got";
    let got = compose(&["exec", "-T", "client", "sh", "-c", get]).succeed()?.out();
    ensure!(got == "served\n", "{got:?}");
    let logs = compose(&["logs"]).succeed()?;
    ensure!(!logs.out().contains("rror"), "{}", logs.out());
    Ok(())
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
    ensure!(out.err().contains("no such file or directory"), "{}", out.err());
    let into = nerdctl(Runtime::Ramet, &["cp", &file, &format!("{}:/tmp/file", container.name)]).finish()?;
    ensure!(into.code != 0, "{into:?}");
    Ok(())
}
