//! What the benches compare: relet, and two queues that are written by hand on rusqlite.
//!
//! * [`Relet`] through its public API, as a program uses it;
//! * [`Raw`](raw::Raw): relet's own tables, indexes and counters, with the statements inlined for this one case, one
//!   transaction an operation, one connection behind a mutex. Relet's time over raw's is what relet itself costs;
//! * [`Bare`](bare::Bare): a table of id, status and payload with one index, the least that can be called a queue: the
//!   floor.

#![allow(dead_code, reason = "each bench uses a part of this")]

pub mod bare;
pub mod raw;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use relet::rusqlite::config::DbConfig;
use relet::rusqlite::{self, Connection};
use relet::{Claim, Durability, Options, Settle, Store, Worker};

use raw::Raw;

/// The queue that everything goes through.
pub const QUEUE: &str = "mail";
/// Who claims.
pub const LABEL: &str = "mailer-1";
/// 256 bytes, as a small JSON message has.
pub const PAYLOAD: &[u8] = &[b'x'; 256];

/// A queue under test. Everything in it that fails ends the bench.
pub trait Side: Sync {
    /// A message that is held.
    type Claim;

    /// Stores one message.
    fn enqueue(&self);
    /// Claims the next message.
    fn claim(&self) -> Self::Claim;
    /// Ends a claim.
    fn ack(&self, claim: Self::Claim);
    /// Stores so many messages in one commit.
    fn enqueue_many(&self, count: usize);
    /// Claims so many messages in one commit.
    fn claim_many(&self, count: usize) -> Vec<Self::Claim>;
    /// Ends so many claims in one commit.
    fn ack_many(&self, claims: Vec<Self::Claim>);
}

/// relet, as a program uses it.
pub struct Relet {
    store: Store,
    worker: Worker,
}

impl Relet {
    pub fn open(path: &Path, options: Options) -> Relet {
        let store = options.open(path).expect("the store opens");
        let worker = store.worker(LABEL).expect("the worker starts");
        Relet { store, worker }
    }

    pub fn store(&self) -> &Store {
        &self.store
    }
}

impl Side for Relet {
    type Claim = Claim;

    fn enqueue(&self) {
        self.store.queue(QUEUE).enqueue(PAYLOAD).expect("enqueued");
    }

    fn claim(&self) -> Claim {
        self.worker.claim(QUEUE).expect("claimed").expect("a message is ready")
    }

    fn ack(&self, claim: Claim) {
        claim.ack().expect("acked");
    }

    fn enqueue_many(&self, count: usize) {
        self.store.queue(QUEUE).enqueue_all(std::iter::repeat_n(PAYLOAD, count)).expect("enqueued");
    }

    fn claim_many(&self, count: usize) -> Vec<Claim> {
        let claims = self.worker.claim_batch(QUEUE, count).expect("claimed");
        assert_eq!(claims.len(), count, "so many messages are ready");
        claims
    }

    fn ack_many(&self, claims: Vec<Claim>) {
        let all = claims.iter().map(|claim| (claim.receipt(), Settle::Ack));
        for outcome in self.store.settle_all(all).expect("settled") {
            outcome.expect("acked");
        }
    }
}

/// A connection that is set up as relet sets up its own.
pub fn connect(path: &Path, durability: Durability) -> Connection {
    let conn = Connection::open(path).expect("the file opens");
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).expect("set");
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false).expect("set");
    conn.set_prepared_statement_cache_capacity(128);
    conn.execute_batch(
        "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; PRAGMA temp_store = MEMORY;
         PRAGMA wal_autocheckpoint = 1000; PRAGMA journal_size_limit = 16777216; PRAGMA cache_size = -8192",
    )
    .expect("set");
    conn.execute_batch(match durability {
        Durability::Full => "PRAGMA synchronous = FULL",
        Durability::Normal => "PRAGMA synchronous = NORMAL",
    })
    .expect("set");
    conn
}

/// One transaction.
pub fn transaction<T>(conn: &Connection, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> T {
    let whole = || {
        conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let done = work(conn)?;
        conn.prepare_cached("COMMIT")?.execute([])?;
        Ok::<_, rusqlite::Error>(done)
    };
    whole().expect("the transaction commits")
}

/// A folder for one bench's files, removed at its end: in `RELET_BENCH_DIR`, else where temporary files go. For durable
/// commits to mean anything it must be on a real disk.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let parent = std::env::var_os("RELET_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("relet-bench-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the folder can be made");
        Folder(path)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How long `work` takes.
pub fn time(work: impl FnOnce()) -> Duration {
    #[allow(clippy::disallowed_methods, reason = "a bench measures time")]
    let start = Instant::now();
    work();
    start.elapsed()
}

/// How long `threads` threads take for `count` operations together.
pub fn time_threads(threads: u64, count: u64, operation: impl Fn() + Sync) -> Duration {
    if threads == 1 {
        return time(|| (0..count).for_each(|_| operation()));
    }
    time(|| {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let share = count / threads + u64::from(thread < count % threads);
                let operation = &operation;
                scope.spawn(move || (0..share).for_each(|_| operation()));
            }
        });
    })
}

