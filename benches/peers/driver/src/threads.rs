//! Producers and consumers at once, each on a thread and with a handle of its own.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::contender::{Answer, Peer};
use crate::knobs::knobs;
use crate::latencies::Latencies;
use crate::payload::{SMALL, look, payload};
use crate::repeat::{Errors, note};

/// How long a consumer that found nothing sleeps.
const NAP: Duration = Duration::from_micros(500);

#[derive(Default)]
pub struct Together {
    pub produced: u64,
    pub consumed: u64,
    pub time: Duration,
    /// Of the enqueues.
    pub latencies: Latencies,
    pub errors: Errors,
    /// The most and the fewest that one producer got through.
    pub luckiest: u64,
    pub unluckiest: u64,
}

pub fn together(peer: &dyn Peer, producers: usize, consumers: usize) -> Answer<Together> {
    let start = Barrier::new(producers + consumers + 1);
    let stop = AtomicBool::new(false);
    let small = payload(SMALL);
    let work = |producer: bool| {
        let mut one = Together::default();
        let handle = peer.handle();
        start.wait();
        let mut handle = handle?;
        while !stop.load(Relaxed) {
            let before = Instant::now();
            let done = if producer {
                handle.enqueue(&small).map(|()| {
                    one.produced += 1;
                    one.latencies.push(before.elapsed());
                })
            } else {
                match handle.claim(&mut look) {
                    Ok(true) => handle.ack().map(|()| one.consumed += 1),
                    Ok(false) => {
                        thread::sleep(NAP);
                        Ok(())
                    }
                    Err(text) => Err(text),
                }
            };
            if let Err(text) = done {
                note(&mut one.errors, &text);
            }
        }
        Ok::<_, String>(one)
    };
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for index in 0..producers + consumers {
            let work = &work;
            threads.push(scope.spawn(move || work(index < producers)));
        }
        start.wait();
        let began = Instant::now();
        thread::sleep(knobs().time);
        stop.store(true, Relaxed);
        let mut all = Together { unluckiest: u64::MAX, ..Together::default() };
        for (index, thread) in threads.into_iter().enumerate() {
            let one = thread.join().map_err(|_| "a thread panicked")??;
            if index < producers {
                all.luckiest = all.luckiest.max(one.produced);
                all.unluckiest = all.unluckiest.min(one.produced);
            }
            all.produced += one.produced;
            all.consumed += one.consumed;
            all.latencies.extend(one.latencies);
            for (text, count) in one.errors {
                *all.errors.entry(text).or_default() += count;
            }
        }
        all.time = began.elapsed();
        Ok(all)
    })
}
