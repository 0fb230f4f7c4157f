//! The stages of a cold start, from what shim and VMM log with `RAMET_LOG=shim=debug,vmm=debug`.
//!
//! Each line carries the time of this machine's clock, and so does the start of `ctr`: the stages are the gaps between marks, and
//! nothing lies between them. Only the guest's own steps are durations, which end when the agent was ready.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

const DAY: f64 = 86400.0;

/// The marks of the shim's log in the order in which they come, each with the stage that it ends.
const MARKS: [(&str, &str); 13] = [
    ("shim is up", "shim: bootstrap"),
    ("task_service: create ", "containerd: connects, asks for Create"),
    ("host side prepared", "Create: spec, layer images (EROFS), disks"),
    ("machine started", "Create: VMM makes the machine, loads the kernel"),
    (READY, ""),
    ("guest is up", "Create: first call to the agent"),
    ("root filesystem prepared", "Create: agent mounts the root filesystem"),
    ("done call=\"create\"", "Create: agent makes the container"),
    ("task_service: start ", "ctr, containerd: Create to Start"),
    ("done call=\"start\"", "Start: stdio, network, program"),
    ("process exited", "program runs, exit is told"),
    ("task_service: delete ", "ctr, containerd: exit to Delete"),
    ("done call=\"delete\"", "Delete: disks written, machine ended"),
];
/// The mark that the guest's own steps end with.
const READY: &str = "agent is ready";
/// The guest's step that is the kernel; all others are the agent's.
const KERNEL: &str = "kernel";

/// One cold start.
#[derive(Debug)]
pub(super) struct Timeline {
    /// Seconds of the day.
    start: f64,
    end: f64,
    marks: Vec<(&'static str, f64)>,
    /// Milliseconds that `start` of the shim took before the daemon was up.
    bootstrap_ms: f64,
    /// Name and milliseconds of the guest's steps until it was ready.
    guest: Vec<(String, f64)>,
}

/// Seconds of the day.
pub(super) fn of_day(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() % DAY
}

/// From one time of the day to a later one, in milliseconds.
fn between(from: f64, to: f64) -> f64 {
    (to - from).rem_euclid(DAY) * 1000.0
}

impl Timeline {
    /// Reads the shim's part of containerd's log.
    ///
    /// # Errors
    /// When a mark is missing.
    pub(super) fn read(log: &str, start: SystemTime, end: SystemTime) -> Result<Self> {
        let lines: Vec<(f64, &str)> = log.lines().filter_map(stamped).collect();
        let mut marks = Vec::new();
        for (mark, _) in MARKS {
            let found = lines.iter().find(|(_, text)| text.contains(mark));
            let (at, _) = found.with_context(|| format!("the shim did not log {mark:?}; it logged:\n{log}"))?;
            marks.push((mark, *at));
        }
        let up = lines.iter().find_map(|(_, text)| field(text, "since_start_us="));
        let guest = lines.iter().filter_map(|(_, text)| {
            let (_, rest) = text.split_once("guest step \"")?;
            Some((rest.split('"').next()?.to_owned(), field(rest, "us=")? / 1000.0))
        });
        Ok(Self {
            start: of_day(start),
            end: of_day(end),
            bootstrap_ms: up.context("the shim did not log since_start_us")? / 1000.0,
            guest: guest.collect(),
            marks,
        })
    }

    fn at(&self, wanted: &str) -> f64 {
        let found = self.marks.iter().find(|(mark, _)| *mark == wanted);
        found.map_or(self.start, |(_, at)| *at)
    }

    /// Milliseconds of the agent before it was ready.
    fn agent_ms(&self) -> f64 {
        let steps = self.guest.iter().filter(|(name, _)| name != KERNEL);
        steps.map(|(_, ms)| ms).sum()
    }

    /// When the agent began to run, in seconds of the day.
    pub(super) fn agent_began(&self) -> f64 {
        self.at(READY) - self.agent_ms() / 1000.0
    }

    /// When the host's side was prepared: the VMM waits for its machine.
    pub(super) fn prepared(&self) -> f64 {
        self.at("host side prepared")
    }

    /// When the agent was ready.
    pub(super) fn ready(&self) -> f64 {
        self.at(READY)
    }

    /// Each stage with its milliseconds; their sum is the whole.
    pub(super) fn stages(&self) -> Vec<(&'static str, f64)> {
        let up = self.at("shim is up");
        let began = up - self.bootstrap_ms / 1000.0;
        let mut stages = vec![
            (
                "ctr, containerd: image, snapshot, container",
                between(self.start, began),
            ),
            ("shim: bootstrap", self.bootstrap_ms),
        ];
        let mut last = up;
        for ((mark, stage), (_, at)) in MARKS.into_iter().zip(&self.marks).skip(1) {
            // An exit may be told before the answer to Start.
            let at = if (at - last).rem_euclid(DAY) > DAY / 2.0 {
                last
            } else {
                *at
            };
            if mark == READY {
                let kernel = self.agent_began();
                stages.push(("Create: kernel, until init runs", between(last, kernel)));
                stages.push(("Create: agent comes up (modules, mounts)", between(kernel, at)));
            } else {
                stages.push((stage, between(last, at)));
            }
            last = at;
        }
        stages.push(("shim ends, ctr removes snapshot and container", between(last, self.end)));
        stages
    }

