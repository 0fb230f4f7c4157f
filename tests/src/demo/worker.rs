//! The worker in a container, and the tasks that it gets.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use e2e::images::PYTHON;
use e2e::{Container, Node, Runtime, Session};
use serde_json::{Value, json};

use crate::model;

const PROVISION: &str = include_str!("../../demo/provision.sh");
const PROGRAM: &str = include_str!("../../demo/worker.py");

/// How long provisioning may take, or any one answer.
const PATIENCE: Duration = Duration::from_secs(300);

macro_rules! tasks {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../demo/tasks/", $name, ".py")))),*]
    };
}

/// Name and text of each task: a program with one mistake, a mark, and the assertions that a right program passes.
const TASKS: [(&str, &str); 12] = tasks![
    "01-off-by-one-search",
    "02-mutable-default",
    "03-changed-while-iterated",
    "04-integer-division",
    "05-late-binding-closure",
    "06-shadowed-variable",
    "07-wrong-comparison",
    "08-missing-return",
    "09-aliased-rows",
    "10-float-equality",
    "11-wrong-base-case",
    "12-text-for-bytes",
];

/// One request to a worker.
pub(crate) struct Task {
    /// For people.
    pub(crate) name: &'static str,
    /// What is sent.
    pub(crate) request: Value,
}

/// The task for fork number `index`; they come round again after twelve.
pub(crate) fn task(index: usize) -> Task {
    let (name, text) = TASKS[index % TASKS.len()];
    let (source, assertions) = text.split_once("# --- assertions\n").unwrap_or((text, ""));
    let request = json!({
        "operation": "repair", "source": source, "assertions": assertions, "model": model::is_configured(),
    });
    Task { name, request }
}

/// A worker that one can talk to.
pub(crate) struct Worker {
    session: Session,
    container: Container,
}

impl Worker {
    /// Starts a cold one: a fresh container that does the whole set-up. Returns when it is ready.
    pub(crate) fn cold(node: &Node, id: &str) -> Result<Self> {
        let command = ["sh", "-c", PROVISION, "sh", PROGRAM];
        let run = node
            .run(Runtime::Ramet, PYTHON, &command)
            .id(id)
            .flag("--annotation=io.ramet.memory_mib=768");
        let (mut session, container) = run.session()?;
        let line = session.line(PATIENCE).context("waiting for a worker to be ready")?;
        if !line.starts_with("{\"ready\"") {
            bail!("a worker said {line:?} instead of being ready");
        }
        Ok(Self { session, container })
    }

    /// Starts a fork of a checkpoint image. It goes on when it gets a request.
    pub(crate) fn fork(node: &Node, image: &str, id: &str) -> Result<Self> {
        let (session, container) = node.run(Runtime::Ramet, image, &[]).id(id).session()?;
        Ok(Self { session, container })
    }

    /// Its container id.
    pub(crate) fn id(&self) -> &str {
        self.container.id()
    }

    /// From the start of `ctr run` to the first byte that the program printed, in milliseconds.
    pub(crate) fn ready_ms(&self) -> Result<f64> {
        let after = self.session.first_byte_after().context("it printed nothing yet")?;
        Ok(after.as_secs_f64() * 1000.0)
    }

    /// Sends a request and waits for the answer.
    pub(crate) fn ask(&mut self, request: &Value) -> Result<Value> {
        self.session.send(&request.to_string())?;
        let operation = request["operation"].as_str().unwrap_or_default();
        let line = self.session.line(PATIENCE)?;
        if line != format!("got {operation}") {
            bail!("worker {} said {line:?} to {operation}", self.id());
        }
        loop {
            let line = self.session.line(PATIENCE)?;
            let answer: Value = serde_json::from_str(&line).with_context(|| format!("answer {line:?}"))?;
            match answer["ask"].as_str() {
                Some(prompt) => self.session.send(&model::ask(prompt).to_string())?,
                None => return Ok(answer),
            }
        }
    }

    /// Closes the stdin of each, then waits until all have ended and `ctr` has removed them.
    pub(crate) fn finish_all(mut workers: Vec<Self>) -> Result<()> {
        for worker in &mut workers {
            worker.session.close_stdin();
        }
        workers.into_iter().try_for_each(Self::finish)
    }

    /// Closes its stdin and waits until it has ended and `ctr` has removed it.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.session.close_stdin();
        let code = self.session.wait(PATIENCE)?;
        if code != 0 {
            bail!("worker {} ended with {code}: {}", self.id(), self.session.stderr());
        }
        self.container.is_gone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_has_a_program_and_assertions() {
        for index in 0..TASKS.len() {
            let request = task(index).request;
            assert!(request["source"].as_str().unwrap().contains("def "), "{index}");
            assert!(request["assertions"].as_str().unwrap().contains("assert "), "{index}");
        }
    }
}
