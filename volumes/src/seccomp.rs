//! The system calls that serving files needs; any other ends the process, for with it the process could reach what the jail hides.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// To run, allocate, start threads and end. No signals: a process that aborts is killed as well as it would have killed itself.
const COMMON: [libc::c_long; 31] = [
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clone,
    libc::SYS_clone3,
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
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_umask,
    libc::SYS_write,
    libc::SYS_writev,
];

/// To speak over sockets that exist.
const STREAMS: [libc::c_long; 7] = [
    libc::SYS_dup,
    libc::SYS_fcntl,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
];

/// To work on files for any user.
const FILES: [libc::c_long; 43] = [
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_linkat,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lseek,
    libc::SYS_lsetxattr,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readlinkat,
    libc::SYS_removexattr,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setxattr,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
];

/// Forbids all others to this thread and those that it will start.
///
/// # Errors
/// The kernel has no such filters.
pub(crate) fn install() -> Result<(), seccompiler::Error> {
    let allowed = COMMON.iter().chain(&STREAMS).chain(&FILES);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = allowed.map(|&number| (number, Vec::new())).collect();
    // To make a stream blocking, and to name a thread.
    for (call, argument, value) in [
        (libc::SYS_ioctl, 1, libc::FIONBIO),
        (libc::SYS_prctl, 0, u64::from(libc::PR_SET_NAME.cast_unsigned())),
    ] {
        let only = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
        let only = SeccompRule::new(vec![only.map_err(seccompiler::Error::Backend)?]);
        rules.insert(call, vec![only.map_err(seccompiler::Error::Backend)?]);
    }
    let arch = std::env::consts::ARCH.try_into().map_err(seccompiler::Error::Backend)?;
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)
        .map_err(seccompiler::Error::Backend)?;
    let program: BpfProgram = filter.try_into().map_err(seccompiler::Error::Backend)?;
    seccompiler::apply_filter(&program)
}
