//! Root filesystems: finds a container's disks, mounts them and writes its bundle.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use oci_spec::runtime::Spec;
use protocol::guest::PrepareContainerRequest;

use crate::cgroup::Cgroup;
use crate::error::{AgentError, Result};
use crate::in_root::InRoot;
use crate::sysctl::NetworkSysctls;

/// One directory for each container.
const CONTAINERS: &str = "/run/ramet/containers";

/// How long a disk may take to appear.
const DISK_DEADLINE: Duration = Duration::from_secs(10);

/// Between two looks for a disk.
const DISK_POLL: Duration = Duration::from_millis(5);

/// Largest spec accepted, in bytes.
const MAX_SPEC: usize = 4 << 20;

/// Longest hostname, in bytes.
const MAX_HOSTNAME: usize = 63;

/// A mounted root filesystem. Unmounted by [`Rootfs::release`], not on drop: it outlives the agent's bookkeeping.
#[derive(Debug)]
pub struct Rootfs {
    /// Where the container's root is.
    pub path: PathBuf,
    /// What to unmount, last first.
    mounts: Vec<PathBuf>,
    /// The directory that holds the mount points.
    directory: PathBuf,
}

/// The directory of a container with its `config.json`.
pub fn bundle(id: &str) -> PathBuf {
    Path::new(CONTAINERS).join(id)
}

/// Refuses ids that could not be a file name, part of an overlay option or a control group.
///
/// # Errors
/// [`AgentError::Invalid`].
pub fn check_id(id: &str) -> Result<()> {
    let fits = !id.is_empty() && id.len() <= 128 && !id.starts_with('.');
    if fits && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
        Ok(())
    } else {
        Err(AgentError::Invalid(format!("{id:?} is not a valid id")))
    }
}

/// Mounts the disks that the request names.
///
/// # Errors
/// When a disk does not appear or a mount fails; nothing stays mounted then.
pub async fn mount_disks(request: &PrepareContainerRequest) -> Result<Rootfs> {
    let directory = bundle(&request.container_id);
    let mut rootfs = Rootfs {
        path: directory.join("rootfs"),
        mounts: Vec::new(),
        directory,
    };
    match assemble(&mut rootfs, request).await {
        Ok(()) => Ok(rootfs),
        Err(error) => {
            rootfs.release();
            Err(error)
        }
    }
}

async fn assemble(rootfs: &mut Rootfs, request: &PrepareContainerRequest) -> Result<()> {
    let lower = rootfs.directory.join("ro");
    let writable = rootfs.directory.join("rw");
    let root = rootfs.path.clone();
    for directory in [&lower, &writable, &root] {
        make_directory(directory)?;
    }
    let disk = find_disk(&request.read_only_disk).await?;
    rootfs.mount(Some(&disk), &lower, "erofs", MsFlags::MS_RDONLY, None)?;
    if request.writable_disk.is_empty() {
        rootfs.mount(None, &writable, "tmpfs", MsFlags::empty(), Some("mode=0755"))?;
    } else {
        let disk = find_disk(&request.writable_disk).await?;
        // The inode tables are zero already; writing them again would only fill the disk's overlay.
        rootfs.mount(Some(&disk), &writable, "ext4", MsFlags::empty(), Some("noinit_itable"))?;
    }
    let (upper, work) = (rootfs.upper(), writable.join("work"));
    // The merged root shows the upper directory's attributes: 0755, root. A flattened EROFS does not keep those of the layers.
    make_directory(&upper)?;
    make_directory(&work)?;
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        upper.display(),
        work.display()
    );
    rootfs.mount(None, &root, "overlay", MsFlags::empty(), Some(&options))
}

impl Rootfs {
    /// The upper directory of the overlay: what the container wrote.
    pub fn upper(&self) -> PathBuf {
        self.directory.join("rw/upper")
    }

    fn mount(
        &mut self,
        source: Option<&Path>,
        target: &Path,
        kind: &str,
        flags: MsFlags,
        options: Option<&str>,
    ) -> Result<()> {
        mount(source.or(Some(Path::new(kind))), target, Some(kind), flags, options).map_err(|error| {
            let source = source.map(|s| s.display().to_string()).unwrap_or_default();
            AgentError::io(format!("mount {kind} {source} on {}", target.display()), error)
        })?;
        self.mounts.push(target.to_owned());
        Ok(())
    }

