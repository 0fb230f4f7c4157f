//! `binary://` loggers: a program of the user's that reads a process's output and keeps it.
//!
//! The contract is that of runc's shim: the program is the path of the URI; each key of the query, followed by its value, is an
//! argument; descriptor 3 is the process's stdout, 4 its stderr, and 5 is closed (or written to) by the program when it is ready to
//! read. Its environment is `CONTAINER_ID` and `CONTAINER_NAMESPACE`. A logger that dies takes nothing with it: what it would have
//! read is thrown away.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, pipe2};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::{oneshot, watch};
use tracing::{debug, warn};

/// How long a logger may take until it is ready.
const READY: Duration = Duration::from_secs(60);
/// How long a logger may take to end once it was sent SIGTERM.
const TERMINATE: Duration = Duration::from_secs(12);

/// Why a logger cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoggerError {
    /// Its URI names no program.
    #[error("logger {uri:?}: {reason}")]
    Uri {
        /// As given.
        uri: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// It could not be started.
    #[error("start logger {program}")]
    Start {
        /// The program.
        program: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// It did not say that it is ready.
    #[error("logger {program} was not ready within {} s", READY.as_secs())]
    NotReady {
        /// The program.
        program: PathBuf,
    },
}

/// Whose output it is.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// containerd's namespace.
    pub namespace: &'a str,
    /// Id of the container, or of the exec.
    pub id: &'a str,
}

/// The command line in a `binary://` URI.
#[derive(Debug, PartialEq, Eq)]
struct CommandLine {
    program: PathBuf,
    arguments: Vec<String>,
}

/// Whether a stream's URI names a logger.
#[must_use]
pub fn is_logger(uri: &str) -> bool {
    uri.starts_with("binary:")
}

fn parse(uri: &str) -> Result<CommandLine, LoggerError> {
    let bad = |reason| LoggerError::Uri {
        uri: uri.to_owned(),
        reason,
    };
    let rest = uri
        .strip_prefix("binary://")
        .ok_or_else(|| bad("is no binary:// URI"))?;
    let rest = rest.split('#').next().unwrap_or_default();
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    if !path.starts_with('/') {
        return Err(bad("the program must be an absolute path, as in binary:///bin/logger"));
    }
    let path = percent_encoding::percent_decode_str(path);
    let path = path.decode_utf8().map_err(|_| bad("the path is not UTF-8"))?;
    let mut arguments = Vec::new();
    let mut keys = Vec::new();
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        // Of a key that is repeated, the first value counts.
        if keys.contains(&key) {
            continue;
        }
        arguments.push(key.clone().into_owned());
        // `?key` and `?key=` are the same to Go's parser, which gives the program an empty argument for both.
        arguments.push(value.into_owned());
        keys.push(key);
    }
    if path.contains('\0') || arguments.iter().any(|argument| argument.contains('\0')) {
        return Err(bad("contains a zero byte"));
    }
    Ok(CommandLine {
        program: PathBuf::from(path.into_owned()),
        arguments,
    })
}

/// A running logger. When dropped it is asked to end, and made to if it does not.
#[derive(Debug)]
pub struct Logger {
    _stop: oneshot::Sender<()>,
    ended: watch::Receiver<bool>,
}

/// What one writes into a logger.
#[derive(Debug)]
pub struct Inputs {
    /// The process's stdout.
    pub stdout: pipe::Sender,
    /// The process's stderr.
    pub stderr: pipe::Sender,
}

impl Logger {
    /// Starts the program and waits until it is ready.
    ///
    /// # Errors
    /// See [`LoggerError`].
    pub async fn start(uri: &str, owner: Owner<'_>) -> Result<(Self, Inputs), LoggerError> {
        let line = parse(uri)?;
        let program = line.program.clone();
        let failed = |source: std::io::Error| LoggerError::Start {
            program: program.clone(),
            source,
        };
        let (stdout_reader, stdout) = pipe_pair().map_err(failed)?;
        let (stderr_reader, stderr) = pipe_pair().map_err(failed)?;
        let (ready, ready_writer) = pipe_pair().map_err(failed)?;
        let inputs = Inputs {
            stdout: sender(stdout).map_err(failed)?,
            stderr: sender(stderr).map_err(failed)?,
        };
        let ready = pipe::Receiver::from_file(File::from(ready)).map_err(failed)?;
        let mut command = Command::new(&line.program);
        command
            .args(&line.arguments)
            .env_clear()
            .env("CONTAINER_ID", owner.id)
            .env("CONTAINER_NAMESPACE", owner.namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let places = vec![(stdout_reader, 3), (stderr_reader, 4), (ready_writer, 5)];
        crate::sys::place_descriptors(&mut command, places).map_err(failed)?;
        let child = command.spawn().map_err(failed)?;
        // The descriptors placed in the child belong to the command: without this, nothing would ever end.
        drop(command);
        let logger = Self::supervise(child).map_err(failed)?;
        match tokio::time::timeout(READY, wait_ready(ready)).await {
            Ok(()) => Ok((logger, inputs)),
            Err(_) => Err(LoggerError::NotReady { program }),
        }
    }

    fn supervise(child: Child) -> std::io::Result<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended_tx, ended) = watch::channel(false);
        let (exit_tx, exit) = oneshot::channel::<()>();
        let pid = Pid::from_raw(child.id().cast_signed());
        std::thread::Builder::new().name("logger-exit".into()).spawn(move || {
            // The zombie stays until it is reaped below, so that its pid is not somebody else's by then.
            let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
            let _ = exit_tx.send(());
        })?;
        tokio::spawn(async move {
            run(child, pid, stopped, exit).await;
            ended_tx.send_replace(true);
        });
        Ok(Self { _stop: stop, ended })
    }

    /// Waits until it has ended by itself, having read all.
    pub async fn ended(&mut self) {
        let _ = self.ended.wait_for(|ended| *ended).await;
    }
}

