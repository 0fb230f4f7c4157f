//! Standard streams of guest processes as vsock connections.

use std::io::ErrorKind;
use std::time::Duration;

use protocol::{StreamHeader, StreamKind, ports};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::guest::{END_FOLLOWS, GuestProcess};
use crate::vm::{Vm, VmError};

/// Longest answer line, in bytes.
const MAX_ANSWER: usize = 1024;
/// How long the agent may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Why a stream was not attached.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// No connection.
    #[error("connect to the guest's stream port")]
    Connect(#[from] VmError),
    /// The agent refused; so a restored process that has no such stream.
    #[error("the agent says: {0}")]
    Refused(String),
    /// The connection broke.
    #[error("speak on the stream connection")]
    Io(#[from] std::io::Error),
    /// No answer.
    #[error("no answer on the stream connection within {} s", LIMIT.as_secs())]
    Timeout,
}

/// Attaches one stream of a process.
///
/// # Errors
/// See [`StreamError`].
pub async fn attach(vm: &dyn Vm, process: &GuestProcess, stream: StreamKind) -> Result<UnixStream, StreamError> {
    let mut connection = vm.connect(ports::STREAMS).await?;
    let header = StreamHeader {
        container_id: process.container.clone(),
        exec_id: process.exec.clone(),
        stream,
    };
    let mut line = serde_json::to_vec(&header).map_err(std::io::Error::other)?;
    line.push(b'\n');
    let talk = async {
        connection.write_all(&line).await?;
        read_line(&mut connection).await
    };
    let answer = tokio::time::timeout(LIMIT, talk)
        .await
        .map_err(|_| StreamError::Timeout)?;
    let answer = match answer {
        Ok(answer) => answer,
        // Most often the first sign of the machine's end, which tells more.
        Err(error) => {
            return Err(match tokio::time::timeout(END_FOLLOWS, vm.ended()).await {
                Ok(reason) => StreamError::Connect(VmError::Gone(reason)),
                Err(_) => error.into(),
            });
        }
    };
    match answer.as_str() {
        "ok" => Ok(connection),
        other => Err(StreamError::Refused(
            other.strip_prefix("error: ").unwrap_or(other).to_owned(),
        )),
    }
}

/// Reads the answer byte by byte, so that nothing of the stream behind it is taken.
pub(crate) async fn read_line(connection: &mut UnixStream) -> std::io::Result<String> {
    let mut line = Vec::new();
    loop {
        match connection.read_u8().await? {
            b'\n' => break,
            byte if line.len() < MAX_ANSWER => line.push(byte),
            _ => return Err(std::io::Error::new(ErrorKind::InvalidData, "answer line is too long")),
        }
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}
