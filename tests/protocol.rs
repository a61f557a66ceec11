//! The claim protocol as a small model, explored exhaustively.
//!
//! DESIGN.md promises that nothing is lost, nothing is stuck, and nobody works on another's message. These promises
//! rest on some two dozen rules, most of which look dispensable until the one order of events comes along that needs
//! them. So this file holds the protocol once more, as plain values without SQLite, threads or clocks, and visits every
//! state that any order of events can lead to: claims, settles, time, deaths, restarts, power losses. At each step it
//! asks whether a promise is broken, and if so, it tells the shortest run that leads there.
//!
//! It is read from the top down:
//!
//! 1. the rules, each of which can be switched off;
//! 2. the state: messages, the store, its copy on the disk, and the world around them;
//! 3. the operations, as relet carries them out, one function each;
//! 4. the events: what can happen next;
//! 5. the promises, which are judged by what really happened, not by what the store knows of it;
//! 6. the explorer;
//! 7. the tests: **with all rules every promise holds, and without any one of them some promise is broken.** The second
//!    half keeps the first one honest: a model that cannot fail proves nothing, and a rule that nothing needs can go.
//!
//! Where the model is simpler than the code, it is so by allowing more: `claim next` may hand out any message that is
//! claimable, and takes each void claim back in a commit of its own. What the protocol does not depend on is left out:
//! payloads, priorities, routes, gates, expiry and pruning; so are claims from a command line, which have only a lease.
//!
//! Change the protocol here first, and in the code once this file is green. `cargo test --test protocol -- --nocapture`
//! shows how many states there are, and what happens without each rule.

use std::collections::HashSet;
use std::fmt;

// ---- 1. Rules

/// What the protocol does to keep its promises. Each rule has a test at the end that shows what it is good for.
#[derive(Clone, Copy)]
struct Rules {
    /// A message in `processing` can be claimed again by the worker whose own it is.
    self_reclaim: bool,
    /// Nobody else takes a message in `processing` unless its claim is void: its lease has run out, or its worker is
    /// gone.
    only_void_claims_are_taken: bool,
    /// `claim next` does not hand out what the same worker is still busy with.
    next_skips_own_work: bool,
    /// A deferred message is kept for its worker until due + grace, as long as that worker is registered …
    deferred_is_kept: bool,
    /// … and no longer.
    grace_ends: bool,
    /// Whoever takes a void claim counts a crash, be it its own worker or another.
    void_is_a_crash: bool,
    /// What lay deferred while its worker restarted has not crashed.
    deferred_cannot_crash: bool,

    /// A settle compares the receipt, not the worker's name.
    settle_compares_receipts: bool,
    /// A deferred message has no valid receipt until it is claimed again.
    deferred_has_no_receipt: bool,
    /// A claim whose lease has run out can still be settled, until somebody takes the message.
    late_holder_settles: bool,
    /// Every successful claim issues a new token, also the claim of what one holds already.
    claim_issues_token: bool,
    /// So does taking a message from its holder, and cancelling it: the late holder must not be told that it has
    /// settled the message itself.
    withdrawal_issues_token: bool,
    /// Each boot raises the store's epoch, before the first claim.
    boot_raises_epoch: bool,
    /// Every new token is issued in the store's epoch, also one that nobody gets a receipt for.
    token_carries_epoch: bool,

    /// A message that has spent its attempts is given up.
    attempts_are_limited: bool,
    /// A message that has spent its crashes is given up.
    crashes_are_limited: bool,
    /// A message that has spent its deferrals is given up.
    deferrals_are_limited: bool,
    /// A message that has spent its releases is given up.
    releases_are_limited: bool,
    /// But not by a claim of what one holds already: that one is refused.
    resume_spares_holder: bool,
    /// A redriven message has all its budgets again.
    redrive_resets_budgets: bool,
    /// A dead letter is not redriven while a live message has its key.
    redrive_respects_key: bool,

    /// A group's turn belongs to its member in `processing` …
    processing_has_turn: bool,
    /// … and if there is none, to the oldest.
    oldest_has_turn: bool,

    /// Enqueue, settle, cancel and redrive are on the disk when they return.
    answers_are_durable: bool,
    /// So are claims of messages that were in the file at the last boot.
    marked_claims_are_durable: bool,
}

impl Rules {
    /// The protocol as it is.
    fn relet() -> Rules {
        Rules {
            self_reclaim: true,
            only_void_claims_are_taken: true,
            next_skips_own_work: true,
            deferred_is_kept: true,
            grace_ends: true,
            void_is_a_crash: true,
            deferred_cannot_crash: true,
            settle_compares_receipts: true,
            deferred_has_no_receipt: true,
            late_holder_settles: true,
            claim_issues_token: true,
            withdrawal_issues_token: true,
            boot_raises_epoch: true,
            token_carries_epoch: true,
            attempts_are_limited: true,
            crashes_are_limited: true,
            deferrals_are_limited: true,
            releases_are_limited: true,
            resume_spares_holder: true,
            redrive_resets_budgets: true,
            redrive_respects_key: true,
            processing_has_turn: true,
            oldest_has_turn: true,
            answers_are_durable: true,
            marked_claims_are_durable: true,
        }
    }
}

// ---- 2. State

/// Messages that a world has room for.
const MESSAGES: usize = 2;

/// A message, by its place in [`Store::messages`].
type Id = usize;

/// The name of a worker. Two are enough for each to have another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Label {
    A,
    B,
}

const LABELS: [Label; 2] = [Label::A, Label::B];

/// One start of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Worker {
    label: Label,
    incarnation: u8,
}

