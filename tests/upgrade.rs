//! A file is opened by whoever knows its schema: an older one is brought up, a newer one is refused and not a byte of it changed.
#![cfg(feature = "testing")]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use relet::{Durability, Error, Message, Options, Route, Status, Store, Verdict};
use support::{Child, Dir, beside, number, part, plain, rows, text};

const SCHEMA: &str = include_str!("../schema.sql");
const SUPPORTED: i64 = 1;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/v1.db")
}

fn options() -> Options {
    Store::options().durability(Durability::Normal).reserve(0).busy_wait(Duration::from_secs(20))
}

/// Every table and index of relet's, as the database has it.
fn schema(path: &Path) -> Vec<String> {
    rows(
        &plain(path),
        "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name LIKE 'relet%' ORDER BY type, name",
    )
}

// The schema.

#[test]
fn what_a_new_file_has_is_what_schema_sql_says() {
    let dir = Dir::new("schema");
    let (made, by_hand) = (dir.join("made.db"), dir.join("by-hand.db"));
    options().open(&made).unwrap();
    plain(&by_hand).execute_batch(SCHEMA).unwrap();
    assert_eq!(schema(&made), schema(&by_hand));
    let conn = plain(&made);
    // Nothing beside it: no other table, index, view or trigger.
    let others = "SELECT name FROM sqlite_schema WHERE name NOT LIKE 'relet%' AND name NOT LIKE 'sqlite_%'";
    assert_eq!(rows(&conn, others), Vec::<String>::new());
    assert_eq!(number(&conn, "SELECT count(*) FROM pragma_table_list WHERE name LIKE 'relet%' AND NOT strict"), 0);
    assert_eq!(number(&conn, "SELECT value FROM relet_meta WHERE key = 'schema_version'"), SUPPORTED);
    assert_eq!(number(&conn, "PRAGMA user_version"), 0);
    assert_eq!(number(&conn, "PRAGMA application_id"), 0);
}

#[test]
fn the_schema_names_every_status() {
    for status in Status::ALL {
        assert!(SCHEMA.contains(&format!("'{status}'")), "{status}");
    }
}

// B09: an older program opened the file of a newer one, and wrote to it.

/// The bytes of the file and of its log. SQLite makes an empty log to look into a file in WAL mode: that is none.
fn bytes(path: &Path) -> (Vec<u8>, Vec<u8>) {
    (std::fs::read(path).unwrap(), std::fs::read(beside(path, "-wal")).unwrap_or_default())
}

/// Every way in, and what each says.
fn is_refused_unchanged(path: &Path) {
    let before = bytes(path);
    for _ in 0..2 {
        for outcome in [Store::open(path), options().open(path), Store::open_read_only(path)] {
            match outcome {
                Err(error @ Error::SchemaTooNew { found, supported }) => {
                    assert_eq!((found, supported), (SUPPORTED + 1, SUPPORTED));
                    let text = error.to_string();
                    assert!(text.contains("schema too new") && text.contains('2') && text.contains('1'), "{text}");
                }
                other => panic!("{other:?}"),
            }
            let after = bytes(path);
            assert!(before.0 == after.0, "the file was changed");
            assert!(before.1 == after.1, "the log was changed");
            assert!(!beside(path, "-relet-reserve").exists());
        }
    }
}

fn three_of_the_future(path: &Path) {
    options().open(path).unwrap().queue("mail").enqueue_all(["a", "b", "c"]).unwrap();
    let conn = plain(path);
    conn.execute("UPDATE relet_meta SET value = ?1 WHERE key = 'schema_version'", [SUPPORTED + 1]).unwrap();
}

fn still_has_three(path: &Path) {
    let conn = plain(path);
    assert_eq!(number(&conn, "SELECT value FROM relet_meta WHERE key = 'schema_version'"), SUPPORTED + 1);
    assert_eq!(number(&conn, "SELECT count(*) FROM relet_messages"), 3);
    assert_eq!(text(&conn, "PRAGMA integrity_check"), "ok");
}

#[test]
fn a_newer_file_is_refused_and_not_a_byte_changed() {
    let dir = Dir::new("newer");
    let path = dir.join("store.db");
    three_of_the_future(&path);
    is_refused_unchanged(&path);
    still_has_three(&path);
}

