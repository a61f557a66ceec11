//! The commands that only look: they open the store read-only, and never make a file.

use std::time::Duration;

use comfy_table::Table;
use relet::{Error, Filter, MessageId, PAGE, Snapshot, Status, Store};

use crate::args::{Global, List, Page};
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{Out, clean, count, say};
use crate::render;

/// How a finding of the doctor ends that is no damage, and is over by itself.
const PASSES: &str = "this passes when the clock gets there";

pub(crate) fn stats(global: &Global, out: &mut Out) -> Outcome {
    let store = global.look()?;
    let stats = store.stats()?;
    if out.json {
        for queue in &stats.queues {
            out.object(render::queue(queue))?;
        }
        out.object(render::store(&stats))?;
        return Ok(Exit::Done);
    }
    out.table(render::queues(&stats))?;
    out.line(format_args!("file {}, log {}", bytes(stats.file_bytes), bytes(stats.wal_bytes)))?;
    if let Some(error) = &stats.checkpoint_error {
        say(format_args!("the last checkpoint failed: {error}"));
    }
    Ok(Exit::Done)
}

pub(crate) fn list(global: &Global, out: &mut Out, list: &List) -> Outcome {
    let store = global.look()?;
    let mut filter = named(&store, list.queue.as_deref())?;
    if let Some(status) = list.status {
        filter = filter.status(status);
    }
    let table = render::messages(list.page.payload);
    pages(&store, out, filter, &list.page, table, render::message_row)
}

pub(crate) fn dead_list(global: &Global, out: &mut Out, queue: Option<&str>, page: &Page) -> Outcome {
    let store = global.look()?;
    let filter = named(&store, queue)?.status(Status::Dead);
    pages(&store, out, filter, page, render::dead_letters(page.payload), render::dead_letter_row)
}

/// A filter for one queue, which must be there, or for all.
pub(crate) fn named(store: &Store, queue: Option<&str>) -> Outcome<Filter> {
    check_named(store, queue)?;
    Ok(queue.map_or_else(Filter::new, |name| Filter::new().queue(name)))
}

pub(crate) fn has_queue(store: &Store, name: &str) -> Outcome<bool> {
    Ok(store.stats()?.queues.iter().any(|queue| queue.queue == name))
}

/// That a named queue is not there is worth saying: it may be a slip.
pub(crate) fn check_named(store: &Store, queue: Option<&str>) -> Outcome<()> {
    match queue {
        Some(name) if !has_queue(store, name)? => {
            Err(Failure::nothing(format!("there is no queue {name:?} in this store; `relet stats` lists the queues")))
        }
        _ => Ok(()),
    }
}

/// Prints messages, as many as were asked for.
fn pages(
    store: &Store,
    out: &mut Out,
    filter: Filter,
    page: &Page,
    mut table: Table,
    row: impl Fn(&Snapshot) -> Vec<String>,
) -> Outcome {
    let mut left = page.limit;
    let messages = Messages::new(store, filter, page.after, page.payload);
    for message in messages {
        if left == 0 {
            break;
        }
        left -= 1;
        let message = message?;
        if out.json {
            out.object(render::message(&message))?;
        } else {
            table.add_row(row(&message));
        }
    }
    if left == page.limit && !out.json {
        say("no messages");
    }
    out.table(table)?;
    Ok(Exit::Done)
}

/// Messages by id, in pages, so that no look at the store lasts long. Payloads come one at a time, so that no more than
/// one of them is in memory; a message that goes away meanwhile is left out.
pub(crate) struct Messages<'a> {
    store: &'a Store,
    filter: Filter,
    page: std::vec::IntoIter<Snapshot>,
    after: MessageId,
    payload: bool,
}

