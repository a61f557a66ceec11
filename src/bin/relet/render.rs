//! What the library's records look like, as objects and as words.

use std::time::Duration;

use comfy_table::Table;
use relet::{
    CatchUp, GateView, INSTANT_MAX, QueueStats, Retrying, Route, ScheduleView, Snapshot, Stats, Status, Stuck, When,
    Why, WorkerView,
};

use crate::json::{Object, encode_base64};
use crate::output::{cell, clean, or_dash, table};
use crate::time::{span, stamp, stamp_and_distance};

/// Whole milliseconds, for JSON.
pub(crate) fn ms(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// A message as an object; with its payload, if that was asked for.
pub(crate) fn message(message: &Snapshot) -> Object {
    let object = message_without_payload(message);
    match &message.payload {
        Some(payload) => object.payload(payload),
        None => object,
    }
}

/// Everything about a message but its payload.
pub(crate) fn message_without_payload(message: &Snapshot) -> Object {
    Object::new()
        .put("id", message.id)
        .put("queue", &message.queue)
        .put("status", message.status)
        .put("route", message.route)
        .put("priority", message.priority)
        .put("attempts", message.attempts)
        .put("max_attempts", message.max_attempts)
        .put("crashes", message.crashes)
        .put("deferrals", message.deferrals)
        .put("max_deferrals", message.max_deferrals)
        .put("releases", message.releases)
        .put("redrives", message.redrives)
        .put("due_at", message.due_at)
        .put("expires_at", message.expires_at)
        .put("key", &message.key)
        .put("group", &message.group)
        .put("gate", &message.gate)
        .put("tick_at", message.tick_at)
        .put("worker", &message.worker)
        .put("receipt", message.receipt)
        .put("lease_left_ms", message.lease_left.map(ms))
        .put("claimed_at", message.claimed_at)
        .put("last_error", &message.last_error)
        .put("dead_reason", &message.dead_reason)
        .put("enqueued_at", message.enqueued_at)
        .put("finished_at", message.finished_at)
        .put("payload_bytes", message.payload_bytes)
}

/// A message for people: a line for each thing that there is to say, the payload last.
pub(crate) fn message_in_words(message: &Snapshot) -> String {
    let text = |text: &Option<String>| text.as_deref().map(clean);
    let instant = |at: Option<i64>| at.map(stamp_and_distance);
    let lines = [
        ("id", Some(message.id.to_string())),
        ("queue", Some(clean(&message.queue))),
        ("status", Some(message.status.to_string())),
        ("route", (message.status != message.route.into()).then(|| message.route.to_string())),
        ("priority", Some(message.priority.to_string())),
        ("key", text(&message.key)),
        ("group", text(&message.group)),
        ("gate", text(&message.gate)),
        ("tick", instant(message.tick_at)),
        ("enqueued", Some(stamp_and_distance(message.enqueued_at))),
        ("due", instant(message.due_at)),
        ("expires", instant(message.expires_at)),
        ("worker", text(&message.worker)),
        ("receipt", message.receipt.map(|receipt| receipt.to_string())),
        ("lease left", message.lease_left.map(span)),
        ("claimed", instant(message.claimed_at)),
        ("attempts", Some(format!("{} of {}", message.attempts, message.max_attempts))),
        ("crashes", Some(message.crashes.to_string())),
        ("deferrals", Some(format!("{} of {}", message.deferrals, message.max_deferrals))),
        ("releases", Some(message.releases.to_string())),
        ("redrives", (message.redrives > 0).then(|| message.redrives.to_string())),
        ("last error", text(&message.last_error)),
        ("given up", text(&message.dead_reason)),
        ("finished", instant(message.finished_at)),
        ("payload", Some(payload_in_words(message))),
    ];
    let lines: Vec<String> =
        lines.into_iter().filter_map(|(name, value)| Some(format!("{name:<12}{}", value?))).collect();
    lines.join("\n")
}

fn payload_in_words(message: &Snapshot) -> String {
    let bytes = message.payload.as_deref().unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => clean(text),
        Err(_) => format!("({} bytes, base64) {}", bytes.len(), encode_base64(bytes)),
    }
}

