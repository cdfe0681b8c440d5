//! Rules of a ReferenceGrant.

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, Violation};
use super::{Context, Validate, names};
use crate::v1alpha1::{GrantFromKind, GrantToKind, ReferenceGrant};

impl Validate for ReferenceGrant {
    fn validate(&self, _context: &Context<'_>) -> Vec<Violation> {
        let mut out = Findings::default();
        let spec = Path::root().field("spec");
        for (index, from) in self.spec.from.iter().enumerate() {
            let at = spec.field("from").index(index);
            names::check_namespace(&at.field("namespace"), &from.namespace, &mut out);
            // Runs use Pipelines and, through them, Secrets; Pipelines refer to Secrets only.
            let names_secrets = self.spec.to.iter().any(|to| to.kind == GrantToKind::Secret);
            if from.kind == GrantFromKind::Pipeline && !names_secrets {
                let message = "Pipelines can refer only to Secrets, and spec.to lists no Secret";
                let fix = "add {kind: Secret} to spec.to, or remove this entry";
                out.add(&at.field("kind"), Rule::GrantUseless, message, fix);
            }
        }
        for (index, to) in self.spec.to.iter().enumerate() {
            if let Some(name) = &to.name {
                names::check_object(&spec.field("to").index(index).field("name"), name, &mut out);
            }
        }
        out.into_vec()
    }
}
