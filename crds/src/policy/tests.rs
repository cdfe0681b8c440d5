//! Policies as a platform team writes them, and hostile ones.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

fn policy(rules: Value) -> Policy {
    let object = json!({
        "metadata": { "name": "p" },
        "spec": { "appliesTo": ["Pipeline", "PipelineRun"], "rules": rules }
    });
    Policy::compile(&serde_json::from_value(object).unwrap())
}

fn cel(expression: &str) -> Policy {
    policy(json!([{ "name": "r", "message": "no", "cel": expression }]))
}

fn run() -> Value {
    json!({
        "kind": "PipelineRun", "metadata": { "name": "monday", "namespace": "team-a" },
        "spec": { "execution": { "parallelism": 20, "list": (0..100).collect::<Vec<_>>() }, "text": "abc" }
    })
}

fn with_text(text: &str) -> Value {
    let mut run = run();
    run["spec"]["text"] = json!(text);
    run
}

fn findings(policies: impl IntoIterator<Item = Policy>, object: &Value) -> Vec<Finding> {
    let (request, namespace) =
        (json!({ "operation": "CREATE" }), json!({ "metadata": { "name": "team-a" } }));
    let pipeline = json!({ "spec": { "filters": [{ "name": "a" }] } });
    let subject = Subject {
        target: PolicyTarget::PipelineRun,
        object,
        old_object: None,
        request: Some(&request),
        namespace: Some(&namespace),
        pipeline: Some(&pipeline),
        usage: Some(Usage { active_runs: 3, parallelism: 40 }),
    };
    let until = Instant::now() + Duration::from_millis(500);
    policies.into_iter().collect::<PolicySet>().judge(&subject, &BTreeMap::new(), until)
}

fn problems(expression: &str) -> String {
    cel(expression).problems().iter().map(ToString::to_string).collect()
}

#[test]
fn expressions_see_the_object_the_request_the_namespace_and_the_pipeline() {
    for holds in [
        "object.spec.execution.parallelism <= 50",
        "object.metadata.namespace == namespaceObject.metadata.name",
        "usage.activeRuns == 3 && usage.parallelism + object.spec.execution.parallelism <= 60",
        "oldObject == null && request.operation == 'CREATE'",
        "pipeline.spec.filters.all(f, f.name.startsWith('a'))",
        "!has(object.spec.sink)",
        "object.spec.text.matches('^[a-c]+$') && object.spec.text.find('b') == 'b'",
        "quantity('1Gi').isGreaterThan(quantity('500Mi'))",
        "sets.contains([1, 2], [1]) && [1, 1].distinct() == [1]",
        "'a,b'.split(',').map(x, x + '!').join('-') == 'a!-b!'",
        "'%s is %d'.format(['x', 5]) == 'x is 5'",
        "duration('90m') <= duration('2h')",
        "object.spec.execution.list.filter(n, n > 97).size() == 2",
    ] {
        assert_eq!(problems(holds), "", "{holds}");
        assert_eq!(findings([cel(holds)], &run()), [], "{holds}");
    }
}

#[test]
fn a_broken_rule_is_named_with_the_authors_message() {
    let found = findings([cel("object.spec.execution.parallelism <= 10")], &run());
    assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), ["no [policy p/r]"]);
    let field = json!([{ "name": "r", "message": "at most 10", "field": "spec.execution.parallelism", "range": { "max": 10 } }]);
    let found = findings([policy(field)], &run());
    let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["spec.execution.parallelism: it is \"20\", above 10; at most 10 [policy p/r]"]);
}

