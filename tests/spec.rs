//! What the OCI spec asks of a container's process and its surroundings: the same in a guest as with runc.

use std::fs;

use anyhow::{Result, ensure};
use e2e::images::BUSYBOX;
use e2e::{Node, Runtime};

/// `key value` lines, each made by a shell command.
fn table(commands: &[(&str, &str)]) -> String {
    let line = |(key, command): &(&str, &str)| format!("echo \"{key} $({command} 2>&1 | tr '\\n' ' ')\"");
    commands.iter().map(line).collect::<Vec<_>>().join("; ")
}

/// The lines, without blanks at their ends.
fn trimmed(lines: Vec<String>) -> Vec<String> {
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

with_each_runtime! {
    fn a_plain_container_is_confined_as_usual(runtime) {
        let script = table(&[
            ("caps", "grep CapEff /proc/self/status | cut -f2"),
            ("nnp", "grep NoNewPrivs /proc/self/status | cut -f2"),
            ("files", "ulimit -n"),
            ("hostname", "hostname"),
            ("shm", "df -k /dev/shm | tail -n 1 | awk '{print $2}'"),
            ("shm-options", "grep ' /dev/shm ' /proc/mounts | tr ', ' '\\n\\n' | grep -E '^(tmpfs|no.*)$' | sort -u"),
            ("kcore", "head -c 1 /proc/kcore | wc -c"),
            ("keys", "cat /proc/keys | wc -c"),
            ("sysrq", "sh -c 'echo h >/proc/sysrq-trigger' 2>&1 | grep -o 'Read-only.*'"),
            ("sys", "sh -c 'echo x >/proc/sys/kernel/hostname' 2>&1 | grep -o 'Read-only.*'"),
            ("sysfs", "mkdir /sys/x 2>&1 | grep -o 'Read-only.*'"),
            ("nodes", "ls /dev | grep -E '^(null|zero|full|random|urandom|tty|ptmx|fd|stdin|stdout|stderr|shm|mqueue|pts|console)$'"),
            ("blocks", "find /dev -type b | wc -l"),
            ("processes", "ls /proc | grep -cE '^[0-9]+$' | awk '{print ($1 < 10)}'"),
        ]);
        let done = Node::shared().sh(runtime, &script).flag("--hostname=named").succeed()?;
        let expected = [
            "caps 00000000a80425fb", "nnp 1", "files 1024", "hostname named", "shm 65536", "shm-options nodev noexec nosuid tmpfs",
            "kcore 0", "keys 0", "sysrq Read-only file system", "sys Read-only file system", "sysfs Read-only file system",
            "nodes fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero", "blocks 0", "processes 1",
        ];
        let lines = trimmed(done.lines());
        ensure!(lines == expected, "{lines:#?}");
        Ok(())
    }

    fn a_user_by_name_has_its_groups_and_no_capabilities(runtime) {
        let run = Node::shared().sh(runtime, "id -u; id -g; id -G; grep CapEff /proc/self/status | cut -f2; touch /etc/x || echo denied");
        let lines = run.flag("--user=worker").succeed()?.lines();
        ensure!(lines[..2] == ["1000", "1000"] && lines[3..] == ["0000000000000000", "denied"], "{lines:?}");
        let mut groups: Vec<&str> = lines[2].split(' ').collect();
        groups.sort_unstable();
        ensure!(groups == ["1000", "29"], "{groups:?}");
        Ok(())
    }

    fn capabilities_and_directory_are_as_asked(runtime) {
        let script = "grep CapEff /proc/self/status | cut -f2; pwd; stat -c '%a %u' .; touch x; chown 1 x 2>/dev/null || echo denied";
        let run = Node::shared().sh(runtime, script).flag("--cap-add=CAP_NET_ADMIN").flag("--cap-drop=CAP_CHOWN").flag("--cwd=/not/there");
        let lines = run.succeed()?.lines();
        ensure!(lines == ["00000000a80435fa", "/not/there", "755 0", "denied"], "{lines:?}");
        Ok(())
    }

    fn a_read_only_root_and_a_tmpfs_are_as_asked(runtime) {
        let script = "touch /x 2>&1 | grep -o 'Read-only.*'; touch /data/x && echo written; touch /dev/shm/x && echo shared; \
            dd if=/dev/zero of=/data/y bs=1M count=3 2>/dev/null || echo full; stat -c %a /data; sh -c 'cp /bin/busybox /dev/shm/b; /dev/shm/b true' 2>/dev/null || echo noexec";
        let run = Node::shared().sh(runtime, script).flag("--read-only");
        let lines = run.flag("--mount=type=tmpfs,src=tmpfs,dst=/data,options=size=2097152:mode=1770").succeed()?.lines();
        ensure!(lines == ["Read-only file system", "written", "shared", "full", "1770", "noexec"], "{lines:?}");
        Ok(())
    }

    fn a_seccomp_profile_is_enforced_on_init_and_execs(runtime) {
        let directory = tempfile::tempdir()?;
        let profile = directory.path().join("profile.json");
        fs::write(&profile, r#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],
            "syscalls":[{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":28}]}"#)?;
        let script = "mkdir /tmp/x 2>&1 | grep -o 'No space.*'; grep Seccomp: /proc/self/status | cut -f2";
        let run = Node::shared().sh(runtime, &format!("({script}) >/tmp/init; exec sleep 1000"));
        let container = run.flag("--seccomp").flag(&format!("--seccomp-profile={}", profile.display())).detach()?;
        let expected = ["No space left on device", "2"];
        let lines = container.exec(&["sh", "-c", script]).succeed()?.lines();
        ensure!(lines == expected, "exec: {lines:?}");
        let init = || container.exec(&["cat", "/tmp/init"]).succeed().map(|done| done.lines()).unwrap_or_default();
        ensure!(e2e::wait_until(crate::support::ANSWER, || init() == expected), "init: {:?}", init());
        container.remove()
    }

    fn a_privileged_container_may_do_what_its_kernel_allows(runtime) {
        let script = "mkdir /tmp/m && mount -t tmpfs none /tmp/m && touch /tmp/m/x && echo mounted; echo x >/proc/sys/kernel/domainname && echo set; \
            test $(grep CapEff /proc/self/status | cut -f2) = $(grep CapBnd /proc/self/status | cut -f2) && echo all; \
            grep Seccomp: /proc/self/status | cut -f2; head -c 0 /proc/kcore && echo unmasked";
        let lines = Node::shared().sh(runtime, script).flag("--privileged").succeed()?.lines();
        ensure!(lines == ["mounted", "set", "all", "0", "unmasked"], "{lines:?}");
        Ok(())
    }

    fn new_privileges_are_allowed_on_demand(runtime) {
        let run = Node::shared().sh(runtime, "grep NoNewPrivs /proc/self/status | cut -f2").flag("--allow-new-privs");
        let done = run.succeed()?;
        ensure!(done.out() == "0\n", "{:?}", done.out());
        Ok(())
    }
}

/// Runs `true` with a flag that a virtual machine cannot honour; the message must have these words.
fn is_refused(flag: &str, words: &str) -> Result<()> {
    let run = Node::shared().run(Runtime::Ramet, BUSYBOX, &["true"]);
    let done = run.flag(flag).finish()?;
    ensure!(
        done.code != 0 && done.err().contains(words),
        "{} {}",
        done.code,
        done.err()
    );
    Ok(())
}

/// With runc it would be there.
#[test]
fn a_host_device_is_refused_by_name() -> Result<()> {
    is_refused(
        "--device=/dev/kvm",
        "host device /dev/kvm cannot be passed into a virtual machine",
    )
}

#[test]
fn another_containers_namespace_is_refused_by_name() -> Result<()> {
    is_refused(
        "--with-ns=ipc:/proc/1/ns/ipc",
        "ipc namespace of another process cannot be joined from a virtual machine",
    )
}
