//! The only reader of clocks. Below it, time is an argument.
//!
//! Three clocks are read together ([`Reading`]):
//!
//! * *awake*: how long this machine has been running since its boot, sleep not counted (`CLOCK_MONOTONIC`). Leases run on it, so
//!   a laptop that sleeps loses no claim.
//! * *up*: the same, sleep counted (`CLOCK_BOOTTIME`). The *store's time* is made of it ([`Timeline`]): it is the wall clock as it
//!   was when the store was first opened, and goes on with the machine, whatever is done to the wall clock since. Every wait, age
//!   and time to live is measured on it, so a clock that is wrong for a moment ends none, destroys none and stretches none.
//! * *wall*: the system's date. Only what is meant by the calendar is compared with it: a message's `at`, and schedules. What is
//!   shown is the store's time, moved by as much as the wall clock has been set since.
//!
//! In a time namespace the kernel adds an offset to the first two; it is taken off again, so that all processes of one machine read
//! the same. On platforms other than Linux and Android all three are the wall clock.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

/// The last instant that is accepted: the end of the year 9999, in unix ms. Later ones count as this one. What is closed or
/// paused without an end is so until then.
pub const INSTANT_MAX: i64 = 253_402_300_799_999;

/// What the system's clocks say, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Unix ms.
    pub(crate) wall: i64,
    /// Since the boot, sleep counted.
    pub(crate) up: i64,
    /// Since the boot, sleep not counted.
    pub(crate) awake: i64,
}

/// How the store's time follows from a reading. It is kept in the file, so that all processes agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Timeline {
    /// What the store's time is more than `up`, in this boot.
    pub(crate) base: i64,
    /// What the wall clock is more than the store's time: nothing, until somebody sets the clock.
    pub(crate) skew: i64,
    /// The most that this has ever been. (A clock that is behind for a while and comes right again is no time that has passed.)
    pub(crate) ahead: i64,
}

/// The wall clock counts as set when it differs by so much from what it should be.
const SET_MS: i64 = 1_000;

impl Timeline {
    /// In a boot that has just begun, or may have: the store's time goes on from where it was `seen` last, or from what the wall
    /// clock says if that is later: less as much as the wall clock has ever been ahead of it.
    pub(crate) fn begin(reading: Reading, seen: i64, before: Timeline) -> Timeline {
        let time = reading.wall.saturating_sub(before.ahead.max(0)).clamp(seen.max(0), INSTANT_MAX.max(seen));
        Timeline { base: time - reading.up, ..before }.follow(reading)
    }

    /// The same, once somebody has set the wall clock.
    pub(crate) fn follow(self, reading: Reading) -> Timeline {
        let skew = reading.wall.saturating_sub(self.time(reading));
        if (skew - self.skew).abs() < SET_MS { self } else { Timeline { skew, ahead: self.ahead.max(skew), ..self } }
    }

    fn time(self, reading: Reading) -> i64 {
        reading.up.saturating_add(self.base)
    }

    pub(crate) fn now(self, reading: Reading) -> Now {
        let Timeline { skew, .. } = self.follow(reading);
        Now { time: self.time(reading), wall: reading.wall, awake: reading.awake, skew }
    }
}

/// The time of one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Now {
    /// The store's time, in unix ms: every instant in the file is on it, unless its column says otherwise. It never runs back.
    pub(crate) time: i64,
    /// The system's date, in unix ms.
    pub(crate) wall: i64,
    /// Ms on the clock that leases run on.
    pub(crate) awake: i64,
    /// What the wall clock is more than the store's time.
    pub(crate) skew: i64,
}

impl Now {
    /// The instant after `delay`, bounded.
    pub(crate) fn after(self, delay: Duration) -> i64 {
        self.time.saturating_add(millis(delay)).min(INSTANT_MAX)
    }

