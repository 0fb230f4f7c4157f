//! `cargo xtask test`: every tier, then one line with the sum.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::build::{self, cargo};
use crate::containerd::Release;
use crate::e2e::Suite;
use crate::workspace::{Workspace, capture, say};
use crate::{e2e, guest, images, setup, snapshot_suite};

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the end-to-end tests, which need the lab
    #[arg(long)]
    no_lab: bool,
}

/// The VMM's test program that runs tiny guests on this machine's /dev/kvm.
const KVM_TIER: &str = "machine";

/// Results of test programs, summed.
#[derive(Default, Debug, PartialEq)]
pub(crate) struct Summary {
    passed: Vec<String>,
    failed: Vec<String>,
    skipped: Vec<Skipped>,
}

#[derive(Debug, PartialEq)]
struct Skipped {
    test: String,
    reason: String,
}

impl Summary {
    pub(crate) fn pass(&mut self, test: impl Into<String>) {
        self.passed.push(test.into());
    }

    pub(crate) fn fail(&mut self, test: impl Into<String>) {
        self.failed.push(test.into());
    }

    pub(crate) fn skip(&mut self, test: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push(Skipped {
            test: test.into(),
            reason: reason.into(),
        });
    }

    /// Takes one line of libtest's output.
    fn take(&mut self, line: &str) {
        let Some((test, result)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... ")) else {
            return;
        };
        let (word, reason) = result.split_once(", ").unwrap_or((result, "no reason given"));
        match word.trim() {
            "ok" => self.passed.push(test.to_owned()),
            "ignored" => self.skip(test, reason),
            word if word.starts_with("FAILED") => self.failed.push(test.to_owned()),
            _ => {}
        }
    }

    /// Takes the whole output of a test program.
    pub(crate) fn take_all(&mut self, output: &str) {
        output.lines().for_each(|line| self.take(line));
    }

    /// Counts as failed what should have run and has no result.
    pub(crate) fn expect(&mut self, tests: &[String], reason: &str) {
        for test in tests {
            let is_skipped = self.skipped.iter().any(|skipped| skipped.test == *test);
            if !is_skipped && !self.passed.contains(test) && !self.failed.contains(test) {
                self.failed.push(format!("{test} (no result: {reason})"));
            }
        }
    }

    /// Takes a bad exit code for a failure if no test accounts for it.
    pub(crate) fn expect_failure(&mut self, code: u8) {
        if self.failed.is_empty() {
            self.failed.push(format!("a test program, which ended with {code}"));
        }
    }

    /// Adds the results of other programs.
    pub(crate) fn add(&mut self, other: Self) {
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
        self.passed.extend(other.passed);
    }

    /// Adds results of the same program. A test that ran several times counts once, and as failed if it failed once.
    pub(crate) fn merge(&mut self, other: Self) {
        self.add(other);
        self.passed.sort();
        self.passed.dedup();
        self.passed.retain(|test| !self.failed.contains(test));
    }

    /// How many passed, failed and were skipped.
    pub(crate) fn counts(&self) -> [usize; 3] {
        [self.passed.len(), self.failed.len(), self.skipped.len()]
    }

