//! The one owner of waitpid: collects every child and orphan, and tells whoever watches a process how it ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::sync::oneshot;

/// How and when a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, or 128 + signal.
    pub status: u32,
    /// When it was collected.
    pub at: SystemTime,
}

/// Collects exits. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Reaper(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    watchers: HashMap<i32, oneshot::Sender<Exit>>,
    /// Exits that nobody watched yet; kept only while a [`Window`] is open, so that a reused pid finds no old exit.
    unclaimed: HashMap<i32, Exit>,
    windows: usize,
}

/// While this lives, exits of processes whose pid is not known yet are kept for [`Window::watch`].
#[derive(Debug)]
pub struct Window(Reaper);

impl Reaper {
    /// Opens a window; do so before a process is made.
    pub fn window(&self) -> Window {
        self.inner().windows += 1;
        Window(self.clone())
    }

    /// Collects everything that has ended. To be called on SIGCHLD.
    pub fn reap(&self) {
        loop {
            match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => self.record(pid, u32::try_from(code).unwrap_or(255)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    self.record(pid, 128 + u32::try_from(signal as i32).unwrap_or(0));
                }
                Ok(WaitStatus::StillAlive) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn record(&self, pid: Pid, status: u32) {
        let exit = Exit {
            status,
            at: SystemTime::now(),
        };
        let mut inner = self.inner();
        if let Some(watcher) = inner.watchers.remove(&pid.as_raw()) {
            // Whoever asked may have lost interest.
            let _ = watcher.send(exit);
        } else if inner.windows > 0 {
            inner.unclaimed.insert(pid.as_raw(), exit);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Window {
    /// The exit of a process that was made while this window was open.
    pub fn watch(&self, pid: i32) -> oneshot::Receiver<Exit> {
        let (sender, receiver) = oneshot::channel();
        let mut inner = self.0.inner();
        if let Some(exit) = inner.unclaimed.remove(&pid) {
            let _ = sender.send(exit);
        } else {
            inner.watchers.insert(pid, sender);
        }
        receiver
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let mut inner = self.0.inner();
        inner.windows -= 1;
        if inner.windows == 0 {
            inner.unclaimed.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_before_the_watch_is_kept_while_a_window_is_open() {
        let reaper = Reaper::default();
        let window = reaper.window();
        reaper.record(Pid::from_raw(7), 3);
        let exit = window.watch(7).try_recv().expect("the exit is there");
        assert_eq!(exit.status, 3);
    }

    #[test]
    fn an_exit_after_the_watch_arrives() {
        let reaper = Reaper::default();
        let mut receiver = reaper.window().watch(8);
        assert!(receiver.try_recv().is_err());
        reaper.record(Pid::from_raw(8), 137);
        assert_eq!(receiver.try_recv().expect("the exit is there").status, 137);
    }

    #[test]
    fn strangers_are_forgotten_when_the_last_window_closes() {
        let reaper = Reaper::default();
        let first = reaper.window();
        let second = reaper.window();
        reaper.record(Pid::from_raw(9), 0);
        drop(first);
        assert_eq!(reaper.inner().unclaimed.len(), 1);
        drop(second);
        assert!(reaper.inner().unclaimed.is_empty());
        reaper.record(Pid::from_raw(9), 0);
        assert!(reaper.window().watch(9).try_recv().is_err());
    }
}
