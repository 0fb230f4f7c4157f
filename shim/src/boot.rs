//! The machine for a cold start: its shape, its disks, its kernel command line.

use std::fs::File;
use std::path::{Path, PathBuf};

use checkpoint::disk;
use checkpoint::layers::LayerImage;
use oci_spec::runtime::Spec;
use vmm::control::{BootRequest, NetConfig, limits};

use crate::disks::{FdList, WritableDisk, read_only_config};
use crate::error::{Error, Result};
use crate::rootfs::{Rootfs, work_dir};
use crate::spec;

/// Annotation: number of vCPUs.
pub const VCPUS: &str = "io.ramet.vcpus";
/// Annotation: guest memory in MiB.
pub const MEMORY_MIB: &str = "io.ramet.memory_mib";
/// Guest memory without annotation or limit.
const DEFAULT_MEMORY: u64 = 512 << 20;
/// What kernel and agent need beside a memory limit.
pub const MEMORY_OVERHEAD: u64 = 128 << 20;
/// Memory comes in these steps.
const MEMORY_STEP: u64 = 2 << 20;
/// Writable disk for root filesystems of other snapshotters.
const FOREIGN_WRITABLE: u64 = 10 << 30;

/// Where the empty filesystems for those are kept.
const FOREIGN_TEMPLATES: &str = "/var/lib/ramet/templates";

/// No console output unless something is wrong, no devices that are not there, power-off and reset as the VMM understands them. The
/// jitter entropy of the crypto API is left out: it tests itself long, and the kernel's own generator does not use it.
const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=4 rdinit=/init panic=-1 reboot=t 8250.nr_uarts=1 random.trust_cpu=on \
    tsc=reliable no_timer_check i8042.noaux i8042.nomux i8042.dumbkbd cryptomgr.notests initcall_blacklist=jent_mod_init \
    rcupdate.rcu_expedited=1 apparmor=0 audit=0 nmi_watchdog=0 swiotlb=noforce pci=off";

/// What the guest boots from.
#[derive(Clone, Debug)]
pub struct GuestImage {
    directory: PathBuf,
}

impl GuestImage {
    /// `RAMET_GUEST_DIR`, else `/usr/local/share/ramet`.
    #[must_use]
    pub fn find() -> Self {
        let directory =
            std::env::var_os("RAMET_GUEST_DIR").map_or_else(|| PathBuf::from("/usr/local/share/ramet"), PathBuf::from);
        Self { directory }
    }

    /// In a given directory.
    #[must_use]
    pub fn at(directory: PathBuf) -> Self {
        Self { directory }
    }

    fn open(&self, name: &str) -> Result<File> {
        let path = self.directory.join(name);
        File::open(&path).map_err(|e| {
            if e.kind() == std::io::ErrorKind::NotFound {
                Error::Internal(format!(
                    "the guest image is not installed: {} does not exist; run `ramet doctor`",
                    path.display()
                ))
            } else {
                Error::file("open guest image", path)(e)
            }
        })
    }
}

/// How big the machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// vCPUs.
    pub vcpus: u8,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
}

impl Shape {
    /// From annotations, else from the limits of CPU and memory, else 1 vCPU and 512 MiB.
    ///
    /// # Errors
    /// An annotation that is no number or out of bounds.
    pub fn of(host: &Spec) -> Result<Self> {
        let vcpus = match spec::annotation(host, VCPUS) {
            None => crate::limits::vcpus(host),
            Some(text) => {
                let number = text.parse().ok().filter(|n| limits::VCPUS.contains(n));
                number.ok_or_else(|| out_of_bounds(VCPUS, text, limits::VCPUS.start(), limits::VCPUS.end()))?
            }
        };
        let memory = limits::MEMORY;
        let memory_bytes = match spec::annotation(host, MEMORY_MIB) {
            None => limit(host).map_or(DEFAULT_MEMORY, |limit| {
                (limit
                    .saturating_add(MEMORY_OVERHEAD)
                    .clamp(*memory.start(), *memory.end()))
                .next_multiple_of(MEMORY_STEP)
            }),
            Some(text) => {
                let bytes = text
                    .parse::<u64>()
                    .ok()
                    .and_then(|mib| mib.checked_mul(1 << 20))
                    .filter(|b| memory.contains(b));
                let bytes =
                    bytes.ok_or_else(|| out_of_bounds(MEMORY_MIB, text, memory.start() >> 20, memory.end() >> 20))?;
                bytes.next_multiple_of(MEMORY_STEP)
            }
        };
        Ok(Self { vcpus, memory_bytes })
    }
}

