//! Snapshots: metadata and directories, changed together.
//!
//! The metadata is the truth. A directory is complete before its record is committed and is taken away after its record is gone, so
//! what a crash leaves is at most a directory that no record names; [`Store::open`] throws those away.

mod dirs;
mod remove;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use checkpoint::rootfs::{self, RootfsDescription, RootfsError};

use crate::live;
use crate::metadata::{Info, Kind, Metadata, MetadataError, Record, Tables, Time, Usage};
use crate::mounts::{self, Mount};
use crate::usage;
use dirs::Dirs;

/// Labels of a snapshot.
pub type Labels = BTreeMap<String, String>;

/// Most snapshots in a chain; overlayfs itself takes 500 lower directories.
pub const MAX_DEPTH: usize = checkpoint::layers::MAX_LAYERS;

/// Why a call was refused. Every variant but the last two is the caller's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Unknown key or name.
    #[error("snapshot {name:?} does not exist")]
    NotFound {
        /// It.
        name: String,
    },
    /// Key or name is taken.
    #[error("snapshot {name:?} already exists")]
    Exists {
        /// It.
        name: String,
    },
    /// Only committed snapshots can be parents.
    #[error("parent {parent:?} is not a committed snapshot")]
    ParentNotCommitted {
        /// The parent.
        parent: String,
    },
    /// Only active snapshots can be committed.
    #[error("snapshot {name:?} is not active")]
    NotActive {
        /// It.
        name: String,
    },
    /// Committed snapshots have no mounts.
    #[error("snapshot {name:?} is committed: only active snapshots and views have mounts")]
    NotMountable {
        /// It.
        name: String,
    },
    /// Other snapshots are made on it.
    #[error("cannot remove snapshot {name:?}: it has children")]
    HasChildren {
        /// It.
        name: String,
    },
    /// The request makes no sense.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: String,
    },
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
    /// The files of a container that runs in a virtual machine.
    #[error("read the files of container {name:?} in its virtual machine")]
    Running {
        /// The snapshot.
        name: String,
        /// Why they cannot be had.
        #[source]
        source: io::Error,
    },
    /// The description for the shim.
    #[error("describe the root filesystem")]
    Describe(#[from] RootfsError),
    /// The database.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
}

/// What is left to do for a committed snapshot, in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Derived {
    /// Its EROFS image.
    LayerImage,
    /// A checkpoint that came as a layer: unpack it.
    UnpackedCheckpoint,
    /// A checkpoint that was made here.
    Nothing,
}

/// A committed snapshot, for the background worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// What it needs.
    pub derived: Derived,
}

/// The snapshots below one root directory. Calls may come from any thread.
pub struct Store {
    dirs: Dirs,
    metadata: Metadata,
    writable_bytes: u64,
}

impl Store {
    /// Opens or creates it, and brings directories and metadata into agreement. Another process that has it open keeps us out.
    ///
    /// # Errors
    /// The root cannot be used, or the metadata is in use or damaged.
    pub fn open(root: &Path, writable_bytes: u64) -> Result<Self, StoreError> {
        let dirs = Dirs::open(root)?;
        let metadata = Metadata::open(&dirs.root().join("metadata.redb"))?;
        let store = Self {
            dirs,
            metadata,
            writable_bytes,
        };
        store.reconcile()?;
        Ok(store)
    }

    fn reconcile(&self) -> Result<(), StoreError> {
        let all = self.metadata.all()?;
        let ids: BTreeSet<u64> = all.iter().map(|(_, record)| record.id).collect();
        self.dirs.discard_unknown(&ids)?;
        for (name, record) in all {
            if self.dirs.of(record.id).join("fs").is_dir() {
                continue;
            }
            tracing::error!(name, directory = %self.dirs.of(record.id).display(), "the directory of a snapshot is gone");
            if record.kind != Kind::Committed {
                self.metadata.write(|tables| tables.take(&name, &record))?;
            }
        }
        Ok(())
    }

