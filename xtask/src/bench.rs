//! `cargo xtask bench`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Subcommand;

use crate::lab::{self, Job};
use crate::workspace::Workspace;

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Forks beside cold workers and plain containers
    Fork,
}

/// Runs a benchmark in the lab.
pub(crate) fn run(ws: &Workspace, command: &Command) -> Result<ExitCode> {
    let Command::Fork = command;
    lab::prepare(ws, false)?;
    let words = ["ramet-demo", "bench"].map(str::to_owned).to_vec();
    let outcome = lab::run(
        ws,
        &Job {
            name: "bench".into(),
            words,
            timeout: Duration::from_secs(1800),
            programs: vec![],
        },
    )?;
    Ok(ExitCode::from(outcome.code))
}
