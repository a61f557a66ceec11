//! The schedule: a named recurring enqueue.
//!
//! A tick, its message and the next tick's instant are one commit, in which the schedule is read again. So however many
//! processes run the schedules, and whenever one of them dies, there is one message per tick.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{millis, span};
#[cfg(feature = "cron")]
use crate::cron::Cron;
use crate::error::{Error, Result};
use crate::message::{Message, Start, check_name, check_range};
use crate::retry::Retry;
use crate::sql::schedules::{self, Place, ScheduleRow};
use crate::sql::{Tx, enqueue};
use crate::state::Route;
use crate::store::Store;
use crate::writer::Need;

/// The longest span between two ticks of [`When::Every`]; the shortest is a millisecond.
pub const EVERY_MAX: Duration = Duration::from_secs(366 * 86_400);
/// The most missed ticks that [`CatchUp::All`] makes up for, so that one commit stays short.
pub const CATCH_UP_MAX: u32 = 1_000;
/// How late a tick may be enqueued without being missed, for [`CatchUp::Skip`].
pub const TICK_GRACE: Duration = Duration::from_secs(60);
/// How long it is until schedules are run again after the store could not be written.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A named recurring enqueue, stored in the file, for all processes: "every 30 seconds", "at three in the morning in Berlin".
///
/// Each tick enqueues one message, which knows the tick's instant ([`Claim::tick_at`](crate::Claim::tick_at)). There is one
/// message per tick, however many processes run the schedules: the tick and its message are one commit. Somebody has to run
/// them: a pool of workers ([`Workers`](crate::Workers)) does, and so does [`Store::run_schedules`].
///
/// While nobody runs them ticks are missed; [`CatchUp`] says what becomes of those. A clock that jumps ahead has the same
/// effect. One that is set back puts off no tick of [`When::Every`] by more than its span, and repeats no tick of
/// [`When::Cron`]: those that were missed on the way ahead come again, those that were enqueued do not.
///
/// ```
/// use std::time::Duration;
/// use relet::{CatchUp, Message, Store, When};
///
/// let store = Store::open_in_memory()?;
/// let beat = store.schedule("beat");
/// beat.set(When::every(Duration::from_millis(1)), "beats", Message::new("tick").priority(5), CatchUp::One)?;
///
/// let worker = store.worker("drummer")?;
/// let claim = loop {
///     let ticks = store.run_schedules()?;
///     if let Some(claim) = worker.claim("beats")? {
///         break claim;
///     }
///     std::thread::sleep(ticks.next.expect("there is a schedule"));
/// };
/// assert!(claim.tick_at().is_some());
/// claim.ack()?;
/// assert!(beat.remove()?);
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schedule {
    store: Store,
    name: Arc<str>,
}

/// When a schedule ticks. It is judged by [`Schedule::set`].
///
/// ```
/// use std::time::Duration;
/// use relet::When;
///
/// assert_eq!(When::every(Duration::from_secs(30)).to_string(), "every 30s");
/// assert_eq!(When::cron("0 3 * * MON-FRI", "Europe/Berlin").to_string(), "0 3 * * MON-FRI in Europe/Berlin");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// A tick each time this much time has passed, 1 ms to [`EVERY_MAX`]; the first one so long after it was set.
    Every(Duration),
    /// A tick whenever the clock on the wall shows this. Needs the feature `cron`.
    ///
    /// Days on which the clock is changed: a pattern that names hours ticks once for each time that it names. What falls into
    /// the skipped hour ticks when that is over, together with what is due then; what falls into the doubled hour ticks the
    /// first time. A pattern for every hour (`*/15 * * * *`) goes on through both: it ticks whenever the clock shows it.
    Cron {
        /// `minute hour day-of-month month day-of-week`, or six fields, the first for the second. As the crate `croner` reads
        /// them: names (`MON`, `JAN`), lists, ranges and steps, `L`, `W` and `#`, and `@hourly` to `@yearly`. Where both days
        /// are named, either will do.
        pattern: String,
        /// A name of the IANA database. The system's copy of that is used, or, where it has none, the one that is compiled in.
        time_zone: String,
    },
}