    /// Makes an active snapshot or a view on a committed parent (or on nothing) and returns its mounts.
    ///
    /// # Errors
    /// The key is taken, or the parent unknown or not committed.
    pub fn prepare(&self, kind: Kind, key: &str, parent: &str, labels: Labels) -> Result<Vec<Mount>, StoreError> {
        check_name(key)?;
        let parent = (!parent.is_empty()).then(|| parent.to_owned());
        self.metadata.write(|tables| {
            if tables.get(key)?.is_some() {
                return Err(StoreError::Exists { name: key.to_owned() });
            }
            let chain = parent_chain(tables, parent.as_deref())?;
            let now = Time::now();
            let record = Record {
                id: tables.next_id()?,
                kind,
                parent,
                created: now,
                updated: now,
                labels,
                is_checkpoint: false,
                usage: None,
            };
            tables.put(key, &record)?;
            let description = (kind == Kind::Active && !chain.is_empty()).then(|| self.describe(&chain));
            let like = chain.first().map(|parent| self.dirs.of(parent.id).join("fs"));
            self.dirs
                .create(record.id, kind == Kind::Active, like.as_deref(), description.as_ref())?;
            Ok(self.mounts_of(&record, &chain))
        })
    }

    /// The mounts of an active snapshot or view. Those of a container that runs in a virtual machine show what it has written until now, and
    /// are only for reading.
    ///
    /// # Errors
    /// It is unknown or committed, or the virtual machine does not give its files.
    pub fn mounts(&self, key: &str) -> Result<Vec<Mount>, StoreError> {
        let mut chain = self.metadata.chain(key)?;
        if chain.is_empty() {
            return Err(StoreError::NotFound { name: key.to_owned() });
        }
        let record = chain.remove(0);
        if record.kind == Kind::Committed {
            return Err(StoreError::NotMountable { name: key.to_owned() });
        }
        let dir = self.dirs.of(record.id);
        let running = |source| StoreError::Running {
            name: key.to_owned(),
            source,
        };
        if record.kind == Kind::Active && live::bring(&dir).map_err(running)? {
            return Ok(vec![mounts::of_running(&dir, &self.lowers_of(&record, &chain))]);
        }
        Ok(self.mounts_of(&record, &chain))
    }

    /// Turns an active snapshot into the committed snapshot `name`. containerd holds its database lock meanwhile: nothing here
    /// depends on the size of the snapshot.
    ///
    /// # Errors
    /// The key is unknown or not active, or the name is taken.
    pub fn commit(&self, name: &str, key: &str, labels: Labels) -> Result<Committed, StoreError> {
        check_name(name)?;
        self.metadata.write(|tables| {
            let Some(old) = tables.get(key)? else {
                return Err(StoreError::NotFound { name: key.to_owned() });
            };
            if tables.get(name)?.is_some() {
                return Err(StoreError::Exists { name: name.to_owned() });
            }
            if old.kind != Kind::Active {
                return Err(StoreError::NotActive { name: key.to_owned() });
            }
            let dir = self.dirs.of(old.id);
            let derived = derived_of(&dir);
            let now = Time::now();
            tables.take(key, &old)?;
            let is_checkpoint = derived != Derived::LayerImage;
            let record = Record {
                kind: Kind::Committed,
                created: now,
                updated: now,
                labels,
                is_checkpoint,
                usage: None,
                ..old
            };
            tables.put(name, &record)?;
            Ok(Committed {
                name: name.to_owned(),
                dir,
                derived,
            })
        })
    }

