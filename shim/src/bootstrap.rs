//! The program as containerd calls it: `start`, `delete`, `-info`, `-v`.
//!
//! `start` prints a plain `unix://` address and nothing else on either stream: that is what containerd 1.6, 1.7 and 2.x all
//! understand. The daemon it leaves behind is this program again; it inherits the listening socket as its standard input.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use protocol::containerd::bootstrap_api::BootstrapParams;
use protocol::containerd::protobuf::Message;
use protocol::containerd::types::introspection::{RuntimeInfo, RuntimeVersion};

use crate::args::{Action, Args};
use crate::cleanup;
use crate::daemon;
use crate::state_dir::socket_path;

/// Annotations that name the sandbox a container belongs to, in order of preference.
const GROUP_ANNOTATIONS: [&str; 2] = ["io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"];
/// Largest standard input that is read, in bytes.
const MAX_STDIN: u64 = 4 << 20;
/// Name of the environment variable that tells the daemon when `start` began, in microseconds since 1970; for its log.
pub const BEGAN: &str = "RAMET_SHIM_BEGAN";
/// Name of the environment variable with containerd's event address.
pub const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // `start` shares this stream with the address; after a failure there is none to spoil.
            eprintln!("containerd-shim-ramet-v2: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let args = Args::parse(std::env::args().skip(1))?;
    let here = std::env::current_dir().context("find the working directory")?;
    match args.action()? {
        Action::Start => print(start(&args, &here)?.as_bytes()),
        Action::Delete => {
            let bundle = if args.bundle.is_empty() {
                here
            } else {
                PathBuf::from(&args.bundle)
            };
            let response = cleanup::delete(&args, &bundle);
            print(&response.write_to_bytes().context("encode DeleteResponse")?)
        }
        Action::Info => print(&info().write_to_bytes().context("encode RuntimeInfo")?),
        Action::Version => print(format!("containerd-shim-ramet-v2 {}\n", env!("CARGO_PKG_VERSION")).as_bytes()),
        Action::Daemon => daemon::run(&args, &here),
        Action::Volumes => crate::volumes::serve(),
    }
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .context("write to standard output")
}

fn info() -> RuntimeInfo {
    let version = RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Default::default()
    };
    RuntimeInfo {
        name: "io.containerd.ramet.v2".to_owned(),
        version: Some(version).into(),
        ..Default::default()
    }
}

/// The id of the sandbox that the container in `bundle` belongs to, if its spec says so.
#[must_use]
pub fn group_of(bundle: &Path) -> Option<String> {
    let bytes = fs::read(bundle.join("config.json")).ok()?;
    let spec = crate::spec::parse(&bytes).ok()?;
    let group = GROUP_ANNOTATIONS
        .iter()
        .find_map(|key| crate::spec::annotation(&spec, key))?;
    crate::args::check_identifier("sandbox id", group).ok()?;
    Some(group.to_owned())
}

/// What containerd 2.3 and newer send on standard input; older ones send runtime options, which parse as the same message but
/// carry other names.
fn read_params(args: &Args) -> Option<BootstrapParams> {
    let mut bytes = Vec::new();
    std::io::stdin().take(MAX_STDIN).read_to_end(&mut bytes).ok()?;
    let params = BootstrapParams::parse_from_bytes(&bytes).ok()?;
    (params.instance_id == args.id && params.namespace == args.namespace).then_some(params)
}

fn start(args: &Args, bundle: &Path) -> anyhow::Result<String> {
    let began = SystemTime::now();
    let params = read_params(args);
    let group = group_of(bundle).unwrap_or_else(|| args.id.clone());
    let socket = socket_path(&args.address, &args.namespace, &group);
    let address = format!("unix://{}", socket.display());
    let listener = match listen(&socket)? {
        Some(listener) => listener,
        None if group != args.id => {
            write_address(bundle, &address)?;
            return Ok(address);
        }
        None => bail!("a shim for {} is already listening on {}", args.id, socket.display()),
    };
    let spawned =
        spawn_daemon(args, &group, params.as_ref(), listener, began).and_then(|()| write_address(bundle, &address));
    if spawned.is_err() {
        let _ = fs::remove_file(&socket);
    }
    spawned.map(|()| address)
}

/// A listening socket, or `None` if somebody answers there already.
fn listen(socket: &Path) -> anyhow::Result<Option<UnixListener>> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    if let Some(parent) = socket.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)
            .with_context(|| format!("make {}", parent.display()))?;
    }
    if UnixStream::connect(socket).is_ok() {
        return Ok(None);
    }
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket).with_context(|| format!("listen on {}", socket.display()))?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))
        .with_context(|| format!("protect {}", socket.display()))?;
    Ok(Some(listener))
}

fn spawn_daemon(
    args: &Args,
    group: &str,
    params: Option<&BootstrapParams>,
    listener: UnixListener,
    began: SystemTime,
) -> anyhow::Result<()> {
    let me = std::env::current_exe().context("find this program")?;
    let mut command = Command::new(me);
    command.args(["-namespace", &args.namespace, "-id", group, "-address", &args.address]);
    command.args(["-publish-binary", &args.publish_binary]);
    if args.debug || params.is_some_and(|p| p.log_level.value() < 0) {
        command.arg("-debug");
    }
    if std::env::var_os(TTRPC_ADDRESS).is_none()
        && let Some(params) = params.filter(|p| !p.containerd_ttrpc_address.is_empty())
    {
        command.env(TTRPC_ADDRESS, &params.containerd_ttrpc_address);
    }
    let began = began.duration_since(UNIX_EPOCH).unwrap_or_default();
    command.arg("daemon").env(BEGAN, began.as_micros().to_string());
    let socket: std::os::fd::OwnedFd = listener.into();
    command.stdin(socket).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("start the daemon")?;
    Ok(())
}

/// containerd 1.6 and 1.7 find the shim again by this file.
fn write_address(bundle: &Path, address: &str) -> anyhow::Result<()> {
    let temporary = bundle.join(".address");
    let path = bundle.join("address");
    fs::write(&temporary, address)
        .and_then(|()| fs::rename(&temporary, &path))
        .with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_of_a_pod_share_a_group() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(group_of(dir.path()), None);
        let config = r#"{"ociVersion":"1.0.2","process":{"args":["a"],"cwd":"/","user":{"uid":0,"gid":0}},
            "annotations":{"io.kubernetes.cri.sandbox-id":"pod1"}}"#;
        fs::write(dir.path().join("config.json"), config).unwrap();
        assert_eq!(group_of(dir.path()).as_deref(), Some("pod1"));
        fs::write(dir.path().join("config.json"), config.replace("pod1", "../etc")).unwrap();
        assert_eq!(group_of(dir.path()), None);
    }

    #[test]
    fn a_dead_socket_is_taken_over_and_a_live_one_found() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s/x");
        let listener = listen(&socket).unwrap().unwrap();
        assert!(listen(&socket).unwrap().is_none());
        drop(listener);
        assert!(listen(&socket).unwrap().is_some());
    }

    #[test]
    fn info_names_the_runtime() {
        let bytes = info().write_to_bytes().unwrap();
        assert_eq!(
            RuntimeInfo::parse_from_bytes(&bytes).unwrap().name,
            "io.containerd.ramet.v2"
        );
    }
}
