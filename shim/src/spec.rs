//! From the OCI spec that containerd wrote for this host to the one the guest runs. Pure.
//!
//! The container keeps its process, user, capabilities, seccomp, limits and kernel filesystems. It loses what belongs to this host:
//! network namespace (the VM is one), cgroup path, security labels of the host's LSM, hooks that run on the host. Host files and directories
//! that it binds become volumes of the guest; other host paths are refused by name.

use std::path::{Path, PathBuf};

use oci_spec::runtime::{
    Hooks, Linux, LinuxCpu, LinuxDeviceType, LinuxNamespace, LinuxNamespaceType, LinuxResources, Mount, Process, Spec,
};

/// Longest hostname, in bytes.
const MAX_HOSTNAME: usize = 63;
/// Kernel filesystems that the guest mounts by itself.
const KERNEL_FILESYSTEMS: [&str; 9] = [
    "proc", "sysfs", "devpts", "tmpfs", "mqueue", "cgroup", "cgroup2", "devtmpfs", "ramfs",
];

/// Devices that every container gets from its own kernel.
const GUEST_DEVICES: [&str; 7] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/ptmx",
];

/// Why the spec cannot be run in a VM.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// It is no spec.
    #[error("config.json: {0}")]
    Unreadable(String),
    /// It has no process.
    #[error("config.json has no process")]
    NoProcess,
    /// A mount that needs something of the host.
    #[error("mount {destination}: {reason}")]
    Mount {
        /// Where in the container.
        destination: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// A bind mount of nothing; in runc's words.
    #[error("error mounting {source_path:?} to rootfs at {destination:?}: bind mount source stat: stat {}: no such file or directory", source_path.display())]
    NoSource {
        /// On this host.
        source_path: PathBuf,
        /// In the container.
        destination: PathBuf,
    },
    /// A namespace of another container or of the host.
    #[error("{0} namespace of another process cannot be joined from a virtual machine")]
    Namespace(String),
    /// A device of the host.
    #[error("host device {0} cannot be passed into a virtual machine")]
    Device(PathBuf),
}

/// What is at a host path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPath {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// Anything else.
    Other,
    /// Nothing.
    Missing,
}

/// A host file or directory to share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// On this host.
    pub source: PathBuf,
    /// In the container.
    pub destination: PathBuf,
    /// It is a directory, else a file.
    pub is_directory: bool,
    /// With what is mounted below it (`rbind`).
    pub recursive: bool,
    /// Not to be changed (`ro`).
    pub read_only: bool,
    /// With what will be mounted below it (`rslave`, `rshared`).
    pub follows_host: bool,
    /// As they stand in the spec.
    pub options: Vec<String>,
}

/// The rewritten spec.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// For the agent.
    pub spec: Spec,
    /// What it binds of the host; the spec has them by their numbers.
    pub volumes: Vec<Volume>,
}

/// Parses `config.json`.
///
/// # Errors
/// [`SpecError::Unreadable`], [`SpecError::NoProcess`].
pub fn parse(bytes: &[u8]) -> Result<Spec, SpecError> {
    let spec: Spec = serde_json::from_slice(bytes).map_err(|e| SpecError::Unreadable(e.to_string()))?;
    if spec.process().is_none() {
        return Err(SpecError::NoProcess);
    }
    Ok(spec)
}

/// `process.args`.
#[must_use]
pub fn args(spec: &Spec) -> Vec<String> {
    spec.process()
        .as_ref()
        .and_then(|p| p.args().clone())
        .unwrap_or_default()
}

/// An annotation.
#[must_use]
pub fn annotation<'a>(spec: &'a Spec, key: &str) -> Option<&'a str> {
    spec.annotations().as_ref()?.get(key).map(String::as_str)
}

