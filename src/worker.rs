//! The worker: whoever claims.

use std::sync::Arc;
use std::time::Duration;

use crate::claim::{Claim, Verdict};
use crate::error::Result;
use crate::message::{MessageId, check_name};
use crate::options::check_lease;
use crate::sql;
use crate::sql::claim::{ById, Next, Routes, Who};
use crate::state::Route;
use crate::store::Store;
use crate::writer::Need;

/// A started worker: a label, and this start of it. Cheap to clone; all clones are one worker, for all threads.
///
/// ```
/// use relet::Store;
///
/// let store = Store::open_in_memory()?;
/// store.queue("mail").enqueue_all(["a", "b"])?;
/// let worker = store.worker("mailer-1")?;
/// while let Some(claim) = worker.claim("mail")? {
///     claim.ack()?;
/// }
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Worker {
    start: Arc<Start>,
    who: Who,
}

/// One start of a label, deregistered when its last handle and its last claim are gone.
#[derive(Debug)]
struct Start {
    store: Store,
    label: Arc<str>,
    incarnation: i64,
}

impl Drop for Start {
    fn drop(&mut self) {
        let (label, incarnation) = (self.label.clone(), self.incarnation);
        if incarnation != 0 {
            // If this fails, the next start of the label takes its place all the same.
            let _ = self.store.write(Need::Claim, move |tx| sql::workers::deregister(tx, &label, incarnation));
        }
    }
}

impl Worker {
    pub(crate) fn start(store: Store, label: &str) -> Result<Worker> {
        check_name("worker label", label)?;
        let label: Arc<str> = label.into();
        let registered = label.clone();
        let incarnation =
            store.write(Need::Settle, move |tx| sql::workers::register(tx, &registered, std::process::id()))?;
        Ok(Worker::new(store, label, incarnation))
    }

    pub(crate) fn detached(store: Store, label: &str) -> Worker {
        Worker::new(store, label.into(), 0)
    }

    fn new(store: Store, label: Arc<str>, incarnation: i64) -> Worker {
        let who = Who { label: label.clone(), incarnation, routes: Routes::ALL, lease: None };
        Worker { start: Arc::new(Start { store, label, incarnation }), who }
    }

    /// Its label.
    pub fn label(&self) -> &str {
        &self.who.label
    }

    /// The same worker, restricted to messages on these routes (also those that wait or lie in `processing`); all unless set.
    pub fn routes(&self, routes: &[Route]) -> Worker {
        Worker { who: Who { routes: Routes::of(routes), ..self.who.clone() }, ..self.clone() }
    }

    /// The same worker, whose claims hold this long without being extended; the queue's lease, else the store's, unless set.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) for a lease out of range.
    pub fn lease(&self, lease: Duration) -> Result<Worker> {
        check_lease(lease)?;
        Ok(Worker { who: Who { lease: Some(lease), ..self.who.clone() }, ..self.clone() })
    }

    /// Claims the next message of a queue: first what this worker had deferred and is due, then by priority, then by id.
    /// Never one that this worker is busy with. `None`: nothing can be claimed now.
    ///
    /// # Errors
    /// [`Error::Superseded`](crate::Error::Superseded) where the label was started again since;
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn claim(&self, queue: &str) -> Result<Option<Claim>> {
        check_name("queue", queue)?;
        let queue: Arc<str> = queue.into();
        loop {
            let (name, who) = (queue.clone(), self.who.clone());
            match self.start.store.write(Need::Claim, move |tx| sql::claim::claim_next(tx, &name, &who))? {
                Next::Taken(taken) => return Ok(Some(Claim::new(self.clone(), &queue, *taken))),
                Next::Nothing => return Ok(None),
                Next::Again => {}
            }
        }
    }

    /// Claims up to `count` messages of a queue in one commit, in the order of [`Worker::claim`].
    ///
    /// # Errors
    /// As [`Worker::claim`].
    pub fn claim_batch(&self, queue: &str, count: usize) -> Result<Vec<Claim>> {
        check_name("queue", queue)?;
        let queue: Arc<str> = queue.into();
        let mut claims = Vec::new();
        while claims.len() < count {
            let (name, who, wanted) = (queue.clone(), self.who.clone(), count - claims.len());
            let step = self.start.store.write(Need::Claim, move |tx| {
                let mut taken = Vec::new();
                while taken.len() < wanted {
                    match sql::claim::claim_next(tx, &name, &who)? {
                        Next::Taken(one) => taken.push(*one),
                        Next::Nothing => return Ok((taken, false)),
                        Next::Again => return Ok((taken, true)),
                    }
                }
                Ok((taken, false))
            });
            let (taken, more) = match step {
                // What an earlier step has claimed is not to be lost with the error.
                Err(_) if !claims.is_empty() => return Ok(claims),
                step => step?,
            };
            claims.extend(taken.into_iter().map(|taken| Claim::new(self.clone(), &queue, taken)));
            if !more {
                break;
            }
        }
        Ok(claims)
    }

    /// Claims this very message, or says why not. Claiming what this worker holds or has deferred is safe: it gets a new
    /// receipt, and the older one is stale.
    ///
    /// # Errors
    /// As [`Worker::claim`].
    pub fn claim_id(&self, id: impl Into<MessageId>) -> Result<Verdict> {
        let (id, who) = (id.into(), self.who.clone());
        let (verdict, queue) = self.start.store.write(Need::Claim, move |tx| {
            let verdict = sql::claim::claim_id(tx, id.get(), &who)?;
            let queue = match &verdict {
                ById::Taken(taken) => sql::queues::name_of(tx.conn, taken.record.queue)?,
                _ => String::new(),
            };
            Ok((verdict, queue))
        })?;
        Ok(Verdict::new(self, verdict, &queue))
    }

    pub(crate) fn store(&self) -> &Store {
        &self.start.store
    }
}
