//! The machine for a fork: a checkpoint of the container's image, checked, and how its processes go on.

use std::path::{Path, PathBuf};

use checkpoint::compat::{self, HostFacts};
use checkpoint::directory::Checkpoint;
use checkpoint::layers::LayerImage;
use checkpoint::manifest::{CheckpointManifest, ContainerInfo};
use checkpoint::pack;
use checkpoint::rootfs::RootfsDescription;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::linkat;
use oci_spec::runtime::Spec;
use protocol::guest::{NetworkConfig, RenewRequest};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use tracing::debug;
use vmm::control::{DiskConfig, Request, RestoreRequest};

use crate::boot::open_console;
use crate::disks::{FdList, READ_ONLY, WritableDisk, read_only_config};
use crate::error::{Error, Result, chain};
use crate::spec;
use crate::vm::Vm;

/// Annotation: how a fork goes on; overrides the comparison of args.
pub const FORK: &str = "io.ramet.fork";

/// File in a checkpoint's directory: the pages that forks change before they go on. Made by the first fork on this node, not part of
/// the checkpoint.
const TOUCHED: &str = "touched";

/// How the processes of a fork go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForkMode {
    /// Where they were.
    Resume,
    /// As they were, with the new command beside them.
    Exec,
    /// Not at all: a new init over the same files.
    Fresh,
}

impl ForkMode {
    /// The annotation, else resume when the args are the checkpoint's and exec when they are not.
    ///
    /// # Errors
    /// An unknown value of the annotation.
    pub fn of(host: &Spec, parent: &ContainerInfo) -> Result<Self> {
        match spec::annotation(host, FORK) {
            Some("resume") => Ok(Self::Resume),
            Some("exec") => Ok(Self::Exec),
            Some("fresh") => Ok(Self::Fresh),
            Some(other) => Err(Error::InvalidArgument(format!(
                "annotation {FORK}={other:?}: resume, exec and fresh are possible"
            ))),
            None if spec::args(host) == parent.args => Ok(Self::Resume),
            None => Ok(Self::Exec),
        }
    }
}

/// Opens the checkpoint a container is forked from and says whether this host may run it. Blocks while an imported one is unpacked.
///
/// # Errors
/// It is damaged or incompatible; nothing was started.
pub fn open(description: &RootfsDescription) -> Result<Option<Checkpoint>> {
    let Some((top, bases)) = description.checkpoints.split_last() else {
        return Ok(None);
    };
    let unpack = |snapshot: &PathBuf| {
        pack::ensure_unpacked(snapshot).map_err(|e| Error::CheckpointUnusable {
            path: snapshot.clone(),
            reason: chain(&e),
        })
    };
    let directory = unpack(top)?;
    let bases = bases.iter().map(unpack).collect::<Result<Vec<_>>>()?;
    open_directory(&directory, &bases).map(Some)
}

/// The same for a checkpoint directory.
///
/// # Errors
/// See [`open`].
pub fn open_directory(directory: &Path, bases: &[PathBuf]) -> Result<Checkpoint> {
    let unusable = |reason: String| Error::CheckpointUnusable {
        path: directory.to_owned(),
        reason,
    };
    let checkpoint = Checkpoint::open(directory, bases).map_err(|e| unusable(chain(&e)))?;
    compat::check(&checkpoint.manifest, &HostFacts::detect()).map_err(|e| unusable(chain(&e)))?;
    let manifest = &checkpoint.manifest;
    if manifest.vm.agent_generation > protocol::GENERATION {
        let (theirs, ours) = (manifest.vm.agent_generation, protocol::GENERATION);
        return Err(unusable(format!(
            "its agent speaks generation {theirs} of the protocol, this shim {ours}; use a newer shim"
        )));
    }
    if manifest.containers.is_empty() {
        return Err(unusable("it holds no container".into()));
    }
    Ok(checkpoint)
}

/// Compares the read-only disk with the one the checkpoint was made on.
///
/// # Errors
/// They differ.
pub fn check_read_only(checkpoint: &Checkpoint, images: &[LayerImage]) -> Result<()> {
    let unusable = |reason: String| Error::CheckpointUnusable {
        path: checkpoint.directory.clone(),
        reason,
    };
    let listed = checkpoint.manifest.read_only_disks.iter().find(|d| d.id == READ_ONLY);
    let listed = listed.ok_or_else(|| unusable(format!("it has no disk {READ_ONLY}")))?;
    let here: Vec<&str> = images.iter().map(|i| i.sha256.as_str()).collect();
    if listed.files_sha256 != here {
        return Err(unusable(
            "the image's layers on this node are not those it was made on (another release of mkfs.erofs packs them differently)".into(),
        ));
    }
    Ok(())
}

/// The request that restores it.
///
/// # Errors
/// A file cannot be opened.
pub fn request(
    checkpoint: &Checkpoint,
    images: &[LayerImage],
    disk: Option<&WritableDisk>,
    console: &Path,
) -> Result<(RestoreRequest, FdList)> {
    let mut fds = FdList::default();
    let state = fds.open(&checkpoint.state_path())?;
    let memory_index = fds.open(&checkpoint.memory_index_path())?;
    let memory_files = checkpoint
        .memory_files
        .iter()
        .map(|path| fds.open(path))
        .collect::<Result<Vec<_>>>()?;
    let mut disks: Vec<DiskConfig> = vec![read_only_config(images.iter().map(|i| i.path.as_path()), &mut fds)?];
    if let Some(disk) = disk {
        disks.push(disk.config(&mut fds)?);
    }
    let console = fds.push(open_console(console)?);
    // Only a hint, and no earlier fork may have left one.
    let touched = File::open(checkpoint.directory.join(TOUCHED))
        .ok()
        .map(|file| fds.push(file));
    let id = checkpoint.manifest.id.clone();
    Ok((
        RestoreRequest {
            checkpoint: id,
            state,
            memory_index,
            memory_files,
            disks,
            nets: Vec::new(),
            console,
            touched,
        },
        fds,
    ))
}

