//! How much disk a directory tree takes.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::metadata::Usage;

/// Allocated bytes and inodes below and including `dir`; hard links count once. What vanishes meanwhile counts as absent.
pub(crate) fn of_tree(dir: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    let mut linked = HashSet::new();
    let mut pending = vec![dir.to_owned()];
    let mut first = true;
    while let Some(path) = pending.pop() {
        let meta = match fs::symlink_metadata(&path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound && !first => continue,
            Err(e) => return Err(e),
        };
        first = false;
        if meta.nlink() > 1 && !meta.is_dir() && !linked.insert((meta.dev(), meta.ino())) {
            continue;
        }
        usage.inodes += 1;
        usage.bytes += meta.blocks() * 512;
        if meta.is_dir() {
            match fs::read_dir(&path) {
                Ok(entries) => pending.extend(entries.filter_map(Result::ok).map(|entry| entry.path())),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_count_once_and_holes_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let empty = of_tree(dir.path()).unwrap();
        assert_eq!(empty.inodes, 1);
        fs::write(dir.path().join("a"), vec![1; 100_000]).unwrap();
        fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
        fs::File::create(dir.path().join("sparse"))
            .unwrap()
            .set_len(1 << 30)
            .unwrap();
        let usage = of_tree(dir.path()).unwrap();
        assert_eq!(usage.inodes, 3);
        assert!(
            (100_000..300_000).contains(&(usage.bytes - empty.bytes)),
            "{}",
            usage.bytes
        );
        assert!(of_tree(&dir.path().join("absent")).is_err());
    }
}
