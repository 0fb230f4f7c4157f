//! Checkpoint images travel as files, and damaged or foreign ones are refused before anything starts.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::Archive;
use e2e::private::PrivateNode;
use e2e::{Node, Runtime, leftovers};

use crate::support::{CheckpointImage, counter};

/// A checkpoint of [`crate::support::COUNTER`], exported.
fn exported(to: &Path) -> Result<String> {
    let node = Node::shared();
    let (_session, container) = counter(node)?;
    let image = CheckpointImage::of(node, &container)?;
    node.ctr(["images", "export"]).arg(to).arg(&image.name).succeed()?;
    Ok(image.name.clone())
}

#[test]
fn it_is_exported_imported_into_an_empty_store_and_forked_there() -> Result<()> {
    let directory = tempfile::tempdir_in("/var/lib")?;
    let archive = directory.path().join("image.tar");
    let name = exported(&archive)?;
    let other = PrivateNode::start(&directory.path().join("node"))?;
    other
        .ctr(["images", "import", "--snapshotter", "ramet"])
        .arg(&archive)
        .succeed()?;
    for word in ["over", "there"] {
        let fork = other
            .run(Runtime::Ramet, &name, &[])
            .stdin(format!("{word}\n"))
            .finish()?
            .expect_code(9)?;
        ensure!(fork.out() == format!("2 {word}\n"), "{:?} {:?}", fork.out(), fork.err());
    }
    Ok(())
}

#[test]
fn a_damaged_checkpoint_is_refused_before_anything_starts() -> Result<()> {
    let directory = tempfile::tempdir_in("/var/lib")?;
    let archive = directory.path().join("image.tar");
    let name = exported(&archive)?;
    let other = PrivateNode::start(&directory.path().join("node"))?;
    other.import(&Archive::Busybox)?;
    other
        .ctr(["images", "import", "--snapshotter", "ramet"])
        .arg(&archive)
        .succeed()?;
    // Unpacks it, so that there is a checkpoint directory to damage.
    other
        .run(Runtime::Ramet, &name, &[])
        .stdin("x\n")
        .finish()?
        .expect_code(9)?;
    let checkpoint = checkpoint_directory(other.snapshotter_root())?;
    for (file, damage) in [
        ("manifest.json", Damage::Replace("\"format\":1", "\"format\":999")),
        ("manifest.json", Damage::Replace("\"cpu_family\":", "\"cpu_family\":7")),
        ("manifest.json", Damage::Truncate),
        ("state", Damage::Truncate),
        ("state", Damage::FlipInTheMiddle),
        ("memory.index", Damage::Truncate),
        ("memory.index", Damage::FlipInTheMiddle),
        ("memory", Damage::Truncate),
    ] {
        let path = checkpoint.join(file);
        let good = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        fs::write(&path, damage.done_to(&good)).with_context(|| format!("damaging {}", path.display()))?;
        let refused = other.run(Runtime::Ramet, &name, &[]).stdin("x\n").finish()?;
        fs::write(&path, &good)?;
        ensure!(
            refused.code != 0 && refused.code != 9,
            "{file} {damage:?}: ended with {}",
            refused.code
        );
        ensure!(
            refused.stdout.is_empty(),
            "{file} {damage:?}: something ran: {}",
            refused.out()
        );
        ensure!(
            ["checkpoint", "saved state", "memory index"]
                .iter()
                .any(|word| refused.err().contains(word)),
            "{file} {damage:?}: {}",
            refused.err()
        );
        let gone = e2e::wait_until(crate::support::ANSWER, || leftovers::vmms().is_empty());
        ensure!(gone, "{file} {damage:?}: a VMM is left");
    }
    other
        .run(Runtime::Ramet, &name, &[])
        .stdin("x\n")
        .finish()?
        .expect_code(9)?;
    Ok(())
}

#[derive(Debug)]
enum Damage {
    Truncate,
    FlipInTheMiddle,
    Replace(&'static str, &'static str),
}

impl Damage {
    fn done_to(&self, good: &[u8]) -> Vec<u8> {
        let mut bytes = good.to_vec();
        match self {
            Self::Truncate => bytes.truncate(good.len() / 2),
            Self::FlipInTheMiddle => bytes[good.len() / 2] ^= 0x40,
            Self::Replace(old, new) => {
                // Compact or pretty, with or without a blank after the colon.
                let text = String::from_utf8_lossy(good).replace(": ", ":");
                bytes = text.replacen(old, new, 1).into_bytes();
            }
        }
        bytes
    }
}

fn checkpoint_directory(root: &Path) -> Result<std::path::PathBuf> {
    for entry in fs::read_dir(root.join("snapshots"))? {
        let candidate = entry?.path().join("checkpoint");
        if candidate.join("manifest.json").exists() {
            return Ok(candidate);
        }
    }
    anyhow::bail!("no snapshot below {} has a checkpoint", root.display())
}
