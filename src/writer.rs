//! Group commit by leader and followers.
//!
//! All writes of a process go through one connection. A caller who finds it free *leads*: it takes up what has gathered
//! meanwhile, runs everything, its own operation first, in one BEGIN IMMEDIATE … COMMIT, hands out the results after the
//! commit, and hands the lead to whoever came next. The others *follow*: they lay down their operation and wait. There is
//! no background thread.
//!
//! A caller may also lay down an operation and go on (*deferred*): it is carried out by whoever leads next, that is by the
//! next call, by its own caller once he waits for it, or by the call that finds too many of them. It keeps its place in
//! the line, so what a thread lays down and what it calls afterwards take effect in this order.
//!
//! Results are only handed out once it is known whether the commit was made; if it was not, every caller is told, and
//! nothing of it is stored.
//!
//! A transaction that holds nothing but claims and extensions need not reach the disk: a lost claim only means that the
//! message is ready again. It is committed without `fsync`, and the next durable commit makes it durable, too. So where
//! both kinds wait, the claims go first, in a commit of their own, and their callers are soon back with what they settle.
//! They are let pass once, and never what was deferred; apart from that, whoever waits is served in the order of arrival.
//! In the same way a deferred settle for which nobody waits yet does not make a commit of claims wait for the disk: it is
//! committed with them, and its caller is told with the next durable commit.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};
use rusqlite::Connection;

use crate::batch::{Job, Task};
use crate::clock::Stopwatch;
use crate::db::Opened;
use crate::error::{Error, Result};
use crate::follower::{Follower, Heard, Laid, Slot};
use crate::options::{Durability, Options};
use crate::seat::{Reached, Seat};
use crate::sql::{Tx, meta};
use crate::waker::Waker;

pub(crate) use crate::batch::{Need, panic_message};

/// Operations in one transaction, so that the first of them does not wait for an endless queue.
const BATCH_MAX: usize = 512;
/// Most operations that are deferred at a time: the call that lays down one more carries them out, in one commit.
pub const DEFERRED_MAX: usize = 512;
/// Most bytes of what is deferred at a time, payloads above all; the same applies.
pub const DEFERRED_BYTES_MAX: usize = 4 << 20;
/// A leader waits for others for at most this part of the time that the last commit took, …
const GATHER_PART: u32 = 2;
/// … and for this long.
const GATHER_MAX: Duration = Duration::from_millis(1);
/// For so long it lets other threads run, before it sleeps until they are there.
const YIELD_FOR: Duration = Duration::from_micros(100);

/// For so long a look is held up at most.
const LOOK_HELD_UP: Duration = Duration::from_millis(200);

pub(crate) struct Writer {
    line: Mutex<Line>,
    /// For a leader who waits until enough have gathered.
    gathered: Condvar,
    seat: Mutex<Seat>,
    waker: Arc<Waker>,
    /// What the last checkpoint failed with. Not of the seat, so that a look does not wait for a leader.
    checkpoint_error: Arc<Mutex<Option<String>>>,
    /// Looks hold it shared.
    readers: Arc<RwLock<()>>,
    busy_wait: Duration,
}

/// Who waits, and whether somebody leads.
struct Line {
    waiting: VecDeque<Box<dyn Follower>>,
    /// Those of them whose callers went on, and how many bytes they take.
    deferred: usize,
    bytes: usize,
    /// Deferred settles that are committed, and whose callers are told when they are known to be on the disk.
    unsynced: Vec<Box<dyn Follower>>,
    led: bool,
    /// Callers in the last batch, and those who were waiting then.
    callers: usize,
    /// A leader sleeps until so many wait.
    wanted: Option<usize>,
    /// How long the last commit took that let nobody pass.
    took: Duration,
    /// Whether claims are let pass; then what they save is an `fsync`.
    lets_pass: bool,
    /// The last batch was of claims that were let pass.
    has_let_pass: bool,
}

