//! Files in a container's root filesystem, reached without trusting it: no symbolic link leads out of it.

use std::ffi::OsStr;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{Mode, fchmod, fstat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::error::{AgentError, Result};

/// Most directories created on the way to a file.
const MAX_DEPTH: usize = 64;

/// The root directory of a container.
#[derive(Debug)]
pub struct InRoot(OwnedFd);

impl InRoot {
    /// Opens it by a path of ours, which is trusted.
    ///
    /// # Errors
    /// When it is no directory.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        open(path, flags, Mode::empty())
            .map(Self)
            .map_err(|error| AgentError::io(format!("open root directory {}", path.display()), error))
    }

    /// Whether `path` is a regular file.
    pub fn is_file(&self, path: &Path) -> bool {
        let found = self.resolve(path, OFlag::O_PATH).and_then(|fd| fstat(&fd));
        found.is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
    }

    /// Makes a directory and those above it that are missing, with mode 0755.
    ///
    /// # Errors
    /// When something else is in the way.
    pub fn make_directories(&self, path: &Path) -> Result<()> {
        self.directory(path)
            .map(drop)
            .map_err(|error| failed("make directory", path, error))
    }

    /// Puts a regular file in the place of whatever had the name, unless that is a directory.
    ///
    /// # Errors
    /// When it cannot be written; `EROFS` is [`AgentError::Io`] like all others.
    pub fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<()> {
        self.replace(path, content, mode)
            .map_err(|error| failed("write", path, error))
    }

    fn replace(&self, path: &Path, content: &[u8], mode: u32) -> nix::Result<()> {
        let name = path.file_name().ok_or(Errno::EINVAL)?;
        let parent = self.directory(path.parent().unwrap_or(Path::new("/")))?;
        match unlinkat(&parent, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = openat(&parent, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
        fchmod(&fd, Mode::from_bits_truncate(mode & 0o7777))?;
        std::fs::File::from(fd)
            .write_all(content)
            .map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }

    /// Opens a directory, making what is missing.
    fn directory(&self, path: &Path) -> nix::Result<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let names = names(path)?;
        let mut reached = std::path::PathBuf::from("/");
        let mut current = self.resolve(&reached, flags)?;
        for name in names {
            reached.push(name);
            current = match self.resolve(&reached, flags) {
                Err(Errno::ENOENT) => {
                    match mkdirat(&current, name, Mode::from_bits_truncate(0o755)) {
                        // EEXIST: a link that leads nowhere; resolving it again says so.
                        Ok(()) | Err(Errno::EEXIST) => {}
                        Err(error) => return Err(error),
                    }
                    self.resolve(&reached, flags)?
                }
                found => found?,
            };
        }
        Ok(current)
    }

    fn resolve(&self, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        openat2(&self.0, path, how)
    }
}

/// The names in an absolute path, without `..`.
fn names(path: &Path) -> nix::Result<Vec<&OsStr>> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(Errno::EINVAL),
        }
    }
    if names.len() > MAX_DEPTH {
        Err(Errno::ENAMETOOLONG)
    } else {
        Ok(names)
    }
}

fn failed(what: &str, path: &Path, error: Errno) -> AgentError {
    AgentError::io(format!("{what} {} in the container", path.display()), error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn root() -> (tempfile::TempDir, std::path::PathBuf, InRoot) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("root");
        fs::create_dir(&path).expect("a directory");
        let root = InRoot::open(&path).expect("it exists");
        (directory, path, root)
    }

    #[test]
    fn files_are_written_with_their_directories_and_mode() {
        let (_directory, path, root) = root();
        root.write(Path::new("/run/ramet/fork.json"), b"{}", 0o640)
            .expect("nothing is in the way");
        root.write(Path::new("/run/ramet/fork.json"), b"{1}", 0o644)
            .expect("it is replaced");
        let file = path.join("run/ramet/fork.json");
        assert_eq!(fs::read(&file).expect("a file"), b"{1}");
        assert_eq!(fs::metadata(&file).expect("a file").mode() & 0o7777, 0o644);
    }

    #[test]
    fn links_never_lead_out() {
        let (directory, path, root) = root();
        let outside = directory.path().join("outside");
        fs::create_dir(&outside).expect("a directory");
        fs::write(directory.path().join("target"), "untouched").expect("a file");
        symlink(&outside, path.join("absolute")).expect("a link");
        symlink("../outside", path.join("relative")).expect("a link");
        fs::create_dir(path.join("etc")).expect("a directory");
        symlink("../../target", path.join("etc/resolv.conf")).expect("a link");

        assert!(root.write(Path::new("/absolute/x"), b"", 0o644).is_err());
        let _ = root.write(Path::new("/relative/x"), b"", 0o644);
        assert_eq!(fs::read_dir(&outside).expect("a directory").count(), 0);
        root.write(Path::new("/etc/resolv.conf"), b"nameserver", 0o644)
            .expect("the link is replaced");
        assert_eq!(fs::read(directory.path().join("target")).expect("a file"), b"untouched");
        assert!(root.write(Path::new("/etc/../../x"), b"", 0o644).is_err());
    }

    #[test]
    fn links_inside_are_followed() {
        let (_directory, path, root) = root();
        fs::create_dir(path.join("real")).expect("a directory");
        symlink("/real", path.join("link")).expect("a link");
        root.write(Path::new("/link/file"), b"x", 0o600)
            .expect("it stays inside");
        assert!(path.join("real/file").exists());
        assert!(root.is_file(Path::new("/link/file")));
        assert!(!root.is_file(Path::new("/real")));
        assert!(!root.is_file(Path::new("/nothing")));
    }
}
