//! [`Vm`] as a `ramet-vmm` process on the other end of a control socket.

use std::collections::VecDeque;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use vmm::control::{CONTROL_FD, Event, ExitReason, MAX_MESSAGE, Message, Reply, Request};

use crate::error::chain;
use crate::net::{Namespace, NetError, namespace};
use crate::state_dir;
use crate::sys::{ChildNetwork, place_in_network};
use crate::vm::{Vm, VmError};

type Answer = oneshot::Sender<Result<Reply, VmError>>;

/// A packet to send and who waits for the answer.
struct Outgoing {
    request: Request,
    fds: Vec<OwnedFd>,
    answer: Answer,
}

/// A running `ramet-vmm`.
pub struct VmmProcess {
    pid: u32,
    has_network: bool,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    ready: watch::Receiver<bool>,
    ended: watch::Receiver<Option<String>>,
    child: Arc<Mutex<Option<Child>>>,
}

/// Where the program is: `RAMET_VMM`, beside us, or in `PATH`.
#[must_use]
pub fn find_program() -> PathBuf {
    if let Some(path) = std::env::var_os("RAMET_VMM") {
        return path.into();
    }
    std::env::current_exe()
        .ok()
        .and_then(|me| Some(me.parent()?.join("ramet-vmm")))
        .filter(|path| path.exists())
        .unwrap_or_else(|| PathBuf::from("ramet-vmm"))
}

/// The program without anything of ours but its log.
fn bare_command(program: &Path, log: &Path, debug: bool) -> std::io::Result<Command> {
    let log_file = File::options().create(true).append(true).open(log)?;
    let filter = std::env::var("RAMET_LOG").unwrap_or_else(|_| if debug { "debug".into() } else { "info".into() });
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("RAMET_LOG", filter)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log_file);
    Ok(command)
}

/// Where the VMM lives. Whoever asks for the host's network is refused later; the VMM needs none.
fn child_network(network: &Namespace) -> Result<ChildNetwork, NetError> {
    match network {
        Namespace::Of(path) if !network.is_hosts() => {
            // The child could not say what it cannot enter.
            namespace::within(path, || ())?;
            namespace::open(path).map(ChildNetwork::Join)
        }
        Namespace::New | Namespace::Of(_) | Namespace::Host => Ok(ChildNetwork::New),
    }
}

impl VmmProcess {
    /// Starts the program, in a network namespace if one is given (else in ours); it opens KVM and waits for its first request.
    ///
    /// # Errors
    /// The program cannot be run.
    pub fn spawn(program: &Path, log: &Path, debug: bool, network: Option<Namespace>) -> Result<Self, VmError> {
        let failed = |reason: String| VmError::Spawn {
            program: program.display().to_string(),
            reason,
        };
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(|e| failed(format!("make control socket: {e}")))?;
        let mut command =
            bare_command(program, log, debug).map_err(|e| failed(format!("open {}: {e}", log.display())))?;
        let has_network = network.is_some();
        if let Some(network) = network {
            let network = child_network(&network).map_err(|e| failed(chain(&e)))?;
            place_in_network(&mut command, network);
        }
        crate::sys::place_descriptor(&mut command, theirs, CONTROL_FD);
        let child = command.spawn().map_err(|e| failed(e.to_string()))?;
        drop(command);
        let pid = child.id();
        let nonblocking = crate::sys::poll(ours).map_err(|e| failed(format!("control socket: {e}")))?;
        let (outgoing, requests) = mpsc::unbounded_channel();
        let (ready_tx, ready) = watch::channel(false);
        let (ended_tx, ended) = watch::channel(None);
        let (exit_tx, exit_rx) = oneshot::channel();
        std::thread::Builder::new()
            .name("vmm-exit".into())
            .spawn(move || {
                // The zombie stays until `kill` reaps it, so its pid cannot become somebody else's.
                let id = Id::Pid(Pid::from_raw(pid.cast_signed()));
                let status = waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
                let _ = exit_tx.send(status.ok());
            })
            .map_err(|e| failed(format!("start thread: {e}")))?;
        let channel = Channel {
            socket: nonblocking,
            waiting: VecDeque::new(),
            ready: ready_tx,
            reason: None,
        };
        tokio::spawn(channel.run(requests, exit_rx, ended_tx, log.to_owned()));
        Ok(Self {
            pid,
            has_network,
            outgoing,
            ready,
            ended,
            child: Arc::new(Mutex::new(Some(child))),
        })
    }

