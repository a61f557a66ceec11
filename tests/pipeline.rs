//! What is laid down is carried out, in its order and with few commits; and nothing is promised before it is waited for.

mod support;

use std::collections::VecDeque;
use std::path::Path;

use relet::{
    DEFERRED_BYTES_MAX, DEFERRED_MAX, Error, Filter, MessageId, Options, Settle, Settled, Status, Store, Ticket,
};
use support::{Child, Dir, beside, part};

/// Without the reserve, which is another test's subject, and with a log that keeps every commit.
fn options() -> Options {
    Store::options().reserve(0).checkpoints(false)
}

fn payloads(store: &Store) -> Vec<String> {
    let rows = store.list(&Filter::new().payload(true).limit(1000)).unwrap();
    rows.into_iter().map(|row| String::from_utf8(row.payload.unwrap()).unwrap()).collect()
}

fn pending(store: &Store) -> usize {
    let pending = store.stats().unwrap().queues.first().map_or(0, |queue| queue.count(Status::Pending));
    usize::try_from(pending).unwrap()
}

fn sound(store: &Store) {
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// The commits in the log: frames that say how large the file is after them.
fn commits(path: &Path) -> usize {
    const HEADER: usize = 32;
    const FRAME_HEADER: usize = 24;
    let log = std::fs::read(beside(path, "-wal")).unwrap();
    let number = |at: usize| u32::from_be_bytes(log[at..at + 4].try_into().unwrap());
    let frame = FRAME_HEADER + number(8) as usize;
    // Frames with other salts are left over from before the log was begun again.
    let frames = (HEADER..log.len()).step_by(frame).filter(|at| log[at + 8..at + 16] == log[16..24]);
    frames.filter(|at| number(at + 4) != 0).count()
}

#[test]
fn what_a_thread_lays_down_and_what_it_calls_afterwards_keep_their_order() {
    let dir = Dir::new("pipeline");
    let store = options().open(dir.join("app.db")).unwrap();
    let queue = store.queue("mail");
    let mut expected = Vec::new();
    let mut tickets = Vec::new();
    for n in 0..10 {
        for letter in ["a", "b", "c"] {
            let payload = format!("{n}{letter}");
            tickets.push(queue.enqueue_deferred(payload.clone()).unwrap());
            expected.push(payload);
        }
        let payload = format!("{n}, waited for");
        assert_eq!(queue.enqueue(payload.clone()).unwrap().id(), MessageId::new(4 * n + 4));
        expected.push(payload);
    }
    let ids: Vec<i64> = tickets.into_iter().map(|ticket| ticket.wait().unwrap().id().get()).collect();
    assert_eq!(ids, (1..=40).filter(|id| id % 4 != 0).collect::<Vec<_>>());
    assert_eq!(payloads(&store), expected);
    sound(&store);
}

#[test]
fn a_claim_finds_what_was_laid_down_before_it_and_an_ack_comes_before_the_next_claim() {
    let store = options().open_in_memory().unwrap();
    let worker = store.worker("w").unwrap();
    let ticket = store.queue("mail").enqueue_deferred("a").unwrap();
    let claim = worker.claim("mail").unwrap().expect("it is there");
    let ack = claim.ack_deferred();
    assert!(worker.claim_id(claim.id()).unwrap().claim().is_none(), "it is gone");
    assert_eq!(ticket.wait().unwrap().id(), claim.id());
    assert_eq!(ack.wait().unwrap(), Settled::Now(Status::Done));
    sound(&store);
}

#[test]
fn one_commit_carries_all_that_was_laid_down() {
    let dir = Dir::new("pipeline");
    let path = dir.join("app.db");
    let store = options().open(&path).unwrap();
    let queue = store.queue("mail");
    queue.enqueue("first").unwrap();
    let before = commits(&path);
    let tickets: Vec<_> = (0..64).map(|n| queue.enqueue_deferred(format!("{n}")).unwrap()).collect();
    assert_eq!((commits(&path), pending(&store)), (before, 1), "nobody has waited");
    for ticket in tickets {
        ticket.wait().unwrap();
        assert_eq!((commits(&path), pending(&store)), (before + 1, 65));
    }
}

#[test]
fn an_ack_that_was_laid_down_shares_the_next_claims_commit_and_one_more_brings_all_to_the_disk() {
    let dir = Dir::new("pipeline");
    let path = dir.join("app.db");
    let store = options().open(&path).unwrap();
    store.queue("mail").enqueue_all((0..32).map(|n| format!("{n}"))).unwrap();
    let worker = store.worker("w").unwrap();
    let before = commits(&path);
    let mut acks = Vec::new();
    while let Some(claim) = worker.claim("mail").unwrap() {
        acks.push(claim.ack_deferred());
    }
    assert_eq!(commits(&path), before + 33, "one for each claim, and one for the last look");
    for ack in acks {
        assert_eq!(ack.wait().unwrap(), Settled::Now(Status::Done));
        assert_eq!(commits(&path), before + 34);
    }
    sound(&store);
}

#[test]
fn a_ticket_that_is_dropped_has_carried_out_its_operation() {
    let dir = Dir::new("pipeline");
    let store = options().open(dir.join("app.db")).unwrap();
    let queue = store.queue("mail");
    drop(queue.enqueue_deferred("a").unwrap());
    assert_eq!(payloads(&store), ["a"]);
    let tickets = [queue.enqueue_deferred("b").unwrap(), queue.enqueue_deferred("c").unwrap()];
    drop(tickets);
    assert_eq!(payloads(&store), ["a", "b", "c"]);
}

#[test]
fn a_ticket_outlives_every_other_handle() {
    let dir = Dir::new("pipeline");
    let path = dir.join("app.db");
    let ticket = options().open(&path).unwrap().queue("mail").enqueue_deferred("a").unwrap();
    drop(ticket);
    let ticket = options().open(&path).unwrap().queue("mail").enqueue_deferred("b").unwrap();
    ticket.wait().unwrap();
    assert_eq!(payloads(&options().open(&path).unwrap()), ["a", "b"]);
}

#[test]
fn errors_are_told_by_the_ticket_or_at_once_where_no_store_would_accept_it() {
    let store = options().payload_max(10).open_in_memory().unwrap();
    let queue = store.queue("mail");
    assert!(matches!(queue.enqueue_deferred("much too large"), Err(Error::PayloadTooLarge { .. })));
    assert!(matches!(store.queue("").enqueue_deferred("a"), Err(Error::QueueName { .. })));
    let id = queue.enqueue("a").unwrap().id();
    let worker = store.worker("w").unwrap();
    let first = worker.claim_id(id).unwrap().claim().unwrap();
    let second = worker.claim_id(id).unwrap().claim().unwrap();
    let lease = std::time::Duration::ZERO;
    assert!(matches!(store.settle_deferred(first.receipt(), Settle::Extend { lease }), Err(Error::Range { .. })));
    // One that fails stands between two that do not.
    let stale = first.ack_deferred();
    let fine = second.ack_deferred();
    let after = queue.enqueue_deferred("b").unwrap();
    assert!(matches!(stale.wait(), Err(Error::Stale { .. })));
    assert_eq!(fine.wait().unwrap(), Settled::Now(Status::Done));
    assert!(!after.wait().unwrap().existing());
    sound(&store);
}

#[test]
fn a_store_that_is_for_looking_only_takes_nothing() {
    let dir = Dir::new("pipeline");
    let path = dir.join("app.db");
    drop(options().open(&path).unwrap());
    let store = options().open_read_only(&path).unwrap();
    assert!(matches!(store.queue("mail").enqueue_deferred("a"), Err(Error::ReadOnly { .. })));
}

#[test]
fn what_lies_there_is_bounded_in_number_and_in_bytes() {
    let dir = Dir::new("pipeline");
    let store = options().open(dir.join("app.db")).unwrap();
    let queue = store.queue("mail");
    let mut tickets: Vec<Ticket<_>> = (1..DEFERRED_MAX).map(|_| queue.enqueue_deferred("a").unwrap()).collect();
    assert_eq!(pending(&store), 0);
    tickets.push(queue.enqueue_deferred("one too many").unwrap());
    assert_eq!(pending(&store), DEFERRED_MAX);
    let half = vec![0; DEFERRED_BYTES_MAX / 2];
    tickets.push(queue.enqueue_deferred(&half[..]).unwrap());
    assert_eq!(pending(&store), DEFERRED_MAX);
    tickets.push(queue.enqueue_deferred(&half[..]).unwrap());
    assert_eq!(pending(&store), DEFERRED_MAX + 2);
    // Settles that are committed and not on the disk yet count as well.
    let worker = store.worker("w").unwrap();
    let mut acks = Vec::new();
    while let Some(claim) = worker.claim("mail").unwrap() {
        acks.push(claim.ack_deferred());
    }
    assert_eq!(acks.len(), DEFERRED_MAX + 2);
    for ack in acks {
        assert_eq!(ack.wait().unwrap(), Settled::Now(Status::Done));
    }
    sound(&store);
}

/// Threads that lay down, threads that wait at once, and threads that consume, all on one store.
#[test]
fn threads_of_all_kinds_share_a_store() {
    work_together(&options().open_in_memory().unwrap());
    let dir = Dir::new("pipeline");
    work_together(&Store::options().reserve(0).open(dir.join("app.db")).unwrap());
}

fn work_together(store: &Store) {
    const EACH: usize = 300;
    let worker = store.worker("w").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let queue = store.queue("mail");
            scope.spawn(move || {
                let mut window = VecDeque::new();
                let mut last = MessageId::new(0);
                let mut see = |ticket: Ticket<relet::Enqueued>| {
                    let id = ticket.wait().unwrap().id();
                    assert!(id > last, "in its order");
                    last = id;
                };
                for n in 0..EACH {
                    if thread % 2 == 0 {
                        window.push_back(queue.enqueue_deferred(format!("{thread} {n}")).unwrap());
                        if window.len() > 16 {
                            window.pop_front().map(&mut see);
                        }
                    } else {
                        queue.enqueue(format!("{thread} {n}")).unwrap();
                    }
                }
                window.into_iter().for_each(see);
            });
        }
        for thread in 0..4 {
            let (worker, mut left) = (&worker, EACH);
            scope.spawn(move || {
                let mut acks = Vec::new();
                while left > 0 {
                    let Some(claim) = worker.claim("mail").unwrap() else {
                        std::thread::yield_now();
                        continue;
                    };
                    left -= 1;
                    if thread % 2 == 0 {
                        acks.push(claim.ack_deferred());
                    } else {
                        assert_eq!(claim.ack().unwrap(), Settled::Now(Status::Done));
                    }
                    if acks.len() > 16 {
                        for ack in acks.drain(..) {
                            assert_eq!(ack.wait().unwrap(), Settled::Now(Status::Done));
                        }
                    }
                }
            });
        }
    });
    let stats = store.stats().unwrap();
    assert_eq!((stats.queues[0].live(), stats.queues[0].acked), (0, 4 * EACH as u64));
    sound(store);
}

