//! Detached mount trees: copied from what is mounted somewhere, restricted, and mounted elsewhere, also in another mount namespace.
//!
//! The calls behind this (`open_tree`, `mount_setattr`, `move_mount`; Linux 5.12) have no safe wrapper in the libraries that we use.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

#[expect(unsafe_code, reason = "three system calls without a safe wrapper")]
mod sys;

/// What may not be done through a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restrictions(u64);

impl Restrictions {
    /// Nothing can be changed.
    pub const READ_ONLY: Self = Self(libc::MOUNT_ATTR_RDONLY);
    /// Set-user-id bits and capabilities of programs do not count.
    pub const NO_SUID: Self = Self(libc::MOUNT_ATTR_NOSUID);
    /// Devices cannot be opened.
    pub const NO_DEVICES: Self = Self(libc::MOUNT_ATTR_NODEV);
    /// Programs cannot be run.
    pub const NO_EXEC: Self = Self(libc::MOUNT_ATTR_NOEXEC);
    /// Times of access are not kept.
    pub const NO_ACCESS_TIME: Self = Self(libc::MOUNT_ATTR_NOATIME);
    /// Nor those of directories.
    pub const NO_DIRECTORY_ACCESS_TIME: Self = Self(libc::MOUNT_ATTR_NODIRATIME);
    /// Symbolic links are not followed.
    pub const NO_SYMLINKS: Self = Self(libc::MOUNT_ATTR_NOSYMFOLLOW);

    /// These and those.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These without those.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// A tree of mounts that is nowhere mounted yet. It goes when this is dropped, unless it was mounted.
#[derive(Debug)]
pub struct Tree {
    fd: OwnedFd,
    recursive: bool,
}

impl Tree {
    /// A copy of what is mounted at `path`, links followed, with `path` as its root; with what is mounted below it if `recursive`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn copy(path: &Path, recursive: bool) -> io::Result<Self> {
        let fd = sys::open_tree(&c_path(path)?, recursive)?;
        Ok(Self { fd, recursive })
    }

    /// Restricts all of it.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn restrict(&self, restrictions: Restrictions) -> io::Result<()> {
        sys::set_attributes(&self.fd, self.recursive, restrictions.0, 0)
    }

    /// Mounts and unmounts at the original have no effect on it any more.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn make_private(&self) -> io::Result<()> {
        sys::set_attributes(&self.fd, self.recursive, 0, libc::MS_PRIVATE)
    }

    /// Mounts it at `target`, links followed, in the mount namespace of the calling thread.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn mount(&self, target: &Path) -> io::Result<()> {
        sys::move_mount(&self.fd, &c_path(target)?)
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    /// Runs in a mount namespace of a thread of its own; `None` where that is not allowed.
    fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).ok()?;
                let none: Option<&str> = None;
                let flags = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
                nix::mount::mount(none, "/", none, flags, none).ok()?;
                Some(work())
            });
            thread.join().unwrap()
        })
    }

    #[test]
    fn a_tree_is_mounted_where_a_link_leads_and_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["from", "to"] {
            fs::create_dir(path(name)).unwrap();
        }
        fs::write(path("from/file"), "content").unwrap();
        std::os::unix::fs::symlink(path("to"), path("link")).unwrap();
        let seen = apart(|| {
            let tree = Tree::copy(&path("from"), true).unwrap();
            tree.make_private().unwrap();
            let restrictions = Restrictions::READ_ONLY
                .with(Restrictions::NO_EXEC)
                .with(Restrictions::NO_ACCESS_TIME);
            tree.restrict(restrictions).unwrap();
            tree.mount(&path("link")).unwrap();
            let error = fs::write(path("to/file"), "x").unwrap_err();
            (fs::read_to_string(path("to/file")).unwrap(), error.raw_os_error())
        });
        let Some(seen) = seen else {
            eprintln!("skipped: mount namespaces need root");
            return;
        };
        assert_eq!(seen, ("content".to_owned(), Some(libc::EROFS)));
        assert!(fs::read_dir(path("to")).unwrap().next().is_none());
    }

    #[test]
    fn restrictions_add_up() {
        let both = Restrictions::READ_ONLY.with(Restrictions::NO_EXEC);
        assert_eq!(both.without(Restrictions::NO_EXEC), Restrictions::READ_ONLY);
        assert_eq!(both.without(Restrictions::NO_SUID), both);
    }
}