#[test]
fn a_message_can_be_computed_and_falls_back_to_the_written_one() {
    let said = |expression: &str| {
        let rule =
            json!({ "name": "r", "message": "at most 10", "cel": "false", "messageExpression": expression });
        let field = json!({ "name": "f", "message": "at most 10", "field": "spec.execution.parallelism", "forbidden": true,
                            "messageExpression": expression });
        let found = findings([policy(json!([rule, field]))], &run());
        assert!(found[1].message.ends_with(&found[0].message), "{found:?}");
        found[0].message.clone()
    };
    assert_eq!(said("'at most 10, not ' + string(object.spec.execution.parallelism)"), "at most 10, not 20");
    let long = format!("'{}'", "a".repeat(1_025));
    for without_text in ["object.spec.nothing", "5", "''", "'two\\nlines'", long.as_str()] {
        assert_eq!(said(without_text), "at most 10", "{without_text}");
    }
    let rule = json!([{ "name": "r", "message": "no", "cel": "false", "messageExpression": "objekt.spec" }]);
    assert!(policy(rule).problems()[0].to_string().starts_with("spec.rules[0].messageExpression"));
}

#[test]
fn an_expression_that_fails_or_is_no_condition_denies_and_says_why() {
    for (expression, why) in [
        ("object.spec.execution.timeout == '2h'", "there is no field \"timeout\""),
        ("object.spec.execution.parallelism", "it is a number, not true or false"),
        ("object.spec.text / 2 == 1", "could not be evaluated"),
    ] {
        let found = findings([cel(expression)], &run());
        assert!(found.len() == 1 && found[0].message.contains(why), "{found:?}");
    }
}

#[test]
fn names_that_do_not_exist_are_refused_when_the_policy_is_compiled() {
    for (expression, why) in [
        ("objekt.spec == 1", "did you mean object?"),
        ("self.spec == 1", "there is no variable \\\"self\\\""),
        ("object.items.all(i, j == 1)", "there is no variable"),
        ("object.spec.text.isShouting()", "there is no function \\\"isShouting\\\""),
        ("sets.without([1], [2]) == []", "there is no"),
        ("Pod{} == 1", "type"),
        ("object.spec.text.matches('(?!x)')", "look-around"),
    ] {
        let why = why.replace("\\\"", "\"");
        assert!(problems(expression).contains(&why), "{expression}: {}", problems(expression));
    }
}

#[test]
fn hostile_expressions_are_refused_or_stopped_and_deny() {
    let long = |part: &str, times: usize| part.repeat(times);
    let searched = long("a", 60_000);
    let hostile = [
        "lists.range(1000000000).size() > 0".to_owned(),
        "lists.range(40000).map(i, object).size() > 0".to_owned(),
        "object.spec.execution.list.all(a, object.spec.execution.list.all(b, object.spec.execution.list.all(c, a + b + c >= 0)))".to_owned(),
        "'%s'.format([lists.range(100000).map(i, 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa').join(',')]) == ''".to_owned(),
        "lists.range(5000).distinct().size() > 0".to_owned(),
        "lists.range(30000).map(i, 'a').join('').replace('a', lists.range(30000).map(i, 'b').join('')) == ''".to_owned(),
        // Too deep to compile, and less deep.
        format!("['aaaaaaaa']{}.size() > 0", long(".map(a,a+a)", 200)),
        format!("['aaaaaaaa']{}.size() > 0", long(".map(a,a+a)", 25)),
        format!("[1]{}.size() > 0", long(".map(a,[a,a])", 200)),
        format!("[1]{}.size() > 0", long(".map(a,[a,a])", 25)),
        // Every match searches to the end.
        "object.spec.text.findAll('.*[^a]|a').size() > 0".to_owned(),
    ];
    for expression in hostile {
        let found = findings([cel(&expression)], &with_text(&searched));
        assert_eq!(found.len(), 1, "{expression} was let through");
    }
    for expression in [".map(a,a+a)", ".map(a,[a,a])"] {
        assert_eq!(
            problems(&format!("['aaaaaaaa']{}.size() > 0", long(expression, 25))),
            "",
            "it is metered"
        );
    }
}

/// A search that compares at every place would take days.
#[test]
fn looking_for_a_long_text_in_a_long_text_takes_no_longer_than_reading_both() {
    let long = "a".repeat(1_000_000);
    let part = format!("[object.spec.text.substring(0, {}), 'b'].join()", long.len() / 2);
    for expression in [
        format!("object.spec.text.indexOf({part}) == -1"),
        format!("object.spec.text.lastIndexOf({part}) == -1"),
    ] {
        assert_eq!(findings([cel(&expression)], &with_text(&long)), [], "{expression}");
    }
}

