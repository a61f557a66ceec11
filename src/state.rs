//! The statuses of a message, and the one table of the changes between them. `schema.sql` draws it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Where a message is in its life.
///
/// ```
/// use relet::Status;
///
/// assert_eq!("pending_local".parse::<Status>()?, Status::PendingLocal);
/// assert!(Status::Queued.is_claimable() && !Status::Dead.is_live());
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Waits to be claimed: the route of a message that names none.
    Pending,
    /// Waits to be claimed: its destination is being decided.
    Routing,
    /// Waits to be claimed: routed to a queue.
    Queued,
    /// Waits to be claimed: to be handled on this device.
    PendingLocal,
    /// Held by a worker, or deferred and kept for it.
    Processing,
    /// Acked, and kept for the store's retention.
    Done,
    /// Given up: a dead letter, kept until it is redriven or purged.
    Dead,
    /// Cancelled.
    Cancelled,
}

/// The status that a message has when nobody holds it; it returns there after a failure, a release or a lost lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// See [`Status::Pending`]. The default.
    #[default]
    Pending,
    /// See [`Status::Routing`].
    Routing,
    /// See [`Status::Queued`].
    Queued,
    /// See [`Status::PendingLocal`].
    PendingLocal,
}

/// What happens to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    Claim,
    Reclaim,
    Reroute,
    Ack,
    Fail,
    Defer,
    Release,
    TakeBack,
    GiveUp,
    Cancel,
    Redrive,
}

/// Where an event leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Route,
    One(Status),
}

const CLAIMABLE: &[Status] = &[Status::Pending, Status::Routing, Status::Queued, Status::PendingLocal];
const HELD: &[Status] = &[Status::Processing];
const LIVE: &[Status] = &[Status::Pending, Status::Routing, Status::Queued, Status::PendingLocal, Status::Processing];

/// The transition table: an event, the statuses it may start from, and where it leads. What is not here cannot happen.
const TRANSITIONS: &[(Event, &[Status], To)] = &[
    (Event::Claim, CLAIMABLE, To::One(Status::Processing)),
    (Event::Reclaim, HELD, To::One(Status::Processing)),
    (Event::Reroute, CLAIMABLE, To::Route),
    (Event::Ack, HELD, To::One(Status::Done)),
    (Event::Fail, HELD, To::Route),
    (Event::Defer, HELD, To::One(Status::Processing)),
    (Event::Release, HELD, To::Route),
    (Event::TakeBack, HELD, To::Route),
    (Event::GiveUp, LIVE, To::One(Status::Dead)),
    (Event::Cancel, LIVE, To::One(Status::Cancelled)),
    (Event::Redrive, &[Status::Dead], To::Route),
];

impl Status {
    /// Every status, in the order of a message's life.
    pub const ALL: [Status; 8] = [
        Status::Pending,
        Status::Routing,
        Status::Queued,
        Status::PendingLocal,
        Status::Processing,
        Status::Done,
        Status::Dead,
        Status::Cancelled,
    ];

    /// The word that the database, the command line and JSON use.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "pending",
            Status::Routing => "routing",
            Status::Queued => "queued",
            Status::PendingLocal => "pending_local",
            Status::Processing => "processing",
            Status::Done => "done",
            Status::Dead => "dead",
            Status::Cancelled => "cancelled",
        }
    }

    /// Whether a message in this status can be claimed by anyone, when it waits for nothing.
    pub fn is_claimable(self) -> bool {
        CLAIMABLE.contains(&self)
    }

    /// Whether the message is not finished.
    pub fn is_live(self) -> bool {
        LIVE.contains(&self)
    }

    /// The status that `event` leads to, or `None` where it cannot happen.
    pub(crate) fn after(self, event: Event, route: Route) -> Option<Status> {
        let (_, _, to) = TRANSITIONS.iter().find(|(e, from, _)| *e == event && from.contains(&self))?;
        Some(match to {
            To::Route => route.into(),
            To::One(status) => *status,
        })
    }
}

impl Route {
    /// Every route.
    pub const ALL: [Route; 4] = [Route::Pending, Route::Routing, Route::Queued, Route::PendingLocal];

    /// The word that the database, the command line and JSON use.
    pub fn as_str(self) -> &'static str {
        Status::from(self).as_str()
    }
}

impl From<Route> for Status {
    fn from(route: Route) -> Status {
        match route {
            Route::Pending => Status::Pending,
            Route::Routing => Status::Routing,
            Route::Queued => Status::Queued,
            Route::PendingLocal => Status::PendingLocal,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Status {
    type Err = Error;

    fn from_str(text: &str) -> Result<Status> {
        Status::ALL.into_iter().find(|status| status.as_str() == text).ok_or_else(|| Error::Parse {
            what: "status",
            value: text.to_owned(),
            expected: "use pending, routing, queued, pending_local, processing, done, dead or cancelled",
        })
    }
}

impl FromStr for Route {
    type Err = Error;

    fn from_str(text: &str) -> Result<Route> {
        Route::ALL.into_iter().find(|route| route.as_str() == text).ok_or_else(|| Error::Parse {
            what: "route",
            value: text.to_owned(),
            expected: "use pending, routing, queued or pending_local",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finished_message_can_only_be_redriven_and_only_from_dead() {
        for status in [Status::Done, Status::Dead, Status::Cancelled] {
            for (event, _, _) in TRANSITIONS {
                let allowed = status == Status::Dead && *event == Event::Redrive;
                assert_eq!(status.after(*event, Route::Queued).is_some(), allowed, "{status} {event:?}");
            }
        }
    }

    #[test]
    fn what_leaves_a_worker_returns_to_its_route() {
        for route in Route::ALL {
            for event in [Event::Fail, Event::Release, Event::TakeBack] {
                assert_eq!(Status::Processing.after(event, route), Some(route.into()));
            }
            assert_eq!(Status::Dead.after(Event::Redrive, route), Some(route.into()));
        }
    }

    #[test]
    fn the_article_s_failure_is_an_edge_of_the_table() {
        assert_eq!(Status::Processing.after(Event::Reclaim, Route::Pending), Some(Status::Processing));
        assert_eq!(Status::Processing.after(Event::Claim, Route::Pending), None);
    }

    #[test]
    fn words_read_back() {
        for status in Status::ALL {
            assert_eq!(status.as_str().parse::<Status>().unwrap(), status);
        }
        assert!("Pending".parse::<Status>().is_err());
    }
}