/// The status of a message, with what is known of it in this status only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
enum Status {
    /// Not enqueued yet.
    #[default]
    Absent,
    /// Claimable, on whichever route.
    Ready,
    /// Failed, and due later.
    Backoff,
    /// `processing`, with a lease.
    Held { by: Worker, lease: Lease },
    /// `processing`, without a lease: put off, and kept for its worker.
    Deferred { by: Worker, due: Due },
    /// Acked.
    Done,
    /// Given up.
    Dead,
    /// Cancelled.
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Lease {
    Runs,
    RunOut,
    /// Ended by a restart of its worker or of the machine.
    Voided,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Due {
    Later,
    Now,
    GraceOver,
}

/// What a message has cost, or may cost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Budgets {
    attempts: u8,
    crashes: u8,
    deferrals: u8,
    releases: u8,
}

/// A row of the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Message {
    status: Status,
    token: u8,
    epoch: u8,
    spent: Budgets,
    /// The number of its last claim. This and what follows are not in the row: the promises are judged by them.
    claim: u8,
    /// Whether that claim was ended by its own receipt.
    is_settled: bool,
    /// Claims since it was enqueued or redriven.
    rounds: u8,
}

/// The right to settle a claim, with the claim that it was issued for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Receipt {
    id: Id,
    token: u8,
    epoch: u8,
    label: Label,
    claim: u8,
}

/// What is in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Store {
    messages: [Message; MESSAGES],
    epoch: u8,
    /// How many messages there were at the last boot; it stands for the largest of their ids.
    boot_mark: usize,
}

/// The newest process of a label. Its predecessors may still be there, but all that they can do is settle.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Process {
    incarnation: u8,
    /// Whether the store knows it as the present one. A boot forgets that, so it is no matter what the disk says.
    is_registered: bool,
    is_running: bool,
}

/// The store, and everything around it that can change.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    /// The store as everybody sees it.
    store: Store,
    /// The store as a power loss would leave it.
    disk: Store,
    processes: [Process; LABELS.len()],
    /// One receipt that somebody has noted down, in a shell or on another machine, and may use at any time.
    ///
    /// One is enough, since it can be any: whichever receipt does harm first is the noted one in some run.
    noted: Option<Receipt>,
    /// Claims that were ever made, also those that a power loss has undone.
    claims: u8,
    /// How often each message was being worked on when the power failed.
    power_losses: [u8; MESSAGES],
}

impl Status {
    fn is_live(self) -> bool {
        matches!(self, Status::Ready | Status::Backoff) || self.is_processing()
    }

    fn is_processing(self) -> bool {
        matches!(self, Status::Held { .. } | Status::Deferred { .. })
    }

    /// What becomes of it when leases, delays and graces end.
    fn later(self) -> Status {
        match self {
            Status::Held { by, lease: Lease::Runs } => Status::Held { by, lease: Lease::RunOut },
            Status::Backoff => Status::Ready,
            Status::Deferred { by, due: Due::Later } => Status::Deferred { by, due: Due::Now },
            Status::Deferred { by, .. } => Status::Deferred { by, due: Due::GraceOver },
            status => status,
        }
    }
}

impl Message {
    /// The receipt of the claim that it is in.
    fn receipt(&self, id: Id) -> Option<Receipt> {
        let Status::Held { by, .. } = self.status else { return None };
        Some(Receipt { id, token: self.token, epoch: self.epoch, label: by.label, claim: self.claim })
    }
}

impl Store {
    /// The ids of the live messages, in order.
    fn live(&self) -> impl Iterator<Item = Id> {
        (0..MESSAGES).filter(|&id| self.messages[id].status.is_live())
    }

    /// Ends the leases of the workers that `whose` picks.
    fn end_leases(&mut self, whose: impl Fn(Worker) -> bool) {
        for message in &mut self.messages {
            match message.status {
                Status::Held { by, .. } if whose(by) => message.status = Status::Held { by, lease: Lease::Voided },
                _ => {}
            }
        }
    }
}

impl World {
    /// Both workers run, and there is no message yet.
    fn new() -> World {
        let store = Store { messages: [Message::default(); MESSAGES], epoch: 1, boot_mark: 0 };
        let process = Process { incarnation: 1, is_registered: true, is_running: true };
        World {
            store,
            disk: store,
            processes: [process; LABELS.len()],
            noted: None,
            claims: 0,
            power_losses: [0; MESSAGES],
        }
    }

    fn process(&mut self, label: Label) -> &mut Process {
        &mut self.processes[label as usize]
    }

    /// The worker that runs under `label`.
    fn running(&self, label: Label) -> Option<Worker> {
        let process = self.processes[label as usize];
        process.is_running.then_some(Worker { label, incarnation: process.incarnation })
    }

    fn is_registered(&self, worker: Worker) -> bool {
        let process = self.processes[worker.label as usize];
        process.is_registered && process.incarnation == worker.incarnation
    }
}

// ---- 3. Operations

/// The protocol under some rules, and how far to explore it.
struct Model {
    rules: Rules,
    scope: Scope,
}

/// Which of the two calls a claim is made by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Next,
    ById,
}

/// The calls that take a receipt: five that end a claim, and one that prolongs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Settle {
    Ack,
    Fail,
    Reject,
    Defer,
    Release,
    Extend,
}

/// What such a call is told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The claim is this receipt's.
    Valid,
    /// The claim was this receipt's, and it has settled it before: a success, and nothing is changed.
    Again,
    /// The claim is not this receipt's: an error, and nothing is changed.
    Stale,
}

/// Every operation is one transaction. One that is refused changes nothing.
impl Model {
    fn enqueue(&self, world: &mut World, id: Id) {
        if self.is_key_taken(&world.store) {
            return;
        }
        world.store.messages[id].status = Status::Ready;
        self.commit_answer(world);
    }

    /// Claims message `id`. A claim of it that is void is taken back on the way.
    fn claim(&self, world: &mut World, label: Label, id: Id, call: Call) {
        let Some(worker) = world.running(label).filter(|worker| self.may_claim(world, *worker, id, call)) else {
            return;
        };
        let has_crashed = match world.store.messages[id].status {
            Status::Deferred { by, .. } => by != worker && !self.rules.deferred_cannot_crash,
            _ => self.is_void(world, id) && self.rules.void_is_a_crash,
        };
        let Store { messages, epoch, .. } = &mut world.store;
        let message = &mut messages[id];
        message.spent.crashes += u8::from(has_crashed);
        if self.is_spent(message) {
            self.withdraw(message, Status::Dead, *epoch);
        } else {
            world.claims += 1;
            *message = Message {
                status: Status::Held { by: worker, lease: Lease::Runs },
                token: message.token + u8::from(self.rules.claim_issues_token),
                epoch: *epoch,
                spent: Budgets { attempts: message.spent.attempts + 1, ..message.spent },
                claim: world.claims,
                is_settled: false,
                rounds: message.rounds + 1,
            };
        }
        self.commit_claim(world, id);
    }

