//! The little of netlink that agent and shim need: requests with an acknowledgement, and dumps. Sockets belong to the network
//! namespace of the thread that opens them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, send, socket,
};

/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;

/// `NLMSG_ERROR` and `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Bits of a request: as in linux/netlink.h.
const REQUEST: u16 = 1;
const ACK: u16 = 4;
/// All entries.
const DUMP: u16 = 0x300;
/// Make it, or fail if it is there.
pub const CREATE_EXCL: u16 = 0x600;
/// Make it, or replace what is there.
pub const CREATE_REPLACE: u16 = 0x500;

/// A netlink socket.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

/// A message under construction: a fixed part and attributes.
#[derive(Clone, Debug, Default)]
pub struct Body(Vec<u8>);

impl Body {
    /// Starts with the fixed part of the message.
    pub fn new(fixed: &[u8]) -> Self {
        Self(fixed.to_vec())
    }

    /// Adds an attribute that is made of attributes.
    #[must_use]
    pub fn nested(self, kind: u16, inner: &Self) -> Self {
        self.attribute(kind, &inner.0)
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

impl Netlink {
    /// Opens a routing socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn route() -> io::Result<Self> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket-diagnosis socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn sock_diag() -> io::Result<Self> {
        Self::open(SockProtocol::NetlinkSockDiag)
    }

    fn open(protocol: SockProtocol) -> io::Result<Self> {
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self(fd))
    }

    /// Sends a request and waits for its acknowledgement.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn request(&self, kind: u16, flags: u16, body: &Body) -> io::Result<()> {
        self.send(kind, REQUEST | ACK | flags, body)?;
        self.receive(|_, _| {})
    }

    /// Sends a dump request and gives every answer's kind and payload to `visit`.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn dump(&self, kind: u16, body: &Body, visit: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, REQUEST | DUMP, body)?;
        self.receive(visit)
    }

    fn send(&self, kind: u16, flags: u16, body: &Body) -> io::Result<()> {
        let length = u32::try_from(HEADER + body.0.len()).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(HEADER + body.0.len());
        message.extend_from_slice(&length.to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&flags.to_ne_bytes());
        message.extend_from_slice(&[0; 8]);
        message.extend_from_slice(&body.0);
        send(self.0.as_raw_fd(), &message, MsgFlags::empty())?;
        Ok(())
    }

    fn receive(&self, mut visit: impl FnMut(u16, &[u8])) -> io::Result<()> {
        let mut buffer = vec![0u8; 64 * 1024];
        loop {
            let (count, from) = recvfrom::<NetlinkAddr>(self.0.as_raw_fd(), &mut buffer)?;
            // Whoever may administrate the namespace can send to this socket, too. The kernel is port 0.
            if from.is_none_or(|from| from.pid() != 0) {
                continue;
            }
            if let Some(done) = take(buffer.get(..count).unwrap_or_default(), &mut visit) {
                return done;
            }
        }
    }
}

/// Gives what a datagram tells to `visit`; the result, if it has one.
fn take(datagram: &[u8], visit: &mut impl FnMut(u16, &[u8])) -> Option<io::Result<()>> {
    for (kind, payload) in messages(datagram) {
        match kind {
            // Also the end of a dump that failed on the way.
            DONE | ERROR => return Some(result(payload)),
            kind => visit(kind, payload),
        }
    }
    None
}

fn result(payload: &[u8]) -> io::Result<()> {
    match i32_at(payload, 0) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        None => Err(io::Error::other("a short netlink answer")),
    }
}

/// Kind and payload of each message in a datagram.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(bytes, 0)?).ok()?;
        let kind = u16_at(bytes, 4)?;
        let payload = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    })
}

/// Kind and value of each attribute behind the fixed part of a payload.
pub fn attributes(payload: &[u8], fixed: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut bytes = payload.get(fixed..).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)?;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The native-endian number at an offset.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The native-endian number at an offset.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The native-endian number at an offset.
pub fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{getsockname, sendto};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_datagram_can_hurt(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (_, payload) in messages(&bytes) {
                let _ = attributes(payload, 4).count();
            }
            let _ = take(&bytes, &mut |_, _| {});
        }

        #[test]
        fn attributes_survive_the_trip(values in prop::collection::vec((any::<u16>(), prop::collection::vec(any::<u8>(), 0..20)), 0..8)) {
            let body = values.iter().fold(Body::new(&[0; 8]), |body, (kind, value)| body.attribute(*kind, value));
            let found: Vec<_> = attributes(&body.0, 8).map(|(kind, value)| (kind, value.to_vec())).collect();
            prop_assert_eq!(found, values);
        }
    }

    #[test]
    fn a_dump_that_failed_on_the_way_is_no_success() {
        let datagram = |kind: u16, code: i32| {
            let mut bytes = 20u32.to_ne_bytes().to_vec();
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.extend(code.to_ne_bytes());
            bytes
        };
        let mut seen = Vec::new();
        let both = [datagram(16, 7), datagram(DONE, -libc::ENODEV)].concat();
        let done = take(&both, &mut |kind, payload| seen.push((kind, payload.to_vec())));
        let error = done.and_then(Result::err).and_then(|error| error.raw_os_error());
        assert_eq!(error, Some(libc::ENODEV));
        assert_eq!(seen, [(16, 7i32.to_ne_bytes().to_vec())]);
        assert!(take(&datagram(DONE, 0), &mut |_, _| {}).is_some_and(|done| done.is_ok()));
        assert!(take(&datagram(16, 0), &mut |_, _| {}).is_none(), "more will come");
    }

    #[test]
    fn only_the_kernel_is_believed() {
        let netlink = Netlink::route().expect("any process may open one");
        let ours: NetlinkAddr = getsockname(netlink.0.as_raw_fd()).expect("it is bound");
        let other = Netlink::route().expect("any process may open one");
        // An empty acknowledgement; without CAP_NET_ADMIN it cannot even be sent.
        let mut forged = [0; 20];
        forged[0] = 20;
        forged[4] = 2;
        let _ = sendto(other.0.as_raw_fd(), &forged, &ours, MsgFlags::empty());
        assert!(netlink.request(libc::RTM_DELLINK, 0, &Body::new(&[0; 16])).is_err());
    }

    #[test]
    fn the_kernel_answers() {
        let netlink = Netlink::route().expect("any process may open one");
        let mut links = 0;
        netlink
            .dump(libc::RTM_GETLINK, &Body::new(&[0; 16]), |_, _| links += 1)
            .expect("any process may ask");
        assert!(links > 0, "there is at least lo");
        // An unknown request is refused, not ignored.
        assert!(netlink.request(libc::RTM_DELLINK, 0, &Body::new(&[0; 16])).is_err());
    }
}
