//! A label belongs to one living worker, and its death is seen at once: what a dead worker held is the next claim's,
//! what a living one holds is nobody else's, however long it is silent, until its lease ends.
#![cfg(feature = "testing")]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use relet::rusqlite::Connection;
use relet::{Claim, Clock, DEFERRAL_GRACE, Durability, Error, How, Message, Status, Store, Verdict, Wait, Worker};
use support::{Child, Dir, beside, chmod, names, number, part, plain, rows, text, timed};

const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn open_at(path: &Path, clock: Clock) -> Store {
    let options = Store::options().durability(Durability::Normal).reserve(0).busy_wait(Duration::from_secs(20));
    options.lease(HOUR).clock(clock).open(path).unwrap()
}

fn open(path: &Path) -> Store {
    open_at(path, Clock::system())
}

fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The folder in which the workers hold their locks.
fn locks(path: &Path) -> PathBuf {
    beside(path, "-relet-workers")
}

fn files(path: &Path) -> usize {
    let Ok(files) = std::fs::read_dir(locks(path)) else { return 0 };
    let is_the_stores = |name: &str| name.starts_with("open-");
    files.filter(|file| !is_the_stores(file.as_ref().unwrap().file_name().to_str().unwrap())).count()
}

fn sound(store: &Store) {
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

fn next(worker: &Worker) -> Claim {
    worker.claim("mail").unwrap().expect("something can be claimed")
}

/// Nothing is to be had: what is asked for is held by this worker.
fn held_by(worker: &Worker, id: i64, label: &str) {
    assert!(worker.claim("mail").unwrap().is_none());
    let verdict = worker.claim_id(id).unwrap();
    assert!(matches!(&verdict, Verdict::Held { by, .. } if by == label), "{verdict:?}");
}

/// A label is refused, and the process that has it is named, with the start of its worker.
fn is_taken(store: &Store, label: &str, by: u32) {
    let since =
        number(&plain(store.path().unwrap()), &format!("SELECT started_at FROM relet_workers WHERE label = '{label}'"));
    match store.worker(label) {
        Err(Error::LabelTaken { label: told, pid, started_at }) => {
            assert_eq!((told.as_str(), pid, started_at), (label, by, since));
        }
        other => panic!("{other:?}"),
    }
}

/// A worker in a process of its own, which does what it is told. Its clock stands still where it is "manual"; leases
/// run on the same time in all processes with such a clock, until one of them is moved.
fn worker(path: &Path, label: &str, clock: &str) -> Child {
    let mut child = Child::start("role_works", &[arg(path), clock]);
    asks(&mut child, &format!("worker {label}"), "started");
    child
}

fn asks(child: &mut Child, what: &str, answer: &str) {
    child.say(what);
    child.expect(answer);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_works() {
    let Some(part) = part("role_works") else { return };
    let clock = if part.args[1] == "manual" { Clock::manual() } else { Clock::system() };
    let store = open_at(part.path(), clock);
    let mut worker = None;
    let mut claims: Vec<Claim> = Vec::new();
    while let Some(line) = part.hear() {
        let (what, more) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match what {
            "worker" => store.worker(more).map(|started| {
                worker = Some(started);
                "started".to_owned()
            }),
            "detached" => store.detached(more).map(|started| {
                worker = Some(started);
                "started".to_owned()
            }),
            "lease" => worker.as_ref().unwrap().lease(Duration::from_millis(more.parse().unwrap())).map(|restricted| {
                worker = Some(restricted);
                "set".to_owned()
            }),
            "claim" => worker.as_ref().unwrap().claim("mail").map(|claim| match claim {
                Some(claim) => {
                    let line = format!("{} {:?} {}", claim.id(), claim.how(), claim.crashes());
                    claims.push(claim);
                    line
                }
                None => "nothing".to_owned(),
            }),
            "defer" => claims
                .last()
                .unwrap()
                .defer(Duration::from_millis(more.parse().unwrap()))
                .map(|_| "deferred".to_owned()),
            "ack" => claims[0].ack().map(|_| "acked".to_owned()),
            "exit" => std::process::exit(0),
            other => panic!("{other:?}"),
        };
        part.say(answer.unwrap_or_else(|error| match error {
            Error::LabelTaken { label, pid, started_at } => format!("{label} is taken by {pid} since {started_at}"),
            Error::Superseded { label } => format!("{label} is over"),
            Error::Stale { .. } => "stale".to_owned(),
            other => panic!("{other}"),
        }));
    }
}

// Death.

/// Kill -9, or an exit without a word; whoever comes next, and however it asks. What the living hold is not touched.
#[test]
fn what_a_dead_worker_held_is_the_next_claim_s_as_one_crash() {
    for dies in ["kill", "exit"] {
        for comes in ["claim", "batch", "id", "detached"] {
            let dir = Dir::new("dead");
            let path = dir.join("store.db");
            let store = open(&path);
            let mail = store.queue("mail");
            mail.enqueue_all(["1", "2", "3", "4"]).unwrap();
            let (mut dead, mut alive) = (worker(&path, "dead", "system"), worker(&path, "alive", "system"));
            asks(&mut alive, "claim", "1 Claimed 0");
            for id in [2, 3, 4] {
                asks(&mut dead, "claim", &format!("{id} Claimed 0"));
            }
            let held = store.show(2).unwrap().unwrap();
            let other = if comes == "detached" { store.detached("other") } else { store.worker("other") }.unwrap();
            held_by(&other, 2, "dead");

            if dies == "kill" {
                dead.kill();
            } else {
                dead.say("exit");
                dead.finish();
            }
            let claims: Vec<_> = match comes {
                "batch" => other.claim_batch("mail", 9).unwrap(),
                "id" => [2, 3, 4].map(|id| other.claim_id(id).unwrap().claim().unwrap()).into(),
                _ => std::iter::from_fn(|| other.claim("mail").unwrap()).collect(),
            };
            let told: Vec<_> = claims.iter().map(|c| (c.id().get(), c.how(), c.crashes(), c.attempts())).collect();
            assert_eq!(told, [2, 3, 4].map(|id| (id, How::Claimed, 1, 2)), "{dies} {comes}");
            assert!(matches!(store.ack(held.receipt.unwrap()), Err(Error::Stale { .. })));
            held_by(&other, 1, "alive");
            asks(&mut alive, "ack", "acked");
            for claim in claims {
                claim.ack().unwrap();
            }
            assert_eq!(store.stats().unwrap().queues[0].live(), 0);
            sound(&store);
        }
    }
}

/// Also where there is so much else to do that nothing would make a claim look for it.
#[test]
fn a_death_is_seen_within_50_ms_beside_whatever_else_is_ready() {
    let dir = Dir::new("busy");
    let path = dir.join("store.db");
    let store = open(&path);
    let mail = store.queue("mail");
    let urgent = mail.enqueue(Message::new("urgent").priority(9)).unwrap().id();
    mail.enqueue_all(vec!["x"; 100]).unwrap();
    let mut child = worker(&path, "dead", "system");
    asks(&mut child, "claim", "1 Claimed 0");
    let other = store.worker("other").unwrap();
    assert_eq!(next(&other).priority(), 0);
    child.kill();
    // The span that is promised; no less has passed after it.
    std::thread::sleep(50 * MS);
    let claim = next(&other);
    assert_eq!((claim.id(), claim.crashes()), (urgent, 1));
    sound(&store);
}

/// A detached one has nothing that could tell of its death: its lease decides.
#[test]
fn what_a_detached_worker_held_is_not_judged_by_its_death() {
    let dir = Dir::new("detached");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let store = open_at(&path, clock.clone());
    store.queue("mail").enqueue("x").unwrap();
    let mut child = Child::start("role_works", &[arg(&path), "manual"]);
    asks(&mut child, "detached shell", "started");
    asks(&mut child, "claim", "1 Claimed 0");
    child.kill();
    let other = store.worker("other").unwrap();
    clock.advance(HOUR - MS);
    held_by(&other, 1, "shell");
    // Nor does a worker of its label void it: that it was never the start of a worker is known.
    held_by(&store.worker("shell").unwrap(), 1, "shell");
    clock.advance(MS);
    assert_eq!(next(&other).crashes(), 1);
    sound(&store);
}

/// The label is free, and who takes it on goes on where the dead one was: first with what it held, then with what it
/// had deferred, which is no crash; then with the rest.
#[test]
fn a_killed_label_can_be_started_again_and_finds_its_own_first() {
    let dir = Dir::new("again");
    let path = dir.join("store.db");
    let store = open(&path);
    let mail = store.queue("mail");
    mail.enqueue_all(["deferred", "held"]).unwrap();
    let mut child = worker(&path, "w", "manual");
    asks(&mut child, "claim", "1 Claimed 0");
    asks(&mut child, "defer 3600000", "deferred");
    asks(&mut child, "claim", "2 Claimed 0");
    child.kill();
    drop(store);
    // In another process than that which saw it die: first one that dies as well, then this one.
    let mut second = worker(&path, "w", "manual");
    asks(&mut second, "claim", "2 Recovered 1");
    second.kill();

    let clock = Clock::manual();
    let store = open_at(&path, clock.clone());
    store.queue("mail").enqueue(Message::new("urgent").priority(9)).unwrap();
    let worker = store.worker("w").unwrap();
    clock.advance(HOUR);
    let claims = worker.claim_batch("mail", 9).unwrap();
    let told: Vec<_> = claims.iter().map(|claim| (claim.id().get(), claim.how(), claim.crashes())).collect();
    assert_eq!(told, [(2, How::Recovered, 2), (1, How::Recovered, 0), (3, How::Claimed, 0)]);
    sound(&store);
}

/// Nothing was being worked on, so it is no crash; and nobody will come for it, so it is kept for nobody.
#[test]
fn what_a_killed_worker_had_deferred_is_anyone_s_when_it_is_due() {
    for killed in [true, false] {
        for by_id in [false, true] {
            let dir = Dir::new("deferred");
            let path = dir.join("store.db");
            let mut child = worker(&path, "w", "manual");
            let clock = Clock::manual();
            let store = open_at(&path, clock.clone());
            store.queue("mail").enqueue("x").unwrap();
            asks(&mut child, "claim", "1 Claimed 0");
            asks(&mut child, "defer 3600000", "deferred");
            if killed {
                child.kill();
            }
            let other = store.worker("other").unwrap();
            let due_at = store.show(1).unwrap().unwrap().due_at.unwrap();
            // The child's clock was made a moment earlier, and the store's time is by it.
            let ahead = clock.wall_ms() - number(&plain(&path), "SELECT enqueued_at FROM relet_messages");
            let to = |instant: i64| clock.advance(Duration::from_millis((instant + ahead - clock.wall_ms()) as u64));
            let waits = |until: i64| {
                assert!(other.claim("mail").unwrap().is_none());
                match other.claim_id(1).unwrap() {
                    Verdict::Waiting { what: Wait::Deferred { by }, until: Some(told) } => {
                        assert_eq!((by.as_str(), told), ("w", until));
                    }
                    verdict => panic!("{verdict:?}"),
                }
            };
            to(due_at - 1);
            waits(due_at);
            to(due_at);
            if !killed {
                // The living one has a while to come for it.
                let kept = due_at + DEFERRAL_GRACE.as_millis() as i64;
                waits(kept);
                to(kept - 1);
                waits(kept);
                to(kept);
            }
            let claim = if by_id { other.claim_id(1).unwrap().claim().unwrap() } else { next(&other) };
            assert_eq!((claim.how(), claim.crashes(), claim.attempts()), (How::Claimed, 0, 1));
            assert_eq!(claim.deferrals(), 1);
            sound(&store);
        }
    }
}

// Silence.

#[test]
fn a_stopped_owner_keeps_its_claim_until_its_lease_ends_and_then_comes_too_late() {
    let dir = Dir::new("stopped");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let store = open_at(&path, clock.clone());
    store.queue("mail").enqueue_all(["1", "2"]).unwrap();
    let mut child = worker(&path, "hung", "manual");
    asks(&mut child, "claim", "1 Claimed 0");
    let mine = store.worker("other").unwrap();
    assert_eq!(next(&mine).id().get(), 2);
    child.stop();
    child.say("ack");
    clock.advance(HOUR - MS);
    held_by(&mine, 1, "hung");
    is_taken(&store, "hung", child.pid());
    assert_eq!(store.stuck(Duration::ZERO).unwrap(), []);
    clock.advance(MS);
    let claim = mine.claim_id(1).unwrap().claim().unwrap();
    assert_eq!((claim.how(), claim.crashes(), claim.attempts()), (How::Claimed, 1, 2));
    let before = rows(&plain(&path), "SELECT * FROM relet_messages");
    child.go_on();
    child.expect("stale");
    assert_eq!(rows(&plain(&path), "SELECT * FROM relet_messages"), before);
    // It lives, so its label is its own, and it may go on.
    is_taken(&store, "hung", child.pid());
    store.queue("mail").enqueue("3").unwrap();
    asks(&mut child, "claim", "3 Claimed 0");
    claim.ack().unwrap();
    sound(&store);
}

/// The same on the machine's own clock.
#[test]
fn a_stopped_owner_s_lease_is_as_long_as_it_says() {
    let dir = Dir::new("stopped");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("x").unwrap();
    let mut child = worker(&path, "hung", "system");
    asks(&mut child, "lease 300", "set");
    let other = store.worker("other").unwrap();
    let (claim, took) = timed(|| {
        asks(&mut child, "claim", "1 Claimed 0");
        child.stop();
        loop {
            match other.claim("mail").unwrap() {
                Some(claim) => return claim,
                None => std::thread::sleep(5 * MS),
            }
        }
    });
    assert!(took >= 300 * MS, "{took:?}");
    assert_eq!((claim.how(), claim.crashes()), (How::Claimed, 1));
    child.say("ack");
    child.go_on();
    child.expect("stale");
    claim.ack().unwrap();
}

// One label, one worker.

#[test]
fn a_second_worker_of_a_live_label_is_refused_in_this_and_in_another_process() {
    let dir = Dir::new("taken");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all(["1", "2"]).unwrap();
    let worker = store.worker("w").unwrap();
    let claim = next(&worker);
    let conn = plain(&path);
    let all = |conn: &Connection| {
        let mut all = rows(conn, "SELECT * FROM relet_messages");
        all.extend(rows(conn, "SELECT * FROM relet_workers"));
        all
    };
    let (before, me) = (all(&conn), std::process::id());
    let since = number(&conn, "SELECT started_at FROM relet_workers WHERE label = 'w'");
    let mut child = Child::start("role_works", &[arg(&path), "system"]);
    let refused = |child: &mut Child| {
        is_taken(&store, "w", me);
        is_taken(&open(&path), "w", me);
        asks(child, "worker w", &format!("w is taken by {me} since {since}"));
        assert_eq!((all(&conn), files(&path)), (before.clone(), 1));
    };
    refused(&mut child);
    let text = store.worker("w").unwrap_err().to_string();
    assert!(text.contains("\"w\"") && text.contains(&me.to_string()) && text.contains(&since.to_string()), "{text}");

    // All handles and claims of the start are it, to the last one.
    let clone = worker.clone().lease(SECOND).unwrap();
    drop(worker);
    refused(&mut child);
    drop(clone);
    refused(&mut child);
    claim.ack().unwrap();
    let before = all(&conn);
    is_taken(&store, "w", me);
    assert_eq!(all(&conn), before);
    drop(claim);
    asks(&mut child, "worker w", "started");
    asks(&mut child, "claim", "2 Claimed 0");
    is_taken(&store, "w", child.pid());
    // Case and length are the label's own business.
    drop(store.worker("W").unwrap());
    sound(&store);
}

/// Of many who start a dead worker's label at one moment, one has it; the others are told who.
#[test]
fn one_of_many_starts_at_one_moment_has_the_label() {
    let dir = Dir::new("race");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("x").unwrap();
    let mut dead = worker(&path, "w", "system");
    asks(&mut dead, "claim", "1 Claimed 0");
    let mut children: Vec<_> = (0..4).map(|_| Child::start("role_works", &[arg(&path), "system"])).collect();
    for child in &mut children {
        // Each has its store open.
        asks(child, "detached x", "started");
    }
    dead.kill();
    children.iter_mut().for_each(|child| child.say("worker w"));
    let answers: Vec<_> = children.iter_mut().map(|child| child.hear().unwrap()).collect();
    let winners: Vec<_> = (0..4).filter(|at| answers[*at] == "started").collect();
    assert_eq!(winners.len(), 1, "{answers:?}");
    let winner = &mut children[winners[0]];
    let since = number(&plain(&path), "SELECT started_at FROM relet_workers WHERE label = 'w'");
    let told = format!("w is taken by {} since {since}", winner.pid());
    assert_eq!(answers.iter().filter(|answer| **answer == told).count(), 3, "{answers:?}");
    asks(winner, "claim", "1 Recovered 1");
}

/// The label is free at once; what it held keeps its lease, since somebody may have its receipt, until its label is
/// started again.
#[test]
fn a_worker_that_ends_in_good_order_leaves_its_label_and_keeps_its_lease() {
    for restarted in [false, true] {
        let dir = Dir::new("order");
        let path = dir.join("store.db");
        let clock = Clock::manual();
        let store = open_at(&path, clock.clone());
        store.queue("mail").enqueue("x").unwrap();
        let mut child = worker(&path, "w", "manual");
        asks(&mut child, "claim", "1 Claimed 0");
        child.finish();
        assert_eq!((files(&path), number(&plain(&path), "SELECT count(*) FROM relet_workers")), (0, 0));
        let receipt = store.show(1).unwrap().unwrap().receipt.unwrap();
        let other = store.worker("other").unwrap();
        clock.advance(HOUR - MS);
        held_by(&other, 1, "w");
        let claim = if restarted {
            next(&store.worker("w").unwrap())
        } else {
            clock.advance(MS);
            next(&other)
        };
        let how = if restarted { How::Recovered } else { How::Claimed };
        assert_eq!((claim.how(), claim.crashes()), (how, 1));
        assert!(matches!(store.ack(receipt), Err(Error::Stale { .. })));
        sound(&store);
    }
}

// What proves nothing.

/// The kernel gives a process id to another process when the first is gone, and containers give one to several.
#[test]
fn nothing_is_judged_by_a_process_id() {
    let dir = Dir::new("pid");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("x").unwrap();
    let conn = plain(&path);
    let claims_to_be = |pid: u32| conn.execute("UPDATE relet_workers SET pid = ?1 WHERE label = 'w'", [pid]).unwrap();
    let ended = Child::start("role_works", &[arg(&path), "system"]);
    let gone = ended.pid();
    ended.finish();
    let mut child = worker(&path, "w", "system");
    asks(&mut child, "claim", "1 Claimed 0");
    let other = store.worker("other").unwrap();
    for pid in [gone, 0, u32::MAX, std::process::id()] {
        assert_eq!(claims_to_be(pid), 1);
        held_by(&other, 1, "w");
        is_taken(&store, "w", pid);
    }
    asks(&mut child, "claim", "nothing");
    for pid in [std::process::id(), 1] {
        child.kill();
        assert_eq!(claims_to_be(pid), 1);
        assert_eq!(next(&other).crashes(), if pid == 1 { 2 } else { 1 });
        // Once more.
        other.claim_id(1).unwrap().claim().unwrap().release().unwrap();
        child = worker(&path, "w", "system");
        child.say("claim");
        assert!(child.hear().unwrap().starts_with("1 Claimed"));
    }
    sound(&store);
}

/// Where the lock file is gone, nobody knows whether its owner lives: the lease decides, dead or alive.
#[test]
fn a_lock_file_that_is_gone_proves_nothing() {
    for folder in [false, true] {
        for dies in [false, true] {
            let dir = Dir::new("vanished");
            let path = dir.join("store.db");
            let clock = Clock::manual();
            let store = open_at(&path, clock.clone());
            store.queue("mail").enqueue("x").unwrap();
            let mut child = worker(&path, "w", "manual");
            asks(&mut child, "claim", "1 Claimed 0");
            vanish(&path, folder);
            let other = store.worker("other").unwrap();
            held_by(&other, 1, "w");
            if dies {
                child.kill();
            }
            clock.advance(HOUR - MS);
            held_by(&other, 1, "w");
            clock.advance(MS);
            assert_eq!((next(&other).crashes(), store.show(1).unwrap().unwrap().attempts), (1, 2));
            if !dies {
                asks(&mut child, "ack", "stale");
            }
            sound(&store);
        }
    }
}

fn vanish(path: &Path, folder: bool) {
    if folder {
        return std::fs::remove_dir_all(locks(path)).unwrap();
    }
    for name in names(&locks(path)) {
        std::fs::remove_file(locks(path).join(name)).unwrap();
    }
}

/// Then its label can be started beside it, and it is told so; its end is not that of the new one.
#[test]
fn an_owner_whose_lock_is_gone_is_told_when_its_label_was_started_again() {
    let dir = Dir::new("superseded");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all(["1", "2"]).unwrap();
    let mut child = worker(&path, "w", "system");
    asks(&mut child, "claim", "1 Claimed 0");
    vanish(&path, false);
    let new = store.worker("w").unwrap();
    asks(&mut child, "claim", "w is over");
    // It may well be at work: what it holds is its own until its lease ends.
    assert!(matches!(new.claim_id(1).unwrap(), Verdict::Held { .. }));
    assert_eq!((next(&new).id().get(), new.claim("mail").unwrap().map(|claim| claim.id())), (2, None));
    asks(&mut child, "ack", "acked");
    child.finish();
    is_taken(&store, "w", std::process::id());
    assert_eq!(files(&path), 1);
    sound(&store);
}

/// A file that this user may not open is there all the same: its owner may live.
#[test]
fn a_lock_that_may_not_be_looked_at_is_not_taken_for_gone() {
    let dir = Dir::new("foreign");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue("x").unwrap();
    let worker = store.worker("w").unwrap();
    let claim = next(&worker);
    // A store that several users share.
    chmod(dir.path(), 0o777);
    chmod(&locks(&path), 0o777);
    for name in names(&locks(&path)).into_iter().filter(|name| name.to_str().unwrap().starts_with("open-")) {
        chmod(&locks(&path).join(name), 0o666);
    }
    for suffix in ["", "-wal", "-shm"] {
        chmod(&beside(&path, suffix), 0o666);
    }
    let since = number(&plain(&path), "SELECT started_at FROM relet_workers WHERE label = 'w'");
    let mut child = Child::start_as_nobody("role_works", &[arg(&path), "system"], &dir);
    asks(&mut child, "worker w", &format!("w is taken by {} since {since}", std::process::id()));
    asks(&mut child, "worker other", "started");
    asks(&mut child, "claim", "nothing");
    child.finish();
    assert!(worker.claim("mail").unwrap().is_none());
    claim.ack().unwrap();
    sound(&store);
}

/// A worker that ends while somebody keeps the store locked cannot be struck off then. Its end is not a death for that.
#[test]
fn a_worker_that_ends_while_the_store_is_locked_is_not_taken_for_dead() {
    let dir = Dir::new("locked");
    let path = dir.join("store.db");
    let store = relet::Store::options().busy_wait(Duration::from_millis(20)).open(&path).unwrap();
    let ids = store.queue("mail").enqueue_all(["x", "y"]).unwrap();
    let worker = store.worker("w").unwrap();
    let receipt = next(&worker).receipt();
    let conn = plain(&path);
    conn.execute_batch("BEGIN IMMEDIATE").unwrap();
    drop(worker);
    conn.execute_batch("ROLLBACK").unwrap();
    // Another process looks for the dead.
    let elsewhere = open(&path);
    let other = elsewhere.worker("other").unwrap();
    assert_eq!(next(&other).id(), ids[1].id());
    assert!(other.claim("mail").unwrap().is_none(), "what it held keeps its lease");
    // Here its label is free, and a start of it finds what it held.
    let again = store.worker("w").unwrap();
    let claim = next(&again);
    assert_eq!((claim.id(), claim.how()), (ids[0].id(), How::Recovered));
    assert!(store.ack(receipt).is_err());
    claim.ack().unwrap();
    // The lock of the first start is gone with its row.
    again.claim("mail").unwrap();
    assert_eq!(files(&path), 2);
    sound(&store);
}

// Side files.

#[test]
fn the_files_of_killed_workers_do_not_pile_up() {
    let dir = Dir::new("files");
    let path = dir.join("store.db");
    let store = open(&path);
    let conn = plain(&path);
    store.queue("mail").enqueue("x").unwrap();
    let registered = || number(&conn, "SELECT count(*) FROM relet_workers");
    // One after the other, each under a label of its own.
    for n in 0..20 {
        let mut child = worker(&path, &format!("w-{n}"), "system");
        child.say("claim");
        child.hear().unwrap();
        child.kill();
        assert!(files(&path) <= 3 && registered() <= 2, "{} files, {} workers", files(&path), registered());
    }
    // And many at once.
    let mut crowd: Vec<_> = (0..8).map(|n| worker(&path, &format!("w-{n}"), "system")).collect();
    assert!(registered() >= 8);
    crowd.iter_mut().for_each(Child::kill);
    store.worker("claims").unwrap().claim("mail").unwrap();
    drop(store.worker("comes").unwrap());
    assert_eq!((files(&path), registered()), (0, 0));
    sound(&store);
}

/// A program that is killed again and again before it claims anything, under a new label each time; nobody else claims.
#[test]
fn the_files_of_workers_that_never_claimed_do_not_pile_up() {
    let dir = Dir::new("files");
    let path = dir.join("store.db");
    let conn = {
        open(&path);
        plain(&path)
    };
    for n in 0..12 {
        let mut child = worker(&path, &format!("w-{n}"), "system");
        child.kill();
    }
    let registered = number(&conn, "SELECT count(*) FROM relet_workers");
    assert!(files(&path) <= 3 && registered <= 3, "{} files, {registered} workers", files(&path));
}

/// Those of the same label, too; and what ends in good order leaves nothing.
#[test]
fn a_folder_that_nobody_uses_any_more_is_all_but_empty() {
    let dir = Dir::new("files");
    let path = dir.join("store.db");
    let store = open(&path);
    let workers: Vec<_> = (0..30).map(|_| store.worker_unnamed().unwrap()).collect();
    assert_eq!(files(&path), 30);
    drop(workers);
    assert_eq!(files(&path), 0);
    for _ in 0..8 {
        worker(&path, "w", "system").kill();
        assert!(files(&path) <= 2);
    }
    drop(store);
    assert!(files(&path) <= 2);
    // Nothing else lies beside the store than what is known to.
    let known = ["store.db", "store.db-relet-workers", "store.db-shm", "store.db-wal"];
    assert!(names(dir.path()).iter().all(|name| known.iter().any(|known| name == known)), "{:?}", names(dir.path()));
}

// One process, two stores.

/// A look at one's own lock does not let go of it, and no handle knows more than a stranger does.
#[test]
fn two_stores_on_one_file_are_as_two_processes() {
    let dir = Dir::new("two");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let (one, two) = (open_at(&path, clock.clone()), open_at(&path, clock.clone()));
    one.queue("mail").enqueue_all(["held", "deferred"]).unwrap();
    let worker = one.worker("w").unwrap();
    let claim = next(&worker);
    next(&worker).defer(SECOND).unwrap();
    let other = two.worker("other").unwrap();
    let mut child = Child::start("role_works", &[arg(&path), "manual"]);
    let since = number(&plain(&path), "SELECT started_at FROM relet_workers WHERE label = 'w'");
    let me = std::process::id();
    for _ in 0..2 {
        is_taken(&two, "w", me);
        held_by(&other, 1, "w");
        asks(&mut child, "worker w", &format!("w is taken by {me} since {since}"));
    }
    // The one that was refused has taken nothing with it, nor does the end of a store that is not the worker's.
    drop((other, two));
    let two = open_at(&path, clock.clone());
    let other = two.worker("other").unwrap();
    asks(&mut child, "worker w", &format!("w is taken by {me} since {since}"));
    clock.advance(SECOND);
    let verdict = other.claim_id(2).unwrap();
    assert!(matches!(verdict, Verdict::Waiting { what: Wait::Deferred { .. }, .. }), "{verdict:?}");

    // The worker lives as long as its handles, not as long as its store's.
    drop(one);
    is_taken(&two, "w", me);
    let receipt = claim.receipt();
    drop((claim, worker));
    let deferred = next(&other);
    assert_eq!((deferred.id().get(), deferred.how(), deferred.crashes()), (2, How::Claimed, 0));
    held_by(&other, 1, "w");
    let recovered = next(&two.worker("w").unwrap());
    assert_eq!((recovered.id(), recovered.how(), recovered.crashes()), (receipt.id(), How::Recovered, 1));
    assert!(matches!(two.ack(receipt), Err(Error::Stale { .. })));
    assert_eq!(text(&plain(&path), "SELECT group_concat(label) FROM relet_workers"), "other,w");
    sound(&two);
}

// In memory.

#[test]
fn in_memory_a_label_belongs_to_one_worker_as_well() {
    let clock = Clock::manual();
    let open = || Store::options().clock(clock.clone()).lease(HOUR).open_in_memory().unwrap();
    let (store, another) = (open(), open());
    store.queue("mail").enqueue_all(["held", "deferred"]).unwrap();
    let worker = store.worker("w").unwrap();
    let started = clock.wall_ms();
    clock.advance(SECOND);
    let claim = next(&worker);
    next(&worker).defer(SECOND).unwrap();
    let other = store.worker("other").unwrap();
    let is_taken = || match store.clone().worker("w") {
        Err(Error::LabelTaken { label, pid, started_at }) => {
            assert_eq!((label.as_str(), pid, started_at), ("w", std::process::id(), started));
        }
        other => panic!("{other:?}"),
    };
    is_taken();
    drop(another.worker("w").unwrap());
    drop(worker);
    is_taken();
    // Its thread's end is not its own.
    std::thread::scope(|scope| scope.spawn(is_taken).join().unwrap());
    clock.advance(SECOND);
    held_by(&other, 1, "w");
    drop(claim);
    held_by_the_lease_alone(&store, &other);
    let recovered = next(&store.worker("w").unwrap());
    assert_eq!((recovered.id().get(), recovered.how(), recovered.crashes()), (1, How::Recovered, 1));
    recovered.ack().unwrap();
    assert_eq!(store.show(2).unwrap().unwrap().status, Status::Processing);
    sound(&store);
}

/// What was deferred is anyone's, now that it is due; what is held is not.
fn held_by_the_lease_alone(store: &Store, other: &Worker) {
    let deferred = next(other);
    assert_eq!((deferred.id().get(), deferred.how(), deferred.crashes()), (2, How::Claimed, 0));
    held_by(other, 1, "w");
    assert_eq!(store.show(1).unwrap().unwrap().worker.as_deref(), Some("w"));
}