    /// Takes a void claim back from another worker: the sweep that `claim next` begins with.
    fn take_back(&self, world: &mut World, label: Label, id: Id) {
        let is_void = world.running(label).is_some() && self.is_void(world, id);
        let Store { messages, epoch, .. } = &mut world.store;
        let message = &mut messages[id];
        match message.status {
            Status::Held { by, .. } if by.label != label && is_void => {}
            _ => return,
        }
        message.spent.crashes += u8::from(self.rules.void_is_a_crash);
        let next = if self.is_spent(message) { Status::Dead } else { Status::Ready };
        self.withdraw(message, next, *epoch);
        self.commit_claim(world, id);
    }

    fn settle(&self, world: &mut World, receipt: Receipt, how: Settle) {
        let message = &mut world.store.messages[receipt.id];
        let Status::Held { by, lease } = message.status else { return };
        if self.answer(message, receipt) != Answer::Valid {
            return;
        }
        let limits = self.scope.limits;
        let spent = &mut message.spent;
        message.status = match how {
            // Who comes after a restart has a right to the message: it can be finished still, but not kept.
            Settle::Extend if lease == Lease::Voided => return,
            Settle::Extend => {
                message.status = Status::Held { by, lease: Lease::Runs };
                return self.commit_free(world);
            }
            Settle::Ack => Status::Done,
            Settle::Reject => Status::Dead,
            Settle::Fail if self.rules.attempts_are_limited && spent.attempts >= limits.attempts => Status::Dead,
            Settle::Fail => Status::Backoff,
            Settle::Defer => {
                spent.deferrals += 1;
                if self.rules.deferrals_are_limited && spent.deferrals >= limits.deferrals {
                    Status::Dead
                } else {
                    spent.attempts -= 1;
                    Status::Deferred { by, due: Due::Later }
                }
            }
            Settle::Release => {
                spent.releases += 1;
                if self.rules.releases_are_limited && spent.releases >= limits.releases {
                    Status::Dead
                } else {
                    spent.attempts -= 1;
                    Status::Ready
                }
            }
        };
        message.is_settled = true;
        self.commit_answer(world);
    }

    /// Cancels message `id`, which is live.
    fn cancel(&self, world: &mut World, id: Id) {
        let Store { messages, epoch, .. } = &mut world.store;
        self.withdraw(&mut messages[id], Status::Cancelled, *epoch);
        self.commit_answer(world);
    }

    /// Hands message `id` out again, which is dead.
    fn redrive(&self, world: &mut World, id: Id) {
        if self.rules.redrive_respects_key && self.is_key_taken(&world.store) {
            return;
        }
        let message = &mut world.store.messages[id];
        message.status = Status::Ready;
        if self.rules.redrive_resets_budgets {
            message.spent = Budgets::default();
        }
        message.rounds = 0;
        world.power_losses[id] = 0;
        self.commit_answer(world);
    }

    /// A process starts under `label`, and is the present one from now on: what an earlier one holds is void.
    fn start(&self, world: &mut World, label: Label) {
        let process = world.process(label);
        *process = Process { incarnation: process.incarnation + 1, is_registered: true, is_running: true };
        world.store.end_leases(|by| by.label == label);
        world.disk = world.store;
    }

    /// Somebody finds the lock of a dead process free.
    fn strike_off(&self, world: &mut World, label: Label) {
        let process = world.process(label);
        if process.is_running {
            return;
        }
        process.is_registered = false;
        world.store.end_leases(|by| by.label == label);
        self.commit_free(world);
    }

    /// The store is opened for the first time since the machine has started.
    fn boot(&self, world: &mut World) {
        for process in &mut world.processes {
            (process.is_registered, process.is_running) = (false, false);
        }
        let store = &mut world.store;
        store.end_leases(|_| true);
        store.epoch += u8::from(self.rules.boot_raises_epoch);
        store.boot_mark = store.messages.iter().filter(|message| message.status != Status::Absent).count();
        world.disk = world.store;
    }

    // What the operations are made of.

    /// Whether `worker` may have message `id` for the asking.
    fn may_claim(&self, world: &World, worker: Worker, id: Id, call: Call) -> bool {
        let message = &world.store.messages[id];
        let may_have_it = match message.status {
            Status::Ready => true,
            Status::Held { by, .. } if self.is_void(world, id) => {
                // `claim next` takes the void claims of others back, and so meets only those that are its own.
                let is_own = by.label == worker.label;
                if is_own { self.rules.self_reclaim } else { call == Call::ById }
            }
            Status::Held { by, .. } => {
                // To claim by id what one holds is to resume it.
                let is_asked_for = call == Call::ById || !self.rules.next_skips_own_work;
                let is_last = message.spent.attempts >= self.scope.limits.attempts;
                let is_refused = is_last && self.rules.resume_spares_holder;
                by == worker && self.rules.self_reclaim && is_asked_for && !is_refused
            }
            Status::Deferred { due: Due::Later, .. } => false,
            Status::Deferred { by, .. } if by.label == worker.label => self.rules.self_reclaim,
            Status::Deferred { by, due } => {
                let is_kept = world.processes[by.label as usize].is_registered && self.rules.deferred_is_kept;
                !is_kept || due == Due::GraceOver && self.rules.grace_ends
            }
            _ => false,
        };
        may_have_it && self.has_turn(&world.store, id)
    }

