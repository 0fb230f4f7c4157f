//! kill -9 of every process, while idle: the others notice, say so, and nothing is left.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::images::{Archive, BUSYBOX};
use e2e::private::PrivateNode;
use e2e::{Node, Runtime, leftovers};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::ANSWER;

fn kill_9(pid: u32) -> Result<()> {
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL).with_context(|| format!("killing {pid}"))
}

/// The processes of this name that were not there before.
fn new_process(name: &str, before: &[u32]) -> Result<u32> {
    let is_new = |process: &&leftovers::Process| name.starts_with(&process.command) && !before.contains(&process.pid);
    let all = leftovers::processes();
    let found = all
        .iter()
        .filter(|process| process.state != 'Z' && process.command.len() > 3)
        .find(is_new);
    found
        .map(|process| process.pid)
        .with_context(|| format!("no new process {name}"))
}

fn pids() -> Vec<u32> {
    leftovers::processes().iter().map(|process| process.pid).collect()
}

#[test]
fn when_the_vmm_is_killed_the_task_has_exited_with_137() -> Result<()> {
    let node = Node::shared();
    let before = pids();
    let (mut session, container) = node
        .run(Runtime::Ramet, BUSYBOX, &["sh", "-c", "echo up; sleep 1000"])
        .session()?;
    session.line(ANSWER)?;
    kill_9(new_process(e2e::node::VMM, &before)?)?;
    ensure!(session.wait(ANSWER)? == 137);
    container.is_gone();
    Ok(())
}

#[test]
fn when_the_shim_is_killed_the_vm_ends_and_the_container_can_be_removed() -> Result<()> {
    let node = Node::shared();
    let before = pids();
    let container = node.run(Runtime::Ramet, BUSYBOX, &["sleep", "1000"]).detach()?;
    kill_9(new_process(e2e::node::SHIM, &before)?)?;
    ensure!(
        e2e::wait_until(ANSWER, || new_process(e2e::node::VMM, &before).is_err()),
        "the VMM outlives its shim"
    );
    ensure!(e2e::wait_until(ANSWER, || node
        .task_status(container.id())
        .is_ok_and(|status| status.as_deref() != Some("RUNNING"))));
    container.remove()?;
    node.run(Runtime::Ramet, BUSYBOX, &["true"]).succeed().map(drop)
}

#[test]
fn when_containerd_is_killed_the_task_runs_on_and_is_found_again() -> Result<()> {
    let directory = tempfile::tempdir_in("/var/lib")?;
    let mut node = PrivateNode::start(&directory.path().join("node"))?;
    node.import(&Archive::Busybox)?;
    let container = node
        .sh(Runtime::Ramet, "echo kept > /tmp/file; exec sleep 1000")
        .detach()?;
    let pid = node.task_pid(container.id())?;
    node.stop_containerd(Signal::SIGKILL)?;
    node.start_containerd()?;
    ensure!(node.task_status(container.id())?.as_deref() == Some("RUNNING"));
    ensure!(node.task_pid(container.id())? == pid);
    ensure!(container.exec(&["cat", "/tmp/file"]).succeed()?.out() == "kept\n");
    container.kill("SIGKILL")?;
    container.wait_for("STOPPED")?;
    ensure!(container.delete_task()? == 137);
    container.remove()
}

#[test]
fn a_vmm_killed_in_the_middle_of_a_checkpoint_leaves_no_half_image() -> Result<()> {
    let node = Node::shared();
    let before = pids();
    let (mut session, container) = crate::support::counter(node)?;
    let vmm = new_process(e2e::node::VMM, &before)?;
    let image = format!("localhost/{}:half", e2e::container::fresh_id("image"));
    let checkpoint = node.ramet(["checkpoint", container.id(), &image]);
    let made = std::thread::spawn(move || checkpoint.finish());
    // The save forks a dumper: a second VMM process means that it is under way.
    e2e::wait_until(ANSWER, || {
        leftovers::vmms().iter().filter(|pid| !before.contains(pid)).count() > 1 || made.is_finished()
    });
    kill_9(vmm)?;
    let made = made.join().map_err(|_| anyhow::anyhow!("the checkpoint panicked"))??;
    let images = node.ctr(["images", "ls", "-q"]).succeed()?.out();
    if made.code == 0 {
        // It was faster than the kill: then the image is whole.
        ensure!(images.contains(&image));
        node.remove_image(&image)?;
    } else {
        ensure!(!images.contains(&image), "a half image is visible");
    }
    ensure!(session.wait(ANSWER)? == 137);
    container.is_gone();
    Ok(())
}

/// Takes nearly all of the disk that `directory` is on until it is dropped.
struct FullDisk(PathBuf);

impl FullDisk {
    fn around(directory: &Path) -> Result<Self> {
        let full = Self(directory.join("takes-the-disk"));
        let space = nix::sys::statvfs::statvfs(directory)?;
        let free = space.blocks_available() * space.fragment_size();
        let left = 16 << 20;
        let file = std::fs::File::create(&full.0)?;
        nix::fcntl::posix_fallocate(&file, 0, i64::try_from(free.saturating_sub(left))?)?;
        Ok(full)
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_checkpoint_that_the_disk_is_too_small_for_leaves_nothing_and_the_container_runs_on() -> Result<()> {
    let node = Node::shared();
    let (mut session, container) = crate::support::counter(node)?;
    let before = node.ctr(["snapshots", "--snapshotter", "ramet", "ls"]).succeed()?.out();
    let image = format!("localhost/{}:no-room", e2e::container::fresh_id("image"));
    let full = FullDisk::around(Path::new("/var/lib/ramet-snapshotter"))?;
    let refused = node.ramet(["checkpoint", container.id(), &image]).finish()?;
    drop(full);
    ensure!(
        refused.code != 0 && refused.err().contains("No space left"),
        "{}",
        refused.err()
    );
    ensure!(!node.ctr(["images", "ls", "-q"]).succeed()?.out().contains(&image));
    let after = node.ctr(["snapshots", "--snapshotter", "ramet", "ls"]).succeed()?.out();
    ensure!(before == after, "a snapshot was left behind:\n{after}");
    session.send("after")?;
    ensure!(session.line(ANSWER)? == "2 after");
    node.checkpoint(container.id(), &image)?;
    node.remove_image(&image)?;
    session.close_stdin();
    ensure!(session.wait(ANSWER)? == 9);
    container.is_gone();
    Ok(())
}
