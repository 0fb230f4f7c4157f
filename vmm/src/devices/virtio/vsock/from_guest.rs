//! Packets from the guest.

use std::os::unix::net::UnixStream;

use super::super::model::{Context, Poller};
use super::super::queue::{Chain, Segments};
use super::super::{DeviceEvent, GUEST_CID};
use super::connection::{Connection, Phase, Taken};
use super::packet::{DATA_MAX, Header, Op, Ports, TYPE_STREAM};
use super::{CONNECTIONS_MAX, HOST_CID, TRANSMIT, Vsock};
use crate::control::GUEST_TO_HOST_PORTS;

impl Vsock {
    /// Takes packets from the guest.
    pub(super) fn transmit(&mut self, context: &mut Context<'_>) {
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

    pub(super) fn refuse(&mut self, ports: Ports, token: Option<u32>, poller: &Poller) {
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
}
