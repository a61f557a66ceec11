//! What must wait, waits in the retry queue: until its time and no longer, for its own worker first, and at no other's cost.
#![cfg(feature = "testing")]

mod common;

use std::time::{Duration, UNIX_EPOCH};

use common::{DAY, Folder, HOUR, MS, SECOND, memory, memory_with, next, raw, row, sound};
use relet::rusqlite::Connection;
use relet::rusqlite::types::Value;
use relet::{
    CRASHES_MAX, Clock, DEFERRAL_GRACE, GateLimits, How, Message, MessageId, Options, QueueDefaults, Retry, Settled,
    Status, Store, Verdict, Wait, Why, Worker,
};

/// Unix ms after `span`, as the store counts them.
fn after(clock: &Clock, span: Duration) -> i64 {
    clock.wall_ms() + i64::try_from(span.as_millis()).unwrap()
}

/// B31: rate-limited jobs burned through the limit of their attempts, since giving back shared the failures' counter.
#[test]
fn a_deferral_costs_no_attempt() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(SECOND)));
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue(Message::new("x").max_attempts(3)).unwrap().id();
    for round in 1..=10 {
        let claim = next(&worker, "q");
        assert_eq!((claim.attempts(), claim.deferrals()), (1, round - 1));
        assert_eq!(claim.defer_because(5 * SECOND, "429").unwrap(), Settled::Now(Status::Processing));
        let waiting = row(&store, id);
        assert_eq!((waiting.attempts, waiting.deferrals, waiting.crashes), (0, round, 0));
        assert_eq!((waiting.due_at, waiting.receipt), (Some(after(&clock, 5 * SECOND)), None));
        assert_eq!((waiting.status, waiting.worker.as_deref()), (Status::Processing, Some("w")));
        clock.advance(5 * SECOND - MS);
        assert!(worker.claim("q").unwrap().is_none());
        clock.advance(MS);
    }
    next(&worker, "q").fail("a real one").unwrap();
    assert_eq!((row(&store, id).attempts, row(&store, id).deferrals), (1, 10));
    clock.advance(SECOND);
    let claim = next(&worker, "q");
    assert_eq!((claim.attempts(), claim.last_error()), (2, Some("a real one")));
    claim.ack().unwrap();
    sound(&store);
}

/// B31, the other way to give back: a release costs no attempt, and what a claim by id resumed costs the one it took.
#[test]
fn a_release_costs_no_attempt_and_a_resume_costs_one() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue(Message::new("x").max_attempts(3)).unwrap().id();
    for round in 1..=10 {
        let claim = next(&worker, "q");
        assert_eq!(claim.attempts(), 1);
        claim.release().unwrap();
        assert_eq!((row(&store, id).attempts, row(&store, id).releases), (0, round));
    }
    let _first = next(&worker, "q");
    let Verdict::Resumed(second) = worker.claim_id(id).unwrap() else { panic!("not resumed") };
    let Verdict::Resumed(third) = worker.claim_id(id).unwrap() else { panic!("not resumed") };
    assert_eq!((second.attempts(), third.attempts()), (2, 3));
    // One more would leave the healthy holder without a try: it is told that it is the holder.
    let before = row(&store, id);
    assert!(
        matches!(worker.claim_id(id).unwrap(), Verdict::Held { by, lease_left } if by == "w" && lease_left > SECOND)
    );
    assert_eq!(row(&store, id), before);
    assert_eq!(third.fail("boom").unwrap(), Settled::Now(Status::Dead));
    sound(&store);
}

/// B33: the next try was counted from the time for which the last one had been planned, so that it lay in the past.
#[test]
fn a_retry_is_counted_from_now_whatever_the_message_had_been_due() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(30 * SECOND)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let ago = UNIX_EPOCH + Duration::from_millis(clock.wall_ms() as u64) - 2 * HOUR;
    for message in [Message::new("x").at(ago), Message::new("x").at(UNIX_EPOCH - DAY), Message::new("x").delay(HOUR)] {
        let id = queue.enqueue(message).unwrap().id();
        clock.advance(3 * HOUR);
        next(&worker, "q").fail("no").unwrap();
        let due_at = after(&clock, 30 * SECOND);
        assert_eq!(row(&store, id).due_at, Some(due_at));
        assert_eq!(store.retry_queue(None, 9).unwrap()[0].due_at, due_at);
        assert!(worker.claim("q").unwrap().is_none());
        clock.advance(30 * SECOND - MS);
        assert!(worker.claim("q").unwrap().is_none());
        clock.advance(MS);
        next(&worker, "q").ack().unwrap();
    }
    sound(&store);
}

