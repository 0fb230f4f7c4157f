//! The packet header of virtio-vsock.

use super::super::GUEST_CID;
use super::super::queue::Segments;
use super::HOST_CID;

/// Bytes of a header.
pub(super) const HEADER: usize = 44;
/// Most bytes of data in one packet.
pub(super) const DATA_MAX: u32 = 64 * 1024;
/// The only type of socket that we have.
pub(super) const TYPE_STREAM: u16 = 1;
/// Shutdown flag: the sender of the packet will receive no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// Shutdown flag: the sender of the packet will send no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
/// Both.
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Request,
    Response,
    Reset,
    Shutdown,
    Data,
    CreditUpdate,
    CreditRequest,
    /// No valid one.
    Unknown(u16),
}

impl From<u16> for Op {
    fn from(op: u16) -> Self {
        match op {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            other => Self::Unknown(other),
        }
    }
}

impl From<Op> for u16 {
    fn from(op: Op) -> Self {
        match op {
            Op::Request => 1,
            Op::Response => 2,
            Op::Reset => 3,
            Op::Shutdown => 4,
            Op::Data => 5,
            Op::CreditUpdate => 6,
            Op::CreditRequest => 7,
            Op::Unknown(other) => other,
        }
    }
}

/// `struct virtio_vsock_hdr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) source_cid: u64,
    pub(super) target_cid: u64,
    pub(super) source_port: u32,
    pub(super) target_port: u32,
    /// Bytes of data after the header.
    pub(super) len: u32,
    pub(super) socket_type: u16,
    pub(super) op: Op,
    pub(super) flags: u32,
    /// Size of the sender's receive buffer.
    pub(super) buf_alloc: u32,
    /// Bytes that have left that buffer, as a free-running counter.
    pub(super) fwd_cnt: u32,
}

fn pick<const N: usize>(bytes: &[u8; HEADER], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

impl Header {
    /// Takes a header from the front of a chain.
    pub(super) fn read(from: &mut Segments<'_>) -> Option<Self> {
        from.read_array().map(|bytes| Self::parse(&bytes))
    }

    /// Reads the bytes on the ring; any are a header.
    pub(super) fn parse(bytes: &[u8; HEADER]) -> Self {
        Self {
            source_cid: u64::from_le_bytes(pick(bytes, 0)),
            target_cid: u64::from_le_bytes(pick(bytes, 8)),
            source_port: u32::from_le_bytes(pick(bytes, 16)),
            target_port: u32::from_le_bytes(pick(bytes, 20)),
            len: u32::from_le_bytes(pick(bytes, 24)),
            socket_type: u16::from_le_bytes(pick(bytes, 28)),
            op: u16::from_le_bytes(pick(bytes, 30)).into(),
            flags: u32::from_le_bytes(pick(bytes, 32)),
            buf_alloc: u32::from_le_bytes(pick(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(pick(bytes, 40)),
        }
    }

    /// The bytes on the ring.
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.source_cid.to_le_bytes());
        put(8, &self.target_cid.to_le_bytes());
        put(16, &self.source_port.to_le_bytes());
        put(20, &self.target_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.socket_type.to_le_bytes());
        put(30, &u16::from(self.op).to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// The two ports that name a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

impl Ports {
    /// A packet to the guest without data.
    pub(super) fn header(self, op: Op) -> Header {
        Header {
            source_cid: HOST_CID,
            target_cid: GUEST_CID,
            source_port: self.host,
            target_port: self.guest,
            len: 0,
            socket_type: TYPE_STREAM,
            op,
            flags: 0,
            buf_alloc: 0,
            fwd_cnt: 0,
        }
    }
}
