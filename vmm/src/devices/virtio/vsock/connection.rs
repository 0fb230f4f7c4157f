//! One vsock connection: credit in both directions, half-close, and the host's stream behind it. Never blocks.

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;

use vm_memory::{VolatileMemoryError, WriteVolatile};
use vmm_sys_util::epoll::EventSet;

use super::super::queue::Segments;
use super::credit::Credit;
use super::packet::{DATA_MAX, HEADER, Header, Op, Ports, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::stream::{is_closed, read};

/// Bytes that the guest may send ahead of what the host's stream takes.
pub(super) const BUFFER: u32 = 128 * 1024;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The guest has not answered our request.
    Connecting,
    /// Data may flow.
    Established,
    /// Over for the guest; what it sent is still on its way to the host's stream.
    Draining,
}

/// What became of an attempt to make a data packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// A packet of so many bytes, header included.
    Packet(u64),
    /// The host has nothing to say now.
    Nothing,
    /// The guest's buffer is full.
    NoCredit,
    /// The host's stream ended.
    Ended,
    /// The host's stream broke.
    Broken,
}

/// What became of data from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// All is well.
    Ok,
    /// The guest sent more than it had credit for, or after it said that it would not.
    Violation,
}

/// Control packets that wait to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Waiting {
    request: bool,
    response: bool,
    shutdown: bool,
    credit_request: bool,
    credit_update: bool,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ports: Ports,
    pub(super) phase: Phase,
    /// In the muxer's queue of connections with control packets.
    pub(super) in_control_queue: bool,
    /// In the muxer's queue of connections whose stream may be readable.
    pub(super) in_data_queue: bool,
    /// What the I/O thread watches at the moment; `None` after an event.
    pub(super) armed: Option<EventSet>,
    /// The host closed its end altogether.
    pub(super) host_closed: bool,
    stream: UnixStream,
    waiting: Waiting,
    /// Shutdown flags we announced or must announce.
    our_shutdown: u32,
    /// Shutdown flags the guest announced.
    guest_shutdown: u32,
    /// Nothing more is read from the host.
    host_ended: bool,
    blocked_on_credit: bool,
    /// What the guest can take.
    credit: Credit,
    backlog: VecDeque<u8>,
    forwarded: u32,
    told: u32,
}

impl Connection {
    fn new(ports: Ports, phase: Phase, stream: UnixStream, waiting: Waiting) -> Self {
        Self {
            ports,
            phase,
            in_control_queue: false,
            in_data_queue: false,
            armed: None,
            host_closed: false,
            stream,
            waiting,
            our_shutdown: 0,
            guest_shutdown: 0,
            host_ended: false,
            blocked_on_credit: false,
            credit: Credit::default(),
            backlog: VecDeque::new(),
            forwarded: 0,
            told: 0,
        }
    }

    /// From the host: a request waits to be sent.
    pub(super) fn outgoing(ports: Ports, stream: UnixStream) -> Self {
        Self::new(
            ports,
            Phase::Connecting,
            stream,
            Waiting {
                request: true,
                ..Waiting::default()
            },
        )
    }

    /// From the guest: a response waits to be sent.
    pub(super) fn incoming(ports: Ports, stream: UnixStream) -> Self {
        Self::new(
            ports,
            Phase::Established,
            stream,
            Waiting {
                response: true,
                ..Waiting::default()
            },
        )
    }

    /// The stream's descriptor.
    pub(super) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// What to watch the stream for; `None` for nothing. The end of the stream is always reported, so a connection that wants neither must not
    /// be watched once that is known.
    pub(super) fn interest(&self) -> Option<EventSet> {
        let mut events = EventSet::empty();
        if self.can_read() && !self.in_data_queue && !self.blocked_on_credit {
            events |= EventSet::IN;
        }
        if !self.backlog.is_empty() {
            events |= EventSet::OUT;
        }
        (!events.is_empty() || !self.host_closed).then_some(events)
    }

    /// Whether the host's stream is (still) read.
    pub(super) fn can_read(&self) -> bool {
        self.phase == Phase::Established && !self.host_ended
    }

    /// Whether the request has been sent, so that the guest must hear of the end of the connection.
    pub(super) fn is_known_to_guest(&self) -> bool {
        !self.waiting.request
    }

    /// Takes over the guest's view of its buffer; returns whether data can flow again.
    pub(super) fn update_credit(&mut self, header: &Header) -> bool {
        self.credit.update(header.buf_alloc, header.fwd_cnt);
        if self.blocked_on_credit && self.credit.available() > 0 {
            self.blocked_on_credit = false;
            return self.can_read();
        }
        false
    }

    /// The guest accepted.
    pub(super) fn establish(&mut self) {
        self.phase = Phase::Established;
    }

    /// The guest wants to know our buffer.
    pub(super) fn owe_credit_update(&mut self) {
        self.waiting.credit_update = true;
    }

    /// Whether a control packet waits.
    pub(super) fn has_control(&self) -> bool {
        self.waiting != Waiting::default()
    }

    fn header(&mut self, op: Op) -> Header {
        self.told = self.forwarded;
        self.waiting.credit_update = false;
        Header {
            buf_alloc: BUFFER,
            fwd_cnt: self.forwarded,
            ..self.ports.header(op)
        }
    }

    /// The next control packet.
    pub(super) fn next_control(&mut self) -> Option<Header> {
        let waiting = &mut self.waiting;
        let op = if std::mem::take(&mut waiting.request) {
            Op::Request
        } else if std::mem::take(&mut waiting.response) {
            Op::Response
        } else if std::mem::take(&mut waiting.shutdown) {
            Op::Shutdown
        } else if std::mem::take(&mut waiting.credit_request) {
            Op::CreditRequest
        } else if std::mem::take(&mut waiting.credit_update) {
            Op::CreditUpdate
        } else {
            return None;
        };
        let mut header = self.header(op);
        if op == Op::Shutdown {
            header.flags = self.our_shutdown;
        }
        Some(header)
    }

