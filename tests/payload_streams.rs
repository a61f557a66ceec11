//! A payload is streamed in and out: exactly what was given, or nothing at all, and nobody is held up meanwhile.
#![cfg(feature = "testing")]

mod common;

use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Folder, HOUR, SECOND, memory, memory_with, next, row, sound};
use relet::rusqlite::Connection;
use relet::{Claim, Clock, Durability, Error, Filter, Message, Status, Store, Worker};

const MIB: usize = 1 << 20;

/// `size` bytes that no shift or cut leaves equal.
fn bytes(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + at / 251) as u8).collect()
}

fn read_whole(claim: &Claim) -> Vec<u8> {
    let mut whole = Vec::new();
    claim.payload_reader().unwrap().read_to_end(&mut whole).unwrap();
    whole
}

/// The next claim, with its payload left in the file where that is large.
fn next_left(worker: &Worker) -> Claim {
    worker.claim_without_payload("q").unwrap().expect("something can be claimed")
}

/// Gives what it has in pieces of this size, and interrupts itself before each.
struct Slowly(Vec<u8>, usize, bool);

impl Read for Slowly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.2 = !self.2;
        if self.2 {
            return Err(ErrorKind::Interrupted.into());
        }
        let piece = self.1.min(buffer.len()).min(self.0.len());
        buffer[..piece].copy_from_slice(&self.0[..piece]);
        self.0.drain(..piece);
        Ok(piece)
    }
}

#[test]
fn a_stream_of_any_size_goes_in_and_comes_out_as_it_was() {
    let folder = Folder::new();
    let file = Store::options().durability(Durability::Normal).open(folder.file()).unwrap();
    for store in [memory().0, file] {
        let (queue, worker) = (store.queue("q"), store.worker("w").unwrap());
        let edges =
            [0, 2048, 64 << 10, 128 << 10, 256 << 10, MIB].map(|edge: usize| [edge.saturating_sub(1), edge, edge + 1]);
        // The last one exceeds SQLite's cache, and is read in pieces larger than the smallest.
        for size in edges.into_iter().flatten().chain([10 * MIB + 7]) {
            let payload = bytes(size);
            queue.enqueue_from("", Cursor::new(&payload)).unwrap();
            queue.enqueue_from("instead of this", &payload[..]).unwrap();
            queue.enqueue(payload.clone()).unwrap();
            sound(&store);
            let claim = next(&worker, "q");
            assert!(claim.payload() == payload && claim.payload_bytes() == size && read_whole(&claim) == payload);
            claim.ack().unwrap();
            for _ in 0..2 {
                let claim = next_left(&worker);
                let small = size <= 2048;
                assert!(claim.payload() == if small { &payload[..] } else { &[] }, "{size}");
                let mut reader = claim.payload_reader().unwrap();
                assert_eq!((claim.payload_bytes(), reader.len(), reader.is_empty()), (size, size, size == 0));
                let mut out = Vec::new();
                assert_eq!(claim.write_payload_to(&mut out).unwrap(), size as u64);
                assert!(out == payload && read_whole(&claim) == payload, "{size}");
                let mut first = [0; 3];
                let read = reader.read(&mut first).unwrap();
                assert_eq!(first[..read], payload[..size.min(3)]);
                claim.ack().unwrap();
            }
            assert_eq!(store.list(&Filter::new()).unwrap().len(), 0);
        }
        sound(&store);
    }
}

#[test]
fn a_stream_may_give_little_at_a_time_and_be_interrupted() {
    let (store, _) = memory();
    let (queue, worker) = (store.queue("q"), store.worker("w").unwrap());
    for (size, piece) in [(0, 1), (10, 1), (2049, 1), (70_000, 1), (300_000, 65_535), (300_000, 7)] {
        queue.enqueue_from("", Slowly(bytes(size), piece, false)).unwrap();
        let claim = next_left(&worker);
        let mut one_by_one = Vec::new();
        let mut reader = claim.payload_reader().unwrap();
        let mut byte = [0];
        while reader.read(&mut byte).unwrap() == 1 {
            assert_eq!(reader.read(&mut []).unwrap(), 0);
            one_by_one.push(byte[0]);
        }
        assert!(one_by_one == bytes(size), "{size} in pieces of {piece}");
        claim.ack().unwrap();
    }
    sound(&store);
}

