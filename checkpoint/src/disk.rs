//! Writable disks: stacks of overlay layers.
//!
//! A layer is two files: `data`, sparse, with each 4 KiB block at its own offset, and `bitmap`, one bit for each block, least significant
//! bit first, 1 = this layer holds the block. A block is read from the topmost layer that holds it, and is zero if none does. Sealed layers
//! have files of the full length: that of the disk, and that many bits rounded up to a byte. For an active layer, two empty files will
//! do, too. The lowest layer of a container's disk is an empty ext4 filesystem made once ([`ensure_ext4_template`]).

mod bitmap;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::unistd::{Whence, lseek};

pub use bitmap::Bitmap;

use crate::layers::{DirLock, Tool, ToolError, run, with_suffix};
use crate::rootfs::MIN_WRITABLE_BYTES;

/// Bytes of a block.
pub const BLOCK_SIZE: u64 = 4096;
/// Most sealed layers in a stack; a checkpoint that would exceed it merges the layers first.
pub const MAX_LAYERS: usize = 8;
/// Largest disk in bytes.
pub const MAX_BYTES: u64 = 1 << 40;

/// Bytes copied at a time: whole blocks.
const CHUNK: usize = 1 << 20;
const BLOCK: usize = 4096;
const MKFS_EXT4: Tool = Tool {
    name: "mkfs.ext4",
    package: "e2fsprogs",
};
const UNFINISHED: &str = ".unfinished";

/// The two files of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerFiles {
    /// Blocks.
    pub data: PathBuf,
    /// Which of them the layer holds.
    pub bitmap: PathBuf,
}

/// Why a layer cannot be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
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
    /// mkfs.ext4 is missing or refused.
    #[error("make an empty ext4 filesystem of {bytes} bytes")]
    Make {
        /// Its size.
        bytes: u64,
        /// What the tool said.
        #[source]
        source: ToolError,
    },
    /// A size that no disk has.
    #[error(
        "a disk of {bytes} bytes: multiples of {BLOCK_SIZE} up to {MAX_BYTES} are possible, from {MIN_WRITABLE_BYTES} for a filesystem"
    )]
    Size {
        /// The size.
        bytes: u64,
    },
    /// A name that could leave the directory.
    #[error("layer name {name:?} is not of the form [a-z0-9.-]{{1,64}}")]
    Name {
        /// The name.
        name: String,
    },
    /// A file that contradicts the other or the size of the disk.
    #[error("{path:?} {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| DiskError::Io { action, path, source }
}

impl LayerFiles {
    /// The files of layer `name` in `dir`; they need not exist.
    ///
    /// # Errors
    /// [`DiskError::Name`] unless the name is of the form `[a-z0-9.-]{1,64}` and does not begin with a dot.
    pub fn at(dir: &Path, name: &str) -> Result<Self, DiskError> {
        let good = (1..=64).contains(&name.len())
            && !name.starts_with('.')
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'.' || b == b'-');
        if !good {
            return Err(DiskError::Name { name: name.to_owned() });
        }
        Ok(Self {
            data: dir.join(format!("{name}.data")),
            bitmap: dir.join(format!("{name}.bitmap")),
        })
    }

    fn unfinished(&self) -> Self {
        Self {
            data: with_suffix(&self.data, UNFINISHED),
            bitmap: with_suffix(&self.bitmap, UNFINISHED),
        }
    }

    fn remove(&self) {
        let _ = fs::remove_file(&self.data);
        let _ = fs::remove_file(&self.bitmap);
    }

    /// Renames both into place, the data last: with it the layer exists.
    fn rename_to(&self, to: &Self) -> Result<(), DiskError> {
        fs::rename(&self.bitmap, &to.bitmap).map_err(io_error("rename to", &to.bitmap))?;
        fs::rename(&self.data, &to.data).map_err(io_error("rename to", &to.data))
    }
}

fn check_size(bytes: u64, least: u64) -> Result<(), DiskError> {
    if bytes < least || bytes > MAX_BYTES || !bytes.is_multiple_of(BLOCK_SIZE) {
        return Err(DiskError::Size { bytes });
    }
    Ok(())
}

/// The sealed lowest layer of a cold container's disk of this size: an empty ext4 filesystem, `ext4-<size>.data` and `.bitmap` in `dir`. It is
/// made once, under a lock on `dir` (which is created); link it with [`link_layer`], never write it.
///
/// The filesystem has a small journal: a checkpoint needs none, since memory and disk are cut at the same instant, but a container
/// whose VM was killed may be started again on the same disk. Inode tables are marked as zeroed, so the guest does not write them.
///
/// # Errors
/// See [`DiskError`]; what was begun is removed.
pub fn ensure_ext4_template(dir: &Path, size_bytes: u64) -> Result<LayerFiles, DiskError> {
    check_size(size_bytes, MIN_WRITABLE_BYTES)?;
    let files = LayerFiles::at(dir, &format!("ext4-{size_bytes}"))?;
    if files.data.exists() {
        return Ok(files);
    }
    fs::create_dir_all(dir).map_err(io_error("create", dir))?;
    let lock = DirLock::take(dir).map_err(io_error("lock", dir))?;
    if files.data.exists() {
        return Ok(files);
    }
    let unfinished = files.unfinished();
    let image = dir.join(format!("ext4-{size_bytes}.image{UNFINISHED}"));
    unfinished.remove(); // left by a killed predecessor
    let made = make_ext4(&image, size_bytes)
        .and_then(|()| layer_of_image(&image, &unfinished, size_bytes))
        .and_then(|()| unfinished.rename_to(&files))
        .and_then(|()| lock.sync().map_err(io_error("sync", dir)));
    let _ = fs::remove_file(&image);
    if made.is_err() {
        unfinished.remove();
    }
    made.map(|()| files)
}

