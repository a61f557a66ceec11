//! W5: batches, each in one transaction.

use crate::contender::{Answer, Contender};
use crate::folder::Folder;
use crate::knobs::knobs;
use crate::meter::Meter;
use crate::payload::{SMALL, payload};
use crate::repeat::repeat;
use crate::rows::Row;

/// What lies ready for the claims, and the most that the enqueues store.
const READY: usize = 40_000;
const MOST: u64 = 1_000_000;

pub fn enqueue(contender: &Contender, size: usize) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let mut handle = peer.handle()?;
    let small = payload(SMALL);
    let meter = Meter::start(&*peer);
    let mut done = repeat(knobs().time, MOST, || handle.enqueue_batch(&small, size).map(|()| size as u64));
    let cost = meter.stop(done.count);
    if done.count == 0 {
        return Err(done.errors.into_keys().next().unwrap_or_default());
    }
    Row::new(contender, &format!("W5 enqueue batch {size}"), done.rate())
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}

pub fn claim(contender: &Contender, size: usize) -> Answer<()> {
    let ready = READY.min(knobs().backlog * 10).next_multiple_of(size);
    let folder = Folder::filled(contender, "ready", ready, |path| {
        (contender.open)(path)?.handle()?.fill(&payload(SMALL), ready)
    })?;
    let peer = (contender.open)(folder.path())?;
    let mut handle = peer.handle()?;
    let meter = Meter::start(&*peer);
    let mut done = repeat(knobs().time, u64::MAX, || handle.claim_ack_batch(size).map(|count| count as u64));
    let cost = meter.stop(done.count);
    if done.count == 0 {
        return Err(done.errors.into_keys().next().unwrap_or_default());
    }
    Row::new(contender, &format!("W5 claim+ack batch {size}"), done.rate())
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}