/// Messages as a table.
pub(crate) fn messages(with_payload: bool) -> Table {
    let mut header =
        vec!["ID", "QUEUE", "STATUS", "PRIORITY", "ATTEMPTS", "DUE", "GATE", "WORKER", "BYTES", "LAST ERROR"];
    if with_payload {
        header.push("PAYLOAD");
    }
    table(&header)
}

/// A row of [`messages`].
pub(crate) fn message_row(message: &Snapshot) -> Vec<String> {
    let mut row = vec![
        message.id.to_string(),
        cell(&message.queue),
        message.status.to_string(),
        message.priority.to_string(),
        format!("{}/{}", message.attempts, message.max_attempts),
        or_dash(message.due_at.map(stamp)),
        or_dash(message.gate.as_deref().map(cell)),
        or_dash(message.worker.as_deref().map(cell)),
        message.payload_bytes.to_string(),
        or_dash(message.last_error.as_deref().map(cell)),
    ];
    row.extend(message.payload.as_ref().map(|payload| cell(&String::from_utf8_lossy(payload))));
    row
}

/// Dead letters as a table.
pub(crate) fn dead_letters(with_payload: bool) -> Table {
    let mut header = vec!["ID", "QUEUE", "GIVEN UP", "BECAUSE", "ATTEMPTS", "BYTES", "LAST ERROR"];
    if with_payload {
        header.push("PAYLOAD");
    }
    table(&header)
}

/// A row of [`dead_letters`].
pub(crate) fn dead_letter_row(message: &Snapshot) -> Vec<String> {
    let mut row = vec![
        message.id.to_string(),
        cell(&message.queue),
        or_dash(message.finished_at.map(stamp)),
        or_dash(message.dead_reason.as_deref().map(cell)),
        format!("{}/{}", message.attempts, message.max_attempts),
        message.payload_bytes.to_string(),
        or_dash(message.last_error.as_deref().map(cell)),
    ];
    row.extend(message.payload.as_ref().map(|payload| cell(&String::from_utf8_lossy(payload))));
    row
}

/// A queue's counters as an object.
pub(crate) fn queue(queue: &QueueStats) -> Object {
    let object = Object::new().put("queue", &queue.queue);
    Status::ALL
        .into_iter()
        .fold(object, |object, status| object.put(status.as_str(), queue.count(status)))
        .put("live", queue.live())
        .put("retrying", queue.retrying)
        .put("stuck", queue.stuck)
        .put("acked", queue.acked)
        .put("oldest_waiting_ms", queue.oldest_waiting.map(ms))
        .put("paused_until", queue.paused_until)
}

/// The store's own numbers as an object.
pub(crate) fn store(stats: &Stats) -> Object {
    Object::new()
        .put("file_bytes", stats.file_bytes)
        .put("wal_bytes", stats.wal_bytes)
        .put("checkpoint_error", &stats.checkpoint_error)
}

/// Every queue's counters as a table.
pub(crate) fn queues(stats: &Stats) -> Table {
    let statuses = Status::ALL.map(|status| status.as_str().to_uppercase().replace('_', " "));
    let mut header = vec!["QUEUE"];
    header.extend(statuses.iter().map(String::as_str));
    header.extend(["RETRYING", "STUCK", "ACKED", "OLDEST WAITING", "PAUSED UNTIL"]);
    let mut table = table(&header);
    for queue in &stats.queues {
        let mut row = vec![cell(&queue.queue)];
        row.extend(Status::ALL.map(|status| queue.count(status).to_string()));
        row.extend([queue.retrying, queue.stuck, queue.acked].map(|number| number.to_string()));
        row.push(or_dash(queue.oldest_waiting.map(span)));
        row.push(or_dash(queue.paused_until.map(|at| end_in_words(at, "resumed"))));
        table.add_row(row);
    }
    table
}

