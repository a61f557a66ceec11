//! The soak: four processes of four handler threads each, and two that enqueue, are killed, stopped and deployed at random
//! while they work on one file. Nothing is lost, nothing is stuck, and nobody works on another's message.
//!
//! What happened is written down by those who did it, in a table of the application's own, the journal, in the same file.
//! Its entries are numbered in the order of their commits, so no clock is needed to say what was before what. A handler
//! writes `begin` before its work and `end` after it, each in a transaction that asks `guard` first; one whose effect is
//! exactly once writes its `end` together with `ack_in`. Where the guard refuses, it writes `late` instead, and tries to ack
//! all the same. When a claim is settled, the workers' hook writes `settled`, without a guard, so after a kill that may be
//! missing.
//!
//! What is exact, and held here to the last message (`Oracle`):
//!
//! * *Nothing lost, nothing made up.* A producer writes down what it is about to enqueue and, after it, the ids; a kill takes
//!   nothing of what was written. What has an id is stored once, under that id; what has none is stored once or not at all,
//!   a batch as a whole; nothing else is stored. A message that a handler enqueues in the transaction of its effect is there
//!   once if that is, else not.
//! * *Every message ends once*, as done or dead, by what its last holder said, or by a budget that is spent.
//! * *One holder.* The guard passes for the newest claim alone. So of one message the tokens of the journal never go back, and
//!   nothing comes after the `end` of an effect: intervals with a guard at both ends never overlap. One that has no `end` is of
//!   a holder that was killed, or lost its claim, and reaches no further than to the next `begin`.
//! * *One member of a group, in order; one message of a key.* The next one is begun after the one before is finished, and
//!   then that one's guard refuses. So all entries of a smaller id come before all of a larger one.
//! * *A well holder keeps its claim.* The queues `steady` and `rated` have a lease of a day. In them a claim is lost by the
//!   death of its process alone, or given back at its stop in good order, which is no crash: not lost by SIGSTOP, nor by whatever
//!   else goes on. In the others the lease is so short that a process which is halted by SIGSTOP loses its claims, and they
//!   have handlers that work on until their claim is lost.
//! * *Budgets.* Each claim ends in one way, so `attempts - crashes` is the number of claims that were acked, failed or
//!   rejected: at least those whose `settled` is written down, at most those whose `end` is.
//! * *Gates.* At most two claims through the gate `two` are held, counted in each transaction that begins one; so at most two of
//!   their intervals overlap. This counts a claim whose lease has run out until it is taken back, since its guard passes so
//!   long. It is exact because all messages of this gate are of one queue, whose claims take back what is void before they
//!   hand out anything else. Through `rate` one message passes every 20 ms, on the leases' clock. Nothing passes `api`, or any
//!   other gate, while it is closed.
//!
//! `RELET_SOAK_SECONDS` is how long it runs before it is drained, 8 unless set; `RELET_SOAK_SEED` repeats the choices of a run,
//! though not its timing.
#![cfg(unix)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use relet::rusqlite::{Connection, Transaction, TransactionBehavior, params};
use relet::{
    Claim, Durability, Error, Finished, GateLimits, Message, Outcome, Queue, QueueDefaults, Retry, Settled, Status,
    Store, Workers,
};
use support::{Child, Dir, part, plain};

const PROCESSES: usize = 4;
const HANDLERS: usize = 4;
const PRODUCERS: usize = 2;

/// Its leases outlast the test.
const STEADY: &str = "steady";
/// Its leases are short.
const HASTY: &str = "hasty";
/// Passes a gate that has two slots.
const SLOTS: &str = "slots";
/// Passes a gate that has a rate; its leases outlast the test.
const RATED: &str = "rated";
/// Passes a gate that is closed by whoever is told "not now".
const LIMITED: &str = "limited";
/// The queues, and how many live messages the producers let gather in each.
const QUEUES: [(&str, u64); 5] = [(STEADY, 80), (HASTY, 80), (SLOTS, 30), (RATED, 10), (LIMITED, 10)];

const LONG: Duration = Duration::from_secs(86_400);
const SHORT: Duration = Duration::from_millis(200);
/// A handler is given up after this time; some work longer.
const GIVE_UP: Duration = Duration::from_millis(600);
const RATE: (u32, Duration) = (50, Duration::from_secs(1));
/// Between two messages that pass it, in ms of the leases' clock.
const RATE_GAP: i64 = 20;

const JOURNAL: &str = "CREATE TABLE journal (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  run INTEGER NOT NULL, thread TEXT NOT NULL, message INTEGER NOT NULL, token INTEGER NOT NULL,
  what TEXT NOT NULL,   -- begin, end, late, settled
  how TEXT NOT NULL,    -- what became of it
  held INTEGER,         -- begin: claims that have passed its gate and are held
  passed_at INTEGER,    -- begin: when it was claimed, on the leases' clock, where it was not extended since
  closed INTEGER        -- begin: it was claimed while its gate was closed
)";

fn open(path: &Path) -> Store {
    Store::options()
        .durability(Durability::Normal)
        .reserve(0)
        .busy_wait(Duration::from_secs(60))
        .lease(SHORT)
        .retry(Retry::fixed(Duration::from_millis(10)))
        .retention(Duration::from_secs(86_400))
        .open(path)
        .unwrap()
}

/// A connection of the application's.
fn application(path: &Path) -> Connection {
    let conn = plain(path);
    conn.busy_timeout(Duration::from_secs(60)).unwrap();
    conn.execute_batch("PRAGMA synchronous = NORMAL").unwrap();
    conn
}

