//! FUSE messages in a stream. Each begins with its own length, so nothing is added; the guest writes them, so nothing is believed.

use std::io::{self, Read};

/// Length of a request's header, in bytes.
pub const REQUEST_HEADER: usize = 40;
/// Length of a reply's header, in bytes.
pub const REPLY_HEADER: usize = 16;
/// Most bytes of file content in one message.
pub const MAX_DATA: usize = 1 << 20;
/// Largest message, in bytes: content and what describes it.
pub const MAX_MESSAGE: usize = MAX_DATA + 4096;

/// What of a request's header matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Of the whole message, header included, in bytes.
    pub length: usize,
    /// What is asked.
    pub opcode: u32,
    /// Names the request in its reply.
    pub unique: u64,
}

/// Reads the header of a request.
#[must_use]
pub fn parse(message: &[u8]) -> Option<RequestHeader> {
    let number = |at: usize| Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?));
    Some(RequestHeader {
        length: usize::try_from(number(0)?).ok()?,
        opcode: number(4)?,
        unique: u64::from_ne_bytes(message.get(8..16)?.try_into().ok()?),
    })
}

/// Reads the next request into `buffer`, which has [`MAX_MESSAGE`] bytes. `None`: the stream ended between two messages.
///
/// # Errors
/// The stream broke, ended inside a message, or holds a length that no message has; it is of no more use then.
pub fn read_request(stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<Option<RequestHeader>> {
    let short = || io::Error::new(io::ErrorKind::InvalidInput, "the buffer is too small");
    let head = buffer.get_mut(..REQUEST_HEADER).ok_or_else(short)?;
    let mut filled = 0;
    while filled < REQUEST_HEADER {
        match stream.read(head.get_mut(filled..).unwrap_or_default()) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let header = parse(head).ok_or_else(short)?;
    if !(REQUEST_HEADER..=MAX_MESSAGE).contains(&header.length) {
        let text = format!("a message of {} bytes", header.length);
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let body = buffer.get_mut(REQUEST_HEADER..header.length).ok_or_else(short)?;
    stream.read_exact(body)?;
    Ok(Some(header))
}

/// A reply that carries nothing but an error number (positive), or success if it is 0.
#[must_use]
pub fn bare_reply(unique: u64, error: i32) -> [u8; REPLY_HEADER] {
    let mut reply = [0; REPLY_HEADER];
    let fields = [16u32.to_ne_bytes(), error.saturating_neg().to_ne_bytes()];
    for (place, byte) in reply
        .iter_mut()
        .zip(fields.as_flattened().iter().chain(&unique.to_ne_bytes()))
    {
        *place = *byte;
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; REQUEST_HEADER];
        bytes[0..4].copy_from_slice(&u32::try_from(REQUEST_HEADER + body.len()).unwrap().to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    /// Gives at most `step` bytes at a time, as a socket may.
    struct Drip<'a>(&'a [u8], usize);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(buffer.len());
            self.0.read(&mut buffer[..count])
        }
    }

    proptest! {
        #[test]
        fn no_bytes_can_hurt(bytes in prop::collection::vec(any::<u8>(), 0..300), step in 1usize..64) {
            let mut buffer = vec![0; MAX_MESSAGE];
            let mut stream = Drip(&bytes, step);
            while let Ok(Some(header)) = read_request(&mut stream, &mut buffer) {
                prop_assert!((REQUEST_HEADER..=MAX_MESSAGE).contains(&header.length));
            }
        }

        #[test]
        fn messages_survive_any_cut(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..5),
            step in 1usize..400,
        ) {
            let mut bytes = Vec::new();
            for (unique, body) in bodies.iter().enumerate() {
                bytes.extend(message(3, unique as u64, body));
            }
            let mut buffer = vec![0; MAX_MESSAGE];
            let mut stream = Drip(&bytes, step);
            for (unique, body) in bodies.iter().enumerate() {
                let header = read_request(&mut stream, &mut buffer).unwrap().unwrap();
                prop_assert_eq!((header.opcode, header.unique), (3, unique as u64));
                prop_assert_eq!(&buffer[REQUEST_HEADER..header.length], body.as_slice());
            }
            prop_assert!(read_request(&mut stream, &mut buffer).unwrap().is_none());
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let mut buffer = vec![0; MAX_MESSAGE];
        for length in [0u32, 39, u32::try_from(MAX_MESSAGE).unwrap() + 1, u32::MAX] {
            let mut bytes = message(1, 1, b"");
            bytes[0..4].copy_from_slice(&length.to_ne_bytes());
            bytes.resize(MAX_MESSAGE * 2, 0);
            assert!(read_request(&mut bytes.as_slice(), &mut buffer).is_err(), "{length}");
        }
    }

    #[test]
    fn a_cut_message_is_an_error() {
        let bytes = message(1, 1, b"name\0");
        let mut buffer = vec![0; MAX_MESSAGE];
        for cut in 1..bytes.len() {
            assert!(read_request(&mut &bytes[..cut], &mut buffer).is_err(), "{cut}");
        }
    }

    #[test]
    fn errors_are_negative_on_the_wire() {
        let reply = bare_reply(7, libc::EIO);
        assert_eq!(i32::from_ne_bytes(reply[4..8].try_into().unwrap()), -libc::EIO);
        assert_eq!(parse(&reply).unwrap().unique, 7);
        assert_eq!(parse(&reply).unwrap().length, REPLY_HEADER);
    }
}
