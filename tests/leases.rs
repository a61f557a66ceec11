//! A claim holds exactly as long as it should: no clock that jumps, no sleep and no look ends one, and none outlives its
//! lease, its worker's restart or the machine's.
#![cfg(feature = "testing")]

mod common;

use std::time::Duration;

use common::{DAY, Folder, HOUR, MS, SECOND, memory, memory_with, next, raw, row, sound};
use relet::rusqlite::Connection;
use relet::{
    CRASHES_MAX, Clock, DEFERRAL_GRACE, Error, How, LEASE_RANGE, Message, QueueDefaults, Retry, Route, Status, Store,
    Stuck, Verdict, Wait, Why, Worker,
};

#[test]
fn a_lease_holds_to_its_last_millisecond_and_then_anyone_may_take_the_message() {
    for by_id in [false, true] {
        for own in [false, true] {
            let (store, clock) = memory();
            let id = store.queue("q").enqueue("x").unwrap().id();
            let worker = store.worker("w").unwrap();
            let lost = next(&worker, "q");
            let taker = if own { worker.clone() } else { store.worker("other").unwrap() };
            clock.advance(60 * SECOND - MS);
            assert!(taker.claim("q").unwrap().is_none());
            if !own {
                let verdict = taker.claim_id(id).unwrap();
                assert!(
                    matches!(&verdict, Verdict::Held { by, lease_left } if by == "w" && *lease_left == MS),
                    "{verdict:?}"
                );
            }
            clock.advance(MS);
            let claim = if by_id { taker.claim_id(id).unwrap().claim().unwrap() } else { next(&taker, "q") };
            assert_eq!(claim.how(), if own { How::Recovered } else { How::Claimed });
            assert_eq!((claim.id(), claim.crashes(), claim.attempts()), (id, 1, 2));
            assert!(claim.receipt().token() > lost.receipt().token());
            assert!(matches!(lost.ack(), Err(Error::Stale { .. })));
            claim.ack().unwrap();
            sound(&store);
        }
    }
}

/// The nearest lease decides: the worker's, else the queue's, else the store's.
#[test]
fn a_lease_is_the_worker_s_else_the_queue_s_else_the_store_s() {
    let (store, _) = memory_with(Store::options().lease(SECOND));
    let queue = store.queue("q");
    let worker = store.worker("w").unwrap();
    let lease = |worker: &Worker, by_id: bool| {
        let id = queue.enqueue("x").unwrap().id();
        let claim = if by_id { worker.claim_id(id).unwrap().claim().unwrap() } else { next(worker, "q") };
        let left = row(&store, id).lease_left.unwrap();
        claim.ack().unwrap();
        left
    };
    for by_id in [false, true] {
        queue.set_defaults(QueueDefaults::new()).unwrap();
        assert_eq!(lease(&worker, by_id), SECOND);
        queue.set_defaults(QueueDefaults::new().lease(2 * SECOND)).unwrap();
        assert_eq!(lease(&worker, by_id), 2 * SECOND);
        assert_eq!(lease(&worker.lease(3 * SECOND).unwrap(), by_id), 3 * SECOND);
        assert_eq!(lease(&worker.lease(*LEASE_RANGE.end()).unwrap(), by_id), *LEASE_RANGE.end());
        assert_eq!(lease(&worker.lease(MS).unwrap(), by_id), MS);
    }
    for bad in [Duration::ZERO, Duration::MAX] {
        assert!(matches!(worker.lease(bad), Err(Error::Range { .. })));
        assert!(matches!(queue.set_defaults(QueueDefaults::new().lease(bad)), Err(Error::Range { .. })));
        assert!(matches!(Store::options().lease(bad).open_in_memory(), Err(Error::Range { .. })));
    }
    sound(&store);
}

#[test]
fn a_wall_clock_that_jumps_ends_no_lease_and_lengthens_none() {
    for jump in [DAY.as_millis() as i64, -(DAY.as_millis() as i64), i64::MAX, i64::MIN] {
        let (store, clock) = memory();
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&store.worker("w").unwrap(), "q");
        clock.set_wall_by(jump);
        let other = store.worker("other").unwrap();
        assert!(other.claim("q").unwrap().is_none(), "{jump}");
        assert_eq!(row(&store, id).lease_left, Some(60 * SECOND));
        clock.advance(60 * SECOND - MS);
        assert!(matches!(other.claim_id(id).unwrap(), Verdict::Held { lease_left: MS, .. }));
        clock.advance(MS);
        assert_eq!(next(&other, "q").crashes(), 1);
        assert!(claim.ack().is_err());
    }
}

