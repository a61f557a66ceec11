//! Damage is met, not multiplied: one row or counter that is wrong neither blocks nor fails what is healthy, `doctor` sees it,
//! and `repair` mends it without losing a message.
#![cfg(feature = "testing")]

mod common;

use std::time::Duration;

use common::{Folder, HOUR};
use relet::rusqlite::Connection;
use relet::rusqlite::config::DbConfig;
use relet::{CatchUp, Clock, Message, Options, Status, Store};

/// A connection that may write what no store would.
fn vandal(folder: &Folder) -> Connection {
    let conn = Connection::open(folder.file()).unwrap();
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, false).unwrap();
    conn.execute_batch("PRAGMA ignore_check_constraints = ON; PRAGMA busy_timeout = 5000").unwrap();
    conn
}

fn open(folder: &Folder, clock: &Clock) -> Store {
    Store::options().clock(clock.clone()).reserve(0).open(folder.file()).unwrap()
}

#[test]
fn a_row_that_cannot_be_read_becomes_a_dead_letter_and_the_others_go_on() {
    for damage in [
        "attempts = 8589934592",
        "attempts = -1",
        "crashes = -5",
        "max_attempts = 99999999999",
        "status = 'lost'",
        "route = 'nowhere'",
        "priority = 99999999999",
        "payload_crc = -1",
    ] {
        let (folder, clock) = (Folder::new(), Clock::manual());
        let store = open(&folder, &clock);
        let mail = store.queue("mail");
        mail.enqueue_all(["bad", "good", "better"]).unwrap();
        vandal(&folder).execute_batch(&format!("UPDATE relet_messages SET {damage} WHERE id = 1")).unwrap();
        let worker = store.worker("w").unwrap();
        let claims = worker.claim_batch("mail", 5).unwrap();
        let payloads: Vec<_> = claims.iter().map(|claim| claim.payload().to_vec()).collect();
        assert_eq!(payloads, [b"good".to_vec(), b"better".to_vec()], "{damage}");
        for claim in claims {
            claim.ack().unwrap();
        }
        let dead = store.show(1).unwrap().unwrap();
        assert_eq!(dead.status, Status::Dead, "{damage}");
        assert!(dead.dead_reason.unwrap().starts_with("cannot be read: "), "{damage}");
        let found = store.doctor().unwrap();
        // What its checksum was is lost.
        assert!(found.iter().all(|found| found.contains("checksum") && damage.contains("crc")), "{damage}: {found:?}");
    }
}

#[test]
fn a_row_that_cannot_be_read_stops_no_look_by_id_and_no_cancel_of_another() {
    let (folder, clock) = (Folder::new(), Clock::manual());
    let store = open(&folder, &clock);
    let mail = store.queue("mail");
    mail.enqueue_all(["bad", "good"]).unwrap();
    vandal(&folder).execute_batch("UPDATE relet_messages SET attempts = 8589934592 WHERE id = 1").unwrap();
    store.cancel(2).unwrap();
    assert!(store.cancel(1).is_err(), "it is set aside as a dead letter, which cannot be cancelled");
    assert_eq!(store.show(1).unwrap().unwrap().status, Status::Dead);
}

#[test]
fn what_stands_in_a_line_that_its_status_does_not_fit_blocks_nobody() {
    for damage in ["status = 'done'", "status = 'dead'", "status = 'cancelled'", "line = -1, place = 0", "line = -7"] {
        let (folder, clock) = (Folder::new(), Clock::manual());
        let store = open(&folder, &clock);
        store.queue("mail").enqueue_all(["bad", "good"]).unwrap();
        vandal(&folder).execute_batch(&format!("UPDATE relet_messages SET {damage} WHERE id = 1")).unwrap();
        let worker = store.worker("w").unwrap();
        let claims = worker.claim_batch("mail", 5).unwrap();
        assert!(claims.iter().any(|claim| claim.payload() == b"good"), "{damage}");
    }
}

