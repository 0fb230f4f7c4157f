//! Saving a running sandbox: quiesce, save, thaw, finish, and the manifest last.
//!
//! Whatever fails, the files of the attempt are removed and the container runs on; only a VMM that died takes it along.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use checkpoint::compat::HostFacts;
use checkpoint::layers::LayerImage;
use checkpoint::manifest::{
    CheckpointId, CheckpointManifest, ContainerInfo, FORMAT, MEMORY_FILE, MEMORY_INDEX_FILE, ReadOnlyDisk, STATE_FILE,
    SaveInfo, VmShape,
};
use protocol::containerd::ttrpc;
use serde::{Deserialize, Serialize};
use tracing::info;
use vmm::control::{Reply, Request, SaveReport, SaveRequest};

use crate::boot::Shape;
use crate::disks::{FdList, READ_ONLY, WRITABLE, WritableDisk};
use crate::error::{Error, Result};
use crate::guest::{Guest, while_alive};
use crate::vm::Vm;
use crate::volumes::{Volumes, Where};

/// Name of the pointer that `ctr task checkpoint` gets in its directory.
pub const POINTER_FILE: &str = "ramet-checkpoint.json";

/// How long the VMM may take to cut memory, state and disks: milliseconds, unless the host is in trouble.
const CUT: Duration = Duration::from_secs(120);
/// How long it may take to write the memory out, while the guest runs on.
const WRITE: Duration = Duration::from_secs(3600);

/// What containerd keeps of a checkpoint made with `ctr task checkpoint`: where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pointer {
    /// Always 1.
    pub version: u32,
    /// Which.
    pub id: CheckpointId,
    /// Its directory on this node.
    pub directory: PathBuf,
    /// Directories of its bases, bottom to top.
    pub bases: Vec<PathBuf>,
}

/// What the machine of a sandbox was made of.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Size.
    pub shape: Shape,
    /// `uname -r` in the guest.
    pub guest_kernel: String,
    /// Of its agent.
    pub agent_generation: u32,
    /// Number of network devices.
    pub nets: u32,
    /// Files of the read-only disk.
    pub read_only: Vec<LayerImage>,
    /// The writable disk, if it has one.
    pub disk: Option<WritableDisk>,
    /// The checkpoint it was restored from.
    pub base: Option<CheckpointId>,
    /// Directories of the checkpoints it was restored from, bottom to top.
    pub base_directories: Vec<PathBuf>,
}

/// Removes the files of an attempt unless it succeeded.
struct Attempt<'a> {
    directory: &'a Path,
    made_directory: bool,
    done: bool,
}

impl<'a> Attempt<'a> {
    fn begin(directory: &'a Path) -> Result<Self> {
        let made_directory = !directory.exists();
        fs::create_dir_all(directory).map_err(Error::file("make", directory))?;
        let occupied = directory.join(checkpoint::manifest::FILE_NAME);
        if occupied.exists() {
            return Err(Error::InvalidArgument(format!(
                "{} already holds a checkpoint",
                directory.display()
            )));
        }
        Ok(Self {
            directory,
            made_directory,
            done: false,
        })
    }

    fn create(&self, name: &str) -> Result<File> {
        let path = self.directory.join(name);
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .map_err(Error::file("create", path))
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        for entry in fs::read_dir(self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let ours = [STATE_FILE, MEMORY_FILE, MEMORY_INDEX_FILE].contains(&name.as_ref())
                || name.starts_with(checkpoint::manifest::FILE_NAME)
                || name.starts_with(&format!("{WRITABLE}."));
            if ours {
                let _ = fs::remove_file(entry.path());
            }
        }
        if self.made_directory {
            let _ = fs::remove_dir(self.directory);
        }
    }
}

