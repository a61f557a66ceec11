//! Looks: reads that change nothing, each in one read transaction.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::clock::{Now, millis, span};
use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::sql::claim::{self, How, Obstacle, Routes, Who};
use crate::sql::gates::Passage;
use crate::sql::lines::{self, Line};
use crate::sql::record::Large;
use crate::sql::{PAYLOAD_COLUMN, Record, counters, finished, gates, queues, record, retry_queue, select_record};
use crate::state::{Route, Status};
use crate::view::{Filter, QueueStats, Retrying, Snapshot, Stuck, Why};

/// Up to so many finished messages of a status are few.
const FINISHED_FEW: i64 = 20_000;

/// Dead letters that are counted at most, so that a look costs no more where a million have died.
const DEATHS_MAX: u64 = 10_000;

pub(crate) fn list(conn: &Connection, filter: &Filter, now: Now) -> Result<Vec<Snapshot>> {
    const PAGE: &str = select_record!(
        "WHERE m.id > ?1 AND (?2 IS NULL OR m.queue = ?2) AND (?3 IS NULL OR m.status = ?3) ORDER BY m.id LIMIT ?4"
    );
    // Finished messages are found by their own index, since they may lie among many others. It is not in the order of their ids, so
    // that each page looks at all of them: where there are many, to go through the messages themselves is less.
    const FINISHED: &str = select_record!(
        "WHERE m.id IN (SELECT message FROM main.relet_finished INDEXED BY relet_ends WHERE status = ?3 AND message > ?1)
            AND (?2 IS NULL OR m.queue = ?2) ORDER BY m.id LIMIT ?4"
    );
    let queue = match &filter.queue {
        Some(name) => match queues::find(conn, name)? {
            Some(queue) => Some(queue.id),
            None => return Ok(Vec::new()),
        },
        None => None,
    };
    let sql = match filter.status {
        Some(status) if !status.is_live() && finished::are_few(conn, status, FINISHED_FEW)? => FINISHED,
        _ => PAGE,
    };
    let mut statement = conn.prepare_cached(sql)?;
    let read = |row: &Row<'_>| {
        let payload = if filter.payload { row.get::<_, Option<Vec<u8>>>(PAYLOAD_COLUMN)? } else { None };
        Ok((Record::read(row)?, payload))
    };
    let rows = statement.query_map(params![filter.after, queue, filter.status, filter.limit as i64], read)?;
    let rows = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    rows.into_iter()
        .map(|(record, payload)| match (filter.payload, payload) {
            (true, None) => {
                whole(conn, record.id, now).map(|found| found.expect("the row was read in this transaction"))
            }
            (_, payload) => snapshot(conn, record.complete(conn)?, payload, now),
        })
        .collect()
}

/// One message with its payload.
pub(crate) fn show(conn: &Connection, id: i64, now: Now) -> Result<Option<Snapshot>> {
    whole(conn, id, now)
}

fn whole(conn: &Connection, id: i64, now: Now) -> Result<Option<Snapshot>> {
    match Record::load_whole(conn, id)? {
        Some((record, payload)) => snapshot(conn, record, Some(payload), now).map(Some),
        None => Ok(None),
    }
}

