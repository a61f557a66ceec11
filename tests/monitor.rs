//! What is wrong is said once when it begins and once when it is over, and what is well is not spoken of.
#![cfg(all(feature = "testing", unix))]

mod common;
#[allow(dead_code, reason = "each test file uses its own part")]
mod vfs;

use std::sync::mpsc;
use std::time::Duration;

use common::{DAY, Folder, HOUR, MS, SECOND, memory, memory_with, next, raw};
use relet::rusqlite::Connection;
use relet::{
    Clock, DEFERRAL_GRACE, Durability, Error, Event, GateLimits, Message, Monitor, Route, Status, Store, What,
};
use vfs::{Bench, Fault};

const MINUTE: Duration = Duration::from_secs(60);
/// For waits that end only where something is broken.
const LONG: Duration = Duration::from_secs(30);

/// A monitor that finds nothing by itself: each test turns on what it is about.
fn quiet() -> Monitor {
    Monitor::builder().stuck_after(Duration::MAX).expired_after(Duration::MAX).wal_max(u64::MAX, MINUTE).calm(MINUTE)
}

/// What a look says, in short: "+stuck mail" where something begins, "-stuck mail" where it is over.
fn say(events: &[Event]) -> Vec<String> {
    let short = |event: &Event| {
        let (sign, finding) = match event {
            Event::Began(finding) => ('+', finding),
            Event::Ended(finding) => ('-', finding),
            other => panic!("{other:?}"),
        };
        format!("{sign}{} {}", finding.what.name(), finding.queue.as_deref().unwrap_or("")).trim_end().to_owned()
    };
    events.iter().map(short).collect()
}

/// Looks now, again, and after a calm minute: what the first look said, and that it was said once and ended once.
#[track_caller]
fn ends_once(monitor: &mut Monitor, store: &Store, clock: &Clock, what: &str) {
    assert_eq!(say(&monitor.look(store)), [""; 0], "not at once");
    clock.advance(MINUTE - MS);
    assert_eq!(say(&monitor.look(store)), [""; 0], "not before it has been gone for a minute");
    clock.advance(MS);
    assert_eq!(say(&monitor.look(store)), [format!("-{what}")]);
    clock.advance(10 * MINUTE);
    assert_eq!(say(&monitor.look(store)), [""; 0], "once");
}

#[track_caller]
fn begins_once(monitor: &mut Monitor, store: &Store, what: &str) -> String {
    let events = monitor.look(store);
    assert_eq!(say(&events), [format!("+{what}")]);
    assert_eq!(say(&monitor.look(store)), [""; 0], "once");
    events[0].to_string()
}

#[test]
fn a_stuck_message_is_found_once_and_is_over_once() {
    let (store, clock) = memory();
    let queue = store.queue("mail");
    queue.enqueue_all(["a", "b", "c"]).unwrap();
    let gone = store.worker("mailer-1").unwrap();
    let claims = gone.claim_batch("mail", 3).unwrap();
    let mut monitor = quiet().stuck_after(HOUR);
    clock.advance(HOUR - MS);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    clock.advance(MS);
    let text = begins_once(&mut monitor, &store, "stuck mail");
    assert_eq!(
        text,
        "queue \"mail\": 3 messages in processing for 1h and more without a lease that runs, the oldest is message 1 of \
         worker \"mailer-1\", for 1h; `relet stuck` lists them"
    );
    // One is left: the same finding.
    claims[0].ack().unwrap();
    claims[1].ack().unwrap();
    clock.advance(5 * MINUTE);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    next(&store.worker("mailer-2").unwrap(), "mail").ack().unwrap();
    ends_once(&mut monitor, &store, &clock, "stuck mail");
}

