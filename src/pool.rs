//! The pool: the threads of `workers`.
//!
//! A handler thread makes one commit per message: it settles the message before and claims the next one. So nothing is
//! ever held that is not being worked on, and there is nothing to give back when the process dies or is stopped. The commits
//! of all threads are combined by the writer.
//!
//! Of the threads without work one is the *scout*: it sleeps until something may be claimable (`waker`). If it gets a
//! message it wakes the next thread, which looks whether there is more, and so on; a hundred idle threads cost what one costs.
//!
//! One thread more, the *supervisor*, extends the leases of what is being worked on and tells handlers of their time limit; and
//! one runs the store's schedules. Between queues the choice is by stride scheduling (Waldspurger and Weihl 1995).

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::cancel::{CancelReason, CancelToken, guarded};
use crate::claim::Claim;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::outcome::Outcome;
use crate::receipt::Receipt;
use crate::sql::settle::{Settle, Settled};
use crate::worker::Worker;
use crate::writer::panic_message;

/// What a queue of weight 1 is charged for each message.
const STRIDE: u64 = 1 << 20;
/// A lease is extended when this part of it is over.
const EXTEND_AT: u32 = 3;
/// How often the schedules are looked at at least: one that another process sets, and a clock that is set, wake nobody.
const TICK_LOOK: Duration = Duration::from_secs(1);
/// Between two looks of a reader at least, where something was committed that may concern any queue.
const LOOK_MIN: Duration = Duration::from_millis(1);
/// First and longest pause after an error of the store.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

pub(crate) type Handler = Box<dyn Fn(&Claim) -> Outcome + Send + Sync>;
pub(crate) type OnStart = Box<dyn Fn(&Claim) + Send + Sync>;
pub(crate) type OnFinish = Box<dyn Fn(&Claim, &Finished) + Send + Sync>;
pub(crate) type OnError = Box<dyn Fn(&Error) + Send + Sync>;
pub(crate) type OnEnd = Box<dyn Fn() + Send + Sync>;

/// How the work on a message ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Finished {
    /// What the handler made of it.
    pub outcome: Outcome,
    /// How long the handler took.
    pub took: Duration,
    /// What settling it came to; [`Settled::Gone`] where the handler had done that itself.
    pub settled: Result<Settled>,
}

/// What the threads are to do.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) queues: Vec<Served>,
    pub(crate) time_limit: Option<Duration>,
    pub(crate) give_up_after: Option<Duration>,
    pub(crate) drain: bool,
    pub(crate) hooks: Hooks,
}

#[derive(Default)]
pub(crate) struct Hooks {
    pub(crate) on_start: Vec<OnStart>,
    pub(crate) on_finish: Vec<OnFinish>,
    pub(crate) on_error: Vec<OnError>,
    pub(crate) on_end: Vec<OnEnd>,
}

pub(crate) struct Served {
    pub(crate) name: Arc<str>,
    pub(crate) weight: u32,
    pub(crate) handler: Handler,
}

pub(crate) struct Pool {
    worker: Worker,
    plan: Plan,
    /// The pool's time: everything that is planned is planned on it.
    watch: Stopwatch,
    /// Looked at inside transactions, too: so no transaction is made, and nobody is called, while it is locked.
    state: Arc<Mutex<State>>,
    /// For handler threads that have nothing to do.
    rest: Condvar,
    /// For the supervisor.
    wake: Condvar,
    /// For those who wait until no thread is left.
    ended: Condvar,
}

struct State {
    stopping: bool,
    /// The deadline of the stop has come.
    over: bool,
    /// Handler threads that live, and those of them that have looked and found nothing.
    threads: usize,
    resting: usize,
    /// Those of them that are in a handler.
    handling: usize,
    scouting: bool,
    running: Vec<Running>,
    /// What each queue has been charged, in their order.
    passes: Vec<u64>,
    /// And whether there may be something in it: one of five hundred that has messages is to cost no more than one alone.
    hopes: Vec<Hopeful>,
    /// Rings of the waker that were heard, and when a reader is to look again.
    heard: u64,
    looked_at: Duration,
    look_at: Duration,
    /// When the supervisor means to wake.
    wake_at: Duration,
    error: Option<Error>,
}

#[derive(Debug, Clone, Copy)]
struct Hopeful {
    /// Whether a reader has looked; then its id, where there is such a queue.
    known: bool,
    queue: Option<i64>,
    any: bool,
    /// The number of the waker's rings when that was heard.
    since: u64,
}

