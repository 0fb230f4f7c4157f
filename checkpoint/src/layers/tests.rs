use std::ffi::CString;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, SystemTime};

use super::*;

fn mkfs_found() -> bool {
    let found = MKFS_EROFS.command().is_ok();
    if !found {
        eprintln!("skipped: mkfs.erofs is not installed");
    }
    found
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

fn set_time(path: &Path, seconds: i64) {
    let time = TimeSpec::new(seconds, 0);
    utimensat(AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink).unwrap();
}

/// A tree with the kinds of files that layers have; `order` changes the order in which they are made and nothing else.
fn make_tree(dir: &Path, order: &[usize]) {
    let fs_dir = dir.join("fs");
    for name in ["etc", "opaque"] {
        fs::create_dir_all(fs_dir.join(name)).unwrap();
    }
    for i in order {
        let path = fs_dir.join("etc").join(format!("file{i}"));
        fs::write(&path, vec![u8::try_from(*i).unwrap(); 3000 * (i + 1)]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let deep = fs_dir.join(format!("dir{i}"));
        fs::create_dir(&deep).unwrap();
        symlink(format!("../etc/file{i}"), deep.join("link")).unwrap();
        fs::hard_link(&path, deep.join("hard")).unwrap();
        set_time(&path, 1_600_000_000);
        set_time(&deep.join("link"), 1_600_000_000);
        set_time(&deep, 1_600_000_000);
    }
    if is_root() {
        let whiteout = CString::new(fs_dir.join("gone").to_str().unwrap()).unwrap();
        nix::sys::stat::mknod(
            whiteout.as_c_str(),
            nix::sys::stat::SFlag::S_IFCHR,
            nix::sys::stat::Mode::empty(),
            0,
        )
        .unwrap();
        set_xattr(&fs_dir.join("opaque"), "trusted.overlay.opaque", "y");
    }
    set_time(&fs_dir.join("opaque"), 1_600_000_000);
    // The whiteout, `etc` and the root keep the present as their time, as what no tar mentions does.
}

fn set_xattr(path: &Path, name: &str, value: &str) {
    let status = Command::new("setfattr")
        .args(["-n", name, "-v", value])
        .arg(path)
        .status();
    if !status.is_ok_and(|s| s.success()) {
        eprintln!("not tested: extended attributes (setfattr is not installed)");
    }
}

#[test]
fn equal_trees_make_equal_images() {
    if !mkfs_found() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let (a, b) = (root.path().join("a"), root.path().join("b"));
    make_tree(&a, &[0, 1, 2, 3]);
    std::thread::sleep(Duration::from_millis(1100)); // the clock that must not show in the image has seconds
    make_tree(&b, &[3, 1, 0, 2]);
    let first = ensure_layer_image(&a).unwrap();
    let second = ensure_layer_image(&b).unwrap();
    assert_eq!(first.sha256, second.sha256);
    assert_eq!(fs::read(&first.path).unwrap(), fs::read(&second.path).unwrap());
    assert_eq!(fs::metadata(&first.path).unwrap().len() % 4096, 0);
    assert_eq!(fs::metadata(a.join("fs")).unwrap().mtime(), 0);
    assert_eq!(fs::metadata(a.join("fs/opaque")).unwrap().mtime(), 1_600_000_000);
}

#[test]
fn an_image_is_made_once_and_waiters_get_it() {
    if !mkfs_found() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    make_tree(root.path(), &[0, 1]);
    fs::write(root.path().join("layer.erofs.unfinished"), "left by a killed process").unwrap();
    let barrier = Barrier::new(4);
    let images: Vec<LayerImage> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    ensure_layer_image(root.path()).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(images.iter().all(|image| *image == images[0]));
    let made = fs::metadata(&images[0].path).unwrap();
    assert_eq!(ensure_layer_image(root.path()).unwrap(), images[0]);
    assert_eq!(fs::metadata(&images[0].path).unwrap().ino(), made.ino());
    let mut names: Vec<_> = fs::read_dir(root.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["fs", "layer.erofs", "layer.erofs.sha256"]);
}

#[test]
fn a_damaged_digest_or_size_makes_the_image_again() {
    if !mkfs_found() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    make_tree(root.path(), &[0]);
    let image = ensure_layer_image(root.path()).unwrap();
    fs::write(digest_path(&image.path), "nonsense").unwrap();
    assert_eq!(ensure_layer_image(root.path()).unwrap(), image);
    File::options()
        .write(true)
        .open(&image.path)
        .unwrap()
        .set_len(100)
        .unwrap();
    assert_eq!(ensure_layer_image(root.path()).unwrap(), image);
}

#[test]
fn a_failure_says_what_failed_and_leaves_nothing() {
    if !mkfs_found() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let error = pack_directory(&root.path().join("absent"), &root.path().join("out.erofs")).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("mkfs.erofs ended with"), "{cause}");
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_missing_tool_is_named_with_its_package() {
    let absent = Tool {
        name: "mkfs.absent",
        package: "absent-utils",
    };
    assert_eq!(
        absent.command().unwrap_err().to_string(),
        "mkfs.absent not found: install the package absent-utils"
    );
}

#[test]
fn versions_of_both_forms_are_read() {
    assert_eq!(
        find_version("mkfs.erofs (erofs-utils) 1.8.6\navailable compressors: lz4"),
        Some("1.8.6")
    );
    assert_eq!(find_version("usage: x\nmkfs.erofs 1.5\n"), Some("1.5"));
    assert_eq!(parse_version("1.8.6"), Some((1, 8)));
    assert!(parse_version("1.5").is_some_and(|v| v < MERGE_VERSION));
    assert_eq!(parse_version("of unknown version"), None);
}

#[test]
fn packing_a_directory_replaces_what_was_there() {
    if !mkfs_found() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    make_tree(root.path(), &[0]);
    let out = root.path().join("out.erofs");
    fs::write(&out, "old").unwrap();
    let image = pack_directory(&root.path().join("fs"), &out).unwrap();
    assert_eq!(image.path, out);
    assert_eq!(hex(&Sha256::digest(fs::read(&out).unwrap())), image.sha256);
}

fn description(root: &Path, layers: &[&str]) -> RootfsDescription {
    RootfsDescription {
        version: 1,
        root: root.to_owned(),
        layers: layers.iter().map(|name| root.join(name)).collect(),
        checkpoints: Vec::new(),
        writable_bytes: 1 << 30,
    }
}

#[test]
fn one_layer_needs_no_merging() {
    if !mkfs_found() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    make_tree(&root.path().join("1"), &[0]);
    let files = ensure_rootfs_disk(&description(root.path(), &["1"])).unwrap();
    assert_eq!(files, [ensure_layer_image(&root.path().join("1")).unwrap()]);
    assert!(matches!(
        ensure_rootfs_disk(&description(root.path(), &[])),
        Err(LayerError::LayerCount { layers: 0 })
    ));
}

/// Loop-mounts the concatenated files and unmounts when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(files: &[LayerImage], dir: &Path) -> Option<Self> {
        let flat = dir.join("flat");
        let mut all = Vec::new();
        for file in files {
            all.extend(fs::read(&file.path).unwrap());
        }
        fs::write(&flat, all).unwrap();
        let at = dir.join("mnt");
        fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "erofs", "-o", "loop,ro"])
            .arg(&flat)
            .arg(&at)
            .status();
        mounted.is_ok_and(|s| s.success()).then_some(Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn merged_layers_hide_and_replace_as_overlayfs_does() {
    if !mkfs_found() || !is_root() {
        eprintln!("skipped: needs root to make whiteouts and to mount");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    make_tree(&root.path().join("1"), &[0, 1]);
    let one = root.path().join("1/fs");
    fs::write(one.join("opaque/hidden"), "x").unwrap();
    fs::write(one.join("gone"), "x").err(); // a whiteout already in the lowest layer is as good as nothing
    make_tree(&root.path().join("2"), &[2]);
    let two = root.path().join("2/fs");
    fs::write(two.join("opaque/shown"), "new").unwrap();
    fs::write(two.join("etc/file1"), "replaced").unwrap();
    let files = match ensure_rootfs_disk(&description(root.path(), &["1", "2"])) {
        Err(LayerError::TooOld { found, .. }) => {
            eprintln!("skipped: mkfs.erofs {found} cannot merge layers");
            return;
        }
        other => other.unwrap(),
    };
    assert_eq!(files.len(), 3);
    assert_eq!(files[0].path, root.path().join("2/merged.erofs"));
    assert_eq!(
        ensure_rootfs_disk(&description(root.path(), &["1", "2"])).unwrap(),
        files
    );
    let Some(mounted) = Mounted::new(&files, root.path()) else {
        eprintln!("not tested: contents of the merged image (cannot loop-mount EROFS here)");
        return;
    };
    let at = &mounted.0;
    assert!(!at.join("gone").exists());
    assert!(!at.join("opaque/hidden").exists());
    assert_eq!(fs::read(at.join("opaque/shown")).unwrap(), b"new");
    assert_eq!(fs::read(at.join("etc/file1")).unwrap(), b"replaced");
    assert_eq!(fs::read(at.join("etc/file0")).unwrap(), vec![0; 3000]);
    assert_eq!(fs::read(at.join("dir2/hard")).unwrap(), vec![2; 9000]);
    let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    assert_eq!(fs::metadata(at.join("etc/file0")).unwrap().modified().unwrap(), old);
    assert_eq!(
        fs::metadata(at.join("etc/file0")).unwrap().permissions().mode() & 0o7777,
        0o640
    );
}

#[test]
fn zeros_take_no_room() {
    if !mkfs_found() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("fs");
    fs::create_dir(&source).unwrap();
    let mut content = vec![0; 8 << 20];
    content[5 << 20] = 1;
    fs::write(source.join("sparse"), &content).unwrap();
    let out = dir.path().join("out");
    let image = pack_directory(&source, &out).unwrap();
    let meta = fs::metadata(&out).unwrap();
    assert!(meta.len() > 8 << 20 && meta.blocks() * 512 < 1 << 20, "{meta:?}");
    let bytes = fs::read(&out).unwrap();
    assert!(
        bytes
            .windows(4096)
            .step_by(4096)
            .any(|block| block[0] == 1 && block[1..] == content[..4095])
    );
    assert_eq!(hex(&Sha256::digest(&bytes)), image.sha256);
}
