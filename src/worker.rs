//! The worker: whoever claims.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::claim::{Claim, Verdict};
use crate::clock::Stopwatch;
use crate::error::Result;
use crate::message::{MessageId, check_name};
use crate::options::check_lease;
use crate::presence::Lock;
use crate::receipt::Receipt;
use crate::sql;
use crate::sql::claim::{ById, Next, Routes, Taken, Who};
use crate::sql::look::Hope;
use crate::sql::record::Large;
use crate::sql::settle::{Known, Settle, Settled};
use crate::sql::workers::Holding;
use crate::state::Route;
use crate::store::{Store, item};
use crate::view::{Life, WorkerView};
use crate::writer::Need;

/// A started worker: a label, and this start of it. Cheap to clone; all clones are one worker, for all threads.
///
/// It ends with its last handle and its last claim, which then strikes it off the store: do not drop them while this thread
/// holds a write transaction of its own on the same file, or that waits for itself, for the whole busy wait.
///
/// ```
/// use relet::Store;
///
/// let store = Store::open_in_memory()?;
/// store.queue("mail").enqueue_all(["a", "b"])?;
/// let worker = store.worker("mailer-1")?;
/// while let Some(claim) = worker.claim("mail")? {
///     claim.ack()?;
/// }
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Worker {
    start: Arc<Start>,
    who: Who,
}

/// One start of a label. It ends when its last handle and its last claim are gone; what it still holds keeps its lease, since
/// somebody may have its receipt.
#[derive(Debug)]
struct Start {
    store: Store,
    label: Arc<str>,
    incarnation: i64,
    /// Held for as long as this lives; `None` in memory, and where it is detached.
    lock: Option<Lock>,
    /// Its last claim found something. Where it did not, the next one looks first.
    found: AtomicBool,
}

/// What a [`Worker::step`] came to.
pub(crate) struct Step {
    pub(crate) settled: Option<Result<Settled>>,
    /// The claim, and the place of its queue among those that were asked for.
    pub(crate) taken: Option<(usize, Taken)>,
    /// The places of those that had nothing.
    pub(crate) empty: Vec<usize>,
    /// A claim was full with clearing the way: there may be more.
    pub(crate) again: bool,
}

impl Drop for Start {
    fn drop(&mut self) {
        let (label, incarnation) = (self.label.clone(), self.incarnation);
        // In a forked child this is the parent's start.
        if incarnation == 0 || self.store.check_process().is_err() {
            return;
        }
        let struck = label.clone();
        let ended = self.store.write(Need::Claim, move |tx| sql::workers::strike(tx, &struck, incarnation));
        let Some(lock) = self.lock.take() else { return };
        match ended {
            Ok(()) => lock.remove(),
            Err(_) => self.store.liveness().strike_later(label, incarnation, lock),
        }
    }
}

impl Worker {
    pub(crate) fn start(store: Store, label: &str) -> Result<Worker> {
        check_name("worker label", label)?;
        let label: Arc<str> = label.into();
        let (registered, liveness) = (label.clone(), store.liveness().clone());
        store.bury_dead()?;
        let (incarnation, lock) = store.write(Need::Settle, move |tx| liveness.start(tx, &registered))?;
        let worker = Worker::new(store, label, incarnation, lock);
        worker.store().clear_ended()?;
        Ok(worker)
    }

    /// Commands that this process runs from now on inherit the worker's lock: one that outlives this process keeps the
    /// worker's claims, until their leases end. Unix only; elsewhere nothing is inherited.
    ///
    /// # Errors
    /// [`Error::Open`](crate::Error::Open) where the system refuses it.
    pub fn share_with_commands(&self) -> Result<()> {
        self.start.lock.as_ref().map_or(Ok(()), Lock::share)
    }

    pub(crate) fn detached(store: Store, label: &str) -> Worker {
        Worker::new(store, label.into(), 0, None)
    }

    fn new(store: Store, label: Arc<str>, incarnation: i64, lock: Option<Lock>) -> Worker {
        let who = Who {
            label: label.clone(),
            incarnation,
            routes: Routes::ALL,
            lease: None,
            crashed: true,
            large: Large::Read,
        };
        Worker { start: Arc::new(Start { store, label, incarnation, lock, found: AtomicBool::new(false) }), who }
    }

    /// Its label.
    pub fn label(&self) -> &str {
        &self.who.label
    }

