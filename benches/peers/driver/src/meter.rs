//! What a measurement cost: processor time of the contender, of others meanwhile, and fsyncs.

use std::fs;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::contender::Peer;
use crate::knobs::knobs;
use crate::syncs::syncs;

pub struct Meter {
    began: Instant,
    busy: f64,
    own: f64,
    syncs: u64,
    server: Option<u32>,
}

pub struct Cost {
    /// Microseconds of processor time for each message.
    pub cpu: f64,
    /// How much of all processors others used, in percent.
    pub others: f64,
    pub syncs: f64,
}

impl Meter {
    /// Waits until the disk has caught up and others are quiet, then begins.
    pub fn start(peer: &dyn Peer) -> Meter {
        settle_disk();
        let server = peer.server();
        let waited = Instant::now();
        while waited.elapsed() < knobs().quiet {
            let (busy, own, began) = (busy(), own(server), Instant::now());
            sleep(Duration::from_millis(250));
            if (self::busy() - busy - (self::own(server) - own)) / began.elapsed().as_secs_f64() < 0.25 {
                break;
            }
        }
        Meter { began: Instant::now(), busy: busy(), own: own(server), syncs: syncs(), server }
    }

    pub fn stop(&self, messages: u64) -> Cost {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get()) as f64;
        let wall = self.began.elapsed().as_secs_f64();
        let own = own(self.server) - self.own;
        let messages = messages.max(1) as f64;
        Cost {
            cpu: own * 1e6 / messages,
            others: ((busy() - self.busy - own) / (processors * wall) * 100.0).max(0.0),
            syncs: (syncs() - self.syncs) as f64 / messages,
        }
    }
}

/// Lets what earlier measurements left behind reach the disk.
pub fn settle_disk() {
    let out = &knobs().out;
    fs::create_dir_all(out).expect("the run's folder can be made");
    let folder = fs::File::open(out).expect("the run's folder can be opened");
    // SAFETY: the descriptor is open.
    unsafe { libc::syncfs(folder.as_raw_fd()) };
}

/// Seconds that all processors have worked so far.
fn busy() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = stat.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = first.split_whitespace().skip(1).filter_map(|tick| tick.parse().ok()).collect();
    // User, nice, system, then interrupts and steal; idle and waiting left out.
    [0, 1, 2, 5, 6, 7].iter().filter_map(|&i| ticks.get(i)).sum::<f64>() / ticks_per_second()
}

/// Seconds of this process and its server.
fn own(server: Option<u32>) -> f64 {
    // SAFETY: all zeroes is a valid rusage, and the pointer is to a live one.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime) + server.map_or(0.0, family)
}

/// Seconds of a process, its ended children and its living ones.
fn family(server: u32) -> f64 {
    let Ok(processes) = fs::read_dir("/proc") else { return 0.0 };
    let mut ticks = 0.0;
    for process in processes.flatten() {
        let Some(id) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // The name, in brackets, may have spaces; the parent is the second field after it.
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        let field = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        if id == server {
            ticks += field(11) + field(12) + field(13) + field(14);
        } else if field(1) as u32 == server {
            ticks += field(11) + field(12);
        }
    }
    ticks / ticks_per_second()
}

fn ticks_per_second() -> f64 {
    // SAFETY: the call takes a number and no pointer.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) as f64 }
}
