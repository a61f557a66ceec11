//! `relet_ended`: starts of workers that are over, of which something still looks as if it were theirs.
//!
//! What a dead worker holds is void, and what one that has ended had deferred is anyone's when it is due. To find all of that may take
//! long, so nobody does it under the write lock: the end of a start is marked, which is one row. Then its rows are looked for
//! by a reader and changed in steps, and the mark goes when nothing is left. A start that is marked claims nothing more, so
//! what is looked for only grows less; and whoever dies meanwhile leaves the mark to others.

use std::collections::HashMap;

use rusqlite::{Connection, params};

use crate::error::Result;
use crate::sql::{Tx, budget};

/// A mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    /// `""`: every worker, detached ones too, with what was claimed in an epoch before `upto` (the machine was restarted).
    label: String,
    /// Every start of the label up to this incarnation.
    upto: i64,
    /// What it holds is void; otherwise that keeps its leases.
    dead: bool,
}

/// A claim that is to be void.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    id: i64,
    token: i64,
    epoch: i64,
}

/// A deferral that is not to be kept for its worker any more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    queue: i64,
    message: i64,
    kept_until: i64,
}

/// What was found of all that are marked.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) marks: Vec<Mark>,
    pub(crate) held: Vec<Held>,
    pub(crate) kept: Vec<Kept>,
}

/// Every start of the label up to this incarnation is over.
pub(crate) fn mark(conn: &Connection, label: &str, upto: i64, dead: bool) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_ended (label, dead, upto) VALUES (?1, ?2, ?3)
                       ON CONFLICT (label, dead) DO UPDATE SET upto = max(upto, excluded.upto)";
    conn.prepare_cached(SQL)?.execute(params![label, dead, upto])?;
    Ok(())
}

/// The machine was restarted: whatever was claimed in an epoch before this one is void, and no worker of then lives.
pub(crate) fn mark_all(conn: &Connection, epoch: i64) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_ended";
    conn.prepare_cached(SQL)?.execute([])?;
    mark(conn, "", epoch, true)
}

/// Whether any are marked.
pub(crate) fn any(conn: &Connection) -> Result<bool> {
    const SQL: &str = "SELECT EXISTS (SELECT 1 FROM main.relet_ended)";
    Ok(conn.prepare_cached(SQL)?.query_row([], |row| row.get(0))?)
}

/// Everything that is still to be changed for those that are marked. `None`: more rows would have to be looked at than `most`.
pub(crate) fn find(conn: &Connection, most: usize) -> Result<Option<Found>> {
    const MARKS: &str = "SELECT label, upto, dead FROM main.relet_ended";
    const QUEUES: &str = "SELECT count(*) FROM (SELECT 1 FROM main.relet_queues LIMIT ?1)";
    const HELD: &str = "SELECT m.id, m.token, m.epoch, m.worker_id, m.incarnation
                          FROM main.relet_queues q CROSS JOIN main.relet_messages m INDEXED BY relet_lines
                         WHERE m.queue = q.id AND m.line = -1 AND m.place > 0 LIMIT ?1";
    const KEPT: &str = "SELECT r.queue, r.message, r.kept_until, r.due_at, m.epoch, m.worker_id, m.incarnation
                          FROM main.relet_queues q CROSS JOIN main.relet_retry_queue r INDEXED BY relet_retry_free
                          CROSS JOIN main.relet_messages m
                         WHERE r.queue = q.id AND r.kept_until IS NOT NULL AND m.id = r.message LIMIT ?1";
    let mut found = Found::default();
    let mut statement = conn.prepare_cached(MARKS)?;
    let rows = statement.query_map([], |row| Ok(Mark { label: row.get(0)?, upto: row.get(1)?, dead: row.get(2)? }))?;
    found.marks = rows.collect::<rusqlite::Result<_>>()?;
    if found.marks.is_empty() {
        return Ok(Some(found));
    }
    let limit = i64::try_from(most).unwrap_or(i64::MAX).saturating_add(1);
    if conn.prepare_cached(QUEUES)?.query_row([limit], |row| row.get::<_, i64>(0))? == limit {
        return Ok(None);
    }
    let (dead, over) = (Over::of(&found.marks, true), Over::of(&found.marks, false));
    let mut looked_at = 0;
    if !dead.is_empty() {
        let mut statement = conn.prepare_cached(HELD)?;
        let mut rows = statement.query([limit])?;
        while let Some(row) = rows.next()? {
            looked_at += 1;
            let epoch = row.get(2)?;
            if dead.has(row.get_ref(3)?.as_str().unwrap_or_default(), row.get(4)?, epoch) {
                found.held.push(Held { id: row.get(0)?, token: row.get(1)?, epoch });
            }
        }
    }
    let mut statement = conn.prepare_cached(KEPT)?;
    let mut rows = statement.query([limit])?;
    while let Some(row) = rows.next()? {
        looked_at += 1;
        let (kept_until, due_at): (i64, i64) = (row.get(2)?, row.get(3)?);
        if kept_until > due_at && over.has(row.get_ref(5)?.as_str().unwrap_or_default(), row.get(6)?, row.get(4)?) {
            found.kept.push(Kept { queue: row.get(0)?, message: row.get(1)?, kept_until });
        }
    }
    Ok((looked_at <= most).then_some(found))
}