/// What becomes of ticks that were missed: nobody ran the schedules, or the clock jumped ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CatchUp {
    /// Nothing. A tick is missed if the next one is due as well, or if it is more than [`TICK_GRACE`] late.
    Skip,
    /// One message, for the latest of them.
    #[default]
    One,
    /// A message for each of the latest ones, up to so many (1 to [`CATCH_UP_MAX`]), in their order. `All(1)` is `One`.
    All(u32),
}

/// A schedule at one moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ScheduleView {
    /// Its name.
    pub name: String,
    /// The queue that it enqueues into.
    pub queue: String,
    /// When it ticks.
    pub when: When,
    /// What becomes of missed ticks.
    pub catch_up: CatchUp,
    /// Its next tick, in unix ms. One in the past is due.
    pub next_at: i64,
    /// The last tick that was enqueued, in unix ms; `None` before the first one, and after its time was changed.
    pub last_at: Option<i64>,
    /// The payload of its messages.
    pub payload: Vec<u8>,
    /// The priority of its messages.
    pub priority: i32,
    /// Their route.
    pub route: Route,
    /// Their key: while a live message has it, a tick stores none.
    pub key: Option<String>,
    /// Their group.
    pub group: Option<String>,
    /// Their gate; `None`: the queue's, or none.
    pub gate: Option<String>,
    /// How long after it was enqueued a message becomes a dead letter, if it has not been handed out by then.
    pub ttl: Option<Duration>,
    /// How often a message is tried; `None`: what the queue or the store says.
    pub max_attempts: Option<u32>,
    /// How often it may be deferred; `None`: what the store says.
    pub max_deferrals: Option<u32>,
    /// How failed messages back off; `None`: what the queue or the store says.
    pub retry: Option<Retry>,
}

/// What came of running the schedules.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Ticks {
    /// Messages that were stored. A tick whose key a live message has stored none.
    pub enqueued: u64,
    /// Schedules that are due and could not be run, by name. Their ticks are not lost: they stay due.
    pub failed: Vec<(String, Error)>,
    /// How long it is until the next tick; `None` where there is none to wait for. At least a second if the store could not
    /// be written. A schedule that this process cannot run ([`Error::NoCron`], a time zone that is not known here) does not
    /// count.
    pub next: Option<Duration>,
}

impl When {
    /// Each time this much time has passed.
    pub fn every(span: Duration) -> When {
        When::Every(span)
    }

    /// Whenever the clock on the wall of this IANA time zone shows this.
    pub fn cron(pattern: impl Into<String>, time_zone: impl Into<String>) -> When {
        When::Cron { pattern: pattern.into(), time_zone: time_zone.into() }
    }

    fn of(row: &ScheduleRow) -> When {
        match (&row.cron, &row.time_zone) {
            (Some(pattern), Some(time_zone)) => When::cron(pattern, time_zone),
            _ => When::Every(span(0, row.every_ms.unwrap_or(0))),
        }
    }

    fn timing(&self) -> Result<Timing> {
        match self {
            When::Every(span) => {
                let (ms, max) = (millis(*span), millis(EVERY_MAX));
                match ms {
                    1.. if ms <= max => Ok(Timing::Every(ms)),
                    _ => Err(Error::Range { what: "span between ticks in ms", value: ms, min: 1, max }),
                }
            }
            When::Cron { pattern, time_zone } => {
                check_name("cron pattern", pattern)?;
                Ok(Timing::Cron(Box::new(Cron::parse(pattern, time_zone)?)))
            }
        }
    }
}

impl From<Duration> for When {
    fn from(span: Duration) -> When {
        When::Every(span)
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When::Every(span) => write!(f, "every {span:?}"),
            When::Cron { pattern, time_zone } => write!(f, "{pattern} in {time_zone}"),
        }
    }
}

impl CatchUp {
    /// How many ticks it makes up for.
    fn count(self) -> Result<u32> {
        match self {
            CatchUp::Skip => Ok(0),
            CatchUp::One => Ok(1),
            CatchUp::All(count) => {
                check_range("ticks to catch up", i64::from(count), 1, CATCH_UP_MAX as i32)?;
                Ok(count)
            }
        }
    }

