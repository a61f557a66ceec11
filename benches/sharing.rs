//! Sharing commits: `cargo bench --bench sharing`, with `-- --quick` for fewer rounds.
//!
//! * **tickets**: one thread that lays down 64 operations before it waits for the first (`enqueue_deferred`, `ack_deferred`), beside
//!   one that waits for each. The ways take turns; a ratio is speed over speed.
//! * **fairness**: 16 threads that enqueue for a second: what the least served has, as a part of the mean.

mod sides;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use relet::{Durability, Settled, Store, Ticket, Worker};

use sides::{Folder, time};

/// Tickets that are outstanding at a time.
const WINDOW: usize = 64;
const PAYLOAD: [u8; 256] = [7; 256];
const THREADS: usize = 16;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    let rounds = if args.iter().any(|arg| arg == "--quick") { 3 } else { 9 };
    println!("{:<28} {:>12} {:>12}  tickets : waiting for each", "", "tickets/s", "each/s");
    for (durability, name, count) in [(Durability::Full, "full", 1_000), (Durability::Normal, "normal", 5_000)] {
        let folder = Folder::new();
        let store = Store::options().durability(durability).open(folder.file("queue.db")).unwrap();
        let worker = store.worker("w").unwrap();
        let mut enqueues = Vec::new();
        let mut acks = Vec::new();
        for _ in 0..rounds {
            let laid = time(|| enqueue_with_tickets(&store, count));
            let each = time(|| {
                (0..count).for_each(|_| assert!(!store.queue("q").enqueue(PAYLOAD.to_vec()).unwrap().existing()))
            });
            enqueues.push((count, laid, each));
            let laid = time(|| ack_with_tickets(&worker, count));
            let each = time(|| {
                (0..count).for_each(|_| assert_ne!(worker.claim("q").unwrap().unwrap().ack().unwrap(), Settled::Gone))
            });
            acks.push((count, laid, each));
        }
        say(&format!("enqueue, {name}"), enqueues);
        say(&format!("claim + ack, {name}"), acks);
    }
    println!("\n{:<28} {:>12} {:>12}", "fairness", "messages/s", "least : mean");
    for (durability, name) in [(Durability::Full, "full"), (Durability::Normal, "normal")] {
        let shares: Vec<_> = (0..rounds).map(|_| fairness(durability)).collect();
        let least = shares.iter().map(|(_, share)| *share).fold(f64::INFINITY, f64::min);
        let speed = shares.iter().map(|(speed, _)| speed).sum::<usize>() / rounds;
        println!("{:<28} {speed:>12} {least:>12.2}", format!("{THREADS} threads, {name}"));
    }
}

fn windowed<T>(count: usize, mut lay: impl FnMut() -> Ticket<T>) {
    let mut tickets = VecDeque::new();
    for _ in 0..count {
        tickets.push_back(lay());
        if tickets.len() == WINDOW {
            tickets.pop_front().unwrap().wait().unwrap();
        }
    }
    tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
}

fn enqueue_with_tickets(store: &Store, count: usize) {
    let queue = store.queue("q");
    windowed(count, || queue.enqueue_deferred(PAYLOAD.to_vec()).unwrap());
}

fn ack_with_tickets(worker: &Worker, count: usize) {
    windowed::<Settled>(count, || worker.claim("q").unwrap().unwrap().ack_deferred());
}

fn say(name: &str, rounds: Vec<(usize, Duration, Duration)>) {
    let mut ratios: Vec<_> = rounds.iter().map(|(_, laid, each)| each.as_secs_f64() / laid.as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    let speed = |span: fn(&(usize, Duration, Duration)) -> Duration| {
        let mut speeds: Vec<_> = rounds.iter().map(|round| round.0 as f64 / span(round).as_secs_f64()).collect();
        speeds.sort_by(f64::total_cmp);
        speeds[speeds.len() / 2]
    };
    let (least, median, most) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
    let (laid, each) = (speed(|round| round.1), speed(|round| round.2));
    println!("{name:<28} {laid:>12.0} {each:>12.0}  {median:.2} ({least:.2} to {most:.2})");
}

/// Messages a second of all threads, and what the least served has of the mean.
fn fairness(durability: Durability) -> (usize, f64) {
    let folder = Folder::new();
    let store = Store::options().durability(durability).open(folder.file("queue.db")).unwrap();
    let over = AtomicBool::new(false);
    let mut counts = Vec::new();
    std::thread::scope(|scope| {
        let enqueue = || {
            let mut count = 0usize;
            while !over.load(Ordering::Relaxed) {
                store.queue("q").enqueue(PAYLOAD.to_vec()).unwrap();
                count += 1;
            }
            count
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(enqueue)).collect();
        std::thread::sleep(Duration::from_secs(1));
        over.store(true, Ordering::Relaxed);
        counts.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
    });
    let all: usize = counts.iter().sum();
    (all, counts.iter().copied().min().unwrap_or(0) as f64 * THREADS as f64 / all as f64)
}
