//! The lab: a throw-away VM that has /dev/kvm, containerd and our programs.

mod machine;
mod payload;
mod slot;

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;

use self::payload::Contents;
use crate::containerd::Release;
use crate::e2e::Suite;
use crate::workspace::{Workspace, list, make_dir, say};
use crate::{base, build, e2e, guest, images, setup, test::Summary};

pub(crate) use payload::quote;
pub(crate) use slot::SLOTS;

/// What to do with the lab.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a command in a fresh lab; its output and exit code become ours
    Run {
        /// Use the programs in the target directory as they are; leave out those that are missing
        #[arg(long)]
        no_build: bool,
        /// Seconds after which the command is ended
        #[arg(long, default_value_t = 900, value_name = "S")]
        timeout: u64,
        /// The containerd that it runs
        #[arg(long, value_enum, default_value_t, value_name = "VERSION")]
        containerd: Release,
        /// The command; a single word is given to a shell
        #[arg(last = true, required = true, value_name = "CMD")]
        words: Vec<String>,
    },
    /// An interactive shell in a fresh lab
    Shell {
        /// Use the programs in the target directory as they are; leave out those that are missing
        #[arg(long)]
        no_build: bool,
    },
    /// Run the end-to-end tests in a fresh lab
    Test {
        /// Use the programs and test programs in the target directory as they are
        #[arg(long)]
        no_build: bool,
        /// Seconds after which the tests are ended
        #[arg(long, default_value_t = 2400, value_name = "S")]
        timeout: u64,
        /// The containerd that it runs
        #[arg(long, value_enum, default_value_t, value_name = "VERSION")]
        containerd: Release,
        /// Only tests whose name contains one of these
        #[arg(value_name = "FILTER")]
        filter: Vec<String>,
    },
    /// End labs of this checkout that still run, and remove what they left
    Down,
}

/// Something to run in a lab.
pub(crate) struct Job {
    /// A short name for the log directory.
    pub(crate) name: String,
    /// Program and arguments; a single word is given to a shell.
    pub(crate) words: Vec<String>,
    /// The job is ended after this time, counted from the start of the lab.
    pub(crate) timeout: Duration,
    /// What to do when the lab itself crashes.
    pub(crate) repeat: Repeat,
    /// Test programs that travel along: the name in /usr/local/bin, and the file.
    pub(crate) programs: Vec<(String, PathBuf)>,
}

/// Under emulation the lab's own kernel can, rarely, crash. A fresh lab may then be tried.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Repeat {
    /// Only if the job had not begun.
    BeforeJob,
    /// The job, too, may be begun anew.
    Always,
}

/// How a job ended.
pub(crate) struct Outcome {
    /// The command's exit code.
    pub(crate) code: u8,
    /// Logs, and under `run/lab-out` what the job wrote to `$RAMET_LAB_OUT`.
    pub(crate) logs: PathBuf,
    /// What the command printed on stdout, when that was asked for.
    pub(crate) stdout: Vec<u8>,
}

/// Whether virtual machines need emulation here: the processor has no virtualisation, or it cannot be used.
pub(crate) fn is_emulated() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    let has_virtualisation = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    !(has_virtualisation && fs::File::options().read(true).write(true).open("/dev/kvm").is_ok())
}

/// Runs one of the lab's commands.
pub(crate) fn command(ws: &Workspace, command: Command) -> Result<ExitCode> {
    match command {
        Command::Run {
            no_build,
            timeout,
            containerd,
            words,
        } => {
            prepare(ws, no_build)?;
            let timeout = Duration::from_secs(timeout);
            let outcome = run(
                ws,
                &Job {
                    name: "run".into(),
                    words,
                    timeout,
                    programs: containerd.programs(ws)?,
                    repeat: Repeat::BeforeJob,
                },
            )?;
            Ok(ExitCode::from(outcome.code))
        }
        Command::Shell { no_build } => {
            prepare(ws, no_build)?;
            shell(ws)
        }
        Command::Test {
            no_build,
            timeout,
            containerd,
            filter,
        } => {
            prepare(ws, no_build)?;
            let program = e2e::program(ws, no_build)?;
            let mut summary = Summary::default();
            let suite = Suite {
                program,
                containerd,
                filters: filter,
                timeout: Duration::from_secs(timeout),
            };
            e2e::run(ws, &suite, &mut summary)?;
            Ok(summary.print())
        }
        Command::Down => down(ws),
    }
}

