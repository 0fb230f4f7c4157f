//! A small checkpoint for tests.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::manifest::{
    CheckpointId, CheckpointManifest, ContainerInfo, DiskLayer, FORMAT, HostRequirements, MEMORY_FILE,
    MEMORY_INDEX_FILE, ReadOnlyDisk, STATE_FILE, SaveInfo, VmShape, WritableDisk,
};
use crate::memory::{Extent, MemoryIndex, PAGE_SIZE};

pub(crate) const MEMORY_BYTES: u64 = 64 << 20;
pub(crate) const DISK_BYTES: u64 = 32 << 20;

pub(crate) fn id(digit: char) -> CheckpointId {
    CheckpointId::try_from(digit.to_string().repeat(32)).unwrap()
}

/// A valid manifest of checkpoint `aaaa…` with one disk layer of its own, `rw0.0`.
pub(crate) fn manifest() -> CheckpointManifest {
    CheckpointManifest {
        format: FORMAT,
        id: id('a'),
        base: None,
        created: "2026-11-30T14:30:00Z".to_owned(),
        host: HostRequirements {
            arch: "x86_64".to_owned(),
            cpu_vendor: "AuthenticAMD".to_owned(),
            cpu_family: 25,
            cpu_model: 1,
            host_kernel: "6.12.0".to_owned(),
        },
        vm: VmShape {
            vcpus: 1,
            memory_bytes: MEMORY_BYTES,
            guest_kernel: "6.12.0".to_owned(),
            agent_generation: 1,
            nets: 0,
        },
        read_only_disks: vec![ReadOnlyDisk {
            id: "ro0".to_owned(),
            files_sha256: vec!["0".repeat(64)],
        }],
        writable_disks: vec![WritableDisk {
            id: "rw0".to_owned(),
            size_bytes: DISK_BYTES,
            layers: vec![DiskLayer {
                checkpoint: None,
                name: "rw0.0".to_owned(),
            }],
        }],
        containers: vec![ContainerInfo {
            guest_id: "c1".to_owned(),
            container_id: "c1".to_owned(),
            args: vec!["sleep".to_owned(), "9".to_owned()],
            terminal: false,
            read_only_disk: "ro0".to_owned(),
            writable_disk: "rw0".to_owned(),
        }],
        save: SaveInfo::default(),
        packed: Vec::new(),
    }
}

/// Writes the checkpoint of [`manifest`] with a few pages of memory and one disk block.
pub(crate) fn write_checkpoint(directory: &Path) -> CheckpointManifest {
    let manifest = manifest();
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join(STATE_FILE), b"state of the machine").unwrap();
    let memory = File::create(directory.join(MEMORY_FILE)).unwrap();
    let noise: Vec<u8> = (0..5 * PAGE_SIZE)
        .map(|place| place.wrapping_mul(2_654_435_761).to_le_bytes()[2])
        .collect();
    memory.set_len(300 * PAGE_SIZE).unwrap();
    memory.write_all_at(&noise, 2 * PAGE_SIZE).unwrap();
    memory.write_all_at(b"text", 299 * PAGE_SIZE).unwrap();
    let extents = vec![Extent {
        start: 7,
        pages: 300,
        source: 0,
        source_page: 0,
    }];
    let index = MemoryIndex::full(MEMORY_BYTES / PAGE_SIZE, 300 * PAGE_SIZE, extents).unwrap();
    fs::write(directory.join(MEMORY_INDEX_FILE), index.encode().unwrap()).unwrap();
    let data = File::create(directory.join("rw0.0.data")).unwrap();
    data.set_len(DISK_BYTES).unwrap();
    data.write_all_at(&[7; 4096], 9 * 4096).unwrap();
    let bitmap = File::create(directory.join("rw0.0.bitmap")).unwrap();
    bitmap.set_len(DISK_BYTES / 4096 / 8).unwrap();
    bitmap.write_all_at(&[2], 1).unwrap();
    manifest.write(directory).unwrap();
    manifest
}
