//! The files of a container that runs in a virtual machine: they are on a disk that only its guest reads, so its shim is asked to bring
//! them into the snapshot directory. See the shim's `files` module.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use checkpoint::rootfs::FILES_SOCKET;

/// How long the shim may take: a little longer than it gives the guest.
const LIMIT: Duration = Duration::from_secs(660);
/// Longest answer, in bytes.
const MAX_ANSWER: u64 = 4096;

/// Has the files of a running container brought here. `false`: none runs.
///
/// # Errors
/// One runs, and its files cannot be had.
pub(crate) fn bring(snapshot: &Path) -> io::Result<bool> {
    let directory = File::open(snapshot)?;
    // Through a descriptor: the path may be longer than a socket's may be.
    let socket = format!("/proc/self/fd/{}/{FILES_SOCKET}", directory.as_raw_fd());
    let stream = match UnixStream::connect(socket) {
        // A shim that was killed leaves its socket.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(false);
        }
        connected => connected?,
    };
    stream.set_read_timeout(Some(LIMIT))?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer)?;
    match answer.trim_end() {
        "ok" => Ok(true),
        // The machine ended before it answered.
        "" => Ok(false),
        other => Err(io::Error::other(other.trim_start_matches("error: ").to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    #[test]
    fn the_answer_of_the_shim_decides() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!bring(dir.path()).unwrap(), "no socket");
        let listener = UnixListener::bind(dir.path().join(FILES_SOCKET)).unwrap();
        for (answer, brought) in [
            ("ok\n", Ok(true)),
            ("", Ok(false)),
            ("error: no room\n", Err("no room")),
        ] {
            thread::scope(|scope| {
                scope.spawn(|| listener.accept().unwrap().0.write_all(answer.as_bytes()).unwrap());
                let found = bring(dir.path()).map_err(|error| error.to_string());
                assert_eq!(
                    found.as_ref().map_err(String::as_str),
                    brought.as_ref().map_err(|why| *why)
                );
            });
        }
        drop(listener);
        assert!(!bring(dir.path()).unwrap(), "a dead shim");
    }
}
