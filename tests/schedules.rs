//! A schedule enqueues one message per tick: however many run it, whatever the clock does, and also on the days on which it
//! is changed.
#![cfg(feature = "testing")]

mod common;
mod support;
#[cfg(unix)]
#[allow(dead_code, reason = "only the full disk of it is used here")]
mod vfs;

use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

use common::{DAY, HOUR, MS, SECOND, memory, next, sound};
use relet::{
    CATCH_UP_MAX, CatchUp, Clock, EVERY_MAX, Error, Filter, GateLimits, Message, NAME_MAX, Retry, Route, ScheduleView,
    Store, TICK_GRACE, When,
};
use support::{Child, Dir, part, plain, rows};

const MINUTE: Duration = Duration::from_secs(60);

/// A clock that reads this instant.
fn clock_at(wall_ms: i64) -> Clock {
    let clock = Clock::manual();
    clock.set_wall_by(wall_ms - clock.wall_ms());
    clock
}

/// The ticks of the messages of a queue, in the order of enqueueing.
fn ticks(store: &Store, queue: &str) -> Vec<i64> {
    let rows = store.list(&Filter::new().queue(queue).limit(10_000)).unwrap();
    rows.into_iter().map(|row| row.tick_at.expect("a tick")).collect()
}

/// Runs the schedules; nothing may fail. How many messages were enqueued.
#[track_caller]
fn run(store: &Store) -> u64 {
    let ticks = store.run_schedules().unwrap();
    assert!(ticks.failed.is_empty(), "{:?}", ticks.failed);
    ticks.enqueued
}

fn view(store: &Store, name: &str) -> ScheduleView {
    store.schedules().unwrap().into_iter().find(|view| view.name == name).expect("there is one")
}

fn ms(span: Duration) -> i64 {
    span.as_millis() as i64
}

// What a tick does.

#[test]
fn a_tick_enqueues_one_message_that_knows_its_instant() {
    let (store, clock) = memory();
    let start = clock.wall_ms();
    let set = store.schedule("beat").set(When::every(10 * SECOND), "beats", "tick", CatchUp::One).unwrap();
    assert_eq!((set.next_at, set.last_at), (start + 10_000, None));

    let idle = store.run_schedules().unwrap();
    assert_eq!((idle.enqueued, idle.next), (0, Some(10 * SECOND)));
    clock.advance(10 * SECOND - MS);
    assert_eq!(run(&store), 0);
    clock.advance(MS);
    let due = store.run_schedules().unwrap();
    assert_eq!((due.enqueued, due.next), (1, Some(10 * SECOND)));
    assert_eq!(run(&store), 0, "it is not enqueued again");

    let claim = next(&store.worker("w").unwrap(), "beats");
    assert_eq!((claim.payload(), claim.tick_at()), (&b"tick"[..], Some(start + 10_000)));
    claim.ack().unwrap();
    assert_eq!(view(&store, "beat").last_at, Some(start + 10_000));
    sound(&store);
}

#[test]
fn a_message_is_as_the_schedule_says() {
    let (store, clock) = memory();
    let retry = Retry::fixed(MINUTE);
    let message = Message::new(vec![7; 5000])
        .priority(-3)
        .group("g")
        .gate("api")
        .key("k")
        .ttl(HOUR)
        .max_attempts(4)
        .max_deferrals(9)
        .retry(retry)
        .route(Route::PendingLocal);
    store.schedule("all").set(SECOND, "q", message, CatchUp::One).unwrap();
    clock.advance(SECOND);
    assert_eq!(run(&store), 1);

    let id = store.list(&Filter::new()).unwrap()[0].id;
    let row = common::row(&store, id);
    assert_eq!(row.payload, Some(vec![7; 5000]));
    assert_eq!((row.priority, row.route, row.retry), (-3, Route::PendingLocal, Some(retry)));
    assert_eq!((row.group.as_deref(), row.gate.as_deref(), row.key.as_deref()), (Some("g"), Some("api"), Some("k")));
    assert_eq!((row.max_attempts, row.max_deferrals), (4, 9));
    assert_eq!(row.expires_at, Some(clock.wall_ms() + ms(HOUR)));
    // And nothing that it does not say.
    store.schedule("plain").set(SECOND, "plain", "", CatchUp::One).unwrap();
    clock.advance(SECOND);
    run(&store);
    let id = store.list(&Filter::new().queue("plain")).unwrap()[0].id;
    let mut row = common::row(&store, id);
    let direct = common::row(&store, store.queue("plain").enqueue("").unwrap().id());
    (row.id, row.tick_at) = (direct.id, None);
    assert_eq!(row, direct);
}

#[test]
fn a_tick_whose_key_is_alive_stores_nothing_and_the_next_one_comes_all_the_same() {
    let (store, clock) = memory();
    store.schedule("s").set(SECOND, "q", Message::new("m").key("one at a time"), CatchUp::All(5)).unwrap();
    clock.advance(3 * SECOND);
    assert_eq!(run(&store), 1, "three are due, and the first has the key");
    clock.advance(SECOND);
    assert_eq!(run(&store), 0);
    next(&store.worker("w").unwrap(), "q").ack().unwrap();
    clock.advance(SECOND);
    assert_eq!(run(&store), 1);
}

#[test]
fn a_tick_that_is_run_late_puts_off_no_later_one() {
    let (store, clock) = memory();
    let start = clock.wall_ms();
    store.schedule("s").set(10 * SECOND, "q", "m", CatchUp::One).unwrap();
    for late in [3, 9, 0] {
        clock.advance(Duration::from_secs(late) + 10 * SECOND);
        assert_eq!(run(&store), 1);
        clock.set_wall_by(-(late as i64) * 1000);
    }
    assert_eq!(ticks(&store, "q"), [10_000, 20_000, 30_000].map(|after| start + after));
}

