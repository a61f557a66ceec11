//! A gate lets pass what it may and no more, for all processes; what it holds back waits in its place, and at no other's cost.
#![cfg(feature = "testing")]

mod common;
mod support;

use std::path::Path;
use std::time::Duration;

use common::{DAY, HOUR, MS, SECOND, memory, memory_with, next, raw, row, sound};
use relet::{
    Claim, Clock, Durability, Error, GateLimits, GateView, How, Message, MessageId, QueueDefaults, Retry, Route,
    Settled, Status, Store, Verdict, Wait, Why, Worker,
};
use support::{Child, Dir, part, plain};

/// How long a test waits for what comes at once or never.
const PATIENCE: Duration = Duration::from_secs(30);

fn ms(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap()
}

/// Unix ms after `span`.
fn after(clock: &Clock, span: Duration) -> i64 {
    clock.wall_ms() + ms(span)
}

/// `a / b`, rounded up.
fn ratio(a: i64, b: i64) -> i64 {
    (a + b - 1).div_euclid(b)
}

/// Enqueues so many messages that pass this gate, each of these priorities.
fn gated(store: &Store, gate: &str, priorities: &[i32]) -> Vec<MessageId> {
    let messages = priorities.iter().map(|priority| Message::new("x").gate(gate).priority(*priority));
    store.queue("q").enqueue_all(messages).unwrap().into_iter().map(MessageId::from).collect()
}

fn view(store: &Store, gate: &str) -> GateView {
    let gates = store.gates().unwrap();
    gates.into_iter().find(|view| view.name == gate).expect("the gate is there")
}

/// Everything that this worker gets while nothing is settled.
fn all(worker: &Worker) -> Vec<Claim> {
    std::iter::from_fn(|| worker.claim("q").unwrap()).collect()
}

fn ids(claims: &[Claim]) -> Vec<MessageId> {
    claims.iter().map(Claim::id).collect()
}

/// Nothing is to be had now.
fn none(worker: &Worker) {
    let found = worker.claim("q").unwrap().map(|claim| claim.id());
    assert_eq!(found, None);
}

/// Acks whatever comes, at once, and tells in which order it came.
fn drain(workers: &[&Worker]) -> Vec<MessageId> {
    let mut order = Vec::new();
    while let Some(claim) = workers[order.len() % workers.len()].claim("q").unwrap() {
        claim.ack().unwrap();
        order.push(claim.id());
    }
    order
}

// Closed until.

#[test]
fn a_429_makes_the_siblings_wait_in_the_file_and_burns_no_attempt() {
    let (store, clock) = memory();
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    let [first, second] = gated(&store, "api", &[0, 0])[..] else { unreachable!() };
    let free = store.queue("q").enqueue("free").unwrap().id();
    let open = gated(&store, "other api", &[0])[0];
    let until = after(&clock, 30 * SECOND);

    assert_eq!(next(&worker, "q").limited(30 * SECOND).unwrap(), Settled::Now(Status::Processing));
    let limited = row(&store, first);
    assert_eq!((limited.attempts, limited.deferrals, limited.crashes), (0, 1, 0));
    assert_eq!((limited.due_at, limited.receipt), (Some(until), None));
    assert_eq!(row(&store, second).deferrals, 0, "it has not run into the wall");
    assert_eq!(store.retry_queue(None, 9).unwrap()[0].reason, "rate limited at gate \"api\"");
    let Why::Deferred { due_at, abandoned_at, .. } = store.why(first).unwrap().unwrap() else { panic!() };
    assert_eq!((due_at, abandoned_at), (until, until), "it is anyone's when it is due");
    let why = store.why(second).unwrap().unwrap();
    assert_eq!(why, Why::Gated { gate: "api".into(), until: Some(until) });
    assert!(why.to_string().ends_with(&format!("gate \"api\" until {until}")), "{why}");

    // What passes another gate, or none, goes on.
    assert_eq!(ids(&all(&other)), [free, open]);
    clock.advance(30 * SECOND - MS);
    none(&other);
    none(&worker);
    clock.advance(MS);
    let claim = next(&other, "q");
    assert_eq!((claim.id(), claim.how(), claim.attempts(), claim.crashes()), (first, How::Claimed, 1, 0));
    assert_eq!(claim.gate(), Some("api"));
    claim.ack().unwrap();
    assert_eq!(next(&worker, "q").id(), second);
    sound(&store);
}

/// What was limited takes its old place when the gate opens: by priority, then by id, whoever comes for it.
#[test]
fn messages_that_were_limited_come_back_in_their_place_whoever_claims() {
    for turns in 0..4 {
        let (store, clock) = memory();
        let workers: Vec<_> = ["a", "b", "c", "d"].map(|label| store.worker(label).unwrap()).into();
        let (priorities, wait) = ([0, 3, 0, 3, -1, 3, 0, 5, 0], 30 * SECOND);
        let all = gated(&store, "api", &priorities);
        let mut expected = all.clone();
        expected.sort_by_key(|id| (-row(&store, *id).priority, *id));
        // Three run into the wall one after the other, and each is told another time.
        let claims: Vec<_> = workers[..3].iter().map(|worker| next(worker, "q")).collect();
        for (claim, sooner) in claims.iter().zip([Duration::ZERO, 10 * SECOND, 20 * SECOND]) {
            claim.limited(wait - sooner).unwrap();
        }
        clock.advance(wait - MS);
        workers.iter().for_each(none);
        clock.advance(MS);
        let order: Vec<_> = (0..4).map(|turn| &workers[(turn + turns) % 4]).collect();
        assert_eq!(drain(&order), expected);
        sound(&store);
    }
}

