//! The store: one SQLite file, and every handle on it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::{Connection, MAIN_DB, TransactionState};

use crate::boot::Boot;
use crate::clock::{Now, Timeline, millis};
use crate::db::{self, Readers};
use crate::error::{Error, Result};
use crate::files::{self, Folder, Identity, InUse};
use crate::follower::Slot;
use crate::liveness::Liveness;
use crate::message::{MessageId, check_name};
use crate::options::{Options, check_lease};
use crate::presence::{self, Others};
use crate::queue::Queue;
use crate::random;
use crate::receipt::Receipt;
use crate::sql::claim::Who;
use crate::sql::look::Hope;
use crate::sql::settle::{Known, Settle, Settled};
use crate::sql::{self, Defaults, Tx, meta};
use crate::state::{Route, Status};
use crate::ticket::Ticket;
use crate::view::{Filter, PAGE_MAX, Retrying, Snapshot, Stats, Stuck, Why};
use crate::waker::Waker;
use crate::worker::Worker;
use crate::writer::{Need, Writer};

/// One SQLite file that holds queues. Cheap to clone; all clones are one store, for all threads.
///
/// Any number of processes of one machine may open the same file. The file may also be an application's own database:
/// relet's tables have names that begin with `relet_`, and nothing else in it is touched.
///
/// ```
/// use std::time::Duration;
/// use relet::{Store, Verdict};
///
/// let dir = std::env::temp_dir().join(format!("relet-doc-{}", std::process::id()));
/// std::fs::create_dir_all(&dir).unwrap();
/// let store = Store::open(dir.join("app.db"))?;
/// let id = store.queue("mail").enqueue("hello")?.id(); // on disk when it returns
///
/// let worker = store.worker("mailer-1")?;
/// let claim = worker.claim("mail")?.expect("there is one");
/// claim.defer(Duration::ZERO)?; // rate limited: it stays this worker's, in `processing`
/// match worker.claim_id(id)? {
///     Verdict::Resumed(claim) => claim.ack()?, // and this worker can claim it again
///     other => panic!("{other:?}"),
/// };
/// # drop((worker, store));
/// # std::fs::remove_dir_all(dir).unwrap();
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    // Dropped in this order: the writer's connection is the last one that closes.
    readers: Option<Readers>,
    writer: Option<Writer>,
    options: Options,
    /// `None`: in memory.
    path: Option<PathBuf>,
    identity: Option<Identity>,
    store_id: String,
    liveness: Arc<Liveness>,
    waker: Arc<Waker>,
    risk: Arc<Mutex<()>>,
    /// The process that has opened it.
    pid: u32,
    /// It says that the file is open; dropped last.
    in_use: Option<InUse>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // Closing would write to the parent's file, and let go of what it holds there.
            std::mem::forget((self.readers.take(), self.writer.take(), self.in_use.take()));
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

/// What came of redriving many dead letters.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Redriven {
    /// Messages that are live again.
    pub redriven: Vec<MessageId>,
    /// Messages that stay dead letters, each with the reason ([`Error::KeyTaken`]).
    pub refused: Vec<(MessageId, Error)>,
}

/// Dead letters that are redriven or purged, and messages that are settled, in one transaction of a long run.
const STEP: usize = 500;

impl Options {
    /// Opens the store at this path, and creates it where there is none. Its folder must exist.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::ReadOnly`], [`Error::NotWal`], [`Error::SchemaTooNew`], [`Error::SqliteTooOld`]; and
    /// [`Error::Busy`] where another process kept the file locked for the whole busy wait.
    pub fn open(self, path: impl AsRef<Path>) -> Result<Store> {
        self.check()?;
        let path = files::resolve(path.as_ref())?;
        let in_use = files::identity(&path).map(|identity| InUse::mark(&path, identity)).transpose()?;
        let opened = db::open(&path, &self)?;
        let in_use = match in_use {
            // It was there before.
            Some(in_use) => Some(in_use),
            None => files::identity(&path).map(|identity| InUse::mark(&path, identity)).transpose()?,
        };
        let (store_id, identity, options) = (opened.store_id.clone(), opened.identity, opened.options.clone());
        let readers = db::readers(&path, &options)?;
        let waker = Arc::new(Waker::default());
        let writer = Writer::new(opened, options.clone(), Some(path.clone()), waker.clone());
        let liveness = Arc::new(Liveness::new(Some(Folder::new(&path))));
        let inner = Inner {
            readers: Some(readers),
            writer: Some(writer),
            options,
            path: Some(path),
            identity,
            store_id,
            liveness,
            waker,
            risk: Arc::default(),
            pid: std::process::id(),
            in_use,
        };
        Ok(Store { inner: Arc::new(inner) })
    }

