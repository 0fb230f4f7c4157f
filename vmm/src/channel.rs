//! The control socket: JSON packets with descriptors attached, over `SOCK_SEQPACKET`.
//!
//! Both ends use it: the shim with [`Channel::pair`], the VMM with the descriptor it was started with. Calls block; with a non-blocking
//! socket they return [`ChannelError::WouldBlock`], so an event loop can wait on [`AsFd`] and try again.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::control::{FdIndex, MAX_FDS, MAX_MESSAGE};
use crate::sys::fd::own;

/// What can go wrong on the control socket.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The socket is non-blocking and not ready.
    #[error("control socket is not ready")]
    WouldBlock,
    /// The operating system refused.
    #[error("{operation} on control socket")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A packet is larger than [`MAX_MESSAGE`] or carries more than [`MAX_FDS`] descriptors.
    #[error("control message exceeds {MAX_MESSAGE} bytes or {MAX_FDS} descriptors")]
    TooLarge,
    /// A packet does not parse.
    #[error("control message")]
    Json(#[from] serde_json::Error),
    /// A message names a descriptor that did not come with it, or names one twice.
    #[error("control message names descriptor {0}, which did not come with it")]
    MissingFd(FdIndex),
}

/// A packet that arrived.
#[derive(Debug)]
pub struct Received<T> {
    /// The message.
    pub message: T,
    /// Its descriptors (close-on-exec).
    pub fds: ReceivedFds,
}

/// The descriptors of one packet; each is taken at most once, the rest is closed.
#[derive(Debug, Default)]
pub struct ReceivedFds(Vec<Option<OwnedFd>>);

impl ReceivedFds {
    /// Takes the descriptor with this number.
    ///
    /// # Errors
    /// [`ChannelError::MissingFd`] if there is none (any more).
    pub fn take(&mut self, index: FdIndex) -> Result<OwnedFd, ChannelError> {
        self.0
            .get_mut(index)
            .and_then(Option::take)
            .ok_or(ChannelError::MissingFd(index))
    }

    /// How many came.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none came.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<OwnedFd>> for ReceivedFds {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }
}

/// One end of the control socket.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl From<OwnedFd> for Channel {
    fn from(socket: OwnedFd) -> Self {
        Self { socket }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Channel {
    /// Two connected ends, both close-on-exec and blocking. The second one goes to the VMM as [`crate::control::CONTROL_FD`].
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn pair() -> Result<(Self, OwnedFd), ChannelError> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(|e| io_error("socketpair", e))?;
        Ok((Self { socket: ours }, theirs))
    }

    /// Sends one packet.
    ///
    /// # Errors
    /// When it is too large or the peer is gone.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
            return Err(ChannelError::TooLarge);
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let attached = if raw.is_empty() { &[][..] } else { &rights[..] };
        loop {
            match sendmsg::<()>(
                self.socket.as_raw_fd(),
                &[IoSlice::new(&bytes)],
                attached,
                MsgFlags::MSG_NOSIGNAL,
                None,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(io_error("send", e)),
            }
        }
    }

    /// Receives one packet; `None` when the peer has closed.
    ///
    /// # Errors
    /// When it is too large, does not parse, or the socket is not ready and non-blocking.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Option<Received<T>>, ChannelError> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let mut space = nix::cmsg_space!([RawFd; MAX_FDS]);
        let (length, fds, truncated) = loop {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            match recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut parts,
                Some(&mut space),
                MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Ok(received) => {
                    let mut fds = Vec::new();
                    for part in received.cmsgs().map_err(|e| io_error("receive", e))? {
                        if let ControlMessageOwned::ScmRights(raw) = part {
                            fds.extend(raw.into_iter().map(own));
                        }
                    }
                    break (
                        received.bytes,
                        fds,
                        received.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC),
                    );
                }
                Err(Errno::EINTR) => {}
                Err(Errno::ECONNRESET) => return Ok(None),
                Err(e) => return Err(io_error("receive", e)),
            }
        };
        if truncated {
            return Err(ChannelError::TooLarge);
        }
        if length == 0 {
            return Ok(None);
        }
        let message = serde_json::from_slice(buffer.get(..length).unwrap_or_default())?;
        Ok(Some(Received {
            message,
            fds: fds.into(),
        }))
    }
}

fn io_error(operation: &'static str, errno: Errno) -> ChannelError {
    if errno == Errno::EAGAIN {
        ChannelError::WouldBlock
    } else {
        ChannelError::Io {
            operation,
            source: errno.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;
    use crate::control::{Event, Message, Request};

    #[test]
    fn packets_carry_descriptors_in_order() {
        let (ours, theirs) = Channel::pair().unwrap();
        let theirs = Channel::from(theirs);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello").unwrap();
        file.rewind().unwrap();
        ours.send(&Request::Connect { port: 1024, stream: 0 }, &[file.as_fd()])
            .unwrap();
        let mut received = theirs.receive::<Request>().unwrap().unwrap();
        assert!(matches!(received.message, Request::Connect { port: 1024, stream: 0 }));
        let mut text = String::new();
        File::from(received.fds.take(0).unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "hello");
        assert!(matches!(received.fds.take(0), Err(ChannelError::MissingFd(0))));
    }

    #[test]
    fn a_closed_peer_is_the_end() {
        let (ours, theirs) = Channel::pair().unwrap();
        drop(theirs);
        assert!(ours.receive::<Message>().unwrap().is_none());
        assert!(ours.send(&Request::Stop, &[]).is_err());
    }

    #[test]
    fn garbage_and_oversize_are_refused() {
        let (ours, theirs) = Channel::pair().unwrap();
        nix::sys::socket::send(theirs.as_raw_fd(), b"{\"event\":", MsgFlags::empty()).unwrap();
        assert!(matches!(ours.receive::<Message>(), Err(ChannelError::Json(_))));
        let large = Message::Event(Event::Exited(crate::control::ExitReason::Fault(
            "x".repeat(MAX_MESSAGE),
        )));
        assert!(matches!(ours.send(&large, &[]), Err(ChannelError::TooLarge)));
    }
}
