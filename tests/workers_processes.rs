//! A pool's process is killed, stopped in its tracks, or leaves an orphan behind: what it was working on has crashed, once,
//! and nothing else has; and what runs on keeps what it works on.
#![cfg(all(feature = "testing", unix))]

mod support;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use relet::{CancelReason, Claim, Clock, Durability, Error, Filter, MessageId, Status, Store, Verdict, Workers};
use support::{Child, Dir, LONG, eventually, hear, part, plain};

const HOUR: Duration = Duration::from_secs(3600);
const MS: Duration = Duration::from_millis(1);
fn open_at(path: &Path, clock: Clock) -> Store {
    let options = Store::options().durability(Durability::Normal).reserve(0).busy_wait(LONG);
    options.lease(HOUR).clock(clock).open(path).unwrap()
}

fn open(path: &Path) -> Store {
    open_at(path, Clock::system())
}

fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn stay_until_killed() {
    loop {
        thread::park();
    }
}

fn sound(store: &Store) {
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// A pool whose handlers say which message they have, and never return.
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_never_ends() {
    let Some(part) = part("role_never_ends") else { return };
    let store = open(part.path());
    let (begun, begins) = channel();
    let handler = move |claim: &Claim| {
        begun.send(claim.id()).unwrap();
        stay_until_killed();
    };
    let pool = Workers::builder().label("pool").concurrency(part.args[1].parse().unwrap());
    let _workers = pool.queue("mail", handler).start(&store).unwrap();
    for id in begins {
        part.say(id);
    }
}

/// What runs in a pool of a process that is killed: so many messages.
fn killed_at_work(path: &Path, handlers: usize) -> HashSet<MessageId> {
    let mut child = Child::start("role_never_ends", &[arg(path), &handlers.to_string()]);
    let running = (0..handlers).map(|_| child.hear().unwrap().parse::<i64>().unwrap().into()).collect();
    child.kill();
    running
}

#[test]
fn of_a_pool_that_is_killed_what_ran_has_crashed_once_and_the_rest_is_untouched() {
    let dir = Dir::new("killed");
    let path = dir.join("store.db");
    let store = open(&path);
    let messages = store.queue("mail").enqueue_all(vec!["x"; 200]).unwrap();
    let running = killed_at_work(&path, 8);
    assert_eq!(running.len(), 8);
    let taken = store.detached("other").unwrap().claim("mail").unwrap().unwrap();
    assert!(running.contains(&taken.id()), "the first of them is at hand at once");
    taken.release().unwrap();
    for message in messages {
        let ran = running.contains(&message.id());
        let message = store.show(message.id()).unwrap().unwrap();
        let attempts = u32::from(ran);
        assert_eq!((message.status, message.attempts), (Status::Pending, attempts), "{}", message.id);
        assert_eq!(message.crashes, u32::from(ran));
    }
    sound(&store);
}

/// The leases run for an hour: it is the death that is seen.
#[test]
fn an_idle_pool_takes_over_what_another_process_died_at() {
    let dir = Dir::new("over");
    let path = dir.join("store.db");
    let store = open(&path);
    store.queue("mail").enqueue_all(vec!["x"; 4]).unwrap();
    let mut child = Child::start("role_never_ends", &[arg(&path), "4"]);
    let running: HashSet<_> = (0..4).map(|_| MessageId::from(child.hear().unwrap().parse::<i64>().unwrap())).collect();
    let (handled, all) = channel();
    let handler = move |claim: &Claim| handled.send((claim.id(), claim.crashes(), claim.attempts())).unwrap();
    let workers = Workers::builder().concurrency(4).queue("mail", handler).start(&store).unwrap();
    child.kill();
    let taken: HashSet<_> = (0..4).map(|_| hear(&all)).collect();
    assert_eq!(taken, running.into_iter().map(|id| (id, 1, 2)).collect());
    assert!(workers.stop(LONG).interrupted.is_empty());
    sound(&store);
}

/// A pool of eight that works on the poison beside seven innocents, and says so: then it is killed.
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_dies_of_poison() {
    let Some(part) = part("role_dies_of_poison") else { return };
    let store = open(part.path());
    let poison = MessageId::from(part.args[1].parse::<i64>().unwrap());
    let beside = Arc::new(AtomicUsize::new(0));
    let at_work = AtomicBool::new(false);
    let (say, said) = channel();
    let handler = {
        let (store, beside) = (store.clone(), beside.clone());
        move |claim: &Claim| {
            if claim.id() == poison {
                at_work.store(true, SeqCst);
                eventually("seven are beside it", || beside.load(SeqCst) == 7);
                say.send(()).unwrap();
                stay_until_killed();
            }
            // What comes behind the poison waits for it, as long as it lives.
            if claim.id() > poison {
                beside.fetch_add(1, SeqCst);
                let is_dead = || store.show(poison).unwrap().unwrap().status == Status::Dead;
                eventually("it is at work or dead", || at_work.load(SeqCst) || is_dead());
                if at_work.load(SeqCst) {
                    stay_until_killed();
                }
            }
        }
    };
    let pool = Workers::builder().label("pool").concurrency(8).drain(true).queue("mail", handler);
    let workers = pool.start(&store).unwrap();
    while !workers.wait(MS) {
        if said.try_recv().is_ok() {
            part.say("at work");
        }
    }
    part.say("drained");
}

#[test]
fn a_message_that_kills_its_process_ends_as_a_dead_letter_and_none_of_those_beside_it_does() {
    let dir = Dir::new("poison");
    let path = dir.join("store.db");
    let store = open(&path);
    let mail = store.queue("mail");
    mail.enqueue_all(vec!["innocent"; 20]).unwrap();
    let poison = mail.enqueue("poison").unwrap().id();
    mail.enqueue_all(vec!["innocent"; 180]).unwrap();
    for _ in 0..3 {
        let mut child = Child::start("role_dies_of_poison", &[arg(&path), &poison.to_string()]);
        child.expect("at work");
        child.kill();
    }
    let mut child = Child::start("role_dies_of_poison", &[arg(&path), &poison.to_string()]);
    child.expect("drained");
    child.finish();
    let left = store.list(&Filter::new()).unwrap();
    let told: Vec<_> = left.iter().map(|m| (m.id, m.status, m.crashes)).collect();
    assert_eq!(told, [(poison, Status::Dead, 3)]);
    assert_eq!(store.stats().unwrap().queues[0].acked, 200);
    sound(&store);
}

/// A pool of one handler that says how it is told to end and what its settle came to.
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_is_told() {
    let Some(part) = part("role_is_told") else { return };
    let store = open_at(part.path(), Clock::manual());
    let (say, said) = channel();
    let (told, ended) = (say.clone(), say.clone());
    let handler = move |claim: &Claim| {
        say.send(format!("begins {}", claim.id())).unwrap();
        claim.cancel_token().wait(LONG);
        told.send(format!("{:?}", claim.cancel_token().reason())).unwrap();
    };
    let pool = Workers::builder().label("hung").lease(300 * MS).queue("mail", handler);
    let pool = pool.on_finish(move |_, finished| {
        ended.send(matches!(finished.settled, Err(Error::Stale { .. })).to_string()).unwrap();
    });
    let workers = pool.start(&store).unwrap();
    said.iter().take(3).for_each(|line| part.say(line));
    assert!(workers.stop(LONG).interrupted.is_empty());
}

/// Whoever is stopped within one keeps the lock of the store, and that is another story.
fn stop_outside_of_a_transaction(child: &Child, path: &Path) {
    let conn = plain(path);
    conn.busy_timeout(100 * MS).unwrap();
    child.stop();
    while conn.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_err() {
        child.go_on();
        child.stop();
    }
}

/// SIGSTOP: it is not dead, so only its lease ends its claim; and when it goes on, it is told.
#[test]
fn a_pool_that_hangs_past_its_lease_loses_its_message_and_is_told_when_it_goes_on() {
    let dir = Dir::new("hung");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let store = open_at(&path, clock.clone());
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let mut child = Child::start("role_is_told", &[arg(&path)]);
    child.expect(&format!("begins {id}"));
    stop_outside_of_a_transaction(&child, &path);
    let other = store.worker("other").unwrap();
    assert!(other.claim("mail").unwrap().is_none(), "its lease still runs");
    clock.advance(HOUR);
    let claim = other.claim("mail").unwrap().expect("its lease has ended");
    assert_eq!((claim.id(), claim.crashes()), (id, 1));
    child.go_on();
    child.expect(&format!("{:?}", Some(CancelReason::Lost)));
    child.expect("true");
    child.finish();
    claim.ack().unwrap();
    sound(&store);
}

/// A pool of more threads than messages, whose handler works until its parent says so.
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_is_frozen() {
    let Some(part) = part("role_is_frozen") else { return };
    let store = open(part.path());
    let (say, said) = channel();
    let (end, ends) = channel::<()>();
    let ends = std::sync::Mutex::new(ends);
    let handler = move |claim: &Claim| {
        say.send(format!("begins {}", claim.receipt())).unwrap();
        let _ = ends.lock().unwrap().recv_timeout(LONG);
    };
    let pool = Workers::builder().label("frozen").concurrency(3).lease(200 * MS).queue("mail", handler);
    let workers = pool.start(&store).unwrap();
    part.say(said.recv_timeout(LONG).unwrap());
    while part.hear().is_some_and(|line| line == "go on") {
        said.try_iter().for_each(|line| part.say(line));
        part.say("goes on");
    }
    drop(end);
    assert!(workers.stop(LONG).interrupted.is_empty());
    said.try_iter().for_each(|line| part.say(line));
}

/// A frozen container, a debugger: the idle threads of a pool once took from the others what those had in hand.
#[test]
fn a_pool_that_was_frozen_for_longer_than_its_lease_goes_on_with_what_it_had() {
    let dir = Dir::new("frozen");
    let path = dir.join("store.db");
    let store = open(&path);
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let mut child = Child::start("role_is_frozen", &[arg(&path)]);
    child.expect(&format!("begins {id}.1"));
    for _ in 0..5 {
        stop_outside_of_a_transaction(&child, &path);
        // Real time: its lease is to run out.
        std::thread::sleep(400 * MS);
        child.go_on();
        std::thread::sleep(100 * MS);
    }
    child.say("go on");
    child.expect("goes on");
    assert_eq!(child.finish(), Vec::<String>::new(), "it was begun once");
    assert_eq!(store.stats().unwrap().queues[0].acked, 1);
    sound(&store);
}

/// A pool whose handler runs a command that outlives it: it says its process id.
#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_runs_a_command() {
    let Some(part) = part("role_runs_a_command") else { return };
    let store = open_at(part.path(), Clock::manual());
    let (say, said) = channel();
    let handler = move |_: &Claim| {
        let mut sleep = Command::new("sleep");
        let mut sleep =
            sleep.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        say.send(sleep.id()).unwrap();
        sleep.wait().unwrap();
    };
    let pool = Workers::builder().label("pool").share_with_commands(part.args[1] == "shares");
    let _workers = pool.queue("mail", handler).start(&store).unwrap();
    for id in said {
        part.say(id);
    }
}

