//! Only the newest receipt settles, once; an older one changes nothing and says who holds the message now.
#![cfg(feature = "testing")]

mod common;

use std::time::Duration;

use common::{Folder, HOUR, MS, SECOND, memory, memory_with, next, row, sound};
use relet::rusqlite::Connection;
use relet::{Clock, Error, MessageId, Receipt, Retry, Route, Settle, Settled, Status, Store, Verdict};

/// Every way to use a receipt.
fn ways() -> [Settle; 6] {
    [
        Settle::Ack,
        Settle::Fail { error: "late".into(), retry_in: None },
        Settle::Reject { error: "late".into() },
        Settle::Defer { delay: SECOND, reason: "late".into() },
        Settle::Release,
        Settle::Extend { lease: HOUR },
    ]
}

/// The receipt is stale, and the message is where it says.
fn assert_stale(outcome: Result<Settled, Error>, stale: Receipt, status: Status, worker: Option<&str>) {
    match outcome {
        Err(Error::Stale { receipt, now }) => {
            assert_eq!((receipt, now.status, now.worker.as_deref()), (stale, status, worker));
        }
        other => panic!("{other:?}"),
    }
}

/// B21: renewing, completing and failing were accepted after the lease had run out and another had the message.
/// Here a lease that has run out forbids nothing as long as nobody has taken the message back; from then on it forbids all.
#[test]
fn a_claim_whose_lease_has_run_out_settles_until_it_is_taken_and_never_after() {
    let (store, clock) = memory_with(Store::options().lease(SECOND));
    let (a, b) = (store.worker("a").unwrap(), store.worker("b").unwrap());
    for how in ways() {
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&a, "q");
        clock.advance(SECOND + 500 * MS);
        let settled = store.settle(claim.receipt(), how.clone());
        assert!(matches!(settled, Ok(Settled::Now(_))), "{how:?}: {settled:?}");
        if row_if_there(&store, id).is_some_and(|status| status.is_live()) {
            store.cancel(id).unwrap();
        }
    }
    for how in ways() {
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&a, "q");
        clock.advance(SECOND + 500 * MS);
        let taken = next(&b, "q");
        let before = row(&store, id);
        assert_eq!((before.worker.as_deref(), before.crashes, before.attempts), (Some("b"), 1, 2));
        for _ in 0..2 {
            assert_stale(store.settle(claim.receipt(), how.clone()), claim.receipt(), Status::Processing, Some("b"));
        }
        let bulk = store.settle_all([(claim.receipt(), how.clone())]).unwrap().remove(0);
        assert_stale(bulk, claim.receipt(), Status::Processing, Some("b"));
        assert_eq!(row(&store, id), before, "{how:?}");
        assert_eq!(taken.ack().unwrap(), Settled::Now(Status::Done));
    }
    sound(&store);
}

/// Taken back and not handed out yet: the late holder's work will be done again, so it may not be told that all is well.
#[test]
fn a_claim_that_was_taken_back_is_lost_also_while_nobody_has_the_message() {
    let (store, clock) = memory();
    let (worker, other) = (store.worker("w").unwrap(), store.worker("other").unwrap());
    for how in ways() {
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&worker, "q");
        clock.advance(60 * SECOND);
        // It serves another route, and only clears the way.
        assert!(other.routes(&[Route::Queued]).claim("q").unwrap().is_none());
        let before = row(&store, id);
        assert_eq!((before.status, before.crashes), (Status::Pending, 1));
        assert_stale(store.settle(claim.receipt(), how), claim.receipt(), Status::Pending, None);
        assert_eq!(row(&store, id), before);
        store.cancel(id).unwrap();
    }
    sound(&store);
}

fn row_if_there(store: &Store, id: MessageId) -> Option<Status> {
    store.show(id).unwrap().map(|message| message.status)
}

/// B23: a laptop slept with a claimed item, another took it, and the woken one finished it, too: nothing told which claim a
/// result belonged to.
#[test]
fn of_two_claims_under_one_label_only_the_newer_settles() {
    for awake in [false, true] {
        let (store, clock) = memory_with(Store::options().lease(60 * SECOND).retention(HOUR));
        let worker = store.worker("a").unwrap();
        let id = store.queue("q").enqueue("x").unwrap().id();
        let old = next(&worker, "q");
        // Asleep the lease does not run, and the claim is resumed; awake it has run out, and that is a crash.
        let new = if awake {
            clock.advance(HOUR);
            let Verdict::Recovered(new) = worker.claim_id(id).unwrap() else { panic!("not recovered") };
            new
        } else {
            clock.sleep_machine(HOUR);
            assert!(worker.claim("q").unwrap().is_none());
            let Verdict::Resumed(new) = worker.claim_id(id).unwrap() else { panic!("not resumed") };
            new
        };
        assert_eq!((new.attempts(), new.crashes()), (2, u32::from(awake)));
        assert_eq!(new.receipt().token(), old.receipt().token() + 1);
        for how in ways() {
            assert_stale(store.settle(old.receipt(), how), old.receipt(), Status::Processing, Some("a"));
        }
        assert_eq!(new.ack().unwrap(), Settled::Now(Status::Done));
        assert_stale(old.ack(), old.receipt(), Status::Done, None);
        assert_eq!(store.stats().unwrap().queues[0].acked, 1);
        assert_eq!(row(&store, id).attempts, 2);
        sound(&store);
    }
}

