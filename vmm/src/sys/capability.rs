//! Giving up capabilities.

use std::io;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// `_LINUX_CAPABILITY_VERSION_3`: two words for each set.
const VERSION_3: u32 = 0x2008_0522;

/// Gives up what a program with file capabilities could gain, as far as we may.
pub(crate) fn drop_bounding() {
    for capability in 0..64 {
        // SAFETY: prctl with integers. EINVAL: there is no such capability; EPERM: we may not, and so have none to lose.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
}

/// Gives up every capability of this thread (and of those it will start), for good.
pub(crate) fn drop_all() -> io::Result<()> {
    let header = Header {
        version: VERSION_3,
        pid: 0,
    };
    let none = [Data::default(); 2];
    // SAFETY: the kernel reads one header and, for this version, two data structs.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
