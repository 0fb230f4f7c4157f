//! The guest's network interface: link, addresses, routes, neighbours.

use std::io;
use std::net::IpAddr;

use netlink::{Body, CREATE_EXCL, CREATE_REPLACE, Netlink, attributes, i32_at, u16_at, u32_at};
use protocol::guest::NetworkConfig;

use crate::error::{AgentError, Result};

/// Most addresses, routes or neighbours accepted.
const MAX_ENTRIES: usize = 64;

/// Length of `struct ifinfomsg`, `ifaddrmsg`, `rtmsg`, `ndmsg`.
const IFINFOMSG: usize = 16;
const IFADDRMSG: usize = 8;
const NDMSG: usize = 12;

const IFF_UP: u32 = 1;

/// An address with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    /// The address.
    pub address: IpAddr,
    /// Bits of the network.
    pub prefix: u8,
}

impl Cidr {
    /// Reads `10.4.0.7/24` or `fd00::7/64`.
    ///
    /// # Errors
    /// When it is not of that form.
    pub fn parse(text: &str) -> Result<Self> {
        let invalid = || AgentError::Invalid(format!("{text:?} is not an address with a prefix length"));
        let (address, prefix) = text.split_once('/').ok_or_else(invalid)?;
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let prefix: u8 = prefix.parse().map_err(|_| invalid())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        if prefix > longest {
            Err(invalid())
        } else {
            Ok(Self { address, prefix })
        }
    }
}

/// A checked [`NetworkConfig`].
#[derive(Debug)]
struct Plan {
    mac: [u8; 6],
    mtu: u32,
    addresses: Vec<Cidr>,
    routes: Vec<Route>,
    neighbours: Vec<(IpAddr, [u8; 6])>,
}

/// A checked [`protocol::guest::Route`].
#[derive(Debug, PartialEq, Eq)]
struct Route {
    /// `None`: everything.
    destination: Option<Cidr>,
    /// `None`: on link.
    gateway: Option<IpAddr>,
    source: Option<IpAddr>,
    metric: u32,
}

impl Route {
    /// An address of its family.
    fn any_address(&self) -> IpAddr {
        let destination = self.destination.map(|cidr| cidr.address);
        self.gateway.or(destination).unwrap_or(IpAddr::from([0, 0, 0, 0]))
    }
}

/// Sets the guest's interface to exactly what is asked: addresses, routes and neighbours that were there go. Without a MAC
/// the guest is left with the loopback interface alone: the other is taken down, and what it had goes.
///
/// # Errors
/// When the configuration is malformed, there is no interface, or the kernel refuses.
pub fn configure(config: &NetworkConfig) -> Result<()> {
    loopback_up().map_err(|error| AgentError::io("bring up the loopback interface", error))?;
    let plan = plan(config)?;
    let netlink = Netlink::route().map_err(|error| AgentError::io("open a routing socket", error))?;
    match (find_link(&netlink)?, plan) {
        (Some((link, _)), Some(plan)) => {
            take_down(&netlink, link)?;
            apply(&netlink, link, &plan)
        }
        (Some((link, true)), None) => take_down(&netlink, link),
        // Nothing was ever set up: the usual case of a fork without network, which need not wait for the kernel to take down a link.
        (Some((_, false)) | None, None) => Ok(()),
        (None, Some(_)) => Err(AgentError::not_found("network interface", "eth0")),
    }
}

/// Brings up `lo`.
///
/// # Errors
/// What the kernel says.
pub fn loopback_up() -> io::Result<()> {
    Netlink::route()?.request(libc::RTM_NEWLINK, 0, &link_body(1, true))
}

fn plan(config: &NetworkConfig) -> Result<Option<Plan>> {
    if config.mac.is_empty() {
        return Ok(None);
    }
    let lengths = [config.addresses.len(), config.routes.len(), config.neighbours.len()];
    if lengths.iter().any(|length| *length > MAX_ENTRIES) {
        return Err(AgentError::Invalid("too many addresses, routes or neighbours".into()));
    }
    let addresses = config
        .addresses
        .iter()
        .map(|address| Cidr::parse(&address.cidr))
        .collect::<Result<_>>()?;
    let mut routes = Vec::new();
    for route in &config.routes {
        let destination = Some(route.destination.as_str()).filter(|text| !text.is_empty());
        routes.push(Route {
            destination: destination.map(Cidr::parse).transpose()?,
            gateway: parse_address(&route.gateway)?,
            source: parse_address(&route.source)?,
            metric: route.metric,
        });
    }
    // On-link routes first: a gateway must be reachable when its route is added.
    routes.sort_by_key(|route| route.gateway.is_some());
    let mut neighbours = Vec::new();
    for neighbour in &config.neighbours {
        let address = parse_address(&neighbour.address)?;
        let address = address.ok_or_else(|| AgentError::Invalid("a neighbour without address".into()))?;
        neighbours.push((address, parse_mac(&neighbour.mac)?));
    }
    Ok(Some(Plan {
        mac: parse_mac(&config.mac)?,
        mtu: config.mtu,
        addresses,
        routes,
        neighbours,
    }))
}