#[test]
fn a_machine_that_sleeps_loses_no_claim() {
    let (store, clock) = memory();
    let id = store.queue("q").enqueue("x").unwrap().id();
    let claim = next(&store.worker("w").unwrap(), "q");
    let other = store.worker("other").unwrap();
    for _ in 0..9 {
        clock.sleep_machine(30 * DAY);
        clock.advance(5 * SECOND);
        assert!(other.claim("q").unwrap().is_none());
        assert!(matches!(other.claim_id(id).unwrap(), Verdict::Held { .. }));
        assert_eq!(store.stuck(Duration::ZERO).unwrap(), []);
    }
    assert_eq!(row(&store, id).lease_left, Some(15 * SECOND));
    claim.ack().unwrap();
    sound(&store);
}

#[test]
fn a_reboot_ends_every_claim_at_once_and_takes_nothing_else() {
    let (store, clock) = memory_with(Store::options().lease(*LEASE_RANGE.end()));
    let queue = store.queue("q");
    queue.enqueue_all(vec!["x"; 5]).unwrap();
    let (a, b) = (store.worker("a").unwrap(), store.worker("b").unwrap());
    let (of_a, of_b) = (next(&a, "q"), next(&b, "q"));
    let detached = next(&store.detached("shell").unwrap(), "q");
    let deferred = next(&a, "q");
    deferred.defer(HOUR).unwrap();
    clock.reboot();

    // The programs of the boot before are gone, and so are their claims.
    assert!(matches!(a.claim("q"), Err(Error::Superseded { label }) if label == "a"));
    let new = store.worker("a").unwrap();
    let own = next(&new, "q");
    assert_eq!((own.id(), own.how(), own.crashes()), (of_a.id(), How::Recovered, 1));
    let others = new.claim_batch("q", 9).unwrap();
    let told: Vec<_> = others.iter().map(|claim| (claim.id(), claim.how(), claim.crashes())).collect();
    assert_eq!(told[..2], [(of_b.id(), How::Claimed, 1), (detached.id(), How::Claimed, 1)]);
    assert_eq!((told.len(), told[2].2), (3, 0));
    assert!(of_a.ack().is_err() && of_b.ack().is_err() && detached.ack().is_err());
    // The leases of the new boot are worth as much as any.
    assert!(store.worker("c").unwrap().claim("q").unwrap().is_none());
    clock.advance(HOUR);
    assert_eq!((next(&new, "q").id(), row(&store, deferred.id()).crashes), (deferred.id(), 0));
    sound(&store);
}

/// Also when the machine is only looked at since it was restarted.
#[test]
fn a_look_after_a_reboot_takes_no_claim_of_the_boot_before_for_held() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone());
    let store = open().open(folder.file()).unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    drop(next(&store.worker("w").unwrap(), "q"));
    drop(store);
    clock.reboot();
    let looking = open().open_read_only(folder.file()).unwrap();
    assert_eq!(looking.show(id).unwrap().unwrap().lease_left, Some(Duration::ZERO));
    assert!(matches!(looking.why(id).unwrap(), Some(Why::Void { .. })), "{:?}", looking.why(id));
    assert_eq!(looking.stuck(Duration::ZERO).unwrap().len(), 1);
    drop(looking);
    assert!(open().open(folder.file()).unwrap().worker("other").unwrap().claim("q").unwrap().is_some());
}

#[test]
fn the_budget_of_crashes_ends_a_message_whoever_finds_it() {
    for by_id in [false, true] {
        let (store, clock) = memory();
        let id = store.queue("q").enqueue("x").unwrap().id();
        let workers = [store.worker("a").unwrap(), store.worker("b").unwrap()];
        for crash in 0..CRASHES_MAX {
            assert_eq!(next(&workers[crash as usize % 2], "q").crashes(), crash);
            clock.advance(60 * SECOND);
        }
        if by_id {
            assert!(matches!(workers[0].claim_id(id).unwrap(), Verdict::Finished { status: Status::Dead }));
        } else {
            assert!(workers[0].claim("q").unwrap().is_none());
        }
        let dead = row(&store, id);
        assert_eq!((dead.status, dead.crashes, dead.attempts), (Status::Dead, CRASHES_MAX, CRASHES_MAX));
        assert!(dead.dead_reason.unwrap().contains(&format!("crashed {CRASHES_MAX} times")));
        sound(&store);
    }
}