/// Ended when the test ends, in whatever way.
struct Orphan(String);

impl Orphan {
    fn end(&self) {
        let _ = Command::new("kill").args(["-KILL", &self.0]).stderr(Stdio::null()).status();
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.end();
    }
}

/// A command at work, whose parent was killed, and the message that it works on.
fn orphan(store: &Store, path: &Path, shares: &str) -> (Orphan, MessageId) {
    let id = store.queue("mail").enqueue("x").unwrap().id();
    let mut child = Child::start("role_runs_a_command", &[arg(path), shares]);
    let orphan = Orphan(child.hear().unwrap());
    child.kill();
    (orphan, id)
}

fn is_held(store: &Store, id: MessageId) {
    let other = store.detached("other").unwrap();
    assert!(other.claim("mail").unwrap().is_none());
    assert!(matches!(other.claim_id(id).unwrap(), Verdict::Held { by, .. } if by == "pool"));
    assert!(matches!(store.worker("pool"), Err(Error::LabelTaken { .. })));
}

/// Not at once: a command that is just being started or killed has what it inherited for an instant longer.
fn is_taken_over(store: &Store, id: MessageId) {
    let other = store.detached("other").unwrap();
    let mut claim = None;
    eventually("it is taken over", || {
        claim = other.claim("mail").unwrap();
        claim.is_some()
    });
    let claim = claim.unwrap();
    assert_eq!((claim.id(), claim.crashes()), (id, 1));
    assert!(store.worker("pool").is_ok());
}