/// B17: a message that kills its worker was taken up again without end, since only handled failures were counted.
#[test]
fn a_message_that_kills_its_workers_is_given_up() {
    type Lose = fn(&Store, &Clock);
    let ways: [(&str, Lose); 3] = [
        ("the lease runs out", |_, clock| clock.advance(60 * SECOND)),
        ("the worker is restarted", |_, _| {}),
        ("the machine is restarted", |_, clock| clock.reboot()),
    ];
    for (what, lose) in ways {
        for other in [false, true] {
            let (store, clock) = memory();
            let queue = store.queue("q");
            let poison = queue.enqueue(Message::new("poison").max_attempts(3)).unwrap().id();
            let good = queue.enqueue("good").unwrap().id();
            for crash in 0..CRASHES_MAX {
                let label = if other { format!("w{crash}") } else { "w".to_owned() };
                let claim = next(&store.worker(&label).unwrap(), "q");
                assert_eq!((claim.id(), claim.crashes(), claim.attempts()), (poison, crash, crash + 1), "{what}");
                let how = if other || crash == 0 { How::Claimed } else { How::Recovered };
                assert_eq!(claim.how(), how, "{what}");
                drop(claim);
                lose(&store, &clock);
                if other {
                    // A restart of its label makes the claim void for everybody.
                    store.worker(&label).unwrap();
                }
            }
            assert_eq!(next(&store.worker("w").unwrap(), "q").id(), good, "{what}");
            let dead = row(&store, poison);
            assert_eq!((dead.status, dead.attempts, dead.crashes), (Status::Dead, 3, 3), "{what}");
            assert!(dead.dead_reason.unwrap().contains("crashed 3 times"));
            sound(&store);
        }
    }
}

/// B35: instants were compared as texts of differing shapes.
#[test]
fn an_instant_is_reached_when_it_is_reached() {
    let day_edge = 1_899_244_799; // 2030-03-08T23:59:59Z
    let fractions = [0, 900_000_000, 123_000_000, 123_456_789, 999_999_999, 1, 999_999];
    for (whole, nanos) in fractions.map(|nanos| (day_edge, nanos)).into_iter().chain([(day_edge + 1, 0)]) {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        let due = Duration::new(whole, nanos);
        clock.set_wall_by((whole as i64 - 60) * 1000 - clock.wall_ms());
        store.queue("q").enqueue(Message::new("x").at(UNIX_EPOCH + due)).unwrap();
        // The last whole millisecond before it, and the first one that is not.
        let first = due.as_nanos().div_ceil(1_000_000) as i64;
        clock.set_wall_by(first - 1 - clock.wall_ms());
        assert!(worker.claim("q").unwrap().is_none(), "{due:?} is handed out at {} ms", clock.wall_ms());
        clock.set_wall_by(1);
        next(&worker, "q").ack().unwrap();
        sound(&store);
    }
}

