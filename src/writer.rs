//! Group commit by leader and followers.
//!
//! All writes of a process go through one connection. A caller who finds it free *leads*: it takes up what has gathered
//! meanwhile, runs everything, its own operation first, in one BEGIN IMMEDIATE … COMMIT, hands out the results after the
//! commit, and hands the lead to whoever came next. The others *follow*: they lay down their operation and wait. There is
//! no background thread; whoever waits is served in the order of arrival.
//!
//! An operation that fails before it has written anything simply has failed. One that fails or panics after it has
//! written is left out: the transaction is rolled back and the others are run again (operations are `FnMut` for this).
//! That costs nothing while nothing fails, where a savepoint for each would cost 4 µs, and it is also right where SQLite
//! has rolled back the whole transaction by itself, as it does on a full disk. Results are only handed out once it is
//! known whether the commit was made; if it was not, every caller is told, and nothing of it is stored.
//!
//! A transaction that holds nothing but claims and extensions need not reach the disk: a lost claim only means that the
//! message is ready again. It is committed without `fsync`, and the next durable commit makes it durable, too.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rusqlite::{Connection, ErrorCode};

use crate::clock::Stopwatch;
use crate::db::{self, Boot, Identity, Opened, PAUSE_MAX, Patience};
use crate::error::{Error, Result};
use crate::options::{Durability, Options};
use crate::reserve::Reserve;
use crate::sql::{Defaults, Tx, meta, prune};
use crate::waker::Waker;

/// What an operation needs of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Claims and extensions: they may be lost with the power.
    Claim,
    /// What must reach the disk before its caller is answered, and works on what is stored: it goes on when the disk is full.
    Settle,
    /// What must reach the disk, and needs more of it: it is refused first when the disk is full.
    Enqueue,
}

/// Whether a commit reaches the disk before its callers are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    Free,
    Durable,
}

/// Operations in one transaction, so that the first of them does not wait for an endless queue.
const BATCH_MAX: usize = 512;
/// How long a leader waits at most for as many followers as the last batch had.
const GATHER_FOR: Duration = Duration::from_micros(100);
/// Operations that may be left out of a batch, which is run again for each; then the rest goes one by one.
const LEFT_OUT_MAX: usize = 16;
/// Pages in the log at which a checkpoint is made: 4 MiB at the usual page size.
const CHECKPOINT_PAGES: i64 = 1000;
/// How long the writer remembers that another process was waiting, and leaves gaps for it.
const CONTENDED_FOR: Duration = Duration::from_millis(100);
/// Between two rounds of pruning and shrinking.
const MAINTAIN_EVERY: Duration = Duration::from_secs(1);
/// Free pages that one round gives back to the file system at most: 1 MiB at the usual page size.
const SHRINK_STEP: u32 = 256;

pub(crate) struct Writer {
    line: Mutex<Line>,
    seat: Mutex<Seat>,
    options: Options,
    /// `None`: in memory.
    path: Option<PathBuf>,
    waker: Arc<Waker>,
    /// What the last checkpoint failed with. Not of the seat, so that a look does not wait for a leader.
    checkpoint_error: Mutex<Option<String>>,
}

/// Who waits, and whether somebody leads.
struct Line {
    waiting: VecDeque<Box<dyn Follower>>,
    led: bool,
}

/// What the leader alone touches.
struct Seat {
    conn: Connection,
    /// What `PRAGMA synchronous` is set to.
    sync: Option<Sync>,
    boot: Boot,
    /// The largest wall time seen: a smaller one means that the clock was set back.
    wall_seen: i64,
    identity: Option<Identity>,
    /// The disk has failed to make a commit durable: nothing is acknowledged until a checkpoint has made the file whole.
    suspect: bool,
    contended: Option<Stopwatch>,
    next_checkpoint: i64,
    maintained: Stopwatch,
    owned: bool,
    reserve: Reserve,
    /// How many followers the last batch had.
    followers: usize,
}