    /// Whether both directions were announced as ended by us and the guest has been told.
    pub(super) fn is_over(&self) -> bool {
        self.our_shutdown == SHUTDOWN_BOTH && !self.waiting.shutdown
    }

    /// Announces the end of a direction.
    pub(super) fn announce(&mut self, flags: u32) {
        if self.our_shutdown & flags != flags {
            self.our_shutdown |= flags;
            self.waiting.shutdown = true;
        }
    }

    /// Makes a data packet in a receive buffer of the guest, which stays as it is when there is no packet.
    pub(super) fn fill(&mut self, buffer: &Segments<'_>) -> Filled {
        if !self.can_read() {
            return Filled::Nothing;
        }
        let credit = self.credit.available().min(DATA_MAX);
        if credit == 0 {
            if !std::mem::replace(&mut self.blocked_on_credit, true) {
                self.waiting.credit_request = true;
            }
            return Filled::NoCredit;
        }
        let mut buffer = buffer.clone();
        let mut head = buffer.take(HEADER as u64);
        let room = buffer.take(u64::from(credit));
        let bytes = match read(&self.stream, &room) {
            Ok(0) => {
                self.host_ended = true;
                return Filled::Ended;
            }
            Ok(bytes) => bytes,
            Err(ErrorKind::WouldBlock) => return Filled::Nothing,
            Err(_) => return Filled::Broken,
        };
        self.credit.spend(bytes);
        let header = Header {
            len: bytes,
            ..self.header(Op::Data)
        };
        head.write(&header.to_bytes());
        Filled::Packet(HEADER as u64 + u64::from(bytes))
    }

    /// Data from the guest: to the stream as far as it takes it, the rest into the backlog.
    pub(super) fn take(&mut self, data: &Segments<'_>) -> Taken {
        let len = data.len();
        if self.guest_shutdown & SHUTDOWN_SEND != 0 || self.backlog.len() as u64 + len > u64::from(BUFFER) {
            return Taken::Violation;
        }
        let mut direct = self.backlog.is_empty();
        for slice in data.slices() {
            let mut rest = *slice;
            while direct && !rest.is_empty() {
                match self.stream.write_volatile(&rest) {
                    Ok(0) => direct = false,
                    Ok(bytes) => {
                        self.forward(bytes);
                        let Ok(next) = rest.offset(bytes) else {
                            return Taken::Violation;
                        };
                        rest = next;
                    }
                    Err(VolatileMemoryError::IOError(error)) if error.kind() == ErrorKind::Interrupted => {}
                    Err(VolatileMemoryError::IOError(error)) if error.kind() == ErrorKind::WouldBlock => direct = false,
                    Err(_) => {
                        self.host_gone();
                        direct = false;
                    }
                }
            }
            let mut bytes = vec![0; rest.len()];
            rest.copy_to(&mut bytes);
            self.keep(&bytes);
        }
        Taken::Ok
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.our_shutdown & SHUTDOWN_RECEIVE != 0 {
            // The host takes no more; the guest has been told, and what was under way is lost.
            self.forward(bytes.len());
        } else {
            self.backlog.extend(bytes);
        }
    }

    fn forward(&mut self, bytes: usize) {
        self.forwarded = self.forwarded.wrapping_add(u32::try_from(bytes).unwrap_or(0));
        if self.forwarded.wrapping_sub(self.told) >= BUFFER / 4 && self.phase == Phase::Established {
            self.waiting.credit_update = true;
        }
    }

    /// The host's stream takes no more bytes.
    fn host_gone(&mut self) {
        self.announce(SHUTDOWN_RECEIVE);
        let lost = std::mem::take(&mut self.backlog).len();
        self.forward(lost);
    }

    /// Writes the backlog to the stream, as far as it takes it.
    pub(super) fn flush(&mut self) {
        while !self.backlog.is_empty() {
            match self.stream.write(self.backlog.as_slices().0) {
                Ok(0) => break,
                Ok(bytes) => {
                    self.backlog.drain(..bytes);
                    self.forward(bytes);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.host_gone(),
            }
        }
        self.pass_on_end();
    }

    /// Whether everything the guest sent has been passed on.
    pub(super) fn is_flushed(&self) -> bool {
        self.backlog.is_empty()
    }

    /// The guest announced the end of a direction; returns whether it is done with the connection.
    pub(super) fn guest_shutdown(&mut self, flags: u32) -> bool {
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 && !self.host_ended {
            self.host_ended = true;
            // Only fails when the host's end is gone already.
            let _gone = self.stream.shutdown(Shutdown::Read);
        }
        self.pass_on_end();
        self.guest_shutdown == SHUTDOWN_BOTH
    }

    /// Whether the guest said that it had sent everything.
    pub(super) fn guest_sent_all(&self) -> bool {
        self.guest_shutdown & SHUTDOWN_SEND != 0
    }

    fn pass_on_end(&self) {
        if self.guest_sent_all() && self.is_flushed() {
            let _gone = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// Ends the stream for the host, even when a copy of our descriptor is still open somewhere (the child that writes a save).
    pub(super) fn close(self) {
        let _gone = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the host closed its end altogether, not just the direction to us.
    pub(super) fn look_for_close(&mut self) -> bool {
        self.host_closed = self.host_closed || is_closed(&self.stream);
        self.host_closed
    }

    /// Nothing more is read from the host.
    pub(super) fn has_host_ended(&self) -> bool {
        self.host_ended
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