/// Messages in one commit where many are.
pub const BATCH: usize = 1000;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Enqueue, one by one.
    Enqueue,
    /// Claim and ack, one by one.
    Turn,
    /// Enqueue, [`BATCH`] in a commit.
    EnqueueBatch,
    /// Claim and ack, [`BATCH`] in a commit each.
    TurnBatch,
}

impl Work {
    pub fn name(self) -> &'static str {
        match self {
            Work::Enqueue => "enqueue",
            Work::Turn => "claim+ack",
            Work::EnqueueBatch => "enqueue 1000",
            Work::TurnBatch => "claim+ack 1000",
        }
    }

    /// Messages in one operation.
    pub fn size(self) -> u64 {
        match self {
            Work::Enqueue | Work::Turn => 1,
            Work::EnqueueBatch | Work::TurnBatch => BATCH as u64,
        }
    }

    /// How long `count` operations take. What they consume is stored first, and not counted.
    pub fn time<S: Side>(self, side: &S, threads: u64, count: u64) -> Duration {
        if matches!(self, Work::Turn | Work::TurnBatch) {
            let mut missing = usize::try_from(count * self.size()).expect("fits");
            while missing > 0 {
                let some = missing.min(10_000);
                side.enqueue_many(some);
                missing -= some;
            }
        }
        match self {
            Work::Enqueue => time_threads(threads, count, || side.enqueue()),
            Work::Turn => time_threads(threads, count, || side.ack(side.claim())),
            Work::EnqueueBatch => time_threads(threads, count, || side.enqueue_many(BATCH)),
            Work::TurnBatch => time_threads(threads, count, || side.ack_many(side.claim_many(BATCH))),
        }
    }
}

/// What lies in a store beside what can be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backlog {
    /// More that is ready.
    Ready,
    /// Due in a day.
    Delayed,
    /// Deferred by another worker, due in a day.
    Deferred,
    /// Done, and kept.
    Done,
    /// Dead letters.
    Dead,
    /// Behind the first of their group, which is due in a day.
    Grouped,
    /// Behind a gate that is closed for a day.
    Gated,
}

