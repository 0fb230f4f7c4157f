//! containerd's events service, of which only `Forward` matters: it keeps what a shim tells.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use containerd_shim_protos::events::task::{
    TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused, TaskResumed, TaskStart,
};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::empty::Empty;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_sync::{Events as Service, create_events};
use containerd_shim_protos::ttrpc;

/// Something that a shim told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Event {
    /// What happened, without `/tasks/`.
    pub topic: String,
    /// The container.
    pub container: String,
    /// The exec; empty for init.
    pub exec: String,
    /// Process id, where the event has one.
    pub pid: u32,
    /// Exit status, where the event has one.
    pub status: u32,
    /// Time of the exit, where the event has one.
    pub exited_at: Option<Timestamp>,
}

#[derive(Default)]
struct Seen {
    events: Mutex<Vec<Event>>,
    more: Condvar,
}

/// The service; it ends with the test program.
pub struct Events {
    seen: Arc<Seen>,
    _server: ttrpc::Server,
}

impl Events {
    /// Serves on this socket.
    pub fn serve(socket: &Path) -> Result<Self> {
        let seen = Arc::new(Seen::default());
        let mut server = ttrpc::Server::new()
            .bind(&format!("unix://{}", socket.display()))
            .context("binding the socket of events")?
            .register_service(create_events(seen.clone()));
        server.start().context("serving events")?;
        Ok(Self { seen, _server: server })
    }

    /// All so far, in order.
    #[must_use]
    pub fn all(&self) -> Vec<Event> {
        self.seen.events().clone()
    }

    /// Waits for the event of this topic about this process.
    pub fn wait(&self, topic: &str, exec: &str) -> Result<Event> {
        let is_it = |event: &Event| event.topic == topic && event.exec == exec;
        let (events, _) = self
            .seen
            .more
            .wait_timeout_while(self.seen.events(), Duration::from_secs(60), |events| {
                !events.iter().any(is_it)
            })
            .unwrap_or_else(PoisonError::into_inner);
        match events.iter().find(|event| is_it(event)) {
            Some(event) => Ok(event.clone()),
            None => bail!("no event {topic} of {exec:?}, only {events:?}"),
        }
    }

    /// Topics and execs in the order in which they came, as `topic` or `topic exec`.
    #[must_use]
    pub fn order(&self) -> Vec<String> {
        let name = |event: &Event| format!("{} {}", event.topic, event.exec).trim_end().to_owned();
        self.seen.events().iter().map(name).collect()
    }
}

impl Seen {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service for Seen {
    fn forward(&self, _: &ttrpc::TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        let envelope = request.envelope.unwrap_or_default();
        let event = read(&envelope.topic, &envelope.event.value).unwrap_or_else(|error| Event {
            topic: format!("{} that cannot be read: {error}", envelope.topic),
            ..Event::default()
        });
        self.events().push(event);
        self.more.notify_all();
        Ok(Empty::new())
    }
}

fn read(topic: &str, bytes: &[u8]) -> Result<Event> {
    let topic = topic.strip_prefix("/tasks/").context("not of a task")?;
    let mut event = Event {
        topic: topic.to_owned(),
        ..Event::default()
    };
    match topic {
        "create" => {
            let message = TaskCreate::parse_from_bytes(bytes)?;
            (event.container, event.pid) = (message.container_id, message.pid);
        }
        "start" => {
            let message = TaskStart::parse_from_bytes(bytes)?;
            (event.container, event.pid) = (message.container_id, message.pid);
        }
        "exit" => {
            let message = TaskExit::parse_from_bytes(bytes)?;
            if message.id != message.container_id {
                event.exec = message.id;
            }
            (event.container, event.pid, event.status) = (message.container_id, message.pid, message.exit_status);
            event.exited_at = message.exited_at.into_option();
        }
        "delete" => {
            let message = TaskDelete::parse_from_bytes(bytes)?;
            (event.container, event.pid, event.status) = (message.container_id, message.pid, message.exit_status);
            event.exited_at = message.exited_at.into_option();
        }
        "exec-added" => {
            let message = TaskExecAdded::parse_from_bytes(bytes)?;
            (event.container, event.exec) = (message.container_id, message.exec_id);
        }
        "exec-started" => {
            let message = TaskExecStarted::parse_from_bytes(bytes)?;
            (event.container, event.exec, event.pid) = (message.container_id, message.exec_id, message.pid);
        }
        "oom" => event.container = TaskOOM::parse_from_bytes(bytes)?.container_id,
        "paused" => event.container = TaskPaused::parse_from_bytes(bytes)?.container_id,
        "resumed" => event.container = TaskResumed::parse_from_bytes(bytes)?.container_id,
        _ => bail!("unknown topic"),
    }
    Ok(event)
}
