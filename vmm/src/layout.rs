//! Where things are in the guest-physical address space and among the ports. Part of the saved machine: changing any of it
//! raises [`crate::state::VERSION`].
//!
//! ```text
//! 0x0000_0500  GDT                     0x0000_7000  zero page
//! 0x0000_9000  page tables             0x0002_0000  command line
//! 0x000a_0000  reserved, with VMGENID at 0xdf000 and the ACPI tables from 0xe0000
//! 0x0010_0000  RAM, kernel, … up to 3 GiB
//! 0xc000_0000  hole: virtio-mmio at 0xd000_0000, IOAPIC, local APIC
//! 0x1_0000_0000  the rest of RAM
//! ```

/// Global descriptor table of the boot vCPU.
pub const GDT: u64 = 0x500;
/// Interrupt descriptor table of the boot vCPU (empty).
pub const IDT: u64 = 0x520;
/// Linux `boot_params`.
pub const ZERO_PAGE: u64 = 0x7000;
/// Stack of the boot vCPU.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables: one page of level 4, one of level 3, four of level 2; they map the first 4 GiB to themselves.
pub const PAGE_TABLES: u64 = 0x9000;
/// Kernel command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line with its zero byte.
pub const COMMAND_LINE_MAX: usize = 4096;
/// End of the first range of usable memory.
pub const LOW_RAM_END: u64 = 0xa_0000;
/// The 16 bytes of the VM generation id.
pub const VMGENID: u64 = 0xd_f000;
/// ACPI tables; the RSDP comes first.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Start of the second range of usable memory, and the lowest address a kernel is loaded to.
pub const HIGH_RAM_START: u64 = 0x10_0000;
/// Start of the hole.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// IOAPIC registers (fixed by KVM).
pub const IOAPIC: u32 = 0xfec0_0000;
/// Local APIC registers (fixed by KVM).
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// One page that KVM needs on some Intel processors.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages that KVM needs on some Intel processors.
pub const KVM_TSS: usize = 0xfffb_d000;

/// Interrupt line of the serial port.
pub const SERIAL_IRQ: u32 = 4;
/// Interrupt line of the generic event device (VM generation id).
pub const EVENT_IRQ: u32 = 5;
/// First port of the serial port.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Keyboard controller: writing 0xfe resets the machine.
pub const KEYBOARD_COMMAND_PORT: u16 = 0x64;
/// ACPI sleep control register: sleep type 5 powers off.
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status register.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI reset register: writing 1 resets the machine.
pub const RESET_PORT: u16 = 0x602;
