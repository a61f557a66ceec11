//! Settle: one guard, the receipt, through which every end of a claim passes.

use std::time::Duration;

use rusqlite::{OptionalExtension, params};

use crate::clock::{INSTANT_MAX, millis};
use crate::error::{Error, Result, Whereabouts};
use crate::message::{MessageId, RELEASES_MAX, cut};
use crate::options::DEFERRAL_GRACE;
use crate::receipt::Receipt;
use crate::retry::Retry;
use crate::sql::counters::Place;
use crate::sql::dead::{self, By};
use crate::sql::gates::Passage;
use crate::sql::record::line_of;
use crate::sql::retry_queue::{self, Wait};
use crate::sql::{Extras, Record, Tx, details, finished, gates, groups, queues};
use crate::state::{Event, Route, Status};

/// A way to end a claim, or to hold it longer.
///
/// ```
/// use std::time::Duration;
/// use relet::{Settle, Store};
///
/// let store = Store::open_in_memory()?;
/// let mail = store.queue("mail");
/// mail.enqueue_all(["a", "b"])?;
/// let claims = store.worker("w")?.claim_batch("mail", 2)?;
/// let outcomes = store.settle_all([
///     (claims[0].receipt(), Settle::Ack),
///     (claims[1].receipt(), Settle::Fail { error: "no route".into(), retry_in: None }),
/// ])?;
/// assert!(outcomes.iter().all(|outcome| outcome.is_ok()));
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settle {
    /// The work is done: the message is deleted, or kept as done for the store's retention.
    Ack,
    /// The work failed: the message is tried again after its backoff, or becomes a dead letter when its attempts are used up.
    Fail {
        /// Why; kept up to [`ERROR_MAX`](crate::ERROR_MAX) bytes.
        error: String,
        /// The wait before the next try, used as it is (a server's `Retry-After`); `None`: the backoff policy, with jitter.
        retry_in: Option<Duration>,
    },
    /// The message can never be worked on: it becomes a dead letter at once.
    Reject {
        /// Why; kept up to [`ERROR_MAX`](crate::ERROR_MAX) bytes.
        error: String,
    },
    /// Not now, through no fault of the message's (a rate limit): it stays this worker's, in `processing`, and waits in the retry queue. Costs no attempt; has its own ceiling.
    Defer {
        /// How long to wait.
        delay: Duration,
        /// Why; kept up to [`ERROR_MAX`](crate::ERROR_MAX) bytes.
        reason: String,
    },
    /// The other side has said for how long it wants to hear nothing (a 429 with Retry-After): the message is deferred, as with
    /// [`Settle::Defer`], and its [gate](crate::Gate) closed for as long, so that its siblings wait in the file. When it is due
    /// it is anyone's, in its place in the gate's line. Without a gate, only deferred.
    Limited {
        /// How long to wait.
        retry_after: Duration,
    },
    /// Back to its route, for anyone, at once. Costs no attempt; has its own ceiling.
    Release,
    /// The lease lasts at least this long from now on; it is never shortened. The claim goes on.
    Extend {
        /// The lease from now on.
        lease: Duration,
    },
}

impl Settle {
    /// What it says, as far as it is kept: an operation that is laid down holds no more than that.
    pub(crate) fn shortened(self) -> Settle {
        match self {
            Settle::Fail { error, retry_in } => Settle::Fail { error: cut(&error), retry_in },
            Settle::Reject { error } => Settle::Reject { error: cut(&error) },
            Settle::Defer { delay, reason } => Settle::Defer { delay, reason: cut(&reason) },
            other => other,
        }
    }
}

/// What a settle came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// This call settled it; the message has this status now (`Done` also where it was deleted at once).
    Now(Status),
    /// The same receipt had settled it before, in this or another way; the message has this status. Nothing was changed.
    Before(Status),
    /// There is no such message any more: it was settled before and deleted.
    Gone,
}

/// What is known of a claim's message before it is settled.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Known {
    /// There is only a receipt.
    #[default]
    Nothing,
    /// Nothing lies beside its row: its queue and its route.
    Plain(i64, Route),
    /// Something does.
    More,
}

impl Known {
    pub(crate) fn of(record: &Record) -> Known {
        if record.extras == Extras::default() { Known::Plain(record.queue, record.route) } else { Known::More }
    }
}

