//! A tree of files as a stream of bytes: what the agent sends on a connection for [`super::StreamKind::Files`].
//!
//! For each file a 32-bit length and that many bytes of JSON, an [`Entry`]. Behind the entry of a regular file its data in pieces: a
//! 64-bit offset, a 32-bit length, the bytes; a piece of length 0 ends them, and what no piece covers is zeros. A length of 0 in
//! place of an entry ends the stream: without it the stream was cut. Numbers are little endian.
//!
//! The first entry is the root directory, with an empty path; a directory comes before what is in it.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Longest entry, in bytes: extended attributes make it long.
pub const MAX_ENTRY: usize = 1 << 20;
/// Longest piece, in bytes.
pub const MAX_PIECE: usize = 256 << 10;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Names joined by slashes, without one at the beginning.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permissions, set-id and sticky bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Time of the last change: seconds and nanoseconds.
    pub modified: (i64, u32),
    /// Extended attributes: names and values.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Kinds of file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A regular file; its data follows.
    File {
        /// In bytes.
        size: u64,
    },
    /// Another name of a file that came before.
    HardLink {
        /// That file's path.
        to: Vec<u8>,
    },
    /// A symbolic link.
    SymbolicLink {
        /// What it says.
        to: Vec<u8>,
    },
    /// A character device. With numbers 0 and 0: the name is removed (overlayfs).
    Character {
        /// Major number.
        major: u64,
        /// Minor number.
        minor: u64,
    },
    /// A block device.
    Block {
        /// Major number.
        major: u64,
        /// Minor number.
        minor: u64,
    },
    /// A named pipe.
    Fifo,
}

/// Writes an entry.
///
/// # Errors
/// It is too long, or what the stream says.
pub fn write_entry(out: &mut impl Write, entry: &Entry) -> io::Result<()> {
    let json = serde_json::to_vec(entry)?;
    if json.len() > MAX_ENTRY {
        return Err(io::Error::other("the description of a file is too long"));
    }
    out.write_all(&length(json.len())?)?;
    out.write_all(&json)
}

/// Writes a piece of the file whose entry was written last.
///
/// # Errors
/// It is too long, or what the stream says.
pub fn write_piece(out: &mut impl Write, offset: u64, bytes: &[u8]) -> io::Result<()> {
    out.write_all(&offset.to_le_bytes())?;
    out.write_all(&length(bytes.len())?)?;
    out.write_all(bytes)
}

/// Ends the data of the file whose entry was written last.
///
/// # Errors
/// What the stream says.
pub fn write_end_of_file(out: &mut impl Write) -> io::Result<()> {
    write_piece(out, 0, &[])
}

/// Ends the stream.
///
/// # Errors
/// What the stream says.
pub fn write_end(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&length(0)?)?;
    out.flush()
}

/// Reads an entry; `None` is the end of the stream.
///
/// # Errors
/// It is too long or none, or the stream was cut.
pub fn read_entry(input: &mut impl Read) -> io::Result<Option<Entry>> {
    let length = read_length(input, MAX_ENTRY)?;
    if length == 0 {
        return Ok(None);
    }
    let mut json = vec![0; length];
    input.read_exact(&mut json)?;
    Ok(Some(serde_json::from_slice(&json)?))
}

/// Reads a piece into `piece` and returns its offset; `None` is the end of the file.
///
/// # Errors
/// It is too long, or the stream was cut.
pub fn read_piece(input: &mut impl Read, piece: &mut Vec<u8>) -> io::Result<Option<u64>> {
    let mut offset = [0; 8];
    input.read_exact(&mut offset)?;
    let length = read_length(input, MAX_PIECE)?;
    if length == 0 {
        return Ok(None);
    }
    piece.resize(length, 0);
    input.read_exact(piece)?;
    Ok(Some(u64::from_le_bytes(offset)))
}

fn length(length: usize) -> io::Result<[u8; 4]> {
    u32::try_from(length).map(u32::to_le_bytes).map_err(io::Error::other)
}

fn read_length(input: &mut impl Read, most: usize) -> io::Result<usize> {
    let mut bytes = [0; 4];
    input.read_exact(&mut bytes)?;
    let length = usize::try_from(u32::from_le_bytes(bytes)).map_err(io::Error::other)?;
    if length > most {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{length} bytes at once, at most {most} are allowed"),
        ));
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(path: Vec<u8>, size: u64) -> Entry {
        Entry {
            path,
            kind: Kind::File { size },
            mode: 0o4755,
            uid: 70_000,
            gid: 1,
            modified: (-5, 7),
            xattrs: vec![(b"user.x".to_vec(), vec![0, 255])],
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(path in prop::collection::vec(any::<u8>(), 0..50), data in prop::collection::vec(any::<u8>(), 1..50)) {
            let mut stream = Vec::new();
            let sent = entry(path, 100);
            write_entry(&mut stream, &sent).unwrap();
            write_piece(&mut stream, 30, &data).unwrap();
            write_end_of_file(&mut stream).unwrap();
            write_end(&mut stream).unwrap();
            let mut input = stream.as_slice();
            prop_assert_eq!(read_entry(&mut input).unwrap(), Some(sent));
            let mut piece = Vec::new();
            prop_assert_eq!(read_piece(&mut input, &mut piece).unwrap(), Some(30));
            prop_assert_eq!(&piece, &data);
            prop_assert_eq!(read_piece(&mut input, &mut piece).unwrap(), None);
            prop_assert_eq!(read_entry(&mut input).unwrap(), None);
            prop_assert!(read_entry(&mut input).is_err(), "a cut stream is no end");
        }

        #[test]
        fn no_bytes_can_hurt(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_entry(&mut bytes.as_slice());
            let _ = read_piece(&mut bytes.as_slice(), &mut Vec::new());
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let huge = u32::MAX.to_le_bytes();
        assert!(read_entry(&mut huge.as_slice()).is_err());
        assert!(read_piece(&mut [&[0; 8][..], &huge].concat().as_slice(), &mut Vec::new()).is_err());
        assert!(write_entry(&mut Vec::new(), &entry(vec![200; MAX_ENTRY], 0)).is_err());
    }
}
