//! rustqueue: on redb, on redb with its write coalescing, and on SQLite.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, Read, State, brief, runtime, spy, unable};
use rusqlite::Connection;
use rustqueue::QueueManager;
use rustqueue::engine::queue::{BatchAckItem, BatchPushItem, JobOptions};
use rustqueue::storage::{
    BufferedRedbConfig, BufferedRedbStorage, RedbDurability, RedbStorage, SqliteStorage, StorageBackend,
};
use serde_json::Value;

const NO_WAKE: (&str, &str) = ("W7", "nothing wakes a consumer in its library");
const NO_GATES: (&str, &str) = ("W6 behind gated", "no gates");
const TOO_LARGE: &str = "its limit is 1 MiB of JSON, quotes included";
const NO_DONE: (&str, &str) = ("W6 behind done", "reached by its own acks alone, one by one");
const NO_DEAD: (&str, &str) = ("W6 behind dead", "reached by its own failures alone, one by one");

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Redb,
    Coalesced,
    Sqlite,
}

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for class in [FULL, NORMAL] {
        for kind in [Kind::Redb, Kind::Coalesced, Kind::Sqlite] {
            contenders.push(Contender {
                peer: match kind {
                    Kind::Redb => "rustqueue (redb)",
                    Kind::Coalesced => "rustqueue (redb, coalesced)",
                    Kind::Sqlite => "rustqueue (SQLite)",
                },
                class,
                setting: match (class, kind) {
                    (FULL, Kind::Sqlite) => "forced",
                    (FULL, _) | (_, Kind::Sqlite) => "default",
                    _ => "set",
                },
                crew: false,
                open: Box::new(move |path| Ok(Arc::new(Opened::open(path, class, kind)?))),
                settings: if kind == Kind::Sqlite {
                    spy::settings
                } else {
                    |_, peer| ("redb".into(), peer.durability())
                },
                lacks: match kind {
                    Kind::Redb => &[
                        NO_WAKE,
                        NO_GATES,
                        NO_DONE,
                        NO_DEAD,
                        ("W8 enqueue 1 MiB", TOO_LARGE),
                        ("W8 claim+ack 1 MiB", TOO_LARGE),
                    ],
                    // Its background task keeps the file locked: it cannot be filled, closed and opened.
                    Kind::Coalesced => &[
                        NO_WAKE,
                        ("W5 claim", "it cannot be opened again in the process that filled it"),
                        ("W6", "it cannot be opened again in the process that filled it"),
                        ("W8 claim", "it cannot be opened again in the process that filled it"),
                        ("W8 enqueue 1 MiB", TOO_LARGE),
                    ],
                    Kind::Sqlite => &[
                        NO_WAKE,
                        NO_GATES,
                        NO_DONE,
                        NO_DEAD,
                        ("W5", "its batches are loops of single commits"),
                        ("W6 at 1000000", "a claim reads the JSON of all that is ready"),
                        ("W6 behind delayed", "a claim reads the JSON of all that waits"),
                        ("W8 enqueue 1 MiB", TOO_LARGE),
                        ("W8 claim+ack 1 MiB", TOO_LARGE),
                    ],
                },
            });
        }
    }
    driver::run(contenders);
}

struct Opened {
    manager: Arc<QueueManager>,
    /// The file, where it is SQLite's.
    sqlite: Option<PathBuf>,
    durability: RedbDurability,
}

