//! OCI hooks that run on this host: prestart and createRuntime when the sandbox's network namespace is there and its machine is not
//! yet made, poststart when init runs, poststop when nothing of the container is left. Each gets the container's OCI state on stdin; its
//! pid is the VMM's, whose network namespace is the container's.
//!
//! startContainer hooks run inside the container and so in the guest (the agent's business); createContainer hooks want a container
//! whose files are seen from this host, and are refused.
//!
//! Once the first hook has run, the poststop hooks are due whatever happens. A file in the sandbox's state directory says so until
//! somebody takes it: the shim, or `delete` after the shim was killed. So they run once.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use oci_spec::runtime::{Hook, Spec};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::error::{Error, Result};

/// Most bytes of a hook's output that go into an error.
const OUTPUT: usize = 4096;
/// How long output may take to arrive after the end of a hook; something it left running may hold it open for ever.
const DRAIN: Duration = Duration::from_millis(200);

/// When hooks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Prestart,
    CreateRuntime,
    Poststart,
    Poststop,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Prestart => "prestart",
            Self::CreateRuntime => "createRuntime",
            Self::Poststart => "poststart",
            Self::Poststop => "poststop",
        }
    }

    fn of(self, spec: &Spec) -> &[Hook] {
        let Some(hooks) = spec.hooks() else { return &[] };
        let list = match self {
            Self::Prestart => hooks.prestart(),
            Self::CreateRuntime => hooks.create_runtime(),
            Self::Poststart => hooks.poststart(),
            Self::Poststop => hooks.poststop(),
        };
        list.as_deref().unwrap_or_default()
    }
}

/// The container's state, as the OCI runtime specification defines it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct State {
    oci_version: String,
    id: String,
    status: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    pid: u32,
    bundle: PathBuf,
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    annotations: std::collections::BTreeMap<String, String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(pid: &u32) -> bool {
    *pid == 0
}

/// The hooks of one container.
#[derive(Clone, Debug)]
pub struct Hooks {
    spec: Spec,
    state: State,
    mark: PathBuf,
}

impl Hooks {
    /// Of the container with this id and bundle; `pid` stands for it on this host. `mark` is the file that says that poststop hooks
    /// are due.
    ///
    /// # Errors
    /// A hook that cannot be run for a virtual machine.
    pub fn of(spec: &Spec, id: &str, bundle: &Path, pid: u32, mark: PathBuf) -> Result<Self> {
        let inside = spec
            .hooks()
            .as_ref()
            .and_then(|hooks| hooks.create_container().as_ref());
        if inside.is_some_and(|hooks| !hooks.is_empty()) {
            return Err(Error::InvalidArgument(
                "createContainer hooks cannot run in the namespaces of a virtual machine; use createRuntime or startContainer hooks"
                    .into(),
            ));
        }
        let annotations = spec.annotations().iter().flatten().map(|(k, v)| (k.clone(), v.clone()));
        let state = State {
            oci_version: spec.version().clone(),
            id: id.to_owned(),
            status: "creating".into(),
            pid,
            bundle: bundle.to_owned(),
            annotations: annotations.collect(),
        };
        Ok(Self {
            spec: spec.clone(),
            state,
            mark,
        })
    }

    /// Before the machine is made. Blocks.
    ///
    /// # Errors
    /// A hook failed; those after it were not run. [`finish`] is due.
    pub fn create(&self) -> Result<()> {
        let stages = [Stage::Prestart, Stage::CreateRuntime];
        if stages
            .iter()
            .chain([&Stage::Poststop])
            .all(|stage| stage.of(&self.spec).is_empty())
        {
            return Ok(());
        }
        let mut stopped = self.state.clone();
        stopped.status = "stopped".into();
        stopped.pid = 0;
        let bytes = serde_json::to_vec(&stopped).map_err(|e| Error::Internal(e.to_string()))?;
        fs::write(&self.mark, bytes).map_err(Error::file("write", &self.mark))?;
        stages
            .into_iter()
            .try_for_each(|stage| run_all(stage, &self.spec, &self.state, "create"))
    }

    /// Whether [`Self::started`] has something to do.
    #[must_use]
    pub fn has_poststart(&self) -> bool {
        !Stage::Poststart.of(&self.spec).is_empty()
    }

    /// After the start of init. Blocks.
    ///
    /// # Errors
    /// A hook failed; the container must be stopped.
    pub fn started(&self) -> Result<()> {
        let mut running = self.state.clone();
        running.status = "running".into();
        run_all(Stage::Poststart, &self.spec, &running, "start")
    }
}

/// When nothing of the container is left: runs the poststop hooks if they are due. Blocks.
pub fn finish(bundle: &Path, mark: &Path) {
    if let Some(due) = due(mark) {
        due.run(bundle);
    }
}