#[test]
fn a_message_may_be_limited_as_often_as_it_may_be_deferred() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue(Message::new("x").gate("api").max_attempts(1).max_deferrals(5)).unwrap().id();
    for deferrals in 1..5 {
        assert_eq!(next(&worker, "q").limited(SECOND).unwrap(), Settled::Now(Status::Processing));
        assert_eq!((row(&store, id).deferrals, row(&store, id).attempts), (deferrals, 0));
        clock.advance(SECOND);
    }
    assert_eq!(next(&worker, "q").limited(SECOND).unwrap(), Settled::Now(Status::Dead));
    assert!(row(&store, id).dead_reason.unwrap().starts_with("deferred 5 times; the last time: rate limited"));
    // The wall is there all the same.
    assert_eq!(view(&store, "api").closed_until, Some(after(&clock, SECOND)));
    assert_eq!(store.retry_queue(None, 9).unwrap(), []);
    sound(&store);
}

#[test]
fn a_message_without_a_gate_is_only_deferred_when_it_is_limited() {
    let (store, clock) = memory();
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    let ids = store.queue("q").enqueue_all(["a", "b"]).unwrap();
    next(&worker, "q").limited(SECOND).unwrap();
    next(&worker, "q").ack().unwrap();
    clock.advance(SECOND);
    none(&other);
    assert_eq!(next(&worker, "q").id(), ids[0].id());
    assert_eq!(store.gates().unwrap(), []);
    sound(&store);
}

#[test]
fn a_limited_message_whose_worker_is_gone_comes_back_without_a_crash() {
    type Lose = fn(Worker, &Store, &Clock) -> Option<Worker>;
    let ways: [(&str, Lose); 4] = [
        ("it has ended", |_, _, _| None),
        ("it was restarted", |worker, store, _| {
            drop(worker);
            Some(store.worker("w").unwrap())
        }),
        ("it is silent", |worker, _, _| Some(worker)),
        ("the machine was restarted", |worker, _, clock| {
            clock.reboot();
            Some(worker)
        }),
    ];
    for (what, lose) in ways {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        let expected = gated(&store, "api", &[0, 0]);
        next(&worker, "q").limited(SECOND).unwrap();
        let _lost = lose(worker, &store, &clock);
        let other = store.worker("other").unwrap();
        none(&other);
        clock.advance(SECOND);
        let claim = next(&other, "q");
        assert_eq!((claim.id(), claim.crashes(), claim.attempts()), (expected[0], 0, 1), "{what}");
        claim.ack().unwrap();
        assert_eq!(next(&other, "q").id(), expected[1], "{what}");
        sound(&store);
    }
}

#[test]
fn a_gate_that_was_closed_stays_so_until_it_is_opened() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let (api, ids) = (store.gate("api"), gated(&store, "api", &[0, 0]));
    api.open().unwrap();
    assert_eq!((view(&store, "api").slow_start, api.name()), (None, "api"), "an open gate is not opened slowly");
    api.close().unwrap();
    // A shorter closing does not shorten it.
    api.close_for(SECOND).unwrap();
    for _ in 0..3 {
        clock.advance(1000 * DAY);
        none(&worker);
    }
    assert!(store.why(ids[0]).unwrap().unwrap().to_string().ends_with("closed until it is opened"));
    api.open().unwrap();
    assert_eq!((view(&store, "api").closed_until, view(&store, "api").slow_start), (None, Some(1)));
    let claim = next(&worker, "q");
    assert_eq!(claim.id(), ids[0]);
    none(&worker);
    claim.ack().unwrap();
    assert_eq!(next(&worker, "q").id(), ids[1]);
    sound(&store);
}

#[test]
fn the_longest_closing_counts() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    gated(&store, "api", &[0]);
    for seconds in [5, 20, 10] {
        store.gate("api").close_for(seconds * SECOND).unwrap();
    }
    clock.advance(20 * SECOND - MS);
    none(&worker);
    clock.advance(MS);
    next(&worker, "q").ack().unwrap();
    store.gate("api").close_for(Duration::MAX).unwrap();
    let id = gated(&store, "api", &[0])[0];
    assert!(store.why(id).unwrap().unwrap().to_string().ends_with("until it is opened"));
    sound(&store);
}

/// A claim that has passed is its holder's, whatever becomes of the gate.
#[test]
fn what_has_passed_goes_on_when_the_gate_closes() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let id = gated(&store, "api", &[0])[0];
    let claim = next(&worker, "q");
    store.gate("api").close().unwrap();
    claim.extend(HOUR).unwrap();
    clock.advance(HOUR - MS);
    let Verdict::Resumed(again) = worker.claim_id(id).unwrap() else { panic!("not resumed") };
    assert_eq!(again.ack().unwrap(), Settled::Now(Status::Done));
    sound(&store);
}

// It opens gently.

/// One, then one more for each ack, up to 32, then any number.
#[test]
fn a_gate_opens_by_one_for_each_ack() {
    let (store, clock) = memory_with(Store::options().lease(DAY));
    let worker = store.worker("w").unwrap();
    gated(&store, "api", &[0; 200]);
    store.gate("api").close_for(SECOND).unwrap();
    clock.advance(SECOND);
    let mut held = Vec::new();
    for window in 1..=32 {
        held.extend(all(&worker));
        assert_eq!((held.len(), view(&store, "api").held), (window, window as u64));
        assert_eq!(view(&store, "api").slow_start, Some(window as u32));
        held.remove(0).ack().unwrap();
    }
    assert_eq!(view(&store, "api").slow_start, None);
    held.extend(all(&worker));
    assert_eq!(held.len(), 200 - 32, "wide open");
    sound(&store);
}

