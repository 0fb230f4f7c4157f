//! `ramet doctor`: what this host has and lacks, each with a remedy.

mod host;

use std::process::ExitCode;

use containerd_client::services::v1::PluginsRequest;
use containerd_client::services::v1::snapshots::StatSnapshotRequest;
use serde::Serialize;
use tonic::Code;

use crate::client::{Answer, Client};
use crate::output::table;
use crate::{Connection, OutputFlag};

/// Arguments of `ramet doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    output: OutputFlag,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Ok,
    /// It works, but not as well as it could.
    Warn,
    Fail,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    outcome: Outcome,
    detail: String,
    /// Empty if nothing is to be done.
    remedy: String,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            outcome: Outcome::Ok,
            detail: detail.into(),
            remedy: String::new(),
        }
    }

    fn warn(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            name,
            outcome: Outcome::Warn,
            detail: detail.into(),
            remedy: remedy.into(),
        }
    }

    fn fail(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            name,
            outcome: Outcome::Fail,
            detail: detail.into(),
            remedy: remedy.into(),
        }
    }
}

/// Checks everything; the exit code says whether Ramet can run here.
pub(crate) async fn run(connection: &Connection, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let mut checks = host::checks();
    checks.extend(containerd_checks(connection).await);
    let failed = checks.iter().any(|check| check.outcome == Outcome::Fail);
    if arguments.output.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&serde_json::json!({"ok": !failed, "checks": checks}))?
        );
    } else {
        print!("{}", report(&checks));
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn report(checks: &[Check]) -> String {
    let mark = |outcome| match outcome {
        Outcome::Ok => "ok",
        Outcome::Warn => "warn",
        Outcome::Fail => "FAIL",
    };
    let rows: Vec<_> = checks
        .iter()
        .map(|check| {
            [
                mark(check.outcome).to_owned(),
                check.name.to_owned(),
                check.detail.clone(),
            ]
        })
        .collect();
    // The first line is the head of the table, one line for each check follows.
    let lines = table(["", "CHECK", "FOUND"], &rows);
    let mut out = String::new();
    let remedies = std::iter::once("").chain(checks.iter().map(|check| check.remedy.as_str()));
    for (line, remedy) in lines.lines().zip(remedies) {
        out.push_str(line);
        out.push('\n');
        if !remedy.is_empty() {
            out.push_str(&format!("      -> {remedy}\n"));
        }
    }
    let count = |outcome| checks.iter().filter(|check| check.outcome == outcome).count();
    out + &format!(
        "{} ok, {} to improve, {} missing\n",
        count(Outcome::Ok),
        count(Outcome::Warn),
        count(Outcome::Fail)
    )
}

async fn containerd_checks(connection: &Connection) -> Vec<Check> {
    let client = match Client::connect(connection).await {
        Ok(client) => client,
        Err(error) => {
            let remedy =
                "install and start containerd 1.6 or newer, run ramet as root, or give its socket with --address";
            return vec![Check::fail("containerd", format!("{error:#}"), remedy)];
        }
    };
    let version = client
        .version()
        .version(client.request(()))
        .await
        .to(|| "ask containerd for its version".to_owned());
    let version = match version {
        Ok(version) => containerd_version(&version.version),
        Err(error) => Check::fail("containerd", error.to_string(), "look at containerd's log"),
    };
    vec![version, snapshotter(&client, &connection.snapshotter).await]
}

fn containerd_version(version: &str) -> Check {
    let found = format!("version {version}");
    match host::major_minor(version) {
        Some(number) if number < (1, 6) => Check::fail("containerd", found, "install containerd 1.6 or newer"),
        _ => Check::ok("containerd", found),
    }
}

/// Whether containerd knows the snapshotter, and whether it answers.
async fn snapshotter(client: &Client, name: &str) -> Check {
    const NAME: &str = "snapshotter";
    let filters = vec![format!("type==io.containerd.snapshotter.v1,id=={name}")];
    let request = client.request(PluginsRequest { filters });
    match client
        .introspection()
        .plugins(request)
        .await
        .to(|| "list containerd's plugins".to_owned())
    {
        Ok(answer) if answer.plugins.is_empty() => {
            let remedy = format!(
                "add [proxy_plugins.{name}] with type = \"snapshot\" and address = \"/run/ramet-snapshotter/snapshotter.sock\" to /etc/containerd/config.toml and restart containerd"
            );
            return Check::fail(NAME, format!("containerd has no snapshotter {name}"), remedy);
        }
        Ok(_) => {}
        Err(error) => return Check::fail(NAME, error.to_string(), "look at containerd's log"),
    }
    // containerd knows the name from its configuration; only a call shows that somebody listens. No snapshot has this name.
    let request = StatSnapshotRequest {
        snapshotter: name.to_owned(),
        key: "ramet-doctor".to_owned(),
    };
    match client
        .snapshots()
        .stat(client.request(request))
        .await
        .to(|| format!("ask snapshotter {name}"))
    {
        Err(error) if error.code != Code::NotFound => {
            let remedy = "start it: systemctl start ramet-snapshotter, or run ramet-snapshotter";
            Check::fail(NAME, error.to_string(), remedy)
        }
        _ => Check::ok(NAME, format!("{name} is registered")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_each_remedy_below_its_line_and_a_sum() {
        let checks = [
            Check::ok("cpu", "svm"),
            Check::warn("kernel", "6.1", "Linux 6.7 is faster"),
            Check::fail("/dev/kvm", "does not exist", "modprobe kvm"),
        ];
        let expected = "      CHECK     FOUND
ok    cpu       svm
warn  kernel    6.1
      -> Linux 6.7 is faster
FAIL  /dev/kvm  does not exist
      -> modprobe kvm
1 ok, 1 to improve, 1 missing
";
        assert_eq!(report(&checks), expected);
    }

    #[test]
    fn the_json_form_has_lower_case_outcomes() {
        let json = serde_json::to_value(Check::warn("kernel", "6.1", "newer")).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"name": "kernel", "outcome": "warn", "detail": "6.1", "remedy": "newer"})
        );
    }

    #[test]
    fn old_containerd_is_refused_and_odd_versions_are_not() {
        assert_eq!(containerd_version("1.5.9").outcome, Outcome::Fail);
        assert_eq!(containerd_version("v1.7.24~ds1").outcome, Outcome::Ok);
        assert_eq!(containerd_version("2.3.4").outcome, Outcome::Ok);
        assert_eq!(containerd_version("unknown").outcome, Outcome::Ok);
    }
}
