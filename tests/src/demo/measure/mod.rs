//! `cargo xtask bench boot|exec|io|net`: our runtime beside runc's on overlayfs, in turns, so that what else the machine does meets both.

mod boot;
mod exec;
mod image;
mod io;
pub(crate) mod load;
mod net;
mod overhead;
mod table;
mod timeline;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::BUSYBOX;
use e2e::private::PrivateNode;
use e2e::{Container, Runtime};

pub(crate) use table::Measured;

use crate::say;

/// What is measured.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum Subject {
    /// A cold start beside runc's, its stages, the memory of an idle VM
    Boot {
        /// Cold starts of each
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Idle containers beside which a start is measured again; 0: not measured
        #[arg(long, default_value_t = 10)]
        idle: usize,
    },
    /// `ctr task exec`
    Exec {
        /// Execs of each, one after the other
        #[arg(long, default_value_t = 9)]
        rounds: usize,
        /// Execs at once
        #[arg(long, default_value_t = 200)]
        parallel: usize,
    },
    /// The writable root filesystem, and output
    Io {
        /// MiB of the file
        #[arg(long, default_value_t = 256)]
        mib: usize,
        /// Random reads and writes
        #[arg(long, default_value_t = 20000)]
        operations: usize,
        /// Rounds of each
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// One TCP stream to and from the host over a bridge, and round trips
    Net {
        /// MiB in each direction
        #[arg(long, default_value_t = 1024)]
        mib: usize,
        /// Round trips
        #[arg(long, default_value_t = 10000)]
        trips: usize,
        /// Rounds of each
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
}

/// Both runtimes, in the order in which they take turns.
const BOTH: [Runtime; 2] = [Runtime::Runc, Runtime::Ramet];

/// What the daemons of the node must have in their environment. A guest that boots slowly is measured, too.
pub(crate) const ENVIRONMENT: [(&str, &str); 2] = [
    ("RAMET_LOG", "warn,shim=debug,vmm=debug"),
    ("RAMET_BOOT_TIMEOUT", "180"),
];

/// Measures it.
pub(crate) fn measure(node: &PrivateNode, subject: &Subject) -> Result<Measured> {
    let measured = measure_it(node, subject);
    if let Some(out) = std::env::var_os("RAMET_LAB_OUT") {
        fs::write(Path::new(&out).join("containerd.log"), node.whole_log("containerd")?)?;
    }
    measured
}

fn measure_it(node: &PrivateNode, subject: &Subject) -> Result<Measured> {
    match *subject {
        Subject::Boot { rounds, idle } => boot::measure(node, rounds, idle),
        Subject::Exec { rounds, parallel } => exec::measure(node, rounds, parallel),
        Subject::Io {
            mib,
            operations,
            rounds,
        } => io::measure(node, mib, operations, rounds),
        Subject::Net { mib, trips, rounds } => net::measure(node, mib, trips, rounds),
    }
}

/// Puts a value where it belongs.
fn note(row: &mut table::Row, runtime: Runtime, value: f64) {
    say(format!("{}: {value:.1} {} {runtime:?}", row.what.trim(), row.unit));
    if runtime.is_vm() {
        row.ramet.push(value);
    } else {
        row.runc.push(value);
    }
}

/// One idle container of each runtime.
fn idle(node: &PrivateNode, image: &str, flags: &[&str]) -> Result<Vec<(Runtime, Container)>> {
    let mut containers = Vec::new();
    for runtime in BOTH {
        let mut run = node.run(runtime, image, &["sleep", "100000"]);
        for flag in flags {
            run = run.flag(flag);
        }
        containers.push((runtime, run.detach()?));
    }
    Ok(containers)
}

/// The first container of each kind, which finds nothing prepared: not measured.
fn warm_up(node: &PrivateNode) -> Result<()> {
    for runtime in BOTH {
        node.run(runtime, BUSYBOX, &["true"]).succeed()?;
    }
    Ok(())
}

/// Runs the generator of load in a container; what it printed is a number.
fn load(container: &Container, arguments: &[&str]) -> Result<f64> {
    let mut words = vec![image::PROGRAM, "load"];
    words.extend(arguments);
    let done = container.exec(&words).succeed()?;
    let text = done.out();
    let number: f64 = text
        .trim()
        .parse()
        .with_context(|| format!("{words:?} printed {text:?}"))?;
    ensure!(number > 0.0, "{words:?} printed {text:?}");
    Ok(number)
}

/// Empties this machine's page cache, as far as it may.
fn drop_caches() -> Result<()> {
    nix::unistd::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("emptying the page cache")
}