fn set_up(path: &Path) -> Store {
    let store = open(path);
    for queue in [STEADY, RATED] {
        store.queue(queue).set_defaults(QueueDefaults::new().lease(LONG)).unwrap();
    }
    store.gate("two").limit(GateLimits::new().concurrency(2)).unwrap();
    store.gate("rate").limit(GateLimits::new().rate(RATE.0, RATE.1)).unwrap();
    application(path).execute_batch(JOURNAL).unwrap();
    store
}

// The workers.

struct Handler {
    store: Store,
    app: Mutex<Connection>,
    run: i64,
    seed: u64,
}

/// What a handler makes of a message in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    Effect,
    Ack,
    Fail,
    Panic,
    Reject,
    Defer,
    Limited,
    Release,
    /// The process dies of it.
    Die,
    /// Works until the claim is lost.
    Overrun,
}

impl Handler {
    /// How long to work on this claim, and what to make of it: by the seed alone.
    fn plan(&self, claim: &Claim, kind: &str) -> (Duration, Plan) {
        let (id, token) = (claim.id().get().unsigned_abs(), claim.receipt().token().unsigned_abs());
        let mut random = fastrand::Rng::with_seed(self.seed ^ id << 24 ^ token);
        let short = Duration::from_micros(random.u64(0..6_000));
        let hasty = claim.queue() == HASTY;
        let plan = match kind {
            "reject" => Plan::Reject,
            "fail" => [Plan::Fail, Plan::Panic][random.usize(0..2)],
            "defer" => Plan::Defer,
            "die" => Plan::Die,
            "overrun" => Plan::Overrun,
            _ => match random.u32(0..100) {
                0..8 if kind == "work" => Plan::Ack,
                8..18 => Plan::Fail,
                18..26 => Plan::Defer,
                26..34 => Plan::Release,
                34..39 => Plan::Panic,
                39..45 => Plan::Limited,
                // Longer than its lease, which is extended meanwhile.
                45..48 => return (SHORT * 2, Plan::Effect),
                48..50 if hasty => Plan::Overrun,
                _ => Plan::Effect,
            },
        };
        (short, plan)
    }

    fn handle(&self, claim: &Claim) -> Outcome {
        let text = String::from_utf8(claim.payload().to_vec()).unwrap();
        let (name, kind) = text.split_once(' ').unwrap();
        let (work, plan) = self.plan(claim, kind);
        if !self.guarded(claim, |tx| self.note_begin(tx, claim)) {
            return self.late(claim, "begin");
        }
        match plan {
            Plan::Die => die(),
            Plan::Overrun => {
                while self.guarded(claim, |_| Ok(())) {
                    std::thread::sleep(SHORT / 10);
                }
                return self.late(claim, "overrun");
            }
            _ => std::thread::sleep(work),
        }
        let ended = self.guarded(claim, |tx| {
            self.note(tx, claim, "end", &format!("{plan:?}"))?;
            if plan == Plan::Effect {
                if kind == "parent" {
                    self.store.queue(STEADY).enqueue_in(tx, format!("child-of-{name} work"))?;
                }
                claim.ack_in(tx)?;
            }
            Ok(())
        });
        if !ended {
            return self.late(claim, "end");
        }
        let soon = Duration::from_millis(claim.id().get().unsigned_abs() % 40);
        match plan {
            Plan::Effect => Outcome::Settled,
            Plan::Ack => Outcome::Ack,
            Plan::Fail => Outcome::Fail { error: "on purpose".into(), retry_in: Some(soon) },
            Plan::Reject => Outcome::reject("on purpose"),
            Plan::Defer => Outcome::Defer { delay: soon, reason: "on purpose".into() },
            Plan::Limited => Outcome::Limited { retry_after: soon * 3 },
            Plan::Release => Outcome::Release,
            Plan::Panic | Plan::Die | Plan::Overrun => panic!("on purpose"),
        }
    }