fn make_ext4(image: &Path, size_bytes: u64) -> Result<(), DiskError> {
    create_truncated(image, size_bytes)?;
    let fail = |source| DiskError::Make {
        bytes: size_bytes,
        source,
    };
    let mut command = MKFS_EXT4.command().map_err(fail)?;
    // Features are listed because the host's defaults may be newer than the guest's kernel. Time and UUIDs are fixed so that every node
    // makes the same filesystem.
    command
        .env("E2FSPROGS_FAKE_TIME", "1700000000")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-J", "size=4"])
        .args(["-O", "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum"])
        .args(["-U", "72616d65-7400-4000-8000-6469736b0000"])
        .args(["-E", "root_owner=0:0,hash_seed=72616d65-7400-4000-8000-6469736b0001"])
        .arg(image);
    run(command, &MKFS_EXT4).map(drop).map_err(fail)
}

fn create_truncated(path: &Path, bytes: u64) -> Result<File, DiskError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(io_error("create", path))?;
    file.set_len(bytes).map_err(io_error("set the size of", path))?;
    Ok(file)
}

/// A layer with exactly the non-zero blocks of a disk image.
fn layer_of_image(image: &Path, out: &LayerFiles, size_bytes: u64) -> Result<(), DiskError> {
    let source = File::open(image).map_err(io_error("open", image))?;
    let data = create_truncated(&out.data, size_bytes)?;
    let mut bitmap = Bitmap::empty(size_bytes / BLOCK_SIZE);
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some(next) = next_data(&source, at).map_err(io_error("read", image))? {
        at = next - next % BLOCK_SIZE;
        let part = &mut buffer[..chunk_of(size_bytes - at)];
        source.read_exact_at(part, at).map_err(io_error("read", image))?;
        for block in part.chunks_exact(BLOCK) {
            if block.iter().any(|byte| *byte != 0) {
                data.write_all_at(block, at).map_err(io_error("write", &out.data))?;
                bitmap.set(at / BLOCK_SIZE);
            }
            at += BLOCK_SIZE;
        }
    }
    data.sync_all().map_err(io_error("sync", &out.data))?;
    write_bitmap(&out.bitmap, &bitmap)
}

/// [`CHUNK`], or less at the end.
fn chunk_of(left: u64) -> usize {
    usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK))
}

/// Where the next bytes are that are not a hole.
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    let Ok(offset) = i64::try_from(at) else { return Ok(None) };
    match lseek(file, offset, Whence::SeekData) {
        Ok(next) => Ok(u64::try_from(next).ok()),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn write_bitmap(path: &Path, bitmap: &Bitmap) -> Result<(), DiskError> {
    let file = create_truncated(path, 0)?;
    file.write_all_at(bitmap.bytes(), 0).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

/// Makes a layer that holds nothing, in a directory that exists: the active layer of a new container or of a fork. Existing files are replaced.
///
/// # Errors
/// See [`DiskError`].
pub fn create_empty_layer(dir: &Path, name: &str, size_bytes: u64) -> Result<LayerFiles, DiskError> {
    check_size(size_bytes, BLOCK_SIZE)?;
    let files = LayerFiles::at(dir, name)?;
    files.remove(); // never through an old name: it may be linked elsewhere
    create_truncated(&files.data, size_bytes)?;
    create_truncated(&files.bitmap, Bitmap::bytes_for(size_bytes / BLOCK_SIZE))?;
    Ok(files)
}

/// Gives a sealed layer another name in `dir`: hard links, or sparse copies on another filesystem. Existing names are replaced. The files'
/// bytes are durable afterwards (a VMM does not flush what it seals), their names when the caller has synchronised `dir`.
///
/// # Errors
/// See [`DiskError`].
pub fn link_layer(from: &LayerFiles, dir: &Path, name: &str) -> Result<LayerFiles, DiskError> {
    let to = LayerFiles::at(dir, name)?;
    let unfinished = to.unfinished();
    unfinished.remove();
    let linked = link_or_copy(&from.bitmap, &unfinished.bitmap)
        .and_then(|()| link_or_copy(&from.data, &unfinished.data))
        .and_then(|()| sync(&unfinished.bitmap))
        .and_then(|()| sync(&unfinished.data))
        .and_then(|()| unfinished.rename_to(&to));
    // Renaming over another link of the same file does nothing and keeps both names.
    unfinished.remove();
    linked.map(|()| to)
}

fn link_or_copy(from: &Path, to: &Path) -> Result<(), DiskError> {
    match fs::hard_link(from, to) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EXDEV | libc::EMLINK | libc::EPERM)) => copy_sparse(from, to),
        other => other.map_err(io_error("link", from)),
    }
}

