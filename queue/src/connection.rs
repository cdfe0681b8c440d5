//! Connections to Valkey, with TLS, credentials, and time limits on everything. A dead server causes an
//! error, never a hang.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, FromRedisValue, IntoConnectionInfo, Pipeline, TlsCertificates};

use crate::Error;
use crate::error::has_code;
use crate::script::Script;

/// The address of Valkey, and the credentials.
#[derive(Clone, Debug)]
pub struct Server {
    /// `redis://host:port` or, with TLS, `rediss://host:port`.
    pub url: String,
    /// User; the server's default user when absent.
    pub username: Option<String>,
    /// Password of the user.
    pub password: Option<Password>,
    /// CA of the server's certificate, in PEM; the machine's own trust store when absent.
    pub ca_certificate: Option<Vec<u8>>,
    /// How long to wait for a connection, and for each reply.
    pub timeout: Duration,
}

/// A password, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// The password itself, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Password {
    fn from(password: String) -> Self {
        Self(password)
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// Retries of a connection before a call fails, after 0.1 s and 0.2 s with jitter. The number is low, because
/// the caller has its own back-off and must learn that Valkey is down.
const RECONNECT_ATTEMPTS: usize = 2;

impl Server {
    /// A server without TLS and credentials, with a time limit of five seconds.
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            username: None,
            password: None,
            ca_certificate: None,
            timeout: Duration::from_secs(5),
        }
    }

    /// The same server, for another user.
    pub fn with_user(&self, username: impl Into<String>, password: Password) -> Self {
        Self { username: Some(username.into()), password: Some(password), ..self.clone() }
    }

    /// A connection for the operator: shared, multiplexed, and renewed whenever it breaks. The first call
    /// connects.
    pub fn connect(&self) -> Result<Connection, Error> {
        let client = self.client()?;
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(RECONNECT_ATTEMPTS)
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let manager = Connection::manager(&client, &config)?;
        Ok(Connection { client, config, manager: Arc::new(Mutex::new(manager)) })
    }

    /// A separate connection, for a worker: its replies may take up to `longest`, because they wait for a
    /// file.
    pub(crate) async fn connect_blocking(&self, longest: Duration) -> Result<MultiplexedConnection, Error> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(longest + self.timeout));
        let connected = self.client()?.get_multiplexed_async_connection_with_config(&config).await;
        connected.map_err(|error| Error::from_redis("connect", error))
    }

    fn client(&self) -> Result<Client, Error> {
        let unusable = |error: redis::RedisError| Error::Config {
            detail: format!("{error} (write redis://host:port or rediss://host:port)"),
        };
        let info = self.url.as_str().into_connection_info().map_err(unusable)?;
        let mut login = info.redis_settings().clone();
        // URLs are printed, so they must not contain secrets.
        if login.username().is_some() || login.password().is_some() {
            return Err(Error::Config {
                detail: "the URL contains credentials: set user and password separately".into(),
            });
        }
        if let Some(username) = &self.username {
            login = login.set_username(username);
        }
        if let Some(Password(password)) = &self.password {
            login = login.set_password(password);
        }
        let info = info.set_redis_settings(login);
        if !self.url.starts_with("rediss://") {
            return Client::open(info).map_err(unusable);
        }
        // Without a provider, the TLS library would panic during the first call.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            return Err(Error::Config {
                detail: "TLS needs a crypto provider: install one first in main".into(),
            });
        }
        let certificates = TlsCertificates { client_tls: None, root_cert: self.ca_certificate.clone() };
        Client::build_with_tls(info, certificates).map_err(unusable)
    }
}

/// A connection that survives restarts of the server. Clones share it.
#[derive(Clone)]
pub struct Connection {
    client: Client,
    config: ConnectionManagerConfig,
    manager: Arc<Mutex<ConnectionManager>>,
}

impl Connection {
    fn manager(client: &Client, config: &ConnectionManagerConfig) -> Result<ConnectionManager, Error> {
        ConnectionManager::new_lazy_with_config(client.clone(), config.clone())
            .map_err(|error| Error::from_redis("connect", error))
    }

    fn current(&self) -> ConnectionManager {
        self.manager.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The manager reconnects when a connection breaks, but keeps connections that a new one should replace:
    /// those that were refused, get no answers, or lead to a read-only server. They are replaced here.
    fn outcome<T>(&self, doing: &'static str, result: redis::RedisResult<T>) -> Result<T, Error> {
        let source = match result {
            Ok(value) => return Ok(value),
            Err(source) => source,
        };
        let useless = source.is_timeout() || has_code(&source, "READONLY");
        let error = Error::from_redis(doing, source);
        if useless || matches!(error, Error::Denied { .. }) {
            let renewed = Self::manager(&self.client, &self.config)?;
            *self.manager.lock().unwrap_or_else(PoisonError::into_inner) = renewed;
        }
        Err(error)
    }

    pub(crate) async fn command<T: FromRedisValue>(
        &self,
        doing: &'static str,
        command: &redis::Cmd,
    ) -> Result<T, Error> {
        self.outcome(doing, command.query_async(&mut self.current()).await)
    }

    pub(crate) async fn pipeline<T: FromRedisValue>(
        &self,
        doing: &'static str,
        pipeline: &Pipeline,
    ) -> Result<T, Error> {
        self.outcome(doing, pipeline.query_async(&mut self.current()).await)
    }

    pub(crate) async fn script(
        &self,
        script: Script,
        keys: &[&str],
        arguments: &[Vec<u8>],
    ) -> Result<redis::Value, Error> {
        let code = script.code();
        let mut call = code.prepare_invoke();
        for key in keys {
            call.key(*key);
        }
        for argument in arguments {
            call.arg(argument.as_slice());
        }
        self.outcome(script.doing(), call.invoke_async(&mut self.current()).await)
    }
}
