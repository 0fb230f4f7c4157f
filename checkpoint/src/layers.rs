//! EROFS images of image layers: what a VM sees of a container's read-only files.
//!
//! [`ensure_layer_image`] packs `fs/` of a committed snapshot directory into `layer.erofs`, and [`ensure_rootfs_disk`] gives the files
//! that, put one after the other, make one read-only disk. Whoever needs an image first makes it: the snapshotter's background
//! worker after `Commit`, or the shim at `Create`, which otherwise waits for the worker. The lock is `flock(2)` on the snapshot directory, so
//! it ends with its holder; the image is renamed into place when it and its digest are on disk, so a file under the final name is whole.
//!
//! Two nodes that unpack the same OCI layer must get the same bytes, because a checkpoint's guest kernel remembers where its files are:
//! UUID and build time are fixed, nothing is compressed, and whiteouts and directories that the layer's tar does not mention (their time
//! is when they were unpacked) get the time zero. Extended attributes are stored in the order in which the host's filesystem lists them, so
//! a file with two or more of them may differ between nodes. So may images made by different releases of mkfs.erofs.

#[expect(
    unsafe_code,
    reason = "a child must be told to die with its parent between fork and exec"
)]
mod sys;
mod tool;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, FallocateFlags, fallocate};
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use sha2::{Digest, Sha256};

pub use tool::ToolError;
pub(crate) use tool::{Tool, run};

use crate::manifest::hex;
use crate::rootfs::RootfsDescription;

/// The layer as an EROFS image, in a committed snapshot directory.
pub const LAYER_FILE: &str = "layer.erofs";
/// Metadata over all layers up to this one, in the snapshot directory of the topmost.
pub const MERGED_FILE: &str = "merged.erofs";
/// Most layers of a root filesystem; containerd's own overlay tests go up to 128.
pub const MAX_LAYERS: usize = 256;

const BLOCK: u64 = 4096;
/// The same in all images: an image is named by its digest.
const UUID: &str = "72616d65-7400-4000-8000-6c6179657200";
/// mkfs.erofs learned to merge images (`--aufs`, `--ovlfs-strip`) in this release.
const MERGE_VERSION: (u32, u32) = (1, 8);

const MKFS_EROFS: Tool = Tool {
    name: "mkfs.erofs",
    package: "erofs-utils",
};

/// An EROFS file that is complete and will not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerImage {
    /// The file; its size is a multiple of 4096.
    pub path: PathBuf,
    /// SHA-256 of its bytes, in hexadecimal.
    pub sha256: String,
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// A file or directory of ours.
    #[error("{action} {path:?}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it was refused.
        #[source]
        source: io::Error,
    },
    /// mkfs.erofs is missing or refused.
    #[error("make the EROFS image {path:?}")]
    Make {
        /// The image.
        path: PathBuf,
        /// What the tool said.
        #[source]
        source: ToolError,
    },
    /// mkfs.erofs is older than what merging layers needs.
    #[error(
        "mkfs.erofs {found} cannot merge the {layers} layers of this image: install erofs-utils {}.{} or newer",
        MERGE_VERSION.0, MERGE_VERSION.1
    )]
    TooOld {
        /// The release installed.
        found: String,
        /// Layers of the image.
        layers: usize,
    },
    /// The tool wrote something that is no list of 4 KiB blocks.
    #[error("mkfs.erofs wrote {bytes} bytes to {path:?}: not a positive multiple of 4096")]
    BadSize {
        /// The image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A root filesystem needs at least one layer and at most [`MAX_LAYERS`].
    #[error("a root filesystem of {layers} layers: 1 to {MAX_LAYERS} are possible")]
    LayerCount {
        /// Layers asked for.
        layers: usize,
    },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LayerError {
    let path = path.to_owned();
    move |source| LayerError::Io { action, path, source }
}

/// Makes `layer.erofs` of `fs/` in a committed snapshot directory unless it is there, and waits for whoever is making it.
///
/// # Errors
/// See [`LayerError`]; the directory is then as it was.
pub fn ensure_layer_image(snapshot_dir: &Path) -> Result<LayerImage, LayerError> {
    ensure(snapshot_dir, LAYER_FILE, |out| {
        let source = snapshot_dir.join("fs");
        zero_implied_times(&source)?;
        make_from_directory(&source, out)
    })
}

/// The files of the read-only disk: the image of the only layer, or, for more layers, `merged.erofs` and then the image of each
/// layer, bottom to top. The disk is these files one after the other (EROFS "flattened" devices; guest kernel 6.4 or newer).
///
/// # Errors
/// See [`LayerError`].
pub fn ensure_rootfs_disk(rootfs: &RootfsDescription) -> Result<Vec<LayerImage>, LayerError> {
    let count = rootfs.layers.len();
    let top = match rootfs.layers.last() {
        Some(top) if count <= MAX_LAYERS => top,
        _ => return Err(LayerError::LayerCount { layers: count }),
    };
    let images = rootfs
        .layers
        .iter()
        .map(|dir| ensure_layer_image(dir))
        .collect::<Result<Vec<_>, _>>()?;
    if count == 1 {
        return Ok(images);
    }
    let merged = ensure(top, MERGED_FILE, |out| merge(&images, out))?;
    Ok(std::iter::once(merged).chain(images).collect())
}

/// Packs any directory, for example a mounted root filesystem, into `out`. An existing `out` is replaced.
///
/// # Errors
/// See [`LayerError`]; nothing is left at `out` or beside it.
pub fn pack_directory(dir: &Path, out: &Path) -> Result<LayerImage, LayerError> {
    let unfinished = with_suffix(out, UNFINISHED);
    let result = make_from_directory(dir, &unfinished)
        .and_then(|()| finish(&unfinished))
        .and_then(|sha256| {
            fs::rename(&unfinished, out).map_err(io_error("rename to", out))?;
            Ok(LayerImage {
                path: out.to_owned(),
                sha256,
            })
        });
    if result.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    result
}

const UNFINISHED: &str = ".unfinished";

/// A directory held by `flock(2)`: released when dropped, or when the process ends in whatever way.
pub(crate) struct DirLock {
    dir: File,
}

impl DirLock {
    /// Waits for the lock.
    pub(crate) fn take(dir: &Path) -> io::Result<Self> {
        let dir = File::open(dir)?;
        dir.lock()?;
        Ok(Self { dir })
    }

    /// Makes renames in the directory durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.dir.sync_all()
    }
}

