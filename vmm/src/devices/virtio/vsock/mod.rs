//! virtio-vsock: connections between Unix streams on the host and `AF_VSOCK` in the guest.
//!
//! After a restore the parent's connections are gone. The guest hears of it by a reset event, put into the event queue before its vCPUs run; its
//! driver then resets every socket it knows. A connection that the host opens in between would be reset with them, so
//! nothing is put into the receive queue until the driver has handed the event's buffer back, which it does after the resets.

mod connection;
mod credit;
mod from_guest;
mod packet;
mod state;
mod stream;
mod to_guest;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::epoll::EventSet;

use super::model::{Context, Model, Poller, copy_config, set_nonblocking};
use super::{EventSender, GUEST_CID};
use connection::{Connection, Phase};
use packet::{Ports, SHUTDOWN_BOTH};
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
        if self.unanswered_resets > 0 {
            let index = queue.available_index(context.mem);
            self.closed_until = index.map(|index| index.wrapping_add(self.unanswered_resets));
        }
        // Nothing else may wake us when the guest has handled the event.
        queue.notify_of_more(context.mem);
        tracing::debug!(closed = self.closed_until.is_some(), "vsock reset event");
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
        set_nonblocking(connection.as_fd())?;
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
            // A guest that opens and closes connections without taking packets must not make these longer and longer.
            if connection.in_control_queue {
                self.control.retain(|other| *other != token);
            }
            if connection.in_data_queue {
                self.data.retain(|other| *other != token);
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
