//! Commands with a deadline. A command that exceeds it is killed with everything it started, and the error shows what it printed.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{DEADLINE, signals};

/// A command about to be run.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) environment: Vec<(OsString, OsString)>,
    stdin: Vec<u8>,
    deadline: Duration,
}

/// What a command did.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The command line, for messages.
    pub what: String,
    /// Exit code; 128 + n when killed by signal n.
    pub code: i32,
    /// Everything on stdout.
    pub stdout: Vec<u8>,
    /// Everything on stderr.
    pub stderr: Vec<u8>,
    /// From start to exit.
    pub took: Duration,
}

impl Invocation {
    /// A command with empty stdin and the usual deadline.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            stdin: Vec::new(),
            deadline: DEADLINE,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<I: IntoIterator<Item = S>, S: Into<OsString>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// What it reads on stdin.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// How long it may take.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The command line, for messages; long arguments are cut.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = self.program.to_string_lossy().into_owned();
        for argument in &self.arguments {
            let argument = argument.to_string_lossy();
            text.push(' ');
            text.extend(argument.chars().take(80));
        }
        text
    }

    /// Program and arguments.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let all = std::iter::once(&self.program).chain(&self.arguments);
        all.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    pub(crate) fn spawn(&self) -> Result<Child> {
        Command::new(&self.program)
            .args(&self.arguments)
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {}", self.describe()))
    }

    /// Starts it with empty stdin; its stdout is the caller's to read.
    pub fn stream(self) -> Result<Running> {
        let mut child = self.spawn()?;
        drop(child.stdin.take());
        let stderr = read_all(child.stderr.take());
        let stdout = child.stdout.take().context("the child has no stdout")?;
        Ok(Running {
            stdout,
            child,
            stderr,
            what: self.describe(),
            deadline: self.deadline,
        })
    }

    /// Runs it to its end, whatever its exit code.
    pub fn finish(self) -> Result<Finished> {
        let started = Instant::now();
        let mut child = self.spawn()?;
        let group = child.id();
        let (mut stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let input = self.stdin.clone();
        thread::spawn(move || {
            if let Some(stdin) = stdin.as_mut() {
                let _ = stdin.write_all(&input);
            }
        });
        let stdout = read_all(stdout);
        let stderr = read_all(stderr);
        let Some(status) = wait_within(&mut child, self.deadline)? else {
            signals::kill_group(group);
            let _ = child.wait();
            let rest = Duration::from_secs(2);
            bail!(
                "{} did not end within {:?}; stdout: {:?}; stderr: {:?}",
                self.describe(),
                self.deadline,
                String::from_utf8_lossy(&stdout.recv_timeout(rest).unwrap_or_default()),
                String::from_utf8_lossy(&stderr.recv_timeout(rest).unwrap_or_default()),
            );
        };
        let took = started.elapsed();
        // A process that outlives the command may hold the pipes open; what arrived by then is what it printed.
        let rest = Duration::from_secs(20);
        let collect = |stream: mpsc::Receiver<Vec<u8>>, name: &str| {
            stream
                .recv_timeout(rest)
                .with_context(|| format!("{} ended, but its {name} stays open", self.describe()))
        };
        let (stdout, stderr) = (collect(stdout, "stdout")?, collect(stderr, "stderr")?);
        Ok(Finished {
            what: self.describe(),
            code: code(status),
            stdout,
            stderr,
            took,
        })
    }

    /// Runs it to its end; an exit code other than 0 is an error with what it printed.
    pub fn succeed(self) -> Result<Finished> {
        self.finish()?.expect_code(0)
    }
}

impl Finished {
    /// Stdout as text.
    #[must_use]
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Stderr as text.
    #[must_use]
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Lines of stdout.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.out().lines().map(str::to_owned).collect()
    }

    /// An error with everything printed unless it ended with this code.
    pub fn expect_code(self, code: i32) -> Result<Self> {
        if self.code != code {
            let (out, err) = (tail(&self.out()), tail(&self.err()));
            bail!(
                "{} ended with {} instead of {code}\nstdout: {out}\nstderr: {err}",
                self.what,
                self.code
            );
        }
        Ok(self)
    }
}

/// A command that runs. Dropping it kills it with everything it started.
#[derive(Debug)]
pub struct Running {
    /// What it prints.
    pub stdout: ChildStdout,
    child: Child,
    stderr: mpsc::Receiver<Vec<u8>>,
    what: String,
    deadline: Duration,
}

impl Running {
    /// Waits for its end, once its stdout was read; exit code 0 is expected.
    pub fn succeed(mut self) -> Result<()> {
        let status = wait_within(&mut self.child, self.deadline)?;
        let status = status.with_context(|| format!("{} did not end", self.what))?;
        if !status.success() {
            let stderr = self.stderr.recv().unwrap_or_default();
            bail!(
                "{} ended with {status}: {}",
                self.what,
                tail(&String::from_utf8_lossy(&stderr))
            );
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            signals::kill_group(self.child.id());
            let _ = self.child.wait();
        }
    }
}

/// The last part of a long text.
pub(crate) fn tail(text: &str) -> String {
    let skip = text.chars().count().saturating_sub(4000);
    text.trim_end().chars().skip(skip).collect()
}

/// Exit code as a shell reports it.
pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Waits for a child; `None` when the time is up.
pub(crate) fn wait_within(child: &mut Child, deadline: Duration) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + deadline;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn read_all(stream: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        let _ = sender.send(bytes);
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_returns_code_and_both_streams() {
        let done = Invocation::new("sh")
            .args(["-c", "cat; echo err >&2; exit 3"])
            .stdin("in")
            .finish()
            .unwrap();
        assert_eq!(
            (done.code, done.out().as_str(), done.err().as_str()),
            (3, "in", "err\n")
        );
        assert!(done.expect_code(0).unwrap_err().to_string().contains("ended with 3"));
    }

    #[test]
    fn a_hung_command_is_killed_with_its_children() {
        let slow = Invocation::new("sh")
            .args(["-c", "echo begun; sleep 1000 & wait"])
            .deadline(Duration::from_millis(300));
        let error = slow.finish().unwrap_err().to_string();
        assert!(error.contains("did not end") && error.contains("begun"), "{error}");
    }
}
