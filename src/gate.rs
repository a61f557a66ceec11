//! The gate: a named valve that messages pass.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::{INSTANT_MAX, millis};
use crate::error::Result;
use crate::message::{check_name, check_range};
use crate::sql::gates::{self, Limits, Rate};
use crate::store::Store;
use crate::view::GateView;
use crate::writer::Need;

/// Longest period of a rate: a week.
const PERIOD_MAX_MS: i32 = 7 * 86_400_000;
/// Most messages of a rate in its period, most at once, and most claims at a time.
const COUNT_MAX: i32 = 1_000_000;

/// A named valve in the file, for all processes: an API with a rate limit, a tenant, "online".
///
/// A message names at most one ([`Message::gate`](crate::Message::gate)), or has its queue's. It is asked when the message is
/// handed out, in the same transaction. A closed gate costs the messages of other gates nothing, however many wait behind it.
///
/// * *Closed until*: [`Claim::limited`](crate::Claim::limited), [`Gate::close_for`], [`Gate::close`]. When it opens again,
///   its messages come in their order, and gently: one at a time, then one more for each ack, up to 32.
/// * *Rate* and *concurrency*: [`Gate::limit`]. Both are exact over all processes. A rate runs on the clock of the leases, and
///   after a restart of the machine its bucket starts empty. A slot is freed when its claim is settled, its lease runs out,
///   or its worker dies.
///
/// A gate needs no setting up: one that nobody has limited or closed lets everything pass. Each gate that messages of a queue
/// wait behind costs a claim of that queue some 3 µs.
///
/// ```
/// use std::time::Duration;
/// use relet::{GateLimits, Message, Store};
///
/// let store = Store::open_in_memory()?;
/// store.gate("api").limit(GateLimits::new().concurrency(4).rate(100, Duration::from_secs(60)))?;
/// let calls = store.queue("calls");
/// calls.enqueue_all(["a", "b"].map(|call| Message::new(call).gate("api")))?;
///
/// let worker = store.worker("caller")?;
/// let claim = worker.claim("calls")?.expect("it is open");
/// claim.limited(Duration::from_secs(30))?; // it answered 429
/// assert!(worker.claim("calls")?.is_none(), "the sibling waits, too");
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Gate {
    store: Store,
    name: Arc<str>,
}

/// What a gate lets pass while it is open; everything unless set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use = "limits do nothing until a gate is given them"]
pub struct GateLimits {
    concurrency: Option<u32>,
    rate: Option<(u32, Duration)>,
    burst: Option<u32>,
}

impl GateLimits {
    /// None.
    pub fn new() -> GateLimits {
        GateLimits::default()
    }

    /// At most so many claims at a time; 1 to 1,000,000.
    pub fn concurrency(self, claims: u32) -> GateLimits {
        GateLimits { concurrency: Some(claims), ..self }
    }

    /// A token bucket: so many messages (1 to 1,000,000) per period (1 ms to a week), evenly, each claim counted, also a
    /// repeated one. In any span of the period at most `messages + burst - 1` pass: the rate itself, unless a burst is set.
    pub fn rate(self, messages: u32, period: Duration) -> GateLimits {
        GateLimits { rate: Some((messages, period)), ..self }
    }

    /// How many of them may come at once after a quiet time, 1 to 1,000,000; 1 unless set. Of a rate above one in a
    /// millisecond, as many more as come in one. Does nothing without a rate.
    pub fn burst(self, messages: u32) -> GateLimits {
        GateLimits { burst: Some(messages), ..self }
    }

    fn check(self) -> Result<Limits> {
        let count = |what, count: u32| check_range(what, i64::from(count), 1, COUNT_MAX);
        if let Some(slots) = self.concurrency {
            count("concurrency", slots)?;
        }
        let burst = self.burst.unwrap_or(1);
        count("burst", burst)?;
        let rate = match self.rate {
            Some((messages, period)) => {
                count("rate", messages)?;
                check_range("period in ms", millis(period), 1, PERIOD_MAX_MS)?;
                Some(Rate { count: messages, period_ms: millis(period), burst })
            }
            None => None,
        };
        Ok(Limits { slots: self.concurrency, rate })
    }
}

impl Gate {
    pub(crate) fn new(store: Store, name: &str) -> Gate {
        Gate { store, name: name.into() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Gives it these limits in place of those it had. Whether it is closed does not change.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) and [`Error::Text`](crate::Error::Text) for what no gate can have;
    /// [`Error::Busy`](crate::Error::Busy).
    pub fn limit(&self, limits: GateLimits) -> Result<()> {
        let limits = limits.check()?;
        self.change(move |tx, gate| gates::limit(tx, gate, limits))
    }

    /// Closes it for at least this long from now on. What has passed goes on.
    ///
    /// # Errors
    /// As [`Gate::limit`].
    pub fn close_for(&self, delay: Duration) -> Result<()> {
        self.change(move |tx, gate| gates::close(tx, gate, tx.now.after(delay)))
    }

    /// Closes it until it is opened.
    ///
    /// # Errors
    /// As [`Gate::limit`].
    pub fn close(&self) -> Result<()> {
        self.change(|tx, gate| gates::close(tx, gate, INSTANT_MAX))
    }

    /// Opens it if it is closed; gently, as it would have opened by itself. Its limits stay.
    ///
    /// # Errors
    /// As [`Gate::limit`].
    pub fn open(&self) -> Result<()> {
        self.change(gates::open)
    }

    fn change(&self, change: impl Fn(&crate::sql::Tx<'_>, i64) -> Result<()> + Send + 'static) -> Result<()> {
        check_name("gate", &self.name)?;
        let name = self.name.clone();
        self.store.write(Need::Settle, move |tx| {
            let gate = gates::find_or_make(tx, &name)?;
            change(tx, gate)
        })
    }
}

impl Store {
    /// The gate of this name. Its name is judged when it is used.
    pub fn gate(&self, name: &str) -> Gate {
        Gate::new(self.clone(), name)
    }

    /// Every gate that was ever used, by name.
    ///
    /// # Errors
    /// As [`Store::stats`].
    pub fn gates(&self) -> Result<Vec<GateView>> {
        self.read(gates::all)
    }
}
