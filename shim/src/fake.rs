//! A VMM, an agent and a containerd that need no KVM, no guest and no daemon; for tests.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use checkpoint::memory::{Extent, MemoryIndex};
use checkpoint::rootfs::RootfsDescription;
use protocol::containerd::api::{
    CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    Mount, StartRequest, StartResponse, StateRequest, StateResponse, Status, WaitRequest, WaitResponse,
};
use protocol::containerd::shim::events::ForwardRequest;
use protocol::containerd::shim_async::{Events, Task, create_events, create_task};
use protocol::containerd::ttrpc::{
    self, r#async::TtrpcContext, asynchronous::Server, asynchronous::transport::Listener,
};
use protocol::guest::{
    InfoRequest, InfoResponse, PrepareContainerRequest, PrepareContainerResponse, QuiesceRequest, QuiesceResponse,
    ReleaseContainerRequest, RenewRequest, RenewResponse, ThawRequest,
};
use protocol::guest_ttrpc::{Guest, create_guest};
use protocol::{StreamHeader, StreamKind, ports};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::watch;
use vmm::control::{DiskBacking, DiskConfig, Reply, Request, SaveReport};

use crate::boot::GuestImage;
use crate::events::Publisher;
use crate::launch::Surroundings;
use crate::sandbox::Sandbox;
use crate::vm::{Vm, VmError};

/// 64 MiB, the least a machine can have.
const PAGES: u64 = (64 << 20) / 4096;

type ExitOf = watch::Sender<Option<u32>>;

/// What the fakes share.
#[derive(Default)]
pub(crate) struct World {
    /// What was asked of the guest and the VMM, in order.
    pub(crate) calls: Mutex<Vec<String>>,
    /// Calls that are refused, with the words.
    pub(crate) refuse: Mutex<HashMap<String, String>>,
    exits: Mutex<HashMap<(String, String), ExitOf>>,
}

impl World {
    fn call(&self, name: &str) -> ttrpc::Result<()> {
        self.calls.lock().unwrap().push(name.to_owned());
        match self.refuse.lock().unwrap().get(name) {
            Some(words) => Err(ttrpc::Error::RpcStatus(ttrpc::get_status(
                ttrpc::Code::UNKNOWN,
                words.clone(),
            ))),
            None => Ok(()),
        }
    }

    fn exit_of(&self, container: &str, exec: &str) -> ExitOf {
        let mut exits = self.exits.lock().unwrap();
        exits
            .entry((container.to_owned(), exec.to_owned()))
            .or_insert_with(|| watch::Sender::new(None))
            .clone()
    }

    /// Ends a guest process.
    pub(crate) fn exit(&self, container: &str, exec: &str, status: u32) {
        self.exit_of(container, exec).send_replace(Some(status));
    }

    /// How often something was asked.
    pub(crate) fn count(&self, name: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|call| *call == name).count()
    }
}

struct FakeAgent(Arc<World>);

#[async_trait]
impl Task for FakeAgent {
    async fn create(&self, _: &TtrpcContext, _: CreateTaskRequest) -> ttrpc::Result<CreateTaskResponse> {
        self.0.call("create")?;
        Ok(CreateTaskResponse::new())
    }
    async fn start(&self, _: &TtrpcContext, _: StartRequest) -> ttrpc::Result<StartResponse> {
        self.0.call("start")?;
        Ok(StartResponse::new())
    }
    async fn exec(&self, _: &TtrpcContext, _: ExecProcessRequest) -> ttrpc::Result<Empty> {
        self.0.call("exec")?;
        Ok(Empty::new())
    }
    async fn delete(&self, _: &TtrpcContext, _: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        self.0.call("delete")?;
        Ok(DeleteResponse::new())
    }
    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        self.0.call("kill")?;
        self.0.exit(&request.id, &request.exec_id, 128 + request.signal);
        Ok(Empty::new())
    }
    async fn state(&self, _: &TtrpcContext, _: StateRequest) -> ttrpc::Result<StateResponse> {
        Ok(StateResponse {
            status: Status::RUNNING.into(),
            ..Default::default()
        })
    }
    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let mut exit = self.0.exit_of(&request.id, &request.exec_id).subscribe();
        let status = exit.wait_for(Option::is_some).await.map_or(0, |e| e.unwrap_or(0));
        Ok(WaitResponse {
            exit_status: status,
            ..Default::default()
        })
    }
}

