//! OCI hooks: `ctr run --gpus` is the one way to have one from ctr. It puts a program called `nvidia-container-cli` into a hook on the host.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Invocation, Node};

/// A program for the hook that does what the script says, with the hook's arguments.
fn program(directory: &Path, script: &str) -> Result<()> {
    let path = directory.join("nvidia-container-cli");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).with_context(|| format!("writing {}", path.display()))?;
    Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
}

fn path_with(directory: &Path) -> String {
    format!("{}:{}", directory.display(), std::env::var("PATH").unwrap_or_default())
}

with_each_runtime! {
    fn a_hook_runs_on_the_host_and_knows_the_containers_network_namespace(runtime) {
        let directory = tempfile::tempdir()?;
        let seen = directory.path().join("seen");
        program(directory.path(), &format!("echo \"$@\" > {0}; readlink /proc/self/ns/net >> {0}", seen.display()))?;
        let run = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).flag("--gpus=0");
        let container = run.env("PATH", &path_with(directory.path())).detach()?;
        let text = fs::read_to_string(&seen).context("the hook has not run")?;
        let pid = Node::shared().task_pid(container.id())?;
        ensure!(text.contains(&format!("--pid={pid}")), "task pid {pid}, the hook saw {text}");
        let host = Invocation::new("readlink").arg("/proc/self/ns/net").succeed()?.out();
        let containers = Invocation::new("readlink").arg(format!("/proc/{pid}/ns/net")).succeed()?.out();
        ensure!(text.contains(&host) && !text.contains(&containers), "host {host}, container {containers}, the hook was in {text}");
        container.remove()
    }

    fn a_hook_that_fails_fails_the_container_with_its_words(runtime) {
        let directory = tempfile::tempdir()?;
        program(directory.path(), "echo no such card >&2; exit 3")?;
        let run = Node::shared().run(runtime, BUSYBOX, &["true"]).flag("--gpus=0");
        let done = run.env("PATH", &path_with(directory.path())).finish()?.expect_code(1)?;
        for words in ["OCI runtime create failed", "hook #0", "exit status 3", "no such card"] {
            ensure!(done.err().contains(words), "no {words:?} in {}", done.err());
        }
        Ok(())
    }
}
