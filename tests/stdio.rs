//! Standard streams.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Invocation, Node, Runtime, Session};

use crate::support::ANSWER;

with_each_runtime! {
    fn stdin_is_read_to_its_end_and_stderr_stays_apart(runtime) {
        let (mut session, container) = Node::shared().sh(runtime, "cat; echo problem >&2; echo end").session()?;
        session.send("one")?;
        ensure!(session.line(ANSWER)? == "one");
        session.close_stdin();
        let rest = session.rest(ANSWER)?;
        ensure!(session.wait(ANSWER)? == 0 && rest == "end\n" && session.stderr() == "problem\n", "{rest:?} {:?}", session.stderr());
        container.is_gone();
        Ok(())
    }

    fn two_hundred_thousand_lines_arrive_whole(runtime) {
        let done = Node::shared().run(runtime, BUSYBOX, &["seq", "1", "200000"]).succeed()?;
        let expected: String = (1..=200_000).map(|number| format!("{number}\n")).collect();
        ensure!(done.stdout == expected.as_bytes(), "{} of {} bytes", done.stdout.len(), expected.len());
        Ok(())
    }

    fn a_megabyte_goes_in_whole(runtime) {
        let input: Vec<u8> = (0..1 << 20).map(|place: u32| u8::try_from(place * 31 % 251).unwrap_or(0)).collect();
        let done = Node::shared().run(runtime, BUSYBOX, &["cat"]).stdin(input.clone()).succeed()?;
        ensure!(done.stdout == input, "{} of {} bytes", done.stdout.len(), input.len());
        Ok(())
    }

    fn a_conversation_goes_back_and_forth(runtime) {
        let (mut session, container) = Node::shared().sh(runtime, "while read line; do echo got $line; done; exit 3").session()?;
        for word in ["one", "two"] {
            session.send(word)?;
            let line = session.line(ANSWER)?;
            ensure!(line == format!("got {word}"), "{line:?}");
        }
        session.close_stdin();
        ensure!(session.wait(ANSWER)? == 3);
        container.is_gone();
        Ok(())
    }

    fn output_nobody_reads_does_not_hold_the_task_up(runtime) {
        // The command that started it is gone; less than a pipe's worth is printed.
        let container = Node::shared().sh(runtime, "seq 1 1000; exit 12").detach()?;
        container.wait_for("STOPPED")?;
        ensure!(container.delete_task()? == 12);
        container.remove()
    }

    fn a_logger_gets_both_streams_and_its_arguments(runtime) {
        let directory = tempfile::tempdir()?;
        let script = r#"echo "$1 $CONTAINER_ID $CONTAINER_NAMESPACE" >"$2/who"; exec 5>&-; cat <&3 >"$2/out" & cat <&4 >"$2/err" & wait"#;
        let uri = logger(directory.path(), script)?;
        let run = Node::shared().sh(runtime, "seq 1 30000; echo problem >&2; exit 4").flag(&format!("--log-uri={uri}"));
        let container = run.detach()?;
        container.wait_for("STOPPED")?;
        let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap_or_default();
        let expected: String = (1..=30_000).map(|number| format!("{number}\n")).collect();
        let whole = e2e::wait_until(ANSWER, || read("out") == expected && read("err") == "problem\n");
        ensure!(whole, "{} bytes, {:?}", read("out").len(), read("err"));
        ensure!(read("who") == format!("--to {} default\n", container.id()), "{:?}", read("who"));
        ensure!(container.delete_task()? == 4);
        container.remove()
    }

    fn a_logger_that_does_not_exist_is_named(runtime) {
        let done = Node::shared().sh(runtime, "true").flag("--log-uri=binary:///no/such/logger").detach();
        let said = format!("{:#}", done.err().context("it ran")?);
        ensure!(said.contains("/no/such/logger"), "{said}");
        Ok(())
    }

    fn a_log_file_is_appended_to_in_a_directory_that_is_made(runtime) {
        let directory = tempfile::tempdir()?;
        let log = directory.path().join("new/log");
        for word in ["one", "two"] {
            let run = Node::shared().sh(runtime, &format!("echo {word}; echo {word} >&2"));
            let container = run.flag(&format!("--log-uri=file://{}", log.display())).detach()?;
            container.wait_for("STOPPED")?;
            container.delete_task()?;
            container.remove()?;
        }
        let mut words: Vec<String> = fs::read_to_string(&log)?.lines().map(str::to_owned).collect();
        words.sort();
        ensure!(words == ["one", "one", "two", "two"], "{words:?}");
        Ok(())
    }

    fn a_client_that_was_killed_may_be_followed_by_another(runtime) {
        let node = Node::shared();
        let (mut session, container) = node.sh(runtime, "while read line; do echo got $line; done").session()?;
        session.send("one")?;
        ensure!(session.line(ANSWER)? == "got one");
        // Dropping it kills the client, which so cannot remove the container.
        drop(session);
        let mut attached = Session::start(&node.ctr(["tasks", "attach", container.id()]))?;
        attached.send("two")?;
        let line = attached.line(ANSWER)?;
        ensure!(line == "got two", "{line:?}");
        drop(attached);
        container.remove()
    }

    fn a_terminal_has_the_size_of_the_clients_and_follows_it(runtime) {
        let directory = tempfile::tempdir()?;
        let tty = directory.path().join("tty");
        let node = Node::shared();
        let id = e2e::container::fresh_id("tty");
        let wait = r#"size() { stty size 2>/dev/null; }; until size >/dev/null; do sleep 0.2; done; echo first $(size); until [ "$(size)" = "50 120" ]; do sleep 0.2; done; echo resized; test -t 0 -a -t 1 -a -t 2 && exit 6"#;
        let run = format!(
            "tty >{}; stty rows 40 cols 100; exec ctr run -t --rm --runtime {} --snapshotter {} {BUSYBOX} {id} sh -c '{wait}'",
            tty.display(), runtime.name(), runtime.snapshotter()
        );
        let mut session = Session::start(&Invocation::new("script").args(["-qec", &run, "/dev/null"]))?;
        let container = node.container(&id);
        let first = session.line(ANSWER)?;
        ensure!(first.trim() == "first 40 100", "{first:?}");
        let tty = fs::read_to_string(&tty)?;
        Invocation::new("stty").args(["-F", tty.trim(), "rows", "50", "cols", "120"]).succeed()?;
        let second = session.line(ANSWER)?;
        ensure!(second.trim() == "resized", "{second:?}");
        ensure!(session.wait(ANSWER)? == 6);
        container.is_gone();
        Ok(())
    }
}

