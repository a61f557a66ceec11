//! `relet work`: a command is run for each message of some queues, until a signal.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use relet::{CancelReason, Claim, Finished, Outcome as Handled, Settled, Status, Workers};

use crate::args::{Global, Weight, Work};
use crate::child::{self, Children, Ended};
use crate::exit::{Exit, Failure, Outcome, describe};
use crate::json::Object;
use crate::look::has_queue;
use crate::output::{Out, clean, say};
use crate::render::ms;
use crate::time::span;
use crate::voice::Voice;

/// Exit codes of a command that say more than that it failed (sysexits.h).
const EX_DATAERR: i32 = 65;
const EX_TEMPFAIL: i32 = 75;
/// How long a stop waits beyond the grace of the children, for what they came to to be stored.
const SETTLING: Duration = Duration::from_secs(5);

/// What ends the work.
enum End {
    Signal,
    CannotStart(std::io::Error),
    /// It is drained, or met an error that does not pass.
    Itself,
}

/// What every handler knows.
struct Shared {
    program: OsString,
    arguments: Vec<OsString>,
    db: PathBuf,
    limit: Option<Duration>,
    grace: Duration,
    defer_for: Duration,
    children: Arc<Children>,
    voice: Voice,
    end: Sender<End>,
}

pub(crate) fn work(global: &Global, out: &mut Out, args: &Work) -> Outcome {
    check(args)?;
    let [program, arguments @ ..] = &args.command[..] else {
        return Err(Failure::usage("give a command after --"));
    };
    find_command(program)?;
    let store = global.existing()?;
    let mut new = Vec::new();
    for queue in &args.queues {
        if !has_queue(&store, queue)? {
            new.push(queue);
        }
    }
    let (end, ends) = mpsc::channel();
    let children = Arc::new(Children::default());
    let signals = Arc::new(AtomicU32::new(0));
    on_signal(end.clone(), children.clone(), signals.clone())?;
    let shared = Arc::new(Shared {
        program: program.clone(),
        arguments: arguments.to_vec(),
        db: absolute(global.db.as_deref()),
        limit: args.limit,
        grace: args.grace,
        defer_for: args.defer_for,
        children,
        voice: Voice::new(out.json, args.jobs > 1),
        end: end.clone(),
    });

    let mut builder = Workers::builder().concurrency(args.jobs.into()).drain(args.drain).share_with_commands(true);
    if let Some(label) = &args.worker {
        builder = builder.label(label);
    }
    if let Some(lease) = args.lease {
        builder = builder.lease(lease);
    }
    if let Some(limit) = args.limit {
        builder = builder.time_limit(limit);
    }
    for queue in &args.queues {
        let shared = shared.clone();
        builder = builder.queue(queue, move |claim: &Claim| shared.handle(claim));
    }
    for weight in &args.weights {
        builder = builder.weight(&weight.queue, weight.weight);
    }
    let finished = shared.clone();
    let workers = builder
        .on_finish(move |claim, finish| finished.report(claim, finish))
        .on_error(|error| say(describe(error)))
        .on_end(move || drop(end.send(End::Itself)))
        .start(&store)?;
    for queue in new {
        say(format_args!("queue {queue:?} is a new one: it has no messages yet"));
    }

    let end = ends.recv().unwrap_or(End::Itself);
    let stopped = workers.stop(args.grace.saturating_add(SETTLING));
    for id in &stopped.interrupted {
        say(format_args!("message {id}: its command has not ended; the message was released"));
    }
    if signals.load(Ordering::Relaxed) > 1 {
        return Ok(Exit::Interrupted);
    }
    if let End::CannotStart(error) = end {
        return Err(cannot_start(program, &error));
    }
    if let Some(error) = stopped.error {
        return Err(error.into());
    }
    shared.voice.end()?;
    Ok(if stopped.interrupted.is_empty() { Exit::Done } else { Exit::Failed })
}

/// What the library would refuse as well, in the words of the command line.
fn check(args: &Work) -> Outcome<()> {
    for (at, queue) in args.queues.iter().enumerate() {
        if args.queues[..at].contains(queue) {
            return Err(Failure::usage(format!(
                "queue {queue:?} is named twice; give it more with --weight {queue}=2"
            )));
        }
    }
    for (at, Weight { queue, .. }) in args.weights.iter().enumerate() {
        if !args.queues.contains(queue) {
            return Err(Failure::usage(format!("--weight names queue {queue:?}, which is not worked on")));
        }
        if args.weights[..at].iter().any(|other| other.queue == *queue) {
            return Err(Failure::usage(format!("--weight names queue {queue:?} twice; give it one share")));
        }
    }
    Ok(())
}

/// The first signal stops, the second one kills, the third one ends this process as it is.
fn on_signal(end: Sender<End>, children: Arc<Children>, signals: Arc<AtomicU32>) -> Outcome<()> {
    let handler = move || match signals.fetch_add(1, Ordering::Relaxed) {
        0 => {
            say("stopping: waiting for the commands that run; once more kills them");
            let _ = end.send(End::Signal);
        }
        1 => children.kill(),
        _ => std::process::exit(Exit::Interrupted.code().into()),
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::failed(format!("signals cannot be handled: {error}")))
}

/// So that a command which changes its folder still finds it.
fn absolute(db: Option<&OsStr>) -> PathBuf {
    let db = Path::new(db.unwrap_or_default());
    std::path::absolute(db).unwrap_or_else(|_| db.to_owned())
}

