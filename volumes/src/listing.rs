//! What fuse-backend-rs leaves out of listings, and programs expect: `.` and `..`, and inode numbers that are those of `stat`.

use crate::frame::{REPLY_HEADER, REQUEST_HEADER};

/// Where a listing goes on after `.`. No filesystem of the host ends so near to the largest offset.
const AFTER_DOT: u64 = 0x7fff_ffff_ffff_fff0;
/// Where it goes on after `..`: with the directory's first entry.
const AFTER_DOTS: u64 = 0x7fff_ffff_ffff_fff1;
/// Length of a `fuse_dirent` with a name of up to 8 bytes.
const ENTRY: usize = 32;
/// Place of the name in it.
const NAME: usize = 24;
/// Length of the `fuse_entry_out` before it, in a listing with attributes. All zero: nothing is known of it.
const ATTRIBUTES: usize = 128;
/// What FUSE takes for an unknown inode number.
const UNKNOWN: u64 = 0xffff_ffff;
/// With less than this, in bytes, the host's kernel may refuse to list even one entry.
const ROOM: u32 = 512;
/// Place of `offset` and `size` in the request.
const OFFSET: usize = REQUEST_HEADER + 8;
const SIZE: usize = REQUEST_HEADER + 16;

/// Inode numbers up to here are the library's own with something in the bits above, unless [`INVENTED`] is among those.
const MAX_HOST_INODE: u64 = (1 << 47) - 1;
const INVENTED: u64 = 1 << 55;

/// Rewrites a READDIR or READDIRPLUS (`plus`) request that begins a listing: the library is asked for less, from the start. Returns the
/// bytes of the entries to put before what it answers.
pub(crate) fn take(message: &mut [u8], plus: bool) -> Vec<u8> {
    let size = message
        .get(SIZE..SIZE + 4)
        .and_then(|b| Some(u32::from_ne_bytes(b.try_into().ok()?)));
    let (Some(offset), Some(size)) = (word(message, OFFSET), size) else {
        return Vec::new();
    };
    let names: &[(&str, u64)] = match offset {
        0 => &[(".", AFTER_DOT), ("..", AFTER_DOTS)],
        AFTER_DOT => &[("..", AFTER_DOTS)],
        AFTER_DOTS => &[],
        _ => return Vec::new(),
    };
    let mut entries = Vec::new();
    for (name, next) in names {
        if plus {
            entries.resize(entries.len() + ATTRIBUTES, 0);
        }
        let end = entries.len() + ENTRY;
        entries.extend_from_slice(&UNKNOWN.to_ne_bytes());
        entries.extend_from_slice(&next.to_ne_bytes());
        for field in [u32::try_from(name.len()).unwrap_or(0), u32::from(libc::DT_DIR)] {
            entries.extend_from_slice(&field.to_ne_bytes());
        }
        entries.extend_from_slice(name.as_bytes());
        entries.resize(end, 0);
    }
    let left = usize::try_from(size).unwrap_or(0).checked_sub(entries.len());
    let Some(mut left) = left.and_then(|left| u32::try_from(left).ok()) else {
        return Vec::new();
    };
    if left < ROOM && !entries.is_empty() {
        left = 0;
    }
    if let Some(place) = message.get_mut(OFFSET..OFFSET + 8) {
        place.fill(0);
    }
    if let Some(place) = message.get_mut(SIZE..SIZE + 4) {
        place.copy_from_slice(&left.to_ne_bytes());
    }
    entries
}

/// Puts `entries` first in a good reply of `length` bytes; returns its new length.
pub(crate) fn put(entries: &[u8], reply: &mut [u8], length: usize) -> usize {
    let whole = length + entries.len();
    let good = reply.get(4..8).is_some_and(|error| error == [0; 4]);
    let Ok(number) = u32::try_from(whole) else {
        return length;
    };
    if !good || whole > reply.len() || length < REPLY_HEADER {
        return length;
    }
    reply.copy_within(REPLY_HEADER..length, REPLY_HEADER + entries.len());
    if let Some(place) = reply.get_mut(REPLY_HEADER..REPLY_HEADER + entries.len()) {
        place.copy_from_slice(entries);
    }
    if let Some(place) = reply.get_mut(..4) {
        place.copy_from_slice(&number.to_ne_bytes());
    }
    whole
}

/// Gives the entries of a good READDIR reply the inode numbers that `stat` shows for them.
pub(crate) fn show_inodes(reply: &mut [u8]) {
    let good = reply.get(4..8).is_some_and(|error| error == [0; 4]);
    let mut rest = if good { reply.get_mut(REPLY_HEADER..) } else { None };
    while let Some(entry) = rest {
        let (Some(inode), Some(length)) = (word(entry, 0), word(entry, 16)) else {
            return;
        };
        // The length of the name is followed by the kind of the file.
        let name = usize::try_from(length & u64::from(u32::MAX)).unwrap_or(usize::MAX);
        if inode != UNKNOWN && inode & INVENTED == 0 {
            let shown = (inode & MAX_HOST_INODE).to_ne_bytes();
            entry.iter_mut().zip(shown).for_each(|(place, byte)| *place = byte);
        }
        let next = name.saturating_add(NAME).checked_next_multiple_of(8);
        rest = next.and_then(|next| entry.get_mut(next..));
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
