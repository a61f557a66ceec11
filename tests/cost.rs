//! What a message costs on the disk: the pages that each operation writes to the log, by table and index. `BOUNDS` is what the
//! code writes as it is, so that no change writes more unseen. `cargo bench --bench cost` has the rest.
//!
//! Nothing here depends on time or on the machine: the clock stands still.
#![cfg(all(feature = "testing", feature = "bundled"))]

#[path = "../benches/counts/log.rs"]
#[allow(dead_code, reason = "the bench uses more of it")]
mod log;
mod support;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use log::{FREE, Log, POINTER_MAP, Pages};
use parking_lot::Mutex;
use relet::{Claim, Clock, Durability, Store, Worker, Workers};
use support::Dir;

/// The tables and indexes that a plain message may write to. sqlite_schema is the first page of the file, which knows what is free.
const TABLES: [&str; 6] = ["relet_messages", "relet_lines", "relet_counters", "sqlite_schema", POINTER_MAP, FREE];

/// The pages an operation may write, of each of [`TABLES`]: exactly what it wrote when this was measured, on the average of
/// [`MESSAGES`]. After a change that is meant, the test that fails prints this table anew.
#[rustfmt::skip]
const BOUNDS: [(&str, [f64; TABLES.len()]); 5] = [
    ("enqueue", [1.080, 1.065, 1.000, 0.085, 0.085, 0.000]), // 3.315 pages
    ("claim", [1.115, 1.000, 0.000, 0.010, 0.010, 0.000]), // 2.135 pages
    ("ack", [1.180, 1.010, 1.000, 0.090, 0.090, 0.090]), // 3.460 pages
    ("settle and claim", [1.390, 1.010, 1.000, 0.080, 0.080, 0.080]), // 3.640 pages
    ("a message's life", [3.530, 3.040, 2.000, 0.155, 0.155, 0.000]), // 8.880 pages
];

const QUEUE: &str = "mail";
const PAYLOAD: [u8; 256] = [7; 256];
/// Messages on which the figures are an average.
const MESSAGES: usize = 200;
/// Messages that are ready beside these.
const READY: usize = 500;
/// Operations before anything is counted.
const WARM_UP: usize = 20;

/// A new store in which messages are ready, and a worker.
fn stock(dir: &Dir) -> (Store, Worker) {
    let options = Store::options().clock(Clock::manual()).durability(Durability::Normal).checkpoints(false).reserve(0);
    let store = options.open(dir.join("queue.db")).unwrap();
    store.queue(QUEUE).enqueue_all((0..READY + MESSAGES + WARM_UP).map(|_| PAYLOAD.as_slice())).unwrap();
    let worker = store.worker("mailer-1").unwrap();
    (store, worker)
}

/// What so many runs of an operation write.
fn count(store: &Store, mut operation: impl FnMut()) -> Pages {
    (0..WARM_UP).for_each(|_| operation());
    let log = Log::begin(store.path().unwrap());
    (0..MESSAGES).for_each(|_| operation());
    log.end()
}

fn claim(worker: &Worker) -> Claim {
    worker.claim(QUEUE).unwrap().expect("enough is ready")
}

/// A pool with one thread: each of its commits settles a message and claims the next.
fn pool(store: &Store) -> Pages {
    let (calls, log, pages) = (AtomicUsize::new(0), Mutex::new(None), Arc::new(Mutex::new(Pages::default())));
    let (path, counted) = (store.path().unwrap().to_owned(), pages.clone());
    let handler = move |_: &Claim| match calls.fetch_add(1, Ordering::Relaxed) {
        WARM_UP => *log.lock() = Some(Log::begin(&path)),
        call if call == WARM_UP + MESSAGES => *counted.lock() = log.lock().take().unwrap().end(),
        _ => {}
    };
    let workers = Workers::builder().concurrency(1).drain(true).queue(QUEUE, handler).start(store).unwrap();
    assert!(workers.wait(Duration::from_secs(600)));
    std::mem::take(&mut pages.lock())
}

/// What this operation writes, in a store of its own.
fn written(operation: &str) -> Pages {
    let dir = Dir::new("cost");
    let (store, worker) = stock(&dir);
    let queue = store.queue(QUEUE);
    match operation {
        "enqueue" => count(&store, || _ = queue.enqueue(PAYLOAD.as_slice()).unwrap()),
        "claim" => count(&store, || drop(claim(&worker))),
        "ack" => {
            let mut held: Vec<Claim> = (0..WARM_UP + MESSAGES).map(|_| claim(&worker)).rev().collect();
            count(&store, || _ = held.pop().unwrap().ack().unwrap())
        }
        "settle and claim" => pool(&store),
        "a message's life" => count(&store, || {
            queue.enqueue(PAYLOAD.as_slice()).unwrap();
            claim(&worker).ack().unwrap();
        }),
        _ => panic!("what is {operation}?"),
    }
}

#[test]
fn an_operation_writes_no_more_pages_than_it_did() {
    let (mut wrong, mut table) = (String::new(), String::new());
    for (operation, bounds) in BOUNDS {
        let pages = written(operation);
        let each = |name: &str| pages.by_name.get(name).map_or(0.0, |pages| *pages as f64 / MESSAGES as f64);
        for (name, bound) in TABLES.into_iter().zip(bounds) {
            if each(name) > bound {
                writeln!(wrong, "{operation}: {:.3} pages of {name}, not {bound:.3}", each(name)).unwrap();
            }
        }
        for name in pages.by_name.keys().filter(|name| !TABLES.contains(&name.as_str())) {
            writeln!(wrong, "{operation}: {:.3} pages of {name}, which is not among TABLES", each(name)).unwrap();
        }
        let row: Vec<String> = TABLES.into_iter().map(|name| format!("{:.3}", each(name))).collect();
        let total = pages.total() as f64 / MESSAGES as f64;
        writeln!(table, "    ({operation:?}, [{}]), // {total:.3} pages", row.join(", ")).unwrap();
    }
    assert!(wrong.is_empty(), "\n{wrong}\nBOUNDS as it would be now:\n{table}");
}
