//! Entering a network namespace.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::sched::{CloneFlags, setns};

use super::NetError;

/// Opens a namespace, to hand it to a child.
///
/// # Errors
/// There is none.
pub fn open(path: &Path) -> Result<OwnedFd, NetError> {
    // A FIFO in its place must not hold us up.
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    options.open(path).map(OwnedFd::from).map_err(enter(path))
}

fn enter(path: &Path) -> impl FnOnce(io::Error) -> NetError {
    let path = path.to_owned();
    move |source| NetError::Enter { path, source }
}

/// Whether it is the one that this process lives in.
#[must_use]
pub fn is_ours(path: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let named = identity(path);
    named.is_some() && named == identity(Path::new("/proc/self/ns/net"))
}

/// Does `work` in a network namespace, on a thread of its own: no other thread of the shim ever leaves the host's.
///
/// # Errors
/// The namespace cannot be entered.
pub fn within<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
    let namespace = open(path)?;
    let done = std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            Ok::<T, io::Error>(work())
        });
        inside
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    });
    done.map_err(enter(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_namespace_is_named() {
        for path in ["/nonexistent/ns", "/dev/null"] {
            let error = within(Path::new(path), || ()).unwrap_err().to_string();
            assert!(error.contains(path), "{error}");
        }
    }
}
