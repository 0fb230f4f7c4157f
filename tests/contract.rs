//! The contract between containerd and a shim, line by line, with runc's shim and with ours, driven without containerd.
//!
//! | contract | tests |
//! |---|---|
//! | `start`: arguments, environment, input and answer of containerd 1.6, 1.7, 2.x; both names of the Task service; `-info`; one shim for a sandbox | `start_answers_every_containerd…` |
//! | unknown container: not found; Connect never refuses; unknown calls are unimplemented; Shutdown ends an idle shim | `a_shim_without_a_container…` |
//! | a Create that fails leaves a shim that ends | `a_create_that_fails…` |
//! | Create, Start, State, Pids, Stats, Update, Pause, Resume, Kill, Wait, Delete: answers, codes, order and times of events | `a_task_goes_through_its_states…` |
//! | Exec, CloseIO, ResizePty: the same for further processes; init's exit is the last; a client that goes away hurts nobody | `processes::they_have…` |
//! | many processes at once, and one after the other, leave nothing | `processes::hundreds…`, on demand |
//! | `delete`: after a killed shim, again, without a bundle | `delete_cleans_up…` |
//! | containerd restarts: Connect and Pids answer | `crash.rs` |
//! | loggers, terminals of `ctr`, detaching | `stdio.rs` |
//! | OOM events; limits | `limits.rs` |

mod processes;

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{Empty, Mount, Status};
use containerd_shim_protos::bootstrap_api::BootstrapParams;
use containerd_shim_protos::cgroups_v2::metrics::Metrics;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::ttrpc::Code;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use e2e::Runtime;
use e2e::shim::{Bundle, Lines, NAMESPACE, Shim, Stdio, address, code, is_alive};
use serde_json::json;

const SIGKILL: u32 = 9;
const SIGTERM: u32 = 15;

/// An init that takes SIGTERM and has a child.
const INIT: &str = "trap 'exit 43' TERM; echo up; echo warning >&2; sleep 1000 & wait $!";

/// A container that was created and started, without streams.
fn running(runtime: Runtime) -> Result<Shim> {
    let shim = Shim::start(runtime, INIT)?;
    shim.create(&Stdio::default())?;
    shim.start_process("")?;
    Ok(shim)
}

fn time(at: &MessageField<Timestamp>) -> Result<SystemTime> {
    at.as_ref().map(|at| at.clone().into()).context("no time of exit")
}

fn status(shim: &Shim, exec: &str) -> Result<Status> {
    Ok(shim.state(exec)?.status.enum_value_or_default())
}