    /// Steps of the guest, in milliseconds.
    pub(super) fn guest_steps(&self) -> impl Iterator<Item = (String, f64)> {
        self.guest.iter().map(|(name, ms)| (format!("guest: {name}"), *ms))
    }
}

/// Name and milliseconds of each step in the log of a VMM or a shim; `who` goes before the names.
pub(super) fn steps(who: &str, log: &str) -> Vec<(String, f64)> {
    let mut steps = Vec::new();
    for line in log.lines() {
        let Some((_, text)) = stamped(line) else { continue };
        let Some((before, elapsed)) = text.split_once(" elapsed=") else {
            continue;
        };
        let name = before.rsplit(": ").next().unwrap_or(before);
        if let Some(duration) = elapsed.split(' ').next().and_then(parse_duration) {
            steps.push((format!("{who}: {name}"), duration.as_secs_f64() * 1000.0));
        }
    }
    steps
}

/// A line that begins with a time such as `2026-11-30T20:24:01.477677Z`: its second of the day, and the rest.
fn stamped(line: &str) -> Option<(f64, &str)> {
    let (stamp, rest) = line.split_once(' ')?;
    let (_, time) = stamp.strip_suffix('Z')?.split_once('T')?;
    let mut parts = time.split(':').map(str::parse::<f64>);
    let (Some(Ok(hours)), Some(Ok(minutes)), Some(Ok(seconds)), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    Some((hours * 3600.0 + minutes * 60.0 + seconds, rest))
}

/// The number after `name` in a line.
fn field(text: &str, name: &str) -> Option<f64> {
    let (_, rest) = text.split_once(name)?;
    rest.split(' ').next()?.parse().ok()
}

/// A duration as `{:?}` writes it.
fn parse_duration(text: &str) -> Option<Duration> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(end);
    let scale = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        "µs" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * scale).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log with a mark each second, from 23:59:50 on.
    fn log() -> String {
        let mut text = String::from("time=\"2026-11-30T23:59:50Z\" level=info msg=\"containerd's own\"\n");
        for (second, (mark, _)) in (50..).zip(MARKS) {
            let (day, minute, second) = if second < 60 {
                (30, "23:59", second)
            } else {
                (31, "00:00", second - 60)
            };
            text +=
                &format!("2026-11-{day}T{minute}:{second:02}.000000Z  INFO shim::x: {mark} since_start_us=500000\n");
        }
        text + "2026-11-30T23:59:55.5Z DEBUG shim::guest: guest step \"kernel\" us=300000\n\
            2026-11-30T23:59:55.5Z DEBUG shim::guest: guest step \"modules\" us=250000\n"
    }

    #[test]
    fn stages_follow_each_other_and_midnight_does_no_harm() {
        let at = |seconds: f64| UNIX_EPOCH + Duration::from_secs_f64(seconds);
        let timeline = Timeline::read(&log(), at(DAY - 12.0), at(DAY + 4.0)).unwrap();
        let stages = timeline.stages();
        let sum: f64 = stages.iter().map(|(_, ms)| ms).sum();
        assert!((sum - 16000.0).abs() < 1.0, "{stages:?}");
        let of = |name: &str| stages.iter().find(|(stage, _)| stage.contains(name)).unwrap().1;
        assert!((of("kernel, until") - 750.0).abs() < 1.0);
        assert!((of("agent comes up") - 250.0).abs() < 1.0);
        assert!((of("ctr, containerd: image") - 1500.0).abs() < 1.0);
    }

    #[test]
    fn a_missing_mark_is_named() {
        let log = log().replace("machine started", "");
        let error = Timeline::read(&log, UNIX_EPOCH, UNIX_EPOCH).unwrap_err();
        assert!(error.to_string().contains("machine started"), "{error}");
    }

    #[test]
    fn steps_of_a_vmm_are_read() {
        let log = "2026-11-30T20:24:01.606910Z DEBUG vmm::service: KVM opened elapsed=39.239515ms\n\
            2026-11-30T20:24:01.6Z DEBUG vmm::vm::make: kernel loaded elapsed=1.5s\nnot a line elapsed=3ms\n";
        let steps = steps("VMM", log);
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[0].0, "VMM: KVM opened");
        assert!((steps[0].1 - 39.24).abs() < 0.01 && (steps[1].1 - 1500.0).abs() < 0.01);
    }
}