/// A claim whose handler runs, or which is being settled.
struct Running {
    receipt: Receipt,
    lease: Duration,
    cancel: CancelToken,
    /// When its lease was last known to begin, and when it is to be extended.
    held_at: Duration,
    extend_at: Duration,
    /// `None`: none, or it has been told.
    limit_at: Option<Duration>,
    give_up_at: Option<Duration>,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The hooks of the message before are running.
    Claimed,
    /// Its handler runs.
    Handling,
    /// Its handler has returned, and it is being settled.
    Returned,
}

/// A message whose handler has returned, and which is to be settled with the next step.
struct Worked {
    claim: Claim,
    outcome: Outcome,
    took: Duration,
}

impl Pool {
    /// A pool that so many handler threads are about to serve.
    pub(crate) fn new(worker: Worker, plan: Plan, threads: usize) -> Pool {
        let state = State {
            stopping: false,
            over: false,
            threads,
            resting: 0,
            handling: 0,
            scouting: false,
            running: Vec::new(),
            passes: vec![0; plan.queues.len()],
            hopes: vec![Hopeful { known: false, queue: None, any: false, since: 0 }; plan.queues.len()],
            heard: 0,
            looked_at: Duration::ZERO,
            look_at: Duration::ZERO,
            wake_at: Duration::ZERO,
            error: None,
        };
        Pool {
            worker,
            plan,
            watch: Stopwatch::start(),
            state: Arc::new(Mutex::new(state)),
            rest: Condvar::new(),
            wake: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// So many of the handler threads could not be started.
    pub(crate) fn lacks(&self, threads: usize) {
        self.state.lock().threads -= threads;
    }

    /// What ended it, if that was an error.
    pub(crate) fn error(&self) -> Option<Error> {
        self.state.lock().error.clone()
    }

    /// A handler thread.
    pub(crate) fn serve(&self) {
        let store = self.worker.store();
        let mut worked: Option<Worked> = None;
        // Held while this thread works on a message that has crashed before.
        let mut risk: Option<MutexGuard<'_, ()>> = None;
        let mut pause = PAUSE.0;
        loop {
            let asked = self.watch.elapsed();
            let seen = self.listen();
            let order = self.order();
            if worked.is_none() {
                match &order {
                    None => break,
                    Some(order) if order.is_empty() => {
                        self.rest(seen, true); // also what has crashed was looked for
                        continue;
                    }
                    Some(_) => {}
                }
            }
            let order = order.unwrap_or_default();
            risk = risk.or_else(|| store.risk().try_lock());
            let settle = worked
                .as_ref()
                .and_then(|worked| Some((worked.claim.receipt(), worked.claim.known(), worked.outcome.settle()?)));
            let names = order.iter().map(|at| self.plan.queues[*at].name.clone()).collect();
            let step = match self.worker.crashed(risk.is_some()).step(settle.clone(), names, self.overdue()) {
                Ok(step) => step,
                Err(error) => {
                    self.met(&error);
                    // Whatever keeps it from claiming, what was done is to be settled.
                    if let Some(worked) = worked.take() {
                        let settled =
                            settle.map_or(Ok(Settled::Gone), |(receipt, _, how)| self.settle_alone(receipt, how));
                        self.finish(worked, settled);
                    }
                    risk = None;
                    self.pause(pause);
                    pause = (pause * 2).min(PAUSE.1);
                    continue;
                }
            };
            pause = PAUSE.0;
            if risk.is_some() {
                self.give_up_hope(step.empty.iter().map(|place| order[*place]), seen);
            }
            let next = step.taken.map(|(place, taken)| {
                if taken.record.crashes == 0 {
                    risk = None;
                }
                self.charge(&order[..=place]);
                let at = order[place];
                let claim = Claim::new(self.worker.clone(), &self.plan.queues[at].name, taken);
                self.begin(&claim, asked);
                (claim, at)
            });
            // The hooks may take their time: what was claimed is looked after meanwhile.
            if let Some(worked) = worked.take() {
                self.finish(worked, step.settled.unwrap_or(Ok(Settled::Gone)));
            }
            match next {
                Some((mut claim, at)) => match claim.read_left() {
                    Ok(true) if self.start(&claim) => worked = Some(self.work(claim, at)),
                    // It was claimed while the pool was being stopped, or has been lost already.
                    Ok(true) => drop(self.settle_alone(claim.receipt(), Settle::Release)),
                    // It could not be read, and was given up.
                    Ok(false) => self.forget(claim.receipt()),
                    Err(error) => {
                        self.forget(claim.receipt());
                        self.met(&error);
                        self.pause(pause);
                        pause = (pause * 2).min(PAUSE.1);
                    }
                },
                None => {
                    let saw_all = risk.take().is_some();
                    if !step.again {
                        self.rest(seen, saw_all);
                    }
                }
            }
        }
        let mut state = self.state.lock();
        state.threads -= 1;
        if state.threads == 0 {
            self.wake.notify_all();
            self.ended.notify_all();
            drop(state);
            self.plan.hooks.on_end.iter().for_each(guarded);
        } else if state.over {
            self.ended.notify_all();
        }
    }

    /// Hears for which queues there is hope: those that were rung for, and now and then those in which a reader finds something.
    /// Returns the number of the waker's rings by then.
    fn listen(&self) -> u64 {
        let now = self.watch.elapsed();
        let mut state = self.state.lock();
        let heard = self.worker.store().waker().rung_since(state.heard, state.hopes.iter().map(|hope| hope.queue));
        let rings = heard.rings;
        state.heard = rings;
        for (hope, is_meant) in state.hopes.iter_mut().zip(heard.queues) {
            // What a reader has not found was made since then by whoever rings for all.
            if is_meant && (hope.queue.is_some() || !hope.known) {
                (hope.any, hope.since) = (true, rings);
            }
        }
        if heard.all {
            state.look_at = state.look_at.min(now.max(state.looked_at + LOOK_MIN));
        }
        if now >= state.look_at && state.hopes.iter().any(|hope| !hope.any) {
            (state.looked_at, state.look_at) = (now, now + self.worker.store().waker().longest_nap());
            drop(state);
            self.look(rings);
        }
        rings
    }

    /// Looks into all queues, without the write lock. Where that cannot be done there is hope for all.
    fn look(&self, rings: u64) {
        let names: Vec<_> = self.plan.queues.iter().map(|queue| queue.name.clone()).collect();
        let buried = self.worker.bury_dead_if_due();
        let found = buried.and_then(|_| self.worker.hopes(&names));
        let now = self.watch.elapsed();
        let mut state = self.state.lock();
        match found {
            Ok(Some((found, nap))) => {
                for (hope, found) in state.hopes.iter_mut().zip(found) {
                    (hope.known, hope.queue) = (true, found.queue);
                    if found.any {
                        (hope.any, hope.since) = (true, rings);
                    }
                }
                state.look_at = now + nap;
            }
            _ => state.hopes.iter_mut().for_each(|hope| (hope.any, hope.since) = (true, rings)),
        }
    }

    /// Nothing was found in these queues, where nobody has rung for them since.
    fn give_up_hope(&self, empty: impl Iterator<Item = usize>, seen: u64) {
        let mut state = self.state.lock();
        for at in empty {
            let hope = &mut state.hopes[at];
            hope.any &= hope.since > seen;
        }
    }

    /// The queues for which there is hope, in the order in which they are to be tried; `None` when nothing new is to be begun.
    fn order(&self) -> Option<Vec<usize>> {
        let state = self.state.lock();
        if state.stopping {
            return None;
        }
        let mut order: Vec<usize> = (0..self.plan.queues.len()).filter(|at| state.hopes[*at].any).collect();
        order.sort_by_key(|at| state.passes[*at]);
        Some(order)
    }

    /// The last of these queues had a message, the others had none, as those without hope: they do not save up for later.
    fn charge(&self, tried: &[usize]) {
        let Some((served, empty)) = tried.split_last() else { return };
        let mut state = self.state.lock();
        let pass = state.passes[*served];
        let State { passes, hopes, .. } = &mut *state;
        for (at, queue) in passes.iter_mut().enumerate() {
            if !hopes[at].any || empty.contains(&at) {
                *queue = pass.max(*queue);
            }
        }
        passes[*served] = pass + STRIDE / u64::from(self.plan.queues[*served].weight);
    }

    /// Runs the handler, watched by the supervisor.
    fn work(&self, claim: Claim, at: usize) -> Worked {
        let cancel = claim.cancel_token();
        for hook in &self.plan.hooks.on_start {
            guarded(|| hook(&claim));
        }
        let watch = Stopwatch::start();
        let outcome =
            catch_unwind(AssertUnwindSafe(|| (self.plan.queues[at].handler)(&claim))).unwrap_or_else(|panic| {
                let error = format!("panicked: {}", panic_message(&*panic));
                std::mem::forget(panic); // It may panic as well when it is dropped.
                Outcome::fail(error)
            });
        let took = watch.elapsed();
        let outcome = match outcome {
            // It failed because it was told to stop, or may have: that is not the message's fault.
            Outcome::Fail { .. } if cancel.reason() == Some(CancelReason::Stopping) => Outcome::Release,
            outcome => outcome,
        };
        let mut state = self.state.lock();
        state.handling -= 1;
        if let Some(running) = state.running.iter_mut().find(|running| running.receipt == claim.receipt()) {
            running.stage = Stage::Returned;
        }
        drop(state);
        Worked { claim, outcome, took }
    }

    /// From now on the supervisor looks after this claim, whose lease has begun since it was asked for.
    fn begin(&self, claim: &Claim, asked: Duration) {
        let running = Running {
            receipt: claim.receipt(),
            lease: claim.lease(),
            cancel: claim.cancel_token().clone(),
            held_at: asked,
            extend_at: asked + claim.lease() / EXTEND_AT,
            limit_at: None,
            give_up_at: None,
            stage: Stage::Claimed,
        };
        let mut state = self.state.lock();
        if running.next() < state.wake_at {
            self.wake.notify_one();
        }
        state.running.push(running);
        if state.resting > 0 {
            self.rest.notify_one(); // There may be more.
        }
    }

    /// Whether its handler may start now: not if the pool is being stopped, or the claim was lost.
    fn start(&self, claim: &Claim) -> bool {
        let now = self.watch.elapsed();
        let (limit, give_up) = (self.plan.time_limit, self.plan.give_up_after);
        let mut state = self.state.lock();
        let State { running, wake_at, handling, stopping, .. } = &mut *state;
        let Some(at) = running.iter().position(|running| running.receipt == claim.receipt()) else { return false };
        if *stopping || claim.cancel_token().is_set() {
            running.remove(at);
            return false;
        }
        let running = &mut running[at];
        running.stage = Stage::Handling;
        running.limit_at = [limit, give_up].into_iter().flatten().min().map(|limit| now + limit);
        running.give_up_at = give_up.map(|limit| now + limit);
        *handling += 1;
        if running.next() < *wake_at {
            self.wake.notify_one();
        }
        true
    }

    /// What is to be extended before anything is claimed: where this process was frozen (SIGSTOP, a debugger) for longer than a
    /// lease, an idle thread would otherwise take from another what that has in hand.
    fn overdue(&self) -> impl Fn() -> Vec<(Receipt, Settle)> + Send + use<> {
        let (state, watch) = (self.state.clone(), self.watch);
        move || {
            let now = watch.elapsed();
            let state = state.lock();
            let late = state.running.iter().filter(|running| {
                now >= running.held_at + running.lease * (EXTEND_AT - 1) / EXTEND_AT
                    && running.give_up_at.is_none_or(|at| now < at)
            });
            late.map(|running| (running.receipt, Settle::Extend { lease: running.lease })).collect()
        }
    }

    /// This claim is nobody's business here any more.
    fn forget(&self, receipt: Receipt) {
        self.state.lock().running.retain(|running| running.receipt != receipt);
    }

    fn finish(&self, worked: Worked, settled: Result<Settled>) {
        self.forget(worked.claim.receipt());
        let finished = Finished { outcome: worked.outcome, took: worked.took, settled };
        for hook in &self.plan.hooks.on_finish {
            guarded(|| hook(&worked.claim, &finished));
        }
    }

    /// Settles what is done, however long the store cannot: its lease is extended meanwhile. Ends when the pool is stopped and
    /// its deadline has come.
    fn settle_alone(&self, receipt: Receipt, how: Settle) -> Result<Settled> {
        let mut pause = PAUSE.0;
        loop {
            let settled = self.worker.store().settle(receipt, how.clone());
            match &settled {
                Err(error) if !error.is_claim_lost() && !is_final(error) => self.met(error),
                _ => return settled,
            }
            if self.state.lock().over {
                return settled; // Its lease ends it.
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// Nothing was found: sleeps until there may be something. `saw_all`: not even among what has crashed before.
    fn rest(&self, seen: u64, saw_all: bool) {
        let mut state = self.state.lock();
        if state.stopping {
            return;
        }
        state.resting += 1;
        if self.plan.drain && saw_all && state.resting == state.threads {
            drop(state);
            self.begin_stop(None);
            state = self.state.lock();
        } else if state.scouting {
            self.rest.wait(&mut state);
        } else {
            state.scouting = true;
            drop(state);
            let slept = self.sleep(seen);
            if let Err(error) = slept {
                self.met(&error);
                self.pause(PAUSE.1);
            }
            state = self.state.lock();
            state.scouting = false;
        }
        state.resting -= 1;
    }

    fn sleep(&self, seen: u64) -> Result<()> {
        let store = self.worker.store();
        let state = self.state.lock();
        if state.hopes.iter().all(|hope| hope.known && !hope.any) {
            let nap = state.look_at.saturating_sub(self.watch.elapsed()).min(store.waker().longest_nap());
            let queues = state.hopes.iter().filter_map(|hope| hope.queue).collect();
            drop(state);
            store.sleep_for(queues, seen, nap);
            return Ok(());
        }
        drop(state);
        store.sleep(self.plan.queues.iter().map(|queue| &*queue.name), seen, store.waker().longest_nap())
    }

    /// After an error: a while, or until the pool is stopped.
    fn pause(&self, pause: Duration) {
        let mut state = self.state.lock();
        if !state.stopping {
            let _ = self.ended.wait_for(&mut state, pause);
        }
    }

    fn met(&self, error: &Error) {
        for hook in &self.plan.hooks.on_error {
            guarded(|| hook(error));
        }
        if is_final(error) {
            self.begin_stop(Some(error));
        }
    }

    /// Whether it was inherited over a fork: its threads are the parent's.
    pub(crate) fn is_inherited(&self) -> bool {
        self.worker.store().check_process().is_err()
    }

    /// Begins nothing new, and tells those who are at work.
    pub(crate) fn begin_stop(&self, error: Option<&Error>) {
        let mut state = self.state.lock();
        state.stopping = true;
        if state.error.is_none() {
            state.error = error.cloned();
        }
        let tokens: Vec<CancelToken> = state.running.iter().map(|running| running.cancel.clone()).collect();
        self.rest.notify_all();
        self.ended.notify_all();
        drop(state);
        tokens.iter().for_each(|token| token.set(CancelReason::Stopping));
        self.worker.store().waker().ring_all();
    }

    pub(crate) fn wait_until_ended(&self, limit: Duration) -> bool {
        let watch = Stopwatch::start();
        let mut state = self.state.lock();
        while state.threads > 0 {
            let left = limit.saturating_sub(watch.elapsed());
            if left.is_zero() {
                return false;
            }
            let _ = self.ended.wait_for(&mut state, left);
        }
        true
    }

    /// After the deadline: if something has returned and is just being settled, waits until only those are left whose handlers
    /// do not return.
    pub(crate) fn wait_until_settled(&self) {
        let (watch, limit) = (Stopwatch::start(), self.worker.store().options_used().busy_wait);
        let mut state = self.state.lock();
        let settling = state.running.iter().any(|running| running.stage == Stage::Returned);
        while settling && state.threads > state.handling {
            let left = limit.saturating_sub(watch.elapsed());
            if left.is_zero() {
                return;
            }
            let _ = self.ended.wait_for(&mut state, left);
        }
    }

    /// Releases what is still running, and what was not started yet. What has returned is just being settled, and is left to
    /// that. Returns what was running.
    pub(crate) fn interrupt(&self) -> Vec<MessageId> {
        let mut receipts = Vec::new();
        let mut handled = HashSet::new();
        {
            let mut state = self.state.lock();
            state.over = true;
            state.running.retain(|running| {
                let returned = running.stage == Stage::Returned;
                if !returned {
                    receipts.push(running.receipt);
                }
                if running.stage == Stage::Handling {
                    handled.insert(running.receipt);
                }
                returned
            });
        }
        if receipts.is_empty() {
            return Vec::new();
        }
        let released = self.worker.store().settle_all(receipts.iter().map(|receipt| (*receipt, Settle::Release)));
        match released {
            Ok(outcomes) => {
                let released = |(receipt, outcome): (&Receipt, &Result<Settled>)| {
                    (handled.contains(receipt) && matches!(outcome, Ok(Settled::Now(_)))).then(|| receipt.id())
                };
                receipts.iter().zip(&outcomes).filter_map(released).collect()
            }
            Err(error) => {
                self.met(&error); // Their leases end what could not be released.
                self.state.lock().error.get_or_insert(error);
                handled.iter().map(|receipt| receipt.id()).collect()
            }
        }
    }

    /// The supervisor's thread: ends after the last handler thread.
    pub(crate) fn supervise(&self) {
        let mut state = self.state.lock();
        while state.threads > 0 {
            let now = self.watch.elapsed();
            let (mut due, mut late) = (Vec::new(), Vec::new());
            for running in &mut state.running {
                if running.limit_at.is_some_and(|at| at <= now) {
                    running.limit_at = None;
                    late.push(running.cancel.clone());
                }
                if running.extend_at <= now {
                    running.extend_at = now + running.lease / EXTEND_AT;
                    if running.give_up_at.is_none_or(|at| now < at) {
                        due.push((running.receipt, Settle::Extend { lease: running.lease }));
                    }
                }
            }
            if !due.is_empty() || !late.is_empty() {
                MutexGuard::unlocked(&mut state, || {
                    self.extend(due);
                    late.iter().for_each(|token| token.set(CancelReason::TimeLimit));
                });
                continue;
            }
            let next = state.running.iter().map(Running::next).min();
            state.wake_at = next.unwrap_or(Duration::MAX);
            match next {
                Some(next) => drop(self.wake.wait_for(&mut state, next.saturating_sub(now))),
                None => self.wake.wait(&mut state),
            }
        }
    }

    /// The thread that runs the store's schedules: ends when the pool is stopped.
    pub(crate) fn run_schedules(&self) {
        let mut failing = HashSet::new();
        while !self.state.lock().stopping {
            let next = self.tick(&mut failing);
            self.pause(next);
        }
    }

    /// Enqueues what the schedules have due, before anybody looks: so that a drain has it, too.
    pub(crate) fn first_tick(&self) {
        self.tick(&mut HashSet::new());
    }

    /// Enqueues what the schedules have due, and returns how long it is until that is to be done again. A schedule that cannot be
    /// run is told once, until it can.
    fn tick(&self, failing: &mut HashSet<String>) -> Duration {
        let ticks = match self.worker.store().run_schedules() {
            Ok(ticks) => ticks,
            Err(error) => {
                self.met(&error);
                return TICK_LOOK;
            }
        };
        for (name, error) in &ticks.failed {
            if !failing.contains(name) {
                self.met(error);
            }
        }
        *failing = ticks.failed.into_iter().map(|(name, _)| name).collect();
        ticks.next.map_or(TICK_LOOK, |next| next.min(TICK_LOOK))
    }

    fn extend(&self, due: Vec<(Receipt, Settle)>) {
        if due.is_empty() {
            return;
        }
        let receipts: Vec<Receipt> = due.iter().map(|(receipt, _)| *receipt).collect();
        let now = self.watch.elapsed();
        match self.worker.store().settle_all(due) {
            Ok(outcomes) => {
                for running in &mut self.state.lock().running {
                    if receipts.contains(&running.receipt) {
                        running.held_at = now;
                    }
                }
                let lost = |receipt: &Receipt| {
                    // What has returned may just have been settled.
                    let state = self.state.lock();
                    let mut running = state.running.iter().filter(|running| running.stage != Stage::Returned);
                    running.find(|running| running.receipt == *receipt).map(|running| running.cancel.clone())
                };
                let lost = receipts
                    .iter()
                    .zip(outcomes)
                    .filter(|(_, outcome)| outcome.is_err())
                    .filter_map(|(receipt, _)| lost(receipt));
                lost.for_each(|token| token.set(CancelReason::Lost));
            }
            Err(error) => {
                self.met(&error);
                let soon = self.watch.elapsed() + PAUSE.1;
                for running in &mut self.state.lock().running {
                    if receipts.contains(&running.receipt) {
                        running.extend_at = running.extend_at.min(soon);
                    }
                }
            }
        }
    }
}

impl Running {
    /// When the supervisor is needed next.
    fn next(&self) -> Duration {
        self.limit_at.map_or(self.extend_at, |limit| limit.min(self.extend_at))
    }
}

/// Errors that no waiting ends.
fn is_final(error: &Error) -> bool {
    matches!(error, Error::Superseded { .. } | Error::FileReplaced { .. } | Error::ReadOnly { .. })
}