/// Does what `how` says to the claim with this receipt. A stale receipt changes nothing.
pub(crate) fn settle(tx: &mut Tx<'_>, receipt: Receipt, how: &Settle, known: Known) -> Result<Settled> {
    check_origin(tx, receipt)?;
    tx.ring_none(); // as long as nothing is said below
    if matches!(how, Settle::Ack) && tx.defaults.retention.is_zero() && remove_plain(tx, receipt, known)? {
        return Ok(Settled::Now(Status::Done));
    }
    let Some(record) = Record::load(tx.conn, receipt.id().get())? else {
        tx.touch = true;
        return match how {
            Settle::Extend { .. } => Err(Error::Gone { id: receipt.id() }),
            _ => Ok(Settled::Gone),
        };
    };
    match check(&record, receipt) {
        Standing::Holds => {}
        Standing::Settled if !matches!(how, Settle::Extend { .. }) => {
            tx.touch = true;
            return Ok(Settled::Before(record.status));
        }
        Standing::Settled => return Err(stale(&record, receipt)),
        Standing::Lost(error) => return Err(error),
    }
    match (how, record.gate, &record.group) {
        (Settle::Extend { .. }, _, _) | (Settle::Ack, None, None) => {}
        // What waits at its gate may be of any queue.
        (_, Some(_), _) => tx.ring_all(),
        (_, None, _) => tx.ring(record.queue),
    }
    let status = match how {
        Settle::Ack => ack(tx, record)?,
        Settle::Fail { error, retry_in } => fail(tx, record, &cut(error), *retry_in)?,
        Settle::Reject { error } => {
            dead::give_up(tx, &record, Some("rejected"), Some(&cut(error)), By::Holder)?;
            Status::Dead
        }
        Settle::Defer { delay, reason } => defer(tx, record, *delay, &cut(reason), Some(DEFERRAL_GRACE))?,
        Settle::Limited { retry_after } => limited(tx, record, *retry_after)?,
        Settle::Release => release(tx, record)?,
        // Voided by a restart of its worker or of the machine: who comes after may finish this, but not keep it.
        Settle::Extend { .. } if record.lease_until == Some(0) => return Err(stale(&record, receipt)),
        // Its slot at the gate was free when the lease had run out, and is another's now.
        Settle::Extend { .. } if has_lost_its_slot(tx, &record)? => return Err(stale(&record, receipt)),
        Settle::Extend { lease } => extend(tx, record, *lease)?,
    };
    Ok(Settled::Now(status))
}

/// Acks a plain message in one statement: the receipt is checked where the row is deleted, and nothing lies beside it. Returns
/// whether it was such a one; if not, nothing was changed.
fn remove_plain(tx: &mut Tx<'_>, receipt: Receipt, known: Known) -> Result<bool> {
    const LOOK: &str = "SELECT queue, route FROM main.relet_messages WHERE id = ?1 AND extras = 0";
    const SQL: &str = "DELETE FROM main.relet_messages
        WHERE id = ?1 AND token = ?2 AND epoch = ?3 AND line = -1 AND extras = 0 AND queue = ?4 AND route = ?5";
    let plain = match known {
        Known::Plain(queue, route) => Some((queue, route)),
        Known::More => None,
        Known::Nothing => {
            let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
            tx.conn.prepare_cached(LOOK)?.query_row([receipt.id().get()], read).optional()?
        }
    };
    let Some((queue, route)) = plain else { return Ok(false) };
    let params = params![receipt.id().get(), receipt.token(), receipt.epoch(), queue, route];
    if tx.conn.prepare_cached(SQL)?.execute(params)? == 0 {
        return Ok(false);
    }
    tx.count(queue, Some(Place::On(route)), None);
    tx.count_acked(queue);
    Ok(true)
}

/// Refuses what the file issued that this one is a copy of: there it may be settled, too.
fn check_origin(tx: &Tx<'_>, receipt: Receipt) -> Result<()> {
    if receipt.epoch() >= tx.floor {
        return Ok(());
    }
    match Record::load(tx.conn, receipt.id().get())? {
        Some(record) => Err(stale(&record, receipt)),
        None => Err(Error::Gone { id: receipt.id() }),
    }
}

/// What a receipt is worth.
enum Standing {
    /// It is the newest, and its claim is not ended. That its lease may have run out does not matter until somebody has taken the message back.
    Holds,
    /// It is the newest, and its claim was ended with it.
    Settled,
    /// Another claim, a cancellation or a take-back has come between.
    Lost(Error),
}