/// B47: the highest row was deleted and its id given to another message, so that old handles hit that one.
#[test]
fn an_id_is_never_given_to_another_message() {
    let folder = Folder::new();
    let open = || Store::options().clock(Clock::manual()).open(folder.file()).unwrap();
    let mut store = open();
    let ids: Vec<_> = store.queue("q").enqueue_all(["a", "b", "c"]).unwrap().into_iter().map(|new| new.id()).collect();
    let claims = store.worker("w").unwrap().claim_batch("q", 3).unwrap();
    let old = claims[2].receipt();
    for claim in claims {
        claim.ack().unwrap();
    }
    let mut last = ids[2];
    for round in 0..3 {
        let new = store.queue("q").enqueue("d").unwrap().id();
        assert!(new > last, "round {round}");
        let before = row(&store, new);
        assert_eq!(store.ack(old).unwrap(), Settled::Gone);
        assert!(matches!(store.cancel(ids[2]), Err(Error::Gone { id }) if id == ids[2]));
        let extended = store.settle(old, Settle::Extend { lease: SECOND });
        assert!(matches!(extended, Err(Error::Gone { id }) if id == ids[2]));
        assert_eq!(row(&store, new), before);
        next(&store.worker("w").unwrap(), "q").ack().unwrap();
        last = new;
        match round {
            0 => Connection::open(folder.file()).unwrap().execute_batch("VACUUM").unwrap(),
            _ => {
                drop(store);
                store = open();
            }
        }
    }
    sound(&store);
}

#[test]
fn settling_twice_says_so_and_changes_nothing() {
    let (store, _) = memory_with(Store::options().retention(HOUR));
    let worker = store.worker("w").unwrap();
    let after = |how: &Settle| match how {
        Settle::Ack => Status::Done,
        Settle::Reject { .. } => Status::Dead,
        Settle::Defer { .. } | Settle::Extend { .. } => Status::Processing,
        _ => Status::Pending,
    };
    for first in ways().into_iter().take(5) {
        let id = store.queue("q").enqueue("x").unwrap().id();
        let claim = next(&worker, "q");
        assert_eq!(store.settle(claim.receipt(), first.clone()).unwrap(), Settled::Now(after(&first)));
        let before = row(&store, id);
        let stats = store.stats().unwrap();
        for second in ways() {
            let again = store.settle(claim.receipt(), second.clone());
            match second {
                // A lease of a claim that has ended cannot be made longer.
                Settle::Extend { .. } => assert_stale(again, claim.receipt(), before.status, before.worker.as_deref()),
                _ => assert_eq!(again.unwrap(), Settled::Before(before.status), "{first:?}, then {second:?}"),
            }
        }
        assert_eq!(row(&store, id), before);
        assert_eq!(store.stats().unwrap(), stats);
        let _ = store.cancel(id);
    }
    sound(&store);
}

#[test]
fn settling_what_was_deleted_says_gone() {
    let (store, _) = memory();
    let id = store.queue("q").enqueue("x").unwrap().id();
    let claim = next(&store.worker("w").unwrap(), "q");
    claim.ack().unwrap();
    for how in ways() {
        match store.settle(claim.receipt(), how.clone()) {
            Ok(settled) => assert_eq!(settled, Settled::Gone, "{how:?}"),
            Err(Error::Gone { id: gone }) => assert!(gone == id && matches!(how, Settle::Extend { .. })),
            other => panic!("{how:?}: {other:?}"),
        }
    }
    assert_eq!(store.stats().unwrap().queues[0].acked, 1);
    sound(&store);
}

