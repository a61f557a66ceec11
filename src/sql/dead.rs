//! The ends of a message: dead, cancelled, removed; and the way back from the dead letters.

use std::time::Duration;

use rusqlite::{Connection, params};

use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::receipt::Receipt;
use crate::sql::counters::Place;
use crate::sql::{Extras, Payload, Record, Tx, details, finished, groups, keys, payloads, retry_queue};
use crate::state::{Event, Status};

/// How long a cancelled message is kept at least: a day, so that its holder learns of it.
const CANCELLED_KEPT: Duration = Duration::from_secs(86_400);

/// Why a message whose time to live is over becomes a dead letter.
pub(crate) const EXPIRED: &str = "expired: its time to live was over before it could be handed out";

/// Why a message whose payload cannot be trusted becomes one.
const DAMAGED: &str = "damaged: its payload does not match the checksum that was stored with it";

/// Who ends a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// Its holder, by its receipt, which stays the newest.
    Holder,
    /// Anyone else: a holder's receipt becomes stale.
    Another,
}

/// Makes a dead letter of a live message. `record` carries the counters as they are to be kept.
pub(crate) fn give_up(
    tx: &mut Tx<'_>,
    record: &Record,
    reason: Option<&str>,
    error: Option<&str>,
    by: By,
) -> Result<()> {
    finish(tx, record, Event::GiveUp, reason, error, by)
}

