//! relet beside raw rusqlite, as ratios: `cargo bench --bench ratios`, with `-- --quick [FILTER]` for a part in a hurry.
//!
//! Disks and neighbours change by the minute, so two figures that were taken apart say little about each other. Here all
//! sides take turns in short rounds (ABCABC…), each round gives one ratio, and the table shows their median, smallest
//! and largest.
//! A ratio is speed over speed: 2.0 is twice as many messages a second as the other side.

mod sides;

use std::time::Duration;

use relet::{Durability, Store};

use sides::bare::Bare;
use sides::raw::Raw;
use sides::{Backlog, Depth, Folder, Relet, Work, time_claims};

/// How long and how often each side runs.
#[derive(Clone, Copy)]
struct Pace {
    round: Duration,
    rounds: usize,
    million: i64,
}

const FULL: Pace = Pace { round: Duration::from_millis(120), rounds: 9, million: 1_000_000 };
const QUICK: Pace = Pace { round: Duration::from_millis(50), rounds: 5, million: 100_000 };

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    let pace = if args.iter().any(|arg| arg == "--quick") { QUICK } else { FULL };
    let filter = args.iter().find(|arg| !arg.starts_with("--")).cloned().unwrap_or_default();
    let wanted = |name: &str| name.contains(&filter);

    println!("speed over speed, median (smallest to largest) of {} rounds of {:?} a side\n", pace.rounds, pace.round);
    head("relet : bare");
    for (durability, name) in [(Durability::Full, "full"), (Durability::Normal, "normal")] {
        for work in [Work::Enqueue, Work::Turn, Work::EnqueueBatch, Work::TurnBatch] {
            for threads in if work.size() == 1 { &[1, 4, 16][..] } else { &[1][..] } {
                let name = format!("{}, {name}, {threads} thread{}", work.name(), if *threads == 1 { "" } else { "s" });
                if wanted(&name) {
                    throughput(&name, work, durability, *threads, pace);
                }
            }
        }
    }
    println!();
    head("relet : at 1000 ready");
    let more = |ready: i64| (Backlog::Ready, ready - 1_000);
    let million = pace.million;
    for (name, (backlog, count)) in [
        ("claim at 100 thousand ready".to_owned(), more(100_000)),
        (format!("claim at {million} ready"), more(million)),
        (format!("claim beside {million} delayed"), (Backlog::Delayed, million)),
        (format!("claim beside {million} deferred"), (Backlog::Deferred, million)),
        (format!("claim beside {million} done"), (Backlog::Done, million)),
        (format!("claim beside {million} dead"), (Backlog::Dead, million)),
        (format!("claim beside {million} grouped"), (Backlog::Grouped, million)),
        (format!("claim beside {million} gated"), (Backlog::Gated, million)),
    ] {
        if wanted(&name) {
            depth(&name, backlog, count, pace);
        }
    }
}

fn throughput(name: &str, work: Work, durability: Durability, threads: u64, pace: Pace) {
    let folder = Folder::new();
    let relet = Relet::open(&folder.file("relet.db"), Store::options().durability(durability));
    let raw = Raw::open(&folder.file("raw.db"), durability);
    let bare = Bare::open(&folder.file("bare.db"), durability);
    let mut relet = |count| work.time(&relet, threads, count);
    let mut raw = |count| work.time(&raw, threads, count);
    let mut bare = |count| work.time(&bare, threads, count);
    let mut speeds = alternate(pace, [&mut relet, &mut raw, &mut bare]);
    speeds.iter_mut().flatten().for_each(|speed| *speed *= work.size() as f64);
    let aim = match (durability, work, threads) {
        (Durability::Full, Work::Turn, 1) => "≥ 1.6",
        (Durability::Full, Work::Enqueue | Work::Turn, 16) => "≥ 5",
        (_, _, 1) => "≥ 0.77", // 1 : 1.3
        _ => "",
    };
    print(name, &speeds, [aim, ""]);
}

fn depth(name: &str, backlog: Backlog, count: i64, pace: Pace) {
    let small = Depth::new(1_000, Backlog::Ready, 0);
    let deep = Depth::new(1_000, backlog, count);
    let mut relet = |count| time_claims(&deep.relet, count);
    let mut raw = |count| time_claims(&deep.raw, count);
    let mut at_a_thousand = |count| time_claims(&small.relet, count);
    let speeds = alternate(pace, [&mut relet, &mut raw, &mut at_a_thousand]);
    print(name, &speeds, ["≥ 0.77", "≥ 0.67"]); // 1 : 1.3, 1 : 1.5
}

/// Runs the sides in turn and returns, of each round, the operations a second of each.
fn alternate<const N: usize>(pace: Pace, mut sides: [&mut dyn FnMut(u64) -> Duration; N]) -> Vec<[f64; N]> {
    // As many operations a round as fill its time: found once a side, which warms it up as well.
    let counts = sides.each_mut().map(|side| {
        let mut count = 16;
        loop {
            let took = side(count);
            if took >= pace.round / 4 {
                return ((count as f64 * pace.round.as_secs_f64() / took.as_secs_f64()) as u64).max(1);
            }
            count *= 2;
        }
    });
    (0..pace.rounds)
        .map(|_| std::array::from_fn(|at| counts[at] as f64 / sides[at](counts[at]).as_secs_f64()))
        .collect()
}

fn head(third: &str) {
    println!("{:<34} {:>8} {:>8}  {:<22} {:<8} {third:<22} aim", "", "relet/s", "raw/s", "relet : raw", "aim");
}

/// One row: the first side beside the second and the third, each with what is aimed at.
fn print(name: &str, rounds: &[[f64; 3]], aims: [&str; 2]) {
    let speed = |at: usize| median(rounds.iter().map(|round| round[at])).1;
    let ratio = |at: usize| {
        let (smallest, median, largest) = median(rounds.iter().map(|round| round[0] / round[at]));
        format!("{median:.2} ({smallest:.2} to {largest:.2})")
    };
    let [raw_aim, aim] = aims;
    let (relet, raw) = (speed(0), speed(1));
    println!("{name:<34} {relet:>8.0} {raw:>8.0}  {:<22} {raw_aim:<8} {:<22} {aim}", ratio(1), ratio(2));
}

/// The smallest, the median and the largest.
fn median(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    (values[0], values[values.len() / 2], values[values.len() - 1])
}
