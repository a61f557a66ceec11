//! Messages of a group are handed out strictly in their order, one at a time, and what the first one waits for, all wait for.
#![cfg(feature = "testing")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{HOUR, MS, SECOND, memory, memory_with, next, row, sound};
use relet::{
    Claim, DEFERRAL_GRACE, Error, How, Message, MessageId, Queue, Retry, Route, Settle, Status, Store, Verdict, Wait,
    Why,
};

/// Enqueues `count` messages of group "g".
fn line(queue: &Queue, count: usize) -> Vec<MessageId> {
    (0..count).map(|_| queue.enqueue(Message::new("x").group("g")).unwrap().id()).collect()
}

/// It waits behind that message of its group, and both looks say so.
fn assert_behind(store: &Store, id: MessageId, head: MessageId) {
    let verdict = store.detached("asks").unwrap().claim_id(id).unwrap();
    assert!(matches!(verdict, Verdict::Waiting { what: Wait::Group { behind }, .. } if behind == head), "{verdict:?}");
    match store.why(id).unwrap().unwrap() {
        Why::Behind { id: told, group, .. } => assert_eq!((told, group.as_str()), (head, "g")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_group_is_handed_out_in_order_one_at_a_time_to_however_many_workers() {
    let (store, _) = memory();
    let ids = line(&store.queue("q"), 5);
    let workers = [store.worker("a").unwrap(), store.worker("b").unwrap()];
    for (at, id) in ids.iter().enumerate() {
        let claim = next(&workers[at % 2], "q");
        assert_eq!(claim.id(), *id);
        for worker in &workers {
            assert!(worker.claim("q").unwrap().is_none());
            assert!(worker.claim_batch("q", 9).unwrap().is_empty());
        }
        for behind in &ids[at + 1..] {
            assert_behind(&store, *behind, *id);
        }
        sound(&store);
        claim.ack().unwrap();
    }
    sound(&store);
}

/// Each way in which the first one is not there blocks the rest; each way in which it goes lets the next one through.
#[test]
fn what_the_head_waits_for_the_group_waits_for() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(10 * SECOND)));
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    let queue = store.queue("q");
    let ids = line(&queue, 2);
    let blocked = || {
        assert!(other.claim("q").unwrap().is_none());
        assert_behind(&store, ids[1], ids[0]);
    };

    next(&worker, "q").fail("no").unwrap();
    blocked();
    clock.advance(10 * SECOND - MS);
    blocked();
    clock.advance(MS);
    next(&worker, "q").defer(10 * SECOND).unwrap();
    blocked();
    clock.advance(10 * SECOND);
    blocked();
    clock.advance(DEFERRAL_GRACE - MS);
    blocked();
    clock.advance(MS);
    let taken = next(&other, "q");
    assert_eq!(taken.id(), ids[0]);
    clock.advance(60 * SECOND);
    // Void: it is still the head, and goes first.
    let again = next(&worker, "q");
    assert_eq!((again.id(), again.crashes()), (ids[0], 1));
    again.release().unwrap();
    let released = next(&other, "q");
    assert_eq!(released.id(), ids[0]);
    released.reject("never").unwrap();
    assert_eq!(next(&other, "q").id(), ids[1]);
    sound(&store);
}

#[test]
fn a_delayed_head_delays_its_group_and_a_delay_further_back_holds_up_nobody_before_it() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let delayed = queue.enqueue(Message::new("x").group("g").delay(10 * SECOND)).unwrap().id();
    let ready = queue.enqueue(Message::new("x").group("g")).unwrap().id();
    let last = queue.enqueue(Message::new("x").group("g").delay(15 * SECOND)).unwrap().id();
    assert!(worker.claim("q").unwrap().is_none());
    assert_behind(&store, ready, delayed);
    let Some(Why::Behind { because, .. }) = store.why(ready).unwrap() else { panic!() };
    assert_eq!(*because, Why::Due { at: clock.wall_ms() + 10_000, after_error: None });
    clock.advance(10 * SECOND);
    for id in [delayed, ready] {
        let claim = next(&worker, "q");
        assert_eq!(claim.id(), id);
        claim.ack().unwrap();
    }
    assert!(worker.claim("q").unwrap().is_none());
    assert!(matches!(store.why(last).unwrap(), Some(Why::Due { .. })));
    clock.advance(5 * SECOND);
    assert_eq!(next(&worker, "q").id(), last);
    sound(&store);
}

