//! The agent: PID 1 of the guest.
//!
//! It runs containers through libcontainer and serves containerd's Task API and our Guest service to the shim over vsock.
//! One thread; everything that a container could block is waited for, never done. See `docs/protocol.md`.

pub mod agent;
pub mod cgroup;
pub mod connections;
pub mod container;
pub mod container_command;
pub mod error;
pub mod executor;
pub mod fd;
pub mod files;
pub mod guest_service;
pub mod in_root;
pub mod init;
pub mod network;
pub mod process;
pub mod processes;
pub mod reaper;
pub mod renew;
pub mod rootfs;
pub mod runtime;
pub mod server;
pub mod state;
pub mod stats;
pub mod stdio;
pub mod strays;
pub mod streams;
#[expect(unsafe_code, reason = "system calls without a safe wrapper")]
pub mod sys;
pub mod sysctl;
pub mod task_service;
pub mod volume_mounts;
pub mod volumes;
