//! One database: how it is found, opened, laid out and migrated, and the pool of connections that read it.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use r2d2_sqlite::SqliteConnectionManager;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, MAIN_DB, OpenFlags};

use crate::clock::{Clock, Now, Stopwatch};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::random;
use crate::sql::{counters, gates, meta};

/// The version of schema.sql. A step to the next one is appended to [`migrate`].
pub(crate) const SCHEMA_VERSION: i64 = 1;

/// The first SQLite without the race between a WAL reset and a checkpoint (sqlite.org/wal.html, "the WAL-reset bug").
const SQLITE_NEEDED: i32 = 3_051_003;
const SQLITE_NEEDED_TEXT: &str = "3.51.3";

/// More than there are statements; the default of 16 would prepare most of them anew at every use.
const STATEMENTS: usize = 128;

/// Bytes that the write-ahead log keeps when it is begun again.
const WAL_KEPT: u32 = 16 << 20;

/// The device and inode of an open file: whether the path still leads to it.
pub(crate) type Identity = (u64, u64);

/// Refuses an SQLite that can corrupt files, unless that was allowed.
pub(crate) fn check_sqlite(options: &Options) -> Result<()> {
    if options.allow_old_sqlite {
        Ok(())
    } else {
        check_sqlite_version(rusqlite::version_number(), rusqlite::version())
    }
}

fn check_sqlite_version(number: i32, text: &str) -> Result<()> {
    if number >= SQLITE_NEEDED {
        return Ok(());
    }
    Err(Error::SqliteTooOld { found: text.to_owned(), needed: SQLITE_NEEDED_TEXT })
}

/// The absolute path of a database, so that it is the same file whatever the current folder becomes, and so that no name
/// (":memory:", "file:…") means anything but itself.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    let refuse = |detail: String| Error::Open { path: path.to_owned(), detail };
    if path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(refuse("the path contains a NUL byte".into()));
    }
    if let Ok(whole) = path.canonicalize() {
        if whole.is_dir() {
            return Err(refuse("it is a folder; name a file in it".into()));
        }
        return Ok(whole);
    }
    let name = path.file_name().ok_or_else(|| refuse("it names no file".into()))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder = folder.canonicalize().map_err(|error| refuse(format!("its folder cannot be opened: {error}")))?;
    Ok(folder.join(name))
}

/// A file that lies beside the database, under its name and a suffix.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes an empty file where there is none.
fn create(path: &Path, private: bool) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    if private {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    let _ = private;
    match options.open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            Err(Error::ReadOnly { path: path.to_owned(), detail: format!("the file cannot be created: {error}") })
        }
        Err(error) => Err(Error::Open { path: path.to_owned(), detail: error.to_string() }),
    }
}

/// What is the same for every connection: how it plans, and that the application's triggers are not ours.
fn configure(conn: &Connection) -> Result<()> {
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS);
    conn.execute_batch("PRAGMA temp_store = MEMORY")?;
    Ok(())
}

/// The connection that writes, on a file that is there.
pub(crate) fn connect(path: &Path, options: &Options) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, &error))?;
    // Until the file is known to be ours to write, closing it may not change a byte.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    conn.busy_timeout(Duration::ZERO)?;
    configure(&conn)?;
    conn.execute_batch(&format!(
        "PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = {WAL_KEPT}; PRAGMA cache_size = -8192"
    ))?;
    if let Some(bytes) = options.file_max {
        let page: u32 = conn.query_row("PRAGMA page_size", [], |row| row.get(0))?;
        conn.execute_batch(&format!(
            "PRAGMA max_page_count = {}",
            (bytes / u64::from(page)).clamp(1, u64::from(u32::MAX) - 1)
        ))?;
    }
    Ok(conn)
}

/// Lets the last connection that closes empty the log into the file, as SQLite does by default.
pub(crate) fn checkpoint_on_close(conn: &Connection, on: bool) -> Result<()> {
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, !on)?;
    Ok(())
}

/// An open store: the connection that writes, and what its tables say of it.
pub(crate) struct Opened {
    pub(crate) conn: Connection,
    pub(crate) boot: Boot,
    pub(crate) store_id: String,
    /// Whether relet made the file, so that it may be shrunk.
    pub(crate) owned: bool,
    /// Which file it is; `None` in memory.
    pub(crate) identity: Option<Identity>,
}

