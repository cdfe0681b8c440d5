//! Decides about a request: what to fill in, whether to admit, what to warn of. Reads the world, and for credentials
//! asks for one Secret; writes nothing.

mod credentials;
mod delete;
mod evaluate;
mod mutate;
mod validate;

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

pub use credentials::{SecretKeys, Secrets};
pub use evaluate::Evaluator;

use crate::metrics::Metrics;
use crate::review::{Answer, Operation, Request};
use crate::world::World;

/// What an administrator decides.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Networks that endpoints may be in although they are refused by default.
    pub allowed_networks: Vec<IpNet>,
    /// Hosts that endpoints may name although they are refused by default.
    pub allowed_hosts: Vec<String>,
    /// How long the policies of one request may take.
    pub policy_timeout: Duration,
    /// Requests whose policies are evaluated at once.
    pub evaluations: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allowed_networks: Vec::new(),
            allowed_hosts: Vec::new(),
            policy_timeout: Duration::from_secs(1),
            evaluations: 8,
        }
    }
}

/// Answers requests.
pub struct Admission {
    world: Arc<World>,
    secrets: Arc<dyn Secrets>,
    settings: Settings,
    evaluator: Evaluator,
    metrics: Arc<Metrics>,
}

impl Admission {
    /// With what is known of the cluster, and a way to look at Secrets.
    pub fn new(
        world: Arc<World>,
        secrets: Arc<dyn Secrets>,
        settings: Settings,
        metrics: Arc<Metrics>,
    ) -> Self {
        let evaluator = Evaluator::new(settings.evaluations, settings.policy_timeout);
        Self { world, secrets, settings, evaluator, metrics }
    }

    /// What is filled in.
    pub fn mutate(&self, request: &Request) -> Answer {
        mutate::mutate(&self.world, request)
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