    /// An instant of the store's time, as the wall clock names it now.
    pub(crate) fn shown(self, instant: i64) -> i64 {
        if instant >= INSTANT_MAX { instant } else { instant.saturating_add(self.skew).clamp(0, INSTANT_MAX) }
    }

    /// The instant of the store's time that is shown as this one: what [`Now::shown`] made of it, undone.
    pub(crate) fn of_shown(self, shown: i64) -> i64 {
        if shown >= INSTANT_MAX { shown } else { shown.saturating_sub(self.skew).clamp(0, INSTANT_MAX) }
    }

    /// An instant of the wall clock, as the store's time names it now.
    pub(crate) fn of_wall(self, instant: i64) -> i64 {
        if instant >= INSTANT_MAX { instant } else { self.time.saturating_add(instant - self.wall) }
    }

    #[cfg(test)]
    pub(crate) fn of(time: i64, awake: i64) -> Now {
        Now { time, wall: time, awake, skew: 0 }
    }
}

/// Where a store's time comes from: the system, or with the feature `testing` a clock that a test moves by hand.
///
/// ```
/// use std::time::Duration;
/// use relet::{Clock, Message, Store};
///
/// # #[cfg(feature = "testing")] {
/// let clock = Clock::manual();
/// let store = Store::options().clock(clock.clone()).open_in_memory()?;
/// store.queue("mail").enqueue(Message::new("later").delay(Duration::from_secs(3600)))?;
///
/// let worker = store.worker("w")?;
/// assert!(worker.claim("mail")?.is_none());
/// clock.advance(Duration::from_secs(3600));
/// assert!(worker.claim("mail")?.is_some());
/// # }
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    System(View),
    #[cfg_attr(not(feature = "testing"), allow(dead_code))]
    Manual(Arc<Mutex<Manual>>),
}

/// What this process can see of the machine's clocks.
#[derive(Debug, Clone)]
struct View {
    boot: Option<Arc<str>>,
    /// What its time namespace adds to `awake` and to `up`, in ms; `None`: that cannot be read.
    offsets: Option<(i64, i64)>,
}

#[derive(Debug)]
struct Manual {
    wall: i64,
    up: i64,
    awake: i64,
    boots: u32,
}

impl Clock {
    /// The system's clocks.
    pub fn system() -> Clock {
        Clock(Source::System(View { boot: boot_id(), offsets: offsets() }))
    }

    pub(crate) fn read(&self) -> Reading {
        match &self.0 {
            Source::System(view) => system(view.offsets.unwrap_or((0, 0))),
            Source::Manual(manual) => {
                let manual = manual.lock();
                Reading { wall: manual.wall, up: manual.up, awake: manual.awake }
            }
        }
    }

    /// Which boot of the machine this is, as far as this process can see; never empty.
    pub(crate) fn boot(&self) -> Option<Arc<str>> {
        match &self.0 {
            Source::System(view) => view.boot.clone(),
            Source::Manual(manual) => Some(format!("manual boot {}", manual.lock().boots).into()),
        }
    }

    /// Whether another boot of this clock is a proof by itself: a test's clock knows what it does.
    pub(crate) fn knows_its_boots(&self) -> bool {
        matches!(&self.0, Source::Manual(_))
    }

    /// Whether what it reads is the same for every process of the machine.
    pub(crate) fn is_the_machines(&self) -> bool {
        match &self.0 {
            Source::System(view) => view.offsets.is_some(),
            Source::Manual(_) => true,
        }
    }
}

/// Clocks for tests.
#[cfg(feature = "testing")]
impl Clock {
    /// A clock that stands still until it is moved; all clones are one clock. It starts at the system's wall time.
    pub fn manual() -> Clock {
        Clock(Source::Manual(Arc::new(Mutex::new(Manual {
            wall: system_wall(),
            up: 1_000_000,
            awake: 1_000_000,
            boots: 1,
        }))))
    }