/// What is over is told as it was seen last, and with the time at which it was seen first.
#[test]
fn a_finding_tells_since_when_and_what_was_measured() {
    let (store, clock) = memory();
    store.queue("mail").enqueue("a").unwrap();
    let claim = next(&store.worker("w").unwrap(), "mail");
    let mut monitor = quiet().stuck_after(HOUR).calm(Duration::ZERO);
    clock.advance(HOUR + 5 * SECOND);
    let since = clock.wall_ms();
    monitor.look(&store);
    clock.advance(HOUR);
    monitor.look(&store);
    claim.ack().unwrap();
    let events = monitor.look(&store);
    let [Event::Ended(finding)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((finding.since, finding.queue.as_deref()), (since, Some("mail")));
    assert_eq!(finding.what.measured(), Some((7205.0, 3600.0)));
    assert!(matches!(&finding.what, What::Stuck { count: 1, oldest, .. } if oldest.worker == "w"));
    assert!(events[0].to_string().starts_with("over: queue \"mail\": 1 message in processing"), "{}", events[0]);
}

#[test]
fn each_queue_can_have_thresholds_of_its_own() {
    let (store, clock) = memory_with(Store::options().stuck_after(HOUR));
    let worker = store.worker("w").unwrap();
    for queue in ["fast", "slow", "usual"] {
        store.queue(queue).enqueue_all(["held", "waiting"]).unwrap();
        let _ = next(&worker, queue);
    }
    // None of its own: the store's.
    let mut monitor = Monitor::builder()
        .expired_after(Duration::MAX)
        .stuck_after_in("fast", 10 * MINUTE)
        .stuck_after_in("slow", DAY)
        .oldest_after(2 * HOUR)
        .oldest_after_in("fast", 20 * MINUTE)
        .oldest_after_in("slow", 2 * DAY);
    let mut at = |after: Duration| {
        clock.advance(after);
        say(&monitor.look(&store))
    };
    assert_eq!(at(10 * MINUTE), ["+stuck fast"]);
    assert_eq!(at(10 * MINUTE), ["+oldest fast"]);
    assert_eq!(at(40 * MINUTE), ["+stuck usual"]);
    assert_eq!(at(HOUR), ["+oldest usual"]);
    assert_eq!(at(22 * HOUR), ["+stuck slow"]);
    assert_eq!(at(DAY), ["+oldest slow"]);
}

/// B61: a monitor that looked at a global limit alone flagged long-running healthy work as stuck.
#[test]
fn a_long_or_extended_lease_is_no_finding() {
    let (store, clock) = memory_with(Store::options().lease(2 * SECOND));
    store.queue("q").enqueue_all(["long", "extended", "silent"]).unwrap();
    let long = next(&store.worker("a").unwrap().lease(MINUTE).unwrap(), "q");
    let extended = next(&store.worker("b").unwrap(), "q");
    let silent = next(&store.worker("c").unwrap(), "q");
    let mut monitor = quiet().stuck_after(Duration::ZERO).expired_after(Duration::ZERO);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    clock.advance(1500 * MS);
    extended.extend(2 * SECOND).unwrap();
    clock.advance(1500 * MS);
    let events = monitor.look(&store);
    assert_eq!(say(&events), ["+stuck q", "+expired q"]);
    let [Event::Began(stuck), Event::Began(expired)] = &events[..] else { panic!("{events:?}") };
    let What::Stuck { count: 1, oldest, .. } = &stuck.what else { panic!("{stuck:?}") };
    let What::Expired { count: 1, longest, .. } = &expired.what else { panic!("{expired:?}") };
    assert_eq!(oldest, longest);
    assert_eq!((oldest.id, &*oldest.worker, oldest.age), (silent.id(), "c", 3 * SECOND));
    assert_eq!((oldest.overdue, oldest.attempts), (SECOND, 1));
    // For as long as they are extended.
    silent.ack().unwrap();
    for _ in 0..100 {
        clock.advance(SECOND);
        long.extend(MINUTE).unwrap();
        extended.extend(2 * SECOND).unwrap();
        for event in monitor.look(&store) {
            assert!(matches!(event, Event::Ended(_)), "{event}");
        }
    }
}

#[test]
fn a_void_claim_that_nobody_takes_back_is_found() {
    let (store, clock) = memory();
    store.queue("q").enqueue_all(["held", "deferred"]).unwrap();
    let worker = store.worker("w").unwrap();
    let held = next(&worker, "q");
    next(&worker, "q").defer(MINUTE).unwrap();
    let mut monitor = quiet().expired_after(5 * MINUTE);
    clock.advance(6 * MINUTE - MS);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    clock.advance(MS);
    let text = begins_once(&mut monitor, &store, "expired q");
    assert!(text.contains("2 claims void for 5m and more and not taken back"), "{text}");
    assert!(text.contains("\"w\"") && text.contains("for 5m; "), "{text}");
    held.ack().unwrap();
    next(&worker, "q").ack().unwrap();
    ends_once(&mut monitor, &store, &clock, "expired q");
    assert!(DEFERRAL_GRACE < 5 * MINUTE);
}

/// The store does not know when such a claim would have ended: it counts from when the monitor saw it first.
#[test]
fn a_claim_that_a_restart_has_voided_is_found_when_nobody_comes() {
    let (store, clock) = memory();
    store.queue("q").enqueue("x").unwrap();
    let worker = store.worker("w").unwrap();
    next(&worker, "q").extend(DAY).unwrap();
    clock.reboot();
    let mut monitor = quiet().expired_after(5 * MINUTE);
    for _ in 0..5 {
        assert_eq!(say(&monitor.look(&store)), [""; 0]);
        clock.advance(MINUTE);
    }
    let text = begins_once(&mut monitor, &store, "expired q");
    assert!(text.contains("to message 1, for 5m;"), "{text}");
    next(&store.worker("v").unwrap(), "q").ack().unwrap();
    ends_once(&mut monitor, &store, &clock, "expired q");
}

#[test]
fn dead_letters_are_found_when_they_grow_not_when_they_lie() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let die = |queue: &str, count: usize| {
        store.queue(queue).enqueue_all(vec!["x"; count]).unwrap();
        for claim in worker.claim_batch(queue, count).unwrap() {
            claim.reject("no").unwrap();
        }
    };
    die("q", 7);
    clock.advance(HOUR);
    let mut monitor = quiet().dead_growth(3, HOUR);
    assert_eq!(say(&monitor.look(&store)), [""; 0], "old ones are no growth");
    for _ in 0..3 {
        die("q", 1);
        die("other", 1);
        assert_eq!(say(&monitor.look(&store)), [""; 0]);
        clock.advance(10 * MINUTE);
    }
    die("q", 1);
    let text = begins_once(&mut monitor, &store, "dead_letters q");
    assert_eq!(text, "queue \"q\": 4 new dead letters in the last 1h, more than 3; `relet dead list` says why");
    // A program that crashes again and again, and its monitor with it, is found out as well.
    assert_eq!(say(&quiet().dead_growth(3, HOUR).look(&store)), ["+dead_letters q"]);
    clock.advance(30 * MINUTE);
    ends_once(&mut monitor, &store, &clock, "dead_letters q");
    assert_eq!(store.stats().unwrap().queues.iter().map(|queue| queue.count(Status::Dead)).sum::<u64>(), 14);
}

