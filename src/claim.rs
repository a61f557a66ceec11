//! The claim: the right to work on a message for a while.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use serde::de::DeserializeOwned;

use crate::cancel::CancelToken;
use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::payload::PayloadReader;
use crate::receipt::Receipt;
use crate::sql::claim::{ById, Obstacle, Taken};
use crate::sql::settle::{Known, Settle, Settled};
use crate::sql::{Payload, dead, payloads};
use crate::state::{Route, Status};
use crate::ticket::Ticket;
use crate::worker::Worker;
use crate::writer::Need;

pub use crate::sql::claim::How;

/// Dropping a claim settles nothing: the message stays held until its lease runs out, and then counts a crash.
///
/// A claim is a message, a receipt and a lease. It is ended by one of ack, fail, reject, defer and release. Only its
/// receipt decides whether that still counts: if the message was taken back, claimed again or cancelled meanwhile, the call
/// changes nothing and says so.
#[must_use = "dropping a claim settles nothing: the message stays held until its lease runs out"]
#[derive(Clone)]
pub struct Claim {
    worker: Worker,
    queue: String,
    taken: Taken,
    cancel: CancelToken,
}

impl fmt::Debug for Claim {
    /// Without the payload, which may be large, or nobody's business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("receipt", &format_args!("{}", self.receipt()))
            .field("queue", &self.queue)
            .field("worker", &self.worker.label())
            .field("how", &self.how())
            .field("attempts", &self.attempts())
            .field("payload_bytes", &self.payload_bytes())
            .finish_non_exhaustive()
    }
}

/// The reason that a deferral is stored with unless another is given.
const DEFERRED: &str = "deferred";

impl Claim {
    pub(crate) fn new(worker: Worker, queue: &str, taken: Taken) -> Claim {
        Claim { worker, queue: queue.to_owned(), taken, cancel: CancelToken::default() }
    }

    /// Reads what was left in the file, unless it is to be left there. The claim is committed by now: a process that dies of a payload
    /// which does not fit into its memory has crashed, and so that ends, too. `false`: it could not be read, and was given up.
    pub(crate) fn read_left(&mut self) -> Result<bool> {
        let Payload::Left(bytes) = self.taken.payload else { return Ok(true) };
        if self.worker.leaves_payloads() {
            return Ok(true);
        }
        let (id, receipt, store) = (self.taken.record.id, self.taken.receipt, self.worker.store());
        let mut payload = Vec::new();
        if payload.try_reserve_exact(bytes).is_err() {
            let error =
                format!("its payload of {bytes} bytes does not fit into the memory of process {}", std::process::id());
            self.settle(Settle::Fail { error, retry_in: None })?;
            return Ok(false);
        }
        payload.resize(bytes, 0);
        match store.read(|conn, _| payloads::read_at(conn, id, bytes, &mut payload, 0)) {
            Ok(()) if crc32fast::hash(&payload) == self.taken.record.payload_crc => {
                self.taken.payload = Payload::Read(payload);
                Ok(true)
            }
            Ok(()) | Err(Error::Corrupt { .. }) => {
                store.write(Need::Settle, move |tx| dead::give_up_damaged(tx, receipt))?;
                Ok(false)
            }
            // Somebody has cancelled and removed it.
            Err(Error::Gone { .. }) => Ok(false),
            Err(error) => {
                let _ = self.settle(Settle::Release);
                Err(error)
            }
        }
    }

    /// The message's id.
    pub fn id(&self) -> MessageId {
        self.taken.record.id()
    }

    /// The receipt of this claim.
    pub fn receipt(&self) -> Receipt {
        self.taken.receipt
    }

    /// The message's queue.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The message's payload, exactly as it was enqueued; empty where it was left in the file, see
    /// [`Worker::without_payloads`].
    pub fn payload(&self) -> &[u8] {
        match &self.taken.payload {
            Payload::Read(payload) => payload,
            Payload::Left(_) => &[],
        }
    }

    /// Size of the payload in bytes, also where it was left in the file.
    pub fn payload_bytes(&self) -> usize {
        self.taken.payload.len()
    }

