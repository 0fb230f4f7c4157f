//! Further processes in a running container.

use anyhow::{Context, Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Container, Invocation, Node, Runtime};

/// How many processes a test adds to a container: `RAMET_TEST_EXECS`, else what an emulated machine can do.
fn execs() -> usize {
    let asked = std::env::var("RAMET_TEST_EXECS")
        .ok()
        .and_then(|text| text.parse().ok());
    asked.unwrap_or(20)
}

/// A shell command that adds a process, with nothing to read.
fn exec_line(container: &Container, exec: &str, command: &str) -> String {
    format!(
        "ctr tasks exec --exec-id {exec} {} {command} </dev/null",
        container.id()
    )
}

with_each_runtime! {
    fn a_process_is_added_with_its_own_streams_and_exit_code(runtime) {
        let container = Node::shared().sh(runtime, "echo of-init > /tmp/file; exec sleep 1000").detach()?;
        let script = "until cat /tmp/file; do sleep 0.1; done 2>/dev/null; echo error >&2; cat; exit 5";
        let done = container.exec(&["sh", "-c", script]).stdin("to exec\n").finish()?.expect_code(5)?;
        ensure!(done.out() == "of-init\nto exec\n", "{:?}", done.out());
        ensure!(done.err().contains("error"), "{:?}", done.err());
        let pids = container.exec(&["ps", "-o", "pid,comm"]).succeed()?;
        ensure!(pids.out().contains("1 sleep"), "{}", pids.out());
        container.remove()
    }

    fn a_command_that_does_not_exist_is_named(runtime) {
        let container = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).detach()?;
        let done = container.exec(&["no-such-command"]).finish()?;
        ensure!(done.code != 0 && done.err().contains("no-such-command"), "{} {}", done.code, done.err());
        // The container is none the worse for it.
        container.exec(&["true"]).succeed()?;
        container.remove()
    }

    fn many_at_once_all_return(runtime) {
        let container = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).detach()?;
        let count = execs();
        let mut script = String::new();
        for number in 0..count {
            script += &exec_line(&container, &format!("many-{number}"), &format!("echo {number}"));
            script += " & ";
        }
        script += "wait";
        let done = Invocation::new("sh").args(["-c", &script]).succeed()?;
        let mut numbers: Vec<usize> = done.lines().iter().filter_map(|line| line.parse().ok()).collect();
        numbers.sort_unstable();
        ensure!(numbers == (0..count).collect::<Vec<_>>(), "{numbers:?} {}", done.err());
        container.remove()
    }

    fn into_a_paused_task_it_is_refused_at_once(runtime) {
        let node = Node::shared();
        let container = node.run(runtime, BUSYBOX, &["sleep", "1000"]).detach()?;
        node.ctr(["tasks", "pause", container.id()]).succeed()?;
        let done = container.exec(&["true"]).finish()?;
        ensure!(done.code != 0 && done.err().contains("cannot exec in a paused state"), "{} {}", done.code, done.err());
        node.ctr(["tasks", "resume", container.id()]).succeed()?;
        container.exec(&["true"]).succeed()?;
        container.remove()
    }

    fn a_signal_to_all_reaches_them_all(runtime) {
        let directory = tempfile::tempdir()?;
        let log = directory.path().join("log");
        let script = "sh -c 'trap \"echo child; exit\" TERM; echo ready; while :; do sleep 0.1; done' & \
            trap 'echo init' TERM; while :; do sleep 0.1; done";
        let run = Node::shared().sh(runtime, script).flag(&format!("--log-uri=file://{}", log.display()));
        let container = run.detach()?;
        let said = |word: &str| std::fs::read_to_string(&log).is_ok_and(|text| text.lines().any(|line| line == word));
        ensure!(e2e::wait_until(crate::support::ANSWER, || said("ready")));
        Node::shared().ctr(["tasks", "kill", "--all", "--signal", "SIGTERM", container.id()]).succeed()?;
        let both = e2e::wait_until(crate::support::ANSWER, || said("init") && said("child"));
        ensure!(both, "{:?}", std::fs::read_to_string(&log));
        container.remove()
    }

    fn an_init_that_ends_takes_its_children_along(runtime) {
        let done = Node::shared().sh(runtime, "sleep 1000 & (sleep 1000 & exec sleep 1000) & exit 3").finish()?;
        ensure!(done.code == 3, "{} {}", done.code, done.err());
        Ok(())
    }
}

/// What a shim holds: open descriptors and threads.
fn held_by(shim: u32) -> Result<(usize, usize)> {
    let count = |what: &str| -> Result<usize> {
        let directory = format!("/proc/{shim}/{what}");
        Ok(std::fs::read_dir(&directory).context(directory)?.count())
    };
    Ok((count("fd")?, count("task")?))
}

#[test]
fn one_after_the_other_they_leave_nothing_in_the_shim() -> Result<()> {
    let container = Node::shared()
        .run(Runtime::Ramet, BUSYBOX, &["sleep", "1000"])
        .detach()?;
    let vmm = Node::shared().task_pid(container.id())?;
    let stat = std::fs::read_to_string(format!("/proc/{vmm}/stat"))?;
    let shim: u32 = stat
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok())
        .context("no parent in the VMM's stat")?;
    let run = |range: std::ops::Range<usize>| -> Result<()> {
        let lines: Vec<String> = range
            .map(|n| exec_line(&container, &format!("row-{n}"), "echo done"))
            .collect();
        let done = Invocation::new("sh").args(["-ec", &lines.join("\n")]).succeed()?;
        ensure!(done.lines().len() == lines.len(), "{}", done.out());
        Ok(())
    };
    run(0..3)?;
    let before = held_by(shim)?;
    let more = execs();
    run(3..3 + more)?;
    // A thread that waited for something may take a moment to end.
    let mut after = before;
    let same = e2e::wait_until(std::time::Duration::from_secs(10), || {
        after = held_by(shim).unwrap_or((usize::MAX, usize::MAX));
        after.0 <= before.0 && after.1 <= before.1
    });
    ensure!(
        same,
        "descriptors and threads {before:?} became {after:?} after {more} more"
    );
    container.remove()
}
