//! What is exported is what is imported: every field of every message, byte by byte; and what cannot be read is named by its line.
#![cfg(feature = "cli")]

mod command;

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use command::{Place, run};
use relet::rusqlite::Connection;
use relet::{Filter, INSTANT_MAX, Message, PAGE_MAX, PRIORITY_RANGE, Retry, Route, Snapshot, Status, Store};
use serde_json::Value;

fn all(store: &Store) -> Vec<Snapshot> {
    store.list(&Filter::new().limit(PAGE_MAX).payload(true)).unwrap()
}

/// What is carried of it: all but its id, and who holds it.
fn carried(message: &Snapshot) -> Snapshot {
    let mut carried = message.clone();
    carried.id = 0.into();
    (carried.worker, carried.receipt, carried.lease_left, carried.claimed_at) = (None, None, None, None);
    if carried.status == Status::Processing {
        carried.status = carried.route.into();
    }
    carried
}

#[track_caller]
fn same(here: &Store, there: &Store) {
    let wanted: Vec<_> =
        all(here).iter().filter(|m| m.status.is_live() || m.status == Status::Dead).map(carried).collect();
    let found: Vec<_> = all(there).iter().map(carried).collect();
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(found, wanted);
    }
    assert_eq!(there.doctor().unwrap(), Vec::<String>::new());
}

/// Exports one store, and imports that into a new one.
fn through(place: &Place) -> Place {
    let exported = place.ok("export");
    let other = Place::new();
    let imported = other.run_with(["import"], &exported.out);
    assert_eq!(imported.code, 0, "{}", imported.err);
    other
}

#[allow(clippy::disallowed_methods, reason = "instants that are hours from now are those of this machine")]
fn now() -> SystemTime {
    SystemTime::now()
}

fn now_ms() -> i64 {
    now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as i64
}

const HOUR: i64 = 3_600_000;

/// A message of which everything is arbitrary.
fn arbitrary(rng: &mut fastrand::Rng, number: usize) -> Snapshot {
    fn text(rng: &mut fastrand::Rng) -> String {
        let pool = ['a', 'é', '𝄞', '"', '\\', '/', ' ', '\u{7f}', '\u{2028}'];
        (0..rng.usize(1..12)).map(|_| pool[rng.usize(..pool.len() - 2)]).collect()
    }
    fn maybe<T>(rng: &mut fastrand::Rng, make: impl FnOnce(&mut fastrand::Rng) -> T) -> Option<T> {
        if rng.bool() { Some(make(rng)) } else { None }
    }
    let now = now_ms();
    let mut message = Snapshot::new(["mail", "post", "a b"][rng.usize(..3)]);
    message.route = Route::ALL[rng.usize(..4)];
    message.status = if rng.u8(..3) == 0 { Status::Dead } else { message.route.into() };
    let is_live = message.status.is_live();
    message.priority = rng.i32(PRIORITY_RANGE);
    message.key = maybe(rng, |rng| format!("{}-{number}", text(rng)));
    message.group = maybe(rng, |rng| format!("g{}", rng.u8(..3)));
    message.gate = maybe(rng, |rng| format!("gate {}", rng.u8(..2)));
    message.tick_at = maybe(rng, |rng| rng.i64(0..=INSTANT_MAX));
    if is_live {
        message.due_at = maybe(rng, |rng| {
            let later = rng.i64(now + HOUR..INSTANT_MAX);
            [later, rng.i64(0..now - HOUR), INSTANT_MAX][rng.usize(..3)]
        });
        if message.due_at.is_some_and(|due_at| due_at > now) {
            message.due_on_wall = rng.bool();
            message.wait_reason = maybe(rng, text).filter(|_| !message.due_on_wall);
            message.wait_count = if message.wait_reason.is_some() { rng.u32(..1_000) } else { 0 };
        }
    } else {
        message.finished_at = Some(rng.i64(0..now));
        message.dead_reason = maybe(rng, text);
    }
    message.expires_at = maybe(rng, |rng| rng.i64(now + HOUR..=INSTANT_MAX));
    message.attempts = rng.u32(..100);
    message.crashes = rng.u32(..3);
    message.deferrals = rng.u32(..2) * rng.u32(..1_000);
    message.releases = rng.u32(..2) * rng.u32(..1_000);
    message.redrives = rng.u32(..2) * rng.u32(..1_000);
    message.max_attempts = rng.u32(1..=i32::MAX as u32);
    message.max_deferrals = if rng.bool() { 1_000 } else { rng.u32(1..=i32::MAX as u32) };
    message.retry = maybe(rng, |rng| {
        let longest = Duration::new(rng.u64(..), rng.u32(..1_000_000_000));
        Retry::exponential(Duration::from_nanos(rng.u64(..)), longest).factor(1.0 + rng.f64() * 9.0).jitter(rng.f64())
    });
    message.last_error = maybe(rng, text);
    message.enqueued_at = rng.i64(0..now);
    let bytes = [0, 1, 20, 2_048, 2_049, 70_000][rng.usize(..6)];
    message.payload = Some(match rng.bool() {
        true => (0..bytes).map(|_| rng.u8(..)).collect(),
        false => (0..bytes).map(|_| rng.u8(..0x80)).collect(),
    });
    message
}

