//! Whoever looks sees what is there, in pages, at the cost of what is shown; and looking changes nothing.
#![cfg(feature = "testing")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{DAY, Folder, HOUR, SECOND, memory, memory_with, next, raw, row, sound};
use relet::rusqlite::Connection;
use relet::{
    Claim, Clock, DEFERRAL_GRACE, Durability, Error, Filter, Message, MessageId, PAGE, PAGE_MAX, Receipt, Retry, Route,
    Settle, Snapshot, Status, Store, Why,
};

/// Every message of the store, page by page.
fn all(store: &Store, filter: Filter) -> Vec<Snapshot> {
    let mut all: Vec<Snapshot> = Vec::new();
    loop {
        let after = all.last().map_or(MessageId::new(0), |message| message.id);
        let page = store.list(&filter.clone().after(after)).unwrap();
        if page.is_empty() {
            return all;
        }
        all.extend(page);
    }
}

/// The counters are the rows, after whatever has happened.
#[test]
fn the_counters_are_the_rows_after_a_long_mixed_run() {
    for seed in 0..12 {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let options =
            Store::options().retention(300 * SECOND).retry(Retry::exponential(SECOND, 60 * SECOND)).max_attempts(3);
        let (store, clock) = memory_with(options);
        let mut workers = ["a", "b", "c"].map(|label| store.worker(label).unwrap());
        // Receipts, not claims: so that a start can end while somebody has yet to settle what it held.
        let mut claims: Vec<(Receipt, String)> = Vec::new();
        let held = |claim: Claim| (claim.receipt(), claim.queue().to_owned());
        let mut acked = BTreeMap::<String, u64>::new();
        for step in 0..600 {
            let name = ["x", "y", "z"][random.usize(0..3)];
            let any = MessageId::new(random.i64(1..200));
            match random.u8(0..24) {
                0..5 => {
                    let mut message =
                        Message::new(vec![0; random.usize(0..4000)]).route(Route::ALL[random.usize(0..4)]);
                    message = if random.u8(0..3) == 0 { message.key(format!("{}", random.u8(0..4))) } else { message };
                    message =
                        if random.u8(0..3) == 0 { message.group(format!("{}", random.u8(0..3))) } else { message };
                    message = if random.u8(0..4) == 0 { message.delay(random.u32(0..90) * SECOND) } else { message };
                    message = if random.u8(0..6) == 0 { message.ttl(random.u32(0..90) * SECOND) } else { message };
                    store.queue(name).enqueue(message.max_deferrals(4)).unwrap();
                }
                5..9 => {
                    let batch = workers[random.usize(0..3)].claim_batch(name, random.usize(1..4)).unwrap();
                    claims.extend(batch.into_iter().map(held));
                }
                9 => claims.extend(workers[random.usize(0..3)].claim_id(any).unwrap().claim().map(held)),
                10..17 if !claims.is_empty() => {
                    let (receipt, queue) = claims.swap_remove(random.usize(0..claims.len()));
                    let error = || "no".to_owned();
                    let how = match random.u8(0..8) {
                        0..3 => Settle::Ack,
                        3 => Settle::Fail { error: error(), retry_in: None },
                        4 => Settle::Reject { error: error() },
                        5 => Settle::Defer { delay: random.u32(0..60) * SECOND, reason: "deferred".into() },
                        6 => Settle::Release,
                        _ => Settle::Extend { lease: random.u32(1..300) * SECOND },
                    };
                    let settled = store.settle(receipt, how.clone());
                    if how == Settle::Ack && matches!(settled, Ok(relet::Settled::Now(_))) {
                        *acked.entry(queue).or_default() += 1;
                    }
                }
                17 => drop(store.cancel(any)),
                18 => drop(store.redrive(any)),
                19 => drop(store.route(any, Route::ALL[random.usize(0..4)])),
                20 if random.u8(0..4) == 0 => drop(store.purge_dead(60 * SECOND).unwrap()),
                21 => drop(store.prune().unwrap()),
                22 if random.u8(0..8) == 0 => {
                    let which = random.usize(0..3);
                    let label = ["a", "b", "c"][which];
                    // It ends; somebody without a start goes on under its label, until it is started again.
                    workers[which] = store.detached(label).unwrap();
                    if random.bool() {
                        workers[which] = store.worker(label).unwrap();
                    }
                }
                23 if random.u8(0..16) == 0 => {
                    clock.reboot();
                    workers = ["a", "b", "c"].map(|label| store.worker(label).unwrap());
                }
                _ => clock.advance(Duration::from_millis(random.u64(0..20_000))),
            }
            if step % 60 == 59 {
                sound(&store);
                let mut counted = BTreeMap::<String, [u64; 8]>::new();
                for message in all(&store, Filter::new().limit(7)) {
                    counted.entry(message.queue).or_default()[message.status as usize] += 1;
                }
                for queue in store.stats().unwrap().queues {
                    assert_eq!(queue.by_status, counted.remove(&queue.queue).unwrap_or_default(), "{}", queue.queue);
                    assert_eq!(queue.acked, acked.get(&queue.queue).copied().unwrap_or(0), "{}", queue.queue);
                    let retrying = store.retry_queue(Some(&queue.queue), 1000).unwrap().len();
                    assert_eq!(queue.retrying, retrying as u64);
                    let live = Status::ALL.iter().filter(|status| status.is_live()).map(|status| queue.count(*status));
                    assert_eq!(queue.live(), live.sum::<u64>());
                }
                assert!(counted.is_empty());
            }
        }
    }
}

