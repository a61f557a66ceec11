//! What goes from one store into another: a message with its whole history.

use std::io::Read;
use std::path::PathBuf;

use crate::clock::INSTANT_MAX;
use crate::error::{Error, Result};
use crate::message::{Enqueued, MessageId, PRIORITY_RANGE, check_name, check_range};
use crate::payload::PayloadReader;
use crate::spool::{Spooled, spool};
use crate::sql::{Record, Source, import, payloads};
use crate::state::Status;
use crate::store::Store;
use crate::view::Snapshot;
use crate::writer::Need;

impl Store {
    /// Stores messages as another store has shown them, all in one commit, or none of them: live ones and dead letters, each with
    /// its counts, its errors and its instants.
    ///
    /// Each gets a new id. What cannot be carried is who holds it: what was held or deferred can be claimed by anyone, once its
    /// `due_at` has come. A live message whose key a live one has is not stored, as with an enqueue; a dead letter always is.
    /// An instant at which it was enqueued or has died counts as now where that is still to come. Nothing is known of what was
    /// imported before: what has no key is stored again by a second import.
    ///
    /// ```
    /// use relet::{Filter, Store};
    ///
    /// let (here, there) = (Store::open_in_memory()?, Store::open_in_memory()?);
    /// here.queue("mail").enqueue("hello")?;
    /// here.worker("w")?.claim("mail")?.expect("there is one").fail("no route to host")?;
    ///
    /// let page = here.list(&Filter::new().payload(true))?;
    /// let id = there.import(page)?[0].id();
    /// let message = there.show(id)?.expect("it is there");
    /// assert_eq!((message.attempts, message.last_error.as_deref()), (1, Some("no route to host")));
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotImported`] for what is done or cancelled, or comes without its payload; those of
    /// [`Queue::enqueue`](crate::Queue::enqueue) for what no store accepts.
    pub fn import(&self, messages: Vec<Snapshot>) -> Result<Vec<Enqueued>> {
        let payload_max = self.options_used().payload_max;
        for message in &messages {
            check(message)?;
            match &message.payload {
                None => return Err(Error::NotImported { problem: "it comes without its payload; list it with that" }),
                Some(payload) if payload.len() > payload_max => {
                    return Err(Error::PayloadTooLarge { size: payload.len(), limit: payload_max });
                }
                Some(_) => {}
            }
        }
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        self.write(Need::Enqueue, move |tx| {
            let each = |message: &Snapshot| {
                import::import(tx, message, Source::Memory(message.payload.as_deref().unwrap_or_default()))
            };
            messages.iter().map(each).collect()
        })
    }

    /// As [`Store::import`], with a payload that is what a stream gives up to its end, in place of the message's own. It is taken in
    /// as by [`Queue::enqueue_from`](crate::Queue::enqueue_from).
    ///
    /// # Errors
    /// As [`Store::import`]; [`Error::Stream`] where the stream or the temporary file has failed. Then nothing was stored.
    pub fn import_from(&self, message: Snapshot, mut stream: impl Read) -> Result<Enqueued> {
        check(&message)?;
        let folder = self.writable_path()?.and_then(|path| path.parent().map(PathBuf::from));
        let folder = folder.unwrap_or_else(std::env::temp_dir);
        match spool(&mut stream, &folder, self.options_used().payload_max)? {
            Spooled::Memory(payload) => {
                self.write(Need::Enqueue, move |tx| import::import(tx, &message, Source::Memory(&payload)))
            }
            Spooled::File(mut spool) => {
                self.write(Need::Enqueue, move |tx| import::import(tx, &message, Source::Spool(&mut spool)))
            }
        }
    }

    /// Reads the payload of a message in pieces, whoever holds it: for those that are too large to be had in memory.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Corrupt`] where the payload is damaged, which of a large one may be known only at its last piece.
    pub fn payload_reader(&self, id: impl Into<MessageId>) -> Result<PayloadReader<'_>> {
        let id = id.into();
        let (record, inline, bytes) = self.read(|conn, _| {
            let (record, inline) = Record::load_with_row_payload(conn, id.get())?.ok_or(Error::Gone { id })?;
            let bytes = if inline.is_none() { payloads::size(conn, id.get())? } else { None };
            Ok((record, inline, bytes))
        })?;
        match (inline, bytes) {
            (Some(payload), _) if crc32fast::hash(&payload) == record.payload_crc => {
                Ok(PayloadReader::of_memory(payload))
            }
            (None, Some(bytes)) if bytes > 0 => Ok(PayloadReader::of_file(self, id.get(), bytes, record.payload_crc)),
            _ => Err(payloads::damaged(id.get())),
        }
    }
}

/// Refuses what no store accepts, before anything is begun.
fn check(message: &Snapshot) -> Result<()> {
    if matches!(message.status, Status::Done | Status::Cancelled) {
        return Err(Error::NotImported {
            problem: "it is done or cancelled; only live messages and dead letters are imported",
        });
    }
    check_name("queue", &message.queue)?;
    for (what, name) in [("key", &message.key), ("group", &message.group), ("gate", &message.gate)] {
        name.as_deref().map_or(Ok(()), |name| check_name(what, name))?;
    }
    check_range("priority", i64::from(message.priority), *PRIORITY_RANGE.start(), *PRIORITY_RANGE.end())?;
    check_range("max_deferrals", i64::from(message.max_deferrals), 1, i32::MAX)?;
    for (what, count) in [
        ("max_attempts", message.max_attempts),
        ("attempts", message.attempts),
        ("crashes", message.crashes),
        ("deferrals", message.deferrals),
        ("releases", message.releases),
        ("redrives", message.redrives),
        ("wait_count", message.wait_count),
    ] {
        check_range(what, i64::from(count), 0, i32::MAX)?;
    }
    for (what, at) in [
        ("due_at", message.due_at),
        ("expires_at", message.expires_at),
        ("tick_at", message.tick_at),
        ("enqueued_at", Some(message.enqueued_at)),
        ("finished_at", message.finished_at),
    ] {
        if let Some(value) = at.filter(|at| !(0..=INSTANT_MAX).contains(at)) {
            return Err(Error::Range { what, value, min: 0, max: INSTANT_MAX });
        }
    }
    Ok(())
}
