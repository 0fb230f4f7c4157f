//! One machine: made new or from a checkpoint, run, paused, saved.

mod bare;
mod make;

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use checkpoint::manifest::CheckpointId;
use checkpoint::memory::MemoryIndex;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_irqchip};
use kvm_ioctls::{Kvm, VmFd};
use vmm_sys_util::eventfd::EventFd;

use crate::boot;
use crate::control::VmStats;
use crate::devices::virtio::{DeviceError, DeviceSet, Disk, EventSender, Net};
use crate::memory::{GuestMemory, MemoryError};
use crate::platform::Platform;
use crate::seccomp::Filter;
use crate::state::{BoardState, MachineState, StateError};
use crate::touched::Touched;
use crate::vcpu::state::VcpuStateError;
use crate::vcpu::{ExitCounts, Vcpu, VcpuError};

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
    /// CPUID that KVM supports.
    pub(crate) cpuid: CpuId,
    /// Model-specific registers that KVM saves.
    pub(crate) registers: Arc<Vec<u32>>,
    /// A VM without memory and vCPUs, made before anybody waits for it.
    prepared: Mutex<Option<VmFd>>,
    /// Installed by each vCPU thread, if there is one.
    pub(crate) vcpu_filter: Option<Arc<Filter>>,
}

impl Host {
    /// Opens KVM and this process's pagemap.
    ///
    /// # Errors
    /// When `/dev/kvm` is missing or not for us.
    pub fn open() -> Result<Self, VmError> {
        let kvm = Kvm::new().map_err(|e| VmError::Kvm("open /dev/kvm", e))?;
        let pagemap = File::open("/proc/self/pagemap").map_err(|e| VmError::Io("open /proc/self/pagemap", e))?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| VmError::Kvm("get supported CPUID", e))?;
        let registers = kvm
            .get_msr_index_list()
            .map_err(|e| VmError::Kvm("list model-specific registers", e))?;
        Ok(Self {
            kvm,
            pagemap,
            cpuid,
            registers: Arc::new(registers.as_slice().to_vec()),
            prepared: Mutex::new(None),
            vcpu_filter: None,
        })
    }

    /// Makes a VM ahead of time: it costs a fraction of a millisecond, sometimes many, and the first request need not wait for it.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn prepare(&self) -> Result<(), VmError> {
        let vm = bare::new_vm(&self.kvm)?;
        *self.prepared.lock().unwrap_or_else(PoisonError::into_inner) = Some(vm);
        Ok(())
    }

    /// The VM made ahead of time, or a new one.
    fn take_vm(&self) -> Result<VmFd, VmError> {
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner).take();
        prepared.map_or_else(|| bare::new_vm(&self.kvm), Ok)
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
    /// Pages that are written soon; a hint.
    pub(crate) touched: Touched,
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
    vm: Arc<VmFd>,
    platform: Arc<Platform>,
    counts: Arc<ExitCounts>,
    running: bool,
    started: bool,
    pub(crate) base: Option<Base>,
    pub(crate) memory: GuestMemory,
}

impl Machine {
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

    /// The pages that it does not share with its checkpoint, as a hint for other forks.
    ///
    /// # Errors
    /// When the pagemap cannot be read.
    pub(crate) fn touched(&self, host: &Host) -> Result<Touched, VmError> {
        Ok(Touched::of(self.memory.private_pages(&host.pagemap)?))
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