#[test]
fn a_list_comes_in_pages_and_every_filter_holds() {
    let (store, _) = memory_with(Store::options().retention(HOUR));
    let worker = store.worker("w").unwrap();
    for name in ["a", "b"] {
        store.queue(name).enqueue_all(vec!["x"; 160]).unwrap();
        for claim in worker.claim_batch(name, 40).unwrap() {
            match claim.id().get() % 4 {
                0 => claim.ack().map(drop).unwrap(),
                1 => claim.reject("no").map(drop).unwrap(),
                2 => store.cancel(claim.id()).unwrap(),
                _ => {}
            }
        }
    }
    let everything = all(&store, Filter::new());
    assert_eq!(everything.len(), 320);
    assert!(everything.is_sorted_by(|one, other| one.id < other.id));
    assert_eq!(store.list(&Filter::new()).unwrap().len(), PAGE);
    assert_eq!(store.list(&Filter::default().limit(0)).unwrap(), []);
    assert_eq!(store.list(&Filter::new().limit(usize::MAX)).unwrap().len(), 320);
    assert_eq!(Filter::new().limit(usize::MAX), Filter::new().limit(PAGE_MAX));
    for limit in [1, 3, 100, 1000] {
        assert_eq!(all(&store, Filter::new().limit(limit)), everything);
        for name in ["a", "b"] {
            let of_queue: Vec<_> = everything.iter().filter(|message| message.queue == name).cloned().collect();
            assert_eq!(all(&store, Filter::new().queue(name).limit(limit)), of_queue);
            for status in Status::ALL {
                let found = all(&store, Filter::new().queue(name).status(status).limit(limit));
                assert_eq!(found, of_queue.iter().filter(|one| one.status == status).cloned().collect::<Vec<_>>());
            }
        }
        for status in Status::ALL {
            let found = all(&store, Filter::new().status(status).limit(limit));
            assert_eq!(found, everything.iter().filter(|one| one.status == status).cloned().collect::<Vec<_>>());
        }
    }
    assert_eq!(store.list(&Filter::new().queue("never seen")).unwrap(), []);
    assert_eq!(store.list(&Filter::new().after(MessageId::new(i64::MAX))).unwrap(), []);
    assert_eq!(store.list(&Filter::new().after(MessageId::new(-1)).limit(1)).unwrap()[0].id.get(), 1);
    sound(&store);
}