fn out_of_bounds(key: &str, text: &str, least: impl std::fmt::Display, most: impl std::fmt::Display) -> Error {
    Error::InvalidArgument(format!(
        "annotation {key}={text:?} is not a number from {least} to {most}"
    ))
}

fn limit(host: &Spec) -> Option<u64> {
    let memory = host
        .linux()
        .as_ref()?
        .resources()
        .as_ref()?
        .memory()
        .as_ref()?
        .limit()?;
    u64::try_from(memory).ok().filter(|n| *n > 0)
}

/// The writable disk for a cold start. Blocks while the empty filesystem is made for the first time.
///
/// # Errors
/// The template cannot be made, or the directory not be used.
pub fn writable_disk(rootfs: &Rootfs, bundle: &Path) -> Result<WritableDisk> {
    let (template_dir, directory, size) = match rootfs {
        Rootfs::Ours { snapshot, description } => (
            description.template_dir(),
            snapshot.join("disk"),
            description.writable_bytes,
        ),
        Rootfs::Foreign(_) => (
            PathBuf::from(FOREIGN_TEMPLATES),
            work_dir(bundle).join("disk"),
            FOREIGN_WRITABLE,
        ),
    };
    let template = disk::ensure_ext4_template(&template_dir, size)?;
    WritableDisk::cold(&directory, template, size)
}

/// The request that boots it.
///
/// # Errors
/// A file cannot be opened; a missing guest image is named.
pub fn request(
    shape: Shape,
    image: &GuestImage,
    read_only: &[LayerImage],
    disk: &WritableDisk,
    console: &Path,
) -> Result<(BootRequest, FdList)> {
    let mut fds = FdList::default();
    let kernel = fds.push(image.open("vmlinux")?);
    let initramfs = Some(fds.push(image.open("initramfs")?));
    let disks = vec![
        read_only_config(read_only.iter().map(|i| i.path.as_path()), &mut fds)?,
        disk.config(&mut fds)?,
    ];
    let console = fds.push(open_console(console)?);
    let request = BootRequest {
        vcpus: shape.vcpus,
        memory_bytes: shape.memory_bytes,
        kernel,
        initramfs,
        command_line: std::env::var("RAMET_COMMAND_LINE").unwrap_or_else(|_| COMMAND_LINE.to_owned()),
        disks,
        nets: vec![NetConfig::unplugged()],
        console,
        linux_devices: true,
    };
    Ok((request, fds))
}

/// Opens the file that gets the guest's console.
///
/// # Errors
/// It cannot be opened.
pub fn open_console(path: &Path) -> Result<File> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(Error::file("open console", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(annotations: &str, resources: &str) -> Spec {
        let json = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},
            "annotations":{{{annotations}}},"linux":{{"resources":{{{resources}}}}}}}"#
        );
        spec::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn shape_follows_annotations_then_limit_then_default() {
        assert_eq!(
            Shape::of(&spec("", "")).unwrap(),
            Shape {
                vcpus: 1,
                memory_bytes: 512 << 20
            }
        );
        let limited = Shape::of(&spec("", r#""memory":{"limit":268435457}"#)).unwrap();
        assert_eq!(limited.memory_bytes, (384 << 20) + (2 << 20));
        let asked = Shape::of(&spec(r#""io.ramet.vcpus":"4","io.ramet.memory_mib":"1023""#, "")).unwrap();
        assert_eq!(
            asked,
            Shape {
                vcpus: 4,
                memory_bytes: 1024 << 20
            }
        );
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (key, value) in [
            (VCPUS, "0"),
            (VCPUS, "99"),
            (VCPUS, "x"),
            (MEMORY_MIB, "1"),
            (MEMORY_MIB, "99999999999999999999"),
        ] {
            let error = Shape::of(&spec(&format!(r#""{key}":"{value}""#), "")).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
        }
    }

    #[test]
    fn a_missing_guest_image_is_named_with_the_remedy() {
        let image = GuestImage::at("/nonexistent".into());
        let text = image.open("vmlinux").unwrap_err().to_string();
        assert!(
            text.contains("/nonexistent/vmlinux") && text.contains("ramet doctor"),
            "{text}"
        );
    }
}
