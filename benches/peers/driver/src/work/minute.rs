//! W9: a steady load for a minute. Two producers and two consumers (or the contender's own two workers) move so many
//! messages a second, of mixed sizes, over a backlog that stays.
//!
//! A call that begins late because the one before it took long is counted from when it should have begun.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use crate::contender::{Answer, Contender, Peer, State};
use crate::folder::{Folder, bytes_in};
use crate::knobs::knobs;
use crate::latencies::Latencies;
use crate::meter::Meter;
use crate::payload::{age, mixed, stamped};
use crate::repeat::{Errors, note};
use crate::rows::Row;

const SIDES: usize = 2;
/// How often the log's size is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// What the threads find out together.
#[derive(Default)]
struct Found {
    enqueues: Mutex<Latencies>,
    claims: Mutex<Latencies>,
    errors: Mutex<Errors>,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    moved: AtomicU64,
    over: AtomicBool,
}

pub fn minute(contender: &Contender) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let found = Arc::new(Found::default());
    lay_out(contender, &*peer, &found)?;
    let meter = Meter::start(&*peer);
    let mut log = 0;
    let crew = if contender.crew {
        let found = found.clone();
        let handler = move |payload: &[u8]| found.took(payload);
        Some(peer.crew(SIDES, Arc::new(handler))?)
    } else {
        None
    };
    scope(|scope| {
        for side in 0..SIDES {
            let (peer, found) = (&*peer, &found);
            scope.spawn(move || found.keep(produce(peer, found, side)));
            if !contender.crew {
                scope.spawn(move || found.keep(consume(peer, found, side)));
            }
        }
        let began = Instant::now();
        while began.elapsed() < knobs().minute {
            sleep(LOOK);
            log = log.max(sizes(&*peer, folder.path()).0);
        }
        found.over.store(true, Relaxed);
    });
    drop(crew);
    let moved = found.moved.load(Relaxed);
    let cost = meter.stop(moved);
    let served = peer.sizes();
    // Closing writes the log back.
    drop(peer);
    let (_, data) = served.unwrap_or_else(|| sizes_of_files(folder.path()));
    let live = found.bytes_in.load(Relaxed).saturating_sub(found.bytes_out.load(Relaxed));
    let latencies = |of: &Mutex<Latencies>| std::mem::take(&mut *of.lock().expect("no holder panics"));
    let figure = |work: &str, mut times: Latencies| {
        let errors = std::mem::take(&mut *found.errors.lock().expect("no holder panics"));
        let rate = times.len() as f64 / knobs().minute.as_secs_f64();
        Row::new(contender, work, rate).cost(&cost).latencies(&mut times).errors(&errors).write();
    };
    figure("W9 enqueue", latencies(&found.enqueues));
    if contender.crew {
        // Its claims are not ours to time: what is known is how many messages came.
        Row::new(contender, "W9 claim", moved as f64 / knobs().minute.as_secs_f64()).cost(&cost).write();
    } else {
        figure("W9 claim", latencies(&found.claims));
    }
    Row::new(contender, "W9 log, MiB", log as f64 / (1 << 20) as f64).write();
    Row::new(contender, "W9 file over live data", data as f64 / live.max(1) as f64).field("live", live).write();
    Ok(())
}

/// The backlog: the same mix as the load. A contender's own workers would take all that is ready: for them it is delayed.
fn lay_out(contender: &Contender, peer: &dyn Peer, found: &Found) -> Answer<()> {
    let mut handle = peer.handle()?;
    for bytes in [256, 4 << 10, 64 << 10] {
        let count = (0..knobs().live).filter(|&index| mixed(index) == bytes).count();
        if contender.crew {
            handle.fill_behind(State::Delayed, &stamped(bytes), count)?;
        } else {
            handle.fill(&stamped(bytes), count)?;
        }
        found.bytes_in.fetch_add((count * bytes) as u64, Relaxed);
    }
    Ok(())
}

fn produce(peer: &dyn Peer, found: &Found, side: usize) -> Answer<()> {
    let mut handle = peer.handle()?;
    let times = paced(found, side, |index| {
        let bytes = mixed(index);
        handle.enqueue(&stamped(bytes))?;
        found.bytes_in.fetch_add(bytes as u64, Relaxed);
        Ok(true)
    });
    found.enqueues.lock().expect("no holder panics").extend(times);
    Ok(())
}

fn consume(peer: &dyn Peer, found: &Found, side: usize) -> Answer<()> {
    let mut handle = peer.handle()?;
    let times = paced_then(
        found,
        side,
        &mut *handle,
        |handle| handle.claim(&mut |payload| found.took(payload)),
        |handle| handle.ack(),
    );
    found.claims.lock().expect("no holder panics").extend(times);
    Ok(())
}

fn paced(found: &Found, side: usize, mut call: impl FnMut(usize) -> Answer<bool>) -> Latencies {
    let mut index = side;
    paced_then(
        found,
        side,
        &mut index,
        |index| {
            *index += SIDES;
            call(*index)
        },
        |_| Ok(()),
    )
}

/// Calls `timed` at a steady pace until it is over, and `after` where it has found something.
fn paced_then<T: ?Sized>(
    found: &Found,
    side: usize,
    on: &mut T,
    mut timed: impl FnMut(&mut T) -> Answer<bool>,
    mut after: impl FnMut(&mut T) -> Answer<()>,
) -> Latencies {
    let step = Duration::from_secs(1) * SIDES as u32 / knobs().rate as u32;
    let mut due = Instant::now() + step * side as u32 / SIDES as u32;
    let mut times = Latencies::default();
    while !found.over.load(Relaxed) {
        let early = due.saturating_duration_since(Instant::now());
        sleep(early);
        let begun = if early.is_zero() { due } else { Instant::now() };
        let done = timed(on);
        let time = begun.elapsed();
        match done {
            Ok(true) => {
                times.push(time);
                found.keep(after(on));
            }
            Ok(false) => {}
            Err(why) => found.keep(Err(why)),
        }
        due += step;
    }
    times
}

impl Found {
    fn took(&self, payload: &[u8]) {
        std::hint::black_box(age(payload));
        self.bytes_out.fetch_add(payload.len() as u64, Relaxed);
        self.moved.fetch_add(1, Relaxed);
    }

    fn keep(&self, done: Answer<()>) {
        if let Err(why) = done {
            note(&mut self.errors.lock().expect("no holder panics"), &why);
        }
    }
}

fn sizes(peer: &dyn Peer, folder: &Path) -> (u64, u64) {
    peer.sizes().unwrap_or_else(|| sizes_of_files(folder))
}

/// The bytes of the log and of the data. relet's reserve holds no messages.
fn sizes_of_files(folder: &Path) -> (u64, u64) {
    let log = |name: &str| name.ends_with("-wal") || name.ends_with("-journal");
    let data = |name: &str| !log(name) && !name.ends_with("-shm") && !name.ends_with("-reserve");
    (bytes_in(folder, &log), bytes_in(folder, &data))
}