#[test]
fn places_in_texts_and_lists_are_found_as_in_kubernetes() {
    for holds in [
        "'äbcäbc'.indexOf('bc') == 1 && 'äbcäbc'.indexOf('bc', 2) == 4 && 'äbc'.indexOf('x') == -1",
        "'äbc'.indexOf('') == 0 && 'äbc'.indexOf('', 2) == 2 && 'äbc'.indexOf('c', 3) == -1",
        "'äbcäbc'.lastIndexOf('äbc') == 3 && 'äbcäbc'.lastIndexOf('äbc', 3) == 3 && 'äbcäbc'.lastIndexOf('äbc', 2) == 0",
        "'äbc'.lastIndexOf('') == 3 && 'äbc'.lastIndexOf('', 1) == 1 && 'äbc'.lastIndexOf('c', 3) == -1",
        "'äää'.lastIndexOf('ä', 1) == 1 && ''.lastIndexOf('a') == -1",
        "[1, 2, 1].indexOf(1) == 0 && [1, 2, 1].lastIndexOf(1) == 2 && [1].indexOf(3) == -1",
    ] {
        assert_eq!(findings([cel(holds)], &run()), [], "{holds}");
    }
    for fails in ["'abc'.indexOf('c', -1) == 2", "'abc'.lastIndexOf('c', -1) == 2", "'abc'.indexOf(1) == 2"] {
        let found = findings([cel(fails)], &run());
        assert!(
            found.len() == 1 && found[0].message.contains("could not be evaluated"),
            "{fails}: {found:?}"
        );
    }
}

/// The webhook evaluates on tokio's threads, which have 2 MiB, and a thread that needs more ends the process.
#[test]
fn the_deepest_expressions_that_compile_are_evaluated_on_a_small_stack() {
    const STACK: usize = 2 * 1024 * 1024;
    let repeated: [(&str, &str, &str); 9] = [
        ("1", "+1", " > 0"),
        ("'a'", "+'a'", " != ''"),
        ("", "false?1:", "1"),
        ("", "!(", "true"),
        ("object", ".spec", " == 1"),
        ("[1]", ".map(a,a)", ".size() == 1"),
        ("", "string(", "1"),
        ("", "[", "1"),
        ("1", "*1", " == 1"),
    ];
    for (start, part, end) in repeated {
        let written = |times: usize| {
            let closing = match part {
                "[" => "]".repeat(times),
                part if part.ends_with('(') => ")".repeat(times),
                _ => String::new(),
            };
            format!("{start}{}{end}{closing}", part.repeat(times))
        };
        let compiled = (1..).map(|times| Expression::compile(&written(times)));
        let deepest = compiled.take_while(Result::is_ok).last();
        let deepest = deepest.unwrap_or_else(|| panic!("no {part} compiles")).unwrap();
        let evaluate = move || {
            let object = run();
            let scope = super::cel::scope(&deepest.variables, |_| Some(&object));
            let _ = deepest.holds(&scope, Instant::now() + Duration::from_secs(600));
        };
        std::thread::Builder::new().stack_size(STACK).spawn(evaluate).unwrap().join().unwrap();
    }
}

/// Otherwise, replacing the parent with another value would get around a rule that forbids a field.
#[test]
fn a_field_of_what_has_no_fields_is_an_error_and_not_false() {
    for fails in ["!object.spec.text.privileged", "object.spec.text.privileged == false", "!oldObject.spec"] {
        let found = findings([cel(fails)], &run());
        assert!(found.len() == 1 && found[0].message.contains("does not support"), "{fails}: {found:?}");
    }
}

/// People write alternatives side by side, which is not deep.
#[test]
fn a_long_list_of_alternatives_compiles_and_is_evaluated() {
    for (operator, holds) in [(" || ", true), (" && ", false)] {
        let alternatives = (0..100).map(|number| format!("object.metadata.name == 'n{number}'"));
        let known = alternatives.chain(["object.metadata.name == 'monday'".to_owned()]);
        let expression = known.collect::<Vec<_>>().join(operator);
        assert_eq!(problems(&expression), "", "{operator}");
        assert_eq!(findings([cel(&expression)], &run()).is_empty(), holds, "{operator}");
    }
}

