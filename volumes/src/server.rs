//! The process that serves volumes.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::control::{Answer, Attach, Config, VolumeError, receive};
use crate::handler::Share;
use crate::jail;
use crate::session::Session;

/// Threads for each stream: as many calls may wait for the host's disks at once.
const THREADS: usize = 4;

/// Serves until the control socket is closed, and closes every other descriptor that the process was given.
///
/// # Errors
/// The first packet is none, or the trees cannot be shared.
pub fn run(control: OwnedFd) -> Result<(), VolumeError> {
    crate::sys::close_all_but(&control).map_err(VolumeError::Io)?;
    // What the default one does beyond writing a message, the filter does not know.
    std::panic::set_hook(Box::new(|_| {}));
    let Some((config, _)) = receive::<Config>(&control)? else {
        return Ok(());
    };
    let shares = match jail::enter(&config) {
        Ok(shares) => shares,
        Err(error) => {
            answer(&control, Some(error.to_string()))?;
            return Err(VolumeError::Refused(error.to_string()));
        }
    };
    answer(&control, None)?;
    while let Some((attach, fds)) = receive::<Attach>(&control)? {
        let error = start(&shares, attach, fds).err();
        answer(&control, error)?;
    }
    Ok(())
}

/// Each stream begins anew: what the guest knew of the volume before, say before a checkpoint, ended with the stream of then.
fn start(shares: &[Share], attach: Attach, mut fds: Vec<OwnedFd>) -> Result<(), String> {
    let share = shares.get(attach.volume).ok_or("there is no such volume")?;
    let stream = fds.pop().ok_or("no stream came with the request")?;
    share
        .open()
        .and_then(|handler| Session::new(handler, UnixStream::from(stream)))
        .and_then(|session| session.start(THREADS))
        .map_err(|error| format!("start to serve a volume: {error}"))
}

fn answer(control: &OwnedFd, error: Option<String>) -> Result<(), VolumeError> {
    let bytes = serde_json::to_vec(&Answer { error })?;
    crate::sys::send(control, &bytes, &[]).map_err(VolumeError::Io)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    use fuse_backend_rs::abi::fuse_abi::Opcode;

    use super::*;
    use crate::testing::{is_held, message};

    #[test]
    fn nothing_is_held_for_a_stream_that_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "").unwrap();
        let shares = [Share::at(directory.path(), false)];
        let (mut guest, host) = UnixStream::pair().unwrap();
        start(&shares, Attach { volume: 0 }, vec![host.into()]).unwrap();
        guest.write_all(&message(Opcode::Lookup, 1, (0, 0), b"file\0")).unwrap();
        let mut reply = [0; 144];
        guest.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
        assert!(is_held(&path));
        drop(guest);
        let end = Instant::now() + Duration::from_secs(10);
        while is_held(&path) {
            assert!(Instant::now() < end, "the file is still held");
            std::thread::yield_now();
        }
        let (_guest, host) = UnixStream::pair().unwrap();
        start(&shares, Attach { volume: 0 }, vec![host.into()]).unwrap();
        assert!(start(&shares, Attach { volume: 1 }, Vec::new()).is_err());
    }
}
