//! `relet_groups`: the live members of groups, and whose turn it is. At most one of a group is not parked behind another; the index
//! `relet_turns` holds it.

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Result;
use crate::sql::{Record, Tx, retry_queue};
use crate::state::Status;

/// Whether the group has a live member.
pub(crate) fn has_live_member(tx: &Tx<'_>, queue: i64, group: &str) -> Result<bool> {
    Ok(first_live(tx.conn, queue, group)?.is_some())
}

/// A live message joins its group: it has its turn, or waits for it.
pub(crate) fn join(conn: &Connection, record: &Record, turn: bool) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_groups (queue, group_key, message, turn) VALUES (?1, ?2, ?3, ?4)";
    if let Some(group) = &record.group {
        conn.prepare_cached(SQL)?.execute(params![record.queue, group, record.id, turn])?;
    }
    Ok(())
}

/// A member has ended.
pub(crate) fn leave(conn: &Connection, record: &Record) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_groups WHERE queue = ?1 AND group_key = ?2 AND message = ?3";
    if let Some(group) = &record.group {
        conn.prepare_cached(SQL)?.execute(params![record.queue, group, record.id])?;
    }
    Ok(())
}

/// Whether the message waits for another of its group.
pub(crate) fn is_behind(conn: &Connection, record: &Record) -> Result<bool> {
    const SQL: &str = "SELECT turn FROM main.relet_groups WHERE queue = ?1 AND group_key = ?2 AND message = ?3";
    let Some(group) = &record.group else { return Ok(false) };
    let turn = conn.prepare_cached(SQL)?.query_row(params![record.queue, group, record.id], |row| row.get(0));
    Ok(turn.optional()? == Some(false))
}

/// Gives the turn to whom it belongs: the member in `processing`, else the live one with the smallest id. Call it after any
/// change of a member's status. What that member waits for (its due time), the group waits for.
pub(crate) fn settle_turn(tx: &mut Tx<'_>, queue: i64, group: Option<&str>) -> Result<()> {
    const TURN: &str = "UPDATE main.relet_groups SET turn = ?4 WHERE queue = ?1 AND group_key = ?2 AND message = ?3";
    const LINE: &str =
        "UPDATE main.relet_messages SET line = ?2, place = iif(?2 IS NULL, NULL, -priority) WHERE id = ?1";
    let Some(group) = group else { return Ok(()) };
    let turn = turn_of(tx.conn, queue, group)?;
    if let Some((_, Status::Processing)) = turn {
        return Ok(());
    }
    let Some(first) = first_live(tx.conn, queue, group)? else { return Ok(()) };
    match turn {
        Some((holder, _)) if holder == first => return Ok(()),
        Some((holder, _)) => {
            tx.conn.prepare_cached(TURN)?.execute(params![queue, group, holder, false])?;
            tx.conn.prepare_cached(LINE)?.execute(params![holder, None::<i64>])?;
            retry_queue::set_behind(tx.conn, queue, holder, true)?;
        }
        None => {}
    }
    let Some(record) = Record::load(tx.conn, first)? else { return Ok(()) };
    tx.conn.prepare_cached(TURN)?.execute(params![queue, group, first, true])?;
    let waits = retry_queue::waits_until(tx.conn, &record, tx.now)?.is_some();
    if !(waits && retry_queue::set_behind(tx.conn, queue, first, false)?) {
        // A wait that is over goes, and its row with it.
        retry_queue::take(tx, &record)?;
        tx.conn.prepare_cached(LINE)?.execute(params![first, record.own_line()])?;
    }
    Ok(())
}

/// The member whose turn it is, and its status.
pub(crate) fn turn_of(conn: &Connection, queue: i64, group: &str) -> Result<Option<(i64, Status)>> {
    const SQL: &str = "SELECT m.id, m.status FROM main.relet_groups g INDEXED BY relet_turns
                         CROSS JOIN main.relet_messages m ON m.id = g.message
                        WHERE g.queue = ?1 AND g.group_key = ?2 AND g.turn = 1";
    Ok(conn.prepare_cached(SQL)?.query_row(params![queue, group], |row| Ok((row.get(0)?, row.get(1)?))).optional()?)
}

fn first_live(conn: &Connection, queue: i64, group: &str) -> Result<Option<i64>> {
    const SQL: &str =
        "SELECT message FROM main.relet_groups WHERE queue = ?1 AND group_key = ?2 ORDER BY message LIMIT 1";
    Ok(conn.prepare_cached(SQL)?.query_row(params![queue, group], |row| row.get(0)).optional()?)
}
