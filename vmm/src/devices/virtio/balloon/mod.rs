//! virtio-balloon, of which one part is used: the guest reports pages that are free, and their memory goes back to the host.
//!
//! A reported page is again what it was before this machine wrote it: the checkpoint's page in a fork, the file's where the guest image is
//! mapped, else zero. The specification allows any contents until the report is acknowledged (virtio 1.2, 5.5.6.7) to a device that
//! does not offer `PAGE_POISON`; a Linux that fills its free pages with a pattern, and would miss it, then reports none. A later save
//! needs to know nothing of it: such a page is not this process's own, so the memory index says what the guest would read there.
//!
//! The balloon proper stays flat: nothing is asked for, and pages that a guest puts in all the same stay where they are.

#[cfg(test)]
mod tests;

use std::ops::Range;

use checkpoint::memory::PAGE_SIZE;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use super::Memory;
use super::interrupt::Interrupt;
use super::model::{Context, LogQuota, Model, Poller};
use super::queue::{Segments, VirtQueue};
use super::sys::Slice;
use crate::layout::HIGH_RAM_START;
use crate::sys::mapping;

/// The driver reports free pages.
const REPORTING: u64 = 1 << 5;
/// Of inflating, of deflating, of reports. Those of features that are not offered have no number, as Linux counts them.
const QUEUES: &[u16] = &[QUEUE_SIZE; 3];
/// Linux wants room for the 32 pieces of a report.
const QUEUE_SIZE: u16 = 128;
const REPORTS: usize = 2;
/// Most bytes of one report that are given back: Linux reports 32 blocks of at most 4 MiB.
const REPORT_MAX: u64 = 128 << 20;

/// A memory balloon.
#[derive(Debug, Default)]
pub(super) struct Balloon {
    /// There is more to do after the other devices had their turn.
    busy: bool,
    warnings: LogQuota,
}

impl Balloon {
    /// Gives back the memory of one report at most: each takes as long as the guest has touched pages in it.
    fn serve_report(&mut self, context: &mut Context<'_>) -> bool {
        let Some(queue) = context.queues.get_mut(REPORTS) else {
            return false;
        };
        let report = queue.pop(context.mem);
        if let Some(report) = &report {
            self.give_back(context.mem, &report.writable);
            queue.complete(context.mem, report.head, 0);
        }
        // Without a report, too: malformed ones may have been handed back.
        queue.signal(context.mem, context.interrupt);
        report.is_some() || queue.enable_notification(context.mem)
    }

    /// Gives back the pages that lie wholly in the pieces, except below 1 MiB, where the VMM's own tables are. A report is a hint: what is
    /// left out costs memory only.
    fn give_back(&mut self, mem: &Memory, report: &Segments<'_>) {
        let mut room = REPORT_MAX;
        for slice in report.slices() {
            let Some((region, pages)) = whole_pages(mem, slice) else {
                continue;
            };
            let bytes = (pages.end - pages.start).min(room);
            if bytes == 0 {
                continue;
            }
            room -= bytes;
            if let Err(error) = mapping::discard(&region.get_mmap(), pages.start, bytes)
                && self.warnings.take()
            {
                tracing::warn!(%error, "free memory of the guest is not given back");
            }
        }
    }

    fn serve(&mut self, context: &mut Context<'_>) {
        let mut busy = self.serve_report(context);
        for queue in context.queues.iter_mut().take(REPORTS) {
            busy |= acknowledge(queue, context.mem, context.interrupt);
        }
        self.busy = busy;
        if busy {
            context.poller.wake();
        }
    }
}

/// Hands back what there is, a queue full of chains at most; whether there is more.
fn acknowledge(queue: &mut VirtQueue, mem: &Memory, interrupt: &Interrupt) -> bool {
    for _ in 0..QUEUE_SIZE {
        let Some(chain) = queue.pop(mem) else {
            break;
        };
        queue.complete(mem, chain.head, 0);
    }
    queue.signal(mem, interrupt);
    queue.enable_notification(mem)
}

/// The region that a piece of guest memory lies in, and the bytes of it, from the start of the region, that are whole pages above 1 MiB.
fn whole_pages<'m>(mem: &'m Memory, slice: &Slice<'_>) -> Option<(&'m GuestRegionMmap<()>, Range<u64>)> {
    let address = slice.ptr_guard().as_ptr().addr();
    let (region, start) = mem.iter().find_map(|region| {
        let start = address.checked_sub(region.get_mmap().as_ptr().addr())? as u64;
        (start < region.len()).then_some((region, start))
    })?;
    let end = start + slice.len() as u64;
    let lowest = HIGH_RAM_START.saturating_sub(region.start_addr().0);
    let pages = start.next_multiple_of(PAGE_SIZE).max(lowest)..end - end % PAGE_SIZE;
    (!pages.is_empty()).then_some((region, pages))
}

impl Model for Balloon {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        REPORTING
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    /// No page is wanted.
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, _context: &mut Context<'_>) {}

    fn reset(&mut self, _poller: &Poller) {
        self.busy = false;
    }

    fn queue_event(&mut self, context: &mut Context<'_>, _queue: usize) {
        self.serve(context);
    }

    fn settle(&mut self, context: &mut Context<'_>) {
        if self.busy {
            self.serve(context);
        }
    }
}
