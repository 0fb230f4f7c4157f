//! containerd's own test suite for snapshotters (`tests/snapshot-suite`, a Go module) against ours, on this machine.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::test::Summary;
use crate::workspace::{Workspace, make_dir, say};

/// How the tests are named in the sum.
const NAME: &str = "containerd's snapshotter suite";

/// Runs the suite and adds its results. Without Go, its modules or root it is skipped.
pub(crate) fn run(ws: &Workspace, summary: &mut Summary) {
    say(NAME);
    if let Some(reason) = obstacle(ws) {
        summary.skip(NAME, reason);
        return;
    }
    match suite(ws) {
        Ok(output) => take(&output, summary),
        Err(error) => summary.fail(format!("{NAME}: {error:#}")),
    }
}

/// Why it cannot run here.
fn obstacle(ws: &Workspace) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("only root can mount what it prepares".to_owned());
    }
    // What is there already is not fetched again.
    match go(ws).args(["mod", "download"]).output() {
        Err(error) => Some(format!("Go is not installed: {error}")),
        Ok(done) if !done.status.success() => {
            let said = String::from_utf8_lossy(&done.stderr);
            let last = said.trim_end().lines().last().unwrap_or("no reason given");
            Some(format!("its Go modules cannot be had: {last}"))
        }
        Ok(_) => None,
    }
}

fn go(ws: &Workspace) -> Command {
    let mut command = Command::new("go");
    command.current_dir(ws.root.join("tests/snapshot-suite"));
    command
}

/// Builds and runs it; what it printed.
fn suite(ws: &Workspace) -> Result<String> {
    let program = build(ws)?;
    let done = Command::new(program)
        .env("RAMET_SNAPSHOTTER", ws.program("ramet-snapshotter"))
        .args(["-test.v", "-test.timeout=5m"])
        .output()
        .context("running it")?;
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    if !done.status.success() {
        // Which test failed is in the sum; why, here.
        print!("{output}");
        eprint!("{}", String::from_utf8_lossy(&done.stderr));
    }
    if results(&output).next().is_none() {
        bail!("it ended with {} and no result", done.status);
    }
    Ok(output)
}

fn build(ws: &Workspace) -> Result<PathBuf> {
    let directory = ws.target.join("tools");
    make_dir(&directory)?;
    let program = directory.join("snapshot-suite");
    let status = go(ws)
        .args(["test", "-c", "-o"])
        .arg(&program)
        .status()
        .context("running go")?;
    if !status.success() {
        bail!("it does not build: go ended with {status}");
    }
    Ok(program)
}

/// Each test with its result, `PASS`, `FAIL` or `SKIP`, from the output of a Go test program.
fn results(output: &str) -> impl Iterator<Item = (&str, &str)> {
    output.lines().filter_map(|line| {
        let (word, rest) = line.trim_start().strip_prefix("--- ")?.split_once(": ")?;
        let name = rest.split(' ').next()?;
        Some((name, word))
    })
}

fn take(output: &str, summary: &mut Summary) {
    let mut whole = None;
    let mut failed = false;
    for (name, word) in results(output) {
        let Some((_, part)) = name.split_once('/') else {
            whole = Some(word);
            continue;
        };
        let test = format!("{NAME}: {part}");
        match word {
            "PASS" => summary.pass(test),
            "SKIP" => summary.skip(test, "the suite leaves it out for overlays"),
            _ => {
                failed = true;
                summary.fail(test);
            }
        }
    }
    // A panic ends the program before the test as a whole has a result; and it can fail by itself.
    if whole != Some("PASS") && !failed {
        summary.fail(format!("{NAME}, which did not end in order"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(output: &str) -> [usize; 3] {
        let mut summary = Summary::default();
        take(output, &mut summary);
        summary.counts()
    }

    #[test]
    fn parts_are_counted_and_the_whole_is_not() {
        let output = "=== RUN   TestSuite\n=== RUN   TestSuite/Basic\n--- FAIL: TestSuite (1.00s)\n    --- PASS: TestSuite/Basic (0.10s)\n\
                      \x20   --- FAIL: TestSuite/Walk (0.10s)\n    --- SKIP: TestSuite/Rename (0.00s)\nFAIL\n";
        assert_eq!(sum(output), [1, 1, 1]);
    }

    #[test]
    fn one_that_breaks_off_has_failed() {
        assert_eq!(
            sum("    --- PASS: TestSuite/Basic (0.10s)\npanic: test timed out\n"),
            [1, 1, 0]
        );
        assert_eq!(sum("--- FAIL: TestSuite (0.00s)\n"), [0, 1, 0]);
        assert_eq!(
            sum("--- PASS: TestSuite (0.00s)\n    --- PASS: TestSuite/Basic (0.10s)\n"),
            [1, 0, 0]
        );
    }
}
