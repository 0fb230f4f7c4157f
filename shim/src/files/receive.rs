//! Writes a tree that a guest sends into a directory of this host. The guest is not trusted: no path leads out of the directory, no
//! link is followed, and what is written is bounded.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, UtimensatFlags, fchmodat, makedev, mkdirat, mknodat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchownat, linkat, symlinkat};
use protocol::tree::{self, Entry, Kind};

/// Longest path, in bytes, and most directories below each other.
const MAX_PATH: usize = 4096;

/// What a guest may make this host do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of file data.
    pub(super) bytes: u64,
    /// Files of any kind.
    pub(super) files: u64,
    /// When to give up.
    pub(super) deadline: Instant,
}

/// Why a tree was not received.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReceiveError {
    /// The stream, or the directory itself.
    #[error("receive files")]
    Stream(#[from] io::Error),
    /// The guest broke the rules.
    #[error("the guest sends {0}")]
    Rule(&'static str),
    /// A file cannot be made.
    #[error("{action} {path:?}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, ReceiveError>;

/// Receives a whole tree into the empty directory `target`.
///
/// # Errors
/// See [`ReceiveError`]; what was written until then stays.
pub(super) fn receive(input: &mut impl Read, target: &Path, limits: Limits) -> Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = nix::fcntl::open(target, flags, Mode::empty()).map_err(io::Error::from)?;
    let mut receiver = Receiver {
        root,
        limits,
        open: Vec::new(),
        piece: Vec::new(),
    };
    while let Some(entry) = tree::read_entry(input)? {
        receiver.count(1, 0)?;
        receiver.leave(&entry.path)?;
        receiver.take(input, entry)?;
    }
    receiver.leave_all()
}

struct Receiver {
    root: OwnedFd,
    limits: Limits,
    /// Directories that more may come for, outermost first. They get their attributes last: what is made in them changes their times.
    open: Vec<Entry>,
    piece: Vec<u8>,
}

impl Receiver {
    fn count(&mut self, files: u64, bytes: u64) -> Result<()> {
        let left = |has: u64, takes: u64| {
            has.checked_sub(takes)
                .ok_or(ReceiveError::Rule("more than its disk can hold"))
        };
        self.limits.files = left(self.limits.files, files)?;
        self.limits.bytes = left(self.limits.bytes, bytes)?;
        if Instant::now() > self.limits.deadline {
            return Err(ReceiveError::Rule("its files for too long a time"));
        }
        Ok(())
    }

    fn take(&mut self, input: &mut impl Read, entry: Entry) -> Result<()> {
        if entry.path.is_empty() {
            if entry.kind != Kind::Directory || !self.open.is_empty() {
                return Err(ReceiveError::Rule("a root that is no directory"));
            }
            self.open.push(entry);
            return Ok(());
        }
        let (parent, name) = split(&entry.path)?;
        let parent = self
            .directory(parent)
            .map_err(failed("open the directory of", &entry))?;
        let parent = parent.as_fd();
        let private = Mode::S_IRWXU;
        let made = match &entry.kind {
            Kind::Directory => {
                mkdirat(parent, name, private).map_err(failed("make", &entry))?;
                self.open.push(entry);
                return Ok(());
            }
            Kind::File { size } => return self.file(input, parent, name, *size, &entry),
            Kind::HardLink { to } => {
                let (directory, file) = split(to)?;
                let directory = self.directory(directory).map_err(failed("link", &entry))?;
                return linkat(directory, file, parent, name, AtFlags::empty()).map_err(failed("link", &entry));
            }
            Kind::SymbolicLink { to } => symlinkat(bytes(to), parent, name),
            Kind::Character { major, minor } => mknodat(parent, name, SFlag::S_IFCHR, private, makedev(*major, *minor)),
            Kind::Block { major, minor } => mknodat(parent, name, SFlag::S_IFBLK, private, makedev(*major, *minor)),
            Kind::Fifo => mknodat(parent, name, SFlag::S_IFIFO, private, 0),
        };
        made.map_err(failed("make", &entry))?;
        self.finish(parent, name, &entry)
    }

    fn file(&mut self, input: &mut impl Read, parent: impl AsFd, name: &Path, size: u64, entry: &Entry) -> Result<()> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let private = Mode::S_IRUSR | Mode::S_IWUSR;
        let file = openat(parent.as_fd(), name, flags, private).map_err(failed("make", entry))?;
        let file = File::from(file);
        file.set_len(size).map_err(failed("set the size of", entry))?;
        let mut piece = std::mem::take(&mut self.piece);
        while let Some(offset) = tree::read_piece(input, &mut piece)? {
            let length = piece.len() as u64;
            self.count(0, length)?;
            if offset.checked_add(length).is_none_or(|end| end > size) {
                return Err(ReceiveError::Rule("data beyond the end of a file"));
            }
            file.write_all_at(&piece, offset).map_err(failed("write", entry))?;
        }
        self.piece = piece;
        self.finish(parent, name, entry)
    }

    /// Gives a file its attributes.
    fn finish(&self, parent: impl AsFd, name: &Path, entry: &Entry) -> Result<()> {
        let parent = parent.as_fd();
        let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        // A change of owner takes the set-id bits and capabilities away: first.
        fchownat(parent, name, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)
            .map_err(failed("give away", entry))?;
        if !matches!(entry.kind, Kind::SymbolicLink { .. }) {
            if !entry.xattrs.is_empty() {
                // Only a reference: to open a device that the guest names could already do something to this host.
                let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                let file = openat(parent, name, flags, Mode::empty()).map_err(failed("open", entry))?;
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                for (name, value) in &entry.xattrs {
                    match fate(name, &entry.kind) {
                        Fate::Set => {}
                        Fate::Drop => continue,
                        Fate::Refuse => return Err(ReceiveError::Rule("an attribute that is the host's own")),
                    }
                    rustix::fs::setxattr(&path, name.as_slice(), value, rustix::fs::XattrFlags::empty())
                        .map_err(failed("set an attribute of", entry))?;
                }
            }
            let mode = Mode::from_bits_truncate(entry.mode & 0o7777);
            // Nobody else has this directory, and what we made there is no link.
            fchmodat(parent, name, mode, FchmodatFlags::FollowSymlink).map_err(failed("set the mode of", entry))?;
        }
        let (seconds, nanoseconds) = entry.modified;
        let time = TimeSpec::new(seconds, nanoseconds.into());
        utimensat(parent, name, &time, &time, UtimensatFlags::NoFollowSymlink).map_err(failed("set the time of", entry))
    }

    /// Finishes the directories that an entry at `path` is not in.
    fn leave(&mut self, path: &[u8]) -> Result<()> {
        while let Some(last) = self.open.last() {
            let inside = path.strip_prefix(last.path.as_slice());
            if last.path.is_empty() || inside.is_some_and(|rest| rest.first() == Some(&b'/')) {
                return Ok(());
            }
            self.leave_last()?;
        }
        Ok(())
    }

    fn leave_all(&mut self) -> Result<()> {
        while !self.open.is_empty() {
            self.leave_last()?;
        }
        Ok(())
    }

    fn leave_last(&mut self) -> Result<()> {
        let Some(entry) = self.open.pop() else { return Ok(()) };
        if entry.path.is_empty() {
            return self.finish(&self.root, Path::new("."), &entry);
        }
        let (parent, name) = split(&entry.path)?;
        let parent = self
            .directory(parent)
            .map_err(failed("open the directory of", &entry))?;
        self.finish(parent, name, &entry)
    }

    /// A directory of the tree, through no link.
    fn directory(&self, path: &Path) -> nix::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
        loop {
            match openat2(&self.root, path, how) {
                // Something else on this host was renamed meanwhile.
                Err(Errno::EAGAIN) => {}
                opened => return opened,
            }
        }
    }
}

