//! `relet_retry_queue`: the messages whose next try is set for later.

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Result;
use crate::sql::{Record, Tx};

/// Puts a message there. `kept` keeps it for that worker, until that instant.
pub(crate) fn put(
    tx: &mut Tx<'_>,
    record: &Record,
    kept: Option<(&str, i64)>,
    due_at: i64,
    reason: &str,
    count: u32,
) -> Result<()> {
    const SQL: &str =
        "INSERT INTO main.relet_retry_queue (message, queue, worker_id, due_at, kept_until, reason, count)
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
    let (worker, kept_until) = kept.unzip();
    tx.conn.prepare_cached(SQL)?.execute(params![
        record.id,
        record.queue,
        worker,
        due_at,
        kept_until,
        reason,
        count
    ])?;
    tx.count_retrying(record.queue, 1);
    Ok(())
}

/// When a deferred message is no longer kept for its worker.
pub(crate) fn kept_until(conn: &Connection, message: i64) -> Result<i64> {
    const SQL: &str = "SELECT kept_until FROM main.relet_retry_queue WHERE message = ?1";
    Ok(conn
        .prepare_cached(SQL)?
        .query_row([message], |row| row.get::<_, Option<i64>>(0))
        .optional()?
        .flatten()
        .unwrap_or(0))
}

/// Takes a message out, if it is there.
pub(crate) fn take(tx: &mut Tx<'_>, record: &Record) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_retry_queue WHERE message = ?1";
    // Only what waits, or has just stopped waiting, for an instant can have a row.
    if record.due_at.is_none() {
        return Ok(());
    }
    let rows = tx.conn.prepare_cached(SQL)?.execute([record.id])?;
    tx.count_retrying(record.queue, -(rows as i64));
    Ok(())
}
