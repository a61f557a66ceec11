//! A pool of workers: two queues by weight, typed payloads, a handler that panics, a hook, and a stop in good order.
//!
//! `cargo run --example worker_pool`

use std::time::Duration;

use relet::{Claim, Message, Outcome, Result, Retry, Status, Store, Workers};

#[derive(serde::Serialize, serde::Deserialize)]
struct Order {
    id: u32,
    item: String,
}

fn main() -> Result<()> {
    let store = Store::options().retry(Retry::fixed(Duration::from_millis(50))).open_in_memory()?;
    let (mail, orders) = (store.queue("mail"), store.queue("orders"));
    mail.enqueue_all(["anna@example.org", "boris@example.org", "nobody"])?;
    for (id, item) in [(1, "tea"), (2, "coffee"), (3, "cocoa"), (4, "milk")] {
        orders.enqueue(Message::json(&Order { id, item: item.into() })?)?;
    }
    // Not the JSON of an order: it fails with that reason, and holds up nothing.
    orders.enqueue(Message::new("one tea, please").max_attempts(1))?;

    let workers = Workers::builder()
        .label("shop-1")
        .concurrency(4)
        .queue("mail", send)
        .queue_json("orders", ship)
        .weight("orders", 2)
        .on_finish(|claim, finished| {
            println!(
                "  {} {} in {}, attempt {}: {:?}",
                claim.queue(),
                claim.id(),
                ms(finished.took),
                claim.attempts(),
                finished.outcome
            );
        })
        .start(&store)?;

    // A program would wait for a signal here. This one waits until everything has ended.
    while store.stats()?.queues.iter().any(|queue| queue.live() > 0) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let stopped = workers.stop(Duration::from_secs(5));
    println!("stopped, {} interrupted", stopped.interrupted.len());
    for queue in store.stats()?.queues {
        println!("{}: {} acked, {} dead letters", queue.queue, queue.acked, queue.count(Status::Dead));
    }
    Ok(())
}

fn send(claim: &Claim) -> Outcome {
    let to = String::from_utf8_lossy(claim.payload());
    if !to.contains('@') {
        return Outcome::reject("no address"); // no other try would help
    }
    std::thread::sleep(Duration::from_millis(10));
    Outcome::Ack
}

fn ship(order: Order, claim: &Claim) -> Result<(), String> {
    // A panic is a failure as well: it is tried again.
    assert!(order.item != "milk" || claim.attempts() > 1, "the milk is sour");
    if order.item == "cocoa" && claim.attempts() == 1 {
        return Err(format!("order {}: the warehouse does not answer", order.id));
    }
    Ok(())
}

fn ms(span: Duration) -> String {
    format!("{} ms", span.as_millis())
}
