//! Import: a message as another store had it, with its history.

use rusqlite::params;

use crate::error::Result;
use crate::message::{DEFERRALS_MAX, Enqueued, MessageId, cut};
use crate::sql::counters::Place;
use crate::sql::record::line_of;
use crate::sql::retry_queue::{self, Wait};
use crate::sql::{Extras, Record, Source, Tx, details, enqueue, finished, gates, groups, keys, payloads, queues};
use crate::state::Status;
use crate::view::Snapshot;

/// Stores the message, unless it is live and a live one of its queue has its key.
///
/// What was held or deferred waits for anyone: a receipt and a lease mean nothing in another file.
pub(crate) fn import(tx: &mut Tx<'_>, message: &Snapshot, mut payload: Source<'_>) -> Result<Enqueued> {
    let queue = queues::find_or_make(tx, &message.queue)?;
    let bytes = payload.len();
    let is_live = message.status.is_live();
    if is_live && let Some(existing) = enqueue::existing(tx, &queue, message.key.as_deref())? {
        return Ok(existing);
    }
    let gate = message.gate.as_deref().map(|gate| gates::find_or_make(tx, gate)).transpose()?;
    if gate.is_some() && !queue.gated {
        queues::set_gated(tx, queue.id)?;
    }
    let behind = match &message.group {
        Some(group) if is_live => groups::has_live_member(tx, queue.id, group)?,
        _ => false,
    };
    let now = tx.now;
    let waits_on_wall = message.due_on_wall && message.due_at.is_some_and(|due_at| due_at > now.wall);
    let due_at = message.due_at.filter(|_| is_live);
    let due_at = due_at.map(|due_at| if waits_on_wall { due_at } else { now.of_shown(due_at) });
    let waits = waits_on_wall && is_live || due_at.is_some_and(|due_at| due_at > now.time);
    let is_plain = message.key.is_none()
        && message.group.is_none()
        && gate.is_none()
        && message.tick_at.is_none()
        && message.expires_at.is_none()
        && message.max_deferrals == DEFERRALS_MAX
        && message.retry.is_none()
        && (message.deferrals, message.releases, message.redrives) == (0, 0, 0)
        && message.last_error.is_none()
        && message.dead_reason.is_none();
    let id = tx.next_id(queue.last_id);
    let line = (is_live && !behind && !waits).then(|| line_of(gate, message.route));
    let extras = Extras::default().and(Extras::DETAILS, !is_plain);
    let max_attempts = match message.max_attempts {
        0 => queue.max_attempts.unwrap_or(tx.defaults.max_attempts),
        max => max,
    };
    store(tx, queue.id, message, &mut payload, &Row { id, due_at, line, extras, max_attempts })?;
    let mut record = Record::load_row(tx.conn, id)?.expect("it was just stored, in this transaction");
    if !is_plain {
        record.key = message.key.clone();
        record.group = message.group.clone();
        record.gate = gate;
        record.tick_at = message.tick_at;
        record.expires_at = message.expires_at.map(|at| now.of_shown(at));
        record.max_deferrals = message.max_deferrals;
        record.retry = message.retry.as_ref().map(serde_json::to_string).transpose()?;
        record.deferrals = message.deferrals;
        record.releases = message.releases;
        record.redrives = message.redrives;
        record.last_error = message.last_error.as_deref().map(cut);
        record.dead_reason = message.dead_reason.as_deref().map(cut);
        details::save(tx.conn, &mut record)?;
    }
    if is_live {
        keys::take(tx.conn, &record)?;
        groups::join(tx.conn, &record, !behind)?;
        details::begin_to_wait(tx.conn, &record)?;
        if let Some(due_at) = due_at.filter(|_| waits) {
            let reason = message.wait_reason.as_deref().map(cut);
            let reason = reason.as_deref().map(|reason| (reason, message.wait_count));
            let wait = Wait { due_at, on_wall: waits_on_wall, behind, reason, ..Wait::default() };
            retry_queue::put(tx, &record, &wait)?;
        }
    } else {
        // Nothing has ended after now, or it would be passed over until then.
        let at = message.finished_at.map_or(now.time, |at| now.of_shown(at).min(now.time));
        finished::put(tx.conn, id, Status::Dead, at, None)?;
    }
    tx.count(queue.id, None, Some(Place::of(record.status, record.route, false)));
    tx.note_stored(bytes);
    tx.ring(queue.id);
    Ok(Enqueued { id: MessageId::new(id), existing: false })
}

/// What the row says, beside what the message says itself.
struct Row {
    id: i64,
    due_at: Option<i64>,
    line: Option<i64>,
    extras: Extras,
    max_attempts: u32,
}

/// The message's own row, and its payload where that is too large for it.
fn store(tx: &Tx<'_>, queue: i64, message: &Snapshot, payload: &mut Source<'_>, row: &Row) -> Result<()> {
    const INSERT: &str = "INSERT INTO main.relet_messages
        (id, queue, status, route, line, place, priority, extras, due_at, attempts, crashes, max_attempts, enqueued_at,
         payload_crc, payload)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)";
    let status = if message.status.is_live() { Status::from(message.route) } else { Status::Dead };
    let inline = payload.inline();
    let large = inline.is_none();
    tx.conn.prepare_cached(INSERT)?.execute(params![
        row.id,
        queue,
        status,
        message.route,
        row.line,
        row.line.map(|_| -message.priority),
        message.priority,
        row.extras.and(Extras::LARGE, large).bits(),
        row.due_at,
        message.attempts,
        message.crashes,
        row.max_attempts,
        tx.now.of_shown(message.enqueued_at).min(tx.now.time),
        payload.crc(),
        inline,
    ])?;
    if large {
        payloads::put(tx.conn, row.id, payload)?;
    }
    Ok(())
}
