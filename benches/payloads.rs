//! Large payloads: `cargo bench --bench payloads`, with `-- --quick` for fewer rounds, and with a word (`ways`, `claim`, `backlog`)
//! for a part of it.
//!
//! * **ways**: how SQLite is given a payload, and gives it back: as one value, or by incremental blob I/O. No relet in it; what
//!   it says is what `src/sql/payloads.rs` does.
//! * **enqueue**, **claim+ack**: relet beside a queue of one table, whose claim changes the status of a row that has the payload
//!   in it, so that SQLite writes the whole row anew.
//! * **backlog**: 1,024 payloads of 1 MiB through a process, and the most memory that it ever had.
//!
//! As in the bench `ratios` the sides take turns, each round gives one ratio, and the table has their median, smallest and
//! largest. A ratio is speed over speed: 2.0 is twice as many a second.

mod sides;

use std::io::{Read, sink};
use std::path::Path;
use std::time::Duration;

use relet::rusqlite::blob::ZeroBlob;
use relet::rusqlite::{Connection, MAIN_DB};
use relet::{Durability, Message, Store, Worker};

use sides::{Folder, connect, time, transaction};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Payloads of 1 MiB in the backlog.
const BACKLOG: usize = 1024;
/// The argument of the process that takes the backlog through.
const CHILD: &str = "--backlog-child";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, how, folder] = args.as_slice()
        && flag == CHILD
    {
        return child(how, Path::new(folder));
    }
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    let rounds = if args.iter().any(|arg| arg == "--quick") { 3 } else { 9 };
    let filter = args.iter().find(|arg| !arg.starts_with("--")).cloned().unwrap_or_default();
    let wanted = |name: &str| name.contains(&filter);
    if wanted("ways") {
        println!("{:<38} {:>10} {:>10}  blob : value", "ways", "blob/s", "value/s");
        for size in [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB] {
            ways_in(size, rounds);
            ways_out(size, rounds);
        }
        println!();
    }
    if wanted("enqueue") || wanted("claim+ack") {
        println!("{:<38} {:>10} {:>10}  relet : rewritten", "", "relet/s", "rewritten/s");
        for durability in [Durability::Normal, Durability::Full] {
            for size in [256, 16 * KIB, MIB] {
                queues(size, durability, rounds, wanted("enqueue"), wanted("claim+ack"));
            }
        }
        println!();
    }
    if wanted("backlog") {
        ["in memory", "streamed"].into_iter().for_each(backlog);
    }
}

/// `size` bytes that are no zeros.
fn bytes(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + at / 251) as u8 | 1).collect()
}

fn named(size: usize) -> String {
    match size {
        size if size >= MIB => format!("{} MiB", size / MIB),
        size if size >= KIB => format!("{} KiB", size / KIB),
        size => format!("{size} B"),
    }
}

/// How many of a size make a round: 16 MiB of them, but not too few and not too many.
fn count_of(size: usize) -> u32 {
    u32::try_from((16 * MIB / size).clamp(4, 1_000)).expect("fits")
}

/// Runs two sides in turn, once to warm up, and prints a row. A side returns how long `count` of its operations took.
fn compare(name: &str, count: u32, rounds: usize, mut a: impl FnMut() -> Duration, mut b: impl FnMut() -> Duration) {
    a();
    b();
    let speed = |took: Duration| f64::from(count) / took.as_secs_f64();
    let rounds: Vec<[f64; 2]> = (0..rounds).map(|_| [speed(a()), speed(b())]).collect();
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        (values[0], values[values.len() / 2], values[values.len() - 1])
    };
    let of = |at: usize| median(rounds.iter().map(|round| round[at]).collect()).1;
    let (smallest, middle, largest) = median(rounds.iter().map(|round| round[0] / round[1]).collect());
    println!("{name:<38} {:>10.0} {:>10.0}  {middle:.2} ({smallest:.2} to {largest:.2})", of(0), of(1));
}

fn table(path: &Path) -> Connection {
    let conn = connect(path, Durability::Normal);
    conn.execute_batch("CREATE TABLE payloads (message INTEGER PRIMARY KEY, payload BLOB NOT NULL) STRICT")
        .expect("the table is made");
    conn
}

fn put_value(conn: &Connection, payload: &[u8]) {
    transaction(conn, |conn| conn.prepare_cached("INSERT INTO payloads (payload) VALUES (?1)")?.execute([payload]));
}

