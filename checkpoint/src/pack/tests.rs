use std::os::unix::fs::{MetadataExt, symlink};

use proptest::prelude::*;

use super::*;
use crate::directory::Checkpoint;
use crate::manifest::MEMORY_FILE;
use crate::test_data::{DISK_BYTES, write_checkpoint};

/// A snapshot directory as containerd leaves it: the layer's files below `fs`.
fn unpack_tar(tar: &[u8], snapshot: &Path) {
    let mut archive = tar::Archive::new(tar);
    fs::create_dir_all(snapshot.join("fs")).unwrap();
    archive.unpack(snapshot.join("fs")).unwrap();
}

fn tar_of(directory: &Path) -> Vec<u8> {
    let mut packed = pack(directory, &mut |_, _| {}).unwrap();
    let mut tar = Vec::new();
    packed.write_tar(&mut tar).unwrap();
    assert_eq!(tar.len() as u64, packed.tar_bytes());
    tar
}

/// A packed snapshot: its temporary directory and the path of the snapshot in it.
fn packed_snapshot() -> (tempfile::TempDir, PathBuf) {
    let temporary = tempfile::tempdir().unwrap();
    write_checkpoint(&temporary.path().join("made"));
    let snapshot = temporary.path().join("snapshot");
    unpack_tar(&tar_of(&temporary.path().join("made")), &snapshot);
    (temporary, snapshot)
}

fn refused(snapshot: &Path) -> String {
    let error = ensure_unpacked(snapshot).unwrap_err();
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    let left: Vec<_> = fs::read_dir(snapshot)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(
        left.iter().all(|name| name == "fs" || name == LOCK_FILE),
        "left behind: {left:?}"
    );
    message
}

#[test]
fn a_checkpoint_comes_back_byte_for_byte_and_sparse() {
    let (temporary, snapshot) = packed_snapshot();
    let made = temporary.path().join("made");
    let unpacked = ensure_unpacked(&snapshot).unwrap();
    let checkpoint = Checkpoint::open(&unpacked, &[]).unwrap();
    for (name, _) in checkpoint.manifest.own_files() {
        assert!(
            fs::read(made.join(&name)).unwrap() == fs::read(unpacked.join(&name)).unwrap(),
            "{name} differs"
        );
    }
    let data = fs::metadata(unpacked.join("rw0.0.data")).unwrap();
    assert_eq!(data.len(), DISK_BYTES);
    assert!(
        data.blocks() * 512 <= 64 * 1024,
        "{} bytes are allocated",
        data.blocks() * 512
    );
}

#[test]
fn packing_twice_gives_the_same_bytes_and_leaves_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    write_checkpoint(temporary.path());
    let before = fs::read_dir(temporary.path()).unwrap().count();
    assert!(tar_of(temporary.path()) == tar_of(temporary.path()));
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), before);
}

#[test]
fn the_manifest_is_found_at_the_start_of_the_layer() {
    let temporary = tempfile::tempdir().unwrap();
    let made = write_checkpoint(temporary.path());
    let tar = tar_of(temporary.path());
    let json = manifest_in_tar(&tar[..8192]).unwrap();
    assert_eq!(CheckpointManifest::from_json(json).unwrap().id, made.id);
    assert_eq!(manifest_in_tar(&tar[..1500]), None);
    assert_eq!(manifest_in_tar(b"no tar at all"), None);
}

#[test]
fn zeros_cost_next_to_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    write_checkpoint(temporary.path());
    // 32 MiB of disk and 1.2 MiB of memory, of which 7 blocks are not zero.
    assert!(tar_of(temporary.path()).len() < 64 * 1024);
}

