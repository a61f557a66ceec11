//! The operations that are counted, for each side.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use relet::{Claim, Durability, Store, Workers};

use crate::sides::bare::Bare;
use crate::sides::raw::Raw;
use crate::sides::{QUEUE, Relet, Side};

/// Where what is counted begins and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Begin,
    End,
}

/// Told of both marks, each once. The thread that meets it waits for it, between two operations.
pub type Marks = Arc<dyn Fn(Mark) + Send + Sync>;

/// Messages that are ready all the time, beside those that are consumed.
const READY: usize = 500;
/// Messages of a batch.
const BATCH: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Relet,
    Raw,
    Bare,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Enqueue,
    Claim,
    Ack,
    /// Settles a message and claims the next, in one commit: relet's pool with one thread, whose handler does nothing.
    Step,
    /// Enqueue, claim and ack.
    Life,
    EnqueueBatch,
    ClaimBatch,
    AckBatch,
}

impl Who {
    pub const ALL: [Who; 3] = [Who::Relet, Who::Raw, Who::Bare];

    pub fn name(self) -> &'static str {
        match self {
            Who::Relet => "relet",
            Who::Raw => "raw",
            Who::Bare => "bare",
        }
    }

    /// Opens this side's store, which is new, and works through `count` messages between the marks. What is stored beforehand
    /// is enough for `room` of them, so that two counts can be compared.
    pub fn run(
        self,
        path: &Path,
        durability: Durability,
        operation: Operation,
        [count, room]: [usize; 2],
        marks: &Marks,
    ) {
        // Checkpoints are not counted: what they cost goes with the pages, and falls on one operation in hundreds.
        const NO_CHECKPOINTS: &str = "PRAGMA wal_autocheckpoint = 0";
        match self {
            Who::Relet => {
                let options = Store::options().durability(durability).checkpoints(false);
                operation.run(&Relet::open(path, options), [count, room], marks);
            }
            Who::Raw => {
                let raw = Raw::open(path, durability);
                raw.with(|conn| conn.execute_batch(NO_CHECKPOINTS).expect("set"));
                operation.run(&raw, [count, room], marks);
            }
            Who::Bare => {
                let bare = Bare::open(path, durability);
                bare.with(|conn| conn.execute_batch(NO_CHECKPOINTS).expect("set"));
                operation.run(&bare, [count, room], marks);
            }
        }
    }
}

impl Operation {
    pub const ALL: [Operation; 8] = [
        Operation::Enqueue,
        Operation::Claim,
        Operation::Ack,
        Operation::Step,
        Operation::Life,
        Operation::EnqueueBatch,
        Operation::ClaimBatch,
        Operation::AckBatch,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Operation::Enqueue => "enqueue",
            Operation::Claim => "claim",
            Operation::Ack => "ack",
            Operation::Step => "settle and claim",
            Operation::Life => "a message's life",
            Operation::EnqueueBatch => "enqueue, 100 a batch",
            Operation::ClaimBatch => "claim, 100 a batch",
            Operation::AckBatch => "ack, 100 a batch",
        }
    }

    /// Messages in one commit.
    pub fn size(self) -> usize {
        match self {
            Operation::EnqueueBatch | Operation::ClaimBatch | Operation::AckBatch => BATCH,
            _ => 1,
        }
    }

    /// Operations, or batches, that are run before anything is counted.
    fn warm_up(self) -> usize {
        if self.size() == 1 { 20 } else { 2 }
    }

    fn run<S: Steps>(self, side: &S, [count, room]: [usize; 2], marks: &Marks) {
        let (size, warm) = (self.size(), self.warm_up());
        let more = room + warm * size;
        side.enqueue_many(READY + more);
        let repeat = |operation: &mut dyn FnMut()| {
            (0..warm).for_each(|_| operation());
            marks(Mark::Begin);
            (0..count / size).for_each(|_| operation());
            marks(Mark::End);
        };
        match self {
            Operation::Enqueue => repeat(&mut || side.enqueue()),
            Operation::Claim => repeat(&mut || drop(side.claim())),
            Operation::Ack => {
                let mut claims: Vec<_> = (0..more).map(|_| side.claim()).rev().collect();
                repeat(&mut || side.ack(claims.pop().expect("enough is held")));
            }
            Operation::Step => side.steps([warm, count], marks),
            Operation::Life => repeat(&mut || {
                side.enqueue();
                side.ack(side.claim());
            }),
            Operation::EnqueueBatch => repeat(&mut || side.enqueue_many(BATCH)),
            Operation::ClaimBatch => repeat(&mut || drop(side.claim_many(BATCH))),
            Operation::AckBatch => {
                let mut batches: Vec<_> = (0..more / BATCH).map(|_| side.claim_many(BATCH)).rev().collect();
                repeat(&mut || side.ack_many(batches.pop().expect("enough is held")));
            }
        }
    }
}

/// A queue that can settle a message and claim the next in one commit.
trait Steps: Side {
    /// Does so `warm` times, and then `count` times between the marks.
    fn steps(&self, counts: [usize; 2], marks: &Marks);
}

impl Steps for Relet {
    fn steps(&self, [warm, count]: [usize; 2], marks: &Marks) {
        let (calls, marks) = (AtomicUsize::new(0), marks.clone());
        let handler = move |_: &Claim| {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            if call == warm {
                marks(Mark::Begin);
            } else if call == warm + count {
                marks(Mark::End);
            }
        };
        let pool = Workers::builder().concurrency(1).drain(true).queue(QUEUE, handler);
        assert!(pool.start(self.store()).expect("it starts").wait(Duration::from_secs(600)));
    }
}

impl Steps for Raw {
    fn steps(&self, counts: [usize; 2], marks: &Marks) {
        steps(self.claim(), |held| self.step(held), counts, marks);
    }
}

impl Steps for Bare {
    fn steps(&self, counts: [usize; 2], marks: &Marks) {
        steps(self.claim(), |held| self.step(held), counts, marks);
    }
}

fn steps<C>(mut held: C, step: impl Fn(C) -> C, [warm, count]: [usize; 2], marks: &Marks) {
    for _ in 0..warm {
        held = step(held);
    }
    marks(Mark::Begin);
    for _ in 0..count {
        held = step(held);
    }
    marks(Mark::End);
}