#[test]
fn a_redriven_message_takes_its_old_place_in_the_line() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");

    // While a larger one is held, the redriven one waits for it; then it goes first.
    let ids = line(&queue, 3);
    next(&worker, "q").reject("no").unwrap();
    let held = next(&worker, "q");
    store.redrive(ids[0]).unwrap();
    sound(&store);
    assert_behind(&store, ids[0], ids[1]);
    assert_behind(&store, ids[2], ids[1]);
    assert!(worker.claim("q").unwrap().is_none());
    held.fail("later").unwrap();
    sound(&store);
    let first = next(&worker, "q");
    assert_eq!(first.id(), ids[0]);
    assert_behind(&store, ids[1], ids[0]);
    // What it stepped in front of still has its own time to wait, and then its turn.
    clock.advance(30 * 60 * SECOND);
    first.reject("again").unwrap();
    sound(&store);
    assert!(worker.claim("q").unwrap().is_none());
    assert!(matches!(store.why(ids[1]).unwrap(), Some(Why::Due { .. })));

    // In front of one that waits, and whose time comes meanwhile.
    store.redrive(ids[0]).unwrap();
    let first = next(&worker.lease(2 * HOUR).unwrap(), "q");
    clock.advance(HOUR);
    assert_behind(&store, ids[1], ids[0]);
    assert_eq!(store.retry_queue(None, 9).unwrap().len(), 1);
    first.ack().unwrap();
    sound(&store);
    let second = next(&worker, "q");
    assert_eq!((second.id(), store.retry_queue(None, 9).unwrap().len()), (ids[1], 0));

    // In front of one that is ready.
    second.release().unwrap();
    let other = queue.enqueue(Message::new("x").group("h")).unwrap().id();
    next(&worker, "q").ack().unwrap();
    assert_eq!(next(&worker, "q").id(), ids[2]);
    assert_eq!(next(&worker, "q").id(), other);
    sound(&store);
}

/// A claim that is lost while a smaller member was redriven: the lost one goes back into line behind it.
#[test]
fn a_lost_claim_goes_back_behind_a_smaller_one_that_was_redriven() {
    for by_id in [false, true] {
        let (store, clock) = memory();
        let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
        let ids = line(&store.queue("q"), 2);
        next(&worker, "q").reject("no").unwrap();
        let lost = next(&worker, "q");
        assert_eq!(lost.id(), ids[1]);
        store.redrive(ids[0]).unwrap();
        clock.advance(60 * SECOND);
        if by_id {
            let verdict = other.claim_id(ids[1]).unwrap();
            assert!(
                matches!(verdict, Verdict::Waiting { what: Wait::Group { behind }, .. } if behind == ids[0]),
                "{verdict:?}"
            );
        }
        assert_eq!(next(&other, "q").id(), ids[0]);
        assert_behind(&store, ids[1], ids[0]);
        assert_eq!(row(&store, ids[1]).crashes, 1);
        assert!(matches!(lost.ack(), Err(Error::Stale { .. })));
        sound(&store);
    }
}

#[test]
fn cancelling_the_head_lets_the_next_through_and_cancelling_one_behind_closes_the_gap() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let ids = line(&store.queue("q"), 5);
    store.cancel(ids[1]).unwrap();
    sound(&store);
    store.cancel(ids[0]).unwrap();
    sound(&store);
    let held = next(&worker, "q");
    assert_eq!(held.id(), ids[2]);
    store.cancel(ids[2]).unwrap();
    sound(&store);
    assert!(matches!(held.ack(), Err(Error::Cancelled { .. })));
    let deferred = next(&worker, "q");
    assert_eq!(deferred.id(), ids[3]);
    deferred.defer(HOUR).unwrap();
    store.cancel(ids[3]).unwrap();
    assert_eq!(next(&worker, "q").id(), ids[4]);
    sound(&store);
}

/// Heads that die on the way to being handed out: of their time to live, of a budget.
#[test]
fn a_head_that_dies_lets_the_next_one_through_in_the_same_call() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let expiring = || queue.enqueue(Message::new("x").group("g").ttl(SECOND)).unwrap().id();
    let expired = [expiring(), expiring(), expiring()];
    let poison = queue.enqueue(Message::new("x").group("g").max_attempts(1)).unwrap().id();
    let good = queue.enqueue(Message::new("x").group("g")).unwrap().id();
    clock.advance(SECOND);
    let lost = next(&worker, "q");
    assert_eq!(lost.id(), poison);
    assert!(expired.iter().all(|id| row(&store, *id).status == Status::Dead));
    clock.advance(60 * SECOND);
    assert_eq!(next(&worker, "q").id(), good);
    assert_eq!(row(&store, poison).status, Status::Dead);
    sound(&store);
}

