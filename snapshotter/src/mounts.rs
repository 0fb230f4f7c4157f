//! What containerd is to mount for a snapshot.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::rootfs::FILES_DIR;

use crate::metadata::Kind;

/// One mount, as in mount(8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// `overlay` or `bind`.
    pub kind: &'static str,
    /// What is bound; for the overlay of a container, the snapshot directory, where our shim finds `rootfs.json`.
    pub source: String,
    /// As in fstab.
    pub options: Vec<String>,
}

/// The mount of a snapshot in `dir` over the `fs` directories `lowers`, top to bottom.
pub(crate) fn for_snapshot(kind: Kind, dir: &Path, lowers: &[PathBuf]) -> Mount {
    let own = dir.join("fs");
    let bind = |source: &Path, mode: &str| Mount {
        kind: "bind",
        source: source.display().to_string(),
        options: vec![mode.to_owned(), "rbind".to_owned()],
    };
    match (kind, lowers) {
        (Kind::Active, []) => bind(&own, "rw"),
        (_, []) => bind(&own, "ro"),
        (Kind::Active, _) => {
            let mut options = overlay_options();
            options.push(format!("workdir={}", dir.join("work").display()));
            options.push(format!("upperdir={}", own.display()));
            options.push(lower_option(lowers));
            Mount {
                kind: "overlay",
                source: dir.display().to_string(),
                options,
            }
        }
        (_, [only]) => bind(only, "ro"),
        (_, _) => {
            let mut options = overlay_options();
            options.push(lower_option(lowers));
            Mount {
                kind: "overlay",
                source: "overlay".to_owned(),
                options,
            }
        }
    }
}

/// The mount of a container that runs in a virtual machine, whose files were brought to `dir`. Only for reading: the guest would not see
/// what is written here. It does not name the snapshot directory, for it is no root filesystem to start from.
pub(crate) fn of_running(dir: &Path, lowers: &[PathBuf]) -> Mount {
    let layers: Vec<PathBuf> = std::iter::once(dir.join(FILES_DIR))
        .chain(lowers.iter().cloned())
        .collect();
    let mut options = overlay_options();
    options.push("ro".to_owned());
    options.push(lower_option(&layers));
    Mount {
        kind: "overlay",
        source: "overlay".to_owned(),
        options,
    }
}

fn lower_option(lowers: &[PathBuf]) -> String {
    let paths: Vec<String> = lowers.iter().map(|path| path.display().to_string()).collect();
    format!("lowerdir={}", paths.join(":"))
}

/// Keeps the kernel's defaults from writing into upper directories what only makes sense on this host: a committed upper directory
/// becomes a layer elsewhere.
fn overlay_options() -> Vec<String> {
    let parameters = Path::new("/sys/module/overlay/parameters");
    let mut options = Vec::new();
    if parameters.join("index").exists() {
        options.push("index=off".to_owned());
    }
    if fs::read_to_string(parameters.join("redirect_dir")).is_ok_and(|value| value.trim() == "Y") {
        options.push("redirect_dir=off".to_owned());
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowers(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    fn mount(kind: Kind, lower: &[&str]) -> Mount {
        for_snapshot(kind, Path::new("/r/snapshots/9"), &lowers(lower))
    }

    #[test]
    fn without_parents_the_own_directory_is_bound() {
        assert_eq!(mount(Kind::Active, &[]).options, ["rw", "rbind"]);
        let view = mount(Kind::View, &[]);
        assert_eq!((view.kind, view.source.as_str()), ("bind", "/r/snapshots/9/fs"));
        assert_eq!(view.options, ["ro", "rbind"]);
    }

    #[test]
    fn an_active_snapshot_is_an_overlay_named_after_its_directory() {
        let active = mount(Kind::Active, &["/b", "/a"]);
        assert_eq!((active.kind, active.source.as_str()), ("overlay", "/r/snapshots/9"));
        let options = active.options.join(",");
        assert!(
            options.ends_with("workdir=/r/snapshots/9/work,upperdir=/r/snapshots/9/fs,lowerdir=/b:/a"),
            "{options}"
        );
    }

    #[test]
    fn the_files_of_a_running_container_are_only_read() {
        let mount = of_running(Path::new("/r/snapshots/9"), &lowers(&["/b", "/a"]));
        let options = mount.options.join(",");
        assert!(
            options.ends_with("ro,lowerdir=/r/snapshots/9/files:/b:/a") && !options.contains("upperdir"),
            "{options}"
        );
        assert_eq!(mount.source, "overlay");
    }

    #[test]
    fn views_have_nothing_to_write_to() {
        let one = mount(Kind::View, &["/a"]);
        assert_eq!((one.kind, one.source.as_str()), ("bind", "/a"));
        assert_eq!(one.options, ["ro", "rbind"]);
        let more = mount(Kind::View, &["/b", "/a"]).options.join(",");
        assert!(more.ends_with("lowerdir=/b:/a") && !more.contains("upperdir"), "{more}");
    }
}
