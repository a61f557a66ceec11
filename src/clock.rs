//! The only reader of clocks. Below it, time is an argument.
//!
//! Two clocks are read together. Due times are *wall* time. Leases are *awake* time: how long this machine has been running
//! since its boot, sleep not counted (`CLOCK_MONOTONIC`), together with the kernel's boot id. So a wall clock that jumps
//! ends no lease, a laptop that sleeps loses no claim, and a reboot is noticed. On platforms other than Linux and Android
//! leases run on the wall clock, and a reboot is not noticed.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

/// The last instant that is accepted: the end of the year 9999, in unix ms. Later ones count as this one. What is closed or
/// paused without an end is so until then.
pub const INSTANT_MAX: i64 = 253_402_300_799_999;

/// The time of one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Now {
    /// Unix ms.
    pub wall: i64,
    /// Ms on the clock that leases run on.
    pub awake: i64,
}

impl Now {
    /// The wall clock's instant after `delay`, bounded.
    pub(crate) fn after(self, delay: Duration) -> i64 {
        self.wall.saturating_add(millis(delay)).min(INSTANT_MAX)
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
    System {
        boot: Arc<str>,
    },
    #[cfg_attr(not(feature = "testing"), allow(dead_code))]
    Manual(Arc<Mutex<Manual>>),
}

#[derive(Debug)]
struct Manual {
    wall: i64,
    awake: i64,
    boots: u32,
}

/// The boot id of platforms that have none.
const WALL_BOOT: &str = "wall clock";

impl Clock {
    /// The system's clocks.
    pub fn system() -> Clock {
        Clock(Source::System { boot: boot_id().unwrap_or_else(|| WALL_BOOT.into()) })
    }

    pub(crate) fn now(&self) -> Now {
        match &self.0 {
            Source::System { boot } => {
                let wall = system_wall();
                Now { wall, awake: if **boot == *WALL_BOOT { wall } else { system_awake() } }
            }
            Source::Manual(manual) => {
                let manual = manual.lock();
                Now { wall: manual.wall, awake: manual.awake }
            }
        }
    }

    /// Which boot of the machine this is. Never empty.
    pub(crate) fn boot(&self) -> Arc<str> {
        match &self.0 {
            Source::System { boot } => boot.clone(),
            Source::Manual(manual) => format!("manual boot {}", manual.lock().boots).into(),
        }
    }
}

/// Clocks for tests.
#[cfg(feature = "testing")]
impl Clock {
    /// A clock that stands still until it is moved; all clones are one clock. It starts at the system's wall time.
    pub fn manual() -> Clock {
        Clock(Source::Manual(Arc::new(Mutex::new(Manual { wall: system_wall(), awake: 1_000_000, boots: 1 }))))
    }

    /// Time passes: both clocks go on.
    ///
    /// # Panics
    /// On the system's clock, as do the other methods that move it.
    pub fn advance(&self, by: Duration) {
        self.with(|manual| {
            manual.wall = manual.wall.saturating_add(millis(by)).min(INSTANT_MAX);
            manual.awake = manual.awake.saturating_add(millis(by));
        });
    }

    /// Only the wall clock is moved, forward or back, by this many milliseconds: NTP, or a hand on the clock.
    pub fn set_wall_by(&self, ms: i64) {
        self.with(|manual| manual.wall = manual.wall.saturating_add(ms).clamp(0, INSTANT_MAX));
    }

    /// The machine sleeps: wall time passes, awake time does not.
    pub fn sleep_machine(&self, by: Duration) {
        self.with(|manual| manual.wall = manual.wall.saturating_add(millis(by)).min(INSTANT_MAX));
    }

    /// The machine is restarted: a new boot id, and awake time starts again.
    pub fn reboot(&self) {
        self.with(|manual| {
            manual.boots += 1;
            manual.awake = 1_000;
        });
    }

    /// Unix ms.
    pub fn wall_ms(&self) -> i64 {
        self.now().wall
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
fn system_awake() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec * 1000 + time.tv_nsec / 1_000_000
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn system_awake() -> i64 {
    system_wall()
}

/// The kernel's id of this boot.
fn boot_id() -> Option<Arc<str>> {
    if !cfg!(any(target_os = "linux", target_os = "android")) {
        return None;
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim()).filter(|id| !id.is_empty()).map(Arc::from)
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
