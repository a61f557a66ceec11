//! Every statement, each beside the one function that binds it. All of it runs inside a transaction that somebody else began.

pub(crate) mod budget;
pub(crate) mod checks;
pub(crate) mod claim;
pub(crate) mod counters;
pub(crate) mod dead;
pub(crate) mod details;
pub(crate) mod doctor;
pub(crate) mod ended;
pub(crate) mod enqueue;
pub(crate) mod finished;
pub(crate) mod gates;
pub(crate) mod groups;
pub(crate) mod import;
pub(crate) mod keys;
pub(crate) mod lines;
pub(crate) mod look;
pub(crate) mod mend;
pub(crate) mod meta;
pub(crate) mod payloads;
pub(crate) mod prune;
pub(crate) mod queues;
pub(crate) mod record;
pub(crate) mod repair;
pub(crate) mod retry_queue;
pub(crate) mod schedules;
pub(crate) mod settle;
pub(crate) mod workers;

use std::collections::BTreeSet;
use std::time::Duration;

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, Params};

use crate::clock::Now;
use crate::error::Result;
use crate::options::Options;
use crate::retry::Retry;
use crate::state::{Route, Status};

pub(crate) use payloads::{Payload, Source};
pub(crate) use record::{Extras, PAYLOAD_COLUMN, Record, select_record};

/// A write transaction: where it runs, when it runs, and what it has to leave behind at its end.
pub(crate) struct Tx<'c> {
    pub(crate) conn: &'c Connection,
    pub(crate) now: Now,
    pub(crate) defaults: Defaults,
    /// The store's epoch: the second half of every receipt that is issued.
    pub(crate) epoch: i64,
    /// Claims of messages up to this id are made durable: they were in the file when the machine was last restarted.
    pub(crate) boot_mark: i64,
    /// Receipts of an earlier epoch are another file's.
    pub(crate) floor: i64,
    /// Set by what must survive a power cut although its transaction began without that promise.
    pub(crate) durable: bool,
    /// Set by a success that rests on a row which was there already: the commit must write something, or it would sync nothing.
    pub(crate) touch: bool,
    /// How much more it may clear.
    pub(crate) budget: budget::Budget,
    /// Whom its commit wakes.
    pub(crate) rung: Rung,
    /// Whether the operation that runs has said whom it wakes; one that has not wakes all.
    pub(crate) said: bool,
    /// About how many bytes of new messages it stores.
    pub(crate) stored: u64,
    /// The largest message id that this transaction has given out.
    last_id: Option<i64>,
    counts: counters::Counts,
}

/// The queues of which something may have become claimable.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rung {
    pub(crate) all: bool,
    pub(crate) queues: BTreeSet<i64>,
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
        Tx {
            conn,
            now,
            defaults,
            epoch,
            boot_mark,
            floor: 0,
            durable: false,
            touch: false,
            budget: budget::Budget::new(),
            rung: Rung::default(),
            said: false,
            stored: 0,
            last_id: None,
            counts: counters::Counts::default(),
        }
    }

    /// Something of this queue may have become claimable: those who wait for it are woken by the commit, and no others.
    pub(crate) fn ring(&mut self, queue: i64) {
        self.said = true;
        self.rung.queues.insert(queue);
    }

    /// A new message is stored, with a payload of this size.
    pub(crate) fn note_stored(&mut self, payload: usize) {
        const BESIDE: u64 = 128; // its row and its places in the indexes
        self.stored += payload as u64 + BESIDE;
    }

    /// Nothing has become claimable.
    pub(crate) fn ring_none(&mut self) {
        self.said = true;
    }

    /// Something of any queue may have become claimable.
    pub(crate) fn ring_all(&mut self) {
        self.said = true;
        self.rung.all = true;
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
        if let Some(last) = self.last_id.take() {
            counters::set_last_id(self.conn, last)?;
        }
        if std::mem::take(&mut self.touch) {
            meta::touch(self.conn)?;
        }
        Ok(())
    }
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

/// The ids that a statement finds.
pub(crate) fn ids(conn: &Connection, sql: &str, params: impl Params) -> Result<Vec<i64>> {
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map(params, |row| row.get(0))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
