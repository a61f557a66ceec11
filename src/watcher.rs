//! The watcher: one thread per store that notices the commits of other processes, and rings the waker.
//!
//! What this process commits itself changes the file as well, and is nobody's business here. Where it has committed between two looks,
//! its next transaction finds out whether others have, too; and if there is none, everybody is rung for once.
//!
//! It looks at `PRAGMA data_version`, on a connection of its own, while somebody waits and not at all otherwise. When to look it is
//! told by the system (inotify), which knows when a log is written to. Nothing depends on that: where it is not to be had, or
//! says nothing, the watcher looks every so often all the same, and that costs latency only.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;

use crate::clock::Stopwatch;
use crate::db;
use crate::files;
use crate::waker::{NAP_MAX, Waker};

/// After something was written, its commit is looked for after so long, and again after half as long again, up to the second number:
/// a log is written to before its commit is visible, and with an `fsync` long before.
const CLOSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(3200));
/// How long a look that has seen a commit is followed by none: the second where others commit all the time, and never anything
/// that somebody here waits for.
const REST: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(25));
/// How long the watcher listens before it looks without having heard anything: at first, and when nothing happens.
const LISTEN: (Duration, Duration) = (Duration::from_millis(25), Duration::from_secs(1));
/// The same where there is nothing to be heard.
const POLL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(25));
/// How long this process has to commit nothing before everybody is rung for because of what nobody has found out.
const DOUBT: Duration = Duration::from_millis(2);
/// How often a watcher without anybody who waits looks whether its store is still there.
const IDLE: Duration = Duration::from_secs(1);
/// So many commits in a row of which nothing was heard: the system says nothing of them.
const UNHEARD: u32 = 3;

pub(crate) fn keep_watch(waker: &Arc<Waker>, path: &Path) {
    let mut pace = Pace::default();
    let mut watching: Option<(Connection, i64)> = None;
    let mut ears: Option<Ears> = None;
    let mut listened = false;
    let (mut committed, mut ours) = (waker.commits(), Stopwatch::start());
    // The store has the other one; when it has gone, nobody is left to be rung for.
    while Arc::strong_count(waker) > 1 {
        if waker.is_nobody_waiting(IDLE) {
            (watching, ears) = (None, None);
            pace = Pace::default();
            waker.set_quiet(false);
            continue;
        }
        let commits = waker.commits();
        let heard = ears.as_mut().map_or(Heard::Nothing, Ears::take);
        if heard == Heard::Gone {
            watching = None;
        }
        let heard = heard == Heard::Written;
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
                    ears = Ears::open(&files::beside(path, "-wal"));
                    true // What was committed before the first look is not known.
                }
                // Those who wait look by themselves after a nap.
                Err(_) => {
                    waker.set_quiet(false);
                    std::thread::sleep(NAP_MAX);
                    continue;
                }
            },
        };
        let found = waker.take_found();
        // None of its own was made since the look before, or is being made.
        let theirs = commits == waker.commits() && commits == committed && commits.is_multiple_of(2);
        if !theirs {
            (committed, ours) = (commits, Stopwatch::start());
        }
        if changed && !theirs {
            waker.doubt();
        } else if changed || (theirs && ours.elapsed() >= DOUBT && waker.end_doubt()) {
            waker.end_doubt();
            waker.ring_all();
        }
        let look = Look { changed, found, heard, listened: std::mem::take(&mut listened), can_hear: ears.is_some() };
        let wait = match pace.after(look) {
            Wait::Listen(limit) if waker.is_in_doubt() => Wait::Listen(limit.min(DOUBT)),
            wait => wait,
        };
        waker.set_quiet(pace.is_quiet());
        match (wait, &mut ears) {
            (Wait::Listen(limit), Some(open)) => match open.listen() {
                // What was committed before is seen by one more look.
                Some(Since::Now) => {}
                Some(Since::Before) => {
                    listened = true;
                    if open.wait(limit) {
                        // Who writes for long before it commits is not looked at all the time.
                        let pause = if limit <= CLOSE.1 { limit / 4 } else { CLOSE.0 };
                        std::thread::sleep(pause.max(CLOSE.0));
                    }
                }
                None => ears = None,
            },
            (Wait::Listen(pause) | Wait::Rest(pause), open) => {
                // Whoever is listened to pays for it with each write.
                open.as_mut().into_iter().for_each(Ears::rest);
                std::thread::sleep(pause);
            }
        }
    }
}

/// What a look has come to.
#[derive(Debug, Clone, Copy, Default)]
struct Look {
    changed: bool,
    /// Messages were claimed since the last look: what others commit is of interest.
    found: bool,
    /// Something was written since the last look.
    heard: bool,
    /// It has listened for that until now.
    listened: bool,
    can_hear: bool,
}

