//! The daemon that `start` leaves behind.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use protocol::containerd::ttrpc::asynchronous::Server;
use protocol::containerd::ttrpc::asynchronous::transport::Listener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

use crate::args::Args;
use crate::boot::GuestImage;
use crate::bootstrap::{BEGAN, TTRPC_ADDRESS};
use crate::events::Publisher;
use crate::hooks;
use crate::launch::{HOOKS_MARK, Surroundings, read_spec};
use crate::logging;
use crate::net::Namespace;
use crate::sandbox::Sandbox;
use crate::state_dir::{StateDir, socket_path};
use crate::task_service;
use crate::vm::{Vm, VmError};
use crate::vmm_process::{VmmProcess, find_program};

/// How long a guest may take to boot, in seconds; `RAMET_BOOT_TIMEOUT` overrides it.
const BOOT_LIMIT: u64 = 60;

/// Serves until there is nothing left to serve.
///
/// # Errors
/// The daemon cannot be set up.
pub fn run(args: &Args, bundle: &Path) -> anyhow::Result<()> {
    // Fails only for a process group leader, which is as good.
    let _ = nix::unistd::setsid();
    let listener = take_listener().context("take over the listening socket")?;
    logging::start(bundle, args.debug);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the event loop")?;
    let state = StateDir::new(&args.namespace, &args.id);
    let served = runtime.block_on(serve(args, bundle, listener, &state));
    let _ = std::fs::remove_file(socket_path(&args.address, &args.namespace, &args.id));
    hooks::finish(bundle, &state.join(HOOKS_MARK));
    keep_logs(args, &state);
    state.remove();
    if let Err(error) = &served {
        warn!(error = format!("{error:#}"), "the shim ends");
    }
    // Tasks that still wait on something must not keep the process.
    runtime.shutdown_background();
    served
}

/// With `RAMET_LOG_DIR` set, what the guest and the VMM wrote outlives the sandbox.
fn keep_logs(args: &Args, state: &StateDir) {
    let Some(directory) = std::env::var_os("RAMET_LOG_DIR").map(PathBuf::from) else {
        return;
    };
    for (name, suffix) in [("console", "console"), ("vmm.log", "vmm.log")] {
        let target = directory.join(format!("{}-{}.{suffix}", args.namespace, args.id));
        let _ = std::fs::copy(state.join(name), target);
    }
}

/// The listening socket came as standard input, which then becomes empty.
fn take_listener() -> std::io::Result<UnixListener> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    Ok(UnixListener::from(socket))
}

async fn serve(args: &Args, bundle: &Path, listener: UnixListener, state: &StateDir) -> anyhow::Result<()> {
    state.create().context("make the state directory")?;
    state
        .write_process("shim.pid", std::process::id())
        .context("note the shim's pid")?;
    let vm = start_vmm(state, args.debug, bundle);
    let ttrpc_address = std::env::var(TTRPC_ADDRESS).ok().filter(|a| !a.is_empty());
    let fallback = (!args.address.is_empty()).then(|| format!("{}.ttrpc", args.address));
    let publisher = Publisher::start(&args.namespace, ttrpc_address.or(fallback));
    let around = Surroundings {
        namespace: args.namespace.clone(),
        image: GuestImage::find(),
        console: state.console(),
        boot_limit: Duration::from_secs(
            std::env::var("RAMET_BOOT_TIMEOUT")
                .ok()
                .and_then(|s| s.parse().ok())
                .unwrap_or(BOOT_LIMIT),
        ),
    };
    let sandbox = Sandbox::new(vm, publisher.clone(), around);
    let listener = Listener::try_from(listener).context("poll the listening socket")?;
    let mut server = Server::new()
        .add_listener(listener)
        .register_service(task_service::services(&sandbox));
    server.start().await.context("serve")?;
    let since_start_us = since_start().as_micros();
    info!(since_start_us, id = args.id, namespace = args.namespace, "shim is up");
    let mut terminate = signal(SignalKind::terminate()).context("catch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("catch SIGINT")?;
    tokio::select! {
        () = sandbox.shutdown.notified() => {}
        _ = terminate.recv() => warn!("SIGTERM"),
        _ = interrupt.recv() => warn!("SIGINT"),
    }
    sandbox.abandon().await;
    publisher.flush(Duration::from_secs(2)).await;
    // The answer to Shutdown is still on its way out.
    tokio::time::sleep(Duration::from_millis(20)).await;
    Ok(())
}

/// Since `start` began.
fn since_start() -> Duration {
    let began = std::env::var(BEGAN).ok().and_then(|micros| micros.parse().ok());
    let began = began.map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
    began
        .and_then(|began| SystemTime::now().duration_since(began).ok())
        .unwrap_or_default()
}

/// The VMM is started before its machine is known, so that KVM is open by the time of Create. Only its network namespace must be known.
fn start_vmm(state: &StateDir, debug: bool, bundle: &Path) -> Result<Arc<dyn Vm>, VmError> {
    // A spec that cannot be read is the business of Create.
    let network = read_spec(bundle).map_or(Namespace::New, |spec| Namespace::of(&spec));
    let vmm = VmmProcess::spawn(&find_program(), &state.join("vmm.log"), debug, Some(network))?;
    if let Err(error) = state.write_process("vmm.pid", vmm.pid()) {
        warn!(%error, "note the VMM's pid");
    }
    Ok(Arc::new(vmm))
}
