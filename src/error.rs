//! What can go wrong, as variants that a caller can act on.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::message::MessageId;
use crate::receipt::Receipt;
use crate::state::Status;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call did nothing. Unless a variant says otherwise, nothing was stored and nothing changed.
///
/// It is `Clone`, because a failed group commit is told to every caller whose work was in it.
///
/// ```
/// use relet::{Error, Store};
///
/// let store = Store::open_in_memory()?;
/// match store.queue("").enqueue("hello") {
///     Err(Error::QueueName { name, .. }) => assert_eq!(name, ""),
///     other => panic!("{other:?}"),
/// }
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another process held the write lock for the whole busy wait. Call again, or raise `Options::busy_wait`.
    #[error(
        "the store is busy: another process held its write lock for {:?}; call again, or raise the busy wait",
        Duration::from_millis(.waited.as_millis() as u64)
    )]
    Busy {
        /// How long this call waited.
        waited: Duration,
    },
    /// The disk, the quota or the file's own limit is full. What is stored is intact, and can be claimed and settled; free space,
    /// then call again (not sooner than after a second).
    #[error("{}", full_text(*.needed, *.reserve, *.free, *.limit))]
    Full {
        /// Bytes that must be free before anything is enqueued again; 0 where that is not known.
        needed: u64,
        /// How many of them are set aside, so that a full disk can be drained: see [`Options::reserve`](crate::Options::reserve).
        reserve: u64,
        /// Bytes that are free on the disk now; `None` where that is not known.
        free: Option<u64>,
        /// The largest size of the file in bytes, if that is what was reached: see [`Options::file_max`](crate::Options::file_max).
        limit: Option<u64>,
    },
    /// The commit may or may not survive a crash: the system reported an error while making it durable.
    ///
    /// Repeat the call: with a `key` (enqueue) or by receipt (settle) the repeat is safe. The store has reopened its
    /// connection, and acknowledges nothing until a checkpoint has made the file whole.
    #[error(
        "the commit is indeterminate ({source}): it was not confirmed by the disk and may come back after a crash; repeat the call (safe with a key, and for settling)"
    )]
    Indeterminate {
        /// What SQLite reported.
        source: Arc<rusqlite::Error>,
    },
    /// The file, its folder or this handle is read-only.
    #[error("{path} is read-only: {detail}")]
    ReadOnly {
        /// The store's path.
        path: PathBuf,
        /// What refused the write.
        detail: String,
    },
    /// The database could not be put into WAL mode.
    #[error(
        "{path} is in journal mode {mode:?}, and could not be switched to WAL; close other connections to it and open it again"
    )]
    NotWal {
        /// The store's path.
        path: PathBuf,
        /// The journal mode it is in.
        mode: String,
    },
    /// The file was written by a newer relet. It was not touched.
    #[error("schema too new: found version {found}, this relet supports {supported}; upgrade relet")]
    SchemaTooNew {
        /// Version in the file.
        found: i64,
        /// Highest version this build knows.
        supported: i64,
    },
    /// The linked SQLite has the WAL-reset race. Use the `bundled` feature, or allow it with `Options::allow_old_sqlite`.
    #[error(
        "SQLite {found} has a WAL race that can corrupt files; relet needs {needed} or later (feature `bundled`), or Options::allow_old_sqlite(true)"
    )]
    SqliteTooOld {
        /// Version that is linked.
        found: String,
        /// Lowest version that is accepted.
        needed: &'static str,
    },
    /// The path could not be opened as a database.
    #[error("cannot open {path}: {detail}")]
    Open {
        /// The path as it was given.
        path: PathBuf,
        /// What the system or SQLite said.
        detail: String,
    },
    /// The store's file, or its log beside it, was deleted, moved or replaced while it was open. Nothing is written any more by
    /// this store. Drop every handle on it (end the process), see that the right file and its log lie at the path, and open it again.
    #[error(
        "{path} was deleted, moved or replaced while the store was open; nothing was stored, and nothing more is written; end \
         this process, or drop every handle on the store, before the path is opened again"
    )]
    FileReplaced {
        /// What was replaced: the store's file, or its log.
        path: PathBuf,
    },
    /// This process is shown another clock than those who have the store open (a time namespace, and no `/proc` that would tell by how much
    /// it differs), so that their leases cannot be read. Nothing was changed.
    #[error(
        "this process has another clock than {holder}, which has the store open, and cannot tell by how much it differs; \
         mount /proc, or run both in one time namespace, or end the other first"
    )]
    AnotherClock {
        /// Who has it open.
        holder: String,
    },
    /// The store, worker or claim was inherited over a `fork`: it is the parent's. SQLite's own lists of what it has locked are
    /// inherited, too, so that this process cannot open the file anew either: fork before it is opened, or run a new program (`exec`).
    #[error(
        "this process was forked from process {parent}, which had the store open; fork before it is opened, or run a new program"
    )]
    Forked {
        /// The process that has opened it.
        parent: u32,
    },
    /// What a payload is read from, or written to, has failed.
    #[error("{what} has failed: {source}")]
    Stream {
        /// Which one: "the payload's reader", "the payload's writer", or "the payload's temporary file", which lies in the
        /// folder of the store.
        what: &'static str,
        /// What it said.
        source: Arc<std::io::Error>,
    },
    /// The payload is larger than the store accepts.
    #[error(
        "payload too large: {size} bytes, the limit is {limit}; store it elsewhere and enqueue a reference, or raise Options::payload_max"
    )]
    PayloadTooLarge {
        /// Bytes of the payload, or so many of them as were read.
        size: usize,
        /// The limit, in bytes.
        limit: usize,
    },
    /// A queue's name is empty, too long, or has control characters.
    #[error("queue name {name:?} {problem}; use 1 to {limit} bytes without control characters")]
    QueueName {
        /// The name as given (cut if it is very long).
        name: String,
        /// What is wrong with it.
        problem: &'static str,
        /// The limit, in bytes.
        limit: usize,
    },
    /// A key, group, worker label or reason is empty, too long, or has control characters.
    #[error("{what} {value:?} {problem}; use 1 to {limit} bytes without control characters")]
    Text {
        /// Which one: "key", "group" or "worker label".
        what: &'static str,
        /// The value as given (cut if it is very long).
        value: String,
        /// What is wrong with it.
        problem: &'static str,
        /// The limit, in bytes.
        limit: usize,
    },
    /// A number is outside its range.
    #[error("{what} {value} is out of range; use {min} to {max}")]
    Range {
        /// Which one, for example "priority".
        what: &'static str,
        /// The value as given.
        value: i64,
        /// Lowest accepted value.
        min: i64,
        /// Highest accepted value.
        max: i64,
    },
    /// The receipt is no longer the newest one, or its claim was ended by somebody else. Nothing was changed. Drop the work.
    #[error("claim lost: receipt {receipt} is stale; {now}")]
    Stale {
        /// The receipt that was used.
        receipt: Receipt,
        /// Where the message is now.
        now: Whereabouts,
    },
    /// The message was cancelled while it was held. Drop the work.
    #[error("message {id} was cancelled while it was held")]
    Cancelled {
        /// The message.
        id: MessageId,
    },
    /// There is no such message (any more).
    #[error("message {id} is not in the store")]
    Gone {
        /// The message.
        id: MessageId,
    },
    /// The message is not in a status from which this can be done.
    #[error("message {id} is {status}: it cannot be {wanted}")]
    Status {
        /// The message.
        id: MessageId,
        /// The status it has.
        status: Status,
        /// What was asked for, as a participle: "redriven", "cancelled", "routed".
        wanted: &'static str,
    },
    /// The dead letter cannot be redriven: a live message of its queue has its key by now.
    #[error("key taken: live message {id} has the key {key:?}; settle or cancel it first")]
    KeyTaken {
        /// The live message with the key.
        id: MessageId,
        /// The key.
        key: String,
    },
    /// This start of the worker is over: the machine was restarted, its lock file was removed, or the label was started again since. Start the worker again.
    #[error(
        "this start of worker {label:?} is over: it may settle what it holds, but not claim; start the worker again"
    )]
    Superseded {
        /// The worker's label.
        label: String,
    },
    /// A worker with this label is running already, in this or another process, or a command that it has shared its lock with.
    /// Choose another label, or stop that one.
    #[error(
        "label {label:?} belongs to a running worker (process {pid}, started at {started_at}) or to a command that it has started; stop it or choose another label"
    )]
    LabelTaken {
        /// The label.
        label: String,
        /// The process that runs it.
        pid: u32,
        /// When it was started, in unix ms.
        started_at: i64,
    },
    /// The connection that was passed in is on another database than this store.
    #[error("that connection's main database is not this store's file; open the transaction on {path}")]
    WrongFile {
        /// The store's path.
        path: PathBuf,
    },
    /// A `*_in` call needs a transaction that holds the write lock from its start.
    #[error("that connection is not in a write transaction; begin it with TransactionBehavior::Immediate")]
    NotImmediate,
    /// The payload is not the JSON that was asked for, or a value could not be written as JSON.
    #[error("JSON: {0}")]
    Json(Arc<serde_json::Error>),
    /// A receipt, status or other text form could not be read.
    #[error("{what} {value:?} cannot be read; {expected}")]
    Parse {
        /// What was to be read.
        what: &'static str,
        /// The text as given.
        value: String,
        /// The form that is expected.
        expected: &'static str,
    },
    /// The target of a backup exists, or cannot be written.
    #[error("cannot back up to {path}: {detail}")]
    Backup {
        /// The target.
        path: PathBuf,
        /// What is in the way.
        detail: String,
    },
    /// A store cannot be replaced while somebody has it open.
    #[error("{path} is in use: {detail}, and call again")]
    InUse {
        /// The store.
        path: PathBuf,
        /// Who has it open, and what to do.
        detail: &'static str,
    },
    /// A store could not be restored; it is as it was.
    #[error("cannot restore {path}: {detail}")]
    Restore {
        /// The store that was to be replaced.
        path: PathBuf,
        /// What is in the way, and what to do.
        detail: String,
    },
    /// The message is none that a store takes over from another one.
    #[error("the message cannot be imported: {problem}")]
    NotImported {
        /// What is wrong with it, and what to do.
        problem: &'static str,
    },
    /// The file is damaged. Run `relet doctor`, restore a backup.
    #[error("the store is damaged: {detail}; run `relet doctor`")]
    Corrupt {
        /// What was found.
        detail: String,
    },
    /// The operation panicked; it undid itself. This is a defect of relet.
    #[error("the operation panicked and was undone; this is a defect of relet: {detail}")]
    Panicked {
        /// The panic's message.
        detail: String,
    },
    /// A cron pattern cannot be read, or never comes.
    #[error(
        "cron pattern {pattern:?} cannot be used: {problem}; write `minute hour day-of-month month day-of-week` (with seconds, those first), such as \"0 3 * * *\""
    )]
    CronPattern {
        /// The pattern as given.
        pattern: String,
        /// What is wrong with it.
        problem: String,
    },
    /// There is no such time zone.
    #[error("time zone {name:?} is not known; use a name of the IANA database, such as \"Europe/Berlin\" or \"UTC\"")]
    TimeZone {
        /// The name as given.
        name: String,
    },
    /// A cron schedule was met by a build without the feature `cron`. It was left as it is.
    #[error("cron pattern {pattern:?} cannot be read by this build; build relet with the feature `cron`")]
    NoCron {
        /// The pattern.
        pattern: String,
    },
    /// The message of a schedule has a delay or an instant of its own.
    #[error("schedule {schedule:?}: its ticks say when its messages come; leave out the message's `delay` or `at`")]
    ScheduledDelay {
        /// The schedule.
        schedule: String,
    },
    /// A thread could not be started.
    #[error("a thread could not be started: {detail}; raise the limit on this process's threads, or stop some")]
    Thread {
        /// What the system said.
        detail: String,
    },
    /// Anything else that SQLite or the reader pool reported.
    #[error("SQLite: {0}")]
    Sqlite(Arc<rusqlite::Error>),
    /// No reader connection became free in time.
    #[error("no reader became free: {detail}; raise Options::readers")]
    Pool {
        /// What the pool said.
        detail: String,
    },
}

