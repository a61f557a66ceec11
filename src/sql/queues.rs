//! `relet_queues`: a queue's id and its defaults.

use rusqlite::{Connection, OptionalExtension, params};

use crate::clock::Now;
use crate::error::Result;
use crate::sql::{Tx, counters, gates};

/// What a queue's row says about its messages.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueueRow {
    pub(crate) id: i64,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) gate: Option<i64>,
    /// Whether it has ever had a message with a gate: otherwise a claim looks for none.
    pub(crate) gated: bool,
    /// Of the whole store: the largest message id that was ever given out.
    pub(crate) last_id: i64,
}

pub(crate) fn find(conn: &Connection, name: &str) -> Result<Option<QueueRow>> {
    // The rows are asked for the largest id, too: whatever became of the counter, no two messages may have one id.
    const SQL: &str = "SELECT id, max_attempts, gate, gated,
                              max(ifnull((SELECT last_id FROM main.relet_counters WHERE queue = 0), 0),
                                  ifnull((SELECT max(id) FROM main.relet_messages), 0))
                         FROM main.relet_queues WHERE name = ?1";
    let read = |row: &rusqlite::Row<'_>| {
        Ok(QueueRow {
            id: row.get(0)?,
            max_attempts: row.get(1)?,
            gate: row.get(2)?,
            gated: row.get(3)?,
            last_id: row.get(4)?,
        })
    };
    Ok(conn.prepare_cached(SQL)?.query_row([name], read).optional()?)
}

pub(crate) fn id_of(conn: &Connection, name: &str) -> Result<Option<i64>> {
    const SQL: &str = "SELECT id FROM main.relet_queues WHERE name = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([name], |row| row.get(0)).optional()?)
}

/// The queue of this name, made where there is none.
pub(crate) fn find_or_make(tx: &mut Tx<'_>, name: &str) -> Result<QueueRow> {
    const SQL: &str = "INSERT INTO main.relet_queues (name) VALUES (?1)";
    if let Some(queue) = find(tx.conn, name)? {
        return Ok(queue);
    }
    let id = tx.conn.prepare_cached(SQL)?.insert([name])?;
    counters::make(tx.conn, id)?;
    tx.ring_all(); // whoever waits for it does not know its id
    Ok(QueueRow { id, last_id: counters::last_id(tx.conn)?, ..QueueRow::default() })
}

/// What a queue says of its messages; what is `None` follows the store.
#[derive(Debug, Clone, Default)]
pub(crate) struct Own {
    pub(crate) max_attempts: Option<u32>,
    pub(crate) lease_ms: Option<i64>,
    /// As JSON.
    pub(crate) retry: Option<String>,
    /// The gate's name.
    pub(crate) gate: Option<String>,
    pub(crate) ageing_ms: Option<i64>,
}

/// Sets a queue's own defaults.
pub(crate) fn configure(tx: &mut Tx<'_>, name: &str, own: &Own) -> Result<()> {
    const SQL: &str =
        "UPDATE main.relet_queues SET max_attempts = ?2, lease_ms = ?3, retry = ?4, gate = ?5, ageing_ms = ?6
                        WHERE id = ?1";
    let queue = find_or_make(tx, name)?;
    let gate = own.gate.as_ref().map(|gate| gates::find_or_make(tx, gate)).transpose()?;
    tx.conn.prepare_cached(SQL)?.execute(params![
        queue.id,
        own.max_attempts,
        own.lease_ms,
        own.retry,
        gate,
        own.ageing_ms
    ])?;
    Ok(())
}

/// Hands nothing out of a queue before this instant, or longer where it is paused for longer already.
pub(crate) fn pause(tx: &mut Tx<'_>, name: &str, until: i64) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_queues SET paused_until = max(ifnull(paused_until, 0), ?2) WHERE id = ?1";
    let queue = find_or_make(tx, name)?;
    tx.conn.prepare_cached(SQL)?.execute([queue.id, until])?;
    Ok(())
}

/// Hands messages out of a queue again, at once.
pub(crate) fn resume(tx: &Tx<'_>, name: &str) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_queues SET paused_until = NULL WHERE name = ?1";
    tx.conn.prepare_cached(SQL)?.execute([name])?;
    Ok(())
}

/// When a queue that is paused goes on.
pub(crate) fn paused_until(conn: &Connection, queue: i64, now: Now) -> Result<Option<i64>> {
    const SQL: &str = "SELECT paused_until FROM main.relet_queues WHERE id = ?1 AND paused_until IS NOT NULL";
    let until = conn.prepare_cached(SQL)?.query_row([queue], |row| row.get(0)).optional()?;
    Ok(until.filter(|until| *until > now.time))
}

/// From now on claims look for messages with a gate, too.
pub(crate) fn set_gated(tx: &Tx<'_>, queue: i64) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_queues SET gated = 1 WHERE id = ?1 AND gated = 0";
    tx.conn.prepare_cached(SQL)?.execute([queue])?;
    Ok(())
}

pub(crate) fn retry_of(conn: &Connection, queue: i64) -> Result<Option<String>> {
    const SQL: &str = "SELECT retry FROM main.relet_queues WHERE id = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([queue], |row| row.get(0)).optional()?.flatten())
}

pub(crate) fn lease_of(conn: &Connection, queue: i64) -> Result<Option<i64>> {
    const SQL: &str = "SELECT lease_ms FROM main.relet_queues WHERE id = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([queue], |row| row.get(0)).optional()?.flatten())
}

pub(crate) fn name_of(conn: &Connection, queue: i64) -> Result<String> {
    const SQL: &str = "SELECT name FROM main.relet_queues WHERE id = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([queue], |row| row.get(0))?)
}
