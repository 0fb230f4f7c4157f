//! Further processes in a container: streams, terminals, signals, exits; many of them.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::Status;
use containerd_shim_protos::ttrpc::Code;
use e2e::Runtime;
use e2e::shim::{Lines, Shim, Stdio, code};

use super::{SIGKILL, SIGTERM, running, status};

/// With ours alone: runc's shim takes both outputs or none, and these name the one that is read.
#[test]
fn they_have_streams_signals_and_exits_of_their_own() -> Result<()> {
    let shim = running(Runtime::Ramet)?;
    a_process_reads_to_the_end_of_its_input(&shim)?;
    a_terminal_has_the_size_that_is_set(&shim)?;
    signals_do_what_the_process_lets_them(&shim)?;
    let (fifo, reader) = a_reader_may_go_and_another_come(&shim)?;
    init_ends_last(&shim)?;
    drop((fifo, reader));
    Ok(())
}

#[test]
#[ignore = "not timed in the lab yet; its 700 processes may take minutes there"]
fn hundreds_return_and_leave_nothing() -> Result<()> {
    let (at_once, in_turn) = (200, 500);
    let shim = running(Runtime::Ramet)?;
    return_at_once(&shim, at_once)?;
    let before = Held::by(&shim)?;
    let start = Instant::now();
    for number in 0..in_turn {
        let exec = format!("turn-{number}");
        ensure!(run(&shim, &exec, &["true"], &Stdio::default())? == 0, "{exec}");
    }
    println!("{in_turn} processes in turn: {:?}", start.elapsed());
    let mut after = before.clone();
    let same = e2e::wait_until(Duration::from_secs(20), || {
        after = Held::by(&shim).unwrap_or_default();
        after.is_no_more_than(&before)
    });
    ensure!(same, "{before:?} became {after:?}");
    Ok(())
}

/// Runs an exec to its end and removes it; its exit status.
fn run(shim: &Shim, exec: &str, command: &[&str], stdio: &Stdio) -> Result<u32> {
    shim.exec(exec, command, stdio)
        .with_context(|| format!("exec {exec}"))?;
    shim.start_process(exec).with_context(|| format!("start {exec}"))?;
    let exit = shim.wait(exec).with_context(|| format!("wait {exec}"))?;
    let deleted = shim.delete(exec).with_context(|| format!("delete {exec}"))?;
    ensure!(deleted.exit_status == exit.exit_status && deleted.exited_at == exit.exited_at);
    Ok(exit.exit_status)
}

