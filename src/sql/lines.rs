//! The lines of a queue: what is ready on one route and passes one gate, or none, in the order of priority and id.

use std::cmp::Reverse;

use rusqlite::{Connection, OptionalExtension};

use crate::error::Result;
use crate::sql::record::line_of;
use crate::state::Route;

/// A line of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) queue: i64,
    /// [`relet_gates.id`](crate::sql::gates); `None`: no gate.
    pub(crate) gate: Option<i64>,
    pub(crate) route: Route,
}

/// The first message of a line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) id: i64,
    pub(crate) priority: i32,
    /// Since when it could have been handed out.
    pub(crate) since: i64,
    enqueued_at: i64,
}

/// Crashed messages that are stepped over in a line at most. What comes behind so many waits for them: they are older.
const CRASHED_MAX: i64 = 1000;

impl Head {
    /// What is handed out first has the smallest: by priority, to which each `ageing_ms` since its enqueueing adds one, then by
    /// id. (Since its enqueueing, so that the lowest id of a priority is the one that has aged most, also after a retry.)
    pub(crate) fn order(&self, ageing_ms: Option<i64>, now: i64) -> impl Ord + use<> {
        let age = ageing_ms.map_or(0, |step| now.saturating_sub(self.enqueued_at).max(0) / step);
        (Reverse(i64::from(self.priority).saturating_add(age)), self.id)
    }
}

/// The lines of a queue that pass a gate, as far as there is a message in them: a seek each, however long they are.
pub(crate) fn gated(conn: &Connection, queue: i64) -> Result<Vec<Line>> {
    const NEXT: &str = "SELECT line FROM main.relet_messages INDEXED BY relet_lines
                         WHERE queue = ?1 AND line > ?2 ORDER BY line LIMIT 1";
    let mut next = conn.prepare_cached(NEXT)?;
    let mut lines: Vec<Line> = Vec::new();
    let mut after = line_of(None, Route::PendingLocal); // the last of those without a gate
    while let Some(line) = next.query_row([queue, after], |row| row.get::<_, i64>(0)).optional()? {
        lines.push(Line { queue, gate: Some(line / 4), route: Route::ALL[(line % 4) as usize] });
        after = line;
    }
    Ok(lines)
}

/// The first message of a line; with `below`, the first of a lower priority than that; without `crashed`, the first that has
/// not crashed yet, among the first [`CRASHED_MAX`].
pub(crate) fn head(conn: &Connection, line: Line, below: Option<i32>, crashed: bool) -> Result<Option<Head>> {
    const SQL: &str = "SELECT id, priority, ifnull(due_at, enqueued_at), enqueued_at, crashes
                         FROM main.relet_messages INDEXED BY relet_lines
                        WHERE queue = ?1 AND line = ?2 AND place > ?3 ORDER BY place, id LIMIT ?4";
    let after = below.map_or(i64::MIN, |below| -i64::from(below));
    let limit = if crashed { 1 } else { CRASHED_MAX };
    let mut statement = conn.prepare_cached(SQL)?;
    let mut rows = statement.query([line.queue, line_of(line.gate, line.route), after, limit])?;
    while let Some(row) = rows.next()? {
        if crashed || row.get::<_, i64>(4)? == 0 {
            let [id, since, enqueued_at] = [row.get(0)?, row.get(2)?, row.get(3)?];
            return Ok(Some(Head { id, priority: row.get(1)?, since, enqueued_at }));
        }
    }
    Ok(None)
}

/// The first message of each priority that is in use in a line.
pub(crate) fn heads(conn: &Connection, line: Line, crashed: bool) -> Result<Vec<Head>> {
    let mut heads = Vec::new();
    let mut below = None;
    while let Some(head) = head(conn, line, below, crashed)? {
        below = Some(head.priority);
        heads.push(head);
    }
    Ok(heads)
}
