//! The server: a child of this process, on a Unix socket, ended by its id.

use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use driver::Answer;

/// How long it may take to read its log and listen.
const LIMIT: Duration = Duration::from_secs(60);

pub struct Server {
    process: Child,
    /// A folder of its own: the path of a socket has to be short.
    place: PathBuf,
}

impl Server {
    pub fn start(log: &Path, sync_every: &str) -> Answer<Server> {
        let nanos = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
        let place = std::env::temp_dir().join(format!("peers-bs-{}-{nanos}", std::process::id()));
        for folder in [log, &place] {
            fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        }
        let mut command = Command::new("beanstalkd");
        command.arg("-l").arg(format!("unix:{}", place.join("s").display()));
        command.arg("-b").arg(log).args(["-f", sync_every, "-z", "2000000"]);
        if let Some(counter) = std::env::var_os("SYNC_SO") {
            command.env("LD_PRELOAD", counter);
        }
        // If our process ends before it has ended the server.
        // SAFETY: between fork and exec it makes one system call.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            })
        };
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(|error| error.to_string())?;
        let server = Server { process, place };
        let began = Instant::now();
        while UnixStream::connect(server.socket()).is_err() {
            if began.elapsed() > LIMIT {
                return Err("the server does not listen".into());
            }
            sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub fn socket(&self) -> PathBuf {
        self.place.join("s")
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn command_line(&self) -> String {
        let words = fs::read(format!("/proc/{}/cmdline", self.id())).unwrap_or_default();
        let words: Vec<String> =
            words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into()).collect();
        let after = |flag: &str| words.iter().skip_while(|word| *word != flag).nth(1).cloned().unwrap_or_default();
        format!("binlog, -f {}", after("-f"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has no orderly end: what is in its log is what a kill leaves.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.place);
    }
}
