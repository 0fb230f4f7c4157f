//! `cargo xtask bench`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Subcommand;

use crate::demo::Program;
use crate::workspace::Workspace;

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Forks beside cold workers and plain containers, and what does not change the time of a fork
    Fork {
        /// Write the results to this file
        #[arg(long, value_name = "PATH")]
        json: Option<PathBuf>,
        /// Use the programs in the target directory as they are
        #[arg(long)]
        no_build: bool,
    },
}

/// Runs a benchmark.
pub(crate) fn run(ws: &Workspace, command: &Command) -> Result<ExitCode> {
    let Command::Fork { json, no_build } = command;
    let program = Program {
        name: "bench",
        options: vec!["bench".into()],
        json: json.clone(),
        timeout: Duration::from_secs(40 * 60),
    };
    program.run(ws, *no_build)
}