fn a_process_reads_to_the_end_of_its_input(shim: &Shim) -> Result<()> {
    let (input, out, err) = (shim.bundle().fifo()?, shim.bundle().fifo()?, shim.bundle().fifo()?);
    let (lines, errors) = (Lines::of(&out), Lines::of(&err));
    let stdio = Stdio {
        stdin: input.clone(),
        stdout: out,
        stderr: err,
        terminal: false,
    };
    for answer in [
        code(&shim.start_process("nobody")),
        code(&shim.state("nobody")),
        code(&shim.wait("nobody")),
        code(&shim.kill("nobody", SIGKILL, false)),
        code(&shim.delete("nobody")),
    ] {
        ensure!(answer == Err(Code::NOT_FOUND), "{answer:?}");
    }
    shim.exec("cat", &["sh", "-c", "cat; echo end >&2; exit 5"], &stdio)?;
    shim.events().wait("exec-added", "cat")?;
    let state = shim.state("cat")?;
    ensure!(
        state.status == Status::CREATED.into() && Path::new(&state.stdin) == input,
        "{state:?}"
    );
    // runc's shim names the exec in the other field.
    ensure!(state.exec_id == "cat" || state.id == "cat", "{state:?}");
    ensure!(code(&shim.exec("cat", &["true"], &stdio)) == Err(Code::ALREADY_EXISTS));
    ensure!(code(&shim.kill("cat", SIGTERM, false)) == Err(Code::FAILED_PRECONDITION));
    let waiter = shim.waiter("cat");
    let pid = shim.start_process("cat")?.pid;
    ensure!(pid > 0 && shim.events().wait("exec-started", "cat")?.pid == pid);
    // Reading and writing, lest opening wait for the other end.
    let mut writer = fs::File::options().read(true).write(true).open(&input)?;
    writer.write_all(b"hello\n")?;
    ensure!(lines.next()? == "hello");
    shim.close_io("cat", false)?;
    shim.resize("cat", (80, 25))?;
    ensure!(
        status(shim, "cat")? == Status::RUNNING && shim.delete("cat").is_err() && shim.start_process("cat").is_err()
    );
    shim.close_io("cat", true)?;
    drop(writer);
    let exit = waiter.answer()?;
    ensure!(exit.exit_status == 5 && errors.next()? == "end");
    let event = shim.events().wait("exit", "cat")?;
    ensure!(
        event.exited_at == exit.exited_at.clone().into_option() && event.status == 5 && event.pid == pid,
        "{event:?}"
    );
    let deleted = shim.delete("cat")?;
    ensure!(
        deleted.exit_status == 5 && deleted.pid == pid && deleted.exited_at == exit.exited_at,
        "{deleted:?}"
    );
    ensure!(code(&shim.delete("cat")) == Err(Code::NOT_FOUND) && code(&shim.wait("cat")) == Err(Code::NOT_FOUND));
    // The name is free again, and one that was never started can be removed.
    shim.exec("cat", &["true"], &Stdio::default())?;
    shim.delete("cat")?;
    let refused = shim
        .exec("bad", &["no-such-command"], &Stdio::default())
        .and_then(|_| shim.start_process("bad"));
    ensure!(refused.is_err_and(|error| error.to_string().contains("no-such-command")));
    let _ = shim.delete("bad");
    Ok(())
}

fn a_terminal_has_the_size_that_is_set(shim: &Shim) -> Result<()> {
    let (input, out) = (shim.bundle().fifo()?, shim.bundle().fifo()?);
    let lines = Lines::of(&out);
    let stdio = Stdio {
        stdin: input.clone(),
        stdout: out,
        terminal: true,
        ..Stdio::default()
    };
    shim.exec(
        "tty",
        &["sh", "-c", "stty -echo; echo ready; read line; stty size; exit 6"],
        &stdio,
    )?;
    shim.start_process("tty")?;
    ensure!(lines.next()? == "ready" && shim.state("tty")?.terminal);
    shim.resize("tty", (120, 50))?;
    let mut writer = fs::File::options().read(true).write(true).open(&input)?;
    writer.write_all(b"\n")?;
    ensure!(lines.next()? == "50 120" && shim.wait("tty")?.exit_status == 6);
    shim.delete("tty")?;
    Ok(())
}

fn signals_do_what_the_process_lets_them(shim: &Shim) -> Result<()> {
    for (exec, trap, expected) in [("deaf", "trap '' TERM;", 128 + SIGKILL), ("mortal", "", 128 + SIGTERM)] {
        let out = shim.bundle().fifo()?;
        let lines = Lines::of(&out);
        let script = format!("{trap} echo ready; exec sleep 1000");
        shim.exec(
            exec,
            &["sh", "-c", &script],
            &Stdio {
                stdout: out,
                ..Stdio::default()
            },
        )?;
        shim.start_process(exec)?;
        ensure!(lines.next()? == "ready");
        shim.kill(exec, SIGTERM, false)?;
        if expected == 128 + SIGKILL {
            // It would be gone by now: the container's processes are all asked, in order.
            run(shim, "after", &["true"], &Stdio::default())?;
            ensure!(status(shim, exec)? == Status::RUNNING);
            shim.kill(exec, SIGKILL, false)?;
        }
        let exit = shim.wait(exec)?.exit_status;
        ensure!(exit == expected, "{exec}: {exit}");
        ensure!(code(&shim.kill(exec, SIGKILL, false)) == Err(Code::NOT_FOUND));
        shim.delete(exec)?;
    }
    Ok(())
}

