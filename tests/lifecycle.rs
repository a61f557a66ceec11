//! The life of a message goes along the edges of the diagram and no others, and whatever is done to one message is done to
//! no other.
#![cfg(feature = "testing")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{DAY, Folder, HOUR, MS, SECOND, memory, memory_with, next, raw, row, sound};
use relet::rusqlite::Connection;
use relet::rusqlite::types::Value;
use relet::{
    CRASHES_MAX, Claim, Clock, DEFERRAL_GRACE, Durability, Error, Message, MessageId, QueueDefaults, RELEASES_MAX,
    Retry, Route, Settle, Settled, Status, Store, Verdict, Worker,
};

#[test]
fn from_every_route_a_message_is_claimed_and_acked() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    for route in Route::ALL {
        let id = store.queue("q").enqueue(Message::new("x").route(route)).unwrap().id();
        let waiting = row(&store, id);
        assert_eq!((waiting.status, waiting.route), (route.into(), route));
        assert_eq!((waiting.worker, waiting.receipt, waiting.lease_left, waiting.attempts), (None, None, None, 0));

        let claim = next(&worker, "q");
        assert_eq!((claim.id(), claim.route(), claim.attempts()), (id, route, 1));
        let held = row(&store, id);
        assert_eq!((held.status, held.route, held.worker.as_deref()), (Status::Processing, route, Some("w")));
        assert_eq!((held.receipt, held.lease_left), (Some(claim.receipt()), Some(60 * SECOND)));

        assert_eq!(claim.ack().unwrap(), Settled::Now(Status::Done));
        assert_eq!(store.show(id).unwrap(), None);
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.queues[0].acked, stats.queues[0].live()), (4, 0));
    sound(&store);
}

#[test]
fn every_route_leads_to_every_other() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    for from in Route::ALL {
        for to in Route::ALL {
            let id = store.queue("q").enqueue(Message::new("x").route(from)).unwrap().id();
            store.route(id, to).unwrap();
            assert_eq!((row(&store, id).status, row(&store, id).route), (to.into(), to), "{from} to {to}");
            assert!(
                worker.routes(&[to]).claim("q").unwrap().is_some_and(|claim| claim.id() == id && claim.ack().is_ok())
            );
        }
    }
    sound(&store);
}

/// The ways back to a message's route.
#[test]
fn what_comes_back_comes_back_to_its_route() {
    for route in Route::ALL {
        let (store, clock) = memory_with(Store::options().retry(Retry::fixed(SECOND)));
        let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
        let id = store.queue("q").enqueue(Message::new("x").route(route)).unwrap().id();
        let back = |what: &str| {
            let message = row(&store, id);
            assert_eq!((message.status, message.worker, message.receipt), (route.into(), None, None), "{what}");
        };

        next(&worker, "q").release().unwrap();
        back("release");

        next(&worker, "q").fail("no").unwrap();
        back("fail");
        clock.advance(SECOND);

        let lost = next(&worker, "q");
        clock.advance(60 * SECOND);
        // Taken back by a claim that is not for this message.
        assert!(other.routes(&[Route::ALL[(route as usize + 1) % 4]]).claim("q").unwrap().is_none());
        back("lease run out");
        drop(lost);

        next(&worker, "q").defer(SECOND).unwrap();
        clock.advance(SECOND + DEFERRAL_GRACE);
        assert!(other.routes(&[Route::ALL[(route as usize + 1) % 4]]).claim("q").unwrap().is_none());
        back("abandoned");

        next(&worker, "q").reject("never").unwrap();
        store.redrive(id).unwrap();
        back("redrive");
        sound(&store);
    }
}

#[test]
fn a_held_message_takes_its_new_route_when_it_comes_back() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    let claim = next(&worker, "q");
    store.route(id, Route::Queued).unwrap();
    assert_eq!((row(&store, id).status, row(&store, id).route), (Status::Processing, Route::Queued));
    assert_eq!(row(&store, id).receipt, Some(claim.receipt()));
    assert_eq!(claim.release().unwrap(), Settled::Now(Status::Queued));
    assert_eq!(row(&store, id).status, Status::Queued);
    sound(&store);
}

#[test]
fn a_worker_that_restricts_itself_leaves_the_other_routes_alone_whatever_has_become_of_them() {
    let (store, clock) = memory();
    let (worker, local) = (store.worker("w").unwrap(), store.worker("l").unwrap().routes(&[Route::PendingLocal]));
    let queue = store.queue("q");
    queue.enqueue(Message::new("ready").priority(9)).unwrap();
    queue.enqueue(Message::new("deferred").priority(8)).unwrap();
    queue.enqueue(Message::new("crashed").priority(7)).unwrap();
    queue.enqueue(Message::new("due").delay(SECOND)).unwrap();
    let mine = queue.enqueue(Message::new("mine").route(Route::PendingLocal)).unwrap().id();
    let (ready, deferred) = (next(&worker, "q"), next(&worker, "q"));
    let crashed = next(&worker, "q");
    ready.release().unwrap();
    // Deferred under the restricted worker's own label as well.
    deferred.release().unwrap();
    let own = store.detached("l").unwrap();
    match own.claim_id(deferred.id()).unwrap() {
        Verdict::Claimed(claim) => claim.defer(SECOND).unwrap(),
        other => panic!("{other:?}"),
    };
    clock.advance(60 * SECOND + DEFERRAL_GRACE);
    assert_eq!(next(&local, "q").id(), mine);
    for _ in 0..3 {
        assert!(local.claim("q").unwrap().is_none());
    }
    for id in [ready.id(), deferred.id(), crashed.id()] {
        assert!(matches!(local.claim_id(id).unwrap(), Verdict::Waiting { .. }));
    }
    assert_eq!((row(&store, deferred.id()).crashes, row(&store, crashed.id()).crashes), (0, 1));
    assert_eq!(worker.claim_batch("q", 9).unwrap().len(), 4);
    sound(&store);
}