#[test]
fn an_old_waiting_message_is_found_behind_a_closed_gate_but_not_in_a_paused_queue() {
    let (store, clock) = memory();
    for queue in ["open", "paused"] {
        store.queue(queue).enqueue(Message::new("x").route(Route::Queued)).unwrap();
    }
    store.queue("gated").enqueue(Message::new("x").gate("api")).unwrap();
    store.queue("later").enqueue(Message::new("x").delay(DAY)).unwrap();
    store.gate("api").close().unwrap();
    store.queue("paused").pause().unwrap();
    let mut monitor = quiet().oldest_after(10 * MINUTE);
    clock.advance(10 * MINUTE - MS);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    clock.advance(MS);
    let events = monitor.look(&store);
    assert_eq!(say(&events), ["+oldest gated", "+oldest open"]);
    let text = events[0].to_string();
    assert!(
        text.starts_with("queue \"gated\": the oldest waiting message has waited for 10m, 10m is too long;"),
        "{text}"
    );
    store.queue("paused").resume().unwrap();
    assert_eq!(say(&monitor.look(&store)), ["+oldest paused"]);
    next(&store.worker("w").unwrap(), "open").ack().unwrap();
    ends_once(&mut monitor, &store, &clock, "oldest open");
}

#[test]
fn a_log_that_does_not_shrink_is_found() {
    let (_bench, folder, clock) = (Bench::take(), Folder::new(), Clock::manual());
    let options = Store::options().clock(clock.clone()).checkpoints(false).reserve(0);
    let store = options.open(folder.file()).unwrap();
    let grow = || store.queue("q").enqueue(vec![7; 1 << 20]).unwrap();
    let mut monitor = quiet().wal_max(1 << 20, 10 * MINUTE);
    let mut at = |after: Duration| {
        clock.advance(after);
        let events = monitor.look(&store);
        (say(&events), events.first().map(Event::to_string))
    };
    grow();
    assert_eq!(at(Duration::ZERO), (vec![], None));
    assert_eq!(at(9 * MINUTE), (vec![], None));
    // It shrinks in between: the span begins anew.
    assert!(store.checkpoint().unwrap());
    assert_eq!(at(MINUTE), (vec![], None));
    grow();
    assert_eq!(at(10 * MINUTE), (vec![], None));
    let (said, text) = at(10 * MINUTE);
    assert_eq!(said, ["+wal"]);
    let text = text.unwrap();
    assert!(text.contains("larger than 1048576 bytes for 10m and more"), "{text}");
    assert_eq!(at(MINUTE), (vec![], None));
    assert!(store.checkpoint().unwrap());
    assert_eq!(at(Duration::ZERO), (vec![], None));
    assert_eq!(at(MINUTE).0, ["-wal"]);
    assert_eq!(at(HOUR), (vec![], None));
}