fn put_blob(conn: &Connection, payload: &[u8]) {
    transaction(conn, |conn| {
        let room = ZeroBlob(i32::try_from(payload.len()).expect("fits"));
        conn.prepare_cached("INSERT INTO payloads (payload) VALUES (?1)")?.execute([room])?;
        let mut blob = conn.blob_open(MAIN_DB, c"payloads", c"payload", conn.last_insert_rowid(), false)?;
        blob.write_all_at(payload, 0)?;
        blob.close()
    });
}

fn ways_in(size: usize, rounds: usize) {
    let folder = Folder::new();
    let (payload, count) = (bytes(size), count_of(size));
    let side = |name: &str, put: fn(&Connection, &[u8])| {
        let conn = table(&folder.file(name));
        let payload = payload.clone();
        move || {
            conn.execute_batch("DELETE FROM payloads; PRAGMA wal_checkpoint(TRUNCATE)").expect("emptied");
            time(|| (0..count).for_each(|_| put(&conn, &payload)))
        }
    };
    let name = format!("ways: write {}", named(size));
    compare(&name, count, rounds, side("blob.db", put_blob), side("value.db", put_value));
}

fn ways_out(size: usize, rounds: usize) {
    let folder = Folder::new();
    let (payload, count) = (bytes(size), count_of(size));
    let conn = table(&folder.file("out.db"));
    (0..count).for_each(|_| put_value(&conn, &payload));
    conn.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("checkpointed");
    let blob = || {
        time(|| {
            for id in 1..=i64::from(count) {
                let length = "SELECT length(payload) FROM payloads WHERE message = ?1";
                let length = conn.prepare_cached(length).and_then(|mut sql| sql.query_row([id], |row| row.get(0)));
                let mut read =
                    vec![0; length.map(|length: i64| usize::try_from(length).expect("fits")).expect("it is there")];
                let blob = conn.blob_open(MAIN_DB, c"payloads", c"payload", id, true);
                blob.and_then(|blob| blob.read_at_exact(&mut read, 0)).expect("read");
                assert_eq!((read.len(), read[size - 1]), (size, payload[size - 1]));
            }
        })
    };
    let value = || {
        time(|| {
            for id in 1..=i64::from(count) {
                let select = "SELECT payload FROM payloads WHERE message = ?1";
                let read = conn.prepare_cached(select).and_then(|mut sql| sql.query_row([id], |row| row.get(0)));
                let read: Vec<u8> = read.expect("it is there");
                assert_eq!((read.len(), read[size - 1]), (size, payload[size - 1]));
            }
        })
    };
    compare(&format!("ways: read {}", named(size)), count, rounds, blob, value);
}

/// The queue of one table. The payload comes before what a claim changes, and the row is written anew with it.
struct Rewritten(Connection);

impl Rewritten {
    fn open(path: &Path, durability: Durability) -> Rewritten {
        let conn = connect(path, durability);
        conn.execute_batch(
            "CREATE TABLE queue (id INTEGER PRIMARY KEY, payload BLOB NOT NULL, status TEXT NOT NULL) STRICT;
             CREATE INDEX queue_status ON queue (status, id)",
        )
        .expect("the schema runs");
        Rewritten(conn)
    }

    fn enqueue(&self, payload: &[u8]) {
        transaction(&self.0, |conn| {
            conn.prepare_cached("INSERT INTO queue (payload, status) VALUES (?1, 'pending')")?.execute([payload])
        });
    }

    fn turn(&self, size: usize) {
        let (id, payload) = transaction(&self.0, |conn| {
            let select = "SELECT id, payload FROM queue WHERE status = 'pending' ORDER BY id LIMIT 1";
            let found: (i64, Vec<u8>) =
                conn.prepare_cached(select)?.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            conn.prepare_cached("UPDATE queue SET status = 'processing' WHERE id = ?1")?.execute([found.0])?;
            Ok(found)
        });
        assert_eq!(payload.len(), size);
        transaction(&self.0, |conn| {
            conn.prepare_cached("DELETE FROM queue WHERE id = ?1 AND status = 'processing'")?.execute([id])
        });
    }

    fn empty_log(&self) {
        self.0.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("checkpointed");
    }
}

/// relet, with one worker.
struct Relet {
    store: Store,
    worker: Worker,
}

