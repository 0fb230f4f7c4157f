//! Bounds of everything a manifest says. Manifests come out of images, so nothing in one is believed before this.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::manifest::{
    CheckpointManifest, ContainerInfo, MEMORY_FILE, MEMORY_INDEX_FILE, ManifestError, PackedFile, STATE_FILE,
    WritableDisk,
};
use crate::{disk, memory};

/// vCPUs of a machine.
pub(crate) const VCPUS: RangeInclusive<u64> = 1..=8;
/// Guest memory in bytes; also a multiple of [`MEMORY_STEP`].
pub(crate) const MEMORY: RangeInclusive<u64> = (64 << 20)..=(16 << 30);
/// Guest memory is a multiple of this.
pub(crate) const MEMORY_STEP: u64 = 2 << 20;
/// Largest `state` file in bytes.
pub(crate) const MAX_STATE_BYTES: u64 = 64 << 20;
/// Most disks of one kind.
const MAX_DISKS: u64 = 16;
/// Most containers in a sandbox.
const MAX_CONTAINERS: u64 = 64;
/// Most files behind a read-only disk; image layers are at most 127.
const MAX_DISK_FILES: u64 = 240;
/// Longest text that is not args, in bytes.
const MAX_TEXT: usize = 256;
/// Most bytes of one container's args.
const MAX_ARGS_BYTES: usize = 1 << 20;

type Result<T> = std::result::Result<T, ManifestError>;