/// Reaps the child when it ends; ends it when asked to.
async fn run(mut child: Child, pid: Pid, stopped: oneshot::Receiver<()>, mut exit: oneshot::Receiver<()>) {
    let over = tokio::select! {
        biased;
        _ = &mut exit => true,
        _ = stopped => false,
    };
    if !over {
        let _ = kill(pid, Signal::SIGTERM);
        if tokio::time::timeout(TERMINATE, &mut exit).await.is_err() {
            warn!(%pid, "a logger does not end and is killed");
            let _ = kill(pid, Signal::SIGKILL);
            let _ = exit.await;
        }
    }
    let status = child.wait();
    debug!(%pid, ?status, "logger ended");
}

/// A byte or the end: both mean that the logger reads from now on.
async fn wait_ready(mut ready: pipe::Receiver) {
    let mut byte = [0; 1];
    let _ = ready.read(&mut byte).await;
}

fn pipe_pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    pipe2(OFlag::O_CLOEXEC).map_err(Into::into)
}

fn sender(end: OwnedFd) -> std::io::Result<pipe::Sender> {
    pipe::Sender::from_file(File::from(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt;
    use tokio::io::AsyncWriteExt;

    const OWNER: Owner<'_> = Owner {
        namespace: "space",
        id: "box",
    };

    fn script(dir: &tempfile::TempDir, text: &str) -> String {
        let path = dir.path().join("logger");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        path.display().to_string()
    }

    #[test]
    fn the_query_becomes_arguments_as_in_go() {
        let line = parse("binary:///usr/bin/my%20log?-o=%2Fvar%2Flog+1&flag&flag=again&x=").unwrap();
        assert_eq!(line.program, PathBuf::from("/usr/bin/my log"));
        assert_eq!(line.arguments, ["-o", "/var/log 1", "flag", "", "x", ""]);
        assert_eq!(parse("binary:///l").unwrap().arguments, Vec::<String>::new());
        for bad in ["binary://", "binary://name?x", "binary:///a%00b", "file:///x", ""] {
            assert!(matches!(parse(bad), Err(LoggerError::Uri { .. })), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_uri_can_hurt(rest in ".{0,60}") {
            let _ = parse(&format!("binary://{rest}"));
        }
    }

    #[tokio::test]
    async fn it_gets_both_streams_its_arguments_and_who_it_works_for() {
        let dir = tempfile::tempdir().unwrap();
        let text =
            r#"exec 5>&-; cat <&3 >"$2.out"; cat <&4 >"$2.err"; echo $1 $CONTAINER_ID $CONTAINER_NAMESPACE >"$2.env""#;
        let out = dir.path().join("log").display().to_string();
        let uri = format!("binary://{}?--to={out}", script(&dir, text));
        let (mut logger, mut inputs) = Logger::start(&uri, OWNER).await.unwrap();
        inputs.stdout.write_all(b"one").await.unwrap();
        inputs.stderr.write_all(b"two").await.unwrap();
        drop(inputs);
        tokio::time::timeout(Duration::from_secs(10), logger.ended())
            .await
            .unwrap();
        let read = |suffix: &str| std::fs::read_to_string(format!("{out}.{suffix}")).unwrap();
        assert_eq!(
            (read("out"), read("err"), read("env")),
            ("one".into(), "two".into(), "--to box space\n".into())
        );
    }

    #[tokio::test]
    async fn a_dropped_logger_ends_and_a_missing_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let uri = format!("binary://{}", script(&dir, "exec 5>&-; exec sleep 1000"));
        let (logger, _inputs) = Logger::start(&uri, OWNER).await.unwrap();
        let mut ended = logger.ended.clone();
        drop(logger);
        let over = tokio::time::timeout(Duration::from_secs(5), ended.wait_for(|e| *e)).await;
        assert!(over.is_ok_and(|e| e.is_ok_and(|e| *e)));
        let error = Logger::start("binary:///nonexistent/logger", OWNER).await.unwrap_err();
        assert!(error.to_string().contains("/nonexistent/logger"), "{error}");
    }
}
