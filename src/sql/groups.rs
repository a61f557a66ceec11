//! Groups: whose turn it is. At most one live member of a group is not parked behind another; the index `relet_turns` holds it.

use rusqlite::{OptionalExtension, params};

use crate::error::Result;
use crate::sql::Tx;
use crate::state::Status;

/// Whether the group has a live member.
pub(crate) fn has_live_member(tx: &Tx<'_>, queue: i64, group: &str) -> Result<bool> {
    Ok(first_live(tx, queue, group)?.is_some())
}

/// Gives the turn to whom it belongs: the member in `processing`, else the live one with the smallest id. Call it after any
/// change of a member's status. What that member waits for (its due time), the group waits for.
pub(crate) fn settle_turn(tx: &mut Tx<'_>, queue: i64, group: Option<&str>) -> Result<()> {
    const PARK: &str = "UPDATE main.relet_messages SET waits_for = 'group' WHERE id = ?1";
    // A wait that is over does not begin again when the clock is set back: parked_at goes with it.
    const UNPARK: &str = "UPDATE main.relet_messages
                             SET waits_for = CASE WHEN due_at > ?2 THEN 'due' END,
                                 parked_at = CASE WHEN due_at > ?2 THEN parked_at END
                           WHERE id = ?1";
    const UNQUEUE: &str = "DELETE FROM main.relet_retry_queue WHERE message = ?1 AND due_at <= ?2";
    let Some(group) = group else { return Ok(()) };
    let turn = turn_of(tx.conn, queue, group)?;
    if let Some((_, Status::Processing)) = turn {
        return Ok(());
    }
    let Some(first) = first_live(tx, queue, group)? else { return Ok(()) };
    match turn {
        Some((holder, _)) if holder == first => return Ok(()),
        Some((holder, _)) => tx.conn.prepare_cached(PARK)?.execute([holder])?,
        None => 0,
    };
    tx.conn.prepare_cached(UNPARK)?.execute(params![first, tx.now.wall])?;
    let over = tx.conn.prepare_cached(UNQUEUE)?.execute(params![first, tx.now.wall])?;
    tx.count_retrying(queue, -(over as i64));
    Ok(())
}

/// The member whose turn it is, and its status.
pub(crate) fn turn_of(conn: &rusqlite::Connection, queue: i64, group: &str) -> Result<Option<(i64, Status)>> {
    const SQL: &str = "SELECT id, status FROM main.relet_messages INDEXED BY relet_turns
                        WHERE queue = ?1 AND group_key = ?2 AND group_key IS NOT NULL AND finished_at IS NULL
                          AND waits_for IS NOT 'group'";
    Ok(conn.prepare_cached(SQL)?.query_row(params![queue, group], |row| Ok((row.get(0)?, row.get(1)?))).optional()?)
}

fn first_live(tx: &Tx<'_>, queue: i64, group: &str) -> Result<Option<i64>> {
    const SQL: &str = "SELECT id FROM main.relet_messages INDEXED BY relet_groups
                        WHERE queue = ?1 AND group_key = ?2 AND group_key IS NOT NULL AND finished_at IS NULL
                        ORDER BY id LIMIT 1";
    Ok(tx.conn.prepare_cached(SQL)?.query_row(params![queue, group], |row| row.get(0)).optional()?)
}
