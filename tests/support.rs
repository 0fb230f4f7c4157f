//! What several subjects need.

use std::time::Duration;

use anyhow::Result;
use e2e::{Container, Node, Runtime, Session};

/// Writes one test for each runtime: behaviour that must not depend on it.
macro_rules! with_each_runtime {
    ($($(#[$doc:meta])* fn $name:ident($runtime:ident) $body:block)*) => {$(
        mod $name {
            use super::*;

            $(#[$doc])*
            fn holds($runtime: e2e::Runtime) -> anyhow::Result<()> $body

            #[test]
            fn runc() -> anyhow::Result<()> {
                holds(e2e::Runtime::Runc)
            }

            #[test]
            fn ramet() -> anyhow::Result<()> {
                holds(e2e::Runtime::Ramet)
            }
        }
    )*};
}

/// How long one answer of a running container may take.
pub(crate) const ANSWER: Duration = Duration::from_secs(60);

/// A program whose memory one can see: it numbers the lines that it reads.
pub(crate) const COUNTER: &str = "n=0; while read line; do n=$((n+1)); echo $n $line; done; exit 9";

/// Starts [`COUNTER`] and gives it its first line.
pub(crate) fn counter(node: &Node) -> Result<(Session, Container)> {
    let (mut session, container) = node.sh(Runtime::Ramet, COUNTER).session()?;
    session.send("first")?;
    anyhow::ensure!(session.line(ANSWER)? == "1 first");
    Ok((session, container))
}

/// A checkpoint image that is removed when this is dropped.
pub(crate) struct CheckpointImage<'a> {
    node: &'a Node,
    pub(crate) name: String,
}

impl<'a> CheckpointImage<'a> {
    /// Checkpoints a container.
    pub(crate) fn of(node: &'a Node, container: &Container) -> Result<Self> {
        let name = format!("localhost/{}:checkpoint", e2e::container::fresh_id("image"));
        node.checkpoint(container.id(), &name)?;
        Ok(Self { node, name })
    }
}

impl Drop for CheckpointImage<'_> {
    fn drop(&mut self) {
        let _ = self.node.remove_image(&self.name);
    }
}
