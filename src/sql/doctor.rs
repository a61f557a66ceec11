//! Doctor: everything the tables promise, looked up the slow way.

use rusqlite::Connection;

use crate::clock::Now;
use crate::error::Result;
use crate::sql::payloads;

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
    push(&mut findings, checksums(conn)?);
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
              count(*) FILTER (WHERE m.route = 'pending' AND c.live) AS pending,
              count(*) FILTER (WHERE m.route = 'routing' AND c.live) AS routing,
              count(*) FILTER (WHERE m.route = 'queued' AND c.live) AS queued,
              count(*) FILTER (WHERE m.route = 'pending_local' AND c.live) AS pending_local,
              count(*) FILTER (WHERE m.status = 'processing' AND NOT c.live) AS deferred,
              count(*) FILTER (WHERE m.status = 'done') AS done,
              count(*) FILTER (WHERE m.status = 'dead') AS dead,
              count(*) FILTER (WHERE m.status = 'cancelled') AS cancelled,
              (SELECT count(*) FROM main.relet_retry_queue r WHERE r.queue = q.id AND r.reason IS NOT NULL) AS retrying
         FROM main.relet_queues q LEFT JOIN main.relet_messages m ON m.queue = q.id
              LEFT JOIN (SELECT id, status = route OR ifnull(line = -1, 0) AS live FROM main.relet_messages) c ON c.id = m.id
        GROUP BY q.id)
     SELECT 'queue ' || c.name || ': its counters differ from its messages'
       FROM counted c LEFT JOIN main.relet_counters q ON c.id = q.queue
      WHERE (q.pending, q.routing, q.queued, q.pending_local, q.deferred, q.done, q.dead, q.cancelled, q.retrying)
         IS NOT (c.pending, c.routing, c.queued, c.pending_local, c.deferred, c.done, c.dead, c.cancelled, c.retrying)",
    // No id is given out twice.
    "SELECT 'message ' || max(id) || ' has an id that has not been given out yet' FROM main.relet_messages
     HAVING max(id) > ifnull((SELECT last_id FROM main.relet_counters WHERE queue = 0), 0)",
    // Every message is of a queue.
    "SELECT 'message ' || id || ' belongs to no queue' FROM main.relet_messages
      WHERE queue NOT IN (SELECT id FROM main.relet_queues)",
    // What a row says of itself: the life of a message.
    "SELECT 'message ' || id || ' has the route ' || quote(route) || ', which there is not' FROM main.relet_messages
      WHERE route NOT IN ('pending', 'routing', 'queued', 'pending_local')",
    "SELECT 'message ' || id || ' has the status ' || quote(status) || ', which it cannot have' FROM main.relet_messages
      WHERE status NOT IN (route, 'processing', 'done', 'dead', 'cancelled')",
    "SELECT 'message ' || id || ': its worker, its start of that and its lease do not agree' FROM main.relet_messages
      WHERE (worker_id IS NULL) <> (incarnation IS NULL) OR (line IS NOT -1) <> (lease_ms IS NULL)
         OR (line = -1 AND (status <> 'processing' OR place IS NULL))
         OR (status = 'processing' AND line IS NOT -1 AND due_at IS NULL)",
    "SELECT 'message ' || id || ': its attempts or its crashes are below zero' FROM main.relet_messages
      WHERE attempts < 0 OR crashes < 0",
    // What can be claimed stands in its line, and nothing else.
    "SELECT 'message ' || m.id || ' stands in a line, and cannot be claimed' FROM main.relet_messages m
      WHERE m.line >= 0 AND (m.status <> m.route OR m.worker_id IS NOT NULL)",
    "SELECT 'message ' || id || ' has another place in its line than its priority says' FROM main.relet_messages
      WHERE (line >= 0 AND place IS NOT -priority) OR (line IS NULL AND place IS NOT NULL)",
    "SELECT 'message ' || m.id || ' stands in a line that is not its own'
       FROM main.relet_messages m LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.line >= 0 AND m.line <> 4 * ifnull(d.gate, 0)
            + CASE m.route WHEN 'pending' THEN 0 WHEN 'routing' THEN 1 WHEN 'queued' THEN 2 ELSE 3 END",
    "SELECT 'message ' || m.id || ' waits for nothing, and stands in no line' FROM main.relet_messages m
      WHERE m.line IS NULL AND m.status = m.route
        AND NOT EXISTS (SELECT 1 FROM main.relet_retry_queue r WHERE r.queue = m.queue AND r.message = m.id)
        AND NOT EXISTS (SELECT 1 FROM main.relet_details d JOIN main.relet_groups g
                          ON g.queue = m.queue AND g.group_key = d.group_key AND g.message = d.message AND g.turn = 0
                         WHERE d.message = m.id)",
    // What lies beside a message, and what its row says of that.
    "SELECT 'message ' || m.id || ' has lost its details' FROM main.relet_messages m
      WHERE m.extras & 1 AND m.id NOT IN (SELECT message FROM main.relet_details)",
    "SELECT 'details are left of message ' || d.message
       FROM main.relet_details d LEFT JOIN main.relet_messages m ON m.id = d.message WHERE m.id IS NULL OR NOT m.extras & 1",
    "SELECT 'message ' || m.id || ' has lost its payload' FROM main.relet_messages m
      WHERE m.payload IS NULL AND (NOT m.extras & 2 OR m.id NOT IN (SELECT message FROM main.relet_payloads))",
    "SELECT 'a payload is left of message ' || p.message
       FROM main.relet_payloads p LEFT JOIN main.relet_messages m ON m.id = p.message WHERE m.id IS NULL OR NOT m.extras & 2",
    // Every gate that a message or a queue names is there.
    "SELECT 'message ' || message || ' passes a gate that there is not' FROM main.relet_details
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "SELECT 'queue ' || name || ' has a gate that there is not' FROM main.relet_queues
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "SELECT DISTINCT 'queue ' || q.name || ' has messages with a gate, and does not know it'
       FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message JOIN main.relet_queues q ON q.id = m.queue
      WHERE d.gate IS NOT NULL AND q.gated = 0",
    "SELECT 'message ' || m.id || ' holds a place at its gate that it has not, or none where it has'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.gate IS NOT NULL
       LEFT JOIN main.relet_passed p ON p.gate = d.gate AND p.message = m.id
      WHERE (m.line IS NOT -1) <> (p.message IS NULL)",
    "SELECT 'a place at a gate is left of message ' || p.message
       FROM main.relet_passed p LEFT JOIN main.relet_details d ON d.message = p.message WHERE d.gate IS NOT p.gate",
    // The retry queue and the messages agree.
    "SELECT 'message ' || r.message || ' is in the retry queue, but does not wait for a retry'
       FROM main.relet_retry_queue r LEFT JOIN main.relet_messages m ON m.id = r.message
      WHERE m.id IS NULL OR m.queue <> r.queue OR m.due_at IS NOT r.due_at OR m.worker_id IS NOT r.worker_id
         OR m.line IS NOT NULL",
    "SELECT 'message ' || m.id || ' is deferred, but not in the retry queue' FROM main.relet_messages m
      WHERE m.status = 'processing' AND m.line IS NOT -1
        AND m.id NOT IN (SELECT message FROM main.relet_retry_queue)",
    "SELECT 'message ' || r.message || ' waits behind its group, or not, and the group says otherwise'
       FROM main.relet_retry_queue r LEFT JOIN main.relet_details d ON d.message = r.message
       LEFT JOIN main.relet_groups g ON g.queue = r.queue AND g.group_key = d.group_key AND g.message = r.message
      WHERE r.behind <> (ifnull(g.turn, 1) = 0)",
    // Keys, groups and times to live are known of live messages, and of no others.
    "SELECT 'message ' || m.id || ' has a key that is not kept for it'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.key IS NOT NULL
       LEFT JOIN main.relet_keys k ON k.queue = m.queue AND k.key = d.key
      WHERE m.status IN (m.route, 'processing') AND k.message IS NOT m.id",
    "SELECT 'a key is left of message ' || k.message
       FROM main.relet_keys k LEFT JOIN main.relet_messages m ON m.id = k.message LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.queue IS NOT k.queue OR d.key IS NOT k.key OR m.status NOT IN (m.route, 'processing')",
    "SELECT 'message ' || m.id || ' is in no group, and belongs to one'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.group_key IS NOT NULL
       LEFT JOIN main.relet_groups g ON g.queue = m.queue AND g.group_key = d.group_key AND g.message = m.id
      WHERE m.status IN (m.route, 'processing') AND g.message IS NULL",
    "SELECT 'a place in a group is left of message ' || g.message
       FROM main.relet_groups g LEFT JOIN main.relet_messages m ON m.id = g.message LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE m.queue IS NOT g.queue OR d.group_key IS NOT g.group_key OR m.status NOT IN (m.route, 'processing')",
    "SELECT 'message ' || m.id || ' has a time to live that does not run'
       FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id AND d.expires_at IS NOT NULL
       LEFT JOIN main.relet_expiry e ON e.expires_at = d.expires_at AND e.message = m.id
      WHERE m.status = m.route AND e.message IS NULL",
    "SELECT 'a time to live is left of message ' || e.message
       FROM main.relet_expiry e LEFT JOIN main.relet_messages m ON m.id = e.message LEFT JOIN main.relet_details d ON d.message = m.id
      WHERE d.expires_at IS NOT e.expires_at OR m.status IS NOT m.route",
    // A group has one turn, and it is the right member's.
    "SELECT 'group ' || group_key || ': nobody has its turn' FROM main.relet_groups
      GROUP BY queue, group_key HAVING sum(turn) <> 1",
    "SELECT 'group ' || g.group_key || ': message ' || g.message || ' has the turn before a smaller one'
       FROM main.relet_groups g JOIN main.relet_messages m ON m.id = g.message
      WHERE g.turn = 1 AND m.status <> 'processing'
        AND EXISTS (SELECT 1 FROM main.relet_groups o WHERE o.queue = g.queue AND o.group_key = g.group_key AND o.message < g.message)",
    "SELECT 'message ' || g.message || ' stands in a line before its turn'
       FROM main.relet_groups g JOIN main.relet_messages m ON m.id = g.message WHERE g.turn = 0 AND m.line IS NOT NULL",
    // What is finished is known as such, and nothing else.
    "SELECT 'message ' || m.id || ' is finished, and it is not known when' FROM main.relet_messages m
       LEFT JOIN main.relet_finished f ON f.message = m.id
      WHERE m.status IN ('done', 'dead', 'cancelled') AND f.status IS NOT m.status",
    "SELECT 'an end is left of message ' || f.message FROM main.relet_finished f
       LEFT JOIN main.relet_messages m ON m.id = f.message WHERE m.status IS NOT f.status",
    "SELECT 'message ' || message || ' is kept for ever, or not for as long as a dead letter is' FROM main.relet_finished
      WHERE (status IN ('done', 'cancelled')) <> (keep_until IS NOT NULL)",
];

