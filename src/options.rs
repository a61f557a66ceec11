//! How a store is opened.

use std::time::Duration;

use crate::clock::Clock;
use crate::error::Result;
use crate::message::{ATTEMPTS_MAX, PAYLOAD_MAX, PAYLOAD_MAX_LIMIT, check_range};
use crate::retry::Retry;

/// Shortest and longest lease.
pub const LEASE_RANGE: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(366 * 86_400);
/// How long a due deferred message is still kept for its own worker, before anyone may take it.
pub const DEFERRAL_GRACE: Duration = Duration::from_secs(30);

/// Longest busy wait: a day.
const BUSY_WAIT_MAX_MS: i32 = 86_400_000;

/// Bytes set aside beside a store unless [`Options::reserve`] says otherwise: what the log grows to between two checkpoints, and a little more.
pub const RESERVE: u64 = 4_352 << 10;

/// Bytes of the log beyond which readers are held up for a moment, unless [`Options::log_max`] says otherwise.
const LOG_MAX: u64 = 64 << 20;

/// What a commit survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// What a call has returned survives a power cut: one `fsync` per commit. The default.
    #[default]
    Full,
    /// A power cut may lose the last commits, never the file; the death of a process loses nothing.
    Normal,
}

/// The settings of a store, with their defaults; the ways to open it are at the end.
///
/// ```
/// use std::time::Duration;
/// use relet::{Durability, Store};
///
/// let store = Store::options()
///     .durability(Durability::Normal)
///     .lease(Duration::from_secs(120))
///     .retention(Duration::from_secs(86_400))
///     .open_in_memory()?;
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "options do nothing until a store is opened with them"]
pub struct Options {
    pub(crate) durability: Durability,
    pub(crate) busy_wait: Duration,
    pub(crate) readers: u32,
    pub(crate) lease: Duration,
    pub(crate) retry: Retry,
    pub(crate) max_attempts: u32,
    pub(crate) payload_max: usize,
    pub(crate) retention: Duration,
    pub(crate) stuck_after: Duration,
    pub(crate) checkpoints: bool,
    /// `None`: what the file says, or what fits.
    pub(crate) reserve: Option<u64>,
    /// `None`: what the file says.
    pub(crate) file_max: Option<u64>,
    pub(crate) log_max: u64,
    pub(crate) private: bool,
    pub(crate) allow_old_sqlite: bool,
    pub(crate) clock: Clock,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            durability: Durability::Full,
            busy_wait: Duration::from_secs(5),
            readers: 4,
            lease: Duration::from_secs(60),
            retry: Retry::default(),
            max_attempts: ATTEMPTS_MAX,
            payload_max: PAYLOAD_MAX,
            retention: Duration::ZERO,
            stuck_after: Duration::from_secs(3600),
            checkpoints: true,
            reserve: None,
            file_max: None,
            log_max: LOG_MAX,
            private: true,
            allow_old_sqlite: false,
            clock: Clock::system(),
        }
    }
}

impl Options {
    /// What a commit survives; [`Durability::Full`] unless set.
    pub fn durability(self, durability: Durability) -> Options {
        Options { durability, ..self }
    }

    /// How long a call waits for another process's write lock before it returns [`Error::Busy`](crate::Error::Busy); 5 s unless set, at most a day.
    pub fn busy_wait(self, busy_wait: Duration) -> Options {
        Options { busy_wait, ..self }
    }

    /// Most connections that look into the file at the same time (stats, list, show …); 4 unless set, 1 to 64.
    pub fn readers(self, readers: u32) -> Options {
        Options { readers, ..self }
    }

    /// How long a claim holds without being extended; 60 s unless set, within [`LEASE_RANGE`]. A worker and a queue may have their own.
    pub fn lease(self, lease: Duration) -> Options {
        Options { lease, ..self }
    }

    /// How failed messages back off, unless the message or its queue says otherwise.
    pub fn retry(self, retry: Retry) -> Options {
        Options { retry, ..self }
    }

    /// How often a message is tried, unless it or its queue says otherwise; 25 unless set, at least 1.
    pub fn max_attempts(self, max: u32) -> Options {
        Options { max_attempts: max, ..self }
    }

    /// Largest payload, in bytes; 16 MiB unless set, at most 900 MiB.
    pub fn payload_max(self, bytes: usize) -> Options {
        Options { payload_max: bytes, ..self }
    }

