//! System call filters: one for the main thread, the I/O thread and the child that writes memory, a narrower one for vCPU threads.
//!
//! Nothing here can open a file, make a socket to anywhere, run a program or trace a process: every resource came in as a descriptor.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

/// A filter cannot be made or installed.
#[derive(Debug, thiserror::Error)]
#[error("install system call filter")]
pub struct SeccompError(#[from] seccompiler::Error);

/// What every thread needs to run, allocate and end.
const COMMON: [i64; 25] = [
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// What the main thread, the I/O thread and the dumper do beyond that.
const SERVICE: [i64; 45] = [
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getppid,
    libc::SYS_gettimeofday,
    libc::SYS_kill,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_pidfd_open,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_prlimit64,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sched_getaffinity,
    libc::SYS_seccomp,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    libc::SYS_statx,
    libc::SYS_tgkill,
    libc::SYS_tkill,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_writev,
];

/// ioctls of the main thread, by type and number (the low 16 bits of the request): what makes, saves and restores a VM, two settings of
/// a tap, and the scan of a pagemap.
const SERVICE_IOCTLS: [u64; 42] = [
    0xae01, // KVM_CREATE_VM
    0xae03, // KVM_CHECK_EXTENSION
    0xae04, // KVM_GET_VCPU_MMAP_SIZE
    0xae41, // KVM_CREATE_VCPU
    0xae46, // KVM_SET_USER_MEMORY_REGION
    0xae47, // KVM_SET_TSS_ADDR
    0xae48, // KVM_SET_IDENTITY_MAP_ADDR
    0xae60, // KVM_CREATE_IRQCHIP
    0xae61, // KVM_IRQ_LINE
    0xae62, // KVM_GET_IRQCHIP
    0xae63, // KVM_SET_IRQCHIP
    0xae76, // KVM_IRQFD
    0xae79, // KVM_IOEVENTFD
    0xae7b, // KVM_SET_CLOCK
    0xae7c, // KVM_GET_CLOCK
    0xae80, // KVM_RUN
    0xae81, // KVM_GET_REGS
    0xae82, // KVM_SET_REGS
    0xae83, // KVM_GET_SREGS
    0xae84, // KVM_SET_SREGS
    0xae88, // KVM_GET_MSRS
    0xae89, // KVM_SET_MSRS
    0xae8d, // KVM_SET_FPU
    0xae8e, // KVM_GET_LAPIC
    0xae8f, // KVM_SET_LAPIC
    0xae90, // KVM_SET_CPUID2
    0xae98, // KVM_GET_MP_STATE
    0xae99, // KVM_SET_MP_STATE
    0xae9f, // KVM_GET_VCPU_EVENTS
    0xaea0, // KVM_SET_VCPU_EVENTS
    0xaea1, // KVM_GET_DEBUGREGS
    0xaea2, // KVM_SET_DEBUGREGS, KVM_SET_TSC_KHZ
    0xaea3, // KVM_GET_TSC_KHZ
    0xaea4, // KVM_GET_XSAVE
    0xaea5, // KVM_SET_XSAVE
    0xaea6, // KVM_GET_XCRS
    0xaea7, // KVM_SET_XCRS
    0xaead, // KVM_KVMCLOCK_CTRL
    0xaed5, // KVM_PRE_FAULT_MEMORY
    0x54d0, // TUNSETOFFLOAD
    0x54d8, // TUNSETVNETHDRSZ
    0x6610, // PAGEMAP_SCAN
];
/// ioctls of vCPU threads: running the guest and saving the vCPU.
const VCPU_IOCTLS: [u64; 12] = [
    0xae80, // KVM_RUN
    0xae81, // KVM_GET_REGS
    0xae83, // KVM_GET_SREGS
    0xae88, // KVM_GET_MSRS
    0xae8e, // KVM_GET_LAPIC
    0xae98, // KVM_GET_MP_STATE
    0xae9f, // KVM_GET_VCPU_EVENTS
    0xaea1, // KVM_GET_DEBUGREGS
    0xaea3, // KVM_GET_TSC_KHZ
    0xaea4, // KVM_GET_XSAVE
    0xaea6, // KVM_GET_XCRS
    0xaead, // KVM_KVMCLOCK_CTRL
];

/// What may be said of memory: that it is given back, wanted at once, or, by the C library, how a stack is kept.
const ADVICE: [libc::c_int; 6] = [
    libc::MADV_DONTNEED,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_POPULATE_WRITE,
    102, // MADV_GUARD_INSTALL
    103, // MADV_GUARD_REMOVE
];

/// What a vCPU thread does beyond the common part: device registers are served on it.
const VCPU: [i64; 3] = [libc::SYS_writev, libc::SYS_tgkill, libc::SYS_prctl];

/// A compiled filter.
#[derive(Debug)]
pub struct Filter(BpfProgram);

impl Filter {
    /// For the main thread and what it starts.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn service() -> Result<Self, SeccompError> {
        Self::compile(&[&COMMON, &SERVICE], &SERVICE_IOCTLS, SeccompAction::KillProcess)
    }

    /// For vCPU threads.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn vcpu() -> Result<Self, SeccompError> {
        Self::compile(&[&COMMON, &VCPU], &VCPU_IOCTLS, SeccompAction::KillProcess)
    }

    fn compile(calls: &[&[i64]], ioctls: &[u64], forbidden: SeccompAction) -> Result<Self, SeccompError> {
        let backend = |error: seccompiler::BackendError| SeccompError(seccompiler::Error::Backend(error));
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls
            .iter()
            .flat_map(|calls| calls.iter())
            .map(|call| (*call, Vec::new()))
            .collect();
        let mut requests = Vec::new();
        for ioctl in ioctls {
            // The other half of a request is the size of its argument.
            let number = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(0xffff), *ioctl);
            requests.push(SeccompRule::new(vec![number.map_err(backend)?]).map_err(backend)?);
        }
        rules.insert(libc::SYS_ioctl, requests);
        let mut advices = Vec::new();
        for advice in ADVICE {
            let advice = u64::from(advice.cast_unsigned());
            let same = SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, advice);
            advices.push(SeccompRule::new(vec![same.map_err(backend)?]).map_err(backend)?);
        }
        rules.insert(libc::SYS_madvise, advices);
        let filter = SeccompFilter::new(rules, forbidden, SeccompAction::Allow, TargetArch::x86_64);
        Ok(Self(filter.and_then(TryInto::try_into).map_err(backend)?))
    }

    /// Installs it on this thread; threads and processes it starts inherit it. Cannot be undone. A forbidden system call kills the
    /// process.
    ///
    /// # Errors
    /// When the kernel refuses, for instance because privileges can still be gained.
    pub fn install(&self) -> Result<(), SeccompError> {
        Ok(apply_filter(&self.0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mapping;

    #[test]
    fn vcpu_threads_may_nothing_that_their_starter_may_not() {
        assert!(VCPU.iter().all(|call| COMMON.contains(call) || SERVICE.contains(call)));
        assert!(VCPU_IOCTLS.iter().all(|ioctl| SERVICE_IOCTLS.contains(ioctl)));
    }

    /// TCGETS has the type of the tap ioctls, and another number.
    #[test]
    fn ioctls_are_told_apart_by_number() {
        let refused = std::thread::spawn(|| {
            let file = tempfile::tempfile().unwrap();
            let errno = SeccompAction::Errno(libc::EPERM.cast_unsigned());
            let filter = Filter::compile(&[&COMMON, &SERVICE], &SERVICE_IOCTLS, errno).unwrap();
            filter.install().unwrap();
            nix::sys::termios::tcgetattr(&file).err()
        });
        assert_eq!(refused.join().unwrap(), Some(nix::errno::Errno::EPERM));
    }

    #[test]
    fn memory_may_be_huge_given_back_and_brought_in() {
        let region = vm_memory::MmapRegion::<()>::new(8192).unwrap();
        let results = std::thread::spawn(move || {
            let errno = SeccompAction::Errno(libc::EPERM.cast_unsigned());
            let filter = Filter::compile(&[&COMMON, &SERVICE], &SERVICE_IOCTLS, errno).unwrap();
            filter.install().unwrap();
            // A kernel without huge pages says so, which is not EPERM.
            let huge = mapping::prefer_huge_pages(&region, 0, 4096)
                .err()
                .and_then(|error| error.raw_os_error());
            assert_ne!(huge, Some(libc::EPERM));
            [mapping::discard(&region, 0, 4096), mapping::populate(&region, 0, 4096)].map(|result| result.is_ok())
        });
        assert_eq!(results.join().unwrap(), [true, true]);
    }

    #[test]
    fn filters_compile() {
        assert!(Filter::service().is_ok_and(|filter| !filter.0.is_empty()));
        assert!(Filter::vcpu().is_ok_and(|filter| !filter.0.is_empty()));
    }
}
