//! Both ends of connections: a guest's driver on the rings, Unix streams on the host.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of a test"
)]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use vmm_sys_util::epoll::Epoll;
use vmm_sys_util::eventfd::EventFd;

use super::super::model::Poller;
use super::super::testing::{Driver, copy, memory, wait_readable};
use super::super::{Backing, DeviceEvent, DeviceSet, Disk, EventReceiver, Memory, event_channel};
use super::connection::BUFFER;
use super::packet::{HEADER, Header, Op};
use super::{EVENT, FIRST_PORT, RECEIVE, TRANSMIT, Vsock};

/// Vsock is seldom the first device.
const DEVICE: usize = 1;

fn disks() -> Vec<Disk> {
    vec![Disk {
        id: "slot0".into(),
        backing: Backing::Empty { read_only: true },
    }]
}

struct Guest {
    set: DeviceSet,
    mem: Memory,
    driver: Driver,
    events: EventReceiver,
    buf_alloc: u32,
}

impl Guest {
    fn new() -> Self {
        let mem = memory();
        let (sender, events) = event_channel().unwrap();
        let set = DeviceSet::create(mem.clone(), disks(), Vec::new(), true, sender).unwrap();
        set.start();
        let mut driver = Driver::start(&set, &mem, DEVICE);
        for _ in 0..4 {
            driver.add_quietly(EVENT, &[], &[4]);
        }
        for _ in 0..8 {
            driver.add(&set, RECEIVE, &[], &[4096]);
        }
        // The I/O thread has seen DRIVER_OK once it has answered a packet.
        let mut guest = Self {
            set,
            mem,
            driver,
            events,
            buf_alloc: 256 * 1024,
        };
        guest.send(9, 9, Op::CreditUpdate, 0, 0, &[]);
        let (header, _) = guest.receive();
        assert_eq!((header.op, header.source_port, header.target_port), (Op::Reset, 9, 9));
        guest
    }

    #[expect(clippy::too_many_arguments, reason = "fields of a packet")]
    fn send(&mut self, host: u32, guest: u32, op: Op, flags: u32, fwd_cnt: u32, data: &[u8]) {
        let header = Header {
            source_cid: 3,
            target_cid: 2,
            source_port: guest,
            target_port: host,
            len: data.len() as u32,
            socket_type: 1,
            op,
            flags,
            buf_alloc: self.buf_alloc,
            fwd_cnt,
        };
        self.driver.add(&self.set, TRANSMIT, &[&header.to_bytes(), data], &[]);
        self.driver.wait(TRANSMIT);
    }

    fn parse(&mut self, bytes: &[u8]) -> (Header, Vec<u8>) {
        self.driver.add(&self.set, RECEIVE, &[], &[4096]);
        let (header, data) = bytes.split_first_chunk::<HEADER>().unwrap();
        let header = Header::parse(header);
        assert_eq!((header.source_cid, header.target_cid, header.socket_type), (2, 3, 1));
        assert_eq!(header.len as usize, data.len());
        (header, data.to_vec())
    }

    fn receive(&mut self) -> (Header, Vec<u8>) {
        let (_, bytes) = self.driver.wait(RECEIVE);
        self.parse(&bytes)
    }

    fn receive_op(&mut self, op: Op) -> (Header, Vec<u8>) {
        let (header, data) = self.receive();
        assert_eq!(header.op, op, "{header:?}");
        (header, data)
    }

    /// A connection from the host to guest port 1024, accepted; its host port.
    fn connect(&mut self) -> (UnixStream, u32) {
        let (host, device) = UnixStream::pair().unwrap();
        host.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        self.set.connect_vsock(1024, device.into());
        let (request, _) = self.receive_op(Op::Request);
        assert_eq!(request.target_port, 1024);
        self.send(request.source_port, 1024, Op::Response, 0, 0, &[]);
        (host, request.source_port)
    }
}

fn read_exactly(stream: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn at_end(stream: &mut UnixStream) -> bool {
    stream.read(&mut [0; 1]).unwrap() == 0
}

#[test]
fn host_to_guest_connection_carries_data_both_ways() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.connect();
    assert_eq!(port, FIRST_PORT);
    host.write_all(b"question").unwrap();
    let (header, data) = guest.receive_op(Op::Data);
    assert_eq!((data.as_slice(), header.buf_alloc), (b"question".as_slice(), BUFFER));
    guest.send(port, 1024, Op::Data, 0, 8, b"answer");
    assert_eq!(read_exactly(&mut host, 6), b"answer");
    guest.send(port, 1024, Op::CreditRequest, 0, 8, &[]);
    let (header, _) = guest.receive_op(Op::CreditUpdate);
    assert_eq!(header.fwd_cnt, 6);
    let (_other, other_port) = guest.connect();
    assert_eq!(other_port, FIRST_PORT + 1);
}

