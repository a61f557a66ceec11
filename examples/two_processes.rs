//! Two processes on one file. One is killed in the middle of its work; the other has what it held at once, and finishes it.
//!
//! `cargo run --example two_processes`

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use relet::{Claim, Result, Status, Store, Workers};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if let [_, file, label] = &args[..] {
        return work(Path::new(file), label);
    }
    let folder = std::env::temp_dir().join(format!("relet-two-processes-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
    let outcome = run(&folder.join("queue.db"));
    let _ = std::fs::remove_dir_all(&folder);
    outcome
}

/// A worker process, until there is nothing left to be done.
fn work(file: &Path, label: &str) -> Result<()> {
    let store = Store::open(file)?;
    let name = label.to_owned();
    let workers = Workers::builder()
        .label(label)
        .concurrency(2)
        .drain(true)
        .queue("calls", move |claim: &Claim| {
            let call = String::from_utf8_lossy(claim.payload()).into_owned();
            println!("{name}: {call}, attempt {}, after {} crashes", claim.attempts(), claim.crashes());
            std::thread::sleep(Duration::from_millis(50));
        })
        .start(&store)?;
    workers.wait(Duration::from_secs(60));
    Ok(())
}

fn run(file: &Path) -> Result<()> {
    let store = Store::open(file)?;
    store.queue("calls").enqueue_all((1..=8).map(|n| format!("call {n}")))?;

    let mut first = start(file, "first");
    let lines = BufReader::new(first.stdout.take().expect("it is piped")).lines();
    for line in lines.map_while(|line| line.ok()).take(4) {
        println!("{line}");
    }
    // Kill -9: it can say nothing and give nothing back. Its lock tells that it is dead.
    first.kill().and_then(|()| first.wait()).expect("it runs");
    for worker in store.workers()? {
        println!("{} is {}, and held {}", worker.label, worker.life, worker.held);
    }

    let mut second = start(file, "second");
    let lines = BufReader::new(second.stdout.take().expect("it is piped")).lines();
    lines.map_while(|line| line.ok()).for_each(|line| println!("{line}"));
    second.wait().expect("it has ended");
    let calls = &store.stats()?.queues[0];
    println!("{} calls acked, {} left, {} dead", calls.acked, calls.live(), calls.count(Status::Dead));
    Ok(())
}

fn start(file: &Path, label: &str) -> Child {
    let program = std::env::current_exe().expect("this program is a file");
    Command::new(program).arg(file).arg(label).stdout(Stdio::piped()).spawn().expect("this program can be started")
}
