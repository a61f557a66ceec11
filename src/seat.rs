//! The seat: the connection that writes, and what its leader alone touches.
//!
//! An operation that fails before it has written anything simply has failed. One that fails or panics after it has
//! written is left out: the transaction is rolled back and the others are run again (operations are `FnMut` for this).
//! That costs nothing while nothing fails, where a savepoint for each would cost 4 µs, and it is also right where SQLite
//! has rolled back the whole transaction by itself, as it does on a full disk.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rusqlite::{Connection, ErrorCode};

use crate::batch::{Job, Need, Task, leave_out_enqueues};
use crate::boot::Boot;
use crate::clock::Stopwatch;
use crate::db::{self, Opened, PAUSE_MAX, Patience};
use crate::error::{Error, Result};
use crate::files::{self, Identity};
use crate::options::{Durability, Options};
use crate::presence::{Others, Presence};
use crate::reserve::{self, Reserve};
use crate::sql::prune::PRUNE_STEP;
use crate::sql::{Defaults, Rung, Tx, mend, meta, prune};
use crate::waker::Waker;

/// Whether a commit reaches the disk before its callers are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    Free,
    Durable,
}

/// Operations that may be left out of a batch, which is run again for each; then the rest goes one by one.
const LEFT_OUT_MAX: usize = 16;
/// Pages in the log at which a checkpoint is made, 4 MiB at the usual page size; sooner where the reserve is smaller.
const CHECKPOINT_PAGES: i64 = 1000;
const CHECKPOINT_PAGES_MIN: i64 = 25;
/// What a page takes in the log at the usual page size.
const LOG_PAGE: u64 = 4096 + 24;
/// Gaps that the writer leaves right after it has met another process's lock: that one, or one like it, waits now.
const GAPS: u32 = 3;
/// For how long it remembers that there is another process which writes …
const CONTENDED_FOR: Duration = Duration::from_secs(1);
/// … and how often it leaves a gap meanwhile.
const GAP_EVERY: Duration = Duration::from_millis(20);
/// Between two rounds of pruning and shrinking.
const MAINTAIN_EVERY: Duration = Duration::from_secs(1);
/// Between two notes of where the clocks are.
const SEE_EVERY: Duration = Duration::from_secs(60);
/// Or after so many changed rows, whichever is first.
const MAINTAIN_CHANGES: u64 = 8192;
/// How long a round goes on with what can wait.
const MAINTAIN_FOR: Duration = Duration::from_millis(20);
/// Rows that are cleared after one batch at least, if it has changed as many and there are as many to be cleared.
const CLEARED_MAX: usize = 10_000;
/// For so long new looks of this process are held up at most, and those that are under way are waited for, so that the log can be
/// begun again.
const HOLD_UP: Duration = Duration::from_millis(100);
/// Free pages that one round gives back to the file system at most: 1 MiB at the usual page size.
const SHRINK_STEP: u32 = 256;

pub(crate) struct Seat {
    conn: Connection,
    options: Options,
    /// `None`: in memory.
    path: Option<PathBuf>,
    /// What `PRAGMA synchronous` is set to.
    sync: Option<Sync>,
    boot: Boot,
    /// What [`db::data_version`] said when `boot` was read: another number means that another process has written since.
    version: i64,
    files: Files,
    /// The disk has failed to make a commit durable: nothing is acknowledged until a checkpoint has made the file whole.
    suspect: bool,
    /// When another process's lock was met last, and when it was left a gap last.
    contended: Option<Stopwatch>,
    gap: Stopwatch,
    /// Gaps that are left at once.
    gaps: u32,
    checkpoint_pages: i64,
    next_checkpoint: i64,
    /// How long the log was after the last commit.
    log_pages: i64,
    /// Those who look hold it shared.
    readers: Arc<RwLock<()>>,
    maintained: Stopwatch,
    seen: Stopwatch,
    /// Rows that this connection had changed after the last batch, and when it was maintained.
    changes: u64,
    changes_then: u64,
    /// There was more to clear than one step does.
    behind: bool,
    owned: bool,
    reserve: Reserve,
    /// Whom the commits since it was last asked wake.
    rung: Rung,
    waker: Arc<Waker>,
    /// Another process has committed since everybody was rung for that.
    others: bool,
    /// What the last checkpoint failed with. Others look at it without waiting for a leader.
    checkpoint_error: Arc<Mutex<Option<String>>>,
    /// Tells others that somebody is there.
    presence: Option<Presence>,
}

