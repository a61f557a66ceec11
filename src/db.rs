//! One database: how it is found, opened, laid out and migrated, and the pool of connections that read it.

use std::path::Path;
use std::time::Duration;

use r2d2_sqlite::SqliteConnectionManager;
use rusqlite::config::DbConfig;
use rusqlite::ffi::SQLITE_BUSY_SNAPSHOT;
use rusqlite::{Connection, ErrorCode, MAIN_DB, OpenFlags};

use crate::boot::Boot;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::files::{self, Folder, Identity};
use crate::options::Options;
use crate::presence::{self, Others, Presence};
use crate::random;
use crate::reserve;
use crate::sql::{meta, workers};

/// The version of schema.sql. A step to the next one is appended to [`migrate`].
pub(crate) const SCHEMA_VERSION: i64 = 1;

/// The first SQLite without the race between a WAL reset and a checkpoint (sqlite.org/wal.html, "the WAL-reset bug").
const SQLITE_NEEDED: i32 = 3_051_003;
const SQLITE_NEEDED_TEXT: &str = "3.51.3";

/// More than there are statements; the default of 16 would prepare most of them anew at every use.
const STATEMENTS: usize = 128;

/// Bytes that the write-ahead log keeps when it is begun again.
const WAL_KEPT: u32 = 16 << 20;

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
    limit(&conn, options.file_max)?;
    Ok(conn)
}

/// Tells SQLite how large the file may get; `None` and 0 for no limit.
fn limit(conn: &Connection, bytes: Option<u64>) -> Result<()> {
    let Some(bytes) = bytes.filter(|bytes| *bytes > 0) else { return Ok(()) };
    let page: u32 = conn.query_row("PRAGMA page_size", [], |row| row.get(0))?;
    let pages = (bytes / u64::from(page)).clamp(1, u64::from(u32::MAX) - 1);
    Ok(conn.execute_batch(&format!("PRAGMA max_page_count = {pages}"))?)
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
    /// The options, and what the file says where they say nothing.
    pub(crate) options: Options,
    /// Whether relet made the file, so that it may be shrunk.
    pub(crate) owned: bool,
    /// Which file it is; `None` in memory.
    pub(crate) identity: Option<Identity>,
    /// Held for as long as it is open; `None` in memory.
    pub(crate) presence: Option<Presence>,
}

