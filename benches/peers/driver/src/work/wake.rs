//! W7: from the moment before an enqueue to a consumer that was idle, in the same process and from another one.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{scope, sleep};
use std::time::Duration;

use crate::contender::{Answer, Contender, Peer};
use crate::folder::Folder;
use crate::knobs::knobs;
use crate::latencies::Latencies;
use crate::meter::settle_disk;
use crate::payload::{SMALL, age, stamped};
use crate::rows::Row;

/// The first ones warm up and are not counted.
const WARM_UP: usize = 5;
/// How long to wait for one wake-up, and how many may be lost: such a message counts when the next one brings it along.
const LIMIT: Duration = Duration::from_secs(5);
const LOST_MAX: usize = 5;
/// How long an idle consumer is given to fall asleep.
const ASLEEP: Duration = Duration::from_millis(500);

pub fn in_process(contender: &Contender) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let times = consume(contender, &*peer, |ages| {
        let mut handle = peer.handle()?;
        let (mut times, mut lost) = (Latencies::default(), 0);
        for index in 0..knobs().wakes + WARM_UP {
            sleep(pause(20, index));
            handle.enqueue(&stamped(SMALL))?;
            await_one(ages, &mut times, &mut lost)?;
        }
        Ok(times)
    })?;
    write(contender, "W7 wake in process", times)
}

pub fn across(contender: &Contender, index: usize) -> Answer<()> {
    let folder = Folder::fresh(contender);
    let peer = (contender.open)(folder.path())?;
    let times = consume(contender, &*peer, |ages| {
        let count = knobs().wakes + WARM_UP;
        let mut producer = Producer::start(index, folder.path(), count)?;
        let (mut times, mut lost) = (Latencies::default(), 0);
        for _ in 0..count {
            await_one(ages, &mut times, &mut lost)?;
        }
        producer.0.wait().map_err(|error| error.to_string())?;
        Ok(times)
    })?;
    write(contender, "W7 wake across", times)
}

fn await_one(ages: &Receiver<u64>, times: &mut Latencies, lost: &mut usize) -> Answer<()> {
    match ages.recv_timeout(LIMIT) {
        Ok(age) => times.push_nanos(age),
        Err(_) if *lost < LOST_MAX => *lost += 1,
        Err(_) => return Err("nobody woke up".into()),
    }
    // What was lost before has come along.
    ages.try_iter().for_each(|age| times.push_nanos(age));
    Ok(())
}

/// Has one consumer wait for messages while `produce` enqueues them, and tells it the age that each had on arrival.
fn consume(
    contender: &Contender,
    peer: &dyn Peer,
    produce: impl FnOnce(&Receiver<u64>) -> Answer<Latencies>,
) -> Answer<Latencies> {
    settle_disk();
    let (tell, ages) = channel();
    if contender.crew {
        let handler = move |payload: &[u8]| {
            if let Some(age) = age(payload) {
                let _ = tell.send(age);
            }
        };
        let _crew = peer.crew(1, Arc::new(handler))?;
        sleep(ASLEEP);
        return produce(&ages);
    }
    let name = contender.peer;
    scope(|scope| {
        scope.spawn(move || {
            let consume = || {
                let mut handle = peer.handle()?;
                for _ in 0..knobs().wakes + WARM_UP {
                    let mut came = None;
                    handle.wait(&mut |payload| came = age(payload))?;
                    let _ = tell.send(came.ok_or("no stamp")?);
                    handle.ack()?;
                }
                Ok::<_, String>(())
            };
            if let Err(why) = consume() {
                eprintln!("{name}: the consumer: {why}");
            }
        });
        sleep(ASLEEP);
        produce(&ages)
    })
}

/// What the other process does.
pub fn produce(contender: &Contender, path: &Path, count: usize) -> Answer<()> {
    let peer = (contender.open)(path)?;
    let mut handle = peer.handle()?;
    sleep(ASLEEP);
    for index in 0..count {
        sleep(pause(60, index));
        handle.enqueue(&stamped(SMALL))?;
    }
    Ok(())
}

struct Producer(Child);

impl Producer {
    fn start(index: usize, path: &Path, count: usize) -> Answer<Producer> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.arg("produce").arg(index.to_string()).arg(path).arg(count.to_string());
        Ok(Producer(command.spawn().map_err(|error| error.to_string())?))
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not in step with anything that polls.
fn pause(least: u64, index: usize) -> Duration {
    Duration::from_millis(least + index as u64 * 7 % 30)
}

fn write(contender: &Contender, work: &str, times: Latencies) -> Answer<()> {
    let mut times = times.skip(WARM_UP);
    let median = times.percentile(500);
    Row::new(contender, work, median).latencies(&mut times).write();
    Ok(())
}
