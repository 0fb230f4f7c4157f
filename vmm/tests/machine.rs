//! Tiny guests on this machine's KVM: run, pause, save, restore, fork.

mod balloon;
mod common;
mod many;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use checkpoint::memory::{MemoryIndex, PAGE_SIZE};
use common::{Checkpoint, POWER_OFF, TICKER, TRIPLE_FAULT, Vmm, assert_consecutive, kernel, more_lines, text, ticks};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sha2::{Digest, Sha256};
use vmm::control::{BootRequest, ExitReason, Reply, Request, SaveRequest, VmStats};
use vmm::state::MachineState;

const MEMORY: u64 = 64 << 20;

fn spawn() -> Result<Vmm> {
    Vmm::spawn(Path::new(env!("CARGO_BIN_EXE_ramet-vmm")))
}

/// A ticker that has printed a few lines.
fn running_ticker(console: &File) -> Result<Vmm> {
    let vmm = spawn()?;
    vmm.boot_tiny(&TICKER, 1, MEMORY, console)?;
    more_lines(console, 3)?;
    Ok(vmm)
}

/// A checkpoint of a ticker, and what it had printed until then.
fn saved_ticker(vcpus: u8) -> Result<(Checkpoint, String)> {
    let console = tempfile::tempfile()?;
    let vmm = spawn()?;
    vmm.boot_tiny(&TICKER, vcpus, MEMORY, &console)?;
    more_lines(&console, 3)?;
    let files = Checkpoint::new(1)?;
    let report = vmm.save(&files, false)?;
    assert!(!report.incremental);
    assert!(
        report.memory_bytes > 256 * PAGE_SIZE && report.memory_bytes < MEMORY / 2,
        "{report:?}"
    );
    Ok((files, text(&console)))
}

fn stats(vmm: &Vmm) -> Result<VmStats> {
    match vmm.must(&Request::Stats, &[])? {
        Reply::Stats(stats) => Ok(stats),
        other => bail!("unexpected reply {other:?}"),
    }
}

#[test]
fn power_off_is_an_exit_with_all_its_output() -> Result<()> {
    let console = tempfile::tempfile()?;
    let mut vmm = spawn()?;
    vmm.boot_tiny(&POWER_OFF, 1, MEMORY, &console)?;
    assert_eq!(vmm.wait_exit()?, ExitReason::PowerOff);
    assert_eq!(text(&console), "hi");
    Ok(())
}

#[test]
fn a_triple_fault_is_reported_as_one() -> Result<()> {
    let mut vmm = spawn()?;
    vmm.boot_tiny(&TRIPLE_FAULT, 1, MEMORY, &tempfile::tempfile()?)?;
    assert_eq!(vmm.wait_exit()?, ExitReason::TripleFault);
    Ok(())
}

#[test]
fn exits_are_counted_and_a_paused_machine_stands_still() -> Result<()> {
    let console = tempfile::tempfile()?;
    let vmm = running_ticker(&console)?;
    vmm.must(&Request::Pause, &[])?;
    let first = stats(&vmm)?;
    assert!(
        first.exits["port_out"] > 18 && first.exits["mmio_read"] > 3,
        "{first:?}"
    );
    assert!(first.private_memory_bytes > 256 * PAGE_SIZE, "{first:?}");
    assert_eq!(stats(&vmm)?.exits, first.exits);
    vmm.must(&Request::Resume, &[])?;
    assert_consecutive(&more_lines(&console, 3)?);
    Ok(())
}

#[test]
fn stop_and_a_closed_socket_end_the_process() -> Result<()> {
    let console = tempfile::tempfile()?;
    let mut vmm = running_ticker(&console)?;
    vmm.must(&Request::Stop, &[])?;
    assert_eq!(vmm.wait_exit()?, ExitReason::Stopped);

    let mut orphan = running_ticker(&console)?;
    orphan.channel = vmm::control::Channel::pair()?.0;
    orphan.wait_process()?;
    Ok(())
}

