//! How long a fork of a tiny guest with 1 GiB of memory takes, from the start of the process to the first exit of its vCPU:
//!
//! ```text
//! fork_bench [FORKS] [AT_ONCE] [JSON]
//! ```
//!
//! The memory file is dense: every page of the gibibyte is in it. Each step is shown with its own time, so that one sees
//! which of them a fork's time goes to; with a file named, the same numbers are written there.

#[path = "../tests/common/mod.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod common;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use checkpoint::memory::{Extent, MemoryIndex, PAGE_SIZE};
use common::{Checkpoint, Vmm, more_lines};
use vmm::control::Request;

const MEMORY: u64 = 1 << 30;

/// Prints newlines for ever, with a pause between them.
const BEEPER: [u8; 18] = [
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, 0x0a, // mov al, '\n'
    0xee, // again: out dx, al
    0xb9, 0xc8, 0x00, 0x00, 0x00, // mov ecx, 200
    0xff, 0xc9, // wait: dec ecx
    0x75, 0xfc, // jnz wait
    0xeb, 0xf4, // jmp again
];

/// Time from the start to each step.
#[derive(Clone, Copy, Debug, Default)]
struct Steps {
    spawned: Duration,
    restored: Duration,
    resumed: Duration,
    first_exit: Duration,
}

fn program() -> Result<PathBuf> {
    Ok(std::env::current_exe()?
        .parent()
        .and_then(Path::parent)
        .context("no directory")?
        .join("ramet-vmm"))
}

/// A checkpoint whose memory file holds every page.
fn dense_checkpoint() -> Result<Checkpoint> {
    let console = tempfile::tempfile()?;
    let vmm = Vmm::spawn(&program()?)?;
    vmm.boot_tiny(&BEEPER, 1, MEMORY, &console)?;
    more_lines(&console, 2)?;
    let files = Checkpoint::new(1)?;
    vmm.save(&files, false)?;
    let index = MemoryIndex::read_from(File::open(files.path("memory.index"))?)?;
    let sparse = File::open(files.path("memory"))?;
    let dense = File::create(files.path("dense"))?;
    for start in (0..MEMORY).step_by(1 << 20) {
        dense.write_all_at(&[0x5a; 1 << 20], start)?;
    }
    for extent in &index.extents {
        let mut pages = vec![0; usize::try_from(extent.pages * PAGE_SIZE)?];
        sparse.read_exact_at(&mut pages, extent.source_page * PAGE_SIZE)?;
        dense.write_all_at(&pages, extent.start * PAGE_SIZE)?;
    }
    std::fs::rename(files.path("dense"), files.path("memory"))?;
    let whole = Extent {
        start: 0,
        pages: MEMORY / PAGE_SIZE,
        source: 0,
        source_page: 0,
    };
    std::fs::write(
        files.path("memory.index"),
        MemoryIndex::full(MEMORY / PAGE_SIZE, MEMORY, vec![whole])?.encode()?,
    )?;
    Ok(files)
}

/// Starts one fork and waits for its first output.
fn fork(files: &Checkpoint) -> Result<(Vmm, Steps)> {
    let (output, input) = std::io::pipe()?;
    let start = Instant::now();
    let vmm = Vmm::spawn(&program()?)?;
    let spawned = start.elapsed();
    let console = File::from(std::os::fd::OwnedFd::from(input));
    let (request, fds) = Vmm::restore_request(files, &[], &console)?;
    vmm.must(&request, &fds)?;
    let restored = start.elapsed();
    vmm.must(&Request::Resume, &[])?;
    let resumed = start.elapsed();
    (&output).read_exact(&mut [0])?;
    Ok((
        vmm,
        Steps {
            spawned,
            restored,
            resumed,
            first_exit: start.elapsed(),
        },
    ))
}

/// What one step of many forks took.
#[derive(serde::Serialize)]
struct Row {
    step: &'static str,
    p50_us: u128,
    p99_us: u128,
}

/// What a step took.
type Pick = fn(&Steps) -> Duration;

/// The steps one after the other, each without those before it, and their sum at the end.
const STEPS: [(&str, Pick); 5] = [
    ("process spawned", |steps| steps.spawned),
    ("state and memory restored", |steps| steps.restored - steps.spawned),
    ("resumed", |steps| steps.resumed - steps.restored),
    ("first exit of the vCPU", |steps| steps.first_exit - steps.resumed),
    ("all", |steps| steps.first_exit),
];

fn rows(forks: &[Steps]) -> Vec<Row> {
    STEPS
        .iter()
        .map(|(step, pick)| {
            let mut values: Vec<Duration> = forks.iter().map(pick).collect();
            values.sort_unstable();
            let at = |percent: usize| values[(values.len() * percent / 100).min(values.len() - 1)].as_micros();
            Row {
                step,
                p50_us: at(50),
                p99_us: at(99),
            }
        })
        .collect()
}

fn report(what: &str, rows: &[Row]) {
    println!("{what:<32} {:>10} {:>10}", "p50, us", "p99, us");
    for row in rows {
        println!("  {:<30} {:>10} {:>10}", row.step, row.p50_us, row.p99_us);
    }
    if let Some(longest) = rows[..rows.len() - 1].iter().max_by_key(|row| row.p50_us) {
        println!("  dominated by: {}\n", longest.step);
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse::<usize>());
    let (forks, at_once) = (number(0, 200)?, number(1, 50)?);
    let files = dense_checkpoint()?;
    let mut one_by_one = Vec::new();
    for _ in 0..forks {
        one_by_one.push(fork(&files)?.1);
    }
    let one_by_one = rows(&one_by_one);
    report(&format!("{forks} forks one by one"), &one_by_one);

    let start = Instant::now();
    let together: Vec<(Vmm, Steps)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(|| fork(&files))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("thread panicked")))
            .collect::<Result<_>>()
    })?;
    let all = start.elapsed();
    let together = rows(&together.iter().map(|(_, steps)| *steps).collect::<Vec<_>>());
    report(&format!("{at_once} forks at once"), &together);
    println!("all {at_once} had their first exit after {} ms", all.as_millis());
    if let Some(path) = arguments.get(2) {
        let json = serde_json::json!({
            "one_by_one": one_by_one, "at_once": together, "forks_at_once": at_once, "at_once_ms": all.as_millis(),
        });
        std::fs::write(path, serde_json::to_string_pretty(&json)?)?;
    }
    Ok(())
}
