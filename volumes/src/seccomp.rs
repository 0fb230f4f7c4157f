//! System calls that no file operation needs end the process: with them it could reach what the jail hides.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// To programs, processes, mounts, sockets, the kernel's own state.
const FORBIDDEN: [libc::c_long; 52] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kill,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_clock_settime,
    libc::SYS_settimeofday,
    libc::SYS_sethostname,
    libc::SYS_personality,
];

/// Forbids them to this thread and those that it will start.
///
/// # Errors
/// The kernel has no such filters.
pub(crate) fn install() -> Result<(), seccompiler::Error> {
    let rules: BTreeMap<i64, Vec<seccompiler::SeccompRule>> =
        FORBIDDEN.iter().map(|&number| (number, Vec::new())).collect();
    let arch = std::env::consts::ARCH.try_into().map_err(seccompiler::Error::Backend)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::KillProcess, arch)
        .map_err(seccompiler::Error::Backend)?;
    let program: BpfProgram = filter.try_into().map_err(seccompiler::Error::Backend)?;
    seccompiler::apply_filter(&program)
}
