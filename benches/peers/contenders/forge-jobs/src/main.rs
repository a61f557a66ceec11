//! forge-jobs: its storage, called directly. Its runtime, which writes a timeline of events besides, is not run.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, runtime, spy, unable};
use forge_jobs::storage::SqliteStorage;
use forge_jobs::{EnqueueRequest, FinalizeOutcome, JobId, JobQueue, QueueConfig};
use serde_json::Value;

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for (class, setting) in [(FULL, "default"), (NORMAL, "set")] {
        contenders.push(Contender {
            peer: "forge-jobs",
            class,
            setting,
            crew: false,
            open: Box::new(move |path| Ok(Arc::new(Opened::open(path, class)?))),
            settings: spy::settings,
            lacks: &[
                ("W5 claim", "a claim takes one message"),
                ("W6 behind gated", "no gates"),
                ("W7 wake across", "its waits see one process only"),
            ],
        });
    }
    driver::run(contenders);
}

struct Opened {
    storage: SqliteStorage,
    next: AtomicU64,
}

impl Opened {
    fn open(folder: &Path, synchronous: &str) -> Answer<Opened> {
        let storage = runtime().block_on(async {
            let storage = SqliteStorage::open_file(&folder.join("q.db")).await.map_err(brief)?;
            storage.ensure_queue("q", 1).await.map_err(brief)?;
            // All its writes go through a pool of one connection.
            let set = format!("PRAGMA synchronous={synchronous}");
            sqlx::query(&set).execute(storage.write_pool()).await.map_err(brief)?;
            Ok::<_, String>(storage)
        })?;
        Ok(Opened { storage, next: AtomicU64::new(0) })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        let worker = format!("w{}", self.next.fetch_add(1, Relaxed));
        Ok(Box::new(ByHand { storage: &self.storage, worker, held: None }))
    }
}

struct ByHand<'a> {
    storage: &'a SqliteStorage,
    worker: String,
    held: Option<JobId>,
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        runtime().block_on(self.storage.enqueue(request(payload))).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let job = runtime().block_on(self.storage.claim_next("q", &self.worker)).map_err(brief)?;
        if let Some(job) = &job {
            read(job.payload.as_str().unwrap_or_default().as_bytes());
        }
        self.held = job.map(|job| job.id);
        Ok(self.held.is_some())
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        while !self.claim(read)? {
            runtime().block_on(self.storage.wait_for_work("q", Duration::from_millis(500))).map_err(brief)?;
        }
        Ok(())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(id) = self.held.take() else { return Ok(()) };
        let done = self.storage.finalize(&id, Some(&self.worker), FinalizeOutcome::Done);
        runtime().block_on(done).map(drop).map_err(brief)
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        let requests = (0..count).map(|_| request(payload)).collect();
        runtime().block_on(self.storage.enqueue_bulk(requests)).map(drop).map_err(brief)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let change = match state {
            State::Delayed => "UPDATE sync_queue SET scheduled_at = replace(scheduled_at, '202', '203')",
            State::Done => "UPDATE sync_queue SET status = 'done', completed_at = enqueued_at",
            State::Dead => "UPDATE sync_queue SET status = 'dead', completed_at = enqueued_at",
            State::Gated => return unable(),
        };
        self.fill(payload, count)?;
        runtime().block_on(sqlx::query(change).execute(self.storage.write_pool())).map(drop).map_err(brief)
    }
}

/// It stores JSON.
fn request(payload: &[u8]) -> EnqueueRequest {
    EnqueueRequest::new("j", Value::String(String::from_utf8_lossy(payload).into_owned())).on_queue("q")
}