/// The starts that are over, by label.
struct Over<'m> {
    upto: HashMap<&'m str, i64>,
    epoch: i64,
}

impl<'m> Over<'m> {
    fn of(marks: &'m [Mark], only_dead: bool) -> Over<'m> {
        let mut over = Over { upto: HashMap::new(), epoch: i64::MIN };
        for mark in marks.iter().filter(|mark| mark.dead || !only_dead) {
            if mark.label.is_empty() {
                over.epoch = mark.upto;
            } else {
                let upto = over.upto.entry(&mark.label).or_insert(mark.upto);
                *upto = mark.upto.max(*upto);
            }
        }
        over
    }

    fn is_empty(&self) -> bool {
        self.upto.is_empty() && self.epoch == i64::MIN
    }

    fn has(&self, label: &str, incarnation: Option<i64>, epoch: i64) -> bool {
        let start = incarnation.filter(|start| *start != 0);
        epoch < self.epoch || start.is_some_and(|start| self.upto.get(label).is_some_and(|upto| start <= *upto))
    }
}

/// Makes a claim void, unless it has ended since it was found.
pub(crate) fn void(conn: &Connection, held: &Held) -> Result<()> {
    const SQL: &str =
        "UPDATE main.relet_messages SET place = 0 WHERE id = ?1 AND token = ?2 AND epoch = ?3 AND line = -1";
    conn.prepare_cached(SQL)?.execute([held.id, held.token, held.epoch])?;
    Ok(())
}

/// What was deferred is kept for nobody, unless it has been claimed since it was found.
pub(crate) fn unkeep(conn: &Connection, kept: &Kept) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_retry_queue SET kept_until = due_at
                        WHERE queue = ?1 AND message = ?2 AND kept_until = ?3";
    conn.prepare_cached(SQL)?.execute([kept.queue, kept.message, kept.kept_until])?;
    Ok(())
}

/// Takes away a mark of which nothing is left; one that was set anew since it was found stays.
pub(crate) fn unmark(conn: &Connection, mark: &Mark) -> Result<()> {
    const SQL: &str = "DELETE FROM main.relet_ended WHERE label = ?1 AND dead = ?2 AND upto = ?3";
    conn.prepare_cached(SQL)?.execute(params![mark.label, mark.dead, mark.upto])?;
    Ok(())
}

/// Does the whole of it here and now, where it is little, as it is in most stores; else nothing.
pub(crate) fn clear_if_few(conn: &Connection) -> Result<()> {
    if let Some(found) = find(conn, budget::ROWS)? {
        found.held.iter().try_for_each(|held| void(conn, held))?;
        found.kept.iter().try_for_each(|kept| unkeep(conn, kept))?;
        found.marks.iter().try_for_each(|mark| unmark(conn, mark))?;
    }
    Ok(())
}

/// Steps of [`crate::store::Store::clear_ended`].
pub(crate) enum Step {
    Void(Held),
    Unkeep(Kept),
    /// Comes last, and so is done only when all that was found before it is.
    Unmark(Mark),
}

impl Found {
    /// All that is to be done, in its order.
    pub(crate) fn into_steps(self) -> Vec<Step> {
        let void = self.held.into_iter().map(Step::Void);
        let unkeep = self.kept.into_iter().map(Step::Unkeep);
        void.chain(unkeep).chain(self.marks.into_iter().map(Step::Unmark)).collect()
    }
}

pub(crate) fn step(tx: &Tx<'_>, step: &Step) -> Result<()> {
    match step {
        Step::Void(held) => void(tx.conn, held),
        Step::Unkeep(kept) => unkeep(tx.conn, kept),
        Step::Unmark(mark) => unmark(tx.conn, mark),
    }
}
