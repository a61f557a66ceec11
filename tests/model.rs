//! The store does what a much simpler model says, for random operations under a moved clock.
//!
//! The model keeps messages in a map and states the rules outright: whose turn it is in a group is computed, not stored; what
//! is due is compared, not moved. Each seed is a different run; a failure prints its seed, and
//! `RELET_MODEL_SEED=… cargo test --all-features --test model` runs that one again. `RELET_MODEL_RUNS` and
//! `RELET_MODEL_STEPS` make it longer.
#![cfg(feature = "testing")]

use std::collections::BTreeMap;
use std::time::Duration;

use relet::{
    CRASHES_MAX, Claim, Clock, DEFERRAL_GRACE, Error, Filter, GateLimits, Message, MessageId, Receipt, Retry, Route,
    Settle, Settled, Status, Store, Verdict, Wait, Worker,
};

const QUEUES: [&str; 2] = ["mail", "sms"];
const GATES: [&str; 2] = ["api", "tenant"];
const LABELS: [&str; 2] = ["anna", "bert"];
const LEASE: i64 = 60_000;
const BACKOFF: i64 = 7_000;
const GRACE: i64 = DEFERRAL_GRACE.as_millis() as i64;
const DEFERRALS: u32 = 4;

#[derive(Debug, Clone)]
struct Row {
    queue: usize,
    status: Status,
    route: Route,
    priority: i32,
    due: Option<i64>,
    /// Deferred: kept for its worker until then.
    kept: i64,
    expires: Option<i64>,
    key: Option<u8>,
    group: Option<u8>,
    gate: Option<usize>,
    worker: Option<usize>,
    incarnation: u32,
    lease_until: Option<i64>,
    claimed_at: i64,
    token: i64,
    epoch: i64,
    attempts: u32,
    max_attempts: u32,
    crashes: u32,
    deferrals: u32,
    releases: u32,
}

#[derive(Debug, Clone, Copy)]
struct Gate {
    closed_until: i64,
    /// Slow start: claims that may have passed since it opened.
    window: Option<usize>,
    slots: Option<usize>,
}

#[derive(Debug)]
struct Model {
    rows: BTreeMap<i64, Row>,
    gates: [Gate; 2],
    paused_until: [i64; 2],
    /// The store's, which goes on whatever is done to the wall clock.
    time: i64,
    /// By how much the wall clock was set since.
    jumped: i64,
    /// The most that this has ever been.
    ahead: i64,
    awake: i64,
    epoch: i64,
    /// The present incarnation of each label; odd and even mean nothing, only equality does.
    incarnations: [u32; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Claimed,
    Resumed,
    Recovered,
}

/// What the model says of a claim by id.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Say {
    Take(How),
    Held,
    Deferred,
    Due,
    Group(i64),
    Paused,
    Gate,
    Finished(Status),
    NotFound,
}

impl Model {
    fn live_in_group(&self, row: &Row) -> impl Iterator<Item = (i64, &Row)> {
        let (queue, group) = (row.queue, row.group);
        self.rows.iter().map(|(id, row)| (*id, row)).filter(move |(_, other)| {
            group.is_some() && other.queue == queue && other.group == group && other.status.is_live()
        })
    }

    /// Whose turn it is in this row's group: the member in processing, else the smallest.
    fn turn(&self, row: &Row) -> Option<i64> {
        let held = self.live_in_group(row).find(|(_, other)| other.status == Status::Processing);
        held.or_else(|| self.live_in_group(row).next()).map(|(id, _)| id)
    }

    /// Whether a gate lets a message pass.
    fn passes(&self, gate: usize) -> bool {
        let Gate { closed_until, window, slots } = self.gates[gate];
        let held = self.rows.values().filter(|row| row.gate == Some(gate) && row.lease_until > Some(self.awake));
        let since = held.clone().filter(|row| row.claimed_at >= closed_until);
        closed_until <= self.time
            && slots.is_none_or(|slots| held.count() < slots)
            && window.is_none_or(|window| since.count() < window)
    }

    fn close(&mut self, gate: usize, until: i64) {
        let gate = &mut self.gates[gate];
        gate.closed_until = gate.closed_until.max(until);
        gate.window = Some(1);
    }

