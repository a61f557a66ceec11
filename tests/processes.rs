//! Any number of threads and processes share one file: nothing is handed out twice, nothing is lost, nobody starves.
#![cfg(feature = "testing")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::Duration;

use relet::rusqlite::{Connection, Transaction, TransactionBehavior};
use relet::{
    Clock, Durability, Error, Filter, MessageId, QueueDefaults, Receipt, Route, Settle, Status, Store, Verdict,
};
use support::{Child, Dir, Part, number, part, plain, rows};

fn open(path: &Path) -> Store {
    // The room that is set aside for a full disk is another test's subject.
    Store::options().durability(Durability::Normal).reserve(0).busy_wait(Duration::from_secs(20)).open(path).unwrap()
}

fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What a role says when it is ready; then it waits for the word.
fn ready(part: &Part) {
    part.say("ready");
    part.hear();
}

/// Lets all children begin at the same moment.
fn go(children: &mut [Child]) {
    children.iter_mut().for_each(|child| child.expect("ready"));
    children.iter_mut().for_each(|child| child.say("go"));
}

// B01: two consumers got the same message.

const RACED: i64 = 1000;

fn claim_all(store: &Store, label: &str) -> Vec<i64> {
    let worker = store.worker(label).unwrap();
    std::iter::from_fn(|| worker.claim("mail").unwrap()).map(|claim| claim.id().get()).collect()
}

