//! What any runtime does: the same tests with runc's shim and with ours.

use anyhow::{Result, ensure};
use e2e::images::{Archive, BUSYBOX, LAYERS, PYTHON};
use e2e::{Node, Runtime};

with_each_runtime! {
    fn a_command_prints_its_output_and_nothing_else(runtime) {
        let done = Node::shared().run(runtime, BUSYBOX, &["echo", "hello"]).succeed()?;
        ensure!(done.out() == "hello\n" && done.err().is_empty(), "stdout {:?}, stderr {:?}", done.out(), done.err());
        Ok(())
    }

    fn the_exit_code_is_the_commands_own(runtime) {
        let done = Node::shared().sh(runtime, "echo before; exit 7").finish()?.expect_code(7)?;
        ensure!(done.out() == "before\n", "{:?}", done.out());
        Ok(())
    }

    fn a_command_that_does_not_exist_is_named(runtime) {
        let done = Node::shared().run(runtime, BUSYBOX, &["no-such-command"]).finish()?.expect_code(1)?;
        let message = "exec: \"no-such-command\": executable file not found in $PATH";
        ensure!(done.err().contains(message), "{}", done.err());
        Ok(())
    }

    fn environment_directory_user_and_hostname_are_as_asked(runtime) {
        let script = "echo $COLOUR; pwd; id -u; id -g; echo $$; echo $PATH; cat /proc/self/status | grep CapEff";
        let run = Node::shared().sh(runtime, script).flag("--env=COLOUR=green").flag("--cwd=/var/tmp").flag("--user=1000:1000");
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let expected = ["green", "/var/tmp", "1000", "1000", "1", path, "CapEff:\t0000000000000000"];
        let lines = run.succeed()?.lines();
        ensure!(lines == expected, "{lines:?}");
        Ok(())
    }

    fn layers_are_merged_as_the_image_says(runtime) {
        let script = "cd /layered; cat replaced kept; ls opaque; stat -c %a kept; ls -A; test ! -e removed";
        let done = Node::shared().run(runtime, LAYERS, &["sh", "-c", script]).succeed()?;
        let expected = ["upper", "lower", "seen", "640", "kept", "opaque", "replaced"];
        ensure!(done.lines() == expected, "{:?}", done.lines());
        Ok(())
    }

    fn what_a_container_writes_is_its_own(runtime) {
        let script = "test ! -e /tmp/mine && echo mine > /tmp/mine && rm /etc/group && mkdir /etc/new && sync && cat /tmp/mine";
        for _ in 0..2 {
            let done = Node::shared().sh(runtime, script).succeed()?;
            ensure!(done.out() == "mine\n");
        }
        Ok(())
    }

    fn a_background_task_is_listed_measured_signalled_and_deleted(runtime) {
        let node = Node::shared();
        let script = "trap 'exit 43' TERM; echo started; while :; do sleep 1 & wait $!; done";
        let container = node.sh(runtime, script).detach()?;
        ensure!(node.task_status(container.id())?.as_deref() == Some("RUNNING"));
        let pid = node.task_pid(container.id())?;
        ensure!(pid > 1 && std::path::Path::new(&format!("/proc/{pid}")).exists(), "pid {pid}");
        let processes = node.ctr(["tasks", "ps", container.id()]).succeed()?;
        ensure!(processes.lines().len() >= 2, "{}", processes.out());
        let metrics = node.ctr(["tasks", "metrics", container.id()]).succeed()?;
        ensure!(metrics.out().contains("memory"), "{}", metrics.out());
        container.kill("SIGTERM")?;
        container.wait_for("STOPPED")?;
        let code = container.delete_task()?;
        ensure!(code == 43, "{code}");
        container.remove()
    }

    fn a_task_ended_by_a_signal_has_the_code_of_that_signal(runtime) {
        let container = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).detach()?;
        container.kill("SIGKILL")?;
        container.wait_for("STOPPED")?;
        let code = container.delete_task()?;
        ensure!(code == 137, "{code}");
        container.remove()
    }

    fn a_paused_task_stands_still_and_goes_on(runtime) {
        let node = Node::shared();
        let container = node.sh(runtime, "i=0; while :; do i=$((i+1)); echo $i > /tmp/i; sleep 0.1; done").detach()?;
        let now = || -> Result<String> { Ok(container.exec(&["cat", "/tmp/i"]).succeed()?.out()) };
        now()?;
        node.ctr(["tasks", "pause", container.id()]).succeed()?;
        ensure!(node.task_status(container.id())?.as_deref() == Some("PAUSED"));
        node.ctr(["tasks", "resume", container.id()]).succeed()?;
        let before = now()?;
        ensure!(e2e::wait_until(crate::support::ANSWER, || now().is_ok_and(|after| after != before)), "stuck at {before}");
        container.remove()
    }
}

#[test]
fn the_kernel_is_the_guests() -> Result<()> {
    let kernel =
        |runtime| -> Result<String> { Ok(Node::shared().run(runtime, BUSYBOX, &["uname", "-r"]).succeed()?.out()) };
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(kernel(Runtime::Runc)? == host);
    let script = "cat /proc/cmdline; cat /proc/sys/kernel/random/boot_id";
    let theirs = Node::shared().sh(Runtime::Ramet, script).succeed()?.out();
    ensure!(
        !theirs.contains(std::fs::read_to_string("/proc/cmdline")?.trim()),
        "the host's command line: {theirs}"
    );
    ensure!(!theirs.contains(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim()));
    Ok(())
}

#[test]
fn python_computes() -> Result<()> {
    let node = Node::shared();
    node.import(&Archive::Python)?;
    let done = node
        .run(Runtime::Ramet, PYTHON, &["python3", "-c", "print(6*7)"])
        .succeed()?;
    ensure!(
        done.out() == "42\n" && done.err().is_empty(),
        "stdout {:?}, stderr {:?}",
        done.out(),
        done.err()
    );
    Ok(())
}

#[test]
fn our_shim_runs_on_overlayfs_too() -> Result<()> {
    let script =
        "cat /layered/replaced; test ! -e /layered/removed; echo written > /layered/replaced; cat /layered/replaced";
    let done = Node::shared()
        .run(Runtime::RametOnOverlayfs, LAYERS, &["sh", "-c", script])
        .succeed()?;
    ensure!(done.out() == "upper\nwritten\n", "{:?}", done.out());
    Ok(())
}

#[test]
fn four_containers_run_at_once() -> Result<()> {
    let node = Node::shared();
    let runs: Vec<_> = (0..4)
        .map(|number| {
            let run = node.sh(Runtime::Ramet, &format!("echo {number}"));
            std::thread::spawn(move || run.succeed().map(|done| done.out()))
        })
        .collect();
    for (number, run) in runs.into_iter().enumerate() {
        let out = run.join().map_err(|_| anyhow::anyhow!("a run panicked"))??;
        ensure!(out == format!("{number}\n"), "run {number} printed {out:?}");
    }
    Ok(())
}
