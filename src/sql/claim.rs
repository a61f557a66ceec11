//! Claim: the self-reclaim predicate, and what makes it safe.
//!
//! `judge` says of one message whether a worker may have it, and if not, why not. A claim by id, `why`, and the check of
//! the claim that was picked all ask it. `claim_next` finds its candidate by index seeks alone:
//!
//! 1. `Look` is one statement of seeks: is anything due, void, or deferred and due in this queue? For a queue in which nothing
//!    waits that is one seek for all of these.
//! 2. What is due joins its line; void claims are taken back (one crash each); both in bounded steps.
//! 3. The worker's own due deferred message goes first, then the head with the highest priority, then the lowest id. Where
//!    there are more lines than one (`lines`), the first of their heads, of those whose gate lets it pass.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};

use crate::clock::{Now, millis};
use crate::error::{Error, Result};
use crate::message::CRASHES_MAX;
use crate::receipt::Receipt;
use crate::sql::counters::Place;
use crate::sql::dead::By;
use crate::sql::gates::{self, Passage};
use crate::sql::lines::{self, Head, Line};
use crate::sql::record::Large;
use crate::sql::{Payload, Record, Tx, budget, dead, details, groups, ids, queues, retry_queue, workers};
use crate::state::{Event, Route, Status};

/// Who claims.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    pub(crate) label: Arc<str>,
    /// 0: detached, known by its label and its lease only.
    pub(crate) incarnation: i64,
    pub(crate) routes: Routes,
    /// `None`: the queue's, else the store's.
    pub(crate) lease: Option<Duration>,
    /// Whether it takes messages that have crashed before.
    pub(crate) crashed: bool,
    /// What becomes of payloads that lie beside their messages.
    pub(crate) large: Large,
}

/// A set of routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Routes(u8);

impl Routes {
    pub(crate) const ALL: Routes = Routes(0b1111);

    pub(crate) fn of(routes: &[Route]) -> Routes {
        Routes(routes.iter().fold(0, |set, route| set | 1 << *route as u8))
    }

    pub(crate) fn contains(self, route: Route) -> bool {
        self.0 & 1 << route as u8 != 0
    }
}

/// How a claim came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Nobody held it.
    Claimed,
    /// This worker held it, or had deferred it, and has it again under a new receipt.
    Resumed,
    /// This worker's label held it, but that claim was void (its lease had run out, or an earlier start of the worker made it).
    Recovered,
}

/// A claim that was made.
#[derive(Debug, Clone)]
pub(crate) struct Taken {
    /// The message as it is now.
    pub(crate) record: Record,
    pub(crate) payload: Payload,
    pub(crate) receipt: Receipt,
    pub(crate) how: How,
    pub(crate) lease: Duration,
    /// The name of its gate.
    pub(crate) gate: Option<String>,
}

/// What stands between a worker and a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Obstacle {
    Held { by: String, lease_left: Duration },
    Deferred { by: String, until: i64 },
    Due { until: i64 },
    Group { behind: i64 },
    Route(Route),
    Paused { until: i64 },
    Gate { name: String, until: Option<i64> },
    Finished(Status),
}

impl Obstacle {
    /// Its instants as the wall clock names them now.
    pub(crate) fn shown(self, now: Now) -> Obstacle {
        match self {
            Obstacle::Deferred { by, until } => Obstacle::Deferred { by, until: now.shown(until) },
            Obstacle::Due { until } => Obstacle::Due { until: now.shown(until) },
            Obstacle::Paused { until } => Obstacle::Paused { until: now.shown(until) },
            Obstacle::Gate { name, until } => Obstacle::Gate { name, until: until.map(|until| now.shown(until)) },
            Obstacle::Held { .. } | Obstacle::Group { .. } | Obstacle::Route(_) | Obstacle::Finished(_) => self,
        }
    }
}

/// What a claim by id came to.
pub(crate) enum ById {
    Taken(Box<Taken>),
    Not(Obstacle),
    NotFound,
}

