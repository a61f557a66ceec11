//! Export and import: messages as JSON lines, each with its whole history.

use relet::{Error, PAYLOAD_MAX, PAYLOAD_MAX_LIMIT, Retry, Route, Snapshot, Status, Store};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::args::Global;
use crate::exit::{Exit, Outcome};
use crate::json::{self, Object, decode_base64};
use crate::look::{Messages, named};
use crate::mark;
use crate::output::{Out, count, say};
use crate::pieces::{self, Cut, PIECE};
use crate::stream::{Bad, Content, Loader};

/// Longest line that is imported: a payload as large as a store takes by itself with each of its bytes written as `\u0000`, and all
/// that is around it. (Larger ones come in pieces.)
const LINE_MAX: usize = 6 * PAYLOAD_MAX + (64 << 10);

pub(crate) fn export(global: &Global, out: &mut Out, queue: Option<&str>) -> Outcome {
    let store = global.look()?;
    let filter = named(&store, queue)?;
    let (mut live, mut dead, mut damaged) = (0_u64, 0_u64, 0_u64);
    for message in Messages::new(&store, filter, None, false) {
        let message = message?;
        let counted = match message.status {
            Status::Dead => &mut dead,
            status if status.is_live() => &mut live,
            _ => continue,
        };
        match write(out, &store, message)? {
            Written::Whole => *counted += 1,
            Written::Gone => {}
            Written::Damaged(problem) => {
                damaged += 1;
                say(problem);
            }
        }
    }
    out.flush()?;
    let mut text = format!("{} and {} written", count(live, "live message"), count(dead, "dead letter"));
    if damaged > 0 {
        text.push_str(&format!(", {} left out; `relet doctor` tells more", count(damaged, "damaged one")));
    }
    say(text);
    Ok(if damaged == 0 { Exit::Done } else { Exit::Failed })
}

enum Written {
    Whole,
    /// Others have finished it meanwhile.
    Gone,
    Damaged(String),
}

fn write(out: &mut Out, store: &Store, message: Snapshot) -> Outcome<Written> {
    let id = message.id;
    if message.payload_bytes > PIECE {
        let cut = Cut::of(message.payload_bytes, message.payload_crc);
        let object = line(&message).put("payload_pieces", cut.pieces);
        out.object(object.put("payload_bytes", cut.bytes).put("payload_crc", cut.crc))?;
        return Ok(match pieces::write(out, store, id, cut)? {
            Ok(()) => Written::Whole,
            Err(Error::Gone { .. }) => Written::Gone,
            Err(error @ Error::Corrupt { .. }) => Written::Damaged(error.to_string()),
            Err(error) => return Err(error.into()),
        });
    }
    // What happened to it since the page was read is in the line, too.
    let Some(message) = store.show(id)?.filter(|message| is_carried(message.status)) else { return Ok(Written::Gone) };
    let payload = message.payload.as_deref().unwrap_or_default();
    if crc32fast::hash(payload) != message.payload_crc {
        let problem = format!("message {id}: its payload does not match the checksum that was stored with it");
        return Ok(Written::Damaged(problem));
    }
    out.object(line(&message).payload_exact(payload))?;
    Ok(Written::Whole)
}

fn is_carried(status: Status) -> bool {
    status.is_live() || status == Status::Dead
}

/// All of a message but its payload.
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
        .put("due_on_wall", message.due_on_wall)
        .put("wait_reason", &message.wait_reason)
        .put("wait_count", message.wait_count)
        .put("expires_at", message.expires_at)
        .put("max_attempts", message.max_attempts)
        .put("max_deferrals", message.max_deferrals)
        .put("retry", message.retry)
        .put("attempts", message.attempts)
        .put("crashes", message.crashes)
        .put("deferrals", message.deferrals)
        .put("releases", message.releases)
        .put("redrives", message.redrives)
        .put("last_error", &message.last_error)
        .put("dead_reason", &message.dead_reason)
        .put("enqueued_at", message.enqueued_at)
        .put("finished_at", message.finished_at)
}

/// A line that was exported, or written by hand: what it does not say is as of a message of which nothing is said.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record<'a> {
    /// Of the other store: messages get new ones.
    #[serde(rename = "id")]
    _id: Option<i64>,
    queue: String,
    status: Option<Status>,
    route: Option<Route>,
    priority: Option<i32>,
    key: Option<String>,
    group: Option<String>,
    gate: Option<String>,
    tick_at: Option<i64>,
    due_at: Option<i64>,
    due_on_wall: Option<bool>,
    wait_reason: Option<String>,
    wait_count: Option<u32>,
    expires_at: Option<i64>,
    max_attempts: Option<u32>,
    max_deferrals: Option<u32>,
    retry: Option<Retry>,
    attempts: Option<u32>,
    crashes: Option<u32>,
    deferrals: Option<u32>,
    releases: Option<u32>,
    redrives: Option<u32>,
    last_error: Option<String>,
    dead_reason: Option<String>,
    enqueued_at: Option<i64>,
    finished_at: Option<i64>,
    #[serde(borrow, default, deserialize_with = "text_of")]
    payload: Option<&'a RawValue>,
    payload_base64: Option<String>,
    payload_pieces: Option<u64>,
    payload_bytes: Option<u64>,
    payload_crc: Option<u32>,
}

