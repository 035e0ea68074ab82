//! What the locks of one application pool share.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, Weak},
};

use sqlx::Pool;

use crate::{store::Store, sync::lock};

type Known = HashMap<(usize, TypeId), Weak<dyn Any + Send + Sync>>;

/// By the address of a pool's options, which lie within what all clones of the pool share.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// Returns what exists of this type for the pool, or creates it. It has to keep the pool, so that
/// no other pool gets the same address.
pub(crate) fn of_pool<DB: Store, T: Send + Sync + 'static>(pool: &Pool<DB>, create: impl FnOnce() -> T) -> Arc<T> {
    let place = (std::ptr::from_ref(pool.options()).addr(), TypeId::of::<T>());
    let mut known = lock(&KNOWN);
    if let Some(Ok(shared)) = known.get(&place).and_then(Weak::upgrade).map(Arc::downcast) {
        return shared;
    }
    known.retain(|_, shared| shared.strong_count() > 0);
    let shared = Arc::new(create());
    let any: Arc<dyn Any + Send + Sync> = shared.clone();
    known.insert(place, Arc::downgrade(&any));
    shared
}