fn file(conn: &Connection) -> Result<Vec<String>> {
    let mut statement = conn.prepare("PRAGMA main.integrity_check(20)")?;
    let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
    Ok(rows.collect::<rusqlite::Result<Vec<_>>>()?.into_iter().filter(|line| line != "ok").collect())
}

/// Every payload against its checksum.
fn checksums(conn: &Connection) -> Result<Vec<String>> {
    const SQL: &str = "SELECT id, payload_crc, payload FROM main.relet_messages ORDER BY id";
    let mut found = Vec::new();
    let mut statement = conn.prepare(SQL)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (id, expected): (i64, u32) = (row.get(0)?, row.get(1)?);
        let crc = match row.get_ref(2)?.as_blob_or_null().map_err(rusqlite::Error::from)? {
            Some(payload) => crc32fast::hash(payload),
            None => crc32fast::hash(&payloads::read(conn, id)?),
        };
        if crc != expected {
            found.push(format!("message {id}: its payload does not match its checksum"));
        }
    }
    Ok(found)
}

/// Instants that only a clock which was far ahead can have written: a day and more from now.
fn future(conn: &Connection, now: Now) -> Result<Vec<String>> {
    const SQL: &str =
        "SELECT 'message ' || id || ' was written by a clock that was ahead: its instants lie in the future; this passes when the clock gets there'
                         FROM main.relet_messages m LEFT JOIN main.relet_finished f ON f.message = m.id
                        WHERE max(m.enqueued_at, ifnull(m.claimed_at, 0), ifnull(f.finished_at, 0)) > ?1";
    let mut statement = conn.prepare(SQL)?;
    let rows = statement.query_map([now.time + 86_400_000], |row| row.get(0))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
