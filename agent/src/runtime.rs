//! The agent's side of `ramet-agent container`: runs it, watches what it makes, and puts its errors into words.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use libcontainer::container::Container;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use tokio::sync::oneshot;

use crate::container_command::{Report, STATE};
use crate::error::{AgentError, Result};
use crate::fd::Fd;
use crate::reaper::{Exit, Reaper};

/// Longest report read, in bytes.
const MAX_REPORT: usize = 64 * 1024;

/// How long making a process may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// Directory of the sockets and files of one call.
const WORK: &str = "/run/ramet/work";

/// A process that was made.
#[derive(Debug)]
pub struct Made {
    /// Its pid in the guest's first pid namespace.
    pub pid: i32,
    /// How it ends.
    pub exit: oneshot::Receiver<Exit>,
    /// The master of its terminal, if it was to have one.
    pub terminal: Option<OwnedFd>,
}

/// What to make.
#[derive(Clone, Copy, Debug)]
pub enum Make<'a> {
    /// The init process of a container, stopped before its program.
    Init {
        /// Directory with `config.json`.
        bundle: &'a Path,
    },
    /// A process beside it.
    Exec {
        /// OCI `Process` as JSON.
        process: &'a str,
    },
}

/// The child's standard streams; with a terminal they are `None`.
#[derive(Debug, Default)]
pub struct ChildStreams {
    /// Read by the process.
    pub stdin: Option<OwnedFd>,
    /// Written by the process.
    pub stdout: Option<OwnedFd>,
    /// Written by the process.
    pub stderr: Option<OwnedFd>,
}

/// Makes a process of the container `id`.
///
/// # Errors
/// [`AgentError::Runtime`] with the text that runc would give.
pub async fn make(reaper: &Reaper, id: &str, what: Make<'_>, streams: ChildStreams, terminal: bool) -> Result<Made> {
    let scratch = Scratch::new()?;
    let console = scratch.path("sock");
    let listener = if terminal { Some(listen(&console)?) } else { None };
    let (command, path) = match what {
        Make::Init { bundle } => ("create", bundle.to_owned()),
        Make::Exec { process } => {
            let path = scratch.path("json");
            std::fs::write(&path, process).map_err(|error| AgentError::io("write the exec's process", error))?;
            ("exec", path)
        }
    };
    let window = reaper.window();
    let (reader, writer) =
        nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| AgentError::io("make a pipe", error))?;
    // The runtime has one thread, so no other child is started until this descriptor is closed again.
    fcntl(&writer, FcntlArg::F_SETFD(FdFlag::empty())).map_err(|error| AgentError::io("pass on a pipe", error))?;
    let child = Command::new("/proc/self/exe")
        .args(["container", command, id])
        .arg(&path)
        .arg(writer.as_raw_fd().to_string())
        .arg(if terminal { console.as_os_str() } else { "-".as_ref() })
        .env_clear()
        .current_dir("/")
        .stdin(stdio(streams.stdin))
        .stdout(stdio(streams.stdout))
        .stderr(stdio(streams.stderr))
        .spawn()
        .map_err(|error| AgentError::io("run the agent's container command", error))?;
    drop(writer);
    let helper = i32::try_from(child.id()).unwrap_or(0);
    let ended = window.watch(helper);
    let reader = Fd::new(reader).map_err(|error| AgentError::io("read the report", error))?;
    let Ok(report) = tokio::time::timeout(DEADLINE, read_report(&reader)).await else {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(helper), nix::sys::signal::SIGKILL);
        return Err(AgentError::Timeout(format!("{command} container {id}")));
    };
    let pid = match report {
        (Some(Report::Pid(pid)), _) => pid,
        (Some(Report::Error(text)), logs) => return Err(AgentError::Runtime(explain(&text, &logs))),
        (_, logs) => {
            let status = ended.await.map_or(0, |exit| exit.status);
            let text = format!("the container command ended with status {status}");
            return Err(AgentError::Runtime(explain(&text, &logs)));
        }
    };
    let exit = window.watch(pid);
    // The helper's exit makes the new process a child of ours; until then its end could not be seen.
    let _ = ended.await;
    let terminal = listener.map(|listener| receive_terminal(&listener)).transpose()?;
    Ok(Made { pid, exit, terminal })
}

