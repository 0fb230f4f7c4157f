//! Further processes in a running container.

use anyhow::ensure;
use e2e::Node;
use e2e::images::BUSYBOX;

with_each_runtime! {
    fn a_process_is_added_with_its_own_streams_and_exit_code(runtime) {
        let container = Node::shared().sh(runtime, "echo of-init > /tmp/file; exec sleep 1000").detach()?;
        let script = "until cat /tmp/file; do sleep 0.1; done 2>/dev/null; echo error >&2; cat; exit 5";
        let done = container.exec(&["sh", "-c", script]).stdin("to exec\n").finish()?.expect_code(5)?;
        ensure!(done.out() == "of-init\nto exec\n", "{:?}", done.out());
        ensure!(done.err().contains("error"), "{:?}", done.err());
        let pids = container.exec(&["ps", "-o", "pid,comm"]).succeed()?;
        ensure!(pids.out().contains("1 sleep"), "{}", pids.out());
        container.remove()
    }

    fn a_command_that_does_not_exist_is_named(runtime) {
        let container = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).detach()?;
        let done = container.exec(&["no-such-command"]).finish()?;
        ensure!(done.code != 0 && done.err().contains("no-such-command"), "{} {}", done.code, done.err());
        // The container is none the worse for it.
        container.exec(&["true"]).succeed()?;
        container.remove()
    }
}
