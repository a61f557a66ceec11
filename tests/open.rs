//! Opening a store succeeds or says why not, with a typed error; whatever else is in the file, or beside it, stays as it is.

mod support;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

use relet::rusqlite::{self, Connection};
use relet::{Error, Filter, LEASE_RANGE, PAYLOAD_MAX_LIMIT, Status, Store};
use support::{Child, Dir, beside, chmod, mode, names, number, part, plain, rows, text, timed};

/// A store with these messages, closed again.
fn stored(path: &Path, payloads: &[&str]) {
    Store::open(path).unwrap().queue("mail").enqueue_all(payloads.iter().copied()).unwrap();
}

/// The payloads of a store, in order.
fn payloads(store: &Store) -> Vec<String> {
    let all = store.list(&Filter::new().payload(true)).unwrap();
    all.into_iter().map(|message| String::from_utf8(message.payload.unwrap()).unwrap()).collect()
}

/// What lies in a folder, without the room that stores set aside.
fn stores(folder: &Path) -> Vec<OsString> {
    names(folder).into_iter().filter(|name| !name.as_bytes().ends_with(b"-relet-reserve")).collect()
}

// Names.

#[test]
fn any_legal_file_name_is_a_name_and_nothing_else() {
    let long = "x".repeat(240);
    let named = [
        "plain.db",
        "with space.db",
        " leading and trailing ",
        "a#b.db",
        "a?mode=memory&cache=shared",
        "50%.db",
        "%41%00.db",
        "für-日本-🦀.db",
        ":memory:",
        "file:x",
        "file::memory:?cache=shared",
        "file:nowhere?mode=ro",
        "-d",
        "quote'\".db",
        "semi;colon",
        "back\\slash",
        "new\nline",
        "..dots..",
        long.as_str(),
    ];
    let not_unicode = OsStr::from_bytes(b"latin1-\xe9.db");
    for name in named.iter().map(OsStr::new).chain([not_unicode]) {
        let dir = Dir::new("names");
        let path = dir.join(name);
        let store = Store::open(&path).unwrap_or_else(|error| panic!("{name:?}: {error}"));
        assert_eq!(store.path(), Some(&*path));
        store.queue("mail").enqueue("hello").unwrap();
        assert_eq!(payloads(&store), ["hello"], "{name:?}");
        let expected = ["", "-relet-reserve", "-relet-workers", "-shm", "-wal"]
            .map(|suffix| beside(Path::new(name), suffix).into());
        for found in names(dir.path()) {
            assert!(expected.contains(&found), "{name:?}: {found:?}");
        }
        assert_eq!(payloads(&Store::open_read_only(&path).unwrap()), ["hello"], "{name:?}");
        drop(store);
        assert_eq!(stores(dir.path()), [name], "closed, the file has no log beside it");
        assert_eq!(payloads(&Store::open(&path).unwrap()), ["hello"], "{name:?}");
    }
}

#[test]
fn a_link_leads_to_the_same_store() {
    let dir = Dir::new("link");
    let store = Store::open(dir.join("real.db")).unwrap();
    std::os::unix::fs::symlink("real.db", dir.join("link.db")).unwrap();
    let linked = Store::open(dir.join("link.db")).unwrap();
    assert_eq!(linked.path(), store.path());
    linked.queue("mail").enqueue("hello").unwrap();
    assert_eq!(payloads(&store), ["hello"]);
}