/// B35: the storage class of every column of time is integer.
#[test]
fn every_instant_is_stored_as_an_integer() {
    let folder = Folder::new();
    let options = Store::options().clock(Clock::manual()).retention(HOUR).retry(Retry::fixed(HOUR));
    let store = options.open(folder.file()).unwrap();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    queue.enqueue_all(vec![Message::new("x").ttl(HOUR); 5]).unwrap();
    let claims = worker.claim_batch("q", 5).unwrap();
    claims[0].ack().unwrap();
    claims[1].fail("no").unwrap();
    claims[2].defer(HOUR).unwrap();
    claims[3].reject("no").unwrap();
    queue.enqueue(Message::new("x").at(UNIX_EPOCH + 100 * 365 * DAY).ttl(HOUR)).unwrap();
    queue.pause_for(HOUR).unwrap();
    let gate = store.gate("g");
    gate.limit(GateLimits::new().rate(1, HOUR)).unwrap();
    gate.close_for(HOUR).unwrap();
    let conn = Connection::open(folder.file()).unwrap();
    let mut seen = 0;
    for table in [
        "relet_messages",
        "relet_details",
        "relet_retry_queue",
        "relet_finished",
        "relet_workers",
        "relet_queues",
        "relet_gates",
    ] {
        let columns: Vec<String> = conn
            .prepare(&format!(
                "SELECT name FROM pragma_table_info('{table}')
                  WHERE (name GLOB '*_at' OR name GLOB '*_until') AND name <> 'tick_at'"
            ))
            .unwrap()
            .query_map([], |row| row.get(0))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        for column in columns {
            let sql = format!("SELECT DISTINCT typeof({column}) FROM {table} WHERE {column} IS NOT NULL");
            let types: Vec<String> =
                conn.prepare(&sql).unwrap().query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
            assert_eq!(types, ["integer"], "{table}.{column}");
            seen += 1;
        }
    }
    assert_eq!(seen, 13);
    sound(&store);
}

/// B37: after the clock had been ahead for a while, what it had stamped was never due again.
#[test]
fn what_a_clock_that_was_ahead_has_stamped_is_not_lost() {
    let (store, clock) = memory_with(Store::options().lease(30 * SECOND).retry(Retry::fixed(10 * SECOND)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let [held, failed, deferred] = ["held", "failed", "deferred"].map(|text| queue.enqueue(text).unwrap().id());
    clock.set_wall_by(DAY.as_millis() as i64);
    let _lost = next(&worker, "q");
    next(&worker, "q").fail("no").unwrap();
    next(&worker, "q").defer(20 * SECOND).unwrap();
    let delayed = queue.enqueue(Message::new("delayed").delay(5 * SECOND)).unwrap().id();
    clock.set_wall_by(-(DAY.as_millis() as i64));

    let fresh = queue.enqueue(Message::new("fresh").delay(HOUR)).unwrap().id();
    // What looks is right from the first write on, and before it is at least not negative.
    assert!(store.stats().unwrap().queues[0].oldest_waiting.is_none_or(|age| age <= DAY));
    assert!(worker.claim("q").unwrap().is_none());
    assert_eq!(row(&store, failed).due_at, Some(after(&clock, 10 * SECOND)));
    assert_eq!(row(&store, deferred).due_at, Some(after(&clock, 20 * SECOND)));
    assert_eq!(row(&store, delayed).due_at, Some(after(&clock, 5 * SECOND)));
    for (step, id) in [(5, delayed), (5, failed), (10, deferred)] {
        clock.advance(step * SECOND - MS);
        assert!(worker.claim("q").unwrap().is_none());
        clock.advance(MS);
        let claim = next(&worker, "q");
        assert_eq!(claim.id(), id);
        claim.ack().unwrap();
    }
    clock.advance(10 * SECOND);
    // The lease has run out; when it was made is known, whatever the wall clock said then.
    let stuck = store.stuck(Duration::ZERO).unwrap();
    assert_eq!(
        stuck.iter().map(|one| (one.id, one.age, one.overdue)).collect::<Vec<_>>(),
        [(held, 30 * SECOND, Duration::ZERO)]
    );
    let claim = next(&worker, "q");
    assert_eq!((claim.id(), claim.crashes()), (held, 1));
    claim.ack().unwrap();
    // Those that were fresh all along keep their time, and their order.
    clock.advance(HOUR - 30 * SECOND);
    let last = queue.enqueue("last").unwrap().id();
    assert_eq!([next(&worker, "q").id(), next(&worker, "q").id()], [fresh, last]);
    sound(&store);
}

/// B37 with two programs on one file: the one that was ahead is gone, the other one has not seen its time.
#[test]
fn what_another_handle_s_clock_has_stamped_ahead_is_not_lost_either() {
    let folder = Folder::new();
    let (clock, ahead) = (Clock::manual(), Clock::manual());
    let open =
        |clock: &Clock| Store::options().retry(Retry::fixed(10 * SECOND)).clock(clock.clone()).open(folder.file());
    let store = open(&clock).unwrap();
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    ahead.set_wall_by(DAY.as_millis() as i64);
    let other = open(&ahead).unwrap();
    next(&other.worker("other").unwrap(), "q").fail("no").unwrap();
    drop(other);
    clock.advance(10 * SECOND);
    let found = worker.claim("q").unwrap().map(|claim| claim.id());
    assert_eq!(found, Some(id), "due at {:?}, and it is {}", row(&store, id).due_at, clock.wall_ms());
    sound(&store);
}

/// B37: a clock that is set back postpones a wait by its own length at most, an instant not at all.
#[test]
fn a_wait_is_never_stretched_beyond_twice_its_length() {
    let seed = 37;
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..50 {
        let (store, clock) = memory_with(Store::options().retry(Retry::fixed(100 * SECOND)));
        let worker = store.worker("w").unwrap();
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&worker, "q");
        if random.bool() {
            claim.fail("no").unwrap()
        } else {
            claim.defer(100 * SECOND).unwrap()
        };
        let waited = random.u64(0..100);
        clock.advance(Duration::from_secs(waited));
        clock.set_wall_by(-random.i64(0..1_000_000));
        let mut passed = waited;
        while worker.claim("q").unwrap().is_none() {
            clock.advance(SECOND);
            passed += 1;
            assert!(passed <= 200, "{:?}", row(&store, id));
        }
        assert!(passed >= 100);
        sound(&store);
    }
}

/// A clock set forward makes waits end early, never late, and gives nobody's message away before its grace.
#[test]
fn a_clock_set_forward_ends_no_wait_and_loses_nothing() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    store.queue("q").enqueue_all(["a", "b"]).unwrap();
    next(&worker, "q").fail("no").unwrap();
    next(&worker, "q").defer(HOUR).unwrap();
    clock.set_wall_by(HOUR.as_millis() as i64);
    assert!(other.claim("q").unwrap().is_none() && worker.claim("q").unwrap().is_none());
    clock.advance(HOUR);
    assert_eq!((next(&other, "q").attempts(), other.claim("q").unwrap().is_none()), (2, true));
    assert_eq!(next(&worker, "q").how(), How::Resumed);
    sound(&store);
}

