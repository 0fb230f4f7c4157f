//! A tap beside an interface, and all traffic from one to the other: what arrives at either leaves by the other, before the
//! namespace's own stack sees it.

use std::io;
use std::os::fd::OwnedFd;

use netlink::{Body, CREATE_EXCL, Netlink, i32_at};

use super::NetError;
use super::scan::{self, IFINFOMSG, Interface, links};

/// Name of the tap in its namespace.
pub const TAP: &str = "ramet0";
/// Where our rule is among those of an interface; lower ones come first.
const PRIORITY: u32 = 0x7261;

/// Length of `struct tcmsg`.
const TCMSG: usize = 20;
/// Handle of the ingress queueing discipline, and the parent that makes a discipline one of ingress (linux/pkt_sched.h).
const INGRESS: u32 = 0xffff_0000;
const TO_INGRESS: u32 = 0xffff_fff1;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;

/// Makes the tap for an interface; it lives as long as its descriptor.
///
/// # Errors
/// The namespace has one already, or the kernel refuses.
pub fn attach(netlink: &Netlink, interface: &Interface) -> Result<OwnedFd, NetError> {
    let tap = crate::sys::open_tap(TAP).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => NetError::Taken,
        _ => NetError::system("make a tap")(error),
    })?;
    let tap_index = find(netlink)?;
    bring_up(netlink, tap_index, interface.mtu).map_err(NetError::system("set up the tap"))?;
    let failed = || NetError::system(format!("redirect traffic of {}", interface.name));
    redirect(netlink, interface.index, tap_index).map_err(failed())?;
    redirect(netlink, tap_index, interface.index).map_err(failed())?;
    Ok(tap)
}

/// Removes our rules from every interface of the namespace of the calling thread.
///
/// # Errors
/// The kernel refuses.
pub fn detach_all(netlink: &Netlink) -> Result<(), NetError> {
    for (interface, _) in links(netlink)? {
        remove(netlink, interface.index).map_err(NetError::system(format!(
            "remove the redirection of {}",
            interface.name
        )))?;
    }
    Ok(())
}

fn find(netlink: &Netlink) -> Result<i32, NetError> {
    let mut found = None;
    netlink
        .dump(libc::RTM_GETLINK, &Body::new(&[0; IFINFOMSG]), |_, payload| {
            if let Some((interface, _)) = scan::link(payload)
                && interface.name == TAP
            {
                found = Some(interface.index);
            }
        })
        .map_err(NetError::system("list interfaces"))?;
    found.ok_or_else(|| NetError::system("find the tap")(io::ErrorKind::NotFound.into()))
}

/// Up, without addresses: the namespace's own stack has nothing to say on it.
fn bring_up(netlink: &Netlink, index: i32, mtu: u32) -> io::Result<()> {
    const IFF_UP: u32 = 1;
    const IFLA_AF_SPEC: u16 = 26;
    const ADDRESS_MODE: u16 = 8;
    const MODE_NONE: u8 = 1;
    let message = |flags: u32| {
        let mut fixed = [0; IFINFOMSG];
        fixed[4..8].copy_from_slice(&index.to_ne_bytes());
        fixed[8..12].copy_from_slice(&flags.to_ne_bytes());
        fixed[12..16].copy_from_slice(&flags.to_ne_bytes());
        Body::new(&fixed)
    };
    let family = u16::try_from(libc::AF_INET6).unwrap_or_default();
    let silent = Body::default().nested(family, &Body::default().attribute(ADDRESS_MODE, &[MODE_NONE]));
    // A kernel without IPv6 does not know the attribute, and needs none.
    let _ = netlink.request(libc::RTM_NEWLINK, 0, &message(0).nested(IFLA_AF_SPEC, &silent));
    let up = message(IFF_UP).attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
    netlink.request(libc::RTM_NEWLINK, 0, &up)
}

fn tcmsg(index: i32, handle: u32, parent: u32, info: u32) -> Body {
    let mut fixed = [0; TCMSG];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[8..12].copy_from_slice(&handle.to_ne_bytes());
    fixed[12..16].copy_from_slice(&parent.to_ne_bytes());
    fixed[16..20].copy_from_slice(&info.to_ne_bytes());
    Body::new(&fixed)
}

/// Priority and protocol of a rule, as `tcm_info` has them.
fn rule_info() -> u32 {
    let protocol = u16::try_from(libc::ETH_P_ALL).unwrap_or_default().to_be();
    PRIORITY << 16 | u32::from(protocol)
}

/// Everything that comes in at `from` goes out at `to`.
fn redirect(netlink: &Netlink, from: i32, to: i32) -> io::Result<()> {
    let discipline = tcmsg(from, INGRESS, TO_INGRESS, 0).attribute(TCA_KIND, b"ingress\0");
    match netlink.request(libc::RTM_NEWQDISC, CREATE_EXCL, &discipline) {
        // Of a machine that was killed, or of somebody else.
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => remove_rule(netlink, from)?,
        made => made?,
    }
    netlink.request(libc::RTM_NEWTFILTER, CREATE_EXCL, &rule(from, to))
}

/// `matchall action mirred egress redirect dev TO`.
fn rule(from: i32, to: i32) -> Body {
    const MATCHALL_ACTIONS: u16 = 2;
    const ACTION_KIND: u16 = 1;
    const ACTION_OPTIONS: u16 = 2;
    const MIRRED_PARAMETERS: u16 = 2;
    const STOLEN: u32 = 4;
    const EGRESS_REDIRECT: u32 = 1;
    // struct tc_mirred: index, capab, action, refcnt, bindcnt, eaction, ifindex.
    let parameters: Vec<u8> = [0, 0, STOLEN, 0, 0, EGRESS_REDIRECT, to.cast_unsigned()]
        .iter()
        .flat_map(|number: &u32| number.to_ne_bytes())
        .collect();
    let action = Body::default().attribute(ACTION_KIND, b"mirred\0").nested(
        ACTION_OPTIONS,
        &Body::default().attribute(MIRRED_PARAMETERS, &parameters),
    );
    let actions = Body::default().nested(1, &action);
    tcmsg(from, 0, INGRESS, rule_info())
        .attribute(TCA_KIND, b"matchall\0")
        .nested(TCA_OPTIONS, &Body::default().nested(MATCHALL_ACTIONS, &actions))
}

fn remove_rule(netlink: &Netlink, index: i32) -> io::Result<()> {
    let rule = tcmsg(index, 0, INGRESS, rule_info()).attribute(TCA_KIND, b"matchall\0");
    gone(netlink.request(libc::RTM_DELTFILTER, 0, &rule))
}

/// Our rule, and the discipline if nobody else has rules on it.
fn remove(netlink: &Netlink, index: i32) -> io::Result<()> {
    let mut ours = false;
    let mut others = false;
    let listed = netlink.dump(libc::RTM_GETTFILTER, &tcmsg(index, 0, INGRESS, 0), |_, payload| {
        let info = i32_at(payload, 16).unwrap_or_default().cast_unsigned();
        if info == rule_info() {
            ours = true
        } else {
            others = true
        }
    });
    gone(listed)?;
    if !ours {
        return Ok(());
    }
    remove_rule(netlink, index)?;
    if others {
        return Ok(());
    }
    let discipline = tcmsg(index, INGRESS, TO_INGRESS, 0).attribute(TCA_KIND, b"ingress\0");
    gone(netlink.request(libc::RTM_DELQDISC, 0, &discipline))
}

/// That there is nothing to remove is fine.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::ENODEV)) => Ok(()),
        other => other,
    }
}