    fn of(count: u32) -> CatchUp {
        match count {
            0 => CatchUp::Skip,
            1 => CatchUp::One,
            _ => CatchUp::All(count),
        }
    }
}

impl ScheduleView {
    fn of(row: ScheduleRow) -> Result<ScheduleView> {
        let said: Said = serde_json::from_str(&row.options)?;
        Ok(ScheduleView {
            when: When::of(&row),
            name: row.name,
            queue: row.queue,
            catch_up: CatchUp::of(row.catch_up),
            next_at: row.place.next_at,
            last_at: row.place.last_at,
            payload: row.payload,
            priority: said.priority,
            route: said.route,
            key: said.key,
            group: said.group,
            gate: said.gate,
            ttl: said.ttl,
            max_attempts: said.max_attempts,
            max_deferrals: said.max_deferrals,
            retry: said.retry,
        })
    }
}

impl Schedule {
    fn new(store: Store, name: &str) -> Schedule {
        Schedule { store, name: name.into() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Stores the schedule, in place of the one of this name, and returns it as it is now.
    ///
    /// A program may do this at each of its starts: as long as `when` stays the same, the next tick stays where it is, also one
    /// that is due. Another `when` begins anew.
    ///
    /// Each message is made as `message` says, as if it were enqueued at the moment at which the tick is run. If it has a key,
    /// a tick stores nothing while the last one's message lives.
    ///
    /// # Errors
    /// [`Error::Range`] for a span or a count that is out of range; [`Error::CronPattern`] for a pattern that cannot be read, or
    /// that never comes; [`Error::TimeZone`]; [`Error::NoCron`]; [`Error::ScheduledDelay`] for a message with a delay or an
    /// instant of its own; [`Error::Text`] for a name that is empty or too long; otherwise as
    /// [`Queue::enqueue`](crate::Queue::enqueue).
    pub fn set(
        &self,
        when: impl Into<When>,
        queue: &str,
        message: impl Into<Message>,
        catch_up: CatchUp,
    ) -> Result<ScheduleView> {
        let (when, message) = (when.into(), message.into());
        check_name("schedule", &self.name)?;
        check_name("queue", queue)?;
        if message.start != Start::Now {
            return Err(Error::ScheduledDelay { schedule: self.name.to_string() });
        }
        message.check(self.store.options_used().payload_max)?;
        let timing = when.timing()?;
        // Before the lock is taken: a pattern may be searched for long.
        let now = self.store.options_used().clock.read().wall;
        let first = Place { next_at: timing.after(now)?, set_at: now, last_at: None, missed: None };
        let (every_ms, cron, time_zone) = match when {
            When::Every(span) => (Some(millis(span)), None, None),
            When::Cron { pattern, time_zone } => (None, Some(pattern), Some(time_zone)),
        };
        let wanted = ScheduleRow {
            name: self.name.to_string(),
            queue: queue.into(),
            every_ms,
            cron,
            time_zone,
            catch_up: catch_up.count()?,
            options: serde_json::to_string(&Said::of(&message))?,
            payload: message.payload,
            place: first,
        };
        let row = self.store.write(Need::Enqueue, move |tx| {
            let before = schedules::find(tx.conn, &wanted.name)?;
            let time = |row: &ScheduleRow| (row.every_ms, row.cron.clone(), row.time_zone.clone());
            let place = match &before {
                Some(before) if time(before) == time(&wanted) => before.place,
                _ => wanted.place,
            };
            let row = ScheduleRow { place, ..wanted.clone() };
            if before.as_ref() == Some(&row) {
                tx.touch = true;
            } else {
                schedules::put(tx, &row)?;
            }
            Ok(row)
        })?;
        ScheduleView::of(row)
    }

    /// Removes the schedule. Messages that it has enqueued stay. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::ReadOnly`].
    pub fn remove(&self) -> Result<bool> {
        let name = self.name.clone();
        self.store.write(Need::Settle, move |tx| schedules::remove(tx, &name))
    }
}

impl Store {
    /// The schedule of this name. Its name is judged when it is set.
    pub fn schedule(&self, name: &str) -> Schedule {
        Schedule::new(self.clone(), name)
    }

    /// Every schedule, by name.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn schedules(&self) -> Result<Vec<ScheduleView>> {
        let rows = self.read(|conn, _| schedules::all(conn))?;
        rows.into_iter().map(ScheduleView::of).collect()
    }

    /// Enqueues what the schedules have due, each in a commit of its own, and says how long it is until the next tick. A pool of
    /// workers does this by itself.
    ///
    /// It may be called at any time and by any number of processes. Whoever calls it in a loop should not sleep for longer than
    /// a minute or so, whatever [`Ticks::next`] says: a clock that is set, or a schedule that another process sets, wakes nobody.
    /// When nothing is due it writes nothing.
    ///
    /// # Errors
    /// For the whole call, as [`Store::stats`], and [`Error::ReadOnly`]; what was enqueued before the error stays so. What is
    /// wrong with one schedule is in [`Ticks::failed`] and holds up no other.
    pub fn run_schedules(&self) -> Result<Ticks> {
        let mut ticks = Ticks::default();
        for name in self.read(schedules::due)? {
            let of = name.clone();
            match self.write(Need::Enqueue, move |tx| run(tx, &of)) {
                Ok(enqueued) => ticks.enqueued += enqueued,
                Err(error @ (Error::ReadOnly { .. } | Error::FileReplaced { .. })) => return Err(error),
                Err(error) => {
                    // It concerns all of them, and each try would take as long.
                    let busy = matches!(error, Error::Busy { .. });
                    ticks.failed.push((name, error));
                    if busy {
                        break;
                    }
                }
            }
        }
        let cannot = |name: &str| ticks.failed.iter().any(|(failed, error)| failed == name && !error.is_transient());
        let next =
            self.read(|conn, now| Ok(schedules::next_tick(conn, cannot)?.map(|next_at| span(now.wall, next_at))))?;
        let soonest =
            if ticks.failed.iter().any(|(_, error)| error.is_transient()) { RETRY_AFTER } else { Duration::ZERO };
        ticks.next = next.map(|next| next.max(soonest));
        Ok(ticks)
    }
}

/// Enqueues what a schedule has due now, and has it go on. Returns how many messages were stored.
fn run(tx: &mut Tx<'_>, name: &str) -> Result<u64> {
    let now = tx.now.wall;
    let Some(row) = schedules::find(tx.conn, name)? else { return Ok(0) };
    let mut place = row.place;
    let mut enqueued = 0;
    let timing = When::of(&row).timing()?;
    if place.set_at > now {
        place.next_at = timing.clock_was_set_back(place, now)?;
        place.set_at = now;
    }
    if place.next_at <= now {
        let ticks = timing.due(place, row.catch_up, now);
        place = timing.go_on(place, &ticks, now)?;
        let message = serde_json::from_str::<Said>(&row.options)?.message(row.payload);
        for tick in ticks {
            let message = Message { tick_at: Some(tick), ..message.clone() };
            enqueued += u64::from(!enqueue::enqueue(tx, &row.queue, &message)?.existing());
        }
    }
    if place != row.place {
        schedules::go_on(tx, name, place)?;
    }
    Ok(enqueued)
}

/// [`When`], ready to be reckoned with.
#[derive(Debug, Clone)]
enum Timing {
    Every(i64),
    Cron(Box<Cron>),
}

/// What stands for a cron pattern in a build without the feature: there is none.
#[cfg(not(feature = "cron"))]
#[derive(Debug, Clone)]
enum Cron {}

#[cfg(not(feature = "cron"))]
impl Cron {
    fn parse(pattern: &str, _: &str) -> Result<Cron> {
        Err(Error::NoCron { pattern: pattern.into() })
    }

