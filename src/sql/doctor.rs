//! Doctor: everything the tables promise, looked up the slow way.

use rusqlite::Connection;

use crate::clock::Now;
use crate::error::Result;
use crate::sql::Record;

/// Findings of one kind that are written out; the rest is counted.
const FINDINGS: usize = 20;

/// What is wrong with the store, in sentences.
pub(crate) fn examine(conn: &Connection, now: Now) -> Result<Vec<String>> {
    let mut findings = file(conn)?;
    for check in CHECKS {
        let mut statement = conn.prepare(check)?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        push(&mut findings, rows.collect::<rusqlite::Result<Vec<_>>>()?);
    }
    push(&mut findings, payloads(conn)?);
    push(&mut findings, future(conn, now)?);
    Ok(findings)
}

fn push(findings: &mut Vec<String>, mut found: Vec<String>) {
    let more = found.len().saturating_sub(FINDINGS);
    found.truncate(FINDINGS);
    findings.extend(found);
    if more > 0 {
        findings.push(format!("… and {more} more of this kind"));
    }
}

/// Each finds what its sentence says, and nothing in a healthy store.
const CHECKS: &[&str] = &[
    // The counters are the rows.
    "WITH counted AS (
       SELECT q.id, q.name,
              count(*) FILTER (WHERE m.status = 'pending') AS pending,
              count(*) FILTER (WHERE m.status = 'routing') AS routing,
              count(*) FILTER (WHERE m.status = 'queued') AS queued,
              count(*) FILTER (WHERE m.status = 'pending_local') AS pending_local,
              count(*) FILTER (WHERE m.status = 'processing') AS processing,
              count(*) FILTER (WHERE m.status = 'done') AS done,
              count(*) FILTER (WHERE m.status = 'dead') AS dead,
              count(*) FILTER (WHERE m.status = 'cancelled') AS cancelled,
              (SELECT count(*) FROM main.relet_retry_queue r WHERE r.queue = q.id) AS retrying
         FROM main.relet_queues q LEFT JOIN main.relet_messages m ON m.queue = q.id GROUP BY q.id)
     SELECT 'queue ' || q.name || ': its counters differ from its messages'
       FROM main.relet_queues q JOIN counted c ON c.id = q.id
      WHERE (q.pending, q.routing, q.queued, q.pending_local, q.processing, q.done, q.dead, q.cancelled, q.retrying)
         IS NOT (c.pending, c.routing, c.queued, c.pending_local, c.processing, c.done, c.dead, c.cancelled, c.retrying)",
    // Every message is of a queue.
    "SELECT 'message ' || id || ' belongs to no queue' FROM main.relet_messages
      WHERE queue NOT IN (SELECT id FROM main.relet_queues)",
    // Every gate that a message or a queue names is there.
    "SELECT 'message ' || id || ' passes a gate that there is not' FROM main.relet_messages
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "SELECT 'queue ' || name || ' has a gate that there is not' FROM main.relet_queues
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "SELECT 'queue ' || name || ' has messages with a gate, and does not know it' FROM main.relet_queues q
      WHERE gated = 0 AND EXISTS (SELECT 1 FROM main.relet_messages m WHERE m.queue = q.id AND m.gate IS NOT NULL)",
    // The retry queue and the messages agree.
    "SELECT 'message ' || r.message || ' is in the retry queue, but does not wait for a retry'
       FROM main.relet_retry_queue r LEFT JOIN main.relet_messages m ON m.id = r.message
      WHERE m.id IS NULL OR m.queue <> r.queue OR m.due_at IS NOT r.due_at OR m.worker_id IS NOT r.worker_id",
    "SELECT 'message ' || m.id || ' is deferred, but not in the retry queue' FROM main.relet_messages m
      WHERE m.status = 'processing' AND m.lease_until IS NULL
        AND m.id NOT IN (SELECT message FROM main.relet_retry_queue)",
    // A group has one turn, and it is the right member's.
    "SELECT 'group ' || group_key || ': nobody has its turn' FROM main.relet_messages
      WHERE group_key IS NOT NULL AND finished_at IS NULL
      GROUP BY queue, group_key HAVING count(*) FILTER (WHERE waits_for IS NOT 'group') <> 1",
    "SELECT 'group ' || m.group_key || ': message ' || m.id || ' has the turn before a smaller one'
       FROM main.relet_messages m
      WHERE m.group_key IS NOT NULL AND m.finished_at IS NULL AND m.waits_for IS NOT 'group' AND m.status <> 'processing'
        AND EXISTS (SELECT 1 FROM main.relet_messages o WHERE o.queue = m.queue AND o.group_key = m.group_key
                                                      AND o.finished_at IS NULL AND o.id < m.id)",
    // Large payloads lie beside their messages.
    "SELECT 'message ' || m.id || ' has lost its payload' FROM main.relet_messages m
      WHERE m.payload IS NULL AND m.id NOT IN (SELECT message FROM main.relet_payloads)",
    "SELECT 'a payload is left of message ' || message FROM main.relet_payloads
      WHERE message NOT IN (SELECT id FROM main.relet_messages)",
];

fn file(conn: &Connection) -> Result<Vec<String>> {
    let mut statement = conn.prepare("PRAGMA main.integrity_check(20)")?;
    let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
    Ok(rows.collect::<rusqlite::Result<Vec<_>>>()?.into_iter().filter(|line| line != "ok").collect())
}

/// Every payload against its checksum.
fn payloads(conn: &Connection) -> Result<Vec<String>> {
    const IDS: &str = "SELECT id FROM main.relet_messages ORDER BY id";
    let mut found = Vec::new();
    let mut ids = conn.prepare(IDS)?;
    let mut rows = ids.query([])?;
    while let Some(row) = rows.next()? {
        if let Some((record, payload)) = Record::load_whole(conn, row.get(0)?)?
            && (payload.len() as i64 != record.payload_bytes || crc32fast::hash(&payload) != record.payload_crc)
        {
            found.push(format!("message {}: its payload does not match its checksum", record.id));
        }
    }
    Ok(found)
}

/// Instants that only a clock which was far ahead can have written: a day and more from now.
fn future(conn: &Connection, now: Now) -> Result<Vec<String>> {
    const SQL: &str =
        "SELECT 'message ' || id || ' was written by a clock that was ahead: its instants lie in the future; this passes when the clock gets there'
                         FROM main.relet_messages
                        WHERE max(enqueued_at, ifnull(claimed_at, 0), ifnull(finished_at, 0)) > ?1";
    let mut statement = conn.prepare(SQL)?;
    let rows = statement.query_map([now.wall + 86_400_000], |row| row.get(0))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
