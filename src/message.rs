//! A message on its way in: its id, its payload, and what may be said about it.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::clock::unix_ms;
use crate::error::{Error, Result};
use crate::retry::Retry;
use crate::state::Route;

/// Longest queue name, key, group, gate and worker label, in bytes: long enough for a path or a URL, short enough for an index.
pub const NAME_MAX: usize = 512;
/// Lowest and highest priority.
pub const PRIORITY_RANGE: std::ops::RangeInclusive<i32> = -32_768..=32_767;
/// Largest payload unless [`Options::payload_max`](crate::Options::payload_max) says otherwise: 16 MiB.
pub const PAYLOAD_MAX: usize = 16 << 20;
/// Largest limit on payloads that can be set: SQLite's own limit on a row is just above 1 GB.
pub const PAYLOAD_MAX_LIMIT: usize = 900 << 20;
/// Times a message is tried, unless it, its queue or the store says otherwise.
pub const ATTEMPTS_MAX: u32 = 25;
/// Times a message is deferred, unless it says otherwise.
pub const DEFERRALS_MAX: u32 = 1_000;
/// Times a message may be released.
pub const RELEASES_MAX: u32 = 1_000;
/// Claims of a message that may end with the death, the silence or the restart of their worker.
pub const CRASHES_MAX: u32 = 3;
/// Longest error text that is kept, in bytes; a longer one is cut at a character and marked.
pub const ERROR_MAX: usize = 8 << 10;

/// The id of a message: never reused, and growing in the order of enqueueing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MessageId(i64);

impl MessageId {
    /// The id with this number, whether or not there is such a message.
    pub const fn new(id: i64) -> MessageId {
        MessageId(id)
    }

    /// The number.
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for MessageId {
    type Err = Error;

    fn from_str(text: &str) -> Result<MessageId> {
        text.parse().ok().filter(|id| *id > 0).map(MessageId).ok_or_else(|| Error::Parse {
            what: "message id",
            value: text.chars().take(64).collect(),
            expected: "an id is a whole number from 1 on",
        })
    }
}

impl From<i64> for MessageId {
    fn from(id: i64) -> MessageId {
        MessageId(id)
    }
}

impl From<Enqueued> for MessageId {
    fn from(enqueued: Enqueued) -> MessageId {
        enqueued.id
    }
}

/// What an enqueue did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enqueued {
    pub(crate) id: MessageId,
    pub(crate) existing: bool,
}

impl Enqueued {
    /// The message: the new one, or the live one that has the same key.
    pub fn id(&self) -> MessageId {
        self.id
    }

    /// Whether a live message of the queue had the key already, so that nothing was stored.
    pub fn existing(&self) -> bool {
        self.existing
    }
}

/// When a message may first be handed out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Start {
    Now,
    After(Duration),
    At(i64),
}

/// A message to be enqueued: a payload, and what is to be known about it.
///
/// Anything that is bytes is a message with nothing else said: `queue.enqueue("hello")`.
///
/// ```
/// use std::time::Duration;
/// use relet::{Message, Store};
///
/// let store = Store::open_in_memory()?;
/// let order = serde_json::json!({ "order": 42 });
/// let message = Message::json(&order)?.priority(5).key("order-42").group("customer-7").ttl(Duration::from_secs(86_400));
/// let first = store.queue("mail").enqueue(message.clone())?;
/// let again = store.queue("mail").enqueue(message)?;
/// assert!(again.existing() && again.id() == first.id());
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    pub(crate) payload: Vec<u8>,
    pub(crate) priority: i32,
    pub(crate) start: Start,
    pub(crate) key: Option<String>,
    pub(crate) group: Option<String>,
    pub(crate) gate: Option<String>,
    /// The tick of the schedule that enqueues it.
    pub(crate) tick_at: Option<i64>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) max_deferrals: Option<u32>,
    pub(crate) retry: Option<Retry>,
    pub(crate) route: Route,
}

impl Message {
    /// A message with these bytes; it may be empty.
    pub fn new(payload: impl Into<Vec<u8>>) -> Message {
        Message {
            payload: payload.into(),
            priority: 0,
            start: Start::Now,
            key: None,
            group: None,
            gate: None,
            tick_at: None,
            ttl: None,
            max_attempts: None,
            max_deferrals: None,
            retry: None,
            route: Route::Pending,
        }
    }

    /// A message whose payload is `value` as JSON.
    ///
    /// # Errors
    /// [`Error::Json`] where the value cannot be written as JSON.
    pub fn json<T: Serialize + ?Sized>(value: &T) -> Result<Message> {
        Ok(Message::new(serde_json::to_vec(value)?))
    }

    /// Higher is handed out first; 0 unless set, within [`PRIORITY_RANGE`].
    pub fn priority(self, priority: i32) -> Message {
        Message { priority, ..self }
    }

    /// Not handed out before this much time has passed. Replaces [`Message::at`].
    pub fn delay(self, delay: Duration) -> Message {
        Message { start: Start::After(delay), ..self }
    }