/// Rewrites the spec for the guest, where the container is called `guest_id`.
///
/// # Errors
/// What the guest cannot have, by name.
pub fn for_guest(host: &Spec, guest_id: &str, look: &dyn Fn(&Path) -> HostPath) -> Result<GuestSpec, SpecError> {
    let mut spec = host.clone();
    let mut volumes = Vec::new();
    let mut mounts = Vec::new();
    for mount in host.mounts().iter().flatten() {
        mounts.push(rewrite_mount(mount, guest_id, look, &mut volumes)?);
    }
    spec.set_mounts(Some(mounts));
    if host.hostname().is_none() {
        spec.set_hostname(Some(guest_id.chars().take(MAX_HOSTNAME).collect()));
    }
    spec.set_hooks(host.hooks().as_ref().and_then(guest_hooks));
    let process = host.process().clone().ok_or(SpecError::NoProcess)?;
    spec.set_process(Some(process_for_guest(process)));
    if let Some(linux) = host.linux() {
        spec.set_linux(Some(rewrite_linux(linux.clone(), guest_id)?));
    }
    Ok(GuestSpec { spec, volumes })
}

/// The hooks that run inside the container; the others are run on this host.
fn guest_hooks(host: &Hooks) -> Option<Hooks> {
    let inside = host.start_container().clone().filter(|hooks| !hooks.is_empty())?;
    let mut hooks = Hooks::default();
    hooks.set_start_container(Some(inside));
    Some(hooks)
}

/// What the spec binds of this host, for a container that exists already.
///
/// # Errors
/// As [`for_guest`].
pub fn volumes(host: &Spec, look: &dyn Fn(&Path) -> HostPath) -> Result<Vec<Volume>, SpecError> {
    let mut volumes = Vec::new();
    for mount in host.mounts().iter().flatten().filter(|mount| is_bind(mount)) {
        rewrite_mount(mount, "", look, &mut volumes)?;
    }
    Ok(volumes)
}

/// A process without the labels of the host's security modules, which the guest does not have.
#[must_use]
pub fn process_for_guest(mut process: Process) -> Process {
    process.set_apparmor_profile(None);
    process.set_selinux_label(None);
    process
}

/// Whether it is a bind mount, by its type or by its options.
fn is_bind(mount: &Mount) -> bool {
    let is = |word: &str| word == "bind" || word == "rbind";
    mount.typ().as_deref().is_some_and(is) || mount.options().iter().flatten().any(|option| is(option))
}

fn rewrite_mount(
    mount: &Mount,
    guest_id: &str,
    look: &dyn Fn(&Path) -> HostPath,
    volumes: &mut Vec<Volume>,
) -> Result<Mount, SpecError> {
    let destination = mount.destination().clone();
    let refuse = |reason: String| {
        Err(SpecError::Mount {
            destination: destination.clone(),
            reason,
        })
    };
    if !is_bind(mount) {
        let kind = mount.typ().clone().unwrap_or_default();
        if KERNEL_FILESYSTEMS.contains(&kind.as_str()) {
            return Ok(mount.clone());
        }
        return refuse(format!(
            "filesystem type {kind:?} of the host is not available in the virtual machine"
        ));
    }
    let Some(source) = mount.source().clone() else {
        return refuse("a bind mount without a source".into());
    };
    if destination == Path::new("/dev/shm") {
        return Ok(shm_mount(&destination));
    }
    if mount.uid_mappings().is_some() || mount.gid_mappings().is_some() {
        return refuse("id mappings of a mount are not available in the virtual machine".into());
    }
    let is_directory = match look(&source) {
        HostPath::File => false,
        HostPath::Directory => true,
        HostPath::Other => {
            return refuse(format!(
                "{} is neither a file nor a directory; sockets and devices of the host cannot be used in the virtual machine",
                source.display()
            ));
        }
        HostPath::Missing => {
            return Err(SpecError::NoSource {
                source_path: source,
                destination,
            });
        }
    };
    let volume = volume(mount, source, is_directory);
    let mut kept = mount.clone();
    let path = Path::new(protocol::VOLUMES)
        .join(guest_id)
        .join(volumes.len().to_string());
    kept.set_typ(Some("bind".into()));
    kept.set_source(Some(path));
    volumes.push(volume);
    Ok(kept)
}