/// What goes into the next commit.
struct Taken {
    followers: Vec<Box<dyn Follower>>,
    /// And the leader's own operation.
    own: bool,
    /// Somebody waits for the disk.
    sync: bool,
}

impl Line {
    fn new(lets_pass: bool) -> Line {
        Line {
            waiting: VecDeque::new(),
            deferred: 0,
            bytes: 0,
            unsynced: Vec::new(),
            led: false,
            callers: 0,
            wanted: None,
            took: Duration::ZERO,
            lets_pass,
            has_let_pass: false,
        }
    }

    fn lay(&mut self, follower: Box<dyn Follower>) {
        self.deferred += usize::from(follower.is_deferred());
        self.bytes += follower.bytes();
        self.waiting.push_back(follower);
    }

    /// How many callers wait.
    fn present(&self) -> usize {
        self.waiting.len() - self.deferred
    }

    /// Whether as much is deferred as may be.
    fn is_full(&self) -> bool {
        self.deferred + self.unsynced.len() >= DEFERRED_MAX || self.bytes >= DEFERRED_BYTES_MAX
    }

    fn note(&mut self, took: Duration) {
        if !self.has_let_pass {
            self.took = took;
        }
    }

    /// Takes up the next batch, for a leader who may bring an operation of his own. `apart`: he is not among those present.
    fn take(&mut self, own: Option<Need>, apart: bool) -> Taken {
        let sync = self.unsynced.iter().any(|job| job.is_awaited());
        debug_assert!(self.led && (own.is_some() || !self.waiting.is_empty() || sync), "there is something to do");
        self.callers = self.present() + usize::from(apart);
        let is_claim = |need: Need| need == Need::Claim;
        let claims =
            self.waiting.iter().filter(|job| is_claim(job.need())).count() + usize::from(own.is_some_and(is_claim));
        self.has_let_pass =
            self.lets_pass && !self.has_let_pass && 0 < claims && claims < self.callers && self.deferred == 0 && !sync;
        if self.has_let_pass {
            let (taken, left) = self.waiting.drain(..).partition::<Vec<_>, _>(|job| is_claim(job.need()));
            self.waiting = left.into();
            return Taken { followers: taken, own: own.is_some_and(is_claim), sync };
        }
        let count = self.waiting.len().min(BATCH_MAX);
        let followers: Vec<_> = self.waiting.drain(..count).collect();
        self.deferred -= followers.iter().filter(|job| job.is_deferred()).count();
        self.bytes -= followers.iter().map(|job| job.bytes()).sum::<usize>();
        debug_assert!(self.deferred <= self.waiting.len());
        Taken { followers, own: own.is_some(), sync }
    }
}

/// The lead, handed on when it is dropped, also by a panic.
struct Lead<'w>(&'w Writer);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut line = self.0.line.lock();
        // What is deferred needs no leader before somebody waits for it.
        line.led = line.waiting.iter().chain(&line.unsynced).any(|next| next.promote());
    }
}