    /// A store of its own in memory: gone with its last handle. All handles and threads share it.
    ///
    /// # Errors
    /// [`Error::SqliteTooOld`], and options that are out of range.
    pub fn open_in_memory(self) -> Result<Store> {
        self.check()?;
        let opened = db::open_in_memory(&self)?;
        let store_id = opened.store_id.clone();
        let waker = Arc::new(Waker::default());
        let writer = Writer::new(opened, self.clone(), None, waker.clone());
        let liveness = Arc::new(Liveness::new(None));
        let inner = Inner {
            readers: None,
            writer: Some(writer),
            options: self,
            path: None,
            identity: None,
            store_id,
            liveness,
            waker,
            risk: Arc::default(),
            pid: std::process::id(),
            in_use: None,
        };
        Ok(Store { inner: Arc::new(inner) })
    }

    /// Opens an existing store for looking only; everything that would change it is refused with [`Error::ReadOnly`].
    ///
    /// # Errors
    /// As [`Options::open`]; [`Error::Open`] where there is no store.
    pub fn open_read_only(self, path: impl AsRef<Path>) -> Result<Store> {
        self.check()?;
        let path = files::resolve(path.as_ref())?;
        let identity = files::identity(&path);
        let in_use = identity.map(|identity| InUse::mark(&path, identity)).transpose()?;
        let readers = db::open_read_only(&path, &self)?;
        let liveness = Arc::new(Liveness::new(Some(Folder::new(&path))));
        let mut inner = Inner {
            readers: Some(readers),
            writer: None,
            options: self,
            path: Some(path),
            identity,
            store_id: String::new(),
            liveness,
            waker: Arc::default(),
            risk: Arc::default(),
            pid: std::process::id(),
            in_use,
        };
        // A damaged store is to be looked at, too.
        inner.store_id =
            inner.with_reader(false, |conn| Ok(meta::get(conn, "store_id").ok().flatten()))?.unwrap_or_default();
        Ok(Store { inner: Arc::new(inner) })
    }
}

impl Store {
    /// Opens the store at this path with the defaults, and creates it where there is none. See [`Options::open`].
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Store> {
        Options::default().open(path)
    }

    /// The settings, to be changed before opening.
    pub fn options() -> Options {
        Options::default()
    }

    /// A store of its own in memory. See [`Options::open_in_memory`].
    ///
    /// # Errors
    /// As [`Options::open_in_memory`].
    pub fn open_in_memory() -> Result<Store> {
        Options::default().open_in_memory()
    }

    /// Opens an existing store for looking only. See [`Options::open_read_only`].
    ///
    /// # Errors
    /// As [`Options::open_read_only`].
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Store> {
        Options::default().open_read_only(path)
    }

    /// The absolute path of its file; `None` in memory.
    pub fn path(&self) -> Option<&Path> {
        self.inner.path.as_deref()
    }

    /// The queue of this name. Its name is judged when it is used; it exists from its first message on.
    pub fn queue(&self, name: &str) -> Queue {
        Queue::new(self.clone(), name)
    }

    /// Starts a worker: a label that stays the same over restarts, and a new incarnation of it.
    ///
    /// The label is this handle's alone while it lives, among all processes: its process holds the lock of a file in a folder
    /// beside the store. When the process dies, in whatever way, its claims are anyone's at once. Claims that an earlier
    /// start of the label still holds are void, and this one finds them first.
    ///
    /// # Errors
    /// [`Error::LabelTaken`] where a worker with this label is running; [`Error::Text`] for an empty or overlong label.
    pub fn worker(&self, label: &str) -> Result<Worker> {
        Worker::start(self.clone(), label)
    }

    /// Starts a worker with a label of its own that no other process has, wherever it runs: for those who do not come back under the same name.
    ///
    /// # Errors
    /// As [`Store::worker`].
    pub fn worker_unnamed(&self) -> Result<Worker> {
        self.worker(&format!("unnamed-{}", random::name()))
    }

