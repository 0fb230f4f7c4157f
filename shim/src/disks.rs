//! The writable disk of a container: its stack of overlay layers on this host.
//!
//! Files that this container writes are generations in a directory of its own: `<g>.data` and `<g>.bitmap`. The highest generation is
//! the active layer; a checkpoint seals it and the next one begins.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use checkpoint::directory::Checkpoint;
use checkpoint::disk::{LayerFiles, MAX_LAYERS, link_layer, merge_layers};
use checkpoint::manifest::{self, CheckpointId, DiskLayer};
use vmm::control::{DiskBacking, DiskConfig, OverlayFiles, SealDisk};

use crate::error::{Error, Result};

/// Serial of the disk of read-only layers.
pub const READ_ONLY: &str = "ro0";
/// Serial of the writable disk.
pub const WRITABLE: &str = "rw0";

/// Descriptors that go with a request, and their places.
#[derive(Debug, Default)]
pub struct FdList(Vec<OwnedFd>);

impl FdList {
    /// Adds one and returns its place.
    pub fn push(&mut self, fd: impl Into<OwnedFd>) -> usize {
        self.0.push(fd.into());
        self.0.len() - 1
    }

    /// Opens a file for reading and adds it.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(&mut self, path: &Path) -> Result<usize> {
        Ok(self.push(File::open(path).map_err(Error::file("open", path))?))
    }

    fn open_layer(&mut self, files: &LayerFiles) -> Result<OverlayFiles> {
        Ok(OverlayFiles {
            data: self.open(&files.data)?,
            bitmap: self.open(&files.bitmap)?,
        })
    }

    fn open_active(&mut self, files: &LayerFiles) -> Result<OverlayFiles> {
        let mut open = |path: &Path| -> Result<usize> {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path);
            Ok(self.push(file.map_err(Error::file("open", path))?))
        };
        Ok(OverlayFiles {
            data: open(&files.data)?,
            bitmap: open(&files.bitmap)?,
        })
    }

    /// The list.
    #[must_use]
    pub fn into_inner(self) -> Vec<OwnedFd> {
        self.0
    }
}

/// Configuration of the read-only disk.
///
/// # Errors
/// A file cannot be opened.
pub fn read_only_config<'a>(files: impl Iterator<Item = &'a Path>, fds: &mut FdList) -> Result<DiskConfig> {
    let files = files.map(|path| fds.open(path)).collect::<Result<Vec<_>>>()?;
    Ok(DiskConfig {
        id: READ_ONLY.to_owned(),
        backing: DiskBacking::ReadOnly { files },
    })
}

/// A sealed layer of the stack.
#[derive(Clone, Debug)]
struct Sealed {
    files: LayerFiles,
    /// In which checkpoint it is already kept, under which name; `None`: nowhere but here.
    kept: Option<(CheckpointId, String)>,
}

/// The stack.
#[derive(Clone, Debug)]
pub struct WritableDisk {
    size_bytes: u64,
    directory: PathBuf,
    sealed: Vec<Sealed>,
    generation: u32,
}