#[test]
fn a_command_that_outlives_its_pool_keeps_the_message_while_it_runs_and_no_longer() {
    let dir = Dir::new("orphan");
    let path = dir.join("store.db");
    let store = open_at(&path, Clock::manual());
    let (orphan, id) = orphan(&store, &path, "shares");
    is_held(&store, id);
    orphan.end();
    is_taken_over(&store, id);
    sound(&store);
}

#[test]
fn a_command_that_outlives_its_pool_keeps_the_message_for_no_longer_than_the_lease() {
    let dir = Dir::new("lease");
    let path = dir.join("store.db");
    let clock = Clock::manual();
    let store = open_at(&path, clock.clone());
    let (orphan, id) = orphan(&store, &path, "shares");
    clock.advance(HOUR - MS);
    is_held(&store, id);
    clock.advance(MS);
    let claim = store.detached("other").unwrap().claim("mail").unwrap().expect("its lease has ended");
    assert_eq!((claim.id(), claim.crashes()), (id, 1));
    drop(orphan);
    sound(&store);
}

#[test]
fn a_command_inherits_nothing_unless_it_was_asked_for() {
    let dir = Dir::new("alone");
    let path = dir.join("store.db");
    let store = open_at(&path, Clock::manual());
    let (_orphan, id) = orphan(&store, &path, "keeps");
    is_taken_over(&store, id);
}
