//! A batch is one unit going in, and goes out in order; its size is bounded by nothing but memory.
#![cfg(feature = "testing")]

mod common;

use common::{Folder, MS, SECOND, memory, memory_with, next, sound};
use relet::{Claim, Clock, Durability, Error, Message, PRIORITY_RANGE, Settle, Settled, Status, Store};

fn ids(claims: &[Claim]) -> Vec<i64> {
    claims.iter().map(|claim| claim.id().get()).collect()
}

/// B45: a large batch failed with "too many SQL variables".
#[test]
fn a_hundred_thousand_messages_go_in_and_out_and_away_in_three_calls() {
    const COUNT: usize = 100_000;
    let (store, _) = memory();
    let queue = store.queue("q");
    let stored = queue.enqueue_all((0..COUNT).map(|at| at.to_string())).unwrap();
    assert!(stored.len() == COUNT && stored.is_sorted_by(|a, b| a.id() < b.id()));
    let claims = store.worker("w").unwrap().claim_batch("q", COUNT).unwrap();
    assert_eq!(claims.len(), COUNT);
    for (at, (claim, stored)) in claims.iter().zip(&stored).enumerate() {
        assert!(claim.id() == stored.id() && claim.payload() == at.to_string().as_bytes());
    }
    let outcomes = store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
    assert!(outcomes.len() == COUNT && outcomes.iter().all(|one| matches!(one, Ok(Settled::Now(Status::Done)))));
    let stats = &store.stats().unwrap().queues[0];
    assert_eq!((stats.acked, stats.live()), (COUNT as u64, 0));
    sound(&store);
}

/// B45: the same for what a batch can be besides: given back, cancelled, dead and redriven.
#[test]
fn a_batch_of_any_size_is_given_back_and_cancelled_and_redriven() {
    let folder = Folder::new();
    let store = Store::options().durability(Durability::Normal).clock(Clock::manual()).open(folder.file()).unwrap();
    let worker = store.worker("w").unwrap();
    for count in [0, 1, 999, 4000] {
        let name = format!("q{count}");
        let stored = store.queue(&name).enqueue_all(vec!["x"; count]).unwrap();
        let settle = |how: Settle, to: Status| {
            let claims = worker.claim_batch(&name, count).unwrap();
            assert_eq!(claims.len(), count);
            let outcomes = store.settle_all(claims.iter().map(|claim| (claim.receipt(), how.clone()))).unwrap();
            let all = outcomes.iter().all(|outcome| matches!(outcome, Ok(Settled::Now(status)) if *status == to));
            assert!(outcomes.len() == count && all, "{count} {how:?}");
        };
        settle(Settle::Release, Status::Pending);
        settle(Settle::Reject { error: "no".into() }, Status::Dead);
        assert_eq!(store.redrive_all(None).unwrap().redriven.len(), count);
        let cancelled = store.cancel_all(stored.iter().map(|one| one.id())).unwrap();
        assert!(cancelled.len() == count && cancelled.iter().all(Result::is_ok));
    }
    sound(&store);
}

