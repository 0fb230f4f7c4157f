//! virtio-blk: one queue, requests served one after the other on the I/O thread.

mod io;
mod overlay;
mod state;
mod store;

use std::io as std_io;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::model::{Context, LogQuota, Model, Poller, copy_config};
use super::queue::{Chain, Segments};
use super::{DeviceError, Disk, OverlayLayer};
use overlay::NextLayer;
pub(super) use state::BlockState;
use store::Store;

const QUEUES: &[u16] = &[256];
const SECTOR: u64 = 512;
/// Data segments in one request: the queue's size without header and status.
const SEGMENTS_MAX: u32 = 254;
/// Largest range of one discard or write-zeroes request, in sectors (64 MiB).
const ZERO_SECTORS_MAX: u32 = 128 * 1024;
/// Bytes of the answer to `VIRTIO_BLK_T_GET_ID`.
const ID_BYTES: usize = 20;

/// A block device.
#[derive(Debug)]
pub(super) struct Block {
    id: String,
    store: Store,
    warnings: LogQuota,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Done, with so many bytes of data written to the guest.
    Ok(u64),
    Failed,
    Unsupported,
}

impl Block {
    /// Opens what is behind the disk.
    pub(super) fn new(disk: Disk) -> Result<Self, DeviceError> {
        if disk.id.is_empty() || disk.id.len() > ID_BYTES {
            return Err(DeviceError::Disk {
                id: disk.id,
                reason: format!("the id must have 1 to {ID_BYTES} bytes"),
            });
        }
        match Store::open(disk.backing) {
            Ok(store) => Ok(Self {
                id: disk.id,
                store,
                warnings: LogQuota::default(),
            }),
            Err(source) => Err(DeviceError::DiskFile {
                id: disk.id,
                what: "open its files",
                source,
            }),
        }
    }

    /// Opens the backing of a saved device, which must look the same to the guest.
    pub(super) fn restore(state: &BlockState, disk: Disk) -> Result<Self, DeviceError> {
        let block = Self::new(disk)?;
        let now = block.save();
        if now == *state {
            return Ok(block);
        }
        let kind = |state: &BlockState| if state.read_only { "read-only" } else { "writable" };
        Err(DeviceError::Disk {
            id: state.id.clone(),
            reason: format!(
                "the saved machine had {} bytes, {}; this has {} bytes, {}",
                state.size_bytes,
                kind(state),
                now.size_bytes,
                kind(&now)
            ),
        })
    }

    /// Saved state.
    pub(super) fn save(&self) -> BlockState {
        BlockState {
            id: self.id.clone(),
            size_bytes: self.store.size(),
            read_only: self.store.is_read_only(),
        }
    }

    /// Serial number.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Does all of sealing the active layer that can fail.
    pub(super) fn prepare_seal(&mut self, next: OverlayLayer) -> Result<NextLayer, DeviceError> {
        let id = &self.id;
        self.store
            .writable()
            .and_then(|overlay| overlay.prepare_seal(next))
            .map_err(|source| DeviceError::DiskFile {
                id: id.clone(),
                what: "seal the active layer",
                source,
            })
    }

    /// Seals the active layer and goes on with the next one.
    pub(super) fn seal(&mut self, next: NextLayer) {
        if let Store::Writable(overlay) = &mut self.store {
            overlay.seal(next);
        }
    }

    /// Serves a request; returns how many bytes of the writable part were written, status included.
    fn serve(&mut self, mut chain: Chain<'_>) -> u64 {
        let writable = chain.writable.len();
        let Some(data_bytes) = writable.checked_sub(1) else {
            return 0;
        };
        let data = chain.writable.take(data_bytes);
        let outcome = match chain.readable.read_array::<16>() {
            Some(header) => self.execute(&header, chain.readable, data),
            None => Outcome::Failed,
        };
        let (status, written) = match outcome {
            Outcome::Ok(bytes) => (VIRTIO_BLK_S_OK, bytes + 1),
            Outcome::Failed => (VIRTIO_BLK_S_IOERR, 1),
            Outcome::Unsupported => (VIRTIO_BLK_S_UNSUPP, 1),
        };
        let status = u8::try_from(status).unwrap_or(u8::MAX);
        chain.writable.write(&[status]);
        written
    }

