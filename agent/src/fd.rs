//! Descriptors in the runtime: one type for pipes, terminals and sockets, and the two kinds of listener.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, SockaddrLike, UnixAddr, VsockAddr, accept4, bind, connect,
    listen, shutdown, socket,
};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Between two attempts to accept when descriptors or memory are short.
const ROOM_POLL: Duration = Duration::from_millis(100);

/// A non-blocking descriptor.
#[derive(Debug)]
pub struct Fd(AsyncFd<OwnedFd>);

impl Fd {
    /// Makes the descriptor non-blocking and registers it.
    ///
    /// # Errors
    /// When it cannot be polled.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self(crate::sys::register(fd)?))
    }

    /// Reads what is there, waiting for at least one byte; 0 is the end. May be cancelled without loss.
    ///
    /// # Errors
    /// As read(2).
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut guard = self.0.readable().await?;
            if let Ok(result) = guard.try_io(|fd| Ok(nix::unistd::read(fd.get_ref(), buffer)?)) {
                return result;
            }
        }
    }

    /// Reads without waiting; `None` when nothing is there.
    ///
    /// # Errors
    /// As read(2).
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match nix::unistd::read(self.0.get_ref(), buffer) {
            Ok(count) => Ok(Some(count)),
            Err(nix::Error::EAGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes some of the bytes, waiting for room. May be cancelled without loss.
    ///
    /// # Errors
    /// As write(2).
    pub async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let mut guard = self.0.writable().await?;
            if let Ok(result) = guard.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), bytes)?)) {
                return result;
            }
        }
    }

    /// Writes all of the bytes.
    ///
    /// # Errors
    /// As write(2).
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = self.write(bytes).await?;
            bytes = bytes.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Gives the descriptor back, blocking, to be used by a thread.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn into_blocking(self) -> io::Result<OwnedFd> {
        let fd = self.0.into_inner();
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags & !OFlag::O_NONBLOCK))?;
        Ok(fd)
    }

    /// Tells the peer of a socket that nothing more will come.
    pub fn shutdown_write(&self) {
        // The peer may be gone already, which is as good.
        let _ = shutdown(self.0.get_ref().as_raw_fd(), Shutdown::Write);
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

impl AsyncRead for Fd {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            let unfilled = buffer.initialize_unfilled();
            if let Ok(result) = guard.try_io(|fd| Ok(nix::unistd::read(fd.get_ref(), unfilled)?)) {
                buffer.advance(result?);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Fd {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            if let Ok(result) = guard.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), bytes)?)) {
                return Poll::Ready(result);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shutdown_write();
        Poll::Ready(Ok(()))
    }
}

/// A socket that accepts connections.
#[derive(Debug)]
pub struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Listens on a vsock port, for any peer.
    ///
    /// # Errors
    /// When there is no vsock device or the port is taken.
    pub fn vsock(port: u32) -> io::Result<Self> {
        Self::bind(AddressFamily::Vsock, &VsockAddr::new(libc::VMADDR_CID_ANY, port))
    }

    /// Listens on a Unix socket; for tests without a VM.
    ///
    /// # Errors
    /// When the path cannot be bound.
    pub fn unix(path: &Path) -> io::Result<Self> {
        Self::bind(AddressFamily::Unix, &UnixAddr::new(path)?)
    }

    fn bind(family: AddressFamily, address: &dyn SockaddrLike) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(family, SockType::Stream, flags, None)?;
        bind(fd.as_raw_fd(), address)?;
        listen(&fd, Backlog::new(128)?)?;
        Ok(Self(crate::sys::register(fd)?))
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// As accept(2); a connection that ended before it was accepted is no error, and one for which there is no room is waited for.
    pub async fn accept(&self) -> io::Result<Fd> {
        loop {
            let mut guard = self.0.readable().await?;
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let accepted = guard.try_io(|fd| Ok(accept4(fd.get_ref().as_raw_fd(), flags)?));
            let registered = match accepted {
                Ok(accepted) => accepted.and_then(|raw| crate::sys::register(crate::sys::own(raw))),
                Err(_would_block) => continue,
            };
            match registered {
                Ok(connection) => return Ok(Fd(connection)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if passes(&error) => {
                    tracing::warn!("accept a connection: {error}");
                    tokio::time::sleep(ROOM_POLL).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether others may give back what is missing.
fn passes(error: &io::Error) -> bool {
    let missing = error.raw_os_error();
    matches!(
        missing,
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS | libc::ENOSPC)
    )
}

/// Opens and closes a connection to a port of the host: that it arrives is the message.
///
/// # Errors
/// When the host refuses.
pub fn knock(port: u32) -> io::Result<OwnedFd> {
    let fd = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    connect(fd.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_HOST, port))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_does_not_end_the_agent() {
        for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::ENOSPC] {
            assert!(passes(&io::Error::from_raw_os_error(number)));
        }
        assert!(!passes(&io::Error::from_raw_os_error(libc::EBADF)));
        assert!(!passes(&io::Error::other("x")));
    }
}
