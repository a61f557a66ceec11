//! The command line: every command, its arguments and its help.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use relet::{CatchUp, MessageId, PAGE, Receipt, Retry, Route, Status};

use crate::time::{self, Rate};

const ABOUT: &str = "An embedded, durable message queue in one SQLite file, whose claims can be claimed again.

Data goes to stdout, talk to stderr. With --json every record is one JSON object on a line of its own.";

const NOTES: &str = "\
FORMS:
  Durations are whole numbers with units, the largest first: 250ms, 30s, 5m, 1h30m, 2d.
  Instants are RFC 3339 with an offset: 2030-01-31T08:00:00Z, 2030-01-31T08:00:00+02:00.
  Receipts are what `claim` printed: 40.2, or 40.3-2 in the store's second epoch.
  Rates are messages per duration: 100/1m, 5/250ms.
  Backoffs are one duration, always the same (30s), or the first and the longest, each wait twice the one before: 1s..1h.

JSON:
  A message has id, queue, status, priority, attempts, crashes, deferrals, due_at, worker, receipt, lease_left_ms,
  payload, last_error, enqueued_at and more. Members that end in _at or _until are instants in unix milliseconds (the
  last one, 253402300799999: without an end), those that end in _ms are spans in milliseconds. payload is the payload
  itself where that is JSON, else a string; where it is no text, payload_base64 is there instead.

EXIT CODES:
  0   done (also: no stuck message, nothing found wrong, an empty list)
  1   failed
  2   the command line is wrong
  3   nothing there: nothing to claim, no such message, queue, gate, schedule or store
  4   the claim was lost, the message is held, or the worker's label is taken
  5   stuck or doctor found something
  75  busy: another process kept the store locked for the whole --busy-wait, or has open what is to be restored
  130 demo was told to stop; work was told to stop at once
  Of several outcomes, the worst one counts. A reader that goes away (a closed pipe) is no failure.";

