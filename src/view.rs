//! What a look into the store shows.

use std::fmt;
use std::time::Duration;

use crate::clock::INSTANT_MAX;
use crate::message::{CRASHES_MAX, DEFERRALS_MAX, MessageId};
use crate::receipt::Receipt;
use crate::retry::Retry;
use crate::state::{Route, Status};

/// A message as it was at one moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Its id.
    pub id: MessageId,
    /// Its queue.
    pub queue: String,
    /// Its status.
    pub status: Status,
    /// The status it has when nobody holds it.
    pub route: Route,
    /// Higher is handed out first.
    pub priority: i32,
    /// Not handed out before this instant, in unix ms.
    pub due_at: Option<i64>,
    /// Whether `due_at` is meant by the calendar, so that it comes when the wall clock says so.
    pub due_on_wall: bool,
    /// Why it waits for `due_at`: its last error, or the reason of its deferral; `None` where it has not been tried, or does not wait.
    pub wait_reason: Option<String>,
    /// Which failure or deferral of it that was; 0 without a reason.
    pub wait_count: u32,
    /// Becomes a dead letter at this instant unless it has been handed out, in unix ms; `None` once it was.
    pub expires_at: Option<i64>,
    /// Its deduplication key.
    pub key: Option<String>,
    /// Its group.
    pub group: Option<String>,
    /// Its gate.
    pub gate: Option<String>,
    /// The tick of the schedule that it was enqueued for, in unix ms.
    pub tick_at: Option<i64>,
    /// The worker that holds it, or that it is kept for while it is deferred.
    pub worker: Option<String>,
    /// The receipt that settles it; `None` unless it is held.
    pub receipt: Option<Receipt>,
    /// What is left of its lease; zero where that has run out, `None` unless it is held.
    pub lease_left: Option<Duration>,
    /// When it was claimed last, in unix ms.
    pub claimed_at: Option<i64>,
    /// Times it was tried, those given back (deferred, released) not counted.
    pub attempts: u32,
    /// Claims of it that ended with the death or silence of their worker.
    pub crashes: u32,
    /// Times it was deferred.
    pub deferrals: u32,
    /// Times it was released.
    pub releases: u32,
    /// Times it was taken back out of the dead letters.
    pub redrives: u32,
    /// How often it is tried.
    pub max_attempts: u32,
    /// At which deferral it is given up.
    pub max_deferrals: u32,
    /// Its own backoff, where it has one.
    pub retry: Option<Retry>,
    /// The error of its last failure or rejection.
    pub last_error: Option<String>,
    /// Why it became a dead letter, the last time it did.
    pub dead_reason: Option<String>,
    /// When it was enqueued, in unix ms.
    pub enqueued_at: i64,
    /// When it was acked, died or was cancelled, in unix ms.
    pub finished_at: Option<i64>,
    /// Size of its payload in bytes.
    pub payload_bytes: usize,
    /// CRC-32 of its payload as it was enqueued: a payload with another one is damaged.
    pub payload_crc: u32,
    /// Its payload, where it was asked for.
    pub payload: Option<Vec<u8>>,
}

impl Snapshot {
    /// What a message of this queue would be right after it was enqueued, with nothing said about it and without a payload: to be
    /// filled in, for [`Store::import`](crate::Store::import). Its `max_attempts` is 0, which stands for the queue's.
    pub fn new(queue: impl Into<String>) -> Snapshot {
        Snapshot {
            id: MessageId::new(0),
            queue: queue.into(),
            status: Status::Pending,
            route: Route::Pending,
            priority: 0,
            due_at: None,
            due_on_wall: false,
            wait_reason: None,
            wait_count: 0,
            expires_at: None,
            key: None,
            group: None,
            gate: None,
            tick_at: None,
            worker: None,
            receipt: None,
            lease_left: None,
            claimed_at: None,
            attempts: 0,
            crashes: 0,
            deferrals: 0,
            releases: 0,
            redrives: 0,
            max_attempts: 0,
            max_deferrals: DEFERRALS_MAX,
            retry: None,
            last_error: None,
            dead_reason: None,
            enqueued_at: INSTANT_MAX,
            finished_at: None,
            payload_bytes: 0,
            payload_crc: 0,
            payload: None,
        }
    }
}

/// Which messages [`Store::list`](crate::Store::list) lists. All filters hold at the same time.
///
/// ```
/// use relet::{Filter, Status, Store};
///
/// let store = Store::open_in_memory()?;
/// store.queue("mail").enqueue_all(["a", "b", "c"])?;
/// let page = store.list(&Filter::new().queue("mail").status(Status::Pending).limit(2))?;
/// let rest = store.list(&Filter::new().queue("mail").after(page[1].id))?;
/// assert_eq!((page.len(), rest.len()), (2, 1));
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a filter does nothing until something is listed with it"]
pub struct Filter {
    pub(crate) queue: Option<String>,
    pub(crate) status: Option<Status>,
    pub(crate) after: i64,
    pub(crate) limit: usize,
    pub(crate) payload: bool,
}

