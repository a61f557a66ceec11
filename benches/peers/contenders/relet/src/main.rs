//! relet, by its public API alone: claims by hand, and its pool.

mod by_hand;
mod pool;
mod store;

use std::path::Path;
use std::sync::Arc;

use driver::{Answer, Contender, FULL, NORMAL, Peer, spy};
use relet::Durability;

use store::Opened;

const AS_BY_HAND: &str = "the same as by hand";

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for (class, setting, durability) in [(FULL, "default", Durability::Full), (NORMAL, "set", Durability::Normal)] {
        let open = move |path: &Path| -> Answer<Arc<dyn Peer>> { Ok(Arc::new(Opened::open(path, durability)?)) };
        let by_hand = Contender {
            peer: "relet",
            class,
            setting,
            crew: false,
            open: Box::new(open),
            settings: store::settings,
            lacks: &[],
        };
        let pool = Contender {
            peer: "relet pool",
            class,
            setting,
            crew: true,
            open: Box::new(open),
            settings: spy::settings,
            lacks: &[
                ("W1", AS_BY_HAND),
                ("W3", AS_BY_HAND),
                ("W5", "a pool has no batches"),
                ("W6", AS_BY_HAND),
                ("W8 enqueue", AS_BY_HAND),
            ],
        };
        contenders.extend([by_hand, pool]);
    }
    driver::run(contenders);
}
