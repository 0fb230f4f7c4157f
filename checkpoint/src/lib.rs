//! The checkpoint format, and the files that snapshotter, shim, VMM and CLI share: plain data, no KVM, no network.
//!
//! | module | what it describes |
//! |---|---|
//! | [`manifest`] | `manifest.json`: what a checkpoint is, what it needs, what it holds |
//! | [`directory`] | a checkpoint directory and those of its bases: the files to hand to the VMM, checked |
//! | [`memory`] | `memory` and `memory.index`: guest pages and where each comes from |
//! | [`disk`] | overlay layers of writable disks: data file and bitmap |
//! | [`rootfs`] | `rootfs.json` in a snapshot directory: what the snapshotter tells the shim |
//! | [`layers`] | EROFS images of image layers, made once under a lock by whoever needs them first |
//! | [`compat`] | may this host restore it? |
//! | [`pack`] | a checkpoint directory as the tar layer of a checkpoint image, and back |

pub mod compat;
pub mod directory;
pub mod disk;
pub mod layers;
pub mod manifest;
pub mod memory;
pub mod pack;
pub mod rootfs;
mod validate;

#[cfg(test)]
mod test_data;