    /// Unmounts everything and removes the directory.
    pub fn release(mut self) {
        while let Some(target) = self.mounts.pop() {
            if let Err(error) = umount2(&target, MntFlags::MNT_DETACH) {
                tracing::warn!("unmount {}: {error}", target.display());
            }
        }
        for name in ["rootfs", "rw", "ro"] {
            // Only empty mount points: never what is in a filesystem.
            let _ = std::fs::remove_dir(self.directory.join(name));
        }
        remove_bundle(&self.directory);
    }

    /// Writes `config.json` for a container over this root, and the request's files into it. Returns the bundle.
    ///
    /// # Errors
    /// When the spec is none or a file cannot be written.
    pub fn write_bundle(&self, request: &PrepareContainerRequest, resolv_conf: &[u8]) -> Result<PathBuf> {
        let bundle = bundle(&request.container_id);
        let spec = complete_spec(&request.spec_json, &request.container_id, &self.path)?;
        make_directory(&bundle)?;
        let config = bundle.join("config.json");
        std::fs::write(&config, spec.json)
            .map_err(|error| AgentError::io(format!("write {}", config.display()), error))?;
        spec.sysctls.set()?;
        let root = InRoot::open(&self.path)?;
        if !spec.cwd.is_empty() {
            root.make_directories(Path::new(&spec.cwd))?;
        }
        const RESOLV_CONF: &str = "/etc/resolv.conf";
        if !resolv_conf.is_empty() && request.files.iter().all(|file| file.path != RESOLV_CONF) {
            root.write(Path::new(RESOLV_CONF), resolv_conf, 0o644)?;
        }
        for file in &request.files {
            root.write(Path::new(&file.path), &file.content, file.mode)?;
        }
        Ok(bundle)
    }
}

/// Removes the bundle's files of a container whose root filesystem another one has taken over.
pub fn remove_bundle(directory: &Path) {
    let _ = std::fs::remove_file(directory.join("config.json"));
    let _ = std::fs::remove_dir(directory);
}

/// A spec that libcontainer can run.
#[derive(Debug)]
pub struct CompleteSpec {
    /// `config.json`.
    pub json: String,
    /// Directory the process starts in; made when it is missing, as runc does.
    pub cwd: String,
    /// What is set in the guest for it.
    pub sysctls: NetworkSysctls,
}

/// Sets what only the agent knows: the root's path and the control group. Hooks are the host's and were run there.
///
/// # Errors
/// [`AgentError::Invalid`] when it is not an OCI runtime spec.
pub fn complete_spec(json: &[u8], id: &str, root: &Path) -> Result<CompleteSpec> {
    let invalid = |error: &dyn std::fmt::Display| AgentError::Invalid(format!("spec of container {id}: {error}"));
    if json.len() > MAX_SPEC {
        return Err(invalid(&"too large"));
    }
    let mut value: serde_json::Value = serde_json::from_slice(json).map_err(|error| invalid(&error))?;
    let spec = value.as_object_mut().ok_or_else(|| invalid(&"not an object"))?;
    // Those that run in the container. The others would run in the guest itself.
    if let Some(inside) = spec
        .remove("hooks")
        .and_then(|mut hooks| hooks.get_mut("startContainer").map(std::mem::take))
    {
        spec.insert("hooks".into(), serde_json::json!({"startContainer": inside}));
    }
    for key in ["root", "linux"] {
        let entry = spec.entry(key).or_insert_with(|| serde_json::json!({}));
        if !entry.is_object() {
            return Err(invalid(&format!("{key} is not an object")));
        }
    }
    let sysctls = NetworkSysctls::take(&mut value)?;
    value["root"]["path"] = root.to_string_lossy().into();
    value["linux"]["cgroupsPath"] = Cgroup::spec_path(id).into();
    if value["hostname"].as_str().unwrap_or_default().is_empty() && has_own_hostname(&value) {
        // Without a VM it would be the machine's.
        value["hostname"] = id.get(..MAX_HOSTNAME).unwrap_or(id).into();
    }
    let cwd = value["process"]["cwd"].as_str().unwrap_or_default().to_owned();
    let json = value.to_string();
    serde_json::from_str::<Spec>(&json).map_err(|error| invalid(&error))?;
    Ok(CompleteSpec { json, cwd, sysctls })
}

