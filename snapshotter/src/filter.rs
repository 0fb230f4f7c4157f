//! containerd's filter language, as far as snapshots have fields: `kind`, `name`, `parent`, `labels.<key>`.
//!
//! A filter is a list of selectors joined by commas, all of which must match: `field`, `field==value`, `field!=value`, `field~=regex`.
//! Field parts and values may be in double quotes, values also between slashes or bars.

use std::iter::Peekable;
use std::str::Chars;

use regex::{Regex, RegexBuilder};

use crate::metadata::{Info, Kind};

/// Several filters; a snapshot matches if one of them does, or if there are none.
#[derive(Debug)]
pub struct Filters(Vec<Vec<Selector>>);

/// A filter that cannot be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("filter {filter:?}: {what}")]
pub struct FilterError {
    filter: String,
    what: &'static str,
}

#[derive(Debug)]
struct Selector {
    field: Vec<String>,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Present,
    Equal(String),
    NotEqual(String),
    Matches(Regex),
}

/// Bounds what a compiled expression may take.
const REGEX_BYTES: usize = 1 << 20;

impl Filters {
    /// Parses them all.
    ///
    /// # Errors
    /// The first one that cannot be understood.
    pub fn parse(filters: &[String]) -> Result<Self, FilterError> {
        filters
            .iter()
            .map(|text| parse_filter(text))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Whether one of them matches.
    #[must_use]
    pub fn match_info(&self, info: &Info) -> bool {
        self.0.is_empty()
            || self
                .0
                .iter()
                .any(|filter| filter.iter().all(|selector| selector.matches(info)))
    }
}

impl Selector {
    fn matches(&self, info: &Info) -> bool {
        let value = field(info, &self.field);
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value == Some(wanted),
            Test::NotEqual(unwanted) => value.unwrap_or_default() != unwanted,
            Test::Matches(regex) => regex.is_match(value.unwrap_or_default()),
        }
    }
}

fn field<'a>(info: &'a Info, path: &[String]) -> Option<&'a str> {
    match (path.first()?.as_str(), &path[1..]) {
        ("kind", []) => Some(match info.kind {
            Kind::Active => "active",
            Kind::View => "view",
            Kind::Committed => "committed",
        }),
        ("name", []) => Some(&info.name),
        ("parent", []) => Some(info.parent.as_deref().unwrap_or_default()),
        ("labels", key) => info.labels.get(&key.join(".")).map(String::as_str),
        _ => None,
    }
}

fn parse_filter(text: &str) -> Result<Vec<Selector>, FilterError> {
    let fail = |what| FilterError {
        filter: text.to_owned(),
        what,
    };
    let mut chars = text.chars().peekable();
    let mut selectors = Vec::new();
    if text.is_empty() {
        return Ok(selectors);
    }
    loop {
        selectors.push(parse_selector(&mut chars).map_err(fail)?);
        match chars.next() {
            None => return Ok(selectors),
            Some(',') => {}
            Some(_) => return Err(fail("a comma is missing")),
        }
    }
}