#[test]
fn a_relative_path_is_the_same_file_wherever_the_program_goes() {
    let dir = Dir::new("relative");
    dir.folder("elsewhere");
    let said = Child::start("role_changes_its_folder", &[dir.path().to_str().unwrap()]).finish();
    assert_eq!(said, ["done"]);
    assert_eq!(stores(dir.path()), [":memory:", "elsewhere", "file:x", "rel.db"]);
    assert_eq!(names(&dir.join("elsewhere")).len(), 0);
    for name in [":memory:", "file:x", "rel.db"] {
        assert_eq!(payloads(&Store::open(dir.join(name)).unwrap()), ["before", "after"], "{name}");
    }
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_changes_its_folder() {
    let Some(part) = part("role_changes_its_folder") else { return };
    std::env::set_current_dir(part.path()).unwrap();
    let stores = ["rel.db", ":memory:", "file:x"].map(|name| Store::open(name).unwrap());
    for store in &stores {
        store.queue("mail").enqueue("before").unwrap();
    }
    std::env::set_current_dir("elsewhere").unwrap();
    for store in &stores {
        store.queue("mail").enqueue("after").unwrap();
        assert_eq!(payloads(store), ["before", "after"]);
        assert!(store.stats().unwrap().file_bytes > 0);
        assert!(store.checkpoint().unwrap());
    }
    part.say("done");
}

// What cannot be opened.

/// It is `Error::Open`, names the path that was given, and says something.
#[track_caller]
fn cannot_open(outcome: relet::Result<Store>, given: &Path) {
    match outcome {
        Err(Error::Open { path, detail }) => {
            assert_eq!(path, given);
            assert!(!detail.is_empty());
        }
        other => panic!("{given:?}: {other:?}"),
    }
}

#[test]
fn what_is_no_file_is_refused_with_its_path() {
    let dir = Dir::new("refused");
    let folder = dir.folder("folder");
    std::fs::write(dir.join("file"), "x").unwrap();
    let before = names(dir.path());
    let mut nul = dir.path().as_os_str().as_bytes().to_vec();
    nul.extend(b"/a\0b");
    let paths = [
        folder,
        dir.path().join("folder/"),
        dir.path().join("folder/.."),
        dir.join("missing/store.db"),
        dir.join("file/store.db"),
        PathBuf::from(OsStr::from_bytes(&nul)),
        PathBuf::from(""),
        PathBuf::from("."),
        PathBuf::from("/"),
    ];
    for path in &paths {
        cannot_open(Store::open(path), path);
        cannot_open(Store::open_read_only(path), path);
    }
    assert_eq!(names(dir.path()), before);
}

/// A file that is something else is named, and stays as it is.
#[test]
fn what_is_no_database_is_refused_with_its_path_and_not_changed() {
    let noise: Vec<u8> = (0..20_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for content in [b"hello".as_slice(), &noise, b"SQLite format 2\0 and then something else"] {
        let dir = Dir::new("no-database");
        let path = dir.join("notes.txt");
        std::fs::write(&path, content).unwrap();
        for outcome in [Store::open(&path), Store::open_read_only(&path)] {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::Open { .. } | Error::Corrupt { .. }), "{error:?}");
            assert!(error.to_string().contains("notes.txt"), "the error does not name the file: {error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), content);
        assert_eq!(names(dir.path()), ["notes.txt"]);
    }
}

#[test]
fn a_look_at_what_is_no_store_is_refused_and_creates_nothing() {
    let dir = Dir::new("look");
    let missing = dir.join("missing.db");
    cannot_open(Store::open_read_only(&missing), &missing);
    assert_eq!(names(dir.path()).len(), 0);

    let empty = dir.join("empty.db");
    std::fs::write(&empty, "").unwrap();
    cannot_open(Store::open_read_only(&empty), &empty);
    assert_eq!(std::fs::metadata(&empty).unwrap().len(), 0);

    let app = dir.join("app.db");
    plain(&app).execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY)").unwrap();
    let bytes = std::fs::read(&app).unwrap();
    cannot_open(Store::open_read_only(&app), &app);
    assert_eq!(std::fs::read(&app).unwrap(), bytes);
}

/// "For looking only" holds for every call, also for those that write by a connection of the application's.
#[test]
fn a_look_shows_everything_and_changes_nothing() {
    let dir = Dir::new("look-only");
    let path = dir.join("store.db");
    stored(&path, &["a", "b"]);
    let store = Store::open(&path).unwrap();
    let worker = store.worker("w").unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    let conn = plain(&path);
    let before = rows(&conn, "SELECT * FROM relet_messages");

    let look = Store::open_read_only(&path).unwrap();
    assert_eq!(look.stats().unwrap().queues[0].count(Status::Processing), 1);
    assert_eq!(look.show(claim.id()).unwrap().unwrap().worker.as_deref(), Some("w"));
    assert!(look.why(claim.id()).unwrap().is_some());
    assert_eq!(look.stuck(Duration::ZERO).unwrap(), []);
    assert_eq!(look.doctor().unwrap(), Vec::<String>::new());
    assert_eq!(look.retry_queue(None, 10).unwrap(), []);

    #[track_caller]
    fn read_only(outcome: Result<(), Error>) {
        assert!(matches!(outcome, Err(Error::ReadOnly { .. })), "{outcome:?}");
    }
    let mail = look.queue("mail");
    read_only(mail.enqueue("c").map(drop));
    read_only(mail.enqueue_all(["c"]).map(drop));
    read_only(mail.set_defaults(relet::QueueDefaults::new()));
    read_only(look.worker("w").map(drop));
    read_only(look.detached("x").and_then(|worker| worker.claim("mail")).map(drop));
    read_only(look.ack(claim.receipt()).map(drop));
    read_only(look.cancel(claim.id()));
    read_only(look.redrive(claim.id()));
    read_only(look.redrive_all(None).map(drop));
    read_only(look.purge_dead(Duration::ZERO).map(drop));
    read_only(look.prune().map(drop));
    read_only(look.checkpoint().map(drop));
    assert_eq!(rows(&conn, "SELECT * FROM relet_messages"), before);

    let mut app = plain(&path);
    let tx = app.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
    read_only(mail.enqueue_in(&tx, "c").map(drop));
    read_only(look.ack_in(&tx, claim.receipt()));
    tx.commit().unwrap();
    assert_eq!(rows(&conn, "SELECT * FROM relet_messages"), before);
    claim.ack().unwrap();
}

/// B53: a read-only file opened without a word, and every change after that was lost with a warning.
#[test]
fn what_cannot_be_written_is_refused_at_open_and_nothing_is_created() {
    let dir = Dir::new("read-only");
    // A folder that cannot be written can still be seen into.
    let cases = [("file", 0o777, 0o444), ("folder", 0o555, 0o666), ("both", 0o555, 0o444)];
    for (case, folder_mode, file_mode) in cases {
        for kind in ["store", "app", "empty"] {
            let folder = dir.folder(&format!("{case}-{kind}"));
            let path = folder.join("the.db");
            match kind {
                "store" => stored(&path, &["a", "b", "c"]),
                "app" => plain(&path).execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY)").unwrap(),
                _ => std::fs::write(&path, "").unwrap(),
            }
            chmod(&path, file_mode);
            chmod(&folder, folder_mode);
        }
    }
    let nothing = dir.folder("nothing");
    chmod(&nothing, 0o555);
    let unreadable = dir.folder("unreadable").join("the.db");
    stored(&unreadable, &["a"]);
    chmod(&unreadable, 0o000);

    let mut child = Child::start_as_nobody("role_may_not_write", &[dir.path().to_str().unwrap()], &dir);
    let mut seen = Vec::new();
    while let Some(line) = child.hear() {
        seen.push(line);
    }
    child.finish();
    let expected: Vec<_> = cases
        .iter()
        .flat_map(|(case, ..)| ["store", "app", "empty"].map(|kind| format!("{case}-{kind}: refused")))
        .chain(["nothing: refused".into(), "unreadable: refused".into()])
        .collect();
    assert_eq!(seen, expected);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_may_not_write() {
    let Some(part) = part("role_may_not_write") else { return };
    let mut folders: Vec<_> = ["file", "folder", "both"]
        .iter()
        .flat_map(|case| ["store", "app", "empty"].map(|kind| format!("{case}-{kind}")))
        .collect();
    folders.extend(["nothing".into(), "unreadable".into()]);
    for folder in folders {
        let path = part.path().join(&folder).join("the.db");
        let before = names(path.parent().unwrap());
        let bytes = std::fs::read(&path).ok();
        let mut verdict = match Store::open(&path) {
            Err(Error::ReadOnly { path: named, detail }) if named == path && !detail.is_empty() => "refused".to_owned(),
            // One that may not even be read.
            Err(Error::Open { path: named, .. }) if folder == "unreadable" && named == path => "refused".to_owned(),
            other => format!("{other:?}"),
        };
        if names(path.parent().unwrap()) != before {
            verdict.push_str(", but files were created");
        }
        if std::fs::read(&path).ok() != bytes {
            verdict.push_str(", but the file was changed");
        }
        // A look shows all, or says why it cannot.
        match Store::open_read_only(&path) {
            Ok(look) if folder.ends_with("-store") && payloads(&look) == ["a", "b", "c"] => {}
            Err(Error::Open { path: named, detail } | Error::ReadOnly { path: named, detail })
                if named == path && !detail.is_empty() => {}
            other => verdict.push_str(&format!("; a look: {other:?}")),
        }
        part.say(format!("{folder}: {verdict}"));
        assert_eq!(path.exists(), before.contains(&OsString::from("the.db")));
    }
}

/// A store in use can be looked at by whoever may read it, with what is still in its log.
#[test]
fn a_store_in_use_can_be_looked_at_in_a_folder_that_cannot_be_written() {
    let dir = Dir::new("look-in-use");
    let folder = dir.folder("folder");
    let path = folder.join("the.db");
    let store = Store::options().private(false).checkpoints(false).open(&path).unwrap();
    store.queue("mail").enqueue_all(["a", "b"]).unwrap();
    for suffix in ["", "-wal", "-shm"] {
        chmod(&beside(&path, suffix), 0o644);
    }
    chmod(&folder, 0o555);
    let child = Child::start_as_nobody("role_looks", &[path.to_str().unwrap()], &dir);
    assert_eq!(child.finish(), ["a,b"]);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_looks() {
    let Some(part) = part("role_looks") else { return };
    let look = Store::open_read_only(part.path()).unwrap();
    part.say(payloads(&look).join(","));
    assert!(matches!(look.queue("mail").enqueue("c"), Err(Error::ReadOnly { .. })));
}

// What is there before, and after.

#[test]
fn a_new_file_is_for_its_owner_only_unless_told_otherwise() {
    let dir = Dir::new("mode");
    let store = Store::open(dir.join("private.db")).unwrap();
    store.queue("mail").enqueue("hello").unwrap();
    store.backup(dir.join("copy.db")).unwrap();
    for name in ["private.db", "private.db-wal", "private.db-shm", "copy.db"] {
        assert_eq!(mode(&dir.join(name)), 0o600, "{name}");
    }
    std::fs::write(dir.join("by-umask"), "").unwrap();
    let store = Store::options().private(false).open(dir.join("shared.db")).unwrap();
    store.queue("mail").enqueue("hello").unwrap();
    for name in ["shared.db", "shared.db-wal"] {
        assert_eq!(mode(&dir.join(name)), mode(&dir.join("by-umask")), "{name}");
    }
    // One that is there already keeps its own.
    let theirs = dir.join("theirs.db");
    std::fs::write(&theirs, "").unwrap();
    chmod(&theirs, 0o640);
    let store = Store::open(&theirs).unwrap();
    store.queue("mail").enqueue("hello").unwrap();
    assert_eq!((mode(&theirs), mode(&beside(&theirs, "-wal"))), (0o640, 0o640));
}

#[test]
fn the_linked_sqlite_has_no_wal_reset_race() {
    assert!(rusqlite::version_number() >= 3_051_003, "{}", rusqlite::version());
    Store::options().allow_old_sqlite(true).open_in_memory().unwrap();
}

const PRAGMAS: [&str; 6] = ["user_version", "application_id", "auto_vacuum", "page_size", "encoding", "freelist_count"];

fn pragmas(conn: &Connection) -> Vec<String> {
    PRAGMAS.iter().flat_map(|name| rows(conn, &format!("PRAGMA {name}"))).collect()
}

/// Its settings, and everything in it that is not relet's.
fn of_the_app(conn: &Connection) -> (Vec<String>, Vec<String>, Vec<String>) {
    let schema = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE tbl_name NOT LIKE 'relet%' ORDER BY name";
    (pragmas(conn), rows(conn, schema), rows(conn, "SELECT * FROM orders"))
}

#[test]
fn an_application_s_database_is_joined_and_nothing_of_it_is_touched() {
    for vacuum in [0, 1, 2] {
        for more in ["", "PRAGMA encoding = 'UTF-16le'; PRAGMA page_size = 512;", "PRAGMA journal_mode = WAL;"] {
            let dir = Dir::new("app");
            let path = dir.join("app.db");
            let app = plain(&path);
            app.execute_batch(&format!(
                "PRAGMA auto_vacuum = {vacuum}; {more}
                 PRAGMA user_version = 7; PRAGMA application_id = 4242;
                 CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT);
                 CREATE INDEX orders_note ON orders (note);
                 CREATE VIEW noted AS SELECT note FROM orders;
                 CREATE TABLE old (x);
                 INSERT INTO orders (note) VALUES ('für'), (NULL);
                 INSERT INTO old WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 2000)
                   SELECT hex(randomblob(400)) FROM n;
                 DROP TABLE old;"
            ))
            .unwrap();
            let before = of_the_app(&app);
            let pages = number(&app, "PRAGMA page_count");

            let store = Store::open(&path).unwrap();
            let worker = store.worker("für").unwrap();
            store.queue("mäil").enqueue_all(["a", "b", "c"]).unwrap();
            while let Some(claim) = worker.claim("mäil").unwrap() {
                claim.ack().unwrap();
            }
            store.prune().unwrap();
            let after = of_the_app(&app);
            assert_eq!((&before.1, &before.2), (&after.1, &after.2));
            assert_eq!(before.0[..5], after.0[..5], "{PRAGMAS:?}");
            // Its free pages are used, and stay its own. (With auto_vacuum = FULL every commit of its own frees them.)
            let same_size = || vacuum == 1 || number(&app, "PRAGMA page_count") == pages;
            assert!(same_size());
            assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
            drop((worker, store));
            assert_eq!(of_the_app(&app).0[..5], before.0[..5], "{PRAGMAS:?}");
            assert!(same_size());
        }
    }
}

