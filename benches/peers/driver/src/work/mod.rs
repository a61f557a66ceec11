//! The workloads, one file each, and which of them a call runs.

mod batch;
mod claim;
mod depth;
mod disk;
mod enqueue;
mod minute;
mod show;
mod sizes;
mod wake;

use std::path::Path;

use crate::contender::{Answer, Contender};
use crate::knobs::knobs;
use crate::rows::write_failure;

/// Runs what the environment asks for with each of these.
pub fn run(contenders: Vec<Contender>) {
    // What is dropped here may want to spawn.
    #[cfg(feature = "tokio")]
    let _entered = crate::runtime().enter();
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, verb, index, path, count] = arguments.as_slice()
        && verb == "produce"
    {
        let index: usize = index.parse().expect("an index");
        wake::produce(&contenders[index], Path::new(path), count.parse().expect("a count"))
            .expect("the file can be used");
        return;
    }
    if knobs().work == "DISK" {
        disk::disk().expect("the disk can be written to");
        return;
    }
    for (index, contender) in contenders.iter().enumerate() {
        if !knobs().class.is_empty() && knobs().class != contender.class {
            continue;
        }
        match knobs().work.as_str() {
            "SHOW" => attempt(contender, "SHOW", show::show),
            "W1" => attempt(contender, "W1 enqueue x1", enqueue::alone),
            "W2" if contender.crew => {
                for size in [1, 4, 16] {
                    attempt(contender, &format!("W2 claim+ack x{size}"), |contender| claim::crew(contender, size));
                }
            }
            "W2" => attempt(contender, "W2 claim+ack x1", claim::by_hand),
            "W3" => {
                for threads in [4, 16] {
                    attempt(contender, &format!("W3 enqueue x{threads}"), |contender| {
                        enqueue::threads(contender, threads)
                    });
                }
            }
            "W4" => attempt(contender, "W4 4+4", if contender.crew { claim::both_crew } else { claim::both_by_hand }),
            "W5" => {
                for size in [100, 1_000] {
                    attempt(contender, &format!("W5 enqueue batch {size}"), |contender| {
                        batch::enqueue(contender, size)
                    });
                    attempt(contender, &format!("W5 claim+ack batch {size}"), |contender| {
                        batch::claim(contender, size)
                    });
                }
            }
            "W6" => depth::all(contender),
            "W7" => {
                attempt(contender, "W7 wake in process", wake::in_process);
                attempt(contender, "W7 wake across", |contender| wake::across(contender, index));
            }
            "W8" => sizes::all(contender),
            "W9" => attempt(contender, "W9 minute", minute::minute),
            other => panic!("no workload {other:?}"),
        }
    }
}

/// Runs one workload unless the contender says that it lacks it; notes why it failed.
fn attempt(contender: &Contender, work: &str, run: impl FnOnce(&Contender) -> Answer<()>) {
    if contender.lack(work).is_some() {
        return;
    }
    if let Err(why) = run(contender) {
        eprintln!("{} ({}, {}): {work}: {why}", contender.peer, contender.class, contender.setting);
        write_failure(contender, work, &why);
    }
}