#[test]
fn every_field_of_every_message_comes_through() {
    for seed in [1, 20, 300] {
        let mut rng = fastrand::Rng::with_seed(seed);
        let messages: Vec<_> = (0..200).map(|number| arbitrary(&mut rng, number)).collect();
        let place = Place::new();
        let store = place.store();
        store.import(messages.clone()).unwrap();
        // The library alone gives back what it was given.
        for (wanted, found) in messages.iter().zip(all(&store)) {
            let mut wanted = wanted.clone();
            let payload = wanted.payload.as_deref().unwrap();
            (wanted.payload_bytes, wanted.payload_crc) = (payload.len(), crc32fast::hash(payload));
            assert_eq!(carried(&found), wanted, "seed {seed}");
        }
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
        same(&store, &through(&place).store());
    }
}

#[test]
fn what_a_life_leaves_behind_comes_through() {
    let place = Place::new();
    let store = place.store();
    let queue = store.queue("mail");
    queue
        .enqueue_all(
            (0..9).map(|n| Message::new(format!("{n}")).group("g").retry(Retry::fixed(Duration::from_secs(9_999)))),
        )
        .unwrap();
    let post = store.queue("post");
    let hour = Duration::from_secs(3_600);
    post.enqueue(Message::new("later").at(now() + hour)).unwrap();
    post.enqueue(Message::new("after").delay(hour)).unwrap();
    post.enqueue_all(["held", "deferred", "released", "failed", "dead", "again"]).unwrap();
    let worker = store.worker("w").unwrap();
    worker.claim("mail").unwrap().unwrap().fail("no route").unwrap();
    let claims: Vec<_> = worker.claim_batch("post", 6).unwrap();
    let [held, deferred, released, failed, dead, again] = claims.try_into().unwrap();
    deferred.defer_because(hour, "429").unwrap();
    released.release().unwrap();
    failed.fail_for("no", hour).unwrap();
    dead.reject("never").unwrap();
    let id = again.id();
    again.reject("not yet").unwrap();
    store.redrive(id).unwrap();
    let other = through(&place);
    same(&store, &other.store());
    let there = other.store();
    assert_eq!(there.retry_queue(None, 10).unwrap().len(), 3, "the failed ones, and what was deferred");
    let status = |payload: &str| {
        all(&there).into_iter().find(|m| m.payload.as_deref() == Some(payload.as_bytes())).unwrap().status
    };
    assert_eq!((status("held"), status("dead")), (Status::Pending, Status::Dead));
    drop(held);
}