fn handed_out_once(store: &Store, mut ids: Vec<i64>) {
    ids.sort_unstable();
    assert_eq!(ids, (1..=RACED).collect::<Vec<_>>());
    let all = store.list(&Filter::new().limit(2000)).unwrap();
    assert!(all.iter().all(|message| message.attempts == 1 && message.status == Status::Processing));
    assert!(store.worker("late").unwrap().claim("mail").unwrap().is_none());
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

#[test]
fn threads_never_get_the_same_message() {
    for stores in [1, 8] {
        let dir = Dir::new("race");
        let path = dir.join("store.db");
        let store = open(&path);
        store.queue("mail").enqueue_all((0..RACED).map(|n| n.to_string())).unwrap();
        let barrier = Barrier::new(8);
        let ids = std::thread::scope(|scope| {
            let claimers: Vec<_> = (0..8)
                .map(|n| {
                    let (store, path, barrier) = (&store, &path, &barrier);
                    scope.spawn(move || {
                        // On one store together, or each on its own.
                        let own = if stores == 1 { store.clone() } else { open(path) };
                        barrier.wait();
                        claim_all(&own, &format!("w-{n}"))
                    })
                })
                .collect();
            claimers.into_iter().flat_map(|claimer| claimer.join().unwrap()).collect()
        });
        handed_out_once(&store, ids);
    }
}

#[test]
fn processes_never_get_the_same_message() {
    let dir = Dir::new("race");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all((0..RACED).map(|n| n.to_string())).unwrap();
    let mut children: Vec<_> =
        (0..4).map(|n| Child::start("role_claims_all", &[arg(&path), &format!("w-{n}")])).collect();
    go(&mut children);
    let ids = children.into_iter().flat_map(Child::finish).map(|line| line.parse().unwrap()).collect();
    handed_out_once(&store, ids);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_claims_all() {
    let Some(part) = part("role_claims_all") else { return };
    let store = open(part.path());
    ready(&part);
    let ids = claim_all(&store, &part.args[1]);
    ids.iter().for_each(|id| part.say(id));
}

// B03: 'locked' at once, although a wait was configured.

/// Every call that writes, beside a process that commits in a tight loop.
#[test]
fn no_write_fails_because_another_process_commits_in_between() {
    const RUNS: usize = 500;
    let dir = Dir::new("locked");
    let path = dir.join("store.db");
    let store = open(&path);
    plain(&path).execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY)").unwrap();
    let mut other = Child::start("role_commits_in_a_loop", &[arg(&path)]);
    other.expect("ready");

    let mail = store.queue("mail");
    let worker = store.worker("w").unwrap();
    let next = || worker.claim("mail").unwrap().unwrap();
    let mut app = plain(&path);
    // Each call writes at least once.
    for run in 0..RUNS {
        let ids: Vec<MessageId> = mail.enqueue_all(["a", "b", "c"]).unwrap().into_iter().map(Into::into).collect();
        let id = mail.enqueue(relet::Message::new("d").key(format!("{run}"))).unwrap();
        assert!(mail.enqueue(relet::Message::new("d").key(format!("{run}"))).unwrap().existing());
        next().ack().unwrap();
        let claim = worker.claim_id(ids[1]).unwrap().claim().unwrap();
        claim.extend(Duration::from_secs(90)).unwrap();
        claim.release().unwrap();
        next().defer(Duration::ZERO).unwrap();
        next().fail_for("no", Duration::ZERO).unwrap();
        next().reject("no").unwrap();
        store.redrive(ids[1]).unwrap();
        store.route(ids[1], Route::Queued).unwrap();
        store.cancel(ids[1]).unwrap();
        let claims = worker.claim_batch("mail", 2).unwrap();
        let settled = store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
        assert!(settled.len() == 2 && settled.iter().all(Result::is_ok));
        let tx = app.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        mail.enqueue_in(&tx, "e").unwrap();
        tx.commit().unwrap();
        assert!(store.cancel_all([id.id()]).unwrap()[0].is_err());
        next().reject("no").unwrap();
        assert_eq!(store.redrive_all(Some("mail")).unwrap().redriven.len(), 1);
        next().reject("no").unwrap();
        assert_eq!(store.purge_dead(Duration::ZERO).unwrap(), 1);
        mail.set_defaults(QueueDefaults::new().max_attempts(5)).unwrap();
        drop(store.worker("passing").unwrap());
        store.prune().unwrap();
        store.checkpoint().unwrap();
        store.stats().unwrap();
    }
    other.say("stop");
    let commits: i64 = other.finish()[0].parse().unwrap();
    assert!(commits > 0);
    assert_eq!(number(&app, "SELECT count(*) FROM orders"), commits);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// Small writes of an application in the same file, until it is told to stop.
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_commits_in_a_loop() {
    let Some(part) = part("role_commits_in_a_loop") else { return };
    let conn = plain(part.path());
    conn.execute_batch("PRAGMA synchronous = NORMAL").unwrap();
    let (stop, stopped) = channel();
    let mut commits = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ready(&part);
            stop.send(()).unwrap();
        });
        while stopped.try_recv().is_err() {
            let tx = Transaction::new_unchecked(&conn, TransactionBehavior::Immediate).unwrap();
            tx.execute("INSERT INTO orders DEFAULT VALUES", []).unwrap();
            tx.commit().unwrap();
            commits += 1;
        }
    });
    part.say(commits);
}

/// The floor under the test above: there is no transaction that reads first and writes later.
#[test]
fn every_transaction_that_writes_begins_immediate() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in ["db.rs", "writer.rs", "backup.rs", "store.rs", "queue.rs", "claim.rs", "worker.rs"] {
        let source = std::fs::read_to_string(src.join(file)).unwrap();
        for (number, line) in source.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            let place = format!("src/{file}:{}", number + 1);
            for (at, _) in line.match_indices("BEGIN") {
                assert!(line[at..].starts_with("BEGIN IMMEDIATE"), "{place}: {line}");
            }
            // A deferred transaction is for looks alone.
            let deferred = line.contains("unchecked_transaction") || line.contains(".transaction(");
            assert!(!deferred || file == "store.rs", "{place}: {line}");
        }
    }
}

// B05: the keep-alive had no patience with another's short lock, and its worker was taken for dead.