    fn next(&self, _: i64) -> Result<i64> {
        match *self {}
    }

    fn latest(&self, _: i64) -> Option<i64> {
        match *self {}
    }
}

impl Timing {
    /// The tick that follows on this instant.
    fn after(&self, at: i64) -> Result<i64> {
        match self {
            Timing::Every(ms) => Ok(at + ms),
            Timing::Cron(cron) => cron.next(at),
        }
    }

    /// The last tick up to this instant, and from `first` on, which is one.
    fn latest(&self, first: i64, at: i64) -> Option<i64> {
        match self {
            Timing::Every(ms) => (first <= at).then(|| at - (at - first) % ms),
            Timing::Cron(cron) => cron.latest(at).filter(|tick| *tick >= first),
        }
    }

    /// The ticks to be enqueued of those that are due, in their order. It takes steps for those alone, not for what was missed.
    fn due(&self, place: Place, catch_up: u32, now: i64) -> Vec<i64> {
        let mut ticks = Vec::new();
        let mut until = now;
        while ticks.len() < catch_up.max(1) as usize
            && let Some(tick) = self.latest(place.next_at, until)
        {
            until = match place.missed {
                Some((_, missed_to)) if self.is_spent(place, tick) => missed_to.min(tick),
                _ => {
                    ticks.push(tick);
                    tick
                }
            } - 1;
        }
        ticks.reverse();
        if catch_up == 0 {
            ticks.retain(|tick| now - tick <= millis(TICK_GRACE));
        }
        ticks
    }