    /// Removes a snapshot without children. Its directory is moved aside; [`Store::empty_trash`] deletes it.
    ///
    /// # Errors
    /// It is unknown or has children.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        let id = self.metadata.write(|tables| {
            let Some(record) = tables.get(name)? else {
                return Err(StoreError::NotFound { name: name.to_owned() });
            };
            if tables.has_children(name)? {
                return Err(StoreError::HasChildren { name: name.to_owned() });
            }
            tables.take(name, &record)?;
            Ok(record.id)
        })?;
        self.dirs.discard(id);
        Ok(())
    }

    /// What is known of a snapshot.
    ///
    /// # Errors
    /// It is unknown.
    pub fn stat(&self, name: &str) -> Result<Info, StoreError> {
        match self.metadata.get(name)? {
            Some(record) => Ok(record.into_info(name)),
            None => Err(StoreError::NotFound { name: name.to_owned() }),
        }
    }

    /// Changes labels: all of them, or those that `paths` name (`labels` or `labels.<key>`). Labels without a value are removed.
    ///
    /// # Errors
    /// It is unknown, or a path is anything else.
    pub fn update(&self, name: &str, labels: Labels, paths: &[String]) -> Result<Info, StoreError> {
        self.metadata.write(|tables| {
            let Some(mut record) = tables.get(name)? else {
                return Err(StoreError::NotFound { name: name.to_owned() });
            };
            if paths.is_empty() {
                record.labels.clone_from(&labels);
            }
            for path in paths {
                if path == "labels" {
                    record.labels.clone_from(&labels);
                } else if let Some(key) = path.strip_prefix("labels.") {
                    let value = labels.get(key).cloned().unwrap_or_default();
                    record.labels.insert(key.to_owned(), value);
                } else {
                    return Err(StoreError::Invalid {
                        what: format!("cannot update {path:?} of snapshot {name:?}"),
                    });
                }
            }
            record.labels.retain(|_, value| !value.is_empty());
            record.updated = Time::now();
            tables.put(name, &record)?;
            Ok(record.into_info(name))
        })
    }

    /// All snapshots, as they were at one moment.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub fn list(&self) -> Result<Vec<Info>, StoreError> {
        Ok(self
            .metadata
            .all()?
            .into_iter()
            .map(|(name, record)| record.into_info(&name))
            .collect())
    }

    /// What a snapshot takes on disk without its parents: its files, the writable disk of a VM and a checkpoint; not the EROFS image,
    /// which is made from the files. Counted once for committed snapshots.
    ///
    /// # Errors
    /// It is unknown, or its directory cannot be read.
    pub fn usage(&self, name: &str) -> Result<Usage, StoreError> {
        let Some(record) = self.metadata.get(name)? else {
            return Err(StoreError::NotFound { name: name.to_owned() });
        };
        match record.usage {
            Some(usage) => Ok(usage),
            None => self.count(name, &record),
        }
    }

    /// Counts a committed snapshot again, after its checkpoint was unpacked.
    ///
    /// # Errors
    /// As [`Store::usage`].
    pub fn recount(&self, name: &str) -> Result<Usage, StoreError> {
        let Some(record) = self.metadata.get(name)? else {
            return Err(StoreError::NotFound { name: name.to_owned() });
        };
        self.count(name, &record)
    }

    fn count(&self, name: &str, record: &Record) -> Result<Usage, StoreError> {
        let dir = self.dirs.of(record.id);
        let mut total = Usage::default();
        for part in ["fs", "disk", rootfs::CHECKPOINT_DIR] {
            match usage::of_tree(&dir.join(part)) {
                Ok(usage) => {
                    total.bytes += usage.bytes;
                    total.inodes += usage.inodes;
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(StoreError::Io {
                        action: "count",
                        path: dir.join(part),
                        source,
                    });
                }
            }
        }
        if record.kind == Kind::Committed {
            self.metadata.write(|tables| match tables.get(name)? {
                // It may have been removed, or even made again, meanwhile.
                Some(mut now) if now.id == record.id => {
                    now.usage = Some(total);
                    tables.put(name, &now)
                }
                _ => Ok(()),
            })?;
        }
        Ok(total)
    }

    /// Committed snapshots for which something is still to be made: what the background worker has to catch up on.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub fn unfinished(&self) -> Result<Vec<Committed>, StoreError> {
        let mut unfinished = Vec::new();
        for (name, record) in self.metadata.all()? {
            if record.kind != Kind::Committed {
                continue;
            }
            let dir = self.dirs.of(record.id);
            let (derived, file) = if record.is_checkpoint {
                (
                    derived_of(&dir),
                    Path::new(rootfs::CHECKPOINT_DIR).join(checkpoint::manifest::FILE_NAME),
                )
            } else {
                (Derived::LayerImage, checkpoint::layers::LAYER_FILE.into())
            };
            if !dir.join(file).exists() || record.usage.is_none() {
                unfinished.push(Committed { name, dir, derived });
            }
        }
        Ok(unfinished)
    }

    /// Deletes the directories of removed snapshots. What cannot be deleted stays for the next time.
    pub fn empty_trash(&self) {
        self.dirs.empty_trash();
    }

    fn mounts_of(&self, record: &Record, ancestors: &[Record]) -> Vec<Mount> {
        let lowers = self.lowers_of(record, ancestors);
        vec![mounts::for_snapshot(record.kind, &self.dirs.of(record.id), &lowers)]
    }

    fn lowers_of(&self, record: &Record, ancestors: &[Record]) -> Vec<PathBuf> {
        // A container sees the files of its image; a checkpoint layer holds the checkpoint and none of them. A view shows everything.
        let has_files = ancestors.iter().any(|ancestor| !ancestor.is_checkpoint);
        ancestors
            .iter()
            .filter(|ancestor| record.kind == Kind::View || !has_files || !ancestor.is_checkpoint)
            .map(|ancestor| self.dirs.of(ancestor.id).join("fs"))
            .collect()
    }

    fn describe(&self, chain: &[Record]) -> RootfsDescription {
        let dirs_of = |checkpoints: bool| {
            chain
                .iter()
                .rev()
                .filter(|r| r.is_checkpoint == checkpoints)
                .map(|r| self.dirs.of(r.id))
                .collect()
        };
        RootfsDescription {
            version: rootfs::VERSION,
            root: self.dirs.root().to_owned(),
            layers: dirs_of(false),
            checkpoints: dirs_of(true),
            writable_bytes: self.writable_bytes,
        }
    }
}

