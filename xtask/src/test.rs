//! `cargo xtask test`: every tier, then one line with the sum.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::build::{self, cargo};
use crate::workspace::{Workspace, capture, say};
use crate::{guest, images, lab, setup};

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
struct Summary {
    passed: usize,
    failed: usize,
    skipped: Vec<Skipped>,
}

#[derive(Debug, PartialEq)]
struct Skipped {
    test: String,
    reason: String,
}

impl Summary {
    fn skip(&mut self, test: impl Into<String>, reason: impl Into<String>) {
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
            "ok" => self.passed += 1,
            "ignored" => self.skip(test, reason),
            word if word.starts_with("FAILED") => self.failed += 1,
            _ => {}
        }
    }

    fn print(&self) {
        for Skipped { test, reason } in &self.skipped {
            println!("skipped {test}: {reason}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed,
            self.skipped.len()
        );
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
    if args.no_lab {
        summary.skip("end-to-end tests", "--no-lab was given");
    } else if let Err(error) = end_to_end_tests(ws, &mut summary) {
        eprintln!("error: {error:#}");
        summary.failed += 1;
    }
    say(format!("all tiers took {} s", started.elapsed().as_secs()));
    summary.print();
    Ok(if summary.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
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
    let before = summary.failed;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("reading the output of cargo test")?;
        println!("{line}");
        summary.take(&line);
    }
    let status = child.wait().context("waiting for cargo test")?;
    if !status.success() && summary.failed == before {
        // It did not build, or a test program crashed.
        eprintln!("error: cargo test ended with {status}");
        summary.failed += 1;
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
    guest::build(ws, None)?;
    images::build(ws)?;
    let mut job = lab::test_job(ws, &[], false)?;
    job.timeout = Duration::from_secs(45 * 60);
    let before = (summary.passed, summary.failed);
    let outcome = lab::run(ws, &job)?;
    for line in String::from_utf8_lossy(&outcome.stdout).lines() {
        summary.take(line);
    }
    std::io::stdout().flush().context("writing to stdout")?;
    if outcome.code != 0 && summary.failed == before.1 {
        bail!(
            "the end-to-end tests ended with {}; logs are in {}",
            outcome.code,
            outcome.logs.display()
        );
    }
    if (summary.passed, summary.failed) == before {
        bail!("the lab ran no test");
    }
    Ok(())
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
        assert_eq!((summary.passed, summary.failed, summary.skipped.len()), (2, 1, 2));
        assert_eq!(
            summary.skipped[0],
            Skipped {
                test: "e".into(),
                reason: "needs a GPU".into()
            }
        );
    }
}