/// Why a message must not be handed out, if so: its time to live is over, or its payload is not the one that was enqueued (which
/// is not known of one that was left in the file).
pub(crate) fn spoiled(tx: &Tx<'_>, record: &Record, payload: &Payload) -> Option<&'static str> {
    if record.is_expired(tx.now.time) {
        Some(EXPIRED)
    } else if matches!(payload, Payload::Read(bytes) if crc32fast::hash(bytes) != record.payload_crc) {
        Some(DAMAGED)
    } else {
        None
    }
}

/// Gives up what is spoiled, for this reason.
pub(crate) fn give_up_spoiled(tx: &mut Tx<'_>, record: &Record, reason: &str) -> Result<()> {
    tx.durable |= reason == DAMAGED;
    give_up(tx, record, Some(reason), None, By::Another)
}

/// Gives up a message whose payload turned out damaged when this claim of it was made, unless that is over.
pub(crate) fn give_up_damaged(tx: &mut Tx<'_>, receipt: Receipt) -> Result<()> {
    match Record::load(tx.conn, receipt.id().get())? {
        Some(record) if record.is_held() && record.receipt() == receipt => give_up_spoiled(tx, &record, DAMAGED),
        _ => Ok(()),
    }
}

/// Cancels a live message; its holder's next call says so.
pub(crate) fn cancel(tx: &mut Tx<'_>, id: i64) -> Result<()> {
    let record = Record::load(tx.conn, id)?.ok_or(Error::Gone { id: MessageId::new(id) })?;
    if record.status == Status::Cancelled {
        tx.touch = true; // Cancelling twice is safe.
        return Ok(());
    }
    record.after(Event::Cancel, "cancelled")?;
    finish(tx, &record, Event::Cancel, None, None, By::Another)
}

fn finish(
    tx: &mut Tx<'_>,
    record: &Record,
    event: Event,
    reason: Option<&str>,
    error: Option<&str>,
    by: By,
) -> Result<()> {
    const SQL: &str = "UPDATE main.relet_messages
        SET status = ?2, worker_id = NULL, incarnation = NULL, line = NULL, place = NULL, lease_ms = NULL, due_at = NULL,
            token = ?3, epoch = ?4, attempts = ?5, crashes = ?6, extras = ?7
        WHERE id = ?1";
    let to = record.after(event, "finished")?;
    // As with a claim, the epoch goes with the token: after a power cut the same token may have been given out before.
    let (token, epoch) = match by == By::Another && record.is_held() {
        true => (record.token + 1, tx.epoch),
        false => (record.token, record.epoch),
    };
    retry_queue::take(tx, record)?;
    let mut record = record.clone();
    if reason.is_some() || error.is_some() || record.extras.has(Extras::DETAILS) {
        record.dead_reason = reason.map(str::to_owned).or(record.dead_reason);
        record.last_error = error.map(str::to_owned).or(record.last_error);
        details::save(tx.conn, &mut record)?;
    }
    let (attempts, crashes, extras) = (record.attempts, record.crashes, record.extras.bits());
    tx.conn.prepare_cached(SQL)?.execute(params![record.id, to, token, epoch, attempts, crashes, extras])?;
    let keep_until = (to == Status::Cancelled).then(|| tx.now.after(tx.defaults.retention.max(CANCELLED_KEPT)));
    finished::put(tx.conn, record.id, to, tx.now.time, keep_until)?;
    details::ended(tx.conn, &record)?;
    tx.count(record.queue, Some(record.place()), Some(Place::of(to, record.route, false)));
    groups::settle_turn(tx, record.queue, record.group.as_deref())
}

/// Gives a dead letter all its budgets again, and its place on its route. Its history and its token stay.
pub(crate) fn redrive(tx: &mut Tx<'_>, id: i64) -> Result<()> {
    // The time to live was over, or counted while it lay dead: it does not apply again.
    const SQL: &str = "UPDATE main.relet_messages
        SET status = route, attempts = 0, crashes = 0, line = ?2, place = iif(?2 IS NULL, NULL, -priority), extras = ?3
        WHERE id = ?1";
    let mut record = Record::load(tx.conn, id)?.ok_or(Error::Gone { id: MessageId::new(id) })?;
    let to = record.after(Event::Redrive, "redriven")?;
    if let Some(key) = &record.key
        && let Some(holder) = keys::holder(tx.conn, record.queue, key)?
    {
        return Err(Error::KeyTaken { id: MessageId::new(holder), key: key.clone() });
    }
    tx.count(record.queue, Some(record.place()), Some(Place::of(to, record.route, false)));
    record.deferrals = 0;
    record.releases = 0;
    record.redrives += 1;
    record.expires_at = None;
    details::save(tx.conn, &mut record)?;
    // Parked first: whose turn it is, is judged once it is back among its group.
    let line = record.group.is_none().then(|| record.own_line());
    tx.conn.prepare_cached(SQL)?.execute(params![id, line, record.extras.bits()])?;
    finished::take(tx.conn, id)?;
    keys::take(tx.conn, &record)?;
    groups::join(tx.conn, &record, false)?;
    groups::settle_turn(tx, record.queue, record.group.as_deref())
}

/// A page of dead letters that died up to `until`, in the order of their deaths: each one's instant and id, after `after`, and whether it
/// is of `queue` (`None`: of any). Those of other queues are in it, so that a page costs the same however many there are.
pub(crate) fn page(
    conn: &Connection,
    queue: Option<i64>,
    after: (i64, i64),
    until: i64,
    limit: usize,
) -> Result<Vec<((i64, i64), bool)>> {
    const SQL: &str = "SELECT f.finished_at, f.message, ?1 IS NULL OR m.queue = ?1
                         FROM main.relet_finished f INDEXED BY relet_ends
                         CROSS JOIN main.relet_messages m ON m.id = f.message
                        WHERE f.status = 'dead' AND (f.finished_at, f.message) > (?2, ?3) AND f.finished_at <= ?4
                        ORDER BY f.finished_at, f.message LIMIT ?5";
    let mut statement = conn.prepare_cached(SQL)?;
    let read = |row: &rusqlite::Row<'_>| Ok(((row.get(0)?, row.get(1)?), row.get(2)?));
    let rows = statement.query_map(params![queue, after.0, after.1, until, limit as i64], read)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Deletes a message and all that lies beside it.
pub(crate) fn remove(tx: &mut Tx<'_>, record: &Record) -> Result<()> {
    const MESSAGE: &str = "DELETE FROM main.relet_messages WHERE id = ?1";
    retry_queue::take(tx, record)?;
    tx.conn.prepare_cached(MESSAGE)?.execute([record.id])?;
    if record.extras.has(Extras::LARGE) {
        payloads::remove(tx.conn, record.id)?;
    }
    if !record.status.is_live() {
        finished::take(tx.conn, record.id)?;
    }
    details::removed(tx, record)?;
    tx.count(record.queue, Some(record.place()), None);
    Ok(())
}
