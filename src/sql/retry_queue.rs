//! `relet_retry_queue`: the messages whose next try is set for later.

use rusqlite::params;

use crate::error::Result;
use crate::sql::{Record, Tx};

/// Puts a message there, replacing its row if it has one. `worker` keeps it for that worker.
pub(crate) fn put(
    tx: &mut Tx<'_>,
    record: &Record,
    worker: Option<&str>,
    due_at: i64,
    reason: &str,
    count: u32,
) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_retry_queue (message, queue, worker_id, due_at, reason, count)
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    tx.conn.prepare_cached(SQL)?.execute(params![record.id, record.queue, worker, due_at, reason, count])?;
    tx.count_retrying(record.queue, 1);
    Ok(())
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
