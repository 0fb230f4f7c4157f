//! The generator of load: `ramet-demo load …`, run in the containers that are compared. It prints one number.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
/// How long the other side of a connection may be silent.
const SILENCE: Duration = Duration::from_secs(120);

/// What to do.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum Load {
    /// Writes a file in order and makes it durable; MiB a second
    Write { path: PathBuf, mib: usize },
    /// Reads it in order; MiB a second
    Read { path: PathBuf },
    /// Writes blocks of it past the page cache and makes them durable; blocks a second
    RandomWrite { path: PathBuf, operations: usize },
    /// Reads blocks of it past the page cache; blocks a second
    RandomRead { path: PathBuf, operations: usize },
    /// Prints so many MiB, and no number
    Output { mib: usize },
    /// Sends to the default gateway; MiB a second
    Send { port: u16, mib: usize },
    /// Receives from it; MiB a second
    Receive { port: u16, mib: usize },
    /// Sends a byte and waits for the answer; times a second
    Trips { port: u16, trips: usize },
}

/// Does it.
pub(crate) fn run(load: &Load) -> Result<()> {
    let rate = match load {
        Load::Write { path, mib } => write(path, *mib)?,
        Load::Read { path } => read(path)?,
        Load::RandomWrite { path, operations } => random(path, *operations, true)?,
        Load::RandomRead { path, operations } => random(path, *operations, false)?,
        Load::Output { mib } => return output(*mib),
        Load::Send { port, mib } => send(*port, *mib)?,
        Load::Receive { port, mib } => receive(*port, *mib)?,
        Load::Trips { port, trips } => round_trips(*port, *trips)?,
    };
    println!("{rate:.3}");
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn per_second(count: usize, since: Instant) -> f64 {
    count as f64 / since.elapsed().as_secs_f64()
}

/// Numbers that look random, from Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }
}

fn write(path: &Path, mib: usize) -> Result<f64> {
    let mut block = vec![0; MIB];
    Random(0x9e37_79b9_7f4a_7c15).fill(&mut block);
    let began = Instant::now();
    let mut file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    for _ in 0..mib {
        file.write_all(&block)?;
    }
    file.sync_data()?;
    Ok(per_second(mib, began))
}

/// Takes a file out of this kernel's page cache, the guest's in a VM.
fn forget(file: &File) -> Result<()> {
    file.sync_data()?;
    posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).context("dropping cached pages")
}

fn read(path: &Path) -> Result<f64> {
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    forget(&file)?;
    let mut buffer = vec![0; MIB];
    let began = Instant::now();
    let mut bytes = 0;
    while let count @ 1.. = file.read(&mut buffer)? {
        bytes += count;
    }
    Ok(per_second(bytes / MIB, began))
}

fn random(path: &Path, operations: usize, writes: bool) -> Result<f64> {
    let file = File::options()
        .read(true)
        .write(writes)
        .custom_flags(OFlag::O_DIRECT.bits())
        .open(path)
        .with_context(|| format!("opening {} past the page cache", path.display()))?;
    let blocks = file.metadata()?.len() / BLOCK as u64;
    ensure!(blocks > 0, "{} is smaller than a block", path.display());
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut room = vec![0; 2 * BLOCK];
    random.fill(&mut room);
    // Direct transfers want aligned memory.
    let start = room.as_ptr().align_offset(BLOCK);
    let block = room.get_mut(start..start + BLOCK).context("an aligned block")?;
    let began = Instant::now();
    for _ in 0..operations {
        let offset = random.next() % blocks * BLOCK as u64;
        if writes {
            file.write_all_at(block, offset)?;
        } else {
            file.read_exact_at(block, offset)?;
        }
    }
    if writes {
        file.sync_data()?;
    }
    Ok(per_second(operations, began))
}

fn output(mib: usize) -> Result<()> {
    let mut block = vec![0; 64 << 10];
    Random(0x9e37_79b9_7f4a_7c15).fill(&mut block);
    // Not std's own stdout, which looks for newlines.
    let mut out = File::options()
        .write(true)
        .open("/proc/self/fd/1")
        .or_else(|_| File::create("/dev/stdout"))?;
    for _ in 0..mib * MIB / block.len() {
        out.write_all(&block)?;
    }
    Ok(())
}

