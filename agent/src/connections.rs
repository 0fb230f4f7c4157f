//! Kills TCP connections that a restored guest shares with its parent. Listeners and loopback connections stay.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::{AgentError, Result};
use netlink::{Body, Netlink};

/// From linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

/// Length of `struct inet_diag_sockid`, which starts at this offset of `inet_diag_msg`.
const ID: usize = 48;
const ID_AT: usize = 4;

/// TCP states: all but TIME_WAIT, CLOSE and LISTEN.
const STATES: u32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;

/// Whether there may be any in the network namespace of a process: the kernel counts its TCP sockets that are not closed, listeners
/// among them.
///
/// # Errors
/// When the counts cannot be read.
pub fn may_exist(pid: u32) -> Result<bool> {
    for name in ["sockstat", "sockstat6"] {
        let path = format!("/proc/{pid}/net/{name}");
        match fs::read_to_string(&path) {
            Ok(text) if counts_none(&text) => {}
            Ok(_) => return Ok(true),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name == "sockstat6" => {}
            Err(error) => return Err(AgentError::io(format!("read {path}"), error)),
        }
    }
    Ok(false)
}

/// `TCP: inuse 0 …`. What is not understood may be a connection.
fn counts_none(text: &str) -> bool {
    let counts = text
        .lines()
        .find_map(|line| line.strip_prefix("TCP: ").or_else(|| line.strip_prefix("TCP6: ")));
    counts.is_some_and(|counts| counts.split_whitespace().take(2).eq(["inuse", "0"]))
}

/// Kills all in the network namespace of the calling thread. Returns how many there were.
///
/// # Errors
/// When one cannot be killed; also when the kernel has no socket diagnosis and there is one.
pub fn kill_all() -> Result<u32> {
    let failed = |error: io::Error| AgentError::io("kill the parent's TCP connections", error);
    let mut killed = 0;
    for family in [libc::AF_INET, libc::AF_INET6] {
        let family = u8::try_from(family).unwrap_or_default();
        match kill_family(family) {
            Ok(count) => killed += count,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                // inet_diag is a module that this kernel does not have.
                if in_proc().map_err(failed)? > 0 {
                    return Err(failed(error));
                }
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(killed)
}

fn kill_family(family: u8) -> io::Result<u32> {
    let netlink = Netlink::sock_diag()?;
    let mut found = Vec::new();
    netlink.dump(SOCK_DIAG_BY_FAMILY, &request(family, &[0; ID]), |_, payload| {
        if let Some(id) = payload.get(ID_AT..ID_AT + ID)
            && remote(family, id).is_some_and(|address| !is_loopback(address))
        {
            found.push(id.to_vec());
        }
    })?;
    let mut killed = 0;
    for id in found {
        match netlink.request(SOCK_DESTROY, 0, &request(family, &id)) {
            Ok(()) => killed += 1,
            // It has just ended.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(killed)
}

/// `struct inet_diag_req_v2`.
fn request(family: u8, id: &[u8]) -> Body {
    let protocol = u8::try_from(libc::IPPROTO_TCP).unwrap_or_default();
    let mut fixed = vec![family, protocol, 0, 0];
    fixed.extend_from_slice(&STATES.to_ne_bytes());
    fixed.extend_from_slice(id);
    Body::new(&fixed)
}

/// The far end in an `inet_diag_sockid`: source port, destination port, source, destination.
fn remote(family: u8, id: &[u8]) -> Option<IpAddr> {
    const DESTINATION: usize = 20;
    if i32::from(family) == libc::AF_INET {
        let octets: [u8; 4] = id.get(DESTINATION..DESTINATION + 4)?.try_into().ok()?;
        Some(Ipv4Addr::from(octets).into())
    } else {
        let octets: [u8; 16] = id.get(DESTINATION..DESTINATION + 16)?.try_into().ok()?;
        Some(Ipv6Addr::from(octets).into())
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// How many connections /proc knows, without the help of socket diagnosis.
fn in_proc() -> io::Result<usize> {
    let mut count = 0;
    for name in ["tcp", "tcp6"] {
        match fs::read_to_string(format!("/proc/thread-self/net/{name}")) {
            Ok(text) => count += text.lines().skip(1).filter(|line| is_connection(line)).count(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// `sl local_address rem_address st …`; addresses are words in the machine's byte order, in hex.
fn is_connection(line: &str) -> bool {
    let mut fields = line.split_whitespace().skip(2);
    let address = fields
        .next()
        .and_then(|field| field.split_once(':'))
        .map(|(address, _)| address);
    let state = fields.next().and_then(|state| u32::from_str_radix(state, 16).ok());
    let (Some(address), Some(state)) = (address.and_then(proc_address), state) else {
        return false;
    };
    state < 32 && STATES & (1 << state) != 0 && !is_loopback(address)
}

fn proc_address(text: &str) -> Option<IpAddr> {
    let mut octets = Vec::new();
    for at in (0..text.len()).step_by(8) {
        octets.extend(u32::from_str_radix(text.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    if let Ok(octets) = <[u8; 4]>::try_from(octets.as_slice()) {
        return Some(octets.into());
    }
    <[u8; 16]>::try_from(octets.as_slice()).ok().map(IpAddr::from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_connections_to_elsewhere_count() {
        let line = |remote: &str, state: &str| format!("  0: 0100007F:1F90 {remote} {state} 00000000:00000000");
        assert!(is_connection(&line("0200000A:0050", "01")));
        assert!(is_connection(&line("0200000A:0050", "08")));
        assert!(!is_connection(&line("0100007F:0050", "01")), "loopback");
        assert!(!is_connection(&line("0200000A:0050", "06")), "TIME_WAIT");
        assert!(!is_connection(&line("00000000:0000", "0A")), "a listener");
        assert!(
            is_connection(&line("B80D0120000000000000000001000000:0050", "01")),
            "IPv6"
        );
        assert!(
            !is_connection(&line("0000000000000000FFFF00000100007F:0050", "01")),
            "mapped loopback"
        );
        assert!(!is_connection("  sl  local_address rem_address   st"));
    }

    #[test]
    fn only_a_count_of_zero_means_that_there_are_none() {
        let four = |inuse: &str| {
            format!("sockets: used 9\nTCP: inuse {inuse} orphan 0 tw 0 alloc 3 mem 0\nUDP: inuse 2 mem 0\n")
        };
        assert!(counts_none(&four("0")));
        assert!(!counts_none(&four("1")));
        assert!(!counts_none(&four("01")));
        assert!(counts_none("TCP6: inuse 0\nUDP6: inuse 1\n"));
        assert!(!counts_none("TCP6: inuse 7\n"));
        assert!(!counts_none(""));
        assert!(!counts_none("TCP: orphan 0"));
    }

    #[test]
    fn a_socket_that_listens_is_counted() {
        let _listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        assert!(may_exist(std::process::id()).expect("our own counts"));
    }

    #[test]
    fn the_far_end_is_behind_the_near_one() {
        let mut id = [0u8; ID];
        id[4..8].copy_from_slice(&[10, 0, 0, 1]);
        id[20..24].copy_from_slice(&[10, 0, 0, 2]);
        assert_eq!(remote(2, &id), Some([10, 0, 0, 2].into()));
        assert_eq!(remote(10, &[0; 20]), None);
    }

    proptest! {
        #[test]
        fn no_line_can_hurt(line in ".{0,100}") {
            let _ = is_connection(&line);
        }
    }
}
