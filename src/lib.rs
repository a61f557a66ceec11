#![doc = include_str!("../README.md")]
#![warn(missing_docs, unreachable_pub)]
#![forbid(unsafe_code)]

mod backup;
mod claim;
mod clock;
mod db;
mod error;
mod liveness;
mod message;
mod options;
mod queue;
mod random;
mod receipt;
mod reserve;
mod retry;
mod sql;
mod state;
mod store;
mod view;
mod waker;
mod worker;
mod writer;

pub use claim::{Claim, How, Verdict, Wait};
pub use clock::Clock;
pub use error::{Error, Result, Whereabouts};
pub use message::{
    ATTEMPTS_MAX, CRASHES_MAX, DEFERRALS_MAX, ERROR_MAX, Enqueued, Message, MessageId, NAME_MAX, PAYLOAD_MAX,
    PAYLOAD_MAX_LIMIT, PRIORITY_RANGE, RELEASES_MAX,
};
pub use options::{DEFERRAL_GRACE, Durability, LEASE_RANGE, Options, RESERVE};
pub use queue::{Queue, QueueDefaults};
pub use receipt::Receipt;
pub use retry::Retry;
pub use rusqlite;
pub use sql::settle::{Settle, Settled};
pub use state::{Route, Status};
pub use store::{Redriven, Store};
pub use view::{Filter, PAGE, PAGE_MAX, QueueStats, Retrying, Snapshot, Stats, Stuck, Why};
pub use worker::Worker;
