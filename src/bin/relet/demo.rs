//! The demonstration: the same messages, the same workers and the same rate-limited API, first with the naive claim, then
//! with relet's, where a process that holds some of them is killed as well. What became of the messages is read from the two
//! databases.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use relet::rusqlite::{self, Connection, OptionalExtension, params};
use relet::{Claim, Filter, Finished, Message, Options, PAGE_MAX, Status, Store, Workers};

use crate::args::{Demo, Global};
use crate::exit::{Exit, Failure, Outcome};
use crate::json::Object;
use crate::output::{Out, count, say};
use crate::time::{Stopwatch, now_ms};

/// The queue of relet's part.
const QUEUE: &str = "deliveries";
/// The gate that they pass, closed by each 429.
const GATE: &str = "api";
/// Messages that the process which is killed holds.
const HELD: usize = 5;
/// Threads that enqueue.
const PRODUCERS: u32 = 2;
/// Calls a second that the API allows: half of the messages, so that a run takes about two seconds, within these bounds.
const RATE: std::ops::RangeInclusive<f64> = 20.0..=400.0;
/// Shortest Retry-After that the API answers: such answers are coarse.
const RETRY_AFTER_MIN: Duration = Duration::from_millis(100);
/// Pause of a worker that finds nothing to do.
const IDLE: Duration = Duration::from_millis(5);
/// Both parts together give up after this long beyond what the API's rate explains: the demonstration ends, whatever happens.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(global: &Global, out: &mut Out, args: &Demo) -> Outcome {
    if let Some(path) = &args.victim {
        return Victim::be(path, global.options());
    }
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    // Where a handler cannot be set, the signal ends the program, and the folder stays.
    let _ = ctrlc::set_handler(move || told.store(true, Ordering::Relaxed));
    let folder = Folder::new(args.keep)?;
    let plan = Plan::new(args, stop);

    say(format_args!(
        "{}, {}, an API that allows {:.0} calls a second and answers 429 with Retry-After to the rest",
        count(args.messages, "message"),
        count(args.workers, "worker"),
        plan.rate
    ));
    let naive = naive::run(&plan, &folder.path.join("naive.db"))
        .map_err(|error| Failure::failed(format!("the naive part failed, which is not what it is to show: {error}")))?;
    let relet = cured(&plan, &folder.path.join("relet.db"), global.options())?;
    if plan.is_stopped() {
        say("stopped");
        return Ok(Exit::Interrupted);
    }
    print(out, &naive, &relet)?;
    out.flush()?;
    folder.tell();
    if relet.done == u64::from(args.messages) && relet.stuck == 0 && relet.enqueued == relet.done {
        return Ok(Exit::Done);
    }
    Err(Failure::failed(
        "relet's part did not end with every message done; run it again with --keep, then `relet doctor` on it",
    ))
}

/// What both parts have in common.
struct Plan {
    messages: u32,
    workers: u16,
    rate: f64,
    limit: Duration,
    watch: Stopwatch,
    stop: Arc<AtomicBool>,
}

impl Plan {
    fn new(args: &Demo, stop: Arc<AtomicBool>) -> Plan {
        let messages = f64::from(args.messages);
        let rate = (messages / 2.0).clamp(*RATE.start(), *RATE.end());
        let limit = PATIENCE + Duration::from_secs_f64(3.0 * messages / rate);
        Plan { messages: args.messages, workers: args.workers, rate, limit, watch: Stopwatch::start(), stop }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether workers are to go home, although there is something left to do.
    fn is_over(&self) -> bool {
        self.is_stopped() || self.watch.left(self.limit).is_none()
    }

    fn bar(&self, name: &'static str) -> ProgressBar {
        let style = ProgressStyle::with_template("{prefix:>6} {wide_bar} {pos}/{len} delivered");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(self.messages.into()).with_style(style).with_prefix(name)
    }
}

/// How one part ended.
#[derive(Debug, Default)]
struct Tally {
    enqueued: u64,
    /// Times that the API said 429, and a message was put off.
    deferred: u64,
    /// Times that a 429 found the gate open, and closed it.
    closed: u64,
    /// Times that a message which had been put off was claimed again.
    reclaimed: u64,
    /// Times that it was refused.
    refused: u64,
    /// Messages of the killed process that others took over, and how long after its death the last of them.
    taken_over: u64,
    taken_over_ms: u64,
    done: u64,
    dead: u64,
    stuck: u64,
}

/// The rate-limited API: a token bucket in memory.
#[derive(Debug)]
struct Api {
    rate: f64,
    burst: f64,
    bucket: Mutex<Bucket>,
    watch: Stopwatch,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    /// When the bucket was filled up last, in seconds.
    filled_at: f64,
    /// Until when the coming tokens are promised to those that were turned away, in seconds.
    promised_until: f64,
}

/// The API's answer to a call that came too early.
#[derive(Debug)]
struct TooManyRequests {
    retry_after: Duration,
}

impl Api {
    fn new(rate: f64) -> Api {
        let burst = (rate / 10.0).max(1.0);
        let bucket = Bucket { tokens: burst, filled_at: 0.0, promised_until: 0.0 };
        Api { rate, burst, bucket: Mutex::new(bucket), watch: Stopwatch::start() }
    }

