//! Pumps between the standard streams of a process and whatever connection is attached to them at the moment.
//!
//! Each stream has a task that owns the agent's end (pipe or terminal) for as long as the process is known. Connections come and
//! go: one that breaks takes nothing with it, the next goes on where it stopped. A stream without a connection is not
//! read, so its pipe fills and the process waits; the agent never does.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::fd::Fd;

/// Bytes moved at once.
const CHUNK: usize = 64 * 1024;

/// How long a finished stream's connection may take to be closed by its peer.
const LINGER: Duration = Duration::from_secs(10);

/// What a pump is told.
#[derive(Debug)]
enum Command {
    /// A connection, what was read from it beyond the header, and the epoch it belongs to.
    Attach(Fd, Vec<u8>, u64),
    /// Output: answer when the pipe is empty or nobody is attached.
    Flush(oneshot::Sender<()>),
    /// Input: close the process's stdin after what has arrived.
    CloseInput,
    /// Drop a connection that is older than this epoch.
    DropBefore(u64),
}

/// Where a pump stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// A connection is attached.
    pub attached: bool,
    /// Everything was delivered and the process's side is closed.
    pub finished: bool,
}

/// The handle of one stream. Dropping it ends the pump and closes the agent's end.
#[derive(Debug)]
pub struct Port {
    commands: mpsc::UnboundedSender<Command>,
    progress: watch::Receiver<Progress>,
}

/// Direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Host to process.
    Input {
        /// On a terminal the end of the connection closes nothing.
        terminal: bool,
    },
    /// Process to host.
    Output {
        /// What comes before the first connection is thrown away: nobody will ask for it.
        discard: bool,
    },
}

impl Direction {
    fn is_output(self) -> bool {
        matches!(self, Self::Output { .. })
    }
}

impl Port {
    /// Starts the pump of a stream. The agent's end is sent once the process exists; dropping that sender ends the stream.
    /// While `held` is true nothing is moved.
    pub fn new(direction: Direction, held: watch::Receiver<bool>) -> (Self, oneshot::Sender<Fd>) {
        let (commands, receiver) = mpsc::unbounded_channel();
        let (progress, watcher) = watch::channel(Progress::default());
        let (end, source) = oneshot::channel();
        let pump = Pump {
            held,
            commands: receiver,
            progress,
            connection: None,
            epoch: 0,
            pending: VecDeque::new(),
            flush: None,
            close: false,
            discard: matches!(direction, Direction::Output { discard: true }),
        };
        tokio::spawn(pump.run(direction, source));
        (
            Self {
                commands,
                progress: watcher,
            },
            end,
        )
    }

    /// Attaches a connection in the place of any earlier one. `early` are bytes already read from it.
    pub fn attach(&self, connection: Fd, early: Vec<u8>, epoch: u64) {
        // A pump that has ended drops the connection, which the peer sees.
        let _ = self.commands.send(Command::Attach(connection, early, epoch));
    }

    /// Asks at once for the delivery of what is in the pipe; resolves when it is done or nobody is there to take it.
    pub fn flush(&self) -> impl Future<Output = ()> + Send + use<> {
        let (reply, done) = oneshot::channel();
        let _ = self.commands.send(Command::Flush(reply));
        // A pump that has nothing to deliver drops the request.
        async move { drop(done.await) }
    }

    /// Closes the process's stdin after what has arrived.
    pub fn close_input(&self) {
        let _ = self.commands.send(Command::CloseInput);
    }

    /// Drops the connection if it was attached before `epoch`.
    pub fn drop_before(&self, epoch: u64) {
        let _ = self.commands.send(Command::DropBefore(epoch));
    }

    /// Waits until everything was delivered, or nobody is there to take it.
    pub async fn drained(&self) {
        let mut progress = self.progress.clone();
        // An error means that the pump has ended.
        let _ = progress.wait_for(|p| p.finished || !p.attached).await;
    }
}

struct Pump {
    held: watch::Receiver<bool>,
    commands: mpsc::UnboundedReceiver<Command>,
    progress: watch::Sender<Progress>,
    connection: Option<Fd>,
    epoch: u64,
    /// Taken from one side and not yet given to the other.
    pending: VecDeque<u8>,
    flush: Option<oneshot::Sender<()>>,
    close: bool,
    /// See [`Direction::Output`].
    discard: bool,
}

impl Pump {
    async fn run(mut self, direction: Direction, mut source: oneshot::Receiver<Fd>) {
        let end = loop {
            tokio::select! {
                biased;
                end = &mut source => break end.ok(),
                command = self.commands.recv() => match command {
                    Some(command) => self.handle(command, direction),
                    None => return,
                },
            }
            // Nothing is there yet that could be flushed.
            self.flush = None;
        };
        match (direction, end) {
            (Direction::Output { .. }, Some(end)) => self.output(end).await,
            (Direction::Input { terminal }, Some(end)) => self.input(end, terminal).await,
            (_, None) => {}
        }
        self.finish(direction).await;
    }