/// Lets the init process of a container go on to its program.
///
/// # Errors
/// When it is gone.
pub fn start(id: &str) -> Result<()> {
    let failed = |error: libcontainer::error::LibcontainerError| {
        AgentError::Runtime(explain(&format!("{:#}", anyhow::Error::new(error)), &[]))
    };
    let mut container = Container::load(Path::new(STATE).join(id)).map_err(failed)?;
    container.start().map_err(failed)
}

/// Forgets what libcontainer knows of a container.
pub fn forget(id: &str) {
    match std::fs::remove_dir_all(Path::new(STATE).join(id)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => tracing::warn!("forget container {id}: {error}"),
        _ => {}
    }
}

fn stdio(end: Option<OwnedFd>) -> Stdio {
    end.map_or_else(Stdio::null, Stdio::from)
}

/// The last line, if it came, and the details before it.
async fn read_report(reader: &Fd) -> (Option<Report>, Vec<String>) {
    let mut text = Vec::new();
    let mut logs = Vec::new();
    let mut buffer = [0u8; 4096];
    let mut seen = 0;
    loop {
        while let Some(length) = text.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = text.drain(..=length).collect();
            match Report::decode(String::from_utf8_lossy(&line).trim_end()) {
                Report::Log(log) => logs.push(log),
                last => return (Some(last), logs),
            }
        }
        match reader.read(&mut buffer).await {
            Ok(count) if count > 0 && seen < MAX_REPORT => {
                seen += count;
                text.extend_from_slice(buffer.get(..count).unwrap_or_default());
            }
            _ => return (None, logs),
        }
    }
}

/// Puts an error of libcontainer into runc's words where its own would tell nothing.
fn explain(error: &str, logs: &[String]) -> String {
    let mut all = logs.iter().map(String::as_str).chain(std::iter::once(error));
    if let Some(text) = all.find_map(|text| text.find("exec: \"").and_then(|at| text.get(at..))) {
        return text.to_owned();
    }
    match logs.first() {
        Some(log) if !error.contains(log.as_str()) => format!("{error} ({log})"),
        _ => error.to_owned(),
    }
}

fn listen(path: &Path) -> Result<UnixListener> {
    let listener = UnixListener::bind(path).map_err(|error| AgentError::io("listen for the terminal", error))?;
    listener
        .set_nonblocking(true)
        .map_err(|error| AgentError::io("listen for the terminal", error))?;
    Ok(listener)
}

/// The process has sent its terminal before it was reported, so nothing here waits.
fn receive_terminal(listener: &UnixListener) -> Result<OwnedFd> {
    let (socket, _) = listener
        .accept()
        .map_err(|error| AgentError::io("accept the terminal", error))?;
    crate::sys::receive_fd(&socket).map_err(|error| AgentError::io("receive the terminal", error))
}

/// Names for the files of one call, removed at the end.
struct Scratch(u64);

impl Scratch {
    fn new() -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(WORK).map_err(|error| AgentError::io(format!("make {WORK}"), error))?;
        Ok(Self(NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    fn path(&self, suffix: &str) -> PathBuf {
        Path::new(WORK).join(format!("{}.{suffix}", self.0))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for suffix in ["sock", "json"] {
            let _ = std::fs::remove_file(self.path(suffix));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runcs_words_are_found_wherever_they_are() {
        let words = "exec: \"nosuch\": executable file not found in $PATH";
        let wrapped = format!("exec process failed with error error in executing process : {words}");
        assert_eq!(explain(&wrapped, &[]), words);
        assert_eq!(explain("other", &["first".into(), format!("x {words}")]), words);
    }

    #[test]
    fn a_detail_is_added_to_an_empty_phrase() {
        let logs = ["failed to chdir e=ENOENT".to_owned(), "failed to initialize".to_owned()];
        assert_eq!(
            explain("failed to unix syscall", &logs),
            "failed to unix syscall (failed to chdir e=ENOENT)"
        );
        assert_eq!(explain("plain", &[]), "plain");
    }

    #[tokio::test]
    async fn a_report_ends_at_its_last_line() {
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC).expect("a pipe");
        nix::unistd::write(&writer, b"detail\npid 42\n").expect("room in the pipe");
        let reader = Fd::new(reader).expect("a pipe");
        assert_eq!(
            read_report(&reader).await,
            (Some(Report::Pid(42)), vec!["detail".to_owned()])
        );
        drop(writer);
        assert_eq!(read_report(&reader).await, (None, vec![]));
    }
}
