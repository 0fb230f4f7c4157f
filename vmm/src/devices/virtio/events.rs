//! What devices tell the VMM's main loop.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Events that may wait; more are refused, so that a guest cannot fill the VMM's memory with them.
const CAPACITY: usize = 64;

/// Something a device did that the main loop must act on.
#[derive(Debug)]
pub enum DeviceEvent {
    /// The guest connected to a host port.
    Connected {
        /// The port, one of `control::GUEST_TO_HOST_PORTS`.
        port: u32,
        /// The host's end of the connection.
        stream: OwnedFd,
    },
}

/// The devices' end.
#[derive(Clone, Debug)]
pub struct EventSender {
    events: mpsc::SyncSender<DeviceEvent>,
    wake: Arc<EventFd>,
}

/// The main loop's end: poll its descriptor for input, then take events until there is none.
#[derive(Debug)]
pub struct EventReceiver {
    events: mpsc::Receiver<DeviceEvent>,
    wake: Arc<EventFd>,
}

/// A new channel.
///
/// # Errors
/// When there is no descriptor left.
pub fn event_channel() -> io::Result<(EventSender, EventReceiver)> {
    let (sender, receiver) = mpsc::sync_channel(CAPACITY);
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    Ok((
        EventSender {
            events: sender,
            wake: Arc::clone(&wake),
        },
        EventReceiver { events: receiver, wake },
    ))
}

impl EventSender {
    /// Sends without waiting; `false` when the channel is full or the main loop is gone.
    pub(super) fn send(&self, event: DeviceEvent) -> bool {
        self.events.try_send(event).is_ok() && self.wake.write(1).is_ok()
    }
}

impl EventReceiver {
    /// The next event, if there is one. `None` also clears the descriptor.
    pub fn take(&self) -> Option<DeviceEvent> {
        if let Ok(event) = self.events.try_recv() {
            return Some(event);
        }
        let _nothing_to_clear = self.wake.read();
        self.events.try_recv().ok()
    }
}

impl AsRawFd for EventReceiver {
    fn as_raw_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }
}