    /// Time passes: all clocks go on.
    ///
    /// # Panics
    /// On the system's clock, as do the other methods that move it.
    pub fn advance(&self, by: Duration) {
        self.with(|manual| {
            manual.wall = manual.wall.saturating_add(millis(by)).min(INSTANT_MAX);
            manual.up = manual.up.saturating_add(millis(by));
            manual.awake = manual.awake.saturating_add(millis(by));
        });
    }

    /// Only the wall clock is moved, forward or back, by this many milliseconds: NTP, or a hand on the clock.
    pub fn set_wall_by(&self, ms: i64) {
        self.with(|manual| manual.wall = manual.wall.saturating_add(ms).clamp(0, INSTANT_MAX));
    }

    /// The machine sleeps: wall time passes, awake time does not.
    pub fn sleep_machine(&self, by: Duration) {
        self.with(|manual| {
            manual.wall = manual.wall.saturating_add(millis(by)).min(INSTANT_MAX);
            manual.up = manual.up.saturating_add(millis(by));
        });
    }

    /// The machine is restarted: a new boot id, and the time since the boot starts again.
    pub fn reboot(&self) {
        self.with(|manual| {
            manual.boots += 1;
            manual.up = 1_000;
            manual.awake = 1_000;
        });
    }

    /// Unix ms.
    pub fn wall_ms(&self) -> i64 {
        self.read().wall
    }

    fn with(&self, change: impl FnOnce(&mut Manual)) {
        match &self.0 {
            Source::Manual(manual) => change(&mut manual.lock()),
            Source::System { .. } => panic!("only a manual clock can be moved"),
        }
    }
}

impl Default for Clock {
    fn default() -> Clock {
        Clock::system()
    }
}

/// Whole milliseconds, at most the last accepted instant. Rounded up, so that no wait is shorter than it was meant to be.
pub(crate) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(INSTANT_MAX).min(INSTANT_MAX)
}

/// Unix ms of an instant, rounded up; before 1970 counts as 0.
pub(crate) fn unix_ms(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).map_or(0, millis)
}

/// The span from `from` to `to`, both in ms; nothing where it would be negative.
pub(crate) fn span(from: i64, to: i64) -> Duration {
    Duration::from_millis(u64::try_from(to.saturating_sub(from)).unwrap_or(0))
}

#[allow(clippy::disallowed_methods, reason = "this is the one place that reads the wall clock")]
fn system_wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(INSTANT_MAX)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn system((awake, up): (i64, i64)) -> Reading {
    use rustix::time::{ClockId, clock_gettime};
    let read = |clock: ClockId, offset: i64| {
        let time = clock_gettime(clock);
        time.tv_sec * 1000 + time.tv_nsec / 1_000_000 - offset
    };
    Reading { wall: system_wall(), up: read(ClockId::Boottime, up), awake: read(ClockId::Monotonic, awake) }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn system(_: (i64, i64)) -> Reading {
    let wall = system_wall();
    Reading { wall, up: wall, awake: wall }
}

/// The kernel's id of this boot, where it can be read.
fn boot_id() -> Option<Arc<str>> {
    if !cfg!(any(target_os = "linux", target_os = "android")) {
        return None;
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim()).filter(|id| !id.is_empty()).map(Arc::from)
}

/// What the time namespace of this process adds to the time since the boot (time_namespaces(7)), in ms: to the one that sleep is
/// not counted in, and to the other.
fn offsets() -> Option<(i64, i64)> {
    if !cfg!(any(target_os = "linux", target_os = "android")) {
        return Some((0, 0));
    }
    // The file tells those of the namespace that children of this process get.
    let namespace = |name| std::fs::read_link(name).ok();
    if namespace("/proc/self/ns/time") != namespace("/proc/self/ns/time_for_children") {
        return None;
    }
    match std::fs::read_to_string("/proc/self/timens_offsets") {
        Ok(text) => Some(parse_offsets(&text)),
        // The process can be seen, and its namespace has none: a kernel without time namespaces.
        Err(_) if std::fs::symlink_metadata("/proc/self/stat").is_ok() => Some((0, 0)),
        Err(_) => None,
    }
}

/// Lines of a clock's name or number, seconds and nanoseconds.
fn parse_offsets(text: &str) -> (i64, i64) {
    let mut offsets = (0, 0);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (clock, seconds) = (words.next(), words.next().and_then(|word| word.parse::<i64>().ok()));
        let nanos = words.next().and_then(|word| word.parse::<i64>().ok());
        let ms = seconds.unwrap_or(0).saturating_mul(1000) + nanos.unwrap_or(0) / 1_000_000;
        match clock {
            Some("monotonic" | "1") => offsets.0 = ms,
            Some("boottime" | "7") => offsets.1 = ms,
            _ => {}
        }
    }
    offsets
}

