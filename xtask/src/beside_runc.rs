//! `cargo xtask bench boot|exec|io|net`: what is promised beside runc, measured by `ramet-demo measure`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::demo::Program;
use crate::lab;
use crate::workspace::{Workspace, say};

/// Options of these benchmarks.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Write the results to this file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Use the programs in the target directory as they are
    #[arg(long)]
    no_build: bool,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    Boot,
    Exec,
    Io,
    Net,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Exec => "exec",
            Self::Io => "io",
            Self::Net => "net",
        }
    }

    /// Emulated machines are slow: less of everything.
    fn less(self) -> &'static [&'static str] {
        match self {
            Self::Boot => &["--rounds=3", "--idle=5"],
            Self::Exec => &["--rounds=5", "--parallel=10"],
            Self::Io => &["--mib=16", "--operations=300", "--rounds=1"],
            Self::Net => &["--mib=8", "--trips=300", "--rounds=2"],
        }
    }
}

/// Measures it, in the lab where there is no hardware virtualisation.
pub(crate) fn run(ws: &Workspace, subject: Subject, options: &Options) -> Result<ExitCode> {
    let mut words = vec!["measure".to_owned(), subject.name().to_owned()];
    if lab::is_emulated() {
        let less = subject.less();
        say(format!("an emulated machine is slow: {}", less.join(" ")));
        words.extend(less.iter().map(ToString::to_string));
    }
    let program = Program {
        name: "bench",
        options: words,
        json: options.json.clone(),
        timeout: Duration::from_secs(20 * 60),
    };
    program.run(ws, options.no_build)
}