#[test]
fn only_an_ack_opens_a_gate_wider() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
    let worker = store.worker("w").unwrap();
    gated(&store, "api", &[0; 10]);
    store.gate("api").close_for(SECOND).unwrap();
    clock.advance(SECOND);
    let ends: [fn(&Claim) -> Settled; 4] = [
        |claim| claim.fail("no").unwrap(),
        |claim| claim.defer(HOUR).unwrap(),
        |claim| claim.reject("no").unwrap(),
        |claim| claim.release().unwrap(),
    ];
    for end in ends {
        end(&next(&worker, "q"));
        assert_eq!(view(&store, "api").slow_start, Some(1));
    }
    next(&worker, "q").ack().unwrap();
    assert_eq!(view(&store, "api").slow_start, Some(2));
    // The next 429 begins it all again.
    next(&worker, "q").limited(SECOND).unwrap();
    assert_eq!(view(&store, "api").slow_start, Some(1));
    sound(&store);
}

/// Answers to calls that were under way when the gate was closed tell nothing of what the other side bears now.
#[test]
fn a_late_ack_of_a_claim_from_before_the_closing_opens_nothing() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    gated(&store, "api", &[0; 8]);
    let claims: Vec<_> = (0..5).map(|_| next(&worker, "q")).collect();
    clock.advance(MS);
    claims[0].limited(SECOND).unwrap();
    claims[1].ack().unwrap();
    assert_eq!(view(&store, "api").slow_start, Some(1));
    claims[2].limited(2 * SECOND).unwrap();
    clock.advance(2 * SECOND);
    // Nor do they stand in the way of what passes now.
    let claim = next(&worker, "q");
    claims[3].ack().unwrap();
    none(&worker);
    claims[4].ack().unwrap();
    none(&worker);
    assert_eq!(view(&store, "api").slow_start, Some(1));
    claim.ack().unwrap();
    assert_eq!((view(&store, "api").slow_start, all(&worker).len()), (Some(2), 2));
    sound(&store);
}

// Clocks that are set back.

#[test]
fn a_clock_set_back_does_not_stretch_a_closing() {
    for back in [SECOND, 30 * 60 * SECOND, DAY, 1000 * DAY] {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        let ids = gated(&store, "api", &[0, 0]);
        next(&worker, "q").limited(HOUR).unwrap();
        clock.set_wall_by(-ms(back));
        // Also for who only looks, before anything is written.
        let latest = after(&clock, HOUR);
        let Why::Gated { until, .. } = store.why(ids[1]).unwrap().unwrap() else { panic!() };
        assert!(until.unwrap() <= latest && view(&store, "api").closed_until.unwrap() <= latest);
        none(&worker);
        clock.advance(HOUR - MS);
        none(&worker);
        clock.advance(MS);
        assert_eq!(drain(&[&worker]), ids, "{back:?}");
        sound(&store);
    }
}

#[test]
fn a_closing_that_is_over_does_not_begin_again_when_the_clock_is_set_back() {
    for back in [SECOND, HOUR, 3 * HOUR] {
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        gated(&store, "api", &[0, 0, 0]);
        store.gate("api").close_for(2 * HOUR).unwrap();
        clock.advance(2 * HOUR);
        next(&worker, "q").ack().unwrap();
        clock.set_wall_by(-ms(back));
        next(&worker, "q").ack().unwrap();
        assert_eq!(view(&store, "api").slow_start, Some(3), "what has passed since still counts");
        clock.set_wall_by(-ms(back));
        assert_eq!(view(&store, "api").closed_until, None);
        next(&worker, "q").ack().unwrap();
        sound(&store);
    }
}

#[test]
fn no_clock_opens_what_is_closed_until_it_is_opened() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let id = gated(&store, "api", &[0])[0];
    store.gate("api").close().unwrap();
    let closed = view(&store, "api").closed_until;
    for by in [-5, -ms(DAY), ms(10 * DAY)] {
        clock.set_wall_by(by);
        none(&worker);
        assert_eq!(view(&store, "api").closed_until, closed);
        assert!(store.why(id).unwrap().unwrap().to_string().ends_with("until it is opened"));
    }
    store.gate("api").open().unwrap();
    assert_eq!(next(&worker, "q").id(), id);
    sound(&store);
}

// Rate.

/// Seven in a second are not 142 or 143 ms apart: whatever is rounded, the sum is right.
#[test]
fn a_rate_is_exact_over_a_long_time() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    store.gate("api").limit(GateLimits::new().rate(7, SECOND)).unwrap();
    gated(&store, "api", &[0; 3000]);
    let start = clock.wall_ms();
    for n in 0..3000_i64 {
        let due = start + ratio(n * 1000, 7);
        if n > 0 {
            clock.advance(Duration::from_millis((due - 1 - clock.wall_ms()) as u64));
            none(&worker);
            clock.advance(MS);
        }
        next(&worker, "q").ack().unwrap();
    }
    sound(&store);
}

/// A store of its own on this file, as another process would have one.
fn open(path: &Path, clock: &Clock) -> Store {
    let options = Store::options().clock(clock.clone()).durability(Durability::Normal).reserve(0);
    options.busy_wait(PATIENCE).open(path).unwrap()
}

#[test]
fn a_rate_is_exact_over_several_stores_and_over_restarts_of_them() {
    let dir = Dir::new("rate");
    let (path, clock) = (dir.join("store.db"), Clock::manual());
    let mut stores: Vec<_> = (0..3).map(|_| open(&path, &clock)).collect();
    stores[0].gate("api").limit(GateLimits::new().rate(3, SECOND).burst(2)).unwrap();
    gated(&stores[0], "api", &[0; 300]);
    let start = clock.wall_ms();
    let mut random = fastrand::Rng::with_seed(4);
    for n in 0..300_i64 {
        // Two at once, and from then on three in a second.
        let due = start + ratio((n - 1) * 1000, 3).max(0);
        let at = random.usize(0..3);
        if random.u8(0..10) == 0 {
            stores[at] = open(&path, &clock);
        }
        let worker = stores[at].worker(&format!("w{at}")).unwrap();
        if due > clock.wall_ms() {
            clock.advance(Duration::from_millis((due - 1 - clock.wall_ms()) as u64));
            none(&worker);
            clock.advance(MS);
        }
        next(&worker, "q").ack().unwrap();
    }
    sound(&stores[0]);
}

