//! Whoever waits is woken: by a commit of this process, by one of another, and by what becomes due.

mod support;

use std::time::Duration;

use relet::{Message, Store};
use support::{Child, Dir, part};

/// Far longer than any of these takes: a wake-up that does not come makes a test fail, not slow.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_commit_of_this_process_wakes_who_waits() {
    let dir = Dir::new("wake");
    let store = Store::open(dir.join("store.db")).unwrap();
    let worker = store.worker("w").unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| worker.claim_wait("q", LONG).unwrap().expect("it was woken").payload().to_vec());
        store.queue("other").enqueue("not for it").unwrap();
        store.queue("q").enqueue("hello").unwrap();
        assert_eq!(waiter.join().unwrap(), b"hello");
    });
}

#[test]
fn what_is_given_back_wakes_who_waits() {
    let store = Store::open_in_memory().unwrap();
    store.queue("q").enqueue("hello").unwrap();
    let claim = store.worker("a").unwrap().claim("q").unwrap().unwrap();
    let other = store.worker("b").unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| other.claim_wait("q", LONG).unwrap().expect("it was woken").id());
        claim.release().unwrap();
        assert_eq!(waiter.join().unwrap(), claim.id());
    });
}

#[test]
fn a_commit_of_another_process_wakes_who_waits() {
    let dir = Dir::new("wake-across");
    let path = dir.join("store.db");
    let store = Store::open(&path).unwrap();
    let worker = store.worker("w").unwrap();
    let mut child = Child::start("role_enqueues", &[path.to_str().unwrap()]);
    for round in 0..20 {
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| worker.claim_wait("q", LONG).unwrap().expect("it was woken"));
            child.say("now");
            let claim = waiter.join().unwrap();
            assert_eq!(claim.payload(), format!("{round}").as_bytes());
            claim.ack().unwrap();
        });
    }
    child.finish();
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_enqueues() {
    let Some(part) = part("role_enqueues") else { return };
    let store = Store::open(part.path()).unwrap();
    let mut round = 0;
    while part.hear().is_some() {
        store.queue("q").enqueue(format!("{round}")).unwrap();
        round += 1;
    }
}

#[test]
fn what_becomes_due_wakes_who_waits_and_not_before() {
    let store = Store::open_in_memory().unwrap();
    let worker = store.worker("w").unwrap();
    store.queue("q").enqueue(Message::new("later").delay(Duration::from_millis(120))).unwrap();
    assert!(worker.claim_wait("q", Duration::from_millis(1)).unwrap().is_none());
    worker.claim_wait("q", LONG).unwrap().expect("it was due").defer(Duration::from_millis(80)).unwrap();
    worker.claim_wait("q", LONG).unwrap().expect("it was due again").ack().unwrap();
}

#[test]
fn a_lease_that_ends_wakes_who_waits() {
    let store = Store::open_in_memory().unwrap();
    store.queue("q").enqueue("hello").unwrap();
    let short = store.worker("a").unwrap().lease(Duration::from_millis(60)).unwrap();
    let lost = short.claim("q").unwrap().unwrap();
    let claim = store.worker("b").unwrap().claim_wait("q", LONG).unwrap().expect("the lease has ended");
    assert!(lost.ack().is_err());
    assert_eq!(claim.crashes(), 1);
}

#[test]
fn who_waits_in_vain_gets_an_answer() {
    let store = Store::open_in_memory().unwrap();
    let worker = store.worker("w").unwrap();
    for limit in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(70)] {
        assert!(worker.claim_wait("never seen", limit).unwrap().is_none());
    }
}