with_each_runtime! {
    fn a_shim_without_a_container_knows_none_and_ends_when_told(runtime) {
        let shim = Shim::start(runtime, "true")?;
        ensure!(shim.is_alive() && shim.connect()?.task_pid == 0);
        let written = fs::read_to_string(shim.bundle().path().join("address"))?;
        ensure!(written == format!("unix://{}", shim.socket().display()), "{written}");
        let nothing = Stdio::default();
        let answers = [
            ("state", code(&shim.state(""))), ("start", code(&shim.start_process(""))), ("wait", code(&shim.wait(""))),
            ("kill", code(&shim.kill("", SIGKILL, true))), ("delete", code(&shim.delete(""))), ("pids", code(&shim.pids())),
            ("exec", code(&shim.exec("x", &["true"], &nothing))), ("close io", code(&shim.close_io("", true))),
            ("resize", code(&shim.resize("", (80, 25)))), ("pause", code(&shim.pause())), ("resume", code(&shim.resume())),
            ("stats", code(&shim.stats())), ("update", code(&shim.update(&json!({})))), ("checkpoint", code(&shim.checkpoint())),
        ];
        for (call, answer) in answers {
            ensure!(answer == Err(Code::NOT_FOUND), "{call}: {answer:?}");
        }
        ensure!(code(&shim.call::<Empty>("NoSuchCall", &Empty::new())) == Err(Code::UNIMPLEMENTED));
        ensure!(shim.events().all().is_empty(), "{:?}", shim.events().all());
        shim.shut_down()?;
        shim.expect_end()?;
        ensure!(!shim.socket().exists());
        // That of runc's shim fails when nothing was created, which containerd only logs.
        for _ in 0..if runtime == Runtime::Runc { 0 } else { 2 } {
            shim.delete_command()?;
        }
        Ok(())
    }

    fn a_create_that_fails_leaves_a_shim_that_ends(runtime) {
        let shim = Shim::start(runtime, "true")?;
        let absent = Mount { type_: "bind".into(), source: "/no/such/root".into(), options: vec!["rbind".into()], ..Default::default() };
        let refused = shim.create_on(absent, &Stdio::default());
        ensure!(refused.is_err());
        ensure!(code(&shim.state("")) == Err(Code::NOT_FOUND) && code(&shim.delete("")) == Err(Code::NOT_FOUND));
        shim.shut_down()?;
        shim.expect_end()?;
        ensure!(shim.events().all().is_empty(), "{:?}", shim.events().all());
        Ok(())
    }

    fn a_task_goes_through_its_states_and_each_is_told(runtime) {
        let shim = Shim::start(runtime, INIT)?;
        let (out, err) = (shim.bundle().fifo()?, shim.bundle().fifo()?);
        let (lines, errors) = (Lines::of(&out), Lines::of(&err));
        let stdio = Stdio { stdout: out.clone(), stderr: err, ..Stdio::default() };
        // Created.
        let pid = shim.create(&stdio)?.pid;
        ensure!(pid > 1 && is_alive(pid), "pid {pid}");
        let state = shim.state("")?;
        ensure!(state.status == Status::CREATED.into() && state.pid == pid && Path::new(&state.bundle) == shim.bundle().path());
        ensure!(state.id == shim.bundle().id() && Path::new(&state.stdout) == out && !state.terminal);
        ensure!(shim.connect()?.task_pid == pid);
        ensure!(shim.pause().is_err() && shim.checkpoint().is_err());
        let again = code(&shim.create(&stdio));
        // runc's shim leaves it to runc, which has no code for it.
        ensure!(again == Err(Code::ALREADY_EXISTS) || (runtime == Runtime::Runc && again.is_err()), "{again:?}");
        let waiter = shim.waiter("");
        // Running.
        ensure!(shim.start_process("")?.pid == pid);
        ensure!(lines.next()? == "up" && errors.next()? == "warning");
        ensure!(status(&shim, "")? == Status::RUNNING);
        ensure!(shim.start_process("").is_err() && shim.delete("").is_err() && shim.resume().is_err());
        shim.shut_down()?;
        ensure!(shim.is_alive() && status(&shim, "")? == Status::RUNNING, "Shutdown ended a shim that has a container");
        ensure!(shim.pids()?.processes.iter().any(|process| process.pid == pid));
        shim.resize("", (80, 25))?;
        shim.close_io("", true)?;
        shim.update(&json!({ "pids": { "limit": 77 } }))?;
        let stats = shim.stats()?.stats.unwrap_or_default();
        ensure!(stats.type_url == "io.containerd.cgroups.v2.Metrics", "{}", stats.type_url);
        let metrics = Metrics::parse_from_bytes(&stats.value)?;
        ensure!(metrics.pids.limit == 77 && metrics.pids.current >= 2 && metrics.memory.usage > 0, "{metrics:?}");
        // Paused.
        shim.pause()?;
        ensure!(status(&shim, "")? == Status::PAUSED);
        ensure!(shim.pause().is_err() && shim.exec("x", &["true"], &Stdio::default()).is_err() && shim.delete("").is_err());
        ensure!(!shim.pids()?.processes.is_empty(), "containerd takes a shim without processes for a leaked one");
        shim.resume()?;
        ensure!(status(&shim, "")? == Status::RUNNING);
        // Stopped.
        let before = SystemTime::now();
        shim.kill("", SIGTERM, false)?;
        let exit = waiter.answer()?;
        ensure!(exit.exit_status == 43, "{}", exit.exit_status);
        let at = time(&exit.exited_at)?;
        ensure!(at >= before - Duration::from_millis(10) && at <= SystemTime::now(), "{before:?} {at:?}");
        let event = shim.events().wait("exit", "")?;
        ensure!(event.exited_at == exit.exited_at.clone().into_option() && event.status == 43 && event.pid == pid, "{event:?}");
        ensure!(shim.wait("")? == exit);
        let state = shim.state("")?;
        ensure!(state.status == Status::STOPPED.into() && state.exit_status == 43 && state.exited_at == exit.exited_at);
        ensure!(code(&shim.kill("", SIGKILL, false)) == Err(Code::NOT_FOUND));
        ensure!(shim.pause().is_err() && shim.checkpoint().is_err() && shim.exec("x", &["true"], &Stdio::default()).is_err());
        // Deleted.
        let deleted = shim.delete("")?;
        ensure!(deleted.pid == pid && deleted.exit_status == 43 && deleted.exited_at == exit.exited_at);
        lines.expect_end()?;
        errors.expect_end()?;
        ensure!(code(&shim.delete("")) == Err(Code::NOT_FOUND) && code(&shim.state("")) == Err(Code::NOT_FOUND));
        ensure!(code(&shim.wait("")) == Err(Code::NOT_FOUND) && shim.connect()?.task_pid == 0);
        let event = shim.events().wait("delete", "")?;
        ensure!(event.status == 43 && event.pid == pid && event.container == shim.bundle().id(), "{event:?}");
        let order = shim.events().order();
        ensure!(order == ["create", "start", "paused", "resumed", "exit", "delete"], "{order:?}");
        shim.shut_down()?;
        shim.expect_end()?;
        ensure!(!is_alive(pid));
        shim.delete_command().map(drop)
    }

    fn delete_cleans_up_after_a_killed_shim(runtime) {
        let shim = running(runtime)?;
        let pid = shim.connect()?.task_pid;
        shim.kill_process()?;
        let deleted = shim.delete_command()?;
        ensure!(deleted.exit_status == 137 && deleted.exited_at.is_some(), "{deleted:?}");
        ensure!(e2e::wait_until(Duration::from_secs(20), || !is_alive(pid)), "process {pid} lives on");
        shim.delete_command()?;
        ensure!(!runtime.is_vm() || !shim.socket().exists(), "the socket is left");
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        ensure!(!mounts.contains(shim.bundle().id()), "{mounts}");
        Ok(())
    }
}

