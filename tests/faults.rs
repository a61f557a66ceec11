//! Whatever the disk does: what was acknowledged is there, what was refused is not, and work goes on when the disk is well again.
#![cfg(all(feature = "testing", unix))]

mod vfs;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use relet::{Durability, Error, Filter, Message, Settle, Settled, Store};
use vfs::{Bench, Fault};

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("relet-faults-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
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

fn open(path: &Path) -> Store {
    Store::options().reserve(0).open(path).unwrap()
}

fn payloads(store: &Store) -> BTreeSet<String> {
    let rows = store.list(&Filter::new().payload(true).limit(10_000)).unwrap();
    rows.into_iter().map(|row| String::from_utf8(row.payload.unwrap()).unwrap()).collect()
}

/// What a caller knows after a run on a failing disk.
#[derive(Default)]
struct Known {
    /// Acknowledged, and not acked since.
    there: BTreeSet<String>,
    /// Refused: must not be there.
    refused: BTreeSet<String>,
    /// Acked, and that acknowledged.
    gone: BTreeSet<String>,
}

/// Enqueues, claims, acks and fails, and keeps account of what it was told.
fn work(store: &Store, round: &str, known: &mut Known) {
    let queue = store.queue("q");
    for n in 0..6 {
        let payload = format!("{round}-{n}-{}", "x".repeat(n * 900));
        match queue.enqueue(Message::new(payload.clone()).key(format!("{round}-{n}"))) {
            Ok(_) => known.there.insert(payload),
            Err(Error::Indeterminate { .. }) => false,
            Err(_) => known.refused.insert(payload),
        };
    }
    let Ok(worker) = store.worker("w") else { return };
    for n in 0..4 {
        let Ok(Some(claim)) = worker.claim("q") else { continue };
        let payload = String::from_utf8(claim.payload().to_vec()).unwrap();
        if n % 2 == 0 {
            match claim.ack() {
                Ok(_) => {
                    known.there.remove(&payload);
                    known.gone.insert(payload);
                }
                // Not known: it may be there or not.
                Err(_) => drop(known.there.remove(&payload)),
            }
        } else {
            let _ = claim.fail_for("again", Duration::ZERO);
        }
    }
}

fn check(store: &Store, known: &Known, what: &str) {
    let there = payloads(store);
    assert!(known.there.is_subset(&there), "{what}: lost {:?}", known.there.difference(&there).collect::<Vec<_>>());
    assert!(known.refused.is_disjoint(&there), "{what}: refused, but stored");
    assert!(known.gone.is_disjoint(&there), "{what}: acked, but still there");
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new(), "{what}");
}

#[test]
fn a_fault_at_any_operation_loses_nothing_and_stores_nothing_that_was_refused() {
    let bench = Bench::take();
    let mut fired = 0;
    for fault in [Fault::Write, Fault::Full, Fault::Sync, Fault::Read, Fault::Truncate] {
        for sticky in [false, true] {
            for nth in (1..).step_by(if sticky { 7 } else { 1 }) {
                let folder = Folder::new();
                let store = open(&folder.file());
                let mut known = Known::default();
                work(&store, "before", &mut known);
                bench.break_at(fault, nth, sticky);
                work(&store, "broken", &mut known);
                let _ = store.checkpoint();
                let hits = bench.mend();
                fired += hits;
                let what = format!("{fault:?} at {nth}, sticky {sticky}");
                work(&store, "after", &mut known);
                check(&store, &known, &what);
                assert!(known.there.iter().any(|payload| payload.starts_with("after")), "{what}: work goes on");
                drop(store);
                check(&open(&folder.file()), &known, &format!("{what}, opened again"));
                if hits == 0 {
                    break;
                }
            }
        }
    }
    assert!(fired > 100, "the disk failed {fired} times only");
}

