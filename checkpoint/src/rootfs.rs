//! What the snapshotter tells the shim about a container's root filesystem.
//!
//! `Mounts` of an active snapshot with a parent is an overlay mount whose `source` is the snapshot directory
//! (`<root>/snapshots/<n>`). In it:
//!
//! ```text
//! fs/  work/        upper and work directory of the host-side overlay
//! rootfs.json       RootfsDescription, written by Prepare
//! disk/             writable disk of the VM: <g>.data, <g>.bitmap for generation g; made by the shim, gone with the snapshot
//! checkpoint/       a checkpoint being made or committed (manifest.json is renamed into place last)
//! layer.erofs       (committed snapshots) the layer as an EROFS image, made by `layers`
//! ```

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// File name in the snapshot directory.
pub const FILE_NAME: &str = "rootfs.json";

/// Directory of a checkpoint inside a committed snapshot directory.
pub const CHECKPOINT_DIR: &str = "checkpoint";

/// Where an unpacked checkpoint layer keeps its files, below `fs/`.
pub const PACKED_DIR: &str = ".ramet";

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
