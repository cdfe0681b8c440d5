//! The messages between the API server and the webhook: `AdmissionReview` of `admission.k8s.io/v1`.
//!
//! Objects stay JSON: they must be checked as users wrote them, even if they do not fit the types.

use crds::rules::Kind;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use strum::Display;

const API_VERSION: &str = "admission.k8s.io/v1";

/// The API server truncates a warning after 256 characters, and drops everything beyond 4,096 in total.
const WARNING_MAX: usize = 256;
const WARNINGS_MAX: usize = 4096;

/// Users read rejections in a terminal, and of a longer list they would fix the first mistakes first.
const REASONS_MAX: usize = 20;

/// The question of the API server.
#[derive(Clone, Debug)]
pub struct Request {
    /// Identifies the question; the answer repeats it.
    pub uid: String,
    /// Kind of the object.
    pub kind: Kind,
    /// The operation on the object.
    pub operation: Operation,
    /// Namespace of the object; empty if it has none.
    pub namespace: String,
    /// Name of the object; empty if it is yet to be generated.
    pub name: String,
    /// Whether nothing will be stored.
    pub dry_run: bool,
    /// The new object; null on a deletion.
    pub object: Value,
    /// The stored object; null on a creation.
    pub old_object: Value,
    /// The request without the objects, as policies see it.
    pub about: Value,
}

/// An operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Display)]
#[serde(rename_all = "UPPERCASE")]
#[strum(serialize_all = "UPPERCASE")]
#[allow(missing_docs)]
pub enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

/// The reason why a request body cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// Not JSON, or not a review.
    #[error("cannot read the AdmissionReview: {0}")]
    Unreadable(String),
    /// A review of another version.
    #[error("apiVersion is {0:?}, but only {API_VERSION} is supported")]
    Version(String),
    /// The object's kind is not part of this API, or not the one of the endpoint.
    #[error("it is about {found:?}, and this endpoint is for {expected}")]
    Kind {
        /// The kind of the object.
        found: String,
        /// The kind of the endpoint.
        expected: Kind,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    request: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Fields {
    uid: String,
    kind: GroupVersionKind,
    operation: Operation,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    dry_run: bool,
}

#[derive(Deserialize)]
struct GroupVersionKind {
    group: String,
    kind: String,
}

impl Request {
    /// Parses a question that arrived at the endpoint for the kind `expected`.
    pub fn read(body: &[u8], expected: Kind) -> Result<Self, Malformed> {
        let unreadable = |error: serde_json::Error| Malformed::Unreadable(error.to_string());
        let Review { api_version, request: mut fields } = serde_json::from_slice(body).map_err(unreadable)?;
        if api_version != API_VERSION {
            return Err(Malformed::Version(api_version));
        }
        let object = fields.remove("object").unwrap_or_default();
        let old_object = fields.remove("oldObject").unwrap_or_default();
        let about = Value::Object(fields);
        let Fields { uid, kind: GroupVersionKind { group, kind }, operation, namespace, name, dry_run } =
            Fields::deserialize(&about).map_err(unreadable)?;
        if group != "filter.plainsight.ai" || kind != expected.to_string() {
            return Err(Malformed::Kind { found: format!("{group}/{kind}"), expected });
        }
        // A request that deletes a collection names none of the objects, and the webhook is asked about each
        // one separately.
        let old_name = old_object.pointer("/metadata/name").and_then(Value::as_str);
        let name = if name.is_empty() { old_name.unwrap_or_default().to_owned() } else { name };
        Ok(Self { uid, kind: expected, operation, namespace, name, dry_run, object, old_object, about })
    }

    /// The object's name in messages.
    pub fn title(&self) -> String {
        let Self { kind, namespace, name, .. } = self;
        match (namespace.as_str(), name.as_str()) {
            ("", name) => format!("{kind} {name:?}"),
            (namespace, "") => format!("{kind} in {namespace:?}"),
            (namespace, name) => format!("{kind} \"{namespace}/{name}\""),
        }
    }
}

/// The answer of the webhook.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The reasons for a rejection; if empty, the object is admitted.
    pub reasons: Vec<String>,
    /// The rejection is about a policy, not about a mistake.
    pub forbidden: bool,
    /// Warnings to the user, whether the object is admitted or not.
    pub warnings: Vec<String>,
    /// Changes to the object.
    pub patch: Option<json_patch::Patch>,
}

