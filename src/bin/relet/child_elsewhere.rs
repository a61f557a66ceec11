//! The child where there is no Unix: see child.rs for what it is and does.
//!
//! Its streams have a thread each, and it is killed at once where it is to end. What it leaves running, and keeps its pipes open,
//! does hold the message up here.

use std::io::{self, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use relet::{CancelReason, Claim};

use crate::tail::Tail;
use crate::voice::{Stream, Voice};

/// How often it is looked at whether a child has ended.
const LOOK: Duration = Duration::from_millis(10);
const READ: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) told: Option<CancelReason>,
    pub(crate) tail: String,
}

#[derive(Debug, Default)]
pub(crate) struct Children(AtomicBool);

impl Children {
    pub(crate) fn kill(&self) {
        self.0.store(true, Ordering::Release);
    }
}

pub(crate) fn run(
    mut command: Command,
    claim: &Claim,
    _grace: Duration,
    children: &Children,
    voice: &Voice,
) -> io::Result<Ended> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let mut tail = Tail::default();
    std::thread::scope(|scope| {
        // It may read no more. That is its right.
        scope.spawn(|| stdin.map(|mut pipe| pipe.write_all(claim.payload())));
        scope.spawn(|| pass_on(stdout, voice, voice.stdout(), |_| ()));
        scope.spawn(|| pass_on(stderr, voice, voice.stderr(), |bytes| tail.push(bytes)));
        let mut told = None;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok((status, told));
            }
            match told {
                Some(_) => std::thread::sleep(LOOK),
                None if claim.cancel_token().wait(LOOK) => told = claim.cancel_token().reason(),
                None => {}
            }
            if told.is_some() || children.0.load(Ordering::Acquire) {
                let _ = child.kill();
            }
        }
    })
    .map(|(status, told)| Ended { status, told, tail: tail.text() })
}

fn pass_on(pipe: Option<impl Read>, voice: &Voice, mut stream: Stream, mut also: impl FnMut(&[u8])) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = vec![0; READ];
    while let Ok(read @ 1..) = pipe.read(&mut buffer) {
        voice.pass_on(&mut stream, &buffer[..read]);
        also(&buffer[..read]);
    }
    voice.finish(stream);
}
