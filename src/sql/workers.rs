//! `relet_workers`: the running workers, and which incarnation of a label is the present one.

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::clock::Now;
use crate::error::Result;
use crate::sql::{Tx, ended};

/// A registered worker.
#[derive(Debug, Clone)]
pub(crate) struct WorkerRow {
    pub(crate) label: String,
    pub(crate) incarnation: i64,
    pub(crate) pid: u32,
    pub(crate) started_at: i64,
    /// The name of the file whose lock it holds; `None` in memory.
    pub(crate) lock: Option<String>,
}

impl WorkerRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<WorkerRow> {
        Ok(WorkerRow {
            label: row.get(0)?,
            incarnation: row.get(1)?,
            pid: row.get(2)?,
            started_at: row.get(3)?,
            lock: row.get(4)?,
        })
    }
}

pub(crate) fn find(conn: &Connection, label: &str) -> Result<Option<WorkerRow>> {
    const SQL: &str = "SELECT label, incarnation, pid, started_at, lock FROM main.relet_workers WHERE label = ?1";
    Ok(conn.prepare_cached(SQL)?.query_row([label], WorkerRow::read).optional()?)
}

/// Whether this is the present start of the label.
pub(crate) fn is_present(conn: &Connection, label: &str, incarnation: i64) -> Result<bool> {
    const SQL: &str = "SELECT incarnation = ?2 FROM main.relet_workers WHERE label = ?1";
    let present = conn.prepare_cached(SQL)?.query_row(params![label, incarnation], |row| row.get(0)).optional()?;
    Ok(present.unwrap_or(false))
}

pub(crate) fn all(conn: &Connection) -> Result<Vec<WorkerRow>> {
    const SQL: &str = "SELECT label, incarnation, pid, started_at, lock FROM main.relet_workers ORDER BY label";
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map([], WorkerRow::read)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// What one label holds, by registered starts of it or detached.
#[derive(Debug, Clone)]
pub(crate) struct Holding {
    pub(crate) label: String,
    pub(crate) detached: bool,
    pub(crate) held: u64,
    pub(crate) deferred: u64,
}

/// What every label holds with a lease that runs, and what it has deferred, counted one by one.
pub(crate) fn holdings(conn: &Connection, now: Now) -> Result<Vec<Holding>> {
    // Queue by queue, so that both are found by their indexes: what waits and what is finished is not read.
    const SQL: &str = "
        SELECT label, detached, count(held), count(*) - count(held) FROM (
          SELECT m.worker_id AS label, m.incarnation = 0 AS detached, 1 AS held
            FROM main.relet_queues q CROSS JOIN main.relet_messages m INDEXED BY relet_lines
           WHERE m.queue = q.id AND m.line = -1 AND m.place > ?1
          UNION ALL
          SELECT r.worker_id, m.incarnation = 0, NULL
            FROM main.relet_queues q CROSS JOIN main.relet_retry_queue r INDEXED BY relet_retry_kept
            CROSS JOIN main.relet_messages m
           WHERE r.queue = q.id AND r.worker_id IS NOT NULL AND m.id = r.message)
         GROUP BY label, detached";
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map([now.awake], |row| {
        Ok(Holding {
            label: row.get(0)?,
            detached: row.get(1)?,
            held: row.get::<_, i64>(2)?.unsigned_abs(),
            deferred: row.get::<_, i64>(3)?.unsigned_abs(),
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub(crate) fn register(tx: &Tx<'_>, label: &str, incarnation: i64, lock: Option<&str>) -> Result<()> {
    const SQL: &str =
        "INSERT INTO main.relet_workers (label, incarnation, pid, started_at, lock) VALUES (?1, ?2, ?3, ?4, ?5)";
    let pid = std::process::id();
    tx.conn.prepare_cached(SQL)?.execute(params![label, incarnation, pid, tx.now.time, lock])?;
    Ok(())
}

/// A start of the label has ended in good order: its name is free, and what it deferred is anyone's when it is due.
pub(crate) fn strike(tx: &Tx<'_>, label: &str, incarnation: i64) -> Result<()> {
    if remove(tx, label, incarnation)? {
        ended::mark(tx.conn, label, incarnation, false)?;
        ended::clear_if_few(tx.conn)?;
    }
    Ok(())
}

/// The owner of this row is dead: its name is free, and what it holds is void, as soon as [`ended`] has come to it.
pub(crate) fn bury(tx: &Tx<'_>, row: &WorkerRow) -> Result<()> {
    if remove(tx, &row.label, row.incarnation)? {
        ended::mark(tx.conn, &row.label, row.incarnation, true)?;
    }
    Ok(())
}

/// Returns whether it was there.
pub(crate) fn remove(tx: &Tx<'_>, label: &str, incarnation: i64) -> Result<bool> {
    const SQL: &str = "DELETE FROM main.relet_workers WHERE label = ?1 AND incarnation = ?2";
    Ok(tx.conn.prepare_cached(SQL)?.execute(params![label, incarnation])? == 1)
}