/// Poststop hooks that are to be run by whoever holds this.
#[derive(Debug)]
pub struct Due(Vec<u8>);

/// Whether poststop hooks are due; whoever asks first must run them.
#[must_use]
pub fn due(mark: &Path) -> Option<Due> {
    let bytes = fs::read(mark).ok()?;
    fs::remove_file(mark).is_ok().then_some(Due(bytes))
}

impl Due {
    /// Runs all of them; a failure is only logged. Blocks.
    pub fn run(self, bundle: &Path) {
        let state = serde_json::from_slice::<State>(&self.0);
        let (Ok(state), Ok(spec)) = (state, crate::launch::read_spec(bundle)) else {
            warn!(bundle = %bundle.display(), "the poststop hooks cannot be read any more");
            return;
        };
        for (number, hook) in Stage::Poststop.of(&spec).iter().enumerate() {
            if let Err(reason) = run(Stage::Poststop, hook, &state) {
                warn!(number, reason, "poststop hook");
            }
        }
    }
}

fn run_all(stage: Stage, spec: &Spec, state: &State, action: &'static str) -> Result<()> {
    for (number, hook) in stage.of(spec).iter().enumerate() {
        info!(stage = stage.name(), number, path = %hook.path().display(), "run hook");
        run(stage, hook, state).map_err(|reason| Error::Runtime {
            action,
            message: format!("error running {} hook #{number}: {reason}", stage.name()),
        })?;
    }
    Ok(())
}

/// The program of a hook, in a process group of its own.
fn command(stage: Stage, hook: &Hook, state: &State) -> Command {
    let args = hook.args().clone().unwrap_or_default();
    let mut command = Command::new(hook.path());
    if let Some((name, rest)) = args.split_first() {
        command.arg0(name).args(rest);
    }
    command.env_clear();
    for variable in hook.env().iter().flatten() {
        if let Some((name, value)) = variable.split_once('=') {
            command.env(name, value);
        }
    }
    command
        .current_dir(&state.bundle)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    if stage != Stage::Poststop {
        // Nobody would keep its time limit, and the poststop hooks are run after it, not beside it. Those are not interrupted.
        crate::sys::die_with_parent(&mut command);
    }
    command
}

/// Runs one hook to its end; says why it failed.
fn run(stage: Stage, hook: &Hook, state: &State) -> std::result::Result<(), String> {
    let input = serde_json::to_vec(state).map_err(|e| e.to_string())?;
    let mut child = command(stage, hook, state)
        .spawn()
        .map_err(|e| format!("start {}: {e}", hook.path().display()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A hook need not read it, and may end before; a thread of its own, because it may also never read it.
        std::thread::spawn(move || {
            let _ = stdin.write_all(&input);
        });
    }
    let stdout = Collected::start(child.stdout.take());
    let stderr = Collected::start(child.stderr.take());
    let limit = hook
        .timeout()
        .and_then(|seconds| u64::try_from(seconds).ok())
        .filter(|s| *s > 0);
    let ended = wait(&mut child, limit.map(Duration::from_secs));
    let (stdout, stderr) = (stdout.text(), stderr.text());
    let reason = match ended {
        Ok(Some(status)) if status.success() => return Ok(()),
        Ok(Some(status)) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("signal {}", signal.unwrap_or_default()),
        },
        Ok(None) => format!("hook ran past specified timeout of {}s", limit.unwrap_or_default()),
        Err(error) => format!("wait for it: {error}"),
    };
    Err(format!("{reason}, stdout: {stdout}, stderr: {stderr}"))
}

/// Waits for the end of a child; `None` when it took too long and was killed with everything in its process group.
fn wait(child: &mut Child, limit: Option<Duration>) -> std::io::Result<Option<ExitStatus>> {
    let Some(limit) = limit else {
        return child.wait().map(Some);
    };
    let pid = Pid::from_raw(child.id().cast_signed());
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        // The zombie stays until it is waited for below, so its pid cannot become somebody else's.
        let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        let _ = sender.send(());
    });
    if ended.recv_timeout(limit).is_ok() {
        return child.wait().map(Some);
    }
    let _ = killpg(pid, Signal::SIGKILL);
    child.wait()?;
    Ok(None)
}

/// What a stream brings, its first bytes only; read to its end, so that the writer never waits.
struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    ended: mpsc::Receiver<()>,
}

