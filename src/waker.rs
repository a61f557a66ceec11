//! The waker: sleep until something may have become claimable.
//!
//! A commit of this process rings at once, for those who wait for its queues, and for no others. Commits of other processes are
//! noticed by the `watcher`. What becomes due is the waiter's own business: it sleeps no longer than until then. A wake-up that
//! is missed costs latency only, since nobody sleeps for longer than [`NAP_MAX`], or a second while it is quiet.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::sql::Rung;
use crate::watcher;

/// Longest sleep between two looks. The death of another process rings no bell, so this bounds how late it is seen.
pub(crate) const NAP_MAX: Duration = Duration::from_millis(200);
/// The same while it is quiet: what another process commits will be heard, so this is for its death, and what nobody has told.
const NAP_QUIET: Duration = Duration::from_secs(1);
/// Rings that are remembered one by one; who comes later than that is told "all".
const KEPT: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Waker {
    state: Mutex<State>,
    /// For the watcher, when there is nobody to watch for.
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Counts the rings.
    rings: u64,
    /// The latest of them.
    latest: VecDeque<Rung>,
    /// Messages were claimed: what others commit is of interest.
    found: bool,
    /// See [`Waker::set_quiet`].
    quiet: bool,
    waiting: HashMap<u64, Arc<Waiter>>,
    next_waiter: u64,
    watched: bool,
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
    /// What was rung for since then, together.
    fn since(&self, seen: u64) -> Rung {
        let mut since = Rung::default();
        let count = usize::try_from(self.rings.saturating_sub(seen)).unwrap_or(usize::MAX);
        since.all = count > self.latest.len();
        for rung in self.latest.iter().rev().take(count) {
            since.all |= rung.all;
            since.queues.extend(&rung.queues);
        }
        since
    }
}

impl Waker {
    /// The number of rings so far: it has changed if there was one between two looks at it.
    pub(crate) fn rings(&self) -> u64 {
        self.state.lock().rings
    }

    /// What was rung for since then, and the number of rings by now.
    pub(crate) fn rung_since(&self, seen: u64) -> (Rung, u64) {
        let state = self.state.lock();
        (if state.rings == seen { Rung::default() } else { state.since(seen) }, state.rings)
    }

    /// A commit was made that may have made something claimable in these queues.
    pub(crate) fn ring(&self, rung: &Rung) {
        if !rung.all && rung.queues.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        state.rings += 1;
        if state.latest.len() == KEPT {
            state.latest.pop_front();
        }
        state.latest.push_back(rung.clone());
        for waiter in state.waiting.values().filter(|waiter| waiter.is_meant(rung)) {
            waiter.bell.notify_one();
        }
    }

    pub(crate) fn ring_all(&self) {
        self.ring(&Rung { all: true, ..Rung::default() });
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
        if state.rings != seen && waiter.is_meant(&state.since(seen)) {
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
        let (rung, rings) = waker.rung_since(seen);
        assert!(!rung.all && rung.queues.iter().eq(&[2, 4]) && rings == 2);
        for _ in 0..KEPT {
            waker.ring(&of(&[4]));
        }
        assert!(waker.rung_since(seen).0.all && !waker.rung_since(rings).0.all);
    }
}