/// What a claim of the next messages came to.
#[derive(Default)]
pub(crate) struct Next {
    pub(crate) taken: Vec<Taken>,
    /// The step was full with clearing the way; commit it and claim again.
    pub(crate) again: bool,
}

/// Ready messages that are read at once, with their payloads.
const READY_MAX: usize = 100;

/// May this worker have this message now? If so, how.
pub(crate) fn judge(conn: &Connection, now: Now, record: &Record, who: &Who) -> Result<Result<How, Obstacle>> {
    let how = judge_owner(conn, now, record, who)?;
    // Who resumes what it holds has passed already.
    if how.is_err() || (how == Ok(How::Resumed) && record.is_held()) {
        return Ok(how);
    }
    if let Some(until) = queues::paused_until(conn, record.queue, now)? {
        return Ok(Err(Obstacle::Paused { until }));
    }
    let Some(gate) = record.gate else { return Ok(how) };
    let wait = match gates::passage(conn, gate, now)? {
        Passage::Open => return Ok(how),
        Passage::Closed(wait) | Passage::Spent(wait) => Some(wait),
        Passage::Taken => None,
    };
    Ok(Err(Obstacle::Gate { name: gates::name_of(conn, gate)?, until: wait.map(|wait| now.after(wait)) }))
}

/// What the message's own row says to that.
fn judge_owner(conn: &Connection, now: Now, record: &Record, who: &Who) -> Result<Result<How, Obstacle>> {
    if !record.status.is_live() {
        return Ok(Err(Obstacle::Finished(record.status)));
    }
    if !who.routes.contains(record.route) {
        return Ok(Err(Obstacle::Route(record.route)));
    }
    let due_in_future = match record.due_at {
        Some(_) => retry_queue::waits_until(conn, record, now)?,
        None => None,
    };
    let Some(owner) = &record.worker else {
        if record.line.is_some() {
            return Ok(Ok(How::Claimed));
        }
        return Ok(if groups::is_behind(conn, record)? {
            let group = record.group.as_deref().unwrap_or_default();
            let behind = groups::turn_of(conn, record.queue, group)?.map_or(record.id, |(id, _)| id);
            Err(Obstacle::Group { behind })
        } else {
            due_in_future.map_or(Ok(How::Claimed), |until| Err(Obstacle::Due { until }))
        });
    };
    let mine = **owner == *who.label;
    let same_start = mine && record.incarnation == who.incarnation;
    Ok(match record.lease_until {
        // Held, and the lease runs. A resume at the last attempt would kill a message under a healthy holder.
        Some(until) if until > now.awake => {
            if same_start && record.attempts < record.max_attempts {
                Ok(How::Resumed)
            } else {
                Err(Obstacle::Held { by: owner.clone(), lease_left: crate::clock::span(now.awake, until) })
            }
        }
        // Held by a claim that is void.
        Some(_) => Ok(if mine { How::Recovered } else { How::Claimed }),
        // Deferred.
        None => match due_in_future {
            Some(until) => Err(Obstacle::Deferred { by: owner.clone(), until }),
            None if same_start => Ok(How::Resumed),
            // What a live worker has deferred is not for a detached one of its label; when that worker is gone, it is anyone's.
            None if mine && (who.incarnation != 0 || record.incarnation == 0) => Ok(How::Recovered),
            None => match retry_queue::kept_until(conn, record)? {
                until if until <= now.time => Ok(How::Claimed),
                until => Err(Obstacle::Deferred { by: owner.clone(), until }),
            },
        },
    })
}