/// Opens a file for writing, creates and lays it out where it is new, migrates it where it is old.
pub(crate) fn open(path: &Path, options: &Options) -> Result<Opened> {
    check_sqlite(options)?;
    if !path.exists() {
        create(path, options.private)?;
    }
    check_writable(path)?;
    // Before the file is opened: if it is replaced in between, the first commit will find out.
    let identity = identity(path);
    let mut found = None;
    let opened = patiently(options.busy_wait, || {
        let conn = connect(path, options)?;
        if conn.is_readonly(MAIN_DB)? {
            return Err(Error::ReadOnly { path: path.to_owned(), detail: "it can be read only".into() });
        }
        check_version(&conn)?;
        found = Some(journal_mode(&conn)?);
        set_wal(&conn, path)?;
        found = None;
        let mut opened = lay_out(conn, &options.clock)?;
        opened.identity = identity;
        checkpoint_on_close(&opened.conn, options.checkpoints)?;
        Ok(opened)
    });
    opened.map_err(|error| match (error, found) {
        (Error::Busy { .. }, Some(mode)) if mode != "wal" => Error::NotWal { path: path.to_owned(), mode },
        (error, _) => cannot_write(path, error),
    })
}

/// Asks the system before SQLite does, which would leave a log and an index beside a file that it cannot write.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn check_writable(path: &Path) -> Result<()> {
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    for (place, what) in [(path, "the file"), (path.parent().unwrap_or(path), "its folder")] {
        if let Err(error) = accessat(CWD, place, Access::WRITE_OK, AtFlags::EACCESS) {
            let detail = format!("{what} cannot be written: {error}");
            return Err(Error::ReadOnly { path: path.to_owned(), detail });
        }
    }
    Ok(())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn check_writable(_: &Path) -> Result<()> {
    Ok(())
}

/// A store in memory: one connection, laid out.
pub(crate) fn open_in_memory(options: &Options) -> Result<Opened> {
    check_sqlite(options)?;
    let conn = Connection::open_in_memory()?;
    configure(&conn)?;
    lay_out(conn, &options.clock)
}

/// Runs `step` until it is not busy, for at most `wait`.
pub(crate) fn patiently<T>(wait: Duration, mut step: impl FnMut() -> Result<T>) -> Result<T> {
    let mut patience = Patience::new(wait);
    loop {
        match step() {
            Err(Error::Busy { .. }) => patience.pause()?,
            outcome => return outcome,
        }
    }
}

/// Runs a step in a transaction of its own, for whose lock it waits at most `wait`.
pub(crate) fn commit<T>(conn: &Connection, wait: Duration, step: impl FnOnce() -> Result<T>) -> Result<T> {
    patiently(wait, || Ok(conn.execute_batch("BEGIN IMMEDIATE")?))?;
    let outcome = step().and_then(|value| {
        conn.execute_batch("COMMIT")?;
        Ok(value)
    });
    if outcome.is_err() && !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
    outcome
}

/// Waiting for another process's lock: short pauses of random length, so that whoever waits gets a turn soon, whoever
/// else waits. (SQLite's own back-off grows to 100 ms and starves the one that has waited longest.)
pub(crate) struct Patience {
    watch: Stopwatch,
    limit: Duration,
}

/// The longest pause; whoever has the lock and knows of waiters leaves a gap as long as this.
pub(crate) const PAUSE_MAX: Duration = Duration::from_micros(250);

impl Patience {
    pub(crate) fn new(limit: Duration) -> Patience {
        Patience { watch: Stopwatch::start(), limit }
    }

    /// Pauses once; [`Error::Busy`] when the limit is reached.
    pub(crate) fn pause(&mut self) -> Result<()> {
        let waited = self.watch.elapsed();
        if waited >= self.limit {
            return Err(Error::Busy { waited });
        }
        let pause = Duration::from_micros(fastrand::u64(50..=PAUSE_MAX.as_micros() as u64));
        std::thread::sleep(pause.min(self.limit - waited));
        Ok(())
    }
}