/// The message's own policy, else the queue's, else the store's; what the caller says comes before all.
#[test]
fn the_nearest_policy_decides() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(SECOND)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let waits = |message: Message, explicit: Option<Duration>| {
        let id = queue.enqueue(message).unwrap().id();
        let Verdict::Claimed(claim) = worker.claim_id(id).unwrap() else { panic!("not claimed") };
        match explicit {
            Some(delay) => claim.fail_for("no", delay).unwrap(),
            None => claim.fail("no").unwrap(),
        };
        let due_at = row(&store, id).due_at.unwrap();
        store.cancel(id).unwrap();
        Duration::from_millis((due_at - clock.wall_ms()) as u64)
    };
    let own = || Message::new("x").retry(Retry::fixed(3 * SECOND));
    assert_eq!(waits(Message::new("x"), None), SECOND);
    assert_eq!(waits(own(), None), 3 * SECOND);
    queue.set_defaults(QueueDefaults::new().retry(Retry::fixed(2 * SECOND))).unwrap();
    assert_eq!(waits(Message::new("x"), None), 2 * SECOND);
    assert_eq!(waits(own(), None), 3 * SECOND);
    assert_eq!(waits(own(), Some(4 * SECOND)), 4 * SECOND);
    assert_eq!(waits(Message::new("x"), Some(MS)), MS);
    queue.set_defaults(QueueDefaults::new()).unwrap();
    assert_eq!(waits(Message::new("x"), None), SECOND);
    sound(&store);
}

