//! What the guest's ports and MMIO addresses lead to: serial port, power-off and reset, virtio devices. Called on vCPU threads.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::control::ExitReason;
use crate::devices::virtio::DeviceSet;
use crate::layout;

/// Most console output kept, in bytes; the rest is dropped, so a guest cannot fill the host's disk.
const MAX_CONSOLE_BYTES: u64 = 64 << 20;

/// Raises an interrupt line.
#[derive(Debug)]
pub struct Line(Arc<EventFd>);

impl Line {
    /// The line behind this event.
    #[must_use]
    pub fn new(event: Arc<EventFd>) -> Self {
        Self(event)
    }
}

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Console output, written line by line: each byte is a VM exit already and shall not be a system call, too.
#[derive(Debug)]
pub struct Console<W> {
    out: W,
    pending: Vec<u8>,
    left: u64,
}

impl<W: Write> Console<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> Self {
        Self {
            out,
            pending: Vec::with_capacity(256),
            left: MAX_CONSOLE_BYTES,
        }
    }

    /// Writes what is pending. A console that cannot be written is no reason to stop a guest.
    pub fn drain(&mut self) {
        let _lost = self.out.write_all(&self.pending);
        self.pending.clear();
    }
}

impl<W: Write> Write for Console<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(left) = self.left.checked_sub(bytes.len() as u64) {
            self.left = left;
            self.pending.extend_from_slice(bytes);
        }
        if self.pending.len() >= 256 || bytes.contains(&b'\n') {
            self.drain();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Saved state of the serial port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerialState {
    registers: [u8; 9],
    input: Vec<u8>,
}

impl From<vm_superio::SerialState> for SerialState {
    fn from(state: vm_superio::SerialState) -> Self {
        let registers = [
            state.baud_divisor_low,
            state.baud_divisor_high,
            state.interrupt_enable,
            state.interrupt_identification,
            state.line_control,
            state.line_status,
            state.modem_control,
            state.modem_status,
            state.scratch,
        ];
        Self {
            registers,
            input: state.in_buffer,
        }
    }
}

impl From<&SerialState> for vm_superio::SerialState {
    fn from(state: &SerialState) -> Self {
        let [
            low,
            high,
            enable,
            identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = state.registers;
        Self {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: enable,
            interrupt_identification: identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: state.input.clone(),
        }
    }
}

type ConsoleFile = Console<std::fs::File>;

/// The ports and MMIO addresses of one machine.
#[derive(Debug)]
pub struct Platform {
    serial: Mutex<Serial<Line, NoEvents, ConsoleFile>>,
    devices: Option<DeviceSet>,
    end: OnceLock<ExitReason>,
    ended: Arc<EventFd>,
}

impl Platform {
    /// `serial_line` raises the serial port's interrupt; `ended` is written when the machine ends.
    ///
    /// # Errors
    /// When the saved serial state is not one.
    pub fn new(
        console: std::fs::File,
        serial_state: Option<&SerialState>,
        serial_line: Line,
        devices: Option<DeviceSet>,
        ended: Arc<EventFd>,
    ) -> io::Result<Self> {
        let console = Console::new(console);
        let serial = match serial_state {
            Some(state) => {
                Serial::from_state(&state.into(), serial_line, NoEvents, console).map_err(io::Error::other)?
            }
            None => Serial::new(serial_line, console),
        };
        Ok(Self {
            serial: Mutex::new(serial),
            devices,
            end: OnceLock::new(),
            ended,
        })
    }

    /// The virtio devices.
    #[must_use]
    pub fn devices(&self) -> Option<&DeviceSet> {
        self.devices.as_ref()
    }

    /// State of the serial port.
    #[must_use]
    pub fn save_serial(&self) -> SerialState {
        let mut serial = self.lock_serial();
        serial.writer_mut().drain();
        serial.state().into()
    }

    /// Writes pending console output.
    pub fn drain_console(&self) {
        self.lock_serial().writer_mut().drain();
    }

    /// Notes why the machine ended; the first reason counts.
    pub fn end(&self, reason: ExitReason) {
        self.drain_console();
        if self.end.set(reason).is_ok() {
            let _counter_full = self.ended.write(1);
        }
    }

    /// Why the machine ended, if it has.
    #[must_use]
    pub fn end_reason(&self) -> Option<ExitReason> {
        self.end.get().cloned()
    }

    fn lock_serial(&self) -> MutexGuard<'_, Serial<Line, NoEvents, ConsoleFile>> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guest read of a port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        match port {
            layout::SERIAL_PORT..=0x3ff => {
                if let [byte] = data {
                    *byte = self.lock_serial().read(serial_offset(port));
                }
            }
            // Nothing pending in either direction.
            layout::KEYBOARD_COMMAND_PORT | layout::SLEEP_STATUS_PORT => data.fill(0),
            _ => {}
        }
    }

    /// A guest write to a port; says when it ends the machine.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<ExitReason> {
        const RESET_PULSE: u8 = 0xfe;
        const SLEEP_ENABLE: u8 = 1 << 5;
        match (port, data) {
            // String writes arrive as several bytes for the same port.
            (layout::SERIAL_PORT..=0x3ff, _) => {
                let mut serial = self.lock_serial();
                for byte in data {
                    if let Err(error) = serial.write(serial_offset(port), *byte) {
                        tracing::debug!(%error, "serial port");
                    }
                }
                None
            }
            (layout::KEYBOARD_COMMAND_PORT, [RESET_PULSE]) | (layout::RESET_PORT, [1]) => Some(ExitReason::PowerOff),
            (layout::SLEEP_CONTROL_PORT, [value]) if value & SLEEP_ENABLE != 0 => Some(ExitReason::PowerOff),
            _ => None,
        }
    }

    /// A guest read of an address without memory.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(devices) = &self.devices {
            devices.mmio_read(address, data);
        }
    }

    /// A guest write to an address without memory.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some(devices) = &self.devices {
            devices.mmio_write(address, data);
        }
    }
}