    /// Not handed out before this instant; one in the past means now. Replaces [`Message::delay`].
    pub fn at(self, at: SystemTime) -> Message {
        Message { start: Start::At(unix_ms(at)), ..self }
    }

    /// Deduplication: while a live message of the queue has this key, enqueueing it again stores nothing and returns that one's id.
    pub fn key(self, key: impl Into<String>) -> Message {
        Message { key: Some(key.into()), ..self }
    }

    /// Messages of one group of a queue are handed out in the order of enqueueing, one at a time; a failed one is waited for.
    pub fn group(self, group: impl Into<String>) -> Message {
        Message { group: Some(group.into()), ..self }
    }

    /// The gate that it passes when it is handed out, see [`Gate`](crate::Gate); the queue's unless set, or none.
    pub fn gate(self, gate: impl Into<String>) -> Message {
        Message { gate: Some(gate.into()), ..self }
    }

    /// Time to live: if it has not been handed out by then, it becomes a dead letter. What was handed out in time once lives on, however
    /// often it is tried.
    pub fn ttl(self, ttl: Duration) -> Message {
        Message { ttl: Some(ttl), ..self }
    }

    /// How often it is tried; the queue's default unless set, at least 1.
    pub fn max_attempts(self, max: u32) -> Message {
        Message { max_attempts: Some(max), ..self }
    }

    /// At which deferral it is given up: the last of so many makes a dead letter of it; 1,000 unless set, at least 1.
    pub fn max_deferrals(self, max: u32) -> Message {
        Message { max_deferrals: Some(max), ..self }
    }

    /// Its own backoff; the queue's unless set.
    pub fn retry(self, retry: Retry) -> Message {
        Message { retry: Some(retry), ..self }
    }

    /// The claimable status that it has when nobody holds it; pending unless set.
    pub fn route(self, route: Route) -> Message {
        Message { route, ..self }
    }

    /// Refuses what no store accepts, before anything is begun.
    pub(crate) fn check(&self, payload_max: usize) -> Result<()> {
        if self.payload.len() > payload_max {
            return Err(Error::PayloadTooLarge { size: self.payload.len(), limit: payload_max });
        }
        check_range("priority", i64::from(self.priority), *PRIORITY_RANGE.start(), *PRIORITY_RANGE.end())?;
        if let Some(key) = &self.key {
            check_name("key", key)?;
        }
        if let Some(group) = &self.group {
            check_name("group", group)?;
        }
        if let Some(gate) = &self.gate {
            check_name("gate", gate)?;
        }
        for (what, max) in [("max_attempts", self.max_attempts), ("max_deferrals", self.max_deferrals)] {
            if let Some(max) = max {
                check_range(what, i64::from(max), 1, i32::MAX)?;
            }
        }
        Ok(())
    }
}

impl From<Vec<u8>> for Message {
    fn from(payload: Vec<u8>) -> Message {
        Message::new(payload)
    }
}

impl From<String> for Message {
    fn from(payload: String) -> Message {
        Message::new(payload)
    }
}

impl From<&str> for Message {
    fn from(payload: &str) -> Message {
        Message::new(payload)
    }
}

impl From<&[u8]> for Message {
    fn from(payload: &[u8]) -> Message {
        Message::new(payload)
    }
}

impl<const N: usize> From<&[u8; N]> for Message {
    fn from(payload: &[u8; N]) -> Message {
        Message::new(payload)
    }
}

/// A name that goes into an index and onto terminals.
pub(crate) fn check_name(what: &'static str, value: &str) -> Result<()> {
    let problem = match value {
        "" => "is empty",
        _ if value.len() > NAME_MAX => "is too long",
        _ if value.chars().any(char::is_control) => "has control characters",
        _ => return Ok(()),
    };
    let value = value.chars().take(64).collect();
    Err(match what {
        "queue" => Error::QueueName { name: value, problem, limit: NAME_MAX },
        _ => Error::Text { what, value, problem, limit: NAME_MAX },
    })
}

pub(crate) fn check_range(what: &'static str, value: i64, min: i32, max: i32) -> Result<()> {
    let (min, max) = (i64::from(min), i64::from(max));
    if (min..=max).contains(&value) { Ok(()) } else { Err(Error::Range { what, value, min, max }) }
}

/// What marks a text that was cut at its limit.
const CUT: &str = " … (cut)";

/// `text`, cut at a character so that it takes at most [`ERROR_MAX`] bytes, mark included.
pub(crate) fn cut(text: &str) -> String {
    if text.len() <= ERROR_MAX {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(ERROR_MAX - CUT.len());
    format!("{}{CUT}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_error_is_cut_at_a_character_and_says_so() {
        for text in ["x".repeat(ERROR_MAX + 1), "é".repeat(ERROR_MAX), "𝄞".repeat(5_000_000)] {
            let kept = cut(&text);
            assert!(kept.len() <= ERROR_MAX && kept.len() > ERROR_MAX - 8 && kept.ends_with(CUT));
            assert!(text.starts_with(kept.strip_suffix(CUT).unwrap()));
        }
        assert_eq!(cut(""), "");
        assert_eq!(cut(&"x".repeat(ERROR_MAX)).len(), ERROR_MAX);
    }
}