    fn judge(&self, id: i64, label: usize) -> Say {
        let say = self.judge_owner(id, label);
        let Say::Take(how) = say else { return say };
        let row = &self.rows[&id];
        if how == How::Resumed && row.lease_until.is_some() {
            say
        } else if self.paused_until[row.queue] > self.time {
            Say::Paused
        } else if row.gate.is_some_and(|gate| !self.passes(gate)) {
            Say::Gate
        } else {
            say
        }
    }

    fn judge_owner(&self, id: i64, label: usize) -> Say {
        let Some(row) = self.rows.get(&id) else { return Say::NotFound };
        if !row.status.is_live() {
            return Say::Finished(row.status);
        }
        let waits = row.due.is_some_and(|due| due > self.time);
        if row.status != Status::Processing {
            return match self.turn(row) {
                Some(turn) if turn != id => Say::Group(turn),
                _ if waits => Say::Due,
                _ => Say::Take(How::Claimed),
            };
        }
        let mine = row.worker == Some(label);
        let same = mine && row.incarnation == self.incarnations[label];
        match row.lease_until {
            Some(until) if until > self.awake && same && row.attempts < row.max_attempts => Say::Take(How::Resumed),
            Some(until) if until > self.awake => Say::Held,
            Some(_) if mine => Say::Take(How::Recovered),
            Some(_) => Say::Take(How::Claimed),
            None if waits => Say::Deferred,
            None if same => Say::Take(How::Resumed),
            None if mine => Say::Take(How::Recovered),
            None if row.kept <= self.time => Say::Take(How::Claimed),
            None => Say::Deferred,
        }
    }

    /// Ends a live row; a holder's receipt becomes stale.
    fn end(&mut self, id: i64, status: Status) {
        let row = self.rows.get_mut(&id).unwrap();
        row.token += i64::from(row.lease_until.is_some());
        self.settle_end(id, status);
    }

    fn settle_end(&mut self, id: i64, status: Status) {
        let row = self.rows.get_mut(&id).unwrap();
        row.status = status;
        (row.worker, row.lease_until, row.due) = (None, None, None);
    }

    /// One crash; returns whether the message died of it.
    fn crash(&mut self, id: i64) -> bool {
        let row = self.rows.get_mut(&id).unwrap();
        row.crashes += 1;
        let dies = row.crashes >= CRASHES_MAX || row.attempts >= row.max_attempts;
        if dies {
            self.end(id, Status::Dead);
        }
        dies
    }

    /// Another's void or abandoned claim is ended; returns whether the message died of it.
    fn take_back(&mut self, id: i64) -> bool {
        let held = self.rows[&id].lease_until.is_some();
        if held && self.crash(id) {
            return true;
        }
        let row = self.rows.get_mut(&id).unwrap();
        row.token += i64::from(held);
        row.status = row.route.into();
        (row.worker, row.lease_until, row.due) = (None, None, None);
        false
    }

    fn expired(&self, id: i64) -> bool {
        let row = &self.rows[&id];
        row.status != Status::Processing && row.expires.is_some_and(|at| at <= self.time)
    }

    /// Hands out; `false` where it died instead.
    fn take(&mut self, id: i64, label: usize, how: How) -> bool {
        if how == How::Recovered && self.rows[&id].lease_until.is_some() && self.crash(id) {
            return false;
        }
        let (awake, time, epoch, incarnation) = (self.awake, self.time, self.epoch, self.incarnations[label]);
        let row = self.rows.get_mut(&id).unwrap();
        row.status = Status::Processing;
        row.worker = Some(label);
        row.incarnation = incarnation;
        row.lease_until = Some(awake + LEASE);
        row.claimed_at = time;
        (row.due, row.expires) = (None, None);
        row.token += 1;
        row.epoch = epoch;
        row.attempts += 1;
        true
    }

