//! The packed form of one file: chunks of it, compressed one by one; chunks that are zero are left out.
//!
//! Little endian: magic `RAMETPAK`, u32 version, u32 chunk size, u64 bytes of the file; then for each chunk that is not zero, in order, u32 number of
//! the chunk, u32 kind (0 as it is, 1 zstd), u32 stored bytes, and those bytes; then an end record, kind 2, with the count of chunks as its
//! number and no bytes. Each chunk decompresses to the chunk size, the last one to what is left of the file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use sha2::{Digest, Sha256};

use crate::manifest::{PackedFile, hex};

const MAGIC: &[u8; 8] = b"RAMETPAK";
const VERSION: u32 = 1;
/// Chunk size that is written. Small enough for a cache, large enough for zstd.
const CHUNK_BYTES: u32 = 256 << 10;
/// Smallest chunk size that is read.
const MIN_CHUNK_BYTES: u32 = 4 << 10;
/// Largest chunk size that is read: what one thread may be made to allocate.
const MAX_CHUNK_BYTES: u32 = 1 << 20;
/// Blocks of zeros of this size are holes in the unpacked file.
const BLOCK_BYTES: usize = 4096;
/// Fast rather than small: the time of a checkpoint is what users wait for.
const LEVEL: i32 = 1;
const MAX_THREADS: usize = 4;
/// Chunks in flight for each thread.
const QUEUE: usize = 4;

const KIND_RAW: u32 = 0;
const KIND_ZSTD: u32 = 1;
const KIND_END: u32 = 2;

/// Why a packed file could not be unpacked.
#[derive(Debug)]
pub(super) enum UnpackError {
    /// Its bytes are not what they must be.
    Damaged(String),
    /// Reading them.
    Read(io::Error),
    /// Writing the result.
    Write(io::Error),
}

/// What was written.
pub(super) struct Packed {
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// The chunks of a file that are not holes.
pub(super) struct DataChunks {
    file_bytes: u64,
    numbers: Vec<u32>,
}

impl DataChunks {
    /// Asks the filesystem where the holes are.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let file_bytes = file.metadata()?.len();
        let mut numbers: Vec<u32> = Vec::new();
        let mut at = 0;
        while let Some((start, end)) = next_data(file, at, file_bytes)? {
            let first = number_of(start)?;
            let last = number_of(end - 1)?;
            let first = numbers.last().map_or(first, |previous| first.max(previous + 1));
            numbers.extend(first..=last);
            at = end;
        }
        Ok(Self { file_bytes, numbers })
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Bytes in chunks that are not holes.
    pub(super) fn bytes_to_read(&self) -> u64 {
        self.numbers
            .iter()
            .map(|number| chunk_length(self.file_bytes, CHUNK_BYTES, *number) as u64)
            .sum()
    }
}

fn number_of(offset: u64) -> io::Result<u32> {
    u32::try_from(offset / u64::from(CHUNK_BYTES)).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))
}

/// The next range that is not a hole, from `at` on.
fn next_data(file: &File, at: u64, file_bytes: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= file_bytes {
        return Ok(None);
    }
    let seek = |offset: u64, whence| -> nix::Result<u64> {
        let found = lseek(file, i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?, whence)?;
        u64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    };
    match seek(at, Whence::SeekData) {
        Ok(start) => Ok(Some((
            start,
            seek(start, Whence::SeekHole)?.clamp(start + 1, file_bytes),
        ))),
        Err(Errno::ENXIO) => Ok(None),
        // A filesystem that knows no holes: everything is data.
        Err(Errno::EINVAL) => Ok(Some((at, file_bytes))),
        Err(error) => Err(error.into()),
    }
}

/// Bytes of chunk `number`; 0 if it lies beyond the file.
fn chunk_length(file_bytes: u64, chunk_bytes: u32, number: u32) -> usize {
    let start = u64::from(number) * u64::from(chunk_bytes);
    let length = file_bytes.saturating_sub(start).min(u64::from(chunk_bytes));
    usize::try_from(length).unwrap_or(0)
}

fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS)
}

fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
    bytes.chunks(BLOCK_BYTES).all(|block| *block == ZEROS[..block.len()])
}

/// One chunk, ready to be written.
struct Chunk {
    number: u32,
    kind: u32,
    bytes: Vec<u8>,
}

