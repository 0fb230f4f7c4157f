//! The results, as JSON and as the table of what was promised.

use std::fmt;

use serde::Serialize;

/// Everything that was measured.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Workers that do the whole set-up.
    pub(crate) cold: Cold,
    /// Plain containers.
    pub(crate) runc: Runc,
    /// The worker that is forked.
    pub(crate) parent: Parent,
    /// Its forks.
    pub(crate) forks: Forks,
    /// No fork sees what another did, nor does the parent.
    pub(crate) isolation: bool,
    /// Every fork has its own random numbers, boot id and host name.
    pub(crate) entropy_unique: bool,
    /// Every fork's clock is the host's.
    pub(crate) clock_ok: bool,
    /// Private memory of each idle fork's VMM beyond the guest pages that were written.
    pub(crate) unique_mib: Vec<f64>,
    /// Guest pages that each idle fork wrote.
    pub(crate) dirtied_mib: Vec<f64>,
    /// What is there now and was not there before.
    pub(crate) leftovers: Vec<String>,
    /// Instead of all the rest: what `compare` measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) comparison: Option<Comparison>,
}

/// See [`Report`].
#[derive(Debug, Default, Serialize)]
pub(crate) struct Cold {
    /// Start of `ctr run` to the worker's `ready`.
    pub(crate) ready_ms: Vec<f64>,
}

/// See [`Report`].
#[derive(Debug, Default, Serialize)]
pub(crate) struct Runc {
    /// A whole `ctr run --rm` of `true`.
    pub(crate) ready_ms: Vec<f64>,
    /// Start of `ctr run` to the first byte of `echo`.
    pub(crate) first_byte_ms: Vec<f64>,
}

/// See [`Report`].
#[derive(Debug, Default, Serialize)]
pub(crate) struct Parent {
    /// Start of `ctr run` to `ready`.
    pub(crate) provision_ms: f64,
    /// The whole `ramet checkpoint`.
    pub(crate) checkpoint_ms: f64,
    /// How long its VM stood still.
    pub(crate) pause_ms: f64,
    /// The checkpoint's layer.
    pub(crate) image_bytes: u64,
    /// Guest memory in it, unpacked.
    pub(crate) memory_bytes: u64,
    /// How long writing that took, beside the running guest.
    pub(crate) memory_write_ms: f64,
}

/// See [`Report`].
#[derive(Debug, Default, Serialize)]
pub(crate) struct Forks {
    /// The same of the first fork after the checkpoint. It finds cold caches, as the first container of each other kind does, and
    /// is not among the others.
    pub(crate) first_ms: f64,
    /// Start of `ctr run` to the first byte of the program that goes on.
    pub(crate) ready_ms: Vec<f64>,
    /// A `ctr version` before and after each fork, their mean: what the machine's own speed did meanwhile.
    pub(crate) yardstick_ms: Vec<f64>,
    /// All forks at once: until each has done its task.
    pub(crate) concurrent_total_ms: f64,
    /// Forks that did their task.
    pub(crate) ok: usize,
    /// Forks that were given one.
    pub(crate) asked: usize,
}

/// Fork ready, in milliseconds, of containers that differ in one respect.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Comparison {
    /// In which.
    pub(crate) what: &'static str,
    /// Of the small one.
    pub(crate) small_ms: Vec<f64>,
    /// Of the large one.
    pub(crate) large_ms: Vec<f64>,
}

/// The middle value; of an even number of values the mean of the two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

/// How far apart values lie, as a part of the middle one.
fn spread(values: &[f64]) -> f64 {
    (largest(values) - smallest(values)) / median(values)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NAN, f64::max)
}

fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NAN, f64::min)
}

impl Report {
    /// Everything that is true or false is as it must be. Times are shown, not judged: they depend on the machine.
    pub(crate) fn holds(&self) -> bool {
        if self.comparison.is_some() {
            return true;
        }
        let right = self.isolation && self.entropy_unique && self.clock_ok;
        self.forks.is_complete() && right && self.leftovers.is_empty()
    }

    fn rows(&self) -> Vec<Row> {
        let ready = median(&self.forks.ready_ms);
        let mut rows = vec![
            Row::new(
                "fork ready / cold worker ready (medians)",
                ready / median(&self.cold.ready_ms),
                Some(0.15),
            ),
            Row::new(
                "fork ready / runc `ctr run` of `true` (medians)",
                ready / median(&self.runc.ready_ms),
                Some(1.0),
            ),
            Row::new(
                "fork ready / runc first byte of `echo` (medians)",
                ready / median(&self.runc.first_byte_ms),
                None,
            ),
            Row::new(
                "spread of fork ready: (max - min) / median",
                spread(&self.forks.ready_ms),
                Some(0.3),
            ),
            Row::new(
                "  the same of `ctr version` beside them: the machine's own",
                spread(&self.forks.yardstick_ms),
                None,
            ),
        ];
        let pause = self.parent.pause_ms / self.parent.memory_write_ms;
        rows.push(Row::new("parent's pause / writing its memory", pause, None));
        rows.push(Row::new(
            "private memory of an idle fork beyond guest pages, MiB",
            largest(&self.unique_mib),
            Some(5.0),
        ));
        rows
    }
}

