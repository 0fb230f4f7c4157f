//! From a Create request to a container that waits in its guest: cold boot, or restore and renewal.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use checkpoint::directory::Checkpoint;
use checkpoint::layers::LayerImage;
use checkpoint::manifest::{CheckpointManifest, ContainerInfo};
use oci_spec::runtime::Spec;
use protocol::containerd::api::{CreateTaskRequest, ExecProcessRequest, Status};
use protocol::containerd::protobuf::well_known_types::any::Any;
use protocol::guest::PrepareContainerRequest;
use tracing::{debug, info};
use vmm::control::Request;

use crate::boot::{self, GuestImage, Shape};
use crate::checkpoint::{Machine, read_pointer};
use crate::disks::{READ_ONLY, WRITABLE, WritableDisk};
use crate::error::{Error, Result};
use crate::guest::{Guest, GuestError, GuestProcess, while_alive};
use crate::hooks::Hooks;
use crate::net;
use crate::restore::{self, ForkMode};
use crate::rootfs::{self, Rootfs};
use crate::spec::{self, GuestSpec, HostPath};
use crate::state_dir;
use crate::stdio::StdioPaths;
use crate::vm::{Vm, VmError};
use crate::volumes::{Volumes, Where};

/// Largest `config.json`, in bytes.
const MAX_SPEC: u64 = 4 << 20;
/// Type of an exec's spec, as containerd names it.
const PROCESS_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";
/// What stands for "attached over a stream connection" in requests to the agent.
const STREAM: &str = "stream";

/// What a sandbox knows before its first container.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// containerd's namespace.
    pub namespace: String,
    /// Kernel and initramfs.
    pub image: GuestImage,
    /// Where the console goes.
    pub console: PathBuf,
    /// How long a guest may take to boot.
    pub boot_limit: Duration,
}

impl Surroundings {
    /// The file that says that poststop hooks are due.
    #[must_use]
    pub fn hooks_mark(&self) -> PathBuf {
        self.console.with_file_name(HOOKS_MARK)
    }
}

/// Its name in the sandbox's state directory.
pub const HOOKS_MARK: &str = "poststop";

/// A container that waits in its guest.
pub struct Launched {
    /// Its agent.
    pub guest: Guest,
    /// Its machine.
    pub machine: Machine,
    /// Its init, as the guest knows it.
    pub init: GuestProcess,
    /// What a manifest says of it.
    pub info: ContainerInfo,
    /// How it goes on, if it is a fork.
    pub fork: Option<ForkMode>,
    /// It was checkpointed while paused.
    pub resume_after_thaw: bool,
    /// See [`crate::task::Container::exec_prefix`].
    pub exec_prefix: String,
    /// Its hooks, if some run when it starts.
    pub hooks: Option<Hooks>,
    /// What it sees of this host.
    pub volumes: Volumes,
}

/// Makes the machine and the container in it.
///
/// # Errors
/// The machine may be left running; the caller ends it.
pub async fn launch(vm: &dyn Vm, around: &Surroundings, request: &CreateTaskRequest) -> Result<Launched> {
    let begun = Instant::now();
    let bundle = PathBuf::from(&request.bundle);
    let host = read_spec(&bundle)?;
    net::check(&host)?;
    let hooks = Hooks::of(&host, &request.id, &bundle, vm.pid(), around.hooks_mark())?;
    blocking({
        let hooks = hooks.clone();
        move || hooks.create()
    })
    .await?;
    let rootfs = rootfs::classify(&request.rootfs)?;
    let (host, prepared) = blocking({
        let (bundle, checkpoint) = (bundle.clone(), request.checkpoint.clone());
        move || {
            let prepared = prepare(&host, &rootfs, &bundle, &checkpoint)?;
            Ok((host, prepared))
        }
    })
    .await?;
    info!(elapsed = ?begun.elapsed(), "host side prepared");
    let launch = Launch {
        vm,
        around,
        request,
        host,
    };
    let mut launched = match prepared {
        Prepared::Cold { shape, images, disk } => launch.cold(shape, images, disk).await?,
        Prepared::Fork {
            checkpoint,
            images,
            disk,
            mode,
        } => launch.fork(*checkpoint, images, disk, mode).await?,
    };
    launched.hooks = Some(hooks).filter(Hooks::has_poststart);
    Ok(launched)
}