#[test]
fn a_name_that_the_application_has_taken_is_an_error_and_its_table_stays() {
    let dir = Dir::new("taken");
    let path = dir.join("app.db");
    let app = plain(&path);
    app.execute_batch("CREATE TABLE relet_messages (mine); INSERT INTO relet_messages VALUES ('precious')").unwrap();
    let schema = rows(&app, "SELECT * FROM sqlite_schema");
    assert!(Store::open(&path).is_err());
    assert_eq!(rows(&app, "SELECT * FROM sqlite_schema"), schema);
    assert_eq!(rows(&app, "SELECT * FROM relet_messages").len(), 1);
}

#[test]
fn an_application_s_triggers_do_not_fire_on_relet_s_tables() {
    let dir = Dir::new("triggers");
    let path = dir.join("app.db");
    let store = Store::open(&path).unwrap();
    let app = plain(&path);
    app.execute_batch("CREATE TABLE log (what)").unwrap();
    let tables = [
        "relet_messages",
        "relet_details",
        "relet_queues",
        "relet_counters",
        "relet_retry_queue",
        "relet_workers",
        "relet_meta",
        "relet_payloads",
    ];
    for table in tables {
        for event in ["INSERT", "UPDATE", "DELETE"] {
            app.execute_batch(&format!(
                "CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN INSERT INTO log VALUES ('{table} {event}'); END;
                 CREATE TRIGGER {table}_{event}_stop BEFORE {event} ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END"
            ))
            .unwrap();
        }
    }
    for store in [store, Store::open(&path).unwrap()] {
        let worker = store.worker("w").unwrap();
        store.queue("mail").enqueue_all(vec!["x".repeat(9000); 3]).unwrap();
        worker.claim("mail").unwrap().unwrap().defer(Duration::ZERO).unwrap();
        worker.claim("mail").unwrap().unwrap().ack().unwrap();
        worker.claim("mail").unwrap().unwrap().fail("no").unwrap();
        worker.claim("mail").unwrap().unwrap().reject("no").unwrap();
        store.purge_dead(Duration::ZERO).unwrap();
    }
    assert_eq!(number(&app, "SELECT count(*) FROM log"), 0);
}