/// Numbers in a row.
fn list(values: &[f64]) -> String {
    let words: Vec<_> = values.iter().map(|value| format!("{value:.0}")).collect();
    words.join(" ")
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            small_ms,
            large_ms,
        } = self;
        writeln!(
            f,
            "\nforks ready, ms: small {}; large {}",
            list(small_ms),
            list(large_ms)
        )?;
        Row::new(
            format!("fork ready, {what}"),
            median(large_ms) / median(small_ms),
            Some(1.1),
        )
        .fmt(f)
    }
}

struct Row {
    what: String,
    value: f64,
    bar: Option<f64>,
}

impl Row {
    fn new(what: impl Into<String>, value: f64, bar: Option<f64>) -> Self {
        Self {
            what: what.into(),
            value,
            bar,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, value, bar } = self;
        match bar {
            Some(bar) => {
                let verdict = if value <= bar { "reached" } else { "missed" };
                writeln!(f, "{what:<58} {value:>8.3}   <= {bar:<5} {verdict}")
            }
            None => writeln!(f, "{what:<58} {value:>8.3}   shown"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(comparison) = &self.comparison {
            return comparison.fmt(f);
        }
        writeln!(f, "\ncold workers ready, ms: {}", list(&self.cold.ready_ms))?;
        writeln!(
            f,
            "runc `true`, ms: {}; first byte of `echo`: {}",
            list(&self.runc.ready_ms),
            list(&self.runc.first_byte_ms)
        )?;
        let parent = &self.parent;
        let mib = 1 << 20;
        writeln!(
            f,
            "parent: provisioned in {:.0} ms, checkpoint {:.0} ms ({} MiB of memory, layer of {} MiB), VM paused {:.1} ms",
            parent.provision_ms,
            parent.checkpoint_ms,
            parent.memory_bytes / mib,
            parent.image_bytes / mib,
            parent.pause_ms
        )?;
        writeln!(
            f,
            "  its memory was written in {:.0} ms from a frozen copy while it ran: the pause is the state and fork(2), not the copy",
            parent.memory_write_ms
        )?;
        writeln!(
            f,
            "forks ready, ms: {}; the first after the checkpoint, not counted: {:.0}",
            list(&self.forks.ready_ms),
            self.forks.first_ms
        )?;
        writeln!(f, "`ctr version` beside each, ms: {}", list(&self.forks.yardstick_ms))?;
        writeln!(
            f,
            "{} at once, all tasks done: {:.0} ms",
            self.forks.asked, self.forks.concurrent_total_ms
        )?;
        writeln!(f, "guest pages an idle fork wrote, MiB: {}\n", list(&self.dirtied_mib))?;
        for row in self.rows() {
            row.fmt(f)?;
        }
        let Self {
            isolation,
            entropy_unique,
            clock_ok,
            ..
        } = self;
        writeln!(f, "\ntasks {}/{}", self.forks.ok, self.forks.asked)?;
        writeln!(
            f,
            "isolation {isolation}, entropy unique {entropy_unique}, clock right {clock_ok}"
        )?;
        writeln!(f, "leftovers: {:?}", self.leftovers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_spread_is_the_range_by_the_median() {
        assert!((spread(&[110.0, 100.0, 90.0]) - 0.2).abs() < 1e-9);
    }

    #[test]
    fn a_comparison_shows_the_ratio_of_the_medians() {
        let report = Report {
            comparison: Some(Comparison {
                what: "of this / of that",
                small_ms: vec![100.0, 900.0, 100.0],
                large_ms: vec![105.0],
            }),
            ..Report::default()
        };
        let text = report.to_string();
        assert!(
            text.contains("of this / of that") && text.contains("1.050   <= 1.1   reached"),
            "{text}"
        );
        assert!(report.holds());
    }

    #[test]
    fn a_report_without_results_does_not_hold_and_can_be_shown() {
        let report = Report {
            leftovers: vec!["process: 7 ramet-vmm".into()],
            ..Report::default()
        };
        assert!(!report.holds());
        assert!(report.to_string().contains("process: 7 ramet-vmm"));
    }
}
