//! The commands that move messages: enqueue, claim, settle, route, cancel, and what is done with dead letters.

use std::io::{self, IsTerminal, Read};
use std::time::Duration;

use relet::{
    Claim, Error, How, Message, MessageId, PAYLOAD_MAX, Receipt, Result, Route, Settle, Settled, Store, Verdict, Wait,
};

use crate::args::{self, Global};
use crate::exit::{Exit, Failure, Outcome, describe, exit_of};
use crate::json::Object;
use crate::look::check_named;
use crate::output::{Out, clean, count, say};
use crate::render;
use crate::time::span;

pub(crate) fn enqueue(global: &Global, out: &mut Out, args: &args::Enqueue) -> Outcome {
    let Some(payload) = &args.payload else {
        return Err(Failure::usage("give a PAYLOAD, or - to read it from stdin, or --lines"));
    };
    let store = global.create()?;
    let queue = store.queue(&args.queue);
    let enqueued = match payload == "-" {
        true => queue.enqueue_from(args.message(Vec::new()), io::stdin().lock())?,
        false => queue.enqueue(args.message(payload.clone().into_encoded_bytes()))?,
    };
    if let (true, Some(key)) = (enqueued.existing(), &args.options.key) {
        say(format_args!("nothing was stored: live message {} has the key {key:?} already", enqueued.id()));
    }
    match out.json {
        true => out.object(Object::new().put("id", enqueued.id()).put("existing", enqueued.existing()))?,
        false => out.line(enqueued.id())?,
    }
    Ok(Exit::Done)
}

impl args::Enqueue {
    /// A message with this payload and all that the options say.
    pub(crate) fn message(&self, payload: Vec<u8>) -> Message {
        let message = self.options.message(payload);
        match (self.delay, self.at) {
            (Some(delay), _) => message.delay(delay),
            (None, Some(at)) => message.at(at),
            (None, None) => message,
        }
    }
}

impl args::MessageOptions {
    /// A message with this payload and these options.
    pub(crate) fn message(&self, payload: Vec<u8>) -> Message {
        let mut message = Message::new(payload).priority(self.priority);
        if let Some(key) = &self.key {
            message = message.key(key);
        }
        if let Some(group) = &self.group {
            message = message.group(group);
        }
        if let Some(gate) = &self.gate {
            message = message.gate(gate);
        }
        if let Some(ttl) = self.ttl {
            message = message.ttl(ttl);
        }
        if let Some(max) = self.max_attempts {
            message = message.max_attempts(max);
        }
        if let Some(max) = self.max_deferrals {
            message = message.max_deferrals(max);
        }
        message
    }
}

/// The whole of stdin, as one payload. One byte above the limit is enough to be refused.
pub(crate) fn read_payload() -> Outcome<Vec<u8>> {
    let mut payload = Vec::new();
    match io::stdin().lock().take(PAYLOAD_MAX as u64 + 1).read_to_end(&mut payload) {
        Ok(_) if payload.len() <= PAYLOAD_MAX => Ok(payload),
        Ok(_) => Err(Failure::failed(format!(
            "payload too large: stdin has more than {PAYLOAD_MAX} bytes; store it elsewhere and enqueue a reference"
        ))),
        Err(error) => Err(Failure::failed(format!("stdin cannot be read: {error}"))),
    }
}

pub(crate) fn claim(global: &Global, out: &mut Out, args: &args::Claim) -> Outcome {
    let store = global.existing()?;
    let mut worker = store.detached(&args.worker)?;
    if let Some(lease) = args.lease {
        worker = worker.lease(lease)?;
    }
    if let Some(id) = args.id {
        return match worker.claim_id(id)? {
            Verdict::Claimed(claim) | Verdict::Resumed(claim) | Verdict::Recovered(claim) => {
                hand_out(&store, out, &[claim], false)
            }
            other => Ok(refused(id, &args.worker, &other)),
        };
    }
    // The group of arguments in args.rs wants one of queue and id.
    let queue = args.queue.as_deref().unwrap_or_default();
    let mut claims = worker.claim_batch(queue, args.number.into())?;
    if claims.is_empty()
        && let Some(first) = worker.claim_wait(queue, args.wait)?
    {
        // What came together with the one that was waited for. Its error would lose the first one, and comes again anyway.
        let others = worker.claim_batch(queue, usize::from(args.number) - 1).unwrap_or_default();
        claims.push(first);
        claims.extend(others);
    }
    if !claims.is_empty() {
        return hand_out(&store, out, &claims, args.number > 1);
    }
    let waited = if args.wait.is_zero() { String::new() } else { format!(" within {}", span(args.wait)) };
    Err(Failure::nothing(format!(
        "nothing to claim in queue {queue:?}{waited}; `relet why ID` says what a message waits for"
    )))
}

