//! What the host itself must have: CPU, KVM, kernel, programs, guest image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvm_ioctls::Kvm;

use super::Check;

/// Where the guest image is unless `RAMET_GUEST_DIR` says otherwise.
const GUEST_DIR: &str = "/usr/local/share/ramet";
const KVM_DEVICE: &str = "/dev/kvm";

/// All checks that need no containerd.
pub(super) fn checks() -> Vec<Check> {
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let guest_dir = std::env::var_os("RAMET_GUEST_DIR").map_or_else(|| PathBuf::from(GUEST_DIR), PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let search: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let mut checks = vec![
        cpu(&cpu_info),
        kvm(),
        kernel(release.trim()),
        cgroup(Path::new("/sys/fs/cgroup")),
    ];
    checks.push(guest_image(&guest_dir));
    for name in ["containerd-shim-ramet-v2", "ramet-vmm", "ramet-snapshotter"] {
        checks.push(program(
            name,
            &search,
            "build and install Ramet: cargo build --release, then copy its programs to /usr/local/bin",
        ));
    }
    checks.push(mkfs_erofs(&search));
    checks.push(program("mkfs.ext4", &search, "apt-get install e2fsprogs"));
    checks
}

/// `MAJOR.MINOR` at the beginning of a version.
pub(super) fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_start_matches('v').split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn cpu(cpu_info: &str) -> Check {
    const NAME: &str = "cpu";
    let flags = cpu_info
        .lines()
        .find(|line| line.starts_with("flags"))
        .unwrap_or_default();
    match flags.split_whitespace().find(|flag| ["vmx", "svm"].contains(flag)) {
        Some(flag) => Check::ok(NAME, format!("hardware virtualisation ({flag})")),
        None => Check::fail(
            NAME,
            "no hardware virtualisation (neither vmx nor svm in /proc/cpuinfo)",
            "enable it in the firmware, or nested virtualisation for this VM; without it Ramet runs in the lab: cargo xtask lab shell",
        ),
    }
}

fn kvm() -> Check {
    const NAME: &str = "kvm";
    if !Path::new(KVM_DEVICE).exists() {
        return Check::fail(
            NAME,
            format!("{KVM_DEVICE} does not exist"),
            "load the module: modprobe kvm_intel, or modprobe kvm_amd",
        );
    }
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            return Check::fail(
                NAME,
                format!("{KVM_DEVICE} cannot be opened: {error}"),
                "run as root, or join the group kvm",
            );
        }
    };
    match kvm.create_vm() {
        Ok(_) => Check::ok(NAME, format!("API version {}, a VM can be made", kvm.get_api_version())),
        Err(error) => Check::fail(
            NAME,
            format!("{KVM_DEVICE} opens, but no VM can be made: {error}"),
            "another hypervisor may hold the CPU's virtualisation; see dmesg",
        ),
    }
}

fn kernel(release: &str) -> Check {
    const NAME: &str = "kernel";
    let found = format!("Linux {release}");
    match major_minor(release) {
        Some(version) if version < (5, 10) => Check::fail(NAME, found, "Linux 5.10 or newer is needed"),
        Some(version) if version < (6, 7) => Check::warn(
            NAME,
            found,
            "since Linux 6.7 checkpoints of forks are made faster (PAGEMAP_SCAN)",
        ),
        _ => Check::ok(NAME, found),
    }
}

fn cgroup(root: &Path) -> Check {
    const NAME: &str = "cgroup";
    if root.join("cgroup.controllers").is_file() {
        return Check::ok(NAME, "version 2");
    }
    Check::warn(
        NAME,
        format!("no cgroup version 2 at {}", root.display()),
        "boot with systemd.unified_cgroup_hierarchy=1",
    )
}

fn guest_image(directory: &Path) -> Check {
    const NAME: &str = "guest image";
    let missing: Vec<_> = ["vmlinux", "initramfs"]
        .into_iter()
        .filter(|name| !fs::metadata(directory.join(name)).is_ok_and(|file| file.is_file() && file.len() > 0))
        .collect();
    if missing.is_empty() {
        return Check::ok(NAME, directory.display().to_string());
    }
    Check::fail(
        NAME,
        format!("{} lacks {}", directory.display(), missing.join(" and ")),
        "make it: cargo xtask image, then copy target/guest/* there (or set RAMET_GUEST_DIR for containerd)",
    )
}

fn find(name: &str, search: &[PathBuf]) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let runs =
        |path: &PathBuf| fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    search.iter().map(|directory| directory.join(name)).find(runs)
}

