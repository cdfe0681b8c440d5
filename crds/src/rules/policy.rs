//! Rules of a PipelinePolicy: everything in it must compile before it is stored. Checking a policy means
//! compiling it.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::path::Path;
use super::rule::Rule;
use super::schema::{self, Kind};
use super::violation::{Findings, Violation, quote};
use super::{Context, Validate, names, suggest};
use crate::policy::{
    Bound, Check, CompiledDefault, CompiledRule, Expression, Field, FieldPath, NoSuchField, Test, Unusable,
    compile_regex_whole, compile_schema,
};
use crate::v1alpha1::{
    PipelinePolicy, PipelinePolicySpec, PolicyDefault, PolicyRange, PolicyRule, PolicyTarget,
};

impl From<PolicyTarget> for Kind {
    fn from(target: PolicyTarget) -> Self {
        match target {
            PolicyTarget::Pipeline => Self::Pipeline,
            PolicyTarget::PipelineRun => Self::PipelineRun,
        }
    }
}

impl Validate for PipelinePolicy {
    fn validate(&self, _context: &Context<'_>) -> Vec<Violation> {
        compile(&self.spec).err().unwrap_or_default()
    }
}

/// The rules and defaults of a policy, or everything that is wrong with it.
pub(crate) fn compile(
    policy: &PipelinePolicySpec,
) -> Result<(Vec<CompiledRule>, Vec<CompiledDefault>), Vec<Violation>> {
    let mut out = Findings::default();
    let spec = Path::root().field("spec");
    let PipelinePolicySpec { namespace_selector, applies_to, action: _, rules, defaults } = policy;
    if rules.is_empty() && defaults.is_empty() {
        let fix = "add at least one entry to spec.rules or spec.defaults";
        out.add(&spec, Rule::PolicyEmpty, "the policy has neither rules nor defaults and does nothing", fix);
    }
    if let Some(selector) = namespace_selector {
        check_selector(&spec.field("namespaceSelector"), selector, &mut out);
    }
    let (mut seen, mut compiled_rules) = (HashMap::new(), Vec::new());
    for (index, rule) in rules.iter().enumerate() {
        let at = spec.field("rules").index(index);
        if let Some(first) = seen.insert(&rule.name, index) {
            let message = format!("{} is also the name of spec.rules[{first}]", quote(&rule.name));
            out.add(&at.field("name"), Rule::PolicyRuleName, message, "give each rule a name of its own");
        }
        if !names::is_dns_label(&rule.name) {
            let message = format!("{} is not a rule name", quote(&rule.name));
            let fix = names::name_fix(" and hyphens", &rule.name);
            out.add(&at.field("name"), Rule::PolicyRuleName, message, fix);
        }
        let compiled = compile_rule(&at, rule, applies_to, &mut out);
        compiled_rules.extend(or_say_so(compiled, &at, &mut out));
    }
    let (mut defaulted, mut compiled_defaults) = (HashMap::new(), Vec::new());
    for (index, default) in defaults.iter().enumerate() {
        let at = spec.field("defaults").index(index);
        let compiled = compile_default(&at, default, applies_to, &mut out);
        compiled_defaults.extend(or_say_so(compiled, &at, &mut out));
        if let Some(first) = defaulted.insert(&default.field, index) {
            let message =
                format!("{} already has a default in spec.defaults[{first}]", quote(&default.field));
            out.add(&at.field("field"), Rule::PolicyField, message, "keep one of the two");
        }
    }
    if out.is_empty() { Ok((compiled_rules, compiled_defaults)) } else { Err(out.into_vec()) }
}

/// Adds a reason if something does not compile and no reason was given: without one, the policy would be in
/// force with less than was written.
fn or_say_so<T>(compiled: Option<T>, at: &Path, out: &mut Findings) -> Option<T> {
    if compiled.is_none() && out.is_empty() {
        out.add(at, Rule::PolicyRuleForm, "it could not be compiled", "write it in another way");
    }
    compiled
}

/// A default that does not fit would make the API server refuse every object that omits the field, or drop
/// the value.
fn compile_default(
    at: &Path,
    default: &PolicyDefault,
    targets: &[PolicyTarget],
    out: &mut Findings,
) -> Option<CompiledDefault> {
    let PolicyDefault { field, value } = default;
    let at_field = at.field("field");
    let path = parse_path(&at_field, field, out)?;
    if !path.is_writable() {
        let message = format!("{} cannot have a default", quote(field));
        let fix = "name a field below spec, metadata.labels or metadata.annotations";
        out.add(&at_field, Rule::PolicyField, message, fix);
        return None;
    }
    let (field, schemas) = find_field(&at_field, field, path, targets, out);
    for schema in schemas {
        schema::walk(&at.field("value"), schema, value, out);
    }
    Some(CompiledDefault::new(field, value.clone()))
}