    /// The same worker, restricted to messages on these routes (also those that wait or lie in `processing`); all unless set.
    pub fn routes(&self, routes: &[Route]) -> Worker {
        Worker { who: Who { routes: Routes::of(routes), ..self.who.clone() }, ..self.clone() }
    }

    /// The same worker, whose claims hold this long without being extended; the queue's lease, else the store's, unless set.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) for a lease out of range.
    pub fn lease(&self, lease: Duration) -> Result<Worker> {
        check_lease(lease)?;
        Ok(Worker { who: Who { lease: Some(lease), ..self.who.clone() }, ..self.clone() })
    }

    /// The same worker, whose claims leave payloads above 2 KiB in the file: a claim then costs the same however large its payload
    /// is, and [`Claim::payload_reader`] reads it in pieces. Its checksum is not looked at when it is claimed, but when it is
    /// read: what turns out to be damaged is best [rejected](Claim::reject).
    ///
    /// ```
    /// use std::time::Duration;
    /// use relet::Store;
    ///
    /// let store = Store::open_in_memory()?;
    /// store.queue("scans").enqueue(vec![7; 1 << 20])?;
    /// let worker = store.worker("scanner-1")?.without_payloads();
    /// let claim = worker.claim_wait("scans", Duration::from_secs(1))?.expect("there is one");
    /// assert_eq!((claim.payload().len(), claim.payload_bytes()), (0, 1 << 20));
    /// let mut copy = Vec::new(); // a file, a socket, an encoder …
    /// claim.write_payload_to(&mut copy)?;
    /// assert_eq!(copy, [7; 1 << 20]);
    /// # Ok::<(), relet::Error>(())
    /// ```
    pub fn without_payloads(&self) -> Worker {
        Worker { who: Who { large: Large::Leave, ..self.who.clone() }, ..self.clone() }
    }

    /// As [`Worker::claim`], by this worker [`without_payloads`](Worker::without_payloads).
    ///
    /// # Errors
    /// As [`Worker::claim`].
    pub fn claim_without_payload(&self, queue: &str) -> Result<Option<Claim>> {
        self.without_payloads().claim(queue)
    }

    /// Claims the next message of a queue: first what this worker had deferred and is due, then by priority, then by id.
    /// Never one that this worker is busy with. `None`: nothing can be claimed now.
    ///
    /// # Errors
    /// [`Error::Superseded`](crate::Error::Superseded) where the label was started again since;
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn claim(&self, queue: &str) -> Result<Option<Claim>> {
        self.claim_one(queue, true)
    }

    fn claim_one(&self, queue: &str, eager: bool) -> Result<Option<Claim>> {
        check_name("queue", queue)?;
        let queue: Arc<str> = queue.into();
        loop {
            let next = self.claim_some(&queue, 1, eager)?;
            match next.taken.into_iter().next() {
                Some(taken) => {
                    let mut claim = Claim::new(self.clone(), &queue, taken);
                    if claim.read_left()? {
                        return Ok(Some(claim));
                    }
                }
                None if next.again => {}
                None => return Ok(None),
            }
        }
    }

