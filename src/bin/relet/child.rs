//! The child: a command that works on one message, from its start to its end.
//!
//! One thread does it all, woken by whatever comes first: the child takes more of its stdin, has written something, has
//! ended, or is to end. So a child that reads nothing, writes nothing, or leaves others running that keep its pipes open,
//! holds nobody up.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use relet::{CancelReason, Claim};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::tail::Tail;
use crate::time::Stopwatch;
use crate::voice::{Stream, Voice};

/// Bytes that are read at once.
const READ: usize = 64 << 10;
/// Bytes that are still read of a child that has ended: more than a pipe holds by default.
const REST: usize = 1 << 20;

/// How a child has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// Why it had been told to end, if it was.
    pub(crate) told: Option<CancelReason>,
    /// The last lines of its stderr.
    pub(crate) tail: String,
}

/// The children that run, so that all of them can be killed at once.
#[derive(Debug, Default)]
pub(crate) struct Children(Mutex<Running>);

#[derive(Debug, Default)]
struct Running {
    groups: Vec<Pid>,
    over: bool,
}

impl Children {
    /// Kills all of them, and those that are started from now on.
    pub(crate) fn kill(&self) {
        let mut running = self.0.lock();
        running.over = true;
        running.groups.iter().for_each(|group| signal(*group, Signal::KILL));
    }

    fn add(&self, group: Pid) {
        let mut running = self.0.lock();
        running.groups.push(group);
        if running.over {
            signal(group, Signal::KILL);
        }
    }

    /// To be called before the child is reaped: from then on its id may be another's.
    fn remove(&self, group: Pid) {
        self.0.lock().groups.retain(|other| *other != group);
    }
}

/// Runs a command with the claim's payload on its stdin, in a process group of its own. When the claim's token is set, the
/// group gets SIGTERM, and after the grace SIGKILL.
///
/// # Errors
/// Where it could not be started.
pub(crate) fn run(
    mut command: Command,
    claim: &Claim,
    grace: Duration,
    children: &Children,
    voice: &Voice,
) -> io::Result<Ended> {
    let (woken, bell) = io::pipe()?;
    let cancelled = bell.try_clone()?;
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn()?;
    let group = Pid::from_child(&child);
    children.add(group);
    let exited = Arc::new(AtomicBool::new(false));
    let seen = exited.clone();
    let waiter = std::thread::Builder::new().name("relet-waiter".into()).spawn(move || {
        // It stays a zombie until it is reaped below, so that its id can be no other's when it is signalled.
        while waitid(WaitId::Pid(group), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).is_err_and(is_interruption) {}
        seen.store(true, Ordering::Release);
        ring(&bell);
    });
    claim.cancel_token().on_set(move |_| ring(&cancelled));
    let waiter = match waiter {
        Ok(waiter) => waiter,
        Err(error) => {
            signal(group, Signal::KILL);
            children.remove(group);
            child.wait()?;
            return Err(error);
        }
    };
    let mut attended = Attended::new(&mut child, claim.payload(), woken, voice);
    let mut told = None;
    let mut kill_after: Option<Stopwatch> = None;
    while !exited.load(Ordering::Acquire) {
        if told.is_none() {
            told = claim.cancel_token().reason();
            if told.is_some() {
                signal(group, Signal::TERM);
                signal(group, Signal::CONT); // one that is stopped would not hear of it
                kill_after = Some(Stopwatch::start());
            }
        }
        let left = match kill_after.map(|watch| watch.left(grace)) {
            Some(None) => {
                signal(group, Signal::KILL);
                kill_after = None;
                None
            }
            left => left.flatten(),
        };
        attended.attend(left);
    }
    let tail = attended.end();
    if told.is_some() {
        signal(group, Signal::KILL); // what it has left running: the message may be another's at once
    }
    children.remove(group);
    let status = child.wait()?;
    let _ = waiter.join();
    Ok(Ended { status, told, tail })
}

fn signal(group: Pid, signal: Signal) {
    let _ = kill_process_group(group, signal); // where it is gone already, that is what was wanted
}