/// What the child was told is there is there; of the rest, the first ones may be.
#[test]
fn a_process_that_is_killed_loses_only_the_end_of_what_was_not_waited_for() {
    for until in [1, 70, 500] {
        let dir = Dir::new("pipeline");
        let path = dir.join("app.db");
        let mut child = Child::start("role_lays_down", &[path.to_str().unwrap()]);
        let mut waited_for = 0;
        while waited_for < until {
            waited_for = child.hear().unwrap().parse().unwrap();
        }
        child.kill();
        while let Some(said) = child.hear() {
            waited_for = said.parse().unwrap();
        }
        let store = Store::options().reserve(0).open(&path).unwrap();
        let stored = pending(&store);
        assert!(stored >= waited_for, "{stored} of {waited_for}");
        let ids = store.list(&Filter::new().payload(true).limit(1000)).unwrap();
        for (n, row) in ids.iter().enumerate() {
            assert_eq!(row.payload.as_deref(), Some(format!("{n}").as_bytes()), "without a gap");
        }
        sound(&store);
    }
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_lays_down() {
    let Some(part) = part("role_lays_down") else { return };
    let store = Store::options().reserve(0).open(part.path()).unwrap();
    let queue = store.queue("mail");
    let mut window = VecDeque::new();
    for n in 0..100_000 {
        window.push_back(queue.enqueue_deferred(format!("{n}")).unwrap());
        if window.len() == 64 {
            part.say(window.pop_front().unwrap().wait().unwrap().id());
        }
    }
}
