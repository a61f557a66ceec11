//! A pool of workers: each message is handled once and settled as its handler says; what is at work is kept and what is not
//! is not held; and a stop strands nothing.
#![cfg(feature = "testing")]

mod common;
mod support;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use common::{HOUR, MS, SECOND, memory, memory_with, next, row, sound};
use relet::rusqlite::TransactionBehavior;
use relet::{
    Builder, CancelReason, Claim, Clock, Durability, Error, GateLimits, Message, MessageId, Outcome, Route, Settled,
    Status, Store, Workers,
};
use support::{Dir, LONG, eventually, hear, number, plain, timed};

/// Given once; whoever waits for it goes on from then on.
#[derive(Clone, Default)]
struct Signal(Arc<(Mutex<bool>, Condvar)>);

impl Signal {
    fn give(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let (given, bell) = &*self.0;
        let (given, _) = bell.wait_timeout_while(given.lock().unwrap(), LONG, |given| !*given).unwrap();
        assert!(*given, "the signal comes");
    }
}

fn file_store(dir: &Dir) -> Store {
    file_store_with(dir, LONG)
}

fn file_store_with(dir: &Dir, busy_wait: Duration) -> Store {
    let options = Store::options().durability(Durability::Normal).reserve(0).lease(HOUR);
    options.busy_wait(busy_wait).open(dir.join("store.db")).unwrap()
}

/// A pool of one handler thread that ends when nothing is left.
fn draining() -> Builder {
    Workers::builder().label("pool").drain(true)
}

/// Starts it, waits for its end, and for its label to be free.
fn run(builder: Builder, store: &Store) {
    let workers = builder.start(store).unwrap();
    assert!(workers.wait(LONG), "it drains");
    let stopped = workers.stop(Duration::ZERO);
    assert!(stopped.interrupted.is_empty() && stopped.error.is_none(), "{stopped:?}");
}

fn text(claim: &Claim) -> String {
    String::from_utf8(claim.payload().to_vec()).unwrap()
}

/// A handler that says which message it has, waits for the signal, and acks.
fn holds(begun: &Sender<MessageId>, go_on: &Signal) -> impl Fn(&Claim) + Send + Sync + 'static {
    let (begun, go_on) = (begun.clone(), go_on.clone());
    move |claim| {
        begun.send(claim.id()).unwrap();
        go_on.wait();
    }
}

/// Messages that have crashed once and are ready again.
fn crash(store: &Store, clock: &Clock, queue: &str, count: usize) -> Vec<MessageId> {
    let ids: Vec<_> = store.queue(queue).enqueue_all(vec!["crashed"; count]).unwrap().iter().map(|m| m.id()).collect();
    let claims = store.detached("crasher").unwrap().claim_batch(queue, count).unwrap();
    assert_eq!(claims.len(), count);
    clock.advance(HOUR);
    ids
}

// Handlers and outcomes.

#[test]
fn each_message_is_handled_once_with_1_4_and_16_handlers() {
    for handlers in [1, 4, 16] {
        let (store, _) = memory();
        let messages = store.queue("mail").enqueue_all(vec!["x"; 500]).unwrap();
        let (handled, all) = channel();
        let handler = move |claim: &Claim| handled.send(claim.id()).unwrap();
        run(draining().concurrency(handlers).queue("mail", handler), &store);
        let mut ids: Vec<_> = all.iter().collect();
        ids.sort();
        assert_eq!(ids, messages.iter().map(|message| message.id()).collect::<Vec<_>>());
        let stats = &store.stats().unwrap().queues[0];
        assert_eq!((stats.acked, stats.live()), (500, 0));
        sound(&store);
    }
}

#[test]
fn each_outcome_does_its_own_settle_and_costs_what_that_costs() {
    let (store, clock) = memory();
    let mail = store.queue("mail");
    let kinds = ["ack", "fail", "fail later", "reject", "defer", "limited", "release", "settled"];
    let ids: BTreeMap<_, _> = kinds.map(|kind| (kind, mail.enqueue(kind).unwrap().id())).into();
    let released = AtomicBool::new(false);
    let handler = move |claim: &Claim| match &*text(claim) {
        "ack" => Outcome::Ack,
        "fail" => Outcome::fail("no route"),
        "fail later" => Outcome::Fail { error: "busy".into(), retry_in: Some(2 * HOUR) },
        "reject" => Outcome::reject("no such address"),
        "defer" => Outcome::Defer { delay: HOUR, reason: "at night".into() },
        "limited" => Outcome::Limited { retry_after: HOUR },
        "release" if !released.swap(true, SeqCst) => Outcome::Release,
        "release" => Outcome::Ack,
        "settled" => {
            claim.reject("by the handler").unwrap();
            Outcome::Settled
        }
        other => panic!("{other}"),
    };
    let (ended, all) = channel();
    let ends = move |claim: &Claim, finished: &relet::Finished| {
        ended.send((text(claim), finished.settled.clone().unwrap())).unwrap();
    };
    run(draining().queue("mail", handler).on_finish(ends), &store);
    let told: Vec<_> = all.iter().collect();
    let expected = [
        ("ack", Settled::Now(Status::Done)),
        ("fail", Settled::Now(Status::Pending)),
        ("fail later", Settled::Now(Status::Pending)),
        ("reject", Settled::Now(Status::Dead)),
        ("defer", Settled::Now(Status::Processing)),
        ("limited", Settled::Now(Status::Processing)),
        ("release", Settled::Now(Status::Pending)),
        ("release", Settled::Now(Status::Done)),
        ("settled", Settled::Gone),
    ];
    assert_eq!(told, expected.map(|(kind, settled)| (kind.to_owned(), settled)));

    assert!(store.show(ids["ack"]).unwrap().is_none());
    assert!(store.show(ids["release"]).unwrap().is_none());
    let now = clock.wall_ms();
    let failed = row(&store, ids["fail"]);
    assert_eq!((failed.status, failed.attempts, failed.last_error.as_deref()), (Status::Pending, 1, Some("no route")));
    assert!(failed.due_at.unwrap() > now);
    assert_eq!(row(&store, ids["fail later"]).due_at, Some(now + 7_200_000));
    let rejected = row(&store, ids["reject"]);
    assert_eq!((rejected.status, rejected.last_error.as_deref()), (Status::Dead, Some("no such address")));
    for kind in ["defer", "limited"] {
        let deferred = row(&store, ids[kind]);
        assert_eq!((deferred.status, deferred.worker.as_deref()), (Status::Processing, Some("pool")));
        assert_eq!((deferred.attempts, deferred.deferrals, deferred.due_at), (0, 1, Some(now + 3_600_000)));
    }
    assert_eq!(row(&store, ids["settled"]).last_error.as_deref(), Some("by the handler"));
    let reasons: HashSet<_> = store.retry_queue(None, 9).unwrap().into_iter().map(|row| row.reason).collect();
    assert_eq!(reasons, ["no route", "busy", "at night", "rate limited"].map(str::to_owned).into());
    sound(&store);
}

