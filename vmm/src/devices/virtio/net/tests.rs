//! A datagram socket in place of the tap: it, too, carries one frame with its header at a time.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use super::super::set::AnyModel;
use super::super::testing::{Driver, Registers, copy, memory, wait_readable};
use super::super::{DeviceSet, Memory};
use super::{HEADER, Net, NetParts, RECEIVE, TRANSMIT};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn interface(mem: &Memory) -> (DeviceSet, UnixDatagram) {
    let (net, wire) = model();
    let set = DeviceSet::assemble(mem.clone(), vec![AnyModel::Net(net)]).unwrap();
    (set, wire)
}

fn model() -> (Net, UnixDatagram) {
    let (tap, wire) = UnixDatagram::pair().unwrap();
    wire.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    (
        Net::over(NetParts {
            tap: Some(tap.into()),
            mac: MAC,
            mtu: 1400,
        })
        .unwrap(),
        wire,
    )
}

fn frame(byte: u8, len: usize) -> Vec<u8> {
    [vec![0; HEADER], vec![byte; len]].concat()
}

#[test]
fn shows_mac_and_mtu() {
    let mem = memory();
    let (set, _wire) = interface(&mem);
    let registers = Registers { set: &set, device: 0 };
    assert_eq!(registers.config::<6>(0), MAC);
    assert_eq!(registers.config::<2>(10), 1400u16.to_le_bytes());
}

#[test]
fn carries_frames_both_ways() {
    let mem = memory();
    let (set, wire) = interface(&mem);
    set.start();
    let mut driver = Driver::start(&set, &mem, 0);
    let sent = frame(7, 60);
    driver.add(&set, TRANSMIT, &[&sent[..HEADER], &sent[HEADER..]], &[]);
    driver.wait(TRANSMIT);
    let mut got = [0; 2000];
    let len = wire.recv(&mut got).unwrap();
    assert_eq!(&got[..len], sent);

    // Comes before there is a buffer.
    wire.send(&frame(8, 100)).unwrap();
    driver.add(&set, RECEIVE, &[], &[2000]);
    let (_, received) = driver.wait(RECEIVE);
    assert_eq!(received[HEADER..], [8; 100]);
    assert_eq!(received[10..HEADER], 1u16.to_le_bytes(), "in one buffer");
    wire.send(&frame(9, 100)).unwrap();
    driver.add(&set, RECEIVE, &[], &[2000]);
    assert_eq!(driver.wait(RECEIVE).1[HEADER..], [9; 100]);
}

#[test]
fn spreads_a_large_frame_over_buffers() {
    let mem = memory();
    let (set, wire) = interface(&mem);
    set.start();
    let mut driver = Driver::start(&set, &mem, 0);
    driver.add(&set, RECEIVE, &[], &[1000]);
    wire.send(&frame(5, 2500)).unwrap();
    // Too little room so far; each further buffer is news to the device.
    driver.add(&set, RECEIVE, &[], &[1000]);
    driver.add(&set, RECEIVE, &[], &[1000]);
    let parts: Vec<Vec<u8>> = (0..3).map(|_| driver.wait(RECEIVE).1).collect();
    assert_eq!(parts[0][10..HEADER], 3u16.to_le_bytes());
    let received = parts.concat();
    assert_eq!(received[HEADER..], [5; 2500]);
}

#[test]
fn drops_frames_of_impossible_size() {
    let mem = memory();
    let (set, wire) = interface(&mem);
    set.start();
    let mut driver = Driver::start(&set, &mem, 0);
    driver.add(&set, TRANSMIT, &[&[0; HEADER]], &[]);
    driver.wait(TRANSMIT);
    driver.add(&set, TRANSMIT, &[&vec![0; 70_000]], &[]);
    driver.wait(TRANSMIT);
    driver.add(&set, TRANSMIT, &[&frame(1, 20)], &[]);
    driver.wait(TRANSMIT);
    let mut got = vec![0; 80_000];
    assert_eq!(wire.recv(&mut got).unwrap(), HEADER + 20);
}