/// B19: after a kill, messages stayed "executing" for ever.
#[test]
fn what_a_dead_worker_held_is_handed_out_when_its_lease_ends() {
    let (store, clock) = memory_with(Store::options().lease(2 * SECOND));
    let queue = store.queue("q");
    let ids: Vec<_> = queue.enqueue_all(vec!["x"; 10]).unwrap().into_iter().map(|new| new.id()).collect();
    // Killed: it settles nothing and never comes back. Its registration stays as a kill would leave it.
    let dead = store.worker("killed").unwrap();
    let lost = dead.claim_batch("q", 5).unwrap();
    let fresh = store.worker("fresh").unwrap().lease(HOUR).unwrap();
    let mut claims = Vec::new();
    for _ in 0..30 {
        claims.extend(fresh.claim_batch("q", 10).unwrap());
        clock.advance(100 * MS);
    }
    let mut told: Vec<_> = claims.iter().map(|claim| (claim.id(), claim.attempts(), claim.crashes())).collect();
    told.sort();
    let expected: Vec<_> =
        ids.iter().enumerate().map(|(at, id)| if at < 5 { (*id, 2, 1) } else { (*id, 1, 0) }).collect();
    assert_eq!(told, expected);
    for claim in &claims {
        claim.ack().unwrap();
    }
    assert!(lost.iter().all(|claim| claim.ack().is_ok_and(|settled| settled == relet::Settled::Gone)));
    let stats = &store.stats().unwrap().queues[0];
    assert_eq!((stats.count(Status::Processing), stats.live(), stats.acked), (0, 0, 10));
    sound(&store);
}

/// B61: long-running healthy items were flagged as stuck, since only the global limit was looked at.
#[test]
fn stuck_is_what_nobody_holds_with_a_lease_that_runs() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let store = Store::options().lease(2 * SECOND).clock(clock.clone()).open(folder.file()).unwrap();
    let queue = store.queue("q");
    queue.enqueue_all(["m1", "m2", "m3", "m4", "m5"]).unwrap();
    let _m1 = next(&store.worker("a").unwrap().lease(60 * SECOND).unwrap(), "q");
    let m2 = next(&store.worker("b").unwrap(), "q");
    let m3 = next(&store.worker("c").unwrap(), "q");
    next(&store.worker("d").unwrap(), "q").defer(HOUR).unwrap();
    clock.advance(SECOND + 500 * MS);
    m2.extend(2 * SECOND).unwrap();
    clock.advance(SECOND + 500 * MS);

    let conn = Connection::open(folder.file()).unwrap();
    let rows = || (raw(&conn, "relet_messages"), raw(&conn, "relet_retry_queue"), raw(&conn, "relet_counters"));
    let before = rows();
    let stuck = store.stuck(2 * SECOND).unwrap();
    assert_eq!(stuck.len(), 1, "{stuck:?}");
    let Stuck { id, queue, worker, age, overdue, attempts, .. } = stuck[0].clone();
    assert_eq!((id, queue.as_str(), worker.as_str()), (m3.id(), "q", "c"));
    assert_eq!((age, overdue, attempts), (3 * SECOND, SECOND, 1));
    assert_eq!(store.stuck(3 * SECOND).unwrap(), stuck);
    assert_eq!(store.stuck(3 * SECOND + MS).unwrap(), []);
    assert_eq!(store.stuck(HOUR).unwrap(), []);
    assert_eq!(store.stats().unwrap().queues[0].stuck, 0); // by default an hour
    assert_eq!(rows(), before);
    sound(&store);
}