impl CheckpointManifest {
    /// Checks everything that can be checked without the files.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        self.validate_machine()?;
        if self.base.as_ref() == Some(&self.id) {
            return wrong("base", "is the checkpoint itself");
        }
        count("read_only_disks", self.read_only_disks.len(), 0..=MAX_DISKS)?;
        count("writable_disks", self.writable_disks.len(), 0..=MAX_DISKS)?;
        let mut ids = BTreeSet::new();
        for (number, disk) in self.read_only_disks.iter().enumerate() {
            let field = format!("read_only_disks[{number}]");
            disk_id(&field, &disk.id, &mut ids)?;
            count(
                &format!("{field}.files_sha256"),
                disk.files_sha256.len(),
                1..=MAX_DISK_FILES,
            )?;
            disk.files_sha256
                .iter()
                .try_for_each(|digest| sha256(&format!("{field}.files_sha256"), digest))?;
        }
        let mut names = BTreeSet::new();
        for (number, disk) in self.writable_disks.iter().enumerate() {
            let field = format!("writable_disks[{number}]");
            disk_id(&field, &disk.id, &mut ids)?;
            self.validate_layers(&field, disk, &mut names)?;
        }
        count("containers", self.containers.len(), 1..=MAX_CONTAINERS)?;
        self.containers
            .iter()
            .enumerate()
            .try_for_each(|(number, container)| self.validate_container(number, container))?;
        self.validate_packed()
    }

    fn validate_machine(&self) -> Result<()> {
        text("created", &self.created)?;
        text("host.arch", &self.host.arch)?;
        text("host.cpu_vendor", &self.host.cpu_vendor)?;
        text("host.host_kernel", &self.host.host_kernel)?;
        text("vm.guest_kernel", &self.vm.guest_kernel)?;
        number("vm.vcpus", u64::from(self.vm.vcpus), VCPUS)?;
        number("vm.memory_bytes", self.vm.memory_bytes, MEMORY)?;
        number("vm.nets", u64::from(self.vm.nets), 0..=1)?;
        if !self.vm.memory_bytes.is_multiple_of(MEMORY_STEP) {
            return wrong("vm.memory_bytes", &format!("is not a multiple of {MEMORY_STEP}"));
        }
        Ok(())
    }

    fn validate_layers(&self, field: &str, disk: &WritableDisk, names: &mut BTreeSet<String>) -> Result<()> {
        number(
            &format!("{field}.size_bytes"),
            disk.size_bytes,
            disk::BLOCK_SIZE..=disk::MAX_BYTES,
        )?;
        if !disk.size_bytes.is_multiple_of(disk::BLOCK_SIZE) {
            return wrong(
                &format!("{field}.size_bytes"),
                &format!("is not a multiple of {}", disk::BLOCK_SIZE),
            );
        }
        count(
            &format!("{field}.layers"),
            disk.layers.len(),
            0..=disk::MAX_LAYERS as u64,
        )?;
        for (number, layer) in disk.layers.iter().enumerate() {
            let field = format!("{field}.layers[{number}]");
            file_name(&format!("{field}.name"), &layer.name)?;
            match &layer.checkpoint {
                None if !names.insert(layer.name.clone()) => {
                    return wrong(&field, &format!("has the name of another layer, {}", layer.name));
                }
                Some(_) if self.base.is_none() => {
                    return wrong(&field, "is in another checkpoint, but this one has no base");
                }
                Some(id) if *id == self.id => return wrong(&field, "names the checkpoint itself as another one"),
                _ => {}
            }
        }
        Ok(())
    }

    fn validate_container(&self, number: usize, container: &ContainerInfo) -> Result<()> {
        let field = format!("containers[{number}]");
        text(&format!("{field}.guest_id"), &container.guest_id)?;
        text(&format!("{field}.container_id"), &container.container_id)?;
        if container.guest_id.is_empty() {
            return wrong(&format!("{field}.guest_id"), "is empty");
        }
        if container.args.iter().map(String::len).fold(0, usize::saturating_add) > MAX_ARGS_BYTES {
            return wrong(
                &format!("{field}.args"),
                &format!("has more than {MAX_ARGS_BYTES} bytes"),
            );
        }
        if !self
            .read_only_disks
            .iter()
            .any(|disk| disk.id == container.read_only_disk)
        {
            return wrong(
                &format!("{field}.read_only_disk"),
                "names no read-only disk of this checkpoint",
            );
        }
        // Without a writable disk the guest keeps the container's files in memory.
        let writable = &container.writable_disk;
        if !writable.is_empty() && !self.writable_disks.iter().any(|disk| disk.id == *writable) {
            return wrong(
                &format!("{field}.writable_disk"),
                "names no writable disk of this checkpoint",
            );
        }
        Ok(())
    }

    /// The packed list is empty, or has exactly the files that belong to the checkpoint, each of a plausible size.
    fn validate_packed(&self) -> Result<()> {
        if self.packed.is_empty() {
            return Ok(());
        }
        let mut expected = self.own_files();
        for (number, file) in self.packed.iter().enumerate() {
            let field = format!("packed[{number}]");
            let Some(place) = expected.iter().position(|(name, _)| *name == file.name) else {
                return wrong(
                    &format!("{field}.name"),
                    &format!("is {:?}, which the checkpoint does not have, or has once", file.name),
                );
            };
            let (_, most) = expected.swap_remove(place);
            validate_packed_file(&field, file, most)?;
        }
        match expected.first() {
            Some((name, _)) => wrong("packed", &format!("lacks the file {name}")),
            None => Ok(()),
        }
    }

    /// The files in the checkpoint's own directory, without the manifest, and the most bytes each may have.
    #[must_use]
    pub fn own_files(&self) -> Vec<(String, u64)> {
        let mut files = vec![
            (STATE_FILE.to_owned(), MAX_STATE_BYTES),
            (MEMORY_INDEX_FILE.to_owned(), memory::MAX_INDEX_BYTES as u64),
            (MEMORY_FILE.to_owned(), self.vm.memory_bytes),
        ];
        for disk in &self.writable_disks {
            for layer in disk.layers.iter().filter(|layer| layer.checkpoint.is_none()) {
                files.push((format!("{}.data", layer.name), disk.size_bytes));
                let bitmap_bytes = disk::Bitmap::bytes_for(disk.size_bytes / disk::BLOCK_SIZE);
                files.push((format!("{}.bitmap", layer.name), bitmap_bytes));
            }
        }
        files
    }
}

