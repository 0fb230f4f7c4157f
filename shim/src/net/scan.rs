//! What is in a network namespace: the one interface that leads out, and all that the guest's must have of it.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink::{Body, Netlink, attributes, i32_at, u16_at, u32_at};
use protocol::guest::{Address, Neighbour, NetworkConfig, Route};

use super::NetError;
use super::redirect::TAP;

/// Lengths of `struct ifinfomsg`, `ifaddrmsg`, `rtmsg`, `ndmsg`.
pub(super) const IFINFOMSG: usize = 16;
const IFADDRMSG: usize = 8;
const RTMSG: usize = 12;
const NDMSG: usize = 12;

const ARPHRD_ETHER: u16 = 1;
const IFF_UP: u32 = 1;

/// An interface and its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its number in its namespace.
    pub index: i32,
    /// Its name.
    pub name: String,
    /// MAC address.
    pub mac: [u8; 6],
    /// MTU.
    pub mtu: u32,
    addresses: Vec<(IpAddr, u8)>,
    routes: Vec<ScannedRoute>,
    neighbours: Vec<(IpAddr, [u8; 6])>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ScannedRoute {
    destination: (IpAddr, u8),
    gateway: Option<IpAddr>,
    source: Option<IpAddr>,
    metric: u32,
}

impl Interface {
    /// What the agent is told.
    #[must_use]
    pub fn config(&self) -> NetworkConfig {
        let mut config = NetworkConfig::new();
        config.mac = mac_text(&self.mac);
        config.mtu = self.mtu;
        let cidr = |(address, prefix): &(IpAddr, u8)| format!("{address}/{prefix}");
        for address in &self.addresses {
            let mut entry = Address::new();
            entry.cidr = cidr(address);
            config.addresses.push(entry);
        }
        for route in &self.routes {
            let mut entry = Route::new();
            entry.destination = cidr(&route.destination);
            entry.gateway = route.gateway.map(|a| a.to_string()).unwrap_or_default();
            entry.source = route.source.map(|a| a.to_string()).unwrap_or_default();
            entry.metric = route.metric;
            config.routes.push(entry);
        }
        for (address, mac) in &self.neighbours {
            let mut entry = Neighbour::new();
            entry.address = address.to_string();
            entry.mac = mac_text(mac);
            config.neighbours.push(entry);
        }
        config
    }
}

fn mac_text(mac: &[u8; 6]) -> String {
    mac.iter().fold(String::new(), |mut text, byte| {
        let colon = if text.is_empty() { "" } else { ":" };
        let _ = write!(text, "{colon}{byte:02x}");
        text
    })
}

/// The Ethernet interface that is up in the namespace of the calling thread; `None` without one.
///
/// # Errors
/// There are several, or the kernel does not tell.
pub fn interface(netlink: &Netlink) -> Result<Option<Interface>, NetError> {
    let mut found = links(netlink)?;
    found.retain(|(_, flags)| flags & IFF_UP != 0);
    if found.len() > 1 {
        let names: Vec<&str> = found.iter().map(|(interface, _)| interface.name.as_str()).collect();
        return Err(NetError::Several(names.join(", ")));
    }
    let Some((mut interface, _)) = found.pop() else {
        return Ok(None);
    };
    let dump = |what: &'static str, kind, fixed: usize, visit: &mut dyn FnMut(&[u8])| {
        netlink
            .dump(kind, &Body::new(&vec![0; fixed]), |_, payload| visit(payload))
            .map_err(NetError::system(what))
    };
    let index = interface.index;
    dump("list addresses", libc::RTM_GETADDR, IFADDRMSG, &mut |payload| {
        let Some((address, peer)) = address(payload, index) else {
            return;
        };
        interface.addresses.push(address);
        interface.routes.extend(peer);
    })?;
    dump("list routes", libc::RTM_GETROUTE, RTMSG, &mut |payload| {
        interface.routes.extend(route(payload, index));
    })?;
    dump("list neighbours", libc::RTM_GETNEIGH, NDMSG, &mut |payload| {
        interface.neighbours.extend(neighbour(payload, index));
    })?;
    Ok(Some(interface))
}

/// All Ethernet interfaces but ours, with their flags.
pub(super) fn links(netlink: &Netlink) -> Result<Vec<(Interface, u32)>, NetError> {
    let mut found = Vec::new();
    netlink
        .dump(libc::RTM_GETLINK, &Body::new(&[0; IFINFOMSG]), |_, payload| {
            found.extend(link(payload).filter(|(interface, _)| interface.name != TAP));
        })
        .map_err(NetError::system("list interfaces"))?;
    Ok(found)
}