/// Saves the sandbox into `directory`.
///
/// # Errors
/// Nothing is left in `directory`, and the container runs on if its machine lives.
pub async fn save(
    vm: &dyn Vm,
    guest: &Guest,
    volumes: &Volumes,
    machine: &mut Machine,
    container: ContainerInfo,
    directory: &Path,
) -> Result<CheckpointManifest> {
    if !volumes.are_served() {
        let reason = "the server of its host directories has ended, so they could not be mounted again";
        return Err(Error::CheckpointNotMade(reason.into()));
    }
    let mut attempt = Attempt::begin(directory)?;
    let files = [
        attempt.create(STATE_FILE)?,
        attempt.create(MEMORY_FILE)?,
        attempt.create(MEMORY_INDEX_FILE)?,
    ];
    let begun = Instant::now();
    let in_guest = container.guest_id.split('/').next().unwrap_or_default();
    let saving = save_frozen(vm, guest, (volumes, in_guest), machine, &files).await;
    // Undoes the quiescing whether the save began or not; a part of it may have been done even when it failed.
    let thawed = while_alive(vm, guest.thaw(&[])).await;
    let frozen_us = micros(begun);
    saving?;
    thawed?;
    let report = finish(vm).await?;
    let kept = machine.disk.as_ref().map(|disk| disk.keep_in(directory)).transpose()?;
    let manifest = manifest(machine, container, kept.into_iter().collect(), &report, frozen_us)?;
    let (manifest, path) = (manifest, directory.to_owned());
    let manifest = tokio::task::spawn_blocking(move || -> Result<CheckpointManifest> {
        for file in &files {
            file.sync_all().map_err(Error::file("write to disk", &path))?;
        }
        manifest
            .write(&path)
            .map_err(|e| Error::CheckpointNotMade(crate::error::chain(&e)))?;
        Ok(manifest)
    })
    .await
    .map_err(|e| Error::Internal(e.to_string()))??;
    attempt.done = true;
    info!(
        id = manifest.id.as_str(),
        pause_us = manifest.save.pause_us,
        frozen_us,
        memory_bytes = manifest.save.memory_bytes,
        incremental = manifest.save.incremental,
        "checkpoint made"
    );
    Ok(manifest)
}

/// Freezes the containers and has the VMM cut memory, state and disks. Returns when the vCPUs run again.
async fn save_frozen(
    vm: &dyn Vm,
    guest: &Guest,
    (volumes, container): (&Volumes, &str),
    machine: &mut Machine,
    files: &[File; 3],
) -> Result<()> {
    while_alive(vm, guest.quiesce()).await?;
    // What belongs to this host is in no checkpoint. It comes back before a process runs on.
    match volumes.detach(guest, container).await {
        Ok(()) => {}
        // Somebody holds one: nothing was done.
        Err(error) if error.code() == ttrpc::Code::FAILED_PRECONDITION => return Err(error),
        Err(error) => return without_volumes(vm, &error).await,
    }
    let saved = cut(vm, machine, files).await;
    let attached = volumes
        .attach(vm, machine.agent_generation, container, Where::InContainer)
        .await;
    match attached {
        Ok(()) => saved,
        Err(error) => saved.and(without_volumes(vm, &error).await),
    }
}

/// Ends a machine whose container has lost its host directories: what it would write now would not get there.
async fn without_volumes(vm: &dyn Vm, error: &Error) -> Result<()> {
    vm.kill().await;
    Err(Error::CheckpointNotMade(format!(
        "the container was ended, for its host directories could not be mounted again: {}",
        error.text()
    )))
}

/// Has the VMM cut memory, state and disks.
async fn cut(vm: &dyn Vm, machine: &mut Machine, files: &[File; 3]) -> Result<()> {
    let mut fds = FdList::default();
    let mut places = [0; 3];
    for (place, file) in places.iter_mut().zip(files) {
        *place = fds.push(file.try_clone().map_err(Error::file("duplicate", "checkpoint file"))?);
    }
    let [state, memory, memory_index] = places;
    let seal = machine.disk.as_ref().map(|disk| disk.next(&mut fds)).transpose()?;
    let request = SaveRequest {
        state,
        memory,
        memory_index,
        seal: seal.into_iter().collect(),
        resume: true,
    };
    let asked = vm.request(Request::Save(request), fds.into_inner());
    let Ok(reply) = tokio::time::timeout(CUT, asked).await else {
        // Whether its disk goes on in the next layer is unknown from here on, so nothing more may be written to it.
        vm.kill().await;
        return Err(Error::CheckpointNotMade(format!(
            "the VMM did not answer within {} s; it was ended, for the state of its disk is unknown",
            CUT.as_secs()
        )));
    };
    match reply {
        Ok(Reply::Saving { .. }) => {
            if let Some(disk) = &mut machine.disk {
                disk.sealed();
            }
            Ok(())
        }
        Ok(other) => Err(Error::Internal(format!("the VMM answered Save with {other:?}"))),
        Err(error) => {
            if let Some(disk) = &machine.disk {
                disk.drop_next();
            }
            Err(error.into())
        }
    }
}

