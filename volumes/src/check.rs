//! What of a message the file operations may not see. The guest's kernel asks for none of it by itself; a hostile one may.

use fuse_backend_rs::abi::fuse_abi::Opcode;

use crate::frame::REQUEST_HEADER;

/// Flags of open files that reach the host. Not among them: `O_PATH` and `O_TMPFILE`, which change what is opened; `O_ASYNC`; and
/// `O_DIRECT`, for which our buffers are not aligned: the guest's kernel bypasses its own cache by itself.
const OPEN_FLAGS: libc::c_int = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_CREAT
    | libc::O_DIRECTORY
    | libc::O_DSYNC
    | libc::O_EXCL
    | libc::O_LARGEFILE
    | libc::O_NOATIME
    | libc::O_NOFOLLOW
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_TRUNC;
/// Largest extended attribute or list of their names, in bytes, as Linux has it.
const MAX_ATTRIBUTE: u32 = 64 * 1024;

/// Place of the flags in OPEN, OPENDIR and CREATE.
const FLAGS: usize = REQUEST_HEADER;
/// Place of the file's flags in READ and WRITE.
const FILE_FLAGS: usize = REQUEST_HEADER + 32;
/// Place of the size in GETXATTR and LISTXATTR.
const ATTRIBUTE_SIZE: usize = REQUEST_HEADER;

/// Takes out of a message what must not be in it, or says with which error number it is refused.
pub(crate) fn check(opcode: Opcode, message: &mut [u8], read_only: bool) -> Result<(), i32> {
    if matches!(opcode, Opcode::Lookup) && is_dots(message) {
        return Err(libc::EINVAL);
    }
    // The mounts refuse it as well, but for those that appear later: they come as the host made them.
    if read_only && changes_something(opcode, message) {
        return Err(libc::EROFS);
    }
    match opcode {
        Opcode::Open | Opcode::Opendir | Opcode::Create => keep_flags(message, FLAGS),
        Opcode::Read | Opcode::Write => keep_flags(message, FILE_FLAGS),
        Opcode::Getxattr | Opcode::Listxattr => {
            let size = number(message, ATTRIBUTE_SIZE).map(|size| size.min(MAX_ATTRIBUTE));
            set(message, ATTRIBUTE_SIZE, size);
        }
        _ => {}
    }
    Ok(())
}

fn changes_something(opcode: Opcode, message: &[u8]) -> bool {
    match opcode {
        Opcode::Open => number(message, FLAGS).is_some_and(|flags| {
            let flags = flags.cast_signed();
            flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0
        }),
        Opcode::Create
        | Opcode::Fallocate
        | Opcode::Link
        | Opcode::Mkdir
        | Opcode::Mknod
        | Opcode::Removexattr
        | Opcode::Rename
        | Opcode::Rename2
        | Opcode::Rmdir
        | Opcode::Setattr
        | Opcode::Setxattr
        | Opcode::Symlink
        | Opcode::Unlink
        | Opcode::Write => true,
        _ => false,
    }
}

/// Whether a LOOKUP asks for a directory's own name or its parent. No kernel of ours does, for files are not exported.
fn is_dots(message: &[u8]) -> bool {
    let name = message.get(REQUEST_HEADER..).unwrap_or_default();
    let name = name.split(|&b| b == 0).next().unwrap_or_default();
    name == b"." || name == b".."
}

fn keep_flags(message: &mut [u8], at: usize) {
    let kept = number(message, at).map(|flags| flags & OPEN_FLAGS.cast_unsigned());
    set(message, at, kept);
}

fn number(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?))
}

fn set(message: &mut [u8], at: usize, value: Option<u32>) {
    if let (Some(place), Some(value)) = (message.get_mut(at..at + 4), value) {
        place.copy_from_slice(&value.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(fields: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; REQUEST_HEADER];
        bytes.extend(fields.iter().flat_map(|field| field.to_ne_bytes()));
        bytes
    }

    #[test]
    fn only_known_flags_are_passed_on() {
        let flags = (libc::O_RDWR | libc::O_PATH | libc::O_TMPFILE | libc::O_DIRECT | libc::O_APPEND).cast_unsigned();
        let kept = (libc::O_RDWR | libc::O_DIRECTORY | libc::O_APPEND).cast_unsigned();
        for opcode in [Opcode::Open, Opcode::Opendir, Opcode::Create] {
            let mut message = message(&[flags, 0]);
            assert_eq!(check(opcode, &mut message, false), Ok(()));
            assert_eq!(number(&message, FLAGS), Some(kept));
        }
        for opcode in [Opcode::Read, Opcode::Write] {
            let mut message = message(&[0, 0, 0, 0, 0, 0, 0, 0, flags, 0]);
            assert_eq!(check(opcode, &mut message, false), Ok(()));
            assert_eq!(number(&message, FILE_FLAGS), Some(kept));
        }
    }

    #[test]
    fn no_attribute_is_larger_than_linux_has_them() {
        for opcode in [Opcode::Getxattr, Opcode::Listxattr] {
            for (asked, given) in [(0, 0), (9, 9), (u32::MAX, MAX_ATTRIBUTE)] {
                let mut message = message(&[asked, 0]);
                assert_eq!(check(opcode, &mut message, false), Ok(()));
                assert_eq!(number(&message, ATTRIBUTE_SIZE), Some(given));
            }
        }
    }

    #[test]
    fn what_is_read_only_is_not_opened_for_writing() {
        for (flags, refused) in [
            (libc::O_RDONLY, false),
            (libc::O_WRONLY, true),
            (libc::O_RDWR, true),
            (libc::O_RDONLY | libc::O_TRUNC, true),
        ] {
            let mut message = message(&[flags.cast_unsigned(), 0]);
            assert_eq!(check(Opcode::Open, &mut message, true).is_err(), refused, "{flags:o}");
            assert_eq!(check(Opcode::Open, &mut message, false), Ok(()));
        }
        assert_eq!(check(Opcode::Setattr, &mut message(&[]), true), Err(libc::EROFS));
    }

    proptest! {
        #[test]
        fn no_message_can_hurt(opcode in 1u32..60, bytes in prop::collection::vec(any::<u8>(), 0..120), read_only in any::<bool>()) {
            let mut changed = bytes.clone();
            let _ = check(Opcode::from(opcode), &mut changed, read_only);
            prop_assert_eq!(changed.len(), bytes.len());
        }
    }
}