/// Claims this very message.
pub(crate) fn claim_id(tx: &mut Tx<'_>, id: i64, who: &Who) -> Result<ById> {
    const DEAD: ById = ById::Not(Obstacle::Finished(Status::Dead));
    let Some((mut record, payload)) = Record::load_for_claim(tx.conn, id, who.large)? else {
        return Ok(ById::NotFound);
    };
    let how = match judge(tx.conn, tx.now, &record, who)? {
        Ok(how) => how,
        Err(obstacle) => return Ok(ById::Not(obstacle)),
    };
    if let Some(reason) = dead::spoiled(tx, &record, &payload) {
        dead::give_up_spoiled(tx, &record, reason)?;
        return Ok(DEAD);
    }
    // Another's void or abandoned claim is taken back first, so that what is claimed is always ready or my own.
    if how == How::Claimed && record.worker.is_some() {
        match take_back(tx, &record)? {
            Some(taken_back) => record = taken_back,
            None => return Ok(DEAD),
        }
        if let Some(reason) = dead::spoiled(tx, &record, &payload) {
            dead::give_up_spoiled(tx, &record, reason)?;
            return Ok(DEAD);
        }
        // Back in its group's line it may stand behind a member that was redriven meanwhile.
        if let Err(obstacle) = judge(tx.conn, tx.now, &record, who)? {
            return Ok(ById::Not(obstacle));
        }
    }
    let queue_lease_ms = match who.lease {
        Some(_) => None,
        None => queues::lease_of(tx.conn, record.queue)?,
    };
    check_start(who.incarnation == 0 || workers::is_present(tx.conn, &who.label, who.incarnation)?, who)?;
    Ok(take(tx, record, payload, who, queue_lease_ms, how)?.map_or(DEAD, |taken| ById::Taken(Box::new(taken))))
}

/// Claims the next messages of a queue, up to `wanted`, and no more than the transaction has room for.
pub(crate) fn claim_next(tx: &mut Tx<'_>, queue: &str, who: &Who, wanted: usize) -> Result<Next> {
    // Whoever claims the next names no message: one whose status does not fit its place is damaged.
    next(tx, queue, who, wanted).map_err(|error| match error {
        Error::Status { id, status, .. } => {
            Error::Corrupt { detail: format!("message {id} is {status}, and stands among those that can be claimed") }
        }
        error => error,
    })
}

fn next(tx: &mut Tx<'_>, queue: &str, who: &Who, wanted: usize) -> Result<Next> {
    let mut next = Next::default();
    while next.taken.len() < wanted {
        let Some(look) = Look::at(tx, queue, who)? else { return Ok(next) };
        // What has become due joins the line before anything is handed out, or the order would not hold.
        let mut cleared = if look.due { promote_due(tx, look.queue)? } else { Cleared::default() };
        // Void claims first, or a worker's own deferred message would pass a gate beside one of them.
        let mut own = None;
        if look.void && !cleared.cut {
            own = if look.paused { None } else { own_void(tx, look.queue, who, &mut cleared)? };
            if own.is_none() {
                cleared.add(take_back_void(tx, look.queue)?);
            }
        }
        if look.deferred && own.is_none() && !cleared.cut {
            own = if look.paused { None } else { own_deferred(tx, look.queue, who, &mut cleared)? };
            if own.is_none() {
                cleared.add(take_back_abandoned(tx, look.queue)?);
            }
        }
        if look.gated && !look.paused && own.is_none() && !cleared.cut {
            cleared.add(take_back_passed(tx, look.queue)?);
        }
        // What is left of the way is for the next transaction: nothing is handed out past it.
        if cleared.cut {
            next.again = true;
            break;
        }
        if let Some((record, payload, how)) = own {
            check_start(look.present, who)?;
            // A claim that is recovered is taken back, in a way, and may die of it.
            if (record.is_held() && !tx.budget.take()) || !tx.budget.has_room(next.taken.len()) {
                next.again = true;
                break;
            }
            match give_up_if_spoiled(tx, &record, &payload)? {
                Spoiled::No => next.taken.extend(take(tx, record, payload, who, look.lease_ms, how)?),
                Spoiled::GivenUp => {}
                Spoiled::Later => {
                    next.again = true;
                    break;
                }
            }
            continue; // There may be more of its own.
        }
        // What has just become ready counts as well.
        let look = match cleared.rows {
            0 => look,
            _ => Look::at(tx, queue, who)?.unwrap_or(look),
        };
        let ready = look.ready(tx, who, wanted - next.taken.len())?;
        if ready.is_empty() && cleared.rows == 0 {
            break;
        }
        if !ready.is_empty() {
            check_start(look.present, who)?;
        }
        for (record, payload) in ready {
            let spoiled = give_up_if_spoiled(tx, &record, &payload)?;
            if spoiled == Spoiled::Later || !tx.budget.has_room(next.taken.len()) {
                next.again = true;
                return Ok(next);
            }
            let taken = match spoiled {
                Spoiled::No => take(tx, record, payload, who, look.lease_ms, How::Claimed)?,
                _ => None,
            };
            // If it died instead, the next of its group may come before the rest: look again.
            let Some(taken) = taken else { break };
            next.taken.push(taken);
        }
    }
    Ok(next)
}

