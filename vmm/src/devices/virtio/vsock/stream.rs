//! The host's end of a connection.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vm_memory::{ReadVolatile, VolatileMemoryError};

use super::super::queue::Segments;

/// Reads what there is straight into guest memory; 0 is the end.
pub(super) fn read(mut stream: &UnixStream, room: &Segments<'_>) -> Result<u32, ErrorKind> {
    let mut total = 0;
    for slice in room.slices() {
        match stream.read_volatile(&mut slice.clone()) {
            Ok(bytes) => {
                total += bytes;
                if bytes < slice.len() {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(VolatileMemoryError::IOError(error)) => return Err(error.kind()),
            Err(_) => return Err(ErrorKind::Other),
        }
    }
    u32::try_from(total).map_err(|_| ErrorKind::Other)
}

/// Whether no byte can go in either direction any more.
pub(super) fn is_closed(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let count = poll(&mut fds, PollTimeout::ZERO);
    count.is_ok()
        && fds[0]
            .revents()
            .is_some_and(|events| events.contains(PollFlags::POLLHUP))
}