#[test]
fn stuck_lists_the_oldest_first_also_those_that_were_deferred_and_abandoned_or_voided() {
    let (store, clock) = memory_with(Store::options().lease(2 * SECOND).stuck_after(40 * SECOND));
    let queue = store.queue("q");
    queue.enqueue_all(["deferred", "silent", "voided", "other"]).unwrap();
    let deferred = next(&store.worker("a").unwrap(), "q");
    deferred.defer(10 * SECOND).unwrap();
    clock.advance(SECOND);
    let silent = next(&store.worker("b").unwrap(), "q");
    clock.advance(SECOND);
    let voided = next(&store.worker("c").unwrap().lease(HOUR).unwrap(), "q").id();
    let list = || -> Vec<_> {
        store.stuck(Duration::ZERO).unwrap().into_iter().map(|one| (one.id, one.age, one.overdue)).collect()
    };
    assert_eq!(list(), []);
    store.worker("c").unwrap();
    assert_eq!(list(), [(voided, Duration::ZERO, Duration::ZERO)]);
    clock.advance(8 * SECOND + DEFERRAL_GRACE - MS);
    assert_eq!(list().iter().map(|one| one.0).collect::<Vec<_>>(), [silent.id(), voided]);
    clock.advance(MS);
    assert_eq!(
        list(),
        [
            (deferred.id(), 40 * SECOND, 30 * SECOND),
            (silent.id(), 39 * SECOND, 37 * SECOND),
            (voided, 38 * SECOND, Duration::ZERO),
        ]
    );
    assert_eq!(store.stats().unwrap().queues[0].stuck, 1);
    // What is stuck is not lost: the next claims take all of it.
    assert_eq!(store.worker("d").unwrap().claim_batch("q", 9).unwrap().len(), 4);
    assert_eq!(list(), []);
    sound(&store);
}

/// B27: recovery at start-up reset what others were working on.
#[test]
fn opening_a_store_again_takes_no_claim_away() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).open(folder.file()).unwrap();
    let store = open();
    let id = store.queue("q").enqueue("x").unwrap().id();
    let claim = next(&store.worker("w").unwrap(), "q");
    let before = row(&store, id);
    let second = open();
    let other = second.worker("other").unwrap();
    assert!(second.stuck(Duration::ZERO).unwrap().is_empty());
    second.prune().unwrap();
    assert!(other.claim("q").unwrap().is_none());
    assert!(matches!(other.claim_id(id).unwrap(), Verdict::Held { .. }));
    drop((other, second));
    assert_eq!(row(&store, id), before);
    claim.ack().unwrap();
    sound(&store);
}

/// There is one start of a label at a time. One of the boot before is over: the later one claims, the earlier is told so.
#[test]
fn an_earlier_start_of_a_label_may_not_claim_any_more() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(Duration::ZERO)));
    let queue = store.queue("q");
    let [held, free] = ["held", "free"].map(|text| queue.enqueue(text).unwrap().id());
    let old = store.worker("w").unwrap();
    let claim = next(&old, "q");
    let started_at = clock.wall_ms();
    clock.advance(SECOND);
    let Err(Error::LabelTaken { label, pid, started_at: told }) = store.worker("w") else { panic!("two of one label") };
    assert_eq!((label.as_str(), pid, told), ("w", std::process::id(), started_at));
    clock.reboot();
    let new = store.worker("w").unwrap();
    let refused = |outcome: Result<(), Error>| {
        assert!(matches!(&outcome, Err(Error::Superseded { label }) if label == "w"), "{outcome:?}");
    };
    let before = [held, free].map(|id| row(&store, id));
    refused(old.claim("q").map(drop));
    refused(old.claim_batch("q", 2).map(drop));
    refused(old.claim_id(free).map(drop));
    refused(old.clone().lease(SECOND).unwrap().claim("q").map(drop));
    assert_eq!([held, free].map(|id| row(&store, id)), before);

    let Verdict::Recovered(again) = new.claim_id(held).unwrap() else { panic!("not recovered") };
    assert_eq!((again.crashes(), again.attempts()), (1, 2));
    assert!(matches!(old.claim_id(held).unwrap(), Verdict::Held { by, .. } if by == "w"));
    // The end of the old one does not end the new one.
    drop((claim, old));
    again.fail("no").unwrap();
    assert_eq!(new.claim_batch("q", 9).unwrap().len(), 2);
    clock.advance(60 * SECOND);
    assert_eq!(new.claim_batch("q", 9).unwrap().len(), 2);
    sound(&store);
}

#[test]
fn a_restart_in_good_order_finds_its_own_claims_first() {
    let (store, _) = memory();
    let queue = store.queue("q");
    queue.enqueue_all(["a", "b"]).unwrap();
    let worker = store.worker("w").unwrap();
    let id = next(&worker, "q").id();
    drop(worker);
    // Nobody restarted it: the lease decides.
    assert!(matches!(store.worker("other").unwrap().claim_id(id).unwrap(), Verdict::Held { .. }));
    queue.enqueue(Message::new("urgent").priority(9)).unwrap();
    let claim = next(&store.worker("w").unwrap(), "q");
    assert_eq!((claim.id(), claim.how()), (id, How::Recovered));
    sound(&store);
}