/// Runs what blocks beside the event loop.
///
/// # Errors
/// Those of `work`.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::Internal(e.to_string()))?
}

/// Reads and checks a bundle's `config.json`.
///
/// # Errors
/// It cannot be read, or is no spec.
pub fn read_spec(bundle: &Path) -> Result<Spec> {
    let path = bundle.join("config.json");
    let mut bytes = Vec::new();
    File::open(&path)
        .and_then(|f| f.take(MAX_SPEC).read_to_end(&mut bytes))
        .map_err(Error::file("read", &path))?;
    Ok(spec::parse(&bytes)?)
}

/// Everything of this host that the machine needs, checked and made, before anything starts.
enum Prepared {
    Cold {
        shape: Shape,
        images: Vec<LayerImage>,
        disk: WritableDisk,
    },
    Fork {
        checkpoint: Box<Checkpoint>,
        images: Vec<LayerImage>,
        disk: Option<WritableDisk>,
        mode: ForkMode,
    },
}

fn prepare(host: &Spec, rootfs: &Rootfs, bundle: &Path, pointer: &str) -> Result<Prepared> {
    let found = match (rootfs, pointer) {
        (Rootfs::Ours { description, .. }, "") => restore::open(description)?,
        (_, "") => None,
        (_, path) => {
            let pointer = read_pointer(Path::new(path))?;
            Some(restore::open_directory(&pointer.directory, &pointer.bases)?)
        }
    };
    let Some(checkpoint) = found else {
        let shape = Shape::of(host)?;
        let begun = Instant::now();
        let images = rootfs::read_only_disk(rootfs, bundle)?;
        debug!(elapsed = ?begun.elapsed(), "layer images");
        let begun = Instant::now();
        let disk = boot::writable_disk(rootfs, bundle)?;
        debug!(elapsed = ?begun.elapsed(), "writable disk");
        return Ok(Prepared::Cold { shape, images, disk });
    };
    let parent = checkpoint
        .manifest
        .containers
        .first()
        .ok_or_else(|| Error::Internal("a checkpoint without container".into()))?;
    let mode = ForkMode::of(host, parent)?;
    let images = rootfs::read_only_disk(rootfs, bundle)?;
    restore::check_read_only(&checkpoint, &images)?;
    let directory = match rootfs {
        Rootfs::Ours { snapshot, .. } => snapshot.join("disk"),
        Rootfs::Foreign(_) => rootfs::work_dir(bundle).join("disk"),
    };
    let disk = WritableDisk::forked(&directory, &checkpoint)?;
    Ok(Prepared::Fork {
        checkpoint: Box::new(checkpoint),
        images,
        disk,
        mode,
    })
}

struct Launch<'a> {
    vm: &'a dyn Vm,
    around: &'a Surroundings,
    request: &'a CreateTaskRequest,
    host: Spec,
}

