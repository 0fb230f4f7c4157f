//! The sandbox's network. The VMM lives in the sandbox's network namespace, so that what containerd's clients do to
//! `/proc/<task pid>/ns/net` is done to the sandbox. The machine has one network device without a tap from the beginning. When init is
//! about to start, what was put into the namespace by then is looked at ([`scan`]), a tap is made beside the interface and all traffic
//! redirected between the two ([`redirect`]), the tap is plugged into the machine, and the agent gives the guest's interface the same
//! MAC, MTU, addresses, routes and neighbours. In a fork all of this happens before its processes are thawed.
//!
//! Tap, redirection and namespace are the kernel's: they go when the VMM does. Only in a namespace that somebody else keeps
//! ([`Namespace::Of`]) a rule on the interface stays behind, which [`release`] removes.

pub mod namespace;
pub mod redirect;
pub mod scan;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use netlink::Netlink;
use oci_spec::runtime::{LinuxNamespaceType, Spec};
use tracing::{info, warn};
use vmm::control::Request;

use crate::error::{Error, Result};
use crate::guest::{Guest, while_alive};
use crate::launch::blocking;
use crate::vm::Vm;

pub use scan::Interface;

/// Which network namespace a spec asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// A new one.
    New,
    /// An existing one, by path.
    Of(PathBuf),
    /// The host's own.
    Host,
}

impl Namespace {
    /// From `linux.namespaces`.
    #[must_use]
    pub fn of(spec: &Spec) -> Self {
        let namespaces = spec.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
        let network = namespaces
            .into_iter()
            .flatten()
            .find(|namespace| namespace.typ() == LinuxNamespaceType::Network);
        match network {
            None => Self::Host,
            Some(namespace) => match namespace.path() {
                Some(path) if !path.as_os_str().is_empty() => Self::Of(path.clone()),
                _ => Self::New,
            },
        }
    }

    /// Whether it is the host's own, by whatever name: a pod on the host's network has a path to it.
    #[must_use]
    pub fn is_hosts(&self) -> bool {
        match self {
            Self::New => false,
            Self::Of(path) => namespace::is_ours(path),
            Self::Host => true,
        }
    }
}

/// Why a namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The namespace itself.
    #[error("enter network namespace {path}")]
    Enter {
        /// Its path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Something in it.
    #[error("{what}")]
    System {
        /// What was tried on what.
        what: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// More than one interface.
    #[error("the network namespace has interfaces {0}; a virtual machine is connected to one network")]
    Several(String),
    /// Two machines in one namespace.
    #[error("another virtual machine is connected to this network namespace already")]
    Taken,
    /// The checkpoint is of a machine without network device.
    #[error(
        "the checkpoint was made of a virtual machine without network device; run it without a network, or make it again"
    )]
    NoDevice,
}

impl NetError {
    fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}

/// Connects the machine to what is in its namespace now; does nothing when that is only a loopback interface. `nets` is the number of
/// network devices that the machine has.
///
/// # Errors
/// The namespace cannot be used, or machine or guest do not do their part. Nothing is left in the namespace then but what
/// [`release`] removes.
pub async fn connect(vm: &dyn Vm, guest: &Guest, nets: u32) -> Result<()> {
    let Some(path) = vm.network_namespace() else {
        return Ok(());
    };
    let begun = Instant::now();
    let plugged = blocking(move || Ok(namespace::within(&path, || plug(nets))??)).await?;
    let Some((interface, tap)) = plugged else {
        return Ok(());
    };
    vm.request(Request::AttachTap { net: 0, tap: 0 }, vec![tap]).await?;
    while_alive(vm, guest.configure_network(&interface.config())).await?;
    info!(interface = interface.name, elapsed = ?begun.elapsed(), "network connected");
    Ok(())
}

/// Makes the tap for the interface of the calling thread's namespace, if there is one.
fn plug(nets: u32) -> Result<Option<(Interface, std::os::fd::OwnedFd)>, NetError> {
    let netlink = Netlink::route().map_err(NetError::system("open a routing socket"))?;
    let Some(interface) = scan::interface(&netlink)? else {
        return Ok(None);
    };
    if nets == 0 {
        return Err(NetError::NoDevice);
    }
    let tap = redirect::attach(&netlink, &interface)?;
    Ok(Some((interface, tap)))
}

/// Takes the redirection off the interface of a namespace that outlives the sandbox. Idempotent; what cannot be removed is only logged.
pub fn release(bundle: &Path) {
    let Ok(spec) = crate::launch::read_spec(bundle) else {
        return;
    };
    let namespace = Namespace::of(&spec);
    let path = match &namespace {
        Namespace::Of(path) if path.exists() && !namespace.is_hosts() => path,
        _ => return,
    };
    let released = namespace::within(path, || {
        let netlink = Netlink::route().map_err(NetError::system("open a routing socket"))?;
        redirect::detach_all(&netlink)
    });
    if let Err(error) = released.and_then(|done| done) {
        warn!(error = crate::error::chain(&error), path = %path.display(), "release the network namespace");
    }
}

/// Refuses what a VM cannot give.
///
/// # Errors
/// The host's own network.
pub fn check(spec: &Spec) -> Result<()> {
    if Namespace::of(spec).is_hosts() {
        return Err(Error::InvalidArgument(
            "the host's network cannot be given to a virtual machine; run the container without --net-host".into(),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(linux: &str) -> Spec {
        let json = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},"linux":{linux}}}"#
        );
        crate::spec::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn the_namespace_is_the_one_of_the_spec() {
        let cases = [
            (r#"{"namespaces":[{"type":"pid"},{"type":"network"}]}"#, Namespace::New),
            (r#"{"namespaces":[{"type":"network","path":""}]}"#, Namespace::New),
            (
                r#"{"namespaces":[{"type":"network","path":"/run/netns/a"}]}"#,
                Namespace::Of("/run/netns/a".into()),
            ),
            (r#"{"namespaces":[{"type":"pid"}]}"#, Namespace::Host),
            ("{}", Namespace::Host),
        ];
        for (linux, expected) in cases {
            assert_eq!(Namespace::of(&spec(linux)), expected, "{linux}");
        }
        assert!(check(&spec("{}")).is_err());
    }

    #[test]
    fn the_hosts_network_is_refused_by_whatever_path() {
        let of = |path: &str| {
            check(&spec(&format!(
                r#"{{"namespaces":[{{"type":"network","path":"{path}"}}]}}"#
            )))
        };
        let mine = format!("/proc/{}/ns/net", std::process::id());
        for path in ["/proc/self/ns/net", &mine] {
            let text = of(path).unwrap_err().text();
            assert!(text.contains("the host's network cannot be given"), "{text}");
        }
        // Another file of the same filesystem.
        assert!(of("/proc/self/ns/pid").is_ok());
    }
}
