//! Many machines one after the other, each beside all those before it.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use vmm::control::Request;

use super::script::Script;
use super::{Checkpoint, Vmm, eventually, text};

/// Time from the start of the process to each step of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    /// The process runs.
    pub(crate) spawned: Duration,
    /// It answers that the machine is made.
    pub(crate) made: Duration,
    /// The first thing the guest did is seen.
    pub(crate) first_exit: Duration,
}

/// Takes the time of one step.
pub(crate) type Step = fn(&Steps) -> Duration;

/// What is looked at.
pub(crate) const STEPS: [(&str, Step); 3] = [
    ("spawned", |steps| steps.spawned),
    ("made", |steps| steps.made),
    ("first exit", |steps| steps.first_exit),
];

/// Machines that do nothing any more.
#[derive(Default)]
pub(crate) struct Many {
    pub(crate) machines: Vec<Vmm>,
    pub(crate) steps: Vec<Steps>,
}

impl Many {
    /// Boots so many.
    pub(crate) fn boot(program: &Path, machines: usize, memory_bytes: u64) -> Result<Self> {
        let code = Script::default().print('a').code();
        Self::start(program, machines, |vmm, console| {
            vmm.boot_tiny(&code, 1, memory_bytes, console)
        })
    }

    /// Forks so many of one checkpoint.
    pub(crate) fn fork(program: &Path, machines: usize, memory_bytes: u64) -> Result<Self> {
        let code = Script::default().wait_for_fork('a').print('b').code();
        let console = tempfile::tempfile()?;
        let parent = Vmm::spawn(program)?;
        parent.boot_tiny(&code, 1, memory_bytes, &console)?;
        eventually("the parent is ready", || (text(&console) == "a\n").then_some(()))?;
        let files = Checkpoint::new(1)?;
        parent.save(&files, false)?;
        drop(parent);
        Self::start(program, machines, |vmm, console| vmm.restore(&files, &[], console))
    }

    fn start(program: &Path, machines: usize, make: impl Fn(&Vmm, &File) -> Result<()>) -> Result<Self> {
        let mut many = Self::default();
        for _ in 0..machines {
            let (output, input) = std::io::pipe()?;
            let console = File::from(OwnedFd::from(input));
            let start = Instant::now();
            let vmm = Vmm::spawn(program)?;
            let spawned = start.elapsed();
            make(&vmm, &console)?;
            let made = start.elapsed();
            (&output).read_exact(&mut [0])?;
            many.steps.push(Steps {
                spawned,
                made,
                first_exit: start.elapsed(),
            });
            many.machines.push(vmm);
        }
        for vmm in &many.machines {
            vmm.must(&Request::Stats, &[])?;
        }
        Ok(many)
    }

    /// The shortest times of a step among the first and among the last fifth: with few and with many machines beside it.
    pub(crate) fn first_and_last(&self, step: Step) -> (Duration, Duration) {
        let fifth = self.steps.len() / 5;
        let least = |steps: &[Steps]| steps.iter().map(step).min().unwrap_or_default();
        (
            least(&self.steps[..fifth]),
            least(&self.steps[self.steps.len() - fifth..]),
        )
    }
}
