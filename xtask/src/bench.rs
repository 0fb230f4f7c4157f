//! `cargo xtask bench`: parts that run one after the other, each in a lab of its own where there is no hardware virtualisation.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};
use serde_json::{Map, Value};

use crate::demo::Program;
use crate::workspace::{Workspace, say};

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Forks beside cold workers and plain containers, and what does not change the time of a fork
    Fork {
        /// Write the results of all parts to this file
        #[arg(long, value_name = "PATH")]
        json: Option<PathBuf>,
        /// Use the programs in the target directory as they are
        #[arg(long)]
        no_build: bool,
        /// Run one part alone
        #[arg(long)]
        part: Option<Part>,
    },
}

/// A part of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// The demo with fewer workers
    Workers,
    /// Root filesystems of 2 GiB and 50 MiB
    Rootfs,
    /// 900 MiB and 100 MiB of memory in use
    Memory,
}

impl Part {
    const ALL: [Self; 3] = [Self::Workers, Self::Rootfs, Self::Memory];

    fn name(self) -> &'static str {
        match self {
            Self::Workers => "workers",
            Self::Rootfs => "rootfs",
            Self::Memory => "memory",
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Workers => &["--forks=6", "--cold=1"],
            Self::Rootfs => &["compare", "rootfs"],
            Self::Memory => &["compare", "memory"],
        }
    }
}

/// Runs a benchmark. A part that fails does not keep the others from running.
pub(crate) fn run(ws: &Workspace, command: &Command) -> Result<ExitCode> {
    let Command::Fork { json, no_build, part } = command;
    let parts = part.map_or(Part::ALL.to_vec(), |part| vec![part]);
    let mut code = ExitCode::SUCCESS;
    let mut results = Map::new();
    for (number, part) in parts.into_iter().enumerate() {
        say(format!("bench: {}", part.name()));
        let file = ws.target.join(format!("bench-{}.json", part.name()));
        let _ = fs::remove_file(&file);
        let program = Program {
            name: "bench",
            options: part.options().iter().map(ToString::to_string).collect(),
            json: Some(file.clone()),
            timeout: Duration::from_secs(8 * 60),
        };
        let ended = program.run(ws, *no_build || number > 0)?;
        if ended != ExitCode::SUCCESS {
            code = ended;
        }
        if let Ok(text) = fs::read_to_string(&file) {
            results.insert(part.name().into(), serde_json::from_str(&text)?);
        }
    }
    if let Some(json) = json {
        let text = serde_json::to_string_pretty(&Value::Object(results))?;
        fs::write(json, text + "\n").with_context(|| format!("writing {}", json.display()))?;
    }
    Ok(code)
}
