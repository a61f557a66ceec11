//! Mend: what damage has done to the rows is put right, as far as they say themselves how.
//!
//! [`set_aside`] runs in the transaction of an operation that met a damaged row, and gets it out of the others' way.

use rusqlite::{Connection, params};

use crate::error::Result;
use crate::sql::{Tx, groups};

/// Rows that one sweep sets aside.
const SWEEP_MAX: i64 = 1000;

/// Makes dead letters of messages that cannot be read, and takes out of their lines what does not belong there. Their payloads
/// are kept. Reads every message once. Returns how many rows it has changed.
pub(crate) fn set_aside(tx: &mut Tx<'_>) -> Result<usize> {
    // Each finds the messages one of whose values its type in `Record` cannot take.
    const FIND: &str = "SELECT m.id, m.queue, d.group_key,
               CASE WHEN m.status NOT IN ('pending', 'routing', 'queued', 'pending_local', 'processing', 'done', 'dead', 'cancelled')
                    THEN 'its status is ' || quote(m.status)
                    WHEN m.route NOT IN ('pending', 'routing', 'queued', 'pending_local') THEN 'its route is ' || quote(m.route)
                    WHEN m.attempts NOT BETWEEN 0 AND 4294967295 THEN 'its attempts are ' || m.attempts
                    WHEN m.crashes NOT BETWEEN 0 AND 4294967295 THEN 'its crashes are ' || m.crashes
                    WHEN m.max_attempts NOT BETWEEN 0 AND 4294967295 THEN 'the limit of its attempts is ' || m.max_attempts
                    WHEN m.priority NOT BETWEEN -2147483648 AND 2147483647 THEN 'its priority is ' || m.priority
                    WHEN m.payload_crc NOT BETWEEN 0 AND 4294967295 THEN 'its checksum is ' || m.payload_crc
                    WHEN m.status = 'processing' AND m.worker_id IS NULL THEN 'it is in processing, and has no worker'
                    ELSE 'its deferrals, releases or redrives are below zero or too many' END
          FROM main.relet_messages m LEFT JOIN main.relet_details d ON d.message = m.id
         WHERE m.status NOT IN ('pending', 'routing', 'queued', 'pending_local', 'processing', 'done', 'dead', 'cancelled')
            OR m.route NOT IN ('pending', 'routing', 'queued', 'pending_local')
            OR m.attempts NOT BETWEEN 0 AND 4294967295 OR m.crashes NOT BETWEEN 0 AND 4294967295
            OR m.max_attempts NOT BETWEEN 0 AND 4294967295 OR m.priority NOT BETWEEN -2147483648 AND 2147483647
            OR m.payload_crc NOT BETWEEN 0 AND 4294967295 OR (m.status = 'processing' AND m.worker_id IS NULL)
            OR d.max_deferrals NOT BETWEEN 0 AND 4294967295 OR d.deferrals NOT BETWEEN 0 AND 4294967295
            OR d.releases NOT BETWEEN 0 AND 4294967295 OR d.redrives NOT BETWEEN 0 AND 4294967295
         LIMIT ?1";
    const QUEUES: &str =
        "UPDATE main.relet_queues SET max_attempts = NULL WHERE max_attempts NOT BETWEEN 0 AND 4294967295";
    // What is finished, or waits, or is held, and stands in the line of another state.
    const LINES: &str = "UPDATE main.relet_messages AS m
           SET line = CASE WHEN status = route THEN 4 * ifnull((SELECT gate FROM main.relet_details d WHERE d.message = m.id), 0)
                        + CASE route WHEN 'pending' THEN 0 WHEN 'routing' THEN 1 WHEN 'queued' THEN 2 ELSE 3 END
                      WHEN status = 'processing' THEN -1 END,
               place = CASE WHEN status = route THEN -priority WHEN status = 'processing' THEN 0 END,
               lease_ms = iif(status = 'processing', ifnull(lease_ms, 1), NULL),
               worker_id = iif(status = 'processing', worker_id, NULL),
               incarnation = iif(status = 'processing', ifnull(incarnation, 0), NULL)
         WHERE (line >= 0 AND (status <> route OR worker_id IS NOT NULL)) OR (line < 0 AND (line < -1 OR status <> 'processing'))";
    let found = {
        let mut statement = tx.conn.prepare_cached(FIND)?;
        let read = |row: &rusqlite::Row<'_>| {
            Ok((
                row.get::<_, i64>(0)?,
                row.get::<_, i64>(1)?,
                row.get::<_, Option<String>>(2)?,
                row.get::<_, String>(3)?,
            ))
        };
        statement.query_map([SWEEP_MAX], read)?.collect::<rusqlite::Result<Vec<_>>>()?
    };
    for (id, queue, _, why) in &found {
        bury(tx, *id, *queue, &format!("cannot be read: {why}"))?;
    }
    for (_, queue, group, _) in &found {
        groups::settle_turn(tx, *queue, group.as_deref())?;
    }
    let mut changed = found.len() + tx.conn.prepare_cached(QUEUES)?.execute([])?;
    changed += tx.conn.prepare_cached(LINES)?.execute([])?;
    tx.durable |= changed > 0;
    Ok(changed)
}

