//! Entering a network namespace.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::sched::{CloneFlags, setns};

use super::NetError;

/// Opens a namespace, to hand it to a child.
///
/// # Errors
/// There is none.
pub fn open(path: &Path) -> Result<OwnedFd, NetError> {
    let enter = |source| NetError::Enter {
        path: path.to_owned(),
        source,
    };
    File::open(path).map(OwnedFd::from).map_err(enter)
}

/// Does `work` in a network namespace, on a thread of its own: no other thread of the shim ever leaves the host's.
///
/// # Errors
/// The namespace cannot be entered.
pub fn within<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
    let enter = |source| NetError::Enter {
        path: path.to_owned(),
        source,
    };
    let namespace = File::open(path).map_err(enter)?;
    let done = std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            Ok::<T, io::Error>(work())
        });
        inside
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    });
    done.map_err(enter)
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