/// The files that the connection has open, and whether they are still what their paths lead to. One that was deleted or replaced
/// would go on taking commits, and they would be gone.
struct Files {
    file: Option<(PathBuf, Identity)>,
    /// The log and its index, known from the first commit on.
    beside: [Option<(PathBuf, Identity)>; 2],
}

impl Files {
    fn new(path: Option<&PathBuf>, identity: Option<Identity>) -> Files {
        Files { file: path.cloned().zip(identity), beside: [None, None] }
    }

    /// Remembers the log and its index, which SQLite keeps open until the last connection of all processes is closed.
    fn know_the_log(&mut self) {
        if let Some((path, _)) = &self.file {
            self.beside = ["-wal", "-shm"].map(|suffix| {
                let path = files::beside(path, suffix);
                files::identity(&path).map(|identity| (path, identity))
            });
        }
    }

    fn check(&self) -> Result<()> {
        for (path, identity) in self.file.iter().chain(self.beside.iter().flatten()) {
            if files::identity(path) != Some(*identity) {
                return Err(Error::FileReplaced { path: path.clone() });
            }
        }
        Ok(())
    }
}

/// How far a batch that was committed has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached {
    /// The file: it survives the death of the process.
    File,
    /// The disk, or as much of it as the store's durability asks for.
    Disk {
        /// And so has whatever was committed before.
        and_all_before: bool,
    },
}

/// How one try of a batch ended.
enum Try {
    Committed(Reached),
    /// An operation was left out; the others are to be run again.
    LeftOut,
    /// The disk was full, and there is more room now: all are to be run again.
    Full,
    /// An operation met a row that is damaged: such rows are to be set aside, and all to be run again.
    Damaged,
}

thread_local! {
    /// Pages in the log after this thread's last commit.
    static WAL_PAGES: Cell<i64> = const { Cell::new(0) };
}

impl Seat {
    pub(crate) fn new(
        opened: Opened,
        options: Options,
        path: Option<PathBuf>,
        checkpoint_error: Arc<Mutex<Option<String>>>,
        waker: Arc<Waker>,
    ) -> Seat {
        let Opened { conn, boot, owned, identity, presence, store_id, .. } = opened;
        let files = Files::new(path.as_ref(), identity);
        let reserve = Reserve::new(path.as_deref(), &store_id);
        let mut seat = Seat {
            conn,
            options,
            path,
            sync: None,
            boot,
            version: 0,
            files,
            suspect: false,
            contended: None,
            gap: Stopwatch::start(),
            gaps: 0,
            checkpoint_pages: CHECKPOINT_PAGES,
            next_checkpoint: CHECKPOINT_PAGES,
            log_pages: 0,
            readers: Arc::default(),
            maintained: Stopwatch::start(),
            seen: Stopwatch::start(),
            changes: 0,
            changes_then: 0,
            behind: false,
            owned,
            reserve,
            rung: Rung::default(),
            waker,
            others: false,
            checkpoint_error,
            presence,
        };
        seat.adopt();
        seat.files.know_the_log();
        seat.keep_reserve();
        seat.next_checkpoint = seat.checkpoint_pages;
        seat.changes = seat.conn.total_changes();
        seat.changes_then = seat.changes;
        seat
    }

