//! PostgreSQL, with the queue that everybody writes on it: FOR UPDATE SKIP LOCKED. A cluster of our own for each
//! measurement, on a Unix socket.

#![allow(clippy::disallowed_methods, reason = "it waits for a server")]

mod client;
mod cluster;

use std::path::Path;
use std::sync::Arc;

use driver::{Answer, Contender, FULL, Handle, NORMAL, Peer};
use postgres::{Client, NoTls};

use cluster::Cluster;

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS messages (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        payload BYTEA NOT NULL,
        status TEXT NOT NULL DEFAULT 'ready' CHECK (status IN ('ready', 'processing', 'done', 'dead')),
        due_at TIMESTAMPTZ NOT NULL DEFAULT now(),
        worker TEXT,
        lease_until TIMESTAMPTZ,
        token BIGINT NOT NULL DEFAULT 0,
        attempts INT NOT NULL DEFAULT 0
    );
    CREATE INDEX IF NOT EXISTS ready ON messages (due_at, id) WHERE status = 'ready';
    CREATE INDEX IF NOT EXISTS leased ON messages (lease_until) WHERE status = 'processing'";

fn main() {
    let mut contenders = Vec::new();
    for (class, setting, synchronous_commit) in [(FULL, "default", "on"), (NORMAL, "set", "off")] {
        contenders.push(Contender {
            peer: "PostgreSQL",
            class,
            setting,
            crew: false,
            open: Box::new(move |path| Ok(Arc::new(Opened::open(path, synchronous_commit)?))),
            settings: |_, peer| ("PostgreSQL".into(), peer.durability()),
            lacks: &[
                ("W6 behind gated", "no gates in a table like this"),
                ("W7 wake across", "all its clients are other processes already: see in process"),
            ],
        });
    }
    driver::run(contenders);
}

pub struct Opened {
    cluster: Cluster,
}

impl Opened {
    fn open(folder: &Path, synchronous_commit: &str) -> Answer<Opened> {
        let opened = Opened { cluster: Cluster::start(folder, synchronous_commit)? };
        opened.connect()?.batch_execute(SCHEMA).map_err(|error| error.to_string())?;
        Ok(opened)
    }

    pub fn connect(&self) -> Answer<Client> {
        Client::connect(&self.cluster.address(), NoTls).map_err(|error| error.to_string())
    }
}

impl Peer for Opened {
    fn handle(&self) -> Answer<Box<dyn Handle + '_>> {
        Ok(Box::new(client::ByHand::connect(self)?))
    }

    fn server(&self) -> Option<u32> {
        Some(self.cluster.id())
    }

    fn sizes(&self) -> Option<(u64, u64)> {
        Some(self.cluster.sizes())
    }

    fn durability(&self) -> String {
        let ask = || -> Result<String, postgres::Error> {
            let mut client = Client::connect(&self.cluster.address(), NoTls)?;
            let mut shown = Vec::new();
            for name in ["server_version", "fsync", "synchronous_commit", "wal_sync_method"] {
                let row = client.query_one(&format!("SHOW {name}"), &[])?;
                shown.push(format!("{name} {}", row.get::<_, String>(0)));
            }
            Ok(shown.join(", "))
        };
        ask().unwrap_or_else(|error| error.to_string())
    }
}