/// How far the way was cleared.
#[derive(Debug, Default)]
struct Cleared {
    rows: usize,
    /// There is more to clear, and the transaction's budget is spent.
    cut: bool,
}

impl Cleared {
    fn add(&mut self, more: Cleared) {
        self.rows += more.rows;
        self.cut |= more.cut;
    }

    /// Clears what `find` finds, given how many at most, as far as the budget allows.
    fn all(
        tx: &mut Tx<'_>,
        find: impl FnOnce(&Tx<'_>, i64) -> Result<Vec<i64>>,
        mut clear: impl FnMut(&mut Tx<'_>, i64) -> Result<()>,
    ) -> Result<Cleared> {
        // One more than can be cleared, to see whether there is one.
        let limit = tx.budget.left() as i64 + 1;
        let mut rows = 0;
        for id in find(tx, limit)? {
            if !tx.budget.take() {
                return Ok(Cleared { rows, cut: true });
            }
            clear(tx, id)?;
            rows += 1;
        }
        Ok(Cleared { rows, cut: false })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoiled {
    No,
    GivenUp,
    /// It is, and the transaction's budget is spent.
    Later,
}

fn give_up_if_spoiled(tx: &mut Tx<'_>, record: &Record, payload: &Payload) -> Result<Spoiled> {
    let Some(reason) = dead::spoiled(tx, record, payload) else { return Ok(Spoiled::No) };
    if !tx.budget.take() {
        return Ok(Spoiled::Later);
    }
    dead::give_up_spoiled(tx, record, reason)?;
    Ok(Spoiled::GivenUp)
}

/// What a claim sees of a queue in one statement: seeks only, so it costs the same whatever lies in the file.
struct Look {
    queue: i64,
    lease_ms: Option<i64>,
    ageing_ms: Option<i64>,
    /// Nothing is handed out.
    paused: bool,
    /// Something that waited for an instant can join the ready index.
    due: bool,
    /// A lease has run out.
    void: bool,
    /// Something that was deferred is due: for its worker, or for anyone.
    deferred: bool,
    /// Something is ready on another route than `pending`.
    routed: bool,
    /// It has had messages with a gate.
    gated: bool,
    /// The start of the worker that looks is the present one of its label.
    present: bool,
}

impl Look {
    /// `None`: there is no such queue.
    fn at(tx: &Tx<'_>, queue: &str, who: &Who) -> Result<Option<Look>> {
        // The other routes' names are all behind 'pending' in the alphabet.
        const SQL: &str = "SELECT q.id, q.lease_ms,
            EXISTS (SELECT 1 FROM main.relet_retry_queue WHERE queue = q.id),
            EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines
                     WHERE queue = q.id AND line = -1 AND place <= ?2),
            EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines
                     WHERE queue = q.id AND line > 0 AND line < 4),
            q.gated, q.ageing_ms, q.paused_until,
            ?4 = 0 OR EXISTS (SELECT 1 FROM main.relet_workers WHERE label = ?3 AND incarnation = ?4)
            FROM main.relet_queues q WHERE q.name = ?1";
        let params = params![queue, tx.now.awake, &*who.label, who.incarnation];
        let look = tx.conn.prepare_cached(SQL)?.query_row(params, |row| {
            let look = Look {
                queue: row.get(0)?,
                lease_ms: row.get(1)?,
                due: false,
                void: row.get(3)?,
                deferred: false,
                routed: row.get(4)?,
                gated: row.get(5)?,
                ageing_ms: row.get(6)?,
                paused: row.get::<_, Option<i64>>(7)?.is_some_and(|until| until > tx.now.time),
                present: row.get(8)?,
            };
            Ok((look, row.get(2)?))
        });
        match look.optional()? {
            Some((look, true)) => look.at_what_waits(tx).map(Some),
            Some((look, false)) => Ok(Some(look)),
            None => Ok(None),
        }
    }

    /// Something of this queue waits for an instant: has that come?
    fn at_what_waits(self, tx: &Tx<'_>) -> Result<Look> {
        const SQL: &str = "SELECT
            EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_due
                     WHERE queue = ?1 AND on_wall = 0 AND worker_id IS NULL AND behind = 0 AND due_at <= ?2)
            OR EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_due
                     WHERE queue = ?1 AND on_wall = 1 AND worker_id IS NULL AND behind = 0 AND due_at <= ?3),
            EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_retry_due
                     WHERE queue = ?1 AND worker_id IS NOT NULL AND due_at <= ?2)";
        Ok(tx.conn.prepare_cached(SQL)?.query_row([self.queue, tx.now.time, tx.now.wall], |row| {
            Ok(Look { due: row.get(0)?, deferred: row.get(1)?, ..self })
        })?)
    }

    /// The ready messages that come first, up to `limit`: by priority, then by id. Where there are more lines than one, or
    /// priorities that grow, only the first.
    fn ready(&self, tx: &Tx<'_>, who: &Who, limit: usize) -> Result<Vec<(Record, Payload)>> {
        if self.paused {
            return Ok(Vec::new());
        }
        let one_line = !self.routed && !self.gated && self.ageing_ms.is_none();
        if one_line && who.routes.contains(Route::Pending) {
            let ready = Record::load_ready(tx.conn, self.queue, limit.min(READY_MAX), who.large)?;
            if who.crashed || ready.iter().all(|(record, _)| record.crashes == 0) {
                return Ok(ready);
            }
        }
        let mut lines: Vec<Line> =
            Route::ALL.into_iter().map(|route| Line { queue: self.queue, gate: None, route }).collect();
        if self.gated {
            lines.extend(lines::gated(tx.conn, self.queue)?);
        }
        let mut first: Option<Head> = None;
        for line in lines.into_iter().filter(|line| who.routes.contains(line.route)) {
            if let Some(gate) = line.gate
                && gates::passage(tx.conn, gate, tx.now)? != Passage::Open
            {
                continue;
            }
            let heads = match self.ageing_ms {
                Some(_) => lines::heads(tx.conn, line, who.crashed)?,
                None => lines::head(tx.conn, line, None, who.crashed)?.into_iter().collect(),
            };
            let order = |head: &Head| head.order(self.ageing_ms, tx.now.time);
            first = first.into_iter().chain(heads).min_by_key(order);
        }
        match first {
            Some(head) => Ok(Record::load_for_claim(tx.conn, head.id, who.large)?.into_iter().collect()),
            None => Ok(Vec::new()),
        }
    }
}