#[derive(Debug, Parser)]
#[command(name = "relet", version, about = ABOUT, after_long_help = NOTES, max_term_width = 120)]
#[command(arg_required_else_help = true, subcommand_required = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The store: a SQLite file. `enqueue`, `import`, `restore`, `gate set`, `queue set` and `schedule add` create it, the others do not.
    // Not a PathBuf, since an empty RELET_DB means that none is named.
    #[arg(short, long, global = true, env = "RELET_DB", hide_env_values = true, value_name = "FILE")]
    pub(crate) db: Option<OsString>,
    /// Print JSON, one object a line.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// How long to wait for another process that holds the store's lock.
    #[arg(long, global = true, value_name = "D", value_parser = time::busy_wait, allow_hyphen_values = true, default_value = "5s")]
    pub(crate) busy_wait: Duration,
    /// What a commit survives: a power cut (full), or only the death of the process (normal).
    #[arg(long, global = true, value_name = "LEVEL", value_enum, default_value = "full")]
    pub(crate) durability: Durability,
    /// How long done messages are kept: what the application says of its store. `ack` deletes at once unless it is set.
    #[arg(long, global = true, value_name = "D", value_parser = time::duration, allow_hyphen_values = true, default_value = "0s")]
    pub(crate) retention: Duration,
    /// Work with a linked SQLite older than 3.51.3, which has a race that can corrupt files.
    #[arg(long, global = true)]
    pub(crate) allow_old_sqlite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Durability {
    Full,
    Normal,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the failure that relet exists for, and its cure, on real messages.
    ///
    /// Producers and workers deliver messages to an API that allows only so many calls a second and answers 429 with
    /// Retry-After to the rest: first with the naive claim, then with relet's. It takes about four seconds; with more
    /// than 800 messages, one second for each 200. It works in a folder of its own, so no -d is needed.
    Demo(Demo),
    /// Store a message, or every line of stdin as one. Prints the id.
    Enqueue(Enqueue),
    /// Claim the next messages of a queue, or one by its id. Prints receipt and payload.
    ///
    /// The claim outlives this command: settle it by its receipt (ack, fail, reject, defer, limited, release) before
    /// its lease runs out. Claiming again as the same worker is safe, and makes the older receipt stale.
    ///
    /// One message is printed as its receipt on the first line, then the payload as it is, then a line break. With -n 2
    /// and more, each takes one line: receipt, tab, payload with its control characters escaped. Use --json in programs.
    /// If stdout cannot be written, what was claimed is released.
    ///
    /// Exits with 3 if there is nothing to claim. With --id: with 3 if there is no such message or it is finished (it
    /// will never be there), with 4 if somebody holds it or it waits for something (it may be there later).
    Claim(Claim),
    /// Run a command for each message of some queues, until a signal.
    ///
    /// The payload is on its stdin. In its environment are RELET_ID, RELET_QUEUE, RELET_ATTEMPT (from 1 on), RELET_RECEIPT,
    /// RELET_PRIORITY and RELET_DB, and where the message has one RELET_KEY, RELET_GROUP, RELET_GATE and RELET_TICK_AT
    /// (the instant of its schedule's tick, in unix ms). As long as it runs nobody else gets the message.
    ///
    /// Its exit code is the outcome: 0 acks; 65 (EX_DATAERR) rejects; 75 (EX_TEMPFAIL) defers for --defer-for, and closes
    /// the message's gate for as long, if it has one; any other fails, with the last lines of stderr as the error. Killed
    /// by a signal is failed, too. If it cannot be started at all, the message is released, and the work ends with 1.
    /// A command may also settle its message itself, by RELET_RECEIPT, as the last thing that it does; its exit code counts
    /// for nothing then. When its message is cancelled it gets SIGTERM at the next heartbeat: after a third of the lease at most.
    ///
    /// Its stdout and stderr are passed on. With -j 2 and more, in whole lines (of up to 64 KiB); with --json, stdout
    /// holds an object for each finished message, and what the commands write to it goes to stderr. A reader of stdout
    /// that goes away does not end the work. When a command has ended, what it has left running is no longer listened to.
    /// But it keeps the worker's label, and after a crash of this process all claims of the worker until their leases end.
    ///
    /// The first SIGINT, SIGTERM or SIGHUP stops: no message is begun, commands that run get SIGTERM, and SIGKILL after
    /// --grace. One that exits with 0, 65 or 75 all the same is taken at its word; any other message is released, and its
    /// attempt given back. The exit code is 0 then. A second signal kills the commands at once, and the exit code is 130.
    /// Commands run in process groups of their own, so that ^C at the terminal reaches them by this way only. SIGHUP stops
    /// under nohup, too: start it with setsid where it is to outlive the terminal.
    ///
    /// The store's schedules are run as well.
    #[command(override_usage = "relet work [OPTIONS] <QUEUE>... -- <COMMAND>...")]
    Work(Work),
    /// Settle: the work is done. The message is deleted, or kept for --retention.
    ///
    /// Exits with 3 where a message is gone (it was settled before, and deleted), with 4 where the claim was lost. The
    /// same holds for fail, reject, defer, limited, release and extend. Settling twice by the same receipt is safe.
    Ack(Receipts),
    /// Settle: the work failed. It is tried again after its backoff, or becomes a dead letter.
    Fail {
        #[command(flatten)]
        receipts: Receipts,
        /// Why.
        #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
        error: String,
        /// Try again after this long, instead of after the backoff.
        #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
        retry_in: Option<Duration>,
    },
    /// Settle: the message can never be worked on. It becomes a dead letter at once.
    Reject {
        #[command(flatten)]
        receipts: Receipts,
        /// Why.
        #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
        error: String,
    },
    /// Settle: not now (a rate limit). It stays this worker's and waits in the retry queue; no attempt is counted.
    Defer {
        #[command(flatten)]
        receipts: Receipts,
        /// How long to wait.
        #[arg(long = "for", value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
        delay: Duration,
        /// Why, for the retry queue.
        #[arg(long, value_name = "TEXT", default_value = "deferred", allow_hyphen_values = true)]
        reason: String,
    },
    /// Settle: the other side allows nothing for a while (a 429). The message waits, and its gate closes for as long.
    ///
    /// So its siblings wait in the store, instead of each running into the same wall. No attempt is counted. When the
    /// gate opens again its messages come in their order, one at a time first. A message without a gate is deferred only.
    Limited {
        #[command(flatten)]
        receipts: Receipts,
        /// For how long: the Retry-After of the answer.
        #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
        retry_after: Duration,
    },
    /// Settle: give the message back, for anyone, at once. No attempt is counted.
    Release(Receipts),
    /// Hold on to a claim: its lease lasts at least this long from now on.
    Extend {
        #[command(flatten)]
        receipts: Receipts,
        /// The lease from now on.
        #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
        lease: Duration,
    },
    /// Change the route of a live message: the claimable status that it has when nobody holds it.
    Route {
        /// The message.
        id: MessageId,
        /// Its route from now on.
        #[arg(value_name = "STATUS", value_parser = route_parser())]
        route: Route,
    },
    /// Cancel live messages. Whoever holds one is told so by its next call.
    Cancel {
        /// The messages.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<MessageId>,
    },
    /// Count the messages of each queue by status. Costs the same at any size.
    ///
    /// With --json: an object for each queue, then one for the store (the one with file_bytes).
    Stats,
    /// List messages by id, without their payloads.
    List(List),
    /// Show everything about a message.
    Show {
        /// The message.
        id: MessageId,
    },
    /// Say why a message is not being handed out now.
    Why {
        /// The message.
        id: MessageId,
    },
    /// List the messages whose next try is set for later, the earliest first.
    RetryQueue {
        /// Only this queue's.
        queue: Option<String>,
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = PAGE)]
        limit: usize,
    },
    /// List what has been in processing for too long without a lease that runs. Exits with 5 if there is something.
    Stuck {
        /// For how long.
        #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true, default_value = "1h")]
        older_than: Duration,
    },
    /// Look after gates: named valves that messages pass when they are handed out (an API, a tenant, "online").
    #[command(subcommand)]
    Gate(Gate),
    /// Hand nothing out of a queue, until `resume`.
    ///
    /// Enqueueing and settling go on, and so does what is being worked on.
    Pause {
        /// The queue.
        queue: String,
        /// It goes on by itself after this long.
        #[arg(long = "for", value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
        delay: Option<Duration>,
    },
    /// Go on with a queue that is paused.
    Resume {
        /// The queue.
        queue: String,
    },
    /// Say what holds for all messages of a queue.
    #[command(subcommand)]
    Queue(Queue),
    /// List the workers, alive or not, and whoever else holds or has deferred something.
    ///
    /// A dead one's process has died: the next claim takes what it held. Of an unknown one that cannot be told, and its
    /// leases decide. One that has ended did so in good order, and may have left its receipts to somebody. A detached one
    /// claimed with this command line. A label can be there twice: registered, and detached.
    Workers,
    /// Look after dead letters: messages that were given up.
    #[command(subcommand)]
    Dead(Dead),
    /// Look after schedules: named recurring enqueues.
    #[command(subcommand)]
    Schedule(Schedule),
    /// Print counters, ages and sizes as Prometheus text. As objects they are printed by `stats --json` and `gate list --json`;
    /// with --json this is refused.
    Metrics,
    /// Check the file and every promise of its tables. Exits with 5 if something is wrong.
    Doctor {
        /// Put right what can be, and say what was done; also where the store cannot be opened. Keep a copy of the file first.
        /// No message is removed. Exits with 5 if something is left.
        #[arg(long)]
        repair: bool,
    },
    /// Write a copy of the store to a new file, while others go on.
    ///
    /// The copy is whole, in one file; receipts that the original issues from now on are worth nothing in it.
    ///
    /// To go back to it: stop all that has the store open, then `relet -d STORE restore COPY`. Never copy it over the file with
    /// `cp`: the log beside the file would be taken for the copy's, and damage it.
    Backup {
        /// The new file.
        dest: PathBuf,
    },
    /// Replace the store by a copy of another file, a backup, or make one of it.
    ///
    /// What was there is gone with its log, also where it was damaged. The copy is a store of its own: no receipt from before is
    /// worth anything, and what was held can be claimed by anyone. A kill or a power cut on its way leaves the old store or the
    /// new one, each whole (and perhaps a file *.part, which can be deleted). Exits with 75, and changes nothing, while anybody
    /// has the store open or a worker of it lives; with 1 where the source is damaged or no store.
    Restore {
        /// The file that it is copied from. It may be in use.
        #[arg(value_name = "SRC")]
        source: PathBuf,
    },
    /// Write every live message and dead letter to stdout, as JSON lines that `import` reads.
    ///
    /// payload is always a string here (payload_base64 where it is no text), so that no byte of it changes; one above 1 MiB
    /// follows in pieces, a line each. Others may go on meanwhile; what they finish is left out. A payload that does not match
    /// its checksum is left out and named, and the exit code is 1. Queues' settings, gates' limits and schedules are not
    /// written. For an exact copy of everything use `backup`.
    Export {
        /// Only this queue's.
        queue: Option<String>,
    },
    /// Store the messages that `export` wrote, from stdin, each with its history. Creates the store.
    ///
    /// All that a line says is kept, but for the id, which is new, and for who held the message: what was in processing can be
    /// claimed by anyone, once its due_at has come. Dead letters stay dead letters (`dead redrive` makes them live). A live
    /// message whose key a live one has is not stored. What has no key is stored again by a second import; after an import
    /// that has stopped at a line, go on with `tail -n +LINE`.
    ///
    /// A line by hand needs queue and payload, or payload_base64. A string is the payload; any other JSON value is taken as its
    /// text, byte by byte, also null. due_at is an instant of the calendar unless due_on_wall is false. A bad line, also one
    /// with a member that there is not, is named by its number, and the others are imported; then the exit code is 1.
    Import,
    /// Delete what is finished and past --retention, make dead letters of what has expired, give free pages back.
    Prune,
    /// Print the completions for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Print the manual page.
    Man,
}

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Messages to deliver.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub(crate) messages: u32,
    /// Workers that deliver them.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) workers: u16,
    /// Keep the folder with the two databases, and say where it is.
    #[arg(long)]
    pub(crate) keep: bool,
    /// What the demonstration runs itself with, as the process that is killed.
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) victim: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Enqueue {
    /// The queue.
    pub(crate) queue: String,
    /// The payload; `-` reads it from stdin.
    #[arg(required_unless_present = "lines")]
    pub(crate) payload: Option<OsString>,
    /// Store each line of stdin as a message of its own.
    ///
    /// A line's bytes are the payload, without the line break; empty lines are skipped, and a byte order mark in front. If the first line begins with
    /// `{`, every line must be JSON; --lines=text and --lines=json say which it is. A bad line is named by its number and
    /// the others are stored; then the exit code is 1. A line is stored as soon as it is there, also while stdin stays
    /// open, and many at once where many are there. With --json one object with line and id is printed for each, after
    /// its commit. The options below apply to every line.
    #[arg(long, value_name = "FORM", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    #[arg(conflicts_with = "key")]
    pub(crate) lines: Option<Form>,
    /// Not handed out before this much time has passed.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) delay: Option<Duration>,
    /// Not handed out before this instant.
    #[arg(long, value_name = "T", value_parser = time::instant, allow_hyphen_values = true, conflicts_with = "delay")]
    pub(crate) at: Option<SystemTime>,
    #[command(flatten)]
    pub(crate) options: MessageOptions,
}

