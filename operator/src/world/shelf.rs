//! Objects of one kind, as the watches have shown them.

use std::collections::BTreeMap;
use std::sync::Arc;

use follow::Listed;
use kube::Resource;

/// Objects of one kind.
pub struct Shelf<I, K> {
    objects: BTreeMap<I, Arc<K>>,
}

impl<I, K> Default for Shelf<I, K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new() }
    }
}

impl<I: Ord, K: Resource> Shelf<I, K> {
    pub fn get(&self, id: &I) -> Option<&Arc<K>> {
        self.objects.get(id)
    }

    /// All objects, in order.
    pub fn all(&self) -> impl Iterator<Item = &Arc<K>> {
        self.objects.values()
    }

    /// The objects from this one onwards, in order.
    pub fn from(&self, first: I) -> impl Iterator<Item = (&I, &Arc<K>)> {
        self.objects.range(first..)
    }

    /// Adds an object; returns the one that it replaces.
    pub fn put(&mut self, id: I, mut object: K) -> Option<Arc<K>> {
        // These fields are half of most objects, and nothing reads them.
        object.meta_mut().managed_fields = None;
        self.objects.insert(id, Arc::new(object))
    }

    pub fn remove(&mut self, id: &I) -> Option<Arc<K>> {
        self.objects.remove(id)
    }

    /// Removes the objects that are gone; returns them.
    pub fn keep(&mut self, listed: &Listed) -> Vec<Arc<K>> {
        let gone = self.objects.extract_if(.., |_, object| listed.lacks(object.meta()));
        gone.map(|(_, object)| object).collect()
    }
}
