//! One machine: made new or from a checkpoint, run, paused, saved.

use std::fs::File;
use std::io;
use std::sync::Arc;

use checkpoint::manifest::CheckpointId;
use checkpoint::memory::MemoryIndex;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_clock_data, kvm_irqchip};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::acpi::MmioDevice;
use crate::boot;
use crate::control::{VmStats, limits};
use crate::devices::virtio::{DeviceError, DeviceSet, Disk, EventSender, Net, QUEUE_NOTIFY};
use crate::layout;
use crate::memory::{GuestMemory, MemoryError};
use crate::platform::{Line, Platform, SerialState};
use crate::state::{BoardState, MachineState, StateError};
use crate::sys::kvm::{random, set_memory_region};
use crate::vcpu::state::VcpuStateError;
use crate::vcpu::{ExitCounts, Vcpu, VcpuError, cpuid};

/// A machine cannot be made, run or saved.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A KVM call.
    #[error("{0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// An operating system resource.
    #[error("{0}")]
    Io(&'static str, #[source] io::Error),
    /// Guest memory.
    #[error("guest memory")]
    Memory(#[from] MemoryError),
    /// The kernel to boot.
    #[error("boot")]
    Boot(#[from] boot::BootError),
    /// virtio devices.
    #[error("devices")]
    Devices(#[from] DeviceError),
    /// The saved state.
    #[error("saved state")]
    State(#[from] StateError),
    /// A vCPU's saved state.
    #[error("restore vCPU {id}")]
    RestoreVcpu {
        /// Which one.
        id: usize,
        /// Why not.
        #[source]
        source: VcpuStateError,
    },
    /// A vCPU thread.
    #[error("vCPU")]
    Vcpu(#[from] VcpuError),
    /// The saved machine uses something this host does not have.
    #[error("this host lacks {0}, which the saved machine uses; restore it on a host with the same CPU model")]
    Incompatible(String),
    /// The configuration is out of bounds.
    #[error("{0}")]
    Config(String),
}

/// What this host offers; opened once, before the process is jailed.
#[derive(Debug)]
pub struct Host {
    pub(crate) kvm: Kvm,
    pub(crate) pagemap: File,
}

impl Host {
    /// Opens KVM and this process's pagemap.
    ///
    /// # Errors
    /// When `/dev/kvm` is missing or not for us.
    pub fn open() -> Result<Self, VmError> {
        let kvm = Kvm::new().map_err(|e| VmError::Kvm("open /dev/kvm", e))?;
        let pagemap = File::open("/proc/self/pagemap").map_err(|e| VmError::Io("open /proc/self/pagemap", e))?;
        Ok(Self { kvm, pagemap })
    }

    fn supported_cpuid(&self) -> Result<CpuId, VmError> {
        self.kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| VmError::Kvm("get supported CPUID", e))
    }
}

/// A new machine.
#[derive(Debug)]
pub struct BootConfig {
    /// vCPUs.
    pub vcpus: u8,
    /// Guest memory.
    pub memory_bytes: u64,
    /// ELF image.
    pub kernel: File,
    /// Uncompressed archive.
    pub initramfs: Option<File>,
    /// Kernel command line.
    pub command_line: String,
    /// Block devices.
    pub disks: Vec<Disk>,
    /// Network interfaces.
    pub nets: Vec<Net>,
    /// Entropy and vsock.
    pub linux_devices: bool,
}

/// A machine from a checkpoint.
#[derive(Debug)]
pub struct RestoreConfig {
    /// Its name, for later saves.
    pub checkpoint: CheckpointId,
    /// Saved state.
    pub state: MachineState,
    /// Where memory comes from.
    pub index: MemoryIndex,
    /// The files of the index.
    pub memory_files: Vec<File>,
    /// Backing of the block devices.
    pub disks: Vec<Disk>,
    /// Network interfaces.
    pub nets: Vec<Net>,
}

/// What connects a machine to the process around it.
#[derive(Debug)]
pub struct Wiring {
    /// Serial output.
    pub console: File,
    /// Device events.
    pub events: EventSender,
    /// Written when the machine ends; then [`Machine::platform`] says why.
    pub ended: Arc<EventFd>,
}

/// The checkpoint that a machine was restored from.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) checkpoint: CheckpointId,
    pub(crate) index: MemoryIndex,
}

/// One machine.
#[derive(Debug)]
pub struct Machine {
    // Order matters: vCPU threads end first, the mapping of guest memory goes last.
    vcpus: Vec<Vcpu>,
    vm: VmFd,
    platform: Arc<Platform>,
    counts: Arc<ExitCounts>,
    running: bool,
    started: bool,
    pub(crate) base: Option<Base>,
    /// Pages mapped from the guest image.
    pub(crate) image_pages: Vec<std::ops::Range<u64>>,
    pub(crate) memory: GuestMemory,
}

/// The pieces of a machine before its vCPUs have threads.
struct Bare {
    vm: VmFd,
    vcpus: Vec<VcpuFd>,
    memory: GuestMemory,
}

impl Machine {
    /// Makes a new machine; [`Self::resume`] starts it.
    ///
    /// # Errors
    /// When the configuration is out of bounds, or KVM or a file does not do its part.
    pub fn boot(host: &Host, config: BootConfig, wiring: Wiring) -> Result<Self, VmError> {
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
        let bare = Bare::new(host, config.vcpus, GuestMemory::new(config.memory_bytes)?)?;
        let supported = host.supported_cpuid()?;
        let mut cpuids = Vec::new();
        for (id, vcpu) in (0_u8..).zip(&bare.vcpus) {
            let cpuid =
                cpuid::for_vcpu(&supported, id, config.vcpus).map_err(|e| VmError::Config(format!("CPUID: {e:?}")))?;
            vcpu.set_cpuid2(&cpuid).map_err(|e| VmError::Kvm("set CPUID", e))?;
            cpuids.push(cpuid);
            set_local_interrupts(vcpu)?;
        }
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
        let mut acpi_devices = Vec::new();
        for slot in devices.iter().flat_map(DeviceSet::slots) {
            let small =
                |value: u64| u32::try_from(value).map_err(|_| VmError::Config("device registers above 4 GiB".into()));
            acpi_devices.push(MmioDevice {
                base: small(slot.base)?,
                size: small(slot.size)?,
                irq: slot.irq,
            });
        }
        let guest = boot::Guest {
            kernel: &config.kernel,
            initramfs: config.initramfs.as_ref(),
            command_line: &config.command_line,
            vcpus: config.vcpus,
            devices: &acpi_devices,
        };
        let loaded = boot::load(&bare.memory, guest)?;
        if let Some(first) = bare.vcpus.first() {
            boot::set_entry_state(first, loaded.entry)?;
        }
        renew_generation(&bare.memory)?;
        let mut machine = bare.finish(host, cpuids, devices, wiring, None)?;
        machine.image_pages = loaded.mapped;
        Ok(machine)
    }

    /// Brings a machine back; [`Self::resume`] lets it go on. Costs nothing per page of memory.
    ///
    /// # Errors
    /// When the checkpoint is damaged, does not fit this host or the files given, or KVM does not do its part.
    pub fn restore(host: &Host, config: RestoreConfig, wiring: Wiring) -> Result<Self, VmError> {
        let state = config.state;
        if config.index.pages.checked_mul(checkpoint::memory::PAGE_SIZE) != Some(state.memory_bytes) {
            return Err(VmError::Config(
                "state and memory index disagree about the size of guest memory".into(),
            ));
        }
        let vcpus = u8::try_from(state.vcpus.len()).map_err(|_| VmError::Config("too many vCPUs".into()))?;
        let memory = GuestMemory::restore(&config.index, &config.memory_files)?;
        let bare = Bare::new(host, vcpus, memory)?;
        let supported = host.supported_cpuid()?;
        let mut cpuids = Vec::new();
        let tsc = state.vcpus.first().and_then(crate::vcpu::state::VcpuState::tsc);
        for (id, (vcpu, saved)) in bare.vcpus.iter().zip(&state.vcpus).enumerate() {
            let wrong = |source| VmError::RestoreVcpu { id, source };
            let cpuid = saved.cpuid().map_err(wrong)?;
            if let Some(missing) = cpuid::missing_feature(&cpuid, &supported) {
                return Err(VmError::Incompatible(missing));
            }
            cpuids.push(cpuid);
            saved.restore(vcpu, tsc).map_err(wrong)?;
        }
        // The clock goes on from where it was: the real-time part of the saved value would make it jump by the time the machine was frozen.
        let clock = kvm_clock_data {
            clock: state.board.clock.clock,
            ..kvm_clock_data::default()
        };
        bare.vm.set_clock(&clock).map_err(|e| VmError::Kvm("set clock", e))?;
        for chip in &state.board.irqchips {
            bare.vm
                .set_irqchip(chip)
                .map_err(|e| VmError::Kvm("set interrupt controller", e))?;
        }
        let devices = match state.devices {
            Some(saved) => {
                let map = bare.memory.map().clone();
                Some(DeviceSet::restore(
                    map,
                    saved,
                    config.disks,
                    config.nets,
                    wiring.events.clone(),
                )?)
            }
            None if config.disks.is_empty() && config.nets.is_empty() => None,
            None => {
                return Err(VmError::Config(
                    "the saved machine has no devices, but some were given".into(),
                ));
            }
        };
        renew_generation(&bare.memory)?;
        let base = Base {
            checkpoint: config.checkpoint,
            index: config.index,
        };
        bare.finish(host, cpuids, devices, wiring, Some((base, &state.serial)))
    }

    /// Lets the vCPUs run (again).
    ///
    /// # Errors
    /// When a vCPU thread is gone.
    pub fn resume(&mut self) -> Result<(), VmError> {
        if self.running {
            return Ok(());
        }
        if let Some(devices) = self.platform.devices() {
            if self.started {
                devices.resume()
            } else {
                devices.start()
            }
        }
        self.started = true;
        for vcpu in &self.vcpus {
            vcpu.run()?;
        }
        self.running = true;
        Ok(())
    }

    /// Stops the vCPUs, then the devices; nothing is in flight afterwards.
    ///
    /// # Errors
    /// When a vCPU thread is gone.
    pub fn pause(&mut self) -> Result<(), VmError> {
        if !self.running {
            return Ok(());
        }
        self.stop_vcpus()?;
        if let Some(devices) = self.platform.devices() {
            devices.pause();
        }
        Ok(())
    }

    fn stop_vcpus(&mut self) -> Result<(), VmError> {
        for vcpu in &self.vcpus {
            vcpu.kick();
        }
        for vcpu in &self.vcpus {
            vcpu.wait_stopped()?;
        }
        self.running = false;
        Ok(())
    }

    /// Everything but memory and disks, while paused.
    ///
    /// # Errors
    /// When KVM does not give it.
    pub fn save_state(&self) -> Result<MachineState, VmError> {
        // The devices first: draining them may have raised interrupts, which are part of the interrupt controllers.
        let devices = self.platform.devices().map(DeviceSet::save);
        let vcpus = self.vcpus.iter().map(Vcpu::save).collect::<Result<_, _>>()?;
        let clock = self.vm.get_clock().map_err(|e| VmError::Kvm("get clock", e))?;
        let mut irqchips = Vec::new();
        for chip_id in 0..3 {
            let mut chip = kvm_irqchip {
                chip_id,
                ..kvm_irqchip::default()
            };
            self.vm
                .get_irqchip(&mut chip)
                .map_err(|e| VmError::Kvm("get interrupt controller", e))?;
            irqchips.push(chip);
        }
        Ok(MachineState {
            memory_bytes: self.memory.bytes(),
            vcpus,
            board: BoardState { irqchips, clock },
            serial: self.platform.save_serial(),
            devices,
        })
    }

    /// Whether the vCPUs run.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// Ports, devices, and why the machine ended.
    #[must_use]
    pub fn platform(&self) -> &Platform {
        &self.platform
    }

    /// Counters.
    ///
    /// # Errors
    /// When the pagemap cannot be read.
    pub fn stats(&self, host: &Host) -> Result<VmStats, VmError> {
        let pages: u64 = self
            .memory
            .private_pages(&host.pagemap)?
            .iter()
            .map(|range| range.end - range.start)
            .sum();
        Ok(VmStats {
            exits: self.counts.by_kind(),
            private_memory_bytes: pages * checkpoint::memory::PAGE_SIZE,
        })
    }
}

impl Bare {
    fn new(host: &Host, vcpus: u8, memory: GuestMemory) -> Result<Self, VmError> {
        use VmError::Kvm;
        let vm = host.kvm.create_vm().map_err(|e| Kvm("create VM", e))?;
        // 0 before Linux 5.17; with AMX hidden, nothing needs more than the fixed size.
        let xsave_bytes = vm.check_extension_int(Cap::Xsave2);
        if xsave_bytes > 4096 {
            return Err(VmError::Config(format!(
                "extended vCPU state of {xsave_bytes} bytes, this VMM saves 4096"
            )));
        }
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(|e| Kvm("set identity map address", e))?;
        vm.set_tss_address(layout::KVM_TSS)
            .map_err(|e| Kvm("set TSS address", e))?;
        vm.create_irq_chip()
            .map_err(|e| Kvm("create interrupt controllers", e))?;
        let vcpus = (0..u64::from(vcpus))
            .map(|id| vm.create_vcpu(id).map_err(|e| Kvm("create vCPU", e)))
            .collect::<Result<_, _>>()?;
        for (slot, region) in (0_u32..).zip(memory.map().iter()) {
            let host_address = region.get_mmap().as_ptr().expose_provenance() as u64;
            set_memory_region(&vm, slot, region.start_addr().0, region.len(), host_address)
                .map_err(|e| Kvm("register guest memory", e))?;
        }
        Ok(Self { vm, vcpus, memory })
    }

    /// Connects interrupts and notifications and starts the vCPU threads.
    fn finish(
        self,
        host: &Host,
        cpuids: Vec<CpuId>,
        devices: Option<DeviceSet>,
        wiring: Wiring,
        restored: Option<(Base, &SerialState)>,
    ) -> Result<Machine, VmError> {
        let serial_event = self.line(layout::SERIAL_IRQ)?;
        let (base, serial) = restored.unzip();
        if base.is_some() {
            // The generation id is new: tell the guest. After the interrupt controllers are set, or it would be lost.
            self.line(layout::EVENT_IRQ)?
                .write(1)
                .map_err(|e| VmError::Io("raise generation event", e))?;
        }
        for slot in devices.iter().flat_map(DeviceSet::slots) {
            self.vm
                .register_irqfd(&slot.interrupt, slot.irq)
                .map_err(|e| VmError::Kvm("register interrupt", e))?;
            for (queue, event) in &slot.notify {
                let address = IoEventAddress::Mmio(slot.base + QUEUE_NOTIFY);
                self.vm
                    .register_ioevent(event, &address, *queue)
                    .map_err(|e| VmError::Kvm("register queue notification", e))?;
            }
        }
        let platform = Platform::new(wiring.console, serial, Line::new(serial_event), devices, wiring.ended)
            .map_err(|e| VmError::Io("restore serial port", e))?;
        let platform = Arc::new(platform);
        let counts = Arc::new(ExitCounts::default());
        let registers = host
            .kvm
            .get_msr_index_list()
            .map_err(|e| VmError::Kvm("list model-specific registers", e))?;
        let registers = Arc::new(registers.as_slice().to_vec());
        let mut vcpus = Vec::new();
        for (id, vcpu) in (0_u8..).zip(self.vcpus.into_iter().zip(cpuids)) {
            vcpus.push(Vcpu::start(
                id,
                vcpu,
                Arc::clone(&platform),
                Arc::clone(&counts),
                Arc::clone(&registers),
            )?);
        }
        Ok(Machine {
            vcpus,
            vm: self.vm,
            platform,
            counts,
            running: false,
            image_pages: Vec::new(),
            started: false,
            base,
            memory: self.memory,
        })
    }

    /// An event that raises an interrupt line.
    fn line(&self, irq: u32) -> Result<Arc<EventFd>, VmError> {
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(|e| VmError::Io("make event", e))?;
        self.vm
            .register_irqfd(&event, irq)
            .map_err(|e| VmError::Kvm("register interrupt", e))?;
        Ok(Arc::new(event))
    }
}

/// Local interrupt pins as PC firmware leaves them: 0 takes the PIC's interrupt, 1 is NMI.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), VmError> {
    const PIN_0: usize = 0x350;
    const PIN_1: usize = 0x360;
    const EXTERNAL: u32 = 7 << 8;
    const NMI: u32 = 4 << 8;
    let mut lapic = vcpu.get_lapic().map_err(|e| VmError::Kvm("get local APIC", e))?;
    for (offset, mode) in [(PIN_0, EXTERNAL), (PIN_1, NMI)] {
        if let Some(register) = lapic.regs.get_mut(offset..offset + 4) {
            for (place, byte) in register.iter_mut().zip(mode.to_le_bytes()) {
                *place = byte.cast_signed();
            }
        }
    }
    vcpu.set_lapic(&lapic).map_err(|e| VmError::Kvm("set local APIC", e))
}

/// Writes a new VM generation id: a guest that sees another one than before knows that it is a copy.
fn renew_generation(memory: &GuestMemory) -> Result<(), VmError> {
    let id = random::<16>().map_err(|e| VmError::Io("get random bytes", e))?;
    memory
        .map()
        .write_slice(&id, GuestAddress(layout::VMGENID))
        .map_err(|e| VmError::Boot(e.into()))
}
