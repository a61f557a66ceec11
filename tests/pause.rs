//! A paused queue hands nothing out, for all processes, and loses nothing: what is held, deferred or void stays as safe as it was.
#![cfg(feature = "testing")]

mod common;
mod support;

use std::time::Duration;

use common::{DAY, HOUR, MS, SECOND, memory, memory_with, next, raw, row, sound};
use relet::{Clock, DEFERRAL_GRACE, Error, How, Message, Retry, Settled, Status, Store, Verdict, Wait, Why, Worker};
use support::{Dir, plain};

/// How long a test waits for what comes at once or never.
const PATIENCE: Duration = Duration::from_secs(30);

fn ms(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap()
}

/// Nothing is to be had now.
fn none(worker: &Worker) {
    let found = worker.claim("q").unwrap().map(|claim| claim.id());
    assert_eq!(found, None);
    assert!(worker.claim_batch("q", 10).unwrap().is_empty());
}

#[test]
fn a_paused_queue_hands_nothing_out_until_it_is_resumed() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    queue.pause().unwrap();
    let id = queue.enqueue("x").unwrap().id();
    let gated = queue.enqueue(Message::new("x").gate("api")).unwrap().id();
    let other = store.queue("other").enqueue("x").unwrap().id();
    none(&worker);
    for id in [id, gated] {
        assert!(store.why(id).unwrap().unwrap().to_string().ends_with("paused, until it is resumed"));
        let verdict = worker.claim_id(id).unwrap();
        assert!(matches!(verdict, Verdict::Waiting { what: Wait::Paused, until: Some(_) }), "{verdict:?}");
    }
    assert_eq!(next(&worker, "other").id(), other);
    let paused: Vec<_> = store.stats().unwrap().queues.into_iter().map(|queue| queue.paused_until.is_some()).collect();
    assert_eq!(paused, [false, true]);
    clock.advance(1000 * DAY);
    none(&worker);
    queue.pause().unwrap();
    queue.resume().unwrap();
    queue.resume().unwrap();
    assert_eq!([next(&worker, "q").id(), next(&worker, "q").id()], [id, gated]);
    assert_eq!(store.stats().unwrap().queues[1].paused_until, None);
    sound(&store);
}

#[test]
fn a_pause_for_a_time_ends_by_itself_at_its_instant() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let id = queue.enqueue("x").unwrap().id();
    queue.pause_for(HOUR).unwrap();
    let until = clock.wall_ms() + ms(HOUR);
    assert_eq!(store.why(id).unwrap(), Some(Why::Paused { until }));
    assert_eq!(store.stats().unwrap().queues[0].paused_until, Some(until));
    clock.advance(HOUR - MS);
    none(&worker);
    clock.advance(MS);
    assert_eq!(store.why(id).unwrap(), Some(Why::Ready));
    next(&worker, "q").ack().unwrap();

    // The longest counts.
    queue.enqueue("x").unwrap();
    for seconds in [5, 20, 10] {
        queue.pause_for(seconds * SECOND).unwrap();
    }
    clock.advance(20 * SECOND - MS);
    none(&worker);
    queue.pause().unwrap();
    queue.pause_for(SECOND).unwrap();
    clock.advance(1000 * DAY);
    none(&worker);
    queue.resume().unwrap();
    next(&worker, "q").ack().unwrap();
    sound(&store);
}

#[test]
fn what_is_held_goes_on_during_a_pause() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(SECOND)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let ids = queue.enqueue_all(["ack", "fail", "defer", "release", "resume"]).unwrap();
    let claims = worker.claim_batch("q", 5).unwrap();
    queue.pause().unwrap();
    claims[4].extend(HOUR).unwrap();
    let Verdict::Resumed(resumed) = worker.claim_id(ids[4].id()).unwrap() else { panic!("not resumed") };
    assert_eq!(claims[0].ack().unwrap(), Settled::Now(Status::Done));
    assert_eq!(claims[1].fail("no").unwrap(), Settled::Now(Status::Pending));
    assert_eq!(claims[2].defer(SECOND).unwrap(), Settled::Now(Status::Processing));
    assert_eq!(claims[3].release().unwrap(), Settled::Now(Status::Pending));
    clock.advance(SECOND);
    none(&worker);
    let verdict = worker.claim_id(ids[2].id()).unwrap();
    assert!(matches!(verdict, Verdict::Waiting { what: Wait::Paused, .. }), "{verdict:?}");
    resumed.ack().unwrap();
    queue.resume().unwrap();
    let back = worker.claim_batch("q", 9).unwrap();
    // Its own first, then what is ready.
    assert_eq!(back.iter().map(|claim| claim.id()).collect::<Vec<_>>(), [2, 1, 3].map(|at: usize| ids[at].id()));
    assert_eq!((back[0].how(), back[0].crashes()), (How::Resumed, 0));
    sound(&store);
}

/// A pause is no hiding place: what its worker has lost is seen, counted and back in line when the queue goes on.
#[test]
fn void_claims_are_taken_back_during_a_pause() {
    for own in [false, true] {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        let comes = if own { worker.clone() } else { store.worker("other").unwrap() };
        let queue = store.queue("q");
        let id = queue.enqueue("x").unwrap().id();
        let lost = next(&worker, "q");
        queue.pause_for(HOUR).unwrap();
        clock.advance(60 * SECOND);
        none(&comes);
        assert_eq!((row(&store, id).status, row(&store, id).crashes), (Status::Pending, 1));
        assert!(lost.ack().unwrap_err().is_claim_lost());
        clock.advance(HOUR);
        assert_eq!(next(&comes, "q").id(), id);
        sound(&store);
    }
}

