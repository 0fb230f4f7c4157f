//! `ctr run` of a checkpoint image is a fork. Hazards: docs/fork-hazards.md names the test of each.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use e2e::{Node, Runtime};

use crate::support::{ANSWER, CheckpointImage, counter};

#[test]
fn a_fork_goes_on_with_its_own_input_and_the_parent_does_not_notice() -> Result<()> {
    let node = Node::shared();
    let (mut session, container) = counter(node)?;
    let image = CheckpointImage::of(node, &container)?;
    for word in ["for-a", "for-b"] {
        let fork = node
            .run(Runtime::Ramet, &image.name, &[])
            .stdin(format!("{word}\nmore\n"))
            .finish()?
            .expect_code(9)?;
        ensure!(
            fork.out() == format!("2 {word}\n3 more\n") && fork.err().is_empty(),
            "{:?} {:?}",
            fork.out(),
            fork.err()
        );
    }
    session.send("parent")?;
    ensure!(session.line(ANSWER)? == "2 parent");
    Ok(())
}

#[test]
fn files_of_the_parent_are_there_and_each_fork_changes_only_its_own() -> Result<()> {
    let node = Node::shared();
    let container = node
        .sh(
            Runtime::Ramet,
            "echo parent > /tmp/file; rm /etc/group; while :; do sleep 1; done",
        )
        .detach()?;
    container
        .exec(&["sh", "-c", "until test ! -e /etc/group; do sleep 0.1; done"])
        .succeed()?;
    let image = CheckpointImage::of(node, &container)?;
    container.exec(&["sh", "-c", "echo later > /tmp/file"]).succeed()?;
    let script =
        "cat /tmp/file; test ! -e /etc/group; echo changed > /tmp/file; sync; cat /tmp/file; rm -r /bin; echo gone";
    for _ in 0..2 {
        let fork = node.run(Runtime::Ramet, &image.name, &["sh", "-c", script]).succeed()?;
        ensure!(fork.out() == "parent\nchanged\ngone\n", "{:?}", fork.out());
    }
    ensure!(container.exec(&["cat", "/tmp/file"]).succeed()?.out() == "later\n");
    Ok(())
}

#[test]
fn other_arguments_run_beside_the_parents_processes() -> Result<()> {
    let node = Node::shared();
    let (_session, container) = counter(node)?;
    let image = CheckpointImage::of(node, &container)?;
    let script = "tr '\\0' ' ' < /proc/1/cmdline; echo; test $$ != 1; echo $NEW; exit 6";
    let run = node
        .run(Runtime::Ramet, &image.name, &["sh", "-c", script])
        .flag("--env=NEW=value");
    let fork = run.finish()?.expect_code(6)?;
    ensure!(
        fork.out().contains("while read line") && fork.out().ends_with("value\n"),
        "{:?}",
        fork.out()
    );
    Ok(())
}

#[test]
fn a_fresh_fork_starts_over_on_the_parents_files() -> Result<()> {
    let node = Node::shared();
    let container = node
        .sh(Runtime::Ramet, "echo kept > /tmp/file; while :; do sleep 1; done")
        .detach()?;
    container
        .exec(&["sh", "-c", "until test -e /tmp/file; do sleep 0.1; done"])
        .succeed()?;
    let image = CheckpointImage::of(node, &container)?;
    let script = "cat /tmp/file; echo $$; ps -o args | grep -c '[w]hile'";
    let run = node
        .run(Runtime::Ramet, &image.name, &["sh", "-c", script])
        .flag("--annotation=io.ramet.fork=fresh");
    let fork = run.finish()?;
    ensure!(fork.out() == "kept\n1\n0\n", "{:?} {:?}", fork.out(), fork.err());
    Ok(())
}

#[test]
fn a_fork_of_a_fork_remembers_both() -> Result<()> {
    let node = Node::shared();
    let (session, container) = counter(node)?;
    let first = CheckpointImage::of(node, &container)?;
    drop((session, container));
    let (mut fork, fork_container) = node.run(Runtime::Ramet, &first.name, &[]).session()?;
    fork.send("second")?;
    ensure!(fork.line(ANSWER)? == "2 second");
    let second = CheckpointImage::of(node, &fork_container)?;
    drop((fork, fork_container));
    // The first image's name is gone; what the second needs of it stays.
    node.remove_image(&first.name)?;
    let grandchild = node
        .run(Runtime::Ramet, &second.name, &[])
        .stdin("third\n")
        .finish()?
        .expect_code(9)?;
    ensure!(
        grandchild.out() == "3 third\n",
        "{:?} {:?}",
        grandchild.out(),
        grandchild.err()
    );
    Ok(())
}

#[test]
fn forks_of_a_parent_whose_output_nobody_wanted_are_heard() -> Result<()> {
    let node = Node::shared();
    let script = "n=0; while :; do n=$((n+1)); echo tick $n; echo tock $n >&2; sleep 0.2; done";
    let container = node.sh(Runtime::Ramet, script).flag("--null-io").detach()?;
    let image = CheckpointImage::of(node, &container)?;
    let (mut fork, guard) = node.run(Runtime::Ramet, &image.name, &[]).session()?;
    let first = fork.line(ANSWER)?;
    ensure!(first.starts_with("tick "), "{first:?}");
    fork.line(ANSWER)?;
    ensure!(fork.stderr().contains("tock "), "{:?}", fork.stderr());
    drop((fork, guard));
    Ok(())
}

#[test]
fn each_fork_has_its_own_identity() -> Result<()> {
    let node = Node::shared();
    let (_session, container) = counter(node)?;
    let image = CheckpointImage::of(node, &container)?;
    let script = "cat /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; hostname; \
                  cat /proc/sys/kernel/random/uuid; cat /run/ramet/fork.json; echo; date +%s";
    let mut seen = BTreeSet::new();
    let parent = container
        .exec(&["sh", "-c", "cat /proc/sys/kernel/random/boot_id"])
        .succeed()?;
    seen.insert(parent.out().trim().to_owned());
    for _ in 0..3 {
        let id = e2e::container::fresh_id("fork");
        let fork = node
            .run(Runtime::Ramet, &image.name, &["sh", "-c", script])
            .id(&id)
            .succeed()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let lines = fork.lines();
        for line in &lines[..4] {
            ensure!(
                seen.insert(line.trim().to_owned()),
                "{line:?} was seen before: {lines:?}"
            );
        }
        ensure!(lines[4].contains(&id), "fork.json names the container: {}", lines[4]);
        let clock: u64 = lines.last().context("no clock")?.trim().parse()?;
        ensure!(
            now.abs_diff(clock) <= 20,
            "the fork's clock says {clock}, the host's {now}"
        );
    }
    Ok(())
}

#[test]
fn six_forks_at_once_are_all_right() -> Result<()> {
    let node = Node::shared();
    let (_session, container) = counter(node)?;
    let image = CheckpointImage::of(node, &container)?;
    let runs: Vec<_> = (0..6)
        .map(|number| {
            let run = node
                .run(Runtime::Ramet, &image.name, &[])
                .stdin(format!("fork {number}\n"));
            std::thread::spawn(move || run.finish()?.expect_code(9).map(|done| done.out()))
        })
        .collect();
    for (number, run) in runs.into_iter().enumerate() {
        let out = run.join().map_err(|_| anyhow::anyhow!("a run panicked"))??;
        ensure!(out == format!("2 fork {number}\n"), "fork {number} printed {out:?}");
    }
    Ok(())
}