#[test]
fn a_handler_may_return_nothing_or_a_result_and_an_error_is_a_failure_with_its_causes() {
    /// As error types of the field do: the causes in the long form alone.
    struct Caused;
    impl std::fmt::Display for Caused {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(if f.alternate() { "no mail: no network" } else { "no mail" })
        }
    }
    let (store, _) = memory();
    for queue in ["nothing", "fine", "failed", "outcome"] {
        store.queue(queue).enqueue(queue).unwrap();
    }
    let pool = draining()
        .queue("nothing", |_| ())
        .queue("fine", |_| Ok::<_, Caused>(()))
        .queue("failed", |_| Err::<(), _>(Caused))
        .queue("outcome", |_| Ok::<_, Caused>(Outcome::reject("no")));
    run(pool, &store);
    let left: Vec<_> = store.list(&relet::Filter::new()).unwrap();
    let told: Vec<_> = left.iter().map(|m| (&*m.queue, m.status, m.last_error.as_deref().unwrap())).collect();
    assert_eq!(told, [("failed", Status::Pending, "no mail: no network"), ("outcome", Status::Dead, "no")]);
}

#[test]
fn a_payload_that_does_not_decode_has_failed_with_that_reason_and_blocks_nothing() {
    #[derive(serde::Deserialize)]
    struct Order {
        number: u32,
    }
    let (store, clock) = memory();
    let orders = store.queue("orders");
    let bad = ["{", r#"{"number": "one"}"#].map(|bad| orders.enqueue(Message::new(bad).max_attempts(2)).unwrap().id());
    let good = orders.enqueue(r#"{"number": 42}"#).unwrap().id();
    let pool = || {
        let (handled, all) = channel();
        run(
            draining().queue_json("orders", move |order: Order, claim: &Claim| {
                handled.send((order.number, claim.id())).unwrap();
            }),
            &store,
        );
        all.iter().collect::<Vec<_>>()
    };
    assert_eq!(pool(), [(42, good)]);
    for id in bad {
        let failed = row(&store, id);
        assert_eq!((failed.status, failed.attempts), (Status::Pending, 1));
        let error = failed.last_error.unwrap();
        assert!(error.starts_with("its payload cannot be read: JSON: "), "{error}");
    }
    // Its tries end as anyone's do.
    clock.advance(HOUR);
    assert_eq!(pool(), []);
    assert_eq!(bad.map(|id| row(&store, id).status), [Status::Dead; 2]);
}

#[test]
fn a_panic_is_a_failure_with_its_message_and_its_thread_goes_on() {
    let (store, _) = memory();
    let mail = store.queue("mail");
    let ids = [0, 1, 2].map(|number| mail.enqueue(format!("{number}")).unwrap().id());
    let (threads, all) = channel();
    let handler = move |claim: &Claim| {
        threads.send(thread::current().id()).unwrap();
        match &*text(claim) {
            "0" => panic!("a plain one"),
            "1" => panic!("number {}", text(claim)),
            _ => (),
        }
    };
    run(draining().queue("mail", handler), &store);
    let threads: Vec<_> = all.iter().collect();
    assert_eq!((threads.len(), threads.into_iter().collect::<HashSet<_>>().len()), (3, 1));
    let error = |id| row(&store, id).last_error.unwrap();
    assert_eq!((error(ids[0]), error(ids[1])), ("panicked: a plain one".into(), "panicked: number 1".into()));
    assert!(store.show(ids[2]).unwrap().is_none());
}

#[test]
fn what_a_handler_has_settled_itself_stays_as_it_did() {
    let dir = Dir::new("itself");
    let store = file_store(&dir);
    let mail = store.queue("mail");
    let ids = ["ack", "reject", "defer"].map(|kind| mail.enqueue(kind).unwrap().id());
    let path = dir.join("store.db");
    plain(&path).execute_batch("CREATE TABLE sent (id INTEGER PRIMARY KEY)").unwrap();
    let handler = move |claim: &Claim| match &*text(claim) {
        "ack" => {
            let mut conn = plain(&path);
            let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
            tx.execute("INSERT INTO sent VALUES (?1)", [claim.id().get()]).unwrap();
            claim.ack_in(&tx).unwrap();
            tx.commit().unwrap();
        }
        "reject" => drop(claim.reject("no").unwrap()),
        _ => drop(claim.defer(HOUR).unwrap()),
    };
    let (ended, all) = channel();
    let ends = move |_: &Claim, finished: &relet::Finished| ended.send(finished.settled.clone().unwrap()).unwrap();
    run(draining().queue("mail", handler).on_finish(ends), &store);
    let told: Vec<_> = all.iter().collect();
    assert_eq!(told, [Settled::Gone, Settled::Before(Status::Dead), Settled::Before(Status::Processing)]);
    assert_eq!(number(&plain(&dir.join("store.db")), "SELECT id FROM sent"), ids[0].get());
    assert_eq!(row(&store, ids[1]).status, Status::Dead);
    assert_eq!((row(&store, ids[2]).status, row(&store, ids[2]).deferrals), (Status::Processing, 1));
    sound(&store);
}

#[test]
fn hooks_come_in_their_order_and_one_that_panics_harms_nothing() {
    let (store, _) = memory();
    store.queue("mail").enqueue_all(["a", "b"]).unwrap();
    let (say, all) = channel();
    let says = |what: &'static str| {
        let say = say.clone();
        move |claim: &Claim| say.send(format!("{what} {}", text(claim))).unwrap()
    };
    let ends = |what: &'static str| {
        let say = says(what);
        move |claim: &Claim, finished: &relet::Finished| {
            assert_eq!(finished.outcome, Outcome::Ack);
            assert_eq!(finished.settled.as_ref().unwrap(), &Settled::Now(Status::Done));
            say(claim);
        }
    };
    let pool = draining()
        .queue("mail", says("works on"))
        .on_start(says("first before"))
        .on_start(|_| panic!("a hook's own"))
        .on_start(says("second before"))
        .on_finish(ends("first after"))
        .on_finish(|_, _| panic!("a hook's own"))
        .on_finish(ends("second after"));
    run(pool, &store);
    drop(say);
    let steps = ["first before", "second before", "works on", "first after", "second after"];
    let expected = ["a", "b"].map(|message| steps.map(|step| format!("{step} {message}"))).concat();
    assert_eq!(all.iter().collect::<Vec<_>>(), expected);
}

