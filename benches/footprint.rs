//! How much memory a program with a store in it takes, and how long it is until its first claim:
//! `cargo bench --bench footprint`.
//!
//! Each row is a process of its own, which this program starts as its child: what it holds at rest (`VmRSS`) and at its highest
//! (`VmHWM`), as the kernel tells it in /proc, so on Linux only; and the time from before `open` until after the first claim.
//! Payloads are 256 bytes.

mod sides;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use relet::Store;
use relet::rusqlite::Connection;
use sides::{Backlog, Folder, PAYLOAD, QUEUE, time};

const CHILD: &str = "a-row-of-the-footprint";
const MILLION: i64 = 1_000_000;
const BATCH: usize = 100_000;

/// What a child does, and what its row is called.
const ROWS: [(&str, &str); 4] = [
    ("nothing", "a process without a store"),
    ("open", "an empty store is open"),
    ("million", "a store with 1,000,000 ready, one claimed"),
    ("batch", "100,000 enqueued and claimed in one batch each"),
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [CHILD, row, path] = args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        return child(row, Path::new(path));
    }
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    println!("{:<48} {:>10} {:>10} {:>22}", "", "at rest", "highest", "open to first claim");
    for (row, name) in ROWS {
        let folder = Folder::new();
        let path = folder.file("queue.db");
        if row == "million" {
            let store = Store::options().reserve(0).open(&path).expect("the store opens");
            store.queue(QUEUE).enqueue(PAYLOAD).expect("it is stored");
            let conn = Connection::open(&path).expect("the file opens");
            Backlog::Ready.fill(&conn, MILLION - 1);
        }
        let this = std::env::current_exe().expect("this program has a path");
        let output = Command::new(this).args([CHILD, row]).arg(&path).output().expect("the child runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        println!("{name:<48} {}", String::from_utf8_lossy(&output.stdout).trim_end());
    }
}

fn child(row: &str, path: &Path) {
    let mut first_claim = None;
    let mut kept = None;
    match row {
        "nothing" => {}
        "open" => kept = Some(Store::open(path).expect("the store opens")),
        "million" => {
            let took = time(|| {
                let store = Store::open(path).expect("the store opens");
                let worker = store.worker("mailer-1").expect("the worker starts");
                worker.claim(QUEUE).expect("the claim").expect("one is ready").ack().expect("the ack");
                kept = Some(store);
            });
            first_claim = Some(took);
        }
        "batch" => {
            let store = Store::open(path).expect("the store opens");
            store.queue(QUEUE).enqueue_all((0..BATCH).map(|_| PAYLOAD)).expect("they are stored");
            let worker = store.worker("mailer-1").expect("the worker starts");
            let claims = worker.claim_batch(QUEUE, BATCH).expect("the claims");
            assert_eq!(claims.len(), BATCH);
            drop(claims);
            kept = Some(store);
        }
        _ => panic!("what is {row}?"),
    }
    let [rest, highest] =
        ["VmRSS:", "VmHWM:"].map(|name| memory(name).map_or("–".to_owned(), |mib| format!("{mib:.1} MiB")));
    let first_claim =
        first_claim.map_or("–".to_owned(), |took: Duration| format!("{:.1} ms", took.as_secs_f64() * 1e3));
    println!("{rest:>10} {highest:>10} {first_claim:>22}");
    drop(kept);
}

/// A figure of this process, in MiB.
fn memory(name: &str) -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches(" kB").parse::<f64>().ok()? / 1024.0)
}