#[test]
fn requests_out_of_order_are_refused() -> Result<()> {
    let console = tempfile::tempfile()?;
    let vmm = spawn()?;
    assert!(vmm.refused(&Request::Resume, &[])?.0.contains("no machine"));
    assert!(vmm.refused(&Request::FinishSave, &[])?.0.contains("no save"));
    vmm.boot_tiny(&TICKER, 1, MEMORY, &console)?;
    let again = vmm.boot_tiny(&TICKER, 1, MEMORY, &console);
    assert!(again.is_err_and(|error| error.to_string().contains("a machine already")));
    let (message, fatal) = vmm.refused(
        &Request::Connect { port: 1, stream: 0 },
        &[tempfile::tempfile()?.into()],
    )?;
    assert!(message.contains("no vsock") && !fatal);
    more_lines(&console, 2)?;
    Ok(())
}

#[test]
fn a_saved_machine_goes_on_where_it_was() -> Result<()> {
    for vcpus in [1, 2] {
        let (files, before) = saved_ticker(vcpus)?;
        let console = tempfile::tempfile()?;
        let vmm = spawn()?;
        vmm.restore(&files, &[], &console)?;
        let after = more_lines(&console, 20)?;
        assert_consecutive(&(before + &after));
    }
    Ok(())
}

#[test]
fn the_parent_runs_on_during_and_after_a_save() -> Result<()> {
    let console = tempfile::tempfile()?;
    let vmm = running_ticker(&console)?;
    for number in 1..4 {
        vmm.save(&Checkpoint::new(number)?, true)?;
        more_lines(&console, 2)?;
    }
    assert_consecutive(&text(&console));
    Ok(())
}

#[test]
fn eight_forks_diverge_and_leave_the_checkpoint_alone() -> Result<()> {
    let (files, before) = saved_ticker(1)?;
    let memory = std::fs::read(files.path("memory"))?;
    let mut forks = Vec::new();
    for _ in 0..8 {
        let console = tempfile::tempfile()?;
        let vmm = spawn()?;
        vmm.restore(&files, &[], &console)?;
        forks.push((vmm, console));
    }
    let mut generations = std::collections::BTreeSet::from([ticks(&before)[0].1]);
    for (vmm, console) in &forks {
        let after = more_lines(console, 5)?;
        let whole = before.clone() + &after;
        assert_consecutive(&whole);
        generations.insert(ticks(&whole).last().map_or(0, |tick| tick.1));
        let own = stats(vmm)?.private_memory_bytes;
        assert!(own > 0 && own < MEMORY / 4, "{own}");
    }
    assert_eq!(generations.len(), 9, "every fork has a generation id of its own");
    assert!(
        memory == std::fs::read(files.path("memory"))?,
        "the memory file changed"
    );
    Ok(())
}

/// What one fork changed is brought in for the next, which goes on all the same; nonsense in the file hurts nobody.
#[test]
fn pages_that_a_fork_changed_are_brought_in_for_the_next() -> Result<()> {
    let (files, before) = saved_ticker(1)?;
    let console = tempfile::tempfile()?;
    let first = spawn()?;
    first.restore(&files, &[], &console)?;
    more_lines(&console, 5)?;
    let noted = tempfile::NamedTempFile::new()?;
    first.must(&Request::Touched { file: 0 }, &[noted.reopen()?.into()])?;
    assert!(noted.as_file().metadata()?.len() >= 8);
    let nonsense = tempfile::NamedTempFile::new()?;
    std::fs::write(nonsense.path(), [0xff; 999])?;
    for hint in [noted, nonsense] {
        let console = tempfile::tempfile()?;
        let vmm = spawn()?;
        let (request, mut fds) = Vmm::restore_request(&files, &[], &console)?;
        let Request::Restore(mut request) = request else {
            anyhow::bail!("not a restore request")
        };
        request.touched = Some(fds.len());
        fds.push(File::open(hint.path())?.into());
        vmm.must(&Request::Restore(request), &fds)?;
        vmm.must(&Request::Resume, &[])?;
        let after = more_lines(&console, 5)?;
        assert_consecutive(&(before.clone() + &after));
    }
    Ok(())
}

#[test]
fn a_fork_of_a_fork_stores_only_its_own_pages() -> Result<()> {
    let (grandparent, mut history) = saved_ticker(1)?;
    let console = tempfile::tempfile()?;
    let vmm = spawn()?;
    vmm.restore(&grandparent, &[], &console)?;
    more_lines(&console, 3)?;
    let parent = Checkpoint::new(2)?;
    let report = vmm.save(&parent, false)?;
    assert!(report.incremental);
    history += &text(&console);
    let index = MemoryIndex::read_from(File::open(parent.path("memory.index"))?)?;
    assert_eq!(index.sources.len(), 2);
    assert_eq!(
        index.sources[1].checkpoint.as_ref().map(|id| id.as_str()),
        Some(grandparent.id.as_str())
    );
    drop(vmm);

    let console = tempfile::tempfile()?;
    let vmm = spawn()?;
    vmm.restore(&parent, &[&grandparent], &console)?;
    more_lines(&console, 5)?;
    assert_consecutive(&(history + &text(&console)));
    Ok(())
}