#[test]
fn a_checkpoint_that_fails_is_found() {
    let (bench, folder, clock) = (Bench::take(), Folder::new(), Clock::manual());
    // Its commits do not sync, its checkpoints do.
    let options = Store::options().clock(clock.clone()).reserve(0).durability(Durability::Normal);
    let store = options.open(folder.file()).unwrap();
    let grow = || store.queue("q").enqueue_all(vec![vec![7; 1 << 20]; 6]).unwrap();
    let mut monitor = quiet();
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    bench.break_at(Fault::Sync, 1, true);
    grow();
    assert!(bench.mend() > 0);
    let text = begins_once(&mut monitor, &store, "checkpoint");
    assert!(text.starts_with("the last checkpoint failed ("), "{text}");
    grow();
    ends_once(&mut monitor, &store, &clock, "checkpoint");
}

#[test]
fn a_store_that_cannot_be_looked_into_is_a_finding_and_ends_no_other() {
    let (_bench, folder, clock) = (Bench::take(), Folder::new(), Clock::manual());
    let store = Store::options().clock(clock.clone()).reserve(0).open(folder.file()).unwrap();
    store.queue("q").enqueue("x").unwrap();
    let mut monitor = quiet().oldest_after(Duration::ZERO);
    begins_once(&mut monitor, &store, "oldest q");
    let away = folder.file().with_extension("away");
    std::fs::rename(folder.file(), &away).unwrap();
    let events = monitor.look(&store);
    assert_eq!(say(&events), ["+store"]);
    let [Event::Began(finding)] = &events[..] else { panic!("{events:?}") };
    assert!(matches!(&finding.what, What::Store { error: Error::FileReplaced { .. } }));
    assert!(finding.to_string().contains("was deleted, moved or replaced"), "{finding}");
    for _ in 0..5 {
        clock.advance(MINUTE);
        assert_eq!(say(&monitor.look(&store)), [""; 0]);
    }
    std::fs::rename(&away, folder.file()).unwrap();
    ends_once(&mut monitor, &store, &clock, "store");
}

#[test]
fn a_finding_that_flickers_begins_once_and_ends_once() {
    let (store, clock) = memory();
    let worker = store.worker("w").unwrap();
    let queue = store.queue("q");
    let mut monitor = quiet().oldest_after(10 * SECOND);
    let mut said = Vec::new();
    for _ in 0..200 {
        queue.enqueue("x").unwrap();
        clock.advance(10 * SECOND);
        said.extend(say(&monitor.look(&store))); // just too old
        next(&worker, "q").ack().unwrap();
        clock.advance(49 * SECOND);
        said.extend(say(&monitor.look(&store))); // nothing waits
    }
    assert_eq!(said, ["+oldest q"]);
    clock.advance(MINUTE);
    assert_eq!(say(&monitor.look(&store)), ["-oldest q"]);
    // What comes back later is a new one.
    queue.enqueue("x").unwrap();
    clock.advance(10 * SECOND);
    assert_eq!(say(&monitor.look(&store)), ["+oldest q"]);
}