#[test]
fn a_detached_worker_is_known_by_its_label_and_its_lease_alone() {
    let (store, clock) = memory();
    let queue = store.queue("q");
    let id = queue.enqueue("x").unwrap().id();
    let first = next(&store.detached("shell").unwrap(), "q");
    // The next command under the label goes on with it; another label does not.
    let second = store.detached("shell").unwrap();
    assert!(second.claim("q").unwrap().is_none());
    let Verdict::Resumed(resumed) = second.claim_id(id).unwrap() else { panic!("not resumed") };
    assert!(matches!(first.ack(), Err(Error::Stale { .. })));
    assert!(matches!(store.detached("other").unwrap().claim_id(id).unwrap(), Verdict::Held { .. }));
    // A worker of the label that starts does not void it: it has no incarnation that could have ended.
    let worker = store.worker("shell").unwrap();
    assert!(worker.claim("q").unwrap().is_none());
    assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Held { by, .. } if by == "shell"));
    resumed.extend(HOUR).unwrap();
    clock.advance(HOUR);
    assert_eq!(next(&worker, "q").how(), How::Recovered);
    sound(&store);
}

#[test]
fn a_worker_is_never_given_again_what_it_is_busy_with() {
    let (store, clock) = memory();
    let ids: Vec<_> = store.queue("q").enqueue_all(vec!["x"; 50]).unwrap().into_iter().map(|new| new.id()).collect();
    let worker = store.worker("w").unwrap();
    let mut seen = Vec::new();
    while let Some(claim) = worker.clone().claim("q").unwrap() {
        seen.push(claim.id());
        clock.advance(SECOND);
        claim.extend(HOUR).unwrap();
    }
    assert_eq!(seen, ids);
    assert!(worker.claim_batch("q", 50).unwrap().is_empty());
    sound(&store);
}

