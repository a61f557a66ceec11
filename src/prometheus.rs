//! The numbers of a store under the names that a monitoring system keeps them by: as Prometheus text, and with the feature
//! `metrics` for any recorder of the `metrics` crate. Both are read off one table.

use std::fmt::{self, Write};

use crate::error::Result;
use crate::state::Status;
use crate::store::Store;
use crate::view::{GateView, QueueStats, Stats};

/// One measure, and a sample of it for each of the things that have it.
struct Family {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    samples: Vec<(Labels, f64)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gauge,
    Counter,
}

type Labels = Vec<(&'static str, String)>;

impl Store {
    /// Counters, ages and sizes as Prometheus text (exposition format 0.0.4), for a program that serves it to a scraper.
    ///
    /// In base units: seconds and bytes. Per queue and status: `relet_messages`; per queue: `relet_retrying`, `relet_stuck`,
    /// `relet_acked_total`, `relet_oldest_waiting_seconds` (0 where nothing waits), `relet_paused`; per gate:
    /// `relet_gate_closed`, `relet_gate_held`, `relet_gate_waiting`; of the store: `relet_file_bytes`, `relet_wal_bytes`,
    /// `relet_checkpoint_failed`. What waits behind a gate is counted message by message; everything else costs the same at
    /// any size.
    ///
    /// ```
    /// use relet::Store;
    ///
    /// let store = Store::open_in_memory()?;
    /// store.queue("mail").enqueue("hello")?;
    /// let text = store.prometheus()?;
    /// assert!(text.contains("relet_messages{queue=\"mail\",status=\"pending\"} 1\n"));
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn prometheus(&self) -> Result<String> {
        let mut out = String::new();
        for family in families(&self.stats()?, &self.gates()?) {
            write(&mut out, &family).expect("a string takes everything");
        }
        Ok(out)
    }
}

fn families(stats: &Stats, gates: &[GateView]) -> Vec<Family> {
    let of_queues = |value: fn(&QueueStats) -> f64| {
        stats.queues.iter().map(|queue| (vec![("queue", queue.queue.clone())], value(queue))).collect()
    };
    let of_gates = |value: fn(&GateView) -> f64| {
        gates.iter().map(|gate| (vec![("gate", gate.name.clone())], value(gate))).collect()
    };
    let of_store = |value: f64| vec![(Vec::new(), value)];
    let by_status = stats.queues.iter().flat_map(|queue| {
        Status::ALL.into_iter().map(|status| {
            (vec![("queue", queue.queue.clone()), ("status", status.to_string())], queue.count(status) as f64)
        })
    });
    let gauge = |name, help, samples| Family { name, help, kind: Kind::Gauge, samples };
    vec![
        gauge("relet_messages", "Messages in each status.", by_status.collect()),
        gauge("relet_retrying", "Messages in the retry queue.", of_queues(|queue| queue.retrying as f64)),
        gauge(
            "relet_stuck",
            "Messages in processing for too long without a lease that runs.",
            of_queues(|queue| queue.stuck as f64),
        ),
        Family {
            name: "relet_acked_total",
            help: "Messages ever acked.",
            kind: Kind::Counter,
            samples: of_queues(|queue| queue.acked as f64),
        },
        gauge(
            "relet_oldest_waiting_seconds",
            "Age of the oldest message that waits for nothing but a worker, its gate or the end of a pause; 0: none waits.",
            of_queues(|queue| queue.oldest_waiting.unwrap_or_default().as_secs_f64()),
        ),
        gauge(
            "relet_paused",
            "1: nothing of the queue is handed out.",
            of_queues(|queue| flag(queue.paused_until.is_some())),
        ),
        gauge("relet_gate_closed", "1: nothing passes the gate.", of_gates(|gate| flag(gate.closed_until.is_some()))),
        gauge("relet_gate_held", "Claims that have passed the gate and hold.", of_gates(|gate| gate.held as f64)),
        gauge(
            "relet_gate_waiting",
            "Messages that wait for nothing but the gate and a worker.",
            of_gates(|gate| gate.waiting as f64),
        ),
        gauge("relet_file_bytes", "Size of the store's file.", of_store(stats.file_bytes as f64)),
        gauge("relet_wal_bytes", "Size of the write-ahead log beside it.", of_store(stats.wal_bytes as f64)),
        gauge(
            "relet_checkpoint_failed",
            "1: the last checkpoint of this process failed.",
            of_store(flag(stats.checkpoint_error.is_some())),
        ),
    ]
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn write(out: &mut String, family: &Family) -> fmt::Result {
    let kind = match family.kind {
        Kind::Gauge => "gauge",
        Kind::Counter => "counter",
    };
    writeln!(out, "# HELP {} {}\n# TYPE {} {kind}", family.name, family.help, family.name)?;
    for (labels, value) in &family.samples {
        out.write_str(family.name)?;
        for (at, (label, value)) in labels.iter().enumerate() {
            write!(out, "{}{label}=\"{}\"", if at == 0 { '{' } else { ',' }, escaped(value))?;
        }
        writeln!(out, "{} {value}", if labels.is_empty() { "" } else { "}" })?;
    }
    Ok(())
}

/// A label's value, as the format wants it between its quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Hands the same numbers to the recorder that this program has installed.
#[cfg(feature = "metrics")]
pub(crate) fn record(stats: &Stats, gates: &[GateView]) {
    for Family { name, help, kind, samples } in families(stats, gates) {
        match kind {
            Kind::Gauge => metrics::describe_gauge!(name, help),
            Kind::Counter => metrics::describe_counter!(name, help),
        }
        for (labels, value) in samples {
            match kind {
                Kind::Gauge => metrics::gauge!(name, &labels).set(value),
                Kind::Counter => metrics::counter!(name, &labels).absolute(value as u64),
            }
        }
    }
}
