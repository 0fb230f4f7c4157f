use std::fs::File;
use std::ops::Range;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::super::testing::{Driver, copy, memory};
use super::super::{DeviceSet, Memory, event_channel};
use super::{PAGE_SIZE, REPORTS};
use crate::sys::pagemap;

/// vsock and entropy come before it.
const BALLOON: usize = 2;
/// Half a mebibyte that no ring of the tests' driver is in.
const FREE: u64 = 0xf0_0000;
const PAGES: u64 = 128;
/// End of guest memory.
const END: u64 = 16 << 20;

fn started(mem: &Memory) -> (DeviceSet, Driver) {
    let (sender, _) = event_channel().unwrap();
    let set = DeviceSet::create(mem.clone(), Vec::new(), Vec::new(), true, sender).unwrap();
    set.start();
    let driver = Driver::start(&set, mem, BALLOON);
    for page in 0..PAGES {
        mem.write_obj(1_u8, GuestAddress(FREE + page * PAGE_SIZE)).unwrap();
    }
    (set, driver)
}

/// The pages from `FREE` on that lost what was written there.
fn lost(mem: &Memory) -> Vec<u64> {
    let lost = |page: &u64| mem.read_obj::<u8>(GuestAddress(FREE + page * PAGE_SIZE)).unwrap() == 0;
    (0..PAGES).filter(lost).collect()
}

/// The pages from `FREE` on that this process has memory for.
fn present(mem: &Memory) -> Vec<Range<u64>> {
    let region = mem.find_region(GuestAddress(0)).unwrap();
    let start = region.get_mmap().as_ptr().expose_provenance() as u64 + FREE;
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap::anonymous_pages(&pagemap, start, PAGES * PAGE_SIZE).unwrap()
}

#[test]
fn whole_reported_pages_are_given_back_and_no_other() {
    let mem = memory();
    let (set, mut driver) = started(&mem);
    let ranges = [
        (FREE + 8 * PAGE_SIZE, 4 * 4096),
        (FREE + 20 * PAGE_SIZE + 100, 3 * 4096),
    ];
    driver.add_ranges(&set, REPORTS, &ranges);
    assert_eq!(driver.wait(REPORTS).1.len(), 0);
    assert_eq!(present(&mem), [0..8, 12..21, 23..PAGES]);
    assert_eq!(lost(&mem), [8_u64, 9, 10, 11, 21, 22]);
}

#[test]
fn nonsense_is_handed_back_and_costs_nothing() {
    let mem = memory();
    let (set, mut driver) = started(&mem);
    mem.write_obj(1_u8, GuestAddress(0xd_f000)).unwrap();
    for ranges in [
        [(0xd_f000, 4096), (0, 0x10_0000)],
        [(FREE + 1, 4096), (FREE + 4096, 4095)],
        [(FREE, 4096), (END, 4096)],
        [(FREE, 4096), (END - 4096, 8192)],
        [(FREE, 4096), (0xffff_ffff_ffff_f000, 0xffff_ffff)],
        [(FREE, u32::MAX), (FREE, 0)],
    ] {
        driver.add_ranges(&set, REPORTS, &ranges);
        assert_eq!(driver.wait(REPORTS).1.len(), 0);
    }
    driver.add(&set, REPORTS, &[&[0; 8192]], &[]);
    driver.wait(REPORTS);
    assert!(lost(&mem).is_empty());
    assert_eq!(mem.read_obj::<u8>(GuestAddress(0xd_f000)).unwrap(), 1);
}

#[test]
fn more_reports_than_one_at_a_time_are_all_answered() {
    let mem = memory();
    let (set, mut driver) = started(&mem);
    for page in 0..12 {
        driver.add_ranges(&set, REPORTS, &[(FREE + page * PAGE_SIZE, 4096)]);
    }
    for _ in 0..12 {
        driver.wait(REPORTS);
    }
    assert_eq!(lost(&mem), (0..12).collect::<Vec<u64>>());
}

#[test]
fn a_page_that_is_put_in_unasked_stays() {
    let mem = memory();
    let (set, mut driver) = started(&mem);
    for queue in [0, 1] {
        let frame = u32::try_from(FREE / PAGE_SIZE).unwrap();
        driver.add(&set, queue, &[&frame.to_le_bytes()], &[]);
        driver.wait(queue);
    }
    assert!(lost(&mem).is_empty());
    assert!(set.slots()[BALLOON].notify.is_empty());
}

#[test]
fn a_fork_goes_on_reporting() {
    let mem = memory();
    let (set, driver) = started(&mem);
    set.pause();
    let fork_mem = copy(&mem);
    let (sender, _) = event_channel().unwrap();
    let fork = DeviceSet::restore(fork_mem.clone(), set.save(), Vec::new(), Vec::new(), sender).unwrap();
    fork.start();
    let mut driver = driver.forked(&fork, &fork_mem);
    driver.add_ranges(&fork, REPORTS, &[(FREE, 4096)]);
    driver.wait(REPORTS);
    assert_eq!((lost(&fork_mem), lost(&mem)), (vec![0], vec![]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_report_loses_what_it_names_at_most(
        ranges in prop::collection::vec((prop_oneof![FREE..END + 5000, END..=u64::MAX], prop_oneof![0_u32..20_000, any::<u32>()]), 1..8),
    ) {
        let mem = memory();
        let (set, mut driver) = started(&mem);
        driver.add_ranges(&set, REPORTS, &ranges);
        driver.wait(REPORTS);
        let valid = ranges.iter().all(|(start, len)| *len == 0 || start.checked_add(u64::from(*len)).is_some_and(|end| end <= END));
        let named = |page: u64| {
            let (first, last) = (FREE + page * PAGE_SIZE, FREE + (page + 1) * PAGE_SIZE);
            ranges.iter().any(|(start, len)| *start <= first && last <= start.saturating_add(u64::from(*len)))
        };
        let lost = lost(&mem);
        prop_assert!(lost.iter().all(|page| valid && named(*page)), "{lost:?}");
        prop_assert!(!valid || (0..PAGES).all(|page| named(page) == lost.contains(&page)), "{lost:?}");
    }
}