    fn claim_id(&mut self, id: i64, label: usize) -> Say {
        let say = self.judge(id, label);
        let Say::Take(how) = say else { return say };
        if self.expired(id) {
            self.end(id, Status::Dead);
            return Say::Finished(Status::Dead);
        }
        let others = how == How::Claimed && self.rows[&id].status == Status::Processing;
        if others && self.take_back(id) {
            return Say::Finished(Status::Dead);
        }
        if self.expired(id) {
            self.end(id, Status::Dead);
            return Say::Finished(Status::Dead);
        }
        if others {
            let again = self.judge(id, label);
            if !matches!(again, Say::Take(_)) {
                return again;
            }
        }
        if self.take(id, label, how) { say } else { Say::Finished(Status::Dead) }
    }

    /// Whether a message is its worker's before all that is ready. What a gate has put off is not: it has its place in the
    /// gate's line.
    fn comes_first(&self, id: i64, row: &Row, label: usize) -> bool {
        let put_off = row.gate.is_some() && row.lease_until.is_none() && row.kept <= self.time;
        row.worker == Some(label) && !put_off && matches!(self.judge(id, label), Say::Take(_))
    }

    /// Those in processing of a queue whose claim is void, or those that are deferred.
    fn processing(&self, queue: usize, void: bool) -> impl Iterator<Item = (i64, &Row)> {
        let rows = self.rows.iter().map(|(id, row)| (*id, row));
        rows.filter(move |(_, row)| row.queue == queue && row.status == Status::Processing).filter(move |(_, row)| {
            match row.lease_until {
                Some(until) => void && until <= self.awake,
                None => !void,
            }
        })
    }

    fn first_own(&self, queue: usize, label: usize, void: bool) -> Option<(i64, How)> {
        let own = self.processing(queue, void).filter(|(id, row)| self.comes_first(*id, row, label));
        let (id, row) = own.min_by_key(|(id, row)| (row.lease_until, row.due, *id))?;
        let same = !void && row.incarnation == self.incarnations[label];
        Some((id, if same { How::Resumed } else { How::Recovered }))
    }

    /// What a worker comes for and its gate does not let pass goes back to the gate's line.
    fn give_up_own_gated(&mut self, queue: usize, label: usize) {
        let mut due: Vec<_> = self.processing(queue, false).filter(|(_, row)| row.worker == Some(label)).collect();
        due.sort_by_key(|(id, row)| (row.due, *id));
        let due: Vec<i64> = due.into_iter().map(|(id, _)| id).collect();
        for id in due {
            let row = &self.rows[&id];
            let put_off = row.gate.is_some() && row.kept <= self.time;
            if put_off || row.due.is_some_and(|due| due > self.time) {
                continue;
            }
            match self.judge(id, label) {
                Say::Take(_) => return,
                Say::Gate => drop(self.take_back(id)),
                _ => {}
            }
        }
    }

    fn take_back_all(&mut self, queue: usize, void: bool) {
        let back = self.processing(queue, void).filter(|(_, row)| void || row.kept <= self.time);
        let back: Vec<i64> = back.map(|(id, _)| id).collect();
        for id in back {
            self.take_back(id);
        }
    }

    fn claim_next(&mut self, queue: usize, label: usize) -> Option<(i64, How)> {
        loop {
            let mut own = self.first_own(queue, label, true);
            if own.is_none() {
                self.take_back_all(queue, true);
                self.give_up_own_gated(queue, label);
                own = self.first_own(queue, label, false);
            }
            if let Some((id, how)) = own {
                match self.take(id, label, how) {
                    true => return Some((id, how)),
                    false => continue,
                }
            }
            self.take_back_all(queue, false);
            let ready = |(id, row): &(&i64, &Row)| {
                row.queue == queue
                    && row.status.is_claimable()
                    && row.due.is_none_or(|due| due <= self.time)
                    && self.turn(row).is_none_or(|turn| turn == **id)
                    && self.paused_until[queue] <= self.time
                    && row.gate.is_none_or(|gate| self.passes(gate))
            };
            let head = self.rows.iter().filter(ready).min_by_key(|(id, row)| (-row.priority, **id));
            let id = *head?.0;
            if self.expired(id) {
                self.end(id, Status::Dead);
            } else {
                self.take(id, label, How::Claimed);
                return Some((id, How::Claimed));
            }
        }
    }

