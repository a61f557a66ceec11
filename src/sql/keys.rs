//! `relet_keys`: at most one live message per queue and key.

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Result;
use crate::sql::Record;

/// The live message of the queue that has this key.
pub(crate) fn holder(conn: &Connection, queue: i64, key: &str) -> Result<Option<i64>> {
    const SQL: &str = "SELECT message FROM main.relet_keys WHERE queue = ?1 AND key = ?2";
    Ok(conn.prepare_cached(SQL)?.query_row(params![queue, key], |row| row.get(0)).optional()?)
}

/// The message has its key from now on, which must be free.
pub(crate) fn take(conn: &Connection, record: &Record) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_keys (queue, key, message) VALUES (?1, ?2, ?3)";
    if let Some(key) = &record.key {
        conn.prepare_cached(SQL)?.execute(params![record.queue, key, record.id])?;
    }
    Ok(())
}

/// The message has ended: its key is free.
pub(crate) fn free(conn: &Connection, record: &Record) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_keys WHERE queue = ?1 AND key = ?2 AND message = ?3";
    if let Some(key) = &record.key {
        conn.prepare_cached(SQL)?.execute(params![record.queue, key, record.id])?;
    }
    Ok(())
}
