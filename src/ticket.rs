//! The ticket: an operation that was laid down for a later commit.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::follower::Slot;
use crate::store::Store;

/// An operation that was laid down, to share a commit with others: what [`Queue::enqueue_deferred`](crate::Queue::enqueue_deferred),
/// [`Claim::ack_deferred`](crate::Claim::ack_deferred) and [`Store::settle_deferred`](crate::Store::settle_deferred) return.
///
/// It lies in memory, and nobody sees what it does, until it is carried out: by [`Ticket::wait`], by the end of any ticket
/// of the store, by the next call of any thread that writes to the store, or by the call that finds
/// [`DEFERRED_MAX`](crate::DEFERRED_MAX) operations or [`DEFERRED_BYTES_MAX`](crate::DEFERRED_BYTES_MAX) bytes lying there.
/// No thread does it by itself: a program that keeps its tickets and calls nothing keeps its messages in memory. What a
/// thread lays down and what it calls afterwards take effect in this order.
///
/// That order is the store's own. A call inside the application's own transaction (`enqueue_in`, `ack_in`, `guard`) is part of that
/// transaction, and comes before whatever lies there then: wait for the tickets first, where their order matters. And while a
/// thread holds such a transaction, nothing that was laid down can be carried out: a call that finds as many as may lie there waits
/// for the lock that its own thread has, for the whole busy wait, and every ticket that lies there is told
/// [`Error::Busy`](crate::Error::Busy).
///
/// Until `wait` has returned, nothing is promised: the death of the process may lose what was laid down, always the last of
/// it. A ticket that is dropped waits, too, and its outcome is forgotten; so, as with a [`Worker`](crate::Worker), do not drop
/// one while this thread holds a write transaction of its own on the same file.
///
/// ```
/// use std::collections::VecDeque;
/// use relet::Store;
///
/// let store = Store::open_in_memory()?;
/// let queue = store.queue("mail");
/// let mut tickets = VecDeque::new();
/// for n in 0..1000 {
///     tickets.push_back(queue.enqueue_deferred(format!("letter {n}"))?);
///     if tickets.len() == 64 {
///         tickets.pop_front().expect("there are 64").wait()?; // one commit for all 64, every 64th time
///     }
/// }
/// for ticket in tickets {
///     ticket.wait()?;
/// }
/// assert_eq!(store.stats()?.queues[0].live(), 1000);
/// # Ok::<(), relet::Error>(())
/// ```
#[must_use = "nothing is promised before a ticket is waited for, and its outcome is told nowhere else"]
pub struct Ticket<T> {
    store: Store,
    /// `None` once somebody has waited.
    slot: Option<Arc<Slot<T>>>,
}

impl<T> Ticket<T> {
    pub(crate) fn new(store: Store, slot: Arc<Slot<T>>) -> Ticket<T> {
        Ticket { store, slot: Some(slot) }
    }

    /// One of an operation that could not even be laid down.
    pub(crate) fn told(store: Store, error: Error) -> Ticket<T> {
        Ticket::new(store, Arc::new(Slot::done(Err(error))))
    }

    /// Waits until the operation is carried out and on the disk (with the default durability), together with whatever else lies
    /// there, and returns what the call that does not defer returns.
    ///
    /// # Errors
    /// As that call: [`Queue::enqueue`](crate::Queue::enqueue), [`Store::settle`](crate::Store::settle). After
    /// [`Error::Indeterminate`] a settle can safely be repeated by its receipt; it may have been
    /// committed, and not reached the disk.
    pub fn wait(mut self) -> Result<T> {
        let slot = self.slot.take().expect("a ticket is waited for once");
        self.store.wait(&slot)
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            let _ = self.store.wait(&slot);
        }
    }
}

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = self.slot.as_ref().is_none_or(|slot| slot.is_done());
        f.debug_struct("Ticket").field("done", &done).finish_non_exhaustive()
    }
}
