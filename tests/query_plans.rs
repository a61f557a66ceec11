//! Every statement finds its rows by an index: what a claim costs does not depend on what else lies in the file.
//!
//! `query_plans.txt` holds the plans of the way that a message takes. After a change that is meant, write it anew with
//! `RELET_WRITE_PLANS=1 cargo test --all-features --test query_plans`, and read the difference.
#![cfg(feature = "testing")]

mod support;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use relet::rusqlite::config::DbConfig;
use relet::rusqlite::{Connection, Statement, StatementStatus};
use relet::{Clock, Message, Status, Store};
use support::{Dir, number, plain, text};

/// A statement of src/sql.
struct Sql {
    /// "sql/claim.rs PROMOTE", or "sql/doctor.rs CHECKS 3".
    name: String,
    text: String,
}

impl Sql {
    fn is_of(&self, files: &[&str]) -> bool {
        files.iter().any(|file| self.name.starts_with(&format!("sql/{file}.rs ")))
    }
}

/// The files whose statements run for every message: enqueue, claim (which looks for dead workers), settle, and what they
/// lead to.
const HOT: [&str; 16] = [
    "record",
    "counters",
    "details",
    "finished",
    "keys",
    "enqueue",
    "claim",
    "gates",
    "lines",
    "settle",
    "groups",
    "retry_queue",
    "queues",
    "dead",
    "workers",
    "mod",
];

/// Statements that read a whole index or table, and why they may.
const SCANS: [(&str, &str); 26] = [
    ("sql/meta.rs clocks SQL", "a dozen rows, in one page"),
    ("sql/repair.rs", "reads everything, and says so"),
    ("sql/checks.rs", "reads everything, and says so"),
    ("sql/mend.rs", "after a damaged row was met, or in a repair"),
    ("sql/doctor.rs", "reads everything, and says so"),
    ("sql/look.rs stats SQL", "one row for each queue"),
    ("sql/look.rs retry_queue SQL", "a listing of the whole retry queue, by due time over all queues"),
    ("sql/look.rs deaths SQL", "the names of the queues, where these are few"),
    ("sql/look.rs stuck SQL", "only what is held or deferred: not what waits, not what is finished"),
    ("sql/gates.rs held SQL", "its own list of what has passed a gate and holds, no longer than the gate's limit"),
    (
        "sql/gates.rs over SQL",
        "its own list of what has passed a gate, no longer than its limit and what may be taken back",
    ),
    ("sql/gates.rs empty_all SQL", "after a restart of the machine: only the gates"),
    ("sql/gates.rs all SQL", "one row for each gate and queue"),
    ("sql/counters.rs of HELD", "only what is held"),
    ("sql/ended.rs mark_all SQL", "after a restart of the machine: only the marks"),
    ("sql/ended.rs any SQL", "only whether there are marks"),
    ("sql/ended.rs find MARKS", "only the marks"),
    ("sql/ended.rs find QUEUES", "at most a bounded number of queues"),
    ("sql/ended.rs find HELD", "at most a bounded number under the write lock, all only by a reader"),
    ("sql/ended.rs find KEPT", "at most a bounded number under the write lock, all only by a reader"),
    ("sql/meta.rs void_all_claims WORKERS", "after a restart of the machine: only the workers"),
    ("sql/meta.rs exists SQL", "the database's own list of tables"),
    ("sql/meta.rs is_empty SQL", "the database's own list of tables"),
    ("sql/schedules.rs", "only the schedules"),
    ("sql/workers.rs all SQL", "only the workers that run"),
    ("sql/workers.rs holdings SQL", "a listing: only what is held or deferred"),
];

/// Statements that may sort, and why. None is on the way of a message.
const SORTS: [(&str, &str); 11] = [
    ("sql/repair.rs", "reads everything, and says so"),
    ("sql/checks.rs", "reads everything, and says so"),
    ("sql/mend.rs", "after a damaged row was met, or in a repair"),
    ("sql/doctor.rs", "reads everything, and says so"),
    ("sql/dead.rs page SQL", "a step of a redrive of all dead letters, by id"),
    ("sql/look.rs list FINISHED", "a page of one status, by id"),
    ("sql/look.rs retry_queue SQL", "a listing"),
    ("sql/look.rs stuck SQL", "a listing of what should be nothing"),
    ("sql/look.rs stats SQL", "one row for each queue, by name"),
    ("sql/schedules.rs due SQL", "only the schedules, by their ticks"),
    ("sql/workers.rs holdings SQL", "a listing, by worker"),
];

