//! The workers: how a program says what is to be worked on, and how it ends that.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::de::DeserializeOwned;

#[allow(unused_imports, reason = "named by the documentation")]
use crate::cancel::{CancelReason, CancelToken};
use crate::claim::Claim;
use crate::error::{Error, Result};
use crate::message::{MessageId, NAME_MAX, check_name, check_range};
use crate::options::check_lease;
use crate::outcome::Outcome;
use crate::pool::{Finished, Handler, Plan, Pool, Served};
use crate::state::Route;
use crate::store::Store;
use crate::worker::Worker;

/// Most handlers that run at a time.
const CONCURRENCY_MAX: i32 = 1024;
/// How often a start is tried, for the busy wait each time, that only finds the file locked: of many that start together, each is to live.
const START_TRIES: u32 = 6;
/// Highest weight of a queue.
const WEIGHT_MAX: i32 = 1000;

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
    weights: Vec<(String, u32)>,
    concurrency: usize,
    lease: Option<Duration>,
    routes: Option<Vec<Route>>,
    share: bool,
    plan: Plan,
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

impl Workers {
    /// How they are to work, to be said before they start.
    pub fn builder() -> Builder {
        Builder {
            label: None,
            weights: Vec::new(),
            concurrency: 1,
            lease: None,
            routes: None,
            share: false,
            plan: Plan::default(),
        }
    }

    /// Their label.
    pub fn label(&self) -> &str {
        self.pool.worker().label()
    }

    /// Waits until they have ended by themselves (drained, or by an error that does not pass), for at most `limit`. Returns
    /// whether they have.
    pub fn wait(&self, limit: Duration) -> bool {
        self.pool.is_inherited() || self.pool.wait_until_ended(limit)
    }

    /// Stops: no new message is begun; handlers that run are told ([`CancelReason::Stopping`]) and have until `deadline` from
    /// now on. What is still running then is released as interrupted: its attempt is given back and it is anyone's at once,
    /// and what its handler returns later changes nothing. (A thread cannot be ended from outside; it ends with its handler.)
    /// What has returned by then is settled before this returns, so that the process may end: that takes as long as the store
    /// makes it wait, at most the busy wait.
    pub fn stop(self, deadline: Duration) -> Stopped {
        if let Err(error) = self.pool.worker().store().check_process() {
            return Stopped { error: Some(error), ..Stopped::default() };
        }
        self.pool.begin_stop(None);
        self.pool.wait_until_ended(deadline);
        let interrupted = self.pool.interrupt();
        self.pool.wait_until_settled();
        Stopped { interrupted, error: self.pool.error() }
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
        if self.pool.is_inherited() {
            std::mem::forget(std::mem::take(&mut self.threads)); // They are the parent's.
            return;
        }
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
        self.plan.queues.push(Served { name: name.into(), weight: 1, handler });
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
    pub fn time_limit(mut self, limit: Duration) -> Builder {
        self.plan.time_limit = Some(limit);
        self
    }

    /// After this time in a handler, the claim's lease is not extended any more: when it has run out, the message is anyone's, as
    /// one crash, although the handler may still be at work; never unless set.
    pub fn give_up_after(mut self, limit: Duration) -> Builder {
        self.plan.give_up_after = Some(limit);
        self
    }

    /// Ends by itself when nothing can be claimed and no handler runs; off unless set. What waits for its time is not waited
    /// for; where this process works on a message that has crashed before, the end of that is.
    pub fn drain(mut self, on: bool) -> Builder {
        self.plan.drain = on;
        self
    }

    /// Commands that the process runs inherit the worker's lock, see [`Worker::share_with_commands`]; off unless set.
    pub fn share_with_commands(self, on: bool) -> Builder {
        Builder { share: on, ..self }
    }

    /// Called on the handler's thread before each handler. Any number of them, in their order.
    pub fn on_start(mut self, hook: impl Fn(&Claim) + Send + Sync + 'static) -> Builder {
        self.plan.hooks.on_start.push(Box::new(hook));
        self
    }

    /// Called on the handler's thread after each message was settled, or could not be. Any number of them, in their order.
    pub fn on_finish(mut self, hook: impl Fn(&Claim, &Finished) + Send + Sync + 'static) -> Builder {
        self.plan.hooks.on_finish.push(Box::new(hook));
        self
    }

    /// Called with each error of the store that the workers meet, and go on after (with a pause of up to a second). Any number of them.
    pub fn on_error(mut self, hook: impl Fn(&Error) + Send + Sync + 'static) -> Builder {
        self.plan.hooks.on_error.push(Box::new(hook));
        self
    }

    /// Called once, when the last handler thread ends: they have drained, were stopped, or met an error that does not pass. For a
    /// program that waits for this and for other things, such as a signal; then it calls [`Workers::stop`]. Any number of them.
    pub fn on_end(mut self, hook: impl Fn() + Send + Sync + 'static) -> Builder {
        self.plan.hooks.on_end.push(Box::new(hook));
        self
    }

    /// Starts the worker, then its threads.
    ///
    /// # Errors
    /// As [`Store::worker`], which is tried for six times the busy wait; [`Error::QueueName`] for a queue that is given twice, or a weight without its queue;
    /// [`Error::Range`] for no queue at all, and numbers out of range; [`Error::Thread`] where the system has no more threads.
    pub fn start(mut self, store: &Store) -> Result<Workers> {
        self.check()?;
        let mut worker = self.start_worker(store)?;
        if let Some(lease) = self.lease {
            worker = worker.lease(lease)?;
        }
        if let Some(routes) = &self.routes {
            worker = worker.routes(routes);
        }
        if self.share {
            worker.share_with_commands()?;
        }
        let mut workers = Workers {
            threads: Vec::with_capacity(self.concurrency + 2),
            pool: Arc::new(Pool::new(worker, self.plan, self.concurrency)),
        };
        workers.pool.first_tick();
        workers.spawn("relet-supervisor".into(), Pool::supervise)?;
        workers.spawn("relet-schedules".into(), Pool::run_schedules)?;
        for thread in 0..self.concurrency {
            if let Err(error) = workers.spawn(format!("relet-handler-{thread}"), Pool::serve) {
                workers.pool.lacks(self.concurrency - thread);
                return Err(error);
            }
        }
        Ok(workers)
    }

    fn start_worker(&self, store: &Store) -> Result<Worker> {
        let mut tries = 1;
        loop {
            let started = match &self.label {
                Some(label) => store.worker(label),
                None => store.worker_unnamed(),
            };
            match started {
                Err(Error::Busy { .. }) if tries < START_TRIES => tries += 1,
                started => return started,
            }
        }
    }

    fn check(&mut self) -> Result<()> {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        check_range("queues", count(self.plan.queues.len()), 1, i32::MAX)?;
        check_range("concurrency", count(self.concurrency), 1, CONCURRENCY_MAX)?;
        self.lease.map_or(Ok(()), check_lease)?;
        let refused = |name: &str, problem| Error::QueueName { name: name.to_owned(), problem, limit: NAME_MAX };
        let mut seen = HashSet::new();
        for queue in &self.plan.queues {
            check_name("queue", &queue.name)?;
            if !seen.insert(&queue.name) {
                return Err(refused(&queue.name, "has two handlers"));
            }
        }
        for (name, weight) in &self.weights {
            check_range("weight", i64::from(*weight), 1, WEIGHT_MAX)?;
            match self.plan.queues.iter_mut().find(|queue| *queue.name == **name) {
                Some(queue) => queue.weight = *weight,
                None => return Err(refused(name, "has a weight, but no handler")),
            }
        }
        Ok(())
    }
}