#[test]
fn the_limit_of_attempts_is_the_message_s_else_the_queue_s_else_the_store_s() {
    let (store, _) = memory_with(Store::options().max_attempts(3).retry(Retry::fixed(Duration::ZERO)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let tries = |message: Message| {
        let id = queue.enqueue(message).unwrap().id();
        (1..).find(|_| next(&worker, "q").fail("no").unwrap() == Settled::Now(Status::Dead)).inspect(|tries| {
            assert_eq!((row(&store, id).attempts, row(&store, id).max_attempts), (*tries, *tries));
        })
    };
    assert_eq!(tries(Message::new("x")), Some(3));
    queue.set_defaults(QueueDefaults::new().max_attempts(2)).unwrap();
    assert_eq!(tries(Message::new("x")), Some(2));
    assert_eq!(tries(Message::new("x").max_attempts(5)), Some(5));
    assert_eq!(tries(Message::new("x").max_attempts(1)), Some(1));
    sound(&store);
}

/// A policy survives its way through the file, whatever numbers it was made of.
#[test]
fn a_stored_policy_is_the_policy_that_was_given() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(MS)));
    let worker = store.worker("w").unwrap();
    let (base, cap) = (10 * SECOND, HOUR);
    let plain = || Retry::exponential(base, cap).jitter(0.0);
    let policies = [
        plain(),
        plain().factor(1.5),
        plain().factor(0.0),
        plain().factor(f64::NAN),
        plain().factor(f64::INFINITY),
        Retry::fixed(Duration::MAX),
        Retry::fixed(Duration::ZERO),
        Retry::exponential(base, cap).jitter(f64::NAN),
    ];
    for retry in policies {
        let id = store.queue("q").enqueue(Message::new("x").retry(retry).max_attempts(9)).unwrap().id();
        for failures in 0..5 {
            let Verdict::Claimed(claim) = worker.claim_id(id).unwrap() else { panic!("{retry:?}") };
            claim.fail("no").unwrap();
            let waits = row(&store, id).due_at.map_or(0, |due_at| due_at - clock.wall_ms());
            let end_of_time = 253_402_300_799_999 - clock.wall_ms();
            let expected = i64::try_from(retry.delay(failures).as_millis()).unwrap_or(i64::MAX).min(end_of_time);
            assert_eq!(waits, expected, "{retry:?} after {failures} failures");
            if expected == end_of_time {
                break;
            }
            clock.advance(Duration::from_millis(waits as u64));
        }
        store.cancel(id).unwrap();
    }
    sound(&store);
}

#[test]
fn jitter_shortens_the_backoff_by_its_share_at_most_and_never_what_a_server_has_asked_for() {
    let (store, clock) = memory_with(Store::options().retry(Retry::exponential(100 * SECOND, HOUR).jitter(0.5)));
    let worker = store.worker("w").unwrap();
    let ids: Vec<_> = store.queue("q").enqueue_all(vec!["x"; 200]).unwrap().into_iter().map(|new| new.id()).collect();
    let mut seen = std::collections::BTreeSet::new();
    for (at, id) in ids.iter().enumerate() {
        let claim = next(&worker, "q");
        if at % 2 == 0 {
            claim.fail("no").unwrap()
        } else {
            claim.fail_for("429", 100 * SECOND).unwrap()
        };
        let wait = row(&store, *id).due_at.unwrap() - clock.wall_ms();
        if at % 2 == 0 {
            assert!((50_000..=100_000).contains(&wait), "{wait}");
            seen.insert(wait);
        } else {
            assert_eq!(wait, 100_000);
        }
    }
    assert!(seen.len() > 50, "they would all come back together: {seen:?}");
    sound(&store);
}