pub(crate) fn snapshot(conn: &Connection, record: Record, payload: Option<Vec<u8>>, now: Now) -> Result<Snapshot> {
    let payload_bytes = match &payload {
        Some(payload) => payload.len(),
        None => usize::try_from(record::payload_bytes(conn, record.id)?).unwrap_or(0),
    };
    let wait = retry_queue::of(conn, &record)?;
    let due_at = record.due_at.map(|at| if wait.on_wall { at } else { now.shown(at) });
    Ok(Snapshot {
        id: record.id(),
        queue: queues::name_of(conn, record.queue)?,
        receipt: record.is_held().then(|| record.receipt()),
        lease_left: record.lease_until.map(|until| span(now.awake, until)),
        claimed_at: (record.claimed_at > 0).then(|| now.shown(record.claimed_at)),
        status: record.status,
        route: record.route,
        priority: record.priority,
        due_at,
        due_on_wall: wait.on_wall,
        wait_reason: wait.reason,
        wait_count: wait.count,
        expires_at: record.expires_at.map(|at| now.shown(at)),
        key: record.key,
        gate: record.gate.map(|gate| gates::name_of(conn, gate)).transpose()?,
        tick_at: record.tick_at,
        group: record.group,
        worker: record.worker,
        attempts: record.attempts,
        crashes: record.crashes,
        deferrals: record.deferrals,
        releases: record.releases,
        redrives: record.redrives,
        max_attempts: record.max_attempts,
        max_deferrals: record.max_deferrals,
        retry: record.retry.as_deref().and_then(|text| serde_json::from_str(text).ok()),
        last_error: record.last_error,
        dead_reason: record.dead_reason,
        enqueued_at: now.shown(record.enqueued_at),
        finished_at: record.finished_at.map(|at| now.shown(at)),
        payload_bytes,
        payload_crc: record.payload_crc,
        payload,
    })
}

/// Why a message is not being handed out: what the claim's own judgement says to a worker that holds nothing.
pub(crate) fn why(conn: &Connection, id: i64, now: Now) -> Result<Option<Why>> {
    const REASON: &str = "SELECT reason FROM main.relet_retry_queue WHERE queue = ?1 AND message = ?2";
    // No label is empty, so this is nobody's own.
    let (label, large) = (Arc::from(""), Large::Leave);
    let anyone = Who { label, incarnation: 0, routes: Routes::ALL, lease: None, crashed: true, large };
    let Some(record) = Record::load(conn, id)? else { return Ok(None) };
    Ok(Some(match claim::judge(conn, now, &record, &anyone)?.map_err(|obstacle| obstacle.shown(now)) {
        Ok(How::Claimed) if record.is_held() => {
            Why::Void { by: record.worker.unwrap_or_default(), crashes: record.crashes + 1 }
        }
        Ok(_) => match record.expires_at.filter(|at| record.worker.is_none() && *at <= now.time) {
            Some(at) => Why::Expired { at: now.shown(at) },
            None => Why::Ready,
        },
        Err(Obstacle::Held { by, lease_left }) => Why::Held { by, lease_left },
        Err(Obstacle::Deferred { by, .. }) => Why::Deferred {
            by,
            due_at: now.shown(record.due_at.unwrap_or(0)),
            abandoned_at: now.shown(retry_queue::kept_until(conn, &record)?),
            reason: conn
                .prepare_cached(REASON)?
                .query_row([record.queue, id], |row| row.get::<_, Option<String>>(0))
                .optional()?
                .flatten()
                .unwrap_or_default(),
        },
        Err(Obstacle::Due { until }) => Why::Due { at: until, after_error: record.last_error },
        Err(Obstacle::Group { behind }) => {
            // The member whose turn it is waits for no group, so this goes one step deep.
            let because = if behind == id { None } else { why(conn, behind, now)? };
            Why::Behind {
                id: MessageId::new(behind),
                group: record.group.unwrap_or_default(),
                because: Box::new(because.unwrap_or(Why::Ready)),
            }
        }
        Err(Obstacle::Finished(status)) => {
            Why::Finished { status, reason: record.dead_reason.filter(|_| status == Status::Dead) }
        }
        Err(Obstacle::Paused { until }) => Why::Paused { until },
        Err(Obstacle::Gate { name, until }) => Why::Gated { gate: name, until },
        Err(Obstacle::Route(_)) => Why::Ready,
    }))
}

/// What a worker may hope for in a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hope {
    /// `None`: there is no such queue.
    pub(crate) queue: Option<i64>,
    /// There may be something to claim, or to be cleared before.
    pub(crate) any: bool,
}

