//! The thread that serves the queues, and the gate at which it stops.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::epoll::EpollEvent;
use vmm_sys_util::eventfd::EventFd;

use super::model::Poller;
use super::set::Shared;

/// Epoll data of the event that makes the thread look up.
pub(super) const WAKE: u64 = u64::MAX;
const EVENTS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Run,
    Pause,
    Stop,
}

#[derive(Debug)]
struct GateState {
    wanted: Wanted,
    /// The thread is between the gate and the next one.
    inside: bool,
    /// The thread must look at every queue when it passes.
    kick: bool,
}

/// Lets the I/O thread through or not. Closed at first.
#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    wake: Arc<EventFd>,
}

impl Gate {
    pub(super) fn new(wake: Arc<EventFd>) -> Self {
        let state = GateState {
            wanted: Wanted::Pause,
            inside: false,
            kick: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake,
        }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the thread look at what changed.
    pub(super) fn wake(&self) {
        // Fails only when the counter is at its maximum, and then the thread wakes anyway.
        let _counter_full = self.wake.write(1);
    }

    /// Lets the thread run, first over every queue.
    pub(super) fn open(&self) {
        let mut state = self.lock();
        state.wanted = Wanted::Run;
        state.kick = true;
        self.changed.notify_all();
        drop(state);
        self.wake();
    }

    /// Returns when the thread stands at the gate.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.wanted = Wanted::Pause;
        self.wake();
        while state.inside {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.lock().wanted = Wanted::Stop;
        self.changed.notify_all();
        self.wake();
    }

    /// Waits until the thread may go on: whether it must look at every queue, or `None` to end.
    fn pass(&self) -> Option<bool> {
        let mut state = self.lock();
        state.inside = false;
        self.changed.notify_all();
        while state.wanted == Wanted::Pause {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.wanted == Wanted::Stop {
            return None;
        }
        state.inside = true;
        Some(std::mem::take(&mut state.kick))
    }
}

/// The thread's work.
#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<Shared>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    pub(super) fn run(self) {
        let shared = &self.shared;
        let _leave = Leave(&shared.gate);
        let mut events = [EpollEvent::default(); EVENTS];
        while let Some(kick) = shared.gate.pass() {
            if kick {
                shared.devices.iter().for_each(|device| device.kick(&shared.mem));
            }
            let count = match shared.epoll.wait(-1, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    tracing::error!(%error, "wait for device events");
                    break;
                }
            };
            for event in events.iter().take(count) {
                self.handle(event);
            }
            // Register writes and new connections leave work behind without an event of their own.
            shared.devices.iter().for_each(|device| device.settle(&shared.mem));
        }
    }

    fn handle(&self, event: &EpollEvent) {
        if event.data() == WAKE {
            let _cleared = self.shared.gate.wake.read();
            return;
        }
        let (number, source) = Poller::decode(event.data());
        if let Some(device) = self.shared.devices.get(number) {
            device.event(&self.shared.mem, source, event.event_set());
        }
    }
}

/// The thread ends: nothing may wait for it any more. A VM whose devices died of a bug must not linger, so that is the end of the process.
struct Leave<'a>(&'a Gate);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
        self.0.lock().inside = false;
        self.0.changed.notify_all();
    }
}
