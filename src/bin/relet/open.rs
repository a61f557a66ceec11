//! Which store a command works on, and how it opens it.

use std::io::ErrorKind;
use std::path::Path;

use relet::{Options, Store};

use crate::args::{Durability, Global};
use crate::exit::{Failure, Outcome};

impl Global {
    /// The store's options, as the command line sets them.
    pub(crate) fn options(&self) -> Options {
        let durability = match self.durability {
            Durability::Full => relet::Durability::Full,
            Durability::Normal => relet::Durability::Normal,
        };
        Store::options()
            .durability(durability)
            .busy_wait(self.busy_wait)
            .retention(self.retention)
            .allow_old_sqlite(self.allow_old_sqlite)
    }

    /// Opens the store for writing, and creates it where there is none.
    pub(crate) fn create(&self) -> Outcome<Store> {
        Ok(self.options().open(self.file()?)?)
    }

    /// Opens a store that is there for writing: a slip in the file's name makes no file, and no tables in a file that is
    /// something else.
    pub(crate) fn existing(&self) -> Outcome<Store> {
        drop(self.look()?);
        self.create()
    }

    /// Opens a store that is there for looking only.
    pub(crate) fn look(&self) -> Outcome<Store> {
        let path = self.file()?;
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(Failure::nothing(format!(
                "there is no store at {}; check -d and RELET_DB, or create it with `relet enqueue`",
                path.display()
            ))),
            _ => Ok(self.options().open_read_only(path)?),
        }
    }

    /// Repairs a store, which may be too damaged to be opened.
    pub(crate) fn repair(&self) -> Outcome<relet::Repaired> {
        Ok(self.options().repair(self.file()?)?)
    }

    pub(crate) fn file(&self) -> Outcome<&Path> {
        match &self.db {
            Some(path) if !path.is_empty() => Ok(Path::new(path)),
            _ => Err(Failure::usage("no store is named; say -d FILE, or set RELET_DB to it")),
        }
    }
}