#[test]
fn nothing_but_a_redrive_leads_out_of_a_finished_message() {
    let (store, _) = memory_with(Store::options().retention(HOUR));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let done = queue.enqueue("done").unwrap().id();
    next(&worker, "q").ack().unwrap();
    let dead = queue.enqueue("dead").unwrap().id();
    next(&worker, "q").reject("no").unwrap();
    let cancelled = queue.enqueue("cancelled").unwrap().id();
    store.cancel(cancelled).unwrap();
    for (id, is) in [(done, Status::Done), (dead, Status::Dead), (cancelled, Status::Cancelled)] {
        let before = row(&store, id);
        assert_eq!(before.status, is);
        assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Finished { status } if status == is));
        match store.cancel(id) {
            Ok(()) => assert_eq!(is, Status::Cancelled),
            refused => assert!(matches!(refused, Err(Error::Status { status, .. }) if status == is)),
        }
        assert!(matches!(store.route(id, Route::Queued), Err(Error::Status { status, .. }) if status == is));
        assert!(worker.claim("q").unwrap().is_none());
        if is != Status::Dead {
            assert!(matches!(store.redrive(id), Err(Error::Status { status, .. }) if status == is));
        }
        assert_eq!(row(&store, id), before);
    }
    let live = queue.enqueue("live").unwrap().id();
    assert!(matches!(store.redrive(live), Err(Error::Status { status: Status::Pending, .. })));
    let held = next(&worker, "q");
    assert!(matches!(store.redrive(live), Err(Error::Status { status: Status::Processing, .. })));
    held.ack().unwrap();
    for id in [MessageId::new(0), MessageId::new(-1), MessageId::new(i64::MAX)] {
        assert!(matches!(store.cancel(id), Err(Error::Gone { .. })));
        assert!(matches!(store.route(id, Route::Queued), Err(Error::Gone { .. })));
        assert!(matches!(store.redrive(id), Err(Error::Gone { .. })));
        assert!(matches!(worker.claim_id(id).unwrap(), Verdict::NotFound));
    }
    sound(&store);
}

#[test]
fn a_message_is_cancelled_from_any_live_status() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let enqueue = |message: Message| queue.enqueue(message).unwrap().id();
    let held = enqueue(Message::new("held"));
    let _held = next(&worker, "q");
    let deferred = enqueue(Message::new("deferred"));
    next(&worker, "q").defer(HOUR).unwrap();
    let failed = enqueue(Message::new("failed"));
    next(&worker, "q").fail("no").unwrap();
    let void = enqueue(Message::new("void"));
    let _void = next(&worker.lease(SECOND).unwrap(), "q");
    let delayed = enqueue(Message::new("delayed").delay(HOUR));
    let _head = enqueue(Message::new("head").group("g"));
    let behind = enqueue(Message::new("behind").group("g"));
    let expired = enqueue(Message::new("expired").ttl(SECOND));
    let mut all = vec![held, deferred, failed, void, delayed, behind, expired];
    all.extend(Route::ALL.map(|route| enqueue(Message::new("x").route(route))));
    clock.advance(SECOND);

    let outcomes = store.cancel_all(all.iter().copied().chain([held, MessageId::new(999)])).unwrap();
    for (id, outcome) in all.iter().zip(&outcomes) {
        assert!(outcome.is_ok(), "{id}: {outcome:?}");
        let message = row(&store, *id);
        assert_eq!((message.status, message.finished_at), (Status::Cancelled, Some(clock.wall_ms())));
        assert_eq!((message.worker, message.receipt, message.due_at), (None, None, None));
        assert!(matches!(worker.claim_id(*id).unwrap(), Verdict::Finished { status: Status::Cancelled }));
    }
    assert!(outcomes[all.len()].is_ok(), "cancelling twice is safe");
    assert!(matches!(outcomes[all.len() + 1], Err(Error::Gone { .. })));
    assert_eq!(store.retry_queue(None, 10).unwrap(), []);
    sound(&store);
}