    fn handle(&mut self, command: Command, direction: Direction) {
        match command {
            Command::Attach(connection, early, epoch) => {
                self.connection = Some(connection);
                self.epoch = epoch;
                self.discard = false;
                if !direction.is_output() {
                    self.pending.extend(early);
                }
            }
            Command::Flush(reply) => self.flush = Some(reply),
            Command::CloseInput => self.close = true,
            Command::DropBefore(epoch) if self.epoch < epoch => {
                self.connection = None;
                if !direction.is_output() {
                    // Input of the parent that its process had no room for yet.
                    self.pending.clear();
                    self.close = false;
                }
            }
            Command::DropBefore(_) => {}
        }
        self.report(false);
    }

    fn report(&self, finished: bool) {
        let now = Progress {
            attached: self.connection.is_some(),
            finished,
        };
        self.progress.send_if_modified(|was| std::mem::replace(was, now) != now);
    }

    fn disconnect(&mut self) {
        self.connection = None;
        self.report(false);
    }

    /// Output of the process, on its way.
    fn take(&mut self, bytes: &[u8]) {
        if !self.discard {
            self.pending.extend(bytes);
        }
    }

    fn is_held(&self) -> bool {
        *self.held.borrow()
    }

    /// Process to host, until the process's side is closed and delivered, or the handle is gone.
    async fn output(&mut self, end: Fd) {
        let mut buffer = vec![0u8; CHUNK];
        let mut probe = [0u8; 64];
        let mut closed = false;
        let mut peer_talks = true;
        loop {
            if self.pending.is_empty() {
                if closed {
                    return;
                }
                if let Some(flush) = self.flush.take() {
                    let wanted = self.connection.is_some() || self.discard;
                    match wanted.then(|| end.try_read(&mut buffer)) {
                        Some(Ok(Some(count))) if count > 0 => {
                            self.take(buffer.get(..count).unwrap_or_default());
                            self.flush = Some(flush);
                        }
                        Some(Ok(Some(_)) | Err(_)) => closed = true,
                        Some(Ok(None)) | None => {
                            // Whoever asked may have given up.
                            let _ = flush.send(());
                        }
                    }
                    continue;
                }
            } else if self.connection.is_none() {
                self.flush = None;
            }
            let moving = !self.is_held() || self.flush.is_some();
            let connected = self.connection.is_some();
            let wanted = connected || self.discard;
            tokio::select! {
                written = write_some(self.connection.as_ref(), &self.pending), if moving && connected && !self.pending.is_empty() => {
                    match written {
                        Ok(count) => drop(self.pending.drain(..count)),
                        Err(_) => self.disconnect(),
                    }
                }
                read = end.read(&mut buffer), if moving && wanted && self.pending.is_empty() => match read {
                    Ok(0) => closed = true,
                    Ok(count) => self.take(buffer.get(..count).unwrap_or_default()),
                    // EIO: the last holder of the terminal is gone.
                    Err(_) => closed = true,
                },
                heard = read_some(self.connection.as_ref(), &mut probe), if connected && peer_talks => match heard {
                    Ok(0) => peer_talks = false,
                    Ok(_) => {}
                    Err(_) => self.disconnect(),
                },
                command = self.commands.recv() => match command {
                    Some(command) => {
                        self.handle(command, Direction::Output { discard: false });
                        peer_talks = true;
                    }
                    None => return,
                },
                _ = self.held.changed() => {}
            }
        }
    }

    /// Host to process, until either side is closed, or the handle is gone.
    async fn input(&mut self, end: Fd, terminal: bool) {
        let mut buffer = vec![0u8; CHUNK];
        loop {
            self.flush = None;
            let moving = !self.is_held();
            if self.pending.is_empty() && self.close && moving {
                match self.connection.as_ref().map(|c| c.try_read(&mut buffer)) {
                    Some(Ok(Some(count))) if count > 0 => {
                        self.pending.extend(buffer.get(..count).unwrap_or_default());
                    }
                    _ if terminal => self.close = false,
                    _ => return,
                }
            }
            let connected = self.connection.is_some();
            tokio::select! {
                written = write_some(Some(&end), &self.pending), if moving && !self.pending.is_empty() => match written {
                    Ok(count) => drop(self.pending.drain(..count)),
                    // The process has closed its stdin.
                    Err(_) => return,
                },
                read = read_some(self.connection.as_ref(), &mut buffer), if moving && connected && self.pending.is_empty() => {
                    match read {
                        // Orderly: the kernel reports a reset as an error.
                        Ok(0) => {
                            self.disconnect();
                            self.close = true;
                        }
                        Ok(count) => self.pending.extend(buffer.get(..count).unwrap_or_default()),
                        Err(_) => self.disconnect(),
                    }
                }
                command = self.commands.recv() => match command {
                    Some(command) => self.handle(command, Direction::Input { terminal }),
                    None => return,
                },
                _ = self.held.changed() => {}
            }
        }
    }