/// A receipt is not revived by what happens to the message later.
#[test]
fn a_receipt_that_was_used_up_stays_so_through_failure_claim_death_and_redrive() {
    let (store, _) = memory_with(Store::options().retry(Retry::fixed(Duration::ZERO)));
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    let mut used = Vec::new();
    for step in 0..6 {
        let claim = next(&worker, "q");
        match step % 3 {
            0 => claim.fail("no").unwrap(),
            1 => claim.defer(Duration::ZERO).unwrap(),
            _ => claim.reject("no").unwrap(),
        };
        if step % 3 == 2 {
            store.redrive(id).unwrap();
        }
        used.push(claim.receipt());
        let before = row(&store, id);
        for receipt in &used {
            for how in ways() {
                let outcome = store.settle(*receipt, how);
                assert!(matches!(outcome, Ok(Settled::Before(_)) | Err(Error::Stale { .. })), "{outcome:?}");
            }
        }
        assert_eq!(row(&store, id), before);
    }
    let tokens: Vec<_> = used.iter().map(Receipt::token).collect();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    let held = next(&worker, "q");
    let before = row(&store, id);
    for receipt in &used {
        for how in ways() {
            assert_stale(store.settle(*receipt, how), *receipt, Status::Processing, Some("w"));
        }
    }
    assert_eq!(row(&store, id), before);
    held.ack().unwrap();
    sound(&store);
}

#[test]
fn in_bulk_each_receipt_has_an_outcome_of_its_own() {
    let (store, clock) = memory_with(Store::options().retention(HOUR).lease(SECOND));
    let (a, b) = (store.worker("a").unwrap(), store.worker("b").unwrap());
    store.queue("q").enqueue_all(vec!["x"; 9]).unwrap();
    let lost = next(&a, "q").receipt();
    clock.advance(SECOND);
    let taken = next(&b, "q").receipt();
    let claims: Vec<_> = a.claim_batch("q", 8).unwrap().into_iter().map(|claim| claim.receipt()).collect();
    store.cancel(claims[7].id()).unwrap();
    let nobody: Receipt = "999.1".parse().unwrap();
    let fail = |text: &str| Settle::Fail { error: text.into(), retry_in: Some(HOUR) };
    let outcomes = store
        .settle_all([
            (claims[0], Settle::Ack),
            (lost, Settle::Ack),
            (claims[1], fail("boom")),
            (claims[2], Settle::Reject { error: "never".into() }),
            (nobody, Settle::Ack),
            (claims[3], Settle::Defer { delay: HOUR, reason: "429".into() }),
            (claims[4], Settle::Release),
            (claims[0], fail("twice in one call")),
            (claims[5], Settle::Extend { lease: HOUR }),
            (claims[7], Settle::Ack),
            (nobody, Settle::Extend { lease: HOUR }),
            (claims[6], Settle::Ack),
        ])
        .unwrap();
    let told: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().map_err(ToString::to_string).copied()).collect();
    assert_eq!(told[0], Ok(Settled::Now(Status::Done)));
    assert!(matches!(outcomes[1], Err(Error::Stale { receipt, .. }) if receipt == lost));
    assert_eq!(told[2], Ok(Settled::Now(Status::Pending)));
    assert_eq!(told[3], Ok(Settled::Now(Status::Dead)));
    assert_eq!(told[4], Ok(Settled::Gone));
    assert_eq!(told[5], Ok(Settled::Now(Status::Processing)));
    assert_eq!(told[6], Ok(Settled::Now(Status::Pending)));
    assert_eq!(told[7], Ok(Settled::Before(Status::Done)));
    assert_eq!(told[8], Ok(Settled::Now(Status::Processing)));
    assert!(matches!(outcomes[9], Err(Error::Cancelled { id }) if id == claims[7].id()));
    assert!(matches!(outcomes[10], Err(Error::Gone { id }) if id == nobody.id()));
    assert_eq!(told[11], Ok(Settled::Now(Status::Done)));
    assert_eq!(outcomes.len(), 12);
    assert_eq!(row(&store, taken.id()).receipt, Some(taken));
    assert_eq!(row(&store, claims[5].id()).lease_left, Some(HOUR));
    assert!(store.settle_all([]).unwrap().is_empty());
    sound(&store);
}

#[test]
fn an_extension_never_shortens_and_counts_from_when_it_takes_effect() {
    let (store, clock) = memory_with(Store::options().lease(60 * SECOND));
    let worker = store.worker("w").unwrap();
    let id = store.queue("q").enqueue("x").unwrap().id();
    let claim = next(&worker, "q");
    let left = || row(&store, id).lease_left.unwrap();
    claim.extend(SECOND).unwrap();
    assert_eq!(left(), 60 * SECOND);
    clock.advance(59 * SECOND);
    claim.extend(SECOND).unwrap();
    assert_eq!(left(), SECOND);
    claim.extend(30 * SECOND).unwrap();
    assert_eq!(left(), 30 * SECOND);
    clock.sleep_machine(HOUR);
    assert_eq!(left(), 30 * SECOND);
    // Also when it had run out, and nobody had taken the message.
    clock.advance(HOUR);
    claim.extend(5 * SECOND).unwrap();
    assert_eq!(left(), 5 * SECOND);
    assert!(store.worker("other").unwrap().claim("q").unwrap().is_none());
    let before = row(&store, id);
    assert_eq!((before.attempts, before.crashes, before.receipt), (1, 0, Some(claim.receipt())));
    for bad in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        assert!(matches!(claim.extend(bad), Err(Error::Range { .. })), "{bad:?}");
    }
    assert_eq!(row(&store, id), before);
    claim.extend(*relet::LEASE_RANGE.end()).unwrap();
    assert_eq!(left(), *relet::LEASE_RANGE.end());
    claim.ack().unwrap();
    sound(&store);
}

