//! Large payloads: each in a row of its own, which neither a claim nor a retry rewrites. They are written and read by
//! incremental blob I/O, straight into SQLite's pages and straight out of them.

use rusqlite::blob::{Blob, ZeroBlob};
use rusqlite::{Connection, MAIN_DB, OptionalExtension, params};

use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::spool::Spool;

/// Largest payload that lies in its message's row. A claim rewrites that row, so larger ones lie beside it.
pub(crate) const INLINE_MAX: usize = 2048;

/// From this size on a payload in memory is written and read by blob I/O. It saves SQLite two copies of what is written and one
/// of what is read, and costs some µs to open: 0.8 times as fast as a value at 16 KiB, 0.94 at 64 KiB, 1.06 (written) and 1.13
/// (read) at 256 KiB, 3 times at 16 MiB read. Written, 16 MiB are 0.7 times as fast, since what exceeds SQLite's cache goes into
/// the log twice; but as a value they would be in memory three times. (`cargo bench --bench payloads -- ways`)
pub(crate) const BLOB_FROM: usize = 256 << 10;

/// Bytes that are read at once at least, and into how many pieces a payload is cut at most. SQLite finds a place in a payload by
/// walking there from its beginning, so many small pieces of a long one would take forever.
const PIECE_MIN: usize = 256 << 10;
const PIECES_MAX: usize = 32;

/// The payload of a new message.
pub(crate) enum Source<'a> {
    Memory(&'a [u8]),
    Spool(&'a mut Spool),
}

impl Source<'_> {
    pub(crate) fn crc(&self) -> u32 {
        match self {
            Source::Memory(bytes) => crc32fast::hash(bytes),
            Source::Spool(spool) => spool.crc(),
        }
    }

    /// Its size in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Source::Memory(bytes) => bytes.len(),
            Source::Spool(spool) => spool.len(),
        }
    }

    /// The payload, where it belongs into the message's own row.
    pub(crate) fn inline(&self) -> Option<&[u8]> {
        match self {
            Source::Memory(bytes) if bytes.len() <= INLINE_MAX => Some(bytes),
            _ => None,
        }
    }
}

/// What a claim has of a payload.
#[derive(Debug, Clone)]
pub(crate) enum Payload {
    Read(Vec<u8>),
    /// It was left in the file, and has so many bytes.
    Left(usize),
}

impl Payload {
    /// Its size in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Read(bytes) => bytes.len(),
            Payload::Left(bytes) => *bytes,
        }
    }
}

/// Stores the payload of a message beside it.
pub(crate) fn put(conn: &Connection, message: i64, payload: &mut Source<'_>) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_payloads (message, payload) VALUES (?1, ?2)";
    let mut insert = conn.prepare_cached(SQL)?;
    match payload {
        Source::Memory(bytes) if bytes.len() < BLOB_FROM => {
            insert.execute(params![message, &**bytes])?;
        }
        Source::Memory(bytes) => {
            insert.execute(params![message, room_for(bytes.len())])?;
            let mut blob = open(conn, message, false)?;
            blob.write_all_at(bytes, 0)?;
            blob.close()?;
        }
        Source::Spool(spool) => {
            insert.execute(params![message, room_for(spool.len())])?;
            let mut blob = open(conn, message, false)?;
            spool.pieces(|piece, at| Ok(blob.write_all_at(piece, at)?))?;
            blob.close()?;
        }
    }
    Ok(())
}

fn room_for(bytes: usize) -> ZeroBlob {
    ZeroBlob(i32::try_from(bytes).unwrap_or(i32::MAX)) // SQLite has a limit below that, and a store one below SQLite's.
}

fn open(conn: &Connection, message: i64, read_only: bool) -> Result<Blob<'_>> {
    Ok(conn.blob_open(MAIN_DB, c"relet_payloads", c"payload", message, read_only)?)
}

/// The size of the payload beside a message, in bytes; `None` where there is none.
pub(crate) fn size(conn: &Connection, message: i64) -> Result<Option<usize>> {
    const SQL: &str = "SELECT length(payload) FROM main.relet_payloads WHERE message = ?1";
    let size: Option<i64> = conn.prepare_cached(SQL)?.query_row([message], |row| row.get(0)).optional()?;
    Ok(size.map(|size| usize::try_from(size).unwrap_or(0)))
}

/// The payload beside a message, if it is to be read and is not so large that it had better be left; `None`: there is none.
pub(crate) fn small(conn: &Connection, message: i64, read: bool) -> Result<Option<Payload>> {
    const SQL: &str = "SELECT length(payload), CASE WHEN length(payload) < ?2 THEN payload END
                         FROM main.relet_payloads WHERE message = ?1";
    let below = if read { BLOB_FROM as i64 } else { 0 };
    let found = conn.prepare_cached(SQL)?.query_row(params![message, below], |row| {
        let payload = row.get::<_, Option<Vec<u8>>>(1)?;
        Ok(payload.map_or(Payload::Left(usize::try_from(row.get::<_, i64>(0)?).unwrap_or(0)), Payload::Read))
    });
    Ok(found.optional()?)
}

/// The payload beside a message; nothing where the row is missing, which its checksum will tell.
pub(crate) fn read(conn: &Connection, message: i64) -> Result<Vec<u8>> {
    const SQL: &str = "SELECT length(payload), CASE WHEN length(payload) < ?2 THEN payload END
                         FROM main.relet_payloads WHERE message = ?1";
    let found = conn
        .prepare_cached(SQL)?
        .query_row(params![message, BLOB_FROM as i64], |row| Ok((row.get::<_, i64>(0)?, row.get(1)?)))
        .optional()?;
    match found {
        None => Ok(Vec::new()),
        Some((_, Some(payload))) => Ok(payload),
        Some((size, None)) => {
            let mut payload = vec![0; usize::try_from(size).unwrap_or(0)];
            open(conn, message, true)?.read_at_exact(&mut payload, 0)?;
            Ok(payload)
        }
    }
}

/// Reads as much of a payload of `bytes` bytes as `piece` has room for, from `at` on.
pub(crate) fn read_at(conn: &Connection, message: i64, bytes: usize, piece: &mut [u8], at: usize) -> Result<()> {
    match size(conn, message)? {
        Some(size) if size == bytes => Ok(open(conn, message, true)?.read_at_exact(piece, at)?),
        Some(_) => Err(damaged(message)),
        None => Err(Error::Gone { id: MessageId::new(message) }),
    }
}

/// The payload is not the one that was enqueued.
pub(crate) fn damaged(message: i64) -> Error {
    Error::Corrupt { detail: format!("the payload of message {message} does not match its checksum") }
}

/// How many bytes of a payload of this size are read at once.
pub(crate) fn piece_of(bytes: usize) -> usize {
    PIECE_MIN.max(bytes.div_ceil(PIECES_MAX))
}

/// Deletes the payload beside a message.
pub(crate) fn remove(conn: &Connection, message: i64) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_payloads WHERE message = ?1";
    conn.prepare_cached(SQL)?.execute([message])?;
    Ok(())
}
