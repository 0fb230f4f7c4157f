//! `ramet-snapshotter`: containerd's snapshots service over a Unix socket.
//!
//! A complete overlay snapshotter: what it mounts on the host, any runtime can use. Besides, it tells our shim which directories a
//! container's filesystem is made of (`rootfs.json`), makes an EROFS image of each committed layer in the background, and knows which
//! snapshots are checkpoints. It never talks to a VM.
//!
//! ```text
//! <root>/metadata.redb   which snapshots there are; the truth. Its file lock keeps a second snapshotter out
//! <root>/snapshots/<n>/  one directory for each, see checkpoint::rootfs
//! <root>/trash/          removed directories on their way out
//! <root>/templates/      empty filesystems, made by the shim
//! ```
//!
//! [`store`] changes metadata and directories together, [`service`] is its gRPC face, [`background`] does what nobody should wait for.

pub mod background;
pub mod filter;
mod live;
mod metadata;
pub mod mounts;
#[allow(warnings, clippy::all, clippy::pedantic)]
#[allow(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/containerd.rs"));
}
pub mod service;
pub mod size;
pub mod socket;
pub mod store;
#[expect(unsafe_code, reason = "a thread lowers its own priority")]
mod sys;
mod usage;

pub use metadata::{Info, Kind, Time, Usage};