fn check(record: &Record, receipt: Receipt) -> Standing {
    let newest = record.token == receipt.token() && record.epoch == receipt.epoch();
    if newest && record.is_held() {
        Standing::Holds
    } else if newest {
        Standing::Settled
    } else if record.status == Status::Cancelled
        && record.token == receipt.token() + 1
        && record.epoch >= receipt.epoch()
    {
        Standing::Lost(Error::Cancelled { id: record.id() })
    } else {
        Standing::Lost(stale(record, receipt))
    }
}

fn stale(record: &Record, receipt: Receipt) -> Error {
    Error::Stale { receipt, now: Whereabouts { status: record.status, worker: record.worker.clone() } }
}

/// Refuses a receipt that does not hold its message: the guard of an application's own transaction.
pub(crate) fn guard(tx: &Tx<'_>, receipt: Receipt) -> Result<()> {
    check_origin(tx, receipt)?;
    let record = Record::load(tx.conn, receipt.id().get())?.ok_or(Error::Gone { id: receipt.id() })?;
    match check(&record, receipt) {
        Standing::Holds => Ok(()),
        Standing::Settled => Err(stale(&record, receipt)),
        Standing::Lost(error) => Err(error),
    }
}

fn ack(tx: &mut Tx<'_>, record: Record) -> Result<Status> {
    const KEEP: &str = "UPDATE main.relet_messages
        SET status = ?2, worker_id = NULL, incarnation = NULL, line = NULL, place = NULL, lease_ms = NULL WHERE id = ?1";
    let to = record.after(Event::Ack, "acked")?;
    if tx.defaults.retention.is_zero() {
        dead::remove(tx, &record)?;
    } else {
        tx.conn.prepare_cached(KEEP)?.execute(params![record.id, to])?;
        finished::put(tx.conn, record.id, to, tx.now.time, Some(tx.now.after(tx.defaults.retention)))?;
        details::ended(tx.conn, &record)?;
        tx.count(record.queue, Some(record.place()), Some(Place::Done));
    }
    tx.count_acked(record.queue);
    gates::widen(tx, &record)?;
    groups::settle_turn(tx, record.queue, record.group.as_deref())?;
    Ok(to)
}

fn fail(tx: &mut Tx<'_>, record: Record, error: &str, retry_in: Option<Duration>) -> Result<Status> {
    if record.attempts >= record.max_attempts {
        let reason = format!("failed {} times, the limit of its attempts", record.attempts);
        dead::give_up(tx, &record, Some(&reason), Some(error), By::Holder)?;
        return Ok(Status::Dead);
    }
    let delay = match retry_in {
        Some(delay) => delay,
        None => policy(tx, &record)?.jittered(record.attempts.saturating_sub(1), fastrand::f64()),
    };
    let due_at = tx.now.after(delay);
    let count = record.attempts;
    give_back(tx, record, Event::Fail, Some((due_at, error, count)))
}

/// The message's own backoff, else its queue's, else the store's. One that cannot be read counts as not set.
fn policy(tx: &Tx<'_>, record: &Record) -> Result<Retry> {
    let text = match &record.retry {
        Some(text) => Some(text.clone()),
        None => queues::retry_of(tx.conn, record.queue)?,
    };
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(tx.defaults.retry))
}

fn release(tx: &mut Tx<'_>, mut record: Record) -> Result<Status> {
    record.releases += 1;
    record.attempts = record.attempts.saturating_sub(1);
    if record.releases >= RELEASES_MAX {
        let reason = format!("released {} times", record.releases);
        dead::give_up(tx, &record, Some(&reason), None, By::Holder)?;
        return Ok(Status::Dead);
    }
    give_back(tx, record, Event::Release, None)
}

/// Back to its route: in its line, or parked until it is due.
fn give_back(tx: &mut Tx<'_>, mut record: Record, event: Event, retry: Option<(i64, &str, u32)>) -> Result<Status> {
    const SQL: &str = "UPDATE main.relet_messages
        SET status = ?2, worker_id = NULL, incarnation = NULL, line = ?3, place = iif(?3 IS NULL, NULL, -priority), lease_ms = NULL,
            due_at = ?4, attempts = ?5, extras = ?6
        WHERE id = ?1";
    let to = record.after(event, "given back")?;
    let parked = retry.filter(|(due_at, _, _)| *due_at > tx.now.time);
    if let Some((_, error, _)) = retry {
        record.last_error = Some(error.to_owned());
    }
    details::save(tx.conn, &mut record)?;
    tx.conn.prepare_cached(SQL)?.execute(params![
        record.id,
        to,
        parked.is_none().then(|| record.own_line()),
        parked.map(|(due_at, _, _)| due_at),
        record.attempts,
        record.extras.bits(),
    ])?;
    if let Some((due_at, error, count)) = parked {
        retry_queue::put(tx, &record, &Wait { due_at, reason: Some((error, count)), ..Wait::default() })?;
    }
    details::given_back(tx.conn, &record)?;
    groups::settle_turn(tx, record.queue, record.group.as_deref())?;
    Ok(to)
}

