//! What a message costs inside SQLite: the statements that run on its way, and the steps of SQLite's machine that each takes.
//! Only a test: `COSTS` is what the code as it is takes, so that no change makes it more unseen.
//!
//! The steps depend on the version of SQLite, so they are those of the one that is compiled in.

use std::cell::RefCell;
use std::collections::HashMap;

use rusqlite::StatementStatus;
use rusqlite::trace::{TraceEvent, TraceEventCodes};

use crate::claim::Claim;
use crate::sql::settle::Settle;
use crate::store::Store;
use crate::worker::Worker;

/// A statement, how often it runs, and the steps of all its runs together.
type Line<'a> = (&'a str, u32, u32);

/// Of each operation, its statements in the order in which they first run. The statements are exact, the steps the most that
/// they may take. When a change is meant, the failing test prints this table anew.
const COSTS: &[(&str, &[Line<'_>])] = &[];
