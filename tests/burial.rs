//! What a dead worker, or a whole boot of the machine, has left is found without the write lock and changed in steps: no commit changes
//! more than a bounded number of rows, all of it is void when the next one begins, and what the living hold stays theirs.
#![cfg(feature = "testing")]

mod support;

use std::path::Path;
use std::time::Duration;

use relet::{Clock, Durability, How, Settle, Store, Worker};
use support::{Dir, number, plain};

const HOUR: Duration = Duration::from_secs(3600);
/// More than one transaction clears, and than is looked at under the write lock.
const MANY: usize = 2_500;

fn open(path: &Path, clock: &Clock) -> Store {
    let options = Store::options().durability(Durability::Normal).reserve(0).lease(HOUR).clock(clock.clone());
    options.open(path).unwrap()
}

/// A store in which `label` holds many messages of two queues, and has deferred as many of a third.
fn filled(path: &Path, clock: &Clock, label: &str) -> (Store, Worker) {
    let store = open(path, clock);
    let worker = store.worker(label).unwrap();
    for queue in ["one", "two", "three"] {
        store.queue(queue).enqueue_all((0..MANY / 2).map(|n| format!("{n}"))).unwrap();
        let claims = worker.claim_batch(queue, MANY).unwrap();
        assert_eq!(claims.len(), MANY / 2);
        let deferred = claims.iter().filter(|_| queue == "three");
        let later = |reason: &str| Settle::Defer { delay: Duration::ZERO, reason: reason.into() };
        let outcomes = store.settle_all(deferred.map(|claim| (claim.receipt(), later("rate limited")))).unwrap();
        assert!(outcomes.iter().all(Result::is_ok));
    }
    (store, worker)
}

/// As a kill would leave it: its row stays, and nothing holds its lock.
fn dies(worker: Worker, store: Store, path: &Path, label: &str) {
    let conn = plain(path);
    let (incarnation, lock) = (
        number(&conn, &format!("SELECT incarnation FROM relet_workers WHERE label = '{label}'")),
        support::text(&conn, &format!("SELECT lock FROM relet_workers WHERE label = '{label}'")),
    );
    let rows = "SELECT sum(kept_until) FROM relet_retry_queue";
    let kept = number(&conn, rows);
    drop((worker, store));
    // What its orderly end has changed is put back.
    conn.execute(
        "INSERT INTO relet_workers (label, incarnation, pid, started_at, lock) VALUES (?1, ?2, 1, 1, ?3)",
        relet::rusqlite::params![label, incarnation, lock],
    )
    .unwrap();
    conn.execute("UPDATE relet_retry_queue SET kept_until = due_at + 30000", []).unwrap();
    assert_eq!(number(&conn, rows), kept);
    let folder = support::beside(path, "-relet-workers"); // the last one who left has removed it
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(lock), "").unwrap();
}