/// Has a fork that goes on write down which pages it changed, for those after it, unless that was done. Whatever fails, they are
/// only slower.
pub async fn note_touched(vm: &dyn Vm, directory: &Path) {
    if directory.join(TOUCHED).exists() {
        return;
    }
    let noted = async {
        // Without a name until it is whole, so that nothing of it stays if we are killed.
        let file = File::options()
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .mode(0o600)
            .open(directory)
            .map_err(Error::file("make a file in", directory))?;
        let copy = file.try_clone().map_err(Error::file("open a file in", directory))?;
        vm.request(Request::Touched { file: 0 }, vec![copy.into()]).await?;
        let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = directory.join(TOUCHED);
        linkat(AT_FDCWD, unnamed.as_str(), AT_FDCWD, &name, AtFlags::AT_SYMLINK_FOLLOW)
            .map_err(|e| Error::file("name", name)(e.into()))?;
        Ok::<_, Error>(())
    };
    if let Err(error) = noted.await {
        debug!(error = error.text(), "the pages that forks change are not noted");
    }
}

/// What a fork can read about itself in `/run/ramet/fork.json`.
#[derive(Debug, Serialize)]
struct ForkJson<'a> {
    id: &'a str,
    namespace: &'a str,
    checkpoint: &'a str,
    args: Vec<String>,
    env: Vec<String>,
    hostname: &'a str,
    annotations: BTreeMap<&'a str, &'a str>,
}

/// The new identity of a fork.
///
/// # Errors
/// The host gives no random numbers.
pub fn renewal(
    host: &Spec,
    id: &str,
    namespace: &str,
    manifest: &CheckpointManifest,
    parent: &ContainerInfo,
) -> Result<RenewRequest> {
    let mut random = [0; 96];
    let source = "/dev/urandom";
    File::open(source)
        .and_then(|mut f| f.read_exact(&mut random))
        .map_err(Error::file("read", source))?;
    let (entropy, rest) = random.split_at(64);
    let (machine, boot) = rest.split_at(16);
    let hostname = host.hostname().clone().unwrap_or_else(|| id.chars().take(63).collect());
    let fork = ForkJson {
        id,
        namespace,
        checkpoint: manifest.id.as_str(),
        args: spec::args(host),
        env: host
            .process()
            .as_ref()
            .and_then(|p| p.env().clone())
            .unwrap_or_default(),
        hostname: &hostname,
        annotations: host
            .annotations()
            .iter()
            .flatten()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect(),
    };
    let mut request = RenewRequest::new();
    request.fork_json = serde_json::to_vec(&fork).map_err(|e| Error::Internal(format!("fork.json: {e}")))?;
    request.entropy = entropy.to_vec();
    request.realtime_ns = realtime_ns();
    request.hostname = hostname;
    request.machine_id = checkpoint::manifest::hex(machine);
    request.boot_id = uuid(boot);
    request.container_id = parent.guest_id.clone();
    // Nothing of the parent's network stays; the fork's own comes when its namespace is complete, before its processes run.
    request.network = Some(NetworkConfig::new()).into();
    Ok(request)
}

/// `CLOCK_REALTIME` in nanoseconds.
#[must_use]
pub fn realtime_ns() -> i64 {
    clock_gettime(ClockId::CLOCK_REALTIME).map_or(0, |t| t.num_nanoseconds())
}

/// A version 4 UUID from 16 random bytes.
fn uuid(bytes: &[u8]) -> String {
    let mut bytes = bytes.to_vec();
    if let Some(b) = bytes.get_mut(6) {
        *b = (*b & 0x0f) | 0x40;
    }
    if let Some(b) = bytes.get_mut(8) {
        *b = (*b & 0x3f) | 0x80;
    }
    let hex = checkpoint::manifest::hex(&bytes);
    let part = |range| hex.get(range).unwrap_or_default();
    format!(
        "{}-{}-{}-{}-{}",
        part(0..8),
        part(8..12),
        part(12..16),
        part(16..20),
        part(20..32)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(args: &str, annotations: &str) -> Spec {
        let json = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":{args},"cwd":"/","user":{{"uid":0,"gid":0}}}},"annotations":{{{annotations}}}}}"#
        );
        spec::parse(json.as_bytes()).unwrap()
    }

    fn parent() -> ContainerInfo {
        ContainerInfo {
            guest_id: "p".into(),
            container_id: "p".into(),
            args: vec!["python3".into()],
            terminal: false,
            read_only_disk: READ_ONLY.into(),
            writable_disk: "rw0".into(),
        }
    }

    #[test]
    fn mode_follows_annotation_then_args() {
        let cases = [
            (host(r#"["python3"]"#, ""), ForkMode::Resume),
            (host(r#"["sh"]"#, ""), ForkMode::Exec),
            (host(r#"["python3"]"#, r#""io.ramet.fork":"fresh""#), ForkMode::Fresh),
            (host(r#"["sh"]"#, r#""io.ramet.fork":"resume""#), ForkMode::Resume),
        ];
        for (spec, mode) in cases {
            assert_eq!(ForkMode::of(&spec, &parent()).unwrap(), mode);
        }
        assert!(ForkMode::of(&host(r#"["a"]"#, r#""io.ramet.fork":"clone""#), &parent()).is_err());
    }

    #[test]
    fn uuids_are_version_4() {
        let text = uuid(&[0xff; 16]);
        assert_eq!(text, "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
