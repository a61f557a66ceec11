//! The failure that relet exists for, and its cure: a message in `processing` can be claimed again by the worker it belongs to.
#![cfg(feature = "testing")]

use std::time::Duration;

use relet::{Clock, Status, Store, Verdict};

/// The article's failure: claimed, rate limited, put into the retry queue; when the retry came, the claim refused the
/// message because it already read `processing`, and it was stuck for ever.
#[test]
fn a_rate_limited_message_comes_back_to_its_worker() {
    let clock = Clock::manual();
    let store = Store::options().clock(clock.clone()).open_in_memory().unwrap();
    let id = store.queue("mail").enqueue("hello").unwrap().id();
    let worker = store.worker("mailer-1").unwrap();

    let claim = worker.claim("mail").unwrap().unwrap();
    claim.defer(Duration::from_secs(30)).unwrap();
    let row = store.show(id).unwrap().unwrap();
    assert_eq!((row.status, row.worker.as_deref(), row.attempts), (Status::Processing, Some("mailer-1"), 0));
    assert!(worker.claim("mail").unwrap().is_none());
    assert!(matches!(worker.claim_id(id).unwrap(), Verdict::Waiting { .. }));

    clock.advance(Duration::from_secs(30));
    let claim = worker.claim("mail").unwrap().expect("it is due");
    assert_eq!(claim.id(), id);
    claim.ack().unwrap();
    assert!(store.show(id).unwrap().is_none());
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}
