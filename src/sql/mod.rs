//! Every statement, each beside the one function that binds it. All of it runs inside a transaction that somebody else began.

pub(crate) mod claim;
pub(crate) mod dead;
pub(crate) mod doctor;
pub(crate) mod enqueue;
pub(crate) mod gates;
pub(crate) mod groups;
pub(crate) mod lines;
pub(crate) mod look;
pub(crate) mod meta;
pub(crate) mod prune;
pub(crate) mod queues;
pub(crate) mod retry_queue;
pub(crate) mod schedules;
pub(crate) mod settle;
pub(crate) mod workers;

use std::time::Duration;

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::clock::Now;
use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::options::Options;
use crate::receipt::Receipt;
use crate::retry::Retry;
use crate::state::{Event, Route, Status};

/// A write transaction: where it runs, when it runs, and what it has to leave behind at its end.
pub(crate) struct Tx<'c> {
    pub(crate) conn: &'c Connection,
    pub(crate) now: Now,
    pub(crate) defaults: Defaults,
    /// The store's epoch: the second half of every receipt that is issued.
    pub(crate) epoch: i64,
    /// Claims of messages up to this id are made durable: they were in the file when the machine was last restarted.
    pub(crate) boot_mark: i64,
    /// Set by what must survive a power cut although its transaction began without that promise.
    pub(crate) durable: bool,
    /// Set by a success that rests on a row which was there already: the commit must write something, or it would sync nothing.
    pub(crate) touch: bool,
    counts: queues::Counts,
}

/// What the store's options say about messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) lease: Duration,
    pub(crate) retry: Retry,
    pub(crate) max_attempts: u32,
    pub(crate) retention: Duration,
}

impl From<&Options> for Defaults {
    fn from(options: &Options) -> Defaults {
        Defaults {
            lease: options.lease,
            retry: options.retry,
            max_attempts: options.max_attempts,
            retention: options.retention,
        }
    }
}

impl<'c> Tx<'c> {
    pub(crate) fn new(conn: &'c Connection, now: Now, defaults: Defaults, epoch: i64, boot_mark: i64) -> Tx<'c> {
        Tx { conn, now, defaults, epoch, boot_mark, durable: false, touch: false, counts: queues::Counts::default() }
    }

    /// Runs `op` and finishes, inside a transaction of somebody else's: what fails undoes itself alone.
    pub(crate) fn nested<T>(mut self, op: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.conn.execute_batch("SAVEPOINT relet")?;
        let outcome = op(&mut self).and_then(|value| self.finish().map(|()| value));
        let end = if outcome.is_ok() { "RELEASE relet" } else { "ROLLBACK TO relet; RELEASE relet" };
        // Where SQLite has rolled everything back by itself there is no savepoint left; the outcome says why.
        let ended = if self.conn.is_autocommit() { Ok(()) } else { self.conn.execute_batch(end) };
        let value = outcome?;
        ended?;
        Ok(value)
    }

    /// Writes what the transaction has gathered. Call it once, right before the commit.
    pub(crate) fn finish(&mut self) -> Result<()> {
        std::mem::take(&mut self.counts).write(self.conn)?;
        if std::mem::take(&mut self.touch) {
            meta::touch(self.conn)?;
        }
        Ok(())
    }
}

/// One row of `relet_messages`, without its payload.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) id: i64,
    pub(crate) queue: i64,
    pub(crate) status: Status,
    pub(crate) route: Route,
    pub(crate) priority: i32,
    pub(crate) waits_for: Option<WaitsFor>,
    pub(crate) due_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) key: Option<String>,
    pub(crate) gate: Option<i64>,
    pub(crate) tick_at: Option<i64>,
    pub(crate) group: Option<String>,
    pub(crate) worker: Option<String>,
    pub(crate) incarnation: i64,
    pub(crate) lease_until: Option<i64>,
    pub(crate) claimed_at: i64,
    pub(crate) token: i64,
    pub(crate) epoch: i64,
    pub(crate) attempts: u32,
    pub(crate) crashes: u32,
    pub(crate) deferrals: u32,
    pub(crate) releases: u32,
    pub(crate) redrives: u32,
    pub(crate) max_attempts: u32,
    pub(crate) max_deferrals: u32,
    pub(crate) retry: Option<String>,
    pub(crate) last_error: Option<String>,
    pub(crate) dead_reason: Option<String>,
    pub(crate) enqueued_at: i64,
    pub(crate) finished_at: Option<i64>,
    pub(crate) payload_crc: u32,
    pub(crate) payload_bytes: i64,
}