#[async_trait]
impl Guest for FakeAgent {
    async fn info(&self, _: &TtrpcContext, _: InfoRequest) -> ttrpc::Result<InfoResponse> {
        self.0.call("info")?;
        Ok(InfoResponse {
            generation: protocol::GENERATION,
            kernel_release: "6.12".into(),
            ..Default::default()
        })
    }
    async fn prepare_container(
        &self,
        _: &TtrpcContext,
        _: PrepareContainerRequest,
    ) -> ttrpc::Result<PrepareContainerResponse> {
        self.0.call("prepare")?;
        Ok(PrepareContainerResponse {
            bundle: "/b".into(),
            ..Default::default()
        })
    }
    async fn release_container(
        &self,
        _: &TtrpcContext,
        _: ReleaseContainerRequest,
    ) -> ttrpc::Result<protocol::guest::Empty> {
        self.0.call("release")?;
        Ok(protocol::guest::Empty::new())
    }
    async fn quiesce(&self, _: &TtrpcContext, _: QuiesceRequest) -> ttrpc::Result<QuiesceResponse> {
        self.0.call("quiesce")?;
        Ok(QuiesceResponse::new())
    }
    async fn thaw(&self, _: &TtrpcContext, _: ThawRequest) -> ttrpc::Result<protocol::guest::Empty> {
        self.0.call("thaw")?;
        Ok(protocol::guest::Empty::new())
    }
    async fn renew(&self, _: &TtrpcContext, _: RenewRequest) -> ttrpc::Result<RenewResponse> {
        self.0.call("renew")?;
        Ok(RenewResponse::new())
    }
}

/// A machine whose guest is [`FakeAgent`].
pub(crate) struct FakeVm {
    world: Arc<World>,
    ended: watch::Sender<Option<String>>,
}

impl FakeVm {
    async fn serve(world: Arc<World>, stream: UnixStream) {
        let agent = Arc::new(FakeAgent(world));
        let mut server = Server::new()
            .add_listener(Listener::new(tokio_stream::once(Ok(stream))))
            .register_service(create_task(agent.clone()))
            .register_service(create_guest(agent));
        server.start().await.unwrap();
        std::future::pending::<()>().await;
    }

    /// Output is one line for each stream, after which it ends with the process; input is read and forgotten.
    async fn serve_stream(world: Arc<World>, stream: UnixStream) {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let header: StreamHeader = serde_json::from_str(&line).unwrap();
        stream.write_all(b"ok\n").await.unwrap();
        if header.stream == StreamKind::Stdin {
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            return;
        }
        stream
            .write_all(format!("{:?}\n", header.stream).as_bytes())
            .await
            .unwrap();
        let mut exit = world.exit_of(&header.container_id, &header.exec_id).subscribe();
        let _ = exit.wait_for(Option::is_some).await;
    }

    fn save(&self, request: &vmm::control::SaveRequest, fds: Vec<OwnedFd>) {
        let mut files: Vec<fs::File> = fds.into_iter().map(Into::into).collect();
        files[request.state].write_all(b"state").unwrap();
        files[request.memory].write_all(&[7; 4096]).unwrap();
        let extent = Extent {
            start: 1,
            pages: 1,
            source: 0,
            source_page: 0,
        };
        let index = MemoryIndex::full(PAGES, 4096, vec![extent]).unwrap().encode().unwrap();
        files[request.memory_index].write_all(&index).unwrap();
    }
}

#[async_trait]
impl Vm for FakeVm {
    fn pid(&self) -> u32 {
        4242
    }

    fn network_namespace(&self) -> Option<PathBuf> {
        None
    }

    async fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Result<Reply, VmError> {
        if let Some(reason) = self.ended.borrow().clone() {
            return Err(VmError::Gone(reason));
        }
        let name = match &request {
            Request::Boot(boot) => {
                size_active(&boot.disks, &fds);
                "boot"
            }
            Request::Restore(restore) => {
                size_active(&restore.disks, &fds);
                "restore"
            }
            Request::Resume => "resume",
            Request::Save(_) => "save",
            Request::FinishSave => "finish",
            Request::Stop => "stop",
            _ => "other",
        };
        if let Err(ttrpc::Error::RpcStatus(status)) = self.world.call(name) {
            return Err(VmError::Refused(status.message().to_owned()));
        }
        Ok(match request {
            Request::Save(save) => {
                self.save(&save, fds);
                Reply::Saving { pause_us: 1 }
            }
            Request::FinishSave => Reply::Saved(SaveReport {
                memory_bytes: 4096,
                ..SaveReport::default()
            }),
            _ => Reply::Done,
        })
    }

    async fn connect(&self, port: u32) -> Result<UnixStream, VmError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let world = self.world.clone();
        let mut ended = self.ended.subscribe();
        tokio::spawn(async move {
            let work = async {
                if port == ports::RPC {
                    Self::serve(world, theirs).await
                } else {
                    Self::serve_stream(world, theirs).await
                }
            };
            tokio::select! { () = work => {}, _ = ended.wait_for(Option::is_some) => {} }
        });
        Ok(ours)
    }

    async fn ready(&self) -> Result<(), VmError> {
        Ok(())
    }

    async fn ended(&self) -> String {
        let mut ended = self.ended.subscribe();
        ended.wait_for(Option::is_some).await.unwrap().clone().unwrap()
    }

    async fn kill(&self) {
        self.world.calls.lock().unwrap().push("killed".into());
        self.ended.send_if_modified(|ended| {
            let first = ended.is_none();
            ended.get_or_insert_with(|| "killed".into());
            first
        });
    }
}