#[test]
fn what_cannot_be_is_refused_at_the_start_and_takes_no_label() {
    let (store, _) = memory();
    let pool = || Workers::builder().label("pool").queue("mail", |_| ());
    let refused = |builder: Builder| builder.start(&store).unwrap_err().to_string();
    let none = refused(Workers::builder().label("pool"));
    assert!(none.contains("queues 0 is out of range"), "{none}");
    for (builder, what) in [
        (pool().queue("mail", |_| ()), "has two handlers"),
        (pool().weight("post", 2), "has a weight, but no handler"),
        (pool().queue("", |_| ()), "queue name"),
        (pool().weight("mail", 0), "weight 0 is out of range"),
        (pool().weight("mail", 1001), "weight 1001 is out of range"),
        (pool().concurrency(0), "concurrency 0 is out of range"),
        (pool().concurrency(1025), "concurrency 1025 is out of range"),
        (pool().lease(Duration::ZERO), "lease in ms 0 is out of range"),
    ] {
        let refused = refused(builder);
        assert!(refused.contains(what), "{refused}");
    }
    assert!(store.workers().unwrap().is_empty());
    assert!(store.worker("pool").is_ok());
}

// What is handed to whom.

/// With one handler the choice is exact.
#[test]
fn full_queues_are_served_by_their_weights() {
    for (weights, round) in [([1, 1, 1], "abc"), ([1, 4, 2], "abcbbcb")] {
        let (store, _) = memory();
        for queue in ["a", "b", "c"] {
            store.queue(queue).enqueue_all(vec![queue; 280]).unwrap();
        }
        let served = Arc::new(Mutex::new(String::new()));
        let handler = || {
            let served = served.clone();
            move |claim: &Claim| served.lock().unwrap().push_str(claim.queue())
        };
        let mut pool = draining().queue("a", handler()).queue("b", handler()).queue("c", handler());
        for (queue, weight) in ["a", "b", "c"].into_iter().zip(weights) {
            pool = pool.weight(queue, weight);
        }
        run(pool, &store);
        let served = served.lock().unwrap();
        // As long as all are full, every round has each queue's share.
        let rounds: Vec<_> = served.as_bytes()[..280].chunks_exact(round.len()).collect();
        for (number, served) in rounds.iter().enumerate() {
            let share = |queue: u8| served.iter().filter(|one| **one == queue).count();
            assert_eq!([b'a', b'b', b'c'].map(share), weights.map(|weight| weight as usize), "round {number}");
        }
        assert_eq!(served.len(), 840, "and in the end all have been served");
    }
}

#[test]
fn a_weight_of_3_gets_three_times_as_many_in_the_long_run() {
    let (store, _) = memory();
    store.queue("a").enqueue_all(vec!["a"; 1000]).unwrap();
    store.queue("b").enqueue_all(vec!["b"; 3000]).unwrap();
    let served = Arc::new(Mutex::new(String::new()));
    let handler = || {
        let served = served.clone();
        move |claim: &Claim| served.lock().unwrap().push_str(claim.queue())
    };
    run(draining().queue("a", handler()).queue("b", handler()).weight("b", 3), &store);
    let served = served.lock().unwrap();
    for served in (4..4000).step_by(4).map(|count| &served[..count]) {
        let expected = served.len() / 4 * 3;
        assert!(served.matches('b').count().abs_diff(expected) <= 1, "{served}");
    }
}

#[test]
fn an_empty_queue_saves_nothing_up() {
    let (store, _) = memory();
    let (a, b) = (store.queue("a"), store.queue("b"));
    a.enqueue_all(vec!["a"; 99]).unwrap();
    a.enqueue("the last one").unwrap();
    let served = Arc::new(Mutex::new(String::new()));
    let handler = || {
        let (served, a, b) = (served.clone(), a.clone(), b.clone());
        move |claim: &Claim| {
            served.lock().unwrap().push_str(claim.queue());
            if text(claim) == "the last one" {
                a.enqueue_all(vec!["a"; 50]).unwrap();
                b.enqueue_all(vec!["b"; 50]).unwrap();
            }
        }
    };
    run(draining().queue("a", handler()).queue("b", handler()), &store);
    let served = served.lock().unwrap();
    let (before, after) = served.split_at(100);
    assert!(!before.contains('b'));
    assert_eq!(after, "ba".repeat(50), "not all of b before a comes again");
}

#[test]
fn a_pool_on_one_route_leaves_the_others_alone() {
    let (store, _) = memory();
    let mail = store.queue("mail");
    let here = mail.enqueue(Message::new("here").route(Route::PendingLocal)).unwrap().id();
    let elsewhere = mail.enqueue("elsewhere").unwrap().id();
    run(draining().routes(&[Route::PendingLocal]).queue("mail", |_| ()), &store);
    assert!(store.show(here).unwrap().is_none());
    assert_eq!(row(&store, elsewhere).attempts, 0);
}