/// Opens a file for writing, creates and lays it out where it is new, migrates it where it is old.
pub(crate) fn open(path: &Path, options: &Options) -> Result<Opened> {
    check_sqlite(options)?;
    if !path.exists() {
        files::create(path, options.private)?;
    }
    files::check(path)?;
    files::check_writable(path)?;
    // Before the file is opened: if it is replaced in between, the first commit will find out.
    let identity = files::identity(path);
    let folder = Folder::new(path);
    let presence = Presence::new(folder.clone(), identity);
    let mut found = None;
    let opened = with_room(path, |made_room| {
        patiently(options.busy_wait, || {
            let conn = connect(path, options)?;
            if conn.is_readonly(MAIN_DB)? {
                return Err(Error::ReadOnly { path: path.to_owned(), detail: "it can be read only".into() });
            }
            let known = check_version(&conn)?.is_some();
            if made_room && known {
                // The log goes into the file, and what it took is free.
                conn.query_row("PRAGMA main.wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
            }
            found = Some(journal_mode(&conn)?);
            set_wal(&conn, path)?;
            found = None;
            let others = |conn: &Connection, and_workers: bool| match presence.others()? {
                Others::Nobody if and_workers && presence::any_alive(&folder, &workers::all(conn)?) => {
                    Ok(Others::Present)
                }
                others => Ok(others),
            };
            let mut opened = lay_out(conn, options, Some(path), identity, others, || presence.join())?;
            opened.identity = identity;
            checkpoint_on_close(&opened.conn, options.checkpoints)?;
            Ok(opened)
        })
    });
    let opened = opened.map(|opened| Opened { presence: Some(presence), ..opened });
    opened.map_err(|error| match (error, found) {
        (Error::Busy { .. }, Some(mode)) if mode != "wal" => Error::NotWal { path: path.to_owned(), mode },
        (error, _) => cannot_write(path, error),
    })
}

/// Opens, and where the disk is full gives the reserve up and opens again.
fn with_room<T>(path: &Path, mut open: impl FnMut(bool) -> Result<T>) -> Result<T> {
    match open(false) {
        Err(error) if reserve::ran_out(&error, path) => {}
        outcome => return outcome,
    }
    reserve::give_up(path);
    match open(true) {
        Err(error) if reserve::ran_out(&error, path) => Err(reserve::full(path)),
        outcome => outcome,
    }
}

/// A store in memory: one connection, laid out.
pub(crate) fn open_in_memory(options: &Options) -> Result<Opened> {
    check_sqlite(options)?;
    let conn = Connection::open_in_memory()?;
    configure(&conn)?;
    lay_out(conn, options, None, None, |_, _| Ok(Others::Nobody), || Ok(()))
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

/// The write lock, if nobody has it.
///
/// SQLite looks at the file first, and then takes the lock; whoever has committed in between makes it give up, with the lock in its
/// hand. Then the lock is free, and it is tried again at once: after a pause it would be the same, beside somebody who commits often.
pub(crate) fn begin(conn: &Connection) -> rusqlite::Result<()> {
    const AT_ONCE: usize = 8;
    let begin = || conn.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([]));
    for _ in 0..AT_ONCE {
        match begin() {
            Err(error) if error.sqlite_error().is_some_and(|error| error.extended_code == SQLITE_BUSY_SNAPSHOT) => {}
            outcome => return outcome.map(drop),
        }
    }
    begin().map(drop)
}

/// Runs a step in a transaction of its own, for whose lock it waits at most `wait`.
pub(crate) fn commit<T>(conn: &Connection, wait: Duration, step: impl FnOnce() -> Result<T>) -> Result<T> {
    patiently(wait, || Ok(begin(conn)?))?;
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

/// The longest pause at first; whoever has the lock and knows of waiters leaves a gap as long as this.
pub(crate) const PAUSE_MAX: Duration = Duration::from_micros(250);
/// Later it is this part of what was waited, …
const PAUSE_PART: u32 = 16;
/// … and this at most.
const PAUSE_LATE: Duration = Duration::from_millis(5);

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
        // Fifty who try each 100 microseconds leave no processor to the one who has the lock.
        let most = (waited / PAUSE_PART).clamp(PAUSE_MAX, PAUSE_LATE);
        let pause = Duration::from_micros(fastrand::u64(50..=most.as_micros() as u64));
        std::thread::sleep(pause.min(self.limit - waited));
        Ok(())
    }
}

