//! What idle neighbours cost: `cargo bench --bench herd`, with `-- --quick` in a hurry.
//!
//! * A process that works on one queue with four handlers which do nothing, beside idle processes, idle pools of its own, and with 500
//!   queues in place of one: its speed, over that without any of it in the same round. Durability Normal, since it is there that
//!   everything costs most.
//! * 50 processes that open one store at the same time: how many are there in the end, and after how long.
//! * How often a process wakes whose pool has had nothing to do for a while (Linux).

mod sides;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use relet::{Claim, Durability, Options, Store, Workers};
use sides::{Folder, PAYLOAD, time};

const HANDLERS: usize = 4;
const NEIGHBOURS: [usize; 4] = [1, 5, 20, 50];
const QUEUES: usize = 500;
/// After so long a neighbour that has started is idle.
const SETTLED: Duration = Duration::from_secs(1);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [role, path, number] = &args[..]
        && role == "idle"
    {
        return idle(Path::new(path), number);
    }
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    speeds(if quick { 3 } else { 7 }, 30_000);
    together(50);
    wake_ups(Duration::from_secs(if quick { 15 } else { 60 }));
}

fn options() -> Options {
    Store::options().durability(Durability::Normal)
}

/// A neighbour: waits for messages of a queue of its own until its stdin is closed.
fn idle(path: &Path, number: &str) {
    let store = options().busy_wait(Duration::from_secs(30)).open(path).expect("it opens");
    let pool = Workers::builder().label(format!("idle-{number}")).queue("other", |_: &Claim| ());
    let pool = pool.start(&store).expect("it starts");
    println!("ready");
    let _ = std::io::stdin().read(&mut [0]);
    assert!(pool.stop(Duration::from_secs(30)).interrupted.is_empty());
}

fn neighbours(path: &Path, count: usize) -> Vec<Child> {
    let start = |number: usize| {
        Command::new(std::env::current_exe().expect("this program has a path"))
            .arg("idle")
            .arg(path)
            .arg(number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be run again")
    };
    (0..count).map(start).collect()
}

/// Whether it has come so far that it waits for messages.
fn is_ready(child: &mut Child) -> bool {
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.as_mut().expect("it is piped"));
    said.read_line(&mut line).is_ok() && line == "ready\n"
}

fn end(children: Vec<Child>) {
    for mut child in children {
        drop(child.stdin.take());
        assert!(child.wait().expect("it ends").success());
    }
}

fn speeds(rounds: usize, count: usize) {
    let mut found: Vec<(String, Vec<f64>)> = Vec::new();
    let mut note = |round: usize, at: usize, name: String, speed: f64| match round {
        0 => found.push((name, vec![speed])),
        _ => found[at].1.push(speed),
    };
    for round in 0..rounds {
        note(round, 0, "alone".into(), busy(0, 0, 1, count));
        for (at, processes) in NEIGHBOURS.into_iter().enumerate() {
            note(round, at + 1, format!("{processes} idle processes"), busy(processes, 0, 1, count));
        }
        note(round, 5, "50 idle pools in the process".into(), busy(0, 50, 1, count));
        note(round, 6, format!("a pool of {QUEUES} queues"), busy(0, 0, QUEUES, count));
    }
    println!("{HANDLERS} handlers that do nothing, medians of {rounds} rounds\n");
    println!("{:<30} {:>10}   over alone", "", "messages/s");
    for (name, speeds) in &found {
        let ratios = speeds.iter().zip(&found[0].1).map(|(speed, alone)| speed / alone);
        let (least, ratio, most) = median(ratios);
        println!("{name:<30} {:>10.0}   {ratio:.2} ({least:.2} to {most:.2})", median(speeds.iter().copied()).1);
    }
}

/// Messages a second.
fn busy(processes: usize, pools: usize, queues: usize, count: usize) -> f64 {
    let folder = Folder::new();
    let path = folder.file("queue.db");
    let store = options().open(&path).expect("it opens");
    let names: Vec<String> = (0..queues).map(|number| format!("busy-{number}")).collect();
    for name in &names {
        store.queue(name).enqueue_all(std::iter::repeat_n(PAYLOAD, count / queues)).expect("there is room");
    }
    store.queue("other").enqueue(PAYLOAD).expect("there is room");
    store.worker("first").expect("the label is free").claim("other").expect("it can be claimed");
    let mut children = neighbours(&path, processes);
    children.iter_mut().for_each(|child| assert!(is_ready(child)));
    let idle = |number: usize| {
        let pool = Workers::builder().label(format!("pool-{number}")).queue("other", |_: &Claim| ());
        pool.start(&store).expect("it starts")
    };
    let pools: Vec<_> = (0..pools).map(idle).collect();
    std::thread::sleep(SETTLED);
    let taken = time(|| {
        let mut pool = Workers::builder().concurrency(HANDLERS).drain(true);
        for name in &names {
            pool = pool.queue(name, |_: &Claim| ());
        }
        assert!(pool.start(&store).expect("it starts").wait(Duration::from_secs(600)));
    });
    end(children);
    pools.into_iter().for_each(|pool| assert!(pool.stop(Duration::from_secs(30)).interrupted.is_empty()));
    (count / queues * queues) as f64 / taken.as_secs_f64()
}

fn together(count: usize) {
    let folder = Folder::new();
    let path = folder.file("queue.db");
    let mut there = Vec::new();
    let taken = time(|| {
        for mut child in neighbours(&path, count) {
            match is_ready(&mut child) {
                true => there.push(child),
                false => drop(child.wait()),
            }
        }
    });
    println!("\nof {count} processes that open a new store together, {} are there after {taken:.1?}", there.len());
    end(there);
}

/// Voluntary changes of context of all threads: as often as they go to sleep.
fn wake_ups(quiet: Duration) {
    let folder = Folder::new();
    let path = folder.file("queue.db");
    let mut children = neighbours(&path, 1);
    assert!(is_ready(&mut children[0]));
    std::thread::sleep(quiet);
    let pid = children[0].id();
    const SPAN: Duration = Duration::from_secs(10);
    match switches(pid) {
        Some(before) => {
            std::thread::sleep(SPAN);
            let woken = switches(pid).expect("it lives").saturating_sub(before);
            println!("an idle process wakes {:.1} times a second after {quiet:?}", woken as f64 / SPAN.as_secs_f64());
        }
        None => println!("how often an idle process wakes is not told here"),
    }
    end(children);
}

fn switches(pid: u32) -> Option<u64> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let status = std::fs::read_to_string(thread.ok()?.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        sum += line.trim().parse::<u64>().ok()?;
    }
    Some(sum)
}

/// The smallest, the median and the largest.
fn median(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    (values[0], values[values.len() / 2], values[values.len() - 1])
}