/// Nothing is claimed ahead: what is held is being worked on.
#[test]
fn as_many_run_as_were_asked_for_and_the_rest_is_untouched() {
    let (store, _) = memory();
    let messages = store.queue("mail").enqueue_all(vec!["x"; 100]).unwrap();
    let (begun, all) = channel();
    let go_on = Signal::default();
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let (holds, now, most) = (holds(&begun, &go_on), now.clone(), most.clone());
        move |claim: &Claim| {
            most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            holds(claim);
            now.fetch_sub(1, SeqCst);
        }
    };
    let workers = draining().concurrency(4).queue("mail", handler).start(&store).unwrap();
    let running: HashSet<_> = (0..4).map(|_| hear(&all)).collect();
    for message in messages {
        let held = running.contains(&message.id());
        let message = row(&store, message.id());
        assert_eq!((message.attempts, message.crashes, message.receipt.is_some()), (u32::from(held), 0, held));
    }
    go_on.give();
    assert!(workers.wait(LONG));
    assert_eq!(most.load(SeqCst), 4);
    assert_eq!(store.stats().unwrap().queues[0].acked, 100);
}

#[test]
fn messages_that_have_crashed_before_run_one_at_a_time_beside_the_others() {
    let (store, clock) = memory_with(Store::options().lease(HOUR));
    let crashed = crash(&store, &clock, "mail", 6);
    store.queue("mail").enqueue_all(vec!["well"; 60]).unwrap();
    let beside = Arc::new(AtomicUsize::new(0));
    let (now, most) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let (beside, most, store) = (beside.clone(), most.clone(), store.clone());
        move |claim: &Claim| {
            if claim.crashes() == 0 {
                beside.fetch_add(1, SeqCst);
                return;
            }
            most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            // Until one of the others has been handled meanwhile, or all of them.
            let seen = beside.load(SeqCst);
            eventually("another runs beside it", || beside.load(SeqCst) > seen || beside.load(SeqCst) == 60);
            // Whatever of its kind could be taken has not been.
            let held = store.list(&relet::Filter::new().status(Status::Processing)).unwrap();
            assert_eq!(held.iter().filter(|message| message.crashes > 0).count(), 1);
            now.fetch_sub(1, SeqCst);
        }
    };
    run(draining().concurrency(4).queue("mail", handler), &store);
    assert_eq!((most.load(SeqCst), beside.load(SeqCst)), (1, 60));
    assert!(crashed.into_iter().all(|id| store.show(id).unwrap().is_none()));
    sound(&store);
}

/// Their turn is one for the process, not for the pool.
#[test]
fn a_draining_pool_waits_for_its_turn_to_work_on_what_has_crashed_before() {
    let (store, clock) = memory_with(Store::options().lease(HOUR));
    crash(&store, &clock, "first", 1);
    let second = crash(&store, &clock, "second", 1)[0];
    let (begun, all) = channel();
    let go_on = Signal::default();
    let first = Workers::builder().drain(true).queue("first", holds(&begun, &go_on)).start(&store).unwrap();
    hear(&all);
    let (rested, rests) = channel();
    store.queue("second").enqueue("well").unwrap();
    let pool = draining().concurrency(2).queue("second", |_| ()).on_finish(move |claim, _| {
        rested.send(claim.id()).unwrap();
    });
    let pool = pool.start(&store).unwrap();
    assert_ne!(hear(&rests), second);
    assert!(!pool.wait(50 * MS), "something is left that it can have soon");
    go_on.give();
    assert_eq!(hear(&rests), second);
    assert!(pool.wait(LONG) && first.wait(LONG));
}

// While a handler runs.

/// The store's clock only goes on once the lease has been extended, so that no slow machine lets it run out.
#[test]
fn a_handler_that_takes_several_leases_keeps_its_message() {
    let (store, clock) = memory();
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (begun, all) = channel();
    let go_on = Signal::default();
    let lease = 200 * MS;
    let workers = draining().lease(lease).queue("mail", holds(&begun, &go_on)).start(&store).unwrap();
    hear(&all);
    let other = store.worker("other").unwrap();
    for _ in 0..8 {
        clock.advance(lease / 2);
        eventually("its lease is extended", || row(&store, id).lease_left == Some(lease));
        assert!(other.claim("mail").unwrap().is_none());
    }
    go_on.give();
    assert!(workers.wait(LONG));
    assert!(store.show(id).unwrap().is_none());
    assert_eq!(store.stats().unwrap().queues[0].acked, 1);
}

#[test]
fn a_handler_past_its_time_limit_is_told_and_keeps_its_message() {
    let (store, _) = memory();
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (told, all) = channel();
    let go_on = Signal::default();
    let handler = {
        let go_on = go_on.clone();
        move |claim: &Claim| {
            assert!(claim.cancel_token().wait(LONG));
            told.send(claim.cancel_token().reason()).unwrap();
            go_on.wait();
        }
    };
    let workers = draining().time_limit(20 * MS).queue("mail", handler).start(&store).unwrap();
    assert_eq!(hear(&all), Some(CancelReason::TimeLimit));
    let other = store.worker("other").unwrap();
    assert!(other.claim("mail").unwrap().is_none());
    assert_eq!(row(&store, id).worker.as_deref(), Some("pool"));
    go_on.give();
    assert!(workers.wait(LONG));
    assert_eq!(store.stats().unwrap().queues[0].acked, 1);
}

/// A hook that panicked once ended the thread that extends the leases.
#[test]
fn a_hook_of_a_token_that_panics_costs_nobody_a_lease() {
    let dir = Dir::new("token-hook");
    let store = file_store(&dir);
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let go_on = Signal::default();
    let (begun, begins) = channel();
    let handler = {
        let go_on = go_on.clone();
        move |claim: &Claim| {
            begun.send(()).unwrap();
            claim.cancel_token().on_set(|_| panic!("nobody listens"));
            assert!(claim.cancel_token().wait(LONG));
            go_on.wait();
        }
    };
    let pool = Workers::builder().label("pool").concurrency(2).lease(2 * SECOND).time_limit(10 * MS);
    let workers = pool.queue("mail", handler).start(&store).unwrap();
    hear(&begins);
    let other = store.worker("other").unwrap();
    // Real time: longer than its lease.
    for _ in 0..260 {
        assert!(other.claim("mail").unwrap().is_none());
        thread::sleep(10 * MS);
    }
    assert_eq!((row(&store, id).attempts, row(&store, id).crashes), (1, 0));
    go_on.give();
    eventually("it is acked", || store.stats().unwrap().queues[0].acked == 1);
    assert!(workers.stop(LONG).interrupted.is_empty());
}

