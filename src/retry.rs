//! Backoff: from the number of failures to the wait before the next try.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a failed message waits for its next try. Never overflows, for any number of failures.
///
/// The default is exponential: 1 s, 2 s, 4 s … up to 1 hour, each shortened by up to 20 % at random, so that messages
/// which failed together do not come back together. Where the caller names the wait itself (a server's `Retry-After`),
/// the policy and its jitter do not apply.
///
/// ```
/// use std::time::Duration;
/// use relet::Retry;
///
/// let retry = Retry::exponential(Duration::from_secs(1), Duration::from_secs(3600)).jitter(0.0);
/// assert_eq!(retry.delay(0), Duration::from_secs(1));
/// assert_eq!(retry.delay(11), Duration::from_secs(2048));
/// assert_eq!(retry.delay(u32::MAX), Duration::from_secs(3600));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Retry {
    base: Duration,
    factor: f64,
    cap: Duration,
    jitter: f64,
}

impl Retry {
    /// The same wait every time, without jitter.
    pub fn fixed(delay: Duration) -> Retry {
        Retry { base: delay, factor: 1.0, cap: delay, jitter: 0.0 }
    }

    /// `base`, then twice as long each time, at most `cap`.
    pub fn exponential(base: Duration, cap: Duration) -> Retry {
        Retry { base, factor: 2.0, cap, jitter: 0.2 }
    }

    /// By how much the wait grows from one failure to the next. Below 1, and where it is not a number, it counts as 1.
    pub fn factor(self, factor: f64) -> Retry {
        // What is stored must be a number that can be read back.
        Retry { factor: if factor.is_nan() { 1.0 } else { factor.clamp(1.0, f64::MAX) }, ..self }
    }

    /// The share of the wait, 0.0 to 1.0, by which it may be shortened at random. 0.2 unless set.
    pub fn jitter(self, jitter: f64) -> Retry {
        Retry { jitter: if jitter.is_nan() { 0.0 } else { jitter.clamp(0.0, 1.0) }, ..self }
    }

    /// The wait after `failures` earlier failures (0 for the first one), before jitter. Never shorter than for fewer failures, never longer than the cap.
    pub fn delay(&self, failures: u32) -> Duration {
        // Once more, since a stored policy may have been written by hand.
        let growth = self.factor.max(1.0).powf(f64::from(failures));
        let seconds = self.base.as_secs_f64() * growth;
        // Infinite, or not a number (zero base, infinite growth): compare so that both end in range.
        if self.base.is_zero() {
            Duration::ZERO
        } else if seconds < self.cap.as_secs_f64() {
            Duration::try_from_secs_f64(seconds).unwrap_or(self.cap).min(self.cap)
        } else {
            self.cap
        }
    }

    /// [`Retry::delay`], shortened by the jitter; `random` is uniform in 0.0..1.0.
    pub(crate) fn jittered(&self, failures: u32, random: f64) -> Duration {
        let share = if self.jitter > 0.0 { self.jitter.min(1.0) * random } else { 0.0 };
        let delay = self.delay(failures);
        delay.saturating_sub(Duration::try_from_secs_f64(delay.as_secs_f64() * share).unwrap_or(Duration::ZERO))
    }
}

impl Default for Retry {
    fn default() -> Retry {
        Retry::exponential(Duration::from_secs(1), Duration::from_secs(3600))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPTS: [u32; 10] = [0, 1, 10, 31, 32, 63, 64, 65, 1000, u32::MAX];

    /// B29: a power that overflowed before the cap made the delay negative, and retries fired at once.
    #[test]
    fn no_number_of_failures_overflows_the_delay() {
        let hour = Duration::from_secs(3600);
        let plain = Retry::exponential(Duration::from_secs(1), hour);
        for base in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1), Duration::MAX] {
            for factor in [0.0, 1.0, 1.5, 2.0, 1e300, f64::INFINITY, f64::NAN, -3.0] {
                for cap in [Duration::ZERO, hour, Duration::MAX] {
                    let retry = Retry::exponential(base, cap).factor(factor);
                    let mut last = Duration::ZERO;
                    for failures in ATTEMPTS {
                        let delay = retry.delay(failures);
                        assert!(delay >= last && delay <= cap, "{retry:?} {failures}: {delay:?} after {last:?}");
                        for random in [0.0, 0.5, 0.999_999] {
                            assert!(retry.jitter(2.0).jittered(failures, random) <= delay);
                        }
                        last = delay;
                    }
                }
            }
        }
        for failures in 12..100 {
            assert_eq!(plain.delay(failures), hour);
        }
        assert!(plain.delay(11) < hour);
    }
}
