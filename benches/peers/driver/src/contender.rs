//! What a contender has to be able to do. Each method that it lacks answers that it cannot.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// What went wrong, in a few words: errors are counted by their text.
pub type Answer<T> = Result<T, String>;

/// Is shown the payload of a message that was taken.
pub type Read<'a> = &'a mut dyn FnMut(&[u8]);

/// Is called by a contender's own workers with each payload.
pub type Handler = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Each commit is on disk when it returns.
pub const FULL: &str = "FULL";
/// Commits survive the death of the process, but not each of them a power cut.
pub const NORMAL: &str = "NORMAL";

/// One row of the table: a queue with one setting of its durability.
pub struct Contender {
    pub peer: &'static str,
    pub class: &'static str,
    /// Who chose the setting: the peer ("default"), its public options ("set"), or the bench behind its back ("forced").
    pub setting: &'static str,
    /// Its own workers take and settle messages, not a loop of ours.
    pub crew: bool,
    pub open: Box<dyn Fn(&Path) -> Answer<Arc<dyn Peer>>>,
    /// The version of what it stores with, and what its open connections say of their durability.
    pub settings: fn(&Path, &dyn Peer) -> (String, String),
    /// Workloads that are left out, by the beginning of their names, and why.
    pub lacks: &'static [(&'static str, &'static str)],
}

impl Contender {
    pub fn lack(&self, work: &str) -> Option<&'static str> {
        self.lacks.iter().find(|(prefix, _)| work.starts_with(prefix)).map(|(_, why)| *why)
    }
}

/// A queue that is open.
pub trait Peer: Send + Sync {
    /// What one thread works with.
    fn handle(&self) -> Answer<Box<dyn Handle + '_>>;

    /// Starts so many workers of its own.
    fn crew(&self, _size: usize, _handler: Handler) -> Answer<Box<dyn Crew + '_>> {
        unable()
    }

    /// The server's process, whose children count as well.
    fn server(&self) -> Option<u32> {
        None
    }

    /// The bytes of its log and of its data; none: by the names of the files.
    fn sizes(&self) -> Option<(u64, u64)> {
        None
    }

    /// What `settings` asks where there is no SQLite.
    fn durability(&self) -> String {
        String::new()
    }
}

/// Workers at work, until this is dropped.
pub trait Crew {
    /// How many messages are done with, as durably as the peer does it.
    fn settled(&self) -> u64;
}

/// Messages that lie in the file and are not to be handed out.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum State {
    Delayed,
    Gated,
    Done,
    Dead,
}

impl State {
    pub const ALL: [State; 4] = [State::Delayed, State::Gated, State::Done, State::Dead];

    pub fn name(self) -> &'static str {
        match self {
            State::Delayed => "delayed",
            State::Gated => "gated",
            State::Done => "done",
            State::Dead => "dead",
        }
    }
}

pub trait Handle {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()>;

    /// Takes one message and shows it; false: there is none.
    fn claim(&mut self, _read: Read) -> Answer<bool> {
        unable()
    }

    /// Waits until there is a message, takes it and shows it.
    fn wait(&mut self, _read: Read) -> Answer<()> {
        unable()
    }

    /// Acks what `claim` or `wait` has taken.
    fn ack(&mut self) -> Answer<()> {
        unable()
    }

    /// Stores so many in one transaction.
    fn enqueue_batch(&mut self, _payload: &[u8], _count: usize) -> Answer<()> {
        unable()
    }

    /// Takes so many in one transaction and acks them in one.
    fn claim_ack_batch(&mut self, _max: usize) -> Answer<usize> {
        unable()
    }

    /// Lays out messages for a workload that does not time it.
    fn fill(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        let mut left = count;
        while left > 0 {
            let part = left.min(1_000);
            self.enqueue_batch(payload, part)?;
            left -= part;
        }
        Ok(())
    }

    /// Lays out messages that are in the way.
    fn fill_behind(&mut self, _state: State, _payload: &[u8], _count: usize) -> Answer<()> {
        unable()
    }
}

pub fn unable<T>() -> Answer<T> {
    Err("unable".into())
}

/// An error in a few words.
pub fn brief(error: impl Debug) -> String {
    let text = format!("{error:?}");
    for known in ["database is locked", "PoolTimedOut"] {
        if text.contains(known) {
            return known.into();
        }
    }
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(100).collect()
}
