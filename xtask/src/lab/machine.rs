//! Runs QEMU for a lab and talks to the lab's init over virtio-serial ports.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Repeat, is_emulated};
use crate::workspace::{list, say};

/// Guest memory in MiB.
const MEMORY_MIB: u32 = 6144;
/// One when it is emulated: QEMU's threads for several processors race with each other, which shows as stale breakpoints in
/// patched kernel code and as nested guests that crash or hang. Two labs with one processor each do as much.
fn cpus() -> u32 {
    if is_emulated() { 1 } else { 2 }
}
/// How long the lab may take to hand back its logs after a job that was ended early.
const GRACE: Duration = Duration::from_secs(60);
/// How often the lab is asked whether it is still there. The interrupt alone wakes an emulated processor that lost one of its timer's.
const PING: Duration = Duration::from_secs(10);
/// An emulated machine that answers nothing for so long has hung. Beside other work it may well be slow.
const SILENCE: Duration = Duration::from_secs(300);

/// The files of one lab.
pub(crate) struct Config {
    /// ELF kernel.
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    /// Raw ext4; never written to.
    pub(crate) root_disk: PathBuf,
    pub(crate) payload: PathBuf,
    /// Temporary files, among them the copy-on-write part of the root disk.
    pub(crate) run_dir: PathBuf,
    /// Where logs go.
    pub(crate) logs: PathBuf,
}

/// How a job ended.
pub(crate) struct End {
    pub(crate) code: u8,
    pub(crate) stdout: Vec<u8>,
}

/// A virtio-serial port: the name in the lab is `ramet.NAME`.
struct Port {
    name: &'static str,
    ours: UnixStream,
    qemus: UnixStream,
}

impl Port {
    fn new(name: &'static str) -> Result<Self> {
        let (ours, qemus) = UnixStream::pair().context("making a socket pair for QEMU")?;
        fcntl(&qemus, FcntlArg::F_SETFD(FdFlag::empty())).context("making a socket inheritable")?;
        Ok(Self { name, ours, qemus })
    }

    fn arguments(&self) -> [String; 4] {
        let Self { name, qemus, .. } = self;
        [
            "-chardev".into(),
            format!("socket,id={name},fd={}", qemus.as_raw_fd()),
            "-device".into(),
            format!("virtserialport,chardev={name},name=ramet.{name}"),
        ]
    }
}

/// A running QEMU, killed when dropped.
struct Machine {
    child: Child,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // It is either gone, or all that it has is to be thrown away.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(config: &Config, ports: &[&Port], serial: &str, stdin: Stdio) -> Result<Machine> {
    // QEMU dies with us whatever ends us; setpriv needs no unsafe code here.
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig",
        "KILL",
        "qemu-system-x86_64",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ]);
    command.args(["-name", &machine_name(&config.run_dir), "-M", "q35", "-no-reboot"]);
    if is_emulated() {
        // Translated code, at most 2 GiB: when it is full all of it is thrown away, and what runs then is slow for seconds.
        command.args(["-accel", "tcg,tb-size=2000", "-cpu", "max"]);
    } else {
        command.args(["-accel", "kvm", "-cpu", "host"]);
    }
    command.args(["-smp", &cpus().to_string(), "-m", &MEMORY_MIB.to_string()]);
    command
        .arg("-kernel")
        .arg(&config.kernel)
        .arg("-initrd")
        .arg(&config.initramfs);
    // Without address randomisation the translated code of a program serves its next process too.
    command.args([
        "-append",
        "console=ttyS0 quiet panic=-1 mitigations=off norandmaps random.trust_cpu=on tsc=noirqtime",
    ]);
    for (serial, path, options) in [
        ("base", &config.root_disk, "snapshot=on"),
        ("payload", &config.payload, "readonly=on"),
    ] {
        command.arg("-drive").arg(format!(
            "if=none,id={serial},file={},format=raw,{options}",
            path.display()
        ));
        command.args(["-device", &format!("virtio-blk-pci,drive={serial},serial={serial}")]);
    }
    command.args([
        "-device",
        "virtio-rng-pci",
        "-device",
        "virtio-serial-pci",
        "-serial",
        serial,
    ]);
    // Only the demo with a model has anything to say to the outside.
    if std::env::var_os("OPENAI_BASE_URL").is_some() {
        command.args([
            "-netdev",
            "user,id=net",
            "-device",
            "virtio-net-pci,netdev=net,romfile=",
        ]);
    }
    for port in ports {
        command.args(port.arguments());
    }
    command.env("TMPDIR", &config.run_dir).stdin(stdin);
    let child = command.spawn().context("starting QEMU")?;
    Ok(Machine { child })
}

/// A name by which `lab down` finds the machines of this checkout.
fn machine_name(run_dir: &Path) -> String {
    format!("ramet-lab:{}", run_dir.display())
}