    /// What `receipt` is worth. A lease that has run out is no matter, as long as nobody has taken the message. A
    /// settle leaves its token in the row, and that is how the same receipt is known when it comes again.
    fn answer(&self, message: &Message, receipt: Receipt) -> Answer {
        let is_newest = (message.token, message.epoch) == (receipt.token, receipt.epoch);
        match message.status {
            Status::Held { lease: Lease::RunOut | Lease::Voided, .. } if !self.rules.late_holder_settles => {
                Answer::Stale
            }
            Status::Held { by, .. } if !self.rules.settle_compares_receipts && by.label == receipt.label => {
                Answer::Valid
            }
            Status::Deferred { .. } if !self.rules.deferred_has_no_receipt && is_newest => Answer::Valid,
            Status::Held { .. } if is_newest => Answer::Valid,
            Status::Held { .. } => Answer::Stale,
            _ if is_newest => Answer::Again,
            _ => Answer::Stale,
        }
    }

    /// Whether the claim that message `id` is in may be taken from its holder.
    fn is_void(&self, world: &World, id: Id) -> bool {
        let Status::Held { by, lease } = world.store.messages[id].status else { return false };
        lease != Lease::Runs || !world.is_registered(by) || !self.rules.only_void_claims_are_taken
    }

    /// Whether it is the turn of message `id` in its group.
    fn has_turn(&self, store: &Store, id: Id) -> bool {
        if self.scope.relation != Relation::Group {
            return true;
        }
        let processing = store.live().find(|&member| store.messages[member].status.is_processing());
        match processing {
            Some(member) if self.rules.processing_has_turn => member == id,
            _ => store.live().next() == Some(id) || !self.rules.oldest_has_turn,
        }
    }

    /// Whether a live message has the key that all messages share.
    fn is_key_taken(&self, store: &Store) -> bool {
        self.scope.relation == Relation::Key && store.live().next().is_some()
    }

    /// Whether a message has cost so much that it is not handed out again.
    fn is_spent(&self, message: &Message) -> bool {
        let (spent, limits) = (message.spent, self.scope.limits);
        self.rules.attempts_are_limited && spent.attempts >= limits.attempts
            || self.rules.crashes_are_limited && spent.crashes >= limits.crashes
    }

    /// Takes a message out of its holder's hands. The holder's receipt is stale from now on, and there is no other.
    fn withdraw(&self, message: &mut Message, status: Status, epoch: u8) {
        message.status = status;
        if self.rules.withdrawal_issues_token {
            message.token += 1;
            message.epoch = if self.rules.token_carries_epoch { epoch } else { message.epoch };
        }
    }

    /// Ends an operation that others wait for: it is on the disk when it returns, along with everything before it.
    fn commit_answer(&self, world: &mut World) {
        if self.rules.answers_are_durable {
            world.disk = world.store;
        } else {
            self.commit_free(world);
        }
    }

    /// Ends a claim, which can be repeated if it is lost; but it must not be forgotten that it took the machine down.
    fn commit_claim(&self, world: &mut World, id: Id) {
        if id < world.store.boot_mark && self.rules.marked_claims_are_durable {
            world.disk = world.store;
        } else {
            self.commit_free(world);
        }
    }

    /// Ends an operation that will be on the disk some time.
    fn commit_free(&self, world: &mut World) {
        // Where no power is lost, nobody will ever know.
        if !self.scope.power_fails {
            world.disk = world.store;
        }
    }
}

// ---- 4. Events

/// How far an exploration goes. Whatever may happen in it, may happen any number of times.
#[derive(Clone, Copy)]
struct Scope {
    messages: usize,
    relation: Relation,
    limits: Budgets,
    settles: &'static [Settle],
    cancels: bool,
    redrives: bool,
    workers_die: bool,
    power_fails: bool,
}

/// What the messages share.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Relation {
    Nothing,
    Group,
    Key,
}

/// What can happen.
#[derive(Clone, Copy)]
enum Event {
    Enqueue(Id),
    Claim {
        label: Label,
        id: Id,
        call: Call,
        is_noted: bool,
    },
    TakeBack(Label, Id),
    /// With the receipt of the claim that the message is in, by whoever has it.
    Settle(Id, Settle),
    Cancel(Id),
    Redrive(Id),
    TimePasses(Id),
    Kill(Label),
    Start(Label),
    StrikeOff(Label),
    Reboot,
    PowerLoss,
    /// What was committed for free is on the disk by now.
    Sync,
}

impl Model {
    /// All that can happen in `world`, and some that will be refused.
    fn events(&self, world: &World) -> Vec<Event> {
        let scope = &self.scope;
        let mut events = Vec::new();
        for id in 0..scope.messages {
            let status = world.store.messages[id].status;
            if status == Status::Absent {
                events.push(Event::Enqueue(id));
                break; // ids are given in order
            }
            if status == Status::Dead && scope.redrives {
                events.push(Event::Redrive(id));
            }
            if !status.is_live() {
                continue;
            }
            for label in LABELS {
                for call in [Call::Next, Call::ById] {
                    events.push(Event::Claim { label, id, call, is_noted: false });
                    if world.noted.is_none() {
                        events.push(Event::Claim { label, id, call, is_noted: true });
                    }
                }
                events.push(Event::TakeBack(label, id));
            }
            events.extend(scope.settles.iter().map(|&how| Event::Settle(id, how)));
            events.push(Event::TimePasses(id));
            if scope.cancels {
                events.push(Event::Cancel(id));
            }
        }
        if scope.workers_die {
            events.extend(LABELS.into_iter().flat_map(|l| [Event::Kill(l), Event::Start(l), Event::StrikeOff(l)]));
        }
        if scope.power_fails {
            events.extend([Event::Reboot, Event::PowerLoss, Event::Sync]);
        }
        events
    }