/// B45, the other half: one bad message refuses all, wherever it stands and whatever is wrong with it.
#[test]
fn one_bad_message_refuses_the_whole_batch() {
    let (store, _) = memory_with(Store::options().payload_max(100));
    let queue = store.queue("q");
    queue.enqueue("before").unwrap();
    let good = || Message::new("good");
    let bad = [
        good().priority(*PRIORITY_RANGE.end() + 1),
        good().priority(i32::MIN),
        good().key(""),
        good().group("x".repeat(relet::NAME_MAX + 1)),
        good().max_attempts(0),
        good().max_deferrals(u32::MAX),
        Message::new(vec![0; 101]),
    ];
    for message in bad {
        for at in [0, 1, 1999] {
            let mut batch = vec![good(); 2000];
            batch[at] = message.clone();
            let refused = queue.enqueue_all(batch).unwrap_err();
            let typed = matches!(refused, Error::Range { .. } | Error::Text { .. } | Error::PayloadTooLarge { .. });
            assert!(typed, "{refused:?}");
            assert!(queue.enqueue(message.clone()).is_err());
        }
    }
    let long = "q".repeat(relet::NAME_MAX + 1);
    for name in ["", "a\nb", &long] {
        assert!(matches!(store.queue(name).enqueue_all(["x"]), Err(Error::QueueName { .. })));
        assert!(matches!(store.worker("w").unwrap().claim_batch(name, 1), Err(Error::QueueName { .. })));
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.queues.len(), stats.queues[0].live()), (1, 1));
    // Nothing was used up, either: the next id is the next one.
    assert_eq!(queue.enqueue("after").unwrap().id().get(), 2);
    assert!(store.queue("empty").enqueue_all(Vec::<Message>::new()).unwrap().is_empty());
    assert_eq!(store.stats().unwrap().queues.len(), 1);
    sound(&store);
}

/// A bad item of a group commit is nobody else's business.
#[test]
fn a_batch_that_fails_in_the_middle_takes_no_other_threads_work_with_it() {
    let (store, clock) = memory();
    let of_the_boot_before: Vec<_> = (0..6).map(|thread| store.worker(&format!("w{thread}")).unwrap()).collect();
    clock.reboot();
    let _taken = store.worker("taken").unwrap();
    std::thread::scope(|scope| {
        for (thread, worker) in of_the_boot_before.into_iter().enumerate() {
            let store = store.clone();
            scope.spawn(move || {
                for _ in 0..30 {
                    if thread % 2 == 0 {
                        store.queue("q").enqueue_all(["a", "b", "c"]).unwrap();
                    } else {
                        // A start that is over has looked, and may have moved things, before it is refused.
                        assert!(matches!(store.worker("taken"), Err(Error::LabelTaken { .. })));
                        let empty = store.stats().unwrap().queues.is_empty();
                        match worker.claim_batch("q", 2) {
                            Err(Error::Superseded { .. }) => {}
                            claims => assert!(claims.unwrap().is_empty() && empty),
                        }
                    }
                }
            });
        }
    });
    let stats = &store.stats().unwrap().queues[0];
    assert_eq!((stats.count(Status::Pending), stats.live()), (270, 270));
    sound(&store);
}

#[test]
fn a_batch_comes_out_by_priority_and_then_by_id() {
    let seed = 45;
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let mut expected = Vec::new();
    for _ in 0..500 {
        let priority = if random.bool() { random.i32(-3..3) } else { random.i32(PRIORITY_RANGE) };
        let message = Message::new("x").priority(priority).route(relet::Route::ALL[random.usize(0..4)]);
        expected.push((-priority, store.queue("q").enqueue(message).unwrap().id().get()));
    }
    expected.sort();
    let mut order = Vec::new();
    for count in [1, 0, 7, 100, 10_000] {
        order.extend(ids(&worker.claim_batch("q", count).unwrap()));
    }
    assert_eq!(order, expected.iter().map(|one| one.1).collect::<Vec<_>>());
    assert!(worker.claim_batch("q", usize::MAX).unwrap().is_empty());
    sound(&store);
}

/// The order holds also among those that have become due together, however many they are.
#[test]
fn what_has_become_due_comes_out_in_order_however_much_it_is() {
    for count in [10, 200, 700] {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        // The last one that becomes due is the most urgent.
        let batch = (0..count).map(|at| Message::new("x").priority(at).delay((at as u32 + 1) * MS));
        let mut expected: Vec<_> =
            store.queue("q").enqueue_all(batch).unwrap().iter().map(|one| one.id().get()).collect();
        expected.reverse();
        clock.advance(SECOND);
        let order = ids(&worker.claim_batch("q", count as usize).unwrap());
        let first = order.iter().zip(&expected).position(|(is, should)| is != should);
        assert_eq!(first, None, "of {count}, the first that is out of order");
        sound(&store);
    }
}

