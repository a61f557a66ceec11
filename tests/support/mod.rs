//! What tests with files and processes need: a folder that is removed again, and children that play a role.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use relet::rusqlite::Connection;

/// How long a test waits for what must come, so that a failure ends.
pub const LONG: Duration = Duration::from_secs(30);

pub fn hear<T>(from: &Receiver<T>) -> T {
    from.recv_timeout(LONG).expect("it comes")
}

/// Looks again and again until it is so.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..LONG.as_millis() {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it never comes: {what}");
}

/// A folder of its own for one test, removed at its end.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new(name: &str) -> Dir {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("relet-{name}-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path.canonicalize().unwrap())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }

    /// A folder in it.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // A folder that a test made read-only is emptied, too.
        for entry in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                chmod(&entry.path(), 0o755);
            }
        }
        let removed = std::fs::remove_dir_all(&self.0);
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

/// The names of what lies in a folder, sorted.
pub fn names(folder: &Path) -> Vec<OsString> {
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

pub fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

pub fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// A file that SQLite keeps beside the database.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A plain connection, as any other program would have one.
pub fn plain(path: &Path) -> Connection {
    let conn = Connection::open(path).unwrap();
    conn.busy_timeout(Duration::from_secs(20)).unwrap();
    conn
}

/// One number from the database.
pub fn number(conn: &Connection, sql: &str) -> i64 {
    conn.query_row(sql, [], |row| row.get(0)).unwrap()
}

/// One text from the database.
pub fn text(conn: &Connection, sql: &str) -> String {
    conn.query_row(sql, [], |row| row.get(0)).unwrap()
}

/// Every row of a query, its values written out: for "this row is untouched".
pub fn rows(conn: &Connection, sql: &str) -> Vec<String> {
    let mut statement = conn.prepare(sql).unwrap();
    let columns = statement.column_count();
    let rows = statement.query_map([], |row| {
        (0..columns).map(|at| Ok(format!("{:?}", row.get_ref(at)?))).collect::<Result<Vec<_>, _>>()
    });
    rows.unwrap().map(|row| row.unwrap().join(" | ")).collect()
}

/// How long something took. For generous bounds on waits alone.
#[allow(clippy::disallowed_methods, reason = "a test measures a wait from outside of the library")]
pub fn timed<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let value = what();
    (value, start.elapsed())
}

const ROLE: &str = "RELET_TEST_ROLE";
const ARGS: &str = "RELET_TEST_ARGS";
const ARG_END: char = '\u{1f}';
/// Begins what a child says, so that the test harness's own lines are not taken for it.
const SAYS: char = '\u{1}';

/// What a child process was told to do. Only a child has one: see [`Child`].
pub struct Part {
    pub args: Vec<String>,
}

/// The part of this process, if it was started to play this role.
pub fn part(role: &str) -> Option<Part> {
    if std::env::var(ROLE).ok().as_deref() != Some(role) {
        return None;
    }
    let args = std::env::var(ARGS).unwrap_or_default();
    Some(Part { args: args.split(ARG_END).map(str::to_owned).collect() })
}

impl Part {
    pub fn path(&self) -> &Path {
        Path::new(&self.args[0])
    }

    /// Tells the parent a line.
    pub fn say(&self, line: impl std::fmt::Display) {
        let mut out = std::io::stdout().lock();
        out.write_all(format!("{SAYS}{line}\n").as_bytes()).and_then(|()| out.flush()).expect("the parent listens");
    }

    /// Waits for a line of the parent's; `None` when it has closed the pipe.
    pub fn hear(&self) -> Option<String> {
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line).unwrap() {
            0 => None,
            _ => Some(line.trim_end().to_owned()),
        }
    }
}

/// This test binary, run once more to play a role: a test that is ignored otherwise. Killed when it is dropped.
pub struct Child {
    process: std::process::Child,
    lines: BufReader<ChildStdout>,
    input: Option<ChildStdin>,
}

impl Child {
    pub fn start(role: &str, args: &[&str]) -> Child {
        Child::start_with(role, args, |_| ())
    }

    pub fn start_with(role: &str, args: &[&str], set: impl FnOnce(&mut Command)) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        set(&mut command);
        let mut process = command
            .args(["--exact", role, "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(ARGS, args.join(&ARG_END.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (lines, input) = (BufReader::new(process.stdout.take().unwrap()), process.stdin.take());
        Child { process, lines, input }
    }

    /// As a user to whom permissions apply: another one if this is root.
    pub fn start_as_nobody(role: &str, args: &[&str], dir: &Dir) -> Child {
        const NOBODY: u32 = 65_534;
        if std::fs::metadata(dir.path()).unwrap().uid() != 0 {
            return Child::start(role, args);
        }
        Child::start_with(role, args, |command| {
            let exe = std::env::current_exe().unwrap();
            if mode(&exe) & 0o5 != 0o5 || exe.ancestors().skip(1).any(|folder| mode(folder) & 0o1 == 0) {
                // It lies where only root can reach it.
                let copy = dir.join("test-binary");
                std::fs::copy(exe, &copy).unwrap();
                chmod(&copy, 0o755);
                *command = Command::new(copy);
            }
            command.uid(NOBODY).gid(NOBODY).current_dir("/");
        })
    }

    /// Waits for the next line that the child says; `None` when it has ended.
    pub fn hear(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some((_, said)) = line.split_once(SAYS) {
                // A line that was cut off by a kill was not said.
                return said.strip_suffix('\n').map(str::to_owned);
            }
        }
    }

    /// Waits for this very line.
    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.hear().as_deref(), Some(line));
    }

    pub fn say(&mut self, line: impl std::fmt::Display) {
        let input = self.input.as_mut().unwrap();
        input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush()).unwrap();
    }

    /// Closes its input: it hears nothing more.
    pub fn close(&mut self) {
        self.input = None;
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// SIGSTOP: from its return on, none of its threads does anything.
    pub fn stop(&self) {
        self.signal("STOP");
        while !self.is_stopped() {
            std::thread::yield_now();
        }
    }

    /// SIGCONT.
    pub fn go_on(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.pid());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success(), "{kill}");
    }

    fn is_stopped(&self) -> bool {
        let pid = self.pid().to_string();
        match std::fs::read_dir(format!("/proc/{pid}/task")) {
            // One that has just ended has no file any more, or is a zombie.
            Ok(mut threads) => threads.all(|thread| {
                let stat = std::fs::read_to_string(thread.unwrap().path().join("stat"));
                stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with(['T', 'Z', 'X']))
            }),
            Err(_) => Command::new("ps").args(["-o", "stat=", "-p", &pid]).output().unwrap().stdout.starts_with(b"T"),
        }
    }

    /// SIGKILL. What it has said before can still be heard.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Closes its input, waits for its end, and passes on whether it failed.
    pub fn finish(mut self) -> Vec<String> {
        self.input = None;
        let said = std::iter::from_fn(|| self.hear()).collect();
        assert!(self.process.wait().unwrap().success(), "the child failed; see its output");
        said
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
