//! Drives a `ramet-vmm` process over its control socket, as the shim does.

pub(crate) mod many;
pub(crate) mod script;

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, posix_spawn};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use vmm::control::{
    BootRequest, CONTROL_FD, Channel, Event, ExitReason, Message, Reply, Request, RestoreRequest, SaveReport,
    SaveRequest,
};

/// How long anything may take before a test fails.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Where the tiny guests are loaded.
const LOAD_ADDRESS: u64 = 0x20_0000;

/// Counts in memory, touches 256 pages in turn, and every 256 steps reads an MMIO address and prints a line: eight hexadecimal digits that
/// go up by one from line to line, a space, and the first word of the VM generation id.
pub(crate) const TICKER: [u8; 125] = [
    0x48, 0xc7, 0xc3, 0x00, 0x00, 0x30, 0x00, //   mov rbx, 0x300000
    0x49, 0xb8, 0x00, 0x00, 0x00, 0xd0, 0x00, 0x00, 0x00, 0x00, // mov r8, 0xd0000000
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0x48, 0xff, 0x03, // again: inc qword [rbx]
    0x48, 0x8b, 0x03, // mov rax, [rbx]
    0x48, 0x89, 0xc1, // mov rcx, rax
    0x81, 0xe1, 0xff, 0x00, 0x00, 0x00, // and ecx, 0xff
    0x48, 0xc1, 0xe1, 0x0c, // shl rcx, 12
    0x48, 0x89, 0x81, 0x00, 0x00, 0x40, 0x00, // mov [rcx + 0x400000], rax
    0xa9, 0xff, 0x00, 0x00, 0x00, // test eax, 0xff
    0x75, 0xdf, // jnz again
    0x41, 0x8b, 0x38, // mov edi, [r8]
    0x48, 0x89, 0xc7, // mov rdi, rax
    0x48, 0xc1, 0xef, 0x08, // shr rdi, 8
    0xb9, 0x08, 0x00, 0x00, 0x00, // mov ecx, 8
    0xe8, 0x19, 0x00, 0x00, 0x00, // call hex
    0xb0, 0x20, 0xee, // mov al, ' '; out dx, al
    0x8b, 0x3c, 0x25, 0x00, 0xf0, 0x0d, 0x00, // mov edi, [0xdf000]
    0xb9, 0x08, 0x00, 0x00, 0x00, // mov ecx, 8
    0xe8, 0x05, 0x00, 0x00, 0x00, // call hex
    0xb0, 0x0a, 0xee, // mov al, '\n'; out dx, al
    0xeb, 0xb2, // jmp again
    0xc1, 0xe1, 0x02, // hex: shl ecx, 2
    0x83, 0xe9, 0x04, // next: sub ecx, 4
    0x89, 0xf8, // mov eax, edi
    0xd3, 0xe8, // shr eax, cl
    0x24, 0x0f, // and al, 15
    0x3c, 0x0a, // cmp al, 10
    0x72, 0x02, // jb digit
    0x04, 0x27, // add al, 39
    0x04, 0x30, // digit: add al, 48
    0xee, // out dx, al
    0x85, 0xc9, // test ecx, ecx
    0x75, 0xea, // jnz next
    0xc3, // ret
];

/// Prints `hi` and powers off.
pub(crate) const POWER_OFF: [u8; 18] = [
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, 0x68, 0xee, // mov al, 'h'; out dx, al
    0xb0, 0x69, 0xee, // mov al, 'i'; out dx, al
    0x66, 0xba, 0x00, 0x06, // mov dx, 0x600
    0xb0, 0x34, 0xee, // mov al, 5 << 2 | 1 << 5; out dx, al
    0xf4, // hlt
];

/// An undefined instruction without an interrupt table.
pub(crate) const TRIPLE_FAULT: [u8; 2] = [0x0f, 0x0b];

