//! A command that one talks to: lines in, lines out, each output stamped with the time it arrived.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{Invocation, code, tail, wait_within};
use crate::signals;

/// A running command with open stdin. Dropping it kills it and its process group.
pub struct Session {
    what: String,
    child: Child,
    stdin: Option<ChildStdin>,
    chunks: mpsc::Receiver<Vec<u8>>,
    pending: Vec<u8>,
    stderr: Arc<Mutex<Vec<u8>>>,
    started: Instant,
    first_byte: Arc<OnceLock<Instant>>,
}

impl Session {
    /// Starts it.
    pub fn start(invocation: &Invocation) -> Result<Self> {
        let started = Instant::now();
        let mut child = invocation.spawn()?;
        let first_byte = Arc::new(OnceLock::new());
        let (sender, chunks) = mpsc::channel();
        if let Some(mut stdout) = child.stdout.take() {
            let first_byte = Arc::clone(&first_byte);
            thread::spawn(move || {
                let mut buffer = [0; 65536];
                while let Ok(count @ 1..) = stdout.read(&mut buffer) {
                    let _ = first_byte.set(Instant::now());
                    if sender.send(buffer[..count].to_vec()).is_err() {
                        break;
                    }
                }
            });
        }
        let stderr = Arc::new(Mutex::new(Vec::new()));
        if let Some(mut stream) = child.stderr.take() {
            let stderr = Arc::clone(&stderr);
            thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    if let Ok(mut all) = stderr.lock() {
                        all.extend_from_slice(&buffer[..count]);
                    }
                }
            });
        }
        let stdin = child.stdin.take();
        let what = invocation.describe();
        Ok(Self {
            what,
            child,
            stdin,
            chunks,
            pending: Vec::new(),
            stderr,
            started,
            first_byte,
        })
    }

    /// Process id of the command.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// From the start of the command to the first byte on its stdout.
    #[must_use]
    pub fn first_byte_after(&self) -> Option<Duration> {
        self.first_byte.get().map(|at| at.duration_since(self.started))
    }

    /// What it printed on stderr so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.stderr
            .lock()
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Writes a line to its stdin.
    pub fn send(&mut self, line: &str) -> Result<()> {
        let stdin = self
            .stdin
            .as_mut()
            .with_context(|| format!("{}: stdin is closed", self.what))?;
        stdin
            .write_all(format!("{line}\n").as_bytes())
            .with_context(|| format!("writing to {}", self.what))
    }

    /// Closes its stdin.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// The next line of its stdout, without the newline.
    pub fn line(&mut self, deadline: Duration) -> Result<String> {
        let end = Instant::now() + deadline;
        loop {
            if let Some(length) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=length).collect();
                return Ok(String::from_utf8_lossy(&line[..length]).into_owned());
            }
            match self.chunks.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(chunk) => self.pending.extend(chunk),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    bail!("{}: no line within {deadline:?}; {}", self.what, self.said())
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => bail!("{}: its stdout ended; {}", self.what, self.said()),
            }
        }
    }

    /// Whatever else it prints until its stdout ends.
    pub fn rest(&mut self, deadline: Duration) -> Result<String> {
        let end = Instant::now() + deadline;
        loop {
            match self.chunks.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(chunk) => self.pending.extend(chunk),
                Err(mpsc::RecvTimeoutError::Timeout) => bail!("{}: stdout still open after {deadline:?}", self.what),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned())
    }

    /// Waits for its end; its exit code.
    pub fn wait(&mut self, deadline: Duration) -> Result<i32> {
        match wait_within(&mut self.child, deadline)? {
            Some(status) => Ok(code(status)),
            None => bail!("{} did not end within {deadline:?}; {}", self.what, self.said()),
        }
    }

    fn said(&self) -> String {
        format!(
            "unread: {:?}; stderr: {:?}",
            tail(&String::from_utf8_lossy(&self.pending)),
            tail(&self.stderr())
        )
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signals::kill_group(self.child.id());
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_in_and_come_out() {
        let limit = Duration::from_secs(10);
        let mut session =
            Session::start(&Invocation::new("sh").args(["-c", "read x; echo got $x; cat; exit 4"])).unwrap();
        session.send("one").unwrap();
        assert_eq!(session.line(limit).unwrap(), "got one");
        assert!(session.first_byte_after().is_some());
        session.send("two").unwrap();
        session.close_stdin();
        assert_eq!(session.rest(limit).unwrap(), "two\n");
        assert_eq!(session.wait(limit).unwrap(), 4);
    }
}
