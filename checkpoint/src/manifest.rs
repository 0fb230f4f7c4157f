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

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use serde::{Deserialize, Serialize};
use thiserror::Error;

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
        if good {
            Ok(Self(text))
        } else {
            Err(format!(
                "{text:?} is not a checkpoint id (32 lower-case hexadecimal digits)"
            ))
        }
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

    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// If `/dev/urandom` cannot be read.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(hex(&bytes)))
    }
}

/// Lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = |byte: &u8| {
        [
            DIGITS[usize::from(byte >> 4)] as char,
            DIGITS[usize::from(byte & 15)] as char,
        ]
    };
    bytes.iter().flat_map(digits).collect()
}

/// Why a manifest cannot be used.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// Reading it.
    #[error("cannot read checkpoint manifest {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Writing it.
    #[error("cannot write checkpoint manifest {path}")]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// More bytes than any manifest has.
    #[error("checkpoint manifest is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// Another format.
    #[error("checkpoint has format {found}, this build of ramet reads format {FORMAT}: {}", remedy(*.found))]
    Format {
        /// What it says.
        found: u32,
    },
    /// Not the JSON it should be.
    #[error("checkpoint manifest is not valid")]
    Json(#[source] serde_json::Error),
    /// A value out of bounds.
    #[error("checkpoint manifest is not valid: {field} {problem}")]
    Field {
        /// Where.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

fn remedy(found: u32) -> &'static str {
    if found > FORMAT {
        "use a newer ramet on this host"
    } else {
        "make the checkpoint again with this version"
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

impl CheckpointManifest {
    /// Reads and validates the manifest in a checkpoint directory.
    ///
    /// # Errors
    /// If there is none, or it is not valid, or it has another format.
    pub fn read(directory: &Path) -> Result<Self, ManifestError> {
        let path = directory.join(FILE_NAME);
        let bytes = read_bounded(&path).map_err(|source| ManifestError::Read { path, source })?;
        Self::from_json(&bytes)
    }

    /// Parses and validates a manifest.
    ///
    /// # Errors
    /// If it is not valid or has another format; a format this build does not know is named as such, whatever else the bytes hold.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ManifestError> {
        /// The one field every format has.
        #[derive(Deserialize)]
        struct AnyFormat {
            format: u32,
        }
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ManifestError::TooLarge);
        }
        let any: AnyFormat = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        if any.format != FORMAT {
            return Err(ManifestError::Format { found: any.format });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(ManifestError::Json)?;
        manifest.validate()?;
        Ok(manifest)
    }

    /// The bytes of the file.
    ///
    /// # Errors
    /// If it is not valid, or too large.
    pub fn to_json(&self) -> Result<Vec<u8>, ManifestError> {
        self.validate()?;
        let mut bytes = serde_json::to_vec_pretty(self).map_err(ManifestError::Json)?;
        bytes.push(b'\n');
        if bytes.len() as u64 > MAX_BYTES {
            Err(ManifestError::TooLarge)
        } else {
            Ok(bytes)
        }
    }

    /// Writes it into a checkpoint directory, in one step: a reader sees a whole manifest or none.
    ///
    /// # Errors
    /// If it is not valid or cannot be written; nothing is left behind then.
    pub fn write(&self, directory: &Path) -> Result<(), ManifestError> {
        let bytes = self.to_json()?;
        let temporary = directory.join(format!("{FILE_NAME}.{}.tmp", std::process::id()));
        let path = directory.join(FILE_NAME);
        write_durably(&temporary, &path, directory, &bytes).map_err(|source| {
            // The first error is the one to report.
            let _ = fs::remove_file(&temporary);
            ManifestError::Write { path, source }
        })
    }
}

fn write_durably(temporary: &Path, path: &Path, directory: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    // The other files and their names, then the one that says that they are complete, then the directory's own name.
    let directory_file = File::open(directory)?;
    directory_file.sync_all()?;
    fs::rename(temporary, path)?;
    directory_file.sync_all()?;
    match directory.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => Ok(()),
    }
}

/// At most one byte more than [`MAX_BYTES`]; a symbolic link is not followed, for image layers may hold them.
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
