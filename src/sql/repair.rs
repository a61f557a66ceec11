//! Repair: what the doctor finds is put right, as far as the rows say how. No message is removed.

use rusqlite::types::Value;
use rusqlite::{Connection, params_from_iter};

use crate::clock::Now;
use crate::db::SCHEMA_VERSION;
use crate::error::{Error, Result};
use crate::random;
use crate::sql::{counters, doctor, ids, mend, meta};

/// Makes the tables and indexes that are missing, and what the others hold anew. What the rows do not allow yet is left: it is
/// tried again once they are repaired, and the doctor has the last word.
pub(crate) fn schema(conn: &Connection, done: &mut Vec<String>) -> Result<()> {
    const EXPECTED: &str =
        "SELECT name, sql FROM main.sqlite_schema WHERE sql IS NOT NULL ORDER BY type = 'index', rowid";
    const FOUND: &str = "SELECT EXISTS (SELECT 1 FROM main.sqlite_schema WHERE name = ?1)";
    let expected = doctor::expected_schema()?;
    let mut statement = expected.prepare(EXPECTED)?;
    let rows = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?;
    for row in rows {
        let (name, sql) = row?;
        if !conn.query_row(FOUND, [&name], |row| row.get::<_, bool>(0))? {
            if conn.execute_batch(&sql).is_ok() {
                done.push(format!("{name} was missing and was made again"));
            }
        } else if sql.starts_with("CREATE TABLE") {
            let _ = conn.execute_batch(&format!("REINDEX main.{name}"));
        }
    }
    Ok(())
}

/// Sets what is true of the whole store and is missing, or cannot be. Before anything else, since a store without it cannot
/// be opened.
pub(crate) fn whole_store(conn: &Connection, done: &mut Vec<String>) -> Result<()> {
    const EPOCH: &str = "SELECT ifnull(max(epoch), 0) FROM main.relet_messages";
    const START: &str = "SELECT max(ifnull((SELECT max(incarnation) FROM main.relet_messages), 0),
                                    ifnull((SELECT max(incarnation) FROM main.relet_workers), 0))";
    const FORGET: &str = "DELETE FROM main.relet_meta WHERE key = ?1";
    let largest = |sql: &str| Ok::<i64, Error>(conn.query_row(sql, [], |row| row.get(0))?);
    let (epoch, start) = (largest(EPOCH)?, largest(START)?);
    let known = |key: &str| match meta::get::<Value>(conn, key) {
        Ok(Some(Value::Integer(number))) => Some(number),
        _ => None,
    };
    let mut set = |key: &str, value: Value| {
        meta::set(conn, key, value)?;
        done.push(format!("{key:?} of relet_meta was missing or could not be, and was set"));
        Ok::<(), Error>(())
    };
    if known("schema_version").is_none() {
        set("schema_version", Value::Integer(SCHEMA_VERSION))?;
    }
    if known("epoch").is_none_or(|known| known < epoch) {
        // Some distance ahead: a receipt of the epoch that was lost must not be mistaken for one of the new one.
        let ahead = i64::from(random::bits() as u32) + 2;
        set("epoch", Value::Integer(epoch.max(0).saturating_add(ahead)))?;
    }
    if known("incarnation").unwrap_or(0) < start {
        set("incarnation", Value::Integer(start))?;
    }
    if !matches!(meta::get::<Value>(conn, "store_id"), Ok(Some(Value::Text(id))) if !id.is_empty()) {
        set("store_id", Value::Text(random::name()))?;
    }
    if known("touched").is_none_or(|known| known < 0) {
        set("touched", Value::Integer(0))?;
    }
    if known("boot_mark").is_none_or(|known| known < 0) {
        set("boot_mark", Value::Integer(counters::last_id(conn)?))?;
    }
    if !matches!(meta::get::<Value>(conn, "boot_id"), Ok(Some(Value::Text(_) | Value::Null))) {
        // The next one that opens the store begins a new epoch.
        set("boot_id", Value::Null)?;
    }
    for (key, needed, fits) in doctor::META {
        if !needed && meta::get::<Value>(conn, key)?.is_some_and(|value| !fits(&value)) {
            conn.execute(FORGET, [key])?;
        }
    }
    Ok(())
}

