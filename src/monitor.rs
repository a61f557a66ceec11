//! The monitor: looks at a store again and again, and says once what is wrong and once that it is over.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::clock::{Now, millis, span};
use crate::error::{Error, Result};
use crate::message::{MessageId, check_range};
use crate::sql;
use crate::store::Store;
use crate::view::Stuck;

/// Longest pause between two looks: a day.
const EVERY_MAX_MS: i32 = 86_400_000;
/// If the wall clock has run this much further than the clock of the leases since the last look, the machine has slept.
const SLEPT_MS: i64 = 1_000;

/// Watches a store, and calls a handler once when something is wrong and once when it is over.
///
/// | it finds | when | unless set |
/// |---|---|---|
/// | [`What::Stuck`] | a message has been in `processing` for too long, judged as by [`Store::stuck`] | the store's threshold, an hour |
/// | [`What::Expired`] | a claim has been void for too long and nobody has taken the message back | 5 minutes |
/// | [`What::DeadLetters`] | more than so many dead letters of a queue in a span of time | off |
/// | [`What::Oldest`] | the oldest waiting message of a queue is too old | off |
/// | [`What::Wal`] | the write-ahead log has been too large for a span of time | 64 MiB for a minute |
/// | [`What::Checkpoint`] | the last checkpoint of this process failed | on |
/// | [`What::Store`] | the store could not be looked into | on |
///
/// A long lease, or one that is extended, is no finding, however old its claim.
///
/// A finding begins at the first look that sees it, and is over when no look has seen it for [`Monitor::calm`], a minute
/// unless set: one that flickers around its threshold begins once and goes on. Its spans of time are those of the store's
/// clocks; the first look after the machine has slept begins nothing, since the workers have slept, too.
///
/// With the feature `tracing` each beginning is an event at `warn`, each end one at `info`. With the feature `metrics` each
/// look records what [`Store::prometheus`] writes, under the same names, and `relet_finding` (by `what` and `queue`): 1 while
/// there is one, then 0. Those names do not tell several stores of a program apart.
///
/// ```
/// use std::time::Duration;
/// use relet::{Event, Monitor, Store};
///
/// let store = Store::open_in_memory()?;
/// let running = Monitor::builder()
///     .oldest_after(Duration::from_secs(600))
///     .oldest_after_in("reports", Duration::from_secs(86_400))
///     .dead_growth(10, Duration::from_secs(3600))
///     .on_event(|event| match event {
///         Event::Began(finding) => eprintln!("wake somebody: {finding}"),
///         Event::Ended(finding) => eprintln!("it is over: {finding}"),
///         _ => {}
///     })
///     .start(&store)?;
/// // … the program does its work …
/// drop(running);
/// # Ok::<(), relet::Error>(())
/// ```
#[must_use = "a monitor does nothing until it looks"]
pub struct Monitor {
    stuck_after: Option<Duration>,
    stuck_after_in: BTreeMap<String, Duration>,
    expired_after: Duration,
    dead_growth: Option<(u64, Duration)>,
    oldest_after: Option<Duration>,
    oldest_after_in: BTreeMap<String, Duration>,
    wal_max: (u64, Duration),
    calm: Duration,
    every: Duration,
    handler: Option<Handler>,
    /// What has begun and is not over.
    open: BTreeMap<(&'static str, Option<String>), Open>,
    last: Option<Now>,
    // Instants of the clock of the leases.
    /// Since when the log has been too large.
    wal_since: Option<i64>,
    /// Since when claims have been void whose end the store does not know: by message and attempt.
    void_since: BTreeMap<(MessageId, u32), i64>,
}

type Handler = Box<dyn FnMut(&Event) + Send>;

struct Open {
    finding: Finding,
    /// Since when it has not been seen.
    gone_since: Option<i64>,
}

/// What a monitor says.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Event {
    /// Something is wrong.
    Began(Finding),
    /// It is over. The finding as it was seen last.
    Ended(Finding),
}

/// Something that is wrong. Its text is a sentence that says what, and where to look.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Finding {
    /// The queue; `None` where it is of the whole store.
    pub queue: Option<String>,
    /// What it is.
    pub what: What,
    /// When it was first seen, in unix ms.
    pub since: i64,
}