impl Launch<'_> {
    async fn cold(&self, shape: Shape, images: Vec<LayerImage>, disk: WritableDisk) -> Result<Launched> {
        let id = self.request.id.clone();
        let rewritten = self.rewrite(&id)?;
        let volumes = Volumes::start(rewritten.volumes.clone()).await?;
        let (boot, fds) = boot::request(shape, &self.around.image, &images, &disk, &self.around.console)?;
        self.vm
            .request(Request::Boot(boot), fds.into_inner())
            .await
            .map_err(explain)?;
        debug!("machine started");
        self.wait_ready().await?;
        debug!("agent is ready");
        let guest = Guest::new(self.vm.connect(protocol::ports::RPC).await?);
        let info = while_alive(self.vm, guest.info()).await?;
        info!(
            kernel = info.kernel_release,
            generation = info.generation,
            "guest is up"
        );
        volumes.attach(self.vm, info.generation, &id, Where::InSpec).await?;
        self.create_container(&guest, &id, rewritten, |prepare| {
            prepare.read_only_disk = READ_ONLY.to_owned();
            prepare.writable_disk = WRITABLE.to_owned();
        })
        .await?;
        let machine = Machine {
            shape,
            guest_kernel: info.kernel_release,
            agent_generation: info.generation,
            nets: 1,
            read_only: images,
            disk: Some(disk),
            base: None,
            base_directories: Vec::new(),
        };
        Ok(Launched {
            guest,
            machine,
            init: GuestProcess {
                container: id.clone(),
                exec: String::new(),
            },
            info: self.container_info(&id),
            fork: None,
            resume_after_thaw: false,
            exec_prefix: String::new(),
            hooks: None,
            volumes,
        })
    }

    async fn fork(
        &self,
        checkpoint: Checkpoint,
        images: Vec<LayerImage>,
        disk: Option<WritableDisk>,
        mode: ForkMode,
    ) -> Result<Launched> {
        let manifest = &checkpoint.manifest;
        let parent = manifest
            .containers
            .first()
            .ok_or_else(|| Error::Internal("a checkpoint without container".into()))?;
        let renewal = restore::renewal(&self.host, &self.request.id, &self.around.namespace, manifest, parent)?;
        let begun = Instant::now();
        let (request, fds) = restore::request(&checkpoint, &images, disk.as_ref(), &self.around.console)?;
        self.vm
            .request(Request::Restore(request), fds.into_inner())
            .await
            .map_err(explain)?;
        self.vm.request(Request::Resume, Vec::new()).await?;
        let guest = Guest::new(self.vm.connect(protocol::ports::RPC).await?);
        let restored = begun.elapsed();
        let status = while_alive(self.vm, guest.renew(&renewal)).await?;
        info!(checkpoint = manifest.id.as_str(), ?mode, ?restored, renewed = ?begun.elapsed(), "fork renewed");
        let parent_init = guest_process(&parent.guest_id);
        let (init, volumes) = self.forked_init(&guest, manifest, &parent_init, mode).await?;
        let resume_after_thaw = mode == ForkMode::Resume && status == Status::PAUSED;
        let machine = Machine {
            shape: Shape {
                vcpus: manifest.vm.vcpus,
                memory_bytes: manifest.vm.memory_bytes,
            },
            guest_kernel: manifest.vm.guest_kernel.clone(),
            agent_generation: manifest.vm.agent_generation,
            nets: manifest.vm.nets,
            read_only: images,
            disk,
            base: Some(manifest.id.clone()),
            base_directories: directories(&checkpoint),
        };
        Ok(Launched {
            guest,
            machine,
            info: self.container_info(&manifest_name(&init)),
            init,
            fork: Some(mode),
            resume_after_thaw,
            exec_prefix: exec_prefix(manifest),
            volumes,
            hooks: None,
        })
    }

    /// The process that is the fork's init, and what it sees of this host.
    async fn forked_init(
        &self,
        guest: &Guest,
        manifest: &CheckpointManifest,
        parent: &GuestProcess,
        mode: ForkMode,
    ) -> Result<(GuestProcess, Volumes)> {
        let prefix = exec_prefix(manifest);
        let generation = manifest.vm.agent_generation;
        if mode == ForkMode::Fresh {
            return self.start_over(guest, generation, &parent.container, &prefix).await;
        }
        // What the parent had mounted was left behind; these are the fork's own.
        let volumes = Volumes::start(spec::volumes(&self.host, &look)?).await?;
        volumes
            .attach(self.vm, generation, &parent.container, Where::InContainer)
            .await?;
        let init = match mode {
            ForkMode::Exec => {
                let name = format!("{prefix}init");
                self.register_exec(guest, &parent.container, &name).await?
            }
            ForkMode::Resume | ForkMode::Fresh => parent.clone(),
        };
        Ok((init, volumes))
    }

    /// The new command beside the restored processes; they stay frozen until Start.
    async fn register_exec(&self, guest: &Guest, container: &str, exec: &str) -> Result<GuestProcess> {
        let process = self.host.process().clone().ok_or(spec::SpecError::NoProcess)?;
        let mut any = Any::new();
        any.type_url = PROCESS_TYPE.to_owned();
        any.value = serde_json::to_vec(&process).map_err(|e| Error::Internal(e.to_string()))?;
        let stdio = StdioPaths {
            stdin: self.request.stdin.clone(),
            stdout: self.request.stdout.clone(),
            stderr: self.request.stderr.clone(),
            terminal: self.request.terminal,
        };
        let named = GuestProcess {
            container: container.to_owned(),
            exec: exec.to_owned(),
        };
        let request = exec_request(&named, Some(any), &stdio)?;
        while_alive(self.vm, guest.exec(&request))
            .await
            .map_err(|e| runtime("create", e))?;
        Ok(named)
    }

    /// A new init over the files of the restored container, whose processes end before they run an instruction.
    async fn start_over(
        &self,
        guest: &Guest,
        generation: u32,
        parent: &str,
        prefix: &str,
    ) -> Result<(GuestProcess, Volumes)> {
        let id = format!("{prefix}{}", self.request.id);
        let rewritten = self.rewrite(&id)?;
        let volumes = Volumes::start(rewritten.volumes.clone()).await?;
        volumes.attach(self.vm, generation, &id, Where::InSpec).await?;
        while_alive(self.vm, guest.thaw(&[parent.to_owned()])).await?;
        self.create_container(guest, &id, rewritten, |prepare| {
            prepare.reuse_rootfs_of = parent.to_owned()
        })
        .await?;
        let init = GuestProcess {
            container: id,
            exec: String::new(),
        };
        Ok((init, volumes))
    }

    fn rewrite(&self, guest_id: &str) -> Result<GuestSpec> {
        Ok(spec::for_guest(&self.host, guest_id, &look)?)
    }

    async fn create_container(
        &self,
        guest: &Guest,
        guest_id: &str,
        rewritten: GuestSpec,
        disks: impl FnOnce(&mut PrepareContainerRequest),
    ) -> Result<()> {
        let mut prepare = PrepareContainerRequest::new();
        prepare.container_id = guest_id.to_owned();
        prepare.spec_json = serde_json::to_vec(&rewritten.spec).map_err(|e| Error::Internal(e.to_string()))?;
        disks(&mut prepare);
        let bundle = while_alive(self.vm, guest.prepare_container(&prepare))
            .await
            .map_err(|e| runtime("create", e))?;
        debug!("root filesystem prepared");
        let mut create = CreateTaskRequest::new();
        create.id = guest_id.to_owned();
        create.bundle = bundle;
        create.terminal = self.request.terminal;
        create.stdin = mark(&self.request.stdin);
        create.stdout = mark(&self.request.stdout);
        create.stderr = mark(&self.request.stderr);
        while_alive(self.vm, guest.create(&create))
            .await
            .map_err(|e| runtime("create", e))
    }

    fn container_info(&self, guest_id: &str) -> ContainerInfo {
        ContainerInfo {
            guest_id: guest_id.to_owned(),
            container_id: self.request.id.clone(),
            args: spec::args(&self.host),
            terminal: self.request.terminal,
            read_only_disk: READ_ONLY.to_owned(),
            writable_disk: WRITABLE.to_owned(),
        }
    }

    async fn wait_ready(&self) -> Result<()> {
        let limit = self.around.boot_limit;
        match tokio::time::timeout(limit, self.vm.ready()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Error::Internal(format!(
                "the guest did not come up: {error}; the end of its console: {}",
                state_dir::tail(&self.around.console, 800)
            ))),
            Err(_) => {
                let console = state_dir::tail(&self.around.console, 800);
                Err(VmError::BootTimeout {
                    seconds: limit.as_secs(),
                    console,
                }
                .into())
            }
        }
    }
}

