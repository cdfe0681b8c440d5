//! The Kubernetes permissions of programs and people, as data. Each program has its own table beside the code
//! that needs the rights; `make gen` writes the RBAC manifests and docs/rbac.md from all tables, so that a
//! table explains every right that is granted.

/// Where the rights of a role apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the whole cluster, and for objects without a namespace.
    Cluster,
    /// In the namespaces of users: in all of them, or only in those that an administrator names (the
    /// namespaced mode).
    Tenants,
    /// In the program's own namespace.
    Own,
    /// Wherever an administrator binds the Kubernetes role `view`, `edit` or `admin`, to which the rights are
    /// added.
    AddedTo(&'static str),
}

/// Rights that are granted together.
#[derive(Clone, Copy, Debug)]
pub struct Role {
    /// The name of the Role or ClusterRole, and of its binding.
    pub name: &'static str,
    /// Where the role applies.
    pub place: Place,
    /// The service account that gets the role; empty for roles of people.
    pub account: &'static str,
    /// The purpose of the role.
    pub why: &'static str,
    /// The rights in the role.
    pub rights: &'static [Right],
}

/// The permitted actions on a resource.
#[derive(Clone, Copy, Debug)]
pub struct Right {
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// The resource, with its subresource.
    pub resource: &'static str,
    /// Limits the right to objects with these names; empty for all.
    pub names: &'static [&'static str],
    /// The permitted verbs.
    pub verbs: &'static [&'static str],
    /// The purpose of the right.
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

    /// Limits the right to objects with these names.
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
        why: "Users who may view a namespace may view its runs.",
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
        why: "Users who may edit a namespace may run Pipelines in it.",
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