/// Prints the claims. If that fails nobody knows their receipts, so they are given back.
fn hand_out(store: &Store, out: &mut Out, claims: &[Claim], a_line_each: bool) -> Outcome {
    for claim in claims {
        let how = match claim.how() {
            How::Claimed => "claimed",
            How::Resumed => "resumed: claimed again by the worker it belongs to, an older receipt is stale",
            How::Recovered => "recovered: an earlier claim of this worker was void",
        };
        say(format_args!("message {}, attempt {}, {how}", claim.id(), claim.attempts()));
    }
    let printed = claims.iter().try_for_each(|claim| print_claim(store, out, claim, a_line_each));
    if let Err(failure) = printed.and_then(|()| out.flush()) {
        store.settle_all(claims.iter().map(|claim| (claim.receipt(), Settle::Release)))?;
        return Err(failure);
    }
    Ok(Exit::Done)
}

fn print_claim(store: &Store, out: &mut Out, claim: &Claim, a_line_each: bool) -> Outcome<()> {
    if out.json {
        // It may have been cancelled since; its holder will hear of that when it settles.
        let Some(message) = store.show(claim.id())? else { return Ok(()) };
        return out.object(render::message_without_payload(&message).payload(claim.payload()));
    }
    let text = || clean(&String::from_utf8_lossy(claim.payload()));
    if a_line_each {
        return out.line(format_args!("{}\t{}", claim.receipt(), text()));
    }
    out.line(claim.receipt())?;
    if io::stdout().is_terminal() {
        return out.line(text());
    }
    out.bytes(claim.payload())?;
    out.line("")
}

/// Says why a message was not claimed.
fn refused(id: MessageId, worker: &str, verdict: &Verdict) -> Exit {
    let (exit, text) = match verdict {
        Verdict::Held { by, lease_left } if by == worker => (
            Exit::Lost,
            format!(
                "held by {by:?} itself for another {}: claiming it again would exceed its attempts",
                span(*lease_left)
            ),
        ),
        Verdict::Held { by, lease_left } => {
            (Exit::Lost, format!("held by worker {by:?} for another {}", span(*lease_left)))
        }
        Verdict::Waiting { what, until } => (Exit::Lost, waiting(what, *until)),
        Verdict::Finished { status } => (Exit::Nothing, format!("finished: it is {status}")),
        _ => (Exit::Nothing, "not in the store; `relet list` shows what is there".into()),
    };
    say(format_args!("not claimed: message {id} is {text}"));
    exit
}

fn waiting(what: &Wait, until: Option<i64>) -> String {
    let open_end = match what {
        Wait::Paused => "it is resumed",
        _ => "it is opened",
    };
    let until = until.map(|at| format!(" until {}", render::end_in_words(at, open_end))).unwrap_or_default();
    match what {
        Wait::Due => format!("waiting{until}"),
        Wait::Deferred { by } => format!("deferred, and kept for worker {by:?}{until}"),
        Wait::Group { behind } => format!("waiting behind message {behind} of its group"),
        Wait::Route(route) => format!("waiting for a worker that serves route {route}"),
        Wait::Paused => format!("in a queue that is paused{until}"),
        Wait::Gate { name } if until.is_empty() => {
            format!("waiting behind gate {name:?} for a message that has passed it to be settled")
        }
        Wait::Gate { name } => format!("waiting behind gate {name:?}{until}"),
        other => format!("waiting for {other:?}{until}"),
    }
}

/// Settles each of these claims the same way, all in one commit, and prints what came of each.
pub(crate) fn settle(global: &Global, out: &mut Out, receipts: &[Receipt], verb: &str, how: &Settle) -> Outcome {
    let store = global.existing()?;
    let outcomes = store.settle_all(receipts.iter().map(|receipt| (*receipt, how.clone())))?;
    let mut exit = Exit::Done;
    for (receipt, outcome) in receipts.iter().zip(outcomes) {
        exit = exit.max(settled(out, *receipt, verb, &outcome)?);
    }
    Ok(exit)
}