#[test]
fn whatever_the_holder_of_a_cancelled_message_calls_next_says_so() {
    let ways = [
        Settle::Ack,
        Settle::Fail { error: "no".into(), retry_in: None },
        Settle::Reject { error: "no".into() },
        Settle::Defer { delay: SECOND, reason: "429".into() },
        Settle::Release,
        Settle::Extend { lease: HOUR },
    ];
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    for how in ways {
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&worker, "q");
        store.cancel(id).unwrap();
        let before = row(&store, id);
        for _ in 0..2 {
            let outcome = store.settle(claim.receipt(), how.clone());
            assert!(matches!(outcome, Err(Error::Cancelled { id: of }) if of == id), "{how:?}: {outcome:?}");
        }
        let bulk = store.settle_all([(claim.receipt(), how.clone())]).unwrap();
        assert!(matches!(bulk[0], Err(Error::Cancelled { .. })));
        assert_eq!(row(&store, id), before);
    }
    // One that is deferred has no holder: its worker learns of it by the verdict.
    let id = store.queue("q").enqueue("x").unwrap().id();
    next(&worker, "q").defer(SECOND).unwrap();
    store.cancel(id).unwrap();
    assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Finished { status: Status::Cancelled }));
    sound(&store);
}

#[test]
fn dropping_a_claim_settles_nothing() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    drop(next(&worker, "q"));
    let held = row(&store, id);
    assert_eq!((held.status, held.attempts, held.releases), (Status::Processing, 1, 0));
    assert!(worker.claim("q").unwrap().is_none());
    drop(worker);
    assert_eq!(row(&store, id), held);
    sound(&store);
}

/// Each budget has its own reason, which names the budget and the number.
#[test]
fn a_dead_letter_says_which_budget_was_spent() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(Duration::ZERO)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let dies = |message: Message, step: &dyn Fn()| {
        let id = queue.enqueue(message).unwrap().id();
        for _ in 0..2 * RELEASES_MAX {
            step();
            let message = row(&store, id);
            if message.status == Status::Dead {
                assert_eq!((message.finished_at, &message.worker), (Some(clock.wall_ms()), &None));
                assert!(worker.claim("q").unwrap().is_none());
                return message;
            }
        }
        panic!("it never died");
    };
    let names = |reason: &Option<String>, words: &[&str]| {
        let reason = reason.as_deref().unwrap();
        assert!(words.iter().all(|word| reason.contains(word)), "{reason:?} {words:?}");
    };

    let failed = dies(Message::new("x").max_attempts(4), &|| {
        next(&worker, "q").fail("boom").unwrap();
    });
    names(&failed.dead_reason, &["failed 4 times"]);
    assert_eq!((failed.attempts, failed.last_error.as_deref()), (4, Some("boom")));

    let crash = || {
        if worker.claim("q").unwrap().is_some() {
            clock.advance(60 * SECOND);
        }
    };
    let crashed = dies(Message::new("x"), &crash);
    names(&crashed.dead_reason, &[&format!("crashed {CRASHES_MAX} times")]);
    assert_eq!((crashed.crashes, crashed.attempts), (CRASHES_MAX, CRASHES_MAX));

    let last = dies(Message::new("x").max_attempts(2), &crash);
    names(&last.dead_reason, &["crashed", "last of 2 attempts"]);
    assert_eq!((last.crashes, last.attempts), (2, 2));

    let deferred = dies(Message::new("x").max_deferrals(7), &|| {
        next(&worker, "q").defer_because(Duration::ZERO, "429 from the API").unwrap();
    });
    names(&deferred.dead_reason, &["deferred 7 times", "429 from the API"]);
    assert_eq!((deferred.deferrals, deferred.attempts), (7, 0));

    let released = dies(Message::new("x"), &|| {
        next(&worker, "q").release().unwrap();
    });
    names(&released.dead_reason, &[&format!("released {RELEASES_MAX} times")]);
    assert_eq!((released.releases, released.attempts), (RELEASES_MAX, 0));

    let rejected = dies(Message::new("x"), &|| {
        next(&worker, "q").reject("no such address").unwrap();
    });
    names(&rejected.dead_reason, &["rejected"]);
    assert_eq!((rejected.last_error.as_deref(), rejected.attempts), (Some("no such address"), 1));

    let expired = dies(Message::new("x").ttl(SECOND), &|| {
        clock.advance(SECOND);
        assert!(worker.claim("q").unwrap().is_none());
    });
    names(&expired.dead_reason, &["expired", "time to live"]);
    assert_eq!(expired.attempts, 0);
    sound(&store);
}

#[test]
fn a_message_is_handed_out_until_its_time_to_live_is_over_and_not_from_then_on() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let in_time = queue.enqueue(Message::new("x").ttl(10 * SECOND)).unwrap().id();
    clock.advance(10 * SECOND - MS);
    let claim = next(&worker, "q");
    assert_eq!(claim.id(), in_time);
    // What is held in time may be worked on for as long as it takes, and be deferred.
    clock.advance(30 * SECOND);
    assert_eq!(store.prune().unwrap(), 0);
    claim.defer(SECOND).unwrap();
    clock.advance(SECOND);
    assert_eq!(store.prune().unwrap(), 0);
    next(&worker, "q").ack().unwrap();

    let late = queue.enqueue(Message::new("x").ttl(10 * SECOND)).unwrap().id();
    let by_id = queue.enqueue(Message::new("x").ttl(10 * SECOND)).unwrap().id();
    let at_once = queue.enqueue(Message::new("x").ttl(Duration::ZERO)).unwrap().id();
    let never = queue.enqueue(Message::new("x").ttl(Duration::MAX)).unwrap().id();
    let waiting = queue.enqueue(Message::new("x").ttl(10 * SECOND).delay(HOUR)).unwrap().id();
    clock.advance(10 * SECOND);
    assert!(matches!(worker.claim_id(by_id).unwrap(), Verdict::Finished { status: Status::Dead }));
    let claims = worker.claim_batch("q", 9).unwrap();
    assert_eq!(claims.iter().map(|claim| claim.id()).collect::<Vec<_>>(), [never]);
    // What waits for something else is found by prune.
    assert_eq!(row(&store, waiting).status, Status::Pending);
    assert_eq!(store.prune().unwrap(), 1);
    for id in [late, by_id, at_once, waiting] {
        assert_eq!(row(&store, id).status, Status::Dead);
        assert!(row(&store, id).dead_reason.unwrap().contains("expired"));
    }
    sound(&store);
}