    /// Does something in a transaction of the application's, if the claim holds.
    fn guarded(&self, claim: &Claim, what: impl FnOnce(&Transaction<'_>) -> relet::Result<()>) -> bool {
        let mut app = self.app.lock().unwrap();
        let done = (|| {
            let tx = app.transaction_with_behavior(TransactionBehavior::Immediate)?;
            claim.guard(&tx)?;
            what(&tx)?;
            Ok::<_, Error>(tx.commit()?)
        })();
        match done {
            Ok(()) => true,
            Err(error) if error.is_claim_lost() => false,
            Err(error) => unexpected(&error),
        }
    }

    /// The claim is lost. It tries to ack all the same.
    fn late(&self, claim: &Claim, when: &str) -> Outcome {
        self.unguarded(claim, "late", when);
        Outcome::Ack
    }

    fn finished(&self, claim: &Claim, finished: &Finished) {
        let outcome = match finished.outcome {
            Outcome::Ack | Outcome::Fail { .. } | Outcome::Reject { .. } => "charged",
            Outcome::Defer { .. } | Outcome::Limited { .. } => "deferred",
            Outcome::Release => "released",
            _ => "in the transaction",
        };
        let settled = match &finished.settled {
            Ok(Settled::Now(_)) => outcome.to_owned(),
            Ok(Settled::Gone) if finished.outcome == Outcome::Settled => outcome.to_owned(),
            Ok(Settled::Before(_)) => "before".to_owned(),
            Err(error) if error.is_claim_lost() => "lost".to_owned(),
            other => format!("{other:?}"),
        };
        self.unguarded(claim, "settled", &settled);
    }

    fn unguarded(&self, claim: &Claim, what: &str, how: &str) {
        self.note(&self.app.lock().unwrap(), claim, what, how).unwrap_or_else(|error| unexpected(&error));
    }

    fn note(&self, conn: &Connection, claim: &Claim, what: &str, how: &str) -> relet::Result<()> {
        const SQL: &str =
            "INSERT INTO journal (run, thread, message, token, what, how) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
        let (id, token) = (claim.id().get(), claim.receipt().token());
        conn.prepare_cached(SQL)?.execute(params![self.run, thread(), id, token, what, how])?;
        Ok(())
    }

    fn note_begin(&self, conn: &Connection, claim: &Claim) -> relet::Result<()> {
        const SQL: &str = "INSERT INTO journal (run, thread, message, token, what, how, held, passed_at, closed)
            SELECT ?1, ?2, m.id, ?4, 'begin', '',
                   (SELECT count(*) FROM relet_messages o JOIN relet_details od ON od.message = o.id
                     WHERE od.gate = d.gate AND o.line = -1),
                   m.place - m.lease_ms,
                   EXISTS (SELECT 1 FROM relet_gates g WHERE g.id = d.gate
                              AND g.closed_at < m.claimed_at AND m.claimed_at < g.closed_until)
              FROM relet_messages m LEFT JOIN relet_details d ON d.message = m.id WHERE m.id = ?3";
        let (id, token) = (claim.id().get(), claim.receipt().token());
        conn.prepare_cached(SQL)?.execute(params![self.run, thread(), id, token])?;
        Ok(())
    }
}

fn thread() -> String {
    std::thread::current().name().unwrap_or("?").to_owned()
}

fn unexpected(error: &Error) -> ! {
    eprintln!("the soak met an error: {error}");
    std::process::exit(3)
}

/// As under kill -9: nothing of this process runs any more.
fn die() -> ! {
    let me = format!("kill -KILL {}", std::process::id());
    let _ = Command::new("sh").args(["-c", &me]).status();
    loop {
        std::thread::park();
    }
}

/// Handlers panic on purpose: that is not to be read on the terminal.
fn hush() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload_as_str() != Some("on purpose") {
            usual(panic);
        }
    }));
}

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_soak_works() {
    let Some(part) = part("role_soak_works") else { return };
    hush();
    let store = open(part.path());
    let (run, seed) = (part.args[2].parse().unwrap(), part.args[3].parse().unwrap());
    let handler = Arc::new(Handler { store: store.clone(), app: Mutex::new(application(part.path())), run, seed });
    let hook = handler.clone();
    let mut builder = Workers::builder()
        .label(part.args[1].as_str())
        .concurrency(HANDLERS)
        .give_up_after(GIVE_UP)
        .weight(STEADY, 2)
        .on_error(|error| {
            if !error.is_transient() {
                unexpected(error);
            }
        })
        .on_finish(move |claim, finished| hook.finished(claim, finished));
    for (queue, _) in QUEUES {
        let handler = handler.clone();
        builder = builder.queue(queue, move |claim: &Claim| handler.handle(claim));
    }
    let workers = builder.start(&store).unwrap();
    match part.hear().as_deref() {
        Some("finish") => {
            let stopped = workers.stop(Duration::from_secs(60));
            assert!(stopped.interrupted.is_empty() && stopped.error.is_none(), "{stopped:?}");
        }
        // A deploy with no time for what is at work: that is interrupted.
        _ => drop(workers.stop(Duration::from_millis(5))),
    }
}

// The producers.

#[test]
#[ignore = "a role that another test plays in a child process"]
fn role_soak_produces() {
    let Some(part) = part("role_soak_produces") else { return };
    let store = open(part.path());
    let mut producer = Producer {
        log: OpenOptions::new().create_new(true).append(true).open(&part.args[1]).unwrap(),
        random: fastrand::Rng::with_seed(part.args[3].parse::<u64>().unwrap() ^ part.args[2].parse::<u64>().unwrap()),
        run: part.args[2].clone(),
        count: 0,
    };
    let (stop, stopped) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            part.hear();
            stop.send(()).unwrap();
        });
        while stopped.recv_timeout(Duration::from_millis(1)) == Err(RecvTimeoutError::Timeout) {
            let (queue, most) = QUEUES[producer.random.usize(0..QUEUES.len())];
            let stats = store.stats().unwrap();
            if stats.queues.iter().find(|stats| stats.queue == queue).is_none_or(|stats| stats.live() < most) {
                producer.produce(&store.queue(queue));
            }
        }
    });
}

struct Producer {
    log: File,
    random: fastrand::Rng,
    run: String,
    count: u32,
}

impl Producer {
    fn produce(&mut self, queue: &Queue) {
        let many = if self.random.u32(0..10) == 0 { 4 } else { 1 };
        let messages: Vec<_> = (0..many).map(|_| self.message(queue.name(), many == 1)).collect();
        let names: Vec<_> = messages.iter().map(|(name, _)| name.as_str()).collect();
        // Each line in one write: a kill comes before or after it, and takes nothing that was written.
        self.log.write_all(format!("try {}\n", names.join(" ")).as_bytes()).unwrap();
        let enqueued = queue.enqueue_all(messages.into_iter().map(|(_, message)| message)).unwrap();
        let ids: Vec<_> = enqueued
            .iter()
            .map(|enqueued| format!("{}{}", if enqueued.existing() { "=" } else { "" }, enqueued.id()))
            .collect();
        self.log.write_all(format!("is {}\n", ids.join(" ")).as_bytes()).unwrap();
    }