/// What passed before the restart may have been a moment ago.
#[test]
fn a_bucket_starts_empty_after_a_restart_of_the_machine() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    store.gate("api").limit(GateLimits::new().rate(6, 60 * SECOND).burst(5)).unwrap();
    let id = gated(&store, "api", &[0; 9])[8];
    clock.advance(DAY);
    clock.reboot();
    // Who only looks says so, too, before anything is written.
    let why = Why::Gated { gate: "api".into(), until: Some(after(&clock, 10 * SECOND)) };
    assert_eq!(store.why(id).unwrap(), Some(why.clone()));
    drop(worker);
    let worker = store.worker("w").unwrap();
    none(&worker);
    assert_eq!(store.why(id).unwrap(), Some(why));
    for _ in 0..3 {
        clock.advance(10 * SECOND - MS);
        none(&worker);
        clock.advance(MS);
        assert_eq!(all(&worker).len(), 1);
    }
    clock.advance(DAY);
    assert_eq!(all(&worker).len(), 5, "and it has filled since");
    sound(&store);
}

#[test]
fn a_jump_of_the_wall_clock_and_a_sleep_of_the_machine_change_no_rate() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    store.gate("api").limit(GateLimits::new().rate(1, HOUR)).unwrap();
    gated(&store, "api", &[0; 9]);
    next(&worker, "q").ack().unwrap();
    clock.set_wall_by(ms(DAY));
    none(&worker);
    clock.set_wall_by(-ms(2 * DAY));
    none(&worker);
    clock.sleep_machine(5 * HOUR);
    none(&worker);
    clock.advance(HOUR - MS);
    none(&worker);
    clock.advance(MS);
    next(&worker, "q").ack().unwrap();
    sound(&store);
}

#[test]
fn a_change_of_the_limits_gives_no_message_away() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let api = store.gate("api");
    let limits = GateLimits::new().rate(3, 10 * MS);
    api.limit(limits).unwrap();
    gated(&store, "api", &[0; 20]);
    // The same limits again, at every moment: 3 in 10 ms is one after 3.3 ms.
    next(&worker, "q").ack().unwrap();
    for _ in 0..3 {
        clock.advance(MS);
        api.limit(limits).unwrap();
        none(&worker);
    }
    clock.advance(MS);
    assert_eq!(drain(&[&worker]).len(), 1);

    // Others: as long as it would have been until the bucket is full, but no longer than the new one takes.
    clock.advance(HOUR);
    api.limit(GateLimits::new().rate(1, HOUR)).unwrap();
    assert_eq!(drain(&[&worker]).len(), 1);
    clock.advance(20 * 60 * SECOND);
    api.limit(GateLimits::new().rate(2, HOUR)).unwrap();
    none(&worker);
    clock.advance(30 * 60 * SECOND - MS);
    none(&worker);
    clock.advance(MS);
    assert_eq!(drain(&[&worker]).len(), 1);
    api.limit(GateLimits::new().rate(1, SECOND)).unwrap();
    clock.advance(SECOND - MS);
    none(&worker);
    clock.advance(MS);
    assert_eq!(drain(&[&worker]).len(), 1);
    // None at all.
    api.limit(GateLimits::new()).unwrap();
    assert_eq!(drain(&[&worker]).len(), 20 - 5);
    sound(&store);
}

/// A token bucket lets at most `rate + burst - 1` messages pass in any span of its period, and holds none back that it could
/// let pass: never for longer than `period / rate`, rounded up to a millisecond.
#[test]
fn a_bucket_keeps_its_bound_and_holds_nothing_up_without_need() {
    for seed in 0..40 {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        // Among them some of which several come in a millisecond.
        let (rate, period, burst) = (random.u32(1..20), random.i64(1..[5, 3_000][seed as usize % 2]), random.u32(1..8));
        let limits = GateLimits::new().rate(rate, Duration::from_millis(period as u64)).burst(burst);
        store.gate("api").limit(limits).unwrap();
        // What comes in within a millisecond of the clock is not lost.
        let size = period * i64::from(burst) + i64::from(rate) - 1;
        let id = gated(&store, "api", &[0; 200])[199];
        // The model: what is in the bucket, on a scale on which a message takes `period`.
        let (mut now, mut bucket, mut passed) = (0, period * i64::from(burst), Vec::new());
        for _ in 0..150 {
            let step = random.i64(0..=2 * period / i64::from(rate) + 2);
            clock.advance(Duration::from_millis(step as u64));
            now += step;
            bucket = size.min(bucket + step * i64::from(rate));
            if random.u8(0..10) == 0 {
                clock.set_wall_by(random.i64(2_000..100_000) * if random.bool() { 1 } else { -1 });
            }
            let why = store.why(id).unwrap().unwrap();
            match worker.claim("q").unwrap() {
                Some(claim) => {
                    assert!(bucket >= period, "the bucket was empty");
                    assert_eq!(why, Why::Ready);
                    bucket -= period;
                    passed.push(now);
                    claim.ack().unwrap();
                }
                None => {
                    assert!(bucket < period, "it was held up without need");
                    let wait = ratio(period - bucket, i64::from(rate));
                    assert!(wait <= ratio(period, i64::from(rate)));
                    assert_eq!(why, Why::Gated { gate: "api".into(), until: Some(clock.wall_ms() + wait) });
                }
            }
        }
        for (at, begin) in passed.iter().enumerate() {
            let span = passed[at..].iter().take_while(|instant| **instant < begin + period).count();
            assert!(span <= (rate + burst - 1) as usize, "{span} in {period} ms");
        }
        sound(&store);
    }
}

// Concurrency.