    /// A worker without an incarnation: its claims are known by label and lease alone, and any process may go on with them under the same label. For programs that live shorter than their claims, such as the command line.
    ///
    /// # Errors
    /// [`Error::Text`] for an empty or overlong label.
    pub fn detached(&self, label: &str) -> Result<Worker> {
        check_name("worker label", label)?;
        Ok(Worker::detached(self.clone(), label))
    }

    /// Settles the claim with this receipt.
    ///
    /// The receipt alone decides. A claim whose lease has run out can still be settled, as long as nobody has taken the
    /// message back.
    ///
    /// # Errors
    /// [`Error::Stale`] or [`Error::Cancelled`], and nothing was changed.
    pub fn settle(&self, receipt: Receipt, how: Settle) -> Result<Settled> {
        self.settle_known(receipt, how, Known::default())
    }

    /// As [`Store::settle`], by the claim itself.
    pub(crate) fn settle_known(&self, receipt: Receipt, how: Settle, known: Known) -> Result<Settled> {
        let need = check_settle(&how)?;
        self.write(need, move |tx| sql::settle::settle(tx, receipt, &how, known))
    }

    /// As [`Store::settle`], and does not wait: the settle is laid down, and shares a commit with what comes after it. See
    /// [`Ticket`] for when it is carried out.
    ///
    /// Until then the message is held as before. Once it is carried out, others may see it before it is on the disk: a power cut
    /// may undo a settle that was not waited for, and its message is handed out again.
    ///
    /// ```
    /// use relet::{Settle, Settled, Status, Store};
    ///
    /// let store = Store::open_in_memory()?;
    /// store.queue("mail").enqueue_all(["a", "b", "c"])?;
    /// let worker = store.worker("mailer-1")?;
    /// let mut tickets = Vec::new();
    /// while let Some(claim) = worker.claim("mail")? {
    ///     tickets.push(store.settle_deferred(claim.receipt(), Settle::Ack)?); // goes with the next claim's commit
    /// }
    /// for ticket in tickets {
    ///     assert_eq!(ticket.wait()?, Settled::Now(Status::Done)); // the first one brings all of them to the disk
    /// }
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Range`] for a lease out of range, and [`Error::ReadOnly`]; whatever comes after that is told by the ticket.
    pub fn settle_deferred(&self, receipt: Receipt, how: Settle) -> Result<Ticket<Settled>> {
        self.settle_deferred_known(receipt, how, Known::default())
    }

    /// As [`Store::settle_deferred`], by the claim itself.
    pub(crate) fn settle_deferred_known(&self, receipt: Receipt, how: Settle, known: Known) -> Result<Ticket<Settled>> {
        let need = check_settle(&how)?;
        let how = how.shortened();
        self.defer(need, text_bytes(&how), move |tx| sql::settle::settle(tx, receipt, &how, known))
    }

    /// Settles many claims, each with an outcome of its own, in their order: in one commit, or in several where one would keep others
    /// waiting for long (from some hundred claims on).
    ///
    /// # Errors
    /// For the whole call: what is wrong with one receipt is in its own outcome. What was settled before the error stays so, and
    /// may be settled again with the same receipts.
    pub fn settle_all(&self, all: impl IntoIterator<Item = (Receipt, Settle)>) -> Result<Vec<Result<Settled>>> {
        let all: Vec<_> = all.into_iter().collect();
        let mut need = Need::Claim;
        for (_, how) in &all {
            if check_settle(how)? == Need::Settle {
                need = Need::Settle;
            }
        }
        self.each(need, all, |tx, (receipt, how)| sql::settle::settle(tx, *receipt, how, Known::default()))
    }

    /// Acks by receipt, as [`Claim::ack`](crate::Claim::ack) does.
    ///
    /// # Errors
    /// As [`Store::settle`].
    pub fn ack(&self, receipt: Receipt) -> Result<Settled> {
        self.settle(receipt, Settle::Ack)
    }

    /// Acks in the application's own transaction on the same file: the effect and the ack are one commit.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Cancelled`] or [`Error::Gone`], on which the transaction should be rolled back;
    /// [`Error::WrongFile`], [`Error::NotImmediate`].
    pub fn ack_in(&self, conn: &Connection, receipt: Receipt) -> Result<()> {
        self.join(conn, |tx| {
            sql::settle::guard(tx, receipt)?;
            sql::settle::settle(tx, receipt, &Settle::Ack, Known::default()).map(drop)
        })
    }

    /// Refuses, in the application's own transaction, to go on with a claim that is lost: call it before the effects are written.
    ///
    /// # Errors
    /// As [`Store::ack_in`].
    pub fn guard(&self, conn: &Connection, receipt: Receipt) -> Result<()> {
        self.join(conn, |tx| sql::settle::guard(tx, receipt))
    }

    /// Cancels a live message; one that is cancelled already stays so. If a worker holds it, that worker's next call says so ([`Error::Cancelled`]).
    ///
    /// # Errors
    /// [`Error::Gone`], or [`Error::Status`] where it is done or dead.
    pub fn cancel(&self, id: impl Into<MessageId>) -> Result<()> {
        let id = id.into();
        self.write(Need::Settle, move |tx| sql::dead::cancel(tx, id.get()))
    }

    /// Cancels many, each with an outcome of its own: in one commit, or in several where one would keep others waiting for long
    /// (from some hundred messages on).
    ///
    /// # Errors
    /// For the whole call. What was cancelled before the error stays so, and may be cancelled again.
    pub fn cancel_all(&self, ids: impl IntoIterator<Item = MessageId>) -> Result<Vec<Result<()>>> {
        self.each(Need::Settle, ids.into_iter().collect(), |tx, id| sql::dead::cancel(tx, id.get()))
    }

    /// Changes the route of a live message: the claimable status it has, or will have when its holder gives it back.
    ///
    /// # Errors
    /// [`Error::Gone`], or [`Error::Status`] where it is finished.
    pub fn route(&self, id: impl Into<MessageId>, route: Route) -> Result<()> {
        let id = id.into();
        self.write(Need::Settle, move |tx| sql::settle::reroute(tx, id.get(), route))
    }

    /// Takes a message back out of the dead letters: all budgets whole, its history kept.
    ///
    /// # Errors
    /// [`Error::KeyTaken`] where a live message has its key by now; [`Error::Gone`]; [`Error::Status`] where it is no dead letter.
    pub fn redrive(&self, id: impl Into<MessageId>) -> Result<()> {
        let id = id.into();
        self.write(Need::Settle, move |tx| sql::dead::redrive(tx, id.get()))
    }

    /// Redrives every dead letter of a queue, or of all, in the order of their deaths and in steps: others go on meanwhile, and what dies meanwhile stays dead.
    ///
    /// # Errors
    /// What was redriven before the error stays so.
    pub fn redrive_all(&self, queue: Option<&str>) -> Result<Redriven> {
        let mut all = Redriven::default();
        let mut after = (0, 0);
        let until = self.read(|_, now| Ok(now.time))?;
        loop {
            let queue = queue.map(str::to_owned);
            let step = self.write(Need::Settle, move |tx| {
                let queue = match &queue {
                    Some(name) => match sql::queues::find(tx.conn, name)? {
                        Some(queue) => Some(queue.id),
                        None => return Ok(Vec::new()),
                    },
                    None => None,
                };
                let page = sql::dead::page(tx.conn, queue, after, until, STEP)?;
                page.into_iter()
                    .map(|(place, is_meant)| {
                        let outcome = if is_meant { Some(item(sql::dead::redrive(tx, place.1))?) } else { None };
                        Ok((place, outcome))
                    })
                    .collect::<Result<Vec<_>>>()
            })?;
            let Some((last, _)) = step.last() else { return Ok(all) };
            after = *last;
            for ((_, id), outcome) in step {
                match outcome {
                    Some(Ok(())) => all.redriven.push(MessageId::new(id)),
                    Some(Err(error)) => all.refused.push((MessageId::new(id), error)),
                    None => {}
                }
            }
        }
    }

    /// Redrives the dead letters that this filter lists (its status does not count), in as few commits as keep nobody waiting for long, and says which of them could not be.
    ///
    /// ```
    /// use relet::{Filter, Store};
    ///
    /// let store = Store::open_in_memory()?;
    /// let ids = store.queue("mail").enqueue_all(["a", "b", "c"])?;
    /// for claim in store.worker("w")?.claim_batch("mail", 3)? {
    ///     claim.reject("no such address")?;
    /// }
    /// let outcome = store.redrive_where(&Filter::new().queue("mail").after(ids[0].id()))?;
    /// assert_eq!(outcome.redriven, [ids[1].id(), ids[2].id()]);
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// What was redriven before the error stays so.
    pub fn redrive_where(&self, filter: &Filter) -> Result<Redriven> {
        let letters = self.list(&filter.clone().status(Status::Dead).payload(false))?;
        let ids: Vec<MessageId> = letters.into_iter().map(|letter| letter.id).collect();
        let outcomes = self.each(Need::Settle, ids.clone(), |tx, id| sql::dead::redrive(tx, id.get()))?;
        let mut all = Redriven::default();
        for (id, outcome) in ids.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => all.redriven.push(id),
                Err(error) => all.refused.push((id, error)),
            }
        }
        Ok(all)
    }

    /// Deletes dead letters that died at least this long ago, in steps. Returns how many.
    ///
    /// # Errors
    /// What was deleted before the error stays so.
    pub fn purge_dead(&self, older_than: Duration) -> Result<u64> {
        let age = millis(older_than);
        self.in_steps(move |tx| sql::prune::dead_letters(tx, age))
    }

    /// Deletes what is finished and has been kept long enough, makes dead letters of what has expired, and gives free pages back, in steps. relet does a little of this by itself, as messages go through.
    ///
    /// # Errors
    /// What was done before the error stays so.
    pub fn prune(&self) -> Result<u64> {
        let changed = self.in_steps(sql::prune::step)?;
        self.writer()?.shrink()?;
        Ok(changed)
    }

    /// Moves the write-ahead log into the file. Returns whether it is empty now; a reader can hold that up.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], or what the disk says.
    pub fn checkpoint(&self) -> Result<bool> {
        self.writer()?.checkpoint()
    }

    /// Counters, ages and sizes; costs the same at ten messages and at ten million that wait or are finished. What is held is
    /// counted one by one.
    ///
    /// # Errors
    /// [`Error::Pool`] where no reader became free, [`Error::FileReplaced`].
    pub fn stats(&self) -> Result<Stats> {
        let stuck_after = self.inner.options.stuck_after;
        let queues = self.read(move |conn, now| sql::look::stats(conn, stuck_after, now))?;
        let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
        let path = self.inner.path.as_deref();
        Ok(Stats {
            queues,
            file_bytes: path.map_or(0, size),
            wal_bytes: path.map_or(0, |path| size(&files::beside(path, "-wal"))),
            checkpoint_error: self.inner.writer.as_ref().and_then(Writer::checkpoint_error),
        })
    }

    /// A page of messages, by id.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn list(&self, filter: &Filter) -> Result<Vec<Snapshot>> {
        // Payloads may be large: such a look takes none of the readers away from others.
        self.inner.read(filter.payload, |conn, now| sql::look::list(conn, filter, now))
    }

    /// One message, with its payload.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn show(&self, id: impl Into<MessageId>) -> Result<Option<Snapshot>> {
        let id = id.into().get();
        self.read(|conn, now| sql::look::show(conn, id, now))
    }

    /// Why this message is not being handed out now, found with the claim's own conditions; `None` where there is no such message.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn why(&self, id: impl Into<MessageId>) -> Result<Option<Why>> {
        let id = id.into().get();
        self.read(|conn, now| sql::look::why(conn, id, now))
    }

    /// The retry queue of one queue or of all, the earliest first, at most `limit` rows (more than [`PAGE_MAX`] count as that).
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn retry_queue(&self, queue: Option<&str>, limit: usize) -> Result<Vec<Retrying>> {
        self.read(|conn, now| sql::look::retry_queue(conn, queue, limit.min(PAGE_MAX), now))
    }

    /// What has sat in `processing` for this long and more although nobody holds it with a lease that runs. Changes nothing.
    ///
    /// A long lease, or one that is extended, is not stuck, however old its claim.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn stuck(&self, older_than: Duration) -> Result<Vec<Stuck>> {
        self.read(|conn, now| sql::look::stuck(conn, older_than, now))
    }

    /// Checks the file, the checksums and every promise that the tables can break. Returns what it found wrong, in sentences. Reads everything, so it takes as long as the file is large; others go on meanwhile.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn doctor(&self) -> Result<Vec<String>> {
        let clock = &self.inner.options.clock;
        self.inner.with_reader(true, |conn| {
            let transaction = conn.unchecked_transaction()?;
            let boot = Boot::load(&transaction, clock).ok().flatten();
            let now = match boot.map(|boot| boot.look(clock, || self.inner.others(&transaction))) {
                Some(Ok(now)) => now,
                // Then the ends of leases are no instants of this clock.
                _ => {
                    let reading = clock.read();
                    Now { awake: i64::MAX, ..Timeline::begin(reading, 0, Timeline::default()).now(reading) }
                }
            };
            sql::doctor::examine(&transaction, now)
        })
    }

    /// Writes a copy of the whole database, as of now, to a new file, while others go on. The copy is complete without a log beside it, and its receipts are of a new epoch.
    ///
    /// # Errors
    /// [`Error::Backup`] where the target exists or cannot be written; then there is no file.
    pub fn backup(&self, target: impl AsRef<Path>) -> Result<()> {
        crate::backup::write(target.as_ref(), |copy| {
            self.inner.with_reader(true, |conn| sql::meta::copy_into(conn, copy))
        })
    }

    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.inner.liveness
    }

    pub(crate) fn waker(&self) -> &Waker {
        &self.inner.waker
    }

    /// What this worker may hope for in each of these queues, found without the write lock; and how long it is until that may
    /// change by itself. `None`: that is best asked under the lock (in memory there is only the one connection, and what was laid
    /// down before is to be carried out first).
    pub(crate) fn hopes(&self, queues: &[Arc<str>], who: &Who) -> Result<Option<(Vec<Hope>, Duration)>> {
        let (Some(_), Some(writer)) = (&self.inner.readers, &self.inner.writer) else { return Ok(None) };
        if writer.has_laid_down() {
            return Ok(None);
        }
        self.read(|conn, now| {
            let longest = self.inner.waker.longest_nap();
            let mut nap = longest;
            let mut hopes = Vec::with_capacity(queues.len());
            for queue in queues {
                let hope = sql::look::hope(conn, queue, who, now)?;
                if hope.queue.is_some() && !hope.any {
                    nap = nap.min(sql::look::next_event(conn, queue, now)?.unwrap_or(longest));
                }
                hopes.push(hope);
            }
            Ok(Some((hopes, nap)))
        })
    }

    /// Sleeps until something may have become claimable in one of these queues since `seen`, for at most `limit`.
    pub(crate) fn sleep<'q>(
        &self,
        queues: impl IntoIterator<Item = &'q str>,
        seen: u64,
        limit: Duration,
    ) -> Result<()> {
        let (ids, nap) = self.read(|conn, now| {
            let longest = self.inner.waker.longest_nap();
            let (mut ids, mut nap) = (Vec::new(), limit.min(longest));
            for queue in queues {
                nap = nap.min(sql::look::next_event(conn, queue, now)?.unwrap_or(longest));
                ids.extend(sql::queues::id_of(conn, queue)?);
            }
            Ok((ids, nap))
        })?;
        self.sleep_for(ids, seen, nap);
        Ok(())
    }

    /// As [`Store::sleep`], for at most `nap`, by the queues' ids.
    pub(crate) fn sleep_for(&self, queues: Vec<i64>, seen: u64, nap: Duration) {
        if let Some(path) = self.path() {
            self.inner.waker.watch(path);
        }
        self.inner.waker.sleep(queues, seen, nap);
    }

    /// The right of this process to work on a message that has crashed before: one has it at a time.
    pub(crate) fn risk(&self) -> &Arc<Mutex<()>> {
        &self.inner.risk
    }

    pub(crate) fn options_used(&self) -> &Options {
        &self.inner.options
    }

    /// The path of its file (`None`: in memory), if this handle may write to it.
    pub(crate) fn writable_path(&self) -> Result<Option<&Path>> {
        self.writer().map(|_| self.path())
    }

    /// Refuses what was inherited over a fork, before any lock is touched that another thread of the parent may have held then.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.inner.check_process()
    }

    fn writer(&self) -> Result<&Writer> {
        self.check_process()?;
        self.inner.writer.as_ref().ok_or_else(|| Error::ReadOnly {
            path: self.inner.path.clone().unwrap_or_default(),
            detail: "it was opened for looking only".into(),
        })
    }

    pub(crate) fn write<T: Send + 'static>(
        &self,
        need: Need,
        op: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.writer()?.run(need, op)
    }

    pub(crate) fn defer<T: Send + 'static>(
        &self,
        need: Need,
        bytes: usize,
        op: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<Ticket<T>> {
        Ok(Ticket::new(self.clone(), self.writer()?.defer(need, bytes, op)))
    }

    /// Waits for what was deferred.
    pub(crate) fn wait<T>(&self, slot: &Slot<T>) -> Result<T> {
        self.check_process()?;
        match &self.inner.writer {
            Some(writer) => writer.wait(slot),
            None => slot.outcome(),
        }
    }

    /// Does the same to each of these items, as many in a commit as its budget has room for. Returns their outcomes, in their order.
    fn each<I: Send + Sync + 'static, T: Send + 'static>(
        &self,
        need: Need,
        items: Vec<I>,
        op: impl Fn(&mut Tx<'_>, &I) -> Result<T> + Copy + Send + 'static,
    ) -> Result<Vec<Result<T>>> {
        let items = Arc::new(items);
        let mut outcomes = Vec::with_capacity(items.len());
        loop {
            let (items, from) = (items.clone(), outcomes.len());
            let all = items.len();
            outcomes.extend(self.write(need, move |tx| {
                let mut done = Vec::new();
                for at in &items[from..] {
                    if !tx.budget.has_room(done.len()) {
                        break;
                    }
                    done.push(item(op(tx, at))?);
                }
                Ok(done)
            })?);
            if outcomes.len() == all {
                return Ok(outcomes);
            }
        }
    }

    /// Looks for dead owners, without the write lock, and makes their claims void, in steps. Returns whether there were any.
    pub(crate) fn bury_dead(&self) -> Result<bool> {
        let (rows, marked) = self.read(|conn, _| Ok((sql::workers::all(conn)?, sql::ended::any(conn)?)))?;
        let liveness = self.liveness();
        let dead = liveness.dead(rows);
        if liveness.has_ended() {
            let liveness = liveness.clone();
            self.write(Need::Claim, move |tx| liveness.strike_ended(tx))?;
        }
        if dead.is_empty() && !marked {
            return Ok(false);
        }
        if !dead.is_empty() {
            self.each(Need::Claim, dead, |tx, row| sql::workers::bury(tx, row))?;
        }
        self.clear_ended()?;
        Ok(true)
    }

    /// Changes what still looks like a start's that is over, see [`sql::ended`].
    pub(crate) fn clear_ended(&self) -> Result<()> {
        let found = self.read(|conn, _| sql::ended::find(conn, usize::MAX))?.unwrap_or_default();
        if !found.marks.is_empty() {
            self.each(Need::Claim, found.into_steps(), |tx, step| sql::ended::step(tx, step))?;
            self.inner.waker.ring_all();
        }
        Ok(())
    }

    /// Repeats a bounded step, each in a commit of its own, until it has nothing left to do.
    fn in_steps(&self, step: impl Fn(&mut Tx<'_>) -> Result<usize> + Copy + Send + 'static) -> Result<u64> {
        let mut all = 0;
        loop {
            match self.write(Need::Settle, step)? {
                0 => return Ok(all),
                some => all += some as u64,
            }
        }
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&Connection, Now) -> Result<T>) -> Result<T> {
        self.inner.read(false, look)
    }

    /// The store's time; where that cannot be read, what the wall clock says.
    pub(crate) fn now(&self) -> Now {
        let reading = self.inner.options.clock.read();
        let now = self
            .read(|_, now| Ok(now))
            .unwrap_or_else(|_| Timeline::begin(reading, 0, Timeline::default()).now(reading));
        Now { awake: reading.awake, ..now }
    }

    /// A look outside of a transaction.
    fn read_plain<T>(&self, look: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        self.inner.with_reader(false, look)
    }

    /// Runs `op` inside the application's own transaction; what fails undoes itself alone.
    pub(crate) fn join<T>(&self, conn: &Connection, op: impl FnOnce(&mut Tx<'_>) -> Result<T>) -> Result<T> {
        self.writer()?;
        if conn.is_autocommit() {
            return Err(Error::NotImmediate);
        }
        let wrong = || Error::WrongFile { path: self.inner.path.clone().unwrap_or_default() };
        // A file that was copied says that it is this store.
        let same = |path| files::identity(Path::new(path)) == self.inner.identity;
        if self.inner.path.is_some() && !conn.path().is_some_and(same) {
            return Err(wrong());
        }
        if !meta::exists(conn)? || meta::get::<String>(conn, "store_id")?.as_deref() != Some(&*self.inner.store_id) {
            return Err(wrong());
        }
        // Its path may lead here, and what it has open may be the file that was there before.
        let opening = |conn: &Connection| meta::get::<String>(conn, "opening");
        if opening(conn)? != self.read_plain(opening)? {
            return Err(wrong());
        }
        if conn.transaction_state(Some(MAIN_DB))? != TransactionState::Write {
            return Err(Error::NotImmediate);
        }
        let options = &self.inner.options;
        let boot = Boot::load(conn, &options.clock)?.ok_or_else(wrong)?;
        let mut tx = Tx::new(conn, boot.timeline.now(options.clock.read()), Defaults::from(options), boot.epoch, 0);
        tx.floor = boot.floor;
        tx.nested(op)
    }
}

impl Inner {
    /// `long`: it may take its time, and so has a connection of its own.
    fn read<T>(&self, long: bool, look: impl FnOnce(&Connection, Now) -> Result<T>) -> Result<T> {
        self.with_reader(long, |conn| {
            let transaction = conn.unchecked_transaction()?;
            let boot = Boot::load(&transaction, &self.options.clock)?
                .ok_or_else(|| Error::Corrupt { detail: "relet_meta has no \"epoch\"".into() })?;
            let now = boot.look(&self.options.clock, || self.others(&transaction))?;
            let value = look(&transaction, now)?;
            transaction.commit()?;
            Ok(value)
        })
    }

    /// Who has the store open, for a look.
    fn others(&self, conn: &Connection) -> Result<Others> {
        match &self.path {
            Some(path) if self.writer.is_none() => {
                let folder = Folder::new(path);
                Ok(match presence::look(&folder, self.identity) {
                    Others::Nobody if presence::any_alive(&folder, &sql::workers::all(conn)?) => Others::Present,
                    others => others,
                })
            }
            _ => Ok(Others::Present), // this one does
        }
    }

    /// A child that was forked has a copy of everything, and the parent goes on with the same file and the same locks.
    fn check_process(&self) -> Result<()> {
        match self.pid == std::process::id() {
            true => Ok(()),
            false => Err(Error::Forked { parent: self.pid }),
        }
    }

    fn with_reader<T>(&self, long: bool, look: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        self.check_process()?;
        match (&self.readers, &self.writer) {
            (Some(readers), _) => {
                if let Some(path) = &self.path
                    && files::identity(path) != self.identity
                {
                    return Err(Error::FileReplaced { path: path.clone() });
                }
                if let Some(path) = self.path.as_ref().filter(|_| long) {
                    return look(&db::reader(path, &self.options)?);
                }
                let _held_up = self.writer.as_ref().and_then(Writer::look);
                let conn = readers.get().map_err(|error| Error::Pool { detail: error.to_string() })?;
                look(&conn)
            }
            (None, Some(writer)) => writer.with_connection(look),
            (None, None) => unreachable!("a store has readers, a writer, or both"),
        }
    }
}

/// The outcome of one item of a bulk call: what concerns only this item is its own, anything else ends the call.
pub(crate) fn item<T>(outcome: Result<T>) -> Result<Result<T>> {
    match outcome {
        Err(error) if error.is_claim_lost() || matches!(error, Error::Status { .. } | Error::KeyTaken { .. }) => {
            Ok(Err(error))
        }
        outcome => outcome.map(Ok),
    }
}

/// Refuses what cannot be settled so, and says what its commit must survive.
fn check_settle(how: &Settle) -> Result<Need> {
    match how {
        Settle::Extend { lease } => check_lease(*lease).map(|()| Need::Claim),
        _ => Ok(Need::Settle),
    }
}

/// The bytes of what it says.
fn text_bytes(how: &Settle) -> usize {
    match how {
        Settle::Fail { error, .. } | Settle::Reject { error } => error.len(),
        Settle::Defer { reason, .. } => reason.len(),
        _ => 0,
    }
}