    /// Sees to it that as much is set aside as the file says, whoever has set that, and that the log does not get longer than it
    /// before it is moved into the file.
    fn keep_reserve(&mut self) {
        let bytes = meta::get::<i64>(&self.conn, "reserve")
            .ok()
            .flatten()
            .and_then(|bytes| u64::try_from(bytes).ok())
            .unwrap_or(0);
        self.reserve.keep(bytes);
        // Half of it: on a full disk the log has to share it with its index and the locks.
        let pages = i64::try_from(bytes / 2 / LOG_PAGE).unwrap_or(i64::MAX);
        self.checkpoint_pages =
            if bytes == 0 { CHECKPOINT_PAGES } else { pages.clamp(CHECKPOINT_PAGES_MIN, CHECKPOINT_PAGES) };
    }

    /// What the caller of an operation is told that there was no room for.
    fn full(&self) -> Error {
        let limit = self.options.file_max.filter(|limit| {
            let number = |sql: &str| self.conn.query_row(sql, [], |row| row.get::<_, i64>(0));
            let size = (number("PRAGMA main.page_count"), number("PRAGMA main.page_size"));
            matches!(size, (Ok(pages), Ok(page)) if *limit > 0 && u64::try_from((pages + 1) * page).is_ok_and(|next| next > *limit))
        });
        match (limit, self.reserve.full()) {
            (Some(limit), _) => Error::Full { needed: 0, reserve: 0, free: None, limit: Some(limit) },
            (None, full) => full,
        }
    }

    /// Why new messages of so many bytes are refused: they could be written into the log, and not be moved from there into the file, even
    /// with what is set aside. Such a disk would stay full for ever. Small commits need no look: the log is moved before it gets as
    /// long as the reserve.
    fn lacks_room(&self, stored: u64) -> Result<Option<Error>> {
        let (Some(path), reserve) = (&self.path, self.reserve.bytes()) else { return Ok(None) };
        if reserve == 0 || stored < reserve / 4 {
            return Ok(None);
        }
        let number = |sql: &str| self.conn.query_row(sql, [], |row| row.get::<_, i64>(0));
        let whole = number("PRAGMA main.page_count")?.saturating_mul(number("PRAGMA main.page_size")?).unsigned_abs();
        let (file, free) = (std::fs::metadata(path).map_or(0, |file| file.len()), reserve::free(path));
        let needed = whole.saturating_sub(file) + stored + stored / 4;
        let lacks = free.is_some_and(|free| free.saturating_add(reserve) < needed);
        Ok(lacks.then(|| Error::Full { needed, reserve, free, limit: None }))
    }

    fn ran_out(&self, error: &Error) -> bool {
        match &self.path {
            Some(path) => reserve::ran_out(error, path),
            None => matches!(error, Error::Full { .. }),
        }
    }

    pub(crate) fn take_rung(&mut self) -> Rung {
        std::mem::take(&mut self.rung)
    }

    /// What looks of this process hold shared, so that they can be held up.
    pub(crate) fn readers(&self) -> Arc<RwLock<()>> {
        self.readers.clone()
    }

    pub(crate) fn conn(&self) -> &Connection {
        &self.conn
    }

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

    /// Runs the jobs in one commit. Those that cannot be part of it are left out; if there is none, every job is told why.
    pub(crate) fn batch(&mut self, jobs: &mut [&mut dyn Job]) -> Result<Reached> {
        WAL_PAGES.set(0);
        let mut left_out = 0;
        loop {
            if self.reserve.is_spent() {
                leave_out_enqueues(jobs, || self.reserve.full());
            }
            if jobs.iter().all(|job| job.is_left_out()) {
                return Ok(Reached::Disk { and_all_before: false });
            }
            match self.attempt(self.options.busy_wait, jobs, false) {
                Ok(Try::Committed(reached)) => return Ok(reached),
                Ok(Try::LeftOut) => left_out += 1,
                Ok(Try::Full) => {}
                Ok(Try::Damaged) => self.set_aside(),
                // The disk was full at the commit: first those that need more of it go, then the reserve.
                Err(Error::Full { .. }) if leave_out_enqueues(jobs, || self.full()) || self.make_room() => {}
                Err(Error::Full { .. }) => return Err(self.full()),
                Err(error) => return Err(error),
            }
            if left_out >= LEFT_OUT_MAX {
                self.one_by_one(jobs);
            }
        }
    }

