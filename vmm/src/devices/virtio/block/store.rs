//! What is behind a block device.

use std::fs::File;
use std::io;

use checkpoint::disk::{BLOCK_SIZE, MAX_BYTES};

use super::super::Backing;
use super::super::queue::Segments;
use super::io::read_full;
use super::overlay::Overlay;

/// An opened [`Backing`].
#[derive(Debug)]
pub(super) enum Store {
    Empty { read_only: bool },
    ReadOnly(Concatenation),
    Writable(Box<Overlay>),
}

impl Store {
    pub(super) fn open(backing: Backing) -> io::Result<Self> {
        Ok(match backing {
            Backing::Empty { read_only } => Self::Empty { read_only },
            Backing::ReadOnly { files } => Self::ReadOnly(Concatenation::open(files)?),
            Backing::Writable {
                size_bytes,
                sealed,
                active,
            } => Self::Writable(Box::new(Overlay::open(size_bytes, sealed, active)?)),
        })
    }

    /// Size in bytes.
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Empty { .. } => 0,
            Self::ReadOnly(files) => files.size,
            Self::Writable(overlay) => overlay.size(),
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        match self {
            Self::Empty { read_only } => *read_only,
            Self::ReadOnly(_) => true,
            Self::Writable(_) => false,
        }
    }

    pub(super) fn read(&self, offset: u64, into: Segments<'_>) -> io::Result<()> {
        match self {
            Self::Empty { .. } => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            Self::ReadOnly(files) => files.read(offset, into),
            Self::Writable(overlay) => overlay.read(offset, into),
        }
    }

    /// The overlay to write to; an error for everything that is not writable.
    pub(super) fn writable(&mut self) -> io::Result<&mut Overlay> {
        match self {
            Self::Writable(overlay) => Ok(overlay),
            Self::Empty { .. } | Self::ReadOnly(_) => Err(io::Error::from(io::ErrorKind::ReadOnlyFilesystem)),
        }
    }
}

/// Files one after the other.
#[derive(Debug)]
pub(super) struct Concatenation {
    /// Each with the offset at which it starts.
    files: Vec<(u64, File)>,
    size: u64,
}

impl Concatenation {
    fn open(files: Vec<File>) -> io::Result<Self> {
        let mut size = 0u64;
        let mut placed = Vec::with_capacity(files.len());
        for file in files {
            let bytes = file.metadata()?.len();
            if !bytes.is_multiple_of(BLOCK_SIZE) || bytes > MAX_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("file of {bytes} bytes"),
                ));
            }
            if bytes > 0 {
                placed.push((size, file));
                size += bytes;
            }
        }
        Ok(Self { files: placed, size })
    }

    fn read(&self, offset: u64, mut into: Segments<'_>) -> io::Result<()> {
        let mut position = offset;
        while into.len() > 0 {
            let index = self.files.partition_point(|(start, _)| *start <= position);
            let Some((start, file)) = index.checked_sub(1).and_then(|index| self.files.get(index)) else {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            };
            let end = self.files.get(index).map_or(self.size, |(next, _)| *next);
            let part = into.take(end.saturating_sub(position));
            let bytes = part.len();
            if bytes == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
            read_full(file, position - start, part)?;
            position += bytes;
        }
        Ok(())
    }
}