    fn message(&mut self, queue: &str, with_key: bool) -> (String, Message) {
        self.count += 1;
        let name = format!("{}.{}", self.run, self.count);
        let random = &mut self.random;
        let kind = match random.u32(0..100) {
            0..8 => "parent",
            8..12 => "reject",
            12..16 => "fail",
            16..20 => "defer",
            20..22 => "expire",
            _ => "work",
        };
        let mut message = of_kind(&name, kind).priority(random.i32(-3..=3));
        if kind == "work" && random.u32(0..6) == 0 {
            message = message.max_attempts(3);
        }
        if kind != "expire" && random.u32(0..5) == 0 {
            message = message.delay(Duration::from_millis(random.u64(1..60)));
        }
        if with_key && random.u32(0..4) == 0 {
            message = message.key(format!("key-{}", random.u32(0..8)));
        }
        if random.u32(0..4) == 0 {
            message = message.group(format!("group-{}", random.u32(0..4)));
        }
        (name, through_gate(queue, message))
    }
}

/// A message of a kind; what becomes of each but "work" and "parent" is certain, as long as nobody dies meanwhile.
fn of_kind(name: &str, kind: &str) -> Message {
    let message = Message::new(format!("{name} {kind}"));
    match kind {
        "fail" => message.max_attempts(2),
        "defer" => message.max_deferrals(3),
        "expire" => message.ttl(Duration::from_millis(1)).delay(Duration::from_millis(10)),
        _ => message,
    }
}

fn through_gate(queue: &str, message: Message) -> Message {
    match queue {
        SLOTS => message.gate("two"),
        RATED => message.gate("rate"),
        LIMITED => message.gate("api"),
        _ => message,
    }
}

// The supervisor.

/// A process of the soak, started again under the same label whenever it has ended.
struct Slot {
    role: &'static str,
    label: String,
    child: Child,
    run: i64,
    /// It is stopped, for so many turns more.
    stopped: Option<u32>,
    /// It was told to end.
    leaving: bool,
}

struct Soak<'d> {
    dir: &'d Dir,
    seed: u64,
    slots: Vec<Slot>,
    runs: i64,
    logs: Vec<std::path::PathBuf>,
    /// Runs that were killed, by this process or by a message.
    killed: BTreeSet<i64>,
    /// Runs that were told to end, with more at work than they had time for.
    deployed: BTreeSet<i64>,
    kills: u32,
    deaths: u32,
    stops: u32,
    deploys: u32,
}

impl Soak<'_> {
    fn start(&mut self, role: &'static str, label: &str) -> Slot {
        self.runs += 1;
        let (path, run, seed) = (self.dir.join("store.db"), self.runs.to_string(), self.seed.to_string());
        let path = path.to_str().unwrap();
        let child = if role == "role_soak_works" {
            Child::start(role, &[path, label, &run, &seed])
        } else {
            let log = self.dir.join(format!("log-{run}"));
            let child = Child::start(role, &[path, log.to_str().unwrap(), &run, &seed]);
            self.logs.push(log);
            child
        };
        Slot { role, label: label.to_owned(), child, run: self.runs, stopped: None, leaving: false }
    }

    fn restart(&mut self, at: usize) {
        let (role, label) = (self.slots[at].role, self.slots[at].label.clone());
        self.slots[at] = self.start(role, &label);
    }

    fn kill(&mut self, at: usize) {
        self.kills += 1;
        self.slots[at].child.kill();
        self.killed.insert(self.slots[at].run);
        self.restart(at);
    }

    fn stop(&mut self, at: usize, turns: u32) {
        self.stops += 1;
        self.slots[at].child.stop();
        self.slots[at].stopped = Some(turns);
    }

    /// Lets the stopped go on whose time has come, and starts the ended again.
    fn look_after_all(&mut self) {
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            slot.stopped = match slot.stopped {
                Some(0) => {
                    slot.child.go_on();
                    None
                }
                turns => turns.map(|turns| turns - 1),
            };
            let Some(status) = slot.child.ended() else { continue };
            if status.signal() == Some(9) {
                self.deaths += 1;
                self.killed.insert(slot.run);
            } else {
                assert!(status.success() && slot.leaving, "run {} ended by itself: {status}", slot.run);
            }
            self.restart(at);
        }
    }

    /// One blow, at whoever runs.
    fn strike(&mut self, what: u32, at: usize, turns: u32) {
        let worker = at < PROCESSES;
        let free = self.slots[at].stopped.is_none() && !self.slots[at].leaving;
        match what {
            0..4 => self.kill(at),
            4..7 if free => self.stop(at, turns),
            7..9 if free && worker => {
                self.deploys += 1;
                self.slots[at].leaving = true;
                self.slots[at].child.close();
                self.deployed.insert(self.slots[at].run);
            }
            _ => {}
        }
    }

    /// Waits until nothing is left to be done.
    fn drain(&mut self, store: &Store) {
        const TURN: Duration = Duration::from_millis(20);
        // Two minutes: it is there so that a failure ends.
        for _ in 0..6_000 {
            self.look_after_all();
            if store.stats().unwrap().queues.iter().all(|queue| queue.live() == 0) {
                return;
            }
            std::thread::sleep(TURN);
        }
        let left: Vec<_> = QUEUES
            .iter()
            .flat_map(|(queue, _)| store.list(&relet::Filter::new().queue(*queue).limit(10_000)).unwrap())
            .filter(|message| message.status.is_live())
            .map(|message| format!("{} of {}: {}", message.id, message.queue, store.why(message.id).unwrap().unwrap()))
            .collect();
        panic!("{} messages are stuck:\n{}", left.len(), left.join("\n"));
    }
}

