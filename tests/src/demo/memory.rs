//! What memory a VMM has for itself.

use anyhow::{Context, Result};

/// Private memory of one VMM, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Private {
    /// Guest pages that this guest wrote.
    pub(crate) guest: u64,
    /// Everything else: the VMM's own heap, stacks, tables.
    pub(crate) own: u64,
}

/// Reads it for a process.
pub(crate) fn of(pid: u32) -> Result<Private> {
    let path = format!("/proc/{pid}/smaps");
    Ok(parse(
        &std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?,
    ))
}

/// Whether a VMM was restored from a checkpoint: it maps a memory file.
pub(crate) fn is_fork(pid: u32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines()
        .any(|line| header(line).is_some_and(|mapping| mapping.is_memory_file))
}

/// One mapping.
#[derive(Debug)]
struct Mapping {
    start: u64,
    end: u64,
    is_memory_file: bool,
    private_dirty: u64,
}

/// Guest memory is the run of adjacent mappings around those of memory files: pages that the checkpoint does not have, being zero,
/// are anonymous mappings between them. A cold VM maps no memory file; then it is the largest mapping.
fn parse(smaps: &str) -> Private {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        if let Some(mapping) = header(line) {
            mappings.push(mapping);
        } else if let (Some(value), Some(last)) = (line.strip_prefix("Private_Dirty:"), mappings.last_mut()) {
            last.private_dirty = value.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024;
        }
    }
    let largest = mappings
        .iter()
        .map(|mapping| mapping.end - mapping.start)
        .max()
        .unwrap_or(0);
    let from_file = mappings.iter().any(|mapping| mapping.is_memory_file);
    let mut is_guest: Vec<bool> = mappings
        .iter()
        .map(|mapping| {
            if from_file {
                mapping.is_memory_file
            } else {
                mapping.end - mapping.start == largest
            }
        })
        .collect();
    let spread = |order: &mut dyn Iterator<Item = (usize, usize)>, is_guest: &mut Vec<bool>| {
        for (near, far) in order {
            let (low, high) = (near.min(far), near.max(far));
            if is_guest[near] && mappings[low].end == mappings[high].start {
                is_guest[far] = true;
            }
        }
    };
    let count = mappings.len();
    if from_file && count > 1 {
        spread(&mut (0..count - 1).map(|index| (index, index + 1)), &mut is_guest);
        spread(&mut (0..count - 1).rev().map(|index| (index + 1, index)), &mut is_guest);
    }
    let sum = |guest: bool| -> u64 {
        let of_kind = mappings
            .iter()
            .zip(&is_guest)
            .filter(|(_, is_guest)| **is_guest == guest);
        of_kind.map(|(mapping, _)| mapping.private_dirty).sum()
    };
    Private {
        guest: sum(true),
        own: sum(false),
    }
}

fn header(line: &str) -> Option<Mapping> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok()?;
    let is_memory_file = rest.trim_end_matches(" (deleted)").ends_with("/memory");
    Some(Mapping {
        start,
        end,
        is_memory_file,
        private_dirty: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_pages_are_told_from_the_vmms_own() {
        let smaps = "\
            1000-2000 rw-p 0 00:00 0 [heap]\nPrivate_Dirty: 8 kB\n\
            7000-8000 rw-p 0 00:00 0 \nPrivate_Dirty: 4 kB\n\
            8000-9000 rw-p 0 00:00 9 /x/checkpoint/memory\nPrivate_Dirty: 16 kB\n\
            9000-a000 rw-p 0 00:00 0 \nPrivate_Dirty: 32 kB\n\
            f000-ff00 rw-p 0 00:00 0 [stack]\nPrivate_Dirty: 64 kB\n";
        assert_eq!(
            parse(smaps),
            Private {
                guest: 52 << 10,
                own: 72 << 10
            }
        );
    }

    #[test]
    fn without_a_memory_file_the_largest_mapping_is_the_guests() {
        let smaps = "1000-2000 rw-p 0 00:00 0 \nPrivate_Dirty: 8 kB\n4000-9000 rw-p 0 00:00 0 \nPrivate_Dirty: 4 kB\n";
        assert_eq!(
            parse(smaps),
            Private {
                guest: 4 << 10,
                own: 8 << 10
            }
        );
    }
}