/// What is said of a message besides its payload.
#[derive(Debug, Args)]
pub(crate) struct MessageOptions {
    /// Higher is handed out first, -32768 to 32767.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i32,
    /// While a live message of the queue has this key, nothing is stored; `enqueue` prints that message's id.
    #[arg(long, value_name = "K")]
    pub(crate) key: Option<String>,
    /// Messages of a group are handed out in order, one at a time.
    #[arg(long, value_name = "G")]
    pub(crate) group: Option<String>,
    /// The gate that it passes when it is handed out; the queue's unless set, or none.
    #[arg(long, value_name = "G")]
    pub(crate) gate: Option<String>,
    /// Becomes a dead letter if it has not been handed out by then.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) ttl: Option<Duration>,
    /// How often it is tried.
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<u32>,
    /// How often it may be deferred.
    #[arg(long, value_name = "N")]
    pub(crate) max_deferrals: Option<u32>,
}

/// What the lines of stdin are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    /// JSON if the first line begins with `{`, else text.
    Auto,
    /// Every line is taken as it is.
    Text,
    /// Every line must be JSON.
    Json,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["queue", "id"]))]
pub(crate) struct Claim {
    /// The queue.
    pub(crate) queue: Option<String>,
    /// This very message.
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<MessageId>,
    /// Who claims: a label that stays the same from one claim to the next.
    #[arg(short, long, value_name = "W")]
    pub(crate) worker: String,
    /// Up to so many messages.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, conflicts_with = "id")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) number: u16,
    /// How long the claim holds; the queue's lease unless set.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) lease: Option<Duration>,
    /// Wait this long for a message, if there is none.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true, default_value = "0s", conflicts_with = "id")]
    pub(crate) wait: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Work {
    /// The queues.
    #[arg(required = true, value_name = "QUEUE")]
    pub(crate) queues: Vec<String>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
    /// How many commands run at a time.
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) jobs: u16,
    /// Who works: a label that stays the same over restarts; one that nobody else has unless set.
    #[arg(short, long, value_name = "W")]
    pub(crate) worker: Option<String>,
    /// How long a claim holds if this process hangs; the queue's lease unless set. It is extended while a command runs.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) lease: Option<Duration>,
    /// A command that takes longer gets SIGTERM, and SIGKILL after --grace; its message has failed then.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) limit: Option<Duration>,
    /// End when nothing can be claimed. What waits for its time is not waited for.
    #[arg(long)]
    pub(crate) drain: bool,
    /// How long a command that is to end has until it is killed.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true, default_value = "10s")]
    pub(crate) grace: Duration,
    /// How long a message waits whose command exits with 75.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true, default_value = "30s")]
    pub(crate) defer_for: Duration,
    /// A queue's share where several have messages: 3 gets three times as many as 1; 1 unless set, 1 to 1,000.
    #[arg(long = "weight", value_name = "QUEUE=N", value_parser = weight)]
    pub(crate) weights: Vec<Weight>,
}

