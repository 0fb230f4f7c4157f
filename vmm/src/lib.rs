//! One KVM microVM per process. Knows KVM, memory and virtio; has never heard of containerd, pods or ttrpc.
//!
//! | module | what it does |
//! |---|---|
//! | [`control`], [`service`] | the protocol with the shim, and the loop that serves it |
//! | [`vm`], [`vcpu`], [`platform`], [`memory`] | one machine: its vCPUs, ports, devices and memory |
//! | [`boot`], [`kernel`], [`acpi`], [`layout`] | a Linux kernel's view of it at the start |
//! | [`state`], [`save`] | the saved machine |
//! | [`devices`] | virtio |
//! | [`jail`], [`seccomp`] | what this process may still do |

pub mod acpi;
pub mod boot;
mod channel;
pub mod control;
pub mod devices;
pub mod jail;
pub mod kernel;
pub mod layout;
pub mod memory;
pub mod platform;
pub mod save;
pub mod seccomp;
pub mod service;
pub mod state;
#[expect(unsafe_code, reason = "system calls that no library wraps")]
mod sys;
mod touched;
pub mod vcpu;
pub mod vm;