fn limited(tx: &mut Tx<'_>, record: Record, retry_after: Duration) -> Result<Status> {
    let Some(gate) = record.gate else { return defer(tx, record, retry_after, "rate limited", Some(DEFERRAL_GRACE)) };
    gates::close(tx, gate, tx.now.after(retry_after))?;
    let reason = format!("rate limited at gate {:?}", gates::name_of(tx.conn, gate)?);
    defer(tx, record, retry_after, &reason, None)
}

/// Puts it off, and keeps it for its worker: for `grace` longer than until it is due.
fn defer(
    tx: &mut Tx<'_>,
    mut record: Record,
    delay: Duration,
    reason: &str,
    grace: Option<Duration>,
) -> Result<Status> {
    const SQL: &str = "UPDATE main.relet_messages
        SET line = NULL, place = NULL, lease_ms = NULL, due_at = ?2, attempts = ?3, extras = ?4 WHERE id = ?1";
    record.deferrals += 1;
    record.attempts = record.attempts.saturating_sub(1);
    if record.deferrals >= record.max_deferrals {
        let spent = format!("deferred {} times; the last time: {reason}", record.deferrals);
        dead::give_up(tx, &record, Some(&spent), None, By::Holder)?;
        return Ok(Status::Dead);
    }
    let to = record.after(Event::Defer, "deferred")?;
    let due_at = tx.now.after(delay);
    details::save(tx.conn, &mut record)?;
    gates::leave(tx.conn, &record)?;
    tx.conn.prepare_cached(SQL)?.execute(params![record.id, due_at, record.attempts, record.extras.bits()])?;
    let kept_until = grace.map_or(due_at, |grace| due_at.saturating_add(millis(grace)));
    let kept = record.worker.as_deref().map(|worker| (worker, kept_until));
    let reason = Some((reason, record.deferrals));
    retry_queue::put(tx, &record, &Wait { due_at, kept, reason, ..Wait::default() })?;
    tx.count(record.queue, Some(record.place()), Some(Place::Deferred));
    Ok(to)
}

fn has_lost_its_slot(tx: &Tx<'_>, record: &Record) -> Result<bool> {
    match record.gate {
        Some(gate) if record.lease_until.is_some_and(|until| until <= tx.now.awake) => {
            Ok(gates::passage(tx.conn, gate, tx.now)? == Passage::Taken)
        }
        _ => Ok(false),
    }
}

fn extend(tx: &mut Tx<'_>, record: Record, lease: Duration) -> Result<Status> {
    const SQL: &str = "UPDATE main.relet_messages SET place = ?2, lease_ms = ?3 WHERE id = ?1 AND line = -1";
    let lease_ms = millis(lease).max(1);
    let until = tx.now.awake.saturating_add(lease_ms).min(INSTANT_MAX);
    if record.lease_until.is_some_and(|current| current < until) {
        tx.conn.prepare_cached(SQL)?.execute(params![record.id, until, lease_ms])?;
    }
    Ok(record.status)
}

/// Changes the route of a live message. One that is held takes it when it comes back.
pub(crate) fn reroute(tx: &mut Tx<'_>, id: i64, route: Route) -> Result<()> {
    const SQL: &str =
        "UPDATE main.relet_messages SET route = ?2, status = ?3, line = iif(line >= 0, ?4, line) WHERE id = ?1";
    let record = Record::load(tx.conn, id)?.ok_or(Error::Gone { id: MessageId::new(id) })?;
    let to = match record.status {
        Status::Processing => Status::Processing,
        status => {
            status.after(Event::Reroute, route).ok_or(Error::Status { id: record.id(), status, wanted: "routed" })?
        }
    };
    tx.conn.prepare_cached(SQL)?.execute(params![id, route, to, line_of(record.gate, route)])?;
    if record.place() != Place::Deferred {
        tx.count(record.queue, Some(Place::On(record.route)), Some(Place::On(route)));
    }
    tx.touch = true;
    Ok(())
}