    /// Where it goes on once these ticks are enqueued.
    fn go_on(&self, place: Place, ticks: &[i64], now: i64) -> Result<Place> {
        let first = place.next_at;
        let latest = self.latest(first, now).unwrap_or(first);
        let newest = ticks.last().copied();
        if let Timing::Every(ms) = self {
            return Ok(Place { next_at: latest + ms, set_at: now, last_at: newest.or(place.last_at), missed: None });
        }
        let next_at = self.unspent(place, self.after(latest)?)?;
        let missed = match place.missed {
            // It comes a second time to what was missed.
            Some((_, to)) if place.last_at.is_some_and(|last| first <= last) => (next_at < to).then_some((next_at, to)),
            _ if newest.is_none() || ticks.first() > Some(&first) => {
                Some((first, ticks.first().copied().unwrap_or(next_at)))
            }
            missed => missed,
        };
        Ok(Place { next_at, set_at: now, last_at: newest.max(place.last_at), missed })
    }

    /// Whether a tick was enqueued before, and the clock set back since. So it may have been if it is no later than the last
    /// one, and none of those that were missed last.
    fn is_spent(&self, place: Place, tick: i64) -> bool {
        let is_cron = !matches!(self, Timing::Every(_));
        is_cron
            && place.last_at.is_some_and(|last| tick <= last)
            && !place.missed.is_some_and(|(from, to)| (from..to).contains(&tick))
    }

    /// This tick, or the first one after it that was not enqueued.
    fn unspent(&self, place: Place, tick: i64) -> Result<i64> {
        match (place.last_at, place.missed) {
            _ if !self.is_spent(place, tick) => Ok(tick),
            (_, Some((from, _))) if tick < from => Ok(from),
            (last_at, _) => self.after(last_at.unwrap_or(tick)),
        }
    }

    /// The next tick by a clock that was set back since the next tick was set.
    fn clock_was_set_back(&self, place: Place, now: i64) -> Result<i64> {
        match self {
            Timing::Every(ms) => Ok(now + (place.next_at - place.set_at).clamp(0, *ms)),
            Timing::Cron(_) => self.unspent(place, self.after(now)?),
        }
    }
}

/// What is said of a schedule's messages, as it is stored.
#[derive(Serialize, Deserialize)]
struct Said {
    #[serde(default)]
    priority: i32,
    #[serde(default)]
    route: Route,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gate: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttl: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_attempts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_deferrals: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry: Option<Retry>,
}

impl Said {
    fn of(message: &Message) -> Said {
        Said {
            priority: message.priority,
            route: message.route,
            key: message.key.clone(),
            group: message.group.clone(),
            gate: message.gate.clone(),
            ttl: message.ttl,
            max_attempts: message.max_attempts,
            max_deferrals: message.max_deferrals,
            retry: message.retry,
        }
    }

    fn message(self, payload: Vec<u8>) -> Message {
        Message {
            priority: self.priority,
            route: self.route,
            key: self.key,
            group: self.group,
            gate: self.gate,
            ttl: self.ttl,
            max_attempts: self.max_attempts,
            max_deferrals: self.max_deferrals,
            retry: self.retry,
            ..Message::new(payload)
        }
    }
}