/// Refuses a command that is not there before anything is claimed for it.
#[cfg(unix)]
fn find_command(program: &OsStr) -> Outcome<()> {
    let is_command = |path: &Path| path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    let path = Path::new(program);
    if program.as_encoded_bytes().contains(&b'/') {
        return match std::fs::metadata(path) {
            Err(error) => Err(cannot_start(program, &error)),
            Ok(_) if is_command(path) => Ok(()),
            Ok(_) => Err(Failure::failed(format!(
                "the command {program:?} cannot be started: it is no program that may be run"
            ))),
        };
    }
    // Without a PATH the system has one of its own.
    let Some(folders) = std::env::var_os("PATH") else { return Ok(()) };
    match std::env::split_paths(&folders).any(|folder| is_command(&folder.join(path))) {
        true => Ok(()),
        false => Err(Failure::failed(format!("the command {program:?} cannot be started: it is in no folder of PATH"))),
    }
}

/// Elsewhere the system's ways to find one are its own.
#[cfg(not(unix))]
fn find_command(_: &OsStr) -> Outcome<()> {
    Ok(())
}

fn cannot_start(program: &OsStr, error: &std::io::Error) -> Failure {
    Failure::failed(format!("the command {program:?} cannot be started: {error}"))
}

impl Shared {
    fn handle(&self, claim: &Claim) -> Handled {
        match child::run(self.command(claim), claim, self.grace, &self.children, &self.voice) {
            Ok(ended) => self.judge(claim, ended),
            Err(error) => {
                let _ = self.end.send(End::CannotStart(error));
                // Until the others are told, too: or this one would come again, and again.
                claim.cancel_token().wait(SETTLING);
                Handled::Release
            }
        }
    }

    fn command(&self, claim: &Claim) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .env("RELET_DB", &self.db)
            .env("RELET_ID", claim.id().to_string())
            .env("RELET_QUEUE", claim.queue())
            .env("RELET_ATTEMPT", claim.attempts().to_string())
            .env("RELET_RECEIPT", claim.receipt().to_string())
            .env("RELET_PRIORITY", claim.priority().to_string());
        let tick = claim.tick_at().map(|at| at.to_string());
        for (name, value) in [
            ("RELET_KEY", claim.key()),
            ("RELET_GROUP", claim.group()),
            ("RELET_GATE", claim.gate()),
            ("RELET_TICK_AT", tick.as_deref()),
        ] {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn judge(&self, claim: &Claim, ended: Ended) -> Handled {
        let Ended { status, told, tail } = ended;
        let with_tail = |what: String| if tail.is_empty() { what } else { format!("{what}\n{tail}") };
        let said = || if tail.is_empty() { status.to_string() } else { tail.clone() };
        match (status.code(), self.limit) {
            (_, Some(limit)) if told == Some(CancelReason::TimeLimit) => {
                Handled::fail(with_tail(format!("over its time limit of {}", span(limit))))
            }
            (Some(0), _) => Handled::Ack,
            (Some(EX_DATAERR), _) => Handled::reject(said()),
            (Some(EX_TEMPFAIL), _) if claim.gate().is_some() => Handled::Limited { retry_after: self.defer_for },
            (Some(EX_TEMPFAIL), _) => Handled::Defer { delay: self.defer_for, reason: said() },
            (Some(_), _) => Handled::fail(said()),
            (None, _) => Handled::fail(with_tail(format!("killed by {}", status.to_string().replacen(": ", " ", 1)))),
        }
    }

    /// Says what came of a message.
    fn report(&self, claim: &Claim, finished: &Finished) {
        let (outcome, error) = in_words(finished);
        let status = match &finished.settled {
            Ok(Settled::Now(status) | Settled::Before(status)) => Some(*status),
            _ => None,
        };
        self.voice.object(|| {
            let object = Object::new()
                .put("id", claim.id())
                .put("queue", claim.queue())
                .put("receipt", claim.receipt())
                .put("attempts", claim.attempts())
                .put("outcome", outcome)
                .put("status", status)
                .put("took_ms", ms(finished.took));
            match &error {
                Some(error) => object.put("error", error),
                None => object,
            }
        });
        let first = error.as_deref().and_then(|error| error.lines().next()).map(|line| format!(": {}", clean(line)));
        let (by, now) = match &finished.settled {
            Ok(Settled::Before(status)) => (" by its command", format!(", it is {status}")),
            Ok(Settled::Gone) => (" by its command", ", it is gone".into()),
            Ok(Settled::Now(Status::Dead)) => ("", ", it is a dead letter now".into()),
            _ => ("", String::new()),
        };
        if !self.voice.json {
            say(format_args!(
                "message {} of {:?} {outcome}{by} after {}{}{now}",
                claim.id(),
                claim.queue(),
                span(finished.took),
                first.unwrap_or_default()
            ));
        }
    }
}

/// What came of a message, as a word, and why.
fn in_words(finished: &Finished) -> (&'static str, Option<String>) {
    match (&finished.settled, &finished.outcome) {
        (Err(error), _) if error.is_claim_lost() => ("lost", Some(error.to_string())),
        (Err(error), _) => ("unsettled", Some(error.to_string())),
        // The command had used its receipt: what it came to after that changed nothing.
        (Ok(Settled::Before(_) | Settled::Gone), _) => ("settled", None),
        (_, Handled::Ack) => ("acked", None),
        (_, Handled::Fail { error, .. }) => ("failed", Some(error.clone())),
        (_, Handled::Reject { error }) => ("rejected", Some(error.clone())),
        (_, Handled::Defer { reason, .. }) => ("deferred", Some(reason.clone())),
        (_, Handled::Limited { .. }) => ("limited", None),
        (_, Handled::Release) => ("released", None),
        _ => ("settled", None),
    }
}
