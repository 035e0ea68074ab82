//! Instances, their sessions, and the way of a statement to the server and back.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    assumptions::{Conditions, Database, Fault, Loss},
    code::Constants,
    events::{Events, Time, micros},
    figures::Figures,
    pacing,
    server::Server,
};

pub type Instance = usize;
type Id = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Requests,
    Renewals,
    /// The session that listens.
    Listening,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    NoConnection,
    /// Sent, and the connection was lost.
    Lost,
    /// Sent, and not answered within the limit.
    NoReply,
}

/// What running a statement came to.
pub struct Outcome<R> {
    pub reply: R,
    /// The sender waits for a commit.
    pub commits: bool,
    /// What it took of a core beyond what was known before.
    pub core: Time,
    /// How many further statements it took.
    pub further: u32,
}

impl<R> Outcome<R> {
    pub fn read(reply: R) -> Self {
        Self { reply, commits: false, core: 0, further: 0 }
    }

    pub fn written(reply: R) -> Self {
        Self { commits: true, ..Self::read(reply) }
    }
}

/// What the instances do, and what the tables hold.
pub trait App: Sized {
    type Statement: Clone;
    type Reply;
    type Timer;

    /// Returns what the statement takes of a core, as far as that is known before.
    fn cost(&self, statement: &Self::Statement, database: &Database) -> Time;

    /// Runs the statement. If it writes, others see its changes from `committed` on.
    fn execute(&mut self, net: &mut Net<Self>, statement: &Self::Statement, committed: Time) -> Outcome<Self::Reply>;

    fn replied(&mut self, net: &mut Net<Self>, sent: Sent<Self>, reply: Result<Self::Reply, Failure>);

    fn timer(&mut self, net: &mut Net<Self>, timer: Self::Timer);

    /// The server closed all connections.
    fn disconnected(&mut self, _: &mut Net<Self>) {}
}

/// A statement that has a reply, or failed.
pub struct Sent<A: App> {
    pub instance: Instance,
    pub statement: A::Statement,
    /// When the instance sent it over its connection.
    pub at: Time,
}

pub enum Event<A: App> {
    Timer(A::Timer),
    Connect { id: Id, tries: u32 },
    Connecting { id: Id, tries: u32 },
    Connected { id: Id, instance: Instance, purpose: Purpose, epoch: u32 },
    Arrive { id: Id, epoch: u32 },
    Execute { id: Id, epoch: u32 },
    Deliver { id: Id, epoch: u32, reply: A::Reply },
    Fail { id: Id },
    Limit { id: Id },
    Fault,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Connecting,
    Sent(u32),
    /// Its sender waits no more. The server may still run it.
    GivenUp,
}

struct Sending<A: App> {
    instance: Instance,
    purpose: Purpose,
    statement: A::Statement,
    stage: Stage,
    at: Time,
}

#[derive(Default)]
struct Pool {
    /// The epochs of the idle connections.
    idle: Vec<u32>,
    open: usize,
    waiting: VecDeque<Id>,
}

pub struct Net<A: App> {
    events: Events<Event<A>>,
    pub server: Server,
    pub figures: Figures,
    pub constants: Constants,
    /// Requests, renewals and listening.
    pools: Vec<[Pool; 3]>,
    most: [usize; 3],
    sending: BTreeMap<Id, Sending<A>>,
    dead: Vec<bool>,
    ids: Id,
}

impl<A: App> Net<A> {
    pub fn new(instances: usize, conditions: Conditions) -> Self {
        let constants = Constants::read();
        let most = [constants.requests, constants.renewals, 1];
        let mut events = Events::new();
        if let Some((Fault::FailOver(_), begin, _)) = conditions.fault {
            events.at(begin, Event::Fault);
        }
        Self {
            events,
            server: Server::new(conditions),
            figures: Figures::default(),
            constants,
            pools: (0..instances).map(|_| Default::default()).collect(),
            most,
            sending: BTreeMap::new(),
            dead: vec![false; instances],
            ids: 0,
        }
    }

    pub fn now(&self) -> Time {
        self.events.now
    }

    pub fn timer(&mut self, at: Time, timer: A::Timer) {
        self.events.at(at, Event::Timer(timer));
    }

    pub fn is_dead(&self, instance: Instance) -> bool {
        self.dead[instance]
    }

    pub fn run(&mut self, app: &mut A, end: Time) {
        while let Some(event) = self.events.next(end) {
            self.handle(app, event);
        }
    }