/// Where ours goes further than the shim of containerd 1.7 does.
#[test]
fn start_answers_every_containerd_and_serves_both_names_of_the_service() -> Result<()> {
    let mut shim = Shim::start(Runtime::Ramet, "true")?;
    for service in ["containerd.task.v3.Task", "containerd.task.v2.Task"] {
        shim.speak(service);
        ensure!(shim.connect()?.shim_pid == shim.pid(), "{service}");
    }
    // Another container of its sandbox gets the same shim.
    let member = Bundle::new(Runtime::Ramet, &["true"])?.in_sandbox(shim.bundle().id())?;
    ensure!(member.id() != shim.bundle().id());
    // The socket's name has containerd's address in it.
    let joined = address(&member.start_at(shim.bundle()).finish()?)?;
    ensure!(joined == shim.socket(), "{}", joined.display());
    ensure!(fs::read_to_string(member.path().join("address"))?.ends_with(&joined.display().to_string()));
    // Its `delete` does not end the sandbox.
    member.delete_at(shim.bundle()).succeed()?;
    ensure!(shim.is_alive());
    drop((member, shim));
    // 1.6 tells little; 2.3 and later tell all on standard input.
    let params = |bundle: &Bundle| BootstrapParams {
        instance_id: bundle.id().to_owned(),
        namespace: NAMESPACE.to_owned(),
        containerd_ttrpc_address: bundle.events_socket().display().to_string(),
        ..Default::default()
    };
    for newest in [false, true] {
        let bundle = Bundle::new(Runtime::Ramet, &["true"])?;
        let input = if newest {
            params(&bundle).write_to_bytes()?
        } else {
            Vec::new()
        };
        let shim = Shim::start_by(bundle, |bundle| bundle.bare_start().stdin(input))?;
        if newest {
            // That the event arrives shows that it was read.
            shim.create(&Stdio::default())?;
            shim.events().wait("create", "")?;
            shim.delete("")?;
        }
        shim.shut_down()?;
        shim.expect_end()?;
        // The directory that it is called in is all that `delete` may count on.
        fs::remove_dir_all(shim.bundle().path())?;
        shim.bundle().delete_from(Path::new("/")).succeed()?;
    }
    let info = e2e::Invocation::new(e2e::node::SHIM).arg("-info").succeed()?;
    ensure!(RuntimeInfo::parse_from_bytes(&info.stdout)?.name == "io.containerd.ramet.v2" && info.stderr.is_empty());
    Ok(())
}
