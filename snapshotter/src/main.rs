//! `ramet-snapshotter`: see the library's documentation.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use snapshotter::store::Store;
use snapshotter::{service, size};
use tokio::signal::unix::{SignalKind, signal};

/// containerd snapshotter for microVMs and their checkpoints.
///
/// containerd reaches it as a proxy plugin:
///
///     [proxy_plugins.ramet]
///       type = "snapshot"
///       address = "/run/ramet-snapshotter/snapshotter.sock"
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Args {
    /// Where snapshots are kept.
    #[arg(long, default_value = "/var/lib/ramet-snapshotter")]
    root: PathBuf,
    /// Unix socket to serve on.
    #[arg(long, default_value = "/run/ramet-snapshotter/snapshotter.sock")]
    address: PathBuf,
    /// Size of the writable disk of a new container's VM, in bytes or with K, M, G or T; only what is written takes space.
    #[arg(long, default_value = "10G", value_parser = size::parse)]
    writable_size: u64,
}

fn main() -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let args = Args::parse();
    let store = Store::open(&args.root, args.writable_size)
        .with_context(|| format!("open the snapshots below {}", args.root.display()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let served = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping");
        };
        service::serve(Arc::new(store), &args.address, stop).await
    });
    // Calls that hang in a filesystem must not keep us.
    runtime.shutdown_background();
    served.with_context(|| format!("serve on {}", args.address.display()))
}