    /// The world after `event`; the same world if it was refused.
    fn after(&self, mut world: World, event: Event) -> World {
        match event {
            Event::Enqueue(id) => self.enqueue(&mut world, id),
            Event::Claim { label, id, call, is_noted } => {
                let claims_before = world.claims;
                self.claim(&mut world, label, id, call);
                if is_noted && world.claims > claims_before {
                    world.noted = world.store.messages[id].receipt(id);
                }
            }
            Event::TakeBack(label, id) => self.take_back(&mut world, label, id),
            Event::Settle(id, how) => {
                if let Some(receipt) = world.store.messages[id].receipt(id) {
                    self.settle(&mut world, receipt, how);
                }
            }
            Event::Cancel(id) => self.cancel(&mut world, id),
            Event::Redrive(id) => self.redrive(&mut world, id),
            Event::TimePasses(id) => {
                // That is no commit: the same row means something else, wherever it is.
                for store in [&mut world.store, &mut world.disk] {
                    store.messages[id].status = store.messages[id].status.later();
                }
            }
            Event::Kill(label) => world.process(label).is_running = false,
            Event::Start(label) => self.start(&mut world, label),
            Event::StrikeOff(label) => self.strike_off(&mut world, label),
            Event::Reboot => self.boot(&mut world),
            Event::PowerLoss => {
                for id in 0..MESSAGES {
                    world.power_losses[id] += u8::from(world.is_worked_on(id));
                }
                world.store = world.disk;
                self.boot(&mut world);
            }
            Event::Sync => world.disk = world.store,
        }
        world
    }
}

// ---- 5. Promises

/// A promise that is broken; its words are below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    WrongClaimSettled,
    FalseSuccess,
    HolderRefused,
    HolderRobbed,
    HolderKilled,
    DeferredRobbed,
    FalseCrash,
    CrashMissed,
    Endless,
    MachineKiller,
    Unclaimable,
    TwoOfAGroup,
    OutOfTurn,
    TwoOfAKey,
    Forgotten,
    Stuck,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Broken::WrongClaimSettled => "the noted receipt would settle a claim that is not, or no longer, its own",
            Broken::FalseSuccess => "the noted receipt would be told that it has settled what was taken from it",
            Broken::HolderRefused => "the noted receipt would be refused, though nobody has taken the message",
            Broken::HolderRobbed => "a message is taken from a worker that is alive, in time and has no successor",
            Broken::HolderKilled => "a message is given up under a worker that is alive, in time and has no successor",
            Broken::DeferredRobbed => "a deferred message is taken from a running worker before its grace is over",
            Broken::FalseCrash => "a crash is counted where nobody was at work",
            Broken::CrashMissed => "a void claim is taken, and no crash is counted",
            Broken::Endless => "a message is claimed, or crashes, more often than its budgets allow",
            Broken::MachineKiller => "a message goes down with the machine more often than its budgets allow",
            Broken::Unclaimable => "a message is given up that nobody was at work on",
            Broken::TwoOfAGroup => "two messages of a group are in processing at once",
            Broken::OutOfTurn => "a message of a group overtakes an older one",
            Broken::TwoOfAKey => "two live messages have the same key",
            Broken::Forgotten => "a power loss undoes what was answered",
            Broken::Stuck => "some worker will never get the message, however long it waits",
        })
    }
}

impl World {
    /// Whether the holder of message `id` is really at work on it, whatever the store knows of that.
    fn is_worked_on(&self, id: Id) -> bool {
        match self.store.messages[id].status {
            Status::Held { by, lease: Lease::Runs } => self.running(by.label) == Some(by),
            _ => false,
        }
    }
}

impl Model {
    /// The promise that is broken by `event`, which has not been refused.
    fn broken_by(&self, event: Event, before: &World, after: &World) -> Option<Broken> {
        match event {
            Event::Claim { id, call: Call::Next, .. } if before.is_worked_on(id) => Some(Broken::HolderRobbed),
            Event::Claim { label, id, .. } | Event::TakeBack(label, id) => {
                self.broken_by_claim(label, id, before, after)
            }
            Event::PowerLoss => {
                let is_forgotten = |id: Id| {
                    let (was, is) = (before.store.messages[id].status, after.store.messages[id].status);
                    was != is && matches!((was, is), (Status::Done | Status::Cancelled, _) | (_, Status::Absent))
                };
                (0..MESSAGES).any(is_forgotten).then_some(Broken::Forgotten)
            }
            _ => None,
        }
    }

    /// The promise that is broken by a claim of message `id`, or by taking it back, in the name of `label`.
    fn broken_by_claim(&self, label: Label, id: Id, before: &World, after: &World) -> Option<Broken> {
        let (was, is) = (&before.store.messages[id], &after.store.messages[id]);
        match was.status {
            Status::Held { by, .. } if before.is_worked_on(id) => match is.status {
                Status::Held { by: now, .. } if now == by => None,
                Status::Dead => Some(Broken::HolderKilled),
                _ => Some(Broken::HolderRobbed),
            },
            Status::Held { .. } => (is.spent.crashes == was.spent.crashes).then_some(Broken::CrashMissed),
            _ if is.status == Status::Dead => Some(Broken::Unclaimable),
            Status::Deferred { by, due } => {
                let is_robbed = by.label != label && before.running(by.label).is_some() && due != Due::GraceOver;
                if is_robbed {
                    Some(Broken::DeferredRobbed)
                } else {
                    (is.spent.crashes > was.spent.crashes).then_some(Broken::FalseCrash)
                }
            }
            _ => {
                let overtakes = before.store.live().next() != Some(id);
                (self.scope.relation == Relation::Group && overtakes).then_some(Broken::OutOfTurn)
            }
        }
    }

