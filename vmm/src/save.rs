//! Saving a machine while it lives on: state and disks are cut while it stands still, memory is written afterwards by a forked
//! child that keeps it as it was at that instant.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use checkpoint::memory::{Extent, MAX_EXTENTS, MemoryError as IndexError, MemoryIndex, PAGE_SIZE, bridge_gaps};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::control::SaveReport;
use crate::devices::virtio::{DeviceError, OverlayLayer};
use crate::memory::GuestMemory;
use crate::state::StateError;
use crate::sys::dumper::{self, Piece};
use crate::sys::fd::open_pidfd;
use crate::vm::{Host, Machine, VmError};

/// Gaps of up to this many unchanged pages are written, too: each extent costs a mapping at every restore.
const SMALL_GAP: u64 = 8;
/// Most extents a save adds; each can split one of the base in two.
const MOST_NEW_EXTENTS: usize = MAX_EXTENTS / 4;

/// A machine cannot be saved. It runs on unless [`SaveError::Machine`] says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The machine could not be paused, read or resumed.
    #[error("save machine")]
    Machine(#[from] VmError),
    /// The state does not fit its file.
    #[error("saved state")]
    State(#[from] StateError),
    /// A disk could not be sealed.
    #[error("seal disks")]
    Seal(#[from] DeviceError),
    /// The memory index would not be valid.
    #[error("memory index")]
    Index(#[from] IndexError),
    /// A file could not be written, or the child not be started.
    #[error("{0}")]
    Io(&'static str, #[source] io::Error),
    /// The child that writes memory failed.
    #[error("write guest memory")]
    Write(#[source] io::Error),
    /// The child that writes memory was killed.
    #[error("the process that writes guest memory was ended by {0}")]
    Killed(String),
}

/// Where a save goes; all files are new and empty.
#[derive(Debug)]
pub struct SaveTargets {
    /// Saved state.
    pub state: File,
    /// Guest pages.
    pub memory: File,
    /// Memory index.
    pub index: File,
    /// The next layer of each writable disk.
    pub seal: Vec<(String, OverlayLayer)>,
    /// Whether the vCPUs run on.
    pub resume: bool,
}

/// A save whose memory is being written.
#[derive(Debug)]
pub struct PendingSave {
    child: Option<Pid>,
    pidfd: OwnedFd,
    state: Vec<u8>,
    state_file: File,
    index: MemoryIndex,
    index_file: File,
    memory: File,
    started: Instant,
    report: SaveReport,
}

/// Which pages go where.
struct Plan {
    index: MemoryIndex,
    pieces: Vec<Piece>,
    file_bytes: u64,
    incremental: bool,
}

impl Machine {
    /// Cuts the machine and starts writing its memory.
    ///
    /// # Errors
    /// See [`SaveError`]; the machine goes on as before, with the disks that it had: sealing them is the last thing that can fail here.
    /// What fails later is reported by [`PendingSave::finish`].
    pub fn save(&mut self, host: &Host, targets: SaveTargets) -> Result<PendingSave, SaveError> {
        let was_running = self.is_running();
        let began = Instant::now();
        self.pause()?;
        let resume = targets.resume;
        let result = self.cut(host, targets);
        if if result.is_ok() { resume } else { was_running } {
            self.resume()?;
        }
        let mut pending = result?;
        pending.report.pause_us = micros(began.elapsed());
        Ok(pending)
    }

    /// All that must happen while nothing moves.
    fn cut(&self, host: &Host, targets: SaveTargets) -> Result<PendingSave, SaveError> {
        let state = self.save_state()?.encode()?;
        let plan = self.plan(host)?;
        targets
            .memory
            .set_len(plan.file_bytes)
            .map_err(|e| SaveError::Io("size memory file", e))?;
        let started = Instant::now();
        let child = dumper::start(targets.memory.as_fd(), &plan.pieces).map_err(|e| SaveError::Io("fork", e))?;
        let pidfd = match open_pidfd(child) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                end_child(child);
                return Err(SaveError::Io("open descriptor of child", error));
            }
        };
        let report = SaveReport {
            memory_bytes: plan.file_bytes,
            incremental: plan.incremental,
            ..SaveReport::default()
        };
        let pending = PendingSave {
            child: Some(child),
            pidfd,
            state,
            state_file: targets.state,
            index: plan.index,
            index_file: targets.index,
            memory: targets.memory,
            started,
            report,
        };
        // A failure here drops `pending`, which ends the child.
        match self.platform().devices() {
            Some(devices) => devices.seal_disks(targets.seal)?,
            None if targets.seal.is_empty() => {}
            None => return Err(DeviceError::State("the machine has no disks".into()).into()),
        }
        Ok(pending)
    }

    /// Incremental over the base if there is one, else everything that is not known to be zero.
    fn plan(&self, host: &Host) -> Result<Plan, SaveError> {
        let private = self.memory.private_pages(&host.pagemap).map_err(VmError::from)?;
        if let Some(base) = &self.base {
            let (extents, pieces, bytes) = lay_out(&self.memory, &runs(private.clone(), self.memory.pages()));
            match MemoryIndex::overlay(&base.index, &base.checkpoint, bytes, &extents) {
                Ok(index) => {
                    return Ok(Plan {
                        index,
                        pieces,
                        file_bytes: bytes,
                        incremental: true,
                    });
                }
                // Too scattered or too deep: start over with a full one.
                Err(error) => tracing::info!(%error, "full save instead of an incremental one"),
            }
        }
        let mut present = private;
        if let Some(base) = &self.base {
            present.extend(
                base.index
                    .extents
                    .iter()
                    .map(|extent| extent.start..extent.start + extent.pages),
            );
        }
        let (extents, pieces, bytes) = lay_out(&self.memory, &runs(present, self.memory.pages()));
        let index = MemoryIndex::full(self.memory.pages(), bytes, extents)?;
        Ok(Plan {
            index,
            pieces,
            file_bytes: bytes,
            incremental: false,
        })
    }
}

/// Places runs of pages in the file one after the other.
fn lay_out(memory: &GuestMemory, runs: &[(u64, u64)]) -> (Vec<Extent>, Vec<Piece>, u64) {
    let (mut extents, mut pieces, mut source_page) = (Vec::new(), Vec::new(), 0);
    for &(start, pages) in runs {
        extents.push(Extent {
            start,
            pages,
            source: 0,
            source_page,
        });
        let mut offset = source_page * PAGE_SIZE;
        for (address, bytes) in memory.host_ranges(start..start + pages) {
            pieces.push(Piece { address, bytes, offset });
            offset += bytes;
        }
        source_page += pages;
    }
    (extents, pieces, source_page * PAGE_SIZE)
}

/// Page ranges as `(start, pages)`: sorted, joined across small gaps, few enough for an index.
fn runs(mut ranges: Vec<Range<u64>>, pages: u64) -> Vec<(u64, u64)> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for range in ranges {
        let end = range.end.min(pages);
        match joined.last_mut() {
            Some((start, count)) if range.start <= *start + *count + SMALL_GAP => {
                *count = (*count).max(end.saturating_sub(*start))
            }
            _ => joined.push((range.start, end.saturating_sub(range.start))),
        }
    }
    bridge_gaps(&mut joined, MOST_NEW_EXTENTS);
    joined
}

impl PendingSave {
    /// How long the vCPUs stood still, in microseconds.
    #[must_use]
    pub fn pause_us(&self) -> u64 {
        self.report.pause_us
    }

    /// Waits for the child, then writes saved state and memory index. [`AsFd`] polls readable when this will not block.
    ///
    /// # Errors
    /// When the child failed or a file cannot be written; the files are worthless then.
    pub fn finish(mut self) -> Result<SaveReport, SaveError> {
        let Some(child) = self.child.take() else {
            return Err(SaveError::Killed("nobody".into()));
        };
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, 0)) => {}
            Ok(WaitStatus::Exited(_, code)) => return Err(SaveError::Write(io::Error::from_raw_os_error(code))),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Err(SaveError::Killed(signal.to_string())),
            Ok(status) => return Err(SaveError::Killed(format!("{status:?}"))),
            Err(error) => return Err(SaveError::Io("wait for child", error.into())),
        }
        self.state_file
            .write_all(&self.state)
            .map_err(|e| SaveError::Io("write state file", e))?;
        let encoded = self.index.encode()?;
        self.index_file
            .write_all(&encoded)
            .map_err(|e| SaveError::Io("write memory index", e))?;
        self.report.memory_write_us = micros(self.started.elapsed());
        self.report.memory_bytes = written_bytes(&self.memory).unwrap_or(self.report.memory_bytes);
        Ok(std::mem::take(&mut self.report))
    }
}

