//! Volumes in the mount namespaces of containers: put there after the container was made, and taken away for a checkpoint.
//!
//! Everything here is for a thread of its own, which ends with the namespaces that it entered.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use mounts::{Restrictions, Tree};
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use protocol::VolumeHeader;

use crate::error::{AgentError, Result};
use crate::renew::{enter, namespace_id, open_namespace};

/// Most holders that are named.
const MAX_NAMED: usize = 16;

/// Major and minor number of a filesystem.
type Device = (u32, u32);

/// Mounts the volume at `path` in the mount namespace of `pid`, as the header says.
///
/// # Errors
/// When the mount point cannot be made, or the kernel refuses.
pub fn place(path: &Path, header: &VolumeHeader, pid: u32) -> Result<()> {
    let target = Path::new(&header.destination);
    let failed = |error: std::io::Error| AgentError::io(format!("mount a volume at {}", target.display()), error);
    if !target.is_absolute() {
        return Err(AgentError::Invalid(format!("volume at {}", target.display())));
    }
    leave_directories()?;
    let tree = Tree::copy(path, false).map_err(failed)?;
    tree.restrict(restrictions(&header.options)).map_err(failed)?;
    enter(pid, "mnt", CloneFlags::CLONE_NEWNS)?;
    // What is in the way of the path is the container's own: no link leads out of this namespace.
    if header.is_directory {
        fs::create_dir_all(target).map_err(failed)?;
    } else if fs::metadata(target).is_err() {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        fs::File::create(target).map_err(failed)?;
    }
    tree.mount(target).map_err(failed)
}

/// What mount options forbid. The last word about a thing counts.
fn restrictions(options: &[String]) -> Restrictions {
    let mut all = Restrictions::default();
    for option in options {
        let (word, on) = match option.as_str() {
            "rw" => ("ro", false),
            "suid" => ("nosuid", false),
            "dev" => ("nodev", false),
            "exec" => ("noexec", false),
            other => (other, true),
        };
        let one = match word {
            "ro" | "rro" => Restrictions::READ_ONLY,
            "nosuid" | "rnosuid" => Restrictions::NO_SUID,
            "nodev" | "rnodev" => Restrictions::NO_DEVICES,
            "noexec" | "rnoexec" => Restrictions::NO_EXEC,
            "noatime" => Restrictions::NO_ACCESS_TIME,
            "nodiratime" => Restrictions::NO_DIRECTORY_ACCESS_TIME,
            "nosymfollow" => Restrictions::NO_SYMLINKS,
            _ => continue,
        };
        all = if on { all.with(one) } else { all.without(one) };
    }
    all
}

/// Unmounts what the agent has mounted at `paths` from every namespace but its own.
///
/// # Errors
/// While a process holds something of it, or something is mounted on top; nothing is done then.
pub fn take_away(paths: &[PathBuf]) -> Result<()> {
    leave_directories()?;
    let own = mounts_of("self")?;
    let is_ours = |mount: &&Mount| paths.contains(&mount.point);
    let devices: BTreeSet<Device> = own.iter().filter(is_ours).map(|mount| mount.device).collect();
    let pids = pids()?;
    let mut named: Vec<String> = Vec::new();
    for &pid in &pids {
        if named.len() < MAX_NAMED {
            named.extend(held_by(pid, &devices));
        }
    }
    let mut namespaces = BTreeMap::new();
    for &pid in &pids {
        // A process that has just ended has none. Opened now: inside of one, /proc is another one.
        if let Ok(id) = namespace_id(pid, "mnt")
            && let Entry::Vacant(place) = namespaces.entry(id)
            && let (Ok(file), Ok(mounts)) = (open_namespace(pid, "mnt"), mounts_of(&pid.to_string()))
        {
            place.insert((file, mounts));
        }
    }
    namespaces.remove(&namespace_id(std::process::id(), "mnt")?);
    for (_, mounts) in namespaces.values() {
        named.extend(on_top(mounts, &devices));
    }
    in_each(&namespaces, &devices, |mount| {
        // Its path would lead to something else.
        if crate::sys::device_of(&mount.point).ok() != Some(mount.device) {
            named.push(format!("{} is hidden by another mount", mount.point.display()));
        }
        Ok(())
    })?;
    if !named.is_empty() {
        named.truncate(MAX_NAMED);
        let text = format!("volumes are in use: {}", named.join("; "));
        return Err(AgentError::Precondition(text));
    }
    in_each(&namespaces, &devices, |mount| {
        // Nothing holds it, so it goes at once.
        umount2(&mount.point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)
            .map_err(|error| AgentError::io(format!("unmount volume {}", mount.point.display()), error))
    })
}

