//! The process that serves volumes.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::control::{Answer, Attach, Config, VolumeError, receive};
use crate::handler::Handler;
use crate::jail;
use crate::session::Session;

/// Threads for each stream: as many calls may wait for the host's disks at once.
const THREADS: usize = 4;

/// Serves until the control socket is closed.
///
/// # Errors
/// The first packet is none, or the trees cannot be shared.
pub fn run(control: OwnedFd) -> Result<(), VolumeError> {
    let Some((config, _)) = receive::<Config>(&control)? else {
        return Ok(());
    };
    let handlers = match jail::enter(&config) {
        Ok(handlers) => handlers,
        Err(error) => {
            answer(&control, Some(error.to_string()))?;
            return Err(VolumeError::Refused(error.to_string()));
        }
    };
    let handlers: Vec<Arc<Handler>> = handlers.into_iter().map(Arc::new).collect();
    answer(&control, None)?;
    while let Some((attach, fds)) = receive::<Attach>(&control)? {
        let error = start(&handlers, attach, fds).err();
        answer(&control, error)?;
    }
    Ok(())
}

fn start(handlers: &[Arc<Handler>], attach: Attach, mut fds: Vec<OwnedFd>) -> Result<(), String> {
    let handler = handlers.get(attach.volume).ok_or("there is no such volume")?;
    let stream = fds.pop().ok_or("no stream came with the request")?;
    Session::new(handler.clone(), UnixStream::from(stream))
        .and_then(|session| session.start(THREADS))
        .map_err(|error| format!("start to serve a volume: {error}"))
}

fn answer(control: &OwnedFd, error: Option<String>) -> Result<(), VolumeError> {
    let bytes = serde_json::to_vec(&Answer { error })?;
    crate::sys::send(control, &bytes, &[]).map_err(VolumeError::Io)
}
