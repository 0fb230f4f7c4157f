use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use proptest::prelude::*;

use super::*;

const BLOCKS: u64 = 45;
const SIZE: u64 = BLOCKS * BLOCK_SIZE;

/// What a layer holds, as the simplest thing that can be right.
type Model = BTreeMap<u64, u8>;

fn write_layer(dir: &Path, name: &str, model: &Model) -> LayerFiles {
    let files = create_empty_layer(dir, name, SIZE).unwrap();
    let data = OpenOptions::new().write(true).open(&files.data).unwrap();
    let mut bitmap = Bitmap::empty(BLOCKS);
    for (block, byte) in model {
        data.write_all_at(&[*byte; BLOCK], block * BLOCK_SIZE).unwrap();
        bitmap.set(*block);
    }
    fs::write(&files.bitmap, bitmap.bytes()).unwrap();
    files
}

fn read_layer(files: &LayerFiles) -> Model {
    let bitmap = check_layer(files, SIZE).unwrap();
    let data = File::open(&files.data).unwrap();
    let mut model = Model::new();
    for block in (0..BLOCKS).filter(|block| bitmap.holds(*block)) {
        let mut bytes = [0; BLOCK];
        data.read_exact_at(&mut bytes, block * BLOCK_SIZE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        model.insert(block, bytes[0]);
    }
    model
}

fn models() -> impl Strategy<Value = Vec<Model>> {
    proptest::collection::vec(proptest::collection::btree_map(0..BLOCKS, any::<u8>(), 0..30), 0..5)
}

proptest! {
    #[test]
    fn a_merged_layer_reads_as_the_stack(models in models()) {
        let dir = tempfile::tempdir().unwrap();
        let layers: Vec<_> =
            models.iter().enumerate().map(|(i, model)| write_layer(dir.path(), &format!("l{i}"), model)).collect();
        let merged = merge_layers(&layers, dir.path(), "merged", SIZE).unwrap();
        let mut expected = Model::new();
        for model in &models {
            expected.extend(model);
        }
        prop_assert_eq!(read_layer(&merged), expected);
        for (files, model) in layers.iter().zip(&models) {
            prop_assert_eq!(&read_layer(files), model);
        }
        prop_assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2 * models.len() + 2);
    }

    #[test]
    fn a_copied_layer_is_equal(model in proptest::collection::btree_map(0..BLOCKS, any::<u8>(), 0..30)) {
        let dir = tempfile::tempdir().unwrap();
        let layer = write_layer(dir.path(), "a", &model);
        let copy = LayerFiles::at(dir.path(), "b").unwrap();
        copy_sparse(&layer.data, &copy.data).unwrap();
        copy_sparse(&layer.bitmap, &copy.bitmap).unwrap();
        prop_assert_eq!(fs::read(&copy.data).unwrap(), fs::read(&layer.data).unwrap());
        prop_assert_eq!(read_layer(&copy), model);
    }

    #[test]
    fn any_bitmap_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..12), blocks in 1_u64..80) {
        let held = |block: u64| bytes.get(byte(block)).is_some_and(|b| b >> (block % 8) & 1 == 1);
        let past_end = (blocks..96).any(held);
        match Bitmap::from_bytes(bytes.clone(), blocks) {
            None => prop_assert!(past_end),
            Some(bitmap) => {
                prop_assert!(!past_end);
                let expected: Vec<u64> = (0..blocks).filter(|b| held(*b)).collect();
                prop_assert_eq!(bitmap.runs().flatten().collect::<Vec<_>>(), expected.clone());
                prop_assert_eq!(bitmap.count(), expected.len() as u64);
                prop_assert_eq!(bitmap.last(), expected.last().copied());
            }
        }
    }
}

fn byte(block: u64) -> usize {
    usize::try_from(block / 8).unwrap()
}

#[test]
fn links_share_the_file_and_replace_old_names() {
    let dir = tempfile::tempdir().unwrap();
    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    let layer = write_layer(dir.path(), "a", &Model::from([(1, 7)]));
    for _ in 0..2 {
        let link = link_layer(&layer, &other, "base").unwrap();
        assert_eq!(
            fs::metadata(&link.data).unwrap().ino(),
            fs::metadata(&layer.data).unwrap().ino()
        );
        assert_eq!(fs::read_dir(&other).unwrap().count(), 2);
    }
    // A new layer under a linked name must not write the sealed one.
    create_empty_layer(&other, "base", SIZE).unwrap();
    assert_eq!(read_layer(&layer), Model::from([(1, 7)]));
}

#[test]
fn damaged_layers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let layer = write_layer(dir.path(), "a", &Model::from([(44, 7)]));
    let message = || check_layer(&layer, SIZE).unwrap_err().to_string();
    let data = OpenOptions::new().write(true).open(&layer.data).unwrap();
    data.set_len(SIZE - 1).unwrap();
    assert!(message().contains("shorter"));
    data.set_len(SIZE + 1).unwrap();
    assert!(message().contains("longer than the disk"));
    data.set_len(SIZE).unwrap();
    fs::write(&layer.bitmap, [0xff; 6]).unwrap();
    assert!(message().contains("beyond the end"));
    fs::write(&layer.bitmap, vec![0; 5000]).unwrap();
    assert!(message().contains("longer than"));
    fs::write(&layer.bitmap, []).unwrap();
    data.set_len(0).unwrap();
    assert_eq!(check_layer(&layer, SIZE).unwrap().count(), 0);
}

#[test]
fn names_cannot_leave_the_directory() {
    for bad in ["", "..", ".hidden", "a/b", "A", "a b", &"x".repeat(65)] {
        assert!(LayerFiles::at(Path::new("/d"), bad).is_err(), "{bad:?}");
    }
    assert_eq!(
        LayerFiles::at(Path::new("/d"), "rw0.1").unwrap().data,
        Path::new("/d/rw0.1.data")
    );
}

#[test]
fn sizes_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    for bad in [0, 1, 4096, MIN_WRITABLE_BYTES + 1, MAX_BYTES + 4096] {
        assert!(
            matches!(ensure_ext4_template(dir.path(), bad), Err(DiskError::Size { .. })),
            "{bad}"
        );
    }
}

#[test]
fn the_template_is_an_empty_ext4_made_once() {
    if MKFS_EXT4.command().is_err() {
        eprintln!("skipped: mkfs.ext4 is not installed");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("templates");
    let size = 64 << 20;
    let files = ensure_ext4_template(&dir, size).unwrap();
    let bitmap = check_layer(&files, size).unwrap();
    assert!(bitmap.count() > 0 && bitmap.count() < 256, "{}", bitmap.count());
    assert_eq!(fs::metadata(&files.data).unwrap().len(), size);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
    let inode = fs::metadata(&files.data).unwrap().ino();
    assert_eq!(ensure_ext4_template(&dir, size).unwrap(), files);
    assert_eq!(fs::metadata(&files.data).unwrap().ino(), inode);
    let again = ensure_ext4_template(&root.path().join("elsewhere"), size).unwrap();
    assert_eq!(fs::read(&again.data).unwrap(), fs::read(&files.data).unwrap());
    let check = Command::new("/sbin/fsck.ext4")
        .arg("-fn")
        .arg(&files.data)
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
}
