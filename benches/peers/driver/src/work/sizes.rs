//! W8: enqueues and claim + acks of small, middling and large payloads.

use super::attempt;
use super::claim::{claim_ack, drain, warm_up};
use crate::contender::{Answer, Contender};
use crate::folder::Folder;
use crate::knobs::knobs;
use crate::meter::Meter;
use crate::payload::payload;
use crate::repeat::repeat;
use crate::rows::Row;

/// Bytes, their name, and how many lie ready for the claims where W2 has 20,000.
const SIZES: [(usize, &str, usize); 3] = [(256, "256 B", 20_000), (16 << 10, "16 KiB", 5_000), (1 << 20, "1 MiB", 150)];

pub fn all(contender: &Contender) {
    for (bytes, name, ready) in SIZES {
        let ready = (ready * knobs().backlog / 20_000).max(20);
        attempt(contender, &format!("W8 enqueue {name}"), |contender| enqueue(contender, bytes, name));
        attempt(contender, &format!("W8 claim+ack {name}"), |contender| claim(contender, bytes, name, ready));
    }
}

fn enqueue(contender: &Contender, bytes: usize, name: &str) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let mut handle = peer.handle()?;
    let payload = payload(bytes);
    let meter = Meter::start(&*peer);
    let mut done = repeat(knobs().time, u64::MAX, || handle.enqueue(&payload).map(|()| 1));
    let cost = meter.stop(done.count);
    if done.count == 0 {
        return Err(done.errors.into_keys().next().unwrap_or_default());
    }
    Row::new(contender, &format!("W8 enqueue {name}"), done.rate())
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}

fn claim(contender: &Contender, bytes: usize, name: &str, ready: usize) -> Answer<()> {
    let work = format!("W8 claim+ack {name}");
    // Closed in between, so that no claim pays for writing back the log of the enqueues.
    let folder =
        Folder::filled(contender, name, ready, |path| (contender.open)(path)?.handle()?.fill(&payload(bytes), ready))?;
    let peer = (contender.open)(folder.path())?;
    if contender.crew {
        let (rate, cost) = drain(&*peer, 1, ready)?;
        Row::new(contender, &work, rate).cost(&cost).write();
        return Ok(());
    }
    let mut handle = peer.handle()?;
    warm_up(&mut *handle, &payload(bytes))?;
    let meter = Meter::start(&*peer);
    let mut done = repeat(knobs().time, u64::MAX, || claim_ack(&mut *handle));
    let cost = meter.stop(done.count);
    if done.count == 0 {
        return Err(done.errors.into_keys().next().unwrap_or_else(|| "nothing came".into()));
    }
    Row::new(contender, &work, done.rate()).cost(&cost).latencies(&mut done.latencies).errors(&done.errors).write();
    Ok(())
}
