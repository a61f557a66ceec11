//! The queue: a named line of messages, and the way into it.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;

use crate::clock::{INSTANT_MAX, millis};
use crate::error::Result;
use crate::message::{Enqueued, Message, check_name, check_range};
use crate::options::check_lease;
use crate::retry::Retry;
use crate::spool::{Spooled, spool};
use crate::sql::queues::Own;
use crate::sql::{self, Tx};
use crate::store::Store;
use crate::ticket::Ticket;
use crate::writer::Need;

/// A queue of a store. Cheap to clone, and to make: it holds no resources.
#[derive(Debug, Clone)]
pub struct Queue {
    store: Store,
    name: Arc<str>,
}

/// What a queue says of its messages where they say nothing themselves; stored in the file, for all processes.
///
/// ```
/// use std::time::Duration;
/// use relet::{QueueDefaults, Retry, Store};
///
/// let store = Store::open_in_memory()?;
/// store.queue("mail").set_defaults(
///     QueueDefaults::new().max_attempts(5).lease(Duration::from_secs(300)).retry(Retry::fixed(Duration::from_secs(30))),
/// )?;
/// # Ok::<(), relet::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[must_use = "defaults do nothing until a queue is given them"]
pub struct QueueDefaults {
    max_attempts: Option<u32>,
    lease: Option<Duration>,
    retry: Option<Retry>,
    gate: Option<String>,
    ageing: Option<Duration>,
}

impl QueueDefaults {
    /// None of its own: the store's apply.
    pub fn new() -> QueueDefaults {
        QueueDefaults::default()
    }

    /// How often a message is tried. Applies to messages that are enqueued from then on.
    pub fn max_attempts(self, max: u32) -> QueueDefaults {
        QueueDefaults { max_attempts: Some(max), ..self }
    }

    /// How long a claim holds, unless its worker says otherwise.
    pub fn lease(self, lease: Duration) -> QueueDefaults {
        QueueDefaults { lease: Some(lease), ..self }
    }

    /// How failed messages back off.
    pub fn retry(self, retry: Retry) -> QueueDefaults {
        QueueDefaults { retry: Some(retry), ..self }
    }

    /// The gate of messages that name none. Applies to messages that are enqueued from then on.
    pub fn gate(self, gate: impl Into<String>) -> QueueDefaults {
        QueueDefaults { gate: Some(gate.into()), ..self }
    }

    /// Ageing: each time this long has passed since a message was enqueued, it counts as one priority higher, so that low
    /// priority ends; strict priority unless set, at least 1 ms. A claim then looks at each priority that is in use, some µs each:
    /// use few.
    pub fn ageing(self, step: Duration) -> QueueDefaults {
        QueueDefaults { ageing: Some(step), ..self }
    }
}

