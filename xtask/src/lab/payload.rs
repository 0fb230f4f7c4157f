//! What travels into a lab: a read-only EROFS disk with our programs, the guest image, OCI images and the job.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::base::Base;
use crate::build;
use crate::cpio::Archive;
use crate::guest;
use crate::workspace::{Workspace, capture, list, make_dir, make_executable, read, read_text, say};

/// What differs from run to run besides the built files.
pub(crate) struct Contents<'a> {
    /// The shell script that is the job.
    pub(crate) script: String,
    /// `run` or `shell`.
    pub(crate) mode: &'a str,
    /// More programs, by name.
    pub(crate) programs: &'a [(String, PathBuf)],
}

/// Builds the payload disk in `run_dir`.
pub(crate) fn build(ws: &Workspace, run_dir: &Path, contents: &Contents<'_>) -> Result<PathBuf> {
    let root = run_dir.join("payload");
    for dir in ["bin", "share", "images"] {
        make_dir(&root.join(dir))?;
    }
    let mut missing = Vec::new();
    let built = build::PROGRAMS
        .iter()
        .flat_map(|(_, names)| *names)
        .map(|name| ((*name).to_owned(), ws.program(name)));
    for (name, path) in built.chain(contents.programs.iter().cloned()) {
        if path.exists() {
            copy(&path, &root.join("bin").join(&name))?;
        } else {
            missing.push(name);
        }
    }
    let image = guest::paths(ws);
    for path in [image.kernel, image.initramfs] {
        let name = path.file_name().unwrap_or_default().to_owned();
        if path.exists() {
            copy(&path, &root.join("share").join(&name))?;
        } else {
            missing.push(format!("guest image ({})", name.display()));
        }
    }
    if !missing.is_empty() {
        say(format!("not built, so not in the lab: {}", missing.join(", ")));
    }
    let images = ws.target.join("images");
    if images.is_dir() {
        for path in list(&images)? {
            if path.extension().is_some_and(|extension| extension == "tar") {
                copy(&path, &root.join("images").join(path.file_name().unwrap_or_default()))?;
            }
        }
    }
    copy(&ws.recipe("init"), &root.join("init"))?;
    make_executable(&root.join("init"))?;
    copy(&ws.recipe("containerd.toml"), &root.join("containerd.toml"))?;
    write(&root.join("job"), &(forwarded_environment() + &contents.script))?;
    write(&root.join("mode"), contents.mode)?;
    write(&root.join("terminal"), &terminal_size())?;
    let disk = run_dir.join("payload.erofs");
    capture(Command::new("mkfs.erofs").arg("-T0").arg(&disk).arg(&root))?;
    Ok(disk)
}

/// Builds the lab's initramfs in `run_dir`.
pub(crate) fn initramfs(ws: &Workspace, base: &Base, run_dir: &Path) -> Result<PathBuf> {
    let mut archive = Archive::new();
    for dir in ["bin", "dev", "modules", "proc", "root", "sys"] {
        archive.dir(dir);
    }
    archive.character_device("dev/console", 0o600, 5, 1);
    archive.file("bin/busybox", 0o755, &read(&base.busybox())?);
    let mut names = Vec::new();
    for module in list(&base.lab_modules())? {
        let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.file(&format!("modules/{name}"), 0o644, &read(&module)?);
        names.push(name);
    }
    let stage1 = read_text(&ws.recipe("stage1"))?.replace("@MODULES@", &names.join(" "));
    archive.file("init", 0o755, stage1.as_bytes());
    let path = run_dir.join("initramfs");
    fs::write(&path, archive.finish()).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// Variables of ours that mean something in the lab, as shell commands.
fn forwarded_environment() -> String {
    let forwarded = std::env::vars().filter(|(name, _)| name.starts_with("OPENAI_") || name == "RUST_LOG");
    forwarded
        .map(|(name, value)| format!("export {name}={}\n", quote(&value)))
        .collect()
}

/// Rows and columns of our terminal; empty when we have none.
fn terminal_size() -> String {
    let output = Command::new("stty")
        .arg("size")
        .stdin(std::process::Stdio::inherit())
        .output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

/// The job as a shell script: one word is a script already, more are a program with its arguments.
pub(crate) fn script(words: &[String]) -> String {
    match words {
        [script] => format!("{script}\n"),
        words => format!(
            "exec {}\n",
            words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
        ),
    }
}

/// Quotes a word for a POSIX shell.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A copy that a later build cannot change under our hands; shares blocks where the file system can.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn write(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_shell_unchanged() {
        let words = ["printf".to_owned(), "%s".to_owned(), "a 'b' $c \"d\"\n*".to_owned()];
        let output = Command::new("sh").arg("-c").arg(script(&words)).output().unwrap();
        assert_eq!(output.stdout, words[2].as_bytes());
    }

    #[test]
    fn one_word_is_a_script() {
        assert_eq!(script(&["a | b".to_owned()]), "a | b\n");
    }
}