/// What a [`Finding`] is, with what was measured and its threshold.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum What {
    /// Messages have been in `processing` for too long, and nobody holds them with a lease that runs.
    Stuck {
        /// How many.
        count: u64,
        /// The one that was claimed first.
        oldest: Stuck,
        /// For how long is too long.
        threshold: Duration,
    },
    /// Claims are void (their lease has run out, or nobody came back for what was deferred), and nobody has taken the
    /// messages back: no worker claims from this queue.
    Expired {
        /// How many.
        count: u64,
        /// The one that has been void for the longest time. Where the store does not know since when (the worker or the
        /// machine was restarted), `overdue` is how long the monitor has seen it.
        longest: Stuck,
        /// For how long is too long.
        threshold: Duration,
    },
    /// Messages have become dead letters, and are still there.
    DeadLetters {
        /// How many. Of all queues, the latest 10,000 (and as many more as the threshold) are counted.
        count: u64,
        /// How many are not too many.
        threshold: u64,
        /// In the last so long.
        span: Duration,
    },
    /// The oldest message that waits for nothing but a worker or its gate is too old.
    Oldest {
        /// Its age.
        age: Duration,
        /// What is too old.
        threshold: Duration,
    },
    /// The write-ahead log is too large, and does not shrink.
    Wal {
        /// Its size now.
        bytes: u64,
        /// What is not too large, in bytes.
        threshold: u64,
        /// It has been larger for this long and more.
        span: Duration,
    },
    /// The last checkpoint of this process failed.
    Checkpoint {
        /// What it failed with.
        error: String,
    },
    /// The store could not be looked into. What else had been found is neither confirmed nor over meanwhile.
    Store {
        /// Why.
        error: Error,
    },
}

impl Monitor {
    /// A monitor with the thresholds of the table above, looking every 10 seconds: to be changed before it looks.
    pub fn builder() -> Monitor {
        Monitor {
            stuck_after: None,
            stuck_after_in: BTreeMap::new(),
            expired_after: Duration::from_secs(300),
            dead_growth: None,
            oldest_after: None,
            oldest_after_in: BTreeMap::new(),
            wal_max: (64 << 20, Duration::from_secs(60)),
            calm: Duration::from_secs(60),
            every: Duration::from_secs(10),
            handler: None,
            open: BTreeMap::new(),
            last: None,
            wal_since: None,
            void_since: BTreeMap::new(),
        }
    }

    /// From when on a message in `processing` without a lease that runs is stuck; [`Options::stuck_after`](crate::Options::stuck_after) unless set.
    pub fn stuck_after(self, age: Duration) -> Monitor {
        Monitor { stuck_after: Some(age), ..self }
    }

    /// The same for one queue.
    pub fn stuck_after_in(mut self, queue: impl Into<String>, age: Duration) -> Monitor {
        self.stuck_after_in.insert(queue.into(), age);
        self
    }

    /// How long a claim may be void before somebody takes the message back; 5 minutes unless set.
    pub fn expired_after(self, overdue: Duration) -> Monitor {
        Monitor { expired_after: overdue, ..self }
    }

    /// Finds a queue with more than `count` new dead letters within `span`; off unless set. What is redriven or purged
    /// meanwhile no longer counts.
    pub fn dead_growth(self, count: u64, span: Duration) -> Monitor {
        Monitor { dead_growth: Some((count, span)), ..self }
    }

    /// From which age on the oldest waiting message of a queue is too old; off unless set. What waits behind a closed gate
    /// counts, since a gate is closed by failures. A paused queue does not count: somebody meant it.
    pub fn oldest_after(self, age: Duration) -> Monitor {
        Monitor { oldest_after: Some(age), ..self }
    }

    /// The same for one queue.
    pub fn oldest_after_in(mut self, queue: impl Into<String>, age: Duration) -> Monitor {
        self.oldest_after_in.insert(queue.into(), age);
        self
    }

    /// Finds a write-ahead log that is larger than this at every look for so long; 64 MiB for a minute unless set.
    pub fn wal_max(self, bytes: u64, span: Duration) -> Monitor {
        Monitor { wal_max: (bytes, span), ..self }
    }

    /// How long a finding must not have been seen until it is over; a minute unless set. So one finding calls the handler at
    /// most twice in such a span.
    pub fn calm(self, span: Duration) -> Monitor {
        Monitor { calm: span, ..self }
    }

