//! The shim's log: containerd reads the `log` FIFO in the bundle and copies it into its own.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Writes to the FIFO without ever waiting: what does not fit, or has no reader, is dropped.
struct Log(Mutex<Option<File>>);

struct Line<'a>(&'a Log);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if let Some(file) = self.0.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            let _ = file.write(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// Starts logging to `bundle/log`.
pub fn start(bundle: &Path, debug: bool) {
    let path = bundle.join("log");
    let open = |write_only: bool| {
        let mut options = File::options();
        options
            .write(true)
            .read(!write_only)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
    };
    // Without a reader yet, opening for writing alone is refused.
    let file = open(true).or_else(|_| open(false)).ok();
    let filter =
        EnvFilter::try_from_env("RAMET_LOG").unwrap_or_else(|_| EnvFilter::new(if debug { "debug" } else { "info" }));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(Log(Mutex::new(file)));
    let _ = subscriber.try_init();
    std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panic")));
}
