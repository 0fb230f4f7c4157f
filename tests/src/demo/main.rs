//! `ramet-demo`: a worker is provisioned once and forked twelve times, beside cold workers and plain containers.
//!
//! Runs as root on a machine with KVM, or in the lab, with a containerd and a snapshotter of its own under one directory.
//! `ramet-demo compare` measures instead what must not change the time of a fork: the root filesystem, memory in use;
//! `ramet-demo measure` what is promised beside runc.

mod bench;
mod experiment;
mod measure;
mod memory;
mod model;
mod padding;
mod report;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use e2e::private::PrivateNode;

use crate::experiment::Experiment;
use crate::measure::Measured;
use crate::report::Report;

/// Forks of a warm worker, measured.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// How many forks
    #[arg(long, default_value_t = 12)]
    forks: usize,
    /// How many cold workers
    #[arg(long, default_value_t = 3)]
    cold: usize,
    /// Write the results to this file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Where containerd and the snapshotter keep their files; emptied afterwards
    #[arg(long, value_name = "DIR", default_value = "/var/lib/ramet-demo")]
    dir: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Forks that differ in one respect, in turns
    Compare {
        /// In which
        what: bench::What,
    },
    /// Our runtime beside runc's
    Measure {
        /// What
        #[command(subcommand)]
        subject: measure::Subject,
    },
    /// Makes load; what `measure` runs in containers
    #[command(hide = true)]
    Load {
        /// Which
        #[command(subcommand)]
        load: measure::load::Load,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:?}");
            ExitCode::FAILURE
        }
    }
}

/// Answers whether everything that must hold held.
fn run(args: &Args) -> Result<bool> {
    if let Some(Command::Load { load }) = &args.command {
        measure::load::run(load)?;
        return Ok(true);
    }
    say("starting a containerd and a snapshotter of our own");
    let environment = match &args.command {
        Some(Command::Measure { .. }) => measure::ENVIRONMENT.as_slice(),
        _ => &[],
    };
    let node = PrivateNode::start_with(&args.dir, environment)?;
    let result = results(args, &node);
    if result.is_err() {
        for daemon in ["containerd", "snapshotter"] {
            eprintln!("--- end of the {daemon} log\n{}", node.log(daemon));
        }
    }
    drop(node);
    let results = result?;
    if let Some(path) = &args.json {
        let text = match &results {
            Results::Forks(report) => serde_json::to_string_pretty(report)?,
            Results::Measured(measured) => serde_json::to_string_pretty(measured)?,
        };
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    match results {
        Results::Forks(report) => {
            print!("{report}");
            Ok(report.holds())
        }
        // Ratios are shown, not judged: they depend on the machine.
        Results::Measured(measured) => {
            print!("{measured}");
            Ok(true)
        }
    }
}

/// What was found.
enum Results {
    Forks(Box<Report>),
    Measured(Measured),
}

fn results(args: &Args, node: &PrivateNode) -> Result<Results> {
    let report = match &args.command {
        Some(Command::Measure { subject }) => return measure::measure(node, subject).map(Results::Measured),
        Some(Command::Compare { what }) => Report {
            comparison: Some(bench::compare(node, *what)?),
            ..Report::default()
        },
        _ => Experiment {
            node,
            forks: args.forks,
            cold: args.cold,
        }
        .run()?,
    };
    Ok(Results::Forks(Box::new(report)))
}

/// Says what is being done.
pub(crate) fn say(what: impl AsRef<str>) {
    use std::sync::LazyLock;
    use std::time::Instant;
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    eprintln!("[{:6.1} s] {}", START.elapsed().as_secs_f64(), what.as_ref());
}
