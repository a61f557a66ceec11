//! Restore: a store's file is replaced by a copy of another one, and its log with it, in one step.
//!
//! The new file is made beside the old one and brought to the disk. Then the old one is locked against everybody, and SQLite itself
//! brings its log into it, so that it is whole without one; only then the new file gets the name. So whenever this ends, the name
//! leads to the old store or to the new one, each whole, and no log lies beside a file that it does not belong to.

use std::fs::File;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use crate::backup::Part;
use crate::db;
use crate::error::{Error, Result};
use crate::files::{self, Folder};
use crate::options::Options;
use crate::presence::{self, Others, Presence};
use crate::reserve;
use crate::sql::{meta, workers};
use crate::store::Store;

/// What has been done, for tests that end a restore there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Copied,
    Synced,
    Locked,
    Cleared,
    Replaced,
}

impl Options {
    /// As [`Store::restore`], with these options: how long it waits for another process's lock, and whether an old SQLite is
    /// accepted.
    ///
    /// # Errors
    /// As [`Store::restore`].
    pub fn restore(self, source: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<()> {
        self.check()?;
        restore(&self, source.as_ref(), path.as_ref(), &mut |_| {})
    }
}

impl Store {
    /// Replaces the store at `path`, or makes one there, by a copy of another: a backup, or any store, which may be in use. What was
    /// at `path` is gone with its log, also where it was damaged; in a file that the application shares, its tables are those of
    /// the source, too.
    ///
    /// The copy is a store of its own, with a new epoch: no receipt from before is worth anything, and what was held can be claimed
    /// by anyone. Whatever ends it on its way, a kill or a power cut, leaves the old store or the new one, each whole; a file
    /// whose name ends in `.part` may be left, which can be deleted. It needs room for the copy beside the old one.
    ///
    /// ```
    /// use relet::Store;
    ///
    /// # let folder = std::env::temp_dir().join(format!("relet-restore-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// let (file, copy) = (folder.join("queue.db"), folder.join("copy.db"));
    /// let store = Store::open(&file)?;
    /// store.queue("mail").enqueue("hello")?;
    /// store.backup(&copy)?;
    /// drop(store);
    ///
    /// Store::restore(&copy, &file)?;
    /// assert_eq!(Store::open(&file)?.stats()?.queues[0].live(), 1);
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InUse`] where anybody has the store at `path` open, or a worker of it lives; [`Error::Restore`] where the source is
    /// damaged or no store, or the copy cannot be made; [`Error::SchemaTooNew`]. In all these cases nothing was changed.
    pub fn restore(source: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<()> {
        Options::default().restore(source, path)
    }
}

fn restore(options: &Options, source: &Path, path: &Path, done: &mut dyn FnMut(Step)) -> Result<()> {
    db::check_sqlite(options)?;
    let path = files::resolve(path)?;
    let refuse = |detail: String| Error::Restore { path: path.clone(), detail };
    let source = files::resolve(source)?;
    if !source.exists() {
        return Err(refuse(format!("there is no file {}", source.display())));
    }
    files::check(&source)?;
    let old = path.exists().then(|| Old::find(&path)).transpose()?;
    if old.is_some() && files::identity(&path) == files::identity(&source) {
        return Err(refuse("the source is this very file; name the backup".into()));
    }
    if old.is_none()
        && let Some(side) = files::beside_it(&path).into_iter().next()
    {
        let side = side.display();
        return Err(refuse(format!("{side} lies there without its file; put that back, or move this away")));
    }
    let replaced = replace(options, &source, &path, old.as_ref(), done);
    if let Some(old) = old {
        old.presence.leave();
    }
    replaced
}

fn replace(options: &Options, source: &Path, path: &Path, old: Option<&Old>, done: &mut dyn FnMut(Step)) -> Result<()> {
    let refuse = |detail: String| Error::Restore { path: path.to_owned(), detail };
    let part = copy(options, source, path)?;
    done(Step::Copied);
    let made = File::options().write(true).open(part.path()).map_err(|error| refuse(error.to_string()))?;
    files::make_alike(&made, if old.is_some() { path } else { source });
    made.sync_all().map_err(|error| refuse(format!("the copy cannot be brought to the disk: {error}")))?;
    drop(made);
    done(Step::Synced);
    match old {
        None => part.name(path).map_err(|error| refuse(format!("the copy cannot be given that name: {error}")))?,
        Some(old) => old.replace(options, &part, done)?,
    }
    files::sync_folder(path).map_err(|error| refuse(format!("it is done, but may not be on the disk: {error}")))?;
    done(Step::Replaced);
    Ok(())
}

/// Checks the source, and makes a whole copy of it beside `path` that is a store of its own.
fn copy(options: &Options, source: &Path, path: &Path) -> Result<Part> {
    let refuse = |detail: String| Error::Restore { path: path.to_owned(), detail };
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(source, flags)?;
    conn.busy_timeout(options.busy_wait)?;
    let shown = source.display();
    let damaged = |error: Error| match error {
        Error::SchemaTooNew { .. } | Error::Busy { .. } => error,
        error => refuse(format!("the source, {shown}, cannot be read ({error}); choose another one")),
    };
    if db::check_version(&conn).map_err(damaged)?.is_none() {
        return Err(refuse(format!("the source, {shown}, is no relet store; choose another one")));
    }
    if let Some(problem) = meta::damage(&conn).map_err(damaged)? {
        return Err(refuse(format!("the source, {shown}, is damaged ({problem}); choose another one")));
    }
    let part = Part::make(path).map_err(|error| refuse(format!("no file can be made beside it: {error}")))?;
    let copied = meta::copy_into(&conn, part.path()).and_then(|()| db::make_backup_own(part.path()));
    copied.map_err(|error| match error {
        Error::Backup { detail, .. } => refuse(format!("the copy cannot be written: {detail}")),
        error => error,
    })?;
    Ok(part)
}

/// The file that is there, and the lock that says that nobody else has it open as a store.
struct Old {
    path: PathBuf,
    folder: Folder,
    presence: Presence,
}

impl Old {
    fn find(path: &Path) -> Result<Old> {
        files::check_kind(path)?;
        files::check_writable(path)?;
        let identity = files::identity(path);
        if identity.is_some_and(files::is_open) {
            return Err(in_use(path, "this process has it open; drop every handle on it"));
        }
        let folder = Folder::new(path);
        let presence = Presence::new(folder.clone(), identity);
        match presence.others()? {
            Others::Present => Err(in_use(path, "another process has it open; stop it")),
            Others::Nobody | Others::Unknown => Ok(Old { path: path.to_owned(), folder, presence }),
        }
    }

    /// Gives its name to the new file.
    fn replace(&self, options: &Options, part: &Part, done: &mut dyn FnMut(Step)) -> Result<()> {
        let refuse = |detail: String| Error::Restore { path: self.path.clone(), detail };
        let locked = self.lock(options)?;
        done(Step::Locked);
        // Nothing is left of a store that could be read. What lies beside another one belongs to nothing that could be saved.
        for side in files::beside_it(&self.path) {
            std::fs::remove_file(&side)
                .map_err(|error| refuse(format!("{} cannot be removed: {error}", side.display())))?;
        }
        reserve::give_up(&self.path);
        let synced = files::sync_folder(&self.path);
        synced.map_err(|error| refuse(format!("its folder cannot be brought to the disk: {error}")))?;
        done(Step::Cleared);
        // Elsewhere no file can be replaced that is open.
        let locked = locked.filter(|_| cfg!(unix));
        std::fs::rename(part.path(), &self.path)
            .map_err(|error| refuse(format!("the copy cannot be given that name: {error}")))?;
        drop(locked);
        Ok(())
    }

    /// Locks it against everybody, SQLite's shell as well, and brings its log into it. `None`: it is so damaged, or lies beside a log of
    /// another file, that nobody can have it open.
    fn lock(&self, options: &Options) -> Result<Option<Connection>> {
        if files::has_log_of_another(&self.path) {
            return Ok(None);
        }
        let locked = db::patiently(options.busy_wait, || {
            let conn = db::connect(&self.path, options)?;
            if meta::exists(&conn)? {
                if presence::any_alive(&self.folder, &workers::all(&conn)?) {
                    return Err(in_use(&self.path, "a worker of it lives, or a command that it has started; stop it"));
                }
            } else if !meta::is_empty(&conn)? {
                return Err(self.is_no_store("it is a database, but no relet store"));
            }
            // Or SQLite would leave the log, and say in the file that there is none.
            db::checkpoint_on_close(&conn, true)?;
            meta::end_log(&conn)?;
            Ok(conn)
        });
        match locked {
            Ok(conn) => Ok(Some(conn)),
            Err(Error::Busy { .. }) => Err(in_use(&self.path, "another process has it open; stop it")),
            Err(Error::Corrupt { .. }) if files::was_a_database(&self.path) => Ok(None),
            Err(Error::Corrupt { .. }) => Err(self.is_no_store("it is no SQLite database")),
            Err(error) => Err(error),
        }
    }

    fn is_no_store(&self, what: &str) -> Error {
        let detail = format!("{what}; move it away, or name the store");
        Error::Restore { path: self.path.clone(), detail }
    }
}

fn in_use(path: &Path, detail: &'static str) -> Error {
    Error::InUse { path: path.to_owned(), detail }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::view::Filter;

    const STEPS: [Step; 5] = [Step::Copied, Step::Synced, Step::Locked, Step::Cleared, Step::Replaced];
    /// Where the child ends, and its two files.
    const CHILD: &str = "RELET_RESTORE_CHILD";

    /// A store whose last commits are in its log only, as after a kill.
    fn make(path: &Path, payloads: &[&str]) {
        let store = Store::options().reserve(0).checkpoints(false).open(path).unwrap();
        store.queue("mail").enqueue_all(payloads.iter().copied()).unwrap();
        drop(store);
        assert!(std::fs::metadata(files::beside(path, "-wal")).unwrap().len() > 0);
    }

    fn payloads(path: &Path) -> Result<Vec<String>> {
        let store = Store::options().reserve(0).open(path)?;
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
        let messages = store.list(&Filter::new().payload(true)).unwrap();
        Ok(messages.into_iter().map(|message| String::from_utf8(message.payload.unwrap()).unwrap()).collect())
    }

    /// Restores in another process, which dies at this step.
    fn die_at(step: Step, source: &Path, path: &Path) {
        let part = [format!("{step:?}").as_str(), source.to_str().unwrap(), path.to_str().unwrap()].join("\n");
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "restore::tests::child"]).env(CHILD, part);
        assert!(!command.output().unwrap().status.success(), "it died at {step:?}");
    }

    #[test]
    fn child() {
        let Ok(part) = std::env::var(CHILD) else { return };
        let part: Vec<&str> = part.split('\n').collect();
        let step = STEPS.into_iter().find(|step| format!("{step:?}") == part[0]).unwrap();
        let mut die = |done| {
            if done == step {
                std::process::abort()
            }
        };
        restore(&Options::default(), Path::new(part[1]), Path::new(part[2]), &mut die).unwrap();
    }

    fn folder(name: &str) -> tempfile::TempDir {
        tempfile::Builder::new().prefix(name).tempdir().unwrap()
    }

    #[test]
    fn whatever_ends_it_leaves_the_old_store_or_the_new_one() {
        for step in STEPS {
            let folder = folder("relet-restore");
            let (source, path) = (folder.path().join("copy.db"), folder.path().join("store.db"));
            make(&source, &["new"]);
            make(&path, &["old 1", "old 2"]);
            die_at(step, &source, &path);
            let wanted: &[&str] = if step == Step::Replaced { &["new"] } else { &["old 1", "old 2"] };
            assert_eq!(payloads(&path).unwrap(), wanted, "{step:?}");
            Store::restore(&source, &path).unwrap();
            assert_eq!(payloads(&path).unwrap(), ["new"], "{step:?}");
        }
    }

    /// Where there was none, there is none or the new one, under one name.
    #[test]
    fn whatever_ends_it_leaves_no_store_or_the_new_one() {
        for step in [Step::Copied, Step::Synced, Step::Replaced] {
            let folder = folder("relet-restore");
            let (source, path) = (folder.path().join("copy.db"), folder.path().join("store.db"));
            make(&source, &["new"]);
            die_at(step, &source, &path);
            match step {
                Step::Replaced => assert_eq!(payloads(&path).unwrap(), ["new"]),
                _ => assert!(!path.exists()),
            }
        }
    }

    /// A file that was replaced while its log lay there: at no step does the log lie beside the new file.
    #[test]
    fn no_log_ever_lies_beside_a_file_that_it_does_not_belong_to() {
        for step in STEPS {
            let folder = folder("relet-restore");
            let (source, path) = (folder.path().join("copy.db"), folder.path().join("store.db"));
            make(&source, &["new"]);
            make(&path, &["old"]);
            let other = folder.path().join("other.db");
            drop(Store::options().reserve(0).open(&other).unwrap());
            std::fs::rename(&other, &path).unwrap();
            let is_known = files::has_log_of_another(&path); // not where there are no attributes
            die_at(step, &source, &path);
            let found = payloads(&path);
            match step {
                Step::Replaced => assert_eq!(found.unwrap(), ["new"]),
                Step::Cleared => assert!(found.unwrap().is_empty() || !is_known),
                _ if is_known => assert!(found.unwrap_err().to_string().contains("log of another file")),
                _ => {}
            }
            Store::restore(&source, &path).unwrap();
            assert_eq!(payloads(&path).unwrap(), ["new"], "{step:?}");
        }
    }
}