/// Messages in a page unless [`Filter::limit`] says otherwise.
pub const PAGE: usize = 100;
/// Most messages in a page, so that no look holds its snapshot of the file for long.
pub const PAGE_MAX: usize = 10_000;

impl Filter {
    /// Every message, by id, [`PAGE`] of them, without payloads.
    pub fn new() -> Filter {
        Filter { queue: None, status: None, after: 0, limit: PAGE, payload: false }
    }

    /// Only messages of this queue.
    pub fn queue(self, name: impl Into<String>) -> Filter {
        Filter { queue: Some(name.into()), ..self }
    }

    /// Only messages in this status.
    pub fn status(self, status: Status) -> Filter {
        Filter { status: Some(status), ..self }
    }

    /// Only messages with a larger id: the last one of the page before.
    pub fn after(self, id: MessageId) -> Filter {
        Filter { after: id.get(), ..self }
    }

    /// At most this many; more than [`PAGE_MAX`] count as that.
    pub fn limit(self, limit: usize) -> Filter {
        Filter { limit: limit.min(PAGE_MAX), ..self }
    }

    /// With their payloads.
    pub fn payload(self, with: bool) -> Filter {
        Filter { payload: with, ..self }
    }
}

impl Default for Filter {
    fn default() -> Filter {
        Filter::new()
    }
}

/// A row of the retry queue: a message whose next try is set for later.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retrying {
    /// The message.
    pub id: MessageId,
    /// Its queue.
    pub queue: String,
    /// Deferred: the worker it is kept for, in `processing`. Failed: `None`.
    pub worker: Option<String>,
    /// When it is tried again, in unix ms.
    pub due_at: i64,
    /// The error, or the reason of the deferral.
    pub reason: String,
    /// Which failure, or which deferral, of this message it was.
    pub count: u32,
}

/// A message that has been in `processing` for too long, and that nobody holds with a lease that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stuck {
    /// The message.
    pub id: MessageId,
    /// Its queue.
    pub queue: String,
    /// The worker that claimed it.
    pub worker: String,
    /// How long ago it was claimed; zero where the wall clock was set back since.
    pub age: Duration,
    /// How long ago its lease ran out, or its worker should have come back for it; zero where the machine was restarted since.
    pub overdue: Duration,
    /// Times it was tried.
    pub attempts: u32,
}

/// A store at one moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Every queue that ever had a message, by name.
    pub queues: Vec<QueueStats>,
    /// Size of the file, in bytes.
    pub file_bytes: u64,
    /// Size of the write-ahead log beside it, in bytes.
    pub wal_bytes: u64,
    /// What the last checkpoint of this process failed with, if it did.
    pub checkpoint_error: Option<String>,
}

/// A queue at one moment. The counts are kept, not counted.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Its name.
    pub queue: String,
    /// Messages in each status, in the order of [`Status::ALL`].
    pub by_status: [u64; Status::ALL.len()],
    /// Messages in the retry queue (failed ones, which are claimable by status, and deferred ones, which are in `processing`).
    pub retrying: u64,
    /// Messages in `processing` for longer than the store's threshold without a lease that runs. See [`Stuck`].
    pub stuck: u64,
    /// Nothing of it is handed out before this instant, in unix ms; `None` unless it is paused.
    pub paused_until: Option<i64>,
    /// Messages ever acked, those deleted since among them.
    pub acked: u64,
    /// Age of the oldest message that waits for nothing but a worker, its gate or the end of a pause.
    pub oldest_waiting: Option<Duration>,
}

impl QueueStats {
    /// Messages in this status.
    pub fn count(&self, status: Status) -> u64 {
        self.by_status[status as usize]
    }

    /// Messages that are not finished.
    pub fn live(&self) -> u64 {
        Status::ALL.into_iter().filter(|status| status.is_live()).map(|status| self.count(status)).sum()
    }
}

/// Messages of one queue that are counted behind one gate, so that a look stays short: some milliseconds.
pub const GATE_WAITING_MAX: usize = 100_000;

/// A gate at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GateView {
    /// Its name.
    pub name: String,
    /// Nothing passes before this instant, in unix ms; `None` where it is open.
    pub closed_until: Option<i64>,
    /// At most so many claims through it at a time.
    pub concurrency: Option<u32>,
    /// At most so many messages in any such span of time.
    pub rate: Option<(u32, Duration)>,
    /// So many of them at once, where there is a rate.
    pub burst: Option<u32>,
    /// It was closed, and opens slowly: at most so many claims at a time for now.
    pub slow_start: Option<u32>,
    /// Claims that have passed it and hold, up to [`GATE_WAITING_MAX`].
    pub held: u64,
    /// Messages that wait for nothing but this gate and a worker. They are counted one by one, up to [`GATE_WAITING_MAX`] of
    /// each queue.
    pub waiting: u64,
}

