//! A payload on its way out, as a stream.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Read};

use crate::error::{Error, Result};
use crate::sql::payloads;
use crate::store::Store;

/// Reads the payload of a claim, see [`Claim::payload_reader`](crate::Claim::payload_reader).
///
/// A payload that was left in the file is read in pieces of 256 KiB (a 32nd of it above 8 MiB), one of which is in memory at a
/// time. Between two pieces the store is not held in any way, so a reader may take its time. Its errors are of these kinds:
///
/// * [`ErrorKind::InvalidData`]: the payload is damaged, which may be known only at its last piece; that piece is not handed out;
/// * [`ErrorKind::NotFound`]: the message is gone, for another has settled or purged it;
/// * [`ErrorKind::Other`]: what else an [`Error`] says, which is the inner error of all three.
///
/// ```
/// use std::io::Read;
/// use relet::Store;
///
/// let store = Store::open_in_memory()?;
/// store.queue("scans").enqueue(vec![7; 1 << 20])?;
/// let worker = store.worker("scanner-1")?;
/// let claim = worker.claim_without_payload("scans")?.expect("there is one");
/// let mut reader = claim.payload_reader()?;
/// assert_eq!(reader.len(), 1 << 20);
/// let mut header = [0; 16];
/// reader.read_exact(&mut header).unwrap();
/// assert_eq!(header, [7; 16]);
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug)]
pub struct PayloadReader<'a> {
    source: Source<'a>,
    bytes: usize,
    /// How much of it was read from the source.
    at: usize,
}

enum Source<'a> {
    Memory(Cow<'a, [u8]>),
    File(Pieces<'a>),
}

impl std::fmt::Debug for Source<'_> {
    /// Without the payload, as in a claim.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::Memory(_) => "Memory",
            Source::File(_) => "File",
        })
    }
}

struct Pieces<'a> {
    store: &'a Store,
    message: i64,
    expected: u32,
    crc: crc32fast::Hasher,
    /// A piece that was read, and how much of it was handed out.
    piece: Vec<u8>,
    given: usize,
}

impl<'a> PayloadReader<'a> {
    pub(crate) fn of_memory(payload: impl Into<Cow<'a, [u8]>>) -> PayloadReader<'a> {
        let payload = payload.into();
        PayloadReader { bytes: payload.len(), source: Source::Memory(payload), at: 0 }
    }

    pub(crate) fn of_file(store: &'a Store, message: i64, bytes: usize, expected: u32) -> PayloadReader<'a> {
        let (crc, piece) = (crc32fast::Hasher::new(), Vec::new());
        PayloadReader { source: Source::File(Pieces { store, message, expected, crc, piece, given: 0 }), bytes, at: 0 }
    }

    /// Size of the whole payload, in bytes, however much of it was read already.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the payload has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What comes next, as much as there is in memory; empty at the end.
    pub(crate) fn fill(&mut self) -> Result<&[u8]> {
        match &mut self.source {
            Source::Memory(payload) => Ok(&payload[self.at..]),
            Source::File(pieces) => {
                if pieces.given == pieces.piece.len() && self.at < self.bytes {
                    let wanted = payloads::piece_of(self.bytes).min(self.bytes - self.at);
                    pieces.piece.resize(wanted, 0);
                    pieces.given = wanted; // Nothing of it counts until it is known to be good.
                    pieces.crc = pieces.read(self.bytes, self.at)?;
                    pieces.given = 0;
                    self.at += wanted;
                }
                Ok(&pieces.piece[pieces.given..])
            }
        }
    }

    /// So much of that was taken.
    pub(crate) fn consume(&mut self, taken: usize) {
        match &mut self.source {
            Source::Memory(_) => self.at += taken,
            Source::File(pieces) => pieces.given += taken,
        }
    }
}

impl Pieces<'_> {
    /// Fills the piece with what the payload has at `at`, and returns the checksum up to its end.
    fn read(&mut self, bytes: usize, at: usize) -> Result<crc32fast::Hasher> {
        let (message, piece) = (self.message, &mut self.piece);
        self.store.read(|conn, _| payloads::read_at(conn, message, bytes, piece, at))?;
        let mut crc = self.crc.clone();
        crc.update(piece);
        if at + piece.len() == bytes && crc.clone().finalize() != self.expected {
            return Err(payloads::damaged(message));
        }
        Ok(crc)
    }
}

impl Read for PayloadReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let next = self.fill().map_err(|error| {
            let kind = match &error {
                Error::Corrupt { .. } => ErrorKind::InvalidData,
                Error::Gone { .. } => ErrorKind::NotFound,
                _ => ErrorKind::Other,
            };
            io::Error::new(kind, error)
        })?;
        let taken = next.len().min(buffer.len());
        buffer[..taken].copy_from_slice(&next[..taken]);
        self.consume(taken);
        Ok(taken)
    }
}
