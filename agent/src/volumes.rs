//! Volumes: host files and directories, mounted with FUSE, whose messages go over a connection of the volume port.
//!
//! Two threads carry the messages of each volume. The agent itself never looks into one: it would wait for the host.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use protocol::VolumeHeader;

use crate::agent::Agent;
use crate::error::{AgentError, Result};
use crate::fd::{Fd, Listener};
use crate::renew::on_a_thread;
use crate::streams::{HEADER_DEADLINE, read_line};

/// Largest FUSE message, in bytes: 1 MiB of content and what describes it.
const MAX_MESSAGE: usize = (1 << 20) + 4096;

/// What is read ahead, in KiB.
const READ_AHEAD: &str = "1024";

/// Length of a reply's header, in bytes.
const REPLY_HEADER: usize = 16;

/// Most volumes of one container.
const MAX_VOLUMES: u32 = 1024;

/// How long the host may take for what is left to be written.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(3);

/// The volumes of all containers, by container.
#[derive(Debug, Default)]
pub struct Volumes(Mutex<HashMap<String, Vec<PathBuf>>>);

impl Volumes {
    /// Takes away the volumes of a container that is gone.
    pub async fn release(&self, container: &str) {
        let paths = self.lock().remove(container).unwrap_or_default();
        remove(container, paths).await;
    }

    /// Takes away those of a container that is held still, in every mount namespace.
    ///
    /// # Errors
    /// While something holds them; then nothing is done.
    pub async fn detach(&self, container: &str) -> Result<()> {
        let paths = self.lock().get(container).cloned().unwrap_or_default();
        if paths.is_empty() {
            return Ok(());
        }
        let seen = paths.clone();
        on_a_thread(move || crate::volume_mounts::take_away(&seen)).await?;
        self.lock().remove(container);
        remove(container, paths).await;
        Ok(())
    }

    fn add(&self, container: &str, path: PathBuf) {
        self.lock().entry(container.to_owned()).or_default().push(path);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Vec<PathBuf>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unmounts volumes, which writes out what is left of them, and removes their mount points.
async fn remove(container: &str, paths: Vec<PathBuf>) {
    let all = paths.clone();
    let orderly = on_a_thread(move || {
        for path in all.iter().rev() {
            if let Err(error) = umount2(path, MntFlags::empty()) {
                tracing::warn!("unmount volume {}: {error}", path.display());
            }
        }
        Ok(())
    });
    if tokio::time::timeout(UNMOUNT_DEADLINE, orderly).await.is_err() {
        tracing::warn!("the host does not take what is left of the volumes of {container}");
    }
    for path in &paths {
        unmount(path);
        let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path));
    }
    let _ = std::fs::remove_dir(Path::new(protocol::VOLUMES).join(container));
}

/// Serves the volume port for ever.
///
/// # Errors
/// When the listener breaks.
pub async fn serve(agent: Arc<Agent>, listener: Listener) -> io::Result<()> {
    loop {
        let connection = listener.accept().await?;
        let agent = agent.clone();
        tokio::spawn(async move {
            if let Err(error) = attach(&agent, connection).await {
                tracing::warn!("volume connection: {error}");
            }
        });
    }
}

async fn attach(agent: &Agent, connection: Fd) -> io::Result<()> {
    let (line, early) = tokio::time::timeout(HEADER_DEADLINE, read_line(&connection)).await??;
    let mounted = if early.is_empty() {
        mount_for(agent, &line).await
    } else {
        Err(AgentError::Invalid("the host speaks before it is asked".into()))
    };
    match mounted {
        Ok(volume) => {
            connection.write_all(b"ok\n").await?;
            volume.carry(UnixStream::from(connection.into_blocking()?))
        }
        Err(error) => {
            let text = error.text().replace('\n', " ");
            connection.write_all(format!("error: {text}\n").as_bytes()).await?;
            connection.shutdown_write();
            Ok(())
        }
    }
}

async fn mount_for(agent: &Agent, line: &[u8]) -> Result<Volume> {
    let header = parse(line)?;
    let volume = mount_volume(&header)?;
    if !header.destination.is_empty() {
        let placed = match agent.container(&header.container_id).map(|c| c.live_pid()) {
            Ok(Some(pid)) => {
                let (path, header) = (volume.path.clone(), header.clone());
                on_a_thread(move || crate::volume_mounts::place(&path, &header, pid)).await
            }
            Ok(None) => Err(AgentError::Finished),
            Err(error) => Err(error),
        };
        if let Err(error) = placed {
            unmount(&volume.path);
            return Err(error);
        }
    }
    agent.volumes.add(&header.container_id, volume.path.clone());
    Ok(volume)
}

fn parse(line: &[u8]) -> Result<VolumeHeader> {
    let header: VolumeHeader =
        serde_json::from_slice(line).map_err(|error| AgentError::Invalid(format!("volume header: {error}")))?;
    crate::rootfs::check_id(&header.container_id)?;
    if header.number >= MAX_VOLUMES {
        return Err(AgentError::Invalid(format!("volume {}", header.number)));
    }
    Ok(header)
}

/// A mounted volume that nobody answers for yet.
struct Volume {
    device: File,
    path: PathBuf,
}