    /// How long messages that are acked or cancelled from now on are kept; it is stored with each of them. Unless set, an acked message is deleted at once and a cancelled one kept for a day, so that its holder learns of it.
    pub fn retention(self, retention: Duration) -> Options {
        Options { retention, ..self }
    }

    /// From when on a message in `processing` whose lease has run out counts as stuck in [`Stats`](crate::Stats); 1 hour unless set.
    pub fn stuck_after(self, age: Duration) -> Options {
        Options { stuck_after: age, ..self }
    }

    /// Whether relet moves the write-ahead log into the file itself (the default), or leaves that to another tool.
    pub fn checkpoints(self, on: bool) -> Options {
        Options { checkpoints: on, ..self }
    }

    /// Bytes that are set aside in a file beside the store, so that it can still be emptied when the disk is full; 0 for none.
    ///
    /// It is stored in the file, and holds for every process that opens it from then on. Unless it was ever set, it is decided
    /// when the store is made: [`RESERVE`], but at most a quarter of what is free on the disk, and nothing below 128 KiB.
    pub fn reserve(self, bytes: u64) -> Options {
        Options { reserve: Some(bytes), ..self }
    }

    /// Largest size of the file, in bytes, its log not counted; a message that would make it larger is refused with [`Error::Full`](crate::Error::Full).
    ///
    /// It is stored in the file, and holds for every process that opens it from then on. There is none unless it was set; 0 takes
    /// it back.
    pub fn file_max(self, bytes: u64) -> Options {
        Options { file_max: Some(bytes), ..self }
    }

    /// Bytes of the write-ahead log beyond which looks of this process are held up for a moment (at most 0.1 s), so that the log can be
    /// begun again; 64 MiB unless set.
    ///
    /// A look that begins before the one before it has ended keeps the log from being begun again, and it grows meanwhile. It may
    /// become longer than this while a single look takes long, such as a backup, or while another process looks.
    pub fn log_max(self, bytes: u64) -> Options {
        Options { log_max: bytes, ..self }
    }

    /// Whether a file that relet creates is readable by its owner only (mode 0600, the default), or by the process's umask. Unix only.
    pub fn private(self, on: bool) -> Options {
        Options { private: on, ..self }
    }

    /// Opens with a linked SQLite older than 3.51.3, which has a race that can corrupt files in WAL mode. Off unless set.
    pub fn allow_old_sqlite(self, on: bool) -> Options {
        Options { allow_old_sqlite: on, ..self }
    }

    /// Where time comes from: the system, unless a test sets its own clock.
    pub fn clock(self, clock: Clock) -> Options {
        Options { clock, ..self }
    }

    pub(crate) fn check(&self) -> Result<()> {
        check_lease(self.lease)?;
        let busy_ms = i64::try_from(self.busy_wait.as_millis()).unwrap_or(i64::MAX);
        check_range("busy_wait in ms", busy_ms, 0, BUSY_WAIT_MAX_MS)?;
        check_range("readers", i64::from(self.readers), 1, 64)?;
        check_range("max_attempts", i64::from(self.max_attempts), 1, i32::MAX)?;
        check_range(
            "payload_max",
            i64::try_from(self.payload_max).unwrap_or(i64::MAX),
            0,
            i32::try_from(PAYLOAD_MAX_LIMIT).unwrap_or(i32::MAX),
        )?;
        // They are stored in the file, as SQLite's integers.
        for (what, bytes) in [("reserve", self.reserve), ("file_max", self.file_max)] {
            check_size(what, bytes)?;
        }
        Ok(())
    }
}

fn check_size(what: &'static str, bytes: Option<u64>) -> Result<()> {
    match bytes {
        Some(bytes) if i64::try_from(bytes).is_err() => {
            Err(crate::error::Error::Range { what, value: i64::MAX, min: 0, max: i64::MAX - 1 })
        }
        _ => Ok(()),
    }
}

/// Refuses a lease outside [`LEASE_RANGE`], naming milliseconds.
pub(crate) fn check_lease(lease: Duration) -> Result<()> {
    if LEASE_RANGE.contains(&lease) {
        return Ok(());
    }
    let ms = |span: &Duration| i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
    Err(crate::error::Error::Range {
        what: "lease in ms",
        value: ms(&lease),
        min: ms(LEASE_RANGE.start()),
        max: ms(LEASE_RANGE.end()),
    })
}
