//! What all contenders of the bench share: the workloads, the clock and the rows that they write.
//!
//! A contender is a program that lists its `Contender`s and calls `run`. One call runs one workload on fresh files; the
//! script `run` decides which, so that contenders take turns.

#![allow(clippy::disallowed_methods, reason = "a bench measures time")]

mod contender;
mod folder;
mod knobs;
mod latencies;
mod meter;
mod payload;
mod repeat;
mod rows;
#[cfg(feature = "tokio")]
mod runtime;
#[cfg(feature = "sqlite")]
pub mod spy;
mod syncs;
mod threads;
mod work;

pub use contender::{Answer, Contender, Crew, FULL, Handle, Handler, NORMAL, Peer, Read, State, brief, unable};
pub use folder::{Folder, bytes_in};
pub use knobs::knobs;
pub use payload::look;
#[cfg(feature = "tokio")]
pub use runtime::runtime;
pub use work::run;
