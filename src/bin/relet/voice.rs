//! The voice: what commands that run side by side say, on the two streams that they share.
//!
//! Of several, each speaks in whole lines: what a command writes is held back until its line is complete, and a last line
//! without a line break gets one. A single one is passed on byte by byte.

use std::io::{self, Write};

use parking_lot::Mutex;

use crate::exit::{Failure, Outcome};
use crate::json::Object;
use crate::output::Out;

/// Longest line that is held back, in bytes. Of a longer one the parts are passed on as they come.
const LINE_MAX: usize = 64 << 10;

/// Where all of them speak.
#[derive(Debug)]
pub(crate) struct Voice {
    stdout: Mutex<Stdout>,
    pub(crate) json: bool,
    whole_lines: bool,
}

#[derive(Debug)]
struct Stdout {
    out: Out,
    /// Why nothing can be printed any more. The work goes on all the same.
    mute: Option<Failure>,
}

/// A stream of one command.
#[derive(Debug)]
pub(crate) struct Stream {
    to_stdout: bool,
    held: Vec<u8>,
}

impl Voice {
    pub(crate) fn new(json: bool, whole_lines: bool) -> Voice {
        Voice { stdout: Mutex::new(Stdout { out: Out::new(json), mute: None }), json, whole_lines }
    }

    /// For a command's stdout, which goes to stderr where stdout is for objects.
    pub(crate) fn stdout(&self) -> Stream {
        Stream { to_stdout: !self.json, held: Vec::new() }
    }

    /// For a command's stderr.
    pub(crate) fn stderr(&self) -> Stream {
        Stream { to_stdout: false, held: Vec::new() }
    }

    /// Passes on what a command has written.
    pub(crate) fn pass_on(&self, stream: &mut Stream, bytes: &[u8]) {
        let end = match bytes.iter().rposition(|byte| *byte == b'\n') {
            _ if !self.whole_lines => bytes.len(),
            Some(at) => at + 1,
            None if stream.held.len() + bytes.len() > LINE_MAX => bytes.len(),
            None => 0,
        };
        if end > 0 {
            self.write(stream.to_stdout, &[&stream.held, &bytes[..end]]);
            stream.held.clear();
        }
        stream.held.extend_from_slice(&bytes[end..]);
    }

    /// Passes on what is left of a stream.
    pub(crate) fn finish(&self, stream: Stream) {
        if !stream.held.is_empty() {
            self.write(stream.to_stdout, &[&stream.held, b"\n"]);
        }
    }

    /// An object on stdout, where they are asked for.
    pub(crate) fn object(&self, object: impl FnOnce() -> Object) {
        if self.json {
            self.write(true, &[object().end().as_bytes(), b"\n"]);
        }
    }

    fn write(&self, to_stdout: bool, parts: &[&[u8]]) {
        if !to_stdout {
            let mut stderr = io::stderr().lock();
            let _ = parts.iter().try_for_each(|part| stderr.write_all(part));
            return;
        }
        let mut stdout = self.stdout.lock();
        if stdout.mute.is_none() {
            let written = parts.iter().try_for_each(|part| stdout.out.bytes(part)).and_then(|()| stdout.out.flush());
            stdout.mute = written.err();
        }
    }

    /// What has come of printing.
    pub(crate) fn end(&self) -> Outcome<()> {
        match self.stdout.lock().mute.take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}