fn settled(out: &mut Out, receipt: Receipt, verb: &str, outcome: &Result<Settled>) -> Outcome {
    let object = Object::new().put("receipt", receipt).put("id", receipt.id());
    let (exit, object, text) = match outcome {
        Ok(Settled::Now(status)) => {
            (Exit::Done, object.put("outcome", verb).put("status", status), format!("{verb}, the message is {status}"))
        }
        Ok(Settled::Before(status)) => (
            Exit::Done,
            object.put("outcome", "settled_before").put("status", status),
            format!("nothing to do: the same receipt settled it before, the message is {status}"),
        ),
        Ok(Settled::Gone) => (
            Exit::Nothing,
            object.put("outcome", "gone").put("status", None::<&str>),
            "gone: there is no such message any more, it was settled before".into(),
        ),
        Err(error) => {
            let (word, status) = match error {
                Error::Stale { now, .. } => ("stale", Some(now.status)),
                Error::Cancelled { .. } => ("cancelled", Some(relet::Status::Cancelled)),
                Error::Gone { .. } => ("gone", None),
                _ => ("failed", None),
            };
            let object = object.put("outcome", word).put("status", status).put("error", error.to_string());
            (exit_of(error), object, describe(error))
        }
    };
    if exit != Exit::Done {
        say(format_args!("{receipt}: {text}"));
    }
    match out.json {
        true => out.object(object)?,
        false if exit == Exit::Done => out.line(format_args!("{receipt}: {text}"))?,
        false => {}
    }
    Ok(exit)
}

pub(crate) fn route(global: &Global, out: &mut Out, id: MessageId, route: Route) -> Outcome {
    global.existing()?.route(id, route)?;
    match out.json {
        true => out.object(Object::new().put("id", id).put("outcome", "routed").put("route", route))?,
        false => out.line(format_args!("{id}: routed to {route}"))?,
    }
    Ok(Exit::Done)
}

pub(crate) fn cancel(global: &Global, out: &mut Out, ids: &[MessageId]) -> Outcome {
    let outcomes = global.existing()?.cancel_all(ids.iter().copied())?;
    let mut exit = Exit::Done;
    for (id, outcome) in ids.iter().zip(outcomes) {
        exit = exit.max(item(out, *id, "cancelled", outcome)?);
    }
    Ok(exit)
}

/// Prints what came of one message of several.
fn item(out: &mut Out, id: MessageId, verb: &str, outcome: Result<()>) -> Outcome {
    let object = Object::new().put("id", id);
    let Err(error) = outcome else {
        match out.json {
            true => out.object(object.put("outcome", verb))?,
            false => out.line(format_args!("{id}: {verb}"))?,
        }
        return Ok(Exit::Done);
    };
    let word = match error {
        Error::Gone { .. } => "gone",
        _ => "refused",
    };
    say(describe(&error));
    if out.json {
        out.object(object.put("outcome", word).put("error", error.to_string()))?;
    }
    Ok(exit_of(&error))
}

pub(crate) fn redrive(global: &Global, out: &mut Out, ids: &[MessageId], queue: Option<&str>) -> Outcome {
    let store = global.existing()?;
    let mut exit = Exit::Done;
    if !ids.is_empty() {
        for id in ids {
            match store.redrive(*id) {
                // What concerns only this message is its own outcome; anything else would concern the rest as well.
                Err(error) if !matches!(error, Error::Gone { .. } | Error::Status { .. } | Error::KeyTaken { .. }) => {
                    return Err(error.into());
                }
                outcome => exit = exit.max(item(out, *id, "redriven", outcome)?),
            }
        }
        return Ok(exit);
    }
    check_named(&store, queue)?;
    let all = store.redrive_all(queue)?;
    if out.json {
        for id in &all.redriven {
            item(out, *id, "redriven", Ok(()))?;
        }
    } else {
        out.line(format_args!("{} redriven", count(all.redriven.len(), "dead letter")))?;
    }
    for (id, error) in all.refused {
        exit = exit.max(item(out, id, "redriven", Err(error))?);
    }
    Ok(exit)
}

pub(crate) fn purge(global: &Global, out: &mut Out, older_than: Duration) -> Outcome {
    let purged = global.existing()?.purge_dead(older_than)?;
    match out.json {
        true => out.object(Object::new().put("purged", purged))?,
        false => out.line(format_args!("{} deleted", count(purged, "dead letter")))?,
    }
    Ok(Exit::Done)
}
