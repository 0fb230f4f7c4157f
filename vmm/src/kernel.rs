//! Copies an ELF kernel into guest memory, into huge pages where the host has them. A kernel writes most of its pages while it starts: with
//! its file mapped privately, each would be a fault for the read and another for the write.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::layout::{HIGH_RAM_START, HOLE_START};
use crate::memory::{GuestMemory, MemoryError};

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
/// Most program headers that are read; Linux has 5.
const MAX_SEGMENTS: u16 = 64;
const LOADABLE: u32 = 1;

/// A kernel cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("read kernel")]
    Read(#[from] io::Error),
    /// It is not one.
    #[error("kernel is not a 64-bit x86 ELF image: {0}")]
    Format(&'static str),
    /// It does not fit.
    #[error("kernel segment at {0:#x} lies outside of guest memory")]
    Outside(u64),
    /// It cannot be copied into guest memory.
    #[error("copy kernel")]
    Memory(#[from] MemoryError),
}

/// A loaded kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Guest-physical entry point.
    pub entry: u64,
    /// End of its memory, where it grows to.
    pub end: u64,
}

/// A part to load.
#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
}

impl Segment {
    /// One past its last byte in memory.
    fn end(&self) -> Option<u64> {
        self.address.checked_add(self.memory_bytes)
    }
}

/// Loads the kernel.
///
/// # Errors
/// When it is not an ELF image for x86-64, or does not fit between 1 MiB and the end of low memory.
pub fn load(memory: &GuestMemory, file: &File) -> Result<Kernel, KernelError> {
    let (entry, segments) = parse(file)?;
    let length = file.metadata()?.len();
    let limit = memory.bytes().min(HOLE_START);
    let mut kernel = Kernel { entry, end: 0 };
    memory.prefer_huge_pages(span(&segments));
    for segment in &segments {
        let end = segment
            .end()
            .filter(|end| segment.address >= HIGH_RAM_START && *end <= limit);
        let end = end.ok_or(KernelError::Outside(segment.address))?;
        if segment.file_bytes > segment.memory_bytes {
            return Err(KernelError::Format("segment larger in the file than in memory"));
        }
        if segment
            .offset
            .checked_add(segment.file_bytes)
            .is_none_or(|end| end > length)
        {
            return Err(KernelError::Format("segment beyond the end of the file"));
        }
        kernel.end = kernel.end.max(end);
        memory.load_file(segment.address, file, segment.offset, segment.file_bytes)?;
    }
    if !segments
        .iter()
        .any(|segment| (segment.address..segment.address + segment.memory_bytes).contains(&entry))
    {
        return Err(KernelError::Format("entry point outside of every segment"));
    }
    Ok(kernel)
}

/// From the lowest address to the highest end; empty if a segment ends nowhere.
fn span(segments: &[Segment]) -> Range<u64> {
    let start = segments.iter().map(|segment| segment.address).min();
    let end = segments.iter().map(|segment| segment.end().unwrap_or(0)).max();
    start.unwrap_or(0)..end.unwrap_or(0)
}

/// Entry point and loadable segments.
fn parse(file: &File) -> Result<(u64, Vec<Segment>), KernelError> {
    let mut header = [0; HEADER_BYTES];
    read_at(file, &mut header, 0)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return Err(KernelError::Format("wrong magic, class or byte order"));
    }
    if field(&header, 18, 2) != 62 {
        return Err(KernelError::Format("made for another processor"));
    }
    let (entry, table) = (field(&header, 24, 8), field(&header, 32, 8));
    let count = u16::try_from(field(&header, 56, 2)).unwrap_or(u16::MAX);
    if field(&header, 54, 2) != SEGMENT_BYTES as u64 || count == 0 || count > MAX_SEGMENTS {
        return Err(KernelError::Format("program headers of the wrong size or number"));
    }
    let mut segments = Vec::new();
    for number in 0..u64::from(count) {
        let mut bytes = [0; SEGMENT_BYTES];
        let at = table.checked_add(number * SEGMENT_BYTES as u64);
        read_at(
            file,
            &mut bytes,
            at.ok_or(KernelError::Format("program headers beyond the end"))?,
        )?;
        if field(&bytes, 0, 4) == u64::from(LOADABLE) {
            segments.push(Segment {
                offset: field(&bytes, 8, 8),
                address: field(&bytes, 24, 8),
                file_bytes: field(&bytes, 32, 8),
                memory_bytes: field(&bytes, 40, 8),
            });
        }
    }
    Ok((entry, segments))
}

fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> Result<(), KernelError> {
    file.read_exact_at(bytes, offset).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput => KernelError::Format("cut short"),
        _ => KernelError::Read(error),
    })
}

/// A little-endian field.
fn field(bytes: &[u8], at: usize, length: usize) -> u64 {
    let mut field = [0; 8];
    for (place, byte) in field.iter_mut().zip(bytes.iter().skip(at).take(length)) {
        *place = *byte;
    }
    u64::from_le_bytes(field)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    fn elf(entry: u64, segments: &[Segment], contents: &[u8]) -> File {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18] = 62;
        bytes[24..32].copy_from_slice(&entry.to_le_bytes());
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = u8::try_from(segments.len()).unwrap();
        for segment in segments {
            bytes.extend_from_slice(&[1, 0, 0, 0, 7, 0, 0, 0]);
            for value in [
                segment.offset,
                0,
                segment.address,
                segment.file_bytes,
                segment.memory_bytes,
                1,
            ] {
                bytes.extend_from_slice(&value.to_le_bytes());
            }
        }
        bytes.resize(4096, 0);
        bytes.extend_from_slice(contents);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    fn memory() -> GuestMemory {
        GuestMemory::new(64 << 20).unwrap()
    }

    #[test]
    fn a_segment_is_copied_and_nothing_beyond_it() {
        let segment = Segment {
            offset: 4096,
            address: 0x10_0000,
            file_bytes: 2 * 4096 + 5,
            memory_bytes: 5 * 4096,
        };
        let file = elf(0x10_0004, &[segment], &[7; 2 * 4096 + 5]);
        let memory = memory();
        let kernel = load(&memory, &file).unwrap();
        assert_eq!((kernel.entry, kernel.end), (0x10_0004, 0x10_5000));
        let byte = |at: u64| memory.map().read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!(
            [byte(0x10_0000), byte(0x10_1fff), byte(0x10_2004), byte(0x10_2005)],
            [7, 7, 7, 0]
        );
    }

    #[test]
    fn segments_outside_of_memory_or_file_are_refused() {
        let good = Segment {
            offset: 4096,
            address: 0x10_0000,
            file_bytes: 10,
            memory_bytes: 10,
        };
        let refused = |segment: Segment| load(&memory(), &elf(segment.address, &[segment], &[0; 10])).is_err();
        assert!(!refused(good));
        assert!(refused(Segment {
            address: 0x1000,
            ..good
        }));
        assert!(refused(Segment {
            address: 64 << 20,
            ..good
        }));
        assert!(refused(Segment {
            memory_bytes: u64::MAX,
            ..good
        }));
        assert!(refused(Segment {
            memory_bytes: 5,
            ..good
        }));
        assert!(refused(Segment { offset: 4097, ..good }));
        assert!(refused(Segment {
            offset: u64::MAX,
            ..good
        }));
        assert!(load(&memory(), &elf(0x20_0000, &[good], &[0; 10])).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_headers_are_refused_or_loaded_within_bounds(
            fields in proptest::collection::vec(any::<u64>(), 6),
            tail in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let segment = Segment {
                offset: fields[0] % 9000,
                address: fields[1] % (100 << 20),
                file_bytes: fields[2] % 9000,
                memory_bytes: fields[3] % (1 << 20),
            };
            let file = elf(fields[4] % (100 << 20), &[segment], &tail);
            if let Ok(kernel) = load(&memory(), &file) {
                prop_assert!(kernel.end <= 64 << 20 && kernel.entry >= HIGH_RAM_START);
            }
            file.write_all_at(&tail, fields[5] % 200).unwrap();
            let _refused_or_not = load(&memory(), &file);
        }
    }
}