    /// Delivers, or says when to come again.
    fn call(&self) -> Result<(), TooManyRequests> {
        let now = self.watch.elapsed().as_secs_f64();
        let mut bucket = lock(&self.bucket);
        bucket.tokens = (bucket.tokens + (now - bucket.filled_at).max(0.0) * self.rate).min(self.burst);
        bucket.filled_at = now;
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        bucket.promised_until = bucket.promised_until.max(now) + 1.0 / self.rate;
        let wait = Duration::from_secs_f64(bucket.promised_until - now);
        Err(TooManyRequests { retry_after: wait.max(RETRY_AFTER_MIN) })
    }
}

/// A thread that panicked is reported where it is joined; what it shared is plain numbers.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for all threads; the first error of one of them is the error of all, and a panic goes on.
fn join_all<E>(threads: Vec<ScopedJoinHandle<'_, Result<(), E>>>) -> Result<(), E> {
    let results: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    results.into_iter().try_for_each(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// relet's part.
fn cured(plan: &Plan, path: &Path, options: Options) -> Outcome<Tally> {
    // Done messages are kept, so that the end table can be read from the store.
    let store = options.retention(Duration::from_secs(86_400)).open(path)?;
    produce(plan, &store)?;
    let mut victim = Victim::start(path)?;
    let seen = Arc::new(Seen::new(plan));
    let (started, handled, finished) = (seen.clone(), seen.clone(), seen.clone());
    let workers = Workers::builder()
        .label("deliverers")
        .concurrency(plan.workers.into())
        .queue(QUEUE, move |_: &Claim| handled.deliver())
        .on_start(move |claim| started.start(claim))
        .on_finish(move |_, end| finished.finish(end))
        .start(&store)?;
    let kill_at = plan.messages.saturating_sub(victim.held) / 3;
    while !plan.is_over() && store.stats()?.queues.iter().any(|queue| queue.live() > 0) {
        if !victim.killed && seen.done.load(Ordering::Relaxed) >= u64::from(kill_at) {
            lock(&seen.killed).replace(Stopwatch::start());
            victim.kill()?;
            say(format_args!(
                "a worker process that held {} was killed (SIGKILL), with the others at work",
                count(victim.held, "message")
            ));
        }
        std::thread::sleep(IDLE);
    }
    seen.bar.finish_and_clear();
    let interrupted = workers.stop(PATIENCE).interrupted;
    if !interrupted.is_empty() {
        return Err(Failure::failed("a delivery did not end"));
    }
    tally(&store, &seen)
}

/// What is seen while the deliveries go on.
struct Seen {
    api: Api,
    bar: ProgressBar,
    done: AtomicU64,
    closings: Mutex<Closings>,
    /// Claims of messages that had been put off.
    reclaimed: AtomicU64,
    /// Claims that were taken over from the killed process, and how long after its death the last of them was.
    taken_over: AtomicU64,
    taken_over_ms: AtomicU64,
    killed: Mutex<Option<Stopwatch>>,
}

impl Seen {
    fn new(plan: &Plan) -> Seen {
        Seen {
            api: Api::new(plan.rate),
            bar: plan.bar("relet"),
            done: AtomicU64::new(0),
            closings: Mutex::default(),
            reclaimed: AtomicU64::new(0),
            taken_over: AtomicU64::new(0),
            taken_over_ms: AtomicU64::new(0),
            killed: Mutex::new(None),
        }
    }

    fn start(&self, claim: &Claim) {
        self.reclaimed.fetch_add(u64::from(claim.deferrals() > 0), Ordering::Relaxed);
        // The first try after the death: later ones of the same message have been put off in between.
        if let Some(killed) = &*lock(&self.killed)
            && claim.crashes() > 0
            && claim.deferrals() == 0
        {
            self.taken_over.fetch_add(1, Ordering::Relaxed);
            self.taken_over_ms.fetch_max(killed.elapsed().as_millis() as u64, Ordering::Relaxed);
        }
    }

    /// The whole of what an application has to do about a rate limit, but for the counting.
    fn deliver(&self) -> relet::Outcome {
        match self.api.call() {
            Ok(()) => relet::Outcome::Ack,
            Err(TooManyRequests { retry_after }) => {
                lock(&self.closings).add(self.api.watch.elapsed(), retry_after);
                relet::Outcome::Limited { retry_after }
            }
        }
    }

    fn finish(&self, end: &Finished) {
        if end.outcome == relet::Outcome::Ack && end.settled.is_ok() {
            self.done.fetch_add(1, Ordering::Relaxed);
            self.bar.inc(1);
        }
    }
}

/// How often the gate was closed. Of several 429s at a time the first one closes it, and the others keep it closed for longer.
#[derive(Debug, Default)]
struct Closings {
    number: u64,
    until: Duration,
}

impl Closings {
    /// A 429 at this moment. The store closes the gate a little later, and so opens it a little later: whoever has passed the
    /// open gate after that finds this closing over.
    fn add(&mut self, at: Duration, retry_after: Duration) {
        self.number += u64::from(at >= self.until);
        self.until = self.until.max(at + retry_after);
    }
}

/// Enqueues all messages, from a few threads.
fn produce(plan: &Plan, store: &Store) -> relet::Result<()> {
    std::thread::scope(|scope| {
        let share = |producer: u32| {
            let queue = store.queue(QUEUE);
            (producer..plan.messages)
                .step_by(PRODUCERS as usize)
                .take_while(|_| !plan.is_over())
                .try_for_each(|number| queue.enqueue(Message::new(format!("delivery {number}")).gate(GATE)).map(drop))
        };
        join_all((0..PRODUCERS).map(|producer| scope.spawn(move || share(producer))).collect())
    })
}

/// A process of its own that claims messages and then does nothing, until it is killed.
struct Victim {
    child: Child,
    held: u32,
    killed: bool,
}

impl Victim {
    /// Runs this program again, as the victim, and waits until it holds its messages.
    fn start(path: &Path) -> Outcome<Victim> {
        let failed = |error: std::io::Error| Failure::failed(format!("the second process cannot be run: {error}"));
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["demo", "--victim"])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
        }
        let mut victim = Victim { child, held: 0, killed: false };
        match line.trim().parse() {
            Ok(held) => {
                victim.held = held;
                Ok(victim)
            }
            Err(_) => Err(Failure::failed("the second process did not start")),
        }
    }

    /// The other side of [`Victim::start`]: says how many messages it holds, then waits for its end. It also ends with its parent.
    fn be(path: &Path, options: Options) -> Outcome {
        let store = options.open(path)?;
        let worker = store.worker("victim")?;
        let claims = worker.claim_batch(QUEUE, HELD)?;
        println!("{}", claims.len());
        let _ = std::io::stdin().read(&mut [0]);
        Ok(Exit::Done)
    }

    /// SIGKILL, where the system has it.
    fn kill(&mut self) -> Outcome<()> {
        self.killed = true;
        let killed = self.child.kill().and_then(|()| self.child.wait());
        killed.map(drop).map_err(|error| Failure::failed(format!("the second process cannot be killed: {error}")))
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Counts what became of relet's messages, from the store.
fn tally(store: &Store, seen: &Seen) -> Outcome<Tally> {
    let mut tally = Tally {
        closed: lock(&seen.closings).number,
        reclaimed: seen.reclaimed.load(Ordering::Relaxed),
        taken_over: seen.taken_over.load(Ordering::Relaxed),
        taken_over_ms: seen.taken_over_ms.load(Ordering::Relaxed),
        ..Tally::default()
    };
    let mut filter = Filter::new().limit(PAGE_MAX);
    loop {
        let page = store.list(&filter)?;
        let Some(last) = page.last() else { break };
        filter = filter.after(last.id);
        for message in &page {
            tally.enqueued += 1;
            tally.deferred += u64::from(message.deferrals);
            match message.status {
                Status::Done => tally.done += 1,
                Status::Dead => tally.dead += 1,
                Status::Processing => tally.stuck += 1,
                _ => {}
            }
        }
    }
    say(format_args!("relet's claim: {} of {} done", tally.done, tally.enqueued));
    if tally.deferred > 0 {
        say(
            "each 429 put its message into the retry queue and kept the gate closed, so that the others waited in the file; when it \
             opened they came in their order",
        );
    }
    Ok(tally)
}

/// The failure, in a database of its own. This is how not to do it.
mod naive {
    use super::*;

    /// A queue as one finds it in many applications: a table of messages, and one of retries.
    const SCHEMA: &str = "
        CREATE TABLE messages (id INTEGER PRIMARY KEY, payload TEXT NOT NULL, status TEXT NOT NULL, worker_id TEXT);
        CREATE TABLE retry_queue (message_id INTEGER NOT NULL, due_at INTEGER NOT NULL);";

    /// The naive claim. A message that was put off still reads `processing`, so its retry is refused: for ever.
    const CLAIM: &str = "UPDATE messages SET status = 'processing', worker_id = ?2
        WHERE id = ?1 AND status IN ('pending', 'queued', 'routing', 'pending_local')";

    pub(super) fn run(plan: &Plan, path: &Path) -> rusqlite::Result<Tally> {
        let mut conn = Connection::open(path)?;
        // A bad example must not also be a slow one.
        conn.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;")?;
        conn.execute_batch(SCHEMA)?;
        let tx = conn.transaction()?;
        for number in 0..plan.messages {
            let insert = "INSERT INTO messages (payload, status) VALUES (?1, 'pending')";
            tx.prepare_cached(insert)?.execute([format!("delivery {number}")])?;
        }
        tx.commit()?;

        let (conn, api, bar) = (Mutex::new(conn), Api::new(plan.rate), plan.bar("naive"));
        let tally = Mutex::new(Tally::default());
        let result: rusqlite::Result<()> = std::thread::scope(|scope| {
            let (conn, api, bar, tally) = (&conn, &api, &bar, &tally);
            let workers =
                (1..=plan.workers).map(|number| scope.spawn(move || work(plan, conn, api, bar, tally, number)));
            join_all(workers.collect())
        });
        bar.finish_and_clear();
        result?;
        let conn = conn.into_inner().unwrap_or_else(PoisonError::into_inner);
        let tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
        finish(&conn, tally)
    }

    fn work(
        plan: &Plan,
        conn: &Mutex<Connection>,
        api: &Api,
        bar: &ProgressBar,
        tally: &Mutex<Tally>,
        number: u16,
    ) -> rusqlite::Result<()> {
        let worker = format!("worker-{number}");
        while !plan.is_over() {
            let Some((id, is_retry)) = next(&lock(conn))? else {
                if is_at_end(&lock(conn))? {
                    break;
                }
                std::thread::sleep(IDLE);
                continue;
            };
            if lock(conn).prepare_cached(CLAIM)?.execute(params![id, worker])? == 0 {
                // "Somebody else has it already": nobody has.
                lock(tally).refused += u64::from(is_retry);
                continue;
            }
            lock(tally).reclaimed += u64::from(is_retry);
            match api.call() {
                Ok(()) => {
                    lock(conn).prepare_cached("UPDATE messages SET status = 'done' WHERE id = ?1")?.execute([id])?;
                    bar.inc(1);
                }
                Err(TooManyRequests { retry_after }) => {
                    let due_at = now_ms() + retry_after.as_millis() as i64;
                    let insert = "INSERT INTO retry_queue (message_id, due_at) VALUES (?1, ?2)";
                    lock(conn).prepare_cached(insert)?.execute([id, due_at])?;
                    lock(tally).deferred += 1;
                }
            }
        }
        Ok(())
    }

    /// A retry that is due, else the first message that is pending; and which of the two it is.
    fn next(conn: &Connection) -> rusqlite::Result<Option<(i64, bool)>> {
        let due = "DELETE FROM retry_queue WHERE rowid =
            (SELECT rowid FROM retry_queue WHERE due_at <= ?1 ORDER BY due_at LIMIT 1) RETURNING message_id";
        if let Some(id) = conn.prepare_cached(due)?.query_row([now_ms()], |row| row.get(0)).optional()? {
            return Ok(Some((id, true)));
        }
        let pending = "SELECT id FROM messages WHERE status = 'pending' ORDER BY id LIMIT 1";
        Ok(conn.prepare_cached(pending)?.query_row([], |row| row.get(0)).optional()?.map(|id| (id, false)))
    }

    /// Whether nothing is pending and no retry is to come.
    fn is_at_end(conn: &Connection) -> rusqlite::Result<bool> {
        let sql = "SELECT NOT EXISTS (SELECT 1 FROM retry_queue)
            AND NOT EXISTS (SELECT 1 FROM messages WHERE status = 'pending')";
        conn.prepare_cached(sql)?.query_row([], |row| row.get(0))
    }

    fn finish(conn: &Connection, tally: Tally) -> rusqlite::Result<Tally> {
        let number = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).map(i64::unsigned_abs);
        let tally = Tally {
            enqueued: number("SELECT count(*) FROM messages")?,
            done: number("SELECT count(*) FROM messages WHERE status = 'done'")?,
            stuck: number("SELECT count(*) FROM messages WHERE status = 'processing'")?,
            ..tally
        };
        if tally.stuck > 0 {
            say(format_args!(
                "the naive claim: {} left in processing for ever. Each was put off by a 429; when its retry came, the \
                 claim refused it, since it read processing already:",
                count(tally.stuck, "message")
            ));
            let some = "SELECT id, worker_id FROM messages WHERE status = 'processing' ORDER BY id LIMIT 3";
            let mut statement = conn.prepare(some)?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let (id, worker): (i64, String) = (row.get(0)?, row.get(1)?);
                say(format_args!("  message {id}: processing, held by {worker}, which waits for nothing"));
            }
        }
        Ok(tally)
    }
}

fn print(out: &mut Out, naive: &Tally, relet: &Tally) -> Outcome<()> {
    if out.json {
        for (claim, tally) in [("naive", naive), ("relet", relet)] {
            // The naive part has no gate, and nobody is killed in it.
            let of_relet = |number: u64| (claim == "relet").then_some(number);
            out.object(
                Object::new()
                    .put("claim", claim)
                    .put("enqueued", tally.enqueued)
                    .put("deferred", tally.deferred)
                    .put("gate_closed", of_relet(tally.closed))
                    .put("reclaimed", tally.reclaimed)
                    .put("refused", tally.refused)
                    .put("taken_over", of_relet(tally.taken_over))
                    .put("taken_over_ms", of_relet(tally.taken_over_ms))
                    .put("done", tally.done)
                    .put("dead", tally.dead)
                    .put("stuck", tally.stuck),
            )?;
        }
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["", "naive claim", "relet"]);
    for (name, naive, relet) in [
        ("enqueued", Some(naive.enqueued), relet.enqueued),
        ("answered 429 and deferred", Some(naive.deferred), relet.deferred),
        ("gate closed by a 429", None, relet.closed),
        ("re-claimed when due", Some(naive.reclaimed), relet.reclaimed),
        ("refused when due", Some(naive.refused), relet.refused),
        ("taken over from the killed process", None, relet.taken_over),
        ("… all of them, ms after its death", None, relet.taken_over_ms),
        ("done", Some(naive.done), relet.done),
        ("dead letters", Some(naive.dead), relet.dead),
        ("stuck in processing", Some(naive.stuck), relet.stuck),
    ] {
        let right = |cell: String| Cell::new(cell).set_alignment(CellAlignment::Right);
        let naive = naive.map_or_else(|| "–".to_owned(), |number| number.to_string());
        table.add_row([Cell::new(name), right(naive), right(relet.to_string())]);
    }
    out.line(table)
}

/// The folder of the two databases, removed at the end unless it is to be kept.
struct Folder {
    path: PathBuf,
    keep: bool,
}

impl Folder {
    fn new(keep: bool) -> Outcome<Folder> {
        let base = std::env::temp_dir();
        for number in 0..1000 {
            let path = base.join(format!("relet-demo-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Folder { path, keep }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let text = format!(
                        "{} cannot be made ({error}); set TMPDIR to a folder that can be written",
                        path.display()
                    );
                    return Err(Failure::failed(text));
                }
            }
        }
        Err(Failure::failed(format!("{} is full of folders of earlier demonstrations; remove them", base.display())))
    }

    fn tell(&self) {
        if self.keep {
            let store = self.path.join("relet.db");
            say(format_args!("kept in {}; look with `relet -d {} stats`", self.path.display(), store.display()));
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep {
            // What cannot be removed is in the system's own folder for such things.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_429_that_finds_the_gate_closed_does_not_count_as_a_closing() {
        let mut closings = Closings::default();
        for (at, retry_after) in [(0, 100), (1, 300), (2, 100), (300, 100), (401, 100), (501, 100)] {
            closings.add(Duration::from_millis(at), Duration::from_millis(retry_after));
        }
        // At 0, at 401 and at 501: the second one, at 1, kept the gate closed until 301, and the one at 300 until 400.
        assert_eq!(closings.number, 3);
    }
}
