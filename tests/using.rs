//! The transcripts in docs/using/ are what happens.
//!
//! What they really print is written to `$RAMET_LAB_OUT`, which the lab hands back: to be pasted when a document is made or renewed.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::{Invocation, Node, cni, transcript};

/// For all commands of a document together.
const DEADLINE: Duration = Duration::from_secs(540);

/// Types a document's commands in an empty directory and compares.
fn check(name: &str, document: &str) -> Result<()> {
    let node = Node::shared();
    cni::configure(None)?;
    let directory = tempfile::tempdir()?;
    let out = std::env::var_os("RAMET_LAB_OUT").map_or_else(|| directory.path().to_owned(), PathBuf::from);
    let steps = transcript::parse(document)?;
    // Into a file, so that it is there however this ends.
    let raw = out.join(format!("{name}.raw"));
    let script = transcript::script(&steps);
    let script = format!(
        "exec >'{}'\ncd '{}'\n{script}",
        raw.display(),
        directory.path().display()
    );
    let done = Invocation::new("sh")
        .args(["-c", &script])
        .env("CONTAINERD_ADDRESS", node.address())
        .deadline(DEADLINE)
        .finish();
    let printed = fs::read(&raw).with_context(|| format!("reading {}", raw.display()))?;
    let outcomes = transcript::outcomes(&String::from_utf8_lossy(&printed));
    let record = out.join(format!("{name}.txt"));
    fs::write(&record, transcript::record(&steps, &outcomes))
        .with_context(|| format!("writing {}", record.display()))?;
    done.with_context(|| {
        format!(
            "docs/using/{name}.md, after {} of {} commands",
            outcomes.len(),
            steps.len()
        )
    })?;
    transcript::compare(&steps, &outcomes).with_context(|| format!("docs/using/{name}.md"))
}

#[test]
fn ctr_does_what_its_transcript_says() -> Result<()> {
    check("ctr", include_str!("../docs/using/ctr.md"))
}

#[test]
fn nerdctl_does_what_its_transcript_says() -> Result<()> {
    check("nerdctl", include_str!("../docs/using/nerdctl.md"))
}