fn sync(path: &Path) -> Result<(), DiskError> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(io_error("sync", path))
}

fn copy_sparse(from: &Path, to: &Path) -> Result<(), DiskError> {
    let source = File::open(from).map_err(io_error("open", from))?;
    let bytes = source.metadata().map_err(io_error("look at", from))?.len();
    let target = create_truncated(to, bytes)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some(next) = next_data(&source, at).map_err(io_error("read", from))? {
        let part = &mut buffer[..chunk_of(bytes.saturating_sub(next))];
        source.read_exact_at(part, next).map_err(io_error("read", from))?;
        write_nonzero(&target, part, next).map_err(io_error("write", to))?;
        at = next + part.len() as u64;
    }
    Ok(())
}

fn write_nonzero(target: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    let mut offset = at;
    for part in bytes.chunks(BLOCK) {
        if part.iter().any(|byte| *byte != 0) {
            target.write_all_at(part, offset)?;
        }
        offset += part.len() as u64;
    }
    Ok(())
}

/// Checks that a layer's files agree with each other and with the size of the disk; reads the bitmap only.
///
/// # Errors
/// [`DiskError::Damaged`] names the file and what is wrong with it.
pub fn check_layer(files: &LayerFiles, size_bytes: u64) -> Result<Bitmap, DiskError> {
    check_size(size_bytes, BLOCK_SIZE)?;
    let damaged = |path: &Path, what| {
        Err(DiskError::Damaged {
            path: path.to_owned(),
            what,
        })
    };
    let meta = fs::symlink_metadata(&files.data).map_err(io_error("look at", &files.data))?;
    if !meta.is_file() {
        return damaged(&files.data, "is no regular file");
    }
    if meta.len() > size_bytes {
        return damaged(&files.data, "is longer than the disk");
    }
    let bitmap = read_bitmap(&files.bitmap, size_bytes / BLOCK_SIZE)?;
    if bitmap.last().is_some_and(|block| (block + 1) * BLOCK_SIZE > meta.len()) {
        return damaged(&files.data, "is shorter than its bitmap says");
    }
    Ok(bitmap)
}

fn read_bitmap(path: &Path, blocks: u64) -> Result<Bitmap, DiskError> {
    let damaged = |what| {
        Err(DiskError::Damaged {
            path: path.to_owned(),
            what,
        })
    };
    if !fs::symlink_metadata(path).map_err(io_error("look at", path))?.is_file() {
        return damaged("is no regular file");
    }
    // A writer may map the file by whole pages.
    let most = Bitmap::bytes_for(blocks).next_multiple_of(BLOCK_SIZE);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io_error("open", path))?;
    file.take(most + 1)
        .read_to_end(&mut bytes)
        .map_err(io_error("read", path))?;
    if bytes.len() as u64 > most {
        return damaged("is longer than the disk needs");
    }
    match Bitmap::from_bytes(bytes, blocks) {
        Some(bitmap) => Ok(bitmap),
        None => damaged("has bits beyond the end of the disk"),
    }
}

/// Writes one layer that reads as the stack `layers`, bottom to top, does.
///
/// # Errors
/// See [`DiskError`]; what was begun is removed, the layers are never written.
pub fn merge_layers(layers: &[LayerFiles], dir: &Path, name: &str, size_bytes: u64) -> Result<LayerFiles, DiskError> {
    let bitmaps = layers
        .iter()
        .map(|files| check_layer(files, size_bytes))
        .collect::<Result<Vec<_>, _>>()?;
    let files = LayerFiles::at(dir, name)?;
    let unfinished = files.unfinished();
    let merged = merge_into(layers, &bitmaps, &unfinished, size_bytes).and_then(|()| unfinished.rename_to(&files));
    if merged.is_err() {
        unfinished.remove();
    }
    merged.map(|()| files)
}

fn merge_into(layers: &[LayerFiles], bitmaps: &[Bitmap], out: &LayerFiles, size_bytes: u64) -> Result<(), DiskError> {
    let target = create_truncated(&out.data, size_bytes)?;
    let mut done = Bitmap::empty(size_bytes / BLOCK_SIZE);
    let mut buffer = vec![0; CHUNK];
    for (files, bitmap) in layers.iter().zip(bitmaps).rev() {
        let source = File::open(&files.data).map_err(io_error("open", &files.data))?;
        for run in bitmap.without(&done).runs() {
            let (mut at, end) = (run.start * BLOCK_SIZE, run.end * BLOCK_SIZE);
            while at < end {
                let part = &mut buffer[..chunk_of(end - at)];
                source.read_exact_at(part, at).map_err(io_error("read", &files.data))?;
                target.write_all_at(part, at).map_err(io_error("write", &out.data))?;
                at += part.len() as u64;
            }
        }
        done.add(bitmap);
    }
    target.sync_all().map_err(io_error("sync", &out.data))?;
    write_bitmap(&out.bitmap, &done)
}

#[cfg(test)]
mod tests;