    /// `None`: stale or cancelled, and nothing changed.
    fn settle(&mut self, receipt: Receipt, how: &Settle) -> Option<Settled> {
        let id = receipt.id().get();
        // When its lease had run out its slot at the gate was free, and may be another's now.
        let loses_its_slot = self.rows.get(&id).and_then(|row| row.gate).is_some_and(|gate| {
            self.rows[&id].lease_until <= Some(self.awake)
                && self.gates[gate].closed_until <= self.time
                && !self.passes(gate)
        });
        let Some(row) = self.rows.get_mut(&id) else {
            return (!matches!(how, Settle::Extend { .. })).then_some(Settled::Gone);
        };
        if (row.token, row.epoch) != (receipt.token(), receipt.epoch()) {
            return None;
        }
        if row.lease_until.is_none() {
            return (!matches!(how, Settle::Extend { .. })).then_some(Settled::Before(row.status));
        }
        let back: Status = row.route.into();
        let status = match how {
            Settle::Ack => {
                let row = self.rows.remove(&id).unwrap();
                if let Some(gate) = row.gate.map(|gate| &mut self.gates[gate])
                    && gate.closed_until <= row.claimed_at
                {
                    gate.window = gate.window.and_then(|window| (window < 32).then_some(window + 1));
                }
                return Some(Settled::Now(Status::Done));
            }
            Settle::Fail { .. } if row.attempts >= row.max_attempts => Status::Dead,
            Settle::Fail { retry_in, .. } => {
                let wait = retry_in.map_or(BACKOFF, |wait| wait.as_millis() as i64);
                (row.status, row.worker, row.lease_until) = (back, None, None);
                row.due = Some(self.time + wait).filter(|due| *due > self.time);
                back
            }
            Settle::Reject { .. } => Status::Dead,
            Settle::Defer { .. } | Settle::Limited { .. } => {
                let (wait, grace) = match how {
                    Settle::Defer { delay, .. } => (delay, GRACE),
                    Settle::Limited { retry_after } if row.gate.is_some() => (retry_after, 0),
                    Settle::Limited { retry_after } => (retry_after, GRACE),
                    _ => unreachable!(),
                };
                let due = self.time + wait.as_millis() as i64;
                let limits = matches!(how, Settle::Limited { .. }).then_some(row.gate).flatten();
                row.deferrals += 1;
                row.attempts -= 1;
                let status = if row.deferrals >= DEFERRALS {
                    Status::Dead
                } else {
                    row.lease_until = None;
                    row.due = Some(due);
                    row.kept = due + grace;
                    Status::Processing
                };
                if let Some(gate) = limits {
                    self.close(gate, due);
                }
                status
            }
            Settle::Release => {
                row.releases += 1;
                row.attempts -= 1;
                (row.status, row.worker, row.lease_until, row.due) = (back, None, None, None);
                back
            }
            Settle::Extend { .. } if row.lease_until == Some(i64::MIN) || loses_its_slot => return None,
            Settle::Extend { lease } => {
                row.lease_until = row.lease_until.max(Some(self.awake + lease.as_millis() as i64));
                Status::Processing
            }
            other => panic!("{other:?} is not modelled"),
        };
        if status == Status::Dead {
            self.settle_end(id, Status::Dead);
        }
        Some(Settled::Now(status))
    }
}

struct Run {
    rng: fastrand::Rng,
    clock: Clock,
    store: Store,
    workers: [Option<Worker>; 2],
    model: Model,
    receipts: Vec<Receipt>,
    log: Vec<String>,
}

impl Run {
    fn new(seed: u64) -> Run {
        let clock = Clock::manual();
        let store = Store::options()
            .clock(clock.clone())
            .lease(Duration::from_millis(LEASE as u64))
            .retry(Retry::fixed(Duration::from_millis(BACKOFF as u64)))
            .open_in_memory()
            .unwrap();
        let workers = LABELS.map(|label| Some(store.worker(label).unwrap()));
        let model = Model {
            rows: BTreeMap::new(),
            gates: [Gate { closed_until: 0, window: None, slots: None }; 2],
            paused_until: [0; 2],
            time: clock.wall_ms(),
            jumped: 0,
            ahead: 0,
            awake: 0,
            epoch: 1,
            incarnations: [1, 1],
        };
        Run { rng: fastrand::Rng::with_seed(seed), clock, store, workers, model, receipts: Vec::new(), log: Vec::new() }
    }

