//! The experiment, step by step.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use e2e::images::{Archive, BUSYBOX, PYTHON};
use e2e::private::PrivateNode;
use e2e::{Leftovers, Runtime, leftovers};
use serde_json::{Value, json};

use crate::report::{Forks, Parent, Report};
use crate::worker::{Worker, task};
use crate::{memory, say};

/// Name of the checkpoint image.
const WARM: &str = "localhost/warm-worker:1";
/// How many plain containers are timed.
const PLAIN: usize = 3;
/// How far a fork's clock may be from the host's. Reading it takes time, and under emulation that is seconds.
const CLOCK_SECONDS: f64 = 5.0;

/// What to run, and where.
pub(crate) struct Experiment<'a> {
    /// The node.
    pub(crate) node: &'a PrivateNode,
    /// How many forks.
    pub(crate) forks: usize,
    /// How many cold workers.
    pub(crate) cold: usize,
}

impl Experiment<'_> {
    /// Does everything.
    pub(crate) fn run(&self) -> Result<Report> {
        self.prepare()?;
        let baseline = Leftovers::take(self.node);
        let mut report = Report::default();
        self.plain(&mut report)?;
        self.cold(&mut report)?;
        let (parent, reference) = self.parent(&mut report)?;
        self.forks(&mut report)?;
        report.isolation = self.isolation(&reference)?;
        self.at_once(&mut report)?;
        let parent_unchanged = self.end_of(parent, &reference)?;
        report.isolation &= parent_unchanged;
        say("removing the checkpoint image, looking for leftovers");
        self.node.remove_image(WARM)?;
        report.leftovers = Leftovers::settle(self.node, &baseline);
        Ok(report)
    }

    /// Imports the images and runs each kind of container once: what is made on first use is not what we measure.
    fn prepare(&self) -> Result<()> {
        say("importing the images");
        for archive in [Archive::Busybox, Archive::Python] {
            self.node.import(&archive)?;
        }
        say("a first container of each kind");
        let done = self
            .node
            .run(Runtime::Ramet, PYTHON, &["python3", "-c", "print(6*7)"])
            .succeed()?;
        ensure!(
            done.out() == "42\n" && done.err().is_empty(),
            "6*7 printed {:?} {:?}",
            done.out(),
            done.err()
        );
        self.node.run(Runtime::Runc, BUSYBOX, &["true"]).succeed().map(drop)
    }

    fn plain(&self, report: &mut Report) -> Result<()> {
        say(format!("{PLAIN} plain containers: runc on overlayfs"));
        for _ in 0..PLAIN {
            let done = self.node.run(Runtime::Runc, BUSYBOX, &["true"]).succeed()?;
            report.runc.ready_ms.push(done.took.as_secs_f64() * 1000.0);
            let (mut session, container) = self.node.run(Runtime::Runc, BUSYBOX, &["echo", "up"]).session()?;
            session.line(e2e::DEADLINE)?;
            let first = session.first_byte_after().context("no first byte")?;
            report.runc.first_byte_ms.push(first.as_secs_f64() * 1000.0);
            ensure!(session.wait(e2e::DEADLINE)? == 0);
            container.is_gone();
        }
        Ok(())
    }

    fn cold(&self, report: &mut Report) -> Result<()> {
        for number in 1..=self.cold {
            say(format!(
                "cold worker {number} of {}: boots, unpacks its packages, imports",
                self.cold
            ));
            let worker = Worker::cold(self.node, &format!("cold-{number}"))?;
            report.cold.ready_ms.push(worker.ready_ms()?);
            worker.finish()?;
        }
        Ok(())
    }

    /// Starts the parent and checkpoints it. Also returns what it holds in memory and files.
    fn parent(&self, report: &mut Report) -> Result<(Worker, Value)> {
        say("the parent: provisioned like a cold worker");
        let mut parent = Worker::cold(self.node, "parent")?;
        let provision_ms = parent.ready_ms()?;
        let reference = held(&parent.ask(&json!({ "operation": "inspect" }))?);
        say("checkpointing it");
        let summary = self.node.ramet(["checkpoint", "--json", parent.id(), WARM]).succeed()?;
        let summary: Value = serde_json::from_slice(&summary.stdout).context("summary of ramet checkpoint")?;
        let inspected = self.node.ramet(["inspect", "--json", WARM]).succeed()?;
        let inspected: Value = serde_json::from_slice(&inspected.stdout).context("output of ramet inspect")?;
        let number = |name: &str| {
            summary[name]
                .as_f64()
                .with_context(|| format!("no {name} in {summary}"))
        };
        report.parent = Parent {
            provision_ms,
            checkpoint_ms: number("total_ms")?,
            pause_ms: number("pause_ms")?,
            image_bytes: summary["layer_bytes"].as_u64().context("no layer_bytes")?,
            memory_bytes: summary["memory_bytes"].as_u64().context("no memory_bytes")?,
            memory_write_ms: inspected["manifest"]["save"]["memory_write_us"].as_f64().unwrap_or(0.0) / 1000.0,
        };
        ensure!(
            held(&parent.ask(&json!({ "operation": "inspect" }))?) == reference,
            "the checkpoint changed its parent"
        );
        Ok((parent, reference))
    }

    fn forks(&self, report: &mut Report) -> Result<()> {
        let mut seen = BTreeSet::new();
        let (mut values, mut clock_ok) = (0, true);
        let mut first = Worker::fork(self.node, WARM, "fork-first")?;
        first.ask(&json!({ "operation": "inspect" }))?;
        report.forks.first_ms = first.ready_ms()?;
        first.finish()?;
        for index in 0..self.forks {
            let task = task(index);
            let before = self.yardstick()?;
            let mut fork = Worker::fork(self.node, WARM, &format!("fork-{index}"))?;
            let answer = fork.ask(&task.request)?;
            let ready = fork.ready_ms()?;
            report.forks.yardstick_ms.push(f64::midpoint(before, self.yardstick()?));
            let fixed = answer["fixed"] == true;
            say(format!(
                "fork {} ready after {ready:.0} ms: {} {}",
                index + 1,
                task.name,
                outcome(&answer)
            ));
            report.forks.ready_ms.push(ready);
            report.forks.ok += usize::from(fixed);
            for name in ["urandom", "uuid", "boot_id", "hostname"] {
                values += 1;
                seen.insert(format!("{name}={}", answer["identity"][name]));
            }
            clock_ok &= is_clock_right(&answer);
            fork.finish()?;
        }
        report.forks.asked = self.forks;
        report.entropy_unique = seen.len() == values;
        report.clock_ok = clock_ok;
        Ok(())
    }

    /// How long the same small thing takes now, in milliseconds: a client starts, asks containerd for its version, and ends. It
    /// depends on the machine's speed at this moment and on nothing that a fork does.
    fn yardstick(&self) -> Result<f64> {
        Ok(self.node.ctr(["version"]).succeed()?.took.as_secs_f64() * 1000.0)
    }

    /// One fork destroys all that it has; the next, made afterwards, has everything.
    fn isolation(&self, reference: &Value) -> Result<bool> {
        say("isolation: one fork deletes its files and overwrites its memory");
        let mut vandal = Worker::fork(self.node, WARM, "fork-vandal")?;
        let damage = vandal.ask(&json!({ "operation": "vandalise" }))?;
        ensure!(
            damage["work_exists"] == false && damage["memory"] == 0xEE,
            "the vandal did nothing: {damage}"
        );
        let own = held(&vandal.ask(&json!({ "operation": "inspect" }))?);
        ensure!(own != *reference, "the vandal sees no damage");
        let mut heir = Worker::fork(self.node, WARM, "fork-heir")?;
        let found = held(&heir.ask(&json!({ "operation": "inspect" }))?);
        Worker::finish_all(vec![vandal, heir])?;
        Ok(found == *reference)
    }

    fn at_once(&self, report: &mut Report) -> Result<()> {
        say(format!("{} forks at once", self.forks));
        let started = Instant::now();
        let workers = thread::scope(|scope| -> Result<Vec<Worker>> {
            let threads: Vec<_> = (0..self.forks)
                .map(|index| {
                    scope.spawn(move || -> Result<Worker> {
                        let task = task(index);
                        let mut fork = Worker::fork(self.node, WARM, &format!("crowd-{index}"))?;
                        let answer = fork.ask(&task.request)?;
                        if answer["fixed"] != true {
                            bail!("{}: {}", task.name, outcome(&answer));
                        }
                        Ok(fork)
                    })
                })
                .collect();
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")));
            joined.collect()
        })?;
        report.forks.concurrent_total_ms = started.elapsed().as_secs_f64() * 1000.0;
        // All of them are idle now.
        for pid in leftovers::vmms().into_iter().filter(|pid| memory::is_fork(*pid)) {
            let private = memory::of(pid)?;
            report.unique_mib.push(mib(private.own));
            report.dirtied_mib.push(mib(private.guest));
        }
        Worker::finish_all(workers)
    }

    /// The parent still has all that it had, and still works; then it ends.
    fn end_of(&self, mut parent: Worker, reference: &Value) -> Result<bool> {
        say("the parent still works");
        let unchanged = held(&parent.ask(&json!({ "operation": "inspect" }))?) == *reference;
        let answer = parent.ask(&task(0).request)?;
        ensure!(answer["fixed"] == true, "the parent: {}", outcome(&answer));
        parent.finish()?;
        Ok(unchanged)
    }
}

impl Forks {
    /// All tasks were done.
    pub(crate) fn is_complete(&self) -> bool {
        self.ok == self.asked
    }
}

/// Memory and files in an answer.
fn held(answer: &Value) -> Value {
    json!({ "memory": answer["memory"], "notes": answer["notes"] })
}

fn outcome(answer: &Value) -> String {
    match answer["fixed"].as_bool() {
        Some(true) => format!("fixed by {}, {} assertions hold", answer["rule"], answer["assertions"]),
        _ => format!("not fixed: {answer}"),
    }
}

fn is_clock_right(answer: &Value) -> bool {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |now| now.as_secs_f64());
    answer["identity"]["clock"]
        .as_f64()
        .is_some_and(|clock| (now - clock).abs() <= CLOCK_SECONDS)
}

#[expect(clippy::cast_precision_loss, reason = "a size for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
