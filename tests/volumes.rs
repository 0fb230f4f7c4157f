//! Host files and directories in containers: the same tests with runc's shim and with ours.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::container::fresh_id;
use e2e::images::BUSYBOX;
use e2e::{Container, Node, Runtime, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{ANSWER, CheckpointImage};

/// A directory of the host that is removed when this is dropped.
struct Shared(PathBuf);

impl Shared {
    fn new() -> Result<Self> {
        let path = Path::new("/srv").join(fresh_id("shared"));
        fs::create_dir_all(&path).with_context(|| format!("make {}", path.display()))?;
        Ok(Self(path))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, content: &str) -> Result<()> {
        fs::write(self.path(name), content).with_context(|| format!("write {name}"))
    }

    fn read(&self, name: &str) -> Result<String> {
        fs::read_to_string(self.path(name)).with_context(|| format!("read {name}"))
    }

    /// A flag of `ctr run` that binds `source` in it.
    fn bind(&self, source: &str, destination: &str, options: &str) -> String {
        let source = if source.is_empty() {
            self.0.clone()
        } else {
            self.path(source)
        };
        format!(
            "--mount=type=bind,src={},dst={destination},options={options}",
            source.display()
        )
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

with_each_runtime! {
    fn a_directory_is_shared_with_owners_modes_and_links(runtime) {
        let shared = Shared::new()?;
        shared.write("given", "from the host\n")?;
        chown(shared.path("given"), Some(1000), Some(2000))?;
        fs::set_permissions(shared.path("given"), fs::Permissions::from_mode(0o640))?;
        fs::write("/srv/secret", "outside")?;
        symlink("/srv/secret", shared.path("out"))?;
        let script = "cd /data; cat given; stat -c '%u %g %a' given; readlink out; cat out && exit 1
            ls -a | head -2
            echo made > made; chmod 4755 made; chown 7:8 made; mkdir -m 700 dir; mv made dir/moved; ln dir/moved hard
            stat -c '%h' hard; rm given; echo done";
        let run = Node::shared().sh(runtime, script).flag(&shared.bind("", "/data", "rbind:rw"));
        let lines = run.succeed()?.lines();
        ensure!(lines == ["from the host", "1000 2000 640", "/srv/secret", ".", "..", "2", "done"], "{lines:?}");
        let moved = fs::metadata(shared.path("dir/moved"))?;
        ensure!((moved.uid(), moved.gid(), moved.nlink()) == (7, 8, 2));
        ensure!(moved.mode() & 0o7777 == 0o755, "chown did not clear set-uid: {:o}", moved.mode());
        ensure!(fs::metadata(shared.path("dir"))?.mode() & 0o777 == 0o700);
        ensure!(!shared.path("given").exists() && shared.read("hard")? == "made\n");
        Ok(())
    }

    fn a_user_of_the_container_owns_what_it_makes(runtime) {
        let shared = Shared::new()?;
        chown(&shared.0, Some(0), Some(3000))?;
        fs::set_permissions(&shared.0, fs::Permissions::from_mode(0o770))?;
        shared.write("private", "x")?;
        fs::set_permissions(shared.path("private"), fs::Permissions::from_mode(0o600))?;
        let script = "cat /data/private && exit 1; umask 027; echo x > /data/file; mkdir /data/dir; ls /data | wc -l";
        let run = Node::shared().sh(runtime, script).flag("--user=1234:3000").flag(&shared.bind("", "/data", "rbind:rw"));
        ensure!(run.succeed()?.out().trim() == "3");
        for (name, mode) in [("file", 0o640), ("dir", 0o750)] {
            let found = fs::metadata(shared.path(name))?;
            ensure!((found.uid(), found.gid(), found.mode() & 0o777) == (1234, 3000, mode), "{name}: {found:?}");
        }
        Ok(())
    }

    fn changes_are_live_in_both_directions(runtime) {
        let shared = Shared::new()?;
        shared.write("file", "one\n")?;
        let container = Node::shared()
            .sh(runtime, "exec 3>>/data/log; while :; do echo tick >&3; sleep 1; done")
            .flag(&shared.bind("", "/data", "rbind:rw"))
            .flag(&shared.bind("file", "/etc/hosts", "rbind:ro"))
            .detach()?;
        let seen = |path: &str| -> Result<String> { Ok(container.exec(&["cat", path]).succeed()?.out()) };
        ensure!(seen("/data/file")? == "one\n" && seen("/etc/hosts")? == "one\n");
        shared.write("file", "two, longer\n")?;
        ensure!(seen("/data/file")? == "two, longer\n" && seen("/etc/hosts")? == "two, longer\n");
        shared.write("file", "2\n")?;
        ensure!(seen("/data/file")? == "2\n" && seen("/etc/hosts")? == "2\n");
        shared.write("new", "new\n")?;
        ensure!(seen("/data/new")? == "new\n");
        fs::remove_file(shared.path("new"))?;
        container.exec(&["test", "!", "-e", "/data/new"]).succeed()?;
        ensure!(wait_until(ANSWER, || shared.read("log").is_ok_and(|log| log.lines().count() > 2)), "no log");
        container.remove()
    }

    fn what_is_read_only_stays_so(runtime) {
        let shared = Shared::new()?;
        shared.write("file", "kept\n")?;
        let script = "cat /data/file /file; echo x > /data/file && exit 1; rm /data/file && exit 2; echo x > /file && exit 3
            touch /data/new && exit 4; mount | grep -c ' on /data '; exit 9";
        let run = Node::shared()
            .sh(runtime, script)
            .flag(&shared.bind("", "/data", "rbind:ro"))
            .flag(&shared.bind("file", "/file", "rbind:ro"));
        let done = run.finish()?.expect_code(9)?;
        ensure!(done.lines() == ["kept", "kept", "1"], "{:?}", done.lines());
        ensure!(done.err().matches("Read-only file system").count() == 4, "{}", done.err());
        ensure!(shared.read("file")? == "kept\n");
        Ok(())
    }

    fn programs_are_run_from_a_volume_and_options_hold(runtime) {
        let shared = Shared::new()?;
        shared.write("program", "#!/bin/sh\necho ran\n")?;
        fs::set_permissions(shared.path("program"), fs::Permissions::from_mode(0o755))?;
        let script = "cp /proc/self/exe /data/busybox; /data/program; /data/busybox echo mapped; /no/program || echo refused";
        let run = Node::shared()
            .sh(runtime, script)
            .flag(&shared.bind("", "/data", "rbind:rw"))
            .flag(&shared.bind("", "/no", "rbind:noexec:nosuid:nodev"));
        let lines = run.succeed()?.lines();
        ensure!(lines == ["ran", "mapped", "refused"], "{lines:?}");
        Ok(())
    }

    fn mounts_below_a_source_and_volumes_in_volumes_are_seen(runtime) {
        let shared = Shared::new()?;
        for name in ["a/below", "b"] {
            fs::create_dir_all(shared.path(name))?;
        }
        shared.write("b/file", "of b\n")?;
        let below = shared.path("a/below").display().to_string();
        let mounted = std::process::Command::new("mount").args(["-t", "tmpfs", "below", &below]).status()?;
        ensure!(mounted.success());
        let result = shared.write("a/below/file", "of the mount\n").and_then(|()| {
            let script = "cat /a/below/file /a/b/file; echo written > /a/below/new; mount -t tmpfs | grep -c ' on /a/tmp '";
            Node::shared()
                .sh(runtime, script)
                .flag(&shared.bind("a", "/a", "rbind:rw"))
                .flag(&shared.bind("b", "/a/b", "rbind:ro"))
                .flag("--mount=type=tmpfs,src=tmpfs,dst=/a/tmp,options=nosuid")
                .succeed()
        });
        let new = shared.read("a/below/new");
        std::process::Command::new("umount").arg(&below).status()?;
        let lines = result?.lines();
        ensure!(lines == ["of the mount", "of b", "1"], "{lines:?}");
        ensure!(new? == "written\n" && shared.path("a/b").is_dir());
        Ok(())
    }

    fn a_source_that_does_not_exist_is_named(runtime) {
        let flag = "--mount=type=bind,src=/srv/nothing,dst=/data,options=rbind:rw";
        let done = Node::shared().sh(runtime, "true").flag(flag).finish()?.expect_code(1)?;
        for words in ["error mounting \"/srv/nothing\" to rootfs at \"/data\"", "stat /srv/nothing: no such file or directory"] {
            ensure!(done.err().contains(words), "{}", done.err());
        }
        Ok(())
    }
}

/// Reads lines; adds each to a file of the volume and prints another one.
const SCRIBE: &str = "while read line; do echo $line >> /data/log; cat /data/name; done";

#[test]
fn each_fork_has_its_own_volumes_and_the_parent_keeps_its() -> Result<()> {
    let node = Node::shared();
    let (ours, theirs) = (Shared::new()?, Shared::new()?);
    ours.write("name", "of the parent\n")?;
    theirs.write("name", "of the fork\n")?;
    let (mut session, container) = node
        .sh(Runtime::Ramet, SCRIBE)
        .flag(&ours.bind("", "/data", "rbind:rw"))
        .session()?;
    session.send("one")?;
    ensure!(session.line(ANSWER)? == "of the parent");
    let image = CheckpointImage::of(node, &container)?;
    session.send("two")?;
    ensure!(session.line(ANSWER)? == "of the parent");
    let fork = node
        .run(Runtime::Ramet, &image.name, &[])
        .flag(&theirs.bind("", "/data", "rbind:rw"))
        .stdin("three\n")
        .succeed()?;
    ensure!(fork.out() == "of the fork\n", "{:?} {:?}", fork.out(), fork.err());
    let logs = (ours.read("log")?, theirs.read("log")?);
    ensure!(logs == ("one\ntwo\n".into(), "three\n".into()), "{logs:?}");
    let script = "ls /data; cat /more/name; echo x > /more/name";
    let beside = node
        .run(Runtime::Ramet, &image.name, &["sh", "-c", script])
        .flag(&theirs.bind("", "/more", "rbind:ro"))
        .finish()?
        .expect_code(1)?;
    ensure!(beside.out() == "of the fork\n", "{:?}", beside.out());
    ensure!(beside.err().contains("Read-only file system"), "{}", beside.err());
    session.close_stdin();
    ensure!(session.wait(ANSWER)? == 0);
    container.is_gone();
    Ok(())
}

#[test]
fn a_checkpoint_with_a_file_of_a_volume_open_is_refused_by_name() -> Result<()> {
    let node = Node::shared();
    let shared = Shared::new()?;
    let script = "exec 3>/data/held; echo open; read x; echo still >&3; exec 3>&-; echo closed; read x";
    let (mut session, container) = node
        .sh(Runtime::Ramet, script)
        .flag(&shared.bind("", "/data", "rbind:rw"))
        .session()?;
    ensure!(session.line(ANSWER)? == "open");
    let image = format!("localhost/{}:1", fresh_id("held"));
    let refused = node.ramet(["checkpoint", container.id(), &image]).finish()?;
    ensure!(refused.code != 0, "it was made");
    for words in ["volumes are in use", "process 1 (sh) holds /data/held"] {
        ensure!(refused.err().contains(words), "{}", refused.err());
    }
    session.send("go on")?;
    ensure!(session.line(ANSWER)? == "closed" && shared.read("held")? == "still\n");
    let _image = CheckpointImage::of(node, &container)?;
    Ok(())
}

/// Pids of processes that serve volumes.
fn servers() -> Vec<u32> {
    let serves = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|&b| b == 0).nth(1) == Some(b"volumes")
    };
    e2e::leftovers::processes()
        .iter()
        .map(|p| p.pid)
        .filter(serves)
        .collect()
}

/// A container that sleeps with the directory at /data, and the process that serves it.
fn served(node: &Node, shared: &Shared) -> Result<(Container, u32)> {
    let before = servers();
    let container = node
        .run(Runtime::Ramet, BUSYBOX, &["sleep", "1000"])
        .flag(&shared.bind("", "/data", "rbind:rw"))
        .detach()?;
    let server = servers().into_iter().find(|pid| !before.contains(pid));
    Ok((container, server.context("no server")?))
}

fn kill_9(pid: u32) -> Result<()> {
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL).with_context(|| format!("killing {pid}"))
}