#[test]
fn a_fork_does_not_send_what_its_parent_had_queued() {
    let mem = memory();
    let (parent, wire) = interface(&mem);
    parent.start();
    let mut driver = Driver::start(&parent, &mem, 0);
    driver.add(&parent, TRANSMIT, &[&frame(1, 20)], &[]);
    driver.wait(TRANSMIT);
    parent.pause();
    driver.add(&parent, TRANSMIT, &[&frame(2, 20)], &[]);
    let state = parent.save();
    let fork_mem = copy(&mem);
    let forked = driver.clone();
    parent.resume();
    driver.wait(TRANSMIT);
    let mut got = [0; 100];
    wire.recv(&mut got).unwrap();
    wire.recv(&mut got).unwrap();
    assert_eq!(got[HEADER], 2, "the parent sends it");

    let (net, fork_wire) = model();
    let fork = DeviceSet::assemble(fork_mem.clone(), vec![AnyModel::Net(net)]).unwrap();
    fork.restore_transports(&state).unwrap();
    let mut forked = forked.forked(&fork, &fork_mem);
    fork.start();
    forked.wait(TRANSMIT);
    forked.add(&fork, TRANSMIT, &[&frame(3, 20)], &[]);
    forked.wait(TRANSMIT);
    wait_readable(&fork_wire);
    fork_wire.recv(&mut got).unwrap();
    assert_eq!(got[HEADER], 3, "the first frame on the fork's wire is its own");
}

#[test]
fn a_tap_can_be_plugged_in_while_the_guest_runs() {
    let mem = memory();
    let net = Net::over(NetParts::unplugged()).unwrap();
    let set = DeviceSet::assemble(mem.clone(), vec![AnyModel::Net(net)]).unwrap();
    set.start();
    let mut driver = Driver::start(&set, &mem, 0);
    driver.add(&set, TRANSMIT, &[&frame(1, 20)], &[]);
    driver.wait(TRANSMIT);
    driver.add(&set, RECEIVE, &[], &[2000]);

    let (tap, wire) = UnixDatagram::pair().unwrap();
    wire.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    set.with_net(0, |net, poller| net.plug(tap.into(), poller).unwrap())
        .unwrap();
    wire.send(&frame(2, 100)).unwrap();
    assert_eq!(driver.wait(RECEIVE).1[HEADER..], [2; 100]);
    driver.add(&set, TRANSMIT, &[&frame(3, 20)], &[]);
    driver.wait(TRANSMIT);
    let mut got = [0; 100];
    wire.recv(&mut got).unwrap();
    assert_eq!(got[HEADER], 3, "what was sent before there was a wire is lost");
}

#[test]
fn only_a_tap_and_only_where_there_is_an_interface() {
    let mem = memory();
    let (set, _wire) = interface(&mem);
    let other = || std::os::fd::OwnedFd::from(UnixDatagram::unbound().unwrap());
    assert!(set.attach_tap(0, other()).is_err(), "a socket is no tap");
    assert!(set.attach_tap(1, other()).is_err());
}

#[test]
fn a_tap_that_was_removed_is_not_watched_for_ever() {
    let mem = memory();
    let (reader, writer) = std::io::pipe().unwrap();
    // Reading from this end fails, and when the other one is closed it is always ready.
    let net = Net::over(NetParts {
        tap: Some(writer.into()),
        mac: MAC,
        mtu: 1400,
    });
    let set = DeviceSet::assemble(mem.clone(), vec![AnyModel::Net(net.unwrap())]).unwrap();
    set.start();
    let mut driver = Driver::start(&set, &mem, 0);
    drop(reader);
    let lost = || set.with_net(0, |net, _| net.tap.is_none() && !net.watching) == Some(true);
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while !lost() {
        assert!(std::time::Instant::now() < end, "the tap is still watched");
        std::thread::yield_now();
    }
    // The device goes on without a wire.
    driver.add(&set, TRANSMIT, &[&frame(1, 20)], &[]);
    driver.wait(TRANSMIT);
}