/// A file that was deleted or replaced went on answering Ok, and the messages were gone.
#[test]
fn a_file_that_was_deleted_is_noticed_and_nothing_is_acknowledged() {
    let dir = Dir::new("deleted");
    let path = dir.join("store.db");
    let store = Store::open(&path).unwrap();
    let mail = store.queue("mail");
    mail.enqueue_all(["a", "b"]).unwrap();
    let worker = store.worker("w").unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    std::fs::rename(&path, dir.join("moved.db")).unwrap();
    std::fs::rename(beside(&path, "-wal"), dir.join("moved.db-wal")).unwrap();

    refuses_everything(&store, &path, &claim, &worker);
    assert!(!path.exists(), "no new file is made in its place");
    drop((claim, worker, mail, store));
    assert_eq!(payloads(&Store::open(dir.join("moved.db")).unwrap()), ["a", "b"]);
}

#[test]
fn a_file_that_was_replaced_is_noticed_and_the_new_one_is_left_alone() {
    let dir = Dir::new("replaced");
    let path = dir.join("store.db");
    let store = Store::open(&path).unwrap();
    store.queue("mail").enqueue_all(["a", "b"]).unwrap();
    let worker = store.worker("w").unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    assert!(store.checkpoint().unwrap());
    for suffix in ["", "-wal", "-shm"] {
        std::fs::remove_file(beside(&path, suffix)).unwrap();
    }
    // Another store has come to be there, and is in use: what it has stored is in its log only.
    let other = Store::options().checkpoints(false).open(&path).unwrap();
    other.queue("mail").enqueue_all(["c", "d"]).unwrap();

    refuses_everything(&store, &path, &claim, &worker);
    drop((claim, worker, store));
    assert_eq!(payloads(&other), ["c", "d"]);
    assert!(beside(&path, "-wal").exists(), "closing the old store has taken away the log of the new one");
    assert_eq!(payloads(&Store::open(&path).unwrap()), ["c", "d"]);
    assert_eq!(other.doctor().unwrap(), Vec::<String>::new());
}

