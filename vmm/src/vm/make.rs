//! Making a machine: new, or from a checkpoint.

use std::time::Instant;

use kvm_bindings::{CpuId, kvm_clock_data};

use super::bare::{Bare, renew_generation, set_local_interrupts};
use super::{Base, BootConfig, Host, Machine, RestoreConfig, VmError, Wiring};
use crate::acpi::MmioDevice;
use crate::boot;
use crate::control::limits;
use crate::devices::virtio::{DeviceSet, Disk, EventSender, Net};
use crate::memory::GuestMemory;
use crate::state::{BoardState, MachineState};
use crate::vcpu::cpuid;
use crate::vcpu::state::VcpuState;

/// Logs how long each step of making a machine took.
struct Steps(Instant);

impl Steps {
    fn done(&mut self, step: &str) {
        tracing::debug!(elapsed = ?self.0.elapsed(), "{step}");
        self.0 = Instant::now();
    }
}

fn check_limits(config: &BootConfig) -> Result<(), VmError> {
    if !limits::VCPUS.contains(&config.vcpus) {
        return Err(VmError::Config(format!(
            "{} vCPUs, allowed are {:?}",
            config.vcpus,
            limits::VCPUS
        )));
    }
    if config.disks.len() > limits::DISKS {
        return Err(VmError::Config(format!(
            "{} disks, allowed are {}",
            config.disks.len(),
            limits::DISKS
        )));
    }
    Ok(())
}

/// What one vCPU of a new machine sees.
fn cpuid_of(host: &Host, id: u8, vcpus: u8) -> Result<CpuId, VmError> {
    cpuid::for_vcpu(&host.cpuid, id, vcpus).map_err(|e| VmError::Config(format!("CPUID: {e:?}")))
}

/// The devices as ACPI describes them.
fn acpi_devices(devices: Option<&DeviceSet>) -> Result<Vec<MmioDevice>, VmError> {
    let small = |value: u64| u32::try_from(value).map_err(|_| VmError::Config("device registers above 4 GiB".into()));
    let mut described = Vec::new();
    for slot in devices.iter().flat_map(|devices| devices.slots()) {
        described.push(MmioDevice {
            base: small(slot.base)?,
            size: small(slot.size)?,
            irq: slot.irq,
        });
    }
    Ok(described)
}

impl Machine {
    /// Makes a new machine; [`Self::resume`] starts it.
    ///
    /// # Errors
    /// When the configuration is out of bounds, or KVM or a file does not do its part.
    pub fn boot(host: &Host, config: BootConfig, wiring: Wiring) -> Result<Self, VmError> {
        check_limits(&config)?;
        let mut steps = Steps(Instant::now());
        let bare = Bare::new(host, config.vcpus, GuestMemory::new(config.memory_bytes)?)?;
        let mut cpuids = Vec::new();
        for (id, vcpu) in (0_u8..).zip(&bare.vcpus) {
            let cpuid = cpuid_of(host, id, config.vcpus)?;
            vcpu.set_cpuid2(&cpuid).map_err(|e| VmError::Kvm("set CPUID", e))?;
            cpuids.push(cpuid);
            set_local_interrupts(vcpu)?;
        }
        steps.done("virtual machine made");
        let devices = if config.disks.is_empty() && config.nets.is_empty() && !config.linux_devices {
            None
        } else {
            let map = bare.memory.map().clone();
            Some(DeviceSet::create(
                map,
                config.disks,
                config.nets,
                config.linux_devices,
                wiring.events.clone(),
            )?)
        };
        let acpi_devices = acpi_devices(devices.as_ref())?;
        steps.done("devices made");
        let guest = boot::Guest {
            kernel: &config.kernel,
            initramfs: config.initramfs.as_ref(),
            command_line: &config.command_line,
            vcpus: config.vcpus,
            devices: &acpi_devices,
        };
        let entry = boot::load(&bare.memory, guest)?;
        steps.done("kernel loaded");
        if let Some(first) = bare.vcpus.first() {
            boot::set_entry_state(first, entry)?;
        }
        renew_generation(&bare.memory)?;
        let machine = bare.finish(host, cpuids, devices, wiring, None)?;
        steps.done("vCPU threads started");
        Ok(machine)
    }