/// The pruning of expired members, from the middle and from the front.
#[test]
fn pruning_members_that_have_expired_keeps_the_line_whole() {
    let (store, clock) = memory();
    let queue = store.queue("q");
    let mut kept = Vec::new();
    for at in 0..20 {
        let message = Message::new("x").group("g");
        let message = if at % 3 == 0 { message.ttl(SECOND) } else { message };
        let id = queue.enqueue(message).unwrap().id();
        if at % 3 != 0 {
            kept.push(id);
        }
    }
    clock.advance(SECOND);
    assert_eq!(store.prune().unwrap(), 7);
    sound(&store);
    let worker = store.worker("w").unwrap();
    for id in kept {
        let claim = next(&worker, "q");
        assert_eq!(claim.id(), id);
        claim.ack().unwrap();
    }
    sound(&store);
}

#[test]
fn a_key_and_a_group_do_not_get_in_each_other_s_way() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let message = |key: &str| Message::new("x").group("g").key(key);
    let first = queue.enqueue(message("a")).unwrap().id();
    let second = queue.enqueue(message("b")).unwrap().id();
    for (key, id) in [("a", first), ("b", second)] {
        let again = queue.enqueue(message(key)).unwrap();
        assert!(again.existing() && again.id() == id);
    }
    let claim = next(&worker, "q");
    assert!(queue.enqueue(message("a")).unwrap().existing());
    claim.reject("no").unwrap();
    // The key is free again; the new one is last in line, and keeps the old one dead.
    let third = queue.enqueue(message("a")).unwrap();
    assert!(!third.existing());
    assert!(matches!(store.redrive(first), Err(Error::KeyTaken { id, .. }) if id == third.id()));
    sound(&store);
    for id in [second, third.id()] {
        let claim = next(&worker, "q");
        assert_eq!((claim.id(), claim.group()), (id, Some("g")));
        claim.ack().unwrap();
    }
    store.redrive(first).unwrap();
    assert_eq!(next(&worker, "q").id(), first);
    sound(&store);
}

#[test]
fn priority_orders_the_heads_of_groups_and_nothing_within_one() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let enqueue =
        |group: &str, priority: i32| queue.enqueue(Message::new("x").group(group).priority(priority)).unwrap().id();
    let low_first = enqueue("a", -1);
    let high_second = enqueue("a", 9);
    let middle = enqueue("b", 5);
    let alone = queue.enqueue(Message::new("x").priority(7)).unwrap().id();
    let mut order = Vec::new();
    while let Some(claim) = worker.claim("q").unwrap() {
        order.push(claim.id());
        claim.ack().unwrap();
    }
    assert_eq!(order, [alone, middle, low_first, high_second]);
    sound(&store);
}

#[test]
fn a_route_that_nobody_serves_holds_up_the_group() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let head = queue.enqueue(Message::new("x").group("g").route(Route::PendingLocal)).unwrap().id();
    let behind = queue.enqueue(Message::new("x").group("g")).unwrap().id();
    let pending = worker.routes(&[Route::Pending]);
    assert!(pending.claim("q").unwrap().is_none());
    assert_behind(&store, behind, head);
    // A reroute is no change of turn, neither of the head nor of one behind it.
    store.route(behind, Route::Queued).unwrap();
    store.route(head, Route::Pending).unwrap();
    sound(&store);
    next(&pending, "q").ack().unwrap();
    assert!(pending.claim("q").unwrap().is_none());
    assert_eq!(next(&worker, "q").id(), behind);
    sound(&store);
}

#[test]
fn a_batch_never_holds_two_of_one_group() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    for at in 0..90 {
        queue.enqueue(Message::new("x").group(format!("g{}", at % 9)).priority(at % 5)).unwrap();
    }
    for round in 0..10 {
        let claims = worker.claim_batch("q", 90).unwrap();
        let mut groups: Vec<_> = claims.iter().map(|claim| claim.group().unwrap().to_owned()).collect();
        groups.sort();
        groups.dedup();
        assert_eq!((claims.len(), groups.len()), (9, 9), "round {round}");
        let outcomes = store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
        assert!(outcomes.iter().all(Result::is_ok));
    }
    assert!(worker.claim("q").unwrap().is_none());
    sound(&store);
}

#[test]
fn the_same_group_in_another_queue_is_another_group() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let (a, b) = (line(&store.queue("a"), 2), line(&store.queue("b"), 2));
    let of_a = next(&worker, "a");
    let of_b = next(&worker, "b");
    assert_eq!((of_a.id(), of_b.id()), (a[0], b[0]));
    of_a.ack().unwrap();
    assert_eq!(next(&worker, "a").id(), a[1]);
    assert!(worker.claim("b").unwrap().is_none());
    sound(&store);
}

