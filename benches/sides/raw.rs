//! relet's tables, indexes and counters, by hand: every statement inlined for the one case of the bench.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use relet::Durability;
use relet::rusqlite::{Connection, Result, params};

use super::{LABEL, PAYLOAD, Side, connect, transaction};

const LEASE_MS: i64 = 60_000;

/// One connection behind a mutex; one transaction an operation.
pub struct Raw(Mutex<Connection>);

/// What ends a claim: the id and the token.
pub type Receipt = (i64, i64);

impl Raw {
    /// A file of its own.
    pub fn open(path: &Path, durability: Durability) -> Raw {
        let conn = connect(path, durability);
        conn.execute_batch(include_str!("../../schema.sql")).expect("the schema runs");
        conn.execute("INSERT INTO relet_queues (name) VALUES (?1)", [super::QUEUE]).expect("the queue is made");
        conn.execute("INSERT INTO relet_counters (queue) VALUES (1)", []).expect("its counters are made");
        Raw(Mutex::new(conn))
    }

    /// A file that relet has made.
    pub fn join(path: &Path, durability: Durability) -> Raw {
        Raw(Mutex::new(connect(path, durability)))
    }

    pub fn with(&self, look: impl FnOnce(&Connection)) {
        look(&self.0.lock());
    }

    /// Ends a claim and makes the next one, in one commit.
    pub fn step(&self, receipt: Receipt) -> Receipt {
        self.transaction(|conn| {
            delete(conn, receipt)?;
            let next = take(conn)?;
            count(conn, -1, 1)?;
            Ok(next)
        })
    }

    fn transaction<T>(&self, work: impl FnOnce(&Connection) -> Result<T>) -> T {
        transaction(&self.0.lock(), work)
    }
}

impl Side for Raw {
    type Claim = Receipt;

    fn enqueue(&self) {
        self.transaction(|conn| {
            insert(conn, 1)?;
            count(conn, 1, 0)
        });
    }

    fn claim(&self) -> Receipt {
        self.transaction(take)
    }

    fn ack(&self, receipt: Receipt) {
        self.transaction(|conn| {
            delete(conn, receipt)?;
            count(conn, -1, 1)
        });
    }

    fn enqueue_many(&self, many: usize) {
        self.transaction(|conn| {
            insert(conn, many)?;
            count(conn, many as i64, 0)
        });
    }

    fn claim_many(&self, many: usize) -> Vec<Receipt> {
        self.transaction(|conn| (0..many).map(|_| take(conn)).collect::<Result<_>>())
    }

    fn ack_many(&self, receipts: Vec<Receipt>) {
        self.transaction(|conn| {
            let many = receipts.len() as i64;
            receipts.into_iter().try_for_each(|receipt| delete(conn, receipt))?;
            count(conn, -many, many)
        });
    }
}

fn insert(conn: &Connection, many: usize) -> Result<()> {
    const LAST: &str = "SELECT last_id FROM relet_counters WHERE queue = 0";
    const SQL: &str = "INSERT INTO relet_messages
        (id, queue, status, route, line, place, priority, max_attempts, enqueued_at, payload_crc, payload)
        VALUES (?1, 1, 'pending', 'pending', 0, 0, 0, 25, ?2, ?3, ?4)";
    const USED: &str = "UPDATE relet_counters SET last_id = ?1 WHERE queue = 0";
    let mut last: i64 = conn.prepare_cached(LAST)?.query_row([], |row| row.get(0))?;
    for _ in 0..many {
        last += 1;
        conn.prepare_cached(SQL)?.execute(params![last, now(), crc32fast::hash(PAYLOAD), PAYLOAD])?;
    }
    conn.prepare_cached(USED)?.execute([last])?;
    Ok(())
}

fn take(conn: &Connection) -> Result<Receipt> {
    const SELECT: &str = "SELECT id, token, attempts, payload_crc, payload FROM relet_messages INDEXED BY relet_lines
        WHERE queue = 1 AND line = 0
        ORDER BY place, id LIMIT 1";
    const UPDATE: &str = "UPDATE relet_messages
        SET status = 'processing', worker_id = ?2, incarnation = 1, line = -1, place = ?3, lease_ms = ?4, claimed_at = ?5,
            token = ?6, epoch = 1, attempts = ?7
        WHERE id = ?1";
    let (id, token, attempts, crc, payload): (i64, i64, i64, u32, Vec<u8>) = conn
        .prepare_cached(SELECT)?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)))?;
    assert_eq!(crc32fast::hash(&payload), crc);
    let now = now();
    conn.prepare_cached(UPDATE)?.execute(params![id, LABEL, now + LEASE_MS, LEASE_MS, now, token + 1, attempts + 1])?;
    Ok((id, token + 1))
}

fn delete(conn: &Connection, (id, token): Receipt) -> Result<()> {
    const SQL: &str = "DELETE FROM relet_messages
        WHERE id = ?1 AND token = ?2 AND line = -1";
    assert_eq!(conn.prepare_cached(SQL)?.execute([id, token])?, 1);
    Ok(())
}

fn count(conn: &Connection, pending: i64, acked: i64) -> Result<()> {
    const SQL: &str = "UPDATE relet_counters SET pending = pending + ?1, acked = acked + ?2 WHERE queue = 1";
    conn.prepare_cached(SQL)?.execute([pending, acked])?;
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "raw has no clock of its own")]
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |span| span.as_millis() as i64)
}
