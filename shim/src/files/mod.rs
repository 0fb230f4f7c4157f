//! The container's files for this host: `nerdctl commit`, `nerdctl cp` and `ctr snapshots diff` ask the snapshotter for mounts, and what
//! the container wrote is on a disk that only its guest reads.
//!
//! ```text
//! snapshotter ── connects to files.sock in the snapshot directory ──> shim ── vsock ──> agent
//!             <── "ok" or "error: …" ──        writes the tree below files/ <── the overlay's upper directory
//! ```
//!
//! The socket is there as long as the machine; `docs/decisions/0008`.

mod receive;

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::rootfs::{FILES_DIR, FILES_SOCKET};
use protocol::StreamKind;
use tokio::io::AsyncWriteExt;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use self::receive::{Limits, ReceiveError, receive};
use crate::error::chain;
use crate::guest::GuestProcess;
use crate::launch::blocking;
use crate::streams;
use crate::vm::Vm;

/// How long the guest may be silent.
const SILENCE: Duration = Duration::from_secs(30);
/// How long all of it may take.
const LIMIT: Duration = Duration::from_secs(600);
/// Most files that are taken from a guest: its disk has no more inodes.
const MAX_FILES: u64 = 4 << 20;
/// Where a tree grows until it is whole, beside [`FILES_DIR`].
const UNFINISHED: &str = "files.new";

/// What is served.
#[derive(Clone, Debug)]
pub struct Source {
    /// The snapshot directory.
    pub snapshot: PathBuf,
    /// Size of the writable disk, in bytes.
    pub disk_bytes: u64,
    /// The container's init.
    pub init: GuestProcess,
    /// Why nothing is served, if so.
    pub refusal: Option<&'static str>,
}

/// A socket that answers until this is dropped.
#[derive(Debug)]
pub struct Server {
    task: JoinHandle<()>,
    snapshot: PathBuf,
}

impl Server {
    /// Begins to serve.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(source: Source, vm: Arc<dyn Vm>) -> io::Result<Self> {
        clear(&source.snapshot);
        let listener = bind(&source.snapshot)?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let snapshot = source.snapshot.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = serve(&listener, &source, vm.as_ref()) => {}
                _ = vm.ended() => clear_socket(&source.snapshot),
            }
        });
        Ok(Self { task, snapshot })
    }

    /// Ends it, and removes what was brought here.
    pub async fn end(self) {
        self.task.abort();
        let snapshot = self.snapshot.clone();
        let cleared = blocking(move || {
            clear(&snapshot);
            Ok(())
        });
        if let Err(error) = cleared.await {
            warn!(error = error.text(), "files of the container");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        clear_socket(&self.snapshot);
    }
}

async fn serve(listener: &tokio::net::UnixListener, source: &Source, vm: &dyn Vm) {
    while let Ok((mut client, _)) = listener.accept().await {
        let answer = match bring(source, vm).await {
            Ok(()) => "ok\n".to_owned(),
            Err(why) => {
                warn!(why, "the files of the container were not brought here");
                format!("error: {}\n", why.replace('\n', " "))
            }
        };
        // Who asked may be gone.
        let _ = client.write_all(answer.as_bytes()).await;
    }
}

/// Brings the files here; the error is for people.
async fn bring(source: &Source, vm: &dyn Vm) -> Result<(), String> {
    if let Some(refusal) = source.refusal {
        return Err(refusal.to_owned());
    }
    let begun = Instant::now();
    let stream = streams::attach(vm, &source.init, StreamKind::Files)
        .await
        .map_err(|error| chain(&error))?;
    let stream = stream.into_std().map_err(|error| error.to_string())?;
    let (snapshot, limits) = (
        source.snapshot.clone(),
        Limits {
            bytes: source.disk_bytes,
            files: MAX_FILES,
            deadline: begun + LIMIT,
        },
    );
    blocking(move || Ok(take(&stream, &snapshot, limits)))
        .await
        .map_err(|error| error.text())?
        .map_err(|error| chain(&error))?;
    info!(took = ?begun.elapsed(), "the files of the container were brought here");
    Ok(())
}

fn take(stream: &std::os::unix::net::UnixStream, snapshot: &Path, limits: Limits) -> Result<(), ReceiveError> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(SILENCE))?;
    let (unfinished, whole) = (snapshot.join(UNFINISHED), snapshot.join(FILES_DIR));
    remove(&unfinished)?;
    fs::create_dir(&unfinished)?;
    let received = receive(&mut io::BufReader::with_capacity(64 << 10, stream), &unfinished, limits);
    if received.is_err() {
        remove(&unfinished)?;
        return received;
    }
    remove(&whole)?;
    Ok(fs::rename(&unfinished, &whole)?)
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Binds the socket through a descriptor: its path may be longer than a socket's may be.
fn bind(snapshot: &Path) -> io::Result<UnixListener> {
    let directory = fs::File::open(snapshot)?;
    UnixListener::bind(format!("/proc/self/fd/{}/{FILES_SOCKET}", directory.as_raw_fd()))
}

fn clear_socket(snapshot: &Path) {
    let _ = fs::remove_file(snapshot.join(FILES_SOCKET));
}

fn clear(snapshot: &Path) {
    clear_socket(snapshot);
    for name in [UNFINISHED, FILES_DIR] {
        if let Err(error) = remove(&snapshot.join(name)) {
            warn!(%error, name, "cannot remove the files of the container");
        }
    }
}