/// A time to live killed what had been handed out in time and waited for its retry, or for the end of a lost claim.
#[test]
fn what_was_handed_out_in_time_outlives_its_time_to_live_whatever_became_of_that() {
    type End = fn(&Claim);
    let ends: [(&str, End); 5] = [
        ("lost", |_| ()),
        ("failed", |claim| _ = claim.fail("no").unwrap()),
        ("released", |claim| _ = claim.release().unwrap()),
        ("deferred", |claim| _ = claim.defer(SECOND).unwrap()),
        ("limited", |claim| _ = claim.limited(SECOND).unwrap()),
    ];
    for (name, end) in ends {
        for by_id in [false, true] {
            let (store, clock) = memory();
            let id = store.queue("q").enqueue(Message::new("x").ttl(10 * SECOND).gate("g")).unwrap().id();
            assert!(row(&store, id).expires_at.is_some());
            end(&next(&store.worker("w").unwrap(), "q"));
            assert_eq!(row(&store, id).expires_at, None, "{name}");
            clock.advance(HOUR);
            assert_eq!(store.prune().unwrap(), 0, "{name}");
            let other = store.worker("other").unwrap();
            let claim = if by_id { other.claim_id(id).unwrap().claim() } else { other.claim("q").unwrap() };
            assert!(claim.is_some(), "{name}, by id: {by_id}");
            sound(&store);
        }
    }
}

#[test]
fn a_redrive_makes_the_budgets_whole_and_keeps_history_and_token() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(Duration::ZERO)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let message =
        Message::new("x").priority(3).key("k").max_attempts(3).max_deferrals(9).ttl(HOUR).route(Route::Queued);
    let id = queue.enqueue(message).unwrap().id();
    next(&worker, "q").release().unwrap();
    next(&worker, "q").defer(Duration::ZERO).unwrap();
    next(&worker, "q").fail("first").unwrap();
    let lost = next(&worker, "q");
    clock.advance(60 * SECOND);
    let last = next(&worker, "q");
    assert_eq!((last.attempts(), last.crashes(), last.deferrals()), (3, 1, 1));
    assert_eq!(last.fail("last").unwrap(), Settled::Now(Status::Dead));
    let dead = row(&store, id);
    assert_eq!((dead.attempts, dead.crashes, dead.deferrals, dead.releases), (3, 1, 1, 1));

    clock.advance(2 * HOUR);
    store.redrive(id).unwrap();
    let live = row(&store, id);
    assert_eq!((live.attempts, live.crashes, live.deferrals, live.releases, live.redrives), (0, 0, 0, 0, 1));
    assert_eq!((live.status, live.finished_at, live.due_at), (Status::Queued, None, None));
    assert_eq!((live.last_error, live.dead_reason), (dead.last_error, dead.dead_reason));
    assert_eq!((live.priority, live.key, live.max_attempts, live.max_deferrals), (3, Some("k".into()), 3, 9));
    assert_eq!((live.enqueued_at, live.payload), (dead.enqueued_at, dead.payload));
    // Its time to live had run out while it lay dead; it was redriven to be worked on.
    let again = next(&worker, "q");
    assert_eq!((again.id(), again.attempts(), again.receipt().token()), (id, 1, last.receipt().token() + 1));
    assert!(matches!(lost.ack(), Err(Error::Stale { .. })));
    assert!(matches!(last.ack(), Err(Error::Stale { .. })));
    again.ack().unwrap();
    sound(&store);
}

#[test]
fn a_redrive_does_not_take_a_key_that_a_live_message_has() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let old = queue.enqueue(Message::new("old").key("k")).unwrap().id();
    next(&worker, "q").reject("no").unwrap();
    let new = queue.enqueue(Message::new("new").key("k")).unwrap();
    assert!(!new.existing());
    let before = row(&store, old);
    assert!(matches!(store.redrive(old), Err(Error::KeyTaken { id, key }) if id == new.id() && key == "k"));
    let held = next(&worker, "q");
    assert!(matches!(store.redrive(old), Err(Error::KeyTaken { .. })));
    assert_eq!(row(&store, old), before);
    held.ack().unwrap();
    store.redrive(old).unwrap();
    assert_eq!(row(&store, old).status, Status::Pending);
    sound(&store);
}

