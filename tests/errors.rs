//! Bad input gets an error that names the thing, and leaves nothing.

use anyhow::{Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Node, Runtime, leftovers};

#[test]
fn a_container_name_that_is_taken_is_refused() -> Result<()> {
    let node = Node::shared();
    let container = node.run(Runtime::Ramet, BUSYBOX, &["sleep", "1000"]).detach()?;
    let second = node.ctr([
        "run",
        "--runtime",
        Runtime::Ramet.name(),
        "--snapshotter",
        "ramet",
        BUSYBOX,
        container.id(),
        "true",
    ]);
    let refused = second.finish()?;
    ensure!(
        refused.code != 0 && refused.err().contains("already exists"),
        "{} {}",
        refused.code,
        refused.err()
    );
    container.exec(&["true"]).succeed()?;
    container.remove()
}

#[test]
fn an_image_that_is_not_there_is_named() -> Result<()> {
    let done = Node::shared()
        .run(Runtime::Ramet, "localhost/no-such-image:1", &["true"])
        .finish()?;
    ensure!(
        done.code != 0 && done.err().contains("localhost/no-such-image:1"),
        "{} {}",
        done.code,
        done.err()
    );
    Ok(())
}

/// Runs a container while something on the host is hidden by a mount, and returns what `ctr` said.
fn run_while_hidden(hidden: &str) -> Result<String> {
    let node = Node::shared();
    let source: &str = if std::path::Path::new(hidden).is_dir() {
        "/mnt"
    } else {
        "/dev/null"
    };
    let flags = nix::mount::MsFlags::MS_BIND;
    nix::mount::mount(Some(source), hidden, None::<&str>, flags, None::<&str>)?;
    let done = node.run(Runtime::Ramet, BUSYBOX, &["true"]).finish();
    nix::mount::umount2(hidden, nix::mount::MntFlags::MNT_DETACH)?;
    let done = done?;
    ensure!(done.code != 0, "it ran without {hidden}");
    ensure!(
        e2e::wait_until(crate::support::ANSWER, || leftovers::vmms().is_empty()),
        "a VMM is left"
    );
    node.run(Runtime::Ramet, BUSYBOX, &["true"]).succeed()?;
    Ok(done.err())
}

#[test]
fn a_kvm_device_that_does_not_work_is_named_with_the_remedy() -> Result<()> {
    let said = run_while_hidden("/dev/kvm")?;
    ensure!(said.contains("/dev/kvm") && said.contains("ramet doctor"), "{said}");
    Ok(())
}

#[test]
fn a_guest_image_that_is_missing_is_named_with_the_remedy() -> Result<()> {
    let said = run_while_hidden("/usr/local/share/ramet")?;
    ensure!(
        said.contains("/usr/local/share/ramet") && said.contains("ramet doctor"),
        "{said}"
    );
    Ok(())
}

#[test]
fn the_doctor_finds_nothing_wrong_here() -> Result<()> {
    let done = Node::shared().ramet(["doctor", "--json"]).succeed()?;
    let report: serde_json::Value = serde_json::from_slice(&done.stdout)?;
    ensure!(report.to_string().contains("kvm"), "{report:#}");
    Ok(())
}