    /// The pause between two looks of a monitor that was started, in real time; 10 seconds unless set, 1 ms to a day.
    pub fn every(self, pause: Duration) -> Monitor {
        Monitor { every: pause, ..self }
    }

    /// What is called with each event, one at a time, in place of the handler that was set before. While it runs nothing is
    /// looked at. If it panics, the monitor goes on.
    pub fn on_event(self, handler: impl FnMut(&Event) + Send + 'static) -> Monitor {
        Monitor { handler: Some(Box::new(handler)), ..self }
    }

    /// Looks once, calls the handler with what has begun and what is over, and returns it. For a program that has a timer of
    /// its own; always with the same store. It changes nothing in it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use relet::{Event, Monitor, Store};
    ///
    /// let store = Store::open_in_memory()?;
    /// store.queue("mail").enqueue("hello")?;
    /// let mut monitor = Monitor::builder().oldest_after(Duration::ZERO);
    /// assert!(matches!(&monitor.look(&store)[..], [Event::Began(finding)] if finding.queue.as_deref() == Some("mail")));
    /// assert!(monitor.look(&store).is_empty(), "it is known by now");
    /// # Ok::<(), relet::Error>(())
    /// ```
    pub fn look(&mut self, store: &Store) -> Vec<Event> {
        let now = store.now();
        let slept = self.last.replace(now).is_some_and(|last| {
            now.time.saturating_sub(last.time).saturating_sub(now.awake.saturating_sub(last.awake)) >= SLEPT_MS
        });
        let (found, whole) = match self.examine(store, now) {
            Ok(found) => (found, true),
            Err(error) => (vec![(None, What::Store { error })], false),
        };
        let mut events = Vec::new();
        let mut seen = Vec::new();
        for (queue, what) in found {
            let key = (what.name(), queue.clone());
            seen.push(key.clone());
            match self.open.get_mut(&key) {
                Some(open) => {
                    open.finding.what = what;
                    open.gone_since = None;
                }
                None if slept => {}
                None => {
                    let finding = Finding { queue, what, since: now.wall };
                    events.push(Event::Began(finding.clone()));
                    self.open.insert(key, Open { finding, gone_since: None });
                }
            }
        }
        if whole {
            self.open.retain(|key, open| {
                let stays = seen.contains(key) || lasted(open.gone_since.get_or_insert(now.awake), now) < self.calm;
                if !stays {
                    events.push(Event::Ended(open.finding.clone()));
                }
                stays
            });
        }
        for event in &events {
            publish(event);
            if let Some(handler) = &mut self.handler {
                let _ = catch_unwind(AssertUnwindSafe(|| handler(event)));
            }
        }
        events
    }

