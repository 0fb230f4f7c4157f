//! `cargo xtask bench`: parts that run one after the other, each in a lab of its own where there is no hardware virtualisation.
//! Only `machine`, tiny guests of the VMM alone, runs on this machine's own `/dev/kvm` everywhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};
use serde_json::{Map, Value};

use crate::beside_runc::{self, Options, Subject};
use crate::build;
use crate::demo::Program;
use crate::workspace::{Workspace, execute, say};

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Bench {
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
    /// A cold start beside runc's, stage by stage; host memory of an idle VM; starts beside ten idle containers
    Boot(Options),
    /// `ctr task exec` beside runc's, alone and many at once
    Exec(Options),
    /// Disk and output beside runc's
    Io(Options),
    /// TCP over a bridge beside runc's
    Net(Options),
}

/// A part of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Forks of a tiny guest of 1 GiB by the VMM alone: time to its first exit, and fifty at once
    Machine,
    /// The demo with fewer workers
    Workers,
    /// Root filesystems of 2 GiB and 50 MiB
    Rootfs,
    /// 900 MiB and 100 MiB of memory in use
    Memory,
}

impl Part {
    const ALL: [Self; 4] = [Self::Machine, Self::Workers, Self::Rootfs, Self::Memory];

    fn name(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Workers => "workers",
            Self::Rootfs => "rootfs",
            Self::Memory => "memory",
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Machine => &[],
            Self::Workers => &["--forks=6", "--cold=1"],
            Self::Rootfs => &["compare", "rootfs"],
            Self::Memory => &["compare", "memory"],
        }
    }
}

/// Runs a benchmark.
pub(crate) fn run(ws: &Workspace, command: &Bench) -> Result<ExitCode> {
    match command {
        Bench::Fork { json, no_build, part } => fork(ws, json.as_deref(), *no_build, *part),
        Bench::Boot(options) => beside_runc::run(ws, Subject::Boot, options),
        Bench::Exec(options) => beside_runc::run(ws, Subject::Exec, options),
        Bench::Io(options) => beside_runc::run(ws, Subject::Io, options),
        Bench::Net(options) => beside_runc::run(ws, Subject::Net, options),
    }
}

/// A part that fails does not keep the others from running.
fn fork(ws: &Workspace, json: Option<&Path>, no_build: bool, part: Option<Part>) -> Result<ExitCode> {
    let parts = part.map_or(Part::ALL.to_vec(), |part| vec![part]);
    let mut code = ExitCode::SUCCESS;
    let mut results = Map::new();
    for (number, part) in parts.into_iter().enumerate() {
        say(format!("bench: {}", part.name()));
        let file = ws.target.join(format!("bench-{}.json", part.name()));
        let _ = fs::remove_file(&file);
        let ended = match part {
            Part::Machine => machine(ws, &file)?,
            _ => containers(ws, part, &file, no_build || number > 1)?,
        };
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

/// A part with containers, by `ramet-demo`.
fn containers(ws: &Workspace, part: Part, json: &Path, no_build: bool) -> Result<ExitCode> {
    let program = Program {
        name: "bench",
        options: part.options().iter().map(ToString::to_string).collect(),
        json: Some(json.to_owned()),
        timeout: Duration::from_secs(8 * 60),
    };
    program.run(ws, no_build)
}

/// The VMM alone, on this machine.
fn machine(ws: &Workspace, json: &Path) -> Result<ExitCode> {
    if !Path::new("/dev/kvm").exists() {
        say("skipped: this machine has no /dev/kvm");
        return Ok(ExitCode::SUCCESS);
    }
    execute(build::cargo(ws).args(["build", "--release", "-p", "vmm", "--bins", "--example", "fork_bench"]))?;
    execute(
        Command::new(ws.programs_dir().join("examples/fork_bench"))
            .args(["200", "50"])
            .arg(json),
    )?;
    Ok(ExitCode::SUCCESS)
}
