//! One stream: threads that take turns to read a message, and answer it each on its own.

use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use crate::frame::{MAX_MESSAGE, read_request};
use crate::handler::Handler;

/// Bytes that are read ahead: small messages come in one call.
const AHEAD: usize = 64 * 1024;

/// A connected stream and the tree that it is about.
pub struct Session {
    handler: Handler,
    reading: Mutex<BufReader<UnixStream>>,
    stream: UnixStream,
    /// Held while a reply is written to the stream, so that it stays whole.
    writing: Mutex<()>,
}

impl Session {
    /// Speaks over `stream`.
    ///
    /// # Errors
    /// The stream cannot be duplicated.
    pub fn new(handler: Handler, stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        let reading = Mutex::new(BufReader::with_capacity(AHEAD, stream.try_clone()?));
        Ok(Self {
            handler,
            reading,
            stream,
            writing: Mutex::default(),
        })
    }

    /// Serves with so many threads until the stream ends.
    ///
    /// # Errors
    /// A thread cannot be started; then the stream is ended.
    pub fn start(self, threads: usize) -> io::Result<()> {
        let session = Arc::new(self);
        for _ in 0..threads {
            let serving = session.clone();
            std::thread::Builder::new()
                .name("volume".into())
                .spawn(move || serving.serve())
                .inspect_err(|_| session.end())?;
        }
        Ok(())
    }

    /// Answers messages until the stream ends or what comes is none.
    pub fn serve(&self) {
        let mut message = vec![0; MAX_MESSAGE];
        let mut reply = vec![0; MAX_MESSAGE];
        while let Ok(true) = self.turn(&mut message, &mut reply) {}
        self.end();
    }

    /// Threads that wait for a message see the end of the stream.
    fn end(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    fn turn(&self, message: &mut [u8], reply: &mut [u8]) -> io::Result<bool> {
        let read = {
            let mut stream = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
            read_request(&mut *stream, message)?
        };
        let Some(header) = read else { return Ok(false) };
        let message = message.get_mut(..header.length).unwrap_or_default();
        let length = self.handler.answer(header, message, reply);
        if length > 0 {
            let _whole = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            (&self.stream).write_all(reply.get(..length).unwrap_or_default())?;
        }
        Ok(true)
    }
}