/// What the message says stands, and its key is kept.
#[test]
fn a_streamed_message_has_its_options() {
    let (store, clock) = memory();
    let queue = store.queue("q");
    for size in [10, 100_000] {
        let message =
            || Message::new("").priority(7).key(size.to_string()).group("g").gate("api").delay(SECOND).max_attempts(3);
        let new = queue.enqueue_from(message(), &bytes(size)[..]).unwrap();
        let again = queue.enqueue_from(message(), &bytes(size + 1)[..]).unwrap();
        assert_eq!((new.existing(), again.existing(), again.id()), (false, true, new.id()));
        let found = row(&store, new.id());
        assert_eq!((found.priority, found.max_attempts, found.payload_bytes), (7, 3, size));
        assert_eq!((found.gate.as_deref(), found.due_at), (Some("api"), Some(clock.wall_ms() + 1000)));
    }
    sound(&store);
    for refused in [Message::new("").priority(40_000), Message::new("").key("")] {
        // It is not even read.
        assert!(matches!(queue.enqueue_from(refused, Never), Err(Error::Range { .. } | Error::Text { .. })));
    }
    assert!(matches!(store.queue("").enqueue_from("", Never), Err(Error::QueueName { .. })));
    let folder = Folder::new();
    Store::open(folder.file()).unwrap();
    let looking = Store::open_read_only(folder.file()).unwrap();
    assert!(matches!(looking.queue("q").enqueue_from("", Never), Err(Error::ReadOnly { .. })));
}

struct Never;

impl Read for Never {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic!("it should not be read");
    }
}

/// Breaks off in its own way after what it has.
struct Breaks<F>(Cursor<Vec<u8>>, F);

impl<F: FnMut() -> io::Result<usize>> Read for Breaks<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.0.read(buffer)? {
            0 => (self.1)(),
            read => Ok(read),
        }
    }
}

#[test]
fn a_stream_that_fails_or_panics_stores_nothing() {
    let folder = Folder::new();
    let store = Store::options().durability(Durability::Normal).open(folder.file()).unwrap();
    let queue = store.queue("q");
    let files = || {
        let mut names: Vec<_> =
            std::fs::read_dir(folder.file().parent().unwrap()).unwrap().map(|file| file.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = files();
    for size in [0, 100, 65_536, 100_000, MIB] {
        let fails =
            Breaks(Cursor::new(bytes(size)), || Err(io::Error::new(ErrorKind::ConnectionReset, "the line is dead")));
        let error = queue.enqueue_from("", fails).unwrap_err();
        assert!(
            matches!(&error, Error::Stream { source, .. } if source.kind() == ErrorKind::ConnectionReset),
            "{error:?}"
        );
        assert!(error.to_string().contains("reader") && error.to_string().contains("the line is dead"), "{error}");
        let panics = Breaks(Cursor::new(bytes(size)), || panic!("a stranger's panic"));
        catch_unwind(AssertUnwindSafe(|| queue.enqueue_from("", panics))).unwrap_err();
        assert_eq!(store.list(&Filter::new()).unwrap().len(), 0);
        assert_eq!(files(), before);
    }
    queue.enqueue_from("", &bytes(MIB)[..]).unwrap();
    assert!(row(&store, 1).payload.unwrap() == bytes(MIB));
    sound(&store);
}

#[test]
fn what_is_too_large_is_refused_as_soon_as_that_is_known() {
    for limit in [0, 10, 2048, 65_535, 65_536, 70_000, 3 * MIB] {
        let (store, _) = memory_with(Store::options().payload_max(limit));
        let queue = store.queue("q");
        let mut given = 0;
        let endless = |buffer: &mut [u8]| {
            given += buffer.len();
            buffer.len()
        };
        let refused = queue.enqueue_from("", Endless(endless)).unwrap_err();
        assert!(matches!(refused, Error::PayloadTooLarge { limit: is, .. } if is == limit), "{refused:?}");
        assert!(given <= limit + 1, "{given} of {limit}");
        queue.enqueue_from("", &bytes(limit)[..]).unwrap();
        assert!(row(&store, 1).payload.unwrap() == bytes(limit));
        assert_eq!(store.stats().unwrap().queues[0].live(), 1);
        sound(&store);
    }
}

struct Endless<F>(F);

impl<F: FnMut(&mut [u8]) -> usize> Read for Endless<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok((self.0)(buffer))
    }
}

