//! One KVM microVM per process. Knows KVM, memory and virtio; has never heard of containerd, pods or ttrpc.

pub mod control;
pub mod devices;