fn refuses_everything(store: &Store, path: &Path, claim: &relet::Claim, worker: &relet::Worker) {
    #[track_caller]
    fn replaced(outcome: Result<(), Error>) {
        assert!(matches!(outcome, Err(Error::FileReplaced { .. })), "{outcome:?}");
    }
    let mail = store.queue("mail");
    replaced(mail.enqueue("lost").map(drop));
    replaced(mail.enqueue_all(["lost", "lost"]).map(drop));
    replaced(worker.claim("mail").map(drop));
    replaced(worker.claim_id(1).map(drop));
    replaced(claim.ack().map(drop));
    replaced(claim.extend(Duration::from_secs(60)));
    replaced(store.cancel(2));
    replaced(store.worker("another").map(drop));
    replaced(store.stats().map(drop));
    replaced(store.list(&Filter::new()).map(drop));
    replaced(store.backup(path.with_extension("copy")));
}

/// The log of a file that is not there any more cannot be moved into it.
#[test]
fn a_checkpoint_into_a_file_that_was_deleted_is_not_reported_as_done() {
    let dir = Dir::new("checkpoint");
    let path = dir.join("store.db");
    let store = Store::open(&path).unwrap();
    store.queue("mail").enqueue("a").unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(store.checkpoint(), Err(Error::FileReplaced { .. })));
}