#[test]
fn schedules_are_listed_by_name_and_removed_by_name() {
    let (store, clock) = memory();
    for name in ["b", "a", "c"] {
        store.schedule(name).set(SECOND, name, name, CatchUp::All(3)).unwrap();
    }
    assert!(store.schedule("b").remove().unwrap());
    assert!(!store.schedule("b").remove().unwrap(), "it is gone");
    let names: Vec<_> = store.schedules().unwrap().into_iter().map(|view| view.name).collect();
    assert_eq!(names, ["a", "c"]);
    let a = view(&store, "a");
    assert_eq!((a.queue.as_str(), a.when, a.catch_up), ("a", When::Every(SECOND), CatchUp::All(3)));
    assert_eq!(a.payload, b"a");

    clock.advance(SECOND);
    assert_eq!(run(&store), 2);
    assert!(store.schedule("a").remove().unwrap());
    assert_eq!(ticks(&store, "a").len(), 1, "what it has enqueued stays");
    assert!(store.schedule("c").remove().unwrap());
    assert_eq!(store.run_schedules().unwrap().next, None);
}

// Setting it again.

#[test]
fn setting_the_same_again_moves_nothing() {
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).open(&path).unwrap();
    let set = |store: &Store| store.schedule("s").set(10 * SECOND, "q", "m", CatchUp::One).unwrap();
    let store = open();
    let first = set(&store);
    for _ in 0..3 {
        clock.advance(3 * SECOND);
        assert_eq!(set(&store), first);
    }
    drop(store);
    // A program that is started anew at a moment at which a tick is due.
    clock.advance(3 * SECOND);
    let store = open();
    assert_eq!(set(&store), first);
    assert_eq!(run(&store), 1);
    assert_eq!(ticks(&store, "q"), [first.next_at]);
    assert_eq!(set(&store).next_at, first.next_at + 10_000);
}

#[test]
fn another_time_begins_anew_and_another_message_does_not() {
    let (store, clock) = memory();
    let schedule = store.schedule("s");
    let first = schedule.set(10 * SECOND, "q", "m", CatchUp::One).unwrap();
    clock.advance(4 * SECOND);
    let message = Message::new("n").priority(1);
    let second = schedule.set(10 * SECOND, "r", message, CatchUp::All(2)).unwrap();
    assert_eq!(second.next_at, first.next_at, "a deploy that changes the payload puts nothing off");
    assert_eq!((second.queue.as_str(), second.catch_up, second.payload.as_slice()), ("r", CatchUp::All(2), &b"n"[..]));
    let third = schedule.set(11 * SECOND, "r", "n", CatchUp::All(2)).unwrap();
    assert_eq!(third.next_at, clock.wall_ms() + 11_000);
    clock.advance(11 * SECOND);
    assert_eq!(run(&store), 1);
    assert_eq!(ticks(&store, "r"), [third.next_at]);
    assert_eq!(schedule.set(SECOND, "r", "n", CatchUp::One).unwrap().last_at, None);
}

// Missed ticks.

#[test]
fn of_missed_ticks_as_many_are_made_up_for_as_it_says_and_the_latest_ones() {
    for (catch_up, expected) in [
        (CatchUp::Skip, vec![]),
        (CatchUp::One, vec![5]),
        (CatchUp::All(1), vec![5]),
        (CatchUp::All(3), vec![3, 4, 5]),
        (CatchUp::All(CATCH_UP_MAX), vec![1, 2, 3, 4, 5]),
    ] {
        let (store, clock) = memory();
        let start = clock.wall_ms();
        store.schedule("s").set(HOUR, "q", "m", catch_up).unwrap();
        clock.sleep_machine(5 * HOUR + 2 * MINUTE);
        assert_eq!(run(&store), expected.len() as u64, "{catch_up:?}");
        let expected: Vec<i64> = expected.iter().map(|hour| start + hour * ms(HOUR)).collect();
        assert_eq!(ticks(&store, "q"), expected, "{catch_up:?}");
        assert_eq!(run(&store), 0);
        clock.advance(58 * MINUTE);
        assert_eq!(run(&store), 1, "and it goes on: {catch_up:?}");
        assert_eq!(ticks(&store, "q").last(), Some(&(start + 6 * ms(HOUR))));
    }
}

#[test]
fn a_tick_that_is_a_little_late_is_not_skipped() {
    for (late, every, expected) in [
        (Duration::ZERO, HOUR, 1),
        (TICK_GRACE, HOUR, 1),
        (TICK_GRACE + MS, HOUR, 0),
        // Five are due: the one that is not followed by another is not missed.
        (4 * SECOND, SECOND, 1),
    ] {
        let (store, clock) = memory();
        let first = store.schedule("s").set(every, "q", "m", CatchUp::Skip).unwrap().next_at;
        clock.advance(every + late);
        assert_eq!(run(&store), expected, "{late:?} late");
        if expected > 0 {
            assert_eq!(ticks(&store, "q"), [first + ms(late) / ms(every) * ms(every)]);
        }
    }
}

/// A loop over the ticks would not end: there are 3 * 10^11 of them.
#[test]
fn ten_years_of_missed_milliseconds_are_one_step() {
    for (catch_up, expected) in [(CatchUp::Skip, 1), (CatchUp::One, 1), (CatchUp::All(CATCH_UP_MAX), 1000)] {
        let (store, clock) = memory();
        store.schedule("s").set(MS, "q", "m", catch_up).unwrap();
        clock.advance(3653 * DAY);
        assert_eq!(run(&store), expected);
        let now = clock.wall_ms();
        assert_eq!(ticks(&store, "q"), (now - expected as i64 + 1..=now).collect::<Vec<_>>());
        assert_eq!(view(&store, "s").next_at, now + 1);
    }
}

