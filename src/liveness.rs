//! Liveness: the death of an owner is seen at once.
//!
//! A running worker holds an exclusive lock on a file of its own, beside the store. The kernel lets go of it when the
//! process dies, also under `kill -9` and across containers; no process id is judged. Whoever can take a shared lock on
//! that file knows that its owner is dead. (Shared, so that two who look at the same moment do not take each other for
//! the owner.) The file's name is random and never used twice, so it is the very file that was locked, or none; a missing
//! file proves nothing, and then the lease decides. Locks are taken and probed only inside a write transaction; a look alone
//! ([`Liveness::life`]) does without one.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::random;
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
    folder: Option<PathBuf>,
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

/// What a worker holds while it lives.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

impl Lock {
    /// Commands that this process runs from now on inherit it.
    pub(crate) fn share(&self) -> Result<()> {
        #[cfg(unix)]
        rustix::io::fcntl_setfd(&self.file, rustix::io::FdFlags::empty()).map_err(|error| Error::Open {
            path: self.path.clone(),
            detail: format!("the worker's lock cannot be shared with commands: {error}"),
        })?;
        Ok(())
    }

    /// Ends in good order: the file goes with the lock.
    pub(crate) fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    Alive,
    Dead,
    Unknown,
}

impl Liveness {
    pub(crate) fn new(folder: Option<PathBuf>) -> Liveness {
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
                return Err(Error::LabelTaken { label: row.label, pid: row.pid, started_at: row.started_at });
            }
            workers::remove(tx, label, row.incarnation)?;
        }
        let before = meta::get::<i64>(tx.conn, "incarnation")?.unwrap_or(0);
        ended::mark(tx.conn, label, before, probe != Some(Probe::Unknown))?;
        ended::clear_if_few(tx.conn)?;
        let lock = self.folder.as_deref().map(lock).transpose()?;
        let name = lock.as_ref().and_then(|lock| lock.path.file_name()?.to_str().map(str::to_owned));
        let incarnation = before + 1;
        meta::set(tx.conn, "incarnation", incarnation)?;
        workers::register(tx, label, incarnation, name.as_deref())?;
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
            (Some(folder), Some(name)) => probe(&folder.join(name)),
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

    /// Removes the files of owners that were buried before, so that they do not pile up.
    fn sweep(&self, tx: &Tx<'_>) -> Result<()> {
        let Some(files) = self.folder.as_deref().and_then(|folder| std::fs::read_dir(folder).ok()) else {
            return Ok(());
        };
        let registered = workers::all(tx.conn)?;
        for file in files.flatten() {
            let known = registered.iter().any(|row| row.lock.as_deref().map(AsRef::as_ref) == Some(&*file.file_name()));
            if !known && probe(&file.path()) == Probe::Dead {
                let _ = std::fs::remove_file(file.path());
            }
        }
        Ok(())
    }
}

fn lock(folder: &Path) -> Result<Lock> {
    let path = folder.join(format!("{}.lock", random::name()));
    let taken = (|| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o644); // it is empty, and other users must see that it is held
        std::fs::create_dir_all(folder)?;
        let file = options.open(&path)?;
        file.try_lock()?;
        Ok::<_, std::io::Error>(file)
    })();
    match taken {
        Ok(file) => Ok(Lock { path, file }),
        Err(error) => Err(Error::Open {
            path,
            detail: format!(
                "the worker's lock cannot be taken: {error}; {} must be a folder that can be written: move away what else \
                 lies there, or allow writing",
                folder.display()
            ),
        }),
    }
}

fn probe(path: &Path) -> Probe {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Probe::Unknown,
        // It is there, and belongs to somebody whose files we may not open: he may well live.
        Err(_) => return Probe::Alive,
    };
    match file.try_lock_shared() {
        Ok(()) => Probe::Dead,
        Err(TryLockError::WouldBlock) => Probe::Alive,
        Err(TryLockError::Error(_)) => Probe::Unknown,
    }
}
