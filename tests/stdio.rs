//! Standard streams.

use anyhow::{Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Node, Runtime};

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