/// Does something with each mount of these filesystems, last ones first, in its mount namespace.
fn in_each(
    namespaces: &BTreeMap<u64, (fs::File, Vec<Mount>)>,
    devices: &BTreeSet<Device>,
    mut work: impl FnMut(&Mount) -> Result<()>,
) -> Result<()> {
    for (namespace, mounts) in namespaces.values() {
        let mut points = mounts.iter().filter(|m| devices.contains(&m.device)).rev().peekable();
        if points.peek().is_none() {
            continue;
        }
        setns(namespace, CloneFlags::CLONE_NEWNS).map_err(|error| AgentError::io("enter a mount namespace", error))?;
        points.try_for_each(&mut work)?;
    }
    Ok(())
}

fn leave_directories() -> Result<()> {
    unshare(CloneFlags::CLONE_FS).map_err(|error| AgentError::io("leave the agent's working directory", error))
}

/// A line of `/proc/PID/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    parent: u64,
    device: Device,
    point: PathBuf,
}

fn mounts_of(pid: &str) -> Result<Vec<Mount>> {
    let path = Path::new("/proc").join(pid).join("mountinfo");
    let text = fs::read(&path).map_err(|error| AgentError::io(format!("read {}", path.display()), error))?;
    Ok(text.split(|&b| b == b'\n').filter_map(parse_mount).collect())
}

fn parse_mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&b| b == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (id, parent, device) = (text()?.parse().ok()?, text()?.parse().ok()?, text()?);
    let (major, minor) = device.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let point = unescape(fields.nth(1)?);
    Some(Mount {
        id,
        parent,
        device,
        point,
    })
}

/// Undoes `\ooo` for blanks and backslashes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        bytes.push(code.unwrap_or(*first));
        rest = tail.get(if code.is_some() { 3 } else { 0 }..).unwrap_or_default();
    }
    OsString::from_vec(bytes).into()
}

/// What is mounted on volumes and is none.
fn on_top(mounts: &[Mount], devices: &BTreeSet<Device>) -> Vec<String> {
    let volumes: BTreeSet<u64> = mounts
        .iter()
        .filter(|mount| devices.contains(&mount.device))
        .map(|mount| mount.id)
        .collect();
    mounts
        .iter()
        .filter(|mount| volumes.contains(&mount.parent) && !devices.contains(&mount.device))
        .map(|mount| format!("{} is mounted on one", mount.point.display()))
        .collect()
}

/// Processes but the agent and the kernel's.
fn pids() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").map_err(|error| AgentError::io("list /proc", error))?;
    let own = std::process::id();
    Ok(entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| pid != own)
        .collect())
}

/// What of these filesystems a process holds: open files, directories it works in, mapped files, what it watches.
fn held_by(pid: u32, devices: &BTreeSet<Device>) -> Vec<String> {
    let directory = Path::new("/proc").join(pid.to_string());
    let mut links: Vec<PathBuf> = ["cwd", "root", "exe"].iter().map(|name| directory.join(name)).collect();
    let open = fs::read_dir(directory.join("fd")).into_iter().flatten().flatten();
    links.extend(open.map(|entry| entry.path()));
    let mut held = BTreeSet::new();
    for link in links {
        // A link that is gone holds nothing.
        if crate::sys::device_of(&link).is_ok_and(|device| devices.contains(&device)) {
            held.insert(fs::read_link(&link).unwrap_or(link).display().to_string());
        }
    }
    let watches = fs::read_dir(directory.join("fdinfo")).into_iter().flatten().flatten();
    if watches
        .map(|entry| fs::read_to_string(entry.path()).unwrap_or_default())
        .any(|info| info.lines().any(|line| watched(line, devices)))
    {
        held.insert("a watch of its files".to_owned());
    }
    let maps = fs::read_to_string(directory.join("maps")).unwrap_or_default();
    held.extend(maps.lines().filter_map(|line| mapped(line, devices)));
    if held.is_empty() {
        return Vec::new();
    }
    let name = fs::read_to_string(directory.join("comm")).unwrap_or_default();
    let files: Vec<String> = held.into_iter().take(4).collect();
    vec![format!(
        "process {} ({}) holds {}",
        inner_pid(pid),
        name.trim_end(),
        files.join(", ")
    )]
}

