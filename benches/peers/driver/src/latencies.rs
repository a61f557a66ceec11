//! Durations of single calls, in nanoseconds, and their percentiles.

use std::time::Duration;

#[derive(Default, Clone)]
pub struct Latencies(Vec<u64>);

impl Latencies {
    pub fn push(&mut self, time: Duration) {
        self.0.push(time.as_nanos() as u64);
    }

    pub fn push_nanos(&mut self, nanos: u64) {
        self.0.push(nanos);
    }

    pub fn extend(&mut self, other: Latencies) {
        self.0.extend(other.0);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Without the first ones, which warm up.
    pub fn skip(mut self, count: usize) -> Latencies {
        self.0.drain(..count.min(self.0.len()));
        self
    }

    /// In microseconds.
    pub fn percentile(&mut self, of_thousand: usize) -> f64 {
        if self.0.is_empty() {
            return f64::NAN;
        }
        self.0.sort_unstable();
        self.0[(self.0.len() - 1) * of_thousand / 1_000] as f64 / 1_000.0
    }
}
