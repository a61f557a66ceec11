//! `relet_retry_queue`: the messages whose next try, or first, is set for later.

use rusqlite::{Connection, OptionalExtension, params};

use crate::clock::Now;
use crate::error::Result;
use crate::sql::{Record, Tx};

/// A wait for an instant.
#[derive(Debug, Default)]
pub(crate) struct Wait<'a> {
    pub(crate) due_at: i64,
    /// It is meant by the calendar, and so by the wall clock.
    pub(crate) on_wall: bool,
    /// Deferred: the worker it is kept for, and until when.
    pub(crate) kept: Option<(&'a str, i64)>,
    /// The turn of its group comes first.
    pub(crate) behind: bool,
    /// Why, and which failure or deferral it was; `None`: it has not been tried.
    pub(crate) reason: Option<(&'a str, u32)>,
}

/// What a message's row here says, beside its instant.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub(crate) on_wall: bool,
    pub(crate) reason: Option<String>,
    pub(crate) count: u32,
}

/// What a message waits for; nothing where it does not wait.
pub(crate) fn of(conn: &Connection, record: &Record) -> Result<Waits> {
    const SQL: &str = "SELECT on_wall, reason, count FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    if record.due_at.is_none() {
        return Ok(Waits::default());
    }
    let read = |row: &rusqlite::Row<'_>| Ok(Waits { on_wall: row.get(0)?, reason: row.get(1)?, count: row.get(2)? });
    Ok(conn.prepare_cached(SQL)?.query_row([record.queue, record.id], read).optional()?.unwrap_or_default())
}

/// Puts a message there.
pub(crate) fn put(tx: &mut Tx<'_>, record: &Record, wait: &Wait<'_>) -> Result<()> {
    const SQL: &str =
        "INSERT INTO main.relet_retry_queue (queue, message, worker_id, due_at, on_wall, kept_until, behind, reason, count)
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
    let (worker, kept_until) = wait.kept.unzip();
    let (reason, count) = wait.reason.unzip();
    tx.conn.prepare_cached(SQL)?.execute(params![
        record.queue,
        record.id,
        worker,
        wait.due_at,
        wait.on_wall,
        kept_until,
        wait.behind,
        reason,
        count.unwrap_or(0),
    ])?;
    tx.count_retrying(record.queue, i64::from(reason.is_some()));
    Ok(())
}

/// What a message that is parked still waits for, as an instant of the store's time; `None`: it is due.
pub(crate) fn waits_until(conn: &Connection, record: &Record, now: Now) -> Result<Option<i64>> {
    let Some(due_at) = record.due_at else { return Ok(None) };
    let due_at = if is_on_wall(conn, record)? { now.of_wall(due_at) } else { due_at };
    Ok(Some(due_at).filter(|due_at| *due_at > now.time))
}

/// Whether the instant that a message waits for is the wall clock's.
pub(crate) fn is_on_wall(conn: &Connection, record: &Record) -> Result<bool> {
    const SQL: &str = "SELECT on_wall FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    let found = conn.prepare_cached(SQL)?.query_row([record.queue, record.id], |row| row.get(0)).optional()?;
    Ok(found.unwrap_or(false))
}

/// When a deferred message is no longer kept for its worker.
pub(crate) fn kept_until(conn: &Connection, record: &Record) -> Result<i64> {
    const SQL: &str = "SELECT kept_until FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    Ok(conn
        .prepare_cached(SQL)?
        .query_row([record.queue, record.id], |row| row.get::<_, Option<i64>>(0))
        .optional()?
        .flatten()
        .unwrap_or(0))
}

/// A member of a group waits for its turn before its instant counts, or no longer. Returns whether it has an instant to wait for.
pub(crate) fn set_behind(conn: &Connection, queue: i64, message: i64, behind: bool) -> Result<bool> {
    const SQL: &str = "UPDATE main.relet_retry_queue SET behind = ?3 WHERE queue = ?1 AND message = ?2";
    Ok(conn.prepare_cached(SQL)?.execute(params![queue, message, behind])? > 0)
}

/// Takes a message out, if it is there.
pub(crate) fn take(tx: &mut Tx<'_>, record: &Record) -> Result<()> {
    // Only what waits, or has just stopped waiting, for an instant can have a row.
    match record.due_at {
        Some(_) => take_id(tx, record.queue, record.id),
        None => Ok(()),
    }
}

pub(crate) fn take_id(tx: &mut Tx<'_>, queue: i64, message: i64) -> Result<()> {
    const FIND: &str = "SELECT reason IS NOT NULL FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    const SQL: &str = "DELETE FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    let found: Option<bool> = tx.conn.prepare_cached(FIND)?.query_row([queue, message], |row| row.get(0)).optional()?;
    if let Some(tried) = found {
        tx.conn.prepare_cached(SQL)?.execute([queue, message])?;
        tx.count_retrying(queue, -i64::from(tried));
    }
    Ok(())
}