/// The file of a line of `/proc/PID/maps`, if it is on one of these filesystems.
fn mapped(line: &str, devices: &BTreeSet<Device>) -> Option<String> {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let device = (
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
    let path = fields.nth(1)?;
    devices.contains(&device).then(|| path.to_owned())
}

/// Whether a line of `/proc/PID/fdinfo/FD` is a watch (of inotify, say) on one of these filesystems.
fn watched(line: &str, devices: &BTreeSet<Device>) -> bool {
    let number = line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix("sdev:"));
    let number = number.and_then(|hex| u32::from_str_radix(hex, 16).ok());
    // As the kernel has it: the minor number is the lower 20 bits.
    number.is_some_and(|number| devices.contains(&(number >> 20, number & 0xf_ffff)))
}

/// The pid that the container itself knows.
fn inner_pid(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.and_then(|numbers| numbers.split_whitespace().next_back())
        .map_or_else(|| pid.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn mountinfo_is_read() {
        let line = b"36 35 0:98 / /mnt\\040two\\134x rw,noatime shared:1 - fuse.ramet ramet rw";
        let mount = parse_mount(line).expect("a line");
        assert_eq!((mount.id, mount.parent, mount.device), (36, 35, (0, 98)));
        assert_eq!(mount.point, Path::new("/mnt two\\x"));
        assert!(!mounts_of("self").expect("our own").is_empty());
    }

    proptest! {
        #[test]
        fn no_line_can_hurt(line in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = parse_mount(&line);
            let text = String::from_utf8_lossy(&line);
            let _ = (mapped(&text, &BTreeSet::new()), watched(&text, &BTreeSet::new()));
        }
    }

    #[test]
    fn what_a_process_holds_is_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("open");
        let _open = fs::File::create(&path).expect("a file");
        let devices = [crate::sys::device_of(&path).expect("it is there")].into();
        let held = held_by(std::process::id(), &devices);
        assert!(held.iter().any(|text| text.contains("holds")), "{held:?}");
        assert!(held_by(std::process::id(), &BTreeSet::new()).is_empty());
    }

    #[test]
    fn watches_are_told_by_their_device() {
        let line = "inotify wd:1 ino:2 sdev:80002e mask:100 ignored_mask:0 fhandle-bytes:8";
        assert!(watched(line, &[(8, 0x2e)].into()));
        assert!(!watched(line, &[(0, 0x2e)].into()));
        assert!(!watched("flags:\t02000000", &[(0, 0)].into()));
    }

    #[test]
    fn mapped_files_are_told_by_their_device() {
        let line = "7f00-7f01 r-xp 00000000 00:2e 1234                 /data/lib.so";
        assert_eq!(mapped(line, &[(0, 0x2e)].into()).as_deref(), Some("/data/lib.so"));
        assert_eq!(mapped(line, &[(0, 2)].into()), None);
    }

    #[test]
    fn mounts_on_volumes_are_named() {
        let mount = |id, parent, minor, point: &str| Mount {
            id,
            parent,
            device: (0, minor),
            point: point.into(),
        };
        let mounts = [
            mount(1, 0, 1, "/"),
            mount(2, 1, 9, "/data"),
            mount(3, 2, 9, "/data/x"),
            mount(4, 3, 7, "/data/x/tmp"),
        ];
        assert_eq!(on_top(&mounts, &[(0, 9)].into()), ["/data/x/tmp is mounted on one"]);
    }

    #[test]
    fn options_become_restrictions() {
        let of = |words: &[&str]| restrictions(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["rbind", "rprivate", "rw"]), Restrictions::default());
        let all = Restrictions::READ_ONLY
            .with(Restrictions::NO_SUID)
            .with(Restrictions::NO_DEVICES)
            .with(Restrictions::NO_EXEC);
        assert_eq!(of(&["rbind", "ro", "nosuid", "nodev", "noexec"]), all);
        assert_eq!(of(&["ro", "rw", "rro"]), Restrictions::READ_ONLY);
        assert_eq!(of(&["noexec", "exec"]), Restrictions::default());
    }
}