/// An ELF image of a tiny guest.
pub(crate) fn kernel(code: &[u8]) -> Result<File> {
    let mut elf = Vec::new();
    elf.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    elf.extend_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]); // executable, x86-64
    elf.extend_from_slice(&LOAD_ADDRESS.to_le_bytes()); // entry
    elf.extend_from_slice(&64_u64.to_le_bytes()); // program headers
    elf.extend_from_slice(&[0; 12]); // no section headers, no flags
    elf.extend_from_slice(&[64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    elf.extend_from_slice(&[1, 0, 0, 0, 7, 0, 0, 0]); // PT_LOAD, rwx
    for field in [120, LOAD_ADDRESS, LOAD_ADDRESS, code.len() as u64, code.len() as u64, 1] {
        elf.extend_from_slice(&field.to_le_bytes());
    }
    elf.extend_from_slice(code);
    let mut file = tempfile::tempfile()?;
    file.write_all(&elf)?;
    Ok(file)
}

/// A running `ramet-vmm`; killed and reaped when dropped.
pub(crate) struct Vmm {
    pub(crate) channel: Channel,
    pub(crate) pid: Pid,
    reaped: bool,
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if !self.reaped {
            let _gone = kill(self.pid, Signal::SIGKILL);
            let _gone = waitpid(self.pid, None);
        }
    }
}

impl Vmm {
    /// Starts the program.
    pub(crate) fn spawn(program: &Path) -> Result<Self> {
        let (channel, theirs) = Channel::pair()?;
        let mut actions = PosixSpawnFileActions::init()?;
        actions.add_dup2(theirs.as_raw_fd(), CONTROL_FD)?;
        let path = CString::new(program.as_os_str().as_encoded_bytes())?;
        let log = std::env::var("RAMET_LOG").unwrap_or_else(|_| "warn".into());
        let environment = [CString::new(format!("RAMET_LOG={log}"))?];
        let pid = posix_spawn(
            path.as_c_str(),
            &actions,
            &PosixSpawnAttr::init()?,
            &[path.as_c_str()],
            &environment,
        )
        .with_context(|| format!("spawn {}", program.display()))?;
        Ok(Self {
            channel,
            pid,
            reaped: false,
        })
    }

    /// Sends a request and returns its reply; events before it are dropped.
    pub(crate) fn request(&self, request: &Request, fds: &[OwnedFd]) -> Result<Reply> {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.channel.send(request, &borrowed)?;
        loop {
            match self.channel.receive::<Message>()?.context("VMM is gone")?.message {
                Message::Reply(reply) => return Ok(reply),
                Message::Event(Event::Exited(reason)) => bail!("machine ended: {reason:?}"),
                Message::Event(_) => {}
            }
        }
    }

    /// A request that must be done.
    pub(crate) fn must(&self, request: &Request, fds: &[OwnedFd]) -> Result<Reply> {
        match self.request(request, fds)? {
            Reply::Refused { message, .. } => bail!("refused: {message}"),
            reply => Ok(reply),
        }
    }

    /// A request that must not be done; returns why.
    pub(crate) fn refused(&self, request: &Request, fds: &[OwnedFd]) -> Result<(String, bool)> {
        match self.request(request, fds)? {
            Reply::Refused { message, fatal } => Ok((message, fatal)),
            reply => bail!("not refused: {reply:?}"),
        }
    }

    /// Boots a tiny guest.
    pub(crate) fn boot_tiny(&self, code: &[u8], vcpus: u8, memory_bytes: u64, console: &File) -> Result<()> {
        let request = BootRequest {
            vcpus,
            memory_bytes,
            kernel: 0,
            initramfs: None,
            command_line: String::new(),
            disks: Vec::new(),
            nets: Vec::new(),
            console: 1,
            linux_devices: false,
        };
        self.must(
            &Request::Boot(request),
            &[kernel(code)?.into(), console.try_clone()?.into()],
        )?;
        Ok(())
    }

    /// Saves into files of the directory.
    pub(crate) fn save(&self, files: &Checkpoint, resume: bool) -> Result<SaveReport> {
        let request = SaveRequest {
            state: 0,
            memory: 1,
            memory_index: 2,
            seal: Vec::new(),
            resume,
        };
        self.must(&Request::Save(request), &files.targets()?)?;
        match self.must(&Request::FinishSave, &[])? {
            Reply::Saved(report) => Ok(report),
            reply => bail!("unexpected reply {reply:?}"),
        }
    }

