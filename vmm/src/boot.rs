//! Loads a Linux kernel: ELF image, initramfs, command line and `boot_params`, and the state of the vCPU that enters it in 64-bit mode.

use std::fs::File;

use kvm_bindings::{kvm_fpu, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::acpi::{self, MmioDevice};
use crate::kernel::{self, KernelError};
use crate::layout;
use crate::memory::{GuestMemory, MemoryError, ram_ranges};

/// A kernel cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel image.
    #[error("load kernel")]
    Kernel(#[from] KernelError),
    /// The initramfs.
    #[error("load initramfs")]
    Initramfs(#[source] std::io::Error),
    /// The initramfs cannot be copied into guest memory.
    #[error("copy initramfs")]
    CopyInitramfs(#[source] MemoryError),
    /// Kernel and initramfs need more memory.
    #[error("kernel and initramfs ({needed} bytes) do not fit in guest memory ({available} bytes)")]
    TooSmall {
        /// What they need.
        needed: u64,
        /// What there is below 3 GiB.
        available: u64,
    },
    /// The command line.
    #[error("command line is longer than {} bytes or has a zero byte", layout::COMMAND_LINE_MAX - 1)]
    CommandLine,
    /// Writing to guest memory.
    #[error("write boot data to guest memory")]
    Memory(#[from] GuestMemoryError),
    /// Setting registers.
    #[error("set boot registers")]
    Registers(#[source] kvm_ioctls::Error),
}

/// What to boot.
#[derive(Debug)]
pub struct Guest<'a> {
    /// ELF image.
    pub kernel: &'a File,
    /// Uncompressed archive.
    pub initramfs: Option<&'a File>,
    /// Command line.
    pub command_line: &'a str,
    /// vCPUs.
    pub vcpus: u8,
    /// Devices for the ACPI tables.
    pub devices: &'a [MmioDevice],
}

/// Puts everything into guest memory; returns the entry point.
///
/// # Errors
/// When something does not fit or cannot be read.
pub fn load(memory: &GuestMemory, guest: Guest<'_>) -> Result<u64, BootError> {
    let map = memory.map();
    let kernel = kernel::load(memory, guest.kernel)?;
    let low_end = memory.bytes().min(layout::HOLE_START);
    let initramfs = match guest.initramfs {
        Some(file) => load_initramfs(memory, file, kernel.end, low_end)?,
        None => (0, 0),
    };
    if guest.command_line.len() >= layout::COMMAND_LINE_MAX || guest.command_line.contains('\0') {
        return Err(BootError::CommandLine);
    }
    map.write_slice(guest.command_line.as_bytes(), GuestAddress(layout::COMMAND_LINE))?;
    map.write_slice(
        &acpi::tables(guest.vcpus, guest.devices),
        GuestAddress(layout::ACPI_TABLES),
    )?;
    map.write_obj(
        zero_page(memory.bytes(), initramfs, guest.command_line.len()),
        GuestAddress(layout::ZERO_PAGE),
    )?;
    write_page_tables(map)?;
    Ok(kernel.entry)
}

/// Puts the initramfs at the end of low memory; returns its address and size.
fn load_initramfs(memory: &GuestMemory, file: &File, kernel_end: u64, low_end: u64) -> Result<(u32, u32), BootError> {
    let size = file.metadata().map_err(BootError::Initramfs)?.len();
    let too_small = || BootError::TooSmall {
        needed: kernel_end.saturating_add(size),
        available: low_end,
    };
    let start = low_end.checked_sub(size).ok_or_else(too_small)? & !0xfff;
    if start < kernel_end {
        return Err(too_small());
    }
    memory
        .load_file(start, file, 0, size)
        .map_err(BootError::CopyInitramfs)?;
    let small = |value: u64| u32::try_from(value).map_err(|_| too_small());
    Ok((small(start)?, small(size)?))
}

fn zero_page(memory_bytes: u64, initramfs: (u32, u32), command_line_length: usize) -> boot_params {
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    let mut params = boot_params::default();
    params.hdr.type_of_loader = 0xff;
    params.hdr.boot_flag = 0xaa55;
    params.hdr.header = u32::from_le_bytes(*b"HdrS");
    params.hdr.kernel_alignment = 0x100_0000;
    params.hdr.cmd_line_ptr = u32::try_from(layout::COMMAND_LINE).unwrap_or_default();
    params.hdr.cmdline_size = u32::try_from(command_line_length + 1).unwrap_or_default();
    (params.hdr.ramdisk_image, params.hdr.ramdisk_size) = initramfs;
    params.acpi_rsdp_addr = layout::ACPI_TABLES;
    let mut entries = vec![
        (0..layout::LOW_RAM_END, RAM),
        (layout::LOW_RAM_END..layout::HIGH_RAM_START, RESERVED),
    ];
    for range in ram_ranges(memory_bytes) {
        entries.push((range.start.max(layout::HIGH_RAM_START)..range.end, RAM));
    }
    for (place, (range, kind)) in params.e820_table.iter_mut().zip(&entries) {
        *place = boot_e820_entry {
            addr: range.start,
            size: range.end - range.start,
            r#type: *kind,
        };
    }
    params.e820_entries = u8::try_from(entries.len()).unwrap_or_default();
    params
}

/// Identity-maps the first 4 GiB with 2 MiB pages.
fn write_page_tables(map: &GuestMemoryMmap<()>) -> Result<(), GuestMemoryError> {
    let (level4, level3, level2) = (
        layout::PAGE_TABLES,
        layout::PAGE_TABLES + 0x1000,
        layout::PAGE_TABLES + 0x2000,
    );
    map.write_obj(level3 | 3, GuestAddress(level4))?;
    for table in 0..4_u64 {
        map.write_obj((level2 + table * 0x1000) | 3, GuestAddress(level3 + table * 8))?;
    }
    for entry in 0..4 * 512_u64 {
        map.write_obj((entry << 21) | 0x83, GuestAddress(level2 + entry * 8))?;
    }
    let gdt = [(0, 0), CODE, DATA, TASK].map(|(access, limit)| descriptor(access, limit));
    for (number, entry) in (0_u64..).zip(gdt) {
        map.write_obj(entry, GuestAddress(layout::GDT + number * 8))?;
    }
    map.write_obj(0_u64, GuestAddress(layout::IDT))
}

type SegmentBits = (u16, u32);
const CODE: SegmentBits = (0xa09b, 0xf_ffff);
const DATA: SegmentBits = (0xc093, 0xf_ffff);
const TASK: SegmentBits = (0x808b, 0xf_ffff);

/// A descriptor with base 0.
fn descriptor(access: u16, limit: u32) -> u64 {
    let (access, limit) = (u64::from(access), u64::from(limit));
    (limit & 0xffff) | (access & 0xff) << 40 | (limit >> 16 & 0xf) << 48 | (access >> 12 & 0xf) << 52
}

fn segment((access, limit): SegmentBits, index: u16) -> kvm_segment {
    let bit = |number: u16| u8::from(access >> number & 1 == 1);
    let granular = bit(15);
    kvm_segment {
        base: 0,
        limit: if granular == 1 { limit << 12 | 0xfff } else { limit },
        selector: index * 8,
        type_: u8::try_from(access & 0xf).unwrap_or_default(),
        s: bit(4),
        dpl: 0,
        present: bit(7),
        avl: 0,
        l: bit(13),
        db: bit(14),
        g: granular,
        unusable: 0,
        padding: 0,
    }
}

/// Puts the boot vCPU at the entry point in 64-bit mode, with `rsi` at the zero page.
///
/// # Errors
/// When KVM refuses.
pub fn set_entry_state(vcpu: &VcpuFd, entry: u64) -> Result<(), BootError> {
    const CR0: u64 = 1 | 1 << 4 | 1 << 31; // PE, ET, PG
    const CR4_PAE: u64 = 1 << 5;
    const EFER: u64 = 1 << 8 | 1 << 10; // LME, LMA
    let regs = kvm_regs {
        rip: entry,
        rsi: layout::ZERO_PAGE,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rflags: 2,
        ..kvm_regs::default()
    };
    let mut sregs = vcpu.get_sregs().map_err(BootError::Registers)?;
    sregs.cs = segment(CODE, 1);
    let data = segment(DATA, 2);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(TASK, 3);
    (sregs.gdt.base, sregs.gdt.limit) = (layout::GDT, 31);
    (sregs.idt.base, sregs.idt.limit) = (layout::IDT, 7);
    sregs.cr0 = CR0;
    sregs.cr3 = layout::PAGE_TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER;
    let fpu = kvm_fpu {
        fcw: 0x37f,
        mxcsr: 0x1f80,
        ..kvm_fpu::default()
    };
    vcpu.set_sregs(&sregs).map_err(BootError::Registers)?;
    vcpu.set_regs(&regs).map_err(BootError::Registers)?;
    vcpu.set_fpu(&fpu).map_err(BootError::Registers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_map_leaves_out_bios_area_and_hole() {
        let params = zero_page(4 << 30, (0, 0), 10);
        let entries: Vec<_> = params
            .e820_table
            .iter()
            .take(usize::from(params.e820_entries))
            .copied()
            .collect();
        let described: Vec<_> = entries
            .iter()
            .map(|entry| (entry.addr, entry.addr + entry.size, entry.r#type))
            .collect();
        assert_eq!(
            described,
            vec![
                (0, 0xa_0000, 1),
                (0xa_0000, 0x10_0000, 2),
                (0x10_0000, layout::HOLE_START, 1),
                (layout::HOLE_END, layout::HOLE_END + (1 << 30), 1),
            ]
        );
    }

    #[test]
    fn descriptors_match_segments() {
        assert_eq!(descriptor(CODE.0, CODE.1), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(DATA.0, DATA.1), 0x00cf_9300_0000_ffff);
        let code = segment(CODE, 1);
        assert_eq!(
            (code.l, code.db, code.s, code.present, code.type_, code.limit),
            (1, 0, 1, 1, 0xb, 0xffff_ffff)
        );
    }
}