    fn step(&mut self) {
        match self.rng.u32(0..100) {
            0..22 => self.enqueue(),
            22..45 => self.claim_next(),
            45..55 => self.claim_id(),
            55..80 => self.settle(),
            80..83 => self.cancel(),
            83..87 => self.redrive(),
            87..89 => self.reroute(),
            89..91 => self.change_gate(),
            91..92 => self.pause(),
            92..97 => self.advance(),
            97..98 => self.jump(),
            98..99 => self.restart(),
            _ => self.reboot(),
        }
    }

    fn worker(&self, label: usize) -> &Worker {
        self.workers[label].as_ref().unwrap()
    }

    fn some_id(&mut self) -> i64 {
        self.rng.i64(1..=self.model.rows.last_key_value().map_or(1, |(id, _)| id + 1))
    }

    fn enqueue(&mut self) {
        let rng = &mut self.rng;
        let queue = rng.usize(0..2);
        let mut message = Message::new("payload").max_deferrals(DEFERRALS);
        let mut row = Row {
            queue,
            status: Status::Pending,
            route: Route::ALL[rng.usize(0..4)],
            priority: rng.i32(-2..3),
            due: None,
            kept: 0,
            expires: None,
            key: rng.bool().then(|| rng.u8(0..6)),
            group: rng.bool().then(|| rng.u8(0..2)),
            gate: rng.bool().then(|| rng.usize(0..2)),
            worker: None,
            incarnation: 0,
            lease_until: None,
            claimed_at: 0,
            token: 0,
            epoch: 0,
            attempts: 0,
            max_attempts: rng.u32(1..6),
            crashes: 0,
            deferrals: 0,
            releases: 0,
        };
        row.status = row.route.into();
        message = message.route(row.route).priority(row.priority).max_attempts(row.max_attempts);
        if rng.u8(0..4) == 0 {
            let delay = rng.u64(0..20_000);
            message = message.delay(Duration::from_millis(delay));
            row.due = Some(self.model.time + delay as i64).filter(|_| delay > 0);
        }
        if rng.u8(0..6) == 0 {
            let ttl = rng.u64(1..40_000);
            message = message.ttl(Duration::from_millis(ttl));
            row.expires = Some(self.model.time + ttl as i64);
        }
        if let Some(key) = row.key {
            message = message.key(key.to_string());
        }
        if let Some(group) = row.group {
            message = message.group(group.to_string());
        }
        if let Some(gate) = row.gate {
            message = message.gate(GATES[gate]);
        }
        let known = self.model.rows.iter().find(|(_, other)| {
            row.key.is_some() && other.key == row.key && other.queue == queue && other.status.is_live()
        });
        let known = known.map(|(id, _)| *id);
        // One that has expired gives its key up.
        let known = match known.filter(|id| self.model.expired(*id)) {
            Some(expired) => {
                self.model.end(expired, Status::Dead);
                None
            }
            None => known,
        };
        let enqueued = self.store.queue(QUEUES[queue]).enqueue(message).unwrap();
        self.log.push(format!("enqueue {row:?} -> {enqueued:?}"));
        assert_eq!(enqueued.existing().then_some(enqueued.id().get()), known);
        if known.is_none() {
            self.model.rows.insert(enqueued.id().get(), row);
        }
    }

    fn keep(&mut self, claim: &Claim, how: How) {
        let said = match claim.how() {
            relet::How::Claimed => How::Claimed,
            relet::How::Resumed => How::Resumed,
            relet::How::Recovered => How::Recovered,
        };
        assert_eq!(said, how);
        assert_eq!(claim.payload(), b"payload");
        self.receipts.push(claim.receipt());
        if self.receipts.len() > 12 {
            self.receipts.remove(0);
        }
    }