impl Answer {
    /// Admits the object unchanged.
    pub fn allow() -> Self {
        Self::default()
    }

    /// Refuses the object for one reason.
    pub fn deny(reason: impl Into<String>) -> Self {
        Self { reasons: vec![reason.into()], ..Self::default() }
    }

    /// Whether the object is admitted.
    pub fn allowed(&self) -> bool {
        self.reasons.is_empty()
    }

    /// The review to send back. `title` names the object in a rejection.
    ///
    /// A refused change is Forbidden, never Invalid: Flux with `force: true` and `kubectl apply --force`
    /// delete an object whose change is Invalid and create it again, which would execute a run twice, or
    /// leave nothing if the new object is refused as well.
    pub fn into_review(self, uid: &str, title: &str, operation: Operation) -> Value {
        let Self { reasons, forbidden, warnings, patch } = self;
        let mut response = json!({ "uid": uid, "allowed": reasons.is_empty() });
        if !reasons.is_empty() {
            let (code, reason) = match operation {
                Operation::Create if !forbidden => (422, "Invalid"),
                Operation::Create | Operation::Update | Operation::Delete | Operation::Connect => {
                    (403, "Forbidden")
                }
            };
            response["status"] =
                json!({ "code": code, "reason": reason, "message": rejection(title, &reasons, forbidden) });
        }
        if let Some(patch) = patch.filter(|patch| reasons.is_empty() && !patch.0.is_empty()) {
            // A patch is a list of plain values, so it can always be serialized.
            let text = serde_json::to_vec(&patch).unwrap_or_default();
            response["patch"] = json!(k8s_openapi::ByteString(text));
            response["patchType"] = json!("JSONPatch");
        }
        let warnings = bounded(warnings);
        if !warnings.is_empty() {
            response["warnings"] = json!(warnings);
        }
        json!({ "apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response })
    }
}

fn rejection(title: &str, reasons: &[String], forbidden: bool) -> String {
    let what = if forbidden { "is not allowed" } else { "is not valid" };
    let shown = reasons.iter().take(REASONS_MAX).map(|reason| format!("\n  {reason}")).collect::<String>();
    match reasons.len().saturating_sub(REASONS_MAX) {
        0 => format!("{title} {what}:{shown}"),
        more => format!("{title} {what}:{shown}\n  and {more} more"),
    }
}

/// Truncates each warning to its limit, and keeps as many as there is room for.
fn bounded(warnings: Vec<String>) -> Vec<String> {
    const MORE: usize = 32;
    let (mut kept, mut room, all) = (Vec::new(), WARNINGS_MAX - MORE, warnings.len());
    for warning in warnings {
        let short = shorten(&warning);
        if short.len() > room {
            kept.push(format!("and {} more warnings", all - kept.len()));
            break;
        }
        room -= short.len();
        kept.push(short);
    }
    kept
}

fn shorten(warning: &str) -> String {
    // The header that carries warnings must not contain control characters.
    let line: String = warning.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.len() <= WARNING_MAX {
        return line;
    }
    // The id at the end leads to the rule, so it stays, unless it leaves no room: names of policies are long.
    let (text, id) = match line.rfind(" [").filter(|_| line.ends_with(']')).map(|at| line.split_at(at)) {
        Some((text, id)) if id.len() <= WARNING_MAX / 2 => (text, id),
        Some(_) | None => (line.as_str(), ""),
    };
    let end = text.floor_char_boundary(WARNING_MAX - '…'.len_utf8() - id.len());
    format!("{}…{id}", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn review(change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let mut review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "operation": "CREATE", "namespace": "team-a", "name": "monday", "dryRun": true,
                "kind": { "group": "filter.plainsight.ai", "version": "v1alpha1", "kind": "PipelineRun" },
                "userInfo": { "username": "kim" }, "object": { "a": 1 }, "oldObject": null
            }
        });
        change(&mut review);
        serde_json::to_vec(&review).unwrap()
    }

    #[test]
    fn a_review_is_read_and_policies_see_the_request_without_its_objects() {
        let request = Request::read(&review(|_| {}), Kind::PipelineRun).unwrap();
        assert_eq!((request.operation, request.dry_run), (Operation::Create, true));
        assert_eq!(request.object, json!({ "a": 1 }));
        assert_eq!(request.about["userInfo"]["username"], "kim");
        assert_eq!(request.about.get("object"), None);
        assert_eq!(request.title(), "PipelineRun \"team-a/monday\"");
    }