async fn finish(vm: &dyn Vm) -> Result<SaveReport> {
    let asked = vm.request(Request::FinishSave, Vec::new());
    let finished = tokio::time::timeout(WRITE, asked)
        .await
        .map_err(|_| Error::CheckpointNotMade(format!("its memory was not written within {} s", WRITE.as_secs())))?;
    match finished? {
        Reply::Saved(report) => Ok(report),
        other => Err(Error::Internal(format!("the VMM answered FinishSave with {other:?}"))),
    }
}

fn manifest(
    machine: &Machine,
    container: ContainerInfo,
    writable_disks: Vec<checkpoint::manifest::WritableDisk>,
    report: &SaveReport,
    frozen_us: u64,
) -> Result<CheckpointManifest> {
    let id = CheckpointId::random().map_err(Error::file("read", "/dev/urandom"))?;
    let files_sha256 = machine.read_only.iter().map(|image| image.sha256.clone()).collect();
    Ok(CheckpointManifest {
        format: FORMAT,
        id,
        base: machine.base.clone(),
        created: rfc3339(std::time::SystemTime::now()),
        host: HostFacts::detect().requirements(),
        vm: VmShape {
            vcpus: machine.shape.vcpus,
            memory_bytes: machine.shape.memory_bytes,
            guest_kernel: machine.guest_kernel.clone(),
            agent_generation: machine.agent_generation,
            nets: machine.nets,
        },
        read_only_disks: vec![ReadOnlyDisk {
            id: READ_ONLY.to_owned(),
            files_sha256,
        }],
        writable_disks,
        containers: vec![container],
        save: SaveInfo {
            pause_us: report.pause_us,
            frozen_us,
            memory_bytes: report.memory_bytes,
            memory_write_us: report.memory_write_us,
            incremental: report.incremental,
        },
        packed: Vec::new(),
    })
}

/// Writes the pointer for containerd.
///
/// # Errors
/// The file cannot be written.
pub fn write_pointer(path: &Path, pointer: &Pointer) -> Result<()> {
    let file = path.join(POINTER_FILE);
    let text = serde_json::to_vec_pretty(pointer).map_err(|e| Error::Internal(e.to_string()))?;
    fs::create_dir_all(path).map_err(Error::file("make", path))?;
    fs::write(&file, text).map_err(Error::file("write", file))
}

/// Reads a pointer that containerd brings back.
///
/// # Errors
/// There is none, or it is damaged.
pub fn read_pointer(path: &Path) -> Result<Pointer> {
    use std::io::Read;
    let file = path.join(POINTER_FILE);
    let mut text = Vec::new();
    File::open(&file)
        .and_then(|f| f.take(1 << 20).read_to_end(&mut text))
        .map_err(Error::file("open", &file))?;
    let unusable = |reason: String| Error::CheckpointUnusable {
        path: file.clone(),
        reason,
    };
    let pointer: Pointer = serde_json::from_slice(&text).map_err(|e| unusable(e.to_string()))?;
    if pointer.version != 1 {
        return Err(unusable(format!("version {}, this build knows 1", pointer.version)));
    }
    Ok(pointer)
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// UTC with seconds, as in `2026-11-30T14:13:00Z`.
fn rfc3339(time: std::time::SystemTime) -> String {
    chrono::DateTime::<chrono::Utc>::from(time).to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn times_are_written_as_rfc_3339() {
        let at = |s| rfc3339(UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59Z");
    }

    #[test]
    fn a_failed_attempt_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("checkpoint");
        {
            let attempt = Attempt::begin(&target).unwrap();
            attempt.create(STATE_FILE).unwrap();
            fs::write(target.join("rw0.0.data"), b"x").unwrap();
        }
        assert!(!target.exists());
    }

    #[test]
    fn an_existing_checkpoint_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(checkpoint::manifest::FILE_NAME), b"{}").unwrap();
        assert!(Attempt::begin(dir.path()).is_err());
        assert!(dir.path().join(checkpoint::manifest::FILE_NAME).exists());
    }

    #[test]
    fn pointers_survive_the_trip() {
        let dir = tempfile::tempdir().unwrap();
        let pointer = Pointer {
            version: 1,
            id: CheckpointId::random().unwrap(),
            directory: "/a".into(),
            bases: vec!["/b".into()],
        };
        write_pointer(dir.path(), &pointer).unwrap();
        assert_eq!(read_pointer(dir.path()).unwrap(), pointer);
        fs::write(dir.path().join(POINTER_FILE), b"{}").unwrap();
        assert!(read_pointer(dir.path()).is_err());
    }
}
