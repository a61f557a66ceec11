//! An id, a payload, a status and one index.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use driver::{Answer, Handle, Peer, Read, brief};
use rusqlite::{Connection, OptionalExtension};

use crate::connect::{connect, transaction};

pub const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS messages (id INTEGER PRIMARY KEY, payload BLOB NOT NULL, status INT NOT NULL DEFAULT 0);
    CREATE INDEX IF NOT EXISTS ready ON messages (id) WHERE status = 0;";

pub const ENQUEUE: &str = "INSERT INTO messages (payload) VALUES (?1)";

const CLAIM: &str = "
    UPDATE messages SET status = 1
    WHERE id IN (SELECT id FROM messages WHERE status = 0 ORDER BY id LIMIT ?1)
    RETURNING id, payload";

const ACK: &str = "DELETE FROM messages WHERE id = ?1";

/// A connection for each thread.
pub struct Connected {
    folder: PathBuf,
    synchronous: &'static str,
}

impl Connected {
    pub fn open(folder: &Path, synchronous: &'static str) -> Answer<Connected> {
        connect(folder, synchronous, SCHEMA)?;
        Ok(Connected { folder: folder.to_owned(), synchronous })
    }
}

impl Peer for Connected {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(Bare { conn: connect(&self.folder, self.synchronous, SCHEMA)?, held: None }))
    }
}

/// One connection for all threads, behind a mutex.
pub struct Shared(Mutex<Connection>);

impl Shared {
    pub fn open(folder: &Path, synchronous: &str) -> Answer<Shared> {
        Ok(Shared(Mutex::new(connect(folder, synchronous, SCHEMA)?)))
    }
}

impl Peer for Shared {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(Bare { conn: &self.0, held: None }))
    }
}

/// What gives a connection for one operation.
trait Lend {
    fn lend(&self) -> impl std::ops::Deref<Target = Connection>;
}

impl Lend for Connection {
    fn lend(&self) -> impl std::ops::Deref<Target = Connection> {
        self
    }
}

impl Lend for &Mutex<Connection> {
    fn lend(&self) -> impl std::ops::Deref<Target = Connection> {
        let guard: MutexGuard<Connection> = self.lock().expect("no holder panics");
        guard
    }
}

struct Bare<C> {
    conn: C,
    held: Option<i64>,
}

impl<C: Lend> Handle for Bare<C> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        let conn = self.conn.lend();
        let done = conn.prepare_cached(ENQUEUE).and_then(|mut insert| insert.execute([payload]));
        done.map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let conn = self.conn.lend();
        let mut take = || {
            conn.prepare_cached(CLAIM)?.query_row([1], |row| {
                read(row.get_ref(1)?.as_blob()?);
                row.get(0)
            })
        };
        self.held = take().optional().map_err(brief)?;
        Ok(self.held.is_some())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(id) = self.held.take() else { return Ok(()) };
        let conn = self.conn.lend();
        let done = conn.prepare_cached(ACK).and_then(|mut delete| delete.execute([id]));
        done.map(drop).map_err(brief)
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        transaction(&self.conn.lend(), |conn| {
            let mut insert = conn.prepare_cached(ENQUEUE)?;
            (0..count).try_for_each(|_| insert.execute([payload]).map(drop))
        })
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        let conn = self.conn.lend();
        let take = || {
            let mut claim = conn.prepare_cached(CLAIM)?;
            let ids = claim.query_map([max as i64], |row| {
                std::hint::black_box(row.get_ref(1)?.as_blob()?);
                row.get::<_, i64>(0)
            })?;
            ids.collect::<rusqlite::Result<Vec<_>>>()
        };
        let ids = take().map_err(brief)?;
        transaction(&conn, |conn| {
            let mut delete = conn.prepare_cached(ACK)?;
            ids.iter().try_for_each(|id| delete.execute([id]).map(drop))
        })?;
        Ok(ids.len())
    }
}
