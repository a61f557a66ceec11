//! What only another program can count: this one is run again, once with a count of messages and once with twice as many,
//! under valgrind or strace. The difference of the two is what so many messages take, whatever comes before and after.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use relet::Durability;

use super::work::{Mark, Marks, Operation, Who};
use crate::sides::Folder;

/// The first argument of a run that is counted.
pub const CHILD: &str = "counted";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// Instructions.
    Callgrind,
    /// System calls, by their names.
    Strace,
}

/// Counts by name, for each message.
pub type Counts = BTreeMap<String, f64>;

impl Tool {
    pub fn program(self) -> &'static str {
        match self {
            Tool::Callgrind => "valgrind",
            Tool::Strace => "strace",
        }
    }

    /// What this tool counts of an operation; an error says why it cannot.
    pub fn count(self, who: Who, operation: Operation, durability: Durability) -> Result<Counts, String> {
        let count = if operation.size() == 1 { 100 } else { 200 };
        let once = self.child(who, operation, durability, [count, 2 * count])?;
        let mut counts = Counts::new();
        for (name, twice) in self.child(who, operation, durability, [2 * count, 2 * count])? {
            let once = once.get(&name).copied().unwrap_or(0);
            counts.insert(name, (twice as f64 - once as f64) / count as f64);
        }
        Ok(counts)
    }

    fn child(
        self,
        who: Who,
        operation: Operation,
        durability: Durability,
        counts: [usize; 2],
    ) -> Result<BTreeMap<String, u64>, String> {
        let folder = Folder::new();
        let (file, found) = (folder.file("queue.db"), folder.file("found"));
        let mut command = Command::new(self.program());
        match self {
            Tool::Callgrind => {
                command.args(["--tool=callgrind", "--quiet"]).arg(argument("--callgrind-out-file=", &found))
            }
            Tool::Strace => command.args(["-f", "-c", "-o"]).arg(&found),
        };
        let place = |found: Option<usize>| found.expect("it is one of all").to_string();
        command
            .arg(std::env::current_exe().expect("this program has a path"))
            .args([CHILD, &place(Who::ALL.iter().position(|one| *one == who))])
            .arg(place(Operation::ALL.iter().position(|one| *one == operation)))
            .arg(if durability == Durability::Full { "full" } else { "normal" })
            .args(counts.map(|count| count.to_string()))
            .arg(&file);
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{}: {error}", self.program()))?;
        let text = std::fs::read_to_string(&found).unwrap_or_default();
        let read = match self {
            Tool::Callgrind => instructions(&text),
            Tool::Strace => calls(&text),
        };
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("it has counted nothing");
        if output.status.success() && !read.is_empty() { Ok(read) } else { Err(format!("{}: {last}", self.program())) }
    }
}

fn argument(name: &str, path: &Path) -> std::ffi::OsString {
    let mut argument = std::ffi::OsString::from(name);
    argument.push(path);
    argument
}

/// The sum that callgrind's file has at its end.
fn instructions(text: &str) -> BTreeMap<String, u64> {
    let total = text.lines().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    total.map(|total| ("instructions".to_owned(), total)).into_iter().collect()
}

/// Memory that libc's heap takes from the system and gives back: how often depends on which thread comes first at the start.
const MEMORY: [&str; 5] = ["brk", "madvise", "mmap", "mprotect", "munmap"];
/// How long the threads that start with a store are given to come to rest, also under valgrind.
const REST: Duration = Duration::from_millis(300);

/// strace's table: time, seconds, µs a call, calls, perhaps errors, and the name.
fn calls(text: &str) -> BTreeMap<String, u64> {
    let rows = text.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (name, calls) = (*fields.last()?, fields.get(3)?.parse().ok()?);
        (name != "total" && !MEMORY.contains(&name)).then(|| (name.to_owned(), calls))
    });
    rows.collect()
}

/// The run that is counted: ends this program with the last message, so that nothing that comes afterwards is counted.
pub fn child(args: &[String]) {
    let [who, operation, durability, count, room, path] = args else { panic!("these are not the arguments: {args:?}") };
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let durability = if durability == "full" { Durability::Full } else { Durability::Normal };
    let marks: Marks = Arc::new(|mark| match mark {
        Mark::Begin => std::thread::sleep(REST),
        Mark::End => std::process::exit(0),
    });
    let (who, operation) = (Who::ALL[number(who)], Operation::ALL[number(operation)]);
    who.run(&PathBuf::from(path), durability, operation, [number(count), number(room)], &marks);
    unreachable!("it has ended at the mark");
}