fn validate_packed_file(field: &str, file: &PackedFile, most: u64) -> Result<()> {
    if file.bytes > most {
        return wrong(
            &format!("{field}.bytes"),
            &format!("is {}, but {} has at most {most}", file.bytes, file.name),
        );
    }
    // Packing stores a chunk as it is rather than let it grow, so the packed form is never much larger.
    let most_packed = file.bytes + file.bytes / 1024 + 4096;
    if file.packed_bytes > most_packed {
        return wrong(
            &format!("{field}.packed_bytes"),
            &format!("is {}, more than {} can need", file.packed_bytes, file.name),
        );
    }
    sha256(&format!("{field}.sha256"), &file.sha256)
}

fn wrong<T>(field: &str, problem: &str) -> Result<T> {
    Err(ManifestError::Field {
        field: field.to_owned(),
        problem: problem.to_owned(),
    })
}

fn number(field: &str, found: u64, allowed: RangeInclusive<u64>) -> Result<()> {
    if allowed.contains(&found) {
        return Ok(());
    }
    wrong(
        field,
        &format!("is {found}, allowed is {} to {}", allowed.start(), allowed.end()),
    )
}

fn count(field: &str, found: usize, allowed: RangeInclusive<u64>) -> Result<()> {
    if allowed.contains(&(found as u64)) {
        return Ok(());
    }
    wrong(
        field,
        &format!(
            "has {found} entries, allowed are {} to {}",
            allowed.start(),
            allowed.end()
        ),
    )
}

fn text(field: &str, found: &str) -> Result<()> {
    if found.len() > MAX_TEXT {
        return wrong(field, &format!("has more than {MAX_TEXT} bytes"));
    }
    if found.chars().any(char::is_control) {
        return wrong(field, "has control characters");
    }
    Ok(())
}

/// A name within one directory: no separators, not hidden, not `..`.
fn file_name(field: &str, found: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'.' || byte == b'-';
    if (1..=64).contains(&found.len()) && !found.starts_with('.') && found.bytes().all(allowed) {
        return Ok(());
    }
    wrong(
        field,
        &format!("is {found:?}, allowed are 1 to 64 of a-z, 0-9, '.' and '-', not starting with '.'"),
    )
}

fn disk_id(field: &str, found: &str, ids: &mut BTreeSet<String>) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !(1..=20).contains(&found.len()) || !found.bytes().all(allowed) {
        return wrong(
            &format!("{field}.id"),
            &format!("is {found:?}, allowed are 1 to 20 of a-z, 0-9 and '-'"),
        );
    }
    if ids.insert(found.to_owned()) {
        Ok(())
    } else {
        wrong(&format!("{field}.id"), &format!("{found} is used twice"))
    }
}

