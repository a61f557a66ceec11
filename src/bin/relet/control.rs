//! The commands that steer what is handed out: gates, pauses, and what a queue says of its messages.

use std::time::Duration;

use relet::{GateLimits, GateView, QueueDefaults, Store};

use crate::args::{Global, QueueSet};
use crate::exit::{Exit, Failure, Outcome};
use crate::json::Object;
use crate::look::{check_named, has_queue};
use crate::output::{Out, say};
use crate::render;
use crate::time::Rate;

pub(crate) fn limits(concurrency: Option<u32>, rate: Option<Rate>, burst: Option<u32>) -> GateLimits {
    let mut limits = GateLimits::new();
    if let Some(claims) = concurrency {
        limits = limits.concurrency(claims);
    }
    if let Some(rate) = rate {
        limits = limits.rate(rate.messages, rate.period);
    }
    if let Some(messages) = burst {
        limits = limits.burst(messages);
    }
    limits
}

pub(crate) fn gate_set(global: &Global, out: &mut Out, name: &str, limits: GateLimits) -> Outcome {
    let store = global.create()?;
    store.gate(name).limit(limits)?;
    print_gate(&store, out, name)
}

pub(crate) fn gate_close(global: &Global, out: &mut Out, name: &str, delay: Option<Duration>) -> Outcome {
    let store = global.existing()?;
    let is_new = find_gate(&store, name)?.is_none();
    match delay {
        Some(delay) => store.gate(name).close_for(delay)?,
        None => store.gate(name).close()?,
    }
    if is_new {
        say(format_args!("gate {name:?} is a new one: no message has named it yet"));
    }
    print_gate(&store, out, name)
}

pub(crate) fn gate_open(global: &Global, out: &mut Out, name: &str) -> Outcome {
    let store = global.existing()?;
    if find_gate(&store, name)?.is_none() {
        return Err(no_gate(name));
    }
    store.gate(name).open()?;
    print_gate(&store, out, name)
}

fn find_gate(store: &Store, name: &str) -> Outcome<Option<GateView>> {
    Ok(store.gates()?.into_iter().find(|gate| gate.name == name))
}

fn no_gate(name: &str) -> Failure {
    Failure::nothing(format!("there is no gate {name:?} in this store; `relet gate list` lists the gates"))
}

/// Prints what a gate is like now.
fn print_gate(store: &Store, out: &mut Out, name: &str) -> Outcome {
    let gate = find_gate(store, name)?.ok_or_else(|| no_gate(name))?;
    match out.json {
        true => out.object(render::gate(&gate))?,
        false => out.line(render::gate_in_words(&gate))?,
    }
    Ok(Exit::Done)
}

pub(crate) fn pause(global: &Global, out: &mut Out, queue: &str, delay: Option<Duration>) -> Outcome {
    let store = global.existing()?;
    let is_new = !has_queue(&store, queue)?;
    match delay {
        Some(delay) => store.queue(queue).pause_for(delay)?,
        None => store.queue(queue).pause()?,
    }
    if is_new {
        say(format_args!("queue {queue:?} is a new one: it has no messages yet"));
    }
    print_pause(&store, out, queue)
}

pub(crate) fn resume(global: &Global, out: &mut Out, queue: &str) -> Outcome {
    let store = global.existing()?;
    check_named(&store, Some(queue))?;
    store.queue(queue).resume()?;
    print_pause(&store, out, queue)
}

/// Prints until when a queue is paused now, if it is.
fn print_pause(store: &Store, out: &mut Out, queue: &str) -> Outcome {
    let stats = store.stats()?;
    let paused_until = stats.queues.iter().find(|known| known.queue == queue).and_then(|known| known.paused_until);
    match out.json {
        true => out.object(Object::new().put("queue", queue).put("paused_until", paused_until))?,
        false => out.line(render::pause_in_words(queue, paused_until))?,
    }
    Ok(Exit::Done)
}

pub(crate) fn queue_set(global: &Global, out: &mut Out, args: &QueueSet) -> Outcome {
    global.create()?.queue(&args.queue).set_defaults(args.defaults())?;
    match out.json {
        true => out.object(Object::new().put("queue", &args.queue).put("outcome", "set"))?,
        false => out.line(format_args!("{}: set", args.queue))?,
    }
    Ok(Exit::Done)
}

impl QueueSet {
    fn defaults(&self) -> QueueDefaults {
        let mut defaults = QueueDefaults::new();
        if let Some(max) = self.max_attempts {
            defaults = defaults.max_attempts(max);
        }
        if let Some(lease) = self.lease {
            defaults = defaults.lease(lease);
        }
        if let Some(retry) = self.retry {
            defaults = defaults.retry(retry);
        }
        if let Some(gate) = &self.gate {
            defaults = defaults.gate(gate);
        }
        if let Some(step) = self.ageing {
            defaults = defaults.ageing(step);
        }
        defaults
    }
}