fn allowed(list: &[(&str, &str)], name: &str) -> bool {
    list.iter().any(|(begins, _)| name.starts_with(begins))
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The literal that `text` begins with, without its quotes, as the compiler reads it.
fn literal(text: &str) -> (String, usize) {
    assert!(text.starts_with('"'), "{text:.40}");
    let mut value = String::new();
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, at + 1),
            '\\' => match chars.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, '\n')) => panic!("a continued line: {text:.60}"),
                Some((_, other)) => value.push(other),
                None => break,
            },
            c => value.push(c),
        }
    }
    panic!("a literal without an end: {text:.60}");
}

/// What the macro of this name, in the first of these sources that has it, puts before what it is given.
fn head(name: &str, sources: [&str; 2]) -> String {
    let begins = format!("macro_rules! {name} ");
    let from = sources.iter().find_map(|source| source.find(&begins).map(|at| &source[at..]));
    let from = from.unwrap_or_else(|| panic!("where is the macro {name}?"));
    literal(&from[from.find('"').unwrap()..]).0
}

/// Every statement that src/sql holds as a constant.
fn statements() -> Vec<Sql> {
    let module = std::fs::read_to_string(src().join("sql/record.rs")).unwrap();
    let mut all = Vec::new();
    let mut files: Vec<_> = std::fs::read_dir(src().join("sql"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    for file in files {
        let text = std::fs::read_to_string(src().join("sql").join(&file)).unwrap();
        let mut function = String::new();
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            let code = line.trim_start();
            if let Some((before, after)) = line.split_once("fn ")
                && !code.starts_with("//")
                && before.chars().all(|c| c.is_ascii_lowercase() || "() ".contains(c))
            {
                function = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            }
            let constant = code.strip_prefix("const ").and_then(|rest| rest.split_once(": &"));
            if let Some((name, rest)) = constant {
                let begins = at + line.len() - rest.len();
                let value = text[begins..].split_once('=').map(|(_, value)| value.trim_start()).unwrap_or_default();
                if rest.starts_with("str") {
                    let statement = match value.split_once("!(") {
                        _ if value.starts_with('"') => literal(value).0,
                        Some((select, tail)) if select.starts_with("select_") => {
                            format!("{}{}", head(select, [&text, &module]), literal(tail.trim_start()).0)
                        }
                        _ => panic!("sql/{file} {name}: how is this statement made? Teach this test"),
                    };
                    all.push(Sql { name: format!("sql/{file} {function} {name}"), text: statement });
                } else if rest.starts_with("[&str]") {
                    let mut rest = value;
                    for n in 1.. {
                        let (next, end) = (rest.find('"'), rest.find("];").unwrap_or(rest.len()));
                        let Some(next) = next.filter(|next| *next < end) else { break };
                        let (statement, length) = literal(&rest[next..]);
                        all.push(Sql { name: format!("sql/{file} {name} {n}"), text: statement });
                        rest = &rest[next + length..];
                    }
                }
            }
            at += line.len();
        }
    }
    all.retain(|sql| {
        sql.text.split(' ').next().is_some_and(|verb| verb.trim().chars().all(|c| c.is_ascii_uppercase()))
    });
    all
}

/// A connection that plans as the store's own do.
fn connect(path: &Path) -> Connection {
    let conn = plain(path);
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).unwrap();
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_TRIGGER, false).unwrap();
    conn.execute_batch("PRAGMA temp_store = MEMORY").unwrap();
    conn
}

/// The lines of a statement's plan.
fn plan(conn: &Connection, sql: &Sql) -> Vec<String> {
    let mut statement = conn
        .prepare(&format!("EXPLAIN QUERY PLAN {}", sql.text))
        .unwrap_or_else(|error| panic!("{}: {error}", sql.name));
    let mut rows = statement.raw_query();
    let mut lines = Vec::new();
    while let Some(row) = rows.next().unwrap() {
        lines.push(row.get(3).unwrap());
    }
    lines
}

fn store(path: &Path) -> Store {
    Store::options().clock(Clock::manual()).reserve(0).durability(relet::Durability::Normal).open(path).unwrap()
}

