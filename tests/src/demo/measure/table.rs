//! The results of a benchmark: numbers of both runtimes beside each other, and what there is to say about them.

use std::fmt;

use serde::Serialize;

use crate::report::median;

/// What a ratio of ours to runc's must be.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) enum Bar {
    /// Of times.
    AtMost(f64),
    /// Of throughputs.
    AtLeast(f64),
}

/// One thing that both runtimes did, in turns.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// For people.
    pub(crate) what: String,
    /// Of the values.
    pub(crate) unit: &'static str,
    /// Ours.
    pub(crate) ramet: Vec<f64>,
    /// runc's.
    pub(crate) runc: Vec<f64>,
    /// What the ratio must be, if anything was promised.
    pub(crate) bar: Option<Bar>,
}

impl Row {
    /// A row without values.
    pub(crate) fn new(what: impl Into<String>, unit: &'static str, bar: Option<Bar>) -> Self {
        Self {
            what: what.into(),
            unit,
            ramet: Vec::new(),
            runc: Vec::new(),
            bar,
        }
    }

    /// Ours to runc's, of medians.
    pub(crate) fn ratio(&self) -> f64 {
        median(&self.ramet) / median(&self.runc)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ramet, runc, ratio) = (median(&self.ramet), median(&self.runc), self.ratio());
        write!(
            f,
            "{:<50} {ramet:>10.1} {runc:>10.1} {:<7} {ratio:>7.2}   ",
            self.what, self.unit
        )?;
        let (sign, bar, is_reached) = match self.bar {
            None => return writeln!(f, "shown"),
            Some(Bar::AtMost(bar)) => ("<=", bar, ratio <= bar),
            Some(Bar::AtLeast(bar)) => (">=", bar, ratio >= bar),
        };
        writeln!(f, "{sign} {bar:<4} {}", if is_reached { "reached" } else { "missed" })
    }
}

/// A part of a whole that took time; the parts follow each other without gaps.
#[derive(Debug, Serialize)]
pub(crate) struct Stage {
    /// For people.
    pub(crate) what: String,
    /// One for each run.
    pub(crate) ms: Vec<f64>,
}

/// Memory of one sandbox's processes at one stage, in MiB.
#[derive(Debug, Serialize)]
pub(crate) struct Memory {
    /// When.
    pub(crate) stage: &'static str,
    /// Resident pages of the VMM, those of files that it shares with other VMMs among them.
    pub(crate) vmm_resident: f64,
    /// Pages that the VMM wrote: they are its alone.
    pub(crate) vmm_private: f64,
    /// Resident pages of the shim.
    pub(crate) shim_resident: f64,
    /// Pages that the shim wrote.
    pub(crate) shim_private: f64,
}

/// Everything that a benchmark found.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Measured {
    /// What was compared.
    pub(crate) rows: Vec<Row>,
    /// A cold start of ours, stage by stage.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) stages: Vec<Stage>,
    /// What goes on beside the stages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) beside: Vec<Stage>,
    /// An idle VM, stage by stage.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) memory: Vec<Memory>,
    /// For people.
    pub(crate) notes: Vec<String>,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<50} {:>10} {:>10} {:<7} {:>7}   bar",
            "medians", "ramet", "runc", "", "ratio"
        )?;
        for row in &self.rows {
            row.fmt(f)?;
        }
        self.show_stages(f)?;
        self.show_memory(f)?;
        for note in &self.notes {
            writeln!(f, "\n{note}")?;
        }
        Ok(())
    }
}

impl Measured {
    fn show_stages(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.stages.is_empty() {
            return Ok(());
        }
        let total: f64 = self.stages.iter().map(|stage| median(&stage.ms)).sum();
        writeln!(
            f,
            "\n{:<50} {:>10} {:>10}",
            "a cold start of ours by stage (medians)", "ms", "share"
        )?;
        for stage in &self.stages {
            let ms = median(&stage.ms);
            writeln!(f, "{:<50} {ms:>10.1} {:>9.1}%", stage.what, 100.0 * ms / total)?;
        }
        writeln!(f, "{:<50} {total:>10.1}", "sum")?;
        if !self.beside.is_empty() {
            writeln!(f, "\nwithin or beside these stages")?;
        }
        for stage in &self.beside {
            writeln!(f, "{:<50} {:>10.1}", stage.what, median(&stage.ms))?;
        }
        Ok(())
    }

    fn show_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.memory.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "\n{:<50} {:>10} {:>10} {:>10} {:>10}",
            "host memory of an idle VM, MiB", "VMM res.", "private", "shim res.", "private"
        )?;
        for row in &self.memory {
            writeln!(
                f,
                "{:<50} {:>10.1} {:>10.1} {:>10.1} {:>10.1}",
                row.stage, row.vmm_resident, row.vmm_private, row.shim_resident, row.shim_private
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ramet: f64, runc: f64, bar: Bar) -> String {
        let mut row = Row::new("something", "ms", Some(bar));
        row.ramet = vec![ramet, 1000.0 * ramet, ramet];
        row.runc = vec![runc];
        row.to_string()
    }

    #[test]
    fn a_row_judges_the_ratio_of_medians() {
        assert!(row(30.0, 10.0, Bar::AtMost(4.0)).contains("3.00   <= 4    reached"));
        assert!(row(50.0, 10.0, Bar::AtMost(4.0)).ends_with("missed\n"));
        assert!(row(6.0, 10.0, Bar::AtLeast(0.5)).ends_with("reached\n"));
        assert!(row(4.0, 10.0, Bar::AtLeast(0.5)).contains(">= 0.5  missed"));
    }

    #[test]
    fn shares_are_of_the_sum() {
        let stage = |what: &str, ms| Stage {
            what: what.into(),
            ms: vec![ms],
        };
        let measured = Measured {
            stages: vec![stage("kernel", 75.0), stage("agent", 25.0)],
            ..Measured::default()
        };
        let text = measured.to_string();
        assert!(text.contains("75.0%") && text.contains("25.0%"), "{text}");
    }
}