/// Writes a logger and returns its URI, which tells it the directory as `--to DIRECTORY`.
fn logger(directory: &std::path::Path, script: &str) -> Result<String> {
    let program = directory.join("logger");
    fs::write(&program, format!("#!/bin/sh\n{script}\n"))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    // A slash needs no escaping in a query, but a client may do so.
    let to = directory.display().to_string().replace('/', "%2F");
    Ok(format!("binary://{}?--to={to}", program.display()))
}

/// With runc's shim the process writes into the logger's pipe itself and dies of it.
#[test]
fn a_logger_that_dies_takes_nothing_with_it() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let uri = logger(directory.path(), "exec 5>&-; head -n 1 <&3 >\"$2/out\"")?;
    let script = "echo one; sleep 1; i=0; while [ $i -lt 20 ]; do seq 1 5000 || exit 9; i=$((i+1)); done; exit 5";
    let run = Node::shared()
        .sh(Runtime::Ramet, script)
        .flag(&format!("--log-uri={uri}"));
    let container = run.detach()?;
    container.wait_for("STOPPED")?;
    ensure!(container.delete_task()? == 5);
    ensure!(fs::read_to_string(directory.path().join("out"))? == "one\n");
    container.remove()
}

/// `ctr` does not tell a shim of an end of stdin that came before the task was there (with runc's shim such a task waits for ever):
/// ours sees that the other end was closed.
#[test]
fn a_stdin_that_ends_at_once_ends_in_the_container_too() -> Result<()> {
    let done = Node::shared()
        .run(Runtime::Ramet, BUSYBOX, &["cat"])
        .stdin("hi\n")
        .succeed()?;
    ensure!(done.out() == "hi\n", "{:?}", done.out());
    Ok(())
}
