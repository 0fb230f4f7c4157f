//! A datagram socket in place of the tap: it, too, carries one frame with its header at a time.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, setsockopt, socketpair, sockopt};

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

/// A wire that holds many frames, unlike a datagram socket, and has an end.
fn long_wire() -> (Net, OwnedFd) {
    let (tap, wire) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::empty()).unwrap();
    setsockopt(&wire, sockopt::SndBuf, &(1 << 20)).unwrap();
    let parts = NetParts {
        tap: Some(tap),
        ..NetParts::unplugged()
    };
    (Net::over(parts).unwrap(), wire)
}

fn wait_for(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn frames_that_came_without_room_do_not_stop_those_after_them() {
    const ROUND: u8 = 255;
    let mem = memory();
    let (net, wire) = long_wire();
    let set = DeviceSet::assemble(mem.clone(), vec![AnyModel::Net(net)]).unwrap();
    set.start();
    let mut driver = Driver::start_with(&set, &mem, 0, 256);
    let arrive = |byte: u8| send(wire.as_raw_fd(), &frame(byte, 20), MsgFlags::empty()).unwrap();
    arrive(0);
    // There is no room, so the device looks away from the tap.
    wait_for(|| {
        set.with_net(0, |net, _| !net.waiting.is_empty() && !net.watching)
            .unwrap()
    });
    // All at once: as many buffers as it fills in one go, and more frames.
    set.pause();
    for byte in 1..=ROUND {
        arrive(byte);
    }
    arrive(77);
    for _ in 0..256 {
        driver.add_quietly(RECEIVE, &[], &[100]);
    }
    set.resume();
    for byte in 0..=ROUND {
        assert_eq!(driver.wait(RECEIVE).1[HEADER], byte);
    }
    driver.add_as_asked(&set, RECEIVE, &[], &[100]);
    assert_eq!(driver.wait(RECEIVE).1[HEADER], 77);
}

#[test]
fn a_tap_that_ended_is_unplugged() {
    let mem = memory();
    let (net, wire) = long_wire();
    let set = DeviceSet::assemble(mem.clone(), vec![AnyModel::Net(net)]).unwrap();
    set.start();
    let mut driver = Driver::start(&set, &mem, 0);
    drop(wire);
    wait_for(|| set.with_net(0, |net, _| net.tap.is_none() && !net.watching).unwrap());
    driver.add(&set, TRANSMIT, &[&frame(1, 20)], &[]);
    driver.wait(TRANSMIT);
}

#[test]
fn only_a_tap_and_only_where_there_is_an_interface() {
    let mem = memory();
    let (set, _wire) = interface(&mem);
    let other = || OwnedFd::from(UnixDatagram::unbound().unwrap());
    assert!(set.attach_tap(0, other()).is_err(), "a socket is no tap");
    assert!(set.attach_tap(1, other()).is_err());
}
