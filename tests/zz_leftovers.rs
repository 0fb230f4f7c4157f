//! The last test in alphabetical order, which is the order of the tests.

use anyhow::{Result, ensure};
use e2e::Node;

#[test]
fn nothing_is_left_behind() -> Result<()> {
    let left = Node::shared().leftovers();
    // Images of the tests themselves stay for the next run.
    let left: Vec<_> = left.iter().filter(|line| !is_of_a_test_image(line)).collect();
    ensure!(left.is_empty(), "left behind:\n{left:#?}");
    Ok(())
}

/// The bridges of CNI networks stay with these. Unpacking an image for a second snapshotter, or importing one for a single test, adds what stays with the image.
fn is_of_a_test_image(line: &str) -> bool {
    line.starts_with("image: localhost/python:1")
        || line.ends_with(e2e::cni::BRIDGE)
        || line.ends_with("nerdctl0")
        || line.starts_with("content: ")
        || line.starts_with("snapshot directory: ")
        || line.contains("snapshot of") && line.contains(": sha256:")
}
