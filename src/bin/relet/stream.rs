//! Stdin, line by line in bounded memory, and the batches that its lines are stored in.
//!
//! The rule for batches: lines are gathered as long as the next one is already here in whole, and stored before anything
//! could wait for more input. So a line is stored at once while stdin is slow, and many share a commit while it is fast.

use std::io::{self, BufRead, BufReader, ErrorKind, IsTerminal, Read};

use indicatif::{ProgressBar, ProgressStyle};
use relet::{Enqueued, Error, Message, Snapshot, Store};

use crate::exit::{Exit, Failure, Outcome, describe};
use crate::json::Object;
use crate::mark;
use crate::output::{Out, count, say};
use crate::pieces::{self, Cut, Pieces};

/// Bytes that are read from stdin at once.
const READ: usize = 1 << 20;
/// Lines in one commit, at most.
const BATCH_LINES: usize = 1_000;
/// Payload in one commit, in bytes, above which it is made.
const BATCH_BYTES: usize = 256 << 10;

/// A line of input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Its bytes, without the line break.
    Whole(Vec<u8>),
    /// It is longer than the limit, and was read past.
    TooLong { bytes: u64 },
}

/// Lines of an input, of which none takes more memory than its limit.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    input: BufReader<R>,
    limit: usize,
    number: u64,
    /// A line that was read, and is to be read again.
    again: Option<Vec<u8>>,
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(input: R, limit: usize) -> Lines<R> {
        Lines { input: BufReader::with_capacity(READ, input), limit, number: 0, again: None }
    }

    /// Whether the next line is here in whole, so that reading it does not wait.
    pub(crate) fn is_ready(&self) -> bool {
        self.again.is_some() || self.input.buffer().contains(&b'\n')
    }

    /// Has the line that was read last come again.
    pub(crate) fn put_back(&mut self, line: Vec<u8>) {
        self.number -= 1;
        self.again = Some(line);
    }

    /// The next line and its number, from 1 on. The last one needs no line break.
    pub(crate) fn next(&mut self) -> io::Result<Option<(u64, Line)>> {
        if let Some(line) = self.again.take() {
            self.number += 1;
            return Ok(Some((self.number, Line::Whole(line))));
        }
        let mut line = Vec::new();
        let (mut bytes, mut last) = (0_u64, None);
        loop {
            let buffer = match self.input.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            if buffer.is_empty() && bytes == 0 {
                return Ok(None);
            }
            bytes += part.len() as u64;
            last = part.last().copied().or(last);
            // What is taken off again is allowed for: a carriage return, and a byte order mark.
            if bytes <= self.limit as u64 + 1 + mark::UTF8.len() as u64 {
                line.extend_from_slice(part);
            } else {
                line = Vec::new();
            }
            let over = end.is_some() || buffer.is_empty();
            let used = part.len() + usize::from(end.is_some());
            self.input.consume(used);
            if over {
                break;
            }
        }
        self.number += 1;
        if last == Some(b'\r') {
            line.pop(); // Nothing, where the line was too long to be kept.
            bytes -= 1;
        }
        // The mark of the whole text is no part of its first line.
        if self.number == 1 && line.starts_with(mark::UTF8) {
            line.drain(..mark::UTF8.len());
            bytes -= mark::UTF8.len() as u64;
        }
        let line = if bytes <= self.limit as u64 { Line::Whole(line) } else { Line::TooLong { bytes } };
        Ok(Some((self.number, line)))
    }
}

/// What a line comes to.
pub(crate) enum Content<T> {
    Nothing,
    One(T),
    /// Its payload follows in pieces, on the next lines.
    InPieces(T, Cut),
}

/// What is wrong with a line.
pub(crate) enum Bad {
    /// The others may be good.
    Line(String),
    /// Nothing that follows can be read, either.
    Stream(String),
}

impl From<String> for Bad {
    fn from(problem: String) -> Bad {
        Bad::Line(problem)
    }
}

/// What a line can be stored as.
pub(crate) trait Entry: Clone {
    /// Stores all of them, or none.
    fn put(store: &Store, entries: Vec<Self>) -> relet::Result<Vec<Enqueued>>;

    /// Stores one, with this payload.
    fn put_from(self, store: &Store, payload: impl Read) -> relet::Result<Enqueued>;
}

/// A message for a queue.
impl Entry for (String, Message) {
    fn put(store: &Store, entries: Vec<Self>) -> relet::Result<Vec<Enqueued>> {
        let Some((queue, _)) = entries.first() else { return Ok(Vec::new()) };
        store.queue(queue).enqueue_all(entries.iter().map(|(_, message)| message.clone()))
    }

