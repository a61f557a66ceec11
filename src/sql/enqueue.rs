//! Enqueue: one insert, and what few messages have beside it.

use rusqlite::params;

use crate::clock::INSTANT_MAX;
use crate::error::Result;
use crate::message::{DEFERRALS_MAX, Enqueued, Message, MessageId, Start};
use crate::spool::Spool;
use crate::sql::counters::Place;
use crate::sql::dead::{self, By};
use crate::sql::queues::{self, QueueRow};
use crate::sql::record::line_of;
use crate::sql::retry_queue::{self, Wait};
use crate::sql::{Extras, Record, Source, Tx, details, gates, groups, keys, payloads};

/// Stores all messages, in order, or none.
pub(crate) fn enqueue_all(tx: &mut Tx<'_>, queue: &str, messages: &[Message]) -> Result<Vec<Enqueued>> {
    let queue = queues::find_or_make(tx, queue)?;
    messages.iter().map(|message| insert(tx, &queue, message, Source::Memory(&message.payload))).collect()
}

/// Stores a message, unless a live one of the queue has its key.
pub(crate) fn enqueue(tx: &mut Tx<'_>, queue: &str, message: &Message) -> Result<Enqueued> {
    let queue = queues::find_or_make(tx, queue)?;
    insert(tx, &queue, message, Source::Memory(&message.payload))
}

/// As [`enqueue`], with the payload that was spooled.
pub(crate) fn enqueue_spooled(tx: &mut Tx<'_>, queue: &str, message: &Message, spool: &mut Spool) -> Result<Enqueued> {
    let queue = queues::find_or_make(tx, queue)?;
    insert(tx, &queue, message, Source::Spool(spool))
}

fn insert(tx: &mut Tx<'_>, queue: &QueueRow, message: &Message, payload: Source<'_>) -> Result<Enqueued> {
    let (now, bytes) = (tx.now.time, payload.len());
    if let Some(existing) = existing(tx, queue, message.key.as_deref())? {
        return Ok(existing);
    }
    let (due_at, on_wall) = match message.start {
        Start::Now => (None, false),
        Start::After(delay) => (Some(tx.now.after(delay)).filter(|due_at| *due_at > now), false),
        Start::At(at) => (Some(at.min(INSTANT_MAX)).filter(|due_at| *due_at > tx.now.wall), true),
    };
    let gate = match &message.gate {
        Some(gate) => Some(gates::find_or_make(tx, gate)?),
        None => queue.gate,
    };
    if gate.is_some() && !queue.gated {
        queues::set_gated(tx, queue.id)?;
    }
    let behind = match &message.group {
        Some(group) => groups::has_live_member(tx, queue.id, group)?,
        None => false,
    };
    let row = New {
        id: tx.next_id(queue.last_id),
        line: (!behind && due_at.is_none()).then(|| line_of(gate, message.route)),
        due_at,
        max_attempts: message.max_attempts.or(queue.max_attempts).unwrap_or(tx.defaults.max_attempts),
    };
    let is_plain = message.key.is_none()
        && message.group.is_none()
        && gate.is_none()
        && message.tick_at.is_none()
        && message.ttl.is_none()
        && message.max_deferrals.is_none()
        && message.retry.is_none();
    if is_plain && due_at.is_none() {
        store(tx, queue, message, payload, &row, Extras::default())?;
    } else {
        let extras = Extras::default().and(Extras::DETAILS, !is_plain);
        store(tx, queue, message, payload, &row, extras)?;
        let wait = due_at.map(|due_at| Wait { due_at, on_wall, behind, ..Wait::default() });
        put_beside(tx, message, row.id, gate, wait, !behind)?;
    }
    tx.count(queue.id, None, Some(Place::On(message.route)));
    tx.note_stored(bytes);
    tx.ring(queue.id);
    Ok(Enqueued { id: MessageId::new(row.id), existing: false })
}

/// The live message of the queue that has this key.
pub(crate) fn existing(tx: &mut Tx<'_>, queue: &QueueRow, key: Option<&str>) -> Result<Option<Enqueued>> {
    let Some(key) = key else { return Ok(None) };
    let Some(id) = keys::holder(tx.conn, queue.id, key)? else { return Ok(None) };
    // One that has expired will never be handed out, so it may not stand in the way of one that would be.
    if let Some(expired) = Record::load(tx.conn, id)?.filter(|record| record.is_expired(tx.now.time)) {
        dead::give_up(tx, &expired, Some(dead::EXPIRED), None, By::Another)?;
        return Ok(None);
    }
    tx.touch = true;
    Ok(Some(Enqueued { id: MessageId::new(id), existing: true }))
}

/// What the row of a new message says, beside what the message says itself.
struct New {
    id: i64,
    line: Option<i64>,
    due_at: Option<i64>,
    max_attempts: u32,
}

/// The message's own row, and its payload where that is too large for it.
fn store(
    tx: &Tx<'_>,
    queue: &QueueRow,
    message: &Message,
    mut payload: Source<'_>,
    new: &New,
    extras: Extras,
) -> Result<()> {
    const INSERT: &str = "INSERT INTO main.relet_messages
        (id, queue, status, route, line, place, priority, extras, due_at, max_attempts, enqueued_at, payload_crc, payload)
        VALUES (?1, ?2, ?3, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)";
    let inline = payload.inline();
    let large = inline.is_none();
    tx.conn.prepare_cached(INSERT)?.execute(params![
        new.id,
        queue.id,
        message.route,
        new.line,
        new.line.map(|_| -message.priority),
        message.priority,
        extras.and(Extras::LARGE, large).bits(),
        new.due_at,
        new.max_attempts,
        tx.now.time,
        payload.crc(),
        inline,
    ])?;
    if large {
        payloads::put(tx.conn, new.id, &mut payload)?;
    }
    Ok(())
}

/// What only some messages have.
fn put_beside(
    tx: &mut Tx<'_>,
    message: &Message,
    id: i64,
    gate: Option<i64>,
    wait: Option<Wait<'_>>,
    turn: bool,
) -> Result<()> {
    let Some(mut record) = Record::load_row(tx.conn, id)? else { return Ok(()) };
    if record.extras.has(Extras::DETAILS) {
        record.key = message.key.clone();
        record.group = message.group.clone();
        record.gate = gate;
        record.tick_at = message.tick_at;
        record.expires_at = message.ttl.map(|ttl| tx.now.after(ttl));
        record.max_deferrals = message.max_deferrals.unwrap_or(DEFERRALS_MAX);
        record.retry = message.retry.as_ref().map(serde_json::to_string).transpose()?;
        details::save(tx.conn, &mut record)?;
        keys::take(tx.conn, &record)?;
        groups::join(tx.conn, &record, turn)?;
        details::begin_to_wait(tx.conn, &record)?;
    }
    match wait {
        Some(wait) => retry_queue::put(tx, &record, &wait),
        None => Ok(()),
    }
}
