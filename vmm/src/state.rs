//! The `state` file of a checkpoint: everything about a machine but its memory and disks.
//!
//! Magic `RAMETVMS`, u32 version, u32 zero, u64 length (all little endian), that many bytes of JSON, SHA-256 of all before. The checksum finds
//! damage early and by name; a forged file is held off by checking every value before it is used.

use std::io::Read;

use kvm_bindings::{kvm_clock_data, kvm_irqchip};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::control::limits;
use crate::devices::virtio::DeviceSetState;
use crate::platform::SerialState;
use crate::vcpu::state::VcpuState;

/// Raised by every change of the saved structures or of [`crate::layout`]. 2: there may be a balloon.
pub const VERSION: u32 = 2;
/// The oldest version that means the same today: a machine of it has no balloon, and stays without.
pub const OLDEST: u32 = 1;
/// Largest state file that is read, in bytes.
pub const MAX_BYTES: usize = 8 << 20;

const MAGIC: &[u8; 8] = b"RAMETVMS";
const HEADER: usize = 24;
const CHECKSUM: usize = 32;

/// A state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be read.
    #[error("read state file")]
    Read(#[from] std::io::Error),
    /// It is not one.
    #[error("state file does not start with RAMETVMS")]
    Magic,
    /// It was made by another version.
    #[error(
        "state file has version {0}, this VMM reads versions {OLDEST} to {VERSION}; use the release that made the checkpoint, or make it again"
    )]
    Version(u32),
    /// It is cut short or has something after its end.
    #[error("state file has {found} bytes, its header needs {expected}")]
    Length {
        /// By its header, or the limit.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// It was changed or damaged.
    #[error("state file does not match its checksum")]
    Checksum,
    /// Its contents do not parse.
    #[error("parse state file")]
    Json(#[from] serde_json::Error),
    /// Its contents make no sense.
    #[error("state file: {0}")]
    Malformed(String),
}

/// Everything about a machine but its memory and disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// Size of guest memory.
    pub memory_bytes: u64,
    /// By id, from 0.
    pub vcpus: Vec<VcpuState>,
    /// Interrupt controllers and clock.
    pub board: BoardState,
    /// Serial port.
    pub serial: SerialState,
    /// virtio devices; none in the tiny guests of the tests.
    pub devices: Option<DeviceSetState>,
}

/// State of KVM's devices of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoardState {
    /// Both PICs and the IOAPIC.
    pub irqchips: Vec<kvm_irqchip>,
    /// kvmclock.
    pub clock: kvm_clock_data,
}

impl PartialEq for BoardState {
    fn eq(&self, other: &Self) -> bool {
        // The interrupt controllers are unions without equality of their own.
        let bytes = |state: &Self| serde_json::to_vec(state).unwrap_or_default();
        bytes(self) == bytes(other)
    }
}