    /// The request and descriptors that restore a checkpoint with these bases.
    pub(crate) fn restore_request(
        files: &Checkpoint,
        bases: &[&Checkpoint],
        console: &File,
    ) -> Result<(Request, Vec<OwnedFd>)> {
        let mut fds: Vec<OwnedFd> = vec![
            File::open(files.path("state"))?.into(),
            File::open(files.path("memory.index"))?.into(),
        ];
        fds.push(console.try_clone()?.into());
        fds.push(File::open(files.path("memory"))?.into());
        for base in bases {
            fds.push(File::open(base.path("memory"))?.into());
        }
        let request = RestoreRequest {
            checkpoint: files.id.clone().try_into().map_err(anyhow::Error::msg)?,
            state: 0,
            memory_index: 1,
            memory_files: (3..fds.len()).collect(),
            disks: Vec::new(),
            nets: Vec::new(),
            console: 2,
            touched: None,
        };
        Ok((Request::Restore(request), fds))
    }

    /// Restores a checkpoint and lets it run.
    pub(crate) fn restore(&self, files: &Checkpoint, bases: &[&Checkpoint], console: &File) -> Result<()> {
        let (request, fds) = Self::restore_request(files, bases, console)?;
        self.must(&request, &fds)?;
        self.must(&Request::Resume, &[])?;
        Ok(())
    }

    /// Waits for the machine to end.
    pub(crate) fn wait_exit(&mut self) -> Result<ExitReason> {
        loop {
            match self
                .channel
                .receive::<Message>()?
                .context("VMM is gone without a reason")?
                .message
            {
                Message::Event(Event::Exited(reason)) => {
                    assert_eq!(self.wait_process()?, WaitStatus::Exited(self.pid, 0));
                    return Ok(reason);
                }
                message => println!("{message:?}"),
            }
        }
    }

    /// Waits for the process to end.
    pub(crate) fn wait_process(&mut self) -> Result<WaitStatus> {
        let status = eventually("VMM process ends", || {
            match waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => None,
                other => Some(other),
            }
        })??;
        self.reaped = true;
        Ok(status)
    }
}

/// Files of a checkpoint in a directory of its own.
pub(crate) struct Checkpoint {
    directory: tempfile::TempDir,
    pub(crate) id: String,
}

impl Checkpoint {
    /// An empty one; `number` makes its id.
    pub(crate) fn new(number: u8) -> Result<Self> {
        Ok(Self {
            directory: tempfile::tempdir()?,
            id: format!("{number:032x}"),
        })
    }

    /// Path of one of its files.
    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// New state, memory and index files.
    pub(crate) fn targets(&self) -> Result<Vec<OwnedFd>> {
        ["state", "memory", "memory.index"]
            .iter()
            .map(|name| Ok(File::create_new(self.path(name))?.into()))
            .collect()
    }
}

/// Polls another process's doing until it shows.
pub(crate) fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return Ok(found);
        }
        if start.elapsed() > DEADLINE {
            bail!("not within {DEADLINE:?}: {what}");
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Everything in a console file.
pub(crate) fn text(console: &File) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![
        0;
        console
            .metadata()
            .map_or(0, |metadata| usize::try_from(metadata.len()).unwrap_or(0))
    ];
    let length = console.read_at(&mut bytes, 0).unwrap_or(0);
    bytes.truncate(length);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits until a console has this many lines more than now.
pub(crate) fn more_lines(console: &File, count: usize) -> Result<String> {
    let before = text(console).lines().count();
    eventually("more console lines", || {
        Some(text(console)).filter(|text| text.lines().count() > before + count)
    })
}

/// The numbers and generation words of a ticker's complete lines.
pub(crate) fn ticks(text: &str) -> Vec<(u32, u32)> {
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete
        .lines()
        .map(|line| {
            let (number, generation) = line.split_once(' ').unwrap_or_else(|| panic!("not a tick: {line:?}"));
            let parse = |digits| u32::from_str_radix(digits, 16).unwrap_or_else(|_| panic!("not a tick: {line:?}"));
            (parse(number), parse(generation))
        })
        .collect()
}

/// Asserts that a ticker never missed or repeated a step.
pub(crate) fn assert_consecutive(text: &str) {
    for pair in ticks(text).windows(2) {
        assert_eq!(pair[0].0 + 1, pair[1].0, "in {text}");
    }
}
