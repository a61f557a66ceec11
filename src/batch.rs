//! The batch: operations that share a commit.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};
use crate::sql::Tx;

/// What an operation needs of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Claims and extensions: they may be lost with the power.
    Claim,
    /// What must reach the disk before its caller is answered, and works on what is stored: it goes on when the disk is full.
    Settle,
    /// What must reach the disk, and needs more of it: it is refused first when the disk is full.
    Enqueue,
}

/// One operation in a batch.
pub(crate) trait Job {
    fn need(&self) -> Need;
    /// Whether its commit must reach the disk at once.
    fn needs_disk(&self) -> bool {
        self.need() != Need::Claim
    }
    /// Runs it, keeps its outcome, and says whether it succeeded.
    fn run(&mut self, tx: &mut Tx<'_>) -> bool;
    /// It is not run again. Its outcome stands, unless `error` is given in its place.
    fn leave_out(&mut self, error: Option<Error>);
    fn is_left_out(&self) -> bool;
    /// It has met a row that is damaged. Returns whether it is worth another run once such rows are set aside: the first time.
    fn may_run_again(&mut self) -> bool;
    /// Why it failed, if it did.
    fn error(&self) -> Option<Error>;
}

pub(crate) struct Task<T, F> {
    need: Need,
    op: F,
    outcome: Option<Result<T>>,
    left_out: bool,
    ran_again: bool,
}

impl<T, F: FnMut(&mut Tx<'_>) -> Result<T>> Task<T, F> {
    pub(crate) fn new(need: Need, op: F) -> Task<T, F> {
        Task { need, op, outcome: None, left_out: false, ran_again: false }
    }

    /// What the caller is told. A result that rests on a commit which was not made is not told, not even an error.
    pub(crate) fn outcome(&mut self, commit: &Result<()>) -> Result<T> {
        match (commit, self.outcome.take()) {
            (_, Some(outcome)) if self.left_out => outcome,
            (Ok(()), Some(outcome)) => outcome,
            (Err(error), _) => Err(error.clone()),
            (Ok(()), None) => Err(Error::Panicked { detail: "the operation was not run".into() }),
        }
    }
}

impl<T, F: FnMut(&mut Tx<'_>) -> Result<T>> Job for Task<T, F> {
    fn need(&self) -> Need {
        self.need
    }

    fn run(&mut self, tx: &mut Tx<'_>) -> bool {
        let op = &mut self.op;
        let outcome = catch_unwind(AssertUnwindSafe(|| op(tx)))
            .unwrap_or_else(|panic| Err(Error::Panicked { detail: panic_message(&*panic) }));
        let done = outcome.is_ok();
        self.outcome = Some(outcome);
        done
    }

    fn leave_out(&mut self, error: Option<Error>) {
        self.left_out = true;
        if let Some(error) = error {
            self.outcome = Some(Err(error));
        }
    }

    fn is_left_out(&self) -> bool {
        self.left_out
    }

    fn may_run_again(&mut self) -> bool {
        !std::mem::replace(&mut self.ran_again, true)
    }

    fn error(&self) -> Option<Error> {
        self.outcome.as_ref().and_then(|outcome| outcome.as_ref().err().cloned())
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// The disk is full: what needs more of it is told so. Returns whether there was any.
pub(crate) fn leave_out_enqueues(jobs: &mut [&mut dyn Job], full: impl Fn() -> Error) -> bool {
    let mut any = false;
    for job in jobs.iter_mut().filter(|job| job.need() == Need::Enqueue && !job.is_left_out()) {
        job.leave_out(Some(full()));
        any = true;
    }
    any
}