fn serial_offset(port: u16) -> u8 {
    u8::try_from(port - layout::SERIAL_PORT).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    fn platform(console: &std::fs::File) -> Platform {
        let event = || Arc::new(EventFd::new(0).unwrap());
        Platform::new(console.try_clone().unwrap(), None, Line::new(event()), None, event()).unwrap()
    }

    #[test]
    fn console_output_arrives_at_the_end_of_a_line_or_the_machine() {
        let mut file = tempfile::tempfile().unwrap();
        let platform = platform(&file);
        platform.port_write(layout::SERIAL_PORT, b"a");
        assert_eq!(file.metadata().unwrap().len(), 0);
        platform.port_write(layout::SERIAL_PORT, b"b\nc");
        platform.end(ExitReason::PowerOff);
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ab\nc");
    }

    #[test]
    fn power_off_and_reset_end_the_machine() {
        let platform = platform(&tempfile::tempfile().unwrap());
        assert_eq!(
            platform.port_write(layout::SLEEP_CONTROL_PORT, &[5 << 2 | 1 << 5]),
            Some(ExitReason::PowerOff)
        );
        assert_eq!(platform.port_write(layout::SLEEP_CONTROL_PORT, &[5 << 2]), None);
        assert_eq!(
            platform.port_write(layout::KEYBOARD_COMMAND_PORT, &[0xfe]),
            Some(ExitReason::PowerOff)
        );
        assert_eq!(
            platform.port_write(layout::RESET_PORT, &[1]),
            Some(ExitReason::PowerOff)
        );
        platform.end(ExitReason::TripleFault);
        platform.end(ExitReason::Stopped);
        assert_eq!(platform.end_reason(), Some(ExitReason::TripleFault));
    }

    #[test]
    fn absent_ports_and_addresses_read_as_ones() {
        let platform = platform(&tempfile::tempfile().unwrap());
        let mut data = [0; 4];
        platform.port_read(0xcf8, &mut data);
        assert_eq!(data, [0xff; 4]);
        platform.mmio_read(layout::HOLE_START, &mut data);
        assert_eq!(data, [0xff; 4]);
    }
}
