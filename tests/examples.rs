//! Each example's `run.sh` does what its README says.

use anyhow::{Context, Result, ensure};
use e2e::{Invocation, Node};

/// Runs an example on the shared node and returns what it printed.
fn run(name: &str) -> Result<String> {
    let node = Node::shared();
    let script = match name {
        "01-run-a-container" => include_str!("../examples/01-run-a-container/run.sh"),
        "02-checkpoint-and-fork" => include_str!("../examples/02-checkpoint-and-fork/run.sh"),
        _ => anyhow::bail!("no example {name}"),
    };
    let done = Invocation::new("sh")
        .args(["-euc", script, "run.sh"])
        .env("CONTAINERD_ADDRESS", node.address())
        .succeed()?;
    Ok(done.out())
}

#[test]
fn running_a_container() -> Result<()> {
    let out = run("01-run-a-container")?;
    let kernel = out
        .lines()
        .find_map(|line| line.strip_prefix("kernel in the container: "))
        .context("no kernel line")?;
    ensure!(!kernel.is_empty() && out.contains("read from stdin: hi"), "{out}");
    Ok(())
}

#[test]
fn checkpointing_and_forking() -> Result<()> {
    let out = run("02-checkpoint-and-fork")?;
    ensure!(
        out.contains("fork 1: 2 one") && out.contains("fork 2: 2 two") && out.contains("parent: 2 itself"),
        "{out}"
    );
    Ok(())
}