fn volume(mount: &Mount, source: PathBuf, is_directory: bool) -> Volume {
    let options: Vec<&str> = mount.options().iter().flatten().map(String::as_str).collect();
    let recursive = mount.typ().as_deref() == Some("rbind") || options.contains(&"rbind");
    // The last one counts.
    let access = options.iter().rev().find(|o| ["ro", "rro", "rw", "rrw"].contains(o));
    let follows = ["slave", "rslave", "shared", "rshared"];
    Volume {
        source,
        destination: mount.destination().clone(),
        is_directory,
        recursive,
        read_only: access.is_some_and(|o| o.ends_with("ro")),
        follows_host: options.iter().any(|o| follows.contains(o)),
        options: mount.options().clone().unwrap_or_default(),
    }
}

/// What a bind of the host's shared memory becomes: the guest's own.
fn shm_mount(destination: &Path) -> Mount {
    let mut mount = Mount::default();
    mount.set_destination(destination.to_owned());
    mount.set_typ(Some("tmpfs".into()));
    mount.set_source(Some("shm".into()));
    let options = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
    mount.set_options(Some(options.iter().map(|o| (*o).to_owned()).collect()));
    mount
}

fn rewrite_linux(mut linux: Linux, guest_id: &str) -> Result<Linux, SpecError> {
    let mut namespaces = Vec::new();
    for namespace in linux.namespaces().iter().flatten() {
        if namespace.typ() == LinuxNamespaceType::Network {
            continue;
        }
        if namespace.path().is_some() {
            return Err(SpecError::Namespace(format!("{:?}", namespace.typ()).to_lowercase()));
        }
        namespaces.push(namespace.clone());
    }
    // Without these the container would see the agent.
    for needed in [LinuxNamespaceType::Pid, LinuxNamespaceType::Mount] {
        if !namespaces.iter().any(|n| n.typ() == needed) {
            let mut namespace = LinuxNamespace::default();
            namespace.set_typ(needed);
            namespaces.push(namespace);
        }
    }
    linux.set_namespaces(Some(namespaces));
    // A privileged container lists every device of the host and runs well without: nobody asked for one of them.
    let asked = if may_use_all_devices(&linux) {
        None
    } else {
        linux.devices().as_ref()
    };
    let is_of_host = |path: &&PathBuf| !GUEST_DEVICES.iter().any(|own| Path::new(own) == path.as_path());
    if let Some(path) = asked.into_iter().flatten().map(|device| device.path()).find(is_of_host) {
        return Err(SpecError::Device(path.clone()));
    }
    linux.set_devices(None);
    linux.set_cgroups_path(Some(PathBuf::from(format!("/ramet/{guest_id}"))));
    linux.set_mount_label(None);
    linux.set_intel_rdt(None);
    if let Some(resources) = linux.resources().clone() {
        linux.set_resources(Some(rewrite_resources(resources)));
    }
    Ok(linux)
}

/// Whether every access to every device is allowed, as `--privileged` has it.
fn may_use_all_devices(linux: &Linux) -> bool {
    let rules = linux
        .resources()
        .as_ref()
        .and_then(|resources| resources.devices().as_ref());
    rules.into_iter().flatten().any(|rule| {
        let any_kind = matches!(rule.typ(), None | Some(LinuxDeviceType::A));
        rule.allow() && any_kind && rule.major().is_none_or(|n| n < 0) && rule.minor().is_none_or(|n| n < 0)
    })
}

