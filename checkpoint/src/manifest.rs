//! `manifest.json`: the checkpoint's own description.
//!
//! A checkpoint directory:
//!
//! ```text
//! manifest.json     renamed into place last: with it the checkpoint is complete, without it it does not exist
//! state             saved state of vCPUs, interrupt controllers, clock and devices (the VMM's own format and version)
//! memory            guest pages            memory.index   where each page comes from
//! <disk>.<n>.data   <disk>.<n>.bitmap      sealed layers of writable disks, bottom to top
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// The format this build writes and reads. What raises it: docs/checkpoint-format.md.
pub const FORMAT: u32 = 1;
/// Name of the manifest in a checkpoint directory.
pub const FILE_NAME: &str = "manifest.json";
/// Largest manifest that is read, in bytes.
pub const MAX_BYTES: u64 = 4 << 20;
/// File names in a checkpoint directory.
pub const STATE_FILE: &str = "state";
/// See [`crate::memory`].
pub const MEMORY_FILE: &str = "memory";
/// See [`crate::memory`].
pub const MEMORY_INDEX_FILE: &str = "memory.index";

/// Name of a checkpoint: 32 lower-case hexadecimal digits drawn at random when it is made.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CheckpointId(String);

impl TryFrom<String> for CheckpointId {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let good = text.len() == 32 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if good { Ok(Self(text)) } else { Err(format!("{text:?} is not a checkpoint id (32 lower-case hexadecimal digits)")) }
    }
}

impl From<CheckpointId> for String {
    fn from(id: CheckpointId) -> Self {
        id.0
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl CheckpointId {
    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a checkpoint is, what it needs and what it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointManifest {
    /// [`FORMAT`].
    pub format: u32,
    /// This checkpoint.
    pub id: CheckpointId,
    /// The checkpoint this one's container was forked from; its files are needed too.
    pub base: Option<CheckpointId>,
    /// RFC 3339.
    pub created: String,
    /// What a host must have to run it.
    pub host: HostRequirements,
    /// Shape of the machine.
    pub vm: VmShape,
    /// Read-only disks by id; made from the image's layers on each node, compared by digest.
    pub read_only_disks: Vec<ReadOnlyDisk>,
    /// Writable disks by id.
    pub writable_disks: Vec<WritableDisk>,
    /// Containers in the machine; the first one is what a fork continues.
    pub containers: Vec<ContainerInfo>,
    /// What the save wrote and cost.
    pub save: SaveInfo,
    /// The files as they are packed in the image layer; absent in a directory that was made here and never packed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packed: Vec<PackedFile>,
}

/// What a host must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRequirements {
    /// `x86_64`.
    pub arch: String,
    /// CPUID vendor string.
    pub cpu_vendor: String,
    /// CPUID family (with extended family).
    pub cpu_family: u32,
    /// CPUID model (with extended model).
    pub cpu_model: u32,
    /// Kernel release of the host that made it; informational.
    pub host_kernel: String,
}

/// Shape of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmShape {
    /// vCPUs.
    pub vcpus: u8,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// `uname -r` in the guest.
    pub guest_kernel: String,
    /// `protocol::GENERATION` of its agent.
    pub agent_generation: u32,
    /// Network interfaces it was made with (0 or 1).
    pub nets: u32,
}

/// A read-only disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadOnlyDisk {
    /// Serial.
    pub id: String,
    /// SHA-256 (hex) of each of its files, in order.
    pub files_sha256: Vec<String>,
}

/// A writable disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WritableDisk {
    /// Serial.
    pub id: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Sealed layers, bottom to top.
    pub layers: Vec<DiskLayer>,
}

/// A sealed overlay layer of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLayer {
    /// In which checkpoint's directory the files are; `None`: in this one's.
    pub checkpoint: Option<CheckpointId>,
    /// File name without `.data` / `.bitmap`: `[a-z0-9.-]{1,64}`.
    pub name: String,
}

/// A container in the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerInfo {
    /// The guest's id of it (the id it had in the first sandbox of the chain).
    pub guest_id: String,
    /// The id containerd knew it by when the checkpoint was made.
    pub container_id: String,
    /// `process.args` of its spec.
    pub args: Vec<String>,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// Id of its read-only disk.
    pub read_only_disk: String,
    /// Id of its writable disk.
    pub writable_disk: String,
}

/// What a save wrote and cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveInfo {
    /// How long the vCPUs stood still, in microseconds.
    pub pause_us: u64,
    /// From freeze to thaw of the containers, in microseconds.
    pub frozen_us: u64,
    /// Bytes of guest pages in the `memory` file.
    pub memory_bytes: u64,
    /// How long writing them took, in microseconds.
    pub memory_write_us: u64,
    /// Only pages changed since the base.
    pub incremental: bool,
}

/// One file in the packed form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedFile {
    /// Its name in the checkpoint directory.
    pub name: String,
    /// Its size there, in bytes.
    pub bytes: u64,
    /// Size of its packed form.
    pub packed_bytes: u64,
    /// SHA-256 (hex) of its packed form.
    pub sha256: String,
}
