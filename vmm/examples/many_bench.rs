//! Whether a machine costs more beside many others: boots and forks tiny guests one after the other, all of which stay.
//!
//! ```text
//! many_bench [MACHINES]
//! ```

#[path = "../tests/common/mod.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod common;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use common::many::{Many, STEPS};

const MEMORY: u64 = 1 << 30;

fn program() -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let target = here.parent().and_then(Path::parent).context("no directory")?;
    Ok(target.join("ramet-vmm"))
}

/// Proportional and private memory of a process, in bytes.
fn memory(pid: i32) -> Result<(u64, u64)> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let number = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kilobytes
            .map(|number| number * 1024)
            .with_context(|| format!("no {name}"))
    };
    Ok((number("Pss:")?, number("Private_Dirty:")?))
}

fn report(what: &str, many: &Many) -> Result<()> {
    for (name, step) in STEPS {
        let (first, last) = many.first_and_last(step);
        println!("{what}: {name:<11} first fifth {first:>9.3?}  last fifth {last:>9.3?}");
    }
    let (mut shared, mut private) = (0, 0);
    for vmm in &many.machines {
        let (pss, dirty) = memory(vmm.pid.as_raw())?;
        shared += pss;
        private += dirty;
    }
    let count = u64::try_from(many.machines.len().max(1))?;
    println!(
        "{what}: memory of each  {} KiB of its own, {} KiB with its share of what is common",
        private / count / 1024,
        shared / count / 1024
    );
    Ok(())
}

fn main() -> Result<()> {
    let machines = std::env::args().nth(1).map_or(Ok(50), |text| text.parse())?;
    let program = program()?;
    report("boot", &Many::boot(&program, machines, MEMORY)?)?;
    report("fork", &Many::fork(&program, machines, MEMORY)?)
}