    fn gone(&self) -> VmError {
        VmError::Gone(
            self.ended
                .borrow()
                .clone()
                .unwrap_or_else(|| "control socket closed".into()),
        )
    }
}

/// The shim's end of the control socket.
struct Channel {
    socket: AsyncFd<OwnedFd>,
    waiting: VecDeque<Answer>,
    ready: watch::Sender<bool>,
    reason: Option<String>,
}

impl Channel {
    async fn run(
        mut self,
        mut requests: mpsc::UnboundedReceiver<Outgoing>,
        exit: oneshot::Receiver<Option<WaitStatus>>,
        ended: watch::Sender<Option<String>>,
        log: PathBuf,
    ) {
        let mut buffer = vec![0; MAX_MESSAGE];
        let mut exit = std::pin::pin!(exit);
        let mut status = None;
        loop {
            tokio::select! {
                biased;
                received = receive(&self.socket, &mut buffer) => match received {
                    Ok((0, _)) => break,
                    Ok((n, fds)) => if let Err(e) = self.handle(buffer.get(..n).unwrap_or_default(), fds) {
                        self.reason = Some(e);
                        break;
                    },
                    Err(e) => { self.reason.get_or_insert(format!("receive: {e}")); break }
                },
                // A child of the VMM that writes a save may hold the socket open longer than the VMM lives.
                ended = &mut exit => {
                    status = ended.ok().flatten();
                    break;
                }
                next = requests.recv() => match next {
                    Some(outgoing) => self.send(outgoing).await,
                    None => break,
                },
            }
        }
        if status.is_none() {
            status = tokio::time::timeout(Duration::from_secs(5), &mut exit)
                .await
                .ok()
                .and_then(Result::ok)
                .flatten();
        }
        let reason = self.describe(status, &log);
        ended.send_replace(Some(reason.clone()));
        requests.close();
        for answer in self.waiting.drain(..) {
            let _ = answer.send(Err(VmError::Gone(reason.clone())));
        }
        while let Ok(outgoing) = requests.try_recv() {
            let _ = outgoing.answer.send(Err(VmError::Gone(reason.clone())));
        }
    }

    /// How the VMM ended: in its own words if it had any, else as the kernel says. What it wrote to its log is added where that may
    /// explain the end, which it cannot when somebody killed it.
    fn describe(&self, exit: Option<WaitStatus>, log: &Path) -> String {
        if let Some(reason) = &self.reason {
            return reason.clone();
        }
        let reason = match exit {
            Some(WaitStatus::Exited(_, code)) => format!("it exited with status {code}"),
            Some(WaitStatus::Signaled(_, signal @ (Signal::SIGKILL | Signal::SIGTERM | Signal::SIGINT), _)) => {
                return format!("it was killed by {signal}");
            }
            Some(WaitStatus::Signaled(_, signal, _)) => format!("it was killed by {signal}"),
            _ => "control socket closed".to_owned(),
        };
        let tail = state_dir::tail(log, 600);
        if tail.is_empty() {
            reason
        } else {
            format!("{reason}; it said: {tail}")
        }
    }

    fn handle(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), String> {
        match serde_json::from_slice(bytes).map_err(|e| format!("unreadable message: {e}"))? {
            Message::Reply(reply) => {
                let answer = self.waiting.pop_front().ok_or("a reply nobody asked for")?;
                let result = match reply {
                    Reply::Refused { message, .. } => Err(VmError::Refused(message)),
                    other => Ok(other),
                };
                let _ = answer.send(result);
            }
            Message::Event(Event::Connected { port }) => {
                // The connection carries nothing; its arrival is the message.
                drop(fds);
                if port == protocol::ports::READY {
                    self.ready.send_replace(true);
                }
            }
            Message::Event(Event::Exited(reason)) => {
                self.reason = Some(match reason {
                    ExitReason::PowerOff => "the guest powered off".into(),
                    ExitReason::TripleFault => "the guest crashed (triple fault)".into(),
                    ExitReason::Stopped => "stopped".into(),
                    ExitReason::Fault(text) => text,
                });
            }
        }
        Ok(())
    }

