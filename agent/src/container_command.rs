//! `ramet-agent container create|exec`: makes one process of a container and ends.
//!
//! libcontainer clones without exec and runs ordinary code in the child, which is only sound in a process with a single
//! thread; so the agent never does it itself but runs itself again. Standard streams are those of the new process. What
//! happened is written line by line to the report descriptor: see [`Report`].

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use oci_spec::runtime::{Process, Spec};

use crate::executor::Program;

/// Where libcontainer keeps its state.
pub const STATE: &str = "/run/ramet/libcontainer";

/// Limits of open descriptors, soft and hard, for a process whose spec has none: those of a service of systemd.
const DESCRIPTORS: (u64, u64) = (1024, 524_288);

/// One line of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The new process, stopped before its program (create) or running it (exec). The last line.
    Pid(i32),
    /// Nothing was made, and why. The last line.
    Error(String),
    /// A detail on the way.
    Log(String),
}

impl Report {
    /// The line without its newline.
    pub fn encode(&self) -> String {
        match self {
            Self::Pid(pid) => format!("pid {pid}"),
            Self::Error(text) => format!("error {}", text.replace('\n', " ")),
            Self::Log(text) => text.replace('\n', " "),
        }
    }

    /// Reads a line; what is not a last line is a detail.
    pub fn decode(line: &str) -> Self {
        match line.split_once(' ') {
            Some(("pid", pid)) if pid.parse::<i32>().is_ok_and(|pid| pid > 0) => Self::Pid(pid.parse().unwrap_or(0)),
            Some(("error", text)) => Self::Error(text.to_owned()),
            _ => Self::Log(line.to_owned()),
        }
    }
}

/// Runs the command line `create ID BUNDLE REPORT-FD CONSOLE` or `exec ID PROCESS-JSON REPORT-FD CONSOLE`, where CONSOLE is
/// the path of a socket that gets the terminal, or `-`.
///
/// # Errors
/// When the report cannot be written; all else is in the report.
pub fn main(args: &[String]) -> Result<()> {
    let [command, id, path, report, console] = args else {
        bail!("usage: ramet-agent container create|exec ID PATH REPORT-FD CONSOLE");
    };
    let report: i32 = report.parse().context("the report descriptor")?;
    let open = || File::options().write(true).open(format!("/proc/self/fd/{report}"));
    let mut file = open().context("open the report")?;
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::ERROR)
        .without_time()
        .with_level(false)
        .with_target(false)
        .with_ansi(false)
        .with_writer(Mutex::new(open().context("open the report")?))
        .init();
    // The agent's own limit is not for containers; what their spec says comes later.
    let _ = setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS.0, DESCRIPTORS.1).or_else(|_| {
        setrlimit(
            Resource::RLIMIT_NOFILE,
            DESCRIPTORS.0,
            getrlimit(Resource::RLIMIT_NOFILE)?.1,
        )
    });
    let console = Some(console.as_str()).filter(|&path| path != "-");
    let made = match command.as_str() {
        "create" => create(id, Path::new(path), console),
        "exec" => exec(id, Path::new(path), console),
        other => bail!("unknown command {other:?}"),
    };
    let line = match made {
        Ok(pid) => Report::Pid(pid),
        Err(error) => Report::Error(format!("{error:#}")),
    };
    writeln!(file, "{}", line.encode()).context("write the report")
}

fn create(id: &str, bundle: &Path, console: Option<&str>) -> Result<i32> {
    let container = builder(id, console, None)?
        .as_init(bundle)
        .with_systemd(false)
        .with_detach(true)
        .build()?;
    container.pid().map(nix_pid).context("the container has no pid")
}

fn exec(id: &str, process: &Path, console: Option<&str>) -> Result<i32> {
    let config: Process = serde_json::from_reader(File::open(process)?).context("read the process")?;
    let seccomp = exec_seccomp(id, &config)?;
    let pid = builder(id, console, seccomp)?
        .as_tenant()
        .with_detach(true)
        .with_process(Some(process))
        .build()?;
    Ok(nix_pid(pid))
}

/// libcontainer's own nix is another version than ours.
fn nix_pid(pid: impl Into<i32>) -> i32 {
    pid.into()
}

fn builder(
    id: &str,
    console: Option<&str>,
    exec_seccomp: Option<oci_spec::runtime::LinuxSeccomp>,
) -> Result<ContainerBuilder> {
    let builder = ContainerBuilder::new(id.to_owned(), SyscallType::Linux)
        .with_root_path(STATE)?
        .with_executor(Program { exec_seccomp })
        .validate_id()?;
    Ok(builder.with_console_socket(console))
}

/// The container's profile, for an exec that may load it: without privileges only `noNewPrivileges` allows that.
fn exec_seccomp(id: &str, process: &Process) -> Result<Option<oci_spec::runtime::LinuxSeccomp>> {
    if process.no_new_privileges() != Some(true) {
        return Ok(None);
    }
    let container = libcontainer::container::Container::load(Path::new(STATE).join(id))?;
    let spec = Spec::load(container.bundle().join("config.json"))?;
    Ok(spec.linux().as_ref().and_then(|linux| linux.seccomp().clone()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn reports_survive_the_trip(pid in 1i32.., text in "[^\n]{0,80}") {
            prop_assert_eq!(Report::decode(&Report::Pid(pid).encode()), Report::Pid(pid));
            prop_assert_eq!(Report::decode(&Report::Error(text.clone()).encode()), Report::Error(text));
        }

        #[test]
        fn no_line_can_hurt(line in ".{0,80}") {
            let _ = Report::decode(&line);
        }
    }

    #[test]
    fn other_lines_are_details() {
        assert_eq!(Report::decode("failed to chdir"), Report::Log("failed to chdir".into()));
        assert_eq!(Report::decode("pid 0"), Report::Log("pid 0".into()));
        assert_eq!(Report::decode("pid x"), Report::Log("pid x".into()));
    }
}
