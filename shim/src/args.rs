//! The command line containerd gives a shim: Go flags, then an action.

/// What is asked of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start (or find) the daemon and print its address.
    Start,
    /// Clean up after a dead sandbox.
    Delete,
    /// Print `RuntimeInfo`.
    Info,
    /// Print the version.
    Version,
    /// Be the daemon; used by `start` only.
    Daemon,
    /// Serve volumes; used by the daemon only.
    Volumes,
}

/// The parsed command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args {
    /// containerd namespace.
    pub namespace: String,
    /// Container (or sandbox) id.
    pub id: String,
    /// containerd's gRPC socket.
    pub address: String,
    /// Bundle directory; only given with `delete`.
    pub bundle: String,
    /// containerd's binary; unused, events go over ttrpc.
    pub publish_binary: String,
    /// More log lines.
    pub debug: bool,
    /// `-info`.
    pub info: bool,
    /// `-v`.
    pub version: bool,
    /// First word that is not a flag.
    pub action: String,
}

/// The command line cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// A flag without its value.
    #[error("flag needs a value: -{0}")]
    NoValue(String),
    /// A flag of no containerd version.
    #[error("unknown flag: -{0}")]
    UnknownFlag(String),
    /// Neither `start` nor `delete`.
    #[error("unknown action {0:?}; this program is started by containerd")]
    UnknownAction(String),
    /// A name that would not be safe as a path component.
    #[error("{what} {value:?} is not a valid containerd identifier")]
    BadIdentifier {
        /// `id` or `namespace`.
        what: &'static str,
        /// As given.
        value: String,
    },
}

impl Args {
    /// Parses `-flag value`, `-flag=value`, `--flag` and the action, as Go's `flag` package does.
    ///
    /// # Errors
    /// [`ArgsError`] for what Go would refuse, too.
    pub fn parse<I: IntoIterator<Item = String>>(words: I) -> Result<Self, ArgsError> {
        let mut args = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix('-').filter(|f| !f.is_empty()) else {
                args.action = word;
                break;
            };
            let flag = flag.strip_prefix('-').unwrap_or(flag);
            let (name, inline) = match flag.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (flag.to_owned(), None),
            };
            if let Some(switch) = args.switch(&name) {
                *switch = inline.as_deref() != Some("false");
                continue;
            }
            let Some(slot) = args.slot(&name) else {
                return Err(ArgsError::UnknownFlag(name));
            };
            match inline.or_else(|| words.next()) {
                Some(value) => *slot = value,
                None => return Err(ArgsError::NoValue(name)),
            }
        }
        Ok(args)
    }

    fn switch(&mut self, name: &str) -> Option<&mut bool> {
        match name {
            "debug" => Some(&mut self.debug),
            "info" => Some(&mut self.info),
            "v" | "version" => Some(&mut self.version),
            _ => None,
        }
    }

    fn slot(&mut self, name: &str) -> Option<&mut String> {
        match name {
            "namespace" => Some(&mut self.namespace),
            "id" => Some(&mut self.id),
            "address" => Some(&mut self.address),
            "bundle" => Some(&mut self.bundle),
            "publish-binary" => Some(&mut self.publish_binary),
            _ => None,
        }
    }

    /// What to do.
    ///
    /// # Errors
    /// An unknown action, or names that are unfit for it.
    pub fn action(&self) -> Result<Action, ArgsError> {
        if self.version {
            return Ok(Action::Version);
        }
        if self.info {
            return Ok(Action::Info);
        }
        let action = match self.action.as_str() {
            // It is told all it needs on its standard input.
            crate::volumes::ACTION => return Ok(Action::Volumes),
            "start" => Action::Start,
            "delete" => Action::Delete,
            "daemon" => Action::Daemon,
            other => return Err(ArgsError::UnknownAction(other.to_owned())),
        };
        check_identifier("id", &self.id)?;
        check_identifier("namespace", &self.namespace)?;
        Ok(action)
    }
}

/// Longest identifier containerd makes, in bytes.
const MAX_IDENTIFIER: usize = 76;

/// containerd's rule for identifiers, in short: letters, digits, `.`, `_`, `-`, starting with a letter or digit. Longer ones than
/// containerd's own are let through to 128 bytes.
///
/// # Errors
/// Names the value.
pub fn check_identifier(what: &'static str, value: &str) -> Result<(), ArgsError> {
    let fine = value.len() <= MAX_IDENTIFIER.max(128)
        && value.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && value
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fine {
        Ok(())
    } else {
        Err(ArgsError::BadIdentifier {
            what,
            value: value.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn reads_what_each_containerd_sends() {
        let args =
            parse("-namespace default -address /run/c.sock -publish-binary /usr/bin/containerd -id c1 start").unwrap();
        assert_eq!(
            (args.namespace.as_str(), args.id.as_str(), args.action()),
            ("default", "c1", Ok(Action::Start))
        );
        let args = parse("--namespace=k8s.io --id=c1 -bundle /b -debug delete").unwrap();
        assert!(args.debug);
        assert_eq!((args.bundle.as_str(), args.action()), ("/b", Ok(Action::Delete)));
        assert_eq!(parse("-info").unwrap().action(), Ok(Action::Info));
        assert_eq!(parse("-v").unwrap().action(), Ok(Action::Version));
    }

    #[test]
    fn refuses_paths_as_names() {
        for id in ["../x", "a/b", "", ".hidden", "-x"] {
            assert!(check_identifier("id", id).is_err(), "{id}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(words in proptest::collection::vec("[-=a-z]{0,8}", 0..8)) {
            if let Ok(args) = Args::parse(words) { let _ = args.action(); }
        }
    }
}
