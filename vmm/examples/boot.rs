//! Boots a Linux guest with `ramet-vmm`, optionally saves and restores it, and shows its console:
//!
//! ```text
//! boot [--vcpus N] [--memory MIB] [--ready-port] [--generations N] [--forks N] [--append TEXT] KERNEL INITRAMFS [READ_ONLY_DISK…]
//! ```
//!
//! With `--generations 1` the guest is saved some seconds after it started (or when its agent connected), ended, and restored; with 2,
//! this is done with the restored one, too. `--forks` machines are restored from the last checkpoint, side by side.

#[path = "../tests/common/mod.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod common;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use common::{Checkpoint, Vmm};
use vmm::control::{BootRequest, DiskBacking, DiskConfig, Event, Message, Request, RestoreRequest};

const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=4 reboot=k panic=-1 tsc=reliable no_timer_check random.trust_cpu=on \
     cryptomgr.notests audit=0 apparmor=0 nmi_watchdog=0 8250.nr_uarts=1 rdinit=/init";

struct Options {
    vcpus: u8,
    memory: u64,
    ready: bool,
    generations: u8,
    forks: u32,
    append: String,
    files: Vec<PathBuf>,
}

fn options() -> Result<Options> {
    let mut options = Options {
        vcpus: 1,
        memory: 256,
        ready: false,
        generations: 0,
        forks: 1,
        append: String::new(),
        files: Vec::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().context("value missing");
        match argument.as_str() {
            "--vcpus" => options.vcpus = value()?.parse()?,
            "--memory" => options.memory = value()?.parse()?,
            "--ready-port" => options.ready = true,
            "--generations" => options.generations = value()?.parse()?,
            "--forks" => options.forks = value()?.parse()?,
            "--append" => options.append = value()?,
            path => options.files.push(path.into()),
        }
    }
    Ok(options)
}

fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("RAMET_VMM") {
        return Ok(path.into());
    }
    let beside = std::env::current_exe()?.with_file_name("ramet-vmm");
    let above = std::env::current_exe()?.with_file_name("../ramet-vmm");
    Ok([beside, above]
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| "/usr/local/bin/ramet-vmm".into()))
}

fn disks(paths: &[PathBuf], fds: &mut Vec<OwnedFd>) -> Result<Vec<DiskConfig>> {
    let mut disks = Vec::new();
    for (number, path) in paths.iter().enumerate() {
        disks.push(DiskConfig {
            id: format!("ro{number}"),
            backing: DiskBacking::ReadOnly { files: vec![fds.len()] },
        });
        fds.push(File::open(path)?.into());
    }
    Ok(disks)
}

fn main() -> Result<()> {
    let options = options()?;
    let [kernel, initramfs, disk_paths @ ..] = options.files.as_slice() else {
        anyhow::bail!("usage: boot [options] KERNEL INITRAMFS [DISK…]");
    };
    let console = tempfile::NamedTempFile::new()?;
    let start = Instant::now();
    let mut vmm = Vmm::spawn(&program()?)?;
    let mut fds: Vec<OwnedFd> = vec![
        File::open(kernel)?.into(),
        File::open(initramfs)?.into(),
        console.reopen()?.into(),
    ];
    let disk_list = disks(disk_paths, &mut fds)?;
    let request = BootRequest {
        vcpus: options.vcpus,
        memory_bytes: options.memory << 20,
        kernel: 0,
        initramfs: Some(1),
        command_line: format!("{COMMAND_LINE} {}", options.append),
        disks: disk_list,
        nets: Vec::new(),
        console: 2,
        linux_devices: true,
    };
    vmm.must(&Request::Boot(request), &fds)?;
    println!("booting after {:?}", start.elapsed());
    let result = follow(&options, &mut vmm, disk_paths, start);
    println!("--- console\n{}", common::text(console.as_file()));
    result
}

fn follow(options: &Options, vmm: &mut Vmm, disk_paths: &[PathBuf], start: Instant) -> Result<()> {
    if options.ready {
        loop {
            let message = vmm.channel.receive::<Message>()?.context("VMM is gone")?.message;
            println!("{message:?} after {:?}", start.elapsed());
            match message {
                Message::Event(Event::Connected { .. }) => break,
                Message::Event(Event::Exited(_)) => return Ok(()),
                Message::Reply(_) => {}
            }
        }
    } else if options.generations > 0 {
        std::thread::sleep(Duration::from_secs(6));
    }
    let mut chain: Vec<Checkpoint> = Vec::new();
    for generation in 1..=options.generations {
        let files = Checkpoint::new(generation)?;
        let report = vmm.save(&files, false)?;
        let state = std::fs::metadata(files.path("state"))?.len();
        println!("generation {generation}: {report:?}; state {state} bytes");
        chain.insert(0, files);
        if generation < options.generations {
            *vmm = restore(&chain, disk_paths, &format!("generation-{generation}"))?;
            std::thread::sleep(Duration::from_secs(2));
        }
    }
    if chain.is_empty() {
        println!("{:?} after {:?}", vmm.wait_exit()?, start.elapsed());
        return Ok(());
    }
    let mut forks = Vec::new();
    for number in 0..options.forks {
        forks.push(restore(&chain, disk_paths, &format!("fork-{number}"))?);
    }
    for mut fork in forks {
        println!("{:?} after {:?}", fork.wait_exit()?, start.elapsed());
    }
    Ok(())
}

/// Restores the first checkpoint of the chain; its console goes to `/tmp/NAME.console`.
fn restore(chain: &[Checkpoint], disk_paths: &[PathBuf], name: &str) -> Result<Vmm> {
    let (files, bases) = chain.split_first().context("no checkpoint")?;
    let start = Instant::now();
    let vmm = Vmm::spawn(&program()?)?;
    let console = File::options()
        .append(true)
        .create(true)
        .open(format!("/tmp/{name}.console"))?;
    let (request, mut fds) = Vmm::restore_request(files, &bases.iter().collect::<Vec<_>>(), &console)?;
    let Request::Restore(request) = request else {
        anyhow::bail!("not a restore request")
    };
    let request = RestoreRequest {
        disks: disks(disk_paths, &mut fds)?,
        ..request
    };
    vmm.must(&Request::Restore(request), &fds)?;
    let restored = start.elapsed();
    vmm.must(&Request::Resume, &[])?;
    println!(
        "{name}: restored after {restored:?}, resumed after {:?}",
        start.elapsed()
    );
    Ok(vmm)
}
