//! How a command ends: its exit code, and what is said when it did not do what was asked.

use std::fmt::Display;
use std::io;

use relet::Error;

use crate::time::stamp;

/// The exit codes, in the order of how bad they are: of several outcomes the worst one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Exit {
    /// It is done.
    Done,
    /// Nothing is there: nothing to claim, no such message, no such store.
    Nothing,
    /// The claim was lost, or somebody else holds the message.
    Lost,
    /// `stuck` or `doctor` found something.
    Wrong,
    /// Another process kept the store locked for the whole busy wait.
    Busy,
    /// It failed.
    Failed,
    /// The command line was wrong.
    Usage,
    /// It was told to stop.
    Interrupted,
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::Nothing => 3,
            Exit::Lost => 4,
            Exit::Wrong => 5,
            Exit::Busy => 75,
            Exit::Interrupted => 130,
        }
    }
}

/// Why a command ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Whoever read the output has gone. That is no error, and nobody is there to be told.
    Pipe,
    /// To be said on stderr, with its exit code.
    Told(Exit, String),
    /// What the library said.
    Library(Error),
}

/// The result of a command, and of its steps.
pub(crate) type Outcome<T = Exit> = Result<T, Failure>;

impl Failure {
    pub(crate) fn usage(text: impl Into<String>) -> Failure {
        Failure::Told(Exit::Usage, text.into())
    }

    pub(crate) fn failed(text: impl Into<String>) -> Failure {
        Failure::Told(Exit::Failed, text.into())
    }

    pub(crate) fn nothing(text: impl Into<String>) -> Failure {
        Failure::Told(Exit::Nothing, text.into())
    }

    /// What the library said, and what that means for the command.
    pub(crate) fn with(error: &Error, consequence: impl Display) -> Failure {
        Failure::Told(exit_of(error), format!("{}; {consequence}", describe(error)))
    }

    /// What a write to stdout came to.
    pub(crate) fn output(error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::Pipe,
            _ => Failure::failed(format!("the output cannot be written: {error}")),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
    }
}

/// The exit code that stands for this error.
pub(crate) fn exit_of(error: &Error) -> Exit {
    match error {
        Error::Busy { .. } | Error::Pool { .. } | Error::InUse { .. } => Exit::Busy,
        Error::QueueName { .. } | Error::Text { .. } | Error::Range { .. } | Error::Parse { .. } => Exit::Usage,
        Error::CronPattern { .. } | Error::TimeZone { .. } => Exit::Usage,
        Error::Gone { .. } => Exit::Nothing,
        Error::Stale { .. } | Error::Cancelled { .. } | Error::Superseded { .. } | Error::LabelTaken { .. } => {
            Exit::Lost
        }
        _ => Exit::Failed,
    }
}

/// The library's sentence, with the next step on the command line where the sentence itself names none.
pub(crate) fn describe(error: &Error) -> String {
    // The library tells the instant as a number.
    if let Error::LabelTaken { label, pid, started_at } = error {
        return format!(
            "label {label:?} belongs to a running worker (process {pid}, started at {}) or to a command that it has \
             started; stop it or choose another label",
            stamp(*started_at)
        );
    }
    let next = match error {
        Error::Gone { .. } => "; `relet list` shows what is there",
        Error::Stale { .. } | Error::Cancelled { .. } => "; nothing was changed, drop the work",
        Error::Status { .. } => "; `relet show` tells its history",
        _ => "",
    };
    format!("{error}{next}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_outcomes_the_worst_one_counts() {
        let worst = [Exit::Done, Exit::Lost, Exit::Nothing].into_iter().max();
        assert_eq!(worst.map(Exit::code), Some(4));
        assert!(Exit::Failed > Exit::Busy && Exit::Busy > Exit::Lost && Exit::Nothing > Exit::Done);
    }
}