#[test]
fn damaged_checkpoints_are_refused_by_name() -> Result<()> {
    let (files, _) = saved_ticker(1)?;
    let good = std::fs::read(files.path("state"))?;
    let with_byte = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let cases: [(&str, Vec<u8>, &str); 5] = [
        ("state", good[..good.len() / 2].to_vec(), "its header needs"),
        ("state", with_byte(good.len() / 2, b'~'), "checksum"),
        ("state", with_byte(8, 99), "version 99"),
        ("state", with_byte(0, b'X'), "RAMETVMS"),
        ("memory", vec![0; 4096], "memory file"),
    ];
    for (name, bytes, reason) in cases {
        let path = files.path(name);
        let original = std::fs::read(&path)?;
        std::fs::write(&path, bytes)?;
        let vmm = spawn()?;
        let (request, fds) = Vmm::restore_request(&files, &[], &tempfile::tempfile()?)?;
        let (message, fatal) = vmm.refused(&request, &fds)?;
        assert!(message.contains(reason) && fatal, "{message:?} for {reason:?}");
        std::fs::write(&path, original)?;
    }
    Ok(())
}

/// Changes the contents of a state file and seals it again, as somebody forging a checkpoint would.
fn forge(files: &Checkpoint, change: impl FnOnce(&mut serde_json::Value)) -> Result<()> {
    let mut state = serde_json::to_value(MachineState::read_from(File::open(files.path("state"))?)?)?;
    change(&mut state);
    seal(files, vmm::state::VERSION, &state)
}

/// Writes a state file of some version.
fn seal(files: &Checkpoint, version: u32, state: &serde_json::Value) -> Result<()> {
    let json = serde_json::to_vec(state)?;
    let mut bytes = b"RAMETVMS".to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&json);
    let sum = Sha256::digest(&bytes);
    bytes.extend_from_slice(&sum);
    Ok(std::fs::write(files.path("state"), bytes)?)
}

/// A machine of the oldest version is one without a balloon.
#[test]
fn a_checkpoint_of_the_oldest_version_that_is_read_goes_on() -> Result<()> {
    let (files, before) = saved_ticker(1)?;
    let state = serde_json::to_value(MachineState::read_from(File::open(files.path("state"))?)?)?;
    seal(&files, vmm::state::OLDEST, &state)?;
    let console = tempfile::tempfile()?;
    let vmm = spawn()?;
    vmm.restore(&files, &[], &console)?;
    assert_consecutive(&(before + &more_lines(&console, 5)?));
    Ok(())
}

#[test]
fn forged_states_are_refused_and_kill_nothing() -> Result<()> {
    type Change = fn(&mut serde_json::Value);
    let cases: [(&str, Change); 8] = [
        ("this host lacks", |state| {
            // Nested virtualisation, which is hidden from every guest whatever KVM supports.
            for entry in state["vcpus"][0]["cpuid"].as_array_mut().into_iter().flatten() {
                let function = [&entry[0], &entry[1], &entry[2], &entry[3]].map(serde_json::Value::as_u64);
                if function == [Some(1), Some(0), Some(0), Some(0)] {
                    entry[20] = (entry[20].as_u64().unwrap_or(0) | 1 << 5).into();
                }
                if function == [Some(1), Some(0), Some(0), Some(0x80)] {
                    entry[20] = (entry[20].as_u64().unwrap_or(0) | 1 << 2).into();
                }
            }
        }),
        ("vCPU", |state| state["vcpus"] = serde_json::json!([])),
        ("memory", |state| state["memory_bytes"] = (128_u64 << 20).into()),
        ("9 vCPUs", |state| {
            state["vcpus"] = vec![state["vcpus"][0].clone(); 9].into()
        }),
        ("extended state", |state| {
            state["vcpus"][0]["xsave"] = serde_json::json!([1, 2, 3])
        }),
        ("interrupt controllers", |state| {
            state["board"]["irqchips"] = serde_json::json!([])
        }),
        ("CPUID", |state| {
            state["vcpus"][0]["cpuid"] = vec![state["vcpus"][0]["cpuid"][0].clone(); 300].into()
        }),
        ("this host lacks", |state| {
            // Every feature bit there is, in leaf 7.
            for entry in state["vcpus"][0]["cpuid"].as_array_mut().into_iter().flatten() {
                if entry[0] == 7 && entry[4] == 0 {
                    for byte in 16..20 {
                        entry[byte] = 255.into();
                    }
                }
            }
        }),
    ];
    for (reason, change) in cases {
        let (files, _) = saved_ticker(1)?;
        forge(&files, change)?;
        let vmm = spawn()?;
        let (request, fds) = Vmm::restore_request(&files, &[], &tempfile::tempfile()?)?;
        let (message, fatal) = vmm.refused(&request, &fds)?;
        assert!(message.contains(reason) && fatal, "{message:?} for {reason:?}");
        // It still answers.
        assert!(vmm.refused(&Request::Resume, &[])?.1);
    }
    Ok(())
}