/// While the hooks of a message ran, the next one was held and nobody looked after it.
#[test]
fn what_is_claimed_while_hooks_run_keeps_its_lease_and_is_released_by_a_stop() {
    let dir = Dir::new("finish-hook");
    let store = file_store(&dir);
    let ids = store.queue("mail").enqueue_all(["first", "second"]).unwrap();
    let second = ids[1].id();
    let (started, starts) = channel();
    let (in_hook, hooks) = channel();
    let go_on = Signal::default();
    let hook = {
        let go_on = go_on.clone();
        move |_: &Claim, _: &relet::Finished| {
            in_hook.send(()).unwrap();
            go_on.wait();
        }
    };
    let pool = Workers::builder().label("pool").lease(2 * SECOND).on_finish(hook);
    let pool = pool.queue("mail", move |claim: &Claim| started.send(claim.id()).unwrap());
    let workers = pool.start(&store).unwrap();
    hear(&hooks);
    let other = store.worker("other").unwrap();
    // Real time: longer than its lease.
    for _ in 0..260 {
        assert!(other.claim("mail").unwrap().is_none());
        thread::sleep(10 * MS);
    }
    assert!(workers.stop(Duration::ZERO).interrupted.is_empty(), "no handler ran");
    let message = row(&store, second);
    assert_eq!((message.status, message.attempts, message.crashes), (Status::Pending, 0, 0));
    go_on.give();
    assert_eq!(starts.iter().collect::<Vec<_>>(), [ids[0].id()], "the second one was never begun");
    sound(&store);
}

/// The supervisor sleeps for up to a second when there is nothing to look after: whatever begins wakes it, where it must.
#[test]
fn a_handler_is_told_soon_after_its_time_is_over() {
    let (store, _) = memory();
    store.queue("mail").enqueue_all(vec!["x"; 10]).unwrap();
    let (told, all) = channel();
    let handler = move |claim: &Claim| {
        let (is_told, took) = timed(|| claim.cancel_token().wait(LONG));
        told.send(is_told && took < 500 * MS).unwrap();
    };
    run(draining().time_limit(10 * MS).queue("mail", handler), &store);
    // A slow machine may be late now and then.
    let soon = all.iter().filter(|soon| *soon).count();
    assert!(soon >= 5, "{soon} of 10");
}

#[test]
fn a_handler_that_is_quick_enough_is_told_nothing() {
    let (store, _) = memory();
    store.queue("mail").enqueue_all(vec!["x"; 50]).unwrap();
    let told = Arc::new(AtomicUsize::new(0));
    let handler = {
        let told = told.clone();
        move |claim: &Claim| {
            told.fetch_add(usize::from(claim.cancel_token().is_set()), SeqCst);
        }
    };
    run(draining().concurrency(4).time_limit(HOUR).give_up_after(HOUR).queue("mail", handler), &store);
    assert_eq!(told.load(SeqCst), 0);
}

#[test]
fn a_handler_that_is_given_up_loses_its_message_to_another_and_what_it_returns_changes_nothing() {
    let (store, clock) = memory();
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (told, tells) = channel();
    let (ended, ends) = channel();
    let go_on = Signal::default();
    let handler = {
        let go_on = go_on.clone();
        move |claim: &Claim| {
            assert!(claim.cancel_token().wait(LONG));
            told.send(claim.cancel_token().reason()).unwrap();
            go_on.wait();
        }
    };
    let pool = Workers::builder().label("pool").lease(300 * MS).give_up_after(MS).queue("mail", handler);
    let pool = pool.on_finish(move |_, finished| ended.send(finished.settled.clone()).unwrap());
    let workers = pool.start(&store).unwrap();
    assert_eq!(hear(&tells), Some(CancelReason::TimeLimit));
    let other = store.worker("other").unwrap();
    clock.advance(200 * MS);
    // It would be extended each 100 ms.
    thread::sleep(250 * MS);
    assert!(other.claim("mail").unwrap().is_none(), "its lease still holds");
    clock.advance(100 * MS);
    let claim = next(&other, "mail");
    assert_eq!((claim.id(), claim.crashes(), claim.attempts()), (id, 1, 2));
    let held = row(&store, id);
    go_on.give();
    assert!(matches!(hear(&ends), Err(Error::Stale { .. })));
    assert_eq!(row(&store, id), held);
    claim.ack().unwrap();
    assert!(workers.stop(LONG).interrupted.is_empty());
    sound(&store);
}

#[test]
fn a_handler_whose_message_was_cancelled_is_told() {
    let (store, _) = memory();
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (begun, begins) = channel();
    let (told, tells) = channel();
    let handler = move |claim: &Claim| {
        begun.send(()).unwrap();
        assert!(claim.cancel_token().wait(LONG));
        told.send(claim.cancel_token().reason()).unwrap();
    };
    let workers = draining().lease(60 * MS).queue("mail", handler).start(&store).unwrap();
    hear(&begins);
    store.cancel(id).unwrap();
    assert_eq!(hear(&tells), Some(CancelReason::Lost));
    assert!(workers.wait(LONG));
    assert_eq!(row(&store, id).status, Status::Cancelled);
}

#[test]
fn a_handler_that_was_told_of_its_time_limit_is_told_of_a_loss_as_well() {
    let (store, _) = memory();
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (told, tells) = channel();
    let handler = move |claim: &Claim| {
        assert!(claim.cancel_token().wait(LONG));
        told.send(claim.cancel_token().reason()).unwrap();
        eventually("it is lost", || claim.cancel_token().reason() == Some(CancelReason::Lost));
        told.send(claim.cancel_token().reason()).unwrap();
    };
    let workers = draining().lease(60 * MS).time_limit(MS).queue("mail", handler).start(&store).unwrap();
    assert_eq!(hear(&tells), Some(CancelReason::TimeLimit));
    store.cancel(id).unwrap();
    assert_eq!(hear(&tells), Some(CancelReason::Lost));
    assert!(workers.wait(LONG));
}

// Stop.

