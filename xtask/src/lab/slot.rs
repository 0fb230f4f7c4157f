//! Limits how many labs run at once on this machine, over all checkouts.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::say;

/// How many labs may run at once.
pub(crate) const SLOTS: usize = 2;

/// The right to run a lab; given back when dropped or when the process ends.
pub(crate) struct Slot {
    _lock: File,
}

/// Takes a free slot, or waits for one and says so.
pub(crate) fn take() -> Result<Slot> {
    let dir = if Path::new("/run/lock").is_dir() {
        "/run/lock"
    } else {
        "/tmp"
    };
    let mut files = Vec::new();
    for slot in 0..SLOTS {
        let path = Path::new(dir).join(format!("ramet-lab-{slot}.lock"));
        files.push(File::create(&path).with_context(|| format!("creating {}", path.display()))?);
    }
    let mut is_told = false;
    loop {
        for index in 0..files.len() {
            if files[index].try_lock().is_ok() {
                return Ok(Slot {
                    _lock: files.swap_remove(index),
                });
            }
        }
        if !is_told {
            say(format!(
                "{SLOTS} labs already run on this machine: waiting for one to end"
            ));
            is_told = true;
        }
        // Two locks cannot be waited for at once; their holders are other processes.
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}