/// The VMM gives an empty active layer the size of its disk.
fn size_active(disks: &[DiskConfig], fds: &[OwnedFd]) {
    let DiskBacking::Writable { size_bytes, active, .. } = &disks[1].backing else {
        panic!("{disks:?}")
    };
    let file = |place: usize| fs::File::from(fds[place].try_clone().unwrap());
    file(active.data).set_len(*size_bytes).unwrap();
    file(active.bitmap).set_len(size_bytes / 4096 / 8).unwrap();
}

struct FakeContainerd(Arc<Mutex<Vec<String>>>);

#[async_trait]
impl Events for FakeContainerd {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        self.0
            .lock()
            .unwrap()
            .push(request.envelope.topic.trim_start_matches("/tasks/").to_owned());
        Ok(Empty::new())
    }
}

/// A sandbox among fakes.
pub(crate) struct Stage {
    /// Its files.
    pub(crate) dir: tempfile::TempDir,
    /// What the fakes share.
    pub(crate) world: Arc<World>,
    /// The machine.
    pub(crate) vm: Arc<FakeVm>,
    /// Under test.
    pub(crate) sandbox: Arc<Sandbox>,
    /// Its own files, when `dir` is that of another stage.
    pub(crate) own: Option<tempfile::TempDir>,
    publisher: Publisher,
    topics: Arc<Mutex<Vec<String>>>,
    _server: Server,
}

impl Stage {
    /// Sets the stage; needs mkfs.erofs and mkfs.ext4.
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = Arc::new(World::default());
        let topics = Arc::new(Mutex::new(Vec::new()));
        let address = format!("unix://{}/events", dir.path().display());
        let containerd = create_events(Arc::new(FakeContainerd(topics.clone())));
        let mut server = Server::new().bind(&address).unwrap().register_service(containerd);
        server.start().await.unwrap();
        let guest = dir.path().join("guest");
        fs::create_dir(&guest).unwrap();
        for name in ["vmlinux", "initramfs"] {
            fs::write(guest.join(name), name).unwrap();
        }
        let vm = Arc::new(FakeVm {
            world: world.clone(),
            ended: watch::Sender::new(None),
        });
        let publisher = Publisher::start("test", Some(address));
        let around = Surroundings {
            namespace: "test".into(),
            image: GuestImage::at(guest),
            console: dir.path().join("console"),
            boot_limit: Duration::from_secs(10),
        };
        let sandbox = Sandbox::new(Ok(vm.clone()), publisher.clone(), around);
        Self {
            dir,
            world,
            vm,
            sandbox,
            own: None,
            publisher,
            topics,
            _server: server,
        }
    }

    /// Topics containerd has seen.
    pub(crate) async fn topics(&self) -> Vec<String> {
        self.publisher.flush(Duration::from_secs(10)).await;
        self.topics.lock().unwrap().clone()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A Create request on a snapshot of our snapshotter, forked from `checkpoints`.
    pub(crate) fn request(&self, id: &str, args: &str, checkpoints: &[PathBuf]) -> CreateTaskRequest {
        let root = self.path("root");
        let layer = root.join("snapshots/1");
        fs::create_dir_all(layer.join("fs")).unwrap();
        fs::write(layer.join("fs/file"), "content").unwrap();
        let active = root.join("snapshots").join(id);
        fs::create_dir_all(&active).unwrap();
        let description = RootfsDescription {
            version: 1,
            root,
            layers: vec![layer],
            checkpoints: checkpoints.to_vec(),
            writable_bytes: 64 << 20,
        };
        description.write(&active).unwrap();
        let bundle = self.path(&format!("bundle-{id}"));
        fs::create_dir_all(bundle.join("rootfs")).unwrap();
        let spec = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":{args},"cwd":"/","user":{{"uid":0,"gid":0}}}},
            "annotations":{{"io.ramet.memory_mib":"64"}},"linux":{{"namespaces":[{{"type":"network"}}]}}}}"#
        );
        fs::write(bundle.join("config.json"), spec).unwrap();
        let mut mount = Mount::new();
        mount.type_ = "overlay".into();
        mount.source = active.display().to_string();
        let mut request = CreateTaskRequest::new();
        request.id = id.to_owned();
        request.bundle = bundle.display().to_string();
        request.rootfs = vec![mount];
        request.stdout = format!("file://{}", self.path(&format!("{id}.out")).display());
        request
    }

    /// What a process printed.
    pub(crate) fn output(&self, id: &str) -> String {
        fs::read_to_string(self.path(&format!("{id}.out"))).unwrap_or_default()
    }

    /// Where a committed checkpoint snapshot would be.
    pub(crate) fn checkpoint_snapshot(&self, name: &str) -> PathBuf {
        let snapshot = self.path("root").join("snapshots").join(name);
        fs::create_dir_all(&snapshot).unwrap();
        snapshot
    }
}

/// Names in a directory.
pub(crate) fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
