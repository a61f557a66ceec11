//! A queue has at most one live message with a key; enqueueing it again stores nothing and says so.
#![cfg(feature = "testing")]

mod common;

use std::time::Duration;

use common::{DAY, Folder, HOUR, SECOND, memory, memory_with, next, row, sound};
use relet::{Clock, DEFERRAL_GRACE, Error, Message, Retry, Route, Status, Store, Verdict};

fn keyed(payload: &str) -> Message {
    Message::new(payload).key("k")
}

/// In whatever live state the first one is.
#[test]
fn while_a_message_lives_its_key_is_taken() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let first = queue.enqueue(keyed("first").delay(SECOND)).unwrap();
    assert!(!first.existing());
    let taken = |state: &str| {
        let before = row(&store, first.id());
        let again = queue.enqueue(keyed("again").priority(9).group("g").ttl(SECOND)).unwrap();
        assert!(again.existing() && again.id() == first.id(), "{state}");
        let all = queue.enqueue_all([keyed("again"), keyed("and again")]).unwrap();
        assert!(all.iter().all(|one| one.existing() && one.id() == first.id()), "{state}");
        assert_eq!(row(&store, first.id()), before, "{state}");
        assert_eq!(store.stats().unwrap().queues[0].live(), 1, "{state}");
    };
    taken("delayed");
    clock.advance(SECOND);
    taken("due");
    for route in Route::ALL {
        store.route(first.id(), route).unwrap();
        taken(route.as_str());
    }
    let claim = next(&worker, "q");
    taken("held");
    claim.defer(SECOND).unwrap();
    taken("deferred");
    clock.advance(SECOND);
    taken("deferred and due");
    next(&worker, "q").fail("no").unwrap();
    taken("failed");
    clock.advance(HOUR);
    next(&worker, "q").release().unwrap();
    taken("released");
    drop(next(&worker, "q"));
    clock.advance(DAY);
    taken("its claim is void");
    next(&worker, "q").ack().unwrap();
    assert!(!queue.enqueue(keyed("new")).unwrap().existing());
    sound(&store);
}

#[test]
fn when_a_message_is_finished_its_key_is_free() {
    for retention in [HOUR, Duration::ZERO] {
        let (store, clock) = memory_with(Store::options().retention(retention).retry(Retry::fixed(Duration::ZERO)));
        let worker = store.worker("w").unwrap();
        let queue = store.queue("q");
        let mut ids = Vec::new();
        for end in 0..8 {
            let message = keyed("x").max_attempts(1).max_deferrals(1);
            let new = queue.enqueue(if end == 6 { message.ttl(SECOND) } else { message }).unwrap();
            assert!(!new.existing(), "after end {end}");
            ids.push(new.id());
            match end {
                0 => drop(next(&worker, "q").ack().map(drop)),
                1 => drop(next(&worker, "q").fail("no").map(drop)),
                2 => drop(next(&worker, "q").reject("no").map(drop)),
                3 => drop(next(&worker, "q").defer(SECOND).map(drop)),
                4 => store.cancel(new.id()).unwrap(),
                5 => {
                    drop(next(&worker, "q"));
                    clock.advance(60 * SECOND);
                    assert!(worker.claim("q").unwrap().is_none());
                }
                6 => {
                    clock.advance(SECOND);
                    assert!(worker.claim("q").unwrap().is_none());
                }
                _ => {}
            }
            assert!(end == 7 || store.show(new.id()).unwrap().is_none_or(|message| !message.status.is_live()), "{end}");
        }
        assert!(ids.is_sorted_by(|a, b| a < b));
        sound(&store);
    }
}

/// One that has expired will never be handed out: it may not stand in the way of one that would be.
#[test]
fn an_expired_message_does_not_swallow_the_next_one_with_its_key() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let expired = queue.enqueue(keyed("old").ttl(SECOND)).unwrap().id();
    clock.advance(SECOND);
    let new = queue.enqueue(keyed("new")).unwrap();
    let claim = worker.claim("q").unwrap();
    assert_eq!(claim.map(|claim| claim.payload().to_vec()), Some(b"new".to_vec()), "{new:?}: the message is lost");
    assert!(!new.existing());
    assert_eq!(row(&store, expired).status, Status::Dead);
    sound(&store);
}

