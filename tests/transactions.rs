//! A unit is stored whole or not at all: in the application's own transaction, in a batch, in a backup.
#![cfg(feature = "testing")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use relet::rusqlite::{Connection, Transaction, TransactionBehavior};
use relet::{Clock, Error, Filter, Message, Settle, Settled, Status, Store, Verdict};
use support::{Child, Dir, beside, chmod, mode, names, number, part, plain, rows, text};

/// A store in an application's file, and a connection of the application's.
struct App {
    store: Store,
    clock: Clock,
    conn: Connection,
    path: PathBuf,
    // Dropped last.
    dir: Dir,
}

impl App {
    fn new() -> App {
        let dir = Dir::new("transactions");
        let path = dir.join("app.db");
        let clock = Clock::manual();
        let store = Store::options().clock(clock.clone()).open(&path).unwrap();
        let conn = plain(&path);
        conn.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT UNIQUE)").unwrap();
        App { store, clock, conn, path, dir }
    }

    fn begin(&self) -> Transaction<'_> {
        Transaction::new_unchecked(&self.conn, TransactionBehavior::Immediate).unwrap()
    }

    fn orders(&self) -> i64 {
        number(&self.conn, "SELECT count(*) FROM orders")
    }

    /// Everything that relet has in the file.
    fn relet(&self) -> Vec<String> {
        everything(&self.conn)
    }

    #[track_caller]
    fn is_sound(&self) {
        assert_eq!(self.store.doctor().unwrap(), Vec::<String>::new());
    }
}

fn everything(conn: &Connection) -> Vec<String> {
    ["messages", "queues", "retry_queue", "payloads"]
        .iter()
        .flat_map(|table| rows(conn, &format!("SELECT '{table}', * FROM relet_{table}")))
        .collect()
}

fn order(tx: &Connection, note: &str) {
    tx.execute("INSERT INTO orders (note) VALUES (?1)", [note]).unwrap();
}

fn pending(store: &Store) -> u64 {
    store.stats().unwrap().queues.iter().map(|queue| queue.count(Status::Pending)).sum()
}

// In the application's own transaction.

#[test]
fn a_message_is_stored_if_and_only_if_the_application_commits() {
    let app = App::new();
    let mail = app.store.queue("mail");
    let large = "x".repeat(5000);

    let before = app.relet();
    let tx = app.begin();
    order(&tx, "1");
    mail.enqueue_in(&tx, Message::new("hello").group("g").key("k").delay(Duration::from_secs(5))).unwrap();
    mail.enqueue_in(&tx, large.as_str()).unwrap();
    tx.rollback().unwrap();
    assert_eq!(app.relet(), before);
    assert_eq!((app.orders(), app.store.stats().unwrap().queues.len()), (0, 0));

    let tx = app.begin();
    order(&tx, "1");
    let id = mail.enqueue_in(&tx, Message::new("hello").key("k")).unwrap().id();
    let again = mail.enqueue_in(&tx, Message::new("hello").key("k")).unwrap();
    assert!(again.existing() && again.id() == id);
    let second = mail.enqueue_in(&tx, large.as_str()).unwrap().id();
    // Nobody sees it before.
    assert_eq!(pending(&app.store), 0);
    tx.commit().unwrap();
    assert_eq!((app.orders(), pending(&app.store)), (1, 2));
    assert_eq!(app.store.show(second).unwrap().unwrap().payload.unwrap(), large.as_bytes());
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    assert_eq!((claim.id(), claim.payload()), (id, b"hello".as_slice()));
    app.is_sound();
}

