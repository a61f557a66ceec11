//! What a call writes: one line for each figure, and lines for settings and for what could not be done. `report.py` reads them.

use std::fmt::{Display, Write as _};
use std::fs::OpenOptions;
use std::io::Write as _;

use crate::contender::Contender;
use crate::knobs::knobs;
use crate::latencies::Latencies;
use crate::meter::Cost;
use crate::repeat::Errors;

/// Class, round, peer, setting, workload, figure; then `name=value` fields.
pub struct Row(String);

impl Row {
    /// A rate in messages a second, or what the workload says that it is.
    pub fn new(contender: &Contender, work: &str, figure: f64) -> Row {
        let Contender { peer, class, setting, .. } = contender;
        Row(format!("{class}\t{}\t{peer}\t{setting}\t{work}\t{figure:.2}", knobs().round))
    }

    /// Of the disk, without a contender.
    pub fn disk(what: &str, figure: f64) -> Row {
        Row(format!("-\t{}\tdisk\t-\tDISK {what}\t{figure:.2}", knobs().round))
    }

    pub fn field(mut self, name: &str, value: impl Display) -> Row {
        write!(self.0, "\t{name}={value}").expect("a String takes all");
        self
    }

    pub fn cost(self, cost: &Cost) -> Row {
        self.field("cpu", format_args!("{:.1}", cost.cpu))
            .field("others", format_args!("{:.0}", cost.others))
            .field("syncs", format_args!("{:.3}", cost.syncs))
    }

    pub fn latencies(self, latencies: &mut Latencies) -> Row {
        if latencies.is_empty() {
            return self;
        }
        let mut row = self.field("samples", latencies.len());
        for (name, of_thousand) in [("p50", 500), ("p99", 990), ("p99.9", 999), ("max", 1_000)] {
            row = row.field(name, format_args!("{:.1}", latencies.percentile(of_thousand)));
        }
        row
    }

    pub fn errors(self, errors: &Errors) -> Row {
        errors.iter().fold(self, |row, (text, count)| row.field("error", format_args!("{count} x {text}")))
    }

    pub fn write(self) {
        append("rows.tsv", &self.0);
    }
}

pub fn write_settings(contender: &Contender, version: &str, settings: &str) {
    let Contender { peer, class, setting, .. } = contender;
    append("settings.tsv", &format!("{class}\t{peer}\t{setting}\t{version}\t{settings}"));
    for (work, why) in contender.lacks {
        append("lacks.tsv", &format!("{class}\t{peer}\t{setting}\t{work}\t{why}"));
    }
}

pub fn write_failure(contender: &Contender, work: &str, why: &str) {
    let Contender { peer, class, setting, .. } = contender;
    append("failures.tsv", &format!("{class}\t{}\t{peer}\t{setting}\t{work}\t{why}", knobs().round));
}

fn append(file: &str, line: &str) {
    println!("{line}");
    std::fs::create_dir_all(&knobs().out).expect("the run's folder can be made");
    let file = OpenOptions::new().append(true).create(true).open(knobs().out.join(file));
    file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).expect("the run's folder takes rows");
}
