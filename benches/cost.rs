//! What an operation costs, counted: `cargo bench --bench cost`, with `-- FILTER` for some operations only, and with `-- --full`
//! to count everything with durable commits.
//!
//! Speed changes with the machine and its neighbours; what is counted here does not, so a change of one page or of one per
//! cent of the instructions can be seen. Everything is for one message, on one thread, with payloads of 256 bytes, in a file
//! in which some hundreds more are ready, after a warm-up. Beside relet stand the two queues of benches/sides: raw (relet's
//! own tables and indexes, with the statements inlined) and bare (one table, one index).
//!
//! * **pages**: written to the log, and which table or index they belong to; (pointer map) is what incremental vacuum needs.
//! * **log bytes**: those pages, with the headers of the log.
//! * **instructions**: in user space, of all threads, counted by valgrind's callgrind.
//! * **system calls**: counted by strace, with durable commits. Those by which the heap gets its memory are left out.
//! * **allocations**, **bytes**: what Rust asks of the heap. SQLite's own allocations are in C, and not counted.
//!
//! Commits are not durable (`Durability::Normal`), except where system calls are counted, which shows the `fsync`, too.
//! "settle and claim" is relet's pool with one thread and a handler that does nothing; the others do the same in one commit.
//! Where valgrind or strace is missing, its figures are dashes, and the last line says so. All of it takes some minutes.
//!
//! Not counted is what relet does now and then, however many messages there are: checkpoints (as many as there are thousands
//! of pages), pruning (each second), looking for dead workers (every 25 ms).
//!
//! Pages and allocations are the same at each run. Three things can differ: instructions by up to a quarter of one per cent, most
//! by less than a tenth of that (hash tables with random keys); the system calls of the pool in the second decimal, since it
//! has other threads that start with it; and pages once the machine has been up for hours or weeks, by as much as a byte more
//! in the end of a lease can do. Instructions are those of one compiler and one processor: the C library chooses by the
//! processor how it copies and compares.

mod counts;
mod sides;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use relet::Durability;

use counts::heap;
use counts::log::{Log, Pages};
use counts::tools::{self, Tool};
use counts::work::{Mark, Marks, Operation, Who};
use sides::Folder;

/// One line of the table.
struct Row {
    operation: Operation,
    who: Who,
    /// `None` of a figure: it could not be counted.
    totals: [Option<f64>; 6],
    pages: BTreeMap<String, f64>,
    calls: BTreeMap<String, f64>,
}

const TOTALS: [&str; 6] = ["pages", "log bytes", "instructions", "system calls", "allocations", "bytes"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some((tools::CHILD, args)) = args.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return tools::child(args);
    }
    if !args.iter().any(|arg| arg == "--bench") {
        return; // `cargo test --all-targets`: it is enough that this compiles.
    }
    let durability = if args.iter().any(|arg| arg == "--full") { Durability::Full } else { Durability::Normal };
    let filter = args.iter().find(|arg| !arg.starts_with("--")).cloned().unwrap_or_default();
    let mut missing = BTreeMap::new();
    let mut rows = Vec::new();
    for operation in Operation::ALL.into_iter().filter(|operation| operation.name().contains(&filter)) {
        for who in Who::ALL {
            rows.push(row(operation, who, durability, &mut missing));
        }
    }
    println!("for one message, {durability:?} commits; system calls with Full commits\n");
    table("", &TOTALS, &rows, |row, at| row.totals[at]);
    let names = names(&rows, |row| &row.pages);
    table("pages of", &names, &rows, |row, at| row.pages.get(names[at]).copied());
    let names = self::names(&rows, |row| &row.calls);
    table("system calls", &names, &rows, |row, at| row.calls.get(names[at]).copied());
    missing.values().for_each(|why| println!("not counted (–): {why}"));
}

fn row(operation: Operation, who: Who, durability: Durability, missing: &mut BTreeMap<&str, String>) -> Row {
    let messages = if operation.size() == 1 { 200 } else { 1_000 };
    let (pages, [allocations, bytes]) = count_here(operation, who, durability, messages);
    let each = |figure: u64| figure as f64 / messages as f64;
    let mut run = |tool: Tool, durability| match missing.contains_key(tool.program()) {
        true => None,
        false => tool.count(who, operation, durability).map_err(|why| missing.insert(tool.program(), why)).ok(),
    };
    let instructions = run(Tool::Callgrind, durability).map(|counts| counts.values().sum());
    let mut calls = run(Tool::Strace, Durability::Full);
    if let Some(calls) = &mut calls {
        calls.retain(|_, count| count.abs() >= 0.005);
    }
    Row {
        operation,
        who,
        totals: [
            Some(each(pages.total())),
            Some(each(pages.bytes)),
            instructions,
            calls.as_ref().map(|calls| calls.values().sum()),
            Some(each(allocations)),
            Some(each(bytes)),
        ],
        pages: pages.by_name.into_iter().map(|(name, count)| (name, each(count))).collect(),
        calls: calls.unwrap_or_default(),
    }
}

/// What can be counted in this process: pages, and what Rust asks of the heap.
fn count_here(operation: Operation, who: Who, durability: Durability, messages: usize) -> (Pages, [u64; 2]) {
    let folder = Folder::new();
    let path = folder.file("queue.db");
    let state = Arc::new(Mutex::new((None, Pages::default(), [0, 0])));
    let marks: Marks = {
        let (state, path) = (state.clone(), path.clone());
        Arc::new(move |mark| {
            let now = heap::so_far();
            let mut state = state.lock();
            let (log, pages, heap) = &mut *state;
            match mark {
                Mark::Begin => {
                    *log = Some(Log::begin(&path));
                    *heap = heap::so_far();
                }
                Mark::End => {
                    *heap = std::array::from_fn(|at| now[at] - heap[at]);
                    *pages = log.take().map(Log::end).unwrap_or_default();
                }
            }
        })
    };
    who.run(&path, durability, operation, [messages, messages], &marks);
    let (_, pages, heap) = &*state.lock();
    (pages.clone(), *heap)
}

/// All names that the rows have, in their order.
fn names<'r>(rows: &'r [Row], of: impl Fn(&'r Row) -> &'r BTreeMap<String, f64>) -> Vec<&'r str> {
    let mut names: Vec<&str> = rows.iter().flat_map(|row| of(row).keys().map(String::as_str)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Prints the rows with these columns.
fn table(title: &str, columns: &[&str], rows: &[Row], figure: impl Fn(&Row, usize) -> Option<f64>) {
    let width = |column: &str| column.chars().count().max(7);
    print!("{title:<20} {:<5}", "");
    columns.iter().for_each(|column| print!("  {column:>0$}", width(column)));
    println!();
    for row in rows {
        print!("{:<20} {:<5}", if row.who == Who::Relet { row.operation.name() } else { "" }, row.who.name());
        for (at, column) in columns.iter().enumerate() {
            let text = figure(row, at).map_or("–".to_owned(), |figure| match figure {
                figure if figure.abs() >= 1_000.0 => format!("{figure:.0}"),
                figure => format!("{figure:.2}"),
            });
            print!("  {text:>0$}", width(column));
        }
        println!();
    }
    println!();
}