/// Leaves the process `ticks` running.
fn a_reader_may_go_and_another_come(shim: &Shim) -> Result<(PathBuf, Lines)> {
    let out = shim.bundle().fifo()?;
    let lines = Lines::of(&out);
    let script = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done";
    shim.exec(
        "ticks",
        &["sh", "-c", script],
        &Stdio {
            stdout: out.clone(),
            ..Stdio::default()
        },
    )?;
    shim.start_process("ticks")?;
    let seen: u32 = lines.next()?.parse()?;
    drop(lines);
    let lines = Lines::of(&out);
    // What the first had in its buffer is lost, as with any pipe.
    ensure!(lines.next()?.parse::<u32>()? > seen && lines.next()?.parse::<u32>()? > seen);
    ensure!(status(shim, "ticks")? == Status::RUNNING);
    Ok((out, lines))
}

/// With `ticks` running.
fn init_ends_last(shim: &Shim) -> Result<()> {
    shim.exec("late", &["true"], &Stdio::default())?;
    shim.kill("", SIGTERM, false)?;
    let exit = shim.wait("")?;
    ensure!(exit.exit_status == 43, "{}", exit.exit_status);
    let killed = shim.wait("ticks")?.exit_status;
    ensure!(killed == 137, "{killed}");
    ensure!(code(&shim.start_process("late")) == Err(Code::FAILED_PRECONDITION));
    shim.events().wait("exit", "")?;
    let order = shim.events().order();
    ensure!(
        order.last().is_some_and(|last| last == "exit"),
        "init's exit is not the last: {order:?}"
    );
    let started = |exec: &str| order.iter().position(|line| *line == format!("exec-started {exec}"));
    let exited = |exec: &str| order.iter().position(|line| *line == format!("exit {exec}"));
    for exec in ["cat", "tty", "deaf", "mortal", "ticks"] {
        ensure!(
            started(exec).is_some() && started(exec) < exited(exec),
            "{exec}: {order:?}"
        );
    }
    let exits: Vec<_> = order.iter().filter(|line| line.starts_with("exit")).collect();
    let each = exits.iter().collect::<BTreeSet<_>>().len();
    ensure!(exited("late").is_none() && each == exits.len(), "{order:?}");
    shim.delete("ticks")?;
    shim.delete("late")?;
    let deleted = shim.delete("")?;
    ensure!(deleted.exit_status == 43 && deleted.exited_at == exit.exited_at);
    shim.shut_down()?;
    shim.expect_end()
}