fn sha256(field: &str, found: &str) -> Result<()> {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if found.len() == 64 && found.bytes().all(digit) {
        return Ok(());
    }
    wrong(field, "is not a SHA-256 in hexadecimal digits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_data::manifest;

    /// The message for a manifest with one value replaced.
    fn refused(pointer: &str, value: Value) -> String {
        let mut json = serde_json::to_value(manifest()).unwrap();
        CheckpointManifest::from_json(json.to_string().as_bytes()).unwrap();
        *json.pointer_mut(pointer).unwrap() = value;
        let error = CheckpointManifest::from_json(json.to_string().as_bytes()).unwrap_err();
        format!(
            "{error} {}",
            std::error::Error::source(&error)
                .map(ToString::to_string)
                .unwrap_or_default()
        )
    }

    #[test]
    fn values_out_of_bounds_are_named() {
        for (pointer, value, part) in [
            ("/vm/vcpus", json!(0), "vm.vcpus is 0, allowed is 1 to 8"),
            ("/vm/vcpus", json!(9), "vm.vcpus is 9"),
            ("/vm/memory_bytes", json!(1 << 20), "vm.memory_bytes is 1048576"),
            (
                "/vm/memory_bytes",
                json!((64 << 20) + 4096),
                "vm.memory_bytes is not a multiple of 2097152",
            ),
            (
                "/vm/memory_bytes",
                json!(17_u64 << 30),
                "vm.memory_bytes is 18253611008",
            ),
            ("/vm/nets", json!(2), "vm.nets is 2"),
            ("/base", json!("a".repeat(32)), "base is the checkpoint itself"),
            ("/id", json!("../../etc/passwd"), "is not a checkpoint id"),
            ("/format", json!(2), "use a newer ramet"),
            ("/format", json!(0), "make the checkpoint again"),
            ("/containers", json!([]), "containers has 0 entries"),
            (
                "/containers/0/read_only_disk",
                json!("ro9"),
                "containers[0].read_only_disk names no read-only disk",
            ),
            (
                "/containers/0/writable_disk",
                json!("ro0"),
                "containers[0].writable_disk names no writable disk",
            ),
            ("/containers/0/guest_id", json!(""), "containers[0].guest_id is empty"),
            (
                "/containers/0/container_id",
                json!("a\nb"),
                "containers[0].container_id has control characters",
            ),
            ("/read_only_disks/0/files_sha256", json!(["xyz"]), "is not a SHA-256"),
            ("/read_only_disks/0/id", json!("rw0"), "rw0 is used twice"),
            ("/writable_disks/0/size_bytes", json!(4097), "is not a multiple of 4096"),
            (
                "/writable_disks/0/layers/0/name",
                json!("../state"),
                "writable_disks[0].layers[0].name is \"../state\"",
            ),
            (
                "/writable_disks/0/layers/0/name",
                json!(".hidden"),
                "not starting with '.'",
            ),
            (
                "/writable_disks/0/layers/0/checkpoint",
                json!("b".repeat(32)),
                "but this one has no base",
            ),
            ("/created", json!("x".repeat(300)), "created has more than 256 bytes"),
            ("/vm", json!({}), "missing field"),
        ] {
            let message = refused(pointer, value);
            assert!(message.contains(part), "{pointer}: {message}");
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        let mut json = serde_json::to_value(manifest()).unwrap();
        json["extra"] = json!(1);
        CheckpointManifest::from_json(json.to_string().as_bytes()).unwrap_err();
    }

    #[test]
    fn a_manifest_of_enormous_size_is_not_parsed() {
        let text = vec![b' '; usize::try_from(crate::manifest::MAX_BYTES).unwrap() + 1];
        assert!(matches!(
            CheckpointManifest::from_json(&text),
            Err(ManifestError::TooLarge)
        ));
    }

    #[test]
    fn packed_files_must_be_exactly_those_of_the_checkpoint() {
        let mut manifest = manifest();
        let file = |name: &str| PackedFile {
            name: name.to_owned(),
            bytes: 1,
            packed_bytes: 1,
            sha256: "0".repeat(64),
        };
        manifest.packed = ["state", "memory", "memory.index", "rw0.0.data", "rw0.0.bitmap"]
            .iter()
            .map(|name| file(name))
            .collect();
        manifest.validate().unwrap();
        let mut less = manifest.clone();
        less.packed.pop();
        assert!(
            less.validate()
                .unwrap_err()
                .to_string()
                .contains("packed lacks the file rw0.0.bitmap")
        );
        let mut twice = manifest.clone();
        twice.packed.push(file("state"));
        assert!(twice.validate().unwrap_err().to_string().contains("\"state\""));
        let mut more = manifest.clone();
        more.packed.push(file("../../etc/shadow"));
        more.validate().unwrap_err();
        manifest.packed[0].packed_bytes = 1 << 40;
        assert!(
            manifest
                .validate()
                .unwrap_err()
                .to_string()
                .contains("more than state can need")
        );
    }

    #[test]
    fn random_ids_differ_and_are_valid() {
        use crate::manifest::CheckpointId;
        let [first, second] = [(); 2].map(|()| CheckpointId::random().unwrap());
        assert_ne!(first, second);
        CheckpointId::try_from(first.to_string()).unwrap();
    }

    proptest! {
        #[test]
        fn changed_manifests_never_panic(place: prop::sample::Index, byte: u8, noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = serde_json::to_vec(&manifest()).unwrap();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            if let Ok(manifest) = CheckpointManifest::from_json(&bytes) {
                manifest.validate().unwrap();
            }
            let _ = CheckpointManifest::from_json(&noise);
        }
    }
}