    /// As [`Worker::claim`], and waits for at most `limit` until there is something: within a millisecond of a commit of this
    /// process, a few of another one's, and at the very instant at which something becomes due.
    ///
    /// ```
    /// use std::time::Duration;
    /// use relet::Store;
    ///
    /// let store = Store::open_in_memory()?;
    /// let worker = store.worker("mailer-1")?;
    /// let producer = std::thread::spawn(move || store.queue("mail").enqueue("hello"));
    /// worker.claim_wait("mail", Duration::from_secs(10))?.expect("it comes").ack()?;
    /// producer.join().unwrap()?;
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Worker::claim`].
    pub fn claim_wait(&self, queue: &str, limit: Duration) -> Result<Option<Claim>> {
        self.start.store.check_process()?;
        let watch = Stopwatch::start();
        // Only the first look is eager: a hundred workers that wait are not to look for each other's death all the time.
        let mut eager = true;
        loop {
            let seen = self.store().waker().rings();
            if let Some(claim) = self.claim_one(queue, eager)? {
                return Ok(Some(claim));
            }
            eager = false;
            let left = limit.saturating_sub(watch.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            self.start.store.sleep([queue], seen, left)?;
        }
    }

    /// Claims up to `count` messages of a queue, in the order of [`Worker::claim`]: in one commit, or in several where one would keep
    /// others waiting for long (from some hundred messages on).
    ///
    /// # Errors
    /// As [`Worker::claim`].
    pub fn claim_batch(&self, queue: &str, count: usize) -> Result<Vec<Claim>> {
        check_name("queue", queue)?;
        let queue: Arc<str> = queue.into();
        let (mut claims, mut failed) = (Vec::new(), None);
        while claims.len() < count {
            let next = match self.claim_some(&queue, count - claims.len(), true) {
                // What an earlier step has claimed is not to be lost with the error.
                Err(_) if !claims.is_empty() => return Ok(claims),
                next => next?,
            };
            let mut given_up = false;
            for taken in next.taken {
                let mut claim = Claim::new(self.clone(), &queue, taken);
                match claim.read_left() {
                    Ok(true) => claims.push(claim),
                    Ok(false) => given_up = true,
                    Err(error) => failed = Some(error),
                }
            }
            if failed.is_some() || !(next.again || given_up) {
                break;
            }
        }
        match failed {
            Some(error) if claims.is_empty() => Err(error),
            _ => Ok(claims),
        }
    }

    /// Claims this very message, or says why not. Claiming what this worker holds or has deferred is safe: it gets a new
    /// receipt, and the older one is stale.
    ///
    /// # Errors
    /// As [`Worker::claim`].
    pub fn claim_id(&self, id: impl Into<MessageId>) -> Result<Verdict> {
        let id = id.into();
        loop {
            let (verdict, queue) = match self.claim_this(id)? {
                // Whoever has it may be dead.
                (ById::Not(_), _) if self.store().bury_dead()? => self.claim_this(id)?,
                claimed => claimed,
            };
            let mut verdict = Verdict::new(self, verdict, &queue);
            let is_whole = match &mut verdict {
                Verdict::Claimed(claim) | Verdict::Resumed(claim) | Verdict::Recovered(claim) => claim.read_left()?,
                _ => true,
            };
            // What could not be read was given up: how it is now.
            if is_whole {
                return Ok(verdict);
            }
        }
    }

    fn claim_this(&self, id: MessageId) -> Result<(ById, String)> {
        let who = self.who.clone();
        self.store().write(Need::Claim, move |tx| {
            let verdict = match sql::claim::claim_id(tx, id.get(), &who)? {
                ById::Not(obstacle) => ById::Not(obstacle.shown(tx.now)),
                verdict => verdict,
            };
            let queue = match &verdict {
                ById::Taken(taken) => sql::queues::name_of(tx.conn, taken.record.queue)?,
                _ => String::new(),
            };
            Ok((verdict, queue))
        })
    }

    /// One step of a claim, in one commit. Now and then, and if it is eager whenever it finds nothing, it looks for dead owners:
    /// their claims are taken over at once.
    fn claim_some(&self, queue: &Arc<str>, wanted: usize, eager: bool) -> Result<Next> {
        let looked = self.bury_dead_if_due()?;
        let next = self.claim_once(queue, wanted)?;
        if looked || !eager || next.again || !next.taken.is_empty() || !self.store().bury_dead()? {
            return Ok(next);
        }
        self.claim_once(queue, wanted)
    }

    fn claim_once(&self, queue: &Arc<str>, wanted: usize) -> Result<Next> {
        // Whoever finds nothing is to hold nobody up: a reader looks first. (One that cannot leaves it to the claim to say why.)
        if !self.start.found.load(Ordering::Relaxed)
            && let Ok(Some((hopes, _))) = self.hopes(std::slice::from_ref(queue))
            && hopes.iter().all(|hope| !hope.any)
        {
            return Ok(Next::default());
        }
        let (queue, who) = (queue.clone(), self.who.clone());
        let next = self.store().write(Need::Claim, move |tx| sql::claim::claim_next(tx, &queue, &who, wanted))?;
        self.note(!next.taken.is_empty() || next.again);
        Ok(next)
    }

    /// Whether a claim has found something.
    fn note(&self, found: bool) {
        self.start.found.store(found, Ordering::Relaxed);
        if found {
            self.store().waker().note_found();
        }
    }

    /// What it may hope for, see [`Store::hopes`].
    pub(crate) fn hopes(&self, queues: &[Arc<str>]) -> Result<Option<(Vec<Hope>, Duration)>> {
        self.store().hopes(queues, &self.who)
    }

    /// Looks for dead owners, if that is due. Returns whether it was.
    pub(crate) fn bury_dead_if_due(&self) -> Result<bool> {
        let due = self.store().liveness().is_due();
        if due {
            self.store().bury_dead()?;
        }
        Ok(due)
    }

    /// Whether payloads that lie beside their messages are left there.
    pub(crate) fn leaves_payloads(&self) -> bool {
        self.who.large == Large::Leave
    }

    /// The same worker, which leaves alone what has crashed before, unless `crashed`.
    pub(crate) fn crashed(&self, crashed: bool) -> Worker {
        Worker { who: Who { crashed, ..self.who.clone() }, ..self.clone() }
    }

    /// Settles, does what `first` says at that moment, and claims the next message of the first of these queues that has one, in
    /// one commit.
    pub(crate) fn step(
        &self,
        settle: Option<(Receipt, Known, Settle)>,
        queues: Vec<Arc<str>>,
        first: impl Fn() -> Vec<(Receipt, Settle)> + Send + 'static,
    ) -> Result<Step> {
        let who = self.who.clone();
        self.bury_dead_if_due()?;
        let need = if settle.is_some() { Need::Settle } else { Need::Claim };
        let step = self.start.store.write(need, move |tx| {
            let settled = match &settle {
                Some((receipt, known, how)) => Some(item(sql::settle::settle(tx, *receipt, how, *known))?),
                None => None,
            };
            for (receipt, how) in first() {
                let _ = item(sql::settle::settle(tx, receipt, &how, Known::default()))?;
            }
            let mut step = Step { settled, taken: None, empty: Vec::new(), again: false };
            for (at, queue) in queues.iter().enumerate() {
                let next = sql::claim::claim_next(tx, queue, &who, 1)?;
                step.again |= next.again;
                if let Some(taken) = next.taken.into_iter().next() {
                    step.taken = Some((at, taken));
                    break;
                }
                if !next.again {
                    step.empty.push(at);
                }
            }
            Ok(step)
        })?;
        self.note(step.taken.is_some());
        Ok(step)
    }

    pub(crate) fn store(&self) -> &Store {
        &self.start.store
    }
}

impl Store {
    /// Every worker that is registered, alive or not, and whoever else holds or has deferred something, by label. Changes
    /// nothing. What is held or deferred is counted one by one.
    ///
    /// ```
    /// use relet::{Life, Store};
    ///
    /// let store = Store::open_in_memory()?;
    /// store.queue("mail").enqueue("a")?;
    /// let worker = store.worker("mailer-1")?;
    /// let _claim = worker.claim("mail")?;
    /// let workers = store.workers()?;
    /// assert_eq!((workers[0].label.as_str(), workers[0].life, workers[0].held), ("mailer-1", Life::Alive, 1));
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn workers(&self) -> Result<Vec<WorkerView>> {
        let before = self.read(|conn, _| sql::workers::all(conn))?;
        let lives: HashMap<i64, Life> = before.iter().map(|row| (row.incarnation, self.liveness().life(row))).collect();
        // Whoever ends in good order lets go of its lock once its row is gone: dead is only whose row is still there.
        let (rows, holdings, now) =
            self.read(|conn, now| Ok((sql::workers::all(conn)?, sql::workers::holdings(conn, now)?, now)))?;
        let mut workers: Vec<_> = rows
            .into_iter()
            .map(|row| WorkerView {
                label: row.label,
                life: lives.get(&row.incarnation).copied().unwrap_or(Life::Alive), // it was started since
                pid: Some(row.pid),
                started_at: Some(now.shown(row.started_at)),
                held: 0,
                deferred: 0,
            })
            .collect();
        for Holding { label, detached, held, deferred } in holdings {
            let mut registered = workers.iter_mut().filter(|worker| worker.pid.is_some() && !detached);
            match registered.find(|worker| worker.label == label) {
                Some(worker) => (worker.held, worker.deferred) = (held, deferred),
                None => {
                    let life = if detached { Life::Detached } else { Life::Ended };
                    workers.push(WorkerView { label, life, pid: None, started_at: None, held, deferred });
                }
            }
        }
        workers.sort_by(|a, b| (&a.label, a.pid.is_none()).cmp(&(&b.label, b.pid.is_none())));
        Ok(workers)
    }
}
