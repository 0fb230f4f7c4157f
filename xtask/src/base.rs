//! The lab's root filesystem, and the kernel that lab and guests share. Built once and cached by a hash of the recipe.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::kernel;
use crate::mirror;
use crate::workspace::{Workspace, capture, execute, hash, list, make_dir, read, read_text, say};

/// The one Debian release that lab and guest come from.
const SUITE: &str = "trixie";
/// Raise it when the code below changes what a base looks like.
const VERSION: &str = "1";
/// Size of the lab's root filesystem; the file is sparse.
const DISK_SIZE: &str = "24G";

/// Modules that the agent loads in a guest. Kernel 6.12 has fuse, ext4, the serial console and virtio itself built in.
const GUEST_MODULES: &[&str] = &[
    "virtio_mmio",
    "virtio_blk",
    "vmw_vsock_virtio_transport",
    "erofs",
    "overlay",
    "virtio_net",
    "virtio-rng",
    "virtio_balloon",
    // Lets the agent close a fork's inherited TCP connections.
    "inet_diag",
    "tcp_diag",
];
/// Modules that the lab needs before it has its root filesystem.
const LAB_MODULES: &[&str] = &["virtio_blk", "erofs", "overlay"];

/// A finished base.
pub(crate) struct Base {
    dir: PathBuf,
}

impl Base {
    /// The root filesystem, raw ext4.
    pub(crate) fn disk(&self) -> PathBuf {
        self.dir.join("disk.ext4")
    }

    /// The ELF kernel.
    pub(crate) fn vmlinux(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    /// A static busybox.
    pub(crate) fn busybox(&self) -> PathBuf {
        self.dir.join("busybox")
    }

    /// Modules for the guest's initramfs, named in load order.
    pub(crate) fn guest_modules(&self) -> PathBuf {
        self.dir.join("guest-modules")
    }

    /// Modules for the lab's initramfs, named in load order.
    pub(crate) fn lab_modules(&self) -> PathBuf {
        self.dir.join("lab-modules")
    }
}

/// Builds the base, or finds it built.
pub(crate) fn ensure(ws: &Workspace) -> Result<Base> {
    let packages = packages(&read_text(&ws.recipe("packages"))?);
    let recipe = [
        packages.join(" "),
        GUEST_MODULES.join(" "),
        LAB_MODULES.join(" "),
        DISK_SIZE.into(),
        VERSION.into(),
    ];
    let key = hash(&recipe.iter().map(String::as_bytes).collect::<Vec<_>>());
    let lab = ws.lab_dir()?;
    let base = Base {
        dir: lab.join(format!("base-{}", &key[..16])),
    };
    if base.dir.exists() {
        return Ok(base);
    }
    let lock = fs::File::create(lab.join("base.lock")).context("creating the base image's lock file")?;
    lock.lock().context("waiting for the base image's lock")?;
    if !base.dir.exists() {
        build(&lab, &base, &packages)?;
    }
    Ok(base)
}

/// The package names in the recipe file.
fn packages(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

fn build(lab: &Path, base: &Base, packages: &[String]) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("building the lab's root filesystem needs root");
    }
    // What an interrupted build or an older recipe left.
    for path in list(lab)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("base-") && path.is_dir() {
            fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    let work = lab.join("base-work");
    make_dir(&work)?;
    let root = work.join("root");
    debootstrap(&root, packages)?;
    say("taking the kernel and its modules out of it");
    let bzimage = list(&root.join("boot"))?
        .into_iter()
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        })
        .context("the root filesystem has no kernel in /boot")?;
    write(&work.join("vmlinux"), &kernel::extract_vmlinux(&read(&bzimage)?)?)?;
    let modules_dir = kernel::modules_dir(&root)?;
    kernel::save_modules(
        &work.join("guest-modules"),
        &kernel::load_modules(&modules_dir, GUEST_MODULES)?,
    )?;
    kernel::save_modules(
        &work.join("lab-modules"),
        &kernel::load_modules(&modules_dir, LAB_MODULES)?,
    )?;
    fs::copy(root.join("usr/bin/busybox"), work.join("busybox")).context("copying busybox")?;
    for path in list(&root.join("boot"))? {
        fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    say("making its ext4 file system");
    let disk = work.join("disk.ext4");
    let options = "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0";
    capture(
        Command::new("mkfs.ext4")
            .args(["-q", "-F", "-E", options, "-d"])
            .arg(&root)
            .arg(&disk)
            .arg(DISK_SIZE),
    )?;
    fs::remove_dir_all(&root).context("removing the unpacked root filesystem")?;
    fs::rename(&work, &base.dir).context("renaming the finished base")
}

fn debootstrap(root: &Path, packages: &[String]) -> Result<()> {
    let mirror = mirror::find()?;
    say(format!(
        "building the lab's root filesystem from {} ({SUITE})",
        mirror.uri
    ));
    let mut command = mirror.mmdebstrap("essential", &packages.join(","));
    // The kernel's packages would otherwise build an initrd, which nobody uses here.
    command.env("INITRD", "No");
    for tree in ["doc", "man", "locale", "info"] {
        command.arg(format!("--dpkgopt=path-exclude=/usr/share/{tree}/*"));
    }
    execute(command.arg(SUITE).arg(root).arg(&mirror.uri))
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipe_may_have_comments() {
        assert_eq!(packages("# a\n\nruncc \n containerd\n"), ["runcc", "containerd"]);
    }
}
