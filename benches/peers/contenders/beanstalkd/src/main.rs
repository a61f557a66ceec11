//! beanstalkd: a server of our own for each measurement, with its log in the folder and an fsync for each write.

#![allow(clippy::disallowed_methods, reason = "it waits for a server")]

mod client;
mod server;

use std::path::Path;
use std::sync::Arc;

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer, bytes_in, knobs};

use client::Client;
use server::Server;

fn main() {
    let mut contenders = Vec::new();
    for (class, setting, sync_every) in [(FULL, "set (-f 0)", "0"), (NORMAL, "default (-f 50)", "50")] {
        contenders.push(Contender {
            peer: "beanstalkd",
            class,
            setting,
            crew: false,
            open: Box::new(move |path| Ok(Arc::new(Opened::open(path, sync_every)?))),
            settings: |_, peer| ("beanstalkd's binlog".into(), peer.durability()),
            lacks: &[
                ("W5", "no batches in its protocol"),
                ("W6 behind gated", "no gates"),
                ("W6 behind done", "a delete is the ack"),
                ("W7 wake across", "all its clients are other processes already: see in process"),
            ],
        });
    }
    driver::run(contenders);
}

struct Opened {
    server: Server,
    log: std::path::PathBuf,
}

impl Opened {
    fn open(folder: &Path, sync_every: &str) -> Answer<Opened> {
        let log = folder.join("log");
        // A million fsyncs are not worth a template.
        let template = knobs().templates.canonicalize().is_ok_and(|templates| folder.starts_with(templates));
        let sync_every = if template { "50" } else { sync_every };
        Ok(Opened { server: Server::start(&log, sync_every)?, log })
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(Client::connect(self.server.socket())?))
    }

    fn server(&self) -> Option<u32> {
        Some(self.server.id())
    }

    /// Its log is its data.
    fn sizes(&self) -> Option<(u64, u64)> {
        Some((0, bytes_in(&self.log, &|_| true)))
    }

    /// The server does not tell: its own command line does.
    fn durability(&self) -> String {
        self.server.command_line()
    }
}