/// One operation in a batch.
trait Job {
    fn need(&self) -> Need;
    /// Runs it, keeps its outcome, and says whether it succeeded.
    fn run(&mut self, tx: &mut Tx<'_>) -> bool;
    /// It is not run again. Its outcome stands, unless `error` is given in its place.
    fn leave_out(&mut self, error: Option<Error>);
    fn is_left_out(&self) -> bool;
    /// Why it failed, if it did.
    fn error(&self) -> Option<Error>;
}

struct Task<T, F> {
    need: Need,
    op: F,
    outcome: Option<Result<T>>,
    left_out: bool,
}

impl<T, F: FnMut(&mut Tx<'_>) -> Result<T>> Task<T, F> {
    fn new(need: Need, op: F) -> Task<T, F> {
        Task { need, op, outcome: None, left_out: false }
    }

    /// What the caller is told. A result that rests on a commit which was not made is not told, not even an error.
    fn outcome(&mut self, commit: &Result<()>) -> Result<T> {
        match (commit, self.outcome.take()) {
            (_, Some(outcome)) if self.left_out => outcome,
            (Ok(()), Some(outcome)) => outcome,
            (Err(error), _) => Err(error.clone()),
            (Ok(()), None) => Err(Error::Panicked { detail: "the operation was not run".into() }),
        }
    }
}

impl<T, F: FnMut(&mut Tx<'_>) -> Result<T>> Job for Task<T, F> {
    fn need(&self) -> Need {
        self.need
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        let op = &mut self.op;
        let outcome = catch_unwind(AssertUnwindSafe(|| op(tx)))
            .unwrap_or_else(|panic| Err(Error::Panicked { detail: panic_message(&*panic) }));
        let done = outcome.is_ok();
        self.outcome = Some(outcome);
        done
    }

    fn leave_out(&mut self, error: Option<Error>) {
        self.left_out = true;
        if let Some(error) = error {
            self.outcome = Some(Err(error));
        }
    }

    fn is_left_out(&self) -> bool {
        self.left_out
    }

    fn error(&self) -> Option<Error> {
        self.outcome.as_ref().and_then(|outcome| outcome.as_ref().err().cloned())
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Where a follower waits.
struct Slot<T> {
    turn: Mutex<Turn<T>>,
    bell: Condvar,
}

enum Turn<T> {
    Waiting,
    Lead(Box<dyn Follower>),
    Done(Result<T>),
}

impl<T> Slot<T> {
    fn tell(&self, turn: Turn<T>) {
        *self.turn.lock() = turn;
        self.bell.notify_one();
    }
}

/// An operation that was laid down for a leader.
trait Follower: Job + Send {
    /// Tells its caller how it ended.
    fn answer(self: Box<Self>, commit: &Result<()>);
    /// Gives it back to its caller, to lead with.
    fn promote(self: Box<Self>);
}

struct Laid<T: Send + 'static, F: FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static> {
    task: Task<T, F>,
    /// `None` once its caller has been told something.
    slot: Option<Arc<Slot<T>>>,
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Job for Laid<T, F> {
    fn need(&self) -> Need {
        self.task.need()
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        self.task.run(tx)
    }

    fn leave_out(&mut self, error: Option<Error>) {
        self.task.leave_out(error);
    }

    fn is_left_out(&self) -> bool {
        self.task.is_left_out()
    }

    fn error(&self) -> Option<Error> {
        self.task.error()
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Follower for Laid<T, F> {
    fn answer(mut self: Box<Self>, commit: &Result<()>) {
        if let Some(slot) = self.slot.take() {
            slot.tell(Turn::Done(self.task.outcome(commit)));
        }
    }

    fn promote(self: Box<Self>) {
        // The slot stays in the job, too: the caller is answered through it like any other.
        if let Some(slot) = self.slot.clone() {
            slot.tell(Turn::Lead(self));
        }
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Drop for Laid<T, F> {
    /// Reached with a slot only if a leader panicked outside of an operation: its followers must not wait for ever.
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.tell(Turn::Done(Err(Error::Panicked { detail: "the leader of the batch panicked".into() })));
        }
    }
}

/// The lead, handed on when it is dropped, also by a panic.
struct Lead<'w>(&'w Writer);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let next = {
            let mut line = self.0.line.lock();
            let next = line.waiting.pop_front();
            line.led = next.is_some();
            next
        };
        if let Some(next) = next {
            next.promote();
        }
    }
}

/// How one try of a batch ended.
enum Try {
    Committed,
    /// An operation was left out; the others are to be run again.
    LeftOut,
    /// The disk was full, and there is more room now: all are to be run again.
    Full,
}

/// The disk is full: what needs more of it is told so. Returns whether there was any.
fn leave_out_enqueues(jobs: &mut [&mut dyn Job]) -> bool {
    let mut any = false;
    for job in jobs.iter_mut().filter(|job| job.need() == Need::Enqueue && !job.is_left_out()) {
        job.leave_out(Some(Error::Full));
        any = true;
    }
    any
}

thread_local! {
    /// Pages in the log after this thread's last commit.
    static WAL_PAGES: Cell<i64> = const { Cell::new(0) };
}

impl Writer {
    pub(crate) fn new(opened: Opened, options: Options, path: Option<PathBuf>, waker: Arc<Waker>) -> Writer {
        let Opened { conn, boot, owned, identity, .. } = opened;
        let mut seat = Seat {
            conn,
            sync: None,
            boot,
            wall_seen: 0,
            identity,
            suspect: false,
            contended: None,
            next_checkpoint: CHECKPOINT_PAGES,
            maintained: Stopwatch::start(),
            owned,
            reserve: match &path {
                Some(path) => Reserve::new(db::beside(path, "-relet-reserve"), options.reserve),
                None => Reserve::new(PathBuf::new(), 0),
            },
            followers: 0,
        };
        seat.adopt();
        seat.reserve.keep();
        let line = Line { waiting: VecDeque::new(), led: false };
        Writer {
            line: Mutex::new(line),
            seat: Mutex::new(seat),
            options,
            path,
            waker,
            checkpoint_error: Mutex::new(None),
        }
    }

    /// Runs `op` in a transaction, with whatever else is waiting, and returns its result once that is committed.
    ///
    /// `op` may be run more than once, and only its last run counts.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        need: Need,
        op: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut line = self.line.lock();
        if !line.led {
            line.led = true;
            drop(line);
            let mut task = Task::new(need, op);
            let commit = self.lead(&mut task);
            return task.outcome(&commit);
        }
        let slot = Arc::new(Slot { turn: Mutex::new(Turn::Waiting), bell: Condvar::new() });
        line.waiting.push_back(Box::new(Laid { task: Task::new(need, op), slot: Some(slot.clone()) }));
        drop(line);
        loop {
            let turn = {
                let mut turn = slot.turn.lock();
                while matches!(*turn, Turn::Waiting) {
                    slot.bell.wait(&mut turn);
                }
                std::mem::replace(&mut *turn, Turn::Waiting)
            };
            match turn {
                Turn::Done(outcome) => return outcome,
                Turn::Lead(mut own) => {
                    let commit = self.lead(&mut *own);
                    own.answer(&commit);
                }
                Turn::Waiting => {}
            }
        }
    }

    /// Leads one batch: its own operation first, then all that has gathered.
    fn lead(&self, own: &mut dyn Job) -> Result<()> {
        let lead = Lead(self);
        let mut seat = self.seat.lock();
        WAL_PAGES.set(0);
        let mut followers = self.gather(&mut seat);
        let mut jobs: Vec<&mut dyn Job> = Vec::with_capacity(followers.len() + 1);
        jobs.push(own);
        for follower in &mut followers {
            jobs.push(&mut **follower);
        }
        let commit = self.batch(&mut seat, &mut jobs);
        // Claims make nothing claimable, or only what their own queue's next claim finds.
        if commit.is_ok() && jobs.iter().any(|job| job.need() != Need::Claim) {
            self.waker.ring();
        }
        for follower in followers {
            follower.answer(&commit);
        }
        self.maintain(&mut seat);
        self.leave_a_gap(&mut seat);
        drop(seat);
        drop(lead);
        commit
    }

    /// What has gathered. Whoever was in the last batch has just been answered, and is likely to come back at once: a moment
    /// is waited for as many.
    fn gather(&self, seat: &mut Seat) -> Vec<Box<dyn Follower>> {
        let watch = Stopwatch::start();
        loop {
            let mut line = self.line.lock();
            if line.waiting.len() >= seat.followers || watch.elapsed() >= GATHER_FOR {
                let count = line.waiting.len().min(BATCH_MAX);
                seat.followers = count;
                return line.waiting.drain(..count).collect();
            }
            drop(line);
            std::thread::yield_now();
        }
    }

    /// Runs the jobs in one commit. Those that cannot be part of it are left out; if there is none, every job is told why.
    fn batch(&self, seat: &mut Seat, jobs: &mut [&mut dyn Job]) -> Result<()> {
        let mut left_out = 0;
        loop {
            if seat.reserve.is_spent() {
                leave_out_enqueues(jobs);
            }
            if jobs.iter().all(|job| job.is_left_out()) {
                return Ok(());
            }
            match self.attempt(seat, self.options.busy_wait, jobs) {
                Ok(Try::Committed) => return Ok(()),
                Ok(Try::LeftOut) => left_out += 1,
                Ok(Try::Full) => {}
                // The disk was full at the commit: first those that need more of it go, then the reserve.
                Err(Error::Full) if leave_out_enqueues(jobs) || self.make_room(seat) => {}
                Err(error) => return Err(error),
            }
            if left_out >= LEFT_OUT_MAX {
                self.one_by_one(seat, jobs);
            }
        }
    }

    /// Gives each job that is left a commit of its own.
    fn one_by_one(&self, seat: &mut Seat, jobs: &mut [&mut dyn Job]) {
        for job in jobs.iter_mut().filter(|job| !job.is_left_out()) {
            let alone = self.attempt(seat, self.options.busy_wait, &mut [&mut **job]);
            // Its outcome stands where the commit was made, or where it failed by itself.
            job.leave_out(alone.err());
        }
    }

    /// Gives the reserve up, so that the log can be moved into the file. Returns whether there is more room now.
    fn make_room(&self, seat: &mut Seat) -> bool {
        let released = seat.reserve.release();
        if released {
            self.note(checkpoint(&seat.conn, "TRUNCATE"));
        }
        released
    }

    /// One BEGIN IMMEDIATE … COMMIT. An error means that nothing was stored (or [`Error::Indeterminate`]).
    fn attempt(&self, seat: &mut Seat, wait: Duration, jobs: &mut [&mut dyn Job]) -> Result<Try> {
        if seat.suspect {
            self.make_whole(seat)?;
        }
        let rebooted = self.options.clock.boot() != seat.boot.id;
        let full = self.options.durability == Durability::Full
            && jobs.iter().any(|job| job.need() != Need::Claim && !job.is_left_out());
        let sync = if full || rebooted { Sync::Durable } else { Sync::Free };
        seat.set_sync(sync)?;
        self.begin(seat, wait)?;
        let done = self.fill_and_commit(seat, sync, rebooted, jobs);
        roll_back(seat);
        done
    }

    /// The write lock, for which other processes may have to be waited for.
    fn begin(&self, seat: &mut Seat, wait: Duration) -> Result<()> {
        let mut patience = Patience::new(wait);
        loop {
            match seat.conn.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([])) {
                Ok(_) => return Ok(()),
                Err(error) if is_busy(&error) => {
                    seat.contended = Some(Stopwatch::start());
                    patience.pause()?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn fill_and_commit(&self, seat: &mut Seat, sync: Sync, rebooted: bool, jobs: &mut [&mut dyn Job]) -> Result<Try> {
        // Read under the lock, so that time never runs back from one transaction to the next, in whatever process.
        let now = self.options.clock.now();
        let boot = if rebooted { db::note_boot(&seat.conn, &self.options.clock)? } else { seat.boot.clone() };
        if now.wall < seat.wall_seen {
            db::mend_waits(&seat.conn, now)?;
        }
        let mut tx = Tx::new(&seat.conn, now, Defaults::from(&self.options), boot.epoch, boot.mark);
        for job in jobs.iter_mut().filter(|job| !job.is_left_out()) {
            let before = seat.conn.total_changes();
            let done = job.run(&mut tx);
            let gone = seat.conn.is_autocommit();
            if gone || (!done && seat.conn.total_changes() != before) {
                if job.need() != Need::Enqueue && matches!(job.error(), Some(Error::Full)) {
                    drop(tx);
                    roll_back(seat);
                    if self.make_room(seat) {
                        return Ok(Try::Full);
                    }
                }
                job.leave_out(None);
                return Ok(Try::LeftOut);
            }
        }
        tx.finish()?;
        let durable_late = tx.durable && sync == Sync::Free && self.options.durability == Durability::Full;
        self.check_file(seat)?;
        self.commit(seat)?;
        seat.boot = boot;
        seat.wall_seen = now.wall;
        if durable_late {
            self.make_durable(seat)?;
        }
        Ok(Try::Committed)
    }

    /// A file that was deleted or replaced would go on taking commits, and they would be gone.
    fn check_file(&self, seat: &Seat) -> Result<()> {
        match &self.path {
            Some(path) if db::identity(path) != seat.identity => Err(Error::FileReplaced { path: path.clone() }),
            _ => Ok(()),
        }
    }

    fn commit(&self, seat: &mut Seat) -> Result<()> {
        let committed = seat.conn.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        match committed {
            Ok(_) => Ok(()),
            // The frames may be on the disk, all or some of them, and come back after a crash.
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure) => {
                seat.suspect = true;
                Err(Error::Indeterminate { source: Arc::new(error) })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes what was just committed durable: one more commit that is, since a durable commit covers those before it. Where
    /// another process keeps the lock, or the disk is full, its next commit or ours does that: what was committed stands, so
    /// nothing but a failure of the disk may be told.
    fn make_durable(&self, seat: &mut Seat) -> Result<()> {
        let done = (|| {
            seat.set_sync(Sync::Durable)?;
            self.begin(seat, self.options.busy_wait)?;
            meta::touch(&seat.conn)?;
            self.commit(seat)
        })();
        roll_back(seat);
        match done {
            Err(error @ Error::Indeterminate { .. }) => Err(error),
            _ => Ok(()),
        }
    }

    /// After a commit that failed in the disk, the connection's picture of the file is not to be trusted: a new one is
    /// opened. And frames before the failed ones may be missing on the disk, where recovery would stop at such a hole. So
    /// the log is emptied into the file before anything else is acknowledged.
    fn make_whole(&self, seat: &mut Seat) -> Result<()> {
        if let Some(path) = &self.path {
            db::checkpoint_on_close(&seat.conn, false)?;
            seat.conn = db::connect(path, &self.options)?;
            seat.adopt();
            seat.set_sync(Sync::Durable)?;
            let conn = &seat.conn;
            db::patiently(self.options.busy_wait, || match checkpoint(conn, "TRUNCATE")? {
                Checkpoint { busy: false } => Ok(()),
                _ => Err(Error::Busy { waited: Duration::ZERO }),
            })?;
            db::checkpoint_on_close(&seat.conn, self.options.checkpoints)?;
        }
        seat.suspect = false;
        Ok(())
    }

    /// Leaves other processes a gap in which their next try for the lock falls, while there are any.
    fn leave_a_gap(&self, seat: &mut Seat) {
        match &seat.contended {
            Some(seen) if seen.elapsed() < CONTENDED_FOR => std::thread::sleep(PAUSE_MAX),
            Some(_) => seat.contended = None,
            None => {}
        }
    }

    /// What the leader does for the file after it has answered: a checkpoint when the log is long, and now and then a
    /// step of pruning and shrinking. Errors are kept for stats; they are no caller's business.
    fn maintain(&self, seat: &mut Seat) {
        if seat.suspect {
            return;
        }
        let pages = WAL_PAGES.get();
        if pages < CHECKPOINT_PAGES {
            seat.next_checkpoint = CHECKPOINT_PAGES;
        } else if self.options.checkpoints && pages >= seat.next_checkpoint {
            // A reader may keep the log from being begun again: then the next try is after as many pages more.
            seat.next_checkpoint = pages + CHECKPOINT_PAGES;
            self.note(checkpoint(&seat.conn, "PASSIVE"));
        }
        if seat.maintained.elapsed() >= MAINTAIN_EVERY {
            seat.maintained = Stopwatch::start();
            seat.reserve.keep();
            let _ = self.attempt(seat, Duration::ZERO, &mut [&mut Task::new(Need::Claim, prune::step)]);
            if seat.owned && self.path.is_some() {
                let _ = shrink(&seat.conn, SHRINK_STEP);
            }
        }
    }

    /// The connection, for a look into a store in memory, or for what no other connection may do.
    pub(crate) fn with_connection<T>(&self, look: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        let seat: MutexGuard<'_, Seat> = self.seat.lock();
        look(&seat.conn)
    }

    pub(crate) fn checkpoint_error(&self) -> Option<String> {
        self.checkpoint_error.lock().clone()
    }

    fn note<T>(&self, checkpoint: Result<T>) {
        *self.checkpoint_error.lock() = checkpoint.err().map(|error| error.to_string());
    }

    /// Empties the log into the file, if no reader holds it back. Returns whether it was emptied.
    pub(crate) fn checkpoint(&self) -> Result<bool> {
        let mut seat = self.seat.lock();
        self.check_file(&seat)?;
        seat.set_sync(Sync::Durable)?;
        Ok(!checkpoint(&seat.conn, "TRUNCATE")?.busy)
    }

    /// Gives free pages back to the file system, a step at a time; only where relet made the file.
    pub(crate) fn shrink(&self) -> Result<()> {
        loop {
            let seat = self.seat.lock();
            if self.path.is_none() || !seat.owned || !shrink(&seat.conn, SHRINK_STEP)? {
                return Ok(());
            }
        }
    }
}

impl Drop for Writer {
    /// The last handle is gone: the log goes into the file, so that the file alone is whole.
    fn drop(&mut self) {
        let seat = self.seat.get_mut();
        if self.path.is_some() && self.options.checkpoints && !seat.suspect {
            let _ = checkpoint(&seat.conn, "TRUNCATE");
        }
    }
}

impl Seat {
    /// Sees to it that each commit tells how long the log is.
    fn adopt(&mut self) {
        self.sync = None;
        self.conn.wal_hook(Some(|_, pages| {
            WAL_PAGES.set(i64::from(pages));
            Ok(())
        }));
    }

    fn set_sync(&mut self, sync: Sync) -> Result<()> {
        if self.sync == Some(sync) {
            return Ok(());
        }
        // This pragma acts when it is prepared: a cached statement would change nothing.
        self.conn.execute_batch(match sync {
            Sync::Durable => "PRAGMA synchronous = FULL",
            Sync::Free => "PRAGMA synchronous = NORMAL",
        })?;
        self.sync = Some(sync);
        Ok(())
    }
}

/// Ends a transaction that was not committed, if there is one.
fn roll_back(seat: &mut Seat) {
    if !seat.conn.is_autocommit() && seat.conn.execute_batch("ROLLBACK").is_err() {
        seat.suspect = true;
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::FileLockingProtocolFailed)
    )
}

struct Checkpoint {
    /// A reader or another process kept it from being complete.
    busy: bool,
}

fn checkpoint(conn: &Connection, mode: &str) -> Result<Checkpoint> {
    Ok(conn.query_row(&format!("PRAGMA main.wal_checkpoint({mode})"), [], |row| {
        Ok(Checkpoint { busy: row.get::<_, i64>(0)? != 0 })
    })?)
}

/// Gives up to `step` free pages back if a quarter of the file is free. Returns whether there may be more.
fn shrink(conn: &Connection, step: u32) -> Result<bool> {
    let number = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, i64>(0));
    let (free, all) = (number("PRAGMA main.freelist_count")?, number("PRAGMA main.page_count")?);
    if free < i64::from(step) || free * 4 < all {
        return Ok(false);
    }
    conn.execute_batch(&format!("PRAGMA main.incremental_vacuum({step})"))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;
    use crate::sql::enqueue;

    type Call = Box<dyn FnOnce(&Writer) -> Result<()> + Send>;

    fn in_memory() -> Writer {
        let options = Options::default();
        Writer::new(db::open_in_memory(&options).unwrap(), options, None, Arc::default())
    }

    fn enqueue(writer: &Writer, payload: &str) -> Result<()> {
        let message = Message::new(payload);
        writer.run(Need::Enqueue, move |tx| enqueue::enqueue(tx, "q", &message).map(drop))
    }

    fn stored(writer: &Writer) -> i64 {
        let counted = "SELECT (SELECT count(*) FROM relet_messages), (SELECT sum(pending) FROM relet_counters)";
        let (rows, counter) = writer
            .with_connection(|conn| {
                Ok(conn.query_row(counted, [], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))?)
            })
            .unwrap();
        assert_eq!(rows, counter);
        rows
    }

    /// Starts all of `calls` so that they end up in one batch, the first of them leading, and returns their outcomes.
    fn one_batch(writer: &Writer, calls: Vec<Call>) -> Vec<Result<()>> {
        let followers = calls.len() - 1;
        std::thread::scope(|scope| {
            let seat = writer.seat.lock();
            let mut threads = Vec::new();
            for (place, call) in calls.into_iter().enumerate() {
                threads.push(scope.spawn(move || call(writer)));
                // The first leads; each of the others lies down in its place.
                while !writer.line.lock().led || writer.line.lock().waiting.len() < place.min(followers) {
                    std::thread::yield_now();
                }
            }
            drop(seat);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn an_operation_that_panics_or_fails_undoes_itself_alone() {
        let writer = in_memory();
        for place in 0..5 {
            let before = if place == 0 { 0 } else { stored(&writer) };
            let mut calls: Vec<Call> = Vec::new();
            for n in 0..5 {
                calls.push(match n == place {
                    false => Box::new(move |writer| enqueue(writer, "fine")),
                    true => Box::new(move |writer| {
                        let message = Message::new("half done");
                        writer.run(Need::Enqueue, move |tx| {
                            enqueue::enqueue(tx, "q", &message)?;
                            assert!(place % 2 == 0, "a panic after a write");
                            Err(Error::NotImmediate)
                        })
                    }),
                });
            }
            let outcomes = one_batch(&writer, calls);
            for (n, outcome) in outcomes.iter().enumerate() {
                match (n == place, place % 2 == 0) {
                    (false, _) => assert!(outcome.is_ok(), "{outcome:?}"),
                    (true, true) => assert!(matches!(outcome, Err(Error::NotImmediate)), "{outcome:?}"),
                    (true, false) => {
                        assert!(matches!(outcome, Err(Error::Panicked { detail }) if detail.contains("after a write")));
                    }
                }
            }
            assert_eq!(stored(&writer), before + 4);
        }
    }

    #[test]
    fn a_commit_that_is_not_made_is_told_to_every_caller_in_it() {
        let writer = in_memory();
        enqueue(&writer, "first").unwrap();
        // A write that can only be refused at the commit.
        let broken = |writer: &Writer| {
            writer.run(Need::Enqueue, |tx| {
                tx.count(1, Some(crate::sql::counters::Place::Dead), None); // one dead letter less than none: the CHECK says no
                Ok(())
            })
        };
        let outcomes = one_batch(
            &writer,
            vec![
                Box::new(|writer| enqueue(writer, "second")),
                Box::new(broken),
                Box::new(|writer| enqueue(writer, "third")),
            ],
        );
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(Error::Sqlite(_)))), "{outcomes:?}");
        assert_eq!(stored(&writer), 1);
        enqueue(&writer, "afterwards").unwrap();
        assert_eq!(stored(&writer), 2);
    }

    #[test]
    fn where_many_operations_fail_the_batch_still_ends() {
        let writer = in_memory();
        let failing = |writer: &Writer| {
            writer.run(Need::Settle, |tx| {
                meta::touch(tx.conn)?;
                Err::<(), _>(Error::NotImmediate)
            })
        };
        let calls = (0..40).map(|_| Box::new(failing) as Call).collect();
        let outcomes = one_batch(&writer, calls);
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(Error::NotImmediate))));
    }
}
