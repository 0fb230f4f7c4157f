//! Reads and writes in the writable root filesystem, and 100 MiB of output.

use std::io::Read;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use e2e::Container;
use e2e::images::Archive;
use e2e::private::PrivateNode;

use super::table::{Bar, Measured, Row};
use super::{drop_caches, idle, image, load, note};
use crate::say;

/// What goes through stdout, in MiB.
const OUTPUT_MIB: usize = 100;
/// The file that is written and read; in the root filesystem, not on a tmpfs.
const FILE: &str = "/bench";
const BAR: Option<Bar> = Some(Bar::AtLeast(0.5));

pub(super) fn measure(node: &PrivateNode, mib: usize, operations: usize, rounds: usize) -> Result<Measured> {
    node.import(&Archive::Busybox)?;
    let image = image::make(node)?;
    say("an idle container of each kind");
    let containers = idle(node, &image, &[])?;
    let (mib_text, operations_text) = (mib.to_string(), operations.to_string());
    let kinds: [(String, &str, Vec<&str>); 4] = [
        (
            format!("write {mib} MiB in order, with fdatasync"),
            "MiB/s",
            vec!["write", FILE, &mib_text],
        ),
        (
            format!("read {mib} MiB in order, cold caches"),
            "MiB/s",
            vec!["read", FILE],
        ),
        (
            format!("{operations} random writes of 4 KiB, O_DIRECT"),
            "1/s",
            vec!["random-write", FILE, &operations_text],
        ),
        (
            format!("{operations} random reads of 4 KiB, O_DIRECT, cold caches"),
            "1/s",
            vec!["random-read", FILE, &operations_text],
        ),
    ];
    let mut rows: Vec<Row> = kinds.iter().map(|(what, unit, _)| Row::new(what, unit, BAR)).collect();
    let mut output = Row::new(format!("{OUTPUT_MIB} MiB through stdout"), "MiB/s", BAR);
    for _ in 0..rounds {
        for (row, (_, _, arguments)) in rows.iter_mut().zip(&kinds) {
            for (runtime, container) in &containers {
                drop_caches()?;
                let value = load(container, arguments).with_context(|| format!("{runtime:?}"))?;
                note(row, *runtime, value);
            }
        }
        for (runtime, container) in &containers {
            note(&mut output, *runtime, stdout(container)?);
        }
    }
    rows.push(output);
    for (_, container) in containers {
        container.remove()?;
    }
    node.remove_image(&image)?;
    Ok(Measured {
        rows,
        ..Measured::default()
    })
}

/// MiB a second, from the first byte to the last.
fn stdout(container: &Container) -> Result<f64> {
    let mib = OUTPUT_MIB.to_string();
    let mut running = container.exec(&[image::PROGRAM, "load", "output", &mib]).stream()?;
    let mut buffer = vec![0; 1 << 20];
    let first = running.stdout.read(&mut buffer)?;
    let began = Instant::now();
    let mut bytes = first;
    while let Ok(count @ 1..) = running.stdout.read(&mut buffer) {
        bytes += count;
    }
    let took = began.elapsed();
    running.succeed()?;
    ensure!(bytes == OUTPUT_MIB << 20, "{bytes} bytes of {OUTPUT_MIB} MiB arrived");
    #[expect(clippy::cast_precision_loss, reason = "a throughput")]
    let mib = (bytes - first) as f64 / 1048576.0;
    Ok(mib / took.as_secs_f64())
}
