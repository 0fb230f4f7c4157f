//! The container's files for this host, while its machine lives.

use std::sync::PoisonError;

use protocol::containerd::api::CreateTaskRequest;
use tracing::warn;

use super::{Live, Sandbox};
use crate::files::{Server, Source};
use crate::launch::Launched;
use crate::rootfs::{self, Rootfs};

/// Its memory has more of it than its files, and an image of them alone would not fit to the checkpoint below it.
const FORK: &str = "it is a fork; `ramet checkpoint` makes an image of it";
/// Its agent does not know how.
const OLD: &str = "the guest image is older than the shim";

impl Sandbox {
    /// Begins to serve them. A container whose files cannot be had runs all the same.
    pub(super) fn serve_files(&self, request: &CreateTaskRequest, launched: &Launched) -> Option<Server> {
        let Ok(Rootfs::Ours { snapshot, description }) = rootfs::classify(&request.rootfs) else {
            return None;
        };
        let vm = self.vm().ok()?.clone();
        let refusal = if launched.fork.is_some() {
            Some(FORK)
        } else if launched.machine.agent_generation < protocol::FILES_SINCE {
            Some(OLD)
        } else {
            None
        };
        let source = Source {
            snapshot,
            disk_bytes: description.writable_bytes,
            init: launched.init.clone(),
            refusal,
        };
        Server::start(source, vm)
            .inspect_err(|error| warn!(%error, "the files of the container cannot be had from this host"))
            .ok()
    }

    /// Serves them no longer.
    pub(super) async fn end_files(&self, live: &Live) {
        let server = live.files.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = server {
            server.end().await;
        }
    }
}