/// Runs the job on the payload disk. An emulated machine that crashed is started again if the job permits that.
pub(crate) fn run_job(config: &Config, timeout: Duration, repeat: Repeat) -> Result<End> {
    const ATTEMPTS: u32 = 3;
    let mut attempts = 1;
    loop {
        let (end, stdout) = attempt(config, timeout)?;
        let may_repeat = is_emulated() && (repeat == Repeat::Always || !end.has_begun);
        if !end.is_crash() || !may_repeat || attempts == ATTEMPTS {
            return end.result(&config.logs).map(|code| End { code, stdout });
        }
        let kept = config.logs.join(format!("console-crash{attempts}.log"));
        say(format!(
            "the emulated machine itself crashed, see {}: trying again",
            kept.display()
        ));
        fs::rename(config.logs.join("console.log"), kept).context("keeping the crashed machine's console")?;
        attempts += 1;
    }
}

fn attempt(config: &Config, timeout: Duration) -> Result<(Ending, Vec<u8>)> {
    let [ctl, out, err, logs] = [
        Port::new("ctl")?,
        Port::new("out")?,
        Port::new("err")?,
        Port::new("logs")?,
    ];
    let serial = format!("file:{}", config.logs.join("console.log").display());
    let started = Instant::now();
    let machine = start(config, &[&ctl, &out, &err, &logs], &serial, Stdio::null())?;
    // Our copies of QEMU's ends must be closed, or the streams would never end.
    let [mut ctl, out, err, logs] = [ctl, out, err, logs].map(|port| port.ours);
    let out = pass_on(out, std::io::stdout());
    let err = pass_on(err, std::io::stderr());
    let log_dir = config.logs.to_owned();
    let logs = std::thread::spawn(move || tar::Archive::new(BufReader::new(logs)).unpack(log_dir));
    let lines = read_lines(ctl.try_clone().context("cloning a socket")?);
    let mut timing = File::create(config.logs.join("timing.txt")).context("creating timing.txt")?;

    let mut end = Ending::default();
    let mut deadline = started + timeout;
    let mut heard = Instant::now();
    loop {
        let wait = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(if end.is_pinged() { wait.min(PING) } else { wait }) {
            Ok(line) if line == "pong" => heard = Instant::now(),
            Ok(line) => {
                heard = Instant::now();
                writeln!(timing, "{:.2} {line}", started.elapsed().as_secs_f64()).context("writing timing.txt")?;
                if end.take(&line) {
                    break;
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < deadline => {
                if is_emulated() && heard.elapsed() > SILENCE {
                    say(format!("the emulated machine has hung for {} s", SILENCE.as_secs()));
                    break;
                }
                if ctl.write_all(b"ping\n").is_err() {
                    break;
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) if !end.is_timeout => {
                say(format!("the job did not end within {} s: ending it", timeout.as_secs()));
                end.is_timeout = true;
                deadline = Instant::now() + GRACE;
                ctl.write_all(b"stop\n").context("asking the lab to end the job")?;
            }
            Err(_) => break,
        }
    }
    drop(machine);
    let stdout = join(out)?;
    join(err)?;
    if let Err(error) = logs
        .join()
        .unwrap_or_else(|_| Err(std::io::Error::other("the reader panicked")))
    {
        say(format!("the lab's logs are not complete: {error}"));
    }
    Ok((end, stdout))
}

/// What the lab told about its end.
#[derive(Default)]
struct Ending {
    code: Option<u8>,
    failure: Option<String>,
    is_timeout: bool,
    /// The job was started.
    has_begun: bool,
}

impl Ending {
    /// Takes a line from the lab; true when it was the last.
    fn take(&mut self, line: &str) -> bool {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("exit", code) => self.code = Some(code.trim().parse().unwrap_or(u8::MAX)),
            ("fail", reason) => self.failure = Some(reason.to_owned()),
            ("begin", _) => self.has_begun = true,
            ("note", text) => say(format!("lab: {text}")),
            ("done", _) => return true,
            _ => {}
        }
        false
    }

    /// The lab answers pings: its job runs.
    fn is_pinged(&self) -> bool {
        self.has_begun && self.code.is_none() && !self.is_timeout
    }

    /// The machine ended without a word.
    fn is_crash(&self) -> bool {
        !self.is_timeout && self.failure.is_none() && self.code.is_none()
    }

    fn result(self, logs: &Path) -> Result<u8> {
        /// As timeout(1) does.
        const TIMED_OUT: u8 = 124;
        if self.is_timeout {
            return Ok(TIMED_OUT);
        }
        match (self.failure, self.code) {
            (Some(reason), _) => bail!("the lab cannot start: {reason}"),
            (None, Some(code)) => Ok(code),
            (None, None) => {
                let console = fs::read(logs.join("console.log")).unwrap_or_default();
                let console = String::from_utf8_lossy(&console);
                let lines: Vec<&str> = console.lines().collect();
                let tail = lines[lines.len().saturating_sub(15)..].join("\n");
                bail!("the lab ended before its job did; the end of its console:\n{tail}")
            }
        }
    }
}

/// Copies a stream to one of ours, line by line as it comes, and keeps it. Several labs may write to the same.
fn pass_on(from: UnixStream, mut to: impl Write + Send + 'static) -> JoinHandle<std::io::Result<Vec<u8>>> {
    /// A line without an end is passed on in pieces of this size.
    const MAX_LINE: u64 = 64 << 10;
    std::thread::spawn(move || {
        let mut all = Vec::new();
        let mut from = BufReader::new(from);
        loop {
            let start = all.len();
            match (&mut from).take(MAX_LINE).read_until(b'\n', &mut all) {
                Ok(0) => return Ok(all),
                // A killed QEMU may reset the connection; everything sent before was read.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    to.write_all(&all[start..])?;
                    return Ok(all);
                }
                result => result?,
            };
            to.write_all(&all[start..])?;
            to.flush()?;
        }
    })
}

fn join(thread: JoinHandle<std::io::Result<Vec<u8>>>) -> Result<Vec<u8>> {
    match thread.join() {
        Ok(result) => result.context("passing on the lab's output"),
        Err(_) => bail!("the thread that passes on the lab's output panicked"),
    }
}

fn read_lines(stream: UnixStream) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines() {
            // The receiver is gone when nobody waits for the lab any more.
            if line.is_err() || line.is_ok_and(|line| sender.send(line).is_err()) {
                return;
            }
        }
    });
    receiver
}

