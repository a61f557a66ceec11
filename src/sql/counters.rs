//! `relet_counters`: how many messages a queue has of each kind, and the ids that were given out.

use std::collections::BTreeMap;

use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use crate::error::Result;
use crate::sql::{Tx, mend};
use crate::state::{Route, Status};

/// Where a message is counted. Claims change none of it: what is held stays counted on its route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Live, waiting or held, on this route.
    On(Route),
    /// Kept in `processing` for its worker, without a lease.
    Deferred,
    Done,
    Dead,
    Cancelled,
}

impl Place {
    const COUNT: usize = 8;

    pub(crate) fn of(status: Status, route: Route, held: bool) -> Place {
        match status {
            Status::Pending | Status::Routing | Status::Queued | Status::PendingLocal => Place::On(route),
            Status::Processing if held => Place::On(route),
            Status::Processing => Place::Deferred,
            Status::Done => Place::Done,
            Status::Dead => Place::Dead,
            Status::Cancelled => Place::Cancelled,
        }
    }

    /// Its place in a list of all: the routes first, in their order.
    fn at(self) -> usize {
        match self {
            Place::On(route) => route as usize,
            Place::Deferred => 4,
            Place::Done => 5,
            Place::Dead => 6,
            Place::Cancelled => 7,
        }
    }
}

/// How the counters change in this transaction: summed, and written once a queue at its end.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<i64, Change>);

#[derive(Debug, Default)]
struct Change {
    /// In the order of [`Place::at`].
    places: [i64; Place::COUNT],
    retrying: i64,
    acked: i64,
    /// What was counted before is not to be relied on.
    recount: bool,
}

impl Counts {
    fn of(&mut self, queue: i64) -> &mut Change {
        self.0.entry(queue).or_default()
    }

    pub(crate) fn write(self, conn: &Connection) -> Result<()> {
        // What a plain message changes, and what any message may change: SQLite reads and checks each column that is named.
        const PLAIN: &str =
            "UPDATE main.relet_counters SET pending = pending + ?2, acked = acked + ?3 WHERE queue = ?1";
        const ALL: &str = "UPDATE main.relet_counters
                              SET pending = pending + ?2, routing = routing + ?3, queued = queued + ?4,
                                  pending_local = pending_local + ?5, deferred = deferred + ?6, done = done + ?7,
                                  dead = dead + ?8, cancelled = cancelled + ?9, retrying = retrying + ?10,
                                  acked = acked + ?11
                            WHERE queue = ?1";
        for (queue, Change { places, retrying, acked, recount: wrong }) in self.0 {
            let [pending, routing, queued, local, deferred, done, dead, cancelled] = places;
            let plain = [routing, queued, local, deferred, done, dead, cancelled, retrying] == [0; 8];
            let written = if wrong {
                Ok(0)
            } else if plain && (pending, acked) == (0, 0) {
                continue;
            } else if plain {
                conn.prepare_cached(PLAIN)?.execute([queue, pending, acked])
            } else {
                conn.prepare_cached(ALL)?.execute(params![
                    queue, pending, routing, queued, local, deferred, done, dead, cancelled, retrying, acked
                ])
            };
            match written {
                Ok(1) => {}
                // They were wrong, or are not there: whoever meets that counts the rows, and fails nobody.
                Ok(_) => mend::recount(conn, queue, acked)?,
                Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
                    mend::recount(conn, queue, acked)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Tx<'_> {
    /// A message of `queue` goes from one place to another; `None` is outside the table.
    pub(crate) fn count(&mut self, queue: i64, from: Option<Place>, to: Option<Place>) {
        if from == to {
            return;
        }
        let change = self.counts.of(queue);
        if let Some(from) = from {
            change.places[from.at()] -= 1;
        }
        if let Some(to) = to {
            change.places[to.at()] += 1;
        }
    }

    /// The counters of `queue` are counted anew from its rows at the end of this transaction.
    pub(crate) fn recount(&mut self, queue: i64) {
        self.counts.of(queue).recount = true;
    }

    /// The retry queue has so many more rows of `queue` with a reason.
    pub(crate) fn count_retrying(&mut self, queue: i64, by: i64) {
        if by != 0 {
            self.counts.of(queue).retrying += by;
        }
    }

    /// A message of `queue` was acked.
    pub(crate) fn count_acked(&mut self, queue: i64) {
        self.counts.of(queue).acked += 1;
    }

    /// An id that no message has ever had, where `last` was the largest when this transaction began.
    pub(crate) fn next_id(&mut self, last: i64) -> i64 {
        let id = self.last_id.unwrap_or(last) + 1;
        self.last_id = Some(id);
        id
    }
}

/// The counters of a new queue.
pub(crate) fn make(conn: &Connection, queue: i64) -> Result<()> {
    const SQL: &str = "INSERT INTO main.relet_counters (queue) VALUES (?1)";
    conn.prepare_cached(SQL)?.execute([queue])?;
    Ok(())
}

/// The largest message id that was ever given out.
pub(crate) fn last_id(conn: &Connection) -> Result<i64> {
    // The rows are asked, too: whatever became of the counter, no two messages may have one id.
    const SQL: &str = "SELECT max(ifnull((SELECT last_id FROM main.relet_counters WHERE queue = 0), 0),
                                  ifnull((SELECT max(id) FROM main.relet_messages), 0))";
    Ok(conn.prepare_cached(SQL)?.query_row([], |row| row.get(0))?)
}

pub(crate) fn set_last_id(conn: &Connection, last: i64) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_counters SET last_id = ?1 WHERE queue = 0";
    const MAKE: &str = "INSERT INTO main.relet_counters (queue, last_id) VALUES (0, ?1)";
    if conn.prepare_cached(SQL)?.execute([last])? == 0 {
        conn.prepare_cached(MAKE)?.execute([last])?;
    }
    Ok(())
}

/// The counters of one queue, as they are shown.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counted {
    /// In the order of [`Status::ALL`].
    pub(crate) by_status: [u64; Status::ALL.len()],
    pub(crate) retrying: u64,
    pub(crate) acked: u64,
}

