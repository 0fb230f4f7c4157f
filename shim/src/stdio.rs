//! containerd's side of the standard streams, and the copying between it and the guest.
//!
//! Opening never blocks. Output FIFOs are opened for reading and writing, so a client that goes away or comes later does not end
//! the process; they report their end when the guest's stream ends. The input FIFO is held open for writing by us, too, until
//! `CloseIO`, so that a client may detach and another attach.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use protocol::StreamKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;
use tracing::{debug, warn};

use crate::logger::{Inputs, Logger, LoggerError, Owner, is_logger};

/// Bytes moved at once.
const CHUNK: usize = 64 * 1024;
/// How long a logger may take to keep what it was given last.
const LOGGER: Duration = Duration::from_secs(10);

/// The streams as containerd names them: FIFO paths or URIs, empty for none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StdioPaths {
    /// Input.
    pub stdin: String,
    /// Output; with a terminal everything it prints.
    pub stdout: String,
    /// Errors; unused with a terminal.
    pub stderr: String,
    /// Whether the process has a terminal.
    pub terminal: bool,
}

/// Why a stream cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StdioError {
    /// An open failed.
    #[error("open {path} for {what}")]
    Open {
        /// Which stream.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// A URI we cannot serve.
    #[error("{what} {uri:?}: only FIFOs, file:// and, for output, binary:// are supported")]
    Scheme {
        /// Which stream.
        what: &'static str,
        /// As given.
        uri: String,
    },
    /// The logger that takes the output.
    #[error(transparent)]
    Logger(#[from] LoggerError),
    /// The guest's end.
    #[error("attach {what} of the guest process")]
    Attach {
        /// Which stream.
        what: &'static str,
        /// Why not.
        #[source]
        source: crate::streams::StreamError,
    },
}

/// Where a stream is on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Nowhere,
    Fifo(PathBuf),
    File(PathBuf),
}

fn place(what: &'static str, uri: &str) -> Result<Place, StdioError> {
    if uri.is_empty() {
        return Ok(Place::Nowhere);
    }
    let (scheme, path) = match uri.split_once("://") {
        Some((scheme, rest)) => (scheme, rest.split('?').next().unwrap_or_default()),
        None => ("", uri),
    };
    let path = PathBuf::from(path);
    let is_fifo = std::fs::metadata(&path).map(|m| m.file_type().is_fifo());
    match (scheme, is_fifo) {
        ("" | "fifo" | "file", Ok(true)) => Ok(Place::Fifo(path)),
        ("" | "fifo", Ok(false)) | ("file", _) => Ok(Place::File(path)),
        ("" | "fifo", Err(source)) => Err(StdioError::Open { what, path, source }),
        _ => Err(StdioError::Scheme {
            what,
            uri: uri.to_owned(),
        }),
    }
}

/// Where output goes.
#[derive(Debug)]
pub enum Sink {
    /// Thrown away.
    Nowhere,
    /// A client or a logger reads it.
    Pipe(pipe::Sender),
    /// Appended.
    File(File),
}

impl Sink {
    /// Opens a stream for output.
    ///
    /// # Errors
    /// See [`StdioError`].
    pub fn open(what: &'static str, uri: &str) -> Result<Self, StdioError> {
        match place(what, uri)? {
            Place::Nowhere => Ok(Self::Nowhere),
            Place::Fifo(path) => pipe::OpenOptions::new()
                .read_write(true)
                .open_sender(&path)
                .map(Self::Pipe)
                .map_err(|source| StdioError::Open { what, path, source }),
            Place::File(path) => Self::open_file(what, path),
        }
    }

    fn open_file(what: &'static str, path: PathBuf) -> Result<Self, StdioError> {
        if let Some(parent) = path.parent() {
            let _ = std::fs::create_dir_all(parent);
        }
        // Neither opening nor writing a device may hold up the event loop; a file knows no such waiting.
        File::options()
            .create(true)
            .append(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(&path)
            .map(Self::File)
            .map_err(|source| StdioError::Open { what, path, source })
    }

    async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Pipe(pipe) => pipe.write_all(bytes).await,
            Self::File(file) => file.write_all(bytes),
        }
    }
}

/// Where all output of a process goes.
#[derive(Debug)]
pub struct Sinks {
    /// Output; with a terminal everything it prints.
    pub stdout: Sink,
    /// Errors.
    pub stderr: Sink,
    /// The program behind both, if there is one.
    pub logger: Option<Logger>,
}

impl Sinks {
    /// Opens the streams for output. A logger named for stdout gets stderr, too.
    ///
    /// # Errors
    /// See [`StdioError`].
    pub async fn open(paths: &StdioPaths, owner: Owner<'_>) -> Result<Self, StdioError> {
        if is_logger(&paths.stdout) {
            let (logger, Inputs { stdout, stderr }) = Logger::start(&paths.stdout, owner).await?;
            return Ok(Self {
                stdout: Sink::Pipe(stdout),
                stderr: Sink::Pipe(stderr),
                logger: Some(logger),
            });
        }
        let stderr = if paths.terminal { "" } else { &paths.stderr };
        Ok(Self {
            stdout: Sink::open("stdout", &paths.stdout)?,
            stderr: Sink::open("stderr", stderr)?,
            logger: None,
        })
    }
}

