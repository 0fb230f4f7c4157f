//! The agent's state: containers, their root filesystems, and whether the guest is held still for a checkpoint.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::StreamHeader;
use protocol::guest::{NetworkConfig, PrepareContainerRequest, RenewRequest};
use tokio::sync::{RwLockReadGuard, watch};

use crate::cgroup::Cgroup;
use crate::container::Container;
use crate::error::{AgentError, Result};
use crate::process::Wanted;
use crate::reaper::Reaper;
use crate::renew::Steps;
use crate::rootfs::{self, Rootfs};
use crate::state::{ConnectionId, Hold};
use crate::stdio::Port;

/// How long requests that are under way may delay a checkpoint.
const BUSY_DEADLINE: Duration = Duration::from_secs(30);

/// How long the containers may take to stand still.
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);

/// How long a reader that does not read may delay a checkpoint; what it did not take stays in the pipe.
const FLUSH_DEADLINE: Duration = Duration::from_secs(2);

/// The agent.
#[derive(Debug)]
pub struct Agent {
    /// Collects exits.
    pub reaper: Reaper,
    /// Host files and directories.
    pub volumes: crate::volumes::Volumes,
    containers: Mutex<HashMap<String, Slot>>,
    roots: Mutex<HashMap<String, Rootfs>>,
    hold: Mutex<Hold>,
    /// Read by requests that make processes, written by Quiesce.
    making: tokio::sync::RwLock<()>,
    held: watch::Sender<bool>,
    /// Grows with each Quiesce: tells connections of before a checkpoint from those after.
    epoch: AtomicU64,
    resolv_conf: Mutex<Vec<u8>>,
}

/// An id in use.
#[derive(Debug)]
enum Slot {
    /// Being created.
    Reserved,
    /// There.
    Ready(Arc<Container>),
}

impl Default for Agent {
    fn default() -> Self {
        Self {
            reaper: Reaper::default(),
            volumes: crate::volumes::Volumes::default(),
            containers: Mutex::default(),
            roots: Mutex::default(),
            hold: Mutex::default(),
            making: tokio::sync::RwLock::default(),
            held: watch::Sender::new(false),
            epoch: AtomicU64::new(0),
            resolv_conf: Mutex::default(),
        }
    }
}