    /// The instance is gone, with its connections. The server may still run its statements.
    pub fn kill(&mut self, instance: Instance) {
        self.dead[instance] = true;
        for pool in &mut self.pools[instance] {
            pool.idle.drain(..).for_each(|epoch| self.server.disconnect(epoch));
        }
        for sending in self.sending.values_mut().filter(|sending| sending.instance == instance) {
            if let Stage::Sent(epoch) = std::mem::replace(&mut sending.stage, Stage::GivenUp) {
                self.server.disconnect(epoch);
            }
        }
    }

    /// Sends a statement as soon as there is a connection, and gives it up at `limit`.
    pub fn send(&mut self, instance: Instance, purpose: Purpose, statement: A::Statement, limit: Time) {
        self.ids += 1;
        let (id, at) = (self.ids, self.now());
        self.sending.insert(id, Sending { instance, purpose, statement, stage: Stage::Waiting, at });
        self.events.at(limit, Event::Limit { id });
        let most = self.most[purpose as usize];
        let pool = self.pool(instance, purpose);
        match pool.idle.pop() {
            Some(epoch) => self.transmit(id, epoch),
            None if pool.open < most => self.open(id, instance, purpose),
            None => pool.waiting.push_back(id),
        }
    }

    fn pool(&mut self, instance: Instance, purpose: Purpose) -> &mut Pool {
        &mut self.pools[instance][purpose as usize]
    }

    fn open(&mut self, id: Id, instance: Instance, purpose: Purpose) {
        self.pool(instance, purpose).open += 1;
        if let Some(sending) = self.sending.get_mut(&id) {
            sending.stage = Stage::Connecting;
        }
        self.connect(id, 0);
    }

    fn after(&mut self, further: Time, event: Event<A>) {
        let now = self.now();
        let at = now + further + self.server.conditions.one_way(now);
        self.events.at(at, event);
    }

    fn connect(&mut self, id: Id, tries: u32) {
        self.after(0, Event::Connecting { id, tries });
    }

    fn transmit(&mut self, id: Id, epoch: u32) {
        let now = self.now();
        let Some(sending) = self.sending.get_mut(&id) else { return };
        (sending.stage, sending.at) = (Stage::Sent(epoch), now);
        self.after(0, Event::Arrive { id, epoch });
    }

    /// A connection is free: the next statement takes it.
    fn give_back(&mut self, instance: Instance, purpose: Purpose, epoch: u32) {
        let pool = self.pool(instance, purpose);
        match pool.waiting.pop_front() {
            Some(next) => self.transmit(next, epoch),
            None => pool.idle.push(epoch),
        }
    }

    /// A connection is closed: the next statement opens another one.
    fn close(&mut self, instance: Instance, purpose: Purpose, epoch: Option<u32>) {
        epoch.into_iter().for_each(|epoch| self.server.disconnect(epoch));
        let pool = self.pool(instance, purpose);
        pool.open -= 1;
        if let Some(next) = pool.waiting.pop_front() {
            self.open(next, instance, purpose);
        }
    }

    fn handle(&mut self, app: &mut A, event: Event<A>) {
        match event {
            Event::Timer(timer) => app.timer(self, timer),
            Event::Connect { id, tries } => self.connect(id, tries),
            Event::Connecting { id, tries } => self.connecting(app, id, tries),
            Event::Connected { id, instance, purpose, epoch } => self.connected(id, instance, purpose, epoch),
            Event::Arrive { id, epoch } => self.arrive(app, id, epoch),
            Event::Execute { id, epoch } => self.execute(app, id, epoch),
            Event::Deliver { id, epoch, reply } => {
                let Some(sending) = self.take(id) else { return };
                if sending.purpose != Purpose::Listening {
                    self.give_back(sending.instance, sending.purpose, epoch);
                }
                self.reply(app, sending, Ok(reply));
            }
            Event::Fail { id } => self.failed(app, id, Failure::Lost),
            Event::Limit { id } => self.failed(app, id, Failure::NoReply),
            Event::Fault => {
                let now = self.now();
                self.server.fail(now);
                if self.server.conditions.loss(now) == Some(Loss::Refused) {
                    for pools in &mut self.pools {
                        pools[Purpose::Listening as usize].open = 0;
                    }
                    app.disconnected(self);
                }
            }
        }
    }

    /// Removes a statement whose sender still waits.
    fn take(&mut self, id: Id) -> Option<Sending<A>> {
        self.sending.remove(&id).filter(|sending| sending.stage != Stage::GivenUp)
    }

    fn reply(&mut self, app: &mut A, sending: Sending<A>, reply: Result<A::Reply, Failure>) {
        let Sending { instance, statement, at, .. } = sending;
        self.figures.failed += usize::from(reply.is_err());
        if !self.dead[instance] {
            app.replied(self, Sent { instance, statement, at }, reply);
        }
    }