impl<'a> Messages<'a> {
    pub(crate) fn new(store: &'a Store, filter: Filter, after: Option<MessageId>, payload: bool) -> Messages<'a> {
        let after = after.unwrap_or(MessageId::new(0));
        Messages { store, filter: filter.limit(PAGE), page: Vec::new().into_iter(), after, payload }
    }

    fn advance(&mut self) -> relet::Result<Option<Snapshot>> {
        loop {
            let Some(message) = self.page.next() else {
                self.page = self.store.list(&self.filter.clone().after(self.after))?.into_iter();
                match self.page.as_slice().last() {
                    Some(last) => self.after = last.id,
                    None => return Ok(None),
                }
                continue;
            };
            if !self.payload {
                return Ok(Some(message));
            }
            if let Some(whole) = self.store.show(message.id)? {
                return Ok(Some(whole));
            }
        }
    }
}

impl Iterator for Messages<'_> {
    type Item = relet::Result<Snapshot>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

pub(crate) fn show(global: &Global, out: &mut Out, id: MessageId) -> Outcome {
    let Some(message) = global.look()?.show(id)? else { return Err(Error::Gone { id }.into()) };
    if out.json {
        out.object(render::message(&message))?;
    } else {
        out.line(render::message_in_words(&message))?;
    }
    Ok(Exit::Done)
}

pub(crate) fn why(global: &Global, out: &mut Out, id: MessageId) -> Outcome {
    let Some(why) = global.look()?.why(id)? else { return Err(Error::Gone { id }.into()) };
    let words = render::why_in_words(&why);
    if out.json {
        let object = crate::json::Object::new().put("id", id);
        out.object(render::why(object, &why).put("text", words))?;
    } else {
        out.line(format_args!("message {id} is {words}"))?;
    }
    Ok(Exit::Done)
}

pub(crate) fn retry_queue(global: &Global, out: &mut Out, queue: Option<&str>, limit: usize) -> Outcome {
    let store = global.look()?;
    check_named(&store, queue)?;
    // SQLite counts in i64, and reads a negative limit as none.
    let rows = store.retry_queue(queue, limit.min(i64::MAX as usize))?;
    if out.json {
        for row in &rows {
            out.object(render::retrying(row))?;
        }
        return Ok(Exit::Done);
    }
    if rows.is_empty() {
        say("nothing waits for a retry");
    }
    out.table(render::retry_queue(&rows))?;
    Ok(Exit::Done)
}

pub(crate) fn stuck(global: &Global, out: &mut Out, older_than: Duration) -> Outcome {
    let rows = global.look()?.stuck(older_than)?;
    if out.json {
        for row in &rows {
            out.object(render::stuck(row))?;
        }
    } else {
        out.table(render::stuck_messages(&rows))?;
    }
    if rows.is_empty() {
        say("nothing is stuck");
        return Ok(Exit::Done);
    }
    let found = count(rows.len(), "message");
    say(format_args!("{found} stuck; the next claim of the queue takes such a message, `relet cancel` ends it"));
    Ok(Exit::Wrong)
}

pub(crate) fn gates(global: &Global, out: &mut Out) -> Outcome {
    let gates = global.look()?.gates()?;
    if out.json {
        for gate in &gates {
            out.object(render::gate(gate))?;
        }
        return Ok(Exit::Done);
    }
    if gates.is_empty() {
        say("no gates");
    }
    out.table(render::gates(&gates))?;
    Ok(Exit::Done)
}

pub(crate) fn workers(global: &Global, out: &mut Out) -> Outcome {
    let workers = global.look()?.workers()?;
    if out.json {
        for worker in &workers {
            out.object(render::worker(worker))?;
        }
        return Ok(Exit::Done);
    }
    if workers.is_empty() {
        say("no workers");
    }
    out.table(render::workers(&workers))?;
    Ok(Exit::Done)
}

pub(crate) fn schedules(global: &Global, out: &mut Out) -> Outcome {
    let schedules = global.look()?.schedules()?;
    if out.json {
        for schedule in &schedules {
            out.object(render::schedule(schedule))?;
        }
        return Ok(Exit::Done);
    }
    if schedules.is_empty() {
        say("no schedules");
    }
    out.table(render::schedules(&schedules))?;
    Ok(Exit::Done)
}

pub(crate) fn metrics(global: &Global, out: &mut Out) -> Outcome {
    if out.json {
        return Err(Failure::usage(
            "metrics are no objects; those are what `stats --json` and `gate list --json` print",
        ));
    }
    out.bytes(global.look()?.prometheus()?.as_bytes())?;
    Ok(Exit::Done)
}

pub(crate) fn doctor(global: &Global, out: &mut Out, repair: bool) -> Outcome {
    let found = match repair {
        false => global.look().and_then(|store| Ok(store.doctor()?)),
        true => global.repair().map(|repaired| {
            for done in &repaired.done {
                say(format_args!("repaired: {}", clean(done)));
            }
            repaired.left
        }),
    };
    let findings = match found {
        // A file that is too damaged to be opened or read is a finding, too.
        Err(Failure::Library(Error::Corrupt { detail })) => vec![detail],
        findings => findings?,
    };
    for finding in &findings {
        match out.json {
            true => out.object(crate::json::Object::new().put("finding", finding))?,
            false => out.line(clean(finding))?,
        }
    }
    if findings.is_empty() {
        say("nothing is wrong");
        return Ok(Exit::Done);
    }
    let found = count(findings.len(), "finding");
    let next = match findings.iter().all(|finding| finding.ends_with(PASSES)) {
        true => "nothing needs to be done",
        false if repair => "that is beyond repair: keep a copy of the file and its -wal, then restore a backup",
        false => "keep a copy of the file and its -wal, then run `relet doctor --repair`, or restore a backup",
    };
    say(format_args!("{found}; {next}"));
    Ok(Exit::Wrong)
}

/// A size for people.
fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (size as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{size} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
