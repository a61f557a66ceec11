#![doc = include_str!("../README.md")]
#![warn(missing_docs, unreachable_pub)]
#![forbid(unsafe_code)]

mod backup;
mod batch;
mod boot;
mod cancel;
mod claim;
mod clock;
#[cfg(feature = "cron")]
mod cron;
mod db;
mod error;
mod files;
mod follower;
mod gate;
mod liveness;
mod message;
mod monitor;
mod options;
mod outcome;
mod payload;
mod pool;
mod presence;
mod prometheus;
mod queue;
mod random;
mod receipt;
mod repair;
mod reserve;
mod restore;
mod retry;
mod schedule;
mod seat;
mod spool;
mod sql;
mod state;
mod store;
mod ticket;
mod transfer;
mod view;
mod waker;
mod watcher;
mod worker;
mod workers;
mod writer;

pub use cancel::{CancelReason, CancelToken};
pub use claim::{Claim, How, Verdict, Wait};
pub use clock::{Clock, INSTANT_MAX};
pub use error::{Error, Result, Whereabouts};
pub use gate::{Gate, GateLimits};
pub use message::{
    ATTEMPTS_MAX, CRASHES_MAX, DEFERRALS_MAX, ERROR_MAX, Enqueued, Message, MessageId, NAME_MAX, PAYLOAD_MAX,
    PAYLOAD_MAX_LIMIT, PRIORITY_RANGE, RELEASES_MAX,
};
pub use monitor::{Event, Finding, Monitor, RunningMonitor, What};
pub use options::{DEFERRAL_GRACE, Durability, LEASE_RANGE, Options, RESERVE};
pub use outcome::Outcome;
pub use payload::PayloadReader;
pub use pool::Finished;
pub use queue::{Queue, QueueDefaults};
pub use receipt::Receipt;
pub use repair::Repaired;
pub use retry::Retry;
pub use rusqlite;
pub use schedule::{CATCH_UP_MAX, CatchUp, EVERY_MAX, Schedule, ScheduleView, TICK_GRACE, Ticks, When};
pub use sql::settle::{Settle, Settled};
pub use state::{Route, Status};
pub use store::{Redriven, Store};
pub use ticket::Ticket;
pub use view::{
    Filter, GATE_WAITING_MAX, GateView, Life, PAGE, PAGE_MAX, QueueStats, Retrying, Snapshot, Stats, Stuck, Why,
    WorkerView,
};
pub use worker::Worker;
pub use workers::{Builder, Stopped, Workers};
pub use writer::{DEFERRED_BYTES_MAX, DEFERRED_MAX};

#[cfg(all(test, feature = "bundled"))]
mod cost;
