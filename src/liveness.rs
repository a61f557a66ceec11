//! Liveness: the death of an owner is seen at once.
//!
//! A running worker holds an exclusive lock on a file of its own, beside the store. The kernel lets go of it when the
//! process dies, also under `kill -9` and across containers; no process id is judged. Whoever can take a shared lock on
//! that file knows that its owner is dead. (Shared, so that two who look at the same moment do not take each other for
//! the owner.) The file's name is random and never used twice, so it is the very file that was locked, or none; a missing
//! file proves nothing, and then the lease decides. Nor does a name that relet does not give: it is never opened, whatever the
//! table says. Locks are taken and probed only inside a write transaction; a look alone ([`Liveness::life`]) does without one.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::files::Folder;
use crate::presence::{Lock, Probe, probe};
use crate::sql::workers::{self, WorkerRow};
use crate::sql::{Tx, ended, meta};
use crate::view::Life;

/// How often claims look for dead owners while there is something else to claim, …
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// … and this much less often for each worker that is registered: all processes together then look as often as a few would, at any
/// number of them, and since they do not look at the same time, a death is seen as soon.
const LOOK_EVERY_PER_WORKER: Duration = Duration::from_millis(10);

/// Where the workers of a store hold their locks.
#[derive(Debug)]
pub(crate) struct Liveness {
    /// `None`: in memory, where a worker lives as long as its row.
    folder: Option<Folder>,
    /// When dead owners were looked for, and how long that is good for.
    looked: Mutex<Option<(Stopwatch, Duration)>>,
    /// Starts that have ended but could not be struck off the store then. Their locks are held until that is done, or their
    /// end would be taken for a death.
    ended: Mutex<Vec<Ended>>,
}

#[derive(Debug)]
struct Ended {
    label: Arc<str>,
    incarnation: i64,
    lock: Lock,
}

impl Liveness {
    pub(crate) fn new(folder: Option<Folder>) -> Liveness {
        Liveness { folder, looked: Mutex::new(None), ended: Mutex::default() }
    }

    /// A start has ended and could not be struck off now: that is done with the next claim or start.
    pub(crate) fn strike_later(&self, label: Arc<str>, incarnation: i64, lock: Lock) {
        self.ended.lock().push(Ended { label, incarnation, lock });
    }

    /// Strikes off what has ended. A lock is let go of only once its row is seen to be gone, so that a transaction which is
    /// not committed changes nothing.
    pub(crate) fn strike_ended(&self, tx: &Tx<'_>) -> Result<()> {
        let mut waiting = Vec::new();
        let mut ended = self.ended.lock();
        for start in ended.drain(..) {
            match workers::find(tx.conn, &start.label) {
                Ok(Some(row)) if row.incarnation == start.incarnation => waiting.push(start),
                Ok(_) => start.lock.remove(),
                Err(_) => waiting.push(start),
            }
        }
        *ended = waiting;
        ended.iter().try_for_each(|start| workers::strike(tx, &start.label, start.incarnation))
    }

    /// Whether it is time to look for dead owners again.
    pub(crate) fn is_due(&self) -> bool {
        let mut looked = self.looked.lock();
        let due = looked.as_ref().is_none_or(|(watch, good_for)| watch.elapsed() >= *good_for);
        if due {
            *looked = Some((Stopwatch::start(), LOOK_EVERY));
        }
        due
    }

    /// Registers a new incarnation of a label and takes its lock. What an earlier one still holds is void from then on; unless it
    /// cannot be known whether that lives, then its leases decide.
    pub(crate) fn start(&self, tx: &mut Tx<'_>, label: &str) -> Result<(i64, Option<Lock>)> {
        self.sweep(tx)?;
        self.strike_ended(tx)?;
        let earlier = workers::find(tx.conn, label)?;
        let probe = earlier.as_ref().map(|row| self.probe(row));
        if let Some(row) = earlier {
            if probe == Some(Probe::Alive) {
                return Err(Error::LabelTaken {
                    label: row.label,
                    pid: row.pid,
                    started_at: tx.now.shown(row.started_at),
                });
            }
            workers::remove(tx, label, row.incarnation)?;
        }
        let before = meta::get::<i64>(tx.conn, "incarnation")?.unwrap_or(0);
        ended::mark(tx.conn, label, before, probe != Some(Probe::Unknown))?;
        ended::clear_if_few(tx.conn)?;
        let lock = self.folder.as_ref().map(Lock::take).transpose()?;
        let incarnation = before + 1;
        meta::set(tx.conn, "incarnation", incarnation)?;
        workers::register(tx, label, incarnation, lock.as_ref().map(Lock::name))?;
        Ok((incarnation, lock))
    }

    /// Which of these registered starts are dead. Needs no transaction, see [`Liveness::life`].
    pub(crate) fn dead(&self, rows: Vec<WorkerRow>) -> Vec<WorkerRow> {
        let good_for = LOOK_EVERY.max(LOOK_EVERY_PER_WORKER * u32::try_from(rows.len()).unwrap_or(u32::MAX));
        *self.looked.lock() = Some((Stopwatch::start(), good_for));
        rows.into_iter().filter(|row| self.probe(row) == Probe::Dead).collect()
    }

    /// Whether starts have ended and are not struck off yet.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.lock().is_empty()
    }

    fn probe(&self, row: &WorkerRow) -> Probe {
        match (&self.folder, &row.lock) {
            (None, _) => Probe::Alive,
            (Some(folder), Some(name)) => probe(folder, name),
            (Some(_), None) => Probe::Unknown,
        }
    }

    /// Whether the owner of this row lives. Needs no transaction, if the row is a committed one: its lock was taken before
    /// the commit, and nobody ever takes an exclusive one on that file again, so this probe is in nobody's way. The answer
    /// is about now: whoever is dead may also have been struck off since the row was read, and then has ended in good order.
    pub(crate) fn life(&self, row: &WorkerRow) -> Life {
        match self.probe(row) {
            Probe::Alive => Life::Alive,
            Probe::Dead => Life::Dead,
            Probe::Unknown => Life::Unknown,
        }
    }

    /// Removes the files of owners that were buried before, so that they do not pile up: of the names that relet gives, what nobody holds.
    fn sweep(&self, tx: &Tx<'_>) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let registered = workers::all(tx.conn)?;
        for name in folder.names() {
            let known = registered.iter().any(|row| row.lock.as_deref() == Some(&*name));
            if !known && probe(folder, &name) == Probe::Dead {
                folder.remove(&name);
            }
        }
        Ok(())
    }
}