    /// Brings a machine back; [`Self::resume`] lets it go on. Costs nothing per page of memory.
    ///
    /// # Errors
    /// When the checkpoint is damaged, does not fit this host or the files given, or KVM does not do its part.
    pub fn restore(host: &Host, config: RestoreConfig, wiring: Wiring) -> Result<Self, VmError> {
        let state = config.state;
        if config.index.pages.checked_mul(checkpoint::memory::PAGE_SIZE) != Some(state.memory_bytes) {
            let message = "state and memory index disagree about the size of guest memory";
            return Err(VmError::Config(message.into()));
        }
        let mut steps = Steps(Instant::now());
        let vcpus = u8::try_from(state.vcpus.len()).map_err(|_| VmError::Config("too many vCPUs".into()))?;
        let memory = GuestMemory::restore(&config.index, &config.memory_files)?;
        steps.done("memory mapped");
        let bare = Bare::new(host, vcpus, memory)?;
        steps.done("virtual machine made");
        let cpuids = bare.restore_vcpus(host, &state.vcpus)?;
        steps.done("vCPU state set");
        bare.restore_board(&state.board)?;
        if let Some(first) = bare.vcpus.first() {
            config.touched.bring_in(&bare.memory, first);
            steps.done("pages brought in");
        }
        let devices = bare.restore_devices(&state, config.disks, config.nets, wiring.events.clone())?;
        steps.done("devices restored");
        renew_generation(&bare.memory)?;
        let base = Base {
            checkpoint: config.checkpoint,
            index: config.index,
        };
        let machine = bare.finish(host, cpuids, devices, wiring, Some((base, &state.serial)))?;
        steps.done("vCPU threads started");
        Ok(machine)
    }
}

impl Bare {
    /// Sets the state of every vCPU; returns their CPUID.
    fn restore_vcpus(&self, host: &Host, saved: &[VcpuState]) -> Result<Vec<CpuId>, VmError> {
        let tsc = saved.first().and_then(VcpuState::tsc);
        let count = u8::try_from(saved.len()).unwrap_or(u8::MAX);
        let offered = cpuid_of(host, 0, count)?;
        let mut cpuids = Vec::new();
        for (id, (vcpu, saved)) in self.vcpus.iter().zip(saved).enumerate() {
            let wrong = |source| VmError::RestoreVcpu { id, source };
            let cpuid = saved.cpuid().map_err(wrong)?;
            if let Some(missing) = cpuid::missing_feature(&cpuid, &offered) {
                return Err(VmError::Incompatible(missing));
            }
            saved.restore(vcpu, tsc).map_err(wrong)?;
            cpuids.push(cpuid);
        }
        Ok(cpuids)
    }

    fn restore_board(&self, board: &BoardState) -> Result<(), VmError> {
        // The clock goes on from where it was: with the real-time part of the saved value it would jump by the time the machine
        // was frozen.
        let clock = kvm_clock_data {
            clock: board.clock.clock,
            ..kvm_clock_data::default()
        };
        self.vm.set_clock(&clock).map_err(|e| VmError::Kvm("set clock", e))?;
        for chip in &board.irqchips {
            let set = self.vm.set_irqchip(chip);
            set.map_err(|e| VmError::Kvm("set interrupt controller", e))?;
        }
        Ok(())
    }

    fn restore_devices(
        &self,
        state: &MachineState,
        disks: Vec<Disk>,
        nets: Vec<Net>,
        events: EventSender,
    ) -> Result<Option<DeviceSet>, VmError> {
        match &state.devices {
            Some(saved) => {
                let map = self.memory.map().clone();
                Ok(Some(DeviceSet::restore(map, saved.clone(), disks, nets, events)?))
            }
            None if disks.is_empty() && nets.is_empty() => Ok(None),
            None => {
                let message = "the saved machine has no devices, but some were given";
                Err(VmError::Config(message.into()))
            }
        }
    }
}
