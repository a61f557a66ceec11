//! A payload comes out as it went in, whatever bytes it has; one that does not is no payload but a dead letter.
#![cfg(feature = "testing")]

mod common;
mod support;

use std::io::Read;
use std::time::Duration;

use common::{Folder, HOUR, SECOND, memory, memory_with, next, row, sound};
use relet::rusqlite::Connection;
use relet::{
    Clock, Durability, ERROR_MAX, Error, Filter, Message, PAYLOAD_MAX, PAYLOAD_MAX_LIMIT, Retry, Settled, Status,
    Store, Verdict,
};
use support::{Child, Dir, part};

/// `size` bytes that no shift or cut leaves equal.
fn bytes(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + at / 251) as u8).collect()
}

/// B41: an item that is empty or zero was taken for "nothing there".
#[test]
fn an_empty_payload_is_a_payload() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let payloads: [&[u8]; 8] = [b"", b"\0", b"null", b"false", b"0", b"\"\"", b"[]", b"ordinary"];
    store.queue("q").enqueue_all(payloads).unwrap();
    for payload in payloads {
        let claim = next(&worker, "q");
        assert_eq!(claim.payload(), payload);
        let message = row(&store, claim.id());
        assert_eq!((message.payload_bytes, message.payload.as_deref()), (payload.len(), Some(payload)));
        claim.ack().unwrap();
    }
    assert!(worker.claim("q").unwrap().is_none());
    sound(&store);
}

/// B41 as JSON: what is nothing in some language is something in a queue.
#[test]
fn json_goes_in_and_comes_out() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let values = [
        serde_json::json!(null),
        serde_json::json!(false),
        serde_json::json!(0),
        serde_json::json!(""),
        serde_json::json!([]),
        serde_json::json!({ "order": 42, "to": "Łódź \u{0} \"quoted\"", "deep": [[[{}]]] }),
        serde_json::json!("x".repeat(10_000)),
    ];
    for value in &values {
        queue.enqueue(Message::json(value).unwrap()).unwrap();
    }
    for value in &values {
        let claim = next(&worker, "q");
        assert_eq!(&claim.json::<serde_json::Value>().unwrap(), value);
        claim.ack().unwrap();
    }
    queue.enqueue(Message::json(&(1, "two")).unwrap()).unwrap();
    let claim = next(&worker, "q");
    assert_eq!(claim.json::<(u8, String)>().unwrap(), (1, "two".to_owned()));
    assert!(matches!(claim.json::<u8>(), Err(Error::Json(_))));
    queue.enqueue("no json").unwrap();
    assert!(matches!(next(&worker, "q").json::<serde_json::Value>(), Err(Error::Json(_))));
    let map = std::collections::HashMap::from([((1, 2), 3)]);
    assert!(matches!(Message::json(&map), Err(Error::Json(_))));
    sound(&store);
}

/// Around the size from which on a payload lies beside its message, through everything that can happen to a message.
#[test]
fn a_payload_of_any_size_survives_whatever_happens_to_its_message() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).retry(Retry::fixed(SECOND)).open(folder.file()).unwrap();
    let store = open();
    let sizes = [0, 1, 2046, 2047, 2048, 2049, 2050, 4096, 65_535, 65_536, 1 << 20];
    let messages: Vec<_> = sizes.iter().map(|size| Message::new(bytes(*size))).collect();
    let ids: Vec<_> = store.queue("q").enqueue_all(messages).unwrap().into_iter().map(|new| new.id()).collect();
    let worker = store.worker("w").unwrap();
    let check = |claims: Vec<relet::Claim>| {
        assert_eq!(claims.len(), sizes.len());
        for (claim, size) in claims.iter().zip(sizes) {
            assert!(claim.payload() == bytes(size), "{size} bytes");
        }
        sound(&store);
        claims
    };
    check(worker.claim_batch("q", 99).unwrap()).iter().for_each(|claim| drop(claim.release().map(drop)));
    check(worker.claim_batch("q", 99).unwrap()).iter().for_each(|claim| drop(claim.fail("no").map(drop)));
    clock.advance(SECOND);
    check(worker.claim_batch("q", 99).unwrap()).iter().for_each(|claim| drop(claim.defer(SECOND).map(drop)));
    clock.advance(SECOND);
    check(worker.claim_batch("q", 99).unwrap());
    clock.advance(HOUR);
    check(worker.claim_batch("q", 99).unwrap()).iter().for_each(|claim| drop(claim.reject("no").map(drop)));
    assert_eq!(store.redrive_all(None).unwrap().redriven, ids);
    let list = store.list(&Filter::new().payload(true)).unwrap();
    for ((message, id), size) in list.iter().zip(&ids).zip(sizes) {
        assert_eq!((message.id, message.payload_bytes), (*id, size));
        assert!(message.payload.as_deref() == Some(&*bytes(size)));
        assert!(row(&open(), *id).payload == message.payload);
    }
    assert!(store.list(&Filter::new()).unwrap().iter().all(|message| message.payload.is_none()));
    for claim in check(worker.claim_batch("q", 99).unwrap()) {
        claim.ack().unwrap();
    }
    let left: i64 = Connection::open(folder.file())
        .unwrap()
        .query_row("SELECT count(*) FROM relet_payloads", [], |row| row.get(0))
        .unwrap();
    assert_eq!(left, 0);
}

