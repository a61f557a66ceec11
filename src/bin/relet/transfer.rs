//! Export and import: messages as JSON lines, to be enqueued again elsewhere.

use relet::{Message, PAYLOAD_MAX, Route, Snapshot, Status};
use serde::Deserialize;
use serde_json::Value;

use std::time::Duration;

use crate::args::Global;
use crate::exit::{Exit, Outcome};
use crate::json::{self, Object, decode_base64};
use crate::look::{Messages, named};
use crate::output::{Out, count, say};
use crate::stream::Loader;
use crate::time::{at_ms, now_ms};

/// Longest line that is imported: the largest payload with each of its bytes written as `\u0000`, and all that is around it.
const LINE_MAX: usize = 6 * PAYLOAD_MAX + (64 << 10);

pub(crate) fn export(global: &Global, out: &mut Out, queue: Option<&str>) -> Outcome {
    let store = global.look()?;
    let filter = named(&store, queue)?;
    let (mut live, mut dead) = (0_u64, 0_u64);
    for message in Messages::new(&store, filter, None, true) {
        let message = message?;
        match message.status {
            Status::Dead => dead += 1,
            status if status.is_live() => live += 1,
            _ => continue,
        }
        out.object(line(&message))?;
    }
    out.flush()?;
    say(format_args!("{} and {} written", count(live, "live message"), count(dead, "dead letter")));
    Ok(Exit::Done)
}

fn line(message: &Snapshot) -> Object {
    Object::new()
        .put("id", message.id)
        .put("queue", &message.queue)
        .put("status", message.status)
        .put("route", message.route)
        .put("priority", message.priority)
        .put("key", &message.key)
        .put("group", &message.group)
        .put("gate", &message.gate)
        .put("tick_at", message.tick_at)
        .put("due_at", message.due_at)
        .put("expires_at", message.expires_at)
        .put("max_attempts", message.max_attempts)
        .put("max_deferrals", message.max_deferrals)
        .put("attempts", message.attempts)
        .put("crashes", message.crashes)
        .put("deferrals", message.deferrals)
        .put("last_error", &message.last_error)
        .put("dead_reason", &message.dead_reason)
        .put("enqueued_at", message.enqueued_at)
        .payload_exact(message.payload.as_deref().unwrap_or_default())
}

/// What is read of an exported line; the rest of it is history.
#[derive(Debug, Deserialize)]
struct Record {
    queue: String,
    status: Option<Status>,
    route: Option<Route>,
    priority: Option<i32>,
    key: Option<String>,
    group: Option<String>,
    gate: Option<String>,
    due_at: Option<i64>,
    expires_at: Option<i64>,
    max_attempts: Option<u32>,
    max_deferrals: Option<u32>,
    payload: Option<Value>,
    payload_base64: Option<String>,
}

pub(crate) fn import(global: &Global, out: &mut Out, dead: bool) -> Outcome {
    let store = global.create()?;
    let mut left_out = 0_u64;
    let exit = Loader::new(&store, out).load(LINE_MAX, |line| {
        if line.trim_ascii().is_empty() {
            return Ok(None);
        }
        let record: Record = serde_json::from_slice(&line)
            .map_err(|error| format!("no exported message ({})", json::problem(&error)))?;
        match record.status {
            Some(status @ (Status::Done | Status::Cancelled)) => {
                return Err(format!("the message is {status}; only live messages and dead letters are imported"));
            }
            status if (status == Some(Status::Dead)) != dead => {
                left_out += 1;
                return Ok(None);
            }
            _ => {}
        }
        record.message().map(Some)
    })?;
    match (left_out, dead) {
        (0, _) => {}
        (_, true) => say(format_args!("{} left out, since --dead was given", count(left_out, "live message"))),
        (_, false) => say(format_args!(
            "{} left out; import again with --dead to make live messages of them",
            count(left_out, "dead letter")
        )),
    }
    Ok(exit)
}

impl Record {
    /// The queue, and the message to be enqueued.
    fn message(self) -> Result<(String, Message), String> {
        let payload = match (self.payload, self.payload_base64) {
            (Some(Value::String(text)), None) => text.into_bytes(),
            (Some(value), None) => value.to_string().into_bytes(),
            (None, Some(text)) => decode_base64(&text).ok_or("payload_base64 is no base64")?,
            (None, None) => return Err("it has neither payload nor payload_base64".into()),
            (Some(_), Some(_)) => return Err("it has both payload and payload_base64".into()),
        };
        let mut message =
            Message::new(payload).priority(self.priority.unwrap_or(0)).route(self.route.unwrap_or_default());
        if let Some(key) = self.key {
            message = message.key(key);
        }
        if let Some(group) = self.group {
            message = message.group(group);
        }
        if let Some(gate) = self.gate {
            message = message.gate(gate);
        }
        if let Some(due_at) = self.due_at {
            message = message.at(at_ms(due_at).ok_or_else(|| format!("due_at {due_at} is out of range"))?);
        }
        if let Some(expires_at) = self.expires_at {
            // What has expired meanwhile expires at once.
            let left = expires_at.saturating_sub(now_ms());
            message = message.ttl(Duration::from_millis(u64::try_from(left).unwrap_or(0)));
        }
        if let Some(max) = self.max_attempts {
            message = message.max_attempts(max);
        }
        if let Some(max) = self.max_deferrals {
            message = message.max_deferrals(max);
        }
        Ok((self.queue, message))
    }
}