    /// What became of a request that has no data for the guest.
    fn outcome(&mut self, result: std_io::Result<()>) -> Outcome {
        match result {
            Ok(()) => Outcome::Ok(0),
            Err(error) => {
                if self.warnings.take() {
                    tracing::warn!(disk = self.id, %error, "disk request");
                }
                Outcome::Failed
            }
        }
    }

    fn execute(&mut self, header: &[u8; 16], from: Segments<'_>, mut into: Segments<'_>) -> Outcome {
        let [a, b, c, d, _, _, _, _, sector @ ..] = *header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([a, b, c, d]) {
            VIRTIO_BLK_T_IN => {
                let bytes = into.len();
                match self.range(sector, bytes) {
                    Some(offset) => {
                        let result = self.store.read(offset, into);
                        match self.outcome(result) {
                            Outcome::Ok(_) => Outcome::Ok(bytes),
                            other => other,
                        }
                    }
                    None => Outcome::Failed,
                }
            }
            VIRTIO_BLK_T_OUT => match self.range(sector, from.len()) {
                Some(offset) => {
                    let disk = self.store.writable();
                    let result = disk.and_then(|overlay| overlay.write(offset, from));
                    self.outcome(result)
                }
                None => Outcome::Failed,
            },
            VIRTIO_BLK_T_FLUSH => {
                let result = match &mut self.store {
                    Store::Writable(overlay) => overlay.flush(),
                    Store::Empty { .. } | Store::ReadOnly(_) => Ok(()),
                };
                self.outcome(result)
            }
            VIRTIO_BLK_T_GET_ID => {
                let mut answer = [0; ID_BYTES];
                answer[..self.id.len()].copy_from_slice(self.id.as_bytes());
                Outcome::Ok(into.write(&answer) as u64)
            }
            VIRTIO_BLK_T_DISCARD => self.zero(from, true),
            VIRTIO_BLK_T_WRITE_ZEROES => self.zero(from, false),
            _ => Outcome::Unsupported,
        }
    }

    /// Byte offset of a range that is whole sectors within the disk.
    fn range(&self, sector: u64, bytes: u64) -> Option<u64> {
        let offset = sector.checked_mul(SECTOR)?;
        let end = offset.checked_add(bytes)?;
        (bytes.is_multiple_of(SECTOR) && end <= self.store.size()).then_some(offset)
    }

    fn zero(&mut self, mut from: Segments<'_>, whole_blocks_only: bool) -> Outcome {
        // One range in each request, as configuration space says.
        let (Some([sector @ .., a, b, c, d, _, _, _, _]), 0) = (from.read_array::<16>(), from.len()) else {
            return Outcome::Failed;
        };
        let sectors = u32::from_le_bytes([a, b, c, d]);
        if self.store.is_read_only() || sectors > ZERO_SECTORS_MAX {
            return Outcome::Failed;
        }
        let bytes = u64::from(sectors) * SECTOR;
        match self.range(u64::from_le_bytes(sector), bytes) {
            Some(offset) => {
                let disk = self.store.writable();
                let result = disk.and_then(|disk| disk.zero(offset, bytes, whole_blocks_only));
                self.outcome(result)
            }
            None => Outcome::Failed,
        }
    }
}

impl Model for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let common = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_TOPOLOGY;
        if self.store.is_read_only() {
            common | 1 << VIRTIO_BLK_F_RO
        } else {
            common | 1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        }
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    /// `struct virtio_blk_config`.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0u8; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.store.size() / SECTOR).to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &512u32.to_le_bytes());
        // Physical blocks of 8 sectors, none misaligned, I/O best in whole ones.
        put(24, &[3, 0, 8, 0]);
        put(34, &1u16.to_le_bytes());
        put(36, &ZERO_SECTORS_MAX.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &8u32.to_le_bytes());
        put(48, &ZERO_SECTORS_MAX.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
        copy_config(&config, offset, data);
    }

    fn activate(&mut self, _context: &mut Context<'_>) {}

    fn reset(&mut self, _poller: &Poller) {}

    fn queue_event(&mut self, context: &mut Context<'_>, _queue: usize) {
        let Some(queue) = context.queues.first_mut() else {
            return;
        };
        loop {
            queue.disable_notification(context.mem);
            while let Some(chain) = queue.pop(context.mem) {
                let head = chain.head;
                let written = self.serve(chain);
                queue.complete(context.mem, head, written);
            }
            queue.signal(context.mem, context.interrupt);
            if !queue.enable_notification(context.mem) {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests;