/// B43: an item too big to be read back sat at the head, and every fetch crashed.
#[test]
fn what_is_too_large_is_refused_on_its_way_in_and_nothing_else_is() {
    for limit in [0, 10, 2048, 5000, PAYLOAD_MAX] {
        let (store, _) = memory_with(Store::options().payload_max(limit));
        let worker = store.worker("w").unwrap();
        let queue = store.queue("q");
        for size in [0, limit] {
            let payload = bytes(size);
            queue.enqueue(payload.clone()).unwrap();
            let claim = next(&worker, "q");
            assert!(claim.payload() == payload, "{size} of {limit}");
            claim.ack().unwrap();
        }
        for size in [limit + 1, 64 << 20] {
            let refused = queue.enqueue(vec![0; size]).unwrap_err();
            let text = refused.to_string();
            assert!(matches!(refused, Error::PayloadTooLarge { size: is, limit: max } if is == size && max == limit));
            assert!(text.contains(&size.to_string()) && text.contains(&limit.to_string()), "{text}");
            assert!(queue.enqueue_all([vec![], vec![0; size]]).is_err());
        }
        assert_eq!(store.stats().unwrap().queues[0].live(), 0);
        queue.enqueue("").unwrap();
        next(&worker, "q").ack().unwrap();
        sound(&store);
    }
    assert!(matches!(Store::options().payload_max(PAYLOAD_MAX_LIMIT + 1).open_in_memory(), Err(Error::Range { .. })));
    assert!(matches!(Store::options().payload_max(usize::MAX).open_in_memory(), Err(Error::Range { .. })));
}

/// A lower limit does not apply to what is there already.
#[test]
fn a_payload_that_was_accepted_is_handed_out_under_a_lower_limit() {
    let folder = Folder::new();
    Store::open(folder.file()).unwrap().queue("q").enqueue(bytes(5000)).unwrap();
    let store = Store::options().payload_max(10).open(folder.file()).unwrap();
    assert!(next(&store.worker("w").unwrap(), "q").payload() == bytes(5000));
    sound(&store);
}

/// B39: an error text too long to be stored killed the worker before the attempt was counted, and then the next one.
#[test]
fn an_error_of_any_length_is_stored_up_to_a_limit() {
    let long = "aé𝄞".repeat(20 * 1024 * 1024 / 7);
    for error in ["", "\0 and \u{1b}[31m", &long] {
        let (store, clock) = memory_with(Store::options().retry(Retry::fixed(SECOND)));
        let worker = store.worker("w").unwrap();
        let queue = store.queue("q");
        let id = queue.enqueue(Message::new("x").max_attempts(3)).unwrap().id();
        let other = queue.enqueue("other").unwrap().id();
        let kept = |text: Option<String>| {
            let text = text.expect("a text is kept");
            assert!(text.len() <= ERROR_MAX && text.len() >= error.len().min(ERROR_MAX - 20));
            assert!(text == error || (error.len() > ERROR_MAX && text.ends_with("(cut)")), "{text:?}");
        };
        assert_eq!(next(&worker, "q").fail(error).unwrap(), Settled::Now(Status::Pending));
        let failed = row(&store, id);
        assert_eq!((failed.attempts, failed.due_at), (1, Some(clock.wall_ms() + 1000)));
        kept(failed.last_error);
        kept(Some(store.retry_queue(None, 1).unwrap()[0].reason.clone()));
        assert_eq!(next(&worker, "q").id(), other);
        clock.advance(SECOND);
        next(&worker, "q").defer_because(SECOND, error).unwrap();
        kept(Some(store.retry_queue(None, 1).unwrap()[0].reason.clone()));
        clock.advance(SECOND);
        next(&worker, "q").fail(error).unwrap();
        clock.advance(SECOND);
        let claim = next(&worker, "q");
        kept(claim.last_error().map(str::to_owned));
        assert_eq!(claim.reject(error).unwrap(), Settled::Now(Status::Dead));
        kept(row(&store, id).last_error);
        sound(&store);
    }
}

