//! `relet_details`: what few messages are given, or get in the course of their lives; and the lists that only such messages are on:
//! those that have passed a gate, and those whose time to live runs.

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::error::Result;
use crate::message::DEFERRALS_MAX;
use crate::sql::{Extras, Record, Tx, gates, groups, keys};

pub(crate) fn load(conn: &Connection, record: &mut Record) -> Result<()> {
    const SQL: &str =
        "SELECT key, group_key, gate, tick_at, expires_at, max_deferrals, retry, deferrals, releases, redrives,
                              last_error, dead_reason
                         FROM main.relet_details WHERE message = ?1";
    let read = |row: &Row<'_>| {
        record.key = row.get(0)?;
        record.group = row.get(1)?;
        record.gate = row.get(2)?;
        record.tick_at = row.get(3)?;
        record.expires_at = row.get(4)?;
        record.max_deferrals = row.get::<_, Option<u32>>(5)?.unwrap_or(DEFERRALS_MAX);
        record.retry = row.get(6)?;
        record.deferrals = row.get(7)?;
        record.releases = row.get(8)?;
        record.redrives = row.get(9)?;
        record.last_error = row.get(10)?;
        record.dead_reason = row.get(11)?;
        Ok(())
    };
    // A row that is missing is damage, which `doctor` tells; the message goes on without it.
    conn.prepare_cached(SQL)?.query_row([record.id], read).optional()?;
    Ok(())
}

/// Stores what the record says, in place of what was there. Whoever calls it sets [`Extras::DETAILS`] in the message's row.
pub(crate) fn save(conn: &Connection, record: &mut Record) -> Result<()> {
    const SQL: &str = "INSERT OR REPLACE INTO main.relet_details
        (message, key, group_key, gate, tick_at, expires_at, max_deferrals, retry, deferrals, releases, redrives, last_error,
         dead_reason)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";
    conn.prepare_cached(SQL)?.execute(params![
        record.id,
        record.key,
        record.group,
        record.gate,
        record.tick_at,
        record.expires_at,
        (record.max_deferrals != DEFERRALS_MAX).then_some(record.max_deferrals),
        record.retry,
        record.deferrals,
        record.releases,
        record.redrives,
        record.last_error,
        record.dead_reason,
    ])?;
    record.extras = record.extras.and(Extras::DETAILS, true);
    Ok(())
}

fn delete(conn: &Connection, message: i64) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_details WHERE message = ?1";
    conn.prepare_cached(SQL)?.execute([message])?;
    Ok(())
}

/// It begins to wait to be handed out: its time to live runs.
pub(crate) fn begin_to_wait(conn: &Connection, record: &Record) -> Result<()> {
    const SQL: &str = "INSERT OR IGNORE INTO main.relet_expiry (expires_at, message) VALUES (?1, ?2)";
    if let Some(expires_at) = record.expires_at {
        conn.prepare_cached(SQL)?.execute([expires_at, record.id])?;
    }
    Ok(())
}

/// It is handed out in time: whatever becomes of that claim, its time to live has done its part.
pub(crate) fn handed_out(conn: &Connection, record: &mut Record) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_details SET expires_at = NULL WHERE message = ?1";
    if record.expires_at.is_some() {
        end_to_wait(conn, record)?;
        conn.prepare_cached(SQL)?.execute([record.id])?;
        record.expires_at = None;
    }
    Ok(())
}

/// It waits no more.
fn end_to_wait(conn: &Connection, record: &Record) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_expiry WHERE expires_at = ?1 AND message = ?2";
    if let Some(expires_at) = record.expires_at {
        conn.prepare_cached(SQL)?.execute([expires_at, record.id])?;
    }
    Ok(())
}

/// Its claim has ended, and it is back where it waits.
pub(crate) fn given_back(conn: &Connection, record: &Record) -> Result<()> {
    gates::leave(conn, record)?;
    begin_to_wait(conn, record)
}

/// It is finished: nothing that is kept of live messages knows it any more.
pub(crate) fn ended(conn: &Connection, record: &Record) -> Result<()> {
    keys::free(conn, record)?;
    groups::leave(conn, record)?;
    gates::leave(conn, record)?;
    end_to_wait(conn, record)
}

/// It is removed, and what lies beside it with it.
pub(crate) fn removed(tx: &Tx<'_>, record: &Record) -> Result<()> {
    if record.extras.has(Extras::DETAILS) {
        if record.status.is_live() {
            ended(tx.conn, record)?;
        }
        delete(tx.conn, record.id)?;
    }
    Ok(())
}
