//! Runs the end-to-end tests in labs, as many at once as this machine takes: a few tests in each, so that they share the work
//! and a lab that crashes costs little to repeat.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::containerd::Release;
use crate::lab::{self, Job, Repeat, quote};
use crate::workspace::{Workspace, capture, say};
use crate::{build, test::Summary, tools};

/// The test program's name in the lab.
const PROGRAM: &str = "e2e";
/// Checks that the other tests left nothing; runs at the end of every lab.
const LEFTOVERS: &str = "zz_leftovers::";
/// Tests that need `nerdctl` in the lab.
const NERDCTL: &[&str] = &["nerdctl::", "using::nerdctl"];
/// How many tests one lab gets, roughly: modules are not divided.
const TESTS_PER_LAB: usize = 10;

/// Builds the tests, or takes those that were built last.
pub(crate) fn program(ws: &Workspace, no_build: bool) -> Result<PathBuf> {
    if no_build {
        return build::newest_test(ws, "e2e", "tests/main.rs");
    }
    let mut programs = build::tests(ws, "e2e", &["--test", "e2e"])?;
    ensure!(
        programs.len() == 1,
        "expected one end-to-end test program, found {}",
        programs.len()
    );
    Ok(programs.swap_remove(0).1)
}

/// What is to be run.
pub(crate) struct Suite {
    /// The test program.
    pub(crate) program: PathBuf,
    /// The containerd in the labs.
    pub(crate) containerd: Release,
    /// Only tests whose name contains one of these; all, if empty.
    pub(crate) filters: Vec<String>,
    /// For all of it together.
    pub(crate) timeout: Duration,
}

/// Runs the tests and adds their results to `summary`.
pub(crate) fn run(ws: &Workspace, suite: &Suite, summary: &mut Summary) -> Result<()> {
    let listed = capture(
        Command::new(&suite.program)
            .args(["--list", "--format=terse"])
            .args(&suite.filters),
    )?;
    let mut tests = listed_tests(&String::from_utf8_lossy(&listed));
    ensure!(
        !tests.is_empty(),
        "no end-to-end test matches {}",
        suite.filters.join(" ")
    );
    let mut programs = suite.containerd.programs(ws)?;
    programs.push((PROGRAM.to_owned(), suite.program.clone()));
    let needs_nerdctl = |test: &str| NERDCTL.iter().any(|prefix| test.starts_with(prefix));
    if tests.iter().any(|test| needs_nerdctl(test)) {
        match tools::nerdctl(ws) {
            Ok(path) => programs.push(("nerdctl".to_owned(), path)),
            Err(error) => {
                let left_out = tests.extract_if(.., |test| needs_nerdctl(test));
                left_out.for_each(|test| summary.skip(test, format!("{error:#}")));
            }
        }
    }
    let labs = plan(&tests);
    let deadline = Instant::now() + suite.timeout;
    let next = AtomicUsize::new(0);
    let sum = Mutex::new(Summary::default());
    let work = || {
        // The last ones take longest: begun first, they do not leave the other half of the machine idle at the end.
        while let Some(names) = labs.iter().rev().nth(next.fetch_add(1, Ordering::Relaxed)) {
            let results = run_one(ws, &programs, names, deadline);
            sum.lock().unwrap_or_else(PoisonError::into_inner).merge(results);
        }
    };
    say(format!(
        "end-to-end tests: {} tests in {} labs",
        tests.len(),
        labs.len()
    ));
    std::thread::scope(|scope| {
        for _ in 0..lab::SLOTS {
            scope.spawn(work);
        }
    });
    summary.add(sum.into_inner().unwrap_or_else(PoisonError::into_inner));
    Ok(())
}

/// Runs these tests in a lab of their own.
fn run_one(ws: &Workspace, programs: &[(String, PathBuf)], names: &[String], deadline: Instant) -> Summary {
    let mut script = format!("exec {PROGRAM} --test-threads=1 --exact");
    for name in names {
        script.push(' ');
        script += &quote(name);
    }
    let first = names.first().and_then(|name| name.split("::").next()).unwrap_or("e2e");
    let job = Job {
        name: format!("test-{first}"),
        words: vec![script],
        timeout: deadline.saturating_duration_since(Instant::now()),
        programs: programs.to_vec(),
        repeat: Repeat::Always,
    };
    let mut results = Summary::default();
    match lab::run(ws, &job) {
        Ok(outcome) => {
            results.take_all(&String::from_utf8_lossy(&outcome.stdout));
            results.expect(names, &format!("the test program ended with {}", outcome.code));
            if outcome.code != 0 {
                results.expect_failure(outcome.code);
            }
        }
        Err(error) => results.expect(names, &format!("{error:#}")),
    }
    results
}

/// The names in libtest's terse list.
fn listed_tests(list: &str) -> Vec<String> {
    list.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect()
}

/// Divides tests into labs by their modules. The check for leftovers ends each lab, but counts once: in the last.
fn plan(tests: &[String]) -> Vec<Vec<String>> {
    let module = |test: &str| test.split("::").next().unwrap_or_default().to_owned();
    let (last, tests): (Vec<&String>, Vec<&String>) = tests.iter().partition(|test| test.starts_with(LEFTOVERS));
    let mut labs: Vec<Vec<String>> = Vec::new();
    let mut previous = String::new();
    for test in tests {
        let is_new_module = module(test) != previous;
        match labs.last_mut() {
            Some(lab) if !(is_new_module && lab.len() >= TESTS_PER_LAB) => lab.push(test.clone()),
            _ => labs.push(vec![test.clone()]),
        }
        previous = module(test);
    }
    if labs.is_empty() {
        labs.push(Vec::new());
    }
    for lab in &mut labs {
        lab.extend(last.iter().map(|test| (*test).clone()));
    }
    labs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(module: &str, count: usize) -> Vec<String> {
        (0..count).map(|index| format!("{module}::t{index}")).collect()
    }

    #[test]
    fn modules_stay_whole_and_leftovers_come_last() {
        let tests = [names("a", 4), names("b", 20), names("c", 1), names("zz_leftovers", 1)].concat();
        let labs = plan(&tests);
        assert_eq!(labs.iter().map(Vec::len).collect::<Vec<_>>(), [25, 2]);
        assert!(
            labs.iter()
                .all(|lab| lab.last().is_some_and(|test| test == "zz_leftovers::t0"))
        );
    }

    #[test]
    fn one_filtered_test_is_one_lab() {
        assert_eq!(plan(&["a::b".to_owned()]), [["a::b"]]);
        assert_eq!(listed_tests("a::b: test\n\n1 test, 0 benchmarks\n"), ["a::b"]);
    }
}