/// In every place and way a payload can be damaged, and however the message is claimed then.
#[test]
fn a_damaged_payload_is_not_handed_out() {
    let small = "UPDATE relet_messages SET payload = CAST('other bytes' AS BLOB)";
    let ways = [
        (100, "UPDATE relet_messages SET payload = zeroblob(100)"),
        (100, "UPDATE relet_messages SET payload = x''"),
        (11, small),
        (0, small),
        (100, "UPDATE relet_messages SET payload_crc = payload_crc + 1"),
        (100, "UPDATE relet_messages SET payload = NULL"),
        (5000, "UPDATE relet_payloads SET payload = zeroblob(5000)"),
        (5000, "UPDATE relet_payloads SET payload = x''"),
        (5000, "DELETE FROM relet_payloads"),
        (5000, "UPDATE relet_messages SET payload = x''"),
        (300_000, "UPDATE relet_payloads SET payload = zeroblob(300000)"),
        (300_000, "UPDATE relet_payloads SET payload = zeroblob(290000)"),
        (300_000, "DELETE FROM relet_payloads"),
        (300_000, "UPDATE relet_messages SET payload_crc = payload_crc + 1"),
    ];
    for (at, (size, damage)) in ways.into_iter().enumerate() {
        for state in ["ready", "by id", "deferred", "void", "grouped"] {
            let folder = Folder::new();
            let clock = Clock::manual();
            let options = Store::options().durability(Durability::Normal).clock(clock.clone());
            let store = options.open(folder.file()).unwrap();
            let worker = store.worker("w").unwrap();
            let queue = store.queue("q");
            let message = Message::new(bytes(size)).priority(1);
            let id = queue.enqueue(if state == "grouped" { message.group("g") } else { message }).unwrap().id();
            match state {
                "deferred" => drop(next(&worker, "q").defer(SECOND).map(drop)),
                "void" => drop(next(&worker, "q")),
                _ => {}
            }
            Connection::open(folder.file()).unwrap().execute_batch(damage).unwrap();
            let good = Message::new("good");
            let good = queue.enqueue(if state == "grouped" { good.group("g") } else { good }).unwrap().id();
            clock.advance(60 * SECOND);
            assert!(!store.doctor().unwrap().is_empty(), "{damage}");

            if state == "by id" {
                let verdict = worker.claim_id(id).unwrap();
                assert!(matches!(verdict, Verdict::Finished { status: Status::Dead }), "{damage}: {verdict:?}");
            }
            let claim = next(&worker, "q");
            assert_eq!((claim.id(), claim.payload()), (good, &b"good"[..]), "way {at}, {state}: {damage}");
            let dead = row(&store, id);
            assert_eq!((dead.status, dead.worker), (Status::Dead, None), "{damage} {state}");
            assert!(dead.dead_reason.unwrap().contains("damaged"));
            // A redrive does not mend it.
            store.redrive(id).unwrap();
            claim.release().unwrap();
            assert_eq!(next(&worker, "q").id(), good);
            assert_eq!(row(&store, id).status, Status::Dead);
            assert_eq!(store.purge_dead(Duration::ZERO).unwrap(), 1);
            sound(&store);
        }
    }
}

