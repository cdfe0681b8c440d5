//! The webhook's Kubernetes permissions: every call that it makes, and nothing else. `make gen` generates
//! RBAC from them.

use crds::rights::{GROUP, Place, Right, Role};

use crate::args::{CONFIGURATION, SECRET};

const ACCOUNT: &str = "openfilter-webhook";
const ADMISSION: &str = "admissionregistration.k8s.io";

/// The roles of the webhook.
pub const ROLES: &[Role] = &[
    Role {
        name: "openfilter-webhook",
        place: Place::Cluster,
        account: ACCOUNT,
        why: "What the webhook must know about the cluster to judge an object.",
        rights: &[
            Right::to(
                GROUP,
                "pipelines",
                &["get", "list", "watch"],
                "judge runs by their Pipeline, even one too new for the watch to have shown it",
            ),
            Right::to(
                GROUP,
                "pipelineruns",
                &["list", "watch"],
                "find runIds that are taken, and runs that a change affects",
            ),
            Right::to(GROUP, "referencegrants", &["list", "watch"], "know which references are permitted"),
            Right::to(GROUP, "pipelinepolicies", &["list", "watch"], "enforce policies"),
            Right::to(GROUP, "pipelinepolicies/status", &["patch"], "report whether a policy is in force"),
            Right::to(
                "",
                "namespaces",
                &["get", "list", "watch"],
                "select namespaces by their labels; metadata only",
            ),
        ],
    },
    Role {
        name: "openfilter-webhook-tenants",
        place: Place::Tenants,
        account: ACCOUNT,
        why: "What the webhook looks up in the namespaces of users.",
        rights: &[Right::to(
            "",
            "secrets",
            &["get"],
            "see that a Pipeline's Secret is there and has its keys. Never listed or watched",
        )],
    },
    Role {
        name: "openfilter-webhook-trust",
        place: Place::Cluster,
        account: ACCOUNT,
        why: "Only where the webhook issues its own certificates: the CA bundles that the API server trusts.",
        rights: &[
            Right::to(
                ADMISSION,
                "validatingwebhookconfigurations",
                &["get", "patch"],
                "keep caBundle up to date",
            )
            .named(&[CONFIGURATION]),
            Right::to(
                ADMISSION,
                "mutatingwebhookconfigurations",
                &["get", "patch"],
                "keep caBundle up to date",
            )
            .named(&[CONFIGURATION]),
        ],
    },
    Role {
        name: "openfilter-webhook-certificates",
        place: Place::Own,
        account: ACCOUNT,
        why: "Only where the webhook issues its own certificates: the Secret that all replicas share.",
        rights: &[
            Right::to("", "secrets", &["create"], "store the first certificates"),
            Right::to("", "secrets", &["get", "update"], "load and renew them").named(&[SECRET]),
        ],
    },
];
