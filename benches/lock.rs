//! How long another process has to wait for the write lock while relet has much to clear: the longest wait of a connection that
//! begins a write transaction over and over, beside each of the ways that lead to much work.
//!
//! `cargo bench --all-features --bench lock`, with 300,000 rows each; another number: `… -- 1000000`. The files are as on a real disk,
//! with the durability Normal. The aim is under 50 ms each.

#![allow(clippy::disallowed_methods, reason = "a bench measures time")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use relet::rusqlite::Connection;
use relet::{Claim, Durability, MessageId, Settle, Store, Workers};

fn main() {
    let rows: usize = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(300_000);
    println!("{rows} rows\n\n| what | the longest wait | all of it took |\n|---|---|---|");
    for threads in [1, 128] {
        case(&format!("due, {threads} threads claim"), rows, 1, due, |store, _| claims(store, threads));
        case(&format!("void claims, {threads} threads claim"), rows, 1, void, |store, _| claims(store, threads));
    }
    case("due in 100 queues, one pool of 16", rows, 100, due, |store, _| pool(store, rows));
    case("held by 800 dead workers, one claims", rows, 1, dead, |store, _| claims(store, 1));
    case("held before a restart of the machine, one claims", rows, 1, rebooted, |store, path| {
        drop(store); // nobody has a store open over a restart
        claims(open(path), 1);
    });
    case(
        "cancel_all",
        rows,
        1,
        |_, _| {},
        |store, path| {
            let outcomes = store.cancel_all(ids(path).into_iter().map(MessageId::from)).unwrap();
            assert!(outcomes.iter().all(Result::is_ok));
        },
    );
    case(
        "settle_all over 30,000 queues",
        rows.min(30_000),
        30_000,
        |_, _| {},
        |store, path| {
            let worker = store.detached("w").unwrap();
            let claims = ids(path).into_iter().map(|id| match worker.claim_id(MessageId::from(id)).unwrap() {
                relet::Verdict::Claimed(claim) => claim.receipt(),
                other => panic!("{other:?}"),
            });
            let receipts: Vec<_> = claims.collect();
            store.settle_all(receipts.into_iter().map(|receipt| (receipt, Settle::Release))).unwrap();
        },
    );
    case("stats and stuck: void claims in 1,000 queues", rows, 1_000, void, |store, _| {
        store.stats().unwrap();
        store.stuck(Duration::ZERO).unwrap();
    });
}

fn open(path: &Path) -> Store {
    let options = Store::options().durability(Durability::Normal).lease(Duration::from_secs(3600));
    options.busy_wait(Duration::from_secs(60)).open(path).unwrap()
}

/// Prepares a store, and measures while `run` runs.
fn case(
    name: &str,
    rows: usize,
    queues: usize,
    prepare: impl FnOnce(&Store, &Connection),
    run: impl FnOnce(Store, &Path),
) {
    let folder = std::env::temp_dir().join(format!("relet-lock-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("store.db");
    let store = open(&path);
    for queue in 0..queues {
        store.queue(&format!("q{queue}")).enqueue_all((0..rows.div_ceil(queues)).map(|_| "m")).unwrap();
    }
    let conn = Connection::open(&path).unwrap();
    conn.busy_timeout(Duration::from_secs(60)).unwrap();
    prepare(&store, &conn);
    store.checkpoint().unwrap();
    let over = AtomicBool::new(false);
    let (longest, took) = std::thread::scope(|scope| {
        let other = scope.spawn(|| longest_wait(&path, &over));
        let watch = Instant::now();
        run(store, &path);
        let took = watch.elapsed();
        over.store(true, Ordering::Relaxed);
        (other.join().unwrap(), took)
    });
    println!("| {name} | {:.1} ms | {:.2} s |", longest.as_secs_f64() * 1e3, took.as_secs_f64());
    drop(conn);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Begins and ends write transactions until it is over.
fn longest_wait(path: &Path, over: &AtomicBool) -> Duration {
    let conn = Connection::open(path).unwrap();
    conn.busy_timeout(Duration::ZERO).unwrap();
    let mut longest = Duration::ZERO;
    while !over.load(Ordering::Relaxed) {
        let watch = Instant::now();
        while conn.execute_batch("BEGIN IMMEDIATE").is_err() {
            std::thread::sleep(Duration::from_micros(50));
        }
        longest = longest.max(watch.elapsed());
        conn.execute_batch("ROLLBACK").unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    longest
}

fn ids(path: &Path) -> Vec<i64> {
    let conn = Connection::open(path).unwrap();
    let mut statement = conn.prepare("SELECT id FROM relet_messages").unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

fn due(_: &Store, conn: &Connection) {
    conn.execute_batch(
        "BEGIN IMMEDIATE;
         INSERT INTO relet_retry_queue (queue, message, due_at) SELECT queue, id, 1 FROM relet_messages;
         UPDATE relet_messages SET due_at = 1, line = NULL, place = NULL;
         COMMIT",
    )
    .unwrap();
}

fn held(conn: &Connection, place: &str) {
    conn.execute_batch(&format!(
        "BEGIN IMMEDIATE;
         UPDATE relet_messages SET status = 'processing', worker_id = 'dead-' || (id % 800), incarnation = 1 + id % 800, line = -1,
                place = {place}, lease_ms = 3600000, claimed_at = 1, token = 1, attempts = 1;
         COMMIT"
    ))
    .unwrap();
}

fn void(_: &Store, conn: &Connection) {
    held(conn, "1");
}

fn dead(store: &Store, conn: &Connection) {
    held(conn, "1000000000000");
    let mut folder: PathBuf = store.path().unwrap().to_owned();
    folder.set_file_name("store.db-relet-workers");
    std::fs::create_dir_all(&folder).unwrap();
    for n in 0..800 {
        std::fs::write(folder.join(format!("{n:032x}.lock")), "").unwrap();
        conn.execute(
            "INSERT INTO relet_workers (label, incarnation, pid, started_at, lock) VALUES (?1, ?2, 1, 1, ?3)",
            (format!("dead-{n}"), 1 + n, format!("{n:032x}.lock")),
        )
        .unwrap();
    }
    conn.execute("INSERT INTO relet_meta (key, value) VALUES ('incarnation', 800)", []).unwrap();
}

fn rebooted(_: &Store, conn: &Connection) {
    held(conn, "1000000000000");
    // Another boot, whose clocks have begun again.
    conn.execute("UPDATE relet_meta SET value = 'another' WHERE key = 'boot_id'", []).unwrap();
    conn.execute("UPDATE relet_meta SET value = value + 1000000000000 WHERE key = 'seen_awake'", []).unwrap();
}

/// So many threads claim one message each.
fn claims(store: Store, threads: usize) {
    let worker = store.detached("w").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| drop(worker.claim("q0").unwrap().expect("there is enough")));
        }
    });
}

fn pool(store: Store, rows: usize) {
    let (done, heard) = std::sync::mpsc::channel();
    let mut builder = Workers::builder().concurrency(16);
    for queue in 0..100 {
        let done = done.clone();
        builder = builder.queue(&format!("q{queue}"), move |_: &Claim| done.send(()));
    }
    let workers = builder.start(&store).unwrap();
    for _ in 0..rows.min(10_000) {
        heard.recv().unwrap();
    }
    let _ = workers.stop(Duration::from_secs(10));
}
