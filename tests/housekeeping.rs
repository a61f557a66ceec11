//! What is over goes as fast as it comes, and leaves the file small; looks do not stand in the way of that, nor of each other.
#![cfg(feature = "testing")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use relet::{Clock, Durability, Filter, Settle, Status, Store};

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("relet-keep-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("queue.db")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn retention_keeps_up_with_whatever_comes_in() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let options = Store::options().clock(clock.clone()).reserve(0).durability(Durability::Normal);
    let store = options.retention(Duration::from_secs(4)).open(folder.file()).unwrap();
    let worker = store.worker("w").unwrap();
    let mut largest = 0;
    for second in 0..16 {
        for _ in 0..10 {
            store.queue("q").enqueue_all((0..400).map(|n| format!("{second} {n}"))).unwrap();
            let claims = worker.claim_batch("q", 400).unwrap();
            store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
        }
        clock.advance(Duration::from_secs(1));
        largest = largest.max(store.stats().unwrap().queues[0].count(Status::Done));
    }
    // 4,000 a second for 4 seconds, and what is found a little later.
    assert!((16_000..=28_000).contains(&largest), "{largest} were done and kept");
}

#[test]
fn pruning_gives_the_free_pages_back_in_few_commits() {
    let folder = Folder::new();
    let clock = Clock::manual();
    let options = Store::options().clock(clock.clone()).reserve(0).durability(Durability::Normal);
    let store = options.retention(Duration::from_secs(3600)).open(folder.file()).unwrap();
    store.queue("q").enqueue_all((0..4000).map(|_| vec![7; 3000])).unwrap();
    let worker = store.worker("w").unwrap();
    let claims = worker.claim_batch("q", 4000).unwrap();
    store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
    drop(claims);
    store.checkpoint().unwrap();
    let before = store.stats().unwrap().file_bytes;
    clock.advance(Duration::from_secs(3601));
    store.prune().unwrap();
    let log = store.stats().unwrap().wal_bytes;
    store.checkpoint().unwrap();
    let after = store.stats().unwrap().file_bytes;
    assert!(before > 12_000_000, "{before}");
    assert!(after < 3_000_000, "{after} of {before} bytes are left");
    assert!(log < 20_000_000, "the log has {log} bytes");
}

#[test]
fn a_prune_waits_for_another_process_to_let_go_of_the_lock() {
    let folder = Folder::new();
    let open = || Store::options().reserve(0).busy_wait(Duration::from_secs(60)).open(folder.file()).unwrap();
    let store = open();
    store.queue("q").enqueue_all((0..2000).map(|_| vec![7; 3000])).unwrap();
    let worker = store.worker("w").unwrap();
    let claims = worker.claim_batch("q", 2000).unwrap();
    store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Ack))).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (done, open) = (&done, &open);
        scope.spawn(move || {
            let other = open();
            while !done.load(Ordering::Relaxed) {
                other.queue("other").enqueue("x").unwrap();
            }
        });
        let pruned = store.prune();
        done.store(true, Ordering::Relaxed);
        pruned.unwrap();
    });
}

#[test]
fn looks_that_overlap_do_not_make_the_log_grow_for_ever() {
    let folder = Folder::new();
    let options = Store::options().reserve(0).durability(Durability::Normal).log_max(2 << 20);
    let store = options.open(folder.file()).unwrap();
    store.queue("q").enqueue_all((0..500).map(|n| n.to_string())).unwrap();
    let done = AtomicBool::new(false);
    let longest = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    store.list(&Filter::new().limit(500)).unwrap();
                }
            });
        }
        let mut longest = 0;
        for _ in 0..600 {
            store.queue("large").enqueue_all((0..20).map(|_| vec![7; 2000])).unwrap();
            longest = longest.max(store.stats().unwrap().wal_bytes);
        }
        done.store(true, Ordering::Relaxed);
        longest
    });
    assert!(longest < 16 << 20, "the log had {longest} bytes");
}

#[test]
fn a_long_look_takes_no_reader_from_the_others() {
    let folder = Folder::new();
    let store = Store::options().reserve(0).readers(1).durability(Durability::Normal).open(folder.file()).unwrap();
    store.queue("q").enqueue_all((0..20_000).map(|n| n.to_string())).unwrap();
    let looks = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let doctor = scope.spawn(|| store.doctor().unwrap());
        while !doctor.is_finished() {
            store.stats().unwrap();
            looks.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert!(looks.into_inner() > 3, "looks went on beside the doctor");
}
