//! A checkpoint directory as the tar layer of a checkpoint image, and back.
//!
//! The layer holds `.ramet/manifest.json` first, with [`CheckpointManifest::packed`] filled in, then each file of the checkpoint
//! in packed form under its own name. The same directory always gives the same bytes. Unpacked by any containerd, the files lie in `fs/.ramet` of the
//! committed snapshot, from where [`ensure_unpacked`] makes the checkpoint directory.

mod file;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::manifest::{CheckpointManifest, FILE_NAME, ManifestError, PackedFile};
use crate::rootfs::{CHECKPOINT_DIR, PACKED_DIR};

/// Name of the lock file beside the checkpoint directory.
const LOCK_FILE: &str = "checkpoint.lock";
/// Where files are unpacked before they get their final name.
const UNPACKING_DIR: &str = "checkpoint.unpacking";

/// Why packing or unpacking did not work.
#[derive(Debug, Error)]
pub enum PackError {
    /// The manifest.
    #[error("cannot use checkpoint manifest in {directory}")]
    Manifest {
        /// Where.
        directory: PathBuf,
        /// Why.
        #[source]
        source: ManifestError,
    },
    /// A file could not be read, written or made.
    #[error("cannot {action} {path}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Writing the tar stream.
    #[error("cannot write the layer of checkpoint {id}")]
    Tar {
        /// Which.
        id: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A packed file is not what it must be.
    #[error("checkpoint layer is damaged: {path} {problem}; pull or make the image again")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The snapshot has no checkpoint in it.
    #[error("snapshot directory {directory} holds no checkpoint")]
    NoCheckpoint {
        /// Where.
        directory: PathBuf,
    },
}

impl PackError {
    fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}

/// A packed checkpoint, waiting to be written as a tar stream. Its bytes are in unnamed temporary files, which vanish with it.
#[derive(Debug)]
pub struct PackedCheckpoint {
    /// With [`CheckpointManifest::packed`] filled in.
    pub manifest: CheckpointManifest,
    /// What is written as `manifest.json`: the JSON of [`Self::manifest`]. Tests that make hostile images put other bytes here.
    pub manifest_json: Vec<u8>,
    /// The packed bytes, in the order of `manifest.packed`.
    pub files: Vec<File>,
}

/// Packs the checkpoint in `directory`. Temporary space is taken in `directory` and needs no cleaning up. `progress` is told how many bytes
/// were done out of how many; holes in the files do not count.
///
/// # Errors
/// If the manifest is not valid, a file is missing, or there is no space.
pub fn pack(directory: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<PackedCheckpoint, PackError> {
    let in_manifest = |source| PackError::Manifest {
        directory: directory.to_owned(),
        source,
    };
    let mut manifest = CheckpointManifest::read(directory).map_err(in_manifest)?;
    manifest.packed.clear();

    let mut sources = Vec::new();
    for (name, _) in manifest.own_files() {
        let path = directory.join(&name);
        let source = open_regular(&path).map_err(PackError::file("read", &path))?;
        let chunks = file::DataChunks::of(&source).map_err(PackError::file("read", &path))?;
        sources.push((name, path, source, chunks));
    }
    let total = sources.iter().map(|(.., chunks)| chunks.bytes_to_read()).sum();
    let mut done = 0;
    let mut files = Vec::new();
    for (name, path, source, chunks) in sources {
        let mut out = unnamed_file(directory).map_err(PackError::file("make a temporary file in", directory))?;
        let mut count = |bytes| {
            done += bytes;
            progress(done, total);
        };
        let packed = file::pack(&source, &chunks, &mut out, &mut count).map_err(PackError::file("pack", &path))?;
        manifest.packed.push(PackedFile {
            name,
            bytes: chunks.file_bytes(),
            packed_bytes: packed.bytes,
            sha256: packed.sha256,
        });
        files.push(out);
    }
    let manifest_json = manifest.to_json().map_err(in_manifest)?;
    Ok(PackedCheckpoint {
        manifest,
        manifest_json,
        files,
    })
}

impl PackedCheckpoint {
    /// Bytes of the tar stream.
    #[must_use]
    pub fn tar_bytes(&self) -> u64 {
        const BLOCK: u64 = 512;
        let entry = |bytes: u64| BLOCK + bytes.next_multiple_of(BLOCK);
        let files: u64 = self.manifest.packed.iter().map(|file| entry(file.packed_bytes)).sum();
        BLOCK + entry(self.manifest_json.len() as u64) + files + 2 * BLOCK
    }

    /// Writes the tar stream: the same checkpoint gives the same bytes.
    ///
    /// # Errors
    /// If `out` does not take it.
    pub fn write_tar(&mut self, out: impl Write) -> Result<(), PackError> {
        let id = self.manifest.id.to_string();
        self.write_entries(out).map_err(|source| PackError::Tar { id, source })
    }

    fn write_entries(&mut self, out: impl Write) -> io::Result<()> {
        let mut tar = tar::Builder::new(out);
        let directory = format!("{PACKED_DIR}/");
        tar.append_data(&mut header(tar::EntryType::Directory, 0o700, 0), directory, io::empty())?;
        let name = format!("{PACKED_DIR}/{FILE_NAME}");
        let length = self.manifest_json.len() as u64;
        tar.append_data(
            &mut header(tar::EntryType::Regular, 0o600, length),
            name,
            self.manifest_json.as_slice(),
        )?;
        for (packed, file) in self.manifest.packed.iter().zip(&mut self.files) {
            file.seek(SeekFrom::Start(0))?;
            let name = format!("{PACKED_DIR}/{}", packed.name);
            tar.append_data(
                &mut header(tar::EntryType::Regular, 0o600, packed.packed_bytes),
                name,
                file,
            )?;
        }
        tar.into_inner()?.flush()
    }
}

fn header(kind: tar::EntryType, mode: u32, bytes: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(bytes);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

/// The bytes of `manifest.json` in the beginning of a checkpoint layer; `None` if it is not one, or starts later than `start` ends.
#[must_use]
pub fn manifest_in_tar(start: &[u8]) -> Option<&[u8]> {
    let name = Path::new(PACKED_DIR).join(FILE_NAME);
    let mut archive = tar::Archive::new(start);
    // The directory entry and the manifest; other tools may put a few of their own before them.
    for entry in archive.entries().ok()?.take(8) {
        let entry = entry.ok()?;
        if entry.path().is_ok_and(|path| path == name) {
            let from = usize::try_from(entry.raw_file_position()).ok()?;
            let bytes = usize::try_from(entry.size()).ok()?;
            return start.get(from..from.checked_add(bytes)?);
        }
    }
    None
}

/// Makes `<snapshot_dir>/checkpoint` from `<snapshot_dir>/fs/.ramet` if it is not there yet, and returns its path. Whoever needs it first does it:
/// callers in other processes wait, and an unpacking that was killed is done anew.
///
/// # Errors
/// If the snapshot has no checkpoint, or any byte of it is not what its manifest says; nothing is left behind then.
pub fn ensure_unpacked(snapshot_dir: &Path) -> Result<PathBuf, PackError> {
    let target = snapshot_dir.join(CHECKPOINT_DIR);
    if is_complete(&target) {
        return Ok(target);
    }
    let packed = snapshot_dir.join("fs").join(PACKED_DIR);
    // The path comes out of an image layer, so a link is not followed.
    if !fs::symlink_metadata(&packed).is_ok_and(|metadata| metadata.is_dir()) {
        return Err(PackError::NoCheckpoint {
            directory: snapshot_dir.to_owned(),
        });
    }
    let lock_path = snapshot_dir.join(LOCK_FILE);
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&lock_path);
    let lock = lock.map_err(PackError::file("open", &lock_path))?;
    lock.lock().map_err(PackError::file("lock", &lock_path))?;
    if is_complete(&target) {
        return Ok(target);
    }
    let unpacking = snapshot_dir.join(UNPACKING_DIR);
    remove_directory(&unpacking)?;
    remove_directory(&target)?;
    let result = unpack(&packed, &unpacking)
        .and_then(|()| fs::rename(&unpacking, &target).map_err(PackError::file("rename into place", &target)))
        .and_then(|()| sync_directory(snapshot_dir));
    if result.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_dir_all(&unpacking);
    }
    result.map(|()| target)
}

fn is_complete(checkpoint: &Path) -> bool {
    checkpoint.join(FILE_NAME).is_file()
}

fn remove_directory(path: &Path) -> Result<(), PackError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(PackError::file("remove", path)(error)),
        _ => Ok(()),
    }
}