/// What becomes of an extended attribute that a guest sends.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Set,
    Drop,
    Refuse,
}

/// A layer carries what users and image builders set. `trusted` attributes direct the host's overlayfs (a redirect would show another
/// directory of the host's layers), and no agent of ours sends any but the mark of an opaque directory. The rest of `security` and
/// `system` is the policy of the machine that set it.
fn fate(name: &[u8], kind: &Kind) -> Fate {
    match name {
        b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default" => Fate::Set,
        b"trusted.overlay.opaque" if *kind == Kind::Directory => Fate::Set,
        _ if name.starts_with(b"user.") => Fate::Set,
        _ if name.starts_with(b"trusted.") => Fate::Refuse,
        _ => Fate::Drop,
    }
}

/// Directory and name of a path of the tree.
fn split(path: &[u8]) -> Result<(&Path, &Path)> {
    let plain = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && !name.contains(&0);
    if path.len() > MAX_PATH || !path.split(|byte| *byte == b'/').all(plain) {
        return Err(ReceiveError::Rule("a path that is none"));
    }
    let path = bytes(path);
    let name = path.file_name().ok_or(ReceiveError::Rule("a path that is none"))?;
    Ok((path.parent().unwrap_or(Path::new("")), Path::new(name)))
}

fn bytes(path: &[u8]) -> &Path {
    Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path))
}

