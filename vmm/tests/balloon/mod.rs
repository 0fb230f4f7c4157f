//! Memory that a guest reports as free goes back to the host, and everything else stays.

use std::fs::File;

use anyhow::{Context, Result};
use checkpoint::memory::PAGE_SIZE;
use vmm::control::{BootRequest, Request};

use crate::common::script::{GENERATION, Script};
use crate::common::{Checkpoint, Vmm, eventually, kernel, text};
use crate::{MEMORY, spawn, stats};

/// Registers of the third device, after vsock and entropy.
const BALLOON: u32 = 0xd000_2000;
/// The queue of reports.
const REPORTS: u32 = 2;
const DESCRIPTORS: u32 = 0x30_0000;
const AVAILABLE: u32 = 0x30_2000;
const USED: u32 = 0x30_3000;

const MIB: u32 = 1 << 20;
const PAGES_PER_MIB: u32 = 256;
const WRITE: u32 = 2;
const NEXT: u32 = 1;

/// A driver of a balloon, step by step.
#[derive(Default)]
struct Driver {
    script: Script,
    reports: u32,
}

impl Driver {
    /// Up to a queue of reports.
    fn start(&mut self) {
        let register = |offset| BALLOON + offset;
        for (offset, value) in [
            (0x70, 0),
            (0x70, 1),
            (0x70, 3),
            (0x24, 0),
            (0x20, 1 << 5), // reports
            (0x24, 1),
            (0x20, 1), // version 1
            (0x70, 11),
            (0x30, REPORTS),
            (0x38, 64),
            (0x80, DESCRIPTORS),
            (0x90, AVAILABLE),
            (0xa0, USED),
            (0x44, 1),
            (0x70, 15),
        ] {
            self.script.store(register(offset), value);
        }
    }

    /// Reports ranges, and waits for the answer.
    fn report(&mut self, ranges: &[(u64, u32)]) -> Result<()> {
        let mut descriptor = DESCRIPTORS;
        for (next, (address, len)) in (1_u32..).zip(ranges) {
            let is_last = usize::try_from(next)? == ranges.len();
            let flags = if is_last { WRITE } else { WRITE | NEXT | next << 16 };
            let (low, high) = (address & 0xffff_ffff, address >> 32);
            for (place, word) in (0..)
                .step_by(4)
                .zip([u32::try_from(low)?, u32::try_from(high)?, *len, flags])
            {
                self.script.store(descriptor + place, word);
            }
            descriptor += 16;
        }
        // Every report starts at descriptor 0, which is what is in all of the ring.
        self.reports += 1;
        self.script
            .store(AVAILABLE, self.reports << 16)
            .store(BALLOON + 0x50, REPORTS)
            .wait_for(USED, self.reports << 16);
        Ok(())
    }

    fn boot(&self, console: &File) -> Result<Vmm> {
        let vmm = spawn()?;
        let request = BootRequest {
            vcpus: 1,
            memory_bytes: MEMORY,
            kernel: 0,
            initramfs: None,
            command_line: String::new(),
            disks: Vec::new(),
            nets: Vec::new(),
            console: 1,
            linux_devices: true,
        };
        let kernel = kernel(&self.script.code())?;
        vmm.must(&Request::Boot(request), &[kernel.into(), console.try_clone()?.into()])?;
        Ok(vmm)
    }
}

fn wait_for_text(console: &File, expected: &str) -> Result<()> {
    let shown = eventually(expected, || {
        Some(text(console)).filter(|text| text.len() >= expected.len() || text.contains('X'))
    })?;
    anyhow::ensure!(shown == expected, "{shown:?}, expected {expected:?}");
    Ok(())
}

/// A number of kilobytes from a process's status, in bytes.
fn status(vmm: &Vmm, name: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", vmm.pid))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .context("no such line")?;
    let number = line.trim_start_matches(':').trim().trim_end_matches(" kB");
    Ok(number.parse::<u64>()? * 1024)
}

#[test]
fn reported_memory_leaves_the_process_and_the_rest_is_intact() -> Result<()> {
    let mut guest = Driver::default();
    guest.start();
    guest
        .script
        .fill(16 * MIB, 1, 16 * PAGES_PER_MIB)
        .fill(32 * MIB, 2, 16 * PAGES_PER_MIB);
    guest.report(&[(u64::from(16 * MIB), 8 * MIB), (u64::from(24 * MIB), 8 * MIB)])?;
    guest
        .script
        .check(32 * MIB, 2, 16 * PAGES_PER_MIB)
        .check(16 * MIB, 0, 16 * PAGES_PER_MIB)
        .print('a');
    // It can be used again.
    guest.script.fill(16 * MIB, 3, 2).check(16 * MIB, 3, 2).print('b');
    let console = tempfile::tempfile()?;
    let vmm = guest.boot(&console)?;
    wait_for_text(&console, "a\nb\n")?;
    let own = stats(&vmm)?.private_memory_bytes;
    let (now, peak) = (status(&vmm, "RssAnon")?, status(&vmm, "VmHWM")?);
    let mib = u64::from(MIB);
    assert!((16 * mib..18 * mib).contains(&own), "{own}");
    assert!(
        (16 * mib..22 * mib).contains(&now) && peak > 32 * mib,
        "{now} of {peak}"
    );
    Ok(())
}

