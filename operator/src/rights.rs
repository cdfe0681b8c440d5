//! The operator's Kubernetes permissions: every call that it makes, and nothing else. `make gen` generates
//! RBAC from them.

use crds::rights::{GROUP, Place, Right, Role};

use crate::LEASE;
use crate::run::NOTES;

const ACCOUNT: &str = "openfilter-operator";

/// The operator's roles.
pub const ROLES: &[Role] = &[
    Role {
        name: "openfilter-operator-tenants",
        place: Place::Tenants,
        account: ACCOUNT,
        why: "What the operator does in the namespaces of users.",
        rights: &[
            Right::to(GROUP, "pipelines", &["list", "watch"], "follow the Pipelines that runs refer to"),
            Right::to(
                GROUP,
                "pipelines/status",
                &["update"],
                "report whether a Pipeline is valid and has its credentials",
            ),
            Right::to(GROUP, "referencegrants", &["list", "watch"], "know which references are permitted"),
            Right::to(
                GROUP,
                "pipelineruns",
                &["get", "list", "watch", "patch"],
                "follow runs, and set and remove their finalizer",
            ),
            Right::to(GROUP, "pipelineruns/status", &["update"], "report the progress of a run"),
            Right::to(
                GROUP,
                "pipelineruns/finalizers",
                &["update"],
                "make runs own their Job, Secrets and snapshot with blockOwnerDeletion, where the cluster requires this right",
            ),
            Right::to(
                "batch",
                "jobs",
                &["get", "list", "watch", "create", "patch", "delete"],
                "one Job per run: create it, change its parallelism, remove it with the run",
            ),
            Right::to(
                "batch",
                "jobs/status",
                &["patch"],
                "write their counts: the operator manages its Jobs itself (managedBy)",
            ),
            Right::to(
                "batch",
                "jobs/finalizers",
                &["update"],
                "make Jobs own their pods with blockOwnerDeletion, where the cluster requires this right",
            ),
            Right::to(
                "",
                "pods",
                &["list", "watch", "create", "delete", "deletecollection"],
                "one pod per file: create it, see how it ends, remove it",
            ),
            Right::to(
                "apps",
                "controllerrevisions",
                &["get", "create", "delete"],
                "keep the Pipeline as it was when a run started, and remove it with the run",
            ),
            Right::to(
                "",
                "secrets",
                &["get", "create", "patch", "delete"],
                "read credentials of buckets by name; create and remove the Secrets of a run's workers. Never listed or watched",
            ),
            Right::to("events.k8s.io", "events", &["create", "patch"], "report events to users"),
        ],
    },
    Role {
        name: "openfilter-operator",
        place: Place::Own,
        account: ACCOUNT,
        why: "The operator's own state.",
        rights: &[
            Right::to("coordination.k8s.io", "leases", &["create"], "start the leader election"),
            Right::to(
                "coordination.k8s.io",
                "leases",
                &["get", "update"],
                "take part in the leader election",
            )
            .named(&[LEASE]),
            Right::to(
                "",
                "configmaps",
                &["get", "create", "patch"],
                "record what must still be removed from Valkey",
            )
            .named(&[NOTES]),
        ],
    },
];