/// Waits of the writer between two tries for the lock, measured here so that no other file reads a clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(std::time::Instant);

impl Stopwatch {
    #[allow(clippy::disallowed_methods, reason = "this is the one place that reads the monotonic clock")]
    pub(crate) fn start() -> Stopwatch {
        Stopwatch(std::time::Instant::now())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_found_again_however_the_clock_was_set() {
        for skew in [-3_600_000, -1, 0, 1, 86_400_000] {
            let now = Now { time: 1_700_000_000_000, wall: 1_700_000_000_000 + skew, awake: 0, skew };
            for instant in [100_000_000, now.time, now.wall, INSTANT_MAX] {
                assert_eq!(now.of_shown(now.shown(instant)), instant, "{skew}");
            }
        }
    }

    #[test]
    fn the_offsets_of_a_time_namespace_are_read() {
        assert_eq!(parse_offsets("monotonic           0         0\nboottime            0         0\n"), (0, 0));
        assert_eq!(parse_offsets("monotonic      100000 500000000\nboottime       -7 0\n"), (100_000_500, -7_000));
        assert_eq!(parse_offsets("1 5 0\n7 6 0\n"), (5_000, 6_000));
        assert_eq!(parse_offsets("nothing to be read"), (0, 0));
    }

    const NOON: i64 = 1_800_000_000_000;

    #[test]
    fn the_stores_time_goes_on_with_the_machine_whatever_the_wall_clock_does() {
        let reading = |wall, up| Reading { wall, up, awake: up };
        let line = Timeline::begin(reading(NOON, 5_000), 0, Timeline::default());
        assert_eq!(line.now(reading(NOON, 5_000)).time, NOON);
        for wall in [0, NOON, NOON - 86_400_000, INSTANT_MAX, NOON + 1_000] {
            let now = line.now(reading(wall, 6_000));
            assert_eq!((now.time, now.wall), (NOON + 1_000, wall));
            assert_eq!(now.shown(now.time), wall, "it is shown as the clock stands now");
            assert_eq!(line.follow(reading(wall, 6_000)).now(reading(wall, 6_000)), now);
        }
    }

    #[test]
    fn after_a_boot_it_goes_on_from_where_it_was_or_from_the_wall_clock_if_that_is_later() {
        let boot = Reading { wall: NOON, up: 100, awake: 100 };
        let none = Timeline::default();
        assert_eq!(Timeline::begin(boot, NOON - 5, none).now(boot).time, NOON);
        assert_eq!(Timeline::begin(boot, NOON + 5, none).now(boot).time, NOON + 5);
        assert_eq!(Timeline::begin(Reading { wall: 0, ..boot }, NOON, none).now(boot).time, NOON, "no battery");
        // The clock was set ahead by an hour in the boot before, and set back by years since: neither has passed.
        let ahead = Timeline { skew: -i64::from(u32::MAX) * 100, ahead: 3_600_000, ..none };
        assert_eq!(Timeline::begin(boot, NOON - 4_000_000, ahead).now(boot).time, NOON - 3_600_000);
    }
}
