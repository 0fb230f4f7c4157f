//! Task events to containerd, in order: the first one that cannot be delivered holds back the rest until it can.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use protocol::containerd::protobuf::MessageFull;
use protocol::containerd::protobuf::well_known_types::any::Any;
use protocol::containerd::protobuf::well_known_types::timestamp::Timestamp;
use protocol::containerd::shim::event::Envelope;
use protocol::containerd::shim::events::ForwardRequest;
use protocol::containerd::shim_async::{Client, EventsClient};
use protocol::containerd::ttrpc;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, warn};
use ttrpc::context::with_duration;

/// Events that are kept while containerd is away; older ones are given up first.
const MAX_QUEUE: usize = 4096;
/// How long one delivery may take.
const DELIVERY: Duration = Duration::from_secs(5);

enum Item {
    Event(Box<Envelope>),
    Flush(oneshot::Sender<()>),
}

/// Hands events to containerd in the background.
#[derive(Clone)]
pub struct Publisher {
    namespace: String,
    queue: mpsc::UnboundedSender<Item>,
}

impl Publisher {
    /// Starts the background task. Without an address, events are only logged.
    #[must_use]
    pub fn start(namespace: &str, ttrpc_address: Option<String>) -> Self {
        let (queue, items) = mpsc::unbounded_channel();
        tokio::spawn(deliver(items, ttrpc_address));
        Self {
            namespace: namespace.to_owned(),
            queue,
        }
    }

    /// Queues an event.
    pub fn publish<M: MessageFull>(&self, topic: &str, event: &M) {
        let value = match event.write_to_bytes() {
            Ok(value) => value,
            Err(error) => {
                warn!(topic, %error, "event cannot be encoded");
                return;
            }
        };
        let mut any = Any::new();
        any.type_url = M::descriptor().full_name().to_owned();
        any.value = value;
        let mut envelope = Envelope::new();
        envelope.timestamp = Some(timestamp(SystemTime::now())).into();
        envelope.namespace = self.namespace.clone();
        envelope.topic = topic.to_owned();
        envelope.event = Some(any).into();
        debug!(topic, "event");
        let _ = self.queue.send(Item::Event(Box::new(envelope)));
    }

    /// Waits until everything queued so far is delivered, at most `limit`.
    pub async fn flush(&self, limit: Duration) {
        let (done, waited) = oneshot::channel();
        if self.queue.send(Item::Flush(done)).is_ok() {
            let _ = tokio::time::timeout(limit, waited).await;
        }
    }
}

/// A protobuf timestamp.
#[must_use]
pub fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::from(time)
}

async fn deliver(mut items: mpsc::UnboundedReceiver<Item>, address: Option<String>) {
    let mut queue = VecDeque::new();
    let mut client = None;
    let mut pause = Duration::ZERO;
    loop {
        if queue.is_empty() {
            match items.recv().await {
                Some(item) => queue.push_back(item),
                None => return,
            }
        }
        while let Ok(item) = items.try_recv() {
            queue.push_back(item);
        }
        if queue.len() > MAX_QUEUE {
            warn!(
                dropped = queue.len() - MAX_QUEUE,
                "containerd takes no events; the oldest are given up"
            );
            queue.drain(..queue.len() - MAX_QUEUE);
        }
        let delivered = match queue.front() {
            Some(Item::Event(envelope)) => match &address {
                Some(address) => forward(&mut client, address, envelope).await,
                None => true,
            },
            Some(Item::Flush(_)) | None => true,
        };
        if delivered {
            pause = Duration::ZERO;
            if let Some(Item::Flush(done)) = queue.pop_front() {
                let _ = done.send(());
            }
        } else {
            client = None;
            pause = (pause * 2).clamp(Duration::from_millis(50), Duration::from_secs(2));
            tokio::time::sleep(pause).await;
        }
    }
}

/// Whether the event is dealt with: taken, or refused for good.
async fn forward(client: &mut Option<EventsClient>, address: &str, envelope: &Envelope) -> bool {
    if client.is_none() {
        let url = if address.contains("://") {
            address.to_owned()
        } else {
            format!("unix://{address}")
        };
        match Client::connect(&url).await {
            Ok(connected) => *client = Some(EventsClient::new(connected)),
            Err(error) => {
                debug!(%error, address, "connect to containerd's events service");
                return false;
            }
        }
    }
    let Some(events) = client.as_ref() else { return false };
    let mut request = ForwardRequest::new();
    request.envelope = Some(envelope.clone()).into();
    let mut context = with_duration(DELIVERY);
    context.add("containerd-namespace-ttrpc".into(), envelope.namespace.clone());
    match events.forward(context, &request).await {
        Ok(_) => true,
        Err(ttrpc::Error::RpcStatus(status)) if status.code() != ttrpc::Code::DEADLINE_EXCEEDED => {
            warn!(
                topic = envelope.topic,
                message = status.message(),
                "containerd refused an event"
            );
            true
        }
        Err(error) => {
            debug!(%error, "event not delivered yet");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use async_trait::async_trait;
    use protocol::containerd::events::task::TaskStart;
    use protocol::containerd::protobuf::Message;
    use protocol::containerd::protobuf::well_known_types::empty::Empty;
    use protocol::containerd::shim_async::{Events, create_events};
    use std::sync::{Arc, Mutex};

    struct Fake {
        seen: Arc<Mutex<Vec<(String, u32)>>>,
    }

    #[async_trait]
    impl Events for Fake {
        async fn forward(&self, _: &ttrpc::r#async::TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
            let event = request.envelope.event.clone();
            let start = TaskStart::parse_from_bytes(&event.value).unwrap();
            self.seen.lock().unwrap().push((event.type_url.clone(), start.pid));
            Ok(Empty::new())
        }
    }

    #[tokio::test]
    async fn order_survives_a_late_containerd() {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("unix://{}/events", dir.path().display());
        let publisher = Publisher::start("ns", Some(address.clone()));
        for pid in 0..50 {
            publisher.publish(
                "/tasks/start",
                &TaskStart {
                    pid,
                    ..Default::default()
                },
            );
        }
        tokio::task::yield_now().await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let service = create_events(Arc::new(Fake { seen: seen.clone() }));
        let mut server = ttrpc::asynchronous::Server::new()
            .bind(&address)
            .unwrap()
            .register_service(service);
        server.start().await.unwrap();
        publisher.flush(Duration::from_secs(10)).await;
        let pids: Vec<u32> = seen.lock().unwrap().iter().map(|(_, pid)| *pid).collect();
        assert_eq!(pids, (0..50).collect::<Vec<_>>());
        assert!(
            seen.lock()
                .unwrap()
                .iter()
                .all(|(url, _)| url == "containerd.events.TaskStart")
        );
        server.shutdown().await.unwrap();
    }
}
