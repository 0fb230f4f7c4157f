//! Memory of a sandbox's processes while it starts, sampled beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::table::Memory;
use super::timeline::of_day;

/// Between two samples, at least.
const PERIOD: Duration = Duration::from_millis(50);
/// Sampling takes at most this part of the time.
const SHARE: u32 = 20;
const MIB: f64 = 1048576.0;

/// Memory of one process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Usage {
    resident: f64,
    private: f64,
}

/// Both processes at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Second of the day.
    at: f64,
    vmm: Usage,
    shim: Usage,
}

impl Sample {
    /// As a row of the table.
    pub(super) fn row(&self, stage: &'static str) -> Memory {
        Memory {
            stage,
            vmm_resident: self.vmm.resident / MIB,
            vmm_private: self.vmm.private / MIB,
            shim_resident: self.shim.resident / MIB,
            shim_private: self.shim.private / MIB,
        }
    }
}

/// Takes samples of the sandbox `id` until it is asked to stop.
pub(super) struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    /// Begins before the sandbox exists.
    pub(super) fn start(id: &str) -> Self {
        let root = std::env::var_os("RAMET_RUN_DIR").map_or_else(|| PathBuf::from("/run/ramet"), PathBuf::from);
        let state = root.join("default").join(id);
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut samples = Vec::new();
            while !asked.load(Ordering::Relaxed) {
                let begun = Instant::now();
                samples.extend(sample(&state));
                thread::sleep(PERIOD.max(begun.elapsed() * SHARE));
            }
            samples
        });
        Self { stop, thread }
    }

    /// The samples, in order.
    pub(super) fn finish(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// The last sample before a second of the day.
pub(super) fn last_before(samples: &[Sample], at: f64) -> Option<&Sample> {
    samples.iter().rev().find(|sample| sample.at <= at)
}

fn sample(state: &Path) -> Option<Sample> {
    let usage = |mark: &str| {
        let text = fs::read_to_string(state.join(mark)).ok()?;
        let mark: serde_json::Value = serde_json::from_str(&text).ok()?;
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", mark["pid"].as_u64()?)).ok()?;
        Some(parse(&rollup))
    };
    let (vmm, shim) = (usage("vmm.pid")?, usage("shim.pid")?);
    Some(Sample {
        at: of_day(SystemTime::now()),
        vmm,
        shim,
    })
}

fn parse(rollup: &str) -> Usage {
    let value = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok());
        number.unwrap_or(0.0) * 1024.0
    };
    Usage {
        resident: value("Rss:"),
        private: value("Private_Dirty:"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_numbers_are_read() {
        let text = "55d0-7fff ---p 00000000 00:00 0 [rollup]\nRss:                1840 kB\nPss: 9 kB\nPrivate_Dirty:         120 kB\n";
        let wanted = Usage {
            resident: 1840.0 * 1024.0,
            private: 120.0 * 1024.0,
        };
        assert_eq!(parse(text), wanted);
    }

    #[test]
    fn the_last_sample_before_a_moment_is_taken() {
        let sample = |at| Sample {
            at,
            vmm: Usage::default(),
            shim: Usage::default(),
        };
        let samples = [sample(1.0), sample(2.0), sample(3.0)];
        let found = last_before(&samples, 2.5).map(|sample| sample.at);
        assert_eq!(found, Some(2.0));
        assert!(last_before(&samples, 0.5).is_none());
    }
}
