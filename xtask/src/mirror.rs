//! Finds out where this machine gets Debian packages from, so that nothing of it is a constant here.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::capture;

/// What mmdebstrap needs to know about this machine's apt.
pub(crate) struct Mirror {
    /// The archive's address.
    pub(crate) uri: String,
    /// Options to hand on, such as proxies, in apt.conf syntax.
    options: Vec<String>,
}

impl Mirror {
    /// mmdebstrap for a directory, with what is the same for every tree: `variant` is `extract` (unpacked only) or `essential`
    /// (configured, too). More options may follow; then come suite, directory and [`Self::uri`].
    pub(crate) fn mmdebstrap(&self, variant: &str, packages: &str) -> Command {
        let mut command = Command::new("mmdebstrap");
        command
            .args(["--quiet", "--mode=root", "--format=directory"])
            .arg(format!("--variant={variant}"))
            .arg(format!("--include={packages}"))
            .args(self.options.iter().map(|option| format!("--aptopt={option}")));
        command
    }
}

/// Reads the apt configuration of this machine.
pub(crate) fn find() -> Result<Mirror> {
    let release = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    let codename = os_release_field(&release, "VERSION_CODENAME").context("/etc/os-release has no VERSION_CODENAME")?;
    for (name, text) in source_files(Path::new("/etc/apt"))? {
        let uri = if name.ends_with(".sources") {
            from_deb822(&text, &codename)
        } else {
            from_lines(&text, &codename)
        };
        if let Some(uri) = uri {
            return Ok(Mirror {
                uri,
                options: apt_options()?,
            });
        }
    }
    bail!("no Debian mirror for {codename} in /etc/apt/sources.list or /etc/apt/sources.list.d: add one for apt first")
}

fn source_files(apt: &Path) -> Result<Vec<(String, String)>> {
    let mut paths = vec![apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(apt.join("sources.list.d")) {
        paths.extend(entries.flatten().map(|entry| entry.path()));
    }
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        let name = path.to_string_lossy().into_owned();
        if path.exists() && (name.ends_with(".sources") || name.ends_with(".list")) {
            files.push((
                name,
                fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?,
            ));
        }
    }
    Ok(files)
}

fn os_release_field(text: &str, key: &str) -> Option<String> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    Some(line.trim_matches('"').to_owned())
}

/// The first URI of a stanza that has the suite `codename` and the component main.
fn from_deb822(text: &str, codename: &str) -> Option<String> {
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect();
    for stanza in text.split("\n\n") {
        let has = |key: &str, value: &str| deb822_values(stanza, key).iter().any(|found| found == value);
        let disabled = has("Enabled", "no");
        if has("Types", "deb") && has("Suites", codename) && has("Components", "main") && !disabled {
            return deb822_values(stanza, "URIs").into_iter().next();
        }
    }
    None
}

/// The words of a field, with its continuation lines.
fn deb822_values(stanza: &str, key: &str) -> Vec<String> {
    let mut values = Vec::new();
    let mut in_field = false;
    for line in stanza.lines() {
        let words = if line.starts_with([' ', '\t']) {
            line
        } else {
            let Some((name, words)) = line.split_once(':') else {
                continue;
            };
            in_field = name.eq_ignore_ascii_case(key);
            words
        };
        if in_field {
            values.extend(words.split_whitespace().map(str::to_owned));
        }
    }
    values
}

/// The URI of the first line `deb [options] URI codename … main …`.
fn from_lines(text: &str, codename: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut rest = line.trim().strip_prefix("deb ")?.trim_start();
        if rest.starts_with('[') {
            rest = rest.split_once(']')?.1;
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        match words.as_slice() {
            [uri, suite, components @ ..] if *suite == codename && components.contains(&"main") => {
                Some((*uri).to_owned())
            }
            _ => None,
        }
    })
}

/// The proxy and freshness settings of apt, as they would be written in apt.conf.
fn apt_options() -> Result<Vec<String>> {
    let dump = String::from_utf8_lossy(&capture(Command::new("apt-config").arg("dump").arg("Acquire"))?).into_owned();
    let wanted = [
        "Acquire::http::",
        "Acquire::https::",
        "Acquire::Check-Valid-Until ",
        "Acquire::Check-Date ",
    ];
    let is_set = |line: &&str| !line.ends_with("\"\";");
    let options = dump
        .lines()
        .filter(|line| wanted.iter().any(|prefix| line.starts_with(prefix)));
    Ok(options
        .filter(is_set)
        .map(|line| line.trim_end_matches(';').to_owned())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deb822_stanzas_are_told_apart() {
        let text = "Types: deb\nURIs: http://other.example/x\nSuites: nodistro\nComponents: main\n\n\
                    Types: deb\n# a comment\nURIs: http://mirror.example/debian\n http://second.example\n\
                    Suites: bookworm bookworm-updates\nComponents: main contrib\n";
        assert_eq!(
            from_deb822(text, "bookworm").as_deref(),
            Some("http://mirror.example/debian")
        );
        assert_eq!(from_deb822(text, "trixie"), None);
        assert_eq!(
            from_deb822(&text.replace("Types: deb\n#", "Enabled: no\nTypes: deb\n#"), "bookworm"),
            None
        );
    }

    #[test]
    fn one_line_sources_may_have_options() {
        let text = "# deb http://no.example bookworm main\ndeb-src http://src.example bookworm main\n\
                    deb http://sec.example bookworm-security main\n\
                    deb [signed-by=/k arch=amd64] http://mirror.example/debian bookworm contrib main\n";
        assert_eq!(
            from_lines(text, "bookworm").as_deref(),
            Some("http://mirror.example/debian")
        );
        assert_eq!(from_lines("deb http://x.example bookworm contrib", "bookworm"), None);
    }

    #[test]
    fn the_codename_is_unquoted() {
        assert_eq!(
            os_release_field("A=b\nVERSION_CODENAME=\"trixie\"\n", "VERSION_CODENAME").as_deref(),
            Some("trixie")
        );
    }
}