#[test]
fn the_same_key_in_another_queue_is_another_key_and_keys_are_compared_byte_by_byte() {
    let (store, _) = memory();
    assert!(!store.queue("a").enqueue(keyed("x")).unwrap().existing());
    assert!(!store.queue("b").enqueue(keyed("x")).unwrap().existing());
    assert!(!store.queue("A").enqueue(keyed("x")).unwrap().existing());
    let longest = "k".repeat(relet::NAME_MAX);
    for key in ["K", "k ", " k", "é", "e\u{301}", "k'; DROP TABLE relet_messages; --", "%", &longest] {
        let message = Message::new("x").key(key);
        assert!(!store.queue("a").enqueue(message.clone()).unwrap().existing(), "{key:?}");
        assert!(store.queue("a").enqueue(message).unwrap().existing(), "{key:?}");
    }
    for key in ["", "tab\t", "nul\0", &"k".repeat(relet::NAME_MAX + 1)] {
        let refused = store.queue("a").enqueue(Message::new("x").key(key));
        assert!(matches!(refused, Err(Error::Text { what: "key", .. })), "{key:?}: {refused:?}");
    }
    assert_eq!(store.stats().unwrap().queues.iter().map(|queue| queue.live()).collect::<Vec<_>>(), [1, 9, 1]);
    sound(&store);
}

#[test]
fn in_one_batch_a_key_counts_from_its_first_message_on() {
    let (store, _) = memory();
    let queue = store.queue("q");
    let keys = ["a", "b", "a", "c", "b", "a"];
    let stored = queue.enqueue_all(keys.map(|key| Message::new(key).key(key))).unwrap();
    assert_eq!(stored.iter().map(|one| one.existing()).collect::<Vec<_>>(), [false, false, true, false, true, true]);
    assert_eq!((stored[2].id(), stored[4].id(), stored[5].id()), (stored[0].id(), stored[1].id(), stored[0].id()));
    assert_eq!(store.worker("w").unwrap().claim_batch("q", 9).unwrap().len(), 3);
    sound(&store);
}

#[test]
fn a_redrive_and_a_key_exclude_each_other_both_ways() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let dead = queue.enqueue(keyed("dead")).unwrap().id();
    next(&worker, "q").reject("no").unwrap();
    store.redrive(dead).unwrap();
    let again = queue.enqueue(keyed("again")).unwrap();
    assert!(again.existing() && again.id() == dead);
    next(&worker, "q").reject("no").unwrap();
    let new = queue.enqueue(keyed("new")).unwrap();
    assert!(!new.existing());
    assert!(matches!(store.redrive(dead), Err(Error::KeyTaken { id, .. }) if id == new.id()));
    store.cancel(new.id()).unwrap();
    store.redrive(dead).unwrap();
    // In another queue the key is free.
    assert!(!store.queue("other").enqueue(keyed("x")).unwrap().existing());
    sound(&store);
}

#[test]
fn a_key_holds_over_a_restart_and_between_handles() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).open(folder.file()).unwrap();
    let (one, two) = (open(), open());
    let first = one.queue("q").enqueue(keyed("x")).unwrap().id();
    assert_eq!(two.queue("q").enqueue(keyed("x")).unwrap().id(), first);
    drop((one, two));
    let store = open();
    assert!(store.queue("q").enqueue(keyed("x")).unwrap().existing());
    assert!(matches!(store.worker("w").unwrap().claim_id(first).unwrap(), Verdict::Claimed(_)));
    clock.advance(DEFERRAL_GRACE);
    assert!(store.queue("q").enqueue(keyed("x")).unwrap().existing());
    sound(&store);
}

/// Many threads, few keys: of each key one message, and everybody is told which.
#[test]
fn of_many_who_enqueue_one_key_at_once_one_stores_it() {
    let (store, _) = memory();
    let told: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let queue = store.queue("q");
                scope.spawn(move || -> Vec<_> {
                    (0..50).map(|at| queue.enqueue(Message::new("x").key(format!("{}", at % 10))).unwrap()).collect()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(told.iter().filter(|one| !one.existing()).count(), 10);
    assert_eq!(store.stats().unwrap().queues[0].live(), 10);
    for at in 0..10 {
        let ids: Vec<_> = told.iter().skip(at).step_by(10).map(|one| one.id()).collect();
        assert!(ids.iter().all(|id| *id == ids[0]));
    }
    sound(&store);
}
