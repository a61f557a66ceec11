//! Prune: what is finished and has been kept long enough goes, in small steps.

use rusqlite::params;

use crate::clock::millis;
use crate::error::Result;
use crate::sql::dead::{self, By};
use crate::sql::{Record, Tx};
use crate::state::Status;

/// Rows that one step deletes at most, so that no step holds the write lock for long.
pub(crate) const PRUNE_STEP: usize = 500;
/// How long a cancelled message is kept at least, in ms: a day, so that its holder learns of it.
const CANCELLED_KEPT: i64 = 86_400_000;

/// Deletes done and cancelled messages that are past the store's retention, and makes dead letters of what has expired. Returns how many rows it changed, up to twice [`PRUNE_STEP`].
pub(crate) fn step(tx: &mut Tx<'_>) -> Result<usize> {
    const EXPIRED: &str = "SELECT id FROM main.relet_messages INDEXED BY relet_expiry
                            WHERE expires_at IS NOT NULL AND worker_id IS NULL AND finished_at IS NULL AND expires_at <= ?1
                            ORDER BY expires_at LIMIT ?2";
    let retention = millis(tx.defaults.retention);
    let mut changed = finished(tx, Status::Done, retention)?;
    changed += finished(tx, Status::Cancelled, retention.max(CANCELLED_KEPT))?;
    let expired: Vec<i64> = {
        let mut statement = tx.conn.prepare_cached(EXPIRED)?;
        let rows = statement.query_map(params![tx.now.wall, PRUNE_STEP as i64], |row| row.get(0))?;
        rows.collect::<rusqlite::Result<_>>()?
    };
    for id in &expired {
        if let Some(record) = Record::load(tx.conn, *id)? {
            let reason = "expired: its time to live was over before it could be handed out";
            dead::give_up(tx, &record, Some(reason), None, By::Another)?;
        }
    }
    changed += expired.len();
    Ok(changed)
}

/// Deletes dead letters that died at least `age_ms` ago. Returns how many, up to [`PRUNE_STEP`].
pub(crate) fn dead_letters(tx: &mut Tx<'_>, age_ms: i64) -> Result<usize> {
    finished(tx, Status::Dead, age_ms)
}

fn finished(tx: &mut Tx<'_>, status: Status, age_ms: i64) -> Result<usize> {
    const SQL: &str = "SELECT id FROM main.relet_messages INDEXED BY relet_finished
                        WHERE status = ?1 AND finished_at IS NOT NULL AND finished_at <= ?2
                        ORDER BY finished_at LIMIT ?3";
    let before = tx.now.wall.saturating_sub(age_ms);
    let ids: Vec<i64> = {
        let mut statement = tx.conn.prepare_cached(SQL)?;
        let rows = statement.query_map(params![status, before, PRUNE_STEP as i64], |row| row.get(0))?;
        rows.collect::<rusqlite::Result<_>>()?
    };
    for id in &ids {
        if let Some(record) = Record::load(tx.conn, *id)? {
            dead::remove(tx, &record)?;
        }
    }
    Ok(ids.len())
}
