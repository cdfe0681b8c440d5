//! Decides about a request: which defaults to add, whether to admit it, and what to warn about. Reads the
//! world, and asks the API server for single objects that no watch has delivered yet; writes nothing.

mod credentials;
mod delete;
mod evaluate;
mod live;
mod mutate;
mod validate;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

pub use evaluate::Evaluator;
pub use live::{Live, Lookup};

use crate::metrics::Metrics;
use crate::review::{Answer, Operation, Request};
use crate::world::{KnownNamespace, World};

/// The settings of an administrator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Networks that endpoints may use although they are refused by default.
    pub allowed_networks: Vec<IpNet>,
    /// Hosts that endpoints may use although they are refused by default.
    pub allowed_hosts: Vec<String>,
    /// How long the policies of one request may take.
    pub policy_timeout: Duration,
    /// How many requests may have their policies evaluated at once.
    pub evaluations: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allowed_networks: Vec::new(),
            allowed_hosts: Vec::new(),
            policy_timeout: Duration::from_secs(1),
            // Evaluation is pure computation: more evaluations than processors only slow each other down.
            // There is one more slot than processors, because a namespace gets all slots but one: it can use
            // every processor, and others still find a slot.
            evaluations: std::thread::available_parallelism().map_or(2, |cores| cores.get() + 1),
        }
    }
}

/// Answers requests.
pub struct Admission {
    world: Arc<World>,
    live: Arc<dyn Live>,
    settings: Settings,
    evaluator: Evaluator,
    metrics: Arc<Metrics>,
}

impl Admission {
    /// Creates it from the known state of the cluster and a way to ask for more.
    pub fn new(world: Arc<World>, live: Arc<dyn Live>, settings: Settings, metrics: Arc<Metrics>) -> Self {
        let evaluator = Evaluator::new(settings.evaluations, settings.policy_timeout);
        Self { world, live, settings, evaluator, metrics }
    }

    /// Adds defaults, or refuses an object that is invalid on its own.
    ///
    /// The API server asks this before it checks the object against schema and CEL rules, whose messages are
    /// terser: a refusal here explains all mistakes at once, in our words. Policies, Secrets and runIds wait
    /// for [`Self::validate`], because other webhooks may still change the object.
    pub async fn mutate(&self, mut request: Request) -> Answer {
        let namespace = match self.namespace(&request.namespace).await {
            Ok(namespace) => namespace,
            Err(problem) => return Answer::deny(problem),
        };
        // An object that was admitted long ago is judged again only if its author changes it: defaults alone
        // may neither make the difference nor, in a manifest that leaves them out, undo it.
        let written = validate::changes_spec(&request);
        let Some(patch) = mutate::fill_in(&self.world.policies(), &namespace, &mut request) else {
            return Answer::allow();
        };
        let judged = written && validate::changes_spec(&request);
        let answer = if judged { self.judge_alone(request).await } else { Answer::allow() };
        Answer { patch: Some(patch), ..answer }
    }

    /// The namespace of a request. If the watch has not delivered it yet, the API server is asked: without
    /// its labels, the policies that select the namespace would not apply to objects created in its first
    /// moments.
    async fn namespace(&self, name: &str) -> Result<Arc<KnownNamespace>, String> {
        if let Some(known) = self.world.namespace(name) {
            return Ok(known);
        }
        let missing = || KnownNamespace::new(name, BTreeMap::new(), BTreeMap::new());
        if name.is_empty() {
            return Ok(Arc::new(missing()));
        }
        match self.live.namespace(name).await {
            Ok(found) => Ok(Arc::new(found.unwrap_or_else(missing))),
            Err(error) => Err(format!("the namespace {name:?} could not be read ({error}); try again")),
        }
    }

    /// Whether the object is admitted.
    pub async fn validate(&self, request: Request) -> Answer {
        match request.operation {
            Operation::Create | Operation::Update => self.judge(request).await,
            Operation::Delete => {
                Answer { warnings: delete::warnings(&self.world.read(), &request), ..Answer::allow() }
            }
            Operation::Connect => Answer::allow(),
        }
    }
}
