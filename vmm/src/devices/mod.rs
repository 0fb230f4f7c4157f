//! Devices of the VM.

pub mod virtio;
