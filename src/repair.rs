//! Repair: a damaged store is put right, and it is told what was done and what is beyond that.

use std::path::Path;

use rusqlite::Connection;

use crate::boot::Boot;
use crate::clock::{Now, Timeline};
use crate::db;
use crate::error::{Error, Result};
use crate::files;
use crate::options::Options;
use crate::sql::{Defaults, Tx, doctor, mend, meta, repair};
use crate::store::Store;

/// What a repair came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repaired {
    /// What it did, in sentences; empty where nothing had to be done.
    pub done: Vec<String>,
    /// What the doctor still finds: it is beyond repair, or not relet's to change.
    pub left: Vec<String>,
}

impl Options {
    /// Repairs the store in this file, also where it is too damaged to be opened for writing. What lies beside the messages is
    /// made to agree with them, counters are counted anew, indexes are made again, and what cannot be read becomes a dead letter.
    /// No message is removed. Keep a copy of the file first.
    ///
    /// Each step is a commit of its own under the write lock, so that others may go on; the longest reads every message a few
    /// times. Triggers and indexes that others have put on relet's tables are told, and left. A payload that does not match its
    /// checksum is told, and left: its message becomes a dead letter when it is claimed.
    ///
    /// # Errors
    /// [`Error::Open`] where the file is not there or no store, [`Error::Busy`] where another process keeps the write lock, or
    /// what SQLite says of a file that it cannot read: then restore a backup.
    ///
    /// ```
    /// use relet::Store;
    ///
    /// let folder = std::env::temp_dir().join(format!("relet-repair-{}", std::process::id()));
    /// std::fs::create_dir_all(&folder)?;
    /// let file = folder.join("queue.db");
    /// Store::open(&file)?.queue("mail").enqueue("hello")?;
    /// let repaired = Store::options().repair(&file)?;
    /// assert!(repaired.done.is_empty() && repaired.left.is_empty());
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn repair(self, path: impl AsRef<Path>) -> Result<Repaired> {
        let path = files::resolve(path.as_ref())?;
        if !path.exists() {
            return Err(Error::Open { path, detail: "there is no such file".into() });
        }
        let conn = db::connect(&path, &self)?;
        if !meta::exists(&conn)? {
            return Err(Error::Open { path, detail: "it is no relet store, or its table relet_meta is lost".into() });
        }
        let mut done = Vec::new();
        db::commit(&conn, self.busy_wait, || repair::schema(&conn, &mut done))?;
        db::commit(&conn, self.busy_wait, || repair::whole_store(&conn, &mut done))?;
        let now = self.now(&conn)?;
        while db::commit(&conn, self.busy_wait, || self.set_aside(&conn, now, &mut done))? {}
        let mut step = 0;
        while db::commit(&conn, self.busy_wait, || repair::rows(&conn, now, step, &mut done))? {
            step += 1;
        }
        db::commit(&conn, self.busy_wait, || repair::schema(&conn, &mut done))?;
        let before = doctor::examine(&conn, now)?;
        if before.iter().any(|finding| {
            ["counter", "acked"].iter().any(|word| finding.contains(word)) || finding.contains("has not been given out")
        }) {
            db::commit(&conn, self.busy_wait, || repair::count(&conn))?;
            done.push("the counters were counted anew".into());
        }
        Ok(Repaired { done, left: doctor::examine(&conn, now)? })
    }

    fn now(&self, conn: &Connection) -> Result<Now> {
        let boot = Boot::load(conn, &self.clock)?;
        let reading = self.clock.read();
        let timeline =
            boot.as_ref().map_or_else(|| Timeline::begin(reading, 0, Timeline::default()), |boot| boot.timeline);
        let now = timeline.now(reading);
        // Only in the boot that the store knows are the ends of its leases instants of this clock.
        let known = boot.is_some_and(|boot| boot.id.is_some() && boot.id == self.clock.boot());
        Ok(if known { now } else { Now { awake: i64::MAX, ..now } })
    }

    /// Returns whether there may be more.
    fn set_aside(&self, conn: &Connection, now: Now, done: &mut Vec<String>) -> Result<bool> {
        let mut tx = Tx::new(conn, now, Defaults::from(self), meta::need(conn, "epoch")?, 0);
        let changed = mend::set_aside(&mut tx)?;
        tx.finish()?;
        if changed > 0 {
            done.push(format!(
                "messages that could not be read became dead letters, or left lines that were not theirs: {changed}"
            ));
        }
        Ok(changed > 0)
    }
}

impl Store {
    /// Repairs the store in this file. See [`Options::repair`].
    ///
    /// # Errors
    /// As [`Options::repair`].
    pub fn repair(path: impl AsRef<Path>) -> Result<Repaired> {
        Options::default().repair(path)
    }
}
