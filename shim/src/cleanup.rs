//! `delete`: removes what a sandbox left behind, however it ended. Idempotent; containerd runs it after every task, too.

use std::path::Path;
use std::time::{Duration, SystemTime};

use protocol::containerd::api::DeleteResponse;

use crate::args::Args;
use crate::bootstrap::group_of;
use crate::events::timestamp;
use crate::hooks;
use crate::launch::HOOKS_MARK;
use crate::lifecycle::LOST;
use crate::net;
use crate::rootfs;
use crate::state_dir::{StateDir, socket_path};

/// How long a shim that is about to end gets to do so by itself.
const GRACE: Duration = Duration::from_millis(1500);

/// Cleans up; never fails, for containerd would only call again.
#[must_use]
pub fn delete(args: &Args, bundle: &Path) -> DeleteResponse {
    let group = group_of(bundle).unwrap_or_else(|| args.id.clone());
    let mut pid = 0;
    // A container in somebody else's sandbox has nothing of its own here but its mounts.
    if group == args.id {
        let state = StateDir::new(&args.namespace, &args.id);
        let shim = state.live_process("shim.pid");
        let vmm = state.live_process("vmm.pid");
        pid = vmm.map_or(0, |mark| mark.pid);
        if let Some(shim) = shim
            && !shim.wait_gone(GRACE)
        {
            shim.kill();
        }
        if let Some(vmm) = vmm {
            vmm.kill();
        }
        rootfs::unmount_leftovers(bundle);
        net::release(bundle);
        let due = hooks::due(&state.join(HOOKS_MARK));
        state.remove();
        let _ = std::fs::remove_file(socket_path(&args.address, &args.namespace, &group));
        // Last, because hooks may take longer than containerd gives this program.
        if let Some(due) = due {
            due.run(bundle);
        }
    } else {
        rootfs::unmount_leftovers(bundle);
    }
    let mut response = DeleteResponse::new();
    response.pid = pid;
    response.exit_status = LOST;
    response.exited_at = Some(timestamp(SystemTime::now())).into();
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deleting_nothing_is_fine_twice() {
        let dir = tempfile::tempdir().unwrap();
        let args = Args {
            id: "nobody".into(),
            namespace: "none".into(),
            address: "/x".into(),
            ..Args::default()
        };
        for _ in 0..2 {
            assert_eq!(delete(&args, dir.path()).exit_status, LOST);
        }
    }
}
