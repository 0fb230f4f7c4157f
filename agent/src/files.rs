//! Sends what a container wrote to its root filesystem: the upper directory of its overlay, with the marks of what it removed.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{major, minor};
use nix::unistd::{Whence, lseek};
use protocol::tree::{self, Entry, Kind};

/// Most directories below each other; each holds a descriptor.
const MAX_DEPTH: usize = 256;

/// Marks a directory that hides all of the lower one.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// Sends the tree below `root` and closes the connection. The container may go on writing meanwhile: what is gone when its turn comes is
/// left out.
///
/// # Errors
/// When the peer is gone, or something cannot be read or described.
pub fn send(root: &Path, connection: OwnedFd) -> io::Result<()> {
    send_to(root, &mut BufWriter::with_capacity(64 << 10, File::from(connection)))
}

fn send_to(root: &Path, out: &mut impl Write) -> io::Result<()> {
    let mut sender = Sender {
        out,
        sent: HashMap::new(),
        buffer: vec![0; tree::MAX_PIECE],
    };
    sender.directory(&open(root, libc::O_DIRECTORY)?, &[], 0)?;
    tree::write_end(sender.out)
}

struct Sender<'a, W> {
    out: &'a mut W,
    /// Files with several names, by inode, and the first of these.
    sent: HashMap<u64, Vec<u8>>,
    buffer: Vec<u8>,
}

impl<W: Write> Sender<'_, W> {
    fn directory(&mut self, directory: &File, path: &[u8], depth: usize) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other(format!(
                "more than {MAX_DEPTH} directories below each other"
            )));
        }
        let metadata = directory.metadata()?;
        self.entry(path, Kind::Directory, &metadata, xattrs(directory)?)?;
        // Below the descriptor, so that nobody can put a symbolic link in the way.
        let below = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        for name in fs::read_dir(&below)? {
            let name = name?.file_name();
            match self.file(&below.join(&name), &join(path, &name), depth) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
        Ok(())
    }

    fn file(&mut self, at: &Path, path: &[u8], depth: usize) -> io::Result<()> {
        let metadata = at.symlink_metadata()?;
        let kind = metadata.file_type();
        let device = metadata.rdev();
        if kind.is_dir() {
            return self.directory(&open(at, libc::O_DIRECTORY)?, path, depth + 1);
        }
        if metadata.nlink() > 1 {
            if let Some(first) = self.sent.get(&metadata.ino()) {
                let to = first.clone();
                return self.entry(path, Kind::HardLink { to }, &metadata, Vec::new());
            }
            self.sent.insert(metadata.ino(), path.to_owned());
        }
        let kind = if kind.is_file() {
            return self.regular(&open(at, libc::O_NONBLOCK)?, path);
        } else if kind.is_symlink() {
            let to = fs::read_link(at)?.into_os_string().into_vec();
            Kind::SymbolicLink { to }
        } else if kind.is_char_device() {
            let (major, minor) = (major(device), minor(device));
            Kind::Character { major, minor }
        } else if kind.is_block_device() {
            let (major, minor) = (major(device), minor(device));
            Kind::Block { major, minor }
        } else if kind.is_fifo() {
            Kind::Fifo
        } else {
            // A socket means nothing without the process that listens.
            return Ok(());
        };
        self.entry(path, kind, &metadata, Vec::new())
    }

    fn regular(&mut self, file: &File, path: &[u8]) -> io::Result<()> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            // Replaced since it was listed.
            return Ok(());
        }
        let size = metadata.len();
        self.entry(path, Kind::File { size }, &metadata, xattrs(file)?)?;
        let mut file = file;
        let mut offset = 0;
        while let Some(start) = data_from(file, offset)?.filter(|start| *start < size) {
            let end = hole_from(file, start)?.min(size);
            file.seek(SeekFrom::Start(start))?;
            offset = start;
            while offset < end {
                let most = usize::try_from(end - offset)
                    .unwrap_or(usize::MAX)
                    .min(self.buffer.len());
                let piece = self.buffer.get_mut(..most).unwrap_or_default();
                let count = file.read(piece)?;
                if count == 0 {
                    return tree::write_end_of_file(self.out);
                }
                tree::write_piece(self.out, offset, piece.get(..count).unwrap_or_default())?;
                offset += count as u64;
            }
        }
        tree::write_end_of_file(self.out)
    }

    fn entry(
        &mut self,
        path: &[u8],
        kind: Kind,
        metadata: &Metadata,
        xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    ) -> io::Result<()> {
        let entry = Entry {
            path: path.to_owned(),
            kind,
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            modified: (metadata.mtime(), u32::try_from(metadata.mtime_nsec()).unwrap_or(0)),
            xattrs,
        };
        tree::write_entry(self.out, &entry)
    }
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    let opened = File::options()
        .read(true)
        .custom_flags(flags | libc::O_NOFOLLOW)
        .open(path);
    match opened {
        // Replaced by a link since it was listed; as good as gone.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => {
            Err(io::ErrorKind::NotFound.into())
        }
        opened => opened,
    }
}