#[test]
fn dead_letters_are_redriven_by_queue_or_all_each_with_an_outcome() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let kill = |queue: &str, count: usize| {
        let mut ids = Vec::new();
        for _ in 0..count {
            ids.push(store.queue(queue).enqueue(Message::new("x").key("same")).unwrap().id());
            next(&worker, queue).reject("no").unwrap();
        }
        ids
    };
    let plain: Vec<_> =
        store.queue("a").enqueue_all(vec!["x"; 1203]).unwrap().into_iter().map(|one| one.id()).collect();
    let claims = worker.claim_batch("a", 2000).unwrap();
    store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Reject { error: "no".into() }))).unwrap();
    let (keyed, other) = (kill("a", 2), kill("b", 1));

    let none = store.redrive_all(Some("no such queue")).unwrap();
    assert!(none.redriven.is_empty() && none.refused.is_empty());
    let a = store.redrive_all(Some("a")).unwrap();
    assert_eq!(a.redriven, plain.iter().copied().chain([keyed[0]]).collect::<Vec<_>>());
    assert_eq!(a.refused.len(), 1);
    assert!(
        matches!(&a.refused[0], (id, Error::KeyTaken { id: holder, .. }) if *id == keyed[1] && *holder == keyed[0])
    );
    assert_eq!(row(&store, other[0]).status, Status::Dead);
    assert_eq!(store.redrive_all(None).unwrap().redriven, other);
    sound(&store);
}

/// B59: the window of a purge was off by the zone's offset, and age was counted from creation.
#[test]
fn what_is_finished_goes_by_the_time_it_finished() {
    let (store, clock) = memory_with(Store::options().retention(HOUR).lease(30 * DAY).retry(Retry::fixed(30 * DAY)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let done = queue.enqueue("done").unwrap().id();
    let dead = queue.enqueue("dead").unwrap().id();
    let held = queue.enqueue("held").unwrap().id();
    let deferred = queue.enqueue("deferred").unwrap().id();
    let failed = queue.enqueue("failed").unwrap().id();
    let delayed = queue.enqueue(Message::new("delayed").delay(30 * DAY)).unwrap().id();
    clock.advance(10 * HOUR);
    let claims = worker.claim_batch("q", 5).unwrap();
    let pending = queue.enqueue("pending").unwrap().id();
    claims[3].defer(30 * DAY).unwrap();
    claims[4].fail("no").unwrap();
    clock.advance(10 * HOUR);
    claims[0].ack().unwrap();
    claims[1].reject("no").unwrap();
    let bystanders = [held, deferred, failed, delayed, pending];
    let before = bystanders.map(|id| row(&store, id));

    clock.advance(30 * 60 * SECOND);
    assert_eq!((store.prune().unwrap(), store.purge_dead(HOUR).unwrap()), (0, 0));
    assert_eq!((row(&store, done).status, row(&store, dead).status), (Status::Done, Status::Dead));
    clock.advance(30 * 60 * SECOND - MS);
    assert_eq!((store.prune().unwrap(), store.purge_dead(HOUR).unwrap()), (0, 0));
    clock.advance(MS);
    assert_eq!(store.prune().unwrap(), 1);
    assert_eq!((store.show(done).unwrap(), row(&store, dead).status), (None, Status::Dead));
    assert_eq!(store.purge_dead(HOUR).unwrap(), 1);
    assert_eq!(store.show(dead).unwrap(), None);
    assert_eq!((store.prune().unwrap(), store.purge_dead(Duration::ZERO).unwrap()), (0, 0));
    for (id, mut before) in bystanders.into_iter().zip(before) {
        let now = row(&store, id);
        before.lease_left = now.lease_left; // time has passed
        assert_eq!(now, before);
    }
    sound(&store);
}

#[test]
fn a_purge_takes_any_number_and_only_those_that_are_old_enough() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let kill = |count: usize| {
        store.queue("q").enqueue_all(vec![vec![7; 3000]; count]).unwrap();
        for claim in worker.claim_batch("q", count).unwrap() {
            claim.reject("no").unwrap();
        }
    };
    kill(1100);
    clock.advance(HOUR);
    kill(3);
    assert_eq!(store.purge_dead(HOUR).unwrap(), 1100);
    assert_eq!(store.stats().unwrap().queues[0].count(Status::Dead), 3);
    assert_eq!(store.purge_dead(Duration::MAX).unwrap(), 0);
    assert_eq!(store.purge_dead(Duration::ZERO).unwrap(), 3);
    sound(&store);
}

#[test]
fn what_is_done_is_kept_for_the_retention_and_what_is_cancelled_for_a_day_at_least() {
    let ways = [
        (Duration::ZERO, Status::Done, Duration::ZERO),
        (Duration::ZERO, Status::Cancelled, DAY),
        (HOUR, Status::Done, HOUR),
        (HOUR, Status::Cancelled, DAY),
        (3 * DAY, Status::Done, 3 * DAY),
        (3 * DAY, Status::Cancelled, 3 * DAY),
    ];
    for (retention, status, kept) in ways {
        let (store, clock) = memory_with(Store::options().retention(retention));
        let worker = store.worker("w").unwrap();
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&worker, "q");
        if status == Status::Done {
            drop(claim.ack())
        } else {
            store.cancel(id).unwrap()
        }
        if !kept.is_zero() {
            clock.advance(kept - MS);
            store.prune().unwrap();
            assert_eq!(row(&store, id).status, status, "{retention:?}");
            clock.advance(MS);
            store.prune().unwrap();
        }
        assert_eq!(store.show(id).unwrap(), None, "{retention:?} {status}");
        assert_eq!(claim.ack().unwrap(), Settled::Gone);
        sound(&store);
    }
}

