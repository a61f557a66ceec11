//! What is inherited over a fork is the parent's: a child that uses it is refused, and its end changes nothing.
#![cfg(all(unix, feature = "cli", feature = "testing"))]

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use relet::{Durability, Error, Monitor, Outcome, Settle, Store, Workers};
use support::{Dir, eventually};

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(code: i32) -> !;
}

/// One test at a time: a child inherits whatever another test's thread has locked inside SQLite, and nobody unlocks it there.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `child` in a forked process, and says with which code it ended. (It shares nothing that it would unlock: it neither prints nor panics.)
fn in_a_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only uses what it inherited, and ends without running anything of the parent's.
    match unsafe { fork() } {
        0 => {
            let code = child();
            unsafe { _exit(code) }
        }
        pid => {
            let mut status = 0;
            assert_eq!(unsafe { waitpid(pid, &mut status, 0) }, pid);
            assert_eq!(status & 0x7f, 0, "the child was killed by a signal");
            status >> 8 & 0xff
        }
    }
}

fn is_forked<T>(outcome: Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::Forked { parent }) if parent != std::process::id())
}

#[test]
fn every_call_of_a_child_is_refused_and_its_end_changes_nothing() {
    let _alone = alone();
    let dir = Dir::new("fork");
    let path = dir.join("store.db");
    let store = Store::options().durability(Durability::Normal).reserve(0).open(&path).unwrap();
    let mail = store.queue("mail");
    mail.enqueue_all((0..100).map(|n| format!("letter {n}"))).unwrap();
    let worker = store.worker("w").unwrap();
    let claim = worker.claim("mail").unwrap().unwrap();
    let ticket = mail.enqueue_deferred("laid down by the parent").unwrap();

    let (child_store, child_worker) = (store.clone(), worker.clone());
    let code = in_a_child(move || {
        let mail = child_store.queue("mail");
        let refused = [
            is_forked(mail.enqueue("x")),
            is_forked(mail.enqueue_deferred("x").map(drop)),
            is_forked(child_worker.claim("mail").map(drop)),
            is_forked(child_worker.claim_wait("mail", Duration::from_secs(60)).map(drop)),
            is_forked(child_worker.claim_batch("mail", 3).map(drop)),
            is_forked(child_worker.claim_id(1).map(drop)),
            is_forked(claim.extend(Duration::from_secs(5))),
            is_forked(child_store.settle(claim.receipt(), Settle::Release)),
            is_forked(child_store.stats().map(drop)),
            is_forked(child_store.doctor().map(drop)),
            is_forked(child_store.checkpoint().map(drop)),
            is_forked(child_store.prune().map(drop)),
            is_forked(child_store.worker("v").map(drop)),
            is_forked(child_store.workers().map(drop)),
            is_forked(child_store.backup(child_store.path().unwrap().with_extension("copy"))),
            is_forked(claim.ack().map(drop)),
            is_forked(ticket.wait().map(drop)),
        ];
        drop((child_worker, mail, child_store));
        refused.iter().position(|refused| !refused).map_or(0, |at| at as i32 + 1)
    });
    assert_eq!(code, 0, "the call of this number was not refused");

    // The parent goes on with all that it had, and so do others.
    let other = Store::options().durability(Durability::Normal).reserve(0).open(&path).unwrap();
    assert!(matches!(other.worker("w"), Err(Error::LabelTaken { .. })), "the parent's worker lives");
    assert_eq!(store.list(&relet::Filter::new().limit(500)).unwrap().len(), 101, "the ticket's message is stored once");
    let mut claimed = 0;
    while let Some(claim) = worker.claim("mail").unwrap() {
        claim.ack().unwrap();
        claimed += 1;
    }
    assert_eq!(claimed, 100, "all but the one that is held");
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

#[test]
fn a_child_that_drops_everything_leaves_the_parents_threads_and_files_alone() {
    let _alone = alone();
    let dir = Dir::new("fork");
    let path = dir.join("store.db");
    let store = Store::options().reserve(0).open(&path).unwrap();
    let workers = Workers::builder().label("pool").queue("mail", |_| Outcome::Ack).start(&store).unwrap();
    let monitor = Monitor::builder().start(&store).unwrap();
    store.queue("mail").enqueue("before").unwrap();
    eventually("it is done", || store.stats().unwrap().queues[0].acked == 1);
    let child_store = store.clone();
    // Whoever forks hands the only handles to the child's code: its destructors run there, in a copy.
    let (workers, monitor) = (std::mem::ManuallyDrop::new(workers), std::mem::ManuallyDrop::new(monitor));
    let code = in_a_child(|| {
        let stopped =
            std::mem::ManuallyDrop::into_inner(unsafe { std::ptr::read(&workers) }).stop(Duration::from_secs(60));
        drop(std::mem::ManuallyDrop::into_inner(unsafe { std::ptr::read(&monitor) }));
        drop(child_store);
        i32::from(!matches!(stopped.error, Some(Error::Forked { .. })))
    });
    assert_eq!(code, 0);
    store.queue("mail").enqueue("after").unwrap();
    eventually("the parent's workers go on", || store.stats().unwrap().queues[0].acked == 2);
    drop(std::mem::ManuallyDrop::into_inner(monitor));
    let _ = std::mem::ManuallyDrop::into_inner(workers).stop(Duration::from_secs(10));
}

/// SQLite's lists of what it has locked are inherited, and its locks are not: what the child would acknowledge could be lost.
#[test]
fn a_child_cannot_open_what_its_parent_had_open_and_a_new_program_can() {
    let _alone = alone();
    let dir = Dir::new("fork");
    let path = dir.join("store.db");
    let store = Store::options().reserve(0).open(&path).unwrap();
    store.queue("mail").enqueue("parent").unwrap();
    let inherited = store.clone();
    let code = in_a_child(move || {
        drop(inherited); // that does not help
        i32::from(!is_forked(Store::open(&path)) || !is_forked(Store::open_read_only(&path)))
    });
    assert_eq!(code, 0);
    let ran = std::process::Command::new(env!("CARGO_BIN_EXE_relet"))
        .args(["-d", dir.join("store.db").to_str().unwrap(), "enqueue", "mail", "child"])
        .output()
        .unwrap();
    assert!(ran.status.success());
    store.queue("mail").enqueue("parent again").unwrap();
    assert_eq!(store.stats().unwrap().queues[0].by_status[0], 3);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

#[test]
fn names_that_parent_and_child_make_are_not_alike() {
    let _alone = alone();
    let dir = Dir::new("fork");
    let store = Store::options().reserve(0).open(dir.join("store.db")).unwrap();
    let said = dir.join("said");
    let name_of = |store: &Store| store.worker_unnamed().unwrap().label().to_owned();
    name_of(&store); // whatever is seeded is seeded by now
    let code = in_a_child(|| {
        let own = Store::options().reserve(0).open(dir.join("other.db")).unwrap();
        i32::from(std::fs::write(&said, name_of(&own)).is_err())
    });
    assert_eq!(code, 0);
    assert_ne!(std::fs::read_to_string(&said).unwrap(), name_of(&store));
}