/// In every way of claiming.
#[test]
fn many_large_payloads_come_out_whole_beside_damaged_ones() {
    let folder = Folder::new();
    let store = Store::options().durability(Durability::Normal).open(folder.file()).unwrap();
    let sizes = [300_000, 10, 400_000, 3_000, 256 << 10, (256 << 10) - 1];
    let ids: Vec<_> = sizes.iter().map(|size| store.queue("q").enqueue(bytes(*size)).unwrap().id()).collect();
    let harm = "UPDATE relet_payloads SET payload = zeroblob(length(payload)) WHERE message = ?1";
    Connection::open(folder.file()).unwrap().execute(harm, [ids[2].get()]).unwrap();
    let worker = store.worker("w").unwrap();
    let claims = worker.claim_batch("q", sizes.len()).unwrap();
    let found: Vec<_> = claims.iter().map(|claim| (claim.id(), claim.payload().to_vec())).collect();
    let good = ids.iter().zip(sizes).filter(|(id, _)| **id != ids[2]);
    assert_eq!(found, good.map(|(id, size)| (*id, bytes(size))).collect::<Vec<_>>());
    assert_eq!(row(&store, ids[2]).status, Status::Dead);
    for claim in &claims {
        claim.release().unwrap();
    }
    assert_eq!(store.purge_dead(Duration::ZERO).unwrap(), 1);
    let Verdict::Claimed(claim) = worker.claim_id(ids[0]).unwrap() else { panic!("it is free") };
    assert_eq!(claim.payload(), bytes(sizes[0]));
    sound(&store);
}

/// A payload that does not fit into memory was the end of its process, before the claim was committed: for ever, and for all behind it.
#[test]
fn a_payload_that_does_not_fit_into_memory_hides_nothing() {
    const MIB: usize = 1 << 20;
    let dir = Dir::new("memory");
    let path = dir.join("store.db");
    let options = || Store::options().durability(Durability::Normal).reserve(0).payload_max(256 * MIB);
    let store = options().open(&path).unwrap();
    let large = Message::new(Vec::new()).max_attempts(1).priority(1);
    let large = store.queue("q").enqueue_from(large, std::io::repeat(7).take(192 * MIB as u64)).unwrap().id();
    store.queue("q").enqueue("small").unwrap();
    let mut child = Child::start("role_claims_with_little_memory", &[path.to_str().unwrap()]);
    match child.hear().as_deref() {
        Some("no limit") => return println!("skipped: this system does not limit memory"),
        said => assert_eq!(said, Some("got small")),
    }
    let dead = row(&store, large);
    assert_eq!((dead.status, dead.attempts), (Status::Dead, 1));
    assert!(dead.last_error.unwrap().contains("does not fit into the memory"));
    // Who has enough of it gets it.
    drop(child);
    store.redrive(large).unwrap();
    let worker = store.worker("roomy").unwrap();
    assert_eq!(next(&worker, "q").payload().len(), 192 * MIB);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_claims_with_little_memory() {
    let Some(part) = part("role_claims_with_little_memory") else { return };
    let store = Store::options().durability(Durability::Normal).reserve(0).open(part.path()).unwrap();
    let worker = store.worker("poor").unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse().ok());
    let is_limited = size.is_some_and(|kib: u64| {
        let limit = format!("--as={}", (kib << 10) + (96 << 20));
        let pid = std::process::id().to_string();
        std::process::Command::new("prlimit").args(["--pid", &pid, &limit]).status().is_ok_and(|end| end.success())
    });
    if !is_limited {
        return part.say("no limit");
    }
    let claim = worker.claim("q").unwrap().expect("there is the small one");
    part.say(format_args!("got {}", String::from_utf8_lossy(claim.payload())));
    claim.release().unwrap();
    part.hear();
}

#[test]
fn whatever_is_bytes_is_a_message() {
    let (store, _) = memory();
    let queue = store.queue("q");
    queue.enqueue("str").unwrap();
    queue.enqueue("String".to_owned()).unwrap();
    queue.enqueue(vec![1, 2]).unwrap();
    queue.enqueue(&[3_u8, 4][..]).unwrap();
    queue.enqueue(b"array").unwrap();
    queue.enqueue(Message::new(*b"into")).unwrap();
    let claims = store.worker("w").unwrap().claim_batch("q", 9).unwrap();
    let payloads: Vec<_> = claims.iter().map(|claim| claim.payload()).collect();
    assert_eq!(payloads, [&b"str"[..], b"String", &[1, 2], &[3, 4], b"array", b"into"]);
    sound(&store);
}