/// A member that had become due and was overtaken is ready when its turn comes, also after the clock was set back.
#[test]
fn a_clock_that_is_set_back_does_not_split_next_and_by_id_over_a_member_whose_time_had_come() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(10 * SECOND)).lease(HOUR));
    let worker = store.worker("w").unwrap();
    let ids = line(&store.queue("q"), 2);
    next(&worker, "q").reject("no").unwrap();
    next(&worker, "q").fail("no").unwrap();
    store.redrive(ids[0]).unwrap();
    let first = next(&worker, "q");
    clock.advance(10 * SECOND);
    first.ack().unwrap();
    clock.set_wall_by(-60_000);
    store.prune().unwrap();
    let why = store.why(ids[1]).unwrap().unwrap();
    let claim = worker.claim("q").unwrap();
    assert_eq!(why == Why::Ready, claim.is_some(), "why says {why:?}, and claim next gives {claim:?}");
    sound(&store);
}

/// Many groups, many ways to settle, a clock that goes on: in every group the live ones come in order, one at a time.
#[test]
fn in_a_long_mixed_run_no_group_is_ever_out_of_order() {
    for seed in 0..20 {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (store, clock) =
            memory_with(Store::options().retry(Retry::exponential(SECOND, 8 * SECOND)).max_attempts(4));
        let workers = ["a", "b", "c"].map(|label| store.worker(label).unwrap());
        let queue = store.queue("q");
        let mut live: BTreeMap<String, Vec<MessageId>> = BTreeMap::new();
        let mut held: Vec<Claim> = Vec::new();
        let mut finished = 0;
        for step in 0..400 {
            match random.u8(0..10) {
                0..3 => {
                    let group = format!("g{}", random.u8(0..4));
                    let mut message = Message::new("x").group(&group).priority(random.i32(-2..3));
                    if random.u8(0..4) == 0 {
                        message = message.delay(random.u32(0..5) * SECOND);
                    }
                    live.entry(group).or_default().push(queue.enqueue(message).unwrap().id());
                }
                3..6 => {
                    let worker = &workers[random.usize(0..3)];
                    for claim in worker.claim_batch("q", random.usize(1..4)).unwrap() {
                        let group = claim.group().unwrap().to_owned();
                        // A claim that was lost since is no claim; the message is its group's head all the same.
                        held.retain(|other| other.group() != Some(&group));
                        live.get_mut(&group).unwrap().retain(|id| row(&store, *id).status.is_live());
                        assert_eq!(live[&group].first(), Some(&claim.id()), "seed {seed} step {step}");
                        held.push(claim);
                    }
                }
                6..9 if !held.is_empty() => {
                    let claim = held.swap_remove(random.usize(0..held.len()));
                    let done = match random.u8(0..5) {
                        0 | 1 => claim.ack().map(|_| true),
                        2 => claim.fail("no").map(|settled| settled == relet::Settled::Now(Status::Dead)),
                        3 => claim.defer(random.u32(0..4) * SECOND).map(|_| false),
                        _ => claim.release().map(|_| false),
                    };
                    if done.is_ok_and(|done| done) {
                        finished += 1;
                        live.get_mut(claim.group().unwrap()).unwrap().retain(|id| *id != claim.id());
                    }
                }
                _ => clock.advance(Duration::from_millis(random.u64(0..5_000))),
            }
            if step % 50 == 0 {
                sound(&store);
            }
        }
        // And in the end all of it is handed out.
        for _ in 0..2_000 {
            clock.advance(60 * SECOND);
            for claim in workers[0].claim_batch("q", 9).unwrap() {
                claim.ack().unwrap();
                finished += 1;
            }
            if store.stats().unwrap().queues[0].live() == 0 {
                break;
            }
        }
        assert_eq!(store.stats().unwrap().queues[0].live(), 0, "seed {seed}");
        assert!(finished > 20, "seed {seed}: {finished}");
        sound(&store);
    }
}

#[test]
fn a_worker_gets_its_own_deferred_head_back_and_the_group_waits_for_it_through_a_restart() {
    let (store, clock) = memory();
    let ids = line(&store.queue("q"), 2);
    next(&store.worker("w").unwrap(), "q").defer(SECOND).unwrap();
    let again = store.worker("w").unwrap();
    clock.advance(SECOND);
    let claim = next(&again, "q");
    assert_eq!((claim.id(), claim.how(), claim.crashes()), (ids[0], How::Recovered, 0));
    assert_behind(&store, ids[1], ids[0]);
    claim.ack().unwrap();
    assert_eq!(next(&again, "q").id(), ids[1]);
    sound(&store);
}