/// What execs of a fork are called, so that they are told from its parent's.
fn exec_prefix(manifest: &CheckpointManifest) -> String {
    format!("{}-", manifest.id.as_str().get(..8).unwrap_or_default())
}

/// Directories of the checkpoint and of those it takes files from, itself last.
fn directories(checkpoint: &Checkpoint) -> Vec<PathBuf> {
    let layers = checkpoint
        .disks
        .iter()
        .flat_map(|disk| disk.layers.iter().map(|layer| &layer.data));
    let mut found: Vec<PathBuf> = Vec::new();
    for path in checkpoint.memory_files.iter().chain(layers) {
        if let Some(directory) = path.parent()
            && directory != checkpoint.directory
            && !found.iter().any(|d| d == directory)
        {
            found.push(directory.to_owned());
        }
    }
    found.push(checkpoint.directory.clone());
    found
}

/// A process as a manifest writes it; see [`guest_process`].
fn manifest_name(process: &GuestProcess) -> String {
    if process.exec.is_empty() {
        process.container.clone()
    } else {
        format!("{}/{}", process.container, process.exec)
    }
}

/// The guest's name of a process as a manifest writes it: `container` or `container/exec`.
fn guest_process(guest_id: &str) -> GuestProcess {
    let (container, exec) = guest_id.split_once('/').unwrap_or((guest_id, ""));
    GuestProcess {
        container: container.to_owned(),
        exec: exec.to_owned(),
    }
}

