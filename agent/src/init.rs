//! PID 1 of the guest: brings the machine up, serves the ports, and ends the machine.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use protocol::ports;
use tokio::signal::unix::{SignalKind, signal};

use crate::agent::Agent;
use crate::cgroup::{self, Cgroup};
use crate::fd::{Listener, knock};
use crate::renew::Steps;

/// Kernel modules in the initramfs, loaded in the order of their names.
const MODULES: &str = "/modules";

/// Becomes the root directory.
const NEW_ROOT: &str = "/newroot";

/// How long the host's side may take to accept the first connection.
const KNOCK_DEADLINE: Duration = Duration::from_secs(10);

/// How long containers may take to die when the machine ends.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// Descriptors that the agent may have: each process takes six.
const DESCRIPTORS: u64 = 65536;

/// How long the answer to Shutdown may take to leave the machine.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How long the guest took to come up: the kernel from the start of its clock, then the agent. Only set in a guest.
pub static CAME_UP: OnceLock<Steps> = OnceLock::new();

/// Where the agent listens.
#[derive(Clone, Debug)]
pub enum Doors {
    /// On the vsock ports of the protocol, in a guest.
    Vsock,
    /// On `rpc.sock`, `streams.sock` and `volumes.sock` in a directory: to try the agent without a VM.
    Unix(std::path::PathBuf),
}

/// Runs as PID 1; ends the machine whatever happens.
pub fn main() {
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("ramet-agent: {panic}");
        power_off();
    }));
    let mut steps = Steps::default();
    steps.note("kernel", since_boot());
    let result = bring_up(&mut steps).and_then(|()| {
        log_to_console(kernel_log_level());
        serve_after(&Doors::Vsock, steps)
    });
    if let Err(error) = result {
        eprintln!("ramet-agent: {error:#}");
    }
    power_off();
}

/// Serves until SIGTERM.
///
/// # Errors
/// When a listener cannot be made or breaks.
pub fn serve(doors: &Doors) -> Result<()> {
    serve_after(doors, Steps::default())
}

fn serve_after(doors: &Doors, mut steps: Steps) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    raise_descriptors();
    // PID 1 inherits orphans anyway; a container's init is one.
    nix::sys::prctl::set_child_subreaper(true).context("become the parent of orphans")?;
    runtime.block_on(async {
        let agent = Arc::new(Agent::default());
        let mut children = signal(SignalKind::child()).context("watch for SIGCHLD")?;
        let mut terminate = signal(SignalKind::terminate()).context("watch for SIGTERM")?;
        let (rpc, streams, volumes) = open(doors).context("listen")?;
        let mut rpc = tokio::spawn(crate::server::serve(agent.clone(), rpc));
        let mut streams = tokio::spawn(crate::streams::serve(agent.clone(), streams));
        let mut volumes = tokio::spawn(crate::volumes::serve(agent.clone(), volumes));
        if matches!(doors, Doors::Vsock) {
            steps.done("services");
            report_ready().context("tell the host that the agent is ready")?;
            steps.done("knock");
            let _ = CAME_UP.set(steps);
        }
        loop {
            tokio::select! {
                _ = children.recv() => agent.reaper.reap(),
                _ = terminate.recv() => return Ok(()),
                ended = &mut rpc => return ended.context("serve requests")?.context("serve requests"),
                ended = &mut streams => return ended.context("serve streams")?.context("serve streams"),
                ended = &mut volumes => return ended.context("serve volumes")?.context("serve volumes"),
            }
        }
    })
}

/// Kills all containers, writes everything out and ends the machine once the answer is on its way.
///
/// # Errors
/// When containers do not die; the machine goes on then.
pub async fn shut_down() -> crate::error::Result<()> {
    Cgroup::all().kill()?;
    Cgroup::all().wait_empty(SHUTDOWN_DEADLINE).await?;
    nix::unistd::sync();
    tokio::spawn(async {
        tokio::time::sleep(LAST_WORDS).await;
        power_off();
    });
    Ok(())
}

/// Ends the machine; outside a guest only the process.
fn power_off() {
    if std::process::id() == 1 {
        nix::unistd::sync();
        let Err(error) = reboot(RebootMode::RB_POWER_OFF);
        eprintln!("ramet-agent: power off: {error}");
    }
    std::process::exit(1);
}

/// As far as it may. The processes of containers get their own limit: see `container_command`.
fn raise_descriptors() {
    let hard = getrlimit(Resource::RLIMIT_NOFILE).map_or(DESCRIPTORS, |(_, hard)| hard);
    let raised = setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, hard.max(DESCRIPTORS))
        .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!("raise the limit of descriptors: {error}");
    }
}

