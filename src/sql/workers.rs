//! `relet_workers`: which incarnation of a label is the present one.

use rusqlite::params;

use crate::error::Result;
use crate::sql::{Tx, meta};

/// Registers a new incarnation of a label and returns it. Every claim that an earlier one still holds is void from now on.
pub(crate) fn register(tx: &Tx<'_>, label: &str, pid: u32) -> Result<i64> {
    const REGISTER: &str =
        "INSERT INTO main.relet_workers (label, incarnation, pid, started_at) VALUES (?1, ?2, ?3, ?4)
        ON CONFLICT (label) DO UPDATE
        SET incarnation = excluded.incarnation, pid = excluded.pid, started_at = excluded.started_at";
    const VOID: &str = "UPDATE main.relet_messages INDEXED BY relet_leases SET lease_until = 0
                         WHERE lease_until IS NOT NULL AND worker_id = ?1 AND incarnation NOT IN (0, ?2)";
    let incarnation = meta::get::<i64>(tx.conn, "incarnation")?.unwrap_or(0) + 1;
    meta::set(tx.conn, "incarnation", incarnation)?;
    tx.conn.prepare_cached(REGISTER)?.execute(params![label, incarnation, pid, tx.now.wall])?;
    tx.conn.prepare_cached(VOID)?.execute(params![label, incarnation])?;
    Ok(incarnation)
}

/// The incarnation ends in good order; what it still holds keeps its lease.
pub(crate) fn deregister(tx: &Tx<'_>, label: &str, incarnation: i64) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_workers WHERE label = ?1 AND incarnation = ?2";
    tx.conn.prepare_cached(SQL)?.execute(params![label, incarnation])?;
    Ok(())
}
