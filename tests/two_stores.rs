//! Two stores on one file are one store: in one process, in two, and where one of the processes hangs.
#![cfg(all(unix, feature = "testing"))]

mod support;

use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

use relet::{Claim, Clock, Durability, Error, GateLimits, Message, Settled, Status, Store, Worker, Workers};
use support::{Child, Dir, part, plain, rows};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
/// For what comes at once; a failure ends after it.
const LIMIT: Duration = Duration::from_secs(30);

fn open(path: &Path, clock: Clock) -> Store {
    let options = Store::options().durability(Durability::Normal).reserve(0).busy_wait(LIMIT).retention(HOUR);
    options.lease(DAY).clock(clock).open(path).unwrap()
}

fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn sound(store: &Store) {
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// What one store does, the other sees at its very next call: `there` is told in words, so that it may be anywhere.
fn are_one(here: &Store, clock: &Clock, mut there: impl FnMut(&str) -> String) {
    let calls = here.queue("calls");
    let worker = here.worker("here").unwrap();
    let claim = || worker.claim("calls").unwrap();
    let told = |claim: &Option<Claim>| claim.as_ref().map_or("nothing".to_owned(), |claim| claim.id().to_string());

    // A claim is one store's alone.
    calls.enqueue_all(["1", "2", "3"]).unwrap();
    let first = claim().unwrap();
    assert_eq!((first.id().get(), there("claim")), (1, "2".into()));
    assert_eq!((told(&claim()), there("claim")), ("3".into(), "nothing".into()));
    assert_eq!(there("settle 1.1"), "done");
    assert_eq!(first.ack().unwrap(), Settled::Before(Status::Done));

    // A pause is seen, and its end.
    calls.enqueue_all(["4", "5"]).unwrap();
    assert_eq!(there("pause"), "paused");
    assert_eq!((told(&claim()), there("claim")), ("nothing".into(), "nothing".into()));
    calls.resume().unwrap();
    assert_eq!((there("claim"), told(&claim())), ("4".into(), "5".into()));

    // A gate's slots are counted together, whoever has set them.
    here.gate("api").limit(GateLimits::new().concurrency(2)).unwrap();
    calls.enqueue_all((6..=9).map(|n| Message::new(n.to_string()).gate("api"))).unwrap();
    assert_eq!((there("claim"), told(&claim())), ("6".into(), "7".into()));
    assert_eq!((there("claim"), told(&claim())), ("nothing".into(), "nothing".into()));
    assert_eq!(there("settle 6.1"), "done");
    let eighth = claim().unwrap();
    assert_eq!((eighth.id().get(), there("claim")), (8, "nothing".into()));

    // Closed by one that was told "not now", it is closed for all, until its time.
    eighth.limited(HOUR).unwrap();
    assert_eq!(here.ack("7.1".parse().unwrap()).unwrap(), Settled::Now(Status::Done));
    assert_eq!((told(&claim()), there("claim")), ("nothing".into(), "nothing".into()));
    clock.advance(HOUR);
    assert_eq!(there("advance 3600"), "later");
    assert_eq!((there("claim"), told(&claim())), ("8".into(), "nothing".into()));
    assert_eq!(there("settle 8.2"), "done");
    assert_eq!((told(&claim()), there("claim")), ("9".into(), "nothing".into()));
    sound(here);
}

/// The other side of `are_one`.
fn obeys(store: &Store, worker: &Worker, clock: &Clock, line: &str) -> String {
    let (what, more) = line.split_once(' ').unwrap_or((line, ""));
    match what {
        "claim" => worker.claim("calls").unwrap().map_or("nothing".into(), |claim| claim.id().to_string()),
        "settle" => match store.ack(more.parse().unwrap()).unwrap() {
            Settled::Now(status) => status.to_string(),
            other => format!("{other:?}"),
        },
        "pause" => {
            store.queue("calls").pause().unwrap();
            "paused".into()
        }
        "advance" => {
            clock.advance(Duration::from_secs(more.parse().unwrap()));
            "later".into()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_stores_of_one_process_share_claims_gates_and_pauses() {
    let dir = Dir::new("one-process");
    let path = dir.join("store.db");
    let (here, there) = (Clock::manual(), Clock::manual());
    let (one, two) = (open(&path, here.clone()), open(&path, there.clone()));
    let worker = two.worker("there").unwrap();
    are_one(&one, &here, |line| obeys(&two, &worker, &there, line));
}

#[test]
fn two_processes_share_claims_gates_and_pauses() {
    let dir = Dir::new("two-processes");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let store = open(&path, clock.clone());
    let mut child = Child::start("role_obeys", &[arg(&path)]);
    child.expect("ready");
    are_one(&store, &clock, |line| {
        child.say(line);
        child.hear().unwrap()
    });
    child.finish();
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_obeys() {
    let Some(part) = part("role_obeys") else { return };
    let clock = Clock::manual();
    let store = open(part.path(), clock.clone());
    let worker = store.worker("there").unwrap();
    part.say("ready");
    while let Some(line) = part.hear() {
        part.say(obeys(&store, &worker, &clock, &line));
    }
}

// A process that hangs.

/// Its workers extend no lease while it is stopped. What they come with afterwards is too late.
#[test]
fn a_stopped_pool_loses_its_message_when_the_lease_ends_and_changes_nothing_afterwards() {
    let dir = Dir::new("hung");
    let path = dir.join("store.db");
    let store = open(&path, Clock::system());
    plain(&path).execute_batch("CREATE TABLE effects (by TEXT)").unwrap();
    let id = store.queue("calls").enqueue("x").unwrap().id();
    let mut child = Child::start("role_hangs", &[arg(&path)]);
    child.expect("begun");
    child.stop();

    let (begun, taken_over) = channel();
    let (finish, may_finish) = channel::<()>();
    let (done, finished) = channel();
    let (begun, may_finish) = (Mutex::new(begun), Mutex::new(may_finish));
    let workers = Workers::builder()
        .label("well")
        .queue("calls", move |claim: &Claim| {
            begun.lock().unwrap().send((claim.attempts(), claim.crashes())).unwrap();
            may_finish.lock().unwrap().recv().unwrap();
        })
        .on_finish(move |_, finished| done.send(finished.settled.clone()).unwrap())
        .start(&store)
        .unwrap();
    assert_eq!(taken_over.recv_timeout(LIMIT).unwrap(), (2, 1));

    // While the second is at work, and after it: the first one's effect and its ack are refused.
    let all = || rows(&plain(&path), "SELECT * FROM relet_messages");
    let before = all();
    child.say("go on");
    child.go_on();
    child.expect("guard: stale");
    child.expect("settled: stale");
    assert_eq!(all(), before);
    finish.send(()).unwrap();
    assert!(matches!(finished.recv_timeout(LIMIT).unwrap(), Ok(Settled::Now(Status::Done))));
    child.finish();
    let row = store.show(id).unwrap().unwrap();
    assert_eq!((row.status, row.attempts, row.crashes), (Status::Done, 2, 1));
    assert_eq!(rows(&plain(&path), "SELECT * FROM effects"), Vec::<String>::new());
    assert!(workers.stop(LIMIT).interrupted.is_empty());
    sound(&store);
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_hangs() {
    let Some(part) = part("role_hangs") else { return };
    let path = part.path().to_owned();
    let store = open(&path, Clock::system());
    let (word, heard) = channel();
    let heard = Mutex::new(heard);
    let (said, says) = channel();
    let settled = said.clone();
    let how = |error: &Error| match error {
        Error::Stale { .. } => "stale".to_owned(),
        other => other.to_string(),
    };
    let workers = Workers::builder()
        .label("hung")
        .lease(Duration::from_millis(300))
        .queue("calls", move |claim: &Claim| {
            said.send("begun".to_owned()).unwrap();
            heard.lock().unwrap().recv().unwrap();
            let mut app = plain(&path);
            let tx = app.transaction_with_behavior(relet::rusqlite::TransactionBehavior::Immediate).unwrap();
            let guard = claim.guard(&tx);
            if guard.is_ok() {
                tx.execute("INSERT INTO effects VALUES ('hung')", []).unwrap();
                tx.commit().unwrap();
            }
            said.send(format!("guard: {}", guard.map_or_else(|error| how(&error), |()| "passed".into()))).unwrap();
        })
        .on_finish(move |_, finished| {
            let told = finished.settled.as_ref().map_or_else(how, |settled| format!("{settled:?}"));
            settled.send(format!("settled: {told}")).unwrap();
        })
        .start(&store)
        .unwrap();
    part.say(says.recv_timeout(LIMIT).unwrap());
    part.hear();
    word.send(()).unwrap();
    for _ in 0..2 {
        part.say(says.recv_timeout(LIMIT).unwrap());
    }
    part.hear();
    assert!(workers.stop(LIMIT).interrupted.is_empty());
}
