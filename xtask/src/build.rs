//! Builds our programs with Cargo.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, list, read_text, say};

/// The packages that build programs, and those programs.
pub(crate) const PROGRAMS: &[(&str, &[&str])] = &[
    ("agent", &["ramet-agent"]),
    ("cli", &["ramet"]),
    ("e2e", &["ramet-demo"]),
    ("shim", &["containerd-shim-ramet-v2"]),
    ("snapshotter", &["ramet-snapshotter"]),
    ("vmm", &["ramet-vmm"]),
];

/// All packages that build programs.
pub(crate) fn all_packages() -> Vec<&'static str> {
    PROGRAMS.iter().map(|(package, _)| *package).collect()
}

/// Builds the programs of some packages. Cargo's own error names the package that does not build.
pub(crate) fn programs(ws: &Workspace, packages: &[&str]) -> Result<()> {
    say(format!("building {}", packages.join(", ")));
    let mut command = cargo(ws);
    command.args(["build", "--release", "--bins"]);
    for package in packages {
        command.args(["--package", package]);
    }
    let status = command.status().context("running cargo")?;
    if !status.success() {
        bail!("our programs do not build");
    }
    Ok(())
}

/// Builds the test programs of a package, without running them, and returns each with its target's name.
/// `selection` is what Cargo is told to choose, such as `--test NAME`.
pub(crate) fn tests(ws: &Workspace, package: &str, selection: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    say(format!("building the tests of {package}"));
    let output = cargo(ws)
        .args([
            "test",
            "--release",
            "--no-run",
            "--message-format=json-render-diagnostics",
            "--package",
            package,
        ])
        .args(selection)
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo")?;
    if !output.status.success() {
        bail!("the tests of package {package} do not build");
    }
    Ok(test_executables(&String::from_utf8_lossy(&output.stdout)))
}

/// The test program that was built last from the crate root `source`, without asking Cargo.
pub(crate) fn newest_test(ws: &Workspace, target: &str, source: &str) -> Result<PathBuf> {
    let mut newest = None;
    for dep_info in list(&ws.programs_dir().join("deps"))? {
        let name = dep_info.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_dep_info = name
            .strip_prefix(target)
            .is_some_and(|rest| rest.starts_with('-') && rest.ends_with(".d"));
        let program = dep_info.with_extension("");
        if is_dep_info && program.exists() && read_text(&dep_info)?.split_whitespace().any(|word| word == source) {
            let modified = program.metadata().and_then(|metadata| metadata.modified());
            let modified = modified.with_context(|| format!("looking at {}", program.display()))?;
            newest = newest.max(Some((modified, program)));
        }
    }
    let (_, path) = newest.with_context(|| format!("the tests in {source} were never built"))?;
    Ok(path)
}

/// The test programs in Cargo's JSON messages.
fn test_executables(messages: &str) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for message in messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
    {
        let is_test = message["profile"]["test"].as_bool() == Some(true);
        if let (true, Some(name), Some(path)) = (
            is_test,
            message["target"]["name"].as_str(),
            message["executable"].as_str(),
        ) {
            found.push((name.to_owned(), PathBuf::from(path)));
        }
    }
    found
}

/// Cargo, in the workspace.
pub(crate) fn cargo(ws: &Workspace) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(&ws.root);
    command
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn only_test_programs_are_taken() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"lib"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"name":"e2e"},"profile":{"test":true},"executable":"/t/e2e-1"}
not json"#;
        assert_eq!(
            test_executables(messages),
            [("e2e".to_owned(), PathBuf::from("/t/e2e-1"))]
        );
    }
}
