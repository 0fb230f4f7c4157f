//! Busybox with this program in it.

use anyhow::{Context, Result};
use e2e::Node;

use crate::{padding, say};

/// Where the program is in the image.
pub(super) const PROGRAM: &str = "/usr/bin/ramet-load";

/// Makes and imports the image; its name.
pub(super) fn make(node: &Node) -> Result<String> {
    const NAME: &str = "localhost/load:1";
    say("an image with the generator of load");
    let program = std::fs::read("/proc/self/exe").context("reading this program")?;
    let mut layer = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(program.len() as u64);
    header.set_mode(0o755);
    layer.append_data(&mut header, PROGRAM.trim_start_matches('/'), program.as_slice())?;
    padding::image_with(node, NAME, &layer.into_inner()?)?;
    Ok(NAME.to_owned())
}