#[test]
fn a_rollback_leaves_the_counters_as_they_were_at_once() {
    let app = App::new();
    let mail = app.store.queue("mail");
    mail.enqueue_all(["a", "b", "c"]).unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    let before = (app.store.stats().unwrap().queues, app.relet());
    for ends in ["rollback", "drop", "savepoint"] {
        let mut tx = app.begin();
        match ends {
            "savepoint" => {
                let inner = tx.savepoint().unwrap();
                mail.enqueue_in(&inner, "d").unwrap();
                claim.ack_in(&inner).unwrap();
                drop(inner);
                tx.commit().unwrap();
            }
            _ => {
                mail.enqueue_in(&tx, "d").unwrap();
                claim.ack_in(&tx).unwrap();
                if ends == "rollback" { tx.rollback().unwrap() } else { drop(tx) }
            }
        }
        assert_eq!((app.store.stats().unwrap().queues, app.relet()), before, "{ends}");
        app.is_sound();
    }
    claim.ack().unwrap();
    app.is_sound();
}

#[test]
fn the_effect_and_the_ack_are_one_commit() {
    let app = App::new();
    app.store.queue("mail").enqueue("a").unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();

    let tx = app.begin();
    claim.guard(&tx).unwrap();
    order(&tx, "1");
    claim.ack_in(&tx).unwrap();
    // Twice in one transaction: it is gone by now, and that is said.
    assert!(matches!(claim.ack_in(&tx), Err(Error::Gone { .. })));
    assert!(matches!(claim.guard(&tx), Err(Error::Gone { .. })));
    drop(tx);
    assert_eq!(app.orders(), 0);
    assert_eq!(app.store.show(claim.id()).unwrap().unwrap().receipt, Some(claim.receipt()));

    let tx = app.begin();
    order(&tx, "1");
    claim.ack_in(&tx).unwrap();
    tx.commit().unwrap();
    assert_eq!(app.orders(), 1);
    assert!(app.store.show(claim.id()).unwrap().is_none());
    assert_eq!(app.store.stats().unwrap().queues[0].acked, 1);
    app.is_sound();
}

