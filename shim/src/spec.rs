//! From the OCI spec that containerd wrote for this host to the one the guest runs. Pure.
//!
//! The container keeps its process, user, capabilities, seccomp, limits and kernel filesystems. It loses what belongs to this host:
//! network namespace (the VM is one), cgroup path, security labels of the host's LSM, hooks that run on the host. Small host files that it binds are
//! sent as files; other host paths are refused by name.

use std::path::{Path, PathBuf};

use oci_spec::runtime::{
    Hooks, Linux, LinuxCpu, LinuxDeviceType, LinuxNamespace, LinuxNamespaceType, LinuxResources, Mount, Process, Spec,
};

/// Largest file that is sent into the guest, in bytes.
pub const MAX_FILE: u64 = 1 << 20;
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
    /// A regular file of this many bytes.
    File(u64),
    /// A directory.
    Directory,
    /// Anything else.
    Other,
    /// Nothing.
    Missing,
}

/// A host file to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileToSend {
    /// On this host.
    pub source: PathBuf,
    /// In the container.
    pub destination: PathBuf,
}

/// The rewritten spec.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// For the agent.
    pub spec: Spec,
    /// Host files it binds.
    pub files: Vec<FileToSend>,
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
    let mut files = Vec::new();
    let mut mounts = Vec::new();
    for mount in host.mounts().iter().flatten() {
        if let Some(kept) = rewrite_mount(mount, look, &mut files)? {
            mounts.push(kept);
        }
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
    Ok(GuestSpec { spec, files })
}

/// The hooks that run inside the container; the others are run on this host.
fn guest_hooks(host: &Hooks) -> Option<Hooks> {
    let inside = host.start_container().clone().filter(|hooks| !hooks.is_empty())?;
    let mut hooks = Hooks::default();
    hooks.set_start_container(Some(inside));
    Some(hooks)
}

/// A process without the labels of the host's security modules, which the guest does not have.
#[must_use]
pub fn process_for_guest(mut process: Process) -> Process {
    process.set_apparmor_profile(None);
    process.set_selinux_label(None);
    process
}

fn rewrite_mount(
    mount: &Mount,
    look: &dyn Fn(&Path) -> HostPath,
    files: &mut Vec<FileToSend>,
) -> Result<Option<Mount>, SpecError> {
    let destination = mount.destination().clone();
    let options = mount.options().clone().unwrap_or_default();
    let kind = mount.typ().clone().unwrap_or_default();
    let is_bind = matches!(kind.as_str(), "bind" | "rbind") || options.iter().any(|o| o == "bind" || o == "rbind");
    let refuse = |reason: String| {
        Err(SpecError::Mount {
            destination: destination.clone(),
            reason,
        })
    };
    if !is_bind {
        if KERNEL_FILESYSTEMS.contains(&kind.as_str()) {
            return Ok(Some(mount.clone()));
        }
        return refuse(format!(
            "filesystem type {kind:?} of the host is not available in the virtual machine"
        ));
    }
    let Some(source) = mount.source().clone() else {
        return refuse("a bind mount without a source".into());
    };
    if destination == Path::new("/dev/shm") {
        return Ok(Some(shm_mount(&destination)));
    }
    match look(&source) {
        HostPath::File(bytes) if bytes <= MAX_FILE => {
            files.push(FileToSend { source, destination });
            Ok(None)
        }
        HostPath::File(bytes) => refuse(format!(
            "host file {} has {bytes} bytes; files up to {MAX_FILE} bytes are copied into the virtual machine, larger ones are not shared",
            source.display()
        )),
        HostPath::Directory => refuse(format!(
            "host directory {} cannot be shared with a virtual machine; put the files into the image",
            source.display()
        )),
        HostPath::Other => refuse(format!("{} is neither a file nor a directory", source.display())),
        HostPath::Missing => refuse(format!("{} does not exist on this host", source.display())),
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
            "/etc/hosts" => HostPath::File(100),
            "/big" => HostPath::File(MAX_FILE + 1),
            "/dir" => HostPath::Directory,
            _ => HostPath::Missing,
        }
    }

    fn with_mount(mount: &str) -> Spec {
        spec(&format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},"mounts":[{mount}]}}"#
        ))
    }

    #[test]
    fn files_are_sent_and_directories_refused_by_name() {
        let host =
            with_mount(r#"{"destination":"/etc/hosts","type":"bind","source":"/etc/hosts","options":["rbind","ro"]}"#);
        let guest = for_guest(&host, "c", &look).unwrap();
        assert_eq!(
            guest.files,
            vec![FileToSend {
                source: "/etc/hosts".into(),
                destination: "/etc/hosts".into()
            }]
        );
        assert_eq!(guest.spec.mounts().as_ref().unwrap().len(), 0);
        for (source, words) in [
            ("/dir", "host directory /dir"),
            ("/big", "host file /big"),
            ("/none", "does not exist"),
        ] {
            let host = with_mount(&format!(
                r#"{{"destination":"/data","type":"bind","source":"{source}","options":["rbind"]}}"#
            ));
            let text = for_guest(&host, "c", &look).unwrap_err().to_string();
            assert!(text.contains("/data") && text.contains(words), "{text}");
        }
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