    /// The payload as a stream: out of the file, piece by piece, where it was left there, else out of memory.
    ///
    /// # Errors
    /// [`Error::Gone`] where it was left in the file and the message is not there any more.
    pub fn payload_reader(&self) -> Result<PayloadReader<'_>> {
        let (id, store) = (self.taken.record.id, self.worker.store());
        match &self.taken.payload {
            Payload::Read(payload) => Ok(PayloadReader::of_memory(payload)),
            Payload::Left(bytes) => match store.read(|conn, _| payloads::size(conn, id))? {
                Some(_) => Ok(PayloadReader::of_file(store, id, *bytes, self.taken.record.payload_crc)),
                None => Err(Error::Gone { id: self.id() }),
            },
        }
    }

    /// Writes the payload to a file, a socket or whatever else takes bytes, as [`Claim::payload_reader`] reads it. Returns how
    /// many bytes that were.
    ///
    /// # Errors
    /// [`Error::Stream`] where the writer has failed; [`Error::Corrupt`] where the payload is damaged, of which the last piece is
    /// not written; [`Error::Gone`]. The writer may have taken a part by then.
    pub fn write_payload_to(&self, writer: &mut (impl Write + ?Sized)) -> Result<u64> {
        let mut reader = self.payload_reader()?;
        loop {
            let piece = reader.fill()?;
            if piece.is_empty() {
                return Ok(self.payload_bytes() as u64);
            }
            let written = writer.write_all(piece);
            written.map_err(|error| Error::Stream { what: "the payload's writer", source: Arc::new(error) })?;
            let length = piece.len();
            reader.consume(length);
        }
    }

    /// The payload, read as JSON.
    ///
    /// # Errors
    /// [`Error::Json`] where it is not the JSON of a `T`, or, having been left in the file, cannot be read.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        Ok(match &self.taken.payload {
            Payload::Read(payload) => serde_json::from_slice(payload)?,
            Payload::Left(_) => serde_json::from_reader(self.payload_reader()?)?,
        })
    }

    /// Which try this is, from 1 on; tries that were given back (deferred, released) are not counted.
    pub fn attempts(&self) -> u32 {
        self.taken.record.attempts
    }

    /// Earlier claims of the message that ended with the death or the silence of their worker.
    pub fn crashes(&self) -> u32 {
        self.taken.record.crashes
    }

    /// Times the message was deferred.
    pub fn deferrals(&self) -> u32 {
        self.taken.record.deferrals
    }

    /// The message's priority.
    pub fn priority(&self) -> i32 {
        self.taken.record.priority
    }

    /// The message's key.
    pub fn key(&self) -> Option<&str> {
        self.taken.record.key.as_deref()
    }

    /// The message's group.
    pub fn group(&self) -> Option<&str> {
        self.taken.record.group.as_deref()
    }

    /// The message's gate.
    pub fn gate(&self) -> Option<&str> {
        self.taken.gate.as_deref()
    }

    /// The tick of the schedule that the message was enqueued for, in unix ms.
    pub fn tick_at(&self) -> Option<i64> {
        self.taken.record.tick_at
    }

    /// The status that the message has when nobody holds it.
    pub fn route(&self) -> Route {
        self.taken.record.route
    }

    /// The error of the last try, if that failed.
    pub fn last_error(&self) -> Option<&str> {
        self.taken.record.last_error.as_deref()
    }

    /// How this claim came about.
    pub fn how(&self) -> How {
        self.taken.how
    }

    /// When the message was enqueued, in unix ms.
    pub fn enqueued_at(&self) -> i64 {
        self.taken.record.enqueued_at
    }

    /// How long it holds from its beginning, or from the last time it was extended.
    pub fn lease(&self) -> Duration {
        self.taken.lease
    }

    /// Tells its handler to end early, where [`Workers`](crate::Workers) run it.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    /// The worker that claimed it.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// The work is done. The message is deleted, or kept as done for the store's retention.
    ///
    /// # Errors
    /// [`Error::Stale`] or [`Error::Cancelled`] where the claim is lost; nothing was changed.
    pub fn ack(&self) -> Result<Settled> {
        self.settle(Settle::Ack)
    }

    /// As [`Claim::ack`], and does not wait: the ack goes with the commit of the worker's next claim, and one `fsync` brings many
    /// of them to the disk. See [`Store::settle_deferred`](crate::Store::settle_deferred) for what that means.
    ///
    /// ```
    /// use std::collections::VecDeque;
    /// use relet::Store;
    ///
    /// let store = Store::open_in_memory()?;
    /// store.queue("mail").enqueue_all(["a", "b", "c"])?;
    /// let worker = store.worker("mailer-1")?;
    /// let mut acks = VecDeque::new();
    /// while let Some(claim) = worker.claim("mail")? {
    ///     acks.push_back(claim.ack_deferred());
    ///     if acks.len() == 64 {
    ///         acks.pop_front().expect("there are 64").wait()?;
    ///     }
    /// }
    /// for ack in acks {
    ///     ack.wait()?;
    /// }
    /// # Ok::<(), relet::Error>(())
    /// ```
    pub fn ack_deferred(&self) -> Ticket<Settled> {
        let store = self.worker.store();
        let ticket = store.settle_deferred_known(self.receipt(), Settle::Ack, self.known());
        ticket.unwrap_or_else(|error| Ticket::told(store.clone(), error))
    }

    /// The work failed: the message is tried again after its backoff, or becomes a dead letter when its attempts are used up.
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn fail(&self, error: impl fmt::Display) -> Result<Settled> {
        self.settle(Settle::Fail { error: error.to_string(), retry_in: None })
    }

    /// As [`Claim::fail`], with the next try no sooner than after this long: neither backoff nor jitter applies.
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn fail_for(&self, error: impl fmt::Display, retry_in: Duration) -> Result<Settled> {
        self.settle(Settle::Fail { error: error.to_string(), retry_in: Some(retry_in) })
    }

    /// The message can never be worked on: it becomes a dead letter at once.
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn reject(&self, error: impl fmt::Display) -> Result<Settled> {
        self.settle(Settle::Reject { error: error.to_string() })
    }

    /// Not now (a rate limit, say): the message stays this worker's, in `processing`, and waits in the retry queue. It costs no attempt. After this call the receipt is worth nothing; the worker's next claim finds the message when it is due.
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn defer(&self, delay: Duration) -> Result<Settled> {
        self.defer_because(delay, DEFERRED)
    }

    /// As [`Claim::defer`], with a reason that the retry queue shows.
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn defer_because(&self, delay: Duration, reason: impl fmt::Display) -> Result<Settled> {
        self.settle(Settle::Defer { delay, reason: reason.to_string() })
    }

    /// The other side has said for how long it wants to hear nothing (a 429 with Retry-After): in one commit the message is
    /// deferred and its [gate](crate::Gate) closed for as long, so that its siblings wait in the file instead of running into
    /// the same wall one by one. It costs no attempt. When it is due it is anyone's, in its place in the gate's line. A
    /// message without a gate is deferred only, as by [`Claim::defer`].
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn limited(&self, retry_after: Duration) -> Result<Settled> {
        self.settle(Settle::Limited { retry_after })
    }

    /// Gives the message back to its route, for anyone, at once. It costs no attempt.
    ///
    /// # Errors
    /// As [`Claim::ack`].
    pub fn release(&self) -> Result<Settled> {
        self.settle(Settle::Release)
    }

    /// The lease lasts at least this long from the moment this takes effect; it is never shortened.
    ///
    /// # Errors
    /// [`Error::Stale`], [`Error::Cancelled`] or [`Error::Gone`] where the claim is lost.
    pub fn extend(&self, lease: Duration) -> Result<()> {
        self.settle(Settle::Extend { lease }).map(drop)
    }

    /// Acks in the application's own transaction on the same file: the effect and the ack are one commit.
    ///
    /// # Errors
    /// As [`Store::ack_in`](crate::Store::ack_in): on any of them, roll the transaction back.
    pub fn ack_in(&self, conn: &Connection) -> Result<()> {
        self.worker.store().ack_in(conn, self.receipt())
    }

    /// Refuses, in the application's own transaction, to go on if this claim is lost: so that a late worker cannot write its effects.
    ///
    /// # Errors
    /// As [`Store::ack_in`](crate::Store::ack_in): on any of them, roll the transaction back.
    pub fn guard(&self, conn: &Connection) -> Result<()> {
        self.worker.store().guard(conn, self.receipt())
    }

    fn settle(&self, how: Settle) -> Result<Settled> {
        self.worker.store().settle_known(self.receipt(), how, self.known())
    }

    /// What may be relied on when it is settled.
    pub(crate) fn known(&self) -> Known {
        Known::of(&self.taken.record)
    }
}