/// Whether the spec asks for a new UTS namespace.
fn has_own_hostname(spec: &serde_json::Value) -> bool {
    let namespaces = spec["linux"]["namespaces"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    namespaces
        .iter()
        .any(|namespace| namespace["type"] == "uts" && namespace.get("path").is_none())
}

/// Waits for the disk with a serial number and returns its device.
async fn find_disk(serial: &str) -> Result<PathBuf> {
    let wait = async {
        loop {
            if let Some(device) = look_for_disk(Path::new("/sys/block"), serial) {
                return device;
            }
            tokio::time::sleep(DISK_POLL).await;
        }
    };
    tokio::time::timeout(DISK_DEADLINE, wait)
        .await
        .map_err(|_| AgentError::Timeout(format!("wait for the disk with serial {serial:?}")))
}

fn look_for_disk(block: &Path, serial: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(block).ok()?.flatten() {
        let found = std::fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
        if found.trim_matches(['\0', '\n', ' ']) == serial {
            return Some(Path::new("/dev").join(entry.file_name()));
        }
    }
    None
}

fn make_directory(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|error| AgentError::io(format!("make directory {}", path.display()), error))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_are_plain_names() {
        for id in ["a", "web-1", "9f.c_d", &"x".repeat(128)] {
            assert!(check_id(id).is_ok(), "{id}");
        }
        for id in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "a:b",
            "a,b",
            "a b",
            "\u{e9}",
            &"x".repeat(129),
        ] {
            assert!(check_id(id).is_err(), "{id}");
        }
    }

    #[test]
    fn the_spec_gets_root_and_group_and_loses_hooks_outside_of_the_container() {
        let json = br#"{"ociVersion":"1.1.0","root":{"path":"/host/rootfs","readonly":true},
            "process":{"cwd":"/work","args":["sh"],"user":{"uid":0,"gid":0}},
            "hooks":{"prestart":[{"path":"/bin/evil"}],"startContainer":[{"path":"/bin/kept"}]},"linux":{"cgroupsPath":"/k8s/x"}}"#;
        let spec = complete_spec(json, "c1", Path::new("/run/r")).expect("a spec");
        assert_eq!(spec.cwd, "/work");
        let value: serde_json::Value = serde_json::from_str(&spec.json).expect("json");
        assert_eq!(value["root"]["path"], "/run/r");
        assert_eq!(value["root"]["readonly"], true);
        assert_eq!(value["linux"]["cgroupsPath"], "/ramet/c1");
        assert_eq!(
            value["hooks"],
            serde_json::json!({"startContainer": [{"path": "/bin/kept"}]})
        );
    }

    #[test]
    fn a_container_without_a_hostname_is_called_by_its_id() {
        let hostname = |json: &str| {
            let spec = complete_spec(json.as_bytes(), "c1", Path::new("/r")).expect("a spec");
            serde_json::from_str::<serde_json::Value>(&spec.json).expect("json")["hostname"].clone()
        };
        let uts = r#""linux":{"namespaces":[{"type":"uts"}]}"#;
        assert_eq!(hostname(&format!(r#"{{"ociVersion":"1.1.0",{uts}}}"#)), "c1");
        assert_eq!(
            hostname(&format!(r#"{{"ociVersion":"1.1.0","hostname":"web",{uts}}}"#)),
            "web"
        );
        assert!(hostname(r#"{"ociVersion":"1.1.0"}"#).is_null());
    }

    #[test]
    fn what_is_no_spec_is_refused() {
        for json in ["", "[]", "{\"linux\":3}", "{\"root\":[]}", "{\"process\":4}"] {
            assert!(
                matches!(
                    complete_spec(json.as_bytes(), "c", Path::new("/r")),
                    Err(AgentError::Invalid(_))
                ),
                "{json}"
            );
        }
    }

    #[test]
    fn disks_are_found_by_serial() {
        let block = tempfile::tempdir().expect("a directory");
        for (name, serial) in [("vda", "ro0\n"), ("vdb", "rw0\0\0"), ("loop0", "")] {
            std::fs::create_dir(block.path().join(name)).expect("a directory");
            std::fs::write(block.path().join(name).join("serial"), serial).expect("a file");
        }
        assert_eq!(look_for_disk(block.path(), "rw0"), Some("/dev/vdb".into()));
        assert_eq!(look_for_disk(block.path(), "ro0"), Some("/dev/vda".into()));
        assert_eq!(look_for_disk(block.path(), "rw"), None);
    }

    proptest! {
        #[test]
        fn no_spec_can_hurt(json in ".{0,200}") {
            let _ = complete_spec(json.as_bytes(), "c", Path::new("/r"));
        }
    }
}
