//! Writable disks: stacks of overlay layers.
//!
//! A layer is two files: `data`, sparse, with each 4 KiB block at its own offset, and `bitmap`, one bit for each block, least significant
//! bit first, 1 = this layer holds the block. A block is read from the topmost layer that holds it, and is zero if none does. The lowest layer of
//! a container's disk is an empty ext4 filesystem made once ([`ensure_ext4_template`]).

/// Bytes of a block.
pub const BLOCK_SIZE: u64 = 4096;
/// Most sealed layers in a stack; a checkpoint that would exceed it merges the layers first.
pub const MAX_LAYERS: usize = 8;
/// Largest disk in bytes.
pub const MAX_BYTES: u64 = 1 << 40;
