//! The last steps inside a container: finds the program and becomes it, with the error texts that runc's users know.

use std::ffi::CString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};
use nix::errno::Errno;
use oci_spec::runtime::{LinuxSeccomp, Spec};

/// Runs a container's process.
#[derive(Clone)]
pub struct Program {
    /// Loaded just before the program starts: libcontainer filters the init process only.
    pub exec_seccomp: Option<LinuxSeccomp>,
}

impl Executor for Program {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let args = args(spec).map_err(ExecutorError::Other)?;
        let path = find(spec).map_err(ExecutorError::Other)?;
        let path = c_string(path.as_os_str().as_encoded_bytes()).map_err(ExecutorError::Other)?;
        let args = args
            .iter()
            .map(|a| c_string(a.as_bytes()))
            .collect::<Result<Vec<_>, _>>();
        let args = args.map_err(ExecutorError::Other)?;
        crate::sys::default_signals();
        if let Some(seccomp) = &self.exec_seccomp {
            libcontainer::seccomp::initialize_seccomp(seccomp)
                .map_err(|error| ExecutorError::Other(format!("load the seccomp profile: {error}")))?;
        }
        let Err(error) = nix::unistd::execv(&path, &args);
        Err(ExecutorError::Other(format!(
            "exec {:?}: {}",
            path.to_string_lossy(),
            describe(error)
        )))
    }

    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        find(spec)
            .map(drop)
            .map_err(ExecutorValidationError::ArgValidationError)
    }
}

fn args(spec: &Spec) -> Result<&[String], String> {
    let args = spec
        .process()
        .as_ref()
        .and_then(|p| p.args().as_deref())
        .unwrap_or_default();
    if args.is_empty() {
        Err("the process has no args".into())
    } else {
        Ok(args)
    }
}

/// The program of the spec, looked up as execvp(3) does with the process's own PATH.
fn find(spec: &Spec) -> Result<PathBuf, String> {
    let name = args(spec)?.first().map(String::as_str).unwrap_or_default();
    let env = spec
        .process()
        .as_ref()
        .and_then(|p| p.env().as_deref())
        .unwrap_or_default();
    let path = env
        .iter()
        .rev()
        .find_map(|entry| entry.strip_prefix("PATH="))
        .unwrap_or_default();
    look_up(name, path)
}

fn look_up(name: &str, path: &str) -> Result<PathBuf, String> {
    if name.contains('/') {
        return check(Path::new(name))
            .map(|()| name.into())
            .map_err(|error| match error {
                Errno::ENOENT => format!("exec: {name:?}: stat {name}: {}", describe(error)),
                error => format!("exec: {name:?}: {}", describe(error)),
            });
    }
    let mut denied = false;
    for directory in path.split(':').filter(|_| !name.is_empty()) {
        let candidate = Path::new(if directory.is_empty() { "." } else { directory }).join(name);
        match check(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(Errno::EACCES) => denied = true,
            Err(_) => {}
        }
    }
    let why = if denied {
        "permission denied"
    } else {
        "executable file not found in $PATH"
    };
    Err(format!("exec: {name:?}: {why}"))
}

/// Whether a path is something that could be executed.
fn check(path: &Path) -> Result<(), Errno> {
    let metadata = std::fs::metadata(path).map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
    if metadata.is_dir() {
        return Err(Errno::EISDIR);
    }
    if metadata.permissions().mode() & 0o111 == 0 {
        return Err(Errno::EACCES);
    }
    Ok(())
}

fn describe(error: Errno) -> String {
    error.desc().to_lowercase()
}

fn c_string(bytes: &[u8]) -> Result<CString, String> {
    CString::new(bytes).map_err(|_| "an argument contains a zero byte".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(directory: &Path, name: &str, mode: u32) -> String {
        let path = directory.join(name);
        std::fs::write(&path, "").expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a file");
        path.to_str().expect("utf-8").to_owned()
    }

    #[test]
    fn the_texts_are_those_of_runc() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().to_str().expect("utf-8");
        let plain = file(directory.path(), "plain", 0o644);
        let program = file(directory.path(), "program", 0o755);

        assert_eq!(
            look_up("program", &format!("/nowhere:{root}")),
            Ok(program.clone().into())
        );
        assert_eq!(look_up(&program, ""), Ok(program.into()));
        assert_eq!(
            look_up("nosuch", root),
            Err("exec: \"nosuch\": executable file not found in $PATH".into())
        );
        assert_eq!(look_up("plain", root), Err("exec: \"plain\": permission denied".into()));
        assert_eq!(
            look_up(&plain, root),
            Err(format!("exec: {plain:?}: permission denied"))
        );
        assert_eq!(look_up(root, ""), Err(format!("exec: {root:?}: is a directory")));
        assert_eq!(
            look_up("", root),
            Err("exec: \"\": executable file not found in $PATH".into())
        );
        assert_eq!(
            look_up("/nosuch", root),
            Err("exec: \"/nosuch\": stat /nosuch: no such file or directory".into())
        );
    }
}