    /// The promise that is broken in `world`.
    fn broken_in(&self, world: &World) -> Option<Broken> {
        if let Some(receipt) = world.noted {
            let message = &world.store.messages[receipt.id];
            let is_its_claim = message.claim == receipt.claim;
            let is_open = is_its_claim && matches!(message.status, Status::Held { .. });
            match self.answer(message, receipt) {
                Answer::Valid if !is_open => return Some(Broken::WrongClaimSettled),
                Answer::Again if !(is_its_claim && message.is_settled) => return Some(Broken::FalseSuccess),
                Answer::Stale if is_open => return Some(Broken::HolderRefused),
                _ => {}
            }
        }

        let limits = self.scope.limits;
        // Each claim costs an attempt. Deferrals and releases give it back, except for the last of them, which kills.
        let rounds_max = limits.attempts + (limits.deferrals - 1) + (limits.releases - 1);
        for id in 0..MESSAGES {
            let message = &world.store.messages[id];
            if message.rounds > rounds_max || message.spent.crashes > limits.crashes {
                return Some(Broken::Endless);
            }
            // The first power loss can undo the claim. Later ones cannot: the message is marked by then.
            if world.power_losses[id] > 1 + rounds_max {
                return Some(Broken::MachineKiller);
            }
        }

        let is_processing = |id: &Id| world.store.messages[*id].status.is_processing();
        match self.scope.relation {
            Relation::Group if world.store.live().filter(is_processing).count() > 1 => Some(Broken::TwoOfAGroup),
            Relation::Key if world.store.live().count() > 1 => Some(Broken::TwoOfAKey),
            _ => None,
        }
    }

    /// Whether a new process of `label`, left alone with the store, brings every message to an end as time passes.
    fn drains(&self, mut world: World, label: Label) -> bool {
        self.start(&mut world, label);
        while world.store.live().next().is_some() {
            let before = world;
            for id in 0..self.scope.messages {
                let claim = Event::Claim { label, id, call: Call::Next, is_noted: false };
                let ack = Event::Settle(id, Settle::Ack);
                for event in [Event::TimePasses(id), Event::TakeBack(label, id), claim, ack] {
                    world = self.after(world, event);
                }
            }
            if world == before {
                return false;
            }
        }
        true
    }
}

// ---- 6. Explorer

/// A state, and how it was reached first.
struct Reached {
    world: World,
    by: Option<(usize, Event)>,
}

/// What an exploration has found: every state, or the shortest run that breaks a promise.
struct Exploration {
    states: usize,
    broken: Option<(Broken, Vec<Event>)>,
}

impl Model {
    /// Visits every state once, the nearest first, until a promise is broken. Worlds that are the same under `naming`
    /// are one state.
    fn explore(&self, naming: impl Fn(World) -> World) -> Exploration {
        let start = naming(World::new());
        let mut reached = vec![Reached { world: start, by: None }];
        let mut seen = HashSet::from([start]);
        let mut next = 0;
        while next < reached.len() {
            let before = reached[next].world;
            for event in self.events(&before) {
                let after = self.after(before, event);
                if after == before {
                    continue;
                }
                let mut broken = self.broken_by(event, &before, &after).or_else(|| self.broken_in(&after));
                let world = naming(after);
                if seen.insert(world) {
                    reached.push(Reached { world, by: Some((next, event)) });
                    if broken.is_none() && !LABELS.into_iter().all(|label| self.drains(after, label)) {
                        broken = Some(Broken::Stuck);
                    }
                }
                if let Some(broken) = broken {
                    let run = Model::run(&reached, next, event);
                    return Exploration { states: reached.len(), broken: Some((broken, run)) };
                }
            }
            next += 1;
        }
        Exploration { states: reached.len(), broken: None }
    }

    /// The events that lead to a state, and on by one more.
    fn run(reached: &[Reached], state: usize, last: Event) -> Vec<Event> {
        let mut events = vec![last];
        let mut state = &reached[state];
        while let Some((from, event)) = state.by {
            events.push(event);
            state = &reached[from];
        }
        events.reverse();
        events
    }

    /// A run in words. On each line an event, and the messages after it: `ID.TOKEN-EPOCH`, status, what it has cost.
    fn tell(&self, broken: Broken, run: &[Event]) -> String {
        let mut world = World::new();
        let mut lines = format!("{broken}:\n");
        for event in run {
            world = self.after(world, *event);
            lines += &format!("  {:<44}{}\n", event.to_string(), world.store);
        }
        lines
    }

    /// The same world under other numbers.
    ///
    /// Incarnations, claims, epochs and tokens are only compared with each other, and a new one is greater than all
    /// before. So worlds that differ in nothing but such numbers have the same future, and one of them is enough. That
    /// is why the states come to an end, though machine and workers may restart and messages be redriven for ever.
    fn canonical(&self, world: World) -> World {
        let noted = world.noted.filter(|receipt| !self.is_outgrown(&world, *receipt));
        let token_min = |id: Id| {
            let noted = noted.filter(|receipt| receipt.id == id).map_or(u8::MAX, |receipt| receipt.token);
            noted.min(world.store.messages[id].token).min(world.disk.messages[id].token)
        };
        let is_noted_claim = |claim: u8| noted.is_some_and(|receipt| receipt.claim == claim);
        let is_noted_epoch = |epoch: u8| noted.is_some_and(|receipt| receipt.epoch == epoch);
        let short_epoch = |epoch: u8| if epoch == world.store.epoch { 2 } else { u8::from(is_noted_epoch(epoch)) };

        let mut short = world;
        for store in [&mut short.store, &mut short.disk] {
            store.epoch = 2;
            for (id, message) in store.messages.iter_mut().enumerate() {
                message.token -= token_min(id);
                message.epoch = short_epoch(message.epoch);
                message.is_settled &= is_noted_claim(message.claim);
                message.claim = u8::from(is_noted_claim(message.claim));
                if let Status::Held { by, .. } | Status::Deferred { by, .. } = &mut message.status {
                    by.incarnation = u8::from(world.is_registered(*by));
                }
                let has_reset = message.status == Status::Dead && self.rules.redrive_resets_budgets;
                if has_reset || matches!(message.status, Status::Done | Status::Cancelled) {
                    (message.spent, message.rounds) = (Budgets::default(), 0); // nobody will ask any more
                }
            }
        }
        short.noted = noted.map(|receipt| Receipt {
            token: receipt.token - token_min(receipt.id),
            epoch: short_epoch(receipt.epoch),
            claim: 1,
            ..receipt
        });
        short.claims = 1;
        for process in &mut short.processes {
            process.incarnation = 1;
        }
        short
    }

