//! The workers: threads that claim, run a handler, and settle.
//!
//! A handler thread makes one commit per message: it settles the message before and claims the next one. So nothing is
//! ever held that is not being worked on, and there is nothing to give back when the process dies or is stopped. The commits
//! of all threads are combined by the writer.
//!
//! Of the threads without work one is the *scout*: it sleeps until something may be claimable (`waker`). If it gets a
//! message it wakes the next thread, which looks whether there is more, and so on; a hundred idle threads cost what one costs.
//!
//! One thread more, the *supervisor*, extends the leases of what is being worked on, tells handlers of their time limit, and
//! runs the store's schedules. Between queues the choice is by stride scheduling (Waldspurger and Weihl 1995).

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::de::DeserializeOwned;

use crate::cancel::{CancelReason, CancelToken};
use crate::claim::Claim;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::message::{MessageId, check_range};
use crate::options::check_lease;
use crate::outcome::Outcome;
use crate::receipt::Receipt;
use crate::sql::settle::{Settle, Settled};
use crate::state::Route;
use crate::store::Store;
use crate::waker::NAP_MAX;
use crate::worker::Worker;
use crate::writer::panic_message;

/// Most handlers that run at a time.
const CONCURRENCY_MAX: i32 = 1024;
/// Highest weight of a queue, and what a queue of that weight is charged for each message.
const WEIGHT_MAX: i32 = 1000;
const STRIDE: u64 = 1 << 20;
/// A lease is extended when this part of it is over.
const EXTEND_AT: u32 = 3;
/// How often the schedules are looked at at least: one that another process sets, and a clock that is set, wake nobody.
const TICK_LOOK: Duration = Duration::from_secs(1);
/// First and longest pause after an error of the store.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

type Handler = Box<dyn Fn(&Claim) -> Outcome + Send + Sync>;
type OnStart = Box<dyn Fn(&Claim) + Send + Sync>;
type OnFinish = Box<dyn Fn(&Claim, &Finished) + Send + Sync>;
type OnError = Box<dyn Fn(&Error) + Send + Sync>;
type OnEnd = Box<dyn Fn() + Send + Sync>;

/// Threads that work through queues until they are stopped.
///
/// They are one worker, of one label. While a handler runs, its claim's lease is extended, however long that takes. A panic of
/// a handler is a failure with the panic's message. Messages that have crashed before (their worker's process died, say) run one
/// at a time in a process, so that one that kills its process takes no others with it again and again.
///
/// Dropping the handle begins no new message, and waits for nothing; what is running goes on and is settled. Better call
/// [`Workers::stop`].
///
/// ```
/// use std::sync::mpsc;
/// use std::time::Duration;
/// use relet::{Claim, Message, Store, Workers};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Order { id: u32 }
///
/// let store = Store::open_in_memory()?;
/// store.queue("mail").enqueue("hello")?;
/// store.queue("orders").enqueue(Message::json(&Order { id: 42 })?)?;
///
/// let (done, all) = mpsc::channel();
/// let also = done.clone();
/// let workers = Workers::builder()
///     .label("worker-1")
///     .concurrency(4)
///     .queue("mail", move |claim: &Claim| done.send(claim.payload().len()))
///     .queue_json("orders", move |order: Order, _: &Claim| also.send(order.id as usize))
///     .weight("orders", 3)
///     .start(&store)?;
/// assert_eq!(all.recv().unwrap() + all.recv().unwrap(), 47);
/// assert!(workers.stop(Duration::from_secs(5)).interrupted.is_empty());
/// # Ok::<(), relet::Error>(())
/// ```
pub struct Workers {
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
}

/// How [`Workers`] are to work. The ways on are at the end: [`Builder::start`].
#[must_use = "a builder does nothing until it is started"]
pub struct Builder {
    label: Option<String>,
    queues: Vec<Served>,
    weights: Vec<(String, u32)>,
    concurrency: usize,
    lease: Option<Duration>,
    routes: Option<Vec<Route>>,
    time_limit: Option<Duration>,
    give_up_after: Option<Duration>,
    drain: bool,
    share: bool,
    hooks: Hooks,
}

