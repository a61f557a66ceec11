//! With tokio: relet's calls block for as long as a commit takes, so an async task makes them by `spawn_blocking`; and a
//! handler of the pool, which has a thread of its own, waits for async work by `Handle::block_on`.
//!
//! `cargo run --example tokio`

use std::sync::mpsc::channel;
use std::time::Duration;

use relet::{Claim, Error, Message, Store, Workers};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

/// Any async function of the program.
async fn fetch(page: &str) -> Result<usize, String> {
    tokio::task::yield_now().await;
    if page.is_empty() { Err("no page".into()) } else { Ok(page.len()) }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let store = Store::open_in_memory()?;

    // Workers do not run on the runtime's threads, and so keep nobody from them.
    let runtime = Handle::current();
    let (done, all_done) = channel();
    let workers = Workers::builder()
        .concurrency(4)
        .queue("pages", move |claim: &Claim| {
            let page = String::from_utf8_lossy(claim.payload()).into_owned();
            let bytes = runtime.block_on(fetch(&page))?;
            println!("fetched {page}: {bytes} bytes");
            Ok::<_, String>(())
        })
        .on_finish(move |_, finished| {
            let _ = done.send(finished.settled.is_ok());
        })
        .start(&store)?;

    // Enqueued by async tasks, each on disk when its await is over (or here: in memory).
    let tasks: Vec<_> = (1..=8)
        .map(|n| {
            let pages = store.queue("pages");
            tokio::spawn(async move {
                let page = Message::new(format!("/page/{n}")).key(format!("page-{n}"));
                spawn_blocking(move || pages.enqueue(page)).await.expect("enqueueing does not panic")
            })
        })
        .collect();
    for task in tasks {
        let enqueued = task.await.expect("the task does not panic")?;
        println!("enqueued {}", enqueued.id());
    }

    // Waiting for a message by hand is a blocking call, too.
    let (waiting, worker) = (store.queue("answers"), store.worker("by-hand")?);
    let answer = spawn_blocking(move || worker.claim_wait("answers", Duration::from_secs(5)));
    spawn_blocking(move || waiting.enqueue("42")).await.expect("enqueueing does not panic")?;
    if let Some(claim) = answer.await.expect("claiming does not panic")? {
        println!("the answer is {}", String::from_utf8_lossy(claim.payload()));
        spawn_blocking(move || claim.ack()).await.expect("settling does not panic")?;
    }

    let settled = spawn_blocking(move || all_done.iter().take(8).filter(|settled| *settled).count());
    println!("{} pages settled", settled.await.expect("counting does not panic"));
    let stopped = spawn_blocking(move || workers.stop(Duration::from_secs(5))).await.expect("stopping does not panic");
    println!("stopped, {} interrupted", stopped.interrupted.len());
    Ok(())
}
