//! Programs of others that some end-to-end tests drive, built from Go modules whose versions `tests/tools/` pins.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::workspace::{Workspace, execute, make_dir, say};

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
    go_build(&recipe, &program, &["github.com/containerd/nerdctl/cmd/nerdctl"]).context("building nerdctl")?;
    Ok(program)
}

/// Builds static programs of the Go module in `module`, with what its `go.mod` pins. With several packages, `output` is a directory.
pub(crate) fn go_build(module: &Path, output: &Path, packages: &[impl AsRef<OsStr>]) -> Result<()> {
    let mut command = Command::new("go");
    command
        .current_dir(module)
        .env("CGO_ENABLED", "0")
        // Drivers of containerd's that need C libraries or that nobody asks for here; others ignore the tags.
        .args([
            "build",
            "-trimpath",
            "-tags=no_btrfs,no_zfs,no_devmapper",
            "-ldflags=-s -w",
            "-o",
        ])
        .arg(output)
        .args(packages);
    execute(&mut command)
}
