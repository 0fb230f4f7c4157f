//! `ctr task exec` of `true`, one after the other and many at once.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::Container;
use e2e::images::{Archive, BUSYBOX};
use e2e::private::PrivateNode;

use super::table::{Bar, Measured, Row};
use super::{idle, note};
use crate::say;

/// How long all execs at once may take.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) fn measure(node: &PrivateNode, rounds: usize, parallel: usize) -> Result<Measured> {
    say("an idle container of each kind");
    node.import(&Archive::Busybox)?;
    let containers = idle(node, BUSYBOX, &[])?;
    let mut one = Row::new("ctr task exec of `true`", "ms", Some(Bar::AtMost(1.5)));
    let mut ctr = Row::new("  of which ctr: `ctr version`", "ms", None);
    // The first exec of each is not counted.
    for round in 0..=rounds {
        for (runtime, container) in &containers {
            let done = container.exec(&["true"]).succeed()?;
            let client = node.ctr(["version"]).succeed()?;
            if round > 0 {
                note(&mut one, *runtime, done.took.as_secs_f64() * 1000.0);
                note(&mut ctr, *runtime, client.took.as_secs_f64() * 1000.0);
            }
        }
    }
    let mut rows = vec![one, ctr];
    let mut notes = Vec::new();
    if parallel > 0 {
        let mut many = Row::new(format!("{parallel} execs at once, until all returned"), "ms", None);
        for (runtime, container) in &containers {
            say(format!("{parallel} execs at once, {runtime:?}"));
            let took = at_once(container, parallel)?;
            note(&mut many, *runtime, took.as_secs_f64() * 1000.0);
        }
        rows.push(many);
        notes.push(format!(
            "all {parallel} execs at once returned with exit code 0, in both"
        ));
    }
    for (_, container) in containers {
        container.remove()?;
    }
    Ok(Measured {
        rows,
        notes,
        ..Measured::default()
    })
}

/// Runs `count` execs at once; each must succeed.
fn at_once(container: &Container, count: usize) -> Result<Duration> {
    let began = Instant::now();
    let invocations: Vec<_> = (0..count)
        .map(|_| container.exec(&["true"]).deadline(PATIENCE))
        .collect();
    let threads: Vec<_> = invocations
        .into_iter()
        .map(|invocation| thread::spawn(move || invocation.succeed()))
        .collect();
    let mut failed = Vec::new();
    for thread in threads {
        let done = thread.join().ok().context("a thread that ran an exec panicked")?;
        failed.extend(done.err().map(|error| format!("{error:#}")));
    }
    ensure!(
        failed.is_empty(),
        "{} of {count} execs failed: {}",
        failed.len(),
        failed.join("\n")
    );
    Ok(began.elapsed())
}
