//! How fast files of the host are in a container: a bind mount of runc's beside one of ours, in turns.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::images::Archive;
use e2e::{Node, Runtime, Session};
use serde::Serialize;

use crate::say;

const PATIENCE: Duration = Duration::from_secs(120);
/// How often all is done; the fastest counts.
const ROUNDS: usize = 3;
/// Runs each line that it reads, and says how that ended.
const WORKER: &str = "while read -r line; do eval \"$line\" > /dev/null 2>&1; echo $?; done";

/// What is done, and with which words. The host has in its page cache what is read.
const OPERATIONS: [(&str, &str); 6] = [
    (
        "32 MiB written and synced",
        "dd if=/dev/zero of=/data/large bs=1M count=32 conv=fsync",
    ),
    ("32 MiB read", "dd if=/data/large of=/dev/null bs=1M"),
    (
        "100 files made",
        "mkdir /data/many; i=0; while [ $i -lt 100 ]; do echo $i > /data/many/$i; i=$((i+1)); done",
    ),
    ("100 files listed with their attributes", "ls -l /data/many"),
    ("100 files read", "cat /data/many/*"),
    ("all of it removed", "rm -r /data/many /data/large"),
];

/// One kind of work, with both runtimes.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    what: &'static str,
    runc_ms: f64,
    ramet_ms: f64,
}

/// All kinds of work.
#[derive(Debug, Serialize)]
pub(crate) struct Throughput(Vec<Measured>);

/// Measures them.
pub(crate) fn measure(node: &Node) -> Result<Throughput> {
    node.import(&Archive::Busybox)?;
    let shared = tempfile::tempdir_in("/var/lib").context("make a directory to share")?;
    let mut workers = Vec::new();
    for (runtime, name) in [(Runtime::Runc, "runc"), (Runtime::Ramet, "ramet")] {
        let directory = shared.path().join(name);
        std::fs::create_dir(&directory)?;
        say(format!("a container of {name} that shares {}", directory.display()));
        let mount = format!(
            "--mount=type=bind,src={},dst=/data,options=rbind:rw",
            directory.display()
        );
        workers.push(node.sh(runtime, WORKER).flag(&mount).session()?);
    }
    let mut fastest = [[f64::INFINITY; 2]; OPERATIONS.len()];
    for _ in 0..ROUNDS {
        for ((what, line), fastest) in OPERATIONS.iter().zip(&mut fastest) {
            for ((session, _), fastest) in workers.iter_mut().zip(fastest) {
                *fastest = fastest.min(time(session, line).context(*what)?);
            }
        }
    }
    for (mut session, container) in workers {
        session.close_stdin();
        ensure!(session.wait(PATIENCE)? == 0, "{}", session.stderr());
        container.is_gone();
    }
    let measured = OPERATIONS.iter().zip(fastest);
    Ok(Throughput(
        measured
            .map(|((what, _), [runc_ms, ramet_ms])| Measured {
                what,
                runc_ms,
                ramet_ms,
            })
            .collect(),
    ))
}

/// How long a worker takes for a line, in milliseconds.
fn time(session: &mut Session, line: &str) -> Result<f64> {
    let begun = Instant::now();
    session.send(line)?;
    let code = session.line(PATIENCE)?;
    let elapsed = begun.elapsed().as_secs_f64() * 1000.0;
    ensure!(code == "0", "{line}: {code}");
    Ok(elapsed)
}

impl fmt::Display for Throughput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<40} {:>10} {:>10} {:>8}",
            "files of the host", "runc", "ramet", "ratio"
        )?;
        for Measured {
            what,
            runc_ms,
            ramet_ms,
        } in &self.0
        {
            let ratio = ramet_ms / runc_ms;
            writeln!(f, "{what:<40} {runc_ms:>7.1} ms {ramet_ms:>7.1} ms {ratio:>8.2}")?;
        }
        Ok(())
    }
}