    fn claim_next(&mut self) {
        let (queue, label) = (self.rng.usize(0..2), self.rng.usize(0..2));
        let claim = self.worker(label).claim(QUEUES[queue]).unwrap();
        self.log.push(format!(
            "{} claims from {}: {:?}",
            LABELS[label],
            QUEUES[queue],
            claim.as_ref().map(Claim::receipt)
        ));
        let said = self.model.claim_next(queue, label);
        assert_eq!(claim.as_ref().map(|claim| claim.id().get()), said.map(|(id, _)| id));
        if let Some((claim, (_, how))) = claim.zip(said) {
            self.keep(&claim, how);
        }
    }

    fn claim_id(&mut self) {
        let (id, label) = (self.some_id(), self.rng.usize(0..2));
        let verdict = self.worker(label).claim_id(id).unwrap();
        self.log.push(format!("{} claims {id}: {verdict:?}", LABELS[label]));
        let said = self.model.claim_id(id, label);
        let heard = match &verdict {
            Verdict::Claimed(_) => Say::Take(How::Claimed),
            Verdict::Resumed(_) => Say::Take(How::Resumed),
            Verdict::Recovered(_) => Say::Take(How::Recovered),
            Verdict::Held { .. } => Say::Held,
            Verdict::Waiting { what: Wait::Deferred { .. }, .. } => Say::Deferred,
            Verdict::Waiting { what: Wait::Due, .. } => Say::Due,
            Verdict::Waiting { what: Wait::Group { behind }, .. } => Say::Group(behind.get()),
            Verdict::Waiting { what: Wait::Paused, .. } => Say::Paused,
            Verdict::Waiting { what: Wait::Gate { .. }, .. } => Say::Gate,
            Verdict::Finished { status } => Say::Finished(*status),
            Verdict::NotFound => Say::NotFound,
            other => panic!("{other:?}"),
        };
        assert_eq!(heard, said);
        if let (Some(claim), Say::Take(how)) = (verdict.claim(), said) {
            self.keep(&claim, how);
        }
    }

    fn settle(&mut self) {
        let Some(receipt) = self.rng.choice(&self.receipts).copied() else { return };
        let wait = Duration::from_millis(self.rng.u64(0..30_000));
        let how = match self.rng.u32(0..13) {
            0..3 => Settle::Ack,
            3..5 => Settle::Fail { error: "e".into(), retry_in: None },
            5 => Settle::Fail { error: "e".into(), retry_in: Some(wait) },
            6 => Settle::Reject { error: "no".into() },
            7..10 => Settle::Defer { delay: wait, reason: "429".into() },
            10 => Settle::Release,
            11 => Settle::Limited { retry_after: wait },
            _ => Settle::Extend { lease: wait.max(Duration::from_millis(1)) * 3 },
        };
        let outcome = self.store.settle(receipt, how.clone());
        self.log.push(format!("{receipt} {how:?}: {outcome:?}"));
        let heard = match outcome {
            Ok(settled) => Some(settled),
            Err(error) if error.is_claim_lost() => None,
            Err(error) => panic!("{error:?}"),
        };
        assert_eq!(heard, self.model.settle(receipt, &how));
    }

    fn cancel(&mut self) {
        let id = self.some_id();
        let outcome = self.store.cancel(id);
        self.log.push(format!("cancel {id}: {outcome:?}"));
        let status = self.model.rows.get(&id).map(|row| row.status);
        let live = status.is_some_and(Status::is_live);
        assert_eq!(outcome.is_ok(), live || status == Some(Status::Cancelled));
        if live {
            self.model.end(id, Status::Cancelled);
        }
    }

    fn redrive(&mut self) {
        let dead: Vec<i64> =
            self.model.rows.iter().filter(|(_, row)| row.status == Status::Dead).map(|(id, _)| *id).collect();
        let Some(id) = self.rng.choice(&dead).copied() else { return };
        let outcome = self.store.redrive(id);
        self.log.push(format!("redrive {id}: {outcome:?}"));
        let row = self.model.rows[&id].clone();
        let taken = self.model.rows.iter().find(|(_, other)| {
            row.key.is_some() && other.key == row.key && other.queue == row.queue && other.status.is_live()
        });
        match (outcome, taken) {
            (Err(Error::KeyTaken { id: holder, .. }), Some((known, _))) => assert_eq!(holder.get(), *known),
            (Ok(()), None) => {
                let row = self.model.rows.get_mut(&id).unwrap();
                row.status = row.route.into();
                (row.attempts, row.crashes, row.deferrals, row.releases) = (0, 0, 0, 0);
                row.expires = None;
            }
            other => panic!("{other:?}"),
        }
    }

