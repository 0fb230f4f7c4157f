//! A cold `ctr run` of `true` beside runc's; where ours spends its time and memory; what running containers cost others.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use e2e::container::fresh_id;
use e2e::images::{Archive, BUSYBOX};
use e2e::private::PrivateNode;
use e2e::{Runtime, wait_until};

use super::overhead::{Sampler, last_before};
use super::table::{Bar, Measured, Memory, Row, Stage};
use super::timeline::{Timeline, steps};
use super::{BOTH, note, warm_up};
use crate::report::median;
use crate::say;

/// Starts beside idle containers.
const ROUNDS_BESIDE: usize = 3;
/// What a VM may still do after its container runs, before it counts as idle.
const SETTLE: Duration = Duration::from_secs(2);
/// How long a log may take to be copied.
const LOGGED: Duration = Duration::from_secs(20);

/// Milliseconds by name, in the order in which the names came.
#[derive(Default)]
struct Collected(Vec<Stage>);

impl Collected {
    fn add(&mut self, steps: impl Iterator<Item = (String, f64)>) {
        // A name that comes twice in one run is two steps of one kind.
        let mut run: BTreeMap<String, f64> = BTreeMap::new();
        let mut order = Vec::new();
        for (name, ms) in steps {
            if !run.contains_key(&name) {
                order.push(name.clone());
            }
            *run.entry(name).or_default() += ms;
        }
        for name in order {
            let ms = run.get(&name).copied().unwrap_or_default();
            match self.0.iter_mut().find(|stage| stage.what == name) {
                Some(stage) => stage.ms.push(ms),
                None => self.0.push(Stage {
                    what: name,
                    ms: vec![ms],
                }),
            }
        }
    }
}

pub(super) fn measure(node: &PrivateNode, rounds: usize, idle: usize) -> Result<Measured> {
    say("importing the image, a first container of each kind");
    node.import(&Archive::Busybox)?;
    warm_up(node)?;
    let mut cold = Row::new("ctr run of `true`, cold", "ms", Some(Bar::AtMost(4.0)));
    let (mut stages, mut beside) = (Collected::default(), Collected::default());
    for _ in 0..rounds {
        for runtime in BOTH {
            if !runtime.is_vm() {
                let done = node.run(runtime, BUSYBOX, &["true"]).succeed()?;
                note(&mut cold, runtime, millis(done.took));
                continue;
            }
            let start = timed(node)?;
            note(&mut cold, runtime, start.ms);
            let named = start.timeline.stages().into_iter();
            stages.add(named.map(|(name, ms)| (name.to_owned(), ms)));
            beside.add(start.steps.into_iter().chain(start.timeline.guest_steps()));
        }
    }
    let mut measured = Measured {
        rows: vec![cold],
        stages: stages.0,
        beside: beside.0,
        memory: memory(node)?,
        ..Measured::default()
    };
    if idle > 0 {
        let row = beside_idle(node, idle)?;
        let alone = median(&measured.rows.first().map(|row| row.ramet.clone()).unwrap_or_default());
        measured.notes.push(format!(
            "a cold start of ours beside {idle} idle containers of ours takes {:.2} of one alone",
            median(&row.ramet) / alone
        ));
        measured.rows.push(row);
    }
    Ok(measured)
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// One cold start of ours.
struct Start {
    /// The whole `ctr run --rm`.
    ms: f64,
    timeline: Timeline,
    /// What VMM and shim timed themselves.
    steps: Vec<(String, f64)>,
}

fn timed(node: &PrivateNode) -> Result<Start> {
    let id = fresh_id("boot");
    let log = Log::begin(node)?;
    let start = SystemTime::now();
    let done = node.run(Runtime::Ramet, BUSYBOX, &["true"]).id(&id).succeed()?;
    let shim_log = log.until("done call=\"delete\"");
    let vmm_log = node.log_directory().join(format!("default-{id}.vmm.log"));
    ensure!(
        wait_until(LOGGED, || vmm_log.exists()),
        "the shim left no {}",
        vmm_log.display()
    );
    let vmm = fs::read_to_string(&vmm_log).with_context(|| format!("reading {}", vmm_log.display()))?;
    let mut all = steps("VMM", &vmm);
    all.extend(steps("shim", &shim_log));
    Ok(Start {
        ms: millis(done.took),
        timeline: Timeline::read(&shim_log, start, start + done.took)?,
        steps: all,
    })
}

/// What is added to containerd's log, where shims log, too.
struct Log<'a> {
    node: &'a PrivateNode,
    from: usize,
}

impl<'a> Log<'a> {
    fn begin(node: &'a PrivateNode) -> Result<Self> {
        let from = node.whole_log("containerd")?.len();
        Ok(Self { node, from })
    }

    /// Waits for these words.
    fn until(&self, words: &str) -> String {
        let mut text = String::new();
        wait_until(LOGGED, || {
            let log = self.node.whole_log("containerd").unwrap_or_default();
            text = log.get(self.from..).unwrap_or_default().to_owned();
            text.contains(words)
        });
        text
    }
}

/// Memory of an idle container's VM, stage by stage.
fn memory(node: &PrivateNode) -> Result<Vec<Memory>> {
    say("memory of an idle VM");
    let id = fresh_id("memory");
    let log = Log::begin(node)?;
    let sampler = Sampler::start(&id);
    let start = SystemTime::now();
    let container = node
        .run(Runtime::Ramet, BUSYBOX, &["sleep", "100000"])
        .id(&id)
        .detach()?;
    std::thread::sleep(SETTLE);
    let samples = sampler.finish();
    container.remove()?;
    let timeline = Timeline::read(&log.until("done call=\"delete\""), start, SystemTime::now())?;
    let mut rows = Vec::new();
    for (stage, at) in [
        ("VMM spawned, waits for its machine", timeline.prepared()),
        ("kernel booted", timeline.agent_began()),
        ("agent ready", timeline.ready()),
        ("container runs, two seconds later", f64::INFINITY),
    ] {
        if let Some(sample) = last_before(&samples, at) {
            rows.push(sample.row(stage));
        }
    }
    Ok(rows)
}

/// Starts beside `count` idle containers of ours.
fn beside_idle(node: &PrivateNode, count: usize) -> Result<Row> {
    let mut containers = Vec::new();
    for number in 1..=count {
        say(format!("idle container {number} of {count}"));
        let run = node.run(Runtime::Ramet, BUSYBOX, &["sleep", "100000"]);
        containers.push(run.flag("--annotation=io.ramet.memory_mib=128").detach()?);
    }
    let mut row = Row::new(format!("the same beside {count} idle containers of ours"), "ms", None);
    for _ in 0..ROUNDS_BESIDE {
        for runtime in BOTH {
            let done = node.run(runtime, BUSYBOX, &["true"]).succeed()?;
            note(&mut row, runtime, millis(done.took));
        }
    }
    for container in containers {
        container.remove()?;
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_one_name_are_added_within_a_run_and_listed_across_runs() {
        let mut collected = Collected::default();
        let step = |name: &str, ms| (name.to_owned(), ms);
        collected.add([step("b", 1.0), step("a", 2.0), step("b", 3.0)].into_iter());
        collected.add([step("a", 5.0)].into_iter());
        let found: Vec<_> = collected
            .0
            .iter()
            .map(|stage| (stage.what.as_str(), stage.ms.clone()))
            .collect();
        assert_eq!(found, [("b", vec![4.0]), ("a", vec![2.0, 5.0])]);
    }
}
