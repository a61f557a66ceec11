//! Prune: what is finished and has been kept long enough goes, in small steps.

use rusqlite::{Params, params};

use crate::error::Result;
use crate::sql::dead::{self, By, EXPIRED};
use crate::sql::{Record, Tx, ids};

/// Rows that one step deletes at most, so that no step holds the write lock for long.
pub(crate) const PRUNE_STEP: usize = 500;

/// Deletes done and cancelled messages that have been kept long enough, and makes dead letters of what has expired. Returns how many rows it changed, up to twice [`PRUNE_STEP`].
pub(crate) fn step(tx: &mut Tx<'_>) -> Result<usize> {
    const KEPT: &str = "SELECT message FROM main.relet_finished INDEXED BY relet_kept
                         WHERE keep_until IS NOT NULL AND keep_until <= ?1 ORDER BY keep_until LIMIT ?2";
    const OVER: &str = "SELECT message FROM main.relet_expiry WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2";
    let now = tx.now.time;
    let kept = remove(tx, KEPT, params![now, PRUNE_STEP as i64])?;
    let over = records(tx, OVER, params![now, PRUNE_STEP as i64])?;
    for record in &over {
        debug_assert!(record.is_expired(now), "only what waits to be handed out is in relet_expiry: {record:?}");
        dead::give_up(tx, record, Some(EXPIRED), None, By::Another)?;
    }
    Ok(kept + over.len())
}

/// Deletes dead letters that died at least `age_ms` ago. Returns how many, up to [`PRUNE_STEP`].
pub(crate) fn dead_letters(tx: &mut Tx<'_>, age_ms: i64) -> Result<usize> {
    const SQL: &str = "SELECT message FROM main.relet_finished INDEXED BY relet_ends
                        WHERE status = 'dead' AND finished_at <= ?1 ORDER BY finished_at LIMIT ?2";
    let before = tx.now.time.saturating_sub(age_ms);
    remove(tx, SQL, params![before, PRUNE_STEP as i64])
}

fn remove(tx: &mut Tx<'_>, sql: &str, params: impl Params) -> Result<usize> {
    let found = records(tx, sql, params)?;
    for record in &found {
        dead::remove(tx, record)?;
    }
    Ok(found.len())
}

fn records(tx: &Tx<'_>, sql: &str, params: impl Params) -> Result<Vec<Record>> {
    let ids = ids(tx.conn, sql, params)?;
    Ok(ids.into_iter().map(|id| Record::load(tx.conn, id)).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}