#[test]
fn a_failed_fsync_is_told_as_indeterminate_and_nothing_is_acknowledged_until_the_file_is_whole() {
    let bench = Bench::take();
    let folder = Folder::new();
    let store = open(&folder.file());
    let queue = store.queue("q");
    queue.enqueue("first").unwrap();
    bench.break_at(Fault::Sync, 1, true);
    let error = queue.enqueue(Message::new("second").key("k")).unwrap_err();
    assert!(matches!(error, Error::Indeterminate { .. }) && error.is_transient(), "{error:?}");
    // The disk still fails: the checkpoint that must come first does, too.
    assert!(queue.enqueue("third").is_err());
    assert!(store.worker("w").is_err());
    bench.mend();
    // The repeat with a key is safe, whichever way the first one went.
    queue.enqueue(Message::new("second").key("k")).unwrap();
    assert_eq!(payloads(&store), BTreeSet::from(["first".to_owned(), "second".to_owned()]));
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// B51 and the group commit: an operation that fills the disk takes nobody with it.
#[test]
fn an_operation_that_does_not_fit_undoes_itself_alone() {
    let _bench = Bench::take();
    let folder = Folder::new();
    let store = Store::options().reserve(0).file_max(1 << 20).open(folder.file()).unwrap();
    let refused = Arc::new(AtomicUsize::new(0));
    let stored = Arc::new(AtomicUsize::new(0));
    let big = "b".repeat(700_000);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (store, refused, stored, big) = (store.clone(), refused.clone(), stored.clone(), big.clone());
            scope.spawn(move || {
                for n in 0..20 {
                    let large = n % 4 == 3;
                    let payload = if large { big.clone() } else { format!("{thread}-{n}") };
                    match store.queue("q").enqueue(payload) {
                        Ok(_) => stored.fetch_add(1, Ordering::Relaxed),
                        Err(Error::Full { .. }) => {
                            assert!(large, "a small message fits");
                            refused.fetch_add(1, Ordering::Relaxed)
                        }
                        Err(error) => panic!("{error:?}"),
                    };
                }
            });
        }
    });
    assert!(refused.load(Ordering::Relaxed) >= 38, "at most one of the 40 large ones fits");
    assert_eq!(store.list(&Filter::new().limit(10_000)).unwrap().len(), stored.load(Ordering::Relaxed));
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// B51: with the file full, what is stored can be claimed, settled and removed, and then enqueueing goes on.
#[test]
fn a_full_file_drains_and_is_usable_again() {
    let _bench = Bench::take();
    let folder = Folder::new();
    let store = Store::options().reserve(0).file_max(600 << 10).open(folder.file()).unwrap();
    let queue = store.queue("q");
    let mut count = 0;
    let error = loop {
        match queue.enqueue(vec![1; 1500]) {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Full { .. }), "{error:?}");
    assert!(count > 100, "{count}");
    let worker = store.worker("w").unwrap();
    let mut drained = 0;
    while let Some(claim) = worker.claim("q").unwrap() {
        assert_eq!(claim.ack().unwrap(), Settled::Now(relet::Status::Done));
        drained += 1;
    }
    assert_eq!(drained, count);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// Fills a disk of 12 MiB, then tries to empty the queue. Returns how many messages were stored, and how many could be acked.
fn fill_and_drain(reserve: u64) -> (u32, u32) {
    let bench = Bench::take();
    let folder = Folder::new();
    let store = Store::options().reserve(reserve).open(folder.file()).unwrap();
    bench.limit(&folder.0, 12 << 20);
    let mut stored = 0;
    let error = loop {
        match store.queue("q").enqueue(vec![1; 1500]) {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Full { .. }), "{error:?}");
    let mut acked = 0;
    if let Ok(worker) = store.worker("w") {
        while let Ok(Some(claim)) = worker.claim("q") {
            if claim.ack().is_err() {
                break;
            }
            acked += 1;
        }
    }
    assert_eq!(bench.mend(), 0);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    assert_eq!(store.list(&Filter::new().limit(10_000)).unwrap().len() as u32, stored - acked);
    (stored, acked)
}

#[test]
fn a_full_disk_still_drains() {
    let (stored, acked) = fill_and_drain(relet::RESERVE);
    assert!(stored > 500, "{stored}");
    assert_eq!(acked, stored);
}

/// The control: without the reserve, the same disk must refuse to drain, or it was not full.
#[test]
fn without_the_reserve_a_full_disk_does_not_drain() {
    let (stored, acked) = fill_and_drain(0);
    assert!(acked < stored, "{acked} of {stored}");
}

/// Claims may be lost with the power; what was acknowledged may not.
#[test]
fn a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged() {
    let lost = power_cuts(Durability::Full);
    assert_eq!(lost, 0);
}

/// The control: where commits are not synced, the same cuts must find losses, or they find nothing at all.
#[test]
fn the_same_power_cuts_find_losses_without_fsync() {
    assert!(power_cuts(Durability::Normal) > 0);
}

/// Between two waits the cut may fall after any of what was laid down, and what was waited for stays.
#[test]
fn a_power_cut_takes_only_the_end_of_what_was_laid_down_and_not_waited_for() {
    let bench = Bench::take();
    let folder = Folder::new();
    let path = folder.file();
    let store = Store::options().reserve(0).open(&path).unwrap();
    let queue = store.queue("q");
    let worker = store.worker("w").unwrap();
    store.checkpoint().unwrap();
    bench.mark(0);
    bench.record(&[path.clone(), PathBuf::from(format!("{}-wal", path.display()))]);
    // What is there after each operation, in their order; and of each mark, how many had been waited for, and how many laid down.
    let mut states = vec![BTreeSet::new()];
    let mut marks = vec![(0, 0)];
    for round in 0..6 {
        let mut there = states.last().unwrap().clone();
        let mut enqueued = Vec::new();
        for n in 0..3 {
            let payload = format!("{round}-{n}-{}", "x".repeat(n * 100));
            enqueued.push(queue.enqueue_deferred(payload.clone()).unwrap());
            there.insert(payload);
            states.push(there.clone());
        }
        let mut settled = Vec::new();
        for _ in 0..2 {
            let claim = worker.claim("q").unwrap().unwrap();
            settled.push(claim.ack_deferred());
            there.remove(std::str::from_utf8(claim.payload()).unwrap());
            states.push(there.clone());
        }
        let waited = match round % 2 {
            0 => settled.remove(0).wait().map(drop),
            _ => enqueued.pop().unwrap().wait().map(drop),
        };
        waited.unwrap();
        // An ack that was committed already takes the rest along to the disk; what was enqueued went with the first claim.
        let laid = states.len() - 1;
        marks.push((if round % 2 == 0 { laid } else { laid - settled.len() }, laid));
        bench.mark(marks.len() - 1);
        drop((enqueued, settled));
        marks.push((laid, laid));
        bench.mark(marks.len() - 1);
    }
    let images = bench.images();
    assert!(images.len() > 50, "{} images", images.len());
    drop((worker, queue, store));
    for image in images {
        let folder = Folder::new();
        for (file, bytes) in &image.files {
            std::fs::write(folder.0.join(file.file_name().unwrap()), bytes).unwrap();
        }
        let store = open(&folder.file());
        let found = payloads(&store);
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
        let (_, laid) = marks.get(image.mark + 1).unwrap_or(&marks[image.mark]);
        let possible = &states[marks[image.mark].0..=*laid];
        assert!(possible.contains(&found), "after mark {}: {found:?} is none of {possible:?}", image.mark);
    }
}

#[test]
fn settles_that_were_committed_and_cannot_be_brought_to_the_disk_are_told_as_indeterminate() {
    let bench = Bench::take();
    let folder = Folder::new();
    let store = open(&folder.file());
    let queue = store.queue("q");
    queue.enqueue_all(["a", "b", "c"]).unwrap();
    let worker = store.worker("w").unwrap();
    let claims: Vec<_> = std::iter::from_fn(|| worker.claim("q").unwrap()).collect();
    for by_its_own_wait in [true, false] {
        let claim = &claims[usize::from(by_its_own_wait)];
        let ticket = claim.ack_deferred();
        assert!(worker.claim("q").unwrap().is_none()); // it goes with this look
        bench.break_at(Fault::Sync, 1, true);
        if !by_its_own_wait {
            assert!(matches!(queue.enqueue("refused"), Err(Error::Indeterminate { .. })));
        }
        let error = ticket.wait().unwrap_err();
        assert!(matches!(error, Error::Indeterminate { .. }), "{error:?}");
        bench.mend();
        assert!(matches!(claim.ack().unwrap(), Settled::Gone | Settled::Now(_)));
    }
    claims[2].ack_deferred().wait().unwrap();
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
}

/// "It is there already" is a promise like any other: the row may have been written by somebody who does not sync.
#[test]
fn a_success_that_rests_on_what_another_wrote_survives_a_power_cut() {
    let bench = Bench::take();
    let folder = Folder::new();
    let path = folder.file();
    let careless = Store::options().reserve(0).durability(Durability::Normal).open(&path).unwrap();
    let careful = open(&path);
    careful.checkpoint().unwrap();
    bench.mark(0);
    bench.record(&[path.clone(), PathBuf::from(format!("{}-wal", path.display()))]);
    let message = || Message::new("hello").key("k");
    careless.queue("q").enqueue(message()).unwrap();
    assert!(careful.queue("q").enqueue(message()).unwrap().existing());
    bench.mark(1);
    careless.queue("q").enqueue("later").unwrap();
    let images: Vec<_> = bench.images().into_iter().filter(|image| image.mark == 1).collect();
    assert!(!images.is_empty());
    for image in images {
        let folder = Folder::new();
        for (file, bytes) in &image.files {
            std::fs::write(folder.0.join(file.file_name().unwrap()), bytes).unwrap();
        }
        assert!(payloads(&open(&folder.file())).contains("hello"));
    }
}

/// Runs a little work, cuts the power at every write and sync, and returns in how many of the images something
/// acknowledged was lost.
fn power_cuts(durability: Durability) -> usize {
    let bench = Bench::take();
    let folder = Folder::new();
    let path = folder.file();
    let store = Store::options().reserve(0).durability(durability).open(&path).unwrap();
    store.checkpoint().unwrap();
    let wal = PathBuf::from(format!("{}-wal", path.display()));
    bench.mark(0);
    bench.record(&[path.clone(), wal.clone()]);
    let queue = store.queue("q");
    let worker = store.worker("w").unwrap();
    // What is there after each acknowledged step.
    let mut there = BTreeSet::new();
    let mut states = vec![there.clone()];
    let mut next = |there: &BTreeSet<String>| {
        states.push(there.clone());
        bench.mark(states.len() - 1);
    };
    for n in 0..12 {
        let payload = format!("{n}-{}", "x".repeat(n * 100));
        queue.enqueue(payload.clone()).unwrap();
        there.insert(payload);
        next(&there);
        if n % 3 == 2 {
            let claim = worker.claim("q").unwrap().unwrap();
            let payload = String::from_utf8(claim.payload().to_vec()).unwrap();
            // Between a claim and its ack, a cut may lose the claim, but no message.
            if n % 2 == 0 {
                claim.ack().unwrap();
                there.remove(&payload);
            } else {
                store.settle(claim.receipt(), Settle::Release).unwrap();
            }
            next(&there);
        }
        if n == 8 {
            store.checkpoint().unwrap();
        }
    }
    let images = bench.images();
    assert!(images.len() > 100, "{} images", images.len());
    drop((worker, store));
    let mut lost = 0;
    for image in images {
        let folder = Folder::new();
        for (file, bytes) in &image.files {
            let name = file.file_name().unwrap();
            std::fs::write(folder.0.join(name), bytes).unwrap();
        }
        let store = open(&folder.file());
        let found = payloads(&store);
        assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
        // The step after the mark was under way: it may have happened or not.
        let after = states.get(image.mark + 1).unwrap_or(&states[image.mark]);
        if found != states[image.mark] && found != *after {
            lost += 1;
        }
    }
    lost
}