#[derive(Default)]
struct Hooks {
    on_start: Vec<OnStart>,
    on_finish: Vec<OnFinish>,
    on_error: Vec<OnError>,
    on_end: Vec<OnEnd>,
}

struct Served {
    name: Arc<str>,
    weight: u32,
    handler: Handler,
}

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

/// How workers ended.
#[derive(Debug, Default)]
#[non_exhaustive]
#[must_use = "it says what was interrupted"]
pub struct Stopped {
    /// Messages whose handlers were still running at the deadline: released, with their attempt given back.
    pub interrupted: Vec<MessageId>,
    /// What had ended the workers before they were stopped, if something had.
    pub error: Option<Error>,
}

struct Pool {
    worker: Worker,
    queues: Vec<Served>,
    time_limit: Option<Duration>,
    give_up_after: Option<Duration>,
    drain: bool,
    hooks: Hooks,
    /// The pool's time: everything that is planned is planned on it.
    watch: Stopwatch,
    state: Mutex<State>,
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
    /// When the supervisor means to wake.
    wake_at: Duration,
    error: Option<Error>,
}

/// A claim whose handler runs, or which is being settled.
struct Running {
    receipt: Receipt,
    lease: Duration,
    cancel: CancelToken,
    extend_at: Duration,
    /// `None`: none, or it has been told.
    limit_at: Option<Duration>,
    give_up_at: Option<Duration>,
    /// The handler has returned.
    returned: bool,
}

/// A message whose handler has returned, and which is to be settled with the next step.
struct Worked {
    claim: Claim,
    outcome: Outcome,
    took: Duration,
}

impl Workers {
    /// How they are to work, to be said before they start.
    pub fn builder() -> Builder {
        Builder {
            label: None,
            queues: Vec::new(),
            weights: Vec::new(),
            concurrency: 1,
            lease: None,
            routes: None,
            time_limit: None,
            give_up_after: None,
            drain: false,
            share: false,
            hooks: Hooks::default(),
        }
    }

    /// Their label.
    pub fn label(&self) -> &str {
        self.pool.worker.label()
    }

    /// Waits until they have ended by themselves (drained, or by an error that does not pass), for at most `limit`. Returns
    /// whether they have.
    pub fn wait(&self, limit: Duration) -> bool {
        self.pool.wait_until_ended(limit)
    }

    /// Stops: no new message is begun; handlers that run are told ([`CancelReason::Stopping`]) and have until `deadline` from
    /// now on. What is still running then is released as interrupted: its attempt is given back and it is anyone's at once,
    /// and what its handler returns later changes nothing. (A thread cannot be ended from outside; it ends with its handler.)
    /// What has returned by then is settled before this returns, so that the process may end: that takes as long as the store
    /// makes it wait, at most the busy wait.
    pub fn stop(self, deadline: Duration) -> Stopped {
        self.pool.begin_stop(None);
        self.pool.wait_until_ended(deadline);
        let interrupted = self.pool.interrupt();
        self.pool.wait_until_settled();
        Stopped { interrupted, error: self.pool.state.lock().error.clone() }
    }

    fn spawn(&mut self, name: String, run: fn(&Pool)) -> Result<()> {
        let pool = self.pool.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&pool));
        self.threads.push(thread.map_err(|error| Error::Thread { detail: error.to_string() })?);
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.pool.begin_stop(None);
        // Where all have ended they are waited for to the last, so that the label is free again.
        if self.pool.wait_until_ended(Duration::ZERO) {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("label", &self.label()).finish_non_exhaustive()
    }
}

impl Builder {
    /// Their label, the same after every restart, see [`Store::worker`]; one that nobody else has unless set.
    pub fn label(self, label: impl Into<String>) -> Builder {
        Builder { label: Some(label.into()), ..self }
    }

    /// Works on this queue with this handler, which returns an [`Outcome`] or what turns into one: `()`, or a `Result`.
    pub fn queue<R: Into<Outcome>>(
        mut self,
        name: &str,
        handler: impl Fn(&Claim) -> R + Send + Sync + 'static,
    ) -> Builder {
        let handler: Handler = Box::new(move |claim| handler(claim).into());
        self.queues.push(Served { name: name.into(), weight: 1, handler });
        self
    }