/// Messages in every state, in two queues; what is done to a target may touch none of them.
struct Zoo {
    store: Store,
    clock: Clock,
    raw: Connection,
    keeper: Worker,
    worker: Worker,
    _folder: Folder,
}

impl Zoo {
    fn new(retention: Duration) -> Zoo {
        let folder = Folder::new();
        let clock = Clock::manual();
        let options = Store::options().durability(Durability::Normal).retention(retention).max_attempts(9);
        let store = options.retry(Retry::fixed(30 * DAY)).clock(clock.clone()).open(folder.file()).unwrap();
        let keeper = store.worker("keeper").unwrap().lease(30 * DAY).unwrap();
        for name in ["q", "other"] {
            let queue = store.queue(name);
            queue.enqueue(Message::new("held")).unwrap();
            let held = next(&keeper, name);
            queue.enqueue(Message::new("deferred")).unwrap();
            next(&keeper, name).defer_because(30 * DAY, "429").unwrap();
            queue.enqueue(Message::new("failed")).unwrap();
            next(&keeper, name).fail("no").unwrap();
            queue.enqueue(Message::new("done")).unwrap();
            next(&keeper, name).ack().unwrap();
            queue.enqueue(Message::new(vec![1; 5000]).key("target")).unwrap();
            next(&keeper, name).reject("no").unwrap();
            let cancelled = queue.enqueue(Message::new("cancelled")).unwrap();
            store.cancel(cancelled).unwrap();
            queue.enqueue(Message::new("held in group").group("held")).unwrap();
            let in_group = next(&keeper, name);
            for group in ["held", "free", "free", "target 2"] {
                queue.enqueue(Message::new("in a group").group(group)).unwrap();
            }
            queue.enqueue(Message::new("delayed").delay(30 * DAY).ttl(60 * DAY)).unwrap();
            queue.enqueue(Message::new(vec![2; 5000]).key("mine")).unwrap();
            for route in Route::ALL {
                queue.enqueue(Message::new("pending").route(route).ttl(60 * DAY)).unwrap();
            }
            assert_ne!(held.id(), in_group.id());
        }
        // A label that restarts holds this one as a command line would.
        store.queue("q").enqueue(Message::new("detached").priority(1)).unwrap();
        let _detached = next(&store.detached("target").unwrap().lease(30 * DAY).unwrap(), "q");
        let worker = store.worker("target").unwrap();
        let raw = Connection::open(folder.file()).unwrap();
        Zoo { store, clock, raw, keeper, worker, _folder: folder }
    }

    /// A message that every claim finds first.
    fn target(&self) -> MessageId {
        self.enqueue(Message::new(vec![3; 3000]))
    }

    /// A message that every claim finds first, and younger bystanders.
    fn enqueue(&self, message: Message) -> MessageId {
        let queue = self.store.queue("q");
        let id = queue.enqueue(message.priority(9)).unwrap().id();
        let younger = || {
            let id = queue.enqueue(Message::new(vec![4; 3000])).unwrap().id();
            self.keeper.claim_id(id).unwrap().claim().unwrap()
        };
        let _held = younger();
        younger().defer(30 * DAY).unwrap();
        younger().fail("no").unwrap();
        younger().reject("no").unwrap();
        younger().release().unwrap();
        id
    }

    /// Every row of every message, with what lies beside it.
    fn rows(&self) -> BTreeMap<i64, Vec<Vec<Value>>> {
        let mut all = BTreeMap::<i64, Vec<Vec<Value>>>::new();
        let beside = ["payloads", "retry_queue", "details", "finished", "keys", "groups", "passed", "expiry"];
        let beside = beside.map(|table| format!("(SELECT message, * FROM relet_{table})"));
        for table in ["relet_messages"].into_iter().chain(beside.iter().map(String::as_str)) {
            for row in raw(&self.raw, table) {
                let Value::Integer(id) = row[0] else { panic!("{row:?}") };
                all.entry(id).or_default().push(row);
            }
        }
        all
    }

    /// `act` changes these messages, each of them, and no others.
    fn changes(&self, what: &str, ids: &[MessageId], act: impl FnOnce()) {
        let before = self.rows();
        act();
        let after = self.rows();
        let all: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).copied().collect();
        for id in all {
            let changed = before.get(&id) != after.get(&id);
            let expected = ids.iter().any(|target| target.get() == id);
            assert_eq!(changed, expected, "{what}: message {id}\n{:?}\n{:?}", before.get(&id), after.get(&id));
        }
        sound(&self.store);
    }
}