impl Agent {
    /// A container that was created.
    ///
    /// # Errors
    /// When it was not.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        match lock(&self.containers).get(id) {
            Some(Slot::Ready(container)) => Ok(container.clone()),
            Some(Slot::Reserved) | None => Err(AgentError::not_found("container", id)),
        }
    }

    /// All containers.
    pub fn containers(&self) -> Vec<Arc<Container>> {
        let ready = |slot: &Slot| match slot {
            Slot::Ready(container) => Some(container.clone()),
            Slot::Reserved => None,
        };
        lock(&self.containers).values().filter_map(ready).collect()
    }

    /// Makes a container.
    ///
    /// # Errors
    /// When the id is taken or bad, the guest is held, or what the container's runtime says.
    pub async fn create(&self, id: &str, bundle: PathBuf, wanted: Wanted) -> Result<Arc<Container>> {
        rootfs::check_id(id)?;
        let _making = self.may_make().await?;
        {
            let mut containers = lock(&self.containers);
            if containers.contains_key(id) {
                return Err(AgentError::AlreadyExists {
                    what: "container",
                    id: id.to_owned(),
                });
            }
            containers.insert(id.to_owned(), Slot::Reserved);
        }
        let made = self.make(id, bundle, wanted).await;
        let mut containers = lock(&self.containers);
        match made {
            Ok(container) => {
                containers.insert(id.to_owned(), Slot::Ready(container.clone()));
                Ok(container)
            }
            Err(error) => {
                containers.remove(id);
                Err(error)
            }
        }
    }

    async fn make(&self, id: &str, bundle: PathBuf, wanted: Wanted) -> Result<Arc<Container>> {
        let container = Container::create(id.to_owned(), bundle, wanted, &self.reaper, self.held.subscribe()).await?;
        if let Err(error) = crate::renew::show_boot_id(container.init_pid()).await {
            container.delete("").await?;
            return Err(error);
        }
        Ok(container)
    }

    /// Starts a process of a container.
    ///
    /// # Errors
    /// As [`Container::start`]; or the guest is held.
    pub async fn start(&self, id: &str, exec_id: &str) -> Result<u32> {
        let container = self.container(id)?;
        let _making = self.may_make().await?;
        container.start(exec_id, &self.reaper).await
    }

    /// Forgets a container that was deleted.
    pub fn forget(&self, id: &str) {
        lock(&self.containers).remove(id);
    }

    async fn may_make(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let making = self.making.read().await;
        if self.hold().is_held() {
            return Err(AgentError::Precondition("the guest is quiesced".into()));
        }
        Ok(making)
    }

    /// The stream that a connection asks for.
    ///
    /// # Errors
    /// When there is none.
    pub fn stream_port(&self, header: &StreamHeader) -> Result<Arc<Port>> {
        self.container(&header.container_id)?
            .port(&header.exec_id, header.stream)
    }

    /// Number of checkpoints so far.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Whether the guest is held.
    pub fn hold(&self) -> Hold {
        *lock(&self.hold)
    }

    /// Mounts a container's root filesystem and writes its bundle.
    ///
    /// # Errors
    /// When the id is in use, a disk is missing, or the spec is none.
    pub async fn prepare(&self, request: PrepareContainerRequest) -> Result<PathBuf> {
        let id = request.container_id.clone();
        rootfs::check_id(&id)?;
        if lock(&self.roots).contains_key(&id) {
            return Err(AgentError::AlreadyExists {
                what: "root filesystem of container",
                id,
            });
        }
        let root = if request.reuse_rootfs_of.is_empty() {
            rootfs::mount_disks(&request).await?
        } else {
            let from = &request.reuse_rootfs_of;
            lock(&self.roots)
                .remove(from)
                .ok_or_else(|| AgentError::not_found("root filesystem of container", from))?
        };
        let resolv_conf = lock(&self.resolv_conf).clone();
        let bundle = root.write_bundle(&request, &resolv_conf);
        // Kept also when the bundle could not be written, so that it can be released.
        lock(&self.roots).insert(id, root);
        bundle
    }

    /// Unmounts a container's root filesystem. Idempotent.
    ///
    /// # Errors
    /// While the container exists, or when the id is bad.
    pub fn release(&self, id: &str) -> Result<()> {
        rootfs::check_id(id)?;
        if lock(&self.containers).contains_key(id) {
            return Err(AgentError::Precondition(format!("container {id:?} exists")));
        }
        match lock(&self.roots).remove(id) {
            Some(root) => root.release(),
            None => rootfs::remove_bundle(&rootfs::bundle(id)),
        }
        Ok(())
    }

    /// Where the agent sees a container's root filesystem, if it mounted it.
    pub fn root_path(&self, id: &str) -> Option<PathBuf> {
        lock(&self.roots).get(id).map(|root| root.path.clone())
    }

    /// Where the agent sees what a container wrote to its root filesystem.
    ///
    /// # Errors
    /// When it has none.
    pub fn upper_path(&self, id: &str) -> Result<PathBuf> {
        let roots = lock(&self.roots);
        let root = roots.get(id).map(Rootfs::upper);
        root.ok_or_else(|| AgentError::not_found("root filesystem of container", id))
    }

    /// Holds every container still for a checkpoint.
    ///
    /// # Errors
    /// When the guest is held already or something does not stand still in time; then all goes on.
    pub async fn quiesce(&self, connection: ConnectionId) -> Result<()> {
        let making = tokio::time::timeout(BUSY_DEADLINE, self.making.write()).await;
        let _making = making.map_err(|_| AgentError::Timeout("wait for requests under way".into()))?;
        if self.hold().is_held() {
            return Err(AgentError::Precondition("the guest is quiesced already".into()));
        }
        if let Err(error) = freeze_all().await {
            // The error that is reported is the first.
            let _ = Cgroup::all().set_frozen(false, FREEZE_DEADLINE).await;
            return Err(error);
        }
        let flushes: Vec<_> = self
            .containers()
            .iter()
            .flat_map(|c| c.ports(true))
            .map(|port| port.flush())
            .collect();
        let all = async {
            for flush in flushes {
                flush.await;
            }
        };
        if tokio::time::timeout(FLUSH_DEADLINE, all).await.is_err() {
            tracing::warn!("an output stream is not read; what is in its pipe stays there");
        }
        self.held.send_replace(true);
        self.epoch.fetch_add(1, Ordering::Relaxed);
        *lock(&self.hold) = Hold::Held(connection);
        Ok(())
    }

    /// Takes the volumes of a container away, which no checkpoint can hold.
    ///
    /// # Errors
    /// When the guest is not held, or while a process has a file of one open; nothing is done then.
    pub async fn detach_volumes(&self, id: &str) -> Result<()> {
        if !self.hold().is_held() {
            return Err(AgentError::Precondition("the guest is not quiesced".into()));
        }
        self.volumes.detach(id).await
    }

    /// Lets the containers go on, but for those that are to be killed.
    ///
    /// # Errors
    /// After a restore, before [`Self::renew`] has succeeded.
    pub async fn thaw(&self, connection: ConnectionId, kill: &[String]) -> Result<()> {
        let _making = self.making.write().await;
        if !self.hold().may_thaw(connection) {
            return Err(AgentError::Precondition(
                "the guest was restored and must be renewed first".into(),
            ));
        }
        let doomed = kill.iter().map(|id| self.container(id)).collect::<Result<Vec<_>>>()?;
        for container in &doomed {
            container.group().kill()?;
            container.group().wait_empty(FREEZE_DEADLINE).await?;
        }
        if self.hold().is_held() {
            Cgroup::all().set_frozen(false, FREEZE_DEADLINE).await?;
        }
        for container in &doomed {
            let ended = tokio::time::timeout(FREEZE_DEADLINE, container.wait("")).await;
            ended.map_err(|_| AgentError::Timeout(format!("wait for container {}", container.id())))??;
        }
        self.held.send_replace(false);
        *lock(&self.hold) = Hold::Free;
        Ok(())
    }

    /// Gives a restored guest its own identity. Returns how many connections of the parent were killed.
    ///
    /// # Errors
    /// When any step fails; then the guest must not go on.
    pub async fn renew(&self, request: &RenewRequest, steps: &mut Steps) -> Result<u32> {
        let _making = self.making.write().await;
        if !self.hold().is_held() {
            return Err(AgentError::Precondition("the guest is not quiesced".into()));
        }
        let container = self.container(&request.container_id)?;
        let init_pid = container
            .live_pid()
            .ok_or_else(|| AgentError::Precondition(format!("container {:?} has ended", container.id())))?;
        let root = self.root_path(container.id());
        let pids = self.containers().iter().filter_map(|c| c.live_pid()).collect();
        let closed = crate::renew::renew(request, init_pid, root.as_deref(), pids, steps).await?;
        if let Some(network) = request.network.as_ref() {
            self.configure_network(network)?;
        }
        let epoch = self.epoch();
        for port in self.containers().iter().flat_map(|c| c.ports(false)) {
            port.drop_before(epoch);
        }
        *lock(&self.hold) = Hold::Renewed;
        steps.done("network and streams");
        Ok(closed)
    }

    /// Sets up the guest's network interface, and every container's resolv.conf.
    ///
    /// # Errors
    /// When the configuration is malformed or the kernel refuses.
    pub fn configure_network(&self, config: &NetworkConfig) -> Result<()> {
        crate::network::configure(config)?;
        if config.resolv_conf.is_empty() {
            return Ok(());
        }
        lock(&self.resolv_conf).clone_from(&config.resolv_conf);
        for root in lock(&self.roots).values() {
            let root = crate::in_root::InRoot::open(&root.path)?;
            root.write(Path::new("/etc/resolv.conf"), &config.resolv_conf, 0o644)?;
        }
        Ok(())
    }
}

