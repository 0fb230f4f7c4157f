//! A running container becomes an image.

use anyhow::{Context, Result, ensure};
use e2e::Node;
use e2e::images::BUSYBOX;

use crate::support::{ANSWER, CheckpointImage, counter};

#[test]
fn the_container_runs_on_and_the_image_is_an_ordinary_one() -> Result<()> {
    let node = Node::shared();
    let (mut session, container) = counter(node)?;
    let pid = node.task_pid(container.id())?;
    let image = CheckpointImage::of(node, &container)?;
    session.send("after")?;
    ensure!(session.line(ANSWER)? == "2 after");
    ensure!(node.task_pid(container.id())? == pid && node.task_status(container.id())?.as_deref() == Some("RUNNING"));

    let (base, manifest) = (node.manifest(BUSYBOX)?, node.manifest(&image.name)?);
    ensure!(
        manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json",
        "{manifest:#}"
    );
    let layers = manifest["layers"].as_array().context("layers")?;
    let parents = base["layers"].as_array().context("layers of the base")?;
    ensure!(
        layers.len() == parents.len() + 1,
        "one layer more than {}: {layers:#?}",
        parents.len()
    );
    ensure!(
        layers[..parents.len()]
            .iter()
            .zip(parents)
            .all(|(layer, parent)| layer["digest"] == parent["digest"])
    );
    let media_type = layers[parents.len()]["mediaType"].as_str().unwrap_or_default();
    ensure!(
        media_type.starts_with("application/vnd.oci.image.layer.v1.tar"),
        "{media_type}"
    );

    let digest = manifest["config"]["digest"].as_str().context("config digest")?;
    let config: serde_json::Value = serde_json::from_slice(&node.ctr(["content", "get", digest]).succeed()?.stdout)?;
    let inside = config["config"].to_string();
    ensure!(
        inside.contains("while read line"),
        "the config repeats the command: {inside}"
    );
    session.close_stdin();
    ensure!(session.wait(ANSWER)? == 9);
    container.is_gone();
    Ok(())
}

#[test]
fn it_can_be_made_again_and_by_ctr_too() -> Result<()> {
    let node = Node::shared();
    let (mut session, container) = counter(node)?;
    let by_ctr = node.ctr(["task", "checkpoint", container.id()]).succeed()?.out();
    let by_ctr = by_ctr.trim();
    ensure!(by_ctr.starts_with("containerd.io/checkpoint/"), "{by_ctr}");
    let first = CheckpointImage::of(node, &container)?;
    let second = CheckpointImage::of(node, &container)?;
    ensure!(first.name != second.name);
    session.send("after")?;
    ensure!(session.line(ANSWER)? == "2 after");
    node.remove_image(by_ctr)?;
    session.close_stdin();
    ensure!(session.wait(ANSWER)? == 9);
    container.is_gone();
    Ok(())
}

#[test]
fn checkpoints_are_listed_inspected_and_removed_by_name() -> Result<()> {
    let node = Node::shared();
    let (_session, container) = counter(node)?;
    let image = CheckpointImage::of(node, &container)?;
    let list = node.ramet(["ls", "--json"]).succeed()?;
    ensure!(list.out().contains(&image.name), "{}", list.out());
    let inspected = node.ramet(["inspect", "--json", &image.name]).succeed()?;
    let inspected: serde_json::Value = serde_json::from_slice(&inspected.stdout)?;
    ensure!(inspected.to_string().contains("pause_us"), "{inspected:#}");
    node.ramet(["rm", &image.name]).succeed()?;
    ensure!(!node.ramet(["ls", "--json"]).succeed()?.out().contains(&image.name));
    Ok(())
}

#[test]
fn a_container_or_image_that_is_not_there_is_named_and_a_taken_name_is_refused() -> Result<()> {
    let node = Node::shared();
    let missing = node
        .ramet(["checkpoint", "no-such-container", "localhost/x:1"])
        .finish()?;
    ensure!(
        missing.code != 0 && missing.err().contains("no-such-container"),
        "{} {}",
        missing.code,
        missing.err()
    );
    let missing = node.ramet(["inspect", "localhost/no-such-image:1"]).finish()?;
    ensure!(
        missing.code != 0 && missing.err().contains("localhost/no-such-image:1"),
        "{}",
        missing.err()
    );
    let (mut session, container) = counter(node)?;
    let taken = node.ramet(["checkpoint", container.id(), BUSYBOX]).finish()?;
    ensure!(
        taken.code != 0 && taken.err().contains(BUSYBOX),
        "{} {}",
        taken.code,
        taken.err()
    );
    session.send("still here")?;
    ensure!(session.line(ANSWER)? == "2 still here");
    Ok(())
}