/// One message at a time: a claim, and every way to settle it.
#[test]
fn a_claim_and_a_settle_touch_one_message() {
    for retention in [90 * DAY, Duration::ZERO] {
        let zoo = Zoo::new(retention);
        let Zoo { store, worker, .. } = &zoo;
        let settle = |what: &str, how: Settle| {
            let id = zoo.target();
            let claim = next(worker, "q");
            zoo.changes(what, &[id], || {
                store.settle(claim.receipt(), how).unwrap();
            });
            let _ = store.cancel(id);
        };
        let id = zoo.target();
        zoo.changes("claim", &[id], || assert_eq!(next(worker, "q").id(), id));
        zoo.changes("claim by id", &[id], || assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Resumed(_))));
        store.cancel(id).unwrap();
        let id = zoo.target();
        zoo.changes("claim by id", &[id], || assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Claimed(_))));
        store.cancel(id).unwrap();
        settle("ack", Settle::Ack);
        settle("fail", Settle::Fail { error: "no".into(), retry_in: None });
        settle("fail at once", Settle::Fail { error: "no".into(), retry_in: Some(Duration::ZERO) });
        settle("reject", Settle::Reject { error: "no".into() });
        settle("defer", Settle::Defer { delay: HOUR, reason: "429".into() });
        settle("release", Settle::Release);
        settle("extend", Settle::Extend { lease: HOUR });
    }
}

#[test]
fn a_deferred_a_delayed_and_a_lost_message_come_back_alone() {
    let zoo = Zoo::new(90 * DAY);
    let Zoo { store, clock, worker, .. } = &zoo;
    let id = zoo.target();
    next(worker, "q").defer(HOUR).unwrap();
    clock.advance(HOUR);
    zoo.changes("claim of one's own deferred message", &[id], || assert_eq!(next(worker, "q").id(), id));
    let other = store.worker("somebody else").unwrap();
    clock.advance(60 * SECOND);
    zoo.changes("claim of a lost one", &[id], || assert_eq!(next(&other, "q").id(), id));
    clock.advance(60 * SECOND);
    zoo.changes("lost one's own", &[id], || assert_eq!(next(&other, "q").id(), id));
    store.cancel(id).unwrap();

    let id = zoo.target();
    next(worker, "q").defer(HOUR).unwrap();
    clock.advance(HOUR + DEFERRAL_GRACE);
    zoo.changes("claim of an abandoned one", &[id], || assert_eq!(next(&other, "q").id(), id));
    store.cancel(id).unwrap();

    let id = zoo.enqueue(Message::new("x").delay(HOUR));
    clock.advance(HOUR);
    zoo.changes("claim of a due one", &[id], || assert_eq!(next(&other, "q").id(), id));
}

#[test]
fn a_route_a_cancel_and_a_redrive_touch_one_message() {
    let zoo = Zoo::new(90 * DAY);
    let Zoo { store, worker, .. } = &zoo;
    let id = zoo.target();
    zoo.changes("route", &[id], || store.route(id, Route::Queued).unwrap());
    let claim = next(worker, "q");
    zoo.changes("route of a held one", &[id], || store.route(id, Route::Routing).unwrap());
    zoo.changes("cancel", &[id], || store.cancel(id).unwrap());
    zoo.changes("a settle that comes too late", &[], || assert!(claim.ack().is_err()));
    let id = zoo.target();
    next(worker, "q").reject("no").unwrap();
    zoo.changes("redrive", &[id], || store.redrive(id).unwrap());
    zoo.changes("enqueue of a key that is there", &[], || {
        assert!(store.queue("q").enqueue(Message::new("x").key("mine")).unwrap().existing());
    });
}

#[test]
fn a_purge_and_a_prune_touch_what_is_old_enough() {
    let zoo = Zoo::new(90 * DAY);
    let Zoo { store, clock, worker, .. } = &zoo;
    // The bystanders have all died by now, and are kept for longer.
    let dead = zoo.target();
    next(worker, "q").reject("no").unwrap();
    let sql = "UPDATE relet_finished SET finished_at = finished_at - 86400000 WHERE message = ?1";
    zoo.raw.execute(sql, [dead.get()]).unwrap();
    zoo.changes("purge", &[dead], || assert_eq!(store.purge_dead(DAY).unwrap(), 1));
    let done = zoo.target();
    let options = Store::options().retention(HOUR).clock(clock.clone());
    let short = options.open(store.path().unwrap()).unwrap();
    short.ack(next(worker, "q").receipt()).unwrap();
    zoo.changes("prune of nothing", &[], || assert_eq!(store.prune().unwrap(), 0));
    clock.advance(HOUR);
    zoo.changes("prune", &[done], || assert_eq!(store.prune().unwrap(), 1));
    let expired = zoo.enqueue(Message::new("x").ttl(SECOND));
    clock.advance(SECOND);
    zoo.changes("expiry", &[expired], || assert_eq!(store.prune().unwrap(), 1));
}

