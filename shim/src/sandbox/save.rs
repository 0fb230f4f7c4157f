//! A checkpoint of the sandbox.

use std::path::{Path, PathBuf};

use protocol::containerd::api::Mount;
use protocol::containerd::events::task::TaskCheckpointed;
use protocol::containerd::topics;
use tracing::warn;

use super::Sandbox;
use crate::checkpoint::{self, Pointer};
use crate::error::{Error, Result};
use crate::rootfs;

impl Sandbox {
    /// Saves the sandbox. With `image_path`, into that directory; else beside the container's snapshot, and `path` gets a pointer to it.
    ///
    /// # Errors
    /// The container runs on if its machine lives.
    pub async fn checkpoint(&self, id: &str, path: &Path, image_path: Option<&Path>, exit: bool) -> Result<()> {
        let live = self.live(id)?;
        let _alone = live.container.operation.lock().await;
        live.container.life(|life| life.may_checkpoint())?;
        let vm = self.vm()?;
        let mut machine = live.machine.lock().await;
        let store;
        let directory = match image_path {
            Some(directory) => directory,
            None => {
                let name =
                    ::checkpoint::manifest::CheckpointId::random().map_err(Error::file("read", "/dev/urandom"))?;
                store = live.store.join(name.as_str());
                store.as_path()
            }
        };
        let bases = machine.base_directories.clone();
        let manifest = checkpoint::save(
            vm.as_ref(),
            &live.guest,
            &live.volumes,
            &mut machine,
            live.container.info.clone(),
            directory,
        )
        .await?;
        drop(machine);
        if image_path.is_none() {
            let pointer = Pointer {
                version: 1,
                id: manifest.id.clone(),
                directory: directory.to_owned(),
                bases,
            };
            checkpoint::write_pointer(path, &pointer)?;
        }
        let event = TaskCheckpointed {
            container_id: id.to_owned(),
            checkpoint: directory.display().to_string(),
            ..Default::default()
        };
        self.publisher.publish(topics::TASK_CHECKPOINTED_EVENT_TOPIC, &event);
        if exit {
            vm.kill().await;
        } else if live.container.life(|life| life.is_paused()) {
            // Thawing for the checkpoint undid the pause, which its owner still counts on.
            let guest_id = live.container.process(&None)?.guest.container.clone();
            if let Err(error) = live.guest.set_paused(&guest_id, true).await {
                warn!(%error, "the container could not be paused again");
            }
        }
        Ok(())
    }
}

/// Where `ctr task checkpoint` puts checkpoints of a container.
pub(super) fn checkpoint_store(mounts: &[Mount], bundle: &Path) -> PathBuf {
    match rootfs::classify(mounts) {
        Ok(rootfs::Rootfs::Ours { snapshot, .. }) => snapshot.join("task-checkpoints"),
        _ => rootfs::work_dir(bundle).join("task-checkpoints"),
    }
}