/// Where input comes from.
#[derive(Debug)]
pub struct Source {
    fifo: pipe::Receiver,
    /// Keeps the FIFO from ending while clients come and go.
    hold: pipe::Sender,
}

impl Source {
    /// Opens a FIFO for input; `None` for no input at all.
    ///
    /// # Errors
    /// See [`StdioError`].
    pub fn open(uri: &str) -> Result<Option<Self>, StdioError> {
        let what = "stdin";
        match place(what, uri)? {
            Place::Nowhere => Ok(None),
            Place::File(path) => Err(StdioError::Scheme {
                what,
                uri: path.display().to_string(),
            }),
            Place::Fifo(path) => {
                let failed = |source| StdioError::Open {
                    what,
                    path: path.clone(),
                    source,
                };
                let fifo = pipe::OpenOptions::new().open_receiver(&path).map_err(failed)?;
                let hold = open_hold(&path).map_err(failed)?;
                Ok(Some(Self { fifo, hold }))
            }
        }
    }
}

fn open_hold(path: &Path) -> std::io::Result<pipe::Sender> {
    pipe::OpenOptions::new().open_sender(path)
}

/// The running copies of one process.
#[derive(Debug, Default)]
pub struct Copies {
    outputs: Mutex<Vec<JoinHandle<()>>>,
    input: Mutex<Option<JoinHandle<()>>>,
    hold: Mutex<Hold>,
    logger: Mutex<Option<Logger>>,
}

/// What keeps the input FIFO from ending.
#[derive(Debug, Default)]
enum Hold {
    /// Nothing is open yet.
    #[default]
    Waiting,
    /// Our own writing end.
    Held { _end: pipe::Sender },
    /// The client will send no more, maybe said before anything was open.
    Released,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Copies {
    /// Copies a guest stream to a sink until the stream ends.
    pub fn add_output(&self, kind: StreamKind, stream: UnixStream, sink: Sink) {
        locked(&self.outputs).push(tokio::spawn(copy_output(kind, stream, sink)));
    }

    /// Keeps the logger that reads what is copied, until it has read all.
    pub fn set_logger(&self, logger: Logger) {
        *locked(&self.logger) = Some(logger);
    }

    /// Copies a source to the guest's stdin until the source ends.
    pub fn set_input(&self, source: Source, stream: UnixStream) {
        let Source { fifo, hold } = source;
        let mut state = locked(&self.hold);
        if matches!(*state, Hold::Waiting) {
            *state = Hold::Held { _end: hold };
        }
        drop(state);
        *locked(&self.input) = Some(tokio::spawn(copy_input(fifo, stream)));
    }

    /// The client will send no more: what is in the FIFO still goes to the guest, then its stdin is closed.
    pub fn close_stdin(&self) {
        *locked(&self.hold) = Hold::Released;
    }

    /// Waits until all output has been delivered, at most `limit`; then gives up.
    pub async fn drain(&self, limit: Duration) {
        let outputs = std::mem::take(&mut *locked(&self.outputs));
        let deadline = tokio::time::Instant::now() + limit;
        for mut output in outputs {
            if tokio::time::timeout_at(deadline, &mut output).await.is_err() {
                warn!("output was not drained in time");
                output.abort();
            }
        }
        let logger = locked(&self.logger).take();
        if let Some(mut logger) = logger
            && tokio::time::timeout(LOGGER, logger.ended()).await.is_err()
        {
            warn!("the logger has not ended in time");
        }
        self.abort();
    }

    /// Ends all copies now.
    pub fn abort(&self) {
        *locked(&self.hold) = Hold::Released;
        if let Some(input) = locked(&self.input).take() {
            input.abort();
        }
        for output in locked(&self.outputs).drain(..) {
            output.abort();
        }
        drop(locked(&self.logger).take());
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.abort();
    }
}

async fn copy_output(kind: StreamKind, mut stream: UnixStream, mut sink: Sink) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let n = match stream.read(&mut buffer).await {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) => {
                debug!(?kind, %error, "stream ended");
                break;
            }
        };
        if let Err(error) = sink.write(buffer.get(..n).unwrap_or_default()).await {
            // The process must not block on a client that cannot take its output.
            warn!(?kind, %error, "output is thrown away from here on");
            sink = Sink::Nowhere;
        }
    }
}