/// What a claim by id came to: the claim, or what stands in its way.
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "a verdict may hold a claim, and dropping that settles nothing"]
pub enum Verdict {
    /// Nobody held it, or whoever did is gone.
    Claimed(Claim),
    /// This worker held it or had deferred it, and has it again, under a new receipt.
    Resumed(Claim),
    /// This worker's label held it, but that claim was void: its lease had run out, or an earlier start of the worker had made it.
    Recovered(Claim),
    /// A worker holds it. Also this one, where claiming it again would exceed its attempts.
    Held {
        /// The worker.
        by: String,
        /// What is left of its lease.
        lease_left: Duration,
    },
    /// It waits for something.
    Waiting {
        /// What for.
        what: Wait,
        /// Until when, in unix ms, where that is known.
        until: Option<i64>,
    },
    /// It is finished.
    Finished {
        /// How.
        status: Status,
    },
    /// There is no such message.
    NotFound,
}

/// What a message waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// The instant of its first or next try.
    Due,
    /// It was deferred: its instant, or, when that has come, its own worker.
    Deferred {
        /// The worker it is kept for.
        by: String,
    },
    /// Another message of its group.
    Group {
        /// The message whose turn it is.
        behind: MessageId,
    },
    /// A worker that serves its route.
    Route(Route),
    /// Its queue is paused.
    Paused,
    /// Its gate lets nothing pass: until an instant, or until one of the claims that have passed it ends.
    Gate {
        /// The gate.
        name: String,
    },
}