#[test]
fn a_receipt_from_before_a_reboot_settles_until_the_message_is_claimed_again_and_its_number_is_never_issued_twice() {
    let (store, clock) = memory_with(Store::options().retention(HOUR));
    let queue = store.queue("q");
    queue.enqueue_all(["a", "b"]).unwrap();
    let claims = store.detached("shell").unwrap().claim_batch("q", 2).unwrap();
    let (first, second) = (claims[0].receipt(), claims[1].receipt());
    assert_eq!((first.epoch(), first.to_string()), (1, format!("{}.1", first.id())));
    clock.reboot();

    assert_eq!(store.ack(first).unwrap(), Settled::Now(Status::Done));
    let Verdict::Recovered(again) = store.worker("shell").unwrap().claim_id(second.id()).unwrap() else {
        panic!("not recovered")
    };
    assert_eq!((again.receipt().epoch(), again.crashes()), (2, 1));
    assert_eq!(again.receipt().to_string(), format!("{}.2-2", second.id()));
    assert_stale(store.ack(second), second, Status::Processing, Some("shell"));
    // What the boot before would have issued next, had its claim been lost with the power.
    let lost: Receipt = format!("{}.2", second.id()).parse().unwrap();
    let before = row(&store, second.id());
    for how in ways() {
        assert_stale(store.settle(lost, how), lost, Status::Processing, Some("shell"));
    }
    assert_eq!(row(&store, second.id()), before);
    again.ack().unwrap();
    sound(&store);
}

#[test]
fn a_receipt_is_a_text_and_its_text_is_the_receipt() {
    let (store, clock) = memory();
    store.queue("q").enqueue("x").unwrap();
    for epoch in 1..4 {
        let worker = store.detached("shell").unwrap();
        let claim = next(&worker, "q");
        let text = claim.receipt().to_string();
        let expected = format!("{}.{}", claim.id(), claim.receipt().token());
        assert_eq!(text, if epoch == 1 { expected } else { format!("{expected}-{epoch}") });
        assert_eq!(row(&store, claim.id()).receipt.unwrap().to_string(), text);
        let json = serde_json::to_string(&claim.receipt()).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        let read: Receipt = text.parse().unwrap();
        assert_eq!((read, serde_json::from_str(&json).unwrap()), (claim.receipt(), read));
        assert_eq!(store.settle(read, Settle::Release).unwrap(), Settled::Now(Status::Pending));
        clock.reboot();
    }
    for epoch in ["1.1-4", "1.1", "1.4-2", "1.9-9"] {
        let receipt: Receipt = epoch.parse().unwrap();
        assert!(matches!(store.ack(receipt), Err(Error::Stale { .. })), "{epoch}");
    }
    sound(&store);
}

/// What a start held that is over may still be settled, as long as its successor has not taken it; it may not be kept.
#[test]
fn a_superseded_start_settles_what_it_holds_but_cannot_keep_it_from_its_successor() {
    for reboot in [false, true] {
        let (store, clock) = memory_with(Store::options().retention(HOUR));
        store.queue("q").enqueue_all(["a", "b", "c"]).unwrap();
        let old = store.worker("w").unwrap();
        let claims = old.claim_batch("q", 3).unwrap();
        let receipts: Vec<_> = claims.iter().map(|claim| claim.receipt()).collect();
        // A program of the boot before that lives on, or one that has ended while somebody has its receipts.
        let _living = if reboot {
            clock.reboot();
            Some((old, claims))
        } else {
            drop((old, claims));
            None
        };
        let new = store.worker("w").unwrap();
        assert_eq!(store.ack(receipts[0]).unwrap(), Settled::Now(Status::Done));

        let taken = next(&new, "q");
        assert_eq!((taken.id(), taken.crashes()), (receipts[1].id(), 1));
        assert_stale(store.ack(receipts[1]), receipts[1], Status::Processing, Some("w"));

        // The late heartbeat is refused: the claim was void from the restart on.
        let late = store.settle(receipts[2], Settle::Extend { lease: HOUR });
        assert_stale(late, receipts[2], Status::Processing, Some("w"));
        let verdict = new.claim_id(receipts[2].id()).unwrap();
        assert!(matches!(verdict, Verdict::Recovered(_)), "{verdict:?}");
        sound(&store);
    }
}
