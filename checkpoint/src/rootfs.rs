//! What the snapshotter tells the shim about a container's root filesystem.
//!
//! `Mounts` of an active snapshot with a parent is an overlay mount whose `source` is the snapshot directory
//! (`<root>/snapshots/<n>`). In it:
//!
//! ```text
//! fs/  work/        upper and work directory of the host-side overlay
//! rootfs.json       RootfsDescription, written by Prepare
//! files.sock        (while a VM runs) its shim brings the container's files when asked, to
//! files/            what the container wrote, as an upper directory; as old as the last time it was asked
//! disk/             writable disk of the VM: <g>.data, <g>.bitmap for generation g; made by the shim, gone with the snapshot
//! checkpoint/       a checkpoint being made or committed (manifest.json is renamed into place last)
//! layer.erofs       (committed snapshots) the layer as an EROFS image, made by [`crate::layers`]
//! merged.erofs      (committed snapshots) metadata over it and all layers below, for images of more than one layer
//! ```

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{disk, layers};

/// File name in the snapshot directory.
pub const FILE_NAME: &str = "rootfs.json";

/// Directory of a checkpoint inside a committed snapshot directory.
pub const CHECKPOINT_DIR: &str = "checkpoint";

/// Socket in an active snapshot directory while its container has a virtual machine. Who connects gets one line when the container's
/// files were brought to [`FILES_DIR`]: `ok`, or `error: <why>`.
pub const FILES_SOCKET: &str = "files.sock";

/// What the container wrote, as the upper directory of an overlay.
pub const FILES_DIR: &str = "files";

/// Where an unpacked checkpoint layer keeps its files, below `fs/`.
pub const PACKED_DIR: &str = ".ramet";

/// The only version so far.
pub const VERSION: u32 = 1;

/// Most checkpoint layers in a chain.
pub const MAX_CHECKPOINTS: usize = 128;

/// Largest description that is read, in bytes: room for the longest chains with the longest paths.
pub const MAX_BYTES: u64 = 2 << 20;

/// Smallest writable disk, in bytes: an ext4 filesystem with a journal needs some room.
pub const MIN_WRITABLE_BYTES: u64 = 16 << 20;

/// The parents of an active snapshot, as directories.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootfsDescription {
    /// Always 1.
    pub version: u32,
    /// Root directory of the snapshotter; every other path lies below it.
    pub root: PathBuf,
    /// Committed snapshot directories of the ordinary layers, bottom to top.
    pub layers: Vec<PathBuf>,
    /// Committed snapshot directories of the checkpoint layers in the chain, bottom to top. The last one is what a new
    /// container on this snapshot is forked from; the others are its bases.
    pub checkpoints: Vec<PathBuf>,
    /// Size of the writable disk for a cold start, in bytes.
    pub writable_bytes: u64,
}

/// Why there is no description, or no good one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootfsError {
    /// The file cannot be read or written.
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
    /// The file is larger than [`MAX_BYTES`].
    #[error("{path:?} is larger than {MAX_BYTES} bytes")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file is no description.
    #[error("parse {path:?}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where it is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// The description contradicts itself or asks for too much.
    #[error("rootfs description: {what}")]
    Invalid {
        /// What is wrong.
        what: String,
    },
}

impl RootfsError {
    /// Whether there simply is no description: the snapshot has no parent or is another snapshotter's.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io { source, .. } if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
    }
}

