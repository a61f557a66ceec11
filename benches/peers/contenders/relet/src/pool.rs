//! relet's own workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use driver::{Answer, Crew, Handler, brief};
use relet::{Claim, Store, Workers};

use crate::store::QUEUE;

pub struct Pool {
    workers: Option<Workers>,
    settled: Arc<AtomicU64>,
}

impl Pool {
    pub fn start(store: &Store, size: usize, handler: Handler) -> Answer<Pool> {
        let settled = Arc::new(AtomicU64::new(0));
        let count = settled.clone();
        let workers = Workers::builder()
            .concurrency(size)
            .queue(QUEUE, move |claim: &Claim| handler(claim.payload()))
            .on_finish(move |_, _| {
                count.fetch_add(1, Relaxed);
            })
            .start(store)
            .map_err(brief)?;
        Ok(Pool { workers: Some(workers), settled })
    }
}

impl Crew for Pool {
    fn settled(&self) -> u64 {
        self.settled.load(Relaxed)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(workers) = self.workers.take() {
            let _interrupted = workers.stop(Duration::from_secs(5));
        }
    }
}