#[test]
fn a_row_of_the_retry_queue_without_its_message_lets_claims_end() {
    for row in ["(1, 77, NULL, 0, 0, NULL, 0, NULL, 0)", "(1, 77, 'x', 0, 0, 0, 0, 'gone', 1)"] {
        let (folder, clock) = (Folder::new(), Clock::manual());
        let store = open(&folder, &clock);
        store.queue("mail").enqueue("good").unwrap();
        vandal(&folder).execute_batch(&format!("INSERT INTO relet_retry_queue VALUES {row}")).unwrap();
        let worker = store.worker("w").unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(worker.claim("mail").unwrap().map(|claim| claim.id().get())));
        assert_eq!(told.recv_timeout(Duration::from_secs(60)).expect("the claim ends"), Some(1), "{row}");
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new(), "{row}");
    }
}

#[test]
fn counters_that_are_wrong_or_not_there_are_counted_again_and_fail_nobody() {
    for damage in [
        "UPDATE relet_counters SET pending = 0 WHERE queue = 1",
        "DELETE FROM relet_counters WHERE queue = 1",
        "UPDATE relet_counters SET acked = 9223372036854775807 WHERE queue = 1",
    ] {
        let (folder, clock) = (Folder::new(), Clock::manual());
        let store = open(&folder, &clock);
        store.queue("mail").enqueue_all(["a", "b"]).unwrap();
        vandal(&folder).execute_batch(damage).unwrap();
        let worker = store.worker("w").unwrap();
        for _ in 0..2 {
            common::next(&worker, "mail").ack().unwrap();
        }
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new(), "{damage}");
        store.queue("mail").enqueue(Message::new("c").delay(HOUR)).unwrap();
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new(), "{damage}");
    }
}

/// A store with something of everything.
fn zoo(store: &Store) {
    let mail = store.queue("mail");
    let worker = store.worker("w").unwrap();
    for n in 0..4 {
        mail.enqueue(Message::new(vec![n; 10])).unwrap(); // 1 to 4
    }
    mail.enqueue(Message::new(vec![7; 5000]).key("k").group("g").ttl(HOUR)).unwrap(); // 5
    mail.enqueue(Message::new("second of the group").group("g")).unwrap(); // 6
    mail.enqueue(Message::new("later").delay(HOUR)).unwrap(); // 7
    mail.enqueue(Message::new("gated").gate("api")).unwrap(); // 8
    store.schedule("tick").set(HOUR, "mail", "tick", CatchUp::One).unwrap();
    store.queue("other").enqueue("innocent").unwrap(); // 9
    common::next(&worker, "mail").reject("no").unwrap(); // 1 is dead
    common::next(&worker, "mail").defer(HOUR).unwrap(); // 2 is deferred
    store.cancel(3).unwrap(); // 3 is cancelled
    drop(worker.claim("mail").unwrap().unwrap()); // 4 is held
}