/// Makes a dead letter of a message that cannot be read: every value that its type cannot take is brought within it.
fn bury(tx: &mut Tx<'_>, id: i64, queue: i64, reason: &str) -> Result<()> {
    const RETRY: &str = "DELETE FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    const KEY: &str = "DELETE FROM main.relet_keys
                        WHERE queue = ?1 AND key = (SELECT key FROM main.relet_details WHERE message = ?2) AND message = ?2";
    const GROUP: &str = "DELETE FROM main.relet_groups WHERE queue = ?1
                         AND group_key = (SELECT group_key FROM main.relet_details WHERE message = ?2) AND message = ?2";
    const PASSED: &str = "DELETE FROM main.relet_passed
                           WHERE gate = (SELECT gate FROM main.relet_details WHERE message = ?1) AND message = ?1";
    const EXPIRY: &str = "DELETE FROM main.relet_expiry
                           WHERE expires_at = (SELECT expires_at FROM main.relet_details WHERE message = ?1) AND message = ?1";
    const DETAILS: &str =
        "INSERT INTO main.relet_details (message, dead_reason) VALUES (?1, ?2) ON CONFLICT (message) DO UPDATE
        SET dead_reason = excluded.dead_reason,
            max_deferrals = iif(max_deferrals BETWEEN 0 AND 4294967295, max_deferrals, NULL),
            deferrals = min(max(deferrals, 0), 4294967295), releases = min(max(releases, 0), 4294967295),
            redrives = min(max(redrives, 0), 4294967295)";
    const MESSAGE: &str = "UPDATE main.relet_messages
        SET status = iif(status IN ('done', 'cancelled'), status, 'dead'),
            route = iif(route IN ('pending', 'routing', 'queued', 'pending_local'), route, 'pending'),
            line = NULL, place = NULL, worker_id = NULL, incarnation = NULL, lease_ms = NULL, due_at = NULL,
            token = token + 1, epoch = ?2, extras = extras | 1,
            priority = min(max(priority, -2147483648), 2147483647), payload_crc = payload_crc & 4294967295,
            attempts = min(max(attempts, 0), 4294967295), crashes = min(max(crashes, 0), 4294967295),
            max_attempts = min(max(max_attempts, 1), 4294967295)
        WHERE id = ?1";
    const FINISHED: &str =
        "INSERT OR IGNORE INTO main.relet_finished (message, status, finished_at) VALUES (?1, 'dead', ?2)";
    tx.conn.prepare_cached(RETRY)?.execute([queue, id])?;
    tx.conn.prepare_cached(KEY)?.execute([queue, id])?;
    tx.conn.prepare_cached(GROUP)?.execute([queue, id])?;
    tx.conn.prepare_cached(PASSED)?.execute([id])?;
    tx.conn.prepare_cached(EXPIRY)?.execute([id])?;
    tx.conn.prepare_cached(DETAILS)?.execute(params![id, reason])?;
    tx.conn.prepare_cached(MESSAGE)?.execute([id, tx.epoch])?;
    tx.conn.prepare_cached(FINISHED)?.execute([id, tx.now.time])?;
    tx.recount(queue);
    Ok(())
}

/// Counts a queue's rows, and makes its counters what they say, however wrong they were. What was acked before cannot be
/// counted: it is kept where it can be read.
pub(crate) fn recount(conn: &Connection, queue: i64, acked: i64) -> Result<()> {
    const SQL: &str = "INSERT OR REPLACE INTO main.relet_counters
        (queue, last_id, pending, routing, queued, pending_local, deferred, done, dead, cancelled, retrying, acked)
        SELECT ?1, 0,
               count(*) FILTER (WHERE route = 'pending' AND (status = route OR line = -1)),
               count(*) FILTER (WHERE route = 'routing' AND (status = route OR line = -1)),
               count(*) FILTER (WHERE route = 'queued' AND (status = route OR line = -1)),
               count(*) FILTER (WHERE route = 'pending_local' AND (status = route OR line = -1)),
               count(*) FILTER (WHERE status = 'processing' AND line IS NOT -1),
               count(*) FILTER (WHERE status = 'done'),
               count(*) FILTER (WHERE status = 'dead'),
               count(*) FILTER (WHERE status = 'cancelled'),
               (SELECT count(*) FROM main.relet_retry_queue r WHERE r.queue = ?1 AND r.reason IS NOT NULL),
               max(0, ?2 + ifnull((SELECT acked FROM main.relet_counters
                                    WHERE queue = ?1 AND acked BETWEEN 0 AND 1000000000000000000), 0))
          FROM main.relet_messages WHERE queue = ?1";
    conn.prepare_cached(SQL)?.execute([queue, acked])?;
    Ok(())
}
