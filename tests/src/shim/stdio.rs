//! A client's ends of standard streams.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Streams as requests name them; empty for none.
#[derive(Clone, Debug, Default)]
pub struct Stdio {
    /// FIFO for input.
    pub stdin: PathBuf,
    /// FIFO for output.
    pub stdout: PathBuf,
    /// FIFO for errors.
    pub stderr: PathBuf,
    /// Whether the process gets a terminal.
    pub terminal: bool,
}

impl Stdio {
    pub(super) fn text(path: &Path) -> String {
        path.display().to_string()
    }
}

/// The lines that come out of a FIFO. Its end is closed soon after this was dropped: at the next line.
pub struct Lines(mpsc::Receiver<String>);

impl Lines {
    /// Begins to read; the writer may come later.
    #[must_use]
    pub fn of(fifo: &Path) -> Self {
        let (sender, lines) = mpsc::channel();
        let fifo = fifo.to_owned();
        thread::spawn(move || {
            let Ok(file) = File::open(fifo) else { return };
            for line in BufReader::new(file).lines().map_while(Result::ok) {
                if sender.send(line.trim_end().to_owned()).is_err() {
                    return;
                }
            }
        });
        Self(lines)
    }

    /// The next line; an error at the end, or if none comes.
    pub fn next(&self) -> Result<String> {
        self.0.recv_timeout(Duration::from_secs(60)).context("no line came")
    }

    /// Waits for the end, before which nothing may come.
    pub fn expect_end(&self) -> Result<()> {
        match self.0.recv_timeout(Duration::from_secs(60)) {
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(()),
            Err(mpsc::RecvTimeoutError::Timeout) => bail!("the stream does not end"),
            Ok(line) => bail!("one more line: {line:?}"),
        }
    }
}
