//! The waker: sleep until something may have become claimable.
//!
//! A commit of this process rings at once. Commits of other processes are noticed by one watcher thread per store, which looks
//! at `PRAGMA data_version` on a connection of its own, every 1 to 5 ms while somebody waits and not at all otherwise. What
//! becomes due is the waiter's own business: it sleeps no longer than until then. A wake-up that is missed costs latency
//! only, since nobody sleeps for longer than [`NAP_MAX`].

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rusqlite::Connection;

use crate::db;

/// Longest sleep between two looks. The death of another process rings no bell, so this bounds how late it is seen.
pub(crate) const NAP_MAX: Duration = Duration::from_millis(200);
/// The watcher's shortest and longest pause between two looks: short after it has seen something, long when nothing happens.
const WATCH: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(5));
/// How often a watcher without anybody who waits looks whether its store is still there.
const REST: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Waker {
    state: Mutex<State>,
    /// For those who wait for a commit.
    bell: Condvar,
    /// For the watcher, when there is nobody to watch for.
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    commits: u64,
    waiting: usize,
    watched: bool,
}

impl Waker {
    /// A number that has changed if a commit came between two looks at it.
    pub(crate) fn commits(&self) -> u64 {
        self.state.lock().commits
    }

    /// A commit was made that may have made something claimable.
    pub(crate) fn ring(&self) {
        let mut state = self.state.lock();
        state.commits += 1;
        if state.waiting > 0 {
            self.bell.notify_all();
        }
    }

    /// Sleeps until there was a commit since `seen`, for at most `nap`.
    pub(crate) fn sleep(&self, seen: u64, nap: Duration) {
        let mut state = self.state.lock();
        // Looked at under the lock: a commit that came after `seen` was read is not slept through.
        if state.commits != seen {
            return;
        }
        state.waiting += 1;
        self.work.notify_one();
        let _ = self.bell.wait_for(&mut state, nap);
        state.waiting -= 1;
    }

    /// Starts the watcher of a store's file, once.
    pub(crate) fn watch(self: &Arc<Waker>, path: &Path) {
        let mut state = self.state.lock();
        if state.watched {
            return;
        }
        let (waker, path) = (self.clone(), path.to_owned());
        let started = std::thread::Builder::new().name("relet-watcher".into()).spawn(move || waker.keep_watch(&path));
        state.watched = started.is_ok();
    }

    fn keep_watch(self: Arc<Waker>, path: &Path) {
        let mut pause = WATCH.0;
        let mut watching: Option<(Connection, i64)> = None;
        // The store has the other one; when it has gone, nobody is left to be rung for.
        while Arc::strong_count(&self) > 1 {
            let idle = {
                let mut state = self.state.lock();
                if state.waiting == 0 {
                    let _ = self.work.wait_for(&mut state, REST);
                }
                state.waiting == 0
            };
            if idle {
                watching = None;
                continue;
            }
            let changed = match &mut watching {
                Some((conn, version)) => match db::data_version(conn) {
                    Ok(now) => std::mem::replace(version, now) != now,
                    Err(_) => {
                        watching = None;
                        true
                    }
                },
                None => match db::watch(path) {
                    Ok(watched) => {
                        watching = Some(watched);
                        true // What was committed before the first look is not known.
                    }
                    // Those who wait look by themselves after a nap.
                    Err(_) => {
                        std::thread::sleep(NAP_MAX);
                        continue;
                    }
                },
            };
            if changed {
                self.ring();
            }
            pause = if changed { WATCH.0 } else { (pause * 5 / 4).min(WATCH.1) };
            std::thread::sleep(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const FOR_EVER: Duration = Duration::from_secs(3600);

    /// Sleeps on a thread of its own; the receiver hears when it wakes.
    fn sleeper(waker: &Arc<Waker>, seen: u64) -> mpsc::Receiver<()> {
        let (awake, heard) = mpsc::channel();
        let waker = waker.clone();
        std::thread::spawn(move || {
            waker.sleep(seen, FOR_EVER);
            let _ = awake.send(());
        });
        heard
    }

    #[test]
    fn a_commit_between_the_look_and_the_sleep_is_not_slept_through() {
        let waker = Arc::new(Waker::default());
        let seen = waker.commits();
        waker.ring();
        sleeper(&waker, seen).recv_timeout(Duration::from_secs(30)).expect("it does not sleep");
    }

    #[test]
    fn a_commit_wakes_whoever_sleeps() {
        let waker = Arc::new(Waker::default());
        let sleepers: Vec<_> = (0..3).map(|_| sleeper(&waker, waker.commits())).collect();
        while waker.state.lock().waiting < 3 {
            std::thread::yield_now();
        }
        waker.ring();
        for sleeper in sleepers {
            sleeper.recv_timeout(Duration::from_secs(30)).expect("it is woken");
        }
    }
}