/// Writes the packed form of `source` to `out`. `progress` is told the bytes of each chunk that is done.
pub(super) fn pack(
    source: &File,
    chunks: &DataChunks,
    out: &mut impl Write,
    progress: &mut dyn FnMut(u64),
) -> io::Result<Packed> {
    let mut out = Hashing {
        inner: io::BufWriter::with_capacity(1 << 20, out),
        hash: Sha256::new(),
        bytes: 0,
    };
    out.write_all(MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&CHUNK_BYTES.to_le_bytes())?;
    out.write_all(&chunks.file_bytes.to_le_bytes())?;
    let written = thread::scope(|scope| {
        let count = threads().min(chunks.numbers.len()).max(1);
        let mut results: Vec<Receiver<io::Result<Option<Chunk>>>> = Vec::with_capacity(count);
        for first in 0..count {
            let (sender, receiver) = sync_channel(QUEUE);
            scope.spawn(move || compress(source, chunks, (first, count), &sender));
            results.push(receiver);
        }
        // Thread n does every count-th chunk, so asking them in turn gives the chunks in order.
        let mut written = 0;
        for (place, number) in chunks.numbers.iter().enumerate() {
            let result = results[place % count]
                .recv()
                .map_err(|_| io::Error::other("a packing thread ended early"))?;
            if let Some(chunk) = result? {
                write_record(&mut out, chunk.number, chunk.kind, &chunk.bytes)?;
                written += 1;
            }
            progress(chunk_length(chunks.file_bytes, CHUNK_BYTES, *number) as u64);
        }
        io::Result::Ok(written)
    })?;
    write_record(&mut out, written, KIND_END, &[])?;
    out.flush()?;
    Ok(Packed {
        bytes: out.bytes,
        sha256: hex(&out.hash.finalize()),
    })
}

fn write_record(out: &mut impl Write, number: u32, kind: u32, bytes: &[u8]) -> io::Result<()> {
    let stored = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    for field in [number, kind, stored] {
        out.write_all(&field.to_le_bytes())?;
    }
    out.write_all(bytes)
}

/// Sends what becomes of every `count`-th chunk, from the `first` on; stops when nobody listens.
fn compress(
    source: &File,
    chunks: &DataChunks,
    (first, count): (usize, usize),
    results: &SyncSender<io::Result<Option<Chunk>>>,
) {
    let mut compressor = match zstd::bulk::Compressor::new(LEVEL) {
        Ok(compressor) => compressor,
        Err(error) => {
            let _ = results.send(Err(error));
            return;
        }
    };
    // Both are reused: fresh memory for each chunk costs a page fault for each of its pages.
    let mut content = vec![0; CHUNK_BYTES as usize];
    let mut packed = vec![0; zstd::zstd_safe::compress_bound(content.len())];
    for number in chunks.numbers.iter().skip(first).step_by(count) {
        let mut one = || {
            let content = &mut content[..chunk_length(chunks.file_bytes, CHUNK_BYTES, *number)];
            source.read_exact_at(content, u64::from(*number) * u64::from(CHUNK_BYTES))?;
            if is_zero(content) {
                return Ok(None);
            }
            let length = compressor.compress_to_buffer(content, &mut packed[..])?;
            let smaller = length < content.len();
            let (kind, bytes) = if smaller {
                (KIND_ZSTD, &packed[..length])
            } else {
                (KIND_RAW, &content[..])
            };
            Ok(Some(Chunk {
                number: *number,
                kind,
                bytes: bytes.to_vec(),
            }))
        };
        let result = one();
        let failed = result.is_err();
        if results.send(result).is_err() || failed {
            return;
        }
    }
}

/// Unpacks `input` into the new file `out`, which becomes sparse where the content is zero. Every size is checked before it is used, and the digest of
/// the whole at the end: until this returns, `out` is not to be believed.
pub(super) fn unpack(input: &File, expected: &PackedFile, out: &File) -> Result<(), UnpackError> {
    let buffered = io::BufReader::with_capacity(1 << 20, input.take(expected.packed_bytes));
    let mut input = Hashing {
        inner: buffered,
        hash: Sha256::new(),
        bytes: 0,
    };
    let chunk_bytes = read_header(&mut input, expected)?;
    out.set_len(expected.bytes).map_err(UnpackError::Write)?;
    thread::scope(|scope| {
        let count = threads();
        let mut workers = Vec::with_capacity(count);
        for _ in 0..count {
            let (sender, receiver) = sync_channel(QUEUE);
            let worker = scope.spawn(move || decompress(&receiver, expected.bytes, chunk_bytes, out));
            workers.push((sender, worker));
        }
        let read = read_records(&mut input, expected.bytes, chunk_bytes, |place, chunk| {
            workers[place % count].0.send(chunk).is_ok()
        });
        let mut result = read;
        for (sender, worker) in workers {
            drop(sender);
            let ended = worker
                .join()
                .unwrap_or_else(|_| Err(UnpackError::Damaged("made an unpacking thread end".into())));
            // What a worker found wrong is why the reader could not go on.
            result = ended.and(result);
        }
        result
    })?;
    let mut rest = [0; 1];
    if input.read(&mut rest).map_err(UnpackError::Read)? != 0 {
        return Err(UnpackError::Damaged("has bytes after its end".to_owned()));
    }
    if hex(&input.hash.finalize()) != expected.sha256 {
        return Err(UnpackError::Damaged(
            "has another SHA-256 than the manifest says".to_owned(),
        ));
    }
    Ok(())
}

