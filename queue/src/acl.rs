//! One Valkey user per run, for its workers: it reads the inboxes of the run's pods. If each pod processes a
//! single file, the user cannot write at all, so that no worker can fill the server. If pods process many
//! files, they write their reports into one hash, whose size the operator checks before it reads it. The
//! server forgets users that were created at run time when it restarts, so the operator restores them.

use std::collections::{BTreeSet, HashMap};

use protocol::RunId;
use redis::{FromRedisValue, Value};
use sha2::{Digest, Sha256};

use crate::connection::{Connection, Password};
use crate::{Error, QueueKeys, RunQueue, random};

/// The rights of a worker: to read its inbox, and to ping the server. `XREADGROUP` is excluded: it takes a
/// name of the caller's choice, which the server stores beyond its `maxmemory` and repeats in its log for
/// every file.
const CLAIM: &[&str] = &["-@all", "+xread", "+ping"];
/// The same rights, and the right to report on files.
const SERVE: &[&str] = &["-@all", "+xread", "+hset", "+ping"];

/// The work that a run's workers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Each worker reads the single file that it was given.
    Claim,
    /// Each worker reads many files, and reports on them.
    Serve,
}

/// The Valkey user of a run's workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerUser {
    /// Name of the user.
    pub name: String,
    /// Its password, which is stored in a Secret of the run.
    pub password: Password,
    keys: Vec<String>,
    commands: &'static [&'static str],
}

/// The result of `ensure`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ensured {
    /// The user existed, exactly as intended.
    Present,
    /// The user was missing or different, and is now as intended.
    Restored,
}

impl WorkerUser {
    /// A user with a new random password. It does not exist until `ensure` creates it.
    pub fn generate(run: &RunId, owner: &str, rights: Rights) -> Result<Self, Error> {
        let password = format!("{}{}", random::hex()?, random::hex()?);
        Ok(Self::with_password(run, owner, rights, password.into()))
    }

    /// The user of a run whose password was generated before.
    pub fn with_password(run: &RunId, owner: &str, rights: Rights, password: Password) -> Self {
        let all = QueueKeys::of(run);
        let mut keys = vec![format!("%R~{}", all.inbox("*"))];
        let commands = match rights {
            Rights::Claim => CLAIM,
            Rights::Serve => {
                keys.push(format!("%W~{}", all.states));
                SERVE
            }
        };
        Self { name: Self::name_of(run, owner), password, keys, commands }
    }

    /// The name contains the owner's UID, so that an object that claims another object's runId, and is
    /// refused, cannot get hold of the workers' user.
    fn name_of(run: &RunId, owner: &str) -> String {
        format!("openfilter:{run}:{owner}")
    }

    /// Creates the user if it is missing, and corrects it if it differs.
    pub async fn ensure(&self, connection: &Connection) -> Result<Ensured, Error> {
        if self.is_present(connection).await? {
            return Ok(Ensured::Present);
        }
        let mut command = redis::cmd("ACL");
        // `reset` comes first, to remove all previous rights. The password is sent as a hash, so that it
        // shows neither in MONITOR nor in the slow log.
        command
            .arg("SETUSER")
            .arg(&self.name)
            .arg("reset")
            .arg("on")
            .arg(format!("#{}", self.password_hash()));
        command.arg(&self.keys).arg(self.commands);
        connection.command::<Value>("create the user of the run's workers", &command).await?;
        Ok(Ensured::Restored)
    }

    /// Whether the user exists with exactly this password and these rights.
    pub async fn is_present(&self, connection: &Connection) -> Result<bool, Error> {
        const DOING: &str = "verify the user of the run's workers";
        let mut command = redis::cmd("ACL");
        command.arg("GETUSER").arg(&self.name);
        let Some(user) = connection.command::<Option<HashMap<String, Value>>>(DOING, &command).await? else {
            return Ok(false);
        };
        fn field<T: FromRedisValue + Default>(user: &HashMap<String, Value>, name: &str) -> Result<T, Error> {
            user.get(name).map_or_else(
                || Ok(T::default()),
                |value| {
                    T::from_redis_value_ref(value)
                        .map_err(|error| Error::reply(DOING, format!("{name}: {error}")))
                },
            )
        }
        let flags: BTreeSet<String> = field(&user, "flags")?;
        let commands: String = field(&user, "commands")?;
        Ok(flags.contains("on")
            && !flags.contains("nopass")
            && field::<Vec<String>>(&user, "passwords")? == [self.password_hash()]
            && commands.split_whitespace().collect::<BTreeSet<_>>()
                == self.commands.iter().copied().collect()
            && field::<String>(&user, "keys")? == self.keys.join(" ")
            && field::<String>(&user, "channels")?.is_empty()
            && field::<Vec<Value>>(&user, "selectors")?.is_empty())
    }

    /// Removes the user of a run, ends its connections, and then removes the reports that it wrote. The user
    /// may already be gone.
    pub async fn remove(connection: &Connection, run: &RunId, owner: &str) -> Result<(), Error> {
        let mut command = redis::cmd("ACL");
        command.arg("DELUSER").arg(Self::name_of(run, owner));
        connection.command::<u64>("remove the user of the run's workers", &command).await?;
        RunQueue::forget_reports(connection, run, owner).await
    }

    fn password_hash(&self) -> String {
        random::to_hex(&Sha256::digest(self.password.reveal()))
    }
}