// Options.

#[test]
fn options_out_of_range_are_refused_before_anything_is_made() {
    let dir = Dir::new("options");
    let options = Store::options;
    let longest = *LEASE_RANGE.end();
    let refused = [
        options().readers(0),
        options().readers(65),
        options().lease(Duration::ZERO),
        options().lease(Duration::from_nanos(999_999)),
        options().lease(longest + Duration::from_millis(1)),
        options().lease(Duration::MAX),
        options().max_attempts(0),
        options().max_attempts(u32::MAX),
        options().payload_max(PAYLOAD_MAX_LIMIT + 1),
        options().payload_max(usize::MAX),
    ];
    for options in refused {
        for outcome in [
            options.clone().open(dir.join("store.db")),
            options.clone().open_in_memory(),
            options.clone().open_read_only(dir.join("store.db")),
        ] {
            assert!(matches!(outcome, Err(Error::Range { .. })), "{options:?}: {outcome:?}");
        }
    }
    assert_eq!(names(dir.path()).len(), 0);
}

/// Whatever is accepted works; nothing overflows.
#[test]
fn options_at_their_ends_work() {
    let ends = [
        Store::options().readers(1).max_attempts(1).payload_max(5).lease(*LEASE_RANGE.start()),
        Store::options()
            .readers(64)
            .max_attempts(i32::MAX as u32)
            .payload_max(PAYLOAD_MAX_LIMIT)
            .lease(*LEASE_RANGE.end()),
        Store::options().busy_wait(Duration::ZERO),
        Store::options().retention(Duration::MAX).stuck_after(Duration::MAX),
        Store::options().retention(Duration::ZERO).stuck_after(Duration::ZERO),
        Store::options()
            .retry(relet::Retry::exponential(Duration::MAX, Duration::MAX).factor(f64::NAN).jitter(f64::NAN)),
    ];
    for options in ends {
        works(options);
    }
}

