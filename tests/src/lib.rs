//! What the end-to-end tests, the demo and the benchmarks share: a node with a containerd and our snapshotter, `ctr` with
//! deadlines, containers that are removed when their guard is dropped, and the list of what was left behind.
//!
//! Everything goes through public doors: `ctr`, `ramet`, the Task API, `/proc`. Nothing here links the programs it drives.

pub mod cni;
pub mod command;
pub mod container;
pub mod elf;
pub mod images;
pub mod leftovers;
pub mod node;
pub mod oci;
pub mod private;
pub mod session;
pub mod shim;
mod signals;
pub mod transcript;

pub use command::{Finished, Invocation};
pub use container::{Container, Run};
pub use leftovers::Leftovers;
pub use node::{Node, Runtime};
pub use session::Session;

use std::time::Duration;

/// How long a single command may take before it counts as hung. Under emulation a `ctr` call alone takes seconds.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Polls until `done` answers true; for states of outside processes that nothing announces.
pub fn wait_until(deadline: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = std::time::Instant::now() + deadline;
    loop {
        if done() {
            return true;
        }
        if std::time::Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
