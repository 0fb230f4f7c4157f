//! Processes that got out of the containers' control group, where no freezer reaches them.
//!
//! A container that may write to the whole hierarchy (privileged, without a control group namespace) can move itself out.
//! A checkpoint with such a process would have a fork run on before it was renewed.

use std::io;
use std::path::Path;

/// Bit of the flags in `/proc/PID/stat` of a kernel thread.
const PF_KTHREAD: u64 = 0x0020_0000;

/// The first process that is neither PID 1, nor of the kernel, nor in `group` (`/ramet`) or below it; with its name.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn find(proc: &Path, group: &str) -> io::Result<Option<(u32, String)>> {
    for entry in std::fs::read_dir(proc)? {
        let entry = entry?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(pid) = pid.filter(|&pid| pid > 1) else {
            continue;
        };
        let read = |name: &str| std::fs::read(entry.path().join(name));
        let (stat, groups) = match (read("stat"), read("cgroup")) {
            (Ok(stat), Ok(groups)) => (stat, groups),
            (Err(error), _) | (_, Err(error)) if is_gone(&error) => continue,
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        let (stat, groups) = (String::from_utf8_lossy(&stat), String::from_utf8_lossy(&groups));
        if may_run(&stat) && !is_inside(&groups, group) {
            let name = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')'));
            return Ok(Some((pid, name.map_or_else(String::new, |(name, _)| name.to_owned()))));
        }
    }
    Ok(None)
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Whether it is a program that has not ended. What cannot be understood may run.
fn may_run(stat: &str) -> bool {
    // The name before the bracket is the process's own choice.
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return true;
    };
    let mut fields = rest.split_whitespace();
    let ended = matches!(fields.next(), Some("Z" | "X"));
    let flags: u64 = fields.nth(5).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    !ended && flags & PF_KTHREAD == 0
}

fn is_inside(groups: &str, group: &str) -> bool {
    let path = groups
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or_default();
    path.strip_prefix(group)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn process(proc: &Path, pid: u32, stat: &str, group: &str) {
        let directory = proc.join(pid.to_string());
        fs::create_dir(&directory).expect("a directory");
        fs::write(directory.join("stat"), format!("{pid} {stat}")).expect("a file");
        fs::write(directory.join("cgroup"), format!("0::{group}\n")).expect("a file");
    }

    #[test]
    fn a_process_outside_is_found_whatever_it_calls_itself() {
        let proc = tempfile::tempdir().expect("a directory");
        fs::create_dir(proc.path().join("self")).expect("a directory");
        process(proc.path(), 1, "(ramet-agent) S 0 1 1 0 -1 4194560 0", "/");
        process(proc.path(), 2, "(kthreadd) S 0 0 0 0 -1 2129984 0", "/");
        process(proc.path(), 3, "(gone) Z 1 3 3 0 -1 4194560 0", "/");
        process(proc.path(), 4, "(sh) S 1 4 4 0 -1 4194560 0", "/ramet/c1/inner");
        fs::create_dir(proc.path().join("5")).expect("it ended while we looked");
        assert_eq!(find(proc.path(), "/ramet").expect("readable"), None);
        process(proc.path(), 6, "(x) Z 1 (y) S 1 6 6 0 -1 4194560 0", "/ramet-not");
        assert_eq!(
            find(proc.path(), "/ramet").expect("readable"),
            Some((6, "x) Z 1 (y".into()))
        );
    }

    #[test]
    fn what_is_not_understood_counts_as_running() {
        assert!(may_run(""));
        assert!(may_run("7 (x) S"));
        assert!(!is_inside("", "/ramet"));
        assert!(!is_inside("1:name=x:/ramet\n", "/ramet"));
        assert!(is_inside("0::/ramet\n", "/ramet"));
    }
}
