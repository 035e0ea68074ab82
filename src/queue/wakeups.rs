//! Wakeups: which tasks of this process wait for a key that may become free.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::sync::Notify;

use crate::{
    key::Key,
    session::{time::Instant, timers::timeout_at},
    sync::lock,
};

/// The tasks of this process that wait for a wakeup for a key.
#[derive(Default)]
pub(crate) struct Wakeups(Mutex<HashMap<Key, Vec<Arc<Notify>>>>);

impl Wakeups {
    /// Subscribes to all of these keys until the subscription is dropped.
    pub fn subscribe(self: &Arc<Self>, keys: &Arc<[Key]>) -> Subscription {
        let notify = Arc::new(Notify::new());
        let mut wakeups = lock(&self.0);
        for key in keys.iter() {
            wakeups.entry(key.clone()).or_default().push(notify.clone());
        }
        Subscription { keys: keys.clone(), wakeups: self.clone(), notify }
    }

    /// Wakes the subscribers of this key, which may be free. Not under the lock: a waker may poll
    /// its task at once, or wait for one that ends a subscription.
    pub fn notify(&self, key: &str) {
        let subscribed = lock(&self.0).get(key).cloned().unwrap_or_default();
        subscribed.iter().for_each(|notify| notify.notify_one());
    }

    /// Counts the subscriptions, of each key.
    pub fn count(&self) -> u32 {
        lock(&self.0).values().map(Vec::len).sum::<usize>().try_into().unwrap_or(u32::MAX)
    }

    /// Wakes all subscribers: any key may be free.
    pub fn notify_all(&self) {
        let subscribed: Vec<_> = lock(&self.0).values().flatten().cloned().collect();
        subscribed.iter().for_each(|notify| notify.notify_one());
    }
}

/// Receives a wakeup when one of its keys may be free.
pub(crate) struct Subscription {
    keys: Arc<[Key]>,
    wakeups: Arc<Wakeups>,
    notify: Arc<Notify>,
}

impl Subscription {
    /// Waits for the next wakeup, up to this limit. A wakeup that arrived before the call is not
    /// lost.
    pub async fn notified_before(&self, limit: Instant) {
        // The limit ends the wait like a wakeup.
        let _ = timeout_at(limit, self.notify.notified()).await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut wakeups = lock(&self.wakeups.0);
        for key in self.keys.iter() {
            if let Some(notify) = wakeups.get_mut(key) {
                notify.retain(|notify| !Arc::ptr_eq(notify, &self.notify));
                if notify.is_empty() {
                    wakeups.remove(key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        sync::atomic::{AtomicUsize, Ordering},
        task::{Context, Wake, Waker},
    };

    use super::*;

    /// Counts the wakes that find the lock free.
    #[derive(Default)]
    struct Waiter {
        wakeups: Arc<Wakeups>,
        woken: AtomicUsize,
    }

    impl Wake for Waiter {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(usize::from(self.wakeups.0.try_lock().is_ok()), Ordering::Relaxed);
        }
    }

    #[test]
    fn a_waker_may_end_a_subscription() {
        let waiter = Arc::<Waiter>::default();
        let waker = Waker::from(waiter.clone());
        let subscription = waiter.wakeups.subscribe(&[Key::new("k").unwrap()].into());
        let wakes = |notify: &dyn Fn()| {
            let (mut notified, mut context) = (pin!(subscription.notify.notified()), Context::from_waker(&waker));
            assert!(notified.as_mut().poll(&mut context).is_pending());
            notify();
            assert!(notified.poll(&mut context).is_ready());
            waiter.woken.swap(0, Ordering::Relaxed)
        };
        assert_eq!(wakes(&|| waiter.wakeups.notify("k")), 1);
        assert_eq!(wakes(&|| waiter.wakeups.notify_all()), 1);
    }
}