impl RootfsDescription {
    /// Reads and validates `rootfs.json` of a snapshot directory.
    ///
    /// # Errors
    /// See [`RootfsError`].
    pub fn read(snapshot_dir: &Path) -> Result<Self, RootfsError> {
        let path = snapshot_dir.join(FILE_NAME);
        let mut bytes = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|source| RootfsError::Io {
                action: "read",
                path: path.clone(),
                source,
            })?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(RootfsError::TooLarge { path });
        }
        let this: Self = serde_json::from_slice(&bytes).map_err(|source| RootfsError::Parse { path, source })?;
        this.validate()?;
        Ok(this)
    }

    /// Validates and writes it into a snapshot directory that nobody else uses yet.
    ///
    /// # Errors
    /// See [`RootfsError`].
    pub fn write(&self, snapshot_dir: &Path) -> Result<(), RootfsError> {
        self.validate()?;
        let path = snapshot_dir.join(FILE_NAME);
        let bytes = serde_json::to_vec(self).map_err(|source| RootfsError::Parse {
            path: path.clone(),
            source,
        })?;
        fs::write(&path, bytes).map_err(|source| RootfsError::Io {
            action: "write",
            path,
            source,
        })
    }

    /// Where [`disk::ensure_ext4_template`] keeps the empty filesystems of this snapshotter.
    #[must_use]
    pub fn template_dir(&self) -> PathBuf {
        self.root.join("templates")
    }

    /// Checks what [`RootfsDescription::read`] promises: version, bounds, and that every path is absolute, without `..`, and below `root`.
    ///
    /// # Errors
    /// [`RootfsError::Invalid`] with the first thing wrong.
    pub fn validate(&self) -> Result<(), RootfsError> {
        let invalid = |what: String| Err(RootfsError::Invalid { what });
        if self.version != VERSION {
            return invalid(format!("version {}, this build knows {VERSION}", self.version));
        }
        if !is_plain(&self.root) {
            return invalid(format!("root {:?} is not a plain absolute path", self.root));
        }
        if self.layers.len() > layers::MAX_LAYERS {
            return invalid(format!(
                "{} layers, {} are possible",
                self.layers.len(),
                layers::MAX_LAYERS
            ));
        }
        if self.checkpoints.len() > MAX_CHECKPOINTS {
            return invalid(format!(
                "{} checkpoints, {MAX_CHECKPOINTS} are possible",
                self.checkpoints.len()
            ));
        }
        for path in self.layers.iter().chain(&self.checkpoints) {
            if !is_plain(path) || !path.starts_with(&self.root) || *path == self.root {
                return invalid(format!("{path:?} is not a plain path below {:?}", self.root));
            }
        }
        if self.writable_bytes < MIN_WRITABLE_BYTES
            || self.writable_bytes > disk::MAX_BYTES
            || !self.writable_bytes.is_multiple_of(disk::BLOCK_SIZE)
        {
            return invalid(format!(
                "a writable disk of {} bytes: multiples of {} from {MIN_WRITABLE_BYTES} to {} are possible",
                self.writable_bytes,
                disk::BLOCK_SIZE,
                disk::MAX_BYTES
            ));
        }
        Ok(())
    }
}

/// Absolute, normalised, UTF-8, no control characters.
fn is_plain(path: &Path) -> bool {
    let mut parts = path.components();
    parts.next() == Some(Component::RootDir)
        && parts.all(|part| matches!(part, Component::Normal(_)))
        && path.to_str().is_some_and(|text| !text.chars().any(char::is_control))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn good() -> RootfsDescription {
        RootfsDescription {
            version: VERSION,
            root: "/var/lib/ramet-snapshotter".into(),
            layers: vec!["/var/lib/ramet-snapshotter/snapshots/1".into()],
            checkpoints: vec!["/var/lib/ramet-snapshotter/snapshots/2".into()],
            writable_bytes: 1 << 30,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        good().write(dir.path()).unwrap();
        assert_eq!(RootfsDescription::read(dir.path()).unwrap(), good());
    }

    #[test]
    fn an_absent_description_is_told_from_a_bad_one() {
        let dir = tempfile::tempdir().unwrap();
        assert!(RootfsDescription::read(dir.path()).unwrap_err().is_absent());
        assert!(RootfsDescription::read(Path::new("overlay")).unwrap_err().is_absent());
        fs::write(dir.path().join(FILE_NAME), "{").unwrap();
        assert!(!RootfsDescription::read(dir.path()).unwrap_err().is_absent());
    }

    #[test]
    fn bad_descriptions_are_refused() {
        type Change = fn(&mut RootfsDescription);
        let changes: [(Change, &str); 8] = [
            (|d| d.version = 2, "version"),
            (|d| d.root = "var".into(), "root"),
            (|d| d.layers.push("/etc".into()), "/etc"),
            (|d| d.layers.push("/var/lib/ramet-snapshotter/../x".into()), "../x"),
            (|d| d.checkpoints.push(d.root.clone()), "below"),
            (|d| d.writable_bytes = 1, "writable"),
            (|d| d.writable_bytes = u64::MAX, "writable"),
            (|d| d.layers = vec![d.root.join("1"); layers::MAX_LAYERS + 1], "layers"),
        ];
        for (change, word) in changes {
            let mut description = good();
            change(&mut description);
            let text = description.validate().unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn an_oversized_file_is_not_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join(FILE_NAME))
            .unwrap()
            .set_len(MAX_BYTES * 100)
            .unwrap();
        assert!(matches!(
            RootfsDescription::read(dir.path()),
            Err(RootfsError::TooLarge { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(FILE_NAME), bytes).unwrap();
            if let Ok(description) = RootfsDescription::read(dir.path()) {
                description.validate().unwrap();
            }
        }
    }
}