/// The one thing that a live message is parked under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitsFor {
    Due,
    Group,
}

impl FromSql for WaitsFor {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<WaitsFor> {
        match value.as_str()? {
            "due" => Ok(WaitsFor::Due),
            "group" => Ok(WaitsFor::Group),
            _ => Err(FromSqlError::InvalidType),
        }
    }
}

/// A SELECT of the columns that [`Record::read`] expects, in its order, with what follows `FROM`.
macro_rules! select_record {
    ($tail:literal) => {
        concat!(
            "SELECT m.id, m.queue, m.status, m.route, m.priority, m.waits_for, m.due_at, m.expires_at, m.key,
                    m.group_key, m.worker_id, m.incarnation, m.lease_until, m.claimed_at, m.token, m.epoch, m.attempts,
                    m.crashes, m.deferrals, m.releases, m.redrives, m.max_attempts, m.max_deferrals, m.retry,
                    m.last_error, m.dead_reason, m.enqueued_at, m.finished_at, m.payload_crc, m.payload_bytes, m.gate,
                    m.tick_at, m.payload
               FROM main.relet_messages m ",
            $tail
        )
    };
}
pub(crate) use select_record;

/// Largest payload that lies in its message's row. A claim rewrites that row, so larger ones lie beside it.
pub(crate) const INLINE_MAX: usize = 2048;

/// Where [`select_record!`] has the payload.
pub(crate) const PAYLOAD_COLUMN: usize = 32;

impl Record {
    pub(crate) fn read(row: &Row<'_>) -> rusqlite::Result<Record> {
        Ok(Record {
            id: row.get(0)?,
            queue: row.get(1)?,
            status: row.get(2)?,
            route: row.get(3)?,
            priority: row.get(4)?,
            waits_for: row.get(5)?,
            due_at: row.get(6)?,
            expires_at: row.get(7)?,
            key: row.get(8)?,
            group: row.get(9)?,
            worker: row.get(10)?,
            incarnation: row.get::<_, Option<i64>>(11)?.unwrap_or(0),
            lease_until: row.get(12)?,
            claimed_at: row.get::<_, Option<i64>>(13)?.unwrap_or(0),
            token: row.get(14)?,
            epoch: row.get(15)?,
            attempts: row.get(16)?,
            crashes: row.get(17)?,
            deferrals: row.get(18)?,
            releases: row.get(19)?,
            redrives: row.get(20)?,
            max_attempts: row.get(21)?,
            max_deferrals: row.get(22)?,
            retry: row.get(23)?,
            last_error: row.get(24)?,
            dead_reason: row.get(25)?,
            enqueued_at: row.get(26)?,
            finished_at: row.get(27)?,
            payload_crc: row.get(28)?,
            payload_bytes: row.get(29)?,
            gate: row.get(30)?,
            tick_at: row.get(31)?,
        })
    }

    /// The message with this id.
    pub(crate) fn load(conn: &Connection, id: i64) -> Result<Option<Record>> {
        const SQL: &str = select_record!("WHERE m.id = ?1");
        Ok(conn.prepare_cached(SQL)?.query_row([id], Record::read).optional()?)
    }

