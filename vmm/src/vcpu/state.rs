//! Saved state of one vCPU: taken and set in the order that KVM needs.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::sys::vcpu::set_xsave;

const TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;
/// The capability registers of VMX, which is never offered.
const VMX_REGISTERS: std::ops::RangeInclusive<u32> = 0x480..=0x4ff;
/// KVM's own limit on one call.
const MSR_CHUNK: usize = 256;
/// Most registers a state may have.
const MAX_MSRS: usize = 4096;

/// State of a vCPU cannot be taken or set.
#[derive(Debug, thiserror::Error)]
pub enum VcpuStateError {
    /// A KVM call.
    #[error("{0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// KVM took some model-specific registers and refused one.
    #[error("model-specific register {register:#x} cannot be set to {value:#x}")]
    Msr {
        /// Which one.
        register: u32,
        /// To what.
        value: u64,
    },
    /// The state makes no sense.
    #[error("saved vCPU state: {0}")]
    Malformed(&'static str),
}

/// Everything KVM knows about one vCPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// XSAVE area, 4096 bytes.
    xsave: Vec<u32>,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    /// kHz; 0 when KVM does not say.
    tsc_khz: u32,
    cpuid: Vec<kvm_cpuid_entry2>,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
}

impl VcpuState {
    /// Takes the state; the vCPU stands still and has completed its last port or MMIO access. `cpuid` is what was set: what
    /// KVM gives back may have more in it.
    pub(crate) fn save(vcpu: &VcpuFd, cpuid: &CpuId, registers: &[u32]) -> Result<Self, VcpuStateError> {
        use VcpuStateError::Kvm;
        // The multiprocessing state first: reading it may process a pending INIT and change the rest.
        let mp_state = vcpu.get_mp_state().map_err(|e| Kvm("get multiprocessing state", e))?;
        let regs = vcpu.get_regs().map_err(|e| Kvm("get registers", e))?;
        let sregs = vcpu.get_sregs().map_err(|e| Kvm("get special registers", e))?;
        let xsave = vcpu.get_xsave().map_err(|e| Kvm("get extended state", e))?;
        let xcrs = vcpu.get_xcrs().map_err(|e| Kvm("get extended control registers", e))?;
        let debug_regs = vcpu.get_debug_regs().map_err(|e| Kvm("get debug registers", e))?;
        let lapic = vcpu.get_lapic().map_err(|e| Kvm("get local APIC", e))?;
        let tsc_khz = vcpu.get_tsc_khz().unwrap_or(0);

        let msrs = get_msrs(vcpu, registers)?;
        let events = vcpu.get_vcpu_events().map_err(|e| Kvm("get events", e))?;
        Ok(Self {
            mp_state,
            regs,
            sregs,
            xsave: xsave.region.to_vec(),
            xcrs,
            debug_regs,
            lapic,
            tsc_khz,
            cpuid: cpuid.as_slice().to_vec(),
            msrs,
            events,
        })
    }

    /// Sets the state of a new vCPU. `tsc` replaces the saved time stamp counter, so that all vCPUs of a machine get the same one.
    pub(crate) fn restore(&self, vcpu: &VcpuFd, tsc: Option<u64>) -> Result<(), VcpuStateError> {
        use VcpuStateError::Kvm;
        self.match_tsc_frequency(vcpu)?;
        // CPUID decides which registers exist. REGS before EVENTS (it clears exceptions), SREGS (APIC base) before LAPIC, LAPIC before
        // MSRS (the deadline timer).
        vcpu.set_cpuid2(&self.cpuid()?).map_err(|e| Kvm("set CPUID", e))?;
        vcpu.set_mp_state(self.mp_state)
            .map_err(|e| Kvm("set multiprocessing state", e))?;
        vcpu.set_regs(&self.regs).map_err(|e| Kvm("set registers", e))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(|e| Kvm("set special registers", e))?;
        set_xsave(vcpu, &self.xsave()?).map_err(|e| Kvm("set extended state", e))?;
        vcpu.set_xcrs(&self.xcrs)
            .map_err(|e| Kvm("set extended control registers", e))?;
        vcpu.set_debug_regs(&self.debug_regs)
            .map_err(|e| Kvm("set debug registers", e))?;
        vcpu.set_lapic(&self.lapic).map_err(|e| Kvm("set local APIC", e))?;
        let (first, last) = ordered_msrs(&self.msrs, tsc)?;
        set_msrs(vcpu, &first)?;
        set_msrs(vcpu, &last)?;
        vcpu.set_vcpu_events(&self.events).map_err(|e| Kvm("set events", e))
    }

    /// CPUID as KVM takes it.
    pub(crate) fn cpuid(&self) -> Result<CpuId, VcpuStateError> {
        if self.cpuid.len() > KVM_MAX_CPUID_ENTRIES {
            return Err(VcpuStateError::Malformed("too many CPUID entries"));
        }
        CpuId::from_entries(&self.cpuid).map_err(|_| VcpuStateError::Malformed("too many CPUID entries"))
    }

    fn xsave(&self) -> Result<kvm_xsave, VcpuStateError> {
        let mut xsave = kvm_xsave::default();
        if self.xsave.len() != xsave.region.len() {
            return Err(VcpuStateError::Malformed("extended state has the wrong size"));
        }
        xsave.region.copy_from_slice(&self.xsave);
        Ok(xsave)
    }