    /// Gives each job that is left a commit of its own.
    fn one_by_one(&mut self, jobs: &mut [&mut dyn Job]) {
        for job in jobs.iter_mut().filter(|job| !job.is_left_out()) {
            let mut alone = self.attempt(self.options.busy_wait, &mut [&mut **job], true);
            while matches!(alone, Ok(Try::Damaged)) {
                self.set_aside();
                alone = self.attempt(self.options.busy_wait, &mut [&mut **job], true);
            }
            // Its outcome stands where the commit was made, or where it failed by itself.
            job.leave_out(alone.err());
        }
    }

    /// Gets damaged rows out of the way, in a commit of its own. Where that fails, the operations that met them will say why.
    fn set_aside(&mut self) {
        let _ = self.attempt(self.options.busy_wait, &mut [&mut Task::new(Need::Settle, mend::set_aside)], true);
    }

    /// Gives the reserve up, and moves the log into the file: its room is free then. Returns whether there is more room now.
    fn make_room(&mut self) -> bool {
        let released = self.reserve.release();
        let log = |path: &PathBuf| std::fs::metadata(files::beside(path, "-wal")).map_or(0, |log| log.len());
        let before = self.path.as_ref().map_or(0, log);
        if before > 0 {
            self.note(checkpoint(&self.conn, "TRUNCATE"));
        }
        released || self.path.as_ref().map_or(0, log) < before
    }

    /// One BEGIN IMMEDIATE … COMMIT. An error means that nothing was stored (or [`Error::Indeterminate`]).
    fn attempt(&mut self, wait: Duration, jobs: &mut [&mut dyn Job], to_disk: bool) -> Result<Try> {
        if self.suspect {
            self.make_whole()?;
        }
        let clock = &self.options.clock;
        let rebooted = clock.knows_its_boots() && clock.boot() != self.boot.id;
        let to_disk = to_disk || jobs.iter().any(|job| job.needs_disk() && !job.is_left_out());
        let sync = if self.is_full() && to_disk || rebooted { Sync::Durable } else { Sync::Free };
        self.set_sync(sync)?;
        self.begin(wait)?;
        let done = self.fill_and_commit(sync, rebooted, jobs);
        self.roll_back();
        done
    }