    fn put_from(self, store: &Store, payload: impl Read) -> relet::Result<Enqueued> {
        store.queue(&self.0).enqueue_from(self.1, payload)
    }
}

/// A message with its history.
impl Entry for Snapshot {
    fn put(store: &Store, entries: Vec<Self>) -> relet::Result<Vec<Enqueued>> {
        store.import(entries)
    }

    fn put_from(self, store: &Store, payload: impl Read) -> relet::Result<Enqueued> {
        store.import_from(self, payload)
    }
}

/// Stores what lines of stdin say, in batches, and keeps count.
pub(crate) struct Loader<'a, T> {
    store: &'a Store,
    out: &'a mut Out,
    bar: Option<ProgressBar>,
    /// Each with its line.
    batch: Vec<(u64, T)>,
    batch_bytes: usize,
    stored: u64,
    existing: u64,
    bad: u64,
    /// Why nothing can be printed any more. What is read is stored all the same.
    mute: Option<Failure>,
}

impl<'a, T: Entry> Loader<'a, T> {
    pub(crate) fn new(store: &'a Store, out: &'a mut Out) -> Loader<'a, T> {
        // No bar where it would run through what is being typed; without a terminal indicatif draws none.
        let bar = (!io::stdin().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{spinner} {human_pos} stored, {per_sec}, {elapsed}");
            ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        });
        Loader { store, out, bar, batch: Vec::new(), batch_bytes: 0, stored: 0, existing: 0, bad: 0, mute: None }
    }

    /// Reads all of stdin, and stores what `read` makes of its lines.
    pub(crate) fn load(mut self, limit: usize, mut read: impl FnMut(Vec<u8>) -> Result<Content<T>, Bad>) -> Outcome {
        let mut lines = Lines::new(io::stdin().lock(), limit);
        loop {
            if !lines.is_ready() {
                self.store_batch()?;
            }
            let next = lines.next().map_err(|error| pieces::unreadable(lines.number, &error))?;
            let Some((line, content)) = next else { break };
            let entry = match content {
                Line::Whole(bytes) => {
                    self.batch_bytes += bytes.len();
                    read(bytes)
                }
                Line::TooLong { bytes } => Err(Bad::Line(format!("{bytes} bytes are too long, the limit is {limit}"))),
            };
            match entry {
                Ok(Content::One(entry)) => self.batch.push((line, entry)),
                Ok(Content::InPieces(entry, cut)) => {
                    self.store_batch()?;
                    self.store_pieces(line, entry, Pieces::new(&mut lines, cut))?;
                }
                Ok(Content::Nothing) => {}
                Err(Bad::Line(problem)) => self.name_bad(line, &problem),
                Err(Bad::Stream(problem)) => {
                    self.store_batch()?;
                    let stopped = format!("line {line}: {problem}; it and those after it are not stored");
                    return Err(Failure::failed(stopped));
                }
            }
            if self.batch.len() >= BATCH_LINES || self.batch_bytes >= BATCH_BYTES {
                self.store_batch()?;
            }
        }
        self.store_batch()?;
        self.finish()
    }

    /// Stores what is gathered in one commit.
    fn store_batch(&mut self) -> Outcome<()> {
        self.batch_bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        if batch.is_empty() {
            return Ok(());
        }
        match T::put(self.store, batch.iter().map(|(_, entry)| entry.clone()).collect()) {
            Ok(enqueued) => {
                for ((line, _), enqueued) in batch.iter().zip(enqueued) {
                    self.stored(*line, enqueued);
                }
            }
            Err(error) if is_about_a_message(&error) => self.store_singly(&batch)?,
            Err(error) => return Err(stopped(&error, batch[0].0, batch[batch.len() - 1].0)),
        }
        if self.mute.is_none() {
            self.mute = self.out.flush().err();
        }
        Ok(())
    }

    /// One of these was refused, and all with it: finds out which.
    fn store_singly(&mut self, batch: &[(u64, T)]) -> Outcome<()> {
        for (line, entry) in batch {
            match T::put(self.store, vec![entry.clone()]) {
                Ok(enqueued) => enqueued.into_iter().for_each(|enqueued| self.stored(*line, enqueued)),
                Err(error) if is_about_a_message(&error) => self.name_bad(*line, &describe(&error)),
                Err(error) => return Err(stopped(&error, *line, batch[batch.len() - 1].0)),
            }
        }
        Ok(())
    }

    /// Stores one whose payload comes on the lines that follow.
    fn store_pieces(&mut self, line: u64, entry: T, mut pieces: Pieces<'_, impl Read>) -> Outcome<()> {
        let error = match entry.put_from(self.store, &mut pieces) {
            Ok(enqueued) => {
                self.stored(line, enqueued);
                return Ok(());
            }
            Err(error) => error,
        };
        match pieces::problem(&error) {
            Some((true, problem)) => self.name_bad(line, &problem),
            Some((false, problem)) => self.name(line, &problem),
            None if is_about_a_message(&error) => self.name_bad(line, &describe(&error)),
            None => return Err(stopped(&error, line, line)),
        }
        pieces.skip().map_err(|error| pieces::unreadable(line, &error))
    }

    fn stored(&mut self, line: u64, enqueued: Enqueued) {
        self.stored += u64::from(!enqueued.existing());
        self.existing += u64::from(enqueued.existing());
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
        if self.out.json && self.mute.is_none() {
            let object = Object::new().put("line", line).put("id", enqueued.id()).put("existing", enqueued.existing());
            self.mute = self.out.object(object).err();
        }
    }

    fn name_bad(&mut self, line: u64, problem: &str) {
        self.bad += 1;
        self.name(line, problem);
    }

    fn name(&self, line: u64, problem: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(format_args!("line {line}: {problem}"))),
            None => say(format_args!("line {line}: {problem}")),
        }
    }

    fn finish(self) -> Outcome {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let mut text = format!("{} stored", count(self.stored, "message"));
        if self.existing > 0 {
            text.push_str(&format!(", {} there already", self.existing));
        }
        if self.bad > 0 {
            text.push_str(&format!(", {} refused", count(self.bad, "line")));
        }
        say(text);
        match self.mute {
            Some(failure @ Failure::Told(..)) => Err(failure),
            _ if self.bad > 0 => Ok(Exit::Failed),
            _ => Ok(Exit::Done),
        }
    }
}

