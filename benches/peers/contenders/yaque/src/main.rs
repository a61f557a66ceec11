//! yaque: segments of a file, one sender and one receiver, each behind a mutex. It never calls fsync.

use std::path::Path;
use std::sync::{Arc, Mutex};

use driver::{Answer, Contender, Handle, NORMAL, Peer, Read, brief};
use futures::executor::block_on;
use yaque::{Receiver, Sender, TryRecvError};

fn main() {
    driver::run(vec![Contender {
        peer: "yaque",
        class: NORMAL,
        setting: "default",
        crew: false,
        open: Box::new(|path| Ok(Arc::new(Opened::open(path)?))),
        settings: |_, _| ("files".into(), "it has no setting and never calls fsync".into()),
        lacks: &[("W6 behind", "no such states"), ("W7 wake across", "a queue belongs to one process")],
    }]);
}

struct Opened {
    sender: Mutex<Sender>,
    receiver: Mutex<Receiver>,
}

impl Opened {
    fn open(folder: &Path) -> Answer<Opened> {
        let path = folder.join("q");
        let sender = Mutex::new(Sender::open(&path).map_err(brief)?);
        Ok(Opened { sender, receiver: Mutex::new(Receiver::open(&path).map_err(brief)?) })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(ByHand(self)))
    }
}

/// What was received is committed at once: the guard borrows the receiver, and nobody else could receive meanwhile.
struct ByHand<'a>(&'a Opened);

impl Handle for ByHand<'_> {
    fn enqueue(&mut self, payload: &[u8]) -> Answer<()> {
        block_on(self.0.sender.lock().expect("no holder panics").send(payload)).map_err(brief)
    }

    fn claim(&mut self, read: Read) -> Answer<bool> {
        let mut receiver = self.0.receiver.lock().expect("no holder panics");
        match receiver.try_recv() {
            Ok(guard) => {
                read(&guard);
                guard.commit().map_err(brief)?;
                Ok(true)
            }
            Err(TryRecvError::QueueEmpty) => Ok(false),
            Err(error) => Err(brief(error)),
        }
    }

    fn wait(&mut self, read: Read) -> Answer<()> {
        let mut receiver = self.0.receiver.lock().expect("no holder panics");
        let guard = block_on(receiver.recv()).map_err(brief)?;
        read(&guard);
        guard.commit().map_err(brief)
    }

    fn ack(&mut self) -> Answer<()> {
        Ok(())
    }

    fn enqueue_batch(&mut self, payload: &[u8], count: usize) -> Answer<()> {
        let batch = vec![payload.to_vec(); count];
        block_on(self.0.sender.lock().expect("no holder panics").send_batch(batch)).map_err(brief)
    }

    fn claim_ack_batch(&mut self, max: usize) -> Answer<usize> {
        let mut receiver = self.0.receiver.lock().expect("no holder panics");
        match receiver.try_recv_batch_up_to(max) {
            Ok(guard) => {
                let count = guard.len();
                guard.commit().map_err(brief)?;
                Ok(count)
            }
            Err(TryRecvError::QueueEmpty) => Ok(0),
            Err(error) => Err(brief(error)),
        }
    }
}