/// docs/checkpoint-format.md says when these bytes may change, and what must change with them.
#[test]
fn bytes_are_as_documented() {
    let temporary = tempfile::tempdir().unwrap();
    let source = temporary.path().join("source");
    // A chunk of zeros, and one that zstd cannot make smaller.
    let content = [vec![0; 256 << 10], b"abc".to_vec()].concat();
    fs::write(&source, content).unwrap();
    let source = File::open(&source).unwrap();
    let mut packed = Vec::new();
    file::pack(
        &source,
        &file::DataChunks::of(&source).unwrap(),
        &mut packed,
        &mut |_| {},
    )
    .unwrap();
    let expected = [
        b"RAMETPAK\x01\0\0\0\0\0\x04\0\x03\0\x04\0\0\0\0\0".as_slice(),
        b"\x01\0\0\0\0\0\0\0\x03\0\0\0abc",
        b"\x01\0\0\0\x02\0\0\0\0\0\0\0",
    ];
    assert_eq!(packed, expected.concat());
}

#[test]
fn unpacking_twice_does_it_once() {
    let (_temporary, snapshot) = packed_snapshot();
    let first = ensure_unpacked(&snapshot).unwrap();
    let inode = fs::metadata(first.join(MEMORY_FILE)).unwrap().ino();
    let second = ensure_unpacked(&snapshot).unwrap();
    assert_eq!(fs::metadata(second.join(MEMORY_FILE)).unwrap().ino(), inode);
}

#[test]
fn many_at_once_agree() {
    let (_temporary, snapshot) = packed_snapshot();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| ensure_unpacked(&snapshot).unwrap()))
            .collect();
        for one in all {
            Checkpoint::open(&one.join().unwrap(), &[]).unwrap();
        }
    });
}

#[test]
fn what_a_killed_unpacking_left_is_replaced() {
    let (_temporary, snapshot) = packed_snapshot();
    fs::create_dir(snapshot.join(UNPACKING_DIR)).unwrap();
    fs::write(snapshot.join(UNPACKING_DIR).join(MEMORY_FILE), b"half").unwrap();
    Checkpoint::open(&ensure_unpacked(&snapshot).unwrap(), &[]).unwrap();
    assert!(!snapshot.join(UNPACKING_DIR).exists());
}

#[test]
fn a_snapshot_without_checkpoint_says_so() {
    let temporary = tempfile::tempdir().unwrap();
    let message = ensure_unpacked(temporary.path()).unwrap_err().to_string();
    assert!(message.contains("holds no checkpoint"), "{message}");
}

#[test]
fn a_truncated_file_is_named_with_both_sizes() {
    let (_temporary, snapshot) = packed_snapshot();
    let path = snapshot.join("fs/.ramet/memory");
    let length = fs::metadata(&path).unwrap().len();
    OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(length - 1)
        .unwrap();
    let message = refused(&snapshot);
    assert!(
        message.contains(&format!("/memory has {} bytes, expected {length}", length - 1)),
        "{message}"
    );
}

#[test]
fn an_unknown_version_is_named() {
    let (_temporary, snapshot) = packed_snapshot();
    let path = snapshot.join("fs/.ramet/state");
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 9;
    fs::write(&path, bytes).unwrap();
    assert!(refused(&snapshot).contains("state has version 9, this build of ramet reads version 1"));
}

