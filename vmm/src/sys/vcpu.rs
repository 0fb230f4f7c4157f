//! Stopping a vCPU that runs in another thread, and the one vCPU ioctl that is unsafe to call.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{kvm_run, kvm_xsave};
use kvm_ioctls::VcpuFd;

/// A second mapping of a vCPU's `kvm_run` page, to set `immediate_exit` from another thread. With it set, `KVM_RUN` completes the
/// pending port or MMIO access and returns `EINTR` without entering the guest; a signal makes a running one come back to it. So no
/// wake-up can be lost between a check and the entry.
#[derive(Debug)]
pub(crate) struct ImmediateExit {
    page: *mut libc::c_void,
}

const PAGE: usize = 4096;

// SAFETY: the page is only accessed through an atomic byte.
unsafe impl Send for ImmediateExit {}
// SAFETY: as above.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    /// Maps the page of this vCPU.
    pub(crate) fn new(vcpu: &VcpuFd) -> io::Result<Self> {
        // SAFETY: a new shared mapping of one page at an address the kernel chooses.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { page })
        }
    }

    /// Sets or clears the flag.
    pub(crate) fn set(&self, value: bool) {
        let flag = self
            .page
            .cast::<u8>()
            .wrapping_add(std::mem::offset_of!(kvm_run, immediate_exit));
        // SAFETY: the byte lies in the mapped page, which lives as long as `self`; KVM and we access it as a byte.
        let flag = unsafe { AtomicU8::from_ptr(flag) };
        flag.store(u8::from(value), Ordering::SeqCst);
    }
}

impl Drop for ImmediateExit {
    fn drop(&mut self) {
        // SAFETY: unmaps what `new` mapped; nothing refers to it any more.
        unsafe { libc::munmap(self.page, PAGE) };
    }
}

/// Sets the vCPU's extended state. The caller has checked that KVM's state for this VM fits in the 4096 bytes of `kvm_xsave`.
pub(crate) fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: KVM_SET_XSAVE reads as many bytes as this VM's extended state has, and these are at most the size of the struct, because
    // no dynamically enabled feature (AMX) was requested.
    unsafe { vcpu.set_xsave(xsave) }
}
