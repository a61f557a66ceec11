//! Whoever waits costs those who work nothing: a claim that would find nothing takes no write lock, and a commit wakes nobody who does
//! not wait for it.
#![cfg(feature = "testing")]

mod support;

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use relet::{Claim, Clock, Durability, Error, Message, Store, Workers};
use support::{Dir, plain};

const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);

fn open(path: &Path, clock: &Clock) -> Store {
    let options = Store::options().durability(Durability::Normal).reserve(0).lease(HOUR).clock(clock.clone());
    // Whoever needs the write lock while another has it is told so at once.
    options.busy_wait(Duration::ZERO).open(path).unwrap()
}

/// While another connection holds the write lock.
fn locked<T>(path: &Path, run: impl FnOnce() -> T) -> T {
    let other = plain(path);
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let value = run();
    other.execute_batch("ROLLBACK").unwrap();
    value
}

#[test]
fn a_claim_that_finds_nothing_takes_no_write_lock() {
    let (dir, clock) = (Dir::new("herd"), Clock::manual());
    let path = dir.join("store.db");
    let store = open(&path, &clock);
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    for queue in ["held", "paused", "shut", "later", "deferred"] {
        store.queue(queue).enqueue(Message::new("m").gate(queue)).unwrap();
    }
    let _held = other.claim("held").unwrap().unwrap();
    other.claim("deferred").unwrap().unwrap().defer(Duration::ZERO).unwrap();
    store.queue("paused").pause().unwrap();
    store.gate("shut").close().unwrap();
    store.queue("later").enqueue(Message::new("m").delay(HOUR)).unwrap();
    worker.claim("later").unwrap().unwrap().ack().unwrap();
    assert!(worker.claim("later").unwrap().is_none());
    locked(&path, || {
        for queue in ["held", "paused", "shut", "later", "deferred", "not there"] {
            for worker in [&worker, &store.detached("d").unwrap()] {
                assert!(worker.claim(queue).unwrap().is_none(), "{queue}");
                assert!(worker.claim_wait(queue, Duration::from_millis(1)).unwrap().is_none(), "{queue}");
                assert!(worker.claim_batch(queue, 10).unwrap().is_empty(), "{queue}");
            }
        }
        assert!(matches!(other.claim("deferred"), Err(Error::Busy { .. })), "its own is due");
    });
    // And finds whatever there is as soon as there is something.
    store.queue("paused").resume().unwrap();
    store.gate("shut").open().unwrap();
    clock.advance(HOUR + SECOND);
    for queue in ["held", "paused", "shut", "later", "deferred"] {
        let _claim = worker.claim(queue).unwrap().unwrap_or_else(|| panic!("{queue}"));
    }
}

#[test]
fn what_was_laid_down_before_a_claim_is_seen_by_it() {
    let (dir, clock) = (Dir::new("herd-laid"), Clock::manual());
    let store = open(&dir.join("store.db"), &clock);
    let worker = store.worker("w").unwrap();
    assert!(worker.claim("q").unwrap().is_none());
    let ticket = store.queue("q").enqueue_deferred("m").unwrap();
    let _claim = worker.claim("q").unwrap().expect("it comes after what was laid down");
    ticket.wait().unwrap();
}

#[test]
fn a_pool_that_has_nothing_to_do_takes_no_write_lock() {
    let (dir, clock) = (Dir::new("herd-pool"), Clock::system());
    let path = dir.join("store.db");
    let store = open(&path, &clock);
    let (done, heard) = mpsc::channel();
    let (failed, failures) = mpsc::channel();
    let mut builder = Workers::builder().concurrency(3).on_error(move |error| drop(failed.send(error.clone())));
    for n in 0..50 {
        let done = done.clone();
        store.queue(&format!("q{n}")).enqueue(format!("{n}")).unwrap();
        builder = builder.queue(&format!("q{n}"), move |claim: &Claim| done.send(claim.id()));
    }
    let workers = builder.start(&store).unwrap();
    for _ in 0..50 {
        heard.recv_timeout(30 * SECOND).expect("each queue is worked through");
    }
    // A commit of another connection makes all of them look.
    let other = plain(&path);
    other.execute_batch("CREATE TABLE more (n)").unwrap();
    // What they had in hand is settled, and they have looked once more.
    std::thread::sleep(Duration::from_millis(300));
    for _ in failures.try_iter() {}
    locked(&path, || std::thread::sleep(Duration::from_millis(700)));
    let errors: Vec<Error> = failures.try_iter().collect();
    // The schedules are looked at by a thread of their own.
    assert!(errors.is_empty(), "{errors:?}");
    for n in [0, 49, 25] {
        store.queue(&format!("q{n}")).enqueue("more").unwrap();
        heard.recv_timeout(30 * SECOND).expect("whoever waits is woken");
    }
    assert!(workers.stop(10 * SECOND).interrupted.is_empty());
}
