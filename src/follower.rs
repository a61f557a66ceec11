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
    /// Has its caller lead, if he waits.
    fn promote(&self) -> bool;
    /// Whether its caller waits.
    fn is_awaited(&self) -> bool;
    /// Whether its caller went on when he had laid it down.
    fn is_deferred(&self) -> bool;
    /// About how much memory it takes while it lies there.
    fn bytes(&self) -> usize;
}

/// Where a caller is told.
pub(crate) struct Slot<T> {
    turn: Mutex<Turn<T>>,
    bell: Condvar,
}

enum Turn<T> {
    /// Its caller has gone on.
    Unawaited,
    /// Its caller waits.
    Waiting,
    /// To lead, until it is done.
    Lead,
    Done(Result<T>),
}

/// What a caller who waits is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    Lead,
    Done,
}

impl<T> Slot<T> {
    /// Of a caller who waits.
    pub(crate) fn waiting() -> Slot<T> {
        Slot { turn: Mutex::new(Turn::Waiting), bell: Condvar::new() }
    }

    /// Of a caller who goes on.
    pub(crate) fn unawaited() -> Slot<T> {
        Slot { turn: Mutex::new(Turn::Unawaited), bell: Condvar::new() }
    }

    pub(crate) fn done(outcome: Result<T>) -> Slot<T> {
        Slot { turn: Mutex::new(Turn::Done(outcome)), bell: Condvar::new() }
    }

    fn tell(&self, outcome: Result<T>) {
        *self.turn.lock() = Turn::Done(outcome);
        self.bell.notify_one();
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(*self.turn.lock(), Turn::Done(_))
    }

    fn is_awaited(&self) -> bool {
        matches!(*self.turn.lock(), Turn::Waiting | Turn::Lead)
    }

    /// Its caller is about to wait; from now on the lead may be handed to him.
    pub(crate) fn expect(&self) {
        let mut turn = self.turn.lock();
        if matches!(*turn, Turn::Unawaited) {
            *turn = Turn::Waiting;
        }
    }

    /// Waits until its caller, who is expected, is told something: to lead, or that it is done.
    pub(crate) fn listen(&self) -> Heard {
        let mut turn = self.turn.lock();
        loop {
            debug_assert!(!matches!(*turn, Turn::Unawaited), "whoever listens is expected");
            match *turn {
                Turn::Done(_) => return Heard::Done,
                Turn::Lead => {
                    *turn = Turn::Waiting;
                    return Heard::Lead;
                }
                Turn::Unawaited | Turn::Waiting => self.bell.wait(&mut turn),
            }
        }
    }

    /// What its caller is told when it is done, once.
    pub(crate) fn outcome(&self) -> Result<T> {
        match std::mem::replace(&mut *self.turn.lock(), Turn::Unawaited) {
            Turn::Done(outcome) => outcome,
            _ => Err(Error::Panicked { detail: "the operation was not run".into() }),
        }
    }

    fn promote(&self) -> bool {
        let mut turn = self.turn.lock();
        if !matches!(*turn, Turn::Waiting) {
            return false;
        }
        *turn = Turn::Lead;
        drop(turn);
        self.bell.notify_one();
        true
    }
}

/// An operation that was laid down, and where its caller hears of it.
pub(crate) struct Laid<T: Send + 'static, F: FnMut(&mut Tx<'_>) -> Result<T> + Send + 'static> {
    task: Task<T, F>,
    /// `None` once its caller has been told.
    slot: Option<Arc<Slot<T>>>,
    /// How many bytes it takes, where its caller went on.
    deferred: Option<usize>,
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Laid<T, F> {
    pub(crate) fn new(need: Need, op: F, slot: Arc<Slot<T>>, deferred: Option<usize>) -> Laid<T, F> {
        Laid { task: Task::new(need, op), slot: Some(slot), deferred }
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Job for Laid<T, F> {
    fn need(&self) -> Need {
        self.task.need()
    }

    /// What a settle changes may be seen before it has reached the disk, while nobody has been told that it has. What an
    /// enqueue adds may not: after a power cut its id would be given to another message.
    fn needs_disk(&self) -> bool {
        match self.need() {
            Need::Claim => false,
            Need::Settle => !self.is_deferred() || self.is_awaited(),
            Need::Enqueue => true,
        }
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

    fn may_run_again(&mut self) -> bool {
        self.task.may_run_again()
    }

    fn error(&self) -> Option<Error> {
        self.task.error()
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Follower for Laid<T, F> {
    fn answer(mut self: Box<Self>, commit: &Result<()>) {
        if let Some(slot) = self.slot.take() {
            slot.tell(self.task.outcome(commit));
        }
    }

    fn promote(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.promote())
    }

    fn is_awaited(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.is_awaited())
    }

    fn is_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    fn bytes(&self) -> usize {
        self.deferred.unwrap_or(0)
    }
}

impl<T: Send, F: FnMut(&mut Tx<'_>) -> Result<T> + Send> Drop for Laid<T, F> {
    /// Reached with a slot only if a leader panicked outside of an operation: its followers must not wait for ever.
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.tell(Err(Error::Panicked { detail: "the leader of the batch panicked".into() }));
        }
    }
}