fn open(doors: &Doors) -> io::Result<(Listener, Listener, Listener)> {
    match doors {
        Doors::Vsock => Ok((
            Listener::vsock(ports::RPC)?,
            Listener::vsock(ports::STREAMS)?,
            Listener::vsock(ports::VOLUMES)?,
        )),
        Doors::Unix(directory) => Ok((
            Listener::unix(&directory.join("rpc.sock"))?,
            Listener::unix(&directory.join("streams.sock"))?,
            Listener::unix(&directory.join("volumes.sock"))?,
        )),
    }
}

/// The vsock device may still be probed when its module has been loaded.
fn report_ready() -> io::Result<()> {
    let start = Instant::now();
    loop {
        match knock(ports::READY) {
            Ok(_) => return Ok(()),
            Err(error) if start.elapsed() > KNOCK_DEADLINE => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// By the kernel's clock, which starts after its first steps.
fn since_boot() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

fn bring_up(steps: &mut Steps) -> Result<()> {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    load_modules().context("load kernel modules")?;
    steps.done("modules");
    new_root().context("make the root directory")?;
    steps.done("root directory");
    nix::unistd::sethostname("ramet").context("set the hostname")?;
    crate::network::loopback_up().context("bring up the loopback interface")?;
    Ok(())
}

fn load_modules() -> Result<()> {
    let mut modules = Vec::new();
    match fs::read_dir(MODULES) {
        Ok(entries) => {
            for entry in entries {
                modules.push(entry?.path());
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).context(MODULES),
    }
    modules.sort();
    for path in modules {
        let file = fs::File::open(&path).with_context(|| path.display().to_string())?;
        match crate::sys::load_module(&file, parameters(&path)) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        }
        // It is in the kernel now; the file would only hold memory.
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// What a module is told. The network driver is not to be interrupted for each packet that was sent: leaving the VM costs more than
/// what it could do then. It frees sent packets when it sends the next ones.
fn parameters(module: &Path) -> &'static CStr {
    let name = module.file_name().unwrap_or_default().to_string_lossy();
    if name.ends_with("virtio_net.ko") {
        c"napi_tx=0"
    } else {
        c""
    }
}

/// Moves onto a tmpfs: the initramfs cannot be left with pivot_root, which containers need.
fn new_root() -> Result<()> {
    let nothing = MsFlags::empty();
    let closed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let mounts = [
        ("", "tmpfs", nothing, "mode=0755"),
        ("proc", "proc", closed, ""),
        ("sys", "sysfs", closed, ""),
        ("sys/fs/cgroup", "cgroup2", closed, "nsdelegate"),
        ("dev", "devtmpfs", MsFlags::MS_NOSUID, "mode=0755"),
        (
            "dev/pts",
            "devpts",
            MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC,
            "ptmxmode=0666,mode=0620,gid=5",
        ),
        ("dev/shm", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=1777"),
        ("run", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=0755"),
    ];
    for (name, kind, flags, options) in mounts {
        let target = Path::new(NEW_ROOT).join(name);
        fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
        mount(Some(kind), &target, Some(kind), flags, Some(options))
            .with_context(|| format!("mount {kind} on {}", target.display()))?;
    }
    nix::unistd::chdir(NEW_ROOT)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>).context("move the root")?;
    nix::unistd::chroot(".")?;
    nix::unistd::chdir("/")?;
    fs::create_dir_all(crate::container_command::STATE)?;
    enable_controllers().context("enable the controllers of control groups")?;
    reserve_pids().context("limit the processes of containers")
}

fn reserve_pids() -> Result<()> {
    let number = |name: &str| -> Result<u64> {
        let text = fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).with_context(|| name.to_owned())?;
        text.trim().parse().with_context(|| name.to_owned())
    };
    Ok(Cgroup::all().limit_pids(number("threads-max")?, number("pid_max")?)?)
}

/// Makes the group above all containers and lets those below it have every controller.
///
/// # Errors
/// When cgroup2 is not mounted.
pub fn enable_controllers() -> io::Result<()> {
    let parent = Cgroup::all();
    fs::create_dir_all(parent.path())?;
    parent.limit_depth()?;
    for group in [Path::new(cgroup::MOUNT), parent.path()] {
        let controllers = fs::read_to_string(group.join("cgroup.controllers"))?;
        for controller in controllers.split_whitespace() {
            fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"))?;
        }
    }
    Ok(())
}

fn kernel_log_level() -> tracing::Level {
    let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let level = command_line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("ramet.log="));
    level
        .and_then(|level| level.parse().ok())
        .unwrap_or(tracing::Level::WARN)
}

/// Logs to the console. Each byte there is a VM exit, so only what matters is said.
pub fn log_to_console(level: tracing::Level) {
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(io::stderr)
        .init();
}