    #[test]
    fn what_is_deleted_with_others_is_named_by_the_object_that_is_there() {
        let body = review(|review| {
            review["request"]["operation"] = json!("DELETE");
            review["request"]["name"] = json!("");
            review["request"]["oldObject"] = json!({ "metadata": { "name": "tuesday" } });
        });
        assert_eq!(Request::read(&body, Kind::PipelineRun).unwrap().name, "tuesday");
    }

    #[test]
    fn what_is_not_a_review_is_refused_with_the_reason() {
        let read = |body: &[u8]| Request::read(body, Kind::PipelineRun).unwrap_err().to_string();
        assert!(read(b"not json").contains("read the AdmissionReview"));
        assert!(read(b"{}").contains("apiVersion"));
        assert!(
            read(&review(|review| review["apiVersion"] = json!("admission.k8s.io/v1beta1")))
                .contains("v1beta1")
        );
        assert!(read(&review(|review| review["request"]["uid"] = json!(5))).contains("string"));
        assert!(read(&review(|review| review["request"]["operation"] = json!("EAT"))).contains("EAT"));
        assert!(read(&review(|review| review["request"]["kind"]["kind"] = json!("Pod"))).contains("Pod"));
        assert!(read(&review(|review| review["request"] = json!(null))).contains("null"));
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(read(deep.as_bytes()).contains("recursion") || read(deep.as_bytes()).contains("expected"));
    }

    #[test]
    fn warnings_stay_within_the_limits_of_the_api_server() {
        let many = vec!["ä".repeat(300); 40];
        let warnings = bounded(many);
        assert!(warnings.iter().all(|warning| warning.len() <= WARNING_MAX));
        assert!(warnings.iter().map(String::len).sum::<usize>() <= WARNINGS_MAX);
        assert!(
            warnings.last().is_some_and(|last| last.starts_with("and ") && last.ends_with("more warnings"))
        );
        assert_eq!(bounded(vec!["a\nb".into()]), ["a b"]);
    }

    #[test]
    fn a_warning_that_is_cut_keeps_the_id_of_its_rule() {
        let long = |id: &str| format!("spec.pipelineRef: {} [{id}]", "ä".repeat(300));
        for id in ["reference-grant", "policy platform/registry"] {
            let short = shorten(&long(id));
            assert!(
                short.starts_with("spec.pipelineRef: ää") && short.ends_with(&format!("ä… [{id}]")),
                "{short}"
            );
            assert!((WARNING_MAX - 1..=WARNING_MAX).contains(&short.len()), "{}", short.len());
        }
        assert_eq!(shorten("a [b]"), "a [b]");
        // Without room for both, the text says more than a part of the id.
        let short = shorten(&long(&"p".repeat(200)));
        assert!(short.starts_with("spec.pipelineRef: ää") && short.ends_with("ä…"), "{short}");
        assert!(shorten(&long("a").replace(']', "")).ends_with('…'));
    }

    #[test]
    fn a_rejection_names_the_object_and_every_reason_up_to_a_limit() {
        let answer = Answer { reasons: vec!["x".into(); 25], ..Answer::default() };
        let review = answer.into_review("u", "Pipeline \"a/b\"", Operation::Create);
        assert_eq!(review["response"]["uid"], "u");
        assert_eq!(review["response"]["allowed"], false);
        assert_eq!(review["response"]["status"]["code"], 422);
        let message = review["response"]["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("Pipeline \"a/b\" is not valid:\n  x\n  x"), "{message}");
        assert!(message.ends_with("and 5 more"), "{message}");
    }

    #[test]
    fn a_refused_change_is_forbidden_so_that_no_engine_creates_the_object_again() {
        let status = |operation| {
            Answer::deny("x").into_review("u", "PipelineRun \"a/b\"", operation)["response"]["status"].clone()
        };
        assert_eq!(status(Operation::Create)["reason"], "Invalid");
        assert_eq!(status(Operation::Update)["reason"], "Forbidden");
        assert_eq!(status(Operation::Update)["code"], 403);
    }
}