    /// Whether a receipt can never again be worth anything, since tokens only grow.
    fn is_outgrown(&self, world: &World, receipt: Receipt) -> bool {
        let tokens = [&world.store, &world.disk].map(|store| store.messages[receipt.id].token);
        self.rules.settle_compares_receipts && tokens.into_iter().all(|token| token > receipt.token)
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Enqueue(id) => write!(f, "message {} is enqueued", id + 1),
            Event::Claim { label, id, call, is_noted } => {
                let call = if *call == Call::ById { " by id" } else { "" };
                let note = if *is_noted { " and notes the receipt" } else { "" };
                write!(f, "{label:?} claims message {}{call}{note}", id + 1)
            }
            Event::TakeBack(label, id) => write!(f, "{label:?} takes message {} back", id + 1),
            Event::Settle(id, how) => write!(f, "{how:?} of message {} by its receipt", id + 1),
            Event::Cancel(id) => write!(f, "message {} is cancelled", id + 1),
            Event::Redrive(id) => write!(f, "message {} is redriven", id + 1),
            Event::TimePasses(id) => write!(f, "time passes for message {}", id + 1),
            Event::Kill(label) => write!(f, "{label:?} is killed"),
            Event::Start(label) => write!(f, "{label:?} is started again"),
            Event::StrikeOff(label) => write!(f, "{label:?} is found dead"),
            Event::Reboot => write!(f, "the machine is rebooted"),
            Event::PowerLoss => write!(f, "the power fails"),
            Event::Sync => write!(f, "everything reaches the disk"),
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}#{}", self.label, self.incarnation)
    }
}

impl fmt::Display for Budgets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budgets { attempts, crashes, deferrals, releases } = self;
        let counts = [("tried", attempts), ("crashed", crashes), ("deferred", deferrals), ("released", releases)];
        counts.into_iter().filter(|(_, count)| **count > 0).try_for_each(|(what, count)| write!(f, ", {what} {count}x"))
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (id, Message { status, token, epoch, spent, .. }) in self.messages.iter().enumerate() {
            if *status != Status::Absent {
                write!(f, " | {}.{token}-{epoch} {status:?}{spent}", id + 1)?;
            }
        }
        Ok(())
    }
}

// ---- 7. Tests

const EVERY_SETTLE: &[Settle] =
    &[Settle::Ack, Settle::Fail, Settle::Reject, Settle::Defer, Settle::Release, Settle::Extend];

/// One message, and all that can happen to it while the machine stays up.
const ONE_MESSAGE: Scope = Scope {
    messages: 1,
    relation: Relation::Nothing,
    limits: Budgets { attempts: 3, crashes: 2, deferrals: 2, releases: 2 },
    settles: EVERY_SETTLE,
    cancels: true,
    redrives: true,
    workers_die: true,
    power_fails: false,
};

/// One message, and all that can happen to it.
const POWER_LOSSES: Scope =
    Scope { limits: Budgets { attempts: 2, crashes: 2, deferrals: 2, releases: 2 }, power_fails: true, ..ONE_MESSAGE };

/// One message with budgets so small that it is soon given up, if it is counted.
const MACHINE_KILLER: Scope = Scope {
    limits: Budgets { attempts: 2, crashes: 1, deferrals: 1, releases: 1 },
    settles: &[Settle::Ack, Settle::Fail],
    cancels: false,
    ..POWER_LOSSES
};

/// Two messages that have nothing in common but the disk.
const TWO_MESSAGES: Scope = Scope {
    messages: 2,
    limits: Budgets { attempts: 1, crashes: 1, deferrals: 1, releases: 1 },
    settles: &[Settle::Ack],
    redrives: false,
    cancels: false,
    ..POWER_LOSSES
};

/// Two messages of one group.
const GROUP: Scope = Scope {
    messages: 2,
    relation: Relation::Group,
    limits: Budgets { attempts: 2, crashes: 1, deferrals: 2, releases: 1 },
    cancels: false,
    ..ONE_MESSAGE
};

/// Two messages with one key.
const KEY: Scope = Scope { relation: Relation::Key, ..GROUP };

/// With all rules no promise is broken in any state, of which there are at least `states_min`.
fn holds(scope: Scope, states_min: usize) {
    let model = Model { rules: Rules::relet(), scope };
    let Exploration { states, broken } = model.explore(|world| model.canonical(world));
    if let Some((broken, run)) = broken {
        panic!("{}", model.tell(broken, &run));
    }
    println!("{states} states");
    assert!(states >= states_min, "only {states} states: something does not happen in the model any more");
}

/// With these rules a promise is broken, and `expected` is what the shortest run breaks.
fn fails(rules: Rules, scope: Scope, expected: Broken) {
    let model = Model { rules, scope };
    let found = model.explore(|world| model.canonical(world));
    let (broken, run) = found.broken.expect("some run breaks a promise, or else the rule is good for nothing");
    println!("{}", model.tell(broken, &run));
    assert_eq!(broken, expected);

    // Where it does not take long, see that nothing is found earlier if no two worlds are taken for the same.
    if run.len() <= 6 {
        let (first, first_run) = model.explore(|world| world).broken.expect("the run is there in any case");
        assert_eq!((first, first_run.len()), (broken, run.len()), "{}", model.tell(first, &first_run));
    }
}

#[test]
fn the_protocol_holds_for_one_message() {
    holds(ONE_MESSAGE, 4_300);
}

#[test]
fn the_protocol_holds_over_power_losses() {
    holds(POWER_LOSSES, 74_000);
}

#[test]
fn the_protocol_holds_for_a_message_that_takes_the_machine_down() {
    holds(MACHINE_KILLER, 4_900);
}

#[test]
fn the_protocol_holds_for_two_messages_over_power_losses() {
    holds(TWO_MESSAGES, 85_000);
}

#[test]
fn the_protocol_holds_within_a_group() {
    holds(GROUP, 17_900);
}

#[test]
fn the_protocol_holds_under_a_key() {
    holds(KEY, 7_600);
}