/// What is done to the file, and what the doctor says to that. All of it can be repaired.
const DAMAGES: &[(&str, &str)] = &[
    ("UPDATE relet_counters SET pending = 99 WHERE queue = 1", "its counters differ"),
    ("UPDATE relet_counters SET dead = 0 WHERE queue = 1", "its counters differ"),
    ("UPDATE relet_counters SET retrying = 7 WHERE queue = 1", "its counters differ"),
    ("DELETE FROM relet_counters WHERE queue = 1", "its counters differ"),
    ("DELETE FROM relet_counters WHERE queue = 0", "the counter of its ids"),
    ("UPDATE relet_counters SET last_id = 1 WHERE queue = 0", "has not been given out"),
    ("UPDATE relet_counters SET acked = -4 WHERE queue = 1", "what was acked is below zero"),
    ("INSERT INTO relet_counters (queue) VALUES (77)", "counters are left of queue 77"),
    ("DELETE FROM relet_queues WHERE name = 'mail'", "belongs to no queue"),
    ("UPDATE relet_queues SET gated = 0", "has messages with a gate"),
    ("UPDATE relet_queues SET gated = 7", "a setting of it"),
    ("UPDATE relet_queues SET ageing_ms = -1", "a setting of it"),
    ("UPDATE relet_queues SET max_attempts = 99999999999", "a setting of it"),
    ("UPDATE relet_queues SET lease_ms = -5", "a setting of it"),
    ("UPDATE relet_queues SET paused_until = 999999999999999999", "is paused until"),
    ("UPDATE relet_queues SET retry = 'no json'", "its backoff is no JSON"),
    ("UPDATE relet_queues SET gate = 77", "has a gate that there is not"),
    ("UPDATE relet_gates SET slots = -1", "a limit of it"),
    ("UPDATE relet_gates SET rate = 5", "a limit of it"),
    ("UPDATE relet_gates SET closed_until = -1", "is closed until"),
    ("DELETE FROM relet_gates", "passes a gate that there is not"),
    ("UPDATE relet_messages SET attempts = 8589934592 WHERE id = 8", "cannot be read"),
    ("UPDATE relet_messages SET attempts = -1 WHERE id = 8", "below zero"),
    ("UPDATE relet_messages SET crashes = -1 WHERE id = 8", "below zero"),
    ("UPDATE relet_messages SET status = 'lost' WHERE id = 8", "which it cannot have"),
    ("UPDATE relet_messages SET route = 'nowhere' WHERE id = 8", "which there is not"),
    ("UPDATE relet_messages SET status = 'queued' WHERE id = 8", "which it cannot have"),
    ("UPDATE relet_messages SET status = 'done' WHERE id = 8", "is finished, and it is not known when"),
    ("UPDATE relet_messages SET worker_id = NULL WHERE id = 4", "without a worker"),
    ("UPDATE relet_messages SET worker_id = 'x' WHERE id = 8", "without being so"),
    ("UPDATE relet_messages SET incarnation = 99999 WHERE id = 4", "is of a start of its worker"),
    ("UPDATE relet_messages SET incarnation = NULL WHERE id = 4", "do not agree"),
    ("UPDATE relet_messages SET lease_ms = NULL WHERE id = 4", "do not agree"),
    ("UPDATE relet_messages SET lease_ms = -1 WHERE id = 4", "shorter than a millisecond"),
    ("UPDATE relet_messages SET place = 8640000000000000 WHERE id = 4", "ends later than its own length"),
    ("UPDATE relet_messages SET place = NULL WHERE id = 4", "do not agree"),
    ("UPDATE relet_messages SET line = 0 WHERE id = 4", "stands in a line, and cannot be claimed"),
    ("UPDATE relet_messages SET line = NULL WHERE id = 8", "another place in its line"),
    ("UPDATE relet_messages SET line = NULL, place = NULL WHERE id = 8", "waits for nothing"),
    ("UPDATE relet_messages SET line = -9 WHERE id = 8", "a line that there is not"),
    ("UPDATE relet_messages SET line = 2 WHERE id = 8", "a line that is not its own"),
    ("UPDATE relet_messages SET place = 7 WHERE id = 8", "another place in its line"),
    ("UPDATE relet_messages SET line = 0, place = 0 WHERE id = 6", "before its turn"),
    ("UPDATE relet_messages SET token = -1 WHERE id = 8", "below zero"),
    ("UPDATE relet_messages SET epoch = 999999 WHERE id = 8", "has not come to"),
    ("UPDATE relet_messages SET enqueued_at = -7 WHERE id = 8", "an instant before 1970"),
    ("UPDATE relet_messages SET due_at = 999999999999999999 WHERE id = 7", "an instant before 1970"),
    ("UPDATE relet_messages SET extras = extras | 64 WHERE id = 8", "that is not known"),
    ("UPDATE relet_messages SET extras = 0 WHERE id = 8", "details are left"),
    ("UPDATE relet_messages SET extras = 1 WHERE id = 4", "has lost its details"),
    ("UPDATE relet_messages SET extras = 1 WHERE id = 5", "has lost its payload"),
    ("DELETE FROM relet_details WHERE message = 8", "has lost its details"),
    ("INSERT INTO relet_details (message) VALUES (777)", "details are left of message 777"),
    ("INSERT INTO relet_payloads VALUES (777, x'00')", "a payload is left of message 777"),
    ("UPDATE relet_details SET deferrals = -1 WHERE message = 2", "cannot be read"),
    ("UPDATE relet_details SET retry = '{' WHERE message = 8", "its backoff is no JSON"),
    ("UPDATE relet_details SET expires_at = -1 WHERE message = 5", "a tick or a time to live"),
    ("UPDATE relet_details SET gate = 77 WHERE message = 8", "passes a gate that there is not"),
    ("DELETE FROM relet_keys", "a key that is not kept"),
    ("INSERT INTO relet_keys VALUES (1, 'x', 777)", "a key is left"),
    ("DELETE FROM relet_groups WHERE message = 6", "is in no group"),
    ("INSERT INTO relet_groups VALUES (1, 'x', 777, 1)", "a place in a group is left"),
    ("UPDATE relet_groups SET turn = 0", "nobody has its turn"),
    ("UPDATE relet_groups SET turn = 7 WHERE message = 6", "neither had nor waited for"),
    (
        "UPDATE relet_groups SET turn = 0 WHERE message = 5; UPDATE relet_groups SET turn = 1 WHERE message = 6",
        "before a smaller one",
    ),
    ("INSERT INTO relet_passed VALUES (1, 777)", "a place at a gate is left"),
    ("INSERT INTO relet_passed VALUES (1, 8)", "holds a place at its gate"),
    ("DELETE FROM relet_expiry", "a time to live that does not run"),
    ("INSERT INTO relet_expiry VALUES (5, 777)", "a time to live is left"),
    ("DELETE FROM relet_retry_queue WHERE message = 2", "deferred, but not in the retry queue"),
    ("DELETE FROM relet_retry_queue WHERE message = 7", "waits for nothing"),
    ("INSERT INTO relet_retry_queue (queue, message, due_at) VALUES (1, 777, 5)", "does not wait for a retry"),
    ("INSERT INTO relet_retry_queue (queue, message, due_at) VALUES (1, 8, 5)", "does not wait for a retry"),
    ("UPDATE relet_retry_queue SET due_at = 5 WHERE message = 7", "does not wait for a retry"),
    ("UPDATE relet_retry_queue SET behind = 1 WHERE message = 7", "waits behind its group"),
    ("UPDATE relet_retry_queue SET kept_until = NULL", "says what cannot be"),
    ("UPDATE relet_retry_queue SET count = -1", "says what cannot be"),
    ("DELETE FROM relet_finished WHERE message = 1", "it is not known when"),
    ("INSERT INTO relet_finished VALUES (777, 'dead', 5, NULL)", "an end is left"),
    ("UPDATE relet_finished SET keep_until = 5 WHERE message = 1", "is kept for ever"),
    ("UPDATE relet_finished SET finished_at = -1 WHERE message = 1", "has ended before 1970"),
    ("DELETE FROM relet_meta WHERE key = 'epoch'", "has no \"epoch\""),
    ("UPDATE relet_meta SET value = 'x' WHERE key = 'epoch'", "\"epoch\" is"),
    ("DELETE FROM relet_meta WHERE key = 'store_id'", "has no \"store_id\""),
    ("DELETE FROM relet_meta WHERE key = 'boot_id'", "has no \"boot_id\""),
    ("UPDATE relet_meta SET value = 5 WHERE key = 'boot_id'", "\"boot_id\" is"),
    ("DELETE FROM relet_meta WHERE key = 'boot_mark'", "has no \"boot_mark\""),
    ("DELETE FROM relet_meta WHERE key = 'touched'", "has no \"touched\""),
    ("DELETE FROM relet_meta WHERE key = 'incarnation'", "is of a start of its worker"),
    ("UPDATE relet_meta SET value = 'x' WHERE key = 'owned'", "\"owned\" is"),
    ("DROP INDEX relet_lines", "the index relet_lines is missing"),
    ("DROP INDEX relet_turns", "the index relet_turns is missing"),
    ("DROP TABLE relet_passed", "the table relet_passed is missing"),
];