    fn reroute(&mut self) {
        let (id, route) = (self.some_id(), Route::ALL[self.rng.usize(0..4)]);
        let outcome = self.store.route(id, route);
        self.log.push(format!("route {id} {route}: {outcome:?}"));
        let row = self.model.rows.get_mut(&id).filter(|row| row.status.is_live());
        assert_eq!(outcome.is_ok(), row.is_some());
        if let Some(row) = row {
            row.route = route;
            if row.status != Status::Processing {
                row.status = route.into();
            }
        }
    }

    fn change_gate(&mut self) {
        let (at, ms) = (self.rng.usize(0..2), self.rng.u64(0..40_000));
        let gate = self.store.gate(GATES[at]);
        let time = self.model.time;
        match self.rng.u32(0..3) {
            0 => {
                self.log.push(format!("gate {} is closed for {ms} ms", GATES[at]));
                gate.close_for(Duration::from_millis(ms)).unwrap();
                self.model.close(at, time + ms as i64);
            }
            1 => {
                self.log.push(format!("gate {} is opened", GATES[at]));
                gate.open().unwrap();
                let gate = &mut self.model.gates[at];
                gate.closed_until = gate.closed_until.min(time);
            }
            _ => {
                let slots = self.rng.bool().then(|| self.rng.u32(1..4));
                self.log.push(format!("gate {} has {slots:?} slots", GATES[at]));
                let limits = slots.map_or(GateLimits::new(), |slots| GateLimits::new().concurrency(slots));
                gate.limit(limits).unwrap();
                self.model.gates[at].slots = slots.map(|slots| slots as usize);
            }
        }
    }

    fn pause(&mut self) {
        let (at, ms) = (self.rng.usize(0..2), self.rng.u64(0..40_000));
        let queue = self.store.queue(QUEUES[at]);
        let paused_until = &mut self.model.paused_until[at];
        if self.rng.u8(0..4) == 0 {
            self.log.push(format!("{} is resumed", QUEUES[at]));
            queue.resume().unwrap();
            *paused_until = 0;
        } else {
            self.log.push(format!("{} is paused for {ms} ms", QUEUES[at]));
            queue.pause_for(Duration::from_millis(ms)).unwrap();
            *paused_until = (*paused_until).max(self.model.time + ms as i64);
        }
    }

    fn advance(&mut self) {
        let ms = self.rng.u64(0..25_000);
        self.log.push(format!("{ms} ms pass"));
        self.clock.advance(Duration::from_millis(ms));
        self.model.time += ms as i64;
        self.model.awake += ms as i64;
    }

    /// The wall clock is set, forward or back: no lease and no wait ends of it.
    fn jump(&mut self) {
        let ms = self.rng.i64(2_000..100_000) * if self.rng.bool() { 1 } else { -1 };
        self.log.push(format!("the wall clock is set by {ms} ms"));
        self.set_wall_by(ms);
    }

    fn set_wall_by(&mut self, ms: i64) {
        self.clock.set_wall_by(ms);
        self.model.jumped += ms;
        self.model.ahead = self.model.ahead.max(self.model.jumped);
        self.store.queue("q").resume().unwrap(); // whatever is written next notes it
    }

    fn restart(&mut self) {
        let label = self.rng.usize(0..2);
        self.log.push(format!("{} restarts", LABELS[label]));
        self.workers[label] = None; // a second one of its label would be refused
        self.workers[label] = Some(self.store.worker(LABELS[label]).unwrap());
        self.model.incarnations[label] += 1;
        for row in self.model.rows.values_mut().filter(|row| row.worker == Some(label)) {
            row.lease_until = row.lease_until.map(|_| i64::MIN);
            row.kept = row.due.unwrap_or(0);
        }
    }