/// Reads an address; empty is none.
fn parse_address(text: &str) -> Result<Option<IpAddr>> {
    if text.is_empty() {
        return Ok(None);
    }
    let invalid = |_| AgentError::Invalid(format!("{text:?} is not an address"));
    text.parse().map(Some).map_err(invalid)
}

/// Reads `aa:bb:cc:dd:ee:ff`.
fn parse_mac(text: &str) -> Result<[u8; 6]> {
    let invalid = || AgentError::Invalid(format!("{text:?} is not a MAC address"));
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|part| part.len() == 2).ok_or_else(invalid)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| invalid())?;
    }
    if parts.next().is_some() {
        Err(invalid())
    } else {
        Ok(mac)
    }
}

/// The first Ethernet interface and whether it is up: the VM has one.
fn find_link(netlink: &Netlink) -> Result<Option<(i32, bool)>> {
    const ARPHRD_ETHER: u16 = 1;
    let mut found = None;
    let visit = |_, payload: &[u8]| {
        if u16_at(payload, 2) == Some(ARPHRD_ETHER) && found.is_none() {
            let up = u32_at(payload, 8).is_some_and(|flags| flags & IFF_UP != 0);
            found = i32_at(payload, 4).map(|index| (index, up));
        }
    };
    netlink
        .dump(libc::RTM_GETLINK, &Body::new(&[0; IFINFOMSG]), visit)
        .map_err(|error| AgentError::io("list the interfaces", error))?;
    Ok(found)
}

/// Takes an interface down and everything off it. The driver only takes another MAC then; routes go with the link.
fn take_down(netlink: &Netlink, link: i32) -> Result<()> {
    netlink
        .request(libc::RTM_NEWLINK, 0, &link_body(link, false))
        .map_err(|error| AgentError::io("take down the interface", error))?;
    remove_all(netlink, link, libc::RTM_GETADDR, libc::RTM_DELADDR, IFADDRMSG, 4)
        .map_err(|error| AgentError::io("remove the old addresses", error))?;
    remove_all(netlink, link, libc::RTM_GETNEIGH, libc::RTM_DELNEIGH, NDMSG, 4)
        .map_err(|error| AgentError::io("remove the old neighbours", error))
}

fn apply(netlink: &Netlink, link: i32, plan: &Plan) -> Result<()> {
    let failed = |what: String| move |error: io::Error| AgentError::io(what, error);
    let mut body = link_body(link, true).attribute(libc::IFLA_ADDRESS, &plan.mac);
    if plan.mtu != 0 {
        body = body.attribute(libc::IFLA_MTU, &plan.mtu.to_ne_bytes());
    }
    netlink
        .request(libc::RTM_NEWLINK, 0, &body)
        .map_err(failed("set up the interface".into()))?;
    for address in &plan.addresses {
        netlink
            .request(libc::RTM_NEWADDR, CREATE_REPLACE, &address_body(link, *address))
            .or_else(unless_switched_off(address.address))
            .map_err(failed(format!("add address {address:?}")))?;
    }
    for (address, mac) in &plan.neighbours {
        netlink
            .request(libc::RTM_NEWNEIGH, CREATE_REPLACE, &neighbour_body(link, *address, mac))
            .map_err(failed(format!("add neighbour {address}")))?;
    }
    for route in &plan.routes {
        add_route(netlink, link, route)
            .or_else(unless_switched_off(route.any_address()))
            .map_err(failed(format!("add route {route:?}")))?;
    }
    Ok(())
}

/// A container whose sysctls switch IPv6 off does without what it would have of it.
fn unless_switched_off(address: IpAddr) -> impl FnOnce(io::Error) -> io::Result<()> {
    move |error| match error.raw_os_error() {
        Some(libc::EACCES) if address.is_ipv6() => Ok(()),
        _ => Err(error),
    }
}