#[test]
fn what_was_deferred_is_its_worker_s_after_a_pause_and_then_anyone_s() {
    for long in [false, true] {
        let (store, clock) = memory();
        let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
        let queue = store.queue("q");
        let id = queue.enqueue("x").unwrap().id();
        next(&worker, "q").defer(SECOND).unwrap();
        queue.pause_for(10 * SECOND).unwrap();
        clock.advance(10 * SECOND);
        if long {
            clock.advance(DEFERRAL_GRACE);
            assert_eq!(next(&other, "q").id(), id);
        } else {
            none(&other);
            assert_eq!(next(&worker, "q").how(), How::Resumed);
        }
        sound(&store);
    }
}

#[test]
fn a_worker_that_is_restarted_during_a_pause_gets_its_own_when_it_ends() {
    let (store, clock) = memory();
    let queue = store.queue("q");
    let id = queue.enqueue("x").unwrap().id();
    let worker = store.worker("w").unwrap();
    let _lost = next(&worker, "q");
    queue.pause_for(HOUR).unwrap();
    clock.reboot();
    drop((_lost, worker));
    let worker = store.worker("w").unwrap();
    none(&worker);
    clock.advance(HOUR);
    let claim = next(&worker, "q");
    assert_eq!((claim.id(), claim.crashes()), (id, 1));
    sound(&store);
}

#[test]
fn a_clock_set_back_does_not_stretch_a_pause() {
    for back in [SECOND, 30 * 60 * SECOND, DAY, 1000 * DAY] {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        let queue = store.queue("q");
        let id = queue.enqueue("x").unwrap().id();
        queue.pause_for(HOUR).unwrap();
        clock.set_wall_by(-ms(back));
        // Also for who only looks, before anything is written.
        let latest = clock.wall_ms() + ms(HOUR);
        let Why::Paused { until } = store.why(id).unwrap().unwrap() else { panic!() };
        assert!(until <= latest && store.stats().unwrap().queues[0].paused_until.unwrap() <= latest);
        none(&worker);
        clock.advance(HOUR - MS);
        none(&worker);
        clock.advance(MS);
        let claim = next(&worker, "q");
        assert_eq!(claim.id(), id, "{back:?}");
        claim.ack().unwrap();
        sound(&store);
    }
}

#[test]
fn a_pause_that_is_over_does_not_begin_again_when_the_clock_is_set_back() {
    for back in [SECOND, HOUR, 3 * HOUR] {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        let queue = store.queue("q");
        queue.enqueue_all(["a", "b"]).unwrap();
        queue.pause_for(2 * HOUR).unwrap();
        clock.advance(2 * HOUR);
        next(&worker, "q").ack().unwrap();
        clock.set_wall_by(-ms(back));
        next(&worker, "q").ack().unwrap();
        sound(&store);
    }
}

#[test]
fn no_clock_resumes_what_is_paused_until_it_is_resumed() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let id = queue.enqueue("x").unwrap().id();
    queue.pause().unwrap();
    for by in [-5, -ms(DAY), ms(10 * DAY)] {
        clock.set_wall_by(by);
        none(&worker);
        assert!(store.why(id).unwrap().unwrap().to_string().ends_with("until it is resumed"));
    }
    queue.resume().unwrap();
    assert_eq!(next(&worker, "q").id(), id);
    sound(&store);
}

/// The pause is in the file: another store on it sees it at once, and its own queues are untouched.
#[test]
fn a_pause_holds_for_all_who_have_the_file_open_and_for_one_queue() {
    let dir = Dir::new("pause");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).reserve(0).busy_wait(PATIENCE).open(&path).unwrap();
    let (store, second) = (open(), open());
    store.queue("bystander").enqueue("x").unwrap();
    store.queue("q").enqueue("x").unwrap();
    let conn = plain(&path);
    let before = raw(&conn, "relet_queues")[0].clone();
    let messages = raw(&conn, "relet_messages");
    store.queue("q").pause().unwrap();
    none(&second.worker("w").unwrap());
    drop((store, second));
    let store = open();
    let worker = store.worker("w").unwrap();
    none(&worker);
    assert_eq!(raw(&conn, "relet_queues")[0], before);
    assert_eq!(raw(&conn, "relet_messages"), messages, "a pause moves no rows");
    store.queue("q").resume().unwrap();
    next(&worker, "q").ack().unwrap();
    sound(&store);
}

/// Waits on a thread of its own, with the system's clock, until `change` lets something be handed out.
fn wakes(pause: impl FnOnce(&Store), change: impl FnOnce(&Store)) {
    let store = Store::open_in_memory().unwrap();
    let worker = store.worker("w").unwrap();
    store.queue("q").enqueue("x").unwrap();
    pause(&store);
    let waiter = std::thread::spawn(move || worker.claim_wait("q", PATIENCE).unwrap().map(|claim| claim.id()));
    change(&store);
    assert!(waiter.join().unwrap().is_some(), "it was not woken");
}

#[test]
fn a_waiting_worker_wakes_when_its_queue_goes_on() {
    wakes(|store| store.queue("q").pause().unwrap(), |store| store.queue("q").resume().unwrap());
    wakes(|store| store.queue("q").pause_for(50 * MS).unwrap(), |_| ());
}

#[test]
fn a_queue_s_name_is_judged_when_it_is_paused() {
    let (store, _) = memory();
    let queue = store.queue("a\nb");
    for outcome in [queue.pause(), queue.pause_for(SECOND), queue.resume()] {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::QueueName { name, .. } if name == "a\nb"), "{error:?}");
    }
    assert!(store.stats().unwrap().queues.is_empty());
}