/// Refuses a schema that is newer than this code. Reads only.
fn check_version(conn: &Connection) -> Result<Option<i64>> {
    if !meta::exists(conn)? {
        return Ok(None);
    }
    let found: i64 = meta::need(conn, "schema_version")?;
    if found > SCHEMA_VERSION {
        return Err(Error::SchemaTooNew { found, supported: SCHEMA_VERSION });
    }
    Ok(Some(found))
}

fn journal_mode(conn: &Connection) -> Result<String> {
    Ok(conn.query_row("PRAGMA journal_mode", [], |row| row.get(0))?)
}

fn set_wal(conn: &Connection, path: &Path) -> Result<()> {
    let mut found = journal_mode(conn)?;
    if found != "wal" {
        if meta::is_empty(conn)? {
            // Only an empty file can be told to give freed pages back.
            conn.execute_batch("PRAGMA auto_vacuum = INCREMENTAL")?;
        }
        found = conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    }
    if found == "wal" { Ok(()) } else { Err(Error::NotWal { path: path.to_owned(), mode: found }) }
}

/// Which boot of the machine the store has seen last, and what follows from it for claims.
#[derive(Debug, Clone)]
pub(crate) struct Boot {
    pub(crate) id: Arc<str>,
    pub(crate) epoch: i64,
    pub(crate) mark: i64,
}

/// One transaction: the schema, the boot, and one real write, so that a file that cannot be written is refused here.
fn lay_out(conn: Connection, clock: &Clock) -> Result<Opened> {
    conn.execute_batch("BEGIN IMMEDIATE")?;
    let laid_out = (|| {
        migrate(&conn)?;
        let boot = note_boot(&conn, clock)?;
        mend_waits(&conn, clock.now())?;
        meta::touch(&conn)?;
        let store_id = meta::need(&conn, "store_id")?;
        let owned = meta::get(&conn, "owned")?.unwrap_or(false);
        conn.execute_batch("COMMIT")?;
        Ok((boot, store_id, owned))
    })();
    if laid_out.is_err() && !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
    laid_out.map(|(boot, store_id, owned)| Opened { conn, boot, store_id, owned, identity: None })
}

/// Brings the schema to this code's version, inside a transaction: two processes that open at once both succeed.
fn migrate(conn: &Connection) -> Result<()> {
    if check_version(conn)?.is_some() {
        return Ok(()); // There is one version so far; the steps from one to the next will stand here.
    }
    let owned = meta::is_empty(conn)?;
    meta::create(conn)?;
    meta::set(conn, "schema_version", SCHEMA_VERSION)?;
    meta::set(conn, "store_id", random::name())?;
    meta::set(conn, "owned", owned)?;
    meta::set(conn, "touched", 0)
}

/// If the machine was restarted since the store was last written: a new epoch, and every claim of the boot before is void.
/// The commit that stores it must be a durable one, and come before the first claim of the new boot.
pub(crate) fn note_boot(conn: &Connection, clock: &Clock) -> Result<Boot> {
    let id = clock.boot();
    if meta::get::<String>(conn, "boot_id")?.as_deref() == Some(&*id) {
        let mark = meta::get(conn, "boot_mark")?.unwrap_or(0);
        return Ok(Boot { id, epoch: meta::need(conn, "epoch")?, mark });
    }
    let epoch = meta::get::<i64>(conn, "epoch")?.unwrap_or(0) + 1;
    let mark = counters::last_id(conn)?;
    meta::set(conn, "boot_id", &*id)?;
    meta::set(conn, "epoch", epoch)?;
    meta::set(conn, "boot_mark", mark)?;
    meta::void_all_claims(conn)?;
    gates::empty_all(conn, clock.now())?;
    Ok(Boot { id, epoch, mark })
}

/// After the wall clock was set back: no wait is longer than it was meant to be.
pub(crate) fn mend_waits(conn: &Connection, now: Now) -> Result<()> {
    meta::restart_waits(conn, now.wall)
}

/// The device and inode that a path leads to. `fs::metadata` opens nothing, so it drops none of SQLite's locks.
#[cfg(unix)]
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Not known here: on this platform an open file cannot be replaced.
#[cfg(not(unix))]
pub(crate) fn identity(_: &Path) -> Option<Identity> {
    Some((0, 0))
}

/// The connections that read. They are made when they are needed, and kept.
pub(crate) type Readers = r2d2::Pool<SqliteConnectionManager>;