/// A wait is not rounded down: not by a millisecond is a server asked too early.
#[test]
fn a_wait_of_a_fraction_of_a_millisecond_is_not_undercut() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let enqueue = |message: Message| store.queue("q").enqueue(message).unwrap().id();
    for wait in [Duration::from_nanos(1), Duration::from_micros(999), Duration::from_micros(1_500)] {
        let least = wait.as_nanos().div_ceil(1_000_000) as i64;
        let waits = |id: MessageId| row(&store, id).due_at.map_or(0, |due_at| due_at - clock.wall_ms());
        let failed = enqueue(Message::new("x"));
        next(&worker, "q").fail_for("503", wait).unwrap();
        assert_eq!(waits(failed), least, "fail for {wait:?}");
        let deferred = enqueue(Message::new("x"));
        next(&worker, "q").defer(wait).unwrap();
        assert_eq!(waits(deferred), least, "defer for {wait:?}");
        let delayed = enqueue(Message::new("x").delay(wait));
        assert_eq!(waits(delayed), least, "delay of {wait:?}");
        store.cancel_all([failed, deferred, delayed]).unwrap();
    }
    sound(&store);
}

#[test]
fn no_wait_is_too_long_to_be_stored() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let far = UNIX_EPOCH + Duration::from_secs(i64::MAX as u64 / 4);
    for huge in [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_millis(i64::MAX as u64), 9000 * 365 * DAY]
    {
        let queue = store.queue("q");
        let failed = queue.enqueue("x").unwrap().id();
        next(&worker, "q").fail_for("no", huge).unwrap();
        let deferred = queue.enqueue("x").unwrap().id();
        next(&worker, "q").defer(huge).unwrap();
        let delayed = queue.enqueue(Message::new("x").delay(huge).ttl(huge)).unwrap().id();
        let at = queue.enqueue(Message::new("x").at(far)).unwrap().id();
        clock.advance(100 * 365 * DAY);
        assert!(worker.claim("q").unwrap().is_none());
        for id in [failed, deferred, delayed, at] {
            assert!(row(&store, id).due_at.unwrap() > clock.wall_ms());
        }
        clock.set_wall_by(-(100 * 365 * DAY.as_millis() as i64));
        assert!(worker.claim("q").unwrap().is_none());
        sound(&store);
        assert!(store.cancel_all([failed, deferred, delayed, at]).unwrap().iter().all(Result::is_ok));
    }
    // At the end of time itself, all of it is due.
    let id = store.queue("q").enqueue(Message::new("x").delay(Duration::MAX)).unwrap().id();
    clock.advance(Duration::MAX);
    assert_eq!(next(&worker, "q").id(), id);
}

#[test]
fn a_deferred_message_is_kept_for_its_worker_until_due_and_grace_and_then_for_anyone() {
    let (store, clock) = memory();
    let (own, other) = (store.worker("own").unwrap(), store.worker("other").unwrap());
    let queue = store.queue("q");
    let first = queue.enqueue("x").unwrap().id();
    let due_at = after(&clock, 10 * SECOND);
    next(&own, "q").defer(10 * SECOND).unwrap();
    let waits = |worker: &Worker, until: i64| {
        let verdict = worker.claim_id(first).unwrap();
        let Verdict::Waiting { what: Wait::Deferred { by }, until: told } = verdict else { panic!("{verdict:?}") };
        assert_eq!((by.as_str(), told), ("own", Some(until)));
        assert!(worker.claim("q").unwrap().is_none());
    };
    waits(&own, due_at);
    waits(&other, due_at);
    clock.advance(10 * SECOND - MS);
    waits(&own, due_at);
    waits(&other, due_at);
    clock.advance(MS);
    waits(&other, due_at + 30_000);
    clock.advance(DEFERRAL_GRACE - MS);
    waits(&other, due_at + 30_000);
    clock.advance(MS);
    let taken = next(&other, "q");
    assert_eq!((taken.how(), taken.crashes(), taken.attempts(), taken.deferrals()), (How::Claimed, 0, 1, 1));
    taken.ack().unwrap();

    // Its own worker has it from due on, however late it comes.
    for late in [Duration::ZERO, DEFERRAL_GRACE, 100 * DAY] {
        for by_id in [false, true] {
            let id = queue.enqueue("x").unwrap().id();
            next(&own, "q").defer(SECOND).unwrap();
            clock.advance(SECOND + late);
            let claim = if by_id { own.claim_id(id).unwrap().claim().unwrap() } else { next(&own, "q") };
            assert_eq!((claim.id(), claim.how(), claim.crashes()), (id, How::Resumed, 0));
            claim.ack().unwrap();
        }
    }
    sound(&store);
}