#[test]
fn refused_connection_closes_the_stream() {
    let mut guest = Guest::new();
    let (mut host, device) = UnixStream::pair().unwrap();
    guest.set.connect_vsock(77, device.into());
    let (request, _) = guest.receive_op(Op::Request);
    guest.send(request.source_port, 77, Op::Reset, 0, 0, &[]);
    assert!(at_end(&mut host));
}

#[test]
fn connections_that_come_and_go_unheard_leave_nothing() {
    let (sender, _events) = event_channel().unwrap();
    let wake = Arc::new(EventFd::new(0).unwrap());
    let poller = Poller::new(Arc::new(Epoll::new().unwrap()), 0, wake);
    let mut vsock = Vsock::new(sender);
    vsock.active = true;
    for guest in 0..3000 {
        let (_host, device) = UnixStream::pair().unwrap();
        vsock.connect(guest, device.into(), &poller);
        let (ports, token) = vsock
            .tokens
            .iter()
            .next()
            .map(|(ports, token)| (*ports, *token))
            .unwrap();
        vsock.queue_data(token);
        vsock.refuse(ports, Some(token), &poller);
    }
    assert_eq!((vsock.control.len(), vsock.data.len()), (0, 0));
    assert!(vsock.resets.len() <= super::RESETS_MAX);
}

#[test]
fn no_driver_no_connection() {
    let (sender, _events) = event_channel().unwrap();
    let set = DeviceSet::create(memory(), disks(), Vec::new(), true, sender).unwrap();
    set.start();
    let (mut host, device) = UnixStream::pair().unwrap();
    set.connect_vsock(1024, device.into());
    assert!(at_end(&mut host));
}

#[test]
fn directions_end_one_by_one() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.connect();
    host.write_all(b"last").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    guest.receive_op(Op::Data);
    let (header, _) = guest.receive_op(Op::Shutdown);
    assert_eq!(header.flags, 2, "the host sends no more");
    guest.send(port, 1024, Op::Data, 0, 4, b"still here");
    assert_eq!(read_exactly(&mut host, 10), b"still here");
    guest.send(port, 1024, Op::Shutdown, 2, 4, &[]);
    assert!(at_end(&mut host));
    // With both directions over, so is the connection.
    assert_eq!(guest.receive_op(Op::Shutdown).0.flags, 3);
    guest.send(port, 1024, Op::Data, 0, 4, b"nobody");
    guest.receive_op(Op::Reset);
}

#[test]
fn guest_that_closes_is_answered_by_a_reset() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.connect();
    guest.send(port, 1024, Op::Shutdown, 3, 0, &[]);
    guest.receive_op(Op::Reset);
    assert!(at_end(&mut host));
    assert!(host.write_all(b"x").is_err());
}

#[test]
fn host_that_closes_ends_both_directions() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.connect();
    host.write_all(b"bye").unwrap();
    drop(host);
    guest.receive_op(Op::Data);
    let (header, _) = guest.receive_op(Op::Shutdown);
    assert_eq!((header.flags, header.source_port), (3, port));
    // Half-closed first, then closed.
    let (host, _) = guest.connect();
    host.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.receive_op(Op::Shutdown).0.flags, 2);
    drop(host);
    assert_eq!(guest.receive_op(Op::Shutdown).0.flags, 3);
}

#[test]
fn host_that_gives_up_before_the_answer_is_reset() {
    let mut guest = Guest::new();
    let (host, device) = UnixStream::pair().unwrap();
    guest.set.connect_vsock(1024, device.into());
    let (request, _) = guest.receive_op(Op::Request);
    drop(host);
    let (header, _) = guest.receive_op(Op::Reset);
    assert_eq!(header.source_port, request.source_port);
}

