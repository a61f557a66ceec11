//! The follower: a caller who has laid down an operation for a leader, and hears what came of it.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::batch::{Job, Need, Task};
use crate::error::{Error, Result};
use crate::sql::Tx;

/// An operation that was laid down for a leader.
pub(crate) trait Follower: Job + Send {
    /// Tells its caller how it ended.
    fn answer(self: Box<Self>, commit: &Result<()>);
    /// Has its caller lead.
    fn promote(&self);
}

/// Where a caller who waits is told.
pub(crate) struct Slot<T> {
    turn: Mutex<Turn<T>>,
    bell: Condvar,
}

pub(crate) enum Turn<T> {
    Waiting,
    /// To lead, until it is done.
    Lead,
    Done(Result<T>),
}

impl<T> Slot<T> {
    pub(crate) fn new() -> Slot<T> {
        Slot { turn: Mutex::new(Turn::Waiting), bell: Condvar::new() }
    }

    fn tell(&self, turn: Turn<T>) {
        *self.turn.lock() = turn;
        self.bell.notify_one();
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(*self.turn.lock(), Turn::Done(_))
    }

    /// Waits until its caller is told something; never `Waiting`.
    pub(crate) fn listen(&self) -> Turn<T> {
        let mut turn = self.turn.lock();
        while matches!(*turn, Turn::Waiting) {
            self.bell.wait(&mut turn);
        }
        std::mem::replace(&mut *turn, Turn::Waiting)
    }
}

/// An operation that was laid down, and where its caller waits.
pub(crate) struct Laid<T: Send + 'static, F: FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static> {
    task: Task<T, F>,
    /// `None` once its caller has been told.
    slot: Option<Arc<Slot<T>>>,
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Laid<T, F> {
    pub(crate) fn new(need: Need, op: F, slot: Arc<Slot<T>>) -> Laid<T, F> {
        Laid { task: Task::new(need, op), slot: Some(slot) }
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Job for Laid<T, F> {
    fn need(&self) -> Need {
        self.task.need()
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        self.task.run(tx)
    }

    fn leave_out(&mut self, error: Option<Error>) {
        self.task.leave_out(error);
    }

    fn is_left_out(&self) -> bool {
        self.task.is_left_out()
    }

    fn error(&self) -> Option<Error> {
        self.task.error()
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Follower for Laid<T, F> {
    fn answer(mut self: Box<Self>, commit: &Result<()>) {
        if let Some(slot) = self.slot.take() {
            slot.tell(Turn::Done(self.task.outcome(commit)));
        }
    }

    fn promote(&self) {
        if let Some(slot) = &self.slot {
            slot.tell(Turn::Lead);
        }
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Drop for Laid<T, F> {
    /// Reached with a slot only if a leader panicked outside of an operation: its followers must not wait for ever.
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.tell(Turn::Done(Err(Error::Panicked { detail: "the leader of the batch panicked".into() })));
        }
    }
}