/// However a claim ends, its slot is free at once.
#[test]
fn the_end_of_a_claim_frees_its_slot() {
    type End = fn(&Claim, &Store, &Clock);
    let ends: [(&str, End); 11] = [
        ("ack", |claim, _, _| claim.ack().map(drop).unwrap()),
        ("fail", |claim, _, _| claim.fail("no").map(drop).unwrap()),
        ("reject", |claim, _, _| claim.reject("no").map(drop).unwrap()),
        ("defer", |claim, _, _| claim.defer(HOUR).map(drop).unwrap()),
        ("release", |claim, _, _| claim.release().map(drop).unwrap()),
        ("cancel", |claim, store, _| store.cancel(claim.id()).unwrap()),
        ("by receipt", |claim, store, _| store.ack(claim.receipt()).map(drop).unwrap()),
        ("limited", |claim, store, _| {
            claim.limited(HOUR).unwrap();
            store.gate("api").open().unwrap();
        }),
        ("its lease runs out", |_, _, clock| clock.advance(60 * SECOND)),
        ("the machine is restarted", |_, _, clock| clock.reboot()),
        ("more slots", |_, store, _| store.gate("api").limit(GateLimits::new().concurrency(2)).unwrap()),
    ];
    for (what, end) in ends {
        let (store, clock) = memory_with(Store::options().retry(Retry::fixed(HOUR)));
        let worker = store.worker("w").unwrap();
        store.gate("api").limit(GateLimits::new().concurrency(1)).unwrap();
        let last = gated(&store, "api", &[0; 4])[3];
        let claims = all(&worker);
        assert_eq!((claims.len(), view(&store, "api").held, view(&store, "api").waiting), (1, 1, 3));
        let why = store.why(last).unwrap().unwrap();
        assert_eq!(why, Why::Gated { gate: "api".into(), until: None });
        assert!(why.to_string().ends_with("until one of the claims that have passed it ends"));
        end(&claims[0], &store, &clock);
        assert_eq!(store.why(last).unwrap(), Some(Why::Ready), "{what}");
        assert_eq!(all(&store.worker("other").unwrap()).len(), 1, "{what}");
        sound(&store);
    }
}

#[test]
fn a_slot_is_kept_for_as_long_as_its_lease_is() {
    let (store, clock) = memory();
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    store.gate("api").limit(GateLimits::new().concurrency(1)).unwrap();
    let ids = gated(&store, "api", &[0, 0]);
    let claim = next(&worker, "q");
    for _ in 0..5 {
        clock.advance(59 * SECOND);
        claim.extend(60 * SECOND).unwrap();
        none(&other);
    }
    // Who claims again what it holds needs no other slot.
    let Verdict::Resumed(claim) = worker.claim_id(ids[0]).unwrap() else { panic!("not resumed") };
    none(&other);
    claim.ack().unwrap();
    assert_eq!(next(&other, "q").id(), ids[1]);
    sound(&store);
}

/// A holder whose lease had run out extended it, and had its slot a second time beside the next one.
#[test]
fn a_slot_that_was_lost_with_its_lease_is_not_taken_again() {
    let (store, clock) = memory();
    store.gate("g").limit(GateLimits::new().concurrency(1)).unwrap();
    for queue in ["a", "b"] {
        store.queue(queue).enqueue(Message::new("x").gate("g")).unwrap();
    }
    let hung = store.worker("hung").unwrap().claim("a").unwrap().unwrap();
    clock.advance(2 * hung.lease());
    let other = store.worker("other").unwrap().claim("b").unwrap().unwrap();
    assert!(matches!(hung.extend(hung.lease()), Err(Error::Stale { .. })));
    assert_eq!(view(&store, "g").held, 1);
    // While the slot is free and nobody has taken the message, it may go on.
    other.ack().unwrap();
    hung.extend(hung.lease()).unwrap();
    assert_eq!(view(&store, "g").held, 1);
    sound(&store);
}

/// The same by way of a worker's own deferred message, which comes before anything else.
#[test]
fn what_was_deferred_passes_no_gate_beside_a_void_claim() {
    let (store, clock) = memory();
    store.gate("g").limit(GateLimits::new().concurrency(1)).unwrap();
    let [first, second] = gated(&store, "g", &[0, 0])[..] else { unreachable!() };
    let worker = store.worker("w").unwrap();
    worker.claim("q").unwrap().unwrap().defer(SECOND).unwrap();
    let hung = store.worker("hung").unwrap().claim("q").unwrap().unwrap();
    assert_eq!(hung.id(), second);
    clock.advance(2 * hung.lease());
    assert_eq!(worker.claim("q").unwrap().unwrap().id(), first);
    assert!(matches!(hung.extend(hung.lease()), Err(Error::Stale { .. })), "it was taken back before");
    assert!(hung.ack().is_err());
    sound(&store);
}

/// Claims that ended with their leases, in a queue that nobody serves, are not stepped over at each claim through the same gate.
#[test]
fn what_nobody_takes_back_does_not_lie_in_a_gate_for_ever() {
    const LEFT: u32 = 2_500;
    let (store, clock) = memory();
    for (queue, count) in [("left", LEFT), ("served", 3)] {
        store.queue(queue).enqueue_all((0..count).map(|_| Message::new("x").gate("g"))).unwrap();
    }
    let gone = store.worker("gone").unwrap().claim_batch("left", LEFT as usize).unwrap();
    assert_eq!(gone.len(), LEFT as usize);
    clock.advance(2 * gone[0].lease());
    let worker = store.worker("w").unwrap();
    let left = |status| store.stats().unwrap().queues.iter().find(|queue| queue.queue == "left").unwrap().count(status);
    // Without a limit nothing is counted.
    let first = next(&worker, "served");
    assert_eq!(left(Status::Processing), u64::from(LEFT));
    store.gate("g").limit(GateLimits::new().concurrency(2)).unwrap();
    let second = next(&worker, "served");
    assert!(worker.claim("served").unwrap().is_none());
    assert!(left(Status::Processing) < 150, "{}", left(Status::Processing));
    assert_eq!(view(&store, "g").held, 2);
    assert_eq!(store.why(gone[0].id()).unwrap(), Some(Why::Gated { gate: "g".into(), until: None }));
    first.ack().unwrap();
    next(&worker, "served").ack().unwrap();
    second.ack().unwrap();
    sound(&store);
}

