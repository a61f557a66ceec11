//! The cancel token: how a handler that is at work is told to end early.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::clock::Stopwatch;

/// Tells a handler that it should end early, and why. Cheap to clone; all clones are one token, for all threads.
///
/// Nothing is forced: a handler that does not look goes on. A token is set once, by the [`Workers`](crate::Workers) that run
/// the handler; the claims of a loop written by hand have one that is never set.
///
/// ```
/// use std::time::Duration;
/// use relet::{CancelToken, Claim, Outcome};
///
/// fn handle(claim: &Claim) -> Outcome {
///     while !done() {
///         if claim.cancel_token().wait(Duration::from_millis(100)) {
///             return Outcome::Release; // somebody else goes on with it
///         }
///     }
///     Outcome::Ack
/// }
/// # fn done() -> bool { true }
/// # let _ = (handle, CancelToken::default());
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancelToken {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    reason: Option<CancelReason>,
    hooks: Vec<Hook>,
}

type Hook = Box<dyn Fn(CancelReason) + Send>;

/// Why a handler should end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// It has been at work for longer than its time limit. Its claim still holds.
    TimeLimit,
    /// Its claim is lost: the message was cancelled, or taken back, or the handler has settled it itself. What it returns will
    /// change nothing.
    Lost,
    /// The workers are being stopped. A failure that it returns from now on counts as an interruption, and costs no attempt.
    Stopping,
}

impl CancelToken {
    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.reason().is_some()
    }

    /// Why it is set; `None` unless it is.
    pub fn reason(&self) -> Option<CancelReason> {
        self.shared.state.lock().reason
    }

    /// Calls this when it is set, and at once if it is already; again if a loss is told over another reason. For a handler that
    /// waits for something else: it may ring a bell, send to a channel, notify a task. It is called on the thread that sets
    /// the token, while others wait for that one: it must not block, nor call the token or the workers.
    ///
    /// ```
    /// use std::sync::mpsc::channel;
    /// use relet::{Claim, Outcome};
    ///
    /// enum Event { Answer(u16), Cancelled }
    ///
    /// fn handle(claim: &Claim) -> Outcome {
    ///     let (events, heard) = channel();
    ///     let cancelled = events.clone();
    ///     claim.cancel_token().on_set(move |_| drop(cancelled.send(Event::Cancelled)));
    ///     std::thread::spawn(move || events.send(Event::Answer(200)));
    ///     match heard.recv() {
    ///         Ok(Event::Answer(200)) => Outcome::Ack,
    ///         _ => Outcome::Release,
    ///     }
    /// }
    /// # let _ = handle;
    /// ```
    pub fn on_set(&self, hook: impl Fn(CancelReason) + Send + 'static) {
        let mut state = self.shared.state.lock();
        if let Some(reason) = state.reason {
            guarded(|| hook(reason));
        }
        state.hooks.push(Box::new(hook));
    }

    /// Waits until it is set, for at most `limit`. Returns whether it is.
    pub fn wait(&self, limit: Duration) -> bool {
        let watch = Stopwatch::start();
        let mut state = self.shared.state.lock();
        while state.reason.is_none() {
            let left = limit.saturating_sub(watch.elapsed());
            if left.is_zero() {
                return false;
            }
            let _ = self.shared.bell.wait_for(&mut state, left);
        }
        true
    }

    /// Sets it. The first reason stands, but for a loss, which is told over all others.
    pub(crate) fn set(&self, why: CancelReason) {
        let mut state = self.shared.state.lock();
        if state.reason.is_none() || why == CancelReason::Lost && state.reason != Some(why) {
            state.reason = Some(why);
            self.shared.bell.notify_all();
            state.hooks.iter().for_each(|hook| guarded(|| hook(why)));
        }
    }
}

/// Runs what an application has handed in, whose panic is not to end a thread of relet's.
pub(crate) fn guarded(hook: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(hook)) {
        std::mem::forget(panic); // It may panic as well when it is dropped.
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("reason", &self.state.lock().reason).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_that_panics_keeps_the_others_from_nothing() {
        let (token, heard) = (CancelToken::default(), Arc::new(Mutex::new(0)));
        token.on_set(|_| panic!("nobody listens"));
        let also = heard.clone();
        token.on_set(move |_| *also.lock() += 1);
        token.set(CancelReason::Stopping);
        token.on_set(|_| panic!("nobody listens"));
        assert_eq!((*heard.lock(), token.reason()), (1, Some(CancelReason::Stopping)));
    }

    #[test]
    fn a_hook_hears_each_reason_once_also_one_from_before() {
        let (token, heard) = (CancelToken::default(), Arc::new(Mutex::new(Vec::new())));
        let hook = |name: &'static str| {
            let heard = heard.clone();
            move |reason| heard.lock().push((name, reason))
        };
        token.on_set(hook("early"));
        token.set(CancelReason::Stopping);
        token.set(CancelReason::TimeLimit);
        token.on_set(hook("late"));
        token.set(CancelReason::Lost);
        token.set(CancelReason::Lost);
        use CancelReason::{Lost, Stopping};
        assert_eq!(*heard.lock(), [("early", Stopping), ("late", Stopping), ("early", Lost), ("late", Lost)]);
    }
}