impl Verdict {
    pub(crate) fn new(worker: &Worker, verdict: ById, queue: &str) -> Verdict {
        let obstacle = match verdict {
            ById::Taken(taken) => {
                let how = taken.how;
                let claim = Claim::new(worker.clone(), queue, *taken);
                return match how {
                    How::Claimed => Verdict::Claimed(claim),
                    How::Resumed => Verdict::Resumed(claim),
                    How::Recovered => Verdict::Recovered(claim),
                };
            }
            ById::NotFound => return Verdict::NotFound,
            ById::Not(obstacle) => obstacle,
        };
        match obstacle {
            Obstacle::Held { by, lease_left } => Verdict::Held { by, lease_left },
            Obstacle::Deferred { by, until } => Verdict::Waiting { what: Wait::Deferred { by }, until: Some(until) },
            Obstacle::Due { until } => Verdict::Waiting { what: Wait::Due, until: Some(until) },
            Obstacle::Group { behind } => {
                Verdict::Waiting { what: Wait::Group { behind: MessageId::new(behind) }, until: None }
            }
            Obstacle::Route(route) => Verdict::Waiting { what: Wait::Route(route), until: None },
            Obstacle::Paused { until } => Verdict::Waiting { what: Wait::Paused, until: Some(until) },
            Obstacle::Gate { name, until } => Verdict::Waiting { what: Wait::Gate { name }, until },
            Obstacle::Finished(status) => Verdict::Finished { status },
        }
    }

    /// The claim, if there is one.
    pub fn claim(self) -> Option<Claim> {
        match self {
            Verdict::Claimed(claim) | Verdict::Resumed(claim) | Verdict::Recovered(claim) => Some(claim),
            _ => None,
        }
    }
}