fn join(path: &[u8], name: &OsStr) -> Vec<u8> {
    if path.is_empty() {
        return name.as_bytes().to_owned();
    }
    [path, b"/", name.as_bytes()].concat()
}

/// Where data begins at or after `offset`; `None`: only a hole follows.
fn data_from(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, offset, Whence::SeekData) {
        Err(Errno::ENXIO) => Ok(None),
        found => Ok(Some(found?)),
    }
}

/// Where the data at `offset` ends.
fn hole_from(file: &File, offset: u64) -> io::Result<u64> {
    Ok(seek(file, offset, Whence::SeekHole)?)
}

fn seek(file: &File, offset: u64, whence: Whence) -> nix::Result<u64> {
    let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
    let found = lseek(file, offset, whence)?;
    u64::try_from(found).map_err(|_| Errno::EOVERFLOW)
}

/// Extended attributes that belong to the file, and the mark of an opaque directory. What else overlayfs keeps there for itself is
/// true for this filesystem only.
fn xattrs(file: &File) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::flistxattr(file, names.as_mut_slice()) {
        Err(rustix::io::Errno::NOTSUP) => 0,
        listed => listed?,
    };
    names.truncate(length);
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(b"trusted.overlay.") && name != OPAQUE {
            if matches!(name, b"trusted.overlay.redirect" | b"trusted.overlay.metacopy") {
                return Err(io::Error::other(
                    "a directory or file is kept by reference to its image",
                ));
            }
            continue;
        }
        let mut value = vec![0; 64 << 10];
        let length = match rustix::fs::fgetxattr(file, name, value.as_mut_slice()) {
            // Removed since it was listed.
            Err(rustix::io::Errno::NODATA) => continue,
            got => got?,
        };
        value.truncate(length);
        found.push((name.to_owned(), value));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Offsets and bytes.
    type Pieces = Vec<(u64, Vec<u8>)>;

    /// Paths with kinds and data, in order of the stream.
    fn sent(root: &Path) -> Vec<(String, Kind, Pieces)> {
        let mut stream = Vec::new();
        send_to(root, &mut stream).expect("it can be sent");
        let mut input = stream.as_slice();
        let mut found = Vec::new();
        while let Some(entry) = tree::read_entry(&mut input).expect("an entry") {
            let mut pieces = Vec::new();
            if matches!(entry.kind, Kind::File { .. }) {
                let mut piece = Vec::new();
                while let Some(offset) = tree::read_piece(&mut input, &mut piece).expect("a piece") {
                    pieces.push((offset, piece.clone()));
                }
            }
            found.push((String::from_utf8_lossy(&entry.path).into_owned(), entry.kind, pieces));
        }
        found
    }

    #[test]
    fn every_kind_is_sent_and_links_are_not_followed() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("a/b")).expect("directories");
        fs::write(at("a/b/file"), "text").expect("a file");
        fs::hard_link(at("a/b/file"), at("a/b/other")).expect("a link");
        symlink("/etc/passwd", at("link")).expect("a symbolic link");
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRUSR).expect("a FIFO");
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
        let found = sent(root.path());
        let of = |path: &str| {
            found
                .iter()
                .find(|(name, ..)| name == path)
                .map(|(_, kind, _)| kind.clone())
        };
        assert_eq!(found.first().map(|(name, ..)| name.as_str()), Some(""));
        assert_eq!(of("a/b"), Some(Kind::Directory));
        assert_eq!(
            of("link"),
            Some(Kind::SymbolicLink {
                to: b"/etc/passwd".to_vec()
            })
        );
        assert_eq!((of("fifo"), of("socket")), (Some(Kind::Fifo), None));
        let links = found
            .iter()
            .filter(|(_, kind, _)| matches!(kind, Kind::HardLink { .. }))
            .count();
        let data: Vec<_> = found.iter().flat_map(|(.., pieces)| pieces.clone()).collect();
        assert_eq!((links, data), (1, vec![(0, b"text".to_vec())]));
    }

    #[test]
    fn holes_are_left_out() {
        let root = tempfile::tempdir().expect("a directory");
        let file = File::create(root.path().join("sparse")).expect("a file");
        file.set_len(64 << 20).expect("it has room");
        std::os::unix::fs::FileExt::write_all_at(&file, b"end", (64 << 20) - 3).expect("it can be written");
        let found = sent(root.path());
        let bytes: usize = found
            .iter()
            .flat_map(|(.., pieces)| pieces)
            .map(|(_, bytes)| bytes.len())
            .sum();
        assert!((3..1 << 20).contains(&bytes), "{bytes}");
    }
}