#[test]
fn nothing_is_lost_stuck_or_worked_on_by_two_whoever_dies_or_hangs() {
    let number_of = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    let seconds = number_of("RELET_SOAK_SECONDS").unwrap_or(8);
    let seed = number_of("RELET_SOAK_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("RELET_SOAK_SEED={seed}");
    let dir = Dir::new("soak");
    let path = dir.join("store.db");
    let store = set_up(&path);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut soak = Soak {
        dir: &dir,
        seed,
        slots: Vec::new(),
        runs: 0,
        logs: Vec::new(),
        killed: BTreeSet::new(),
        deployed: BTreeSet::new(),
        kills: 0,
        deaths: 0,
        stops: 0,
        deploys: 0,
    };
    for n in 0..PROCESSES {
        let slot = soak.start("role_soak_works", &format!("worker-{n}"));
        soak.slots.push(slot);
    }
    for n in 0..PRODUCERS {
        let slot = soak.start("role_soak_produces", &format!("producer-{n}"));
        soak.slots.push(slot);
    }
    let mut own = BTreeMap::new();
    let mut enqueue = |queue: &str, name: &str, message: Message| {
        own.insert(name.to_owned(), store.queue(queue).enqueue(through_gate(queue, message)).unwrap().id().get());
    };
    for queue in [STEADY, HASTY] {
        let name = format!("first-{queue}");
        enqueue(queue, &name, of_kind(&name, "die"));
    }

    let (end, ended) = channel::<()>();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(seconds));
        drop(end);
    });
    // Each kind of blow once, whatever the time.
    let mut blows = vec![(0, 0), (4, 1), (7, 2), (0, PROCESSES)];
    while ended.recv_timeout(Duration::from_millis(random.u64(30..150))) == Err(RecvTimeoutError::Timeout)
        || !blows.is_empty()
    {
        soak.look_after_all();
        let (what, at) = blows.pop().unwrap_or_else(|| (random.u32(0..10), random.usize(0..PROCESSES + PRODUCERS)));
        soak.strike(what, at, random.u32(2..10));
    }

    // First all go on: one that was stopped may hold the file's lock, and the others wait for it.
    for slot in &mut soak.slots {
        if slot.stopped.take().is_some() {
            slot.child.go_on();
        }
    }
    for producer in soak.slots.split_off(PROCESSES) {
        producer.child.finish();
    }
    soak.drain(&store);
    // One of each kind, now that nobody is killed: what becomes of it is certain.
    for (queue, kind) in
        [(STEADY, "reject"), (STEADY, "fail"), (STEADY, "defer"), (STEADY, "expire"), (HASTY, "overrun")]
    {
        let name = format!("last-{kind}");
        enqueue(queue, &name, of_kind(&name, kind));
    }
    soak.drain(&store);
    enqueue(STEADY, "last-die", of_kind("last-die", "die"));
    enqueue(HASTY, "last-once", of_kind("last-once", "die").max_attempts(1));
    soak.drain(&store);
    let runs_ended: BTreeSet<_> = soak.slots.iter().map(|slot| slot.run).collect();
    for mut slot in soak.slots.drain(..) {
        slot.child.say("finish");
        slot.child.finish();
    }

    let oracle = Oracle::look(&path, &soak, own, runs_ended);
    let told = oracle.told();
    println!(
        "{told}, {} killed, {} died of a message, {} stopped, {} deployed",
        soak.kills, soak.deaths, soak.stops, soak.deploys
    );
    let wrong = oracle.judge();
    assert!(wrong.is_empty(), "{} violations:\n{}", wrong.len(), wrong[..wrong.len().min(30)].join("\n"));
    oracle.every_kind_was_there();
    assert!(soak.kills >= 2 && soak.stops >= 1 && soak.deploys >= 1 && soak.deaths >= 4);
    assert_eq!(store.doctor().unwrap(), Vec::<String>::new());
    let stats = store.stats().unwrap();
    for queue in &stats.queues {
        assert_eq!((queue.live(), queue.retrying, queue.stuck), (0, 0, 0), "{}", queue.queue);
        assert_eq!(queue.acked, queue.count(Status::Done), "{}", queue.queue);
    }
    assert_eq!(store.workers().unwrap(), []);
    assert!(store.gates().unwrap().iter().all(|gate| (gate.held, gate.waiting) == (0, 0)));
}

/// The soak found it: a program that ended after its stop took with it what its handlers had just done, as a crash.
#[test]
fn nothing_is_held_any_more_when_a_stop_returns() {
    let dir = Dir::new("stop");
    let store = open(&dir.join("store.db"));
    let id = store.queue(STEADY).enqueue("x").unwrap().id();
    let (begun, begins) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    let handler = move |_: &Claim| {
        begun.send(()).unwrap();
        may_go_on.lock().unwrap().recv().unwrap();
    };
    let workers = Workers::builder().lease(LONG).queue(STEADY, handler).start(&store).unwrap();
    begins.recv().unwrap();
    let mut app = application(&dir.join("store.db"));
    let locked = app.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    go_on.send(()).unwrap();
    // Time enough for its settle to be waiting for the lock. Were it not, it would be interrupted, and not held either.
    std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| {
            drop(workers.stop(Duration::ZERO));
            store.show(id).unwrap().unwrap().status
        });
        std::thread::sleep(Duration::from_millis(100));
        locked.commit().unwrap();
        assert_ne!(stop.join().unwrap(), Status::Processing);
    });
}

