//! The Unix socket.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening socket that only root can connect to. Its file is removed when this is dropped, unless another process has replaced it.
pub struct Socket {
    listener: UnixListener,
    guard: SocketGuard,
}

/// Removes the socket's file when dropped.
pub struct SocketGuard {
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Binds the socket in place of one that nobody listens on any more.
    ///
    /// # Errors
    /// `AddrInUse` if somebody does, or if the file is no socket; others as from the system.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match fs::symlink_metadata(path) {
            Ok(meta) if !meta.file_type().is_socket() => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "a file that is no socket is in the way",
                ));
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens on it",
                ));
            }
            _ => {}
        }
        // A client sees either the dead socket or one with its final mode.
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let unfinished = PathBuf::from(name);
        match fs::remove_file(&unfinished) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(&unfinished)?;
        listener.set_nonblocking(true)?;
        fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o600))?;
        let inode = fs::symlink_metadata(&unfinished)?.ino();
        fs::rename(&unfinished, path)?;
        Ok(Self {
            listener,
            guard: SocketGuard {
                path: path.to_owned(),
                inode,
            },
        })
    }

    /// The listener, non-blocking, and what removes its file.
    #[must_use]
    pub fn into_parts(self) -> (UnixListener, SocketGuard) {
        (self.listener, self.guard)
    }
}

impl Drop for SocketGuard {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/s.sock");
        fs::create_dir(dir.path().join("run")).unwrap();
        drop(UnixListener::bind(&path).unwrap()); // its file stays
        let (listener, guard) = Socket::bind(&path).unwrap().into_parts();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        assert_eq!(
            Socket::bind(&path).map(drop).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
        drop(listener);
        let (_other, other_guard) = Socket::bind(&path).unwrap().into_parts();
        drop(guard);
        assert!(path.exists());
        drop(other_guard);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        fs::write(&path, "precious").unwrap();
        assert!(Socket::bind(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
