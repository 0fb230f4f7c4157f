//! What containerd gives as the container's root filesystem, and the read-only disk made from it.
//!
//! An overlay mount whose `source` is a snapshot directory of ours (it holds `rootfs.json`) is never mounted: the layers' EROFS images
//! go to the guest as they are. Anything else is mounted on `bundle/rootfs`, packed into one EROFS image beside the bundle, and unmounted.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::layers::{self, LayerError, LayerImage};
use checkpoint::rootfs::{self, RootfsDescription};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use protocol::containerd::api::Mount;

/// Why there is no root filesystem.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// No mounts at all.
    #[error("containerd gave no mounts for it")]
    Empty,
    /// `rootfs.json`.
    #[error("description")]
    Description(#[from] rootfs::RootfsError),
    /// An EROFS image.
    #[error("read-only disk")]
    Layer(#[from] LayerError),
    /// A mount of another snapshotter.
    #[error("mount {kind} {source_name} on {target}")]
    Mount {
        /// Filesystem type.
        kind: String,
        /// Mount source.
        source_name: String,
        /// Where.
        target: PathBuf,
        /// Why not.
        #[source]
        source: nix::Error,
    },
    /// A directory or file of ours.
    #[error("{action} {path}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

/// The root filesystem as containerd describes it.
#[derive(Clone, Debug)]
pub enum Rootfs {
    /// A snapshot of `ramet-snapshotter`.
    Ours {
        /// The active snapshot's directory.
        snapshot: PathBuf,
        /// What it is made of.
        description: RootfsDescription,
    },
    /// Another snapshotter's mounts.
    Foreign(Vec<Mount>),
}

/// Tells which it is.
///
/// # Errors
/// No mounts, or a damaged description.
pub fn classify(mounts: &[Mount]) -> Result<Rootfs, RootfsError> {
    let last = mounts.last().ok_or(RootfsError::Empty)?;
    let source = Path::new(&last.source);
    if last.type_ == "overlay" && source.is_absolute() {
        match RootfsDescription::read(source) {
            Ok(description) => {
                return Ok(Rootfs::Ours {
                    snapshot: source.to_owned(),
                    description,
                });
            }
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Rootfs::Foreign(mounts.to_vec()))
}

/// Where the shim keeps the files of a foreign root filesystem: containerd's own work directory of the task, which it removes with the
/// bundle.
#[must_use]
pub fn work_dir(bundle: &Path) -> PathBuf {
    fs::canonicalize(bundle.join("work")).unwrap_or_else(|_| bundle.join("work"))
}

/// The files of the read-only disk, in order. Blocks while images are made.
///
/// # Errors
/// See [`RootfsError`]; nothing stays mounted.
pub fn read_only_disk(rootfs: &Rootfs, bundle: &Path) -> Result<Vec<LayerImage>, RootfsError> {
    match rootfs {
        Rootfs::Ours { description, .. } => Ok(layers::ensure_rootfs_disk(description)?),
        Rootfs::Foreign(mounts) => {
            let target = bundle.join("rootfs");
            let work = work_dir(bundle);
            for dir in [&target, &work] {
                fs::create_dir_all(dir).map_err(|source| RootfsError::File {
                    action: "make",
                    path: dir.clone(),
                    source,
                })?;
            }
            let _mounted = mount_all(mounts, &target)?;
            Ok(vec![layers::pack_directory(&target, &work.join("rootfs.erofs"))?])
        }
    }
}

/// Mounts stacked on one directory; unmounted when dropped.
#[derive(Debug)]
pub struct MountGuard {
    target: PathBuf,
    count: usize,
}

impl Drop for MountGuard {
    fn drop(&mut self) {
        for _ in 0..self.count {
            let _ = umount2(&self.target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        }
    }
}

fn mount_all(mounts: &[Mount], target: &Path) -> Result<MountGuard, RootfsError> {
    let mut guard = MountGuard {
        target: target.to_owned(),
        count: 0,
    };
    for m in mounts {
        let options = parse_options(&m.options);
        // Only reading is needed, and an overlay without its upper directory being written needs no work either.
        let kind = if m.type_ == "bind" || m.type_ == "rbind" {
            "none"
        } else {
            m.type_.as_str()
        };
        mount(
            Some(m.source.as_str()),
            target,
            Some(kind),
            options.flags,
            Some(options.data.as_str()),
        )
        .map_err(|source| RootfsError::Mount {
            kind: m.type_.clone(),
            source_name: m.source.clone(),
            target: target.to_owned(),
            source,
        })?;
        guard.count += 1;
    }
    Ok(guard)
}

/// Unmounts whatever is on the bundle's `rootfs`; for cleaning up after a dead shim.
pub fn unmount_leftovers(bundle: &Path) {
    let target = bundle.join("rootfs");
    while umount2(&target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_ok() {}
}

struct Options {
    flags: MsFlags,
    data: String,
}

/// Splits fstab-style options into flags and filesystem data.
fn parse_options(options: &[String]) -> Options {
    let mut flags = MsFlags::empty();
    let mut data: Vec<&str> = Vec::new();
    for option in options {
        match option.as_str() {
            "bind" => flags |= MsFlags::MS_BIND,
            "rbind" => flags |= MsFlags::MS_BIND | MsFlags::MS_REC,
            "ro" => flags |= MsFlags::MS_RDONLY,
            "rw" => flags -= MsFlags::MS_RDONLY,
            "nosuid" => flags |= MsFlags::MS_NOSUID,
            "nodev" => flags |= MsFlags::MS_NODEV,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "relatime" => flags |= MsFlags::MS_RELATIME,
            other => data.push(other),
        }
    }
    Options {
        flags,
        data: data.join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlay(source: &str) -> Mount {
        let mut mount = Mount::new();
        mount.type_ = "overlay".into();
        mount.source = source.into();
        mount
    }

    #[test]
    fn overlay_of_others_is_foreign() {
        assert!(matches!(classify(&[overlay("overlay")]), Ok(Rootfs::Foreign(_))));
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            classify(&[overlay(dir.path().to_str().unwrap())]),
            Ok(Rootfs::Foreign(_))
        ));
        assert!(matches!(classify(&[]), Err(RootfsError::Empty)));
    }

    #[test]
    fn a_damaged_description_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(rootfs::FILE_NAME), b"{").unwrap();
        assert!(matches!(
            classify(&[overlay(dir.path().to_str().unwrap())]),
            Err(RootfsError::Description(_))
        ));
    }

    #[test]
    fn options_are_split() {
        let options = parse_options(&["rbind".into(), "ro".into(), "lowerdir=/a:/b".into(), "index=off".into()]);
        assert_eq!(options.flags, MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY);
        assert_eq!(options.data, "lowerdir=/a:/b,index=off");
    }
}
