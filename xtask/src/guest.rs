//! The guest image: Debian's kernel as ELF, and an initramfs with the agent and the modules that it loads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::base;
use crate::cpio::Archive;
use crate::workspace::{Workspace, execute, list, make_dir, read, write_if_changed};

/// The two files that a VM boots from.
pub(crate) struct GuestImage {
    /// ELF kernel.
    pub(crate) kernel: PathBuf,
    /// Uncompressed cpio archive.
    pub(crate) initramfs: PathBuf,
}

/// Where the guest image is, built or not.
pub(crate) fn paths(ws: &Workspace) -> GuestImage {
    let dir = ws.target.join("guest");
    GuestImage {
        kernel: dir.join("vmlinux"),
        initramfs: dir.join("initramfs"),
    }
}

/// A program or module without what only debuggers read: every byte of the initramfs is copied while the guest boots. A module loses its
/// signature with it, which the guest would otherwise verify; what stands beside it in the initramfs is not signed either.
fn stripped(ws: &Workspace, file: &Path) -> Result<Vec<u8>> {
    let out = ws.target.join(format!("guest/stripped.tmp{}", std::process::id()));
    let mut strip = Command::new("strip");
    strip
        .args(["--strip-unneeded", "--remove-section=.BTF", "-o"])
        .arg(&out)
        .arg(file);
    let stripped = execute(&mut strip).and_then(|()| read(&out));
    let _ = fs::remove_file(&out);
    stripped
}

/// Builds the guest image around `init`, or around the built agent.
pub(crate) fn build(ws: &Workspace, init: Option<&Path>) -> Result<GuestImage> {
    let agent = ws.program("ramet-agent");
    let init = init.unwrap_or(&agent);
    ensure!(
        init.exists(),
        "{} does not exist: build it first, or name another program with --init",
        init.display()
    );
    let base = base::ensure(ws)?;
    make_dir(&ws.target.join("guest"))?;
    let mut archive = Archive::new();
    for dir in ["dev", "proc", "sys", "run", "tmp", "modules"] {
        archive.dir(dir);
    }
    archive.character_device("dev/console", 0o600, 5, 1);
    archive.file("init", 0o755, &stripped(ws, init)?);
    for module in list(&base.guest_modules())? {
        let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.file(&format!("modules/{name}"), 0o644, &stripped(ws, &module)?);
    }
    let image = paths(ws);
    write_if_changed(&image.kernel, &read(&base.vmlinux())?)?;
    write_if_changed(&image.initramfs, &archive.finish())?;
    Ok(image)
}
