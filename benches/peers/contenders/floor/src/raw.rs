//! What a careful person writes by hand: a status word, the worker, a lease, a token that is checked when a claim ends,
//! attempts, and an index for what is ready and one for what is leased. One connection behind a mutex.

use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use driver::{Answer, Handle, Peer, Read, State, look};
use rusqlite::{Connection, OptionalExtension, named_params, params};

use crate::connect::{connect, transaction};

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        payload BLOB NOT NULL,
        status TEXT NOT NULL DEFAULT 'ready' CHECK (status IN ('ready', 'processing', 'done', 'dead')),
        due_at INTEGER NOT NULL,
        worker TEXT,
        lease_until INTEGER,
        token INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE INDEX IF NOT EXISTS ready ON messages (due_at, id) WHERE status = 'ready';
    CREATE INDEX IF NOT EXISTS leased ON messages (lease_until) WHERE status = 'processing';";

const ENQUEUE: &str = "INSERT INTO messages (payload, due_at) VALUES (?1, ?2)";

/// What has outlived its lease goes first, then what is due.
const CLAIM: &str = "
    UPDATE messages
    SET status = 'processing', worker = :worker, lease_until = :lease_until, token = token + 1, attempts = attempts + 1
    WHERE id = coalesce(
        (SELECT id FROM messages WHERE status = 'processing' AND lease_until < :now ORDER BY lease_until LIMIT 1),
        (SELECT id FROM messages WHERE status = 'ready' AND due_at <= :now ORDER BY due_at, id LIMIT 1))
    RETURNING id, token, payload";

/// Only the newest token ends a claim.
const ACK: &str = "DELETE FROM messages WHERE id = ?1 AND token = ?2 AND status = 'processing'";

const BEHIND: &str = "
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
    INSERT INTO messages (payload, status, due_at) SELECT ?2, ?3, ?4 FROM n";

const LEASE_MS: i64 = 60_000;

pub struct Raw(Mutex<Connection>);

impl Raw {
    pub fn open(folder: &Path, synchronous: &str) -> Answer<Raw> {
        Ok(Raw(Mutex::new(connect(folder, synchronous, SCHEMA)?)))
    }

    fn transaction<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Answer<T> {
        transaction(&self.0.lock().expect("no holder panics"), |conn| work(conn))
    }
}

impl Peer for Raw {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(ByHand { raw: self, held: None }))
    }
}

struct ByHand<'a> {
    raw: &'a Raw,
    held: Option<(i64, i64)>,
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        self.enqueue_batch(payload, 1)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        self.held = self.raw.transaction(|conn| take(conn, read))?;
        Ok(self.held.is_some())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(held) = self.held.take() else { return Ok(()) };
        if self.raw.transaction(|conn| remove(conn, held))? { Ok(()) } else { Err("stale".into()) }
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.raw.transaction(|conn| {
            let mut insert = conn.prepare_cached(ENQUEUE)?;
            let now = now();
            (0..count).try_for_each(|_| insert.execute(params![payload, now]).map(drop))
        })
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        let held = self.raw.transaction(|conn| {
            let mut held = Vec::new();
            while held.len() < max {
                match take(conn, &mut look)? {
                    Some(one) => held.push(one),
                    None => break,
                }
            }
            Ok(held)
        })?;
        self.raw.transaction(|conn| held.iter().try_for_each(|one| remove(conn, *one).map(drop)))?;
        Ok(held.len())
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let (status, due_at) = match state {
            State::Delayed => ("ready", now() + 7 * 24 * 3_600_000),
            State::Done => ("done", now()),
            State::Dead => ("dead", now()),
            State::Gated => return driver::unable(),
        };
        self.raw.transaction(|conn| conn.execute(BEHIND, params![count as i64, payload, status, due_at]).map(drop))
    }
}

fn take(conn: &Connection, read: Read) -> rusqlite::Result<Option<(i64, i64)>> {
    let now = now();
    let mut claim = conn.prepare_cached(CLAIM)?;
    let bound = named_params! { ":worker": "bench", ":lease_until": now + LEASE_MS, ":now": now };
    let taken = claim.query_row(bound, |row| {
        read(row.get_ref(2)?.as_blob()?);
        Ok((row.get(0)?, row.get(1)?))
    });
    taken.optional()
}

fn remove(conn: &Connection, (id, token): (i64, i64)) -> rusqlite::Result<bool> {
    Ok(conn.prepare_cached(ACK)?.execute([id, token])? == 1)
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64)
}
