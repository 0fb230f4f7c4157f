//! Whole transfers between files and guest memory.

use std::fs::File;
use std::io;

use super::super::queue::Segments;
use super::super::sys;

/// Fills `into` from `file` at `offset`.
pub(super) fn read_full(file: &File, offset: u64, into: Segments<'_>) -> io::Result<()> {
    transfer(
        offset,
        into,
        |slices, offset| sys::preadv(file, slices, offset),
        io::ErrorKind::UnexpectedEof,
    )
}

/// Writes all of `from` to `file` at `offset`.
pub(super) fn write_full(file: &File, offset: u64, from: Segments<'_>) -> io::Result<()> {
    transfer(
        offset,
        from,
        |slices, offset| sys::pwritev(file, slices, offset),
        io::ErrorKind::WriteZero,
    )
}

fn transfer(
    offset: u64,
    mut segments: Segments<'_>,
    call: impl Fn(&[sys::Slice<'_>], u64) -> io::Result<usize>,
    at_end: io::ErrorKind,
) -> io::Result<()> {
    let mut offset = offset;
    while segments.len() > 0 {
        match call(segments.slices(), offset) {
            Ok(0) => return Err(io::Error::from(at_end)),
            Ok(count) => {
                segments.take(count as u64);
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
