//! Deletes directory trees of any depth.
//!
//! A container can nest directories deeper than this process has descriptors or stack for. So a directory's subdirectories are moved up
//! to the top before it is removed, and no more than two are open at once. Links are never followed.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

/// Deletes `path` and everything below it. What vanishes meanwhile is fine.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    let top = match open_directory(AT_FDCWD, path.as_os_str()) {
        Err(Errno::ENOENT) => return Ok(()),
        top => top?,
    };
    let mut moved = 0;
    loop {
        let mut empty = true;
        for entry in entries(&top)? {
            remove_entry(&top, &entry?.file_name(), &mut moved)?;
            empty = false;
        }
        // What was moved up while the directory was read may have been passed over.
        if empty {
            break;
        }
    }
    match fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn open_directory(parent: impl AsFd, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}

fn entries(directory: &OwnedFd) -> io::Result<fs::ReadDir> {
    fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

/// Removes a name in `top`; directories that it holds are moved to `top`.
fn remove_entry(top: &OwnedFd, name: &OsStr, moved: &mut u64) -> io::Result<()> {
    if remove_file(top, name)? {
        return Ok(());
    }
    let directory = open_directory(top, name)?;
    for entry in entries(&directory)? {
        let inner = entry?.file_name();
        if !remove_file(&directory, &inner)? {
            move_up(&directory, &inner, top, moved)?;
        }
    }
    match unlinkat(top, name, UnlinkatFlags::RemoveDir) {
        // Something was passed over; the next round finds it.
        Ok(()) | Err(Errno::ENOENT | Errno::ENOTEMPTY) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether it is gone; not if it is a directory.
fn remove_file(parent: &OwnedFd, name: &OsStr) -> io::Result<bool> {
    match unlinkat(parent, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(Errno::EISDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn move_up(from: &OwnedFd, name: &OsStr, top: &OwnedFd, moved: &mut u64) -> io::Result<()> {
    loop {
        *moved += 1;
        match renameat(from, name, top, format!("moved-{moved}").as_str()) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            // The container has used the name itself.
            Err(Errno::EEXIST | Errno::ENOTEMPTY | Errno::ENOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::mkdirat;

    use super::*;

    #[test]
    fn a_tree_deeper_than_descriptors_and_stack_is_deleted() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let mut directory = open_directory(AT_FDCWD, tree.as_os_str()).unwrap();
        for _ in 0..2_500 {
            mkdirat(&directory, "d", Mode::S_IRWXU).unwrap();
            directory = open_directory(&directory, OsStr::new("d")).unwrap();
        }
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        remove_tree(&tree).unwrap();
    }

    #[test]
    fn wide_trees_go_and_links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let outside = root.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "precious").unwrap();
        let tree = root.path().join("tree");
        for n in 0..20 {
            for m in 0..20 {
                let inner = tree.join(format!("{n}/{m}/moved-{n}"));
                fs::create_dir_all(&inner).unwrap();
                fs::write(inner.join("file"), "x").unwrap();
                symlink(&outside, inner.join("link")).unwrap();
            }
        }
        fs::create_dir_all(tree.join("moved-1/x")).unwrap();
        fs::write(tree.join("moved-2"), "x").unwrap();
        symlink(&outside, tree.join("link")).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"precious");
        symlink(&outside, &tree).unwrap();
        assert!(remove_tree(&tree).is_err(), "a link is no tree");
    }
}
