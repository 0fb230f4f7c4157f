//! virtio-vsock: connections between Unix streams on the host and `AF_VSOCK` in the guest.
//!
//! After a restore the parent's connections are gone. The guest hears of it by a reset event, put into the event queue before its vCPUs run; its
//! driver then resets every socket it knows. A connection that the host opens in between would be reset with them, so
//! nothing is put into the receive queue until the driver has handed the event's buffer back, which it does after the resets.

mod connection;
mod packet;
mod state;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::epoll::EventSet;

use super::model::{Context, Model, Poller, copy_config};
use super::queue::{Chain, Segments};
use super::{DeviceEvent, EventSender, GUEST_CID};
use crate::control::GUEST_TO_HOST_PORTS;
use connection::{Connection, Filled, Phase, Ports, Taken};
use packet::{DATA_MAX, HEADER, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_SEND, TYPE_STREAM};
pub(super) use state::VsockState;

/// The host's address.
const HOST_CID: u64 = 2;
const QUEUES: &[u16] = &[128, 128, 16];
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
/// Ports of the host's ends of its connections start here.
const FIRST_PORT: u32 = 1 << 30;
const CONNECTIONS_MAX: usize = 1023;
/// Resets for connections that we do not have; more are dropped, they are a courtesy.
const RESETS_MAX: usize = 1024;
/// Packets for the guest in one go, before other devices have their turn.
const PACKETS_AT_ONCE: usize = 256;
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`.
const TRANSPORT_RESET: [u8; 4] = [0; 4];

/// The vsock device.
#[derive(Debug)]
pub(super) struct Vsock {
    events: EventSender,
    active: bool,
    connections: HashMap<u32, Connection>,
    tokens: HashMap<Ports, u32>,
    next_token: u32,
    next_port: u32,
    /// Resets to send to ports without a connection.
    resets: VecDeque<Ports>,
    /// Connections with control packets to send.
    control: VecDeque<u32>,
    /// Connections whose stream may be readable.
    data: VecDeque<u32>,
    /// The receive queue is closed until the guest's index in the event queue gets here.
    closed_until: Option<u16>,
    /// From the saved state.
    unanswered_resets: u16,
}

impl Vsock {
    /// A device without connections; guests' connections to the host are reported to `events`.
    pub(super) fn new(events: EventSender) -> Self {
        Self {
            events,
            active: false,
            connections: HashMap::new(),
            tokens: HashMap::new(),
            next_token: 0,
            next_port: FIRST_PORT,
            resets: VecDeque::new(),
            control: VecDeque::new(),
            data: VecDeque::new(),
            closed_until: None,
            unanswered_resets: 0,
        }
    }

    /// The device of a restored machine; `activate_restored` follows when its driver was up.
    pub(super) fn restore(state: &VsockState, events: EventSender) -> Self {
        let mut device = Self::new(events);
        device.next_port = state.next_port.max(FIRST_PORT);
        device.unanswered_resets = state.unanswered_resets.min(QUEUES[EVENT]);
        device
    }

    /// Saved state.
    pub(super) fn save(&self) -> VsockState {
        VsockState {
            next_port: self.next_port,
            unanswered_resets: self.unanswered_resets,
        }
    }

    /// Tells the guest, before it runs, that its connections are gone.
    pub(super) fn activate_restored(&mut self, context: &mut Context<'_>) {
        self.active = true;
        let Some(queue) = context.queues.get_mut(EVENT) else {
            return;
        };
        if let Some(mut event) = queue.pop(context.mem) {
            let written = event.writable.write(&TRANSPORT_RESET);
            queue.complete(context.mem, event.head, written as u64);
            self.unanswered_resets = self.unanswered_resets.saturating_add(1);
            queue.signal(context.mem, context.interrupt);
        }
        let more = queue.enable_notification(context.mem);
        if self.unanswered_resets > 0 {
            let index = queue.available_index(context.mem);
            self.closed_until = index.map(|index| index.wrapping_add(self.unanswered_resets));
        }
        tracing::debug!(closed = self.closed_until.is_some(), more, "vsock reset event");
    }

    /// Whether the guest may be sent packets.
    fn is_open(&mut self, context: &Context<'_>) -> bool {
        let Some(target) = self.closed_until else { return true };
        let index = context
            .queues
            .get(EVENT)
            .and_then(|queue| queue.available_index(context.mem));
        let Some(index) = index else { return false };
        let missing = target.wrapping_sub(index);
        if missing == 0 || missing > QUEUES[EVENT] {
            self.closed_until = None;
            self.unanswered_resets = 0;
            return true;
        }
        self.unanswered_resets = missing;
        false
    }

    /// Opens a connection from the host. It goes on when the I/O thread has its next round.
    pub(super) fn connect(&mut self, guest_port: u32, stream: OwnedFd, poller: &Poller) {
        let stream = UnixStream::from(stream);
        if !self.active || self.connections.len() >= CONNECTIONS_MAX {
            tracing::debug!(guest_port, active = self.active, "connection refused");
            return;
        }
        let ports = loop {
            let ports = Ports {
                host: self.next_port,
                guest: guest_port,
            };
            self.next_port = self
                .next_port
                .checked_add(1)
                .filter(|port| *port != u32::MAX)
                .unwrap_or(FIRST_PORT);
            if !self.tokens.contains_key(&ports) {
                break ports;
            }
        };
        if let Err(error) = self.insert(Connection::outgoing(ports, stream), poller) {
            tracing::warn!(%error, guest_port, "open connection");
        }
    }

    fn insert(&mut self, connection: Connection, poller: &Poller) -> std::io::Result<()> {
        set_nonblocking(&connection)?;
        let token = self.next_token;
        self.next_token = self.next_token.wrapping_add(1) & 0x7fff_ffff;
        poller.add(connection.fd(), token, EventSet::ONE_SHOT)?;
        self.tokens.insert(connection.ports, token);
        self.connections.insert(token, connection);
        self.update(token, poller);
        Ok(())
    }

    /// Puts a connection where it belongs after anything happened to it.
    fn update(&mut self, token: u32, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        if connection.phase == Phase::Draining {
            if connection.is_flushed() {
                self.remove(token, poller);
                return;
            }
        } else if connection.has_control() && !connection.in_control_queue {
            connection.in_control_queue = true;
            self.control.push_back(token);
        }
        let interest = connection.interest().map(|events| events | EventSet::ONE_SHOT);
        if interest.is_some() && interest != connection.armed {
            let events = interest.unwrap_or(EventSet::ONE_SHOT);
            match poller.modify(connection.fd(), token, events) {
                Ok(()) => connection.armed = interest,
                Err(error) => tracing::error!(%error, "watch stream"),
            }
        }
    }

    /// Forgets a connection and closes its stream.
    fn remove(&mut self, token: u32, poller: &Poller) {
        if let Some(connection) = self.connections.remove(&token) {
            if self.tokens.get(&connection.ports) == Some(&token) {
                self.tokens.remove(&connection.ports);
            }
            poller.remove(connection.fd());
            connection.close();
        }
    }

    /// Ends a connection for the guest; what it sent before it said that this was all still goes to the host.
    fn end(&mut self, token: u32, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        if connection.guest_sent_all() && !connection.is_flushed() {
            connection.phase = Phase::Draining;
            self.tokens.remove(&connection.ports);
            self.update(token, poller);
        } else {
            self.remove(token, poller);
        }
    }

    fn reset(&mut self, ports: Ports) {
        // After a restore the guest resets everything by itself.
        if self.closed_until.is_none() && self.resets.len() < RESETS_MAX {
            self.resets.push_back(ports);
        }
    }

    fn queue_data(&mut self, token: u32) {
        if let Some(connection) = self.connections.get_mut(&token)
            && connection.can_read()
            && !std::mem::replace(&mut connection.in_data_queue, true)
        {
            self.data.push_back(token);
        }
    }

    /// Takes packets from the guest.
    fn transmit(&mut self, context: &mut Context<'_>) {
        loop {
            let Some(queue) = context.queues.get_mut(TRANSMIT) else {
                return;
            };
            queue.disable_notification(context.mem);
            while let Some(Chain { head, mut readable, .. }) = queue.pop(context.mem) {
                if let Some(header) = Header::read(&mut readable) {
                    self.packet(&header, readable, context.poller);
                }
                queue.complete(context.mem, head, 0);
            }
            queue.signal(context.mem, context.interrupt);
            if !queue.enable_notification(context.mem) {
                return;
            }
        }
    }

    /// One packet from the guest.
    fn packet(&mut self, header: &Header, mut payload: Segments<'_>, poller: &Poller) {
        if header.source_cid != GUEST_CID || header.target_cid != HOST_CID {
            return;
        }
        let ports = Ports {
            host: header.target_port,
            guest: header.source_port,
        };
        let token = self.tokens.get(&ports).copied();
        tracing::trace!(?ports, known = token.is_some(), op = ?header.op, len = header.len, flags = header.flags, "from guest");
        let fits = header.len <= DATA_MAX && u64::from(header.len) <= payload.len();
        if header.socket_type != TYPE_STREAM || !fits {
            self.refuse(ports, token, poller);
            return;
        }
        let data = payload.take(header.len.into());
        match (token, header.op) {
            (None, Op::Request) => self.accept(ports, header, poller),
            (None, Op::Reset) => {}
            (None, _) => self.reset(ports),
            (Some(token), op) => {
                let Some(connection) = self.connections.get_mut(&token) else {
                    return;
                };
                if connection.update_credit(header) {
                    self.queue_data(token);
                }
                self.packet_of_connection(token, op, header.flags, &data, poller);
            }
        }
    }

    fn packet_of_connection(&mut self, token: u32, op: Op, flags: u32, data: &Segments<'_>, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        let ports = connection.ports;
        match (op, connection.phase) {
            (Op::Response, Phase::Connecting) => {
                connection.establish();
                self.queue_data(token);
            }
            (Op::Reset, _) => return self.end(token, poller),
            (Op::Shutdown, Phase::Established) => {
                if connection.guest_shutdown(flags) {
                    // The guest waits for this before it forgets the connection.
                    self.reset(ports);
                    return self.end(token, poller);
                }
            }
            (Op::Data, Phase::Established) => {
                if connection.take(data) == Taken::Violation {
                    return self.refuse(ports, Some(token), poller);
                }
            }
            (Op::CreditUpdate, _) => {}
            (Op::CreditRequest, _) => connection.owe_credit_update(),
            _ => return self.refuse(ports, Some(token), poller),
        }
        self.update(token, poller);
    }

    fn refuse(&mut self, ports: Ports, token: Option<u32>, poller: &Poller) {
        self.reset(ports);
        if let Some(token) = token {
            self.remove(token, poller);
        }
    }

    /// A connection from the guest.
    fn accept(&mut self, ports: Ports, header: &Header, poller: &Poller) {
        let allowed = GUEST_TO_HOST_PORTS.contains(&ports.host) && self.connections.len() < CONNECTIONS_MAX;
        let pair = allowed.then(UnixStream::pair).and_then(Result::ok);
        let Some((ours, theirs)) = pair else {
            self.reset(ports);
            return;
        };
        let mut connection = Connection::incoming(ports, ours);
        connection.update_credit(header);
        if self.insert(connection, poller).is_err() {
            self.reset(ports);
            return;
        }
        if !self.events.send(DeviceEvent::Connected {
            port: ports.host,
            stream: theirs.into(),
        }) {
            let token = self.tokens.get(&ports).copied();
            self.refuse(ports, token, poller);
            return;
        }
        if let Some(token) = self.tokens.get(&ports).copied() {
            self.queue_data(token);
        }
    }

    /// Gives packets to the guest, as long as there are some and it has buffers.
    fn pump(&mut self, context: &mut Context<'_>) {
        if !self.is_open(context) {
            return;
        }
        for round in 0.. {
            if self.resets.is_empty() && self.control.is_empty() && self.data.is_empty() {
                break;
            }
            if round >= PACKETS_AT_ONCE {
                context.poller.wake();
                break;
            }
            let Some(queue) = context.queues.get_mut(RECEIVE) else {
                break;
            };
            let Some(Chain { head, mut writable, .. }) = queue.pop(context.mem) else {
                if queue.enable_notification(context.mem) {
                    continue;
                }
                break;
            };
            if writable.len() <= HEADER as u64 {
                queue.complete(context.mem, head, 0);
            } else if let Some(bytes) = self.next_packet(&mut writable, context.poller) {
                queue.complete(context.mem, head, bytes);
            } else {
                queue.push_back(1);
            }
        }
        if let Some(queue) = context.queues.get_mut(RECEIVE) {
            queue.signal(context.mem, context.interrupt);
        }
    }

    /// Puts the next packet into a buffer; `None` when there is none after all.
    fn next_packet(&mut self, buffer: &mut Segments<'_>, poller: &Poller) -> Option<u64> {
        loop {
            if let Some(ports) = self.resets.pop_front() {
                return Some(buffer.write(&ports.header(Op::Reset).to_bytes()) as u64);
            }
            if let Some(token) = self.control.pop_front() {
                let Some(header) = self.control_packet(token, poller) else {
                    continue;
                };
                return Some(buffer.write(&header.to_bytes()) as u64);
            }
            let token = self.data.pop_front()?;
            if let Some(bytes) = self.data_packet(token, buffer, poller) {
                return Some(bytes);
            }
        }
    }

    fn control_packet(&mut self, token: u32, poller: &Poller) -> Option<Header> {
        let connection = self.connections.get_mut(&token)?;
        connection.in_control_queue = false;
        let header = connection.next_control()?;
        if connection.is_over() {
            self.remove(token, poller);
        } else {
            self.update(token, poller);
        }
        Some(header)
    }

    fn data_packet(&mut self, token: u32, buffer: &Segments<'_>, poller: &Poller) -> Option<u64> {
        let connection = self.connections.get_mut(&token)?;
        connection.in_data_queue = false;
        let ports = connection.ports;
        match connection.fill(buffer) {
            Filled::Packet(bytes) => {
                self.queue_data(token);
                self.update(token, poller);
                return Some(bytes);
            }
            Filled::Nothing | Filled::NoCredit => self.update(token, poller),
            Filled::Ended => {
                let flags = if connection.look_for_close() {
                    SHUTDOWN_BOTH
                } else {
                    SHUTDOWN_SEND
                };
                connection.announce(flags);
                self.update(token, poller);
            }
            Filled::Broken => self.refuse(ports, Some(token), poller),
        }
        None
    }

    /// The host's stream is ready for something.
    fn stream_event(&mut self, token: u32, events: EventSet, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        connection.armed = None;
        let ports = connection.ports;
        let closed = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        connection.host_closed |= closed;
        if closed && connection.phase == Phase::Connecting {
            if connection.is_known_to_guest() {
                self.reset(ports);
            }
            self.remove(token, poller);
            return;
        }
        if !connection.is_flushed() {
            connection.flush();
        }
        if closed && connection.has_host_ended() {
            connection.announce(SHUTDOWN_BOTH);
        } else if closed || events.contains(EventSet::IN) {
            self.queue_data(token);
        }
        self.update(token, poller);
    }
}

fn set_nonblocking(connection: &Connection) -> std::io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use std::os::fd::AsFd;
    let flags = OFlag::from_bits_retain(fcntl(connection.as_fd(), FcntlArg::F_GETFL)?);
    fcntl(connection.as_fd(), FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

impl Model for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        copy_config(&GUEST_CID.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, _context: &mut Context<'_>) {
        self.active = true;
    }

    fn reset(&mut self, poller: &Poller) {
        let tokens: Vec<u32> = self.connections.keys().copied().collect();
        for token in tokens {
            self.remove(token, poller);
        }
        self.resets.clear();
        self.control.clear();
        self.data.clear();
        self.active = false;
        self.closed_until = None;
        self.unanswered_resets = 0;
    }

    fn queue_event(&mut self, context: &mut Context<'_>, queue: usize) {
        if queue == TRANSMIT {
            self.transmit(context);
        }
        self.pump(context);
    }

    fn own_event(&mut self, context: &mut Context<'_>, token: u32, events: EventSet) {
        self.stream_event(token, events, context.poller);
        self.pump(context);
    }

    fn settle(&mut self, context: &mut Context<'_>) {
        self.pump(context);
    }
}

#[cfg(test)]
mod tests;
