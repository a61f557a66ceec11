//! A payload on its way in from a stream. It is spooled first: a stream belongs to a stranger and may be slow, may fail and may
//! panic, so it is never read while the write lock is held.
//!
//! What is small stays in memory; the rest goes into a file without a name, which is gone with this process however that ends.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::reserve::is_full;

/// Bytes that are read, written and copied at once.
const BUFFER: usize = 64 << 10;

/// A whole stream.
pub(crate) enum Spooled {
    /// At most [`BUFFER`] bytes.
    Memory(Vec<u8>),
    File(Spool),
}

/// A payload in a file of its own.
#[derive(Debug)]
pub(crate) struct Spool {
    file: File,
    bytes: usize,
    crc: u32,
}

/// Reads a stream to its end, into a file in this folder where it is large.
pub(crate) fn spool(reader: &mut dyn Read, folder: &Path, payload_max: usize) -> Result<Spooled> {
    spool_into(reader, payload_max, || tempfile::tempfile_in(folder))
}

fn spool_into(reader: &mut dyn Read, payload_max: usize, make: impl Fn() -> io::Result<File>) -> Result<Spooled> {
    let mut buffer = vec![0; BUFFER];
    let (mut filled, mut bytes) = (0, 0);
    let mut crc = crc32fast::Hasher::new();
    let mut file: Option<File> = None;
    loop {
        // One byte above the limit is enough to be refused.
        let room = (BUFFER - filled).min((payload_max - bytes).saturating_add(1));
        let read = match reader.read(&mut buffer[filled..filled + room]) {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::Stream { what: "the payload's reader", source: Arc::new(error) }),
        };
        assert!(read <= room, "the payload's reader says that it has read more than it was given room for");
        filled += read;
        bytes += read;
        if bytes > payload_max {
            return Err(Error::PayloadTooLarge { size: bytes, limit: payload_max });
        }
        if filled == BUFFER || (read == 0 && file.is_some()) {
            let file = match &mut file {
                Some(file) => file,
                None => file.insert(make().map_err(failed)?),
            };
            crc.update(&buffer[..filled]);
            file.write_all(&buffer[..filled]).map_err(failed)?;
            filled = 0;
        }
        if read == 0 {
            break;
        }
    }
    buffer.truncate(filled);
    Ok(match file {
        Some(file) => Spooled::File(Spool { file, bytes, crc: crc.finalize() }),
        None => Spooled::Memory(buffer),
    })
}

impl Spool {
    /// Its size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The CRC-32 of it.
    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }

    /// Hands it out from its beginning, piece by piece, each with its offset.
    pub(crate) fn pieces(&mut self, mut put: impl FnMut(&[u8], usize) -> Result<()>) -> Result<()> {
        self.file.rewind().map_err(failed)?;
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        while at < self.bytes {
            let piece = &mut buffer[..BUFFER.min(self.bytes - at)];
            self.file.read_exact(piece).map_err(failed)?;
            put(piece, at)?;
            at += piece.len();
        }
        Ok(())
    }
}

/// What went wrong with the file.
fn failed(error: io::Error) -> Error {
    match is_full(&error) {
        true => Error::full(),
        false => Error::Stream { what: "the payload's temporary file", source: Arc::new(error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk that anyone can have: a device that takes nothing.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_and_one_that_fails_are_told_apart() {
        let full = || std::fs::OpenOptions::new().write(true).open("/dev/full");
        let spooled = |bytes| spool_into(&mut io::repeat(1).take(bytes), 1 << 20, full);
        assert!(matches!(spooled(100_000), Err(Error::Full { .. })));
        assert!(matches!(spooled(60_000), Ok(Spooled::Memory(payload)) if payload.len() == 60_000));
        let fails = || Err(ErrorKind::PermissionDenied.into());
        let error = spool_into(&mut io::repeat(1), 1 << 20, fails).err().unwrap();
        assert!(matches!(&error, Error::Stream { source, .. } if source.kind() == ErrorKind::PermissionDenied));
        assert!(error.to_string().contains("temporary file"), "{error}");
    }
}
