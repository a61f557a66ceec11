//! An API that answers "429 Too Many Requests": its gate is closed for as long as it says, the other messages for it wait in
//! the file instead of running into the same wall, and nobody loses an attempt.
//!
//! `cargo run --example rate_limit`

use std::sync::Mutex;
use std::time::Duration;

use relet::{Claim, GateLimits, Message, Outcome, Result, Store, Workers};

/// An API that wants to be left alone after three calls, once.
#[derive(Default)]
struct Api {
    calls: u32,
}

impl Api {
    /// `Some`: not now, come back after this long (its `Retry-After`).
    fn call(&mut self) -> Option<Duration> {
        self.calls += 1;
        (self.calls == 4).then_some(Duration::from_millis(300))
    }
}

fn main() -> Result<()> {
    let store = Store::open_in_memory()?;
    // What is known of the API's limits beforehand: two calls at a time, 50 in a second.
    store.gate("api").limit(GateLimits::new().concurrency(2).rate(50, Duration::from_secs(1)))?;
    let calls = store.queue("calls");
    calls.enqueue_all((1..=8).map(|n| Message::new(format!("call {n}")).gate("api")))?;
    calls.enqueue("a call of another API")?;

    let api = Mutex::new(Api::default());
    let workers = Workers::builder()
        .concurrency(4)
        .queue("calls", move |claim: &Claim| {
            let call = String::from_utf8_lossy(claim.payload());
            let answer = if claim.gate().is_some() { api.lock().expect("nobody panics").call() } else { None };
            match answer {
                Some(retry_after) => {
                    println!("{call}: 429, not for {retry_after:?}");
                    Outcome::Limited { retry_after } // by hand: claim.limited(retry_after)
                }
                None => {
                    println!("{call}: 200, at attempt {}, after {} deferrals", claim.attempts(), claim.deferrals());
                    Outcome::Ack
                }
            }
        })
        .start(&store)?;

    let mut was_closed = false;
    while store.stats()?.queues[0].live() > 0 {
        let gate = &store.gates()?[0];
        if gate.closed_until.is_some() != was_closed {
            was_closed = !was_closed;
            println!("the gate is {}, {} wait at it", if was_closed { "closed" } else { "open" }, gate.waiting);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(workers.stop(Duration::from_secs(5)).interrupted.is_empty());
    println!("{} calls acked", store.stats()?.queues[0].acked);
    Ok(())
}
