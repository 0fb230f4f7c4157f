//! Networks: what CNI puts into a container's namespace is what the container has.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::cni::{self, GATEWAY, GATEWAY_6, MTU};
use e2e::images::BUSYBOX;
use e2e::{Container, Invocation, Node, Runtime};

use crate::support::{ANSWER, CheckpointImage};

/// Serves two files of known content and size on port 80.
const SERVER: &str = "mkdir /tmp/www && echo served > /tmp/www/small && \
    head -c 4000000 /dev/zero | tr '\\0' x > /tmp/www/large && exec httpd -f -p 80 -h /tmp/www";

/// Prints the last bytes of the answer to a request, made inside a container once the server listens. With nc, because a static
/// busybox crashes when wget looks up the port of "http".
fn fetch(address: &str, file: &str, bytes: u32) -> String {
    format!(
        "for i in 1 2 3 4 5 6 7 8 9; do printf 'GET /{file} HTTP/1.0\\r\\n\\r\\n' | nc -w 20 {address} 80 > /tmp/got; \
         test -s /tmp/got && break; sleep 1; done; tail -c {bytes} /tmp/got"
    )
}

fn server(runtime: Runtime) -> Result<Container> {
    cni::configure(None)?;
    Node::shared().sh(runtime, SERVER).flag("--cni").detach()
}

/// What this machine gets.
fn host_fetches(address: &str, file: &str) -> Result<String> {
    let script =
        format!("for i in 1 2 3 4 5 6 7 8 9; do wget -T 20 -qO- http://{address}/{file} && break; sleep 1; done");
    Ok(Invocation::new("busybox").args(["sh", "-c", &script]).succeed()?.out())
}

fn ip(arguments: &[&str]) -> Result<String> {
    Ok(Invocation::new("ip").args(arguments.iter().copied()).succeed()?.out())
}

with_each_runtime! {
    fn addresses_routes_and_mtu_are_those_that_cni_gave(runtime) {
        cni::configure(None)?;
        let container = Node::shared().run(runtime, BUSYBOX, &["sleep", "1000"]).flag("--cni").detach()?;
        let given = cni::addresses_of(container.id())?;
        let [four, six] = &given[..] else { anyhow::bail!("CNI gave {given:?}") };
        let script = "ip -o addr show dev eth0; ip route; ip -6 route; cat /sys/class/net/eth0/mtu; cat /sys/class/net/eth0/address";
        let inside = container.exec(&["sh", "-c", script]).succeed()?.out();
        for expected in [
            format!("inet {four}/24"),
            format!("inet6 {six}/64"),
            format!("default via {GATEWAY} dev eth0"),
            format!("default via {GATEWAY_6} dev eth0"),
            format!("\n{MTU}\n"),
        ] {
            ensure!(inside.contains(&expected), "no {expected:?} in {inside}");
        }
        // What CNI put there is what everybody else sees at the task's pid.
        let pid = Node::shared().task_pid(container.id())?.to_string();
        let link = Invocation::new("nsenter").args(["-n", "-t", &pid, "ip", "link", "show", "dev", "eth0"]).succeed()?.out();
        let mac = inside.lines().last().context("no MAC")?;
        ensure!(link.contains(mac), "MAC {mac} inside, outside {link}");
        container.remove()
    }

    fn the_gateway_answers_pings_of_both_families(runtime) {
        cni::configure(None)?;
        let script = format!("ping -c 2 -W 20 {GATEWAY} && ping -6 -c 2 -W 20 {GATEWAY_6}");
        let done = Node::shared().sh(runtime, &script).flag("--cni").succeed()?;
        ensure!(done.out().matches("2 packets received").count() == 2, "{}", done.out());
        Ok(())
    }

    fn two_containers_and_the_host_reach_each_other(runtime) {
        let server = server(runtime)?;
        let address = server.address()?;
        ensure!(host_fetches(&address, "small")? == "served\n");
        let client = Node::shared().sh(runtime, &fetch(&address, "small", 7)).flag("--cni").succeed()?;
        ensure!(client.out() == "served\n", "{:?} {:?}", client.out(), client.err());
        server.remove()
    }

    fn megabytes_arrive_whole(runtime) {
        let server = server(runtime)?;
        let address = server.address()?;
        let script = format!("{}; rm /tmp/got; {}", fetch(&address, "large", 4_000_000), fetch(&address, "small", 7));
        let client = Node::shared().sh(runtime, &script).flag("--cni").succeed()?;
        let out = client.out();
        ensure!(out.len() == 4_000_007 && out.trim_start_matches('x') == "served\n", "{} bytes, {:?}", out.len(), client.err());
        server.remove()
    }

    fn a_published_port_leads_into_the_container(runtime) {
        // The rules of a container that ended in the background stay until somebody runs CNI again.
        let port = if runtime.is_vm() { 8080 } else { 8081 };
        cni::configure(Some(port))?;
        let server = Node::shared().sh(runtime, SERVER).flag("--cni").detach();
        cni::configure(None)?;
        let server = server?;
        let seen = host_fetches(&format!("{GATEWAY}:{port}"), "small")?;
        ensure!(seen == "served\n", "{seen:?}");
        server.remove()
    }

    fn without_cni_there_is_only_loopback(runtime) {
        let script = "ip -o link | grep -v sit0 | grep UP; ping -c 1 127.0.0.1 | grep received; ping -c 1 -W 1 10.88.0.1 || echo unreachable";
        let done = Node::shared().sh(runtime, script).succeed()?;
        ensure!(!done.out().contains("eth0"), "{}", done.out());
        ensure!(done.out().contains("unreachable"), "{}", done.out());
        Ok(())
    }

    fn a_prepared_namespace_is_used_and_left_as_it_was(runtime) {
        let namespace = PreparedNamespace::make("e2e-prepared")?;
        for _ in 0..2 {
            let flag = format!("--with-ns=network:{}", namespace.path().display());
            let script = "ip -o -4 addr show dev in0 || ip -o -4 addr show dev eth0; ping -c 1 -W 20 10.99.0.1";
            let done = Node::shared().sh(runtime, script).flag(&flag).succeed()?;
            ensure!(done.out().contains("10.99.0.2/24") && done.out().contains("1 packets received"), "{}", done.out());
            ensure!(namespace.disciplines()?.is_empty(), "left behind: {}", namespace.disciplines()?);
        }
        Ok(())
    }
}

