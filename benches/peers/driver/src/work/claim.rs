//! W2 and W4: claim + ack, alone and beside producers, by a loop of ours and by the contender's own workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::contender::{Answer, Contender, Handle, Handler, Peer};
use crate::folder::Folder;
use crate::knobs::knobs;
use crate::meter::{Cost, Meter};
use crate::payload::{SMALL, look, payload};
use crate::repeat::repeat;
use crate::rows::Row;
use crate::threads::together;

pub fn by_hand(contender: &Contender) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let mut handle = peer.handle()?;
    handle.fill(&payload(SMALL), knobs().backlog)?;
    let meter = Meter::start(&*peer);
    let mut done = repeat(knobs().time, u64::MAX, || claim_ack(&mut *handle));
    let cost = meter.stop(done.count);
    Row::new(contender, "W2 claim+ack x1", done.rate())
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}

/// Takes one message, looks at it and acks it: 1, or 0 if there is none.
pub fn claim_ack(handle: &mut (dyn Handle + '_)) -> Answer<u64> {
    if !handle.claim(&mut look)? {
        return Ok(0);
    }
    handle.ack().map(|()| 1)
}

/// One claim and what puts its message back: a file that was just opened may have to recover first.
pub fn warm_up(handle: &mut (dyn Handle + '_), payload: &[u8]) -> Answer<()> {
    claim_ack(handle)?;
    handle.fill(payload, 1)
}

pub fn crew(contender: &Contender, size: usize) -> Answer<()> {
    let ready = knobs().backlog * 2;
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    peer.handle()?.fill(&payload(SMALL), ready)?;
    let (rate, cost) = drain(&*peer, size, ready)?;
    Row::new(contender, &format!("W2 claim+ack x{size}"), rate).cost(&cost).write();
    Ok(())
}

/// Lets so many workers run until their time is over or nothing is left; the rate of what they settled.
pub fn drain(peer: &dyn Peer, size: usize, ready: usize) -> Answer<(f64, Cost)> {
    let (begun, handler) = counting();
    let meter = Meter::start(peer);
    let began = Instant::now();
    let crew = peer.crew(size, handler)?;
    let before = crew.settled();
    while began.elapsed() < knobs().time && (begun.load(Relaxed) as usize) < ready {
        sleep(Duration::from_millis(1));
    }
    let time = began.elapsed();
    let cost = meter.stop(begun.load(Relaxed));
    let settled = crew.settled() - before;
    if settled == 0 {
        return Err("its workers have settled nothing in time".into());
    }
    Ok((settled as f64 / time.as_secs_f64(), cost))
}

fn counting() -> (Arc<AtomicU64>, Handler) {
    let begun = Arc::new(AtomicU64::new(0));
    let count = begun.clone();
    let handler = move |payload: &[u8]| {
        look(payload);
        count.fetch_add(1, Relaxed);
    };
    (begun, Arc::new(handler))
}

pub fn both_by_hand(contender: &Contender) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let meter = Meter::start(&*peer);
    let mut done = together(&*peer, 4, 4)?;
    let cost = meter.stop(done.produced + done.consumed);
    Row::new(contender, "W4 4+4", done.consumed as f64 / done.time.as_secs_f64())
        .field("produced", format_args!("{:.1}", done.produced as f64 / done.time.as_secs_f64()))
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}

pub fn both_crew(contender: &Contender) -> Answer<()> {
    /// To begin with: a worker that finds nothing may sleep for seconds.
    const READY: usize = 5_000;

    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    peer.handle()?.fill(&payload(SMALL), READY)?;
    let (_, handler) = counting();
    let crew = peer.crew(4, handler)?;
    let meter = Meter::start(&*peer);
    let (before, began) = (crew.settled(), Instant::now());
    let mut done = together(&*peer, 4, 0)?;
    let consumed = crew.settled() - before;
    let time = began.elapsed();
    let cost = meter.stop(done.produced + consumed);
    Row::new(contender, "W4 4+4", consumed as f64 / time.as_secs_f64())
        .field("produced", format_args!("{:.1}", done.produced as f64 / done.time.as_secs_f64()))
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}