impl Backlog {
    pub fn name(self) -> &'static str {
        match self {
            Backlog::Ready => "ready",
            Backlog::Delayed => "delayed",
            Backlog::Deferred => "deferred",
            Backlog::Done => "done",
            Backlog::Dead => "dead",
            Backlog::Grouped => "behind their group",
            Backlog::Gated => "behind a closed gate",
        }
    }

    /// Stores `count` messages of this kind, as relet would have stored them one by one, and in a fraction of the time.
    pub fn fill(self, conn: &Connection, count: i64) {
        const NUMBERS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)";
        let now = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";
        let day = format!("{now} + 86400000");
        let (status, line, columns, values, counter) = match self {
            Backlog::Ready => ("pending", "0", "", String::new(), "pending"),
            Backlog::Delayed => ("pending", "NULL", ", due_at", format!(", {day}"), "pending"),
            Backlog::Deferred => (
                "processing",
                "NULL",
                ", worker_id, incarnation, due_at, token, extras",
                format!(", 'mailer-2', 2, {day}, 1, 1"),
                "deferred",
            ),
            Backlog::Done => ("done", "NULL", ", token, attempts", ", 1, 1".to_owned(), "done"),
            Backlog::Dead => ("dead", "NULL", ", token, attempts", ", 1, 25".to_owned(), "dead"),
            Backlog::Gated => ("pending", "4", ", extras", ", 1".to_owned(), "pending"),
            Backlog::Grouped => {
                ("pending", "NULL", ", extras, due_at", format!(", 1, iif(i <= 1000, {day}, NULL)"), "pending")
            }
        };
        // What lies beside the rows that were just inserted, the last ?1 of the file.
        let mine = "id > (SELECT max(id) FROM relet_messages) - ?1";
        let beside = match self {
            Backlog::Ready => Vec::new(),
            Backlog::Delayed => vec![format!(
                "INSERT INTO relet_retry_queue (queue, message, due_at)
                 SELECT queue, id, due_at FROM relet_messages WHERE {mine}"
            )],
            Backlog::Deferred => vec![
                format!("INSERT INTO relet_details (message, deferrals) SELECT id, 1 FROM relet_messages WHERE {mine}"),
                format!(
                    "INSERT INTO relet_retry_queue (queue, message, worker_id, due_at, kept_until, reason, count)
                     SELECT queue, id, worker_id, due_at, due_at + 30000, 'deferred', 1
                       FROM relet_messages WHERE {mine}"
                ),
                "UPDATE relet_counters SET retrying = retrying + ?1 WHERE queue = 1".to_owned(),
            ],
            Backlog::Done | Backlog::Dead => vec![format!(
                "INSERT INTO relet_finished (message, status, finished_at, keep_until)
                 SELECT id, status, {now}, iif(status = 'done', {day}, NULL) FROM relet_messages WHERE {mine}"
            )],
            Backlog::Gated => vec![
                format!("INSERT INTO relet_details (message, gate) SELECT id, 1 FROM relet_messages WHERE {mine}"),
                format!(
                    "INSERT INTO relet_gates (id, name, closed_until, closed_at) SELECT 1, 'api', {day}, {now} WHERE ?1 > 0"
                ),
                "UPDATE relet_queues SET gated = 1 WHERE ?1 > 0".to_owned(),
            ],
            Backlog::Grouped => vec![
                format!(
                    "INSERT INTO relet_details (message, group_key)
                     SELECT id, 'g' || (id % 1000) FROM relet_messages WHERE {mine}"
                ),
                format!(
                    "INSERT INTO relet_groups (queue, group_key, message, turn)
                     SELECT queue, 'g' || (id % 1000), id, due_at IS NOT NULL FROM relet_messages WHERE {mine}"
                ),
                format!(
                    "INSERT INTO relet_retry_queue (queue, message, due_at)
                     SELECT queue, id, due_at FROM relet_messages WHERE {mine} AND due_at IS NOT NULL"
                ),
            ],
        };
        let crc = crc32fast::hash(PAYLOAD);
        let insert = format!(
            "{NUMBERS} INSERT INTO relet_messages (queue, status, route, line, place, priority, max_attempts, enqueued_at,
                                                   payload_crc, payload{columns})
             SELECT 1, '{status}', 'pending', {line}, iif({line} IS NULL, NULL, 0), 0, 25, {now}, {crc}, ?2{values} FROM n"
        );
        transaction(conn, |conn| {
            conn.execute(&insert, rusqlite::params![count, PAYLOAD])?;
            for sql in &beside {
                conn.execute(sql, [count])?;
            }
            let sql = format!("UPDATE relet_counters SET {counter} = {counter} + ?1 WHERE queue = 1");
            conn.execute(&sql, [count])?;
            conn.execute("UPDATE relet_counters SET last_id = (SELECT max(id) FROM relet_messages) WHERE queue = 0", [])
        });
    }
}

/// A store in which `ready` messages can be claimed, beside `backlog` others; and relet and raw on it, which take turns,
/// so that both see the same rows in the same places.
pub struct Depth {
    pub relet: Relet,
    pub raw: Raw,
    // Dropped last.
    _folder: Folder,
}

/// Claims that are made one after the other, before they are undone: few, so that they do not change the depth.
const CLAIMS: u64 = 100;

impl Depth {
    pub fn new(ready: i64, backlog: Backlog, count: i64) -> Depth {
        let folder = Folder::new();
        let file = folder.file("depth.db");
        // What is done is kept for long: it is the backlog here.
        let options = Store::options().durability(Durability::Normal).retention(Duration::from_secs(30 * 86_400));
        let relet = Relet::open(&file, options);
        relet.enqueue();
        let raw = Raw::join(&file, Durability::Normal);
        raw.with(|conn| {
            backlog.fill(conn, count);
            Backlog::Ready.fill(conn, ready);
        });
        Depth { relet, raw, _folder: folder }
    }
}

/// How long `count` claims take, at a depth that stays the same: claims are undone and replaced, which is not counted.
pub fn time_claims<S: Side>(side: &S, count: u64) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = count;
    while left > 0 {
        let some = left.min(CLAIMS);
        let mut claims = Vec::with_capacity(CLAIMS as usize);
        total += time(|| (0..some).for_each(|_| claims.push(side.claim())));
        side.enqueue_many(claims.len());
        side.ack_many(claims);
        left -= some;
    }
    total
}