#[test]
fn a_restarted_worker_voids_its_own_claims_and_no_others() {
    let mut zoo = Zoo::new(90 * DAY);
    let old = std::mem::replace(&mut zoo.worker, zoo.store.detached("nobody").unwrap());
    let id = zoo.target();
    let claim = next(&old, "q");
    zoo.changes("start of a label that is taken", &[], || {
        assert!(matches!(zoo.store.worker("target"), Err(Error::LabelTaken { .. })));
    });
    zoo.changes("end of a worker", &[], || drop((claim, old)));
    let mut again = None;
    zoo.changes("restart of a worker", &[id], || again = Some(zoo.store.worker("target").unwrap()));
    zoo.changes("claim by the new start", &[id], || assert_eq!(next(again.as_ref().unwrap(), "q").id(), id));

    // Without its lock it is not known to live: the label can be started beside it, and then its end is nobody's business.
    let mut locks = zoo.store.path().unwrap().as_os_str().to_owned();
    locks.push("-relet-workers");
    std::fs::remove_dir_all(locks).unwrap();
    let mut newest = None;
    zoo.changes("start beside one without a lock", &[], || newest = Some(zoo.store.worker("target").unwrap()));
    zoo.changes("end of the start before", &[], || drop(again));
    // It may have been at work: its lease decides.
    zoo.clock.advance(60 * SECOND);
    zoo.changes("claim by the newest start", &[id], || assert_eq!(next(newest.as_ref().unwrap(), "q").id(), id));
}

/// What was deferred stays so; it is only not kept for its worker any longer than until it is due.
#[test]
fn a_reboot_voids_every_claim_and_touches_nothing_else() {
    let zoo = Zoo::new(90 * DAY);
    let ids = |sql: &str| -> Vec<_> {
        let mut statement = zoo.raw.prepare(sql).unwrap();
        let ids = statement.query_map([], |row| row.get(0).map(MessageId::new)).unwrap();
        ids.map(Result::unwrap).collect()
    };
    let held = ids("SELECT id FROM relet_messages WHERE line = -1");
    let deferred = ids("SELECT message FROM relet_retry_queue WHERE kept_until > due_at");
    assert_eq!((held.len(), deferred.len()), (5, 2));
    let mut before = zoo.rows();
    zoo.changes("reboot", &[&held[..], &deferred[..]].concat(), || {
        zoo.clock.reboot();
        zoo.store.worker("the first of the new boot").unwrap();
    });
    let after = zoo.rows();
    for id in deferred {
        let before = before.get_mut(&id.get()).unwrap();
        // Of the tables here, only the retry queue has nine columns, after the id.
        let retry = before.iter_mut().find(|row| row.len() == 1 + 9).expect("it is in the retry queue");
        retry[6] = retry[4].clone(); // kept_until, due_at
        assert_eq!(after[&id.get()], *before);
    }
}

#[test]
fn a_clock_that_is_set_changes_no_message() {
    let zoo = Zoo::new(90 * DAY);
    let Zoo { store, clock, worker, .. } = &zoo;
    let enqueue = |message: Message| store.queue("q").enqueue(message.priority(9)).unwrap().id();
    clock.set_wall_by(DAY.as_millis() as i64);
    let delayed = enqueue(Message::new("x").delay(HOUR));
    let id = enqueue(Message::new("x"));
    next(worker, "q").defer(HOUR).unwrap();
    let failed = enqueue(Message::new("x"));
    next(worker, "q").fail("no").unwrap();
    let instant = std::time::UNIX_EPOCH + Duration::from_millis(clock.wall_ms() as u64) + HOUR;
    enqueue(Message::new("an instant is an instant").at(instant));
    clock.set_wall_by(-(DAY.as_millis() as i64));
    zoo.changes("clock set back", &[], || assert_eq!(store.prune().unwrap(), 0));
    for (id, after) in [(id, HOUR), (delayed, HOUR), (failed, 30 * DAY)] {
        assert_eq!(row(store, id).due_at, Some(clock.wall_ms() + after.as_millis() as i64));
    }
}

#[test]
fn a_change_of_turn_touches_the_two_members_that_it_is_about() {
    let zoo = Zoo::new(90 * DAY);
    let Zoo { store, worker, .. } = &zoo;
    let first = zoo.enqueue(Message::new("1").group("target"));
    let second = zoo.enqueue(Message::new("2").group("target"));
    let third = zoo.enqueue(Message::new("3").group("target"));
    next(worker, "q").reject("no").unwrap();
    zoo.changes("redrive of a smaller one", &[first, second], || store.redrive(first).unwrap());
    zoo.changes("cancel of one behind", &[third], || store.cancel(third).unwrap());
    zoo.changes("cancel of the head", &[first, second], || store.cancel(first).unwrap());
    zoo.changes("ack of the last", &[second], || {
        next(worker, "q").ack().unwrap();
    });
}

#[test]
fn a_queue_s_defaults_are_its_own() {
    let zoo = Zoo::new(90 * DAY);
    let queues = || raw(&zoo.raw, "relet_queues");
    let before = queues();
    zoo.changes("defaults", &[], || {
        zoo.store.queue("q").set_defaults(QueueDefaults::new().max_attempts(1).retry(Retry::fixed(SECOND))).unwrap();
    });
    let after = queues();
    assert_ne!(before[0], after[0]);
    assert_eq!(before[1..], after[1..]);
}