/// A row of the retry queue as an object.
pub(crate) fn retrying(row: &Retrying) -> Object {
    Object::new()
        .put("id", row.id)
        .put("queue", &row.queue)
        .put("worker", &row.worker)
        .put("due_at", row.due_at)
        .put("reason", &row.reason)
        .put("count", row.count)
}

/// The retry queue as a table.
pub(crate) fn retry_queue(rows: &[Retrying]) -> Table {
    let mut table = table(&["ID", "QUEUE", "KEPT FOR", "DUE", "COUNT", "REASON"]);
    for row in rows {
        let worker = or_dash(row.worker.as_deref().map(cell));
        let due = stamp_and_distance(row.due_at);
        table.add_row([row.id.to_string(), cell(&row.queue), worker, due, row.count.to_string(), cell(&row.reason)]);
    }
    table
}

/// A stuck message as an object.
pub(crate) fn stuck(row: &Stuck) -> Object {
    Object::new()
        .put("id", row.id)
        .put("queue", &row.queue)
        .put("worker", &row.worker)
        .put("age_ms", ms(row.age))
        .put("overdue_ms", ms(row.overdue))
        .put("attempts", row.attempts)
}

/// The stuck messages as a table.
pub(crate) fn stuck_messages(rows: &[Stuck]) -> Table {
    let mut table = table(&["ID", "QUEUE", "WORKER", "AGE", "OVERDUE", "ATTEMPTS"]);
    for row in rows {
        let (age, overdue) = (span(row.age), span(row.overdue));
        table.add_row([
            row.id.to_string(),
            cell(&row.queue),
            cell(&row.worker),
            age,
            overdue,
            row.attempts.to_string(),
        ]);
    }
    table
}

/// The end of a pause or of a closed gate; `open_end` is what ends one that is without.
pub(crate) fn end_in_words(until: i64, open_end: &str) -> String {
    if until >= INSTANT_MAX { open_end.into() } else { stamp_and_distance(until) }
}

/// What a queue's pause is like now.
pub(crate) fn pause_in_words(queue: &str, paused_until: Option<i64>) -> String {
    match paused_until {
        Some(until) => format!("{}: paused until {}", clean(queue), end_in_words(until, "it is resumed")),
        None => format!("{}: not paused", clean(queue)),
    }
}

/// A gate as an object.
pub(crate) fn gate(gate: &GateView) -> Object {
    Object::new()
        .put("gate", &gate.name)
        .put("closed_until", gate.closed_until)
        .put("concurrency", gate.concurrency)
        .put("rate", gate.rate.map(|(messages, _)| messages))
        .put("period_ms", gate.rate.map(|(_, period)| ms(period)))
        .put("burst", gate.burst)
        .put("slow_start", gate.slow_start)
        .put("held", gate.held)
        .put("waiting", gate.waiting)
}

/// A gate for people, on one line.
pub(crate) fn gate_in_words(gate: &GateView) -> String {
    let mut parts = vec![gate_state(gate)];
    parts.extend(gate.concurrency.map(|claims| format!("at most {claims} at a time")));
    parts.extend(gate.rate.map(|rate| format!("{} with a burst of {}", rate_in_words(rate), gate.burst.unwrap_or(1))));
    if parts.len() == 1 {
        parts.push("no limits".into());
    }
    format!("{}: {}", clean(&gate.name), parts.join(", "))
}

fn gate_state(gate: &GateView) -> String {
    match (gate.closed_until, gate.slow_start) {
        (Some(until), _) => format!("closed until {}", end_in_words(until, "it is opened")),
        (None, Some(claims)) => format!("opening, {claims} at a time for now"),
        (None, None) => "open".into(),
    }
}

fn rate_in_words((messages, period): (u32, Duration)) -> String {
    format!("{messages}/{}", span(period))
}

