//! `cargo xtask demo`: runs `ramet-demo` in the lab.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::lab::{self, Job};
use crate::workspace::Workspace;

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

/// Runs the demo and copies its results back.
pub(crate) fn run(ws: &Workspace, args: &Args) -> Result<ExitCode> {
    lab::prepare(ws, false)?;
    let words = ["ramet-demo", "--json", "/run/lab-out/demo.json"]
        .map(str::to_owned)
        .to_vec();
    let outcome = lab::run(
        ws,
        &Job {
            name: "demo".into(),
            words,
            timeout: Duration::from_secs(1200),
            programs: vec![],
        },
    )?;
    if let Some(path) = &args.json {
        std::fs::copy(outcome.logs.join("run/lab-out/demo.json"), path)?;
    }
    Ok(ExitCode::from(outcome.code))
}