fn add_route(netlink: &Netlink, link: i32, route: &Route) -> io::Result<()> {
    /// `RTNH_F_ONLINK`: the gateway is on the link, whatever the other routes say.
    const ON_LINK: u32 = 4;
    let add = |flags| netlink.request(libc::RTM_NEWROUTE, CREATE_EXCL, &route_body(link, route, flags));
    let unreachable = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH));
    match add(0) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        // It was made with that flag: there is no other way to it.
        Err(error) if route.gateway.is_some() && unreachable(&error) => add(ON_LINK),
        added => added,
    }
}

/// Removes every entry of a table that belongs to the link. `index_at` is where the entry's interface index is.
fn remove_all(netlink: &Netlink, link: i32, get: u16, delete: u16, fixed: usize, index_at: usize) -> io::Result<()> {
    // RTA_CACHEINFO and the like are only reports; what names an entry are its first attributes.
    const NAMES_AN_ENTRY: [u16; 2] = [1, 2];
    let mut entries = Vec::new();
    netlink.dump(get, &Body::new(&vec![0; fixed]), |_, payload| {
        if i32_at(payload, index_at) == Some(link)
            && let Some(head) = payload.get(..fixed)
        {
            let named = attributes(payload, fixed).filter(|(kind, _)| NAMES_AN_ENTRY.contains(kind));
            entries.push(named.fold(Body::new(head), |body, (kind, value)| body.attribute(kind, value)));
        }
    })?;
    for entry in entries {
        match netlink.request(delete, 0, &entry) {
            Err(error) if !is_gone(&error) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EADDRNOTAVAIL | libc::ESRCH)
    )
}