/// Finds the kinds that have a field, and its schema in each. If no kind has it, that is a violation: a rule
/// about the field would silently check nothing.
fn find_field(
    at: &Path,
    field: &str,
    path: FieldPath,
    targets: &[PolicyTarget],
    out: &mut Findings,
) -> (Field, Vec<&'static Value>) {
    let (mut found, mut schemas, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for target in targets {
        let kind = Kind::from(*target);
        match path.within(kind.schema()) {
            Ok(schema) => {
                found.push(*target);
                schemas.push(schema);
            }
            Err(none) => missing.push((kind, none)),
        }
    }
    // The kind that fits best is the one that was meant.
    let nearest = missing.iter().max_by_key(|(_, none)| none.steps);
    if let Some((kind, none)) = nearest.filter(|_| found.is_empty()) {
        no_such_field(at, field, &kind.to_string(), none, out);
    }
    (Field { path, targets: found }, schemas)
}

fn no_such_field(at: &Path, field: &str, kind: &str, missing: &NoSuchField<'_>, out: &mut Findings) {
    let NoSuchField { name, steps: _, known } = missing;
    let message = format!("{} is not a field of a {kind}: there is no {name}", quote(field));
    let fix = if known.is_empty() {
        format!("name a field that `kubectl explain {}` shows", kind.to_lowercase())
    } else {
        suggest::fix(name, known)
    };
    out.add(at, Rule::PolicyField, message, fix);
}

/// A selector that selects nothing by mistake would silently leave a policy without effect.
fn check_selector(at: &Path, selector: &LabelSelector, out: &mut Findings) {
    const OPERATORS: [&str; 4] = ["In", "NotIn", "Exists", "DoesNotExist"];
    names::check_labels_of(
        &at.field("matchLabels"),
        selector.match_labels.iter().flatten(),
        Rule::PolicySelector,
        out,
    );
    for (index, requirement) in selector.match_expressions.iter().flatten().enumerate() {
        let at = at.field("matchExpressions").index(index);
        let operator = requirement.operator.as_str();
        let values = requirement.values.as_ref().map_or(0, Vec::len);
        if !OPERATORS.contains(&operator) {
            let message = format!("{} is not one of {}", quote(operator), OPERATORS.join(", "));
            out.add(&at.field("operator"), Rule::PolicySelector, message, suggest::fix(operator, &OPERATORS));
        } else if matches!(operator, "In" | "NotIn") == (values == 0) {
            let message = format!("{operator} with {values} values is not a valid requirement");
            out.add(
                &at.field("values"),
                Rule::PolicySelector,
                message,
                "give values to In and NotIn, and none to Exists and DoesNotExist",
            );
        }
    }
}

fn compile_rule(
    at: &Path,
    rule: &PolicyRule,
    targets: &[PolicyTarget],
    out: &mut Findings,
) -> Option<CompiledRule> {
    let PolicyRule {
        name,
        message,
        message_expression,
        cel,
        field,
        regex,
        range,
        required,
        forbidden,
        schema,
    } = rule;
    let message_expression = message_expression.as_ref().map(|expression| {
        let fix = "write an expression whose value is a text, for example 'at most 50, not ' + string(object.spec.execution.parallelism)";
        compile_cel(&at.field("messageExpression"), expression, fix, out)
    });
    let checks =
        [regex.is_some(), range.is_some(), required.is_some(), forbidden.is_some(), schema.is_some()]
            .into_iter()
            .filter(|set| *set)
            .count();
    let (mut condition, mut checked) = (None, None);
    match (cel, field) {
        (Some(_), None) if checks > 0 => {
            let message = "cel cannot be combined with regex, range, required, forbidden or schema, which check a field";
            out.add(at, Rule::PolicyRuleForm, message, "write a rule for each");
        }
        (Some(cel), None) => {
            let fix = "write an expression that is true for what is allowed, for example object.spec.execution.parallelism <= 50";
            condition = compile_cel(&at.field("cel"), cel, fix, out);
        }
        (None, Some(_)) if checks != 1 => {
            let message = format!("the rule has a field and {checks} checks for it");
            out.add(
                at,
                Rule::PolicyRuleForm,
                message,
                "write exactly one of regex, range, required, forbidden and schema",
            );
        }
        (None, Some(field)) => {
            let at = at.field("field");
            checked = parse_path(&at, field, out).map(|path| find_field(&at, field, path, targets, out).0);
        }
        (Some(_), Some(_)) => {
            out.add(at, Rule::PolicyRuleForm, "the rule has both cel and field", "write a rule for each");
        }
        (None, None) => {
            let fix = "write cel, or field with one of regex, range, required, forbidden and schema";
            out.add(at, Rule::PolicyRuleForm, "the rule has neither cel nor field and checks nothing", fix);
        }
    }
    for (name, value) in [("required", required), ("forbidden", forbidden)] {
        if *value == Some(false) {
            out.add(
                &at.field(name),
                Rule::PolicyRuleForm,
                "false has no effect",
                format!("write {name}: true, or remove the rule"),
            );
        }
    }
    let regex = regex.as_ref().and_then(|regex| compile_regex(&at.field("regex"), regex, out));
    let range = range.as_ref().and_then(|range| compile_range(&at.field("range"), range, out));
    let schema = schema.as_ref().and_then(|schema| compile_json_schema(&at.field("schema"), schema, out));
    let required = (*required == Some(true)).then_some(Check::Required);
    let forbidden = (*forbidden == Some(true)).then_some(Check::Forbidden);
    let check = regex.or(range).or(schema).or(required).or(forbidden);
    let test = match (condition, checked) {
        (Some(condition), _) => Test::Cel(condition),
        (None, Some(field)) => Test::Field(field, check?),
        (None, None) => return None,
    };
    let message_expression = match message_expression {
        None => None,
        Some(compiled) => Some(compiled?),
    };
    Some(CompiledRule { name: name.clone(), message: message.clone(), message_expression, test })
}

fn compile_cel(at: &Path, cel: &str, fix: &str, out: &mut Findings) -> Option<Expression> {
    let wrong = |error: String| {
        let message = format!("{} is not a usable CEL expression ({error})", quote(cel));
        out.add(at, Rule::PolicyCel, message, fix);
    };
    Expression::compile(cel).map_err(wrong).ok()
}

fn compile_regex(at: &Path, regex: &str, out: &mut Findings) -> Option<Check> {
    let wrong = |error: String| {
        let message = format!("{} is not a usable regular expression ({error})", quote(regex));
        out.add(at, Rule::PolicyRegex, message, "use RE2 syntax, without look-around and back-references");
    };
    compile_regex_whole(regex).map(Check::Regex).map_err(wrong).ok()
}

fn compile_json_schema(at: &Path, schema: &Value, out: &mut Findings) -> Option<Check> {
    let wrong = |Unusable { why, fix }: Unusable| {
        out.add(at, Rule::PolicySchema, format!("it is not a usable JSON Schema ({why})"), fix);
    };
    compile_schema(schema).map(|schema| Check::Schema(Box::new(schema))).map_err(wrong).ok()
}

/// `spec.filters[*].image`, `metadata.labels["acme.example/team"]`: names, indexes, `[*]` and quoted keys.
fn parse_path(at: &Path, path: &str, out: &mut Findings) -> Option<FieldPath> {
    let parsed = path.parse().ok();
    if parsed.is_none() {
        let message = format!("{} is not a field path", quote(path));
        let fix = "begin with spec or metadata, separate names with dots and iterate over a list with [*]: spec.filters[*].image";
        out.add(at, Rule::PolicyField, message, fix);
    }
    parsed
}

fn compile_range(at: &Path, range: &PolicyRange, out: &mut Findings) -> Option<Check> {
    let PolicyRange { min, max } = range;
    if min.is_none() && max.is_none() {
        out.add(at, Rule::PolicyRange, "it has neither min nor max", "write min, max or both");
    }
    let min = min.as_ref().and_then(|min| check_bound(&at.field("min"), min, out));
    let max = max.as_ref().and_then(|max| check_bound(&at.field("max"), max, out));
    if let (Some(min), Some(max)) = (&min, &max) {
        check_order(at, min, max, out);
    }
    Some(Check::Range { min, max })
}

fn check_order(at: &Path, min: &Bound, max: &Bound, out: &mut Findings) {
    match min.at_most(max) {
        Some(true) => {}
        Some(false) => {
            let message = format!(
                "min {} is above max {}, so nothing can satisfy it",
                quote(&min.text),
                quote(&max.text)
            );
            out.add(at, Rule::PolicyRange, message, "swap them");
        }
        None => {
            let fix = "write both as numbers, both as quantities or both as durations";
            let message =
                format!("min {} and max {} are of different kinds", quote(&min.text), quote(&max.text));
            out.add(at, Rule::PolicyRange, message, fix);
        }
    }
}

fn check_bound(at: &Path, bound: &IntOrString, out: &mut Findings) -> Option<Bound> {
    let bound = Bound::new(bound);
    let digits = bound.text.trim_start_matches('-');
    if digits.len() > 9 && digits.chars().all(|c| c.is_ascii_digit()) {
        let message = format!("{} has more than nine digits", quote(&bound.text));
        out.add(at, Rule::PolicyRange, message, "write it with a unit, for example 5G");
        return None;
    }
    if bound.quantity.is_none() && bound.duration.is_none() {
        let message = format!("{} is not a number, quantity or duration", quote(&bound.text));
        out.add(at, Rule::PolicyRange, message, "write for example 10, 4Gi or 2h");
        return None;
    }
    Some(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_does_not_compile_without_a_reason_gets_one() {
        let at = Path::root().field("spec").field("rules").index(0);
        let mut out = Findings::default();
        assert_eq!(or_say_so(Some(1), &at, &mut out), Some(1));
        assert!(out.is_empty());

        assert_eq!(or_say_so(None::<u8>, &at, &mut out), None);
        assert_eq!(or_say_so(None::<u8>, &at, &mut out), None, "one reason is enough");
        let reasons = out.into_vec();
        assert_eq!(reasons.len(), 1);
        assert_eq!((reasons[0].rule, reasons[0].field.as_str()), (Rule::PolicyRuleForm, "spec.rules[0]"));
    }
}