/// What `why` says before a claim by id is what the verdict says then.
#[test]
fn why_and_the_verdict_agree_in_every_state() {
    type Bring = fn(&Store, &Clock, &Worker);
    let states: [(&str, Bring); 22] = [
        ("ready", |_, _, _| {}),
        ("delayed", |store, _, _| redo(store, Message::new("x").delay(HOUR))),
        ("delayed and due", |store, clock, _| {
            redo(store, Message::new("x").delay(SECOND));
            clock.advance(SECOND);
        }),
        ("failed", |_, _, w| {
            take(w).fail_for("boom", HOUR).unwrap();
        }),
        ("failed and due", |_, clock, w| {
            take(w).fail_for("boom", SECOND).unwrap();
            clock.advance(SECOND);
        }),
        ("held", |_, _, w| drop(take(w))),
        ("held by a start that ended", |store, _, _| drop(take(&gone(store)))),
        ("lease over", |_, clock, w| {
            drop(take(w));
            clock.advance(60 * SECOND);
        }),
        ("restarted", |store, _, _| {
            drop(take(&gone(store)));
            gone(store);
        }),
        ("rebooted", |store, clock, w| {
            drop(take(w));
            clock.reboot();
            store.prune().unwrap();
        }),
        ("deferred", |_, _, w| {
            take(w).defer(HOUR).unwrap();
        }),
        ("deferred by a start that ended", |store, _, _| {
            take(&gone(store)).defer(HOUR).unwrap();
        }),
        ("deferred and due", |_, clock, w| {
            take(w).defer(SECOND).unwrap();
            clock.advance(SECOND);
        }),
        ("deferred by a start that ended, and due", |store, clock, _| {
            take(&gone(store)).defer(SECOND).unwrap();
            clock.advance(SECOND);
        }),
        ("abandoned", |_, clock, w| {
            take(w).defer(SECOND).unwrap();
            clock.advance(SECOND + DEFERRAL_GRACE);
        }),
        ("behind", |store, _, _| {
            store.cancel(1).unwrap();
            store.queue("q").enqueue(Message::new("head").group("g")).unwrap();
            store.queue("q").enqueue(Message::new("x").group("g")).unwrap();
        }),
        ("behind one that is held", |store, _, w| {
            store.cancel(1).unwrap();
            store.queue("q").enqueue(Message::new("head").group("g")).unwrap();
            drop(take(w));
            store.queue("q").enqueue(Message::new("x").group("g")).unwrap();
        }),
        ("expired", |store, clock, _| {
            redo(store, Message::new("x").ttl(SECOND));
            clock.advance(SECOND);
        }),
        ("dead", |_, _, w| {
            take(w).reject("no").unwrap();
        }),
        ("cancelled", |store, _, _| store.cancel(1).unwrap()),
        ("done", |_, _, w| {
            take(w).ack().unwrap();
        }),
        ("on another route", |store, _, _| store.route(1, Route::Queued).unwrap()),
    ];
    fn redo(store: &Store, message: Message) {
        store.cancel(1).unwrap();
        store.queue("q").enqueue(message).unwrap();
    }
    fn take(worker: &Worker) -> relet::Claim {
        next(worker, "q")
    }
    fn gone(store: &Store) -> Worker {
        store.worker("gone").unwrap()
    }
    for (state, bring) in states {
        let (store, clock) = memory_with(Store::options().retention(HOUR));
        store.queue("q").enqueue("x").unwrap();
        let worker = store.worker("w").unwrap();
        bring(&store, &clock, &worker);
        let id = store.list(&relet::Filter::new()).unwrap().pop().unwrap().id;
        let why = store.why(id).unwrap().unwrap();
        let before = row(&store, id);
        let verdict = store.worker("asks").unwrap().claim_id(id).unwrap();
        match (&why, &verdict) {
            (Why::Ready, Verdict::Claimed(claim)) => assert_eq!(claim.crashes(), before.crashes),
            (Why::Void { by, crashes }, Verdict::Claimed(claim)) => {
                assert_eq!((by, *crashes), (before.worker.as_ref().unwrap(), claim.crashes()));
            }
            (Why::Held { by, lease_left }, Verdict::Held { by: other, lease_left: left }) => {
                assert_eq!((by, lease_left), (other, left));
            }
            (Why::Due { at, after_error }, Verdict::Waiting { what: Wait::Due, until }) => {
                assert_eq!((Some(*at), after_error.as_deref()), (*until, before.last_error.as_deref()));
            }
            (
                Why::Deferred { by, due_at, abandoned_at, reason },
                Verdict::Waiting { what: Wait::Deferred { by: other }, until },
            ) => {
                let now = clock.wall_ms();
                assert_eq!((by, reason.as_str()), (other, "deferred"));
                assert_eq!(Some(if *due_at > now { *due_at } else { *abandoned_at }), *until);
            }
            (Why::Behind { id: head, because, .. }, Verdict::Waiting { what: Wait::Group { behind }, until: None }) => {
                assert_eq!(head, behind);
                assert_eq!(Some(&**because), store.why(*head).unwrap().as_ref());
            }
            (Why::Expired { at }, Verdict::Finished { status: Status::Dead }) => {
                assert_eq!(Some(*at), before.expires_at)
            }
            (Why::Finished { status, reason }, Verdict::Finished { status: other }) => {
                assert_eq!((status, reason), (other, &before.dead_reason));
            }
            other => panic!("{state}: {other:?}"),
        }
        let expected = match state {
            "ready" | "delayed and due" | "failed and due" | "abandoned" | "on another route" => "Ready",
            "deferred by a start that ended, and due" => "Ready",
            "delayed" | "failed" => "Due",
            "held" | "held by a start that ended" => "Held",
            "lease over" | "restarted" | "rebooted" => "Void",
            "deferred" | "deferred by a start that ended" | "deferred and due" => "Deferred",
            "behind" | "behind one that is held" => "Behind",
            "expired" => "Expired",
            _ => "Finished",
        };
        assert!(format!("{why:?}").starts_with(expected), "{state}: {why:?}");
        assert!(!why.to_string().is_empty());
        sound(&store);
    }
}

/// A route is no obstacle to the message, but to a worker that does not serve it.
#[test]
fn a_worker_that_does_not_serve_a_route_is_told_so() {
    let (store, _) = memory();
    let id = store.queue("q").enqueue(Message::new("x").route(Route::PendingLocal)).unwrap().id();
    let worker = store.worker("w").unwrap();
    let verdict = worker.routes(&[Route::Pending, Route::Queued]).claim_id(id).unwrap();
    assert!(matches!(verdict, Verdict::Waiting { what: Wait::Route(Route::PendingLocal), until: None }), "{verdict:?}");
    assert!(worker.routes(&[]).claim("q").unwrap().is_none());
    assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Claimed(_)));
    assert_eq!(store.why(999).unwrap(), None);
    sound(&store);
}