fn failed<E: Into<io::Error>>(action: &'static str, entry: &Entry) -> impl FnOnce(E) -> ReceiveError {
    let path = bytes(&entry.path).to_owned();
    move |error| ReceiveError::File {
        action,
        path,
        source: error.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn entry(path: &str, kind: Kind) -> Entry {
        // Tests run as whoever: owners stay.
        let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        Entry {
            path: path.as_bytes().to_vec(),
            kind,
            mode: 0o755,
            uid,
            gid,
            modified: (1_000_000_000, 7),
            xattrs: Vec::new(),
        }
    }

    fn stream(entries: &[(Entry, &[u8])]) -> Vec<u8> {
        let mut stream = Vec::new();
        for (entry, data) in entries {
            tree::write_entry(&mut stream, entry).unwrap();
            if matches!(entry.kind, Kind::File { .. }) {
                if !data.is_empty() {
                    tree::write_piece(&mut stream, 2, data).unwrap();
                }
                tree::write_end_of_file(&mut stream).unwrap();
            }
        }
        tree::write_end(&mut stream).unwrap();
        stream
    }

    fn take(target: &Path, entries: &[(Entry, &[u8])]) -> Result<()> {
        let limits = Limits {
            bytes: 100,
            files: 10,
            deadline: Instant::now() + Duration::from_secs(60),
        };
        receive(&mut stream(entries).as_slice(), target, limits)
    }

    #[test]
    fn a_tree_arrives_with_its_attributes() {
        let target = tempfile::tempdir().unwrap();
        let mut setuid = entry("d/e/file", Kind::File { size: 9 });
        setuid.mode = 0o4711;
        let entries = [
            (entry("", Kind::Directory), &b""[..]),
            (entry("d", Kind::Directory), b""),
            (entry("d/e", Kind::Directory), b""),
            (setuid, b"text"),
            (
                entry(
                    "d/other",
                    Kind::HardLink {
                        to: b"d/e/file".to_vec(),
                    },
                ),
                b"",
            ),
            (entry("link", Kind::SymbolicLink { to: b"../x".to_vec() }), b""),
            (entry("fifo", Kind::Fifo), b""),
        ];
        take(target.path(), &entries).unwrap();
        let file = target.path().join("d/e/file");
        assert_eq!(fs::read(target.path().join("d/other")).unwrap(), b"\0\0text\0\0\0");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o4711);
        for name in ["", "d", "d/e", "d/e/file", "link", "fifo"] {
            let found = target.path().join(name).symlink_metadata().unwrap();
            assert_eq!((found.mtime(), found.mtime_nsec()), (1_000_000_000, 7), "{name}");
        }
    }

    #[test]
    fn nothing_leaves_the_directory() {
        let outside = tempfile::tempdir().unwrap();
        let link = Kind::SymbolicLink {
            to: outside.path().as_os_str().as_encoded_bytes().to_vec(),
        };
        let file = || Kind::File { size: 9 };
        for path in ["../x", "/x", "a/../../x", "a//x", "./x", "x/", "x\0", "link/x"] {
            let target = tempfile::tempdir().unwrap();
            let entries = [
                (entry("a", Kind::Directory), &b""[..]),
                (entry("link", link.clone()), b""),
                (entry(path, file()), b"text"),
            ];
            assert!(take(target.path(), &entries).is_err(), "{path}");
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{path}");
        }
        let target = tempfile::tempdir().unwrap();
        let through = entry(
            "stolen",
            Kind::HardLink {
                to: b"link/secret".to_vec(),
            },
        );
        assert!(take(target.path(), &[(entry("link", link.clone()), b""), (through, b"")]).is_err());
        // What is there already is not written through.
        let target = tempfile::tempdir().unwrap();
        symlink(outside.path().join("new"), target.path().join("file")).unwrap();
        assert!(take(target.path(), &[(entry("file", file()), b"text")]).is_err());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn attributes_that_direct_the_host_are_refused() {
        let (file, directory) = (Kind::File { size: 0 }, Kind::Directory);
        for name in ["user.colour", "security.capability", "system.posix_acl_access"] {
            assert_eq!(fate(name.as_bytes(), &file), Fate::Set, "{name}");
        }
        assert_eq!(fate(b"trusted.overlay.opaque", &directory), Fate::Set);
        for name in [
            "trusted.overlay.redirect",
            "trusted.overlay.metacopy",
            "trusted.overlay.opaque",
            "trusted.x",
        ] {
            assert_eq!(fate(name.as_bytes(), &file), Fate::Refuse, "{name}");
        }
        for name in ["security.selinux", "security.ima", "system.nfs4_acl", "", "users"] {
            assert_eq!(fate(name.as_bytes(), &file), Fate::Drop, "{name}");
        }
        let target = tempfile::tempdir().unwrap();
        let mut redirected = entry("d", Kind::Directory);
        redirected.xattrs = vec![(b"trusted.overlay.redirect".to_vec(), b"/etc".to_vec())];
        let refusal = take(target.path(), &[(redirected, b"")]).unwrap_err();
        assert!(refusal.to_string().contains("the host's own"), "{refusal}");
    }

    #[test]
    fn what_is_sent_is_bounded() {
        let told = |entries: &[(Entry, &[u8])]| {
            take(tempfile::tempdir().unwrap().path(), entries)
                .unwrap_err()
                .to_string()
        };
        let beyond = [(entry("f", Kind::File { size: 3 }), &b"text"[..])];
        assert!(told(&beyond).contains("beyond the end"));
        let big = [(entry("f", Kind::File { size: 500 }), &[1; 101][..])];
        assert!(told(&big).contains("more than its disk"));
        let many: Vec<_> = (0..11).map(|n| (entry(&n.to_string(), Kind::Fifo), &b""[..])).collect();
        assert!(told(&many).contains("more than its disk"));
        let target = tempfile::tempdir().unwrap();
        let limits = Limits {
            bytes: 1,
            files: 1,
            deadline: Instant::now(),
        };
        let cut = &stream(&[])[..2];
        assert!(
            receive(&mut &cut[..], target.path(), limits).is_err(),
            "a cut stream is no tree"
        );
    }

    proptest! {
        #[test]
        fn no_path_can_hurt(path in prop::collection::vec(any::<u8>(), 0..30)) {
            if let Ok((parent, name)) = split(&path) {
                prop_assert!(!parent.is_absolute() && name.components().count() == 1);
                prop_assert!(parent.components().all(|part| matches!(part, std::path::Component::Normal(_))));
            }
        }
    }
}
