//! `containerd-shim-ramet-v2`: one process for each sandbox, between containerd's Task API and a microVM.
//!
//! | module | what it does |
//! |---|---|
//! | [`args`], [`bootstrap`], [`daemon`], [`cleanup`] | the program: `start`, `delete`, `-info`, and the daemon that `start` leaves behind |
//! | [`task_service`] | unpacks a ttrpc call, asks the sandbox, packs the answer |
//! | [`sandbox`], [`task`], [`lifecycle`] | what a sandbox and its containers do; who may do what when (pure) |
//! | [`launch`], [`boot`], [`restore`], [`checkpoint`], [`rootfs`], [`disks`], [`spec`] | a machine for a container: cold, from a checkpoint, into a checkpoint |
//! | [`vm`], [`vmm_process`], [`guest`], [`streams`], [`stdio`] | the VMM, the agent, and the bytes between containerd's FIFOs and the guest |
//! | [`net`], [`hooks`] | the sandbox's network namespace, and its way into the machine; OCI hooks on this host |
//! | [`volumes`] | host files and directories for the container; their server is this program again |
//! | [`files`] | the container's files for this host |
//! | [`events`] | ordered publisher of task events |
//! | [`state_dir`], [`logging`], [`error`] | what is on disk while a sandbox lives; the log; every error and its gRPC code |

pub mod args;
pub mod boot;
pub mod bootstrap;
pub mod checkpoint;
pub mod cleanup;
pub mod daemon;
pub mod disks;
pub mod error;
pub mod events;
#[cfg(test)]
mod fake;
pub mod files;
pub mod guest;
pub mod hooks;
pub mod launch;
pub mod lifecycle;
pub mod limits;
pub mod logger;
pub mod logging;
pub mod net;
pub mod restore;
pub mod rootfs;
pub mod sandbox;
#[cfg(test)]
mod sandbox_tests;
pub mod spec;
pub mod state_dir;
pub mod stdio;
pub mod streams;
#[expect(
    unsafe_code,
    reason = "descriptors received from or handed to another process have no safe constructor"
)]
mod sys;
pub mod task;
pub mod task_service;
pub mod vm;
pub mod vmm_process;
pub mod volumes;