/// What is told, and beyond repair: it is not known what was there, or it is not relet's.
const BEYOND: &[(&str, &str)] = &[
    ("UPDATE relet_messages SET payload = x'00' WHERE id = 4", "does not match its checksum"),
    ("DELETE FROM relet_payloads", "has lost its payload"),
    ("UPDATE relet_schedules SET options = 'no json'", "its options are no JSON"),
    ("UPDATE relet_schedules SET every_ms = -1", "a setting of it"),
    ("UPDATE relet_schedules SET next_at = -1", "has a tick before 1970"),
    ("CREATE TRIGGER mine AFTER INSERT ON relet_messages BEGIN SELECT 1; END", "the trigger mine is not relet's"),
    ("CREATE INDEX mine ON relet_messages (route)", "the index mine is not relet's"),
];

fn options(clock: &Clock) -> Options {
    Store::options().clock(clock.clone()).reserve(0)
}

fn damaged(damage: &str, clock: &Clock) -> Folder {
    let folder = Folder::new();
    zoo(&open(&folder, clock));
    assert_eq!(open(&folder, clock).doctor().unwrap(), Vec::<String>::new(), "a healthy store has no finding");
    vandal(&folder).execute_batch(damage).unwrap_or_else(|error| panic!("{damage}: {error}"));
    folder
}