    async fn send(&mut self, outgoing: Outgoing) {
        let Outgoing { request, fds, answer } = outgoing;
        let bytes = match serde_json::to_vec(&request) {
            Ok(bytes) if bytes.len() <= MAX_MESSAGE => bytes,
            Ok(bytes) => {
                let _ = answer.send(Err(VmError::Protocol(format!(
                    "request of {} bytes is too long",
                    bytes.len()
                ))));
                return;
            }
            Err(e) => {
                let _ = answer.send(Err(VmError::Protocol(e.to_string())));
                return;
            }
        };
        let sent = self
            .socket
            .async_io(tokio::io::Interest::WRITABLE, |socket| {
                crate::sys::send_packet(socket, &bytes, &fds)
            })
            .await;
        match sent {
            Ok(()) => self.waiting.push_back(answer),
            // The end of the process is reported by the receiving side.
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                self.waiting.push_back(answer)
            }
            Err(e) => {
                let _ = answer.send(Err(VmError::Protocol(format!("send: {e}"))));
            }
        }
    }
}

async fn receive(socket: &AsyncFd<OwnedFd>, buffer: &mut [u8]) -> std::io::Result<(usize, Vec<OwnedFd>)> {
    socket
        .async_io(tokio::io::Interest::READABLE, |socket| {
            crate::sys::receive_packet(socket, &mut *buffer)
        })
        .await
}

#[async_trait]
impl Vm for VmmProcess {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn network_namespace(&self) -> Option<PathBuf> {
        self.has_network
            .then(|| PathBuf::from(format!("/proc/{}/ns/net", self.pid)))
    }

    async fn request(&self, request: Request, fds: Vec<OwnedFd>) -> Result<Reply, VmError> {
        let (answer, reply) = oneshot::channel();
        self.outgoing
            .send(Outgoing { request, fds, answer })
            .map_err(|_| self.gone())?;
        reply.await.map_err(|_| self.gone())?
    }

    async fn connect(&self, port: u32) -> Result<UnixStream, VmError> {
        let (ours, theirs) =
            std::os::unix::net::UnixStream::pair().map_err(|e| VmError::Protocol(format!("make stream: {e}")))?;
        ours.set_nonblocking(true)
            .map_err(|e| VmError::Protocol(format!("stream: {e}")))?;
        let stream = UnixStream::from_std(ours).map_err(|e| VmError::Protocol(format!("stream: {e}")))?;
        self.request(Request::Connect { port, stream: 0 }, vec![theirs.into()])
            .await?;
        Ok(stream)
    }

    async fn ready(&self) -> Result<(), VmError> {
        let mut ready = self.ready.clone();
        tokio::select! {
            seen = ready.wait_for(|r| *r) => if seen.is_ok() { return Ok(()) },
            _ = self.ended() => {}
        }
        self.ended().await;
        Err(self.gone())
    }

    async fn ended(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "control channel ended".to_owned(),
        }
    }

    async fn kill(&self) {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut child) = child {
            let _ = child.kill();
            let _ = tokio::task::spawn_blocking(move || child.wait()).await;
        } else {
            // Somebody else kills it.
            self.ended().await;
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_the_program_is_told_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("vmm");
        std::fs::write(&program, "#!/bin/sh\necho no kvm here >&2\nexit 3\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&program, mode).unwrap();
        let vmm = VmmProcess::spawn(&program, &dir.path().join("log"), false, None).unwrap();
        let reason = vmm.ended().await;
        assert!(
            reason.contains("status 3") && reason.contains("no kvm here"),
            "{reason}"
        );
        let refused = vmm.request(Request::Stats, Vec::new()).await.unwrap_err();
        assert!(matches!(refused, VmError::Gone(_)), "{refused}");
        vmm.kill().await;
    }

    #[tokio::test]
    async fn a_killed_program_is_told_without_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("vmm");
        std::fs::write(&program, "#!/bin/sh\necho all is well >&2\nkill -KILL $$\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&program, mode).unwrap();
        let vmm = VmmProcess::spawn(&program, &dir.path().join("log"), false, None).unwrap();
        assert_eq!(vmm.ended().await, "it was killed by SIGKILL");
    }

    #[tokio::test]
    async fn what_is_no_network_namespace_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [Path::new("/dev/null"), &fifo] {
            let network = Some(Namespace::Of(path.to_owned()));
            let error = VmmProcess::spawn(Path::new("/bin/true"), Path::new("/dev/null"), false, network)
                .err()
                .unwrap();
            let text = chain(&error);
            assert!(
                text.contains(&format!("enter network namespace {}", path.display())),
                "{text}"
            );
        }
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let error = VmmProcess::spawn(Path::new("/nonexistent/vmm"), Path::new("/dev/null"), false, None)
            .err()
            .unwrap();
        assert!(error.to_string().contains("/nonexistent/vmm"), "{error}");
    }
}
