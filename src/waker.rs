//! The waker: sleep until something may have become claimable.
//!
//! A commit of this process rings at once, for those who wait for its queues, and for no others. Commits of other processes are
//! noticed by the `watcher`. What becomes due is the waiter's own business: it sleeps no longer than until then. A wake-up that
//! is missed costs latency only, since nobody sleeps for longer than [`NAP_MAX`], or a second while it is quiet.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::sql::Rung;
use crate::watcher;

/// Longest sleep between two looks. The death of another process rings no bell, so this bounds how late it is seen.
pub(crate) const NAP_MAX: Duration = Duration::from_millis(200);
/// The same while it is quiet: what another process commits will be heard, so this is for its death, and what nobody has told.
const NAP_QUIET: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Waker {
    state: Mutex<State>,
    /// For the watcher, when there is nobody to watch for.
    work: Condvar,
    commits: AtomicU64,
    doubtful: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// Counts the rings.
    rings: u64,
    /// The number of the latest that was for all, …
    all: u64,
    /// … and of the latest for each queue.
    latest: HashMap<i64, u64>,
    /// Messages were claimed: what others commit is of interest.
    found: bool,
    /// See [`Waker::set_quiet`].
    quiet: bool,
    waiting: HashMap<u64, Arc<Waiter>>,
    next_waiter: u64,
    watched: bool,
}

/// What was rung for since somebody listened last.
pub(crate) struct Heard {
    /// For each of the queues that were asked about.
    pub(crate) queues: Vec<bool>,
    pub(crate) all: bool,
    /// The number of rings by now.
    pub(crate) rings: u64,
}

#[derive(Debug)]
struct Waiter {
    /// The queues that it waits for, sorted.
    queues: Vec<i64>,
    bell: Condvar,
}

impl Waiter {
    fn is_meant(&self, rung: &Rung) -> bool {
        rung.all || rung.queues.iter().any(|queue| self.queues.binary_search(queue).is_ok())
    }
}

impl State {
    /// Whether a queue was rung for since then.
    fn was_rung_for(&self, queue: i64, seen: u64) -> bool {
        self.latest.get(&queue).is_some_and(|latest| *latest > seen)
    }
}

impl Waker {
    /// The number of rings so far: it has changed if there was one between two looks at it.
    pub(crate) fn rings(&self) -> u64 {
        self.state.lock().rings
    }

    /// What was heard since then. `queues`: those that are of interest, `None` for one whose id is not known, which is any.
    pub(crate) fn rung_since(&self, seen: u64, queues: impl Iterator<Item = Option<i64>>) -> Heard {
        let state = self.state.lock();
        let any = state.rings != seen;
        let queues = queues.map(|queue| any && queue.is_none_or(|queue| state.was_rung_for(queue, seen))).collect();
        Heard { queues, all: state.all > seen, rings: state.rings }
    }

    /// A commit was made that may have made something claimable in these queues.
    pub(crate) fn ring(&self, rung: &Rung) {
        if !rung.all && rung.queues.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        state.rings += 1;
        let number = state.rings;
        if rung.all {
            state.all = number;
        }
        state.latest.extend(rung.queues.iter().map(|queue| (*queue, number)));
        for waiter in state.waiting.values().filter(|waiter| waiter.is_meant(rung)) {
            waiter.bell.notify_one();
        }
    }

    pub(crate) fn ring_all(&self) {
        self.ring(&Rung { all: true, ..Rung::default() });
    }

    /// Runs a commit of this process, and counts it.
    pub(crate) fn committing<T>(&self, commit: impl FnOnce() -> T) -> T {
        self.commits.fetch_add(1, Ordering::SeqCst);
        let outcome = commit();
        self.commits.fetch_add(1, Ordering::SeqCst);
        outcome
    }