// The oracle.

struct Oracle {
    messages: BTreeMap<i64, Ended>,
    journal: Vec<Entry>,
    /// What the producers wrote down: the names, and what they were told, unless they were killed before.
    logged: Vec<(Vec<String>, Option<Vec<String>>)>,
    killed: BTreeSet<i64>,
    deployed: BTreeSet<i64>,
    /// Runs that were drained, and ended with nothing at work.
    drained: BTreeSet<i64>,
}

/// A message at the end.
struct Ended {
    queue: String,
    name: String,
    kind: String,
    status: String,
    key: Option<String>,
    group: Option<String>,
    token: i64,
    attempts: i64,
    crashes: i64,
    deferrals: i64,
    releases: i64,
    max_attempts: i64,
    max_deferrals: i64,
    reason: String,
}

struct Entry {
    run: i64,
    message: i64,
    token: i64,
    what: String,
    how: String,
    held: Option<i64>,
    passed_at: Option<i64>,
    closed: bool,
}

impl Oracle {
    fn look(path: &Path, soak: &Soak<'_>, own: BTreeMap<String, i64>, drained: BTreeSet<i64>) -> Oracle {
        let conn = plain(path);
        let mut statement = conn
            .prepare(
                "SELECT m.id, q.name, CAST(m.payload AS TEXT), m.status, d.key, d.group_key, m.token, m.attempts, m.crashes,
                        ifnull(d.deferrals, 0), ifnull(d.releases, 0), m.max_attempts, ifnull(d.max_deferrals, 1000),
                        ifnull(d.dead_reason, '')
                   FROM relet_messages m JOIN relet_queues q ON q.id = m.queue
                   LEFT JOIN relet_details d ON d.message = m.id",
            )
            .unwrap();
        let messages = statement.query_map([], |row| {
            let text: String = row.get(2)?;
            let (name, kind) = text.split_once(' ').unwrap();
            let ended = Ended {
                queue: row.get(1)?,
                name: name.to_owned(),
                kind: kind.to_owned(),
                status: row.get(3)?,
                key: row.get(4)?,
                group: row.get(5)?,
                token: row.get(6)?,
                attempts: row.get(7)?,
                crashes: row.get(8)?,
                deferrals: row.get(9)?,
                releases: row.get(10)?,
                max_attempts: row.get(11)?,
                max_deferrals: row.get(12)?,
                reason: row.get(13)?,
            };
            Ok((row.get(0)?, ended))
        });
        let messages = messages.unwrap().collect::<Result<_, _>>().unwrap();
        let mut statement = conn
            .prepare("SELECT run, message, token, what, how, held, passed_at, closed FROM journal ORDER BY seq")
            .unwrap();
        let journal = statement.query_map([], |row| {
            Ok(Entry {
                run: row.get(0)?,
                message: row.get(1)?,
                token: row.get(2)?,
                what: row.get(3)?,
                how: row.get(4)?,
                held: row.get(5)?,
                passed_at: row.get(6)?,
                closed: row.get::<_, Option<bool>>(7)?.unwrap_or(false),
            })
        });
        let journal = journal.unwrap().collect::<Result<_, _>>().unwrap();
        let mut logged: Vec<_> = own.into_iter().map(|(name, id)| (vec![name], Some(vec![id.to_string()]))).collect();
        for log in &soak.logs {
            let words = |line: &str| line.split(' ').skip(1).map(str::to_owned).collect::<Vec<_>>();
            // One that was killed at once had none.
            let text = std::fs::read_to_string(log).unwrap_or_default();
            // A line without an end was cut off by the kill, and not told.
            for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
                if line.starts_with("try ") {
                    logged.push((words(line), None));
                } else {
                    logged.last_mut().unwrap().1 = Some(words(line));
                }
            }
        }
        Oracle { messages, journal, logged, killed: soak.killed.clone(), deployed: soak.deployed.clone(), drained }
    }

    fn told(&self) -> String {
        let ended = |status: &str| self.messages.values().filter(|message| message.status == status).count();
        let crashes: i64 = self.messages.values().map(|message| message.crashes).sum();
        let late = self.journal.iter().filter(|entry| entry.what == "late").count();
        format!(
            "{} done, {} dead, {} claims begun, {crashes} crashed, {late} refused as late",
            ended("done"),
            ended("dead"),
            self.journal.iter().filter(|entry| entry.what == "begin").count(),
        )
    }

    /// Everything that is wrong, in sentences.
    fn judge(&self) -> Vec<String> {
        let mut of_message: BTreeMap<i64, Vec<&Entry>> = self.messages.keys().map(|id| (*id, Vec::new())).collect();
        for entry in &self.journal {
            of_message.entry(entry.message).or_default().push(entry);
        }
        let mut wrong = Vec::new();
        self.judge_enqueues(&of_message, &mut wrong);
        for (id, message) in &self.messages {
            let mut found = self.judge_holders(&of_message[id]);
            found.extend(judge_end(message, &of_message[id]));
            found.extend(self.judge_budgets(message, &of_message[id]));
            if !found.is_empty() {
                wrong.push(format!("message {id} {}: {}{}", message.told(), found.join("; "), told(&of_message[id])));
            }
        }
        self.judge_lines(&mut wrong);
        self.judge_gates(&mut wrong);
        wrong
    }

    /// What was acknowledged is stored, once; what was not may be; nothing else is.
    fn judge_enqueues(&self, of_message: &BTreeMap<i64, Vec<&Entry>>, wrong: &mut Vec<String>) {
        let mut stored: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        for (id, message) in &self.messages {
            stored.entry(&message.name).or_default().push(*id);
        }
        for (names, told) in &self.logged {
            let there: Vec<Vec<i64>> = names.iter().map(|name| stored.remove(&**name).unwrap_or_default()).collect();
            let right = match told {
                Some(ids) => ids.iter().zip(&there).all(|(id, there)| match id.strip_prefix('=') {
                    // The key was taken: nothing was stored, and the one that has it was.
                    Some(id) => there.is_empty() && self.messages.contains_key(&id.parse::<i64>().unwrap()),
                    None => **there == [id.parse::<i64>().unwrap()],
                }),
                None => [0, 1].iter().any(|count| there.iter().all(|there| there.len() == *count)),
            };
            if !right {
                wrong.push(format!("{names:?} were told {told:?}, and there are {there:?}"));
            }
        }
        for (id, message) in &self.messages {
            let born = of_message[id].iter().filter(|entry| entry.is_end("Effect")).count()
                * usize::from(message.kind == "parent");
            let children = stored.remove(&*format!("child-of-{}", message.name)).unwrap_or_default();
            if children.len() != born {
                wrong.push(format!("message {id} {} has the children {children:?}", message.told()));
            }
        }
        wrong.extend(stored.iter().map(|(name, ids)| format!("{name}, {ids:?}, was never enqueued")));
    }

    /// One holder at a time, as told by the entries of one message.
    fn judge_holders(&self, entries: &[&Entry]) -> Vec<String> {
        let mut wrong = Vec::new();
        let (mut token, mut ended, mut effect) = (0, true, false);
        for entry in entries.iter().filter(|entry| entry.is_guarded()) {
            let begins = entry.what == "begin";
            if effect {
                wrong.push("was worked on after its effect".to_owned());
            }
            if begins && entry.token <= token {
                wrong.push(format!("was begun under token {} after {token}", entry.token));
            }
            if !begins && (entry.token, ended) != (token, false) {
                wrong.push(format!("token {} ended while {token} was the newest", entry.token));
            }
            (token, ended, effect) = (entry.token, !begins, effect || entry.is_end("Effect"));
        }
        let is_settled = |token: i64| entries.iter().any(|entry| entry.what == "settled" && entry.token == token);
        for begun in entries.iter().filter(|entry| entry.what == "begin") {
            if self.drained.contains(&begun.run) && !is_settled(begun.token) {
                wrong.push(format!("what became of token {} is not known, and its process lived", begun.token));
            }
        }
        wrong
    }

    /// Each claim ended in one way, and no budget was charged for another's end.
    fn judge_budgets(&self, message: &Ended, entries: &[&Entry]) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut between = |what: &str, low: i64, value: i64, high: i64| {
            if !(low..=high).contains(&value) {
                wrong.push(format!("{what}: {value} is not in {low}..={high}"));
            }
        };
        let count = |is: &dyn Fn(&Entry) -> bool| entries.iter().filter(|entry| is(entry)).count() as i64;
        let ended = |plans: &[&str]| count(&|entry| plans.iter().any(|plan| entry.is_end(plan)));
        let settled = |how: &str| count(&|entry| entry.what == "settled" && entry.how == how);
        let begun = count(&|entry| entry.what == "begin");
        let claims = message.attempts + message.deferrals + message.releases;
        between("claims", begun, claims, message.token);
        between("tokens", claims, message.token, claims + message.crashes);
        let charged = ended(&["Effect", "Ack", "Fail", "Panic", "Reject"]);
        between(
            "acked, failed or rejected",
            settled("charged") + ended(&["Effect"]),
            message.attempts - message.crashes,
            charged,
        );
        between("deferrals", settled("deferred"), message.deferrals, ended(&["Defer", "Limited"]));
        // Lost by the deaths of processes alone, where the lease outlasts everything.
        if [STEADY, RATED].contains(&&*message.queue) {
            let gone = |entry: &Entry| {
                let is_over =
                    |other: &&Entry| other.token == entry.token && (other.what == "settled" || other.is_end("Effect"));
                entry.what == "begin" && self.killed.contains(&entry.run) && !entries.iter().any(is_over)
            };
            between("crashes", 0, message.crashes, count(&gone) + claims - begun);
            let lost =
                |entry: &Entry| (entry.what == "late" || entry.how == "lost") && !self.deployed.contains(&entry.run);
            between("claims lost by a well holder", 0, count(&lost), 0);
        }
        for entry in entries.iter().filter(|entry| entry.what == "settled") {
            let known = ["charged", "deferred", "released", "in the transaction", "before", "lost"];
            if !known.contains(&&*entry.how) {
                wrong.push(format!("token {} was settled as {}", entry.token, entry.how));
            }
            let changed = ["charged", "deferred", "released"].contains(&&*entry.how);
            if changed && !entries.iter().any(|end| end.what == "end" && end.token == entry.token) {
                wrong.push(format!("token {} was lost, and settled all the same", entry.token));
            }
        }
        wrong
    }

    /// Members of a group, and messages of a key, one after the other.
    fn judge_lines(&self, wrong: &mut Vec<String>) {
        let mut reached: BTreeMap<(&str, &str), i64> = BTreeMap::new();
        for entry in self.journal.iter().filter(|entry| entry.is_guarded()) {
            let Some(message) = self.messages.get(&entry.message) else { continue };
            for line in [&message.group, &message.key].into_iter().flatten() {
                let last = reached.entry((&message.queue, line)).or_default();
                if entry.message < *last {
                    wrong.push(format!("{line} of {}: message {} after {last}", message.queue, entry.message));
                }
                *last = entry.message.max(*last);
            }
        }
    }

    fn judge_gates(&self, wrong: &mut Vec<String>) {
        let ended: BTreeSet<_> =
            self.journal.iter().filter(|entry| entry.what == "end").map(|entry| (entry.message, entry.token)).collect();
        let mut open = BTreeSet::new();
        let mut passed = Vec::new();
        for entry in self.journal.iter().filter(|entry| entry.is_guarded()) {
            let queue = self.messages.get(&entry.message).map_or("", |message| &message.queue);
            let claim = (entry.message, entry.token);
            if entry.closed {
                wrong.push(format!("message {} of {queue} passed a closed gate", entry.message));
            }
            if queue == SLOTS && ended.contains(&claim) {
                if entry.what == "begin" {
                    open.insert(claim)
                } else {
                    open.remove(&claim)
                };
            }
            if queue == SLOTS && (entry.held > Some(2) || open.len() > 2) {
                wrong.push(format!("{:?} have passed a gate of two, {open:?} at work, at {claim:?}", entry.held));
            }
            if queue == RATED {
                passed.extend(entry.passed_at.map(|at| (at, claim)));
            }
        }
        passed.sort_unstable();
        for pair in passed.windows(2).filter(|pair| pair[1].0 - pair[0].0 < RATE_GAP) {
            wrong.push(format!("{pair:?} passed a gate too soon one after the other"));
        }
    }

    /// What was provoked on purpose has come.
    fn every_kind_was_there(&self) {
        let named = |name: &str| self.messages.values().find(|message| message.name == name).unwrap();
        for (name, reason) in [
            ("last-reject", "rejected"),
            ("last-fail", "failed 2 times"),
            ("last-defer", "deferred 3 times"),
            ("last-expire", "expired"),
            ("last-overrun", "crashed 3 times"),
            ("last-die", "crashed 3 times"),
            ("last-once", "crashed on the last of 1 attempts"),
        ] {
            assert!(named(name).reason.starts_with(reason), "{}", named(name).told());
        }
        assert!(self.journal.iter().any(|entry| entry.what == "settled" && entry.how == "lost"));
        for (queue, _) in QUEUES {
            assert!(
                self.messages.values().any(|message| message.queue == queue && message.status == "done"),
                "{queue}"
            );
        }
    }
}