#[test]
fn the_first_look_after_the_machine_has_slept_begins_nothing() {
    let (store, clock) = memory();
    store.queue("q").enqueue("x").unwrap();
    let mut monitor = quiet().oldest_after(10 * MINUTE);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    clock.sleep_machine(8 * HOUR);
    assert_eq!(say(&monitor.look(&store)), [""; 0], "the workers have slept, too");
    clock.advance(10 * SECOND);
    assert_eq!(say(&monitor.look(&store)), ["+oldest q"], "and have not come for it");
    // What has begun is not over because the machine slept.
    clock.sleep_machine(8 * HOUR);
    assert_eq!(say(&monitor.look(&store)), [""; 0]);
    next(&store.worker("w").unwrap(), "q").ack().unwrap();
    ends_once(&mut monitor, &store, &clock, "oldest q");
}

#[test]
fn a_handler_that_panics_does_not_end_the_monitor() {
    let (store, clock) = memory();
    store.queue("q").enqueue("x").unwrap();
    let (tell, told) = mpsc::channel();
    let handler = move |event: &Event| {
        tell.send(say(std::slice::from_ref(event)).remove(0)).unwrap();
        panic!("the handler panics, as it is meant to");
    };
    let running = quiet().oldest_after(MINUTE).every(MS).on_event(handler).start(&store).unwrap();
    clock.advance(MINUTE);
    assert_eq!(told.recv_timeout(LONG).unwrap(), "+oldest q");
    store.queue("p").enqueue("x").unwrap();
    clock.advance(MINUTE);
    assert_eq!(told.recv_timeout(LONG).unwrap(), "+oldest p");
    drop(running);
    assert!(told.recv_timeout(LONG).is_err(), "and says nothing twice");
}

#[test]
fn dropping_the_handle_ends_the_thread_at_once() {
    let (store, _) = memory();
    store.queue("q").enqueue("x").unwrap();
    let (tell, told) = mpsc::channel();
    let handler = move |event: &Event| tell.send(say(std::slice::from_ref(event))).unwrap();
    let running = quiet().oldest_after(Duration::ZERO).every(DAY).on_event(handler).start(&store).unwrap();
    assert_eq!(told.recv_timeout(LONG).unwrap(), ["+oldest q"], "the first look is at once");
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        drop(running);
        let _ = ended.send(());
    });
    end.recv_timeout(LONG).expect("it does not sleep for a day");
    assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Disconnected), "the handler is gone with its thread");
}

