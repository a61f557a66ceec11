//! W6: claim + ack with many messages ready, and with few ready behind many that are delayed, gated, done or dead.

use std::time::Duration;

use super::attempt;
use super::claim::{claim_ack, drain, warm_up};
use crate::contender::{Answer, Contender, State};
use crate::folder::Folder;
use crate::knobs::knobs;
use crate::meter::Meter;
use crate::payload::{SMALL, payload};
use crate::repeat::Repeated;
use crate::rows::Row;
use crate::syncs::syncs;

/// How many are ready behind those that are in the way.
const READY: usize = 1_000;

pub fn all(contender: &Contender) {
    for &ready in &knobs().depths {
        let work = format!("W6 at {ready} ready");
        attempt(contender, &work, |contender| {
            let folder = Folder::filled(contender, "ready", ready, |path| {
                (contender.open)(path)?.handle()?.fill(&payload(SMALL), ready)
            })?;
            measure(contender, &folder, &work, ready)
        });
    }
    if !knobs().states {
        return;
    }
    let count = knobs().behind;
    for state in State::ALL {
        let work = format!("W6 behind {}", state.name());
        attempt(contender, &work, |contender| {
            let folder = Folder::filled(contender, state.name(), count, |path| {
                let peer = (contender.open)(path)?;
                let mut handle = peer.handle()?;
                handle.fill_behind(state, &payload(SMALL), count)?;
                handle.fill(&payload(SMALL), READY)
            })?;
            measure(contender, &folder, &work, READY)
        });
    }
}

fn measure(contender: &Contender, folder: &Folder, work: &str, ready: usize) -> Answer<()> {
    let peer = (contender.open)(folder.path())?;
    if contender.crew {
        let (rate, cost) = drain(&*peer, 1, ready)?;
        Row::new(contender, work, rate).cost(&cost).write();
        return Ok(());
    }
    let mut handle = peer.handle()?;
    warm_up(&mut *handle, &payload(SMALL))?;
    // Between 90 and 100 percent of them stay ready: what was claimed is put back, untimed.
    let step = (ready / 10).clamp(50, 5_000) as u64;
    let mut done = Repeated::default();
    let mut spent = 0;
    let meter = Meter::start(&*peer);
    while done.time < knobs().time {
        let before = syncs();
        let left = knobs().time - done.time;
        let count = done.go_on(left.max(Duration::from_micros(1)), step, || claim_ack(&mut *handle));
        spent += syncs() - before;
        if done.time < knobs().time && count == 0 {
            break;
        }
        if done.time < knobs().time {
            handle.fill(&payload(SMALL), count as usize)?;
        }
    }
    let cost = meter.stop(done.count);
    Row::new(contender, work, done.rate())
        .field("others", format_args!("{:.0}", cost.others))
        .field("syncs", format_args!("{:.3}", spent as f64 / done.count.max(1) as f64))
        .latencies(&mut done.latencies)
        .errors(&done.errors)
        .write();
    Ok(())
}
