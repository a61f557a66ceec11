//! Large payloads in JSON lines: the message's line says into how many pieces its payload is cut, and the pieces follow, a line each, so
//! that neither who writes nor who reads has more than one of them in memory.

use std::io::{self, ErrorKind, Read};

use relet::{Error, MessageId, Store};
use serde::Deserialize;

use crate::exit::{Failure, Outcome, describe};
use crate::json::{self, Object, decode_base64, encode_base64};
use crate::mark;
use crate::output::Out;
use crate::stream::{Line, Lines};

/// Bytes of a piece; what is longer is cut.
pub(crate) const PIECE: usize = 1 << 20;

/// What a message's line says of the pieces that follow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) pieces: u64,
    pub(crate) bytes: u64,
    /// CRC-32 of the whole.
    pub(crate) crc: u32,
}

impl Cut {
    pub(crate) fn of(bytes: usize, crc: u32) -> Cut {
        Cut { pieces: bytes.div_ceil(PIECE) as u64, bytes: bytes as u64, crc }
    }
}

/// Writes the payload of a message in pieces. Where it cannot be read, a last line says that the message is left out, and why.
pub(crate) fn write(out: &mut Out, store: &Store, id: MessageId, cut: Cut) -> Outcome<Result<(), Error>> {
    let mut piece = vec![0; PIECE];
    let (mut number, mut left) = (1, cut.bytes as usize);
    let mut reader = store.payload_reader(id);
    while left > 0 {
        let size = left.min(PIECE);
        let read = match &mut reader {
            Ok(reader) => reader.read_exact(&mut piece[..size]).map_err(|error| inner(id, &error)),
            Err(error) => Err(error.clone()),
        };
        if let Err(error) = read {
            out.object(Object::new().put("piece", number).put("left_out", describe(&error)))?;
            return Ok(Err(error));
        }
        out.object(Object::new().put("piece", number).put("payload_base64", encode_base64(&piece[..size])))?;
        number += 1;
        left -= size;
    }
    Ok(Ok(()))
}

fn inner(id: MessageId, error: &io::Error) -> Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(error) => error.clone(),
        None => Error::Corrupt { detail: format!("the payload of message {id}: {error}") },
    }
}

/// A line with a piece.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Piece {
    piece: u64,
    payload_base64: Option<String>,
    /// Why the rest of it, and the message with it, was not written.
    left_out: Option<String>,
}

/// Whether a line begins as one with a piece does.
pub(crate) fn is_one(line: &[u8]) -> bool {
    mark::strip(line).starts_with(b"{\"piece\":")
}

/// Reads the pieces that follow in an input. Its errors say what is wrong with them; of the kind `NotFound`: the writer has left the message out.
#[derive(Debug)]
pub(crate) struct Pieces<'a, R> {
    lines: &'a mut Lines<R>,
    cut: Cut,
    read: u64,
    piece: Vec<u8>,
    given: usize,
    bytes: u64,
    crc: crc32fast::Hasher,
}

impl<'a, R: Read> Pieces<'a, R> {
    pub(crate) fn new(lines: &'a mut Lines<R>, cut: Cut) -> Pieces<'a, R> {
        Pieces { lines, cut, read: 0, piece: Vec::new(), given: 0, bytes: 0, crc: crc32fast::Hasher::new() }
    }

    fn advance(&mut self) -> io::Result<()> {
        let wrong = |problem: String| io::Error::new(ErrorKind::InvalidData, problem);
        let wanted = self.read + 1;
        let missing =
            format!("piece {wanted} of the {} of its payload is missing; write the export again", self.cut.pieces);
        let (number, line) = match self.lines.next()? {
            Some((_, Line::Whole(line))) if !is_one(&line) => {
                self.lines.put_back(line);
                return Err(wrong(missing));
            }
            Some((number, Line::Whole(line))) => (number, line),
            Some((number, Line::TooLong { bytes })) => {
                return Err(wrong(format!("line {number}: {bytes} bytes are too long for a piece")));
            }
            None => return Err(wrong(missing)),
        };
        let piece: Piece = serde_json::from_slice(mark::strip(&line))
            .map_err(|error| wrong(format!("line {number}: no piece of a payload ({})", json::problem(&error))))?;
        if let Some(why) = piece.left_out {
            return Err(io::Error::new(ErrorKind::NotFound, why));
        }
        let bytes = piece.payload_base64.as_deref().and_then(decode_base64).filter(|bytes| !bytes.is_empty());
        let Some(bytes) = bytes else { return Err(wrong(format!("line {number}: payload_base64 is no base64"))) };
        if piece.piece != wanted {
            return Err(wrong(missing));
        }
        self.crc.update(&bytes);
        self.bytes += bytes.len() as u64;
        (self.read, self.piece, self.given) = (wanted, bytes, 0);
        Ok(())
    }

    /// Reads past the pieces that are left.
    pub(crate) fn skip(self) -> io::Result<()> {
        while let Some((_, line)) = self.lines.next()? {
            match line {
                Line::Whole(line) if !is_one(&line) => {
                    self.lines.put_back(line);
                    break;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl<R: Read> Read for Pieces<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.given == self.piece.len() {
            if self.read == self.cut.pieces {
                let whole = (self.bytes, self.crc.clone().finalize());
                if whole == (self.cut.bytes, self.cut.crc) {
                    return Ok(0);
                }
                let problem = "its pieces are not the payload that was exported; write the export again";
                return Err(io::Error::new(ErrorKind::InvalidData, problem));
            }
            self.advance()?;
        }
        let taken = buffer.len().min(self.piece.len() - self.given);
        buffer[..taken].copy_from_slice(&self.piece[self.given..self.given + taken]);
        self.given += taken;
        Ok(taken)
    }
}

/// What a failed read of pieces came to.
pub(crate) fn problem(error: &Error) -> Option<(bool, String)> {
    match error {
        Error::Stream { source, .. } => match source.kind() {
            ErrorKind::NotFound => Some((false, format!("left out by the export: {source}"))),
            ErrorKind::InvalidData => Some((true, source.to_string())),
            _ => None,
        },
        _ => None,
    }
}

/// The failure of an input that cannot be read.
pub(crate) fn unreadable(number: u64, error: &io::Error) -> Failure {
    Failure::failed(format!("stdin cannot be read after line {number}: {error}"))
}