/// While a stream is read, and while a payload is, the store is anyone's.
#[test]
fn a_slow_stream_holds_nobody_up() {
    let folder = Folder::new();
    let store = Store::options().durability(Durability::Normal).open(folder.file()).unwrap();
    let queue = store.queue("q");
    let mut left = 200_000_usize;
    let slow = Endless(|buffer: &mut [u8]| {
        // With the lock held, this would wait for itself.
        queue.enqueue("meanwhile").unwrap();
        let read = buffer.len().min(left);
        left -= read;
        read
    });
    let id = queue.enqueue_from(Message::new("").priority(1), slow).unwrap().id();
    queue.enqueue_from(Message::new("").priority(1), &bytes(3 * MIB)[..]).unwrap();
    assert!(id.get() > 3);

    let worker = store.worker("w").unwrap();
    let claims = [next_left(&worker), next_left(&worker)];
    let mut reader = claims[1].payload_reader().unwrap();
    let mut some = [0; 300_000];
    reader.read_exact(&mut some).unwrap();
    for _ in 0..10 {
        queue.enqueue(bytes(100_000)).unwrap();
        // A snapshot that was held would keep the log from being emptied.
        assert!(store.checkpoint().unwrap());
    }
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert!([&some[..], &rest].concat() == bytes(3 * MIB));
    sound(&store);
}

/// Whichever way it is claimed, a large payload stays in the file, and its message is looked after as any other.
#[test]
fn every_way_of_claiming_can_leave_the_payload_in_the_file() {
    let (store, clock) = memory();
    let (queue, payload) = (store.queue("q"), bytes(100_000));
    let worker = store.worker("w").unwrap().without_payloads();
    let id = queue.enqueue_from(Message::new("").gate("api").group("g"), &payload[..]).unwrap().id();
    let left = |claim: Claim| {
        assert!(claim.id() == id && claim.payload().is_empty() && read_whole(&claim) == payload);
        assert!(format!("{claim:?}").contains("payload_bytes: 100000"));
        claim
    };
    left(worker.claim("q").unwrap().unwrap()).release().unwrap();
    left(worker.claim_wait("q", SECOND).unwrap().unwrap()).fail_for("no", SECOND).unwrap();
    clock.advance(SECOND);
    left(worker.claim_batch("q", 5).unwrap().remove(0)).defer(SECOND).unwrap();
    clock.advance(SECOND);
    let _ = left(worker.claim("q").unwrap().unwrap());
    let _ = left(worker.claim_id(id).unwrap().claim().unwrap());
    clock.advance(HOUR);
    left(worker.claim("q").unwrap().unwrap()).ack().unwrap();
    // JSON is read through the stream, and a small payload comes along.
    queue.enqueue(Message::json(&"x".repeat(5_000)).unwrap()).unwrap();
    queue.enqueue(Message::json("small").unwrap()).unwrap();
    queue.enqueue("x".repeat(5_000)).unwrap();
    for expected in ["x".repeat(5_000), "small".to_owned()] {
        assert_eq!(worker.claim("q").unwrap().unwrap().json::<String>().unwrap(), expected);
    }
    assert!(matches!(worker.claim("q").unwrap().unwrap().json::<String>(), Err(Error::Json(_))));
    sound(&store);
}

/// Runs `damage` on a message with a payload of 1 MiB that was claimed without it.
fn damaged(damage: &str) -> (Folder, Store, Claim) {
    let folder = Folder::new();
    let options = Store::options().durability(Durability::Normal).clock(Clock::manual());
    let store = options.open(folder.file()).unwrap();
    store.queue("q").enqueue_from("", &bytes(MIB)[..]).unwrap();
    let claim = next_left(&store.worker("w").unwrap());
    Connection::open(folder.file()).unwrap().execute_batch(damage).unwrap();
    (folder, store, claim)
}