/// Saves a machine and starts a fork of it, which has printed `b` when this returns.
fn fork_of(vmm: &Vmm) -> Result<(Checkpoint, Vmm)> {
    let parent = Checkpoint::new(1)?;
    vmm.save(&parent, false)?;
    let console = tempfile::tempfile()?;
    let fork = spawn()?;
    fork.restore(&parent, &[], &console)?;
    wait_for_text(&console, "b\n")?;
    Ok((parent, fork))
}

/// Registers are memory to the guest, before and after a fork; what it writes there still arrives.
#[test]
fn registers_are_read_without_an_exit() -> Result<()> {
    let mut guest = Driver::default();
    let registers = |guest: &mut Driver, status: u32| {
        for (offset, value) in [(0x00, 0x7472_6976), (0x60, 1), (0x70, status), (0xfc, 0)] {
            guest.script.check(BALLOON + offset, value, 1);
        }
    };
    registers(&mut guest, 0);
    guest.start();
    registers(&mut guest, 15);
    guest
        .script
        .store(BALLOON + 0x64, 1)
        .store(BALLOON + 0x60, 0)
        .wait_for_fork('a');
    registers(&mut guest, 15);
    guest.report(&[(u64::from(16 * MIB), 4096)])?;
    guest.script.store(BALLOON + 0x64, 3);
    registers(&mut guest, 15);
    guest.script.store(BALLOON + 0x70, 0);
    registers(&mut guest, 0);
    guest.script.print('b');

    let console = tempfile::tempfile()?;
    let vmm = guest.boot(&console)?;
    wait_for_text(&console, "a\n")?;
    let exits = stats(&vmm)?.exits;
    assert_eq!((exits["mmio_read"], exits["mmio_write"]), (0, 17), "{exits:?}");
    let (_parent, fork) = fork_of(&vmm)?;
    assert_eq!(stats(&fork)?.exits["mmio_read"], 0);
    Ok(())
}

#[test]
fn reports_of_nonsense_change_nothing() -> Result<()> {
    let mut guest = Driver::default();
    guest.start();
    guest.script.fill(16 * MIB, 1, 16 * PAGES_PER_MIB);
    let inside = u64::from(16 * MIB);
    for ranges in [
        [(inside, 4096), (MEMORY, 4096)],
        [(inside, 4096), (MEMORY - 4096, 8192)],
        [(inside, 4096), (0xd000_2000, 4096)],
        [(inside, 4096), (u64::MAX - 4095, u32::MAX)],
        [(inside + 1, 4096), (inside + 4096, 4095)],
        [(u64::from(GENERATION), 4096), (0, MIB)],
    ] {
        guest.report(&ranges)?;
    }
    guest.script.check(16 * MIB, 1, 16 * PAGES_PER_MIB).print('a');
    let console = tempfile::tempfile()?;
    let vmm = guest.boot(&console)?;
    wait_for_text(&console, "a\n")?;
    assert!(stats(&vmm)?.private_memory_bytes > u64::from(16 * MIB));
    Ok(())
}

/// What a fork gives back is the checkpoint's again, for itself and for the forks of a checkpoint of it.
#[test]
fn memory_that_a_fork_gives_back_is_the_checkpoints_again() -> Result<()> {
    let mut guest = Driver::default();
    guest.start();
    guest
        .script
        .fill(16 * MIB, 1, 8 * PAGES_PER_MIB)
        .fill(32 * MIB, 2, 8 * PAGES_PER_MIB)
        .wait_for_fork('a');
    guest
        .script
        .fill(16 * MIB, 3, 8 * PAGES_PER_MIB)
        .fill(48 * MIB, 4, 8 * PAGES_PER_MIB)
        .fill(40 * MIB, 5, 16);
    guest.report(&[(u64::from(16 * MIB), 8 * MIB), (u64::from(48 * MIB), 8 * MIB)])?;
    guest
        .script
        .check(16 * MIB, 1, 8 * PAGES_PER_MIB)
        .check(48 * MIB, 0, 8 * PAGES_PER_MIB)
        .wait_for_fork('b');
    guest
        .script
        .check(16 * MIB, 1, 8 * PAGES_PER_MIB)
        .check(32 * MIB, 2, 8 * PAGES_PER_MIB)
        .check(40 * MIB, 5, 16)
        .check(48 * MIB, 0, 8 * PAGES_PER_MIB)
        .print('c');

    let console = tempfile::tempfile()?;
    let vmm = guest.boot(&console)?;
    wait_for_text(&console, "a\n")?;
    let (parent, fork) = fork_of(&vmm)?;
    assert!(stats(&fork)?.private_memory_bytes < u64::from(MIB));
    let child = Checkpoint::new(2)?;
    let report = fork.save(&child, false)?;
    assert!(report.incremental && report.memory_bytes < u64::from(MIB), "{report:?}");
    assert!(report.memory_bytes >= 16 * PAGE_SIZE, "{report:?}");

    let console = tempfile::tempfile()?;
    let grandchild = spawn()?;
    grandchild.restore(&child, &[&parent], &console)?;
    wait_for_text(&console, "c\n")
}
