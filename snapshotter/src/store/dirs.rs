//! The directories below the root.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use checkpoint::rootfs::RootfsDescription;

use super::StoreError;
use super::remove::remove_tree;

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

/// Names of directories that are not complete begin with this.
const NEW: &str = "new-";

/// Where snapshots live.
pub(super) struct Dirs {
    root: PathBuf,
    snapshots: PathBuf,
    trash: PathBuf,
    emptying: Mutex<()>,
}

impl Dirs {
    pub(super) fn open(root: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(root).map_err(io_error("create", root))?;
        let root = root.canonicalize().map_err(io_error("resolve", root))?;
        if root
            .to_str()
            .is_none_or(|text| text.contains([':', ',', '\\']) || text.chars().any(char::is_control))
        {
            // These separate mount options and lower directories.
            let what = format!("the root {root:?} has a colon, comma, backslash or control character in its path");
            return Err(StoreError::Invalid { what });
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).map_err(io_error("protect", &root))?;
        let (snapshots, trash) = (root.join("snapshots"), root.join("trash"));
        for dir in [&snapshots, &trash] {
            match DirBuilder::new().mode(0o700).create(dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io_error("create", dir)(e)),
                _ => {}
            }
        }
        Ok(Self {
            root,
            snapshots,
            trash,
            emptying: Mutex::default(),
        })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn of(&self, id: u64) -> PathBuf {
        self.snapshots.join(id.to_string())
    }

    /// Makes the directory of a snapshot under another name and renames it: it is there as a whole or not at all.
    pub(super) fn create(
        &self,
        id: u64,
        writable: bool,
        like: Option<&Path>,
        description: Option<&RootfsDescription>,
    ) -> Result<(), StoreError> {
        let unfinished = self.snapshots.join(format!("{NEW}{id}"));
        let dir = self.of(id);
        // A transaction that failed after this had its number taken back.
        self.discard_path(&unfinished);
        self.discard_path(&dir);
        let made = fill(&unfinished, writable, like, description)
            .and_then(|()| fs::rename(&unfinished, &dir).map_err(io_error("rename to", &dir)));
        if made.is_err() {
            self.discard_path(&unfinished);
        }
        made
    }

    /// Moves a snapshot's directory aside.
    pub(super) fn discard(&self, id: u64) {
        self.discard_path(&self.of(id));
    }

    /// Moves everything aside that belongs to none of the snapshots.
    pub(super) fn discard_unknown(&self, ids: &BTreeSet<u64>) -> Result<(), StoreError> {
        for entry in fs::read_dir(&self.snapshots).map_err(io_error("list", &self.snapshots))? {
            let entry = entry.map_err(io_error("list", &self.snapshots))?;
            let id = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if id.is_none_or(|id| !ids.contains(&id)) {
                tracing::info!(directory = %entry.path().display(), "discarding what an interrupted call left");
                self.discard_path(&entry.path());
            }
        }
        Ok(())
    }

    /// Nobody waits for this to work: what stays is found at the next start.
    fn discard_path(&self, path: &Path) {
        for n in 0_u32.. {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                return;
            };
            let to = self.trash.join(format!("{name}.{n}"));
            if to.symlink_metadata().is_ok() {
                continue;
            }
            match fs::rename(path, &to) {
                Err(e) if matches!(e.raw_os_error(), Some(nix::libc::ENOTEMPTY | nix::libc::EEXIST)) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => return,
                Err(error) => {
                    tracing::warn!(directory = %path.display(), %error, "cannot move aside");
                    return;
                }
                Ok(()) => return,
            }
        }
    }

    pub(super) fn empty_trash(&self) {
        // Two at once would be in each other's way.
        let _alone = self.emptying.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(entries) = fs::read_dir(&self.trash) else { return };
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            let deleted = if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
                remove_tree(&path)
            } else {
                fs::remove_file(&path)
            };
            if let Err(error) = deleted
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "cannot delete now, will be tried again");
            }
        }
    }
}

fn fill(
    dir: &Path,
    writable: bool,
    like: Option<&Path>,
    description: Option<&RootfsDescription>,
) -> Result<(), StoreError> {
    let make = |path: &Path, mode| {
        DirBuilder::new().create(path).map_err(io_error("create", path))?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(io_error("set the mode of", path))
    };
    make(dir, 0o700)?;
    let files = dir.join("fs");
    make(&files, 0o755)?;
    if let Some(like) = like {
        let meta = fs::metadata(like).map_err(io_error("look at", like))?;
        // Only a change of owner needs privilege.
        let now = fs::metadata(&files).map_err(io_error("look at", &files))?;
        if (meta.uid(), meta.gid()) != (now.uid(), now.gid()) {
            chown(&files, Some(meta.uid()), Some(meta.gid())).map_err(io_error("set the owner of", &files))?;
        }
        let mode = fs::Permissions::from_mode(meta.mode() & 0o7777);
        fs::set_permissions(&files, mode).map_err(io_error("set the mode of", &files))?;
    }
    if writable {
        make(&dir.join("work"), 0o711)?;
    }
    if let Some(description) = description {
        description.write(dir)?;
    }
    Ok(())
}