#[test]
fn ticks_that_nobody_ran_are_found_at_the_next_start() {
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).open(&path).unwrap();
    let store = open();
    let first = store.schedule("s").set(HOUR, "q", "m", CatchUp::All(2)).unwrap().next_at;
    drop(store);
    clock.sleep_machine(DAY);
    clock.reboot();
    let store = open();
    assert_eq!(run(&store), 2);
    assert_eq!(ticks(&store, "q"), [first + 22 * ms(HOUR), first + 23 * ms(HOUR)]);
    sound(&store);
}

// The clock is set.

#[test]
fn a_clock_set_back_puts_a_tick_off_by_no_more_than_its_span() {
    for back in [MS, SECOND, 30 * SECOND, MINUTE, HOUR, 10 * DAY, 3653 * DAY] {
        for at in [Duration::ZERO, SECOND, 59 * SECOND] {
            let (store, clock) = memory();
            store.schedule("s").set(MINUTE, "q", "m", CatchUp::One).unwrap();
            clock.advance(MINUTE);
            assert_eq!(run(&store), 1);
            clock.advance(at);
            clock.set_wall_by(-ms(back));
            let ticks = store.run_schedules().unwrap();
            assert_eq!(ticks.enqueued, 0);
            assert!(ticks.next.unwrap() <= 2 * MINUTE - at, "{back:?} at {at:?}: {:?}", ticks.next);
            clock.advance(ticks.next.unwrap());
            assert_eq!(run(&store), 1, "{back:?} at {at:?}");
            clock.advance(MINUTE);
            assert_eq!(run(&store), 1);
        }
    }
}

#[test]
fn a_clock_that_was_ahead_for_a_while_leaves_no_schedule_waiting_for_it() {
    let (store, clock) = memory();
    store.schedule("s").set(MINUTE, "q", "m", CatchUp::One).unwrap();
    clock.set_wall_by(ms(3653 * DAY));
    assert_eq!(run(&store), 1);
    clock.set_wall_by(-ms(3653 * DAY));
    for _ in 0..3 {
        let ticks = store.run_schedules().unwrap();
        assert!(ticks.next.unwrap() <= MINUTE);
        clock.advance(MINUTE);
        assert_eq!(run(&store), 1);
    }
}

// Many run it.

#[test]
fn many_threads_of_two_stores_on_one_file_enqueue_one_message_per_tick() {
    const TICKS: usize = 60;
    const THREADS: usize = 4;
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = clock_at(1_774_000_000_000);
    let stores = [(); 2].map(|()| Store::options().clock(clock.clone()).open(&path).unwrap());
    stores[0].schedule("every").set(SECOND, "every", "m", CatchUp::All(5)).unwrap();
    #[cfg(feature = "cron")]
    stores[0].schedule("cron").set(When::cron("* * * * * *", "UTC"), "cron", "m", CatchUp::One).unwrap();
    let (ready, gone) = (Barrier::new(2 * THREADS + 1), Barrier::new(2 * THREADS + 1));
    std::thread::scope(|scope| {
        for store in stores.iter().flat_map(|store| [store; THREADS]) {
            scope.spawn(|| {
                for _ in 0..TICKS {
                    ready.wait();
                    run(store);
                    gone.wait();
                }
            });
        }
        for _ in 0..TICKS {
            clock.advance(SECOND);
            ready.wait();
            gone.wait();
        }
    });
    for queue in ["every", "cron"].into_iter().take(if cfg!(feature = "cron") { 2 } else { 1 }) {
        let ticks = ticks(&stores[0], queue);
        assert_eq!(ticks.len(), TICKS, "{queue}");
        assert!(ticks.windows(2).all(|pair| pair[1] == pair[0] + 1000), "{queue}");
    }
    sound(&stores[1]);
}

