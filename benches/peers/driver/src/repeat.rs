//! The same call again and again, until its time is over or there is nothing left.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::contender::Answer;
use crate::latencies::Latencies;

/// Errors by their text.
pub type Errors = BTreeMap<String, u64>;

/// After so many errors a contender is taken for broken.
const ERRORS_MAX: u64 = 10_000;

#[derive(Default)]
pub struct Repeated {
    pub count: u64,
    pub time: Duration,
    pub latencies: Latencies,
    pub errors: Errors,
}

impl Repeated {
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.time.as_secs_f64()
    }

    /// Goes on for so long and so often at most. The call answers how many messages it moved; none ends it.
    pub fn go_on(&mut self, time: Duration, max: u64, mut call: impl FnMut() -> Answer<u64>) -> u64 {
        let began = Instant::now();
        let (mut count, mut errors) = (0, 0);
        while count < max {
            let before = Instant::now();
            match call() {
                Ok(0) => break,
                Ok(moved) => {
                    count += moved;
                    self.latencies.push(before.elapsed());
                }
                Err(text) => {
                    note(&mut self.errors, &text);
                    errors += 1;
                    if errors > ERRORS_MAX || text == "unable" {
                        break;
                    }
                }
            }
            if began.elapsed() >= time {
                break;
            }
        }
        self.count += count;
        self.time += began.elapsed();
        count
    }
}

pub fn note(errors: &mut Errors, text: &str) {
    *errors.entry(text.chars().take(100).collect()).or_default() += 1;
}

pub fn repeat(time: Duration, max: u64, call: impl FnMut() -> Answer<u64>) -> Repeated {
    let mut repeated = Repeated::default();
    repeated.go_on(time, max, call);
    repeated
}
