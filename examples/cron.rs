//! Schedules: a cleaning every 200 ms, and a report at three in the morning in Berlin, also on the days on which the clock is
//! changed. Any number of processes may do the same: there is one message per tick.
//!
//! `cargo run --example cron --features cron`

use std::time::Duration;

use relet::{CatchUp, Message, Result, Store, When};

fn main() -> Result<()> {
    let store = Store::open_in_memory()?;

    // A program says this at each of its starts; what is the same already stays as it is.
    store.schedule("clean").set(When::every(Duration::from_millis(200)), "chores", "clean", CatchUp::Skip)?;
    store.schedule("report").set(
        When::cron("0 3 * * MON-FRI", "Europe/Berlin"),
        "chores",
        Message::new("report").priority(5).key("report"), // not while the last one is being written
        CatchUp::One,                                     // after a night that was slept through: once
    )?;
    for schedule in store.schedules()? {
        println!("{}: {}, next at {} (unix ms)", schedule.name, schedule.when, schedule.next_at);
    }

    // A pool of workers runs the schedules by itself; this is what it does.
    let worker = store.worker("janitor")?;
    let mut done = 0;
    while done < 5 {
        let ticks = store.run_schedules()?;
        for (name, error) in &ticks.failed {
            eprintln!("schedule {name}: {error}");
        }
        let wait = ticks.next.unwrap_or(Duration::MAX).min(Duration::from_secs(60));
        if let Some(claim) = worker.claim_wait("chores", wait)? {
            println!("{} for the tick at {:?}", String::from_utf8_lossy(claim.payload()), claim.tick_at());
            claim.ack()?;
            done += 1;
        }
    }
    Ok(())
}