    /// The stream is over: tell whoever is attached, and whoever still comes.
    async fn finish(&mut self, direction: Direction) {
        loop {
            self.flush = None;
            if let Some(connection) = self.connection.take()
                && direction.is_output()
            {
                connection.shutdown_write();
                tokio::spawn(linger(connection));
            }
            self.report(true);
            match self.commands.recv().await {
                Some(command) => self.handle(command, direction),
                None => return,
            }
        }
    }
}

/// Lets the peer read to the end before the connection is closed.
async fn linger(connection: Fd) {
    let until_closed = async {
        let mut buffer = [0u8; 64];
        while matches!(connection.read(&mut buffer).await, Ok(1..)) {}
    };
    let _ = tokio::time::timeout(LINGER, until_closed).await;
}

async fn write_some(to: Option<&Fd>, bytes: &VecDeque<u8>) -> std::io::Result<usize> {
    match to {
        Some(to) => to.write(bytes.as_slices().0).await,
        None => std::future::pending().await,
    }
}

async fn read_some(from: Option<&Fd>, buffer: &mut [u8]) -> std::io::Result<usize> {
    match from {
        Some(from) => from.read(buffer).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn connection() -> (UnixStream, Fd) {
        let (host, guest) = UnixStream::pair().expect("a socket pair");
        (host, Fd::new(guest.into()).expect("it can be polled"))
    }

    fn pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
        std::io::pipe().expect("a pipe")
    }

    /// Runs the host's side in a thread, as the runtime has only one.
    async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        tokio::task::spawn_blocking(work)
            .await
            .expect("the thread does not panic")
    }

    /// All that comes until the end.
    fn whole(from: &mut impl Read) -> String {
        let mut text = String::new();
        from.read_to_string(&mut text).expect("text");
        text
    }

    fn output(held: bool) -> (Port, std::io::PipeWriter, watch::Sender<bool>) {
        let (reader, writer) = pipe();
        let (hold, held) = watch::channel(held);
        let (port, end) = Port::new(Direction::Output { discard: false }, held);
        end.send(Fd::new(reader.into()).expect("a pipe"))
            .expect("the pump waits");
        (port, writer, hold)
    }

    fn input() -> (Port, std::io::PipeReader, watch::Sender<bool>) {
        let (reader, writer) = pipe();
        let (hold, held) = watch::channel(false);
        let (port, end) = Port::new(Direction::Input { terminal: false }, held);
        end.send(Fd::new(writer.into()).expect("a pipe"))
            .expect("the pump waits");
        (port, reader, hold)
    }

    #[tokio::test]
    async fn what_nobody_asked_for_is_thrown_away_until_somebody_does() {
        let (reader, mut writer) = pipe();
        let (_hold, held) = watch::channel(false);
        let (port, end) = Port::new(Direction::Output { discard: true }, held);
        end.send(Fd::new(reader.into()).expect("a pipe"))
            .expect("the pump waits");
        let mut writer = blocking(move || {
            writer.write_all(&[b'x'; 1 << 20]).expect("more than the pipe holds");
            writer
        })
        .await;
        port.flush().await;
        let (mut host, guest) = connection();
        port.attach(guest, Vec::new(), 0);
        let text = blocking(move || {
            writer.write_all(b"heard").expect("room");
            drop(writer);
            whole(&mut host)
        });
        assert_eq!(text.await, "heard");
    }

    #[tokio::test]
    async fn all_lines_arrive_whole_and_then_the_end() {
        let (port, mut writer, _hold) = output(false);
        let (mut host, guest) = connection();
        port.attach(guest, Vec::new(), 0);
        let writing = blocking(move || {
            for line in 0..200_000 {
                writeln!(writer, "line {line}").expect("the pump reads");
            }
        });
        let reading = blocking(move || whole(&mut host));
        let (_, text) = tokio::join!(writing, reading);
        assert_eq!(text.lines().count(), 200_000);
        assert!(text.ends_with("line 199999\n"));
        port.drained().await;
    }

    #[tokio::test]
    async fn the_next_connection_goes_on_where_the_last_broke() {
        let (port, mut writer, _hold) = output(false);
        let (mut host, guest) = connection();
        port.attach(guest, Vec::new(), 0);
        writer.write_all(b"one").expect("room in the pipe");
        let host = blocking(move || {
            let mut bytes = [0; 3];
            host.read_exact(&mut bytes).expect("the first words");
            assert_eq!(&bytes, b"one");
            host
        })
        .await;
        drop(host);
        writer.write_all(b"two").expect("room in the pipe");
        let (mut host, guest) = connection();
        port.attach(guest, Vec::new(), 0);
        drop(writer);
        let rest = blocking(move || whole(&mut host)).await;
        assert_eq!(rest, "two");
    }

    #[tokio::test]
    async fn flush_delivers_what_is_in_the_pipe_and_a_held_pump_moves_nothing() {
        let (port, mut writer, hold) = output(true);
        let (mut host, guest) = connection();
        port.attach(guest, Vec::new(), 0);
        writer.write_all(b"before").expect("room in the pipe");
        port.flush().await;
        writer.write_all(b"after").expect("room in the pipe");
        let (mut host, text) = blocking(move || {
            let mut bytes = [0; 64];
            let count = host.read(&mut bytes).expect("text");
            (host, String::from_utf8_lossy(&bytes[..count]).into_owned())
        })
        .await;
        assert_eq!(text, "before");
        host.set_nonblocking(true).expect("a socket");
        tokio::task::yield_now().await;
        assert!(host.read(&mut [0; 8]).is_err(), "nothing comes while held");
        host.set_nonblocking(false).expect("a socket");
        hold.send(false).expect("the pump listens");
        drop(writer);
        let rest = blocking(move || whole(&mut host)).await;
        assert_eq!(rest, "after");
    }

    #[tokio::test]
    async fn nobody_attached_means_nothing_to_flush() {
        let (port, mut writer, _hold) = output(false);
        writer.write_all(b"kept").expect("room in the pipe");
        port.flush().await;
        port.drained().await;
    }

    #[tokio::test]
    async fn an_orderly_end_closes_stdin_after_everything() {
        let (port, mut reader, _hold) = input();
        let (mut host, guest) = connection();
        port.attach(guest, b"early ".to_vec(), 0);
        host.write_all(b"late").expect("room in the socket");
        host.shutdown(Shutdown::Write).expect("a socket");
        let text = blocking(move || whole(&mut reader)).await;
        assert_eq!(text, "early late");
    }

    #[tokio::test]
    async fn close_input_closes_stdin_after_everything() {
        let (mut reader, writer) = pipe();
        let (_hold, held) = watch::channel(false);
        let (port, end) = Port::new(Direction::Input { terminal: false }, held);
        let (mut host, guest) = connection();
        host.write_all(b"all of it").expect("room in the socket");
        port.attach(guest, Vec::new(), 0);
        port.close_input();
        end.send(Fd::new(writer.into()).expect("a pipe"))
            .expect("the pump waits");
        let text = blocking(move || whole(&mut reader)).await;
        assert_eq!(text, "all of it");
    }

    #[tokio::test]
    async fn input_that_waits_for_room_does_not_reach_a_fork() {
        let (port, mut reader, hold) = input();
        let (mut host, guest) = connection();
        port.attach(guest, Vec::new(), 0);
        // More than the pipe takes: what is left was read by the pump, or waits in the socket.
        host.set_nonblocking(true).expect("a socket");
        let mut sent = 0;
        while sent < 2 * CHUNK {
            match host.write(&[b'p'; 4096]) {
                Ok(count) => sent += count,
                Err(_) => tokio::task::yield_now().await,
            }
        }
        for _ in 0..500 {
            tokio::task::yield_now().await;
        }
        hold.send(true).expect("the pump listens");
        port.drop_before(1);
        let (mut fork, guest) = connection();
        port.attach(guest, Vec::new(), 1);
        fork.write_all(b"fork").expect("room in the socket");
        fork.shutdown(Shutdown::Write).expect("a socket");
        hold.send(false).expect("the pump listens");
        let bytes = blocking(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).expect("bytes");
            bytes
        })
        .await;
        // A pipe holds as much as the pump moves at once.
        assert_eq!(bytes.len(), CHUNK + 4, "what was in the pipe, and the fork's own");
        assert!(bytes.ends_with(b"pfork"));
    }

    #[tokio::test]
    async fn old_connections_are_dropped_and_new_ones_kept() {
        let (port, mut writer, _hold) = output(false);
        let (mut old, guest) = connection();
        port.attach(guest, Vec::new(), 1);
        port.drop_before(2);
        let ended = blocking(move || old.read(&mut [0; 8])).await;
        assert!(matches!(ended, Ok(0)));
        let (mut new, guest) = connection();
        port.attach(guest, Vec::new(), 2);
        port.drop_before(2);
        writer.write_all(b"x").expect("room in the pipe");
        assert!(matches!(blocking(move || new.read(&mut [0; 8])).await, Ok(1)));
    }
}
