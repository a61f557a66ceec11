//! Priority is strict, unless a queue ages its messages: then each step of waiting counts as one priority more, and low priority ends.
#![cfg(feature = "testing")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{HOUR, MS, SECOND, memory, next, row, sound};
use relet::{Error, Message, MessageId, QueueDefaults, Route, Store, Worker};

const STEP: Duration = Duration::from_secs(10);

fn ageing(store: &Store, step: Duration) {
    store.queue("q").set_defaults(QueueDefaults::new().ageing(step)).unwrap();
}

fn enqueue(store: &Store, priority: i32) -> MessageId {
    store.queue("q").enqueue(Message::new("x").priority(priority)).unwrap().id()
}

fn ids(worker: &Worker, count: usize) -> Vec<MessageId> {
    worker.claim_batch("q", count).unwrap().iter().map(|claim| claim.id()).collect()
}

/// Under a load of priority 5 that never ends, one message a second: after how many seconds is one of priority 0 handed out?
fn ends_after(seconds: u32, age: Option<Duration>) -> Option<u32> {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    if let Some(step) = age {
        ageing(&store, step);
    }
    let low = enqueue(&store, 0);
    for second in 0..seconds {
        enqueue(&store, 5);
        let claim = next(&worker, "q");
        claim.ack().unwrap();
        if claim.id() == low {
            return Some(second);
        }
        clock.advance(SECOND);
    }
    sound(&store);
    None
}

#[test]
fn without_ageing_priority_is_strict_however_long_something_waits() {
    assert_eq!(ends_after(2000, None), None);
}

/// Five steps of ten seconds make up for five priorities; at the same priority the lower id is first.
#[test]
fn with_ageing_low_priority_ends_under_a_steady_load_of_high_priority() {
    assert_eq!(ends_after(2000, Some(STEP)), Some(50));
}

#[test]
fn a_message_counts_one_priority_more_for_each_whole_step_that_it_has_waited() {
    for (waits, low_first) in [(2 * STEP - MS, false), (2 * STEP, true)] {
        for batch in [false, true] {
            let (store, clock) = memory();
            let worker = store.worker("w").unwrap();
            ageing(&store, STEP);
            let low = enqueue(&store, -1);
            clock.advance(waits);
            let high = enqueue(&store, 1);
            let order = if batch { ids(&worker, 9) } else { vec![next(&worker, "q").id(), next(&worker, "q").id()] };
            assert_eq!(order, if low_first { [low, high] } else { [high, low] });
            assert_eq!(row(&store, low).priority, -1, "the priority itself stays what it is");
            sound(&store);
        }
    }
}

/// A message that comes back does not hide how long those behind it have waited: it has waited for longer.
#[test]
fn a_message_that_comes_back_has_waited_since_it_was_enqueued() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    ageing(&store, STEP);
    let [failed, waiting] = [enqueue(&store, 0), enqueue(&store, 0)];
    let claim = next(&worker, "q");
    assert_eq!(claim.id(), failed);
    claim.fail_for("no", HOUR).unwrap();
    clock.advance(HOUR);
    let high = enqueue(&store, 5);
    assert_eq!(ids(&worker, 3), [failed, waiting, high]);
    sound(&store);
}

#[test]
fn ageing_is_set_and_unset_with_the_queue_s_defaults() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    ageing(&store, MS);
    let low = enqueue(&store, -32_768);
    clock.advance(1000 * HOUR);
    let high = [enqueue(&store, 32_767), enqueue(&store, 32_767)];
    assert_eq!(next(&worker, "q").id(), low);
    let low = enqueue(&store, -32_768);
    clock.advance(1000 * HOUR);
    store.queue("q").set_defaults(QueueDefaults::new()).unwrap();
    assert_eq!(ids(&worker, 9)[1..], [high[0], high[1], low], "after what has run out meanwhile");
    for (step, value) in [(Duration::ZERO, 0), (Duration::from_secs(3_000_000), 3_000_000_000)] {
        match store.queue("q").set_defaults(QueueDefaults::new().ageing(step)) {
            Err(Error::Range { what: "ageing in ms", value: told, min: 1, .. }) => assert_eq!(told, value),
            other => panic!("{other:?}"),
        }
    }
    // Less than a millisecond counts as one.
    ageing(&store, Duration::from_nanos(1));
    sound(&store);
}

#[derive(Debug, Clone, Copy)]
struct Waits {
    priority: i64,
    route: Route,
    gate: Option<&'static str>,
    enqueued_at: i64,
    due_at: i64,
}

/// Within a line (a route and a gate, or none) and a priority the order is that of the ids; of the first ones of all these,
/// the one with the highest priority, waiting included, then the lowest id.
fn first(all: &BTreeMap<MessageId, Waits>, now: i64, step: i64) -> Option<MessageId> {
    let mut heads = BTreeMap::new();
    for (id, waits) in all.iter().filter(|(_, waits)| waits.due_at <= now) {
        heads.entry((waits.route as u8, waits.gate, waits.priority)).or_insert((*id, *waits));
    }
    let aged = |waits: &Waits| waits.priority + (now - waits.enqueued_at) / step;
    heads.into_values().min_by_key(|(id, waits)| (-aged(waits), *id)).map(|(id, _)| id)
}

#[test]
fn the_order_is_what_a_simple_model_says() {
    for seed in 0..30 {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (store, clock) = memory();
        let worker = store.worker("w").unwrap();
        ageing(&store, STEP);
        let mut all: BTreeMap<MessageId, Waits> = BTreeMap::new();
        for _ in 0..200 {
            match random.u8(0..10) {
                0..5 => {
                    let delay = if random.bool() { random.u64(0..60_000) } else { 0 };
                    let waits = Waits {
                        priority: random.i64(-3..4),
                        route: [Route::Pending, Route::Queued][random.usize(0..2)],
                        gate: [None, Some("a"), Some("b")][random.usize(0..3)],
                        enqueued_at: clock.wall_ms(),
                        due_at: clock.wall_ms() + delay as i64,
                    };
                    let mut message = Message::new("x").priority(waits.priority as i32).route(waits.route);
                    message = message.delay(Duration::from_millis(delay));
                    if let Some(gate) = waits.gate {
                        message = message.gate(gate);
                    }
                    all.insert(store.queue("q").enqueue(message).unwrap().id(), waits);
                }
                5..7 => clock.advance(Duration::from_millis(random.u64(0..40_000))),
                _ => {
                    let claims = worker.claim_batch("q", random.usize(1..4)).unwrap();
                    for claim in &claims {
                        assert_eq!(Some(claim.id()), first(&all, clock.wall_ms(), STEP.as_millis() as i64));
                        all.remove(&claim.id());
                        claim.ack().unwrap();
                    }
                    if claims.is_empty() {
                        assert_eq!(first(&all, clock.wall_ms(), 1), None);
                    }
                }
            }
        }
        sound(&store);
    }
}
