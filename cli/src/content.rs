//! Blobs in containerd's content store.

use std::collections::HashMap;
use std::io::{self, Write};

use anyhow::{Context, bail, ensure};
use containerd_client::services::v1::{
    AbortRequest, InfoRequest, ReadContentRequest, WriteAction, WriteContentRequest, WriteContentResponse,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Response;

use crate::client::{Answer, Client, if_found};

/// Largest JSON blob that is read, in bytes. Image manifests are limited to 4 MiB by registries.
const MAX_JSON_BYTES: i64 = 8 << 20;
/// Bytes of one message to containerd, which takes 16 MiB.
const MESSAGE_BYTES: usize = 1 << 20;
/// Messages on their way.
const QUEUE: usize = 4;

/// A blob that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blob {
    /// `sha256:…`
    pub(crate) digest: String,
    pub(crate) bytes: u64,
}

/// Digest of bytes as OCI writes it.
pub(crate) fn digest(bytes: &[u8]) -> String {
    finish_digest(Sha256::new_with_prefix(bytes))
}

fn finish_digest(hash: Sha256) -> String {
    format!("sha256:{}", checkpoint::manifest::hex(&hash.finalize()))
}

/// Size of a blob, or `None` if the store does not have it.
pub(crate) async fn size(client: &Client, digest: &str) -> anyhow::Result<Option<u64>> {
    let request = client.request(InfoRequest {
        digest: digest.to_owned(),
    });
    let answer = client
        .content()
        .info(request)
        .await
        .to(|| format!("look up blob {digest}"));
    let info = if_found(answer)?.and_then(|response| response.info);
    Ok(info.map(|info| u64::try_from(info.size).unwrap_or(0)))
}

/// Part of a blob. Never more than `bytes`, whatever containerd sends.
pub(crate) async fn read(client: &Client, digest: &str, offset: u64, bytes: i64) -> anyhow::Result<Vec<u8>> {
    let what = || format!("read blob {digest}");
    let offset = i64::try_from(offset)?;
    let request = client.request(ReadContentRequest {
        digest: digest.to_owned(),
        offset,
        size: bytes,
    });
    let mut stream = client.content().read(request).await.to(what)?;
    let mut out = Vec::new();
    while let Some(part) = stream.message().await.map(Response::new).to(what)? {
        out.extend_from_slice(&part.data);
        ensure!(
            i64::try_from(out.len())? <= bytes,
            "blob {digest} is larger than {bytes} bytes"
        );
    }
    Ok(out)
}

/// A small JSON blob, its digest checked.
pub(crate) async fn read_json(client: &Client, digest: &str) -> anyhow::Result<Value> {
    let Some(bytes) = size(client, digest).await? else {
        bail!("blob {digest} is not in containerd's content store; pull the image again")
    };
    let bytes = i64::try_from(bytes)?;
    ensure!(
        bytes <= MAX_JSON_BYTES,
        "blob {digest} has {bytes} bytes, more than an image manifest or config can have"
    );
    let content = read(client, digest, 0, bytes).await?;
    ensure!(
        self::digest(&content) == digest,
        "blob {digest} is damaged: its content has another digest"
    );
    serde_json::from_slice(&content).with_context(|| format!("blob {digest} is not JSON"))
}

/// Stores bytes.
pub(crate) async fn write(
    client: &Client,
    reference: &str,
    bytes: Vec<u8>,
    labels: HashMap<String, String>,
) -> anyhow::Result<Blob> {
    write_stream(client, reference, labels, move |out| Ok(out.write_all(&bytes)?)).await
}

/// Stores what `produce` writes, on another thread, while it writes. A failed write leaves nothing in the store.
pub(crate) async fn write_stream<F>(
    client: &Client,
    reference: &str,
    labels: HashMap<String, String>,
    produce: F,
) -> anyhow::Result<Blob>
where
    F: FnOnce(&mut BlobWriter) -> anyhow::Result<()> + Send + 'static,
{
    let result = try_write_stream(client, reference, labels, produce).await;
    if result.is_err() {
        // The first error is the one to report; what is left, the end of the lease removes.
        let _ = client
            .content()
            .abort(client.request(AbortRequest {
                r#ref: reference.to_owned(),
            }))
            .await;
    }
    result
}