impl Relet {
    fn open(path: &Path, durability: Durability) -> Relet {
        let store = Store::options().durability(durability).open(path).expect("the store opens");
        let worker = store.worker("w").expect("the worker starts");
        Relet { store, worker }
    }

    fn enqueue(&self, payload: Vec<u8>) {
        self.store.queue("q").enqueue(payload).expect("enqueued");
    }

    fn turn(&self, size: usize) {
        let claim = self.worker.claim("q").expect("claimed").expect("there is one");
        assert_eq!(claim.payload().len(), size);
        claim.ack().expect("acked");
    }

    fn turn_streamed(&self, size: usize) {
        let claim = self.worker.claim_without_payload("q").expect("claimed").expect("there is one");
        assert_eq!(claim.write_payload_to(&mut sink()).expect("read"), size as u64);
        claim.ack().expect("acked");
    }
}

/// Both queues: enqueued in a round, and emptied again; each of the two is timed by itself.
fn queues(size: usize, durability: Durability, rounds: usize, enqueue: bool, turn: bool) {
    let folder = Folder::new();
    let (payload, count) = (bytes(size), count_of(size));
    let relet = Relet::open(&folder.file("relet.db"), durability);
    let rewritten = Rewritten::open(&folder.file("rewritten.db"), durability);
    let name = |what: &str| format!("{what} {}, {durability:?}", named(size));
    let fill_relet = || {
        let payloads: Vec<_> = (0..count).map(|_| payload.clone()).collect();
        let took = time(|| payloads.into_iter().for_each(|payload| relet.enqueue(payload)));
        relet.store.checkpoint().expect("checkpointed");
        took
    };
    let fill_rewritten = || {
        let took = time(|| (0..count).for_each(|_| rewritten.enqueue(&payload)));
        rewritten.empty_log();
        took
    };
    let drain = |turn: &dyn Fn(usize)| time(|| (0..count).for_each(|_| turn(size)));
    let (turn_relet, turn_rewritten) = (|size| relet.turn(size), |size| rewritten.turn(size));
    let turn_streamed = |size| relet.turn_streamed(size);
    if enqueue {
        let relet = || {
            let took = fill_relet();
            drain(&turn_relet);
            took
        };
        let rewritten = || {
            let took = fill_rewritten();
            drain(&turn_rewritten);
            took
        };
        compare(&name("enqueue"), count, rounds, relet, rewritten);
    }
    if turn {
        let rewritten = || {
            fill_rewritten();
            drain(&turn_rewritten)
        };
        let with = |turn: &dyn Fn(usize)| {
            fill_relet();
            drain(turn)
        };
        compare(&name("claim+ack"), count, rounds, || with(&turn_relet), rewritten);
        if size > KIB {
            compare(&name("claim+ack streamed"), count, rounds, || with(&turn_streamed), rewritten);
        }
    }
}

/// Takes 1 GiB through a process of its own.
fn backlog(how: &str) {
    let folder = Folder::new();
    let path = folder.file("backlog.db");
    let program = std::env::current_exe().expect("this program");
    let status = std::process::Command::new(program).args([CHILD, how]).arg(path).status().expect("it starts");
    assert!(status.success());
}

fn child(how: &str, path: &Path) {
    let streamed = how == "streamed";
    let relet = Relet::open(path, Durability::Normal);
    let start = peak();
    let payload = bytes(MIB);
    let queue = relet.store.queue("q");
    let enqueued = time(|| {
        for _ in 0..BACKLOG {
            if streamed {
                queue.enqueue_from(Message::new(""), payload.chain(&[][..])).expect("enqueued");
            } else {
                relet.enqueue(payload.clone());
            }
        }
    });
    let filled = peak();
    let drained = time(|| {
        for _ in 0..BACKLOG {
            if streamed { relet.turn_streamed(MIB) } else { relet.turn(MIB) }
        }
    });
    println!(
        "backlog of {} MiB, {how}: enqueue {:.0} MiB/s, claim+ack {:.0} MiB/s; memory at most {} MiB at the start, {} MiB after \
         the enqueues, {} MiB at the end",
        BACKLOG,
        BACKLOG as f64 / enqueued.as_secs_f64(),
        BACKLOG as f64 / drained.as_secs_f64(),
        start / KIB,
        filled / KIB,
        peak() / KIB,
    );
}

/// The most memory that this process has had, in KiB; 0 where the system does not tell.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
