//! Where things are, and how programs are run.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// The target triple of `.cargo/config.toml`: everything is built for it, statically.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The source tree and its build directory.
pub(crate) struct Workspace {
    /// The directory of the workspace's Cargo.toml.
    pub(crate) root: PathBuf,
    /// Cargo's target directory.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Finds the workspace that this program was built from, and its target directory as Cargo sees it.
    pub(crate) fn locate() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().context("xtask has no parent directory")?.to_owned();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) => root.join(dir),
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    /// Where Cargo puts our programs.
    pub(crate) fn programs_dir(&self) -> PathBuf {
        self.target.join(TRIPLE).join("release")
    }

    /// The built program `name`; it may not exist.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.programs_dir().join(name)
    }

    /// The lab's own directory, made if needed.
    pub(crate) fn lab_dir(&self) -> Result<PathBuf> {
        let dir = self.target.join("lab");
        make_dir(&dir)?;
        Ok(dir)
    }

    /// The recipe files of the lab.
    pub(crate) fn recipe(&self, name: &str) -> PathBuf {
        self.root.join("tests/lab").join(name)
    }
}

/// Tells the user what is being done, on stderr.
pub(crate) fn say(what: impl AsRef<str>) {
    eprintln!("xtask: {}", what.as_ref());
}

/// Makes a directory and its parents.
pub(crate) fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))
}

/// Reads a whole file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

/// Reads a whole text file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// Writes a whole file under a temporary name and renames it, so that readers see all of it or the old one.
/// Leaves the file alone when it already has this content.
pub(crate) fn write_if_changed(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    fs::write(&temporary, content).with_context(|| format!("writing {}", temporary.display()))?;
    fs::rename(&temporary, path).with_context(|| format!("renaming to {}", path.display()))
}

/// Makes a file executable for everyone.
pub(crate) fn make_executable(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("making {} executable", path.display()))
}

/// The names in a directory that pass a test, sorted.
pub(crate) fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))? {
        found.push(entry.with_context(|| format!("listing {}", dir.display()))?.path());
    }
    found.sort();
    Ok(found)
}

/// Runs a command to its end with inherited output.
pub(crate) fn execute(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("running {}", describe(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", describe(command));
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed on stdout; its stderr is part of the error.
pub(crate) fn capture(command: &mut Command) -> Result<Vec<u8>> {
    let Output { status, stdout, stderr } = command
        .output()
        .with_context(|| format!("running {}", describe(command)))?;
    if !status.success() {
        bail!(
            "{} ended with {status}: {}",
            describe(command),
            String::from_utf8_lossy(&stderr).trim_end()
        );
    }
    Ok(stdout)
}

fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

/// The SHA-256 of some parts, each preceded by its length, as hex.
pub(crate) fn hash(parts: &[&[u8]]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part.len().to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_tells_where_parts_end() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
        assert_eq!(hash(&[b"a"]).len(), 64);
    }
}