    fn reboot(&mut self) {
        self.log.push("the machine restarts".into());
        // A wall clock that is behind then is the subject of `clocks`.
        if self.model.jumped < self.model.ahead {
            self.set_wall_by(self.model.ahead - self.model.jumped);
        }
        self.clock.reboot();
        self.model.epoch += 1;
        for row in self.model.rows.values_mut() {
            row.lease_until = row.lease_until.map(|_| i64::MIN);
            row.kept = row.due.unwrap_or(0);
        }
        self.workers = [None, None];
        self.workers = LABELS.map(|label| Some(self.store.worker(label).unwrap()));
        self.model.incarnations = self.model.incarnations.map(|incarnation| incarnation + 1);
    }

    /// Row by row, the store is what the model is.
    fn compare(&self) {
        let rows = self.store.list(&Filter::new().limit(10_000)).unwrap();
        let ids: Vec<i64> = rows.iter().map(|row| row.id.get()).collect();
        assert_eq!(ids, self.model.rows.keys().copied().collect::<Vec<_>>());
        for row in rows {
            let model = &self.model.rows[&row.id.get()];
            assert_eq!((row.status, row.route, row.priority), (model.status, model.route, model.priority), "{row:?}");
            assert_eq!(row.worker.as_deref(), model.worker.map(|label| LABELS[label]), "{row:?}");
            let counters = (row.attempts, row.crashes, row.deferrals, row.releases);
            assert_eq!(counters, (model.attempts, model.crashes, model.deferrals, model.releases), "{row:?}");
            let token = model.lease_until.map(|_| (model.token, model.epoch));
            assert_eq!(row.receipt.map(|receipt| (receipt.token(), receipt.epoch())), token, "{row:?}");
            if model.status == Status::Processing || model.due.is_some_and(|due| due > self.model.time) {
                assert_eq!(row.due_at, model.due.map(|due| due + self.model.jumped), "{row:?}");
            }
            assert_eq!(row.dead_reason.is_some() || row.redrives > 0, model.status == Status::Dead || row.redrives > 0);
        }
        let stats = self.store.stats().unwrap();
        for queue in stats.queues {
            for status in Status::ALL {
                let count =
                    self.model.rows.values().filter(|row| QUEUES[row.queue] == queue.queue && row.status == status);
                assert_eq!(queue.count(status), count.count() as u64, "{} {status}", queue.queue);
            }
        }
        assert_eq!(self.store.doctor().unwrap(), Vec::<String>::new());
    }

    /// Nothing is stuck: as time passes, one worker brings every message to an end.
    fn drain(&mut self) {
        for _ in 0..200 {
            self.clock.advance(Duration::from_secs(3600));
            for queue in QUEUES {
                while let Some(claim) = self.worker(0).claim(queue).unwrap() {
                    claim.ack().unwrap();
                }
            }
            if self.store.list(&Filter::new()).unwrap().iter().all(|row| !row.status.is_live()) {
                return;
            }
        }
        panic!("stuck: {:#?}", self.store.list(&Filter::new()).unwrap());
    }
}

fn run(seed: u64, steps: usize) {
    let mut run = Run::new(seed);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for step in 0..steps {
            run.step();
            if step % 10 == 9 {
                run.compare();
            }
        }
        run.drain();
    }));
    if let Err(panic) = outcome {
        let tail = run.log.len().saturating_sub(40);
        eprintln!("RELET_MODEL_SEED={seed}; the last steps:\n{}", run.log[tail..].join("\n"));
        std::panic::resume_unwind(panic);
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

#[test]
fn random_operations_do_what_the_model_says() {
    let steps = number("RELET_MODEL_STEPS").unwrap_or(200) as usize;
    if let Some(seed) = number("RELET_MODEL_SEED") {
        return run(seed, steps);
    }
    for seed in 0..number("RELET_MODEL_RUNS").unwrap_or(200) {
        run(seed, steps);
    }
}

#[test]
fn an_unknown_message_is_not_found() {
    let store = Store::open_in_memory().unwrap();
    assert!(matches!(store.worker("w").unwrap().claim_id(MessageId::new(1)).unwrap(), Verdict::NotFound));
}