/// What to do until the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// To sleep, whatever happens.
    Rest(Duration),
    /// To wait until something is heard, for so long at most.
    Listen(Duration),
}

/// When to look.
#[derive(Debug, Default)]
struct Pace {
    /// The next step of the close look at what was heard of.
    close: Option<Duration>,
    /// A close look has come to its end without a commit, and it is still written.
    in_vain: bool,
    rest: Duration,
    pause: Duration,
    /// Something was heard since the last commit was seen.
    heard: bool,
    /// Commits in a row of which nothing was heard.
    unheard: u32,
}

impl Pace {
    fn after(&mut self, look: Look) -> Wait {
        if look.heard {
            // Who writes for long before it commits is looked at less closely.
            let first = if self.in_vain { CLOSE.1 } else { CLOSE.0 };
            (self.close, self.pause) = (self.close.or(Some(first)), Duration::ZERO);
            (self.heard, self.unheard) = (true, 0);
        }
        if look.changed {
            if !std::mem::take(&mut self.heard) && look.listened {
                self.unheard = self.unheard.saturating_add(1);
            }
            // What others commit is looked at at once where that has been of use of late.
            self.rest = if look.found { REST.0 } else { (self.rest * 5 / 4).clamp(REST.0, REST.1) };
            (self.close, self.pause, self.in_vain) = (None, Duration::ZERO, false);
            return Wait::Rest(self.rest);
        }
        if let Some(close) = self.close {
            self.close = Some(close * 3 / 2).filter(|next| *next <= CLOSE.1);
            self.in_vain |= self.close.is_none();
            return Wait::Listen(close);
        }
        self.in_vain &= look.heard;
        let (first, longest) = if look.can_hear && self.unheard < UNHEARD { LISTEN } else { POLL };
        if self.pause >= REST.1 {
            self.rest = REST.0;
        }
        self.pause = (self.pause * 3 / 2).clamp(first, longest);
        Wait::Listen(self.pause)
    }

    /// Nothing has happened for some time, and if something does, it will be heard.
    fn is_quiet(&self) -> bool {
        self.pause == LISTEN.1
    }
}

/// What came of listening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Nothing,
    Written,
    /// The file has gone: nothing more will be heard of it.
    Gone,
}

/// Since when it listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Since {
    Before,
    Now,
}

