//! Enqueue: one insert, and the look-ups that a key or a group asks for.

use rusqlite::params;

use crate::clock::{INSTANT_MAX, millis};
use crate::error::Result;
use crate::message::{DEFERRALS_MAX, Enqueued, Message, MessageId, Start};
use crate::sql::dead::{self, By};
use crate::sql::queues::{self, QueueRow};
use crate::sql::{INLINE_MAX, Record, Tx, gates, groups};

/// Stores all messages, in order, or none.
pub(crate) fn enqueue_all(tx: &mut Tx<'_>, queue: &str, messages: &[Message]) -> Result<Vec<Enqueued>> {
    let queue = queues::find_or_make(tx, queue)?;
    messages.iter().map(|message| insert(tx, &queue, message)).collect()
}

/// Stores a message, unless a live one of the queue has its key.
pub(crate) fn enqueue(tx: &mut Tx<'_>, queue: &str, message: &Message) -> Result<Enqueued> {
    let queue = queues::find_or_make(tx, queue)?;
    insert(tx, &queue, message)
}

fn insert(tx: &mut Tx<'_>, queue: &QueueRow, message: &Message) -> Result<Enqueued> {
    const INSERT: &str = "INSERT INTO main.relet_messages
        (queue, status, route, priority, waits_for, due_at, parked_at, expires_at, key, group_key,
         max_attempts, max_deferrals, retry, enqueued_at, payload_crc, payload_bytes, payload, gate, tick_at)
        VALUES (?1, ?2, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)";
    const INSERT_LARGE: &str = "INSERT INTO main.relet_payloads (message, payload) VALUES (?1, ?2)";
    let now = tx.now.wall;
    if let Some(key) = &message.key
        && let Some(id) = Record::live_with_key(tx.conn, queue.id, key)?
    {
        // One that has expired will never be handed out, so it may not stand in the way of one that would be.
        match Record::load(tx.conn, id)?.filter(|record| record.is_expired(now)) {
            Some(expired) => dead::give_up(tx, &expired, Some(dead::EXPIRED), None, By::Another)?,
            None => {
                tx.touch = true;
                return Ok(Enqueued { id: MessageId::new(id), existing: true });
            }
        }
    }
    let (due_at, parked_at) = match message.start {
        Start::Now => (None, None),
        Start::After(delay) => (Some(tx.now.after(delay)), Some(now)),
        Start::At(at) => (Some(at.min(INSTANT_MAX)), None),
    };
    let (due_at, parked_at) = if due_at > Some(now) { (due_at, parked_at) } else { (None, None) };
    let behind = match &message.group {
        Some(group) => groups::has_live_member(tx, queue.id, group)?,
        None => false,
    };
    let waits_for = if behind { Some("group") } else { due_at.map(|_| "due") };
    let expires_at = message.ttl.map(|ttl| now.saturating_add(millis(ttl)).min(INSTANT_MAX));
    let retry = message.retry.as_ref().map(serde_json::to_string).transpose()?;
    let gate = match &message.gate {
        Some(gate) => Some(gates::find_or_make(tx, gate)?),
        None => queue.gate,
    };
    if gate.is_some() && !queue.gated {
        queues::set_gated(tx, queue.id)?;
    }
    let large = message.payload.len() > INLINE_MAX;
    let id = tx.conn.prepare_cached(INSERT)?.insert(params![
        queue.id,
        message.route,
        message.priority,
        waits_for,
        due_at,
        parked_at,
        expires_at,
        message.key,
        message.group,
        message.max_attempts.or(queue.max_attempts).unwrap_or(tx.defaults.max_attempts),
        message.max_deferrals.unwrap_or(DEFERRALS_MAX),
        retry,
        now,
        crc32fast::hash(&message.payload),
        message.payload.len() as i64,
        (!large).then_some(&message.payload),
        gate,
        message.tick_at,
    ])?;
    if large {
        tx.conn.prepare_cached(INSERT_LARGE)?.execute(params![id, message.payload])?;
    }
    tx.count(queue.id, None, Some(message.route.into()));
    Ok(Enqueued { id: MessageId::new(id), existing: false })
}
