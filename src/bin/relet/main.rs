//! `relet`, the command line: a durable message queue in one SQLite file, for shells and people.
//!
//! It is built on the library's public API alone. One file per duty:
//!
//! ```text
//! main      the front door: reads the command line, runs a command, turns what came of it into an exit code
//! args      every command, its arguments and its help      open    which store, and how it is opened
//! work      enqueue, claim, settle, route, cancel, redrive look    the commands that only look
//! lines     enqueue --lines    transfer  export, import    upkeep  prune, backup, restore, completions, man
//! control   gates, pauses and what a queue says of its messages
//! schedule  add, remove and run schedules
//! run       work: a command for each message              child    one of those commands, from its start to its end
//! voice     what commands say side by side                tail     the last of it, a message's error
//! demo      the failure that relet exists for, and its cure
//! stream    stdin line by line, in bounded memory, and the batches that its lines are stored in
//! render    records as objects and as words                json    JSON lines and payloads
//! mark      what the first bytes of a text say         pieces   large payloads, cut into lines
//! output    stdout and stderr     exit    exit codes       time    spans, instants, clocks
//! ```

mod args;
#[cfg_attr(not(unix), path = "child_elsewhere.rs")]
mod child;
mod control;
mod demo;
mod exit;
mod json;
mod lines;
mod look;
mod mark;
mod open;
mod output;
mod pieces;
mod render;
mod run;
mod schedule;
mod stream;
mod tail;
mod time;
mod transfer;
mod upkeep;
mod voice;
mod work;

use std::process::ExitCode;

use clap::Parser;
use relet::Settle;

use crate::args::{Cli, Command, Dead, Gate, Queue, Schedule};
use crate::exit::{Exit, Failure, Outcome, describe, exit_of};
use crate::output::{Out, say};

fn main() -> ExitCode {
    let exit = match Cli::try_parse() {
        Ok(cli) => {
            let mut out = Out::new(cli.global.json);
            let outcome = run(&cli, &mut out).and_then(|exit| out.flush().map(|()| exit));
            outcome.unwrap_or_else(|failure| tell(&failure))
        }
        Err(error) => explain(&error),
    };
    ExitCode::from(exit.code())
}

fn run(cli: &Cli, out: &mut Out) -> Outcome {
    let global = &cli.global;
    match &cli.command {
        Command::Demo(args) => demo::run(global, out, args),
        Command::Enqueue(args) if args.lines.is_some() => lines::enqueue(global, out, args),
        Command::Enqueue(args) => work::enqueue(global, out, args),
        Command::Claim(args) => work::claim(global, out, args),
        Command::Work(args) => run::work(global, out, args),
        Command::Ack(args) => work::settle(global, out, &args.receipts, "acked", &Settle::Ack),
        Command::Fail { receipts, error, retry_in } => {
            let how = Settle::Fail { error: error.clone(), retry_in: *retry_in };
            work::settle(global, out, &receipts.receipts, "failed", &how)
        }
        Command::Reject { receipts, error } => {
            work::settle(global, out, &receipts.receipts, "rejected", &Settle::Reject { error: error.clone() })
        }
        Command::Defer { receipts, delay, reason } => {
            let how = Settle::Defer { delay: *delay, reason: reason.clone() };
            work::settle(global, out, &receipts.receipts, "deferred", &how)
        }
        Command::Limited { receipts, retry_after } => {
            work::settle(global, out, &receipts.receipts, "limited", &Settle::Limited { retry_after: *retry_after })
        }
        Command::Release(args) => work::settle(global, out, &args.receipts, "released", &Settle::Release),
        Command::Extend { receipts, lease } => {
            work::settle(global, out, &receipts.receipts, "extended", &Settle::Extend { lease: *lease })
        }
        Command::Route { id, route } => work::route(global, out, *id, *route),
        Command::Cancel { ids } => work::cancel(global, out, ids),
        Command::Stats => look::stats(global, out),
        Command::List(args) => look::list(global, out, args),
        Command::Show { id } => look::show(global, out, *id),
        Command::Why { id } => look::why(global, out, *id),
        Command::RetryQueue { queue, limit } => look::retry_queue(global, out, queue.as_deref(), *limit),
        Command::Stuck { older_than } => look::stuck(global, out, *older_than),
        Command::Gate(Gate::Set { name, concurrency, rate, burst, no_limits: _ }) => {
            control::gate_set(global, out, name, control::limits(*concurrency, *rate, *burst))
        }
        Command::Gate(Gate::Close { name, delay }) => control::gate_close(global, out, name, *delay),
        Command::Gate(Gate::Open { name }) => control::gate_open(global, out, name),
        Command::Gate(Gate::List) => look::gates(global, out),
        Command::Pause { queue, delay } => control::pause(global, out, queue, *delay),
        Command::Resume { queue } => control::resume(global, out, queue),
        Command::Queue(Queue::Set(args)) => control::queue_set(global, out, args),
        Command::Workers => look::workers(global, out),
        Command::Dead(Dead::List { queue, page }) => look::dead_list(global, out, queue.as_deref(), page),
        Command::Dead(Dead::Redrive { ids, queue, all: _ }) => work::redrive(global, out, ids, queue.as_deref()),
        Command::Dead(Dead::Purge { older_than }) => work::purge(global, out, *older_than),
        Command::Schedule(Schedule::Add(args)) => schedule::add(global, out, args),
        Command::Schedule(Schedule::List) => look::schedules(global, out),
        Command::Schedule(Schedule::Remove { name }) => schedule::remove(global, out, name),
        Command::Schedule(Schedule::Run { once }) => schedule::run(global, out, *once),
        Command::Metrics => look::metrics(global, out),
        Command::Doctor { repair } => look::doctor(global, out, *repair),
        Command::Backup { dest } => upkeep::backup(global, out, dest),
        Command::Restore { source } => upkeep::restore(global, out, source),
        Command::Export { queue } => transfer::export(global, out, queue.as_deref()),
        Command::Import => transfer::import(global, out),
        Command::Prune => upkeep::prune(global, out),
        Command::Completions { shell } => upkeep::completions(out, *shell),
        Command::Man => upkeep::man(out),
    }
}

/// Says on stderr why a command ended early.
fn tell(failure: &Failure) -> Exit {
    match failure {
        Failure::Pipe => Exit::Done,
        Failure::Told(exit, text) => {
            say(text);
            *exit
        }
        Failure::Library(error) => {
            say(describe(error));
            exit_of(error)
        }
    }
}

/// Prints the help or version that was asked for, or what is wrong with the command line.
fn explain(error: &clap::Error) -> Exit {
    if !error.use_stderr() {
        return match error.print() {
            Ok(()) => Exit::Done,
            Err(error) => tell(&Failure::output(&error)),
        };
    }
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        Some(text) => say(text.trim_end()),
        None => drop(error.print()), // The help, since no command was given.
    }
    Exit::Usage
}
