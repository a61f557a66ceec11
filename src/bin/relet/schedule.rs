//! The commands that set, remove and run schedules.

use std::collections::HashSet;
use std::sync::mpsc;
use std::time::Duration;

use relet::{Ticks, When};

use crate::args::{Global, ScheduleAdd};
use crate::exit::{Exit, Failure, Outcome, describe, exit_of};
use crate::json::Object;
use crate::output::{Out, count, say};
use crate::render;
use crate::work::read_payload;

/// How often the schedules are looked at at least: one that another process sets, and a clock that is set, wake nobody.
const LOOK: Duration = Duration::from_secs(1);

pub(crate) fn add(global: &Global, out: &mut Out, args: &ScheduleAdd) -> Outcome {
    let payload = match &args.payload {
        Some(payload) if payload == "-" => read_payload()?,
        Some(payload) => payload.clone().into_encoded_bytes(),
        None => Vec::new(),
    };
    let when = match (args.every, &args.cron, &args.tz) {
        (Some(span), ..) => When::every(span),
        (None, Some(pattern), Some(time_zone)) => When::cron(pattern, time_zone),
        _ => return Err(Failure::usage("give --every, or --cron and --tz")),
    };
    let schedule = global.create()?.schedule(&args.name);
    let view = schedule.set(when, &args.queue, args.options.message(payload), args.catch_up)?;
    match out.json {
        true => out.object(render::schedule(&view))?,
        false => out.line(render::schedule_in_words(&view))?,
    }
    Ok(Exit::Done)
}

pub(crate) fn remove(global: &Global, out: &mut Out, name: &str) -> Outcome {
    if !global.existing()?.schedule(name).remove()? {
        return Err(Failure::nothing(format!(
            "there is no schedule {name:?} in this store; `relet schedule list` lists the schedules"
        )));
    }
    match out.json {
        true => out.object(Object::new().put("schedule", name).put("outcome", "removed"))?,
        false => out.line(format_args!("{name}: removed"))?,
    }
    Ok(Exit::Done)
}

pub(crate) fn run(global: &Global, out: &mut Out, once: bool) -> Outcome {
    let store = global.existing()?;
    let mut failing = HashSet::new();
    if once {
        let ticks = store.run_schedules()?;
        print(out, &ticks)?;
        let worst = ticks.failed.iter().map(|(_, error)| exit_of(error)).max();
        name_failing(&mut failing, ticks);
        return Ok(worst.unwrap_or(Exit::Done));
    }
    let (signals, signalled) = mpsc::channel();
    let handler = move || {
        let _ = signals.send(());
    };
    ctrlc::set_handler(handler).map_err(|error| Failure::failed(format!("signals cannot be handled: {error}")))?;
    loop {
        let pause = match store.run_schedules() {
            Ok(ticks) => {
                if ticks.enqueued > 0 {
                    print(out, &ticks)?;
                    out.flush()?;
                }
                let pause = ticks.next.map_or(LOOK, |next| next.min(LOOK));
                name_failing(&mut failing, ticks);
                pause
            }
            Err(error) if error.is_transient() => {
                say(describe(&error));
                LOOK
            }
            Err(error) => return Err(error.into()),
        };
        if signalled.recv_timeout(pause).is_ok() {
            return Ok(Exit::Done);
        }
    }
}

fn print(out: &mut Out, ticks: &Ticks) -> Outcome<()> {
    match out.json {
        true => {
            let failed: Vec<&str> = ticks.failed.iter().map(|(name, _)| name.as_str()).collect();
            let object = Object::new().put("enqueued", ticks.enqueued).put("failed", failed);
            out.object(object.put("next_ms", ticks.next.map(render::ms)))
        }
        false => out.line(format_args!("{} enqueued", count(ticks.enqueued, "message"))),
    }
}

/// Names the schedules that could not be run, each once until it can.
fn name_failing(failing: &mut HashSet<String>, ticks: Ticks) {
    for (name, error) in ticks.failed.iter().filter(|(name, _)| !failing.contains(name)) {
        say(format_args!("schedule {name:?}: {}", describe(error)));
    }
    *failing = ticks.failed.into_iter().map(|(name, _)| name).collect();
}