/// Puts the rows right. `?1` is now, `?2` the instant of the leases' clock.
pub(crate) fn rows(conn: &Connection, now: Now, step: usize, done: &mut Vec<String>) -> Result<bool> {
    let Some(sql) = STEPS.get(step) else { return Ok(false) };
    let mut statement = conn.prepare(sql)?;
    let values = [now.time, now.awake];
    let wanted = statement.parameter_count();
    let changed = statement.execute(params_from_iter(&values[..wanted]))?;
    if changed > 0 {
        let what = sql.lines().next().unwrap_or_default().trim_start_matches("-- ");
        done.push(format!("{what}: {changed}"));
    }
    Ok(true)
}

/// Counts every queue anew.
pub(crate) fn count(conn: &Connection) -> Result<()> {
    const QUEUES: &str = "SELECT id FROM main.relet_queues";
    for queue in ids(conn, QUEUES, [])? {
        mend::recount(conn, queue, 0)?;
    }
    counters::set_last_id(conn, counters::last_id(conn)?)
}

/// Each says in its first line what it has done to so many rows. A later one may rely on those before it.
const STEPS: &[&str] = &[
    "-- queues that were lost were made again
     INSERT INTO main.relet_queues (id, name) SELECT DISTINCT queue, 'recovered-' || queue FROM main.relet_messages
      WHERE queue NOT IN (SELECT id FROM main.relet_queues)",
    "-- settings of queues that could not be were taken away
     UPDATE main.relet_queues
        SET gated = 1, ageing_ms = iif(ageing_ms > 0, ageing_ms, NULL), lease_ms = iif(lease_ms > 0, lease_ms, NULL),
            max_attempts = iif(max_attempts BETWEEN 1 AND 4294967295, max_attempts, NULL),
            retry = iif(json_valid(retry), retry, NULL), paused_until = NULL
      WHERE gated NOT IN (0, 1) OR ageing_ms <= 0 OR lease_ms <= 0 OR max_attempts NOT BETWEEN 1 AND 4294967295
         OR paused_until NOT BETWEEN 0 AND 253402300799999
         OR (retry IS NOT NULL AND NOT json_valid(retry))",
    "-- limits of gates that could not be were taken away
     UPDATE main.relet_gates
        SET slots = NULL, window = NULL, rate = NULL, period_ms = NULL, burst = NULL, full_at = NULL, closed_until = NULL,
            closed_at = NULL
      WHERE slots <= 0 OR window <= 0 OR rate <= 0 OR period_ms <= 0 OR burst <= 0
         OR slots > 4294967295 OR window > 4294967295 OR rate > 4294967295 OR burst > 4294967295
         OR (rate IS NULL) <> (period_ms IS NULL)
         OR (rate IS NULL) <> (burst IS NULL) OR (rate IS NULL) <> (full_at IS NULL)
         OR closed_until NOT BETWEEN 0 AND 253402300799999",
    "-- details without a message were removed
     DELETE FROM main.relet_details WHERE message NOT IN (SELECT id FROM main.relet_messages)",
    "-- payloads without a message, or beside one that has its own, were removed
     DELETE FROM main.relet_payloads WHERE message NOT IN (SELECT id FROM main.relet_messages WHERE payload IS NULL)",
    "-- messages know again what lies beside them
     UPDATE main.relet_messages AS m
        SET extras = EXISTS (SELECT 1 FROM main.relet_details d WHERE d.message = m.id) + iif(payload IS NULL, 2, 0)
      WHERE extras <> EXISTS (SELECT 1 FROM main.relet_details d WHERE d.message = m.id) + iif(payload IS NULL, 2, 0)",
    "-- gates that were lost were made again
     INSERT INTO main.relet_gates (id, name)
     SELECT gate, 'recovered-' || gate FROM (SELECT gate FROM main.relet_details UNION SELECT gate FROM main.relet_queues)
      WHERE gate IS NOT NULL AND gate NOT IN (SELECT id FROM main.relet_gates)",
    "-- queues know again that they have messages with a gate
     UPDATE main.relet_queues SET gated = 1 WHERE gated = 0 AND id IN
       (SELECT m.queue FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message WHERE d.gate IS NOT NULL)",
    "-- backoffs that could not be read were taken away
     UPDATE main.relet_details SET retry = NULL WHERE retry IS NOT NULL AND NOT json_valid(retry)",
    "-- ticks and times to live that could not be were taken away
     UPDATE main.relet_details
        SET tick_at = iif(tick_at BETWEEN 0 AND 253402300799999, tick_at, NULL),
            expires_at = iif(expires_at BETWEEN 0 AND 253402300799999, expires_at, NULL)
      WHERE tick_at NOT BETWEEN 0 AND 253402300799999 OR expires_at NOT BETWEEN 0 AND 253402300799999",
    "-- instants of messages that could not be were set to now
     UPDATE main.relet_messages
        SET enqueued_at = iif(enqueued_at BETWEEN 0 AND 253402300799999, enqueued_at, ?1),
            claimed_at = iif(claimed_at NOT BETWEEN 0 AND 253402300799999, ?1, claimed_at),
            due_at = iif(due_at NOT BETWEEN 0 AND 253402300799999, ?1, due_at)
      WHERE enqueued_at NOT BETWEEN 0 AND 253402300799999 OR claimed_at NOT BETWEEN 0 AND 253402300799999
         OR due_at NOT BETWEEN 0 AND 253402300799999",
    "-- messages were made to have the status of their route, since their status was another's
     UPDATE main.relet_messages SET status = route
      WHERE status <> route AND status NOT IN ('processing', 'done', 'dead', 'cancelled')",
    "-- tokens, epochs and starts that could not be were set
     UPDATE main.relet_messages
        SET token = max(token, 0), epoch = max(epoch, 0), incarnation = iif(worker_id IS NULL, NULL, max(ifnull(incarnation, 0), 0))
      WHERE token < 0 OR epoch < 0 OR incarnation < 0 OR (worker_id IS NULL) <> (incarnation IS NULL)",
    "-- workers whose start could not be were forgotten
     DELETE FROM main.relet_workers WHERE incarnation < 1",
    "-- claims that had no worker, or stood where nothing is held, were ended
     UPDATE main.relet_messages
        SET status = route, worker_id = NULL, incarnation = NULL, line = NULL, place = NULL, lease_ms = NULL, due_at = NULL,
            token = token + 1
      WHERE status = 'processing' AND (worker_id IS NULL OR line <> -1)",
    "-- leases that could not be have run out
     UPDATE main.relet_messages SET place = 0, lease_ms = max(ifnull(lease_ms, 1), 1)
      WHERE line = -1 AND status = 'processing'
        AND (place IS NULL OR lease_ms IS NULL OR lease_ms < 1 OR place - lease_ms > ?2)",
    "-- messages that nobody holds were cleared of their worker
     UPDATE main.relet_messages
        SET worker_id = NULL, incarnation = NULL, lease_ms = NULL, line = iif(line = -1, NULL, line), place = iif(line = -1, NULL, place)
      WHERE status <> 'processing' AND (worker_id IS NOT NULL OR incarnation IS NOT NULL OR lease_ms IS NOT NULL OR line < 0)",
    "-- what is deferred has no lease
     UPDATE main.relet_messages SET lease_ms = NULL WHERE line IS NOT -1 AND lease_ms IS NOT NULL",
    "-- what is finished stands in no line, and waits for nothing
     UPDATE main.relet_messages SET line = NULL, place = NULL, due_at = NULL
      WHERE status IN ('done', 'dead', 'cancelled') AND (line IS NOT NULL OR place IS NOT NULL OR due_at IS NOT NULL)",
    "-- keys of what is not live were freed
     DELETE FROM main.relet_keys AS k WHERE NOT EXISTS
       (SELECT 1 FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id
         WHERE m.id = k.message AND m.queue = k.queue AND d.key = k.key AND m.status IN (m.route, 'processing'))",
    "-- keys of live messages were taken again
     INSERT OR IGNORE INTO main.relet_keys (queue, key, message)
     SELECT m.queue, d.key, m.id FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message
      WHERE d.key IS NOT NULL AND m.status IN (m.route, 'processing')
        AND NOT EXISTS (SELECT 1 FROM main.relet_keys k WHERE k.queue = m.queue AND k.key = d.key)",
    "-- messages lost their key, which another live one has
     UPDATE main.relet_details AS d SET key = NULL WHERE key IS NOT NULL AND EXISTS
       (SELECT 1 FROM main.relet_messages m JOIN main.relet_keys k ON k.queue = m.queue AND k.key = d.key
         WHERE m.id = d.message AND m.status IN (m.route, 'processing') AND k.message <> m.id)",
    "-- places in groups of what is not live were removed
     DELETE FROM main.relet_groups AS g WHERE NOT EXISTS
       (SELECT 1 FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id
         WHERE m.id = g.message AND m.queue = g.queue AND d.group_key = g.group_key AND m.status IN (m.route, 'processing'))",
    "-- live messages have their place in their group again
     INSERT OR IGNORE INTO main.relet_groups (queue, group_key, message, turn)
     SELECT m.queue, d.group_key, m.id, 0 FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message
      WHERE d.group_key IS NOT NULL AND m.status IN (m.route, 'processing')
        AND NOT EXISTS (SELECT 1 FROM main.relet_groups g
                         WHERE g.queue = m.queue AND g.group_key = d.group_key AND g.message = m.id)",
    "-- turns in groups were taken from those whose they were not
     UPDATE main.relet_groups AS g SET turn = 0
      WHERE turn <> 0 AND message <>
        (SELECT o.message FROM main.relet_groups o JOIN main.relet_messages m ON m.id = o.message
          WHERE o.queue = g.queue AND o.group_key = g.group_key ORDER BY m.status <> 'processing', o.message LIMIT 1)",
    "-- turns in groups were given to those whose they are
     UPDATE main.relet_groups AS g SET turn = 1
      WHERE turn <> 1 AND message =
        (SELECT o.message FROM main.relet_groups o JOIN main.relet_messages m ON m.id = o.message
          WHERE o.queue = g.queue AND o.group_key = g.group_key ORDER BY m.status <> 'processing', o.message LIMIT 1)",
    "-- claims of members of a group whose turn it was not were ended
     UPDATE main.relet_messages
        SET status = route, worker_id = NULL, incarnation = NULL, line = NULL, place = NULL, lease_ms = NULL, due_at = NULL,
            token = token + 1
      WHERE status = 'processing' AND id IN (SELECT message FROM main.relet_groups WHERE turn = 0)",
    "-- rows of the retry queue whose message does not wait were removed
     DELETE FROM main.relet_retry_queue AS r WHERE NOT EXISTS
       (SELECT 1 FROM main.relet_messages m
         WHERE m.id = r.message AND m.queue = r.queue AND m.status IN (m.route, 'processing') AND m.line IS NOT -1)",
    "-- rows of the retry queue were made to say what their messages say
     UPDATE main.relet_retry_queue AS r
        SET worker_id = m.worker_id, behind = EXISTS (SELECT 1 FROM main.relet_groups g WHERE g.message = m.id AND g.turn = 0
                                                        AND g.queue = m.queue AND g.group_key =
                                                          (SELECT group_key FROM main.relet_details d WHERE d.message = m.id)),
            due_at = CASE WHEN r.due_at BETWEEN 0 AND 253402300799999 THEN r.due_at ELSE ifnull(m.due_at, ?1) END,
            kept_until = iif(m.worker_id IS NULL, NULL, ifnull(r.kept_until, ?1)), count = min(max(count, 0), 4294967295)
       FROM main.relet_messages m
      WHERE m.id = r.message
        AND (r.worker_id IS NOT m.worker_id OR (r.worker_id IS NULL) <> (r.kept_until IS NULL)
             OR r.due_at NOT BETWEEN 0 AND 253402300799999 OR r.count NOT BETWEEN 0 AND 4294967295
             OR r.behind <> EXISTS (SELECT 1 FROM main.relet_groups g WHERE g.message = m.id AND g.turn = 0 AND g.queue = m.queue
                                       AND g.group_key = (SELECT group_key FROM main.relet_details d WHERE d.message = m.id)))",
    "-- messages that wait, or are deferred, are in the retry queue again
     INSERT INTO main.relet_retry_queue (queue, message, worker_id, due_at, kept_until, behind, reason, count)
     SELECT m.queue, m.id, m.worker_id, ifnull(m.due_at, ?1), iif(m.worker_id IS NULL, NULL, ifnull(m.due_at, ?1)),
            EXISTS (SELECT 1 FROM main.relet_details d JOIN main.relet_groups g ON g.queue = m.queue AND g.group_key = d.group_key
                       AND g.message = m.id AND g.turn = 0 WHERE d.message = m.id),
            iif(m.worker_id IS NULL, NULL, 'deferred'), 0
       FROM main.relet_messages m
      WHERE m.line IS NULL AND (m.status = 'processing' OR (m.status = m.route AND m.due_at > ?1))
        AND NOT EXISTS (SELECT 1 FROM main.relet_retry_queue r WHERE r.queue = m.queue AND r.message = m.id)",
    "-- messages wait until the instant that the retry queue has
     UPDATE main.relet_messages AS m SET due_at = r.due_at, line = NULL, place = NULL FROM main.relet_retry_queue r
      WHERE r.message = m.id AND r.queue = m.queue AND (m.due_at IS NOT r.due_at OR m.line IS NOT NULL)",
    "-- members of groups whose turn it is not left their lines
     UPDATE main.relet_messages SET line = NULL, place = NULL
      WHERE line >= 0 AND id IN (SELECT message FROM main.relet_groups WHERE turn = 0)",
    "-- messages that can be claimed stand in their lines again
     UPDATE main.relet_messages AS m
        SET line = 4 * ifnull((SELECT gate FROM main.relet_details d WHERE d.message = m.id), 0)
                   + CASE route WHEN 'pending' THEN 0 WHEN 'routing' THEN 1 WHEN 'queued' THEN 2 ELSE 3 END,
            place = -priority, due_at = iif(due_at > ?1, NULL, due_at)
      WHERE status = route AND id NOT IN (SELECT message FROM main.relet_groups WHERE turn = 0)
        AND NOT EXISTS (SELECT 1 FROM main.relet_retry_queue r WHERE r.queue = m.queue AND r.message = m.id)
        AND (place IS NOT -priority OR line IS NOT 4 * ifnull((SELECT gate FROM main.relet_details d WHERE d.message = m.id), 0)
                   + CASE route WHEN 'pending' THEN 0 WHEN 'routing' THEN 1 WHEN 'queued' THEN 2 ELSE 3 END)",
    "-- what stands in no line has no place in one
     UPDATE main.relet_messages SET place = NULL WHERE line IS NULL AND place IS NOT NULL",
    "-- places at gates of what is not held were removed
     DELETE FROM main.relet_passed AS p WHERE NOT EXISTS
       (SELECT 1 FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id
         WHERE m.id = p.message AND d.gate = p.gate AND m.line = -1)",
    "-- what is held has its place at its gate again
     INSERT OR IGNORE INTO main.relet_passed (gate, message)
     SELECT d.gate, m.id FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message
      WHERE d.gate IS NOT NULL AND m.line = -1
        AND NOT EXISTS (SELECT 1 FROM main.relet_passed p WHERE p.gate = d.gate AND p.message = m.id)",
    "-- times to live of what does not wait were removed
     DELETE FROM main.relet_expiry AS e WHERE NOT EXISTS
       (SELECT 1 FROM main.relet_messages m JOIN main.relet_details d ON d.message = m.id
         WHERE m.id = e.message AND d.expires_at = e.expires_at AND m.status = m.route)",
    "-- times to live run again
     INSERT OR IGNORE INTO main.relet_expiry (expires_at, message)
     SELECT d.expires_at, m.id FROM main.relet_details d JOIN main.relet_messages m ON m.id = d.message
      WHERE d.expires_at IS NOT NULL AND m.status = m.route
        AND NOT EXISTS (SELECT 1 FROM main.relet_expiry e WHERE e.expires_at = d.expires_at AND e.message = m.id)",
    "-- ends of what is not finished were removed
     DELETE FROM main.relet_finished AS f WHERE NOT EXISTS
       (SELECT 1 FROM main.relet_messages m WHERE m.id = f.message AND m.status = f.status)",
    "-- instants of ends that could not be were set to now
     UPDATE main.relet_finished
        SET finished_at = iif(finished_at BETWEEN 0 AND 253402300799999, finished_at, ?1),
            keep_until = iif(status = 'dead', NULL, ?1 + 86400000)
      WHERE finished_at NOT BETWEEN 0 AND 253402300799999 OR keep_until NOT BETWEEN 0 AND 253402300799999
         OR (status IN ('done', 'cancelled')) <> (keep_until IS NOT NULL)",
    "-- what is finished ended now, since it is not known when
     INSERT OR IGNORE INTO main.relet_finished (message, status, finished_at, keep_until)
     SELECT id, status, ?1, iif(status = 'dead', NULL, ?1 + 86400000) FROM main.relet_messages
      WHERE status IN ('done', 'dead', 'cancelled') AND id NOT IN (SELECT message FROM main.relet_finished)",
    "-- counters without a queue were removed
     DELETE FROM main.relet_counters WHERE queue <> 0 AND queue NOT IN (SELECT id FROM main.relet_queues)",
];