type Own = Option<(Record, Payload, How)>;

/// The worker's own void claim.
fn own_void(tx: &mut Tx<'_>, queue: i64, who: &Who, cleared: &mut Cleared) -> Result<Own> {
    // Among those that are taken back next, since the index does not know whose they are: to look at all of them before each step
    // would be quadratic.
    const SQL: &str = "SELECT id, worker_id FROM main.relet_messages INDEXED BY relet_lines
                        WHERE queue = ?1 AND line = -1 AND place <= ?2 ORDER BY place, id LIMIT ?3";
    let label = who.label.clone();
    first_own(tx, who, cleared, |tx, limit| {
        let mut statement = tx.conn.prepare_cached(SQL)?;
        let mut rows = statement.query(params![queue, tx.now.awake, budget::ROWS as i64])?;
        let mut own = Vec::new();
        while let Some(row) = rows.next()?.filter(|_| (own.len() as i64) < limit) {
            if row.get_ref(1)?.as_str() == Ok(&*label) {
                own.push(row.get(0)?);
            }
        }
        Ok(own)
    })
}

/// The worker's own deferred message that is due.
fn own_deferred(tx: &mut Tx<'_>, queue: i64, who: &Who, cleared: &mut Cleared) -> Result<Own> {
    const SQL: &str = "SELECT message FROM main.relet_retry_queue INDEXED BY relet_retry_kept
                        WHERE queue = ?1 AND worker_id = ?3 AND worker_id IS NOT NULL AND due_at <= ?2
                        ORDER BY due_at, message LIMIT ?4";
    first_own(tx, who, cleared, |tx, limit| ids(tx.conn, SQL, params![queue, tx.now.time, &*who.label, limit]))
}