impl Writer {
    pub(crate) fn new(opened: Opened, options: Options, path: Option<PathBuf>, waker: Arc<Waker>) -> Writer {
        let checkpoint_error = Arc::new(Mutex::new(None));
        let lets_pass = path.is_some() && options.durability == Durability::Full;
        let busy_wait = options.busy_wait;
        let seat = Seat::new(opened, options, path, checkpoint_error.clone(), waker.clone());
        Writer {
            line: Mutex::new(Line::new(lets_pass)),
            gathered: Condvar::new(),
            readers: seat.readers(),
            busy_wait,
            seat: Mutex::new(seat),
            waker,
            checkpoint_error,
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
        if !line.led && line.waiting.is_empty() {
            line.led = true;
            drop(line);
            let mut task = Task::new(need, op);
            let commit = self.lead_with(&mut task);
            return task.outcome(&commit);
        }
        let slot = Arc::new(Slot::waiting());
        line.lay(Box::new(Laid::new(need, op, slot.clone(), None)));
        if line.wanted.is_some_and(|wanted| line.present() >= wanted) {
            self.gathered.notify_one();
        }
        self.see_done(line, &slot, false);
        slot.outcome()
    }

    /// Lays `op` down for whoever leads next. `bytes`: about how much memory it takes.
    ///
    /// It is carried out after what was laid down before, and before what is called afterwards. Whoever has its slot is to
    /// [`Writer::wait`] for it in the end.
    pub(crate) fn defer<T: Send + 'static>(
        &self,
        need: Need,
        bytes: usize,
        op: impl FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Arc<Slot<T>> {
        let mut line = self.line.lock();
        let slot = Arc::new(Slot::unawaited());
        line.lay(Box::new(Laid::new(need, op, slot.clone(), Some(bytes))));
        if line.is_full() {
            self.see_done(line, &slot, true);
        }
        slot
    }

    /// Waits until an operation that was deferred is done, and on the disk where it needs that. Returns its outcome, once.
    pub(crate) fn wait<T>(&self, slot: &Slot<T>) -> Result<T> {
        self.see_done(self.line.lock(), slot, true);
        slot.outcome()
    }

    /// Waits until an operation that was laid down is done, and leads where nobody does.
    fn see_done<T>(&self, mut line: MutexGuard<'_, Line>, slot: &Slot<T>, deferred: bool) {
        slot.expect(); // before the line is let go, so that whoever hands on the lead knows of it
        let lead = !line.led && !slot.is_done();
        line.led |= lead;
        drop(line);
        if lead {
            self.lead_until(deferred, || slot.is_done());
        }
        while slot.listen() == Heard::Lead {
            self.lead_until(deferred, || slot.is_done());
        }
    }

    /// Leads with an operation that was not laid down.
    fn lead_with(&self, own: &mut dyn Job) -> Result<()> {
        let _lead = Lead(self);
        let mut seat = self.seat.lock();
        let mut own = Some(own);
        loop {
            let commit = self.lead_batch(&mut seat, &mut own, true);
            if own.is_none() {
                return commit;
            }
        }
    }

    /// Leads until an operation that was laid down is done.
    fn lead_until(&self, deferred: bool, is_done: impl Fn() -> bool) {
        let _lead = Lead(self);
        let mut seat = self.seat.lock();
        while !is_done() {
            let _ = self.lead_batch(&mut seat, &mut None, deferred);
        }
    }

    /// Leads one batch: the leader's own operation, unless claims are let pass before it, and what has gathered.
    fn lead_batch(&self, seat: &mut Seat, own: &mut Option<&mut dyn Job>, apart: bool) -> Result<()> {
        let mut taken = self.gather(own.as_ref().map(|job| job.need()), apart);
        let mut touch = Task::new(Need::Settle, |tx: &mut Tx<'_>| meta::touch(tx.conn));
        let mut jobs: Vec<&mut dyn Job> = Vec::with_capacity(taken.followers.len() + 1);
        if taken.sync {
            jobs.push(&mut touch);
        }
        if taken.own
            && let Some(own) = own.take()
        {
            jobs.push(own);
        }
        for follower in &mut taken.followers {
            jobs.push(&mut **follower);
        }
        let watch = Stopwatch::start();
        let reached = seat.batch(&mut jobs);
        let took = watch.elapsed();
        self.waker.ring(&seat.take_rung());
        let (late, all_synced) = match reached {
            Ok(Reached::File) => (true, false),
            Ok(Reached::Disk { and_all_before }) => (false, and_all_before),
            Err(_) => (false, false),
        };
        let commit = reached.map(drop);
        let synced = taken.sync.then(|| touch.outcome(&commit));
        let synced = if all_synced { Some(Ok(())) } else { synced };
        self.answer_unsynced(took, &commit, synced);
        for follower in taken.followers {
            if late && follower.need() != Need::Claim && !follower.is_left_out() {
                self.line.lock().unsynced.push(follower);
            } else {
                follower.answer(&commit);
            }
        }
        seat.maintain();
        self.waker.ring(&seat.take_rung());
        seat.leave_a_gap();
        commit
    }

    /// Tells those whose settles were committed earlier, once that is on the disk, or cannot be known to be. `synced`: what
    /// came of bringing everything there, if this batch was to do that.
    fn answer_unsynced(&self, took: Duration, commit: &Result<()>, synced: Option<Result<()>>) {
        let mut line = self.line.lock();
        line.note(took);
        let commit = match (commit, synced) {
            (Err(error @ (Error::Indeterminate { .. } | Error::FileReplaced { .. })), _) => Err(error.clone()),
            (_, Some(synced)) => synced.map_err(Error::unconfirmed),
            (_, None) => return,
        };
        let unsynced = std::mem::take(&mut line.unsynced);
        drop(line);
        for follower in unsynced {
            follower.answer(&commit);
        }
    }

    /// What has gathered. Whoever was in the last batch has just been answered, and is likely to come back at once: a moment
    /// is waited for as many.
    fn gather(&self, own: Option<Need>, apart: bool) -> Taken {
        let mut line = self.line.lock();
        let wanted = line.callers.saturating_sub(usize::from(apart)).min(BATCH_MAX);
        if line.present() < wanted {
            let limit = (line.took / GATHER_PART).min(GATHER_MAX);
            let watch = Stopwatch::start();
            loop {
                let waited = watch.elapsed();
                if line.present() >= wanted || waited >= limit {
                    break;
                }
                if waited < YIELD_FOR {
                    MutexGuard::unlocked(&mut line, std::thread::yield_now);
                } else {
                    line.wanted = Some(wanted);
                    self.gathered.wait_for(&mut line, limit - waited);
                }
            }
            line.wanted = None;
        }
        line.take(own, apart)
    }

    /// The connection, for a look into a store in memory, or for what no other connection may do.
    pub(crate) fn with_connection<T>(&self, look: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        look(self.seat.lock().conn())
    }

    /// Whether operations were laid down that nobody has carried out yet.
    pub(crate) fn has_laid_down(&self) -> bool {
        !self.line.lock().waiting.is_empty()
    }

    /// What a look holds meanwhile, so that it does not begin while the log is to be begun again; nothing, where that takes too long.
    pub(crate) fn look(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.readers.try_read_for(LOOK_HELD_UP)
    }

    pub(crate) fn checkpoint_error(&self) -> Option<String> {
        self.checkpoint_error.lock().clone()
    }

    /// Empties the log into the file, if no reader holds it back. Returns whether it was emptied.
    pub(crate) fn checkpoint(&self) -> Result<bool> {
        self.seat.lock().checkpoint()
    }

    /// Gives free pages back to the file system, a step at a time; only where relet made the file.
    pub(crate) fn shrink(&self) -> Result<()> {
        while self.seat.lock().shrink(self.busy_wait)? {}
        Ok(())
    }
}

impl Drop for Writer {
    /// The last handle is gone.
    fn drop(&mut self) {
        let line = self.line.get_mut();
        debug_assert!(line.waiting.is_empty() && line.unsynced.is_empty(), "whoever is to be told has a handle");
        self.seat.get_mut().close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db;
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
        // What can only be refused at the commit.
        let broken = |writer: &Writer| {
            writer.run(Need::Enqueue, |tx| {
                tx.conn.commit_hook(Some(|| true)).unwrap();
                meta::touch(tx.conn)
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
        writer.with_connection(|conn| Ok(conn.commit_hook(None::<fn() -> bool>)?)).unwrap();
        assert_eq!(stored(&writer), 1);
        enqueue(&writer, "afterwards").unwrap();
        assert_eq!(stored(&writer), 2);
    }

    #[test]
    fn a_deferred_operation_that_panics_tells_only_its_own_caller() {
        let writer = in_memory();
        let fine = |payload: &'static str| {
            let message = Message::new(payload);
            writer.defer(Need::Enqueue, 0, move |tx| enqueue::enqueue(tx, "q", &message).map(drop))
        };
        let before = fine("before");
        let panics = writer.defer(Need::Settle, 0, |_| -> Result<()> { panic!("in the middle") });
        let after = fine("after");
        assert!(matches!(writer.wait(&panics), Err(Error::Panicked { detail }) if detail.contains("in the middle")));
        assert!(before.is_done() && after.is_done());
        assert!(writer.wait(&before).is_ok() && writer.wait(&after).is_ok());
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

    /// Stands in the line, and says its number when it is answered.
    struct Numbered {
        number: usize,
        need: Need,
        answered: Arc<Mutex<Vec<usize>>>,
    }

    impl Job for Numbered {
        fn need(&self) -> Need {
            self.need
        }

        fn run(&mut self, _: &mut Tx<'_>) -> bool {
            true
        }

        fn leave_out(&mut self, _: Option<Error>) {}

        fn is_left_out(&self) -> bool {
            false
        }

        fn may_run_again(&mut self) -> bool {
            false
        }

        fn error(&self) -> Option<Error> {
            None
        }
    }

    impl Follower for Numbered {
        fn answer(self: Box<Self>, _: &Result<()>) {
            self.answered.lock().push(self.number);
        }

        fn promote(&self) -> bool {
            true
        }

        fn is_awaited(&self) -> bool {
            true
        }

        fn is_deferred(&self) -> bool {
            false
        }

        fn bytes(&self) -> usize {
            0
        }
    }

    /// A line that is led, in which those of these needs stand, numbered in their order.
    struct Stood {
        line: Line,
        answered: Arc<Mutex<Vec<usize>>>,
        next: usize,
    }

    impl Stood {
        fn new(lets_pass: bool) -> Stood {
            let line = Line { led: true, ..Line::new(lets_pass) };
            Stood { line, answered: Arc::default(), next: 0 }
        }

        fn lay(&mut self, needs: &[Need]) {
            for need in needs {
                let follower = Numbered { number: self.next, need: *need, answered: self.answered.clone() };
                self.line.lay(Box::new(follower));
                self.next += 1;
            }
        }

        fn take(&mut self) -> Vec<usize> {
            for follower in self.line.take(None, false).followers {
                follower.answer(&Ok(()));
            }
            std::mem::take(&mut self.answered.lock())
        }
    }

    #[test]
    fn whoever_lies_down_first_is_served_no_later() {
        let mut stood = Stood::new(true);
        stood.lay(&[Need::Enqueue; BATCH_MAX + 10]);
        assert_eq!(stood.take(), (0..BATCH_MAX).collect::<Vec<_>>());
        stood.lay(&[Need::Settle; 5]);
        assert_eq!(stood.take(), (BATCH_MAX..BATCH_MAX + 15).collect::<Vec<_>>());
    }

    #[test]
    fn claims_are_let_pass_once_and_nobody_is_overtaken_twice() {
        let (c, s, e) = (Need::Claim, Need::Settle, Need::Enqueue);
        let mut stood = Stood::new(true);
        stood.lay(&[s, c, e, c]);
        assert_eq!(stood.take(), [1, 3]);
        stood.lay(&[c, e]);
        assert_eq!(stood.take(), [0, 2, 4, 5]);
        stood.lay(&[c, c]);
        assert_eq!(stood.take(), [6, 7]); // alone, they have let nobody wait
        stood.lay(&[e, c]);
        assert_eq!(stood.take(), [9]);
        assert_eq!(stood.take(), [8]);
    }

    #[test]
    fn where_no_commit_is_synced_all_go_together() {
        let mut stood = Stood::new(false);
        stood.lay(&[Need::Enqueue, Need::Claim, Need::Settle]);
        assert_eq!(stood.take(), [0, 1, 2]);
    }
}