/// Where many are finished their pages are found in another way than where few are.
#[test]
fn a_list_of_many_finished_messages_is_the_same_list() {
    const MANY: i64 = 40_004;
    let (store, _) = memory_with(Store::options().retention(HOUR));
    for name in ["a", "b"] {
        store.queue(name).enqueue_all((0..MANY / 2).map(|_| "x")).unwrap();
    }
    let cancelled = |id: &i64| id % 2 == 0 || *id > MANY - 10;
    let ids = (1..=MANY).filter(cancelled).map(MessageId::new);
    assert!(store.cancel_all(ids).unwrap().iter().all(Result::is_ok));
    let filter = Filter::new().limit(PAGE_MAX);
    let found = |filter: Filter| all(&store, filter).iter().map(|one| one.id.get()).collect::<Vec<_>>();
    let expected: Vec<i64> = (1..=MANY).filter(cancelled).collect();
    assert_eq!(found(filter.clone().status(Status::Cancelled)), expected);
    let of_b = expected.into_iter().filter(|id| *id > MANY / 2).collect::<Vec<_>>();
    assert_eq!(found(filter.queue("b").status(Status::Cancelled)), of_b);
}

#[test]
fn a_message_shows_all_that_is_known_of_it() {
    let (store, clock) = memory();
    let start = clock.wall_ms();
    let worker = store.worker("w").unwrap();
    let message = Message::new("payload").priority(-7).key("k").group("g").ttl(HOUR).max_attempts(4).max_deferrals(6);
    let id = store.queue("q").enqueue(message.route(Route::Queued).delay(SECOND)).unwrap().id();
    let new = row(&store, id);
    assert_eq!((new.id, new.queue.as_str(), new.status, new.route), (id, "q", Status::Queued, Route::Queued));
    assert_eq!((new.priority, new.key.as_deref(), new.group.as_deref()), (-7, Some("k"), Some("g")));
    assert_eq!((new.due_at, new.expires_at), (Some(start + 1000), Some(start + 3_600_000)));
    assert_eq!((new.enqueued_at, new.claimed_at, new.finished_at), (start, None, None));
    assert_eq!((new.max_attempts, new.max_deferrals, new.redrives), (4, 6, 0));
    assert_eq!((new.payload_bytes, new.payload.as_deref()), (7, Some(&b"payload"[..])));
    assert_eq!((new.worker, new.receipt, new.lease_left), (None, None, None));

    clock.advance(2 * SECOND);
    let claim = next(&worker, "q");
    let held = row(&store, id);
    assert_eq!((held.claimed_at, held.due_at, held.lease_left), (Some(start + 2000), None, Some(60 * SECOND)));
    clock.advance(61 * SECOND);
    assert_eq!(row(&store, id).lease_left, Some(Duration::ZERO));
    claim.reject("never").unwrap();
    let dead = row(&store, id);
    assert_eq!((dead.status, dead.finished_at), (Status::Dead, Some(start + 63_000)));
    assert_eq!((dead.last_error.as_deref(), dead.lease_left, dead.receipt), (Some("never"), None, None));
    let mut listed = dead;
    listed.payload = None;
    assert_eq!(store.list(&Filter::new()).unwrap(), [listed]);
    assert_eq!(store.show(999).unwrap(), None);
    sound(&store);
}