/// Where a message is now, told to whoever holds a stale receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whereabouts {
    /// Its status.
    pub status: Status,
    /// The worker that holds it, or that it is kept for.
    pub worker: Option<String>,
}

impl std::fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.worker {
            Some(worker) => write!(f, "the message is {}, held by worker {worker:?}", self.status),
            None => write!(f, "the message is {}", self.status),
        }
    }
}

impl Error {
    /// Whether the claim that this call was made with is lost, so that its work should be dropped.
    pub fn is_claim_lost(&self) -> bool {
        matches!(self, Error::Stale { .. } | Error::Cancelled { .. } | Error::Gone { .. })
    }

    /// Whether the same call may well succeed a little later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Error::Busy { .. } | Error::Full { .. } | Error::Indeterminate { .. } | Error::Pool { .. })
    }
}

/// The sentence of [`Error::Full`].
fn full_text(needed: u64, reserve: u64, free: Option<u64>, limit: Option<u64>) -> String {
    if let Some(limit) = limit {
        return format!(
            "the file is full: nothing was stored; it may have {limit} bytes; claim and settle what it holds, prune it, or raise Options::file_max"
        );
    }
    let mut text = "the disk is full: nothing was stored".to_owned();
    if let Some(free) = free {
        text += &format!("; {free} bytes are free on it");
    }
    if needed > 0 {
        text += &format!("; {needed} are needed");
    }
    if reserve > 0 {
        text += &format!(
            ", of which {reserve} are set aside so that what is stored can be claimed and settled on a full disk (Options::reserve)"
        );
    }
    text + "; free space, or claim, settle and prune what is stored, and call again"
}

