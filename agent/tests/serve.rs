//! The agent with real containers, without a VM: `ramet-agent serve` on Unix sockets.
//!
//! Needs root, cgroup2 at /sys/fs/cgroup, a root directory that pivot_root can leave, and a static busybox; where one is
//! missing (as on most development machines) the test says so and does nothing. The lab has all of them.

#![expect(clippy::expect_used, reason = "a test says what it expected")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use protobuf::MessageField;
use protobuf::well_known_types::any::Any;
use protocol::containerd::api;
use protocol::containerd::shim_async::TaskClient;
use protocol::containerd::types::task::Status;
use protocol::guest_ttrpc::GuestClient;
use protocol::{StreamHeader, StreamKind, guest};
use ttrpc::asynchronous::Client;
use ttrpc::context::Context;

/// A running agent and its directory.
struct Agent {
    process: Child,
    directory: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = std::fs::write("/sys/fs/cgroup/ramet/cgroup.kill", "1");
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Why this machine cannot run containers.
fn missing() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        Some("not root")
    } else if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        Some("no cgroup2 at /sys/fs/cgroup")
    } else if busybox().is_none() {
        Some("no static busybox")
    } else {
        None
    }
}

fn busybox() -> Option<PathBuf> {
    ["/bin/busybox", "/usr/bin/busybox"]
        .iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
}

impl Agent {
    fn start() -> Self {
        Self::run(&mut Command::new(env!("CARGO_BIN_EXE_ramet-agent")))
    }

    /// In a network of its own with an interface, and with a hostname of its own.
    fn start_apart() -> Self {
        let script = "ip link add far type veth peer name eth0 && ip link set far up && exec \"$0\" \"$@\"";
        let mut command = Command::new("unshare");
        Self::run(command.args(["--net", "--uts", "sh", "-c", script, env!("CARGO_BIN_EXE_ramet-agent")]))
    }

    fn run(command: &mut Command) -> Self {
        // A test that failed may have left the group frozen.
        let _ = std::fs::write("/sys/fs/cgroup/ramet/cgroup.freeze", "0");
        let directory = tempfile::tempdir().expect("a directory");
        let process = command
            .arg("serve")
            .arg(directory.path())
            .stdin(Stdio::null())
            .spawn()
            .expect("the agent starts");
        let agent = Self { process, directory };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !agent.path("streams.sock").exists() {
            assert!(Instant::now() < deadline, "the agent does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        agent
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn connect(&self) -> Client {
        let address = format!("unix://{}", self.path("rpc.sock").display());
        Client::connect(&address).await.expect("the agent accepts")
    }

    /// A bundle with a busybox root whose process is `args`.
    fn bundle(&self, id: &str, args: &[&str], terminal: bool) -> String {
        let bundle = self.path(id);
        let root = bundle.join("rootfs");
        for name in ["bin", "proc", "dev", "etc", "run", "tmp", "sys"] {
            std::fs::create_dir_all(root.join(name)).expect("a directory");
        }
        std::fs::copy(busybox().expect("looked for before"), root.join("bin/busybox")).expect("a file");
        for name in [
            "sh", "cat", "echo", "sleep", "seq", "stty", "true", "ip", "nc", "hostname",
        ] {
            symlink("busybox", root.join("bin").join(name)).expect("a link");
        }
        std::fs::write(root.join("etc/machine-id"), "old\n").expect("a file");
        let spec = serde_json::json!({
            "ociVersion": "1.1.0",
            "root": {"path": root, "readonly": false},
            "hostname": id,
            "process": process(args, terminal),
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                 "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            ],
            "linux": {
                "cgroupsPath": format!("/ramet/{id}"),
                "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "cgroup"}],
            },
        });
        std::fs::write(bundle.join("config.json"), spec.to_string()).expect("a file");
        bundle.to_str().expect("utf-8").to_owned()
    }

    fn attach(&self, container_id: &str, exec_id: &str, stream: StreamKind) -> UnixStream {
        let mut connection = UnixStream::connect(self.path("streams.sock")).expect("the agent accepts");
        let header = StreamHeader {
            container_id: container_id.into(),
            exec_id: exec_id.into(),
            stream,
        };
        writeln!(connection, "{}", serde_json::to_string(&header).expect("plain data")).expect("it is read");
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            let mut byte = [0];
            connection.read_exact(&mut byte).expect("an answer");
            answer.push(byte[0]);
        }
        assert_eq!(String::from_utf8_lossy(&answer), "ok\n");
        connection
    }
}

fn process(args: &[&str], terminal: bool) -> serde_json::Value {
    serde_json::json!({
        "terminal": terminal,
        "user": {"uid": 0, "gid": 0},
        "args": args,
        "env": ["PATH=/bin", "GREETING=hello"],
        "cwd": "/",
        "noNewPrivileges": true,
    })
}

fn ctx() -> Context {
    ttrpc::context::with_duration(Duration::from_secs(60))
}

fn create_request(id: &str, bundle: String, terminal: bool) -> api::CreateTaskRequest {
    api::CreateTaskRequest {
        id: id.into(),
        bundle,
        terminal,
        stdin: "in".into(),
        stdout: "out".into(),
        stderr: if terminal { String::new() } else { "err".into() },
        ..Default::default()
    }
}

fn message(error: &ttrpc::Error) -> &str {
    match error {
        ttrpc::Error::RpcStatus(status) => &status.message,
        other => panic!("not an answer: {other}"),
    }
}

async fn read_all(mut stream: UnixStream) -> String {
    tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("text");
        text
    })
    .await
    .expect("the thread does not panic")
}