    /// As [`Builder::queue`], with the payload read as the JSON of a `T`. One that is not has failed, with that as its error.
    pub fn queue_json<T: DeserializeOwned, R: Into<Outcome>>(
        self,
        name: &str,
        handler: impl Fn(T, &Claim) -> R + Send + Sync + 'static,
    ) -> Builder {
        self.queue(name, move |claim: &Claim| match claim.json() {
            Ok(value) => handler(value, claim).into(),
            Err(error) => Outcome::fail(format!("its payload cannot be read: {error}")),
        })
    }

    /// The queue's share, where several have messages: 3 gets three times as many as 1; 1 unless set, 1 to 1,000.
    pub fn weight(mut self, queue: &str, weight: u32) -> Builder {
        self.weights.push((queue.to_owned(), weight));
        self
    }

    /// How many handlers run at a time, each on a thread of its own; 1 unless set, 1 to 1,024.
    pub fn concurrency(self, handlers: usize) -> Builder {
        Builder { concurrency: handlers, ..self }
    }

    /// How long a claim holds without being extended, see [`Worker::lease`]; the queue's, else the store's unless set. It is extended
    /// each time a third of it is over, so it says how long a process that hangs keeps its messages.
    pub fn lease(self, lease: Duration) -> Builder {
        Builder { lease: Some(lease), ..self }
    }

    /// Only messages on these routes, see [`Worker::routes`]; all unless set.
    pub fn routes(self, routes: &[Route]) -> Builder {
        Builder { routes: Some(routes.to_vec()), ..self }
    }

    /// A handler that takes longer than this is told so, by its claim's [`CancelToken`]; never unless set. It keeps the
    /// message all the same: nobody else gets it while it is at work.
    pub fn time_limit(self, limit: Duration) -> Builder {
        Builder { time_limit: Some(limit), ..self }
    }

    /// After this time in a handler, the claim's lease is not extended any more: when it has run out, the message is anyone's, as
    /// one crash, although the handler may still be at work; never unless set.
    pub fn give_up_after(self, limit: Duration) -> Builder {
        Builder { give_up_after: Some(limit), ..self }
    }

    /// Ends by itself when nothing can be claimed and no handler runs; off unless set. What waits for its time is not waited
    /// for; where this process works on a message that has crashed before, the end of that is.
    pub fn drain(self, on: bool) -> Builder {
        Builder { drain: on, ..self }
    }

    /// Commands that the process runs inherit the worker's lock, see [`Worker::share_with_commands`]; off unless set.
    pub fn share_with_commands(self, on: bool) -> Builder {
        Builder { share: on, ..self }
    }

    /// Called on the handler's thread before each handler. Any number of them, in their order.
    pub fn on_start(mut self, hook: impl Fn(&Claim) + Send + Sync + 'static) -> Builder {
        self.hooks.on_start.push(Box::new(hook));
        self
    }

    /// Called on the handler's thread after each message was settled, or could not be. Any number of them, in their order.
    pub fn on_finish(mut self, hook: impl Fn(&Claim, &Finished) + Send + Sync + 'static) -> Builder {
        self.hooks.on_finish.push(Box::new(hook));
        self
    }