#[test]
fn an_extension_waits_for_a_lock_and_counts_from_when_it_takes_effect() {
    let dir = Dir::new("extend");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let lease = Duration::from_secs(3);
    let store = Store::options().clock(clock.clone()).lease(lease).open(&path).unwrap();
    store.queue("mail").enqueue("a").unwrap();
    let claim = store.worker("a").unwrap().claim("mail").unwrap().unwrap();
    clock.advance(Duration::from_secs(1));

    let mut app = plain(&path);
    let locked = app.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let (called, calls) = channel();
    std::thread::scope(|scope| {
        let extender = scope.spawn(|| {
            called.send(()).unwrap();
            claim.extend(lease)
        });
        calls.recv().unwrap();
        // Time enough for the call to be waiting; nothing else depends on it.
        std::thread::sleep(Duration::from_millis(100));
        clock.advance(Duration::from_millis(1500));
        locked.commit().unwrap();
        extender.join().unwrap().unwrap();
    });
    assert_eq!(store.show(claim.id()).unwrap().unwrap().lease_left, Some(lease));
    let other = store.worker("b").unwrap();
    clock.advance(lease - Duration::from_millis(1));
    assert!(other.claim("mail").unwrap().is_none());
    assert!(matches!(other.claim_id(claim.id()).unwrap(), Verdict::Held { .. }));
    claim.extend(lease).unwrap();
    clock.advance(lease);
    let _ = other.claim("mail").unwrap().expect("the lease has run out");
}

// B11: a pool of connections to ':memory:' was a pool of empty databases.

#[test]
fn a_store_in_memory_is_one_store_for_all_threads_and_no_other_s() {
    let store = Store::options().readers(4).open_in_memory().unwrap();
    let another = Store::open_in_memory().unwrap();
    let barrier = Barrier::new(10);
    let claimed: Vec<Vec<i64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..10)
            .map(|n| {
                let (store, barrier) = (store.clone(), &barrier);
                scope.spawn(move || {
                    let mail = store.queue("mail");
                    for m in 0..10 {
                        mail.enqueue(format!("{n} {m}")).unwrap();
                    }
                    store.stats().unwrap();
                    barrier.wait();
                    claim_all(&store, &format!("w-{n}"))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let distinct: BTreeSet<_> = claimed.iter().flatten().collect();
    assert_eq!((claimed.iter().flatten().count(), distinct.len()), (100, 100));
    assert_eq!(store.stats().unwrap().queues[0].count(Status::Processing), 100);
    assert_eq!(store.path(), None);
    assert_eq!(another.stats().unwrap().queues, []);
    assert!(another.worker("w").unwrap().claim("mail").unwrap().is_none());
}

// B15: the caller was told 'locked' although the message was stored, repeated the call, and a duplicate went out.

#[test]
fn what_was_refused_is_not_stored_and_what_is_stored_was_acknowledged() {
    const CALLS: usize = 2000;
    let dir = Dir::new("told");
    let path = dir.join("store.db");
    open(&path);
    plain(&path).execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY)").unwrap();
    let store = Store::options().busy_wait(Duration::from_millis(5)).reserve(0).open(&path).unwrap();
    let mut others: Vec<_> = (0..2).map(|_| Child::start("role_holds_the_lock_now_and_then", &[arg(&path)])).collect();

    // The first one holds the lock, so that there is a refusal at all.
    others[0].expect("held");
    let mail = store.queue("mail");
    let mut told = BTreeMap::new();
    let mut call = |n: usize| {
        let payload = format!("message {n}");
        let outcome = mail.enqueue(payload.as_str());
        if let Err(error) = &outcome {
            assert!(matches!(error, Error::Busy { .. }), "{error:?}");
        }
        told.insert(payload, outcome.map(|enqueued| enqueued.id()));
    };
    call(0);
    others.iter_mut().for_each(|other| other.say("go"));
    (1..CALLS).for_each(call);
    others.into_iter().for_each(|other| drop(other.finish()));

    assert!(matches!(told["message 0"], Err(Error::Busy { .. })));
    let stored = store.list(&Filter::new().limit(10_000).payload(true)).unwrap();
    let stored: BTreeMap<_, _> =
        stored.into_iter().map(|message| (String::from_utf8(message.payload.unwrap()).unwrap(), message.id)).collect();
    let acknowledged: BTreeMap<_, _> =
        told.into_iter().filter_map(|(payload, outcome)| Some((payload, outcome.ok()?))).collect();
    assert!(acknowledged.len() > CALLS / 100, "only {} of {CALLS} got through", acknowledged.len());
    assert_eq!(stored, acknowledged);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_holds_the_lock_now_and_then() {
    let Some(part) = part("role_holds_the_lock_now_and_then") else { return };
    let conn = plain(part.path());
    let held = Transaction::new_unchecked(&conn, TransactionBehavior::Immediate);
    part.say("held");
    part.hear();
    drop(held);
    let (stop, stopped) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            part.hear();
            stop.send(()).unwrap();
        });
        let mut turn = 0;
        // Short and long holds, about the wait that the other side has.
        while stopped.recv_timeout(Duration::from_millis(2)).is_err() {
            let Ok(tx) = Transaction::new_unchecked(&conn, TransactionBehavior::Immediate) else { continue };
            tx.execute("INSERT INTO orders DEFAULT VALUES", []).unwrap();
            turn += 1;
            std::thread::sleep(Duration::from_millis([0, 0, 0, 3, 6][turn % 5]));
            tx.commit().unwrap();
        }
    });
}

