//! Memory that a container frees goes back to the host.

use anyhow::{Context, Result, ensure};
use e2e::images::{Archive, PYTHON};
use e2e::{Container, Node, Runtime, Session};

use crate::limits::metric;
use crate::support::{ANSWER, CheckpointImage};

const MIB: u64 = 1 << 20;
/// What the container takes and drops again.
const HELD: u64 = 200 * MIB;
/// What a guest may keep of it: it returns memory in pieces of 2 MiB, and its kernel keeps some for itself.
const KEPT: u64 = 60 * MIB;

/// Takes and drops 200 MiB when told to, and answers with its own anonymous memory in KiB.
const HOLDER: &str = "
import sys
for line in sys.stdin:
    held = b'Z' * (200 << 20) if line == 'take\\n' else None
    anonymous = next(row.split()[1] for row in open('/proc/self/status') if row.startswith('RssAnon'))
    print(line.strip(), anonymous, flush=True)
";

/// A container that holds memory, and its VMM.
struct Holder {
    session: Session,
    container: Container,
    vmm: u32,
}

impl Holder {
    fn start(node: &Node, image: &str, command: &[&str]) -> Result<Self> {
        let (mut session, container) = node.run(Runtime::Ramet, image, command).session()?;
        session.send("start")?;
        ensure!(session.line(ANSWER)?.starts_with("start "));
        let vmm = node.task_pid(container.id())?;
        Ok(Self {
            session,
            container,
            vmm,
        })
    }

    /// Memory that the VMM has for itself, in bytes.
    fn private(&self) -> Result<u64> {
        let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.vmm))?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("Private_Dirty:"));
        let kilobytes = line.context("no Private_Dirty")?.trim().trim_end_matches(" kB");
        Ok(kilobytes.parse::<u64>()? * 1024)
    }

    /// Gives it a word; returns its own anonymous memory after that, in bytes.
    fn tell(&mut self, word: &str) -> Result<u64> {
        self.session.send(word)?;
        let line = self.session.line(ANSWER)?;
        let kilobytes = line
            .strip_prefix(word)
            .with_context(|| format!("{line:?} for {word}"))?;
        Ok(kilobytes.trim().parse::<u64>()? * 1024)
    }

    /// Takes memory, drops it, and waits until the host has it back.
    fn take_and_drop(&mut self) -> Result<()> {
        let before = self.private()?;
        let taken = self.tell("take")?;
        let full = self.private()?;
        ensure!(taken >= HELD && full >= before + HELD - 10 * MIB, "{before}, {full}");
        // Statistics agree with what the process has.
        let (anonymous, usage) = (
            metric(&self.container, ["memory", "anon"])?,
            metric(&self.container, ["memory", "usage"])?,
        );
        ensure!(
            anonymous.abs_diff(taken) < 16 * MIB && usage >= anonymous,
            "{anonymous}, {usage}, {taken}"
        );
        let dropped = self.tell("drop")?;
        ensure!(metric(&self.container, ["memory", "anon"])?.abs_diff(dropped) < 16 * MIB);
        let start = std::time::Instant::now();
        let returned = e2e::wait_until(ANSWER, || self.private().is_ok_and(|now| now < before + KEPT));
        ensure!(returned, "{before}, {full}, and still {}", self.private()?);
        println!("{before}, {full}, then {} after {:?}", self.private()?, start.elapsed());
        Ok(())
    }
}

#[test]
fn what_a_container_frees_is_returned_and_forks_of_it_do_the_same() -> Result<()> {
    let node = Node::shared();
    node.import(&Archive::Python)?;
    let mut parent = Holder::start(node, PYTHON, &["python3", "-c", HOLDER])?;
    parent.take_and_drop()?;
    let image = CheckpointImage::of(node, &parent.container)?;
    let mut fork = Holder::start(node, &image.name, &[])?;
    ensure!(fork.private()? < parent.private()? + KEPT);
    fork.take_and_drop()?;
    // Both go on.
    ensure!(parent.tell("more")? < HELD && fork.tell("more")? < HELD);
    Ok(())
}
