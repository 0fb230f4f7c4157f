//! Host files and directories of a container: the process that serves them, and their connections to the guest.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::volumes::control::{Client, Config, Volume, VolumeError};
use protocol::{VolumeHeader, ports};
use tokio::io::AsyncWriteExt;
use tracing::info;

use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::launch::blocking;
use crate::spec;
use crate::streams::read_line;
use crate::vm::Vm;

/// How long the agent may take to mount one.
const LIMIT: Duration = Duration::from_secs(10);
/// Name of the action that serves volumes.
pub const ACTION: &str = "volumes";

/// Where a container finds its volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// It is made later, from a spec that binds them.
    InSpec,
    /// It exists: they are mounted into it.
    InContainer,
}

/// The volumes of a container. Their server ends when this is dropped.
#[derive(Debug, Default)]
pub struct Volumes {
    client: Mutex<Option<Arc<Client>>>,
    list: Vec<spec::Volume>,
}

impl Volumes {
    /// Starts a server for them, if there are any.
    ///
    /// # Errors
    /// It cannot be run, or a source cannot be shared.
    pub async fn start(list: Vec<spec::Volume>) -> Result<Self> {
        if list.is_empty() {
            return Ok(Self::default());
        }
        let config = Config {
            volumes: list.iter().map(to_serve).collect(),
        };
        let client = blocking(move || Ok(Client::start(&program(), &[ACTION], &config)?)).await?;
        info!(count = list.len(), pid = client.pid(), "volumes are served");
        let client = Mutex::new(Some(Arc::new(client)));
        Ok(Self { client, list })
    }

    fn client(&self) -> Option<Arc<Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends their server: nobody asks it any more.
    pub fn end(&self) {
        let ended = self.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(ended);
    }

    /// Whether they can be mounted again once they were taken away.
    #[must_use]
    pub fn are_served(&self) -> bool {
        self.list.is_empty() || self.client().is_some_and(|client| client.is_alive())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Takes them away from a container that is held still.
    ///
    /// # Errors
    /// A process holds a file of one; then nothing is done.
    pub async fn detach(&self, guest: &Guest, container: &str) -> Result<()> {
        if self.list.is_empty() {
            return Ok(());
        }
        Ok(guest.detach_volumes(container).await?)
    }

    /// Mounts them in the guest, and there [`Where`] says.
    ///
    /// # Errors
    /// The agent refuses, or knows no volumes.
    pub async fn attach(&self, vm: &dyn Vm, generation: u32, container: &str, place: Where) -> Result<()> {
        if self.list.is_empty() {
            return Ok(());
        }
        let gone = || VolumeError::Io(std::io::ErrorKind::BrokenPipe.into());
        let client = self.client().ok_or_else(gone)?;
        if generation < protocol::VOLUMES_SINCE {
            return Err(Error::Unsupported(
                "a bind mount in a fork of a checkpoint made by an older release".into(),
            ));
        }
        for (number, volume) in self.list.iter().enumerate() {
            let header = VolumeHeader {
                container_id: container.to_owned(),
                number: u32::try_from(number).map_err(|_| Error::InvalidArgument("too many mounts".into()))?,
                is_directory: volume.is_directory,
                destination: match place {
                    Where::InSpec => String::new(),
                    Where::InContainer => volume.destination.display().to_string(),
                },
                options: volume.options.clone(),
            };
            let stream = connect(vm, &header, volume).await?;
            let client = client.clone();
            blocking(move || Ok(client.attach(number, stream)?)).await?;
        }
        Ok(())
    }
}

/// This program. Its path names the process better than `/proc/self/exe`, but an upgrade may have taken it away.
fn program() -> PathBuf {
    std::env::current_exe()
        .ok()
        .filter(|path| path.exists())
        .unwrap_or_else(|| "/proc/self/exe".into())
}

fn to_serve(volume: &spec::Volume) -> Volume {
    Volume {
        source: volume.source.clone(),
        recursive: volume.recursive,
        read_only: volume.read_only,
        follows_host: volume.follows_host,
    }
}

/// A stream over which the guest's kernel will ask.
async fn connect(vm: &dyn Vm, header: &VolumeHeader, volume: &spec::Volume) -> Result<OwnedFd> {
    let failed = |why: String| Error::Runtime {
        action: "create",
        message: format!(
            "error mounting {:?} to rootfs at {:?}: {why}",
            volume.source, volume.destination
        ),
    };
    let mut stream = vm.connect(ports::VOLUMES).await?;
    let mut line = serde_json::to_vec(header).map_err(|e| Error::Internal(e.to_string()))?;
    line.push(b'\n');
    let talk = async {
        stream.write_all(&line).await?;
        read_line(&mut stream).await
    };
    let answer = tokio::time::timeout(LIMIT, talk)
        .await
        .map_err(|_| failed("the guest does not answer".into()))?
        .map_err(|e| failed(format!("connection to the guest: {e}")))?;
    if answer != "ok" {
        return Err(failed(answer.trim_start_matches("error: ").to_owned()));
    }
    let stream = stream.into_std().map_err(|e| failed(e.to_string()))?;
    Ok(stream.into())
}

impl From<VolumeError> for Error {
    fn from(error: VolumeError) -> Self {
        Self::Runtime {
            action: "create",
            message: crate::error::chain(&error),
        }
    }
}

/// The process that serves volumes: its control socket is its standard input.
///
/// # Errors
/// See [`::volumes::server::run`].
pub fn serve() -> anyhow::Result<()> {
    use std::os::fd::AsFd;
    let control = std::io::stdin().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(::volumes::server::run(control)?)
}
