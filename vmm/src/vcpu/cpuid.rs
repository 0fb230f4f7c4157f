//! The CPUID a guest sees: what KVM supports, without what this VMM does not save.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// A feature bit.
struct Bit {
    function: u32,
    index: u32,
    register: Register,
    bit: u32,
}

#[derive(Clone, Copy)]
enum Register {
    Eax,
    Ecx,
    Edx,
}

const fn bit(function: u32, index: u32, register: Register, bit: u32) -> Bit {
    Bit {
        function,
        index,
        register,
        bit,
    }
}

/// Features with state that a save does not cover: nested virtualisation, AMX (dynamically enabled state), CET (shadow stack pointer
/// outside of the saved registers), asynchronous page faults (their tokens die with the host process), performance counters of SVM.
const MASKED: [Bit; 21] = [
    bit(1, 0, Register::Ecx, 5),            // VMX
    bit(0x8000_0001, 0, Register::Ecx, 2),  // SVM
    bit(7, 0, Register::Edx, 22),           // AMX-BF16
    bit(7, 0, Register::Edx, 24),           // AMX-TILE
    bit(7, 0, Register::Edx, 25),           // AMX-INT8
    bit(7, 1, Register::Eax, 21),           // AMX-FP16
    bit(7, 1, Register::Edx, 8),            // AMX-COMPLEX
    bit(7, 0, Register::Ecx, 7),            // CET shadow stack
    bit(7, 0, Register::Edx, 20),           // CET indirect branch tracking
    bit(0xd, 0, Register::Eax, 17),         // tile configuration
    bit(0xd, 0, Register::Eax, 18),         // tile data
    bit(0xd, 1, Register::Eax, 4),          // extended feature disable
    bit(0xd, 1, Register::Ecx, 11),         // CET user state
    bit(0xd, 1, Register::Ecx, 12),         // CET supervisor state
    bit(0xd, 1, Register::Ecx, 17),         // tile configuration
    bit(0xd, 1, Register::Ecx, 18),         // tile data
    bit(0x4000_0001, 0, Register::Eax, 4),  // asynchronous page faults
    bit(0x4000_0001, 0, Register::Eax, 10), // … delivered as VM exit
    bit(0x4000_0001, 0, Register::Eax, 14), // … completed by interrupt
    bit(0x4000_0001, 0, Register::Eax, 16), // migration control
    bit(0x8000_0001, 0, Register::Ecx, 12), // SKINIT
];

/// Leaves (with subleaf, if given) that describe masked features.
const REMOVED: [(u32, Option<u32>); 7] = [
    (0xd, Some(11)),
    (0xd, Some(12)),
    (0xd, Some(17)),
    (0xd, Some(18)),
    (0x1d, None),
    (0x1e, None),
    (0x8000_000a, None),
];

/// What one vCPU of `vcpus` sees, made from what KVM supports.
pub(crate) fn for_vcpu(supported: &CpuId, id: u8, vcpus: u8) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let mut entries: Vec<kvm_cpuid_entry2> = supported.as_slice().to_vec();
    entries.retain(|entry| {
        !REMOVED
            .iter()
            .any(|(function, index)| entry.function == *function && index.is_none_or(|index| entry.index == index))
    });
    for entry in &mut entries {
        mask(entry);
        set_topology(entry, id, vcpus);
    }
    if !entries.iter().any(|entry| entry.function == 0xb) {
        entries.extend(topology_leaf(0xb, id, vcpus));
    }
    CpuId::from_entries(&entries)
}

fn mask(entry: &mut kvm_cpuid_entry2) {
    for bit in MASKED
        .iter()
        .filter(|bit| bit.function == entry.function && bit.index == entry.index)
    {
        let register = match bit.register {
            Register::Eax => &mut entry.eax,
            Register::Ecx => &mut entry.ecx,
            Register::Edx => &mut entry.edx,
        };
        *register &= !(1 << bit.bit);
    }
}

/// Every vCPU is a core of its own in one package.
fn set_topology(entry: &mut kvm_cpuid_entry2, id: u8, vcpus: u8) {
    let (id, count) = (u32::from(id), u32::from(vcpus));
    let width = id_width(vcpus);
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0xff00 | entry.ebx & 0xff | id << 24 | (1 << width) << 16;
            entry.ecx |= 1 << 31; // there is a hypervisor
            if vcpus > 1 {
                entry.edx |= 1 << 28
            } else {
                entry.edx &= !(1 << 28)
            }
        }
        4 => {
            // Deterministic cache parameters: cores in the package, and each cache below level 3 belongs to one core.
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { (1 << width) - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | sharing << 14 | ((1 << width) - 1) << 26;
        }
        0xb | 0x1f => {
            entry.edx = id;
            match entry.index {
                0 => (entry.eax, entry.ebx, entry.ecx) = (0, 1, 1 << 8),
                1 => (entry.eax, entry.ebx, entry.ecx) = (width, count, 1 | 2 << 8),
                index => (entry.eax, entry.ebx, entry.ecx) = (0, 0, index),
            }
        }
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | width << 12 | (count - 1),
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = entry.ebx & !0xffff | id;
            entry.ecx = 0;
        }
        _ => {}
    }
}

fn topology_leaf(function: u32, id: u8, vcpus: u8) -> Vec<kvm_cpuid_entry2> {
    (0..2)
        .map(|index| {
            let mut entry = kvm_cpuid_entry2 {
                function,
                index,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                ..kvm_cpuid_entry2::default()
            };
            set_topology(&mut entry, id, vcpus);
            entry
        })
        .collect()
}

