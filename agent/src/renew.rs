//! The new identity of a restored guest: entropy, clock, names, and the end of the parent's connections.
//!
//! One line for each hazard is in docs/fork-hazards.md. All steps are taken while the containers are frozen.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mounts::{Restrictions, Tree};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use protocol::guest::RenewRequest;
use tokio::sync::oneshot;

use crate::error::{AgentError, Result};
use crate::in_root::InRoot;

/// Bounds of what a request may carry, in bytes.
const ENTROPY: std::ops::RangeInclusive<usize> = 32..=4096;
const MAX_HOSTNAME: usize = 64;
const MAX_FORK_JSON: usize = 1 << 20;

/// What a fork reads to learn who it is.
const FORK_JSON: &str = "/run/ramet/fork.json";
const MACHINE_ID: &str = "/etc/machine-id";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where the agent keeps the boot id that containers see.
const OUR_BOOT_ID: &str = "/run/ramet/boot_id";

/// How long each step took.
#[derive(Debug)]
pub struct Steps {
    since: Instant,
    done: Vec<(&'static str, Duration)>,
}

impl Default for Steps {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            done: Vec::new(),
        }
    }
}

impl Steps {
    /// Ends a step, and begins the next.
    pub fn done(&mut self, name: &'static str) {
        let now = Instant::now();
        self.done.push((name, now - self.since));
        self.since = now;
    }

    /// Adds a step that was measured elsewhere.
    pub fn note(&mut self, name: &'static str, elapsed: Duration) {
        self.done.push((name, elapsed));
    }

    /// Name and duration of each.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        self.done.iter().copied()
    }
}

/// Renews the guest. `init_pid` is the container that becomes the fork, `root` its root filesystem as the agent mounted it, `pids`
/// the init of every container. Returns how many connections were killed.
///
/// # Errors
/// When any step fails.
pub async fn renew(
    request: &RenewRequest,
    init_pid: u32,
    root: Option<&Path>,
    pids: Vec<u32>,
    steps: &mut Steps,
) -> Result<u32> {
    check(request)?;
    reseed(&request.entropy).map_err(|error| AgentError::io("reseed the random number generator", error))?;
    set_clock(request.realtime_ns)?;
    if !request.hostname.is_empty() {
        nix::unistd::sethostname(&request.hostname)
            .map_err(|error| AgentError::io("set the guest's hostname", error))?;
    }
    write_boot_id(&request.boot_id)?;
    steps.done("guest");
    let closed = kill_connections(&pids).await?;
    steps.done("connections");
    set_hostname_of(init_pid, &request.hostname)?;
    steps.done("hostname");
    write_files(request, init_pid, root)?;
    steps.done("files");
    Ok(closed)
}

fn check(request: &RenewRequest) -> Result<()> {
    let invalid = |what: &str| Err(AgentError::Invalid(format!("renew: {what}")));
    if !ENTROPY.contains(&request.entropy.len()) {
        return invalid("entropy must be 32 to 4096 bytes");
    }
    if request.realtime_ns <= 0 {
        return invalid("realtime is missing");
    }
    if request.hostname.len() > MAX_HOSTNAME || request.hostname.contains('\0') {
        return invalid("the hostname is too long");
    }
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if request.machine_id.len() != 32 || !hex(&request.machine_id) {
        return invalid("the machine id must be 32 hex digits");
    }
    let groups: Vec<&str> = request.boot_id.split('-').collect();
    if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) || !groups.iter().all(|group| hex(group)) {
        return invalid("the boot id must be a UUID");
    }
    if request.fork_json.len() > MAX_FORK_JSON {
        return invalid("the fork description is too long");
    }
    Ok(())
}

fn reseed(entropy: &[u8]) -> io::Result<()> {
    let random = File::options().write(true).open("/dev/urandom")?;
    crate::sys::add_entropy(&random, entropy)
}

