//! What a message costs inside SQLite: the statements on its way, and the steps that SQLite's machine takes for each. A test,
//! and no code: [`COSTS`] is what the code takes as it is, so that no change takes more unseen.
//!
//! The steps are those of the SQLite that is compiled in; another version may take a few more or less.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write;

use rusqlite::StatementStatus;
use rusqlite::trace::{TraceEvent, TraceEventCodes};

use crate::claim::Claim;
use crate::sql::settle::{Known, Settle};
use crate::store::Store;

/// A statement, how often it runs, and the steps of all these runs.
type Line<'a> = (&'a str, u32, u32);

/// Of each operation its statements, in the order in which they first run. Which ones and how often is exact, of the steps it
/// is the most. After a change that is meant, the test that fails prints this table anew.
#[rustfmt::skip]
const COSTS: &[(&str, &[Line<'_>])] = &[
    ("enqueue", &[ // 6 statements, 178 steps
        ("begin immediate", 1, 5),
        ("select relet_queues", 1, 46),
        ("insert relet_messages", 1, 63),
        ("update relet_counters", 1, 34),
        ("update relet_counters", 1, 27),
        ("commit", 1, 3),
    ]),
    ("claim", &[ // 5 statements, 186 steps
        ("begin immediate", 1, 5),
        ("select relet_queues", 1, 70),
        ("select relet_messages by relet_lines", 1, 38),
        ("update relet_messages", 1, 70),
        ("commit", 1, 3),
    ]),
    ("ack", &[ // 4 statements, 78 steps
        ("begin immediate", 1, 5),
        ("delete relet_messages", 1, 36),
        ("update relet_counters", 1, 34),
        ("commit", 1, 3),
    ]),
    ("settle and claim", &[ // 7 statements, 256 steps
        ("begin immediate", 1, 5),
        ("delete relet_messages", 1, 36),
        ("select relet_queues", 1, 70),
        ("select relet_messages by relet_lines", 1, 38),
        ("update relet_messages", 1, 70),
        ("update relet_counters", 1, 34),
        ("commit", 1, 3),
    ]),
    ("a message's life", &[ // 15 statements, 442 steps
        ("begin immediate", 3, 15),
        ("select relet_queues", 1, 46),
        ("insert relet_messages", 1, 63),
        ("update relet_counters", 2, 68),
        ("update relet_counters", 1, 27),
        ("commit", 3, 9),
        ("select relet_queues", 1, 70),
        ("select relet_messages by relet_lines", 1, 38),
        ("update relet_messages", 1, 70),
        ("delete relet_messages", 1, 36),
    ]),
    ("enqueue, 100 a batch", &[ // 105 statements, 6415 steps
        ("begin immediate", 1, 5),
        ("select relet_queues", 1, 46),
        ("insert relet_messages", 100, 6300),
        ("update relet_counters", 1, 34),
        ("update relet_counters", 1, 27),
        ("commit", 1, 3),
    ]),
    ("claim, 100 a batch", &[ // 104 statements, 9591 steps
        ("begin immediate", 1, 5),
        ("select relet_queues", 1, 70),
        ("select relet_messages by relet_lines", 1, 2513),
        ("update relet_messages", 100, 7000),
        ("commit", 1, 3),
    ]),
    ("ack, 100 a batch", &[ // 203 statements, 4842 steps
        ("begin immediate", 1, 5),
        ("select relet_messages", 100, 1200),
        ("delete relet_messages", 100, 3600),
        ("update relet_counters", 1, 34),
        ("commit", 1, 3),
    ]),
];

/// A [`Line`] that was found.
type Found = (String, u32, u32);

/// A run of a statement: its text, and its steps.
type Run = (String, u32);

thread_local! {
    static RUNS: RefCell<Vec<Run>> = const { RefCell::new(Vec::new()) };
    /// The steps of a statement in all its runs so far: SQLite only tells the sum.
    static STEPS: RefCell<HashMap<String, u32>> = RefCell::default();
}

fn note(event: TraceEvent<'_>) {
    let TraceEvent::Profile(statement, _) = event else { return };
    let text = statement.sql().into_owned();
    let sum = u32::try_from(statement.get_status(StatementStatus::VmStep)).unwrap_or(0);
    let before = STEPS.with_borrow_mut(|steps| steps.insert(text.clone(), sum)).unwrap_or(0);
    let is_prepared_anew = statement.get_status(StatementStatus::Run) <= 1;
    let steps = if is_prepared_anew { sum } else { sum - before };
    RUNS.with_borrow_mut(|runs| runs.push((text, steps)));
}

/// What an operation runs. Now and then relet does something more (it looks for dead workers, it prunes); so the operation is
/// repeated, and what most of its repetitions run is what counts.
fn usual(mut operation: impl FnMut()) -> Vec<Run> {
    const REPETITIONS: usize = 20;
    let mut seen: HashMap<Vec<Run>, usize> = HashMap::new();
    for _ in 0..REPETITIONS {
        RUNS.take();
        operation();
        *seen.entry(RUNS.take()).or_default() += 1;
    }
    let (runs, times) = seen.into_iter().max_by_key(|(_, times)| *times).unwrap();
    assert!(times > REPETITIONS / 2, "an operation is the same most of the time: {times} of {REPETITIONS}");
    runs
}

/// The runs of each statement, taken together: its name, how often, and the steps.
fn lines(runs: &[Run]) -> Vec<Found> {
    let mut lines: Vec<(&str, u32, u32)> = Vec::new();
    for (text, steps) in runs {
        match lines.iter_mut().find(|line| line.0 == text) {
            Some(line) => (line.1, line.2) = (line.1 + 1, line.2 + steps),
            None => lines.push((text, 1, *steps)),
        }
    }
    lines.into_iter().map(|(text, times, steps)| (name(text), times, steps)).collect()
}

/// A statement's verb, and its table and index where it has them: "select relet_messages by relet_ready".
fn name(text: &str) -> String {
    let text = text.to_lowercase();
    let mut depth = 0;
    // What stands in brackets is another statement's, or a list.
    let outside = text.chars().filter(|c| {
        depth += i32::from(*c == '(') - i32::from(*c == ')');
        depth == 0
    });
    let outside: String = outside.collect();
    let words: Vec<&str> = outside.split_whitespace().collect();
    let after = |keyword: &str| {
        let at = words.iter().position(|word| *word == keyword)?;
        words.get(at + 1).map(|table| table.trim_start_matches("main."))
    };
    let Some(table) = ["into", "update", "from"].into_iter().find_map(after) else { return words.join(" ") };
    let index = after("by").filter(|_| words.contains(&"indexed"));
    format!("{} {table}{}", words[0], index.map(|index| format!(" by {index}")).unwrap_or_default())
}

/// Every operation, and what it runs.
fn found() -> Vec<(&'static str, Vec<Found>)> {
    const MANY: usize = 100;
    let store = Store::open_in_memory().unwrap();
    let (queue, worker) = (store.queue("mail"), store.worker("mailer-1").unwrap());
    let enqueue = || _ = queue.enqueue([7; 256].as_slice()).unwrap();
    let enqueue_many = || drop(queue.enqueue_all(std::iter::repeat_n([7; 256].as_slice(), MANY)).unwrap());
    let claim = || worker.claim("mail").unwrap().unwrap();
    let claim_many = || worker.claim_batch("mail", MANY).unwrap();
    let ack_many = |claims: &[Claim]| {
        let all = claims.iter().map(|claim| (claim.receipt(), Settle::Ack));
        store.settle_all(all).unwrap().into_iter().for_each(|settled| _ = settled.unwrap());
    };
    (0..50).for_each(|_| enqueue_many());
    let watch = TraceEventCodes::SQLITE_TRACE_PROFILE;
    // In memory, whoever reads has the writer's connection.
    let traced = store.read(|conn, _| {
        conn.trace_v2(watch, Some(note));
        Ok(())
    });
    traced.unwrap();
    for _ in 0..3 {
        enqueue();
        claim().ack().unwrap();
    }

    let mut held: Vec<Claim> = claim_many();
    let mut batches: Vec<Vec<Claim>> = (0..20).map(|_| claim_many()).collect();
    let first = claim();
    let (mut receipt, mut known) = (first.receipt(), first.known());
    let step = || {
        let step = worker.step(Some((receipt, known, Settle::Ack)), vec!["mail".into()], Vec::new).unwrap();
        step.settled.unwrap().unwrap();
        let (_, taken) = step.taken.unwrap();
        (receipt, known) = (taken.receipt, Known::of(&taken.record));
    };
    vec![
        ("enqueue", lines(&usual(enqueue))),
        ("claim", lines(&usual(|| drop(claim())))),
        ("ack", lines(&usual(|| _ = held.pop().unwrap().ack().unwrap()))),
        ("settle and claim", lines(&usual(step))),
        (
            "a message's life",
            lines(&usual(|| {
                enqueue();
                claim().ack().unwrap();
            })),
        ),
        ("enqueue, 100 a batch", lines(&usual(enqueue_many))),
        ("claim, 100 a batch", lines(&usual(|| drop(claim_many())))),
        ("ack, 100 a batch", lines(&usual(|| ack_many(&batches.pop().unwrap())))),
    ]
}

#[test]
fn an_operation_runs_no_more_statements_and_steps_than_it_did() {
    let found = found();
    let mut wrong = String::new();
    for (operation, lines) in &found {
        let known = COSTS.iter().find(|(name, _)| name == operation).map_or(&[][..], |(_, lines)| lines);
        let found: Vec<Line<'_>> = lines.iter().map(|line| (line.0.as_str(), line.1, line.2)).collect();
        let runs = |lines: &[Line<'_>]| lines.iter().map(|line| (line.0.to_owned(), line.1)).collect::<Vec<_>>();
        if runs(known) != runs(&found) {
            let only = |these: &[Line<'_>], those: &[Line<'_>]| {
                let those = runs(those);
                runs(these).into_iter().filter(|run| !those.contains(run)).collect::<Vec<_>>()
            };
            let (new, gone) = (only(&found, known), only(known, &found));
            writeln!(wrong, "{operation}: runs other statements, or in another order: {new:?} in place of {gone:?}")
                .unwrap();
            continue;
        }
        for ((name, _, most), (_, _, steps)) in known.iter().zip(&found) {
            if steps > most {
                writeln!(wrong, "{operation}: {name} takes {steps} steps, not {most}").unwrap();
            }
        }
    }
    let mut table = String::new();
    for (operation, lines) in &found {
        let (times, steps) = lines.iter().fold((0, 0), |sums, line| (sums.0 + line.1, sums.1 + line.2));
        writeln!(table, "    ({operation:?}, &[ // {times} statements, {steps} steps").unwrap();
        lines.iter().for_each(|line| writeln!(table, "        {line:?},").unwrap());
        writeln!(table, "    ]),").unwrap();
    }
    assert!(wrong.is_empty(), "\n{wrong}\nCOSTS as it would be now:\n{table}");
}