/// A file that has some of everything, and that an application has run ANALYZE on: statistics must not lead a plan astray.
fn analyzed(path: &Path) {
    let store = store(path);
    let worker = store.worker("w").unwrap();
    for queue in ["mail", "news"] {
        let queue = store.queue(queue);
        queue
            .enqueue_all((0..300).map(|n| Message::new(format!("{n}")).key(format!("{n}")).group(format!("{}", n % 7))))
            .unwrap();
        queue.enqueue_all((0..300).map(|n| Message::new("later").delay(Duration::from_secs(60 + n)))).unwrap();
        queue.enqueue_all((0..300).map(|_| "now")).unwrap();
        for (n, claim) in worker.claim_batch(queue.name(), 200).unwrap().into_iter().enumerate() {
            match n % 4 {
                0 => claim.defer(Duration::from_secs(60)).map(drop),
                1 => claim.fail("no").map(drop),
                2 => claim.reject("no").map(drop),
                _ => Ok(()),
            }
            .unwrap();
        }
    }
    plain(path).execute_batch("ANALYZE").unwrap();
}

#[test]
fn no_statement_reads_a_table_from_end_to_end() {
    let statements = statements();
    assert!(statements.len() > 60, "the statements are found: {}", statements.len());
    let names: BTreeSet<_> = statements.iter().map(|sql| &sql.name).collect();
    assert_eq!(names.len(), statements.len(), "each has a name of its own");
    for (name, _) in SCANS.iter().chain(&SORTS) {
        assert!(statements.iter().any(|sql| sql.name.starts_with(name)), "{name} is not there any more");
    }
    let dir = Dir::new("plans");
    let mut found = Vec::new();
    for kind in ["new", "analyzed"] {
        let path = dir.join(kind);
        match kind {
            "new" => drop(store(&path)),
            _ => analyzed(&path),
        }
        let conn = connect(&path);
        for sql in statements.iter().filter(|sql| !sql.text.starts_with("VACUUM")) {
            for line in plan(&conn, sql) {
                // `SCAN CONSTANT ROW` and the like read no table; a list of values is one of the statement's own.
                let scans = line.starts_with("SCAN ") && !line.starts_with("SCAN CONSTANT");
                if scans && !allowed(&SCANS, &sql.name) {
                    found.push(format!("{kind}: {}: {line}", sql.name));
                }
                let sorts = line.contains("USE TEMP B-TREE") || line.contains("AUTOMATIC");
                if sorts && !allowed(&SORTS, &sql.name) {
                    found.push(format!("{kind}: {}: {line}", sql.name));
                }
            }
        }
    }
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn the_plans_of_the_way_of_a_message_are_those_that_were_looked_at() {
    let dir = Dir::new("snapshot");
    let path = dir.join("store.db");
    drop(store(&path));
    let conn = connect(&path);
    let mut plans = String::new();
    for sql in statements().iter().filter(|sql| sql.is_of(&HOT)) {
        writeln!(plans, "{}", sql.name).unwrap();
        for line in plan(&conn, sql) {
            writeln!(plans, "  {line}").unwrap();
        }
    }
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/query_plans.txt");
    if std::env::var_os("RELET_WRITE_PLANS").is_some() {
        std::fs::write(&kept, &plans).unwrap();
    }
    let kept = std::fs::read_to_string(&kept).unwrap_or_default();
    let differs = plans.lines().zip(kept.lines().chain(std::iter::repeat(""))).find(|(now, then)| now != then);
    assert!(plans == kept, "the plans differ from tests/query_plans.txt, first at: {differs:?}");
}

// B57: 230,000 finished rows made a worker slower by orders of magnitude.

/// What a statement costs: the steps of SQLite's machine.
fn steps(conn: &Connection, sql: &Sql, params: &[(usize, i64)]) -> i32 {
    let mut statement = conn.prepare(&sql.text).unwrap();
    bind(&mut statement, params);
    let mut rows = statement.raw_query();
    while rows.next().unwrap().is_some() {}
    drop(rows);
    statement.get_status(StatementStatus::VmStep)
}

/// Numbers as they are given; everything else is a text that is a route, and names nobody.
fn bind(statement: &mut Statement<'_>, params: &[(usize, i64)]) {
    for at in 1..=statement.parameter_count() {
        match params.iter().find(|(param, _)| *param == at) {
            Some((_, number)) => statement.raw_bind_parameter(at, number).unwrap(),
            None => statement.raw_bind_parameter(at, "pending").unwrap(),
        }
    }
}

/// Before the place of every priority.
const ANY_PRIORITY: i64 = -1 << 31;

/// A store with one message of each kind that a claim must not see, and then with very many copies of these.
fn fill(path: &Path, clock: &Clock, copies_each: Option<[i64; 4]>) {
    let hour = Duration::from_secs(3600);
    let store = Store::options().clock(clock.clone()).reserve(0).retention(hour).open(path).unwrap();
    let mail = store.queue("mail");
    let gone = store.worker("gone").unwrap();
    mail.enqueue_all(["done", "deferred"]).unwrap();
    gone.claim("mail").unwrap().unwrap().ack().unwrap();
    gone.claim("mail").unwrap().unwrap().defer(hour).unwrap();
    mail.enqueue(Message::new("delayed").delay(hour)).unwrap();
    mail.enqueue(Message::new("gated").gate("shut")).unwrap();
    store.gate("shut").close().unwrap();
    mail.enqueue_all((0..READY).map(|n| format!("{n}"))).unwrap();
    mail.enqueue(Message::new("open").gate("open")).unwrap();
    // One is held, so that there is a lease to look at.
    let _ = store.worker("w").unwrap().claim("mail").unwrap().unwrap();
    let Some([finished, deferred, parked, gated]) = copies_each else { return };
    let conn = plain(path);
    let columns =
        text(&conn, "SELECT group_concat(name, ', ') FROM pragma_table_info('relet_messages') WHERE name <> 'id'");
    let copies = |id: i64, count: i64| {
        format!(
            "INSERT INTO relet_messages ({columns})
             WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {count})
             SELECT {columns} FROM n, relet_messages WHERE id = {id};"
        )
    };
    conn.execute_batch(&format!(
        "BEGIN;
         {} {} {} {}
         INSERT INTO relet_retry_queue (queue, message, worker_id, due_at, kept_until, reason, count)
           SELECT r.queue, m.id, r.worker_id, r.due_at, r.kept_until, r.reason, r.count
             FROM relet_messages m, relet_retry_queue r
            WHERE m.id NOT IN (SELECT message FROM relet_retry_queue) AND m.due_at = r.due_at AND m.worker_id IS r.worker_id;
         INSERT INTO relet_finished (message, status, finished_at, keep_until)
           SELECT m.id, f.status, f.finished_at, f.keep_until FROM relet_messages m, relet_finished f
            WHERE m.id NOT IN (SELECT message FROM relet_finished) AND m.status = f.status;
         INSERT INTO relet_details (message, gate) SELECT m.id, m.line / 4 FROM relet_messages m
            WHERE m.line >= 4 AND m.id NOT IN (SELECT message FROM relet_details);
         UPDATE relet_counters SET done = done + {finished}, deferred = deferred + {deferred},
                                   retrying = retrying + {deferred}, pending = pending + {parked} + {gated}
          WHERE queue = {queue};
         UPDATE relet_counters SET last_id = (SELECT max(id) FROM relet_messages) WHERE queue = 0;
         COMMIT",
        copies(1, finished),
        copies(2, deferred),
        copies(3, parked),
        copies(4, gated),
        queue = 1
    ))
    .unwrap();
}