#[test]
fn a_machine_with_two_states_of_the_same_vcpu_does_not_take_the_vmm_down() -> Result<()> {
    let (files, _) = saved_ticker(1)?;
    forge(&files, |state| {
        state["vcpus"] = vec![state["vcpus"][0].clone(); 2].into()
    })?;
    let vmm = spawn()?;
    let (request, fds) = Vmm::restore_request(&files, &[], &tempfile::tempfile()?)?;
    // KVM may or may not take it; either way there is an answer.
    let _taken = vmm.request(&request, &fds)?;
    vmm.request(&Request::Stats, &[])?;
    Ok(())
}

#[test]
fn a_save_that_cannot_be_written_leaves_the_machine_running() -> Result<()> {
    let console = tempfile::tempfile()?;
    let vmm = running_ticker(&console)?;
    let request = || {
        Request::Save(SaveRequest {
            state: 0,
            memory: 1,
            memory_index: 2,
            seal: Vec::new(),
            resume: true,
        })
    };
    let new = || -> Result<OwnedFd> { Ok(tempfile::tempfile()?.into()) };

    // Sizing the file works, writing to it does not: the child fails.
    let sealed = memfd_create(c"sealed", MFdFlags::MFD_ALLOW_SEALING)?;
    fcntl(&sealed, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE))?;
    vmm.must(&request(), &[new()?, sealed, new()?])?;
    let (message, fatal) = vmm.refused(&Request::FinishSave, &[])?;
    assert!(message.contains("write guest memory") && !fatal, "{message}");
    more_lines(&console, 2)?;

    let read_only: OwnedFd = File::open("/proc/self/exe")?.into();
    let (message, fatal) = vmm.refused(&request(), &[new()?, read_only, new()?])?;
    assert!(message.contains("memory file") && !fatal, "{message}");
    more_lines(&console, 2)?;

    // The disks would be sealed by now: this may only fail at the end.
    let read_only: OwnedFd = File::open("/proc/self/exe")?.into();
    vmm.must(&request(), &[read_only, new()?, new()?])?;
    let (message, fatal) = vmm.refused(&Request::FinishSave, &[])?;
    assert!(message.contains("write state file") && !fatal, "{message}");

    vmm.save(&Checkpoint::new(9)?, true)?;
    assert_consecutive(&more_lines(&console, 2)?);
    Ok(())
}