/// Whether the error would not be there without this message: what else is wrong would concern the next one as well.
fn is_about_a_message(error: &Error) -> bool {
    matches!(
        error,
        Error::PayloadTooLarge { .. }
            | Error::QueueName { .. }
            | Error::Text { .. }
            | Error::Range { .. }
            | Error::NotImported { .. }
    )
}

/// Says from which line on nothing is stored.
fn stopped(error: &Error, first: u64, last: u64) -> Failure {
    match error {
        Error::Indeterminate { .. } => Failure::with(
            error,
            format_args!("stopped: lines {first} to {last} may be stored, those after them are not"),
        ),
        _ => Failure::with(error, format_args!("stopped: line {first} and those after it are not stored")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &[u8], limit: usize) -> Vec<(u64, Line)> {
        // Single bytes at a time show that no line depends on where a read ends.
        let mut whole = Lines::new(input, limit);
        let mut slow = Lines { input: BufReader::with_capacity(1, input), limit, number: 0, again: None };
        let mut lines = Vec::new();
        while let Some(line) = whole.next().unwrap() {
            assert_eq!(slow.next().unwrap().as_ref(), Some(&line));
            lines.push(line);
        }
        assert_eq!(slow.next().unwrap(), None);
        lines
    }

    fn whole(text: &str) -> Line {
        Line::Whole(text.into())
    }

    #[test]
    fn lines_end_with_a_line_break_or_with_the_input() {
        assert_eq!(read(b"", 9), []);
        assert_eq!(read(b"\n", 9), [(1, whole(""))]);
        assert_eq!(read(b"a\r\n\nb", 9), [(1, whole("a")), (2, whole("")), (3, whole("b"))]);
        assert_eq!(read(b"a\rb\xff\n", 9), [(1, Line::Whole(b"a\rb\xff".into()))]);
    }

    #[test]
    fn a_line_over_the_limit_is_counted_and_costs_the_others_nothing() {
        assert_eq!(read(b"123\n1234\n12\n", 3), [(1, whole("123")), (2, Line::TooLong { bytes: 4 }), (3, whole("12"))]);
        assert_eq!(read(b"123\r\n1234\r\n", 3), [(1, whole("123")), (2, Line::TooLong { bytes: 4 })]);
        assert_eq!(read(&[b'x'; 100], 3), [(1, Line::TooLong { bytes: 100 })]);
    }

    #[test]
    fn a_long_line_is_not_kept() {
        let mut lines = Lines::new(io::repeat(b'x').take(64 << 20), 1 << 10);
        assert_eq!(lines.next().unwrap(), Some((1, Line::TooLong { bytes: 64 << 20 })));
    }
}