/// Whether there is something in this queue for a worker's claim to do: seeks only. If in doubt there is.
pub(crate) fn hope(conn: &Connection, queue: &str, who: &Who, now: Now) -> Result<Hope> {
    const SQL: &str = "SELECT q.id, q.gated, q.paused_until,
        EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines WHERE queue = q.id AND line = 0),
        EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines WHERE queue = q.id AND line = 1),
        EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines WHERE queue = q.id AND line = 2),
        EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines WHERE queue = q.id AND line = 3),
        EXISTS (SELECT 1 FROM main.relet_messages INDEXED BY relet_lines
                 WHERE queue = q.id AND line = -1 AND place <= ?3)
        OR EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_due
                    WHERE queue = q.id AND on_wall = 0 AND worker_id IS NULL AND behind = 0 AND due_at <= ?2)
        OR EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_due
                    WHERE queue = q.id AND on_wall = 1 AND worker_id IS NULL AND behind = 0 AND due_at <= ?5)
        OR EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_retry_kept
                    WHERE queue = q.id AND worker_id = ?4 AND worker_id IS NOT NULL AND due_at <= ?2)
        OR EXISTS (SELECT 1 FROM main.relet_retry_queue INDEXED BY relet_retry_free
                    WHERE queue = q.id AND kept_until IS NOT NULL AND kept_until <= ?2)
        FROM main.relet_queues q WHERE q.name = ?1";
    let mut statement = conn.prepare_cached(SQL)?;
    let found = statement.query_row(params![queue, now.time, now.awake, &*who.label, now.wall], |row| {
        let ready =
            Route::ALL.map(|route| row.get::<_, bool>(3 + route as usize).map(|any| any && who.routes.contains(route)));
        let ready = ready.into_iter().collect::<rusqlite::Result<Vec<_>>>()?.contains(&true);
        Ok((
            row.get::<_, i64>(0)?,
            row.get::<_, bool>(1)?,
            row.get::<_, Option<i64>>(2)?,
            ready,
            row.get::<_, bool>(7)?,
        ))
    });
    let Some((id, gated, paused_until, ready, to_clear)) = found.optional()? else { return Ok(Hope::default()) };
    let is_paused = paused_until.is_some_and(|until| until > now.time);
    let mut any = to_clear || (ready && !is_paused);
    if gated && !any && !is_paused {
        for line in lines::gated(conn, id)?.into_iter().filter(|line| who.routes.contains(line.route)) {
            any |=
                line.gate.map_or(Ok(true), |gate| Ok::<_, Error>(gates::passage(conn, gate, now)? == Passage::Open))?;
        }
    }
    Ok(Hope { queue: Some(id), any })
}

/// How long it is until something in this queue becomes claimable by itself: it is due, kept no longer, or its lease runs out.
pub(crate) fn next_event(conn: &Connection, queue: &str, now: Now) -> Result<Option<Duration>> {
    const SQL: &str = "SELECT
        (SELECT due_at FROM main.relet_retry_queue INDEXED BY relet_due
          WHERE queue = q.id AND on_wall = 0 AND worker_id IS NULL AND behind = 0 AND due_at > ?2 ORDER BY due_at LIMIT 1),
        (SELECT due_at FROM main.relet_retry_queue INDEXED BY relet_due
          WHERE queue = q.id AND on_wall = 1 AND worker_id IS NULL AND behind = 0 AND due_at > ?4 ORDER BY due_at LIMIT 1),
        (SELECT due_at FROM main.relet_retry_queue INDEXED BY relet_retry_due
          WHERE queue = q.id AND worker_id IS NOT NULL AND due_at > ?2 ORDER BY due_at LIMIT 1),
        (SELECT kept_until FROM main.relet_retry_queue INDEXED BY relet_retry_free
          WHERE queue = q.id AND kept_until IS NOT NULL AND kept_until > ?2 ORDER BY kept_until LIMIT 1),
        (SELECT place FROM main.relet_messages INDEXED BY relet_lines
          WHERE queue = q.id AND line = -1 AND place > ?3 ORDER BY place LIMIT 1),
        q.id
        FROM main.relet_queues q WHERE q.name = ?1";
    let waits = conn.prepare_cached(SQL)?.query_row(params![queue, now.time, now.awake, now.wall], |row| {
        let until = |column: usize, from: i64| {
            Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(|at| span(from, at)))
        };
        let on_time = [until(0, now.time)?, until(2, now.time)?, until(3, now.time)?];
        let waits = on_time.into_iter().chain([until(1, now.wall)?, until(4, now.awake)?]);
        Ok((row.get(5)?, waits.flatten().min()))
    });
    let Some((queue, next)) = waits.optional()? else { return Ok(None) };
    let resumed = queues::paused_until(conn, queue, now)?.map(|until| span(now.time, until));
    let opened = gates::next_opening(conn, queue, now)?;
    Ok([next, resumed, opened].into_iter().flatten().min())
}