const FINISHED: i64 = 100_000;
const PARKED: i64 = 30_000;
const DEFERRED: i64 = 30_000;
const GATED: i64 = 30_000;
const READY: i64 = 100;

#[test]
fn a_claim_costs_the_same_whatever_lies_in_the_file() {
    let dir = Dir::new("depth");
    let clock = Clock::manual();
    let paths = ["small.db", "large.db"].map(|name| dir.join(name));
    fill(&paths[0], &clock, None);
    fill(&paths[1], &clock, Some([FINISHED, DEFERRED, PARKED, GATED]));
    let conns = paths.each_ref().map(|path| connect(path));
    let now = clock.wall_ms();

    // Every statement that looks for something to do, bound as a claim binds it: nothing but the ready ones is found.
    let queue = 1;
    let awake = 1_000_000;
    let (shut, open) = (1, 2);
    let seeks: [(&str, &[(usize, i64)]); 21] = [
        ("sql/look.rs hope SQL", &[(2, now), (3, awake), (5, now)]),
        ("sql/claim.rs at SQL", &[(1, queue), (2, awake)]),
        ("sql/claim.rs at_what_waits SQL", &[(1, queue), (2, now), (3, now)]),
        ("sql/claim.rs own_void SQL", &[(1, queue), (2, awake), (3, 256)]),
        ("sql/claim.rs own_deferred SQL", &[(1, queue), (2, now), (4, 256)]),
        ("sql/claim.rs promote_due FIND", &[(1, queue), (2, 0), (3, now), (4, 256)]),
        ("sql/claim.rs take_back_void SQL", &[(1, queue), (2, awake), (3, 256)]),
        ("sql/claim.rs take_back_abandoned SQL", &[(1, queue), (2, now), (3, 256)]),
        ("sql/lines.rs gated NEXT", &[(1, queue), (2, 3)]),
        ("sql/lines.rs gated NEXT", &[(1, queue), (2, 4 * shut)]),
        ("sql/lines.rs head SQL", &[(1, queue), (2, 0), (3, 0), (4, 1)]),
        ("sql/lines.rs head SQL", &[(1, queue), (2, 4 * shut), (3, 0), (4, 1)]),
        ("sql/lines.rs head SQL", &[(1, queue), (2, 4 * open), (3, ANY_PRIORITY), (4, 1)]),
        ("sql/gates.rs find SQL", &[(1, shut)]),
        ("sql/gates.rs held SQL", &[(1, open), (2, awake), (3, 0), (4, 1)]),
        ("sql/workers.rs all SQL", &[]),
        ("sql/workers.rs remove SQL", &[]),
        ("sql/record.rs load_row SQL", &[(1, 2)]),
        ("sql/groups.rs turn_of SQL", &[(1, queue)]),
        ("sql/groups.rs first_live SQL", &[(1, queue)]),
        ("sql/keys.rs holder SQL", &[(1, queue)]),
    ];
    let statements = statements();
    for (name, params) in seeks {
        let sql =
            statements.iter().find(|sql| sql.name == name).unwrap_or_else(|| panic!("{name} is not there any more"));
        let [small, large] = conns.each_ref().map(|conn| steps(conn, sql, params));
        assert_eq!(small, large, "{name}");
        assert!(small < 400, "{name}: {small} steps");
    }

    // And the library itself finds the ready ones, in their order, behind all that.
    let store = Store::options().clock(clock).reserve(0).open(&paths[1]).unwrap();
    let worker = store.worker("another").unwrap();
    let claims = worker.claim_batch("mail", 1000).unwrap();
    let payloads: Vec<_> = claims.iter().map(|claim| String::from_utf8_lossy(claim.payload()).into_owned()).collect();
    let expected: Vec<_> = (1..READY).map(|n| n.to_string()).chain(["open".to_owned()]).collect();
    assert_eq!(payloads, expected);
    let queue = &store.stats().unwrap().queues[0];
    assert_eq!(queue.count(Status::Done), FINISHED as u64 + 1);
    assert_eq!(queue.count(Status::Processing), (DEFERRED + 1 + READY + 1) as u64);
    assert_eq!(number(&conns[1], "SELECT count(*) FROM relet_retry_queue WHERE worker_id IS NULL"), PARKED + 1);
}

