//! The two ways out: data on stdout, talk on stderr. Neither panics when nobody reads it any more.

use std::fmt::Display;
use std::io::{self, BufWriter, IsTerminal, Stdout, Write};

use comfy_table::{ContentArrangement, Table, presets};

use crate::exit::{Failure, Outcome};
use crate::json::Object;

/// Characters of a text that a table shows; `show` and `--json` have the whole of it.
const CELL_MAX: usize = 60;

/// Data, on stdout.
#[derive(Debug)]
pub(crate) struct Out {
    stdout: BufWriter<Stdout>,
    /// One JSON object a line, instead of words and tables.
    pub(crate) json: bool,
}

impl Out {
    pub(crate) fn new(json: bool) -> Out {
        Out { stdout: BufWriter::new(io::stdout()), json }
    }

    /// Bytes as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.stdout.write_all(bytes).map_err(|error| Failure::output(&error))
    }

    /// A line of text.
    pub(crate) fn line(&mut self, text: impl Display) -> Outcome<()> {
        writeln!(self.stdout, "{text}").map_err(|error| Failure::output(&error))
    }

    /// A line with an object.
    pub(crate) fn object(&mut self, object: Object) -> Outcome<()> {
        self.line(object.end())
    }

    /// A table, unless it has no rows.
    pub(crate) fn table(&mut self, mut table: Table) -> Outcome<()> {
        if table.is_empty() {
            return Ok(());
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        self.line(table.trim_fmt())
    }

    /// Hands on what is written so far. What is not flushed is not said.
    pub(crate) fn flush(&mut self) -> Outcome<()> {
        self.stdout.flush().map_err(|error| Failure::output(&error))
    }
}

/// Talk, on stderr. If nobody listens, that is not a failure.
pub(crate) fn say(text: impl Display) {
    let _ = writeln!(io::stderr(), "relet: {text}");
}

/// An empty table: columns of plain text, no lines; as wide as the terminal, or as its content where there is none.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(header.iter().copied());
    table
}

/// A text on one line, with its control characters written out, so that no message can talk to the terminal.
pub(crate) fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if c.is_control() => cleaned.extend(c.escape_default()),
            c => cleaned.push(c),
        }
    }
    cleaned
}

/// The beginning of a text, for a cell of a table.
pub(crate) fn cell(text: &str) -> String {
    let mut start: String = text.chars().take(CELL_MAX).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    clean(&start)
}

/// What a table shows of something that may not be there.
pub(crate) fn or_dash(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// `1 message`, `2 messages`.
pub(crate) fn count(number: impl Display, noun: &str) -> String {
    let number = number.to_string();
    let plural = if number == "1" { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
