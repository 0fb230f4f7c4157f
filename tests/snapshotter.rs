//! The snapshotter as containerd and other runtimes see it.

use anyhow::{Result, ensure};
use e2e::images::{Archive, LAYERS};
use e2e::private::PrivateNode;
use e2e::{Node, Runtime};
use nix::sys::signal::Signal;

#[test]
fn runc_runs_on_it() -> Result<()> {
    let script = "cat /layered/replaced; test ! -e /layered/removed; ls /layered/opaque; echo x > /layered/new; cat /layered/new";
    let done = Node::shared()
        .run(Runtime::RuncOnRamet, LAYERS, &["sh", "-c", script])
        .succeed()?;
    ensure!(done.out() == "upper\nseen\nx\n", "{:?}", done.out());
    Ok(())
}

#[test]
fn a_snapshot_is_prepared_measured_committed_and_removed() -> Result<()> {
    let node = Node::shared();
    let snapshots = |arguments: &[&str]| {
        node.ctr(
            [&["snapshots", "--snapshotter", "ramet"], arguments]
                .concat()
                .into_iter()
                .map(str::to_owned),
        )
        .succeed()
    };
    let (active, name) = (
        e2e::container::fresh_id("active"),
        e2e::container::fresh_id("committed"),
    );
    snapshots(&["prepare", &active])?;
    let info = snapshots(&["info", &active])?;
    ensure!(info.out().contains("Active"), "{}", info.out());
    snapshots(&["usage", &active])?;
    snapshots(&["commit", &name, &active])?;
    let child = e2e::container::fresh_id("child");
    snapshots(&["prepare", &child, &name])?;
    let refused = node
        .ctr(["snapshots", "--snapshotter", "ramet", "rm", &name])
        .finish()?;
    ensure!(refused.code != 0, "a snapshot with a child was removed");
    snapshots(&["rm", &child])?;
    snapshots(&["rm", &name])?;
    ensure!(!snapshots(&["ls"])?.out().contains(&name));
    Ok(())
}

#[test]
fn it_survives_a_kill_and_a_restart() -> Result<()> {
    let directory = tempfile::tempdir_in("/var/lib")?;
    let mut node = PrivateNode::start(&directory.path().join("node"))?;
    node.import(&Archive::Busybox)?;
    let container = node
        .sh(Runtime::Ramet, "echo kept > /tmp/file; exec sleep 1000")
        .detach()?;
    let before = node.ctr(["snapshots", "--snapshotter", "ramet", "ls"]).succeed()?.out();
    node.stop_snapshotter(Signal::SIGKILL)?;
    // A running container does not need it.
    container.exec(&["cat", "/etc/passwd"]).succeed()?;
    node.start_snapshotter()?;
    let after = node.ctr(["snapshots", "--snapshotter", "ramet", "ls"]).succeed()?.out();
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    ensure!(node.sh(Runtime::Ramet, "echo new").succeed()?.out() == "new\n");
    container.remove()
}
