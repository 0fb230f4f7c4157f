//! OCI hooks: `ctr run --gpus` is the one way to have one from ctr. It puts a program called `nvidia-container-cli` into a hook on the host.
//! All others come from [`Hooked`].

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Invocation, Node, Runtime};
use serde_json::{Value, json};

/// A program for the hook that does what the script says, with the hook's arguments.
fn program(directory: &Path, script: &str) -> Result<()> {
    executable(&directory.join("nvidia-container-cli"), script)
}

fn executable(path: &Path, script: &str) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\n{script}\n")).with_context(|| format!("writing {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// A shim that puts hooks into the spec before the real one sees it. Hooks on the host note the state that they were given.
struct Hooked(tempfile::TempDir);

impl Hooked {
    /// `poststart` is what that hook does beside.
    fn new(runtime: Runtime, poststart: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let hook = directory.path().join("hook");
        let log = directory.path().join("log");
        executable(
            &hook,
            &format!("{{ echo \"$1\"; cat; echo; }} >> {}; eval \"$2\"", log.display()),
        )?;
        let on_host = |stage: &str, beside: &str| json!([{"path": hook, "args": ["hook", stage, beside]}]);
        let inside = "cat > /state; echo seen by the hook > /mark";
        let hooks = json!({
            "createRuntime": on_host("createRuntime", ""),
            "startContainer": [{"path": "/bin/sh", "args": ["sh", "-c", inside], "env": ["PATH=/bin"]}],
            "poststart": on_host("poststart", poststart),
            "poststop": on_host("poststop", ""),
        });
        // For sed, that is what was found.
        let hooks = hooks.to_string().replace('&', "\\&");
        let real = if runtime.is_vm() {
            e2e::node::SHIM
        } else {
            "containerd-shim-runc-v2"
        };
        // The action comes last; the bundle is the working directory.
        let script = format!(
            "for action; do :; done\n\
             if [ \"$action\" = start ]; then sed -i '1s#^{{#{{\"hooks\":{hooks},#' config.json; fi\n\
             exec {real} \"$@\""
        );
        executable(&directory.path().join("shim"), &script)?;
        Ok(Self(directory))
    }

    fn flag(&self) -> String {
        format!("--runtime={}", self.0.path().join("shim").display())
    }

    /// What the hooks on the host were called for and the state that each was given, in order.
    fn seen(&self) -> Result<Vec<(String, Value)>> {
        let text = fs::read_to_string(self.0.path().join("log")).context("no hook has run")?;
        let lines: Vec<&str> = text.lines().collect();
        let pairs = lines.chunks_exact(2);
        pairs
            .map(|pair| Ok((pair[0].to_owned(), serde_json::from_str(pair[1])?)))
            .collect()
    }
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

    fn every_stage_has_its_hooks_and_their_state(runtime) {
        let hooked = Hooked::new(runtime, "")?;
        let id = e2e::container::fresh_id("hooked");
        let run = Node::shared().sh(runtime, "cat /mark /state").id(&id).flag(&hooked.flag());
        let printed = run.succeed()?.out();
        let (mark, inside) = printed.split_once('\n').context("no mark of the startContainer hook")?;
        let inside: Value = serde_json::from_str(inside).with_context(|| printed.clone())?;
        ensure!(mark == "seen by the hook" && inside["id"] == id, "{printed}");
        let seen = hooked.seen()?;
        let stages: Vec<&str> = seen.iter().map(|(stage, _)| stage.as_str()).collect();
        ensure!(stages == ["createRuntime", "poststart", "poststop"], "{seen:?}");
        ensure!(seen.iter().all(|(_, state)| state["id"] == id && state["bundle"].is_string()), "{seen:?}");
        ensure!(seen[0].1["status"] == "creating" && seen[0].1["pid"].as_u64() > Some(1), "{seen:?}");
        ensure!(seen[2].1["status"] == "stopped" && seen[2].1.get("pid").is_none(), "{seen:?}");
        Ok(())
    }

    fn a_poststart_hook_that_fails_fails_the_container_and_poststop_follows(runtime) {
        let hooked = Hooked::new(runtime, "echo not today >&2; exit 3")?;
        let done = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).flag(&hooked.flag()).finish()?.expect_code(1)?;
        // runc names the stage from 1.2 on.
        for words in ["hook #0", "exit status 3", "not today"] {
            ensure!(done.err().contains(words), "no {words:?} in {}", done.err());
        }
        let gone = || hooked.seen().is_ok_and(|seen| seen.last().is_some_and(|(stage, _)| stage == "poststop"));
        ensure!(e2e::wait_until(crate::support::ANSWER, gone), "{:?}", hooked.seen());
        Ok(())
    }
}

#[test]
fn a_hook_does_not_outlive_a_shim_that_is_killed() -> Result<()> {
    let hooked = Hooked::new(Runtime::Ramet, "")?;
    let id = e2e::container::fresh_id("hooked");
    let directory = hooked.0.path().display();
    // The shim that waits for this hook is its parent.
    let script =
        format!("test $1 = createRuntime || exit 0; echo $$ > {directory}/pid; kill -9 $PPID; exec sleep 1000");
    executable(&hooked.0.path().join("hook"), &script)?;
    let run = Node::shared().run(Runtime::Ramet, BUSYBOX, &["true"]).id(&id);
    let done = run.flag(&hooked.flag()).finish()?;
    ensure!(done.code != 0, "{}", done.err());
    let pid = fs::read_to_string(hooked.0.path().join("pid")).context("the hook has not run")?;
    let left = [
        Path::new("/proc").join(pid.trim()),
        Path::new("/run/ramet/default").join(&id),
    ];
    let gone = || left.iter().all(|path| !path.exists());
    ensure!(
        e2e::wait_until(crate::support::ANSWER, gone),
        "left behind: one of {left:?}"
    );
    Ok(())
}