#[test]
fn expressions_that_are_too_deep_or_too_long_are_refused_and_the_parser_survives_them() {
    for expression in [
        format!("{}1{} == 1", "(".repeat(2000), ")".repeat(2000)),
        format!("{}1 == 1", "-(".repeat(1000)),
        format!("object{} == 1", ".a".repeat(2000)),
        format!("1{} == 1", "+1".repeat(2000)),
        format!("{}1", "true?1:".repeat(580)),
        format!("{}{}", "[".repeat(2000), "]".repeat(2000)),
        "[1].all(a, [1].all(b, [1].all(c, [1].all(d, true))))".to_owned(),
        " ".repeat(5000),
        "'%.999999999f'.format([1.0]) == ''".to_owned(),
        "object.spec.text.format([1]) == ''".to_owned(),
    ] {
        let start: String = expression.chars().take(40).collect();
        assert!(!problems(&expression).is_empty(), "{start}… was accepted");
    }
}

#[test]
fn a_policy_that_cannot_be_used_denies_what_it_selects_even_if_it_only_warns() {
    let object = json!({
        "metadata": { "name": "p" },
        "spec": { "appliesTo": ["PipelineRun"], "action": "Warn", "rules": [{ "name": "r", "message": "m", "cel": "object." }] }
    });
    let broken = Policy::compile(&serde_json::from_value(object).unwrap());
    assert_eq!(broken.size(), (0, 0));
    assert!(!broken.selects(PolicyTarget::Pipeline, &BTreeMap::new()));
    let found = findings([broken], &run());
    assert_eq!((found.len(), found[0].action), (1, PolicyAction::Deny));
    assert!(found[0].message.contains("cannot be used"), "{found:?}");
}

/// `#` begins a comment, which would hide the end of the text around the pattern.
#[test]
fn a_pattern_that_cannot_be_matched_as_a_whole_makes_the_policy_unusable() {
    let field = json!([{ "name": "r", "message": "m", "field": "spec.filters[*].image", "regex": "(?x) ghcr\\.io/.+ # ours" }]);
    let broken = policy(field);
    assert!(broken.problems()[0].to_string().starts_with("spec.rules[0].regex"), "{:?}", broken.problems());
    assert_eq!(findings([broken], &run()).len(), 1);
}

#[test]
fn a_stored_policy_that_cannot_be_read_denies_everything_because_nobody_knows_what_it_selects() {
    let unreadable = Policy::unreadable(&ObjectMeta::default(), "invalid type");
    assert!(unreadable.selects(PolicyTarget::Pipeline, &BTreeMap::new()));
    let found = findings([unreadable], &run());
    assert!(found.len() == 1 && found[0].message.contains("cannot be read"), "{found:?}");
}

#[test]
fn past_the_deadline_what_is_not_evaluated_denies() {
    let subject = Subject {
        target: PolicyTarget::PipelineRun,
        object: &run(),
        old_object: None,
        request: None,
        namespace: None,
        pipeline: None,
        usage: None,
    };
    let set: PolicySet = [cel("true")].into_iter().collect();
    let found = set.judge(&subject, &BTreeMap::new(), Instant::now() - Duration::from_millis(1));
    assert!(found.len() == 1 && found[0].message.contains("in time"), "{found:?}");
}

#[test]
fn only_selected_namespaces_and_kinds_are_judged() {
    let object = json!({
        "metadata": { "name": "p" },
        "spec": {
            "appliesTo": ["PipelineRun"], "namespaceSelector": { "matchLabels": { "env": "prod" } },
            "rules": [{ "name": "r", "message": "m", "cel": "false" }]
        }
    });
    let policy = Policy::compile(&serde_json::from_value(object).unwrap());
    let labels = |value: &str| BTreeMap::from([("env".to_owned(), value.to_owned())]);
    assert!(policy.selects(PolicyTarget::PipelineRun, &labels("prod")));
    assert!(!policy.selects(PolicyTarget::PipelineRun, &labels("dev")));
    assert!(!policy.selects(PolicyTarget::PipelineRun, &BTreeMap::new()));
    assert!(!policy.selects(PolicyTarget::Pipeline, &labels("prod")));
}

