//! A network for `ctr run --cni`: a bridge on this machine with addresses of both families.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use crate::Container;

/// The bridge; like its addresses it stays when the tests end, as it does on any machine that uses CNI.
pub const BRIDGE: &str = "cni0";
/// The bridge's own addresses.
pub const GATEWAY: &str = "10.88.0.1";
/// The same for IPv6.
pub const GATEWAY_6: &str = "fd00:88::1";
/// MTU of the network: not the usual one, so that it shows where it was taken over.
pub const MTU: &str = "1400";

const DIRECTORY: &str = "/etc/cni/net.d";

/// Writes the configuration that `ctr run --cni` takes. With `published`, port 80 of the next container is also this port of the host.
pub fn configure(published: Option<u16>) -> Result<()> {
    let mut plugins = vec![json!({
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": true,
        "hairpinMode": true,
        "mtu": MTU.parse::<u32>()?,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        },
    })];
    if let Some(port) = published {
        plugins.push(json!({
            "type": "portmap",
            "snat": true,
            "runtimeConfig": {"portMappings": [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]},
        }));
    }
    let list = json!({"cniVersion": "1.0.0", "name": "lab", "plugins": plugins});
    fs::create_dir_all(DIRECTORY).with_context(|| format!("making {DIRECTORY}"))?;
    fs::write(Path::new(DIRECTORY).join("10-lab.conflist"), list.to_string()).context("writing the CNI configuration")
}

/// The addresses that CNI gave to a container, as its plugin noted them: IPv4, then IPv6.
pub fn addresses_of(container: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let directory = "/var/lib/cni/networks/lab";
    for entry in fs::read_dir(directory).with_context(|| format!("reading {directory}"))? {
        let entry = entry?;
        let owner = fs::read_to_string(entry.path())?;
        if owner.lines().next().is_some_and(|line| line.ends_with(container)) {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    found.sort_by_key(|address| address.contains(':'));
    Ok(found)
}

impl Container {
    /// Its IPv4 address, from inside.
    pub fn address(&self) -> Result<String> {
        let shown = self
            .exec(&["ip", "-o", "-4", "addr", "show", "dev", "eth0"])
            .succeed()?
            .out();
        let after = shown.split_once("inet ").map(|(_, rest)| rest);
        let address = after.and_then(|rest| rest.split('/').next());
        address
            .map(str::to_owned)
            .with_context(|| format!("no address in {shown:?}"))
    }
}