impl Opened {
    fn open(folder: &Path, class: &str, kind: Kind) -> Answer<Opened> {
        // Its own SQLite is at NORMAL, with no way to say otherwise.
        spy::force((class == FULL).then_some("FULL"));
        let _entered = runtime().enter();
        let path = folder.join("q.db");
        let durability = if class == FULL { RedbDurability::Immediate } else { RedbDurability::Eventual };
        let redb = || RedbStorage::new_with_durability(&path, durability).map_err(brief);
        let storage: Arc<dyn StorageBackend> = match kind {
            Kind::Redb => Arc::new(redb()?),
            Kind::Coalesced => Arc::new(BufferedRedbStorage::new(Arc::new(redb()?), BufferedRedbConfig::default())),
            Kind::Sqlite => Arc::new(SqliteStorage::new(&path).map_err(brief)?),
        };
        let sqlite = (kind == Kind::Sqlite).then_some(path);
        Ok(Opened { manager: Arc::new(QueueManager::new(storage)), sqlite, durability })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(ByHand { opened: self, held: None }))
    }

    fn durability(&self) -> String {
        format!("redb {:?}, as it was asked for", self.durability)
    }
}

struct ByHand<'a> {
    opened: &'a Opened,
    held: Option<rustqueue::engine::models::JobId>,
}

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        runtime().block_on(self.opened.manager.push("q", "j", value(payload), None)).map(drop).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let job = runtime().block_on(self.opened.manager.pull("q", 1)).map_err(brief)?.pop();
        if let Some(job) = &job {
            read(job.data.as_str().unwrap_or_default().as_bytes());
        }
        self.held = job.map(|job| job.id);
        Ok(self.held.is_some())
    }

    fn ack(&mut self) -> Answer<()> {
        let Some(id) = self.held.take() else { return Ok(()) };
        runtime().block_on(self.opened.manager.ack(id, None)).map(drop).map_err(brief)
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        self.push_batch(payload, count, || None)
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        let manager = &self.opened.manager;
        runtime().block_on(async {
            let jobs = manager.pull("q", max as u32).await.map_err(brief)?;
            let count = jobs.len();
            let items = jobs.into_iter().map(|job| BatchAckItem { id: job.id, result: None }).collect();
            for acked in manager.ack_batch(items).await.map_err(brief)? {
                if !acked.ok {
                    return Err("an ack was refused".into());
                }
            }
            Ok(count)
        })
    }

    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        let Some(path) = &self.opened.sqlite else {
            let mut left = count;
            while left > 0 {
                let part = left.min(1_000);
                self.enqueue_batch(payload, part)?;
                left -= part;
            }
            return Ok(());
        };
        // Its batches on SQLite are loops: copies of one row that it wrote, each with an id of its own.
        self.enqueue(payload)?;
        let copy = format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}),
                 ids (id) AS MATERIALIZED (SELECT randomblob(16) FROM n),
                 texts (id, hex) AS (SELECT id, lower(hex(id)) FROM ids),
                 model (data) AS (SELECT data FROM jobs ORDER BY rowid DESC LIMIT 1)
             INSERT INTO jobs (id, data)
             SELECT id, json_set(model.data, '$.id', substr(hex, 1, 8) || '-' || substr(hex, 9, 4) || '-'
                 || substr(hex, 13, 4) || '-' || substr(hex, 17, 4) || '-' || substr(hex, 21))
             FROM texts, model"
        );
        let run = || {
            let conn = Connection::open(path)?;
            conn.busy_timeout(Duration::from_secs(30))?;
            conn.execute_batch(&copy)
        };
        run().map_err(brief)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        if state != State::Delayed {
            return unable();
        }
        let mut left = count;
        while left > 0 {
            let part = left.min(1_000);
            self.push_batch(payload, part, || {
                Some(JobOptions { delay_ms: Some(7 * 24 * 3_600_000), ..JobOptions::default() })
            })?;
            left -= part;
        }
        Ok(())
    }
}

impl ByHand<'_> {
    fn push_batch(&self, payload: &[u8], count: usize, options: impl Fn() -> Option<JobOptions>) -> Answer<()> {
        let item = |_| BatchPushItem { name: "j".into(), data: value(payload), options: options() };
        let items = (0..count).map(item).collect();
        runtime().block_on(self.opened.manager.push_batch("q", items)).map(drop).map_err(brief)
    }
}

/// It stores JSON.
fn value(payload: &[u8]) -> Value {
    Value::String(String::from_utf8_lossy(payload).into_owned())
}