#[test]
fn a_monitor_that_its_own_handler_drops_ends() {
    let (store, _) = memory();
    store.queue("q").enqueue("x").unwrap();
    let (hand_over, handed) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let handler = move |_: &Event| {
        drop(handed.recv_timeout(LONG).unwrap());
        tell.send(()).unwrap();
    };
    let running = quiet().oldest_after(Duration::ZERO).every(DAY).on_event(handler).start(&store).unwrap();
    hand_over.send(running).unwrap();
    told.recv_timeout(LONG).unwrap();
    assert_eq!(told.recv_timeout(LONG), Err(mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_pause_out_of_range_is_refused() {
    let (store, _) = memory();
    for pause in [Duration::ZERO, DAY + MS, Duration::MAX] {
        assert!(matches!(quiet().every(pause).start(&store), Err(Error::Range { .. })), "{pause:?}");
    }
}

#[test]
fn looking_changes_nothing_and_a_read_only_store_can_be_watched() {
    let (_bench, folder, clock) = (Bench::take(), Folder::new(), Clock::manual());
    let options = || Store::options().clock(clock.clone()).reserve(0);
    let store = options().open(folder.file()).unwrap();
    store.queue("q").enqueue_all(["a", "b", "c"]).unwrap();
    let worker = store.worker("w").unwrap();
    next(&worker, "q").reject("no").unwrap();
    let _ = next(&worker, "q");
    clock.advance(DAY);
    let conn = Connection::open(folder.file()).unwrap();
    let tables = [
        "relet_meta",
        "relet_queues",
        "relet_counters",
        "relet_messages",
        "relet_retry_queue",
        "relet_workers",
        "relet_gates",
    ];
    let before = tables.map(|table| raw(&conn, table));
    let monitor = || Monitor::builder().dead_growth(0, 2 * DAY).oldest_after(HOUR);
    let looking = options().open_read_only(folder.file()).unwrap();
    for store in [&store, &looking] {
        assert_eq!(say(&monitor().look(store)), ["+stuck q", "+expired q", "+dead_letters q", "+oldest q"]);
    }
    assert_eq!(tables.map(|table| raw(&conn, table)), before);
}

/// A store with something of everything, and names that must be escaped.
fn colourful() -> Store {
    let (store, clock) = memory_with(Store::options().retention(HOUR));
    let worker = store.worker("w").unwrap();
    let odd = store.queue("é \"quoted\" back\\slash, {a=\"b\"}");
    odd.enqueue_all(["a", "b", "c", "d"]).unwrap();
    next(&worker, odd.name()).ack().unwrap();
    next(&worker, odd.name()).reject("no").unwrap();
    next(&worker, odd.name()).defer(HOUR).unwrap();
    store.gate("api").limit(GateLimits::new().concurrency(5)).unwrap();
    store.queue("calls").enqueue_all(["a", "b", "c"].map(|call| Message::new(call).gate("api"))).unwrap();
    let _ = next(&worker, "calls");
    store.queue("calls").pause().unwrap();
    store.gate("shut").close().unwrap();
    clock.advance(2500 * MS);
    store
}

type Labels = Vec<(String, String)>;
/// Name, labels, value.
type Sample = (String, Labels, f64);

/// The samples of a Prometheus text. Panics where the text is not what the format allows.
fn parse(text: &str) -> Vec<Sample> {
    assert!(text.ends_with('\n') && !text.contains("\n\n") && !text.contains('\r'));
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    };
    let mut samples: Vec<Sample> = Vec::new();
    let (mut families, mut family, mut helped) = (Vec::new(), String::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(is_name(name) && !help.is_empty() && !help.contains('\\'), "{line}");
            helped = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(helped, name, "HELP comes first");
            assert!(!families.contains(&name), "{name}: once, and its samples together");
            assert_eq!(kind, if name.ends_with("_total") { "counter" } else { "gauge" }, "{line}");
            families.push(name);
            family = name.to_owned();
        } else {
            let name: String = line.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
            assert_eq!(name, family, "{line}");
            let mut rest = &line[name.len()..];
            let mut labels = Vec::new();
            if rest.starts_with('{') {
                loop {
                    rest = rest.strip_prefix(['{', ',']).unwrap();
                    let (label, after) = rest.split_once("=\"").unwrap();
                    assert!(is_name(label), "{line}");
                    let (mut value, mut chars) = (String::new(), after.char_indices());
                    let end = loop {
                        match chars.next().expect("the value ends") {
                            (at, '"') => break at + 1,
                            (_, '\\') => match chars.next().unwrap().1 {
                                'n' => value.push('\n'),
                                c @ ('"' | '\\') => value.push(c),
                                other => panic!("\\{other} is no escape: {line}"),
                            },
                            (_, c) => value.push(c),
                        }
                    };
                    labels.push((label.to_owned(), value));
                    rest = &after[end..];
                    if let Some(after) = rest.strip_prefix('}') {
                        rest = after;
                        break;
                    }
                }
            }
            let value = rest.strip_prefix(' ').unwrap();
            assert!(!value.contains(' ') && !samples.iter().any(|(n, l, _)| *n == name && *l == labels), "{line}");
            samples.push((name, labels, value.parse().unwrap()));
        }
    }
    samples
}

/// The value of this measure with these labels; there must be one.
#[track_caller]
fn sample(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let labels: Vec<_> = labels.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect();
    let found = samples.iter().find(|(is, has, _)| is == name && *has == labels);
    found.unwrap_or_else(|| panic!("{name} {labels:?} is not in {samples:?}")).2
}

/// That these are the numbers of [`colourful`].
fn check(samples: &[Sample]) {
    let odd = ("queue", "é \"quoted\" back\\slash, {a=\"b\"}");
    let calls = ("queue", "calls");
    for (status, count) in [("pending", 1.0), ("processing", 1.0), ("done", 1.0), ("dead", 1.0), ("cancelled", 0.0)] {
        assert_eq!(sample(samples, "relet_messages", &[odd, ("status", status)]), count, "{status}");
    }
    assert_eq!(sample(samples, "relet_retrying", &[odd]), 1.0);
    assert_eq!(sample(samples, "relet_stuck", &[odd]), 0.0);
    assert_eq!(sample(samples, "relet_acked_total", &[odd]), 1.0);
    assert_eq!(sample(samples, "relet_acked_total", &[calls]), 0.0);
    assert_eq!(sample(samples, "relet_oldest_waiting_seconds", &[odd]), 2.5);
    assert_eq!(sample(samples, "relet_paused", &[odd]), 0.0);
    assert_eq!(sample(samples, "relet_paused", &[calls]), 1.0);
    assert_eq!(sample(samples, "relet_gate_held", &[("gate", "api")]), 1.0);
    assert_eq!(sample(samples, "relet_gate_waiting", &[("gate", "api")]), 2.0);
    assert_eq!(sample(samples, "relet_gate_closed", &[("gate", "api")]), 0.0);
    assert_eq!(sample(samples, "relet_gate_closed", &[("gate", "shut")]), 1.0);
    assert_eq!(sample(samples, "relet_file_bytes", &[]), 0.0);
    assert_eq!(sample(samples, "relet_wal_bytes", &[]), 0.0);
    assert_eq!(sample(samples, "relet_checkpoint_failed", &[]), 0.0);
    assert_eq!(samples.len(), 2 * 8 + 2 * 5 + 2 * 3 + 3);
}

#[test]
fn the_prometheus_text_can_be_read_by_a_strict_reader() {
    check(&parse(&colourful().prometheus().unwrap()));
    assert_eq!(parse(&memory().0.prometheus().unwrap()).len(), 3, "an empty store has its sizes");
    let (_bench, folder) = (Bench::take(), Folder::new());
    let store = Store::options().reserve(0).open(folder.file()).unwrap();
    store.queue("q").enqueue("x").unwrap();
    let samples = parse(&store.prometheus().unwrap());
    assert_eq!(sample(&samples, "relet_file_bytes", &[]), store.stats().unwrap().file_bytes as f64);
    assert!(sample(&samples, "relet_wal_bytes", &[]) > 0.0);
}

#[cfg(feature = "metrics")]
mod metrics_of_a_monitor {
    use std::sync::{Arc, Mutex};

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
        with_local_recorder,
    };

    use super::*;

    /// Keeps the last value of everything that is recorded.
    #[derive(Clone, Default)]
    struct Keeper {
        samples: Arc<Mutex<Vec<Sample>>>,
        described: Arc<Mutex<Vec<String>>>,
    }

    struct One {
        keeper: Keeper,
        key: Key,
    }

    impl One {
        fn keep(&self, value: f64) {
            let labels = self.key.labels().map(|label| (label.key().to_owned(), label.value().to_owned())).collect();
            let mut samples = self.keeper.samples.lock().unwrap();
            samples.retain(|(name, has, _)| name != self.key.name() || *has != labels);
            samples.push((self.key.name().to_owned(), labels, value));
        }
    }

    impl GaugeFn for One {
        fn increment(&self, _: f64) {
            unreachable!("gauges are set");
        }
        fn decrement(&self, _: f64) {
            unreachable!("gauges are set");
        }
        fn set(&self, value: f64) {
            assert!(!self.key.name().ends_with("_total"));
            self.keep(value);
        }
    }

    impl CounterFn for One {
        fn increment(&self, _: u64) {
            unreachable!("counters are set");
        }
        fn absolute(&self, value: u64) {
            assert!(self.key.name().ends_with("_total"));
            self.keep(value as f64);
        }
    }

    impl Recorder for Keeper {
        fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
            self.described.lock().unwrap().push(name.as_str().to_owned());
        }
        fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
            self.described.lock().unwrap().push(name.as_str().to_owned());
        }
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Arc::new(One { keeper: self.clone(), key: key.clone() }))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(Arc::new(One { keeper: self.clone(), key: key.clone() }))
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            unreachable!("there are none");
        }
    }

    #[test]
    fn each_look_records_the_numbers_of_the_prometheus_text() {
        let (keeper, store) = (Keeper::default(), colourful());
        with_local_recorder(&keeper, || quiet().look(&store));
        let samples = keeper.samples.lock().unwrap();
        check(&samples);
        let described = keeper.described.lock().unwrap();
        assert!(samples.iter().all(|(name, ..)| described.contains(name)));
    }

    #[test]
    fn a_finding_is_a_gauge_that_goes_up_and_down() {
        let (keeper, (store, clock)) = (Keeper::default(), memory());
        store.queue("q").enqueue("x").unwrap();
        let mut monitor = quiet().oldest_after(MINUTE);
        let mut gauge = || {
            with_local_recorder(&keeper, || monitor.look(&store));
            let samples = keeper.samples.lock().unwrap();
            samples.iter().find(|(name, ..)| name == "relet_finding").map(|(_, labels, value)| {
                let labels: Vec<_> = labels.iter().map(|(label, value)| format!("{label}={value}")).collect();
                (labels.join(","), *value)
            })
        };
        assert_eq!(gauge(), None);
        clock.advance(MINUTE);
        assert_eq!(gauge(), Some(("what=oldest,queue=q".into(), 1.0)));
        next(&store.worker("w").unwrap(), "q").ack().unwrap();
        gauge();
        clock.advance(MINUTE);
        assert_eq!(gauge(), Some(("what=oldest,queue=q".into(), 0.0)));
    }
}

