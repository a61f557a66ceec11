//! A worker that is told "429 Too Many Requests": it defers, keeps the message, and loses no attempt.
//!
//! `cargo run --example rate_limit`

use std::collections::VecDeque;
use std::time::Duration;

use relet::{Result, Store};

/// An API that wants to be left alone twice before it answers.
struct Api(VecDeque<Option<Duration>>);

impl Api {
    /// `Some`: not now, come back after this long (its `Retry-After`).
    fn send(&mut self, payload: &[u8]) -> Option<Duration> {
        let answer = self.0.pop_front().flatten();
        println!("send {:?}: {}", String::from_utf8_lossy(payload), if answer.is_some() { "429" } else { "200" });
        answer
    }
}

fn main() -> Result<()> {
    let store = Store::open_in_memory()?;
    store.queue("mail").enqueue("hello")?;
    let worker = store.worker("mailer-1")?;
    let mut api = Api([Some(Duration::from_millis(200)), Some(Duration::from_millis(100)), None].into());

    // `claim_wait` sleeps until the very instant at which the deferred message is due.
    while let Some(claim) = worker.claim_wait("mail", Duration::from_secs(1))? {
        match api.send(claim.payload()) {
            Some(retry_after) => claim.defer_because(retry_after, "429")?,
            None => {
                println!("done at attempt {}, after {} deferrals", claim.attempts(), claim.deferrals());
                claim.ack()?
            }
        };
    }
    Ok(())
}