    /// The message with this id, and its payload.
    pub(crate) fn load_whole(conn: &Connection, id: i64) -> Result<Option<(Record, Vec<u8>)>> {
        const SQL: &str = select_record!("WHERE m.id = ?1");
        let found = conn.prepare_cached(SQL)?.query_row([id], Record::read_whole).optional()?;
        found.map(|found| Record::whole(conn, found)).transpose()
    }

    /// The first messages, up to `limit`, of those that are ready on this route and pass no gate.
    pub(crate) fn load_ready(
        conn: &Connection,
        queue: i64,
        route: Route,
        limit: usize,
    ) -> Result<Vec<(Record, Vec<u8>)>> {
        const SQL: &str = select_record!(
            "INDEXED BY relet_ready WHERE m.queue = ?1 AND m.status = ?2
                AND m.worker_id IS NULL AND m.waits_for IS NULL AND m.finished_at IS NULL AND m.gate IS NULL
              ORDER BY m.priority DESC, m.id LIMIT ?3"
        );
        let mut statement = conn.prepare_cached(SQL)?;
        let found = statement.query_map(params![queue, route, limit as i64], Record::read_whole)?;
        found.map(|found| Record::whole(conn, found?)).collect()
    }

    /// The live message of the queue that has this key.
    pub(crate) fn live_with_key(conn: &Connection, queue: i64, key: &str) -> Result<Option<i64>> {
        const SQL: &str = "SELECT id FROM main.relet_messages INDEXED BY relet_keys
                            WHERE queue = ?1 AND key = ?2 AND key IS NOT NULL AND finished_at IS NULL";
        Ok(conn.prepare_cached(SQL)?.query_row(params![queue, key], |row| row.get(0)).optional()?)
    }

    fn read_whole(row: &Row<'_>) -> rusqlite::Result<(Record, Option<Vec<u8>>)> {
        Ok((Record::read(row)?, row.get(PAYLOAD_COLUMN)?))
    }

    /// Fetches the payload where it lies beside its message.
    fn whole(conn: &Connection, (record, payload): (Record, Option<Vec<u8>>)) -> Result<(Record, Vec<u8>)> {
        let payload = payload.map_or_else(|| large_payload(conn, record.id), Ok)?;
        Ok((record, payload))
    }

    pub(crate) fn id(&self) -> MessageId {
        MessageId::new(self.id)
    }

    pub(crate) fn receipt(&self) -> Receipt {
        Receipt::new(self.id(), self.token, self.epoch)
    }

    /// The status that `event` leads to; [`Error::Status`] where it cannot happen now.
    pub(crate) fn after(&self, event: Event, wanted: &'static str) -> Result<Status> {
        self.status.after(event, self.route).ok_or(Error::Status { id: self.id(), status: self.status, wanted })
    }

    /// Whether its time to live is over, and nobody had got it in time.
    pub(crate) fn is_expired(&self, now: i64) -> bool {
        self.worker.is_none() && self.status.is_live() && self.expires_at.is_some_and(|at| at <= now)
    }

    /// Whether somebody holds it with a lease, run out or not.
    pub(crate) fn is_held(&self) -> bool {
        self.lease_until.is_some()
    }
}

/// A payload that lies beside its message; nothing where the row is missing, which its checksum will tell.
fn large_payload(conn: &Connection, message: i64) -> Result<Vec<u8>> {
    const SQL: &str = "SELECT payload FROM main.relet_payloads WHERE message = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([message], |row| row.get(0)).optional()?.unwrap_or_default())
}

impl ToSql for Status {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.as_str().into())
    }
}

impl FromSql for Status {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Status> {
        value.as_str()?.parse().map_err(|error| FromSqlError::Other(Box::new(error)))
    }
}

impl ToSql for Route {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.as_str().into())
    }
}

impl FromSql for Route {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Route> {
        value.as_str()?.parse().map_err(|error| FromSqlError::Other(Box::new(error)))
    }
}