#[cfg(feature = "tracing")]
mod tracing_of_a_monitor {
    use std::collections::BTreeMap;
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Metadata, Subscriber, subscriber};

    use super::*;

    /// The fields of an event, as text.
    #[derive(Debug, Default)]
    struct Fields(BTreeMap<String, String>);

    /// Keeps every event, with its level.
    #[derive(Clone, Default)]
    struct Keeper(Arc<Mutex<Vec<(String, Fields)>>>);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.insert(field.name().to_owned(), format!("{value:?}"));
        }
    }

    impl Subscriber for Keeper {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target().starts_with("relet")
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            let mut fields = Fields::default();
            event.record(&mut fields);
            self.0.lock().unwrap().push((event.metadata().level().to_string(), fields));
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_beginning_is_a_warning_and_an_end_is_information() {
        let (keeper, (store, clock)) = (Keeper::default(), memory());
        store.queue("mail").enqueue("x").unwrap();
        let mut monitor = quiet().oldest_after(MINUTE).calm(Duration::ZERO);
        clock.advance(MINUTE);
        let since = clock.wall_ms();
        subscriber::with_default(keeper.clone(), || {
            monitor.look(&store);
            monitor.look(&store);
            next(&store.worker("w").unwrap(), "mail").ack().unwrap();
            monitor.look(&store);
        });
        let events = keeper.0.lock().unwrap();
        let levels: Vec<_> = events.iter().map(|(level, _)| level.as_str()).collect();
        assert_eq!(levels, ["WARN", "INFO"]);
        for (_, Fields(fields)) in events.iter() {
            let since = since.to_string();
            for (name, value) in [
                ("what", "\"oldest\""),
                ("queue", "\"mail\""),
                ("value", "60.0"),
                ("threshold", "60.0"),
                ("since", &since),
            ] {
                assert_eq!(fields[name], value, "{name}");
            }
        }
        assert!(events[0].1.0["message"].starts_with("queue \"mail\": the oldest waiting message"), "{events:?}");
        assert!(events[1].1.0["message"].starts_with("over: "), "{events:?}");
    }
}