#[cfg(any(target_os = "linux", target_os = "android"))]
use inotify::Ears;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
use silence::Ears;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod inotify {
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch};
    use rustix::io::Errno;

    use super::{Heard, Since};

    /// Hears when a file is written to, by whatever process of this kernel.
    #[derive(Debug)]
    pub(super) struct Ears {
        events: OwnedFd,
        file: PathBuf,
        /// The number of its watch while it listens.
        watch: Option<i32>,
    }

    impl Ears {
        /// `None`: the system has no more of them for this user.
        pub(super) fn open(file: &Path) -> Option<Ears> {
            let events = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
            Some(Ears { events, file: file.to_owned(), watch: None })
        }

        /// Listens from now on, or goes on listening; `None`: that cannot be had for this file.
        pub(super) fn listen(&mut self) -> Option<Since> {
            if self.watch.is_some() {
                return Some(Since::Before);
            }
            self.watch = Some(add_watch(&self.events, &self.file, WatchFlags::MODIFY).ok()?);
            Some(Since::Now)
        }

        /// Listens no more.
        pub(super) fn rest(&mut self) {
            if let Some(watch) = self.watch.take() {
                let _ = remove_watch(&self.events, watch);
            }
        }

        /// What was heard since this was asked last.
        pub(super) fn take(&mut self) -> Heard {
            let mut buffer = [MaybeUninit::uninit(); 1024];
            let mut reader = Reader::new(&self.events, &mut buffer);
            let mut heard = Heard::Nothing;
            // There may be more at once: that is heard the next time.
            for _ in 0..8 {
                match reader.next() {
                    // Of an earlier watch there may be something left.
                    Ok(event) if Some(event.wd()) != self.watch => {}
                    Ok(event) if event.events().contains(ReadFlags::IGNORED) => {
                        self.watch = None;
                        return Heard::Gone;
                    }
                    Ok(_) => heard = Heard::Written,
                    Err(Errno::INTR) => {}
                    Err(_) => break,
                }
            }
            heard
        }

        /// Waits until there is something, for so long at most. Returns whether there is.
        pub(super) fn wait(&self, limit: Duration) -> bool {
            let limit = Timespec::try_from(limit).expect("a second at most");
            match poll(&mut [PollFd::new(&self.events, PollFlags::IN)], Some(&limit)) {
                Ok(ready) => ready > 0,
                Err(_) => false,
            }
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod silence {
    use std::path::Path;
    use std::time::Duration;

    use super::{Heard, Since};

    /// This system says nothing.
    #[derive(Debug)]
    pub(super) enum Ears {}

    impl Ears {
        pub(super) fn open(_: &Path) -> Option<Ears> {
            None
        }

        pub(super) fn listen(&mut self) -> Option<Since> {
            match *self {}
        }

        pub(super) fn rest(&mut self) {
            match *self {}
        }

        pub(super) fn take(&mut self) -> Heard {
            match *self {}
        }

        pub(super) fn wait(&self, _: Duration) -> bool {
            match *self {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Look = Look { changed: false, found: false, heard: false, listened: true, can_hear: true };
    const MINUTE: Duration = Duration::from_secs(60);

    /// The looks of so long a time in which every look comes to the same.
    fn looks(pace: &mut Pace, time: Duration, look: Look) -> u32 {
        let (mut over, mut count) = (Duration::ZERO, 0);
        while over < time {
            let (Wait::Rest(pause) | Wait::Listen(pause)) = pace.after(look);
            over += pause;
            count += 1;
        }
        count
    }

    #[test]
    fn in_a_quiet_minute_it_looks_about_once_a_second() {
        let mut pace = Pace::default();
        assert!(looks(&mut pace, MINUTE, NOTHING) < 75 && pace.is_quiet());
        assert!(looks(&mut pace, MINUTE, NOTHING) <= 60);
    }

    #[test]
    fn where_nothing_can_be_heard_it_looks_often_enough() {
        let mut pace = Pace::default();
        looks(&mut pace, MINUTE, Look { can_hear: false, ..NOTHING });
        assert_eq!(pace.after(Look { can_hear: false, ..NOTHING }), Wait::Listen(POLL.1));
        assert!(!pace.is_quiet());
    }

    #[test]
    fn what_is_heard_is_looked_at_closely_for_some_milliseconds() {
        let mut pace = Pace::default();
        looks(&mut pace, MINUTE, NOTHING);
        assert_eq!(pace.after(Look { heard: true, ..NOTHING }), Wait::Listen(CLOSE.0));
        let mut close = CLOSE.0;
        while close * 3 / 2 <= CLOSE.1 {
            close = close * 3 / 2;
            // That more is written meanwhile makes it no closer: who writes for long may be long before its commit.
            let heard = close > CLOSE.1 / 4;
            assert_eq!(pace.after(Look { heard, ..NOTHING }), Wait::Listen(close));
        }
        // An `fsync` may take longer: it goes on looking, for about as long again each time.
        assert_eq!(pace.after(NOTHING), Wait::Listen(LISTEN.0));
    }

    #[test]
    fn a_system_that_says_nothing_of_commits_is_not_relied_on_until_it_does() {
        let mut pace = Pace::default();
        let changed = Look { changed: true, ..NOTHING };
        for _ in 0..UNHEARD {
            pace.after(changed);
        }
        looks(&mut pace, MINUTE, NOTHING);
        assert!(!pace.is_quiet());
        pace.after(Look { heard: true, ..changed });
        looks(&mut pace, MINUTE, NOTHING);
        assert!(pace.is_quiet());
    }

    #[test]
    fn commits_that_are_nobodys_business_are_looked_at_less_and_less_often() {
        let mut pace = Pace::default();
        let others = Look { changed: true, heard: true, ..NOTHING };
        looks(&mut pace, MINUTE, others);
        assert_eq!(pace.after(others), Wait::Rest(REST.1));
        assert_eq!(pace.after(Look { found: true, ..others }), Wait::Rest(REST.0));
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[test]
    fn what_is_written_to_a_file_is_heard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "a").unwrap();
        let mut ears = Ears::open(&path).expect("there are some left");
        std::fs::write(&path, "b").unwrap();
        assert_eq!(
            (ears.take(), ears.listen(), ears.listen()),
            (Heard::Nothing, Some(Since::Now), Some(Since::Before))
        );
        assert!(ears.take() == Heard::Nothing && !ears.wait(Duration::ZERO));
        std::fs::write(&path, "c").unwrap();
        assert!(ears.wait(MINUTE));
        assert_eq!((ears.take(), ears.take()), (Heard::Written, Heard::Nothing));
        std::fs::write(&path, "d").unwrap();
        ears.rest();
        std::fs::write(&path, "e").unwrap();
        assert_eq!((ears.take(), ears.listen(), ears.take()), (Heard::Nothing, Some(Since::Now), Heard::Nothing));
        std::fs::remove_file(&path).unwrap();
        assert!(ears.wait(MINUTE));
        assert_eq!((ears.take(), ears.listen()), (Heard::Gone, None));
    }
}