    /// The write lock, for which other processes may have to be waited for.
    fn begin(&mut self, wait: Duration) -> Result<()> {
        let mut patience = Patience::new(wait);
        loop {
            match db::begin(&self.conn) {
                Ok(()) => return Ok(()),
                Err(error) if is_busy(&error) => {
                    (self.contended, self.gaps) = (Some(Stopwatch::start()), GAPS);
                    patience.pause()?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn fill_and_commit(&mut self, sync: Sync, rebooted: bool, jobs: &mut [&mut dyn Job]) -> Result<Try> {
        // Read under the lock, so that time never runs back from one transaction to the next, in whatever process.
        let reading = self.options.clock.read();
        let boot = if rebooted {
            Boot::note(&self.conn, &self.options.clock, || Ok(Others::Nobody))?
        } else if jobs.iter().all(|job| job.need() == Need::Enqueue) && !self.waker.is_in_doubt() {
            self.boot.clone() // no token is issued
        } else {
            self.boot_now()?
        };
        let all_before = self.conn.total_changes();
        // Somebody has set the wall clock: that is noted at once, so that it is known in the next boot.
        let boot = if boot.timeline.follow(reading) == boot.timeline { boot } else { boot.see(&self.conn, reading)? };
        let now = boot.timeline.now(reading);
        let mut tx = Tx::new(&self.conn, now, Defaults::from(&self.options), boot.epoch, boot.mark);
        tx.floor = boot.floor;
        for job in jobs.iter_mut().filter(|job| !job.is_left_out()) {
            let before = self.conn.total_changes();
            tx.said = false;
            let done = job.run(&mut tx);
            // Claims make nothing claimable, or only what their own queue's next claim finds.
            tx.rung.all |= !tx.said && job.need() != Need::Claim;
            let gone = self.conn.is_autocommit();
            let full = !done && job.error().is_some_and(|error| self.ran_out(&error));
            if !done && !full && job.error().is_some_and(|error| error.is_damage()) && job.may_run_again() {
                return Ok(Try::Damaged);
            }
            if gone || full || (!done && self.conn.total_changes() != before) {
                if job.need() != Need::Enqueue && full {
                    drop(tx);
                    self.roll_back();
                    if self.make_room() {
                        return Ok(Try::Full);
                    }
                }
                job.leave_out(full.then(|| self.full()));
                return Ok(Try::LeftOut);
            }
        }
        tx.finish()?;
        let stored = tx.stored;
        if tx.budget.left() == 0 {
            self.gaps = self.gaps.max(1); // it took long, and there is more of it
        }
        let durable_late = tx.durable && sync == Sync::Free && self.is_full();
        let rung = std::mem::take(&mut tx.rung);
        // A commit that writes nothing syncs nothing either.
        let wrote = self.conn.total_changes() != all_before;
        if let Some(full) = self.lacks_room(stored)? {
            leave_out_enqueues(jobs, || full.clone());
            return Ok(Try::LeftOut);
        }
        self.check_file()?;
        let waker = self.waker.clone();
        waker.committing(|| self.commit())?;
        self.boot = boot;
        self.rung.all |= rung.all;
        self.rung.queues.extend(rung.queues);
        if durable_late {
            self.make_durable()?;
        }
        Ok(Try::Committed(match sync {
            Sync::Free if self.is_full() => Reached::File,
            Sync::Free => Reached::Disk { and_all_before: true },
            Sync::Durable => Reached::Disk { and_all_before: wrote },
        }))
    }

    /// Whether what must reach the disk does so at its commit.
    fn is_full(&self) -> bool {
        self.options.durability == Durability::Full && self.path.is_some()
    }

    /// The boot, as the file has it: another process may have found that the machine was restarted.
    fn boot_now(&mut self) -> Result<Boot> {
        let version = if self.path.is_some() { db::data_version(&self.conn)? } else { self.version };
        self.others |= version != self.version;
        if self.waker.end_doubt() {
            self.rung.all |= std::mem::take(&mut self.others);
        }
        if version == self.version {
            return Ok(self.boot.clone());
        }
        let boot = Boot::load(&self.conn, &self.options.clock)?
            .ok_or_else(|| Error::Corrupt { detail: "relet_meta has no \"epoch\"".into() })?;
        self.version = version;
        Ok(boot)
    }

    /// Where the path leads elsewhere nothing is written any more.
    fn check_file(&self) -> Result<()> {
        self.files.check()
    }

    fn commit(&mut self) -> Result<()> {
        let committed = self.conn.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        match committed {
            Ok(_) => Ok(()),
            // The frames may be on the disk, all or some of them, and come back after a crash.
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure) => {
                let error = Error::Indeterminate { source: Arc::new(error) };
                if self.ran_out(&error) {
                    return Err(Error::full()); // the commit itself could not be written
                }
                self.suspect = true;
                Err(error)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes what was just committed durable: one more commit that is, since a durable commit covers those before it. Where
    /// another process keeps the lock, or the disk is full, its next commit or ours does that: what was committed stands, so
    /// nothing but a failure of the disk may be told.
    fn make_durable(&mut self) -> Result<()> {
        let done = (|| {
            self.set_sync(Sync::Durable)?;
            self.begin(self.options.busy_wait)?;
            meta::touch(&self.conn)?;
            self.commit()
        })();
        self.roll_back();
        match done {
            Err(error @ Error::Indeterminate { .. }) => Err(error),
            _ => Ok(()),
        }
    }

    /// After a commit that failed in the disk, the connection's picture of the file is not to be trusted: a new one is
    /// opened. And frames before the failed ones may be missing on the disk, where recovery would stop at such a hole. So
    /// the log is emptied into the file before anything else is acknowledged.
    fn make_whole(&mut self) -> Result<()> {
        if let Some(path) = &self.path {
            db::checkpoint_on_close(&self.conn, false)?;
            self.check_file()?;
            self.conn = db::connect(path, &self.options)?;
            self.adopt();
            self.version = 0;
            (self.changes, self.changes_then) = (0, 0);
            self.set_sync(Sync::Durable)?;
            let conn = &self.conn;
            db::patiently(self.options.busy_wait, || match checkpoint(conn, "TRUNCATE")? {
                Checkpoint { busy: false } => Ok(()),
                _ => Err(Error::Busy { waited: Duration::ZERO }),
            })?;
            db::checkpoint_on_close(&self.conn, self.options.checkpoints)?;
            self.files.know_the_log();
        }
        self.suspect = false;
        Ok(())
    }

    /// Leaves other processes a gap in which their next try for the lock falls, where there are any of late. A process that writes once
    /// in a while costs this one no more than that.
    pub(crate) fn leave_a_gap(&mut self) {
        self.contended = self.contended.take().filter(|met| met.elapsed() < CONTENDED_FOR);
        if self.gaps > 0 || (self.contended.is_some() && self.gap.elapsed() >= GAP_EVERY) {
            self.gaps = self.gaps.saturating_sub(1);
            std::thread::sleep(PAUSE_MAX);
            self.gap = Stopwatch::start();
        }
    }

    /// What the leader does for the file after it has answered: a checkpoint when the log is long, and now and then a
    /// step of pruning and shrinking. Errors are kept for stats; they are no caller's business.
    pub(crate) fn maintain(&mut self) {
        if self.suspect {
            return;
        }
        let changes = self.conn.total_changes();
        let came_in = usize::try_from(changes - self.changes).unwrap_or(usize::MAX).min(CLEARED_MAX);
        let due = self.maintained.elapsed() >= MAINTAIN_EVERY || changes - self.changes_then >= MAINTAIN_CHANGES;
        if due {
            self.maintained = Stopwatch::start();
            self.keep_reserve();
            self.behind = true;
        }
        if self.behind {
            self.clear(came_in);
        }
        self.changes = self.conn.total_changes();
        self.tend_log(due);
        if due {
            self.changes_then = self.changes;
            let watch = Stopwatch::start();
            while self.shrink(Duration::ZERO).unwrap_or(false) && watch.elapsed() < MAINTAIN_FOR {}
            self.see();
        }
    }

    /// Prunes in steps, each in a commit of its own, so that as much goes as comes in: at least as many rows as the last batch
    /// has changed. What another process's lock prevents is left for the next round.
    fn clear(&mut self, came_in: usize) {
        let watch = Stopwatch::start();
        let mut cleared = 0;
        loop {
            let mut step = Task::new(Need::Claim, prune::step);
            let done = self.attempt(Duration::ZERO, &mut [&mut step], false);
            let Ok(Try::Committed(_)) = done else { return };
            let some = step.outcome(&Ok(())).unwrap_or(0);
            cleared += some;
            self.behind = some >= PRUNE_STEP;
            if !self.behind || (cleared >= came_in && watch.elapsed() >= MAINTAIN_FOR) {
                return;
            }
        }
    }

    /// Moves the log into the file when it is long. A reader may keep it from being begun again: then the next try is after as
    /// many pages more, or a second later; and once it is longer than it may be, the readers of this process are held up for a
    /// moment.
    fn tend_log(&mut self, due: bool) {
        match WAL_PAGES.get() {
            0 => {}
            pages => self.log_pages = pages,
        }
        if self.log_pages < self.checkpoint_pages {
            self.next_checkpoint = self.checkpoint_pages;
        } else if self.options.checkpoints && (due || self.log_pages >= self.next_checkpoint) {
            self.next_checkpoint = self.log_pages + self.checkpoint_pages;
            let bytes = u64::try_from(self.log_pages).unwrap_or(0) * LOG_PAGE;
            let too_long = bytes >= self.options.log_max;
            let readers = self.readers.clone();
            let _held_up = too_long.then(|| readers.try_write_for(HOLD_UP));
            let mode = if too_long { "TRUNCATE" } else { "PASSIVE" };
            let made = self.check_file().and_then(|()| checkpoint(&self.conn, mode));
            if too_long && made.as_ref().is_ok_and(|made| !made.busy) {
                self.log_pages = 0;
                WAL_PAGES.set(0);
            }
            self.note(made);
        }
    }

    /// Notes where the clocks are, now and then: after a power cut the store's time goes on from there.
    fn see(&mut self) {
        if self.seen.elapsed() < SEE_EVERY {
            return;
        }
        self.seen = Stopwatch::start();
        let (boot, reading) = (self.boot.clone(), self.options.clock.read());
        let mut task = Task::new(Need::Claim, move |tx: &mut Tx<'_>| boot.clone().see(tx.conn, reading).map(drop));
        let _ = self.attempt(Duration::ZERO, &mut [&mut task], false);
    }

    /// Ends a transaction that was not committed, if there is one.
    fn roll_back(&mut self) {
        if !self.conn.is_autocommit() && self.conn.execute_batch("ROLLBACK").is_err() {
            self.suspect = true;
        }
    }

    fn note<T>(&self, checkpoint: Result<T>) {
        *self.checkpoint_error.lock() = checkpoint.err().map(|error| error.to_string());
    }

    /// Empties the log into the file, if no reader holds it back. Returns whether it was emptied.
    pub(crate) fn checkpoint(&mut self) -> Result<bool> {
        self.check_file()?;
        self.set_sync(Sync::Durable)?;
        Ok(!checkpoint(&self.conn, "TRUNCATE")?.busy)
    }

    /// Gives a step of free pages back to the file system; only where relet made the file. Waits for another process's lock for
    /// at most `wait`. Returns whether there may be more.
    pub(crate) fn shrink(&mut self, wait: Duration) -> Result<bool> {
        if self.path.is_none() || !self.owned {
            return Ok(false);
        }
        self.check_file()?;
        self.set_sync(Sync::Free)?; // it changes nothing that was promised
        let more = db::patiently(wait, || shrink(&self.conn, SHRINK_STEP))?;
        self.tend_log(false);
        Ok(more)
    }

    /// The last handle is gone: the log goes into the file, so that the file alone is whole.
    pub(crate) fn close(&mut self) {
        self.put_away();
        if let Some(presence) = self.presence.take() {
            presence.leave();
        }
    }

    fn put_away(&mut self) {
        if self.check_file().is_err() {
            let _ = db::checkpoint_on_close(&self.conn, false);
            return;
        }
        if self.path.is_some() && !self.suspect {
            self.see();
        }
        if self.path.is_some() && self.options.checkpoints && !self.suspect {
            let _ = checkpoint(&self.conn, "TRUNCATE");
        }
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
    // It gives one page back for each step of the statement.
    let mut statement = conn.prepare(&format!("PRAGMA main.incremental_vacuum({step})"))?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(true)
}