fn mount_volume(header: &VolumeHeader) -> Result<Volume> {
    let directory = Path::new(protocol::VOLUMES).join(&header.container_id);
    let path = directory.join(header.number.to_string());
    let failed = |error: io::Error| AgentError::io(format!("mount volume {}", path.display()), error);
    if header.is_directory {
        std::fs::create_dir_all(&path).map_err(failed)?;
    } else {
        std::fs::create_dir_all(&directory).map_err(failed)?;
        File::create(&path).map_err(failed)?;
    }
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .map_err(failed)?;
    let kind = if header.is_directory {
        libc::S_IFDIR
    } else {
        libc::S_IFREG
    };
    // The guest's kernel checks permissions, for all users: the server of the host could not know their groups.
    let options = format!(
        "fd={},rootmode={kind:o},user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    mount(
        Some("ramet"),
        &path,
        Some("fuse.ramet"),
        MsFlags::MS_NODEV,
        Some(options.as_str()),
    )
    .map_err(|error| failed(error.into()))?;
    read_ahead(&path);
    Ok(Volume { device, path })
}

/// Has the kernel read ahead as much as one message brings: each is a trip to the host.
fn read_ahead(path: &Path) {
    let set = crate::sys::device_of(path).and_then(|(major, minor)| {
        let file = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
        std::fs::write(file, READ_AHEAD)
    });
    if let Err(error) = set {
        tracing::warn!("let volume {} read ahead: {error}", path.display());
    }
}

/// Ends a volume: what is under way fails, and its threads end.
fn unmount(path: &Path) {
    let flags = MntFlags::MNT_FORCE | MntFlags::MNT_DETACH;
    match umount2(path, flags) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(error) => tracing::warn!("unmount volume {}: {error}", path.display()),
    }
}

impl Volume {
    /// Carries messages until one of the ends is gone.
    fn carry(self, connection: UnixStream) -> io::Result<()> {
        let Self { device, path } = self;
        let (mut to_host, mut from_host) = (connection.try_clone()?, connection);
        let (mut requests, mut replies) = (device.try_clone()?, device);
        // Set when the volume was unmounted: another one may be at its path by now.
        let unmounted = Arc::new(AtomicBool::new(false));
        let seen = unmounted.clone();
        std::thread::Builder::new().name("volume-out".into()).spawn(move || {
            match carry_requests(&mut requests, &mut to_host) {
                Ok(()) => seen.store(true, Ordering::Release),
                Err(error) => tracing::warn!("requests of a volume: {error}"),
            }
            let _ = to_host.shutdown(std::net::Shutdown::Both);
        })?;
        std::thread::Builder::new().name("volume-in".into()).spawn(move || {
            if let Err(error) = carry_replies(&mut from_host, &mut replies) {
                tracing::warn!("replies of volume {}: {error}", path.display());
            }
            if !unmounted.load(Ordering::Acquire) {
                // Whoever waits for the host gets an error.
                unmount(&path);
            }
        })?;
        Ok(())
    }
}

/// From the kernel to the host, each message whole; ends when the volume is unmounted.
fn carry_requests(device: &mut impl Read, host: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        match device.read(&mut buffer) {
            Ok(count) => host.write_all(buffer.get(..count).unwrap_or_default())?,
            Err(error) => match error.raw_os_error() {
                Some(libc::ENODEV) => return Ok(()),
                // The request was interrupted before it was read.
                Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => {}
                _ => return Err(error),
            },
        }
    }
}

/// From the host to the kernel; ends with the connection.
fn carry_replies(host: &mut impl Read, device: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; MAX_MESSAGE];
    while let Some(length) = read_reply(host, &mut buffer)? {
        match device.write(buffer.get(..length).unwrap_or_default()) {
            Ok(written) if written == length => {}
            Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) => match error.raw_os_error() {
                // Nobody waits for the answer any more.
                Some(libc::ENOENT | libc::EINTR) => {}
                Some(libc::ENODEV) => return Ok(()),
                _ => return Err(error),
            },
        }
    }
    Ok(())
}

/// Reads one reply; `None` is the end.
fn read_reply(host: &mut impl Read, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let mut filled = 0;
    while filled < REPLY_HEADER {
        match host.read(buffer.get_mut(filled..REPLY_HEADER).unwrap_or_default()) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let length = buffer
        .get(..4)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u32::from_ne_bytes);
    let length = usize::try_from(length.unwrap_or(0)).unwrap_or(0);
    if !(REPLY_HEADER..=MAX_MESSAGE).contains(&length) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a reply of {length} bytes"),
        ));
    }
    host.read_exact(buffer.get_mut(REPLY_HEADER..length).unwrap_or_default())?;
    Ok(Some(length))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_reply_can_hurt(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut sink = Vec::new();
            let _ = carry_replies(&mut bytes.as_slice(), &mut sink);
            prop_assert!(sink.len() <= bytes.len());
        }

        #[test]
        fn no_header_can_hurt(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&line);
        }

        #[test]
        fn replies_arrive_whole(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..5)) {
            struct Device(Vec<Vec<u8>>);
            impl Write for Device {
                fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                    self.0.push(bytes.to_vec());
                    Ok(bytes.len())
                }
                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }
            let messages: Vec<Vec<u8>> = bodies
                .iter()
                .map(|body| {
                    let length = u32::try_from(REPLY_HEADER + body.len()).expect("small");
                    let mut message = length.to_ne_bytes().to_vec();
                    message.resize(REPLY_HEADER, 0);
                    message.extend_from_slice(body);
                    message
                })
                .collect();
            let mut device = Device(Vec::new());
            carry_replies(&mut messages.concat().as_slice(), &mut device).expect("they are whole");
            prop_assert_eq!(device.0, messages);
        }
    }

    #[test]
    fn a_header_names_a_container() {
        let line = |id: &str, number| {
            serde_json::to_vec(&VolumeHeader {
                container_id: id.into(),
                number,
                is_directory: true,
                destination: String::new(),
                options: Vec::new(),
            })
            .expect("plain data")
        };
        assert!(parse(&line("c", 0)).is_ok());
        assert!(parse(&line("../c", 0)).is_err());
        assert!(parse(&line("c", MAX_VOLUMES)).is_err());
    }
}
