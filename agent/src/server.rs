//! The ttrpc port. Each connection gets a server of its own, so that calls know which connection they came on.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use protocol::containerd::shim_async::create_task;
use protocol::guest_ttrpc::create_guest;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use ttrpc::asynchronous::Server;
use ttrpc::asynchronous::transport::Listener as Incoming;

use crate::agent::Agent;
use crate::fd::{Fd, Listener};
use crate::guest_service::GuestService;
use crate::state::ConnectionId;
use crate::task_service::TaskService;

/// Serves the Task and Guest services for ever.
///
/// # Errors
/// When the listener breaks.
pub async fn serve(agent: Arc<Agent>, listener: Listener) -> io::Result<()> {
    // In the guest's memory, so a fork goes on counting where its parent was.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    loop {
        let connection = listener.accept().await?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(serve_connection(agent.clone(), connection, id));
    }
}

async fn serve_connection(agent: Arc<Agent>, connection: Fd, id: ConnectionId) {
    let (closing, closed) = oneshot::channel();
    let connection = Connection {
        fd: connection,
        _closing: closing,
    };
    let task = create_task(Arc::new(TaskService::new(agent.clone())));
    let guest = create_guest(Arc::new(GuestService::new(agent, id)));
    let mut server = Server::new()
        .add_listener(Incoming::new(tokio_stream::once(Ok(connection))))
        .register_service(task)
        .register_service(guest);
    if let Err(error) = server.start().await {
        tracing::warn!("serve connection {id}: {error}");
        return;
    }
    // Dropping the server would end the connection.
    let _ = closed.await;
}

/// A connection whose end can be waited for.
struct Connection {
    fd: Fd,
    _closing: oneshot::Sender<()>,
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.fd).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.fd).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.fd).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.fd).poll_shutdown(cx)
    }
}

/// Runs a request to its end even if its connection goes away in the middle.
pub(crate) async fn detached<T: Send + 'static>(
    request: impl Future<Output = crate::error::Result<T>> + Send + 'static,
) -> ttrpc::Result<T> {
    match tokio::spawn(request).await {
        Ok(result) => Ok(result?),
        Err(error) => Err(crate::error::AgentError::Runtime(format!("the request broke off: {error}")).into()),
    }
}