/// Every column of the schema is either in the export, or left out on purpose.
#[test]
fn no_column_is_forgotten() {
    const TABLES: [(&str, &str); 13] = [
        ("relet_meta", "the store's own"),
        ("relet_queues", "settings, of which only the name is carried"),
        ("relet_counters", "counted again"),
        ("relet_gates", "settings, of which only the name is carried"),
        ("relet_schedules", "settings"),
        ("relet_payloads", "the payload"),
        ("relet_keys", "follows from the messages"),
        ("relet_groups", "follows from the messages"),
        ("relet_passed", "follows from who holds them"),
        ("relet_expiry", "follows from the messages"),
        ("relet_workers", "who runs here"),
        ("relet_ended", "who ran here"),
        ("sqlite_sequence", "SQLite's own"),
    ];
    const LEFT_OUT: [(&str, &str); 18] = [
        ("relet_messages.line", "follows from the rest"),
        ("relet_messages.place", "follows from the rest"),
        ("relet_messages.extras", "follows from the rest"),
        ("relet_messages.worker_id", "holders are not carried"),
        ("relet_messages.incarnation", "holders are not carried"),
        ("relet_messages.lease_ms", "holders are not carried"),
        ("relet_messages.claimed_at", "holders are not carried"),
        ("relet_messages.token", "receipts are not carried"),
        ("relet_messages.epoch", "receipts are not carried"),
        ("relet_messages.payload_crc", "follows from the payload"),
        ("relet_retry_queue.worker_id", "holders are not carried"),
        ("relet_retry_queue.kept_until", "holders are not carried"),
        ("relet_retry_queue.behind", "follows from the group"),
        ("relet_retry_queue.queue", "the message's"),
        ("relet_retry_queue.message", "the message's"),
        ("relet_retry_queue.due_at", "the message's"),
        ("relet_finished.keep_until", "dead letters have none"),
        ("relet_finished.status", "the message's"),
    ];
    const CARRIED: [(&str, &str); 30] = [
        ("relet_messages.id", "id"),
        ("relet_messages.queue", "queue"),
        ("relet_messages.status", "status"),
        ("relet_messages.route", "route"),
        ("relet_messages.priority", "priority"),
        ("relet_messages.due_at", "due_at"),
        ("relet_messages.attempts", "attempts"),
        ("relet_messages.crashes", "crashes"),
        ("relet_messages.max_attempts", "max_attempts"),
        ("relet_messages.enqueued_at", "enqueued_at"),
        ("relet_messages.payload", "payload"),
        ("relet_details.message", "id"),
        ("relet_details.key", "key"),
        ("relet_details.group_key", "group"),
        ("relet_details.gate", "gate"),
        ("relet_details.tick_at", "tick_at"),
        ("relet_details.expires_at", "expires_at"),
        ("relet_details.max_deferrals", "max_deferrals"),
        ("relet_details.retry", "retry"),
        ("relet_details.deferrals", "deferrals"),
        ("relet_details.releases", "releases"),
        ("relet_details.redrives", "redrives"),
        ("relet_details.last_error", "last_error"),
        ("relet_details.dead_reason", "dead_reason"),
        ("relet_retry_queue.on_wall", "due_on_wall"),
        ("relet_retry_queue.reason", "wait_reason"),
        ("relet_retry_queue.count", "wait_count"),
        ("relet_finished.message", "id"),
        ("relet_finished.finished_at", "finished_at"),
        ("", "payload"),
    ];
    let place = Place::new();
    place.ok("enqueue mail x");
    let row = place.ok("export").json().remove(0);
    let members: BTreeSet<_> = row.as_object().unwrap().keys().cloned().collect();
    let named: BTreeSet<_> = CARRIED.iter().map(|(_, member)| (*member).to_owned()).collect();
    assert_eq!(members, named, "the members of an exported line are those of this list");
    let conn = Connection::open(place.db()).unwrap();
    let sql = "SELECT m.name, t.name FROM sqlite_schema m JOIN pragma_table_info(m.name) t WHERE m.type = 'table'";
    let mut statement = conn.prepare(sql).unwrap();
    let rows = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))).unwrap();
    let mut columns = BTreeSet::new();
    for (table, column) in rows.map(Result::unwrap) {
        if !TABLES.iter().any(|(left_out, _)| *left_out == table) {
            columns.insert(format!("{table}.{column}"));
        }
    }
    let known: BTreeSet<_> =
        LEFT_OUT.iter().chain(&CARRIED).map(|(name, _)| (*name).to_owned()).filter(|name| !name.is_empty()).collect();
    assert_eq!(columns, known, "a column is to be exported, or to be left out on purpose");
}