/// A member's own text; `null` is one, too.
fn text_of<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

pub(crate) fn import(global: &Global, out: &mut Out) -> Outcome {
    let store = global.options().payload_max(PAYLOAD_MAX_LIMIT).open(global.file()?)?;
    Loader::new(&store, out).load(LINE_MAX, |line| {
        mark::refuse_wide(&line).map_err(Bad::Stream)?;
        let line = mark::strip(&line);
        if line.trim_ascii().is_empty() {
            return Ok(Content::Nothing);
        }
        if pieces::is_one(line) {
            return Err(Bad::Line("a piece of a payload, and not the next one of the message before it".into()));
        }
        let record: Record<'_> = serde_json::from_slice(line).map_err(|error| refused(&error))?;
        record.content().map_err(Bad::Line)
    })
}

/// What is wrong with a line, without the list of all members that there are.
fn refused(error: &serde_json::Error) -> Bad {
    let problem = json::problem(error);
    Bad::Line(match problem.split_once(", expected one of ") {
        Some((unknown, _)) if unknown.starts_with("unknown field") => format!(
            "no exported message ({unknown}, which is not a member of one; take it out, or put it into the payload)"
        ),
        _ => format!("no exported message ({problem})"),
    })
}

impl Record<'_> {
    /// The message, and its payload or what is to be known of the pieces in which that follows.
    fn content(self) -> Result<Content<Snapshot>, String> {
        let cut = match (self.payload_pieces, self.payload_bytes, self.payload_crc) {
            (Some(pieces), Some(bytes), Some(crc)) => Some(Cut { pieces, bytes, crc }),
            (None, None, None) => None,
            _ => return Err("payload_pieces, payload_bytes and payload_crc belong together".into()),
        };
        let payload = match (self.payload, &self.payload_base64, cut) {
            (Some(value), None, None) => Some(bytes_of(value)?),
            (None, Some(text), None) => Some(decode_base64(text).ok_or("payload_base64 is no base64")?),
            (None, None, Some(_)) => None,
            (None, None, None) => return Err("it has neither payload nor payload_base64".into()),
            _ => return Err("it has its payload more than once: payload, payload_base64, payload_pieces".into()),
        };
        let status = self.status.unwrap_or(self.route.unwrap_or_default().into());
        let route = match (self.route, Route::ALL.into_iter().find(|route| Status::from(*route) == status)) {
            (Some(route), Some(of_status)) if route != of_status => {
                return Err(format!("its status is {status}, and its route {route}; leave one out"));
            }
            (route, of_status) => route.or(of_status).unwrap_or_default(),
        };
        let mut message = Snapshot::new(self.queue);
        message.status = status;
        message.route = route;
        message.priority = self.priority.unwrap_or(message.priority);
        message.key = self.key;
        message.group = self.group;
        message.gate = self.gate;
        message.tick_at = self.tick_at;
        message.due_at = self.due_at;
        // A line by hand names an instant of the calendar.
        message.due_on_wall = self.due_on_wall.unwrap_or(true);
        message.wait_reason = self.wait_reason;
        message.wait_count = self.wait_count.unwrap_or(0);
        message.expires_at = self.expires_at;
        message.max_attempts = self.max_attempts.unwrap_or(message.max_attempts);
        message.max_deferrals = self.max_deferrals.unwrap_or(message.max_deferrals);
        message.retry = self.retry;
        message.attempts = self.attempts.unwrap_or(0);
        message.crashes = self.crashes.unwrap_or(0);
        message.deferrals = self.deferrals.unwrap_or(0);
        message.releases = self.releases.unwrap_or(0);
        message.redrives = self.redrives.unwrap_or(0);
        message.last_error = self.last_error;
        message.dead_reason = self.dead_reason;
        message.enqueued_at = self.enqueued_at.unwrap_or(message.enqueued_at);
        message.finished_at = self.finished_at;
        message.payload = payload;
        Ok(match cut {
            Some(cut) => Content::InPieces(message, cut),
            None => Content::One(message),
        })
    }
}

/// A string is the payload; of any other value its text is, byte by byte: no number, no order and no repeat in it is touched.
fn bytes_of(value: &RawValue) -> Result<Vec<u8>, String> {
    match value.get() {
        text if text.starts_with('"') => serde_json::from_str::<String>(text)
            .map(String::into_bytes)
            .map_err(|error| format!("its payload cannot be read ({})", json::problem(&error))),
        text => Ok(text.as_bytes().to_vec()),
    }
}
