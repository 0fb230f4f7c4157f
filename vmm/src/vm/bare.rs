//! The KVM side of a machine before its vCPUs have threads.

use std::sync::Arc;

use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, IoEventAddress, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Base, Host, Machine, VmError, Wiring};
use crate::devices::virtio::{DeviceSet, Lines, MMIO_BASE, QUEUE_NOTIFY};
use crate::layout;
use crate::memory::GuestMemory;
use crate::platform::{Line, Platform, SerialState};
use crate::sys::kvm::{Access, random, set_memory_region};
use crate::vcpu::{ExitCounts, Shared, Vcpu};

/// The pieces of a machine before its vCPUs have threads.
pub(super) struct Bare {
    pub(super) vm: VmFd,
    pub(super) vcpus: Vec<VcpuFd>,
    pub(super) memory: GuestMemory,
}

/// A VM with interrupt controllers, without memory and vCPUs.
pub(super) fn new_vm(kvm: &kvm_ioctls::Kvm) -> Result<VmFd, VmError> {
    use VmError::Kvm;
    let vm = kvm.create_vm().map_err(|e| Kvm("create VM", e))?;
    // 0 before Linux 5.17; with AMX hidden, nothing needs more than the fixed size.
    let xsave_bytes = vm.check_extension_int(Cap::Xsave2);
    if xsave_bytes > 4096 {
        let message = format!("extended vCPU state of {xsave_bytes} bytes, this VMM saves 4096");
        return Err(VmError::Config(message));
    }
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(|e| Kvm("set identity map address", e))?;
    vm.set_tss_address(layout::KVM_TSS)
        .map_err(|e| Kvm("set TSS address", e))?;
    vm.create_irq_chip()
        .map_err(|e| Kvm("create interrupt controllers", e))?;
    Ok(vm)
}

impl Bare {
    pub(super) fn new(host: &Host, vcpus: u8, memory: GuestMemory) -> Result<Self, VmError> {
        use VmError::Kvm;
        let vm = host.take_vm()?;
        let vcpus = (0..u64::from(vcpus))
            .map(|id| vm.create_vcpu(id).map_err(|e| Kvm("create vCPU", e)))
            .collect::<Result<_, _>>()?;
        for (slot, region) in (0_u32..).zip(memory.map().iter()) {
            let host_address = region.get_mmap().as_ptr().expose_provenance() as u64;
            set_memory_region(
                &vm,
                slot,
                region.start_addr().0,
                region.len(),
                host_address,
                Access::Write,
            )
            .map_err(|e| Kvm("register guest memory", e))?;
        }
        Ok(Self { vm, vcpus, memory })
    }

    /// Connects interrupts and notifications and starts the vCPU threads.
    pub(super) fn finish(
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
        let vm = Arc::new(self.vm);
        if let Some(devices) = &devices {
            connect_devices(&vm, devices, self.memory.map().num_regions())?;
        }
        let platform = Platform::new(wiring.console, serial, Line::new(serial_event), devices, wiring.ended)
            .map_err(|e| VmError::Io("restore serial port", e))?;
        let platform = Arc::new(platform);
        let counts = Arc::new(ExitCounts::default());
        let shared = Shared {
            platform: Arc::clone(&platform),
            counts: Arc::clone(&counts),
            registers: Arc::clone(&host.registers),
            filter: host.vcpu_filter.clone(),
        };
        let mut vcpus = Vec::new();
        for (id, vcpu) in (0_u8..).zip(self.vcpus.into_iter().zip(cpuids)) {
            vcpus.push(Vcpu::start(id, vcpu, shared.clone())?);
        }
        Ok(Machine {
            vcpus,
            vm,
            platform,
            counts,
            running: false,
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

/// The interrupt lines of a VM. Not irqfds: those of an interrupt controller's pins go through a work queue of the kernel.
#[derive(Debug)]
struct KvmLines(Arc<VmFd>);

impl Lines for KvmLines {
    fn pulse(&self, irq: u32) {
        for level in [true, false] {
            if let Err(error) = self.0.set_irq_line(irq, level) {
                tracing::error!(irq, %error, "raise interrupt");
            }
        }
    }
}

/// Connects interrupts, registers and notifications of the devices. `slot` is the first free one for memory.
fn connect_devices(vm: &Arc<VmFd>, devices: &DeviceSet, slot: usize) -> Result<(), VmError> {
    let lines: Arc<dyn Lines> = Arc::new(KvmLines(Arc::clone(vm)));
    devices.connect(&lines);
    let registers = devices.registers();
    let slot = u32::try_from(slot).map_err(|_| VmError::Config("too many regions of memory".into()))?;
    let host_address = registers.as_ptr().expose_provenance() as u64;
    set_memory_region(vm, slot, MMIO_BASE, registers.size() as u64, host_address, Access::Read)
        .map_err(|e| VmError::Kvm("register device registers", e))?;
    for slot in devices.slots() {
        let notifications = slot.notify.iter().map(|(queue, event)| (QUEUE_NOTIFY, *queue, event));
        let ignored = slot
            .ignored
            .iter()
            .map(|(offset, value, event)| (*offset, *value, event));
        for (offset, value, event) in notifications.chain(ignored) {
            let address = IoEventAddress::Mmio(slot.base + offset);
            vm.register_ioevent(event, &address, value)
                .map_err(|e| VmError::Kvm("register queue notification", e))?;
        }
    }
    Ok(())
}

/// Local interrupt pins as PC firmware leaves them: 0 takes the PIC's interrupt, 1 is NMI.
pub(super) fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), VmError> {
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
pub(super) fn renew_generation(memory: &GuestMemory) -> Result<(), VmError> {
    let id = random::<16>().map_err(|e| VmError::Io("get random bytes", e))?;
    memory
        .map()
        .write_slice(&id, GuestAddress(layout::VMGENID))
        .map_err(|e| VmError::Boot(e.into()))
}