/// The gates as a table.
pub(crate) fn gates(gates: &[GateView]) -> Table {
    let mut table = table(&["GATE", "STATE", "CONCURRENCY", "RATE", "BURST", "HELD", "WAITING"]);
    for gate in gates {
        table.add_row([
            cell(&gate.name),
            gate_state(gate),
            or_dash(gate.concurrency),
            or_dash(gate.rate.map(rate_in_words)),
            or_dash(gate.burst),
            gate.held.to_string(),
            gate.waiting.to_string(),
        ]);
    }
    table
}

/// A worker as an object.
pub(crate) fn worker(worker: &WorkerView) -> Object {
    Object::new()
        .put("worker", &worker.label)
        .put("life", worker.life.as_str())
        .put("pid", worker.pid)
        .put("started_at", worker.started_at)
        .put("held", worker.held)
        .put("deferred", worker.deferred)
}

/// The workers as a table.
pub(crate) fn workers(workers: &[WorkerView]) -> Table {
    let mut table = table(&["WORKER", "LIFE", "PID", "STARTED", "HELD", "DEFERRED"]);
    for worker in workers {
        table.add_row([
            cell(&worker.label),
            worker.life.to_string(),
            or_dash(worker.pid),
            or_dash(worker.started_at.map(stamp_and_distance)),
            worker.held.to_string(),
            worker.deferred.to_string(),
        ]);
    }
    table
}

/// A schedule as an object.
pub(crate) fn schedule(schedule: &ScheduleView) -> Object {
    let object = Object::new().put("schedule", &schedule.name).put("queue", &schedule.queue);
    let (every, cron, time_zone) = match &schedule.when {
        When::Every(span) => (Some(ms(*span)), None, None),
        When::Cron { pattern, time_zone } => (None, Some(pattern), Some(time_zone)),
        _ => (None, None, None),
    };
    let object = object.put("every_ms", every).put("cron", cron).put("time_zone", time_zone);
    match schedule.catch_up {
        CatchUp::All(ticks) => object.put("catch_up", ticks),
        _ => object.put("catch_up", catch_up_in_words(schedule.catch_up)),
    }
    .put("next_at", schedule.next_at)
    .put("last_at", schedule.last_at)
    .put("priority", schedule.priority)
    .put("route", schedule.route)
    .put("key", &schedule.key)
    .put("group", &schedule.group)
    .put("gate", &schedule.gate)
    .put("ttl_ms", schedule.ttl.map(ms))
    .put("max_attempts", schedule.max_attempts)
    .put("max_deferrals", schedule.max_deferrals)
    .put("retry", schedule.retry)
    .payload(&schedule.payload)
}

/// A schedule in words.
pub(crate) fn schedule_in_words(schedule: &ScheduleView) -> String {
    format!(
        "{}: {} into {:?}, next {}",
        clean(&schedule.name),
        when_in_words(&schedule.when),
        schedule.queue,
        stamp_and_distance(schedule.next_at)
    )
}

fn when_in_words(when: &When) -> String {
    match when {
        When::Every(every) => format!("every {}", span(*every)),
        other => clean(&other.to_string()),
    }
}

fn catch_up_in_words(catch_up: CatchUp) -> String {
    match catch_up {
        CatchUp::Skip => "skip".into(),
        CatchUp::One => "one".into(),
        CatchUp::All(ticks) => ticks.to_string(),
    }
}

/// What a schedule says of its messages, in the words of `schedule add`.
fn options_in_words(schedule: &ScheduleView) -> String {
    let text = |name: &str, text: &Option<String>| text.as_ref().map(|text| format!("{name} {}", cell(text)));
    let options = [
        (schedule.priority != 0).then(|| format!("priority {}", schedule.priority)),
        (schedule.route != Route::Pending).then(|| format!("route {}", schedule.route)),
        text("key", &schedule.key),
        text("group", &schedule.group),
        text("gate", &schedule.gate),
        schedule.ttl.map(|ttl| format!("ttl {}", span(ttl))),
        schedule.max_attempts.map(|max| format!("max-attempts {max}")),
        schedule.max_deferrals.map(|max| format!("max-deferrals {max}")),
        schedule.retry.map(|_| "a retry of its own".into()),
    ];
    or_dash(Some(options.into_iter().flatten().collect::<Vec<_>>().join(", ")).filter(|words| !words.is_empty()))
}