/// The gateway of the default route in the form of `/proc/net/route`.
fn gateway(routes: &str) -> Option<Ipv4Addr> {
    for line in routes.lines().skip(1) {
        let mut words = line.split_whitespace().skip(1);
        let (destination, gateway) = (words.next()?, words.next()?);
        if destination == "00000000" {
            // In the order of this machine's bytes, which is that of memory.
            return u32::from_str_radix(gateway, 16)
                .ok()
                .map(|number| Ipv4Addr::from(number.to_le_bytes()));
        }
    }
    None
}

fn connect(port: u16, request: u8, count: usize) -> Result<TcpStream> {
    let routes = std::fs::read_to_string("/proc/net/route").context("reading the routes")?;
    let host = gateway(&routes).context("there is no default route")?;
    let mut stream = TcpStream::connect((host, port)).with_context(|| format!("connecting to {host}:{port}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.write_all(&[request])?;
    stream.write_all(&(count as u64).to_le_bytes())?;
    Ok(stream)
}

fn send(port: u16, mib: usize) -> Result<f64> {
    let mut stream = connect(port, b's', mib)?;
    let block = vec![0x55; 128 << 10];
    let began = Instant::now();
    for _ in 0..mib * MIB / block.len() {
        stream.write_all(&block)?;
    }
    // The host answers when it has everything.
    stream.read_exact(&mut [0])?;
    Ok(per_second(mib, began))
}

fn receive(port: u16, mib: usize) -> Result<f64> {
    let began = Instant::now();
    let mut stream = connect(port, b'r', mib)?;
    drain(&mut stream, mib * MIB)?;
    Ok(per_second(mib, began))
}

fn round_trips(port: u16, trips: usize) -> Result<f64> {
    let mut stream = connect(port, b't', trips)?;
    let began = Instant::now();
    for _ in 0..trips {
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
    }
    Ok(per_second(trips, began))
}

fn drain(stream: &mut TcpStream, mut bytes: usize) -> Result<()> {
    let mut buffer = vec![0; 128 << 10];
    while bytes > 0 {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            bail!("the connection ended {bytes} bytes early");
        }
        bytes = bytes.saturating_sub(count);
    }
    Ok(())
}

/// The host's side: serves one connection after the other. A connection that breaks is the client's to report.
pub(super) fn serve(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        if let Err(error) = answer(stream) {
            crate::say(format!("a connection of a container: {error:#}"));
        }
    }
}

fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    let (mut request, mut count) = ([0], [0; 8]);
    stream.read_exact(&mut request)?;
    stream.read_exact(&mut count)?;
    let count = usize::try_from(u64::from_le_bytes(count))?;
    match request {
        [b's'] => {
            drain(&mut stream, count * MIB)?;
            stream.write_all(&[1])?;
        }
        [b'r'] => {
            let block = vec![0x55; 128 << 10];
            for _ in 0..count * MIB / block.len() {
                stream.write_all(&block)?;
            }
        }
        [b't'] => {
            for _ in 0..count {
                stream.read_exact(&mut request)?;
                stream.write_all(&request)?;
            }
        }
        other => bail!("request {other:?}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_is_that_of_the_default_route() {
        let routes = "Iface\tDestination\tGateway \tFlags\n\
            eth0\t0000580A\t00000000\t0001\n\
            eth0\t00000000\t0100580A\t0003\n";
        assert_eq!(gateway(routes), Some(Ipv4Addr::new(10, 88, 0, 1)));
        assert_eq!(gateway("Iface\tDestination\n"), None);
    }

    #[test]
    fn a_file_is_written_and_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert!(write(&path, 2).unwrap() > 0.0);
        assert!(read(&path).unwrap() > 0.0);
        assert_eq!(path.metadata().unwrap().len(), 2 << 20);
    }
}
