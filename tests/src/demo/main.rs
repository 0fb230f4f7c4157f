//! `ramet-demo`: a worker is provisioned once and forked twelve times, beside cold workers and plain containers.
//!
//! Runs as root on a machine with KVM, or in the lab, with a containerd and a snapshotter of its own under one directory.
//! `ramet-demo compare` measures instead what must not change the time of a fork: the root filesystem, memory in use;
//! `ramet-demo measure` what is promised beside runc, and `ramet-demo volumes` files of the host in containers.

mod bench;
mod experiment;
mod measure;
mod memory;
mod model;
mod padding;
mod report;
mod volumes;
mod worker;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use e2e::private::PrivateNode;
use serde::Serialize;

use crate::experiment::Experiment;
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
    /// Files of the host in a container, beside runc's
    Volumes,
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

/// Answers whether everything that must hold held. Measured ratios are shown, not judged: they depend on the machine.
fn run(args: &Args) -> Result<bool> {
    match &args.command {
        Some(Command::Load { load }) => measure::load::run(load)?,
        Some(Command::Volumes) => show(args, &on_a_node(args, &[], |node| volumes::measure(node))?)?,
        Some(Command::Measure { subject }) => {
            let measured = on_a_node(args, &measure::ENVIRONMENT, |node| measure::measure(node, subject))?;
            show(args, &measured)?;
        }
        Some(Command::Compare { .. }) | None => {
            let report = on_a_node(args, &[], |node| forks(args, node))?;
            show(args, &report)?;
            return Ok(report.holds());
        }
    }
    Ok(true)
}

/// Measures on a node of its own, whose daemons have these variables.
fn on_a_node<T>(args: &Args, environment: &[(&str, &str)], work: impl FnOnce(&PrivateNode) -> Result<T>) -> Result<T> {
    say("starting a containerd and a snapshotter of our own");
    let node = PrivateNode::start_with(&args.dir, environment)?;
    let result = work(&node);
    if result.is_err() {
        for daemon in ["containerd", "snapshotter"] {
            eprintln!("--- end of the {daemon} log\n{}", node.log(daemon));
        }
    }
    result
}

/// Prints results, and writes them where that was asked for.
fn show(args: &Args, results: &(impl Serialize + fmt::Display)) -> Result<()> {
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(results)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    print!("{results}");
    Ok(())
}

/// Forks: what must not change their time, or the whole experiment.
fn forks(args: &Args, node: &PrivateNode) -> Result<Report> {
    if let Some(Command::Compare { what }) = args.command {
        return Ok(Report {
            comparison: Some(bench::compare(node, what)?),
            ..Report::default()
        });
    }
    Experiment {
        node,
        forks: args.forks,
        cold: args.cold,
    }
    .run()
}

/// Says what is being done.
pub(crate) fn say(what: impl AsRef<str>) {
    use std::sync::LazyLock;
    use std::time::Instant;
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    eprintln!("[{:6.1} s] {}", START.elapsed().as_secs_f64(), what.as_ref());
}