#[test]
fn slots_are_counted_over_queues_and_stores_and_batches() {
    let dir = Dir::new("slots");
    let (path, clock) = (dir.join("store.db"), Clock::manual());
    let stores = [open(&path, &clock), open(&path, &clock)];
    stores[0].gate("api").limit(GateLimits::new().concurrency(5)).unwrap();
    for (store, queue) in stores.iter().zip(["q", "p"]) {
        store.queue(queue).enqueue_all(vec![Message::new("x").gate("api"); 9]).unwrap();
    }
    let workers = [stores[0].worker("a").unwrap(), stores[1].worker("b").unwrap()];
    let first = workers[0].claim_batch("q", 3).unwrap();
    let second = workers[1].claim_batch("p", 9).unwrap();
    assert_eq!((first.len(), second.len()), (3, 2));
    none(&workers[0]);
    first[0].ack().unwrap();
    assert_eq!(workers[1].claim_batch("p", 9).unwrap().len(), 1);
    assert_eq!(workers[0].claim_batch("q", 9).unwrap().len(), 0);
    assert_eq!((view(&stores[0], "api").held, view(&stores[1], "api").waiting), (5, 18 - 6));
    sound(&stores[0]);
}

/// A process that passed the gate and was killed holds no slot.
#[test]
fn the_death_of_a_process_frees_its_slots_at_once() {
    let dir = Dir::new("slot-death");
    let path = dir.join("store.db");
    let store = Store::options().lease(HOUR).reserve(0).busy_wait(PATIENCE).open(&path).unwrap();
    store.gate("api").limit(GateLimits::new().concurrency(2)).unwrap();
    let expected = gated(&store, "api", &[0; 3]);
    let mut child = Child::start("role_holds", &[path.to_str().unwrap()]);
    child.expect("holds 2");
    let worker = store.worker("w").unwrap();
    none(&worker);
    child.kill();
    let claims = all(&worker);
    assert_eq!(ids(&claims), expected[..2]);
    assert!(claims.iter().all(|claim| claim.crashes() == 1));
    sound(&store);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_holds() {
    let Some(part) = part("role_holds") else { return };
    let store = Store::options().lease(HOUR).reserve(0).busy_wait(PATIENCE).open(part.path()).unwrap();
    let worker = store.worker("child").unwrap();
    part.say(format_args!("holds {}", all(&worker).len()));
    part.hear();
}

// Whose gate it is, and what else a message has.

#[test]
fn a_message_has_its_own_gate_else_its_queue_s_and_keeps_it() {
    let (store, clock) = memory_with(Store::options().retry(Retry::fixed(SECOND)));
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let before = queue.enqueue("before").unwrap().id();
    queue.set_defaults(QueueDefaults::new().gate("the queue's")).unwrap();
    let default = queue.enqueue("default").unwrap().id();
    let own = queue.enqueue(Message::new("own").gate("its own")).unwrap().id();
    let gates = [before, default, own].map(|id| row(&store, id).gate);
    assert_eq!(gates.each_ref().map(Option::as_deref), [None, Some("the queue's"), Some("its own")]);
    next(&worker, "q").ack().unwrap();

    // A failure, a release, another route, a death and a redrive do not change it.
    next(&worker, "q").fail("no").unwrap();
    clock.advance(SECOND);
    next(&worker, "q").release().unwrap();
    store.route(default, Route::Queued).unwrap();
    next(&worker, "q").reject("no").unwrap();
    store.redrive(default).unwrap();
    store.gate("the queue's").close().unwrap();
    assert_eq!(drain(&[&worker]), [own]);
    assert_eq!(row(&store, default).gate.as_deref(), Some("the queue's"));
    queue.set_defaults(QueueDefaults::new()).unwrap();
    let after = queue.enqueue("after").unwrap().id();
    assert_eq!(drain(&[&worker]), [after]);
    store.gate("the queue's").open().unwrap();
    assert_eq!(drain(&[&worker]), [default]);
    sound(&store);
}

#[test]
fn a_change_of_one_gate_leaves_the_others_as_they_were() {
    let dir = Dir::new("bystander");
    let (path, clock) = (dir.join("store.db"), Clock::manual());
    let store = open(&path, &clock);
    let limits = GateLimits::new().concurrency(3).rate(5, SECOND).burst(2);
    for gate in ["a", "b"] {
        store.gate(gate).limit(limits).unwrap();
    }
    store.gate("b").close_for(HOUR).unwrap();
    let conn = plain(&path);
    let before = raw(&conn, "relet_gates")[1].clone();
    gated(&store, "a", &[0, 0]);
    let worker = store.worker("w").unwrap();
    next(&worker, "q").ack().unwrap();
    next(&worker, "q").limited(SECOND).unwrap();
    store.gate("a").close().unwrap();
    store.gate("a").open().unwrap();
    store.gate("a").limit(GateLimits::new()).unwrap();
    assert_eq!(raw(&conn, "relet_gates")[1], before);

    let views = store.gates().unwrap();
    assert_eq!(views.iter().map(|view| view.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let view = &views[1];
    assert_eq!((view.concurrency, view.rate, view.burst), (Some(3), Some((5, SECOND)), Some(2)));
    assert_eq!((view.closed_until, view.held, view.waiting), (Some(after(&clock, HOUR)), 0, 0));
    assert_eq!((views[0].concurrency, views[0].rate, views[0].burst), (None, None, None));
    sound(&store);
}

/// The worker keeps what it deferred; but if it comes for it while the gate is shut, it waits with its siblings from then on.
#[test]
fn what_was_deferred_passes_the_gate_when_it_comes_back() {
    let (store, clock) = memory();
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    let ids = gated(&store, "api", &[0, 0]);
    next(&worker, "q").defer(SECOND).unwrap();
    clock.advance(SECOND);
    let claim = next(&worker, "q");
    assert_eq!((claim.id(), claim.how(), claim.crashes()), (ids[0], How::Resumed, 0));
    claim.defer(SECOND).unwrap();
    store.gate("api").close_for(10 * SECOND).unwrap();
    clock.advance(SECOND);
    let Verdict::Waiting { what: Wait::Gate { name }, until } = worker.claim_id(ids[0]).unwrap() else { panic!() };
    assert_eq!((name.as_str(), until), ("api", Some(after(&clock, 9 * SECOND))));
    assert_eq!(row(&store, ids[0]).status, Status::Processing, "asking for it by id changes nothing");
    none(&other);
    assert_eq!(row(&store, ids[0]).status, Status::Processing, "it is not kept for the other");
    none(&worker);
    assert_eq!(row(&store, ids[0]).status, Status::Pending);
    clock.advance(9 * SECOND);
    let claim = next(&other, "q");
    assert_eq!((claim.id(), claim.how(), claim.attempts(), claim.crashes()), (ids[0], How::Claimed, 1, 0));
    sound(&store);
}

/// A thousand of them once hid what came after, until their grace was over.
#[test]
fn what_was_deferred_behind_a_closed_gate_hides_nothing_and_costs_nothing_after() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    gated(&store, "api", &[0; 2500]);
    for claim in worker.claim_batch("q", 2500).unwrap() {
        claim.defer(SECOND).unwrap();
    }
    let free = store.queue("q").enqueue("free").unwrap().id();
    next(&worker, "q").defer(2 * SECOND).unwrap();
    store.gate("api").close().unwrap();
    clock.advance(2 * SECOND);
    let claim = next(&worker, "q");
    assert_eq!((claim.id(), claim.how()), (free, How::Resumed));
    none(&worker);
    assert!(store.retry_queue(None, 10).unwrap().is_empty(), "they are in their line");
    sound(&store);
}

#[test]
fn a_delayed_message_joins_the_line_of_its_gate_when_it_is_due() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let delayed = store.queue("q").enqueue(Message::new("x").gate("api").delay(SECOND).priority(1)).unwrap().id();
    let ready = gated(&store, "api", &[0])[0];
    store.gate("api").close_for(2 * SECOND).unwrap();
    clock.advance(SECOND);
    none(&worker);
    assert!(matches!(store.why(delayed).unwrap(), Some(Why::Gated { .. })));
    clock.advance(SECOND);
    assert_eq!(drain(&[&worker]), [delayed, ready]);
    sound(&store);
}

#[test]
fn a_group_waits_for_its_first_member_s_gate_and_for_nothing_else() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let of = |group: &str, gate: Option<&str>| {
        let message = Message::new("x").group(group);
        let message = if let Some(gate) = gate { message.gate(gate) } else { message };
        store.queue("q").enqueue(message).unwrap().id()
    };
    let [a1, a2, b1, a3] = [of("a", Some("api")), of("a", None), of("b", None), of("a", Some("api"))];
    next(&worker, "q").limited(SECOND).unwrap();
    assert_eq!(drain(&[&worker]), [b1]);
    let Why::Behind { id, because, .. } = store.why(a2).unwrap().unwrap() else { panic!() };
    assert!(id == a1 && matches!(*because, Why::Deferred { .. }));
    clock.advance(SECOND);
    store.gate("api").close_for(SECOND).unwrap();
    none(&worker);
    let Why::Behind { id, because, .. } = store.why(a2).unwrap().unwrap() else { panic!() };
    assert!(id == a1 && matches!(*because, Why::Gated { .. }));
    clock.advance(SECOND);
    assert_eq!(drain(&[&worker]), [a1, a2, a3]);
    sound(&store);
}