fn ring(mut bell: &PipeWriter) {
    let _ = bell.write_all(&[0]);
}

fn is_interruption(error: rustix::io::Errno) -> bool {
    error == rustix::io::Errno::INTR
}

/// A child's streams.
struct Attended<'a> {
    /// `None`: it has got everything, or wants no more.
    stdin: Option<File>,
    payload: &'a [u8],
    stdout: Source,
    stderr: Source,
    tail: Tail,
    woken: PipeReader,
    voice: &'a Voice,
    buffer: Vec<u8>,
}

/// What a child writes. `None`: there will be no more.
struct Source {
    pipe: Option<File>,
    stream: Stream,
}

impl<'a> Attended<'a> {
    fn new(child: &mut Child, payload: &'a [u8], woken: PipeReader, voice: &'a Voice) -> Attended<'a> {
        Attended {
            stdin: child.stdin.take().map(|pipe| unblocked(pipe.into())),
            payload,
            stdout: Source { pipe: child.stdout.take().map(|pipe| unblocked(pipe.into())), stream: voice.stdout() },
            stderr: Source { pipe: child.stderr.take().map(|pipe| unblocked(pipe.into())), stream: voice.stderr() },
            tail: Tail::default(),
            woken,
            voice,
            buffer: vec![0; READ],
        }
    }

    /// Waits for one of them, or for the bell, and does what can be done then.
    fn attend(&mut self, limit: Option<Duration>) {
        if self.payload.is_empty() {
            self.stdin = None;
        }
        let pipes = [self.stdout.pipe.as_ref(), self.stderr.pipe.as_ref()];
        let mut waits = vec![PollFd::new(&self.woken, PollFlags::IN)];
        waits.extend(pipes.into_iter().flatten().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        waits.extend(self.stdin.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::OUT)));
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        if poll(&mut waits, limit.as_ref()).is_err_and(|error| !is_interruption(error)) {
            // The system is short of memory: better slowly than not at all.
            std::thread::sleep(Duration::from_millis(20));
        }
        let is_rung = !waits[0].revents().is_empty();
        if is_rung {
            let _ = self.woken.read(&mut self.buffer);
        }
        self.stdout.take(&mut self.buffer, self.voice, None);
        self.stderr.take(&mut self.buffer, self.voice, Some(&mut self.tail));
        self.feed();
    }

    fn feed(&mut self) {
        let Some(pipe) = &mut self.stdin else { return };
        match pipe.write(self.payload) {
            Ok(written) => self.payload = &self.payload[written..],
            Err(error) if is_for_later(&error) => {}
            Err(_) => self.stdin = None, // It reads no more. That is its right.
        }
    }

    /// Takes what is still in the pipes, and lets go of them. Returns the last lines of stderr.
    fn end(mut self) -> String {
        for _ in 0..REST / READ {
            let more = self.stdout.take(&mut self.buffer, self.voice, None);
            if !self.stderr.take(&mut self.buffer, self.voice, Some(&mut self.tail)) && !more {
                break;
            }
        }
        self.voice.finish(self.stdout.stream);
        self.voice.finish(self.stderr.stream);
        self.tail.text()
    }
}

impl Source {
    /// Takes what is there now. Returns whether there was something.
    fn take(&mut self, buffer: &mut [u8], voice: &Voice, tail: Option<&mut Tail>) -> bool {
        let Some(pipe) = &mut self.pipe else { return false };
        match pipe.read(buffer) {
            Ok(read) if read > 0 => {
                voice.pass_on(&mut self.stream, &buffer[..read]);
                tail.into_iter().for_each(|tail| tail.push(&buffer[..read]));
                true
            }
            Err(error) if is_for_later(&error) => false,
            _ => {
                self.pipe = None;
                false
            }
        }
    }
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Our end of a pipe, which is never waited for.
fn unblocked(pipe: OwnedFd) -> File {
    let _ = rustix::io::ioctl_fionbio(&pipe, true);
    pipe.into()
}