#[test]
fn a_newer_file_in_rollback_journal_mode_is_refused_and_not_a_byte_changed() {
    let dir = Dir::new("newer-delete");
    let path = dir.join("store.db");
    three_of_the_future(&path);
    assert_eq!(text(&plain(&path), "PRAGMA journal_mode = DELETE"), "delete");
    is_refused_unchanged(&path);
    assert!(!beside(&path, "-wal").exists());
    still_has_three(&path);
}

/// The newer program was killed: the version is in the log only.
#[test]
fn a_newer_file_whose_log_was_left_behind_is_refused_and_not_a_byte_changed() {
    let dir = Dir::new("newer-log");
    let path = dir.join("store.db");
    let mut child = Child::start("role_is_of_the_future", &[path.to_str().unwrap()]);
    child.expect("written");
    child.kill();
    let (_, log) = bytes(&path);
    assert!(log.len() > 4096, "there is a log that was not moved into the file");
    is_refused_unchanged(&path);
    still_has_three(&path);
}

/// The newer program is running.
#[test]
fn a_newer_file_in_use_is_refused_and_its_user_goes_on() {
    let dir = Dir::new("newer-use");
    let path = dir.join("store.db");
    let mut child = Child::start("role_is_of_the_future", &[path.to_str().unwrap()]);
    child.expect("written");
    is_refused_unchanged(&path);
    child.say("go on");
    child.expect("went on");
    child.finish();
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_is_of_the_future() {
    let Some(part) = part("role_is_of_the_future") else { return };
    let conn = plain(part.path());
    conn.execute_batch("PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0").unwrap();
    // From its first look on, this connection keeps the log from being moved into the file when others close.
    number(&conn, "SELECT count(*) FROM sqlite_schema");
    three_of_the_future(part.path());
    part.say("written");
    if part.hear().is_some() {
        conn.execute_batch("UPDATE relet_meta SET value = value + 1 WHERE key = 'touched'").unwrap();
        part.say("went on");
    }
}

// Laid out once.

#[test]
fn processes_that_open_a_new_file_at_the_same_instant_lay_it_out_once() {
    const PROCESSES: usize = 8;
    let dir = Dir::new("instant");
    let mut children: Vec<_> = (0..PROCESSES).map(|n| Child::start("role_opens", &[&n.to_string()])).collect();
    for round in 0..15 {
        let path = dir.join(format!("{round}.db"));
        // New, an application's, or one of the first version.
        match round % 3 {
            0 => {}
            1 => plain(&path).execute_batch("CREATE TABLE orders (id)").unwrap(),
            _ => drop(std::fs::copy(fixture(), &path).unwrap()),
        }
        children.iter_mut().for_each(|child| child.say(path.to_str().unwrap()));
        children.iter_mut().for_each(|child| child.expect("opened"));
        let conn = plain(&path);
        assert_eq!(number(&conn, "SELECT value FROM relet_meta WHERE key = 'schema_version'"), SUPPORTED);
        assert_eq!(number(&conn, "SELECT count(*) FROM relet_meta WHERE key = 'store_id'"), 1);
        let mine = "SELECT count(DISTINCT payload) FROM relet_messages WHERE queue = (SELECT id FROM relet_queues
                     WHERE name = 'at once')";
        assert_eq!(number(&conn, mine), PROCESSES as i64);
        // One restart of the machine at most was noted: that of the fixture.
        let epoch = number(&conn, "SELECT value FROM relet_meta WHERE key = 'epoch'");
        assert_eq!(epoch, if round % 3 == 2 { 2 } else { 1 });
        let store = options().open(&path).unwrap();
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    }
    for child in children {
        child.finish();
    }
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_opens() {
    let Some(part) = part("role_opens") else { return };
    while let Some(path) = part.hear() {
        let store = options().open(path).unwrap();
        store.queue("at once").enqueue(part.args[0].as_str()).unwrap();
        part.say("opened");
    }
}

// Old files. They are kept for ever, and only ever added to.

/// Makes the file of the schema's present version: run it by name once for each version, and keep what it made.
#[test]
#[ignore = "makes tests/fixtures/v1.db, which is never made again"]
fn make_the_fixture() {
    let path = fixture();
    if path.exists() {
        return;
    }
    let dir = Dir::new("fixture");
    let made = dir.join("v1.db");
    {
        let clock = relet::Clock::manual();
        let store = options().clock(clock.clone()).retention(Duration::from_secs(86_400)).open(&made).unwrap();
        let mail = store.queue("mail");
        mail.set_defaults(relet::QueueDefaults::new().max_attempts(7)).unwrap();
        mail.enqueue_all(["done", "dead", "cancelled", "held", "deferred", "failed"]).unwrap();
        let worker = store.worker("mailer-1").unwrap().lease(Duration::from_secs(600)).unwrap();
        worker.claim_id(1).unwrap().claim().unwrap().ack().unwrap();
        worker.claim_id(2).unwrap().claim().unwrap().reject("no such address").unwrap();
        store.cancel(3).unwrap();
        let _ = worker.claim_id(4).unwrap().claim().unwrap();
        worker.claim_id(5).unwrap().claim().unwrap().defer(Duration::from_secs(60)).unwrap();
        worker.claim_id(6).unwrap().claim().unwrap().fail_for("no answer", Duration::from_secs(60)).unwrap();
        mail.enqueue(Message::new("urgent").priority(9).route(Route::Queued).key("k")).unwrap();
        mail.enqueue_all(["first", "second"].map(|text| Message::new(text).group("g"))).unwrap();
        mail.enqueue(Message::new("delayed").delay(Duration::from_secs(60))).unwrap();
        mail.enqueue("x".repeat(5000)).unwrap();
        let api = store.gate("api");
        api.limit(relet::GateLimits::new().concurrency(2).rate(100, Duration::from_secs(60)).burst(10)).unwrap();
        let calls = store.queue("calls");
        let ageing = Duration::from_secs(60);
        calls.set_defaults(relet::QueueDefaults::new().gate("api").ageing(ageing)).unwrap();
        calls.enqueue_all(["limited", "sibling"]).unwrap();
        worker.claim("calls").unwrap().unwrap().limited(Duration::from_secs(60)).unwrap();
        store.queue("paused").enqueue("hello").unwrap();
        store.queue("paused").pause().unwrap();
        let every = relet::When::every(Duration::from_secs(86_400));
        store.schedule("daily").set(every, "reports", Message::new("report"), relet::CatchUp::One).unwrap();
    }
    let conn = plain(&made);
    // Its copies are the file itself, as it was when it was made.
    conn.execute_batch("PRAGMA journal_mode = DELETE; DELETE FROM relet_meta WHERE key = 'file'; VACUUM").unwrap();
    drop(conn);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::copy(&made, &path).unwrap();
}

fn mail(store: &Store) -> relet::QueueStats {
    store.stats().unwrap().queues.into_iter().find(|queue| queue.queue == "mail").unwrap()
}

/// Everything that the first version's file holds is handed out, in its order, with its history.
#[test]
fn a_file_of_the_first_version_opens_and_drains() {
    let dir = Dir::new("v1");
    let path = dir.join("store.db");
    std::fs::copy(fixture(), &path).unwrap();
    let clock = relet::Clock::manual();
    // The machine was restarted since, and a week has passed.
    clock.reboot();
    clock.set_wall_by(7 * 86_400_000);
    let store = options().clock(clock.clone()).retention(Duration::from_secs(86_400)).open(&path).unwrap();
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    let shown = |id: i64| store.show(id).unwrap().unwrap();
    let statuses: Vec<_> = (1..=5).map(|id| shown(id).status).collect();
    assert_eq!(statuses, [Status::Done, Status::Dead, Status::Cancelled, Status::Processing, Status::Processing]);
    let dead = shown(2);
    assert_eq!((dead.last_error.as_deref(), dead.dead_reason.as_deref()), (Some("no such address"), Some("rejected")));
    assert_eq!((dead.attempts, dead.max_attempts), (1, 7));
    assert_eq!(store.queue("mail").enqueue(Message::new("again").key("k")).unwrap().id().get(), 7, "the key is taken");

    // The machine was restarted: what mailer-1 held is void, and its own new start has it again, under a new epoch.
    let worker = store.worker("mailer-1").unwrap();
    let claim = match worker.claim_id(4).unwrap() {
        Verdict::Recovered(claim) => claim,
        other => panic!("{other:?}"),
    };
    assert_eq!((claim.attempts(), claim.crashes(), claim.receipt().to_string().as_str()), (2, 1, "4.2-2"));
    claim.ack().unwrap();
    store.redrive(2).unwrap();
    let mut drained = Vec::new();
    while let Some(claim) = worker.claim("mail").unwrap() {
        drained.push(String::from_utf8_lossy(&claim.payload()[..claim.payload().len().min(8)]).into_owned());
        claim.ack().unwrap();
    }
    assert_eq!(drained, ["deferred", "urgent", "dead", "failed", "first", "second", "delayed", "xxxxxxxx"]);
    let queue = mail(&store);
    assert_eq!((queue.live(), queue.acked, queue.retrying), (0, 10, 0));
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    assert_eq!(store.queue("mail").enqueue("new").unwrap().id().get(), 15);
    clock.advance(Duration::from_secs(2 * 86_400));
    store.prune().unwrap();
    assert_eq!(mail(&store).count(Status::Done), 0);
    assert_eq!(schema(&path), {
        let new = dir.join("new.db");
        options().open(&new).unwrap();
        schema(&new)
    });
}

#[test]
fn a_file_of_the_first_version_can_be_looked_at_without_a_change() {
    let dir = Dir::new("v1-look");
    let path = dir.join("store.db");
    std::fs::copy(fixture(), &path).unwrap();
    let before = bytes(&path);
    let look = Store::open_read_only(&path).unwrap();
    assert_eq!(mail(&look).count(Status::Dead), 1);
    assert_eq!(look.doctor().unwrap(), Vec::<String>::new());
    drop(look);
    assert!(bytes(&path) == before);
}

/// The fixture is as it is kept: small, whole, and with nothing beside it.
/// And its gates, pauses and schedules go on.
#[test]
fn a_file_of_the_first_version_keeps_its_gates_pauses_and_schedules() {
    let dir = Dir::new("v1-gates");
    let path = dir.join("store.db");
    std::fs::copy(fixture(), &path).unwrap();
    let clock = relet::Clock::manual();
    clock.reboot();
    clock.set_wall_by(7 * 86_400_000);
    let store = options().clock(clock.clone()).open(&path).unwrap();
    let [gate] = &store.gates().unwrap()[..] else { panic!("one gate") };
    assert_eq!(
        (gate.name.as_str(), gate.concurrency, gate.burst, gate.slow_start),
        ("api", Some(2), Some(10), Some(1))
    );
    assert_eq!(gate.rate, Some((100, Duration::from_secs(60))));
    let worker = store.worker("caller").unwrap();
    assert!(worker.claim("calls").unwrap().is_none(), "after a restart the bucket is empty");
    clock.advance(Duration::from_secs(1));
    assert_eq!(worker.claim("calls").unwrap().unwrap().payload(), b"limited");
    assert!(worker.claim("calls").unwrap().is_none(), "it opens slowly");
    assert!(worker.claim("paused").unwrap().is_none());
    store.queue("paused").resume().unwrap();
    assert_eq!(worker.claim("paused").unwrap().unwrap().payload(), b"hello");
    assert_eq!(store.run_schedules().unwrap().enqueued, 1);
    let report = worker.claim("reports").unwrap().unwrap();
    assert!(report.payload() == b"report" && report.tick_at().is_some());
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

#[test]
fn the_fixture_is_small_and_has_no_log() {
    let path = fixture();
    assert!(std::fs::metadata(&path).unwrap().len() < 200_000);
    for suffix in ["-wal", "-shm", "-journal"] {
        assert!(!beside(&path, suffix).exists());
    }
    // Bytes 18 and 19 of an SQLite file: 1, not WAL.
    assert_eq!(std::fs::read(&path).unwrap()[18..20], [1, 1]);
}