#[test]
fn guest_reaches_only_the_ports_it_may() {
    let mut guest = Guest::new();
    guest.send(1027, 5000, Op::Request, 0, 0, &[]);
    guest.receive_op(Op::Reset);
    guest.send(1026, 5001, Op::Request, 0, 0, &[]);
    let (header, _) = guest.receive_op(Op::Response);
    assert_eq!((header.source_port, header.target_port), (1026, 5001));
    wait_readable(&guest.events);
    let Some(DeviceEvent::Connected { port: 1026, stream }) = guest.events.take() else {
        panic!("no event")
    };
    assert!(guest.events.take().is_none());
    let mut host = UnixStream::from(stream);
    host.set_nonblocking(false).unwrap();
    guest.send(1026, 5001, Op::Data, 0, 0, b"ready");
    assert_eq!(read_exactly(&mut host, 5), b"ready");
    host.write_all(b"ok").unwrap();
    assert_eq!(guest.receive_op(Op::Data).1, b"ok");
}

#[test]
fn host_data_waits_for_credit() {
    let mut guest = Guest::new();
    guest.buf_alloc = 100;
    let (mut host, port) = guest.connect();
    let bytes: Vec<u8> = (0..250).collect();
    host.write_all(&bytes).unwrap();
    let mut got = guest.receive_op(Op::Data).1;
    assert_eq!(got.len(), 100);
    guest.receive_op(Op::CreditRequest);
    guest.send(port, 1024, Op::CreditUpdate, 0, 60, &[]);
    got.extend(guest.receive_op(Op::Data).1);
    assert_eq!(got.len(), 160);
    guest.receive_op(Op::CreditRequest);
    // More than we ever sent: nonsense, and no way to more than the buffer.
    guest.send(port, 1024, Op::CreditUpdate, 0, 60 + 1000, &[]);
    guest.send(port, 1024, Op::CreditUpdate, 0, 160, &[]);
    got.extend(guest.receive_op(Op::Data).1);
    assert_eq!(got, bytes);
}

#[test]
fn guest_data_is_bounded_by_our_credit() {
    let mut guest = Guest::new();
    let (_host, port) = guest.connect();
    let mut sent = 0usize;
    let mut reset = false;
    // The host does not read and the guest does not care for credit.
    while !reset {
        guest.send(port, 1024, Op::Data, 0, 0, &[1; 4096]);
        sent += 4096;
        assert!(sent < 8 << 20, "no limit");
        while let Some((_, bytes)) = guest.driver.used(RECEIVE) {
            reset |= guest.parse(&bytes).0.op == Op::Reset;
        }
    }
}

#[test]
fn what_the_guest_sent_before_it_closed_arrives() {
    let mut guest = Guest::new();
    let (mut host, port) = guest.connect();
    let mut sent = 0usize;
    let mut told = 0;
    // As much as there is credit for, while the host does not read.
    while sent + 4096 - told < BUFFER as usize {
        guest.send(port, 1024, Op::Data, 0, 0, &[(sent / 4096) as u8; 4096]);
        sent += 4096;
        while let Some((_, bytes)) = guest.driver.used(RECEIVE) {
            told = guest.parse(&bytes).0.fwd_cnt as usize;
        }
    }
    guest.send(port, 1024, Op::Shutdown, 3, 0, &[]);
    loop {
        if guest.receive().0.op == Op::Reset {
            break;
        }
    }
    guest.send(port, 1024, Op::Reset, 0, 0, &[]);
    for part in 0..sent / 4096 {
        assert_eq!(read_exactly(&mut host, 4096), [part as u8; 4096]);
    }
    assert!(at_end(&mut host));
}

