//! What people see: tables, progress, units.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};

/// Text that cannot make a terminal do anything: images and containers choose much of what is printed.
pub(crate) fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() {
                c.escape_debug().to_string()
            } else {
                c.into()
            }
        })
        .collect()
}

/// An error and its causes for the user.
pub(crate) fn print_error(error: &anyhow::Error) {
    eprintln!("ramet: {}", harmless(&format!("{error:#}")));
}

/// A table with aligned columns, two blanks apart.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| row.each_ref().map(|cell| harmless(cell)))
        .collect();
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .chain([head[column].len()])
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let head = head.map(str::to_owned);
    let mut out = String::new();
    for row in std::iter::once(&head).chain(&rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            // Writing to a String cannot go wrong.
            let _ = write!(line, "{cell:width$}  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// `1.50 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    BinaryBytes(bytes).to_string()
}

/// Args as one line of shell, for reading; cut at `most` characters.
pub(crate) fn command_line(args: &[String], most: usize) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let word = |arg: &String| match arg {
        arg if !arg.is_empty() && arg.chars().all(plain) => arg.clone(),
        // Control characters would let an image write to the terminal.
        arg => format!("'{}'", arg.escape_debug().to_string().replace('\'', "\\'")),
    };
    let line = args.iter().map(word).collect::<Vec<_>>().join(" ");
    if line.chars().count() <= most {
        return line;
    }
    line.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Steps and bytes: a moving line on a terminal, one line for each step elsewhere.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
}

impl Progress {
    /// On standard error; `quiet` keeps everything that is not a terminal silent.
    pub(crate) fn new(quiet: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::no_length();
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { bar, quiet }
    }

    /// Begins a step without a known end.
    pub(crate) fn step(&self, message: &str) {
        match &self.bar {
            Some(bar) => {
                bar.unset_length();
                bar.set_style(style("{spinner} {msg} {elapsed}"));
                bar.set_message(message.to_owned());
            }
            None if !self.quiet => eprintln!("{message}"),
            None => {}
        }
    }

    /// How far the step is.
    pub(crate) fn bytes(&self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            if bar.length().is_none() {
                bar.set_style(style(
                    "{spinner} {msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {eta}",
                ));
            }
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [
            ["a".to_owned(), "long cell".to_owned(), "x".to_owned()],
            ["bcd".to_owned(), "ü".to_owned(), String::new()],
        ];
        assert_eq!(
            table(["N", "WHAT", "C"], &rows),
            "N    WHAT       C\na    long cell  x\nbcd  ü\n"
        );
    }

    #[test]
    fn what_an_image_says_cannot_reach_the_terminal() {
        assert_eq!(harmless("a\u{1b}[2Jb\nü\u{9b}"), "a\\u{1b}[2Jb\\nü\\u{9b}");
        let text = table(["A"], &[["x\u{1b}]0;title\u{7}".to_owned()]]);
        assert!(text.lines().all(|line| !line.contains(char::is_control)), "{text:?}");
    }

    #[test]
    fn a_table_without_rows_is_its_head() {
        assert_eq!(table(["REF", "ID"], &[]), "REF  ID\n");
    }

    #[test]
    fn command_lines_are_quoted_harmless_and_short() {
        let args = ["python3", "-c", "print('hi')\n\u{1b}[31m", ""].map(str::to_owned);
        let line = command_line(&args, 100);
        assert!(line.starts_with("python3 -c '"), "{line}");
        assert!(line.chars().all(|c| !c.is_control()), "{line}");
        assert!(line.ends_with(" ''"), "{line}");
        assert_eq!(command_line(&["abcdef".to_owned()], 4), "abc…");
    }

    #[test]
    fn every_progress_template_is_valid() {
        for template in [
            "{spinner} {msg} {elapsed}",
            "{spinner} {msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {eta}",
        ] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
