//! Transcripts in Markdown: what a user types and what appears, checked by typing it.
//!
//! In a block fenced as `console` a line that begins with `$ ` is a command, lines that begin with `> ` right after it continue it (as a
//! shell prompts for them), and the lines up to the next command are what it prints on both its streams. `…` stands for any text
//! within a line, a line `[...]` for any number of lines; runs of blanks count as one. A command must end with 0 unless the next one is
//! `echo $?`. All commands of a document run in one shell.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};

/// Begins what a command prints, and ends it: a byte that no command here prints.
const MARK: char = '\u{1e}';

/// A command of a transcript.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Where it is in the document, from 1.
    pub line: usize,
    /// What is typed.
    pub command: String,
    /// The lines that are to appear.
    pub expected: Vec<String>,
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The lines that appeared.
    pub printed: Vec<String>,
    /// Its exit code.
    pub code: i32,
}

/// The commands of a document, in order.
///
/// # Errors
/// A block that does not begin with a command.
pub fn parse(document: &str) -> Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    let mut first = false;
    for (index, text) in document.lines().enumerate() {
        let line = index + 1;
        if text.starts_with("```") {
            inside = !inside && text == "```console";
            first = inside;
            continue;
        }
        if !inside {
            continue;
        }
        if let Some(command) = text.strip_prefix("$ ") {
            first = false;
            steps.push(Step {
                line,
                command: command.to_owned(),
                expected: Vec::new(),
            });
            continue;
        }
        ensure!(!first, "line {line}: a console block begins with a command");
        let step = steps.last_mut().context("no command")?;
        match text.strip_prefix("> ") {
            Some(more) if step.expected.is_empty() => {
                step.command.push('\n');
                step.command += more;
            }
            _ => step.expected.push(text.to_owned()),
        }
    }
    ensure!(!steps.is_empty(), "the document has no console block");
    Ok(steps)
}

/// A shell script that runs them all, for [`outcomes`]. Each finds the exit code of the one before in `$?`.
#[must_use]
pub fn script(steps: &[Step]) -> String {
    let mut script = "exec 2>&1\nramet_code=0\n".to_owned();
    for step in steps {
        // Writing to a String cannot go wrong.
        let _ = write!(
            script,
            "printf '\\036'\n(exit $ramet_code)\n{}\nramet_code=$?\nprintf '\\036%s\\036' $ramet_code\n",
            step.command
        );
    }
    script
}

/// What each command did, from what the [`script`] printed. Fewer than there are commands if the shell ended early.
#[must_use]
pub fn outcomes(output: &str) -> Vec<Outcome> {
    // Nothing, output, code, nothing, output, code, nothing …
    let parts: Vec<&str> = output.split(MARK).skip(1).collect();
    let outcome = |part: &[&str]| match part {
        [printed, code, ..] => Some(Outcome {
            printed: printed.lines().map(str::to_owned).collect(),
            code: code.parse().ok()?,
        }),
        _ => None,
    };
    parts.chunks(3).filter_map(outcome).collect()
}

/// The document's commands with what they really did, in the form of a transcript.
#[must_use]
pub fn record(steps: &[Step], outcomes: &[Outcome]) -> String {
    let mut record = String::new();
    for (step, outcome) in steps.iter().zip(outcomes) {
        let command = step.command.replace('\n', "\n> ");
        let _ = writeln!(record, "$ {command}");
        for line in &outcome.printed {
            let _ = writeln!(record, "{line}");
        }
    }
    record
}

/// Compares a document's commands with what they did.
///
/// # Errors
/// The first difference.
pub fn compare(steps: &[Step], outcomes: &[Outcome]) -> Result<()> {
    for (index, step) in steps.iter().enumerate() {
        let place = format!("line {}: `{}`", step.line, step.command);
        let Some(outcome) = outcomes.get(index) else {
            bail!("{place}: not reached");
        };
        ensure!(
            are_alike(&step.expected, &outcome.printed),
            "{place} is to print\n{}\nand printed\n{}",
            step.expected.join("\n"),
            outcome.printed.join("\n")
        );
        let is_told = steps.get(index + 1).is_some_and(|next| next.command == "echo $?");
        ensure!(
            outcome.code == 0 || is_told,
            "{place} ended with {}; it printed\n{}",
            outcome.code,
            outcome.printed.join("\n")
        );
    }
    Ok(())
}