#[test]
fn a_stop_waits_for_what_runs_tells_it_and_begins_nothing_new() {
    let (store, _) = memory();
    let messages = store.queue("mail").enqueue_all(vec!["x"; 5]).unwrap();
    let (begun, begins) = channel();
    let (told, tells) = channel();
    let handler = move |claim: &Claim| {
        begun.send(claim.id()).unwrap();
        assert!(claim.cancel_token().wait(LONG));
        told.send(claim.cancel_token().reason()).unwrap();
    };
    let workers = Workers::builder().concurrency(2).queue("mail", handler).start(&store).unwrap();
    let running: HashSet<_> = [hear(&begins), hear(&begins)].into();
    let stopped = workers.stop(LONG);
    assert!(stopped.interrupted.is_empty() && stopped.error.is_none());
    assert_eq!([hear(&tells), hear(&tells)], [Some(CancelReason::Stopping); 2]);
    assert!(begins.try_recv().is_err());
    assert_eq!(store.stats().unwrap().queues[0].acked, 2);
    for message in messages.iter().filter(|message| !running.contains(&message.id())) {
        let message = row(&store, message.id());
        assert_eq!((message.status, message.attempts, message.releases), (Status::Pending, 0, 0));
    }
    sound(&store);
}

#[test]
fn what_runs_past_the_deadline_is_released_with_its_attempt_and_what_its_handler_returns_changes_nothing() {
    let dir = Dir::new("deadline");
    let store = file_store(&dir);
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (begun, begins) = channel();
    let (ended, ends) = channel();
    let go_on = Signal::default();
    let pool = Workers::builder().label("pool").queue("mail", holds(&begun, &go_on));
    let pool = pool.on_finish(move |_, finished| ended.send(finished.settled.clone()).unwrap());
    let workers = pool.start(&store).unwrap();
    hear(&begins);
    assert_eq!(workers.stop(Duration::ZERO).interrupted, [id]);
    let released = row(&store, id);
    assert_eq!((released.status, released.attempts, released.crashes), (Status::Pending, 0, 0));
    assert_eq!((released.releases, released.due_at), (1, None));
    // Its thread has not ended.
    assert!(matches!(store.worker("pool"), Err(Error::LabelTaken { .. })));
    let claim = next(&store.worker("other").unwrap(), "mail");
    assert_eq!((claim.id(), claim.attempts(), claim.crashes()), (id, 1, 0));
    let held = row(&store, id);
    go_on.give();
    assert!(matches!(hear(&ends), Err(Error::Stale { .. })));
    assert_eq!(row(&store, id).receipt, held.receipt);
    claim.ack().unwrap();
    eventually("the label is free", || store.worker("pool").is_ok());
    sound(&store);
}

#[test]
fn a_failure_after_the_stop_is_an_interruption_and_a_success_a_success() {
    let (store, _) = memory();
    let mail = store.queue("mail");
    let ids = ["fails", "panics", "rejects", "acks"].map(|kind| mail.enqueue(kind).unwrap().id());
    let (begun, begins) = channel();
    let handler = move |claim: &Claim| {
        begun.send(()).unwrap();
        assert!(claim.cancel_token().wait(LONG));
        match &*text(claim) {
            "fails" => Outcome::fail("interrupted"),
            "panics" => panic!("interrupted"),
            "rejects" => Outcome::reject("no such address"),
            _ => Outcome::Ack,
        }
    };
    let workers = Workers::builder().concurrency(4).queue("mail", handler).start(&store).unwrap();
    (0..4).for_each(|_| hear(&begins));
    assert!(workers.stop(LONG).interrupted.is_empty(), "they ended by themselves");
    for id in &ids[..2] {
        let message = row(&store, *id);
        assert_eq!((message.status, message.attempts, message.releases), (Status::Pending, 0, 1));
        assert_eq!((message.due_at, message.last_error), (None, None));
    }
    assert_eq!(row(&store, ids[2]).status, Status::Dead);
    assert!(store.show(ids[3]).unwrap().is_none());
}

/// A claim may be waiting for the store while the stop comes.
#[test]
fn what_is_claimed_while_the_pool_stops_is_released_and_never_begun() {
    let dir = Dir::new("meanwhile");
    let path = dir.join("store.db");
    let store = file_store(&dir);
    let handled = Arc::new(AtomicUsize::new(0));
    let handler = {
        let handled = handled.clone();
        move |_: &Claim| {
            handled.fetch_add(1, SeqCst);
        }
    };
    let workers = Workers::builder().label("pool").queue("mail", handler).start(&store).unwrap();
    let mut conn = plain(&path);
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let id = store.queue("mail").enqueue_in(&tx, "x").unwrap().id();
    // By then its next look waits for the lock. Were it otherwise, nothing would be claimed, and this would hold all the same.
    thread::sleep(300 * MS);
    let (stopped, took) = timed(|| workers.stop(Duration::ZERO));
    assert!(stopped.interrupted.is_empty() && stopped.error.is_none(), "{stopped:?}");
    assert!(took < LONG, "with nothing to interrupt it needs no store");
    tx.commit().unwrap();
    eventually("the label is free", || store.worker("pool").is_ok());
    assert_eq!(handled.load(SeqCst), 0);
    let message = row(&store, id);
    assert_eq!((message.status, message.attempts, message.crashes), (Status::Pending, 0, 0));
}

/// It does not sleep on until its next look, which may be 200 ms away.
#[test]
fn an_idle_pool_stops_at_once_and_its_label_is_free_then() {
    let dir = Dir::new("idle");
    let store = file_store(&dir);
    let stop = |_| {
        let workers = Workers::builder().label("pool").concurrency(16).queue("mail", |_| ()).start(&store).unwrap();
        thread::sleep(20 * MS); // Were it not idle by then, it would end sooner.
        let (stopped, took) = timed(|| workers.stop(HOUR));
        assert!(stopped.interrupted.is_empty() && stopped.error.is_none(), "{stopped:?}");
        assert!(store.workers().unwrap().is_empty());
        took
    };
    let quickest = (0..20).map(stop).min().unwrap();
    assert!(quickest < 100 * MS, "{quickest:?}");
}