impl Collected {
    fn start(stream: Option<impl Read + Send + 'static>) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (sender, ended) = mpsc::channel::<()>();
        let kept = Arc::clone(&bytes);
        std::thread::spawn(move || {
            let _sender = sender;
            let mut buffer = [0; 4096];
            let Some(mut stream) = stream else { return };
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                let room = OUTPUT.saturating_sub(kept.len()).min(count);
                kept.extend_from_slice(buffer.get(..room).unwrap_or_default());
            }
        });
        Self { bytes, ended }
    }

    fn text(self) -> String {
        let _ = self.ended.recv_timeout(DRAIN);
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hooks(directory: &Path, hooks: &str) -> Hooks {
        let json = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},"annotations":{{"k":"v"}},"hooks":{hooks}}}"#
        );
        fs::write(directory.join("config.json"), &json).unwrap();
        let spec = crate::spec::parse(json.as_bytes()).unwrap();
        Hooks::of(&spec, "c1", directory, 42, directory.join("poststop")).unwrap()
    }

    fn shell(script: &str) -> String {
        format!(r#"{{"path":"/bin/sh","args":["sh","-c","{script}"],"env":["A=b"]}}"#)
    }

    #[test]
    fn hooks_get_the_state_and_run_in_order_and_poststop_once() {
        let dir = tempfile::tempdir().unwrap();
        let hooks = hooks(
            dir.path(),
            &format!(
                r#"{{"prestart":[{}],"createRuntime":[{}],"poststart":[{}],"poststop":[{}]}}"#,
                shell("echo prestart $A >> order"),
                shell("echo runtime >> order; cat > state"),
                shell("cat > running"),
                shell("echo stopped >> order; cat > stopped"),
            ),
        );
        hooks.create().unwrap();
        hooks.started().unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(read("order"), "prestart b\nruntime\n");
        let state: State = serde_json::from_str(&read("state")).unwrap();
        assert_eq!(
            (state.status.as_str(), state.pid, state.id.as_str()),
            ("creating", 42, "c1")
        );
        assert_eq!(state.annotations.get("k").map(String::as_str), Some("v"));
        assert!(read("running").contains(r#""status":"running""#));
        for _ in 0..2 {
            finish(dir.path(), &dir.path().join("poststop"));
        }
        assert_eq!(read("order"), "prestart b\nruntime\nstopped\n");
        assert!(!read("stopped").contains("pid"));
    }

    #[test]
    fn a_hook_that_fails_or_hangs_is_said_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let failing = hooks(
            dir.path(),
            &format!(
                r#"{{"createRuntime":[{},{}]}}"#,
                shell("exit 0"),
                shell("echo no network >&2; exit 3")
            ),
        );
        let text = failing.create().unwrap_err().text();
        let expected = "OCI runtime create failed: error running createRuntime hook #1: exit status 3, stdout: , stderr: no network";
        assert_eq!(text, expected);
        let hanging = hooks(
            dir.path(),
            r#"{"createRuntime":[{"path":"/bin/sh","args":["sh","-c","sleep 100 & sleep 100"],"timeout":1}]}"#,
        );
        let text = hanging.create().unwrap_err().text();
        assert!(text.contains("hook ran past specified timeout of 1s"), "{text}");
        let missing = hooks(dir.path(), r#"{"prestart":[{"path":"/nonexistent/hook"}]}"#);
        assert!(missing.create().unwrap_err().text().contains("start /nonexistent/hook"));
    }

    #[test]
    fn a_hook_dies_with_the_shim_but_a_poststop_hook_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let hooks = hooks(
            dir.path(),
            r#"{"poststop":[{"path":"/bin/sleep","args":["sleep","100"]}]}"#,
        );
        let hook = &Stage::Poststop.of(&hooks.spec)[0];
        let spawned = |stage| {
            let mut command = command(stage, hook, &hooks.state);
            // The thread that waits for a hook stands for the shim.
            std::thread::spawn(move || command.spawn().unwrap()).join().unwrap()
        };
        let mut killed = spawned(Stage::CreateRuntime);
        assert_eq!(killed.wait().unwrap().signal(), Some(libc::SIGKILL));
        let mut alive = spawned(Stage::Poststop);
        assert_eq!(alive.try_wait().unwrap(), None);
        alive.kill().unwrap();
        alive.wait().unwrap();
    }

    #[test]
    fn hooks_inside_the_container_are_refused() {
        let json = r#"{"ociVersion":"1.0.2","process":{"args":["a"],"cwd":"/","user":{"uid":0,"gid":0}},"hooks":{"createContainer":[{"path":"/bin/true"}]}}"#;
        let spec = crate::spec::parse(json.as_bytes()).unwrap();
        let refused = Hooks::of(&spec, "c", Path::new("/"), 1, "/x".into()).unwrap_err();
        assert!(refused.text().contains("createContainer"), "{}", refused.text());
    }
}
