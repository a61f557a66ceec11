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

use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode};

use crate::batch::{Job, Need, Task, leave_out_enqueues};
use crate::clock::Stopwatch;
use crate::db::{self, Boot, Identity, Opened, PAUSE_MAX, Patience};
use crate::error::{Error, Result};
use crate::options::{Durability, Options};
use crate::reserve::Reserve;
use crate::sql::{Defaults, Tx, mend, meta, prune};

/// Whether a commit reaches the disk before its callers are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    Free,
    Durable,
}

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

pub(crate) struct Seat {
    conn: Connection,
    options: Options,
    /// `None`: in memory.
    path: Option<PathBuf>,
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
    /// What the last checkpoint failed with. Others look at it without waiting for a leader.
    checkpoint_error: Arc<Mutex<Option<String>>>,
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
    ) -> Seat {
        let Opened { conn, boot, owned, identity, .. } = opened;
        let reserve = match &path {
            Some(path) => Reserve::new(db::beside(path, "-relet-reserve"), options.reserve),
            None => Reserve::new(PathBuf::new(), 0),
        };
        let mut seat = Seat {
            conn,
            options,
            path,
            sync: None,
            boot,
            wall_seen: 0,
            identity,
            suspect: false,
            contended: None,
            next_checkpoint: CHECKPOINT_PAGES,
            maintained: Stopwatch::start(),
            owned,
            reserve,
            checkpoint_error,
        };
        seat.adopt();
        seat.reserve.keep();
        seat
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
                leave_out_enqueues(jobs);
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
                Err(Error::Full) if leave_out_enqueues(jobs) || self.make_room() => {}
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

    /// Gives the reserve up, so that the log can be moved into the file. Returns whether there is more room now.
    fn make_room(&mut self) -> bool {
        let released = self.reserve.release();
        if released {
            self.note(checkpoint(&self.conn, "TRUNCATE"));
        }
        released
    }

    /// One BEGIN IMMEDIATE … COMMIT. An error means that nothing was stored (or [`Error::Indeterminate`]).
    fn attempt(&mut self, wait: Duration, jobs: &mut [&mut dyn Job], to_disk: bool) -> Result<Try> {
        if self.suspect {
            self.make_whole()?;
        }
        let rebooted = self.options.clock.boot() != self.boot.id;
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
            match self.conn.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([])) {
                Ok(_) => return Ok(()),
                Err(error) if is_busy(&error) => {
                    self.contended = Some(Stopwatch::start());
                    patience.pause()?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn fill_and_commit(&mut self, sync: Sync, rebooted: bool, jobs: &mut [&mut dyn Job]) -> Result<Try> {
        // Read under the lock, so that time never runs back from one transaction to the next, in whatever process.
        let now = self.options.clock.now();
        let boot = if rebooted { db::note_boot(&self.conn, &self.options.clock)? } else { self.boot.clone() };
        if now.wall < self.wall_seen {
            db::mend_waits(&self.conn, now)?;
        }
        let all_before = self.conn.total_changes();
        let mut tx = Tx::new(&self.conn, now, Defaults::from(&self.options), boot.epoch, boot.mark);
        for job in jobs.iter_mut().filter(|job| !job.is_left_out()) {
            let before = self.conn.total_changes();
            let done = job.run(&mut tx);
            let gone = self.conn.is_autocommit();
            if !done && job.error().is_some_and(|error| error.is_damage()) && job.may_run_again() {
                return Ok(Try::Damaged);
            }
            if gone || (!done && self.conn.total_changes() != before) {
                if job.need() != Need::Enqueue && matches!(job.error(), Some(Error::Full)) {
                    drop(tx);
                    self.roll_back();
                    if self.make_room() {
                        return Ok(Try::Full);
                    }
                }
                job.leave_out(None);
                return Ok(Try::LeftOut);
            }
        }
        tx.finish()?;
        let durable_late = tx.durable && sync == Sync::Free && self.is_full();
        // A commit that writes nothing syncs nothing either.
        let wrote = self.conn.total_changes() != all_before;
        self.check_file()?;
        self.commit()?;
        self.boot = boot;
        self.wall_seen = now.wall;
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

    /// A file that was deleted or replaced would go on taking commits, and they would be gone.
    fn check_file(&self) -> Result<()> {
        match &self.path {
            Some(path) if db::identity(path) != self.identity => Err(Error::FileReplaced { path: path.clone() }),
            _ => Ok(()),
        }
    }

    fn commit(&mut self) -> Result<()> {
        let committed = self.conn.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        match committed {
            Ok(_) => Ok(()),
            // The frames may be on the disk, all or some of them, and come back after a crash.
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure) => {
                self.suspect = true;
                Err(Error::Indeterminate { source: Arc::new(error) })
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
            self.conn = db::connect(path, &self.options)?;
            self.adopt();
            self.set_sync(Sync::Durable)?;
            let conn = &self.conn;
            db::patiently(self.options.busy_wait, || match checkpoint(conn, "TRUNCATE")? {
                Checkpoint { busy: false } => Ok(()),
                _ => Err(Error::Busy { waited: Duration::ZERO }),
            })?;
            db::checkpoint_on_close(&self.conn, self.options.checkpoints)?;
        }
        self.suspect = false;
        Ok(())
    }

    /// Leaves other processes a gap in which their next try for the lock falls, while there are any.
    pub(crate) fn leave_a_gap(&mut self) {
        match &self.contended {
            Some(seen) if seen.elapsed() < CONTENDED_FOR => std::thread::sleep(PAUSE_MAX),
            Some(_) => self.contended = None,
            None => {}
        }
    }

    /// What the leader does for the file after it has answered: a checkpoint when the log is long, and now and then a
    /// step of pruning and shrinking. Errors are kept for stats; they are no caller's business.
    pub(crate) fn maintain(&mut self) {
        if self.suspect {
            return;
        }
        let pages = WAL_PAGES.get();
        if pages < CHECKPOINT_PAGES {
            self.next_checkpoint = CHECKPOINT_PAGES;
        } else if self.options.checkpoints && pages >= self.next_checkpoint {
            // A reader may keep the log from being begun again: then the next try is after as many pages more.
            self.next_checkpoint = pages + CHECKPOINT_PAGES;
            self.note(checkpoint(&self.conn, "PASSIVE"));
        }
        if self.maintained.elapsed() >= MAINTAIN_EVERY {
            self.maintained = Stopwatch::start();
            self.reserve.keep();
            let _ = self.attempt(Duration::ZERO, &mut [&mut Task::new(Need::Claim, prune::step)], false);
            let _ = self.shrink();
        }
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

    /// Gives a step of free pages back to the file system; only where relet made the file. Returns whether there may be more.
    pub(crate) fn shrink(&self) -> Result<bool> {
        Ok(self.path.is_some() && self.owned && shrink(&self.conn, SHRINK_STEP)?)
    }

    /// The last handle is gone: the log goes into the file, so that the file alone is whole.
    pub(crate) fn close(&mut self) {
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
    conn.execute_batch(&format!("PRAGMA main.incremental_vacuum({step})"))?;
    Ok(true)
}
