//! `relet_schedules`: recurring enqueues. What ticks when is `schedule.rs`'s business.

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::clock::Now;
use crate::error::Result;
use crate::sql::Tx;

/// One row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScheduleRow {
    pub(crate) name: String,
    pub(crate) queue: String,
    pub(crate) every_ms: Option<i64>,
    pub(crate) cron: Option<String>,
    pub(crate) time_zone: Option<String>,
    pub(crate) catch_up: u32,
    /// What else is to be known of the message, as JSON.
    pub(crate) options: String,
    pub(crate) payload: Vec<u8>,
    pub(crate) place: Place,
}

/// Where a schedule has got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) next_at: i64,
    /// When `next_at` was set.
    pub(crate) set_at: i64,
    pub(crate) last_at: Option<i64>,
    /// The last ticks of a cron schedule that were missed and not made up for: from the one, and before the other.
    pub(crate) missed: Option<(i64, i64)>,
}

/// A SELECT of the columns that [`ScheduleRow::read`] expects, in its order, with what follows `FROM`.
macro_rules! select_schedule {
    ($tail:literal) => {
        concat!(
            "SELECT name, queue, every_ms, cron, time_zone, catch_up, options, payload, next_at, set_at, last_at,
                    missed_from, missed_to
               FROM main.relet_schedules ",
            $tail
        )
    };
}

impl ScheduleRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<ScheduleRow> {
        let missed_from: Option<i64> = row.get(11)?;
        let missed_to: Option<i64> = row.get(12)?;
        Ok(ScheduleRow {
            name: row.get(0)?,
            queue: row.get(1)?,
            every_ms: row.get(2)?,
            cron: row.get(3)?,
            time_zone: row.get(4)?,
            catch_up: row.get(5)?,
            options: row.get(6)?,
            payload: row.get(7)?,
            place: Place {
                next_at: row.get(8)?,
                set_at: row.get(9)?,
                last_at: row.get(10)?,
                missed: missed_from.zip(missed_to),
            },
        })
    }
}

pub(crate) fn find(conn: &Connection, name: &str) -> Result<Option<ScheduleRow>> {
    const SQL: &str = select_schedule!("WHERE name = ?1");
    Ok(conn.prepare_cached(SQL)?.query_row([name], ScheduleRow::read).optional()?)
}

/// Every schedule, by name.
pub(crate) fn all(conn: &Connection) -> Result<Vec<ScheduleRow>> {
    const SQL: &str = select_schedule!("ORDER BY name");
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map([], ScheduleRow::read)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// The names of those that have something to do: a tick is due, or the clock was set back since its next tick was set. In the
/// order of their ticks.
pub(crate) fn due(conn: &Connection, now: Now) -> Result<Vec<String>> {
    const SQL: &str = "SELECT name FROM main.relet_schedules WHERE next_at <= ?1 OR set_at > ?1 ORDER BY next_at, name";
    let mut statement = conn.prepare_cached(SQL)?;
    let names = statement.query_map([now.wall], |row| row.get(0))?;
    Ok(names.collect::<rusqlite::Result<_>>()?)
}

/// The earliest tick of those that are not to be left out.
pub(crate) fn next_tick(conn: &Connection, leave_out: impl Fn(&str) -> bool) -> Result<Option<i64>> {
    const SQL: &str = "SELECT name, next_at FROM main.relet_schedules INDEXED BY relet_ticks ORDER BY next_at";
    let mut statement = conn.prepare_cached(SQL)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let name: String = row.get(0)?;
        if !leave_out(&name) {
            return Ok(Some(row.get(1)?));
        }
    }
    Ok(None)
}

/// Stores a schedule, in place of the one of its name.
pub(crate) fn put(tx: &Tx<'_>, row: &ScheduleRow) -> Result<()> {
    const SQL: &str = "INSERT OR REPLACE INTO main.relet_schedules
        (name, queue, every_ms, cron, time_zone, catch_up, options, payload, next_at, set_at, last_at, missed_from, missed_to)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";
    let place = row.place;
    tx.conn.prepare_cached(SQL)?.execute(params![
        row.name,
        row.queue,
        row.every_ms,
        row.cron,
        row.time_zone,
        row.catch_up,
        row.options,
        row.payload,
        place.next_at,
        place.set_at,
        place.last_at,
        place.missed.map(|missed| missed.0),
        place.missed.map(|missed| missed.1),
    ])?;
    Ok(())
}

/// A schedule goes on to another place.
pub(crate) fn go_on(tx: &Tx<'_>, name: &str, place: Place) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_schedules
                          SET next_at = ?2, set_at = ?3, last_at = ?4, missed_from = ?5, missed_to = ?6 WHERE name = ?1";
    tx.conn.prepare_cached(SQL)?.execute(params![
        name,
        place.next_at,
        place.set_at,
        place.last_at,
        place.missed.map(|missed| missed.0),
        place.missed.map(|missed| missed.1),
    ])?;
    Ok(())
}

/// Whether there was one.
pub(crate) fn remove(tx: &Tx<'_>, name: &str) -> Result<bool> {
    const SQL: &str = "DELETE FROM main.relet_schedules WHERE name = ?1";
    Ok(tx.conn.prepare_cached(SQL)?.execute([name])? > 0)
}
