//! apalis with apalis-sqlite: messages are taken by its workers alone, which ack in batches some time later.

use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apalis::prelude::*;
use apalis_sqlite::SqliteStorage;
use apalis_sqlite::callback::HookCallbackListener;
use driver::{Answer, Contender, Crew, FULL, Handle, Handler, NORMAL, Peer, State, brief, runtime, spy, unable};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use tokio::task::JoinHandle;

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for class in [FULL, NORMAL] {
        contenders.push(Contender {
            peer: "apalis-sqlite",
            class,
            setting: "set",
            crew: true,
            open: Box::new(move |path| Ok(Arc::new(Opened::open(path, class)?))),
            settings: spy::settings,
            lacks: &[
                ("W5 claim", "its workers settle by themselves"),
                ("W6 behind gated", "no gates"),
                ("W7 wake across", "its hook sees its own connections only; else it polls"),
            ],
        });
    }
    driver::run(contenders);
}

struct Opened {
    pool: SqlitePool,
    /// What tells a worker of commits, until a worker has it.
    hook: Mutex<Option<HookCallbackListener>>,
}

impl Opened {
    fn open(folder: &Path, class: &'static str) -> Answer<Opened> {
        let synchronous = if class == FULL { SqliteSynchronous::Full } else { SqliteSynchronous::Normal };
        let address = format!("sqlite://{}", folder.join("q.db").display());
        let options = SqliteConnectOptions::from_str(&address)
            .map_err(brief)?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous);
        runtime().block_on(async {
            let pool = SqlitePoolOptions::new().max_connections(10).connect_with(options).await.map_err(brief)?;
            SqliteStorage::<()>::migrations().run(&pool).await.map_err(brief)?;
            if driver::knobs().work != "W7" {
                return Ok(Opened { pool, hook: Mutex::default() });
            }
            // Its hook wakes a worker sooner than its polling does. It comes with a pool that takes no options.
            spy::force(Some(class));
            let (pool, hook) = SqliteStorage::<()>::connect_with_callback(&address).map_err(brief)?;
            Ok(Opened { pool, hook: Mutex::new(Some(hook)) })
        })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(Enqueuer { storage: SqliteStorage::new(&self.pool), pool: self.pool.clone() }))
    }

    fn crew(&self, size: usize, handler: Handler) -> Answer<Box<dyn Crew + '_>> {
        *HANDLER.lock().expect("no holder panics") = Some(handler);
        let storage = SqliteStorage::<String>::new(&self.pool);
        let task = match self.hook.lock().expect("no holder panics").take() {
            Some(hook) => {
                let _entered = runtime().enter();
                let backend = storage.poll_with_stream(hook);
                runtime().spawn(async move {
                    let _ = WorkerBuilder::new("bench").backend(backend).build(work).run().await;
                })
            }
            None => runtime().spawn(async move {
                let _ = WorkerBuilder::new("bench").backend(storage).concurrency(size).build(work).run().await;
            }),
        };
        Ok(Box::new(Running { task, pool: self.pool.clone() }))
    }
}

/// Of the only crew of this process.
static HANDLER: Mutex<Option<Handler>> = Mutex::new(None);

async fn work(payload: String) -> Result<(), BoxDynError> {
    let handler = HANDLER.lock().expect("no holder panics").clone();
    if let Some(handler) = handler {
        handler(payload.as_bytes());
    }
    Ok(())
}

struct Running {
    task: JoinHandle<()>,
    pool: SqlitePool,
}

impl Crew for Running {
    /// What its table says: it acks some time after the handlers.
    fn settled(&self) -> u64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM Jobs WHERE status = 'Done'").fetch_one(&self.pool);
        runtime().block_on(count).map_or(0, |count: i64| count as u64)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
        std::thread::sleep(Duration::from_millis(100));
    }
}

struct Enqueuer {
    storage: SqliteStorage<String>,
    pool: SqlitePool,
}

impl Handle for Enqueuer {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        runtime().block_on(self.storage.push(text(payload))).map(drop).map_err(brief)
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        runtime().block_on(self.storage.push_bulk(vec![text(payload); count])).map(drop).map_err(brief)
    }

    fn fill_behind(&mut self, state: State, payload: &[u8], count: usize) -> Answer<()> {
        let change = match state {
            State::Delayed => "UPDATE Jobs SET run_at = run_at + 604800",
            State::Done => "UPDATE Jobs SET status = 'Done', done_at = run_at",
            State::Dead => "UPDATE Jobs SET status = 'Killed', done_at = run_at",
            State::Gated => return unable(),
        };
        self.fill(payload, count)?;
        runtime().block_on(sqlx::query(change).execute(&self.pool)).map(drop).map_err(brief)
    }
}

fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload).into_owned()
}
