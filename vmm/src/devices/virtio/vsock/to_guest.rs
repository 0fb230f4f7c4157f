//! Packets for the guest.

use super::super::model::{Context, Poller};
use super::super::queue::{Chain, Segments};
use super::connection::Filled;
use super::packet::{HEADER, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_SEND};
use super::{EVENT, QUEUES, RECEIVE, Vsock};

/// Packets in one go, before other devices have their turn.
const PACKETS_AT_ONCE: usize = 256;

impl Vsock {
    /// Whether the guest may be sent packets.
    fn is_open(&mut self, context: &mut Context<'_>) -> bool {
        let Some(target) = self.closed_until else { return true };
        let Some(queue) = context.queues.get_mut(EVENT) else {
            return false;
        };
        for _ in 0..2 {
            let Some(index) = queue.available_index(context.mem) else {
                return false;
            };
            let missing = target.wrapping_sub(index);
            if missing == 0 || missing > QUEUES[EVENT] {
                self.closed_until = None;
                self.unanswered_resets = 0;
                return true;
            }
            self.unanswered_resets = missing;
            if !queue.notify_of_more(context.mem) {
                return false;
            }
        }
        // It adds while we look: other devices first.
        context.poller.wake();
        false
    }

    /// Gives packets to the guest, as long as there are some and it has buffers.
    pub(super) fn pump(&mut self, context: &mut Context<'_>) {
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
}