impl Queue {
    pub(crate) fn new(store: Store, name: &str) -> Queue {
        Queue { store, name: name.into() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Stores a message. When it returns, the message is on disk (with the default durability).
    ///
    /// # Errors
    /// [`Error::PayloadTooLarge`](crate::Error::PayloadTooLarge), [`Error::QueueName`](crate::Error::QueueName),
    /// [`Error::Text`](crate::Error::Text) and [`Error::Range`](crate::Error::Range) for what no store accepts;
    /// [`Error::Full`](crate::Error::Full); [`Error::Busy`](crate::Error::Busy). After
    /// [`Error::Indeterminate`](crate::Error::Indeterminate), a message with a key can safely be enqueued again.
    pub fn enqueue(&self, message: impl Into<Message>) -> Result<Enqueued> {
        let message = message.into();
        self.check(std::slice::from_ref(&message))?;
        let queue = self.name.clone();
        self.store.write(Need::Enqueue, move |tx| sql::enqueue::enqueue(tx, &queue, &message))
    }

    /// As [`Queue::enqueue`], and does not wait: the message is laid down in memory, and shares a commit with what comes after it,
    /// so that one producer needs no `fsync` for each. See [`Ticket`] for when it is carried out.
    ///
    /// ```
    /// use relet::Store;
    ///
    /// let store = Store::open_in_memory()?;
    /// let queue = store.queue("mail");
    /// let first = queue.enqueue_deferred("a")?;
    /// let second = queue.enqueue_deferred("b")?;
    /// let third = queue.enqueue("c")?; // after both of them, in the same commit
    /// assert!(first.wait()?.id() < second.wait()?.id());
    /// assert_eq!(third.id().get(), 3);
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Queue::enqueue`] for what no store accepts, at once; whatever comes after that is told by the ticket.
    pub fn enqueue_deferred(&self, message: impl Into<Message>) -> Result<Ticket<Enqueued>> {
        let message = message.into();
        self.check(std::slice::from_ref(&message))?;
        let (queue, bytes) = (self.name.clone(), message.payload.len());
        self.store.defer(Need::Enqueue, bytes, move |tx| sql::enqueue::enqueue(tx, &queue, &message))
    }

    /// Stores a message whose payload is what a stream gives up to its end, in place of the message's own.
    ///
    /// A stream above 64 KiB goes through a temporary file without a name, in the folder of the store (for a store in memory, in
    /// the system's folder for these), so that no more than 128 KiB of it are in memory at a time, and that a slow stream holds
    /// nobody up. It is read on the caller's thread, no further than one byte above [`Options::payload_max`](crate::Options::payload_max).
    ///
    /// ```
    /// use std::io::Read;
    /// use relet::{Message, Store};
    ///
    /// let store = Store::open_in_memory()?;
    /// let scan = std::io::repeat(7).take(1 << 20); // a file, a socket, a decoder …
    /// store.queue("scans").enqueue_from(Message::new("").priority(5), scan)?;
    /// assert_eq!(store.worker("scanner-1")?.claim("scans")?.expect("it is there").payload(), [7; 1 << 20]);
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Queue::enqueue`]; [`Error::Stream`](crate::Error::Stream) where the stream or the temporary file has failed. A panic
    /// of the stream is the caller's. In all these cases nothing was stored.
    pub fn enqueue_from(&self, message: impl Into<Message>, mut stream: impl Read) -> Result<Enqueued> {
        let mut message = Message { payload: Vec::new(), ..message.into() };
        self.check(std::slice::from_ref(&message))?;
        let folder = self.store.writable_path()?.and_then(|path| path.parent().map(PathBuf::from));
        let folder = folder.unwrap_or_else(std::env::temp_dir);
        match spool(&mut stream, &folder, self.store.options_used().payload_max)? {
            Spooled::Memory(payload) => {
                message.payload = payload;
                self.enqueue(message)
            }
            Spooled::File(mut spool) => {
                let queue = self.name.clone();
                self.store
                    .write(Need::Enqueue, move |tx| sql::enqueue::enqueue_spooled(tx, &queue, &message, &mut spool))
            }
        }
    }

    /// Stores all these messages in one commit, or none of them. Their ids are in the order of the messages.
    ///
    /// # Errors
    /// As [`Queue::enqueue`]; one message that is refused refuses all.
    pub fn enqueue_all<M: Into<Message>>(&self, messages: impl IntoIterator<Item = M>) -> Result<Vec<Enqueued>> {
        let messages: Vec<Message> = messages.into_iter().map(Into::into).collect();
        self.check(&messages)?;
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let queue = self.name.clone();
        self.store.write(Need::Enqueue, move |tx| sql::enqueue::enqueue_all(tx, &queue, &messages))
    }

    /// Stores a message in the application's own transaction on the same file: it is there if and only if that commits, with the durability of that connection.
    ///
    /// ```
    /// use relet::rusqlite::{Connection, TransactionBehavior};
    /// use relet::Store;
    ///
    /// # let dir = std::env::temp_dir().join(format!("relet-doc-in-{}", std::process::id()));
    /// # std::fs::create_dir_all(&dir).unwrap();
    /// # let path = dir.join("app.db");
    /// let store = Store::open(&path)?;
    /// let mut conn = Connection::open(&path)?;
    /// conn.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY)")?;
    ///
    /// let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    /// tx.execute("INSERT INTO orders DEFAULT VALUES", [])?;
    /// store.queue("mail").enqueue_in(&tx, "order 1 is placed")?;
    /// tx.commit()?;
    /// # drop((conn, store));
    /// # std::fs::remove_dir_all(dir).unwrap();
    /// # Ok::<(), relet::Error>(())
    /// ```
    ///
    /// It comes before what was laid down with a [`Ticket`] that nobody has waited for yet.
    ///
    /// # Errors
    /// As [`Queue::enqueue`]; [`Error::WrongFile`](crate::Error::WrongFile) and
    /// [`Error::NotImmediate`](crate::Error::NotImmediate) for a connection that cannot be joined.
    pub fn enqueue_in(&self, conn: &Connection, message: impl Into<Message>) -> Result<Enqueued> {
        let message = message.into();
        self.check(std::slice::from_ref(&message))?;
        self.store.join(conn, |tx| sql::enqueue::enqueue(tx, &self.name, &message))
    }

    /// Gives the queue its own defaults, in place of those it had.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) for what is out of range.
    pub fn set_defaults(&self, defaults: QueueDefaults) -> Result<()> {
        if let Some(max) = defaults.max_attempts {
            check_range("max_attempts", i64::from(max), 1, i32::MAX)?;
        }
        if let Some(lease) = defaults.lease {
            check_lease(lease)?;
        }
        if let Some(gate) = &defaults.gate {
            check_name("gate", gate)?;
        }
        if let Some(step) = defaults.ageing {
            check_range("ageing in ms", millis(step), 1, i32::MAX)?;
        }
        let own = Own {
            max_attempts: defaults.max_attempts,
            lease_ms: defaults.lease.map(millis),
            retry: defaults.retry.as_ref().map(serde_json::to_string).transpose()?,
            gate: defaults.gate,
            ageing_ms: defaults.ageing.map(millis),
        };
        self.change(move |tx, name| sql::queues::configure(tx, name, &own))
    }

    /// Pauses the queue, for all processes, until [`Queue::resume`]: nothing of it is handed out. Enqueueing, settling and
    /// what is being worked on go on.
    ///
    /// # Errors
    /// [`Error::QueueName`](crate::Error::QueueName), [`Error::Busy`](crate::Error::Busy).
    pub fn pause(&self) -> Result<()> {
        self.change(|tx, name| sql::queues::pause(tx, name, INSTANT_MAX))
    }

    /// As [`Queue::pause`], and goes on by itself after this much time, if it is not paused for longer already.
    ///
    /// # Errors
    /// As [`Queue::pause`].
    pub fn pause_for(&self, delay: Duration) -> Result<()> {
        self.change(move |tx, name| sql::queues::pause(tx, name, tx.now.after(delay)))
    }

    /// Goes on after a pause, at once.
    ///
    /// # Errors
    /// As [`Queue::pause`].
    pub fn resume(&self) -> Result<()> {
        self.change(|tx, name| sql::queues::resume(tx, name))
    }

    fn change(&self, change: impl Fn(&mut Tx<'_>, &str) -> Result<()> + Send + 'static) -> Result<()> {
        check_name("queue", &self.name)?;
        let name = self.name.clone();
        self.store.write(Need::Settle, move |tx| change(tx, &name))
    }

    fn check(&self, messages: &[Message]) -> Result<()> {
        check_name("queue", &self.name)?;
        let payload_max = self.store.options_used().payload_max;
        messages.iter().try_for_each(|message| message.check(payload_max))
    }
}
