//! What the shim and the VMM say to each other.
//!
//! One `SOCK_SEQPACKET` Unix socket pair, handed to `ramet-vmm` as file descriptor 3. Each packet is one JSON message;
//! file descriptors travel with it (`SCM_RIGHTS`) and are named in it by their place in that list ([`FdIndex`]). The shim sends a
//! [`Request`], the VMM answers each with one [`Reply`] in order, and sends [`Event`]s in between. The VMM opens no file itself:
//! everything it touches arrives as a descriptor, so it can live in an empty root. When the peer closes, the VMM exits.
//!
//! ```text
//! spawned ── Boot ──────> running ── Pause ──> paused ── Resume ──> running ── Save ──> running (saving) ── FinishSave ──> running
//!         └─ Restore ──> paused ── Resume ──> running                    any ── Stop, guest power-off, fault ──> Event::Exited, process exit
//! ```

use serde::{Deserialize, Serialize};

pub use crate::channel::{Channel, ChannelError, Received};
use crate::devices::virtio::Net;

/// The descriptor of the control socket in `ramet-vmm`.
pub const CONTROL_FD: i32 = 3;

/// Largest packet either side accepts, in bytes.
pub const MAX_MESSAGE: usize = 128 * 1024;

/// Most descriptors in one message; the kernel's own limit is 253.
pub const MAX_FDS: usize = 250;

/// Place of a descriptor in the list that came with the message.
pub type FdIndex = usize;

/// What is asked of the VMM.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Starts a new machine; it runs when the reply arrives.
    Boot(BootRequest),
    /// Builds a machine from a checkpoint; it is paused when the reply arrives.
    Restore(RestoreRequest),
    /// Lets the vCPUs run (again).
    Resume,
    /// Stops the vCPUs.
    Pause,
    /// Pauses, saves state, seals the disks, starts writing memory from a frozen copy, and resumes if asked to. Answered with
    /// [`Reply::Saving`] as soon as the vCPUs run again (or stay paused).
    Save(SaveRequest),
    /// Answered with [`Reply::Saved`] when every byte of the save is in its file.
    FinishSave,
    /// Opens a vsock connection to a guest port. The one descriptor is a connected `SOCK_STREAM` that becomes the host's end;
    /// the VMM closes it when the guest refuses or the connection ends. The reply does not wait for the guest.
    Connect {
        /// Guest port.
        port: u32,
        /// The stream.
        stream: FdIndex,
    },
    /// Plugs a tap into a network interface that has none yet (or another one). The machine may run.
    AttachTap {
        /// Place of the interface among the network interfaces.
        net: usize,
        /// An attached tap (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`).
        tap: FdIndex,
    },
    /// Counters of this VM.
    Stats,
    /// Writes down which pages of its checkpoint this fork has changed so far, for [`RestoreRequest::touched`] of the next.
    Touched {
        /// An empty file.
        file: FdIndex,
    },
    /// Ends the machine and the process.
    Stop,
}

/// Bounds of a machine.
pub mod limits {
    /// vCPUs.
    pub const VCPUS: std::ops::RangeInclusive<u8> = 1..=8;
    /// Guest memory in bytes; also a multiple of 2 MiB.
    pub const MEMORY: std::ops::RangeInclusive<u64> = (64 << 20)..=(16 << 30);
    /// Block devices: of the places for devices, vsock, network, entropy and balloon take four.
    pub const DISKS: usize = 14;
}

/// A machine to boot.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootRequest {
    /// Number of vCPUs, within [`limits::VCPUS`].
    pub vcpus: u8,
    /// Guest memory, within [`limits::MEMORY`].
    pub memory_bytes: u64,
    /// ELF `vmlinux`.
    pub kernel: FdIndex,
    /// Uncompressed newc archive; the tiny guests of the tests have none.
    pub initramfs: Option<FdIndex>,
    /// Kernel command line.
    pub command_line: String,
    /// Block devices, in order.
    pub disks: Vec<DiskConfig>,
    /// Network interfaces.
    pub nets: Vec<NetConfig>,
    /// Where the serial console is written (append).
    pub console: FdIndex,
    /// Entropy device, vsock device: always present with a Linux guest; off for the tiny guests of the tests.
    pub linux_devices: bool,
}

/// A machine to bring back. The devices are those of the saved state; the files and interfaces behind them are given here.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreRequest {
    /// The checkpoint; a later incremental save names it as the source of the pages that did not change.
    pub checkpoint: checkpoint::manifest::CheckpointId,
    /// The `state` file of the checkpoint.
    pub state: FdIndex,
    /// The `memory.index` file of the checkpoint ([`checkpoint::memory::MemoryIndex`]).
    pub memory_index: FdIndex,
    /// One memory file for each source of the index, in its order. Mapped privately, never written.
    pub memory_files: Vec<FdIndex>,
    /// The backing of each block device of the saved machine, matched by id; kind and size must agree.
    pub disks: Vec<DiskConfig>,
    /// The saved network interfaces, in order; those that are not given have no tap until [`Request::AttachTap`].
    pub nets: Vec<NetConfig>,
    /// Where the serial console is written (append).
    pub console: FdIndex,
    /// What [`Request::Touched`] wrote for an earlier fork of this checkpoint: these pages are brought in at once.
    #[serde(default)]
    pub touched: Option<FdIndex>,
}

