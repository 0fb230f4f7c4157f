//! `cargo xtask demo` and what it shares with `cargo xtask bench`: running `ramet-demo`, in the lab or on this machine.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::lab::{self, Job, Repeat};
use crate::workspace::{Workspace, say};
use crate::{guest, setup};

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// How many forks
    #[arg(long, value_name = "N")]
    forks: Option<usize>,
    /// How many cold workers
    #[arg(long, value_name = "N")]
    cold: Option<usize>,
    /// Use the programs in the target directory as they are
    #[arg(long)]
    no_build: bool,
}

/// Runs the demo.
pub(crate) fn run(ws: &Workspace, args: &Args) -> Result<ExitCode> {
    let mut options = Vec::new();
    for (name, value) in [("--forks", args.forks), ("--cold", args.cold)] {
        if let Some(value) = value {
            options.extend([name.to_owned(), value.to_string()]);
        }
    }
    let program = Program {
        name: "demo",
        options,
        json: args.json.clone(),
        timeout: Duration::from_secs(20 * 60),
    };
    program.run(ws, args.no_build)
}

/// One use of `ramet-demo`.
pub(crate) struct Program {
    /// A short name for the logs.
    pub(crate) name: &'static str,
    /// Options, without `--json`.
    pub(crate) options: Vec<String>,
    /// Where the results go.
    pub(crate) json: Option<PathBuf>,
    /// Ends the lab's job; on this machine nothing is ended.
    pub(crate) timeout: Duration,
}

impl Program {
    /// Runs it on this machine if that has hardware virtualisation, otherwise in the lab.
    pub(crate) fn run(&self, ws: &Workspace, no_build: bool) -> Result<ExitCode> {
        lab::prepare(ws, no_build)?;
        if lab::is_emulated() {
            say("no hardware virtualisation here: running in the lab, an emulated machine");
            self.run_in_lab(ws)
        } else {
            self.run_here(ws)
        }
    }

    fn run_in_lab(&self, ws: &Workspace) -> Result<ExitCode> {
        const RESULT: &str = "run/lab-out/result.json";
        let mut words = vec!["ramet-demo".to_owned(), "--json".to_owned(), format!("/{RESULT}")];
        words.extend(self.options.iter().cloned());
        let job = Job {
            name: self.name.into(),
            words,
            timeout: self.timeout,
            programs: vec![],
            repeat: Repeat::Always,
        };
        let outcome = lab::run(ws, &job)?;
        let result = outcome.logs.join(RESULT);
        if let (Some(json), true) = (&self.json, result.exists()) {
            std::fs::copy(&result, json).with_context(|| format!("copying the results to {}", json.display()))?;
        }
        Ok(ExitCode::from(outcome.code))
    }

    fn run_here(&self, ws: &Workspace) -> Result<ExitCode> {
        setup::ensure_containerd()?;
        let programs = ws.programs_dir();
        let mut path = programs.clone().into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let guest_dir = guest::paths(ws).kernel.with_file_name("");
        let mut command = Command::new(programs.join("ramet-demo"));
        command.env("PATH", path).env("RAMET_BIN_DIR", &programs);
        command
            .env("RAMET_GUEST_DIR", guest_dir)
            .env("RAMET_IMAGES_DIR", ws.target.join("images"));
        if let Some(json) = &self.json {
            command.arg("--json").arg(json);
        }
        let status = command.args(&self.options).status().context("running ramet-demo")?;
        Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}
