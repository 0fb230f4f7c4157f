//! The Debian packages that building and testing need on this machine.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{execute, say};

/// Packages, and why each is needed.
const PACKAGES: &[(&str, &str)] = &[
    ("gcc", "links Rust programs and builds the C parts of crates"),
    ("libc6-dev", "static glibc"),
    ("protobuf-compiler", "builds the gRPC clients of containerd"),
    ("libseccomp-dev", "static libseccomp for the agent"),
    ("mmdebstrap", "builds the lab's root filesystem"),
    ("debian-archive-keyring", "verifies Debian packages"),
    ("qemu-system-x86", "runs the lab"),
    ("e2fsprogs", "makes ext4 disks"),
    ("erofs-utils", "makes layer images and the lab's payload disk"),
    ("xz-utils", "decompresses kernel modules"),
    ("util-linux", "ties QEMU's life to ours"),
    ("busybox-static", "what the test images are made of"),
];

/// Packages for running containers on this machine itself, and why each is needed.
const CONTAINERD_PACKAGES: &[(&str, &str)] = &[
    ("containerd", "the demo starts one of its own"),
    ("runc", "plain containers, to compare with"),
    ("iproute2", "looks for network devices that were left behind"),
];

/// Installs what building and the lab need, with apt-get, and says so.
pub(crate) fn ensure() -> Result<()> {
    install(PACKAGES)
}

/// Installs what running containers on this machine itself needs.
pub(crate) fn ensure_containerd() -> Result<()> {
    install(CONTAINERD_PACKAGES)
}

fn install(packages: &[(&'static str, &str)]) -> Result<()> {
    let mut missing = Vec::new();
    for (package, _) in packages {
        if !is_installed(package)? {
            missing.push(*package);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "these Debian packages are missing and only root can install them: {}",
            missing.join(" ")
        );
    }
    say(format!("installing Debian packages: {}", missing.join(" ")));
    let apt = || {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["--quiet", "--yes"]);
        command
    };
    execute(apt().arg("update"))?;
    execute(apt().args(["install", "--no-install-recommends"]).args(&missing))
}

fn is_installed(package: &str) -> Result<bool> {
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${db:Status-Status}", package])
        .output()
        .context("running dpkg-query (only Debian is supported)")?;
    Ok(output.status.success() && output.stdout == b"installed")
}