/// Bits that an APIC id of this machine needs.
fn id_width(vcpus: u8) -> u32 {
    u32::from(vcpus).next_power_of_two().trailing_zeros()
}

/// Feature words compared between a saved machine and what a new one would get: leaf, subleaf and the bits of each register that
/// must be there.
const FEATURE_LEAVES: [(u32, u32, [u32; 4]); 7] = [
    (1, 0, [0, 0, !(1 << 27), !(1 << 28)]), // OSXSAVE and HTT follow the machine, not the host
    (7, 0, [0, !0, !(1 << 4), !0]),         // OSPKE likewise
    (7, 1, [!0, !0, !0, !0]),
    (0xd, 0, [!0, 0, 0, !0]),
    (0xd, 1, [!0, 0, !0, !0]),
    (0x4000_0001, 0, [!0, 0, 0, 0]),
    (0x8000_0001, 0, [0, 0, !(1 << 1), !0]),
];

/// The first feature of a saved machine that this host does not offer, in words. `offered` is what [`for_vcpu`] gives a new machine,
/// not what KVM supports: a forged checkpoint must not turn on what is hidden, nested virtualisation above all.
pub(crate) fn missing_feature(saved: &CpuId, offered: &CpuId) -> Option<String> {
    let words = |cpuid: &CpuId, function, index| {
        let entry = cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == function && entry.index == index)
            .copied();
        let entry = entry.unwrap_or_default();
        [entry.eax, entry.ebx, entry.ecx, entry.edx]
    };
    for (function, index, relevant) in FEATURE_LEAVES {
        let (needed, present) = (words(saved, function, index), words(offered, function, index));
        for (number, name) in ["eax", "ebx", "ecx", "edx"].iter().enumerate() {
            let (needed, present, relevant) = (needed[number], present[number], relevant[number]);
            let missing = needed & relevant & !present;
            if missing != 0 {
                return Some(format!("CPUID {function:#x}.{index} {name} bits {missing:#x}"));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supported() -> CpuId {
        let entry = |function, index, words: [u32; 4]| kvm_cpuid_entry2 {
            function,
            index,
            eax: words[0],
            ebx: words[1],
            ecx: words[2],
            edx: words[3],
            ..kvm_cpuid_entry2::default()
        };
        CpuId::from_entries(&[
            entry(1, 0, [1, 0xff01_0800, !0, !0]),
            entry(4, 0, [0x0000_0121, 0, 0, 0]),
            entry(7, 0, [1, !0, !0, !0]),
            entry(0xd, 18, [1, 2, 3, 4]),
            entry(0x8000_000a, 0, [1, 2, 3, 4]),
        ])
        .unwrap()
    }

    fn find(cpuid: &CpuId, function: u32) -> kvm_cpuid_entry2 {
        *cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == function)
            .unwrap()
    }

    #[test]
    fn unsaved_features_are_hidden() {
        let cpuid = for_vcpu(&supported(), 0, 1).unwrap();
        assert_eq!(find(&cpuid, 1).ecx & 1 << 5, 0);
        assert_eq!(find(&cpuid, 7).edx & (1 << 22 | 1 << 24 | 1 << 25 | 1 << 20), 0);
        assert_eq!(find(&cpuid, 7).ecx & 1 << 7, 0);
        assert!(
            !cpuid
                .as_slice()
                .iter()
                .any(|entry| entry.function == 0xd || entry.function == 0x8000_000a)
        );
    }

    #[test]
    fn every_vcpu_is_one_core() {
        let cpuid = for_vcpu(&supported(), 2, 3).unwrap();
        assert_eq!(find(&cpuid, 1).ebx, 0x0204_0800);
        assert_eq!(find(&cpuid, 4).eax >> 26, 3);
        let levels: Vec<_> = cpuid.as_slice().iter().filter(|entry| entry.function == 0xb).collect();
        assert_eq!((levels[1].eax, levels[1].ebx, levels[1].edx), (2, 3, 2));
    }

    #[test]
    fn a_missing_feature_is_named() {
        let saved = for_vcpu(&supported(), 0, 1).unwrap();
        assert_eq!(missing_feature(&saved, &saved), None);
        let mut entries = supported().as_slice().to_vec();
        entries[2].ebx &= !(1 << 16);
        let host = for_vcpu(&CpuId::from_entries(&entries).unwrap(), 0, 1).unwrap();
        assert_eq!(missing_feature(&saved, &host).unwrap(), "CPUID 0x7.0 ebx bits 0x10000");
    }

    #[test]
    fn a_hidden_feature_cannot_be_turned_on() {
        let offered = for_vcpu(&supported(), 0, 1).unwrap();
        for (function, what) in [(1, "CPUID 0x1.0 ecx bits 0x20"), (7, "CPUID 0x7.0 edx bits 0x1000000")] {
            let mut entries = offered.as_slice().to_vec();
            for entry in entries.iter_mut().filter(|entry| entry.function == function) {
                if function == 1 {
                    entry.ecx |= 1 << 5; // VMX
                } else {
                    entry.edx |= 1 << 24; // AMX-TILE
                }
            }
            let forged = CpuId::from_entries(&entries).unwrap();
            assert_eq!(missing_feature(&forged, &offered).unwrap(), what);
        }
    }
}