#[test]
fn a_fork_starts_without_connections_and_its_parent_keeps_them() {
    let mut parent = Guest::new();
    let (mut host, port) = parent.connect();
    parent.set.pause();
    let state = parent.set.save();
    let mem = copy(&parent.mem);
    let driver = parent.driver.clone();
    parent.set.resume();
    host.write_all(b"go on").unwrap();
    assert_eq!(parent.receive_op(Op::Data).1, b"go on");

    let (sender, events) = event_channel().unwrap();
    let set = DeviceSet::restore(mem.clone(), state.clone(), disks(), Vec::new(), sender).unwrap();
    let mut fork = Guest {
        driver: driver.forked(&set, &mem),
        set,
        mem,
        events,
        buf_alloc: 1000,
    };
    let (_, event) = fork.driver.used(EVENT).unwrap();
    assert_eq!(event, [0; 4], "there before anything runs");
    fork.set.start();

    // The host is quick: it connects before the guest has handled the event.
    let (mut first, device) = UnixStream::pair().unwrap();
    fork.set.connect_vsock(1024, device.into());
    fork.send(port, 1024, Op::Data, 0, 0, b"from the parent's connection");
    assert!(fork.driver.used(RECEIVE).is_none(), "closed");
    // A fork of the fork, made in this very moment, has two events to answer.
    fork.set.pause();
    let second_state = fork.set.save();
    let second_mem = copy(&fork.mem);
    let second_driver = fork.driver.clone();
    fork.set.resume();

    fork.driver.add_as_asked(&fork.set, EVENT, &[], &[4]);
    let (request, _) = fork.receive_op(Op::Request);
    assert_eq!(
        (request.source_port, request.target_port),
        (port + 1, 1024),
        "a port that the parent never had"
    );
    fork.send(request.source_port, 1024, Op::Response, 0, 0, &[]);
    fork.send(request.source_port, 1024, Op::Data, 0, 0, b"hello");
    assert_eq!(read_exactly(&mut first, 5), b"hello");

    let (sender, events) = event_channel().unwrap();
    let set = DeviceSet::restore(second_mem.clone(), second_state, disks(), Vec::new(), sender).unwrap();
    let driver = second_driver.forked(&set, &second_mem);
    let mut second = Guest {
        driver,
        set,
        mem: second_mem,
        events,
        buf_alloc: 1000,
    };
    second.set.start();
    let (_host, device) = UnixStream::pair().unwrap();
    second.set.connect_vsock(1024, device.into());
    second.driver.add(&second.set, EVENT, &[], &[4]);
    second.send(9, 9, Op::CreditUpdate, 0, 0, &[]);
    assert!(second.driver.used(RECEIVE).is_none(), "one event is still unanswered");
    second.driver.add_as_asked(&second.set, EVENT, &[], &[4]);
    second.receive_op(Op::Request);
}

#[test]
fn driver_reset_ends_connections() {
    let mut guest = Guest::new();
    let (mut host, _) = guest.connect();
    guest.driver = Driver::start(&guest.set, &guest.mem, DEVICE);
    assert!(at_end(&mut host));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn any_packets_are_survived(packets in prop::collection::vec(
        (
            prop_oneof![4 => Just(true), 1 => Just(false)],
            prop_oneof![3 => Just(0u32), 1 => Just(1), 1 => Just(2), 1 => any::<u32>()],
            prop_oneof![8 => 0u16..9, 1 => any::<u16>()],
            prop_oneof![0u32..4, any::<u32>()],
            prop_oneof![Just(100_000u32), any::<u32>()],
            any::<u32>(),
            0usize..200,
            prop_oneof![8 => Just(0i64), 1 => -50i64..50, 1 => Just(i64::from(u32::MAX))],
        ),
        1..40,
    )) {
        let mut guest = Guest::new();
        let (mut host, port) = guest.connect();
        host.write_all(&[7; 10_000]).unwrap();
        for (addressed, connection, op, flags, buf_alloc, fwd_cnt, len, lie) in packets {
            let (host_port, guest_port) = match connection {
                0 => (port, 1024),
                1 => (1026, 5000),
                2 => (port + 1, 1024),
                other => (other, other),
            };
            let header = Header {
                source_cid: if addressed { 3 } else { 4 },
                target_cid: 2,
                source_port: guest_port,
                target_port: host_port,
                len: (len as i64 + lie).clamp(0, i64::from(u32::MAX)) as u32,
                socket_type: 1,
                op: op.into(),
                flags,
                buf_alloc,
                fwd_cnt,
            };
            guest.driver.add(&guest.set, TRANSMIT, &[&header.to_bytes(), &vec![1; len]], &[]);
            guest.driver.wait(TRANSMIT);
            while let Some((_, bytes)) = guest.driver.used(RECEIVE) {
                guest.parse(&bytes);
            }
        }
        // Whatever happened, a new connection works.
        let (mut second, device) = UnixStream::pair().unwrap();
        guest.set.connect_vsock(2000, device.into());
        let request = loop {
            let (header, _) = guest.receive();
            if header.op == Op::Request && header.target_port == 2000 {
                break header;
            }
        };
        guest.buf_alloc = 1000;
        guest.send(request.source_port, 2000, Op::Response, 0, 0, &[]);
        guest.send(request.source_port, 2000, Op::Data, 0, 0, b"fine");
        prop_assert_eq!(read_exactly(&mut second, 4), b"fine");
    }
}