// B19: what a killed worker held stayed 'executing' for ever.

/// A claim finds all of it, long before its lease has run out.
#[test]
fn what_a_killed_worker_held_is_taken_over_at_once() {
    let dir = Dir::new("killed");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all((0..10).map(|n| n.to_string())).unwrap();
    let mut child = Child::start("role_claims_some_and_hangs", &[arg(&path), "old", "5", "3600000"]);
    let held: Vec<i64> = (0..5).map(|_| child.hear().unwrap().parse().unwrap()).collect();
    child.kill();

    let worker = store.worker("new").unwrap();
    let claims: Vec<_> = (0..10).map(|_| worker.claim("mail").unwrap().expect("nobody alive holds it")).collect();
    for claim in &claims {
        let was_held = held.contains(&claim.id().get());
        assert_eq!((claim.attempts(), claim.crashes()), if was_held { (2, 1) } else { (1, 0) });
    }
    assert_eq!(store.stats().unwrap().queues[0].count(Status::Processing), 10);
    for claim in claims {
        claim.ack().unwrap();
    }
    assert_eq!(store.stats().unwrap().queues[0].count(Status::Processing), 0);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// A worker that comes back under its label has what it held at once, and what it had held is worth nothing any more.
#[test]
fn a_killed_worker_that_comes_back_has_its_messages_at_once() {
    let dir = Dir::new("comes-back");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all((0..10).map(|n| n.to_string())).unwrap();
    let mut child = Child::start("role_claims_some_and_hangs", &[arg(&path), "w", "5", "3600000"]);
    let held: Vec<i64> = (0..5).map(|_| child.hear().unwrap().parse().unwrap()).collect();
    child.kill();
    let worker = store.worker("w").unwrap();
    for id in held {
        let claim = worker.claim("mail").unwrap().unwrap();
        assert_eq!((claim.id().get(), claim.attempts(), claim.crashes()), (id, 2, 1));
        assert_eq!(claim.receipt().token(), 2);
    }
    assert_eq!(claim_all(&store, "another").len(), 5);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_claims_some_and_hangs() {
    let Some(part) = part("role_claims_some_and_hangs") else { return };
    let store = open(part.path());
    let lease = Duration::from_millis(part.args[3].parse().unwrap());
    let worker = store.worker(&part.args[1]).unwrap().lease(lease).unwrap();
    for claim in worker.claim_batch("mail", part.args[2].parse().unwrap()).unwrap() {
        part.say(claim.id());
    }
    part.hear();
}

// B25: workers in several containers had the same name, and all believed the lock was theirs.

#[test]
fn workers_without_a_name_of_their_own_are_never_taken_for_each_other() {
    let dir = Dir::new("unnamed");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("a").unwrap();
    let mut children: Vec<_> = (0..3).map(|_| Child::start("role_claims_by_id", &[arg(&path), ""])).collect();
    go(&mut children);
    let said: Vec<String> = children.into_iter().map(|child| child.finish().concat()).collect();
    let labels: BTreeSet<_> = said.iter().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(labels.len(), 3, "{said:?}");
    let mut verdicts: Vec<_> = said.iter().map(|line| line.split(' ').nth(1).unwrap()).collect();
    verdicts.sort_unstable();
    assert_eq!(verdicts, ["claimed", "held", "held"]);
    assert_eq!(store.show(1).unwrap().unwrap().attempts, 1);
}

/// A name belongs to one living worker. A second one is told who has it, and gets nothing, until the first is gone.
#[test]
fn a_second_worker_of_a_name_is_refused_and_told_who_has_it() {
    let dir = Dir::new("one-name");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("a").unwrap();
    let mut child = Child::start("role_claims_by_id", &[arg(&path), "w"]);
    go(std::slice::from_mut(&mut child));
    let receipt: Receipt = child.hear().unwrap().strip_prefix("w claimed ").unwrap().parse().unwrap();

    let conn = plain(&path);
    let before = rows(&conn, "SELECT * FROM relet_messages");
    let started = number(&conn, "SELECT started_at FROM relet_workers WHERE label = 'w'");
    let taken = format!("label taken {} {started}", child.pid());
    // By this process, and by another one.
    let Err(Error::LabelTaken { label, pid, started_at }) = store.worker("w") else { panic!("two of one name") };
    assert_eq!((label.as_str(), pid, started_at), ("w", child.pid(), started));
    let mut second = Child::start("role_claims_by_id", &[arg(&path), "w"]);
    go(std::slice::from_mut(&mut second));
    second.expect(&taken);
    assert_eq!(rows(&conn, "SELECT * FROM relet_messages"), before);
    assert_eq!(store.show(1).unwrap().unwrap().receipt, Some(receipt));

    child.kill();
    second.say("again");
    let line = second.hear().unwrap();
    assert!(line.starts_with("w recovered "), "{line}");
    assert!(matches!(store.ack(receipt), Err(Error::Stale { .. })));
}

/// Where one name is given to several detached workers, they are one: each goes on with what the one before it had, and
/// the older receipts are worth nothing.
#[test]
fn workers_of_one_name_take_over_from_each_other_and_only_the_last_receipt_counts() {
    let dir = Dir::new("same-name");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("a").unwrap();
    let mut receipts: Vec<Receipt> = Vec::new();
    let mut children = Vec::new();
    for expected in ["claimed", "resumed", "resumed"] {
        let mut child = Child::start("role_claims_by_id", &[arg(&path), "w", "detached"]);
        go(std::slice::from_mut(&mut child));
        let line = child.hear().unwrap();
        let mut words = line.split(' ');
        assert_eq!((words.next(), words.next()), (Some("w"), Some(expected)));
        receipts.push(words.next().unwrap().parse().unwrap());
        // It goes on living, with its handle.
        children.push(child);
    }
    let row = store.show(1).unwrap().unwrap();
    assert_eq!((row.attempts, row.crashes, row.receipt), (3, 0, Some(receipts[2])));
    for receipt in &receipts[..2] {
        assert!(matches!(store.ack(*receipt), Err(Error::Stale { .. })));
    }
    let row = store.show(1).unwrap().unwrap();
    assert_eq!((row.status, row.attempts, row.receipt), (Status::Processing, 3, Some(receipts[2])));
    // One that went before may go on with it as well: then its receipt is the one that counts.
    children[0].say("again");
    let line = children[0].hear().unwrap();
    let last: Receipt = line.strip_prefix("w resumed ").unwrap().parse().unwrap();
    assert!(matches!(store.ack(receipts[2]), Err(Error::Stale { .. })));
    store.ack(last).unwrap();
    // The name itself was never taken by any of them.
    store.worker("w").unwrap();
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_claims_by_id() {
    let Some(part) = part("role_claims_by_id") else { return };
    let store = open(part.path());
    ready(&part);
    // It keeps what it has until its end.
    let mut kept = Vec::new();
    loop {
        let worker = match (&*part.args[1], part.args.get(2)) {
            ("", _) => store.worker_unnamed(),
            (label, None) => store.worker(label),
            (label, Some(_)) => store.detached(label),
        };
        match worker {
            Ok(worker) => {
                let label = worker.label();
                match worker.claim_id(1).unwrap() {
                    Verdict::Held { .. } => part.say(format!("{label} held")),
                    verdict => {
                        let claim = verdict.claim().unwrap();
                        let how = format!("{:?}", claim.how()).to_lowercase();
                        part.say(format!("{label} {how} {}", claim.receipt()));
                        kept.push(claim);
                    }
                }
            }
            Err(Error::LabelTaken { pid, started_at, .. }) => part.say(format!("label taken {pid} {started_at}")),
            Err(error) => panic!("{error}"),
        }
        if part.hear().is_none() {
            break;
        }
    }
}

// B27: start-up recovery reset what others were working on.

#[test]
fn coming_to_a_store_takes_nothing_from_those_who_are_there() {
    let dir = Dir::new("arrive");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all(["held", "deferred"]).unwrap();
    let worker = store.worker("first").unwrap().lease(Duration::from_secs(60)).unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    worker.claim("mail").unwrap().unwrap().defer(Duration::from_secs(60)).unwrap();
    let conn = plain(&path);
    let all = |conn: &Connection| {
        let mut all = rows(conn, "SELECT * FROM relet_messages");
        all.extend(rows(conn, "SELECT * FROM relet_retry_queue"));
        all.extend(rows(conn, "SELECT * FROM relet_workers WHERE label = 'first'"));
        all
    };
    let before = all(&conn);
    assert_eq!(Child::start("role_arrives", &[arg(&path)]).finish(), ["nothing for me"]);
    assert_eq!(all(&conn), before);
    // The same from a second handle in this process.
    arrive(&path);
    assert_eq!(all(&conn), before);
    claim.ack().unwrap();
    assert!(matches!(worker.claim_id(2).unwrap(), Verdict::Waiting { .. }));
}

fn arrive(path: &Path) {
    let store = open(path);
    store.stats().unwrap();
    store.list(&Filter::new()).unwrap();
    store.stuck(Duration::ZERO).unwrap();
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    store.prune().unwrap();
    store.checkpoint().unwrap();
    let worker = store.worker("second").unwrap();
    assert!(worker.claim("mail").unwrap().is_none());
    assert!(matches!(worker.claim_id(1).unwrap(), Verdict::Held { .. }));
    assert!(matches!(worker.claim_id(2).unwrap(), Verdict::Waiting { .. }));
    assert!(store.detached("third").unwrap().claim("mail").unwrap().is_none());
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_arrives() {
    let Some(part) = part("role_arrives") else { return };
    arrive(part.path());
    part.say("nothing for me");
}

// Fairness: SQLite's own back-off gave one thread of four 1 of 12,000 turns.

const ENOUGH: i64 = 400;

/// When the first has had its turns, nobody has had next to none.
fn nobody_starved(path: &Path) {
    let turns = number(&plain(path), "SELECT count(*) FROM (SELECT 1 FROM relet_messages GROUP BY payload)");
    assert_eq!(turns, 4, "one had no turn at all");
    let fewest = "SELECT min(n) FROM (SELECT count(*) AS n FROM relet_messages WHERE id <= (
                    SELECT min(last) FROM (SELECT max(id) AS last FROM relet_messages GROUP BY payload))
                  GROUP BY payload)";
    let fewest = number(&plain(path), fewest);
    // An even share would be all of them; 1 in 20 is not a matter of luck.
    assert!(fewest >= ENOUGH / 20, "one had {fewest} turns while another had {ENOUGH}");
}

#[test]
fn threads_on_stores_of_their_own_all_get_their_turns() {
    let dir = Dir::new("fair");
    let path = dir.join("store.db");
    open(&path);
    let barrier = Barrier::new(4);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (path, barrier) = (&path, &barrier);
            scope.spawn(move || {
                let store = Store::options().reserve(0).open(path).unwrap();
                barrier.wait();
                for _ in 0..ENOUGH {
                    store.queue("mail").enqueue(format!("{n}")).unwrap();
                }
            });
        }
    });
    nobody_starved(&path);
}