/// A queue's share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Weight {
    pub(crate) queue: String,
    pub(crate) weight: u32,
}

/// Reads a share, such as `mail=3`.
fn weight(text: &str) -> Result<Weight, String> {
    let parsed = text.rsplit_once('=').and_then(|(queue, weight)| Some((queue, weight.parse().ok()?)));
    match parsed {
        Some((queue, weight)) => Ok(Weight { queue: queue.to_owned(), weight }),
        None => Err(format!("the weight {text:?} cannot be read; write it as QUEUE=3")),
    }
}

#[derive(Debug, Args)]
pub(crate) struct Receipts {
    /// The claims, as `claim` printed them.
    #[arg(required = true, value_name = "RECEIPT")]
    pub(crate) receipts: Vec<Receipt>,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only this queue's.
    pub(crate) queue: Option<String>,
    /// Only messages in this status.
    #[arg(long, value_parser = status_parser())]
    pub(crate) status: Option<Status>,
    #[command(flatten)]
    pub(crate) page: Page,
}

#[derive(Debug, Args)]
pub(crate) struct Page {
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = PAGE)]
    pub(crate) limit: usize,
    /// Only messages with a larger id: the last one of the page before.
    #[arg(long, value_name = "ID")]
    pub(crate) after: Option<MessageId>,
    /// With their payloads.
    #[arg(long)]
    pub(crate) payload: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Gate {
    /// Limit what passes a gate while it is open, in place of the limits that it had.
    ///
    /// The limits hold for all processes together. Whether the gate is closed does not change.
    #[command(group = ArgGroup::new("limits").required(true).multiple(true).args(["concurrency", "rate", "no_limits"]))]
    Set {
        /// The gate.
        #[arg(value_name = "GATE")]
        name: String,
        /// At most so many claims at a time.
        #[arg(long, value_name = "N")]
        concurrency: Option<u32>,
        /// At most so many messages in that time, evenly.
        #[arg(long, value_name = "N/D", value_parser = time::rate, allow_hyphen_values = true)]
        rate: Option<Rate>,
        /// So many of them may come at once after a quiet time; 1 unless set.
        #[arg(long, value_name = "N", requires = "rate")]
        burst: Option<u32>,
        /// Everything passes.
        #[arg(long, conflicts_with_all = ["concurrency", "rate", "burst"])]
        no_limits: bool,
    },
    /// Close a gate, until `gate open`. What has passed goes on.
    Close {
        /// The gate.
        #[arg(value_name = "GATE")]
        name: String,
        /// It opens by itself after this long, gently as by `gate open`; later where it is closed for longer already.
        #[arg(long = "for", value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
        delay: Option<Duration>,
    },
    /// Open a closed gate: gently, one message at a time first. Its limits stay.
    Open {
        /// The gate.
        #[arg(value_name = "GATE")]
        name: String,
    },
    /// List the gates: their limits, what has passed and is held, what waits.
    List,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Queue {
    /// Set what a queue says of messages that say nothing themselves, in place of what it said.
    #[command(group = ArgGroup::new("defaults").required(true).multiple(true)
        .args(["max_attempts", "lease", "retry", "gate", "ageing", "no_defaults"]))]
    Set(QueueSet),
}

