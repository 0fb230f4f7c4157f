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
const COMMON: [i64; 26] = [
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
    libc::SYS_madvise,
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

/// ioctl groups (second byte of the request): KVM, tap, pagemap, and `FIONBIO` and the like.
const SERVICE_IOCTLS: [u64; 4] = [0xae, b'T' as u64, b'f' as u64, 0x54];
const VCPU_IOCTLS: [u64; 2] = [0xae, b'T' as u64];

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
        Self::compile(&[&COMMON, &SERVICE], &SERVICE_IOCTLS)
    }

    /// For vCPU threads.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn vcpu() -> Result<Self, SeccompError> {
        Self::compile(&[&COMMON, &VCPU], &VCPU_IOCTLS)
    }

    fn compile(calls: &[&[i64]], ioctls: &[u64]) -> Result<Self, SeccompError> {
        let backend = |error: seccompiler::BackendError| SeccompError(seccompiler::Error::Backend(error));
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls
            .iter()
            .flat_map(|calls| calls.iter())
            .map(|call| (*call, Vec::new()))
            .collect();
        let mut requests = Vec::new();
        for group in ioctls {
            let in_group =
                SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(0xff00), group << 8);
            requests.push(SeccompRule::new(vec![in_group.map_err(backend)?]).map_err(backend)?);
        }
        rules.insert(libc::SYS_ioctl, requests);
        let filter = SeccompFilter::new(
            rules,
            SeccompAction::KillProcess,
            SeccompAction::Allow,
            TargetArch::x86_64,
        );
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

    #[test]
    fn vcpu_threads_may_nothing_that_their_starter_may_not() {
        assert!(VCPU.iter().all(|call| COMMON.contains(call) || SERVICE.contains(call)));
        assert!(VCPU_IOCTLS.iter().all(|group| SERVICE_IOCTLS.contains(group)));
    }

    #[test]
    fn filters_compile() {
        assert!(Filter::service().is_ok_and(|filter| !filter.0.is_empty()));
        assert!(Filter::vcpu().is_ok_and(|filter| !filter.0.is_empty()));
    }
}