/// Adds what the user can do when KVM may be the reason.
fn explain(error: VmError) -> Error {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    let kvm = opened.err().map_or_else(String::new, |e| format!(": {e}"));
    let remedy = format!("see whether /dev/kvm can be used{kvm} (`ramet doctor` checks this machine)");
    match error {
        VmError::Gone(reason) => VmError::Gone(format!("{reason}; {remedy}")).into(),
        VmError::Refused(reason) if !kvm.is_empty() || reason.to_lowercase().contains("kvm") => {
            VmError::Refused(format!("{reason}; {remedy}")).into()
        }
        other => other.into(),
    }
}

/// The agent's refusal in the words of an OCI runtime; a lost connection stays one.
#[must_use]
pub fn runtime(action: &'static str, error: GuestError) -> Error {
    match error {
        GuestError::Refused { message, .. } => Error::Runtime { action, message },
        other => other.into(),
    }
}

/// The request that registers an exec: the process loses what belongs to this host.
///
/// # Errors
/// The spec is no process.
pub fn exec_request(process: &GuestProcess, spec: Option<Any>, stdio: &StdioPaths) -> Result<ExecProcessRequest> {
    let mut any = spec.unwrap_or_default();
    let parsed =
        serde_json::from_slice(&any.value).map_err(|e| Error::InvalidArgument(format!("spec of the exec: {e}")))?;
    any.value = serde_json::to_vec(&spec::process_for_guest(parsed)).map_err(|e| Error::Internal(e.to_string()))?;
    let mut request = ExecProcessRequest::new();
    request.id = process.container.clone();
    request.exec_id = process.exec.clone();
    request.terminal = stdio.terminal;
    request.stdin = mark(&stdio.stdin);
    request.stdout = mark(&stdio.stdout);
    request.stderr = mark(&stdio.stderr);
    request.spec = Some(any).into();
    Ok(request)
}

fn mark(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        STREAM.to_owned()
    }
}

fn look(path: &Path) -> HostPath {
    match fs::metadata(path) {
        Ok(m) if m.is_file() => HostPath::File,
        Ok(m) if m.is_dir() => HostPath::Directory,
        Ok(_) => HostPath::Other,
        Err(_) => HostPath::Missing,
    }
}
