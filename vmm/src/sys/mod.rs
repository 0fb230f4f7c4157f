//! The only unsafe code of the VMM: system calls that no library wraps safely.

pub(crate) mod capability;
pub(crate) mod dumper;
pub(crate) mod fd;
pub(crate) mod kvm;
pub(crate) mod mapping;
pub(crate) mod pagemap;
pub(crate) mod vcpu;