/// Only what was being worked on can crash.
#[test]
fn a_deferred_message_comes_back_without_a_crash_whoever_comes_for_it() {
    let (store, clock) = memory();
    for step in 0..10 {
        let id = store.queue("q").enqueue("x").unwrap().id();
        let old = store.worker("w").unwrap();
        next(&old, "q").defer(SECOND).unwrap();
        let mut living = None;
        let claimer = match step % 5 {
            0 => old,
            1 => {
                drop(old);
                store.worker("w").unwrap()
            }
            2 => {
                living = Some(old);
                clock.reboot();
                store.worker("w").unwrap()
            }
            3 => {
                drop(old);
                store.worker("other").unwrap()
            }
            _ => {
                living = Some(old);
                clock.advance(DEFERRAL_GRACE);
                store.worker("other").unwrap()
            }
        };
        clock.advance(SECOND);
        let claim = if step < 5 { next(&claimer, "q") } else { claimer.claim_id(id).unwrap().claim().unwrap() };
        let how = [How::Resumed, How::Recovered, How::Recovered, How::Claimed, How::Claimed][step % 5];
        assert_eq!((claim.id(), claim.how(), claim.crashes(), claim.attempts()), (id, how, 0, 1), "{step}");
        claim.ack().unwrap();
        drop(living);
    }
    sound(&store);
}

/// Its own due deferred messages come first, whatever the priority of what is ready.
#[test]
fn a_worker_finds_what_it_had_deferred_before_all_that_is_ready() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let [late, early] = ["late", "early"].map(|text| queue.enqueue(Message::new(text).priority(-5)).unwrap().id());
    next(&worker, "q").defer(2 * SECOND).unwrap();
    next(&worker, "q").defer(SECOND).unwrap();
    let urgent = queue.enqueue(Message::new("urgent").priority(9)).unwrap().id();
    clock.advance(2 * SECOND);
    let order: Vec<_> = worker.claim_batch("q", 9).unwrap().iter().map(|claim| claim.id()).collect();
    assert_eq!(order, [early, late, urgent]);
    sound(&store);
}

#[test]
fn releases_and_deferrals_have_ceilings_of_their_own() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let id = queue.enqueue(Message::new("x").max_attempts(1)).unwrap().id();
    for _ in 1..relet::RELEASES_MAX {
        assert_eq!(next(&worker, "q").release().unwrap(), Settled::Now(Status::Pending));
    }
    for _ in 1..relet::DEFERRALS_MAX {
        assert_eq!(next(&worker, "q").defer(Duration::ZERO).unwrap(), Settled::Now(Status::Processing));
    }
    let message = row(&store, id);
    assert_eq!((message.releases, message.deferrals, message.attempts), (999, 999, 0));
    assert_eq!(next(&worker, "q").defer(Duration::ZERO).unwrap(), Settled::Now(Status::Dead));
    assert!(row(&store, id).dead_reason.unwrap().contains("deferred 1000 times"));
    assert_eq!(store.retry_queue(None, 9).unwrap(), []);
    sound(&store);
}

