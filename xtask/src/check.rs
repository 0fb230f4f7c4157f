//! Checks that need no running: formatting, lints, sizes of files, the direction of dependencies between our packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::build::cargo;
use crate::workspace::{Workspace, capture, list, read_text, say};

/// No source file may be longer; see the style rules in docs.
const MAX_LINES: usize = 700;

/// Which of our packages each may depend on. What is missing here may depend on none.
const ARROWS: &[(&str, &[&str])] = &[
    ("agent", &["mounts", "netlink", "protocol"]),
    ("cli", &["checkpoint", "protocol"]),
    ("shim", &["checkpoint", "netlink", "protocol", "vmm", "volumes"]),
    ("snapshotter", &["checkpoint", "protocol"]),
    ("vmm", &["checkpoint"]),
    ("volumes", &["mounts"]),
];

/// Runs all checks, so that one run shows everything that is wrong.
pub(crate) fn run(ws: &Workspace) -> Result<ExitCode> {
    let mut problems = source_problems(ws)?;
    problems.extend(dependency_problems(ws)?);
    let format: &[&str] = &["fmt", "--all", "--check"];
    let lint: &[&str] = &[
        "clippy",
        "--release",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ];
    for arguments in [format, lint] {
        say(format!("cargo {}", arguments.join(" ")));
        let status = cargo(ws).args(arguments).status().context("running cargo")?;
        if !status.success() {
            problems.push(format!("cargo {} ended with {status}", arguments.join(" ")));
        }
    }
    for problem in &problems {
        eprintln!("check: {problem}");
    }
    Ok(if problems.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn source_problems(ws: &Workspace) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for entry in list(&ws.root)? {
        let src = entry.join("src");
        if entry != ws.target && src.is_dir() {
            for file in rust_files(&src)? {
                let lines = read_text(&file)?.lines().count();
                if lines > MAX_LINES {
                    let file = file.strip_prefix(&ws.root).unwrap_or(&file);
                    problems.push(format!("{} has {lines} lines, more than {MAX_LINES}", file.display()));
                }
            }
        }
    }
    Ok(problems)
}

fn rust_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in list(dir)? {
        if fs::metadata(&path)
            .with_context(|| format!("looking at {}", path.display()))?
            .is_dir()
        {
            files.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// Set for dependencies in this workspace.
    path: Option<String>,
}

fn dependency_problems(ws: &Workspace) -> Result<Vec<String>> {
    let json = capture(cargo(ws).args(["metadata", "--format-version=1", "--no-deps"]))?;
    let metadata: Metadata = serde_json::from_slice(&json).context("reading cargo's metadata")?;
    Ok(wrong_arrows(&metadata))
}

fn wrong_arrows(metadata: &Metadata) -> Vec<String> {
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let allowed = ARROWS
            .iter()
            .find(|(name, _)| *name == package.name)
            .map_or(&[][..], |(_, allowed)| allowed);
        for dependency in package
            .dependencies
            .iter()
            .filter(|dependency| dependency.path.is_some())
        {
            if !allowed.contains(&dependency.name.as_str()) {
                problems.push(format!("{} must not depend on {}", package.name, dependency.name));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_arrow_is_named() {
        let json = r#"{"packages": [
            {"name": "vmm", "dependencies": [{"name": "checkpoint", "path": "/c"}, {"name": "protocol", "path": "/p"},
                                             {"name": "libc", "path": null}]},
            {"name": "protocol", "dependencies": []}]}"#;
        let metadata: Metadata = serde_json::from_str(json).unwrap();
        assert_eq!(wrong_arrows(&metadata), ["vmm must not depend on protocol"]);
    }
}