#[derive(Debug, Args)]
pub(crate) struct QueueSet {
    /// The queue.
    pub(crate) queue: String,
    /// How often a message is tried, of those enqueued from now on.
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<u32>,
    /// How long a claim holds.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) lease: Option<Duration>,
    /// How failed messages back off.
    #[arg(long, value_name = "D[..D]", value_parser = time::retry, allow_hyphen_values = true)]
    pub(crate) retry: Option<Retry>,
    /// The gate of messages, of those enqueued from now on.
    #[arg(long, value_name = "G")]
    pub(crate) gate: Option<String>,
    /// Each time a message has waited this long, it counts as one priority higher.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) ageing: Option<Duration>,
    /// Nothing: the store's defaults hold.
    #[arg(long, conflicts_with_all = ["max_attempts", "lease", "retry", "gate", "ageing"])]
    pub(crate) no_defaults: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Schedule {
    /// Store a schedule, in place of the one of this name. Creates the store.
    ///
    /// Each tick enqueues one message, however many processes run the schedules: `work`, `schedule run`, and programs with
    /// workers of their own. As long as its time stays the same, so does its next tick.
    Add(Box<ScheduleAdd>),
    /// List the schedules: when they tick next, and when they did.
    List,
    /// Remove a schedule. Messages that it has enqueued stay. Exits with 3 if there is none of this name.
    Remove {
        /// The schedule.
        name: String,
    },
    /// Enqueue what the schedules have due, until SIGINT, SIGTERM or SIGHUP. The exit code is 0 then.
    ///
    /// SIGHUP ends it under nohup, too: start it with setsid where it is to outlive the terminal.
    ///
    /// A schedule that cannot be run is named once, and holds up no other; its ticks are not lost.
    Run {
        /// Once, and end: for the system's own timers. The exit code tells whether all could be run.
        #[arg(long)]
        once: bool,
    },
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("when").required(true).args(["every", "cron"]))]
pub(crate) struct ScheduleAdd {
    /// The schedule.
    pub(crate) name: String,
    /// The queue that it enqueues into.
    pub(crate) queue: String,
    /// The payload of its messages; `-` reads it from stdin. Empty unless set.
    pub(crate) payload: Option<OsString>,
    /// A tick each time this much time has passed; the first one so long from now on.
    #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true)]
    pub(crate) every: Option<Duration>,
    /// A tick whenever the clock on the wall shows this: "0 3 * * MON-FRI" is three in the morning on working days.
    ///
    /// Five fields (minute, hour, day of the month, month, day of the week), or six with the seconds first; or one of @hourly,
    /// @daily, @weekly, @monthly and @yearly. Where both days are named, either will do.
    #[arg(long, value_name = "PATTERN", requires = "tz", allow_hyphen_values = true)]
    pub(crate) cron: Option<String>,
    /// The time zone of that clock: Europe/Berlin, UTC.
    #[arg(long, value_name = "ZONE", requires = "cron", conflicts_with = "every")]
    pub(crate) tz: Option<String>,
    /// What becomes of ticks that nobody was there to run: nothing (skip), one message for the latest (one), or a message
    /// for each of the latest N.
    #[arg(long, value_name = "skip|one|N", value_parser = catch_up, default_value = "one")]
    pub(crate) catch_up: CatchUp,
    #[command(flatten)]
    pub(crate) options: MessageOptions,
}