/// The image `name` in `dir`, made by `make` if need be.
fn ensure(
    dir: &Path,
    name: &str,
    make: impl FnOnce(&Path) -> Result<(), LayerError>,
) -> Result<LayerImage, LayerError> {
    let path = dir.join(name);
    if let Some(image) = existing(&path)? {
        return Ok(image);
    }
    let lock = DirLock::take(dir).map_err(io_error("lock", dir))?;
    if let Some(image) = existing(&path)? {
        return Ok(image);
    }
    let unfinished = with_suffix(&path, UNFINISHED);
    let result = make_under_lock(&path, &unfinished, make).and_then(|image| {
        lock.sync().map_err(io_error("sync", dir))?;
        Ok(image)
    });
    if result.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    result
}

fn make_under_lock(
    path: &Path,
    unfinished: &Path,
    make: impl FnOnce(&Path) -> Result<(), LayerError>,
) -> Result<LayerImage, LayerError> {
    // What a killed predecessor left.
    match fs::remove_file(unfinished) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", unfinished)(e)),
        _ => {}
    }
    make(unfinished)?;
    let sha256 = finish(unfinished)?;
    // The digest first: an image under its final name always has one.
    let digest = digest_path(path);
    let digest_unfinished = with_suffix(&digest, UNFINISHED);
    fs::write(&digest_unfinished, format!("{sha256}\n")).map_err(io_error("write", &digest_unfinished))?;
    File::open(&digest_unfinished)
        .and_then(|f| f.sync_all())
        .map_err(io_error("sync", &digest_unfinished))?;
    fs::rename(&digest_unfinished, &digest).map_err(io_error("rename to", &digest))?;
    fs::rename(unfinished, path).map_err(io_error("rename to", path))?;
    Ok(LayerImage {
        path: path.to_owned(),
        sha256,
    })
}

/// The finished image, or `None` if it has to be made (again).
fn existing(path: &Path) -> Result<Option<LayerImage>, LayerError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() && good_size(meta.len()) => {}
        Ok(_) => return Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error("look at", path)(e)),
    }
    let digest = digest_path(path);
    let mut text = String::new();
    match File::open(&digest).and_then(|f| f.take(128).read_to_string(&mut text)) {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.kind() == io::ErrorKind::InvalidData => return Ok(None),
        Err(e) => return Err(io_error("read", &digest)(e)),
    }
    let sha256 = text.trim_end();
    let good = sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    Ok(good.then(|| LayerImage {
        path: path.to_owned(),
        sha256: sha256.to_owned(),
    }))
}

fn good_size(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(BLOCK)
}