/// A worker at one moment: what runs, and whoever else holds something.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerView {
    /// Its label.
    pub label: String,
    /// Whether it lives.
    pub life: Life,
    /// The process that started it; `None` unless it is alive, dead or unknown. To be shown: nothing is judged by it.
    pub pid: Option<u32>,
    /// When it was started, in unix ms; there if the process is.
    pub started_at: Option<i64>,
    /// Claims of it whose lease runs.
    pub held: u64,
    /// Messages that it has deferred.
    pub deferred: u64,
}

/// Whether a worker lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Life {
    /// It runs: its lock is held.
    Alive,
    /// Its process has died. The next claim takes what it held.
    Dead,
    /// That cannot be told (its lock's file is gone): its leases decide.
    Unknown,
    /// It has ended in good order. What it still holds keeps its lease, since somebody may have the receipt.
    Ended,
    /// It never ran: claims by a label alone, from a command line. Their leases decide.
    Detached,
}

impl Life {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Life::Alive => "alive",
            Life::Dead => "dead",
            Life::Unknown => "unknown",
            Life::Ended => "ended",
            Life::Detached => "detached",
        }
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Why a message is not being handed out now, found with the claim's own conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// It can be handed out: the next claim that reaches it gets it.
    Ready,
    /// A worker holds it.
    Held {
        /// The worker.
        by: String,
        /// What is left of its lease.
        lease_left: Duration,
    },
    /// A worker held it, but that claim is void (its lease ran out, the worker or the machine was restarted): the next claim takes it, or makes a dead letter of it where a budget is spent.
    Void {
        /// The worker.
        by: String,
        /// Crashes that will have been counted then.
        crashes: u32,
    },
    /// It was deferred, and is kept for its worker.
    Deferred {
        /// The worker.
        by: String,
        /// When it is due, in unix ms.
        due_at: i64,
        /// When anyone may take it, in unix ms.
        abandoned_at: i64,
        /// Why it was deferred.
        reason: String,
    },
    /// Its first or next try is set for later.
    Due {
        /// When, in unix ms.
        at: i64,
        /// The error of the last try, if there was one.
        after_error: Option<String>,
    },
    /// Another message of its group goes first.
    Behind {
        /// That message.
        id: MessageId,
        /// The group.
        group: String,
        /// Why that one is not done yet.
        because: Box<Why>,
    },
    /// Its queue is paused.
    Paused {
        /// Until when, in unix ms.
        until: i64,
    },
    /// Its gate lets nothing pass now.
    Gated {
        /// The gate.
        gate: String,
        /// Until when, in unix ms; `None`: until one of the claims that have passed it ends.
        until: Option<i64>,
    },
    /// Its time to live is over: the next claim that reaches it makes a dead letter of it.
    Expired {
        /// Since when, in unix ms.
        at: i64,
    },
    /// It is finished.
    Finished {
        /// How.
        status: Status,
        /// Why, for a dead letter.
        reason: Option<String>,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Ready => write!(f, "ready: the next claim that reaches it gets it"),
            Why::Held { by, lease_left } => write!(f, "held by worker {by:?} for another {lease_left:?}"),
            Why::Void { by, crashes } if *crashes >= CRASHES_MAX => {
                write!(
                    f,
                    "the claim of worker {by:?} is void: the next claim makes a dead letter of it, after {crashes} crashes"
                )
            }
            Why::Void { by, crashes } => {
                write!(f, "the claim of worker {by:?} is void: the next claim takes it, as crash {crashes}")
            }
            Why::Deferred { by, due_at, abandoned_at, reason } => write!(
                f,
                "deferred ({reason}) and kept for worker {by:?}, due at {due_at}, for anyone from {abandoned_at} on"
            ),
            Why::Due { at, after_error: Some(error) } => write!(f, "waiting until {at}, after the error: {error}"),
            Why::Due { at, after_error: None } => write!(f, "waiting until {at}"),
            Why::Behind { id, group, because } => {
                write!(f, "behind message {id} of group {group:?}, which is {because}")
            }
            Why::Paused { until } if *until >= INSTANT_MAX => {
                write!(f, "held up: its queue is paused, until it is resumed")
            }
            Why::Paused { until } => write!(f, "held up: its queue is paused until {until}"),
            Why::Gated { gate, until: Some(until) } if *until >= INSTANT_MAX => {
                write!(f, "held up by gate {gate:?}, which is closed until it is opened")
            }
            Why::Gated { gate, until: Some(until) } => write!(f, "held up by gate {gate:?} until {until}"),
            Why::Gated { gate, until: None } => {
                write!(f, "held up by gate {gate:?} until one of the claims that have passed it ends")
            }
            Why::Expired { at } => write!(f, "expired at {at}: the next claim makes a dead letter of it"),
            Why::Finished { status, reason: Some(reason) } => write!(f, "{status}: {reason}"),
            Why::Finished { status, reason: None } => write!(f, "{status}"),
        }
    }
}
