//! Saved state of a block device: what the guest was promised. The contents are the disk layers of the checkpoint.

use serde::{Deserialize, Serialize};

/// What a restored device must agree with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct BlockState {
    /// The disk is found by this.
    pub(in super::super) id: String,
    /// Size in bytes.
    pub(in super::super) size_bytes: u64,
    /// How the guest sees it.
    pub(in super::super) read_only: bool,
}