fn link_body(index: i32, up: bool) -> Body {
    let mut fixed = [0; IFINFOMSG];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[8..12].copy_from_slice(&u32::from(up).to_ne_bytes());
    fixed[12..16].copy_from_slice(&IFF_UP.to_ne_bytes());
    Body::new(&fixed)
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    u8::try_from(family).unwrap_or_default()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn address_body(link: i32, address: Cidr) -> Body {
    const IFA_F_NODAD: u8 = 2;
    let mut fixed = [0; IFADDRMSG];
    fixed[0] = family(address.address);
    fixed[1] = address.prefix;
    fixed[2] = IFA_F_NODAD;
    fixed[4..8].copy_from_slice(&link.to_ne_bytes());
    let octets = octets(address.address);
    Body::new(&fixed)
        .attribute(libc::IFA_LOCAL, &octets)
        .attribute(libc::IFA_ADDRESS, &octets)
}

fn neighbour_body(link: i32, address: IpAddr, mac: &[u8; 6]) -> Body {
    const NUD_PERMANENT: u8 = 0x80;
    const NDA_DST: u16 = 1;
    const NDA_LLADDR: u16 = 2;
    let mut fixed = [0; NDMSG];
    fixed[0] = family(address);
    fixed[4..8].copy_from_slice(&link.to_ne_bytes());
    fixed[8] = NUD_PERMANENT;
    Body::new(&fixed)
        .attribute(NDA_DST, &octets(address))
        .attribute(NDA_LLADDR, mac)
}

fn route_body(link: i32, route: &Route, flags: u32) -> Body {
    let Route {
        destination,
        gateway,
        source,
        metric,
    } = *route;
    // rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags.
    let scope = if gateway.is_some() {
        libc::RT_SCOPE_UNIVERSE
    } else {
        libc::RT_SCOPE_LINK
    };
    let [f0, f1, f2, f3] = flags.to_ne_bytes();
    let fixed = [
        family(route.any_address()),
        destination.map_or(0, |d| d.prefix),
        0,
        0,
        libc::RT_TABLE_MAIN,
        libc::RTPROT_STATIC,
        scope,
        libc::RTN_UNICAST,
        f0,
        f1,
        f2,
        f3,
    ];
    let mut body = Body::new(&fixed);
    if let Some(destination) = destination {
        body = body.attribute(libc::RTA_DST, &octets(destination.address));
    }
    if let Some(gateway) = gateway {
        body = body.attribute(libc::RTA_GATEWAY, &octets(gateway));
    }
    if let Some(source) = source {
        body = body.attribute(libc::RTA_PREFSRC, &octets(source));
    }
    if metric != 0 {
        body = body.attribute(libc::RTA_PRIORITY, &metric.to_ne_bytes());
    }
    body.attribute(libc::RTA_OIF, &link.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protocol::guest::{Address, Route};

    use super::*;

    #[test]
    fn addresses_and_macs_are_read_strictly() {
        let cidr = Cidr::parse("10.4.0.7/24").expect("an address");
        assert_eq!(
            cidr,
            Cidr {
                address: [10, 4, 0, 7].into(),
                prefix: 24
            }
        );
        assert_eq!(Cidr::parse("fd00::7/64").expect("an address").prefix, 64);
        for bad in [
            "",
            "10.4.0.7",
            "10.4.0.7/33",
            "fd00::/129",
            "10.4.0/24",
            "x/1",
            "10.4.0.7/-1",
        ] {
            assert!(Cidr::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_mac("02:00:00:00:00:ff").expect("a MAC"), [2, 0, 0, 0, 0, 0xff]);
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:ff:01",
            "2:0:0:0:0:ff",
            "zz:00:00:00:00:00",
        ] {
            assert!(parse_mac(bad).is_err(), "{bad}");
        }
    }

    fn route(destination: &str, gateway: &str) -> Route {
        Route {
            destination: destination.into(),
            gateway: gateway.into(),
            ..Default::default()
        }
    }

    #[test]
    fn routes_without_gateway_come_first() {
        let config = NetworkConfig {
            mac: "02:00:00:00:00:01".into(),
            addresses: vec![Address {
                cidr: "10.0.0.2/32".into(),
                ..Default::default()
            }],
            routes: vec![route("", "10.0.0.1"), route("10.0.0.1/32", "")],
            ..Default::default()
        };
        let plan = plan(&config).expect("well formed").expect("there is a MAC");
        assert_eq!(plan.routes[0].gateway, None);
        let default = &plan.routes[1];
        assert_eq!(
            (default.destination, default.gateway),
            (None, Some([10, 0, 0, 1].into()))
        );
    }

    #[test]
    fn nothing_is_planned_without_a_mac() {
        assert!(plan(&NetworkConfig::new()).expect("well formed").is_none());
    }

    /// Gateways of the routes in the calling thread's namespace.
    fn gateways(netlink: &Netlink) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let visit = |_, payload: &[u8]| {
            let gateway = attributes(payload, 12).find(|(kind, _)| *kind == libc::RTA_GATEWAY);
            found.extend(gateway.map(|(_, value)| value.to_vec()));
        };
        netlink
            .dump(libc::RTM_GETROUTE, &Body::new(&[0; 12]), visit)
            .expect("any process may ask");
        found
    }

    #[test]
    fn an_interface_is_set_up_and_stripped_again() {
        const IFLA_LINKINFO: u16 = 18;
        let inside = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).ok()?;
            let netlink = Netlink::route().expect("any process may open one");
            let kind = Body::default().attribute(1, b"veth\0");
            let pair = Body::new(&[0; IFINFOMSG]).nested(IFLA_LINKINFO, &kind);
            netlink.request(libc::RTM_NEWLINK, CREATE_EXCL, &pair).ok()?;
            let config = NetworkConfig {
                mac: "02:00:00:00:00:01".into(),
                mtu: 1400,
                addresses: ["10.9.0.2/24", "fd00::2/64"]
                    .map(|cidr| Address {
                        cidr: cidr.into(),
                        ..Default::default()
                    })
                    .into(),
                // The gateways of the last two are on no network that the interface has.
                routes: vec![
                    route("0.0.0.0/0", "10.9.0.1"),
                    route("10.7.0.0/16", "192.0.2.1"),
                    route("fd07::/64", "fd99::1"),
                ],
                ..Default::default()
            };
            configure(&config).expect("configured");
            let up = gateways(&netlink);
            configure(&NetworkConfig::new()).expect("stripped");
            let stripped = gateways(&netlink);
            std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").ok()?;
            configure(&config).expect("configured without IPv6");
            Some((up, stripped, gateways(&netlink)))
        };
        let Some((up, stripped, without)) = std::thread::spawn(inside).join().expect("no panic") else {
            eprintln!("skipped: it takes root and veth");
            return;
        };
        assert_eq!(up.len(), 3, "{up:?}");
        assert!(up.contains(&vec![192, 0, 2, 1]), "{up:?}");
        assert!(stripped.is_empty(), "{stripped:?}");
        assert_eq!(without.len(), 2, "{without:?}");
    }

    proptest! {
        #[test]
        fn no_text_can_hurt(text in ".{0,60}") {
            let _ = (Cidr::parse(&text), parse_mac(&text));
        }
    }
}