/// Reads what becomes of missed ticks.
fn catch_up(text: &str) -> Result<CatchUp, String> {
    match text {
        "skip" => Ok(CatchUp::Skip),
        "one" => Ok(CatchUp::One),
        _ => {
            text.parse().map(CatchUp::All).map_err(|_| format!("{text:?} is none of skip, one, and a number of ticks"))
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Dead {
    /// List dead letters by id, with why they were given up.
    List {
        /// Only this queue's.
        queue: Option<String>,
        #[command(flatten)]
        page: Page,
    },
    /// Make dead letters live again: all budgets whole, their history kept.
    #[command(group = ArgGroup::new("which").required(true).args(["ids", "queue", "all"]))]
    Redrive {
        /// These.
        #[arg(value_name = "ID")]
        ids: Vec<MessageId>,
        /// All of this queue.
        #[arg(long, value_name = "Q")]
        queue: Option<String>,
        /// All of the store.
        #[arg(long)]
        all: bool,
    },
    /// Delete dead letters for good.
    Purge {
        /// Only those that died at least this long ago.
        #[arg(long, value_name = "D", value_parser = time::duration, allow_hyphen_values = true, default_value = "0s")]
        older_than: Duration,
    },
}

fn status_parser() -> impl TypedValueParser<Value = Status> {
    PossibleValuesParser::new(Status::ALL.map(Status::as_str)).try_map(|word| word.parse::<Status>())
}

fn route_parser() -> impl TypedValueParser<Value = Route> {
    PossibleValuesParser::new(Route::ALL.map(Route::as_str)).try_map(|word| word.parse::<Route>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