#[test]
fn a_message_that_waits_at_its_gate_keeps_its_key_and_its_time_to_live() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let message = Message::new("x").gate("api").key("k").ttl(HOUR);
    store.gate("api").close().unwrap();
    let first = store.queue("q").enqueue(message.clone()).unwrap();
    let again = store.queue("q").enqueue(message.clone()).unwrap();
    assert!(again.existing() && again.id() == first.id());
    clock.advance(HOUR);
    none(&worker);
    assert_eq!(store.prune().unwrap(), 1);
    assert_eq!(row(&store, first.id()).status, Status::Dead);
    assert!(!store.queue("q").enqueue(message).unwrap().existing());
    sound(&store);
}

#[test]
fn a_claim_by_id_passes_the_gate_like_any_other() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let ids = gated(&store, "api", &[0; 3]);
    let waits = |id: MessageId, until: Option<i64>| match worker.claim_id(id).unwrap() {
        Verdict::Waiting { what: Wait::Gate { name }, until: told } => assert_eq!((&*name, told), ("api", until)),
        other => panic!("{other:?}"),
    };
    store.gate("api").close_for(SECOND).unwrap();
    waits(ids[2], Some(after(&clock, SECOND)));
    clock.advance(SECOND);
    // The slow start's one, then one of the rate, counted as any other claim.
    let Verdict::Claimed(claim) = worker.claim_id(ids[2]).unwrap() else { panic!("not claimed") };
    waits(ids[1], None);
    claim.ack().unwrap();
    store.gate("api").limit(GateLimits::new().rate(1, SECOND)).unwrap();
    let Verdict::Claimed(_claim) = worker.claim_id(ids[1]).unwrap() else { panic!("not claimed") };
    waits(ids[0], Some(after(&clock, SECOND)));
    clock.advance(SECOND);
    assert_eq!(next(&worker, "q").id(), ids[0]);
    sound(&store);
}