#[test]
fn a_second_pool_of_the_label_is_refused() {
    let dir = Dir::new("second");
    let (store, other) = (file_store(&dir), file_store(&dir));
    let pool = || Workers::builder().label("pool").queue("mail", |_| ());
    let workers = pool().start(&store).unwrap();
    assert_eq!(workers.label(), "pool");
    for store in [&store, &other] {
        assert!(matches!(pool().start(store), Err(Error::LabelTaken { label, .. }) if label == "pool"));
    }
    let _ = workers.stop(LONG);
    let _ = pool().start(&other).unwrap().stop(LONG);
    // Without one, each has its own.
    let unnamed = || Workers::builder().queue("mail", |_| ()).start(&store).unwrap();
    assert_ne!(unnamed().label(), unnamed().label());
}

#[test]
fn dropping_the_handle_begins_nothing_new_and_settles_what_runs() {
    let dir = Dir::new("drop");
    let store = file_store(&dir);
    let messages = store.queue("mail").enqueue_all(["a", "b"]).unwrap();
    let (begun, begins) = channel();
    let go_on = Signal::default();
    let pool = Workers::builder().label("pool").lease(60 * MS).queue("mail", holds(&begun, &go_on));
    let workers = pool.start(&store).unwrap();
    assert_eq!(hear(&begins), messages[0].id());
    drop(workers);
    let conn = plain(&dir.join("store.db"));
    let lease_until = || number(&conn, "SELECT place FROM relet_messages WHERE line = -1");
    let before = lease_until();
    eventually("its lease is extended all the same", || lease_until() > before);
    go_on.give();
    eventually("the label is free", || store.worker("pool").is_ok());
    assert!(store.show(messages[0].id()).unwrap().is_none());
    assert_eq!(row(&store, messages[1].id()).attempts, 0);
}

// Drain.

#[test]
fn a_drain_ends_when_nothing_can_be_claimed_and_no_handler_runs() {
    for handlers in [1, 4] {
        for _ in 0..20 {
            let (store, _) = memory();
            let mail = store.queue("mail");
            mail.enqueue("7").unwrap();
            let handler = move |claim: &Claim| {
                let depth: u32 = text(claim).parse().unwrap();
                if depth > 0 {
                    mail.enqueue_all(vec![(depth - 1).to_string(); 2]).unwrap();
                }
            };
            run(draining().concurrency(handlers).queue("mail", handler), &store);
            let stats = &store.stats().unwrap().queues[0];
            assert_eq!((stats.acked, stats.live()), (255, 0));
        }
    }
}

#[test]
fn a_drain_of_nothing_ends_and_what_waits_for_its_time_is_not_waited_for() {
    let (store, _) = memory();
    run(draining().concurrency(4).queue("mail", |_| ()), &store);
    let later = store.queue("mail").enqueue(Message::new("x").delay(HOUR)).unwrap().id();
    run(draining().concurrency(4).queue("mail", |_| ()), &store);
    assert_eq!(row(&store, later).attempts, 0);
}

// Errors of the store.

#[test]
fn what_is_done_while_the_store_is_locked_is_settled_when_it_is_free_also_after_a_stop() {
    for stops in [false, true] {
        let dir = Dir::new("locked");
        let store = file_store_with(&dir, 50 * MS);
        let messages = store.queue("mail").enqueue_all(["a", "b"]).unwrap();
        let (begun, begins) = channel();
        let (ended, ends) = channel();
        let (failed, fails) = channel();
        let go_on = Signal::default();
        let pool = Workers::builder().label("pool").queue("mail", holds(&begun, &go_on));
        let pool = pool.on_finish(move |claim, finished| ended.send((claim.id(), finished.settled.clone())).unwrap());
        let pool = pool.on_error(|_| panic!("a hook's own")).on_error(move |error| failed.send(error.clone()).unwrap());
        let workers = pool.start(&store).unwrap();
        hear(&begins);
        let conn = plain(&dir.join("store.db"));
        conn.execute_batch("BEGIN IMMEDIATE").unwrap();
        go_on.give();
        // At the step, and when it is settled alone, and whenever that is tried again.
        for _ in 0..4 {
            let error = hear(&fails);
            assert!(error.is_transient(), "{error}");
        }
        assert!(ends.try_recv().is_err());
        let (stopping, going_on) = match stops {
            true => (Some(thread::spawn(move || workers.stop(LONG))), None),
            false => (None, Some(workers)),
        };
        conn.execute_batch("ROLLBACK").unwrap();
        let (id, settled) = hear(&ends);
        assert_eq!((id, settled.unwrap()), (messages[0].id(), Settled::Now(Status::Done)));
        match stopping {
            Some(stopping) => {
                let stopped = stopping.join().unwrap();
                assert!(stopped.interrupted.is_empty() && stopped.error.is_none(), "{stopped:?}");
            }
            None => assert_eq!(hear(&ends).0, messages[1].id(), "it goes on"),
        }
        drop(going_on);
        sound(&file_store(&dir));
    }
}

#[test]
fn an_error_that_does_not_pass_ends_the_pool_and_is_told() {
    let dir = Dir::new("replaced");
    let store = file_store(&dir);
    let (failed, fails) = channel();
    let pool = Workers::builder().concurrency(4).queue("mail", |_| ());
    let pool = pool.on_error(move |error| failed.send(error.clone()).unwrap());
    let workers = pool.start(&store).unwrap();
    assert!(!workers.wait(Duration::ZERO));
    let path = dir.join("store.db");
    std::fs::rename(&path, dir.join("moved.db")).unwrap();
    std::fs::write(&path, "").unwrap();
    assert!(workers.wait(LONG), "it ends by itself");
    assert!(fails.try_iter().any(|error| matches!(error, Error::FileReplaced { .. })));
    let stopped = workers.stop(Duration::ZERO);
    assert!(matches!(stopped.error, Some(Error::FileReplaced { .. })), "{stopped:?}");
}

#[test]
fn a_pool_whose_label_was_started_again_ends_and_settles_what_it_holds() {
    let (store, clock) = memory_with(Store::options().lease(HOUR));
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let (begun, begins) = channel();
    let (ended, ends) = channel();
    let go_on = Signal::default();
    let pool = Workers::builder().label("pool").queue("mail", holds(&begun, &go_on));
    let pool = pool.on_finish(move |_, finished| ended.send(finished.settled.clone()).unwrap());
    let workers = pool.start(&store).unwrap();
    hear(&begins);
    clock.reboot();
    store.queue("mail").enqueue("later").unwrap();
    go_on.give();
    assert_eq!(hear(&ends).unwrap(), Settled::Now(Status::Done));
    assert!(workers.wait(LONG));
    assert!(matches!(workers.stop(LONG).error, Some(Error::Superseded { .. })));
    assert!(store.show(id).unwrap().is_none());
}

