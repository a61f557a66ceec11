//! A store that is open, as one process has it: shared by its threads, with one worker that starts at its first claim.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use driver::{Answer, Crew, Handle, Handler, Peer, brief, spy};
use relet::{Durability, Store, Worker};

use crate::by_hand::ByHand;
use crate::pool::Pool;

pub const QUEUE: &str = "q";

pub struct Opened {
    pub store: Store,
    pub path: PathBuf,
    worker: OnceLock<Worker>,
}

impl Opened {
    pub fn open(folder: &Path, durability: Durability) -> Answer<Opened> {
        let path = folder.join("q.db");
        let store = Store::options().durability(durability).open(&path).map_err(brief)?;
        Ok(Opened { store, path, worker: OnceLock::new() })
    }

    pub fn worker(&self) -> Answer<&Worker> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        if self.worker.get().is_none() {
            let _one = ONE_AT_A_TIME.lock().expect("no holder panics");
            if self.worker.get().is_none() {
                let _ = self.worker.set(self.store.worker("bench").map_err(brief)?);
            }
        }
        Ok(self.worker.get().expect("it was just set"))
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(ByHand::new(self)))
    }

    fn crew(&self, size: usize, handler: Handler) -> Answer<Box<dyn Crew + '_>> {
        Ok(Box::new(Pool::start(&self.store, size, handler)?))
    }
}

/// What each step leaves the connections set to: a claim is committed without an fsync, the others with one.
pub fn settings(folder: &Path, peer: &dyn Peer) -> (String, String) {
    let (version, after_ack) = spy::settings(folder, peer);
    let steps = || -> Answer<String> {
        let mut handle = peer.handle()?;
        handle.enqueue(b"x")?;
        let after_enqueue = spy::durability(folder);
        handle.claim(&mut |_| {})?;
        let after_claim = spy::durability(folder);
        handle.ack()?;
        let after_ack = spy::durability(folder);
        Ok(format!("enqueue {after_enqueue}; claim {after_claim}; ack {after_ack}"))
    };
    (version, steps().unwrap_or(after_ack))
}
