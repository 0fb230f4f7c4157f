//! Programs of others that some end-to-end tests drive, built from Go modules whose versions `tests/tools/` pins.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, make_dir, say};

/// Static `nerdctl`; built unless it was since its recipe changed.
pub(crate) fn nerdctl(ws: &Workspace) -> Result<PathBuf> {
    let recipe = ws.root.join("tests/tools/nerdctl");
    let program = ws.target.join("tools/nerdctl");
    let modified = |path: PathBuf| path.metadata().and_then(|metadata| metadata.modified());
    let made = modified(program.clone()).ok();
    let asked = modified(recipe.join("go.sum")).context("looking at tests/tools/nerdctl/go.sum")?;
    if made.is_some_and(|made| made > asked) {
        return Ok(program);
    }
    say("building nerdctl");
    make_dir(&ws.target.join("tools"))?;
    let status = Command::new("go")
        .current_dir(&recipe)
        .env("CGO_ENABLED", "0")
        .args(["build", "-trimpath", "-ldflags=-s -w", "-o"])
        .arg(&program)
        .arg("github.com/containerd/nerdctl/cmd/nerdctl")
        .status()
        .context("running go")?;
    if !status.success() {
        bail!("nerdctl does not build: go ended with {status}");
    }
    Ok(program)
}
