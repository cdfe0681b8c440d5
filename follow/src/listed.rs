//! The objects that one round of a watch has listed.

use std::collections::HashMap;
use std::time::Instant;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// All existing objects within a watch's scope, by namespace and name. Only names and UIDs are kept, because
/// a list of ten thousand objects must not stay in memory as a whole.
#[derive(Debug)]
pub struct Listed {
    /// The namespace of the watch; `None` for all namespaces.
    namespace: Option<String>,
    uids: HashMap<Option<String>, HashMap<String, Option<String>>>,
    began: Instant,
}

/// The version of an object as a number, which grows with every write. `None` if it is not a number and
/// cannot be compared.
pub fn version(object: &ObjectMeta) -> Option<u64> {
    object.resource_version.as_ref()?.parse().ok()
}

impl Listed {
    /// An empty list, of one namespace or of all.
    pub fn new(namespace: Option<String>) -> Self {
        Self { namespace, uids: HashMap::new(), began: Instant::now() }
    }

    /// Adds an object.
    pub fn add(&mut self, object: &ObjectMeta) {
        let ObjectMeta { namespace, name, uid, .. } = object;
        let names = self.uids.entry(namespace.clone()).or_default();
        names.insert(name.clone().unwrap_or_default(), uid.clone());
    }

    /// When the list was requested: its data is at least this recent.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.uids.values().map(HashMap::len).sum()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this exact object is gone. A later object of the same name is a different one.
    pub fn lacks(&self, object: &ObjectMeta) -> bool {
        let ObjectMeta { namespace, name, uid, .. } = object;
        self.looks_in(namespace.as_ref())
            && self.uid(namespace.as_ref(), name.as_deref().unwrap_or_default()) != Some(uid)
    }

    /// Whether no object of this name exists.
    pub fn lacks_name(&self, namespace: Option<&String>, name: &str) -> bool {
        self.looks_in(namespace) && self.uid(namespace, name).is_none()
    }

    fn looks_in(&self, namespace: Option<&String>) -> bool {
        self.namespace.is_none() || self.namespace.as_ref() == namespace
    }

    fn uid(&self, namespace: Option<&String>, name: &str) -> Option<&Option<String>> {
        self.uids.get(&namespace.cloned())?.get(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(namespace: &str, name: &str, uid: &str) -> ObjectMeta {
        let some = |text: &str| Some(text.to_owned());
        ObjectMeta { namespace: some(namespace), name: some(name), uid: some(uid), ..ObjectMeta::default() }
    }

    #[test]
    fn what_was_not_listed_is_lacking_and_so_is_one_that_was_replaced_by_its_namesake() {
        let mut listed = Listed::new(None);
        listed.add(&object("a", "kept", "1"));
        listed.add(&object("a", "replaced", "3"));
        assert!(!listed.lacks(&object("a", "kept", "1")));
        assert!(listed.lacks(&object("a", "replaced", "2")));
        assert!(listed.lacks(&object("b", "kept", "1")));
        let lacks = |namespace: &str, name| listed.lacks_name(Some(&namespace.to_owned()), name);
        assert!(!lacks("a", "replaced") && lacks("a", "gone") && lacks("b", "kept"));
        assert_eq!(listed.len(), 2);
    }

    #[test]
    fn a_watch_of_one_namespace_knows_nothing_of_others() {
        let listed = Listed::new(Some("a".to_owned()));
        assert!(listed.lacks(&object("a", "x", "1")) && !listed.lacks(&object("b", "x", "1")));
        assert!(!listed.lacks_name(Some(&"b".to_owned()), "x"));
    }
}