#[test]
fn why_says_what_a_message_waits_for() {
    let (store, clock) = memory_with(Store::options().retention(HOUR));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let now = clock.wall_ms();
    let enqueue = |message: Message| queue.enqueue(message).unwrap().id();
    let why = |id: MessageId| store.why(id).unwrap().unwrap();
    let words = |id: MessageId, words: &[&str]| {
        let text = why(id).to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text:?} {words:?}");
    };

    let ready = enqueue(Message::new("x"));
    assert_eq!(why(ready), Why::Ready);
    let held = next(&worker, "q");
    assert_eq!(why(ready), Why::Held { by: "w".into(), lease_left: 60 * SECOND });
    words(ready, &["held", "\"w\"", "60s"]);

    let deferred = enqueue(Message::new("x").group("g"));
    next(&worker, "q").defer_because(10 * SECOND, "429").unwrap();
    let is = Why::Deferred { by: "w".into(), due_at: now + 10_000, abandoned_at: now + 40_000, reason: "429".into() };
    assert_eq!(why(deferred), is);
    words(deferred, &["deferred", "429", "\"w\""]);
    let behind = enqueue(Message::new("x").group("g"));
    assert_eq!(why(behind), Why::Behind { id: deferred, group: "g".into(), because: Box::new(is) });
    words(behind, &[&format!("behind message {deferred}"), "\"g\"", "429"]);

    let failed = enqueue(Message::new("x"));
    next(&worker, "q").fail_for("timeout", 20 * SECOND).unwrap();
    assert_eq!(why(failed), Why::Due { at: now + 20_000, after_error: Some("timeout".into()) });
    words(failed, &["waiting until", "timeout"]);
    let delayed = enqueue(Message::new("x").delay(5 * SECOND));
    assert_eq!(why(delayed), Why::Due { at: now + 5_000, after_error: None });

    let expired = enqueue(Message::new("x").ttl(5 * SECOND).priority(-1));
    clock.advance(5 * SECOND);
    assert_eq!(why(expired), Why::Expired { at: now + 5_000 });
    assert_eq!(why(delayed), Why::Ready);

    clock.advance(55 * SECOND);
    assert_eq!(why(ready), Why::Void { by: "w".into(), crashes: 1 });
    assert_eq!(why(deferred), Why::Ready);
    held.reject("no").unwrap();
    assert_eq!(why(ready), Why::Finished { status: Status::Dead, reason: row(&store, ready).dead_reason });
    words(ready, &["dead", "rejected"]);
    store.cancel(delayed).unwrap();
    assert_eq!(why(delayed), Why::Finished { status: Status::Cancelled, reason: None });
    next(&worker, "q").ack().unwrap();
    assert_eq!(why(deferred), Why::Finished { status: Status::Done, reason: None });
    store.redrive(ready).unwrap();
    assert_eq!(why(ready), Why::Ready);
    assert_eq!(store.why(999).unwrap(), None);
    sound(&store);
}

#[test]
fn the_oldest_that_waits_is_the_oldest_that_could_be_handed_out() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let oldest = || store.stats().unwrap().queues[0].oldest_waiting;
    queue.enqueue(Message::new("urgent").priority(9)).unwrap();
    clock.advance(SECOND);
    queue.enqueue(Message::new("x").route(Route::PendingLocal)).unwrap();
    queue.enqueue(Message::new("later").delay(HOUR)).unwrap();
    assert_eq!(oldest(), Some(SECOND));
    next(&worker, "q").ack().unwrap();
    clock.advance(SECOND);
    queue.enqueue(Message::new("urgent and younger").priority(9)).unwrap();
    assert_eq!(oldest(), Some(SECOND));
    next(&worker, "q").ack().unwrap();
    next(&worker, "q").fail("no").unwrap();
    assert_eq!(oldest(), None);
    assert_eq!(store.queue("z").enqueue("x").map(|_| ()).ok(), Some(()));
    assert_eq!(oldest(), None);
    clock.advance(HOUR);
    assert!(oldest().is_some());
    sound(&store);
}

/// Two messages of the same age are of the same age, whether or not a claim has passed by in between.
#[test]
fn the_age_of_what_has_become_due_does_not_depend_on_whether_a_claim_has_noticed() {
    let (store, clock) = memory();
    store.queue("q").enqueue_all(vec![Message::new("x").delay(HOUR); 2]).unwrap();
    clock.advance(HOUR + SECOND);
    let oldest = || store.stats().unwrap().queues[0].oldest_waiting.unwrap();
    let before = oldest();
    let _claim = next(&store.worker("w").unwrap(), "q");
    assert_eq!(oldest(), before);
    sound(&store);
}

