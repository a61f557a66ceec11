//! `relet_finished`: the messages that are done, dead or cancelled, by when they ended and how long they are kept.

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Result;
use crate::state::Status;

/// When the message ended.
pub(crate) fn at(conn: &Connection, message: i64) -> Result<Option<i64>> {
    const SQL: &str = "SELECT finished_at FROM main.relet_finished WHERE message = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([message], |row| row.get(0)).optional()?)
}

/// Whether no more than so many have this status.
pub(crate) fn are_few(conn: &Connection, status: Status, most: i64) -> Result<bool> {
    const SQL: &str = "SELECT NOT EXISTS (SELECT 1 FROM main.relet_finished INDEXED BY relet_ends
                                           WHERE status = ?1 LIMIT 1 OFFSET ?2)";
    Ok(conn.prepare_cached(SQL)?.query_row(params![status, most], |row| row.get(0))?)
}

pub(crate) fn put(conn: &Connection, message: i64, status: Status, at: i64, keep_until: Option<i64>) -> Result<()> {
    const SQL: &str =
        "INSERT OR REPLACE INTO main.relet_finished (message, status, finished_at, keep_until) VALUES (?1, ?2, ?3, ?4)";
    debug_assert_eq!(keep_until.is_some(), status != Status::Dead, "dead letters are kept until somebody purges them");
    conn.prepare_cached(SQL)?.execute(params![message, status, at, keep_until])?;
    Ok(())
}

/// It is live again, or removed.
pub(crate) fn take(conn: &Connection, message: i64) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_finished WHERE message = ?1";
    conn.prepare_cached(SQL)?.execute([message])?;
    Ok(())
}