/// Keeps the limits that mean the same in the guest.
#[must_use]
pub fn rewrite_resources(mut resources: LinuxResources) -> LinuxResources {
    resources.set_hugepage_limits(None);
    resources.set_block_io(None);
    resources.set_network(None);
    resources.set_rdma(None);
    // As with runc, 0 is the same as nothing: clients send it for limits that they do not mean to change.
    let positive = |number: Option<u64>| number.filter(|number| *number != 0);
    let set = |number: Option<i64>| number.filter(|number| *number != 0);
    if let Some(cpu) = resources.cpu().clone() {
        let mut cpu: LinuxCpu = cpu;
        // CPU and node numbers are the host's.
        cpu.set_cpus(None);
        cpu.set_mems(None);
        cpu.set_shares(positive(cpu.shares()));
        cpu.set_quota(set(cpu.quota()));
        cpu.set_period(positive(cpu.period()));
        resources.set_cpu(Some(cpu));
    }
    if let Some(mut memory) = *resources.memory() {
        memory.set_limit(set(memory.limit()));
        memory.set_reservation(set(memory.reservation()));
        memory.set_swap(set(memory.swap()));
        resources.set_memory(Some(memory));
    }
    if resources.pids().as_ref().is_some_and(|pids| pids.limit() == 0) {
        resources.set_pids(None);
    }
    resources
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(json: &str) -> Spec {
        parse(json.as_bytes()).unwrap()
    }

    fn look(path: &Path) -> HostPath {
        match path.to_str().unwrap() {
            "/etc/hosts" => HostPath::File,
            "/dir" => HostPath::Directory,
            "/run/x.sock" => HostPath::Other,
            _ => HostPath::Missing,
        }
    }

    fn with_mount(mount: &str) -> Spec {
        spec(&format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},"mounts":[{mount}]}}"#
        ))
    }

    fn bind(source: &str, destination: &str, options: &str) -> Spec {
        with_mount(&format!(
            r#"{{"destination":"{destination}","type":"bind","source":"{source}","options":[{options}]}}"#
        ))
    }

    #[test]
    fn files_and_directories_become_volumes() {
        let host = bind("/etc/hosts", "/etc/hosts", r#""rbind","rw","ro","rprivate""#);
        let guest = for_guest(&host, "c", &look).unwrap();
        let expected = Volume {
            source: "/etc/hosts".into(),
            destination: "/etc/hosts".into(),
            is_directory: false,
            recursive: true,
            read_only: true,
            follows_host: false,
            options: ["rbind", "rw", "ro", "rprivate"].map(str::to_owned).into(),
        };
        assert_eq!(guest.volumes, [expected]);
        let mounts = guest.spec.mounts().as_ref().unwrap();
        assert_eq!(mounts[0].source().as_deref(), Some(Path::new("/run/ramet/volumes/c/0")));
        let host = bind("/dir", "/data", r#""bind","rslave""#);
        let volume = for_guest(&host, "c", &look).unwrap().volumes.remove(0);
        assert!(volume.is_directory && !volume.recursive && !volume.read_only && volume.follows_host);
    }

    #[test]
    fn what_cannot_be_shared_is_refused_by_name() {
        for (source, words) in [
            ("/run/x.sock", "mount /data: /run/x.sock is neither"),
            (
                "/none",
                r#"error mounting "/none" to rootfs at "/data": bind mount source stat: stat /none: no such file or directory"#,
            ),
        ] {
            let text = for_guest(&bind(source, "/data", r#""rbind""#), "c", &look)
                .unwrap_err()
                .to_string();
            assert!(text.contains(words), "{text}");
        }
        let host = with_mount(
            r#"{"destination":"/d","type":"bind","source":"/dir","uidMappings":[{"containerID":0,"hostID":1,"size":1}]}"#,
        );
        assert!(matches!(for_guest(&host, "c", &look), Err(SpecError::Mount { .. })));
    }

    #[test]
    fn kernel_filesystems_stay_and_shm_becomes_the_guests() {
        let host = with_mount(
            r#"{"destination":"/proc","type":"proc","source":"proc"},{"destination":"/dev/shm","type":"bind","source":"/dir","options":["rbind"]}"#,
        );
        let guest = for_guest(&host, "c", &look).unwrap();
        let kinds: Vec<_> = guest
            .spec
            .mounts()
            .iter()
            .flatten()
            .filter_map(|m| m.typ().clone())
            .collect();
        assert_eq!(kinds, ["proc", "tmpfs"]);
        let host = with_mount(r#"{"destination":"/x","type":"ext4","source":"/dev/sda1"}"#);
        assert!(for_guest(&host, "c", &look).is_err());
    }

    #[test]
    fn host_things_are_dropped() {
        let host = spec(
            r#"{"ociVersion":"1.0.2","process":{"args":["a"],"cwd":"/","user":{"uid":0,"gid":0},"apparmorProfile":"p"},
            "hooks":{"createRuntime":[{"path":"/bin/x"}]},
            "linux":{"namespaces":[{"type":"network","path":"/var/run/netns/x"},{"type":"pid"},{"type":"mount"}],
            "cgroupsPath":"/default/c","resources":{"memory":{"limit":1000},"cpu":{"shares":5,"cpus":"0-63"}}}}"#,
        );
        let guest = for_guest(&host, "c", &look).unwrap();
        assert!(guest.spec.hooks().is_none());
        let linux = guest.spec.linux().as_ref().unwrap();
        assert_eq!(linux.namespaces().as_ref().unwrap().len(), 2);
        assert_eq!(linux.cgroups_path().as_ref().unwrap(), Path::new("/ramet/c"));
        let cpu = linux.resources().as_ref().unwrap().cpu().as_ref().unwrap();
        assert_eq!((cpu.shares(), cpu.cpus()), (Some(5), &None));
        assert_eq!(
            linux.resources().as_ref().unwrap().memory().as_ref().unwrap().limit(),
            Some(1000)
        );
        assert!(guest.spec.process().as_ref().unwrap().apparmor_profile().is_none());
    }

    #[test]
    fn a_limit_of_0_is_none() {
        let json = r#"{"memory":{"limit":1000,"swap":0,"reservation":0},"cpu":{"shares":0,"quota":0,"period":0},"pids":{"limit":0}}"#;
        let kept = rewrite_resources(serde_json::from_str(json).unwrap());
        assert_eq!(kept.pids(), &None);
        let (memory, cpu) = (kept.memory().unwrap(), kept.cpu().clone().unwrap());
        assert_eq!(
            (memory.limit(), memory.swap(), memory.reservation()),
            (Some(1000), None, None)
        );
        assert_eq!((cpu.shares(), cpu.quota(), cpu.period()), (None, None, None));
        let kept = rewrite_resources(serde_json::from_str(r#"{"pids":{"limit":-1}}"#).unwrap());
        assert_eq!(kept.pids().unwrap().limit(), -1);
    }

    #[test]
    fn a_device_is_refused_unless_all_are_allowed() {
        let with = |path: &str, rule: &str| {
            spec(&format!(
                r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},"linux":{{
                "devices":[{{"path":"{path}","type":"c","major":10,"minor":200}}],"resources":{{"devices":[{rule}]}}}}}}"#
            ))
        };
        let all = r#"{"allow":true,"access":"rwm"}"#;
        let none = r#"{"allow":false,"access":"rwm"}"#;
        let one = r#"{"allow":true,"type":"c","major":10,"minor":200,"access":"rwm"}"#;
        let guest = for_guest(&with("/dev/net/tun", all), "c", &look).unwrap();
        assert_eq!(guest.spec.linux().as_ref().unwrap().devices(), &None);
        for rules in [none.to_owned(), format!("{none},{one}")] {
            let refused = for_guest(&with("/dev/net/tun", &rules), "c", &look);
            assert_eq!(refused.err(), Some(SpecError::Device("/dev/net/tun".into())));
            assert!(for_guest(&with("/dev/null", &rules), "c", &look).is_ok());
        }
    }

    #[test]
    fn foreign_namespaces_are_refused() {
        let host = spec(
            r#"{"ociVersion":"1.0.2","process":{"args":["a"],"cwd":"/","user":{"uid":0,"gid":0}},"linux":{"namespaces":[{"type":"ipc","path":"/proc/1/ns/ipc"}]}}"#,
        );
        assert!(matches!(for_guest(&host, "c", &look), Err(SpecError::Namespace(_))));
    }

    proptest! {
        #[test]
        fn parser_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) { let _ = parse(&bytes); }
    }
}