// Wake-up.

/// Each barrier is passed by eight handlers that are at work at the same time.
#[test]
fn a_burst_wakes_all_handlers() {
    let (store, _) = memory();
    let barrier = Arc::new(Barrier::new(8));
    let (passed, passes) = channel();
    let handler = move |_: &Claim| {
        barrier.wait();
        passed.send(()).unwrap();
    };
    let workers = Workers::builder().concurrency(8).queue("mail", handler).start(&store).unwrap();
    for burst in [8, 104, 8, 104, 8] {
        store.queue("mail").enqueue_all(vec!["x"; burst]).unwrap();
        (0..burst).for_each(|_| hear(&passes));
    }
    assert!(workers.stop(LONG).interrupted.is_empty());
}

/// A wake-up that is lost would cost up to the 200 ms for which nobody sleeps longer. A slow machine may do so now and then.
#[test]
fn no_wake_up_is_lost_in_10_000_rounds() {
    let (store, _) = memory();
    let (handled, all) = channel();
    let handler = move |claim: &Claim| handled.send(claim.id()).unwrap();
    let workers = Workers::builder().concurrency(3).queue("mail", handler).start(&store).unwrap();
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mail = store.queue("mail");
    let mut late = 0;
    for round in 0..10_000 {
        for _ in 0..random.u32(..2000) {
            std::hint::spin_loop();
        }
        let id = mail.enqueue("x").unwrap().id();
        let (first, took) = timed(|| hear(&all));
        assert_eq!(first, id);
        late += u32::from(took >= 90 * MS);
        assert!(late < 100, "seed {seed}: {late} of {round} came late");
    }
    assert!(workers.stop(LONG).interrupted.is_empty());
}

#[test]
fn what_becomes_due_is_handled_then() {
    let store = Store::open_in_memory().unwrap();
    let (handled, all) = channel();
    let handler = move |claim: &Claim| handled.send(claim.id()).unwrap();
    let workers = Workers::builder().concurrency(2).queue("mail", handler).start(&store).unwrap();
    let id = store.queue("mail").enqueue(Message::new("x").delay(30 * MS)).unwrap().id();
    assert_eq!(hear(&all), id);
    assert!(workers.stop(LONG).interrupted.is_empty());
}

/// How often a thread has gone to sleep, by the kernel's count.
#[cfg(target_os = "linux")]
fn naps(prefix: &str) -> BTreeMap<String, u64> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let of_pool = tasks.filter_map(|task| {
        let name = std::fs::read_to_string(task.join("comm")).ok().filter(|name| name.starts_with(prefix))?;
        let status = std::fs::read_to_string(task.join("status")).ok()?;
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        Some((format!("{} {name}", task.display()), count.trim().parse().unwrap()))
    });
    of_pool.collect()
}

/// In a process of its own: other tests' pools have threads of the same names.
#[cfg(target_os = "linux")]
#[test]
fn of_16_idle_handlers_one_looks_and_the_others_sleep() {
    let mut child = support::Child::start("role_idles", &[""]);
    child.expect("one at most");
    child.finish();
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_idles() {
    let Some(part) = support::part("role_idles") else { return };
    let (store, _) = memory();
    let workers = Workers::builder().concurrency(16).queue("mail", |_| ()).start(&store).unwrap();
    // Until all have come to rest, it may be more.
    let one_at_most = (0..30).any(|_| {
        let before = naps("relet-handler");
        thread::sleep(SECOND);
        let after = naps("relet-handler");
        let woken = after.iter().filter(|(thread, count)| before.get(*thread) != Some(count)).count();
        before.len() == 16 && woken <= 1
    });
    part.say(if one_at_most { "one at most" } else { "more than one" });
    let _ = workers.stop(LONG);
}

// Gates.

#[test]
fn a_message_that_is_limited_closes_its_gate_and_its_siblings_wait_without_a_try() {
    let (store, clock) = memory();
    let calls = store.queue("calls");
    let ids: Vec<_> = (0..5).map(|_| calls.enqueue(Message::new("x").gate("api")).unwrap().id()).collect();
    let free = calls.enqueue("free").unwrap().id();
    let (handled, all) = channel();
    let limits = Arc::new(AtomicBool::new(true));
    let pool = || {
        let (handled, limits) = (handled.clone(), limits.clone());
        draining().queue("calls", move |claim: &Claim| {
            handled.send(claim.id()).unwrap();
            match limits.swap(false, SeqCst) {
                true => Outcome::Limited { retry_after: 60 * SECOND },
                false => Outcome::Ack,
            }
        })
    };
    run(pool(), &store);
    assert_eq!(all.try_iter().collect::<Vec<_>>(), [ids[0], free], "what passes no gate goes on");
    let limited = row(&store, ids[0]);
    assert_eq!((limited.attempts, limited.deferrals, limited.crashes), (0, 1, 0));
    for id in &ids[1..] {
        assert_eq!((row(&store, *id).status, row(&store, *id).attempts), (Status::Pending, 0));
    }
    clock.advance(60 * SECOND);
    run(pool(), &store);
    assert_eq!(all.try_iter().collect::<Vec<_>>(), ids, "in their order");
    sound(&store);
}

#[test]
fn handlers_pass_a_gate_as_many_at_a_time_as_it_lets() {
    let (store, _) = memory();
    store.gate("api").limit(GateLimits::new().concurrency(2)).unwrap();
    let calls = store.queue("calls");
    calls.enqueue_all((0..40).map(|_| Message::new("x").gate("api"))).unwrap();
    let (now, most) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let most = most.clone();
        move |claim: &Claim| {
            most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            if claim.id().get() <= 2 {
                eventually("two are through", || now.load(SeqCst) == 2 || most.load(SeqCst) == 2);
            }
            now.fetch_sub(1, SeqCst);
        }
    };
    run(draining().concurrency(8).queue("calls", handler), &store);
    assert_eq!(most.load(SeqCst), 2);
    assert_eq!(store.stats().unwrap().queues[0].acked, 40);
    sound(&store);
}