#[test]
fn the_first_policy_by_name_defaults_and_a_stored_run_keeps_what_it_has() {
    let defaulting = |name: &str, value: &str| {
        let object = json!({
            "metadata": { "name": name },
            "spec": { "appliesTo": ["PipelineRun"], "defaults": [{ "field": "spec.execution.timeout", "value": value }] }
        });
        Policy::compile(&serde_json::from_value(object).unwrap())
    };
    let set: PolicySet = [defaulting("b", "2h"), defaulting("a", "1h")].into_iter().collect();
    let default = |object: Value, stored: Option<&Value>| {
        let mut object = object;
        set.fill_in(PolicyTarget::PipelineRun, &BTreeMap::new(), &mut object, stored);
        object
    };
    let bare = json!({ "spec": {} });
    let filled = json!({ "spec": { "execution": { "timeout": "1h" } } });
    assert_eq!(default(bare.clone(), None), filled);
    assert_eq!(default(filled.clone(), None), filled);
    // Stored before the policies existed: adding a field now would change something immutable.
    assert_eq!(default(bare.clone(), Some(&bare)), bare);
    // Stored with the default, and applied again from a file without it.
    assert_eq!(default(bare.clone(), Some(&filled)), filled);
    // Stored with an older default.
    let older = json!({ "spec": { "execution": { "timeout": "5h" } } });
    assert_eq!(default(bare, Some(&older)), older);
}

#[test]
fn what_can_change_in_a_stored_run_can_be_removed() {
    let object = json!({ "metadata": { "name": "p" }, "spec": { "appliesTo": ["PipelineRun"], "defaults": [
        { "field": "metadata.labels.team", "value": "a" }, { "field": "spec.execution.maxFailedFiles", "value": 5 }] } });
    let set: PolicySet = [Policy::compile(&serde_json::from_value(object).unwrap())].into_iter().collect();
    let kept = |team: &str, failed: u32| {
        let stored = json!({ "metadata": { "labels": { "team": team } }, "spec": { "execution": { "maxFailedFiles": failed } } });
        let mut object = json!({ "metadata": {}, "spec": {} });
        set.fill_in(PolicyTarget::PipelineRun, &BTreeMap::new(), &mut object, Some(&stored));
        (object != json!({ "metadata": {}, "spec": {} }), object == stored)
    };
    assert_eq!(kept("b", 7), (false, false));
    assert_eq!(kept("a", 5), (true, true), "it would be filled in again");
}

#[test]
fn a_policy_for_both_kinds_requires_a_field_only_where_it_exists() {
    let required =
        |field: &str| policy(json!([{ "name": "r", "message": "m", "field": field, "required": true }]));
    assert_eq!(findings([required("spec.sink.bucket.region")], &run()), [], "runs have no sink");
    assert_eq!(findings([required("spec.execution.fileTimeout")], &run()).len(), 1);
    assert_eq!(findings([required("metadata.labels.team")], &run()).len(), 1, "both kinds have labels");
}

#[test]
fn a_policy_for_both_kinds_defaults_a_field_only_where_it_exists() {
    let object = json!({ "metadata": { "name": "p" }, "spec": { "appliesTo": ["Pipeline", "PipelineRun"],
        "defaults": [{ "field": "spec.execution.timeout", "value": "1h" }] } });
    let set: PolicySet = [Policy::compile(&serde_json::from_value(object).unwrap())].into_iter().collect();
    let filled = |target| {
        let mut object = json!({ "spec": {} });
        set.fill_in(target, &BTreeMap::new(), &mut object, None);
        object
    };
    assert_eq!(filled(PolicyTarget::PipelineRun), json!({ "spec": { "execution": { "timeout": "1h" } } }));
    assert_eq!(filled(PolicyTarget::Pipeline), json!({ "spec": {} }));
}

