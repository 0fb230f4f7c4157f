//! The ACPI tables of a machine: hardware-reduced, with its vCPUs, virtio-mmio devices, serial port and VM generation id.

use acpi_tables::aml::{
    Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify, ONE, Package, Path,
    ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};

use crate::layout;

const OEM_ID: [u8; 6] = *b"RAMET ";
const OEM_TABLE_ID: [u8; 8] = *b"RAMETVM ";
const OEM_REVISION: u32 = 1;

/// No VGA, no CMOS clock (the guest reads its clock from KVM); keyboard controller and other PC devices are absent, too.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 5;

/// A virtio-mmio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioDevice {
    /// Guest-physical address of its registers.
    pub base: u32,
    /// Bytes of registers.
    pub size: u32,
    /// Interrupt line.
    pub irq: u32,
}

/// All tables as one block for [`layout::ACPI_TABLES`]; the RSDP is at its start.
#[must_use]
pub fn tables(vcpus: u8, devices: &[MmioDevice]) -> Vec<u8> {
    // RSDP (36 bytes) first, then each table at a multiple of 16.
    let mut block = vec![0; 48];
    let dsdt = append(&mut block, dsdt(devices).as_slice());
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.sleep_control_reg = port(layout::SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(layout::SLEEP_STATUS_PORT);
    fadt.reset_reg = port(layout::RESET_PORT);
    fadt.reset_value = 1;
    let fadt = append(&mut block, &bytes(&fadt.finalize()));
    let madt = append(&mut block, &bytes(&madt(vcpus)));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = append(&mut block, &bytes(&xsdt));
    for (place, byte) in block.iter_mut().zip(bytes(&Rsdp::new(OEM_ID, xsdt))) {
        *place = byte;
    }
    block
}

fn port(port: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port))
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut sink = Vec::new();
    table.to_aml_bytes(&mut sink);
    sink
}

/// Appends a table and returns its guest-physical address.
fn append(block: &mut Vec<u8>, table: &[u8]) -> u64 {
    block.resize(block.len().next_multiple_of(16), 0);
    let address = layout::ACPI_TABLES + block.len() as u64;
    block.extend_from_slice(table);
    address
}

fn madt(vcpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
        LocalInterruptController::Address(layout::LOCAL_APIC),
    );
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC, 0));
    madt
}

fn dsdt(devices: &[MmioDevice]) -> Sdt {
    let mut body = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        virtio(number, *device, &mut body);
    }
    serial(&mut body);
    generation_id(&mut body);
    Name::new(Path::new("\\_S5_"), &Package::new(vec![&5_u8, &0_u8, &0_u8, &0_u8])).to_aml_bytes(&mut body);
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    dsdt.append_slice(&body);
    dsdt
}

fn in_system_bus(device: &Device<'_>, sink: &mut dyn AmlSink) {
    Scope::new("\\_SB_".into(), vec![device]).to_aml_bytes(sink);
}

/// Devices bind in the order of the table, so the first disk is `vda`.
fn virtio(number: usize, device: MmioDevice, sink: &mut dyn AmlSink) {
    let registers = Memory32Fixed::new(true, device.base, device.size);
    let interrupt = Interrupt::new(true, true, false, false, device.irq);
    in_system_bus(
        &Device::new(
            Path::new(&format!("V{number:03}")),
            vec![
                &Name::new("_HID".into(), &"LNRO0005"),
                &Name::new("_UID".into(), &number),
                &Name::new("_CCA".into(), &ONE),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&registers, &interrupt])),
            ],
        ),
        sink,
    );
}

fn serial(sink: &mut dyn AmlSink) {
    let interrupt = Interrupt::new(true, true, false, false, layout::SERIAL_IRQ);
    let ports = IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 0, 8);
    in_system_bus(
        &Device::new(
            "COM1".into(),
            vec![
                &Name::new("_HID".into(), &EISAName::new("PNP0501")),
                &Name::new("_UID".into(), &0_u8),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt, &ports])),
            ],
        ),
        sink,
    );
}

/// The generation id in memory, and the event device that tells the guest about a new one.
fn generation_id(sink: &mut dyn AmlSink) {
    let low = u32::try_from(layout::VMGENID).unwrap_or_default();
    in_system_bus(
        &Device::new(
            "VGEN".into(),
            vec![
                &Name::new("_HID".into(), &"VMGENCTR"),
                &Name::new("_CID".into(), &"VM_Gen_Counter"),
                &Name::new("_DDN".into(), &"VM_Gen_Counter"),
                &Name::new("ADDR".into(), &Package::new(vec![&low, &0_u8])),
            ],
        ),
        sink,
    );
    let line = layout::EVENT_IRQ;
    let interrupt = Interrupt::new(true, true, false, false, line);
    let changed = Path::new("\\_SB_.VGEN");
    in_system_bus(
        &Device::new(
            "GED_".into(),
            vec![
                &Name::new("_HID".into(), &"ACPI0013"),
                &Name::new("_UID".into(), &0_u8),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt])),
                &Method::new(
                    "_EVT".into(),
                    1,
                    true,
                    vec![&If::new(
                        &Equal::new(&Arg(0), &line),
                        vec![&Notify::new(&changed, &0x80_u8)],
                    )],
                ),
            ],
        ),
        sink,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table_at(block: &[u8], address: u64) -> &[u8] {
        let start = usize::try_from(address - layout::ACPI_TABLES).unwrap();
        let length = u32::from_le_bytes(block[start + 4..start + 8].try_into().unwrap()) as usize;
        &block[start..start + length]
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn every_table_is_reachable_and_sums_to_zero() {
        let devices = [MmioDevice {
            base: 0xd000_0000,
            size: 0x1000,
            irq: 6,
        }];
        let block = tables(2, &devices);
        assert_eq!(&block[..8], b"RSD PTR ");
        assert_eq!((sum(&block[..20]), sum(&block[..36])), (0, 0));
        let xsdt = table_at(&block, u64::from_le_bytes(block[24..32].try_into().unwrap()));
        assert_eq!((&xsdt[..4], sum(xsdt)), (&b"XSDT"[..], 0));
        let entries: Vec<_> = xsdt[36..]
            .chunks(8)
            .map(|entry| table_at(&block, u64::from_le_bytes(entry.try_into().unwrap())))
            .collect();
        assert_eq!(
            entries.iter().map(|table| &table[..4]).collect::<Vec<_>>(),
            vec![b"FACP", b"APIC"]
        );
        assert!(entries.iter().all(|table| sum(table) == 0));
        let dsdt = table_at(&block, u64::from_le_bytes(entries[0][140..148].try_into().unwrap()));
        assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
        assert!(dsdt.windows(8).any(|bytes| bytes == b"LNRO0005"));
        assert!(dsdt.windows(8).any(|bytes| bytes == b"VMGENCTR"));
    }

    #[test]
    fn tables_fit_below_one_mebibyte_with_every_device() {
        let device = MmioDevice {
            base: 0xd000_0000,
            size: 0x1000,
            irq: 6,
        };
        assert!(tables(8, &[device; 18]).len() < 0x2_0000);
    }
}
