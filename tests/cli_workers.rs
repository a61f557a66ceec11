//! Who works is seen, from any process, and looking disturbs nobody.
#![cfg(all(feature = "cli", unix))]

mod command;
mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use command::Place;
use relet::{Error, Life, Store};
use serde_json::Value;
use support::{Child, beside, names, part, plain, rows};

const HOUR: Duration = Duration::from_secs(3_600);

/// What `workers --json` lists, as "label life held deferred".
fn workers(place: &Place) -> Vec<String> {
    let rows = place.ok("workers --json").json();
    let text = |row: &Value| {
        let text = |member: &str| row[member].as_str().unwrap().to_owned();
        format!("{} {} {} {}", text("worker"), text("life"), row["held"], row["deferred"])
    };
    rows.iter().map(text).collect()
}

/// A worker that claims one message, and waits to be killed.
#[test]
#[ignore = "a part that another test's child plays"]
fn holder() {
    let Some(part) = part("holder") else { return };
    let store = Store::open(part.path()).unwrap();
    let worker = store.worker("mailer-1").unwrap();
    let claim = worker.claim("mail").unwrap().expect("there is one");
    part.say(claim.receipt());
    part.hear();
}

#[test]
fn a_worker_that_lives_is_alive() {
    let place = Place::new();
    place.ok("enqueue mail a");
    place.ok("enqueue mail b");
    let store = place.store();
    let worker = store.worker("mailer-1").unwrap();
    worker.claim("mail").unwrap().unwrap().defer(HOUR).unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    let row = place.ok("workers --json").json().remove(0);
    assert_eq!(row["pid"], std::process::id());
    assert!(row["started_at"].as_i64().unwrap() >= place.show(1)["enqueued_at"].as_i64().unwrap());
    assert_eq!(workers(&place), ["mailer-1 alive 1 1"]);
    let table = place.ok("workers").text().to_owned();
    assert!(table.starts_with("WORKER") && table.contains("alive") && table.lines().count() == 2, "{table}");
    // Nobody took the looks for a death, or the lock.
    assert!(matches!(store.worker("mailer-1"), Err(Error::LabelTaken { .. })));
    claim.ack().unwrap();
    assert_eq!(workers(&place), ["mailer-1 alive 0 1"]);
    // The application's own looks see the same.
    assert_eq!(store.workers().unwrap(), Store::open_read_only(place.db()).unwrap().workers().unwrap());
}

#[test]
fn a_worker_that_was_killed_is_dead_and_looking_changes_nothing() {
    let place = Place::new();
    place.ok("enqueue mail a");
    let mut child = Child::start("holder", &[place.db().to_str().unwrap()]);
    child.expect("1.1");
    assert_eq!(workers(&place), ["mailer-1 alive 1 0"]);
    let all = |place: &Place| {
        let conn = plain(&place.db());
        let files = names(&beside(&place.db(), "-relet-workers"));
        (rows(&conn, "SELECT * FROM relet_workers"), rows(&conn, "SELECT * FROM relet_messages"), files)
    };
    let before = all(&place);
    child.kill();
    for _ in 0..2 {
        assert_eq!(workers(&place), ["mailer-1 dead 1 0"]);
    }
    assert_eq!(all(&place), before);
    // The next claim takes what it held.
    let worker = place.store().worker("other").unwrap();
    let claim = worker.claim("mail").unwrap().expect("at once, not when the lease is over");
    assert_eq!(claim.crashes(), 1);
    assert_eq!(workers(&place), ["other alive 1 0"]);
}

#[test]
fn whoever_holds_something_without_running_is_listed_too() {
    let place = Place::new();
    let none = place.ok("enqueue mail a");
    assert_eq!(none.line(), "1");
    let none = place.ok("workers");
    assert!(none.text().is_empty() && none.err.contains("no workers"), "{}", none.err);
    for payload in ["b", "c", "d", "e"] {
        place.ok(&format!("enqueue mail {payload}"));
    }
    place.ok("claim mail -w shell --lease 1h");
    place.ok("claim mail -w shell --lease 1h");
    place.ok("defer 2.1 --for 1h");
    let store = place.store();
    let ended = store.worker("ended").unwrap().lease(HOUR).unwrap();
    let receipt = ended.claim("mail").unwrap().unwrap().receipt();
    drop(ended);
    assert_eq!(workers(&place), ["ended ended 1 0", "shell detached 1 1"]);
    let row = place.ok("workers --json").json().remove(0);
    assert_eq!((&row["pid"], &row["started_at"]), (&Value::Null, &Value::Null));
    assert!(place.ok("workers").text().contains("ended "));

    // One label, registered and detached: each with its own.
    let shell = store.worker("shell").unwrap();
    let claim = shell.claim("mail").unwrap().unwrap();
    assert_eq!(workers(&place), ["ended ended 1 0", "shell alive 1 0", "shell detached 1 1"]);
    claim.ack().unwrap();
    store.ack(receipt).unwrap();
    place.ok("ack 1.1");
    assert_eq!(workers(&place), ["shell alive 0 0", "shell detached 0 1"]);
    // A lease that has run out holds nothing.
    place.ok("claim mail -w late --lease 1ms");
    let gone = (0..1_000).any(|_| !workers(&place).iter().any(|row| row.starts_with("late")));
    assert!(gone, "{:?}", workers(&place));
}

#[test]
fn a_lock_whose_file_is_gone_proves_nothing() {
    let place = Place::new();
    place.ok("enqueue mail a");
    let store = place.store();
    let worker = store.worker("mailer-1").unwrap();
    let _claim = worker.claim("mail").unwrap();
    std::fs::remove_dir_all(beside(&place.db(), "-relet-workers")).unwrap();
    assert_eq!(workers(&place), ["mailer-1 unknown 1 0"]);
    drop(worker);
}

/// A look probes locks without a transaction of its own: it must not keep one from a worker that starts, nor take the end of
/// one in good order for its death.
#[test]
fn whoever_starts_and_ends_while_others_look_is_never_refused_and_never_taken_for_dead() {
    let place = Place::new();
    let store = Store::options().durability(relet::Durability::Normal).open(place.db()).unwrap();
    // Many that live make a look long: much can happen between its reading of the last one and its probe.
    let _crowd: Vec<_> = (0..100).map(|n| store.worker(&format!("crowd-{n}")).unwrap()).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let looker = Store::open_read_only(place.db()).unwrap();
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let other = looker.workers().unwrap().into_iter().find(|worker| worker.life != Life::Alive);
                    assert_eq!(other, None);
                }
            });
        }
        let started = (0..300).try_for_each(|_| store.worker("the-last").map(drop));
        over.store(true, Ordering::Relaxed);
        started.unwrap();
    });
}