fn sees(folder: &Folder, clock: &Clock) -> Vec<String> {
    options(clock)
        .open_read_only(folder.file())
        .and_then(|store| store.doctor())
        .unwrap_or_else(|error| vec![error.to_string()])
}

fn messages(folder: &Folder) -> i64 {
    vandal(folder).query_row("SELECT count(*) FROM relet_messages", [], |row| row.get(0)).unwrap()
}

#[test]
fn each_damage_is_seen_and_repaired_and_no_message_is_lost() {
    let mut wrong = Vec::new();
    for (damage, finding) in DAMAGES {
        let clock = Clock::manual();
        let folder = damaged(damage, &clock);
        let found = sees(&folder, &clock);
        if !found.iter().any(|found| found.contains(finding)) {
            wrong.push(format!("{damage}: the doctor says {found:?}"));
        }
        match options(&clock).repair(folder.file()) {
            Ok(repaired) if repaired.left.is_empty() && sees(&folder, &clock).is_empty() => {}
            other => wrong.push(format!("{damage}: repaired {other:?}")),
        }
        if messages(&folder) != 9 {
            wrong.push(format!("{damage}: there are {} messages", messages(&folder)));
        }
        let claimed = options(&clock).open(folder.file()).and_then(|store| store.worker("later")?.claim("other"));
        if !matches!(&claimed, Ok(Some(claim)) if claim.payload() == b"innocent") {
            wrong.push(format!("{damage}: afterwards {claimed:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_is_beyond_repair_is_told_before_and_after() {
    for (damage, finding) in BEYOND {
        let clock = Clock::manual();
        let folder = damaged(damage, &clock);
        let found = sees(&folder, &clock);
        assert!(found.iter().any(|found| found.contains(finding)), "{damage}: {found:?}");
        let left = options(&clock).repair(folder.file()).unwrap().left;
        assert!(left.iter().any(|left| left.contains(finding)), "{damage}: {left:?}");
        assert_eq!(messages(&folder), 9, "{damage}");
    }
}

#[test]
fn no_damage_makes_a_claim_of_something_else_spin() {
    for (damage, _) in DAMAGES.iter().chain(BEYOND) {
        let clock = Clock::manual();
        let folder = damaged(damage, &clock);
        clock.advance(2 * HOUR);
        let (tell, told) = std::sync::mpsc::channel();
        let (file, options) = (folder.file(), options(&clock));
        std::thread::spawn(move || {
            // It may fail, in words; it may not go on for ever.
            let _ = options.open(file).and_then(|store| {
                let worker = store.worker("x")?;
                let _ = worker.claim_batch("mail", 100);
                worker.claim("other")
            });
            let _ = tell.send(());
        });
        assert!(told.recv_timeout(Duration::from_secs(60)).is_ok(), "{damage}");
    }
}
