//! The lines of a queue: what is ready on one route and passes one gate, or none, in the order of priority and id.

use std::cmp::Reverse;

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Result;
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

/// The lines of a queue that pass a gate, as far as there is a message in them: two seeks each, however long they are.
pub(crate) fn gated(conn: &Connection, queue: i64) -> Result<Vec<Line>> {
    // Not `(line, status) > (?2, ?3)`: SQLite would read all that is equal to these.
    const NEXT_ROUTE: &str = "SELECT line, status FROM main.relet_messages INDEXED BY relet_ready
                               WHERE queue = ?1 AND line = ?2 AND status > ?3 ORDER BY status LIMIT 1";
    const NEXT_GATE: &str = "SELECT line, status FROM main.relet_messages INDEXED BY relet_ready
                              WHERE queue = ?1 AND line > ?2 ORDER BY line, status LIMIT 1";
    let mut next_route = conn.prepare_cached(NEXT_ROUTE)?;
    let mut next_gate = conn.prepare_cached(NEXT_GATE)?;
    let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let mut lines: Vec<Line> = Vec::new();
    let mut after = 0;
    loop {
        let route = match lines.last() {
            Some(last) => next_route.query_row(params![queue, after, last.route], read).optional()?,
            None => None,
        };
        let next = match route {
            None => next_gate.query_row(params![queue, after], read).optional()?,
            found => found,
        };
        let Some((gate, route)) = next else { return Ok(lines) };
        lines.push(Line { queue, gate: Some(gate), route });
        after = gate;
    }
}

/// The first message of a line; with `below`, the first of a lower priority than that; without `crashed`, the first that has
/// not crashed yet, among the first [`CRASHED_MAX`].
pub(crate) fn head(conn: &Connection, line: Line, below: Option<i32>, crashed: bool) -> Result<Option<Head>> {
    const SQL: &str = "SELECT id, priority, ifnull(due_at, enqueued_at), enqueued_at, crashes
                         FROM main.relet_messages INDEXED BY relet_ready
                        WHERE queue = ?1 AND line = ?2 AND status = ?3 AND priority < ?4
                        ORDER BY priority DESC, id LIMIT ?5";
    let below = below.unwrap_or(i32::MAX);
    let limit = if crashed { 1 } else { CRASHED_MAX };
    let mut statement = conn.prepare_cached(SQL)?;
    let mut rows = statement.query(params![line.queue, line.gate.unwrap_or(0), line.route, below, limit])?;
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
