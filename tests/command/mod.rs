//! What the tests of the command line share: a folder with a store in it, and the program as it is run there.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use relet::Store;
use serde_json::Value;

/// How long a test waits for something that is bound to come, before it calls that a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A folder of its own for a test, with a store in it that is made when it is first needed.
pub struct Place {
    pub folder: PathBuf,
}

impl Place {
    pub fn new() -> Place {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("relet-cli-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        Place { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn db(&self) -> PathBuf {
        self.path("queue.db")
    }

    pub fn store(&self) -> Store {
        Store::open(self.db()).unwrap()
    }

    pub fn files(&self) -> Vec<OsString> {
        let mut files: Vec<_> =
            std::fs::read_dir(&self.folder).unwrap().map(|file| file.unwrap().file_name()).collect();
        files.sort();
        files
    }

    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = relet(args);
        command.arg("-d").arg(self.db());
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ran {
        run(self.command(args), b"")
    }

    pub fn run_with<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>, stdin: &[u8]) -> Ran {
        run(self.command(args), stdin)
    }

    /// Runs a line of words that have no spaces in them, and expects it to succeed.
    pub fn ok(&self, line: &str) -> Ran {
        let ran = self.run(line.split_whitespace());
        assert_eq!(ran.code, 0, "{line}: {}", ran.err);
        ran
    }

    /// Runs a line of words, and expects this exit code and something said about it.
    pub fn fails(&self, line: &str, code: i32) -> Ran {
        let ran = self.run(line.split_whitespace());
        assert_eq!(ran.code, code, "{line}: {} {}", ran.text(), ran.err);
        assert!(ran.err.starts_with("relet: "), "{line}: {:?}", ran.err);
        ran
    }

    /// The message as `show --json` has it.
    pub fn show(&self, id: i64) -> Value {
        self.ok(&format!("show {id} --json")).json().remove(0)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// What a command came to.
pub struct Ran {
    pub code: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl Ran {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    pub fn line(&self) -> &str {
        let mut lines = self.text().lines();
        let line = lines.next().expect("a line on stdout");
        assert_eq!(lines.next(), None);
        line
    }

    pub fn json(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"))).collect()
    }
}

pub fn relet<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_relet"));
    command.args(args).env_remove("RELET_DB").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn run(mut command: Command, stdin: &[u8]) -> Ran {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        // A command that reads no stdin may be gone before all is written; that is its right.
        scope.spawn(move || drop(pipe.write_all(stdin)));
        child.wait_with_output().unwrap()
    });
    let code = output.status.code().expect("it ended by itself, not by a signal");
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!err.contains("panicked"), "{err}");
    Ran { code, out: output.stdout, err }
}

/// A stdout that nobody reads any more.
pub fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// The lines of a stream as they come, so that a test can wait for one.
pub fn lines_of(stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines() {
            if sender.send(line.unwrap()).is_err() {
                break;
            }
        }
    });
    receiver
}

pub fn end(mut child: Child) -> i32 {
    drop(child.stdin.take());
    child.wait().unwrap().code().unwrap()
}