/// Freezes every container, and makes sure that none has a process elsewhere.
async fn freeze_all() -> Result<()> {
    Cgroup::all().set_frozen(true, FREEZE_DEADLINE).await?;
    if std::process::id() != 1 {
        // Not in a guest: there are others than containers.
        return Ok(());
    }
    let stray = crate::strays::find(Path::new("/proc"), &format!("/{}", crate::cgroup::PARENT))
        .map_err(|error| AgentError::io("look for processes outside the containers' control group", error))?;
    match stray {
        None => Ok(()),
        Some((pid, name)) => Err(AgentError::Precondition(format!(
            "process {pid} ({name:?}) has left the containers' control group and cannot be held still"
        ))),
    }
}

/// No state is left half changed when a holder panics: every change is a single assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_made_while_the_guest_is_held() {
        let agent = Agent::default();
        *lock(&agent.hold) = Hold::Held(1);
        let made = agent.create("c", "/nowhere".into(), Wanted::default()).await;
        assert!(matches!(made, Err(AgentError::Precondition(_))));
        assert!(matches!(agent.quiesce(2).await, Err(AgentError::Precondition(_))));
    }

    #[tokio::test]
    async fn a_restored_guest_is_not_thawed_by_a_stranger() {
        let agent = Agent::default();
        *lock(&agent.hold) = Hold::Held(1);
        assert!(matches!(agent.thaw(2, &[]).await, Err(AgentError::Precondition(_))));
        assert_eq!(agent.hold(), Hold::Held(1));
    }

    #[tokio::test]
    async fn a_guest_that_runs_is_not_renewed() {
        let agent = Agent::default();
        let renewed = agent.renew(&RenewRequest::new(), &mut Steps::default()).await;
        assert!(matches!(renewed, Err(AgentError::Precondition(_))));
    }

    #[tokio::test]
    async fn a_create_that_fails_leaves_the_id_free() {
        let agent = Agent::default();
        assert!(matches!(
            agent.create("../x", "/b".into(), Wanted::default()).await,
            Err(AgentError::Invalid(_))
        ));
        assert!(lock(&agent.containers).is_empty());
        assert!(matches!(agent.container("c"), Err(AgentError::NotFound { .. })));
        assert!(agent.release("c").is_ok(), "releasing what is not there is fine");
    }
}
