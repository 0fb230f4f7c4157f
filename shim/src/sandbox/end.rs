//! The end of processes, of the container and of its machine.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use protocol::containerd::events::task::TaskDelete;
use protocol::containerd::topics;
use tracing::{debug, info, warn};
use vmm::control::Request;

use super::{Live, Sandbox, Slot};
use crate::error::Result;
use crate::events::timestamp;
use crate::guest::while_alive;
use crate::hooks;
use crate::launch;
use crate::lifecycle::{Exit, LOST, ProcessId};
use crate::net;
use crate::rootfs;
use crate::task::Process;

/// How long output may take to be delivered after the end of a process, and after that of its machine.
const DRAIN: Duration = Duration::from_secs(10);
const DRAIN_LOST: Duration = Duration::from_secs(1);
/// How long the guest may take to unmount the container's disks.
const RELEASE: Duration = Duration::from_secs(5);

impl Sandbox {
    /// Removes the record of a process; with init's, the machine goes.
    ///
    /// # Errors
    /// It runs, or there is no such process.
    pub async fn delete(&self, id: &str, process: ProcessId) -> Result<(u32, Exit)> {
        let live = self.live(id)?;
        let record = live.container.process(&process)?;
        let _alone = if process.is_none() {
            Some(live.container.operation.lock().await)
        } else {
            None
        };
        let ended = live.container.life(|life| life.may_delete(&process))?;
        let pid = self.pid();
        // A machine that is gone has nothing more to deliver.
        let limit = if self.machine_is_gone().await {
            DRAIN_LOST
        } else {
            DRAIN
        };
        record.copies.drain(limit).await;
        if let Some(exec) = &process {
            let exit = ended.unwrap_or_else(|| Exit {
                status: 0,
                at: SystemTime::now(),
            });
            if let Err(error) = while_alive(self.vm()?.as_ref(), live.guest.delete(&record.guest)).await {
                info!(%error, exec, "the agent could not delete the exec");
            }
            live.container.remove_exec(&self.publisher, pid, exec);
            return Ok((pid, exit));
        }
        self.end_machine(&live, &record).await;
        let exit = ended.unwrap_or_else(|| self.end_unstarted(&live));
        rootfs::unmount_leftovers(&live.container.bundle);
        net::release(&live.container.bundle);
        self.run_poststop(&live.container.bundle).await;
        *self.slot() = Slot::Over;
        let event = TaskDelete {
            container_id: id.to_owned(),
            pid,
            exit_status: exit.status,
            exited_at: Some(timestamp(exit.at)).into(),
            ..Default::default()
        };
        self.publisher.publish(topics::TASK_DELETE_EVENT_TOPIC, &event);
        Ok((pid, exit))
    }

    /// The exit of an init that was never started: it ended with its machine.
    fn end_unstarted(&self, live: &Live) -> Exit {
        let exit = Exit {
            status: LOST,
            at: SystemTime::now(),
        };
        let container = &live.container;
        container.change(&self.publisher, self.pid(), |life| life.exited(&None, exit));
        // Whoever watched the machine may have been first.
        container
            .life(|life| life.may_delete(&None))
            .ok()
            .flatten()
            .unwrap_or(exit)
    }

    async fn machine_is_gone(&self) -> bool {
        let Ok(vm) = self.vm() else { return true };
        tokio::select! {
            biased;
            _ = vm.ended() => true,
            () = std::future::ready(()) => false,
        }
    }

    /// Lets the guest write its disks back, then ends the machine.
    async fn end_machine(&self, live: &Live, init: &Process) {
        let Ok(vm) = self.vm() else { return };
        self.end_files(live).await;
        let begun = Instant::now();
        // The disk of a fork is dropped with it, and a fork's guest has more in it than this container.
        let clean = async {
            if live.container.fork.is_some() {
                return Ok(());
            }
            live.guest.delete(&init.guest).await?;
            live.guest.release_container(&init.guest.container, RELEASE).await
        };
        if let Err(error) = while_alive(vm.as_ref(), clean).await {
            info!(%error, "the guest was not left in order");
        }
        debug!(elapsed = ?begun.elapsed(), "guest left");
        let begun = Instant::now();
        let _ = tokio::time::timeout(Duration::from_secs(2), vm.request(Request::Stop, Vec::new())).await;
        vm.kill().await;
        debug!(elapsed = ?begun.elapsed(), "VMM ended");
    }

    /// Whether the shim may end: nothing is left, or it must.
    pub fn shut_down(&self, now: bool) {
        let busy = matches!(&*self.slot(), Slot::Live(_) | Slot::Creating);
        if now || !busy {
            self.shutdown.notify_one();
        }
    }

    /// Ends everything at once; containerd is told that the processes were lost.
    pub async fn abandon(&self) {
        if let Ok(vm) = self.vm() {
            vm.kill().await;
            tokio::task::yield_now().await;
        }
        let live = match &*self.slot() {
            Slot::Live(live) => Some(live.clone()),
            _ => None,
        };
        if let Some(live) = live {
            live.container
                .change(&self.publisher, self.pid(), |life| life.lost(SystemTime::now()));
            rootfs::unmount_leftovers(&live.container.bundle);
        }
    }

    /// Runs the hooks that are due when nothing is left of the container.
    pub(super) async fn run_poststop(&self, bundle: &Path) {
        let (bundle, mark) = (bundle.to_owned(), self.around.hooks_mark());
        let done = launch::blocking(move || {
            hooks::finish(&bundle, &mark);
            Ok(())
        });
        if let Err(error) = done.await {
            warn!(error = error.text(), "poststop hooks");
        }
    }
}
