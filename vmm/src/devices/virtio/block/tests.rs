//! Requests as a guest makes them, well-formed and not.

#![expect(clippy::cast_possible_truncation, reason = "numbers of a test")]

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;

use super::super::testing::{Driver, Registers, memory};
use super::super::{Backing, DeviceSet, Disk, Memory, OverlayLayer, event_channel};

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn layer() -> OverlayLayer {
    OverlayLayer {
        data: file(&[]),
        bitmap: file(&[]),
    }
}

fn writable() -> Disk {
    Disk {
        id: "rw0".into(),
        backing: Backing::Writable {
            size_bytes: 1 << 20,
            sealed: Vec::new(),
            active: layer(),
        },
    }
}

fn set(mem: &Memory, disks: Vec<Disk>) -> DeviceSet {
    let (sender, _) = event_channel().unwrap();
    let set = DeviceSet::create(mem.clone(), disks, Vec::new(), false, sender).unwrap();
    set.start();
    set
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn request(set: &DeviceSet, driver: &mut Driver, readable: &[&[u8]], writable: &[usize]) -> Vec<u8> {
    let head = driver.add(set, 0, readable, writable);
    let (used, bytes) = driver.wait(0);
    assert_eq!(used, head);
    bytes
}

#[test]
fn writes_and_reads_back() {
    let mem = memory();
    let set = set(&mem, vec![writable()]);
    let mut driver = Driver::start(&set, &mem, 0);
    let registers = Registers { set: &set, device: 0 };
    assert_eq!(registers.config::<8>(0), 2048u64.to_le_bytes());
    let bytes: Vec<u8> = (0..8192u32).map(|at| (at / 100) as u8).collect();
    assert_eq!(
        request(
            &set,
            &mut driver,
            &[&header(1, 3), &bytes[..1000], &bytes[1000..]],
            &[1]
        ),
        [OK]
    );
    assert_eq!(request(&set, &mut driver, &[&header(4, 0)], &[1]), [OK]);
    let mut answer = request(&set, &mut driver, &[&header(0, 3)], &[100, 8092, 1]);
    assert_eq!(answer.pop(), Some(OK));
    assert_eq!(answer, bytes);
    // Discard one block of it, then write zeros over some sectors.
    let range = [&8u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(request(&set, &mut driver, &[&header(11, 0), &range], &[1]), [OK]);
    let range = [&3u64.to_le_bytes()[..], &1u32.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(request(&set, &mut driver, &[&header(13, 0), &range], &[1]), [OK]);
    let answer = request(&set, &mut driver, &[&header(0, 3)], &[8192, 1]);
    let mut expected = bytes;
    expected[..512].fill(0);
    expected[5 * 512..13 * 512].fill(0);
    assert_eq!(answer, [expected, vec![OK]].concat());
}

#[test]
fn tells_its_serial_number() {
    let mem = memory();
    let set = set(&mem, vec![writable()]);
    let mut driver = Driver::start(&set, &mem, 0);
    let answer = request(&set, &mut driver, &[&header(8, 0)], &[20, 1]);
    assert_eq!(answer, [b"rw0".as_slice(), &[0; 17], &[OK]].concat());
}

#[test]
fn reads_across_concatenated_files() {
    let mem = memory();
    let files = vec![file(&[1; 4096]), file(&[]), file(&[2; 8192]), file(&[3; 4096])];
    let set = set(
        &mem,
        vec![Disk {
            id: "ro0".into(),
            backing: Backing::ReadOnly { files },
        }],
    );
    let mut driver = Driver::start(&set, &mem, 0);
    let answer = request(&set, &mut driver, &[&header(0, 7)], &[512 * 20, 1]);
    let expected = [vec![1; 512], vec![2; 8192], vec![3; 512 * 3], vec![OK]].concat();
    assert_eq!(answer, expected);
    assert_eq!(request(&set, &mut driver, &[&header(1, 0), &[9; 512]], &[1]), [IOERR]);
    assert_eq!(request(&set, &mut driver, &[&header(4, 0)], &[1]), [OK]);
    assert_eq!(request(&set, &mut driver, &[&header(0, 31)], &[1024, 1]).len(), 1);
}

#[test]
fn refuses_what_makes_no_sense() {
    let mem = memory();
    let set = set(&mem, vec![writable()]);
    let mut driver = Driver::start(&set, &mem, 0);
    let mut ask = |readable: &[&[u8]], writable: &[usize]| request(&set, &mut driver, readable, writable);
    assert_eq!(ask(&[&header(77, 0)], &[1]), [UNSUPPORTED]);
    assert_eq!(ask(&[&header(1, 2048), &[0; 512]], &[1]), [IOERR], "behind the end");
    assert_eq!(ask(&[&header(1, u64::MAX), &[0; 512]], &[1]), [IOERR]);
    assert_eq!(ask(&[&header(1, 0), &[0; 100]], &[1]), [IOERR], "part of a sector");
    assert_eq!(ask(&[&[0; 15]], &[1]), [IOERR], "half a header");
    assert_eq!(ask(&[&header(1, 0), &[0; 512]], &[]), [0; 0], "no place for the status");
    let range = [&0u64.to_le_bytes()[..], &u32::MAX.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(ask(&[&header(11, 0), &range], &[1]), [IOERR], "too much at once");
    assert_eq!(ask(&[&header(11, 0), &range[..15]], &[1]), [IOERR]);
    assert_eq!(ask(&[&header(1, 0), &[5; 512]], &[1]), [OK], "and still works");
}

#[test]
fn placeholder_has_no_blocks() {
    let mem = memory();
    let disks = vec![Disk {
        id: "slot1".into(),
        backing: Backing::Empty { read_only: true },
    }];
    let set = set(&mem, disks);
    let mut driver = Driver::start(&set, &mem, 0);
    assert_eq!(Registers { set: &set, device: 0 }.config::<8>(0), [0; 8]);
    assert_eq!(request(&set, &mut driver, &[&header(0, 0)], &[512, 1]), [0]);
}

#[test]
fn sealing_keeps_the_guest_going() {
    let mem = memory();
    let (first, second) = (layer(), layer());
    let copy = OverlayLayer {
        data: first.data.try_clone().unwrap(),
        bitmap: first.bitmap.try_clone().unwrap(),
    };
    let backing = Backing::Writable {
        size_bytes: 1 << 20,
        sealed: Vec::new(),
        active: first,
    };
    let parent = set(
        &mem,
        vec![Disk {
            id: "rw0".into(),
            backing,
        }],
    );
    let mut driver = Driver::start(&parent, &mem, 0);
    assert_eq!(request(&parent, &mut driver, &[&header(1, 0), &[1; 4096]], &[1]), [OK]);
    parent.pause();
    driver.add(&parent, 0, &[&header(1, 8), &[2; 4096]], &[1]);
    // All or none: the layer that goes with the wrong name is not used, and neither is the other one.
    let unused = layer();
    let kept = unused.data.try_clone().unwrap();
    let both = vec![("rw0".into(), unused), ("other".into(), layer())];
    assert!(parent.seal_disks(both).is_err());
    parent.resume();
    assert_eq!(driver.wait(0).1, [OK]);
    assert_eq!(kept.metadata().map(|file| file.blocks()).unwrap(), 0);
    parent.pause();
    driver.add(&parent, 0, &[&header(1, 8), &[3; 4096]], &[1]);
    parent.seal_disks(vec![("rw0".into(), second)]).unwrap();
    let state = parent.save();
    let memory_of_fork = super::super::testing::copy(&mem);
    let mut forked = driver.clone();
    parent.resume();
    assert_eq!(driver.wait(0).1, [OK]);
    // The fork has the sealed layer, and the request that was not served yet is served there, too.
    let backing = Backing::Writable {
        size_bytes: 1 << 20,
        sealed: vec![copy],
        active: layer(),
    };
    let disks = vec![Disk {
        id: "rw0".into(),
        backing,
    }];
    let (sender, _) = event_channel().unwrap();
    let fork = DeviceSet::restore(memory_of_fork.clone(), state, disks, Vec::new(), sender).unwrap();
    forked = forked.forked(&fork, &memory_of_fork);
    fork.start();
    assert_eq!(forked.wait(0).1, [OK]);
    let answer = request(&fork, &mut forked, &[&header(0, 0)], &[8192, 1]);
    assert_eq!(answer, [vec![1; 4096], vec![3; 4096], vec![OK]].concat());
}

#[test]
fn restore_refuses_another_disk() {
    let mem = memory();
    let parent = set(&mem, vec![writable()]);
    Driver::start(&parent, &mem, 0);
    parent.pause();
    let state = parent.save();
    let restore = |disks| {
        let (sender, _) = event_channel().unwrap();
        DeviceSet::restore(mem.clone(), state.clone(), disks, Vec::new(), sender)
            .err()
            .map(|error| error.to_string())
    };
    assert_eq!(restore(vec![writable()]), None);
    assert!(restore(Vec::new()).is_some());
    assert!(restore(vec![writable(), writable()]).is_some());
    let smaller = Backing::Writable {
        size_bytes: 1 << 19,
        sealed: Vec::new(),
        active: layer(),
    };
    let error = restore(vec![Disk {
        id: "rw0".into(),
        backing: smaller,
    }])
    .unwrap();
    assert_eq!(
        error,
        "disk rw0: the saved machine had 1048576 bytes, writable; this has 524288 bytes, writable"
    );
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(
        serde_json::from_str::<super::super::DeviceSetState>(&text).unwrap(),
        state
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn any_request_is_answered_or_dropped(
        requests in prop::collection::vec(
            (
                prop_oneof![0u32..15, any::<u32>()],
                prop_oneof![0u64..2100, any::<u64>()],
                prop::collection::vec(0usize..5000, 0..4),
                prop::collection::vec(0usize..5000, 0..4),
            ),
            1..12,
        )
    ) {
        let mem = memory();
        let set = set(&mem, vec![writable()]);
        let mut driver = Driver::start(&set, &mem, 0);
        for (kind, sector, readable, writable) in requests {
            let header = header(kind, sector);
            let data: Vec<Vec<u8>> = readable.iter().map(|len| vec![0x5a; *len]).collect();
            let mut parts: Vec<&[u8]> = vec![&header];
            parts.extend(data.iter().map(Vec::as_slice));
            let answer = request(&set, &mut driver, &parts, &writable);
            prop_assert!(answer.len() <= writable.iter().sum());
        }
        let mut answer = request(&set, &mut driver, &[&header(8, 0)], &[20, 1]);
        prop_assert_eq!(answer.pop(), Some(OK));
    }
}