impl AsFd for PendingSave {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            end_child(child);
        }
    }
}

fn end_child(child: Pid) {
    let _gone = kill(child, Signal::SIGKILL);
    let _gone = waitpid(child, None);
}

/// Bytes that are not holes.
fn written_bytes(file: &File) -> Option<u64> {
    let metadata = file.metadata().ok()?;
    Some((std::os::unix::fs::MetadataExt::blocks(&metadata) * 512).min(metadata.len()))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    #[test]
    fn small_gaps_are_bridged_and_overlaps_joined() {
        assert_eq!(runs(vec![20..21, 0..2, 5..6, 1..3], 64), vec![(0, 6), (20, 1)]);
    }

    /// What a fork zeroed must not be its parent's page again in a fork of the fork.
    #[test]
    fn a_page_that_became_zero_is_saved_as_zero() {
        let full = |byte: u8| [byte; 4096];
        let base_file = tempfile::tempfile().unwrap();
        base_file
            .write_all_at(&[full(1), full(2), full(3)].concat(), 0)
            .unwrap();
        let extent = |start, pages, source_page| Extent {
            start,
            pages,
            source: 0,
            source_page,
        };
        // Far apart: pages in small gaps are saved anyway.
        let extents = vec![extent(10, 1, 0), extent(100, 1, 1), extent(200, 1, 2)];
        let base = MemoryIndex::full((64 << 20) / PAGE_SIZE, 3 * PAGE_SIZE, extents).unwrap();
        let memory = GuestMemory::restore(&base, &[base_file.try_clone().unwrap()]).unwrap();
        memory
            .map()
            .write_slice(&full(0), GuestAddress(100 * PAGE_SIZE))
            .unwrap();
        memory
            .map()
            .write_slice(&full(9), GuestAddress(300 * PAGE_SIZE))
            .unwrap();

        let private = memory
            .private_pages(&File::open("/proc/self/pagemap").unwrap())
            .unwrap();
        let (extents, pieces, bytes) = lay_out(&memory, &runs(private, memory.pages()));
        let id = "0123456789abcdef0123456789abcdef".to_owned().try_into().unwrap();
        let index = MemoryIndex::overlay(&base, &id, bytes, &extents).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        let child = dumper::start(file.as_fd(), &pieces).unwrap();
        assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));

        let fork = GuestMemory::restore(&index, &[file, base_file]).unwrap();
        let read = |page: u64| fork.map().read_obj::<u8>(GuestAddress(page * PAGE_SIZE)).unwrap();
        assert_eq!([read(10), read(100), read(200), read(300)], [1, 0, 3, 9]);
    }

    proptest! {
        #[test]
        fn runs_cover_every_page_and_do_not_touch(pages in proptest::collection::btree_set(0_u64..5000, 0..400)) {
            let runs = runs(pages.iter().map(|page| *page..*page + 1).collect(), 5000);
            prop_assert!(pages.iter().all(|page| runs.iter().any(|(start, count)| (*start..start + count).contains(page))));
            prop_assert!(runs.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
        }
    }
}