/// An Ethernet interface and its flags.
pub(super) fn link(payload: &[u8]) -> Option<(Interface, u32)> {
    if u16_at(payload, 2)? != ARPHRD_ETHER {
        return None;
    }
    let mut interface = Interface {
        index: i32_at(payload, 4)?,
        ..Interface::default()
    };
    for (kind, value) in attributes(payload, IFINFOMSG) {
        match kind {
            libc::IFLA_ADDRESS => interface.mac = value.try_into().ok()?,
            libc::IFLA_MTU => interface.mtu = u32_at(value, 0)?,
            libc::IFLA_IFNAME => {
                let name = value.split(|byte| *byte == 0).next().unwrap_or_default();
                interface.name = String::from_utf8_lossy(name).into_owned();
            }
            _ => {}
        }
    }
    Some((interface, u32_at(payload, 8)?))
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

/// The value of an attribute as an address.
fn ip_attribute(payload: &[u8], fixed: usize, wanted: u16) -> Option<IpAddr> {
    attributes(payload, fixed)
        .find(|(kind, _)| *kind == wanted)
        .and_then(|(_, value)| ip(value))
}

/// An address that the guest is to have: not those that its kernel makes by itself. With a peer, the network is the peer's, and a route
/// leads to it.
fn address(payload: &[u8], index: i32) -> Option<((IpAddr, u8), Option<ScannedRoute>)> {
    const PERMANENT: u8 = 0x80;
    if i32_at(payload, 4)? != index {
        return None;
    }
    let (prefix, flags, scope) = (*payload.get(1)?, *payload.get(2)?, *payload.get(3)?);
    let attribute = |kind| ip_attribute(payload, IFADDRMSG, kind);
    let (local, remote) = (attribute(libc::IFA_LOCAL), attribute(libc::IFA_ADDRESS));
    let address = local.or(remote)?;
    if address.is_ipv6() && (scope == libc::RT_SCOPE_LINK || flags & PERMANENT == 0) {
        return None;
    }
    let Some(peer) = remote.filter(|remote| *remote != address) else {
        return Some(((address, prefix), None));
    };
    let route = ScannedRoute {
        destination: (network(peer, prefix), prefix),
        gateway: None,
        source: Some(address),
        metric: 0,
    };
    let alone = if address.is_ipv4() { 32 } else { 128 };
    Some(((address, alone), Some(route)))
}

/// An address without the bits behind its prefix.
fn network(address: IpAddr, prefix: u8) -> IpAddr {
    let behind = |length: u8| u32::from(length.saturating_sub(prefix));
    match address {
        IpAddr::V4(v4) => Ipv4Addr::from(v4.to_bits() & u32::MAX.checked_shl(behind(32)).unwrap_or(0)).into(),
        IpAddr::V6(v6) => Ipv6Addr::from(v6.to_bits() & u128::MAX.checked_shl(behind(128)).unwrap_or(0)).into(),
    }
}

/// A route that somebody added: those that come with an address the guest's kernel makes by itself.
fn route(payload: &[u8], index: i32) -> Option<ScannedRoute> {
    const PROTOCOL_RA: u8 = 9;
    const CLONED: u32 = 0x200;
    let [family, prefix, _, _, table, protocol, _, kind, ..] = *payload else {
        return None;
    };
    let made_by_kernel = protocol == libc::RTPROT_KERNEL || protocol == PROTOCOL_RA;
    let number = |wanted| {
        let found = attributes(payload, RTMSG).find(|(kind, _)| *kind == wanted);
        found.and_then(|(_, value)| u32_at(value, 0))
    };
    if table != libc::RT_TABLE_MAIN
        || kind != libc::RTN_UNICAST
        || made_by_kernel
        || u32_at(payload, 8)? & CLONED != 0
        || number(libc::RTA_OIF)? != index.cast_unsigned()
    {
        return None;
    }
    let any: IpAddr = match i32::from(family) {
        libc::AF_INET => [0; 4].into(),
        libc::AF_INET6 => [0; 16].into(),
        _ => return None,
    };
    Some(ScannedRoute {
        destination: (ip_attribute(payload, RTMSG, libc::RTA_DST).unwrap_or(any), prefix),
        gateway: ip_attribute(payload, RTMSG, libc::RTA_GATEWAY),
        source: ip_attribute(payload, RTMSG, libc::RTA_PREFSRC),
        metric: number(libc::RTA_PRIORITY).unwrap_or(0),
    })
}

/// A neighbour that somebody added.
fn neighbour(payload: &[u8], index: i32) -> Option<(IpAddr, [u8; 6])> {
    const PERMANENT: u16 = 0x80;
    const NDA_DST: u16 = 1;
    const NDA_LLADDR: u16 = 2;
    if i32_at(payload, 4)? != index || u16_at(payload, 8)? & PERMANENT == 0 {
        return None;
    }
    let mac = attributes(payload, NDMSG).find(|(kind, _)| *kind == NDA_LLADDR)?.1;
    Some((ip_attribute(payload, NDMSG, NDA_DST)?, mac.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_agent_is_told_everything() {
        let interface = Interface {
            index: 2,
            name: "eth0".into(),
            mac: [2, 0, 0, 0, 0, 0xab],
            mtu: 1400,
            addresses: vec![([10, 4, 0, 7].into(), 24), ("fd00::7".parse().unwrap(), 64)],
            routes: vec![ScannedRoute {
                destination: ([0, 0, 0, 0].into(), 0),
                gateway: Some([10, 4, 0, 1].into()),
                source: None,
                metric: 7,
            }],
            neighbours: vec![([10, 4, 0, 1].into(), [2, 0, 0, 0, 0, 1])],
        };
        let config = interface.config();
        assert_eq!((config.mac.as_str(), config.mtu), ("02:00:00:00:00:ab", 1400));
        let addresses: Vec<_> = config.addresses.iter().map(|a| a.cidr.as_str()).collect();
        assert_eq!(addresses, ["10.4.0.7/24", "fd00::7/64"]);
        let route = &config.routes[0];
        assert_eq!(
            (route.destination.as_str(), route.gateway.as_str(), route.metric),
            ("0.0.0.0/0", "10.4.0.1", 7)
        );
        assert_eq!(config.neighbours[0].address, "10.4.0.1");
    }

    #[test]
    fn a_namespace_is_read_as_it_is() {
        let script = "ip link add out0 type veth peer name in0 && ip link set out0 up && ip link set in0 mtu 1400 up && \
            ip addr add 10.9.0.2/24 dev in0 && ip addr add 10.1.0.2 peer 10.2.3.4/16 dev in0 && ip addr add fd00::7/64 dev in0 && \
            ip route add default via 10.9.0.1 && ip neigh add 10.9.0.1 lladdr 02:00:00:00:00:01 dev in0 nud permanent && \
            ip link set out0 down";
        let inside = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).ok()?;
            // A child of this thread is in its namespace.
            let done = std::process::Command::new("sh").args(["-ec", script]).status().ok()?;
            let netlink = Netlink::route().unwrap();
            done.success().then(|| (interface(&netlink), links(&netlink)))
        };
        let Some((found, all)) = std::thread::spawn(inside).join().unwrap() else {
            eprintln!("skipped: it takes root and iproute2");
            return;
        };
        assert_eq!(all.unwrap().len(), 2, "also the one that is down");
        let found = found.unwrap().unwrap();
        assert_eq!((found.name.as_str(), found.mtu), ("in0", 1400));
        let config = found.config();
        let mut addresses: Vec<_> = config.addresses.iter().map(|a| a.cidr.as_str()).collect();
        addresses.sort_unstable();
        assert_eq!(addresses, ["10.1.0.2/32", "10.9.0.2/24", "fd00::7/64"]);
        let route = |r: &Route| [&r.destination, &r.gateway, &r.source].map(String::clone);
        let mut routes: Vec<_> = config.routes.iter().map(route).collect();
        routes.sort_unstable();
        let expected = [["0.0.0.0/0", "10.9.0.1", ""], ["10.2.0.0/16", "", "10.1.0.2"]];
        assert_eq!(routes, expected);
        assert_eq!(config.neighbours.len(), 1);
    }

    #[test]
    fn a_network_has_no_bits_behind_its_prefix() {
        for (address, prefix, expected) in [
            ("10.2.3.4", 16, "10.2.0.0"),
            ("10.2.3.4", 0, "0.0.0.0"),
            ("10.2.3.4", 32, "10.2.3.4"),
            ("10.2.3.4", 255, "10.2.3.4"),
            ("fd00::1:2", 112, "fd00::1:0"),
            ("fd00::1", 0, "::"),
        ] {
            assert_eq!(
                network(address.parse().unwrap(), prefix),
                expected.parse::<IpAddr>().unwrap()
            );
        }
    }

    proptest! {
        #[test]
        fn no_message_can_hurt(bytes in prop::collection::vec(any::<u8>(), 0..120), index in 0..3) {
            let _ = (link(&bytes), address(&bytes, index), route(&bytes, index), neighbour(&bytes, index));
        }
    }
}