/// Makes everything that a lab needs. Without building, a missing guest image is left out with a note.
pub(crate) fn prepare(ws: &Workspace, no_build: bool) -> Result<()> {
    setup::ensure()?;
    base::ensure(ws)?;
    if no_build {
        if let Err(error) = guest::build(ws, None) {
            say(format!("no new guest image: {error:#}"));
        }
        return Ok(());
    }
    build::programs(ws, &build::all_packages())?;
    guest::build(ws, None)?;
    images::build(ws)?;
    Ok(())
}

/// Runs a job in a fresh lab. Output is passed on as it comes.
pub(crate) fn run(ws: &Workspace, job: &Job) -> Result<Outcome> {
    let contents = Contents {
        script: payload::script(&job.words),
        mode: "run",
        programs: &job.programs,
    };
    let lab = Lab::new(ws, &job.name, &contents)?;
    let logs = lab.config.logs.clone();
    let end = machine::run_job(&lab.config, job.timeout, job.repeat)
        .with_context(|| format!("the lab did not finish its job; see {}", logs.display()))?;
    if end.code != 0 {
        say(format!(
            "the command ended with {}; logs are in {}",
            end.code,
            logs.display()
        ));
    }
    Ok(Outcome {
        code: end.code,
        logs,
        stdout: end.stdout,
    })
}

fn shell(ws: &Workspace) -> Result<ExitCode> {
    let lab = Lab::new(
        ws,
        "shell",
        &Contents {
            script: String::new(),
            mode: "shell",
            programs: &[],
        },
    )?;
    let code = machine::run_shell(&lab.config)?;
    Ok(ExitCode::from(code))
}

/// Everything that one lab needs to start, and the right to start it.
struct Lab {
    config: machine::Config,
    _run_dir: RunDir,
    _slot: slot::Slot,
}

impl Lab {
    fn new(ws: &Workspace, name: &str, contents: &Contents<'_>) -> Result<Self> {
        let dir = ws.lab_dir()?;
        let base = base::ensure(ws)?;
        let slot = slot::take()?;
        let run_dir = RunDir::create(&dir)?;
        let logs = dir.join("logs").join(log_name(name));
        make_dir(&logs)?;
        let config = machine::Config {
            kernel: base.vmlinux(),
            root_disk: base.disk(),
            initramfs: payload::initramfs(ws, &base, &run_dir.path)?,
            payload: payload::build(ws, &run_dir.path, contents)?,
            run_dir: run_dir.path.clone(),
            logs,
        };
        Ok(Self {
            config,
            _run_dir: run_dir,
            _slot: slot,
        })
    }
}

/// The files of one run, removed at its end.
struct RunDir {
    path: PathBuf,
}

impl RunDir {
    fn create(lab: &Path) -> Result<Self> {
        remove_stale(lab)?;
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = lab.join(format!("run-{}-{number}", std::process::id()));
        // For our user alone: the job may carry an API key.
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("creating {}", path.display()))?;
        Ok(Self { path })
    }
}

/// Removes the files of runs that were killed, and all but the newest logs.
fn remove_stale(lab: &Path) -> Result<usize> {
    const KEPT_LOGS: usize = 40;
    let mut stale = Vec::new();
    for path in list(lab)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name
            .strip_prefix("run-")
            .and_then(|rest| rest.split('-').next())
            .is_some_and(|pid| !Path::new("/proc").join(pid).exists())
        {
            stale.push(path);
        }
    }
    let runs = stale.len();
    if lab.join("logs").exists() {
        // Their names begin with the time.
        stale.extend(list(&lab.join("logs"))?.into_iter().rev().skip(KEPT_LOGS));
    }
    for path in stale {
        // Another run may be removing the same.
        if let Err(error) = fs::remove_dir_all(&path)
            && path.exists()
        {
            return Err(error).with_context(|| format!("removing {}", path.display()));
        }
    }
    Ok(runs)
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            say(format!("cannot remove {}: {error}", self.path.display()));
        }
    }
}

fn log_name(name: &str) -> String {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    format!("{seconds}-{}-{name}", std::process::id())
}

fn down(ws: &Workspace) -> Result<ExitCode> {
    let lab = ws.lab_dir()?;
    let ended = machine::end_all(&lab)?;
    let removed = remove_stale(&lab)?;
    say(format!(
        "ended {ended} labs, removed the files of {removed} runs that were killed"
    ));
    Ok(ExitCode::SUCCESS)
}
