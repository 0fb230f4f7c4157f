//! What must not change the time of a fork: the size of the root filesystem, and the memory in use.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::images::{Archive, BUSYBOX};
use e2e::{Node, Runtime};

use crate::report::Comparison;
use crate::{padding, say};

/// Forks of each kind, taken in turns so that both see the same machine.
const ROUNDS: usize = 6;
const PATIENCE: Duration = Duration::from_secs(300);

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum What {
    /// Root filesystems of 2 GiB and 50 MiB
    Rootfs,
    /// 900 MiB and 100 MiB of memory in use
    Memory,
}

/// Measures both kinds of it.
pub(crate) fn compare(node: &Node, what: What) -> Result<Comparison> {
    node.import(&Archive::Busybox)?;
    match what {
        What::Rootfs => {
            let scratch = tempfile::tempdir()?;
            say("images with root filesystems of 50 MiB and 2 GiB");
            let images = [
                padding::image(node, scratch.path(), 48)?,
                padding::image(node, scratch.path(), 2046)?,
            ];
            let [small_ms, large_ms] = in_turns(node, "rootfs", [(&images[0], 0), (&images[1], 0)])?;
            for image in &images {
                node.remove_image(image)?;
            }
            let what = "root filesystem of 2 GiB / 50 MiB";
            Ok(Comparison {
                what,
                small_ms,
                large_ms,
            })
        }
        What::Memory => {
            say("containers with 100 MiB and 900 MiB in use");
            let [small_ms, large_ms] = in_turns(node, "memory", [(BUSYBOX, 100), (BUSYBOX, 900)])?;
            let what = "900 MiB / 100 MiB of memory in use";
            Ok(Comparison {
                what,
                small_ms,
                large_ms,
            })
        }
    }
}

/// Checkpoints a container of each kind (image, MiB of memory that it fills) and forks them in turns.
fn in_turns(node: &Node, what: &str, kinds: [(&str, u32); 2]) -> Result<[Vec<f64>; 2]> {
    let mut warm = Vec::new();
    for (number, (image, mib)) in kinds.into_iter().enumerate() {
        // Few processes: each costs more under emulation than copying ten megabytes.
        let script = format!(
            "mount -t tmpfs -o size=90% fill /dev/shm; cd /dev/shm; head -c 1048576 /bin/busybox > one; \
             cat one one one one one one one one one one > ten; i=10; \
             while [ $i -lt {mib} ]; do cp ten $i; i=$((i+10)); done; \
             echo filled; while read line; do echo got $line; done"
        );
        let id = format!("{what}-{number}");
        let run = node
            .run(Runtime::Ramet, image, &["sh", "-c", &script])
            .id(&id)
            .deadline(PATIENCE);
        let (mut session, container) = run
            .flag("--annotation=io.ramet.memory_mib=1536")
            .flag("--cap-add=CAP_SYS_ADMIN")
            .session()?;
        ensure!(session.line(PATIENCE)? == "filled");
        say(format!("checkpointing {id}"));
        let name = format!("localhost/warm-{what}-{number}:1");
        node.checkpoint(&id, &name)?;
        session.close_stdin();
        ensure!(session.wait(PATIENCE)? == 0, "{}", session.stderr());
        container.is_gone();
        warm.push(name);
    }
    let mut ready = [Vec::new(), Vec::new()];
    // The first of each is not counted: it finds cold caches.
    for round in 0..=ROUNDS {
        for (number, name) in warm.iter().enumerate() {
            let id = format!("{what}-fork-{number}-{round}");
            let (mut session, container) = node.run(Runtime::Ramet, name, &[]).id(&id).session()?;
            session.send("it")?;
            ensure!(session.line(PATIENCE)? == "got it");
            let after = session.first_byte_after().context("no first byte")?;
            say(format!("{id} ready after {:.0} ms", after.as_secs_f64() * 1000.0));
            session.close_stdin();
            ensure!(session.wait(PATIENCE)? == 0, "{}", session.stderr());
            container.is_gone();
            if round > 0 {
                ready[number].push(after.as_secs_f64() * 1000.0);
            }
        }
    }
    for name in &warm {
        node.remove_image(name)?;
    }
    Ok(ready)
}