#[test]
fn processes_all_get_their_turns() {
    let dir = Dir::new("fair");
    let path = dir.join("store.db");
    open(&path);
    let mut children: Vec<_> =
        (0..4).map(|n| Child::start("role_takes_its_turns", &[arg(&path), &n.to_string()])).collect();
    go(&mut children);
    children.into_iter().for_each(|child| drop(child.finish()));
    nobody_starved(&path);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_takes_its_turns() {
    let Some(part) = part("role_takes_its_turns") else { return };
    let store = Store::options().reserve(0).open(part.path()).unwrap();
    ready(&part);
    for _ in 0..ENOUGH {
        store.queue("mail").enqueue(part.args[1].as_str()).unwrap();
    }
}

// Kill -9.

#[test]
fn what_was_acknowledged_before_a_kill_is_there_after_it() {
    let dir = Dir::new("kill");
    let path = dir.join("store.db");
    let mut expected = BTreeMap::new();
    for round in 0..5 {
        let mut child = Child::start("role_enqueues_without_end", &[arg(&path), &round.to_string()]);
        let mut acknowledged = Vec::new();
        // Killed at another moment each time, in the middle of whatever it does.
        (0..20 + 37 * round).for_each(|_| acknowledged.push(child.hear().unwrap()));
        child.kill();
        acknowledged.extend(std::iter::from_fn(|| child.hear()));
        for line in acknowledged {
            let (id, payload) = line.split_once(' ').unwrap();
            expected.insert(id.parse::<i64>().unwrap(), payload.to_owned());
        }
        let store = open(&path);
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
        for (id, payload) in &expected {
            let message = store.show(*id).unwrap().unwrap_or_else(|| panic!("message {id} is lost"));
            assert_eq!(message.payload.unwrap(), payload.as_bytes());
        }
        // A batch is there as a whole.
        let conn = plain(&path);
        let halves = "SELECT count(*) FROM (SELECT 1 FROM relet_messages WHERE payload LIKE 'batch %'
                       GROUP BY payload HAVING count(*) <> 10)";
        assert_eq!(number(&conn, halves), 0);
    }
    assert!(expected.len() > 400);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_enqueues_without_end() {
    let Some(part) = part("role_enqueues_without_end") else { return };
    let store = Store::options().reserve(0).open(part.path()).unwrap();
    let mail = store.queue("mail");
    let line = |id: MessageId, payload: &str| part.say(format!("{id} {payload}"));
    for n in 0.. {
        let payload = format!("one {} {n}", part.args[1]);
        line(mail.enqueue(payload.as_str()).unwrap().id(), &payload);
        let payload = format!("batch {} {n}", part.args[1]);
        let batch = mail.enqueue_all(vec![payload.as_str(); 10]).unwrap();
        batch.iter().for_each(|enqueued| line(enqueued.id(), &payload));
    }
}
