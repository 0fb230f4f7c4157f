//! May this host restore a checkpoint? Asked before anything is started.
//!
//! Saved vCPU state holds registers and CPUID leaves of the CPU it was made on; another vendor, family or model may lack a feature
//! that the guest found at boot and uses ever since.

use std::fmt;

use thiserror::Error;

use crate::manifest::{CheckpointManifest, FORMAT, HostRequirements};

/// What of a host matters to a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// Architecture, as Rust names it: `x86_64`.
    pub arch: String,
    /// CPUID vendor string.
    pub cpu_vendor: String,
    /// CPUID family, with the extended family added.
    pub cpu_family: u32,
    /// CPUID model, with the extended model.
    pub cpu_model: u32,
    /// Kernel release.
    pub kernel: String,
}

/// Why a checkpoint cannot be restored here.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Incompatible {
    /// Made for another format.
    #[error(
        "checkpoint {id} has format {found}, this build of ramet restores format {FORMAT}; make it again with this version"
    )]
    Format {
        /// Which checkpoint.
        id: String,
        /// Its format.
        found: u32,
    },
    /// Made on another CPU or architecture.
    #[error("checkpoint {id} was made on {}, this host is {}: {what}; restore it on a host like that one, or make it again on this host", Cpu(.needs), Cpu(.host))]
    Cpu {
        /// Which checkpoint.
        id: String,
        /// What differs.
        what: String,
        /// What it needs.
        needs: Box<HostRequirements>,
        /// What there is.
        host: Box<HostRequirements>,
    },
}

/// A CPU for people to read.
struct Cpu<'a>(&'a HostRequirements);

impl fmt::Display for Cpu<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostRequirements {
            arch,
            cpu_vendor,
            cpu_family,
            cpu_model,
            ..
        } = self.0;
        write!(f, "{arch} {cpu_vendor} family {cpu_family} model {cpu_model}")
    }
}

impl HostFacts {
    /// Asks the CPU and the kernel.
    #[must_use]
    pub fn detect() -> Self {
        let (cpu_vendor, cpu_family, cpu_model) = cpu();
        let kernel = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
        let kernel = kernel.unwrap_or_else(|_| "unknown".to_owned());
        Self {
            arch: std::env::consts::ARCH.to_owned(),
            cpu_vendor,
            cpu_family,
            cpu_model,
            kernel,
        }
    }

    /// What a checkpoint made here will ask of a host.
    #[must_use]
    pub fn requirements(&self) -> HostRequirements {
        HostRequirements {
            arch: self.arch.clone(),
            cpu_vendor: self.cpu_vendor.clone(),
            cpu_family: self.cpu_family,
            cpu_model: self.cpu_model,
            host_kernel: self.kernel.clone(),
        }
    }
}

/// Whether `host` can restore the checkpoint.
///
/// # Errors
/// Names what differs, and what to do.
pub fn check(manifest: &CheckpointManifest, host: &HostFacts) -> Result<(), Incompatible> {
    let id = manifest.id.to_string();
    if manifest.format != FORMAT {
        return Err(Incompatible::Format {
            id,
            found: manifest.format,
        });
    }
    let needs = &manifest.host;
    let mut differs = Vec::new();
    if needs.arch != host.arch {
        differs.push("architecture");
    }
    if needs.cpu_vendor != host.cpu_vendor {
        differs.push("CPU vendor");
    }
    if needs.cpu_family != host.cpu_family {
        differs.push("CPU family");
    }
    if needs.cpu_model != host.cpu_model {
        differs.push("CPU model");
    }
    if differs.is_empty() {
        return Ok(());
    }
    let verb = if differs.len() == 1 { "differs" } else { "differ" };
    let what = format!("{} {verb}", differs.join(", "));
    Err(Incompatible::Cpu {
        id,
        what,
        needs: Box::new(needs.clone()),
        host: Box::new(host.requirements()),
    })
}

#[cfg(target_arch = "x86_64")]
fn cpu() -> (String, u32, u32) {
    use core::arch::x86_64::__cpuid;
    let leaf = __cpuid(0);
    let vendor: Vec<u8> = [leaf.ebx, leaf.edx, leaf.ecx]
        .iter()
        .flat_map(|register| register.to_le_bytes())
        .collect();
    let (family, model) = family_and_model(__cpuid(1).eax);
    (
        String::from_utf8_lossy(&vendor).trim_end_matches('\0').to_owned(),
        family,
        model,
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu() -> (String, u32, u32) {
    ("unknown".to_owned(), 0, 0)
}

/// From EAX of CPUID leaf 1.
fn family_and_model(signature: u32) -> (u32, u32) {
    let (family, model) = ((signature >> 8) & 0xf, (signature >> 4) & 0xf);
    let extended_model = if family == 6 || family == 15 {
        (signature >> 16) & 0xf
    } else {
        0
    };
    let extended_family = if family == 15 { (signature >> 20) & 0xff } else { 0 };
    (family + extended_family, (extended_model << 4) | model)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::manifest;

    #[test]
    fn signatures_are_decoded_as_the_vendors_say() {
        assert_eq!(family_and_model(0x000a_0671), (6, 0xa7));
        assert_eq!(family_and_model(0x00a2_0f12), (25, 0x21));
        assert_eq!(family_and_model(0x0000_0543), (5, 4));
    }

    #[test]
    fn the_host_that_made_a_checkpoint_can_restore_it() {
        let host = HostFacts::detect();
        let mut manifest = manifest();
        manifest.host = host.requirements();
        check(&manifest, &host).unwrap();
    }

    #[test]
    fn another_cpu_is_refused_and_named() {
        let mut host = HostFacts {
            arch: "x86_64".to_owned(),
            cpu_vendor: "GenuineIntel".to_owned(),
            cpu_family: 6,
            cpu_model: 85,
            kernel: "6.1".to_owned(),
        };
        let mut manifest = manifest();
        manifest.host = host.requirements();
        host.cpu_vendor = "AuthenticAMD".to_owned();
        host.cpu_family = 25;
        let message = check(&manifest, &host).unwrap_err().to_string();
        assert!(
            message.contains("was made on x86_64 GenuineIntel family 6 model 85"),
            "{message}"
        );
        assert!(
            message.contains("this host is x86_64 AuthenticAMD family 25 model 85"),
            "{message}"
        );
        assert!(message.contains("CPU vendor, CPU family differ"), "{message}");
        assert!(message.contains("make it again on this host"), "{message}");
    }

    #[test]
    fn another_kernel_is_no_reason_to_refuse() {
        let mut host = HostFacts::detect();
        let mut manifest = manifest();
        manifest.host = host.requirements();
        host.kernel = "9.9".to_owned();
        check(&manifest, &host).unwrap();
    }
}
