//! The watcher: one thread per store that notices the commits of other processes, and rings the waker.
//!
//! It looks at `PRAGMA data_version`, on a connection of its own, while somebody waits and not at all otherwise. When to look it is
//! told by the system (inotify), which knows when a log is written to. Nothing depends on that: where it is not to be had, or
//! says nothing, the watcher looks every so often all the same, and that costs latency only.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;

use crate::waker::{NAP_MAX, Waker};
use crate::{db, files};

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
/// How often a watcher without anybody who waits looks whether its store is still there.
const IDLE: Duration = Duration::from_secs(1);
/// So many commits in a row of which nothing was heard: the system says nothing of them.
const UNHEARD: u32 = 3;

pub(crate) fn keep_watch(waker: &Arc<Waker>, path: &Path) {
    let mut pace = Pace::default();
    let mut watching: Option<(Connection, i64)> = None;
    let mut ears: Option<Ears> = None;
    // The store has the other one; when it has gone, nobody is left to be rung for.
    while Arc::strong_count(waker) > 1 {
        if waker.is_nobody_waiting(IDLE) {
            (watching, ears) = (None, None);
            pace = Pace::default();
            waker.set_quiet(false);
            continue;
        }
        let heard = ears.as_mut().is_some_and(Ears::take);
        if ears.as_ref().is_some_and(Ears::is_closed) {
            watching = None;
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
        if changed {
            waker.ring_all();
        }
        let wait = pace.after(Look { changed, found, heard, can_hear: ears.is_some() });
        waker.set_quiet(pace.is_quiet());
        match (wait, &ears) {
            (Wait::Listen(limit), Some(ears)) => {
                if ears.wait(limit) {
                    // Who writes for long before it commits is not looked at all the time.
                    let pause = if limit <= CLOSE.1 { limit / 4 } else { CLOSE.0 };
                    std::thread::sleep(pause.max(CLOSE.0));
                }
            }
            (Wait::Listen(pause) | Wait::Rest(pause), _) => std::thread::sleep(pause),
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
            (self.close, self.pause) = (self.close.or(Some(CLOSE.0)), Duration::ZERO);
            (self.heard, self.unheard) = (true, 0);
        }
        if look.changed {
            self.unheard = if std::mem::take(&mut self.heard) { 0 } else { self.unheard.saturating_add(1) };
            // What others commit is looked at at once where that has been of use of late.
            self.rest = if look.found { REST.0 } else { (self.rest * 5 / 4).clamp(REST.0, REST.1) };
            (self.close, self.pause) = (None, Duration::ZERO);
            return Wait::Rest(self.rest);
        }
        if let Some(close) = self.close {
            self.close = Some(close * 3 / 2).filter(|next| *next <= CLOSE.1);
            return Wait::Listen(close);
        }
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

#[cfg(any(target_os = "linux", target_os = "android"))]
use inotify::Ears;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
use silence::Ears;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod inotify {
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
    use rustix::io::Errno;

    /// Hears when a file is written to, by whatever process of this kernel.
    #[derive(Debug)]
    pub(super) struct Ears {
        events: OwnedFd,
        closed: bool,
    }

    impl Ears {
        /// `None`: the system has no more of them for this user, or none for this file.
        pub(super) fn open(file: &Path) -> Option<Ears> {
            let events = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
            add_watch(&events, file, WatchFlags::MODIFY).ok()?;
            Some(Ears { events, closed: false })
        }

        /// Whether there was something since this was asked last.
        pub(super) fn take(&mut self) -> bool {
            let mut buffer = [MaybeUninit::uninit(); 1024];
            let mut reader = Reader::new(&self.events, &mut buffer);
            let mut any = false;
            loop {
                match reader.next() {
                    Ok(event) => {
                        any = true;
                        self.closed |= event.events().contains(ReadFlags::IGNORED);
                    }
                    Err(Errno::INTR) => {}
                    Err(_) => return any,
                }
            }
        }

        /// The file has gone: nothing more will be heard.
        pub(super) fn is_closed(&self) -> bool {
            self.closed
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

    /// This system says nothing.
    #[derive(Debug)]
    pub(super) enum Ears {}

    impl Ears {
        pub(super) fn open(_: &Path) -> Option<Ears> {
            None
        }

        pub(super) fn take(&mut self) -> bool {
            match *self {}
        }

        pub(super) fn is_closed(&self) -> bool {
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

    const NOTHING: Look = Look { changed: false, found: false, heard: false, can_hear: true };
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
        assert!(!ears.take() && !ears.wait(Duration::ZERO));
        std::fs::write(&path, "b").unwrap();
        assert!(ears.wait(MINUTE) && ears.take() && !ears.take() && !ears.is_closed());
        std::fs::remove_file(&path).unwrap();
        assert!(ears.wait(MINUTE) && ears.take() && ears.is_closed());
        assert!(Ears::open(&path).is_none());
    }
}