/// Claims that were lost together are taken back together, and come out in order as well.
#[test]
fn what_was_lost_comes_out_in_order_however_much_it_is() {
    for count in [10, 700] {
        let (store, clock) = memory();
        let batch = (0..count).map(|at| Message::new("x").priority(at));
        let mut expected: Vec<_> =
            store.queue("q").enqueue_all(batch).unwrap().iter().map(|one| one.id().get()).collect();
        expected.reverse();
        let lost = store.worker("w").unwrap();
        for at in 0..count {
            // The least urgent lease ends first.
            let lease = lost.lease((at as u32 + 1) * MS).unwrap();
            drop(lease.claim_id(i64::from(at) + 1).unwrap().claim().unwrap());
        }
        clock.advance(SECOND);
        let order = ids(&store.worker("other").unwrap().claim_batch("q", count as usize).unwrap());
        let first = order.iter().zip(&expected).position(|(is, should)| is != should);
        assert_eq!(first, None, "of {count}, the first that is out of order");
        sound(&store);
    }
}

#[test]
fn an_empty_answer_is_an_empty_batch_and_nothing_is_claimed_for_it() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    assert!(worker.claim_batch("never seen", 10).unwrap().is_empty());
    store.queue("q").enqueue_all(["a", "b", "c"]).unwrap();
    assert!(worker.claim_batch("q", 0).unwrap().is_empty());
    assert_eq!(store.stats().unwrap().queues[0].count(Status::Processing), 0);
    assert_eq!(worker.claim_batch("q", 2).unwrap().len(), 2);
    assert_eq!(worker.claim_batch("q", 2).unwrap().len(), 1);
    assert!(worker.claim_batch("q", 2).unwrap().is_empty());
    assert!(store.settle_all([]).unwrap().is_empty() && store.cancel_all([]).unwrap().is_empty());
    sound(&store);
}

/// Every batch commits as a whole: a second handle sees all of it or none.
#[test]
fn nobody_sees_half_a_batch() {
    let folder = Folder::new();
    let open = || Store::options().durability(Durability::Normal).clock(Clock::manual()).open(folder.file()).unwrap();
    let (store, looking) = (open(), open());
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for _ in 0..20 {
                store.queue("q").enqueue_all(vec!["x"; 500]).unwrap();
            }
        });
        while !writing.is_finished() {
            let queues = looking.stats().unwrap().queues;
            assert_eq!(queues.first().map_or(0, |queue| queue.live()) % 500, 0);
        }
    });
    assert_eq!(looking.stats().unwrap().queues[0].live(), 10_000);
    sound(&store);
}

#[test]
fn a_batch_of_claims_is_as_many_claims_each_with_a_receipt_of_its_own() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    store.queue("q").enqueue_all(vec!["x"; 20]).unwrap();
    let claims = worker.claim_batch("q", 20).unwrap();
    claims[3].ack().unwrap();
    claims[7].fail_for("no", SECOND).unwrap();
    let before: Vec<_> = claims.iter().map(|claim| store.show(claim.id()).unwrap()).collect();
    for (claim, message) in claims.iter().zip(before) {
        let held = ![3, 7].contains(&(claim.id().get() - 1));
        assert_eq!(message.is_some_and(|message| message.receipt == Some(claim.receipt())), held);
        assert_eq!((claim.queue(), claim.worker().label(), claim.attempts()), ("q", "w", 1));
    }
    assert!(worker.claim("q").unwrap().is_none());
    let again = store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
    assert_eq!(again.iter().filter(|one| matches!(one, Ok(Settled::Now(_)))).count(), 18);
    store.queue("q").enqueue("one more").unwrap();
    next(&worker, "q").ack().unwrap();
    sound(&store);
}