/// Whether lines are as expected, with `[...]` for any number of lines.
fn are_alike(expected: &[String], printed: &[String]) -> bool {
    match expected.split_first() {
        None => printed.is_empty(),
        Some((first, rest)) if first == "[...]" => {
            (0..=printed.len()).any(|skip| are_alike(rest, printed.get(skip..).unwrap_or_default()))
        }
        Some((first, rest)) => printed
            .split_first()
            .is_some_and(|(line, others)| is_alike(first, line) && are_alike(rest, others)),
    }
}

/// Whether a line is as expected, with `…` for any text.
fn is_alike(expected: &str, printed: &str) -> bool {
    let (expected, printed) = (one_blank(expected), one_blank(printed));
    let mut parts = expected.split('…');
    let Some(mut rest) = parts.next().and_then(|first| printed.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    let mut is_exact = true;
    while let Some(part) = parts.next() {
        is_exact = false;
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    !is_exact || rest.is_empty()
}

fn one_blank(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Invocation;

    const DOCUMENT: &str = "# Text\n```\n$ not this\n```\n```console\n$ echo a  b; x=1\na b\n$ cat <<END\n> one $x\n> END\none 1\n$ sh -c 'echo gone >&2; exit 3'\ng…e\n$ echo $?\n3\n```\n";

    fn run(document: &str) -> (Vec<Step>, Vec<Outcome>) {
        let steps = parse(document).unwrap();
        let done = Invocation::new("sh").args(["-c", &script(&steps)]).succeed().unwrap();
        let outcomes = outcomes(&done.out());
        (steps, outcomes)
    }

    #[test]
    fn what_a_document_says_is_what_the_shell_did() {
        let (steps, outcomes) = run(DOCUMENT);
        assert_eq!(steps.iter().map(|step| step.line).collect::<Vec<_>>(), [6, 8, 12, 14]);
        assert_eq!(
            outcomes.iter().map(|outcome| outcome.code).collect::<Vec<_>>(),
            [0, 0, 3, 0]
        );
        compare(&steps, &outcomes).unwrap();
        assert!(record(&steps, &outcomes).contains("$ cat <<END\n> one $x\n> END\none 1\n"));
    }

    #[test]
    fn differences_and_failures_are_told_by_line() {
        for (from, to, told) in [
            ("\na b", "\na c", "line 6"),
            ("one 1\n", "one 1\nmore\n", "line 8"),
            ("$ echo $?\n3\n", "$ echo 3\n3\n", "ended with 3"),
        ] {
            let (steps, outcomes) = run(&DOCUMENT.replace(from, to));
            let error = compare(&steps, &outcomes).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let (steps, outcomes) = run(DOCUMENT);
        assert!(compare(&steps, &outcomes[..2]).is_err());
        assert!(parse("```console\nno command\n```").is_err() && parse("text").is_err());
    }

    #[test]
    fn wildcards_stand_for_text_and_lines() {
        for (expected, printed) in [
            ("a…", "a"),
            ("…c", "abc"),
            ("a…c…e", "abcde"),
            ("a  b", "a b "),
            ("…", ""),
        ] {
            assert!(is_alike(expected, printed), "{expected} {printed}");
        }
        for (expected, printed) in [("a", "ab"), ("a…d", "abc"), ("a…a", "a"), ("", "a"), ("ab…ab", "abb")] {
            assert!(!is_alike(expected, printed), "{expected} {printed}");
        }
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        assert!(are_alike(&lines("a\n[...]\nz"), &lines("a\nb\nc\nz")) && are_alike(&lines("a\n[...]"), &lines("a")));
        assert!(!are_alike(&lines("a\n[...]\nz"), &lines("a\nb")));
    }
}
