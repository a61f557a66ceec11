//! rusqlite without a queue around it: the least that a queue on SQLite costs.
//!
//! `bare` has an id, a payload, a status and one index; `raw` is what a careful person writes by hand. Neither is a queue
//! to use: bare loses what a dead worker held.

#![allow(clippy::disallowed_methods, reason = "raw has no clock of its own")]

mod bare;
mod connect;
mod group;
mod raw;

use std::path::Path;
use std::sync::Arc;

use driver::{Answer, Contender, FULL, NORMAL, Peer, spy};

use bare::{Connected, Shared};
use group::Group;
use raw::Raw;

const NO_WAIT: (&str, &str) = ("W7", "it would have to poll");
const MEANT_FOR_THREADS: &str = "it differs from bare only between threads";

fn main() {
    spy::watch();
    let mut contenders = Vec::new();
    for class in [FULL, NORMAL] {
        let contender = |peer, open, lacks| Contender {
            peer,
            class,
            setting: "set",
            crew: false,
            open,
            settings: spy::settings,
            lacks,
        };
        contenders.extend([
            contender(
                "bare",
                opener(move |path| Connected::open(path, class)),
                &[NO_WAIT, ("W6 behind", "no such states")],
            ),
            contender(
                "bare, one connection",
                opener(move |path| Shared::open(path, class)),
                &[
                    NO_WAIT,
                    ("W1", MEANT_FOR_THREADS),
                    ("W2", MEANT_FOR_THREADS),
                    ("W5", MEANT_FOR_THREADS),
                    ("W6", MEANT_FOR_THREADS),
                    ("W8", MEANT_FOR_THREADS),
                    ("W9", MEANT_FOR_THREADS),
                ],
            ),
            contender(
                "bare, group commit",
                opener(move |path| Group::open(path, class)),
                &[
                    NO_WAIT,
                    ("W2", "enqueues only"),
                    ("W4", "enqueues only"),
                    ("W5", "enqueues only"),
                    ("W6", "enqueues only"),
                    ("W8", "enqueues only"),
                    ("W9", "enqueues only"),
                ],
            ),
            contender("raw", opener(move |path| Raw::open(path, class)), &[NO_WAIT, ("W6 behind gated", "no gates")]),
        ]);
    }
    driver::run(contenders);
}

type Opener = Box<dyn Fn(&Path) -> Answer<Arc<dyn Peer>>>;

fn opener<P: Peer + 'static>(open: impl Fn(&Path) -> Answer<P> + 'static) -> Opener {
    Box::new(move |path| Ok(Arc::new(open(path)?)))
}