/// Each in its own process, at the same instant; and each time one of them is killed in the middle of it.
#[test]
fn many_processes_enqueue_one_message_per_tick() {
    const START: i64 = 1_774_000_000_000;
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let store = Store::options().clock(clock_at(START)).open(&path).unwrap();
    store.schedule("s").set(SECOND, "q", "m", CatchUp::One).unwrap();
    let start = || {
        let mut child = Child::start("role_run", &[path.to_str().unwrap()]);
        child.expect("ready");
        child
    };
    let mut children: Vec<Child> = (0..4).map(|_| start()).collect();
    for tick in 1..=30 {
        for child in &mut children {
            child.say(START + tick * 1000);
        }
        let mut killed = children.remove(0);
        if tick % 3 == 0 {
            killed.kill();
        }
        for child in &mut children {
            child.expect("ran");
        }
        if tick % 3 == 0 {
            children.push(start());
        } else {
            killed.expect("ran");
            children.push(killed);
        }
    }
    for child in children {
        child.finish();
    }
    assert_eq!(ticks(&store, "q"), (1..=30).map(|tick| START + tick * 1000).collect::<Vec<_>>());
    sound(&store);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_run() {
    let Some(part) = part("role_run") else { return };
    let clock = clock_at(0);
    let store = Store::options().clock(clock.clone()).open(part.path()).unwrap();
    part.say("ready");
    while let Some(instant) = part.hear() {
        clock.set_wall_by(instant.parse::<i64>().unwrap() - clock.wall_ms());
        run(&store);
        part.say("ran");
    }
}

// What goes wrong.

#[test]
fn a_full_disk_loses_no_tick() {
    let bench = vfs::Bench::take();
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = Clock::manual();
    let store = Store::options().clock(clock.clone()).reserve(0).open(&path).unwrap();
    let first = store.schedule("large").set(MINUTE, "q", vec![1; 100_000], CatchUp::All(5)).unwrap().next_at;
    let before = rows(&plain(&path), "SELECT * FROM relet_schedules");
    store.checkpoint().unwrap();
    clock.advance(3 * MINUTE);

    bench.limit(dir.path(), used(dir.path()) + 50_000);
    let full = store.run_schedules().unwrap();
    assert!(matches!(&full.failed[..], [(name, Error::Full { .. })] if name == "large"), "{:?}", full.failed);
    assert_eq!((full.enqueued, full.next), (0, Some(SECOND)), "not at once again");
    assert_eq!(rows(&plain(&path), "SELECT * FROM relet_schedules"), before);
    assert!(ticks(&store, "q").is_empty());

    bench.mend();
    assert_eq!(run(&store), 3);
    assert_eq!(ticks(&store, "q"), [0, 1, 2].map(|tick| first + tick * ms(MINUTE)));
    sound(&store);
}

fn used(folder: &Path) -> u64 {
    std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn a_schedule_that_cannot_be_run_holds_up_no_other_and_stays_as_it_is() {
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = Clock::manual();
    let store = Store::options().clock(clock.clone()).open(&path).unwrap();
    store.schedule("broken").set(SECOND, "q", "m", CatchUp::One).unwrap();
    store.schedule("well").set(MINUTE, "q", "m", CatchUp::One).unwrap();
    plain(&path).execute("UPDATE relet_schedules SET options = '{\"retry\": 5}' WHERE name = 'broken'", []).unwrap();
    let broken = || rows(&plain(&path), "SELECT * FROM relet_schedules WHERE name = 'broken'");
    let before = broken();
    clock.advance(MINUTE);
    let ticks = store.run_schedules().unwrap();
    assert!(matches!(&ticks.failed[..], [(name, Error::Json(_))] if name == "broken"), "{:?}", ticks.failed);
    assert_eq!((ticks.enqueued, ticks.next), (1, Some(MINUTE)), "and nobody waits for it");
    assert_eq!(broken(), before);
}

/// A store that looks only can list them, and says why it does not run them.
#[test]
fn a_store_that_is_open_for_looking_only_runs_nothing() {
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = Clock::manual();
    let store = Store::options().clock(clock.clone()).open(&path).unwrap();
    store.schedule("s").set(SECOND, "q", "m", CatchUp::One).unwrap();
    let looking = Store::options().clock(clock.clone()).open_read_only(&path).unwrap();
    assert_eq!(looking.schedules().unwrap(), store.schedules().unwrap());
    clock.advance(SECOND);
    assert!(matches!(looking.run_schedules(), Err(Error::ReadOnly { .. })));
    assert_eq!(run(&store), 1);
}

#[test]
fn what_no_schedule_accepts_is_refused_and_changes_nothing() {
    let (store, _) = memory();
    let good = store.schedule("s").set(SECOND, "q", "m", CatchUp::One).unwrap();
    let set = |name: &str, when: When, queue: &str, message: Message, catch_up| {
        store.schedule(name).set(when, queue, message, catch_up).expect_err("it must be refused")
    };
    let every = || When::every(MINUTE);
    let message = || Message::new("n");
    let long = "x".repeat(NAME_MAX + 1);
    for name in ["", "a\nb", &long] {
        let error = set(name, every(), "q", message(), CatchUp::One);
        assert!(matches!(error, Error::Text { what: "schedule", .. }), "{error:?}");
        let error = set("s", every(), name, message(), CatchUp::One);
        assert!(matches!(error, Error::QueueName { .. }), "{error:?}");
        let error = set("s", When::cron(name, "UTC"), "q", message(), CatchUp::One);
        assert!(matches!(error, Error::Text { what: "cron pattern", .. }), "{error:?}");
    }
    for span in [Duration::ZERO, EVERY_MAX + MS, Duration::MAX] {
        let error = set("s", When::every(span), "q", message(), CatchUp::One);
        assert!(matches!(error, Error::Range { min: 1, .. }), "{error:?}");
    }
    for count in [0, CATCH_UP_MAX + 1, u32::MAX] {
        let error = set("s", every(), "q", message(), CatchUp::All(count));
        assert!(matches!(error, Error::Range { value, .. } if value == i64::from(count)), "{error:?}");
    }
    let at = std::time::UNIX_EPOCH + DAY;
    for message in [message().delay(SECOND), message().delay(Duration::ZERO), message().at(at)] {
        let error = set("s", every(), "q", message, CatchUp::One);
        assert!(matches!(error, Error::ScheduledDelay { .. }) && error.to_string().contains("\"s\""), "{error}");
    }
    let error = set("s", every(), "q", message().priority(40_000), CatchUp::One);
    assert!(matches!(error, Error::Range { what: "priority", .. }), "{error:?}");
    let error = set("s", every(), "q", Message::new(vec![0; relet::PAYLOAD_MAX + 1]), CatchUp::One);
    assert!(matches!(error, Error::PayloadTooLarge { .. }), "{error:?}");

    assert_eq!(store.schedules().unwrap(), [good]);
    for span in [Duration::from_nanos(1), EVERY_MAX] {
        store.schedule("ends").set(span, "q", "m", CatchUp::All(CATCH_UP_MAX)).unwrap();
    }
}

/// The gate of a message is a thing of its own: it need not be there when the schedule is set.
#[test]
fn a_scheduled_message_passes_its_gate() {
    let (store, clock) = memory();
    store.schedule("s").set(SECOND, "q", Message::new("m").gate("api"), CatchUp::All(5)).unwrap();
    clock.advance(2 * SECOND);
    assert_eq!(run(&store), 2);
    store.gate("api").limit(GateLimits::new().concurrency(1)).unwrap();
    let worker = store.worker("w").unwrap();
    let _first = next(&worker, "q");
    assert!(worker.claim("q").unwrap().is_none());
}

/// Without the feature, a cron schedule that another program has set is left to that one.
#[cfg(not(feature = "cron"))]
#[test]
fn a_build_without_cron_leaves_cron_schedules_alone_and_runs_the_others() {
    let dir = Dir::new("schedules");
    let path = dir.join("q.db");
    let clock = Clock::manual();
    let store = Store::options().clock(clock.clone()).open(&path).unwrap();
    let refused = store.schedule("c").set(When::cron("0 3 * * *", "UTC"), "q", "m", CatchUp::One);
    assert!(matches!(&refused, Err(Error::NoCron { pattern }) if pattern == "0 3 * * *"), "{refused:?}");
    plain(&path)
        .execute_batch(
            "INSERT INTO relet_schedules (name, queue, cron, time_zone, catch_up, next_at, set_at, options, payload)
             VALUES ('cron', 'q', '0 3 * * *', 'UTC', 1, 1, 0, '{}', x'')",
        )
        .unwrap();
    let cron = || rows(&plain(&path), "SELECT * FROM relet_schedules WHERE name = 'cron'");
    let before = cron();
    store.schedule("every").set(SECOND, "q", "m", CatchUp::One).unwrap();
    clock.advance(SECOND);
    let ticks = store.run_schedules().unwrap();
    assert!(matches!(&ticks.failed[..], [(name, Error::NoCron { .. })] if name == "cron"), "{:?}", ticks.failed);
    assert_eq!((ticks.enqueued, ticks.next), (1, Some(SECOND)));
    assert_eq!(cron(), before);
    assert_eq!(view(&store, "cron").when, When::cron("0 3 * * *", "UTC"));
}

#[cfg(feature = "cron")]
mod cron {
    use std::collections::BTreeSet;

    use jiff::civil::DateTime;
    use jiff::tz::{AmbiguousOffset, TimeZone};
    use jiff::{Timestamp, ZonedDateTime};

    use super::*;

    /// No two alike.
    #[track_caller]
    fn distinct(mut ticks: Vec<i64>) {
        let all = ticks.len();
        ticks.sort();
        ticks.dedup();
        assert_eq!(ticks.len(), all, "a tick was enqueued twice");
    }

    /// "2026-03-29T01:00[Europe/Berlin]" in unix ms.
    fn instant(text: &str) -> i64 {
        text.parse::<ZonedDateTime>().unwrap().timestamp().as_millisecond()
    }

    /// What the clock on the wall shows: "29 03:00+02:00".
    fn face(ms: i64, zone: &str) -> String {
        let zoned = Timestamp::from_millisecond(ms).unwrap().in_tz(zone).unwrap();
        zoned.strftime("%d %H:%M%:z").to_string()
    }

    fn memory_at(text: &str) -> (Store, Clock) {
        let clock = clock_at(instant(text));
        (Store::options().clock(clock.clone()).open_in_memory().unwrap(), clock)
    }

    /// Moves the clock to each next tick until the span is over.
    fn run_each(store: &Store, clock: &Clock, span: Duration) {
        let end = clock.wall_ms() + ms(span);
        loop {
            let wait = ms(store.run_schedules().unwrap().next.unwrap());
            let left = end - clock.wall_ms();
            clock.advance(Duration::from_millis(wait.min(left).unsigned_abs()));
            if wait >= left {
                run(store);
                return;
            }
        }
    }

    /// The ticks of a pattern within a span, found in both ways: one after the other as they come, and all at once by catching up.
    #[track_caller]
    fn both_ways(pattern: &str, from: &str, span: Duration) -> Vec<i64> {
        let zone = from.split(['[', ']']).nth(1).unwrap();
        let [each, at_once] = [true, false].map(|each| {
            let (store, clock) = memory_at(from);
            store.schedule("s").set(When::cron(pattern, zone), "q", "m", CatchUp::All(CATCH_UP_MAX)).unwrap();
            if each {
                run_each(&store, &clock, span);
            } else {
                clock.advance(span);
                run(&store);
            }
            ticks(&store, "q")
        });
        assert_eq!(each, at_once, "{pattern} from {from}");
        each
    }

    #[track_caller]
    fn shows(pattern: &str, from: &str, span: Duration, expected: &[&str]) {
        let zone = from.split(['[', ']']).nth(1).unwrap();
        let shown: Vec<_> = both_ways(pattern, from, span).into_iter().map(|tick| face(tick, zone)).collect();
        assert_eq!(shown, expected, "{pattern} from {from}");
    }

    #[test]
    fn a_pattern_ticks_by_the_clock_of_its_time_zone() {
        shows("0 3 * * *", "2026-06-01T00:00[Europe/Berlin]", 2 * DAY, &["01 03:00+02:00", "02 03:00+02:00"]);
        shows("0 3 * * *", "2026-01-01T00:00[America/New_York]", DAY, &["01 03:00-05:00"]);
        shows("30 9 * * MON-FRI", "2026-06-05T12:00[Asia/Kolkata]", 3 * DAY, &["08 09:30+05:30"]);
        shows("@monthly", "2026-06-05T12:00[UTC]", 30 * DAY, &["01 00:00+00:00"]);
        shows("0 12 L * *", "2028-02-01T12:00[UTC]", 29 * DAY, &["29 12:00+00:00"]);
        shows("59 59 23 31 DEC *", "2026-12-31T23:58[UTC]", HOUR, &["31 23:59+00:00"]);
        // The instant at which it is set is not one of its ticks.
        shows("0 3 * * *", "2026-06-01T03:00[UTC]", DAY, &["02 03:00+00:00"]);
    }

    // In the tables below the day's clock goes from 2 to 3 and from 3 to 2; on Lord Howe from 2 to 2:30 and from 2 to 1:30.

    const BERLIN_SPRING: &str = "2026-03-29T00:50[Europe/Berlin]";
    const BERLIN_AUTUMN: &str = "2026-10-25T00:50[Europe/Berlin]";
    const NEW_YORK_SPRING: &str = "2026-03-08T00:50[America/New_York]";
    const NEW_YORK_AUTUMN: &str = "2026-11-01T00:50[America/New_York]";
    const LORD_HOWE_SPRING: &str = "2026-10-04T00:50[Australia/Lord_Howe]";
    const LORD_HOWE_AUTUMN: &str = "2026-04-05T00:50[Australia/Lord_Howe]";

    #[test]
    fn a_tick_in_the_skipped_hour_comes_once_when_that_is_over() {
        shows("30 2 * * *", BERLIN_SPRING, DAY, &["29 03:00+02:00"]);
        shows("30 2 * * *", NEW_YORK_SPRING, DAY, &["08 03:00-04:00"]);
        shows("15 2 * * *", LORD_HOWE_SPRING, DAY, &["04 02:30+11:00"]);
        // Also one of several, and where minutes are listed.
        shows("30 2,14 * * *", BERLIN_SPRING, DAY, &["29 03:00+02:00", "29 14:30+02:00"]);
        shows("0,30 2 * * *", BERLIN_SPRING, DAY, &["29 03:00+02:00"]);
        shows("*/15 2 * * *", BERLIN_SPRING, DAY, &["29 03:00+02:00"]);
        shows("0 2-4 * * *", BERLIN_SPRING, 12 * HOUR, &["29 03:00+02:00", "29 04:00+02:00"]);
        shows("0 0 * * *", "2026-03-07T12:00[America/Havana]", 2 * DAY, &["08 01:00-04:00", "09 00:00-04:00"]);
        // On Samoa a whole day was skipped.
        shows(
            "0 12 * * *",
            "2011-12-29T00:00[Pacific/Apia]",
            DAY + 12 * HOUR,
            &["29 12:00-10:00", "31 00:00+14:00", "31 12:00+14:00"],
        );
    }

    #[test]
    fn a_tick_in_the_doubled_hour_comes_once_the_first_time() {
        shows("30 2 * * *", BERLIN_AUTUMN, DAY, &["25 02:30+02:00"]);
        shows("30 1 * * *", NEW_YORK_AUTUMN, DAY, &["01 01:30-04:00"]);
        shows("45 1 * * *", LORD_HOWE_AUTUMN, DAY, &["05 01:45+11:00"]);
        shows("30 2,14 * * *", BERLIN_AUTUMN, DAY, &["25 02:30+02:00", "25 14:30+01:00"]);
        shows("0,30 2 * * *", BERLIN_AUTUMN, DAY, &["25 02:00+02:00", "25 02:30+02:00"]);
        shows("0 1-3 * * *", BERLIN_AUTUMN, 12 * HOUR, &["25 01:00+02:00", "25 02:00+02:00", "25 03:00+01:00"]);
    }

    #[test]
    fn a_pattern_for_every_hour_goes_on_through_both() {
        let spring = ["29 01:30+01:00", "29 01:45+01:00", "29 03:00+02:00", "29 03:15+02:00"];
        shows("*/15 * * * *", "2026-03-29T01:20[Europe/Berlin]", HOUR, &spring);
        let autumn = ["25 02:30+02:00", "25 02:45+02:00", "25 02:00+01:00", "25 02:15+01:00"];
        shows("*/15 * * * *", "2026-10-25T02:20+02:00[Europe/Berlin]", HOUR, &autumn);
        let spring = ["04 01:45+10:30", "04 02:30+11:00", "04 02:45+11:00"];
        shows("*/15 * * * *", "2026-10-04T01:40[Australia/Lord_Howe]", 40 * MINUTE, &spring);
        let autumn = ["05 01:45+11:00", "05 01:30+10:30", "05 01:45+10:30", "05 02:00+10:30"];
        shows("*/15 * * * *", "2026-04-05T01:40+11:00[Australia/Lord_Howe]", HOUR, &autumn);
        shows(
            "0 0-23 * * *",
            "2026-10-25T01:20[Europe/Berlin]",
            3 * HOUR,
            &["25 02:00+02:00", "25 02:00+01:00", "25 03:00+01:00"],
        );
    }

    /// What is promised, said once more and slowly: minute by minute.
    fn model(pattern: &str, from: &str, span: Duration) -> Vec<i64> {
        let zone = TimeZone::get(from.split(['[', ']']).nth(1).unwrap()).unwrap();
        let from = instant(from);
        let to = from + ms(span);
        let parsed: croner::Cron = pattern.parse().unwrap();
        let shows = |face: DateTime| {
            let [minute, hour] = [face.minute() as u32, face.hour() as u32];
            parsed.pattern.minute_match(minute).unwrap() && parsed.pattern.hour_match(hour).unwrap()
        };
        let face = |at: i64| zone.to_datetime(Timestamp::from_millisecond(at).unwrap());
        let minutes = (from + 60_000..=to).step_by(60_000);
        if pattern.split(' ').nth(1) == Some("*") {
            return minutes.filter(|at| shows(face(*at))).collect();
        }
        // From a day before to a day after, for what the faces at the edges belong to.
        let mut found = BTreeSet::new();
        let mut at = face(from - ms(DAY));
        while at <= face(to + ms(DAY)) {
            let ambiguous = zone.to_ambiguous_timestamp(at);
            let tick = match ambiguous.offset() {
                AmbiguousOffset::Gap { before, .. } => {
                    // The first minute with another offset than the one before.
                    let early = ambiguous.earlier().unwrap().as_millisecond();
                    let mut minutes = (early - early.rem_euclid(60_000)..).step_by(60_000);
                    minutes.find(|at| zone.to_offset(Timestamp::from_millisecond(*at).unwrap()) != before).unwrap()
                }
                _ => ambiguous.earlier().unwrap().as_millisecond(),
            };
            if shows(at) && from < tick && tick <= to {
                found.insert(tick);
            }
            at = at.checked_add(jiff::SignedDuration::from_mins(1)).unwrap();
        }
        found.into_iter().collect()
    }

    #[test]
    fn every_change_of_the_clock_goes_as_the_model_says() {
        let days = [BERLIN_SPRING, BERLIN_AUTUMN, NEW_YORK_SPRING, NEW_YORK_AUTUMN, LORD_HOWE_SPRING, LORD_HOWE_AUTUMN];
        let more = ["2026-03-07T22:00[America/Havana]", "2026-10-31T22:00[America/Havana]", "2026-06-01T00:00[UTC]"];
        let patterns = [
            "* * * * *",
            "*/7 * * * *",
            "59 * * * *",
            "*/20 */2 * * *",
            "0,30 1,2,3 * * *",
            "5-50/5 1-2 * * *",
            "0 0 * * *",
            "30 2 * * *",
            "45 1 * * *",
            "*/10 0-22 * * *",
        ];
        for from in days.into_iter().chain(more) {
            for pattern in patterns {
                let expected = model(pattern, from, 6 * HOUR);
                assert_eq!(both_ways(pattern, from, 6 * HOUR), expected, "{pattern} from {from}");
            }
        }
    }

    #[test]
    fn missed_ticks_of_a_pattern_are_made_up_for_as_it_says() {
        for (catch_up, expected) in [
            (CatchUp::Skip, &[][..]),
            (CatchUp::One, &["05 03:00+02:00"]),
            (CatchUp::All(2), &["04 03:00+02:00", "05 03:00+02:00"]),
        ] {
            let (store, clock) = memory_at("2026-06-01T00:00[Europe/Berlin]");
            store.schedule("s").set(When::cron("0 3 * * *", "Europe/Berlin"), "q", "m", catch_up).unwrap();
            clock.advance(4 * DAY + 4 * HOUR);
            run(&store);
            let shown: Vec<_> = ticks(&store, "q").into_iter().map(|tick| face(tick, "Europe/Berlin")).collect();
            assert_eq!(shown, expected, "{catch_up:?}");
            clock.advance(23 * HOUR);
            assert_eq!(run(&store), 1);
        }
    }

    /// There are 3 * 10^8 of them.
    #[test]
    fn ten_years_of_missed_seconds_of_a_pattern_are_a_few_steps() {
        for (catch_up, expected) in [(CatchUp::Skip, 1), (CatchUp::One, 1), (CatchUp::All(CATCH_UP_MAX), 1000)] {
            let (store, clock) = memory_at("2026-06-01T00:00[Europe/Berlin]");
            store.schedule("s").set(When::cron("* * * * * *", "Europe/Berlin"), "q", "m", catch_up).unwrap();
            clock.advance(3653 * DAY);
            assert_eq!(run(&store), expected);
            let ticks = ticks(&store, "q");
            assert_eq!(ticks.last(), Some(&clock.wall_ms()));
            assert!(ticks.windows(2).all(|pair| pair[1] == pair[0] + 1000));
        }
    }

    #[test]
    fn a_clock_set_back_enqueues_no_tick_of_a_pattern_again() {
        for back in [1, 1000, ms(HOUR), ms(2 * DAY), ms(3653 * DAY)] {
            let (store, clock) = memory_at("2026-06-01T00:00[UTC]");
            store.schedule("s").set(When::cron("0 * * * *", "UTC"), "q", "m", CatchUp::All(10)).unwrap();
            run_each(&store, &clock, 5 * HOUR);
            let before = ticks(&store, "q");
            assert_eq!(before.len(), 5);
            clock.set_wall_by(-back);
            assert_eq!(run(&store), 0);
            clock.advance(Duration::from_millis(back as u64));
            assert_eq!(run(&store), 0, "{back} ms back");
            assert_eq!(ticks(&store, "q"), before);
            clock.advance(HOUR);
            assert_eq!(run(&store), 1);
        }
    }

    /// Somebody sets the clock a year ahead, and a minute later sets it right.
    #[test]
    fn ticks_that_were_missed_on_the_way_ahead_come_when_their_time_comes() {
        for catch_up in [CatchUp::Skip, CatchUp::One, CatchUp::All(3)] {
            let (store, clock) = memory_at("2026-06-01T00:00[UTC]");
            store.schedule("s").set(When::cron("0 * * * *", "UTC"), "q", "m", catch_up).unwrap();
            clock.advance(HOUR);
            assert_eq!(run(&store), 1);
            clock.set_wall_by(ms(365 * DAY));
            run(&store);
            clock.set_wall_by(-ms(365 * DAY));
            assert_eq!(store.run_schedules().unwrap().next, Some(HOUR), "{catch_up:?}");
            for _ in 0..5 {
                clock.advance(HOUR);
                assert_eq!(run(&store), 1, "{catch_up:?}");
            }
            // A downtime meanwhile changes nothing in that.
            clock.advance(10 * HOUR);
            run(&store);
            clock.advance(HOUR);
            assert_eq!(run(&store), 1, "{catch_up:?}");
            distinct(ticks(&store, "q"));
        }
    }

    #[test]
    fn whatever_the_clock_does_no_tick_of_a_pattern_is_enqueued_twice() {
        for seed in 0..60 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (store, clock) = memory_at("2026-10-24T12:00[Europe/Berlin]");
            let catch_up = [CatchUp::Skip, CatchUp::One, CatchUp::All(7)][random.usize(..3)];
            let pattern = ["* * * * *", "*/15 * * * *", "*/20 1-4 * * *"][random.usize(..3)];
            store.schedule("s").set(When::cron(pattern, "Europe/Berlin"), "q", "m", catch_up).unwrap();
            for _ in 0..150 {
                match random.u32(..10) {
                    0 => clock.set_wall_by(random.i64(-200_000_000..200_000_000)),
                    1 => clock.set_wall_by(random.i64(-4_000_000..4_000_000)),
                    2 => clock.set_wall_by(random.i64(-70_000..0)),
                    _ => clock.advance(Duration::from_millis(random.u64(1..130_000))),
                }
                run(&store);
            }
            println!("seed {seed}: {pattern}, {catch_up:?}");
            distinct(ticks(&store, "q"));
            // And it goes on, once the clock has passed what was enqueued.
            let last = view(&store, "s").last_at.unwrap_or(0).max(clock.wall_ms());
            clock.advance(Duration::from_millis((last - clock.wall_ms()) as u64 + ms(DAY) as u64));
            run(&store);
            let wait = store.run_schedules().unwrap().next.unwrap();
            assert!(wait <= DAY, "seed {seed}: {wait:?}");
            clock.advance(wait);
            assert_eq!(run(&store), 1, "seed {seed}");
            distinct(ticks(&store, "q"));
        }
    }

    #[test]
    fn setting_the_same_pattern_again_leaves_a_due_tick_due() {
        let (store, clock) = memory_at("2026-06-01T02:00[Europe/Berlin]");
        let set = |pattern: &str| store.schedule("s").set(When::cron(pattern, "Europe/Berlin"), "q", "m", CatchUp::One);
        let first = set("0 3 * * *").unwrap();
        clock.advance(10 * HOUR);
        assert_eq!(set("0 3 * * *").unwrap(), first);
        assert_eq!(run(&store), 1);
        assert_eq!(face(set("0 4 * * *").unwrap().next_at, "Europe/Berlin"), "02 04:00+02:00");
    }

    #[test]
    fn a_pattern_that_cannot_be_read_or_never_comes_is_refused() {
        let (store, _) = memory();
        let set =
            |pattern: &str, zone: &str| store.schedule("s").set(When::cron(pattern, zone), "q", "m", CatchUp::One);
        let bad = [
            " ",
            "x",
            "* * * *",
            "60 * * * *",
            "* 24 * * *",
            "* * 0 * *",
            "* * * 13 *",
            "* * * * 8",
            "*/0 * * * *",
            "5-1 * * * *",
            ", * * * *",
            "0 , * * *",
            "0 0 , * *",
            "* * * * ,",
            "@reboot",
            "@every 5s",
            "* * * * * * *",
            "0 0 1 1 * 2027 2028",
            "é * * * *",
            "* * * * MON#9",
            "0 0 30 2 *",
            "0 0 30 FEB *",
            "0 0 31 4,6,9,11 *",
        ];
        for pattern in bad {
            match set(pattern, "Europe/Berlin") {
                Err(error @ Error::CronPattern { .. }) => assert!(error.to_string().contains(&format!("{pattern:?}"))),
                other => panic!("{pattern:?}: {other:?}"),
            }
        }
        for zone in ["", "Mars/Olympus", "CEST+2", "../../etc/passwd", "Europe/Berlin\0"] {
            match set("0 3 * * *", zone) {
                Err(Error::TimeZone { name }) => assert_eq!(name, zone),
                other => panic!("{zone:?}: {other:?}"),
            }
        }
        assert_eq!(store.schedules().unwrap(), []);
        set("0 0 29 2 *", "Europe/Berlin").unwrap();
        // The 29th of February on a Monday: once in 28 years.
        set("0 0 29 2 +MON", "Europe/Berlin").unwrap();
    }

    /// Whatever is typed: an error, or a schedule.
    #[test]
    fn no_pattern_panics() {
        let (store, _) = memory();
        let mut random = fastrand::Rng::with_seed(7);
        let signs: Vec<char> = "0123456789*/,-?LW#+@ MONJAFEBé\u{1F600}".chars().collect();
        let mut read = 0;
        for _ in 0..1000 {
            let fields = random.usize(4..8);
            let field = |random: &mut fastrand::Rng| -> String {
                (0..random.usize(1..4)).map(|_| signs[random.usize(..signs.len())]).collect()
            };
            let pattern: Vec<String> =
                (0..fields).map(|_| if random.bool() { "*".into() } else { field(&mut random) }).collect();
            match store.schedule("s").set(When::cron(pattern.join(" "), "Europe/Berlin"), "q", "m", CatchUp::One) {
                Ok(_) => read += 1,
                Err(Error::CronPattern { .. }) => {}
                Err(error) => panic!("{pattern:?}: {error:?}"),
            }
        }
        assert!(read > 10, "{read}");
    }

    /// On a machine without a time zone database the one that is compiled in is used.
    #[test]
    fn a_machine_without_time_zones_has_them_all_the_same() {
        assert!(jiff::tz::TimeZoneDatabase::bundled().get("Australia/Lord_Howe").is_ok());
    }
}
