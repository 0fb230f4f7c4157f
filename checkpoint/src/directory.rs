//! A checkpoint as files: its own directory, those of its bases, and what in them a VM is restored from.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::disk::{self, LayerFiles};
use crate::manifest::{
    CheckpointId, CheckpointManifest, MEMORY_FILE, MEMORY_INDEX_FILE, ManifestError, STATE_FILE, WritableDisk,
};
use crate::memory::{MemoryError, MemoryIndex, PAGE_SIZE};

/// Why a checkpoint directory cannot be restored from.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// No or no valid manifest.
    #[error("cannot use checkpoint in {directory}")]
    Manifest {
        /// Where.
        directory: PathBuf,
        /// Why.
        #[source]
        source: ManifestError,
    },
    /// A file cannot be looked at.
    #[error("checkpoint {id}: cannot read {path}")]
    File {
        /// Of which checkpoint.
        id: CheckpointId,
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file has another size than it must have.
    #[error(
        "checkpoint {id}: {path} has {found} bytes, expected {expected}: it is truncated or damaged; pull or make the image again"
    )]
    Size {
        /// Of which checkpoint.
        id: CheckpointId,
        /// Which file.
        path: PathBuf,
        /// What it must have.
        expected: u64,
        /// What it has.
        found: u64,
    },
    /// The memory index.
    #[error("checkpoint {id}: cannot use {path}")]
    Memory {
        /// Of which checkpoint.
        id: CheckpointId,
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// The memory index is for another amount of memory.
    #[error("checkpoint {id}: its memory index covers {index} bytes of guest memory, its manifest says {manifest}")]
    MemorySize {
        /// Of which checkpoint.
        id: CheckpointId,
        /// By the index.
        index: u64,
        /// By the manifest.
        manifest: u64,
    },
    /// A base is not among the directories.
    #[error("checkpoint {id} needs checkpoint {base}, which is not among the layers of its image")]
    BaseMissing {
        /// Which needs it.
        id: CheckpointId,
        /// What is missing.
        base: CheckpointId,
    },
}

/// A checkpoint whose files were found and have the right sizes.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its own directory.
    pub directory: PathBuf,
    /// Its manifest.
    pub manifest: CheckpointManifest,
    /// Its memory index.
    pub memory_index: MemoryIndex,
    /// One memory file for each source of the index.
    pub memory_files: Vec<PathBuf>,
    /// Writable disks, in the manifest's order.
    pub disks: Vec<DiskFiles>,
}

/// The sealed layers of a writable disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFiles {
    /// Serial.
    pub id: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bottom to top.
    pub layers: Vec<LayerFiles>,
}

impl Checkpoint {
    /// Opens the checkpoint in `directory`, whose bases are in `bases` (checkpoint directories, bottom to top). Every size is compared
    /// with what manifest and index say, so a damaged file is refused here and not by a fault in the guest.
    ///
    /// # Errors
    /// Names the file or the base that is missing or wrong.
    pub fn open(directory: &Path, bases: &[PathBuf]) -> Result<Self, CheckpointError> {
        let manifest = read_manifest(directory)?;
        let mut resolver = Resolver {
            own: directory,
            id: manifest.id.clone(),
            known: HashMap::new(),
            unread: bases,
        };
        resolver.regular_file(directory, STATE_FILE)?;
        let (memory_index, memory_files) = resolver.memory(&manifest)?;
        let disks = manifest
            .writable_disks
            .iter()
            .map(|disk| resolver.disk(disk))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            directory: directory.to_owned(),
            manifest,
            memory_index,
            memory_files,
            disks,
        })
    }

    /// The saved state.
    #[must_use]
    pub fn state_path(&self) -> PathBuf {
        self.directory.join(STATE_FILE)
    }

    /// The file of [`Self::memory_index`].
    #[must_use]
    pub fn memory_index_path(&self) -> PathBuf {
        self.directory.join(MEMORY_INDEX_FILE)
    }
}

fn read_manifest(directory: &Path) -> Result<CheckpointManifest, CheckpointError> {
    CheckpointManifest::read(directory).map_err(|source| CheckpointError::Manifest {
        directory: directory.to_owned(),
        source,
    })
}

/// Finds the directories of bases. Manifests are read from the top down and only until every name is found.
struct Resolver<'a> {
    own: &'a Path,
    id: CheckpointId,
    known: HashMap<CheckpointId, PathBuf>,
    unread: &'a [PathBuf],
}