/// The schedules as a table.
pub(crate) fn schedules(schedules: &[ScheduleView]) -> Table {
    let mut table = table(&["SCHEDULE", "QUEUE", "WHEN", "CATCH UP", "NEXT", "LAST", "MESSAGES"]);
    for schedule in schedules {
        table.add_row([
            cell(&schedule.name),
            cell(&schedule.queue),
            cell(&when_in_words(&schedule.when)),
            catch_up_in_words(schedule.catch_up),
            stamp_and_distance(schedule.next_at),
            or_dash(schedule.last_at.map(stamp)),
            options_in_words(schedule),
        ]);
    }
    table
}

/// Adds to an object why a message waits: the word for it, and what belongs to that.
pub(crate) fn why(object: Object, why: &Why) -> Object {
    match why {
        Why::Ready => object.put("why", "ready"),
        Why::Held { by, lease_left } => {
            object.put("why", "held").put("worker", by).put("lease_left_ms", ms(*lease_left))
        }
        Why::Void { by, crashes } => object.put("why", "void").put("worker", by).put("crashes", crashes),
        Why::Deferred { by, due_at, abandoned_at, reason } => object
            .put("why", "deferred")
            .put("worker", by)
            .put("due_at", due_at)
            .put("abandoned_at", abandoned_at)
            .put("reason", reason),
        Why::Due { at, after_error } => object.put("why", "due").put("due_at", at).put("last_error", after_error),
        Why::Behind { id, group, .. } => object.put("why", "behind").put("behind", id).put("group", group),
        Why::Paused { until } => object.put("why", "paused").put("paused_until", until),
        Why::Gated { gate, until } => object.put("why", "gated").put("gate", gate).put("gated_until", until),
        Why::Expired { at } => object.put("why", "expired").put("expires_at", at),
        Why::Finished { status, reason } => object.put("why", "finished").put("status", status).put("reason", reason),
        other => object.put("why", other.to_string()),
    }
}

/// Why a message waits, for people: as the library says it, with readable instants and spans.
pub(crate) fn why_in_words(why: &Why) -> String {
    match why {
        Why::Held { by, lease_left } => format!("held by worker {by:?} for another {}", span(*lease_left)),
        Why::Deferred { by, due_at, abandoned_at, reason } => format!(
            "deferred ({}) and kept for worker {by:?}; due {}, for anyone from {} on",
            clean(reason),
            stamp_and_distance(*due_at),
            stamp(*abandoned_at)
        ),
        Why::Due { at, after_error: Some(error) } => {
            format!("waiting until {}, after the error: {}", stamp_and_distance(*at), clean(error))
        }
        Why::Due { at, after_error: None } => format!("waiting until {}", stamp_and_distance(*at)),
        Why::Behind { id, group, because } => {
            format!("behind message {id} of group {group:?}, which is {}", why_in_words(because))
        }
        Why::Paused { until } => format!("in a queue that is paused until {}", end_in_words(*until, "it is resumed")),
        Why::Gated { gate, until: Some(until) } => {
            format!("behind gate {gate:?}, which lets nothing pass until {}", end_in_words(*until, "it is opened"))
        }
        Why::Gated { gate, until: None } => {
            format!("behind gate {gate:?}, which lets the next one pass when one that has passed is settled")
        }
        Why::Expired { at } => format!("expired {}: the next claim makes a dead letter of it", stamp_and_distance(*at)),
        other => clean(&other.to_string()),
    }
}