fn program(name: &'static str, search: &[PathBuf], remedy: &str) -> Check {
    match find(name, search) {
        Some(path) => Check::ok(name, path.display().to_string()),
        None => Check::fail(name, "not found in PATH", remedy),
    }
}

fn mkfs_erofs(search: &[PathBuf]) -> Check {
    const NAME: &str = "mkfs.erofs";
    let Some(path) = find(NAME, search) else {
        return Check::fail(NAME, "not found in PATH", "apt-get install erofs-utils (1.8 or newer)");
    };
    let output = Command::new(&path).arg("-V").stdin(Stdio::null()).output();
    let text = output
        .map(|output| [output.stdout, output.stderr].concat())
        .unwrap_or_default();
    erofs_version(&String::from_utf8_lossy(&text), &path)
}

fn erofs_version(text: &str, path: &Path) -> Check {
    const NAME: &str = "mkfs.erofs";
    let version = text
        .split_whitespace()
        .find_map(|word| major_minor(word).map(|numbers| (numbers, word.to_owned())));
    match version {
        Some((numbers, word)) if numbers >= (1, 8) => Check::ok(NAME, format!("{} ({word})", path.display())),
        Some((_, word)) => Check::fail(
            NAME,
            format!("{} is version {word}", path.display()),
            "install erofs-utils 1.8 or newer: older ones cannot merge image layers",
        ),
        None => Check::warn(
            NAME,
            format!("{} does not tell its version", path.display()),
            "erofs-utils 1.8 or newer is needed",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::*;

    #[test]
    fn versions_are_read_from_their_beginning() {
        assert_eq!(major_minor("6.12.38+deb13-cloud-amd64"), Some((6, 12)));
        assert_eq!(major_minor("v2.3.4"), Some((2, 3)));
        assert_eq!(major_minor("1.8"), Some((1, 8)));
        assert_eq!(major_minor("erofs"), None);
        assert_eq!(major_minor("7"), None);
    }

    #[test]
    fn hardware_virtualisation_is_a_flag_of_its_own() {
        assert_eq!(cpu("flags\t\t: fpu vme svm\n").outcome, Outcome::Ok);
        assert_eq!(cpu("flags\t\t: fpu svm_lock vmxoff\n").outcome, Outcome::Fail);
        assert_eq!(cpu("").outcome, Outcome::Fail);
    }

    #[test]
    fn kernels_are_refused_warned_about_or_fine() {
        assert_eq!(kernel("5.4.0").outcome, Outcome::Fail);
        assert_eq!(kernel("6.1.0-37-amd64").outcome, Outcome::Warn);
        assert_eq!(kernel("6.12.0").outcome, Outcome::Ok);
    }

    #[test]
    fn a_guest_image_needs_both_files() {
        let temporary = tempfile::tempdir().unwrap();
        fs::write(temporary.path().join("vmlinux"), b"x").unwrap();
        let check = guest_image(temporary.path());
        assert_eq!(check.outcome, Outcome::Fail);
        assert!(check.detail.ends_with("lacks initramfs"), "{}", check.detail);
        fs::write(temporary.path().join("initramfs"), b"x").unwrap();
        assert_eq!(guest_image(temporary.path()).outcome, Outcome::Ok);
    }

    #[test]
    fn a_program_must_be_executable() {
        use std::os::unix::fs::PermissionsExt;
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("ramet-vmm");
        fs::write(&path, b"").unwrap();
        let search = [temporary.path().to_owned()];
        assert_eq!(program("ramet-vmm", &search, "x").outcome, Outcome::Fail);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(program("ramet-vmm", &search, "x").outcome, Outcome::Ok);
    }

    #[test]
    fn old_erofs_utils_are_refused() {
        let path = Path::new("/bin/mkfs.erofs");
        assert_eq!(
            erofs_version("mkfs.erofs (erofs-utils) 1.8.6\n", path).outcome,
            Outcome::Ok
        );
        assert_eq!(erofs_version("mkfs.erofs 1.5\nlibdeflate", path).outcome, Outcome::Fail);
        assert_eq!(erofs_version("", path).outcome, Outcome::Warn);
    }

    #[test]
    fn cgroup_version_2_is_known_by_its_controllers() {
        let temporary = tempfile::tempdir().unwrap();
        assert_eq!(cgroup(temporary.path()).outcome, Outcome::Warn);
        fs::write(temporary.path().join("cgroup.controllers"), b"cpu").unwrap();
        assert_eq!(cgroup(temporary.path()).outcome, Outcome::Ok);
    }
}