/// A late worker cannot write its effects: whatever has happened to its claim meanwhile.
#[test]
fn a_claim_that_was_lost_is_refused_and_nothing_changes() {
    type Loss = (&'static str, fn(&App, &relet::Claim));
    let losses: [Loss; 9] = [
        ("taken over", |app, _| {
            app.clock.advance(Duration::from_secs(61));
            let _ = app.store.worker("other").unwrap().claim("mail").unwrap().unwrap();
        }),
        ("resumed", |_, claim| {
            assert!(matches!(claim.worker().claim_id(claim.id()).unwrap(), Verdict::Resumed(_)));
        }),
        ("recovered", |app, claim| {
            app.clock.reboot();
            let worker = app.store.worker("w").unwrap();
            assert!(matches!(worker.claim_id(claim.id()).unwrap(), Verdict::Recovered(_)));
        }),
        ("cancelled", |app, claim| app.store.cancel(claim.id()).unwrap()),
        ("acked", |app, claim| assert_eq!(app.store.ack(claim.receipt()).unwrap(), Settled::Now(Status::Done))),
        ("failed", |app, claim| {
            let how = Settle::Fail { error: "no".into(), retry_in: Some(Duration::ZERO) };
            app.store.settle(claim.receipt(), how).unwrap();
        }),
        ("deferred", |app, claim| {
            let how = Settle::Defer { delay: Duration::ZERO, reason: "later".into() };
            app.store.settle(claim.receipt(), how).unwrap();
        }),
        ("rejected", |app, claim| {
            let how = Settle::Reject { error: "no".into() };
            app.store.settle(claim.receipt(), how).unwrap();
        }),
        ("released", |app, claim| {
            app.store.settle(claim.receipt(), Settle::Release).unwrap();
        }),
    ];
    for (how, lose) in losses {
        let app = App::new();
        app.store.queue("mail").enqueue_all(["a", "bystander"]).unwrap();
        let worker = app.store.worker("w").unwrap();
        let claim = worker.claim("mail").unwrap().unwrap();
        lose(&app, &claim);
        let before = app.relet();
        for call in [relet::Claim::guard, relet::Claim::ack_in] {
            let tx = app.begin();
            let error = call(&claim, &tx).unwrap_err();
            assert!(error.is_claim_lost(), "{how}: {error}");
            // Even if the application goes on and commits, the call has done nothing.
            tx.commit().unwrap();
            assert_eq!(app.relet(), before, "{how}");
        }
        app.is_sound();
    }
}

#[test]
fn the_guard_itself_changes_nothing() {
    let app = App::new();
    app.store.queue("mail").enqueue("a").unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    let before = app.relet();
    let tx = app.begin();
    claim.guard(&tx).unwrap();
    tx.commit().unwrap();
    assert_eq!(app.relet(), before);
}

/// What fails inside undoes itself alone: the application's rows and what succeeded before stay.
#[test]
fn an_operation_that_fails_inside_undoes_itself_alone() {
    let app = App::new();
    let (mail, news) = (app.store.queue("mail"), app.store.queue("news"));
    mail.enqueue("held").unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    // Fails after the operation has written: the queue's row is made first, the message's payload last.
    app.conn
        .execute_batch(
            "CREATE TEMP TRIGGER no_large BEFORE INSERT ON main.relet_payloads
               BEGIN SELECT RAISE(ABORT, 'refused'); END;
             CREATE TEMP TRIGGER no_end BEFORE DELETE ON main.relet_messages
               BEGIN SELECT RAISE(ABORT, 'refused'); END",
        )
        .unwrap();
    let tx = app.begin();
    order(&tx, "1");
    mail.enqueue_in(&tx, "good").unwrap();
    news.enqueue_in(&tx, "x".repeat(5000)).unwrap_err();
    claim.ack_in(&tx).unwrap_err();
    order(&tx, "2");
    assert!(matches!(mail.enqueue_in(&tx, Message::new("x").priority(i32::MAX)), Err(Error::Range { .. })));
    mail.enqueue_in(&tx, "good too").unwrap();
    tx.commit().unwrap();
    assert_eq!(app.orders(), 2);
    assert_eq!(pending(&app.store), 2);
    assert_eq!(app.store.stats().unwrap().queues.len(), 1, "the queue that the failed one had made is not there");
    assert_eq!(number(&app.conn, "SELECT count(*) FROM relet_messages"), 3);
    claim.ack().unwrap();
    app.is_sound();
}

/// The same, with the disk full: SQLite may take back the whole transaction by itself, and then nothing of it may stay.
#[test]
fn an_application_s_full_disk_stores_all_or_nothing() {
    let app = App::new();
    let mail = app.store.queue("mail");
    let pages = number(&app.conn, "PRAGMA page_count");
    app.conn.execute_batch(&format!("PRAGMA max_page_count = {}", pages + 5)).unwrap();
    let before = app.relet();
    let tx = app.begin();
    order(&tx, "1");
    mail.enqueue_in(&tx, "small").unwrap();
    assert!(matches!(mail.enqueue_in(&tx, "x".repeat(100_000)), Err(Error::Full { .. })));
    let gone = tx.is_autocommit();
    let committed = tx.commit();
    assert_eq!(committed.is_err(), gone);
    if gone {
        assert_eq!((app.orders(), app.relet()), (0, before));
    } else {
        assert_eq!((app.orders(), pending(&app.store)), (1, 1));
    }
    app.is_sound();
    let tx = app.begin();
    mail.enqueue_in(&tx, "small").unwrap();
    tx.commit().unwrap();
    app.is_sound();
}

#[test]
fn a_transaction_that_does_not_hold_the_write_lock_is_refused() {
    let app = App::new();
    let mail = app.store.queue("mail");
    mail.enqueue("a").unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    let before = app.relet();
    #[track_caller]
    fn refused(claim: &relet::Claim, mail: &relet::Queue, conn: &Connection) {
        assert!(matches!(mail.enqueue_in(conn, "b"), Err(Error::NotImmediate)));
        assert!(matches!(claim.ack_in(conn), Err(Error::NotImmediate)));
        assert!(matches!(claim.guard(conn), Err(Error::NotImmediate)));
    }
    refused(&claim, &mail, &app.conn);
    let tx = app.conn.unchecked_transaction().unwrap();
    refused(&claim, &mail, &tx);
    // One that has read: another's commit would make it fail at its first write.
    number(&tx, "SELECT count(*) FROM orders");
    refused(&claim, &mail, &tx);
    tx.commit().unwrap();
    assert_eq!(app.relet(), before);
    // One that has written holds the lock, however it was begun.
    let tx = app.conn.unchecked_transaction().unwrap();
    order(&tx, "1");
    mail.enqueue_in(&tx, "b").unwrap();
    tx.commit().unwrap();
    app.is_sound();
}

#[test]
fn a_connection_to_another_file_is_refused_and_that_file_stays_as_it_is() {
    let app = App::new();
    let mail = app.store.queue("mail");
    mail.enqueue("a").unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    // Another store, a database that is no store, and one in memory.
    let other = app.dir.join("other.db");
    Store::open(&other).unwrap().queue("mail").enqueue("theirs").unwrap();
    let bare = app.dir.join("bare.db");
    plain(&bare).execute_batch("CREATE TABLE x (y)").unwrap();
    for path in [&other, &bare, Path::new(":memory:")] {
        is_wrong(&app, &claim, path);
    }
    // A store in memory cannot be joined from outside at all.
    let memory = Store::open_in_memory().unwrap();
    let tx = app.begin();
    assert!(matches!(memory.queue("mail").enqueue_in(&tx, "b"), Err(Error::WrongFile { .. })));
}

/// A copy is another store, however alike it is: what is written there does not reach this one.
#[test]
fn a_connection_to_a_backup_of_the_store_is_refused() {
    let app = App::new();
    app.store.queue("mail").enqueue("a").unwrap();
    let claim = app.store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    let copy = app.dir.join("copy.db");
    app.store.backup(&copy).unwrap();
    is_wrong(&app, &claim, &copy);
}

fn is_wrong(app: &App, claim: &relet::Claim, path: &Path) {
    let mut conn = plain(path);
    let before = rows(&conn, "SELECT * FROM sqlite_schema");
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let mail = app.store.queue("mail");
    for outcome in [mail.enqueue_in(&tx, "b").map(drop), claim.ack_in(&tx), claim.guard(&tx)] {
        match outcome {
            Err(Error::WrongFile { path: named }) => assert_eq!(named, app.path),
            other => panic!("{path:?}: {other:?}"),
        }
    }
    tx.commit().unwrap();
    assert_eq!(rows(&conn, "SELECT * FROM sqlite_schema"), before);
}

/// An unqualified name would find these first.
#[test]
fn temporary_and_attached_tables_of_the_same_names_are_not_written() {
    let app = App::new();
    let attached = app.dir.join("attached.db");
    Store::open(&attached).unwrap().queue("mail").enqueue("theirs").unwrap();
    app.conn.execute_batch(&format!("ATTACH '{}' AS other", attached.display())).unwrap();
    let tables = rows(&app.conn, "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name LIKE 'relet_%'");
    assert!(tables.len() >= 6);
    for table in [
        "relet_meta",
        "relet_queues",
        "relet_counters",
        "relet_messages",
        "relet_payloads",
        "relet_retry_queue",
        "relet_workers",
    ] {
        app.conn.execute_batch(&format!("CREATE TEMP TABLE {table} AS SELECT * FROM main.{table} WHERE 0")).unwrap();
    }
    let mail = app.store.queue("mail");
    let worker = app.store.worker("w").unwrap();
    mail.enqueue_all(["a", "b"]).unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    let others = |conn: &Connection| {
        ["messages", "queues", "retry_queue", "payloads", "meta"]
            .iter()
            .flat_map(|table| {
                ["temp", "other"].map(|schema| rows(conn, &format!("SELECT * FROM {schema}.relet_{table}")))
            })
            .collect::<Vec<_>>()
    };
    let before = others(&app.conn);
    let tx = app.begin();
    claim.guard(&tx).unwrap();
    mail.enqueue_in(&tx, Message::new("c").group("g").key("k")).unwrap();
    mail.enqueue_in(&tx, "x".repeat(5000)).unwrap();
    claim.ack_in(&tx).unwrap();
    tx.commit().unwrap();
    assert_eq!(others(&app.conn), before);
    assert_eq!(pending(&app.store), 3);
    app.is_sound();

    // The store's file as the attached one, with another store as the main one, is the wrong file.
    let mut conn = plain(&attached);
    conn.execute_batch(&format!("ATTACH '{}' AS app", app.path.display())).unwrap();
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    assert!(matches!(mail.enqueue_in(&tx, "d"), Err(Error::WrongFile { .. })));
}

/// A claim's conditions hold in the application's transaction, too: a group's turn passes on with the ack.
#[test]
fn an_ack_in_the_application_s_transaction_passes_the_turn_of_its_group_on() {
    let app = App::new();
    let mail = app.store.queue("mail");
    mail.enqueue_all(["a", "b"].map(|text| Message::new(text).group("g"))).unwrap();
    let worker = app.store.worker("w").unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    assert!(worker.claim("mail").unwrap().is_none());
    let tx = app.begin();
    claim.ack_in(&tx).unwrap();
    tx.commit().unwrap();
    assert_eq!(worker.claim("mail").unwrap().unwrap().payload(), b"b");
    app.is_sound();
}

// Units that fail.

/// B13: after one failed unit the connection stayed inside its transaction, and everyone after it failed.
#[test]
fn a_unit_that_fails_leaves_nothing_behind_and_harms_nobody() {
    let dir = Dir::new("units");
    let path = dir.join("store.db");
    let store = Store::options().readers(1).busy_wait(Duration::from_millis(5)).open(&path).unwrap();
    let mail = store.queue("mail");
    let mut conn = plain(&path);
    let worker = store.worker("w").unwrap();
    let goes_on = |after: &str| {
        assert_eq!(number(&plain(&path), "SELECT count(*) FROM relet_messages"), 0, "{after}");
        let id = mail.enqueue("next").unwrap_or_else(|error| panic!("{after}: {error}")).id();
        assert_eq!(store.list(&Filter::new()).unwrap().len(), 1, "{after}");
        let claim = worker.claim("mail").unwrap().unwrap();
        assert_eq!(claim.id(), id, "{after}");
        claim.ack().unwrap();
        // The application's own index on relet's table is told, and nothing else is wrong.
        let mut findings = store.doctor().unwrap();
        findings.retain(|finding| !finding.contains("app_once"));
        assert_eq!(findings, Vec::<String>::new(), "{after}");
    };
    goes_on("nothing");

    // The n-th item of a batch is refused: before anything is begun, and by the database.
    let too_large = vec![vec![0; 10], vec![0; relet::PAYLOAD_MAX + 1]];
    assert!(matches!(mail.enqueue_all(too_large), Err(Error::PayloadTooLarge { .. })));
    goes_on("a batch with a payload that is too large");
    conn.execute_batch("CREATE UNIQUE INDEX app_once ON relet_messages (payload)").unwrap();
    mail.enqueue_all(["a", "b", "c", "b", "d"]).unwrap_err();
    goes_on("a batch whose fourth item fails in the database");
    // … also where others are in the same commit, and in a new queue.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (store, mail) = (&store, &mail);
            scope.spawn(move || {
                for round in 0..50 {
                    let name = format!("thread {thread} round {round}");
                    store.queue(&name).enqueue_all([name.as_str(), "x", "x"]).unwrap_err();
                    let id = mail.enqueue(name.as_str()).unwrap().id();
                    store.cancel(id).unwrap();
                }
            });
        }
    });
    let queues = store.stats().unwrap().queues;
    assert_eq!(queues.len(), 1, "no queue of a failed unit is left: {queues:?}");
    assert_eq!(queues[0].count(Status::Cancelled), 200);
    conn.execute_batch("DROP INDEX app_once; DELETE FROM relet_messages; DELETE FROM relet_finished; UPDATE relet_counters SET cancelled = 0")
        .unwrap();
    goes_on("batches of many threads that fail beside others that do not");

    // A caller's code that returns an error, or panics.
    let panicking = (0..10).map(|n| if n < 5 { Message::new("x") } else { panic!("in the caller's iterator") });
    assert!(catch_unwind(AssertUnwindSafe(|| mail.enqueue_all(panicking))).is_err());
    goes_on("an iterator that panics");
    struct Panics;
    impl std::fmt::Display for Panics {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("in the caller's error")
        }
    }
    mail.enqueue("held").unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| claim.fail(Panics))).is_err());
    claim.ack().unwrap();
    goes_on("an error that panics when it is written out");
    let mut unit = |how: &str| -> Result<(), Error> {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        mail.enqueue_in(&tx, "unit")?;
        match how {
            "panic" => panic!("in the caller's transaction"),
            _ => mail.enqueue_in(&tx, Message::new("unit").priority(40_000)).map(drop)?,
        }
        tx.commit().map_err(Error::from)
    };
    assert!(matches!(unit("error"), Err(Error::Range { .. })));
    goes_on("a transaction of the caller's that returns early");
    assert!(catch_unwind(AssertUnwindSafe(|| unit("panic"))).is_err());
    goes_on("a transaction of the caller's that panics");

    // A begin that is busy.
    let locked = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    match mail.enqueue("busy") {
        Err(error @ Error::Busy { waited }) => {
            assert!(error.is_transient() && waited >= Duration::from_millis(5), "{waited:?}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(mail.enqueue_all(["busy", "busy"]), Err(Error::Busy { .. })));
    assert!(matches!(worker.claim("mail"), Err(Error::Busy { .. })));
    // Readers are not in anybody's way.
    store.stats().unwrap();
    drop(locked);
    goes_on("a begin that was busy");

    // A reader in the middle of a page.
    assert_eq!(store.list(&Filter::new().queue("no such queue")).unwrap(), []);
    assert!(store.show(1 << 40).unwrap().is_none());
    goes_on("a look at nothing");
}

// Backups.

/// B63: a copy of the main file missed what was still in the log.
#[test]
fn a_backup_is_whole_although_nothing_was_checkpointed() {
    let dir = Dir::new("backup");
    let store = Store::options().checkpoints(false).open(dir.join("store.db")).unwrap();
    let mail = store.queue("mail");
    mail.enqueue_all((0..50).map(|n| format!("small {n}"))).unwrap();
    mail.enqueue_all((0..50).map(|n| format!("large {n} {}", "x".repeat(3000)))).unwrap();
    assert!(store.stats().unwrap().wal_bytes > 100_000);
    let claim = store.worker("w").unwrap().claim("mail").unwrap().unwrap();

    let elsewhere = dir.folder("elsewhere");
    let target = dir.join("copy for safety?.db");
    store.backup(&target).unwrap();
    assert_eq!(mode(&target), 0o600);
    for suffix in ["-wal", "-shm", "-journal"] {
        assert!(!beside(&target, suffix).exists(), "{suffix}");
    }
    // Alone, somewhere else.
    let moved = elsewhere.join("moved.db");
    std::fs::rename(&target, &moved).unwrap();
    {
        let look = Store::open_read_only(&moved).unwrap();
        assert_eq!(look.stats().unwrap().queues[0].live(), 100);
    }
    let copy = Store::open(&moved).unwrap();
    assert_eq!(copy.doctor().unwrap(), Vec::<String>::new());
    let list = |store: &Store| {
        store
            .list(&Filter::new().limit(1000).payload(true))
            .unwrap()
            .into_iter()
            .map(|m| (m.id, m.payload))
            .collect::<Vec<_>>()
    };
    assert_eq!(list(&copy).len(), 100);
    assert_eq!(list(&copy), list(&store));
    assert_eq!(text(&plain(&moved), "PRAGMA integrity_check"), "ok");
    // And it is a store of its own.
    copy.queue("mail").enqueue("only here").unwrap();
    assert_eq!(list(&store).len(), 100);
    claim.ack().unwrap();
    assert_eq!(list(&copy).len(), 101);
}

#[test]
fn a_backup_beside_a_live_writer_is_one_moment_of_it() {
    const BATCH: usize = 10;
    let dir = Dir::new("live");
    let store = Store::options().durability(relet::Durability::Normal).open(dir.join("store.db")).unwrap();
    let mail = store.queue("mail");
    mail.enqueue_all(vec!["x"; BATCH]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let worker = store.worker_unnamed().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    mail.enqueue_all(vec!["x"; BATCH]).unwrap();
                    let claims = worker.claim_batch("mail", BATCH / 2).unwrap();
                    claims[0].defer(Duration::from_secs(60)).unwrap();
                    claims[1].fail("no").unwrap();
                }
            });
        }
        let backups = catch_unwind(AssertUnwindSafe(|| {
            for round in 0..10 {
                let before = store.stats().unwrap().queues[0].live();
                let target = dir.join(format!("{round}.db"));
                store.backup(&target).unwrap();
                let after = store.stats().unwrap().queues[0].live();
                let copy = Store::open(&target).unwrap();
                assert_eq!(copy.doctor().unwrap(), Vec::<String>::new());
                let copied = copy.stats().unwrap().queues[0].live();
                assert!(before <= copied && copied <= after, "{before} {copied} {after}");
                assert_eq!(copied as usize % BATCH, 0, "half a batch");
            }
        }));
        stop.store(true, Ordering::Relaxed);
        backups.unwrap();
    });
}