#[test]
fn damage_is_found_by_who_reads() {
    let set = |payload: &str| format!("UPDATE relet_payloads SET payload = CAST({payload} AS BLOB)");
    for damage in [
        set("x'ff' || substr(payload, 2)"),
        set("substr(payload, 1, 1048575) || x'00'"),
        set("substr(payload, 2)"),
        set("payload || x'00'"),
        set("x''"),
    ] {
        let (_folder, store, claim) = damaged(&damage);
        let mut whole = Vec::new();
        let mut reader = claim.payload_reader().unwrap();
        for _ in 0..2 {
            let error = reader.read_to_end(&mut whole).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{damage}: {error}");
            assert!(error.to_string().contains("message 1 does not match its checksum"), "{error}");
        }
        assert!(whole.len() < MIB);
        let mut out = Vec::new();
        assert!(matches!(claim.write_payload_to(&mut out), Err(Error::Corrupt { .. })), "{damage}");
        assert!(out.len() < MIB);
        assert!(matches!(claim.json::<String>(), Err(Error::Json(_))));
        claim.reject("damaged").unwrap();
        assert_eq!(row(&store, 1).status, Status::Dead);
    }
}

/// What is damaged so that a claim can see it without reading is not handed out.
#[test]
fn a_payload_that_is_not_there_is_found_by_the_claim() {
    let take_away = ["DELETE FROM relet_payloads", "UPDATE relet_payloads SET payload = x''"];
    for damage in take_away.into_iter().chain(["UPDATE relet_messages SET payload = x''"]) {
        let (_folder, store, claim) = damaged(damage);
        claim.release().unwrap();
        assert!(store.worker("v").unwrap().claim_without_payload("q").unwrap().is_none(), "{damage}");
        let dead = row(&store, 1);
        assert!(dead.status == Status::Dead && dead.dead_reason.unwrap().contains("damaged"));
    }
}

#[test]
fn a_message_that_is_gone_is_told_to_who_reads() {
    let (_folder, store, claim) = damaged("");
    let mut reader = claim.payload_reader().unwrap();
    let mut some = vec![0; 1000];
    reader.read_exact(&mut some).unwrap();
    assert!(some == bytes(1000));
    store.settle(claim.receipt(), relet::Settle::Ack).unwrap();
    for _ in 0..2 {
        let error = reader.read_to_end(&mut some).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(matches!(error.get_ref().unwrap().downcast_ref(), Some(Error::Gone { .. })));
    }
    assert!(matches!(claim.payload_reader().unwrap_err(), Error::Gone { id } if id.get() == 1));
    assert!(matches!(claim.write_payload_to(&mut io::sink()), Err(Error::Gone { .. })));
    sound(&store);
}

#[test]
fn a_writer_that_fails_is_named() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (_folder, store, claim) = damaged("");
    let error = claim.write_payload_to(&mut Full).unwrap_err();
    assert!(matches!(&error, Error::Stream { source, .. } if source.kind() == ErrorKind::StorageFull), "{error:?}");
    assert!(error.to_string().contains("writer"), "{error}");
    assert!(read_whole(&claim) == bytes(MIB));
    claim.ack().unwrap();
    sound(&store);
}

/// What makes large payloads cheap: a claim and an ack write some pages, not the payload's 257.
#[test]
fn neither_a_claim_nor_an_ack_writes_the_payload() {
    let folder = Folder::new();
    let store = Store::options().durability(Durability::Normal).open(folder.file()).unwrap();
    let worker = store.worker("w").unwrap();
    for round in 0..8 {
        store.queue("q").enqueue(bytes(MIB)).unwrap();
        let written = |what: &dyn Fn()| {
            store.checkpoint().unwrap();
            what();
            store.stats().unwrap().wal_bytes / 4096
        };
        let claim = std::cell::RefCell::new(None);
        let claimed = written(&|| *claim.borrow_mut() = Some(next(&worker, "q")));
        let acked = written(&|| _ = claim.borrow_mut().take().unwrap().ack().unwrap());
        assert!(claimed <= 8 && acked <= 10, "round {round}: {claimed} and {acked} pages");
    }
    sound(&store);
}
