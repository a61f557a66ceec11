//! A wall clock that is wrong for a moment, or for long, ends no wait, stretches none, kills nothing and deletes nothing.
#![cfg(feature = "testing")]

mod common;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{memory_with, next, row, sound};
use relet::{Clock, Message, Retry, Status, Store};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

fn ms(span: Duration) -> i64 {
    span.as_millis() as i64
}

/// The clock as it is wrong: a board without a battery, a hand on the clock, a time server that errs; and how it comes right again.
type Wrong = (&'static str, fn(&Clock));

fn wrong_clocks() -> [Wrong; 5] {
    [
        ("1970", |clock| clock.set_wall_by(-clock.wall_ms())),
        ("a day back", |clock| clock.set_wall_by(-ms(DAY))),
        ("an hour ahead", |clock| clock.set_wall_by(ms(HOUR))),
        ("ten years ahead", |clock| clock.set_wall_by(ms(DAY * 3650))),
        ("nearly right", |clock| clock.set_wall_by(-900)),
    ]
}

struct Bench {
    store: Store,
    clock: Clock,
}

impl Bench {
    fn new() -> Bench {
        let options = Store::options().retry(Retry::fixed(20 * SECOND)).retention(HOUR).lease(10 * HOUR);
        let (store, clock) = memory_with(options);
        Bench { store, clock }
    }

    /// What is claimable now, by payload.
    fn ready(&self) -> Vec<String> {
        let detached = self.store.detached("d").unwrap();
        let mut found = Vec::new();
        while let Some(claim) = detached.claim("q").unwrap() {
            found.push(String::from_utf8(claim.payload().to_vec()).unwrap());
            claim.ack().unwrap();
        }
        found.sort();
        found
    }
}

/// J5: back and forward again, every wait ended at once; A3: and a message with a week to live died after 20 seconds.
#[test]
fn every_wait_lasts_as_long_as_it_was_meant_to() {
    for (name, set) in wrong_clocks() {
        for is_wrong_first in [true, false] {
            let Bench { store, clock } = &Bench::new();
            let right = |so_far: Duration| clock.set_wall_by(START + ms(so_far) - clock.wall_ms());
            const START: i64 = 1_800_000_000_000;
            right(Duration::ZERO);
            if is_wrong_first {
                set(clock);
            }
            let q = store.queue("q");
            let worker = store.worker("w").unwrap();
            q.enqueue_all(["failed", "deferred"]).unwrap();
            next(&worker, "q").fail("no").unwrap();
            next(&worker, "q").defer(20 * SECOND).unwrap();
            q.enqueue(Message::new("delayed").delay(20 * SECOND)).unwrap();
            q.enqueue(Message::new("lives").delay(20 * SECOND).ttl(7 * DAY)).unwrap();
            store.gate("g").close_for(20 * SECOND).unwrap();
            q.enqueue(Message::new("gated").gate("g")).unwrap();
            let paused = store.queue("paused");
            paused.enqueue("paused").unwrap();
            paused.pause_for(20 * SECOND).unwrap();
            drop(worker); // what it has deferred is anyone's when it is due

            let bench = Bench { store: store.clone(), clock: clock.clone() };
            for second in 0..19 {
                // Wrong and right by turns, at every second.
                match (second % 3, is_wrong_first) {
                    (0, false) | (1, true) => set(clock),
                    (1, false) | (0, true) => right(SECOND * second),
                    _ => {}
                }
                assert_eq!(bench.ready(), [""; 0], "{name} at {second}");
                assert!(store.detached("d").unwrap().claim("paused").unwrap().is_none(), "{name} at {second}");
                store.prune().unwrap();
                clock.advance(SECOND);
            }
            clock.advance(SECOND);
            assert_eq!(bench.ready(), ["deferred", "delayed", "failed", "gated", "lives"], "{name}");
            assert!(store.detached("d").unwrap().claim("paused").unwrap().is_some(), "{name}");
            sound(store);
        }
    }
}

/// A3, J6: nothing is deleted by an age that it does not have, and what died while the clock was ahead is no exception.
#[test]
fn ages_are_those_of_the_machine() {
    for (name, set) in wrong_clocks() {
        let Bench { store, clock } = &Bench::new();
        let worker = store.worker("w").unwrap();
        set(clock);
        store.queue("q").enqueue_all(["done", "dead", "dead too", "expiring"]).unwrap();
        next(&worker, "q").ack().unwrap();
        next(&worker, "q").reject("no").unwrap();
        next(&worker, "q").reject("no").unwrap();
        clock.set_wall_by(1_800_000_000_000 - clock.wall_ms()); // right again
        store.prune().unwrap();
        assert_eq!(store.purge_dead(30 * DAY).unwrap(), 0, "{name}: they died a moment ago");
        assert_eq!(store.show(1).unwrap().map(|row| row.status), Some(Status::Done), "{name}: it is kept for an hour");
        assert_eq!(store.redrive_all(None).unwrap().redriven.len(), 2, "{name}");
        next(&worker, "q").reject("no").unwrap();
        assert_eq!(store.purge_dead(Duration::ZERO).unwrap(), 1, "{name}");
        clock.advance(HOUR);
        store.prune().unwrap();
        assert_eq!(store.show(1).unwrap().map(|row| row.status), None, "{name}");
        sound(store);
    }
}

/// What is meant by the calendar follows the calendar, whenever the clock comes right.
#[test]
fn an_instant_is_meant_by_the_wall_clock() {
    let Bench { store, clock } = &Bench::new();
    let bench = Bench { store: store.clone(), clock: clock.clone() };
    let noon = 1_800_000_000_000;
    clock.set_wall_by(-clock.wall_ms()); // 1970, until the time server is heard
    let at = |instant: i64| -> SystemTime { UNIX_EPOCH + Duration::from_millis(instant as u64) };
    let id = store.queue("q").enqueue(Message::new("at noon").at(at(noon))).unwrap().id();
    assert_eq!(row(store, id).due_at, Some(noon));
    assert_eq!(bench.ready(), [""; 0]);
    clock.set_wall_by(noon - 1 - clock.wall_ms());
    assert_eq!((bench.ready(), row(store, id).due_at), (Vec::<String>::new(), Some(noon)));
    clock.set_wall_by(1);
    assert_eq!(bench.ready(), ["at noon"]);
    sound(store);
}

/// What is shown is what the clock on the wall says of it.
#[test]
fn what_is_shown_follows_the_clock_that_was_set() {
    let Bench { store, clock } = &Bench::new();
    clock.set_wall_by(-clock.wall_ms());
    let id = store.queue("q").enqueue(Message::new("x").delay(HOUR).ttl(DAY)).unwrap().id();
    clock.advance(SECOND);
    for wall in [1_800_000_000_000, 5_000_000, 1_700_000_000_000] {
        clock.set_wall_by(wall - clock.wall_ms());
        let row = row(store, id);
        let expected = (wall - 1_000, Some(wall - 1_000 + ms(HOUR)), Some(wall - 1_000 + ms(DAY)));
        assert_eq!((row.enqueued_at, row.due_at, row.expires_at), expected);
        store.queue("q").resume().unwrap();
    }
}

/// A wall clock that was years behind in one boot and is right in the next: no years have passed.
#[test]
fn a_clock_that_comes_right_over_a_boot_is_no_time_that_has_passed() {
    let Bench { store, clock } = &Bench::new();
    let bench = Bench { store: store.clone(), clock: clock.clone() };
    clock.set_wall_by(1_800_000_000_000 - clock.wall_ms());
    store.queue("q").enqueue(Message::new("lives").delay(30 * DAY).ttl(365 * DAY)).unwrap();
    clock.reboot();
    clock.set_wall_by(-ms(20 * 365 * DAY));
    store.queue("q").resume().unwrap(); // it is noted
    clock.set_wall_by(ms(20 * 365 * DAY)); // and this is not
    clock.reboot();
    store.prune().unwrap();
    assert_eq!(bench.ready(), [""; 0]);
    clock.advance(31 * DAY);
    assert_eq!(bench.ready(), ["lives"]);
    sound(store);
}

/// After a restart of the machine the store's time goes on, and not back, whatever the clock says then.
#[test]
fn after_a_boot_waits_go_on() {
    for (name, set) in wrong_clocks().into_iter().filter(|(name, _)| !name.contains("ahead")) {
        let Bench { store, clock } = &Bench::new();
        let bench = Bench { store: store.clone(), clock: clock.clone() };
        store.queue("q").enqueue(Message::new("x").delay(HOUR)).unwrap();
        clock.reboot();
        set(clock);
        assert_eq!(bench.ready(), [""; 0], "{name}");
        clock.advance(HOUR + SECOND);
        assert_eq!(bench.ready(), ["x"], "{name}");
        sound(store);
    }
    // And the time that the machine was off counts, if its clock ran.
    let Bench { store, clock } = &Bench::new();
    store.queue("q").enqueue(Message::new("x").delay(HOUR)).unwrap();
    clock.advance(HOUR);
    clock.reboot();
    assert!(store.detached("d").unwrap().claim("q").unwrap().is_some());
}