    /// Looks on a thread of its own, at once and then again and again, until the returned handle is dropped. Until then the
    /// store stays open.
    ///
    /// # Errors
    /// [`Error::Range`] for a pause out of range; [`Error::Thread`].
    pub fn start(mut self, store: &Store) -> Result<RunningMonitor> {
        check_range("pause between two looks in ms", millis(self.every), 1, EVERY_MAX_MS)?;
        let (store, stop) = (store.clone(), Arc::new(Stop::default()));
        let stopping = stop.clone();
        let look_on = move || {
            loop {
                self.look(&store);
                let mut stopped = stopping.stopped.lock();
                if !*stopped {
                    let _ = stopping.bell.wait_for(&mut stopped, self.every);
                }
                if *stopped {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("relet-monitor".into()).spawn(look_on);
        let thread = thread.map_err(|error| Error::Thread { detail: error.to_string() })?;
        Ok(RunningMonitor { stop, thread: Some(thread), pid: std::process::id() })
    }

    /// What is wrong now, each queue's and the store's.
    fn examine(&mut self, store: &Store, now: Now) -> Result<Vec<(Option<String>, What)>> {
        let stats = store.stats()?;
        let void = store.stuck(Duration::ZERO)?;
        #[cfg(feature = "metrics")]
        crate::prometheus::record(&stats, &store.gates()?);
        let mut found = self.void(store, void, now);
        if let Some((threshold, span)) = self.dead_growth {
            for (queue, count) in store.read(|conn, now| sql::look::deaths(conn, span, threshold, now))? {
                if count > threshold {
                    found.push((Some(queue), What::DeadLetters { count, threshold, span }));
                }
            }
        }
        for queue in &stats.queues {
            let threshold = self.oldest_after_in.get(&queue.queue).copied().or(self.oldest_after);
            if let (Some(age), Some(threshold), None) = (queue.oldest_waiting, threshold, queue.paused_until)
                && age >= threshold
            {
                found.push((Some(queue.queue.clone()), What::Oldest { age, threshold }));
            }
        }
        let (threshold, span) = self.wal_max;
        if stats.wal_bytes <= threshold {
            self.wal_since = None;
        } else if lasted(self.wal_since.get_or_insert(now.awake), now) >= span {
            found.push((None, What::Wal { bytes: stats.wal_bytes, threshold, span }));
        }
        if let Some(error) = stats.checkpoint_error {
            found.push((None, What::Checkpoint { error }));
        }
        Ok(found)
    }

    /// What the void claims, the oldest first, say of their queues.
    fn void(&mut self, store: &Store, void: Vec<Stuck>, now: Now) -> Vec<(Option<String>, What)> {
        let seen_before = std::mem::take(&mut self.void_since);
        let mut queues = BTreeMap::<String, Vec<Stuck>>::new();
        for mut claim in void {
            if claim.overdue.is_zero() {
                let key = (claim.id, claim.attempts);
                let mut since = seen_before.get(&key).copied().unwrap_or(now.awake);
                claim.overdue = lasted(&mut since, now);
                self.void_since.insert(key, since);
            }
            queues.entry(claim.queue.clone()).or_default().push(claim);
        }
        let mut found = Vec::new();
        for (queue, claims) in queues {
            let of_queue = self.stuck_after_in.get(&queue).copied().or(self.stuck_after);
            let threshold = of_queue.unwrap_or(store.options_used().stuck_after);
            let mut stuck = claims.iter().filter(|claim| claim.age >= threshold).peekable();
            if let Some(oldest) = stuck.peek().copied().cloned() {
                found.push((Some(queue.clone()), What::Stuck { count: stuck.count() as u64, oldest, threshold }));
            }
            let threshold = self.expired_after;
            let expired: Vec<_> = claims.into_iter().filter(|claim| claim.overdue >= threshold).collect();
            let count = expired.len() as u64;
            if let Some(longest) = expired.into_iter().max_by_key(|claim| claim.overdue) {
                found.push((Some(queue), What::Expired { count, longest, threshold }));
            }
        }
        found
    }
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Monitor").field("every", &self.every).finish_non_exhaustive()
    }
}

/// How long it has lasted since then. Where the clock has started anew meanwhile, it counts from now on.
fn lasted(since: &mut i64, now: Now) -> Duration {
    *since = (*since).min(now.awake);
    span(*since, now.awake)
}

/// A monitor at work. Dropping it ends it, after the look or the call of the handler that is under way: then the handler is
/// not called any more. (Dropped by the handler itself, it ends after that call.)
#[derive(Debug)]
#[must_use = "dropping it ends the monitor"]
pub struct RunningMonitor {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    /// The process that has started it.
    pid: u32,
}

#[derive(Debug, Default)]
struct Stop {
    stopped: Mutex<bool>,
    bell: Condvar,
}

impl Drop for RunningMonitor {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            std::mem::forget(self.thread.take()); // Forked: the thread is the parent's.
            return;
        }
        *self.stop.stopped.lock() = true;
        self.stop.bell.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl What {
    /// One word for it: "stuck", "expired", "dead_letters", "oldest", "wal", "checkpoint", "store".
    pub fn name(&self) -> &'static str {
        match self {
            What::Stuck { .. } => "stuck",
            What::Expired { .. } => "expired",
            What::DeadLetters { .. } => "dead_letters",
            What::Oldest { .. } => "oldest",
            What::Wal { .. } => "wal",
            What::Checkpoint { .. } => "checkpoint",
            What::Store { .. } => "store",
        }
    }

    /// What was measured, and its threshold, as numbers: seconds, bytes or messages; `None` where nothing was measured.
    pub fn measured(&self) -> Option<(f64, f64)> {
        Some(match self {
            What::Stuck { oldest, threshold, .. } => (oldest.age.as_secs_f64(), threshold.as_secs_f64()),
            What::Expired { longest, threshold, .. } => (longest.overdue.as_secs_f64(), threshold.as_secs_f64()),
            What::DeadLetters { count, threshold, .. } => (*count as f64, *threshold as f64),
            What::Oldest { age, threshold } => (age.as_secs_f64(), threshold.as_secs_f64()),
            What::Wal { bytes, threshold, .. } => (*bytes as f64, *threshold as f64),
            What::Checkpoint { .. } | What::Store { .. } => return None,
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(queue) = &self.queue {
            write!(f, "queue {queue:?}: ")?;
        }
        match &self.what {
            What::Stuck { count, oldest, threshold } => write!(
                f,
                "{} in processing for {} and more without a lease that runs, the oldest is message {} of worker {:?}, for {}; `relet stuck` lists them",
                counted(*count, "message"),
                in_words(*threshold),
                oldest.id,
                oldest.worker,
                in_words(oldest.age)
            ),
            What::Expired { count, longest, threshold } => write!(
                f,
                "{} void for {} and more and not taken back, the longest is that of worker {:?} to message {}, for {}; is a worker claiming from this queue? `relet workers` lists them",
                counted(*count, "claim"),
                in_words(*threshold),
                longest.worker,
                longest.id,
                in_words(longest.overdue)
            ),
            What::DeadLetters { count, threshold, span } => write!(
                f,
                "{} in the last {}, more than {threshold}; `relet dead list` says why",
                counted(*count, "new dead letter"),
                in_words(*span)
            ),
            What::Oldest { age, threshold } => write!(
                f,
                "the oldest waiting message has waited for {}, {} is too long; are there enough workers (`relet workers`), and is its gate open (`relet gate list`)?",
                in_words(*age),
                in_words(*threshold)
            ),
            What::Wal { bytes, threshold, span } => write!(
                f,
                "the write-ahead log has been larger than {threshold} bytes for {} and more, now it is {bytes} bytes; a read transaction that stays open, or checkpoints that nobody makes, keep it from shrinking",
                in_words(*span)
            ),
            What::Checkpoint { error } => {
                write!(
                    f,
                    "the last checkpoint failed ({error}); the write-ahead log grows until one succeeds: check the disk"
                )
            }
            What::Store { error } => write!(f, "the store cannot be looked into: {error}"),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Began(finding) => write!(f, "{finding}"),
            Event::Ended(finding) => write!(f, "over: {finding}"),
        }
    }
}

fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A span in its two largest units: "2h 5m".
fn in_words(span: Duration) -> String {
    const UNITS: [(&str, u128); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
    let ms = span.as_millis();
    let Some(first) = UNITS.iter().position(|(_, size)| ms >= *size) else { return "0s".into() };
    let (unit, size) = UNITS[first];
    let mut text = format!("{}{unit}", ms / size);
    if let Some((unit, smaller)) = UNITS.get(first + 1)
        && ms % size >= *smaller
    {
        text.push_str(&format!(" {}{unit}", ms % size / smaller));
    }
    text
}

/// Tells the log and the metrics of this program, where it has them.
fn publish(event: &Event) {
    #[cfg(feature = "tracing")]
    trace(event);
    #[cfg(feature = "metrics")]
    measure(event);
    let _ = event;
}

#[cfg(feature = "tracing")]
fn trace(event: &Event) {
    let (Event::Began(finding) | Event::Ended(finding)) = event;
    let (what, queue, since) = (finding.what.name(), finding.queue.as_deref(), finding.since);
    let (value, threshold) = finding.what.measured().unzip();
    match event {
        Event::Began(_) => tracing::warn!(what, queue, value, threshold, since, "{event}"),
        Event::Ended(_) => tracing::info!(what, queue, value, threshold, since, "{event}"),
    }
}

#[cfg(feature = "metrics")]
fn measure(event: &Event) {
    let (finding, is) = match event {
        Event::Began(finding) => (finding, 1.0),
        Event::Ended(finding) => (finding, 0.0),
    };
    let mut labels = vec![("what", finding.what.name().to_owned())];
    labels.extend(finding.queue.clone().map(|queue| ("queue", queue)));
    metrics::describe_gauge!("relet_finding", "1: the monitor sees something wrong.");
    metrics::gauge!("relet_finding", &labels).set(is);
}