fn stops_running(node: &Node, container: &Container) -> bool {
    wait_until(ANSWER, || {
        node.task_status(container.id())
            .is_ok_and(|status| status.as_deref() != Some("RUNNING"))
    })
}

#[test]
fn the_server_of_volumes_ends_with_its_shim_and_sees_nothing_else() -> Result<()> {
    let node = Node::shared();
    let shared = Shared::new()?;
    shared.write("file", "x")?;
    let (container, server) = served(node, &shared)?;
    let root = PathBuf::from(format!("/proc/{server}/root"));
    let mut names: Vec<_> = fs::read_dir(&root)?.flatten().map(|e| e.file_name()).collect();
    names.sort();
    ensure!(names == ["0", "null", "proc"], "{names:?}");
    ensure!(fs::read_to_string(root.join("0/file"))? == "x");
    let status = fs::read_to_string(format!("/proc/{server}/status"))?;
    let effective = status
        .lines()
        .find_map(|l| l.strip_prefix("CapEff:"))
        .unwrap_or_default();
    let effective = u64::from_str_radix(effective.trim(), 16)?;
    let (admin, device) = (1u64 << 21, 1u64 << 27);
    ensure!(
        effective & (admin | device) == 0 && status.contains("NoNewPrivs:\t1"),
        "{status}"
    );
    let shim = status.lines().find_map(|l| l.strip_prefix("PPid:")).unwrap_or_default();
    kill_9(shim.trim().parse()?)?;
    ensure!(
        wait_until(ANSWER, || !servers().contains(&server)),
        "the server outlives its shim"
    );
    ensure!(stops_running(node, &container));
    container.remove()
}

#[test]
fn the_server_of_volumes_ends_with_its_machine_and_a_container_survives_its_loss() -> Result<()> {
    let node = Node::shared();
    let shared = Shared::new()?;
    shared.write("file", "x\n")?;
    let (container, server) = served(node, &shared)?;
    kill_9(node.task_pid(container.id())?)?;
    ensure!(
        wait_until(ANSWER, || !servers().contains(&server)),
        "the server outlives its machine"
    );
    ensure!(stops_running(node, &container));
    container.remove()?;

    let (container, server) = served(node, &shared)?;
    kill_9(server)?;
    let read = container.exec(&["cat", "/data/file"]).finish()?;
    ensure!(read.code == 1 && read.err().contains("not connected"), "{}", read.err());
    let image = format!("localhost/{}:1", fresh_id("lost"));
    let refused = node.ramet(["checkpoint", container.id(), &image]).finish()?;
    let reason = "the server of its host directories has ended";
    ensure!(refused.code != 0 && refused.err().contains(reason), "{}", refused.err());
    ensure!(container.exec(&["echo", "here"]).succeed()?.out() == "here\n");
    container.remove()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!mounts.contains(&*shared.0.to_string_lossy()), "{mounts}");
    Ok(())
}
