//! A cluster in a folder, and its server: a child of this process that listens on a Unix socket only and is ended by its
//! id. PostgreSQL refuses to run as root: then it runs as the user `postgres`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use driver::{Answer, bytes_in};

const LIMIT: Duration = Duration::from_secs(60);

pub struct Cluster {
    server: Child,
    data: PathBuf,
    /// A folder of its own: the path of a socket has to be short.
    place: PathBuf,
    /// The bytes of its databases as it started: most are its catalogs.
    at_first: u64,
}

impl Cluster {
    /// Makes the cluster where there is none yet, and starts its server.
    pub fn start(folder: &Path, synchronous_commit: &str) -> Answer<Cluster> {
        let text = |error: std::io::Error| error.to_string();
        let nanos = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
        let place = std::env::temp_dir().join(format!("peers-pg-{}-{nanos}", std::process::id()));
        let data = folder.join("cluster");
        fs::create_dir_all(&place).map_err(text)?;
        let user = other_user();
        if !data.join("PG_VERSION").exists() {
            fs::create_dir_all(&data).map_err(text)?;
            if let Some((id, group)) = user {
                chown(&data, Some(id), Some(group)).map_err(text)?;
            }
            let mut initdb = command("initdb", user);
            initdb.args(["--auth=trust", "--username=bench", "--encoding=UTF8", "--locale=C", "--pgdata"]).arg(&data);
            let made = initdb.stdin(Stdio::null()).output().map_err(text)?;
            if !made.status.success() {
                return Err(format!("initdb: {}", String::from_utf8_lossy(&made.stderr)));
            }
        }
        if let Some((id, group)) = user {
            chown(&place, Some(id), Some(group)).map_err(text)?;
        }
        fs::set_permissions(&place, fs::Permissions::from_mode(0o700)).map_err(text)?;
        let mut server = command("postgres", user);
        server.arg("-D").arg(&data).arg("-k").arg(&place);
        for setting in
            ["listen_addresses=", "fsync=on", "max_connections=40", &format!("synchronous_commit={synchronous_commit}")]
        {
            server.args(["-c", setting]);
        }
        if let Some(counter) = std::env::var_os("SYNC_SO") {
            server.env("LD_PRELOAD", counter);
        }
        die_with_us(&mut server, libc::SIGINT);
        let server = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(text)?;
        let at_first = bytes_in(&data.join("base"), &|_| true);
        let cluster = Cluster { server, data, place, at_first };
        let began = Instant::now();
        while let Err(error) = postgres::Client::connect(&cluster.address(), postgres::NoTls) {
            if began.elapsed() > LIMIT {
                return Err(format!("the server does not answer: {error}"));
            }
            sleep(Duration::from_millis(20));
        }
        Ok(cluster)
    }

    pub fn address(&self) -> String {
        format!("host={} user=bench dbname=postgres", self.place.display())
    }

    pub fn id(&self) -> u32 {
        self.server.id()
    }

    /// The bytes of its log and of what its databases have grown by.
    pub fn sizes(&self) -> (u64, u64) {
        let all = |_: &str| true;
        let data = bytes_in(&self.data.join("base"), &all);
        (bytes_in(&self.data.join("pg_wal"), &all), data.saturating_sub(self.at_first))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SIGINT is its fast shutdown.
        // SAFETY: the process is our child and has not been waited for.
        unsafe { libc::kill(self.server.id() as i32, libc::SIGINT) };
        let _ = self.server.wait();
        let _ = fs::remove_dir_all(&self.place);
    }
}

/// One of its programs: from Debian's folder of the newest version, else from the path.
fn command(program: &str, user: Option<(u32, u32)>) -> Command {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions.map(|version| version.path().join("bin").join(program)).filter(|path| path.exists()).max();
    let mut command = Command::new(newest.unwrap_or_else(|| program.into()));
    if let Some((id, group)) = user {
        command.uid(id).gid(group).current_dir("/");
    }
    command
}

/// Sends it this signal when our process ends before it has ended the server.
fn die_with_us(command: &mut Command, signal: i32) {
    // SAFETY: between fork and exec it makes one system call.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, signal);
            Ok(())
        })
    };
}

/// Whom to run as when we are root.
fn other_user() -> Option<(u32, u32)> {
    // SAFETY: these calls take and give numbers, or a pointer to static memory that is read at once.
    unsafe {
        if libc::geteuid() != 0 {
            return None;
        }
        let entry = libc::getpwnam(c"postgres".as_ptr()).as_ref()?;
        Some((entry.pw_uid, entry.pw_gid))
    }
}