impl Resolver<'_> {
    fn directory_of(&mut self, checkpoint: Option<&CheckpointId>) -> Result<PathBuf, CheckpointError> {
        let Some(base) = checkpoint else {
            return Ok(self.own.to_owned());
        };
        while !self.known.contains_key(base) {
            let Some((directory, rest)) = self.unread.split_last() else {
                return Err(CheckpointError::BaseMissing {
                    id: self.id.clone(),
                    base: base.clone(),
                });
            };
            self.unread = rest;
            self.known
                .entry(read_manifest(directory)?.id)
                .or_insert_with(|| directory.clone());
        }
        Ok(self.known[base].clone())
    }

    /// Path and length of a file that must be a regular one.
    fn regular_file(&self, directory: &Path, name: &str) -> Result<(PathBuf, u64), CheckpointError> {
        let path = directory.join(name);
        let checked = fs::symlink_metadata(&path).and_then(|metadata| {
            let not_regular = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            if metadata.is_file() {
                Ok(metadata.len())
            } else {
                Err(not_regular)
            }
        });
        match checked {
            Ok(length) => Ok((path, length)),
            Err(source) => Err(CheckpointError::File {
                id: self.id.clone(),
                path,
                source,
            }),
        }
    }

    fn memory(&mut self, manifest: &CheckpointManifest) -> Result<(MemoryIndex, Vec<PathBuf>), CheckpointError> {
        let (path, _) = self.regular_file(self.own, MEMORY_INDEX_FILE)?;
        let wrong = |source| CheckpointError::Memory {
            id: manifest.id.clone(),
            path: path.clone(),
            source,
        };
        let file = File::open(&path).map_err(|source| wrong(MemoryError::Read(source)))?;
        let index = MemoryIndex::read_from(file).map_err(wrong)?;
        if index.pages * PAGE_SIZE != manifest.vm.memory_bytes {
            let (index, manifest_bytes) = (index.pages * PAGE_SIZE, manifest.vm.memory_bytes);
            return Err(CheckpointError::MemorySize {
                id: self.id.clone(),
                index,
                manifest: manifest_bytes,
            });
        }
        let mut files = Vec::with_capacity(index.sources.len());
        for source in &index.sources {
            let directory = self.directory_of(source.checkpoint.as_ref())?;
            let (path, found) = self.regular_file(&directory, MEMORY_FILE)?;
            self.check_size(&path, found, source.bytes)?;
            files.push(path);
        }
        Ok((index, files))
    }

    fn disk(&mut self, disk: &WritableDisk) -> Result<DiskFiles, CheckpointError> {
        let mut layers = Vec::with_capacity(disk.layers.len());
        for layer in &disk.layers {
            let directory = self.directory_of(layer.checkpoint.as_ref())?;
            let (bitmap, found) = self.regular_file(&directory, &format!("{}.bitmap", layer.name))?;
            let expected = disk::Bitmap::bytes_for(disk.size_bytes / disk::BLOCK_SIZE);
            self.check_size(&bitmap, found, expected)?;
            let (data, found) = self.regular_file(&directory, &format!("{}.data", layer.name))?;
            self.check_size(&data, found, disk.size_bytes)?;
            layers.push(LayerFiles { data, bitmap });
        }
        Ok(DiskFiles {
            id: disk.id.clone(),
            size_bytes: disk.size_bytes,
            layers,
        })
    }

    fn check_size(&self, path: &Path, found: u64, expected: u64) -> Result<(), CheckpointError> {
        if found == expected {
            return Ok(());
        }
        Err(CheckpointError::Size {
            id: self.id.clone(),
            path: path.to_owned(),
            expected,
            found,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;
    use crate::manifest::DiskLayer;
    use crate::memory::Extent;
    use crate::test_data::{DISK_BYTES, MEMORY_BYTES, id, write_checkpoint};

    fn refused(directory: &Path, bases: &[PathBuf]) -> String {
        Checkpoint::open(directory, bases).unwrap_err().to_string()
    }

    fn resize(path: &Path, bytes: u64) {
        OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(bytes)
            .unwrap();
    }

    /// A checkpoint in `name` whose memory and disk start with those of checkpoint aaaa….
    fn write_fork(directory: &Path, base: &Path, base_id: CheckpointId, digit: char) {
        let mut manifest = write_checkpoint(directory);
        let below = Checkpoint::open(base, &[]).unwrap().memory_index;
        let changed = [Extent {
            start: 8,
            pages: 2,
            source: 0,
            source_page: 0,
        }];
        let index = MemoryIndex::overlay(&below, &base_id, 2 * PAGE_SIZE, &changed).unwrap();
        fs::write(directory.join(MEMORY_INDEX_FILE), index.encode().unwrap()).unwrap();
        resize(&directory.join(MEMORY_FILE), 2 * PAGE_SIZE);
        manifest.id = id(digit);
        manifest.base = Some(base_id.clone());
        manifest.writable_disks[0].layers.insert(
            0,
            DiskLayer {
                checkpoint: Some(base_id),
                name: "rw0.0".to_owned(),
            },
        );
        manifest.writable_disks[0].layers[1].name = "rw0.1".to_owned();
        for kind in ["data", "bitmap"] {
            fs::rename(
                directory.join(format!("rw0.0.{kind}")),
                directory.join(format!("rw0.1.{kind}")),
            )
            .unwrap();
        }
        manifest.write(directory).unwrap();
    }

    #[test]
    fn a_checkpoint_alone_names_its_own_files() {
        let temporary = tempfile::tempdir().unwrap();
        write_checkpoint(temporary.path());
        let checkpoint = Checkpoint::open(temporary.path(), &[]).unwrap();
        assert_eq!(checkpoint.memory_files, [temporary.path().join("memory")]);
        assert_eq!(checkpoint.memory_index.pages * PAGE_SIZE, MEMORY_BYTES);
        assert_eq!(checkpoint.disks.len(), 1);
        assert_eq!(checkpoint.disks[0].layers[0].data, temporary.path().join("rw0.0.data"));
    }

    #[test]
    fn a_fork_of_a_fork_finds_the_files_of_its_bases() {
        let temporary = tempfile::tempdir().unwrap();
        let [base, fork] = ["base", "fork"].map(|name| temporary.path().join(name));
        write_checkpoint(&base);
        write_fork(&fork, &base, id('a'), 'b');
        let checkpoint = Checkpoint::open(&fork, std::slice::from_ref(&base)).unwrap();
        assert_eq!(checkpoint.memory_files, [fork.join("memory"), base.join("memory")]);
        let data: Vec<_> = checkpoint.disks[0]
            .layers
            .iter()
            .map(|layer| layer.data.clone())
            .collect();
        assert_eq!(data, [base.join("rw0.0.data"), fork.join("rw0.1.data")]);
        let message = refused(&fork, &[]);
        assert!(message.contains(&format!("needs checkpoint {}", id('a'))), "{message}");
    }

    #[test]
    fn a_truncated_memory_file_is_refused_with_both_sizes() {
        let temporary = tempfile::tempdir().unwrap();
        write_checkpoint(temporary.path());
        resize(&temporary.path().join("memory"), 299 * PAGE_SIZE);
        let message = refused(temporary.path(), &[]);
        assert!(
            message.contains("/memory has 1224704 bytes, expected 1228800"),
            "{message}"
        );
    }

    #[test]
    fn a_layer_of_the_wrong_length_is_refused() {
        for (name, bytes, expected) in [
            ("rw0.0.data", DISK_BYTES - 4096, DISK_BYTES),
            ("rw0.0.data", DISK_BYTES + 1, DISK_BYTES),
            ("rw0.0.bitmap", 1023, 1024),
            ("rw0.0.bitmap", 4096, 1024),
        ] {
            let temporary = tempfile::tempdir().unwrap();
            write_checkpoint(temporary.path());
            resize(&temporary.path().join(name), bytes);
            let message = refused(temporary.path(), &[]);
            let part = format!("{name} has {bytes} bytes, expected {expected}:");
            assert!(message.contains(&part), "{message}");
        }
    }

    #[test]
    fn missing_files_are_named() {
        for name in [
            STATE_FILE,
            MEMORY_FILE,
            MEMORY_INDEX_FILE,
            "rw0.0.data",
            "rw0.0.bitmap",
            "manifest.json",
        ] {
            let temporary = tempfile::tempdir().unwrap();
            write_checkpoint(temporary.path());
            fs::remove_file(temporary.path().join(name)).unwrap();
            let error = Checkpoint::open(temporary.path(), &[]).unwrap_err();
            let message = format!(
                "{error} {:?}",
                std::error::Error::source(&error).map(ToString::to_string)
            );
            assert!(message.contains(name), "{message}");
        }
    }

    #[test]
    fn an_index_for_another_machine_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        write_checkpoint(temporary.path());
        let index = MemoryIndex::full(100, 300 * PAGE_SIZE, Vec::new()).unwrap();
        fs::write(temporary.path().join(MEMORY_INDEX_FILE), index.encode().unwrap()).unwrap();
        assert!(refused(temporary.path(), &[]).contains("covers 409600 bytes"));
    }
}