async fn try_write_stream<F>(
    client: &Client,
    reference: &str,
    labels: HashMap<String, String>,
    produce: F,
) -> anyhow::Result<Blob>
where
    F: FnOnce(&mut BlobWriter) -> anyhow::Result<()> + Send + 'static,
{
    let (sender, receiver) = channel(QUEUE);
    let mut writer = BlobWriter {
        sender,
        reference: reference.to_owned(),
        buffer: Vec::with_capacity(MESSAGE_BYTES),
        hash: Sha256::new(),
        sent: 0,
    };
    let producer = tokio::task::spawn_blocking(move || {
        produce(&mut writer)?;
        writer.commit(labels)
    });
    let consumed = consume(client, reference, ReceiverStream::new(receiver)).await;
    // The sender is kept until containerd has answered: some servers lose the answer to a stream that was half closed.
    let produced = producer.await.context("the writing thread ended early")?;
    let committed = match (consumed, produced) {
        (Ok(response), Ok((blob, _sender))) => response.map(|response| (response, blob)),
        // A producer that found the stream closed only says so; why it was closed is the better error.
        (Err(error), _) | (Ok(_), Err(error)) => return Err(error),
    };
    let Some((response, blob)) = committed else {
        bail!("containerd did not commit blob {reference}")
    };
    ensure!(
        response.digest == blob.digest,
        "containerd stored {reference} as {}, expected {}",
        response.digest,
        blob.digest
    );
    Ok(blob)
}

/// Sends the messages and returns the answer to the commit.
async fn consume(
    client: &Client,
    reference: &str,
    messages: ReceiverStream<WriteContentRequest>,
) -> anyhow::Result<Option<WriteContentResponse>> {
    let what = || format!("write blob {reference}");
    let mut answers = client.content().write(client.request(messages)).await.to(what)?;
    while let Some(answer) = answers.message().await.map(Response::new).to(what)? {
        if answer.action == WriteAction::Commit as i32 {
            return Ok(Some(answer));
        }
    }
    Ok(None)
}

/// Sends what is written to it as messages, and hashes it.
#[derive(Debug)]
pub(crate) struct BlobWriter {
    sender: Sender<WriteContentRequest>,
    reference: String,
    buffer: Vec<u8>,
    hash: Sha256,
    sent: u64,
}

impl BlobWriter {
    fn send(&mut self, message: WriteContentRequest) -> io::Result<()> {
        let length = message.data.len() as u64;
        let offset = i64::try_from(self.sent).map_err(io::Error::other)?;
        let message = WriteContentRequest {
            r#ref: self.reference.clone(),
            offset,
            ..message
        };
        let closed = |_| io::Error::new(io::ErrorKind::BrokenPipe, "containerd ended the transfer");
        self.sender.blocking_send(message).map_err(closed)?;
        self.sent += length;
        Ok(())
    }

    fn take_buffer(&mut self) -> Vec<u8> {
        let data = std::mem::replace(&mut self.buffer, Vec::with_capacity(MESSAGE_BYTES));
        self.hash.update(&data);
        data
    }

    fn commit(mut self, labels: HashMap<String, String>) -> anyhow::Result<(Blob, Sender<WriteContentRequest>)> {
        let data = self.take_buffer();
        let digest = finish_digest(self.hash.clone());
        let bytes = self.sent + data.len() as u64;
        self.send(WriteContentRequest {
            action: WriteAction::Commit as i32,
            total: i64::try_from(bytes)?,
            expected: digest.clone(),
            data,
            labels,
            ..WriteContentRequest::default()
        })?;
        Ok((Blob { digest, bytes }, self.sender))
    }
}

impl Write for BlobWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(MESSAGE_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == MESSAGE_BYTES {
            let data = self.take_buffer();
            let action = WriteAction::Write as i32;
            self.send(WriteContentRequest {
                action,
                data,
                ..WriteContentRequest::default()
            })?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