    /// The beginnings and the ends of this process's commits so far: odd while one is being made.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(Ordering::SeqCst)
    }

    /// The file was changed, and it is not known whether by this process alone: the next transaction will find out.
    pub(crate) fn doubt(&self) {
        self.doubtful.store(true, Ordering::Release);
    }

    pub(crate) fn is_in_doubt(&self) -> bool {
        self.doubtful.load(Ordering::Acquire)
    }

    /// Ends the doubt. Returns whether there was one.
    pub(crate) fn end_doubt(&self) -> bool {
        self.is_in_doubt() && self.doubtful.swap(false, Ordering::AcqRel)
    }

    /// A message was claimed.
    pub(crate) fn note_found(&self) {
        self.state.lock().found = true;
    }

    /// Sleeps until one of these queues was rung for since `seen`, for at most `nap`.
    pub(crate) fn sleep(&self, mut queues: Vec<i64>, seen: u64, nap: Duration) {
        queues.sort_unstable();
        let waiter = Arc::new(Waiter { queues, bell: Condvar::new() });
        let mut state = self.state.lock();
        // Looked at under the lock: a commit that came after `seen` was read is not slept through.
        if state.all > seen || waiter.queues.iter().any(|queue| state.was_rung_for(*queue, seen)) {
            return;
        }
        let number = state.next_waiter;
        state.next_waiter += 1;
        state.waiting.insert(number, waiter.clone());
        self.work.notify_one();
        let _ = waiter.bell.wait_for(&mut state, nap);
        state.waiting.remove(&number);
    }

    /// Starts the watcher of a store's file, once.
    pub(crate) fn watch(self: &Arc<Waker>, path: &Path) {
        let mut state = self.state.lock();
        if state.watched {
            return;
        }
        let (waker, path) = (self.clone(), path.to_owned());
        let started =
            std::thread::Builder::new().name("relet-watcher".into()).spawn(move || watcher::keep_watch(&waker, &path));
        state.watched = started.is_ok();
    }

    /// For the watcher: whether nobody waits, also after so long.
    pub(crate) fn is_nobody_waiting(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        if state.waiting.is_empty() {
            let _ = self.work.wait_for(&mut state, limit);
        }
        state.waiting.is_empty()
    }

    /// Whether a message was claimed since this was asked last.
    pub(crate) fn take_found(&self) -> bool {
        std::mem::take(&mut self.state.lock().found)
    }

    /// Whether nothing has happened for some time and the watcher will hear of it if something does.
    pub(crate) fn set_quiet(&self, quiet: bool) {
        self.state.lock().quiet = quiet;
    }

    /// The longest nap between two looks for now.
    pub(crate) fn longest_nap(&self) -> Duration {
        if self.state.lock().quiet { NAP_QUIET } else { NAP_MAX }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const FOR_EVER: Duration = Duration::from_secs(3600);

    fn of(queues: &[i64]) -> Rung {
        Rung { all: false, queues: queues.iter().copied().collect() }
    }

    /// Sleeps on a thread of its own; the receiver hears when it wakes.
    fn sleeper(waker: &Arc<Waker>, seen: u64) -> mpsc::Receiver<()> {
        let (awake, heard) = mpsc::channel();
        let waker = waker.clone();
        std::thread::spawn(move || {
            waker.sleep(vec![1, 3], seen, FOR_EVER);
            let _ = awake.send(());
        });
        heard
    }

    #[test]
    fn a_commit_between_the_look_and_the_sleep_is_not_slept_through() {
        let waker = Arc::new(Waker::default());
        let seen = waker.rings();
        waker.ring(&of(&[3]));
        sleeper(&waker, seen).recv_timeout(Duration::from_secs(30)).expect("it does not sleep");
    }

    #[test]
    fn a_commit_wakes_whoever_sleeps() {
        let waker = Arc::new(Waker::default());
        let sleepers: Vec<_> = (0..3).map(|_| sleeper(&waker, waker.rings())).collect();
        while waker.state.lock().waiting.len() < 3 {
            std::thread::yield_now();
        }
        waker.ring(&of(&[2, 3]));
        for sleeper in sleepers {
            sleeper.recv_timeout(Duration::from_secs(30)).expect("it is woken");
        }
    }

    #[test]
    fn a_commit_of_other_queues_wakes_nobody() {
        let waker = Arc::new(Waker::default());
        let seen = waker.rings();
        waker.ring(&of(&[2, 4]));
        let heard = sleeper(&waker, seen);
        while waker.state.lock().waiting.is_empty() {
            std::thread::yield_now();
        }
        waker.ring(&of(&[4]));
        waker.ring(&Rung::default());
        assert!(heard.try_recv().is_err() && waker.state.lock().waiting.len() == 1);
        waker.ring(&of(&[1]));
        heard.recv_timeout(Duration::from_secs(30)).expect("it is woken");
    }

    #[test]
    fn who_comes_late_is_told_of_all_that_was_rung_for() {
        let waker = Waker::default();
        let seen = waker.rings();
        waker.ring(&of(&[2]));
        waker.ring(&of(&[4]));
        let heard = |seen| waker.rung_since(seen, [Some(2), Some(3), Some(4), None].into_iter());
        assert_eq!((heard(seen).queues, heard(seen).all), (vec![true, false, true, true], false));
        let rings = heard(seen).rings;
        assert_eq!((rings, heard(rings).queues), (2, vec![false; 4]));
        // However much comes meanwhile, nobody is told of what was not for it.
        (0..10_000).for_each(|_| waker.ring(&of(&[4])));
        assert_eq!((heard(rings).queues, heard(rings).all), (vec![false, false, true, true], false));
        waker.ring_all();
        assert!(heard(rings).all && !heard(heard(rings).rings).all);
    }
}