/// A queue's counters. What is held is counted one by one, by its leases.
pub(crate) fn of(conn: &Connection, queue: i64) -> Result<Counted> {
    const SQL: &str = "SELECT pending, routing, queued, pending_local, deferred, done, dead, cancelled, retrying, acked
                         FROM main.relet_counters WHERE queue = ?1";
    const HELD: &str = "SELECT count(*) FROM main.relet_messages INDEXED BY relet_lines WHERE queue = ?1 AND line = -1";
    const HELD_ON: &str = "SELECT count(*) FROM main.relet_messages INDEXED BY relet_lines
                            WHERE queue = ?1 AND line = -1 AND route = ?2";
    let read = |row: &rusqlite::Row<'_>| {
        let mut counters = [0i64; 10];
        for (column, counter) in counters.iter_mut().enumerate() {
            *counter = row.get(column)?;
        }
        Ok(counters)
    };
    let counters = conn.prepare_cached(SQL)?.query_row([queue], read).optional()?.unwrap_or_default();
    let [mut pending, routing, queued, local, deferred, done, dead, cancelled, retrying, acked] = counters;
    // What is held is counted on its route, too: a queue that is empty costs one seek.
    let held: i64 = match pending + routing + queued + local {
        0 => 0,
        _ => conn.prepare_cached(HELD)?.query_row([queue], |row| row.get(0))?,
    };
    let mut others = [(Route::Routing, routing), (Route::Queued, queued), (Route::PendingLocal, local)];
    let mut held_on_pending = held;
    for (route, count) in &mut others {
        if held > 0 && *count > 0 {
            let held_on: i64 = conn.prepare_cached(HELD_ON)?.query_row(params![queue, *route], |row| row.get(0))?;
            *count -= held_on;
            held_on_pending -= held_on;
        }
    }
    pending -= held_on_pending;
    let [(_, routing), (_, queued), (_, local)] = others;
    let by_status = [pending, routing, queued, local, held + deferred, done, dead, cancelled];
    let shown = |count: i64| count.max(0).unsigned_abs();
    Ok(Counted { by_status: by_status.map(shown), retrying: shown(retrying), acked: shown(acked) })
}