fn check_name(name: &str) -> Result<(), StoreError> {
    if name.is_empty() {
        return Err(StoreError::Invalid {
            what: "a snapshot needs a key or name".to_owned(),
        });
    }
    Ok(())
}

/// The parent and its ancestors, top to bottom.
fn parent_chain(tables: &Tables<'_>, parent: Option<&str>) -> Result<Vec<Record>, StoreError> {
    let Some(parent) = parent else { return Ok(Vec::new()) };
    let chain = tables.chain(parent)?;
    match chain.first() {
        None => Err(StoreError::NotFound {
            name: parent.to_owned(),
        }),
        Some(record) if record.kind != Kind::Committed => Err(StoreError::ParentNotCommitted {
            parent: parent.to_owned(),
        }),
        Some(_) if chain.len() > MAX_DEPTH => Err(StoreError::Invalid {
            what: format!(
                "parent {parent:?} is the top of {} snapshots: {MAX_DEPTH} are possible",
                chain.len()
            ),
        }),
        Some(_) => Ok(chain),
    }
}

/// What a directory that is being committed holds.
fn derived_of(dir: &Path) -> Derived {
    let packed = dir.join("fs").join(rootfs::PACKED_DIR);
    let is_file = |path: PathBuf| path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    let is_dir = |path: &Path| path.symlink_metadata().is_ok_and(|meta| meta.is_dir());
    if is_dir(&packed) && is_file(packed.join(checkpoint::manifest::FILE_NAME)) {
        Derived::UnpackedCheckpoint
    } else if is_file(dir.join(rootfs::CHECKPOINT_DIR).join(checkpoint::manifest::FILE_NAME)) {
        Derived::Nothing
    } else {
        Derived::LayerImage
    }
}

#[cfg(test)]
mod tests;
