//! The boot: whether the machine was restarted since the store was last open, and what follows from that.
//!
//! A restart ends every worker and every lease, and may have lost what was committed without `fsync`; so it must be noticed. But it must
//! not be *believed* without need: whoever declares one takes everybody's messages away. What counts as proof, in this order:
//!
//! 1. Somebody else has the store open, or a registered worker's lock is held ([`Presence`](crate::presence)). Locks end with the
//!    machine. So it was not restarted, whatever any id says: a container, a sandbox or a hardened service may read another one, or none.
//! 2. Nobody is there, and the kernel's boot id is the one in the file: not restarted. If it is another one, and the clocks do not go on
//!    from where they were when the store was last open: restarted.
//! 3. The ids differ and the clocks go on (containers that each have an id), or one of the two is not known (a process without `/proc`,
//!    a system without boot ids) and the machine has not been awake for less time than it had been then: nobody can tell. Then a new
//!    epoch begins, so that no receipt is issued twice, and of the leases those are void that are longer than they were made.

use std::sync::Arc;

use rusqlite::Connection;

use crate::clock::{Clock, Now, Reading, Timeline};
use crate::error::{Error, Result};
use crate::presence::Others;
use crate::sql::{counters, gates, meta, workers};

/// Which boot of the machine a store is in, and what follows from it for claims and for the store's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Boot {
    /// The boot id, as it stands in the file; `None`: it could not be read by whoever opened the store first.
    pub(crate) id: Option<Arc<str>>,
    pub(crate) epoch: i64,
    /// Claims of messages up to this id are made durable: they were in the file when this epoch began.
    pub(crate) mark: i64,
    pub(crate) timeline: Timeline,
    /// Receipts of an earlier epoch were issued by the file that this one is a copy of: they are worth nothing here.
    pub(crate) floor: i64,
    /// Whether the timeline was begun by somebody who knows what its time namespace adds.
    sure: bool,
    /// When the store was last opened, or looked after: the store's time, and how long the machine had been awake.
    seen: (i64, i64),
}

/// What two clocks of one machine may differ by.
const SLACK_MS: i64 = 1_500;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    Restarted,
    /// It may have been restarted.
    Unknown,
    /// This process has another clock than those who have the store open.
    AnotherClock,
}

impl Boot {
    /// What the file says; `None` where nothing was noted yet.
    pub(crate) fn load(conn: &Connection, clock: &Clock) -> Result<Option<Boot>> {
        let meta::Clocks { epoch: Some(epoch), floor, boot_id, boot_mark, base, skew, ahead, sure, seen } =
            meta::clocks(conn)?
        else {
            return Ok(None);
        };
        let id = boot_id.map(Arc::from);
        let timeline = match base {
            Some(base) => Timeline { base, skew, ahead },
            None => Timeline::begin(clock.read(), seen.0, Timeline { base: 0, skew, ahead }), // It was lost.
        };
        Ok(Some(Boot { id, epoch, mark: boot_mark, timeline, floor, sure, seen }))
    }

    /// Judges whether the machine was restarted, and notes what follows. Inside a write transaction, whose commit must be a durable one
    /// and come before the first claim.
    pub(crate) fn note(conn: &Connection, clock: &Clock, others: impl FnOnce() -> Result<Others>) -> Result<Boot> {
        let reading = clock.read();
        let before = Boot::load(conn, clock)?;
        let verdict = match &before {
            Some(before) => match before.verdict(clock, reading, others)? {
                Verdict::AnotherClock => return Err(another_clock(conn)?),
                verdict => verdict,
            },
            None => Verdict::Restarted,
        };
        let boot = match (before, verdict) {
            (Some(before), Verdict::Same) => Boot { timeline: before.timeline.follow(reading), ..before },
            (before, _) => {
                let (epoch, seen, timeline) =
                    before.as_ref().map(|boot| (boot.epoch, boot.seen.0, boot.timeline)).unwrap_or_default();
                let floor = before.as_ref().map_or(0, |boot| boot.floor);
                let boot = Boot {
                    floor,
                    sure: clock.is_the_machines(),
                    id: clock.boot(),
                    epoch: epoch + 1,
                    mark: counters::last_id(conn)?,
                    timeline: Timeline::begin(reading, seen, timeline),
                    seen: (0, 0),
                };
                meta::set(conn, "epoch", boot.epoch)?;
                meta::set(conn, "boot_id", boot.id.as_deref())?;
                meta::set(conn, "boot_mark", boot.mark)?;
                meta::set(conn, "clock_sure", boot.sure)?;
                let now = boot.timeline.now(reading);
                match verdict {
                    Verdict::Restarted => {
                        meta::void_all_claims(conn)?;
                        gates::empty_all(conn, now)?;
                    }
                    _ => meta::void_unbelievable_claims(conn, now)?,
                }
                boot
            }
        };
        boot.see(conn, reading)
    }