/// Returns the chunk size.
fn read_header(input: &mut impl Read, expected: &PackedFile) -> Result<u32, UnpackError> {
    let damaged = |problem: String| Err(UnpackError::Damaged(problem));
    if read_array::<8>(input)? != *MAGIC {
        return damaged("is not a packed file (it does not start with RAMETPAK)".to_owned());
    }
    let version = u32::from_le_bytes(read_array(input)?);
    if version != VERSION {
        return damaged(format!(
            "has version {version}, this build of ramet reads version {VERSION}"
        ));
    }
    let chunk_bytes = u32::from_le_bytes(read_array(input)?);
    if !chunk_bytes.is_power_of_two() || !(MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&chunk_bytes) {
        return damaged(format!(
            "has chunks of {chunk_bytes} bytes, allowed are powers of two from 4096 to 1048576"
        ));
    }
    let bytes = u64::from_le_bytes(read_array(input)?);
    if bytes != expected.bytes {
        return damaged(format!(
            "says that it unpacks to {bytes} bytes, expected {}",
            expected.bytes
        ));
    }
    Ok(chunk_bytes)
}

/// Hands each chunk to `take` with its place, until the end record or until `take` does not want more.
fn read_records(
    input: &mut impl Read,
    file_bytes: u64,
    chunk_bytes: u32,
    mut take: impl FnMut(usize, Chunk) -> bool,
) -> Result<(), UnpackError> {
    let damaged = |problem: String| Err(UnpackError::Damaged(problem));
    let mut previous = None;
    for place in 0.. {
        let number = u32::from_le_bytes(read_array(input)?);
        let kind = u32::from_le_bytes(read_array(input)?);
        let stored = u32::from_le_bytes(read_array(input)?);
        if kind == KIND_END {
            let right = usize::try_from(number) == Ok(place) && stored == 0;
            return if right {
                Ok(())
            } else {
                damaged(format!("ends after {place} chunks, its end record says {number}"))
            };
        }
        let length = chunk_length(file_bytes, chunk_bytes, number);
        if length == 0 || previous.is_some_and(|previous| number <= previous) {
            return damaged(format!("has chunk {number} out of order or beyond its end"));
        }
        previous = Some(number);
        let stored = usize::try_from(stored).unwrap_or(usize::MAX);
        let plausible = match kind {
            KIND_RAW => stored == length,
            KIND_ZSTD => stored > 0 && stored < length,
            _ => return damaged(format!("has chunk {number} of unknown kind {kind}")),
        };
        if !plausible {
            return damaged(format!("has chunk {number} with {stored} stored bytes for {length}"));
        }
        let mut bytes = vec![0; stored];
        input.read_exact(&mut bytes).map_err(short)?;
        if !take(place, Chunk { number, kind, bytes }) {
            return damaged("could not be unpacked".to_owned());
        }
    }
    Ok(())
}

fn decompress(chunks: &Receiver<Chunk>, file_bytes: u64, chunk_bytes: u32, out: &File) -> Result<(), UnpackError> {
    let mut decompressor = zstd::bulk::Decompressor::new().map_err(UnpackError::Read)?;
    let mut buffer = vec![0; chunk_bytes as usize];
    for Chunk { number, kind, bytes } in chunks {
        let length = chunk_length(file_bytes, chunk_bytes, number);
        let content = if kind == KIND_RAW {
            &bytes[..]
        } else {
            let made = decompressor.decompress_to_buffer(&bytes, &mut buffer[..length]);
            if !made.as_ref().is_ok_and(|made| *made == length) {
                return Err(UnpackError::Damaged(format!(
                    "has chunk {number} that does not decompress to {length} bytes"
                )));
            }
            &buffer[..length]
        };
        let start = u64::from(number) * u64::from(chunk_bytes);
        write_sparse(out, content, start).map_err(UnpackError::Write)?;
    }
    Ok(())
}

/// Writes the runs of blocks that are not zero.
fn write_sparse(out: &File, content: &[u8], start: u64) -> io::Result<()> {
    let mut at = 0;
    while at < content.len() {
        let block = |from: usize| &content[from..content.len().min(from + BLOCK_BYTES)];
        let zero = is_zero(block(at));
        let mut end = at;
        while end < content.len() && is_zero(block(end)) == zero {
            end += block(end).len();
        }
        if !zero {
            out.write_all_at(&content[at..end], start + at as u64)?;
        }
        at = end;
    }
    Ok(())
}

fn read_array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], UnpackError> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map_err(short)?;
    Ok(bytes)
}

fn short(error: io::Error) -> UnpackError {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return UnpackError::Damaged("ends in the middle".to_owned());
    }
    UnpackError::Read(error)
}

/// Counts and hashes what passes through.
struct Hashing<T> {
    inner: T,
    hash: Sha256,
    bytes: u64,
}

impl<T: Write> Write for Hashing<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Hashing<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        self.bytes += read as u64;
        Ok(read)
    }
}