#[test]
fn a_store_in_memory_can_be_backed_up_to_a_file() {
    let dir = Dir::new("memory");
    let store = Store::open_in_memory().unwrap();
    store.queue("mail").enqueue_all(["a", "b"]).unwrap();
    store.backup(dir.join("copy.db")).unwrap();
    assert_eq!(pending(&Store::open(dir.join("copy.db")).unwrap()), 2);
}

#[test]
fn a_backup_that_cannot_be_made_leaves_no_file_and_changes_none() {
    let dir = Dir::new("refused");
    let path = dir.join("store.db");
    let store = Store::open(&path).unwrap();
    store.queue("mail").enqueue("a").unwrap();
    let taken = dir.join("taken.db");
    std::fs::write(&taken, "precious").unwrap();
    let folder = dir.folder("folder");
    std::os::unix::fs::symlink(dir.join("nowhere.db"), dir.join("dangling.db")).unwrap();
    let before = names(dir.path());
    let targets = [
        taken.clone(),
        path.clone(),
        folder.clone(),
        dir.join("missing/copy.db"),
        PathBuf::from(""),
        dir.join("dangling.db"),
    ];
    for target in &targets {
        let error = store.backup(target).unwrap_err();
        assert!(matches!(&error, Error::Backup { .. }), "{target:?}: {error:?}");
        assert_eq!(names(dir.path()), before, "{target:?}");
    }
    assert_eq!(std::fs::read(&taken).unwrap(), b"precious");
    assert_eq!(names(&folder).len(), 0);
    assert_eq!(pending(&store), 1);

    let open_folder = dir.folder("open");
    chmod(&open_folder, 0o777);
    chmod(dir.path(), 0o777);
    chmod(&folder, 0o555);
    let args = [folder.to_str().unwrap(), open_folder.to_str().unwrap()];
    assert_eq!(Child::start_as_nobody("role_backs_up", &args, &dir).finish(), ["refused", "done"]);
    assert_eq!(names(&folder).len(), 0);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_backs_up() {
    let Some(part) = part("role_backs_up") else { return };
    let store = Store::open_in_memory().unwrap();
    store.queue("mail").enqueue("a").unwrap();
    let target = part.path().join("copy.db");
    match store.backup(&target) {
        Err(Error::Backup { path, detail }) => {
            assert_eq!(path, target);
            assert!(!detail.is_empty());
        }
        other => panic!("{other:?}"),
    }
    part.say("refused");
    store.backup(Path::new(&part.args[1]).join("copy.db")).unwrap();
    part.say("done");
}

/// A backup that fails half-way leaves nothing, either.
#[test]
fn a_backup_of_a_file_that_cannot_be_read_leaves_no_file() {
    let dir = Dir::new("half-way");
    let path = dir.join("store.db");
    {
        let store = Store::open(&path).unwrap();
        store.queue("mail").enqueue_all(vec![vec![7; 2000]; 200]).unwrap();
    }
    // Damage in the middle: the copy stops there.
    let page = number(&plain(&path), "SELECT rootpage FROM sqlite_schema WHERE name = 'relet_messages'") as usize;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[(page - 1) * 4096..page * 4096].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    let store = Store::open(&path).unwrap();
    let before = names(dir.path());
    store.backup(dir.join("copy.db")).unwrap_err();
    assert_eq!(names(dir.path()), before);
}

/// A receipt names one claim in one store: what the original issues later is worth nothing in the copy, and the other way.
#[test]
fn receipts_that_the_original_issues_later_are_refused_by_the_copy() {
    let app = App::new();
    app.store.queue("mail").enqueue_all(["a", "b", "c"]).unwrap();
    let target = app.dir.join("copy.db");
    app.store.backup(&target).unwrap();
    let copy = Store::options().clock(app.clock.clone()).open(&target).unwrap();
    are_strangers(&app.store, &copy);
}

/// … also after the original's machine was restarted, which raises its epoch, too.
#[test]
fn receipts_of_the_original_after_a_restart_are_refused_by_the_copy() {
    let app = App::new();
    app.store.queue("mail").enqueue_all(["a", "b", "c"]).unwrap();
    let target = app.dir.join("copy.db");
    app.store.backup(&target).unwrap();
    // Its own machine, which was not restarted.
    let copy = Store::options().clock(Clock::manual()).open(&target).unwrap();
    app.clock.reboot();
    are_strangers(&app.store, &copy);
}

/// … and two copies of one store are two stores.
#[test]
fn receipts_of_one_copy_are_refused_by_another() {
    let app = App::new();
    app.store.queue("mail").enqueue_all(["a", "b", "c"]).unwrap();
    let copies = ["1.db", "2.db"].map(|name| {
        let target = app.dir.join(name);
        app.store.backup(&target).unwrap();
        Store::options().clock(app.clock.clone()).open(&target).unwrap()
    });
    are_strangers(&copies[0], &copies[1]);
}

fn are_strangers(one: &Store, other: &Store) {
    let claims = [one, other].map(|store| store.worker("w").unwrap().claim("mail").unwrap().unwrap());
    assert_eq!(claims[0].id(), claims[1].id());
    for (store, receipt) in [(one, claims[1].receipt()), (other, claims[0].receipt())] {
        let outcome = store.ack(receipt);
        assert!(matches!(outcome, Err(Error::Stale { .. })), "a stranger's receipt {receipt}: {outcome:?}");
    }
    for claim in claims {
        claim.ack().unwrap();
    }
}
