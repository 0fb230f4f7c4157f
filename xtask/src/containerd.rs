//! The releases of containerd that the lab can run. 1.7 is in its root filesystem; others travel with the job and come first in
//! its PATH.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::mirror;
use crate::tools::go_build;
use crate::workspace::{Workspace, execute, make_dir, say};

/// What is taken of a release.
const PROGRAMS: &[&str] = &["containerd", "ctr", "containerd-shim-runc-v2"];

/// A release of containerd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Release {
    /// Debian bookworm's
    #[value(name = "1.6")]
    V1_6,
    /// Debian trixie's, which is what the lab has
    #[default]
    #[value(name = "1.7")]
    V1_7,
    /// The one that tests/containerd-2/go.mod names, built with Go
    #[value(name = "2")]
    V2,
}

impl Release {
    /// Programs that must travel with a job, by name. Made once and kept.
    pub(crate) fn programs(self, ws: &Workspace) -> Result<Vec<(String, PathBuf)>> {
        let dir = match self {
            Self::V1_6 => debian(ws, "bookworm")?,
            Self::V1_7 => return Ok(Vec::new()),
            Self::V2 => go(ws)?,
        };
        Ok(PROGRAMS
            .iter()
            .map(|name| ((*name).to_owned(), dir.join(name)))
            .collect())
    }
}

/// Unpacks the package of a Debian release; returns where its programs are.
fn debian(ws: &Workspace, suite: &str) -> Result<PathBuf> {
    let lab = ws.lab_dir()?;
    let root = lab.join(format!("containerd-{suite}"));
    let programs = root.join("usr/bin");
    if root.exists() {
        return Ok(programs);
    }
    let work = lab.join(format!("containerd-{suite}.work"));
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("removing {}", work.display()))?;
    }
    let mirror = mirror::find()?;
    say(format!("unpacking {suite}'s containerd from {}", mirror.uri));
    let mut command = mirror.mmdebstrap("extract", "containerd");
    execute(command.arg(suite).arg(&work).arg(&mirror.uri))?;
    fs::rename(&work, &root).context("renaming the unpacked containerd")?;
    Ok(programs)
}

/// Builds containerd 2 with this machine's Go; Go itself sees what is up to date.
fn go(ws: &Workspace) -> Result<PathBuf> {
    let programs = ws.lab_dir()?.join("containerd-2");
    make_dir(&programs)?;
    say("building containerd 2 with Go");
    let packages: Vec<String> = PROGRAMS
        .iter()
        .map(|name| format!("github.com/containerd/containerd/v2/cmd/{name}"))
        .collect();
    go_build(&ws.root.join("tests/containerd-2"), &programs, &packages)
        .context("containerd 2 needs a Go as new as tests/containerd-2/go.mod says")?;
    Ok(programs)
}