/// Refuses a schema that is newer than this code. Reads only.
pub(crate) fn check_version(conn: &Connection) -> Result<Option<i64>> {
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

/// One transaction: the schema, the boot, and one real write, so that a file that cannot be written is refused here. Whoever has found
/// out who `others` there are joins them before it ends.
fn lay_out(
    conn: Connection,
    options: &Options,
    path: Option<&Path>,
    identity: Option<Identity>,
    others: impl Fn(&Connection, bool) -> Result<Others>,
    join: impl FnOnce() -> Result<()>,
) -> Result<Opened> {
    let clock = &options.clock;
    // To open it anew for each try would be the longer way.
    patiently(options.busy_wait, || Ok(begin(&conn)?))?;
    let laid_out = (|| {
        migrate(&conn)?;
        let copied = is_a_copy(&conn, path, identity)? && others(&conn, false)? != Others::Present;
        if copied {
            make_own(&conn)?;
        }
        let boot = Boot::note(&conn, clock, || others(&conn, true))?;
        if let Some((device, inode)) = identity
            && (copied || meta::get::<String>(&conn, "file")?.is_none())
        {
            meta::set(&conn, "file", format!("{device}:{inode}"))?;
        }
        let opening = random::name();
        meta::set(&conn, "opening", &*opening)?;
        join()?;
        if let Some(path) = path {
            files::set_note(path, files::OPENING, &opening);
            files::tie_log(path);
        }
        meta::touch(&conn)?;
        let store_id = meta::need(&conn, "store_id")?;
        let owned = meta::get(&conn, "owned")?.unwrap_or(false);
        let options = settle_options(&conn, options, path)?;
        conn.execute_batch("COMMIT")?;
        limit(&conn, options.file_max)?;
        Ok((boot, store_id, owned, options))
    })();
    if laid_out.is_err() && !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
    laid_out.map(|(boot, store_id, owned, options)| Opened {
        conn,
        boot,
        store_id,
        options,
        owned,
        identity: None,
        presence: None,
    })
}

/// Whether this file was copied, or restored, since it was last open: it is another file than the one that it says it is, or it is
/// the same one with other contents, which do not know of its last opening.
fn is_a_copy(conn: &Connection, path: Option<&Path>, identity: Option<Identity>) -> Result<bool> {
    let Some((device, inode)) = identity else { return Ok(false) };
    if meta::get::<String>(conn, "file")?.is_some_and(|file| file != format!("{device}:{inode}")) {
        return Ok(true);
    }
    let opening: Option<String> = meta::get(conn, "opening")?;
    let witness = path.and_then(|path| files::note(path, files::OPENING));
    Ok(witness.is_some() && opening.is_some() && witness != opening)
}

/// What is the file's own is stored in it when it is set, and holds for whoever opens it without setting it.
fn settle_options(conn: &Connection, options: &Options, path: Option<&Path>) -> Result<Options> {
    let kept = |key, given: Option<u64>| {
        let found = meta::get::<i64>(conn, key)?.and_then(|found| u64::try_from(found).ok());
        if let Some(given) = given.filter(|given| found != Some(*given)) {
            meta::set(conn, key, i64::try_from(given).unwrap_or(i64::MAX))?;
        }
        Ok::<_, Error>(given.or(found))
    };
    let reserve = match (kept("reserve", options.reserve)?, path) {
        (None, Some(path)) => kept("reserve", Some(reserve::fitting(path)))?,
        (reserve, _) => reserve,
    };
    Ok(Options { reserve, file_max: kept("file_max", options.file_max)?, ..options.clone() })
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

/// A reader of its own, for a look that may take long.
pub(crate) fn reader(path: &Path, options: &Options) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, &error))?;
    conn.busy_timeout(options.busy_wait)?;
    configure(&conn)?;
    Ok(conn)
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
    with_room(path, |_| look_only(path, options))
}

fn look_only(path: &Path, options: &Options) -> Result<Readers> {
    files::check(path)?;
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
        Err(Error::Corrupt { detail }) => Err(refuse(files::and_its_log(path, detail))),
        Err(error) => Err(error),
    }
}

/// Makes a copy a store of its own: a token that the original or another copy issues from now on must not be worth anything
/// in it. So its epoch is not the next one, which the original may come to as well, but some later one.
fn make_own(conn: &Connection) -> Result<()> {
    // A file that was just made has none yet.
    if let Some(epoch) = meta::get::<i64>(conn, "epoch")? {
        let epoch = epoch.saturating_add(i64::from(random::bits() as u32) + 2);
        meta::set(conn, "epoch", epoch)?;
        meta::set(conn, "epoch_floor", epoch)?;
        meta::set(conn, "store_id", random::name())?;
        meta::void_all_claims(conn)?;
    }
    Ok(())
}

/// As the copy's first open would do; so that it is done also where that never comes.
pub(crate) fn make_backup_own(copy: &Path) -> Result<()> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(copy, flags)?;
    conn.execute_batch("PRAGMA journal_mode = DELETE; PRAGMA synchronous = FULL; BEGIN IMMEDIATE")?;
    make_own(&conn)?;
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
        Error::Corrupt { detail } => {
            Error::Open { path: path.to_owned(), detail: files::and_its_log(path, detail.clone()) }
        }
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