impl WritableDisk {
    /// The disk of a container that starts cold: the empty filesystem, and whatever an earlier task of the same container wrote.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn cold(directory: &Path, template: LayerFiles, size_bytes: u64) -> Result<Self> {
        fs::create_dir_all(directory).map_err(Error::file("make", directory))?;
        let mut disk = Self {
            size_bytes,
            directory: directory.to_owned(),
            sealed: vec![Sealed {
                files: template,
                kept: None,
            }],
            generation: 0,
        };
        while disk.files(disk.generation + 1).data.exists() {
            disk.sealed.push(Sealed {
                files: disk.files(disk.generation),
                kept: None,
            });
            disk.generation += 1;
        }
        Ok(disk)
    }

    /// The disk of a fork: the checkpoint's layers under a new empty one. What an earlier task of the same container wrote is dropped, for
    /// its memory is gone.
    ///
    /// # Errors
    /// The directory cannot be used, or the checkpoint has no writable disk.
    pub fn forked(directory: &Path, base: &Checkpoint) -> Result<Option<Self>> {
        let Some((disk, listed)) = base.disks.first().zip(base.manifest.writable_disks.first()) else {
            return Ok(None);
        };
        match fs::remove_dir_all(directory) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::file("clear", directory)(e)),
        }
        fs::create_dir_all(directory).map_err(Error::file("make", directory))?;
        let kept = |layer: &DiskLayer| {
            (
                layer.checkpoint.clone().unwrap_or_else(|| base.manifest.id.clone()),
                layer.name.clone(),
            )
        };
        let sealed = disk
            .layers
            .iter()
            .zip(&listed.layers)
            .map(|(files, layer)| {
                let files = LayerFiles {
                    data: files.data.clone(),
                    bitmap: files.bitmap.clone(),
                };
                Sealed {
                    files,
                    kept: Some(kept(layer)),
                }
            })
            .collect();
        Ok(Some(Self {
            size_bytes: disk.size_bytes,
            directory: directory.to_owned(),
            sealed,
            generation: 0,
        }))
    }

    fn files(&self, generation: u32) -> LayerFiles {
        LayerFiles {
            data: self.directory.join(format!("{generation}.data")),
            bitmap: self.directory.join(format!("{generation}.bitmap")),
        }
    }

    /// Its configuration.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn config(&self, fds: &mut FdList) -> Result<DiskConfig> {
        let sealed = self
            .sealed
            .iter()
            .map(|layer| fds.open_layer(&layer.files))
            .collect::<Result<Vec<_>>>()?;
        let active = fds.open_active(&self.files(self.generation))?;
        let backing = DiskBacking::Writable {
            size_bytes: self.size_bytes,
            sealed,
            active,
        };
        Ok(DiskConfig {
            id: WRITABLE.to_owned(),
            backing,
        })
    }

    /// Makes the files of the next active layer.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn next(&self, fds: &mut FdList) -> Result<SealDisk> {
        self.drop_next();
        let next = fds.open_active(&self.files(self.generation + 1))?;
        Ok(SealDisk {
            id: WRITABLE.to_owned(),
            next,
        })
    }

    /// Removes the files of [`Self::next`] that will not be used.
    pub fn drop_next(&self) {
        let next = self.files(self.generation + 1);
        let _ = fs::remove_file(next.data);
        let _ = fs::remove_file(next.bitmap);
    }

    /// The VMM has sealed the active layer and writes to the next one.
    pub fn sealed(&mut self) {
        self.sealed.push(Sealed {
            files: self.files(self.generation),
            kept: None,
        });
        self.generation += 1;
    }

    /// Puts the sealed layers into a checkpoint directory as links, and returns the disk's entry for its manifest. The active layer is not
    /// part of it. A stack that has grown too high becomes one layer.
    ///
    /// # Errors
    /// A file can be neither linked nor copied.
    pub fn keep_in(&self, checkpoint: &Path) -> Result<manifest::WritableDisk> {
        let mut layers = Vec::with_capacity(self.sealed.len());
        if self.sealed.len() > MAX_LAYERS {
            let all: Vec<LayerFiles> = self.sealed.iter().map(|layer| layer.files.clone()).collect();
            let name = format!("{WRITABLE}.0");
            merge_layers(&all, checkpoint, &name, self.size_bytes)?;
            layers.push(DiskLayer { checkpoint: None, name });
        } else {
            for (n, layer) in self.sealed.iter().enumerate() {
                layers.push(match &layer.kept {
                    Some((id, name)) => DiskLayer {
                        checkpoint: Some(id.clone()),
                        name: name.clone(),
                    },
                    None => {
                        let name = format!("{WRITABLE}.{n}");
                        link_layer(&layer.files, checkpoint, &name)?;
                        DiskLayer { checkpoint: None, name }
                    }
                });
            }
        }
        Ok(manifest::WritableDisk {
            id: WRITABLE.to_owned(),
            size_bytes: self.size_bytes,
            layers,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(dir: &Path) -> LayerFiles {
        let files = LayerFiles {
            data: dir.join("t.data"),
            bitmap: dir.join("t.bitmap"),
        };
        fs::write(&files.data, vec![1; 4096]).unwrap();
        fs::write(&files.bitmap, [1]).unwrap();
        files
    }

    #[test]
    fn a_checkpoint_seals_and_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("disk");
        let mut disk = WritableDisk::cold(&own, template(dir.path()), 1 << 20).unwrap();
        disk.config(&mut FdList::default()).unwrap();
        disk.next(&mut FdList::default()).unwrap();
        disk.sealed();
        let kept = dir.path().join("checkpoint");
        fs::create_dir(&kept).unwrap();
        let entry = disk.keep_in(&kept).unwrap();
        assert_eq!(entry.layers.len(), 2);
        assert!(kept.join("rw0.0.data").exists() && kept.join("rw0.1.bitmap").exists());
        // The same container started again finds both generations.
        let again = WritableDisk::cold(&own, template(dir.path()), 1 << 20).unwrap();
        assert_eq!((again.generation, again.sealed.len()), (1, 2));
    }

    #[test]
    fn an_abandoned_next_layer_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("disk");
        let disk = WritableDisk::cold(&own, template(dir.path()), 1 << 20).unwrap();
        disk.next(&mut FdList::default()).unwrap();
        disk.drop_next();
        assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
    }
}