/// The retry queue, the earliest first.
pub(crate) fn retry_queue(conn: &Connection, queue: Option<&str>, limit: usize, now: Now) -> Result<Vec<Retrying>> {
    const SQL: &str = "SELECT r.message, q.name, r.worker_id, r.due_at, r.reason, r.count
                         FROM main.relet_retry_queue r JOIN main.relet_queues q ON q.id = r.queue
                        WHERE r.reason IS NOT NULL AND (?1 IS NULL OR q.name = ?1)
                        ORDER BY r.due_at, r.message LIMIT ?2";
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map(params![queue, limit as i64], |row| {
        Ok(Retrying {
            id: MessageId::new(row.get(0)?),
            queue: row.get(1)?,
            worker: row.get(2)?,
            due_at: now.shown(row.get(3)?), // it has been tried, so it is on the store's time
            reason: row.get(4)?,
            count: row.get(5)?,
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// What has been in `processing` for `older_than` and more without a lease that runs, the oldest claim first.
pub(crate) fn stuck(conn: &Connection, older_than: Duration, now: Now) -> Result<Vec<Stuck>> {
    // Held, and the lease has run out; then deferred, and nobody has come for it. Queue by queue, so that both are seeks.
    // A claim that was made by a clock which was ahead counts as made now.
    const SQL: &str = "
        SELECT m.id, q.name, m.worker_id, m.claimed_at, m.place, NULL, m.attempts
          FROM main.relet_queues q CROSS JOIN main.relet_messages m INDEXED BY relet_lines
         WHERE m.queue = q.id AND m.line = -1 AND m.place <= ?1 AND min(m.claimed_at, ?4) <= ?3
        UNION ALL
        SELECT m.id, q.name, m.worker_id, m.claimed_at, NULL, r.due_at, m.attempts
          FROM main.relet_queues q CROSS JOIN main.relet_retry_queue r INDEXED BY relet_retry_free
          JOIN main.relet_messages m ON m.id = r.message
         WHERE r.queue = q.id AND r.kept_until IS NOT NULL AND r.kept_until <= ?2 AND min(m.claimed_at, ?4) <= ?3
         ORDER BY 4, 1";
    let claimed = now.time.saturating_sub(millis(older_than));
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map(params![now.awake, now.time, claimed, now.time], |row| {
        let overdue = match (row.get::<_, Option<i64>>(4)?, row.get::<_, Option<i64>>(5)?) {
            // Voided by a restart of its worker or the machine: when its lease would have ended is not known.
            (Some(lease_until), _) if lease_until == 0 || now.awake == i64::MAX => Duration::ZERO,
            (Some(lease_until), _) => span(lease_until, now.awake),
            (None, due_at) => span(due_at.unwrap_or(now.time), now.time),
        };
        Ok(Stuck {
            id: MessageId::new(row.get(0)?),
            queue: row.get(1)?,
            worker: row.get(2)?,
            age: span(row.get(3)?, now.time),
            overdue,
            attempts: row.get(6)?,
        })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Dead letters that were made within the last `within`, by queue: of the latest [`DEATHS_MAX`] and `more`.
pub(crate) fn deaths(conn: &Connection, within: Duration, more: u64, now: Now) -> Result<BTreeMap<String, u64>> {
    const SQL: &str = "SELECT q.name FROM main.relet_finished f INDEXED BY relet_ends
                        CROSS JOIN main.relet_messages m ON m.id = f.message CROSS JOIN main.relet_queues q ON q.id = m.queue
                        WHERE f.status = 'dead' AND f.finished_at > ?1 AND f.finished_at <= ?2
                        ORDER BY f.finished_at DESC LIMIT ?3";
    let since = now.time.saturating_sub(millis(within));
    let most = i64::try_from(more.saturating_add(DEATHS_MAX)).unwrap_or(i64::MAX);
    let mut statement = conn.prepare_cached(SQL)?;
    let mut rows = statement.query(params![since, now.time, most])?;
    let mut deaths = BTreeMap::new();
    while let Some(row) = rows.next()? {
        *deaths.entry(row.get(0)?).or_default() += 1;
    }
    Ok(deaths)
}

/// Every queue's counters, and the ages that a few seeks tell.
pub(crate) fn stats(conn: &Connection, stuck_after: Duration, now: Now) -> Result<Vec<QueueStats>> {
    const SQL: &str = "
        SELECT q.name, q.id, q.paused_until,
               (SELECT count(*) FROM main.relet_messages m INDEXED BY relet_lines
                 WHERE m.queue = q.id AND m.line = -1 AND m.place <= ?2 AND min(m.claimed_at, ?1) <= ?3)
             + (SELECT count(*) FROM main.relet_retry_queue r INDEXED BY relet_retry_free CROSS JOIN main.relet_messages m
                 WHERE r.queue = q.id AND r.kept_until IS NOT NULL AND r.kept_until <= ?1 AND m.id = r.message
                   AND min(m.claimed_at, ?1) <= ?3)
          FROM main.relet_queues q ORDER BY q.name";
    let claimed = now.time.saturating_sub(millis(stuck_after));
    let mut statement = conn.prepare_cached(SQL)?;
    let rows = statement.query_map([now.time, now.awake, claimed], |row| {
        let queue = QueueStats {
            queue: row.get(0)?,
            by_status: [0; Status::ALL.len()],
            retrying: 0,
            acked: 0,
            stuck: row.get::<_, i64>(3)?.unsigned_abs(),
            oldest_waiting: None,
            paused_until: row.get::<_, Option<i64>>(2)?.filter(|until| *until > now.time).map(|until| now.shown(until)),
        };
        Ok((row.get::<_, i64>(1)?, queue))
    })?;
    let mut queues = rows.collect::<rusqlite::Result<Vec<_>>>()?;
    for (id, queue) in &mut queues {
        let counted = counters::of(conn, *id)?;
        (queue.by_status, queue.retrying, queue.acked) = (counted.by_status, counted.retrying, counted.acked);
        // What waits in lines is counted on its route: most queues of a store with many are empty.
        if Route::ALL.iter().any(|route| queue.by_status[*route as usize] > 0) {
            queue.oldest_waiting = oldest_waiting(conn, *id, now)?;
        }
    }
    Ok(queues.into_iter().map(|(_, queue)| queue).collect())
}

/// Age of the oldest message of a queue that waits in one of its lines: a seek for each line and each priority that is in
/// use, and one for what has become due and has not been moved yet.
fn oldest_waiting(conn: &Connection, queue: i64, now: Now) -> Result<Option<Duration>> {
    const DUE: &str = "SELECT due_at FROM main.relet_retry_queue INDEXED BY relet_due
                        WHERE queue = ?1 AND on_wall = ?2 AND worker_id IS NULL AND behind = 0 AND due_at <= ?3
                        ORDER BY due_at LIMIT 1";
    let due = |on_wall: bool, until: i64| {
        conn.prepare_cached(DUE)?.query_row(params![queue, on_wall, until], |row| row.get(0)).optional()
    };
    let on_time: Option<i64> = due(false, now.time)?;
    let on_wall: Option<i64> = due(true, now.wall)?;
    let mut oldest = on_time.into_iter().chain(on_wall.map(|due_at| now.of_wall(due_at))).min();
    let free = Route::ALL.into_iter().map(|route| Line { queue, gate: None, route });
    for line in free.chain(lines::gated(conn, queue)?) {
        let heads = lines::heads(conn, line, true)?;
        oldest = oldest.into_iter().chain(heads.into_iter().map(|head| head.since)).min();
    }
    Ok(oldest.map(|since| span(since, now.time)))
}