fn extended_code(error: &rusqlite::Error) -> Option<i32> {
    error.sqlite_error().map(|error| error.extended_code)
}

impl Error {
    /// There is no room, and nothing more is known.
    pub(crate) fn full() -> Error {
        Error::Full { needed: 0, reserve: 0, free: None, limit: None }
    }

    /// Whether a row could not be read, or is not what its place says: damage that a sweep may set aside.
    pub(crate) fn is_damage(&self) -> bool {
        use rusqlite::Error::{FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType};
        match self {
            Error::Corrupt { .. } => true,
            Error::Sqlite(error) => {
                matches!(**error, FromSqlConversionFailure(..) | IntegralValueOutOfRange(..) | InvalidColumnType(..))
            }
            _ => false,
        }
    }

    /// What is told where something was committed, and then could not be brought to the disk: whether it survives is not known.
    pub(crate) fn unconfirmed(self) -> Error {
        let code = match self {
            Error::Sqlite(source) => return Error::Indeterminate { source },
            Error::Busy { .. } => rusqlite::ffi::SQLITE_BUSY,
            Error::Full { .. } => rusqlite::ffi::SQLITE_FULL,
            other => return other,
        };
        let source = Arc::new(rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None));
        Error::Indeterminate { source }
    }
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Error {
        use rusqlite::ErrorCode::*;
        match error.sqlite_error_code() {
            Some(DatabaseBusy | DatabaseLocked) => Error::Busy { waited: Duration::ZERO },
            Some(DiskFull) => Error::full(),
            // The index of the log could not be made larger: only a full disk does that.
            Some(SystemIoFailure) if extended_code(&error) == Some(rusqlite::ffi::SQLITE_IOERR_SHMSIZE) => {
                Error::full()
            }
            Some(DatabaseCorrupt | NotADatabase) => Error::Corrupt { detail: error.to_string() },
            _ => Error::Sqlite(Arc::new(error)),
        }
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Error {
        Error::Json(Arc::new(error))
    }
}
