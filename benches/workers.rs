//! The runtime: `cargo bench --bench workers`, with `-- --quick` in a hurry.
//!
//! Throughput of a pool beside threads that claim and ack in a loop by hand, and beside threads that claim 16 at a time and
//! ack them one by one (a prefetch), as ratios of sides that take turns. Then how long after the return of an enqueue a
//! handler starts that had nothing to do, and what CPU time an idle pool takes.

mod sides;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use relet::{Claim, Durability, Message, Store, Workers};
use sides::{Folder, time};

/// Handlers do nothing: what is measured is relet.
const PAYLOAD: usize = 256;
/// Messages that the prefetching side claims at once.
const PREFETCH: usize = 16;
/// Pauses between two enqueues when the wake-up is measured: long enough for everybody to fall asleep.
const QUIET: std::ops::Range<u64> = 2_000..12_000;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [role, path] = &args[..]
        && role == "enqueue"
    {
        return enqueue_when_told(path);
    }
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    throughput(quick);
    wake_up(if quick { 100 } else { 1_000 });
    idle(Duration::from_secs(if quick { 2 } else { 20 }));
}

fn throughput(quick: bool) {
    let rounds = if quick { 3 } else { 7 };
    println!("messages a second, medians of {rounds} rounds; pool : side as median (smallest to largest)\n");
    println!("{:<26} {:>8} {:>8} {:>9}   {:<22} pool : prefetch", "", "pool", "by hand", "prefetch", "pool : by hand");
    for (durability, name) in [(Durability::Full, "full"), (Durability::Normal, "normal")] {
        for threads in [1, 4, 16] {
            let count = if quick { 1_000 } else { 4_000 };
            let speeds: Vec<[f64; 3]> = (0..rounds)
                .map(|_| {
                    [pool, by_hand, prefetch].map(|side| {
                        let folder = Folder::new();
                        let store =
                            Store::options().durability(durability).open(folder.file("q.db")).expect("it opens");
                        let messages = (0..count).map(|_| Message::new(vec![7; PAYLOAD]));
                        store.queue("q").enqueue_all(messages).expect("there is room");
                        f64::from(count) / side(&store, threads).as_secs_f64()
                    })
                })
                .collect();
            let speed = |at: usize| median(speeds.iter().map(|round| round[at])).1;
            let ratio = |at: usize| {
                let (smallest, median, largest) = median(speeds.iter().map(|round| round[0] / round[at]));
                format!("{median:.2} ({smallest:.2} to {largest:.2})")
            };
            println!(
                "{:<26} {:>8.0} {:>8.0} {:>9.0}   {:<22} {}",
                format!("{name}, {threads} handlers"),
                speed(0),
                speed(1),
                speed(2),
                ratio(1),
                ratio(2)
            );
        }
    }
}

fn pool(store: &Store, threads: usize) -> Duration {
    time(|| {
        let workers = Workers::builder().concurrency(threads).drain(true).queue("q", |_: &Claim| ()).start(store);
        assert!(workers.expect("it starts").wait(Duration::from_secs(600)));
    })
}

fn by_hand(store: &Store, threads: usize) -> Duration {
    loops(store, threads, 1)
}

fn prefetch(store: &Store, threads: usize) -> Duration {
    loops(store, threads, PREFETCH)
}

fn loops(store: &Store, threads: usize, at_once: usize) -> Duration {
    let worker = store.worker("w").expect("the label is free");
    let run = || {
        loop {
            let claims = worker.claim_batch("q", at_once).expect("the store is well");
            if claims.is_empty() {
                break;
            }
            for claim in claims {
                claim.ack().expect("it is held");
            }
        }
    };
    time(|| std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run)))))
}

/// From the return of an enqueue to the start of its handler, which has nothing else to do.
fn wake_up(rounds: usize) {
    println!(
        "\nwake-up of an idle pool of 4, µs from the return of enqueue to the start of the handler, {rounds} rounds\n"
    );
    println!("{:<26} {:>8} {:>8} {:>8}", "", "p50", "p99", "max");
    let folder = Folder::new();
    let path = folder.file("q.db");
    let store = Store::open(&path).expect("it opens");
    let (started, starts) = mpsc::channel();
    let handler = move |_: &Claim| started.send(now());
    let workers = Workers::builder().concurrency(4).queue("q", handler).start(&store).expect("it starts");

    let within = (0..rounds).map(|_| {
        std::thread::sleep(Duration::from_micros(fastrand::u64(QUIET)));
        store.queue("q").enqueue(vec![7; PAYLOAD]).expect("there is room");
        let returned = now();
        since(returned, starts.recv().expect("it is handled"))
    });
    print("in the same process", within.collect());

    let mut child = Command::new(std::env::current_exe().expect("this program has a path"))
        .arg("enqueue")
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it can be run again");
    let mut tell = child.stdin.take().expect("it is piped");
    let mut hear = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    let across = (0..rounds).map(|_| {
        std::thread::sleep(Duration::from_micros(fastrand::u64(QUIET)));
        writeln!(tell).expect("the child listens");
        let returned = hear.next().expect("it answers").expect("it can be read");
        since(returned.parse().expect("it is a number"), starts.recv().expect("it is handled"))
    });
    print("from another process", across.collect());
    drop(tell);
    child.wait().expect("it ends");
    assert!(workers.stop(Duration::from_secs(10)).interrupted.is_empty());
}

/// The other process: enqueues at each line, and says when that had returned.
fn enqueue_when_told(path: &str) {
    let store = Store::open(path).expect("it opens");
    for line in std::io::stdin().lines() {
        line.expect("it can be read");
        store.queue("q").enqueue(vec![7; PAYLOAD]).expect("there is room");
        println!("{}", now());
    }
}

/// Unix µs: the two processes have no other clock in common.
#[allow(clippy::disallowed_methods, reason = "a bench measures time")]
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
    since.as_micros() as u64
}

/// A handler may start before the enqueue has returned: its caller is answered after the commit as well.
fn since(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64
}

fn print(name: &str, mut latencies: Vec<f64>) {
    latencies.sort_by(f64::total_cmp);
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    println!("{name:<26} {:>8.0} {:>8.0} {:>8.0}", at(0.5), at(0.99), at(1.0));
}

/// CPU time of the whole process while its pools have nothing to do.
fn idle(span: Duration) {
    println!("\nCPU time of a process with an idle pool, over {span:?}\n");
    for threads in [1, 16] {
        let folder = Folder::new();
        let store = Store::open(folder.file("q.db")).expect("it opens");
        let builder = Workers::builder().concurrency(threads).queue("q", |_: &Claim| ());
        let workers = builder.start(&store).expect("it starts");
        std::thread::sleep(Duration::from_millis(500));
        let before = cpu_time();
        std::thread::sleep(span);
        match before.zip(cpu_time()) {
            Some((before, after)) => {
                let share = (after - before).as_secs_f64() / span.as_secs_f64();
                println!("{:<26} {:.2} % of a core", format!("{threads} handlers"), share * 100.0);
            }
            None => println!("{threads} handlers: this system does not tell"),
        }
        assert!(workers.stop(Duration::from_secs(10)).interrupted.is_empty());
    }
}

/// What this process has run, where Linux tells it: in hundredths of a second, for user and system.
fn cpu_time() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let fields = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().ok());
    Some(Duration::from_millis(10 * fields.sum::<Option<u64>>()?))
}

/// The smallest, the median and the largest.
fn median(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    (values[0], values[values.len() / 2], values[values.len() - 1])
}