    /// A request for a connection is at the server.
    fn connecting(&mut self, app: &mut A, id: Id, tries: u32) {
        let now = self.now();
        let Some(sending) = self.sending.get(&id).filter(|sending| sending.stage == Stage::Connecting) else { return };
        let (instance, purpose) = (sending.instance, sending.purpose);
        self.figures.connect(now);
        match self.server.conditions.loss(now) {
            Some(Loss::Silent) => {}
            None if !self.server.is_full() => {
                self.server.connections += 1;
                self.figures.connections = self.figures.connections.max(self.server.connections);
                let cost = self.server.conditions.database.connect;
                let end = self.server.work(cost, now, &mut self.figures);
                let epoch = self.server.epoch;
                // The handshake takes two more round trips.
                let trips = (0..4).map(|_| self.server.conditions.one_way(now)).sum::<Time>();
                self.after(end - now + trips, Event::Connected { id, instance, purpose, epoch });
            }
            _ if purpose == Purpose::Listening => self.failed(app, id, Failure::NoConnection),
            _ => {
                let mut pauses = pacing::open_backoff();
                (0..tries).for_each(|_| _ = pauses.next());
                let pause = micros(pauses.next());
                self.after(pause, Event::Connect { id, tries: tries + 1 });
            }
        }
    }

    fn connected(&mut self, id: Id, instance: Instance, purpose: Purpose, epoch: u32) {
        let is_awaited = self.sending.get(&id).is_some_and(|sending| sending.stage == Stage::Connecting);
        let most = self.most[purpose as usize];
        if is_awaited && epoch != self.server.epoch {
            self.connect(id, 0);
        } else if is_awaited {
            self.transmit(id, epoch);
        } else if !self.dead[instance] && self.pool(instance, purpose).open < most {
            // One connection goes on to open for the next statement.
            self.pool(instance, purpose).open += 1;
            self.give_back(instance, purpose, epoch);
        } else {
            self.server.disconnect(epoch);
        }
    }

    fn arrive(&mut self, app: &mut A, id: Id, epoch: u32) {
        let now = self.now();
        let Some(sending) = self.sending.get(&id) else { return };
        match self.server.conditions.loss(now) {
            Some(Loss::Silent) => {}
            None if epoch == self.server.epoch => {
                let cost = app.cost(&sending.statement, &self.server.conditions.database);
                self.figures.statements(now, 1);
                let end = self.server.work(cost, now, &mut self.figures);
                self.events.at(end, Event::Execute { id, epoch });
            }
            _ => self.after(0, Event::Fail { id }),
        }
    }

    fn execute(&mut self, app: &mut A, id: Id, epoch: u32) {
        let now = self.now();
        if epoch != self.server.epoch {
            if self.server.conditions.loss(now) != Some(Loss::Silent) {
                self.after(0, Event::Fail { id });
            }
            return;
        }
        let Some(sending) = self.sending.get(&id) else { return };
        let statement = sending.statement.clone();
        let committed = now + self.server.conditions.commit(now);
        let Outcome { reply, commits, core, further } = app.execute(self, &statement, committed);
        self.figures.statements(now, further);
        let worked = if core > 0 { self.server.work(core, now, &mut self.figures) } else { now };
        let ready = if commits { committed.max(worked) } else { worked };
        let trips = (0..2 * further).map(|_| self.server.conditions.one_way(now)).sum::<Time>();
        self.after(ready - now + trips, Event::Deliver { id, epoch, reply });
    }

    /// A statement fails for its sender.
    fn failed(&mut self, app: &mut A, id: Id, failure: Failure) {
        let Some(sending) = self.sending.get_mut(&id) else { return };
        let (instance, purpose, stage) = (sending.instance, sending.purpose, sending.stage);
        let failure = match stage {
            Stage::GivenUp => return,
            Stage::Waiting => {
                self.pool(instance, purpose).waiting.retain(|waiting| *waiting != id);
                Failure::NoConnection
            }
            Stage::Connecting => {
                self.close(instance, purpose, None);
                Failure::NoConnection
            }
            Stage::Sent(epoch) => {
                self.close(instance, purpose, Some(epoch));
                failure
            }
        };
        let Some(sending) = self.sending.get_mut(&id) else { return };
        let Sending { statement, at, .. } = sending;
        let sent = Sending { instance, purpose, statement: statement.clone(), stage, at: *at };
        // The server may still run what has no reply.
        sending.stage = Stage::GivenUp;
        if failure != Failure::NoReply {
            self.sending.remove(&id);
        }
        self.reply(app, sent, Err(failure));
    }
}
