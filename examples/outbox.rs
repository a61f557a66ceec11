//! The outbox: an application's change and the message about it are one commit; so are a message's effect and its ack.
//!
//! `cargo run --example outbox`

use relet::rusqlite::{Connection, TransactionBehavior::Immediate};
use relet::{Error, Store};

fn main() -> Result<(), Error> {
    let folder = std::env::temp_dir().join(format!("relet-outbox-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
    let outcome = run(&folder.join("shop.db"));
    let _ = std::fs::remove_dir_all(&folder);
    outcome
}

fn run(file: &std::path::Path) -> Result<(), Error> {
    // The application's own database; relet joins it with tables of its own.
    let mut shop = Connection::open(file)?;
    shop.execute_batch(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL);
         CREATE TABLE shipped (order_id INTEGER PRIMARY KEY)",
    )?;
    let store = Store::open(file)?;
    let shipping = store.queue("shipping");

    // Placed, and to be shipped: both or neither.
    let tx = shop.transaction_with_behavior(Immediate)?;
    tx.execute("INSERT INTO orders (item) VALUES ('tea')", [])?;
    shipping.enqueue_in(&tx, tx.last_insert_rowid().to_string())?;
    tx.commit()?;

    // One that is given up leaves no message behind.
    let tx = shop.transaction_with_behavior(Immediate)?;
    tx.execute("INSERT INTO orders (item) VALUES ('coffee')", [])?;
    shipping.enqueue_in(&tx, tx.last_insert_rowid().to_string())?;
    tx.rollback()?;

    let worker = store.worker("shipper-1")?;
    while let Some(claim) = worker.claim("shipping")? {
        let order = String::from_utf8_lossy(claim.payload()).into_owned();
        let tx = shop.transaction_with_behavior(Immediate)?;
        tx.execute("INSERT INTO shipped VALUES (?1)", [&order])?;
        claim.ack_in(&tx)?; // a claim that was lost meanwhile ends this here, and nothing is shipped twice
        tx.commit()?;
        println!("order {order} is shipped");
    }
    let shipped: i64 = shop.query_row("SELECT count(*) FROM shipped", [], |row| row.get(0))?;
    println!("{shipped} of 1 orders shipped, {} messages left", store.stats()?.queues[0].live());
    Ok(())
}