#[test]
fn a_killed_dumper_fails_the_save_and_nothing_else() -> Result<()> {
    let console = tempfile::tempfile()?;
    let vmm = spawn()?;
    // All of it is looked at in every save, which takes the dumper long enough to be caught.
    let initramfs = tempfile::tempfile()?;
    initramfs.set_len(256 << 20)?;
    let boot = BootRequest {
        vcpus: 1,
        memory_bytes: 512 << 20,
        kernel: 0,
        initramfs: Some(2),
        command_line: String::new(),
        disks: Vec::new(),
        nets: Vec::new(),
        console: 1,
        linux_devices: false,
    };
    let fds = [kernel(&TICKER)?.into(), console.try_clone()?.into(), initramfs.into()];
    vmm.must(&Request::Boot(boot), &fds)?;
    more_lines(&console, 2)?;
    let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", vmm.pid));
    let request = Request::Save(SaveRequest {
        state: 0,
        memory: 1,
        memory_index: 2,
        seal: Vec::new(),
        resume: true,
    });
    let mut attempts = 0..20;
    let message = loop {
        let number = attempts.next().context("the dumper was never caught")?;
        let files = Checkpoint::new(number)?;
        vmm.must(&request, &files.targets()?)?;
        if let Ok(dumper) = children()?.trim().parse() {
            kill(Pid::from_raw(dumper), Signal::SIGKILL)?;
        }
        if let Reply::Refused { message, fatal } = vmm.request(&Request::FinishSave, &[])? {
            let index = std::fs::metadata(files.path("memory.index"))?;
            assert!(index.len() == 0 && !fatal, "without an index there is no checkpoint");
            break message;
        }
    };
    assert!(message.contains("ended by SIGKILL"), "{message}");
    assert_eq!(children()?, "");
    vmm.save(&Checkpoint::new(99)?, true)?;
    assert_consecutive(&more_lines(&console, 2)?);
    Ok(())
}

#[test]
fn a_second_save_during_the_first_is_refused() -> Result<()> {
    let console = tempfile::tempfile()?;
    let vmm = running_ticker(&console)?;
    let request = Request::Save(SaveRequest {
        state: 0,
        memory: 1,
        memory_index: 2,
        seal: Vec::new(),
        resume: true,
    });
    let files = Checkpoint::new(3)?;
    vmm.must(&request, &files.targets()?)?;
    match vmm.request(&request, &Checkpoint::new(4)?.targets()?)? {
        Reply::Refused { message, fatal } => assert!(message.contains("under way") && !fatal, "{message}"),
        // The first one had ended already.
        Reply::Saving { .. } => {}
        other => bail!("unexpected reply {other:?}"),
    }
    vmm.must(&Request::FinishSave, &[])?;
    Ok(())
}

#[test]
fn the_control_socket_survives_garbage_by_ending() -> Result<()> {
    let mut vmm = spawn()?;
    nix::sys::socket::send(vmm.channel.as_raw_fd(), b"{]", nix::sys::socket::MsgFlags::empty())?;
    let status = vmm.wait_process()?;
    assert!(
        matches!(status, nix::sys::wait::WaitStatus::Exited(_, code) if code != 0),
        "{status:?}"
    );
    Ok(())
}

#[test]
fn an_index_that_reaches_beyond_its_file_is_refused() -> Result<()> {
    let (files, _) = saved_ticker(1)?;
    let length = std::fs::metadata(files.path("memory"))?.len();
    let shorter = File::options().write(true).open(files.path("memory"))?;
    shorter.set_len(length - PAGE_SIZE)?;
    shorter.write_all_at(&[1], 0)?;
    (&shorter).flush()?;
    let vmm = spawn()?;
    let (request, fds) = Vmm::restore_request(&files, &[], &tempfile::tempfile()?)?;
    let (message, _) = vmm.refused(&request, &fds)?;
    assert!(message.contains("memory file 0"), "{message}");
    Ok(())
}

#[test]
fn the_process_is_locked_in() -> Result<()> {
    let vmm = running_ticker(&tempfile::tempfile()?)?;
    let mut filters = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{}/task", vmm.pid))? {
        let status = std::fs::read_to_string(thread?.path().join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim_start_matches(':').trim().to_owned())
                .unwrap_or_default()
        };
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(field(set), "0000000000000000", "{set} of {}", field("Name"));
        }
        assert_eq!((field("NoNewPrivs").as_str(), field("Seccomp").as_str()), ("1", "2"));
        filters.push((field("Name"), field("Seccomp_filters")));
    }
    filters.sort();
    assert!(filters.contains(&("vcpu0".into(), "2".into())), "{filters:?}");
    if nix::unistd::geteuid().is_root() {
        assert_eq!(std::fs::read_dir(format!("/proc/{}/root", vmm.pid))?.count(), 0);
        let status = std::fs::read_to_string(format!("/proc/{}/status", vmm.pid))?;
        let user = 0x7000_0000 + vmm.pid.as_raw();
        for field in ["Uid", "Gid"] {
            let line = format!("{field}:\t{user}\t{user}\t{user}\t{user}\n");
            assert!(status.contains(&line), "{status}");
        }
        assert!(
            status.contains("Groups:\t \n") && status.contains("CapBnd:\t0000000000000000"),
            "{status}"
        );
    }
    Ok(())
}
