//! Rules of a Pipeline.

use std::collections::HashMap;

use protocol::container::{CLAIMER, INSTALL, PUBLISHER, WORKER};

use super::path::Path;
use super::rule::Rule;
use super::violation::{Findings, Violation, quote};
use super::{Context, Validate, bucket, env, image, names, quantity, suggest, warm};
use crate::v1alpha1::{Filter, Mode, Order, Pipeline, PipelineSpec, PodOptions};

/// Containers that the operator adds to a pod that processes one file. With `mode: Warm` these names are
/// reserved too, so that changing the mode back never invalidates a name.
const RESERVED_NAMES: [&str; 2] = [CLAIMER, PUBLISHER];
/// Containers that the operator adds to Warm pods. In other modes these names are allowed, because Pipelines
/// that are older than Warm mode use them.
const RESERVED_WARM_NAMES: [&str; 2] = [INSTALL, WORKER];

impl Validate for Pipeline {
    fn validate(&self, context: &Context<'_>) -> Vec<Violation> {
        let mut out = Findings::default();
        let spec = Path::root().field("spec");
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let PipelineSpec { source, order: _, mode, warm: options, filters, sink, pod } = &self.spec;

        let at_source = spec.field("source");
        bucket::check(&at_source.field("bucket"), &source.bucket, namespace, context, &mut out);
        bucket::check_globs(&at_source.field("include"), &source.include, &mut out);
        bucket::check_globs(&at_source.field("exclude"), &source.exclude, &mut out);
        if let Some(options) = options {
            warm::check(&spec.field("warm"), *mode, options, &mut out);
        }
        check_filters(&spec.field("filters"), filters, *mode, &mut out);
        if let Some(sink) = sink {
            bucket::check(&spec.field("sink").field("bucket"), &sink.bucket, namespace, context, &mut out);
            check_sink(&spec, &self.spec, sink.from.as_deref(), &mut out);
        }
        if let Some(pod) = pod {
            check_pod(&spec.field("pod"), pod, &mut out);
        }
        out.into_vec()
    }
}

fn check_filters(field: &Path, filters: &[Filter], mode: Mode, out: &mut Findings) {
    let mut seen = HashMap::new();
    for (index, filter) in filters.iter().enumerate() {
        let at = field.index(index);
        check_filter_name(&at.field("name"), &filter.name, mode, out);
        if let Some(first) = seen.insert(&filter.name, index) {
            let message = format!("{} is also the name of {}", quote(&filter.name), field.index(first));
            let fix =
                format!("give each filter a name of its own, for example {}-{}", filter.name, index + 1);
            out.add(&at.field("name"), Rule::FilterNameUnique, message, fix);
        }
        image::check(&at.field("image"), &filter.image, out);
        warm::check_command(&at.field("command"), filter, mode, out);
        env::check(&at.field("env"), &filter.env, out);
        if let Some(resources) = &filter.resources {
            quantity::check(&at.field("resources"), resources, out);
        }
    }
}

fn check_filter_name(field: &Path, name: &str, mode: Mode, out: &mut Findings) {
    let reserved_for = if RESERVED_NAMES.contains(&name) {
        Some("every pod")
    } else if mode == Mode::Warm && RESERVED_WARM_NAMES.contains(&name) {
        Some("every pod of mode: Warm")
    } else {
        None
    };
    if let Some(pods) = reserved_for {
        let message = format!("{} is the name of a container that the operator adds to {pods}", quote(name));
        out.add(
            field,
            Rule::FilterNameReserved,
            message,
            format!("choose another name, for example my-{name}"),
        );
    } else if !names::is_dns_label(name) {
        let message = format!("{} is not a container name", quote(name));
        out.add(field, Rule::FilterName, message, names::name_fix(" and hyphens (at most 63)", name));
    }
}

fn check_sink(spec_field: &Path, spec: &PipelineSpec, from: Option<&str>, out: &mut Findings) {
    if spec.order != Order::Sequential {
        let message = format!(
            "it is {:?}, but a sink uploads after the last filter, and concurrent filters have no last one",
            spec.order
        );
        out.add(
            &spec_field.field("order"),
            Rule::SinkOrder,
            message,
            "write order: Sequential, or remove the sink",
        );
    }
    let filters: Vec<&str> = spec.filters.iter().map(|filter| filter.name.as_str()).collect();
    if let Some(from) = from.filter(|from| !filters.is_empty() && !filters.contains(from)) {
        let message = format!("{} is not one of the filters", quote(from));
        let fix = match suggest::nearest(from, filters.iter().copied()) {
            Some(word) => format!("did you mean {word}? Omit it to upload the last filter's results"),
            None => {
                format!("write one of {}, or omit it to upload the last filter's results", filters.join(", "))
            }
        };
        out.add(&spec_field.field("sink").field("from"), Rule::SinkFrom, message, fix);
    }
}

fn check_pod(field: &Path, pod: &PodOptions, out: &mut Findings) {
    let objects = [
        ("serviceAccountName", &pod.service_account_name),
        ("priorityClassName", &pod.priority_class_name),
        ("runtimeClassName", &pod.runtime_class_name),
    ];
    for (name, value) in objects {
        if let Some(value) = value {
            names::check_object(&field.field(name), value, out);
        }
    }
    for (index, secret) in pod.image_pull_secrets.iter().enumerate() {
        names::check_object(&field.field("imagePullSecrets").index(index).field("name"), &secret.name, out);
    }
    names::check_labels_of(&field.field("nodeSelector"), &pod.node_selector, Rule::PodLabel, out);
    names::check_labels(&field.field("labels"), &pod.labels, out);
    names::check_annotations(&field.field("annotations"), &pod.annotations, out);
}