fn sync_directory(path: &Path) -> Result<(), PackError> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(PackError::file("sync", path))
}

/// Unpacks the files in `packed` into the new directory `target`.
fn unpack(packed: &Path, target: &Path) -> Result<(), PackError> {
    let in_manifest = |source| PackError::Manifest {
        directory: packed.to_owned(),
        source,
    };
    let manifest = CheckpointManifest::read(packed).map_err(in_manifest)?;
    if manifest.packed.is_empty() {
        let problem = "lists no packed files".to_owned();
        return Err(PackError::Damaged {
            path: packed.join(FILE_NAME),
            problem,
        });
    }
    DirBuilder::new()
        .mode(0o700)
        .create(target)
        .map_err(PackError::file("make", target))?;
    for entry in &manifest.packed {
        unpack_file(&packed.join(&entry.name), &target.join(&entry.name), entry)?;
    }
    manifest.write(target).map_err(|source| PackError::Manifest {
        directory: target.to_owned(),
        source,
    })
}

fn unpack_file(path: &Path, target: &Path, entry: &PackedFile) -> Result<(), PackError> {
    let input = open_regular(path).map_err(PackError::file("read", path))?;
    let found = input.metadata().map_err(PackError::file("read", path))?.len();
    if found != entry.packed_bytes {
        let problem = format!("has {found} bytes, expected {}", entry.packed_bytes);
        return Err(PackError::Damaged {
            path: path.to_owned(),
            problem,
        });
    }
    let out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(target);
    let out = out.map_err(PackError::file("make", target))?;
    file::unpack(&input, entry, &out).map_err(|error| match error {
        file::UnpackError::Damaged(problem) => PackError::Damaged {
            path: path.to_owned(),
            problem,
        },
        file::UnpackError::Read(source) => PackError::file("read", path)(source),
        file::UnpackError::Write(source) => PackError::file("write", target)(source),
    })?;
    out.sync_data().map_err(PackError::file("write", target))
}

fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
}

/// A file without a name: gone when it is closed, however this process ends.
fn unnamed_file(directory: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(directory)
}

#[cfg(test)]
mod tests;
