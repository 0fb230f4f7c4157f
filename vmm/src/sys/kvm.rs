//! KVM calls whose safety depends on how guest memory is kept.

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{VcpuFd, VmFd};

/// `struct kvm_pre_fault_memory`.
#[repr(C)]
#[derive(Default)]
struct PreFault {
    address: u64,
    bytes: u64,
    flags: u64,
    padding: [u64; 5],
}

nix::ioctl_readwrite!(pre_fault_memory, 0xae, 0xd5, PreFault);

/// Maps a range of guest memory in the tables that the processor translates the guest's addresses with (Linux 6.11).
pub(crate) fn pre_fault(vcpu: &VcpuFd, address: u64, bytes: u64) -> nix::Result<()> {
    let mut range = PreFault {
        address,
        bytes,
        ..PreFault::default()
    };
    // SAFETY: the kernel reads and writes one struct of this layout.
    unsafe { pre_fault_memory(vcpu.as_raw_fd(), &raw mut range) }.map(drop)
}

/// How a guest may use a range of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Memory.
    Write,
    /// It reads what the host wrote; what it writes is an MMIO exit.
    Read,
}

/// Gives the guest a range of memory. The mapping must live as long as the vCPUs of the VM: the caller keeps both in one struct and never unmaps.
pub(crate) fn set_memory_region(
    vm: &VmFd,
    slot: u32,
    guest: u64,
    bytes: u64,
    host: u64,
    access: Access,
) -> Result<(), kvm_ioctls::Error> {
    let region = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: guest,
        memory_size: bytes,
        userspace_addr: host,
        flags: match access {
            Access::Write => 0,
            Access::Read => KVM_MEM_READONLY,
        },
    };
    // SAFETY: the range is a mapping that holds nothing but what the guest may see, and write unless it is read-only, and that outlives
    // the vCPUs, see above.
    unsafe { vm.set_user_memory_region(region) }
}

/// Random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: writes at most N bytes to an array of N bytes.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if usize::try_from(count) == Ok(N) {
        Ok(bytes)
    } else {
        Err(std::io::Error::last_os_error())
    }
}