/// Shortest wait for a reader, whatever the busy wait is: each is only held for a look.
const READER_WAIT_MIN: Duration = Duration::from_secs(5);

pub(crate) fn readers(path: &Path, options: &Options) -> Result<Readers> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let wait = options.busy_wait;
    let manager = SqliteConnectionManager::file(path).with_flags(flags).with_init(move |conn| {
        conn.busy_timeout(wait)?;
        configure(conn).map_err(|_| rusqlite::Error::InvalidQuery)
    });
    r2d2::Pool::builder()
        .max_size(options.readers)
        .min_idle(Some(0))
        .test_on_check_out(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .connection_timeout(options.busy_wait.max(READER_WAIT_MIN))
        .build(manager)
        .map_err(|error| Error::Pool { detail: error.to_string() })
}

/// A connection that only looks whether others have committed, and its first look.
pub(crate) fn watch(path: &Path) -> Result<(Connection, i64)> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags)?;
    let version = data_version(&conn)?;
    Ok((conn, version))
}

/// A number that changes whenever another connection has committed.
pub(crate) fn data_version(conn: &Connection) -> Result<i64> {
    Ok(conn.prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0))?)
}

/// Opens a store for looking only: an existing file with a schema that this code knows.
pub(crate) fn open_read_only(path: &Path, options: &Options) -> Result<Readers> {
    check_sqlite(options)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, &error))?;
    conn.busy_timeout(options.busy_wait)?;
    let refuse = |detail: String| Error::Open { path: path.to_owned(), detail };
    match check_version(&conn) {
        Ok(Some(_)) => readers(path, options),
        Ok(None) => Err(refuse(
            "it is no relet store yet; opened for writing it becomes one (`relet enqueue` does that)".into(),
        )),
        Err(Error::Sqlite(error))
            if matches!(error.sqlite_error_code(), Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly)) =>
        {
            Err(refuse(format!(
                "its log cannot be read or made ({error}): in a folder that cannot be written, a store can be looked at only while another process has it open"
            )))
        }
        Err(Error::Corrupt { detail }) => Err(refuse(detail)),
        Err(error) => Err(error),
    }
}

/// Makes a copy a store of its own: a token that the original or another copy issues from now on must not be worth anything
/// in it. So its epoch is not the next one, which the original may come to as well, but some later one.
pub(crate) fn make_own(copy: &Path) -> Result<()> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(copy, flags)?;
    conn.execute_batch("PRAGMA journal_mode = DELETE; PRAGMA synchronous = FULL; BEGIN IMMEDIATE")?;
    let later = i64::from(random::bits() as u32) + 2;
    meta::set(&conn, "epoch", meta::need::<i64>(&conn, "epoch")? + later)?;
    meta::set(&conn, "store_id", random::name())?;
    conn.execute_batch("COMMIT")?;
    Ok(())
}

fn cannot_open(path: &Path, error: &rusqlite::Error) -> Error {
    Error::Open { path: path.to_owned(), detail: error.to_string() }
}

/// Gives what SQLite says of a file or folder that cannot be written its own variant.
fn cannot_write(path: &Path, error: Error) -> Error {
    match &error {
        Error::Sqlite(inner)
            if matches!(
                inner.sqlite_error_code(),
                Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied)
            ) =>
        {
            Error::ReadOnly {
                path: path.to_owned(),
                detail: format!("the file, or the log beside it, cannot be written: {inner}"),
            }
        }
        Error::Corrupt { detail } => Error::Open { path: path.to_owned(), detail: detail.clone() },
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B55: the linked engine silently went back to a version that corrupts files.
    #[test]
    fn an_sqlite_with_the_wal_race_is_refused_and_the_linked_one_has_none() {
        for (number, text) in [(3_051_002, "3.51.2"), (3_050_004, "3.50.4"), (3_007_000, "3.7.0")] {
            let error = check_sqlite_version(number, text).unwrap_err();
            assert!(matches!(&error, Error::SqliteTooOld { found, .. } if found == text));
            assert!(error.to_string().contains("3.51.3"), "{error}");
        }
        assert!(check_sqlite_version(3_051_003, "3.51.3").is_ok());
        check_sqlite(&Options::default()).unwrap();
    }
}