/// An interactive shell on the lab's serial console, which is our terminal. Returns the shell's exit code.
pub(crate) fn run_shell(config: &Config) -> Result<u8> {
    let [ctl, logs] = [Port::new("ctl")?, Port::new("logs")?];
    say("starting the lab; Ctrl-A X ends it at once");
    let mut machine = start(config, &[&ctl, &logs], "mon:stdio", Stdio::inherit())?;
    let [ctl, logs] = [ctl, logs].map(|port| port.ours);
    let log_dir = config.logs.clone();
    let logs = std::thread::spawn(move || tar::Archive::new(BufReader::new(logs)).unpack(log_dir));
    let mut end = Ending::default();
    for line in read_lines(ctl) {
        if end.take(&line) {
            break;
        }
    }
    // QEMU restores the terminal when it ends by itself.
    let pid = Pid::from_raw(i32::try_from(machine.child.id()).context("a process id is out of range")?);
    let _ = kill(pid, Signal::SIGTERM);
    machine.child.wait().context("waiting for QEMU")?;
    if let Some(reason) = end.failure {
        bail!("the lab cannot start: {reason}");
    }
    if end.code.is_some() && logs.join().is_ok_and(|result| result.is_ok()) {
        say(format!("logs are in {}", config.logs.display()));
    }
    // Without a code the user ended QEMU from its monitor.
    Ok(end.code.unwrap_or_default())
}

/// Kills the machines of this checkout; returns how many there were.
pub(crate) fn end_all(lab: &Path) -> Result<usize> {
    let mark = format!("ramet-lab:{}/", lab.display());
    let mut ended = 0;
    for process in list(Path::new("/proc"))? {
        let Some(pid) = process.file_name().and_then(|name| name.to_str()?.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(cmdline) = fs::read(process.join("cmdline")) else {
            continue;
        };
        if cmdline
            .split(|byte| *byte == 0)
            .any(|word| word.starts_with(mark.as_bytes()))
        {
            kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing QEMU, process {pid}"))?;
            ended += 1;
        }
    }
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending(lines: &[&str]) -> Result<u8> {
        let mut end = Ending::default();
        for line in lines {
            end.take(line);
        }
        end.result(Path::new("/nowhere"))
    }

    #[test]
    fn the_exit_code_is_the_jobs() {
        assert_eq!(ending(&["time init 1.0", "exit 7", "done"]).unwrap(), 7);
    }

    #[test]
    fn a_machine_that_ends_without_a_word_has_crashed() {
        let mut end = Ending::default();
        end.take("begin");
        assert!(end.is_crash() && end.has_begun);
        end.take("exit 0");
        assert!(!end.is_crash());
    }

    #[test]
    fn a_lab_that_dies_or_cannot_start_is_an_error() {
        assert!(ending(&["time init 1.0"]).is_err());
        assert!(
            ending(&["fail no /dev/kvm", "done"])
                .unwrap_err()
                .to_string()
                .contains("no /dev/kvm")
        );
    }
}