/// `layer.erofs` -> `layer.erofs.sha256`.
fn digest_path(path: &Path) -> PathBuf {
    with_suffix(path, ".sha256")
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Checks the size, hashes the bytes and makes them durable. Zeros, as of sparse files, take no room from then on.
fn finish(path: &Path) -> Result<String, LayerError> {
    let open = File::options().read(true).write(true).open(path);
    let mut file = open.map_err(io_error("open", path))?;
    let bytes = file.metadata().map_err(io_error("look at", path))?.len();
    if !good_size(bytes) {
        return Err(LayerError::BadSize {
            path: path.to_owned(),
            bytes,
        });
    }
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    let mut offset = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                let read = &buffer[..n];
                if read.iter().all(|byte| *byte == 0) {
                    free(&file, offset, n);
                }
                hasher.update(read);
                offset += n;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(io_error("read", path)(e)),
        }
    }
    file.sync_all().map_err(io_error("sync", path))?;
    Ok(hex(&hasher.finalize()))
}

/// Makes a hole where zeros are. A filesystem without holes keeps them.
fn free(file: &File, offset: usize, length: usize) {
    if let (Ok(offset), Ok(length)) = (i64::try_from(offset), i64::try_from(length)) {
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let _ = fallocate(file, hole, offset, length);
    }
}

/// Gives the time zero to whiteouts, and to directories that are newer than their own making. Unpacking sets the time of what the
/// layer's tar names, which is older; the others (often the root) keep the time of unpacking, which no other node shares.
fn zero_implied_times(root: &Path) -> Result<(), LayerError> {
    let mut pending = vec![root.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).map_err(io_error("list", &dir))? {
            let entry = entry.map_err(io_error("list", &dir))?;
            let kind = entry.file_type().map_err(io_error("look at", &dir))?;
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_char_device() && entry.metadata().is_ok_and(|meta| meta.rdev() == 0) {
                zero_time(&entry.path())?;
            }
        }
        let meta = fs::symlink_metadata(&dir).map_err(io_error("look at", &dir))?;
        if let (Ok(born), Ok(modified)) = (meta.created(), meta.modified())
            && modified >= born
        {
            zero_time(&dir)?;
        }
    }
    Ok(())
}

fn zero_time(path: &Path) -> Result<(), LayerError> {
    utimensat(
        AT_FDCWD,
        path,
        &TimeSpec::UTIME_OMIT,
        &TimeSpec::new(0, 0),
        UtimensatFlags::NoFollowSymlink,
    )
    .map_err(|e| io_error("set the time of", path)(e.into()))
}

/// Arguments that make equal trees equal images. Files keep their own times.
fn make_from_directory(source: &Path, out: &Path) -> Result<(), LayerError> {
    let fail = |source| LayerError::Make {
        path: out.to_owned(),
        source,
    };
    let mut command = MKFS_EROFS.command().map_err(fail)?;
    // In releases before 1.8 `-T` would overwrite the time of every file; this variable sets the build time alone in all of
    // them, and is later than any file, which are clamped to it.
    command.env("SOURCE_DATE_EPOCH", "4294967295");
    // Tails packed beside the inodes could not be shared by merged metadata.
    command
        .args(["--quiet", "-Enoinline_data", "-U", UUID])
        .arg(out)
        .arg(source);
    run(command, &MKFS_EROFS).map(drop).map_err(fail)
}

fn merge(images: &[LayerImage], out: &Path) -> Result<(), LayerError> {
    let fail = |source| LayerError::Make {
        path: out.to_owned(),
        source,
    };
    let found = version().map_err(fail)?;
    if parse_version(&found).is_none_or(|v| v < MERGE_VERSION) {
        return Err(LayerError::TooOld {
            found,
            layers: images.len(),
        });
    }
    let mut command = MKFS_EROFS.command().map_err(fail)?;
    command
        .args(["--quiet", "-T0", "--mkfs-time", "--aufs", "--ovlfs-strip=1", "-U", UUID])
        .arg(out);
    command.args(images.iter().map(|image| &image.path));
    run(command, &MKFS_EROFS).map(drop).map_err(fail)
}

/// The installed release, such as `1.8.6`.
fn version() -> Result<String, ToolError> {
    let mut command = MKFS_EROFS.command()?;
    // Releases before 1.6 do not know the option but print their version all the same.
    let output = command
        .arg("--version")
        .output()
        .map_err(|source| ToolError::start(&MKFS_EROFS, source))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Ok(find_version(&text).unwrap_or("of unknown version").to_owned())
}

/// From `mkfs.erofs 1.5` or `mkfs.erofs (erofs-utils) 1.8.6`.
fn find_version(text: &str) -> Option<&str> {
    let line = text.lines().find_map(|line| line.strip_prefix("mkfs.erofs "))?;
    line.split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))
}

fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests;