    /// The saved time stamp counter.
    pub(crate) fn tsc(&self) -> Option<u64> {
        self.msrs.iter().find(|msr| msr.index == TSC).map(|msr| msr.data)
    }

    /// Scales the counter when this host's differs by more than 250 ppm, which is what KVM itself tolerates.
    fn match_tsc_frequency(&self, vcpu: &VcpuFd) -> Result<(), VcpuStateError> {
        let here = vcpu.get_tsc_khz().unwrap_or(0);
        if self.tsc_khz == 0 || here == 0 {
            return Ok(());
        }
        if u64::from(self.tsc_khz.abs_diff(here)) * 1_000_000 > u64::from(self.tsc_khz) * 250 {
            vcpu.set_tsc_khz(self.tsc_khz)
                .map_err(|e| VcpuStateError::Kvm("set frequency of the time stamp counter", e))?;
        }
        Ok(())
    }
}

/// All registers of the list that can be read.
fn get_msrs(vcpu: &VcpuFd, registers: &[u32]) -> Result<Vec<kvm_msr_entry>, VcpuStateError> {
    let mut found = Vec::new();
    let mut wanted: Vec<u32> = registers
        .iter()
        .copied()
        .filter(|register| !VMX_REGISTERS.contains(register))
        .collect();
    while !wanted.is_empty() {
        let chunk: Vec<_> = wanted
            .iter()
            .take(MSR_CHUNK)
            .map(|&index| kvm_msr_entry {
                index,
                ..kvm_msr_entry::default()
            })
            .collect();
        let mut msrs = Msrs::from_entries(&chunk).map_err(|_| VcpuStateError::Malformed("too many registers"))?;
        let count = vcpu
            .get_msrs(&mut msrs)
            .map_err(|e| VcpuStateError::Kvm("get model-specific registers", e))?;
        found.extend(msrs.as_slice().iter().take(count));
        // KVM stops at one that this vCPU does not have: leave it out.
        let done = if count < chunk.len() { count + 1 } else { count };
        wanted.drain(..done);
    }
    Ok(found)
}

/// Registers to set, in two steps: the deadline timer is armed from the counter, so it comes after it. A deadline of 0 may be a
/// timer that expired during the save; an expired deadline makes it fire once (again), which guests tolerate.
fn ordered_msrs(
    msrs: &[kvm_msr_entry],
    tsc: Option<u64>,
) -> Result<(Vec<kvm_msr_entry>, Vec<kvm_msr_entry>), VcpuStateError> {
    if msrs.len() > MAX_MSRS {
        return Err(VcpuStateError::Malformed("too many model-specific registers"));
    }
    let (mut last, mut first): (Vec<_>, Vec<_>) = msrs.iter().copied().partition(|msr| msr.index == TSC_DEADLINE);
    for msr in first.iter_mut().filter(|msr| msr.index == TSC) {
        msr.data = tsc.unwrap_or(msr.data);
    }
    let now = first.iter().find(|msr| msr.index == TSC).map_or(1, |msr| msr.data);
    for msr in last.iter_mut().filter(|msr| msr.data == 0) {
        msr.data = now;
    }
    Ok((first, last))
}

/// Sets registers. One that KVM refuses is left out if it is 0 anyway (KVM lists some that can only be read).
fn set_msrs(vcpu: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<(), VcpuStateError> {
    let mut rest = msrs;
    while !rest.is_empty() {
        let chunk = rest.get(..MSR_CHUNK).unwrap_or(rest);
        let entries = Msrs::from_entries(chunk).map_err(|_| VcpuStateError::Malformed("too many registers"))?;
        let count = vcpu
            .set_msrs(&entries)
            .map_err(|e| VcpuStateError::Kvm("set model-specific registers", e))?;
        let mut done = count;
        if let Some(refused) = chunk.get(count) {
            if refused.data != 0 {
                return Err(VcpuStateError::Msr {
                    register: refused.index,
                    value: refused.data,
                });
            }
            done += 1;
        }
        rest = rest.get(done..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn msr(index: u32, data: u64) -> kvm_msr_entry {
        kvm_msr_entry {
            index,
            data,
            ..kvm_msr_entry::default()
        }
    }

    #[test]
    fn the_deadline_comes_after_the_counter_and_is_never_lost() {
        let (first, last) = ordered_msrs(&[msr(TSC_DEADLINE, 0), msr(TSC, 5), msr(0x1b, 1)], Some(9)).unwrap();
        assert_eq!(first, vec![msr(TSC, 9), msr(0x1b, 1)]);
        assert_eq!(last, vec![msr(TSC_DEADLINE, 9)]);
        let (_, last) = ordered_msrs(&[msr(TSC_DEADLINE, 77), msr(TSC, 5)], None).unwrap();
        assert_eq!(last, vec![msr(TSC_DEADLINE, 77)]);
    }

    #[test]
    fn too_many_registers_are_refused() {
        assert!(ordered_msrs(&vec![msr(1, 1); MAX_MSRS + 1], None).is_err());
    }
}