fn parse_selector(chars: &mut Peekable<Chars<'_>>) -> Result<Selector, &'static str> {
    let mut path = vec![field_part(chars)?];
    while chars.next_if_eq(&'.').is_some() {
        path.push(field_part(chars)?);
    }
    let operator = match chars.peek() {
        None | Some(',') => {
            return Ok(Selector {
                field: path,
                test: Test::Present,
            });
        }
        Some('=' | '!' | '~') => chars.next(),
        Some(_) => return Err("an operator is missing"),
    };
    chars.next_if_eq(&'=').ok_or("an operator is not ==, != or ~=")?;
    let text = value(chars)?;
    let test = match operator {
        Some('=') => Test::Equal(text),
        Some('!') => Test::NotEqual(text),
        _ => Test::Matches(
            RegexBuilder::new(&text)
                .size_limit(REGEX_BYTES)
                .build()
                .map_err(|_| "a regular expression is malformed")?,
        ),
    };
    Ok(Selector { field: path, test })
}

fn field_part(chars: &mut Peekable<Chars<'_>>) -> Result<String, &'static str> {
    if chars.peek() == Some(&'"') {
        return quoted(chars);
    }
    let mut part = String::new();
    while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
        part.push(c);
    }
    if part.is_empty() {
        Err("a field is missing")
    } else {
        Ok(part)
    }
}

fn value(chars: &mut Peekable<Chars<'_>>) -> Result<String, &'static str> {
    match chars.peek() {
        Some('"') => quoted(chars),
        Some(&mark @ ('/' | '|')) => {
            chars.next();
            let mut text = String::new();
            loop {
                match chars.next() {
                    Some(c) if c == mark => return Ok(text),
                    Some('\\') if chars.peek() == Some(&mark) => text.extend(chars.next()),
                    Some(c) => text.push(c),
                    None => return Err("a quote is not closed"),
                }
            }
        }
        _ => {
            let mut text = String::new();
            while let Some(c) = chars.next_if(|c| *c != ',') {
                text.push(c);
            }
            if text.is_empty() {
                Err("a value is missing")
            } else {
                Ok(text)
            }
        }
    }
}

/// A double-quoted string with Go's escapes.
fn quoted(chars: &mut Peekable<Chars<'_>>) -> Result<String, &'static str> {
    chars.next();
    let mut text = String::new();
    loop {
        match chars.next() {
            Some('"') => return Ok(text),
            Some('\\') => text.push(escape(chars)?),
            Some(c) => text.push(c),
            None => return Err("a quote is not closed"),
        }
    }
}

fn escape(chars: &mut Peekable<Chars<'_>>) -> Result<char, &'static str> {
    let digits = match chars.next() {
        Some('n') => return Ok('\n'),
        Some('t') => return Ok('\t'),
        Some('r') => return Ok('\r'),
        Some(c @ ('"' | '\\' | '/' | '|')) => return Ok(c),
        Some('x') => 2,
        Some('u') => 4,
        Some('U') => 8,
        _ => return Err("an escape is malformed"),
    };
    let mut code = 0_u32;
    for _ in 0..digits {
        let digit = chars
            .next()
            .and_then(|c| c.to_digit(16))
            .ok_or("an escape is malformed")?;
        code = code
            .checked_mul(16)
            .and_then(|c| c.checked_add(digit))
            .ok_or("an escape is malformed")?;
    }
    char::from_u32(code).ok_or("an escape is malformed")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn info() -> Info {
        Info {
            name: "default/2/sha256:ab".into(),
            parent: Some("default/1/sha256:aa".into()),
            kind: Kind::Committed,
            labels: BTreeMap::from([
                ("containerd.io/snapshot.ref".to_owned(), "sha256:ab".to_owned()),
                ("foo".to_owned(), "b\"r".to_owned()),
            ]),
            created: crate::Time::default(),
            updated: crate::Time::default(),
        }
    }

    fn matches(filters: &[&str]) -> bool {
        let filters: Vec<String> = filters.iter().map(ToString::to_string).collect();
        Filters::parse(&filters).unwrap().match_info(&info())
    }

    #[test]
    fn the_forms_that_containerd_sends() {
        assert!(matches(&[]));
        assert!(matches(&[
            "labels.\"containerd.io/snapshot.ref\"==sha256:ab,parent==\"default/1/sha256:aa\""
        ]));
        assert!(!matches(&[
            "labels.\"containerd.io/snapshot.ref\"==sha256:ab,parent==other"
        ]));
        assert!(matches(&["parent==other", "kind==committed"]));
        assert!(matches(&["labels.foo"]));
        assert!(!matches(&["labels.bar"]));
        assert!(matches(&[r#"labels.foo=="b\"r""#]));
        assert!(matches(&["labels.bar!=x,name!=x"]));
        assert!(matches(&["name~=sha256.*b$", "name==x"]));
        assert!(matches(&["name~=/2.sha/"]));
        assert!(!matches(&["unknown==x"]));
    }

    #[test]
    fn malformed_filters_are_refused() {
        for bad in [
            "=",
            "name=",
            "name=x",
            "name==",
            "name==\"x",
            "name~=(",
            ",",
            "name,",
            "labels.",
            "name==\"\\q\"",
        ] {
            assert!(Filters::parse(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[a-z.=!~,\"\\\\/|x0-9 ]{0,40}") {
            if let Ok(filters) = Filters::parse(&[text]) {
                let _ = filters.match_info(&info());
            }
        }

        #[test]
        fn a_quoted_value_is_what_it_was(value in "\\PC{1,20}") {
            let mut info = info();
            info.name.clone_from(&value);
            let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
            let filters = Filters::parse(&[format!("name==\"{quoted}\"")]).unwrap();
            prop_assert!(filters.match_info(&info));
        }
    }
}