#[test]
fn a_size_beyond_the_machine_is_refused_before_anything_is_written() {
    let (_temporary, snapshot) = packed_snapshot();
    let path = snapshot.join("fs/.ramet/manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let memory = manifest["packed"]
        .as_array_mut()
        .unwrap()
        .iter_mut()
        .find(|file| file["name"] == "memory")
        .unwrap();
    memory["bytes"] = (1_u64 << 50).into();
    fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    let message = refused(&snapshot);
    assert!(
        message.contains("is 1125899906842624, but memory has at most 67108864"),
        "{message}"
    );
}

#[test]
fn another_format_is_named_before_unknown_fields() {
    let (_temporary, snapshot) = packed_snapshot();
    fs::write(
        snapshot.join("fs/.ramet/manifest.json"),
        br#"{"format": 2, "new": true}"#,
    )
    .unwrap();
    let message = refused(&snapshot);
    assert!(
        message.contains("format 2, this build of ramet reads format 1: use a newer ramet"),
        "{message}"
    );
}

#[test]
fn links_are_not_followed() {
    let (temporary, snapshot) = packed_snapshot();
    let path = snapshot.join("fs/.ramet/state");
    fs::rename(&path, temporary.path().join("elsewhere")).unwrap();
    symlink(temporary.path().join("elsewhere"), &path).unwrap();
    assert!(refused(&snapshot).contains("cannot read"));
    fs::rename(snapshot.join("fs/.ramet"), temporary.path().join("directory")).unwrap();
    symlink(temporary.path().join("directory"), snapshot.join("fs/.ramet")).unwrap();
    assert!(refused(&snapshot).contains("holds no checkpoint"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The digests in the manifest make every change of a packed file visible.
    #[test]
    fn any_flipped_bit_is_refused(name in prop::sample::select(vec!["state", "memory", "memory.index", "rw0.0.data", "rw0.0.bitmap"]), place: prop::sample::Index, bit in 0..8_u8) {
        let (_temporary, snapshot) = packed_snapshot();
        let path = snapshot.join("fs/.ramet").join(name);
        let mut bytes = fs::read(&path).unwrap();
        let place = place.index(bytes.len());
        bytes[place] ^= 1 << bit;
        fs::write(&path, bytes).unwrap();
        let message = refused(&snapshot);
        prop_assert!(message.contains(name), "{}", message);
    }

    #[test]
    fn no_start_of_a_layer_makes_the_search_panic(noise in proptest::collection::vec(any::<u8>(), 0..2000), changes in proptest::collection::vec((0..1600_usize, any::<u8>()), 0..6)) {
        let _ = manifest_in_tar(&noise);
        let temporary = tempfile::tempdir().unwrap();
        write_checkpoint(temporary.path());
        let mut tar = tar_of(temporary.path());
        for (place, value) in changes {
            tar[place] = value;
        }
        let _ = manifest_in_tar(&tar);
    }

    /// Without the digest in the way, the parser meets every kind of nonsense: it must refuse it or stay within the file.
    #[test]
    fn nonsense_with_a_right_digest_never_panics(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut: Option<prop::sample::Index>) {
        use sha2::{Digest, Sha256};
        let (temporary, snapshot) = packed_snapshot();
        let mut bytes = fs::read(snapshot.join("fs/.ramet/memory")).unwrap();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            // Header and first record are the interesting bytes.
            bytes[place % 64] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = temporary.path().join("input");
        fs::write(&path, &bytes).unwrap();
        let expected = PackedFile {
            name: "memory".to_owned(),
            bytes: 300 * 4096,
            packed_bytes: bytes.len() as u64,
            sha256: crate::manifest::hex(&Sha256::digest(&bytes)),
        };
        let out = temporary.path().join("out");
        if unpack_file(&path, &out, &expected).is_ok() {
            prop_assert_eq!(fs::metadata(&out).unwrap().len(), expected.bytes);
        }
    }

    #[test]
    fn any_content_comes_back(runs in proptest::collection::vec((0..600_u64, 1..9000_usize, any::<u8>(), any::<bool>()), 0..6), tail in 0..5000_u64) {
        use std::os::unix::fs::FileExt;
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("in");
        let source = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        for (block, length, value, noisy) in runs {
            let content: Vec<u8> = (0..length).map(|place| if noisy { (place * 31 + place / 7).to_le_bytes()[0] ^ value } else { value }).collect();
            source.write_all_at(&content, block * 4096).unwrap();
        }
        let length = source.metadata().unwrap().len() + tail;
        source.set_len(length).unwrap();
        let chunks = file::DataChunks::of(&source).unwrap();
        let mut packed = Vec::new();
        let info = file::pack(&source, &chunks, &mut packed, &mut |_| {}).unwrap();
        prop_assert_eq!(info.bytes, packed.len() as u64);
        let entry = PackedFile { name: "in".to_owned(), bytes: length, packed_bytes: info.bytes, sha256: info.sha256 };
        let (input, out) = (temporary.path().join("packed"), temporary.path().join("out"));
        fs::write(&input, &packed).unwrap();
        unpack_file(&input, &out, &entry).unwrap();
        prop_assert!(fs::read(&path).unwrap() == fs::read(&out).unwrap());
    }
}