/// "As long as it takes" is a thing that people ask for.
#[test]
fn a_busy_wait_without_end_is_refused_or_works() {
    for wait in [Duration::from_secs(30 * 86_400), Duration::from_secs(u64::MAX / 1000), Duration::MAX] {
        let options = Store::options().busy_wait(wait);
        if let Err(Error::Range { .. }) = options.clone().open_in_memory() {
            continue;
        }
        let (done, worked) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            works(options);
            done.send(()).unwrap();
        });
        worked.recv_timeout(Duration::from_secs(5)).expect("it panicked, or waits for ever");
    }
}

fn works(options: relet::Options) {
    let dir = Dir::new("ends");
    let path = dir.join("store.db");
    for _ in 0..2 {
        let store = options.clone().open(&path).unwrap_or_else(|error| panic!("{options:?}: {error}"));
        let mail = store.queue("mail");
        let id = mail.enqueue("hello").unwrap().id();
        let worker = store.worker("w").unwrap();
        let claim = worker.claim("mail").unwrap().unwrap();
        claim.extend(*LEASE_RANGE.end()).unwrap();
        claim.fail_for("no", Duration::MAX).unwrap();
        assert_eq!(store.show(id).unwrap().unwrap().attempts, 1);
        store.stats().unwrap();
        store.stuck(Duration::MAX).unwrap();
        store.prune().unwrap();
        store.purge_dead(Duration::MAX).unwrap();
        store.cancel_all([id]).unwrap();
        let look = options.clone().open_read_only(&path).unwrap();
        look.stats().unwrap();
    }
}

// Many at once.

/// B07: a pool's start failed with 'locked' now and then, since each new connection asked for WAL before it could wait.
#[test]
fn many_processes_open_a_new_file_at_the_same_moment() {
    const PROCESSES: usize = 8;
    const ROUNDS: usize = 50;
    let dir = Dir::new("at-once");
    let mut children: Vec<_> = (0..PROCESSES).map(|_| Child::start("role_opens", &[])).collect();
    for round in 0..ROUNDS {
        let path = dir.join(format!("{round}.db"));
        // Every third file is there already, in rollback-journal mode.
        if round % 3 == 0 {
            plain(&path).execute_batch("PRAGMA journal_mode = DELETE; CREATE TABLE orders (id)").unwrap();
        }
        children.iter_mut().for_each(|child| child.say(path.to_str().unwrap()));
        children.iter_mut().for_each(|child| child.expect("opened"));
        let conn = plain(&path);
        assert_eq!(text(&conn, "PRAGMA journal_mode"), "wal");
        assert_eq!(number(&conn, "SELECT count(*) FROM relet_messages"), PROCESSES as i64);
    }
    children.into_iter().for_each(|child| drop(child.finish()));
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_opens() {
    let Some(part) = part("role_opens") else { return };
    while let Some(path) = part.hear() {
        let wait = Duration::from_secs(10);
        let options = Store::options().busy_wait(wait).readers(4).durability(relet::Durability::Normal).reserve(0);
        let (store, took) = timed(|| options.open(path).unwrap());
        assert!(took <= wait + Duration::from_secs(1), "{took:?}");
        // All four readers of the pool open at the same moment, too.
        let together = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    store.stats().unwrap()
                });
            }
        });
        store.queue("mail").enqueue("hello").unwrap();
        part.say("opened");
    }
}

