//! Work that nobody waits for: EROFS images, unpacked checkpoints, deleting.
//!
//! Two threads with the lowest priority. Nothing is lost when they are killed: images are made under a lock into unfinished names,
//! and [`Store::unfinished`] finds at the next start what is missing. A failure is logged only, because the shim does the same work when it
//! needs the result, and reports what stands in the way.

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use checkpoint::{layers, pack};

use crate::store::{Committed, Derived, Store};
use crate::sys;

/// Hands work to the threads; they end when it is dropped.
#[derive(Clone)]
pub struct Background {
    committed: Sender<Committed>,
    trash: SyncSender<()>,
}

impl Background {
    /// Starts the threads, with what an earlier run left undone.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(store: &Arc<Store>) -> std::io::Result<Self> {
        let (committed, queue) = channel();
        // One request waiting is as good as many.
        let (trash, requests) = sync_channel(1);
        let background = Self { committed, trash };
        let worker = Arc::clone(store);
        thread::Builder::new()
            .name("layers".to_owned())
            .spawn(move || derive_all(&worker, &queue))?;
        let worker = Arc::clone(store);
        thread::Builder::new()
            .name("trash".to_owned())
            .spawn(move || delete_all(&worker, &requests))?;
        background.removed();
        match store.unfinished() {
            Ok(left) => left.into_iter().for_each(|snapshot| background.committed(snapshot)),
            Err(error) => tracing::error!(error = chain_text(&error), "cannot look for unfinished work"),
        }
        Ok(background)
    }

    /// A snapshot was committed.
    pub fn committed(&self, snapshot: Committed) {
        let _ = self.committed.send(snapshot);
    }

    /// A snapshot was removed.
    pub fn removed(&self) {
        let _ = self.trash.try_send(());
    }
}

fn derive_all(store: &Store, queue: &Receiver<Committed>) {
    sys::lower_priority();
    while let Ok(snapshot) = queue.recv() {
        derive(store, &snapshot);
    }
}

fn delete_all(store: &Store, requests: &Receiver<()>) {
    sys::lower_priority();
    while requests.recv().is_ok() {
        store.empty_trash();
    }
}

fn derive(store: &Store, snapshot: &Committed) {
    let name = snapshot.name.as_str();
    if store.stat(name).is_err() {
        return; // removed before its turn came
    }
    let result: Result<(), Box<dyn Error>> = match snapshot.derived {
        Derived::LayerImage => layers::ensure_layer_image(&snapshot.dir).map(drop).map_err(Into::into),
        Derived::UnpackedCheckpoint => pack::ensure_unpacked(&snapshot.dir).map(drop).map_err(Into::into),
        Derived::Nothing => Ok(()),
    };
    match result {
        Ok(()) => tracing::info!(name, directory = %snapshot.dir.display(), "ready for a VM"),
        // A snapshot that was removed meanwhile fails too, and matters to nobody.
        Err(_) if store.stat(name).is_err() => return,
        Err(error) => tracing::error!(
            name,
            error = chain_text(&*error),
            "not ready for a VM, its shim will try again"
        ),
    }
    if let Err(error) = store.recount(name)
        && store.stat(name).is_ok()
    {
        tracing::warn!(name, error = chain_text(&error), "cannot count");
    }
}

/// An error with its causes, on one line.
pub(crate) fn chain_text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}
