//! What a program or a person may do in Kubernetes, as data. Each program has its own table beside the code that needs the
//! rights; `make gen` writes the RBAC manifests and docs/rbac.md from all of them, so that no right is granted that no
//! line of a table explains.

/// Where the rights of a role hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the whole cluster, and for objects that are in no namespace.
    Cluster,
    /// In the namespaces of users: all of them, or only those that an administrator names (the namespaced mode).
    Tenants,
    /// In the namespace of the program itself.
    Own,
    /// Wherever an administrator binds `view`, `edit` or `admin` of Kubernetes, to which this is added.
    AddedTo(&'static str),
}

/// Rights that are given together.
#[derive(Clone, Copy, Debug)]
pub struct Role {
    /// Name of the Role or ClusterRole and of its binding.
    pub name: &'static str,
    /// Where it holds.
    pub place: Place,
    /// The service account that it is given to; empty for roles of people.
    pub account: &'static str,
    /// What it is for.
    pub why: &'static str,
    /// What it consists of.
    pub rights: &'static [Right],
}

/// What may be done with a resource.
#[derive(Clone, Copy, Debug)]
pub struct Right {
    /// API group; empty for the core.
    pub group: &'static str,
    /// Resource, with its subresource.
    pub resource: &'static str,
    /// Only objects of these names; all when empty.
    pub names: &'static [&'static str],
    /// What may be done.
    pub verbs: &'static [&'static str],
    /// What breaks without it.
    pub why: &'static str,
}

impl Right {
    /// A right to all objects of a resource.
    pub const fn to(
        group: &'static str,
        resource: &'static str,
        verbs: &'static [&'static str],
        why: &'static str,
    ) -> Self {
        Self { group, resource, names: &[], verbs, why }
    }

    /// The same, but only for objects of these names.
    pub const fn named(self, names: &'static [&'static str]) -> Self {
        Self { names, ..self }
    }
}

/// The group of this API.
pub const GROUP: &str = "filter.plainsight.ai";

const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "update", "patch", "delete", "deletecollection"];

/// The rights of people, added to the roles that every cluster has.
pub const PEOPLE: &[Role] = &[
    Role {
        name: "openfilter-view",
        place: Place::AddedTo("view"),
        account: "",
        why: "Whoever may view a namespace may view its runs.",
        rights: &[
            Right::to(GROUP, "pipelines", READ, "see what can be run"),
            Right::to(GROUP, "pipelineruns", READ, "see how runs get on"),
            Right::to(GROUP, "referencegrants", READ, "see what other namespaces may use"),
            Right::to(
                GROUP,
                "pipelinepolicies",
                READ,
                "see what is demanded; only with a cluster-wide binding",
            ),
        ],
    },
    Role {
        name: "openfilter-edit",
        place: Place::AddedTo("edit"),
        account: "",
        why: "Whoever may edit a namespace may run Pipelines in it.",
        rights: &[
            Right::to(GROUP, "pipelines", WRITE, "write Pipelines"),
            Right::to(GROUP, "pipelineruns", WRITE, "start, pause and delete runs"),
        ],
    },
    Role {
        name: "openfilter-admin",
        place: Place::AddedTo("admin"),
        account: "",
        why: "A grant opens a Secret or a Pipeline to another namespace: that is for the owner of the namespace to decide.",
        rights: &[Right::to(
            GROUP,
            "referencegrants",
            WRITE,
            "let other namespaces use something of this one",
        )],
    },
];