#[test]
fn the_retry_queue_lists_who_waits_for_what_until_when() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(20 * SECOND)));
    let worker = store.worker("w").unwrap();
    let (mail, sms) = (store.queue("mail"), store.queue("sms"));
    let failed = mail.enqueue("x").unwrap().id();
    next(&worker, "mail").fail("smtp: timeout").unwrap();
    let deferred = mail.enqueue("x").unwrap().id();
    next(&worker, "mail").defer_because(10 * SECOND, "429").unwrap();
    let other = sms.enqueue("x").unwrap().id();
    next(&worker, "sms").fail_for("no route", 10 * SECOND).unwrap();
    mail.enqueue(Message::new("delayed, not retried").delay(SECOND)).unwrap();
    mail.enqueue("ready").unwrap();

    let list = |queue: Option<&str>, limit: usize| -> Vec<_> {
        let rows = store.retry_queue(queue, limit).unwrap();
        rows.into_iter().map(|row| (row.id, row.queue, row.worker, row.due_at, row.reason, row.count)).collect()
    };
    let (soon, later) = (after(&clock, 10 * SECOND), after(&clock, 20 * SECOND));
    let deferred_row = (deferred, "mail".to_owned(), Some("w".to_owned()), soon, "429".to_owned(), 1);
    let sms_row = (other, "sms".to_owned(), None, soon, "no route".to_owned(), 1);
    let failed_row = (failed, "mail".to_owned(), None, later, "smtp: timeout".to_owned(), 1);
    assert_eq!(list(None, 9), [deferred_row.clone(), sms_row.clone(), failed_row.clone()]);
    assert_eq!(list(Some("mail"), 9), [deferred_row.clone(), failed_row]);
    assert_eq!(list(Some("mail"), 1), [deferred_row]);
    assert_eq!((list(Some("sms"), 9), list(Some("none"), 9), list(None, 0)), (vec![sms_row], vec![], vec![]));
    let stats = store.stats().unwrap();
    assert_eq!(stats.queues.iter().map(|queue| queue.retrying).collect::<Vec<_>>(), [2, 1]);

    // Again: the newest reason, and how many times it has been.
    clock.advance(20 * SECOND);
    for claim in worker.claim_batch("mail", 9).unwrap() {
        if claim.id() == failed {
            claim.fail("again").unwrap()
        } else {
            claim.defer_because(SECOND, "still 429").unwrap()
        };
    }
    let again: Vec<_> = list(Some("mail"), 9).into_iter().map(|row| (row.0, row.4, row.5)).collect();
    assert_eq!(again.iter().find(|row| row.0 == failed), Some(&(failed, "again".to_owned(), 2)));
    assert_eq!(again.iter().find(|row| row.0 == deferred), Some(&(deferred, "still 429".to_owned(), 2)));
    assert_eq!(list(None, 9).len(), 5);
    sound(&store);
}

#[test]
fn what_fails_without_a_wait_is_ready_at_once_and_not_in_the_retry_queue() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    next(&worker, "q").fail_for("boom", Duration::ZERO).unwrap();
    assert_eq!(store.retry_queue(None, 9).unwrap(), []);
    assert_eq!((row(&store, id).due_at, store.why(id).unwrap()), (None, Some(Why::Ready)));
    assert_eq!(next(&worker, "q").last_error(), Some("boom"));
    sound(&store);
}

/// The waits of a message do not outlive it: nothing in the retry queue but what waits.
#[test]
fn whatever_ends_a_wait_empties_its_place_in_the_retry_queue() {
    type End = fn(&Store, MessageId, &Worker);
    let ends: [End; 4] = [
        |store, id, _| store.cancel(id).unwrap(),
        |_, _, worker| drop(next(worker, "q")),
        |_, id, worker| drop(worker.claim_id(id).unwrap().claim().unwrap()),
        |store, _, _| drop(store.worker("other").unwrap().claim("q").unwrap().unwrap()),
    ];
    let folder = Folder::new();
    for (at, end) in ends.into_iter().enumerate() {
        for deferred in [false, true] {
            let clock = Clock::manual();
            let file = folder.file().with_extension(format!("{at}-{deferred}"));
            let store = Options::default().clock(clock.clone()).open(&file).unwrap();
            let worker = store.worker("w").unwrap();
            let id = store.queue("q").enqueue(Message::new("x").ttl(HOUR)).unwrap().id();
            let claim = next(&worker, "q");
            if deferred {
                claim.defer(SECOND).unwrap()
            } else {
                claim.fail_for("no", SECOND).unwrap()
            };
            clock.advance(SECOND + DEFERRAL_GRACE);
            end(&store, id, &worker);
            let conn = Connection::open(&file).unwrap();
            assert_eq!(raw(&conn, "relet_retry_queue"), Vec::<Vec<Value>>::new(), "{at} {deferred}");
            assert_eq!(store.stats().unwrap().queues[0].retrying, 0);
            sound(&store);
        }
    }
}
