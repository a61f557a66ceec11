//! W1 and W3: enqueues, one by one, from one thread and from several.

use crate::contender::{Answer, Contender};
use crate::folder::Folder;
use crate::knobs::knobs;
use crate::meter::Meter;
use crate::payload::{SMALL, payload};
use crate::repeat::repeat;
use crate::rows::Row;
use crate::threads::together;

pub fn alone(contender: &Contender) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let mut handle = peer.handle()?;
    let small = payload(SMALL);
    let meter = Meter::start(&*peer);
    let mut done = repeat(knobs().time, u64::MAX, || handle.enqueue(&small).map(|()| 1));
    let cost = meter.stop(done.count);
    Row::new(contender, "W1 enqueue x1", done.rate())
        .cost(&cost)
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}

pub fn threads(contender: &Contender, threads: usize) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let meter = Meter::start(&*peer);
    let mut done = together(&*peer, threads, 0)?;
    let cost = meter.stop(done.produced);
    Row::new(contender, &format!("W3 enqueue x{threads}"), done.produced as f64 / done.time.as_secs_f64())
        .cost(&cost)
        .latencies(&mut done.latencies)
        .field("luckiest", done.luckiest)
        .field("unluckiest", done.unluckiest)
        .errors(&done.errors)
        .write();
    Ok(())
}
