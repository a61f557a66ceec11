//! Presence: who has the store open for writing, and which workers live. Both are locks on files beside it.
//!
//! Each handle that may write holds a shared lock on one file beside the store, for as long as it is open. Locks end with the process
//! and with the machine, and are seen by every process of one kernel, whatever it can read of `/proc`. So whoever can take that
//! lock alone knows that nobody else is there. That is tried only inside a write transaction, so that two who open at once judge
//! one after the other; a look that writes nothing tries it for a moment, which those who open outwait.

use std::cell::RefCell;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::files::{Folder, Identity};
use crate::random;
use crate::sql::workers::WorkerRow;

/// The lock's file, in the folder of the workers' locks: of this very file, so that who has another one open, which lay at the same
/// path, does not count.
fn name_of(identity: Option<Identity>) -> String {
    let (device, inode) = identity.unwrap_or_default();
    format!("open-{device:x}-{inode:x}.lock")
}

/// Tries, and pauses between them: one that only looks holds it alone for a moment.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_micros(50);

/// Who else is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// Somebody else has the store open, or a worker's lock is held.
    Present,
    Nobody,
    /// The file system has no locks.
    Unknown,
}

/// What a handle holds while it is open. It is given up with [`Presence::leave`], or by the end of the process.
#[derive(Debug)]
pub(crate) struct Presence {
    folder: Folder,
    name: String,
    file: RefCell<Option<File>>,
}

impl Presence {
    /// Not there yet, and nothing is made.
    pub(crate) fn new(folder: Folder, identity: Option<Identity>) -> Presence {
        Presence { folder, name: name_of(identity), file: RefCell::default() }
    }

    /// Who else is there. Inside a write transaction, before [`Presence::join`].
    pub(crate) fn others(&self) -> Result<Others> {
        Ok(self.lock(alone)?.unwrap_or(Others::Unknown))
    }

    /// From now on this one is there, too.
    ///
    /// # Errors
    /// [`Error::Busy`] where somebody holds it alone: that is a moment, unless a stranger does.
    pub(crate) fn join(&self) -> Result<()> {
        let shared = self.lock(|file| {
            // Where the file system has no locks: what that means is told by `others`.
            let would_block = || share(file).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            !would_block() || (1..TRIES).any(|_| pause() || !would_block())
        })?;
        if shared == Some(false) { Err(Error::Busy { waited: Duration::ZERO }) } else { Ok(()) }
    }

    /// Takes a lock on the file that has the name then. (Between opening it and locking it, the last one who was there may have
    /// removed it.) `None`: the disk has no room for it.
    fn lock<T>(&self, take: impl Fn(&File) -> T) -> Result<Option<T>> {
        let mut held = self.file.borrow_mut();
        loop {
            let file = match held.take() {
                Some(file) => file,
                None => match self.folder.open_or_create(&self.name) {
                    Ok(file) => file,
                    // What is stored can be worked off all the same.
                    Err(Error::Full { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                },
            };
            let taken = take(&file);
            if self.folder.has(&self.name, &file) {
                *held = Some(file);
                return Ok(Some(taken));
            }
        }
    }

    /// It is there no more. The last one removes what it has made, so that a store that is closed is one file.
    pub(crate) fn leave(self) {
        let Some(file) = self.file.into_inner() else { return };
        if cfg!(unix) && file.try_lock().is_ok() && self.folder.has(&self.name, &file) {
            self.folder.remove(&self.name);
            self.folder.remove_if_empty();
        }
    }
}

fn pause() -> bool {
    std::thread::sleep(PAUSE);
    false
}

/// Who is there, for somebody who does not join them. (`Nobody` also where no store was ever opened for writing.)
pub(crate) fn look(folder: &Folder, identity: Option<Identity>) -> Others {
    match folder.open(&name_of(identity)) {
        Ok(Some(file)) => alone(&file), // and lets go of it
        Ok(None) => Others::Nobody,
        Err(_) => Others::Unknown,
    }
}

fn alone(file: &File) -> Others {
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Others::Nobody,
            Err(TryLockError::WouldBlock) => drop(pause()),
            Err(TryLockError::Error(_)) => return Others::Unknown,
        }
    }
    Others::Present
}

/// Takes the shared lock, or makes one of the other kind a shared one.
#[cfg(unix)]
fn share(file: &File) -> std::io::Result<()> {
    use rustix::fs::{FlockOperation, flock};
    Ok(flock(file, FlockOperation::NonBlockingLockShared)?)
}

#[cfg(not(unix))]
fn share(file: &File) -> std::io::Result<()> {
    let _ = file.unlock();
    Ok(file.try_lock_shared()?)
}

/// What a worker holds while it lives.
#[derive(Debug)]
pub(crate) struct Lock {
    folder: Folder,
    name: String,
    file: File,
}

impl Lock {
    /// Takes the lock of a new start.
    pub(crate) fn take(folder: &Folder) -> Result<Lock> {
        let name = format!("{}{SUFFIX}", random::name());
        debug_assert!(is_name(&name), "probes know it");
        let file = folder.create(&name)?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { folder: folder.clone(), name, file }),
            Err(error) => Err(Error::Open {
                path: folder.path_of(&name),
                detail: format!(
                    "the worker's lock cannot be taken: {error}; put the store on a file system that has locks"
                ),
            }),
        }
    }

    /// Its file's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Commands that this process runs from now on inherit it.
    pub(crate) fn share(&self) -> Result<()> {
        #[cfg(unix)]
        rustix::io::fcntl_setfd(&self.file, rustix::io::FdFlags::empty()).map_err(|error| Error::Open {
            path: self.folder.path_of(&self.name),
            detail: format!("the worker's lock cannot be shared with commands: {error}"),
        })?;
        Ok(())
    }

    /// Ends in good order: the file goes with the lock.
    pub(crate) fn remove(self) {
        self.folder.remove(&self.name);
    }
}

/// Whether one of these workers certainly lives.
pub(crate) fn any_alive(folder: &Folder, workers: &[WorkerRow]) -> bool {
    workers.iter().filter_map(|row| row.lock.as_deref()).any(|name| probe(folder, name) == Probe::Alive)
}

/// What follows the random part of a lock's name.
const SUFFIX: &str = ".lock";

fn is_name(name: &str) -> bool {
    let digits = name.strip_suffix(SUFFIX).unwrap_or_default();
    digits.len() == random::NAME_LENGTH && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// What the lock of a start tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    Alive,
    Dead,
    /// It is not there, or not relet's.
    Unknown,
}

/// Whether whoever took the lock of this name lives.
pub(crate) fn probe(folder: &Folder, name: &str) -> Probe {
    if !is_name(name) {
        return Probe::Unknown;
    }
    let file = match folder.open(name) {
        Ok(Some(file)) => file,
        Ok(None) => return Probe::Unknown,
        // It belongs to somebody whose files we may not open: he may well live.
        Err(_) if folder.is_closed_to_us(name) => return Probe::Alive,
        Err(_) => return Probe::Unknown,
    };
    match file.try_lock_shared() {
        Ok(()) => Probe::Dead,
        Err(TryLockError::WouldBlock) => Probe::Alive,
        Err(TryLockError::Error(_)) => Probe::Unknown,
    }
}