/// All looks, at a store in which everything is in some state and much is overdue.
#[test]
fn looking_changes_nothing() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let options = || Store::options().clock(clock.clone()).durability(Durability::Normal).retention(HOUR);
    let store = options().open(folder.file()).unwrap();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    queue.enqueue_all(vec![Message::new(vec![1; 3000]).ttl(DAY); 6]).unwrap();
    queue.enqueue_all(["a", "b"].map(|text| Message::new(text).group("g").delay(SECOND))).unwrap();
    queue.enqueue(Message::new("x").ttl(SECOND).priority(-1)).unwrap();
    let claims = worker.claim_batch("q", 5).unwrap();
    claims[0].ack().unwrap();
    claims[1].reject("no").unwrap();
    claims[2].fail_for("no", SECOND).unwrap();
    claims[3].defer(SECOND).unwrap();
    store.cancel(6).unwrap();
    clock.advance(DEFERRAL_GRACE + DAY);

    let conn = Connection::open(folder.file()).unwrap();
    let tables = [
        "relet_meta",
        "relet_queues",
        "relet_counters",
        "relet_messages",
        "relet_payloads",
        "relet_retry_queue",
        "relet_workers",
    ];
    let before = tables.map(|table| raw(&conn, table));
    let looking = options().open_read_only(folder.file()).unwrap();
    let look = |store: &Store| {
        store.stats().unwrap();
        for status in Status::ALL {
            store.list(&Filter::new().status(status).payload(true)).unwrap();
        }
        for id in 0..12 {
            store.show(id).unwrap();
            store.why(id).unwrap();
        }
        store.retry_queue(None, 99).unwrap();
        store.retry_queue(Some("q"), 99).unwrap();
        assert_eq!(store.stuck(Duration::ZERO).unwrap().len(), 2);
        sound(store);
    };
    look(&store);
    look(&looking);
    assert_eq!(store.stats().unwrap().queues, looking.stats().unwrap().queues);
    for refused in [looking.cancel(1), looking.redrive(2), looking.prune().map(drop), looking.worker("w").map(drop)] {
        assert!(matches!(refused, Err(Error::ReadOnly { .. })));
    }
    assert_eq!(tables.map(|table| raw(&conn, table)), before);
}

#[test]
fn an_empty_store_has_nothing_to_show() {
    let (store, _) = memory();
    assert!(store.stats().unwrap().queues.is_empty());
    assert_eq!(store.list(&Filter::new()).unwrap(), []);
    assert_eq!((store.show(1).unwrap(), store.why(1).unwrap()), (None, None));
    assert_eq!(store.retry_queue(None, 9).unwrap(), []);
    assert_eq!(store.stuck(Duration::ZERO).unwrap(), []);
    let redriven = store.redrive_all(None).unwrap();
    assert!(redriven.redriven.is_empty() && redriven.refused.is_empty());
    assert_eq!((store.purge_dead(Duration::ZERO).unwrap(), store.prune().unwrap()), (0, 0));
    sound(&store);
}

/// A caller that waits for another process's lock keeps nobody from looking.
#[test]
fn a_look_does_not_wait_for_a_writer_that_waits() {
    let folder = Folder::new();
    let path = folder.file();
    let store = Store::options().busy_wait(Duration::from_secs(10)).open(&path).unwrap();
    store.queue("q").enqueue("before").unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| store.queue("q").enqueue("after"));
        // Long enough for the writer to be in its place; if a look waited for it, its busy wait would be over before the lock is.
        for _ in 0..200 {
            assert_eq!(store.stats().unwrap().queues[0].count(Status::Pending), 1);
            std::thread::sleep(Duration::from_millis(1));
        }
        other.execute_batch("COMMIT").unwrap();
        writer.join().unwrap().expect("its busy wait was not over yet");
    });
}