    /// Prints what was skipped and failed, and as the last line the sum; returns our exit code.
    pub(crate) fn print(&self) -> ExitCode {
        for Skipped { test, reason } in &self.skipped {
            println!("skipped {test}: {reason}");
        }
        for test in &self.failed {
            println!("FAILED {test}");
        }
        let [passed, failed, skipped] = self.counts();
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        if self.failed.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// Sets everything up, runs all tests and prints the sum as the last line.
pub(crate) fn run(ws: &Workspace, args: &Args) -> Result<ExitCode> {
    let started = Instant::now();
    setup::ensure()?;
    build::programs(ws, &build::all_packages())?;
    let mut summary = Summary::default();
    let mut left_out = Vec::new();
    if let Some(reason) = kvm_problem() {
        left_out = kvm_tier(ws)?;
        for test in &left_out {
            summary.skip(test, &reason);
        }
    }
    native_tests(ws, &left_out, &mut summary)?;
    snapshot_suite::run(ws, &mut summary);
    if args.no_lab {
        summary.skip("end-to-end tests", "--no-lab was given");
    } else if let Err(error) = end_to_end_tests(ws, &mut summary) {
        summary.failed.push(format!("end-to-end tests: {error:#}"));
    }
    say(format!("all tiers took {} s", started.elapsed().as_secs()));
    Ok(summary.print())
}

/// Runs unit and property tests of all packages, and the VMM's tests with tiny guests. Those of package e2e that need
/// the lab are not among them: Cargo.toml says so.
fn native_tests(ws: &Workspace, left_out: &[String], summary: &mut Summary) -> Result<()> {
    say("running unit and property tests, and the VMM's tests on /dev/kvm");
    let mut command = cargo(ws);
    command.args(["test", "--release", "--workspace", "--no-fail-fast", "--"]);
    for test in left_out {
        command.args(["--skip", test]);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("running cargo test")?;
    let stdout = child.stdout.take().context("cargo test has no stdout")?;
    let before = summary.failed.len();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("reading the output of cargo test")?;
        println!("{line}");
        summary.take(&line);
    }
    let status = child.wait().context("waiting for cargo test")?;
    if !status.success() && summary.failed.len() == before {
        // It did not build, or a test program crashed.
        summary.failed.push(format!("cargo test, which ended with {status}"));
    }
    Ok(())
}

/// The names of the tests that need /dev/kvm.
fn kvm_tier(ws: &Workspace) -> Result<Vec<String>> {
    let mut tests = Vec::new();
    for (_, program) in build::tests(ws, "vmm", &["--test", KVM_TIER])? {
        let output = capture(Command::new(&program).args(["--list", "--format=terse"]))?;
        let lines = String::from_utf8_lossy(&output);
        tests.extend(
            lines
                .lines()
                .filter_map(|line| line.strip_suffix(": test"))
                .map(str::to_owned),
        );
    }
    Ok(tests)
}

/// Why /dev/kvm cannot be used on this machine.
fn kvm_problem() -> Option<String> {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => None,
        Err(error) => Some(format!("/dev/kvm cannot be opened: {error}")),
    }
}

fn end_to_end_tests(ws: &Workspace, summary: &mut Summary) -> Result<()> {
    const TIME_LIMIT: Duration = Duration::from_secs(50 * 60);
    guest::build(ws, None)?;
    images::build(ws)?;
    let suite = Suite {
        program: e2e::program(ws, false)?,
        containerd: Release::default(),
        filters: Vec::new(),
        timeout: TIME_LIMIT,
    };
    e2e::run(ws, &suite, summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed() {
        let mut summary = Summary::default();
        for line in [
            "running 4 tests",
            "test a::b ... ok",
            "test a::slow has been running for over 60 seconds",
            "test c - should panic ... ok",
            "test d ... FAILED",
            "test e ... ignored, needs a GPU",
            "test f ... ignored",
            "test result: FAILED. 2 passed; 1 failed; 2 ignored",
        ] {
            summary.take(line);
        }
        assert_eq!(
            (summary.passed.len(), summary.failed.len(), summary.skipped.len()),
            (2, 1, 2)
        );
        assert_eq!(
            summary.skipped[0],
            Skipped {
                test: "e".into(),
                reason: "needs a GPU".into()
            }
        );
    }

    #[test]
    fn a_test_without_a_result_has_failed() {
        let mut summary = Summary::default();
        summary.take_all("test a ... ok\ntest b ... ");
        summary.expect(&["a".to_owned(), "b".to_owned()], "it ended with 101");
        assert_eq!((summary.passed.len(), summary.failed.len()), (1, 1));
        let mut summary = Summary::default();
        summary.expect_failure(134);
        assert_eq!(summary.failed.len(), 1);
    }

    #[test]
    fn a_test_that_ran_twice_counts_once() {
        let mut sum = Summary::default();
        for output in ["test last ... ok\ntest a ... ok", "test last ... FAILED"] {
            let mut summary = Summary::default();
            summary.take_all(output);
            sum.merge(summary);
        }
        assert_eq!((sum.passed.len(), sum.failed.len()), (1, 1));
    }
}