    /// Notes where the clocks are, for whoever opens the store next.
    pub(crate) fn see(self, conn: &Connection, reading: Reading) -> Result<Boot> {
        let timeline = self.timeline.follow(reading);
        let seen = (timeline.now(reading).time, reading.awake);
        meta::set(conn, "clock_base", timeline.base)?;
        meta::set(conn, "clock_skew", timeline.skew)?;
        meta::set(conn, "clock_ahead", timeline.ahead)?;
        meta::set(conn, "seen_at", seen.0)?;
        meta::set(conn, "seen_awake", seen.1)?;
        Ok(Boot { timeline, seen, ..self })
    }

    fn verdict(&self, clock: &Clock, reading: Reading, others: impl FnOnce() -> Result<Others>) -> Result<Verdict> {
        let same = match (&self.id, &clock.boot()) {
            (Some(before), Some(now)) => Some(before == now),
            _ => None,
        };
        if clock.knows_its_boots() {
            return Ok(if same == Some(true) { Verdict::Same } else { Verdict::Restarted });
        }
        let went_back = reading.awake < self.seen.1;
        let is_sure = self.sure && clock.is_the_machines();
        let differs = went_back || (!is_sure && !self.goes_on(reading));
        if same == Some(true) && !differs {
            return Ok(Verdict::Same);
        }
        Ok(match others()? {
            // All locks are of one kernel, and so are its clocks: this process is shown another one.
            Others::Present if differs => Verdict::AnotherClock,
            Others::Present => Verdict::Same,
            // The ids of two containers differ, and not their clocks: those of another boot would.
            Others::Nobody | Others::Unknown if same.is_none() && !went_back => Verdict::Unknown,
            Others::Nobody | Others::Unknown if self.goes_on(reading) => Verdict::Unknown,
            Others::Nobody | Others::Unknown => Verdict::Restarted,
        })
    }

    /// Whether the clocks of this boot would read so by now: none went back, none ran ahead of time itself, and as much time has
    /// passed as the wall clock says.
    fn goes_on(&self, reading: Reading) -> bool {
        let now = self.timeline.now(reading);
        let (passed, awake) = (now.time - self.seen.0, reading.awake - self.seen.1);
        (0..=passed + SLACK_MS).contains(&awake) && (reading.wall - now.time - self.timeline.skew).abs() <= SLACK_MS
    }

    /// The time of a look that writes nothing. If the machine was restarted and nothing has been written since, every lease has run out.
    pub(crate) fn look(&self, clock: &Clock, others: impl FnOnce() -> Result<Others>) -> Result<Now> {
        let reading = clock.read();
        Ok(match self.verdict(clock, reading, others)? {
            Verdict::Restarted => {
                let timeline = Timeline::begin(reading, self.seen.0, self.timeline);
                Now { awake: i64::MAX, ..timeline.now(reading) }
            }
            _ => self.timeline.now(reading),
        })
    }
}

fn another_clock(conn: &Connection) -> Result<Error> {
    let workers = workers::all(conn)?;
    let holder = match workers.first() {
        Some(worker) => format!("worker {:?} (process {})", worker.label, worker.pid),
        None => "another process".to_owned(),
    };
    Ok(Error::AnotherClock { holder })
}