/// Every other one reads a FIFO whose writer is gone at once, as `ctr tasks exec … </dev/null` makes them.
fn return_at_once(shim: &Shim, count: usize) -> Result<()> {
    let done = AtomicUsize::new(0);
    let start = Instant::now();
    let one = |number: usize| -> Result<()> {
        let exec = format!("many-{number}");
        let mut stdio = Stdio::default();
        let mut lines = None;
        if number % 2 == 0 {
            (stdio.stdin, stdio.stdout) = (shim.bundle().fifo()?, shim.bundle().fifo()?);
            lines = Some(Lines::of(&stdio.stdout));
        }
        shim.exec(&exec, &["sh", "-c", &format!("cat; echo {number}")], &stdio)?;
        shim.start_process(&exec)?;
        if let Some(lines) = lines {
            drop(fs::File::options().write(true).open(&stdio.stdin)?);
            shim.close_io(&exec, true)?;
            ensure!(lines.next()? == number.to_string());
        }
        ensure!(shim.wait(&exec)?.exit_status == 0);
        shim.delete(&exec)?;
        done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    let failures: Vec<String> = std::thread::scope(|threads| {
        let all: Vec<_> = (0..count)
            .map(|number| threads.spawn(move || (number, one(number))))
            .collect();
        let results = all.into_iter().map(|thread| thread.join());
        results
            .filter_map(|result| match result {
                Ok((_, Ok(()))) => None,
                Ok((number, Err(error))) => Some(format!("{number}: {error:#}")),
                Err(_) => Some("panicked".to_owned()),
            })
            .collect()
    });
    println!("{count} processes at once: {:?}", start.elapsed());
    ensure!(
        failures.is_empty(),
        "{} of {count} returned; {failures:?}",
        done.load(Ordering::Relaxed)
    );
    Ok(())
}

/// What a shim and its guest hold.
#[derive(Clone, Debug, Default)]
struct Held {
    descriptors: usize,
    threads: usize,
    children: usize,
    /// Anonymous memory of the shim.
    shim_kib: u64,
    /// Of the guest's whole kernel; absent with runc, whose kernel everybody uses.
    guest: Option<Guest>,
}

#[derive(Clone, Debug, Default)]
struct Guest {
    tasks: u64,
    descriptors: u64,
    cgroups: u64,
    available_kib: u64,
}

impl Held {
    fn by(shim: &Shim) -> Result<Self> {
        let pid = shim.pid();
        let count = |what: &str| -> Result<usize> { Ok(fs::read_dir(format!("/proc/{pid}/{what}"))?.count()) };
        let mut children = 0;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may have ended since it was listed.
            let text = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            children += text.split_whitespace().count();
        }
        Ok(Self {
            descriptors: count("fd")?,
            threads: count("task")?,
            children,
            shim_kib: kib(&fs::read_to_string(format!("/proc/{pid}/status"))?, "RssAnon:")?,
            guest: if shim.bundle().runtime().is_vm() {
                Some(Guest::of(shim)?)
            } else {
                None
            },
        })
    }

    fn is_no_more_than(&self, before: &Self) -> bool {
        // Go's threads and heap come and go.
        let slack = if self.guest.is_some() { 0 } else { 12 };
        let fine = self.descriptors <= before.descriptors + slack
            && self.threads <= before.threads + slack
            && self.children <= before.children
            && self.shim_kib <= before.shim_kib + 4096;
        fine && match (&self.guest, &before.guest) {
            (Some(now), Some(before)) => {
                // The kernel's own threads come and go, too.
                now.tasks <= before.tasks + 4
                    && now.descriptors <= before.descriptors + 8
                    && now.cgroups <= before.cgroups
                    && now.available_kib + (16 << 10) >= before.available_kib
            }
            _ => true,
        }
    }
}

impl Guest {
    /// Files of /proc that are not of a namespace.
    fn of(shim: &Shim) -> Result<Self> {
        let out = shim.bundle().fifo()?;
        let lines = Lines::of(&out);
        let script =
            "cat /proc/loadavg /proc/sys/fs/file-nr; grep ^pids /proc/cgroups; grep MemAvailable /proc/meminfo";
        run(
            shim,
            "look",
            &["sh", "-c", script],
            &Stdio {
                stdout: out,
                ..Stdio::default()
            },
        )?;
        let word = |number: usize| -> Result<String> {
            let line = lines.next()?;
            line.split_whitespace()
                .nth(number)
                .map(str::to_owned)
                .with_context(|| format!("word {number} of {line:?}"))
        };
        let running_of_all = word(3)?;
        let (_, all) = running_of_all.split_once('/').context("no / in the load average")?;
        Ok(Self {
            tasks: all.parse()?,
            descriptors: word(0)?.parse()?,
            cgroups: word(2)?.parse()?,
            available_kib: word(1)?.parse()?,
        })
    }
}

fn kib(text: &str, name: &str) -> Result<u64> {
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .with_context(|| format!("no {name}"))?;
    Ok(line
        .split_whitespace()
        .nth(1)
        .with_context(|| line.to_owned())?
        .parse()?)
}
