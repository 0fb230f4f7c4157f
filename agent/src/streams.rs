//! The stream port: each connection brings a header line, gets an answer line, and becomes one standard stream, or brings files.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use protocol::{StreamHeader, StreamKind};

use crate::agent::Agent;
use crate::error::{AgentError, Result};
use crate::fd::{Fd, Listener};
use crate::files;

/// Longest header line accepted, in bytes, with its newline.
const MAX_HEADER: usize = 4096;

/// How long a peer may take to send its header.
pub(crate) const HEADER_DEADLINE: Duration = Duration::from_secs(10);

/// Serves the stream port for ever.
///
/// # Errors
/// When the listener breaks.
pub async fn serve(agent: Arc<Agent>, listener: Listener) -> io::Result<()> {
    loop {
        let connection = listener.accept().await?;
        let agent = agent.clone();
        tokio::spawn(async move {
            if let Ok(Err(error)) = tokio::time::timeout(HEADER_DEADLINE, attach(&agent, connection)).await {
                tracing::warn!("stream connection: {error}");
            }
        });
    }
}

async fn attach(agent: &Agent, connection: Fd) -> io::Result<()> {
    let (line, early) = read_line(&connection).await?;
    let header = match parse(&line) {
        Ok(header) if header.stream == StreamKind::Files => return send_files(agent, connection, &header).await,
        header => header,
    };
    match header.and_then(|header| agent.stream_port(&header)) {
        Ok(port) => {
            connection.write_all(b"ok\n").await?;
            port.attach(connection, early, agent.epoch());
            Ok(())
        }
        Err(error) => refuse(&connection, &error).await,
    }
}

async fn refuse(connection: &Fd, error: &AgentError) -> io::Result<()> {
    let text = error.text().replace('\n', " ");
    connection.write_all(format!("error: {text}\n").as_bytes()).await?;
    connection.shutdown_write();
    Ok(())
}

/// Sends what a container wrote, beside the event loop.
async fn send_files(agent: &Agent, connection: Fd, header: &StreamHeader) -> io::Result<()> {
    let upper = match agent.upper_path(&header.container_id) {
        Ok(upper) => upper,
        Err(error) => return refuse(&connection, &error).await,
    };
    connection.write_all(b"ok\n").await?;
    let connection = connection.into_blocking()?;
    tokio::task::spawn_blocking(move || {
        if let Err(error) = files::send(&upper, connection) {
            tracing::warn!("send files: {error}");
        }
    });
    Ok(())
}

/// The first line, without its newline, and what came after it.
pub(crate) async fn read_line(connection: &Fd) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut bytes = vec![0u8; MAX_HEADER];
    let mut filled = 0;
    loop {
        let space = bytes.get_mut(filled..).unwrap_or_default();
        if space.is_empty() {
            return Err(io::Error::other("the header is too long"));
        }
        let count = connection.read(space).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += count;
        bytes.truncate(filled);
        if let Some(end) = bytes.iter().position(|&b| b == b'\n') {
            let early = bytes.split_off(end + 1);
            bytes.truncate(end);
            return Ok((bytes, early));
        }
        bytes.resize(MAX_HEADER, 0);
    }
}

/// Reads a header line.
///
/// # Errors
/// When it is not one.
pub fn parse(line: &[u8]) -> Result<StreamHeader> {
    serde_json::from_slice(line).map_err(|error| AgentError::Invalid(format!("stream header: {error}")))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;
    use protocol::StreamKind;

    use super::*;

    proptest! {
        #[test]
        fn no_header_line_can_hurt(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&line);
        }

        #[test]
        fn headers_survive_the_trip(container_id in ".{0,40}", exec_id in ".{0,40}") {
            let header = StreamHeader { container_id, exec_id, stream: StreamKind::Stderr };
            let line = serde_json::to_vec(&header).expect("it is plain data");
            prop_assert!(!line.contains(&b'\n'));
            prop_assert_eq!(parse(&line).expect("it is a header"), header);
        }
    }

    fn pair() -> (UnixStream, Fd) {
        let (host, guest) = UnixStream::pair().expect("a socket pair");
        (host, Fd::new(guest.into()).expect("it can be polled"))
    }

    #[tokio::test]
    async fn what_follows_the_line_is_kept() {
        let (mut host, guest) = pair();
        host.write_all(b"{}\nfirst input").expect("room in the socket");
        let (line, early) = read_line(&guest).await.expect("a line");
        assert_eq!((line.as_slice(), early.as_slice()), (&b"{}"[..], &b"first input"[..]));
    }

    #[tokio::test]
    async fn an_endless_header_is_refused() {
        let (mut host, guest) = pair();
        host.write_all(&[b'x'; MAX_HEADER + 1]).expect("room in the socket");
        assert!(read_line(&guest).await.is_err());
    }

    #[tokio::test]
    async fn a_connection_without_a_line_is_refused() {
        let (host, guest) = pair();
        drop(host);
        assert!(read_line(&guest).await.is_err());
    }
}