/// A claim that its worker has lost to time goes back to the gate's line; it does not slip past the gate.
#[test]
fn a_void_claim_is_taken_back_behind_a_closed_gate() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let id = gated(&store, "api", &[0])[0];
    let lost = next(&worker, "q");
    store.gate("api").close_for(HOUR).unwrap();
    clock.advance(60 * SECOND);
    none(&worker);
    let back = row(&store, id);
    assert_eq!((back.status, back.crashes, back.receipt), (Status::Pending, 1, None));
    assert!(lost.ack().unwrap_err().is_claim_lost());
    clock.advance(HOUR);
    assert_eq!(next(&worker, "q").id(), id);
    sound(&store);
}

/// The heads of all lines compete: by priority, then by id, whatever gate they pass and whatever route they are on.
#[test]
fn lines_are_merged_by_priority_and_id() {
    let (store, _) = memory();
    let worker = store.worker("w").unwrap();
    let mut random = fastrand::Rng::with_seed(6);
    let mut expected = Vec::new();
    for _ in 0..300 {
        let priority = random.i32(-2..3);
        let mut message = Message::new("x").priority(priority).route(Route::ALL[random.usize(0..4)]);
        if random.bool() {
            message = message.gate(["a", "b", "c"][random.usize(0..3)]);
        }
        expected.push((-priority, store.queue("q").enqueue(message).unwrap().id()));
    }
    expected.sort();
    let expected: Vec<_> = expected.into_iter().map(|(_, id)| id).collect();
    let half = worker.claim_batch("q", 150).unwrap();
    assert_eq!(ids(&half), expected[..150]);
    assert_eq!(drain(&[&worker]), expected[150..]);
    // A worker restricted to a route sees that route's lines only.
    gated(&store, "a", &[0]);
    none(&worker.routes(&[Route::Queued, Route::PendingLocal]));
    assert_eq!(all(&worker.routes(&[Route::Pending])).len(), 1);
    sound(&store);
}

// Waiting.

/// Waits on a thread of its own, with the system's clock, until `change` has let something pass.
fn wakes(limits: GateLimits, change: impl FnOnce(&Store, &[Claim])) {
    let store = Store::open_in_memory().unwrap();
    let worker = store.worker("w").unwrap();
    store.gate("api").limit(limits).unwrap();
    gated(&store, "api", &[0; 2]);
    let first = vec![next(&worker, "q")];
    let waiter = std::thread::spawn(move || worker.claim_wait("q", PATIENCE).unwrap().map(|claim| claim.id()));
    change(&store, &first);
    assert!(waiter.join().unwrap().is_some(), "it was not woken");
}

#[test]
fn a_waiting_worker_wakes_when_its_gate_lets_something_pass() {
    wakes(GateLimits::new().rate(20, SECOND), |_, _| ());
    wakes(GateLimits::new().concurrency(1), |_, claims| claims[0].ack().map(drop).unwrap());
    wakes(GateLimits::new().concurrency(1), |_, claims| claims[0].limited(50 * MS).map(drop).unwrap());
    wakes(GateLimits::new().concurrency(1), |store, _| store.gate("api").limit(GateLimits::new()).unwrap());
    wakes(GateLimits::new().concurrency(1), |store, claims| {
        store.gate("api").close().unwrap();
        claims[0].ack().unwrap();
        store.gate("api").open().unwrap();
    });
}

// What no gate can be.

#[test]
fn a_name_or_a_limit_that_no_gate_can_have_is_refused() {
    let (store, _) = memory();
    for (name, says) in [("", "is empty"), ("a\nb", "has control characters"), (&"x".repeat(513), "is too long")] {
        let gate = store.gate(name);
        let enqueued = store.queue("q").enqueue(Message::new("x").gate(name)).map(drop);
        let defaults = store.queue("q").set_defaults(QueueDefaults::new().gate(name));
        let limited = gate.limit(GateLimits::new());
        for outcome in [enqueued, defaults, limited, gate.close(), gate.close_for(SECOND), gate.open()] {
            let error = outcome.unwrap_err();
            assert!(matches!(&error, Error::Text { what: "gate", problem, .. } if *problem == says), "{error:?}");
        }
    }
    let (most, week) = (1_000_000, 7 * DAY);
    let of = GateLimits::new();
    let refused = [
        (of.concurrency(0), "concurrency 0 is out of range; use 1 to 1000000"),
        (of.concurrency(most + 1), "concurrency 1000001 is out of range; use 1 to 1000000"),
        (of.rate(0, SECOND), "rate 0 is out of range; use 1 to 1000000"),
        (of.rate(most + 1, SECOND), "rate 1000001 is out of range; use 1 to 1000000"),
        (of.rate(1, Duration::ZERO), "period in ms 0 is out of range; use 1 to 604800000"),
        (of.rate(1, week + MS), "period in ms 604800001 is out of range; use 1 to 604800000"),
        (of.rate(1, SECOND).burst(0), "burst 0 is out of range; use 1 to 1000000"),
        (of.burst(most + 1), "burst 1000001 is out of range; use 1 to 1000000"),
    ];
    for (limits, says) in refused {
        assert_eq!(store.gate("api").limit(limits).unwrap_err().to_string(), says);
    }
    assert_eq!(store.gates().unwrap(), [], "nothing was made");
    for limits in [of.concurrency(most), of.rate(most, MS).burst(most), of.rate(1, week).burst(most), of.burst(5)] {
        store.gate(&"x".repeat(512)).limit(limits).unwrap();
    }
    let worker = store.worker("w").unwrap();
    gated(&store, &"x".repeat(512), &[0]);
    next(&worker, "q").ack().unwrap();
    sound(&store);
}
