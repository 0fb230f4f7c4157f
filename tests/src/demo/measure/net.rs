//! One TCP stream between a container and this machine over a CNI bridge, in both directions, and round trips.

use std::net::TcpListener;

use anyhow::{Context, Result};
use e2e::cni;
use e2e::images::Archive;
use e2e::private::PrivateNode;

use super::table::{Bar, Measured, Row};
use super::{idle, image, load, note};
use crate::say;

pub(super) fn measure(node: &PrivateNode, mib: usize, trips: usize, rounds: usize) -> Result<Measured> {
    if std::env::var_os("RAMET_LAB").is_some() {
        cni::configure(None)?;
    }
    node.import(&Archive::Busybox)?;
    let image = image::make(node)?;
    let listener = TcpListener::bind("0.0.0.0:0").context("listening for the containers")?;
    let port = listener.local_addr()?.port().to_string();
    std::thread::spawn(move || load::serve(&listener));
    say("an idle container of each kind with a network");
    let containers = idle(node, &image, &["--cni"])
        .context("a container with a network needs a CNI configuration in /etc/cni/net.d")?;
    let (mib_text, trips_text) = (mib.to_string(), trips.to_string());
    let mut rows = vec![
        Row::new(
            format!("{mib} MiB from the container to the host"),
            "MiB/s",
            Some(Bar::AtLeast(0.5)),
        ),
        Row::new(
            format!("{mib} MiB from the host to the container"),
            "MiB/s",
            Some(Bar::AtLeast(0.5)),
        ),
        Row::new(
            format!("{trips} round trips of one byte"),
            "1/s",
            Some(Bar::AtLeast(0.5)),
        ),
    ];
    let arguments = [
        ["send", &port, &mib_text],
        ["receive", &port, &mib_text],
        ["trips", &port, &trips_text],
    ];
    for _ in 0..rounds {
        for (row, arguments) in rows.iter_mut().zip(&arguments) {
            for (runtime, container) in &containers {
                let value = load(container, arguments).with_context(|| format!("{runtime:?}"))?;
                note(row, *runtime, value);
            }
        }
    }
    for (_, container) in containers {
        container.remove()?;
    }
    node.remove_image(&image)?;
    Ok(Measured {
        rows,
        ..Measured::default()
    })
}