async fn copy_input(mut fifo: pipe::Receiver, mut stream: UnixStream) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let n = match fifo.read(&mut buffer).await {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) => {
                warn!(%error, "read stdin");
                break;
            }
        };
        if let Err(error) = stream.write_all(buffer.get(..n).unwrap_or_default()).await {
            debug!(%error, "the process takes no more input");
            return;
        }
    }
    debug!("stdin ends");
    let _ = stream.shutdown().await;
    // The other direction carries nothing; wait for the guest to close so that nothing unread is reset away.
    while !matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use tokio::io::AsyncBufReadExt;

    fn fifo(dir: &tempfile::TempDir, name: &str) -> PathBuf {
        let path = dir.path().join(name);
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        path
    }

    #[tokio::test]
    async fn output_arrives_whole_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir, "out");
        let sink = Sink::open("stdout", path.to_str().unwrap()).unwrap();
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let copies = Copies::default();
        copies.add_output(StreamKind::Stdout, ours, sink);
        let reader = pipe::OpenOptions::new().open_receiver(&path).unwrap();
        let lines = 20_000;
        let writer = tokio::spawn(async move {
            for i in 0..lines {
                guest.write_all(format!("line {i}\n").as_bytes()).await.unwrap();
            }
        });
        let mut read = tokio::io::BufReader::new(reader).lines();
        let mut count = 0;
        while let Some(line) = read.next_line().await.unwrap() {
            assert_eq!(line, format!("line {count}"));
            count += 1;
        }
        assert_eq!(count, lines);
        writer.await.unwrap();
        copies.drain(Duration::from_secs(5)).await;
    }

    #[tokio::test]
    async fn input_ends_only_after_close() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir, "in");
        let source = Source::open(path.to_str().unwrap()).unwrap().unwrap();
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let copies = Copies::default();
        copies.set_input(source, ours);
        for text in ["one", "two"] {
            // Each client closes its end; the process goes on waiting.
            let mut client = pipe::OpenOptions::new().open_sender(&path).unwrap();
            client.write_all(text.as_bytes()).await.unwrap();
            drop(client);
            let mut got = [0; 3];
            guest.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, text.as_bytes());
        }
        let mut client = pipe::OpenOptions::new().open_sender(&path).unwrap();
        client.write_all(b"end").await.unwrap();
        copies.close_stdin();
        drop(client);
        let mut rest = Vec::new();
        guest.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"end");
    }

    #[tokio::test]
    async fn a_close_that_comes_before_the_open_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir, "in");
        let source = Source::open(path.to_str().unwrap()).unwrap().unwrap();
        let mut client = pipe::OpenOptions::new().open_sender(&path).unwrap();
        client.write_all(b"all").await.unwrap();
        drop(client);
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let copies = Copies::default();
        copies.close_stdin();
        copies.set_input(source, ours);
        let mut got = Vec::new();
        guest.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"all");
    }

    #[tokio::test]
    async fn files_are_appended_and_unknown_schemes_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/log");
        let uri = format!("file://{}", path.display());
        for text in ["a", "b"] {
            let (ours, mut guest) = UnixStream::pair().unwrap();
            let copies = Copies::default();
            copies.add_output(StreamKind::Stdout, ours, Sink::open("stdout", &uri).unwrap());
            guest.write_all(text.as_bytes()).await.unwrap();
            drop(guest);
            copies.drain(Duration::from_secs(5)).await;
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"ab");
        assert!(matches!(
            Sink::open("stdout", "tcp://host:1"),
            Err(StdioError::Scheme { .. })
        ));
    }

    #[tokio::test]
    async fn a_fifo_is_one_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir, "what?");
        // As a file it would be waited for.
        for uri in [
            path.display().to_string(),
            format!("file://{}", fifo(&dir, "out").display()),
        ] {
            assert!(matches!(Sink::open("stdout", &uri), Ok(Sink::Pipe(_))), "{uri}");
        }
    }

    #[tokio::test]
    async fn a_logger_that_died_does_not_hold_the_process_up() {
        let owner = Owner {
            namespace: "n",
            id: "c",
        };
        let paths = StdioPaths {
            stdout: "binary:///bin/true".into(),
            stderr: "binary:///bin/true".into(),
            ..Default::default()
        };
        let sinks = Sinks::open(&paths, owner).await.unwrap();
        let copies = Copies::default();
        copies.set_logger(sinks.logger.unwrap());
        let (ours, mut guest) = UnixStream::pair().unwrap();
        copies.add_output(StreamKind::Stdout, ours, sinks.stdout);
        let all = async {
            for _ in 0..100 {
                guest.write_all(&[b'x'; 10_000]).await.unwrap();
            }
            drop(guest);
            copies.drain(Duration::from_secs(5)).await;
        };
        tokio::time::timeout(Duration::from_secs(10), all).await.unwrap();
    }

    #[tokio::test]
    async fn a_reader_that_died_may_be_followed_by_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir, "out");
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let copies = Copies::default();
        copies.add_output(
            StreamKind::Stdout,
            ours,
            Sink::open("stdout", path.to_str().unwrap()).unwrap(),
        );
        for text in ["one", "two"] {
            let mut reader = pipe::OpenOptions::new().open_receiver(&path).unwrap();
            guest.write_all(text.as_bytes()).await.unwrap();
            let mut got = [0; 3];
            reader.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, text.as_bytes());
        }
    }
}