/// Everything of it can be claimed by another, as one crash each where it was held.
fn all_is_anyone_s(store: &Store, other: &Worker, held: u32) {
    for (queue, crashes) in [("one", held), ("two", held), ("three", 0)] {
        let claims = other.claim_batch(queue, MANY).unwrap();
        assert_eq!(claims.len(), MANY / 2, "{queue}");
        assert!(claims.iter().all(|claim| claim.crashes() == crashes && claim.how() == How::Claimed), "{queue}");
    }
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

#[test]
fn all_that_a_dead_worker_held_is_anyone_s_at_the_next_claim() {
    let (dir, clock) = (Dir::new("burial"), Clock::manual());
    let path = dir.join("store.db");
    let (store, worker) = filled(&path, &clock, "dead");
    dies(worker, store, &path, "dead");
    let store = open(&path, &clock);
    let other = store.worker("other").unwrap();
    assert_eq!(number(&plain(&path), "SELECT count(*) FROM relet_ended"), 0, "nothing is left to be done");
    all_is_anyone_s(&store, &other, 1);
}

#[test]
fn a_new_start_of_a_label_finds_all_that_its_predecessor_held() {
    let (dir, clock) = (Dir::new("burial-same"), Clock::manual());
    let path = dir.join("store.db");
    let (store, worker) = filled(&path, &clock, "same");
    dies(worker, store, &path, "same");
    let store = open(&path, &clock);
    let again = store.worker("same").unwrap();
    let claims = again.claim_batch("one", MANY).unwrap();
    assert_eq!(claims.len(), MANY / 2);
    assert!(claims.iter().all(|claim| claim.how() == How::Recovered && claim.crashes() == 1));
}

#[test]
fn what_ended_in_good_order_keeps_its_leases_and_its_deferrals_are_anyone_s() {
    let (dir, clock) = (Dir::new("burial-good"), Clock::manual());
    let path = dir.join("store.db");
    let (store, worker) = filled(&path, &clock, "good");
    drop((worker, store));
    let store = open(&path, &clock);
    let other = store.worker("other").unwrap();
    assert!(other.claim("one").unwrap().is_none());
    assert_eq!(other.claim_batch("three", MANY).unwrap().len(), MANY / 2);
}

#[test]
fn after_a_restart_of_the_machine_all_of_before_is_void_and_what_was_claimed_since_is_not() {
    let (dir, clock) = (Dir::new("burial-boot"), Clock::manual());
    let path = dir.join("store.db");
    let (store, worker) = filled(&path, &clock, "before");
    drop((worker, store));
    clock.reboot();
    let store = open(&path, &clock);
    store.queue("new").enqueue_all(["a", "b"]).unwrap();
    // A detached worker of the command line that comes first: nothing has been cleared yet.
    let early = store.detached("early").unwrap();
    let claim = early.claim("new").unwrap().expect("it is there");
    let other = store.worker("other").unwrap();
    assert_eq!(number(&plain(&path), "SELECT count(*) FROM relet_ended"), 0, "nothing is left to be done");
    all_is_anyone_s(&store, &other, 1);
    assert_eq!(other.claim_batch("new", 10).unwrap().len(), 1, "the other one is held");
    claim.ack().unwrap();
}

/// Whoever buries may die of it at any moment: the mark stays until all is done, and the next one goes on.
#[test]
fn a_burial_that_was_cut_short_is_taken_up_by_the_next_claim() {
    let (dir, clock) = (Dir::new("burial-cut"), Clock::manual());
    let path = dir.join("store.db");
    let (store, worker) = filled(&path, &clock, "dead");
    let incarnation = number(&plain(&path), "SELECT incarnation FROM relet_workers WHERE label = 'dead'");
    drop((worker, store));
    let conn = plain(&path);
    conn.execute("INSERT INTO relet_ended (label, dead, upto) VALUES ('dead', 1, ?1)", [incarnation]).unwrap();
    conn.execute("UPDATE relet_messages SET place = 0 WHERE line = -1 AND id % 3 = 0", []).unwrap();
    let store = open(&path, &clock);
    let other = store.detached("other").unwrap();
    all_is_anyone_s(&store, &other, 1);
    assert_eq!(number(&conn, "SELECT count(*) FROM relet_ended"), 0);
}

/// What is looked at before each step is bounded: or the whole would be quadratic, and the lock held ever longer.
#[test]
fn one_claim_takes_back_what_many_have_left_void() {
    let clock = relet::Clock::manual();
    let store = Store::options().clock(clock.clone()).open_in_memory().unwrap();
    store.queue("q").enqueue_all((0..20_000).map(|n| format!("{n}"))).unwrap();
    let (theirs, mine) = (store.worker("theirs").unwrap(), store.worker("mine").unwrap());
    assert_eq!(theirs.claim_batch("q", 15_000).unwrap().len(), 15_000);
    assert_eq!(mine.claim_batch("q", 100).unwrap().len(), 100);
    clock.advance(std::time::Duration::from_secs(3600));
    // All of them are void by now: one's own come first where they are met, and nothing is lost.
    let claims = mine.claim_batch("q", 20_000).unwrap();
    assert_eq!(claims.len(), 20_000);
    assert_eq!(claims.iter().filter(|claim| claim.crashes() == 1).count(), 15_100);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}
