//! The outcome: what a handler makes of a message.

use std::fmt::Display;
use std::time::Duration;

use crate::sql::settle::Settle;

/// What a handler makes of a message. The claim is settled so, in one commit with the next claim.
///
/// A handler may also return what turns into one: nothing is an ack, `Ok` is what it holds, and an `Err` is a failure.
///
/// ```
/// use std::time::Duration;
/// use relet::{Claim, Outcome};
///
/// fn call(claim: &Claim) -> Result<Outcome, std::io::Error> {
///     let answer = post(claim.payload())?; // an error: the message is tried again after its backoff
///     Ok(match answer {
///         200 => Outcome::Ack,
///         429 => Outcome::Limited { retry_after: Duration::from_secs(30) },
///         400 => Outcome::reject("the server does not understand it"),
///         other => Outcome::fail(format!("the server answered {other}")),
///     })
/// }
/// # fn post(_: &[u8]) -> std::io::Result<u16> { Ok(200) }
/// # let _ = call;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "an outcome settles nothing until it is returned by a handler"]
pub enum Outcome {
    /// See [`Claim::ack`](crate::Claim::ack).
    Ack,
    /// See [`Claim::fail`](crate::Claim::fail), and with a delay [`Claim::fail_for`](crate::Claim::fail_for).
    Fail {
        /// Why.
        error: String,
        /// The wait before the next try; `None`: the backoff policy.
        retry_in: Option<Duration>,
    },
    /// See [`Claim::reject`](crate::Claim::reject).
    Reject {
        /// Why.
        error: String,
    },
    /// See [`Claim::defer_because`](crate::Claim::defer_because).
    Defer {
        /// How long to wait.
        delay: Duration,
        /// Why.
        reason: String,
    },
    /// See [`Claim::limited`](crate::Claim::limited).
    Limited {
        /// How long to wait.
        retry_after: Duration,
    },
    /// See [`Claim::release`](crate::Claim::release).
    Release,
    /// The handler has settled the claim itself, for example by [`Claim::ack_in`](crate::Claim::ack_in).
    Settled,
}

impl Outcome {
    /// A failure with this error, tried again after its backoff.
    pub fn fail(error: impl Display) -> Outcome {
        Outcome::Fail { error: error.to_string(), retry_in: None }
    }

    /// A rejection with this error.
    pub fn reject(error: impl Display) -> Outcome {
        Outcome::Reject { error: error.to_string() }
    }

    /// `None`: it is settled already.
    pub(crate) fn settle(&self) -> Option<Settle> {
        Some(match self.clone() {
            Outcome::Ack => Settle::Ack,
            Outcome::Fail { error, retry_in } => Settle::Fail { error, retry_in },
            Outcome::Reject { error } => Settle::Reject { error },
            Outcome::Defer { delay, reason } => Settle::Defer { delay, reason },
            Outcome::Limited { retry_after } => Settle::Limited { retry_after },
            Outcome::Release => Settle::Release,
            Outcome::Settled => return None,
        })
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Outcome {
        Outcome::Ack
    }
}

impl<T: Into<Outcome>, E: Display> From<Result<T, E>> for Outcome {
    /// An error with its causes, where it shows them (`{:#}`).
    fn from(result: Result<T, E>) -> Outcome {
        match result {
            Ok(outcome) => outcome.into(),
            Err(error) => Outcome::fail(format!("{error:#}")),
        }
    }
}