    /// Called with each error of the store that the workers meet, and go on after (with a pause of up to a second). Any number of them.
    pub fn on_error(mut self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Builder {
        self.hooks.on_error.push(Box::new(hook));
        self
    }

    /// Called once, when the last handler thread ends: they have drained, were stopped, or met an error that does not pass. For a
    /// program that waits for this and for other things, such as a signal; then it calls [`Workers::stop`]. Any number of them.
    pub fn on_end(mut self, hook: impl Fn() + Send + Sync + 'static) -> Builder {
        self.hooks.on_end.push(Box::new(hook));
        self
    }

    /// Starts the worker, then its threads.
    ///
    /// # Errors
    /// As [`Store::worker`]; [`Error::QueueName`] for a queue that is given twice, or a weight without its queue;
    /// [`Error::Range`] for no queue at all, and numbers out of range; [`Error::Thread`] where the system has no more threads.
    pub fn start(mut self, store: &Store) -> Result<Workers> {
        self.check()?;
        let mut worker = match &self.label {
            Some(label) => store.worker(label)?,
            None => store.worker_unnamed()?,
        };
        if let Some(lease) = self.lease {
            worker = worker.lease(lease)?;
        }
        if let Some(routes) = &self.routes {
            worker = worker.routes(routes);
        }
        if self.share {
            worker.share_with_commands()?;
        }
        let state = State {
            stopping: false,
            over: false,
            threads: self.concurrency,
            resting: 0,
            handling: 0,
            scouting: false,
            running: Vec::new(),
            passes: vec![0; self.queues.len()],
            wake_at: Duration::ZERO,
            error: None,
        };
        let mut workers = Workers {
            threads: Vec::with_capacity(self.concurrency + 1),
            pool: Arc::new(Pool {
                worker,
                queues: self.queues,
                time_limit: self.time_limit,
                give_up_after: self.give_up_after,
                drain: self.drain,
                hooks: self.hooks,
                watch: Stopwatch::start(),
                state: Mutex::new(state),
                rest: Condvar::new(),
                wake: Condvar::new(),
                ended: Condvar::new(),
            }),
        };
        // What is due is enqueued before anybody looks, so that a drain has it, too.
        workers.pool.tick(&mut HashSet::new());
        workers.spawn("relet-supervisor".into(), Pool::supervise)?;
        for thread in 0..self.concurrency {
            if let Err(error) = workers.spawn(format!("relet-handler-{thread}"), Pool::serve) {
                workers.pool.state.lock().threads = thread;
                return Err(error);
            }
        }
        Ok(workers)
    }

    fn check(&mut self) -> Result<()> {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        check_range("queues", count(self.queues.len()), 1, i32::MAX)?;
        check_range("concurrency", count(self.concurrency), 1, CONCURRENCY_MAX)?;
        self.lease.map_or(Ok(()), check_lease)?;
        let refused =
            |name: &str, problem| Error::QueueName { name: name.to_owned(), problem, limit: crate::message::NAME_MAX };
        let mut seen = HashSet::new();
        for queue in &self.queues {
            crate::message::check_name("queue", &queue.name)?;
            if !seen.insert(&queue.name) {
                return Err(refused(&queue.name, "has two handlers"));
            }
        }
        for (name, weight) in &self.weights {
            check_range("weight", i64::from(*weight), 1, WEIGHT_MAX)?;
            match self.queues.iter_mut().find(|queue| *queue.name == **name) {
                Some(queue) => queue.weight = *weight,
                None => return Err(refused(name, "has a weight, but no handler")),
            }
        }
        Ok(())
    }
}

impl Pool {
    /// A handler thread.
    fn serve(&self) {
        let store = self.worker.store();
        let mut worked: Option<Worked> = None;
        // Held while this thread works on a message that has crashed before.
        let mut risk: Option<MutexGuard<'_, ()>> = None;
        let mut pause = PAUSE.0;
        loop {
            let seen = store.commits();
            let order = self.order();
            if order.is_empty() && worked.is_none() {
                break;
            }
            risk = risk.or_else(|| store.risk().try_lock());
            let settle = worked.as_ref().and_then(|worked| Some((worked.claim.receipt(), worked.outcome.settle()?)));
            let names = order.iter().map(|at| self.queues[*at].name.clone()).collect();
            let step = match self.worker.crashed(risk.is_some()).step(settle.clone(), names) {
                Ok(step) => step,
                Err(error) => {
                    self.met(&error);
                    // Whatever keeps it from claiming, what was done is to be settled.
                    if let Some(worked) = worked.take() {
                        let settled =
                            settle.map_or(Ok(Settled::Gone), |(receipt, how)| self.settle_alone(receipt, how));
                        self.finish(worked, settled);
                    }
                    risk = None;
                    self.pause(pause);
                    pause = (pause * 2).min(PAUSE.1);
                    continue;
                }
            };
            pause = PAUSE.0;
            if let Some(worked) = worked.take() {
                self.finish(worked, step.settled.unwrap_or(Ok(Settled::Gone)));
            }
            match step.taken {
                Some((place, taken)) => {
                    if taken.record.crashes == 0 {
                        risk = None;
                    }
                    self.charge(&order[..=place]);
                    let at = order[place];
                    let claim = Claim::new(self.worker.clone(), &self.queues[at].name, taken);
                    if self.begin(&claim) {
                        worked = Some(self.work(claim, at));
                    } else {
                        // It was claimed while the pool was being stopped.
                        let _ = self.settle_alone(claim.receipt(), Settle::Release);
                    }
                }
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
            self.hooks.on_end.iter().for_each(guarded);
        } else if state.over {
            self.ended.notify_all();
        }
    }

    /// The queues in the order in which they are to be tried; none when nothing new is to be begun.
    fn order(&self) -> Vec<usize> {
        let state = self.state.lock();
        if state.stopping {
            return Vec::new();
        }
        let mut order: Vec<usize> = (0..self.queues.len()).collect();
        order.sort_by_key(|at| state.passes[*at]);
        order
    }

    /// The last of these queues had a message, the others had none: they do not save up for later.
    fn charge(&self, tried: &[usize]) {
        let Some((served, empty)) = tried.split_last() else { return };
        let mut state = self.state.lock();
        let pass = state.passes[*served];
        for at in empty {
            state.passes[*at] = state.passes[*at].max(pass);
        }
        state.passes[*served] = pass + STRIDE / u64::from(self.queues[*served].weight);
    }

    /// Runs the handler, watched by the supervisor.
    fn work(&self, claim: Claim, at: usize) -> Worked {
        let cancel = claim.cancel_token();
        for hook in &self.hooks.on_start {
            guarded(|| hook(&claim));
        }
        let watch = Stopwatch::start();
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.queues[at].handler)(&claim)))
            .unwrap_or_else(|panic| Outcome::fail(format!("panicked: {}", panic_message(&*panic))));
        let took = watch.elapsed();
        let outcome = match outcome {
            // It failed because it was told to stop, or may have: that is not the message's fault.
            Outcome::Fail { .. } if cancel.reason() == Some(CancelReason::Stopping) => Outcome::Release,
            outcome => outcome,
        };
        let mut state = self.state.lock();
        state.handling -= 1;
        if let Some(running) = state.running.iter_mut().find(|running| running.receipt == claim.receipt()) {
            running.returned = true;
        }
        drop(state);
        Worked { claim, outcome, took }
    }

    /// From now on the supervisor looks after this claim. Not so, and it is not to be worked on, if the pool is being stopped.
    fn begin(&self, claim: &Claim) -> bool {
        let now = self.watch.elapsed();
        let running = Running {
            receipt: claim.receipt(),
            lease: claim.lease(),
            cancel: claim.cancel_token().clone(),
            extend_at: now + claim.lease() / EXTEND_AT,
            limit_at: [self.time_limit, self.give_up_after].into_iter().flatten().min().map(|limit| now + limit),
            give_up_at: self.give_up_after.map(|limit| now + limit),
            returned: false,
        };
        let mut state = self.state.lock();
        if state.stopping {
            return false;
        }
        if running.next() < state.wake_at {
            self.wake.notify_one();
        }
        state.running.push(running);
        state.handling += 1;
        if state.resting > 0 {
            self.rest.notify_one(); // There may be more.
        }
        true
    }

    fn finish(&self, worked: Worked, settled: Result<Settled>) {
        self.state.lock().running.retain(|running| running.receipt != worked.claim.receipt());
        let finished = Finished { outcome: worked.outcome, took: worked.took, settled };
        for hook in &self.hooks.on_finish {
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
        if self.drain && saw_all && state.resting == state.threads {
            drop(state);
            self.begin_stop(None);
            state = self.state.lock();
        } else if state.scouting {
            self.rest.wait(&mut state);
        } else {
            state.scouting = true;
            drop(state);
            let names = self.queues.iter().map(|queue| &*queue.name);
            let slept = self.worker.store().sleep(names, seen, NAP_MAX);
            if let Err(error) = slept {
                self.met(&error);
                self.pause(PAUSE.1);
            }
            state = self.state.lock();
            state.scouting = false;
        }
        state.resting -= 1;
    }

    /// After an error: a while, or until the pool is stopped.
    fn pause(&self, pause: Duration) {
        let mut state = self.state.lock();
        if !state.stopping {
            let _ = self.ended.wait_for(&mut state, pause);
        }
    }

    fn met(&self, error: &Error) {
        for hook in &self.hooks.on_error {
            guarded(|| hook(error));
        }
        if is_final(error) {
            self.begin_stop(Some(error));
        }
    }

    /// Begins nothing new, and tells those who are at work.
    fn begin_stop(&self, error: Option<&Error>) {
        let mut state = self.state.lock();
        state.stopping = true;
        if state.error.is_none() {
            state.error = error.cloned();
        }
        for running in &state.running {
            running.cancel.set(CancelReason::Stopping);
        }
        self.rest.notify_all();
        self.ended.notify_all();
        drop(state);
        self.worker.store().ring();
    }

    fn wait_until_ended(&self, limit: Duration) -> bool {
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
    fn wait_until_settled(&self) {
        let (watch, limit) = (Stopwatch::start(), self.worker.store().options_used().busy_wait);
        let mut state = self.state.lock();
        let settling = !state.running.is_empty();
        while settling && state.threads > state.handling {
            let left = limit.saturating_sub(watch.elapsed());
            if left.is_zero() {
                return;
            }
            let _ = self.ended.wait_for(&mut state, left);
        }
    }

    /// Releases what is still running. What has returned is just being settled, and is left to that.
    fn interrupt(&self) -> Vec<MessageId> {
        let mut receipts = Vec::new();
        {
            let mut state = self.state.lock();
            state.over = true;
            state.running.retain(|running| {
                if !running.returned {
                    receipts.push(running.receipt);
                }
                running.returned
            });
        }
        if receipts.is_empty() {
            return Vec::new();
        }
        let released = self.worker.store().settle_all(receipts.iter().map(|receipt| (*receipt, Settle::Release)));
        match released {
            Ok(outcomes) => {
                let released = |(receipt, outcome): (&Receipt, &Result<Settled>)| {
                    matches!(outcome, Ok(Settled::Now(_))).then(|| receipt.id())
                };
                receipts.iter().zip(&outcomes).filter_map(released).collect()
            }
            Err(error) => {
                self.met(&error); // Their leases end what could not be released.
                self.state.lock().error.get_or_insert(error);
                receipts.iter().map(|receipt| receipt.id()).collect()
            }
        }
    }

    /// The supervisor's thread: ends after the last handler thread.
    fn supervise(&self) {
        let mut tick_at = Duration::ZERO;
        let mut failing = HashSet::new();
        let mut state = self.state.lock();
        while state.threads > 0 {
            let now = self.watch.elapsed();
            if tick_at <= now {
                let next = match state.stopping {
                    true => TICK_LOOK,
                    false => MutexGuard::unlocked(&mut state, || self.tick(&mut failing)),
                };
                tick_at = self.watch.elapsed() + next;
                continue;
            }
            let mut due = Vec::new();
            for running in &mut state.running {
                if running.limit_at.is_some_and(|at| at <= now) {
                    running.limit_at = None;
                    running.cancel.set(CancelReason::TimeLimit);
                }
                if running.extend_at <= now {
                    running.extend_at = now + running.lease / EXTEND_AT;
                    if running.give_up_at.is_none_or(|at| now < at) {
                        due.push((running.receipt, Settle::Extend { lease: running.lease }));
                    }
                }
            }
            if !due.is_empty() {
                MutexGuard::unlocked(&mut state, || self.extend(due));
                continue;
            }
            let next = state.running.iter().map(Running::next).fold(tick_at, Duration::min);
            state.wake_at = next;
            let _ = self.wake.wait_for(&mut state, next.saturating_sub(now));
        }
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
        let receipts: Vec<Receipt> = due.iter().map(|(receipt, _)| *receipt).collect();
        match self.worker.store().settle_all(due) {
            Ok(outcomes) => {
                let state = self.state.lock();
                for (receipt, _) in receipts.iter().zip(outcomes).filter(|(_, outcome)| outcome.is_err()) {
                    // What has returned may just have been settled.
                    let mut running = state.running.iter().filter(|running| !running.returned);
                    if let Some(running) = running.find(|running| running.receipt == *receipt) {
                        running.cancel.set(CancelReason::Lost);
                    }
                }
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

/// A hook that panics is not to end its thread.
fn guarded(hook: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(hook));
}
