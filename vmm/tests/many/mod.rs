//! Fifty machines beside each other: what one costs does not depend on how many run already.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::MEMORY;
use crate::common::many::{Many, STEPS};

const MACHINES: usize = 50;
/// What other work on this machine may add.
const NOISE: Duration = Duration::from_millis(10);

fn assert_flat(what: &str, many: &Many) {
    for (name, step) in STEPS {
        let (first, last) = many.first_and_last(step);
        println!("{what}, {name}: {first:?} beside few, {last:?} beside {MACHINES}");
        assert!(last <= first * 2 + NOISE, "{what}, {name}: {first:?}, then {last:?}");
    }
}

#[test]
fn no_step_of_a_machine_grows_with_those_that_run_already() -> Result<()> {
    let program = Path::new(env!("CARGO_BIN_EXE_ramet-vmm"));
    let booted = Many::boot(program, MACHINES, MEMORY)?;
    assert_flat("boot", &booted);
    let forked = Many::fork(program, MACHINES, MEMORY)?;
    assert_flat("fork", &forked);
    assert_eq!(booted.machines.len() + forked.machines.len(), 2 * MACHINES);
    Ok(())
}