fn defaulting(defaults: &[(&str, Value)]) -> PolicySet {
    let defaults: Vec<Value> =
        defaults.iter().map(|(field, value)| json!({ "field": field, "value": value })).collect();
    let object = json!({ "metadata": { "name": "p" }, "spec": { "appliesTo": ["Pipeline", "PipelineRun"], "defaults": defaults } });
    let policy = Policy::compile(&serde_json::from_value(object).unwrap());
    assert_eq!(policy.problems(), []);
    [policy].into_iter().collect()
}

fn filled(set: &PolicySet, target: PolicyTarget, spec: &Value) -> Value {
    let mut object = json!({ "spec": spec });
    set.fill_in(target, &BTreeMap::new(), &mut object, None);
    let once = object.clone();
    set.fill_in(target, &BTreeMap::new(), &mut object, None);
    assert_eq!(object, once, "the second time changes nothing");
    once["spec"].clone()
}

#[test]
fn a_default_makes_no_object_that_would_lack_what_its_schema_requires() {
    let region = defaulting(&[("spec.sink.bucket.region", json!("eu-central-1"))]);
    let owner = defaulting(&[("spec.source.bucket.credentialsSecret.namespace", json!("shared"))]);
    let secret = defaulting(&[("spec.source.bucket.credentialsSecret.name", json!("keys"))]);
    let timeout = defaulting(&[("spec.execution.timeout", json!("2h"))]);
    let bucket = |more: Value| {
        let mut bucket = json!({ "name": "a" });
        bucket.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        bucket
    };
    let source = |more: Value| json!({ "source": { "bucket": bucket(more) } });
    let sink = |more: Value| json!({ "sink": { "bucket": bucket(more) } });
    let (recipe, run) = (PolicyTarget::Pipeline, PolicyTarget::PipelineRun);
    let keys = |fields: Value| source(json!({ "credentialsSecret": fields }));
    for (set, target, before, after) in [
        (&region, recipe, json!({}), json!({})),
        (&region, recipe, sink(json!({})), sink(json!({ "region": "eu-central-1" }))),
        (&region, recipe, json!({ "sink": {} }), json!({ "sink": {} })),
        (&owner, recipe, source(json!({})), source(json!({}))),
        (&owner, recipe, keys(json!({ "name": "n" })), keys(json!({ "name": "n", "namespace": "shared" }))),
        // These may be created: the default provides everything that they require.
        (&secret, recipe, source(json!({})), keys(json!({ "name": "keys" }))),
        (&timeout, run, json!({}), json!({ "execution": { "timeout": "2h" } })),
    ] {
        assert_eq!(filled(set, target, &before), after, "{before}");
    }
}

#[test]
fn a_default_that_makes_an_object_comes_before_those_that_need_it() {
    let set = defaulting(&[
        ("spec.sink.bucket.region", json!("eu-central-1")),
        ("spec.sink.bucket.credentialsSecret.namespace", json!("shared")),
        ("spec.sink.bucket.credentialsSecret.name", json!("keys")),
        ("spec.sink.bucket.name", json!("results")),
    ]);
    let sink = json!({ "bucket": { "name": "results", "region": "eu-central-1",
        "credentialsSecret": { "name": "keys", "namespace": "shared" } } });
    assert_eq!(filled(&set, PolicyTarget::Pipeline, &json!({})), json!({ "sink": sink }));
}

#[test]
fn a_stored_run_hands_down_no_half_object() {
    let set = defaulting(&[("spec.pipelineRef.namespace", json!("shared"))]);
    let stored = json!({ "spec": { "pipelineRef": { "name": "p", "namespace": "shared" } } });
    let mut object = json!({ "spec": {} });
    set.fill_in(PolicyTarget::PipelineRun, &BTreeMap::new(), &mut object, Some(&stored));
    assert_eq!(object, json!({ "spec": {} }), "what is missing is named by the schema");
}