impl MachineState {
    /// The bytes of the file.
    ///
    /// # Errors
    /// When the state does not serialise or is too large.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        let json = serde_json::to_vec(self)?;
        let total = HEADER + json.len() + CHECKSUM;
        if total > MAX_BYTES {
            return Err(StateError::Length {
                expected: MAX_BYTES as u64,
                found: total as u64,
            });
        }
        let mut bytes = Vec::with_capacity(total);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&json);
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        Ok(bytes)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it is not a whole, undamaged state file of this version with values that make sense, whatever its bytes are.
    pub fn read_from(input: impl Read) -> Result<Self, StateError> {
        let mut bytes = Vec::new();
        input.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        Self::decode(&bytes)
    }

    /// As [`Self::read_from`], of bytes.
    ///
    /// # Errors
    /// As [`Self::read_from`].
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let found = bytes.len() as u64;
        if bytes.len() > MAX_BYTES {
            return Err(StateError::Length {
                expected: MAX_BYTES as u64,
                found,
            });
        }
        if !bytes.starts_with(MAGIC) {
            return Err(StateError::Magic);
        }
        let field = |at: usize, length: usize| {
            let mut field = [0; 8];
            let part = bytes.get(at..at + length)?;
            field.get_mut(..length)?.copy_from_slice(part);
            Some(u64::from_le_bytes(field))
        };
        let short = StateError::Length {
            expected: (HEADER + CHECKSUM) as u64,
            found,
        };
        let (Some(version), Some(length)) = (field(8, 4), field(16, 8)) else {
            return Err(short);
        };
        if !(u64::from(OLDEST)..=u64::from(VERSION)).contains(&version) {
            return Err(StateError::Version(u32::try_from(version).unwrap_or(u32::MAX)));
        }
        let expected = length.saturating_add((HEADER + CHECKSUM) as u64);
        if expected != found {
            return Err(StateError::Length { expected, found });
        }
        let (body, sum) = bytes.split_at(bytes.len() - CHECKSUM);
        if Sha256::digest(body).as_slice() != sum {
            return Err(StateError::Checksum);
        }
        let state: Self = serde_json::from_slice(body.get(HEADER..).unwrap_or_default())?;
        state.validate()?;
        Ok(state)
    }

    fn validate(&self) -> Result<(), StateError> {
        let vcpus = u8::try_from(self.vcpus.len()).unwrap_or(u8::MAX);
        if !limits::VCPUS.contains(&vcpus) {
            return Err(StateError::Malformed(format!("{} vCPUs", self.vcpus.len())));
        }
        if !limits::MEMORY.contains(&self.memory_bytes) {
            return Err(StateError::Malformed(format!("{} bytes of memory", self.memory_bytes)));
        }
        let chips: Vec<u32> = self.board.irqchips.iter().map(|chip| chip.chip_id).collect();
        if chips != [0, 1, 2] {
            return Err(StateError::Malformed(format!("interrupt controllers {chips:?}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sealed(version: u32, json: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
        bytes.extend_from_slice(json);
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        bytes
    }

    #[test]
    fn another_version_is_named() {
        for version in [0, OLDEST - 1, VERSION + 1, u32::MAX] {
            assert!(
                matches!(MachineState::decode(&sealed(version, b"{}")), Err(StateError::Version(v)) if v == version)
            );
        }
        for version in OLDEST..=VERSION {
            assert!(matches!(
                MachineState::decode(&sealed(version, b"{}")),
                Err(StateError::Json(_))
            ));
        }
    }

    #[test]
    fn a_machine_without_vcpus_is_refused() {
        let chips: Vec<kvm_irqchip> = (0..3)
            .map(|chip_id| kvm_irqchip {
                chip_id,
                ..kvm_irqchip::default()
            })
            .collect();
        let state = MachineState {
            memory_bytes: 64 << 20,
            vcpus: Vec::new(),
            board: BoardState {
                irqchips: chips,
                clock: kvm_clock_data::default(),
            },
            serial: SerialState::default(),
            devices: None,
        };
        let bytes = state.encode().unwrap();
        assert!(matches!(MachineState::decode(&bytes), Err(StateError::Malformed(text)) if text == "0 vCPUs"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            prop_assert!(MachineState::decode(&bytes).is_err());
        }

        #[test]
        fn arbitrary_contents_under_a_good_checksum_are_refused(json in proptest::collection::vec(any::<u8>(), 0..256)) {
            prop_assert!(MachineState::decode(&sealed(VERSION, &json)).is_err());
        }

        #[test]
        fn a_cut_or_flipped_file_is_refused(cut in 0_usize..80, flip in 0_usize..80, bit in 0_u8..8) {
            let good = sealed(VERSION, b"{\"memory_bytes\":1}");
            if cut < good.len() {
                prop_assert!(MachineState::decode(&good[..cut]).is_err());
            }
            let mut flipped = good;
            if let Some(byte) = flipped.get_mut(flip) {
                *byte ^= 1 << bit;
                prop_assert!(MachineState::decode(&flipped).is_err());
            }
        }
    }
}
