//! Enqueue, claim and ack in a loop of the caller's own.

use std::hint::black_box;
use std::time::Duration;

use driver::{Answer, Handle, Read, State, brief};
use relet::{Claim, Message, Queue, Settle, Store};

use crate::store::{Opened, QUEUE};

/// How many are laid out in one call.
const BATCH: usize = 1_000;
const LONG: Duration = Duration::from_secs(7 * 24 * 60 * 60);

pub struct ByHand<'a> {
    opened: &'a Opened,
    queue: Queue,
    held: Option<Claim>,
}

impl<'a> ByHand<'a> {
    pub fn new(opened: &'a Opened) -> ByHand<'a> {
        ByHand { opened, queue: opened.store.queue(QUEUE), held: None }
    }
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        self.queue.enqueue(payload).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        self.held = self.opened.worker()?.claim(QUEUE).map_err(brief)?;
        if let Some(claim) = &self.held {
            read(claim.payload());
        }
        Ok(self.held.is_some())
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        let claim = self.opened.worker()?.claim_wait(QUEUE, Duration::from_secs(30)).map_err(brief)?;
        let claim = claim.ok_or("nothing came")?;
        read(claim.payload());
        self.held = Some(claim);
        Ok(())
    }

    fn ack(&mut self) -> Answer<()> {
        self.held.take().map_or(Ok(()), |claim| claim.ack().map(drop).map_err(brief))
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.queue.enqueue_all(std::iter::repeat_n(payload, count)).map(drop).map_err(brief)
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        settle_batch(self.opened, &self.opened.store, max, || Settle::Ack)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let message = |count| std::iter::repeat_n(payload, count).map(Message::new);
        match state {
            State::Delayed => batches(count, |count| {
                self.queue.enqueue_all(message(count).map(|message| message.delay(LONG))).map(drop).map_err(brief)
            }),
            State::Gated => {
                self.opened.store.gate("shut").close().map_err(brief)?;
                batches(count, |count| {
                    self.queue.enqueue_all(message(count).map(|message| message.gate("shut"))).map(drop).map_err(brief)
                })
            }
            // Done messages are kept only by a store that is told to keep them.
            State::Done => {
                let keeping = Store::options().retention(LONG).open(&self.opened.path).map_err(brief)?;
                batches(count, |count| {
                    self.enqueue_batch(payload, count)?;
                    settle_batch(self.opened, &keeping, count, || Settle::Ack).map(drop)
                })
            }
            State::Dead => batches(count, |count| {
                self.enqueue_batch(payload, count)?;
                settle_batch(self.opened, &self.opened.store, count, || Settle::Reject { error: "bench".into() })
                    .map(drop)
            }),
        }
    }
}

/// Claims so many and settles them by this store.
fn settle_batch(opened: &Opened, store: &Store, max: usize, how: impl Fn() -> Settle) -> Answer<usize> {
    let claims = opened.worker()?.claim_batch(QUEUE, max).map_err(brief)?;
    for claim in &claims {
        black_box(claim.payload());
    }
    for settled in store.settle_all(claims.iter().map(|claim| (claim.receipt(), how()))).map_err(brief)? {
        settled.map_err(brief)?;
    }
    Ok(claims.len())
}

fn batches(count: usize, mut lay_out: impl FnMut(usize) -> Answer<()>) -> Answer<()> {
    let mut left = count;
    while left > 0 {
        let part = left.min(BATCH);
        lay_out(part)?;
        left -= part;
    }
    Ok(())
}
