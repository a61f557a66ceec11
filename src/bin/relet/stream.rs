//! Stdin, line by line in bounded memory, and the batches that its lines are stored in.
//!
//! The rule for batches: lines are gathered as long as the next one is already here in whole, and stored before anything
//! could wait for more input. So a line is stored at once while stdin is slow, and many share a commit while it is fast.

use std::io::{self, BufRead, BufReader, ErrorKind, IsTerminal, Read};

use indicatif::{ProgressBar, ProgressStyle};
use relet::{Enqueued, Error, Message, Store};

use crate::exit::{Exit, Failure, Outcome, describe};
use crate::json::Object;
use crate::output::{Out, count, say};

/// Bytes that are read from stdin at once.
const READ: usize = 1 << 20;
/// Lines in one commit, at most.
const BATCH_LINES: usize = 10_000;
/// Payload in one commit, in bytes, above which it is made.
const BATCH_BYTES: usize = 4 << 20;

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
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(input: R, limit: usize) -> Lines<R> {
        Lines { input: BufReader::with_capacity(READ, input), limit, number: 0 }
    }

    /// Whether the next line is here in whole, so that reading it does not wait.
    pub(crate) fn is_ready(&self) -> bool {
        self.input.buffer().contains(&b'\n')
    }

    /// The next line and its number, from 1 on. The last one needs no line break.
    pub(crate) fn next(&mut self) -> io::Result<Option<(u64, Line)>> {
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
            // One byte above the limit is allowed for, since it may turn out to be a carriage return.
            if bytes <= self.limit as u64 + 1 {
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
        let line = if bytes <= self.limit as u64 { Line::Whole(line) } else { Line::TooLong { bytes } };
        Ok(Some((self.number, line)))
    }
}

/// Stores what lines of stdin say, in batches, and keeps count.
pub(crate) struct Loader<'a> {
    store: &'a Store,
    out: &'a mut Out,
    bar: Option<ProgressBar>,
    batch: Vec<Entry>,
    batch_bytes: usize,
    stored: u64,
    existing: u64,
    bad: u64,
    /// Why nothing can be printed any more. What is read is stored all the same.
    mute: Option<Failure>,
}

/// A message that waits for its batch.
struct Entry {
    line: u64,
    queue: String,
    message: Message,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(store: &'a Store, out: &'a mut Out) -> Loader<'a> {
        // No bar where it would run through what is being typed; without a terminal indicatif draws none.
        let bar = (!io::stdin().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{spinner} {human_pos} stored, {per_sec}, {elapsed}");
            ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        });
        Loader { store, out, bar, batch: Vec::new(), batch_bytes: 0, stored: 0, existing: 0, bad: 0, mute: None }
    }

    /// Reads all of stdin, and stores what `read` makes of its lines: a queue and a message, nothing, or what is wrong.
    pub(crate) fn load(
        mut self,
        limit: usize,
        mut read: impl FnMut(Vec<u8>) -> Result<Option<(String, Message)>, String>,
    ) -> Outcome {
        let mut lines = Lines::new(io::stdin().lock(), limit);
        loop {
            if !lines.is_ready() {
                self.store_batch()?;
            }
            let next = lines.next().map_err(|error| {
                Failure::failed(format!("stdin cannot be read after line {}: {error}", lines.number))
            })?;
            let Some((line, content)) = next else { break };
            let entry = match content {
                Line::Whole(bytes) => {
                    self.batch_bytes += bytes.len();
                    read(bytes)
                }
                Line::TooLong { bytes } => Err(format!("{bytes} bytes are too long, the limit is {limit}")),
            };
            match entry {
                Ok(Some((queue, message))) => self.batch.push(Entry { line, queue, message }),
                Ok(None) => {}
                Err(problem) => self.name_bad(line, &problem),
            }
            if self.batch.len() >= BATCH_LINES || self.batch_bytes >= BATCH_BYTES {
                self.store_batch()?;
            }
        }
        self.store_batch()?;
        self.finish()
    }

    /// Stores what is gathered, each queue's in a commit of its own, in the order of the lines.
    fn store_batch(&mut self) -> Outcome<()> {
        self.batch_bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        for run in batch.chunk_by(|a, b| a.queue == b.queue) {
            let queue = self.store.queue(&run[0].queue);
            match queue.enqueue_all(run.iter().map(|entry| entry.message.clone())) {
                Ok(enqueued) => {
                    for (entry, enqueued) in run.iter().zip(enqueued) {
                        self.stored(entry.line, enqueued);
                    }
                }
                Err(error) if is_about_a_message(&error) => self.store_singly(run)?,
                Err(error) => return Err(stopped(&error, run)),
            }
        }
        if !batch.is_empty() && self.mute.is_none() {
            self.mute = self.out.flush().err();
        }
        Ok(())
    }

    /// One of these was refused, and all with it: finds out which.
    fn store_singly(&mut self, run: &[Entry]) -> Outcome<()> {
        for (at, entry) in run.iter().enumerate() {
            match self.store.queue(&entry.queue).enqueue(entry.message.clone()) {
                Ok(enqueued) => self.stored(entry.line, enqueued),
                Err(error) if is_about_a_message(&error) => self.name_bad(entry.line, &describe(&error)),
                Err(error) => return Err(stopped(&error, &run[at..])),
            }
        }
        Ok(())
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
    matches!(error, Error::PayloadTooLarge { .. } | Error::QueueName { .. } | Error::Text { .. } | Error::Range { .. })
}

/// Says from which line on nothing is stored.
fn stopped(error: &Error, rest: &[Entry]) -> Failure {
    let (first, last) = (rest.first().map_or(0, |entry| entry.line), rest.last().map_or(0, |entry| entry.line));
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
        let mut slow = Lines { input: BufReader::with_capacity(1, input), limit, number: 0 };
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