/// A namespace connected to this one, as a CRI would hand it over.
struct PreparedNamespace(&'static str);

impl PreparedNamespace {
    fn make(name: &'static str) -> Result<Self> {
        ip(&["netns", "add", name])?;
        let made = Self(name);
        ip(&[
            "link", "add", "out0", "type", "veth", "peer", "name", "in0", "netns", name,
        ])?;
        ip(&["addr", "add", "10.99.0.1/24", "dev", "out0"])?;
        ip(&["link", "set", "out0", "up"])?;
        ip(&["-n", name, "addr", "add", "10.99.0.2/24", "dev", "in0"])?;
        ip(&["-n", name, "link", "set", "in0", "up"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        Ok(made)
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(self.0)
    }

    /// What directs traffic in it.
    fn disciplines(&self) -> Result<String> {
        let listed = Invocation::new("ip")
            .args(["netns", "exec", self.0, "tc", "qdisc"])
            .succeed()?
            .out();
        Ok(listed.lines().filter(|line| line.contains("ingress")).collect())
    }
}

impl Drop for PreparedNamespace {
    fn drop(&mut self) {
        let _ = ip(&["link", "del", "out0"]);
        let _ = ip(&["netns", "del", self.0]);
    }
}

#[test]
fn a_fork_has_an_address_of_its_own_and_both_are_reached() -> Result<()> {
    let node = Node::shared();
    let parent = server(Runtime::Ramet)?;
    let parents = parent.address()?;
    ensure!(host_fetches(&parents, "small")? == "served\n");
    let image = CheckpointImage::of(node, &parent)?;
    // The same args: the server goes on in the fork.
    let fork = node.run(Runtime::Ramet, &image.name, &[]).flag("--cni").detach()?;
    let forks = cni::addresses_of(fork.id())?;
    ensure!(!forks.contains(&parents), "{forks:?}");
    ensure!(host_fetches(&forks[0], "small")? == "served\n");
    ensure!(
        host_fetches(&parents, "small")? == "served\n",
        "the parent is still there"
    );
    let seen = fork.exec(&["ip", "-o", "addr", "show", "dev", "eth0"]).succeed()?.out();
    ensure!(
        !seen.contains(&format!("{parents}/")) && seen.contains(&forks[0]),
        "{seen}"
    );
    // A new command in another fork talks to both.
    let script = format!("{}; {}", fetch(&parents, "small", 7), fetch(&forks[0], "small", 7));
    let third = node
        .run(Runtime::Ramet, &image.name, &["sh", "-c", &script])
        .flag("--cni")
        .succeed()?;
    ensure!(third.out() == "served\nserved\n", "{:?} {:?}", third.out(), third.err());
    // Without a network of its own a fork has nothing of its parent's.
    let alone = node
        .run(Runtime::Ramet, &image.name, &["sh", "-c", "ip -o -4 addr; ip route"])
        .succeed()?;
    ensure!(!alone.out().contains("10.88."), "{}", alone.out());
    fork.remove()?;
    parent.remove()
}

#[test]
fn the_hosts_own_network_is_refused_by_name() -> Result<()> {
    // By a path, too, as a pod on the host's network has it.
    for flag in ["--net-host", "--with-ns=network:/proc/1/ns/net"] {
        let run = Node::shared().run(Runtime::Ramet, BUSYBOX, &["true"]).flag(flag);
        let done = run.finish()?.expect_code(1)?;
        let words = "the host's network cannot be given to a virtual machine";
        ensure!(done.err().contains(words), "{flag}: {}", done.err());
    }
    Ok(())
}

#[test]
fn a_namespace_with_a_machine_in_it_is_refused_to_a_second_and_free_after_kill_9() -> Result<()> {
    let namespace = PreparedNamespace::make("e2e-shared")?;
    let flag = format!("--with-ns=network:{}", namespace.path().display());
    let node = Node::shared();
    let first = node
        .run(Runtime::Ramet, BUSYBOX, &["sleep", "1000"])
        .flag(&flag)
        .detach()?;
    let second = node
        .run(Runtime::Ramet, BUSYBOX, &["true"])
        .flag(&flag)
        .finish()?
        .expect_code(1)?;
    ensure!(
        second.err().contains("another virtual machine is connected"),
        "{}",
        second.err()
    );
    let pid = i32::try_from(node.task_pid(first.id())?)?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)?;
    first.wait_for("STOPPED")?;
    first.remove()?;
    ensure!(e2e::wait_until(ANSWER, || namespace
        .disciplines()
        .is_ok_and(|left| left.is_empty())));
    let third = node
        .sh(Runtime::Ramet, "ping -c 1 -W 20 10.99.0.1")
        .flag(&flag)
        .succeed()?;
    ensure!(third.out().contains("1 packets received"), "{}", third.out());
    Ok(())
}