/// B07, its second half: the file is in rollback-journal mode, and somebody is writing to it.
#[test]
fn a_file_with_a_writer_in_it_is_joined_when_the_writer_is_done() {
    let dir = Dir::new("writer");
    let path = dir.join("app.db");
    let app = plain(&path);
    app.execute_batch("PRAGMA journal_mode = DELETE; CREATE TABLE orders (id); BEGIN IMMEDIATE").unwrap();
    let wait = Duration::from_secs(10);
    let together = Barrier::new(5);
    std::thread::scope(|scope| {
        let opens = || {
            together.wait();
            timed(|| Store::options().busy_wait(wait).open(&path).unwrap().queue("mail").enqueue("hello").unwrap()).1
        };
        let openers: Vec<_> = (0..4).map(|_| scope.spawn(opens)).collect();
        together.wait();
        // The lock is held this long, as in the report; nothing depends on it.
        std::thread::sleep(Duration::from_millis(300));
        app.execute_batch("INSERT INTO orders VALUES (1); COMMIT").unwrap();
        for opener in openers {
            assert!(opener.join().unwrap() < wait + Duration::from_secs(1));
        }
    });
    assert_eq!(number(&app, "SELECT count(*) FROM orders"), 1);
    assert_eq!(text(&app, "PRAGMA journal_mode"), "wal");
    assert_eq!(number(&app, "SELECT count(*) FROM relet_messages"), 4);
}

/// The wait for WAL has an end, and says what to do.
#[test]
fn a_file_that_cannot_be_switched_to_wal_is_refused_in_time() {
    let dir = Dir::new("not-wal");
    let path = dir.join("app.db");
    let app = plain(&path);
    app.execute_batch("PRAGMA journal_mode = DELETE; CREATE TABLE orders (id)").unwrap();
    let wait = Duration::from_millis(50);
    // A reader that does not go away.
    app.execute_batch("BEGIN; SELECT * FROM orders").unwrap();
    let (outcome, took) = timed(|| Store::options().busy_wait(wait).open(&path));
    match outcome {
        Err(Error::NotWal { path: named, mode }) => assert_eq!((named, &*mode), (path.clone(), "delete")),
        other => panic!("{other:?}"),
    }
    assert!(took < wait + Duration::from_secs(1), "{took:?}");
    app.execute_batch("COMMIT").unwrap();
    assert_eq!(rows(&app, "SELECT name FROM sqlite_schema").len(), 1, "nothing was laid out");
    Store::options().busy_wait(wait).open(&path).unwrap();
}

/// A store that is open keeps working while others come and go.
#[test]
fn opening_and_closing_disturbs_nobody() {
    let dir = Dir::new("come-and-go");
    let path = dir.join("store.db");
    // A slow disk makes each of a hundred openings slow, and that is not what is tried here.
    let open = || Store::options().busy_wait(Duration::from_secs(120)).open(&path).unwrap();
    let store = open();
    let together = Barrier::new(5);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                together.wait();
                for _ in 0..25 {
                    open().queue("mail").enqueue("theirs").unwrap();
                }
            });
        }
        together.wait();
        for _ in 0..25 {
            store.queue("mail").enqueue("ours").unwrap();
            store.stats().unwrap();
        }
    });
    assert_eq!(store.stats().unwrap().queues[0].count(Status::Pending), 125);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}
