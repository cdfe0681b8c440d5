//! The CustomResourceDefinitions, as they are installed and as `crds/*.yaml` contains them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use crate::v1alpha1::{Pipeline, PipelinePolicy, PipelineRun, ReferenceGrant};

/// All definitions of this API, in reading order.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![
        definition::<Pipeline>(),
        definition::<PipelineRun>(),
        definition::<PipelinePolicy>(),
        definition::<ReferenceGrant>(),
    ]
}

/// The definition of one kind.
pub fn definition<K: CustomResourceExt>() -> CustomResourceDefinition {
    let mut crd = K::crd();
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            tidy(schema);
        }
    }
    crd
}

/// Removes the parts of a derived schema that an API server should not see.
fn tidy(schema: &mut JSONSchemaProps) {
    drop_nullable(schema);
    // Lines of a doc comment end at the width of the source file; `kubectl explain` wraps them itself.
    if let Some(description) = schema.description.as_mut() {
        *description = description.replace("\n\n", "\u{0}").replace('\n', " ").replace('\u{0}', "\n\n");
    }
    for child in schema.properties.iter_mut().flat_map(|properties| properties.values_mut()) {
        tidy(child);
    }
    match schema.items.as_mut() {
        Some(JSONSchemaPropsOrArray::Schema(items)) => tidy(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(tidy),
        None => {}
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = schema.additional_properties.as_mut() {
        tidy(values);
    }
}

/// `Option` fields are generated as nullable, and then a stored `null` would satisfy `has()` in CEL rules.
/// Without the flag, the API server drops nulls on arrival, so that null and absent are the same.
fn drop_nullable(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    if let Some(values) = schema.enum_.as_mut() {
        values.retain(|value| !value.0.is_null());
    }
}
