//! `relet_meta`: what is true of the whole store.

use rusqlite::types::{FromSql, ToSql};
use rusqlite::{Connection, OptionalExtension, params};

use crate::error::{Error, Result};
use crate::sql::ended;

/// Reads one value; `None` where the key is absent.
pub(crate) fn get<T: FromSql>(conn: &Connection, key: &str) -> Result<Option<T>> {
    const SQL: &str = "SELECT value FROM main.relet_meta WHERE key = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([key], |row| row.get(0)).optional()?)
}

/// Reads a value that every store has.
pub(crate) fn need<T: FromSql>(conn: &Connection, key: &'static str) -> Result<T> {
    get(conn, key)?.ok_or_else(|| Error::Corrupt { detail: format!("relet_meta has no {key:?}") })
}

pub(crate) fn set(conn: &Connection, key: &str, value: impl ToSql) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_meta (key, value) VALUES (?1, ?2)
                       ON CONFLICT (key) DO UPDATE SET value = excluded.value";
    conn.prepare_cached(SQL)?.execute(params![key, value])?;
    Ok(())
}

/// Changes something, so that the commit has something to make durable.
pub(crate) fn touch(conn: &Connection) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_meta SET value = value + 1 WHERE key = 'touched'";
    conn.prepare_cached(SQL)?.execute([])?;
    Ok(())
}

/// Whether the database has relet's tables.
pub(crate) fn exists(conn: &Connection) -> Result<bool> {
    const SQL: &str = "SELECT EXISTS (SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'relet_meta')";
    Ok(conn.query_row(SQL, [], |row| row.get(0))?)
}

/// Whether the database has no tables at all, so that it may be laid out as a file of relet's own.
pub(crate) fn is_empty(conn: &Connection) -> Result<bool> {
    const SQL: &str = "SELECT NOT EXISTS (SELECT 1 FROM main.sqlite_schema)";
    Ok(conn.query_row(SQL, [], |row| row.get(0))?)
}

/// Runs the schema.
pub(crate) fn create(conn: &Connection) -> Result<()> {
    Ok(conn.execute_batch(include_str!("../../schema.sql"))?)
}

/// The machine was restarted, and the epoch raised: every lease of the boot before has run out, and no worker of it lives. Where that
/// is more than a few rows, they are marked, and changed in steps.
pub(crate) fn void_all_claims(conn: &Connection) -> Result<()> {
    const WORKERS: &str = "DELETE FROM main.relet_workers";
    conn.prepare_cached(WORKERS)?.execute([])?;
    ended::mark_all(conn, need(conn, "epoch")?)?;
    ended::clear_if_few(conn)
}

/// Whether there are waits that were set by a clock which is ahead of `now`.
pub(crate) fn has_waits_ahead(conn: &Connection, now: i64) -> Result<bool> {
    const ANY: &str = "SELECT EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_set
                                       WHERE set_at IS NOT NULL AND set_at > ?1)
        OR EXISTS (SELECT 1 FROM main.relet_gates INDEXED BY relet_closed
                    WHERE closed_at IS NOT NULL AND closed_at > ?1)
        OR EXISTS (SELECT 1 FROM main.relet_queues INDEXED BY relet_paused
                    WHERE paused_at IS NOT NULL AND paused_at > ?1)";
    Ok(conn.prepare_cached(ANY)?.query_row([now], |row| row.get(0))?)
}

/// Waits that were set as a span of time by a clock that is ahead of `now` (so it was set back since) begin again now.
pub(crate) fn restart_waits(conn: &Connection, now: i64) -> Result<()> {
    const MESSAGES: &str = "UPDATE main.relet_messages AS m SET due_at = ?1 + (r.due_at - r.set_at)
                              FROM main.relet_retry_queue r INDEXED BY relet_set
                             WHERE r.set_at IS NOT NULL AND r.set_at > ?1 AND m.id = r.message";
    const RETRIES: &str = "UPDATE main.relet_retry_queue INDEXED BY relet_set
                              SET due_at = ?1 + (due_at - set_at), kept_until = ?1 + (kept_until - set_at), set_at = ?1
                            WHERE set_at IS NOT NULL AND set_at > ?1";
    const GATES: &str = "UPDATE main.relet_gates INDEXED BY relet_closed
                            SET closed_until = ?1 + (closed_until - closed_at), closed_at = ?1
                          WHERE closed_at IS NOT NULL AND closed_at > ?1";
    const QUEUES: &str = "UPDATE main.relet_queues INDEXED BY relet_paused
                             SET paused_until = ?1 + (paused_until - paused_at), paused_at = ?1
                           WHERE paused_at IS NOT NULL AND paused_at > ?1";
    if has_waits_ahead(conn, now)? {
        conn.prepare_cached(GATES)?.execute([now])?;
        conn.prepare_cached(QUEUES)?.execute([now])?;
        conn.prepare_cached(MESSAGES)?.execute([now])?;
        conn.prepare_cached(RETRIES)?.execute([now])?;
    }
    Ok(())
}

/// Writes the whole database into an empty file, from one snapshot.
pub(crate) fn copy_into(conn: &Connection, file: &std::path::Path) -> Result<()> {
    const SQL: &str = "VACUUM main INTO ?1";
    let name = file.to_str().ok_or_else(|| Error::Backup {
        path: file.to_owned(),
        detail: "its name is not Unicode; choose another".into(),
    })?;
    conn.execute(SQL, [name]).map_err(|error| Error::Backup { path: file.to_owned(), detail: error.to_string() })?;
    Ok(())
}