fn set_clock(realtime_ns: i64) -> Result<()> {
    const SECOND: i64 = 1_000_000_000;
    let time = TimeSpec::new(realtime_ns.div_euclid(SECOND), realtime_ns.rem_euclid(SECOND));
    clock_settime(ClockId::CLOCK_REALTIME, time).map_err(|error| AgentError::io("set the clock", error))
}

/// Kills the parent's connections in the agent's network namespace and those of the containers. Returns how many there were.
async fn kill_connections(pids: &[u32]) -> Result<u32> {
    let mut seen = BTreeSet::new();
    let mut busy = Vec::new();
    for pid in std::iter::once(std::process::id()).chain(pids.iter().copied()) {
        // Most namespaces have none. To ask for them in there takes a thread, and the kernel module for it.
        if seen.insert(namespace_id(pid, "net")?) && crate::connections::may_exist(pid)? {
            busy.push(open_namespace(pid, "net")?);
        }
    }
    if busy.is_empty() {
        return Ok(0);
    }
    on_a_thread(move || {
        let mut closed = 0;
        for namespace in busy {
            setns(namespace, CloneFlags::CLONE_NEWNET)
                .map_err(|error| AgentError::io("enter a network namespace", error))?;
            closed += crate::connections::kill_all()?;
        }
        Ok(closed)
    })
    .await
}

/// Does work on a thread of its own, which ends with its namespaces.
pub(crate) async fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new()
        .name("namespaces".into())
        .spawn(move || {
            // Whoever waits may be gone; then the guest is being killed.
            let _ = done.send(work());
        })
        .map_err(|error| AgentError::io("start a thread", error))?;
    result
        .await
        .map_err(|_| AgentError::Runtime("work inside the containers broke off".into()))?
}

/// Sets the hostname that the processes of `pid`'s UTS namespace see.
fn set_hostname_of(pid: u32, hostname: &str) -> Result<()> {
    let own = std::process::id();
    if hostname.is_empty() || namespace_id(pid, "uts")? == namespace_id(own, "uts")? {
        return Ok(());
    }
    let (home, theirs) = (open_namespace(own, "uts")?, open_namespace(pid, "uts")?);
    // This thread is back before anything else runs on it.
    setns(theirs, CloneFlags::CLONE_NEWUTS).map_err(|error| AgentError::io("enter a UTS namespace", error))?;
    let set = nix::unistd::sethostname(hostname);
    setns(home, CloneFlags::CLONE_NEWUTS).map_err(|error| AgentError::io("leave a UTS namespace", error))?;
    set.map_err(|error| AgentError::io("set the hostname", error))
}

/// Shows a new container our boot id in the place of the kernel's, which a fork shares with its parent. To renew it is then to write
/// a file.
///
/// # Errors
/// When the container's mounts cannot be changed.
pub async fn show_boot_id(pid: u32) -> Result<()> {
    if !Path::new(OUR_BOOT_ID).exists() {
        let boot_id = fs::read_to_string(BOOT_ID).map_err(|error| AgentError::io(format!("read {BOOT_ID}"), error))?;
        write_boot_id(boot_id.trim())?;
    }
    let tree = Tree::copy(Path::new(OUR_BOOT_ID), false)
        .and_then(|tree| tree.restrict(Restrictions::READ_ONLY).map(|()| tree))
        .map_err(|error| AgentError::io(format!("copy the mount of {OUR_BOOT_ID}"), error))?;
    let namespace = open_namespace(pid, "mnt")?;
    on_a_thread(move || {
        unshare(CloneFlags::CLONE_FS).map_err(|error| AgentError::io("leave the agent's working directory", error))?;
        setns(namespace, CloneFlags::CLONE_NEWNS).map_err(|error| AgentError::io("enter a mount namespace", error))?;
        cover_boot_id(&tree).map_err(|error| AgentError::io(format!("mount over {BOOT_ID}"), error))
    })
    .await
}

