//! Limits and statistics.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Container, Node, Session};

use crate::support::ANSWER;

const MIB: u64 = 1 << 20;

/// A number in the metrics of a container, by the names on the way to it.
pub(crate) fn metric(container: &Container, path: [&str; 2]) -> Result<u64> {
    let done = Node::shared()
        .ctr(["tasks", "metrics", "--format=json", container.id()])
        .succeed()?;
    let metrics: serde_json::Value = serde_json::from_slice(&done.stdout)?;
    let found = metrics.get(path[0]).and_then(|part| part.get(path[1])).cloned();
    let number = found.with_context(|| format!("{path:?} in {metrics}"))?;
    // Zeroes and numbers come as JSON numbers; ctr writes nothing else.
    number.as_u64().with_context(|| format!("{number} is no number"))
}

with_each_runtime! {
    fn who_takes_too_much_memory_is_killed_and_that_is_told(runtime) {
        let node = Node::shared();
        let mut events = Session::start(&node.ctr(["events"]))?;
        let run = node.sh(runtime, "exec dd if=/dev/zero of=/dev/null bs=100M count=1");
        let container = run.flag(&format!("--memory-limit={}", 64 * MIB)).detach()?;
        container.wait_for("STOPPED")?;
        let code = container.delete_task()?;
        ensure!(code == 137, "{code}");
        loop {
            let line = events.line(ANSWER).context("no OOM event")?;
            if line.contains("/tasks/oom") && line.contains(container.id()) {
                break;
            }
        }
        container.remove()
    }

    fn limits_hold_and_show_in_the_statistics(runtime) {
        let script = "dd if=/dev/zero of=/dev/shm/file bs=1M count=20 2>/dev/null; while :; do :; done";
        let run = Node::shared().sh(runtime, script).flag(&format!("--memory-limit={}", 64 * MIB)).flag("--cpus=0.2");
        let container = run.detach()?;
        ensure!(metric(&container, ["memory", "usage_limit"])? == 64 * MIB);
        let throttled = || metric(&container, ["cpu", "nr_throttled"]).unwrap_or(0);
        ensure!(e2e::wait_until(ANSWER, || throttled() > 0), "never throttled");
        let usage = || metric(&container, ["memory", "usage"]).unwrap_or(0);
        ensure!(e2e::wait_until(ANSWER, || (20 * MIB..=64 * MIB).contains(&usage())), "{}", usage());
        // What it used is a fifth of the time that passed, within what scheduling under load can do.
        let used = || Ok::<_, anyhow::Error>(Duration::from_micros(metric(&container, ["cpu", "usage_usec"])?));
        let (start, before) = (std::time::Instant::now(), used()?);
        ensure!(e2e::wait_until(ANSWER, || start.elapsed() > Duration::from_secs(5)));
        let (took, after) = (start.elapsed(), used()?);
        let share = (after.saturating_sub(before)).as_secs_f64() / took.as_secs_f64();
        ensure!(share > 0.0 && share < 0.35, "{share}");
        ensure!(metric(&container, ["pids", "current"])? >= 1);
        container.remove()
    }
}

#[test]
fn a_memory_limit_sizes_the_machine() -> Result<()> {
    let total = |flags: &[&str]| -> Result<u64> {
        let mut run = Node::shared().run(
            e2e::Runtime::Ramet,
            BUSYBOX,
            &["awk", "/MemTotal/ {print $2}", "/proc/meminfo"],
        );
        for flag in flags {
            run = run.flag(flag);
        }
        Ok(run.succeed()?.out().trim().parse::<u64>()? * 1024)
    };
    let (small, large) = (
        total(&["--memory-limit=67108864"])?,
        total(&["--memory-limit=805306368"])?,
    );
    ensure!((64 * MIB..192 * MIB).contains(&small), "{small}");
    ensure!((768 * MIB..896 * MIB).contains(&large), "{large}");
    Ok(())
}