/// The first of its own that the worker may have now.
fn first_own(
    tx: &mut Tx<'_>,
    who: &Who,
    cleared: &mut Cleared,
    find: impl Fn(&Tx<'_>, i64) -> Result<Vec<i64>>,
) -> Result<Own> {
    // More than one only where the first is not for it: of a route that it leaves alone, say. To look at them is paid for, too, but
    // never with all that is left: else what the next transaction begins with would be the same again.
    for limit in [1, tx.budget.left() / 2] {
        let found = find(tx, limit.max(1) as i64)?;
        tx.budget.spend(found.len().saturating_sub(1));
        for id in &found {
            let Some(record) = Record::load(tx.conn, *id)? else { continue };
            let crashed = record.crashes > 0 || record.is_held();
            // What its gate has put off goes back to the gate's line, and keeps its place in it.
            let of_its_line =
                record.gate.is_some() && !record.is_held() && retry_queue::kept_until(tx.conn, &record)? <= tx.now.time;
            if of_its_line || (crashed && !who.crashed) {
                continue;
            }
            match judge(tx.conn, tx.now, &record, who)? {
                // It is its own no more: whoever comes takes it back.
                Ok(How::Claimed) => {}
                Ok(how) => {
                    let whole = Record::load_for_claim(tx.conn, *id, who.large)?;
                    return Ok(whole.map(|(record, payload)| (record, payload, how)));
                }
                // It waits with its siblings: kept here, a thousand of them would hide what comes after.
                Err(Obstacle::Gate { .. }) if !record.is_held() => {
                    if !tx.budget.take() {
                        cleared.cut = true;
                        return Ok(None);
                    }
                    take_back(tx, &record)?;
                    cleared.rows += 1;
                }
                Err(_) => {}
            }
        }
        if found.is_empty() {
            break;
        }
    }
    Ok(None)
}

/// Moves what has become due into its line.
fn promote_due(tx: &mut Tx<'_>, queue: i64) -> Result<Cleared> {
    const FIND: &str = "SELECT message FROM main.relet_retry_queue INDEXED BY relet_due
        WHERE queue = ?1 AND on_wall = ?2 AND worker_id IS NULL AND behind = 0 AND due_at <= ?3 ORDER BY due_at LIMIT ?4";
    const PROMOTE: &str = "UPDATE main.relet_messages
                              SET line = 4 * ifnull((SELECT gate FROM main.relet_details WHERE message = ?1), 0)
                                         + CASE route WHEN 'pending' THEN 0 WHEN 'routing' THEN 1 WHEN 'queued' THEN 2 ELSE 3 END,
                                  place = -priority, due_at = due_at + ?2
                            WHERE id = ?1 AND status = route AND line IS NULL";
    let mut cleared = Cleared::default();
    for (on_wall, now) in [(false, tx.now.time), (true, tx.now.wall)] {
        if cleared.cut {
            break;
        }
        let moved = tx.now.time - now;
        let find = |tx: &Tx<'_>, limit| ids(tx.conn, FIND, params![queue, on_wall, now, limit]);
        cleared.add(Cleared::all(tx, find, |tx, id| {
            tx.conn.prepare_cached(PROMOTE)?.execute([id, moved])?;
            retry_queue::take_id(tx, queue, id)
        })?);
    }
    Ok(cleared)
}

/// Takes back void claims.
fn take_back_void(tx: &mut Tx<'_>, queue: i64) -> Result<Cleared> {
    const SQL: &str = "SELECT id FROM main.relet_messages INDEXED BY relet_lines
                        WHERE queue = ?1 AND line = -1 AND place <= ?2 ORDER BY place LIMIT ?3";
    Cleared::all(
        tx,
        |tx, limit| ids(tx.conn, SQL, params![queue, tx.now.awake, limit]),
        |tx, id| take_back_id(tx, queue, id),
    )
}

/// Takes back void claims of other queues that have passed a gate which this queue's messages wait behind: to count those that hold
/// would be to step over them, at each claim.
fn take_back_passed(tx: &mut Tx<'_>, queue: i64) -> Result<Cleared> {
    let mut cleared = Cleared::default();
    let mut gates: Vec<i64> = lines::gated(tx.conn, queue)?.into_iter().filter_map(|line| line.gate).collect();
    gates.dedup();
    for gate in gates {
        if cleared.cut {
            break;
        }
        let over = |tx: &Tx<'_>, limit| gates::over(tx.conn, gate, tx.now, limit);
        cleared.add(Cleared::all(tx, over, |tx, id| match Record::load(tx.conn, id)? {
            Some(record) if record.is_held() => take_back(tx, &record).map(drop),
            // Only a claim that holds has passed.
            _ => gates::forget(tx.conn, gate, id),
        })?);
    }
    Ok(cleared)
}

/// Takes back deferred messages whose worker has not come for them.
fn take_back_abandoned(tx: &mut Tx<'_>, queue: i64) -> Result<Cleared> {
    const SQL: &str = "SELECT message FROM main.relet_retry_queue INDEXED BY relet_retry_free
                        WHERE queue = ?1 AND kept_until IS NOT NULL AND kept_until <= ?2
                        ORDER BY kept_until LIMIT ?3";
    Cleared::all(
        tx,
        |tx, limit| ids(tx.conn, SQL, params![queue, tx.now.time, limit]),
        |tx, id| {
            take_back_id(tx, queue, id)?;
            // Of a message that is not deferred, a row would be found again for ever.
            retry_queue::take_id(tx, queue, id)
        },
    )
}

fn take_back_id(tx: &mut Tx<'_>, queue: i64, id: i64) -> Result<()> {
    match Record::load(tx.conn, id)? {
        Some(record) => take_back(tx, &record).map(drop),
        // A wait without its message goes, or it would be found here for ever.
        None => retry_queue::take_id(tx, queue, id),
    }
}

/// Ends another's claim that is void (a crash, and a new token, so that the late holder's receipt is stale) or abandoned
/// (no crash: nothing was running). Back to its route, or dead where a budget is spent. Returns the message as it is
/// then, or `None` where it died.
fn take_back(tx: &mut Tx<'_>, record: &Record) -> Result<Option<Record>> {
    const SQL: &str = "UPDATE main.relet_messages
                          SET status = ?2, worker_id = NULL, incarnation = NULL, line = ?3, place = -priority, lease_ms = NULL,
                              due_at = NULL, crashes = ?4, token = ?5, epoch = ?6
                        WHERE id = ?1 AND status = 'processing'";
    let crashed = record.is_held();
    if crashed {
        tx.durable |= record.id <= tx.boot_mark;
    }
    let mut back = record.clone();
    back.crashes += u32::from(crashed);
    if crashed && let Some(reason) = spent(&back) {
        dead::give_up(tx, &back, Some(&reason), None, By::Another)?;
        return Ok(None);
    }
    back.status = record.after(Event::TakeBack, "taken back")?;
    back.worker = None;
    back.lease_until = None;
    back.line = Some(record.own_line());
    back.due_at = None;
    if crashed {
        back.token += 1;
        back.epoch = tx.epoch;
    }
    retry_queue::take(tx, record)?;
    let (line, crashes) = (back.line, back.crashes);
    tx.conn.prepare_cached(SQL)?.execute(params![record.id, back.status, line, crashes, back.token, back.epoch])?;
    details::given_back(tx.conn, &back)?;
    tx.count(record.queue, Some(record.place()), Some(back.place()));
    groups::settle_turn(tx, record.queue, record.group.as_deref())?;
    if record.group.is_some() {
        return Record::load(tx.conn, record.id);
    }
    Ok(Some(back))
}

/// A start of a worker that another has superseded may not claim.
fn check_start(present: bool, who: &Who) -> Result<()> {
    if present { Ok(()) } else { Err(Error::Superseded { label: who.label.to_string() }) }
}

/// Which budget forbids another claim after a crash, as the dead letter's reason.
fn spent(record: &Record) -> Option<String> {
    let crashes = record.crashes;
    if crashes >= CRASHES_MAX {
        Some(format!("crashed {crashes} times: its workers died, fell silent past their lease, or were restarted"))
    } else if record.attempts >= record.max_attempts {
        Some(format!("crashed on the last of {} attempts", record.max_attempts))
    } else {
        None
    }
}

/// Hands the message out: a new token, a new lease, one attempt. `None` where a budget forbids it and it died instead.
fn take(
    tx: &mut Tx<'_>,
    mut record: Record,
    payload: Payload,
    who: &Who,
    queue_lease_ms: Option<i64>,
    how: How,
) -> Result<Option<Taken>> {
    // The predicate of this whole crate: status IN (the four that are claimable), or in processing and mine. What makes the
    // second half safe is the judgement that came before it, the new token, and the incarnation, which must be the one that
    // is registered (`check_start`). (Written with OR, since SQLite builds a list of constants as a b-tree at each run.)
    const SQL: &str = "UPDATE main.relet_messages
        SET status = 'processing', worker_id = ?2, incarnation = ?3, line = -1, place = ?4, lease_ms = ?5, claimed_at = ?6,
            token = ?7, epoch = ?8, attempts = ?9, crashes = ?10, due_at = NULL
        WHERE id = ?1
          AND (status = 'pending' OR status = 'queued' OR status = 'routing' OR status = 'pending_local'
               OR (status = 'processing' AND worker_id = ?2))";
    let crashed = how == How::Recovered && record.is_held();
    record.crashes += u32::from(crashed);
    tx.durable |= record.id <= tx.boot_mark;
    if crashed && let Some(reason) = spent(&record) {
        dead::give_up(tx, &record, Some(&reason), None, By::Another)?;
        return Ok(None);
    }
    let lease_ms = who.lease.map(millis).or(queue_lease_ms).unwrap_or(millis(tx.defaults.lease)).max(1);
    let lease_until = tx.now.awake.saturating_add(lease_ms);
    let event = if record.worker.is_some() { Event::Reclaim } else { Event::Claim };
    let to = record.after(event, "claimed")?;
    let changed = tx.conn.prepare_cached(SQL)?.execute(params![
        record.id,
        &*who.label,
        who.incarnation,
        lease_until,
        lease_ms,
        tx.now.time,
        record.token + 1,
        tx.epoch,
        record.attempts + 1,
        record.crashes,
    ])?;
    if changed == 0 {
        return Err(Error::Corrupt {
            detail: format!("message {} cannot be claimed, and stands among those that can", record.id),
        });
    }
    retry_queue::take(tx, &record)?;
    details::handed_out(tx.conn, &mut record)?;
    let resumed_while_held = how == How::Resumed && record.is_held();
    let gate = match record.gate {
        Some(gate) => {
            if !resumed_while_held {
                gates::pass(tx, gate, record.id)?;
            }
            Some(gates::name_of(tx.conn, gate)?)
        }
        None => None,
    };
    tx.count(record.queue, Some(record.place()), Some(Place::On(record.route)));
    record.status = to;
    record.line = None;
    record.worker = Some(who.label.to_string());
    record.incarnation = who.incarnation;
    record.lease_until = Some(lease_until);
    record.claimed_at = tx.now.time;
    record.token += 1;
    record.epoch = tx.epoch;
    record.attempts += 1;
    record.due_at = None;
    let receipt = record.receipt();
    let lease = Duration::from_millis(lease_ms.unsigned_abs());
    Ok(Some(Taken { record, payload, receipt, how, lease, gate }))
}