/// In place: the file is mounted in containers.
fn write_boot_id(boot_id: &str) -> Result<()> {
    let failed = |error| AgentError::io(format!("write {OUR_BOOT_ID}"), error);
    if let Some(parent) = Path::new(OUR_BOOT_ID).parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    fs::write(OUR_BOOT_ID, format!("{boot_id}\n")).map_err(failed)
}

/// Mounts our boot id over the kernel's. A container without /proc sees none.
fn cover_boot_id(tree: &Tree) -> io::Result<()> {
    match fs::metadata(BOOT_ID) {
        Ok(_) => tree.mount(Path::new(BOOT_ID)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(()),
        Err(error) => Err(error),
    }
}

fn namespace_path(pid: u32, kind: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join("ns").join(kind)
}

pub(crate) fn namespace_id(pid: u32, kind: &str) -> Result<u64> {
    let path = namespace_path(pid, kind);
    let metadata = fs::metadata(&path);
    metadata
        .map(|found| found.ino())
        .map_err(|error| AgentError::io(format!("look at {}", path.display()), error))
}

pub(crate) fn open_namespace(pid: u32, kind: &str) -> Result<File> {
    let path = namespace_path(pid, kind);
    File::open(&path).map_err(|error| AgentError::io(format!("open {}", path.display()), error))
}

pub(crate) fn enter(pid: u32, kind: &str, flag: CloneFlags) -> Result<()> {
    let namespace = open_namespace(pid, kind)?;
    setns(namespace, flag).map_err(|error| AgentError::io(format!("enter the {kind} namespace of {pid}"), error))
}

fn write_files(request: &RenewRequest, init_pid: u32, root: Option<&Path>) -> Result<()> {
    let seen_path = Path::new("/proc").join(init_pid.to_string()).join("root");
    let seen = InRoot::open(&seen_path)?;
    // A read-only root is writable where the agent mounted it.
    let ours = InRoot::open(root.unwrap_or(&seen_path))?;
    if ours.is_file(Path::new(MACHINE_ID)) {
        ours.write(
            Path::new(MACHINE_ID),
            format!("{}\n", request.machine_id).as_bytes(),
            0o444,
        )?;
    }
    match seen.write(Path::new(FORK_JSON), &request.fork_json, 0o644) {
        Err(AgentError::Io { source, .. }) if source.raw_os_error() == Some(libc::EROFS) => {
            ours.write(Path::new(FORK_JSON), &request.fork_json, 0o644)
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> RenewRequest {
        RenewRequest {
            entropy: vec![7; 32],
            realtime_ns: 1,
            hostname: "w7".into(),
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            boot_id: "01234567-89ab-cdef-0123-456789abcdef".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_whole_request_is_accepted() {
        check(&request()).expect("all is there");
    }

    #[test]
    fn each_missing_or_bad_part_is_refused() {
        let spoil: [fn(&mut RenewRequest); 8] = [
            |r| r.entropy.truncate(31),
            |r| r.entropy.resize(5000, 0),
            |r| r.realtime_ns = 0,
            |r| r.hostname = "x".repeat(65),
            |r| r.machine_id.clear(),
            |r| r.machine_id = "0123456789ABCDEF0123456789ABCDEF".into(),
            |r| r.boot_id = "01234567-89ab-cdef-0123-456789abcdeg".into(),
            |r| r.fork_json.resize(MAX_FORK_JSON + 1, b' '),
        ];
        for (index, spoil) in spoil.into_iter().enumerate() {
            let mut request = request();
            spoil(&mut request);
            assert!(matches!(check(&request), Err(AgentError::Invalid(_))), "part {index}");
        }
    }

    #[test]
    fn namespaces_have_ids() {
        let own = std::process::id();
        assert_eq!(
            namespace_id(own, "net").expect("our own"),
            namespace_id(own, "net").expect("our own")
        );
        assert!(namespace_id(own, "nosuch").is_err());
    }
}