/// Runs it on one thread, as the agent's own work.
fn on_this_thread(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(work);
}

/// Runs the cases one after the other: they share the control groups of the machine.
#[test]
fn real_containers() {
    if let Some(missing) = missing() {
        eprintln!("skipped: {missing}");
        return;
    }
    on_this_thread(async {
        let agent = Agent::start();
        let client = agent.connect().await;
        let task = TaskClient::new(client.clone());
        output_and_exit(&agent, &task).await;
        stdin_and_exec(&agent, &task).await;
        many_lines(&agent, &task).await;
        errors(&agent, &task).await;
        terminal(&agent, &task).await;
        quiesce_and_thaw(&agent, &task, client).await;
    });
}

/// Sets the machine's clock, to what it is: only where that was asked for, as in the lab.
#[test]
fn renewed_identity() {
    let asked = std::env::var_os("RAMET_LAB").is_some();
    if let Some(missing) = missing().or((!asked).then_some("RAMET_LAB is not set")) {
        eprintln!("skipped: {missing}");
        return;
    }
    on_this_thread(async {
        let agent = Agent::start_apart();
        let parent = agent.connect().await;
        renew(&agent, parent).await;
    });
}

fn network(address: &str, mac: &str) -> guest::NetworkConfig {
    guest::NetworkConfig {
        mac: mac.into(),
        mtu: 1400,
        addresses: vec![guest::Address {
            cidr: format!("{address}/24"),
            ..Default::default()
        }],
        routes: vec![guest::Route {
            gateway: "10.9.0.1".into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn identity(network: guest::NetworkConfig) -> guest::RenewRequest {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970");
    guest::RenewRequest {
        entropy: vec![9; 64],
        realtime_ns: i64::try_from(now.as_nanos()).expect("before 2262"),
        hostname: "fork-7".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        boot_id: "01234567-89ab-cdef-0123-456789abcdef".into(),
        network: MessageField::some(network),
        container_id: "fork".into(),
        fork_json: b"{\"id\":\"fork-7\"}".to_vec(),
        ..Default::default()
    }
}

async fn renew(agent: &Agent, parent: Client) {
    let task = TaskClient::new(parent.clone());
    let ours = GuestClient::new(parent);
    ours.configure_network(ctx(), &network("10.9.0.2", "02:00:00:00:00:02"))
        .await
        .expect("configured");
    start_talking(agent, &task).await;
    for round in 0..2 {
        renew_once(agent, &ours, round).await;
    }

    let look = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id /run/ramet/fork.json; ip addr show eth0; ip route";
    let out = exec(agent, &task, "fork", "look", &["sh", "-c", look])
        .await
        .expect("started");
    let text = read_all(out).await;
    for wanted in [
        "fork-7\n0123456789abcdef0123456789abcdef\n01234567-89ab-cdef-0123-456789abcdef\n{\"id\":\"fork-7\"}",
        "mtu 1400",
        "02:00:00:00:00:07",
        "10.9.0.7/24",
        "default via 10.9.0.1",
    ] {
        assert!(text.contains(wanted), "{wanted:?} in {text}");
    }
    assert!(!text.contains("10.9.0.2"), "{text}");
    kill(&task, "fork").await;
    delete(&task, "fork", "").await;

    // A fresh fork gets a new container, with a /proc of its own.
    run(agent, &task, "next", &["sleep", "1000"]).await;
    let out = exec(
        agent,
        &task,
        "next",
        "look",
        &["cat", "/proc/sys/kernel/random/boot_id"],
    )
    .await
    .expect("started");
    assert_eq!(read_all(out).await, "01234567-89ab-cdef-0123-456789abcdef\n");
    kill(&task, "next").await;
    delete(&task, "next", "").await;
}

async fn start_talking(agent: &Agent, task: &TaskClient) {
    let talk = "nc -l -p 9000 </dev/zero >/dev/null & sleep 0.5; nc 10.9.0.2 9000 </dev/zero >/dev/null & \
                nc -l -p 9001 </dev/zero >/dev/null & sleep 0.5; nc 127.0.0.1 9001 </dev/zero >/dev/null & \
                sleep 0.5; echo connected; sleep 1000";
    run(agent, task, "fork", &["sh", "-c", talk]).await;
    let out = agent.attach("fork", "", StreamKind::Stdout);
    let mut lines = BufReader::new(out).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "connected");
}

async fn renew_once(agent: &Agent, ours: &GuestClient, round: u32) {
    ours.quiesce(ctx(), &guest::QuiesceRequest::new())
        .await
        .expect("quiesced");
    let fork = GuestClient::new(agent.connect().await);
    assert!(fork.thaw(ctx(), &guest::ThawRequest::new()).await.is_err());
    let mut short = identity(network("10.9.0.7", "02:00:00:00:00:07"));
    short.entropy.clear();
    assert!(fork.renew(ctx(), &short).await.is_err(), "no entropy");
    assert!(
        fork.thaw(ctx(), &guest::ThawRequest::new()).await.is_err(),
        "the renewal failed"
    );
    let request = identity(network("10.9.0.7", "02:00:00:00:00:07"));
    let closed = fork.renew(ctx(), &request).await.expect("renewed").closed_connections;
    // Killing one end resets the other, which is here too. The connection on loopback stays.
    assert_eq!(closed > 0, round == 0, "{closed} in round {round}");
    fork.thaw(ctx(), &guest::ThawRequest::new()).await.expect("thawed");
}

async fn output_and_exit(agent: &Agent, task: &TaskClient) {
    let started = Instant::now();
    let bundle = agent.bundle("out", &["sh", "-c", "echo $GREETING; echo oops >&2; exit 3"], false);
    let pid = task
        .create(ctx(), &create_request("out", bundle, false))
        .await
        .expect("created")
        .pid;
    assert!(pid > 1);
    let (out, err) = (
        agent.attach("out", "", StreamKind::Stdout),
        agent.attach("out", "", StreamKind::Stderr),
    );
    start(task, "out").await;
    assert_eq!(read_all(out).await, "hello\n");
    assert_eq!(read_all(err).await, "oops\n");
    assert_eq!(wait(task, "out", "").await, 3);
    let state = task
        .state(
            ctx(),
            &api::StateRequest {
                id: "out".into(),
                ..Default::default()
            },
        )
        .await
        .expect("known");
    assert_eq!(
        (state.status.enum_value_or_default(), state.exit_status),
        (Status::STOPPED, 3)
    );
    delete(task, "out", "").await;
    assert!(!Path::new("/sys/fs/cgroup/ramet/out").exists());
    eprintln!("output_and_exit: {:?}", started.elapsed());
}

/// Creates and starts a container without a terminal.
async fn run(agent: &Agent, task: &TaskClient, id: &str, args: &[&str]) {
    let bundle = agent.bundle(id, args, false);
    task.create(ctx(), &create_request(id, bundle, false))
        .await
        .expect("created");
    start(task, id).await;
}

async fn start(task: &TaskClient, id: &str) {
    let request = api::StartRequest {
        id: id.into(),
        ..Default::default()
    };
    task.start(ctx(), &request).await.expect("started");
}

/// The exit status of a process.
async fn wait(task: &TaskClient, id: &str, exec_id: &str) -> u32 {
    let request = api::WaitRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    task.wait(ctx(), &request).await.expect("waited").exit_status
}

async fn delete(task: &TaskClient, id: &str, exec_id: &str) {
    let request = api::DeleteRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        ..Default::default()
    };
    task.delete(ctx(), &request).await.expect("deleted");
}

async fn kill(task: &TaskClient, id: &str) {
    let request = api::KillRequest {
        id: id.into(),
        signal: 9,
        all: true,
        ..Default::default()
    };
    task.kill(ctx(), &request).await.expect("killed");
    assert_eq!(wait(task, id, "").await, 137);
}

async fn exec(agent: &Agent, task: &TaskClient, id: &str, exec_id: &str, args: &[&str]) -> ttrpc::Result<UnixStream> {
    let spec = Any {
        value: process(args, false).to_string().into_bytes(),
        ..Default::default()
    };
    let request = api::ExecProcessRequest {
        id: id.into(),
        exec_id: exec_id.into(),
        stdin: "in".into(),
        stdout: "out".into(),
        spec: MessageField::some(spec),
        ..Default::default()
    };
    task.exec(ctx(), &request).await?;
    let out = agent.attach(id, exec_id, StreamKind::Stdout);
    task.start(
        ctx(),
        &api::StartRequest {
            id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        },
    )
    .await?;
    Ok(out)
}

async fn stdin_and_exec(agent: &Agent, task: &TaskClient) {
    run(agent, task, "cat", &["cat"]).await;

    let started = Instant::now();
    let out = exec(agent, task, "cat", "e1", &["sh", "-c", "echo exec $$; exit 4"])
        .await
        .expect("started");
    assert!(read_all(out).await.starts_with("exec "));
    assert_eq!(wait(task, "cat", "e1").await, 4);
    delete(task, "cat", "e1").await;
    eprintln!("exec: {:?}", started.elapsed());

    let error = exec(agent, task, "cat", "e2", &["nosuch"])
        .await
        .expect_err("there is no such program");
    assert_eq!(message(&error), "exec: \"nosuch\": executable file not found in $PATH");
    delete(task, "cat", "e2").await;

    let (mut stdin, out) = (
        agent.attach("cat", "", StreamKind::Stdin),
        agent.attach("cat", "", StreamKind::Stdout),
    );
    stdin.write_all(b"through").expect("it is read");
    stdin.shutdown(std::net::Shutdown::Write).expect("a socket");
    assert_eq!(read_all(out).await, "through");
    assert_eq!(wait(task, "cat", "").await, 0);
    delete(task, "cat", "").await;
}

async fn many_lines(agent: &Agent, task: &TaskClient) {
    let bundle = agent.bundle("lines", &["seq", "200000"], false);
    task.create(ctx(), &create_request("lines", bundle, false))
        .await
        .expect("created");
    let out = agent.attach("lines", "", StreamKind::Stdout);
    start(task, "lines").await;
    let text = read_all(out).await;
    assert_eq!(text.lines().count(), 200_000);
    assert!(text.ends_with("\n200000\n"));
    wait(task, "lines", "").await;
    delete(task, "lines", "").await;
}

async fn errors(agent: &Agent, task: &TaskClient) {
    let bundle = agent.bundle("bad", &["nosuch"], false);
    let error = task
        .create(ctx(), &create_request("bad", bundle, false))
        .await
        .expect_err("no such program");
    assert_eq!(message(&error), "exec: \"nosuch\": executable file not found in $PATH");
    let bundle = agent.bundle("bad2", &["/etc/machine-id"], false);
    let error = task
        .create(ctx(), &create_request("bad2", bundle, false))
        .await
        .expect_err("not executable");
    assert_eq!(message(&error), "exec: \"/etc/machine-id\": permission denied");
    // Nothing is left: the id can be used again.
    std::fs::remove_dir_all(agent.path("bad")).expect("the bundle is ours");
    let bundle = agent.bundle("bad", &["true"], false);
    task.create(ctx(), &create_request("bad", bundle, false))
        .await
        .expect("the id is free again");
    delete(task, "bad", "").await;
}

async fn terminal(agent: &Agent, task: &TaskClient) {
    let bundle = agent.bundle("tty", &["sh", "-c", "stty size; read x; echo got $x"], true);
    task.create(ctx(), &create_request("tty", bundle, true))
        .await
        .expect("created");
    let resize = api::ResizePtyRequest {
        id: "tty".into(),
        width: 132,
        height: 43,
        ..Default::default()
    };
    task.resize_pty(ctx(), &resize).await.expect("resized");
    let (mut stdin, out) = (
        agent.attach("tty", "", StreamKind::Stdin),
        agent.attach("tty", "", StreamKind::Stdout),
    );
    start(task, "tty").await;
    stdin.write_all(b"word\n").expect("it is read");
    let text = read_all(out).await;
    assert!(text.contains("43 132"), "{text:?}");
    assert!(text.contains("got word"), "{text:?}");
    wait(task, "tty", "").await;
    delete(task, "tty", "").await;
}

async fn pause_and_stats(task: &TaskClient, id: &str) {
    let stats = task
        .stats(
            ctx(),
            &api::StatsRequest {
                id: id.into(),
                ..Default::default()
            },
        )
        .await
        .expect("stats");
    assert_eq!(stats.stats.type_url, "io.containerd.cgroups.v2.Metrics");
    task.pause(
        ctx(),
        &api::PauseRequest {
            id: id.into(),
            ..Default::default()
        },
    )
    .await
    .expect("paused");
    task.resume(
        ctx(),
        &api::ResumeRequest {
            id: id.into(),
            ..Default::default()
        },
    )
    .await
    .expect("resumed");
}

async fn quiesce_and_thaw(agent: &Agent, task: &TaskClient, client: Client) {
    let script = "i=0; while true; do i=$((i+1)); echo $i; sleep 0.01; done";
    run(agent, task, "count", &["sh", "-c", script]).await;
    let out = agent.attach("count", "", StreamKind::Stdout);
    let mut lines = BufReader::new(out).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "1");

    pause_and_stats(task, "count").await;
    let ours = GuestClient::new(client);
    let quiesced = ours
        .quiesce(ctx(), &guest::QuiesceRequest::new())
        .await
        .expect("quiesced");
    assert_eq!(quiesced.containers.len(), 1);
    assert!(!quiesced.containers[0].pids.is_empty());
    assert!(
        ours.info(ctx(), &guest::InfoRequest::new())
            .await
            .expect("info")
            .renew_required
    );

    let stranger = GuestClient::new(agent.connect().await);
    let refused = stranger.thaw(ctx(), &guest::ThawRequest::new()).await;
    assert!(refused.is_err(), "another connection must renew first");
    ours.thaw(ctx(), &guest::ThawRequest::new()).await.expect("thawed");
    let mut last = 1;
    for _ in 0..20 {
        let line: u32 = lines.next().expect("a line").expect("text").parse().expect("a number");
        assert_eq!(line, last + 1, "nothing is lost or repeated");
        last = line;
    }

    fresh(task, &ours).await;
    run(agent, task, "sleep", &["sleep", "1000"]).await;
    kill(task, "sleep").await;
    delete(task, "sleep", "").await;
}

/// Kills the frozen container without letting it run on.
async fn fresh(task: &TaskClient, ours: &GuestClient) {
    ours.quiesce(ctx(), &guest::QuiesceRequest::new())
        .await
        .expect("quiesced");
    let kill_all = guest::ThawRequest {
        kill_containers: vec!["count".into()],
        ..Default::default()
    };
    ours.thaw(ctx(), &kill_all).await.expect("thawed");
    assert_eq!(wait(task, "count", "").await, 137);
    delete(task, "count", "").await;
}