/// Stats are kept, not counted: they cost the same at ten messages and at ten million, also where many are deferred.
#[test]
fn stats_cost_the_same_whatever_lies_in_the_file() {
    let dir = Dir::new("stats");
    let clock = Clock::manual();
    let paths = ["small.db", "large.db"].map(|name| dir.join(name));
    fill(&paths[0], &clock, None);
    fill(&paths[1], &clock, Some([3000; 4]));
    let conns = paths.each_ref().map(|path| connect(path));
    let now = clock.wall_ms();
    let statements = statements();
    let looks: [(&str, &[(usize, i64)]); 9] = [
        ("sql/look.rs stats SQL", &[(1, now)]),
        ("sql/lines.rs head SQL", &[(1, 1), (2, 0), (3, ANY_PRIORITY), (4, 1)]),
        ("sql/lines.rs head SQL", &[(1, 1), (2, 0), (3, 0), (4, 1)]),
        ("sql/lines.rs gated NEXT", &[(1, 1), (2, 3)]),
        ("sql/lines.rs gated NEXT", &[(1, 1), (2, 4)]),
        ("sql/lines.rs head SQL", &[(1, 1), (2, 4), (3, ANY_PRIORITY), (4, 1)]),
        ("sql/lines.rs head SQL", &[(1, 1), (2, 4), (3, 0), (4, 1)]),
        ("sql/look.rs oldest_waiting DUE", &[(1, 1), (2, now)]),
        ("sql/look.rs stuck SQL", &[(1, 1_000_000), (2, now), (3, now), (4, now)]),
    ];
    let mut found = Vec::new();
    for (name, params) in looks {
        let sql =
            statements.iter().find(|sql| sql.name == name).unwrap_or_else(|| panic!("{name} is not there any more"));
        let [small, large] = conns.each_ref().map(|conn| steps(conn, sql, params));
        if large > small * 2 {
            found.push(format!("{name}: {small} steps became {large}"));
        }
    }
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}
