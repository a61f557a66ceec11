//! `relet_meta`: what is true of the whole store.

use std::time::Duration;

use rusqlite::types::{FromSql, ToSql};
use rusqlite::{Connection, OptionalExtension, params};

use crate::clock::Now;
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

/// What the store knows of the machine's boot and clocks.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    /// `None`: nothing was noted yet.
    pub(crate) epoch: Option<i64>,
    pub(crate) floor: i64,
    pub(crate) boot_id: Option<String>,
    pub(crate) boot_mark: i64,
    pub(crate) base: Option<i64>,
    pub(crate) skew: i64,
    pub(crate) ahead: i64,
    pub(crate) sure: bool,
    /// The store's time, and how long the machine had been awake, when that was last noted.
    pub(crate) seen: (i64, i64),
}

/// Reads all of it in one statement.
pub(crate) fn clocks(conn: &Connection) -> Result<Clocks> {
    const SQL: &str = "SELECT key, value FROM main.relet_meta";
    // What is of another type is damage, which `doctor` tells, and counts as not there.
    let number = |row: &rusqlite::Row<'_>| Ok::<_, rusqlite::Error>(row.get_ref(1)?.as_i64().ok());
    let mut clocks = Clocks::default();
    let mut statement = conn.prepare_cached(SQL)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        match row.get_ref(0)?.as_str().unwrap_or_default() {
            "epoch" => clocks.epoch = number(row)?,
            "epoch_floor" => clocks.floor = number(row)?.unwrap_or(0),
            "clock_sure" => clocks.sure = number(row)? == Some(1),
            "boot_id" => clocks.boot_id = row.get_ref(1)?.as_str().ok().map(str::to_owned),
            "boot_mark" => clocks.boot_mark = number(row)?.unwrap_or(i64::MAX),
            "clock_base" => clocks.base = number(row)?,
            "clock_ahead" => clocks.ahead = number(row)?.unwrap_or(0),
            "clock_skew" => clocks.skew = number(row)?.unwrap_or(0),
            "seen_at" => clocks.seen.0 = number(row)?.unwrap_or(0),
            "seen_awake" => clocks.seen.1 = number(row)?.unwrap_or(0),
            _ => {}
        }
    }
    Ok(clocks)
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

/// The machine may have been restarted: a lease that is longer than it was made was made on another clock, and is void.
pub(crate) fn void_unbelievable_claims(conn: &Connection, now: Now) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_messages INDEXED BY relet_lines SET place = 0
                        WHERE queue IN (SELECT id FROM main.relet_queues) AND line = -1 AND place - lease_ms > ?1";
    conn.prepare_cached(SQL)?.execute([now.awake])?;
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

/// What is wrong with the file as such; `None` where it is whole.
pub(crate) fn damage(conn: &Connection) -> Result<Option<String>> {
    const SQL: &str = "PRAGMA main.integrity_check(1)";
    let found: String = conn.query_row(SQL, [], |row| row.get(0))?;
    Ok(Some(found).filter(|found| found != "ok"))
}

/// Brings the log into the file and removes it, and locks the file against everybody for as long as this connection is open.
///
/// # Errors
/// [`Error::Busy`] where anybody else has the file open.
pub(crate) fn end_log(conn: &Connection) -> Result<()> {
    const SQL: &str = "PRAGMA main.journal_mode = DELETE";
    let mode: String = conn.query_row(SQL, [], |row| row.get(0))?;
    match mode.as_str() {
        "delete" => Ok(conn.execute_batch("BEGIN EXCLUSIVE")?),
        _ => Err(Error::Busy { waited: Duration::ZERO }),
    }
}
