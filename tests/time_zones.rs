//! An instant is the same instant in every time zone.
#![cfg(feature = "testing")]

mod support;

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use relet::rusqlite::Connection;
use relet::{Clock, Message, Status, Store};
use support::{Child, Dir, number, part, plain, rows, text};

/// By name, where the system has the zones' data; and spelled out, where it has none.
const ZONES: [&str; 8] = [
    "Asia/Kolkata",
    "America/St_Johns",
    "UTC",
    "America/Chicago",
    "Asia/Tokyo",
    "IST-5:30",
    "<-11>11",
    "CST6CDT,M3.2.0,M11.1.0",
];

/// Plays a role once in each zone, and has it say that the zone was in effect there.
fn in_every_zone(role: &str) {
    for zone in ZONES {
        let dir = Dir::new("zone");
        let child = Child::start_with(role, &[dir.path().to_str().unwrap()], |command| {
            command.env("TZ", zone);
        });
        let said = child.finish();
        assert_eq!(said.len(), 2, "{zone}");
        // The spelled-out ones are in effect everywhere: the test is not one of UTC eight times.
        let expected = match zone {
            "IST-5:30" => Some("5.5"),
            "<-11>11" => Some("-11.0"),
            "UTC" => Some("0.0"),
            _ => None,
        };
        assert!(expected.is_none_or(|hours| said[0] == hours), "{zone}: {said:?}");
        assert_eq!(said[1], "done", "{zone}");
    }
}

/// Hours that local time is ahead of UTC in this process, as SQLite and the C library have it.
fn hours_ahead() -> String {
    let conn = Connection::open_in_memory().unwrap();
    text(
        &conn,
        "SELECT round((julianday('2024-01-15 12:00', 'localtime') - julianday('2024-01-15 12:00')) * 24, 2)
                     || ''",
    )
}

/// A clock that reads this instant.
fn clock_at(wall_ms: i64) -> Clock {
    let clock = Clock::manual();
    clock.set_wall_by(wall_ms - clock.wall_ms());
    assert_eq!(clock.wall_ms(), wall_ms);
    clock
}

fn at(wall_ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(wall_ms.unsigned_abs())
}

/// 2024-03-10 23:59:59.900 UTC: the edge of a day, on the day on which Chicago's clocks jump.
const EDGE: i64 = 1_710_115_199_900;
const HOUR: i64 = 3_600_000;

// B35: deadlines were compared as text of differing shapes.