#[test]
fn a_payload_that_is_json_is_taken_byte_by_byte() {
    for payload in [
        "18446744073709551616",
        "1.10",
        "1e999",
        "-0",
        "null",
        "true",
        "[1,  2]",
        r#"{"b":1,"a":2,"b":3}"#,
        r#"{"n":123456789012345678901234567890.5000}"#,
        r#"{ "\u0061" : "\/" }"#,
    ] {
        let place = Place::new();
        let line = format!("{{\"queue\":\"q\",\"payload\":{payload}}}\n");
        assert_eq!(place.run_with(["import"], line.as_bytes()).code, 0, "{payload}");
        assert_eq!(place.store().show(1).unwrap().unwrap().payload.unwrap(), payload.as_bytes());
        assert_eq!(through(&place).store().show(1).unwrap().unwrap().payload.unwrap(), payload.as_bytes());
    }
}

#[test]
fn what_a_line_may_not_say_is_named_and_refuses_that_line_alone() {
    for (line, because) in [
        (r#"{"queue":"q","payload":"x","prioritty":3}"#, "unknown field `prioritty`"),
        (r#"{"queue":"q","payload":"x","queue":"r"}"#, "duplicate field `queue`"),
        (r#"{"queue":"q","payload":"x","payload":"y"}"#, "duplicate field `payload`"),
        (r#"{"queue":"q","payload":"x","payload_base64":"eA=="}"#, "more than once"),
        (r#"{"queue":"q"}"#, "neither payload nor payload_base64"),
        (r#"{"payload":"x"}"#, "missing field `queue`"),
        (r#"{"queue":"q","payload":"\ud800"}"#, "its payload cannot be read"),
        (r#"{"queue":"q","payload":"x","status":"done"}"#, "done or cancelled"),
        (r#"{"queue":"q","payload":"x","status":"queued","route":"pending"}"#, "leave one out"),
        (r#"{"queue":"q","payload":"x","due_at":-1}"#, "due_at -1 is out of range; use 0 to 253402300799999"),
        (r#"{"queue":"q","payload":"x","attempts":4294967295}"#, "attempts 4294967295 is out of range"),
        (r#"{"queue":"q","payload_pieces":1}"#, "belong together"),
        (r#"{"piece":1,"payload_base64":"eA=="}"#, "not the next one of the message before it"),
    ] {
        let place = Place::new();
        let good = "{\"queue\":\"q\",\"payload\":\"good\"}\n";
        let ran = place.run_with(["import"], format!("{good}{line}\n{good}").as_bytes());
        assert_eq!(ran.code, 1, "{line}");
        assert!(ran.err.contains("line 2: ") && ran.err.contains(because), "{line}: {}", ran.err);
        assert!(ran.err.lines().all(|line| line.len() < 300), "{}", ran.err);
        assert_eq!(all(&place.store()).len(), 2, "{line}");
    }
}

/// H4: such a payload was exported, and could not be imported; a line of it does not fit into memory twice.
#[test]
fn large_payloads_come_through_in_pieces() {
    let place = Place::new();
    let store = Store::options().payload_max(40 << 20).open(place.db()).unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    for bytes in [1 << 20, (1 << 20) + 1, 2 << 20, 20 << 20] {
        let payload: Vec<u8> = (0..bytes).map(|_| rng.u8(..)).collect();
        store.queue("scans").enqueue(Message::new(payload).key(bytes.to_string())).unwrap();
    }
    let exported = place.ok("export");
    assert!(exported.out.split(|byte| *byte == b'\n').all(|line| line.len() < 2 << 20));
    let other = Place::new();
    let imported = other.run_with(["import"], &exported.out);
    assert_eq!(imported.code, 0, "{}", imported.err);
    same(&store, &other.store());

    // One that is missing, cut, changed or out of its order refuses its message, and no other.
    let text = exported.text();
    let lines: Vec<&str> = text.lines().collect();
    let head = lines.iter().position(|line| line.contains("\"payload_pieces\":2")).unwrap();
    let first = &lines[head + 1];
    let changed = first.replacen("AA", "AB", 1).replacen("//", "/+", 1);
    let zeros = format!("{{\"piece\":1,\"payload_base64\":\"{}\"}}", "A".repeat(1 << 20));
    for (name, spoiled) in [
        ("missing", vec![lines[head], lines[head + 2]]),
        ("none", vec![lines[head]]),
        ("swapped", vec![lines[head], lines[head + 2], lines[head + 1]]),
        ("changed", vec![lines[head], if changed == *first { &zeros } else { &changed }, lines[head + 2]]),
        ("cut", vec![lines[head], &lines[head + 1][..1_000], lines[head + 2]]),
    ] {
        let after = "{\"queue\":\"q\",\"payload\":\"after\"}";
        let place = Place::new();
        let ran = place.run_with(["import"], [spoiled.join("\n").as_str(), after].join("\n").as_bytes());
        assert_eq!(ran.code, 1, "{name}: {}", ran.err);
        assert!(ran.err.contains("line 1: ") && ran.err.contains("1 line refused"), "{name}: {}", ran.err);
        let stored = all(&place.store());
        assert_eq!(stored.len(), 1, "{name}");
        assert_eq!(stored[0].payload.as_deref(), Some(b"after".as_slice()), "{name}");
    }
}

#[test]
fn a_damaged_payload_is_left_out_and_named() {
    let place = Place::new();
    place.run_with(["enqueue", "q", "-"], b"small");
    place.run_with(["enqueue", "q", "-"], &vec![7; 3 << 20]);
    place.ok("enqueue q good");
    let conn = Connection::open(place.db()).unwrap();
    conn.execute_batch("UPDATE relet_messages SET payload_crc = payload_crc - 1 WHERE id < 3").unwrap();
    drop(conn);
    let exported = place.run(["export"]);
    assert_eq!(exported.code, 1);
    assert!(exported.err.contains("message 1") && exported.err.contains("message 2"), "{}", exported.err);
    assert!(
        exported.err.contains("1 live message and 0 dead letters written, 2 damaged ones left out"),
        "{}",
        exported.err
    );
    let other = Place::new();
    let imported = other.run_with(["import"], &exported.out);
    assert_eq!(imported.code, 0, "the export has said it: {}", imported.err);
    assert!(imported.err.contains("left out by the export"), "{}", imported.err);
    assert_eq!(all(&other.store()).len(), 1);
}

#[test]
fn a_dead_letter_whose_key_a_live_one_has_is_kept() {
    let place = Place::new();
    place.ok("enqueue mail first --key k");
    place.ok("claim mail -w w");
    place.ok("reject 1.1 --error no");
    place.ok("enqueue mail second --key k");
    let other = Place::new();
    other.ok("enqueue mail third --key k");
    let ran = other.run_with(["import"], &place.ok("export").out);
    assert!(ran.err.contains("1 message stored, 1 there already"), "{}", ran.err);
    let found: Vec<_> = all(&other.store()).into_iter().map(|m| (m.status, m.payload.unwrap())).collect();
    assert_eq!(found, [(Status::Pending, b"third".to_vec()), (Status::Dead, b"first".to_vec())]);
    assert_eq!(other.store().doctor().unwrap(), Vec::<String>::new());
}

/// H2: the mark was taken for a part of the first payload, and switched the check of all others off.
#[test]
fn a_byte_order_mark_is_no_part_of_any_line() {
    let good = "{\"queue\":\"q\",\"payload\":\"x\"}";
    for (args, line) in [
        (vec!["import"], good),
        (vec!["enqueue", "q", "--lines"], "{\"a\":1}"),
        (vec!["enqueue", "q", "--lines=json"], "{\"a\":1}"),
        (vec!["enqueue", "q", "--lines"], "text"),
        (vec!["enqueue", "q", "--lines=text"], "text"),
    ] {
        let place = Place::new();
        let ran = place.run_with(&args, format!("\u{feff}{line}\r\n{line}\n").as_bytes());
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
        let stored = all(&place.store());
        assert!(stored.len() == 2 && stored[0].payload == stored[1].payload, "{args:?}: {stored:?}");
    }
    // Files that were put one after the other.
    for (args, line) in [(vec!["import"], good), (vec!["enqueue", "q", "--lines"], "{\"a\":1}")] {
        let place = Place::new();
        let ran = place.run_with(&args, format!("\u{feff}{line}\n\u{feff}{line}\n").as_bytes());
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
        let stored = all(&place.store());
        assert!(stored.len() == 2 && stored[0].payload == stored[1].payload, "{args:?}");
    }
    // And the check of what follows is on.
    let place = Place::new();
    let ran = place.run_with(["enqueue", "q", "--lines"], "\u{feff}{\"a\":1}\nnonsense\n".as_bytes());
    assert!(ran.code == 1 && ran.err.contains("line 2: no JSON"), "{}", ran.err);
}

#[test]
fn another_encoding_is_named_with_its_line_and_the_way_out() {
    let wide = |text: &str, big: bool, mark: bool| -> Vec<u8> {
        let text = if mark { format!("\u{feff}{text}") } else { text.to_owned() };
        text.encode_utf16().flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() }).collect()
    };
    let good = "{\"queue\":\"q\",\"payload\":\"x\"}\n";
    for args in [vec!["import"], vec!["enqueue", "q", "--lines"], vec!["enqueue", "q", "--lines=json"]] {
        for (big, mark) in [(false, true), (true, true), (false, false), (true, false)] {
            for before in ["", good] {
                let place = Place::new();
                let input = [before.as_bytes(), &wide(good, big, mark), &wide(good, big, false)].concat();
                let ran = run(place.command(&args), &input);
                assert_eq!(ran.code, 1, "{args:?} {big} {mark}");
                let line = if before.is_empty() { "line 1: " } else { "line 2: " };
                assert!(
                    ran.err.contains(line) && ran.err.contains("UTF-16") && ran.err.contains("iconv"),
                    "{args:?} {big} {mark}: {}",
                    ran.err
                );
                assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
                assert_eq!(all(&place.store()).len(), usize::from(!before.is_empty()));
            }
        }
    }
    // Who says that it is text gets every line as it is.
    let place = Place::new();
    assert_eq!(place.run_with(["enqueue", "q", "--lines=text"], b"\xff\xfeabc\n").code, 0);
    assert_eq!(all(&place.store())[0].payload.as_deref(), Some(b"\xff\xfeabc".as_slice()));
}

#[test]
fn a_second_import_stores_what_has_no_key_again() {
    let place = Place::new();
    place.ok("enqueue mail a --key k");
    place.ok("enqueue mail b");
    let exported = place.ok("export");
    let other = through(&place);
    let again = other.run_with(["import"], &exported.out);
    assert!(again.err.contains("1 message stored, 1 there already"), "{}", again.err);
    let rows: Vec<Value> = other.ok("list --json").json();
    assert_eq!(rows.len(), 3);
}