#[test]
#[ignore = "millions of steps: run it with --release"]
fn the_protocol_holds_further_out() {
    let two = Budgets { attempts: 2, crashes: 1, deferrals: 2, releases: 1 };
    holds(Scope { limits: Budgets { attempts: 5, crashes: 3, deferrals: 4, releases: 4 }, ..ONE_MESSAGE }, 50_900);
    holds(Scope { limits: ONE_MESSAGE.limits, ..POWER_LOSSES }, 179_000);
    holds(Scope { limits: two, settles: EVERY_SETTLE, redrives: true, power_fails: false, ..TWO_MESSAGES }, 67_000);
    holds(Scope { limits: Budgets { attempts: 1, ..two }, power_fails: true, ..GROUP }, 285_000);
    holds(Scope { limits: Budgets { deferrals: 1, ..two }, power_fails: true, cancels: true, ..KEY }, 337_000);
}

#[test]
fn without_self_reclaim_it_fails() {
    fails(Rules { self_reclaim: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Stuck);
}

#[test]
fn without_asking_whether_a_claim_is_void_it_fails() {
    fails(Rules { only_void_claims_are_taken: false, ..Rules::relet() }, ONE_MESSAGE, Broken::HolderRobbed);
}

#[test]
fn without_telling_what_a_worker_is_busy_with_it_fails() {
    fails(Rules { next_skips_own_work: false, ..Rules::relet() }, ONE_MESSAGE, Broken::HolderRobbed);
}

#[test]
fn without_keeping_deferred_messages_it_fails() {
    fails(Rules { deferred_is_kept: false, ..Rules::relet() }, ONE_MESSAGE, Broken::DeferredRobbed);
}

#[test]
fn without_an_end_to_the_grace_it_fails() {
    fails(Rules { grace_ends: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Stuck);
}

#[test]
fn without_counting_void_claims_it_fails() {
    fails(Rules { void_is_a_crash: false, ..Rules::relet() }, ONE_MESSAGE, Broken::CrashMissed);
}

#[test]
fn without_telling_deferred_from_crashed_it_fails() {
    fails(Rules { deferred_cannot_crash: false, ..Rules::relet() }, ONE_MESSAGE, Broken::FalseCrash);
}

#[test]
fn without_comparing_receipts_it_fails() {
    fails(Rules { settle_compares_receipts: false, ..Rules::relet() }, ONE_MESSAGE, Broken::WrongClaimSettled);
}

#[test]
fn without_ending_the_receipt_of_a_deferred_message_it_fails() {
    fails(Rules { deferred_has_no_receipt: false, ..Rules::relet() }, ONE_MESSAGE, Broken::WrongClaimSettled);
}

#[test]
fn without_settling_late_it_fails() {
    fails(Rules { late_holder_settles: false, ..Rules::relet() }, ONE_MESSAGE, Broken::HolderRefused);
}

#[test]
fn without_a_new_token_for_every_claim_it_fails() {
    fails(Rules { claim_issues_token: false, ..Rules::relet() }, ONE_MESSAGE, Broken::WrongClaimSettled);
}

#[test]
fn without_a_new_token_for_taking_back_it_fails() {
    fails(
        Rules { withdrawal_issues_token: false, ..Rules::relet() },
        Scope { cancels: false, ..ONE_MESSAGE },
        Broken::FalseSuccess,
    );
}

#[test]
fn without_a_new_token_for_cancelling_it_fails() {
    fails(Rules { withdrawal_issues_token: false, ..Rules::relet() }, ONE_MESSAGE, Broken::FalseSuccess);
}

#[test]
fn without_a_new_epoch_at_each_boot_it_fails() {
    fails(
        Rules { boot_raises_epoch: false, ..Rules::relet() },
        Scope { cancels: false, ..POWER_LOSSES },
        Broken::WrongClaimSettled,
    );
}

#[test]
fn without_the_epoch_in_every_new_token_it_fails() {
    fails(Rules { token_carries_epoch: false, ..Rules::relet() }, POWER_LOSSES, Broken::FalseSuccess);
}

#[test]
fn without_a_limit_of_attempts_it_fails() {
    fails(Rules { attempts_are_limited: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Endless);
}

#[test]
fn without_a_limit_of_crashes_it_fails() {
    fails(Rules { crashes_are_limited: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Endless);
}

#[test]
fn without_a_limit_of_deferrals_it_fails() {
    fails(Rules { deferrals_are_limited: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Endless);
}

#[test]
fn without_a_limit_of_releases_it_fails() {
    fails(Rules { releases_are_limited: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Endless);
}

#[test]
fn without_refusing_to_resume_at_the_limit_it_fails() {
    fails(Rules { resume_spares_holder: false, ..Rules::relet() }, ONE_MESSAGE, Broken::HolderKilled);
}

#[test]
fn without_new_budgets_for_redriven_messages_it_fails() {
    fails(Rules { redrive_resets_budgets: false, ..Rules::relet() }, ONE_MESSAGE, Broken::Unclaimable);
}

#[test]
fn without_asking_for_the_key_at_redrive_it_fails() {
    fails(Rules { redrive_respects_key: false, ..Rules::relet() }, KEY, Broken::TwoOfAKey);
}

#[test]
fn without_waiting_for_the_group_s_message_in_processing_it_fails() {
    fails(Rules { processing_has_turn: false, ..Rules::relet() }, GROUP, Broken::TwoOfAGroup);
}

#[test]
fn without_order_in_a_group_it_fails() {
    fails(Rules { oldest_has_turn: false, ..Rules::relet() }, GROUP, Broken::OutOfTurn);
}

#[test]
fn without_durable_answers_it_fails() {
    fails(Rules { answers_are_durable: false, ..Rules::relet() }, POWER_LOSSES, Broken::Forgotten);
}

#[test]
fn without_durable_claims_of_marked_messages_it_fails() {
    fails(Rules { marked_claims_are_durable: false, ..Rules::relet() }, MACHINE_KILLER, Broken::MachineKiller);
}
