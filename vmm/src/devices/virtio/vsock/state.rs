//! Saved state of the vsock device. Connections are not saved: in a fork they are all gone.

use serde::{Deserialize, Serialize};

/// What a restored device must know of the saved one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct VsockState {
    /// The next local port of a connection from the host. Ports of the parent's connections must not come again: the guest may
    /// still hold their sockets.
    pub(super) next_port: u32,
    /// Reset events that the guest has been sent and has not answered.
    pub(super) unanswered_resets: u16,
}