/// How it ended is what its last holder said, or a budget that is spent.
fn judge_end(message: &Ended, entries: &[&Entry]) -> Option<String> {
    let last = entries.iter().rfind(|entry| entry.is_guarded());
    let last_is = |plans: &[&str]| last.is_some_and(|last| plans.iter().any(|plan| last.is_end(plan)));
    let Ended { attempts, crashes, deferrals, max_attempts, max_deferrals, reason, .. } = message;
    let dead = message.status == "dead";
    let done = message.status == "done" && last_is(&["Effect", "Ack"]);
    let crashed = dead
        && !last_is(&["Effect"])
        && match reason.split_once(':').map_or(&**reason, |(what, _)| what) {
            "crashed 3 times" => *crashes == 3,
            what => {
                what == format!("crashed on the last of {max_attempts} attempts")
                    && attempts == max_attempts
                    && *crashes > 0
            }
        };
    let failed = dead
        && *reason == format!("failed {max_attempts} times, the limit of its attempts")
        && attempts == max_attempts
        && last_is(&["Fail", "Panic"]);
    let rejected = dead && reason == "rejected" && last_is(&["Reject"]);
    let deferred = dead
        && reason.starts_with(&format!("deferred {max_deferrals} times;"))
        && deferrals == max_deferrals
        && last_is(&["Defer"]);
    let expired = dead && reason.starts_with("expired") && entries.is_empty() && message.token == 0;
    let right = match &*message.kind {
        "reject" => rejected || crashed,
        "fail" => failed || crashed,
        "defer" => deferred || crashed,
        "expire" => expired,
        "die" | "overrun" => crashed,
        _ => done || failed || crashed,
    };
    (!right).then(|| "did not end so as its holders and its budgets say".to_owned())
}

impl Entry {
    /// Written in a transaction that asked whether the claim holds.
    fn is_guarded(&self) -> bool {
        self.what == "begin" || self.what == "end"
    }

    fn is_end(&self, plan: &str) -> bool {
        self.what == "end" && self.how == plan
    }
}

impl Ended {
    fn told(&self) -> String {
        format!(
            "({} {} of {}, {:?} {:?}) is {} {:?}, with token {}, attempts {} of {}, crashes {}, deferrals {}, releases {}",
            self.name,
            self.kind,
            self.queue,
            self.group,
            self.key,
            self.status,
            self.reason,
            self.token,
            self.attempts,
            self.max_attempts,
            self.crashes,
            self.deferrals,
            self.releases,
        )
    }
}

fn told(entries: &[&Entry]) -> String {
    let line = |entry: &&Entry| format!("\n    run {} token {}: {} {}", entry.run, entry.token, entry.what, entry.how);
    entries.iter().map(line).collect()
}