/// A block device and what is behind it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Serial number the guest reads (`VIRTIO_BLK_T_GET_ID`), 1 to 20 bytes of `[a-z0-9-]`; also its name in this protocol.
    pub id: String,
    /// What is behind it.
    pub backing: DiskBacking,
}

/// What is behind a block device.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskBacking {
    /// A placeholder: capacity 0, every request fails. Gets its backing later (`read_only` = how the guest sees it).
    Empty {
        /// Whether the device offers `VIRTIO_BLK_F_RO`.
        read_only: bool,
    },
    /// Files one after the other, read-only; each is a multiple of 4096 bytes.
    ReadOnly {
        /// The files, in order.
        files: Vec<FdIndex>,
    },
    /// Our copy-on-write overlay (see `checkpoint::disk`).
    Writable {
        /// Size the guest sees, a multiple of 4096.
        size_bytes: u64,
        /// Sealed layers, bottom to top.
        sealed: Vec<OverlayFiles>,
        /// The layer that is written; empty files are a valid empty layer.
        active: OverlayFiles,
    },
}

/// The two files of one overlay layer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlayFiles {
    /// Blocks at their own offsets, sparse.
    pub data: FdIndex,
    /// One bit for each 4 KiB block, least significant first: 1 = this layer holds the block.
    pub bitmap: FdIndex,
}

/// A network interface.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// An attached tap (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`); `None`: it comes with [`Request::AttachTap`].
    pub tap: Option<FdIndex>,
    /// MAC address the guest reads; a restored guest gets its own from the agent.
    pub mac: [u8; 6],
    /// MTU the guest reads.
    pub mtu: u16,
}

impl NetConfig {
    /// An interface whose tap comes later.
    #[must_use]
    pub fn unplugged() -> Self {
        let Net { mac, mtu, .. } = Net::unplugged();
        Self { tap: None, mac, mtu }
    }
}

/// Where a save goes. All files are new and empty.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveRequest {
    /// Gets the saved state.
    pub state: FdIndex,
    /// Gets the pages of guest memory (all that are not zero, or those changed since the base).
    pub memory: FdIndex,
    /// Gets the [`checkpoint::memory::MemoryIndex`]; source 0 is `memory`, the others are the sources this VM was restored from.
    pub memory_index: FdIndex,
    /// A new active layer for each writable disk; the old one is sealed as it is and goes on as the top sealed layer.
    pub seal: Vec<SealDisk>,
    /// Whether the vCPUs run on afterwards.
    pub resume: bool,
}

/// The next active layer of a disk.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealDisk {
    /// The disk.
    pub id: String,
    /// Empty files.
    pub next: OverlayFiles,
}

/// Answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Done.
    Done,
    /// To [`Request::Save`].
    Saving {
        /// How long the vCPUs stood still, in microseconds.
        pause_us: u64,
    },
    /// To [`Request::FinishSave`].
    Saved(SaveReport),
    /// To [`Request::Stats`].
    Stats(VmStats),
    /// It was not done; the state of the machine is as before unless `fatal`.
    Refused {
        /// What was tried on what, and the causes.
        message: String,
        /// The machine cannot go on.
        fatal: bool,
    },
}

/// What a save wrote.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SaveReport {
    /// How long the vCPUs stood still, in microseconds.
    pub pause_us: u64,
    /// Bytes of guest pages written to the memory file.
    pub memory_bytes: u64,
    /// How long writing them took, in microseconds (after the pause, beside the running guest).
    pub memory_write_us: u64,
    /// Whether only pages changed since the base were written.
    pub incremental: bool,
}

/// Counters of one VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VmStats {
    /// VM exits by kind.
    pub exits: std::collections::BTreeMap<String, u64>,
    /// Anonymous bytes of guest memory: pages that this VM does not share with its checkpoint.
    pub private_memory_bytes: u64,
}

/// What the VMM says unasked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The guest opened a connection to a host port; the one descriptor is the host's end. Only ports the VMM was told
    /// to pass on arrive: [`GUEST_TO_HOST_PORTS`]; others are refused in the VMM.
    Connected {
        /// Host port.
        port: u32,
    },
    /// The machine ended; the process exits after this.
    Exited(ExitReason),
}

/// Host ports that the guest may connect to.
pub const GUEST_TO_HOST_PORTS: [u32; 1] = [1026];

/// Why a machine ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The guest powered off or asked for a reset.
    PowerOff,
    /// A triple fault.
    TripleFault,
    /// [`Request::Stop`].
    Stopped,
    /// KVM could not go on; the text says where.
    Fault(String),
}

/// One packet to the shim.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// Answer to the oldest open request.
    Reply(Reply),
    /// Unasked.
    Event(Event),
}