#[test]
fn due_times_hold_in_every_time_zone() {
    in_every_zone("role_due_times");
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_due_times() {
    let Some(part) = part("role_due_times") else { return };
    part.say(hours_ahead());
    let instants = [EDGE, EDGE - 901, 0, 951_782_400_000, 1_711_846_799_999, 253_402_300_799_999 - 10_000];
    for (n, now) in instants.into_iter().enumerate() {
        let clock = clock_at(now);
        let path = part.path().join(format!("{n}.db"));
        let store = Store::options().clock(clock.clone()).reserve(0).open(&path).unwrap();
        let worker = store.worker("w").unwrap();
        let mail = store.queue("mail");
        // One that is past goes out at once; one in a second waits for it, to the millisecond.
        let past = mail.enqueue(Message::new("past").at(at((now - 1000).max(0)))).unwrap().id();
        let coming = mail.enqueue(Message::new("coming").at(at(now + 1000))).unwrap().id();
        let delayed = mail.enqueue(Message::new("delayed").delay(Duration::from_millis(1001))).unwrap().id();
        let claim = worker.claim("mail").unwrap().unwrap();
        assert_eq!(claim.id(), past, "{now}");
        assert!(worker.claim("mail").unwrap().is_none(), "{now}");
        clock.advance(Duration::from_millis(999));
        assert!(worker.claim("mail").unwrap().is_none(), "{now}: early");
        clock.advance(Duration::from_millis(1));
        assert_eq!(worker.claim("mail").unwrap().expect("it is due").id(), coming, "{now}");
        assert!(worker.claim("mail").unwrap().is_none(), "{now}: early");
        clock.advance(Duration::from_millis(1));
        assert_eq!(worker.claim("mail").unwrap().expect("it is due").id(), delayed, "{now}");
        claim.fail_for("no", Duration::from_secs(1)).unwrap();
        clock.advance(Duration::from_millis(999));
        assert!(worker.claim("mail").unwrap().is_none(), "{now}: early");
        clock.advance(Duration::from_millis(1));
        worker.claim("mail").unwrap().expect("it is due").defer(Duration::from_secs(1)).unwrap();
        clock.advance(Duration::from_millis(999));
        assert!(worker.claim("mail").unwrap().is_none(), "{now}: early");
        clock.advance(Duration::from_millis(1));
        worker.claim("mail").unwrap().expect("it is due").ack().unwrap();
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    }
    part.say("done");
}

/// An instant between two milliseconds is not before its time, either: with 0, 3 and 9 digits of a second.
#[test]
fn a_due_time_between_two_milliseconds_is_not_early() {
    for nanos in [0, 1_000_000, 999_000_000, 1, 500_000, 999_999, 123_456_789, 999_999_999] {
        let clock = clock_at(EDGE);
        let store = Store::options().clock(clock.clone()).open_in_memory().unwrap();
        let worker = store.worker("w").unwrap();
        let due = at(EDGE) + Duration::from_secs(1) + Duration::from_nanos(nanos);
        store.queue("mail").enqueue(Message::new("x").at(due)).unwrap();
        let mut claimed = None;
        while claimed.is_none() {
            clock.advance(Duration::from_millis(1));
            claimed = worker.claim("mail").unwrap();
        }
        let now = at(clock.wall_ms());
        assert!(now >= due, "{nanos} ns: handed out {:?} early", due.duration_since(now).unwrap());
        assert!(now.duration_since(due).unwrap() < Duration::from_millis(1), "{nanos} ns: late");
    }
}

/// A delay that is no whole number of milliseconds is not cut short: a server's Retry-After is never undercut.
#[test]
fn a_delay_between_two_milliseconds_is_not_cut_short() {
    for micros in [1, 999, 1000, 1001, 1_500, 1_000_001] {
        let delay = Duration::from_micros(micros);
        for way in ["enqueue", "fail", "defer"] {
            let clock = clock_at(EDGE);
            let store = Store::options().clock(clock.clone()).open_in_memory().unwrap();
            let worker = store.worker("w").unwrap();
            match way {
                "enqueue" => drop(store.queue("mail").enqueue(Message::new("x").delay(delay)).map(Some).unwrap()),
                _ => {
                    store.queue("mail").enqueue("x").unwrap();
                    let claim = worker.claim("mail").unwrap().unwrap();
                    if way == "fail" { claim.fail_for("429", delay) } else { claim.defer(delay) }.unwrap();
                }
            }
            let mut claimed = worker.claim("mail").unwrap();
            while claimed.is_none() {
                clock.advance(Duration::from_millis(1));
                claimed = worker.claim("mail").unwrap();
            }
            let waited = Duration::from_millis((clock.wall_ms() - EDGE) as u64);
            assert!(waited >= delay, "{way}: {delay:?} became {waited:?}");
            assert!(waited < delay + Duration::from_millis(1), "{way}: {delay:?} became {waited:?}");
        }
    }
}

// B59: a purge by age removed the wrong window, off by the machine's offset from UTC.

#[test]
fn a_purge_by_age_counts_from_the_end_and_is_the_same_in_every_time_zone() {
    in_every_zone("role_purges");
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_purges() {
    let Some(part) = part("role_purges") else { return };
    part.say(hours_ahead());
    let clock = clock_at(EDGE);
    let path = part.path().join("store.db");
    let hour = Duration::from_secs(3600);
    let options = Store::options().clock(clock.clone()).retention(hour).lease(hour * 48).reserve(0);
    let store = options.open(&path).unwrap();
    let worker = store.worker("w").unwrap();
    let mail = store.queue("mail");
    let ids = mail.enqueue_all(["done", "dead", "held", "deferred", "failed", "pending"]).unwrap();
    mail.enqueue(Message::new("delayed").delay(hour * 300)).unwrap();
    // As old as they are, and live.
    let bystanders = "SELECT * FROM relet_messages WHERE status IN (route, 'processing')";

    clock.advance(hour * 10);
    let claims = worker.claim_batch("mail", 5).unwrap();
    clock.advance(hour * 10);
    claims[0].ack().unwrap();
    claims[1].reject("no").unwrap();
    claims[3].defer(hour * 300).unwrap();
    claims[4].fail_for("no", hour * 300).unwrap();
    let ended = EDGE + 20 * HOUR;
    for id in &ids[..2] {
        assert_eq!(store.show(*id).unwrap().unwrap().finished_at, Some(ended));
    }
    let conn = plain(&path);
    let live = rows(&conn, bystanders);
    assert_eq!(live.len(), 5);

    clock.advance(hour / 2);
    assert_eq!((store.prune().unwrap(), store.purge_dead(hour).unwrap()), (0, 0));
    clock.advance(hour / 2 - Duration::from_millis(1));
    assert_eq!((store.prune().unwrap(), store.purge_dead(hour).unwrap()), (0, 0));
    clock.advance(Duration::from_millis(1));
    assert_eq!((store.prune().unwrap(), store.purge_dead(hour).unwrap()), (1, 1));
    clock.advance(Duration::from_secs(60));
    assert_eq!((store.prune().unwrap(), store.purge_dead(hour).unwrap()), (0, 0));
    assert_eq!(rows(&conn, bystanders), live);
    let queue = &store.stats().unwrap().queues[0];
    assert_eq!((queue.count(Status::Done), queue.count(Status::Dead), queue.live()), (0, 0, 5));
    part.say("done");
}

// Storage.

/// Every instant is a whole number, whatever has happened to the message; so is every other column that is compared.
#[test]
fn every_instant_is_stored_as_an_integer() {
    in_every_zone("role_stores_instants");
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_stores_instants() {
    let Some(part) = part("role_stores_instants") else { return };
    part.say(hours_ahead());
    let path = part.path().join("store.db");
    let clock = clock_at(EDGE);
    let hour = Duration::from_secs(3600);
    let store = Store::options().clock(clock.clone()).retention(hour).reserve(0).open(&path).unwrap();
    let worker = store.worker("w").unwrap();
    let mail = store.queue("mail");
    mail.enqueue_all(
        ["done", "dead", "deferred", "failed", "held", "pending"].map(|text| Message::new(text).ttl(hour)),
    )
    .unwrap();
    mail.enqueue(Message::new("delayed").delay(hour)).unwrap();
    mail.enqueue(Message::new("at").at(at(EDGE + 86_400_000) + Duration::from_nanos(123_456_789))).unwrap();
    let claims = worker.claim_batch("mail", 5).unwrap();
    claims[0].ack().unwrap();
    claims[1].reject("no").unwrap();
    claims[2].defer(hour).unwrap();
    claims[3].fail_for("no", hour).unwrap();
    clock.set_wall_by(-HOUR);
    mail.enqueue("before").unwrap();
    are_integers(&path);
    part.say("done");
}

fn are_integers(path: &Path) {
    let conn = plain(path);
    let mut instants = 0;
    for table in ["messages", "details", "finished", "retry_queue", "workers", "queues"] {
        let columns: Vec<String> = {
            let mut statement = conn.prepare("SELECT name FROM pragma_table_info(?1)").unwrap();
            let names = statement.query_map([format!("relet_{table}")], |row| row.get(0)).unwrap();
            names.map(Result::unwrap).collect()
        };
        for column in columns.iter().filter(|name| name.ends_with("_at") || name.starts_with("lease_")) {
            let types =
                rows(&conn, &format!("SELECT DISTINCT typeof({column}) FROM relet_{table} WHERE {column} IS NOT NULL"));
            let seen = types.iter().all(|kind| kind == &rows(&conn, "SELECT 'integer'")[0]);
            assert!(seen, "{table}.{column}: {types:?}");
            instants += types.len();
        }
    }
    // due, claimed, enqueued, lease_ms; expires; finished; due; started.
    assert_eq!(instants, 8, "each of them was seen with a value");
    assert_eq!(number(&conn, "SELECT min(enqueued_at) FROM relet_messages"), EDGE);
}
